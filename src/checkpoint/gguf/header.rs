//! Reader of GGUF headers, versions 2 and 3.
//!
//! ```text
//! GGUF │ u32 version │ u64 tensors │ u64 pairs │ pairs │ tensor records │ padding │ tensor bytes
//!   pair:   name · u32 type · value            record: name · u32 rank · u64 extents, innermost first ·
//!   name:   u64 length · bytes                         u32 ggml type · u64 offset from the tensor bytes' start
//! ```
//!
//! Everything is little-endian. Tensors lie one after the other, each at a multiple of `general.alignment` (32 unless
//! stated). Limits are those of ggml (`GGML_MAX_DIMS`, `GGML_MAX_NAME`). Nothing is allocated on the word of a count:
//! what it promises must fit the bytes that are left.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as MapEntry;
use std::fmt;

use super::types::{self, Kind};
use crate::checkpoint::safetensors::{looks_like, quoted};
use crate::diag::{self, count};
use crate::tensor::Shape;

/// Most dimensions of a tensor (`GGML_MAX_DIMS`).
const MAX_RANK: u32 = 4;

/// Longest tensor name in bytes (`GGML_MAX_NAME` counts a terminating zero on top).
const MAX_NAME: u64 = 64;

/// Longest name of a pair in bytes, as the format's description says.
const MAX_KEY: u64 = 65_535;

/// Longest text value that is kept: chat templates and licence texts stay below. Longer ones are skipped.
const MAX_TEXT: u64 = 16 << 20;

/// Longest list of whole numbers that is kept: one number a layer. Longer ones (token types) are counted only.
const MAX_LIST: u64 = 8192;

/// Alignment of tensors unless `general.alignment` says otherwise (`GGUF_DEFAULT_ALIGNMENT`).
const DEFAULT_ALIGNMENT: u64 = 32;

/// Faults listed one by one; further ones are counted.
const MAX_FAULTS: usize = 20;

/// A value of a pair.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// A 32-bit float.
    F32(f32),
    /// A 64-bit float.
    F64(f64),
    /// A truth value.
    Bool(bool),
    /// A text.
    Text(String),
    /// A short list of integers or truth values; numbers beyond 63 bits saturate.
    Integers(Vec<i64>),
    /// Another list, or a text too long to keep: how many elements or bytes it has.
    Skipped(u64),
}

/// One tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// How its elements are stored.
    pub kind: Kind,
    /// Extents, outermost first.
    pub shape: Shape,
    /// First byte in the file.
    pub begin: u64,
    /// First byte after it.
    pub end: u64,
}

/// What the header of a GGUF file says, checked against the file's length.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Header {
    /// The pairs by name.
    pub pairs: BTreeMap<String, Value>,
    /// Tensors by name.
    pub tensors: BTreeMap<String, Entry>,
}

/// One way in which a GGUF file is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // the text of each variant (Display) says what it means
pub enum Fault {
    NotGguf { looks_like: Option<&'static str> },
    BigEndian,
    Version { found: u32 },
    Cut { at: u64, what: &'static str, needs: u64, left: u64 },
    Count { what: &'static str, promised: u64, most: u64 },
    LongName { what: &'static str, length: u64, most: u64 },
    NotUtf8 { what: String },
    DuplicateKey { key: String },
    ValueType { key: String, number: u32 },
    NestedList { key: String },
    Alignment { value: String },
    DuplicateTensor { name: String },
    Rank { name: String, rank: u32 },
    UnknownType { name: String, number: u32 },
    UnreadType { name: String, kind: &'static str },
    PartialBlock { name: String, kind: &'static str, cols: u64, block: u64 },
    TooLarge { name: String, shape: Shape },
    Misaligned { name: String, offset: u64, alignment: u64 },
    PastEnd { name: String, end: u64, have: u64 },
    Overlap { name: String, other: String, bytes: u64 },
    Hole { name: String, bytes: u64 },
    More { count: u64 },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::NotGguf { looks_like: Some(what) } => {
                write!(f, "no GGUF file: it begins like {what}")
            }
            Fault::NotGguf { looks_like: None } => {
                f.write_str("no GGUF file: it does not begin with `GGUF`")
            }
            Fault::BigEndian => f.write_str("a big-endian GGUF file; little-endian ones are read"),
            Fault::Version { found } => {
                write!(f, "GGUF version {found}; versions 2 and 3 are read")
            }
            Fault::Cut { at, what, needs, left } => write!(
                f,
                "truncated: {what} at byte {} takes {} bytes, the file has {} more",
                count(*at),
                count(*needs),
                count(*left)
            ),
            Fault::Count { what, promised, most } => write!(
                f,
                "the header promises {} {what}; the bytes that follow can hold {}",
                count(*promised),
                count(*most)
            ),
            Fault::LongName { what, length, most } => write!(
                f,
                "a {what} of {} bytes; the format allows {}",
                count(*length),
                count(*most)
            ),
            Fault::NotUtf8 { what } => write!(f, "{what} is not UTF-8"),
            Fault::DuplicateKey { key } => write!(f, "key {} given twice", quoted(key)),
            Fault::ValueType { key, number } => {
                write!(f, "key {}: value type {number} is unknown (0 to 12 are known)", quoted(key))
            }
            Fault::NestedList { key } => write!(f, "key {}: a list of lists", quoted(key)),
            Fault::Alignment { value } => {
                write!(
                    f,
                    "`general.alignment` is {value}; a power of two from 8 to 65,536 is needed"
                )
            }
            Fault::DuplicateTensor { name } => write!(f, "duplicate tensor name {}", quoted(name)),
            Fault::Rank { name, rank } => {
                write!(f, "tensor {}: {rank} dimensions; ggml has at most {MAX_RANK}", quoted(name))
            }
            Fault::UnknownType { name, number } => {
                write!(f, "tensor {}: ggml type {number} is unknown", quoted(name))
            }
            Fault::UnreadType { name, kind } => {
                write!(f, "tensor {}: ggml type {kind} is not read", quoted(name))
            }
            Fault::PartialBlock { name, kind, cols, block } => write!(
                f,
                "tensor {}: rows of {} are no whole blocks of {block} ({kind})",
                quoted(name),
                count(*cols)
            ),
            Fault::TooLarge { name, shape } => {
                write!(f, "tensor {}: {shape} elements exceed 64 bits of size", quoted(name))
            }
            Fault::Misaligned { name, offset, alignment } => write!(
                f,
                "tensor {}: offset {} is no multiple of the alignment {alignment}",
                quoted(name),
                count(*offset)
            ),
            Fault::PastEnd { name, end, have } => write!(
                f,
                "truncated: tensor {} ends at byte {}, the file has {}",
                quoted(name),
                count(*end),
                count(*have)
            ),
            Fault::Overlap { name, other, bytes } => write!(
                f,
                "tensors {} and {} overlap in {} bytes",
                quoted(other),
                quoted(name),
                count(*bytes)
            ),
            Fault::Hole { name, bytes } => write!(
                f,
                "{} bytes before tensor {} belong to no tensor",
                count(*bytes),
                quoted(name)
            ),
            Fault::More { count: n } => write!(f, "{} more faults in this header", count(*n)),
        }
    }
}

impl Fault {
    /// What would work, where something can be said.
    pub(super) fn help(&self) -> Option<String> {
        let text = match self {
            Fault::Cut { .. } | Fault::Count { .. } | Fault::PastEnd { .. } => {
                "the file is incomplete: copy or download it again"
            }
            Fault::BigEndian | Fault::Version { .. } => {
                "convert the model again with a current llama.cpp (convert_hf_to_gguf.py)"
            }
            Fault::UnknownType { .. } | Fault::UnreadType { .. } => {
                return Some(format!("read are {}", diag::list(&types::names(), 99)));
            }
            _ => return None,
        };
        Some(text.to_owned())
    }
}

/// Reads and checks the header of a whole GGUF file, which may be a map.
///
/// # Errors
/// Every fault found, at least one. A fault of the structure ends the reading; faults of tensors are collected, and
/// the layout of the bytes is judged only when no tensor is wrong by itself.
pub fn read_header(file: &[u8]) -> Result<Header, Vec<Fault>> {
    let mut reading = Reading { cursor: Cursor { file, at: 0 }, faults: Vec::new(), uncounted: 0 };
    match reading.header() {
        Ok(header) if reading.faults.is_empty() => Ok(header),
        Ok(_) => Err(reading.into_faults()),
        Err(fault) => {
            reading.fault(fault);
            Err(reading.into_faults())
        }
    }
}

/// A place in the file.
struct Cursor<'f> {
    file: &'f [u8],
    at: u64,
}

impl<'f> Cursor<'f> {
    fn left(&self) -> u64 {
        (self.file.len() as u64).saturating_sub(self.at)
    }

    fn take(&mut self, needs: u64, what: &'static str) -> Result<&'f [u8], Fault> {
        let cut = Fault::Cut { at: self.at, what, needs, left: self.left() };
        let end = self.at.checked_add(needs).ok_or_else(|| cut.clone())?;
        let range = usize::try_from(self.at).ok().zip(usize::try_from(end).ok());
        let bytes = range.and_then(|(start, end)| self.file.get(start..end)).ok_or(cut)?;
        self.at = end;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Fault> {
        let cut = Fault::Cut { at: self.at, what, needs: N as u64, left: self.left() };
        self.take(N as u64, what)?.try_into().map_err(|_| cut)
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, Fault> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, Fault> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A count of things that take at least `each` bytes.
    fn count(&mut self, what: &'static str, each: u64) -> Result<u64, Fault> {
        let promised = self.u64(what)?;
        let most = self.left() / each.max(1);
        if promised > most {
            return Err(Fault::Count { what, promised, most });
        }
        Ok(promised)
    }

    fn name(&mut self, what: &'static str, most: u64) -> Result<String, Fault> {
        let length = self.u64(what)?;
        if length > most {
            return Err(Fault::LongName { what, length, most });
        }
        let bytes = self.take(length, what)?;
        String::from_utf8(bytes.to_vec())
            .map_err(|_| Fault::NotUtf8 { what: format!("a {what} of {} bytes", count(length)) })
    }
}

/// Bytes of a value of a fixed size; `None` for texts, lists and unknown types.
fn fixed(number: u32) -> Option<u64> {
    match number {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

const TEXT: u32 = 8;
const LIST: u32 = 9;

struct Reading<'f> {
    cursor: Cursor<'f>,
    faults: Vec<Fault>,
    uncounted: u64,
}

impl Reading<'_> {
    fn fault(&mut self, fault: Fault) {
        if self.faults.len() < MAX_FAULTS {
            self.faults.push(fault);
        } else {
            self.uncounted += 1;
        }
    }

    fn into_faults(mut self) -> Vec<Fault> {
        if self.uncounted > 0 {
            self.faults.push(Fault::More { count: self.uncounted });
        }
        self.faults
    }

    fn header(&mut self) -> Result<Header, Fault> {
        if !self.cursor.file.starts_with(b"GGUF") {
            return Err(Fault::NotGguf { looks_like: looks_like(self.cursor.file) });
        }
        self.cursor.at = 4;
        match self.cursor.u32("the version")? {
            2 | 3 => {}
            other if matches!(other.swap_bytes(), 1..=3) => return Err(Fault::BigEndian),
            found => return Err(Fault::Version { found }),
        }
        // A record: name's length, rank, type, offset. A pair: name's length, type, one byte.
        let tensors = self.cursor.count("tensors", 8 + 4 + 4 + 8)?;
        let pairs = self.cursor.count("pairs", 8 + 4 + 1)?;
        let mut header = Header::default();
        for _ in 0..pairs {
            let key = self.cursor.name("key", MAX_KEY)?;
            let number = self.cursor.u32("a value's type")?;
            let value = self.value(&key, number)?;
            match header.pairs.entry(key) {
                MapEntry::Vacant(place) => drop(place.insert(value)),
                MapEntry::Occupied(other) => {
                    let key = other.key().clone();
                    self.fault(Fault::DuplicateKey { key });
                }
            }
        }
        let alignment = self.alignment(&header);
        let mut offsets = BTreeMap::new();
        for _ in 0..tensors {
            let name = self.cursor.name("tensor name", MAX_NAME)?;
            let rank = self.cursor.u32("a tensor's rank")?;
            if rank > MAX_RANK {
                // Where the record ends follows from the rank.
                return Err(Fault::Rank { name, rank });
            }
            let mut extents = Vec::with_capacity(MAX_RANK as usize);
            for _ in 0..rank {
                extents.push(self.cursor.u64("a tensor's extent")?);
            }
            extents.reverse();
            let number = self.cursor.u32("a tensor's type")?;
            let offset = self.cursor.u64("a tensor's offset")?;
            let shape = Shape::new(extents);
            if offsets.contains_key(&name) {
                self.fault(Fault::DuplicateTensor { name });
                continue;
            }
            match sized(&name, &shape, number) {
                Ok(_) if !offset.is_multiple_of(alignment) => {
                    offsets.insert(name.clone(), None);
                    self.fault(Fault::Misaligned { name, offset, alignment });
                }
                Ok((kind, bytes)) => {
                    offsets.insert(name, Some((kind, shape, offset, bytes)));
                }
                Err(fault) => {
                    offsets.insert(name, None);
                    self.fault(fault);
                }
            }
        }
        if self.faults.is_empty() {
            self.layout(&mut header, offsets, alignment);
        }
        Ok(header)
    }

    fn alignment(&mut self, header: &Header) -> u64 {
        let value = match header.pairs.get("general.alignment") {
            None => return DEFAULT_ALIGNMENT,
            Some(Value::Unsigned(n)) if n.is_power_of_two() && (8..=65_536).contains(n) => {
                return *n;
            }
            Some(Value::Unsigned(n)) => count(*n),
            Some(_) => "no unsigned number".to_owned(),
        };
        self.fault(Fault::Alignment { value });
        DEFAULT_ALIGNMENT
    }

    fn value(&mut self, key: &str, number: u32) -> Result<Value, Fault> {
        let c = &mut self.cursor;
        let what = "a value";
        Ok(match number {
            0 => Value::Unsigned(u64::from(u8::from_le_bytes(c.array(what)?))),
            1 => Value::Signed(i64::from(i8::from_le_bytes(c.array(what)?))),
            2 => Value::Unsigned(u64::from(u16::from_le_bytes(c.array(what)?))),
            3 => Value::Signed(i64::from(i16::from_le_bytes(c.array(what)?))),
            4 => Value::Unsigned(u64::from(c.u32(what)?)),
            5 => Value::Signed(i64::from(i32::from_le_bytes(c.array(what)?))),
            6 => Value::F32(f32::from_le_bytes(c.array(what)?)),
            7 => Value::Bool(u8::from_le_bytes(c.array(what)?) != 0),
            TEXT => {
                let length = c.u64("a text's length")?;
                let bytes = c.take(length, "a text")?;
                if length > MAX_TEXT {
                    return Ok(Value::Skipped(length));
                }
                match String::from_utf8(bytes.to_vec()) {
                    Ok(text) => Value::Text(text),
                    Err(_) => {
                        let what = format!("the text of key {}", quoted(key));
                        return Err(Fault::NotUtf8 { what });
                    }
                }
            }
            LIST => return self.list(key),
            10 => Value::Unsigned(c.u64(what)?),
            11 => Value::Signed(i64::from_le_bytes(c.array(what)?)),
            12 => Value::F64(f64::from_le_bytes(c.array(what)?)),
            number => return Err(Fault::ValueType { key: key.to_owned(), number }),
        })
    }

    fn list(&mut self, key: &str) -> Result<Value, Fault> {
        let element = self.cursor.u32("a list's type")?;
        match (element, fixed(element)) {
            (TEXT, _) => {
                let n = self.cursor.count("elements of a list", 8)?;
                for _ in 0..n {
                    let length = self.cursor.u64("a text's length")?;
                    self.cursor.take(length, "a text")?;
                }
                Ok(Value::Skipped(n))
            }
            (LIST, _) => Err(Fault::NestedList { key: key.to_owned() }),
            (6 | 12, Some(width)) => {
                let n = self.cursor.count("elements of a list", width)?;
                self.cursor.take(n.saturating_mul(width), "a list")?;
                Ok(Value::Skipped(n))
            }
            (_, Some(width)) => {
                let n = self.cursor.count("elements of a list", width)?;
                if n > MAX_LIST {
                    self.cursor.take(n.saturating_mul(width), "a list")?;
                    return Ok(Value::Skipped(n));
                }
                let mut integers = Vec::new();
                for _ in 0..n {
                    integers.push(match self.value(key, element)? {
                        Value::Unsigned(n) => i64::try_from(n).unwrap_or(i64::MAX),
                        Value::Signed(n) => n,
                        Value::Bool(b) => i64::from(b),
                        _ => return Err(Fault::ValueType { key: key.to_owned(), number: element }),
                    });
                }
                Ok(Value::Integers(integers))
            }
            (number, None) => Err(Fault::ValueType { key: key.to_owned(), number }),
        }
    }

    /// Places the tensors: none past the file's end, none over another, and no more between two than the alignment
    /// takes.
    fn layout(
        &mut self,
        header: &mut Header,
        tensors: BTreeMap<String, Option<(Kind, Shape, u64, u64)>>,
        alignment: u64,
    ) {
        let have = self.cursor.file.len() as u64;
        let start = self.cursor.at.next_multiple_of(alignment);
        for (name, found) in tensors {
            let Some((kind, shape, offset, bytes)) = found else { continue };
            let end = start.checked_add(offset).and_then(|b| Some((b, b.checked_add(bytes)?)));
            match end {
                Some((begin, end)) if end <= have => {
                    header.tensors.insert(name, Entry { kind, shape, begin, end });
                }
                other => {
                    let end = other.map_or(u64::MAX, |(_, end)| end);
                    self.fault(Fault::PastEnd { name, end, have });
                }
            }
        }
        if !self.faults.is_empty() {
            return;
        }
        let mut order: Vec<(u64, u64, &str)> =
            header.tensors.iter().map(|(name, e)| (e.begin, e.end, name.as_str())).collect();
        order.sort_unstable();
        let (mut covered, mut last) = (start, "");
        let mut faults = Vec::new();
        for (begin, end, name) in order {
            if begin < covered && end > begin {
                let (name, other) = (name.to_owned(), last.to_owned());
                faults.push(Fault::Overlap { name, other, bytes: covered.min(end) - begin });
            } else if begin >= covered.saturating_add(alignment) {
                faults.push(Fault::Hole { name: name.to_owned(), bytes: begin - covered });
            }
            if end > covered {
                (covered, last) = (end, name);
            }
        }
        faults.into_iter().for_each(|f| self.fault(f));
    }
}

/// What a tensor is and how many bytes it takes.
fn sized(name: &str, shape: &Shape, number: u32) -> Result<(Kind, u64), Fault> {
    let name = || name.to_owned();
    let kind = match types::find(number) {
        Some((_, Some(kind))) => kind,
        Some((kind, None)) => return Err(Fault::UnreadType { name: name(), kind }),
        None => return Err(Fault::UnknownType { name: name(), number }),
    };
    let (block, bytes) = kind.block();
    let cols = shape.extents().last().copied().unwrap_or(1);
    if !cols.is_multiple_of(block) {
        return Err(Fault::PartialBlock { name: name(), kind: kind.name(), cols, block });
    }
    let total = shape.elements().and_then(|n| (n / block).checked_mul(bytes));
    // Shape counts rows and columns in 64 bits each; their product was just taken.
    let total = total.filter(|_| shape.matrix().is_some());
    total.map(|n| (kind, n)).ok_or_else(|| Fault::TooLarge { name: name(), shape: shape.clone() })
}
