//! Programs in artifacts as people meet them: `convert --target`, `inspect --graphs`, `explain`, and `validate` on
//! programs that do not go with their file.

mod cli_support;

use std::fs;
use std::path::Path;

use cli_support::{Ran, radpack, succeeds};
use serde_json::Value;
use tempfile::{TempDir, tempdir};

const SIZES: &str = r#"schema = 1
name = "small"
[[quantize]]
class = "linear"
tower = "text"
encoding = "int8-g32"
[graphs]
max_seq_len = 256
batch_size = 4
decoder_batch_sizes = [4, 1]
prefill_chunk_size = 64
kv_partition_len = 64
image_prefill_chunk_size = [128]
"#;

fn fixture() -> String {
    cli_support::dense().display().to_string()
}

fn converted(devices: &str) -> TempDir {
    let tmp = tempdir().expect("a folder");
    fs::write(tmp.path().join("small.toml"), SIZES).expect("writes");
    let source = fixture();
    let args = ["convert", &source, "--recipe", "small.toml", "--devices", devices, "-o", "x.rad"];
    succeeds(tmp.path(), &args);
    tmp
}

/// A run that ends with that code.
fn fails(folder: &Path, args: &[&str], code: i32) -> Ran {
    let ran = radpack(folder, args);
    assert_eq!(ran.code, code, "{}{}", ran.stdout, ran.stderr);
    ran
}

fn json(folder: &Path, args: &[&str]) -> Value {
    serde_json::from_str(&succeeds(folder, args).stdout).expect("one JSON document")
}

#[test]
fn an_artifact_shows_its_programs_and_their_memory() {
    let tmp = converted("4");
    let text = succeeds(tmp.path(), &["inspect", "x.rad", "--graphs"]).stdout;
    for name in
        ["prefill", "image_prefill_128", "decode_b4", "decode_b1", "vision_t12", "project_t12"]
    {
        assert!(text.lines().any(|l| l.starts_with(&format!("{name} "))), "{name}\n{text}");
    }
    assert!(
        text.contains("takes     text, image and video") || text.contains("text, image, video")
    );
    assert!(text.contains("up to 256 tokens, 4 at a time"), "{text}");
    // One full layer of 4 key heads 16 wide, one head on each of 4 devices, keys and values in bf16.
    assert!(
        text.contains("blocks of 64 tokens, 4.00 KiB each on a device · 5 to 16 blocks"),
        "{text}"
    );

    let program = succeeds(tmp.path(), &["inspect", "x.rad", "--graph", "decode_b1"]).stdout;
    assert!(program.starts_with("program decode_b1 on 4 devices {"), "{program}");
    assert!(program.contains("= all_reduce("), "{program}");
    let unknown = fails(tmp.path(), &["inspect", "x.rad", "--graph", "decode_1"], 2);
    assert!(unknown.stderr.contains("did you mean decode_b1"), "{}", unknown.stderr);

    let memory = succeeds(tmp.path(), &["inspect", "x.rad", "--memory"]).stdout;
    assert_eq!(memory.lines().count(), 5, "four devices\n{memory}");
    let summary = succeeds(tmp.path(), &["inspect", "x.rad"]).stdout;
    assert!(summary.contains("programs  6 for up to 256 tokens"), "{summary}");
}

#[test]
fn explain_counts_calls_padding_and_blocks() {
    let tmp = converted("1");
    let args =
        ["explain", "x.rad", "--batch", "3", "--prompt", "100", "--image-tokens", "12", "--json"];
    let d = json(tmp.path(), &args);
    let calls: Vec<(&str, u64, u64, u64)> = d["calls"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|c| {
            let n = |key: &str| c[key].as_u64().expect("a number");
            (c["program"].as_str().expect("a name"), n("first"), n("tokens"), n("rows"))
        })
        .collect();
    assert_eq!(
        calls,
        [
            ("prefill", 0, 1, 64),
            ("image_prefill_128", 1, 12, 128),
            ("prefill", 13, 64, 64),
            ("prefill", 77, 23, 64)
        ]
    );
    assert_eq!(d["decode"]["program"], "decode_b4");
    assert_eq!(d["decode"]["padding_rows"], 1);
    assert_eq!(d["image_programs"][0], "vision_t12");
    assert_eq!(d["padding_rows"], 63 + 116 + 41);
    // Slots 0 to 140 are written, padding included: three blocks of 64.
    assert_eq!((d["blocks"].as_u64(), d["all_blocks"].as_u64()), (Some(3), Some(9)));
    assert_eq!(d["left"], 156);

    let long = fails(tmp.path(), &["explain", "x.rad", "--prompt", "300"], 3);
    assert!(
        long.stderr.contains("320 cache slots are needed, the longest sequence has 256")
            || long.stderr.contains("cache slots are needed, the longest sequence has 256"),
        "{}",
        long.stderr
    );
    let many = fails(tmp.path(), &["explain", "x.rad", "--prompt", "3", "--batch", "5"], 3);
    assert!(many.stderr.contains("5 sequences; the programs serve 4"), "{}", many.stderr);
    let wide = ["explain", "x.rad", "--prompt", "50", "--image-tokens", "13"];
    let wide = fails(tmp.path(), &wide, 3);
    assert!(wide.stderr.contains("an image of 13 tokens; the largest vision program makes 12"));
}

#[test]
fn text_only_leaves_towers_out_and_says_what_it_takes() {
    let tmp = tempdir().expect("a folder");
    let source = fixture();
    succeeds(tmp.path(), &["convert", &source, "--text-only", "-o", "x.rad"]);
    let d = json(tmp.path(), &["inspect", "x.rad", "--json"]);
    assert_eq!(d["manifest"]["graphs"]["takes"], serde_json::json!(["text"]));
    let why = d["manifest"]["graphs"]["refuses"]["image"].as_str().expect("a reason");
    assert!(why.starts_with("the recipe leaves the image encoder out"), "{why}");
    let programs = d["manifest"]["graphs"]["programs"].as_array().expect("a list");
    assert!(programs.iter().all(|p| p["kind"] == "prefill" || p["kind"] == "decode"));
    let entries = d["entries"].as_array().expect("a list");
    let tower = |e: &&Value| {
        e["name"].as_str().is_some_and(|n| n.starts_with("vision.") || n.starts_with("mm."))
    };
    assert_eq!(entries.iter().filter(tower).count(), 0);
    succeeds(tmp.path(), &["validate", "x.rad"]);
}

#[test]
fn a_target_refuses_what_it_does_not_run_before_any_work() {
    let tmp = tempdir().expect("a folder");
    let source = fixture();
    let args = ["convert", &source, "--recipe", "nvfp4", "--target", "rbln-ca25", "-o", "x.rad"];
    let ran = fails(tmp.path(), &args, 3);
    assert!(ran.stderr.contains("rbln-ca25 runs no weights in nvfp4"), "{}", ran.stderr);
    assert!(!tmp.path().join("x.rad").exists());
    let args = ["convert", &source, "--target", "b200", "--dry-run"];
    let ran = fails(tmp.path(), &args, 2);
    assert!(ran.stderr.contains("did you mean nvidia-b200?"), "{}", ran.stderr);
}

#[test]
fn more_buckets_add_programs_and_no_weights() {
    let tmp = tempdir().expect("a folder");
    fs::write(tmp.path().join("small.toml"), SIZES).expect("writes");
    let source = fixture();
    let convert = |out: &str, more: &[&str]| {
        let mut args = vec!["convert", &source, "--recipe", "small.toml", "-o", out];
        args.extend(more);
        succeeds(tmp.path(), &args);
        json(tmp.path(), &["inspect", out, "--json"])
    };
    let few = convert("few.rad", &[]);
    let many = convert("many.rad", &["--set", "graphs.decoder_batch_sizes=[4, 3, 2, 1]"]);
    let list = |d: &Value, programs: bool| -> Vec<(String, u64)> {
        let all = d["entries"].as_array().expect("a list").iter();
        let own = |name: &str| name.starts_with("radpack/");
        all.map(|e| {
            (e["name"].as_str().expect("a name").to_owned(), e["bytes"].as_u64().unwrap_or(0))
        })
        .filter(|(name, _)| own(name) == programs)
        .collect()
    };
    assert_eq!(list(&few, false), list(&many, false), "the same weights");
    let sum = |d: &Value| list(d, true).iter().map(|(_, bytes)| bytes).sum::<u64>();
    let (before, after) = (sum(&few), sum(&many));
    let sections: u64 = list(&many, true)
        .iter()
        .filter(|(name, _)| name.ends_with("decode_b3") || name.ends_with("decode_b2"))
        .map(|(_, bytes)| bytes)
        .sum();
    assert!(sections > 0 && after - before >= sections, "{before} {after} {sections}");
    assert!(after - before < sections + 4096, "{before} {after} {sections}");
}

#[test]
fn programs_of_another_file_are_found() {
    // The programs for four devices read pieces; in a file for one device the weights are whole.
    let (one, four) = (converted("1"), converted("4"));
    let read = |tmp: &TempDir| {
        let path = tmp.path().join("x.rad");
        radpack::artifact::Artifact::open(&path).expect("opens")
    };
    let (one, four) = (read(&one), read(&four));
    assert!(radpack::pipeline::check_programs(&one, None).is_empty());
    let manifest = |a: &radpack::artifact::Artifact| {
        let entry = a.find("radpack/manifest.json").expect("a manifest");
        radpack::artifact::manifest::Manifest::parse(entry.plane(0)).expect("reads")
    };
    let mut other = manifest(&four);
    assert!(radpack::pipeline::check_programs(&four, Some(&other)).is_empty());
    // A manifest that tells of other programs, another batch, other devices.
    let graphs = other.graphs.as_mut().expect("programs");
    graphs.programs.remove(0);
    graphs.batch_size = 2;
    let found = radpack::pipeline::check_programs(&four, Some(&other)).into_vec();
    let text: Vec<&str> = found.iter().map(|p| p.message.as_str()).collect();
    assert!(text.iter().any(|m| m.starts_with("the manifest tells of")), "{text:?}");
    assert!(
        text.iter().any(|m| m.contains("the manifest says blocks of 64 tokens, 2 sequences")),
        "{text:?}"
    );
    let found = radpack::pipeline::check_programs(&one, Some(&manifest(&four))).into_vec();
    assert!(found.iter().any(|p| p.message.contains("on 4 devices")), "{found:?}");
}
