//! Writing a container whose layout is fixed.
//!
//! The file is made as `OUT.partial` beside OUT and takes OUT's place in one rename at the end, after everything
//! reached the disk. Its header is written last, so a partial file never opens as a container. Killed at any moment,
//! a writer leaves OUT as it was, and at most a partial file that the next one replaces or goes on with.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use memmap2::Mmap;

use super::failing::operation;
use super::plan::Layout;
use super::reader::PlaneAt;
use crate::diag::{Diagnostic, Failure, FailureKind, Problems, Result, count, list, size};

/// A container being written.
///
/// [`Writer::write`] may be called from any number of threads, in any order; the bytes of the file do not depend on
/// it. Dropping an unfinished writer removes the partial file.
#[derive(Debug)]
pub struct Writer {
    layout: Layout,
    file: File,
    partial: PathBuf,
    out: PathBuf,
    /// Written ranges of every plane, entry by entry.
    written: Vec<Vec<Mutex<Coverage>>>,
    texts: Mutex<BTreeSet<String>>,
    /// Bytes that were written so far, anywhere.
    put: AtomicU64,
    /// The file as it is, to read from, once somebody wants it; `None` where the system has no map of it.
    map: OnceLock<Option<Mmap>>,
    finished: bool,
    /// Whether the partial file stays when the writer is dropped unfinished.
    stays: bool,
}

/// Disjoint, sorted, non-adjacent ranges.
#[derive(Debug, Default)]
struct Coverage {
    ranges: Vec<(u64, u64)>,
}

impl Coverage {
    /// Adds a range; false when part of it was there already.
    fn add(&mut self, from: u64, to: u64) -> bool {
        let at = self.ranges.partition_point(|r| r.1 <= from);
        if self.ranges.get(at).is_some_and(|r| r.0 < to) {
            return false;
        }
        let joins_left = at > 0 && self.ranges.get(at - 1).is_some_and(|r| r.1 == from);
        let joins_right = self.ranges.get(at).is_some_and(|r| r.0 == to);
        match (joins_left, joins_right) {
            (true, true) => {
                let right = self.ranges.remove(at);
                self.ranges[at - 1].1 = right.1;
            }
            (true, false) => self.ranges[at - 1].1 = to,
            (false, true) => self.ranges[at].0 = from,
            (false, false) => self.ranges.insert(at, (from, to)),
        }
        true
    }

    fn bytes(&self) -> u64 {
        self.ranges.iter().map(|r| r.1 - r.0).sum()
    }
}

/// The partial file of `out`: the same name with `.partial` behind it.
pub fn partial_path(out: &Path) -> PathBuf {
    let mut name = out.as_os_str().to_owned();
    name.push(".partial");
    PathBuf::from(name)
}

/// The first of `inputs` that is the same file as `out` (same device and inode, links followed); `None` when `out`
/// does not exist or is none of them. A caller refuses such an output, because the rename would replace its source.
pub fn same_file<'a>(out: &Path, inputs: impl IntoIterator<Item = &'a Path>) -> Option<&'a Path> {
    let out = std::fs::metadata(out).ok()?;
    inputs.into_iter().find(|input| {
        std::fs::metadata(input).is_ok_and(|i| (i.dev(), i.ino()) == (out.dev(), out.ino()))
    })
}

impl Writer {
    /// Creates `OUT.partial` for the container `out` and reserves its whole size on the disk. A partial file that a
    /// killed writer left is replaced. When `out` is a symbolic link, the file it leads to will be replaced.
    ///
    /// # Errors
    /// Another writer is making the same file, `out` is a folder, or the system's error (no space, no permission).
    pub fn create(out: &Path, layout: Layout) -> Result<Writer> {
        let writer = Writer::open(out, layout, false)?;
        writer.file.set_len(0).map_err(|e| writer.fail("empty", &e))?;
        writer.reserve()?;
        Ok(writer)
    }

    /// Goes on with the `OUT.partial` that an earlier writer of a file of this size left, or creates it; says which. The
    /// partial file stays when this writer is dropped unfinished. What it holds counts as unwritten until
    /// [`Writer::keep`] says otherwise; bytes that belong to no plane are made zero.
    ///
    /// # Errors
    /// As [`Writer::create`].
    pub fn resume(out: &Path, layout: Layout) -> Result<(Writer, bool)> {
        let writer = Writer::open(out, layout, true)?;
        let found = writer.file.metadata().map_err(|e| writer.fail("examine", &e))?.len();
        let resumed = found == writer.layout.file_bytes();
        if resumed {
            writer.clear_gaps().map_err(|e| writer.fail("write", &e))?;
        } else {
            writer.file.set_len(0).map_err(|e| writer.fail("empty", &e))?;
        }
        writer.reserve()?;
        Ok((writer, resumed))
    }

    /// Writes zeros wherever no plane lies: another file of the same size may have been in the making here.
    fn clear_gaps(&self) -> io::Result<()> {
        static ZEROS: [u8; 1 << 16] = [0; 1 << 16];
        let planes = (0..self.layout.entries()).flat_map(|e| self.layout.planes(e));
        let mut taken: Vec<(u64, u64)> =
            planes.map(|p| (p.offset, p.offset.saturating_add(p.bytes))).collect();
        taken.sort_unstable();
        let end = self.layout.file_bytes();
        let mut at = 0;
        for (from, to) in taken.into_iter().chain([(end, end)]) {
            while at < from {
                let n = (from - at).min(ZEROS.len() as u64);
                self.put(ZEROS.get(..n as usize).unwrap_or_default(), at)?;
                at += n;
            }
            at = at.max(to);
        }
        Ok(())
    }

    /// Claims the partial file as it is.
    fn open(out: &Path, layout: Layout, stays: bool) -> Result<Writer> {
        let out = match std::fs::canonicalize(out) {
            Ok(existing) if existing.is_dir() => {
                let message = format!("the output {} is a folder", out.display());
                return Err(Failure::plain(FailureKind::Usage, message));
            }
            Ok(existing) => existing,
            Err(_) => out.to_owned(),
        };
        let partial = partial_path(&out);
        let file = claim(&partial)?;
        let planes = |e| layout.planes(e).iter().map(|_| Mutex::default()).collect();
        let written = (0..layout.entries()).map(planes).collect();
        // From here on, dropping the writer removes the partial file, unless it is to stay.
        Ok(Writer {
            written,
            layout,
            file,
            partial,
            out,
            texts: Mutex::default(),
            put: AtomicU64::new(0),
            map: OnceLock::new(),
            finished: false,
            stays,
        })
    }

    /// Gives the partial file its whole size on the disk.
    fn reserve(&self) -> Result<()> {
        let bytes = self.layout.file_bytes();
        operation().and_then(|()| reserve(&self.file, bytes)).map_err(|e| match e.kind() {
            io::ErrorKind::StorageFull => Failure::plain(
                FailureKind::Failed,
                format!("no room for {} ({}): {e}", self.out.display(), size(bytes)),
            ),
            _ => self.fail("reserve space for", &e),
        })
    }

    /// The partial file.
    pub fn partial(&self) -> &Path {
        &self.partial
    }

    /// Takes an entry as written: the caller has read it back and found what it wanted.
    ///
    /// # Errors
    /// Part of the entry was written by this writer.
    pub fn keep(&self, entry: usize) -> Result<()> {
        for (plane, at) in self.layout.planes(entry).iter().enumerate() {
            let coverage = self.written.get(entry).and_then(|e| e.get(plane));
            let fresh = coverage.is_some_and(|c| {
                let mut c = c.lock().unwrap_or_else(PoisonError::into_inner);
                at.bytes == 0 || c.add(0, at.bytes)
            });
            if !fresh {
                return Err(self.misuse(entry, plane, "is kept, and was written already".into()));
            }
        }
        Ok(())
    }

    /// The layout being written.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Writes bytes of a plane at an offset inside it.
    ///
    /// # Errors
    /// The system's error (a short write or a full disk is one), or a range that leaves the plane or was written
    /// already.
    pub fn write(&self, entry: usize, plane: usize, offset: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let at = self.place(entry, plane, offset, bytes.len())?;
        let coverage = self.written.get(entry).and_then(|e| e.get(plane));
        let fresh = coverage.is_some_and(|c| {
            let mut c = c.lock().unwrap_or_else(PoisonError::into_inner);
            c.add(offset, offset + bytes.len() as u64)
        });
        if !fresh {
            return Err(self.misuse(
                entry,
                plane,
                format!("{} bytes at {offset} were written already", bytes.len()),
            ));
        }
        self.put(bytes, at).map_err(|e| self.fail("write", &e))
    }

    /// Bytes of a plane as they are in the file. They must have been written: what is written later must not be looked at
    /// meanwhile.
    ///
    /// # Errors
    /// The system's error, or a range that leaves the plane.
    pub fn read_back(
        &self,
        entry: usize,
        plane: usize,
        offset: u64,
        bytes: u64,
    ) -> Result<Cow<'_, [u8]>> {
        let failed = |e| self.fail("read back", &e);
        let length =
            usize::try_from(bytes).map_err(|_| failed(io::ErrorKind::OutOfMemory.into()))?;
        let at = self.place(entry, plane, offset, length)?;
        operation().map_err(failed)?;
        let map = self.map.get_or_init(|| {
            // SAFETY: the map is read-only. This process writes to the file only what nobody reads from the map yet; should another
            // one shorten it, reading ends with SIGBUS, as for every file that is mapped.
            unsafe { Mmap::map(&self.file) }.ok()
        });
        let mapped = map.as_ref().and_then(|map| {
            let at = usize::try_from(at).ok()?;
            map.get(at..at.checked_add(length)?)
        });
        if let Some(mapped) = mapped {
            return Ok(Cow::Borrowed(mapped));
        }
        let mut read = vec![0; length];
        self.file.read_exact_at(&mut read, at).map_err(failed)?;
        Ok(Cow::Owned(read))
    }

    /// Sets a metadata text that was planned as [`super::MetaValue::Later`].
    ///
    /// # Errors
    /// No such key, another length than planned, NUL in it, or the system's error.
    pub fn set_text(&self, key: &str, value: &str) -> Result<()> {
        let internal =
            |why: String| Failure::plain(FailureKind::Failed, format!("metadata `{key}`: {why}"));
        let later = self
            .layout
            .later(key)
            .ok_or_else(|| internal("no text to come later was planned".into()))?;
        if value.len() != later.bytes || value.contains('\0') {
            return Err(internal(format!("{} bytes, {} were planned", value.len(), later.bytes)));
        }
        self.put(value.as_bytes(), later.offset).map_err(|e| self.fail("write", &e))?;
        self.texts.lock().unwrap_or_else(PoisonError::into_inner).insert(key.to_owned());
        Ok(())
    }

    /// Writes the tables, brings everything to the disk and puts the file in OUT's place.
    ///
    /// # Errors
    /// Planes that are not fully written and texts that never came, all together, or the system's error; then OUT is
    /// as it was.
    pub fn finish(mut self) -> Result<PathBuf> {
        self.check_complete()?;
        self.write_tables().map_err(|e| self.fail("write", &e))?;
        publish(&self.file, &self.partial, &self.out)?;
        self.finished = true;
        Ok(std::mem::take(&mut self.out))
    }

    fn check_complete(&self) -> Result<()> {
        let mut problems = Problems::new();
        for (e, planes) in self.written.iter().enumerate() {
            for (p, (coverage, at)) in planes.iter().zip(self.layout.planes(e)).enumerate() {
                let n = coverage.lock().unwrap_or_else(PoisonError::into_inner).bytes();
                if n != at.bytes {
                    let name = self.layout.name(e).unwrap_or_default();
                    let (n, of) = (count(n), count(at.bytes));
                    let message = format!("`{name}` plane {p}: {n} of {of} bytes were written");
                    problems.push(Diagnostic::new("container", message));
                }
            }
        }
        let texts = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        let missing: Vec<&str> =
            self.layout.all_later().map(|(k, _)| k).filter(|k| !texts.contains(*k)).collect();
        if !missing.is_empty() {
            let message = format!("no text came for metadata {}", list(&missing, 5));
            problems.push(Diagnostic::new("container", message));
        }
        problems.finish(FailureKind::Failed, "the container is not complete", ())
    }

    /// Everything but the texts that came later, the header last.
    fn write_tables(&self) -> io::Result<()> {
        let tables = self.layout.tables();
        let mut later: Vec<(usize, usize)> =
            self.layout.all_later().map(|(_, t)| (t.offset as usize, t.bytes)).collect();
        later.sort_unstable();
        let header = super::layout::HEADER_BYTES as usize;
        let mut at = header;
        for (offset, len) in later.into_iter().chain([(tables.len(), 0)]) {
            let part = tables.get(at..offset).unwrap_or_default();
            self.put(part, at as u64)?;
            at = offset + len;
        }
        self.put(tables.get(..header).unwrap_or_default(), 0)
    }

    /// Every byte of the file goes through here.
    fn put(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        operation()?;
        self.file.write_all_at(bytes, at)?;
        let bytes = bytes.len() as u64;
        let before = self.put.fetch_add(bytes, Ordering::Relaxed);
        if before / BEHIND < (before + bytes) / BEHIND {
            begin_to_disk(&self.file);
        }
        Ok(())
    }

    fn place(&self, entry: usize, plane: usize, offset: u64, len: usize) -> Result<u64> {
        let place = self.layout.plane(entry, plane);
        let inside = |p: &PlaneAt| offset.checked_add(len as u64).is_some_and(|e| e <= p.bytes);
        match place.filter(inside) {
            Some(p) => Ok(p.offset + offset),
            None => {
                let has = place.map_or(0, |p| p.bytes);
                Err(self.misuse(
                    entry,
                    plane,
                    format!("{len} bytes at {offset} leave its {has} bytes"),
                ))
            }
        }
    }

    fn misuse(&self, entry: usize, plane: usize, why: String) -> Failure {
        let name = self.layout.name(entry).unwrap_or("no such entry");
        Failure::plain(FailureKind::Failed, format!("`{name}` plane {plane}: {why}"))
    }

    fn fail(&self, doing: &str, error: &io::Error) -> Failure {
        Failure::io(doing, &self.partial, error)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if !self.finished && !self.stays {
            // Nothing can be done about an error here; the next writer replaces the file.
            let _ = std::fs::remove_file(&self.partial);
        }
    }
}

/// Brings a partial file to the disk and puts it in the place of `out`, in one rename.
pub(super) fn publish(file: &File, partial: &Path, out: &Path) -> Result<()> {
    let synced = operation().and_then(|()| file.sync_all());
    synced.map_err(|e| Failure::io("bring to disk", partial, &e))?;
    let renamed = operation().and_then(|()| std::fs::rename(partial, out));
    renamed.map_err(|e| Failure::io("rename", partial, &e))?;
    let folder = match out.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    };
    operation()
        .and_then(|()| File::open(folder))
        .and_then(|f| f.sync_all())
        .map_err(|e| Failure::io("bring to disk the folder", folder, &e))
}

/// How often, and how long each time, a locked partial file is waited for.
const WAITS: u32 = 20;
const WAIT: std::time::Duration = std::time::Duration::from_millis(25);

/// Opens the partial file and locks it for this process.
pub(super) fn claim(partial: &Path) -> Result<File> {
    let fail = |doing: &'static str| move |e: io::Error| Failure::io(doing, partial, &e);
    // A writer that finishes renames its partial file away between our opening and our locking it; then the lock is
    // on what has become its output, and a new file must be opened. Each round means another writer finished, or that one
    // is waited for: where this process starts another, that one holds all of its locks for a moment, released ones too.
    let mut waits = 0;
    for _ in 0..16 + WAITS {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .custom_flags(libc::O_NOFOLLOW)
            .open(partial)
            .map_err(fail("create"))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) if waits < WAITS => {
                waits += 1;
                std::thread::sleep(WAIT);
                continue;
            }
            Err(TryLockError::WouldBlock) => {
                return Err(Failure::plain(
                    FailureKind::Failed,
                    format!("{} is being written by another running conversion", partial.display()),
                ));
            }
            Err(TryLockError::Error(e)) => return Err(fail("lock")(e)),
        }
        let own = file.metadata().map_err(fail("examine"))?;
        let named = std::fs::symlink_metadata(partial);
        if named.is_ok_and(|n| (n.dev(), n.ino()) == (own.dev(), own.ino())) {
            return Ok(file);
        }
    }
    Err(Failure::plain(
        FailureKind::Failed,
        format!("{} keeps being replaced by other conversions", partial.display()),
    ))
}

/// The disk begins to take what was written after so many bytes, while others are being made: left to itself the system
/// waits for a tenth of the memory, and the file would be finished by waiting for the disk.
const BEHIND: u64 = 32 << 20;

/// Has the system begin to bring to the disk what was written and is not there. A hint: what fails is found when the file is
/// finished.
fn begin_to_disk(file: &File) {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd;
        // SAFETY: `sync_file_range` takes a descriptor, which `file` keeps open during the call, and numbers. From 0 to 0 is
        // the whole file.
        unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = file;
}

/// Sets the file's size and reserves its blocks where the file system can.
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd;
        let len = libc::off_t::try_from(bytes).map_err(|_| io::ErrorKind::FileTooLarge)?;
        // SAFETY: `fallocate` takes a descriptor, which `file` keeps open during the call, and three numbers.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, len) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        // Not every file system can reserve; writing then finds a full disk.
        if !matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL)) {
            return Err(error);
        }
    }
    file.set_len(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coverage_joins_ranges_and_refuses_overlaps() {
        let mut c = Coverage::default();
        assert!(c.add(10, 20) && c.add(30, 40) && c.add(0, 5));
        assert!(!c.add(19, 21) && !c.add(5, 11) && !c.add(0, 50) && !c.add(35, 36));
        assert!(c.add(20, 30) && c.add(5, 10));
        assert_eq!(c.ranges, [(0, 40)]);
        assert_eq!(c.bytes(), 40);
    }
}
