//! The common grids over arrays of 16 lanes, compiled once per instruction set.
//!
//! The bodies are plain Rust on fixed-size arrays; the compiler turns each into the vector instructions of the
//! function it is inlined into. Only the order of additions in the error sums is visible, and it is fixed: lane =
//! column mod 16 (`error::Lanes`). Blocks start at multiples of 16 columns, so a block's lanes are its own.

use crate::num::mini;

use super::error::{LANES, Lanes};
use super::grid::LIFT;

/// Checkpoint types with vector kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    F32,
    F16,
    BF16,
}

impl Source {
    /// Bytes of an element.
    pub fn width(self) -> usize {
        match self {
            Source::F32 => 4,
            Source::F16 | Source::BF16 => 2,
        }
    }
}

/// Code types with vector kernels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum CodeKind {
    /// Integers of at most 8 bits, from `lo` to `hi`.
    Int {
        lo: f32,
        hi: f32,
    },
    E4M3,
    E5M2,
    E2M1,
}

/// Plain types with vector kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    F32,
    F16,
    BF16,
    E4M3,
    E5M2,
}

impl Target {
    /// Bytes of an element.
    pub fn width(self) -> usize {
        match self {
            Target::F32 => 4,
            Target::F16 | Target::BF16 => 2,
            Target::E4M3 | Target::E5M2 => 1,
        }
    }
}

/// Scale of one block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scale {
    /// First-level value.
    pub scale: f32,
    /// Reciprocal of the effective scale; may be infinite.
    pub inverse: f32,
}

/// One row to encode.
pub(super) struct Row<'a> {
    pub values: &'a [f32],
    /// Columns of a block: a multiple of 16, or at least the row.
    pub block: usize,
    pub scales: &'a [Scale],
    /// Second-level value; 1 without one.
    pub second: f32,
}

/// The vector functions of one instruction set.
pub(super) struct Ops {
    pub widen: fn(Source, &[u8], &mut [f32]),
    /// Raises each block's entry to its largest magnitude, as f32 bits without sign; NaN and infinity are ≥ 0x7f800000.
    pub peaks: fn(&[f32], usize, &mut [u32]),
    /// Codes of a row, one a byte, and its error sums.
    pub codes: fn(CodeKind, &Row<'_>, &mut [u8], &mut Lanes),
    /// A row converted to a plain type, and its error sums.
    pub cast: fn(Target, &[f32], &mut [u8], &mut Lanes),
    /// Pairs of 4-bit codes into bytes, the first in the low half.
    pub nibbles: fn(&[u8], &mut [u8]),
}

#[inline(always)]
fn widen(source: Source, bytes: &[u8], out: &mut [f32]) {
    #[inline(always)]
    fn each<const W: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; W]) -> f32) {
        for (o, b) in out.iter_mut().zip(bytes.as_chunks::<W>().0) {
            *o = value(*b);
        }
    }
    match source {
        Source::F32 => each(bytes, out, f32::from_le_bytes),
        Source::F16 => each(bytes, out, |b| mini::f16_value(u16::from_le_bytes(b))),
        Source::BF16 => each(bytes, out, |b| mini::bf16_value(u16::from_le_bytes(b))),
    }
}

#[inline(always)]
fn peaks(values: &[f32], block: usize, out: &mut [u32]) {
    for (values, out) in values.chunks(block).zip(out) {
        let (chunks, rest) = values.as_chunks::<LANES>();
        let mut lanes = [0u32; LANES];
        for chunk in chunks {
            for i in 0..LANES {
                lanes[i] = lanes[i].max(chunk[i].to_bits() & 0x7fff_ffff);
            }
        }
        let mut peak = lanes.into_iter().fold(*out, u32::max);
        for v in rest {
            peak = peak.max(v.to_bits() & 0x7fff_ffff);
        }
        *out = peak;
    }
}

/// Code of a quotient and the value it stands for.
trait Code: Copy {
    fn code(self, x: f32) -> (u8, f32);
}

#[derive(Clone, Copy)]
struct Int {
    lo: f32,
    hi: f32,
}

impl Code for Int {
    #[inline(always)]
    fn code(self, x: f32) -> (u8, f32) {
        let half = f32::from_bits(0.5f32.to_bits() | (x.to_bits() & 0x8000_0000));
        let r = x + half;
        let r = if r > self.lo { r } else { self.lo };
        let r = if r < self.hi { r } else { self.hi };
        // SAFETY: the comparisons above leave a number from lo to hi (NaN becomes lo), at most 8 bits wide.
        let n = unsafe { r.to_int_unchecked::<i32>() };
        (n as u8, n as f32)
    }
}

/// A small float. `BY_VALUE`: the sign of the code is that of a comparison with 0, not the sign bit (e2m1).
#[derive(Clone, Copy)]
struct Small<const E: u32, const M: u32, const BY_VALUE: bool>;

impl<const E: u32, const M: u32, const BY_VALUE: bool> Code for Small<E, M, BY_VALUE> {
    #[inline(always)]
    fn code(self, x: f32) -> (u8, f32) {
        let sign = x.to_bits() & 0x8000_0000;
        let a = f32::from_bits(x.to_bits() & 0x7fff_ffff);
        let (code, value) = mini::encode::<E, M>(a, const { mini::largest(E, M) });
        let sign = if BY_VALUE && a == 0.0 { 0 } else { sign };
        let code = code | sign >> (31 - E - M);
        (code as u8, f32::from_bits(value.to_bits() | sign))
    }
}

#[inline(always)]
fn codes(kind: CodeKind, row: &Row<'_>, out: &mut [u8], lanes: &mut Lanes) {
    match kind {
        CodeKind::Int { lo, hi } => row_codes(Int { lo, hi }, row, out, lanes),
        CodeKind::E4M3 => row_codes(Small::<4, 3, false>, row, out, lanes),
        CodeKind::E5M2 => row_codes(Small::<5, 2, false>, row, out, lanes),
        CodeKind::E2M1 => row_codes(Small::<2, 1, true>, row, out, lanes),
    }
}

#[inline(always)]
fn row_codes<C: Code>(kind: C, row: &Row<'_>, out: &mut [u8], lanes: &mut Lanes) {
    let mut sums = *lanes;
    let second = row.second;
    for ((values, out), s) in
        row.values.chunks(row.block).zip(out.chunks_mut(row.block)).zip(row.scales)
    {
        if s.inverse > f32::MAX {
            lifted(kind, values, *s, second, out, &mut sums);
            continue;
        }
        let (chunks, rest) = values.as_chunks::<LANES>();
        let (outs, out_rest) = out.as_chunks_mut::<LANES>();
        for (v, o) in chunks.iter().zip(outs) {
            let mut decoded = [0f32; LANES];
            for i in 0..LANES {
                let (code, value) = kind.code(v[i] * s.inverse);
                o[i] = code;
                decoded[i] = (value * s.scale) * second;
            }
            add(&mut sums, v, &decoded);
        }
        for (i, (v, o)) in rest.iter().zip(out_rest).enumerate() {
            let (code, value) = kind.code(*v * s.inverse);
            *o = code;
            sums.add(i, *v, (value * s.scale) * second);
        }
    }
    *lanes = sums;
}

/// A block whose scale has no finite reciprocal (`grid::Chosen::quotient`).
#[cold]
#[inline(never)]
fn lifted<C: Code>(
    kind: C,
    values: &[f32],
    s: Scale,
    second: f32,
    out: &mut [u8],
    sums: &mut Lanes,
) {
    let product = s.scale * second;
    let effective = if product == 0.0 { second } else { product };
    let inverse = 1.0 / (effective * LIFT);
    for (i, (v, o)) in values.iter().zip(out).enumerate() {
        let (code, value) = kind.code((*v * LIFT) * inverse);
        *o = code;
        sums.add(i, *v, (value * s.scale) * second);
    }
}

/// Adds 16 columns, each to its own lane.
#[inline(always)]
fn add(sums: &mut Lanes, values: &[f32; LANES], decoded: &[f32; LANES]) {
    for i in 0..LANES {
        let v = f64::from(values[i]);
        let d = v - f64::from(decoded[i]);
        sums.error[i] += d * d;
        sums.squared[i] += v * v;
    }
}

#[inline(always)]
fn cast(target: Target, values: &[f32], out: &mut [u8], lanes: &mut Lanes) {
    #[inline(always)]
    fn each<const W: usize>(
        values: &[f32],
        out: &mut [u8],
        lanes: &mut Lanes,
        convert: impl Fn(f32) -> ([u8; W], f32),
    ) {
        let mut sums = *lanes;
        let (chunks, rest) = values.as_chunks::<LANES>();
        let (outs, _) = out.as_chunks_mut::<W>();
        let (full, out_rest) = outs.as_chunks_mut::<LANES>();
        for (v, o) in chunks.iter().zip(full) {
            let mut decoded = [0f32; LANES];
            for i in 0..LANES {
                (o[i], decoded[i]) = convert(v[i]);
            }
            add(&mut sums, v, &decoded);
        }
        for (i, (v, o)) in rest.iter().zip(out_rest).enumerate() {
            let decoded;
            (*o, decoded) = convert(*v);
            sums.add(i, *v, decoded);
        }
        *lanes = sums;
    }
    match target {
        Target::F32 => each(values, out, lanes, |x| (x.to_le_bytes(), x)),
        Target::F16 => each(values, out, lanes, |x| {
            let h = mini::f16_bits(x);
            (h.to_le_bytes(), mini::f16_value(h))
        }),
        Target::BF16 => each(values, out, lanes, |x| {
            let h = mini::bf16_bits(x);
            (h.to_le_bytes(), mini::bf16_value(h))
        }),
        Target::E4M3 => each(values, out, lanes, |x| {
            let (code, value) = Small::<4, 3, false>.code(x);
            ([code], value)
        }),
        // By way of f16 (`encoder::cast_code`).
        Target::E5M2 => each(values, out, lanes, |x| {
            let a = f32::from_bits(x.to_bits() & 0x7fff_ffff);
            let (_, half) = mini::encode::<5, 10>(a, 57344.0);
            let half = f32::from_bits(half.to_bits() | (x.to_bits() & 0x8000_0000));
            let (code, value) = Small::<5, 2, false>.code(half);
            ([code], value)
        }),
    }
}

#[inline(always)]
fn nibbles(codes: &[u8], out: &mut [u8]) {
    let (pairs, rest) = codes.as_chunks::<2>();
    for (o, [low, high]) in out.iter_mut().zip(pairs) {
        *o = low & 15 | high << 4;
    }
    if let (Some(o), [low]) = (out.get_mut(pairs.len()), rest) {
        *o = low & 15;
    }
}

pub(super) mod portable {
    use super::Ops;

    pub(in super::super) static OPS: Ops = Ops {
        widen: |source, bytes, out| super::widen(source, bytes, out),
        peaks: |values, block, out| super::peaks(values, block, out),
        codes: |kind, row, out, lanes| super::codes(kind, row, out, lanes),
        cast: |target, values, out, lanes| super::cast(target, values, out, lanes),
        nibbles: |codes, out| super::nibbles(codes, out),
    };
}

/// The bodies under a set of target features. FMA is left out on purpose, although nothing would contract without
/// being asked to.
#[cfg(target_arch = "x86_64")]
macro_rules! compiled_for {
    ($name:ident, $features:literal) => {
        pub(super) mod $name {
            use super::{CodeKind, Lanes, Ops, Row, Source, Target};

            #[target_feature(enable = $features)]
            fn widen(source: Source, bytes: &[u8], out: &mut [f32]) {
                super::widen(source, bytes, out);
            }

            #[target_feature(enable = $features)]
            fn peaks(values: &[f32], block: usize, out: &mut [u32]) {
                super::peaks(values, block, out);
            }

            #[target_feature(enable = $features)]
            fn codes(kind: CodeKind, row: &Row<'_>, out: &mut [u8], lanes: &mut Lanes) {
                super::codes(kind, row, out, lanes);
            }

            #[target_feature(enable = $features)]
            fn cast(target: Target, values: &[f32], out: &mut [u8], lanes: &mut Lanes) {
                super::cast(target, values, out, lanes);
            }

            #[target_feature(enable = $features)]
            fn nibbles(codes: &[u8], out: &mut [u8]) {
                super::nibbles(codes, out);
            }

            // SAFETY (all of them): `Kernel::ops` hands the table out only where the processor has the features.
            pub(in super::super) static OPS: Ops = Ops {
                // SAFETY: as above.
                widen: |source, bytes, out| unsafe { widen(source, bytes, out) },
                // SAFETY: as above.
                peaks: |values, block, out| unsafe { peaks(values, block, out) },
                // SAFETY: as above.
                codes: |kind, row, out, lanes| unsafe { codes(kind, row, out, lanes) },
                // SAFETY: as above.
                cast: |target, values, out, lanes| unsafe { cast(target, values, out, lanes) },
                // SAFETY: as above.
                nibbles: |codes, out| unsafe { nibbles(codes, out) },
            };
        }
    };
}

#[cfg(target_arch = "x86_64")]
compiled_for!(avx2, "avx2");
#[cfg(target_arch = "x86_64")]
compiled_for!(avx512, "avx512f,avx512bw,avx512dq,avx512vl");
