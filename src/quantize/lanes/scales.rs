//! Scales of a row's blocks from their magnitudes.

use crate::num::mini;

use super::super::simd::{LANES, Simd};
use super::{ScaleKind, Scales, Stored};

#[inline(always)]
pub(super) fn scales<S: Simd>(s: S, kind: ScaleKind, second: f32, peaks: &[u32], out: &mut Scales) {
    match kind {
        ScaleKind::Quotient { top, zero, stored } => {
            each_scale(s, Quotient { top, zero, stored }, second, peaks, out);
        }
        ScaleKind::Product { inverse, stored } => {
            each_scale(s, Product { inverse, stored }, second, peaks, out);
        }
        ScaleKind::E4M3 { top } => each_scale(s, UnderSecond { top }, second, peaks, out),
        ScaleKind::Mx { exponent } => each_scale(s, PowerOfTwo { exponent }, second, peaks, out),
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

/// [`ScaleKind::Mx`]
#[derive(Clone, Copy)]
struct PowerOfTwo {
    exponent: u32,
}

impl Rule for PowerOfTwo {
    #[inline(always)]
    fn choose<S: Simd>(self, s: S, _: f32, amax: S::F) -> (S::I, S::F) {
        // From the magnitude up whose code is 0, the difference of the exponents is the code.
        let floor = self.exponent << 23;
        let raised = s.bits(s.max(amax, s.splat(f32::from_bits(floor))));
        let code = s.minus(s.shr::<23>(raised), s.splat_bits(self.exponent));
        // Code 0 is 2^-127, which has no exponent of its own in f32.
        let smallest = s.splat_bits(1 << 22);
        (code, s.of_bits(s.if_zero(code, smallest, s.shl::<23>(code))))
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
