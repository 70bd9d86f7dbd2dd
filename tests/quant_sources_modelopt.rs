//! Checkpoints of ModelOpt: every format alone, and mixed ones.

mod checkpoint_support;

use std::collections::BTreeMap;

use checkpoint_support::quantized::{
    checkpoint, decoded, f32s, golden, keeps_exactly, planes, weight,
};
use checkpoint_support::{Model, Tensor, e2m1, e4m3, file};
use half::bf16;
use radpack::model;
use testkit::proofs::{modelopt_format, proved_each, proved_one};

#[test]
fn every_format_of_modelopt_decodes_by_its_formula() {
    let all = golden("modelopt");
    let two = |byte: u8| [e2m1(byte & 15), e2m1(byte >> 4)];
    let mut compared = Vec::new();
    let exp = |byte: u8| 2f32.powi(i32::from(byte) - 127);
    for format in [
        "edge/fp8_tensor/",
        "edge/fp8_pc_pt/",
        "edge/fp8_pb_wo/",
        "edge/int8_wo/",
        "edge/int8_block128/",
        "edge/int4_awq/",
        "edge/mxfp4/",
        "edge/mxfp8/",
        "edge_tame/nvfp4/",
    ] {
        let w = &all[&format!("{format}weight")].2;
        let s = &all[&format!("{format}weight_scale")].2;
        let want: Vec<f32> = (0..32 * 512usize)
            .map(|i| {
                let (r, c) = (i / 512, i % 512);
                match format {
                    "edge/fp8_tensor/" => e4m3(w[i]) * f32s(s)[0],
                    "edge/fp8_pc_pt/" => e4m3(w[i]) * f32s(&s[r * 4..r * 4 + 4])[0],
                    "edge/fp8_pb_wo/" => e4m3(w[i]) * f32s(&s[c / 128 * 4..c / 128 * 4 + 4])[0],
                    "edge/int8_wo/" => f32::from(w[i] as i8) * f32s(&s[r * 4..r * 4 + 4])[0],
                    "edge/int8_block128/" => {
                        let at = (r * 4 + c / 128) * 2;
                        let scale = bf16::from_le_bytes([s[at], s[at + 1]]).to_f32();
                        bf16::from_f32(f32::from(w[i] as i8) * scale).to_f32()
                    }
                    "edge/int4_awq/" => {
                        let nibble = w[r / 2 * 512 + c] >> (r % 2 * 4) & 15;
                        let code =
                            if nibble > 7 { f32::from(nibble) - 16.0 } else { f32::from(nibble) };
                        let at = (r * 4 + c / 128) * 4;
                        code * f32s(&s[at..at + 4])[0]
                    }
                    "edge/mxfp4/" => two(w[i / 2])[i % 2] * exp(s[r * 16 + c / 32]),
                    "edge/mxfp8/" => e4m3(w[i]) * exp(s[r * 16 + c / 32]),
                    _ => {
                        let second = f32s(&all["edge_tame/nvfp4/weight_scale_2"].2)[0];
                        two(w[i / 2])[i % 2] * e4m3(s[r * 32 + c / 16]) * second
                    }
                }
            })
            .collect();
        let (_model, checkpoint) = checkpoint(&all, format, &[], "");
        let weight = weight(&checkpoint);
        assert_eq!(weight.shape.extents(), [32, 512], "{format}");
        let got = decoded(&checkpoint, &weight);
        let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        let differs = got.iter().zip(&want).position(|(a, b)| !same(*a, *b));
        assert_eq!(differs.map(|i| (i, got[i], want[i])), None, "{format}");
        keeps_exactly(&checkpoint, &weight, format);
        compared.push(modelopt_format(format));
    }
    proved_each("every_format_of_modelopt_decodes_by_its_formula", compared);
}

#[test]
fn awqs_input_factors_are_taken_into_the_columns_and_prevent_keeping() {
    let all = golden("modelopt");
    let mut with = all.clone();
    let factors: Vec<f32> = (0..512).map(|c| 1.0 + c as f32 / 64.0).collect();
    let bytes = factors.iter().flat_map(|f| f.to_le_bytes()).collect();
    with.insert("edge/int4_awq/pre_quant_scale".into(), ("F32", vec![512], bytes));
    let (_a, plain) = checkpoint(&all, "edge/int4_awq/", &[], "");
    let (_b, smoothed) = checkpoint(&with, "edge/int4_awq/", &[], "");
    let (plain_weight, weight) = (weight(&plain), weight(&smoothed));
    let want: Vec<f32> = decoded(&plain, &plain_weight)
        .iter()
        .enumerate()
        .map(|(i, v)| v * factors[i % 512])
        .collect();
    assert_eq!(decoded(&smoothed, &weight), want);
    let why = weight.stored.expect("quantized").planes.expect_err("not kept");
    assert_eq!(&*why, "its inputs are scaled column by column (pre_quant_scale)");
}

/// A checkpoint of ModelOpt whose attention is FP8, whose MLP is NVFP4 and whose head is not quantized.
fn mixed(layers: &str) -> Model {
    let all = golden("modelopt");
    let mut tensors = vec![Tensor {
        name: "lm_head.weight".into(),
        dtype: "BF16",
        shape: vec![2, 2],
        bytes: [1.0f32, -2.0, 0.5, 4.0]
            .iter()
            .flat_map(|v| bf16::from_f32(*v).to_le_bytes())
            .collect(),
    }];
    for (format, module) in [
        ("edge/fp8_tensor/", "model.layers.0.self_attn.q_proj"),
        ("edge_tame/nvfp4/", "model.layers.0.mlp.up_proj"),
    ] {
        tensors.extend(all.iter().filter_map(|(name, (dtype, shape, bytes))| {
            let leaf = name.strip_prefix(format)?;
            ["weight", "weight_scale", "weight_scale_2"].contains(&leaf).then(|| Tensor {
                name: format!("{module}.{leaf}"),
                dtype,
                shape: shape.clone(),
                bytes: bytes.clone(),
            })
        }));
    }
    let model = Model::new();
    model.put("model.safetensors", &file(&tensors));
    let config = format!(
        r#"{{"producer": {{"name": "modelopt", "version": "0.47.0"}}, "quantization": {{"quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": null, "exclude_modules": ["lm_head"], "quantized_layers": {{{layers}}}}}}}"#
    );
    model.put("hf_quant_config.json", config.as_bytes());
    model
}

#[test]
fn a_mixed_checkpoint_of_modelopt_reads_every_layer_by_its_own_format() {
    let model = mixed(
        r#""model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
           "model.layers.0.mlp": {"quant_algo": "NVFP4", "group_size": 16}"#,
    );
    let checkpoint = model.opened();
    assert_eq!(
        checkpoint.quantized().map(|q| q.method.as_str()),
        Some("modelopt (MIXED_PRECISION)")
    );
    if let Err(refusal) = checkpoint.refuse_quantized() {
        panic!("{refusal}");
    }
    let table = model::weights_only(None, checkpoint.tensors()).expect("weights");
    let mut found = BTreeMap::new();
    for weight in &table.weights {
        let mut weight = weight.clone();
        weight.stored = checkpoint.stored(&weight);
        if weight.stored.is_some() {
            keeps_exactly(&checkpoint, &weight, &weight.name);
            let encoding = checkpoint.planes(&weight).expect("planes").encoding().to_string();
            found.insert(weight.name.clone(), (encoding, decoded(&checkpoint, &weight)));
        } else {
            found.insert(weight.name.clone(), ("bf16".into(), decoded(&checkpoint, &weight)));
        }
    }
    let encodings: Vec<(&str, &str)> =
        found.iter().map(|(name, (encoding, _))| (name.as_str(), encoding.as_str())).collect();
    assert_eq!(
        encodings,
        [
            ("lm_head.weight", "bf16"),
            ("model.layers.0.mlp.up_proj.weight", "fp4_e2m1*fp8_e4m3[1x16]*f32[*x*]"),
            ("model.layers.0.self_attn.q_proj.weight", "fp8_e4m3*f32[*x*]"),
        ]
    );
    // Alone, each format decodes to the same values.
    let all = golden("modelopt");
    for (format, name) in [
        ("edge/fp8_tensor/", "model.layers.0.self_attn.q_proj.weight"),
        ("edge_tame/nvfp4/", "model.layers.0.mlp.up_proj.weight"),
    ] {
        let (_model, alone) = self::checkpoint(&all, format, &[], "");
        let weight = weight(&alone);
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<u32>>();
        assert_eq!(bits(&found[name].1), bits(&decoded(&alone, &weight)), "{name}");
    }
    assert_eq!(found["lm_head.weight"].1, [1.0, -2.0, 0.5, 4.0]);
    proved_one(
        "a_mixed_checkpoint_of_modelopt_reads_every_layer_by_its_own_format",
        "ModelOpt MIXED_PRECISION",
        2,
    );
}

#[test]
fn layers_that_a_mixed_checkpoint_lists_otherwise_are_refused_by_name() {
    let refusal = |layers: &str| {
        let text =
            mixed(layers).opened().refuse_quantized().expect_err("a contradiction").to_string();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let text = refusal(r#""model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}"#);
    assert!(
        text.contains("model.layers.0.mlp.up_proj.weight")
            && text.contains("`quantized_layers` says that it is not"),
        "{text}"
    );
    let text = refusal(
        r#""model.layers.0.self_attn.q_proj": {"quant_algo": "NVFP4", "group_size": 16},
           "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 32}"#,
    );
    assert!(text.contains("has codes of 8 bits; the configuration says 4"), "{text}");
    let text = refusal(
        r#""model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
           "model.layers.0.mlp.up_proj": {"quant_algo": "W4A8_MXFP4_FP8"}"#,
    );
    assert!(
        text.contains("model.layers.0.mlp.up_proj") && text.contains("W4A8_MXFP4_FP8"),
        "{text}"
    );
}

#[test]
fn nvfp4_of_modelopt_and_its_conversion_to_compressed_tensors_are_kept_alike() {
    let all = golden("other");
    let (_a, modelopt) = checkpoint(&all, "modelopt_to_ct/in/", &[], "");
    let (_b, converted) = checkpoint(&all, "modelopt_to_ct/out/", &[], "");
    assert_eq!(modelopt.unused()[0].0, "w.input_scale");
    assert_eq!(converted.unused()[0].0, "w.input_global_scale");
    let (one, other) = (weight(&modelopt), weight(&converted));
    let (one, other) = (planes(&modelopt, &one), planes(&converted, &other));
    assert_eq!(one[..2], other[..2]);
    let (a, b) = (f32s(&one[2])[0], f32s(&other[2])[0]);
    assert!((a - b).abs() <= a * 2f32.powi(-23), "{a:e} {b:e}");
}
