//! `radpack estimate-kv` with the real binary.

mod cli_support;

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
    let at = testkit::fixtures().join("gemma4");
    testkit::sparse::sparse(
        &at.join("shapes/gemma-4-31B.tsv"),
        &at.join("configs/gemma-4-31B.json"),
        &tmp.path().join("31B"),
        testkit::sparse::SparseOptions::default(),
    )
    .expect("a sparse checkpoint");
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
