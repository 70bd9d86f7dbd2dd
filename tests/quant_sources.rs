//! Decoders and kept planes against weights that other software quantized (fixtures/quant-sources).

mod checkpoint_support;

use std::collections::{BTreeMap, BTreeSet};

use checkpoint_support::quantized::{
    Golden, as_bf16, checkpoint, decoded, f32s, golden, keeps_exactly, kept_values, of, planes,
    weight,
};
use checkpoint_support::{Model, Tensor, e4m3, file};
use half::bf16;
use proptest::prelude::*;
use radpack::checkpoint::Checkpoint;
use radpack::model;
use radpack::tensor::DType;
use testkit::proofs::{ct_format, proved_each, proved_one};

#[test]
fn every_format_of_compressed_tensors_decodes_to_its_own_decompression() {
    let all = golden("compressed-tensors");
    let mut encodings = BTreeMap::new();
    for (name, (_, shape, want)) in &all {
        let Some(prefix) = name.strip_suffix("dequant") else { continue };
        let (_model, checkpoint) = checkpoint(&all, prefix, &["dequant"], "");
        let weight = weight(&checkpoint);
        assert_eq!(weight.shape.extents(), shape.as_slice());
        let values = decoded(&checkpoint, &weight);
        let want: Vec<u16> =
            want.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect();
        let got = as_bf16(&values);
        // Writers scale units of zeros, or wider than their scales, to NaN; a NaN's payload is nobody's.
        let nan = |bits: u16| bf16::from_bits(bits).is_nan();
        let differs = |(a, b): (&u16, &u16)| a != b && !(nan(*a) && nan(*b));
        assert_eq!(got.iter().zip(&want).position(differs), None, "{name}");
        let encoding = checkpoint.planes(&weight).expect("kept").encoding().to_string();
        encodings.insert(prefix.trim_end_matches('/').to_owned(), (weight.dtype.name(), encoding));
        if prefix.contains("nvfp4") {
            // The container multiplies by the rounded reciprocal of the divisor.
            for (k, d) in kept_values(&checkpoint, &weight).iter().zip(&values) {
                assert!((k - d).abs() <= d.abs() * 2f32.powi(-22), "{k:e} {d:e}");
            }
        } else {
            keeps_exactly(&checkpoint, &weight, name);
        }
    }
    let test = "every_format_of_compressed_tensors_decodes_to_its_own_decompression";
    proved_each(test, encodings.keys().map(|case| ct_format(case)));
    let shown: Vec<String> = encodings.iter().map(|(n, (t, e))| format!("{n}: {t} {e}")).collect();
    insta::assert_snapshot!(shown.join("\n"), @r"
    edge/fp8_block: bf16 fp8_e4m3*bf16[128x128]
    edge/fp8_ch: bf16 fp8_e4m3*bf16[1x*]
    edge/fp8_tensor: bf16 fp8_e4m3*bf16[*x*]
    edge/int4_ch_pack: bf16 i4*bf16[1x*]
    edge/int4_g128_asym_pack: bf16 i4*bf16[1x128]-i4[1x128]
    edge/int4_g128_pack: bf16 i4*bf16[1x128]
    edge/int4_g32_asym_pack: bf16 i4*bf16[1x32]-i4[1x32]
    edge/int4_g32_pack: bf16 i4*bf16[1x32]
    edge/int8_ch_int: bf16 i8*bf16[1x*]
    edge/int8_ch_pack: bf16 i8*bf16[1x*]
    edge/int8_g128_asym_pack: bf16 i8*bf16[1x128]-i8[1x128]
    edge/int8_g128_int: bf16 i8*bf16[1x128]
    edge/int8_g128_pack: bf16 i8*bf16[1x128]
    edge/mxfp4: f32 fp4_e2m1*e8m0[1x32]
    edge/mxfp8: f32 fp8_e4m3*e8m0[1x32]
    edge_tame/nvfp4: f32 fp4_e2m1*fp8_e4m3[1x16]*f32[*x*]
    ragged_pack/fp8_ch: bf16 fp8_e4m3*bf16[1x*]
    ragged_pack/int4_ch_pack: bf16 i4*bf16[1x*]
    ragged_pack/int8_ch_int: bf16 i8*bf16[1x*]
    ragged_pack/int8_ch_pack: bf16 i8*bf16[1x*]
    ");
}

#[test]
fn f16_and_f32_scales_give_f32_values_without_a_further_rounding() {
    let all = golden("compressed-tensors");
    for prefix in [
        "normal8_f16/int8_g128_pack/",
        "normal8_f16/int4_g128_asym_pack/",
        "normal8_f32/int8_g128_pack/",
        "normal8_f32/int4_g128_asym_pack/",
        "normal8_f32/fp8_ch/",
        "normal8_f32/fp8_block/",
    ] {
        let (_model, checkpoint) = checkpoint(&all, prefix, &[], "");
        let weight = weight(&checkpoint);
        assert_eq!(weight.dtype, DType::F32, "{prefix}");
        keeps_exactly(&checkpoint, &weight, prefix);
    }
}

#[test]
fn kept_int8_bytes_are_the_packed_ones_with_their_top_bit_turned() {
    let all = golden("compressed-tensors");
    let (_model, checkpoint) = checkpoint(&all, "edge/int8_g128_pack/", &["dequant"], "");
    let weight = weight(&checkpoint);
    let planes = planes(&checkpoint, &weight);
    let packed: Vec<u8> =
        all["edge/int8_g128_pack/weight_packed"].2.iter().map(|b| b ^ 0x80).collect();
    assert_eq!(planes[0], packed);
    assert_eq!(planes[1], all["edge/int8_g128_pack/weight_scale"].2);
}

#[test]
fn zero_points_packed_down_the_rows_become_rows() {
    let all = golden("compressed-tensors");
    // 130 rows: the last word of a column holds two zero points.
    let prefix = "ragged/int4_g32_asym_pack/";
    let (_model, checkpoint) = checkpoint(&all, prefix, &[], "");
    let weight = weight(&checkpoint);
    let planes = planes(&checkpoint, &weight);
    let words: Vec<u32> = all[&format!("{prefix}weight_zero_point")]
        .2
        .as_chunks::<4>()
        .0
        .iter()
        .map(|b| u32::from_le_bytes(*b))
        .collect();
    for row in 0..130usize {
        for group in 0..10usize {
            let stored = words[row / 8 * 10 + group] >> (row % 8 * 4) & 15;
            let kept = u32::from(planes[2][row * 5 + group / 2] >> (group % 2 * 4)) & 15;
            assert_eq!(kept, stored ^ 8, "row {row} group {group}");
        }
    }
    // The same zero points as the files before 2025-04 have them: one signed byte each.
    let mut old = all.clone();
    let bytes: Vec<u8> = (0..1300usize)
        .map(|i| {
            let (row, group) = (i / 10, i % 10);
            (((words[row / 8 * 10 + group] >> (row % 8 * 4) & 15) as i32 - 8) as i8) as u8
        })
        .collect();
    old.insert(format!("{prefix}weight_zero_point"), ("I8", vec![130, 10], bytes));
    let (_old_model, unpacked) = self::checkpoint(&old, prefix, &[], "");
    let same = self::weight(&unpacked);
    assert_eq!(decoded(&unpacked, &same), decoded(&checkpoint, &weight));
    keeps_exactly(&unpacked, &same, "unpacked zero points");
}

/// One scale a block of 128 × 128, as transformers stores them.
fn scales_of(all: &Golden) -> Vec<f32> {
    f32s(&all["hf_finegrained_fp8/normal/weight_scale_inv"].2)
}

#[test]
fn fine_grained_fp8_multiplies_by_scale_inv_of_every_type() {
    let all = golden("other");
    let codes = &all["hf_finegrained_fp8/normal/weight"].2;
    let scales = scales_of(&all);
    let (_model, plain) = checkpoint(&all, "hf_finegrained_fp8/normal/", &[], "");
    let fp8 = weight(&plain);
    let want: Vec<f32> =
        (0..128 * 512usize).map(|i| e4m3(codes[i]) * scales[i % 512 / 128]).collect();
    assert_eq!(decoded(&plain, &fp8), want);
    keeps_exactly(&plain, &fp8, "fp8 blocks");
    assert_eq!(plain.planes(&fp8).expect("kept").encoding().to_string(), "fp8_e4m3*f32[128x128]");

    let codes = &all["hf_finegrained_fp8_ue8m0/normal/weight"].2;
    let scales = &all["hf_finegrained_fp8_ue8m0/normal/weight_scale_inv"].2;
    let (_model, powers) = checkpoint(&all, "hf_finegrained_fp8_ue8m0/normal/", &[], "");
    let fp8 = weight(&powers);
    let want: Vec<f32> = (0..128 * 512usize)
        .map(|i| e4m3(codes[i]) * 2f32.powi(i32::from(scales[i % 512 / 128]) - 127))
        .collect();
    assert_eq!(decoded(&powers, &fp8), want);
    keeps_exactly(&powers, &fp8, "ue8m0");

    let codes = &all["hf_finegrained_fp8/normal/weight"].2;
    let halves: Vec<bf16> = scales_of(&all).into_iter().map(bf16::from_f32).collect();
    let mut in_bf16 = all.clone();
    let bytes = halves.iter().flat_map(|s| s.to_le_bytes()).collect();
    let inv = "hf_finegrained_fp8/normal/weight_scale_inv";
    in_bf16.insert(inv.to_owned(), ("BF16", all[inv].1.clone(), bytes));
    let (_model, short) = checkpoint(&in_bf16, "hf_finegrained_fp8/normal/", &[], "");
    let fp8 = weight(&short);
    // The scale's type is that of the values: one rounding of the product, to bf16.
    let want: Vec<f32> = (0..128 * 512usize)
        .map(|i| bf16::from_f32(e4m3(codes[i]) * halves[i % 512 / 128].to_f32()).to_f32())
        .collect();
    assert_eq!(decoded(&short, &fp8), want);
    keeps_exactly(&short, &fp8, "bf16");
    assert_eq!(short.planes(&fp8).expect("kept").encoding().to_string(), "fp8_e4m3*bf16[128x128]");
    let test = "fine_grained_fp8_multiplies_by_scale_inv_of_every_type";
    proved_one(test, "transformers fine-grained fp8", 3);
}

#[test]
fn partial_blocks_at_the_edges_have_scales_of_their_own() {
    let (rows, cols) = (130u64, 140u64);
    let codes: Vec<u8> = (0..rows * cols).map(|i| (i % 0x7e) as u8).collect();
    let scales = [1.0f32, 2.0, 4.0, 8.0];
    let tensors = [
        Tensor {
            name: "w.weight".into(),
            dtype: "F8_E4M3",
            shape: vec![rows, cols],
            bytes: codes.clone(),
        },
        Tensor {
            name: "w.weight_scale_inv".into(),
            dtype: "F32",
            shape: vec![2, 2],
            bytes: scales.iter().flat_map(|s| s.to_le_bytes()).collect(),
        },
    ];
    let config = r#"{"quant_method": "fp8", "weight_block_size": [128, 128]}"#;
    let (_model, checkpoint) = of(&tensors, config);
    let weight = weight(&checkpoint);
    let want: Vec<f32> = (0..(rows * cols) as usize)
        .map(|i| e4m3(codes[i]) * scales[i / 140 / 128 * 2 + i % 140 / 128])
        .collect();
    assert_eq!(decoded(&checkpoint, &weight), want);
    keeps_exactly(&checkpoint, &weight, "edges");
}

/// Codes and zero points of a kept asymmetric weight, unpacked.
fn unpacked(plane: &[u8], bits: usize, rows: usize, cols: usize) -> Vec<u8> {
    let stride = (cols * bits).div_ceil(8);
    let code = |r: usize, c: usize| match bits {
        8 => plane[r * stride + c],
        _ => plane[r * stride + c / 2] >> (c % 2 * 4) & 15,
    };
    (0..rows).flat_map(|r| (0..cols).map(move |c| code(r, c))).collect()
}

#[test]
fn gptq_gives_the_codes_and_zero_points_that_went_in() {
    let all = golden("other");
    let mut compared = BTreeSet::new();
    for (version, format) in [
        ("v1", ""),
        ("v1", r#", "checkpoint_format": "gptq""#),
        ("v2", r#", "checkpoint_format": "gptq_v2""#),
    ] {
        for bits in [4usize, 8] {
            let case = format!("gptq_{version}_w{bits}");
            let config =
                format!(r#"{{"quant_method": "gptq", "bits": {bits}, "group_size": 32{format}}}"#);
            let (_model, checkpoint) = checkpoint(&all, &format!("{case}/in/"), &[], &config);
            let weight = weight(&checkpoint);
            assert_eq!(weight.shape.extents(), [64, 128], "{case}");
            let planes = planes(&checkpoint, &weight);
            let codes = &all[&format!("{case}/expected_codes_out_in")].2;
            let zeros = &all[&format!("{case}/expected_zeros_out_group")].2;
            assert_eq!(&unpacked(&planes[0], bits, 64, 128), codes, "{case}");
            assert_eq!(&unpacked(&planes[2], bits, 64, 4), zeros, "{case}");
            let scales = &all[&format!("{case}/in/scales")].2;
            let turned: Vec<u8> = (0..256usize)
                .flat_map(|i| {
                    let at = (i % 4 * 64 + i / 4) * 2;
                    [scales[at], scales[at + 1]]
                })
                .collect();
            assert_eq!(planes[1], turned, "{case}");
            let want: Vec<f32> = (0..64 * 128usize)
                .map(|i| {
                    let group = i / 128 * 4 + i % 128 / 32;
                    let scale =
                        half::f16::from_le_bytes([turned[group * 2], turned[group * 2 + 1]]);
                    (f32::from(codes[i]) - f32::from(zeros[group])) * scale.to_f32()
                })
                .collect();
            assert_eq!(decoded(&checkpoint, &weight), want, "{case}");
            keeps_exactly(&checkpoint, &weight, &case);
            compared.insert((format!("GPTQ {version}"), bits));
        }
    }
    let formats = compared.into_iter().map(|(format, _)| format);
    proved_each("gptq_gives_the_codes_and_zero_points_that_went_in", formats);
}

#[test]
fn groups_in_the_order_of_activations_decode_and_are_kept_as_a_permutation() {
    let all = golden("other");
    let mut shuffled = all.clone();
    // Every group has 32 columns, scattered.
    let order: Vec<i32> = (0..128).map(|c| (c * 5 + 3) % 128 / 32).collect();
    let bytes = order.iter().flat_map(|g| g.to_le_bytes()).collect();
    shuffled.insert("gptq_v2_w4/in/g_idx".into(), ("I32", vec![128], bytes));
    let config = r#"{"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": true, "checkpoint_format": "gptq_v2"}"#;
    let (_model, checkpoint) = checkpoint(&shuffled, "gptq_v2_w4/in/", &[], config);
    let weight = weight(&checkpoint);
    let codes = &all["gptq_v2_w4/expected_codes_out_in"].2;
    let zeros = &all["gptq_v2_w4/expected_zeros_out_group"].2;
    let scales = &all["gptq_v2_w4/in/scales"].2;
    let want: Vec<f32> = (0..64 * 128usize)
        .map(|i| {
            let (row, group) = (i / 128, order[i % 128] as usize);
            let at = (group * 64 + row) * 2;
            let scale = half::f16::from_le_bytes([scales[at], scales[at + 1]]).to_f32();
            (f32::from(codes[i]) - f32::from(zeros[row * 4 + group])) * scale
        })
        .collect();
    assert_eq!(decoded(&checkpoint, &weight), want);
    keeps_exactly(&checkpoint, &weight, "desc_act");
    assert_eq!(checkpoint.planes(&weight).expect("kept").encoding().transform, "perm");
}

#[test]
fn autoawq_gives_the_codes_that_went_in_and_equals_its_conversion_to_compressed_tensors() {
    let all = golden("other");
    let config = r#"{"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": true, "version": "gemm"}"#;
    let (_model, awq) = checkpoint(&all, "autoawq_gemm/in/", &[], config);
    let weight = weight(&awq);
    assert_eq!(weight.shape.extents(), [64, 128]);
    let planes = planes(&awq, &weight);
    let turn = |bytes: &[u8], rows: usize, cols: usize| -> Vec<u8> {
        (0..rows * cols).map(|i| bytes[i % cols * rows + i / cols]).collect()
    };
    let codes = turn(&all["autoawq_gemm/expected_codes_in_out"].2, 64, 128);
    let zeros = turn(&all["autoawq_gemm/expected_zeros"].2, 64, 4);
    assert_eq!(unpacked(&planes[0], 4, 64, 128), codes);
    assert_eq!(unpacked(&planes[2], 4, 64, 4), zeros);
    keeps_exactly(&awq, &weight, "awq");
    let (_other, converted) = checkpoint(&all, "autoawq_gemm/ct_out/", &[], "");
    let same = self::weight(&converted);
    assert_eq!(decoded(&converted, &same), decoded(&awq, &weight));
    proved_one(
        "autoawq_gives_the_codes_that_went_in_and_equals_its_conversion_to_compressed_tensors",
        "AutoAWQ gemm",
        1,
    );
}

#[test]
fn gpt_oss_experts_decode_with_outputs_as_rows() {
    let all = golden("other");
    let tensors: Vec<Tensor> =
        [("in/blocks", "e.down_proj_blocks"), ("in/scales", "e.down_proj_scales")]
            .iter()
            .map(|(from, to)| {
                let (dtype, shape, bytes) = all[&format!("gpt_oss_mxfp4/{from}")].clone();
                Tensor { name: (*to).into(), dtype, shape, bytes }
            })
            .collect();
    let (_model, checkpoint) = of(&tensors, r#"{"quant_method": "mxfp4"}"#);
    let weight = weight(&checkpoint);
    assert_eq!((weight.name.as_str(), weight.shape.extents()), ("e.down_proj", &[2, 8, 128][..]));
    let turned = &all["gpt_oss_mxfp4/dequant_in_order"].2;
    let want: Vec<u16> = (0..2 * 8 * 128usize)
        .map(|i| {
            let (expert, out, input) = (i / 1024, i % 1024 / 128, i % 128);
            let at = (expert * 1024 + input * 8 + out) * 2;
            u16::from_le_bytes([turned[at], turned[at + 1]])
        })
        .collect();
    assert_eq!(as_bf16(&decoded(&checkpoint, &weight)), want);
    keeps_exactly(&checkpoint, &weight, "gpt-oss");
    proved_one("gpt_oss_experts_decode_with_outputs_as_rows", "gpt-oss MXFP4", 1);
}

#[test]
fn gate_and_up_are_kept_as_one_weight_only_under_one_global_scale() {
    let all = golden("compressed-tensors");
    let tensors = |scale_of_up: f32| -> Vec<Tensor> {
        all.iter()
            .filter_map(|(name, (dtype, shape, bytes))| {
                let leaf = name.strip_prefix("fused/nvfp4/")?;
                let wanted = leaf.starts_with("gate.") || leaf.starts_with("up.");
                let mut bytes = bytes.clone();
                if leaf == "up.weight_global_scale" {
                    let stored = f32::from_le_bytes(bytes[..4].try_into().expect("four"));
                    bytes = (stored * scale_of_up).to_le_bytes().to_vec();
                }
                wanted.then(|| Tensor { name: leaf.into(), dtype, shape: shape.clone(), bytes })
            })
            .collect()
    };
    let joined = |checkpoint: &Checkpoint| {
        let table = model::weights_only(None, checkpoint.tensors()).expect("weights");
        let mut weight = table.weights[0].clone();
        weight.parts.push(table.weights[1].parts[0].clone());
        weight.shape = radpack::tensor::Shape::from([64, 256]);
        weight.stored = checkpoint.stored(&weight);
        let apart: Vec<f32> = table.weights.iter().flat_map(|w| decoded(checkpoint, w)).collect();
        (weight, apart)
    };
    let (_a, same) = of(&tensors(1.0), "");
    let (weight, apart) = joined(&same);
    assert_eq!(decoded(&same, &weight), apart);
    let planes = planes(&same, &weight);
    let codes = |name: &str| all[&format!("fused/nvfp4/{name}")].2.clone();
    assert_eq!(planes[0], [codes("gate.weight_packed"), codes("up.weight_packed")].concat());
    assert_eq!(planes[1], [codes("gate.weight_scale"), codes("up.weight_scale")].concat());

    let (_b, other) = of(&tensors(2.0), "");
    let (weight, apart) = joined(&other);
    assert_eq!(decoded(&other, &weight), apart);
    let why = weight.stored.as_ref().expect("quantized").planes.clone().expect_err("not kept");
    assert_eq!(&*why, "its parts have different global scales");
    assert!(other.planes(&weight).is_none());
}

#[test]
fn integers_of_odd_widths_are_read_packed_without_gaps() {
    // Little-endian bit stream, elements plus half their range, made here with big integers.
    let (rows, cols) = (3u64, 40u64);
    for bits in [3u64, 5, 6, 7] {
        let code = |r: u64, c: u64| (r * 31 + c * 7) % (1 << bits);
        let words = (cols * bits).div_ceil(32);
        let mut bytes = Vec::new();
        for r in 0..rows {
            let mut stream = vec![false; (words * 32) as usize];
            for c in 0..cols {
                for b in 0..bits {
                    stream[(c * bits + b) as usize] = code(r, c) >> b & 1 == 1;
                }
            }
            bytes.extend(stream.chunks(8).map(|byte| {
                byte.iter().enumerate().fold(0u8, |n, (i, &bit)| n | u8::from(bit) << i)
            }));
        }
        let tensors = [
            Tensor {
                name: "w.weight_packed".into(),
                dtype: "I32",
                shape: vec![rows, words],
                bytes,
            },
            Tensor {
                name: "w.weight_scale".into(),
                dtype: "F32",
                shape: vec![rows, 1],
                bytes: [1f32, 2.0, 4.0].iter().flat_map(|s| s.to_le_bytes()).collect(),
            },
            Tensor {
                name: "w.weight_shape".into(),
                dtype: "I64",
                shape: vec![2],
                bytes: [rows, cols].iter().flat_map(|n| n.to_le_bytes()).collect(),
            },
        ];
        let (_model, checkpoint) = of(&tensors, "");
        let weight = weight(&checkpoint);
        let want: Vec<f32> = (0..rows * cols)
            .map(|i| {
                let (r, c) = (i / cols, i % cols);
                (code(r, c) as f32 - (1u64 << (bits - 1)) as f32) * [1f32, 2.0, 4.0][r as usize]
            })
            .collect();
        assert_eq!(decoded(&checkpoint, &weight), want, "{bits} bits");
        keeps_exactly(&checkpoint, &weight, "odd width");
    }
}

const LEAVES: [&str; 14] = [
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "pre_quant_scale",
];

/// Tensors of a quantized weight in any types and small shapes, `weight_shape` and `g_idx` mostly small numbers.
fn companions() -> impl Strategy<Value = Vec<Tensor>> {
    let types = [
        ("U8", 1),
        ("I8", 1),
        ("F8_E4M3", 1),
        ("BF16", 2),
        ("F16", 2),
        ("F32", 4),
        ("I32", 4),
        ("I64", 8),
    ];
    let extent = prop::sample::select(vec![0u64, 1, 2, 4, 8, 16, 32, 64]);
    let one = (
        prop::sample::select(LEAVES.to_vec()),
        prop::sample::select(types.to_vec()),
        prop::collection::vec(extent, 0..4),
        any::<u8>(),
    );
    prop::collection::vec(one, 1..6).prop_map(|all| {
        let mut tensors: BTreeMap<&str, Tensor> = BTreeMap::new();
        for (leaf, (dtype, width), shape, seed) in all {
            let elements: u64 = shape.iter().product();
            let small = leaf == "weight_shape" || leaf.ends_with("g_idx");
            let bytes = (0..elements * width)
                .map(|i| match small {
                    true if i % width == 0 => seed % 65,
                    true => 0,
                    false => seed.wrapping_mul(31).wrapping_add((i * 7) as u8),
                })
                .collect();
            tensors.insert(leaf, Tensor { name: format!("w.{leaf}"), dtype, shape, bytes });
        }
        tensors.into_values().collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]
    #[test]
    fn any_companions_are_refused_or_decode_and_never_panic(
        tensors in companions(),
        method in prop::sample::select(vec!["", "gptq", "awq", "fp8", "modelopt", "compressed-tensors"]),
    ) {
        read_all(&tensors, method)?;
    }

    #[test]
    fn one_damaged_tensor_is_refused_or_decodes_and_never_panics(
        case in prop::sample::select(CASES.to_vec()),
        which in any::<prop::sample::Index>(),
        damage in 0u8..6,
        byte in any::<u8>(),
    ) {
        let (fixture, prefix, method) = case;
        let mut tensors: Vec<Tensor> = golden(fixture)
            .into_iter()
            .filter_map(|(name, (dtype, shape, bytes))| {
                let leaf = name.strip_prefix(prefix).filter(|leaf| *leaf != "dequant")?;
                Some(Tensor { name: format!("w.{leaf}"), dtype, shape, bytes })
            })
            .collect();
        prop_assert_eq!(read_all(&tensors, method)?, true, "{} is sound", prefix);
        let at = which.index(tensors.len());
        let all = tensors[at].bytes.len();
        match damage {
            0 => drop(tensors.remove(at)),
            1 => tensors[at].shape.reverse(),
            2 => tensors[at].bytes.fill(byte),
            3 => {
                tensors[at].shape = vec![all as u64];
                tensors[at].dtype = "U8";
            }
            4 => {
                let rows = tensors[at].shape.first().copied().unwrap_or(1).max(1);
                let more = all / rows as usize;
                tensors[at].bytes.extend(vec![byte; more]);
                match tensors[at].shape.first_mut() {
                    Some(rows) => *rows += 1,
                    None => tensors[at].shape.push(2),
                }
            }
            _ => tensors[at].shape.push(1),
        }
        read_all(&tensors, method)?;
    }
}

/// Fixture, case and method of sound weights.
const CASES: [(&str, &str, &str); 14] = [
    ("compressed-tensors", "ragged_pack/int4_ch_pack/", ""),
    ("compressed-tensors", "edge/int4_g128_asym_pack/", "compressed-tensors"),
    ("compressed-tensors", "edge/int8_g128_int/", ""),
    ("compressed-tensors", "edge/fp8_block/", ""),
    ("compressed-tensors", "edge/fp8_tensor/", ""),
    ("compressed-tensors", "edge_tame/nvfp4/", ""),
    ("compressed-tensors", "edge/mxfp4/", ""),
    ("compressed-tensors", "edge/mxfp8/", ""),
    ("modelopt", "edge_tame/nvfp4/", "modelopt"),
    ("modelopt", "edge/int4_awq/", ""),
    ("modelopt", "edge/fp8_pc_pt/", "modelopt"),
    ("other", "gptq_v1_w4/in/", "gptq"),
    ("other", "gptq_v2_w8/in/", "gptq"),
    ("other", "autoawq_gemm/in/", "awq"),
];

/// Reads everything that a checkpoint of these tensors offers; whether it was accepted.
fn read_all(tensors: &[Tensor], method: &str) -> Result<bool, TestCaseError> {
    let model = Model::new();
    model.put("model.safetensors", &file(tensors));
    if !method.is_empty() {
        let config = format!("{{\"quantization_config\": {{\"quant_method\": \"{method}\"}}}}");
        model.put("config.json", config.as_bytes());
    }
    let checkpoint = model.opened();
    if let Err(refusal) = checkpoint.refuse_quantized() {
        prop_assert!(!refusal.problems.is_empty());
        return Ok(false);
    }
    let Ok(table) = model::weights_only(None, checkpoint.tensors()) else { return Ok(false) };
    for mut weight in table.weights {
        weight.stored = checkpoint.stored(&weight);
        let Some(stored) = &weight.stored else { continue };
        let values = decoded(&checkpoint, &weight);
        prop_assert_eq!(values.len() as u64, weight.shape.elements().unwrap_or(0));
        if stored.planes.is_ok() {
            prop_assert_eq!(kept_values(&checkpoint, &weight).len(), values.len());
        }
    }
    Ok(true)
}
