//! `stablehlo.json`: what a host needs to call the modules of a folder.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::artifact::manifest::{GraphSummary, Tool};

/// Value of [`Document::schema`].
pub const SCHEMA: &str = "radpack.stablehlo";
/// Value of [`Document::schema_version`].
pub const SCHEMA_VERSION: u32 = 1;

/// The document.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Document {
    /// Always `radpack.stablehlo`.
    pub schema: String,
    /// Version of this document's meaning.
    pub schema_version: u32,
    /// What wrote the artifact.
    pub tool: Tool,
    /// Class that the checkpoint's configuration names.
    pub architecture: String,
    /// Devices that the artifact is for.
    pub devices: u32,
    /// Blocks of the paged cache. Padding rows of a decode call write into a block too: keep one for them.
    pub kv_blocks: u64,
    /// Cache tensors of one device. They are arguments of the modules that touch them, zero at first, and results of the
    /// same name: the argument's buffer is given away, the result is the next call's argument.
    pub cache: Vec<CacheRecord>,
    /// The modules, in the artifact's order.
    pub modules: Vec<ModuleRecord>,
    /// Programs without a module.
    pub left_out: Vec<LeftOut>,
    /// What the host looks up; none where modules take token ids.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<HostRecord>,
    /// The sizes that the programs were compiled for, as in the artifact's manifest.
    pub graphs: GraphSummary,
}

/// A cache tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CacheRecord {
    /// Its name.
    pub name: String,
    /// Decoder layer that writes it.
    pub layer: u32,
    /// `paged`: blocks found through `block_tables`; `window`: one ring for every sequence, found through
    /// `local_block_tables`.
    pub layout: String,
    /// Element type.
    pub dtype: String,
    /// Blocks or rings, heads, tokens, width of a head.
    pub shape: Vec<u64>,
}

/// A module.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ModuleRecord {
    /// Name of the program.
    pub name: String,
    /// prefill, image_prefill, decode, draft, vision or project.
    pub kind: String,
    /// Rows, sequences or soft tokens of a call.
    pub size: u64,
    /// The file.
    pub file: String,
    /// Devices that run it, one replica each, in the order of replicas.
    pub devices: Vec<u32>,
    /// Arguments of `@main`, in order; `name` is their `rad.name`.
    pub arguments: Vec<ArgumentRecord>,
    /// `rad.name` of the results, in order: outputs, then cache tensors.
    pub results: Vec<String>,
}

/// An argument of a module.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ArgumentRecord {
    /// Its `rad.name`.
    pub name: String,
    /// `rank`: the device's number; `input`: filled by the host for every call, the same on all devices; `cache`;
    /// `weight`: a plane of a weight's shard.
    pub kind: String,
    /// MLIR element type; packed codes are bytes, `ui8`.
    pub element: String,
    /// Shape on one device.
    pub shape: Vec<u64>,
    /// Whether `args/common.safetensors` has it (true) or `args/dev<D>.safetensors` (false); absent for arguments that no
    /// file holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub common: Option<bool>,
}

/// A program that StableHLO has no form for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LeftOut {
    /// Its name.
    pub name: String,
    /// Why.
    pub reason: String,
}

/// Tables of the host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HostRecord {
    /// File that holds them.
    pub file: String,
    /// `inputs_embeds`, then `per_layer_inputs` where the model has them: the token's row times `scale`.
    pub tables: Vec<HostTable>,
    /// Token whose rows stand for placeholders, also for those that the model itself has said; an image's rows then
    /// replace those of its placeholders in `inputs_embeds`.
    pub padding_token: u64,
    /// Placeholder of an image's rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_token: Option<u64>,
    /// Placeholder of a video frame's rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub video_token: Option<u64>,
    /// Placeholder of a sound's rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audio_token: Option<u64>,
}

/// A table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HostTable {
    /// Name in the file.
    pub tensor: String,
    /// Factor on its rows.
    pub scale: f64,
    /// Columns of one layer, for a table that holds those of all layers side by side.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub width: Option<u64>,
}

impl Document {
    /// The document's bytes: indented JSON that ends in a line feed.
    pub fn to_bytes(&self) -> Vec<u8> {
        // Only maps with keys other than strings and failing writers make serialization fail; there are none here.
        let mut bytes = serde_json::to_vec_pretty(self).unwrap_or_default();
        bytes.push(b'\n');
        bytes
    }
}

/// The JSON schema of the document, as `schemas/stablehlo.schema.json` holds it.
pub fn schema() -> String {
    let schema = schemars::schema_for!(Document);
    format!("{:#}\n", serde_json::json!(schema))
}
