//! Exported folders, read back with the safetensors library.

mod cli_support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use cli_support::{radpack, succeeds};
use radpack::artifact::{Artifact, digests};
use radpack::checkpoint::FACTOR_KEY;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use tempfile::tempdir;

/// Type, shape and bytes of every tensor of a folder.
fn tensors(folder: &Path) -> BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder).expect("lists") {
        let path = entry.expect("an entry").path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let bytes = fs::read(&path).expect("reads");
            let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
            for (name, view) in file.tensors() {
                let tensor = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
                assert!(all.insert(name.clone(), tensor).is_none(), "{name} twice");
            }
        }
    }
    all
}

fn convert(folder: &Path, model: &str, recipe: &str) -> std::path::PathBuf {
    let source = testkit::tiny_model(model);
    let args = ["convert", source.to_str().expect("UTF-8"), "--recipe", recipe, "-o", "t.rad"];
    succeeds(folder, &args);
    source
}

fn bf16(bytes: &[u8]) -> Vec<f32> {
    let wide = |b: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
    bytes.chunks_exact(2).map(wide).collect()
}

#[test]
fn an_unquantized_artifact_exports_to_the_tensors_it_came_from() {
    let tmp = tempdir().expect("a folder");
    let mut compared = 0;
    // Experts stacked in one tensor, experts in tensors of their own, scalars, integer tables, untied heads.
    for model in [
        "tiny-gemma4-moe",
        "tiny-qwen3-moe",
        "tiny-gemma4-e",
        "tiny-gemma4-e-assistant",
        "tiny-llama",
    ] {
        let source = convert(tmp.path(), model, "bf16");
        succeeds(tmp.path(), &["export", "t.rad", "--format", "safetensors", "-o", model]);
        let (mut want, got) = (tensors(&source), tensors(&tmp.path().join(model)));
        if model == "tiny-gemma4-e" {
            // Keys and values of layers that share another layer's are no part of the model.
            want.retain(|name, _| got.contains_key(name) || !name.contains(".self_attn."));
        }
        assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>(), "{model}");
        assert!(got == want, "{model}: values differ");
        compared += got.len();
        for file in ["config.json", "tokenizer.json"] {
            let same = fs::read(source.join(file)).ok()
                == fs::read(tmp.path().join(model).join(file)).ok();
            assert!(same, "{model}: {file}");
        }
    }
    testkit::proofs::proved_one(
        "an_unquantized_artifact_exports_to_the_tensors_it_came_from",
        "safetensors, decoded",
        compared,
    );
}

#[test]
fn decoded_weights_are_the_extracted_values_in_bf16() {
    let tmp = tempdir().expect("a folder");
    convert(tmp.path(), "tiny-llama", "nvfp4");
    succeeds(tmp.path(), &["export", "t.rad", "--format", "safetensors", "-o", "plain"]);
    succeeds(tmp.path(), &["extract", "t.rad", "blk.1.ffn_down.weight", "-o", "w.f32"]);
    let values = fs::read(tmp.path().join("w.f32")).expect("reads");
    let want: Vec<f32> = values
        .chunks_exact(4)
        .map(|b| half::bf16::from_f32(f32::from_le_bytes([b[0], b[1], b[2], b[3]])).to_f32())
        .collect();
    let exported = tensors(&tmp.path().join("plain"));
    let (dtype, _, bytes) = &exported["model.layers.1.mlp.down_proj.weight"];
    assert_eq!(*dtype, Dtype::BF16);
    assert_eq!(bf16(bytes), want);
}

/// Decodes `….weight` of a compressed-tensors folder by that library's rules.
fn dequantized(
    all: &BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
    module: &str,
    bits: u32,
) -> Vec<f32> {
    let (_, shape, packed) = &all[&format!("{module}.weight_packed")];
    let (_, _, logical) = &all[&format!("{module}.weight_shape")];
    let dims: Vec<usize> = logical
        .chunks_exact(8)
        .map(|b| i64::from_le_bytes(b.try_into().expect("8")) as usize)
        .collect();
    let (rows, cols) = (dims[0], dims[1]);
    assert_eq!(shape[..], [rows, (cols * bits as usize).div_ceil(32)]);
    let (_, scale_shape, scales) = &all[&format!("{module}.weight_scale")];
    let scales = bf16(scales);
    let group = cols / scale_shape[1];
    let mut out = Vec::new();
    for r in 0..rows {
        let row = &packed[r * shape[1] * 4..][..shape[1] * 4];
        for c in 0..cols {
            let at = c * bits as usize;
            let word = u32::from_le_bytes(row[at / 32 * 4..][..4].try_into().expect("4"));
            let code = word >> (at % 32) & ((1 << bits) - 1);
            let signed = code as i32 - (1 << (bits - 1));
            out.push(signed as f32 * scales[r * scale_shape[1] + c / group]);
        }
    }
    out
}

#[test]
fn packed_integers_decode_to_the_artifacts_values_and_the_config_describes_them() {
    let tmp = tempdir().expect("a folder");
    for (recipe, bits, strategy) in [("w8a16", 8, "channel"), ("w4a16-g32", 4, "group")] {
        // 64 and 192 columns: whole groups of 32.
        convert(tmp.path(), "tiny-qwen3", recipe);
        succeeds(tmp.path(), &["export", "t.rad", "--format", "compressed-tensors", "-o", recipe]);
        let all = tensors(&tmp.path().join(recipe));
        for (weight, module) in [
            ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj"),
            ("blk.2.ffn_down.weight", "model.layers.2.mlp.down_proj"),
        ] {
            succeeds(tmp.path(), &["extract", "t.rad", weight, "-o", "w.f32"]);
            let values = fs::read(tmp.path().join("w.f32")).expect("reads");
            let want: Vec<f32> = values
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect();
            assert_eq!(dequantized(&all, module, bits), want, "{recipe} {module}");
        }
        assert!(!all.contains_key("model.layers.0.self_attn.q_proj.weight"));
        let config = fs::read(tmp.path().join(recipe).join("config.json")).expect("reads");
        let config: Value = serde_json::from_slice(&config).expect("JSON");
        let section = &config["quantization_config"];
        assert_eq!(section["format"], "pack-quantized");
        let group = &section["config_groups"]["group_0"];
        assert_eq!(group["weights"]["num_bits"], bits);
        assert_eq!(group["weights"]["strategy"], strategy);
        assert_eq!(group["targets"][0], "Linear");
        let ignore = section["ignore"].as_array().expect("a list");
        assert!(ignore.iter().any(|m| m == "lm_head"), "{ignore:?}");
    }
}

#[test]
fn float_formats_carry_codes_and_scales_as_stored() {
    let tmp = tempdir().expect("a folder");
    let module = "model.layers.0.self_attn.q_proj";
    for (recipe, weight, scale, format) in [
        ("fp8-dynamic", Dtype::F8_E4M3, Dtype::BF16, "float-quantized"),
        ("fp8-block", Dtype::F8_E4M3, Dtype::BF16, "float-quantized"),
        ("nvfp4", Dtype::U8, Dtype::F8_E4M3, "nvfp4-pack-quantized"),
        ("mxfp4", Dtype::U8, Dtype::U8, "mxfp4-pack-quantized"),
    ] {
        convert(tmp.path(), "tiny-qwen3", recipe);
        succeeds(tmp.path(), &["export", "t.rad", "--format", "compressed-tensors", "-o", recipe]);
        let all = tensors(&tmp.path().join(recipe));
        let name = if weight == Dtype::U8 { "weight_packed" } else { "weight" };
        assert_eq!(all[&format!("{module}.{name}")].0, weight, "{recipe}");
        assert_eq!(all[&format!("{module}.weight_scale")].0, scale, "{recipe}");
        succeeds(tmp.path(), &["extract", "t.rad", "blk.0.attn_q.weight", "--raw", "-o", "raw"]);
        let raw = fs::read(tmp.path().join("raw")).expect("reads");
        let mut stored = all[&format!("{module}.{name}")].2.clone();
        stored.extend(&all[&format!("{module}.weight_scale")].2);
        assert_eq!(raw[..stored.len()], stored[..], "{recipe}");
        let rest = &raw[stored.len()..];
        match all.get(&format!("{module}.weight_global_scale")) {
            Some((_, shape, divisor)) => {
                assert_eq!(shape[..], [1]);
                let divisor = f32::from_le_bytes(divisor[..].try_into().expect("4 bytes"));
                let second = f32::from_le_bytes(rest.try_into().expect("4 bytes"));
                assert_eq!(1.0 / divisor, second);
            }
            None => assert_eq!(rest, [] as [u8; 0], "{recipe}"),
        }
        let config = fs::read(tmp.path().join(recipe).join("config.json")).expect("reads");
        let config: Value = serde_json::from_slice(&config).expect("JSON");
        assert_eq!(config["quantization_config"]["format"], format);
        let groups = config["quantization_config"]["config_groups"].as_object().expect("groups");
        let activations = groups.values().any(|g| !g["input_activations"].is_null());
        assert_eq!(activations, recipe.starts_with("fp8"), "{recipe}");
    }
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).expect("reads")).expect("JSON")
}

#[test]
fn exact_decoded_weights_are_f32_and_the_config_says_so() {
    let tmp = tempdir().expect("a folder");
    let source = convert(tmp.path(), "tiny-gemma4-dense", "w8a16");
    let export = ["export", "t.rad", "--format", "safetensors"];
    succeeds(tmp.path(), &[&export[..], &["--dtype", "f32", "-o", "wide"]].concat());
    succeeds(tmp.path(), &["extract", "t.rad", "blk.1.ffn_down.weight", "-o", "w.f32"]);
    let all = tensors(&tmp.path().join("wide"));
    let (dtype, _, bytes) = &all["model.language_model.layers.1.mlp.down_proj.weight"];
    assert_eq!(*dtype, Dtype::F32);
    assert!(*bytes == fs::read(tmp.path().join("w.f32")).expect("reads"));
    // What was not quantized stays in its own type.
    assert_eq!(all["model.language_model.embed_tokens.weight"].0, Dtype::BF16);
    let mut config = json(&source.join("config.json"));
    assert_eq!(config["dtype"], "bfloat16");
    config["dtype"] = "float32".into();
    assert_eq!(json(&tmp.path().join("wide/config.json")), config);
    // bf16 is the default, and leaves the configuration byte for byte.
    succeeds(tmp.path(), &[&export[..], &["-o", "plain"]].concat());
    succeeds(tmp.path(), &[&export[..], &["--dtype", "bf16", "-o", "named"]].concat());
    assert!(tensors(&tmp.path().join("plain")) == tensors(&tmp.path().join("named")));
    let config = fs::read(tmp.path().join("plain/config.json")).expect("reads");
    assert!(config == fs::read(source.join("config.json")).expect("reads"));
    let args = ["export", "t.rad", "--format", "compressed-tensors", "--dtype", "f32", "-o", "x"];
    let ran = radpack(tmp.path(), &args);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("only --format safetensors decodes weights"), "{}", ran.stderr);
}

/// The config group that has a module.
fn group_of<'a>(section: &'a Value, module: &str) -> &'a Value {
    let groups = section["config_groups"].as_object().expect("groups");
    let has = |g: &&Value| g["targets"].as_array().expect("a list").iter().any(|t| t == module);
    groups.values().find(has).expect("a group with the module")
}

#[test]
fn integers_with_a_short_last_group_are_written_in_smaller_whole_groups() {
    let tmp = tempdir().expect("a folder");
    let keep = "schema = 1\nname = \"keep\"\n[[quantize]]\nmatch = \"*\"\nencoding = \"keep\"\n";
    fs::write(tmp.path().join("keep.toml"), keep).expect("writes");
    let down = "model.layers.2.mlp.down_proj";
    // tiny-llama has rows of 64 and 176 columns, tiny-qwen3 of 64, 192 and 256.
    for (model, recipe, bits, group) in [
        ("tiny-llama", "int8-g128", 8, 16),
        ("tiny-qwen3", "int8-g128", 8, 64),
        ("tiny-llama", "w4a16-g32", 4, 16),
    ] {
        let folder = format!("{model}-{recipe}");
        convert(tmp.path(), model, recipe);
        succeeds(tmp.path(), &["export", "t.rad", "--format", "compressed-tensors", "-o", &folder]);
        let all = tensors(&tmp.path().join(&folder));
        for (weight, module) in [
            ("blk.2.ffn_down.weight", down),
            ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj"),
        ] {
            succeeds(tmp.path(), &["extract", "t.rad", weight, "-o", "w.f32"]);
            let values = fs::read(tmp.path().join("w.f32")).expect("reads");
            let want: Vec<f32> = values
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect();
            assert_eq!(dequantized(&all, module, bits), want, "{folder} {module}");
        }
        let section =
            json(&tmp.path().join(&folder).join("config.json"))["quantization_config"].clone();
        // Two schemes of one format.
        assert_eq!(section["format"], "pack-quantized", "{folder}");
        let weights = &group_of(&section, down)["weights"];
        assert_eq!(
            (&weights["strategy"], &weights["group_size"]),
            (&"group".into(), &group.into())
        );
        let q = &group_of(&section, "model.layers.0.self_attn.q_proj")["weights"];
        let (strategy, size) = match bits {
            8 => ("channel", Value::Null),
            _ => ("group", 32.into()),
        };
        assert_eq!((&q["strategy"], &q["group_size"]), (&strategy.into(), &size), "{folder}");
        // As a source it has the same values.
        succeeds(tmp.path(), &["convert", &folder, "--recipe", "keep.toml", "-o", "again.rad"]);
        succeeds(tmp.path(), &["extract", "t.rad", "blk.2.ffn_down.weight", "-o", "a"]);
        succeeds(tmp.path(), &["extract", "again.rad", "blk.2.ffn_down.weight", "-o", "b"]);
        let read = |name: &str| fs::read(tmp.path().join(name)).expect("reads");
        assert!(read("a") == read("b"), "{folder}");
    }
}

#[test]
fn activation_groups_that_do_not_divide_a_row_are_left_out_and_counted() {
    let tmp = tempdir().expect("a folder");
    // tiny-qwen3: q, k, v, gate and up have 64 columns, down has 192, o has 256.
    convert(tmp.path(), "tiny-qwen3", "fp8-block");
    let args = ["export", "t.rad", "--format", "compressed-tensors", "-o", "x"];
    let ran = succeeds(tmp.path(), &args);
    assert!(
        ran.stderr.contains("for 24 weights whose columns are no multiple of 128"),
        "{}",
        ran.stderr
    );
    let section = json(&tmp.path().join("x/config.json"))["quantization_config"].clone();
    assert_eq!(section["format"], "float-quantized");
    let o = group_of(&section, "model.layers.0.self_attn.o_proj");
    assert_eq!(o["input_activations"]["group_size"], 128);
    assert_eq!(o["weights"]["block_structure"], serde_json::json!([128, 128]));
    let q = group_of(&section, "model.layers.0.self_attn.q_proj");
    assert!(q["input_activations"].is_null());
    assert_eq!(q["weights"], o["weights"]);
    // Rows of 128 and 256 columns: nothing is left out.
    convert(tmp.path(), "tiny-gemma4-dense", "fp8-block");
    let args = ["export", "t.rad", "--format", "compressed-tensors", "--json", "-o", "y"];
    let document: Value = serde_json::from_str(&succeeds(tmp.path(), &args).stdout).expect("JSON");
    assert_eq!(document["unstated_activations"], 0);
}

#[test]
fn what_the_format_cannot_say_is_refused_whole_and_nothing_is_written() {
    let tmp = tempdir().expect("a folder");
    // 176 columns are no multiple of 32, which is a part of the format.
    convert(tmp.path(), "tiny-llama", "mxfp4");
    let args = ["export", "t.rad", "--format", "compressed-tensors", "-o", "x"];
    let ran = radpack(tmp.path(), &args);
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    let text = ran.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.contains("176 columns are no multiple of the group of 32"), "{text}");
    assert!(text.contains("4 weights ("), "{text}");
    assert!(text.contains("1 problem"), "{text}");
    convert(tmp.path(), "tiny-gemma4-moe", "w8a16");
    let ran = radpack(tmp.path(), &args);
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    assert!(ran.stderr.contains("experts.down_proj stacks"), "{}", ran.stderr);
    fs::create_dir(tmp.path().join("x")).expect("creates");
    let ran = radpack(tmp.path(), &["export", "t.rad", "--format", "safetensors", "-o", "x"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("x exists already"), "{}", ran.stderr);
    assert_eq!(fs::read_dir(tmp.path().join("x")).expect("lists").count(), 0);
    assert_eq!(fs::read_dir(tmp.path()).expect("lists").count(), 2, "the artifact and the folder");
}

/// Encoding and digest of every weight of an artifact.
fn digests_of(path: &Path) -> BTreeMap<String, (String, [u8; 32])> {
    let artifact = Artifact::open(path).expect("an artifact");
    let weights = artifact.entries().filter(|e| !e.name().to_string().starts_with("radpack/"));
    weights
        .map(|e| (e.name().to_string(), (e.encoding().to_string(), digests::of_entry(&e))))
        .collect()
}

#[test]
fn an_exported_folder_reads_back_as_a_source_with_the_same_codes_scales_and_digests() {
    let tmp = tempdir().expect("a folder");
    let at = |name: &str| tmp.path().join(name);
    let keep = "schema = 1\nname = \"keep\"\n[[quantize]]\nmatch = \"*\"\nencoding = \"keep\"\n";
    fs::write(at("keep.toml"), keep).expect("writes");
    let source = testkit::tiny_model("tiny-qwen3");
    let source = source.to_str().expect("UTF-8");
    let mut compared = BTreeMap::new();
    for (recipe, format) in [
        ("w8a16", "compressed-tensors pack-quantized"),
        ("w4a16-g32", "compressed-tensors pack-quantized"),
        ("fp8-dynamic", "compressed-tensors float-quantized"),
        ("fp8-block", "compressed-tensors float-quantized"),
        ("nvfp4", "compressed-tensors nvfp4-pack-quantized"),
        ("mxfp4", "compressed-tensors mxfp4-pack-quantized"),
    ] {
        for rounding in ["rad", "compressed-tensors"] {
            let text = succeeds(tmp.path(), &["recipes", "show", recipe]).stdout;
            let text = text.replace("rounding = \"rad\"", &format!("rounding = \"{rounding}\""));
            fs::write(at("r.toml"), text).expect("writes");
            let out = format!("{recipe}-{rounding}");
            succeeds(tmp.path(), &["convert", source, "--recipe", "r.toml", "-o", "t.rad"]);
            let export = ["export", "t.rad", "--format", "compressed-tensors", "-o", &out];
            succeeds(tmp.path(), &export);
            succeeds(tmp.path(), &["convert", &out, "--recipe", "keep.toml", "-o", "again.rad"]);
            succeeds(tmp.path(), &["validate", "again.rad", "--against", &out]);
            let (was, is) = (digests_of(&at("t.rad")), digests_of(&at("again.rad")));
            assert!(was.len() > 40, "{}", was.len());
            assert_eq!(was, is, "{out}");
            let quantized = was.values().filter(|(encoding, _)| encoding.contains('*')).count();
            *compared.entry(format.to_owned()).or_default() += quantized;
            if recipe == "nvfp4" {
                // The library's own second scales are reciprocals; radiance's are any f32.
                let noted = factors(&at(&out));
                assert_eq!(noted.is_empty(), rounding == "compressed-tensors", "{noted:?}");
                for (tensor, factor) in noted {
                    let weight = tensor.replace("_global_scale", "");
                    assert!((1.0 / (1.0 / factor)) != factor, "{weight} {factor}");
                }
            }
        }
    }
    testkit::proofs::proved(
        "an_exported_folder_reads_back_as_a_source_with_the_same_codes_scales_and_digests",
        &compared,
    );
}

/// The factors that a folder notes for its global divisors.
fn factors(folder: &Path) -> BTreeMap<String, f32> {
    let bytes = fs::read(folder.join("model.safetensors")).expect("one shard");
    let (_, header) = SafeTensors::read_metadata(&bytes).expect("a safetensors file");
    let metadata = header.metadata().as_ref().expect("metadata");
    let noted = metadata.iter().filter_map(|(key, value)| {
        Some((key.strip_prefix(FACTOR_KEY)?.to_owned(), value.parse().expect("a number")))
    });
    noted.collect()
}

#[test]
fn a_noted_factor_that_its_divisor_contradicts_is_refused_by_name() {
    let tmp = tempdir().expect("a folder");
    convert(tmp.path(), "tiny-qwen3", "nvfp4");
    succeeds(tmp.path(), &["export", "t.rad", "--format", "compressed-tensors", "-o", "x"]);
    let path = tmp.path().join("x/model.safetensors");
    let (tensor, factor) = factors(&tmp.path().join("x")).pop_first().expect("a noted factor");
    let shown = format!("\"{factor:e}\"");
    let other = format!("\"{}\"", "9".repeat(shown.len() - 2));
    let mut bytes = fs::read(&path).expect("reads");
    let at = bytes.windows(shown.len()).position(|w| w == shown.as_bytes()).expect("the note");
    bytes[at..at + shown.len()].copy_from_slice(other.as_bytes());
    fs::write(&path, bytes).expect("writes");
    let ran = radpack(tmp.path(), &["convert", "x", "--recipe", "bf16", "-o", "y.rad"]);
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    let text = ran.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.contains(&tensor), "{text}");
    assert!(text.contains("which is not the reciprocal of the 999"), "{text}");
}
