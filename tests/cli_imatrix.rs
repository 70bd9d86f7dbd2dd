//! `--imatrix`: importances of llama.cpp weigh the search for scales.

mod cli_support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use cli_support::{radpack, sha256, succeeds};
use radpack::artifact::Artifact;
use radpack::quantize::{Decoder, PlaneSlice};
use serde_json::Value;
use tempfile::tempdir;
use testkit::imatrix::{gguf, legacy};

const SEARCH: &str = "schema = 1\nname = \"searched\"\n[[quantize]]\ntower = \"text\"\n\
    class = [\"linear\", \"expert\"]\nencoding = \"int4-g32\"\nquantizer = \"search\"\n";

/// Means of an entry, one matrix after the other. Few columns matter much.
#[derive(Clone)]
struct Means {
    name: String,
    matrices: usize,
    values: Vec<f32>,
}

fn means(name: &str, matrices: usize, cols: usize) -> Means {
    let seed = name.bytes().fold(7usize, |h, b| (h * 31 + usize::from(b)) % 65_521);
    let value = |i: usize| {
        let r = (i + 1) * (seed % 96 + 1) % 97;
        if r < 9 { 40.0 + r as f32 } else { 0.25 + r as f32 / 128.0 }
    };
    Means { name: name.into(), matrices, values: (0..matrices * cols).map(value).collect() }
}

/// Four layers of tiny-llama: 64 columns, 128 in the attention outputs, 176 in the down projections.
fn llama() -> Vec<Means> {
    let mut all = Vec::new();
    for layer in 0..4 {
        for (leaf, cols) in [
            ("attn_q", 64),
            ("attn_k", 64),
            ("attn_v", 64),
            ("attn_output", 128),
            ("ffn_gate", 64),
            ("ffn_up", 64),
            ("ffn_down", 176),
        ] {
            all.push(means(&format!("blk.{layer}.{leaf}.weight"), 1, cols));
        }
    }
    all
}

/// 16 experts of 64 columns, 48 in the down projections; gate and up are two entries of one input.
fn experts() -> Vec<Means> {
    (0..4)
        .flat_map(|layer| {
            [("ffn_gate_exps", 64), ("ffn_up_exps", 64), ("ffn_down_exps", 48)]
                .map(|(leaf, cols)| means(&format!("blk.{layer}.{leaf}.weight"), 16, cols))
        })
        .collect()
}

fn legacy_bytes(all: &[Means]) -> Vec<u8> {
    // Four calls: sums and quotients are exact.
    let sums: Vec<Vec<f32>> =
        all.iter().map(|m| m.values.iter().map(|v| v * 4.0).collect()).collect();
    let entries: Vec<(&str, i32, &[f32])> =
        all.iter().zip(&sums).map(|(m, s)| (m.name.as_str(), 4, s.as_slice())).collect();
    legacy(&entries)
}

fn gguf_bytes(all: &[Means]) -> Vec<u8> {
    // Each matrix has a count of its own.
    let count = |matrix: usize| [2.0f32, 4.0, 8.0][matrix % 3];
    let made: Vec<(String, [u64; 2], Vec<f32>)> = all
        .iter()
        .flat_map(|m| {
            let cols = m.values.len() / m.matrices;
            let sums =
                m.values.iter().enumerate().map(|(i, v)| v * count(i / cols)).collect::<Vec<_>>();
            let counts = (0..m.matrices).map(count).collect();
            [
                (format!("{}.in_sum2", m.name), [cols as u64, m.matrices as u64], sums),
                (format!("{}.counts", m.name), [1, m.matrices as u64], counts),
            ]
        })
        .collect();
    let tensors: Vec<(&str, &[u64], &[f32])> =
        made.iter().map(|(n, d, v)| (n.as_str(), d.as_slice(), v.as_slice())).collect();
    gguf(&tensors)
}

/// Columns and values of every weight.
fn decoded(path: &Path) -> BTreeMap<String, (usize, Vec<f32>)> {
    let artifact = Artifact::open(path).expect("an artifact");
    let weights = artifact.entries().filter(|e| e.name().to_string().starts_with("blk."));
    weights
        .map(|e| {
            let (rows, cols) = e.shape().matrix().expect("a matrix");
            let decoder = Decoder::new(e.encoding(), rows, cols).expect("decodes");
            let planes: Vec<PlaneSlice<'_>> =
                (0..e.encoding().planes.len()).map(|k| PlaneSlice::whole(e.plane(k))).collect();
            let mut values = vec![0f32; (rows * cols) as usize];
            decoder.decode(0..rows, &planes, &mut values).expect("whole planes");
            (e.name().to_string(), (cols as usize, values))
        })
        .collect()
}

/// Squared errors of a weight: by importance, and plain.
fn errors(source: &(usize, Vec<f32>), made: &(usize, Vec<f32>), importance: &[f32]) -> (f64, f64) {
    assert_eq!(importance.len(), source.0);
    let mut sums = (0.0, 0.0);
    for (i, (a, b)) in source.1.iter().zip(&made.1).enumerate() {
        let square = f64::from(a - b).powi(2);
        sums.0 += f64::from(importance[i % source.0]) * square;
        sums.1 += square;
    }
    sums
}

fn text(ran: &str) -> String {
    ran.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Writes the recipe, and converts the model without any quantization to `source.rad`.
fn set_up(folder: &Path, model: &str) -> String {
    fs::write(folder.join("search.toml"), SEARCH).expect("writes");
    let source = testkit::tiny_model(model).to_str().expect("UTF-8").to_owned();
    succeeds(folder, &["convert", &source, "--recipe", "bf16", "-o", "source.rad"]);
    source
}

#[test]
fn importances_of_either_form_lower_the_weighted_error_of_every_weight() {
    let tmp = tempdir().expect("a folder");
    let at = |name: &str| tmp.path().join(name);
    let source = set_up(tmp.path(), "tiny-llama");
    fs::write(at("m.dat"), legacy_bytes(&llama())).expect("writes");
    fs::write(at("m.gguf"), gguf_bytes(&llama())).expect("writes");
    let convert = |imatrix: &[&str], out: &str| {
        let mut args = vec!["convert", &source, "--recipe", "search.toml", "-o", out];
        args.extend(imatrix);
        succeeds(tmp.path(), &args);
        decoded(&at(out))
    };
    let plain = convert(&[], "plain.rad");
    let weighed = convert(&["--imatrix", "m.dat"], "legacy.rad");
    assert_eq!(convert(&["--imatrix", "m.gguf"], "gguf.rad"), weighed, "the same means");
    let truth = decoded(&at("source.rad"));
    let mut sums = (0.0, 0.0);
    for m in llama() {
        let of = |made: &BTreeMap<String, (usize, Vec<f32>)>| {
            errors(&truth[&m.name], &made[&m.name], &m.values)
        };
        let (without, with) = (of(&plain), of(&weighed));
        assert!(with.0 < without.0, "{}: {} of {}", m.name, with.0, without.0);
        assert!(with.1 > without.1, "{}: the plain error pays for it", m.name);
        sums = (sums.0 + with.0, sums.1 + without.0);
    }
    assert!(sums.0 < 0.85 * sums.1, "{sums:?}");
}

#[test]
fn each_expert_has_importances_of_its_own_and_fused_gates_take_their_halves() {
    let tmp = tempdir().expect("a folder");
    let at = |name: &str| tmp.path().join(name);
    let source = set_up(tmp.path(), "tiny-qwen3-moe");
    for (name, bytes) in [("m.gguf", gguf_bytes(&experts())), ("m.dat", legacy_bytes(&experts()))] {
        fs::write(at(name), bytes).expect("writes");
    }
    for (imatrix, out) in [("m.gguf", "a.rad"), ("m.dat", "b.rad")] {
        let args = ["convert", &source, "--recipe", "search.toml", "--imatrix", imatrix, "-o", out];
        let ran = succeeds(tmp.path(), &args);
        // The four attention projections of four layers.
        let warning = "16 of 144 searched weights have no importances and weigh all columns alike";
        assert!(text(&ran.stderr).contains(warning), "{}", ran.stderr);
    }
    succeeds(tmp.path(), &["convert", &source, "--recipe", "search.toml", "-o", "plain.rad"]);
    let (weighed, plain) = (decoded(&at("a.rad")), decoded(&at("plain.rad")));
    assert_eq!(weighed, decoded(&at("b.rad")));
    let truth = decoded(&at("source.rad"));
    for (entry, leaf, cols) in
        [("ffn_gate_exps", "ffn_gate_up_exps", 64), ("ffn_down_exps", "ffn_down_exps", 48)]
    {
        let all = means(&format!("blk.1.{entry}.weight"), 16, cols);
        let mut sums = (0.0, 0.0);
        for expert in 0..16 {
            let name = format!("blk.1.{leaf}.{expert}.weight");
            let importance = &all.values[expert * cols..][..cols];
            let of = |made: &BTreeMap<String, (usize, Vec<f32>)>| {
                errors(&truth[&name], &made[&name], importance).0
            };
            assert!(of(&weighed) < of(&plain), "{name}");
            sums = (sums.0 + of(&weighed), sums.1 + of(&plain));
        }
        assert!(sums.0 < 0.85 * sums.1, "{leaf}: {sums:?}");
    }
    assert_eq!(weighed["blk.1.attn_q.weight"], plain["blk.1.attn_q.weight"]);
    let shown = succeeds(tmp.path(), &["inspect", "a.rad", "--json"]).stdout;
    let shown: Value = serde_json::from_str(&shown).expect("JSON");
    let records = shown["manifest"]["weights"].as_array().expect("a list");
    let of = |name: &str| {
        let record = records.iter().find(|r| r["name"] == name).expect("a weight");
        record["importance"].clone()
    };
    assert_eq!(of("blk.2.ffn_gate_up_exps.5.weight"), "blk.2.ffn_gate_exps[5]");
    assert_eq!(of("blk.2.ffn_down_exps.15.weight"), "blk.2.ffn_down_exps[15]");
    assert_eq!(of("blk.2.attn_q.weight"), Value::Null);
}

#[test]
fn the_output_is_a_function_of_the_files_bytes_which_the_manifest_and_validate_name() {
    let tmp = tempdir().expect("a folder");
    let at = |name: &str| tmp.path().join(name);
    let source = set_up(tmp.path(), "tiny-llama");
    let bytes = gguf_bytes(&llama());
    fs::write(at("m.gguf"), &bytes).expect("writes");
    fs::create_dir(at("elsewhere")).expect("creates");
    fs::write(at("elsewhere/n"), &bytes).expect("writes");
    let mut other = llama();
    other[0].values[3] += 30.0;
    fs::write(at("o.gguf"), gguf_bytes(&other)).expect("writes");
    let convert = |imatrix: &str, out: &str, threads: &str| {
        let args = ["convert", &source, "--recipe", "search.toml", "--imatrix", imatrix];
        succeeds(tmp.path(), &[&args[..], &["-o", out, "--threads", threads]].concat());
        sha256(&at(out))
    };
    let a = convert("m.gguf", "a.rad", "1");
    assert_eq!(convert("elsewhere/n", "b.rad", "3"), a);
    assert_ne!(convert("o.gguf", "c.rad", "1"), a);
    let (first, third) = (decoded(&at("a.rad")), decoded(&at("c.rad")));
    let differing: Vec<&String> = first.keys().filter(|k| first[*k] != third[*k]).collect();
    assert_eq!(differing, ["blk.0.attn_q.weight"]);

    let shown = succeeds(tmp.path(), &["inspect", "a.rad", "--json"]).stdout;
    let shown: Value = serde_json::from_str(&shown).expect("JSON");
    let files = shown["manifest"]["source"]["files"].as_array().expect("a list");
    let file = files.iter().find(|f| f["path"] == "imatrix").expect("the imatrix");
    assert_eq!(file["sha256"], sha256(&at("m.gguf")));
    assert_eq!(file["bytes"], bytes.len());

    let against = ["validate", "a.rad", "--against", &source];
    let with = |imatrix| [&against[..], &["--imatrix", imatrix]].concat();
    assert!(succeeds(tmp.path(), &with("elsewhere/n")).stdout.ends_with("valid\n"));
    let ran = radpack(tmp.path(), &against);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("--imatrix FILE names it"), "{}", ran.stderr);
    let ran = radpack(tmp.path(), &with("o.gguf"));
    assert_eq!(ran.code, 4, "{}", ran.stderr);
    assert!(text(&ran.stderr).contains("imatrix: sha256"), "{}", ran.stderr);
    assert!(text(&ran.stderr).contains("blk.0.attn_q.weight"), "{}", ran.stderr);

    let dry = ["convert", &source, "--recipe", "search.toml", "--imatrix", "m.gguf", "--dry-run"];
    let ran = succeeds(tmp.path(), &dry);
    assert!(ran.stdout.contains("weighs 28 of 28 searched weights"), "{}", ran.stdout);
    assert!(ran.stdout.contains(&sha256(&at("m.gguf"))[..8]), "{}", ran.stdout);
    let ran = succeeds(tmp.path(), &[&dry[..], &["--json"]].concat());
    let document: Value = serde_json::from_str(&ran.stdout).expect("JSON");
    assert_eq!(document["imatrix"]["weighed"], 28);
    let out = ["convert", &source, "--recipe", "search.toml", "--imatrix", "m.gguf", "-o"];
    let ran = radpack(tmp.path(), &[&out[..], &["m.gguf"]].concat());
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert_eq!(fs::read(at("m.gguf")).expect("reads"), bytes);
}

#[test]
fn reuse_copies_weights_of_the_same_imatrix_only() {
    let tmp = tempdir().expect("a folder");
    let at = |name: &str| tmp.path().join(name);
    let source = set_up(tmp.path(), "tiny-llama");
    let mut half = llama();
    half.retain(|m| !m.name.contains("ffn"));
    fs::write(at("half.gguf"), gguf_bytes(&half)).expect("writes");
    fs::write(at("all.gguf"), gguf_bytes(&llama())).expect("writes");
    let convert = |extra: &[&str]| {
        let args = ["convert", &source, "--recipe", "search.toml", "--json"];
        let ran = succeeds(tmp.path(), &[&args[..], extra].concat());
        let document: Value = serde_json::from_str(&ran.stdout).expect("JSON");
        document["reused"].as_u64().expect("a number")
    };
    convert(&["--imatrix", "half.gguf", "-o", "old.rad"]);
    let reused = |imatrix: &[&str]| {
        let copied = convert(&[&["-o", "again.rad", "--reuse", "old.rad"], imatrix].concat());
        convert(&[&["-o", "fresh.rad"], imatrix].concat());
        assert_eq!(sha256(&at("again.rad")), sha256(&at("fresh.rad")), "{imatrix:?}");
        copied
    };
    assert_eq!(reused(&["--imatrix", "half.gguf"]), 28);
    // Feed-forward weights were searched without importances, and are again.
    assert_eq!(reused(&[]), 12);
    assert_eq!(reused(&["--imatrix", "all.gguf"]), 0);
}

#[test]
fn an_imatrix_that_does_not_fit_is_refused_with_both_numbers() {
    let tmp = tempdir().expect("a folder");
    let at = |name: &str| tmp.path().join(name);
    let source = set_up(tmp.path(), "tiny-llama");
    let refused = |recipe: &str, means: &[Means], code: i32| {
        fs::write(at("r.toml"), recipe).expect("writes");
        fs::write(at("m.dat"), legacy_bytes(means)).expect("writes");
        let args = ["convert", &source, "--recipe", "r.toml", "--imatrix", "m.dat", "-o", "x.rad"];
        let ran = radpack(tmp.path(), &args);
        assert_eq!(ran.code, code, "{}", ran.stderr);
        assert!(!at("x.rad").exists());
        text(&ran.stderr)
    };
    let rtn = SEARCH.replace("quantizer = \"search\"\n", "");
    let ran = refused(&rtn, &llama(), 2);
    assert!(ran.contains("no rule of searched searches with them"), "{ran}");
    let ran = refused(&format!("{rtn}imatrix = true\n"), &llama(), 2);
    assert!(ran.contains("\"rtn\" looks at no error"), "{ran}");
    let mut wide = llama();
    wide[0] = means("blk.0.attn_q.weight", 1, 128);
    wide[6] = means("blk.0.ffn_down.weight", 1, 64);
    let ran = refused(SEARCH, &wide, 3);
    for what in [
        "blk.0.attn_q.weight: the imatrix has 128 values for `blk.0.attn_q`, the weight 64 columns",
        "blk.0.ffn_down.weight: the imatrix has 64 values for `blk.0.ffn_down`, the weight 176 columns",
    ] {
        assert!(ran.contains(what), "{ran}");
    }
    let ran = refused(SEARCH, &experts(), 3);
    assert!(ran.contains("no weight that is searched is in the imatrix"), "{ran}");
    let needs = format!("{SEARCH}imatrix = true\n");
    let ran = refused(&needs, &llama()[..27], 3);
    assert!(ran.contains("1 weights want importances (imatrix = true)"), "{ran}");
    assert!(ran.contains("blk.3.ffn_down.weight"), "{ran}");
    fs::write(at("bad"), [0; 4]).expect("writes");
    let args = ["convert", &source, "--recipe", "search.toml", "--imatrix", "bad", "-o", "x.rad"];
    let ran = radpack(tmp.path(), &args);
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    assert!(ran.stderr.contains("it names no weight"), "{}", ran.stderr);
    // Without a file the wish cannot be met either.
    fs::write(at("r.toml"), needs).expect("writes");
    let ran = radpack(tmp.path(), &["convert", &source, "--recipe", "r.toml", "-o", "x.rad"]);
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    assert!(ran.stderr.contains("--imatrix FILE"), "{}", ran.stderr);
}

#[test]
fn a_rule_can_leave_its_weights_out() {
    let tmp = tempdir().expect("a folder");
    let source = set_up(tmp.path(), "tiny-llama");
    fs::write(tmp.path().join("m.gguf"), gguf_bytes(&llama())).expect("writes");
    let apart = "schema = 1\n[[quantize]]\nweight = \"*.attn_q.weight\"\nencoding = \"int4-g32\"\n\
        quantizer = \"search\"\nimatrix = false\n";
    let rest = SEARCH.split_once("[[quantize]]").expect("a rule").1;
    let recipe = format!("{apart}[[quantize]]{rest}imatrix = true\n");
    fs::write(tmp.path().join("r.toml"), recipe).expect("writes");
    let args = ["convert", &source, "--recipe", "r.toml", "--imatrix", "m.gguf", "-o", "a.rad"];
    let document = succeeds(tmp.path(), &[&args[..], &["--json"]].concat()).stdout;
    let document: Value = serde_json::from_str(&document).expect("JSON");
    assert_eq!(document["imatrix"]["searched"], 28);
    assert_eq!(document["imatrix"]["weighed"], 24);
    succeeds(tmp.path(), &["validate", "a.rad", "--against", &source, "--imatrix", "m.gguf"]);
}
