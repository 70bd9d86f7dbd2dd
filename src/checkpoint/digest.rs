//! The files that an output depends on, and their sha256.

use std::fs::File;
use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::blob::{BlobHasher, BlobName};
use super::folder::{Found, Stamp};
use crate::diag::{Diagnostic, Failure, FailureKind, Problems};

/// Bytes read and hashed at once: large enough that system calls cost nothing, small enough to stay in the cache.
const CHUNK: usize = 256 << 10;

/// A file of the source that the output depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceFile {
    /// Name within the checkpoint, with `/`.
    pub path: String,
    /// Its length.
    pub bytes: u64,
    pub(super) found: Found,
}

/// A source file's digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileDigest {
    /// Name within the checkpoint, with `/`.
    pub path: String,
    /// Its length.
    pub bytes: u64,
    /// Sha256 of its bytes.
    pub sha256: [u8; 32],
}

impl FileDigest {
    /// The digest in lower-case hex.
    pub fn hex(&self) -> String {
        self.sha256.iter().map(|b| format!("{b:02x}")).collect()
    }
}

/// Told how far hashing is. Calls come from several threads.
pub trait Hashing: Sync {
    /// Bytes that were just hashed.
    fn bytes(&self, _bytes: u64) {}
    /// A file that was hashed to its end.
    fn file(&self, _digest: &FileDigest) {}
}

impl<F: Fn(u64) + Sync> Hashing for F {
    fn bytes(&self, bytes: u64) {
        self(bytes);
    }
}

/// Hashes files in parallel, one task a file.
pub(super) fn hash(
    files: &[&SourceFile],
    cancel: &AtomicBool,
    progress: &dyn Hashing,
) -> crate::diag::Result<Vec<FileDigest>> {
    let one = |file: &&SourceFile| {
        let digest = hash_one(file, cancel, progress);
        if let Ok(Some(digest)) = &digest {
            progress.file(digest);
        }
        digest
    };
    let results: Vec<Result<Option<FileDigest>, Unhashed>> = files.par_iter().map(one).collect();
    let mut digests = Vec::with_capacity(files.len());
    let mut problems = Problems::new();
    let mut cancelled = false;
    for (file, result) in files.iter().zip(results) {
        match result {
            Ok(Some(digest)) => digests.push(digest),
            Ok(None) => cancelled = true,
            Err(Unhashed::Io(e)) => problems
                .push(Diagnostic::new("checkpoint", format!("cannot hash {}: {e}", file.path))),
            Err(Unhashed::Other(problem)) => problems.push(problem),
        }
    }
    if cancelled && problems.is_empty() {
        return Err(Failure::plain(FailureKind::Failed, "stopped while hashing the source"));
    }
    problems.finish(FailureKind::Failed, "the source cannot be hashed", digests)
}

/// The files that are no longer what was opened: shorter, longer, written to, replaced or gone.
pub(super) fn changed<'a>(files: impl IntoIterator<Item = &'a SourceFile>) -> Vec<Diagnostic> {
    let since = |file: &SourceFile| {
        let meta = match std::fs::metadata(&file.found.location) {
            Ok(meta) => meta,
            Err(e) => return Some(format!("{} cannot be examined any more: {e}", file.path)),
        };
        if meta.len() != file.bytes {
            let (was, is) = (file.bytes, meta.len());
            return Some(format!("{} had {was} bytes when it was opened, now {is}", file.path));
        }
        let same = Stamp::of(&meta) == file.found.stamp;
        (!same).then(|| format!("{} was written to or replaced", file.path))
    };
    let problem = |what| {
        Diagnostic::new("checkpoint", what).help("run again when nothing writes to the files")
    };
    files.into_iter().filter_map(since).map(problem).collect()
}

/// Why there is no digest of a file.
enum Unhashed {
    /// It cannot be read.
    Io(io::Error),
    /// It lies in a hub cache and is not what its name says.
    Other(Diagnostic),
}

impl From<io::Error> for Unhashed {
    fn from(error: io::Error) -> Unhashed {
        Unhashed::Io(error)
    }
}

fn hash_one(
    file: &SourceFile,
    cancel: &AtomicBool,
    progress: &dyn Hashing,
) -> Result<Option<FileDigest>, Unhashed> {
    // Read, not mapped: a file that shrinks under us gives an error here instead of SIGBUS, and no page of it counts
    // as this process's memory.
    let mut input = File::open(&file.found.location)?;
    let mut hasher = Sha256::new();
    // A blob's name says what it must hold. Of weights that is the digest that is computed anyway.
    let name = BlobName::of(&file.found);
    let mut of_git = matches!(name, Some(BlobName::Git(_))).then(|| BlobHasher::git(file.bytes));
    let mut buffer = vec![0u8; CHUNK];
    let mut total = 0u64;
    loop {
        if cancel.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let read = match input.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e.into()),
        };
        let chunk = buffer.get(..read).ok_or_else(|| io::Error::other("read past the buffer"))?;
        hasher.update(chunk);
        if let Some(of_git) = &mut of_git {
            of_git.update(chunk);
        }
        total += read as u64;
        if total > file.bytes {
            break;
        }
        progress.bytes(read as u64);
    }
    if total != file.bytes {
        return Err(io::Error::other(format!(
            "its length changed: it had {} bytes when it was opened",
            file.bytes
        ))
        .into());
    }
    let sha256 = hasher.finalize().into();
    let found = of_git.map_or(BlobName::Sha256(sha256), BlobHasher::finish);
    if let Some(problem) = name.and_then(|name| name.mismatch(&file.path, &found)) {
        let blob = file.found.location.display();
        return Err(Unhashed::Other(
            problem
                .help(format!("the file in the cache is damaged; remove it: rm {blob}"))
                .help("then run again with the model's id (org/name), which fetches it anew"),
        ));
    }
    Ok(Some(FileDigest { path: file.path.clone(), bytes: file.bytes, sha256 }))
}
