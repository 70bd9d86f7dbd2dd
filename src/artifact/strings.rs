//! The string section: NUL-terminated byte strings, each stored once by a writer.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fmt;

/// A string of a container: bytes without NUL, usually but not necessarily UTF-8.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Text<'a>(pub(super) &'a [u8]);

impl<'a> Text<'a> {
    /// The bytes.
    pub fn bytes(self) -> &'a [u8] {
        self.0
    }

    /// The text, if it is UTF-8.
    pub fn as_str(self) -> Option<&'a str> {
        std::str::from_utf8(self.0).ok()
    }

    /// Whether it has no bytes.
    pub fn is_empty(self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Text<'_> {
    /// Bytes that are not UTF-8 print as `\xNN`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&escape(self.0))
    }
}

impl fmt::Debug for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", escape(self.0))
    }
}

/// UTF-8 text of any bytes; those that are not UTF-8 become `\xNN`.
pub(super) fn escape(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        out.push_str(chunk.valid());
        for byte in chunk.invalid() {
            out.push_str(&format!("\\x{byte:02x}"));
        }
    }
    out
}

/// The bytes up to the first NUL.
pub(super) fn until_nul(bytes: &[u8]) -> &[u8] {
    CStr::from_bytes_until_nul(bytes).map_or(bytes, CStr::to_bytes)
}

/// Which entry a name means: the first that has it.
///
/// A hostile file can make thousands of names of one megabyte that overlap. So lengths are found from the back, each
/// byte of the section read once, and only strings of one length at different offsets are ever compared.
#[derive(Debug, Clone, Default)]
pub(super) struct NameIndex {
    /// `(length, offset, first entry)`, sorted by length and then by the bytes.
    rows: Vec<(u64, u64, u32)>,
}

impl NameIndex {
    /// An index over the name offsets of entries 0, 1, 2, …; every offset lies inside `blob`, which ends in NUL.
    pub(super) fn new(blob: &[u8], offsets: impl Iterator<Item = u64>) -> NameIndex {
        let mut rows: Vec<(u64, u64, u32)> =
            offsets.zip(0u32..).map(|(offset, entry)| (0, offset, entry)).collect();
        rows.sort_unstable_by_key(|&(_, offset, entry)| (offset, entry));
        rows.dedup_by_key(|row| row.1);
        let (mut next, mut end) = (blob.len() as u64, blob.len() as u64);
        for row in rows.iter_mut().rev() {
            let span = bytes_of(blob, row.1, next - row.1);
            end = CStr::from_bytes_until_nul(span).map_or(end, |s| row.1 + s.count_bytes() as u64);
            next = row.1;
            row.0 = end - row.1;
        }
        rows.sort_unstable_by(|a, b| {
            (a.0, bytes_of(blob, a.1, a.0), a.2).cmp(&(b.0, bytes_of(blob, b.1, b.0), b.2))
        });
        NameIndex { rows }
    }

    /// Offsets in ascending order, each with the first entry whose name equals the string there.
    pub(super) fn firsts(&self, blob: &[u8]) -> Vec<(u64, u32)> {
        let equal = |a: &(u64, u64, u32), b: &(u64, u64, u32)| {
            a.0 == b.0 && bytes_of(blob, a.1, a.0) == bytes_of(blob, b.1, b.0)
        };
        let mut out = Vec::with_capacity(self.rows.len());
        for group in self.rows.chunk_by(equal) {
            let first = group.iter().map(|r| r.2).min().unwrap_or(0);
            out.extend(group.iter().map(|r| (r.1, first)));
        }
        out.sort_unstable();
        out
    }

    /// The first entry of that name.
    pub(super) fn find(&self, blob: &[u8], name: &[u8]) -> Option<usize> {
        let key = (name.len() as u64, name);
        let at = self.rows.partition_point(|r| (r.0, bytes_of(blob, r.1, r.0)) < key);
        let row = self.rows.get(at)?;
        ((row.0, bytes_of(blob, row.1, row.0)) == key).then_some(row.2 as usize)
    }
}

fn bytes_of(blob: &[u8], offset: u64, len: u64) -> &[u8] {
    let at = offset as usize;
    blob.get(at..at.saturating_add(len as usize)).unwrap_or_default()
}

/// Collects a file's strings, each once, in the order first asked for.
#[derive(Debug, Clone)]
pub(super) struct Interner {
    blob: Vec<u8>,
    offsets: BTreeMap<Vec<u8>, u64>,
}

impl Interner {
    /// An empty section: offset 0 is the empty string.
    pub(super) fn new() -> Interner {
        Interner { blob: vec![0], offsets: BTreeMap::from([(Vec::new(), 0)]) }
    }

    /// Offset of a string without NUL.
    pub(super) fn add(&mut self, text: &[u8]) -> u64 {
        if let Some(&offset) = self.offsets.get(text) {
            return offset;
        }
        let offset = self.append(text);
        self.offsets.insert(text.to_vec(), offset);
        offset
    }

    /// Offset of a string of `len` bytes that is known only later and shares its place with no other.
    pub(super) fn reserve(&mut self, len: usize) -> u64 {
        self.append(&vec![b'-'; len])
    }

    fn append(&mut self, text: &[u8]) -> u64 {
        let offset = self.blob.len() as u64;
        self.blob.extend_from_slice(text);
        self.blob.push(0);
        offset
    }

    /// The section.
    pub(super) fn into_blob(self) -> Vec<u8> {
        self.blob
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_stored_once_in_order_of_first_use() {
        let mut s = Interner::new();
        assert_eq!((s.add(b""), s.add(b"ab"), s.add(b"c"), s.add(b"ab")), (0, 1, 4, 1));
        assert_eq!(
            (s.reserve(2), s.reserve(2), s.add(b"--")),
            (6, 9, 12),
            "reserved strings are not shared"
        );
        assert_eq!(s.into_blob(), b"\0ab\0c\0--\0--\0--\0");
    }

    #[test]
    fn the_first_of_equal_names_is_found_and_tails_are_names_too() {
        let blob = b"\0abc\0abc\0b\0";
        let index = NameIndex::new(blob, [5, 1, 2, 0, 9, 1].into_iter());
        let find = |name: &[u8]| index.find(blob, name);
        assert_eq!(find(b"abc"), Some(0));
        assert_eq!(find(b"bc"), Some(2));
        assert_eq!(find(b""), Some(3));
        assert_eq!(find(b"b"), Some(4));
        assert_eq!((find(b"c"), find(b"abcd"), find(b"abd")), (None, None, None));
        assert_eq!(index.firsts(blob), [(0, 3), (1, 0), (2, 2), (5, 0), (9, 4)]);
    }

    #[test]
    fn bytes_that_are_not_utf8_print_escaped() {
        assert_eq!(Text(b"a\xffb\xe2\x82").to_string(), "a\\xffb\\xe2\\x82");
        assert_eq!(Text("Ω".as_bytes()).as_str(), Some("Ω"));
        assert_eq!(until_nul(b"ab\0c"), b"ab");
    }
}
