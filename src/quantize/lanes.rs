//! The common grids over 16 lanes, compiled once per instruction set.
//!
//! The bodies are written in the operations of [`Simd`]. A row is read twice: for the magnitudes of its blocks, and to
//! encode it; widening, rounding, packing and the error sums of 16 columns stay in registers. The order of additions in
//! the sums is visible, and fixed: lane = column mod 16 ([`Lanes`]). Blocks start at multiples of 16 columns, so a
//! block's lanes are its own.

use crate::num::mini;

use super::error::{Lanes, RUN};
use super::grid::LIFT;
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
    /// Source bytes.
    pub bytes: &'a [u8],
    /// First-level value and reciprocal of the effective scale for every 16 columns; the last may be fewer.
    pub scales: &'a [f32],
    pub inverses: &'a [f32],
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

/// Codes of quotients and the values they stand for.
trait Code: Copy {
    /// Whether scales of a second level are usual.
    const SECOND: bool;
    fn code<S: Simd>(self, s: S, x: S::F) -> (S::I, S::F);
}

#[derive(Clone, Copy)]
struct Int {
    lo: f32,
    hi: f32,
}

impl Code for Int {
    const SECOND: bool = false;

    #[inline(always)]
    fn code<S: Simd>(self, s: S, x: S::F) -> (S::I, S::F) {
        // Half away from zero; NaN becomes `lo`.
        let sign = s.and(s.bits(x), s.splat_bits(1 << 31));
        let half = s.of_bits(s.or(sign, s.splat_bits(const { 0.5f32.to_bits() })));
        let r = s.max(s.add(x, half), s.splat(self.lo));
        let n = s.truncate(s.min(r, s.splat(self.hi)));
        (n, s.float(n))
    }
}

/// A small float. `BY_VALUE`: the sign of the code is that of a comparison with 0, not the sign bit (e2m1).
#[derive(Clone, Copy)]
struct Small<const E: u32, const M: u32, const BY_VALUE: bool>;

impl<const E: u32, const M: u32, const BY_VALUE: bool> Code for Small<E, M, BY_VALUE> {
    const SECOND: bool = E + M == 3;

    #[inline(always)]
    fn code<S: Simd>(self, s: S, x: S::F) -> (S::I, S::F) {
        let bits = s.bits(x);
        let magnitude = s.and(bits, s.splat_bits(0x7fff_ffff));
        let (code, value) = s.encode::<E, M>(s.of_bits(magnitude), const { mini::largest(E, M) });
        let sign = s.and(bits, s.splat_bits(1 << 31));
        const { assert!(E + M == 7 || E + M == 3) }
        let top = if BY_VALUE {
            s.if_less(x, s.splat(0.0), s.splat_bits(1 << (E + M)), s.splat_bits(0))
        } else if E + M == 7 {
            s.shr::<24>(sign)
        } else {
            s.shr::<28>(sign)
        };
        // The value of −0 may be −0 where its code is 0: it adds the same to the sums.
        (s.or(code, top), s.of_bits(s.or(s.bits(value), sign)))
    }
}

/// Codes of 16 columns as they are stored, in `N` bytes.
trait Pack<const N: usize>: Copy {
    fn pack<S: Simd>(self, s: S, codes: S::I) -> [u8; N];
}

/// One a byte.
#[derive(Clone, Copy)]
struct Bytes;

impl Pack<16> for Bytes {
    #[inline(always)]
    fn pack<S: Simd>(self, s: S, codes: S::I) -> [u8; 16] {
        s.store_bytes(codes)
    }
}

/// Pairs of 4-bit codes in a byte, the first in the low half.
#[derive(Clone, Copy)]
struct Nibbles;

impl Pack<8> for Nibbles {
    #[inline(always)]
    fn pack<S: Simd>(self, s: S, codes: S::I) -> [u8; 8] {
        s.store_nibbles(codes)
    }
}

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
fn codes<S: Simd>(s: S, kind: CodeKind, source: Source, row: &Row<'_>, out: &mut [u8]) -> Lanes {
    match source {
        Source::F32 => codes_of(s, kind, FromF32, row, out),
        Source::F16 => codes_of(s, kind, FromF16, row, out),
        Source::BF16 => codes_of(s, kind, FromBf16, row, out),
    }
}

#[inline(always)]
fn codes_of<const B: usize, S: Simd>(
    s: S,
    kind: CodeKind,
    source: impl Load<B>,
    row: &Row<'_>,
    out: &mut [u8],
) -> Lanes {
    match kind {
        CodeKind::Int { lo, hi, half: false } => {
            row_codes(s, Int { lo, hi }, source, Bytes, row, out)
        }
        CodeKind::Int { lo, hi, half: true } => {
            row_codes(s, Int { lo, hi }, source, Nibbles, row, out)
        }
        CodeKind::E4M3 => row_codes(s, Small::<4, 3, false>, source, Bytes, row, out),
        CodeKind::E5M2 => row_codes(s, Small::<5, 2, false>, source, Bytes, row, out),
        CodeKind::E2M1 => row_codes(s, Small::<2, 1, true>, source, Nibbles, row, out),
    }
}

impl Row<'_> {
    /// Whether the row takes the slower path that covers everything: it has blocks whose scale has no finite reciprocal
    /// (`grid::Chosen::quotient`), or a second level that is not usual for such codes. It is compiled for the portable
    /// kernel alone.
    fn unusual(&self, kind: CodeKind) -> bool {
        self.second != 1.0 && kind != CodeKind::E2M1
            || self.inverses.iter().any(|inverse| *inverse > f32::MAX)
    }
}

/// Chunks of a run.
const CHUNKS: usize = RUN / LANES;

/// What turns 16 columns into codes. Not a closure: those are compiled without the caller's instructions.
#[derive(Clone, Copy)]
struct Chunk<S, C, L, P> {
    s: S,
    kind: C,
    source: L,
    packing: P,
    second: f32,
}

impl<S: Simd, C: Code, L, P> Chunk<S, C, L, P> {
    #[inline(always)]
    fn encode<const B: usize, const N: usize>(
        self,
        run: &mut Run<S>,
        bytes: &[u8; B],
        scale: f32,
        inverse: f32,
    ) -> [u8; N]
    where
        L: Load<B>,
        P: Pack<N>,
    {
        let s = self.s;
        let v = self.source.load(s, bytes);
        let x = if S::ANY_ROW && inverse > f32::MAX {
            let product = scale * self.second;
            let effective = if product == 0.0 { self.second } else { product };
            s.mul(s.mul(v, s.splat(LIFT)), s.splat(1.0 / (effective * LIFT)))
        } else {
            s.mul(v, s.splat(inverse))
        };
        let (code, value) = self.kind.code(s, x);
        let first = s.mul(value, s.splat(scale));
        let two = S::ANY_ROW || C::SECOND;
        run.add(s, v, if two { s.mul(first, s.splat(self.second)) } else { first });
        self.packing.pack(s, code)
    }
}

#[inline(always)]
fn row_codes<const B: usize, const N: usize, S: Simd>(
    s: S,
    kind: impl Code,
    source: impl Load<B>,
    packing: impl Pack<N>,
    row: &Row<'_>,
    out: &mut [u8],
) -> Lanes {
    let chunk = Chunk { s, kind, source, packing, second: row.second };
    let mut sums = Lanes::ZERO;
    let (chunks, rest) = row.bytes.as_chunks::<B>();
    let (runs, chunks) = chunks.as_chunks::<CHUNKS>();
    // A last chunk that is not whole has a scale too, which may fill up a run of scales, and 15 half bytes fill up 8.
    let (out, out_rest) = out.split_at_mut((runs.len() * CHUNKS + chunks.len()) * N);
    let (out_runs, outs) = out.as_chunks_mut::<N>().0.as_chunks_mut::<CHUNKS>();
    let (scales, scales_rest) = row.scales.split_at(runs.len() * CHUNKS);
    let (inverses, inverses_rest) = row.inverses.split_at(runs.len() * CHUNKS);
    let (scales, inverses) = (scales.as_chunks::<CHUNKS>().0, inverses.as_chunks::<CHUNKS>().0);
    for (((bytes, out), scale), inverse) in runs.iter().zip(out_runs).zip(scales).zip(inverses) {
        let mut run = Run::new(s);
        for k in 0..CHUNKS {
            out[k] = chunk.encode::<B, N>(&mut run, &bytes[k], scale[k], inverse[k]);
        }
        run.end(s, &mut sums);
    }
    let mut run = Run::new(s);
    let mut last = scales_rest.iter().zip(inverses_rest);
    for ((bytes, out), (scale, inverse)) in chunks.iter().zip(outs).zip(&mut last) {
        *out = chunk.encode::<B, N>(&mut run, bytes, *scale, *inverse);
    }
    if let (false, Some((scale, inverse))) = (rest.is_empty(), last.next()) {
        // Columns that are not there are zeros, whose codes are zeros and whose errors are none.
        let mut padded = [0; B];
        padded[..rest.len()].copy_from_slice(rest);
        let packed: [u8; N] = chunk.encode::<B, N>(&mut run, &padded, *scale, *inverse);
        out_rest.copy_from_slice(&packed[..out_rest.len()]);
    }
    run.end(s, &mut sums);
    sums
}

#[inline(always)]
fn scales<S: Simd>(s: S, kind: ScaleKind, second: f32, peaks: &[u32], out: &mut Scales) {
    match kind {
        ScaleKind::Quotient { top, zero, stored } => {
            each_scale(s, Quotient { top, zero, stored }, second, peaks, out);
        }
        ScaleKind::Product { inverse, stored } => {
            each_scale(s, Product { inverse, stored }, second, peaks, out);
        }
        ScaleKind::E4M3 { top } => each_scale(s, UnderSecond { top }, second, peaks, out),
    }
}

/// Code and value of the scales of 16 magnitudes.
trait Rule: Copy {
    fn choose<S: Simd>(self, s: S, second: f32, amax: S::F) -> (S::I, S::F);
}

/// [`ScaleKind::Quotient`]
#[derive(Clone, Copy)]
struct Quotient {
    top: f32,
    zero: f32,
    stored: Stored,
}

impl Rule for Quotient {
    #[inline(always)]
    fn choose<S: Simd>(self, s: S, _: f32, amax: S::F) -> (S::I, S::F) {
        let quotient = s.div(amax, s.splat(self.top));
        // An integer grid takes 1e-12 where the quotient vanishes, a float grid 1 where the block does; an f32
        // scale that vanished otherwise is the smallest f32.
        let zero = self.zero.to_bits();
        let vanished = s.if_zero(
            s.bits(amax),
            s.splat_bits(zero),
            s.splat_bits(if self.zero < 1.0 { zero } else { 1 }),
        );
        rounded(s, s.if_less(s.splat(0.0), quotient, s.bits(quotient), vanished), self.stored)
    }
}

/// [`ScaleKind::Product`]
#[derive(Clone, Copy)]
struct Product {
    inverse: f32,
    stored: Stored,
}

impl Rule for Product {
    #[inline(always)]
    fn choose<S: Simd>(self, s: S, _: f32, amax: S::F) -> (S::I, S::F) {
        let product = s.bits(s.mul(amax, s.splat(self.inverse)));
        let one = s.splat_bits(const { 1f32.to_bits() });
        rounded(s, s.if_zero(s.bits(amax), one, product), self.stored)
    }
}

/// [`ScaleKind::E4M3`]
#[derive(Clone, Copy)]
struct UnderSecond {
    top: f32,
}

impl Rule for UnderSecond {
    #[inline(always)]
    fn choose<S: Simd>(self, s: S, second: f32, amax: S::F) -> (S::I, S::F) {
        // The f32 quotient equals the f64 one rounded: 53 bits are more than twice 24 and two.
        let target = s.div(amax, s.splat(self.top));
        let (code, value) = s.encode::<4, 3>(s.div(target, s.splat(second)), 448.0);
        let zero = s.splat_bits(0);
        let smallest = s.splat_bits(const { mini::pow2(-9).to_bits() });
        let tiny = s.if_zero(s.bits(target), zero, s.splat_bits(1));
        let tiny_value = s.if_zero(s.bits(target), zero, smallest);
        (s.if_zero(code, tiny, code), s.of_bits(s.if_zero(code, tiny_value, s.bits(value))))
    }
}

/// Scale bits rounded into the type; the smallest value where that gives 0, the largest f16 where it overflows.
#[inline(always)]
fn rounded<S: Simd>(s: S, bits: S::I, stored: Stored) -> (S::I, S::F) {
    match stored {
        Stored::F32 => (bits, s.of_bits(bits)),
        Stored::F16 => {
            let (code, value) = s.encode::<5, 10>(s.of_bits(bits), 65504.0);
            let smallest = s.splat_bits(const { mini::pow2(-24).to_bits() });
            let value = s.if_zero(code, smallest, s.bits(value));
            (s.if_zero(code, s.splat_bits(1), code), s.of_bits(value))
        }
        Stored::BF16 => {
            let code = s.bf16_bits(s.of_bits(bits));
            let code = s.if_zero(code, s.splat_bits(1), code);
            (code, s.bf16_value(code))
        }
    }
}

/// Codes, values and reciprocals of 16 scales.
#[inline(always)]
fn scales_of<S: Simd>(
    s: S,
    rule: impl Rule,
    second: f32,
    peaks: &[u32; LANES],
) -> ([u32; LANES], [f32; LANES], [f32; LANES]) {
    let (code, value) = rule.choose(s, second, s.of_bits(s.load_bits(peaks)));
    let second = s.splat(second);
    let product = s.bits(s.mul(value, second));
    let effective = s.of_bits(s.if_zero(product, s.bits(second), product));
    let inverse = s.div(s.splat(1.0), effective);
    (s.store_bits(code), s.store(value), s.store(inverse))
}

#[inline(always)]
fn each_scale<S: Simd>(s: S, rule: impl Rule, second: f32, peaks: &[u32], out: &mut Scales) {
    let n = peaks.len();
    out.codes.resize(n, 0);
    out.values.resize(n, 0.0);
    out.inverses.resize(n, 0.0);
    let (chunks, rest) = peaks.as_chunks::<LANES>();
    let (codes, codes_rest) = out.codes.as_chunks_mut::<LANES>();
    let (values, values_rest) = out.values.as_chunks_mut::<LANES>();
    let (inverses, inverses_rest) = out.inverses.as_chunks_mut::<LANES>();
    let outs = codes.iter_mut().zip(values).zip(inverses);
    for (peaks, ((code, value), inverse)) in chunks.iter().zip(outs) {
        (*code, *value, *inverse) = scales_of(s, rule, second, peaks);
    }
    if !rest.is_empty() {
        let mut padded = [0; LANES];
        padded[..rest.len()].copy_from_slice(rest);
        let (code, value, inverse) = scales_of(s, rule, second, &padded);
        codes_rest.copy_from_slice(&code[..rest.len()]);
        values_rest.copy_from_slice(&value[..rest.len()]);
        inverses_rest.copy_from_slice(&inverse[..rest.len()]);
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

/// What 16 values are in a plain type, in `N` bytes, and the values these stand for.
trait Narrow<const N: usize>: Copy {
    fn narrow<S: Simd>(self, s: S, values: S::F) -> ([u8; N], S::F);
}

#[derive(Clone, Copy)]
struct ToF32;

impl Narrow<64> for ToF32 {
    #[inline(always)]
    fn narrow<S: Simd>(self, s: S, values: S::F) -> ([u8; 64], S::F) {
        (s.store_words(values), values)
    }
}

#[derive(Clone, Copy)]
struct ToBf16;

impl Narrow<32> for ToBf16 {
    #[inline(always)]
    fn narrow<S: Simd>(self, s: S, values: S::F) -> ([u8; 32], S::F) {
        let h = s.bf16_bits(values);
        (s.store_halves(h), s.bf16_value(h))
    }
}

/// A float of fewer bits than its `N` bytes hold, by way of f16 or not.
#[derive(Clone, Copy)]
struct ToSmall<const E: u32, const M: u32>;

impl<const E: u32, const M: u32> ToSmall<E, M> {
    #[inline(always)]
    fn signed<S: Simd>(s: S, values: S::F, max: f32) -> (S::I, S::I, S::F) {
        let bits = s.bits(values);
        let sign = s.and(bits, s.splat_bits(1 << 31));
        let magnitude = s.of_bits(s.and(bits, s.splat_bits(0x7fff_ffff)));
        let (code, value) = s.encode::<E, M>(magnitude, max);
        (code, sign, s.of_bits(s.or(s.bits(value), sign)))
    }
}

impl Narrow<32> for ToSmall<5, 10> {
    #[inline(always)]
    fn narrow<S: Simd>(self, s: S, values: S::F) -> ([u8; 32], S::F) {
        let (code, sign, value) = Self::signed(s, values, const { mini::largest(5, 10) });
        (s.store_halves(s.or(code, s.shr::<16>(sign))), value)
    }
}

impl Narrow<16> for ToSmall<4, 3> {
    #[inline(always)]
    fn narrow<S: Simd>(self, s: S, values: S::F) -> ([u8; 16], S::F) {
        let (code, value) = Small::<4, 3, false>.code(s, values);
        (s.store_bytes(code), value)
    }
}

/// By way of f16 (`encoder::cast_code`).
impl Narrow<16> for ToSmall<5, 2> {
    #[inline(always)]
    fn narrow<S: Simd>(self, s: S, values: S::F) -> ([u8; 16], S::F) {
        let (_, _, half) = ToSmall::<5, 10>::signed(s, values, 57344.0);
        let (code, value) = Small::<5, 2, false>.code(s, half);
        (s.store_bytes(code), value)
    }
}

#[inline(always)]
fn cast<S: Simd>(s: S, target: Target, source: Source, bytes: &[u8], out: &mut [u8]) -> Lanes {
    match source {
        Source::F32 => cast_of(s, target, FromF32, bytes, out),
        Source::F16 => cast_of(s, target, FromF16, bytes, out),
        Source::BF16 => cast_of(s, target, FromBf16, bytes, out),
    }
}

#[inline(always)]
fn cast_of<const B: usize, S: Simd>(
    s: S,
    target: Target,
    source: impl Load<B>,
    bytes: &[u8],
    out: &mut [u8],
) -> Lanes {
    match target {
        Target::F32 => row_cast(s, ToF32, source, bytes, out),
        Target::F16 => row_cast(s, ToSmall::<5, 10>, source, bytes, out),
        Target::BF16 => row_cast(s, ToBf16, source, bytes, out),
        Target::E4M3 => row_cast(s, ToSmall::<4, 3>, source, bytes, out),
        Target::E5M2 => row_cast(s, ToSmall::<5, 2>, source, bytes, out),
    }
}

#[inline(always)]
fn row_cast<const B: usize, const N: usize, S: Simd>(
    s: S,
    target: impl Narrow<N>,
    source: impl Load<B>,
    bytes: &[u8],
    out: &mut [u8],
) -> Lanes {
    let mut sums = Lanes::ZERO;
    for (bytes, out) in bytes.chunks(CHUNKS * B).zip(out.chunks_mut(CHUNKS * N)) {
        let mut run = Run::new(s);
        let ((chunks, rest), (outs, out_rest)) = (bytes.as_chunks::<B>(), out.as_chunks_mut::<N>());
        for (bytes, out) in chunks.iter().zip(outs) {
            let v = source.load(s, bytes);
            let (narrow, d) = target.narrow(s, v);
            *out = narrow;
            run.add(s, v, d);
        }
        if !rest.is_empty() {
            let mut padded = [0; B];
            padded[..rest.len()].copy_from_slice(rest);
            let v = source.load(s, &padded);
            let (narrow, d) = target.narrow(s, v);
            out_rest.copy_from_slice(&narrow[..out_rest.len()]);
            run.add(s, v, d);
        }
        run.end(s, &mut sums);
    }
    sums
}

pub(super) mod portable {
    use super::{Ops, Portable};

    pub(in super::super) static OPS: Ops = Ops {
        peaks: |source, bytes, block, out| super::peaks(Portable, source, bytes, block, out),
        scales: |kind, second, peaks, out| super::scales(Portable, kind, second, peaks, out),
        codes: |kind, source, row, out| super::codes(Portable, kind, source, row, out),
        cast: |target, source, bytes, out| super::cast(Portable, target, source, bytes, out),
        error: |values, decoded| super::error(Portable, values, decoded),
    };
}

/// The bodies under a set of target features, for the type that proves them.
#[cfg(target_arch = "x86_64")]
macro_rules! compiled_for {
    ($name:ident, $simd:ident, $features:literal) => {
        pub(super) mod $name {
            use super::{CodeKind, Lanes, Ops, Row, ScaleKind, Scales, Source, Target};
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
            fn error(s: $simd, values: &[f32], decoded: &[f32]) -> Lanes {
                super::error(s, values, decoded)
            }

            // SAFETY (all of them): `Kernel::ops` hands the table out only where the processor has the features, which is
            // what a value of the type stands for.
            pub(in super::super) static OPS: Ops = Ops {
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
