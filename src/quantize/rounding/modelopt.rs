//! NVIDIA ModelOpt 0.47: scales are f32 and multiply, at quantization as well as when weights are read.

use super::{
    Element, Peaked, Scaled, Scheme, Setup, Strategy, amax, ceil_log2, e4m3_cast, int_code, mini,
};

/// The rules for one grid and source type.
#[derive(Debug, Clone)]
pub(in super::super) struct ModelOpt {
    setup: Setup,
    /// Scale of the whole weight.
    whole: f32,
}

/// Smallest scale of an NVFP4 block: the smallest e4m3.
const LEAST_BLOCK: f32 = mini::pow2(-9);

impl ModelOpt {
    pub(super) fn new(setup: Setup) -> ModelOpt {
        ModelOpt { setup, whole: 0.0 }
    }

    pub(super) fn peaked(&mut self, peak: f32) -> Peaked {
        self.whole = match self.setup.scheme {
            // 448, the largest e4m3 scale, times 6, the largest e2m1 value.
            Scheme::Nvfp4 => peak / 2688.0,
            // A Python float divides in double precision.
            _ => (f64::from(peak) / 448.0) as f32,
        };
        (self.whole.to_bits(), self.whole)
    }

    pub(super) fn block(&self, values: &[f32], codes: &mut [u32]) -> Scaled {
        let Setup { scheme, strategy, codes: element, scale, source } = self.setup;
        let int = |codes: &mut [u32], quotient: &dyn Fn(f32) -> f32| {
            for (code, &x) in codes.iter_mut().zip(values) {
                *code = int_code(element, quotient(x));
            }
        };
        let or_one = |s: f32| if s == 0.0 { 1.0 } else { s };
        let largest = amax(values);
        let s = match (scheme, strategy) {
            (Scheme::Nvfp4, _) => return self.nvfp4(values, codes),
            (Scheme::Mx, _) => return self.mx(values, codes),
            // A scale without dimensions does not widen the quotient, which stays in the weight's type.
            (Scheme::Fp8, Strategy::Tensor) => {
                for (code, &x) in codes.iter_mut().zip(values) {
                    *code = e4m3_cast(element, source.round(x / self.whole));
                }
                self.whole
            }
            (Scheme::Fp8, _) => {
                let s = largest / 448.0;
                for (code, &x) in codes.iter_mut().zip(values) {
                    *code = e4m3_cast(element, x / s);
                }
                s
            }
            // Blocks of 8-bit integers are computed in the weight's type, and zeros have the scale 0.
            (_, Strategy::Group) if element.bits() == 8 => {
                let s = source.round(largest / 127.0);
                int(codes, &|x| source.round(x / s));
                s
            }
            (_, Strategy::Group) => {
                let s = or_one(largest / 7.0);
                int(codes, &|x| x / s);
                s
            }
            _ => {
                let s = or_one(largest / 127.0);
                int(codes, &|x| x / s);
                s
            }
        };
        Scaled { scale: scale.encode(s), zero: 0, lost: !s.is_finite() }
    }

    fn nvfp4(&self, values: &[f32], codes: &mut [u32]) -> Scaled {
        let scale = self.setup.scale;
        let s = amax(values) / (6.0 * self.whole);
        let s = if s == 0.0 { 1.0 } else { s };
        // A weight of zeros divides 0 by 0.
        let lost = s.is_nan();
        let code = if lost { 0x7f } else { scale.encode(s.clamp(LEAST_BLOCK, 448.0)) };
        let s = scale.decode(code) * self.whole;
        for (code, &x) in codes.iter_mut().zip(values) {
            *code = self.setup.codes.encode(x / s);
        }
        Scaled { scale: code, zero: 0, lost }
    }

    fn mx(&self, values: &[f32], codes: &mut [u32]) -> Scaled {
        let fp4 = self.setup.codes.bits() == 4;
        let over = amax(values) / if fp4 { 6.0 } else { 448.0 };
        let byte = (ceil_log2(over) + 127) as u32;
        let s = self.setup.scale.decode(byte);
        for (code, &x) in codes.iter_mut().zip(values) {
            *code = match fp4 {
                true => fp4_towards_zero(self.setup.codes, x / s),
                false => self.setup.codes.encode(x / s),
            };
        }
        Scaled { scale: byte, zero: 0, lost: false }
    }
}

/// The nearest e2m1 value, the smaller of two equally near. Zeros have the sign bit, whatever their sign.
fn fp4_towards_zero(element: Element, x: f32) -> u32 {
    let a = x.abs();
    let middle = |c: u32| (element.decode(c) + element.decode(c + 1)) / 2.0;
    let magnitude = (0..7).take_while(|&c| a > middle(c)).count() as u32;
    magnitude | u32::from(x <= 0.0) << 3
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    #[test]
    fn fp4_ties_go_towards_zero_and_zeros_are_negative() {
        let e = Element::new(DType::F4E2M1).expect("codec");
        let cases = [
            (0.0, 8),
            (-0.0, 8),
            (0.25, 0),
            (0.26, 1),
            (-0.25, 8),
            (5.0, 6),
            (5.1, 7),
            (100.0, 7),
            (-1.25, 0xa),
        ];
        for (x, code) in cases {
            assert_eq!(fp4_towards_zero(e, x), code, "{x}");
        }
    }
}
