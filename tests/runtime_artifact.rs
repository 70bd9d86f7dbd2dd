//! A file runs by itself: its programs, sizes and weights, on as many devices as it is made for.

#[path = "cli_support/mod.rs"]
mod cli_support;
mod runtime_support;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use cli_support::{dense, radpack, succeeds};
use radpack::artifact::Artifact;
use radpack::runtime::{self, ArtifactWeights, Engine, Memory, Placed};
use runtime_support::{Loaded, Reference, TOLERANCE, difference};

/// Groups of 16 codes cut anywhere between them.
const INT8_G16: &str = "schema = 1\n[[quantize]]\nclass = [\"linear\", \"expert\"]\nencoding = { codes = \"i8\", scale = \"bf16\", group = 16 }\n[graphs]\nmax_seq_len = 256\nbatch_size = 2\nprefill_chunk_size = 32\nkv_partition_len = 64\n[towers]\nvision = false\naudio = false\n";

fn convert(folder: &Path, devices: u32, recipe: &str) -> Artifact {
    fs::write(folder.join("recipe.toml"), recipe).expect("writes");
    let (source, devices) = (dense(), devices.to_string());
    let source = source.to_str().expect("UTF-8");
    let args = ["convert", source, "--recipe", "recipe.toml", "--devices", &devices, "-o", "m.rad"];
    succeeds(folder, &args);
    Artifact::open(&folder.join("m.rad")).expect("opens")
}

#[test]
fn a_file_for_any_number_of_devices_says_what_the_compiler_in_memory_says() {
    let tmp = tempfile::tempdir().expect("a folder");
    let tokens = Reference::of("tiny-gemma4-dense").tokens("text.input_ids");
    let mut expected = None;
    for devices in [1, 4, 16] {
        let artifact = convert(tmp.path(), devices, INT8_G16);
        let opened = runtime::open(&artifact).unwrap_or_else(|f| panic!("{f}"));
        let mut engine = opened.engine(256, 1 << 30).unwrap_or_else(|f| panic!("{f}"));
        let logits = engine.prefill(0, &tokens, &[]).unwrap_or_else(|f| panic!("{f}"));
        let said = engine.generate(0, &tokens, &[], 16, &[]).unwrap_or_else(|f| panic!("{f}"));
        // Weights that are not kept are decoded to the same values, some rows at a time.
        let mut sparing = opened.engine(256, 0).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(sparing.prefill(0, &tokens, &[]).expect("runs"), logits, "{devices}");
        let (one, text): &(Vec<f32>, Vec<u64>) = expected.get_or_insert_with(|| {
            // The same weights under programs that were never written.
            let loaded = Loaded::new("tiny-gemma4-dense");
            let compiled = loaded.compile(INT8_G16, &opened.sizes, 1, &[0]).expect("one device");
            let file = Artifact::open(&tmp.path().join("m.rad")).expect("opens");
            let placed = Placed::new(ArtifactWeights::new(Arc::new(file)), compiled.placement);
            let memory = Memory { blocks: 16, weights: 1 << 30 };
            let spec = &loaded.model.spec;
            let mut engine = Engine::new(compiled.programs, &compiled.sizes, spec, placed, memory)
                .unwrap_or_else(|f| panic!("{f}"));
            (
                engine.prefill(0, &tokens, &[]).expect("runs"),
                engine.generate(0, &tokens, &[], 16, &[]).expect("runs"),
            )
        });
        assert_eq!(&said, text, "{devices} devices");
        assert!(difference(&logits, one) < TOLERANCE, "{devices}");
        if devices == 1 {
            assert_eq!(&logits, one);
        } else {
            assert!(artifact.find("blk.0.ffn_down.weight@0/4").is_some() || devices == 16);
        }
    }
}

#[test]
fn run_answers_with_the_tokenizer_of_the_file() {
    let tmp = tempfile::tempdir().expect("a folder");
    convert(tmp.path(), 1, INT8_G16);
    let args = ["run", "m.rad", "--raw", "--prompt", "hello world", "--max-tokens", "5"];
    let ran = succeeds(tmp.path(), &args);
    let json = succeeds(tmp.path(), &[&args[..], &["--json"]].concat());
    let document: serde_json::Value = serde_json::from_str(&json.stdout).expect("JSON");
    let said = document["tokens"].as_array().expect("tokens").len();
    assert!((1..=5).contains(&said), "{document}");
    assert_eq!(ran.stdout, format!("{}\n", document["text"].as_str().expect("text")));
    assert!(ran.stderr.contains("tokens/s"), "{}", ran.stderr);
    let schema = fs::read_to_string(testkit::root().join("schemas/run.schema.json"));
    let schema: serde_json::Value =
        serde_json::from_str(&schema.expect("committed")).expect("JSON");
    assert!(jsonschema::is_valid(&schema, &document));
    // One thread or several, the same text.
    let one = succeeds(tmp.path(), &[&args[..], &["--threads", "1"]].concat());
    assert_eq!(one.stdout, ran.stdout);
}

#[test]
fn run_refuses_with_its_reason() {
    let tmp = tempfile::tempdir().expect("a folder");
    let said = |args: &[&str]| {
        let ran = radpack(tmp.path(), args);
        assert_eq!(ran.code, 3, "{}", ran.stderr);
        ran.stderr
    };
    convert(tmp.path(), 1, INT8_G16);
    let long = "a b c ".repeat(200);
    let text = said(&["run", "m.rad", "--raw", "--prompt", &long]);
    assert!(text.contains("the programs take 1 to 256"), "{text}");
    let text = said(&["run", "m.rad", "--prompt", "hi"]);
    assert!(text.contains("no chat template") && text.contains("--raw"), "{text}");

    let source = cli_support::dense_copy(tmp.path());
    fs::remove_file(source.join("tokenizer.json")).expect("removes");
    succeeds(tmp.path(), &["convert", "model", "--no-tokenizer", "-o", "n.rad"]);
    let text = said(&["run", "n.rad", "--raw", "--prompt", "hi"]);
    assert!(text.contains("it carries no tokenizer.json"), "{text}");
    let args = ["convert", "model", "--no-tokenizer", "--weights-only", "-o", "w.rad"];
    succeeds(tmp.path(), &args);
    let text = said(&["run", "w.rad", "--raw", "--prompt", "hi"]);
    assert!(text.contains("it holds no programs"), "{text}");
}

#[test]
fn eval_measures_nothing_against_itself_and_little_against_the_source() {
    let tmp = tempfile::tempdir().expect("a folder");
    convert(tmp.path(), 1, INT8_G16);
    let corpus = tmp.path().join("corpus.jsonl");
    let lines = "{\"source\":\"a\",\"text\":\"hello world, hello\"}\n{\"source\":\"b\",\"prompt\":\"hello\",\"answer\":\" world and more\"}\n";
    fs::write(&corpus, lines).expect("writes");
    let source = dense();
    let run = |reference: &str, more: &[&str]| {
        let args =
            ["eval", "m.rad", "--corpus", "corpus.jsonl", "--json", "--reference", reference];
        let ran = succeeds(tmp.path(), &[&args[..], more].concat());
        let schema = fs::read_to_string(testkit::root().join("schemas/eval.schema.json"));
        let schema: serde_json::Value =
            serde_json::from_str(&schema.expect("committed")).expect("JSON");
        let document: serde_json::Value = serde_json::from_str(&ran.stdout).expect("JSON");
        assert!(jsonschema::is_valid(&schema, &document));
        (ran.stdout, document)
    };
    let (_, own) = run("m.rad", &[]);
    assert_eq!(own["overall"]["kl_max"], 0.0, "{own}");
    assert_eq!(own["overall"]["perplexity_ratio"], 1.0);
    assert_eq!(own["precision"], "reference");
    // The file's own bf16 arithmetic, against the same file in f32.
    let (_, target) = run("m.rad", &["--precision", "target"]);
    assert_eq!(target["precision"], "target");
    let cost = target["overall"]["kl_mean"].as_f64().expect("a number");
    assert!((1e-6..0.1).contains(&cost), "{target}");
    let source = source.to_str().expect("UTF-8");
    let (text, measured) = run(source, &[]);
    let kl = measured["overall"]["kl_mean"].as_f64().expect("a number");
    assert!((1e-7..0.1).contains(&kl), "{measured}");
    let tokens = |part: &serde_json::Value| part["tokens"].as_u64().expect("a count");
    let (a, b) = (tokens(&measured["sources"]["a"]), tokens(&measured["sources"]["b"]));
    assert_eq!(tokens(&measured["overall"]), a + b);
    assert!(a > 1 && b > 0, "{measured}");
    assert_eq!(run(source, &["--threads", "1"]).0, text, "digits depend on threads");
}

#[test]
fn run_answers_in_the_targets_arithmetic_too() {
    let tmp = tempfile::tempdir().expect("a folder");
    convert(tmp.path(), 1, INT8_G16);
    let args = ["run", "m.rad", "--raw", "--prompt", "hello", "--max-tokens", "3", "--json"];
    let document = |more: &[&str]| -> serde_json::Value {
        let ran = succeeds(tmp.path(), &[&args[..], more].concat());
        serde_json::from_str(&ran.stdout).expect("JSON")
    };
    assert_eq!(document(&[])["precision"], "reference");
    let target = document(&["--precision", "target"]);
    assert_eq!(target["precision"], "target");
    let ran = radpack(tmp.path(), &[&args[..], &["--precision", "half"]].concat());
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("reference") && ran.stderr.contains("target"), "{}", ran.stderr);
}

#[test]
fn deep_validation_runs_every_text_program() {
    let tmp = tempfile::tempdir().expect("a folder");
    convert(tmp.path(), 4, INT8_G16);
    let text = succeeds(tmp.path(), &["validate", "m.rad", "--deep"]).stdout;
    assert!(text.contains("programs ran, all values finite"), "{text}");
}
