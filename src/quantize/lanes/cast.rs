//! Rows converted to plain types, with their error sums.

use crate::num::mini;

use super::super::error::Lanes;
use super::super::simd::Simd;
use super::codes::{Code, Small};
use super::{CHUNKS, FromBf16, FromF16, FromF32, Load, Run, Source, Target};

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
pub(super) fn cast<S: Simd>(
    s: S,
    target: Target,
    source: Source,
    bytes: &[u8],
    out: &mut [u8],
) -> Lanes {
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
