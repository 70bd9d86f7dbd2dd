//! The main job, end to end, with the real binary.

mod cli_support;

use std::fs;

use cli_support::{dense, dense_copy, radpack, sha256, succeeds};
use serde_json::Value;
use tempfile::tempdir;

const RECIPES: [&str; 8] =
    ["bf16", "int8-g128", "w8a16", "nvfp4", "fp8-dynamic", "fp8-block", "w4a16-g32", "mxfp4"];

fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("one JSON document")
}

#[test]
fn every_recipe_converts_and_the_file_equals_its_source() {
    let tmp = tempdir().expect("a folder");
    let source = dense();
    let source = source.to_str().expect("UTF-8");
    for recipe in RECIPES {
        let out = format!("{recipe}.rad");
        let ran = succeeds(tmp.path(), &["convert", source, "--recipe", recipe, "-o", &out]);
        assert!(ran.stdout.contains("digest    sha256:"), "{}", ran.stdout);
        let ran = succeeds(tmp.path(), &["validate", &out, "--against", source]);
        assert!(ran.stdout.contains("116 weights equal the source"), "{}", ran.stdout);
        assert!(ran.stdout.ends_with("valid\n"), "{}", ran.stdout);
    }
    let partials = fs::read_dir(tmp.path()).expect("lists").count();
    assert_eq!(partials, RECIPES.len(), "nothing but the files is left");
}

#[test]
fn every_tiny_model_converts_and_validates_against_its_source() {
    let tmp = tempdir().expect("a folder");
    for name in testkit::names() {
        let source = testkit::tiny_model(name);
        let source = source.to_str().expect("UTF-8");
        let out = format!("{name}.rad");
        succeeds(tmp.path(), &["convert", source, "--recipe", "int8-g128", "-o", &out]);
        succeeds(tmp.path(), &["validate", &out, "--against", source]);
        let shown = json(&succeeds(tmp.path(), &["inspect", &out, "--json"]).stdout);
        let encodings = shown["manifest"]["encodings"].as_array().expect("a list");
        assert!(encodings.iter().any(|e| e["encoding"] == "int8-g128"), "{name}");
    }
}

#[test]
fn threads_folders_locale_and_kernels_change_no_byte() {
    let tmp = tempdir().expect("a folder");
    let copy = dense_copy(tmp.path());
    let elsewhere = tmp.path().join("a folder with spaces");
    fs::create_dir(&elsewhere).expect("creates");
    for recipe in ["int8-g128", "nvfp4", "fp8-block"] {
        let source = dense();
        let source = source.to_str().expect("UTF-8");
        succeeds(
            tmp.path(),
            &["convert", source, "--recipe", recipe, "-o", "a.rad", "--threads", "1"],
        );
        let first = sha256(&tmp.path().join("a.rad"));
        let slashed = format!("{}/", copy.display());
        for extra in [&["--threads", "8"][..], &["--kernel", "scalar"], &["--kernel", "auto"]] {
            let mut args = vec!["convert", slashed.as_str(), "--recipe", recipe, "-o", "b.rad"];
            args.extend(extra);
            let output = assert_cmd::Command::cargo_bin("radpack")
                .expect("the binary is built")
                .current_dir(&elsewhere)
                .env("TZ", "Asia/Kathmandu")
                .env("LANG", "tr_TR.UTF-8")
                .args(&args)
                .output()
                .expect("runs");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            assert_eq!(sha256(&elsewhere.join("b.rad")), first, "{recipe} {extra:?}");
        }
    }
}

#[test]
fn the_file_stands_alone_when_the_source_is_gone() {
    let tmp = tempdir().expect("a folder");
    let copy = dense_copy(tmp.path());
    let tokenizer = fs::read(copy.join("tokenizer.json")).expect("reads");
    let generation = fs::read(copy.join("generation_config.json")).expect("reads");
    succeeds(tmp.path(), &["convert", "model", "--recipe", "nvfp4", "-o", "t.rad"]);
    fs::remove_dir_all(&copy).expect("removes");
    succeeds(tmp.path(), &["validate", "t.rad"]);
    succeeds(tmp.path(), &["extract", "t.rad", "tokenizer.json", "-o", "tok.json"]);
    assert_eq!(fs::read(tmp.path().join("tok.json")).expect("reads"), tokenizer);
    succeeds(tmp.path(), &["extract", "t.rad", "generation_config.json"]);
    assert_eq!(fs::read(tmp.path().join("generation_config.json")).expect("reads"), generation);
    let files = succeeds(tmp.path(), &["inspect", "t.rad", "--files"]).stdout;
    assert!(files.contains("tokenizer_config.json"), "{files}");
    let recipe = succeeds(tmp.path(), &["inspect", "t.rad", "--recipe"]).stdout;
    assert!(recipe.starts_with("schema = 1\nname = \"nvfp4\"\n"), "{recipe}");
}

#[test]
fn a_kept_weight_extracts_to_the_values_of_the_checkpoint() {
    let tmp = tempdir().expect("a folder");
    let source = dense();
    let source = source.to_str().expect("UTF-8");
    succeeds(tmp.path(), &["convert", source, "--recipe", "bf16", "-o", "t.rad"]);
    succeeds(tmp.path(), &["extract", "t.rad", "blk.0.attn_q_norm.weight", "-o", "w.f32"]);
    let decoded = fs::read(tmp.path().join("w.f32")).expect("reads");
    // The tensor as the checkpoint holds it, found by an independent header reader.
    let shard = fs::read(dense().join("model-00001-of-00004.safetensors")).expect("reads");
    let tensors = safetensors::SafeTensors::deserialize(&shard).expect("a safetensors file");
    let tensor = tensors
        .tensor("model.language_model.layers.0.self_attn.q_norm.weight")
        .expect("the first shard holds it");
    let expected: Vec<u8> = tensor
        .data()
        .chunks_exact(2)
        .flat_map(|b| (u32::from(u16::from_le_bytes([b[0], b[1]])) << 16).to_le_bytes())
        .collect();
    assert_eq!(decoded, expected);
    let raw =
        succeeds(tmp.path(), &["extract", "t.rad", "blk.0.attn_q_norm.weight", "--raw", "-o", "w"]);
    assert!(raw.stderr.contains("wrote w"), "{}", raw.stderr);
    assert_eq!(fs::read(tmp.path().join("w")).expect("reads"), tensor.data());
}

#[test]
fn a_dry_run_shows_every_weight_with_its_rule_and_writes_nothing() {
    let tmp = tempdir().expect("a folder");
    let source = dense();
    let source = source.to_str().expect("UTF-8");
    let text = succeeds(tmp.path(), &["convert", source, "--dry-run"]).stdout;
    assert!(text.contains("116 tensors, all claimed"), "{text}");
    assert!(text.contains("nothing was written"), "{text}");
    assert!(text.contains("blk.5.ffn_down.weight"), "{text}");
    let document = json(&succeeds(tmp.path(), &["convert", source, "--dry-run", "--json"]).stdout);
    let weights = document["weights"].as_array().expect("a list");
    // Every tensor is one weight, and the tied head repeats the embedding without an entry of its own.
    assert_eq!(weights.len(), 117);
    assert_eq!(weights.iter().filter(|w| w["stored"] == false).count(), 1);
    assert_eq!(document["rules"][0]["hits"], 41);
    assert_eq!(fs::read_dir(tmp.path()).expect("lists").count(), 0);
}

#[test]
fn short_groups_are_reported_and_whole_groups_refuse_them_with_sizes_that_fit() {
    let tmp = tempdir().expect("a folder");
    // tiny-llama: hidden 64, intermediate 176; neither is a multiple of 128.
    let source = testkit::tiny_model("tiny-llama");
    let source = source.to_str().expect("UTF-8");
    let text = succeeds(tmp.path(), &["convert", source, "--dry-run"]).stdout;
    assert!(text.contains("176 columns: the last group of 128 has 48 columns"), "{text}");
    let args = ["convert", source, "--set", "whole_groups=true", "-o", "t.rad"];
    let ran = radpack(tmp.path(), &args);
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    for part in ["176", "128", "= ", "16"] {
        assert!(ran.stderr.contains(part), "{part}: {}", ran.stderr);
    }
    assert_eq!(fs::read_dir(tmp.path()).expect("lists").count(), 0);
}

#[test]
fn documents_follow_their_schemas() {
    let tmp = tempdir().expect("a folder");
    let source = dense();
    let source = source.to_str().expect("UTF-8");
    let schema = |name: &str| {
        let path = testkit::root().join(format!("schemas/{name}.schema.json"));
        let text = fs::read_to_string(path).expect("the schema is committed");
        jsonschema::validator_for(&json(&text)).expect("a valid schema")
    };
    let check = |name: &str, text: &str| {
        let document = json(text);
        let errors: Vec<String> =
            schema(name).iter_errors(&document).map(|e| e.to_string()).collect();
        assert!(errors.is_empty(), "{name}: {errors:?}");
    };
    let run = |args: &[&str]| radpack(tmp.path(), args).stdout;
    check("convert", &run(&["convert", source, "--dry-run", "--json"]));
    check("convert", &run(&["convert", source, "-o", "t.rad", "--json"]));
    check("validate", &run(&["validate", "t.rad", "--json", "--against", source]));
    check("inspect", &run(&["inspect", "t.rad", "--json"]));
    check("recipes", &run(&["recipes", "list", "--json"]));
    check("failure", &run(&["convert", "absent", "-o", "u.rad", "--json"]));
    let manifest = run(&["extract", "t.rad", "radpack/manifest.json", "-o", "-"]);
    check("manifest", &manifest);
}

#[test]
fn completions_name_every_subcommand() {
    let tmp = tempdir().expect("a folder");
    for shell in ["bash", "zsh", "fish"] {
        let script = succeeds(tmp.path(), &["completions", shell]).stdout;
        for command in ["convert", "validate", "inspect", "extract", "recipes"] {
            assert!(script.contains(command), "{shell}: {command}");
        }
    }
}

#[test]
fn shown_recipes_read_back_and_bad_ones_are_listed_together() {
    let tmp = tempdir().expect("a folder");
    for recipe in RECIPES {
        let text = succeeds(tmp.path(), &["recipes", "show", recipe]).stdout;
        fs::write(tmp.path().join("shown.toml"), &text).expect("writes");
        let again = succeeds(tmp.path(), &["recipes", "show", "shown.toml"]).stdout;
        assert_eq!(again, text);
    }
    fs::write(tmp.path().join("a.toml"), "schema = 1\nnme = \"x\"\n").expect("writes");
    fs::write(tmp.path().join("b.toml"), "schema = 2\n").expect("writes");
    let ran = radpack(tmp.path(), &["recipes", "check", "a.toml", "b.toml"]);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("a.toml:2"), "{}", ran.stderr);
    assert!(ran.stderr.contains("schema 2 is not known"), "{}", ran.stderr);
}
