//! The common grids over 16 lanes, compiled once per instruction set.
//!
//! The bodies are written in the operations of [`Simd`]. A row is read twice: for the magnitudes of its blocks, and to
//! encode it; widening, rounding, packing and the error sums of 16 columns stay in registers. The order of additions in
//! the sums is visible, and fixed: lane = column mod 16 ([`Lanes`]). Blocks start at multiples of 16 columns, so a
//! block's lanes are its own.
//!
//! | file | what |
//! |---|---|
//! | `codes` | codes under given scales, packed |
//! | `scales` | scales of blocks |
//! | `cast` | plain types |
//! | `values` | values of codes |

mod cast;
mod codes;
mod scales;
mod values;

use crate::num::mini;

use cast::cast;
use codes::codes;
use scales::scales;
use values::values;

use super::error::{Lanes, RUN};
use super::simd::{LANES, Portable, Simd};

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
    /// Integers from `lo` to `hi`, of 8 bits or of half a byte.
    Int {
        lo: f32,
        hi: f32,
        half: bool,
    },
    E4M3,
    E5M2,
    E2M1,
}

/// Code types that vector kernels decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CodeType {
    I8,
    I4,
    E4M3,
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
    /// Power of two of the magnitude's exponent less that of the largest code (0 to 127), in e8m0.
    Mx { exponent: u32 },
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
    /// Source bytes.
    pub bytes: &'a [u8],
    /// First-level value and reciprocal of the effective scale for every 16 · 2^shift columns; the last may be fewer.
    pub scales: &'a [f32],
    pub inverses: &'a [f32],
    pub shift: u32,
    /// Second-level value; 1 without one.
    pub second: f32,
}

/// The vector functions of one instruction set.
pub(super) struct Ops {
    /// Raises each block's entry to its largest magnitude, as f32 bits without sign; NaN and infinity are ≥ 0x7f800000.
    pub peaks: fn(Source, &[u8], usize, &mut [u32]),
    /// Scales of blocks whose magnitudes are all below 2^126, under a second level of that value.
    pub scales: fn(ScaleKind, f32, &[u32], &mut Scales),
    /// Packed codes of a row and its error sums.
    pub codes: fn(CodeKind, Source, &Row<'_>, &mut [u8]) -> Lanes,
    /// A row converted to a plain type, and its error sums.
    pub cast: fn(Target, Source, &[u8], &mut [u8]) -> Lanes,
    /// Values of packed codes times the scales of their blocks, one for so many columns, which are a multiple of 16.
    pub values: fn(CodeType, &[u8], &[f32], usize, &mut [f32]),
    /// Error sums of a row of values and what they decode to.
    pub error: fn(&[f32], &[f32]) -> Lanes,
}

/// Reads 16 elements, which are `B` bytes.
trait Load<const B: usize>: Copy {
    fn load<S: Simd>(self, s: S, bytes: &[u8; B]) -> S::F;
}

#[derive(Clone, Copy)]
struct FromF32;

impl Load<64> for FromF32 {
    #[inline(always)]
    fn load<S: Simd>(self, s: S, bytes: &[u8; 64]) -> S::F {
        s.load_words(bytes)
    }
}

#[derive(Clone, Copy)]
struct FromF16;

impl Load<32> for FromF16 {
    #[inline(always)]
    fn load<S: Simd>(self, s: S, bytes: &[u8; 32]) -> S::F {
        s.f16_value(s.load_halves(bytes))
    }
}

#[derive(Clone, Copy)]
struct FromBf16;

impl Load<32> for FromBf16 {
    #[inline(always)]
    fn load<S: Simd>(self, s: S, bytes: &[u8; 32]) -> S::F {
        s.bf16_value(s.load_halves(bytes))
    }
}

#[inline(always)]
fn peaks<S: Simd>(s: S, source: Source, bytes: &[u8], block: usize, out: &mut [u32]) {
    // As unsigned numbers, bits without sign compare as magnitudes do.
    #[inline(always)]
    fn halves<S: Simd>(s: S, bytes: &[u8], block: usize, out: &mut [u32], bits: fn(u16) -> u32) {
        if let (16, (blocks, [])) = (block, bytes.as_chunks::<32>()) {
            for (bytes, out) in blocks.iter().zip(out) {
                *out = (*out).max(bits(s.peak_of_16_halves(bytes)));
            }
            return;
        }
        let (mut bytes, mut out) = (bytes, out);
        if block == 128 {
            // The usual block, whose length is known to the compiler here.
            let (blocks, bytes_rest) = bytes.as_chunks::<256>();
            let (outs, out_rest) = out.split_at_mut(blocks.len().min(out.len()));
            for (bytes, out) in blocks.iter().zip(outs) {
                *out = (*out).max(bits(s.peak_of_halves(bytes.as_chunks::<64>().0)));
            }
            (bytes, out) = (bytes_rest, out_rest);
        }
        for (bytes, out) in bytes.chunks(2 * block).zip(out) {
            let (chunks, rest) = bytes.as_chunks::<64>();
            let rest = rest.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b) & 0x7fff);
            *out = (*out).max(bits(rest.fold(s.peak_of_halves(chunks), u16::max)));
        }
    }
    match source {
        Source::F32 => {
            for (bytes, out) in bytes.chunks(4 * block).zip(out) {
                let (chunks, rest) = bytes.as_chunks::<64>();
                let rest = rest.as_chunks::<4>().0;
                let rest = rest.iter().map(|b| u32::from_le_bytes(*b) & 0x7fff_ffff);
                *out = rest.fold((*out).max(s.peak_of_words(chunks)), u32::max);
            }
        }
        Source::F16 => halves(s, bytes, block, out, |h| mini::f16_value(h).to_bits()),
        Source::BF16 => halves(s, bytes, block, out, |h| u32::from(h) << 16),
    }
}

impl Row<'_> {
    /// Value and reciprocal of the scale of chunk `at`.
    #[inline(always)]
    fn scale(&self, at: usize) -> (f32, f32) {
        (self.scales[at >> self.shift], self.inverses[at >> self.shift])
    }

    /// Whether the row takes the slower path that covers everything: it has blocks whose scale has no finite reciprocal
    /// (`grid::Chosen::quotient`), or a second level that is not usual for such codes. It is compiled for the portable
    /// kernel alone.
    #[cfg(target_arch = "x86_64")]
    fn unusual(&self, kind: CodeKind) -> bool {
        self.second != 1.0 && kind != CodeKind::E2M1
            || self.inverses.iter().any(|inverse| *inverse > f32::MAX)
    }
}

/// Chunks of a run.
const CHUNKS: usize = RUN / LANES;

/// Sums of one run in f32 ([`Lanes`]).
#[derive(Clone, Copy)]
struct Run<S: Simd> {
    error: S::F,
    squared: S::F,
}

impl<S: Simd> Run<S> {
    #[inline(always)]
    fn new(s: S) -> Run<S> {
        Run { error: s.splat(0.0), squared: s.splat(0.0) }
    }

    /// Adds 16 columns.
    #[inline(always)]
    fn add(&mut self, s: S, values: S::F, decoded: S::F) {
        let d = s.sub(values, decoded);
        self.error = s.fused(d, d, self.error);
        self.squared = s.fused(values, values, self.squared);
    }

    /// Adds the run to its row.
    #[inline(always)]
    fn end(&self, s: S, row: &mut Lanes) {
        row.add(&s.store(self.error), &s.store(self.squared));
    }
}

#[inline(always)]
fn error<S: Simd>(s: S, values: &[f32], decoded: &[f32]) -> Lanes {
    let mut sums = Lanes::ZERO;
    for (values, decoded) in values.chunks(RUN).zip(decoded.chunks(RUN)) {
        let mut run = Run::new(s);
        let ((v, rest), (d, decoded_rest)) =
            (values.as_chunks::<LANES>(), decoded.as_chunks::<LANES>());
        for (v, d) in v.iter().zip(d) {
            run.add(s, s.load(v), s.load(d));
        }
        if !rest.is_empty() {
            let (mut v, mut d) = ([0.0; LANES], [0.0; LANES]);
            v[..rest.len()].copy_from_slice(rest);
            d[..rest.len()].copy_from_slice(decoded_rest);
            run.add(s, s.load(&v), s.load(&d));
        }
        run.end(s, &mut sums);
    }
    sums
}

pub(super) mod portable {
    use super::{Ops, Portable};

    pub(in crate::quantize) static OPS: Ops = Ops {
        peaks: |source, bytes, block, out| super::peaks(Portable, source, bytes, block, out),
        scales: |kind, second, peaks, out| super::scales(Portable, kind, second, peaks, out),
        codes: |kind, source, row, out| super::codes(Portable, kind, source, row, out),
        cast: |target, source, bytes, out| super::cast(Portable, target, source, bytes, out),
        values: |codes, bytes, scales, block, out| {
            super::values(Portable, codes, bytes, scales, block, out);
        },
        error: |values, decoded| super::error(Portable, values, decoded),
    };
}

/// The bodies under a set of target features, for the type that proves them.
#[cfg(target_arch = "x86_64")]
macro_rules! compiled_for {
    ($name:ident, $simd:ident, $features:literal) => {
        pub(super) mod $name {
            use super::{CodeKind, CodeType, Lanes, Ops, Row, ScaleKind, Scales, Source, Target};
            use crate::quantize::simd::$simd;

            #[target_feature(enable = $features)]
            fn peaks(s: $simd, source: Source, bytes: &[u8], block: usize, out: &mut [u32]) {
                super::peaks(s, source, bytes, block, out);
            }

            #[target_feature(enable = $features)]
            fn scales(s: $simd, kind: ScaleKind, second: f32, peaks: &[u32], out: &mut Scales) {
                super::scales(s, kind, second, peaks, out);
            }

            #[target_feature(enable = $features)]
            fn codes(
                s: $simd,
                kind: CodeKind,
                source: Source,
                row: &Row<'_>,
                out: &mut [u8],
            ) -> Lanes {
                super::codes(s, kind, source, row, out)
            }

            #[target_feature(enable = $features)]
            fn cast(
                s: $simd,
                target: Target,
                source: Source,
                bytes: &[u8],
                out: &mut [u8],
            ) -> Lanes {
                super::cast(s, target, source, bytes, out)
            }

            #[target_feature(enable = $features)]
            fn values(
                s: $simd,
                codes: CodeType,
                bytes: &[u8],
                scales: &[f32],
                block: usize,
                out: &mut [f32],
            ) {
                super::values(s, codes, bytes, scales, block, out);
            }

            #[target_feature(enable = $features)]
            fn error(s: $simd, values: &[f32], decoded: &[f32]) -> Lanes {
                super::error(s, values, decoded)
            }

            // SAFETY (all of them): `Kernel::ops` hands the table out only where the processor has the features, which is
            // what a value of the type stands for.
            pub(in crate::quantize) static OPS: Ops = Ops {
                peaks: |source, bytes, block, out| {
                    // SAFETY: as above.
                    unsafe { peaks($simd::assumed(), source, bytes, block, out) }
                },
                scales: |kind, second, peaks, out| {
                    // SAFETY: as above.
                    unsafe { scales($simd::assumed(), kind, second, peaks, out) }
                },
                codes: |kind, source, row, out| {
                    if row.unusual(kind) {
                        return (super::portable::OPS.codes)(kind, source, row, out);
                    }
                    // SAFETY: as above.
                    unsafe { codes($simd::assumed(), kind, source, row, out) }
                },
                cast: |target, source, bytes, out| {
                    // SAFETY: as above.
                    unsafe { cast($simd::assumed(), target, source, bytes, out) }
                },
                values: |codes, bytes, scales, block, out| {
                    // SAFETY: as above.
                    unsafe { values($simd::assumed(), codes, bytes, scales, block, out) }
                },
                error: |values, decoded| {
                    // SAFETY: as above.
                    unsafe { error($simd::assumed(), values, decoded) }
                },
            };
        }
    };
}

#[cfg(target_arch = "x86_64")]
compiled_for!(avx2, Avx2, "avx2,fma");
#[cfg(target_arch = "x86_64")]
compiled_for!(avx512, Avx512, "avx512f,avx512bw,avx512dq,avx512vl");
