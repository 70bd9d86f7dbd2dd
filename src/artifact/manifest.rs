//! `radpack/manifest.json`: what the file was made from, by which recipe, and what it holds.
//!
//! Its length depends on no digest's value, so its place is known before the source files are hashed
//! ([`Manifest::placeholder`]). Readers ignore keys they do not know; [`SCHEMA_VERSION`] rises when a key changes its
//! meaning or goes.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::layout::MANIFEST_ENTRY;
use super::{Artifact, digests};
use crate::diag::{self, Diagnostic, Failure, FailureKind};

/// Value of [`Manifest::schema`].
pub const SCHEMA: &str = "radpack.manifest";
/// Value of [`Manifest::schema_version`].
pub const SCHEMA_VERSION: u32 = 1;
/// Largest manifest that is read: a hundred times that of a model with ten thousand expert weights.
pub const MAX_BYTES: usize = 256 << 20;

/// Largest value of [`KvSummary::blocks`].
pub const MAX_KV_BLOCKS: u64 = u32::MAX as u64;
/// Digits of [`MAX_KV_BLOCKS`]: what a document has room for.
const KV_BLOCKS_DIGITS: usize = 10;

/// A SHA-256 digest, 64 lower-case hex digits in JSON.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Sha256Hex(pub [u8; 32]);

impl fmt::Display for Sha256Hex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&digests::hex(&self.0))
    }
}

impl fmt::Debug for Sha256Hex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl Serialize for Sha256Hex {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Sha256Hex {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Sha256Hex, D::Error> {
        let text = Cow::<str>::deserialize(d)?;
        digests::from_hex(text.as_bytes())
            .map(Sha256Hex)
            .ok_or_else(|| serde::de::Error::custom(format!("`{text:.80}` is no sha256 in hex")))
    }
}

impl JsonSchema for Sha256Hex {
    fn schema_name() -> Cow<'static, str> {
        "Sha256Hex".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "pattern": "^[0-9a-f]{64}$"})
    }
}

/// The manifest of an artifact.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Manifest {
    /// Always `radpack.manifest`.
    pub schema: String,
    /// Version of this document's meaning.
    pub schema_version: u32,
    /// What wrote the file.
    pub tool: Tool,
    /// Version of the extension of the container.
    pub format_version: u32,
    /// Digest of everything before the data ([`Artifact::tables_digest`]); absent in files of versions that did not
    /// state it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tables: Option<Sha256Hex>,
    /// Where the weights come from.
    pub source: Source,
    /// How they were converted.
    pub recipe: RecipeSummary,
    /// What they are.
    pub model: ModelSummary,
    /// Number of devices the file is made for.
    pub devices: u32,
    /// Bytes of weights on every device, in the order of their numbers; absent for one device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_weights: Vec<DeviceSummary>,
    /// What the model was compiled to; none for files without programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graphs: Option<GraphSummary>,
    /// Weights summed by encoding.
    pub encodings: Vec<EncodingSummary>,
    /// Every logical weight, in directory order.
    pub weights: Vec<WeightRecord>,
    /// Checkpoint tensors that were deliberately left out.
    pub unused: Vec<UnusedTensor>,
    /// Files of the source that are carried along byte for byte.
    pub files: Vec<SideFile>,
    /// Remarks of the conversion, e.g. short last groups.
    pub notes: Vec<String>,
}

/// The programs of a file and the sizes that they were compiled for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GraphSummary {
    /// Target profile; none for a file that is for no target in particular.
    #[serde(default)]
    pub target: Option<String>,
    /// What prompts may hold: `text`, `image`, `video`.
    pub takes: Vec<String>,
    /// What the model takes and the programs do not, with the reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub refuses: BTreeMap<String, String>,
    /// Longest sequence, in cache slots.
    pub max_seq_len: u64,
    /// Sequences that are served together.
    pub batch_size: u64,
    /// Decode programs, largest first.
    pub decoder_batch_sizes: Vec<u64>,
    /// Tokens of a prefill call.
    pub prefill_chunk_size: u64,
    /// Image prefill programs, largest first.
    pub image_prefill_chunk_size: Vec<u64>,
    /// Soft tokens of an image, one vision program each, largest first.
    pub max_soft_tokens: Vec<u64>,
    /// The cache.
    pub kv: KvSummary,
    /// Element type of activations at the programs' interface.
    pub activations: String,
    /// Whether the host looks token embeddings up.
    pub host_embeddings: bool,
    /// Devices that run the image encoder.
    pub vision_devices: Vec<u32>,
    /// The programs, in order.
    pub programs: Vec<ProgramSummary>,
}

/// The cache of one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct KvSummary {
    /// Element type.
    pub dtype: String,
    /// Tokens of a block.
    pub block_tokens: u64,
    /// Bytes of one block, over all layers that see every token, keys and values.
    pub block_bytes: u64,
    /// Bytes of the rings of all layers with a window, for all sequences.
    pub window_bytes: u64,
    /// Blocks that all sequences need at full length.
    pub full_blocks: u64,
    /// Fewest blocks to serve with.
    pub min_blocks: u64,
    /// Blocks that an engine is to allocate, 1 to [`MAX_KV_BLOCKS`]; null leaves the number to the engine. The one
    /// value that may be changed in a finished file ([`super::patch`]).
    #[serde(default)]
    pub blocks: Option<u64>,
    /// Whether prefill calls start at borders that leave slots unused.
    pub aligned: bool,
    /// Tokens that the draft head proposes at once; 0 without one.
    pub draft_tokens: u64,
}

/// One program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ProgramSummary {
    /// Its name; the entry is `radpack/graph/NAME`.
    pub name: String,
    /// prefill, image_prefill, decode, draft, vision or project.
    pub kind: String,
    /// Rows, sequences or soft tokens of a call.
    pub size: u64,
    /// Devices that run it together.
    pub devices: u32,
    /// Its operations.
    pub operations: u64,
    /// Bytes of its intermediate values on each device.
    pub arena_bytes: u64,
    /// Bytes of its inputs.
    pub input_bytes: u64,
}

/// A program that writes files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
}

/// Identity of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Source {
    /// Repository on a hub, `org/name`, when the files came from one.
    #[serde(default)]
    pub repo: Option<String>,
    /// Commit of that repository.
    #[serde(default)]
    pub revision: Option<String>,
    /// Every file that was read, sorted by path.
    pub files: Vec<SourceFile>,
}

/// A file of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SourceFile {
    /// Path inside the checkpoint, with `/`; one of a merged draft model stands under `draft/`. `imatrix` is the file
    /// of importances that weighed searches.
    pub path: String,
    /// Length.
    pub bytes: u64,
    /// Digest of the whole file.
    pub sha256: Sha256Hex,
}

/// Identity of a recipe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RecipeSummary {
    /// Its name.
    pub name: String,
    /// Digest of the fully resolved text, which the container's header holds.
    pub sha256: Sha256Hex,
}

/// What a model is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ModelSummary {
    /// Class that the checkpoint's configuration names, e.g. `Gemma4ForConditionalGeneration`.
    pub architecture: String,
    /// `model_type` of the configuration.
    pub model_type: String,
    /// Family whose weights are understood; none for a weights-only conversion.
    #[serde(default)]
    pub family: Option<String>,
    /// Elements of all stored weights.
    pub parameters: u64,
    /// Layers, hidden size, heads, … by name.
    pub dimensions: BTreeMap<String, i64>,
    /// Weights summed by tower.
    pub towers: Vec<TowerSummary>,
}

/// The weights of one tower.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TowerSummary {
    /// text, vision, audio, projector or draft.
    pub name: String,
    /// Number of stored weights.
    pub weights: u64,
    /// Their elements.
    pub parameters: u64,
    /// Their planes' bytes.
    pub bytes: u64,
}

/// The weights that one device holds: their planes' bytes, without alignment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceSummary {
    /// Number of the device.
    pub device: u32,
    /// Of weights that it holds whole.
    pub whole: u64,
    /// Of its pieces of weights, padding included.
    pub shards: u64,
    /// Zeros among those that only make the pieces of all devices equally large.
    pub padding: u64,
}

/// The weights stored in one encoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EncodingSummary {
    /// Name in recipes, e.g. `int8-g128`.
    pub encoding: String,
    /// Planes, e.g. `i8*bf16[1x128]`. One name can have several layouts (`keep`).
    pub layout: String,
    /// Number of stored weights.
    pub weights: u64,
    /// Their elements.
    pub parameters: u64,
    /// Their planes' bytes.
    pub bytes: u64,
    /// Bytes of the tensors they were made from.
    pub source_bytes: u64,
    /// Stored bits per element, scales included.
    pub bits_per_weight: f64,
}

/// Where a logical weight comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WeightRecord {
    /// Logical name, which is the entry's.
    pub name: String,
    /// The tensors that its rows are, in order.
    pub from: Vec<WeightSource>,
    /// Name of its encoding.
    pub encoding: String,
    /// Number of the recipe's rule that decided it, counted from 1; none for kept weights.
    #[serde(default)]
    pub rule: Option<u32>,
    /// The matrix of the imatrix that weighed its search, e.g. `blk.1.ffn_down_exps[5]`; none where nothing did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub importance: Option<String>,
    /// The weight whose values this one repeats. If it has no entry of its own, that one's entry serves both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tied_to: Option<String>,
}

/// A tensor, or one index of its first dimension.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WeightSource {
    /// Name in the checkpoint; one of a merged draft model stands after `draft.`.
    pub tensor: String,
    /// The tensor's whole shape there; a scalar's is empty.
    pub shape: Vec<u64>,
    /// Index along the first dimension; none for the whole tensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<u64>,
}

/// A tensor that was left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UnusedTensor {
    /// Name in the checkpoint; one of a merged draft model stands after `draft.`.
    pub tensor: String,
    /// Why.
    pub reason: String,
}

/// A file that is carried along.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SideFile {
    /// Path inside the checkpoint, with `/`; one of a merged draft model stands under `draft/`.
    pub path: String,
    /// Length; a file of no bytes has no entry.
    pub bytes: u64,
    /// Digest of the file.
    pub sha256: Sha256Hex,
    /// The entry that holds it, `radpack/file/PATH`.
    pub entry: String,
}

/// Why bytes are not a manifest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// Larger than [`MAX_BYTES`].
    #[error("{0} bytes, at most {MAX_BYTES} are read")]
    TooLarge(usize),
    /// Another document.
    #[error("schema `{0}` is not `{SCHEMA}`")]
    Schema(String),
    /// A version that this program does not know.
    #[error("version {0} of the manifest; this program reads up to {SCHEMA_VERSION}")]
    Version(u32),
    /// Not JSON, or not of the schema.
    #[error("{0}")]
    Json(String),
}

impl From<ManifestError> for Failure {
    fn from(error: ManifestError) -> Failure {
        let problem = Diagnostic::new("manifest", error.to_string());
        Failure::one(FailureKind::Invalid, "the manifest cannot be read", problem)
    }
}

impl Manifest {
    /// The manifest of an artifact; `None` for one that something else wrote.
    ///
    /// # Errors
    /// A manifest that is there and cannot be read ([`FailureKind::Invalid`]).
    pub fn of(artifact: &Artifact) -> diag::Result<Option<Manifest>> {
        let entry = artifact.find(MANIFEST_ENTRY);
        Ok(entry.map(|entry| Manifest::parse(entry.plane(0))).transpose()?)
    }

    /// The document's bytes: indented JSON that ends in a line feed. Blanks before the line feed make its length the
    /// same for every [`KvSummary::blocks`].
    pub fn to_bytes(&self) -> Vec<u8> {
        // Only maps with keys other than strings and failing writers make serialization fail; there are none here.
        let mut bytes = serde_json::to_vec_pretty(self).unwrap_or_default();
        if let Some(graphs) = &self.graphs {
            let written = graphs.kv.blocks.map_or("null".len(), |n| n.to_string().len());
            let room = KV_BLOCKS_DIGITS.saturating_sub(written);
            bytes.resize(bytes.len().saturating_add(room), b' ');
        }
        bytes.push(b'\n');
        bytes
    }

    /// The same manifest with every digest zero, for planning: its bytes have the final length.
    pub fn placeholder(&self) -> Manifest {
        let mut m = self.clone();
        let source = m.source.files.iter_mut().map(|f| &mut f.sha256);
        let files = m.files.iter_mut().map(|f| &mut f.sha256);
        let own = [&mut m.recipe.sha256].into_iter().chain(&mut m.tables);
        for digest in source.chain(files).chain(own) {
            *digest = Sha256Hex::default();
        }
        m
    }

    /// Sets the digests of these files, of the source and stored, by path.
    pub fn set_digests(&mut self, files: &BTreeMap<&str, [u8; 32]>) {
        let source = self.source.files.iter_mut().map(|f| (&f.path, &mut f.sha256));
        let side = self.files.iter_mut().map(|f| (&f.path, &mut f.sha256));
        for (path, digest) in source.chain(side) {
            if let Some(found) = files.get(path.as_str()) {
                *digest = Sha256Hex(*found);
            }
        }
    }

    /// Reads a manifest.
    ///
    /// # Errors
    /// Too large, another schema or version, or malformed JSON.
    pub fn parse(bytes: &[u8]) -> Result<Manifest, ManifestError> {
        /// What every version begins with.
        #[derive(Deserialize)]
        struct Head {
            schema: String,
            schema_version: u32,
        }
        if bytes.len() > MAX_BYTES {
            return Err(ManifestError::TooLarge(bytes.len()));
        }
        let json = |e: serde_json::Error| ManifestError::Json(e.to_string());
        let head: Head = serde_json::from_slice(bytes).map_err(json)?;
        if head.schema != SCHEMA {
            return Err(ManifestError::Schema(head.schema.chars().take(80).collect()));
        }
        if head.schema_version != SCHEMA_VERSION {
            return Err(ManifestError::Version(head.schema_version));
        }
        serde_json::from_slice(bytes).map_err(json)
    }
}

/// The JSON schema of the manifest, as `schemas/manifest.schema.json` holds it.
pub fn schema() -> String {
    let schema = schemars::schema_for!(Manifest);
    format!("{:#}\n", serde_json::json!(schema))
}
