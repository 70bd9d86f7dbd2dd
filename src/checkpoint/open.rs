//! The stage's noun: an opened checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use super::digest::{self, FileDigest, SourceFile};
use super::folder::{self, Folder, Found, Kind, Listed, Trouble};
use super::index::{self, Index, MAX_INDEX_BYTES};
use super::json::{JsonFile, MAX_CONFIG_BYTES};
use super::layout::{self, Layout};
use super::parts::{self, Assembled, Place};
use super::quantized::{self, QUANT_CONFIGS, QuantizedWith};
use super::safetensors::Header;
use super::shard::Shard;
use super::side::{self, LeftOut, SideFile};
use super::source::{HubId, HubIdentity, OpenOptions};
use super::tokenizer::{self, Ids, TokenizerReport};
use crate::diag::{self, Diagnostic, Failure, FailureKind, Problems, Result};
use crate::model::Weight;
use crate::tensor::{TensorInfo, TensorSource};

/// Config files read when a checkpoint is opened.
const CONFIGS: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
];

/// Config of a LoRA adapter (PEFT's name).
const ADAPTER_CONFIG: &str = "adapter_config.json";

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
    json: Vec<JsonFile>,
    has_configs: bool,
    side_files: Vec<SideFile>,
    left_out: Vec<LeftOut>,
    files: Vec<SourceFile>,
    notes: Vec<Diagnostic>,
}

/// What of a folder to open.
enum Wanted {
    /// Whatever its index or its names say.
    Folder,
    /// The shards of this index.
    Index(String),
    /// This file alone.
    File(String),
}

impl Checkpoint {
    /// Opens a source: a folder, one `.safetensors` file, a `*.index.json`, or a hub id `ORG/NAME[@REV]` (a path that exists wins). Headers, index and configs are read and checked; weights are mapped and not read.
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
        } else if name.ends_with(".safetensors") {
            Wanted::File(name)
        } else {
            let shown = source.display();
            let problem = if layout::is_weight_file(&name) {
                let what = first_bytes(source).and_then(|b| super::safetensors::looks_like(&b));
                let what = what.map(|w| format!(" ({w})")).unwrap_or_default();
                Diagnostic::new("checkpoint", format!("{shown} is no safetensors file{what}"))
                    .help("start from the Hugging Face checkpoint of the model, with weights as safetensors")
            } else {
                Diagnostic::new("checkpoint", format!("{shown} is no weight file"))
                    .help("pass the model's folder, a .safetensors file, or a .safetensors.index.json file")
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
        let (snapshot, identity) =
            super::hub::fetch(id, &environment, options.on_transfer.as_ref())?;
        let folder = Folder::open(&snapshot).map_err(|e| Failure::io("open", &snapshot, &e))?;
        Checkpoint::read(folder, Wanted::Folder, Some(identity))
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
        let json = if has_configs { reader.configs(&top) } else { Vec::new() };
        let snapshots = listed.iter().any(|l| l.name == "snapshots" && l.kind == Kind::Folder);
        let (shard_names, index) = reader.shard_names(&wanted, &top, snapshots);
        let (shards, headers) = reader.shards(&shard_names);
        index::cross_check(
            index.as_ref().map(|(index, file)| (index, file.as_str())),
            &headers,
            &mut reader.problems,
        );
        reader.note_ignored(&top, &shard_names, index.as_ref().map(|(_, file)| file.as_str()));
        let (side_files, left_out, mut files) =
            if has_configs { reader.side_files(&listed) } else { Default::default() };
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

        let (tensors, places) = join(&shards, headers);
        let display_name = match &wanted {
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

    /// Whether the weights are quantized already, by config or by the names of tensors.
    pub fn quantized(&self) -> Option<QuantizedWith> {
        let quant_configs: Vec<JsonFile> =
            QUANT_CONFIGS.iter().filter_map(|name| self.json(name).cloned()).collect();
        quantized::detect(self.config(), &quant_configs, &self.tensors)
    }

    /// Refuses a checkpoint that is quantized already.
    ///
    /// # Errors
    /// Refused (3), with the method and what shows it.
    pub fn refuse_quantized(&self) -> Result<()> {
        self.quantized().map_or(Ok(()), |found| Err(found.refusal()))
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
        if report.files.is_empty() {
            if required {
                report
                    .problems
                    .push(tokenizer::none_found(&self.folder.shown().display().to_string()));
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

    /// A weight, assembled from its parts; its rows are read on demand.
    ///
    /// # Errors
    /// `InvalidData` when the weight does not fit the checkpoint's tensors (names, element types, shapes): a fault of
    /// the table that it comes from.
    pub fn source(&self, weight: &Weight) -> io::Result<Box<dyn TensorSource + '_>> {
        let runs = self.runs(weight)?;
        Ok(Box::new(Assembled::new(weight, &self.shards, runs)?))
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
        let Ok(runs) = self.runs(weight) else { return };
        let Some((all, cols)) = weight.shape.matrix() else { return };
        let Some(row_bytes) = weight.dtype.bytes().and_then(|width| cols.checked_mul(width)) else {
            return;
        };
        let (start, end) = (rows.start.min(all), rows.end.min(all));
        if start < end {
            for (shard, range) in parts::covering(&runs, start * row_bytes..end * row_bytes) {
                if let Some(shard) = self.shards.get(shard) {
                    shard.release(range);
                }
            }
        }
    }

    /// The files that go into the artifact byte for byte, in byte order of paths.
    pub fn side_files(&self) -> &[SideFile] {
        &self.side_files
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
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Vec<FileDigest>> {
        digest::hash(&self.files, cancel, progress)
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

/// A folder while it is read: problems are collected, not thrown.
struct Reader {
    folder: Folder,
    problems: Problems,
    io: bool,
    notes: Vec<Diagnostic>,
}

impl Reader {
    fn trouble(&mut self, name: &str, trouble: Trouble) {
        match trouble {
            Trouble::Missing => self.problems.push(Diagnostic::new(
                "checkpoint",
                format!("{} does not exist", self.folder.show(name)),
            )),
            Trouble::Refused(problem) => self.problems.push(problem),
            Trouble::Io(problem) => {
                self.io = true;
                self.problems.push(problem);
            }
        }
    }

    fn find(&mut self, name: &str) -> Option<Found> {
        self.folder.find(name).map_err(|trouble| self.trouble(name, trouble)).ok()
    }

    /// The refusal of a folder (or file) that holds only an adapter.
    fn adapter(&self, top: &[&str], wanted: &Wanted) -> Option<Failure> {
        let is_adapter = |name: &str| name.starts_with("adapter_");
        let only_adapter = match wanted {
            Wanted::File(file) => is_adapter(file) && top.contains(&ADAPTER_CONFIG),
            Wanted::Index(_) => false,
            Wanted::Folder => holds_only_adapter(top),
        };
        if !only_adapter {
            return None;
        }
        let bytes = self.folder.read(ADAPTER_CONFIG, MAX_CONFIG_BYTES).ok()?;
        let json = JsonFile::parse(ADAPTER_CONFIG, ADAPTER_CONFIG, bytes).ok();
        let text = |key: &str| json.as_ref()?.get(&[key])?.as_str().map(str::to_owned);
        let base = text("base_model_name_or_path").filter(|base| !base.is_empty());
        let base =
            base.map_or("an unnamed model".to_owned(), |base| base.escape_debug().to_string());
        let kind = text("peft_type").map_or("LoRA".to_owned(), |kind| {
            if kind.eq_ignore_ascii_case("lora") {
                "LoRA".to_owned()
            } else {
                kind.escape_debug().to_string()
            }
        });
        Some(Failure::one(
            FailureKind::Refused,
            "this source is an adapter, not a model",
            Diagnostic::new(
                "checkpoint",
                format!("{} is a {kind} adapter of {base}: merge first", self.folder.shown().display()),
            )
            .help("with PEFT: AutoPeftModelForCausalLM.from_pretrained(…).merge_and_unload().save_pretrained(DIR)"),
        ))
    }

    fn configs(&mut self, top: &[&str]) -> Vec<JsonFile> {
        let mut files = Vec::new();
        for name in CONFIGS.iter().chain(&QUANT_CONFIGS).filter(|name| top.contains(name)) {
            match self.folder.read(name, MAX_CONFIG_BYTES) {
                Ok(bytes) => match JsonFile::parse(name, &self.folder.show(name), bytes) {
                    Ok(file) => {
                        if file.bom {
                            self.notes.push(Diagnostic::new(
                                "config",
                                format!(
                                    "{} starts with a byte order mark, which is skipped",
                                    file.text.name
                                ),
                            ));
                        }
                        files.push(file);
                    }
                    Err(problem) => self.problems.push(problem),
                },
                Err(trouble) => self.trouble(name, trouble),
            }
        }
        files
    }

    /// The weight files in byte order, and the index that names them with its own name.
    fn shard_names(
        &mut self,
        wanted: &Wanted,
        top: &[&str],
        snapshots: bool,
    ) -> (Vec<String>, Option<(Index, String)>) {
        let index = match wanted {
            Wanted::File(file) => return (vec![file.clone()], None),
            Wanted::Index(index) => index.clone(),
            Wanted::Folder => {
                match layout::choose(top, &self.folder.shown().display().to_string()) {
                    Ok((layout, notes)) => {
                        self.notes.extend(notes);
                        match layout {
                            Layout::Files(files) => return (files, None),
                            Layout::Index(index) => index,
                        }
                    }
                    Err(problem) => {
                        self.problems.push(if snapshots {
                            self.snapshots(problem)
                        } else {
                            problem
                        });
                        return (Vec::new(), None);
                    }
                }
            }
        };
        let bytes = match self.folder.read(&index, MAX_INDEX_BYTES) {
            Ok(bytes) => bytes,
            Err(trouble) => {
                self.trouble(&index, trouble);
                return (Vec::new(), None);
            }
        };
        let parsed = JsonFile::parse(&index, &self.folder.show(&index), bytes)
            .map_err(|problem| vec![problem])
            .and_then(|file| Index::parse(&file));
        match parsed {
            Ok(parsed) => {
                let names = parsed.shards().into_keys().map(str::to_owned).collect();
                (names, Some((parsed, index)))
            }
            Err(problems) => {
                self.problems.extend(problems);
                (Vec::new(), None)
            }
        }
    }

    /// Adds which snapshots a hub cache's model folder holds to the problem of finding no weights in it.
    fn snapshots(&self, problem: Diagnostic) -> Diagnostic {
        let names = std::fs::read_dir(self.folder.shown().join("snapshots"));
        let mut names: Vec<String> = names
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .map(|name| self.folder.show(&format!("snapshots/{name}")))
            .collect();
        names.sort();
        problem.help(format!(
            "this is a model's folder in a hub cache; pass {}",
            diag::list(&names, 4)
        ))
    }

    fn shards(&mut self, names: &[String]) -> (Vec<Shard>, BTreeMap<String, Header>) {
        let mut shards = Vec::new();
        let mut headers = BTreeMap::new();
        let mut missing: Vec<&str> = Vec::new();
        for name in names {
            let found = match self.folder.find(name) {
                Ok(found) => found,
                Err(Trouble::Missing) => {
                    missing.push(name);
                    continue;
                }
                Err(trouble) => {
                    self.trouble(name, trouble);
                    continue;
                }
            };
            match Shard::open(&self.folder, name, found) {
                Ok((shard, header)) => {
                    shards.push(shard);
                    headers.insert(name.clone(), header);
                }
                Err(problems) => self.problems.extend(problems),
            }
        }
        if !missing.is_empty() {
            let s = if missing.len() == 1 { "" } else { "s" };
            self.problems.push(
                Diagnostic::new(
                    "checkpoint",
                    format!(
                        "{} of {} shards that the index names do not exist, file{s} {}",
                        missing.len(),
                        names.len(),
                        diag::list(&missing, 8)
                    ),
                )
                .help("the copy or download did not finish: fetch the model again"),
            );
        }
        (shards, headers)
    }

    /// Says which weight files of the folder do not count.
    fn note_ignored(&mut self, top: &[&str], used: &[String], index: Option<&str>) {
        if used.is_empty() {
            return;
        }
        let ignored: Vec<&str> = top
            .iter()
            .copied()
            .filter(|n| n.ends_with(".safetensors") && !n.starts_with("adapter_"))
            .filter(|n| used.binary_search_by(|u| u.as_str().cmp(n)).is_err())
            .collect();
        if !ignored.is_empty() {
            let why = match index {
                Some(index) => format!("{index} does not name"),
                None => "not the file that was asked for".to_owned(),
            };
            self.notes.push(Diagnostic::new(
                "checkpoint",
                format!("ignored, {why}: {}", diag::list(&ignored, 8)),
            ));
        }
    }

    fn side_files(&mut self, listed: &[Listed]) -> (Vec<SideFile>, Vec<LeftOut>, Vec<SourceFile>) {
        let (mut side, mut left_out, mut files) = (Vec::new(), Vec::new(), Vec::new());
        for entry in listed {
            let bytes = match entry.kind {
                Kind::Folder => continue,
                Kind::File(bytes) => bytes,
                Kind::Other => 0,
            };
            let path = entry.name.clone();
            if let Some(reason) = side::exclusion(&path, bytes) {
                if side::worth_a_note(&path, bytes) {
                    let size = diag::size(bytes);
                    self.notes.push(Diagnostic::new(
                        "checkpoint",
                        format!("{path} ({size}) does not go into the artifact: {reason}"),
                    ));
                }
                left_out.push(LeftOut { path, reason });
                continue;
            }
            let Some(found) = self.find(&path) else { continue };
            // Configs were judged when they were read.
            if !CONFIGS.contains(&path.as_str()) {
                match self.folder.lfs_pointer(&path, &found) {
                    Ok(None) => {}
                    Ok(Some(problem)) => {
                        self.problems.push(problem);
                        continue;
                    }
                    Err(problem) => {
                        self.trouble(&path, Trouble::Io(problem));
                        continue;
                    }
                }
            }
            side.push(SideFile { path: path.clone(), bytes: found.bytes });
            files.push(SourceFile { path, bytes: found.bytes, found });
        }
        (side, left_out, files)
    }
}

/// Whether a folder has an adapter's config and no weights but an adapter's.
pub(super) fn holds_only_adapter(top: &[&str]) -> bool {
    let model_weights = |name: &&str| {
        !name.starts_with("adapter_")
            && (name.ends_with(".safetensors") || name.starts_with("pytorch_model"))
    };
    top.contains(&ADAPTER_CONFIG) && !top.iter().any(model_weights)
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
            let place = Place { shard: number, begin: entry.begin, end: entry.end };
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
        problem.help("a source is a folder, a .safetensors file, an index file, or a hub id ORG/NAME[@REVISION]")
    } else {
        problem.help(format!("there is {}", diag::list(&near, 3)))
    };
    Failure::one(FailureKind::Usage, failure, problem)
}
