//! Digests of a file's entries.
//!
//! `radpack/digests` lists the SHA-256 of every other entry, in directory order; the SHA-256 of that list is the root
//! digest, in hex under the metadata key `radpack.digest`. An entry's digest is over its planes' bytes, plane by
//! plane, alignment gaps left out.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, BufRead};

use serde::{Deserialize, Serialize};

use super::codec::{self, CodecError};
use super::contents::EntrySpec;
use super::layout::{DIGEST_KEY, DIGESTS_ENTRY};
use super::reader::{Artifact, Entry};
use super::writer::Writer;
use crate::diag::{Failure, FailureKind, Result};
use crate::hash::{self, Item, Parts, sha256};

/// The digest of one entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryDigest {
    /// Name of the entry.
    pub name: String,
    /// SHA-256 of its planes' bytes.
    pub sha256: [u8; 32],
}

/// Lower-case hex.
pub fn hex(digest: &[u8; 32]) -> String {
    digest.iter().map(|b| format!("{b:02x}")).collect()
}

/// The digest written in 64 lower-case hex digits.
pub fn from_hex(text: &[u8]) -> Option<[u8; 32]> {
    let digit = |b: u8| match b {
        b'0'..=b'9' => Some(b - b'0'),
        b'a'..=b'f' => Some(b - b'a' + 10),
        _ => None,
    };
    let pairs = text.as_chunks::<2>();
    if pairs.0.len() != 32 || !pairs.1.is_empty() {
        return None;
    }
    let mut out = [0; 32];
    for (slot, [high, low]) in out.iter_mut().zip(pairs.0) {
        *slot = digit(*high)? << 4 | digit(*low)?;
    }
    Some(out)
}

/// An entry's planes as slices.
fn planes<'a>(entry: &Entry<'a>) -> Vec<&'a [u8]> {
    (0..entry.encoding().planes.len()).map(|k| entry.plane(k)).collect()
}

/// Digest of an entry of an opened file.
pub fn of_entry(entry: &Entry<'_>) -> [u8; 32] {
    sha256(planes(entry))
}

/// An entry of an opened file, to be hashed with others.
pub fn item<'a>(entry: &Entry<'a>) -> Item<'a> {
    let planes = planes(entry);
    Item::new(entry.plane_bytes(), move || Ok(Parts::new(planes.clone())))
}

/// Bytes of `radpack/digests` for a file with these other entries.
pub fn encoded_len<'a>(names: impl IntoIterator<Item = &'a str>) -> u64 {
    names.into_iter().fold(8, |n, name| n + 8 + name.len() as u64 + 32)
}

/// The entry `radpack/digests` for a directory that has these other entries.
pub fn entry_spec(others: &[EntrySpec]) -> EntrySpec {
    EntrySpec::opaque(DIGESTS_ENTRY, encoded_len(others.iter().map(|e| e.name.as_str())))
}

/// The bytes of `radpack/digests`.
pub fn encode(digests: &[EntryDigest]) -> Vec<u8> {
    codec::encode(&digests)
}

/// Reads `radpack/digests`, whose own digest is the root digest.
///
/// # Errors
/// Other bytes than the root digest says, or a malformed list.
pub fn decode(bytes: &[u8], root: &[u8; 32]) -> std::result::Result<Vec<EntryDigest>, CodecError> {
    codec::decode(bytes, root)
}

/// The list of an opened file, which its root digest vouches for.
///
/// # Errors
/// No root digest, no list, other bytes than the root digest says, or a malformed list.
pub fn of(artifact: &Artifact) -> std::result::Result<Vec<EntryDigest>, CodecError> {
    let missing = |what: &str| CodecError::Malformed(format!("the file has no {what}"));
    let root = artifact.meta_text(DIGEST_KEY).map(|t| t.to_string());
    let root = root.and_then(|text| from_hex(text.as_bytes()));
    let root = root.ok_or_else(|| missing("root digest"))?;
    let entry = artifact.find(DIGESTS_ENTRY).ok_or_else(|| missing("list of digests"))?;
    decode(entry.plane(0), &root)
}

/// Digests every entry as written, writes `radpack/digests`, sets the root digest and returns it. Digests that the
/// caller knows already (by position) are taken from `known`; the other entries are read back, in parallel.
///
/// # Errors
/// The system's error, or a layout without `radpack/digests` of the right size.
pub fn seal(writer: &Writer, known: &BTreeMap<usize, [u8; 32]>) -> Result<[u8; 32]> {
    let layout = writer.layout();
    let own = layout.entry(DIGESTS_ENTRY).ok_or_else(|| {
        Failure::plain(FailureKind::Failed, format!("the layout has no entry {DIGESTS_ENTRY}"))
    })?;
    let others = || (0..layout.entries()).filter(|&e| e != own);
    let unknown: Vec<usize> = others().filter(|e| !known.contains_key(e)).collect();
    let items: Vec<Item<'_>> = unknown.iter().map(|&e| item_written(writer, e)).collect();
    let mut all = known.clone();
    for (entry, found) in unknown.iter().zip(hash::each(&items)) {
        all.insert(*entry, found.map_err(failure)?);
    }
    let digest = |e: usize| EntryDigest {
        name: layout.name(e).unwrap_or_default().to_owned(),
        sha256: all.get(&e).copied().unwrap_or_default(),
    };
    let digests: Vec<EntryDigest> = others().map(digest).collect();
    let bytes = encode(&digests);
    writer.write(own, 0, 0, &bytes)?;
    let root = sha256([bytes.as_slice()]);
    writer.set_text(DIGEST_KEY, &hex(&root))?;
    Ok(root)
}

/// The writer's own failure, which an error of reading carries.
pub fn failure(error: io::Error) -> Failure {
    match error.get_ref().and_then(|e| e.downcast_ref::<Failure>()) {
        Some(failure) => failure.clone(),
        None => Failure::plain(FailureKind::Failed, format!("cannot read back: {error}")),
    }
}

/// Digest of an entry as written so far.
///
/// # Errors
/// The system's error.
pub fn of_written(writer: &Writer, entry: usize) -> Result<[u8; 32]> {
    hash::read(Written::new(writer, entry)).map_err(failure)
}

/// An entry as written so far, to be hashed with others.
pub fn item_written(writer: &Writer, entry: usize) -> Item<'_> {
    let bytes = writer.layout().planes(entry).iter().fold(0u64, |n, p| n.saturating_add(p.bytes));
    Item::new(bytes, move || Ok(Written::new(writer, entry)))
}

/// An entry's planes, read back one after the other.
struct Written<'a> {
    writer: &'a Writer,
    entry: usize,
    plane: usize,
    /// Bytes of the plane that were read.
    at: u64,
    held: Cow<'a, [u8]>,
    taken: usize,
}

impl<'a> Written<'a> {
    fn new(writer: &'a Writer, entry: usize) -> Written<'a> {
        Written { writer, entry, plane: 0, at: 0, held: Cow::Borrowed(&[]), taken: 0 }
    }
}

impl BufRead for Written<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        /// Few enough calls, and small enough to be copied where there is no map.
        const CHUNK: u64 = 1 << 20;
        while self.taken >= self.held.len() {
            let Some(plane) = self.writer.layout().planes(self.entry).get(self.plane) else {
                break;
            };
            if self.at >= plane.bytes {
                (self.plane, self.at) = (self.plane + 1, 0);
                continue;
            }
            let bytes = CHUNK.min(plane.bytes - self.at);
            self.held = self
                .writer
                .read_back(self.entry, self.plane, self.at, bytes)
                .map_err(io::Error::other)?;
            (self.at, self.taken) = (self.at + bytes, 0);
        }
        Ok(self.held.get(self.taken..).unwrap_or_default())
    }

    fn consume(&mut self, bytes: usize) {
        self.taken = self.held.len().min(self.taken + bytes);
    }
}

impl io::Read for Written<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        hash::take(self, into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_is_the_usual_one() {
        let abc = sha256([b"a".as_slice(), b"bc"]);
        let text = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"; // FIPS 180-2, "abc"
        assert_eq!(hex(&abc), text);
        assert_eq!(from_hex(text.as_bytes()), Some(abc));
        assert_eq!(from_hex(&text.as_bytes()[1..]), None);
        assert_eq!(from_hex(text.to_uppercase().as_bytes()), None);
    }

    #[test]
    fn the_list_has_the_planned_length_and_reads_back() {
        let list: Vec<EntryDigest> = ["a", "radpack/manifest.json"]
            .map(|n| EntryDigest { name: n.into(), sha256: [7; 32] })
            .into();
        let bytes = encode(&list);
        assert_eq!(bytes.len() as u64, encoded_len(["a", "radpack/manifest.json"]));
        assert_eq!(decode(&bytes, &sha256([bytes.as_slice()])), Ok(list));
        assert!(decode(&bytes, &[0; 32]).is_err());
    }
}
