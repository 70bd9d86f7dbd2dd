//! GGUF files through the real binary.

mod cli_support;

use std::fs;
use std::path::Path;

use cli_support::{radpack, sha256, succeeds};
use safetensors::SafeTensors;
use serde_json::Value;
use tempfile::tempdir;
use testkit::gguf::{self, Outtype};

fn put(model: &str, outtype: Outtype, to: &Path) {
    let file = gguf::convert(&testkit::tiny_model(model), outtype).expect("converts");
    fs::write(to, file.bytes()).expect("written");
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("one JSON document")
}

#[test]
fn a_gguf_file_gives_the_planes_of_the_checkpoint_it_was_made_of() {
    let tmp = tempdir().expect("a folder");
    let folder = testkit::tiny_model("tiny-llama");
    let folder = folder.to_str().expect("UTF-8");
    for recipe in ["int8-g128", "nvfp4", "bf16"] {
        succeeds(tmp.path(), &["convert", folder, "--recipe", recipe, "-o", "st.rad"]);
        let artifact = |name: &str| {
            radpack::artifact::Artifact::open(&tmp.path().join(name)).expect("an artifact")
        };
        let want = artifact("st.rad");
        for outtype in [Outtype::F32, Outtype::Bf16] {
            put("tiny-llama", outtype, &tmp.path().join("m.gguf"));
            succeeds(tmp.path(), &["convert", "m.gguf", "--recipe", recipe, "-o", "g.rad"]);
            let ran = succeeds(tmp.path(), &["validate", "g.rad", "--against", "m.gguf"]);
            assert!(ran.stdout.ends_with("valid\n"), "{}", ran.stdout);
            let found = artifact("g.rad");
            let mut same = 0;
            for entry in want.entries().filter(|e| !e.name().to_string().starts_with("radpack/")) {
                let other = found.find(&entry.name().to_string()).expect("the same weights");
                if entry.encoding() != other.encoding() {
                    // What is kept is kept in the file's type: f32 for vectors, or for all.
                    let types = (entry.encoding().to_string(), other.encoding().to_string());
                    assert_eq!(types, ("bf16".into(), "f32".into()), "{}", entry.name());
                    assert!(entry.shape().rank() == 1 || outtype == Outtype::F32);
                    continue;
                }
                for k in 0..entry.encoding().planes.len() {
                    assert_eq!(entry.plane(k), other.plane(k), "{} plane {k}", entry.name());
                }
                same += 1;
            }
            assert!(same >= 28, "{recipe} {outtype:?}: {same} weights of equal encodings");
        }
    }
}

#[test]
fn the_file_of_gguf_py_converts_validates_and_is_kept() {
    let tmp = tempdir().expect("a folder");
    let source = testkit::fixtures().join("gguf/tiny.gguf");
    fs::copy(&source, tmp.path().join("tiny.gguf")).expect("copied");
    fs::write(tmp.path().join("keep.toml"), "schema = 1\nname = \"keep\"\n").expect("written");
    for recipe in ["w8a16", "keep.toml"] {
        succeeds(tmp.path(), &["convert", "tiny.gguf", "--recipe", recipe, "-o", "t.rad"]);
        let ran = succeeds(tmp.path(), &["validate", "t.rad", "--against", "tiny.gguf"]);
        assert!(ran.stdout.contains("21 weights equal the source"), "{}", ran.stdout);
    }
    let shown = json(&succeeds(tmp.path(), &["inspect", "t.rad", "--json"]).stdout);
    let manifest = &shown["manifest"];
    assert_eq!(manifest["source"]["files"][0]["path"], "tiny.gguf");
    assert_eq!(manifest["source"]["files"][0]["sha256"], sha256(&source));
    assert_eq!(manifest["source"]["files"].as_array().map(Vec::len), Some(1));
    assert_eq!(manifest["model"]["family"], "llama");
    assert_eq!(
        manifest["notes"],
        serde_json::json!([
            "config.json is made of the GGUF file's metadata",
            "the tokenizer in its metadata (llama, 8 tokens) is not stored"
        ])
    );
    let weights = manifest["weights"].as_array().expect("weights");
    let q = weights.iter().find(|w| w["name"] == "blk.0.attn_q.weight").expect("q");
    assert_eq!(q["from"][0]["tensor"], "blk.0.attn_q.weight");
    succeeds(tmp.path(), &["extract", "t.rad", "config.json", "-o", "made.json"]);
    let config = json(&fs::read_to_string(tmp.path().join("made.json")).expect("reads"));
    assert_eq!(config["model_type"], "llama");

    // Another file under the same name is told apart.
    let mut bytes = fs::read(&source).expect("reads");
    let last = bytes.len() - 40;
    bytes[last] ^= 1;
    fs::write(tmp.path().join("tiny.gguf"), bytes).expect("written");
    let ran = radpack(tmp.path(), &["validate", "t.rad", "--against", "tiny.gguf"]);
    assert_eq!(ran.code, 4, "{}{}", ran.stdout, ran.stderr);
}

#[test]
fn an_export_has_the_names_and_values_of_the_original_checkpoint() {
    for name in ["tiny-llama", "tiny-qwen3-moe", "tiny-gemma3"] {
        let tmp = tempdir().expect("a folder");
        put(name, Outtype::Bf16, &tmp.path().join("m.gguf"));
        succeeds(tmp.path(), &["convert", "m.gguf", "--recipe", "bf16", "-o", "g.rad"]);
        succeeds(tmp.path(), &["export", "g.rad", "--format", "safetensors", "-o", "out"]);
        let bytes = fs::read(tmp.path().join("out/model.safetensors")).expect("reads");
        let out = SafeTensors::deserialize(&bytes).expect("safetensors");
        let folder = testkit::tiny_model(name);
        let mut checked = 0;
        for entry in fs::read_dir(&folder).expect("lists") {
            let path = entry.expect("an entry").path();
            if path.extension().is_none_or(|e| e != "safetensors") {
                continue;
            }
            let bytes = fs::read(&path).expect("reads");
            for (tensor, view) in SafeTensors::deserialize(&bytes).expect("safetensors").iter() {
                let found = out.tensor(tensor).unwrap_or_else(|e| panic!("{name} {tensor}: {e}"));
                assert_eq!(found.shape(), view.shape(), "{name} {tensor}");
                if found.dtype() == view.dtype() {
                    assert_eq!(found.data(), view.data(), "{name} {tensor}");
                }
                checked += 1;
            }
        }
        assert_eq!(checked, out.len(), "{name}");
    }
}

#[test]
fn files_that_are_not_read_are_refused_with_what_would_work() {
    let tmp = tempdir().expect("a folder");
    let mut file =
        gguf::convert(&testkit::tiny_model("tiny-llama"), Outtype::F32).expect("converts");
    file.pairs[0].1 = gguf::Value::Text("rwkv7".into());
    fs::write(tmp.path().join("m.gguf"), file.bytes()).expect("written");
    let ran = radpack(tmp.path(), &["convert", "m.gguf", "--recipe", "w8a16", "-o", "t.rad"]);
    assert_eq!(ran.code, 3);
    insta::assert_snapshot!(ran.stderr.lines().take(7).collect::<Vec<_>>().join("\n"), @r"
    error: this GGUF file cannot be understood  [exit 3]

      gguf: m.gguf: `general.architecture` is `rwkv7`, which is not read
        = read are llama, qwen2, qwen3, qwen3moe, gemma3 and gemma4
        = --weights-only converts by tensor name and class, under the names of the file

    1 problem; nothing was read beyond the headers, nothing was written
    ");
    succeeds(
        tmp.path(),
        &["convert", "m.gguf", "--recipe", "w8a16", "--weights-only", "-o", "t.rad"],
    );
    fs::write(tmp.path().join("m.gguf"), b"GGUF\x03").expect("written");
    let ran = radpack(tmp.path(), &["convert", "m.gguf", "--recipe", "w8a16", "-o", "t2.rad"]);
    assert_eq!(ran.code, 3);
    assert!(!tmp.path().join("t2.rad").exists());
}
