//! GGUF files (llama.cpp's format) as checkpoints: one file with tensors and metadata, or a numbered series of them.
//!
//! | file | what |
//! |---|---|
//! | `header` | the header, read strictly |
//! | `types` | ggml's tensor types |
//! | `names` | llama.cpp's names of tensors and Hugging Face's |
//! | `config` | the `config.json` that the metadata stand for |
//! | `side` | files beside the weights |
//!
//! A checkpoint keeps the names of the file. Two things that llama.cpp's converter did to values are undone when they
//! are read, so that weights are those of the original model: the order of query and key rows (llama), and the 1 that
//! was added to norms (Gemma 3). Tensors in blocks are quantized weights like those of other formats
//! (`quantized`): decoded to f32, or kept as planes of the same codes and scales.

mod config;
pub mod header;
mod names;
mod side;
mod types;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::Value as Json;

use super::folder::Trouble;
use super::json::JsonFile;
use super::layout::Numbered;
use super::parts::{Change, Place};
use super::quantized::{Packed, QuantizedWith};
use super::reader::Reader;
use super::safetensors::quoted;
use super::shard::Shard;
use crate::diag::{self, Diagnostic, Failure, FailureKind, Problems, Result, SourceText};
use crate::model::{self, Model};
use crate::tensor::{DType, Shape, TensorInfo};

use config::{ARCHITECTURES, Architecture, Reading};
use header::{Header, Value};
use names::View;
pub use names::original_name;
pub use types::Kind;

/// Factors of a rotation, which are no weight.
const ROPE_FREQS: &str = "rope_freqs.weight";

/// Most factors that are read: half the width of a head.
const MAX_FACTORS: u64 = 4096;

/// Hint for files that no family reads.
const WEIGHTS_ONLY: &str =
    "--weights-only converts by tensor name and class, under the names of the file";

/// What a GGUF file says beside its tensors.
#[derive(Debug)]
pub struct Gguf {
    /// The file's name as shown.
    shown: String,
    architecture: Option<&'static Architecture>,
    /// The configuration, or why there is none.
    config: std::result::Result<JsonFile, Failure>,
    /// Tensors that are no weights, with the reason.
    unused: Vec<(String, String)>,
    /// Files made of the metadata, by name.
    made: BTreeMap<String, Vec<u8>>,
    /// Name of the tokenizer's kind and its number of tokens.
    tokenizer: Option<(String, u64)>,
}

impl std::fmt::Debug for Architecture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// Opened files: what a checkpoint is made of.
pub(super) struct Opened {
    pub shards: Vec<Shard>,
    pub tensors: BTreeMap<String, TensorInfo>,
    pub places: BTreeMap<String, Place>,
    pub packed: BTreeMap<String, Packed>,
    /// What is quantized, if anything.
    pub with: Option<QuantizedWith>,
    pub gguf: Gguf,
}

/// The files of a series that a name belongs to, or the name alone.
pub(super) fn series(name: &str) -> Vec<String> {
    /// Far more files than any model has.
    const MOST: u64 = 10_000;
    match Numbered::parse(name, ".gguf") {
        Some(n) if (2..=MOST).contains(&n.of) => {
            (1..=n.of).map(|i| format!("{}-{i:05}-of-{:05}.gguf", n.stem, n.of)).collect()
        }
        _ => vec![name.to_owned()],
    }
}

/// Opens the files of one model, in the order of their numbers; problems go to `reader`.
pub(super) fn open(reader: &mut Reader, names: &[String]) -> Option<Opened> {
    let mut problems = Problems::new();
    let mut troubled = false;
    let mut shards = Vec::new();
    let mut headers = Vec::new();
    let mut missing = Vec::new();
    for name in names {
        let found = match reader.folder.find(name) {
            Ok(found) => found,
            Err(Trouble::Missing) => {
                missing.push(name.as_str());
                continue;
            }
            Err(trouble) => {
                reader.trouble(name, trouble);
                troubled = true;
                continue;
            }
        };
        let shown = reader.folder.show(name);
        match Shard::map(&reader.folder, name, found) {
            Ok(shard) => match header::read_header(shard.all()) {
                Ok(header) => {
                    headers.push((shown, header));
                    shards.push(shard);
                }
                Err(faults) => problems.extend(faults.iter().map(|fault| {
                    let mut problem = Diagnostic::new("gguf", format!("{shown}: {fault}"));
                    problem.help.extend(fault.help());
                    problem
                })),
            },
            Err(problem) => problems.push(problem),
        }
    }
    if !missing.is_empty() {
        let what = format!(
            "{} of {} files of the model do not exist: {}",
            missing.len(),
            names.len(),
            diag::list(&missing, 8)
        );
        let problem = Diagnostic::new("gguf", what)
            .help("a split model is read from all its files, in one folder")
            .help("`llama-gguf-split --merge` makes one file of them");
        problems.push(problem);
    }
    let opened = if problems.is_empty() && !troubled {
        check_split(&headers, &mut problems);
        join(shards, headers, &mut problems)
    } else {
        None
    };
    let sound = problems.is_empty();
    reader.problems.extend(problems.into_vec());
    opened.filter(|_| sound)
}

/// Compares what each file says about the series with its place in it.
fn check_split(headers: &[(String, Header)], problems: &mut Problems) {
    let number = |header: &Header, key: &str| match header.pairs.get(key) {
        Some(Value::Unsigned(n)) => Some(*n),
        Some(Value::Signed(n)) => u64::try_from(*n).ok(),
        _ => None,
    };
    let files = headers.len() as u64;
    let mut say = |what: String| {
        let problem = Diagnostic::new("gguf", what).help(
            "files of a split model are named STEM-00001-of-00003.gguf and so on, and lie in one folder",
        );
        problems.push(problem);
    };
    for (at, (shown, header)) in headers.iter().enumerate() {
        let count = number(header, "split.count").unwrap_or(0);
        if count.max(1) != files {
            say(format!(
                "{shown}: `split.count` is {count}; the series has {files} files by its names"
            ));
        } else if files > 1 && number(header, "split.no") != Some(at as u64) {
            let no = number(header, "split.no").map_or("absent".to_owned(), |n| n.to_string());
            say(format!("{shown}: `split.no` is {no}; by its name it is {at}"));
        }
    }
    let Some((shown, first)) = headers.first() else { return };
    let total: u64 = headers.iter().map(|(_, h)| h.tensors.len() as u64).sum();
    if let Some(promised) =
        number(first, "split.tensors.count").filter(|n| files > 1 && *n != total)
    {
        say(format!(
            "{shown}: `split.tensors.count` is {promised}; the files hold {total} tensors"
        ));
    }
}

/// Joins the files: tensors under their names, what was done to them, what the metadata mean.
fn join(
    shards: Vec<Shard>,
    mut headers: Vec<(String, Header)>,
    problems: &mut Problems,
) -> Option<Opened> {
    let mut tensors = BTreeMap::new();
    let mut places: BTreeMap<String, Place> = BTreeMap::new();
    let mut blocks = BTreeMap::new();
    for (shard, (shown, header)) in headers.iter_mut().enumerate() {
        for (name, entry) in std::mem::take(&mut header.tensors) {
            let dtype = match entry.kind {
                Kind::Plain(dtype) => dtype,
                Kind::Blocks(of) => {
                    blocks.insert(name.clone(), of);
                    DType::F32
                }
            };
            let change = Change::None;
            let place = Place { shard, begin: entry.begin, end: entry.end, change };
            if places.insert(name.clone(), place).is_some() {
                let what = format!("{shown}: tensor {} lies in another file too", quoted(&name));
                problems.push(Diagnostic::new("gguf", what));
            }
            tensors.insert(name, TensorInfo { dtype, shape: entry.shape });
        }
    }
    let (shown, header) = headers.into_iter().next()?;
    let mut refused = Problems::new();
    let architecture = architecture(&shown, &header, &mut refused);
    let mut unused = Vec::new();
    let mut config = None;
    if let Some(architecture) = architecture {
        let rope_freqs = factors(&shards, &tensors, &places);
        if rope_freqs.is_some() {
            let why = "factors of the rotation, which follow from the configuration";
            unused.push((ROPE_FREQS.to_owned(), why.to_owned()));
        }
        let mut reading = Reading {
            shown: &shown,
            architecture: architecture.name,
            header: &header,
            tensors: &tensors,
            rope_freqs,
            problems: Problems::new(),
        };
        config = Some(config::read(architecture, &mut reading));
        refused.extend(reading.problems.into_vec());
        mark_changes(architecture, &shown, &header, &tensors, &mut places, &mut refused);
    }
    let headline = "this GGUF file cannot be understood";
    let config = refused.finish(FailureKind::Refused, headline, ()).map(|()| {
        let value = Json::Object(config.unwrap_or_default());
        let text = SourceText {
            name: format!("{shown} (its metadata as config.json)"),
            text: format!("{value:#}\n"),
        };
        JsonFile { path: "config.json".to_owned(), text: Arc::new(text), value, bom: false }
    });
    let mut made = BTreeMap::new();
    if let Ok(config) = &config {
        made.insert(config.path.clone(), config.text.text.clone().into_bytes());
    }
    for (key, file) in [
        ("tokenizer.huggingface.json", "tokenizer.json"),
        ("tokenizer.chat_template", "chat_template.jinja"),
    ] {
        if let Some(Value::Text(text)) =
            header.pairs.get(key).filter(|v| **v != Value::Text("".into()))
        {
            made.insert(file.to_owned(), text.clone().into_bytes());
        }
    }
    let mut packed = BTreeMap::new();
    for (name, of) in &blocks {
        let (Some(info), Some(place)) = (tensors.get(name), places.get(name)) else { continue };
        // The header's check made rows whole blocks.
        packed.extend(Packed::ggml(*of, *place, info.shape.clone()).map(|p| (name.clone(), p)));
    }
    let kinds: BTreeSet<&str> = blocks.values().map(|of| Kind::Blocks(*of).name()).collect();
    let kinds: Vec<&str> = kinds.into_iter().collect();
    let with = (!packed.is_empty()).then(|| QuantizedWith {
        method: format!("gguf ({})", kinds.join(", ")),
        evidence: format!("{} tensors are stored in blocks", diag::count(packed.len() as u64)),
    });
    let kind = match header.pairs.get("tokenizer.ggml.model") {
        Some(Value::Text(kind)) => kind.clone(),
        _ => "unnamed".to_owned(),
    };
    let tokenizer = match header.pairs.get("tokenizer.ggml.tokens") {
        Some(Value::Skipped(n)) => Some((kind, *n)),
        _ => None,
    };
    let gguf = Gguf { shown, architecture, config, unused, made, tokenizer };
    Some(Opened { shards, tensors, places, packed, with, gguf })
}

/// The architecture that the metadata name, or why it is not read.
fn architecture(
    shown: &str,
    header: &Header,
    problems: &mut Problems,
) -> Option<&'static Architecture> {
    let known: Vec<&str> = ARCHITECTURES.iter().map(|a| a.name).collect();
    let text = |key: &str| match header.pairs.get(key) {
        Some(Value::Text(text)) => Some(text.as_str()),
        _ => None,
    };
    let mut say = |what: String| {
        let problem = Diagnostic::new("gguf", format!("{shown}: {what}"))
            .help(format!("read are {}", diag::list(&known, 99)))
            .help(WEIGHTS_ONLY);
        problems.push(problem);
    };
    if let Some(kind) = text("general.type").filter(|kind| *kind != "model") {
        say(format!("`general.type` is {}; models are read", quoted(kind)));
        return None;
    }
    let Some(name) = text("general.architecture") else {
        say("`general.architecture` is missing".to_owned());
        return None;
    };
    let found = ARCHITECTURES.iter().find(|a| a.name == name);
    if found.is_none() {
        say(format!("`general.architecture` is {}, which is not read", quoted(name)));
    }
    found
}

/// Values of `rope_freqs.weight`; `None` without such a tensor, empty values for one of an odd form.
fn factors(
    shards: &[Shard],
    tensors: &BTreeMap<String, TensorInfo>,
    places: &BTreeMap<String, Place>,
) -> Option<Vec<f32>> {
    let (info, place) = (tensors.get(ROPE_FREQS)?, places.get(ROPE_FREQS)?);
    let sound = info.dtype == DType::F32
        && info.shape.rank() == 1
        && place.end - place.begin <= 4 * MAX_FACTORS;
    let bytes = shards.get(place.shard).and_then(|s| s.bytes(place.begin..place.end));
    let bytes = bytes.filter(|_| sound).unwrap_or_default();
    Some(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

/// Notes which tensors llama.cpp's converter changed.
fn mark_changes(
    architecture: &Architecture,
    shown: &str,
    header: &Header,
    tensors: &BTreeMap<String, TensorInfo>,
    places: &mut BTreeMap<String, Place>,
    problems: &mut Problems,
) {
    let number = |key: &str| match header.pairs.get(&format!("{}.{key}", architecture.name)) {
        Some(Value::Unsigned(n)) => Some(*n),
        Some(Value::Signed(n)) => u64::try_from(*n).ok(),
        _ => None,
    };
    let q_heads = number("attention.head_count").unwrap_or(0);
    let kv_heads = number("attention.head_count_kv").unwrap_or(q_heads);
    for (name, place) in places {
        let Some(info) = tensors.get(name) else { continue };
        let leaf = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let heads = match leaf.map(|(_, leaf)| leaf) {
            Some("attn_q.weight" | "attn_q.bias") if architecture.pairs => q_heads,
            Some("attn_k.weight" | "attn_k.bias") if architecture.pairs => kv_heads,
            _ => 0,
        };
        if heads > 0 {
            let rows = info.shape.extents().first().copied().unwrap_or(1);
            if rows.is_multiple_of(heads.saturating_mul(2)) {
                place.change = Change::Pairs { heads };
            } else {
                let what = format!(
                    "{shown}: tensor {} has {rows} rows, no pairs in {heads} heads",
                    quoted(name)
                );
                problems.push(Diagnostic::new("gguf", what));
            }
        }
        if architecture.norms_plus_one && name.ends_with("norm.weight") {
            if info.dtype == DType::F32 && place_holds(place, &info.shape) {
                place.change = Change::PlusOne;
            } else {
                let what = format!(
                    "{shown}: tensor {} is a norm, to which llama.cpp adds 1, and holds {}; F32 is needed",
                    quoted(name),
                    info.dtype
                );
                problems.push(Diagnostic::new("gguf", what));
            }
        }
    }
}

/// Whether a place holds plain f32 values of that shape: tensors in blocks have values of f32, too.
fn place_holds(place: &Place, shape: &Shape) -> bool {
    shape.elements().and_then(|n| n.checked_mul(4)) == Some(place.end - place.begin)
}

impl Gguf {
    /// The configuration that the metadata stand for.
    pub(super) fn config(&self) -> Option<&JsonFile> {
        self.config.as_ref().ok()
    }

    /// Files made of the metadata: the configuration, and tokenizer files that are stored whole.
    pub(super) fn made(&self) -> &BTreeMap<String, Vec<u8>> {
        &self.made
    }

    /// Kind of the tokenizer and its number of tokens, if there is one.
    pub(super) fn tokenizer(&self) -> Option<&(String, u64)> {
        self.tokenizer.as_ref()
    }

    /// The file's name in messages.
    pub(super) fn shown(&self) -> &str {
        &self.shown
    }

    /// Reads the model by its family. Weights are made of tensors of the file.
    ///
    /// # Errors
    /// Refused (3): an architecture that is not read, every key of the metadata that is missing or wrong, or every
    /// tensor that does not fit them.
    pub fn model(&self, tensors: &BTreeMap<String, TensorInfo>) -> Result<Model> {
        let config = self.config.as_ref().map_err(Clone::clone)?;
        let Some(architecture) = self.architecture else {
            let what = "this GGUF file has no architecture";
            return Err(Failure::plain(FailureKind::Refused, what));
        };
        let names = architecture.names;
        let mut weights = tensors.clone();
        weights.retain(|name, _| !self.unused.iter().any(|(unused, _)| unused == name));
        let view = View::new(names, &weights);
        let in_file = |name: &str| names.in_file(name);
        let mut model = model::read_as(&config.value, Some(&config.text), &view.tensors, &in_file)?;
        view.restore(&mut model.table);
        model.table.unused.extend(self.unused.iter().cloned());
        model.table.unused.sort();
        model.table.unused.dedup();
        Ok(model)
    }
}
