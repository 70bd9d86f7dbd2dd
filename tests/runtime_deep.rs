//! `validate --deep`: every kind of program runs, sound files pass, and a wrong program or weight of each kind is found
//! though every digest holds.

#[path = "cli_support/mod.rs"]
mod cli_support;

use std::fs;
use std::path::Path;

use cli_support::{radpack, resealed, succeeds};
use radpack::artifact::Artifact;
use radpack::graph::{Op, Programs};
use radpack::runtime::{self, BOUND, Compared, Proof};
use serde_json::Value;

const RECIPE: &str = "schema = 1\n[[quantize]]\nclass = [\"linear\", \"expert\"]\nencoding = { codes = \"i8\", scale = \"bf16\", group = 16 }\n[graphs]\nmax_seq_len = 512\nbatch_size = 2\ndecoder_batch_sizes = [2, 1]\nprefill_chunk_size = 32\nkv_partition_len = 256\n";
const IMAGES: &str = "[vision]\nmax_soft_tokens = [12, 6]\n";

fn tiny(name: &str) -> String {
    testkit::tiny_model(name).to_str().expect("UTF-8").to_owned()
}

fn converted(folder: &Path, model: &str, more: &[&str]) -> Artifact {
    converted_with(folder, model, more, if model.contains("gemma4") { IMAGES } else { "" })
}

fn converted_with(folder: &Path, model: &str, more: &[&str], images: &str) -> Artifact {
    fs::write(folder.join("recipe.toml"), format!("{RECIPE}{images}")).expect("writes");
    let source = tiny(model);
    let args = ["convert", &source, "--recipe", "recipe.toml", "-o", "m.rad"];
    succeeds(folder, &[&args[..], more].concat());
    Artifact::open(&folder.join("m.rad")).expect("opens")
}

fn proved(artifact: &Artifact, change: impl FnOnce(&mut Programs)) -> Proof {
    let mut opened = runtime::open(artifact).unwrap_or_else(|f| panic!("{f}"));
    change(&mut opened.programs);
    runtime::prove(&opened, 1 << 30).unwrap_or_else(|f| panic!("{f}"))
}

#[test]
fn every_kind_of_program_runs_and_agrees_with_the_model_compiled_anew() {
    let tmp = tempfile::tempdir().expect("a folder");
    let draft = tiny("tiny-gemma4-assistant");
    for devices in ["1", "2", "4", "16"] {
        let more = ["--devices", devices, "--draft-model", &draft];
        let artifact = converted(tmp.path(), "tiny-gemma4-dense", &more);
        let proof = proved(&artifact, |_| ());
        assert_eq!(proof.problems, [], "{devices}");
        let expected = [
            "decode_b1",
            "decode_b2",
            "draft_b1",
            "draft_b2",
            "image_prefill_128",
            "prefill",
            "project_t12",
            "project_t6",
            "vision_t12",
            "vision_t6",
        ];
        assert_eq!(proof.programs, expected, "{devices}");
        match proof.compared {
            Compared::Equal => assert_eq!(devices, "1"),
            Compared::OneDevice { devices: n, largest } => {
                println!("{n} devices: {largest:.1e}");
                assert_eq!(n.to_string(), devices);
                assert!(largest > 0.0 && largest < BOUND / 5.0, "{largest}");
            }
            Compared::Nothing => panic!("nothing was compared"),
        }
    }
    for model in [
        "tiny-gemma4-e",
        "tiny-gemma4-moe",
        "tiny-gemma4-unified",
        "tiny-llama",
        "tiny-qwen3-moe",
        "tiny-mistral",
        "tiny-gemma3",
        "tiny-gemma3-vision",
        "tiny-qwen3",
    ] {
        for devices in ["1", "4"] {
            let artifact = converted(tmp.path(), model, &["--devices", devices]);
            let proof = proved(&artifact, |_| ());
            assert_eq!(proof.problems, [], "{model} on {devices}");
            match proof.compared {
                Compared::Equal => assert_eq!(devices, "1", "{model}"),
                Compared::OneDevice { largest, .. } => {
                    println!("{model} on {devices}: {largest:.1e}");
                    assert!(largest < BOUND / 3.0, "{model}: {largest}");
                }
                Compared::Nothing => panic!("{model}: nothing was compared"),
            }
        }
    }
}

#[test]
fn every_image_bucket_runs() {
    let tmp = tempfile::tempdir().expect("a folder");
    let images = "[vision]\nmax_soft_tokens = [140, 6]\n";
    let artifact = converted_with(tmp.path(), "tiny-gemma4-dense", &["--devices", "2"], images);
    let proof = proved(&artifact, |_| ());
    assert_eq!(proof.problems, []);
    for name in ["image_prefill_256", "image_prefill_128", "vision_t140", "vision_t6"] {
        assert!(proof.programs.iter().any(|p| p == name), "{name}: {:?}", proof.programs);
    }
}

#[test]
fn a_wrong_operation_in_a_program_of_any_kind_is_found_and_named() {
    let tmp = tempfile::tempdir().expect("a folder");
    let draft = tiny("tiny-gemma4-assistant");
    for devices in ["1", "4"] {
        let more = ["--devices", devices, "--draft-model", &draft];
        let artifact = converted(tmp.path(), "tiny-gemma4-dense", &more);
        for name in [
            "prefill",
            "image_prefill_128",
            "decode_b2",
            "decode_b1",
            "draft_b2",
            "draft_b1",
            "vision_t12",
            "vision_t6",
            "project_t12",
            "project_t6",
        ] {
            let proof = proved(&artifact, |programs| {
                let program = programs.programs.iter_mut().find(|p| p.name == name).expect(name);
                let mut norms = program.nodes.iter_mut().filter_map(|n| match &mut n.op {
                    Op::RmsNorm { eps, .. } => Some(eps),
                    _ => None,
                });
                *norms.next_back().expect("a norm") = 1e6;
            });
            let said: Vec<&str> = proof.problems.iter().map(|p| p.message.as_str()).collect();
            // A wrong prefill spoils what decodes after it; the program itself is among those named.
            assert!(
                said.iter().any(|m| m.contains(name) && m.contains("compiled anew")),
                "{name}: {said:?}"
            );
            let own = |m: &&str| m.starts_with("vision") || m.starts_with("project");
            if name.starts_with("draft") {
                assert_eq!(said.len(), 1, "{name}: {said:?}");
            } else if let Some(batch) = name.strip_prefix("decode_") {
                // A draft step starts from what the decode step leaves.
                assert!(said.iter().all(|m| m.contains(batch)), "{name}: {said:?}");
            } else if name.starts_with("prefill") {
                assert!(!said.iter().any(own), "{name}: {said:?}");
            }
        }
    }
}

#[test]
fn a_mistake_that_only_several_devices_make_is_found() {
    let tmp = tempfile::tempdir().expect("a folder");
    let artifact = converted(tmp.path(), "tiny-llama", &["--devices", "4"]);
    // Each of the four devices adds what only one should: the residual stream before a sum over devices.
    let doubled = |programs: &mut Programs| {
        let decode =
            programs.programs.iter_mut().find(|p| p.name == "decode_b1").expect("it is there");
        let node = decode.nodes.iter_mut().rfind(|n| matches!(n.op, Op::AllReduce)).expect("a sum");
        // The device's own part in place of the sum.
        node.op = Op::Affine { scale: 1.0, shift: 0.0 };
    };
    let mut opened = runtime::open(&artifact).unwrap_or_else(|f| panic!("{f}"));
    doubled(&mut opened.programs);
    match runtime::prove(&opened, 1 << 30) {
        // Values that differ between devices are unsound by themselves.
        Err(failure) => assert!(failure.headline.contains("unsound"), "{failure}"),
        Ok(proof) => assert!(!proof.problems.is_empty()),
    }
}

fn validated(folder: &Path, bytes: &[u8], deep: bool) -> (i32, Value) {
    fs::write(folder.join("x.rad"), bytes).expect("writes");
    let args = ["validate", "x.rad", "--json", "--deep"];
    let ran = radpack(folder, if deep { &args[..] } else { &args[..3] });
    let document: Value = serde_json::from_str(&ran.stdout).expect("JSON");
    let schema = fs::read_to_string(testkit::root().join("schemas/validate.schema.json"));
    let schema: Value = serde_json::from_str(&schema.expect("committed")).expect("JSON");
    assert!(jsonschema::is_valid(&schema, &document), "{document}");
    (ran.code, document)
}

#[test]
fn files_with_whole_digests_and_wrong_contents_exit_with_4() {
    let tmp = tempfile::tempdir().expect("a folder");
    let draft = tiny("tiny-gemma4-assistant");
    let artifact = converted(tmp.path(), "tiny-gemma4-dense", &["--draft-model", &draft]);
    let bytes = fs::read(tmp.path().join("m.rad")).expect("reads");
    let (code, document) =
        validated(tmp.path(), &resealed(&bytes, "radpack/graph/prefill", |_| ()), true);
    assert_eq!(code, 0, "{document}");
    assert_eq!(document["compared"]["same_programs"], true);
    assert_eq!(document["ran"].as_array().expect("programs").len(), 10);

    // Programs: another epsilon in the last norm of each stored one.
    for program in &runtime::read_programs(&artifact).expect("reads").expect("programs").programs {
        let name = format!("radpack/graph/{}", program.name);
        let eps = 1e-6f64.to_le_bytes();
        let changed = resealed(&bytes, &name, |section| {
            let at = section.windows(8).rposition(|w| w == eps).expect("an epsilon");
            section[at..at + 8].copy_from_slice(&1e6f64.to_le_bytes());
        });
        assert_eq!(validated(tmp.path(), &changed, false).0, 0, "{name}: the structure is whole");
        let (code, document) = validated(tmp.path(), &changed, true);
        assert_eq!(code, 4, "{name}: {document}");
        assert!(document["findings"].to_string().contains(&program.name), "{name}: {document}");
    }

    // Weights of every tower: a finite value so large that what follows is not.
    for weight in [
        "blk.0.attn_norm.weight",
        "vision.blk.0.attn_norm.weight",
        "draft.blk.0.attn_norm.weight",
        "vision.std_scale",
    ] {
        let changed = resealed(&bytes, weight, |values| {
            // The largest bf16, and the layers after it overflow.
            for value in values.as_chunks_mut::<2>().0 {
                *value = 0x7f7fu16.to_le_bytes();
            }
        });
        let (code, document) = validated(tmp.path(), &changed, true);
        assert_eq!(code, 4, "{weight}: {document}");
    }
}

#[test]
fn deep_validation_says_what_it_compared() {
    let tmp = tempfile::tempdir().expect("a folder");
    converted(tmp.path(), "tiny-gemma4-dense", &["--devices", "4"]);
    let text = succeeds(tmp.path(), &["validate", "m.rad", "--deep"]).stdout;
    assert!(text.contains("8 programs ran, all values finite"), "{text}");
    assert!(
        text.contains("on 4 devices as the model compiled anew on one (largest difference"),
        "{text}"
    );
}
