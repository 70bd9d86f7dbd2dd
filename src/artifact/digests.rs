//! Digests of a file's entries.
//!
//! `radpack/digests` lists the SHA-256 of every other entry, in directory order; the SHA-256 of that list is the root
//! digest, in hex under the metadata key `radpack.digest`. An entry's digest is over its planes' bytes, plane by
//! plane, alignment gaps left out.

use std::collections::BTreeMap;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::codec::{self, CodecError};
use super::contents::EntrySpec;
use super::layout::{DIGEST_KEY, DIGESTS_ENTRY};
use super::reader::{Artifact, Entry};
use super::writer::Writer;
use crate::diag::{Failure, FailureKind, Result};

/// The digest of one entry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryDigest {
    /// Name of the entry.
    pub name: String,
    /// SHA-256 of its planes' bytes.
    pub sha256: [u8; 32],
}

/// SHA-256 of the parts, one after the other.
pub fn sha256<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> [u8; 32] {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update(part);
    }
    hasher.finalize().into()
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

/// Digest of an entry of an opened file.
pub fn of_entry(entry: &Entry<'_>) -> [u8; 32] {
    sha256((0..entry.encoding().planes.len()).map(|k| entry.plane(k)))
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
    let digests = (0..layout.entries())
        .into_par_iter()
        .filter(|&e| e != own)
        .map(|e| {
            let sha256 = match known.get(&e) {
                Some(digest) => *digest,
                None => of_written(writer, e)?,
            };
            Ok(EntryDigest { name: layout.name(e).unwrap_or_default().to_owned(), sha256 })
        })
        .collect::<Result<Vec<_>>>()?;
    let bytes = encode(&digests);
    writer.write(own, 0, 0, &bytes)?;
    let root = sha256([bytes.as_slice()]);
    writer.set_text(DIGEST_KEY, &hex(&root))?;
    Ok(root)
}

/// Digest of an entry as written so far.
///
/// # Errors
/// The system's error.
pub fn of_written(writer: &Writer, entry: usize) -> Result<[u8; 32]> {
    /// Large enough for disk speed, small enough for every thread to have one.
    const CHUNK: u64 = 1 << 20;
    let mut hasher = Sha256::new();
    let mut buffer = Vec::new();
    for (k, plane) in writer.layout().planes(entry).iter().enumerate() {
        let mut at = 0;
        while at < plane.bytes {
            buffer.resize(CHUNK.min(plane.bytes - at) as usize, 0);
            writer.read_back(entry, k, at, &mut buffer)?;
            hasher.update(&buffer);
            at += buffer.len() as u64;
        }
    }
    Ok(hasher.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sha256_and_hex_are_the_usual_ones() {
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
