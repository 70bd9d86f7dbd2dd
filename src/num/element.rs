//! One element type as a scalar codec: the reference that every kernel is held to.

use super::mini;
use crate::tensor::DType;

/// Conversion between f32 and the codes of one element type of at most 32 bits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Element {
    dtype: DType,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    F32,
    F16,
    BF16,
    /// Sign, exponent, mantissa; at most 8 bits.
    Mini,
    E8M0,
    Signed,
    Unsigned,
    Bool,
}

impl Element {
    /// The codec of `dtype`; `None` for types over 32 bits and for the fnuz variants, which occur only as sources.
    pub fn new(dtype: DType) -> Option<Element> {
        let kind = match dtype {
            DType::F32 => Kind::F32,
            DType::F16 => Kind::F16,
            DType::BF16 => Kind::BF16,
            DType::E8M0 => Kind::E8M0,
            DType::Bool => Kind::Bool,
            DType::F64 | DType::C64 | DType::I64 | DType::U64 => return None,
            DType::F8E4M3Fnuz | DType::F8E5M2Fnuz => return None,
            t if t.is_signed_int() => Kind::Signed,
            t if t.is_unsigned_int() => Kind::Unsigned,
            t if t.float_format().is_some() => Kind::Mini,
            _ => return None,
        };
        Some(Element { dtype, kind })
    }

    /// The element type.
    pub fn dtype(self) -> DType {
        self.dtype
    }

    /// Width of a code in bits.
    pub fn bits(self) -> u32 {
        self.dtype.bits()
    }

    /// Largest finite value.
    pub fn largest(self) -> f32 {
        match self.kind {
            Kind::F32 => f32::MAX,
            Kind::F16 => 65504.0,
            Kind::BF16 => mini::bf16_value(0x7f7f),
            Kind::Mini => {
                let (e, m) = self.format();
                mini::largest(e, m)
            }
            Kind::E8M0 => mini::pow2(127),
            Kind::Signed => ((1i64 << (self.bits() - 1)) - 1) as f32,
            Kind::Unsigned => ((1i64 << self.bits()) - 1) as f32,
            Kind::Bool => 1.0,
        }
    }

    /// Smallest positive value, subnormals included.
    pub fn smallest(self) -> f32 {
        match self.kind {
            Kind::F32 => f32::from_bits(1),
            Kind::E8M0 => self.decode(0),
            _ => self.decode(1),
        }
    }

    fn format(self) -> (u32, u32) {
        // Every `Mini` type has one; `new` checked it.
        self.dtype.float_format().map_or((1, 0), |f| (f.exponent, f.mantissa))
    }

    /// Code of `x`.
    ///
    /// - f32: the bits. f16, bf16: round to nearest even, overflow to infinity, NaN stays NaN.
    /// - 8-bit and narrower floats: round to nearest even, subnormals kept, saturating (infinity too), NaN → zero of
    ///   its sign. The sign bit of a zero survives, except in e2m1, where −0 gives code 0 and a negative value that
    ///   rounds to zero code 8.
    /// - e8m0: the smallest power of two that is not below `x`, within its range; NaN and `x` ≤ 0 → code 0 (2^−127).
    /// - integers: round half away from zero, saturating, NaN → 0; two's complement in the low bits.
    /// - bool: whether `x` is not zero.
    pub fn encode(self, x: f32) -> u32 {
        match self.kind {
            Kind::F32 => x.to_bits(),
            Kind::F16 => u32::from(mini::f16_bits(x)),
            Kind::BF16 => u32::from(mini::bf16_bits(x)),
            Kind::Mini => self.encode_mini(x),
            Kind::E8M0 => {
                if x.is_nan() || x <= 0.0 {
                    return 0;
                }
                let bits = x.to_bits();
                let up = u32::from(bits & 0x7f_ffff != 0);
                // Subnormals above 2^-127 round up to 2^-126.
                if bits < 0x0080_0000 {
                    u32::from(bits > 0x0040_0000)
                } else {
                    ((bits >> 23) + up).min(254)
                }
            }
            Kind::Signed => {
                let top = 1i64 << (self.bits() - 1);
                let n = round_away(x).clamp(-top, top - 1);
                (n as u64 & ((1u64 << self.bits()) - 1)) as u32
            }
            Kind::Unsigned => round_away(x).clamp(0, (1i64 << self.bits()) - 1) as u32,
            Kind::Bool => u32::from(x != 0.0),
        }
    }

    fn encode_mini(self, x: f32) -> u32 {
        let negative = if self.dtype == DType::F4E2M1 { x < 0.0 } else { x.is_sign_negative() };
        let a = if x.is_nan() { 0.0 } else { x.abs() };
        let max = self.largest();
        let (code, _) = match self.dtype {
            DType::F8E4M3 => mini::encode::<4, 3>(a, max),
            DType::F8E5M2 => mini::encode::<5, 2>(a, max),
            DType::F6E2M3 => mini::encode::<2, 3>(a, max),
            DType::F6E3M2 => mini::encode::<3, 2>(a, max),
            _ => mini::encode::<2, 1>(a, max),
        };
        code | u32::from(negative) << (self.bits() - 1)
    }

    /// Value of a code; bits above the type's width are ignored.
    pub fn decode(self, code: u32) -> f32 {
        let bits = self.bits();
        match self.kind {
            Kind::F32 => f32::from_bits(code),
            Kind::F16 => mini::f16_value(code as u16),
            Kind::BF16 => mini::bf16_value(code as u16),
            Kind::Mini => {
                let (e, m) = self.format();
                let sign = code >> (bits - 1) & 1;
                let magnitude = code & ((1 << (bits - 1)) - 1);
                let value = match self.dtype {
                    DType::F8E4M3 if magnitude == 0x7f => f32::NAN,
                    DType::F8E5M2 if magnitude > 0x7c => f32::NAN,
                    DType::F8E5M2 if magnitude == 0x7c => f32::INFINITY,
                    _ => mini::decode(e, m, magnitude),
                };
                if sign == 1 { -value } else { value }
            }
            Kind::E8M0 => match code & 0xff {
                255 => f32::NAN,
                0 => f32::from_bits(0x0040_0000),
                c => f32::from_bits(c << 23),
            },
            Kind::Signed => {
                let unused = 32 - bits;
                ((code << unused) as i32 >> unused) as f32
            }
            Kind::Unsigned if bits == 32 => code as f32,
            Kind::Unsigned => (code & ((1 << bits) - 1)) as f32,
            Kind::Bool => f32::from(u8::from(code & 0xff != 0)),
        }
    }

    /// Values of all codes, for types of at most 16 bits.
    pub fn table(self) -> Option<Vec<f32>> {
        (self.bits() <= 16).then(|| (0..1u32 << self.bits()).map(|c| self.decode(c)).collect())
    }
}

/// `x` rounded half away from zero as the container's converter does it: `x ± 0.5` in f32, then truncated.
pub(crate) fn round_away(x: f32) -> i64 {
    (if x < 0.0 { x - 0.5 } else { x + 0.5 }) as i64
}

/// Value of a fnuz byte (no infinities, no negative zero, 0x80 is NaN): exponents lie one below the plain formats.
pub fn decode_fnuz(dtype: DType, code: u8) -> f32 {
    if code == 0x80 {
        return f32::NAN;
    }
    let magnitude = u32::from(code & 0x7f);
    let value = match dtype {
        DType::F8E4M3Fnuz => mini::decode(4, 3, magnitude) / 2.0,
        _ => mini::decode(5, 2, magnitude) / 2.0,
    };
    if code & 0x80 != 0 { -value } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: [DType; 5] =
        [DType::F8E4M3, DType::F8E5M2, DType::F6E2M3, DType::F6E3M2, DType::F4E2M1];

    fn element(dtype: DType) -> Element {
        Element::new(dtype).expect("has a codec")
    }

    /// Formats as ml_dtypes 0.6.0 sees them.
    fn ml_dtypes() -> serde_json::Value {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/num/formats.json");
        let text = std::fs::read_to_string(path).expect("fixture");
        serde_json::from_str(&text).expect("json")
    }

    #[test]
    fn every_code_of_every_small_float_decodes_as_in_ml_dtypes() {
        let fixture = ml_dtypes();
        for (name, format) in fixture.as_object().expect("object") {
            let dtype = DType::from_name(name).expect("known type");
            let table: Vec<u32> =
                serde_json::from_value(format["decode"].clone()).expect("decode table");
            assert_eq!(table.len(), 1 << dtype.bits());
            for (code, &bits) in table.iter().enumerate() {
                let ours = match Element::new(dtype) {
                    Some(e) => e.decode(code as u32),
                    None => decode_fnuz(dtype, code as u8),
                };
                let theirs = f32::from_bits(bits);
                let same = ours.to_bits() == bits || ours.is_nan() && theirs.is_nan();
                assert!(same, "{name} {code:#x}: {ours} {theirs}");
            }
        }
    }

    #[test]
    fn every_finite_bf16_encodes_as_in_ml_dtypes_up_to_the_largest_value() {
        let fixture = ml_dtypes();
        for dtype in SMALL {
            let runs: Vec<(u32, u32)> =
                serde_json::from_value(fixture[dtype.name()]["encode"].clone()).expect("runs");
            let e = element(dtype);
            let top = e.encode(f32::INFINITY);
            assert_eq!(e.decode(top), e.largest());
            for (i, &(first, code)) in runs.iter().enumerate() {
                let end = runs.get(i + 1).map_or(0x7f80, |r| r.0);
                for h in first..end {
                    let x = f32::from_bits(h << 16);
                    // Past the largest value ml_dtypes has NaN or infinity where this saturates.
                    let want = code.min(top);
                    assert_eq!(e.encode(x), want, "{dtype} {x:e}");
                    let sign = 1 << (e.bits() - 1);
                    let want = if x == 0.0 && dtype == DType::F4E2M1 { 0 } else { want | sign };
                    assert_eq!(e.encode(-x), want, "{dtype} -{x:e}");
                }
            }
        }
    }

    #[test]
    fn small_floats_round_to_the_nearest_value_and_ties_to_the_even_code() {
        for dtype in SMALL {
            let e = element(dtype);
            let half = 1u32 << (e.bits() - 1);
            let values: Vec<f64> =
                (0..half).map(|c| f64::from(e.decode(c))).take_while(|v| v.is_finite()).collect();
            for pair in values.windows(2) {
                let middle = ((pair[0] + pair[1]) / 2.0) as f32;
                let low = values.iter().position(|v| *v == pair[0]).expect("code") as u32;
                assert_eq!(e.encode(middle), low + low % 2, "{dtype} tie {middle}");
                assert_eq!(e.encode(middle.next_down()), low);
                assert_eq!(e.encode(middle.next_up()), low + 1);
                assert_eq!(e.encode(pair[0] as f32), low);
            }
        }
    }

    #[test]
    fn fp8_agrees_with_the_float8_crate() {
        let (e4, e5) = (element(DType::F8E4M3), element(DType::F8E5M2));
        for h in 0..=u16::MAX {
            let x = mini::bf16_value(h);
            if x.is_finite() {
                assert_eq!(e4.encode(x), u32::from(float8::F8E4M3::from_f32(x).to_bits()), "{x:e}");
                assert_eq!(e5.encode(x), u32::from(float8::F8E5M2::from_f32(x).to_bits()), "{x:e}");
            }
        }
        for code in 0..=255u8 {
            let (a, b) = (e4.decode(code.into()), float8::F8E4M3::from_bits(code).to_f32());
            assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan());
            let (a, b) = (e5.decode(code.into()), float8::F8E5M2::from_bits(code).to_f32());
            assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan());
        }
    }

    #[test]
    fn e4m3_saturates_around_its_largest_value() {
        let e = element(DType::F8E4M3);
        for (x, code) in [
            (431.9, 0x7d),
            (432.0, 0x7e),
            (447.0, 0x7e),
            (448.0, 0x7e),
            (463.0, 0x7e),
            (464.0, 0x7e),
            (465.0, 0x7e),
            (480.0, 0x7e),
            (f32::MAX, 0x7e),
            (f32::INFINITY, 0x7e),
        ] {
            assert_eq!(e.encode(x), code, "{x}");
            assert_eq!(e.encode(-x), code | 0x80, "-{x}");
        }
        assert_eq!(e.encode(f32::NAN) & 0x7f, 0);
        assert_eq!(e.encode(-0.0), 0x80);
    }

    #[test]
    fn e2m1_signs_follow_the_comparison_with_zero() {
        let e = element(DType::F4E2M1);
        assert_eq!(e.encode(-0.0), 0);
        assert_eq!(e.encode(-1e-30), 8);
        assert_eq!(e.encode(-5.0), 8 | 6);
        assert_eq!(e.encode(f32::INFINITY), 7);
    }

    #[test]
    fn e8m0_rounds_up_to_a_power_of_two() {
        let e = element(DType::E8M0);
        for (x, value) in [
            (1.0, 1.0),
            (1.0000001, 2.0),
            (0.75, 1.0),
            (f32::MAX, mini::pow2(127)),
            (mini::pow2(-126), mini::pow2(-126)),
            (mini::pow2(-126).next_up(), mini::pow2(-125)),
            (f32::from_bits(0x0040_0000), f32::from_bits(0x0040_0000)),
            (f32::from_bits(0x0040_0001), mini::pow2(-126)),
            (f32::from_bits(1), f32::from_bits(0x0040_0000)),
        ] {
            assert_eq!(e.decode(e.encode(x)), value, "{x:e}");
        }
        assert_eq!(e.encode(-1.0), 0);
        assert_eq!(e.encode(f32::NAN), 0);
    }

    #[test]
    fn integers_round_half_away_and_saturate() {
        let i4 = element(DType::I4);
        for (x, value) in
            [(0.5, 1.0), (-0.5, -1.0), (2.4, 2.0), (99.0, 7.0), (-99.0, -8.0), (0.0, 0.0)]
        {
            assert_eq!(i4.decode(i4.encode(x)), value, "{x}");
        }
        assert_eq!(i4.encode(-1.0), 15);
        assert_eq!(i4.encode(f32::NAN), 0);
        let u3 = element(DType::U3);
        assert_eq!((u3.encode(9.0), u3.encode(-4.0), u3.encode(2.5)), (7, 0, 3));
        assert_eq!(element(DType::I32).encode(f32::INFINITY), i32::MAX as u32);
        assert_eq!(element(DType::U32).encode(5e9), u32::MAX);
    }

    #[test]
    fn every_code_of_every_type_survives_a_round_trip() {
        for dtype in DType::all().filter(|t| t.bits() <= 16) {
            let Some(e) = Element::new(dtype) else { continue };
            let codes = if dtype == DType::Bool { 2 } else { 1 << dtype.bits() };
            for code in 0..codes {
                let x = e.decode(code);
                // e2m1 has one zero; infinities of e5m2 saturate; NaNs are not codes of numbers.
                let negative_zero = dtype == DType::F4E2M1 && code == 8;
                if x.is_finite() && !negative_zero {
                    assert_eq!(e.encode(x), code, "{dtype} {code:#x} {x:e}");
                }
            }
        }
    }

    #[test]
    fn types_without_a_codec_are_the_wide_and_the_fnuz_ones() {
        let without: Vec<&str> =
            DType::all().filter(|t| Element::new(*t).is_none()).map(DType::name).collect();
        assert_eq!(without, ["f64", "fp8_e4m3fnuz", "fp8_e5m2fnuz", "c64", "i64", "u64"]);
    }
}
