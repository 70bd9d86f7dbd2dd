//! A model and its draft head in one file, with the real binary.

mod cli_support;

use std::fs;
use std::path::Path;

use cli_support::{Ran, dense, radpack, sha256, succeeds};
use serde_json::Value;
use tempfile::{TempDir, tempdir};

fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("one JSON document")
}

fn tiny(name: &str) -> String {
    testkit::tiny_model(name).to_str().expect("UTF-8").to_owned()
}

/// A folder with a recipe file of these rules.
fn recipe(rules: &str) -> TempDir {
    let tmp = tempdir().expect("a folder");
    let text = format!("schema = 1\nname = \"test\"\n{rules}");
    fs::write(tmp.path().join("test.toml"), text).expect("writes");
    tmp
}

/// Converts a model with its draft under `test.toml`, validates the file, and gives its weight records.
fn converted(folder: &Path, model: &str, draft: &str) -> Vec<Value> {
    let convert =
        ["convert", model, "--draft-model", draft, "--recipe", "test.toml", "-o", "t.rad"];
    succeeds(folder, &convert);
    let valid = ["validate", "t.rad", "--against", model, "--draft-model", draft];
    let ran = succeeds(folder, &valid);
    assert!(ran.stdout.ends_with("valid\n"), "{}", ran.stdout);
    let shown = json(&succeeds(folder, &["inspect", "t.rad", "--json"]).stdout);
    shown["manifest"]["weights"].as_array().expect("a list").clone()
}

fn record<'v>(weights: &'v [Value], name: &str) -> &'v Value {
    weights.iter().find(|w| w["name"] == name).unwrap_or_else(|| panic!("{name}"))
}

fn entries(folder: &Path) -> Vec<String> {
    let shown = json(&succeeds(folder, &["inspect", "t.rad", "--json"]).stdout);
    let entries = shown["entries"].as_array().expect("a list");
    entries.iter().filter_map(|e| e["name"].as_str().map(str::to_owned)).collect()
}

const PAIRS: [(&str, &str); 2] =
    [("tiny-gemma4-dense", "tiny-gemma4-assistant"), ("tiny-gemma4-e", "tiny-gemma4-e-assistant")];

#[test]
fn a_draft_head_goes_into_the_file_and_validates_against_both_sources() {
    for (model, draft) in PAIRS {
        let (model, draft) = (tiny(model), tiny(draft));
        let tmp = recipe("[[quantize]]\nclass = \"linear\"\nencoding = \"int8-g32\"\n");
        let weights = converted(tmp.path(), &model, &draft);
        let q = record(&weights, "draft.blk.0.attn_q.weight");
        assert_eq!(q["encoding"], "int8-g32");
        assert_eq!(q["from"][0]["tensor"], "draft.model.layers.0.self_attn.q_proj.weight");
        assert_eq!(record(&weights, "blk.0.attn_q.weight")["encoding"], "int8-g32");

        let shown = json(&succeeds(tmp.path(), &["inspect", "t.rad", "--json"]).stdout);
        let files = shown["manifest"]["source"]["files"].as_array().expect("a list");
        let path = |f: &Value| f["path"].as_str().expect("a path").to_owned();
        let from_draft: Vec<String> =
            files.iter().map(path).filter(|p| p.starts_with("draft/")).collect();
        assert!(from_draft.contains(&"draft/config.json".to_owned()), "{from_draft:?}");
        assert!(from_draft.contains(&"draft/tokenizer.json".to_owned()), "{from_draft:?}");
        assert!(from_draft.iter().any(|p| p.ends_with(".safetensors")), "{from_draft:?}");
        for file in files {
            let path = path(file);
            let on_disk = match path.strip_prefix("draft/") {
                Some(rest) => Path::new(&draft).join(rest),
                None => Path::new(&model).join(&path),
            };
            assert_eq!(file["sha256"], sha256(&on_disk), "{path}");
        }
        let stored = shown["manifest"]["files"].as_array().expect("a list");
        let stored: Vec<String> =
            stored.iter().map(path).filter(|p| p.starts_with("draft/")).collect();
        assert_eq!(stored, ["draft/config.json"]);
        succeeds(tmp.path(), &["extract", "t.rad", "draft/config.json", "-o", "draft.json"]);
        let extracted = fs::read(tmp.path().join("draft.json")).expect("reads");
        assert_eq!(extracted, fs::read(Path::new(&draft).join("config.json")).expect("reads"));

        let metadata = shown["metadata"].as_array().expect("a list");
        let row = |key: &str| metadata.iter().find(|r| r[0] == key).map(|r| r[1].clone());
        let kind = row("draft.model_type").expect("the draft's configuration is there");
        assert!(kind.as_str().is_some_and(|k| k.contains("assistant")), "{kind}");
        let summary = shown["manifest"]["model"]["towers"].as_array().expect("a list");
        assert!(summary.iter().any(|t| t["name"] == "draft"), "{summary:?}");
    }
}

#[test]
fn rules_find_the_draft_by_tower_prefix_and_logical_name() {
    let tmp = recipe(concat!(
        "[[quantize]]\nmatch = \"model.layers.0.self_attn.q_proj.weight\"\ntower = \"draft\"\n",
        "encoding = \"int8-g64\"\n",
        "[[quantize]]\nmatch = \"draft.model.layers.1.*.q_proj.weight\"\nencoding = \"int8-g32\"\n",
        "[[quantize]]\nweight = \"draft.blk.2.attn_q.weight\"\nencoding = \"f32\"\n",
    ));
    let (model, draft) = PAIRS[0];
    let weights = converted(tmp.path(), &tiny(model), &tiny(draft));
    let rules: Vec<(String, u64)> = weights
        .iter()
        .filter_map(|w| Some((w["name"].as_str()?.to_owned(), w["rule"].as_u64()?)))
        .collect();
    let expected = [
        ("draft.blk.0.attn_q.weight", 1),
        ("draft.blk.1.attn_q.weight", 2),
        ("draft.blk.2.attn_q.weight", 3),
    ];
    assert_eq!(rules, expected.map(|(name, rule)| (name.to_owned(), rule)));
}

#[test]
fn the_embedding_of_a_draft_head_is_stored_once_as_its_head() {
    let (model, draft) = (tiny(PAIRS[0].0), tiny(PAIRS[0].1));
    let head = "draft.output.weight";
    for (rules, encoding, rule) in [
        ("", "bf16", Value::Null),
        (
            "[[quantize]]\ntower = \"draft\"\nclass = \"lm_head\"\nencoding = \"int8-g32\"\n",
            "int8-g32",
            1.into(),
        ),
        (
            "[[quantize]]\nmatch = \"model.embed_tokens.weight\"\nencoding = \"int8-g64\"\n",
            "int8-g64",
            1.into(),
        ),
        (
            "[[quantize]]\nweight = \"draft.token_embd.weight\"\nencoding = \"f16\"\n",
            "f16",
            1.into(),
        ),
        ("[[quantize]]\nmatch = \"draft.lm_head.weight\"\nencoding = \"f32\"\n", "f32", 1.into()),
        // The target's embedding; nothing of the draft is one.
        ("[[quantize]]\nclass = \"embedding\"\nencoding = \"f32\"\n", "bf16", Value::Null),
    ] {
        let tmp = recipe(rules);
        let weights = converted(tmp.path(), &model, &draft);
        for name in [head, "draft.token_embd.weight"] {
            let weight = record(&weights, name);
            assert_eq!(weight["encoding"], encoding, "{rules}");
            assert_eq!(weight["rule"], rule, "{rules}");
            assert_eq!(weight["from"][0]["tensor"], "draft.model.embed_tokens.weight");
        }
        assert_eq!(record(&weights, "draft.token_embd.weight")["tied_to"], head);
        let entries = entries(tmp.path());
        assert!(entries.iter().any(|e| e == head), "{rules}");
        assert!(!entries.iter().any(|e| e == "draft.token_embd.weight"), "{rules}");
    }
}

#[test]
fn a_rule_for_the_embedding_of_a_draft_head_is_told_that_it_is_a_head() {
    let tmp =
        recipe("[[quantize]]\ntower = \"draft\"\nclass = \"embedding\"\nencoding = \"f32\"\n");
    let (model, draft) = (tiny(PAIRS[0].0), tiny(PAIRS[0].1));
    let args = ["convert", &model, "--draft-model", &draft, "--recipe", "test.toml", "--dry-run"];
    let ran = radpack(tmp.path(), &args);
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    assert!(
        ran.stderr.contains(
            "the draft's embedding serves only as its head: class = \"lm_head\" selects it"
        ),
        "{}",
        ran.stderr
    );
}

#[test]
fn a_draft_head_alone_is_stored_as_it_is_beside_its_target() {
    let (model, draft) = (tiny(PAIRS[0].0), tiny(PAIRS[0].1));
    let tmp = recipe("[[quantize]]\nclass = \"linear\"\nencoding = \"int8-g32\"\n");
    let both = converted(tmp.path(), &model, &draft);
    let both: Vec<&str> = both.iter().filter_map(|w| w["name"].as_str()).collect();
    let alone = ["convert", &draft, "--recipe", "test.toml", "-o", "t.rad"];
    succeeds(tmp.path(), &alone);
    succeeds(tmp.path(), &["validate", "t.rad", "--against", &draft]);
    let alone = entries(tmp.path());
    let weights: Vec<&String> = alone.iter().filter(|e| !e.starts_with("radpack/")).collect();
    assert_eq!(weights.len(), 48, "one entry a tensor");
    for name in weights {
        assert!(both.contains(&name.as_str()), "{name}");
    }
}

#[test]
fn threads_change_no_byte_of_a_file_with_a_draft_head() {
    let (model, draft) = (tiny(PAIRS[1].0), tiny(PAIRS[1].1));
    let tmp = tempdir().expect("a folder");
    for (out, threads) in [("a.rad", "1"), ("b.rad", "7")] {
        let args = ["convert", &model, "--draft-model", &draft, "-o", out, "--threads", threads];
        succeeds(tmp.path(), &args);
    }
    assert_eq!(sha256(&tmp.path().join("a.rad")), sha256(&tmp.path().join("b.rad")));
}

fn refused(model: &str, draft: &str, extra: &[&str]) -> Ran {
    let tmp = tempdir().expect("a folder");
    let mut args = vec!["convert", model, "--draft-model", draft, "-o", "t.rad"];
    args.extend(extra);
    let ran = radpack(tmp.path(), &args);
    assert_eq!(fs::read_dir(tmp.path()).expect("lists").count(), 0, "nothing is written");
    ran
}

#[test]
fn drafts_that_do_not_fit_are_refused_with_every_mismatch() {
    let dense = dense();
    let dense = dense.to_str().expect("UTF-8");
    let ran = refused(dense, &tiny("tiny-llama"), &[]);
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    insta::assert_snapshot!(ran.stderr, @"
    error: this draft model cannot be merged  [exit 3]

      draft: `llama` is not a draft head
        = draft heads have model_type gemma4_assistant or gemma4_unified_assistant
        = a full model that drafts with a cache of its own cannot be merged

    1 problem; nothing was read beyond the headers, nothing was written
    ");

    let ran = refused(dense, &tiny("tiny-gemma4-e-assistant"), &[]);
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    insta::assert_snapshot!(ran.stderr, @"
    error: this draft model cannot be merged  [exit 3]

      draft: the draft head expects hidden size 64, the model has 128
        = take the assistant that was published with this model
      draft: the draft head expects key heads of sliding layers 1, the model has 16
        = take the assistant that was published with this model
      draft: the draft head expects head width of sliding layers 16, the model has 8
        = take the assistant that was published with this model
      draft: the draft head expects key heads of full layers 1, the model has 4
        = take the assistant that was published with this model
      draft: the draft head expects head width of full layers 32, the model has 16
        = take the assistant that was published with this model

    5 problems; nothing was read beyond the headers, nothing was written
    ");

    let ran = refused(&tiny("tiny-llama"), &tiny("tiny-gemma4-assistant"), &[]);
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    insta::assert_snapshot!(ran.stderr, @"
    error: this draft model cannot be merged  [exit 3]

      draft: the draft head reads the cache of a gemma4 model, this is llama
        = take the assistant that was published with this model

    1 problem; nothing was read beyond the headers, nothing was written
    ");

    let ran = refused(dense, &tiny("tiny-gemma4-assistant"), &["--weights-only"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("which --weights-only does not ask"), "{}", ran.stderr);

    let ran = refused(dense, "./nowhere", &[]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.starts_with("error: the draft model: no such file"), "{}", ran.stderr);
}

#[test]
fn a_file_is_compared_with_as_many_sources_as_it_has() {
    let (model, draft) = (tiny(PAIRS[0].0), tiny(PAIRS[0].1));
    let tmp = tempdir().expect("a folder");
    succeeds(tmp.path(), &["convert", &model, "--draft-model", &draft, "-o", "both.rad"]);
    succeeds(tmp.path(), &["convert", &model, "-o", "one.rad"]);
    let ran = radpack(tmp.path(), &["validate", "both.rad", "--against", &model]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("--draft-model SOURCE names the one"), "{}", ran.stderr);
    let args = ["validate", "one.rad", "--against", &model, "--draft-model", &draft];
    let ran = radpack(tmp.path(), &args);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("leave --draft-model out"), "{}", ran.stderr);

    // A draft with one changed value: the difference is found in its weight and in its file.
    let changed = tmp.path().join("changed");
    testkit::copy_folder(Path::new(&draft), &changed).expect("copies");
    let shard = fs::read_dir(&changed)
        .expect("lists")
        .filter_map(|f| Some(f.ok()?.path()))
        .find(|p| p.extension().is_some_and(|e| e == "safetensors"))
        .expect("a shard");
    let mut bytes = fs::read(&shard).expect("reads");
    // The sign of the last value: no rounding hides it.
    let last = bytes.len() - 1;
    bytes[last] ^= 0x80;
    fs::write(&shard, bytes).expect("writes");
    let changed = changed.to_str().expect("UTF-8");
    let args = ["validate", "both.rad", "--against", &model, "--draft-model", changed];
    let ran = radpack(tmp.path(), &args);
    assert_eq!(ran.code, 4, "{}", ran.stderr);
    assert!(ran.stderr.contains("draft."), "{}", ran.stderr);
    assert!(ran.stderr.contains("draft/model"), "{}", ran.stderr);
}

#[test]
fn the_output_may_not_replace_a_file_of_the_draft() {
    let tmp = tempdir().expect("a folder");
    let copy = tmp.path().join("draft");
    testkit::copy_folder(Path::new(&tiny(PAIRS[0].1)), &copy).expect("copies");
    let model = tiny(PAIRS[0].0);
    let args = ["convert", &model, "--draft-model", "draft", "-o", "draft/config.json"];
    let ran = radpack(tmp.path(), &args);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("the source's own draft/config.json"), "{}", ran.stderr);
}

#[test]
fn a_tied_head_is_stored_once_and_once_more_in_an_encoding_of_its_own() {
    for model in ["tiny-gemma4-dense", "tiny-gemma3", "tiny-qwen3", "tiny-gemma4-e"] {
        let model = tiny(model);
        for (rules, stored) in [
            ("", vec!["token_embd.weight"]),
            (
                "[[quantize]]\nclass = [\"embedding\", \"lm_head\"]\nencoding = \"int8-g32\"\n",
                vec!["token_embd.weight"],
            ),
            (
                "[[quantize]]\nclass = \"lm_head\"\nencoding = \"int8-g32\"\n",
                vec!["output.weight", "token_embd.weight"],
            ),
            (
                "[[quantize]]\nclass = \"embedding\"\ntower = \"text\"\nencoding = \"int8-g64\"\n",
                vec!["output.weight", "token_embd.weight"],
            ),
            (
                concat!(
                    "[[quantize]]\nweight = \"output.weight\"\nencoding = \"fp8-channel\"\n",
                    "[[quantize]]\nweight = \"token_embd.weight\"\nencoding = \"int8-channel\"\n"
                ),
                vec!["output.weight", "token_embd.weight"],
            ),
        ] {
            let tmp = recipe(rules);
            succeeds(tmp.path(), &["convert", &model, "--recipe", "test.toml", "-o", "t.rad"]);
            succeeds(tmp.path(), &["validate", "t.rad", "--against", &model]);
            let ends = ["output.weight", "token_embd.weight"];
            let mut found = entries(tmp.path());
            found.retain(|e| ends.contains(&e.as_str()));
            assert_eq!(found, stored, "{model} {rules}");
            let shown = json(&succeeds(tmp.path(), &["inspect", "t.rad", "--json"]).stdout);
            let weights = shown["manifest"]["weights"].as_array().expect("a list");
            let head = record(weights, "output.weight");
            assert_eq!(head["tied_to"], "token_embd.weight", "{model} {rules}");
            assert_eq!(head["from"], record(weights, "token_embd.weight")["from"]);
        }
    }
}
