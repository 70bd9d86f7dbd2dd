//! Tensors of an exported folder: name, type, shape, and bytes made on demand.

use std::io::{self, Write};

use crate::artifact::Entry;
use crate::quantize::{Decoder, PlaneSlice};
use crate::tensor::{DType, Scheme};

/// Values decoded at a time.
const VALUES: u64 = 1 << 18;

/// Rows of one stored weight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Content<'a> {
    /// The weight.
    pub entry: Entry<'a>,
    /// First row of the tensor in the weight.
    pub first_row: u64,
    /// Rows of the tensor.
    pub rows: u64,
}

/// Bytes of a tensor.
pub(super) enum Bytes<'a> {
    /// Values of these rows, one content after the other, in the tensor's type.
    Values(Vec<Content<'a>>),
    /// A part of a stored plane as it is.
    Stored(&'a [u8]),
    /// A part of a stored plane whose bytes are turned from two's complement to offset binary: the top bit flips.
    Offset {
        /// The bytes.
        bytes: &'a [u8],
        /// Bytes of one row of the plane.
        row: usize,
        /// Bytes of one row of the tensor; the rest is zero.
        padded: usize,
        /// What flips in a byte: 0x80 for 8-bit codes, 0x88 for 4-bit ones.
        flip: u8,
    },
    /// Bytes made beforehand: a few.
    Made(Vec<u8>),
}

/// One tensor.
pub(super) struct Tensor<'a> {
    /// Name in the folder.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Vec<u64>,
    /// Its bytes.
    pub bytes: Bytes<'a>,
    /// What a divisor is the reciprocal of, where that is not the reciprocal of the divisor.
    pub factor: Option<f32>,
}

impl<'a> Tensor<'a> {
    /// The values of stored rows: plain weights in their own type, quantized ones decoded to bf16.
    pub fn values(name: String, shape: Vec<u64>, contents: Vec<Content<'a>>) -> Tensor<'a> {
        let dtype = match contents.first().map(|c| c.entry.encoding()) {
            Some(e) if e.scheme == Scheme::Plain => e.codes(),
            _ => DType::BF16,
        };
        Tensor { name, dtype, shape, bytes: Bytes::Values(contents), factor: None }
    }

    /// A tensor of bytes that exist.
    pub fn of(name: String, dtype: DType, shape: Vec<u64>, bytes: Bytes<'a>) -> Tensor<'a> {
        Tensor { name, dtype, shape, bytes, factor: None }
    }

    /// Its length in bytes; saturates for shapes that no checkpoint has.
    pub fn len(&self) -> u64 {
        let elements = self.shape.iter().fold(1u64, |n, d| n.saturating_mul(*d));
        elements.saturating_mul(u64::from(self.dtype.bits())).div_ceil(8)
    }

    /// Writes its bytes.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        match &self.bytes {
            Bytes::Values(contents) => contents.iter().try_for_each(|c| self.write_values(c, out)),
            Bytes::Stored(bytes) => out.write_all(bytes),
            Bytes::Made(bytes) => out.write_all(bytes),
            Bytes::Offset { bytes, row, padded, flip } => {
                let mut buffer = vec![0u8; *padded];
                for stored in bytes.chunks(*row) {
                    for (to, from) in buffer.iter_mut().zip(stored) {
                        *to = from ^ flip;
                    }
                    out.write_all(&buffer)?;
                }
                Ok(())
            }
        }
    }

    fn write_values(&self, content: &Content<'a>, out: &mut dyn Write) -> io::Result<()> {
        let invalid = |e: &dyn std::fmt::Display| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{}: {e}", self.name))
        };
        let entry = &content.entry;
        let (rows, cols) = entry.shape().matrix().ok_or_else(|| invalid(&"shape overflows"))?;
        let planes: Vec<&[u8]> =
            (0..entry.encoding().planes.len()).map(|k| entry.plane(k)).collect();
        if entry.encoding().scheme == Scheme::Plain {
            let row = (entry.encoding().planes[0].row_bytes(cols)).unwrap_or(0);
            let (from, to) = (content.first_row * row, (content.first_row + content.rows) * row);
            let bytes = planes[0]
                .get(from as usize..to as usize)
                .ok_or_else(|| invalid(&"the stored plane is too short"))?;
            return out.write_all(bytes);
        }
        let decoder = Decoder::new(entry.encoding(), rows, cols).map_err(|e| invalid(&e))?;
        let slices: Vec<PlaneSlice<'_>> = planes.iter().map(|b| PlaneSlice::whole(b)).collect();
        let step = (VALUES / cols.max(1)).max(1);
        let (mut values, mut bytes) = (Vec::new(), Vec::new());
        let last = content.first_row + content.rows;
        let mut first = content.first_row;
        while first < last {
            let end = last.min(first + step);
            values.resize(((end - first) * cols) as usize, 0.0f32);
            decoder.decode(first..end, &slices, &mut values).map_err(|e| invalid(&e))?;
            bytes.clear();
            for value in &values {
                bytes.extend_from_slice(&half::bf16::from_f32(*value).to_le_bytes());
            }
            out.write_all(&bytes)?;
            first = end;
        }
        Ok(())
    }
}
