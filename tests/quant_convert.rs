//! Quantized checkpoints through the whole conversion, and those that are refused.

mod checkpoint_support;
mod cli_support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use checkpoint_support::{Model, Tensor, file};
use cli_support::{radpack, succeeds};
use half::bf16;
use radpack::artifact::Artifact;
use safetensors::SafeTensors;
use serde_json::{Value, json};

/// Quantizes a matrix: its tensors, named by what follows the module, and the values they stand for.
type Quantize = fn(rows: usize, cols: usize, values: &[f32]) -> (Vec<Tensor>, Vec<f32>);

fn tensor(name: &str, dtype: &'static str, shape: &[usize], bytes: Vec<u8>) -> Tensor {
    let shape = shape.iter().map(|&n| n as u64).collect();
    Tensor { name: name.into(), dtype, shape, bytes }
}

fn round(value: f32) -> f32 {
    bf16::from_f32(value).to_f32()
}

fn bf16s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect()
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// 4-bit integers with zero points, one bf16 scale for 16 columns, eight codes to a word.
fn int4_asymmetric(rows: usize, cols: usize, values: &[f32]) -> (Vec<Tensor>, Vec<f32>) {
    let groups = cols / 16;
    let (mut scales, mut zeros, mut codes) = (Vec::new(), Vec::new(), Vec::new());
    let mut decoded = vec![0f32; values.len()];
    for (unit, group) in values.chunks(16).enumerate() {
        let high = group.iter().fold(0f32, |m, &v| m.max(v));
        let low = group.iter().fold(0f32, |m, &v| m.min(v));
        let scale = round((high - low) / 15.0).max(1e-6);
        let scale = round(scale);
        let zero = (-8.0 - low / scale).round().clamp(-8.0, 7.0);
        for (i, &v) in group.iter().enumerate() {
            let code = (v / scale + zero).round().clamp(-8.0, 7.0);
            codes.push(code as i32 + 8);
            // Integers have no negative zero.
            decoded[unit * 16 + i] = round((code as i32 - zero as i32) as f32 * scale);
        }
        scales.push(scale);
        zeros.push(zero as i32 + 8);
    }
    let words = |codes: Vec<i32>| -> Vec<u8> {
        codes
            .chunks(8)
            .map(|eight| {
                eight.iter().enumerate().fold(0u32, |w, (i, &c)| w | (c as u32) << (4 * i))
            })
            .flat_map(u32::to_le_bytes)
            .collect()
    };
    // Zero points run down the rows, so the matrix of words is [rows / 8, groups].
    let mut down = Vec::new();
    for r in (0..rows).step_by(8) {
        for g in 0..groups {
            down.extend((r..r + 8).map(|r| zeros[r * groups + g]));
        }
    }
    let shape = [rows as i64, cols as i64].iter().flat_map(|n| n.to_le_bytes()).collect();
    let tensors = vec![
        tensor("weight_packed", "I32", &[rows, cols / 8], words(codes)),
        tensor("weight_scale", "BF16", &[rows, groups], bf16s(&scales)),
        tensor("weight_zero_point", "I32", &[rows / 8, groups], words(down)),
        tensor("weight_shape", "I64", &[2], shape),
    ];
    (tensors, decoded)
}

/// fp8 with one bf16 scale a row.
fn fp8_channel(rows: usize, cols: usize, values: &[f32]) -> (Vec<Tensor>, Vec<f32>) {
    let (mut scales, mut codes, mut decoded) = (Vec::new(), Vec::new(), Vec::new());
    for row in values.chunks(cols) {
        let peak = row.iter().fold(0f32, |m, v| m.max(v.abs()));
        let scale = round(peak / 400.0);
        for &v in row {
            let code = float8::F8E4M3::from_f32(v / scale);
            codes.push(code.to_bits());
            decoded.push(round(code.to_f32() * scale));
        }
        scales.push(scale);
    }
    let tensors = vec![
        tensor("weight", "F8_E4M3", &[rows, cols], codes),
        tensor("weight_scale", "BF16", &[rows, 1], bf16s(&scales)),
    ];
    (tensors, decoded)
}

/// NVFP4 as ModelOpt names it, under one second scale.
fn nvfp4(rows: usize, cols: usize, values: &[f32]) -> (Vec<Tensor>, Vec<f32>) {
    const GRID: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let second = 2f32.powi(-12) * 1.37;
    let (mut scales, mut codes, mut decoded) = (Vec::new(), Vec::new(), Vec::new());
    for block in values.chunks(16) {
        let peak = block.iter().fold(0f32, |m, v| m.max(v.abs()));
        let first = float8::F8E4M3::from_f32((peak / 6.0 / second).max(0.01));
        let scale = first.to_f32();
        scales.push(first.to_bits());
        for &v in block {
            let x = v / (scale * second);
            let distance = |i: &usize| (GRID[*i] - x.abs()).abs();
            let near = (0..8).min_by(|a, b| distance(a).total_cmp(&distance(b))).expect("one");
            codes.push(near as u8 | u8::from(x < 0.0) << 3);
            decoded.push(GRID[near].copysign(x) * scale * second);
        }
    }
    let packed = codes.chunks(2).map(|two| two[0] | two[1] << 4).collect();
    let tensors = vec![
        tensor("weight", "U8", &[rows, cols / 2], packed),
        tensor("weight_scale", "F8_E4M3", &[rows, cols / 16], scales),
        tensor("weight_scale_2", "F32", &[], f32s(&[second])),
        tensor("input_scale", "F32", &[], f32s(&[0.125])),
    ];
    (tensors, decoded)
}

/// NVFP4 as compressed-tensors names it for the layers' MLPs (176 wide), fp8 by row for their attention.
fn mixed(rows: usize, cols: usize, values: &[f32]) -> (Vec<Tensor>, Vec<f32>) {
    if rows != 176 && cols != 176 {
        return fp8_channel(rows, cols, values);
    }
    let divisor = 4096.0f32 / 1.5;
    let (mut tensors, _) = nvfp4(rows, cols, values);
    let scales = tensors[1].bytes.clone();
    let code = |i: usize| tensors[0].bytes[i / 2] >> (i % 2 * 4) & 15;
    let decoded = (0..rows * cols)
        .map(|i| {
            let value = [0.0f32, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code(i) & 7)];
            let value = if code(i) > 7 { -value } else { value };
            value * (float8::F8E4M3::from_bits(scales[i / 16]).to_f32() / divisor)
        })
        .collect();
    tensors[0].name = "weight_packed".into();
    tensors[2] = tensor("weight_global_scale", "F32", &[1], f32s(&[divisor]));
    tensors[3] = tensor("input_global_scale", "F32", &[1], f32s(&[f32::NAN]));
    (tensors, decoded)
}

/// tiny-llama with every projection quantized, and the same model with the values that the test itself decodes.
fn models(folder: &Path, quantize: Quantize, config: Value) -> (PathBuf, PathBuf) {
    models_of("tiny-llama", folder, quantize, config)
}

fn models_of(name: &str, folder: &Path, quantize: Quantize, config: Value) -> (PathBuf, PathBuf) {
    let source = testkit::tiny_model(name);
    let (mut quantized, mut plain) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(&source).expect("lists") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let bytes = fs::read(&path).expect("reads");
        for (name, view) in SafeTensors::deserialize(&bytes).expect("safetensors").iter() {
            let same = tensor(name, "BF16", view.shape(), view.data().to_vec());
            let Some(module) = name.strip_suffix("_proj.weight") else {
                quantized.push(same.clone());
                plain.push(same);
                continue;
            };
            let &[rows, cols] = view.shape() else { panic!("{name}") };
            let values: Vec<f32> = view
                .data()
                .chunks_exact(2)
                .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect();
            let (tensors, decoded) = quantize(rows, cols, &values);
            quantized.extend(
                tensors
                    .into_iter()
                    .map(|t| Tensor { name: format!("{module}_proj.{}", t.name), ..t }),
            );
            plain.push(tensor(name, "F32", &[rows, cols], f32s(&decoded)));
        }
    }
    let write = |name: &str, tensors: &mut Vec<Tensor>, extra: Option<Value>| {
        let copy = folder.join(name);
        testkit::copy_folder(&source, &copy).expect("copies");
        for entry in fs::read_dir(&copy).expect("lists") {
            let path = entry.expect("an entry").path();
            if path.to_string_lossy().contains(".safetensors") {
                fs::remove_file(path).expect("removes");
            }
        }
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        fs::write(copy.join("model.safetensors"), file(tensors)).expect("writes");
        let config = copy.join("config.json");
        let mut value: Value =
            serde_json::from_slice(&fs::read(&config).expect("reads")).expect("JSON");
        if let Some(extra) = extra {
            value["quantization_config"] = extra;
        }
        fs::write(config, value.to_string()).expect("writes");
        copy
    };
    (write("quantized", &mut quantized, Some(config)), write("plain", &mut plain, None))
}

/// Planes of every weight of an artifact.
fn weights(path: &Path) -> BTreeMap<String, (String, Vec<Vec<u8>>)> {
    let artifact = Artifact::open(path).expect("opens");
    artifact
        .entries()
        .filter(|e| !e.name().to_string().starts_with("radpack/"))
        .map(|e| {
            let planes = (0..e.encoding().planes.len()).map(|p| e.plane(p).to_vec()).collect();
            (e.name().to_string(), (e.encoding().to_string(), planes))
        })
        .collect()
}

const KEEP: &str = "schema = 1\nname = \"kept\"\n";

fn schemes() -> [(&'static str, Quantize, Value, &'static str); 3] {
    let group = |weights: Value, format: &str| {
        json!({
            "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": null}},
        })
    };
    [
        (
            "int4",
            int4_asymmetric,
            group(
                json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": false}),
                "pack-quantized",
            ),
            "i4*bf16[1x16]-i4[1x16]",
        ),
        (
            "fp8",
            fp8_channel,
            group(
                json!({"num_bits": 8, "type": "float", "strategy": "channel"}),
                "float-quantized",
            ),
            "fp8_e4m3*bf16[1x*]",
        ),
        (
            "nvfp4",
            nvfp4,
            json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}),
            "fp4_e2m1*fp8_e4m3[1x16]*f32[*x*]",
        ),
    ]
}

#[test]
fn a_quantized_llama_is_quantized_again_from_the_values_it_stands_for() {
    for (name, quantize, config, _) in schemes() {
        let tmp = tempfile::tempdir().expect("a folder");
        models(tmp.path(), quantize, config);
        for recipe in ["int8-g128", "bf16", "nvfp4"] {
            for source in ["quantized", "plain"] {
                let out = format!("{source}-{recipe}.rad");
                let args = ["convert", source, "--recipe", recipe, "-o", &out];
                succeeds(tmp.path(), &args);
            }
            let quantized = weights(&tmp.path().join(format!("quantized-{recipe}.rad")));
            let plain = weights(&tmp.path().join(format!("plain-{recipe}.rad")));
            assert_eq!(quantized.keys().collect::<Vec<_>>(), plain.keys().collect::<Vec<_>>());
            for (weight, planes) in &plain {
                let (found, want) = (&quantized[weight], planes);
                assert_eq!(found.0, want.0, "{name} to {recipe}: {weight}");
                for (plane, (a, b)) in found.1.iter().zip(&want.1).enumerate() {
                    let differs = a.iter().zip(b).position(|(a, b)| a != b);
                    let shown = differs.map(|at| (at, a[at], b[at]));
                    assert_eq!(shown, None, "{name} to {recipe}: {weight}, plane {plane}");
                }
            }
            let file = format!("quantized-{recipe}.rad");
            succeeds(tmp.path(), &["validate", &file, "--against", "quantized"]);
        }
    }
}

#[test]
fn a_quantized_llama_is_kept_with_its_own_codes_and_scales() {
    for (name, quantize, config, encoding) in schemes() {
        let tmp = tempfile::tempdir().expect("a folder");
        let (source, _) = models(tmp.path(), quantize, config);
        fs::write(tmp.path().join("keep.toml"), KEEP).expect("writes");
        for threads in ["1", "3"] {
            let out = format!("{threads}.rad");
            let args =
                ["convert", "quantized", "--recipe", "keep.toml", "-o", &out, "--threads", threads];
            succeeds(tmp.path(), &args);
        }
        let same = |file: &str| cli_support::sha256(&tmp.path().join(file));
        assert_eq!(same("1.rad"), same("3.rad"), "{name}");
        let ran = succeeds(tmp.path(), &["validate", "1.rad", "--against", "quantized"]);
        assert!(ran.stdout.ends_with("valid\n"), "{}", ran.stdout);
        let bytes = fs::read(source.join("model.safetensors")).expect("reads");
        let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
        let kept = weights(&tmp.path().join("1.rad"));
        let (found, planes) = &kept["blk.2.ffn_down.weight"];
        assert_eq!(found, encoding, "{name}");
        let part = |leaf: &str| {
            let name = format!("model.layers.2.mlp.down_proj.{leaf}");
            tensors.tensor(&name).expect("there").data().to_vec()
        };
        let codes = match name {
            "int4" => part("weight_packed").iter().map(|b| b ^ 0x88).collect(),
            _ => part("weight"),
        };
        assert!(planes[0] == codes, "{name}: codes");
        assert!(planes[1] == part("weight_scale"), "{name}: scales");
        if name == "nvfp4" {
            assert_eq!(planes[2], part("weight_scale_2"));
        }
        // Nothing was rounded, so nothing has an error; what is left out is told.
        let shown = succeeds(tmp.path(), &["inspect", "1.rad", "--json"]).stdout;
        let shown: Value = serde_json::from_str(&shown).expect("JSON");
        let unused = shown["manifest"]["unused"].as_array().expect("a list");
        assert_eq!(unused.len(), if name == "nvfp4" { 28 } else { 0 }, "{name}");
    }
}

#[test]
fn a_weight_that_cannot_be_kept_is_refused_with_the_reason_and_the_way_out() {
    fn smoothed(rows: usize, cols: usize, values: &[f32]) -> (Vec<Tensor>, Vec<f32>) {
        let (mut tensors, decoded) = nvfp4(rows, cols, values);
        tensors.push(tensor("pre_quant_scale", "F32", &[cols], f32s(&vec![1.0; cols])));
        (tensors, decoded)
    }
    let tmp = tempfile::tempdir().expect("a folder");
    models(tmp.path(), smoothed, json!({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}));
    fs::write(tmp.path().join("keep.toml"), KEEP).expect("writes");
    let ran =
        radpack(tmp.path(), &["convert", "quantized", "--recipe", "keep.toml", "-o", "a.rad"]);
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    for text in ["28 weights", "pre_quant_scale", "encoding = \"bf16\""] {
        assert!(ran.stderr.contains(text), "{}", ran.stderr);
    }
    succeeds(tmp.path(), &["convert", "quantized", "--recipe", "int8-g128", "-o", "a.rad"]);
}

#[test]
fn a_checkpoint_of_two_formats_is_read_by_the_tensors_of_each_weight() {
    let tmp = tempfile::tempdir().expect("a folder");
    let weights_of = |bits: u64| json!({"num_bits": bits, "type": "float"});
    let config = json!({
        "quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["re:.*lm_head"],
        "config_groups": {
            "mlp": {"targets": ["re:.*mlp.*"], "weights": weights_of(4), "format": "nvfp4-pack-quantized"},
            "attn": {"targets": ["re:.*self_attn.*"], "weights": weights_of(8), "format": "float-quantized"},
        },
    });
    models(tmp.path(), mixed, config);
    for source in ["quantized", "plain"] {
        let out = format!("{source}.rad");
        succeeds(tmp.path(), &["convert", source, "--recipe", "int8-g128", "-o", &out]);
    }
    let (quantized, plain) =
        (weights(&tmp.path().join("quantized.rad")), weights(&tmp.path().join("plain.rad")));
    for (weight, planes) in &plain {
        assert!(quantized[weight] == *planes, "{weight}");
    }
    fs::write(tmp.path().join("keep.toml"), KEEP).expect("writes");
    succeeds(tmp.path(), &["convert", "quantized", "--recipe", "keep.toml", "-o", "kept.rad"]);
    let kept = weights(&tmp.path().join("kept.rad"));
    assert_eq!(kept["blk.0.ffn_up.weight"].0, "fp4_e2m1*fp8_e4m3[1x16]*f32[*x*]");
    assert_eq!(kept["blk.0.attn_q.weight"].0, "fp8_e4m3*bf16[1x*]");
}

#[test]
fn experts_of_qwen3_moe_are_joined_kept_and_requantized() {
    let tmp = tempfile::tempdir().expect("a folder");
    let config = json!({
        "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"],
    });
    let (source, _) = models_of("tiny-qwen3-moe", tmp.path(), nvfp4, config);
    for source in ["quantized", "plain"] {
        let out = format!("{source}.rad");
        succeeds(tmp.path(), &["convert", source, "--recipe", "int8-g128", "-o", &out]);
    }
    let (quantized, plain) =
        (weights(&tmp.path().join("quantized.rad")), weights(&tmp.path().join("plain.rad")));
    for (weight, planes) in &plain {
        assert!(quantized[weight] == *planes, "{weight}");
    }
    fs::write(tmp.path().join("keep.toml"), KEEP).expect("writes");
    succeeds(tmp.path(), &["convert", "quantized", "--recipe", "keep.toml", "-o", "kept.rad"]);
    succeeds(tmp.path(), &["validate", "kept.rad", "--against", "quantized"]);
    let kept = weights(&tmp.path().join("kept.rad"));
    let bytes = fs::read(source.join("model.safetensors")).expect("reads");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let part = |leaf: &str| {
        let name = format!("model.layers.1.mlp.experts.2.{leaf}");
        tensors.tensor(&name).expect("there").data().to_vec()
    };
    let (_, planes) = &kept["blk.1.ffn_gate_up_exps.2.weight"];
    assert!(planes[0] == [part("gate_proj.weight"), part("up_proj.weight")].concat());
    assert!(planes[1] == [part("gate_proj.weight_scale"), part("up_proj.weight_scale")].concat());
}

// ---- refusals ----

fn refused(tensors: &[Tensor], config: &str) -> String {
    let model = Model::new();
    model.put("model.safetensors", &file(tensors));
    if !config.is_empty() {
        model.put("config.json", format!("{{\"quantization_config\": {config}}}").as_bytes());
    }
    let failure = model.opened().refuse_quantized().expect_err("refused");
    assert_eq!(failure.kind, radpack::diag::FailureKind::Refused);
    failure.problems.iter().map(|p| p.message.clone()).collect::<Vec<_>>().join("\n")
}

/// An fp8 weight `NAME` of [4, 8] with scales of that shape.
fn fp8(name: &str, scale: &str, shape: &[usize]) -> Vec<Tensor> {
    let n = shape.iter().product();
    vec![
        tensor(&format!("{name}.weight"), "F8_E4M3", &[4, 8], vec![0x38; 32]),
        tensor(&format!("{name}.{scale}"), "F32", shape, f32s(&vec![1.0; n])),
    ]
}

#[test]
fn faults_of_tensors_are_refused_together_by_name() {
    let nvfp4 = |name: &str, second: f32| {
        vec![
            tensor(&format!("{name}.weight"), "U8", &[2, 8], vec![0; 16]),
            tensor(&format!("{name}.weight_scale"), "F8_E4M3", &[2, 1], vec![0x38; 2]),
            tensor(&format!("{name}.weight_scale_2"), "F32", &[], f32s(&[second])),
        ]
    };
    let mut tensors = fp8("a", "weight_scale", &[3, 1]);
    tensors.extend(fp8("b", "weight_scale", &[4, 1]));
    tensors.push(tensor("c.weight", "F8_E4M3", &[4, 8], vec![0; 32]));
    tensors.push(tensor("d.weight_scale", "F32", &[1], f32s(&[1.0])));
    tensors.push(tensor("d.weight", "BF16", &[2, 2], vec![0; 8]));
    tensors.extend(nvfp4("e", 0.0));
    tensors.extend(nvfp4("f", f32::INFINITY));
    tensors.extend(nvfp4("g", -1.0));
    tensors.extend(fp8("h", "weight_scale_inv", &[1, 1]));
    tensors.push(tensor("h.weight_scale", "F32", &[1], f32s(&[1.0])));
    tensors.push(tensor("i.weight_packed", "U8", &[2, 8], vec![0; 16]));
    tensors.push(tensor("j.SCB", "F32", &[2], f32s(&[1.0, 1.0])));
    insta::assert_snapshot!(refused(&tensors, ""), @r"
    each of `d.weight_scale` and `h.weight_scale` belongs to no quantized weight that is read
    `i.weight_packed` has no `weight_scale` beside it
    `a.weight_scale` has shape [3, 1], which gives its weight of [4, 8] no scale for the tensor, a row, a group or a block
    `c.weight` holds codes, and no scale lies beside it
    `g.weight_scale_2` is -1; a global scale is finite and above 0
    `e.weight_scale_2` is 0; a global scale is finite and above 0
    `f.weight_scale_2` is inf; a global scale is finite and above 0
    `j.SCB` is of bitsandbytes int8, which is not read
    ");
}

#[test]
fn a_configuration_that_contradicts_its_tensors_is_refused() {
    let ct = |bits: u64, group: Value, ignore: &str| {
        json!({
            "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": [ignore],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "group_size": group}}},
        })
        .to_string()
    };
    let rows = fp8("m.0.q_proj", "weight_scale", &[4, 1]);
    assert_eq!(
        refused(&rows, &ct(8, Value::Null, "re:.*q_proj")),
        "`m.0.q_proj.weight` is quantized, and the configuration's `ignore` says that it is not"
    );
    assert_eq!(
        refused(&rows, &ct(4, Value::Null, "lm_head")),
        "`m.0.q_proj.weight` has codes of 8 bits; the configuration says 4"
    );
    assert_eq!(
        refused(&fp8("m", "weight_scale", &[4, 2]), &ct(8, json!(2), "lm_head")),
        "`m.weight_scale` gives groups of 4 columns; the configuration says `group_size` 2"
    );
    let modelopt =
        r#"{"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["*.q_*"]}"#;
    assert_eq!(
        refused(&rows, modelopt),
        "`m.0.q_proj.weight` is quantized, and the configuration's `ignore` says that it is not"
    );
    let plain = [tensor("a.weight", "BF16", &[2, 2], vec![0; 8])];
    assert_eq!(
        refused(&plain, &ct(8, Value::Null, "lm_head")),
        "config.json has quantization_config, and no tensor is quantized"
    );
}

#[test]
fn methods_and_packings_that_are_not_read_are_named() {
    let trio = [
        tensor("a.qweight", "I32", &[4, 8], vec![0; 128]),
        tensor("a.qzeros", "I32", &[1, 1], vec![0; 4]),
        tensor("a.scales", "F16", &[1, 8], vec![0; 16]),
    ];
    for (config, message) in [
        (
            r#"{"quant_method": "bitsandbytes", "load_in_4bit": true}"#,
            "the weights are quantized with bitsandbytes, which is not read",
        ),
        (r#"{"quant_method": "hqq"}"#, "the weights are quantized with hqq, which is not read"),
        ("{}", "the weights are quantized with an unnamed method, which is not read"),
        (
            r#"{"quant_method": "awq", "bits": 4, "version": "gemv"}"#,
            "AWQ packs its codes as `gemv`; only gemm is read",
        ),
        (
            r#"{"quant_method": "gptq", "bits": 4, "is_marlin_format": true}"#,
            "GPTQ packs its codes as `marlin`, which is not read",
        ),
        (
            r#"{"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}"#,
            "ModelOpt's algorithm NVFP4_SVD is not read",
        ),
        (
            r#"{"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"a": {}}}"#,
            "the format `marlin-24` of compressed-tensors is not read",
        ),
        (
            r#"{"quant_method": "compressed-tensors", "config_groups": {"a": {}}, "transform_config": {"u": 1}}"#,
            "the weights are rotated (`transform_config`), which is not undone",
        ),
    ] {
        assert_eq!(refused(&trio, config), message);
    }
    assert_eq!(
        refused(&trio, ""),
        "`a.qweight` has no configuration that tells its packing (quantization_config)"
    );
}

#[test]
fn damaged_companions_are_refused_and_never_panic() {
    let int4 = |shape: [i64; 2], words: usize| {
        vec![
            tensor("a.weight_packed", "I32", &[2, words], vec![0; 8 * words]),
            tensor("a.weight_scale", "BF16", &[2, 1], bf16s(&[1.0, 1.0])),
            tensor(
                "a.weight_shape",
                "I64",
                &[2],
                shape.iter().flat_map(|n| n.to_le_bytes()).collect(),
            ),
        ]
    };
    assert_eq!(
        refused(&int4([3, 64], 8), ""),
        "`a.weight_shape` says [3, 64]; the codes have 2 rows"
    );
    assert_eq!(
        refused(&int4([2, i64::MAX], 8), ""),
        "`a.weight_packed` has rows of 8 words for 9223372036854775807 columns, which tells no width"
    );
    assert_eq!(
        refused(&int4([2, -1], 8), ""),
        "`a.weight_shape` says [2, -1]; the codes have 2 rows"
    );
    let mut ordered = int4([2, 64], 8);
    ordered.push(tensor("a.weight_g_idx", "I32", &[64], vec![9; 256]));
    assert_eq!(refused(&ordered, ""), "`a.weight_g_idx` names group 151587081; the scales have 1");
    let gptq = r#"{"quant_method": "gptq", "bits": 4}"#;
    let empty = [
        tensor("a.qweight", "I32", &[0, 0], vec![]),
        tensor("a.qzeros", "I32", &[0, 0], vec![]),
        tensor("a.scales", "F16", &[0, 0], vec![]),
    ];
    assert!(refused(&empty, gptq).contains("a.qzeros"));
}
