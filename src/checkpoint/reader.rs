//! Reading a folder step by step; problems are collected, not thrown, so that all are told at once.

use std::collections::BTreeMap;

use super::digest::SourceFile;
use super::folder::{Folder, Found, Kind, Listed, Trouble};
use super::gguf;
use super::index::{Index, MAX_INDEX_BYTES};
use super::json::{JsonFile, MAX_CONFIG_BYTES};
use super::layout::{self, Layout};
use super::quantized::QUANT_CONFIGS;
use super::safetensors::Header;
use super::shard::Shard;
use super::side::{self, LeftOut, SideFile};
use crate::diag::{self, Diagnostic, Failure, FailureKind, Problems};

/// Config files read when a checkpoint is opened.
pub(super) const CONFIGS: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
];

/// Config of a LoRA adapter (PEFT's name).
const ADAPTER_CONFIG: &str = "adapter_config.json";

/// What of a folder to open.
pub(super) enum Wanted {
    /// Whatever its index or its names say.
    Folder,
    /// The shards of this index.
    Index(String),
    /// This file alone.
    File(String),
}

/// A folder while it is read: problems are collected, not thrown.
pub(super) struct Reader {
    /// Where the files lie.
    pub folder: Folder,
    /// What is wrong.
    pub problems: Problems,
    /// Whether the system refused a file.
    pub io: bool,
    /// What is worth knowing.
    pub notes: Vec<Diagnostic>,
}

impl Reader {
    pub fn trouble(&mut self, name: &str, trouble: Trouble) {
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

    pub fn find(&mut self, name: &str) -> Option<Found> {
        self.folder.find(name).map_err(|trouble| self.trouble(name, trouble)).ok()
    }

    /// The refusal of a folder (or file) that holds only an adapter.
    pub fn adapter(&self, top: &[&str], wanted: &Wanted) -> Option<Failure> {
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

    pub fn configs(&mut self, top: &[&str]) -> Vec<JsonFile> {
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
    pub fn shard_names(
        &mut self,
        wanted: &Wanted,
        top: &[&str],
        snapshots: bool,
    ) -> (Vec<String>, Option<(Index, String)>) {
        let index = match wanted {
            Wanted::File(file) if layout::is_gguf(file) => return (gguf::series(file), None),
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

    pub fn shards(&mut self, names: &[String]) -> (Vec<Shard>, BTreeMap<String, Header>) {
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
    pub fn note_ignored(&mut self, top: &[&str], used: &[String], index: Option<&str>) {
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

    pub fn side_files(
        &mut self,
        listed: &[Listed],
    ) -> (Vec<SideFile>, Vec<LeftOut>, Vec<SourceFile>) {
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
            // Configs were judged when they were read.
            let judged = CONFIGS.contains(&path.as_str());
            let found = if judged { self.folder.find(&path).ok() } else { self.find(&path) };
            let Some(found) = found else { continue };
            if !judged {
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
