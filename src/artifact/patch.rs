//! Changes one value of a finished file: how many cache blocks an engine is to allocate.
//!
//! The manifest has room for any number, so only three places differ afterwards: the manifest's bytes, its digest in
//! `radpack/digests`, and the root digest. They cannot be written in one step, so they are written to a copy, which
//! takes the file's place in one rename. Killed at any moment, the file is the old one or the new one, both whole; an
//! engine that has the old file mapped keeps it. A journal beside the file would spare the copy, but a file whose patch
//! was cut off would be invalid to every reader that knows no journal, and engines' own readers know none. Where the
//! file system shares blocks between files (btrfs, XFS), the copy takes neither time nor space.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::digests::{self, EntryDigest};
use super::layout::{DIGEST_KEY, DIGESTS_ENTRY, MANIFEST_ENTRY};
use super::manifest::{MAX_KV_BLOCKS, Manifest};
use super::reader::Artifact;
use super::refusal::OpenError;
use super::writer::{claim, partial_path, publish};
use crate::diag::{Diagnostic, Failure, FailureKind, Problems, Result, count};
use crate::hash;

const AREA: &str = "kv-blocks";

/// Sets how many blocks of the paged cache an engine is to allocate; `None` leaves the number to the engine, as after a
/// conversion. Returns the file's root digest. Setting an earlier number again gives the earlier bytes.
///
/// # Errors
/// Refused: a number outside the limits that the manifest states, a file without programs or from a program version
/// that left no room for the number. Invalid: a file that is damaged where it is to be changed. Failed: I/O, no space
/// for the copy, another run at the same file. The file is then as it was.
pub fn set_kv_blocks(path: &Path, blocks: Option<u64>) -> Result<[u8; 32]> {
    let path = fs::canonicalize(path).map_err(|e| Failure::io("open", path, &e))?;
    // The lock comes first: what is read below stays true until the rename.
    let copy = Copy::begin(&path)?;
    let artifact = Artifact::open(&path).map_err(|error| match error {
        OpenError::Io { .. } => Failure::plain(FailureKind::Failed, error.to_string()),
        OpenError::Refused { refused, .. } => damaged(&path, refused.to_string()),
    })?;
    let now = Sealed::read(&path, &artifact)?;
    let mut manifest = now.manifest.clone();
    let Some(graphs) = manifest.graphs.as_mut() else {
        return refuse(
            Diagnostic::new(AREA, "the file holds no programs, so it has no cache")
                .help("convert a decoder that radpack has a family for"),
        );
    };
    if now.manifest.to_bytes() != now.bytes {
        return refuse(
            Diagnostic::new(
                AREA,
                "its manifest has no room for the number, or holds keys of another version of radpack",
            )
            .help("convert again with this version, or use the version that wrote the file"),
        );
    }
    if let Some(n) = blocks {
        check(n, graphs.kv.min_blocks, graphs.kv.full_blocks)?;
    }
    graphs.kv.blocks = blocks;
    let bytes = manifest.to_bytes();
    if bytes == now.bytes {
        return Ok(now.root);
    }
    let changes = now.changes(&bytes)?;
    drop(artifact);
    copy.publish(&changes)?;
    Ok(changes.root)
}

/// Both limits, told together.
fn check(blocks: u64, min: u64, full: u64) -> Result<()> {
    let mut problems = Problems::new();
    let help = format!("{} to {} blocks work", count(min), count(full));
    if blocks < min {
        let rule = format!(
            "{} cache blocks; the programs need {} to serve one full-length sequence and a short one in every place",
            count(blocks),
            count(min)
        );
        problems.push(Diagnostic::new(AREA, rule).help(help));
    } else if blocks > full.min(MAX_KV_BLOCKS) {
        let rule = format!(
            "{} cache blocks; {} hold all sequences at full length, more are never used",
            count(blocks),
            count(full)
        );
        problems.push(Diagnostic::new(AREA, rule).help(help));
    }
    problems.finish(FailureKind::Refused, HEADLINE, ())
}

const HEADLINE: &str = "the number of cache blocks cannot be set";

fn refuse<T>(problem: Diagnostic) -> Result<T> {
    Err(Failure::one(FailureKind::Refused, HEADLINE, problem))
}

fn damaged(path: &Path, why: String) -> Failure {
    let problem = Diagnostic::new("container", why).help("radpack validate tells all faults");
    Failure::one(FailureKind::Invalid, format!("{} is damaged", path.display()), problem)
}

/// What rests on the manifest, checked against one another.
struct Sealed<'a> {
    path: &'a Path,
    manifest: Manifest,
    bytes: Vec<u8>,
    root: [u8; 32],
    digests: Vec<EntryDigest>,
    /// Where the manifest, the digests and the root digest's text lie in the file.
    places: [u64; 3],
}

/// Bytes and where they go.
struct Changes {
    ranges: [(u64, Vec<u8>); 3],
    root: [u8; 32],
}

impl<'a> Sealed<'a> {
    fn read(path: &'a Path, artifact: &Artifact) -> Result<Sealed<'a>> {
        let wrong = |why: &str| damaged(path, why.to_owned());
        let place = |name: &str| {
            let entry = artifact.find(name)?;
            let at = entry.planes().next()?;
            Some((entry.plane(0).to_vec(), at.offset))
        };
        let Some((bytes, manifest_at)) = place(MANIFEST_ENTRY) else {
            return refuse(
                Diagnostic::new(AREA, "the file has no manifest: radpack did not write it")
                    .help("convert the model with radpack"),
            );
        };
        let (list, digests_at) = place(DIGESTS_ENTRY).ok_or_else(|| wrong("it has no digests"))?;
        let root = artifact.meta_text(DIGEST_KEY).and_then(|t| digests::from_hex(t.bytes()));
        let root = root.ok_or_else(|| wrong("it has no root digest"))?;
        let root_at =
            artifact.meta_text_at(DIGEST_KEY).ok_or_else(|| wrong("it has no root digest"))?;
        let digests = digests::decode(&list, &root)
            .map_err(|e| damaged(path, format!("{DIGESTS_ENTRY}: {e}")))?;
        let listed = digests.iter().find(|d| d.name == MANIFEST_ENTRY);
        if listed.map(|d| d.sha256) != Some(hash::sha256([bytes.as_slice()])) {
            return Err(wrong("the manifest has another digest than the file says"));
        }
        let manifest = Manifest::parse(&bytes).map_err(|e| damaged(path, e.to_string()))?;
        let places = [manifest_at, digests_at, root_at];
        Ok(Sealed { path, manifest, bytes, root, digests, places })
    }

    /// The three places after another manifest of the same length.
    fn changes(&self, manifest: &[u8]) -> Result<Changes> {
        if manifest.len() != self.bytes.len() {
            return Err(Failure::plain(
                FailureKind::Failed,
                format!(
                    "{}: a manifest of {} bytes has no room for {}",
                    self.path.display(),
                    self.bytes.len(),
                    manifest.len()
                ),
            ));
        }
        let mut digests = self.digests.clone();
        for digest in digests.iter_mut().filter(|d| d.name == MANIFEST_ENTRY) {
            digest.sha256 = hash::sha256([manifest]);
        }
        let list = digests::encode(&digests);
        let root = hash::sha256([list.as_slice()]);
        let [manifest_at, digests_at, root_at] = self.places;
        let text = digests::hex(&root).into_bytes();
        Ok(Changes {
            ranges: [(manifest_at, manifest.to_vec()), (digests_at, list), (root_at, text)],
            root,
        })
    }
}

/// A copy on its way to take the file's place; removed unless it does.
struct Copy {
    file: File,
    partial: PathBuf,
    path: PathBuf,
    /// Device and number of the file that was copied.
    inode: (u64, u64),
    published: bool,
}

impl Copy {
    /// Takes the place beside the file where its successor is made. Nothing is copied yet.
    fn begin(path: &Path) -> Result<Copy> {
        // Not the name of a conversion's partial file: one that was interrupted can be gone on with.
        let mut name = path.as_os_str().to_owned();
        name.push(".kv-blocks");
        let partial = partial_path(Path::new(&name));
        let file = claim(&partial)?;
        Ok(Copy { file, partial, path: path.to_owned(), inode: (0, 0), published: false })
    }

    fn publish(mut self, changes: &Changes) -> Result<()> {
        self.fill(changes).map_err(|e| Failure::io("copy and change", &self.partial, &e))?;
        // The copy has to be what was meant before the old file goes.
        let made = Artifact::open(&self.partial)
            .map_err(|e| Failure::plain(FailureKind::Failed, e.to_string()))?;
        if Sealed::read(&self.partial, &made)?.root != changes.root {
            let what = "the changed copy does not have the root digest that was computed for it";
            return Err(Failure::plain(FailureKind::Failed, what));
        }
        drop(made);
        let named = fs::metadata(&self.path).map_err(|e| Failure::io("examine", &self.path, &e))?;
        if (named.dev(), named.ino()) != self.inode {
            let what = format!("{} was replaced by another program meanwhile", self.path.display());
            return Err(Failure::plain(FailureKind::Failed, what));
        }
        publish(&self.file, &self.partial, &self.path)?;
        self.published = true;
        Ok(())
    }

    fn fill(&mut self, changes: &Changes) -> io::Result<()> {
        let mut source = File::open(&self.path)?;
        let meta = source.metadata()?;
        self.inode = (meta.dev(), meta.ino());
        self.file.set_len(0)?;
        // Linux shares the blocks where the file system can, and copies inside the kernel elsewhere.
        let copied = io::copy(&mut source, &mut self.file)?;
        if copied != meta.len() {
            return Err(io::Error::other("the file changed while it was copied"));
        }
        for (at, bytes) in &changes.ranges {
            self.file.write_all_at(bytes, *at)?;
        }
        self.file.set_permissions(meta.permissions())
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        if !self.published {
            // Nothing can be done about an error here; the next run replaces the file.
            let _ = fs::remove_file(&self.partial);
        }
    }
}
