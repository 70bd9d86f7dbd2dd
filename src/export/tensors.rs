//! Tensors of an exported folder: name, type, shape, and bytes made on demand.

use std::io::{self, Write};
use std::ops::Range;

use crate::artifact::WeightView;
use crate::quantize::{Decoder, PlaneSlice};
use crate::tensor::{DType, Scheme};

/// Values decoded at a time.
const VALUES: u64 = 1 << 18;

/// Bytes of a plane that are copied at a time.
const BYTES: u64 = 4 << 20;

/// Rows of one stored weight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Content<'a> {
    /// The weight.
    pub weight: &'a WeightView<'a>,
    /// First row of the tensor in the weight.
    pub first_row: u64,
    /// Rows of the tensor.
    pub rows: u64,
}

/// Rows of one plane of a stored weight, in the plane's own rows.
#[derive(Debug, Clone)]
pub(super) struct PlaneRows<'a> {
    /// The weight.
    pub weight: &'a WeightView<'a>,
    /// The plane.
    pub plane: usize,
    /// Its rows.
    pub rows: Range<u64>,
    /// Bytes of one of them.
    pub row: u64,
}

impl PlaneRows<'_> {
    /// The bytes, a few rows at a time.
    fn each(&self, mut take: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
        let step = (BYTES / self.row.max(1)).max(1);
        let mut first = self.rows.start;
        while first < self.rows.end {
            let end = self.rows.end.min(first + step);
            take(&self.weight.rows(self.plane, first..end)?)?;
            first = end;
        }
        Ok(())
    }
}

/// Bytes of a tensor.
pub(super) enum Bytes<'a> {
    /// Values of these rows, one content after the other, in the tensor's type.
    Values(Vec<Content<'a>>),
    /// A part of a stored plane as it is.
    Stored(PlaneRows<'a>),
    /// A part of a stored plane whose bytes are turned from two's complement to offset binary: the top bit flips.
    Offset {
        /// The bytes.
        bytes: PlaneRows<'a>,
        /// Bytes of one row of the tensor; the rest is zero.
        padded: usize,
        /// What flips in a byte: 0x80 for 8-bit codes, 0x88 for 4-bit ones.
        flip: u8,
    },
    /// Scales of a stored plane, each written several times in a row.
    Repeated {
        /// The bytes.
        bytes: PlaneRows<'a>,
        /// Bytes of one row of the plane.
        row: usize,
        /// Bytes of one scale.
        element: usize,
        /// How often each is written.
        times: u64,
        /// How often the last one of a row is written.
        last: u64,
    },
    /// Bytes of the mapped file as they are.
    Mapped(&'a [u8]),
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
    /// The values of stored rows: plain weights in their own type, quantized ones decoded to `decoded`, bf16 or f32.
    pub fn values(
        name: String,
        shape: Vec<u64>,
        contents: Vec<Content<'a>>,
        decoded: DType,
    ) -> Tensor<'a> {
        let plain = |c: &Content<'_>| {
            let encoding = c.weight.encoding();
            (encoding.scheme == Scheme::Plain).then(|| encoding.codes())
        };
        // Experts of one tensor can be stored in different ways.
        let dtype = match contents.first().and_then(plain) {
            Some(dtype) if contents.iter().all(|c| plain(c) == Some(dtype)) => dtype,
            _ => decoded,
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
            Bytes::Stored(rows) => rows.each(|bytes| out.write_all(bytes)),
            Bytes::Mapped(bytes) => out.write_all(bytes),
            Bytes::Made(bytes) => out.write_all(bytes),
            Bytes::Offset { bytes: rows, padded, flip } => {
                let mut buffer = vec![0u8; *padded];
                let row = usize::try_from(rows.row.max(1)).map_err(io::Error::other)?;
                rows.each(|bytes| {
                    for stored in bytes.chunks(row) {
                        for (to, from) in buffer.iter_mut().zip(stored) {
                            *to = from ^ flip;
                        }
                        out.write_all(&buffer)?;
                    }
                    Ok(())
                })
            }
            Bytes::Repeated { bytes: rows, row, element, times, last } => rows.each(|bytes| {
                for scales in bytes.chunks(*row) {
                    let scales: Vec<&[u8]> = scales.chunks(*element).collect();
                    for (i, scale) in scales.iter().enumerate() {
                        let times = if i + 1 == scales.len() { *last } else { *times };
                        (0..times).try_for_each(|_| out.write_all(scale))?;
                    }
                }
                Ok(())
            }),
        }
    }

    fn write_values(&self, content: &Content<'a>, out: &mut dyn Write) -> io::Result<()> {
        let invalid = |e: &dyn std::fmt::Display| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{}: {e}", self.name))
        };
        let weight = content.weight;
        let encoding = weight.encoding();
        let (rows, cols) = weight.shape().matrix().ok_or_else(|| invalid(&"shape overflows"))?;
        let last = content.first_row + content.rows;
        if encoding.scheme == Scheme::Plain && encoding.codes() == self.dtype {
            let row = encoding.planes[0].row_bytes(cols).unwrap_or(0);
            let rows = PlaneRows { weight, plane: 0, rows: content.first_row..last, row };
            return rows.each(|bytes| out.write_all(bytes)).map_err(|e| invalid(&e));
        }
        let decoder = Decoder::new(encoding, rows, cols).map_err(|e| invalid(&e))?;
        let step = (VALUES / cols.max(1)).max(1);
        let (mut values, mut bytes) = (Vec::new(), Vec::new());
        let mut first = content.first_row;
        while first < last {
            let end = last.min(first + step);
            values.resize(((end - first) * cols) as usize, 0.0f32);
            let planes = weight.block(first..end).map_err(|e| invalid(&e))?;
            let slices: Vec<PlaneSlice<'_>> =
                planes.iter().map(|(first, bytes)| PlaneSlice { bytes, first: *first }).collect();
            decoder.decode(first..end, &slices, &mut values).map_err(|e| invalid(&e))?;
            bytes.clear();
            for value in &values {
                match self.dtype {
                    DType::F32 => bytes.extend_from_slice(&value.to_le_bytes()),
                    _ => bytes.extend_from_slice(&half::bf16::from_f32(*value).to_le_bytes()),
                }
            }
            out.write_all(&bytes)?;
            first = end;
        }
        Ok(())
    }
}
