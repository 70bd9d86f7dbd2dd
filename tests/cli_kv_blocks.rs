//! `radpack set-kv-blocks` with the real binary.

mod cli_support;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use cli_support::{dense, radpack, sha256, succeeds};
use radpack::artifact::manifest::Manifest;
use radpack::artifact::{Artifact, digests, layout, patch};
use radpack::hash;
use serde_json::Value;
use tempfile::tempdir;

/// A file of 16 blocks of 64 tokens a sequence, for four sequences on devices with 16 GiB.
fn convert(folder: &Path, devices: &str) {
    let model = dense().to_str().expect("UTF-8").to_owned();
    let sets = ["graphs.max_seq_len=1024", "graphs.batch_size=4"];
    let mut args = vec!["convert", &model, "--recipe", "w8a16", "--target", "cpu", "-o", "t.rad"];
    args.extend(["--devices", devices]);
    args.extend(sets.iter().flat_map(|set| ["--set", set]));
    succeeds(folder, &args);
}

fn set(folder: &Path, blocks: &str) -> cli_support::Ran {
    radpack(folder, &["set-kv-blocks", "t.rad", blocks])
}

fn blocks(folder: &Path) -> Option<u64> {
    let artifact = Artifact::open(&folder.join("t.rad")).expect("it opens");
    let entry = artifact.find(layout::MANIFEST_ENTRY).expect("a manifest");
    Manifest::parse(entry.plane(0)).expect("it reads").graphs.expect("programs").kv.blocks
}

#[test]
fn the_number_is_set_in_place_and_every_digest_with_it() {
    for devices in ["1", "4"] {
        let tmp = tempdir().expect("a folder");
        convert(tmp.path(), devices);
        let file = tmp.path().join("t.rad");
        let converted = std::fs::read(&file).expect("it reads");
        assert_eq!(blocks(tmp.path()), None);
        let ran = set(tmp.path(), "36");
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let digest = digests::hex(
            &digests::from_hex(
                Artifact::open(&file)
                    .expect("it opens")
                    .meta_text(layout::DIGEST_KEY)
                    .expect("a digest")
                    .bytes(),
            )
            .expect("hex"),
        );
        assert_eq!(
            ran.stdout,
            format!(
                "cache     36 blocks · 2,304 tokens (before: left to the engine)\n\
                 limits    17 minimum, 64 full · 64 fit cpu\n\
                 digest    sha256:{digest}\n"
            )
        );
        assert_eq!(blocks(tmp.path()), Some(36));
        let first = std::fs::read(&file).expect("it reads");
        assert_eq!(first.len(), converted.len());
        // Only the manifest, the list of digests and the root digest differ.
        let artifact = Artifact::from_bytes(&converted).expect("it opens");
        let place = |name: &str| {
            let at = artifact.find(name).expect("an entry").planes().next().expect("a plane");
            at.offset as usize..(at.offset + at.bytes) as usize
        };
        let root = artifact.meta_text(layout::DIGEST_KEY).expect("a digest").bytes();
        let root = converted.windows(64).position(|w| w == root).expect("its place");
        let places = [place(layout::MANIFEST_ENTRY), place(layout::DIGESTS_ENTRY), root..root + 64];
        let differ = (0..first.len()).filter(|i| first[*i] != converted[*i]);
        let outside: Vec<usize> =
            differ.filter(|i| places.iter().all(|p| !p.contains(i))).collect();
        assert!(outside.is_empty(), "{outside:?}");
        let model = dense().to_str().expect("UTF-8").to_owned();
        let valid = succeeds(tmp.path(), &["validate", "t.rad", "--against", &model]);
        assert!(valid.stdout.contains("valid"), "{}", valid.stdout);
        // It is no longer what a conversion writes, byte for byte, and the check says why.
        let mut check = vec!["convert", &model, "--recipe", "w8a16", "--target", "cpu"];
        check.extend(["--devices", devices, "--set", "graphs.max_seq_len=1024"]);
        check.extend(["--set", "graphs.batch_size=4", "--check", "t.rad"]);
        let ran = radpack(tmp.path(), &check);
        assert_eq!(ran.code, 4, "{}", ran.stdout);
        assert!(ran.stderr.contains("36 cache blocks were set"), "{}", ran.stderr);
        assert!(ran.stderr.contains("1 problem"), "{}", ran.stderr);
        // Other numbers, shorter and longer, and back again.
        for n in ["64", "17", "36"] {
            assert_eq!(set(tmp.path(), n).code, 0, "{n}");
            succeeds(tmp.path(), &["validate", "t.rad"]);
        }
        assert!(std::fs::read(&file).expect("it reads") == first, "36 again gives the bytes of 36");
        assert_eq!(set(tmp.path(), "0").code, 0);
        assert!(
            std::fs::read(&file).expect("it reads") == converted,
            "none again gives the converted bytes"
        );
        succeeds(tmp.path(), &check);
        assert!(!tmp.path().join("t.rad.kv-blocks.partial").exists());
    }
}

#[test]
fn numbers_outside_the_limits_are_refused_and_change_nothing() {
    let tmp = tempdir().expect("a folder");
    convert(tmp.path(), "1");
    let before = sha256(&tmp.path().join("t.rad"));
    for (n, wanted) in [
        ("16", "16 cache blocks; the programs need 17"),
        ("65", "65 cache blocks; 64 hold all sequences at full length, more are never used"),
    ] {
        let ran = set(tmp.path(), n);
        assert_eq!(ran.code, 3, "{}", ran.stdout);
        assert!(ran.stderr.contains(wanted), "{}", ran.stderr);
        assert!(ran.stderr.contains("17 to 64 blocks work"), "{}", ran.stderr);
    }
    // The memory is a limit too: what estimate-kv says fits.
    let tight = ["--memory-budget", "4000KB"];
    let ran = radpack(tmp.path(), &[&["estimate-kv", "t.rad", "--json"], &tight[..]].concat());
    let fit = match ran.code {
        0 => {
            let document: Value = serde_json::from_str(&ran.stdout).expect("one document");
            document["estimate"]["blocks"].as_u64().expect("blocks")
        }
        code => panic!("{code}: {}", ran.stderr),
    };
    assert!((17..64).contains(&fit), "{fit}");
    let more = (fit + 1).to_string();
    let ran = radpack(tmp.path(), &[&["set-kv-blocks", "t.rad", &more], &tight[..]].concat());
    assert_eq!(ran.code, 3, "{}", ran.stdout);
    let wanted = format!("{more} cache blocks; the memory of cpu has room for {fit}");
    assert!(ran.stderr.contains(&wanted), "{}", ran.stderr);
    assert!(ran.stderr.contains(&format!("17 to {fit} blocks work")), "{}", ran.stderr);
    assert_eq!(sha256(&tmp.path().join("t.rad")), before);
    let fits = fit.to_string();
    let ran =
        radpack(tmp.path(), &[&["set-kv-blocks", "t.rad", &fits, "--json"], &tight[..]].concat());
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let document: Value = serde_json::from_str(&ran.stdout).expect("one document");
    assert_eq!((document["blocks"].as_u64(), document["before"].as_u64()), (Some(fit), None));
    assert_eq!(document["schema"], "radpack.set-kv-blocks");
    // An estimate of the file says what it was set to.
    let ran = succeeds(tmp.path(), &["estimate-kv", "t.rad"]);
    assert!(
        ran.stdout.contains(&format!("set          {fit} blocks, fewer than fit")),
        "{}",
        ran.stdout
    );
    let ran = succeeds(tmp.path(), &["inspect", "t.rad", "--graphs"]);
    assert!(ran.stdout.contains(&format!("{fit} set")), "{}", ran.stdout);
    let ran = succeeds(tmp.path(), &["explain", "t.rad", "--batch", "2", "--prompt", "100"]);
    let left = format!("set       {} of {fit} blocks are left over", fit - 4);
    assert!(ran.stdout.contains(&left), "{}", ran.stdout);
    // Exported programs get a cache of that size, where nothing else is asked for.
    let exported = |out: &str, more: &[&str]| -> Option<u64> {
        let export = ["export", "t.rad", "--format", "stablehlo", "-o", out];
        succeeds(tmp.path(), &[&export[..], more].concat());
        let text = std::fs::read_to_string(tmp.path().join(out).join("stablehlo.json"));
        let document: Value = serde_json::from_str(&text.expect("a document")).expect("JSON");
        document["kv_blocks"].as_u64()
    };
    assert_eq!(exported("a", &[]), Some(fit));
    assert_eq!(exported("b", &["--kv-blocks", "20"]), Some(20));
}

#[test]
fn a_number_outside_the_limits_is_told_by_validate() {
    let tmp = tempdir().expect("a folder");
    convert(tmp.path(), "1");
    let file = tmp.path().join("t.rad");
    // What no run of radpack writes: 5 blocks, sealed with sound digests.
    let mut bytes = std::fs::read(&file).expect("it reads");
    let artifact = Artifact::from_bytes(&bytes).expect("it opens");
    let place = |name: &str| {
        let at = artifact.find(name).expect("an entry").planes().next().expect("a plane");
        at.offset as usize..(at.offset + at.bytes) as usize
    };
    let (manifest, list) = (place(layout::MANIFEST_ENTRY), place(layout::DIGESTS_ENTRY));
    let root = artifact.meta_text(layout::DIGEST_KEY).expect("a digest").bytes().to_vec();
    let root_at = bytes.windows(64).position(|w| w == root).expect("its place");
    let mut document = Manifest::parse(&bytes[manifest.clone()]).expect("it reads");
    document.graphs.as_mut().expect("programs").kv.blocks = Some(5);
    let mut digests =
        digests::decode(&bytes[list.clone()], &digests::from_hex(&root).expect("hex"))
            .expect("it reads");
    let text = document.to_bytes();
    for digest in digests.iter_mut().filter(|d| d.name == layout::MANIFEST_ENTRY) {
        digest.sha256 = hash::sha256([text.as_slice()]);
    }
    let encoded = digests::encode(&digests);
    bytes[manifest].copy_from_slice(&text);
    bytes[root_at..root_at + 64]
        .copy_from_slice(digests::hex(&hash::sha256([encoded.as_slice()])).as_bytes());
    bytes[list].copy_from_slice(&encoded);
    std::fs::write(&file, &bytes).expect("written");
    let ran = radpack(tmp.path(), &["validate", "t.rad"]);
    assert_eq!(ran.code, 4, "{}", ran.stdout);
    let told = format!("{}{}", ran.stdout, ran.stderr);
    let wanted = "the manifest sets 5 cache blocks, the programs work with 17 to 64";
    assert!(told.contains(wanted), "{told}");
}

#[test]
fn no_room_for_the_copy_leaves_the_file_as_it_was() {
    let tmp = tempdir().expect("a folder");
    convert(tmp.path(), "1");
    let before = sha256(&tmp.path().join("t.rad"));
    // Files of up to 8 blocks of 512 bytes; the signal is ignored, so that writing fails as on a full disk.
    let binary = assert_cmd::cargo::cargo_bin("radpack");
    let script =
        format!("trap '' XFSZ; ulimit -f 8; exec '{}' set-kv-blocks t.rad 36", binary.display());
    let output =
        Command::new("sh").current_dir(tmp.path()).args(["-c", &script]).output().expect("it runs");
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(sha256(&tmp.path().join("t.rad")), before);
    assert!(!tmp.path().join("t.rad.kv-blocks.partial").exists());
    assert_eq!(set(tmp.path(), "36").code, 0);
}

#[test]
fn other_files_are_refused_with_the_reason() {
    let tmp = tempdir().expect("a folder");
    let model = dense().to_str().expect("UTF-8").to_owned();
    succeeds(
        tmp.path(),
        &["convert", &model, "--recipe", "w8a16", "--weights-only", "-o", "t.rad"],
    );
    assert_eq!(set(tmp.path(), "8").code, 3);
    std::fs::write(tmp.path().join("t.rad"), b"no container").expect("written");
    assert_eq!(set(tmp.path(), "8").code, 4);
    std::fs::remove_file(tmp.path().join("t.rad")).expect("removed");
    assert_eq!(set(tmp.path(), "8").code, 1);
    // A manifest that was changed by hand no longer has the digest that the file states.
    convert(tmp.path(), "1");
    let file = tmp.path().join("t.rad");
    let mut bytes = std::fs::read(&file).expect("it reads");
    let at = bytes.windows(15).position(|w| w == b"\"schema_version").expect("a manifest");
    bytes[at + 2] = b'C';
    std::fs::write(&file, &bytes).expect("written");
    let failure = patch::set_kv_blocks(&file, Some(36)).expect_err("damaged");
    assert_eq!(failure.kind.exit_code(), 4);
    assert_eq!(failure.problems[0].message, "the manifest has another digest than the file says");
    assert!(std::fs::read(&file).expect("it reads") == bytes);
    assert!(!tmp.path().join("t.rad.kv-blocks.partial").exists());
}

#[test]
fn killed_at_any_moment_the_file_is_the_old_or_the_new_one() {
    let tmp = tempdir().expect("a folder");
    convert(tmp.path(), "1");
    let file = tmp.path().join("t.rad");
    let old = std::fs::read(&file).expect("it reads");
    assert_eq!(set(tmp.path(), "36").code, 0);
    let new = std::fs::read(&file).expect("it reads");
    let binary = assert_cmd::cargo::cargo_bin("radpack");
    let (mut kept, mut changed) = (0, 0);
    for round in 0..60u64 {
        std::fs::write(&file, &old).expect("written");
        let mut child = Command::new(&binary)
            .current_dir(tmp.path())
            .args(["set-kv-blocks", "t.rad", "36"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        std::thread::sleep(Duration::from_micros(round * 400));
        // The process may be done already.
        let _ = child.kill();
        child.wait().expect("it ends");
        let found = std::fs::read(&file).expect("it reads");
        if found == old {
            kept += 1;
        } else {
            assert!(found == new, "round {round}: neither the old nor the new file");
            changed += 1;
        }
    }
    println!("{kept} times the old file, {changed} times the new one");
    assert!(kept > 0);
    // What a killed run leaves behind does not hinder the next one.
    std::fs::write(tmp.path().join("t.rad.kv-blocks.partial"), &old[..1000]).expect("written");
    std::fs::write(&file, &old).expect("written");
    assert_eq!(set(tmp.path(), "36").code, 0);
    assert!(std::fs::read(&file).expect("it reads") == new);
    assert!(!tmp.path().join("t.rad.kv-blocks.partial").exists());
}
