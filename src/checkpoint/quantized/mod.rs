//! Checkpoints whose weights are quantized already: recognised by names and types of tensors first, by the
//! configuration second, and presented as the logical weights that they stand for.
//!
//! `X.weight_packed` with its scales becomes `X.weight` of its logical shape: bf16 where its first-level scales are
//! bf16, else f32. A weight is decoded row by row ([`packed`]) or kept as planes of the same codes and scales.
//!
//! | file | what |
//! |---|---|
//! | `signs` | signs of quantization: [`QuantizedWith`] |
//! | `claims` | what the configuration says |
//! | `finder` | every tensor is used once, left out with a reason, or a problem |
//! | `compressed_tensors`, `modelopt`, `fine_grained_fp8`, `gptq`, `awq`, `gpt_oss` | one format each |
//! | `matrix` | codes or scales as they lie in a tensor |
//! | `ggml` | the block formats of GGUF files (`checkpoint::gguf` finds them) |
//! | `packed` | one weight: values and planes |

mod awq;
mod claims;
mod compressed_tensors;
mod finder;
mod fine_grained_fp8;
mod ggml;
mod gpt_oss;
mod gptq;
mod matrix;
mod modelopt;
mod packed;
mod signs;

use std::collections::BTreeMap;

use super::json::JsonFile;
use super::parts::Place;
use super::shard::Shard;
use crate::diag::{self, Diagnostic, FailureKind, Problems};
use crate::tensor::TensorInfo;

use claims::{Claims, SUPPORTED};
use finder::{Finder, Found};

pub use ggml::BlockType;
pub(super) use packed::{Decoded, Kept, Packed};
pub(super) use signs::QUANT_CONFIGS;
pub use signs::QuantizedWith;

/// What stands before a tensor's name in a file's `__metadata__`, with the f32 that this global divisor was made from as
/// its value. Files divide by a global scale where the container multiplies by one, and 17 % of all f32 are the
/// reciprocal of no f32: an export notes those here, so that reading it back gives the same factor.
pub const FACTOR_KEY: &str = "radpack.factor.";

/// A checkpoint's quantization: what shows it, and its weights or why they are not read.
#[derive(Debug)]
pub(super) struct Quantization {
    pub with: QuantizedWith,
    /// Quantized weights by logical name, empty where the checkpoint is refused.
    pub packed: BTreeMap<String, Packed>,
    /// Tensors left out, with the reason.
    pub unused: Vec<(String, String)>,
    /// Why it is not read.
    pub refusal: Option<diag::Failure>,
}

impl Quantization {
    /// The quantization of a GGUF file, whose weights name their format themselves.
    pub fn of_blocks(with: QuantizedWith, packed: BTreeMap<String, Packed>) -> Quantization {
        Quantization { with, packed, unused: Vec::new(), refusal: None }
    }
}

/// Reads the quantization of a checkpoint, if it has any, and puts logical tensors in place of those that make up
/// quantized weights. A checkpoint that is refused keeps its tensors as they are.
pub(super) fn read(
    config: Option<&JsonFile>,
    quant_configs: &[JsonFile],
    tensors: &mut BTreeMap<String, TensorInfo>,
    places: &BTreeMap<String, Place>,
    shards: &[Shard],
) -> Option<Quantization> {
    let with = signs::detect(config, quant_configs, tensors)?;
    let block = signs::block(config, quant_configs);
    let mut problems = Problems::new();
    let claims = match &block {
        Some(block) => Claims::read(block.method.as_deref(), block.value, &mut problems),
        None => Claims::default(),
    };
    let mut quantization =
        Quantization { with, packed: BTreeMap::new(), unused: Vec::new(), refusal: None };
    // Tensors of a method that is not read would only repeat what its name says already.
    if problems.is_empty() {
        let mut finder = Finder::new(tensors, places, shards, &claims);
        finder.search();
        let Found { packed, tensors: logical, unused } = finder.finish(&mut problems);
        if packed.is_empty() && problems.is_empty() && !claims.dense {
            problems.push(
                Diagnostic::new(
                    "quantization",
                    format!("{}, and no tensor is quantized", quantization.with.evidence),
                )
                .help(
                    "remove the quantization from the configuration if the weights are unquantized",
                )
                .help(SUPPORTED),
            );
        }
        if problems.is_empty() {
            *tensors = logical;
            quantization.packed = packed;
            quantization.unused = unused;
        }
    }
    let headline = format!(
        "the quantization of this checkpoint ({}) cannot be read",
        quantization.with.method
    );
    quantization.refusal = problems.finish(FailureKind::Refused, &headline, ()).err();
    Some(quantization)
}
