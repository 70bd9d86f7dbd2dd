//! The command line as typed. Resolution and defaults live with the subcommands.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use radpack::recipe::Allocator;
use radpack::runtime::Precision;

/// Turn a Hugging Face checkpoint and a recipe into one self-describing, byte-reproducible .rad file.
#[derive(Debug, Parser)]
#[command(name = "radpack", version, max_term_width = 100, propagate_version = true)]
#[command(
    after_help = "Exit codes: 0 done · 1 failed (I/O, internal) · 2 usage or recipe error · \
3 refused: model, recipe and target do not fit · 4 validation found a fault"
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Quantize a checkpoint by a recipe and write one .rad file.
    Convert(Convert),
    /// Put the parts of a conversion together that several machines made (convert --part).
    Merge(Merge),
    /// Check a .rad file: structure, digests, manifest, encodings; with a source, every weight.
    Validate(Validate),
    /// Show what a .rad file holds.
    Inspect(Inspect),
    /// Say what two .rad files differ in; exit code 0 if they are equal, 1 if not.
    Diff(Diff),
    /// Write one entry of a .rad file to disk: a side file's bytes, or a weight's values as f32.
    Extract(Extract),
    /// Say what a request would run: prefill calls, decode programs, padding, cache blocks.
    Explain(Explain),
    /// Write an artifact as a Hugging Face folder, or its programs as StableHLO.
    Export(Export),
    /// Measure how far a .rad file's answers are from those of a reference.
    Eval(Eval),
    /// Answer a prompt by the programs and weights of a .rad file.
    Run(Run),
    /// Write the model card of a .rad file: a README for a Hugging Face repository.
    Card(Card),
    /// How many blocks of KV cache fit on the target, and why.
    EstimateKv(EstimateKv),
    /// Set how many blocks of KV cache an engine is to allocate, in a finished .rad file.
    SetKvBlocks(SetKvBlocks),
    /// List, show, check and import recipes.
    Recipes(Recipes),
    /// Print a completion script for a shell.
    Completions(Completions),
}

/// Switches every subcommand takes.
#[derive(Debug, Args)]
pub struct Common {
    /// Print one JSON document on stdout (schemas/ describes it).
    #[arg(long)]
    pub json: bool,
    /// Worker threads; 0 means one per core.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub threads: usize,
    /// Code path of the quantization kernels; every one gives the same bytes.
    #[arg(long, value_enum, default_value_t = KernelChoice::Auto, hide = true)]
    pub kernel: KernelChoice,
}

/// Code path of the quantization kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KernelChoice {
    /// The fastest this CPU has.
    Auto,
    /// The reference.
    Scalar,
    /// AVX2.
    Avx2,
    /// AVX-512.
    Avx512,
}

impl KernelChoice {
    /// The kernel's name.
    pub fn name(self) -> &'static str {
        match self {
            KernelChoice::Auto => "auto",
            KernelChoice::Scalar => "scalar",
            KernelChoice::Avx2 => "avx2",
            KernelChoice::Avx512 => "avx512",
        }
    }
}

/// A recipe and what overwrites its values, of every command that plans a conversion.
#[derive(Debug, Args)]
pub struct RecipeArgs {
    /// A built-in recipe's name or a recipe file [default: int8-g128].
    #[arg(long, value_name = "NAME|FILE")]
    pub recipe: Option<String>,
    /// Overwrite one recipe value, e.g. --set whole_groups=true.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Kind of device to compile for (rbln-ca25, nvidia-h100, …); overwrites the recipe's [target] profile.
    #[arg(long, value_name = "PROFILE")]
    pub target: Option<String>,
    /// Devices that share the model; overwrites the recipe's [target] devices.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub devices: Option<u32>,
}

/// `radpack convert`
#[derive(Debug, Args)]
pub struct Convert {
    /// Folder, .safetensors or .gguf file, index file, or hub id (org/name[@revision]).
    #[arg(value_hint = ValueHint::AnyPath)]
    pub source: String,
    /// The file to write.
    #[arg(short, long, value_name = "OUT.rad", value_hint = ValueHint::FilePath)]
    #[arg(required_unless_present_any = ["dry_run", "check"])]
    pub output: Option<PathBuf>,
    /// Compare this file with what the conversion would write; write nothing.
    #[arg(long, value_name = "OUT.rad", value_hint = ValueHint::FilePath)]
    #[arg(conflicts_with_all = ["output", "dry_run", "reuse"])]
    pub check: Option<PathBuf>,
    /// A draft model whose weights go into the same file under `draft.`: what SOURCE can be.
    #[arg(long, value_name = "SOURCE", value_hint = ValueHint::AnyPath)]
    pub draft_model: Option<String>,
    /// What to make of it.
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// Leave the image and sound encoders and their projectors out, weights and programs.
    #[arg(long)]
    pub text_only: bool,
    /// Importances of llama.cpp's llama-imatrix (.gguf or .dat): rules with quantizer = "search" weigh errors by them.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub imatrix: Option<PathBuf>,
    /// Copy weights that this older artifact holds already; the output's bytes stay the same.
    #[arg(long, value_name = "OLD.rad", value_hint = ValueHint::FilePath, conflicts_with = "dry_run")]
    pub reuse: Option<PathBuf>,
    /// Go on with OUT.rad.partial, if a conversion was cut off: what it holds is verified, the rest is made. It stays
    /// after a failure or a signal, for the next time.
    #[arg(long, conflicts_with_all = ["dry_run", "check"])]
    pub resume: bool,
    /// Make part I of N only, counted from 1, as OUT.rad.part-I-of-N; `radpack merge` puts the parts together.
    #[arg(long, value_name = "I/N", value_parser = part, conflicts_with = "check")]
    pub part: Option<(u32, u32)>,
    /// Plan and print; write nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Convert an architecture radpack has no family for: encodings by tensor name and class, no graphs.
    #[arg(long)]
    pub weights_only: bool,
    /// Accept a source folder without a tokenizer.
    #[arg(long)]
    pub no_tokenizer: bool,
    /// How many of the worst weights to report.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub report: usize,
    /// Common switches.
    #[command(flatten)]
    pub common: Common,
}

/// `2/4`; whether there is such a part is the plan's to say.
fn part(text: &str) -> Result<(u32, u32), String> {
    let number = |text: &str| text.parse::<u32>().ok();
    let parts = text.split_once('/').and_then(|(i, n)| Some((number(i)?, number(n)?)));
    parts.ok_or_else(|| "a part is written I/N, as 2/4".to_owned())
}

/// `radpack merge`
#[derive(Debug, Args)]
pub struct Merge {
    /// All parts of one conversion, in any order.
    #[arg(required = true, value_name = "PART", value_hint = ValueHint::FilePath)]
    pub parts: Vec<PathBuf>,
    /// The file to write.
    #[arg(short, long, value_name = "OUT.rad", value_hint = ValueHint::FilePath)]
    pub output: PathBuf,
    /// Print one JSON document on stdout (schemas/ describes it).
    #[arg(long)]
    pub json: bool,
    /// Worker threads; 0 means one per core.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub threads: usize,
}

/// `radpack validate`
#[derive(Debug, Args)]
pub struct Validate {
    /// The file to check.
    #[arg(value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// Run every program once too: values have to be finite, and those of programs compiled anew for one device.
    #[arg(long)]
    pub deep: bool,
    /// Derive every weight again from this source under the stored recipe, and compare.
    #[arg(long, value_name = "SOURCE", value_hint = ValueHint::AnyPath)]
    pub against: Option<String>,
    /// The draft model that was merged in.
    #[arg(long, value_name = "SOURCE", value_hint = ValueHint::AnyPath, requires = "against")]
    pub draft_model: Option<String>,
    /// The importances that weighed its searches.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "against")]
    pub imatrix: Option<PathBuf>,
    /// Common switches.
    #[command(flatten)]
    pub common: Common,
}

/// `radpack diff`
#[derive(Debug, Args)]
pub struct Diff {
    /// The first file.
    #[arg(value_name = "A.rad", value_hint = ValueHint::FilePath)]
    pub a: PathBuf,
    /// The second file.
    #[arg(value_name = "B.rad", value_hint = ValueHint::FilePath)]
    pub b: PathBuf,
    /// Lines of each part; 0 means all.
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub report: usize,
    /// Print one JSON document on stdout (schemas/ describes it); it has every line.
    #[arg(long)]
    pub json: bool,
    /// Worker threads; 0 means one per core.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub threads: usize,
}

/// `radpack card`
#[derive(Debug, Args)]
pub struct Card {
    /// The file.
    #[arg(value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// Where the card goes; absent, standard output.
    #[arg(short, long, value_name = "README.md", value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,
    /// What `radpack eval --json` printed for this file; may be given several times.
    #[arg(long = "eval", value_name = "FILE.json", value_hint = ValueHint::FilePath)]
    pub evals: Vec<PathBuf>,
    /// What `radpack estimate-kv --json` printed.
    #[arg(long, value_name = "FILE.json", value_hint = ValueHint::FilePath)]
    pub estimate: Option<PathBuf>,
    /// Heading [default: the file's name].
    #[arg(long, value_name = "TEXT")]
    pub title: Option<String>,
    /// License as the hub spells it [default: that of the source's README].
    #[arg(long, value_name = "ID")]
    pub license: Option<String>,
    /// Repository of the weights [default: the hub repository that was converted].
    #[arg(long, value_name = "ORG/NAME")]
    pub base_model: Option<String>,
    /// A minijinja template in place of the built-in one.
    #[arg(long, value_name = "FILE.jinja", value_hint = ValueHint::FilePath)]
    pub template: Option<PathBuf>,
    /// Print what a template can name, as JSON, instead of a card.
    #[arg(long, conflicts_with = "template")]
    pub facts: bool,
}

/// `radpack inspect`
#[derive(Debug, Args)]
pub struct Inspect {
    /// The file to read.
    #[arg(value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// Every weight: shape, encoding, bytes, relative error, what it was made of.
    #[arg(long, group = "view")]
    pub weights: bool,
    /// The side files.
    #[arg(long, group = "view")]
    pub files: bool,
    /// The resolved recipe.
    #[arg(long, group = "view")]
    pub recipe: bool,
    /// The programs: sizes, inputs, memory.
    #[arg(long, group = "view")]
    pub graphs: bool,
    /// One program as text.
    #[arg(long, value_name = "NAME", group = "view")]
    pub graph: Option<String>,
    /// What every device holds: weights, cache, intermediate values.
    #[arg(long, group = "view")]
    pub memory: bool,
    /// Write all of it as one page for a browser, which loads nothing.
    #[arg(long, value_name = "FILE.html", value_hint = ValueHint::FilePath, group = "view", conflicts_with = "json")]
    pub html: Option<PathBuf>,
    /// Print one JSON document on stdout (schemas/ describes it).
    #[arg(long)]
    pub json: bool,
}

/// `radpack explain`
#[derive(Debug, Args)]
pub struct Explain {
    /// The file to read.
    #[arg(value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// Sequences that are decoded together.
    #[arg(long, value_name = "B", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    pub batch: u64,
    /// Tokens of a prompt, those of its images included.
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u64).range(1..=1 << 31))]
    pub prompt: u64,
    /// Tokens of an image in the prompt; may be given several times. Images stand after the first token, with one
    /// token between them.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub image_tokens: Vec<u64>,
    /// Print one JSON document on stdout (schemas/ describes it).
    #[arg(long)]
    pub json: bool,
}

/// `radpack extract`
#[derive(Debug, Args)]
pub struct Extract {
    /// The file to read.
    #[arg(value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// A side file's path (tokenizer.json), an entry's name (radpack/manifest.json), or a weight's name.
    pub name: String,
    /// Where to write; - for standard output [default: the last part of NAME].
    #[arg(short, long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,
    /// The weight's planes as stored, one after the other, instead of decoded f32 values.
    #[arg(long)]
    pub raw: bool,
}

/// `radpack export`
#[derive(Debug, Args)]
pub struct Export {
    /// The file to read.
    #[arg(value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// What the folder holds: every weight decoded, quantized weights for compressed-tensors, or programs with the
    /// arguments of every device.
    #[arg(long, value_enum)]
    pub format: ExportFormat,
    /// Element type of decoded weights, with --format safetensors [default: bf16].
    #[arg(long, value_enum)]
    pub dtype: Option<ExportDtype>,
    /// Blocks of the paged cache, with --format stablehlo [default: what set-kv-blocks set, else all sequences at full
    /// length, and one].
    #[arg(long, value_name = "N")]
    pub kv_blocks: Option<u64>,
    /// The folder to make; it must not exist yet.
    #[arg(short, long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub output: PathBuf,
    /// Print one JSON document on stdout (schemas/ describes it).
    #[arg(long)]
    pub json: bool,
}

/// Kind of an exported folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ExportFormat {
    /// compressed-tensors, as vLLM and transformers load it.
    CompressedTensors,
    /// Plain safetensors, decoded.
    Safetensors,
    /// The compiled programs as StableHLO modules.
    Stablehlo,
}

/// Element type of decoded weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ExportDtype {
    /// Rounded to bfloat16.
    Bf16,
    /// The decoded values exactly; config.json says float32.
    F32,
}

/// In which arithmetic programs run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum PrecisionChoice {
    /// f32 throughout.
    #[default]
    Reference,
    /// Values rounded to the programs' types, operands by the recipe's activation rules.
    Target,
}

impl PrecisionChoice {
    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            PrecisionChoice::Reference => "reference",
            PrecisionChoice::Target => "target",
        }
    }

    /// What the runtime is told.
    pub fn precision(self) -> Precision {
        match self {
            PrecisionChoice::Reference => Precision::Reference,
            PrecisionChoice::Target => Precision::Target,
        }
    }
}

/// `radpack eval`
#[derive(Debug, Args)]
pub struct Eval {
    /// The file to measure.
    #[arg(value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// What it is measured against: a checkpoint as convert takes it, run as it is stored, or another .rad file.
    #[arg(long, value_name = "SOURCE|FILE.rad", value_hint = ValueHint::AnyPath)]
    pub reference: String,
    /// One JSON object a line: {"source", "text"}, or {"source", "prompt", "answer"}, of which the answer is scored.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub corpus: PathBuf,
    /// Arithmetic of the file's programs; the reference runs in f32.
    #[arg(long, value_enum, default_value_t)]
    pub precision: PrecisionChoice,
    /// Most tokens that are run together.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(2..=65_536))]
    pub window: u32,
    /// Print one JSON document on stdout (schemas/ describes it).
    #[arg(long)]
    pub json: bool,
    /// Worker threads; 0 means one per core.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub threads: usize,
}

/// `radpack run`
#[derive(Debug, Args)]
pub struct Run {
    /// The file to run.
    #[arg(value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// What to say; the file's chat template makes a prompt of it.
    #[arg(long, value_name = "TEXT")]
    pub prompt: String,
    /// A picture that the prompt is about, before its text; again for more. PNG, JPEG, WebP or BMP.
    #[arg(long = "image", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub images: Vec<PathBuf>,
    /// Most tokens that a picture becomes [default: what the model says, as far as the programs take it].
    #[arg(long, value_name = "N", requires = "images", value_parser = clap::value_parser!(u64).range(1..))]
    pub image_tokens: Option<u64>,
    /// Continue TEXT as it is, without the chat template.
    #[arg(long)]
    pub raw: bool,
    /// f32 throughout, or the types and activation rules of the programs.
    #[arg(long, value_enum, default_value_t)]
    pub precision: PrecisionChoice,
    /// Most tokens of the answer.
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_tokens: usize,
    /// Print one JSON document on stdout (schemas/ describes it).
    #[arg(long)]
    pub json: bool,
    /// Worker threads; 0 means one per core.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub threads: usize,
}

/// `radpack estimate-kv`
#[derive(Debug, Args)]
pub struct EstimateKv {
    /// What convert takes, or a finished .rad file.
    #[arg(value_hint = ValueHint::AnyPath)]
    pub source: String,
    /// A draft model whose weights go into the same file.
    #[arg(long, value_name = "SOURCE", value_hint = ValueHint::AnyPath)]
    pub draft_model: Option<String>,
    /// What would be made of it; a finished file is estimated for any target.
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// How much of a device's memory may be used: 0.9, 90%, 12GiB (a whole number alone is bytes).
    #[arg(long, value_name = "PART")]
    pub memory_budget: Option<String>,
    /// Element type of the cache: f32, f16, bf16, fp8.
    #[arg(long, value_name = "TYPE")]
    pub kv_dtype: Option<String>,
    /// Longest sequence, in tokens.
    #[arg(long, value_name = "TOKENS")]
    pub max_seq_len: Option<u32>,
    /// Sequences that are served together.
    #[arg(long, value_name = "N")]
    pub batch_size: Option<u32>,
    /// Count as that engine does instead of the target's.
    #[arg(long, value_enum)]
    pub allocator: Option<AllocatorChoice>,
    /// The engine's own memory, which nobody outside knows: of each program on rbln, of a device elsewhere.
    #[arg(long, value_name = "BYTES")]
    pub workspace: Option<String>,
    /// Search backwards: the fewest devices, or the longest sequence, that fits.
    #[arg(long, value_enum, value_name = "WHAT", conflicts_with = "sweep")]
    pub fit: Option<FitChoice>,
    /// One row for each value of devices, kv-dtype, length or batch; may be given for several of them.
    #[arg(long, value_name = "AXIS=V1,V2,…")]
    pub sweep: Vec<String>,
    /// Draw memory by device, and how long so many sequences can be.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with = "sweep")]
    pub svg: Option<PathBuf>,
    /// What every layer keeps.
    #[arg(long, conflicts_with = "sweep")]
    pub layers: bool,
    /// Print one JSON document on stdout (schemas/ describes it).
    #[arg(long)]
    pub json: bool,
}

/// What --fit searches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FitChoice {
    /// The fewest devices.
    Devices,
    /// The longest sequence; --max-seq-len bounds it.
    Length,
}

/// `radpack set-kv-blocks`
#[derive(Debug, Args)]
pub struct SetKvBlocks {
    /// The file to change.
    #[arg(value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// Blocks of the paged cache; 0 leaves the number to the engine again.
    #[arg(value_name = "N", value_parser = clap::value_parser!(u64).range(0..=4_294_967_295))]
    pub blocks: u64,
    /// How much of a device's memory may be used: 0.9, 90%, 12GiB [default: the recipe's].
    #[arg(long, value_name = "PART")]
    pub memory_budget: Option<String>,
    /// The engine's own memory, as estimate-kv takes it.
    #[arg(long, value_name = "BYTES")]
    pub workspace: Option<String>,
    /// Print one JSON document on stdout (schemas/ describes it).
    #[arg(long)]
    pub json: bool,
}

/// Whose way of handing out cache memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AllocatorChoice {
    /// optimum-rbln: blocks by search, every tensor rounded.
    Rbln,
    /// radiance: one pool of pages.
    Radiance,
    /// vLLM: uniform pages in a fraction of the memory.
    Vllm,
    /// radpack's own programs.
    Exact,
}

impl AllocatorChoice {
    /// The policy.
    pub fn allocator(self) -> Allocator {
        match self {
            AllocatorChoice::Rbln => Allocator::Rbln,
            AllocatorChoice::Radiance => Allocator::Radiance,
            AllocatorChoice::Vllm => Allocator::Vllm,
            AllocatorChoice::Exact => Allocator::Exact,
        }
    }
}

/// `radpack recipes`
#[derive(Debug, Args)]
pub struct Recipes {
    /// What to do with recipes [default: list].
    #[command(subcommand)]
    pub action: Option<RecipesAction>,
    /// Print one JSON document on stdout (schemas/ describes it).
    #[arg(long, global = true)]
    pub json: bool,
}

/// `radpack recipes …`
#[derive(Debug, Subcommand)]
pub enum RecipesAction {
    /// The built-in recipes.
    List,
    /// One recipe, fully resolved.
    Show {
        /// A built-in recipe's name or a recipe file.
        recipe: String,
    },
    /// Check recipe files and report every problem with its place.
    Check {
        /// Recipe files or built-in names.
        #[arg(required = true)]
        recipes: Vec<String>,
    },
    /// Translate a text recipe of radiance (PATTERN QUANTISER KEY=VALUE …) and print it as TOML.
    Import {
        /// The text recipe.
        #[arg(value_hint = ValueHint::FilePath)]
        file: String,
    },
}

/// `radpack completions`
#[derive(Debug, Args)]
pub struct Completions {
    /// The shell.
    pub shell: clap_complete::Shell,
}
