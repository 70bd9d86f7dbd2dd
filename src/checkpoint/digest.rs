//! The files that an output depends on, and their sha256.

use std::fs::File;
use std::io::{self, BufRead, Read};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use super::blob::{BlobHasher, BlobName};
use super::folder::{Found, Stamp};
use crate::diag::{Diagnostic, Failure, FailureKind, Problems};
use crate::hash::{self, Stream};

/// Bytes taken at once: large enough that system calls cost nothing, small enough to stay in the cache.
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

/// Hashes files in parallel. What is mapped already is not read once more.
pub(super) fn hash(
    files: &[(&SourceFile, Option<&[u8]>)],
    cancel: &AtomicBool,
    progress: &dyn Hashing,
) -> crate::diag::Result<Vec<FileDigest>> {
    let hashed: Vec<Hashed<'_>> =
        files.iter().map(|(file, map)| Hashed { file, map: *map, cancel, progress }).collect();
    let results = hash::each(&hashed);
    let mut digests = Vec::with_capacity(files.len());
    let mut problems = Problems::new();
    let mut cancelled = false;
    for ((file, _), result) in files.iter().zip(results) {
        match result {
            Ok(digest) => digests.push(digest),
            Err(Unhashed::Stopped) => cancelled = true,
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
    /// Somebody asked to stop.
    Stopped,
    /// It cannot be read.
    Io(io::Error),
    /// It lies in a hub cache and is not what its name says.
    Other(Diagnostic),
}

impl From<io::Error> for Unhashed {
    fn from(error: io::Error) -> Unhashed {
        match error.get_ref().is_some_and(|e| e.is::<Stopped>()) {
            true => Unhashed::Stopped,
            false => Unhashed::Io(error),
        }
    }
}

/// What a reader says when it was asked to stop.
#[derive(Debug, thiserror::Error)]
#[error("stopped")]
struct Stopped;

/// A file to be hashed.
struct Hashed<'a> {
    file: &'a SourceFile,
    /// All of its bytes.
    map: Option<&'a [u8]>,
    cancel: &'a AtomicBool,
    progress: &'a dyn Hashing,
}

impl Stream for Hashed<'_> {
    type Input<'s>
        = Input<'s>
    where
        Self: 's;
    type Output = FileDigest;
    type Error = Unhashed;

    fn bytes(&self) -> u64 {
        self.file.bytes
    }

    fn open(&self) -> Result<Input<'_>, Unhashed> {
        // A blob's name says what it must hold. Of weights that is the digest that is computed anyway.
        let name = BlobName::of(&self.file.found);
        let git = matches!(name, Some(BlobName::Git(_)));
        let from = match self.map {
            Some(map) => Origin::Map(map),
            None => Origin::File(File::open(&self.file.found.location)?, vec![0; CHUNK]),
        };
        Ok(Input {
            of: self,
            from,
            name,
            of_git: git.then(|| BlobHasher::git(self.file.bytes)),
            left: 0..0,
            total: 0,
        })
    }

    fn close(&self, input: Input<'_>, sha256: [u8; 32]) -> Result<FileDigest, Unhashed> {
        let file = self.file;
        let found = input.of_git.map_or(BlobName::Sha256(sha256), BlobHasher::finish);
        if let Some(problem) = input.name.and_then(|name| name.mismatch(&file.path, &found)) {
            let blob = file.found.location.display();
            return Err(Unhashed::Other(
                problem
                    .help(format!("the file in the cache is damaged; remove it: rm {blob}"))
                    .help("then run again with the model's id (org/name), which fetches it anew"),
            ));
        }
        let digest = FileDigest { path: file.path.clone(), bytes: file.bytes, sha256 };
        self.progress.file(&digest);
        Ok(digest)
    }
}

/// A file that is being hashed.
struct Input<'a> {
    of: &'a Hashed<'a>,
    from: Origin<'a>,
    name: Option<BlobName>,
    of_git: Option<BlobHasher>,
    /// What of the buffer or of the map is there and not yet taken.
    left: Range<usize>,
    /// Bytes so far.
    total: u64,
}

/// Where a file's bytes come from.
enum Origin<'a> {
    /// The map that weights are read from: what was encoded is what is hashed.
    Map(&'a [u8]),
    /// The file, and a buffer.
    File(File, Vec<u8>),
}

impl BufRead for Input<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.left.is_empty() {
            if self.of.cancel.load(Ordering::Relaxed) {
                return Err(io::Error::other(Stopped));
            }
            self.left = match &mut self.from {
                Origin::Map(map) => self.left.end..map.len().min(self.left.end + CHUNK),
                Origin::File(file, buffer) => 0..file.read(buffer)?,
            };
            let bytes = self.left.len() as u64;
            self.total += bytes;
            let expected = self.of.file.bytes;
            if self.total > expected || bytes == 0 && self.total != expected {
                let what =
                    format!("its length changed: it had {expected} bytes when it was opened");
                return Err(io::Error::other(what));
            }
            if let Some(of_git) = &mut self.of_git {
                of_git.update(self.from.bytes(&self.left));
            }
            self.of.progress.bytes(bytes);
        }
        Ok(self.from.bytes(&self.left))
    }

    fn consume(&mut self, bytes: usize) {
        self.left.start = self.left.end.min(self.left.start + bytes);
    }
}

impl Origin<'_> {
    fn bytes(&self, range: &Range<usize>) -> &[u8] {
        let all = match self {
            Origin::Map(map) => map,
            Origin::File(_, buffer) => buffer.as_slice(),
        };
        all.get(range.clone()).unwrap_or_default()
    }
}

impl Read for Input<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        hash::take(self, into)
    }
}
