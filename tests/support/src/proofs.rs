//! What the tests prove about formats that other software reads or writes: one row a test.
//!
//! A test that compares with independent software ends in [`proved`], which holds its counts against this table.
//! `docs/encodings.md` is printed from the table, by a test that also looks for every row's test in its file: so a row
//! cannot claim what no test proves, and a test that compares less than it did fails.

use std::collections::BTreeMap;

/// What is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    /// Files of that software are read: values, codes and scales are those it says.
    Read,
    /// The same weights are quantized: codes, scales and zero points are those of that software.
    Quantize,
    /// An exported folder is read back.
    Export,
}

/// What one test compares.
#[derive(Debug, Clone, Copy)]
pub struct Proof {
    /// File of the test, below the repository root.
    pub file: &'static str,
    /// Name of its function.
    pub test: &'static str,
    /// What is compared.
    pub direction: Direction,
    /// The independent software.
    pub with: &'static str,
    /// What is counted.
    pub unit: &'static str,
    /// Comparisons by format, sorted.
    pub compared: &'static [(&'static str, usize)],
}

const RAD: &str = "radiance's own converter and reader (container version 2)";
const CT: &str = "compressed-tensors 0.19.0 driven by llm-compressor 0.14.0.1";
const CT_READS: &str = "compressed-tensors 0.19.0";
const MODELOPT: &str = "nvidia-modelopt 0.47.0";
const TRANSFORMERS: &str = "transformers 5.17.0";
const AUTOROUND: &str = "auto-round 0.15.1";
const GGUF_PY: &str = "gguf-py 0.19.0";
const SAFETENSORS: &str = "safetensors 0.8.0, and its own reading";

const PACKAGES: &str = "src/quantize/packages/mod.rs";
const SOURCES: &str = "tests/quant_sources.rs";
const SOURCES_MODELOPT: &str = "tests/quant_sources_modelopt.rs";
const GOLDEN: &str = "src/quantize/golden.rs";
const GGUF: &str = "tests/gguf_sources.rs";
const EXPORT: &str = "tests/cli_export.rs";

/// Every test that compares with other software.
pub const PROOFS: &[Proof] = &[
    Proof {
        file: GOLDEN,
        test: "every_weight_of_the_golden_files_is_rebuilt_bit_for_bit_by_every_kernel",
        direction: Direction::Quantize,
        with: RAD,
        unit: "weights",
        compared: &[("radiance container version 2", 24)],
    },
    Proof {
        file: GOLDEN,
        test: "every_weight_of_the_golden_files_decodes_to_the_values_of_the_reference_reader",
        direction: Direction::Read,
        with: RAD,
        unit: "weights",
        compared: &[("radiance container version 2", 24)],
    },
    Proof {
        file: PACKAGES,
        test: "compressed_tensors_is_reproduced_on_ordinary_weights",
        direction: Direction::Quantize,
        with: CT,
        unit: "tensors",
        compared: &[
            ("compressed-tensors float-quantized", 10),
            ("compressed-tensors int-quantized", 6),
            ("compressed-tensors mxfp4-pack-quantized", 4),
            ("compressed-tensors mxfp8-quantized", 2),
            ("compressed-tensors nvfp4-pack-quantized", 6),
            ("compressed-tensors pack-quantized", 14),
            ("compressed-tensors pack-quantized with zero points", 12),
        ],
    },
    Proof {
        file: PACKAGES,
        test: "compressed_tensors_is_reproduced_on_corner_cases",
        direction: Direction::Quantize,
        with: CT,
        unit: "tensors",
        compared: &[
            ("compressed-tensors float-quantized", 9),
            ("compressed-tensors int-quantized", 6),
            ("compressed-tensors mxfp4-pack-quantized", 3),
            ("compressed-tensors mxfp8-quantized", 3),
            ("compressed-tensors nvfp4-pack-quantized", 4),
            ("compressed-tensors pack-quantized", 15),
            ("compressed-tensors pack-quantized with zero points", 12),
        ],
    },
    Proof {
        file: PACKAGES,
        test: "compressed_tensors_is_reproduced_on_ragged_shapes_and_other_source_types",
        direction: Direction::Quantize,
        with: CT,
        unit: "tensors",
        compared: &[
            ("compressed-tensors float-quantized", 15),
            ("compressed-tensors int-quantized", 3),
            ("compressed-tensors mxfp4-pack-quantized", 6),
            ("compressed-tensors nvfp4-pack-quantized", 9),
            ("compressed-tensors pack-quantized", 14),
            ("compressed-tensors pack-quantized with zero points", 9),
        ],
    },
    Proof {
        file: PACKAGES,
        test: "weights_that_engines_fuse_share_the_global_scale_of_compressed_tensors",
        direction: Direction::Quantize,
        with: CT,
        unit: "tensors",
        compared: &[("compressed-tensors nvfp4-pack-quantized", 15)],
    },
    Proof {
        file: PACKAGES,
        test: "weights_that_engines_fuse_share_the_global_scale_of_modelopt",
        direction: Direction::Quantize,
        with: MODELOPT,
        unit: "tensors",
        compared: &[("ModelOpt NVFP4", 15)],
    },
    Proof {
        file: PACKAGES,
        test: "modelopt_is_reproduced",
        direction: Direction::Quantize,
        with: MODELOPT,
        unit: "tensors",
        compared: &[
            ("ModelOpt FP8", 4),
            ("ModelOpt FP8_PB_WO", 4),
            ("ModelOpt FP8_PER_CHANNEL_PER_TOKEN", 4),
            ("ModelOpt MXFP4", 4),
            ("ModelOpt MXFP8", 4),
            ("ModelOpt NVFP4", 6),
            ("ModelOpt W4A16_AWQ", 4),
            ("ModelOpt W8A16", 8),
        ],
    },
    Proof {
        file: PACKAGES,
        test: "the_fine_grained_fp8_of_transformers_is_reproduced",
        direction: Direction::Quantize,
        with: TRANSFORMERS,
        unit: "tensors",
        compared: &[("transformers fine-grained fp8", 8)],
    },
    Proof {
        file: PACKAGES,
        test: "outputs_of_compressed_tensors_known_by_their_digest_alone_are_reproduced",
        direction: Direction::Quantize,
        with: CT,
        unit: "tensors",
        compared: &[
            ("compressed-tensors float-quantized", 11),
            ("compressed-tensors int-quantized", 8),
            ("compressed-tensors mxfp4-pack-quantized", 3),
            ("compressed-tensors mxfp8-quantized", 5),
            ("compressed-tensors nvfp4-pack-quantized", 4),
            ("compressed-tensors pack-quantized", 21),
            ("compressed-tensors pack-quantized with zero points", 18),
        ],
    },
    Proof {
        file: PACKAGES,
        test: "outputs_of_modelopt_known_by_their_digest_alone_are_reproduced",
        direction: Direction::Quantize,
        with: MODELOPT,
        unit: "tensors",
        compared: &[
            ("ModelOpt FP8", 2),
            ("ModelOpt FP8_PB_WO", 2),
            ("ModelOpt FP8_PER_CHANNEL_PER_TOKEN", 2),
            ("ModelOpt MXFP4", 2),
            ("ModelOpt MXFP8", 2),
            ("ModelOpt NVFP4", 3),
            ("ModelOpt W4A16_AWQ", 2),
            ("ModelOpt W8A16", 4),
        ],
    },
    Proof {
        file: SOURCES,
        test: "every_format_of_compressed_tensors_decodes_to_its_own_decompression",
        direction: Direction::Read,
        with: CT_READS,
        unit: "weights",
        compared: &[
            ("compressed-tensors float-quantized", 4),
            ("compressed-tensors int-quantized", 3),
            ("compressed-tensors mxfp4-pack-quantized", 1),
            ("compressed-tensors mxfp8-quantized", 1),
            ("compressed-tensors nvfp4-pack-quantized", 1),
            ("compressed-tensors pack-quantized", 7),
            ("compressed-tensors pack-quantized with zero points", 3),
        ],
    },
    Proof {
        file: SOURCES_MODELOPT,
        test: "every_format_of_modelopt_decodes_by_its_formula",
        direction: Direction::Read,
        with: MODELOPT,
        unit: "weights of its files, by its formula",
        compared: &[
            ("ModelOpt FP8", 1),
            ("ModelOpt FP8_PB_WO", 1),
            ("ModelOpt FP8_PER_CHANNEL_PER_TOKEN", 1),
            ("ModelOpt MXFP4", 1),
            ("ModelOpt MXFP8", 1),
            ("ModelOpt NVFP4", 1),
            ("ModelOpt W4A16_AWQ", 1),
            ("ModelOpt W8A16", 2),
        ],
    },
    Proof {
        file: SOURCES_MODELOPT,
        test: "a_mixed_checkpoint_of_modelopt_reads_every_layer_by_its_own_format",
        direction: Direction::Read,
        with: MODELOPT,
        unit: "weights of its files, in one checkpoint",
        compared: &[("ModelOpt MIXED_PRECISION", 2)],
    },
    Proof {
        file: SOURCES,
        test: "fine_grained_fp8_multiplies_by_scale_inv_of_every_type",
        direction: Direction::Read,
        with: TRANSFORMERS,
        unit: "weights of its files, by its formula",
        compared: &[("transformers fine-grained fp8", 3)],
    },
    Proof {
        file: SOURCES,
        test: "gptq_gives_the_codes_and_zero_points_that_went_in",
        direction: Direction::Read,
        with: AUTOROUND,
        unit: "weights, with the codes that went in",
        compared: &[("GPTQ v1", 2), ("GPTQ v2", 2)],
    },
    Proof {
        file: SOURCES,
        test: "autoawq_gives_the_codes_that_went_in_and_equals_its_conversion_to_compressed_tensors",
        direction: Direction::Read,
        with: AUTOROUND,
        unit: "weights, with the codes that went in",
        compared: &[("AutoAWQ gemm", 1)],
    },
    Proof {
        file: SOURCES,
        test: "gpt_oss_experts_decode_with_outputs_as_rows",
        direction: Direction::Read,
        with: TRANSFORMERS,
        unit: "weights",
        compared: &[("gpt-oss MXFP4", 1)],
    },
    Proof {
        file: GGUF,
        test: "every_block_type_decodes_and_is_kept_as_gguf_py_decodes_it",
        direction: Direction::Read,
        with: GGUF_PY,
        unit: "weights",
        compared: &[
            ("GGUF MXFP4", 1),
            ("GGUF Q2_K", 1),
            ("GGUF Q3_K", 1),
            ("GGUF Q4_0", 1),
            ("GGUF Q4_1", 1),
            ("GGUF Q4_K", 1),
            ("GGUF Q5_0", 1),
            ("GGUF Q5_1", 1),
            ("GGUF Q5_K", 1),
            ("GGUF Q6_K", 1),
            ("GGUF Q8_0", 2),
        ],
    },
    Proof {
        file: EXPORT,
        test: "an_unquantized_artifact_exports_to_the_tensors_it_came_from",
        direction: Direction::Export,
        with: SAFETENSORS,
        unit: "tensors",
        compared: &[("safetensors, decoded", 848)],
    },
    Proof {
        file: EXPORT,
        test: "an_exported_folder_reads_back_as_a_source_with_the_same_codes_scales_and_digests",
        direction: Direction::Export,
        with: SAFETENSORS,
        unit: "weights",
        compared: &[
            ("compressed-tensors float-quantized", 112),
            ("compressed-tensors mxfp4-pack-quantized", 56),
            ("compressed-tensors nvfp4-pack-quantized", 56),
            ("compressed-tensors pack-quantized", 112),
        ],
    },
];

/// `FORMAT` of `CASE/FORMAT/`.
fn last(label: &str) -> &str {
    label.trim_end_matches('/').rsplit('/').next().unwrap_or(label)
}

/// The name under which a format of compressed-tensors is published: `int8_g128_pack`, `fp8_block`, with or without a case
/// before it.
pub fn ct_format(label: &str) -> &'static str {
    let format = last(label);
    match format {
        "nvfp4" => "compressed-tensors nvfp4-pack-quantized",
        "mxfp4" => "compressed-tensors mxfp4-pack-quantized",
        "mxfp8" => "compressed-tensors mxfp8-quantized",
        _ if format.starts_with("fp8") => "compressed-tensors float-quantized",
        _ if format.ends_with("_int") => "compressed-tensors int-quantized",
        _ if format.contains("asym") => "compressed-tensors pack-quantized with zero points",
        _ => "compressed-tensors pack-quantized",
    }
}

/// The name under which a format of ModelOpt is published: `fp8_pb_wo`, `int8_wo`, with or without a case before it.
pub fn modelopt_format(label: &str) -> &'static str {
    match last(label) {
        "nvfp4" => "ModelOpt NVFP4",
        "mxfp4" => "ModelOpt MXFP4",
        "mxfp8" => "ModelOpt MXFP8",
        "fp8_tensor" => "ModelOpt FP8",
        "fp8_pc_pt" => "ModelOpt FP8_PER_CHANNEL_PER_TOKEN",
        "fp8_pb_wo" => "ModelOpt FP8_PB_WO",
        "int4_awq" => "ModelOpt W4A16_AWQ",
        _ => "ModelOpt W8A16",
    }
}

/// Holds what a test compared, by format, against its row.
///
/// # Panics
/// A test without a row, or other counts than the row's.
#[track_caller]
pub fn proved(test: &str, compared: &BTreeMap<String, usize>) {
    let row = PROOFS.iter().find(|p| p.test == test);
    let row = row.unwrap_or_else(|| panic!("`{test}` has no row in tests/support/src/proofs.rs"));
    let known: BTreeMap<String, usize> =
        row.compared.iter().map(|(format, n)| ((*format).to_owned(), *n)).collect();
    assert!(
        known == *compared,
        "row `{test}` of tests/support/src/proofs.rs says {known:?}, compared were {compared:?}"
    );
}

/// [`proved`] for a test that compares once for each of these formats.
///
/// # Panics
/// As [`proved`].
#[track_caller]
pub fn proved_each<S: Into<String>>(test: &str, formats: impl IntoIterator<Item = S>) {
    let mut compared = BTreeMap::new();
    for format in formats {
        *compared.entry(format.into()).or_default() += 1;
    }
    proved(test, &compared);
}

/// [`proved`] for a test of one format.
///
/// # Panics
/// As [`proved`].
#[track_caller]
pub fn proved_one(test: &str, format: &str, compared: usize) {
    proved(test, &BTreeMap::from([(format.to_owned(), compared)]));
}
