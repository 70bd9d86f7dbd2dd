//! Refusals: the right exit code, every problem at once, no output file, and an older one left as it was.

mod cli_support;

use std::fs;
use std::path::Path;

use cli_support::{dense, dense_copy, radpack, succeeds};
use tempfile::tempdir;

const OLDER: &[u8] = b"an older file that must survive";

/// Runs a conversion that must be refused, with an older file at the output's place.
fn refused(folder: &Path, args: &[&str], code: i32, texts: &[&str]) {
    let out = folder.join("old.rad");
    fs::write(&out, OLDER).expect("writes");
    let before = fs::read_dir(folder).expect("lists").count();
    let mut all = vec!["convert"];
    all.extend(args);
    all.extend(["-o", "old.rad"]);
    let ran = radpack(folder, &all);
    assert_eq!(ran.code, code, "{args:?}: {}", ran.stderr);
    for text in texts {
        assert!(ran.stderr.contains(text), "no {text:?} in {}", ran.stderr);
    }
    assert!(ran.stderr.contains(&format!("[exit {code}]")), "{}", ran.stderr);
    assert_eq!(fs::read(&out).expect("still there"), OLDER);
    assert_eq!(fs::read_dir(folder).expect("lists").count(), before, "nothing else was left");
}

/// Overwrites bf16 elements of a tensor of the dense model's copy.
fn poison(model: &Path, tensor: &str, elements: &[(usize, u16)]) {
    for entry in fs::read_dir(model).expect("lists") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let mut bytes = fs::read(&path).expect("reads");
        let header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
        let text: serde_json::Value =
            serde_json::from_slice(&bytes[8..8 + header]).expect("a header");
        let Some(start) = text[tensor]["data_offsets"][0].as_u64() else { continue };
        for (element, value) in elements {
            let at = 8 + header + start as usize + element * 2;
            bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
        fs::write(&path, bytes).expect("writes");
        return;
    }
    panic!("{tensor} is in no shard");
}

#[test]
fn nan_and_infinity_are_refused_with_tensor_index_and_count() {
    let tmp = tempdir().expect("a folder");
    let model = dense_copy(tmp.path());
    let layer = "model.language_model.layers.0";
    // 128 columns: element 300 is [2, 44].
    poison(&model, &format!("{layer}.self_attn.q_proj.weight"), &[(300, 0x7fc0), (301, 0xff80)]);
    poison(&model, &format!("{layer}.self_attn.q_norm.weight"), &[(5, 0x7f80)]);
    refused(
        tmp.path(),
        &["model"],
        3,
        &[
            "blk.0.attn_q.weight: 2 values are NaN or infinite, the first at [2, 44] of",
            "model.language_model.layers.0.self_attn.q_proj.weight",
            "blk.0.attn_q_norm.weight: 1 value is NaN or infinite, the first at [5] of",
            "2 problems; nothing was written",
        ],
    );
}

#[test]
fn zero_rows_decode_to_exactly_zero_in_every_encoding() {
    let tmp = tempdir().expect("a folder");
    let model = dense_copy(tmp.path());
    let zeros: Vec<(usize, u16)> = (0..256).map(|i| (i, 0)).collect();
    poison(&model, "model.language_model.layers.0.self_attn.q_proj.weight", &zeros);
    for recipe in ["int8-g128", "w8a16", "nvfp4", "fp8-dynamic", "fp8-block", "w4a16-g32", "mxfp4"]
    {
        succeeds(tmp.path(), &["convert", "model", "--recipe", recipe, "-o", "z.rad"]);
        succeeds(tmp.path(), &["extract", "z.rad", "blk.0.attn_q.weight", "-o", "z.f32"]);
        let decoded = fs::read(tmp.path().join("z.f32")).expect("reads");
        assert!(decoded[..1024].chunks(4).all(|v| v == [0; 4] || v == [0, 0, 0, 0x80]), "{recipe}");
        assert!(decoded[1024..].iter().any(|b| *b != 0), "{recipe}");
    }
}

#[test]
fn wrong_recipes_and_arguments_are_usage_errors() {
    let tmp = tempdir().expect("a folder");
    let source = dense();
    let source = source.to_str().expect("UTF-8");
    refused(tmp.path(), &[source, "--recipe", "int8-g12"], 2, &["int8-g128"]);
    refused(tmp.path(), &[source, "--set", "whole_group=true"], 2, &["whole_groups"]);
    let recipe = "schema = 1\n[[quantize]]\nmtch = \"*\"\nencoding = \"int8-g127\"\n";
    fs::write(tmp.path().join("r.toml"), recipe).expect("writes");
    refused(
        tmp.path(),
        &[source, "--recipe", "r.toml"],
        2,
        &["match", "int8-g128", "r.toml:3", "r.toml:4"],
    );
    assert_eq!(radpack(tmp.path(), &["convert", source, "--no-such-flag"]).code, 2);
}

#[test]
fn an_output_without_a_place_or_in_place_of_its_source_is_refused() {
    let tmp = tempdir().expect("a folder");
    let model = dense_copy(tmp.path());
    let shard = model.join("model-00001-of-00004.safetensors");
    let before = fs::read(&shard).expect("reads");
    let ran = radpack(tmp.path(), &["convert", "model", "-o", shard.to_str().expect("UTF-8")]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("the output would replace its source"), "{}", ran.stderr);
    assert_eq!(fs::read(&shard).expect("reads"), before);
    let ran = radpack(tmp.path(), &["convert", "model", "-o", "no/such/folder/t.rad"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("mkdir -p no/such/folder"), "{}", ran.stderr);
}

#[test]
fn sources_that_do_not_fit_are_refused_with_every_problem() {
    let tmp = tempdir().expect("a folder");
    let model = dense_copy(tmp.path());
    refused(tmp.path(), &["absent"], 2, &["absent does not exist"]);

    // A missing shard and a truncated one, together.
    let last = model.join("model-00004-of-00004.safetensors");
    let whole = fs::read(&last).expect("reads");
    fs::write(&last, &whole[..whole.len() - 100]).expect("writes");
    fs::rename(model.join("model-00002-of-00004.safetensors"), tmp.path().join("kept"))
        .expect("moves");
    refused(
        tmp.path(),
        &["model"],
        3,
        &["model-00002-of-00004.safetensors", "model-00004-of-00004.safetensors", "truncated"],
    );
    fs::rename(tmp.path().join("kept"), model.join("model-00002-of-00004.safetensors"))
        .expect("moves");
    fs::write(&last, &whole).expect("writes");

    // No tokenizer.
    fs::remove_file(model.join("tokenizer.json")).expect("removes");
    fs::remove_file(model.join("tokenizer_config.json")).expect("removes");
    refused(tmp.path(), &["model"], 3, &["tokenizer.json", "--no-tokenizer"]);
    succeeds(tmp.path(), &["convert", "model", "--no-tokenizer", "-o", "n.rad"]);

    // An architecture nobody knows, and the way on.
    let config = fs::read_to_string(model.join("config.json")).expect("reads");
    let unknown = config
        .replace("\"model_type\": \"gemma4", "\"model_type\": \"mystery")
        .replace("Gemma4ForConditionalGeneration", "MysteryForCausalLM");
    fs::write(model.join("config.json"), unknown).expect("writes");
    refused(tmp.path(), &["model", "--no-tokenizer"], 3, &["mystery", "--weights-only"]);
    succeeds(tmp.path(), &["convert", "model", "--weights-only", "-o", "w.rad"]);
    succeeds(tmp.path(), &["validate", "w.rad", "--against", "model"]);

    // Quantized already.
    let quantized = config.replacen(
        '{',
        "{\"quantization_config\": {\"quant_method\": \"gptq\", \"bits\": 4},",
        1,
    );
    fs::write(model.join("config.json"), quantized).expect("writes");
    refused(
        tmp.path(),
        &["model", "--no-tokenizer"],
        3,
        &["(gptq) cannot be read", "no tensor is quantized"],
    );
}

#[test]
fn problems_of_tokenizer_and_recipe_come_together() {
    let tmp = tempdir().expect("a folder");
    let model = dense_copy(tmp.path());
    fs::remove_file(model.join("tokenizer.json")).expect("removes");
    fs::remove_file(model.join("tokenizer_config.json")).expect("removes");
    let recipe = "schema = 1\n[[quantize]]\nclass = \"norm\"\nencoding = \"int8-g128\"\n\
                  [[quantize]]\nmatch = \"*.absent\"\nencoding = \"bf16\"\n";
    fs::write(tmp.path().join("r.toml"), recipe).expect("writes");
    refused(
        tmp.path(),
        &["model", "--recipe", "r.toml"],
        3,
        &[
            "--no-tokenizer",
            "r.toml:4",
            "r.toml:6",
            "3 problems; nothing was read beyond the headers",
        ],
    );
}

#[test]
fn a_changed_byte_is_found_by_name_and_another_source_by_weight() {
    let tmp = tempdir().expect("a folder");
    let source = dense();
    let source = source.to_str().expect("UTF-8");
    succeeds(tmp.path(), &["convert", source, "-o", "t.rad"]);
    let shown = succeeds(tmp.path(), &["inspect", "t.rad", "--json"]).stdout;
    let shown: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
    let entries = shown["entries"].as_array().expect("a list");
    let entry = entries.iter().find(|e| e["name"] == "blk.3.attn_q.weight").expect("there");
    let offset = entry["offset"].as_u64().expect("a number") as usize;
    let mut bytes = fs::read(tmp.path().join("t.rad")).expect("reads");
    bytes[offset + 7] ^= 1;
    fs::write(tmp.path().join("bad.rad"), &bytes).expect("writes");
    let ran = radpack(tmp.path(), &["validate", "bad.rad", "--against", source]);
    assert_eq!(ran.code, 4);
    assert!(ran.stderr.contains("blk.3.attn_q.weight"), "{}", ran.stderr);
    assert!(ran.stderr.contains("the source was not compared"), "{}", ran.stderr);

    let model = dense_copy(tmp.path());
    poison(&model, "model.language_model.layers.3.self_attn.q_proj.weight", &[(0, 0x3f80)]);
    let ran = radpack(tmp.path(), &["validate", "t.rad", "--against", "model"]);
    assert_eq!(ran.code, 4, "{}", ran.stderr);
    assert!(ran.stderr.contains("blk.3.attn_q.weight codes:"), "{}", ran.stderr);
    assert!(ran.stderr.contains("in the manifest"), "{}", ran.stderr);

    fs::write(tmp.path().join("cut.rad"), &bytes[..1000]).expect("writes");
    let ran = radpack(tmp.path(), &["inspect", "cut.rad"]);
    assert_eq!(ran.code, 4, "{}", ran.stderr);
    assert!(ran.stderr.contains("is no valid .rad file"), "{}", ran.stderr);
}

#[test]
fn an_entry_that_does_not_exist_is_named_with_its_neighbours() {
    let tmp = tempdir().expect("a folder");
    let source = dense();
    succeeds(tmp.path(), &["convert", source.to_str().expect("UTF-8"), "-o", "t.rad"]);
    let ran = radpack(tmp.path(), &["extract", "t.rad", "tokeniser.json"]);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("near it: tokenizer.json"), "{}", ran.stderr);
}

/// A signal in the middle of a conversion leaves no output, no partial file, and an older output as it was. The
/// reference kernel takes seconds for this model, so there is a middle.
#[test]
fn a_signal_in_the_middle_leaves_nothing_behind() {
    let tmp = tempdir().expect("a folder");
    let gemma4 = testkit::fixtures().join("gemma4");
    let options = testkit::SparseOptions::default();
    testkit::sparse(
        &gemma4.join("shapes/gemma-4-31B-it-assistant.tsv"),
        &gemma4.join("configs/gemma-4-31B-it-assistant.json"),
        &tmp.path().join("big"),
        options,
    )
    .expect("a sparse model");
    fs::write(tmp.path().join("t.rad"), OLDER).expect("writes");
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("radpack"))
        .current_dir(tmp.path())
        .args([
            "convert",
            "big",
            "--no-tokenizer",
            "-o",
            "t.rad",
            "--threads",
            "1",
            "--kernel",
            "scalar",
        ])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("starts");
    let partial = tmp.path().join("t.rad.partial");
    while !partial.exists() {
        assert!(child.try_wait().expect("a status").is_none(), "it ended before it wrote");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    // SAFETY: the process was started here and has not been waited for.
    unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
    let output = child.wait_with_output().expect("ends");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("stopped by a signal"), "{stderr}");
    assert!(!partial.exists());
    assert_eq!(fs::read(tmp.path().join("t.rad")).expect("reads"), OLDER);
}
