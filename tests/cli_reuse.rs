//! `--reuse`: weights of an older artifact are copied, and the output is the one that a fresh build gives.

mod cli_support;

use std::fs;
use std::path::Path;

use cli_support::{dense_copy, radpack, sha256, succeeds};
use tempfile::tempdir;

/// Weights that `convert --reuse old.rad` copied; its output must equal that of a fresh build.
fn reused(folder: &Path, args: &[&str]) -> u64 {
    let with = |out: &'static str, extra: &[&'static str]| {
        let mut all = vec!["convert"];
        all.extend(args);
        all.extend(["-o", out, "--json"]);
        all.extend(extra);
        let document = succeeds(folder, &all).stdout;
        let document: serde_json::Value = serde_json::from_str(&document).expect("JSON");
        document["reused"].as_u64().expect("a number")
    };
    assert_eq!(with("fresh.rad", &[]), 0);
    let copied = with("again.rad", &["--reuse", "old.rad"]);
    assert_eq!(sha256(&folder.join("fresh.rad")), sha256(&folder.join("again.rad")), "{args:?}");
    copied
}

/// Flips the sign of the last value in a file.
fn change(path: &Path) {
    let mut bytes = fs::read(path).expect("reads");
    *bytes.last_mut().expect("bytes") ^= 0x80;
    fs::write(path, bytes).expect("writes");
}

#[test]
fn unchanged_weights_are_copied_and_changed_ones_made_again() {
    let tmp = tempdir().expect("a folder");
    let model = dense_copy(tmp.path());
    for recipe in ["int8-g128", "nvfp4", "fp8-block"] {
        let args = ["model", "--recipe", recipe];
        succeeds(tmp.path(), &["convert", "model", "--recipe", recipe, "-o", "old.rad"]);
        assert_eq!(reused(tmp.path(), &args), 41, "{recipe}");
        // Weights of one shard out of four are made again.
        let shard = model.join("model-00003-of-00004.safetensors");
        let before = fs::read(&shard).expect("reads");
        change(&shard);
        let copied = reused(tmp.path(), &args);
        assert!((20..41).contains(&copied), "{recipe}: {copied}");
        fs::write(&shard, before).expect("writes");
    }
}

#[test]
fn another_recipe_reuses_only_what_it_makes_alike() {
    let tmp = tempdir().expect("a folder");
    dense_copy(tmp.path());
    succeeds(tmp.path(), &["convert", "model", "--recipe", "int8-g128", "-o", "old.rad"]);
    assert_eq!(reused(tmp.path(), &["model", "--recipe", "w8a16"]), 0);
    let recipe = "schema = 1\nname = \"mixed\"\n\
        [[quantize]]\nmatch = \"*.down_proj.weight\"\ntower = \"text\"\nencoding = \"int8-channel\"\n\
        [[quantize]]\ntower = \"text\"\nclass = \"linear\"\nencoding = \"int8-g128\"\n";
    fs::write(tmp.path().join("mixed.toml"), recipe).expect("writes");
    // 41 without the six down projections.
    assert_eq!(reused(tmp.path(), &["model", "--recipe", "mixed.toml"]), 35);
    // Second-level scales depend on their set: another recipe's are not believed.
    succeeds(tmp.path(), &["convert", "model", "--recipe", "nvfp4", "-o", "old.rad"]);
    let apart = "schema = 1\n[[quantize]]\ntower = \"text\"\nclass = \"linear\"\nencoding = \"nvfp4\"\n\
        share_scale = false\n";
    fs::write(tmp.path().join("apart.toml"), apart).expect("writes");
    assert_eq!(reused(tmp.path(), &["model", "--recipe", "apart.toml"]), 0);
}

#[test]
fn a_damaged_weight_is_made_again_and_a_damaged_manifest_refused() {
    let tmp = tempdir().expect("a folder");
    dense_copy(tmp.path());
    succeeds(tmp.path(), &["convert", "model", "-o", "old.rad"]);
    let whole = fs::read(tmp.path().join("old.rad")).expect("reads");
    let shown = succeeds(tmp.path(), &["inspect", "old.rad", "--json"]).stdout;
    let shown: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
    let offset = |name: &str| {
        let entries = shown["entries"].as_array().expect("a list");
        let entry = entries.iter().find(|e| e["name"] == name).expect("an entry");
        entry["offset"].as_u64().expect("a number") as usize
    };
    let damage = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        fs::write(tmp.path().join("old.rad"), bytes).expect("writes");
    };
    damage(offset("blk.2.attn_k.weight") + 5);
    assert_eq!(reused(tmp.path(), &["model"]), 40);
    damage(offset("radpack/manifest.json") + 40);
    let ran = radpack(tmp.path(), &["convert", "model", "-o", "x.rad", "--reuse", "old.rad"]);
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    assert!(ran.stderr.contains("this file cannot be reused"), "{}", ran.stderr);
    assert!(!tmp.path().join("x.rad").exists());
}

#[test]
fn the_older_artifact_may_be_the_output() {
    let tmp = tempdir().expect("a folder");
    dense_copy(tmp.path());
    succeeds(tmp.path(), &["convert", "model", "-o", "old.rad"]);
    let before = sha256(&tmp.path().join("old.rad"));
    succeeds(tmp.path(), &["convert", "model", "-o", "old.rad", "--reuse", "old.rad"]);
    assert_eq!(sha256(&tmp.path().join("old.rad")), before);
    succeeds(tmp.path(), &["validate", "old.rad", "--against", "model"]);
}
