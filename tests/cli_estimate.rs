//! `radpack estimate-kv` with the real binary.

mod cli_support;
mod published_support;

use std::path::Path;

use cli_support::{dense, radpack, succeeds};
use serde_json::Value;
use tempfile::tempdir;

fn model() -> String {
    dense().to_str().expect("UTF-8").to_owned()
}

#[test]
fn a_folder_and_the_file_made_of_it_have_one_answer() {
    let tmp = tempdir().expect("a folder");
    let model = model();
    let sets = ["--set", "target.profile=cpu", "--set", "graphs.batch_size=2"];
    for devices in ["1", "2"] {
        let mut convert =
            vec!["convert", &model, "--recipe", "w8a16", "--devices", devices, "-o", "t.rad"];
        convert.extend(sets);
        succeeds(tmp.path(), &convert);
        let mut plan =
            vec!["estimate-kv", &model, "--recipe", "w8a16", "--devices", devices, "--json"];
        plan.extend(sets);
        let read = |text: &str| -> Value { serde_json::from_str(text).expect("one document") };
        let planned = read(&succeeds(tmp.path(), &plan).stdout);
        let stored = read(&succeeds(tmp.path(), &["estimate-kv", "t.rad", "--json"]).stdout);
        assert_eq!(planned["estimate"], stored["estimate"], "{devices}");
        assert_eq!(planned["layers"], stored["layers"], "{devices}");
        let e = &planned["estimate"];
        assert_eq!(e["allocator"], "exact");
        assert_eq!(e["devices"].as_array().map(Vec::len), devices.parse().ok());
        assert_eq!(e["tokens"], e["blocks"].as_u64().expect("blocks") * 64);
    }
    let changed = radpack(tmp.path(), &["estimate-kv", "t.rad", "--batch-size", "4"]);
    assert_eq!(changed.code, 2, "{}", changed.stderr);
}

#[test]
fn the_published_recipe_prints_its_sum() {
    let tmp = tempdir().expect("a folder");
    published_support::sparse("gemma-4-31B", &tmp.path().join("31B"));
    let args = ["estimate-kv", "31B", "--recipe", "gemma-4/rbln-w8a16-x16"];
    let ran = succeeds(tmp.path(), &args);
    insta::assert_snapshot!(ran.stdout, @r"
    per device (tightest of 16: device 0)       MiB
      memory of a device, rbln-ca25        16,384.0
      – system reserve                        288.0
      = memory budget 0.9                  14,486.4  15,190,091,366 B
      – weights                             1,937.5  832 of the decoder
      – window KV                             400.0  8 slots × 50 layers × K,V × 1,024 tokens × f16
      – workspace                             384.0  6 programs × 64.00 MiB, assumed
      = for KV blocks                      11,764.9
      ÷ one block                             320.0  10 layers × K,V × 16,384 tokens × f16

    36 blocks   589,824 tokens · 573,440 allocatable (one null block)
    contexts     2.25 of 262,144 tokens · limits: 17 blocks minimum, 128 full
    at a time    2 of 8 sequences at full length · 65,536 tokens each with all 8
    next block   needs 75.1 MiB more · 244.9 MiB are left over
    assumed      workspace 6 × 64.00 MiB (--workspace): 36 blocks for 52–104 MiB
    not counted  image encoder on device 0: 1,098.1 MiB + 128.0 MiB workspace
                 32 blocks with it · 1,609.6 MiB lie outside the budget
    ");
    let ran = radpack(tmp.path(), &[&args[..], &["--memory-budget", "50%"]].concat());
    assert_eq!(ran.code, 3, "{}", ran.stdout);
    assert!(ran.stdout.contains("16 blocks"), "{}", ran.stdout);
    assert!(ran.stderr.contains("--max-seq-len 245760 fits"), "{}", ran.stderr);
    let ran = succeeds(tmp.path(), &[&args[..], &["--layers"]].concat());
    let last = ran.stdout.lines().last().expect("layer 59");
    assert!(last.contains("own, v = raw k") && last.contains("4 (1)"), "{last}");
}

#[test]
fn what_cannot_be_estimated_says_why() {
    let tmp = tempdir().expect("a folder");
    let model = model();
    let ran = radpack(tmp.path(), &["estimate-kv", &model, "--recipe", "w8a16"]);
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    assert!(ran.stderr.contains("--target rbln-ca22"), "{}", ran.stderr);
    let target = ["estimate-kv", &model, "--recipe", "w8a16", "--target", "cpu"];
    let ran = radpack(tmp.path(), &[&target[..], &["--memory-budget", "1.5GB"]].concat());
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    let ran = radpack(tmp.path(), &[&target[..], &["--memory-budget", "17GB"]].concat());
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    let ran = radpack(tmp.path(), &[&target[..], &["--memory-budget", "1MB", "--json"]].concat());
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    let failure: Value = serde_json::from_str(&ran.stdout).expect("one document");
    assert_eq!(failure["schema"], "radpack.failure");
}

/// The published recipe over a folder of the published shapes.
const SEED: [&str; 4] = ["estimate-kv", "31B", "--recipe", "gemma-4/rbln-w8a16-x16"];

fn seed(folder: &Path) {
    published_support::sparse("gemma-4-31B", &folder.join("31B"));
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("one document")
}

fn follows(document: &Value, schema: &str) {
    let path = format!("{}/schemas/{schema}.schema.json", env!("CARGO_MANIFEST_DIR"));
    let schema = json(&std::fs::read_to_string(path).expect("a schema"));
    let validator = jsonschema::validator_for(&schema).expect("a schema");
    let errors: Vec<String> = validator.iter_errors(document).map(|e| e.to_string()).collect();
    assert!(errors.is_empty(), "{errors:?}");
}

#[test]
fn a_sweep_has_a_row_for_each_combination_and_says_why_one_is_refused() {
    let tmp = tempdir().expect("a folder");
    seed(tmp.path());
    let sweep = ["--sweep", "devices=3,8,16,32", "--sweep", "kv-dtype=f16,fp8"];
    let ran = succeeds(tmp.path(), &[&SEED[..], &sweep].concat());
    insta::assert_snapshot!(ran.stdout, @r"
    devices  kv-dtype  blocks     tokens  contexts  full length  all together
          3  f16            –          –         –            –             –  blk.*.attn_q: 32 attention heads do not split over 3 devices (and 2 more)
          3  fp8            –          –         –            –             –  blk.*.attn_q: 32 attention heads do not split over 3 devices (and 2 more)
          8  f16           29    475,136      1.81            1        49,152
          8  fp8           61    999,424      3.81            3       114,688
         16  f16           36    589,824      2.25            2        65,536
         16  fp8           74  1,212,416      4.62            4       147,456
         32  f16           39    638,976      2.44            2        65,536
         32  fp8           80  1,310,720      5.00            4       147,456
    ");
    let ran = succeeds(tmp.path(), &[&SEED[..], &sweep, &["--json"]].concat());
    let document = json(&ran.stdout);
    follows(&document, "sweep");
    assert_eq!(document["schema"], "radpack.sweep");
    assert_eq!(document["axes"], serde_json::json!(["devices", "kv-dtype"]));
    let blocks: Vec<Option<u64>> =
        document["rows"].as_array().expect("rows").iter().map(|r| r["blocks"].as_u64()).collect();
    // The published sensitivity: 29 on 8 devices, 36 on 16, 39 on 32; 74 in fp8 on 16.
    assert_eq!(blocks[..2], [None, None]);
    assert_eq!(
        (blocks[2], blocks[4], blocks[5], blocks[6]),
        (Some(29), Some(36), Some(74), Some(39))
    );
    let refused = &document["rows"][0];
    assert_eq!(refused["devices"], 3);
    assert!(refused["refusal"].as_str().expect("why").contains("do not split over 3 devices"));
    assert_eq!(refused["help"][0], "use 1, 2, 4, 8, 16 or 32 devices");
    // Lengths and batches, over what one row cannot hold.
    let sweep = ["--sweep", "length=262144,131072,1000", "--sweep", "batch=8,16,64", "--json"];
    let ran = succeeds(tmp.path(), &[&SEED[..], &sweep].concat());
    let document = json(&ran.stdout);
    let rows = document["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 9);
    assert_eq!((rows[1]["batch_size"].as_u64(), rows[1]["blocks"].as_u64()), (Some(16), Some(35)));
    // 64 windows leave 27 blocks, 65 are needed.
    let why = rows[2]["refusal"].as_str().expect("why");
    assert!(
        why.contains("65 are needed for a sequence of 262,144 tokens and a batch of 64"),
        "{why}"
    );
    assert!(
        rows[6]["refusal"].as_str().expect("why").contains("max_seq_len 1000 has to be a multiple")
    );
    assert_eq!(rows[6]["blocks"], Value::Null);
}

#[test]
fn a_sweep_where_nothing_fits_is_refused_and_a_wrong_axis_is_a_usage_error() {
    let tmp = tempdir().expect("a folder");
    seed(tmp.path());
    let ran = radpack(tmp.path(), &[&SEED[..], &["--sweep", "devices=3,5"]].concat());
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    assert!(ran.stdout.contains("do not split over 5 devices"), "{}", ran.stdout);
    for wrong in ["speed=1", "devices=0", "kv-dtype=int3", "devices=65537"] {
        let ran = radpack(tmp.path(), &[&SEED[..], &["--sweep", wrong]].concat());
        assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{wrong}: {}", ran.stderr);
    }
    let ran =
        radpack(tmp.path(), &[&SEED[..], &["--sweep", "devices=8", "--fit", "devices"]].concat());
    assert_eq!(ran.code, 2, "{}", ran.stderr);
}

#[test]
fn fit_finds_the_fewest_devices_and_the_longest_sequence() {
    let tmp = tempdir().expect("a folder");
    seed(tmp.path());
    let ran = succeeds(tmp.path(), &[&SEED[..], &["--fit", "devices"]].concat());
    let head: Vec<&str> = ran.stdout.lines().take(2).collect();
    insta::assert_snapshot!(head.join("\n"), @r"
    fit          8 devices are the fewest that fit
                 with 4: 15 cache blocks fit, 17 are needed for a sequence of 262,144 tokens and a batch of 8: device 0 lacks 597.58 MiB
    ");
    let ran = succeeds(tmp.path(), &[&SEED[..], &["--fit", "devices", "--json"]].concat());
    let document = json(&ran.stdout);
    follows(&document, "estimate");
    let fewest = document["fit"]["value"].as_u64().expect("devices");
    assert_eq!(document["estimate"]["devices"].as_array().map(Vec::len), Some(fewest as usize));
    // Every smaller number that the heads split over was tried, and a plain run agrees that it does not fit.
    let tried: Vec<u64> = document["fit"]["tried"]
        .as_array()
        .expect("tried")
        .iter()
        .filter_map(|t| t["value"].as_u64())
        .collect();
    assert_eq!(tried.last(), Some(&fewest));
    for n in tried {
        let count = n.to_string();
        let ran = radpack(tmp.path(), &[&SEED[..], &["--devices", &count]].concat());
        assert_eq!(ran.code == 0, n == fewest, "{n}: {}", ran.stderr);
    }
    // Half the memory serves 15 blocks of 16,384 tokens beside the null block: what the refusal names too.
    let half = ["--memory-budget", "50%", "--fit", "length"];
    let ran = succeeds(tmp.path(), &[&SEED[..], &half].concat());
    assert!(
        ran.stdout.starts_with("fit          245,760 tokens are the longest sequence that fits\n"),
        "{}",
        ran.stdout
    );
    let longer = ["--memory-budget", "50%", "--max-seq-len", "262144"];
    assert_eq!(radpack(tmp.path(), &[&SEED[..], &longer].concat()).code, 3);
    // A bound of the user's is the answer where it fits.
    let bound = ["--fit", "length", "--max-seq-len", "65536", "--json"];
    let document = json(&succeeds(tmp.path(), &[&SEED[..], &bound].concat()).stdout);
    assert_eq!(document["fit"]["value"], 65_536);
    let ran = radpack(
        tmp.path(),
        &[&SEED[..], &["--memory-budget", "1GiB", "--fit", "devices"]].concat(),
    );
    assert_eq!(ran.code, 3, "{}", ran.stdout);
    assert!(ran.stderr.contains("32 devices: "), "{}", ran.stderr);
}

#[test]
fn the_picture_is_written_whole_and_is_the_same_every_time() {
    let tmp = tempdir().expect("a folder");
    let model = model();
    let args = ["estimate-kv", &model, "--recipe", "w8a16", "--target", "cpu"];
    let draw = |name: &str| {
        succeeds(tmp.path(), &[&args[..], &["--svg", name]].concat());
        std::fs::read_to_string(tmp.path().join(name)).expect("a picture")
    };
    let first = draw("a.svg");
    assert_eq!(first, draw("b.svg"));
    assert!(first.starts_with("<svg ") && first.ends_with("</svg>\n"));
    assert!(first.contains("tiny-gemma4-dense · w8a16 · 1 × cpu"), "{first}");
    assert!(!tmp.path().join("a.svg.partial").exists());
    let ran = radpack(tmp.path(), &[&args[..], &["--svg", "none/a.svg"]].concat());
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    // A model that does not fit is drawn, too.
    let ran =
        radpack(tmp.path(), &[&args[..], &["--memory-budget", "1MB", "--svg", "c.svg"]].concat());
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    assert!(tmp.path().join("c.svg").exists());
}
