//! Branch-free rounding to small binary floating-point formats.
//!
//! All functions are `#[inline(always)]` so that a vector kernel compiles them with its own instruction set. They
//! use no fused multiply-add, so every instruction set gives the same bits.

/// 2^k as f32, for −126 ≤ k ≤ 127.
pub const fn pow2(k: i32) -> f32 {
    f32::from_bits(((k + 127) as u32) << 23)
}

/// Exponent bias of a format with `e` exponent bits.
pub const fn bias(e: u32) -> i32 {
    (1 << (e - 1)) - 1
}

/// Largest finite value of a format of `e` exponent and `m` mantissa bits. Formats of five or more exponent bits
/// keep the top exponent for infinity and NaN as IEEE 754 does; e4m3 gives up one code for NaN (OCP OFP8); the
/// narrower ones are finite throughout (OCP MX 1.0).
pub const fn largest(e: u32, m: u32) -> f32 {
    let top = if e >= 5 { (1 << e) - 2 } else { (1 << e) - 1 } - bias(e);
    let fraction = if e == 4 && m == 3 { 6 } else { (1u32 << m) - 1 };
    f32::from_bits((((top + 127) as u32) << 23) | (fraction << (23 - m)))
}

/// Code of a magnitude (sign bit absent) and the value the code stands for, rounded to nearest even and saturated at
/// `max`, which must be finite in the format. `a` must be ≥ 0; NaN saturates.
///
/// Subnormals of the target are rounded by adding a power of two whose last mantissa place is the target's
/// smallest step; normals by the integer trick on the f32 bits.
#[inline(always)]
pub fn encode<const E: u32, const M: u32>(a: f32, max: f32) -> (u32, f32) {
    let a = if a < max { a } else { max };
    let magic = const { pow2(24 - bias(E) - M as i32) };
    let shift = const { 23 - M };
    let low = a + magic;
    let bits = a.to_bits();
    let rounded = bits + (const { (1 << (22 - M)) - 1 }) + ((bits >> shift) & 1);
    let normal = (rounded >> shift).wrapping_sub(const { ((127 - bias(E)) as u32) << M });
    if a < const { pow2(1 - bias(E)) } {
        (low.to_bits() - magic.to_bits(), low - magic)
    } else {
        (normal, f32::from_bits(rounded & (const { !((1 << (23 - M)) - 1) })))
    }
}

/// Value of a magnitude code in a format whose codes are all finite here (infinities and NaNs are the caller's).
pub fn decode(e: u32, m: u32, code: u32) -> f32 {
    let exponent = code >> m;
    let fraction = code & ((1 << m) - 1);
    if exponent == 0 {
        // At most 2^m − 1 steps of 2^(1 − bias − m): exact in f64 and in f32.
        (f64::from(fraction) * f64::from(2.0f32).powi(1 - bias(e) - m as i32)) as f32
    } else {
        f32::from_bits(((exponent as i32 - bias(e) + 127) as u32) << 23 | fraction << (23 - m))
    }
}

/// f32 → bf16 bits, round to nearest even. Overflow gives infinity, NaN stays NaN (quiet, payload cut).
#[inline(always)]
pub fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1))) >> 16;
    let nan = (bits >> 16) | 0x40;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded }) as u16
}

/// f32 → f16 bits, round to nearest even. Overflow gives infinity, NaN a quiet NaN.
#[inline(always)]
pub fn f16_bits(x: f32) -> u16 {
    let sign = (x.to_bits() >> 16) & 0x8000;
    let a = f32::from_bits(x.to_bits() & 0x7fff_ffff);
    let (code, _) = encode::<5, 10>(a, const { largest(5, 10) });
    // 65520 is half a step above 65504, the largest f16.
    let code = if a >= 65520.0 { 0x7c00 } else { code };
    let code = if a.is_nan() { 0x7e00 } else { code };
    (sign | code) as u16
}

/// f16 bits → f32, exact.
#[inline(always)]
pub fn f16_value(h: u16) -> f32 {
    let sign = u32::from(h & 0x8000) << 16;
    let a = u32::from(h & 0x7fff) << 13;
    // 2^-14 (1 + m/1024) − 2^-14 = m · 2^-24 without touching f32 subnormals.
    let small = (f32::from_bits(const { pow2(-14).to_bits() } | a) - const { pow2(-14) }).to_bits();
    let magnitude = if a < 0x400 << 13 {
        small
    } else if a >= 0x7c00 << 13 {
        a | 0x7f80_0000
    } else {
        a + (112 << 23)
    };
    f32::from_bits(sign | magnitude)
}

/// bf16 bits → f32, exact.
#[inline(always)]
pub fn bf16_value(h: u16) -> f32 {
    f32::from_bits(u32::from(h) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_conversions_equal_the_half_crate_on_every_code() {
        for h in 0..=u16::MAX {
            let (ours, theirs) = (f16_value(h), half::f16::from_bits(h).to_f32());
            assert!(
                ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                "{h:#x}"
            );
            if !ours.is_nan() {
                assert_eq!(f16_bits(ours), h);
            }
            let (ours, theirs) = (bf16_value(h), half::bf16::from_bits(h).to_f32());
            assert!(
                ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                "{h:#x}"
            );
            if !ours.is_nan() {
                assert_eq!(bf16_bits(bf16_value(h)), h);
            }
        }
    }

    #[test]
    fn narrowing_every_bf16_to_f16_equals_the_half_crate() {
        for h in 0..=u16::MAX {
            let x = bf16_value(h);
            if !x.is_nan() {
                assert_eq!(f16_bits(x), half::f16::from_f32(x).to_bits(), "{x:e}");
            }
        }
        assert!(f16_value(f16_bits(f32::NAN)).is_nan());
        assert_eq!(f16_bits(65519.996), 0x7bff);
        assert_eq!(f16_bits(-65520.0), 0xfc00);
    }

    #[test]
    fn narrowing_random_f32_equals_the_half_crate() {
        let mut state = 7u64;
        for _ in 0..1_000_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let x = f32::from_bits((state >> 32) as u32);
            if !x.is_nan() {
                assert_eq!(f16_bits(x), half::f16::from_f32(x).to_bits(), "{x:e}");
                assert_eq!(bf16_bits(x), half::bf16::from_f32(x).to_bits(), "{x:e}");
            }
        }
    }

    #[test]
    fn the_largest_values_are_the_published_ones() {
        assert_eq!(largest(4, 3), 448.0);
        assert_eq!(largest(5, 2), 57344.0);
        assert_eq!(largest(2, 3), 7.5);
        assert_eq!(largest(3, 2), 28.0);
        assert_eq!(largest(2, 1), 6.0);
        assert_eq!(largest(5, 10), 65504.0);
    }
}
