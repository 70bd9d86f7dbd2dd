//! ggml's block formats: codes, scales and minima as they lie in a block of one row.
//!
//! | type | block | bytes, in order | value |
//! |---|---|---|---|
//! | Q4_0 | 32 | d · 16 of codes | (q − 8) · d |
//! | Q4_1 | 32 | d, m · 16 of codes | q · d + m |
//! | Q5_0 | 32 | d · 4 of fifth bits · 16 of codes | (q − 16) · d |
//! | Q5_1 | 32 | d, m · 4 of fifth bits · 16 of codes | q · d + m |
//! | Q8_0 | 32 | d · 32 codes | q · d |
//! | MXFP4 | 32 | e · 16 of codes | q · 2^(e − 127) |
//! | Q2_K | 256 | 16 of scales and minima · 64 of codes · d, dmin | q · s · d − m · dmin, s and m of 16 |
//! | Q3_K | 256 | 32 of third bits · 64 of codes · 12 of scales · d | (q − 4) · (s − 32) · d, s of 16 |
//! | Q4_K | 256 | d, dmin · 12 of scales and minima · 128 of codes | q · s · d − m · dmin, s and m of 32 |
//! | Q5_K | 256 | d, dmin · 12 of scales and minima · 32 of fifth bits · 128 of codes | the same |
//! | Q6_K | 256 | 128 of low bits · 64 of high bits · 16 scales · d | (q − 32) · s · d, s of 16 |
//!
//! d, m and dmin are f16, e is a byte. Layouts are those of `ggml-common.h` (`block_q4_0` to `block_q6_K`); values are
//! compared with gguf 0.19's `dequantize`.

use crate::tensor::DType;

/// A block format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // ggml's names; the module's table says what each is
pub enum BlockType {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Mxfp4,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
}

/// What a plane takes from a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::checkpoint) enum BlockPart {
    Codes,
    Scale,
    /// Scale of scales.
    Scale1,
    Min,
    /// Scale of minima.
    Min1,
}

/// One plane of a block format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::checkpoint) struct BlockPlane {
    pub part: BlockPart,
    pub dtype: DType,
    /// Columns that one element covers.
    pub width: u64,
    /// Bits of the stored number that are turned over: a code with an offset of half its range becomes two's
    /// complement, a summand becomes a subtrahend.
    pub flip: u32,
}

const fn plane(part: BlockPart, dtype: DType, width: u64, flip: u32) -> BlockPlane {
    BlockPlane { part, dtype, width, flip }
}

/// Top bit of an f16: its sign.
const SIGN: u32 = 0x8000;

impl BlockType {
    /// Columns and bytes of a block.
    pub(in crate::checkpoint) fn extent(self) -> (u64, u64) {
        match self {
            BlockType::Q4_0 => (32, 18),
            BlockType::Q4_1 => (32, 20),
            BlockType::Q5_0 => (32, 22),
            BlockType::Q5_1 => (32, 24),
            BlockType::Q8_0 => (32, 34),
            BlockType::Mxfp4 => (32, 17),
            BlockType::Q2K => (256, 84),
            BlockType::Q3K => (256, 110),
            BlockType::Q4K => (256, 144),
            BlockType::Q5K => (256, 176),
            BlockType::Q6K => (256, 210),
        }
    }

    /// The planes that hold a block's numbers unchanged, codes first.
    pub(in crate::checkpoint) fn planes(self) -> Vec<BlockPlane> {
        use BlockPart::{Codes, Min, Min1, Scale, Scale1};
        let super_blocks = |codes, flip, scale, width| {
            let top = plane(Scale1, DType::F16, 256, 0);
            vec![plane(Codes, codes, 1, flip), plane(Scale, scale, width, 0), top]
        };
        let with_min = |codes, small, width| {
            let mut planes = super_blocks(codes, 0, small, width);
            planes.extend([plane(Min, small, width, 0), plane(Min1, DType::F16, 256, 0)]);
            planes
        };
        let d = plane(Scale, DType::F16, 32, 0);
        let m = plane(Min, DType::F16, 32, SIGN);
        match self {
            BlockType::Q4_0 => vec![plane(Codes, DType::I4, 1, 8), d],
            BlockType::Q4_1 => vec![plane(Codes, DType::U4, 1, 0), d, m],
            BlockType::Q5_0 => vec![plane(Codes, DType::I5, 1, 16), d],
            BlockType::Q5_1 => vec![plane(Codes, DType::U5, 1, 0), d, m],
            BlockType::Q8_0 => vec![plane(Codes, DType::I8, 1, 0), d],
            BlockType::Mxfp4 => {
                vec![plane(Codes, DType::F4E2M1, 1, 0), plane(Scale, DType::E8M0, 32, 0)]
            }
            BlockType::Q2K => with_min(DType::U2, DType::U4, 16),
            BlockType::Q3K => {
                let mut planes = super_blocks(DType::I3, 4, DType::I6, 16);
                planes.iter_mut().filter(|p| p.part == Scale).for_each(|p| p.flip = 32);
                planes
            }
            BlockType::Q4K => with_min(DType::U4, DType::U6, 32),
            BlockType::Q5K => with_min(DType::U5, DType::U6, 32),
            BlockType::Q6K => super_blocks(DType::I6, 32, DType::I8, 16),
        }
    }

    /// The numbers of one plane in a block, as stored. Nothing is written where `block` or `out` has another length
    /// than the format's.
    pub(in crate::checkpoint) fn read(self, part: BlockPart, block: &[u8], out: &mut [u32]) {
        if block.len() as u64 != self.extent().1 {
            return;
        }
        match (self, part) {
            (BlockType::Q4_0, BlockPart::Codes) => halves(&block[2..], out),
            (BlockType::Q4_1, BlockPart::Codes) => halves(&block[4..], out),
            (BlockType::Q5_0, BlockPart::Codes) => {
                halves(&block[6..], out);
                fifth_bits(&block[2..6], out);
            }
            (BlockType::Q5_1, BlockPart::Codes) => {
                halves(&block[8..], out);
                fifth_bits(&block[4..8], out);
            }
            (BlockType::Q8_0, BlockPart::Codes) => bytes(&block[2..], out),
            (BlockType::Mxfp4, BlockPart::Codes) => halves(&block[1..], out),
            (BlockType::Mxfp4, BlockPart::Scale) => bytes(&block[..1], out),
            (BlockType::Q4_1 | BlockType::Q5_1, BlockPart::Min) => half(&block[2..4], out),
            (
                BlockType::Q4_0
                | BlockType::Q4_1
                | BlockType::Q5_0
                | BlockType::Q5_1
                | BlockType::Q8_0,
                BlockPart::Scale,
            ) => half(&block[..2], out),

            (BlockType::Q2K, BlockPart::Codes) => quarters(&block[16..80], out),
            (BlockType::Q2K, BlockPart::Scale) => {
                out.iter_mut().zip(&block[..16]).for_each(|(o, b)| *o = u32::from(b & 15));
            }
            (BlockType::Q2K, BlockPart::Min) => {
                out.iter_mut().zip(&block[..16]).for_each(|(o, b)| *o = u32::from(b >> 4));
            }
            (BlockType::Q2K, BlockPart::Scale1) => half(&block[80..82], out),
            (BlockType::Q2K, BlockPart::Min1) => half(&block[82..84], out),

            (BlockType::Q3K, BlockPart::Codes) => {
                quarters(&block[32..96], out);
                // Bit n of byte c is the third bit of element 32n + c.
                for (at, o) in out.iter_mut().enumerate() {
                    *o |= u32::from(block[at % 32] >> (at / 32) & 1) << 2;
                }
            }
            (BlockType::Q3K, BlockPart::Scale) => q3_scales(&block[96..108], out),
            (BlockType::Q3K, BlockPart::Scale1) => half(&block[108..110], out),

            (BlockType::Q4K, BlockPart::Codes) => runs(&block[16..144], out),
            (BlockType::Q5K, BlockPart::Codes) => {
                runs(&block[48..176], out);
                for (at, o) in out.iter_mut().enumerate() {
                    *o |= u32::from(block[16 + at % 32] >> (at / 32) & 1) << 4;
                }
            }
            (BlockType::Q4K | BlockType::Q5K, BlockPart::Scale) => six_bits(&block[4..16], 0, out),
            (BlockType::Q4K | BlockType::Q5K, BlockPart::Min) => six_bits(&block[4..16], 4, out),
            (BlockType::Q4K | BlockType::Q5K, BlockPart::Scale1) => half(&block[..2], out),
            (BlockType::Q4K | BlockType::Q5K, BlockPart::Min1) => half(&block[2..4], out),

            (BlockType::Q6K, BlockPart::Codes) => q6_codes(&block[..128], &block[128..192], out),
            (BlockType::Q6K, BlockPart::Scale) => bytes(&block[192..208], out),
            (BlockType::Q6K, BlockPart::Scale1) => half(&block[208..210], out),
            // No plane of the format.
            _ => out.fill(0),
        }
    }
}

/// One f16.
fn half(bits: &[u8], out: &mut [u32]) {
    if let (&[low, high], Some(out)) = (bits, out.first_mut()) {
        *out = u32::from(u16::from_le_bytes([low, high]));
    }
}

fn bytes(bytes: &[u8], out: &mut [u32]) {
    out.iter_mut().zip(bytes).for_each(|(o, b)| *o = u32::from(*b));
}

/// Low nibbles are the first 16 elements, high nibbles the other 16.
fn halves(bytes: &[u8], out: &mut [u32]) {
    for (at, o) in out.iter_mut().enumerate() {
        let byte = bytes.get(at % 16).copied().unwrap_or(0);
        *o = u32::from(if at < 16 { byte & 15 } else { byte >> 4 });
    }
}

/// Bit n of a 32-bit word is the fifth bit of element n.
fn fifth_bits(word: &[u8], out: &mut [u32]) {
    for (at, o) in out.iter_mut().enumerate() {
        *o |= u32::from(word.get(at / 8).copied().unwrap_or(0) >> (at % 8) & 1) << 4;
    }
}

/// 64 bytes of four 2-bit codes: bits 0–1 of 32 bytes are elements 0–31, bits 2–3 the next 32, and so on.
fn quarters(bytes: &[u8], out: &mut [u32]) {
    for (at, o) in out.iter_mut().enumerate() {
        let byte = bytes.get(at / 128 * 32 + at % 32).copied().unwrap_or(0);
        *o = u32::from(byte >> (at % 128 / 32 * 2) & 3);
    }
}

/// 128 bytes of two 4-bit codes: low nibbles of 32 bytes are elements 0–31, their high nibbles the next 32.
fn runs(bytes: &[u8], out: &mut [u32]) {
    for (at, o) in out.iter_mut().enumerate() {
        let byte = bytes.get(at / 64 * 32 + at % 32).copied().unwrap_or(0);
        *o = u32::from(byte >> (at % 64 / 32 * 4) & 15);
    }
}

/// Eight 6-bit numbers out of 12 bytes that hold eight scales (`first` 0) and eight minima (`first` 4): the first four
/// are the low 6 bits of bytes `first`…; the last four have their low nibbles in bytes 8–11 (minima: high nibbles) and
/// their top two bits above the first four.
fn six_bits(packed: &[u8], first: usize, out: &mut [u32]) {
    let byte = |at: usize| u32::from(packed.get(at).copied().unwrap_or(0));
    for (at, o) in out.iter_mut().enumerate() {
        *o = match at {
            0..4 => byte(first + at) & 63,
            _ => {
                let low = byte(4 + at) >> first & 15;
                low | byte(first + at - 4) >> 6 << 4
            }
        };
    }
}

/// Sixteen 6-bit numbers out of 12 bytes: low nibbles of bytes 0–7 are the low bits of 0–7, high nibbles those of
/// 8–15; bits 2n and 2n + 1 of byte 8 + c are the top bits of 4n + c.
fn q3_scales(packed: &[u8], out: &mut [u32]) {
    let byte = |at: usize| u32::from(packed.get(at).copied().unwrap_or(0));
    for (at, o) in out.iter_mut().enumerate() {
        *o = byte(at % 8) >> (at / 8 * 4) & 15 | (byte(8 + at % 4) >> (at / 4 * 2) & 3) << 4;
    }
}

/// In each half of 128: low nibbles of 64 bytes are elements 0–63, their high nibbles the next 64; bits 2n and 2n + 1
/// of 32 bytes are the top bits of elements 32n ….
fn q6_codes(low: &[u8], high: &[u8], out: &mut [u32]) {
    for (at, o) in out.iter_mut().enumerate() {
        let (side, within) = (at / 128, at % 128);
        let nibble = low.get(side * 64 + within % 64).copied().unwrap_or(0) >> (within / 64 * 4);
        let top = high.get(side * 32 + within % 32).copied().unwrap_or(0) >> (within / 32 * 2);
        *o = u32::from(nibble & 15) | u32::from(top & 3) << 4;
    }
}
