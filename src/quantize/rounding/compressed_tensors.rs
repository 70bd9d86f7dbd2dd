//! compressed-tensors 0.19 as llm-compressor drives it on the CPU.
//!
//! Everything is an ordinary torch operation on the weight's own type, so every intermediate is rounded to it; codes
//! are chosen against the rounded scale. On GPUs the package divides in f32 and does not round the quotient, which
//! gives other codes under the same scales: [`Rounding::CompressedTensorsF32`](crate::recipe::Rounding).
//!
//! # The global scale of NVFP4
//! The package keeps g, by which scales are multiplied when weights are quantized and divided when they are read:
//! w = code · (s / g). The container multiplies, so `scale.1` holds f32(1/g). Code times s is exact, so what the
//! container decodes differs from the package's f32 only by the roundings of 1/g and s/g: by at most two steps of f32,
//! and not at all once rounded to bf16, which is what the package returns (tested for every bf16 g, scale and code).
//! 1/`scale.1`, rounded to the weight's type, is g again for bf16 and f16 weights (tested for every peak); for f32
//! weights the last bit can differ.

use super::{Narrow, Peaked, Scaled, Scheme, Setup, Strategy, amax, mini};

/// The rules for one grid and source type.
#[derive(Debug, Clone)]
pub(in super::super) struct CompressedTensors {
    setup: Setup,
    /// Whether the quotient is rounded to the source's type.
    rounds_quotient: bool,
    /// Scale, or g, of the whole weight.
    whole: f32,
}

/// The observer's range of a block: 0 is always in it.
fn ends(values: &[f32]) -> (f32, f32) {
    values.iter().fold((0.0, 0.0), |(lo, hi), v| (v.min(lo), v.max(hi)))
}

impl Narrow {
    /// What replaces a scale of 0: the type's epsilon.
    fn epsilon(self) -> f32 {
        match self {
            Narrow::F32 => f32::EPSILON,
            Narrow::F16 => mini::pow2(-10),
            Narrow::BF16 => mini::pow2(-7),
        }
    }

    /// A magnitude rounded to a power of two: half of fp4's mantissa step is added to its bits in this type, and the
    /// mantissa cleared, so it goes up from 1.75.
    fn power_of_two(self, a: f32) -> f32 {
        match self {
            Narrow::F32 => f32::from_bits((a.to_bits() + (1 << 21)) & 0x7f80_0000),
            Narrow::F16 => mini::f16_value((mini::f16_bits(a) + (1 << 8)) & 0x7c00),
            Narrow::BF16 => mini::bf16_value((mini::bf16_bits(a) + (1 << 5)) & 0x7f80),
        }
    }
}

impl CompressedTensors {
    pub(super) fn new(setup: Setup, rounds_quotient: bool) -> CompressedTensors {
        CompressedTensors { setup, rounds_quotient, whole: 0.0 }
    }

    /// Scale of a magnitude, 0 replaced: over `top`, and rounded to the weight's type.
    fn scale(&self, amax: f32, top: f32) -> f32 {
        self.or_epsilon(self.setup.source.round(amax / top))
    }

    fn or_epsilon(&self, s: f32) -> f32 {
        if s == 0.0 { self.setup.source.epsilon() } else { s }
    }

    fn quotient(&self, x: f32) -> f32 {
        if self.rounds_quotient { self.setup.source.round(x) } else { x }
    }

    /// Half of the integers' span: 127.5 for 8 bits.
    fn half_span(&self) -> f32 {
        ((1u32 << self.setup.codes.bits()) - 1) as f32 / 2.0
    }

    pub(super) fn peaked(&mut self, peak: f32) -> Peaked {
        let narrow = self.setup.source;
        match self.setup.scheme {
            Scheme::Nvfp4 => {
                // 2688 is the largest e4m3 scale, 448, times the largest e2m1 value, 6.
                let least = if narrow == Narrow::F16 { mini::pow2(-14) } else { f32::MIN_POSITIVE };
                let g = narrow.round(narrow.round(1.0 / peak.max(least)) * 2688.0);
                self.whole = if g.is_finite() { g } else { 1.0 };
                let multiplier = 1.0 / self.whole;
                (multiplier.to_bits(), multiplier)
            }
            Scheme::Int => self.one(self.scale(peak, self.half_span())),
            _ => self.one(self.scale(peak, 448.0)),
        }
    }

    fn one(&mut self, s: f32) -> Peaked {
        self.whole = s;
        (self.setup.scale.encode(s), s)
    }

    pub(super) fn block(&self, values: &[f32], codes: &mut [u32]) -> Scaled {
        let whole = self.setup.strategy == Strategy::Tensor;
        match self.setup.scheme {
            Scheme::Int => {
                let s = if whole { self.whole } else { self.scale(amax(values), self.half_span()) };
                for (code, &x) in codes.iter_mut().zip(values) {
                    *code = super::int_code(self.setup.codes, self.quotient(x / s));
                }
                self.scaled(s)
            }
            Scheme::Asymmetric => self.asymmetric(values, codes),
            Scheme::Fp8 => {
                let s = if whole { self.whole } else { self.scale(amax(values), 448.0) };
                for (code, &x) in codes.iter_mut().zip(values) {
                    *code = self.setup.codes.encode(self.quotient(x / s));
                }
                self.scaled(s)
            }
            Scheme::Nvfp4 => self.nvfp4(values, codes),
            Scheme::Mx => self.mx(values, codes),
        }
    }

    fn scaled(&self, s: f32) -> Scaled {
        Scaled { scale: self.setup.scale.encode(s), zero: 0, lost: !s.is_finite() }
    }

    /// The package's codes and zero points are signed; both are stored less the least code, so that the difference,
    /// which is all that counts, stays.
    fn asymmetric(&self, values: &[f32], codes: &mut [u32]) -> Scaled {
        let narrow = self.setup.source;
        let bits = self.setup.codes.bits();
        let (least, most) = (-((1i32 << (bits - 1)) as f32), ((1i32 << (bits - 1)) - 1) as f32);
        let (lo, hi) = ends(values);
        let s = narrow.round(narrow.round(hi - lo) / ((1u32 << bits) - 1) as f32);
        // The zero point is taken before a scale of 0 is replaced; 0/0 then counts as 0.
        let zero = narrow.round(least - narrow.round(lo / s)).clamp(least, most);
        let zero = if zero.is_nan() { 0.0 } else { zero.round_ties_even() };
        let s = self.or_epsilon(s);
        for (code, &x) in codes.iter_mut().zip(values) {
            let v = self.quotient(self.quotient(x / s) + zero);
            *code = (v.clamp(least, most).round_ties_even() - least) as u32;
        }
        Scaled { zero: (zero - least) as u32, ..self.scaled(s) }
    }

    fn nvfp4(&self, values: &[f32], codes: &mut [u32]) -> Scaled {
        let scale = self.setup.scale;
        let g = self.whole;
        let code = scale.encode(g * self.setup.source.round(amax(values) / 6.0));
        let code = if scale.decode(code) == 0.0 { scale.encode(0.125) } else { code };
        let s = scale.decode(code) / g;
        for (code, &x) in codes.iter_mut().zip(values) {
            *code = self.setup.codes.encode(x / s);
        }
        Scaled { scale: code, zero: 0, lost: false }
    }

    fn mx(&self, values: &[f32], codes: &mut [u32]) -> Scaled {
        let narrow = self.setup.source;
        // Exponent of the largest code: 4 for e2m1, 256 for e4m3.
        let exponent = if self.setup.codes.bits() == 4 { 2 } else { 8 };
        let power = narrow.power_of_two(amax(values));
        // Its exponent field is 0 for zeros and subnormals, 255 when rounding up overflowed.
        let field = (power.to_bits() >> 23) as i32;
        let byte = match field {
            255 => 255,
            field => (field - exponent).max(0),
        };
        // The scale lives in the weight's type, where it can overflow or vanish; the package then stores 2^0.
        let s = match byte {
            0 => mini::pow2(-126) / 2.0,
            255 => f32::INFINITY,
            byte => mini::pow2(byte - 127),
        };
        let s = narrow.round(s);
        let s = if s == 0.0 { 1.0 } else { s };
        for (code, &x) in codes.iter_mut().zip(values) {
            *code = self.setup.codes.encode(self.quotient(x / s));
        }
        let scale = if s.is_finite() { s.to_bits() >> 23 } else { 127 };
        Scaled { scale, zero: 0, lost: !s.is_finite() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::num::Element;
    use crate::tensor::DType;

    fn e4m3() -> Element {
        Element::new(DType::F8E4M3).expect("codec")
    }

    fn global(source: Narrow) -> CompressedTensors {
        let setup = Setup {
            scheme: Scheme::Nvfp4,
            strategy: Strategy::Group,
            codes: Element::new(DType::F4E2M1).expect("codec"),
            scale: e4m3(),
            source,
        };
        CompressedTensors::new(setup, true)
    }

    #[test]
    fn the_global_divisor_comes_back_from_its_reciprocal_for_every_bf16_and_f16_peak() {
        for (source, count) in [(Narrow::BF16, 0x7f80u16), (Narrow::F16, 0x7c00)] {
            let mut rules = global(source);
            for bits in 0..count {
                let peak = match source {
                    Narrow::F16 => mini::f16_value(bits),
                    _ => mini::bf16_value(bits),
                };
                let (code, multiplier) = rules.peaked(peak);
                assert!(multiplier > 0.0 && multiplier.is_finite(), "{peak:e}");
                assert_eq!(code, multiplier.to_bits());
                assert_eq!(source.round(1.0 / multiplier), rules.whole, "{peak:e}");
            }
        }
    }

    #[test]
    fn multiplying_by_the_reciprocal_decodes_as_the_division_does_to_bf16() {
        // Every mantissa of g, every scale, every code. Powers of two in g change nothing.
        let fp4 = Element::new(DType::F4E2M1).expect("codec");
        let (mut f32_differs, mut bf16_differs, mut n) = (0u32, 0u32, 0u32);
        for mantissa in 0..128u16 {
            let g = mini::bf16_value(0x4680 | mantissa);
            let multiplier = 1.0 / g;
            for s in (1..0x7f).map(|c| e4m3().decode(c)) {
                for value in (1..8).map(|c| fp4.decode(c)) {
                    let (theirs, ours) = (value * (s / g), value * s * multiplier);
                    n += 1;
                    f32_differs += u32::from(theirs != ours);
                    bf16_differs += u32::from(mini::bf16_bits(theirs) != mini::bf16_bits(ours));
                    let steps = theirs.to_bits().abs_diff(ours.to_bits());
                    assert!(steps <= 2, "{value} {s} {g}: {steps} steps of f32");
                }
            }
        }
        assert_eq!((f32_differs, bf16_differs, n), (29_454, 0, 112_896));
    }
}
