//! The reader and `verify` against recorded verdicts of an independent strict reader (fixtures/rad-container).

use std::path::PathBuf;

use radpack::artifact::verify::Options;
use radpack::artifact::{Artifact, Layout, verify};
use rayon::prelude::*;

fn fixture(name: &str) -> Vec<u8> {
    let path: PathBuf =
        [env!("CARGO_MANIFEST_DIR"), "fixtures", "rad-container", name].iter().collect();
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn hex(text: &str) -> u64 {
    u64::from_str_radix(text, 16).expect("hex number")
}

/// Applies one patch: `OFFSET:HEX`, `OFFSET:HEX+ZEROS` or `OFFSET@FROM+LENGTH`.
fn apply(patch: &str, base: &[u8], file: &mut [u8]) {
    let (offset, bytes) = if let Some((offset, copy)) = patch.split_once('@') {
        let (from, len) = copy.split_once('+').expect("from+length");
        let from = hex(from) as usize;
        (offset, base[from..from + hex(len) as usize].to_vec())
    } else {
        let (offset, rest) = patch.split_once(':').expect("offset:hex");
        let (digits, zeros) = rest.split_once('+').unwrap_or((rest, "0"));
        let mut bytes: Vec<u8> =
            (0..digits.len()).step_by(2).map(|i| hex(&digits[i..i + 2]) as u8).collect();
        bytes.resize(bytes.len() + hex(zeros) as usize, 0);
        (offset, bytes)
    };
    for (i, b) in bytes.into_iter().enumerate() {
        if let Some(slot) = file.get_mut(hex(offset) as usize + i) {
            *slot = b;
        }
    }
}

/// What the reader and `verify` say, in the fixture's notation.
fn verdict(bytes: &[u8]) -> String {
    match Artifact::from_bytes(bytes) {
        Err(refused) => format!("!{}", refused.field),
        Ok(artifact) => {
            let faults =
                |any_order| u8::from(!verify(&artifact, Options { any_order }).faults.is_empty());
            let (ordered, any) = (faults(false), faults(true));
            // What has no faults can be written again.
            let contents = artifact.contents();
            let planned = contents.as_ref().map(|c| Layout::plan(c).map(|l| l.entries()));
            if any == 0 && planned != Some(Ok(artifact.len())) {
                return format!("clean, but {planned:?}");
            }
            format!("={ordered}{any}")
        }
    }
}

#[test]
fn reader_and_verify_agree_with_an_independent_reader_on_every_mutant() {
    let bases = [fixture("golden.rad"), fixture("golden_full.rad")];
    let text = String::from_utf8(fixture("mutants.txt")).expect("UTF-8");
    let lines: Vec<&str> = text.lines().filter(|l| !l.starts_with('#')).collect();
    assert!(lines.len() > 7000, "{} mutants", lines.len());
    let wrong: Vec<String> = lines
        .par_iter()
        .filter_map(|line| {
            let mut words = line.splitn(4, ' ');
            let mut word = || words.next().expect("four columns");
            let (base, size, patches, want) = (word(), word(), word(), word());
            let base = &bases[hex(base) as usize];
            let mut file = base.clone();
            if size != "-" {
                file.resize(hex(size) as usize, 0);
            }
            for patch in patches.split(',').filter(|p| *p != "-") {
                apply(patch, base, &mut file);
            }
            let found = verdict(&file);
            (found != want).then(|| format!("{found}, not {want}: {line:.200}"))
        })
        .collect();
    let shown = wrong.iter().take(20).cloned().collect::<Vec<_>>().join("\n");
    assert!(wrong.is_empty(), "{} of {} differ:\n{shown}", wrong.len(), lines.len());
}

/// A file of radpack's own for one device, without its checks of what lies under `radpack/`.
#[test]
fn the_reader_agrees_with_an_independent_one_on_mutants_of_a_file_that_radpack_wrote() {
    let folder: PathBuf = [env!("CARGO_MANIFEST_DIR"), "fixtures", "rad", "v1"].iter().collect();
    let part = |name: &str| std::fs::read(folder.join(name)).expect(name);
    let mut base = part("llama-int8.tables.bin");
    base.resize(base.len().next_multiple_of(2 << 20), 0);
    base.extend(part("llama-int8.data.bin"));
    let text = String::from_utf8(part("mutants.txt")).expect("UTF-8");
    let lines: Vec<&str> = text.lines().filter(|l| !l.starts_with('#')).collect();
    assert!(lines.len() > 2500, "{} mutants", lines.len());
    let wrong: Vec<String> = lines
        .par_iter()
        .filter_map(|line| {
            let mut words = line.splitn(3, ' ');
            let mut word = || words.next().expect("three columns");
            let (size, patches, want) = (word(), word(), word());
            let mut file = base.clone();
            patches.split(',').for_each(|patch| apply(patch, &base, &mut file));
            if size != "-" {
                file.resize(hex(size) as usize, 0);
            }
            let found = match Artifact::from_bytes(&file) {
                Err(refused) => format!("!{}", refused.field),
                Ok(_) => "=".to_owned(),
            };
            (found != want).then(|| format!("{found}, not {want}: {line:.200}"))
        })
        .collect();
    let shown = wrong.iter().take(20).cloned().collect::<Vec<_>>().join("\n");
    assert!(wrong.is_empty(), "{} of {} differ:\n{shown}", wrong.len(), lines.len());
}

#[test]
fn goldens_are_clean_and_cuts_of_them_are_refused() {
    assert_eq!(verdict(&fixture("golden.rad")), "=00");
    assert_eq!(verdict(&fixture("golden_full.rad")), "=10", "its rows are in no canonical order");
    let golden = fixture("golden.rad");
    for len in (0..golden.len()).step_by(64) {
        let refused = Artifact::from_bytes(&golden[..len]).expect_err("cut").field;
        assert_eq!(refused, if len < 248 { "size" } else { "file_bytes" }, "{len}");
    }
}
