//! Values of a row's codes under the scales of its blocks.

use super::super::simd::{LANES, Simd};
use super::CodeType;

/// 16 codes of `N` bytes.
trait Codes<const N: usize>: Copy {
    fn value<S: Simd>(self, s: S, bytes: &[u8; N]) -> S::F;
}

/// Two's complement whose highest bit is `TOP`.
#[inline(always)]
fn signed<S: Simd, const TOP: u32>(s: S, codes: S::I) -> S::F {
    // Without its sign and with it: as far apart as the sign bit is worth.
    let sign = s.and(codes, s.splat_bits(TOP));
    let rest = s.minus(codes, sign);
    s.float(s.minus(rest, sign))
}

#[derive(Clone, Copy)]
struct I8;

impl Codes<LANES> for I8 {
    #[inline(always)]
    fn value<S: Simd>(self, s: S, bytes: &[u8; LANES]) -> S::F {
        signed::<S, 128>(s, s.load_bytes(bytes))
    }
}

#[derive(Clone, Copy)]
struct I4;

impl Codes<8> for I4 {
    #[inline(always)]
    fn value<S: Simd>(self, s: S, bytes: &[u8; 8]) -> S::F {
        signed::<S, 8>(s, s.load_nibbles(bytes))
    }
}

#[derive(Clone, Copy)]
struct E4M3;

impl Codes<LANES> for E4M3 {
    #[inline(always)]
    fn value<S: Simd>(self, s: S, bytes: &[u8; LANES]) -> S::F {
        let codes = s.load_bytes(bytes);
        let magnitude = s.and(codes, s.splat_bits(0x7f));
        let nan = s.splat_bits(const { f32::NAN.to_bits() });
        let value = s.bits(s.decode::<4, 3>(magnitude));
        let value = s.if_zero(s.minus(magnitude, s.splat_bits(0x7f)), nan, value);
        s.of_bits(s.or(value, s.shl::<24>(s.and(codes, s.splat_bits(0x80)))))
    }
}

#[derive(Clone, Copy)]
struct E2M1;

impl Codes<8> for E2M1 {
    #[inline(always)]
    fn value<S: Simd>(self, s: S, bytes: &[u8; 8]) -> S::F {
        let codes = s.load_nibbles(bytes);
        let value = s.bits(s.decode::<2, 1>(s.and(codes, s.splat_bits(7))));
        s.of_bits(s.or(value, s.shl::<28>(s.and(codes, s.splat_bits(8)))))
    }
}

#[inline(always)]
pub(super) fn values<S: Simd>(
    s: S,
    codes: CodeType,
    bytes: &[u8],
    scales: &[f32],
    block: usize,
    out: &mut [f32],
) {
    match codes {
        CodeType::I8 => row(s, I8, bytes, scales, block, out),
        CodeType::I4 => row(s, I4, bytes, scales, block, out),
        CodeType::E4M3 => row(s, E4M3, bytes, scales, block, out),
        CodeType::E2M1 => row(s, E2M1, bytes, scales, block, out),
    }
}

#[inline(always)]
fn row<const N: usize, S: Simd>(
    s: S,
    codes: impl Codes<N>,
    bytes: &[u8],
    scales: &[f32],
    block: usize,
    out: &mut [f32],
) {
    let block_bytes = block / LANES * N;
    for ((bytes, out), scale) in bytes.chunks(block_bytes).zip(out.chunks_mut(block)).zip(scales) {
        let scale = s.splat(*scale);
        let (outs, out_rest) = out.as_chunks_mut::<LANES>();
        // 15 columns that are left fill up 8 bytes of half ones.
        let (chunks, rest) = bytes.split_at(outs.len() * N);
        for (bytes, out) in chunks.as_chunks::<N>().0.iter().zip(outs) {
            *out = s.store(s.mul(codes.value(s, bytes), scale));
        }
        if !out_rest.is_empty() {
            let mut padded = [0; N];
            padded[..rest.len()].copy_from_slice(rest);
            let values = s.store(s.mul(codes.value(s, &padded), scale));
            out_rest.copy_from_slice(&values[..out_rest.len()]);
        }
    }
}
