//! A reader of GGUF version 3, as far as the fetched file needs it: key-value pairs, and tensors of type F32, Q4_1 and
//! Q8_0 decoded to f32 with the arithmetic of gguf-py's `dequantize`.
//!
//! Layout (little-endian): `GGUF`, u32 version, u64 tensor count, u64 pair count; pairs; tensor records (name, rank,
//! dimensions innermost first, type, offset); padding to `general.alignment` (default 32); tensor data.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::Result;

/// A value of a key-value pair.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any integer type or bool.
    Int(i64),
    /// f32 or f64.
    Float(f64),
    /// UTF-8 text.
    Text(String),
    /// Elements of one type.
    List(Vec<Value>),
}

/// How the elements of a tensor are stored; the numbers are ggml's type ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// 0: f32.
    F32,
    /// 3: blocks of 32 as f16 scale, f16 minimum, 16 bytes of two 4-bit codes.
    Q4_1,
    /// 8: blocks of 32 as f16 scale, 32 signed bytes.
    Q8_0,
}

struct Tensor {
    kind: Kind,
    shape: Vec<usize>,
    /// From the start of the data section.
    offset: usize,
}

/// An open GGUF file.
pub struct Gguf {
    bytes: Vec<u8>,
    pairs: BTreeMap<String, Value>,
    tensors: BTreeMap<String, Tensor>,
    data: usize,
}

impl Gguf {
    /// Reads a file whole.
    pub fn read(path: &Path) -> Result<Gguf> {
        let bytes = fs::read(path).map_err(testkit::at(path))?;
        Gguf::parse(bytes).map_err(|e| format!("{}: {e}", path.display()))
    }

    fn parse(bytes: Vec<u8>) -> Result<Gguf> {
        let mut r = Reader { bytes: &bytes, at: 0 };
        if r.take(4)? != b"GGUF" {
            return Err("not a GGUF file".into());
        }
        let version = r.u32()?;
        if version != 3 {
            return Err(format!("GGUF version {version}; this reader knows version 3"));
        }
        let (tensor_count, pair_count) = (r.u64()?, r.u64()?);
        let mut pairs = BTreeMap::new();
        for _ in 0..pair_count {
            let key = r.text()?;
            let kind = r.u32()?;
            pairs.insert(key, r.value(kind)?);
        }
        let mut tensors = BTreeMap::new();
        for _ in 0..tensor_count {
            let name = r.text()?;
            let rank = r.u32()?;
            let mut shape = Vec::new();
            for _ in 0..rank {
                shape.insert(0, r.size()?);
            }
            let kind = match r.u32()? {
                0 => Kind::F32,
                3 => Kind::Q4_1,
                8 => Kind::Q8_0,
                other => return Err(format!("{name}: ggml type {other} has no decoder here")),
            };
            let offset = r.size()?;
            tensors.insert(name, Tensor { kind, shape, offset });
        }
        let align = match pairs.get("general.alignment") {
            Some(&Value::Int(n @ 1..)) => n as usize,
            _ => 32,
        };
        let data = r.at.next_multiple_of(align);
        Ok(Gguf { bytes, pairs, tensors, data })
    }

    /// Number of tensors.
    pub fn tensor_count(&self) -> usize {
        self.tensors.len()
    }

    /// An integer pair.
    pub fn int(&self, key: &str) -> Result<u64> {
        match self.pairs.get(key) {
            Some(&Value::Int(n)) if n >= 0 => Ok(n as u64),
            other => Err(format!("{key}: expected a number, found {other:?}")),
        }
    }

    /// A number pair stored as f32, as the decimal number it was written for.
    pub fn float(&self, key: &str) -> Result<f64> {
        match self.pairs.get(key) {
            Some(&Value::Float(x)) => {
                format!("{}", x as f32).parse().map_err(|e| format!("{key}: {e}"))
            }
            other => Err(format!("{key}: expected a number, found {other:?}")),
        }
    }

    /// A text pair.
    pub fn text(&self, key: &str) -> Result<&str> {
        match self.pairs.get(key) {
            Some(Value::Text(text)) => Ok(text),
            other => Err(format!("{key}: expected text, found {other:?}")),
        }
    }

    /// A list of texts.
    pub fn texts(&self, key: &str) -> Result<Vec<&str>> {
        self.list(key)?
            .iter()
            .map(|v| match v {
                Value::Text(text) => Ok(text.as_str()),
                other => Err(format!("{key}: expected text, found {other:?}")),
            })
            .collect()
    }

    /// A list of integers.
    pub fn ints(&self, key: &str) -> Result<Vec<i64>> {
        self.list(key)?
            .iter()
            .map(|v| match v {
                Value::Int(n) => Ok(*n),
                other => Err(format!("{key}: expected a number, found {other:?}")),
            })
            .collect()
    }

    fn list(&self, key: &str) -> Result<&[Value]> {
        match self.pairs.get(key) {
            Some(Value::List(list)) => Ok(list),
            other => Err(format!("{key}: expected a list, found {other:?}")),
        }
    }

    /// Dimensions of a tensor, outermost first.
    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        Ok(&self.tensor(name)?.shape)
    }

    /// A tensor's values, row-major.
    pub fn values(&self, name: &str) -> Result<Vec<f32>> {
        let tensor = self.tensor(name)?;
        let too_long = || format!("{name}: ends past the file");
        let count =
            tensor.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).ok_or_else(too_long)?;
        let (block, bytes) = match tensor.kind {
            Kind::F32 => (1, 4),
            Kind::Q4_1 => (32, 20),
            Kind::Q8_0 => (32, 34),
        };
        if tensor.shape.last().is_some_and(|d| d % block != 0) {
            return Err(format!(
                "{name}: rows of {:?} are no whole blocks of {block}",
                tensor.shape
            ));
        }
        let start = self.data.checked_add(tensor.offset).ok_or_else(too_long)?;
        let length = (count / block).checked_mul(bytes).ok_or_else(too_long)?;
        let end = start.checked_add(length).ok_or_else(too_long)?;
        let data = self.bytes.get(start..end).ok_or_else(too_long)?;
        let mut out = Vec::with_capacity(count);
        for b in data.chunks_exact(bytes) {
            match tensor.kind {
                Kind::F32 => out.push(f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
                Kind::Q4_1 => {
                    let (scale, min) = (f16([b[0], b[1]]), f16([b[2], b[3]]));
                    // Low nibbles are elements 0 to 15, high nibbles 16 to 31.
                    out.extend(b[4..].iter().map(|q| scale * f32::from(q & 15) + min));
                    out.extend(b[4..].iter().map(|q| scale * f32::from(q >> 4) + min));
                }
                Kind::Q8_0 => {
                    let scale = f16([b[0], b[1]]);
                    out.extend(b[2..].iter().map(|&q| f32::from(q as i8) * scale));
                }
            }
        }
        Ok(out)
    }

    fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.tensors.get(name).ok_or_else(|| format!("no tensor {name}"))
    }
}

/// IEEE binary16 to f32, exact.
fn f16(bytes: [u8; 2]) -> f32 {
    let bits = u16::from_le_bytes(bytes);
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let exponent = i32::from(bits >> 10 & 31);
    let fraction = f32::from(bits & 0x3FF);
    sign * match exponent {
        0 => fraction * 2f32.powi(-24),
        31 if fraction == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        e => (1024.0 + fraction) * 2f32.powi(e - 25),
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let end = self.at.checked_add(n);
        let piece = end.and_then(|end| self.bytes.get(self.at..end));
        let piece = piece.ok_or_else(|| format!("ends inside a field at byte {}", self.at))?;
        self.at += n;
        Ok(piece)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let piece = self.take(N)?;
        piece.try_into().map_err(|_| format!("ends inside a field at byte {}", self.at))
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn size(&mut self) -> Result<usize> {
        usize::try_from(self.u64()?).map_err(|e| e.to_string())
    }

    fn text(&mut self) -> Result<String> {
        let length = self.size()?;
        String::from_utf8(self.take(length)?.to_vec()).map_err(|e| e.to_string())
    }

    /// A value of one of gguf's thirteen types.
    fn value(&mut self, kind: u32) -> Result<Value> {
        Ok(match kind {
            0 | 7 => Value::Int(i64::from(u8::from_le_bytes(self.array()?))),
            1 => Value::Int(i64::from(i8::from_le_bytes(self.array()?))),
            2 => Value::Int(i64::from(u16::from_le_bytes(self.array()?))),
            3 => Value::Int(i64::from(i16::from_le_bytes(self.array()?))),
            4 => Value::Int(i64::from(self.u32()?)),
            5 => Value::Int(i64::from(i32::from_le_bytes(self.array()?))),
            6 => Value::Float(f64::from(f32::from_le_bytes(self.array()?))),
            8 => Value::Text(self.text()?),
            9 => {
                let (element, count) = (self.u32()?, self.u64()?);
                if element == 9 {
                    return Err("a list of lists has no use here".into());
                }
                Value::List((0..count).map(|_| self.value(element)).collect::<Result<_>>()?)
            }
            10 => Value::Int(i64::try_from(self.u64()?).map_err(|e| e.to_string())?),
            11 => Value::Int(i64::from_le_bytes(self.array()?)),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            other => return Err(format!("value type {other} is unknown")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> Vec<u8> {
        let mut b = b"GGUF".to_vec();
        b.extend(3u32.to_le_bytes());
        b.extend(2u64.to_le_bytes());
        b.extend(1u64.to_le_bytes());
        let text = |b: &mut Vec<u8>, s: &str| {
            b.extend((s.len() as u64).to_le_bytes());
            b.extend(s.as_bytes());
        };
        text(&mut b, "eps");
        b.extend(6u32.to_le_bytes());
        b.extend(1e-5f32.to_le_bytes());
        for (name, kind, rows, offset) in [("q8", 8u32, 2u64, 0u64), ("q4", 3, 1, 96)] {
            text(&mut b, name);
            b.extend(2u32.to_le_bytes());
            b.extend(32u64.to_le_bytes());
            b.extend(rows.to_le_bytes());
            b.extend(kind.to_le_bytes());
            b.extend(offset.to_le_bytes());
        }
        b.resize(b.len().next_multiple_of(32), 0);
        let data = b.len();
        for scale in [0x3C00u16, 0xB800] {
            b.extend(scale.to_le_bytes());
            b.extend((0..32).map(|i| (i - 16) as u8));
        }
        b.resize(data + 96, 0);
        b.extend(0x4000u16.to_le_bytes());
        b.extend(0xBC00u16.to_le_bytes());
        b.extend((0..16).map(|i| i | (15 - i) << 4));
        b
    }

    #[test]
    fn blocks_decode_to_scale_times_code_plus_minimum() {
        let g = Gguf::parse(file()).unwrap();
        assert_eq!(g.shape("q8").unwrap(), [2, 32]);
        let q8 = g.values("q8").unwrap();
        assert_eq!(q8[..3], [-16.0, -15.0, -14.0]);
        assert_eq!(q8[32..35], [8.0, 7.5, 7.0]);
        let q4 = g.values("q4").unwrap();
        assert_eq!(q4[..3], [-1.0, 1.0, 3.0]);
        assert_eq!(q4[16..18], [29.0, 27.0]);
    }

    #[test]
    fn a_float_is_the_decimal_number_it_was_written_for() {
        assert_eq!(Gguf::parse(file()).unwrap().float("eps").unwrap(), 1e-5);
    }

    #[test]
    fn every_truncated_file_is_an_error() {
        let whole = file();
        for n in 0..whole.len() {
            let short = Gguf::parse(whole[..n].to_vec()).and_then(|g| {
                g.values("q8")?;
                g.values("q4")
            });
            assert!(short.is_err(), "{n} of {} bytes decode", whole.len());
        }
    }

    #[test]
    fn f16_covers_subnormals_and_the_largest_number() {
        assert_eq!(f16([0x01, 0x00]), 2f32.powi(-24));
        assert_eq!(f16([0xFF, 0x7B]), 65504.0);
        assert_eq!(f16([0x00, 0xFC]), f32::NEG_INFINITY);
    }
}
