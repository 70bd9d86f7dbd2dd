//! Scales from magnitudes: one level, two levels.

use crate::num::{Element, mini};
use crate::recipe::ScaleRule;
use crate::tensor::DType;

use super::super::lanes::{ScaleKind, Stored};
use super::{Codes, LIFT};

/// The scale of a block of zeros on an integer grid, before it is rounded into the scale's type.
pub(super) const ZERO_BLOCK: f32 = 1e-12;

/// The scale of one block.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Chosen {
    /// Code stored in the first-level plane.
    pub code: u32,
    /// Its value, which decoding multiplies by.
    pub scale: f32,
    /// Value of the second level; 1 without one.
    pub second: f32,
    /// Reciprocal of the product of both (of the second level when the product is 0); may be infinite.
    pub inverse: f32,
}

impl Chosen {
    #[inline(always)]
    pub fn new(code: u32, scale: f32, second: f32) -> Chosen {
        let mut chosen = Chosen { code, scale, second, inverse: 0.0 };
        chosen.inverse = 1.0 / chosen.effective();
        chosen
    }

    /// The scale that codes are chosen against.
    #[inline(always)]
    pub fn effective(&self) -> f32 {
        let product = self.scale * self.second;
        if product == 0.0 { self.second } else { product }
    }

    /// `value` over the scale: times the f32 reciprocal, or, where that overflows, both lifted by 2^64 first.
    pub fn quotient(&self, value: f32) -> f32 {
        if self.inverse.is_finite() {
            value * self.inverse
        } else {
            (value * LIFT) * (1.0 / (self.effective() * LIFT))
        }
    }
}

/// `x` rounded into a scale type: nearest even (integers half away from zero), never 0, never infinite. Code, value.
#[inline(always)]
pub(super) fn never_zero(element: Element, x: f32) -> (u32, f32) {
    let code = element.encode(x);
    let value = element.decode(code);
    if value != 0.0 && value.is_finite() {
        return (code, value);
    }
    let magnitude = if value == 0.0 { element.smallest() } else { element.largest() };
    let code = element.encode(magnitude.copysign(x));
    (code, element.decode(code))
}

/// Magnitudes from which a scale may have been rounded so far up that a code times it is infinite: 2^126.
pub(in super::super) const NEAR_OVERFLOW: f32 = mini::pow2(126);

/// A scale under which codes of magnitude `reach` decode to finite values: the given one, or one a little smaller.
pub(super) fn capped(element: Element, chosen: Chosen, reach: f32) -> Chosen {
    let fits = |c: &Chosen| ((reach * c.scale) * c.second).is_finite();
    if fits(&chosen) {
        return chosen;
    }
    let mut smaller = [63.0 / 64.0, 0.875, 0.75, 0.5, 0.25].into_iter().map(|factor| {
        // A power of two rounded up would come back as it was.
        let x =
            if element.dtype() == DType::E8M0 { chosen.scale * 0.5 } else { chosen.scale * factor };
        let (code, value) = never_zero(element, x);
        Chosen::new(code, value, chosen.second)
    });
    smaller.find(fits).unwrap_or(chosen)
}

/// (hi − lo) / top of a block that spans lo ≤ 0 ≤ hi, without overflow.
pub(super) fn range(lo: f32, hi: f32, top: f32) -> f32 {
    let span = hi - lo;
    if span.is_finite() { span / top } else { hi / top - lo / top }
}

/// The rule of a single scale level.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct OneLevel {
    pub scale: Element,
    top: f32,
    reach: f32,
    kind: Kind,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    /// Magnitude over the largest code, 1e-12 for zeros.
    Int,
    /// Magnitude over the largest value, 1 for zeros; multiplied by the f32 reciprocal unless the scale is f32.
    Float {
        inverse: Option<f32>,
    },
    /// Power of two from the magnitude's exponent, less the exponent of the largest code.
    Mx {
        exponent: i32,
    },
    Fixed(f32),
}

impl OneLevel {
    pub fn new(codes: &Codes, scale: Element, rule: ScaleRule) -> OneLevel {
        let top = codes.top();
        let kind = match (rule, codes) {
            (ScaleRule::Fixed(value), _) => Kind::Fixed(value as f32),
            (ScaleRule::Mx, _) => Kind::Mx { exponent: (top.to_bits() >> 23) as i32 - 127 },
            (_, Codes::Float { .. }) => {
                Kind::Float { inverse: (scale.dtype() != DType::F32).then_some(1.0 / top) }
            }
            _ => Kind::Int,
        };
        OneLevel { scale, top, reach: codes.reach(), kind }
    }

    /// The vector kernel for this rule.
    pub fn kernel(&self) -> Option<ScaleKind> {
        if let Kind::Mx { exponent } = self.kind {
            let exponent = u32::try_from(exponent).ok().filter(|e| *e < 128)?;
            return (self.scale.dtype() == DType::E8M0).then_some(ScaleKind::Mx { exponent });
        }
        let stored = match self.scale.dtype() {
            DType::F32 => Stored::F32,
            DType::F16 => Stored::F16,
            DType::BF16 => Stored::BF16,
            _ => return None,
        };
        match self.kind {
            Kind::Int => Some(ScaleKind::Quotient { top: self.top, zero: ZERO_BLOCK, stored }),
            Kind::Float { inverse: Some(inverse) } => Some(ScaleKind::Product { inverse, stored }),
            Kind::Float { inverse: None } => {
                Some(ScaleKind::Quotient { top: self.top, zero: 1.0, stored })
            }
            Kind::Mx { .. } | Kind::Fixed(_) => None,
        }
    }

    /// Scale of a block whose largest magnitude is `amax`.
    #[inline(always)]
    pub fn choose(&self, amax: f32) -> Chosen {
        let chosen = self.uncapped(amax);
        if amax < NEAR_OVERFLOW { chosen } else { capped(self.scale, chosen, self.reach) }
    }

    #[inline(always)]
    fn uncapped(&self, amax: f32) -> Chosen {
        let s = match self.kind {
            Kind::Int => {
                let s = amax / self.top;
                if s > 0.0 { s } else { ZERO_BLOCK }
            }
            Kind::Float { .. } if amax == 0.0 => 1.0,
            Kind::Float { inverse: Some(inverse) } => amax * inverse,
            Kind::Float { inverse: None } => amax / self.top,
            Kind::Mx { exponent } => {
                // The exponent field of a subnormal reads 0, which the clamp would make of any exponent that low.
                let code = ((amax.to_bits() >> 23) as i32 - exponent).clamp(0, 254);
                let code = if amax == 0.0 { 0 } else { code as u32 };
                return Chosen::new(code, self.scale.decode(code), 1.0);
            }
            Kind::Fixed(value) => value,
        };
        let (code, value) = never_zero(self.scale, s);
        Chosen::new(code, value, 1.0)
    }
}

/// The rule of two scale levels: the second covers the largest first-level scale.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct TwoLevel {
    pub first: Element,
    pub second: Element,
    code_top: f32,
    reach: f32,
    /// Largest value of a first level that saturates; 1 for types with exponents to spare.
    first_top: f32,
    saturates: bool,
}

impl TwoLevel {
    pub fn new(codes: &Codes, first: Element, second: Element) -> TwoLevel {
        let saturates = first.dtype() == DType::F8E4M3
            || !first.dtype().is_float() && first.dtype() != DType::E8M0;
        let first_top = if saturates { first.largest() } else { 1.0 };
        TwoLevel {
            first,
            second,
            code_top: codes.top(),
            reach: codes.reach(),
            first_top,
            saturates,
        }
    }

    /// The vector kernel for this rule. A second level rounded up can put the products of its largest block past the
    /// range that the kernel takes for granted, so that is left to the f32 kind.
    pub fn kernel(&self) -> Option<ScaleKind> {
        (self.first.dtype() == DType::F8E4M3 && self.second.dtype() == DType::F32)
            .then_some(ScaleKind::E4M3 { top: self.code_top })
    }

    /// What the product of both levels should be for a block of that magnitude.
    #[inline(always)]
    pub fn target(&self, amax: f32) -> f32 {
        (f64::from(amax) / f64::from(self.code_top)) as f32
    }

    /// Code and value of the second level for the largest target; 1 when it vanishes.
    pub fn second(&self, peak: f32) -> (u32, f32) {
        let t = peak / self.first_top;
        if t > 0.0 && t.is_finite() {
            never_zero(self.second, t)
        } else {
            never_zero(self.second, 1.0)
        }
    }

    /// The first level of a block under a second level of value `second`: 0 only for a block of zeros.
    #[inline(always)]
    pub fn choose(&self, target: f32, second: f32) -> Chosen {
        if target == 0.0 {
            let code = self.first.encode(0.0);
            return Chosen::new(code, self.first.decode(code), second);
        }
        let q = target / second;
        let q = if self.saturates { q.clamp(-self.first_top, self.first_top) } else { q };
        let (code, value) = never_zero(self.first, q);
        let chosen = Chosen::new(code, value, second);
        if chosen.effective().abs() * self.reach < NEAR_OVERFLOW {
            chosen
        } else {
            capped(self.first, chosen, self.reach)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn element(dtype: DType) -> Element {
        Element::new(dtype).expect("codec")
    }

    #[test]
    fn scales_never_round_to_zero_nor_overflow() {
        for (dtype, x, want) in [
            (DType::F16, 1e-12, 2f32.powi(-24)),
            (DType::F16, 1e9, 65504.0),
            (DType::BF16, f32::from_bits(1), f32::from_bits(0x10000)),
            (DType::F8E4M3, 1e-6, 2f32.powi(-9)),
            (DType::F8E4M3, -1e-6, -(2f32.powi(-9))),
            (DType::I8, 0.1, 1.0),
            (DType::I8, -0.1, -1.0),
            (DType::F32, 0.25, 0.25),
        ] {
            assert_eq!(never_zero(element(dtype), x).1, want, "{dtype} {x:e}");
        }
    }

    #[test]
    fn the_mx_exponent_is_that_of_the_magnitude_less_that_of_the_largest_code() {
        let codes = Codes::Float { element: element(DType::F4E2M1) };
        let one = OneLevel::new(&codes, element(DType::E8M0), ScaleRule::Mx);
        for (amax, code) in
            [(4.0, 127), (7.99, 127), (8.0, 128), (0.0, 0), (1e-40, 0), (f32::MAX, 252)]
        {
            assert_eq!(one.choose(amax).code, code, "{amax:e}");
        }
    }

    #[test]
    fn the_largest_codes_of_the_largest_blocks_decode_to_finite_values() {
        let codes = Codes::Int { element: element(DType::I8), lo: -128, hi: 127 };
        for (scale, rule) in [(DType::BF16, ScaleRule::Absmax), (DType::E8M0, ScaleRule::Mx)] {
            let one = OneLevel::new(&codes, element(scale), rule);
            let chosen = one.choose(f32::MAX);
            assert!(
                (128.0 * chosen.scale).is_finite() && chosen.scale > f32::MAX / 512.0,
                "{scale}"
            );
            // Where nothing overflows nothing changes.
            assert_eq!(one.choose(1e38).code, one.uncapped(1e38).code);
        }
    }

    #[test]
    fn a_quotient_survives_a_scale_without_a_reciprocal() {
        let s = f32::from_bits(0x10000);
        let chosen = Chosen::new(1, s, 1.0);
        assert!(chosen.inverse.is_infinite());
        assert_eq!(chosen.quotient(5.0 * s), 5.0);
        assert_eq!(chosen.quotient(-0.5 * s), -0.5);
    }

    #[test]
    fn a_range_beyond_f32_is_divided_first() {
        assert_eq!(range(-1.0, 2.0, 3.0), 1.0);
        let s = range(-f32::MAX, f32::MAX, 255.0);
        assert!(s.is_finite() && s > f32::MAX / 128.0);
    }
}
