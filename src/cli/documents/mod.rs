//! The JSON documents that `--json` prints. `schemas/` holds their schemas; a test keeps them current.

use std::collections::BTreeMap;

use radpack::diag::{Diagnostic, Failure, FailureKind};
use radpack::estimate::{Estimate, LayerRow};
use radpack::export::stablehlo::LeftOut;
use radpack::pipeline::{Fit, Tried};
use schemars::JsonSchema;
use serde::Serialize;

mod convert;

pub use convert::{
    ConvertDocument, DeviceDocument, ImatrixDocument, MergeDocument, PartDocument, RuleDocument,
    TailDocument, UseDocument, WeightDocument,
};

/// A failed run.
#[derive(Debug, Serialize, JsonSchema)]
pub struct FailureDocument {
    /// `radpack.failure`
    pub schema: &'static str,
    /// Exit code of the process.
    pub exit_code: u8,
    /// `failed`, `usage`, `refused` or `invalid`.
    #[schemars(with = "String")]
    pub kind: FailureKind,
    /// One sentence over all problems.
    pub headline: String,
    /// Every problem.
    pub problems: Vec<ProblemDocument>,
}

/// One problem.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ProblemDocument {
    /// Part of the work that found it.
    pub area: String,
    /// The rule and the numbers.
    pub message: String,
    /// What would work.
    pub help: Vec<String>,
    /// Where in a file.
    pub place: Option<PlaceDocument>,
}

/// A place in a text file.
#[derive(Debug, Serialize, JsonSchema)]
pub struct PlaceDocument {
    /// Name of the file.
    pub file: String,
    /// First byte.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
    /// Line of the first byte, from 1.
    pub line: usize,
}

impl FailureDocument {
    /// The document of a failure.
    pub fn of(failure: &Failure) -> FailureDocument {
        FailureDocument {
            schema: "radpack.failure",
            exit_code: failure.kind.exit_code(),
            kind: failure.kind,
            headline: failure.headline.clone(),
            problems: failure.problems.iter().map(ProblemDocument::of).collect(),
        }
    }
}

impl ProblemDocument {
    /// The document of a problem.
    pub fn of(problem: &Diagnostic) -> ProblemDocument {
        let place = problem.label.as_ref().map(|label| PlaceDocument {
            file: label.source.name.clone(),
            start: label.span.start,
            end: label.span.end,
            line: 1 + label
                .source
                .text
                .bytes()
                .take(label.span.start)
                .filter(|b| *b == b'\n')
                .count(),
        });
        ProblemDocument {
            area: problem.area.to_owned(),
            message: problem.message.clone(),
            help: problem.help.clone(),
            place,
        }
    }
}

/// `radpack validate`
#[derive(Debug, Serialize, JsonSchema)]
pub struct ValidateDocument {
    /// `radpack.validate`
    pub schema: &'static str,
    /// The file.
    pub file: String,
    /// Whether nothing was found.
    pub valid: bool,
    /// Entries of the directory.
    pub entries: usize,
    /// Size of the file.
    pub file_bytes: u64,
    /// Root digest.
    pub digest: Option<String>,
    /// The source it was compared with.
    pub against: Option<String>,
    /// Programs that ran; empty without `--deep`.
    pub ran: Vec<String>,
    /// What their values were compared with; absent where nothing was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compared: Option<ComparedDocument>,
    /// Weights that were derived again.
    pub derived_weights: usize,
    /// Every fault.
    pub findings: Vec<ProblemDocument>,
}

/// `radpack inspect`
#[derive(Debug, Serialize, JsonSchema)]
pub struct InspectDocument {
    /// `radpack.inspect`
    pub schema: &'static str,
    /// The file.
    pub file: String,
    /// Size of the file.
    pub file_bytes: u64,
    /// Architecture id of the container.
    pub arch_id: String,
    /// Name of the model.
    pub model_name: String,
    /// What wrote it.
    pub created_by: String,
    /// Root digest; absent for files that radpack did not write.
    pub digest: Option<String>,
    /// The resolved recipe.
    pub recipe: String,
    /// The manifest as stored; absent for files that radpack did not write.
    pub manifest: Option<serde_json::Value>,
    /// Metadata rows.
    pub metadata: Vec<(String, serde_json::Value)>,
    /// The tokenizer in the container's tables; null where there is none.
    pub vocabulary: Option<VocabularyDocument>,
    /// The directory.
    pub entries: Vec<EntryDocument>,
}

/// A tokenizer in the container's tables.
#[derive(Debug, Serialize, JsonSchema)]
pub struct VocabularyDocument {
    /// `BPE`, `Unigram`, `WordPiece`, `RWKV`.
    pub kind: String,
    /// Tokens.
    pub tokens: u32,
    /// Merges.
    pub merges: u32,
    /// Steps of normalizer, pre-tokenizer and decoder.
    pub steps: u32,
}

/// One entry of a directory.
#[derive(Debug, Serialize, JsonSchema)]
pub struct EntryDocument {
    /// Name.
    pub name: String,
    /// Encoding as planes: `i8*bf16[1x128]`.
    pub layout: String,
    /// Shape.
    pub shape: Vec<u64>,
    /// Layer, negative at model level.
    pub layer: i32,
    /// Expert, negative for other weights.
    pub expert: i32,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes of its planes.
    pub bytes: u64,
    /// Quantizer.
    pub quantizer: String,
    /// Options of the quantizer.
    pub options: String,
    /// Relative error (Frobenius).
    pub relative_error: Option<f64>,
}

/// `radpack explain`
#[derive(Debug, Serialize, JsonSchema)]
pub struct ExplainDocument {
    /// `radpack.explain`
    pub schema: &'static str,
    /// The file.
    pub file: String,
    /// Sequences.
    pub batch: u64,
    /// Tokens of each prompt.
    pub prompt: u64,
    /// Programs that make rows of an image, in order of running; empty without images.
    pub image_programs: Vec<String>,
    /// Prefill calls of one sequence, in order.
    pub calls: Vec<CallDocument>,
    /// The decode program, and how many of its rows are padding.
    pub decode: DecodeDocument,
    /// Cache slots of one sequence that hold no token.
    pub unused_slots: u64,
    /// Rows of all prefill calls that are computed for nothing.
    pub padding_rows: u64,
    /// Cache blocks of one sequence.
    pub blocks: u64,
    /// Cache blocks of all sequences.
    pub all_blocks: u64,
    /// Bytes of these blocks on every device.
    pub block_bytes: u64,
    /// Blocks that the file was set to (`radpack set-kv-blocks`), for all requests together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub set_blocks: Option<u64>,
    /// Tokens that a sequence can still get.
    pub left: u64,
}

/// One prefill call.
#[derive(Debug, Serialize, JsonSchema)]
pub struct CallDocument {
    /// Program.
    pub program: String,
    /// First token of the prompt.
    pub first: u64,
    /// Tokens.
    pub tokens: u64,
    /// Rows of the program; those after the tokens are padding.
    pub rows: u64,
    /// Cache slot of the first row.
    pub slot: u64,
}

/// The decode program of a batch.
#[derive(Debug, Serialize, JsonSchema)]
pub struct DecodeDocument {
    /// Program.
    pub program: String,
    /// Its sequences.
    pub rows: u64,
    /// Rows of padding among them.
    pub padding_rows: u64,
}

/// `radpack export`
#[derive(Debug, Serialize, JsonSchema)]
pub struct ExportDocument {
    /// `radpack.export`
    pub schema: &'static str,
    /// The folder.
    pub folder: String,
    /// Tensors in it.
    pub tensors: usize,
    /// Files with weights.
    pub shards: usize,
    /// Bytes of the tensors.
    pub bytes: u64,
    /// Side files.
    pub side_files: usize,
    /// Weights of a merged draft model that were left out.
    pub draft_weights: usize,
    /// Weights without their recipe's activations, whose groups do not divide the weights' columns.
    pub unstated_activations: usize,
    /// Modules, for StableHLO; `stablehlo.json` in the folder describes them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub modules: Option<usize>,
    /// Programs that StableHLO has no form for.
    pub left_out: Vec<LeftOut>,
}

/// `radpack estimate-kv`
#[derive(Debug, Serialize, JsonSchema)]
pub struct EstimateDocument {
    /// `radpack.estimate`
    pub schema: &'static str,
    /// The source or file.
    pub source: String,
    /// Name of the recipe.
    pub recipe: String,
    /// The sum and the answer.
    pub estimate: Estimate,
    /// Blocks that were set in a finished file (`radpack set-kv-blocks`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stored_blocks: Option<u64>,
    /// What `--fit` searched and found; `estimate` is the answer with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fit: Option<FitDocument>,
    /// What every decoder layer keeps.
    pub layers: Vec<LayerRow>,
}

/// A search for the value that fits.
#[derive(Debug, Serialize, JsonSchema)]
pub struct FitDocument {
    /// `devices` (the fewest) or `length` (the longest sequence).
    pub axis: String,
    /// Devices, or tokens.
    pub value: u64,
    /// Every value that was tried, ascending.
    pub tried: Vec<TriedDocument>,
}

/// A value that was tried.
#[derive(Debug, Serialize, JsonSchema)]
pub struct TriedDocument {
    /// Devices, or tokens.
    pub value: u64,
    /// Why it does not fit; absent when it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
}

impl FitDocument {
    /// Of a search.
    pub fn of(fit: &Fit) -> FitDocument {
        let tried = |t: &Tried| TriedDocument { value: t.value, refusal: t.refusal.clone() };
        FitDocument {
            axis: fit.axis.to_string(),
            value: fit.value,
            tried: fit.tried.iter().map(tried).collect(),
        }
    }
}

/// `radpack estimate-kv --sweep`
#[derive(Debug, Serialize, JsonSchema)]
pub struct SweepDocument {
    /// `radpack.sweep`
    pub schema: &'static str,
    /// The source.
    pub source: String,
    /// Name of the recipe.
    pub recipe: String,
    /// The target profile.
    pub target: Option<String>,
    /// What varies, the last fastest: `devices`, `kv-dtype`, `length`, `batch`.
    pub axes: Vec<&'static str>,
    /// One for each combination, in that order.
    pub rows: Vec<SweepRow>,
}

/// One combination. Figures are absent where the model does not split or compile.
#[derive(Debug, Default, Serialize, JsonSchema)]
pub struct SweepRow {
    /// Devices that share the model.
    pub devices: u64,
    /// Element type of the cache, as it was asked for.
    pub kv_dtype: Option<String>,
    /// Longest sequence, in tokens.
    pub max_seq_len: Option<u64>,
    /// Sequences that are served together.
    pub batch_size: Option<u64>,
    /// Blocks that fit.
    pub blocks: Option<u64>,
    /// Bytes of a block on one device.
    pub block_bytes: Option<u64>,
    /// Tokens of all blocks.
    pub tokens: Option<u64>,
    /// Tokens without blocks that the engine keeps for itself.
    pub allocatable_tokens: Option<u64>,
    /// Full-length sequences that all tokens make.
    pub contexts: Option<f64>,
    /// Most sequences of full length at a time.
    pub batch_at_full_length: Option<u64>,
    /// Longest length, in tokens, that all sequences can have at a time.
    pub length_at_full_batch: Option<u64>,
    /// Bytes that are left for blocks on the device that decides; negative when the rest alone does not fit.
    pub left: Option<i64>,
    /// Why it does not fit; absent when it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
    /// What would work; empty when it fits.
    pub help: Vec<String>,
}

/// `radpack set-kv-blocks`
#[derive(Debug, Serialize, JsonSchema)]
pub struct SetKvBlocksDocument {
    /// `radpack.set-kv-blocks`
    pub schema: &'static str,
    /// The file.
    pub file: String,
    /// Blocks from now on; absent when the engine decides.
    pub blocks: Option<u64>,
    /// Blocks before.
    pub before: Option<u64>,
    /// Tokens of a block.
    pub block_tokens: u64,
    /// Fewest blocks to serve with.
    pub min_blocks: u64,
    /// Blocks beyond which none is used.
    pub full_blocks: u64,
    /// Blocks that fit the target's memory; absent for a file that is for no target.
    pub fit_blocks: Option<u64>,
    /// The target profile.
    pub target: Option<String>,
    /// Root digest of the file from now on.
    pub digest: String,
}

/// `radpack recipes list`
#[derive(Debug, Serialize, JsonSchema)]
pub struct RecipesDocument {
    /// `radpack.recipes`
    pub schema: &'static str,
    /// The built-in recipes, or the checked or shown ones.
    pub recipes: Vec<RecipeDocument>,
}

/// One recipe.
#[derive(Debug, Serialize, JsonSchema)]
pub struct RecipeDocument {
    /// Name.
    pub name: String,
    /// What it is for.
    pub about: String,
    /// Digest of the resolved text.
    pub sha256: String,
    /// Rules.
    pub rules: usize,
    /// The resolved text.
    pub toml: String,
}

/// `radpack eval`
#[derive(Debug, Serialize, JsonSchema)]
pub struct EvalDocument {
    /// `radpack.eval`
    pub schema: &'static str,
    /// The file.
    pub file: String,
    /// Digest of all its entries, which says of which artifact these figures are.
    pub digest: Option<String>,
    /// What it was measured against.
    pub reference: String,
    /// Arithmetic of the file's programs: `reference` (f32) or `target`.
    pub precision: &'static str,
    /// Most tokens that were run together.
    pub window: u32,
    /// All scored tokens.
    pub overall: ScoreDocument,
    /// By source of the corpus.
    pub sources: BTreeMap<String, ScoreDocument>,
}

/// Figures of scored tokens. Divergences are of the file from the reference, over the whole vocabulary, in nats.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ScoreDocument {
    /// Scored tokens.
    pub tokens: usize,
    /// Mean divergence.
    pub kl_mean: f64,
    /// Median divergence.
    pub kl_median: f64,
    /// 99th percentile, nearest rank.
    pub kl_p99: f64,
    /// Largest divergence.
    pub kl_max: f64,
    /// Share of tokens where both find the same token most likely.
    pub top1_agreement: f64,
    /// Perplexity of the reference.
    pub reference_perplexity: f64,
    /// Perplexity of the file.
    pub perplexity: f64,
    /// The file's over the reference's.
    pub perplexity_ratio: f64,
}

impl ScoreDocument {
    /// The document of a score.
    pub fn of(score: &radpack::runtime::Score) -> ScoreDocument {
        ScoreDocument {
            tokens: score.tokens,
            kl_mean: score.mean,
            kl_median: score.median,
            kl_p99: score.p99,
            kl_max: score.max,
            top1_agreement: score.agreement,
            reference_perplexity: score.reference_perplexity,
            perplexity: score.perplexity,
            perplexity_ratio: score.perplexity_ratio,
        }
    }
}

/// `radpack diff`
#[derive(Debug, Serialize, JsonSchema)]
pub struct DiffDocument {
    /// `radpack.diff`
    pub schema: &'static str,
    /// The first file.
    pub a: String,
    /// The second file.
    pub b: String,
    /// Whether the files are equal byte for byte.
    pub equal: bool,
    /// Bytes of both files.
    pub file_bytes: [u64; 2],
    /// Keys of the recipes.
    pub recipe: Vec<ChangeDocument>,
    /// Repository, revision and files of the source.
    pub source: Vec<ChangeDocument>,
    /// What the model is, and what else the manifests say.
    pub model: Vec<ChangeDocument>,
    /// Weights that both files have and that are equal.
    pub equal_weights: usize,
    /// Weights that both files have and that differ.
    pub changed_weights: Vec<ChangedWeightDocument>,
    /// Weights that only the first file has.
    pub weights_only_in_a: Vec<String>,
    /// Weights that only the second file has.
    pub weights_only_in_b: Vec<String>,
    /// Sizes and programs.
    pub graphs: Vec<ChangeDocument>,
    /// Digests of side files, by path.
    pub files: Vec<ChangeDocument>,
    /// The tokenizer in the container's tables.
    pub vocabulary: Vec<ChangeDocument>,
    /// Devices and the bytes of weights on each.
    pub memory: Vec<ChangeDocument>,
    /// Rows of the container's metadata.
    pub metadata: Vec<ChangeDocument>,
}

/// A key whose value differs.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ChangeDocument {
    /// Path of the key.
    pub path: String,
    /// The first file's value; null where it has none.
    pub a: Option<serde_json::Value>,
    /// The second file's.
    pub b: Option<serde_json::Value>,
}

/// A weight that differs.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ChangedWeightDocument {
    /// Its name.
    pub name: String,
    /// Its planes in both files.
    pub encodings: [String; 2],
    /// Its shape in both files.
    pub shapes: [Vec<u64>; 2],
    /// ‖a − b‖ / ‖a‖ of the decoded values; null where they cannot be compared.
    pub distance: Option<f64>,
}

/// `radpack run`
#[derive(Debug, Serialize, JsonSchema)]
pub struct RunDocument {
    /// `radpack.run`
    pub schema: &'static str,
    /// The file.
    pub file: String,
    /// Arithmetic: `reference` (f32) or `target`.
    pub precision: &'static str,
    /// The prompt, the chat template applied, with one place for each image.
    pub prompt: String,
    /// Its tokens, those of images included.
    pub prompt_tokens: usize,
    /// Images of the prompt, in order.
    pub images: Vec<RunImageDocument>,
    /// The answer's tokens, the one that ended it included.
    pub tokens: Vec<u64>,
    /// The answer.
    pub text: String,
    /// What ended it: `stop` (a token that ends answers), `max_tokens`, or `max_seq_len`.
    pub ended_by: &'static str,
}

/// The comparison of `validate --deep`: the stored programs with programs that are compiled anew from the file's own
/// configuration for one device, over the same weights.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ComparedDocument {
    /// Devices of the stored programs.
    pub devices: u32,
    /// Whether the two are the same programs, so that one run stands for both.
    pub same_programs: bool,
    /// The largest difference of a program's values, as a share of its largest value.
    pub largest_difference: f32,
    /// The most that the order of sums in f32 explains.
    pub bound: f32,
}

impl ComparedDocument {
    /// The document of a comparison.
    pub fn of(compared: radpack::runtime::Compared) -> Option<ComparedDocument> {
        use radpack::runtime::{BOUND, Compared};
        let (devices, same_programs, largest_difference) = match compared {
            Compared::Nothing => return None,
            Compared::Equal => (1, true, 0.0),
            Compared::OneDevice { devices, largest } => (devices, false, largest),
        };
        Some(ComparedDocument { devices, same_programs, largest_difference, bound: BOUND })
    }
}

/// An image of a prompt.
#[derive(Debug, Serialize, JsonSchema)]
pub struct RunImageDocument {
    /// The file.
    pub file: String,
    /// Width and height in pixels.
    pub pixels: [usize; 2],
    /// Patches in a row and in a column after resizing.
    pub patches: [i64; 2],
    /// Tokens that it became.
    pub tokens: u64,
    /// Programs that it ran: encoder, projector, prefill.
    pub programs: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check<T: JsonSchema>(name: &str) {
        let schema = schemars::schema_for!(T);
        let current = format!("{:#}\n", serde_json::json!(schema));
        let path = format!("{}/schemas/{name}.schema.json", env!("CARGO_MANIFEST_DIR"));
        if std::env::var_os("RADPACK_BLESS").is_some() {
            std::fs::write(&path, &current).expect("schemas/ is writable");
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(committed == current, "{path} is not current: RADPACK_BLESS=1 cargo test schema");
    }

    #[test]
    fn committed_schemas_describe_the_documents() {
        check::<FailureDocument>("failure");
        check::<ConvertDocument>("convert");
        check::<MergeDocument>("merge");
        check::<ValidateDocument>("validate");
        check::<InspectDocument>("inspect");
        check::<DiffDocument>("diff");
        check::<RecipesDocument>("recipes");
        check::<ExportDocument>("export");
        check::<ExplainDocument>("explain");
        check::<RunDocument>("run");
        check::<EvalDocument>("eval");
        check::<EstimateDocument>("estimate");
        check::<SweepDocument>("sweep");
        check::<SetKvBlocksDocument>("set-kv-blocks");
    }
}
