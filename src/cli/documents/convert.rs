//! What `convert` and `merge` print.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

use super::ProblemDocument;

/// `radpack convert`, planned or done.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ConvertDocument {
    /// `radpack.convert`
    pub schema: &'static str,
    /// Whether nothing was written because `--dry-run` was given.
    pub dry_run: bool,
    /// The file; absent in a dry run without `-o`.
    pub output: Option<String>,
    /// Size of the file.
    pub file_bytes: u64,
    /// Root digest; absent in a dry run.
    pub digest: Option<String>,
    /// Weights that were copied out of an older artifact.
    pub reused: usize,
    /// Weights that `--resume` found in the partial file.
    pub resumed: usize,
    /// The part that `--part` asked for; absent for the whole file. Sizes and weights below are those of all parts.
    pub part: Option<PartDocument>,
    /// Name of the recipe.
    pub recipe: String,
    /// Digest of the resolved recipe.
    pub recipe_sha256: String,
    /// The importances that weigh searches; absent without any.
    pub imatrix: Option<ImatrixDocument>,
    /// Family, absent for a weights-only conversion.
    pub family: Option<String>,
    /// Stored weights, their elements and bytes.
    pub totals: UseDocument,
    /// Bytes of weights on every device, in the order of their numbers.
    pub devices: Vec<DeviceDocument>,
    /// What every rule decided, in the recipe's order.
    pub rules: Vec<RuleDocument>,
    /// Weights that no rule selects.
    pub kept: UseDocument,
    /// Rows that end in a short group.
    pub short_groups: Vec<TailDocument>,
    /// Every logical weight with what decided it.
    pub weights: Vec<WeightDocument>,
    /// Tensors that are left out, with the reason.
    pub unused: BTreeMap<String, String>,
    /// What looks odd and stops nothing.
    pub warnings: Vec<ProblemDocument>,
}

/// One part of a conversion.
#[derive(Debug, Serialize, JsonSchema)]
pub struct PartDocument {
    /// Its number, from 1.
    pub index: u32,
    /// How many there are.
    pub parts: u32,
    /// Size of the part's own file.
    pub file_bytes: u64,
    /// Stored weights that it makes.
    pub weights: usize,
    /// Their bytes in the checkpoint.
    pub source_bytes: u64,
}

/// What `merge` put together.
#[derive(Debug, Serialize, JsonSchema)]
pub struct MergeDocument {
    /// `radpack.merge`
    pub schema: &'static str,
    /// The file.
    pub output: String,
    /// Its size.
    pub file_bytes: u64,
    /// Root digest.
    pub digest: String,
    /// Parts.
    pub parts: usize,
    /// Weights of all parts.
    pub weights: usize,
}

/// A file of importances.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ImatrixDocument {
    /// Its length.
    pub bytes: u64,
    /// Its digest.
    pub sha256: String,
    /// Stored weights whose scales are searched.
    pub searched: usize,
    /// Those among them that have importances.
    pub weighed: usize,
}

/// Sums over weights.
#[derive(Debug, Serialize, JsonSchema)]
pub struct UseDocument {
    /// Stored weights.
    pub weights: u64,
    /// Their elements.
    pub parameters: u64,
    /// Bytes in the checkpoint.
    pub source_bytes: u64,
    /// Bytes of their planes.
    pub stored_bytes: u64,
    /// Stored bits per weight.
    pub bits_per_weight: f64,
}

/// The weights of one device: their planes' bytes, without alignment.
#[derive(Debug, Serialize, JsonSchema)]
pub struct DeviceDocument {
    /// Number of the device, from 0.
    pub device: u32,
    /// Of weights that it holds whole.
    pub whole: u64,
    /// Of its pieces of weights, padding included.
    pub shards: u64,
    /// Zeros among those that only make the pieces of all devices equally large.
    pub padding: u64,
    /// Everything that it holds.
    pub bytes: u64,
}

/// One rule.
#[derive(Debug, Serialize, JsonSchema)]
pub struct RuleDocument {
    /// What it selects, in words.
    pub selects: String,
    /// The encoding it gives.
    pub encoding: String,
    /// Weights it decided.
    pub hits: u64,
    /// The stored ones among them.
    pub stored: UseDocument,
}

/// Rows that end in a short group.
#[derive(Debug, Serialize, JsonSchema)]
pub struct TailDocument {
    /// Columns of the weights.
    pub cols: u64,
    /// Columns of a group.
    pub group: u64,
    /// Columns of the last group.
    pub tail: u64,
    /// Weights of that kind.
    pub weights: u64,
}

/// One weight.
#[derive(Debug, Serialize, JsonSchema)]
pub struct WeightDocument {
    /// Logical name.
    pub name: String,
    /// Tensors it is made of; `NAME[i]` for one index of the first dimension.
    pub from: Vec<String>,
    /// Tower.
    pub tower: String,
    /// Class.
    pub class: String,
    /// Shape.
    pub shape: Vec<u64>,
    /// Name of its encoding.
    pub encoding: String,
    /// Number of the rule that decided it, from 1; absent when kept.
    pub rule: Option<usize>,
    /// The matrix of the imatrix that weighs its search; absent where nothing does.
    pub importance: Option<String>,
    /// Whether it has an entry of its own.
    pub stored: bool,
    /// Bytes of its planes.
    pub bytes: u64,
    /// Relative error (Frobenius); absent in a dry run, for kept weights and for weights of zeros.
    pub relative_error: Option<f64>,
    /// Sum of the squared errors; absent in a dry run and for kept weights.
    pub squared_error: Option<f64>,
    /// Sum of the squared values; absent in a dry run and for kept weights.
    pub squared: Option<f64>,
}
