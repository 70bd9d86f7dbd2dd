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

/// How the scales of a row come from its blocks' magnitudes, where a vector kernel covers it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum ScaleKind {
    /// Magnitude over `top`, `zero` for a block of zeros, rounded into the type.
    Quotient { top: f32, zero: f32, stored: Stored },
    /// Magnitude times the reciprocal of the largest code, 1 for a block of zeros, rounded into the type.
    Product { inverse: f32, stored: Stored },
    /// Magnitude over `top`, over the second level, in e4m3.
    E4M3 { top: f32 },
}

/// Scale types with vector kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stored {
    F32,
    F16,
    BF16,
}

/// Scales of a row's blocks.
#[derive(Debug, Default)]
pub(super) struct Scales {
    /// First-level codes.
    pub codes: Vec<u32>,
    /// First-level values.
    pub values: Vec<f32>,
    /// Reciprocals of the effective scales; may be infinite.
    pub inverses: Vec<f32>,
}

/// One row to encode.
pub(super) struct Row<'a> {
    pub values: &'a [f32],
    /// First-level value and reciprocal of the effective scale for every 16 columns; the last may be fewer.
    pub scales: &'a [f32],
    pub inverses: &'a [f32],
    /// Second-level value; 1 without one.
    pub second: f32,
}

/// The vector functions of one instruction set.
pub(super) struct Ops {
    pub widen: fn(Source, &[u8], &mut [f32]),
    /// Raises each block's entry to its largest magnitude, as f32 bits without sign; NaN and infinity are ≥ 0x7f800000.
    pub peaks: fn(&[f32], usize, &mut [u32]),
    /// Scales of blocks whose magnitudes are all below 2^126, under a second level of that value.
    pub scales: fn(ScaleKind, f32, &[u32], &mut Scales),
    /// Codes of a row, one a byte, and the values they decode to.
    pub codes: fn(CodeKind, &Row<'_>, &mut [u8], &mut [f32]),
    /// A row converted to a plain type, and the values it decodes to.
    pub cast: fn(Target, &[f32], &mut [u8], &mut [f32]),
    /// Error sums of a row of values and what they decode to.
    pub error: fn(&[f32], &[f32]) -> Lanes,
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
        let mut n = LANES / 2;
        while n > 0 {
            for i in 0..n {
                lanes[i] = lanes[i].max(lanes[i + n]);
            }
            n /= 2;
        }
        let mut peak = lanes[0].max(*out);
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
fn codes(kind: CodeKind, row: &Row<'_>, out: &mut [u8], decoded: &mut [f32]) {
    match kind {
        CodeKind::Int { lo, hi } => row_codes(Int { lo, hi }, row, out, decoded),
        CodeKind::E4M3 => row_codes(Small::<4, 3, false>, row, out, decoded),
        CodeKind::E5M2 => row_codes(Small::<5, 2, false>, row, out, decoded),
        CodeKind::E2M1 => row_codes(Small::<2, 1, true>, row, out, decoded),
    }
}

#[inline(always)]
fn row_codes<C: Code>(kind: C, row: &Row<'_>, out: &mut [u8], decoded: &mut [f32]) {
    let second = row.second;
    let (chunks, rest) = row.values.as_chunks::<LANES>();
    let (outs, out_rest) = out.as_chunks_mut::<LANES>();
    let (full, decoded_rest) = decoded.as_chunks_mut::<LANES>();
    let scales = row.scales.iter().zip(row.inverses);
    let lifts = row.inverses.iter().any(|i| *i > f32::MAX);
    if lifts {
        // Blocks whose scale has no finite reciprocal (`grid::Chosen::quotient`); rare, and slow on any machine.
        let blocks = row.values.chunks(LANES).zip(row.inverses).zip(row.scales);
        let outs = out.chunks_mut(LANES).zip(decoded.chunks_mut(LANES));
        for (((v, inverse), scale), (o, d)) in blocks.zip(outs) {
            lifted(kind, v, *scale, *inverse, second, o, d);
        }
        return;
    }
    for (((v, o), d), (scale, inverse)) in chunks.iter().zip(outs).zip(full).zip(scales) {
        for i in 0..LANES {
            let (code, value) = kind.code(v[i] * inverse);
            o[i] = code;
            d[i] = (value * scale) * second;
        }
    }
    if let (Some(scale), Some(inverse)) = (row.scales.last(), row.inverses.last()) {
        for ((v, o), d) in rest.iter().zip(out_rest).zip(decoded_rest) {
            let (code, value) = kind.code(*v * inverse);
            *o = code;
            *d = (value * scale) * second;
        }
    }
}

#[cold]
#[inline(never)]
fn lifted<C: Code>(
    kind: C,
    values: &[f32],
    scale: f32,
    inverse: f32,
    second: f32,
    out: &mut [u8],
    decoded: &mut [f32],
) {
    let product = scale * second;
    let effective = if product == 0.0 { second } else { product };
    let (lift, inverse) =
        if inverse > f32::MAX { (LIFT, 1.0 / (effective * LIFT)) } else { (1.0, inverse) };
    for ((v, o), d) in values.iter().zip(out).zip(decoded) {
        let (code, value) = kind.code((*v * lift) * inverse);
        *o = code;
        *d = (value * scale) * second;
    }
}

#[inline(always)]
fn scales(kind: ScaleKind, second: f32, peaks: &[u32], out: &mut Scales) {
    #[inline(always)]
    fn each(second: f32, peaks: &[u32], out: &mut Scales, choose: impl Fn(f32) -> (u32, f32)) {
        let n = peaks.len();
        out.codes.resize(n, 0);
        out.values.resize(n, 0.0);
        out.inverses.resize(n, 0.0);
        let outs = out.codes.iter_mut().zip(&mut out.values).zip(&mut out.inverses);
        for (peak, ((code, value), inverse)) in peaks.iter().zip(outs) {
            let chosen = choose(f32::from_bits(*peak));
            let product = chosen.1 * second;
            (*code, *value) = chosen;
            *inverse = 1.0 / if product == 0.0 { second } else { product };
        }
    }
    /// Rounded into the type; the smallest value where that gives 0, the largest f16 where it overflows.
    #[inline(always)]
    fn rounded(s: f32, stored: Stored) -> (u32, f32) {
        match stored {
            Stored::F32 => (s.to_bits(), s),
            Stored::F16 => {
                let (code, value) = mini::encode::<5, 10>(s, 65504.0);
                if code == 0 { (1, const { mini::pow2(-24) }) } else { (code, value) }
            }
            Stored::BF16 => {
                let code = u32::from(mini::bf16_bits(s));
                let code = if code == 0 { 1 } else { code };
                (code, f32::from_bits(code << 16))
            }
        }
    }
    #[inline(always)]
    fn quotient(top: f32, zero: f32, second: f32, peaks: &[u32], out: &mut Scales, stored: Stored) {
        each(second, peaks, out, |amax| {
            let s = amax / top;
            // An integer grid takes 1e-12 where the quotient vanishes, a float grid 1 where the block does; an f32
            // scale that vanished otherwise is the smallest f32.
            let vanished = if amax == 0.0 || zero < 1.0 { zero } else { f32::from_bits(1) };
            rounded(if s > 0.0 { s } else { vanished }, stored)
        });
    }
    #[inline(always)]
    fn product(inverse: f32, second: f32, peaks: &[u32], out: &mut Scales, stored: Stored) {
        each(second, peaks, out, |amax| {
            rounded(if amax == 0.0 { 1.0 } else { amax * inverse }, stored)
        });
    }
    match kind {
        ScaleKind::Quotient { top, zero, stored } => match stored {
            Stored::F32 => quotient(top, zero, second, peaks, out, Stored::F32),
            Stored::F16 => quotient(top, zero, second, peaks, out, Stored::F16),
            Stored::BF16 => quotient(top, zero, second, peaks, out, Stored::BF16),
        },
        ScaleKind::Product { inverse, stored } => match stored {
            // Float grids divide under an f32 scale.
            Stored::F32 => product(inverse, second, peaks, out, Stored::F32),
            Stored::F16 => product(inverse, second, peaks, out, Stored::F16),
            Stored::BF16 => product(inverse, second, peaks, out, Stored::BF16),
        },
        ScaleKind::E4M3 { top } => each(second, peaks, out, |amax| {
            // The f32 quotient equals the f64 one rounded: 53 bits are more than twice 24 and two.
            let target = amax / top;
            let (code, value) = mini::encode::<4, 3>(target / second, 448.0);
            let tiny = if target == 0.0 { (0, 0.0) } else { (1, const { mini::pow2(-9) }) };
            if code == 0 { tiny } else { (code, value) }
        }),
    }
}

/// Each column adds to its own lane. A pass of its own: next to the rounding, the sums would not stay in registers.
#[inline(always)]
fn error(values: &[f32], decoded: &[f32]) -> Lanes {
    let (chunks, rest) = values.as_chunks::<LANES>();
    let (full, decoded_rest) = decoded.as_chunks::<LANES>();
    let (mut error, mut squared) = ([0f64; LANES], [0f64; LANES]);
    for (v, d) in chunks.iter().zip(full) {
        for i in 0..LANES {
            let v = f64::from(v[i]);
            let d = v - f64::from(d[i]);
            error[i] += d * d;
            squared[i] += v * v;
        }
    }
    let mut sums = Lanes { error, squared };
    sums.add_row(rest, decoded_rest);
    sums
}

#[inline(always)]
fn cast(target: Target, values: &[f32], out: &mut [u8], decoded: &mut [f32]) {
    #[inline(always)]
    fn each<const W: usize>(
        values: &[f32],
        out: &mut [u8],
        decoded: &mut [f32],
        convert: impl Fn(f32) -> ([u8; W], f32),
    ) {
        for ((v, o), d) in values.iter().zip(out.as_chunks_mut::<W>().0).zip(decoded) {
            (*o, *d) = convert(*v);
        }
    }
    match target {
        Target::F32 => each(values, out, decoded, |x| (x.to_le_bytes(), x)),
        Target::F16 => each(values, out, decoded, |x| {
            let h = mini::f16_bits(x);
            (h.to_le_bytes(), mini::f16_value(h))
        }),
        Target::BF16 => each(values, out, decoded, |x| {
            let h = mini::bf16_bits(x);
            (h.to_le_bytes(), mini::bf16_value(h))
        }),
        Target::E4M3 => each(values, out, decoded, |x| {
            let (code, value) = Small::<4, 3, false>.code(x);
            ([code], value)
        }),
        // By way of f16 (`encoder::cast_code`).
        Target::E5M2 => each(values, out, decoded, |x| {
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
        scales: |kind, second, peaks, out| super::scales(kind, second, peaks, out),
        codes: |kind, row, out, decoded| super::codes(kind, row, out, decoded),
        cast: |target, values, out, decoded| super::cast(target, values, out, decoded),
        error: |values, decoded| super::error(values, decoded),
        nibbles: |codes, out| super::nibbles(codes, out),
    };
}

/// The bodies under a set of target features. FMA is left out on purpose, although nothing would contract without
/// being asked to.
#[cfg(target_arch = "x86_64")]
macro_rules! compiled_for {
    ($name:ident, $features:literal) => {
        pub(super) mod $name {
            use super::{CodeKind, Lanes, Ops, Row, ScaleKind, Scales, Source, Target};

            #[target_feature(enable = $features)]
            fn widen(source: Source, bytes: &[u8], out: &mut [f32]) {
                super::widen(source, bytes, out);
            }

            #[target_feature(enable = $features)]
            fn peaks(values: &[f32], block: usize, out: &mut [u32]) {
                super::peaks(values, block, out);
            }

            #[target_feature(enable = $features)]
            fn scales(kind: ScaleKind, second: f32, peaks: &[u32], out: &mut Scales) {
                super::scales(kind, second, peaks, out);
            }

            #[target_feature(enable = $features)]
            fn codes(kind: CodeKind, row: &Row<'_>, out: &mut [u8], decoded: &mut [f32]) {
                super::codes(kind, row, out, decoded);
            }

            #[target_feature(enable = $features)]
            fn cast(target: Target, values: &[f32], out: &mut [u8], decoded: &mut [f32]) {
                super::cast(target, values, out, decoded);
            }

            #[target_feature(enable = $features)]
            fn error(values: &[f32], decoded: &[f32]) -> Lanes {
                super::error(values, decoded)
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
                scales: |kind, second, peaks, out| unsafe { scales(kind, second, peaks, out) },
                // SAFETY: as above.
                codes: |kind, row, out, decoded| unsafe { codes(kind, row, out, decoded) },
                // SAFETY: as above.
                cast: |target, values, out, decoded| unsafe { cast(target, values, out, decoded) },
                // SAFETY: as above.
                error: |values, decoded| unsafe { error(values, decoded) },
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
