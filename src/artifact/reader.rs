//! An opened container.

use std::fs::File;
use std::path::Path;
use std::sync::OnceLock;

use memmap2::Mmap;

use super::contents::{Contents, EntrySpec, MetaValue, ProfileShare};
use super::layout::{DIGEST_KEY, HEADER_BYTES, META_FLOAT, META_INT, META_TEXT};
use super::refusal::{OpenError, Refused};
use super::strings::{NameIndex, Text, until_nul};
use super::tables::{Section, Tables, slice, u64s};
use super::vocab::{Step, Vocab};
use super::wire::{Row, StepRow};
use crate::tensor::{Encoding, Shape};

/// A container that passed every check of a conforming reader: a mapped file, or bytes.
///
/// Opening reads the tables only. Planes are borrowed from the map; another process that truncates the file while
/// it is mapped can end this process with SIGBUS, as with any file map.
#[derive(Debug)]
pub struct Artifact {
    data: Data,
    tables: Tables,
    names: OnceLock<NameIndex>,
}

/// Characters of a SHA-256 in hex.
const DIGEST_TEXT: usize = 64;

#[derive(Debug)]
enum Data {
    Map(Mmap),
    Bytes(Vec<u8>),
}

/// A metadata value as a reader sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MetaRef<'a> {
    /// A signed integer.
    Int(i64),
    /// A 64-bit float.
    Float(f64),
    /// A string.
    Text(Text<'a>),
    /// A row type that this reader does not know, and its eight bytes.
    Other {
        /// The row's type.
        kind: u32,
        /// Its value.
        raw: u64,
    },
}

/// Place of a plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlaneAt {
    /// First byte in the file.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
}

/// Counts and special tokens of a vocabulary section.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VocabSummary {
    /// 1 byte-pair encoding, 2 unigram, 3 wordpiece, 4 rwkv.
    pub kind: u32,
    /// Tokens.
    pub tokens: u32,
    /// Merges of a byte-pair encoding.
    pub merges: u32,
    /// Steps of the normaliser, pre-tokeniser and decoder.
    pub steps: u32,
    /// bos, eos, eot, pad, unk, sep; -1 for none.
    pub specials: [i32; 6],
}

impl VocabSummary {
    /// `BPE`, `Unigram`, `WordPiece`, `RWKV`.
    pub fn kind_name(&self) -> &'static str {
        super::vocab::kind_name(self.kind)
    }
}

impl Artifact {
    /// Maps a file and checks its tables.
    ///
    /// # Errors
    /// The system's error, or the first rule that the file breaks.
    pub fn open(path: &Path) -> Result<Artifact, OpenError> {
        let io =
            |doing| move |error| OpenError::Io { doing, path: path.display().to_string(), error };
        let file = File::open(path).map_err(io("open"))?;
        let size = file.metadata().map_err(io("examine"))?.len();
        // An empty file cannot be mapped; it is refused like any file without a header.
        let data = if size == 0 {
            Data::Bytes(Vec::new())
        } else {
            // SAFETY: the map is read-only and private to this value. That nobody changes the file meanwhile cannot
            // be ruled out; every offset was checked against the size at opening, and plane bytes are only ever
            // hashed, copied or decoded by code that is total over all bit patterns.
            Data::Map(unsafe { Mmap::map(&file) }.map_err(io("map"))?)
        };
        Artifact::new(data)
            .map_err(|refused| OpenError::Refused { path: path.display().to_string(), refused })
    }

    /// Checks the tables of a container that is in memory.
    ///
    /// # Errors
    /// The first rule that the bytes break.
    pub fn from_bytes(bytes: &[u8]) -> Result<Artifact, Refused> {
        Artifact::new(Data::Bytes(bytes.to_vec()))
    }

    fn new(data: Data) -> Result<Artifact, Refused> {
        let bytes = data.bytes();
        let tables = Tables::parse(bytes, bytes.len() as u64)?;
        Ok(Artifact { data, tables, names: OnceLock::new() })
    }

    /// The first `n` bytes of the file, fewer when it is shorter.
    pub fn table_bytes(&self, n: usize) -> &[u8] {
        let bytes = self.bytes();
        &bytes[..n.min(bytes.len())]
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.data.bytes()
    }

    pub(super) fn tables(&self) -> &Tables {
        &self.tables
    }

    pub(super) fn blob(&self) -> &[u8] {
        let h = &self.tables.header;
        slice(self.bytes(), h.str_off, h.str_bytes).unwrap_or_default()
    }

    /// The string at an offset of the string section.
    pub(super) fn text(&self, offset: u64) -> Text<'_> {
        let at = usize::try_from(offset).unwrap_or(usize::MAX);
        Text(until_nul(self.blob().get(at..).unwrap_or_default()))
    }

    /// Whether the string at an offset is `text`; reads no further than its length, whatever lies there.
    fn text_is(&self, offset: u64, text: &str) -> bool {
        let len = text.len() as u64;
        slice(self.blob(), offset, len) == Some(text.as_bytes())
            && slice(self.blob(), offset.saturating_add(len), 1) == Some(&[0])
    }

    /// Whether any entry's name begins with `prefix`.
    pub(super) fn any_name_begins(&self, prefix: &str) -> bool {
        let begins = |e: &super::wire::DirRow| {
            slice(self.blob(), e.name, prefix.len() as u64) == Some(prefix.as_bytes())
        };
        self.tables.entries.iter().any(begins)
    }

    /// SHA-256 of the file's bytes up to the end of its last table, the root digest's text replaced by dashes: what a
    /// layout knows before any weight is read ([`Layout::tables_digest`](super::Layout::tables_digest)).
    pub fn tables_digest(&self) -> [u8; 32] {
        let h = &self.tables.header;
        let sections = h.sections().into_iter().filter(|s| s.name != "data");
        let end = sections.map(Section::end).max().unwrap_or(0).max(HEADER_BYTES);
        let bytes = slice(self.bytes(), 0, end).unwrap_or(self.bytes());
        let text = self.meta_text(DIGEST_KEY).map_or(0, |t| t.bytes().len());
        let from = self.meta_text_at(DIGEST_KEY).and_then(|at| usize::try_from(at).ok());
        let (before, rest) = bytes.split_at(from.unwrap_or(bytes.len()).min(bytes.len()));
        let (_, after) = rest.split_at(text.min(rest.len()));
        crate::hash::sha256([before, &b"-".repeat(text.min(DIGEST_TEXT)), after])
    }

    /// SHA-256 of the file.
    pub fn sha256(&self) -> [u8; 32] {
        crate::hash::sha256([self.bytes()])
    }

    /// Whether another file has the same bytes.
    pub fn same_bytes(&self, other: &Artifact) -> bool {
        self.bytes() == other.bytes()
    }

    /// Size of the file in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.tables.size
    }

    /// Architecture id.
    pub fn arch_id(&self) -> Text<'_> {
        self.text(self.tables.header.arch_id)
    }

    /// Name of the model.
    pub fn model_name(&self) -> Text<'_> {
        self.text(self.tables.header.model_name)
    }

    /// Quantisation of the source checkpoint, empty for none.
    pub fn quant(&self) -> Text<'_> {
        self.text(self.tables.header.quant)
    }

    /// Recipe text, empty for none.
    pub fn recipe(&self) -> Text<'_> {
        self.text(self.tables.header.recipe)
    }

    /// What wrote the file.
    pub fn created_by(&self) -> Text<'_> {
        self.text(self.tables.header.created_by)
    }

    /// `(name, offset, bytes)` of every section, in the order in which readers check them.
    pub fn sections(&self) -> impl Iterator<Item = (&'static str, u64, u64)> {
        self.tables.header.sections().into_iter().map(|s: Section| (s.name, s.offset, s.bytes()))
    }

    /// Every metadata row, in file order.
    pub fn metadata(&self) -> impl Iterator<Item = (Text<'_>, MetaRef<'_>)> {
        self.tables.metadata.iter().map(|row| {
            let value = match row.kind {
                META_INT => MetaRef::Int(row.value as i64),
                META_FLOAT => MetaRef::Float(f64::from_bits(row.value)),
                META_TEXT => MetaRef::Text(self.text(row.value)),
                kind => MetaRef::Other { kind, raw: row.value },
            };
            (self.text(row.key), value)
        })
    }

    /// Types and values of the rows with that key, in file order.
    fn meta_rows(&self, key: &str) -> impl Iterator<Item = (u32, u64)> {
        self.tables.metadata.iter().filter(|r| self.text_is(r.key, key)).map(|r| (r.kind, r.value))
    }

    /// The first integer row of that key.
    pub fn meta_int(&self, key: &str) -> Option<i64> {
        self.meta_rows(key).find(|r| r.0 == META_INT).map(|r| r.1 as i64)
    }

    /// The first float row of that key; an integer row counts.
    pub fn meta_float(&self, key: &str) -> Option<f64> {
        self.meta_rows(key).find_map(|(kind, value)| match kind {
            META_FLOAT => Some(f64::from_bits(value)),
            META_INT => Some(value as i64 as f64),
            _ => None,
        })
    }

    /// The first text row of that key.
    pub fn meta_text(&self, key: &str) -> Option<Text<'_>> {
        self.meta_rows(key).find(|r| r.0 == META_TEXT).map(|r| self.text(r.1))
    }

    /// Where the text of [`Artifact::meta_text`] begins in the file.
    pub(super) fn meta_text_at(&self, key: &str) -> Option<u64> {
        let (_, value) = self.meta_rows(key).find(|r| r.0 == META_TEXT)?;
        self.tables.header.str_off.checked_add(value)
    }

    /// Number of directory entries.
    pub fn len(&self) -> usize {
        self.tables.entries.len()
    }

    /// Whether the directory is empty.
    pub fn is_empty(&self) -> bool {
        self.tables.entries.is_empty()
    }

    /// Entry number `index` in file order.
    pub fn entry(&self, index: usize) -> Option<Entry<'_>> {
        (index < self.len()).then_some(Entry { artifact: self, index })
    }

    /// Every entry in file order.
    pub fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        (0..self.len()).map(|index| Entry { artifact: self, index })
    }

    /// The first entry of that name.
    pub fn find(&self, name: &str) -> Option<Entry<'_>> {
        self.find_bytes(name.as_bytes())
    }

    /// The first entry whose name has these bytes.
    pub fn find_bytes(&self, name: &[u8]) -> Option<Entry<'_>> {
        let index = self.names.get_or_init(|| {
            NameIndex::new(self.blob(), self.tables.entries.iter().map(|e| e.name))
        });
        self.entry(index.find(self.blob(), name)?)
    }

    /// Bytes of plane `plane` of entry `entry`.
    pub fn plane(&self, entry: usize, plane: usize) -> Option<&[u8]> {
        let row = self.tables.entries.get(entry)?;
        let at = self.tables.planes_of(row).get(plane)?;
        slice(self.bytes(), at.offset, at.bytes)
    }

    /// Encodings in table order.
    pub fn encodings(&self) -> &[Encoding] {
        &self.tables.encodings
    }

    /// The expert profile: a placement hint.
    pub fn profile(&self) -> impl Iterator<Item = ProfileShare> {
        self.tables.profile.iter().map(|r| ProfileShare {
            layer: r.layer,
            expert: r.expert,
            share: r.share,
        })
    }

    /// What the vocabulary section holds; `None` without one.
    pub fn vocab_summary(&self) -> Option<VocabSummary> {
        let v = self.tables.vocab.as_ref()?;
        Some(VocabSummary {
            kind: v.kind,
            tokens: v.n_tokens,
            merges: v.n_merges,
            steps: v.n_steps,
            specials: v.specials,
        })
    }

    /// The whole vocabulary section. Its size is bounded by the section and by the strings it names; a hostile file
    /// can name one long string from many tokens, so this refuses (`None`) when the text exceeds the file.
    pub fn vocab(&self) -> Option<Vocab> {
        let v = self.tables.vocab.as_ref()?;
        let array = |k| v.array(k).and_then(|(o, n)| slice(self.bytes(), o, n)).unwrap_or_default();
        let mut left = self.bytes().len();
        let mut owned = |offset| {
            let text = self.text(offset).bytes();
            left = left.checked_sub(text.len())?;
            Some(text.to_vec())
        };
        let tokens = u64s(array(0)).map(&mut owned).collect::<Option<_>>()?;
        let step = |s: StepRow| {
            Some(Step {
                kind: s.kind,
                flags: s.flags,
                arg0: owned(s.arg0)?,
                arg1: owned(s.arg1)?,
                number: s.iarg,
            })
        };
        let steps = StepRow::rows(array(4)).map(step).collect::<Option<_>>()?;
        Some(Vocab {
            kind: v.kind,
            tokens,
            scores: u32s(array(1)).map(f32::from_bits).collect(),
            types: array(2).to_vec(),
            merges: u64s(array(3)).map(|p| [p as u32, (p >> 32) as u32]).collect(),
            steps,
            specials: v.specials,
            add_bos: v.add_bos != 0,
            add_eos: v.add_eos != 0,
            chat_template: self.text(v.chat_template).bytes().to_vec(),
        })
    }

    /// Everything but the planes, as a writer takes it; `None` when a string is not UTF-8 or a metadata row has an
    /// unknown type.
    pub fn contents(&self) -> Option<Contents> {
        let owned = |t: Text<'_>| t.as_str().map(str::to_owned);
        let metadata = self.metadata().map(|(key, value)| {
            let value = match value {
                MetaRef::Int(v) => MetaValue::Int(v),
                MetaRef::Float(v) => MetaValue::Float(v),
                MetaRef::Text(v) => MetaValue::Text(owned(v)?),
                MetaRef::Other { .. } => return None,
            };
            Some((owned(key)?, value))
        });
        let entries = self.entries().map(|e| {
            Some(EntrySpec {
                name: owned(e.name())?,
                quantizer: owned(e.quantizer())?,
                options: owned(e.options())?,
                encoding: e.encoding().clone(),
                shape: e.shape().clone(),
                layer: e.layer(),
                expert: e.expert(),
                slot: e.slot(),
            })
        });
        let vocab = match self.tables.vocab {
            Some(_) => Some(self.vocab()?),
            None => None,
        };
        let mut data: Vec<usize> = (0..self.len()).collect();
        data.sort_by_key(|&i| self.entry(i).map(|e| e.offset()));
        if data.is_sorted() {
            data.clear();
        }
        Some(Contents {
            arch_id: owned(self.arch_id())?,
            model_name: owned(self.model_name())?,
            quant: owned(self.quant())?,
            recipe: owned(self.recipe())?,
            created_by: owned(self.created_by())?,
            metadata: metadata.collect::<Option<_>>()?,
            entries: entries.collect::<Option<_>>()?,
            data,
            vocab,
            profile: self.profile().collect(),
        })
    }
}

fn u32s(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b))
}

impl Data {
    fn bytes(&self) -> &[u8] {
        match self {
            Data::Map(map) => map,
            Data::Bytes(bytes) => bytes,
        }
    }
}

/// One entry of the directory.
#[derive(Debug, Clone, Copy)]
pub struct Entry<'a> {
    artifact: &'a Artifact,
    index: usize,
}

impl<'a> Entry<'a> {
    fn row(&self) -> &'a super::wire::DirRow {
        // `index` is below the directory's length by construction.
        &self.artifact.tables.entries[self.index]
    }

    /// Position in the directory.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Name.
    pub fn name(&self) -> Text<'a> {
        self.artifact.text(self.row().name)
    }

    /// Quantizer that made it, empty for the checkpoint's own bytes.
    pub fn quantizer(&self) -> Text<'a> {
        self.artifact.text(self.row().quantizer)
    }

    /// The quantizer's options, `key=value` sorted by key and joined by commas.
    pub fn options(&self) -> Text<'a> {
        self.artifact.text(self.row().options)
    }

    /// How the values are laid out.
    pub fn encoding(&self) -> &'a Encoding {
        // The row's encoding index was checked at opening.
        &self.artifact.tables.encodings[self.row().enc as usize]
    }

    /// Logical shape.
    pub fn shape(&self) -> &'a Shape {
        // One shape a directory row, made at opening.
        &self.artifact.tables.shapes[self.index]
    }

    /// Layer, negative at model level.
    pub fn layer(&self) -> i32 {
        self.row().layer
    }

    /// Expert, negative for other weights.
    pub fn expert(&self) -> i32 {
        self.row().expert
    }

    /// Position within its expert.
    pub fn slot(&self) -> i32 {
        self.row().slot
    }

    /// First byte in the file.
    pub fn offset(&self) -> u64 {
        self.row().offset
    }

    /// Bytes from its first to its last plane's last, alignment gaps included.
    pub fn span(&self) -> u64 {
        self.row().bytes
    }

    /// Bytes of all planes, without gaps.
    pub fn plane_bytes(&self) -> u64 {
        self.planes().map(|p| p.bytes).sum()
    }

    /// Where the planes lie, in encoding order.
    pub fn planes(&self) -> impl Iterator<Item = PlaneAt> + 'a {
        let rows = self.artifact.tables.planes_of(self.row());
        rows.iter().map(|p| PlaneAt { offset: p.offset, bytes: p.bytes })
    }

    /// Bytes of plane `k`; empty for a plane that the encoding does not have.
    pub fn plane(&self, k: usize) -> &'a [u8] {
        self.artifact.plane(self.index, k).unwrap_or_default()
    }
}
