//! One matrix of a quantized weight (codes, scales, zero points) as it lies in a checkpoint tensor.

use std::io;

use super::ggml::{BlockPart, BlockType};
use crate::checkpoint::parts::Place;
use crate::num::{self, Element};
use crate::tensor::DType;

/// How elements lie in the bytes of a tensor. Streams are little-endian: the first element has the lowest bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::checkpoint) enum Layout {
    /// Element (r, c) is the c-th of the stream at byte r × `stride`.
    Rows {
        /// Bytes from one row to the next.
        stride: u64,
    },
    /// Element (r, c) is the r-th of the stream at byte c × `stride`.
    Columns {
        /// Bytes from one column to the next.
        stride: u64,
        /// AutoAWQ's order within eight elements: nibble i of a word is row 0, 2, 4, 6, 1, 3, 5, 7.
        interleaved: bool,
    },
    /// Element (r, c) is the c-th of the stream that the 32-bit words of column r form, one below the other.
    WordsDownRows {
        /// Words in one row of the tensor.
        width: u64,
    },
    /// Element (r, c) is the r-th of the stream that the 32-bit words of column c form, one below the other.
    WordsDownColumns {
        /// Words in one row of the tensor.
        width: u64,
    },
    /// Byte (r / 2, c) holds row r in its low nibble when r is even, else in its high one.
    RowPairs,
    /// A row is a run of ggml's blocks, of which the matrix is one part; rows lie in the order of the tensor's place.
    Blocks {
        /// The format.
        blocks: BlockType,
        /// The part.
        part: BlockPart,
        /// Elements of that part in one block.
        each: u64,
        /// Blocks of one row.
        count: u64,
    },
}

/// Place of row j of eight in a word of AutoAWQ.
const AWQ_NIBBLE: [u64; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// A matrix of elements of at most 32 bits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::checkpoint) struct Matrix {
    /// The tensor's bytes.
    pub place: Place,
    /// Where elements lie in them.
    pub layout: Layout,
    /// What an element is once `flip` and `add` are applied.
    pub dtype: DType,
    /// Bits that are turned over: the top bit where a signed code is stored with an offset of half its range.
    pub flip: u32,
    /// Added to the stored number, modulo its range: GPTQ version 1 stores zero points less one.
    pub add: u32,
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub cols: u64,
}

fn outside() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "an element lies outside its tensor")
}

impl Matrix {
    /// Whole-byte elements, row by row.
    pub fn plain(place: Place, dtype: DType, rows: u64, cols: u64) -> Matrix {
        let stride = cols.saturating_mul(dtype.bytes().unwrap_or(1));
        Matrix { place, layout: Layout::Rows { stride }, dtype, flip: 0, add: 0, rows, cols }
    }

    /// Bytes of a row in a container: a bit stream that starts on a byte.
    pub fn packed_row_bytes(&self) -> io::Result<usize> {
        let cols = usize::try_from(self.cols).map_err(io::Error::other)?;
        num::row_bytes(cols, self.dtype.bits()).ok_or_else(outside)
    }

    /// The elements of row `r` of the tensor's bytes.
    ///
    /// # Errors
    /// `InvalidData` when they lie outside the tensor or `out` has another length.
    pub fn row(&self, bytes: &[u8], r: u64, out: &mut [u32]) -> io::Result<()> {
        if r >= self.rows || out.len() as u64 != self.cols {
            return Err(outside());
        }
        let bits = u64::from(self.dtype.bits());
        match self.layout {
            Layout::Rows { stride } => {
                let start = r.checked_mul(stride).and_then(|n| usize::try_from(n).ok());
                let row = start.and_then(|s| bytes.get(s..)).ok_or_else(outside)?;
                if row.len() < self.packed_row_bytes()? {
                    return Err(outside());
                }
                num::unpack(row, self.dtype.bits(), out);
            }
            Layout::Columns { stride, interleaved } => {
                let at = if interleaved {
                    (r - r % 8) + AWQ_NIBBLE.get((r % 8) as usize).copied().unwrap_or(0)
                } else {
                    r
                };
                let first = at.checked_mul(bits).ok_or_else(outside)?;
                for (c, out) in out.iter_mut().enumerate() {
                    let byte = (c as u64).checked_mul(stride).ok_or_else(outside)? + first / 8;
                    *out = field(bytes, byte, first % 8, bits)?;
                }
            }
            Layout::WordsDownRows { width } => {
                for (c, out) in out.iter_mut().enumerate() {
                    *out = word_field(bytes, width, r, c as u64, bits)?;
                }
            }
            Layout::WordsDownColumns { width } => {
                for (c, out) in out.iter_mut().enumerate() {
                    *out = word_field(bytes, width, c as u64, r, bits)?;
                }
            }
            Layout::RowPairs => {
                let start = (r / 2).checked_mul(self.cols).and_then(|n| usize::try_from(n).ok());
                let row = start
                    .and_then(|s| bytes.get(s..s.checked_add(out.len())?))
                    .ok_or_else(outside)?;
                let shift = (r % 2) * 4;
                for (out, byte) in out.iter_mut().zip(row) {
                    *out = u32::from(byte >> shift) & 15;
                }
            }
            Layout::Blocks { blocks, part, each, count } => {
                let size = blocks.extent().1;
                let stride = count.checked_mul(size).ok_or_else(outside)?;
                let start = self.place.stored_row(r, self.rows).checked_mul(stride);
                let range = start.and_then(|s| Some((s, s.checked_add(stride)?)));
                let (start, end) = range.ok_or_else(outside)?;
                let range = usize::try_from(start).ok().zip(usize::try_from(end).ok());
                let row = range.and_then(|(s, e)| bytes.get(s..e)).ok_or_else(outside)?;
                let each = usize::try_from(each).map_err(|_| outside())?.max(1);
                for (block, out) in row.chunks_exact(size as usize).zip(out.chunks_mut(each)) {
                    blocks.read(part, block, out);
                }
            }
        }
        if self.flip != 0 || self.add != 0 {
            let mask = u32::MAX >> (32 - self.dtype.bits().clamp(1, 32));
            for code in out {
                *code = (*code ^ self.flip).wrapping_add(self.add) & mask;
            }
        }
        Ok(())
    }

    /// The bytes of rows in a container's packing, where the tensor holds them as they are.
    pub fn borrowed<'b>(&self, bytes: &'b [u8], rows: &std::ops::Range<u64>) -> Option<&'b [u8]> {
        let stride = self.packed_row_bytes().ok()? as u64;
        if self.layout != (Layout::Rows { stride }) || self.flip != 0 || self.add != 0 {
            return None;
        }
        // Spare bits of a row's last byte have to be 0 in a container, and need not be in a checkpoint.
        if !(self.cols.checked_mul(u64::from(self.dtype.bits()))?).is_multiple_of(8) {
            return None;
        }
        let start = usize::try_from(rows.start.checked_mul(stride)?).ok()?;
        let end = usize::try_from(rows.end.checked_mul(stride)?).ok()?;
        bytes.get(start..end)
    }
}

/// `bits` bits from bit `shift` of byte `at` upwards.
fn field(bytes: &[u8], at: u64, shift: u64, bits: u64) -> io::Result<u32> {
    let at = usize::try_from(at).map_err(|_| outside())?;
    let length = ((shift + bits).div_ceil(8)) as usize;
    let window = at.checked_add(length).and_then(|end| bytes.get(at..end)).ok_or_else(outside)?;
    let word = window.iter().rev().fold(0u64, |word, &b| word << 8 | u64::from(b));
    Ok((word >> shift & (u64::MAX >> (64 - bits))) as u32)
}

/// Element `n` of the stream of words in column `column` of a matrix `width` words wide.
fn word_field(bytes: &[u8], width: u64, column: u64, n: u64, bits: u64) -> io::Result<u32> {
    let bit = n.checked_mul(bits).ok_or_else(outside)?;
    let word = |i: u64| -> io::Result<u64> {
        let at = i.checked_mul(width).and_then(|k| k.checked_add(column)?.checked_mul(4));
        Ok(u64::from(field(bytes, at.ok_or_else(outside)?, 0, 32)?))
    };
    let (index, shift) = (bit / 32, bit % 32);
    let mut value = word(index)?;
    if shift + bits > 32 {
        value |= word(index + 1)? << 32;
    }
    Ok((value >> shift & (u64::MAX >> (64 - bits))) as u32)
}

/// Values of a matrix's elements.
#[derive(Debug)]
pub(super) enum Values {
    /// Of every code of at most 8 bits.
    Table(Vec<f32>),
    /// Computed.
    Element(Element),
}

impl Values {
    pub fn of(dtype: DType) -> io::Result<Values> {
        let element = Element::new(dtype).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{dtype} values are not read"))
        })?;
        Ok(match element.bits() {
            ..=8 => Values::Table((0..1u32 << element.bits()).map(|c| element.decode(c)).collect()),
            _ => Values::Element(element),
        })
    }

    pub fn read(&self, codes: &[u32], out: &mut Vec<f32>) {
        out.clear();
        match self {
            // Codes are no wider than the table's index.
            Values::Table(table) => out
                .extend(codes.iter().map(|&c| table.get(c as usize).copied().unwrap_or(f32::NAN))),
            Values::Element(element) => out.extend(codes.iter().map(|&c| element.decode(c))),
        }
    }
}
