//! What one conversion reads: the model, the draft model that is merged into it, and importances.

use std::io;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use super::imatrix::Imatrix;
use crate::checkpoint::{Checkpoint, FileDigest, Hashing, SideFile};
use crate::diag::Result;
use crate::model::{DRAFT_PREFIX, Origin, Weight};
use crate::tensor::TensorSource;

/// What stands before the paths of a draft model's files in manifests and entries. No path of a model begins with it:
/// side files lie at the top of a folder or in `additional_chat_templates/`, weights at the top.
pub const DRAFT_FOLDER: &str = "draft/";

/// The one file of a draft model that goes into the artifact.
const DRAFT_CONFIG: &str = "config.json";

/// A checkpoint, the draft model that is merged into it, and importances for searches.
#[derive(Debug)]
pub struct Sources {
    /// The model.
    pub main: Checkpoint,
    /// Its draft model.
    pub draft: Option<Checkpoint>,
    /// Importances of columns.
    pub imatrix: Option<Imatrix>,
}

impl From<Checkpoint> for Sources {
    fn from(main: Checkpoint) -> Sources {
        Sources { main, draft: None, imatrix: None }
    }
}

impl Sources {
    /// Refuses checkpoints that are quantized already.
    ///
    /// # Errors
    /// As [`Checkpoint::refuse_quantized`]; of a draft model with a headline that says so.
    pub fn refuse_quantized(&self) -> Result<()> {
        self.main.refuse_quantized()?;
        let Some(draft) = &self.draft else { return Ok(()) };
        draft.refuse_quantized().map_err(|mut failure| {
            failure.headline = format!("the draft model: {}", failure.headline);
            failure
        })
    }

    /// Whether weights are there with their headers alone.
    pub fn headers_only(&self) -> bool {
        self.main.headers_only() || self.draft.as_ref().is_some_and(Checkpoint::headers_only)
    }

    /// Tensors that are left out of either checkpoint, with the reason.
    pub fn unused(&self) -> impl Iterator<Item = (String, String)> {
        let draft = self.draft.iter().flat_map(|d| d.unused());
        let draft = draft.map(|(name, why)| (format!("{DRAFT_PREFIX}{name}"), why.clone()));
        self.main.unused().iter().cloned().chain(draft)
    }

    /// The checkpoint that a weight is made from.
    ///
    /// # Errors
    /// A weight of a draft model where there is none: a fault of the plan.
    pub fn of(&self, weight: &Weight) -> io::Result<&Checkpoint> {
        match weight.origin {
            Origin::Main => Ok(&self.main),
            Origin::Draft => {
                self.draft.as_ref().ok_or_else(|| io::Error::other("there is no draft model"))
            }
        }
    }

    /// A weight's rows, out of the checkpoint that has them.
    ///
    /// # Errors
    /// As [`Checkpoint::source`] and [`Sources::of`].
    pub fn source(&self, weight: &Weight) -> io::Result<Box<dyn TensorSource + '_>> {
        self.of(weight)?.source(weight)
    }

    /// The files that hold a weight's tensors, by their path in [`Sources::files`]; `None` where that is not one
    /// place a tensor ([`Checkpoint::files_of`]).
    pub fn files_of(&self, weight: &Weight) -> Option<Vec<String>> {
        let folder = match weight.origin {
            Origin::Main => "",
            Origin::Draft => DRAFT_FOLDER,
        };
        let files = self.of(weight).ok()?.files_of(weight)?;
        Some(files.into_iter().map(|file| format!("{folder}{file}")).collect())
    }

    /// Tensors of the model and of its draft model.
    pub fn tensors(&self) -> (u64, Option<u64>) {
        let count = |c: &Checkpoint| c.tensors().len() as u64;
        (count(&self.main), self.draft.as_ref().map(count))
    }

    /// Every file that the output depends on, with its length, in byte order of paths. Those of the draft model stand
    /// under `draft/`, importances are [`IMATRIX_FILE`](super::IMATRIX_FILE).
    pub fn files(&self) -> Vec<(String, u64)> {
        let main = self.main.files().iter().map(|f| (f.path.clone(), f.bytes));
        let draft = self.draft.iter().flat_map(|d| d.files());
        let draft = draft.map(|f| (format!("{DRAFT_FOLDER}{}", f.path), f.bytes));
        let mut files: Vec<(String, u64)> = main.chain(draft).collect();
        files.extend(self.imatrix.iter().map(|i| (i.file().path.clone(), i.file().bytes)));
        files.sort();
        files
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files().iter().map(|(_, bytes)| bytes).sum()
    }

    /// The files that go into the artifact, in byte order of paths: the model's side files and the draft model's
    /// `config.json`, under `draft/`. The draft's tokenizer and templates are the model's.
    pub fn side_files(&self) -> Vec<SideFile> {
        let mut files = self.main.side_files().to_vec();
        if let Some(config) = self.draft_config() {
            files.push(SideFile {
                path: format!("{DRAFT_FOLDER}{}", config.path),
                ..config.clone()
            });
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        files
    }

    fn draft_config(&self) -> Option<&SideFile> {
        self.draft.as_ref()?.side_files().iter().find(|f| f.path == DRAFT_CONFIG)
    }

    /// The bytes of a file of [`Sources::side_files`].
    ///
    /// # Errors
    /// As [`Checkpoint::read_side_file`].
    pub fn read_side_file(&self, file: &SideFile) -> Result<Vec<u8>> {
        match (file.path.strip_prefix(DRAFT_FOLDER), &self.draft, self.draft_config()) {
            (Some(path), Some(draft), Some(config)) if config.path == path => {
                draft.read_side_file(config)
            }
            _ => self.main.read_side_file(file),
        }
    }

    /// Sha256 of the wanted files of [`Sources::files`], in the same order; importances are always among them, since their
    /// digest is known.
    ///
    /// # Errors
    /// As [`Checkpoint::hash_files`].
    pub fn hash_files(
        &self,
        wanted: &dyn Fn(&str) -> bool,
        cancel: &AtomicBool,
        progress: &dyn Hashing,
    ) -> Result<Vec<FileDigest>> {
        let mut all = self.main.hash_some(wanted, cancel, progress)?;
        if let Some(draft) = &self.draft {
            let in_folder = |path: &str| wanted(&format!("{DRAFT_FOLDER}{path}"));
            let digests = draft.hash_some(&in_folder, cancel, &InDraftFolder(progress))?;
            all.extend(digests.iter().map(in_draft_folder));
        }
        if let Some(imatrix) = &self.imatrix {
            // It was read and hashed as a whole when it was opened.
            progress.bytes(imatrix.file().bytes);
            progress.file(imatrix.file());
            all.push(imatrix.file().clone());
        }
        all.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(all)
    }

    /// Fails when a wanted file of [`Sources::files`] is no longer what was opened.
    ///
    /// # Errors
    /// As [`Checkpoint::check_unchanged`].
    pub fn check_unchanged(&self, wanted: &dyn Fn(&str) -> bool) -> Result<()> {
        self.main.check_unchanged(wanted)?;
        let Some(draft) = &self.draft else { return Ok(()) };
        draft.check_unchanged(&|path| wanted(&format!("{DRAFT_FOLDER}{path}")))
    }

    /// The source file that `path` is, by whatever name or link; `None` for another file or none.
    pub fn holds(&self, path: &Path) -> Option<String> {
        let same = |i: &&Imatrix| {
            let canonical = |p: &Path| std::fs::canonicalize(p).ok();
            canonical(path).is_some_and(|p| canonical(i.path()) == Some(p))
        };
        if let Some(imatrix) = self.imatrix.as_ref().filter(same) {
            return Some(imatrix.file().path.clone());
        }
        let main = self.main.holds(path).map(str::to_owned);
        let draft = || self.draft.as_ref()?.holds(path).map(|f| format!("{DRAFT_FOLDER}{f}"));
        main.or_else(draft)
    }
}

/// A file of the draft model under the name that it has among all files.
fn in_draft_folder(digest: &FileDigest) -> FileDigest {
    FileDigest { path: format!("{DRAFT_FOLDER}{}", digest.path), ..digest.clone() }
}

/// Passes on what is told of the draft model's files.
struct InDraftFolder<'a>(&'a dyn Hashing);

impl Hashing for InDraftFolder<'_> {
    fn bytes(&self, bytes: u64) {
        self.0.bytes(bytes);
    }

    fn file(&self, digest: &FileDigest) {
        self.0.file(&in_draft_folder(digest));
    }
}
