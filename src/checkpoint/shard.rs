//! One safetensors file: its header, and its bytes as a read-only map.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;

use memmap2::Mmap;

use super::folder::{Folder, Found};
use super::safetensors::{self, Header};
use crate::diag::Diagnostic;

/// A mapped weight file.
#[derive(Debug)]
pub(super) struct Shard {
    /// Name within the checkpoint.
    pub path: String,
    /// Where its bytes are.
    pub found: Found,
    /// The header's `__metadata__`; empty for other files than safetensors.
    pub metadata: BTreeMap<String, String>,
    map: Mmap,
}

impl Shard {
    /// Maps a safetensors file and reads its header.
    ///
    /// # Errors
    /// Every fault of the header.
    pub fn open(
        folder: &Folder,
        path: &str,
        found: Found,
    ) -> Result<(Shard, Header), Vec<Diagnostic>> {
        let shown = folder.show(path);
        let mut shard = Shard::map(folder, path, found).map_err(|e| vec![e])?;
        let header = safetensors::read_header(&shard.map).map_err(|faults| {
            let diagnostic = |fault: &safetensors::Fault| {
                let problem = Diagnostic::new("checkpoint", format!("{shown}: {fault}"));
                match fault.help() {
                    Some(help) => problem.help(help),
                    None => problem,
                }
            };
            faults.iter().map(diagnostic).collect::<Vec<_>>()
        })?;
        shard.metadata = header.metadata.clone();
        Ok((shard, header))
    }

    /// Maps a file, whatever it holds.
    ///
    /// # Errors
    /// A Git LFS pointer in its stead, or the system's refusal.
    pub fn map(folder: &Folder, path: &str, found: Found) -> Result<Shard, Diagnostic> {
        if let Some(pointer) = folder.lfs_pointer(path, &found)? {
            return Err(pointer);
        }
        let map = map_file(&found).map_err(|e| folder.io("map", path, &e))?;
        // Weights are read front to back, in large pieces.
        #[cfg(unix)]
        let _ = map.advise(memmap2::Advice::Sequential);
        Ok(Shard { path: path.to_owned(), found, metadata: BTreeMap::new(), map })
    }

    /// All its bytes.
    pub fn all(&self) -> &[u8] {
        &self.map
    }

    /// The bytes of a range; `None` outside the file.
    pub fn bytes(&self, range: Range<u64>) -> Option<&[u8]> {
        let start = usize::try_from(range.start).ok()?;
        let end = usize::try_from(range.end).ok()?;
        self.map.get(start..end)
    }

    /// Tells the system that the pages wholly inside the range will not be read again soon, so that they stop
    /// counting as this process's memory. Reading them again is correct, and fetches them again.
    pub fn release(&self, range: Range<u64>) {
        #[cfg(unix)]
        {
            /// Largest page of the systems we run on; ranges are cut to it so that no neighbour's page is dropped.
            const PAGE: u64 = 65_536;
            let start = range.start.next_multiple_of(PAGE);
            let end = range.end.min(self.map.len() as u64) / PAGE * PAGE;
            if let (Ok(start), Some(length)) = (usize::try_from(start), end.checked_sub(start))
                && let (Ok(length), true) = (usize::try_from(length), length > 0)
            {
                // SAFETY: the map is shared and read-only, so the pages are the file's own: a later read through a
                // borrowed slice faults the same bytes in again. start + length lies within the map.
                let _ = unsafe {
                    self.map.unchecked_advise_range(
                        memmap2::UncheckedAdvice::DontNeed,
                        start,
                        length,
                    )
                };
            }
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

fn map_file(found: &Found) -> io::Result<Mmap> {
    let file = File::open(&found.location)?;
    // SAFETY: the map is read-only and never aliased by a writer in this process. Another process that shortens the
    // file while we run makes reads fail with SIGBUS; that is the usual contract of mapped model files, and the
    // source digests taken over the run tell when a file was changed.
    let map = unsafe { Mmap::map(&file) }?;
    if map.len() as u64 != found.bytes {
        return Err(io::Error::other("the file changed while it was opened"));
    }
    Ok(map)
}
