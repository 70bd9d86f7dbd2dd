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
    data: Data,
}

/// What of the file is at hand.
#[derive(Debug)]
enum Data {
    /// All of it.
    Map(Mmap),
    /// Its first bytes: the header and what came with it.
    Head(Vec<u8>),
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
        let whole = shard.found.bytes;
        let header = safetensors::read_header_of(shard.all(), whole).map_err(|faults| {
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
        if folder.whole_length(path).is_some() {
            let head = std::fs::read(&found.location).map_err(|e| folder.io("read", path, &e))?;
            let data = Data::Head(head);
            return Ok(Shard { path: path.to_owned(), found, metadata: BTreeMap::new(), data });
        }
        let map = map_file(&found).map_err(|e| folder.io("map", path, &e))?;
        // Weights are read front to back, in large pieces.
        #[cfg(unix)]
        let _ = map.advise(memmap2::Advice::Sequential);
        let data = Data::Map(map);
        Ok(Shard { path: path.to_owned(), found, metadata: BTreeMap::new(), data })
    }

    /// All its bytes that are at hand.
    pub fn all(&self) -> &[u8] {
        match &self.data {
            Data::Map(map) => map,
            Data::Head(head) => head,
        }
    }

    /// Whether only the file's first bytes are at hand.
    pub fn is_head(&self) -> bool {
        matches!(self.data, Data::Head(_))
    }

    /// The bytes of a range; `None` outside the file, or outside what is at hand of it.
    pub fn bytes(&self, range: Range<u64>) -> Option<&[u8]> {
        let start = usize::try_from(range.start).ok()?;
        let end = usize::try_from(range.end).ok()?;
        self.all().get(start..end)
    }

    /// Tells the system that the pages wholly inside the range will not be read again soon, so that they stop
    /// counting as this process's memory. Reading them again is correct, and fetches them again.
    pub fn release(&self, range: Range<u64>) {
        #[cfg(unix)]
        {
            /// Largest page of the systems we run on; ranges are cut to it so that no neighbour's page is dropped.
            const PAGE: u64 = 65_536;
            let Data::Map(map) = &self.data else { return };
            let start = range.start.next_multiple_of(PAGE);
            let end = range.end.min(map.len() as u64) / PAGE * PAGE;
            if let (Ok(start), Some(length)) = (usize::try_from(start), end.checked_sub(start))
                && let (Ok(length), true) = (usize::try_from(length), length > 0)
            {
                // SAFETY: the map is shared and read-only, so the pages are the file's own: a later read through a
                // borrowed slice faults the same bytes in again. start + length lies within the map.
                let _ = unsafe {
                    map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, length)
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
