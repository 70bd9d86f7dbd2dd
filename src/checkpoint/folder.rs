//! The folder of a checkpoint: its files, and which symbolic links are followed.
//!
//! A link may point anywhere inside the model's own folder, or, when the folder is a snapshot of a hub cache
//! (`models--ORG--NAME/snapshots/REV`), anywhere inside that `models--ORG--NAME` folder, where the blobs lie. Every
//! other link is refused: a folder from the network must not pull files of this machine into an artifact. The path
//! that the user names may itself be a link.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use crate::diag::{self, Diagnostic};

/// Entries of a folder that are looked at; a folder with more is no checkpoint.
const MAX_ENTRIES: usize = 20_000;

/// Folders whose files count as if they lay at the top: transformers keeps further chat templates there.
pub(super) const SUBFOLDERS: [&str; 1] = ["additional_chat_templates"];

/// First line of a Git LFS pointer file (git-lfs specification, version 1).
const LFS_FIRST_LINE: &[u8] = b"version https://git-lfs.github.com/spec/v1";

/// Longest pointer file, in bytes: the specification says less than 1024.
const LFS_MAX_BYTES: u64 = 1024;

/// The folder that a checkpoint's files lie in.
#[derive(Debug)]
pub(super) struct Folder {
    /// As the user wrote it, for messages.
    shown: PathBuf,
    /// Without links.
    canonical: PathBuf,
    /// Folder that links may point into.
    zone: PathBuf,
    /// Set when weight files are there with their beginnings alone.
    heads: Option<Heads>,
}

/// A folder of this process's own, with files of a model on the hub: configs whole, weight files up to the end of their
/// headers. It goes with the checkpoint.
#[derive(Debug)]
pub(super) struct Heads {
    /// The folder.
    #[cfg_attr(not(feature = "hub"), expect(dead_code, reason = "only hubs make such folders"))]
    pub dir: tempfile::TempDir,
    /// The model's name.
    pub name: String,
    /// Lengths of the files that are there in part.
    pub lengths: BTreeMap<String, u64>,
}

/// What an entry of a folder is, links followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A regular file of that many bytes.
    File(u64),
    /// A folder.
    Folder,
    /// Something else: a broken link, a device.
    Other,
}

/// One entry of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Listed {
    /// Name, with the subfolder and `/` in front when it lies in one.
    pub name: String,
    /// What it is.
    pub kind: Kind,
}

/// A file that may be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    /// Where its bytes are, without links.
    pub location: PathBuf,
    /// Its length.
    pub bytes: u64,
    /// Tells whether it is still the same file, as it was.
    pub stamp: Stamp,
}

/// Device, inode, and the second and nanosecond of the last change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Stamp([i64; 4]);

impl Stamp {
    /// Of a file as it is now.
    pub fn of(meta: &fs::Metadata) -> Stamp {
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            // Only compared with one another, so that wrapping is of no concern.
            Stamp([meta.dev() as i64, meta.ino() as i64, meta.mtime(), meta.mtime_nsec()])
        }
        #[cfg(not(unix))]
        {
            let _ = meta;
            Stamp::default()
        }
    }
}

/// Why a file cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Trouble {
    /// It does not exist.
    Missing,
    /// The rules refuse it.
    Refused(Diagnostic),
    /// The system refuses it.
    Io(Diagnostic),
}

impl Folder {
    /// Opens a folder.
    pub fn open(shown: &Path) -> io::Result<Folder> {
        let canonical = fs::canonicalize(shown)?;
        if !canonical.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        let zone = cache_model_folder(&canonical).unwrap_or(&canonical).to_path_buf();
        Ok(Folder { shown: shown.to_path_buf(), canonical, zone, heads: None })
    }

    /// A folder of files that are there in part, shown under the id that the user gave.
    #[cfg(feature = "hub")]
    pub fn of_heads(shown: &str, heads: Heads) -> io::Result<Folder> {
        let mut folder = Folder::open(heads.dir.path())?;
        folder.shown = PathBuf::from(shown);
        folder.heads = Some(heads);
        Ok(folder)
    }

    /// Whether weight files are there with their beginnings alone.
    pub fn holds_heads(&self) -> bool {
        self.heads.is_some()
    }

    /// The whole length of a file that is there in part; `None` for other files.
    pub fn whole_length(&self, name: &str) -> Option<u64> {
        self.heads.as_ref()?.lengths.get(name).copied()
    }

    /// A file's path as shown to the user.
    pub fn show(&self, name: &str) -> String {
        let path = self.shown.join(name);
        path.strip_prefix(".").unwrap_or(&path).display().to_string()
    }

    /// The folder's path as shown to the user.
    pub fn shown(&self) -> &Path {
        &self.shown
    }

    /// The folder's own name (the model's name in a hub cache), whatever way the path was written.
    pub fn name(&self) -> String {
        if let Some(heads) = &self.heads {
            return heads.name.clone();
        }
        let in_cache = self.zone != self.canonical;
        let name = if in_cache { self.zone.file_name() } else { self.canonical.file_name() };
        let name = name.map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        match name.rsplit_once("--") {
            Some((_, last)) if in_cache => last.to_owned(),
            _ => name,
        }
    }

    /// Whether this is a snapshot in a hub cache.
    pub fn in_cache(&self) -> bool {
        self.zone != self.canonical
    }

    /// Every entry at the top and in [`SUBFOLDERS`], in byte order of names, and the names that are not UTF-8.
    pub fn list(&self) -> Result<(Vec<Listed>, Vec<String>), Diagnostic> {
        let mut listed = Vec::new();
        let mut odd = Vec::new();
        for sub in std::iter::once("").chain(SUBFOLDERS) {
            let path = self.canonical.join(sub);
            if !sub.is_empty() && !fs::symlink_metadata(&path).is_ok_and(|m| m.is_dir()) {
                continue;
            }
            for entry in fs::read_dir(&path).map_err(|e| self.io("list", sub, &e))? {
                let entry = entry.map_err(|e| self.io("list", sub, &e))?;
                if listed.len() + odd.len() >= MAX_ENTRIES {
                    return Err(Diagnostic::new(
                        "checkpoint",
                        format!(
                            "{} holds more than {} entries, which no checkpoint does",
                            self.shown.display(),
                            diag::count(MAX_ENTRIES as u64)
                        ),
                    )
                    .help("pass the model's own folder"));
                }
                let Ok(name) = entry.file_name().into_string() else {
                    odd.push(entry.file_name().to_string_lossy().into_owned());
                    continue;
                };
                let kind = match fs::metadata(entry.path()) {
                    Ok(m) if m.is_file() => Kind::File(m.len()),
                    Ok(m) if m.is_dir() => Kind::Folder,
                    _ => Kind::Other,
                };
                let name = if sub.is_empty() { name } else { format!("{sub}/{name}") };
                listed.push(Listed { name, kind });
            }
        }
        listed.sort_by(|a, b| a.name.cmp(&b.name));
        odd.sort();
        Ok((listed, odd))
    }

    /// Finds a file by its name within the folder, following links as far as they are allowed.
    pub fn find(&self, name: &str) -> Result<Found, Trouble> {
        if !is_inner_path(name) {
            return Err(Trouble::Refused(
                Diagnostic::new(
                    "checkpoint",
                    format!(
                        "{} is no file name within the folder",
                        super::safetensors::quoted(name)
                    ),
                )
                .help("names are relative, without `..`"),
            ));
        }
        let path = self.canonical.join(name);
        let link = match fs::symlink_metadata(&path) {
            Ok(meta) => meta.is_symlink().then(|| fs::read_link(&path).unwrap_or_default()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(Trouble::Missing),
            Err(e) => return Err(Trouble::Io(self.io("read", name, &e))),
        };
        let location = match (fs::canonicalize(&path), link) {
            (Ok(location), _) => location,
            (Err(e), Some(target)) if e.kind() == io::ErrorKind::NotFound => {
                let problem = Diagnostic::new(
                    "checkpoint",
                    format!(
                        "{} is a symbolic link to {}, which does not exist",
                        self.show(name),
                        target.display()
                    ),
                );
                return Err(Trouble::Refused(problem.help(if self.in_cache() {
                    "the download did not finish: download the model again"
                } else {
                    "copy the file into the folder"
                })));
            }
            (Err(e), _) => return Err(Trouble::Io(self.io("read", name, &e))),
        };
        if !location.starts_with(&self.zone) {
            return Err(Trouble::Refused(
                Diagnostic::new(
                    "checkpoint",
                    format!(
                        "{} is a symbolic link to {}, outside {}",
                        self.show(name),
                        location.display(),
                        self.zone.display()
                    ),
                )
                .help(
                    "links may point into the model's own folder, or into the blobs of its hub cache folder \
                     (models--ORG--NAME)",
                )
                .help("copy the file into the folder, or pass the folder that the link points into"),
            ));
        }
        // Asked before opening: opening a pipe would wait for a writer for ever.
        let meta = fs::metadata(&location).map_err(|e| Trouble::Io(self.io("read", name, &e)))?;
        if !meta.is_file() {
            return Err(Trouble::Refused(Diagnostic::new(
                "checkpoint",
                format!("{} is no regular file", self.show(name)),
            )));
        }
        Ok(Found {
            location,
            bytes: self.whole_length(name).unwrap_or(meta.len()),
            stamp: Stamp::of(&meta),
        })
    }

    /// The bytes of a file of at most `limit` bytes that is no Git LFS pointer.
    pub fn read(&self, name: &str, limit: u64) -> Result<Vec<u8>, Trouble> {
        let found = self.find(name)?;
        if found.bytes > limit {
            return Err(Trouble::Refused(Diagnostic::new(
                "checkpoint",
                format!(
                    "{} has {}, more than the {} such a file may have",
                    self.show(name),
                    diag::size(found.bytes),
                    diag::size(limit)
                ),
            )));
        }
        let bytes = read_whole(&found).map_err(|e| Trouble::Io(self.io("read", name, &e)))?;
        match lfs_problem(&self.show(name), &bytes) {
            Some(problem) => Err(Trouble::Refused(problem)),
            None => Ok(bytes),
        }
    }

    /// The problem of a file that is a Git LFS pointer instead of the file itself.
    pub fn lfs_pointer(&self, name: &str, found: &Found) -> Result<Option<Diagnostic>, Diagnostic> {
        if found.bytes >= LFS_MAX_BYTES || self.whole_length(name).is_some() {
            return Ok(None);
        }
        let bytes = read_whole(found).map_err(|e| self.io("read", name, &e))?;
        Ok(lfs_problem(&self.show(name), &bytes))
    }

    /// A system error as a problem.
    pub fn io(&self, doing: &str, name: &str, error: &io::Error) -> Diagnostic {
        Diagnostic::new("checkpoint", format!("cannot {doing} {}: {error}", self.show(name)))
    }
}

/// The `models--ORG--NAME` folder that a snapshot lies in.
fn cache_model_folder(canonical: &Path) -> Option<&Path> {
    let snapshots =
        canonical.parent().filter(|p| p.file_name().is_some_and(|n| n == "snapshots"))?;
    let model = snapshots.parent()?;
    model.file_name()?.to_str()?.starts_with("models--").then_some(model)
}

/// Whether a name is a relative path of plain components: no root, no `.` or `..`, no empty part, no backslash, no
/// control character.
pub(super) fn is_inner_path(name: &str) -> bool {
    !name.is_empty()
        && !name.contains('\\')
        && !name.chars().any(char::is_control)
        && name.split('/').all(|part| !matches!(part, "" | "." | ".."))
        && Path::new(name).components().all(|c| matches!(c, Component::Normal(_)))
}

/// The bytes of a file, which must still be as long as it was.
pub(super) fn read_whole(found: &Found) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // One byte more than expected, so that a file that grew is noticed without reading all of it.
    File::open(&found.location)?.take(found.bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != found.bytes {
        return Err(io::Error::other("the file changed while it was read"));
    }
    Ok(bytes)
}

fn lfs_problem(shown: &str, bytes: &[u8]) -> Option<Diagnostic> {
    if bytes.len() as u64 >= LFS_MAX_BYTES || !bytes.starts_with(LFS_FIRST_LINE) {
        return None;
    }
    let promised = std::str::from_utf8(bytes)
        .ok()
        .and_then(|text| text.lines().find_map(|line| line.strip_prefix("size ")))
        .and_then(|size| size.trim().parse::<u64>().ok());
    let promise = match promised {
        Some(n) => format!("; it promises {} ({} bytes)", diag::size(n), diag::count(n)),
        None => String::new(),
    };
    Some(
        Diagnostic::new(
            "checkpoint",
            format!("{shown} is a Git LFS pointer, not the file itself{promise}"),
        )
        .help("run `git lfs pull` in the folder"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_relative_names_are_inner_paths() {
        for good in ["a", "a/b.json", "model-00001-of-00002.safetensors", "..a", "ü"] {
            assert!(is_inner_path(good), "{good}");
        }
        for bad in ["", "/a", "../a", "a/../b", "a//b", "a/", "./a", "a\\b", "a\0", "a\nb", "a/."] {
            assert!(!is_inner_path(bad), "{bad:?}");
        }
    }

    #[test]
    fn a_cache_snapshot_is_recognised_by_its_place() {
        let snapshot = Path::new("/c/hub/models--org--name/snapshots/0123");
        assert_eq!(cache_model_folder(snapshot), Some(Path::new("/c/hub/models--org--name")));
        assert_eq!(cache_model_folder(Path::new("/c/snapshots/0123")), None);
        assert_eq!(cache_model_folder(Path::new("/c/models--org--name/0123")), None);
    }

    #[test]
    fn a_pointer_file_says_what_it_promises() {
        let text = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4976698672\n";
        let problem = lfs_problem("m/a.safetensors", text).expect("a pointer");
        assert_eq!(
            problem.message,
            "m/a.safetensors is a Git LFS pointer, not the file itself; it promises 4.63 GiB (4,976,698,672 bytes)"
        );
        assert_eq!(problem.help, ["run `git lfs pull` in the folder"]);
        assert_eq!(lfs_problem("x", b"version 2"), None);
    }
}
