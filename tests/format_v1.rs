//! Numbers that cannot drift: files of version 1 of the format, made once, and the digests of what conversions write today.
//!
//! `fixtures/rad/v1` is never made anew: whatever becomes of the program, these files open, are valid and hold the values
//! that they held. `fixtures/pinned.txt` changes on purpose only.

mod cli_support;

use std::fs;
use std::path::{Path, PathBuf};

use cli_support::{radpack, sha256, succeeds};
use radpack::artifact::{Artifact, verify};
use rayon::prelude::*;
use serde_json::Value;
use tempfile::tempdir;

fn folder() -> PathBuf {
    testkit::fixtures().join("rad/v1")
}

/// Joins a file's two parts: the tables, and the data at the next multiple of 2 MiB. The zeros between them are not kept.
fn joined(name: &str, to: &Path) {
    let part = |part: &str| fs::read(folder().join(format!("{name}.{part}.bin"))).expect(name);
    let mut bytes = part("tables");
    bytes.resize(bytes.len().next_multiple_of(2 << 20), 0);
    bytes.extend(part("data"));
    fs::write(to, bytes).expect("writes");
}

/// Name, digest of the file, digest of its values as a safetensors file, device count, and whether it has a draft.
fn recorded() -> Vec<[String; 5]> {
    let text = fs::read_to_string(folder().join("files.txt")).expect("reads");
    let lines = text.lines().filter(|l| !l.starts_with('#'));
    let words = |l: &str| -> Vec<String> { l.split(' ').map(str::to_owned).collect() };
    lines.map(|l| words(l).try_into().unwrap_or_else(|w| panic!("five words: {w:?}"))).collect()
}

#[test]
fn files_of_version_1_open_are_valid_and_hold_the_values_they_held() {
    let tmp = tempdir().expect("a folder");
    let files = recorded();
    assert_eq!(files.len(), 3);
    for [name, file, values, devices, draft] in files {
        let rad = format!("{name}.rad");
        joined(&name, &tmp.path().join(&rad));
        assert_eq!(sha256(&tmp.path().join(&rad)), file, "{name}: the fixture itself was changed");
        let artifact = Artifact::open(&tmp.path().join(&rad)).unwrap_or_else(|e| panic!("{e}"));
        let report = verify(&artifact, Default::default());
        assert_eq!(report.faults, [], "{name}");
        let manifest = report.manifest.expect("a manifest");
        assert_eq!((manifest.format_version, manifest.devices.to_string()), (1, devices), "{name}");
        assert!(manifest.tables.is_some() && artifact.vocab_summary().is_some(), "{name}");
        let graphs = manifest.graphs.expect("programs");
        assert!(graphs.programs.len() >= 2, "{name}");
        assert_eq!((graphs.kv.draft_tokens > 0).to_string(), draft, "{name}");
        // Every program runs and computes the model that the file describes.
        succeeds(tmp.path(), &["validate", &rad, "--deep"]);
        let shown = succeeds(tmp.path(), &["inspect", &rad, "--json"]).stdout;
        let shown: Value = serde_json::from_str(&shown).expect("JSON");
        assert_eq!(shown["manifest"]["tool"]["version"], "0.1.0", "{name}");
        let out = format!("{name}-export");
        succeeds(tmp.path(), &["export", &rad, "--format", "safetensors", "-o", &out]);
        let found = sha256(&tmp.path().join(out).join("model.safetensors"));
        assert_eq!(found, values, "{name}: its weights decode to other values");
        let answer = ["run", &rad, "--raw", "--prompt", "hello", "--max-tokens", "4"];
        succeeds(tmp.path(), &answer);
    }
}

/// The recipes that fit any model, by their files.
fn generic() -> Vec<String> {
    let listed = fs::read_dir(testkit::root().join("recipes")).expect("lists");
    let names = listed.map(|e| e.expect("an entry").file_name().into_string().expect("UTF-8"));
    let mut recipes: Vec<String> =
        names.filter_map(|n| n.strip_suffix(".toml").map(str::to_owned)).collect();
    recipes.sort();
    recipes
}

#[test]
fn every_conversion_writes_the_bytes_that_are_pinned() {
    let tmp = tempdir().expect("a folder");
    let mut cases: Vec<(String, String, &str)> = Vec::new();
    for model in testkit::names() {
        let _: PathBuf = testkit::tiny_model(model);
        for recipe in generic() {
            cases.push(((*model).to_owned(), recipe.clone(), "1"));
        }
        cases.push(((*model).to_owned(), "w8a16".to_owned(), "2"));
    }
    let lines: Vec<String> = cases
        .par_iter()
        .map(|(model, recipe, devices)| {
            let out = format!("{model}-{recipe}-{devices}.rad");
            let source = testkit::tiny_model(model);
            let source = source.to_str().expect("UTF-8");
            let args =
                ["convert", source, "--recipe", recipe, "--devices", devices, "-o", out.as_str()];
            let ran = radpack(tmp.path(), &args);
            let path = tmp.path().join(&out);
            let made = match ran.code {
                0 => sha256(&path),
                code => format!("exit {code}"),
            };
            let _ = fs::remove_file(path);
            format!("{model} {recipe} {devices} {made}")
        })
        .collect();
    assert!(lines.iter().filter(|l| !l.contains(" exit ")).count() > 50, "{lines:#?}");
    let head = "# SHA-256 of what each generic recipe makes of each model of fixtures/models: model, recipe, devices, digest.\n";
    let found = format!("{head}{}\n", lines.join("\n"));
    let path = testkit::fixtures().join("pinned.txt");
    if std::env::var_os("RADPACK_BLESS").is_some() {
        fs::write(&path, &found).expect("writes");
    }
    let pinned = fs::read_to_string(&path).expect("fixtures/pinned.txt");
    let other: Vec<&str> = found.lines().filter(|l| !pinned.lines().any(|p| p == *l)).collect();
    assert!(
        pinned == found,
        "{} conversions write other bytes than fixtures/pinned.txt says:\n{}\n\
         The same source and recipe must give the same bytes for one version of radpack. Is the change meant? Then raise \
         `version` in Cargo.toml, say in docs/reproducibility.md what changed, and pin the new bytes with\n\
         RADPACK_BLESS=1 cargo test --test format_v1",
        other.len(),
        other.join("\n")
    );
}
