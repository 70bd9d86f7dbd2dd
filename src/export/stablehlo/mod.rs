//! Programs as StableHLO modules, with the planes that every device passes to them.
//!
//! | file | what |
//! |---|---|
//! | `NAME.mlir` | one program |
//! | `args/common.safetensors` | planes that are the same on all devices |
//! | `args/dev<D>.safetensors` | the planes of device D's own, and `rank` |
//! | `host.safetensors` | whole embedding tables, where the host looks tokens up: quantized ones decoded to f32 |
//! | `stablehlo.json` | [`Document`] |
//!
//! The artifact's side files are there byte for byte.

mod arguments;
mod document;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::folder::{Partial, write_file, write_shard, write_side_files};
use super::read_manifest;
use super::tensors::{Content, Tensor};
use crate::artifact::manifest::{GraphSummary, Manifest};
use crate::artifact::{Artifact, Weights, layout as names};
use crate::diag::{Diagnostic, Failure, FailureKind, Result, count};
use crate::graph::{
    ArgumentKind, KvLayout, KvTensor, Module, ModuleArgument, ProgramKind, Programs, module,
};
use crate::model::{self, ModelSpec};
use crate::tensor::{DType, Encoding};

use arguments::Devices;
pub use document::{
    ArgumentRecord, CacheRecord, Document, HostRecord, HostTable, LeftOut, ModuleRecord, SCHEMA,
    SCHEMA_VERSION, schema,
};

/// Most blocks of the cache: block tables hold 16-bit numbers.
pub const MAX_BLOCKS: u64 = 1 << 15;

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// The folder.
    pub folder: PathBuf,
    /// Modules in it.
    pub modules: usize,
    /// Programs that StableHLO has no form for, with the reason.
    pub left_out: Vec<LeftOut>,
    /// Devices that the modules are for.
    pub devices: u32,
    /// Blocks of the paged cache.
    pub kv_blocks: u64,
    /// Tensors in the folder, those of every device counted.
    pub tensors: usize,
    /// Files that hold them.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Side files.
    pub side_files: usize,
}

/// Writes an artifact's programs as a folder `out`, which must not exist yet. The paged cache gets `kv_blocks` blocks; if
/// nothing is said, as many as the file was set to, or enough for all sequences at full length and one for padding rows.
///
/// # Errors
/// An artifact without manifest or programs, too few or too many blocks, no program that StableHLO has a form for,
/// weights that the file does not hold as its programs say, an output that exists, I/O.
pub fn export(
    artifact: &Artifact,
    programs: &Programs,
    kv_blocks: Option<u64>,
    out: &Path,
) -> Result<Exported> {
    let manifest = read_manifest(artifact)?;
    let Some(summary) = &manifest.graphs else {
        let problem = Diagnostic::new("export", "the file holds no programs");
        return Err(Failure::one(FailureKind::Refused, "this file cannot be exported", problem));
    };
    let weights = Weights::open(artifact).map_err(|error| invalid(error.to_string()))?;
    let blocks = blocks(summary, kv_blocks)?;
    let devices = Devices::new(&weights, &manifest, summary)?;
    let encodings =
        |name: &str| -> Option<Encoding> { weights.get(name).map(|w| w.encoding().clone()) };
    let partial = Partial::begin(out)?;
    let io = |e: std::io::Error| Failure::io("write", out, &e);
    let mut arguments = devices.arguments();
    let (mut records, mut left_out) = (Vec::new(), Vec::new());
    for program in &programs.programs {
        // It becomes a file's name.
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if program.name.is_empty() || !program.name.chars().all(plain) {
            return Err(invalid(format!("a program is called {:?}", program.name)));
        }
        let group = devices.group(program.kind);
        if group.len() != program.devices as usize {
            return Err(invalid(format!(
                "{} is for {} devices, its group has {}",
                program.name,
                program.devices,
                group.len()
            )));
        }
        let printed = match module(programs, program, &encodings, blocks) {
            Ok(printed) => printed,
            Err(failure) => {
                left_out.push(LeftOut { name: program.name.clone(), reason: reason(&failure) });
                continue;
            }
        };
        for argument in &printed.arguments {
            match &argument.kind {
                ArgumentKind::Weight { weights, plane } => {
                    arguments.weight(argument, weights, *plane, group)?;
                }
                ArgumentKind::Rank => arguments.ranks(),
                ArgumentKind::Input | ArgumentKind::Cache => {}
            }
        }
        let file = format!("{}.mlir", program.name);
        write_file(&partial.path().join(&file), printed.text.as_bytes()).map_err(io)?;
        records.push((program, printed, file));
    }
    if records.is_empty() {
        let mut failure =
            Failure::plain(FailureKind::Refused, "no program of this file has a StableHLO form");
        failure.problems = left_out
            .iter()
            .map(|l| Diagnostic::new("export", format!("{}: {}", l.name, l.reason)))
            .collect();
        return Err(failure);
    }
    let host = host(artifact, &weights, &manifest, summary)?;
    let mut exported = Exported {
        folder: out.to_owned(),
        modules: records.len(),
        left_out: left_out.clone(),
        devices: manifest.devices.max(1),
        kv_blocks: blocks,
        tensors: 0,
        files: 0,
        bytes: 0,
        side_files: 0,
    };
    fs::create_dir_all(partial.path().join("args")).map_err(io)?;
    let own = arguments.files();
    let files = own.iter().map(|(name, tensors)| (name.as_str(), tensors));
    for (name, tensors) in files.chain(host.as_ref().map(|h| (HOST_FILE, &h.tensors))) {
        let tensors: Vec<&Tensor<'_>> = tensors.iter().collect();
        write_shard(&partial.path().join(name), &tensors).map_err(io)?;
        exported.files += 1;
        exported.tensors += tensors.len();
        exported.bytes += tensors.iter().map(|t| t.len()).sum::<u64>();
    }
    let modules = records
        .iter()
        .map(|(program, printed, file)| ModuleRecord {
            name: program.name.clone(),
            kind: kind(program.kind).0.to_owned(),
            size: kind(program.kind).1,
            file: file.clone(),
            devices: devices.group(program.kind).to_vec(),
            arguments: arguments_of(printed, &arguments),
            results: printed.results.clone(),
        })
        .collect();
    let document = Document {
        schema: SCHEMA.to_owned(),
        schema_version: SCHEMA_VERSION,
        tool: manifest.tool.clone(),
        architecture: manifest.model.architecture.clone(),
        devices: exported.devices,
        kv_blocks: blocks,
        cache: cache(programs, blocks),
        modules,
        left_out,
        host: host.map(|h| h.record),
        graphs: summary.clone(),
    };
    write_file(&partial.path().join("stablehlo.json"), &document.to_bytes()).map_err(io)?;
    let same = |stored: &[u8]| Ok(stored.to_vec());
    exported.side_files = write_side_files(artifact, &manifest, &same, partial.path())?;
    partial.publish()?;
    Ok(exported)
}

const HOST_FILE: &str = "host.safetensors";

fn invalid(why: String) -> Failure {
    Failure::one(FailureKind::Invalid, "this file is not valid", Diagnostic::new("export", why))
}

/// What a program's failure says, without the program's name.
fn reason(failure: &Failure) -> String {
    match failure.problems.first() {
        Some(first) => first.message.split_once(": ").map_or(&*first.message, |m| m.1).to_owned(),
        None => failure.headline.clone(),
    }
}

/// Blocks of the paged cache.
fn blocks(summary: &GraphSummary, said: Option<u64>) -> Result<u64> {
    let kv = &summary.kv;
    let Some(said) = said.or(kv.blocks) else {
        return Ok(kv.full_blocks.saturating_add(1).clamp(1, MAX_BLOCKS));
    };
    let least = kv.min_blocks.max(1);
    if said < least || said > MAX_BLOCKS {
        let problem = Diagnostic::new(
            "--kv-blocks",
            format!(
                "{} blocks of {} tokens; the programs need {} to {}",
                count(said),
                count(kv.block_tokens),
                count(least),
                count(MAX_BLOCKS)
            ),
        )
        .help(format!(
            "{} hold {} sequences of {} tokens; one more takes padding rows",
            count(kv.full_blocks),
            count(summary.batch_size),
            count(summary.max_seq_len)
        ));
        return Err(Failure::one(FailureKind::Usage, "the cache has no such size", problem));
    }
    Ok(said)
}

fn kind(kind: ProgramKind) -> (&'static str, u64) {
    match kind {
        ProgramKind::Prefill { chunk } => ("prefill", chunk),
        ProgramKind::ImagePrefill { chunk } => ("image_prefill", chunk),
        ProgramKind::Decode { batch } => ("decode", batch),
        ProgramKind::Draft { batch } => ("draft", batch),
        ProgramKind::Vision { soft_tokens } => ("vision", soft_tokens),
        ProgramKind::Project { soft_tokens } => ("project", soft_tokens),
    }
}

fn arguments_of(printed: &Module, stored: &arguments::Arguments<'_>) -> Vec<ArgumentRecord> {
    let record = |a: &ModuleArgument| {
        let (kind, common) = match &a.kind {
            ArgumentKind::Rank => ("rank", Some(false)),
            ArgumentKind::Input => ("input", None),
            ArgumentKind::Cache => ("cache", None),
            ArgumentKind::Weight { .. } => ("weight", Some(stored.common(&a.name))),
        };
        ArgumentRecord {
            name: a.name.clone(),
            kind: kind.to_owned(),
            element: a.element.to_owned(),
            shape: a.shape.clone(),
            common,
        }
    };
    printed.arguments.iter().map(record).collect()
}

fn cache(programs: &Programs, blocks: u64) -> Vec<CacheRecord> {
    let record = |t: &KvTensor| {
        let (layout, units, tokens) = match t.layout {
            KvLayout::Paged { block } => ("paged", blocks, block),
            KvLayout::Window { slots, tokens } => ("window", slots, tokens),
        };
        CacheRecord {
            name: t.name.clone(),
            layer: t.layer,
            layout: layout.to_owned(),
            dtype: t.dtype.name().to_owned(),
            shape: vec![units, t.heads, tokens, t.head_dim],
        }
    };
    programs.kv.iter().map(record).collect()
}

/// Tables that the host looks tokens up in.
struct Host<'a> {
    tensors: Vec<Tensor<'a>>,
    record: HostRecord,
}

fn host<'a>(
    artifact: &Artifact,
    weights: &'a Weights<'a>,
    manifest: &Manifest,
    summary: &GraphSummary,
) -> Result<Option<Host<'a>>> {
    if !summary.host_embeddings {
        return Ok(None);
    }
    let spec = specification(artifact, manifest)?;
    let mut tables = vec![("token_embd.weight", spec.text.embedding_scale, None)];
    if let Some(ple) = spec.text.per_layer_input {
        // Rows of the per-layer table are scaled by the square root of their width (transformers 5.24, Gemma 4).
        let scale = (ple.width as f64).sqrt();
        tables.push(("per_layer_token_embd.weight", scale, Some(ple.width)));
    }
    let mut host = Host {
        tensors: Vec::new(),
        record: HostRecord {
            file: HOST_FILE.to_owned(),
            tables: Vec::new(),
            padding_token: spec.tokens.pad.unwrap_or(0),
            image_token: spec.tokens.image,
            video_token: spec.tokens.video,
            audio_token: spec.tokens.audio,
        },
    };
    for (name, scale, width) in tables {
        let weight = weights
            .get(name)
            .ok_or_else(|| invalid(format!("the host looks {name} up, which is not there")))?;
        let shape = weight.shape().extents().to_vec();
        let rows = shape.first().copied().unwrap_or(0);
        let content = Content { weight, first_row: 0, rows };
        let tensor = Tensor::values(name.to_owned(), shape, vec![content], DType::F32);
        host.tensors.push(tensor);
        host.record.tables.push(HostTable { tensor: name.to_owned(), scale, width });
    }
    Ok(Some(host))
}

/// What the artifact's configuration says of the model.
fn specification(artifact: &Artifact, manifest: &Manifest) -> Result<ModelSpec> {
    let stored = manifest.files.iter().any(|f| f.path == "config.json");
    let entry = artifact.find(&format!("{}config.json", names::FILE_PREFIX)).filter(|_| stored);
    let entry = entry.ok_or_else(|| invalid("the file holds no config.json".to_owned()))?;
    let config: Value =
        serde_json::from_slice(entry.plane(0)).map_err(|e| invalid(format!("config.json: {e}")))?;
    model::read_spec(&config, None)
}

/// Arguments by name, for tests and callers that look for one.
impl Document {
    /// Shapes and element types of every argument that a file of the folder holds.
    pub fn stored_arguments(&self) -> BTreeMap<&str, &ArgumentRecord> {
        let all = self.modules.iter().flat_map(|m| &m.arguments);
        all.filter(|a| a.common.is_some()).map(|a| (a.name.as_str(), a)).collect()
    }
}
