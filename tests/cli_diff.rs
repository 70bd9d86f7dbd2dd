//! `radpack diff` and `radpack convert --check`: what two files differ in, and whether a file can be rebuilt.

mod cli_support;

use std::fs;
use std::path::Path;

use cli_support::{dense, dense_copy, radpack, sha256, succeeds};
use radpack::artifact::Artifact;
use serde_json::Value;
use tempfile::tempdir;

fn convert(folder: &Path, source: &Path, out: &str, more: &[&str]) {
    let source = source.to_str().expect("UTF-8");
    let args = [&["convert", source, "-o", out], more].concat();
    succeeds(folder, &args);
}

/// The document of a comparison, held to its schema.
fn document(folder: &Path, a: &str, b: &str) -> Value {
    let ran = radpack(folder, &["diff", a, b, "--json"]);
    let document: Value = serde_json::from_str(&ran.stdout).expect("JSON");
    assert_eq!(ran.code, i32::from(document["equal"] != true), "{}", ran.stderr);
    let path = testkit::root().join("schemas/diff.schema.json");
    let schema =
        serde_json::from_str(&fs::read_to_string(path).expect("the schema")).expect("JSON");
    let validator = jsonschema::validator_for(&schema).expect("a valid schema");
    let errors: Vec<String> = validator.iter_errors(&document).map(|e| e.to_string()).collect();
    assert!(errors.is_empty(), "{errors:?}");
    document
}

/// Lines of a part as `path: a → b`.
fn lines(document: &Value, part: &str) -> Vec<String> {
    let one =
        |c: &Value| format!("{}: {} → {}", c["path"].as_str().expect("a path"), c["a"], c["b"]);
    document[part].as_array().expect("a list").iter().map(one).collect()
}

/// Turns one byte of a weight's first plane.
fn turn_a_byte(path: &Path, weight: &str) {
    let artifact = Artifact::open(path).expect("opens");
    let entry = artifact.find(weight).expect("the weight");
    let at = entry.planes().next().expect("a plane").offset as usize;
    drop(artifact);
    let mut bytes = fs::read(path).expect("reads");
    bytes[at] ^= 0x40;
    fs::write(path, bytes).expect("writes");
}

#[test]
fn a_file_and_its_copy_are_equal() {
    let tmp = tempdir().expect("a folder");
    convert(tmp.path(), &dense(), "a.rad", &[]);
    fs::copy(tmp.path().join("a.rad"), tmp.path().join("b.rad")).expect("copies");
    let ran = radpack(tmp.path(), &["diff", "a.rad", "b.rad"]);
    assert_eq!(ran.code, 0);
    assert!(ran.stdout.starts_with("equal     116 weights, "), "{}", ran.stdout);
    let document = document(tmp.path(), "a.rad", "b.rad");
    assert_eq!(document["equal_weights"], 116);
    for part in ["recipe", "source", "model", "graphs", "files", "memory", "metadata"] {
        assert_eq!(lines(&document, part), [""; 0], "{part}");
    }
}

#[test]
fn another_encoding_shows_in_recipe_weights_and_size() {
    let tmp = tempdir().expect("a folder");
    convert(tmp.path(), &dense(), "a.rad", &["--recipe", "int8-g128"]);
    let shown = succeeds(tmp.path(), &["recipes", "show", "int8-g128"]).stdout;
    let coarse = shown.replace("encoding = \"int8-g128\"", "encoding = \"int4-g32\"");
    assert_ne!(coarse, shown);
    fs::write(tmp.path().join("coarse.toml"), coarse).expect("writes");
    convert(tmp.path(), &dense(), "b.rad", &["--recipe", "coarse.toml"]);

    let ran = radpack(tmp.path(), &["diff", "a.rad", "b.rad"]);
    assert_eq!(ran.code, 1);
    let first = ran.stdout.lines().next().expect("a line");
    assert_eq!(first, "recipe    rule 1.encoding: int8-g128 → int4-g32");
    assert!(ran.stdout.ends_with("different\n"), "{}", ran.stdout);

    let document = document(tmp.path(), "a.rad", "b.rad");
    let changed = document["changed_weights"].as_array().expect("a list");
    let equal = document["equal_weights"].as_u64().expect("a number") as usize;
    assert_eq!(changed.len() + equal, 116);
    let quantized = changed.iter().find(|c| c["name"] == "blk.0.ffn_down.weight").expect("it");
    assert_eq!(quantized["encodings"][0], "i8*bf16[1x128]");
    assert_eq!(quantized["encodings"][1], "i4*bf16[1x32]");
    // int4 with groups of 32 costs about a tenth of a weight's length.
    let distance = quantized["distance"].as_f64().expect("a number");
    assert!((0.05..0.2).contains(&distance), "{distance}");
    assert!(document["file_bytes"][1].as_u64() < document["file_bytes"][0].as_u64());
    assert_eq!(lines(&document, "graphs"), [""; 0]);
    assert_eq!(lines(&document, "files"), [""; 0]);
}

#[test]
fn weights_of_files_for_other_numbers_of_devices_are_equal() {
    let tmp = tempdir().expect("a folder");
    convert(tmp.path(), &dense(), "a.rad", &["--recipe", "bf16"]);
    convert(tmp.path(), &dense(), "b.rad", &["--recipe", "bf16", "--devices", "4"]);
    let document = document(tmp.path(), "a.rad", "b.rad");
    assert_eq!(document["equal_weights"], 116);
    assert_eq!(document["changed_weights"], Value::Array(Vec::new()));
    assert_eq!(lines(&document, "recipe"), ["target.devices: 1 → 4"]);
    assert!(lines(&document, "memory").contains(&"devices: 1 → 4".to_owned()));
    let graphs = lines(&document, "graphs");
    assert!(
        graphs.iter().any(|l| l.contains("decode") && l.contains("devices: 1 → 4")),
        "{graphs:?}"
    );
    assert!(graphs.iter().any(|l| l.starts_with("prefill, line 1: ")), "{graphs:?}");
}

#[test]
fn one_turned_byte_is_found_in_its_weight() {
    let tmp = tempdir().expect("a folder");
    convert(tmp.path(), &dense(), "a.rad", &[]);
    fs::copy(tmp.path().join("a.rad"), tmp.path().join("b.rad")).expect("copies");
    turn_a_byte(&tmp.path().join("b.rad"), "blk.1.ffn_up.weight");
    let document = document(tmp.path(), "a.rad", "b.rad");
    assert_eq!(document["equal_weights"], 115);
    let changed = document["changed_weights"].as_array().expect("a list");
    assert_eq!(changed.len(), 1);
    assert_eq!(changed[0]["name"], "blk.1.ffn_up.weight");
    assert!(changed[0]["distance"].as_f64().expect("a number") > 0.0);
}

#[test]
fn a_changed_side_file_shows_in_files_and_in_the_source() {
    let tmp = tempdir().expect("a folder");
    let source = dense_copy(tmp.path());
    convert(tmp.path(), &source, "a.rad", &[]);
    fs::write(source.join("generation_config.json"), "{\"top_k\": 7}").expect("writes");
    convert(tmp.path(), &source, "b.rad", &[]);
    let document = document(tmp.path(), "a.rad", "b.rad");
    let files = lines(&document, "files");
    assert_eq!(files.len(), 1);
    assert!(files[0].starts_with("generation_config.json: "), "{files:?}");
    assert!(
        lines(&document, "source").iter().any(|l| l.starts_with("files generation_config.json")),
        "{document:#}"
    );
    assert_eq!(document["equal_weights"], 116);
}

#[test]
fn a_file_that_is_none_is_refused() {
    let tmp = tempdir().expect("a folder");
    convert(tmp.path(), &dense(), "a.rad", &[]);
    fs::write(tmp.path().join("b.rad"), "no container").expect("writes");
    assert_eq!(radpack(tmp.path(), &["diff", "a.rad", "b.rad"]).code, 4);
    assert_eq!(radpack(tmp.path(), &["diff", "a.rad", "absent.rad"]).code, 1);
}

#[test]
fn check_says_whether_a_conversion_would_write_the_file() {
    let tmp = tempdir().expect("a folder");
    let source = dense();
    let source = source.to_str().expect("UTF-8");
    convert(tmp.path(), &dense(), "a.rad", &["--recipe", "w8a16", "--devices", "2"]);
    let before = sha256(&tmp.path().join("a.rad"));
    let check = |more: &[&str]| {
        radpack(tmp.path(), &[&["convert", source, "--check", "a.rad"], more].concat())
    };
    let ran = check(&["--recipe", "w8a16", "--devices", "2"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stdout.contains("116 weights and every other byte"), "{}", ran.stdout);

    let ran = check(&["--recipe", "int8-g128", "--devices", "2"]);
    assert_eq!(ran.code, 4);
    let text = ran.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    let expected = "41 weights are stored as i8*bf16[1x*], the source under the recipe gives i8*bf16[1x128]: blk.0.attn_k.weight, ";
    assert!(text.contains(expected), "{text}");
    let ran = check(&["--recipe", "w8a16", "--devices", "4"]);
    assert_eq!(ran.code, 4, "{}", ran.stderr);

    turn_a_byte(&tmp.path().join("a.rad"), "blk.0.attn_norm.weight");
    let ran = check(&["--recipe", "w8a16", "--devices", "2"]);
    assert_eq!(ran.code, 4);
    assert!(ran.stderr.contains("blk.0.attn_norm.weight"), "{}", ran.stderr);
    assert_ne!(sha256(&tmp.path().join("a.rad")), before);
    assert_eq!(fs::read_dir(tmp.path()).expect("lists").count(), 1);
    assert_eq!(check(&["-o", "b.rad"]).code, 2);
}
