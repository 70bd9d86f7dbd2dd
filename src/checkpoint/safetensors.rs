//! Reader of safetensors headers.
//!
//! ```text
//! 0        8                 8 + n                     end of file
//! ├─ n ────┼─ header: JSON ──┼─ tensor bytes, no gaps ─┤
//!   u64 LE    name → {dtype, shape, data_offsets}, offsets from 8 + n
//! ```
//!
//! The `safetensors` crate (0.8) reads the same files; this reader exists because it must report every fault with its
//! figures, and because the two differ on purpose:
//!
//! | header | crate 0.8 | here |
//! |---|---|---|
//! | the same tensor name twice | the last one counts, or a misleading offset error | refused by name |
//! | an entry as `["F32", [1], [0, 4]]`, a dtype as `{"F32": null}` | accepted | refused: the format says object and string |
//! | further keys in an entry | ignored | refused: a stride or an order we don't know would change the values |
//! | `"__metadata__": null` | accepted | refused: the format says a map of strings |
//!
//! Apart from these the verdicts agree; a property test holds it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry as MapEntry;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use crate::diag;
use crate::tensor::{DType, Shape, TensorInfo};

/// Longest header the format allows, in bytes (`MAX_HEADER_SIZE` of the safetensors crate).
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes of the length field in front of the header.
const LENGTH_FIELD: u64 = 8;

/// Faults listed one by one; further ones are counted.
const MAX_FAULTS: usize = 20;

/// Every element type of the format with its spelling there.
const DTYPES: [(&str, DType); 22] = [
    ("BOOL", DType::Bool),
    ("F4", DType::F4E2M1),
    ("F6_E2M3", DType::F6E2M3),
    ("F6_E3M2", DType::F6E3M2),
    ("U8", DType::U8),
    ("I8", DType::I8),
    ("F8_E5M2", DType::F8E5M2),
    ("F8_E4M3", DType::F8E4M3),
    ("F8_E8M0", DType::E8M0),
    ("F8_E4M3FNUZ", DType::F8E4M3Fnuz),
    ("F8_E5M2FNUZ", DType::F8E5M2Fnuz),
    ("I16", DType::I16),
    ("U16", DType::U16),
    ("F16", DType::F16),
    ("BF16", DType::BF16),
    ("I32", DType::I32),
    ("U32", DType::U32),
    ("F32", DType::F32),
    ("C64", DType::C64),
    ("F64", DType::F64),
    ("I64", DType::I64),
    ("U64", DType::U64),
];

/// The element type of that name in a safetensors header, e.g. `F8_E4M3`.
pub fn dtype_from_name(name: &str) -> Option<DType> {
    DTYPES.iter().find(|row| row.0 == name).map(|row| row.1)
}

/// How a safetensors header spells the element type; `None` for types that the format does not have.
pub fn dtype_name(dtype: DType) -> Option<&'static str> {
    DTYPES.iter().find(|row| row.1 == dtype).map(|row| row.0)
}

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Element type and shape.
    pub info: TensorInfo,
    /// First byte, counted from the start of the file.
    pub begin: u64,
    /// First byte after the tensor, counted from the start of the file.
    pub end: u64,
}

/// What a file's header says, checked against the file's length.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Header {
    /// Tensors by name.
    pub tensors: BTreeMap<String, Entry>,
    /// The `__metadata__` strings.
    pub metadata: BTreeMap<String, String>,
    /// First byte after the header. Any number: the bytes of the tensors need no alignment.
    pub data_start: u64,
}

/// One way in which a safetensors file is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // the text of each variant (Display) says what it means
pub enum Fault {
    TooShort { have: u64 },
    HeaderTooLarge { promised: u64, looks_like: Option<&'static str> },
    HeaderCut { promised: u64, have: u64 },
    NotUtf8 { at: u64 },
    NotJson { at: u64, reason: String },
    DuplicateTensor { name: String },
    DuplicateKey { name: String, key: String },
    UnknownKey { name: String, key: String },
    MissingKey { name: String, key: &'static str },
    DuplicateMetadata { key: String },
    UnknownDType { name: String, dtype: String },
    OffsetsReversed { name: String, begin: u64, end: u64 },
    TooLarge { name: String, dtype: DType, shape: Shape },
    PartialByte { name: String, dtype: DType, shape: Shape },
    Span { name: String, dtype: DType, shape: Shape, needs: u64, given: u64 },
    Overlap { name: String, other: String, bytes: u64 },
    Hole { name: Option<String>, bytes: u64 },
    Truncated { promised: u64, have: u64 },
    Trailing { described: u64, have: u64 },
    More { count: u64 },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use diag::count;
        match self {
            Fault::TooShort { have } => write!(
                f,
                "truncated: {} bytes, and a safetensors file starts with 8 bytes of header length",
                count(*have)
            ),
            Fault::HeaderTooLarge { promised, looks_like } => {
                write!(
                    f,
                    "the header length says {} bytes and the format allows {}",
                    count(*promised),
                    count(MAX_HEADER_BYTES)
                )?;
                match looks_like {
                    Some(what) => write!(f, "; the file begins like {what}"),
                    None => Ok(()),
                }
            }
            Fault::HeaderCut { promised, have } | Fault::Truncated { promised, have } => write!(
                f,
                "truncated: the header promises {} bytes, the file has {}",
                count(*promised),
                count(*have)
            ),
            Fault::NotUtf8 { at } => {
                write!(f, "the header is not UTF-8 at byte {}", count(*at))
            }
            Fault::NotJson { at, reason } => {
                write!(f, "the header is wrong at byte {}: {reason}", count(*at))
            }
            Fault::DuplicateTensor { name } => {
                write!(f, "duplicate tensor name {}", quoted(name))
            }
            Fault::DuplicateKey { name, key } => {
                write!(f, "tensor {}: key {} given twice", quoted(name), quoted(key))
            }
            Fault::UnknownKey { name, key } => write!(
                f,
                "tensor {}: key {} is not part of the format (dtype, shape, data_offsets)",
                quoted(name),
                quoted(key)
            ),
            Fault::MissingKey { name, key } => {
                write!(f, "tensor {}: no {key}", quoted(name))
            }
            Fault::DuplicateMetadata { key } => {
                write!(f, "__metadata__: key {} given twice", quoted(key))
            }
            Fault::UnknownDType { name, dtype } => {
                write!(f, "tensor {}: unknown dtype {}", quoted(name), quoted(dtype))
            }
            Fault::OffsetsReversed { name, begin, end } => write!(
                f,
                "tensor {}: data_offsets end at {} before they begin at {}",
                quoted(name),
                count(*end),
                count(*begin)
            ),
            Fault::TooLarge { name, dtype, shape } => write!(
                f,
                "tensor {}: {shape} elements of {} exceed 64 bits of size",
                quoted(name),
                spelled(*dtype)
            ),
            Fault::PartialByte { name, dtype, shape } => write!(
                f,
                "tensor {}: {shape} elements of {} ({} bits each) do not fill whole bytes",
                quoted(name),
                spelled(*dtype),
                dtype.bits()
            ),
            Fault::Span { name, dtype, shape, needs, given } => write!(
                f,
                "tensor {}: {shape} of {} takes {} bytes, data_offsets span {}",
                quoted(name),
                spelled(*dtype),
                count(*needs),
                count(*given)
            ),
            Fault::Overlap { name, other, bytes } => write!(
                f,
                "tensors {} and {} overlap in {} bytes",
                quoted(other),
                quoted(name),
                count(*bytes)
            ),
            Fault::Hole { name: Some(name), bytes } => {
                write!(
                    f,
                    "{} bytes before tensor {} belong to no tensor",
                    count(*bytes),
                    quoted(name)
                )
            }
            Fault::Hole { name: None, bytes } => {
                write!(f, "{} bytes belong to no tensor", count(*bytes))
            }
            Fault::Trailing { described, have } => write!(
                f,
                "{} trailing bytes: the header describes {} bytes, the file has {}",
                count(have.saturating_sub(*described)),
                count(*described),
                count(*have)
            ),
            Fault::More { count: n } => write!(f, "{} more faults in this header", count(*n)),
        }
    }
}

impl Fault {
    /// What would work, where something can be said.
    pub(super) fn help(&self) -> Option<&'static str> {
        match self {
            Fault::TooShort { .. } | Fault::HeaderCut { .. } | Fault::Truncated { .. } => {
                Some("the file is incomplete: copy or download it again")
            }
            Fault::HeaderTooLarge { looks_like: None, .. } => Some(
                "this is no safetensors file, or one with more tensors than the format can describe",
            ),
            Fault::HeaderTooLarge { looks_like: Some(_), .. } => {
                Some("convert the model with transformers: save_pretrained writes safetensors")
            }
            Fault::UnknownDType { .. } => Some(
                "known: BOOL, F4, F6_E2M3, F6_E3M2, U8 to U64, I8 to I64, \
                F8_E4M3, F8_E5M2, F8_E8M0, F8_E4M3FNUZ, F8_E5M2FNUZ, F16, BF16, F32, F64, C64",
            ),
            Fault::DuplicateTensor { .. } | Fault::Trailing { .. } => Some(
                "the program that wrote this file has a fault: write it again with another version",
            ),
            _ => None,
        }
    }
}

/// A name from a file as it may be shown: in backticks, control characters escaped.
pub(super) fn quoted(name: &str) -> String {
    format!("`{}`", name.escape_debug())
}

fn spelled(dtype: DType) -> &'static str {
    dtype_name(dtype).unwrap_or(dtype.name())
}

/// What a file is, by its first bytes, when it is no safetensors file.
pub(super) fn looks_like(start: &[u8]) -> Option<&'static str> {
    const MAGIC: [(&[u8], &str); 8] = [
        (b"PK\x03\x04", "a zip archive (PyTorch saves .bin and .pt files so)"),
        (b"\x80\x02", "a pickle (an old PyTorch file)"),
        (b"GGUF", "a GGUF file"),
        (b"\x89HDF", "an HDF5 file"),
        (b"<!DOCTYPE", "an HTML page (a failed download)"),
        (b"<!doctype", "an HTML page (a failed download)"),
        (b"<html", "an HTML page (a failed download)"),
        (b"RAD1", "a .rad artifact"),
    ];
    MAGIC.iter().find(|(magic, _)| start.starts_with(magic)).map(|(_, what)| *what)
}

/// Reads and checks the header of a whole safetensors file.
///
/// Nothing is allocated on the word of a length field: the header must lie in `file`, which may be a map.
///
/// # Errors
/// Every fault found, at least one. A fault of the JSON text ends the reading; faults of tensors are collected, and
/// the layout of the bytes is judged only when no tensor is wrong by itself.
pub fn read_header(file: &[u8]) -> Result<Header, Vec<Fault>> {
    read_header_of(file, file.len() as u64)
}

/// Bytes that the first eight of a file say its header ends at; `None` for fewer bytes, or a length that no file has.
pub fn header_end(file: &[u8]) -> Option<u64> {
    let promised = u64::from_le_bytes(*file.first_chunk::<8>()?);
    (promised <= MAX_HEADER_BYTES).then(|| LENGTH_FIELD + promised)
}

/// As [`read_header`], of a file of `have` bytes of which the first are at hand.
///
/// # Errors
/// As [`read_header`]; a header that is not at hand as a whole is told as truncated.
pub fn read_header_of(file: &[u8], have: u64) -> Result<Header, Vec<Fault>> {
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(vec![Fault::TooShort { have }]);
    };
    let promised = u64::from_le_bytes(*length);
    if promised > MAX_HEADER_BYTES {
        return Err(vec![Fault::HeaderTooLarge { promised, looks_like: looks_like(file) }]);
    }
    let data_start = LENGTH_FIELD + promised;
    let Some(text) = usize::try_from(promised).ok().and_then(|n| rest.get(..n)) else {
        return Err(vec![Fault::HeaderCut { promised: data_start, have }]);
    };
    let text = std::str::from_utf8(text)
        .map_err(|e| vec![Fault::NotUtf8 { at: LENGTH_FIELD + e.valid_up_to() as u64 }])?;

    let mut reading = Reading::default();
    let mut json = serde_json::Deserializer::from_str(text);
    let outcome = (&mut reading).deserialize(&mut json).and_then(|()| json.end());
    if let Err(error) = outcome {
        let at = LENGTH_FIELD + text_offset(text, error.line(), error.column()) as u64;
        reading.fault(Fault::NotJson { at, reason: reason(&error) });
        return Err(reading.into_faults());
    }
    reading.check_layout(data_start, have)
}

/// Byte offset of a position that serde_json reports (line and column from 1, column in bytes).
pub(super) fn text_offset(text: &str, line: usize, column: usize) -> usize {
    let start = match line.checked_sub(2) {
        None => 0,
        Some(nth) => text.match_indices('\n').nth(nth).map_or(text.len(), |(at, _)| at + 1),
    };
    start.saturating_add(column.saturating_sub(1)).min(text.len())
}

/// What serde_json says about an error, without the position.
pub(super) fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(at) => text[..at].to_owned(),
        None => text,
    }
}

/// One entry as the header gives it: offsets from the end of the header.
struct Raw {
    dtype: DType,
    shape: Shape,
    begin: u64,
    end: u64,
}

/// The header while it is read.
#[derive(Default)]
struct Reading {
    tensors: BTreeMap<String, Option<Raw>>,
    metadata: Option<BTreeMap<String, String>>,
    faults: Vec<Fault>,
    uncounted: u64,
}

impl Reading {
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

    /// The tensors must cover the bytes after the header: every byte once, to the end of the file.
    fn check_layout(mut self, data_start: u64, have: u64) -> Result<Header, Vec<Fault>> {
        if !self.faults.is_empty() {
            return Err(self.into_faults());
        }
        let tensors = std::mem::take(&mut self.tensors);
        let mut order: Vec<(u64, u64, &str)> = tensors
            .iter()
            .filter_map(|(name, raw)| raw.as_ref().map(|r| (r.begin, r.end, name.as_str())))
            .collect();
        order.sort_unstable();
        let (mut covered, mut last) = (0u64, "");
        for &(begin, end, name) in &order {
            if begin > covered {
                self.fault(Fault::Hole { name: Some(name.to_owned()), bytes: begin - covered });
            } else if begin < covered && end > begin {
                self.fault(Fault::Overlap {
                    name: name.to_owned(),
                    other: last.to_owned(),
                    bytes: covered.min(end) - begin,
                });
            } else if begin < covered {
                // An empty tensor inside another one: harmless to read, but the format wants one order of offsets.
                self.fault(Fault::Overlap {
                    name: name.to_owned(),
                    other: last.to_owned(),
                    bytes: 0,
                });
            }
            if end >= covered {
                (covered, last) = (end, name);
            }
        }
        let described = data_start.saturating_add(covered);
        if described > have {
            self.fault(Fault::Truncated { promised: described, have });
        } else if described < have {
            if order.is_empty() {
                self.fault(Fault::Hole { name: None, bytes: have - described });
            } else {
                self.fault(Fault::Trailing { described, have });
            }
        }
        if !self.faults.is_empty() {
            return Err(self.into_faults());
        }
        let tensors = tensors
            .into_iter()
            .filter_map(|(name, raw)| {
                let raw = raw?;
                let info = TensorInfo { dtype: raw.dtype, shape: raw.shape };
                // No overflow: every end lies within the file, as the coverage above shows.
                Some((
                    name,
                    Entry { info, begin: data_start + raw.begin, end: data_start + raw.end },
                ))
            })
            .collect();
        Ok(Header { tensors, metadata: self.metadata.unwrap_or_default(), data_start })
    }

    /// Checks one entry by itself.
    fn entry(&mut self, name: &str, parts: EntryParts) -> Option<Raw> {
        let owned = || name.to_owned();
        for (key, missing) in [
            ("dtype", parts.dtype.is_none()),
            ("shape", parts.shape.is_none()),
            ("data_offsets", parts.offsets.is_none()),
        ] {
            if missing {
                self.fault(Fault::MissingKey { name: owned(), key });
            }
        }
        let (dtype, shape, [begin, end]) = (parts.dtype?, parts.shape?, parts.offsets?);
        let Some(dtype) = dtype_from_name(&dtype) else {
            self.fault(Fault::UnknownDType { name: owned(), dtype });
            return None;
        };
        let shape = Shape::new(shape);
        let Some(bits) = shape.elements().and_then(|n| n.checked_mul(u64::from(dtype.bits())))
        else {
            self.fault(Fault::TooLarge { name: owned(), dtype, shape });
            return None;
        };
        if !bits.is_multiple_of(8) {
            self.fault(Fault::PartialByte { name: owned(), dtype, shape });
            return None;
        }
        let Some(given) = end.checked_sub(begin) else {
            self.fault(Fault::OffsetsReversed { name: owned(), begin, end });
            return None;
        };
        if given != bits / 8 {
            self.fault(Fault::Span { name: owned(), dtype, shape, needs: bits / 8, given });
            return None;
        }
        Some(Raw { dtype, shape, begin, end })
    }
}

impl<'de> DeserializeSeed<'de> for &mut Reading {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Reading {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<Cow<'de, str>>()? {
            if name == "__metadata__" {
                let strings = map.next_value_seed(StringsSeed(self)).map_err(|e| {
                    A::Error::custom(format!("__metadata__ must map strings to strings: {e}"))
                })?;
                if self.metadata.replace(strings).is_some() {
                    self.fault(Fault::DuplicateTensor { name: name.into_owned() });
                }
                continue;
            }
            let parts = map
                .next_value_seed(EntrySeed { name: &name, reading: self })
                .map_err(|e| A::Error::custom(format!("tensor {}: {e}", quoted(&name))))?;
            let raw = parts.and_then(|parts| self.entry(&name, parts));
            if self.tensors.contains_key(name.as_ref()) {
                self.fault(Fault::DuplicateTensor { name: name.into_owned() });
            } else {
                self.tensors.insert(name.into_owned(), raw);
            }
        }
        Ok(())
    }
}

/// Reads `__metadata__`.
struct StringsSeed<'a>(&'a mut Reading);

impl<'de> DeserializeSeed<'de> for StringsSeed<'_> {
    type Value = BTreeMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for StringsSeed<'_> {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut strings = BTreeMap::new();
        while let Some((key, value)) = map.next_entry::<String, String>()? {
            match strings.entry(key) {
                MapEntry::Vacant(slot) => {
                    slot.insert(value);
                }
                MapEntry::Occupied(slot) => {
                    self.0.fault(Fault::DuplicateMetadata { key: slot.key().clone() });
                }
            }
        }
        Ok(strings)
    }
}

/// The keys of one entry.
#[derive(Default)]
struct EntryParts {
    dtype: Option<String>,
    shape: Option<Vec<u64>>,
    offsets: Option<[u64; 2]>,
}

/// Reads one entry; `None` when a fault of its keys was noted.
struct EntrySeed<'a> {
    name: &'a str,
    reading: &'a mut Reading,
}

impl<'de> DeserializeSeed<'de> for EntrySeed<'_> {
    type Value = Option<EntryParts>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for EntrySeed<'_> {
    type Value = Option<EntryParts>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut parts = EntryParts::default();
        let mut sound = true;
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            let again = match key.as_ref() {
                "dtype" => parts.dtype.replace(map.next_value()?).is_some(),
                "shape" => parts.shape.replace(map.next_value()?).is_some(),
                "data_offsets" => parts.offsets.replace(map.next_value()?).is_some(),
                _ => {
                    map.next_value::<IgnoredAny>()?;
                    let (name, key) = (self.name.to_owned(), key.into_owned());
                    self.reading.fault(Fault::UnknownKey { name, key });
                    sound = false;
                    continue;
                }
            };
            if again {
                let (name, key) = (self.name.to_owned(), key.into_owned());
                self.reading.fault(Fault::DuplicateKey { name, key });
                sound = false;
            }
        }
        Ok(sound.then_some(parts))
    }
}
