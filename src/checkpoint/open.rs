//! The stage's noun: an opened checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use super::digest::{self, FileDigest, Hashing, SourceFile};
use super::folder::{self, Folder, Kind, Trouble};
use super::gguf::{self, Gguf};
use super::index;
use super::json::JsonFile;
use super::layout;
use super::parts::{self, Assembled, Change, Joined, LessOne, Place};
use super::quantized::{self, Decoded, Kept, Packed, QUANT_CONFIGS, Quantization, QuantizedWith};
use super::reader::{Reader, Wanted};
use super::safetensors::Header;
use super::shard::Shard;
use super::side::{LeftOut, SideFile};
use super::source::{HubId, HubIdentity, OpenOptions};
use super::tokenizer::{self, Ids, TokenizerReport};
#[cfg(feature = "hub")]
use super::{hub::Fetched, source::Extent};
use crate::diag::{self, Diagnostic, Failure, FailureKind, Problems, Result};
use crate::model::{Part, Stored, Weight};
use crate::tensor::{PlaneSource, TensorInfo, TensorSource};

/// A source of weights: tensors by name, configs, side files.
///
/// Everything but [`Checkpoint::display_name`], [`Checkpoint::notes`] and the names in diagnostics is a function of
/// the files' bytes and their names within the folder: a copy of the folder elsewhere opens to the same answers.
#[derive(Debug)]
pub struct Checkpoint {
    folder: Folder,
    display_name: String,
    hub: Option<HubIdentity>,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, TensorInfo>,
    places: BTreeMap<String, Place>,
    quantization: Option<Quantization>,
    gguf: Option<Gguf>,
    json: Vec<JsonFile>,
    has_configs: bool,
    side_files: Vec<SideFile>,
    left_out: Vec<LeftOut>,
    files: Vec<SourceFile>,
    notes: Vec<Diagnostic>,
}

impl Checkpoint {
    /// Opens a source: a folder, one `.safetensors` or `.gguf` file, a `*.index.json`, or a hub id `ORG/NAME[@REV]` (a path that exists wins). Headers, index and configs are read and checked; weights are mapped and not read.
    ///
    /// A single file brings its folder's configs and side files along only when a `config.json` lies beside it.
    ///
    /// # Errors
    /// All problems of the source at once: refused (3) when the checkpoint is faulty or of a kind that is not read,
    /// failed (1) when the system refuses a file, usage (2) when there is no such source.
    pub fn open(source: &Path, options: &OpenOptions) -> Result<Checkpoint> {
        match std::fs::metadata(source) {
            Ok(meta) if meta.is_dir() => {
                let folder = Folder::open(source).map_err(|e| Failure::io("open", source, &e))?;
                Checkpoint::read(folder, Wanted::Folder, None)
            }
            Ok(meta) if meta.is_file() => Checkpoint::open_file(source),
            Ok(_) => Err(Failure::plain(
                FailureKind::Usage,
                format!("{} is neither a file nor a folder", source.display()),
            )),
            Err(e)
                if e.kind() == io::ErrorKind::NotFound
                    || e.kind() == io::ErrorKind::NotADirectory =>
            {
                match source.to_str().and_then(HubId::parse) {
                    Some(id) => Checkpoint::open_hub(&id, options),
                    None => Err(no_such_source(source)),
                }
            }
            Err(e) => Err(Failure::io("open", source, &e)),
        }
    }

    fn open_file(source: &Path) -> Result<Checkpoint> {
        let name = source.file_name().and_then(|n| n.to_str()).unwrap_or("").to_owned();
        let parent = match source.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let wanted = if layout::is_index(&name) {
            Wanted::Index(name)
        } else if name.ends_with(".safetensors") || layout::is_gguf(&name) {
            Wanted::File(name)
        } else {
            let shown = source.display();
            let problem = if layout::is_weight_file(&name) {
                let what = first_bytes(source).and_then(|b| super::safetensors::looks_like(&b));
                let what = what.map(|w| format!(" ({w})")).unwrap_or_default();
                Diagnostic::new("checkpoint", format!("{shown} is no safetensors or GGUF file{what}"))
                    .help("start from the Hugging Face checkpoint of the model, with weights as safetensors")
            } else {
                Diagnostic::new("checkpoint", format!("{shown} is no weight file"))
                    .help("pass the model's folder, a .safetensors or .gguf file, or a .safetensors.index.json file")
            };
            return Err(Failure::one(
                FailureKind::Refused,
                "this source is no checkpoint that radpack reads",
                problem,
            ));
        };
        let folder = Folder::open(parent).map_err(|e| Failure::io("open", parent, &e))?;
        Checkpoint::read(folder, wanted, None)
    }

    #[cfg(feature = "hub")]
    fn open_hub(id: &HubId, options: &OpenOptions) -> Result<Checkpoint> {
        let environment =
            options.hub.clone().unwrap_or_else(super::source::HubEnvironment::from_process);
        let (folder, identity) = match options.extent {
            Extent::Everything => {
                let (snapshot, identity) =
                    super::hub::fetch(id, &environment, options.on_transfer.as_ref())?;
                (Folder::open(&snapshot).map_err(|e| Failure::io("open", &snapshot, &e)), identity)
            }
            extent => {
                let all = extent == Extent::Headers;
                match super::hub::fetch_heads(id, &environment, all)? {
                    (Fetched::Snapshot(path), identity) => {
                        (Folder::open(&path).map_err(|e| Failure::io("open", &path, &e)), identity)
                    }
                    (Fetched::Heads(heads), identity) => {
                        let dir = heads.dir.path().to_owned();
                        let folder = Folder::of_heads(&id.to_string(), heads);
                        (folder.map_err(|e| Failure::io("open", &dir, &e)), identity)
                    }
                }
            }
        };
        Checkpoint::read(folder?, Wanted::Folder, Some(identity))
    }

    #[cfg(not(feature = "hub"))]
    fn open_hub(id: &HubId, _: &OpenOptions) -> Result<Checkpoint> {
        Err(Failure::one(
            FailureKind::Usage,
            format!("{id} is neither a file nor a folder"),
            Diagnostic::new(
                "hub",
                format!(
                    "{id} may name a model on the hub, which this build of radpack cannot reach"
                ),
            )
            .help(format!("download it: hf download {} --local-dir {}", id.repo(), id.name))
            .help("or build radpack with the feature `hub`"),
        ))
    }

    fn read(folder: Folder, wanted: Wanted, hub: Option<HubIdentity>) -> Result<Checkpoint> {
        let (listed, odd) = folder.list().map_err(|problem| {
            Failure::one(FailureKind::Refused, "this folder cannot be read", problem)
        })?;
        let mut reader = Reader { folder, problems: Problems::new(), io: false, notes: Vec::new() };
        if !odd.is_empty() {
            reader.notes.push(
                Diagnostic::new(
                    "checkpoint",
                    format!("left out, the names are not UTF-8: {}", diag::list(&odd, 5)),
                )
                .help("rename the files if the model needs them"),
            );
        }
        let top: Vec<&str> = listed
            .iter()
            .filter(|l| l.kind != Kind::Folder && !l.name.contains('/'))
            .map(|l| l.name.as_str())
            .collect();
        if let Some(refusal) = reader.adapter(&top, &wanted) {
            return Err(refusal);
        }
        let has_configs =
            !matches!(wanted, Wanted::File(_)) || top.binary_search(&"config.json").is_ok();
        let mut json = if has_configs { reader.configs(&top) } else { Vec::new() };
        let snapshots = listed.iter().any(|l| l.name == "snapshots" && l.kind == Kind::Folder);
        let (shard_names, index) = reader.shard_names(&wanted, &top, snapshots);
        let is_gguf = shard_names.iter().any(|name| layout::is_gguf(name));
        let opened = if is_gguf { gguf::open(&mut reader, &shard_names) } else { None };
        let (shards, headers, gguf) = match opened {
            Some(gguf::Opened { shards, tensors, places, packed, with, gguf }) => {
                (shards, BTreeMap::new(), Some((tensors, places, packed, with, gguf)))
            }
            None if is_gguf => Default::default(),
            None => {
                let (shards, headers) = reader.shards(&shard_names);
                (shards, headers, None)
            }
        };
        index::cross_check(
            index.as_ref().map(|(index, file)| (index, file.as_str())),
            &headers,
            &mut reader.problems,
        );
        reader.note_ignored(&top, &shard_names, index.as_ref().map(|(_, file)| file.as_str()));
        let (mut side_files, mut left_out, mut files) =
            if has_configs { reader.side_files(&listed) } else { Default::default() };
        if let Some((.., gguf)) = &gguf {
            gguf.replace_configs(&mut json, &mut side_files, &mut left_out, &mut files);
        }
        if let Some((_, name)) = &index
            && let Some(found) = reader.find(name)
        {
            files.push(SourceFile { path: name.clone(), bytes: found.bytes, found });
        }
        files.extend(shards.iter().map(|s| SourceFile {
            path: s.path.clone(),
            bytes: s.found.bytes,
            found: s.found.clone(),
        }));
        files.sort_by(|a, b| a.path.cmp(&b.path));
        files.dedup_by(|a, b| a.path == b.path);

        let (tensors, places, quantization, gguf) = match gguf {
            Some((tensors, places, packed, with, gguf)) => {
                let quantization = with.map(|with| Quantization::of_blocks(with, packed));
                (tensors, places, quantization, Some(gguf))
            }
            None => {
                let (mut tensors, places) = join(&shards, headers);
                let config = json.iter().find(|file: &&JsonFile| file.path == "config.json");
                let of_tools = |name: &&str| json.iter().find(|file| file.path == **name).cloned();
                let quant_configs: Vec<JsonFile> =
                    QUANT_CONFIGS.iter().filter_map(of_tools).collect();
                let quantization =
                    quantized::read(config, &quant_configs, &mut tensors, &places, &shards);
                (tensors, places, quantization, None)
            }
        };
        let display_name = match &wanted {
            Wanted::File(file) if layout::is_gguf(file) => layout::stem_of_gguf(file).to_owned(),
            Wanted::File(file) if !has_configs => {
                file.strip_suffix(".safetensors").unwrap_or(file).to_owned()
            }
            _ => reader.folder.name(),
        };
        let Reader { folder, problems, io, notes } = reader;
        let checkpoint = Checkpoint {
            folder,
            display_name,
            hub,
            shards,
            tensors,
            places,
            quantization,
            gguf,
            json,
            has_configs,
            side_files,
            left_out,
            files,
            notes,
        };
        let kind = if io { FailureKind::Failed } else { FailureKind::Refused };
        problems.finish(kind, "this checkpoint cannot be read", checkpoint)
    }

    /// What the model is called on screen and in default file names: the folder's name (the model's in a hub cache),
    /// with or without a trailing slash. It depends on where the files lie and must not reach an output's bytes.
    pub fn display_name(&self) -> &str {
        &self.display_name
    }

    /// Repository and commit, when the source was named by its hub id. A copy of the same files has none, so it must
    /// not reach an output's bytes either.
    pub fn hub(&self) -> Option<&HubIdentity> {
        self.hub.as_ref()
    }

    /// Whether the weights' headers are at hand and nothing of their values: enough for a plan or an estimate, not for
    /// a conversion ([`super::Extent`]).
    pub fn headers_only(&self) -> bool {
        self.folder.holds_heads()
    }

    /// Every tensor by name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    /// The weight files with their lengths in bytes, in byte order of names.
    pub fn weight_files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.shards.iter().map(|s| (s.path.as_str(), s.found.bytes))
    }

    /// Things worth knowing that did not stop the opening: files that do not count, and why.
    pub fn notes(&self) -> &[Diagnostic] {
        &self.notes
    }

    /// A config file read at opening, by name: `config.json`, `generation_config.json`, `preprocessor_config.json`,
    /// `processor_config.json`, `tokenizer_config.json`, `video_preprocessor_config.json`, and quantization tools'
    /// `hf_quant_config.json`, `quantize_config.json`, `quant_config.json`.
    pub fn json(&self, name: &str) -> Option<&JsonFile> {
        self.json.iter().find(|file| file.path == name)
    }

    /// `config.json`.
    pub fn config(&self) -> Option<&JsonFile> {
        self.json("config.json")
    }

    /// `generation_config.json`.
    pub fn generation_config(&self) -> Option<&JsonFile> {
        self.json("generation_config.json")
    }

    /// `preprocessor_config.json`.
    pub fn preprocessor_config(&self) -> Option<&JsonFile> {
        self.json("preprocessor_config.json")
    }

    /// `video_preprocessor_config.json`.
    pub fn video_preprocessor_config(&self) -> Option<&JsonFile> {
        self.json("video_preprocessor_config.json")
    }

    /// `tokenizer_config.json`.
    pub fn tokenizer_config(&self) -> Option<&JsonFile> {
        self.json("tokenizer_config.json")
    }

    /// What a GGUF file says beside its tensors; `None` for safetensors.
    pub fn gguf(&self) -> Option<&Gguf> {
        self.gguf.as_ref()
    }

    /// What an artifact made of the checkpoint has to tell about its origin: which files are made of a GGUF file's
    /// metadata, and what of them is not stored.
    pub fn origin_notes(&self) -> Vec<String> {
        self.gguf.as_ref().map_or_else(Vec::new, |gguf| gguf.notes(&self.side_files))
    }

    /// Whether the weights are quantized already, by config or by the names of tensors.
    pub fn quantized(&self) -> Option<&QuantizedWith> {
        self.quantization.as_ref().map(|q| &q.with)
    }

    /// Refuses a checkpoint that is quantized in a way that is not read, or whose quantization is faulty.
    ///
    /// # Errors
    /// Refused (3), with every tensor that is at fault.
    pub fn refuse_quantized(&self) -> Result<()> {
        match self.quantization.as_ref().and_then(|q| q.refusal.as_ref()) {
            Some(refusal) => Err(refusal.clone()),
            None => Ok(()),
        }
    }

    /// Tensors of a quantized checkpoint that are left out, with the reason: scales of activations and caches.
    pub fn unused(&self) -> &[(String, String)] {
        self.quantization.as_ref().map_or(&[], |q| &q.unused)
    }

    fn packed(&self, part: &Part) -> Option<&Packed> {
        self.quantization.as_ref()?.packed.get(&part.tensor)
    }

    /// The rows of a quantized tensor that a part takes.
    fn packed_rows(packed: &Packed, part: &Part) -> Option<Range<u64>> {
        let (rows, _) = packed.extent();
        let Some(index) = part.index else { return Some(0..rows) };
        let count = packed.info.shape.extents().first().copied().filter(|n| index < *n)?;
        let each = rows / count;
        Some(each * index..each * (index + 1))
    }

    /// How the checkpoint stores a weight that is quantized there; `None` for one that is not.
    pub fn stored(&self, weight: &Weight) -> Option<Stored> {
        let mut bytes = 0u64;
        let mut any = false;
        for part in &weight.parts {
            match self.packed(part) {
                Some(packed) => {
                    any = true;
                    let rows = Checkpoint::packed_rows(packed, part)?;
                    let share = (rows.end - rows.start) as u128 * u128::from(packed.bytes);
                    let all = u128::from(packed.extent().0.max(1));
                    bytes = bytes.saturating_add(u64::try_from(share / all).unwrap_or(u64::MAX));
                }
                None => {
                    let place = self.places.get(&part.tensor)?;
                    bytes = bytes.saturating_add(place.end - place.begin);
                }
            }
        }
        if !any {
            return None;
        }
        let planes = match self.kept(weight) {
            Ok(kept) => Ok(kept.encoding().clone().into()),
            Err(why) => Err(why.into()),
        };
        Some(Stored { bytes, planes })
    }

    fn kept(&self, weight: &Weight) -> std::result::Result<Kept<'_>, String> {
        let mut parts = Vec::with_capacity(weight.parts.len());
        for part in &weight.parts {
            let packed = self
                .packed(part)
                .ok_or_else(|| format!("its part {} is not quantized", part.tensor))?;
            let rows = Checkpoint::packed_rows(packed, part)
                .ok_or_else(|| format!("{} has no such index", part.tensor))?;
            parts.push((packed, rows));
        }
        Kept::new(&self.shards, &weight.shape, parts)
    }

    /// The files that hold a weight's tensors, in the order of its parts; `None` for a weight that is made of tensors
    /// quantized in the checkpoint, which lie in several places, or that does not fit the checkpoint.
    pub fn files_of(&self, weight: &Weight) -> Option<Vec<&str>> {
        if weight.stored.is_some() {
            return None;
        }
        let file = |part: &Part| {
            let place = self.places.get(&part.tensor)?;
            Some(self.shards.get(place.shard)?.path.as_str())
        };
        weight.parts.iter().map(file).collect()
    }

    /// The codes and scales of a weight that the checkpoint holds quantized, as planes; `None` for an unquantized
    /// weight and for one whose [`Stored::planes`] says why there are none.
    pub fn planes(&self, weight: &Weight) -> Option<Box<dyn PlaneSource + '_>> {
        Some(Box::new(self.kept(weight).ok()?))
    }

    /// Checks the tokenizer: every token id must have one of the `rows` of the embedding (`None` when there is no
    /// embedding to compare with), and with `required` there must be a tokenizer at all.
    pub fn check_tokenizer(&self, rows: Option<u64>, required: bool) -> TokenizerReport {
        let mut report = TokenizerReport::default();
        let present = |name: &str| {
            self.has_configs && self.files.binary_search_by(|f| f.path.as_str().cmp(name)).is_ok()
        };
        let files = tokenizer::TOKENIZER_FILES.iter().filter(|name| present(name));
        report.files = files.map(|name| (*name).to_owned()).collect();
        let made = self.gguf.iter().flat_map(|gguf| gguf.made());
        let made = made.filter(|(name, _)| tokenizer::TOKENIZER_FILES.contains(&name.as_str()));
        report.files.extend(made.clone().map(|(name, _)| name.clone()));
        if let Some((gguf, (kind, tokens))) =
            self.gguf.as_ref().and_then(|gguf| Some((gguf, gguf.tokenizer()?)))
        {
            gguf.report_tokenizer(kind, *tokens, rows, &mut report);
        }
        if report.files.is_empty() {
            if required && self.gguf.as_ref().is_none_or(|gguf| gguf.tokenizer().is_none()) {
                let left_out = |name: &&str| self.left_out.iter().find(|file| file.path == *name);
                let left_out = tokenizer::TOKENIZER_FILES.iter().filter_map(left_out);
                let shown = self.folder.shown().display().to_string();
                report.problems.push(tokenizer::none_found(&shown, left_out));
            }
            return report;
        }
        let mut ids = Ids::new(rows.unwrap_or(u64::MAX));
        // Slow tokenizers' vocabularies count only where the fast one, which was made of them, is absent.
        let sources: &[&str] = if present("tokenizer.json") {
            &["tokenizer.json", "added_tokens.json"]
        } else {
            &["vocab.json", "vocab.txt", "added_tokens.json"]
        };
        for (name, bytes) in made.clone() {
            if let Err(reason) = ids.read(name, bytes) {
                let shown = self.gguf.as_ref().map_or("", Gguf::shown);
                let what = format!("{shown}: `tokenizer.huggingface.json`: {reason}");
                report.problems.push(Diagnostic::new("tokenizer", what));
            }
        }
        for name in sources.iter().filter(|name| present(name)) {
            let read = self.folder.read(name, tokenizer::MAX_TOKENIZER_BYTES);
            let problem = match read {
                Ok(bytes) => match ids.read(name, &bytes) {
                    Ok(()) => continue,
                    Err(reason) => Diagnostic::new(
                        "tokenizer",
                        format!("{}: {reason}", self.folder.show(name)),
                    ),
                },
                Err(Trouble::Missing) => continue,
                Err(Trouble::Refused(problem) | Trouble::Io(problem)) => problem,
            };
            report.problems.push(problem);
        }
        ids.report(&mut report);
        report
    }

    /// A weight, assembled from its parts; its rows are read on demand, and decoded where the checkpoint holds them
    /// quantized.
    ///
    /// # Errors
    /// `InvalidData` when the weight does not fit the checkpoint's tensors (names, element types, shapes): a fault of
    /// the table that it comes from.
    pub fn source(&self, weight: &Weight) -> io::Result<Box<dyn TensorSource + '_>> {
        if !weight.parts.iter().any(|part| self.packed(part).is_some()) {
            let runs = self.runs(weight)?;
            let assembled = Assembled::new(weight, &self.shards, runs)?;
            return Ok(match self.less_one(weight) {
                true => Box::new(LessOne(assembled)),
                false => Box::new(assembled),
            });
        }
        let mut sources: Vec<(u64, Box<dyn TensorSource + '_>)> = Vec::new();
        for part in &weight.parts {
            let misfit = || {
                let what = format!("{}: {} does not fit it", weight.name, part.tensor);
                io::Error::new(io::ErrorKind::InvalidData, what)
            };
            sources.push(match self.packed(part) {
                Some(packed) => {
                    let rows = Checkpoint::packed_rows(packed, part).ok_or_else(misfit)?;
                    let count = rows.end - rows.start;
                    (count, Box::new(Decoded::new(&self.shards, packed, rows)))
                }
                None => {
                    let info = self.tensors.get(&part.tensor).ok_or_else(misfit)?;
                    let extents = info.shape.extents();
                    let inner = extents.get(usize::from(part.index.is_some())..);
                    let shape = crate::tensor::Shape::from(inner.ok_or_else(misfit)?);
                    let (rows, _) = shape.matrix().ok_or_else(misfit)?;
                    let single = Weight { shape, parts: vec![part.clone()], ..weight.clone() };
                    let runs = self.runs(&single)?;
                    (rows, Box::new(Assembled::new(&single, &self.shards, runs)?))
                }
            });
        }
        Ok(Box::new(Joined::new(weight, sources)?))
    }

    /// Whether 1 was added to the values of the weight's tensors.
    fn less_one(&self, weight: &Weight) -> bool {
        let place = |part: &Part| self.places.get(&part.tensor);
        weight.parts.iter().filter_map(place).any(|place| place.change == Change::PlusOne)
    }

    fn runs(&self, weight: &Weight) -> io::Result<Vec<parts::Run>> {
        parts::runs(weight, |name| {
            let (info, place) = (self.tensors.get(name)?, self.places.get(name)?);
            Some((info.dtype, &info.shape, *place))
        })
    }

    /// Tells the system that these rows of a weight have been read and will not be read again soon, so that their
    /// pages stop counting as this process's memory. Reading them again stays correct. Does nothing for a weight that
    /// does not fit the checkpoint.
    pub fn release(&self, weight: &Weight, rows: Range<u64>) {
        if weight.stored.is_some() {
            return self.release_packed(weight, rows);
        }
        let Ok(runs) = self.runs(weight) else { return };
        let Some((all, cols)) = weight.shape.matrix() else { return };
        let Some(row_bytes) = weight.dtype.bytes().and_then(|width| cols.checked_mul(width)) else {
            return;
        };
        let (start, end) = (rows.start.min(all), rows.end.min(all));
        if start < end {
            let mut last: Option<(usize, Range<u64>)> = None;
            for (shard, range) in parts::covering(&runs, start * row_bytes..end * row_bytes) {
                // Rows in another order are short runs that lie close together: only what they span holds whole pages.
                last = match last {
                    Some((of, span)) if of == shard && range.start < span.end + row_bytes * 256 => {
                        Some((of, span.start.min(range.start)..span.end.max(range.end)))
                    }
                    other => {
                        self.release_range(other);
                        Some((shard, range))
                    }
                };
            }
            self.release_range(last);
        }
    }

    fn release_range(&self, range: Option<(usize, Range<u64>)>) {
        if let Some((shard, range)) = range
            && let Some(shard) = self.shards.get(shard)
        {
            shard.release(range);
        }
    }

    /// As [`Checkpoint::release`], of a weight in ggml's blocks; other quantized weights lie in several places.
    fn release_packed(&self, weight: &Weight, rows: Range<u64>) {
        let mut first = 0u64;
        for part in &weight.parts {
            let Some(packed) = self.packed(part) else { return };
            let Some(own) = Checkpoint::packed_rows(packed, part) else { return };
            let count = own.end - own.start;
            let (start, end) = (rows.start.max(first), rows.end.min(first.saturating_add(count)));
            if start < end {
                let within = own.start + (start - first)..own.start + (end - first);
                self.release_range(packed.bytes_of_rows(within));
            }
            first = first.saturating_add(count);
        }
    }

    /// The files that go into the artifact byte for byte, in byte order of paths.
    pub fn side_files(&self) -> &[SideFile] {
        &self.side_files
    }

    /// The bytes of a side file that is made of a GGUF file's metadata, and is no file of the source.
    pub fn made_file(&self, path: &str) -> Option<&[u8]> {
        self.gguf.as_ref()?.made().get(path).map(Vec::as_slice)
    }

    /// The files of the folder that do not go into the artifact, with the reason, in byte order of paths.
    pub fn left_out(&self) -> &[LeftOut] {
        &self.left_out
    }

    /// The bytes of a side file.
    ///
    /// # Errors
    /// Failed (1) when the system refuses it or its length changed since the opening.
    pub fn read_side_file(&self, file: &SideFile) -> Result<Vec<u8>> {
        if let Some(made) = self.gguf.as_ref().and_then(|gguf| gguf.made().get(&file.path)) {
            return Ok(made.clone());
        }
        let known = self.files.binary_search_by(|f| f.path.cmp(&file.path));
        let found = known.ok().and_then(|at| self.files.get(at)).ok_or_else(|| {
            Failure::plain(
                FailureKind::Failed,
                format!("{} is no side file of the source", file.path),
            )
        })?;
        folder::read_whole(&found.found).map_err(|e| {
            let path = self.folder.shown().join(&file.path);
            Failure::io("read", &path, &e)
        })
    }

    /// Every file that the output depends on, in byte order of paths: weight files that count, the index, configs and
    /// side files.
    pub fn files(&self) -> &[SourceFile] {
        &self.files
    }

    /// Sha256 of every file of [`Checkpoint::files`], in the same order, computed in parallel. `progress` is told the
    /// bytes of every chunk, from any thread; setting `cancel` stops soon.
    ///
    /// # Errors
    /// Failed (1): files that cannot be read, or that changed length since the opening, all of them by name; or a
    /// stop on request.
    pub fn hash_files(
        &self,
        cancel: &AtomicBool,
        progress: &dyn Hashing,
    ) -> Result<Vec<FileDigest>> {
        self.hash_some(&|_| true, cancel, progress)
    }

    /// [`Checkpoint::hash_files`] of the files whose paths are wanted.
    ///
    /// # Errors
    /// As [`Checkpoint::hash_files`].
    pub fn hash_some(
        &self,
        wanted: &dyn Fn(&str) -> bool,
        cancel: &AtomicBool,
        progress: &dyn Hashing,
    ) -> Result<Vec<FileDigest>> {
        let map = |file: &SourceFile| {
            let shard = self.shards.iter().find(|shard| shard.path == file.path)?;
            (!shard.is_head()).then(|| shard.all())
        };
        let wanted = self.files.iter().filter(|f| wanted(&f.path));
        let files: Vec<(&SourceFile, Option<&[u8]>)> = wanted.map(|f| (f, map(f))).collect();
        digest::hash(&files, cancel, progress)
    }

    /// Fails when a wanted file is no longer what was opened: what was read of it may be neither the old file nor the new.
    ///
    /// # Errors
    /// Failed (1): every such file by name.
    pub fn check_unchanged(&self, wanted: &dyn Fn(&str) -> bool) -> Result<()> {
        let mut problems = Problems::new();
        problems.extend(digest::changed(self.files.iter().filter(|f| wanted(&f.path))));
        problems.finish(FailureKind::Failed, "the source changed while it was read", ())
    }

    /// The source file that `path` is, by whatever name or link, so that an output can be kept from overwriting an
    /// input; `None` for another file or none.
    pub fn holds(&self, path: &Path) -> Option<&str> {
        let location = std::fs::canonicalize(path).ok()?;
        let same = |file: &&SourceFile| {
            file.found.location == location || same_inode(&file.found.location, &location)
        };
        self.files.iter().find(same).map(|file| file.path.as_str())
    }
}

#[cfg(unix)]
fn same_inode(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (std::fs::metadata(a), std::fs::metadata(b)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

#[cfg(not(unix))]
fn same_inode(_: &Path, _: &Path) -> bool {
    false
}

/// Tensors and their places over all shards.
fn join(
    shards: &[Shard],
    mut headers: BTreeMap<String, Header>,
) -> (BTreeMap<String, TensorInfo>, BTreeMap<String, Place>) {
    let mut tensors = BTreeMap::new();
    let mut places = BTreeMap::new();
    for (number, shard) in shards.iter().enumerate() {
        let Some(header) = headers.remove(&shard.path) else { continue };
        for (name, entry) in header.tensors {
            let change = Change::None;
            let place = Place { shard: number, begin: entry.begin, end: entry.end, change };
            places.insert(name.clone(), place);
            tensors.insert(name, entry.info);
        }
    }
    (tensors, places)
}

/// The first bytes of a file, for a guess at what it is.
fn first_bytes(path: &Path) -> Option<Vec<u8>> {
    use std::io::Read;
    let mut start = Vec::new();
    std::fs::File::open(path).ok()?.take(16).read_to_end(&mut start).ok()?;
    Some(start)
}

/// The failure of a source that does not exist and is no hub id, with names that come close.
fn no_such_source(source: &Path) -> Failure {
    let failure = format!("no such file or folder: {}", source.display());
    let parent = match source.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let names: BTreeSet<String> = std::fs::read_dir(parent)
        .into_iter()
        .flatten()
        .take(1000)
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    let wanted = source.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let near = diag::nearest(&wanted, names.iter().map(String::as_str));
    let problem = Diagnostic::new("checkpoint", format!("{} does not exist", source.display()));
    let problem = if near.is_empty() {
        problem.help("a source is a folder, a .safetensors or .gguf file, an index file, or a hub id ORG/NAME[@REVISION]")
    } else {
        problem.help(format!("there is {}", diag::list(&near, 3)))
    };
    Failure::one(FailureKind::Usage, failure, problem)
}
