//! Sixteen lanes at a time: the few vector operations that the kernels are written in.
//!
//! A value of a type that implements [`Simd`] is the proof that its instructions run here, so that kernels call them without
//! `unsafe`. Every operation is exact or rounded as IEEE 754 says, and only [`Simd::fused`] is fused, so every implementation
//! gives the same bits; tests compare them with [`Portable`], whose lanes are arrays.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::Avx512;
pub(super) use portable::Portable;

use crate::num::mini;

/// Number of lanes.
pub(super) const LANES: usize = 16;

/// Operations on 16 lanes of f32 (`F`) and of u32 (`I`).
pub(super) trait Simd: Copy {
    /// Whether kernels for it take rows of every kind, at the price of some speed.
    const ANY_ROW: bool = false;
    /// Whether four times 16 codes are packed faster together.
    const PACKS_FOUR: bool = false;
    /// 16 × f32.
    type F: Copy;
    /// 16 × u32.
    type I: Copy;

    fn splat(self, x: f32) -> Self::F;
    fn splat_bits(self, x: u32) -> Self::I;
    fn load(self, x: &[f32; LANES]) -> Self::F;
    fn load_bits(self, x: &[u32; LANES]) -> Self::I;
    fn store(self, x: Self::F) -> [f32; LANES];
    fn store_bits(self, x: Self::I) -> [u32; LANES];

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// a · b + c, rounded once.
    fn fused(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `if a > b { a } else { b }`
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `if a < b { a } else { b }`
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// `max(min(x, most), −most)` of a number x and a positive `most`.
    #[inline(always)]
    fn clamp(self, x: Self::F, most: f32) -> Self::F {
        self.min(self.max(x, self.splat(-most)), self.splat(most))
    }
    /// `if a < b { x } else { y }`
    fn if_less(self, a: Self::F, b: Self::F, x: Self::I, y: Self::I) -> Self::I;

    fn bits(self, x: Self::F) -> Self::I;
    fn of_bits(self, x: Self::I) -> Self::F;
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    /// Modulo 2^32.
    fn plus(self, a: Self::I, b: Self::I) -> Self::I;
    /// Modulo 2^32.
    fn minus(self, a: Self::I, b: Self::I) -> Self::I;
    fn shr<const N: u32>(self, x: Self::I) -> Self::I;
    fn shl<const N: u32>(self, x: Self::I) -> Self::I;
    /// `if test == 0 { x } else { y }`
    fn if_zero(self, test: Self::I, x: Self::I, y: Self::I) -> Self::I;
    /// Towards zero, of magnitudes below 2^31.
    fn truncate(self, x: Self::F) -> Self::I;
    /// Of two's complement.
    fn float(self, x: Self::I) -> Self::F;

    /// 16 little-endian u16.
    fn load_halves(self, bytes: &[u8; 32]) -> Self::I;
    /// 16 u8.
    fn load_bytes(self, bytes: &[u8; LANES]) -> Self::I;
    /// 16 half bytes, the low half of each byte first.
    fn load_nibbles(self, bytes: &[u8; 8]) -> Self::I;
    /// The low halves of the lanes.
    fn store_halves(self, x: Self::I) -> [u8; 32];
    /// The low bytes of the lanes.
    fn store_bytes(self, x: Self::I) -> [u8; LANES];
    /// The low four bits of the lanes, two a byte, the first in the low half.
    fn store_nibbles(self, x: Self::I) -> [u8; 8];

    /// [`Simd::store_bytes`] of four times 16 lanes, all of them from −128 to 127.
    #[inline(always)]
    fn store_64_signed(self, x: [Self::I; 4]) -> [u8; 64] {
        let mut bytes = [0; 64];
        let parts = bytes.as_chunks_mut::<LANES>().0.iter_mut();
        for (part, x) in parts.zip(x) {
            *part = self.store_bytes(x);
        }
        bytes
    }

    /// [`Simd::store_nibbles`] of four times 16 lanes, all of them from −128 to 127 (`SIGNED`) or from 0 to 255.
    #[inline(always)]
    fn store_64_nibbles<const SIGNED: bool>(self, x: [Self::I; 4]) -> [u8; 32] {
        let mut bytes = [0; 32];
        let parts = bytes.as_chunks_mut::<8>().0.iter_mut();
        for (part, x) in parts.zip(x) {
            *part = self.store_nibbles(x);
        }
        bytes
    }

    /// Largest of 16 u16 without their top bits.
    fn peak_of_16_halves(self, bytes: &[u8; 32]) -> u16;
    /// Largest of any number of u16 without their top bits.
    fn peak_of_halves(self, chunks: &[[u8; 64]]) -> u16;
    /// Largest of any number of u32 without their top bits.
    fn peak_of_words(self, chunks: &[[u8; 64]]) -> u32;

    #[inline(always)]
    fn load_words(self, bytes: &[u8; 64]) -> Self::F {
        let mut values = [0; LANES];
        let words = bytes.as_chunks::<4>().0;
        values.iter_mut().zip(words).for_each(|(v, b)| *v = u32::from_le_bytes(*b));
        self.of_bits(self.load_bits(&values))
    }

    #[inline(always)]
    fn store_words(self, x: Self::F) -> [u8; 64] {
        let mut bytes = [0; 64];
        let values = self.store(x);
        bytes.as_chunks_mut::<4>().0.iter_mut().zip(values).for_each(|(b, v)| *b = v.to_le_bytes());
        bytes
    }

    /// [`mini::bf16_value`]
    #[inline(always)]
    fn bf16_value(self, h: Self::I) -> Self::F {
        self.of_bits(self.shl::<16>(h))
    }

    /// [`mini::bf16_bits`] of finite values.
    #[inline(always)]
    fn bf16_bits(self, x: Self::F) -> Self::I {
        let bits = self.bits(x);
        let odd = self.and(self.shr::<16>(bits), self.splat_bits(1));
        self.shr::<16>(self.plus(bits, self.plus(odd, self.splat_bits(0x7fff))))
    }

    /// [`mini::f16_value`] of finite values.
    #[inline(always)]
    fn f16_value(self, h: Self::I) -> Self::F {
        let sign = self.shl::<16>(self.and(h, self.splat_bits(0x8000)));
        let a = self.shl::<13>(self.and(h, self.splat_bits(0x7fff)));
        let low = const { mini::pow2(-14) };
        let small = self.of_bits(self.or(a, self.splat_bits(low.to_bits())));
        let small = self.bits(self.sub(small, self.splat(low)));
        let normal = self.plus(a, self.splat_bits(112 << 23));
        let exponent = self.shr::<23>(a);
        self.of_bits(self.or(sign, self.if_zero(exponent, small, normal)))
    }

    /// Bits of an f32 moved down so that `M` of its mantissa's stay. Shifts are constants of the instruction, which generic
    /// arithmetic cannot name.
    #[inline(always)]
    fn to_mantissa<const M: u32>(self, x: Self::I) -> Self::I {
        const { assert!(M == 1 || M == 2 || M == 3 || M == 10) }
        match M {
            1 => self.shr::<22>(x),
            2 => self.shr::<21>(x),
            3 => self.shr::<20>(x),
            _ => self.shr::<13>(x),
        }
    }

    /// [`mini::decode`] of magnitudes.
    #[inline(always)]
    fn decode<const E: u32, const M: u32>(self, magnitude: Self::I) -> Self::F {
        const { assert!(M == 1 || M == 3) }
        let a = match M {
            1 => self.shl::<22>(magnitude),
            _ => self.shl::<20>(magnitude),
        };
        // As a fraction of the smallest normal, which is taken away again.
        let least = const { mini::pow2(1 - mini::bias(E)) };
        let small = self.of_bits(self.or(a, self.splat_bits(least.to_bits())));
        let small = self.bits(self.sub(small, self.splat(least)));
        let normal = self.plus(a, self.splat_bits(((127 - mini::bias(E)) as u32) << 23));
        self.of_bits(self.if_zero(self.shr::<23>(a), small, normal))
    }

    /// [`mini::encode`]
    #[inline(always)]
    fn encode<const E: u32, const M: u32>(self, a: Self::F, max: f32) -> (Self::I, Self::F) {
        let a = self.min(a, self.splat(max));
        // The power of two that the value's steps belong to; those of subnormals are those of the smallest normals.
        let least = self.splat(const { mini::pow2(1 - mini::bias(E)) });
        let power = self.and(self.bits(self.max(a, least)), self.splat_bits(0x7f80_0000));
        // Added to 2^(23 − M) times that power, the value is rounded to nearest even multiples of its step, which the sum's
        // mantissa counts.
        let magic = self.plus(power, self.splat_bits((23 - M) << 23));
        let sum = self.add(a, self.of_bits(magic));
        let steps = self.minus(self.bits(sum), magic);
        let base = self.splat_bits(((128 - mini::bias(E)) as u32) << M);
        let code = self.plus(steps, self.minus(self.to_mantissa::<M>(power), base));
        (code, self.sub(sum, self.of_bits(magic)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every operation on values of all kinds, as bits; floats that are NaN count as equal.
    fn all(s: impl Simd) -> Vec<u32> {
        let mut state = 9u64;
        let mut word = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 32) as u32
        };
        let mut out = Vec::new();
        let edges =
            [0, 1 << 31, 1, 0x7f80_0000, 0xff80_0000, 0x7fc0_0000, 0x3f00_0000, 0xbf00_0000];
        for round in 0..400 {
            let mut draw = |i: usize| match round {
                0 => edges[i % 8],
                1 => edges[i / 8 % 8],
                _ => word(),
            };
            let a: [u32; LANES] = std::array::from_fn(&mut draw);
            let b: [u32; LANES] = std::array::from_fn(|i| draw(i + round / 2));
            let (x, y) = (s.load_bits(&a), s.load_bits(&b));
            let (p, q) = (s.of_bits(x), s.of_bits(y));
            let floats = [s.add(p, q), s.sub(p, q), s.mul(p, q), s.div(p, q), s.max(p, q)];
            let more = [s.min(p, q), s.float(x), s.fused(p, q, s.add(p, q))];
            let floats = floats.into_iter().chain(more);
            let quiet = |v: f32| if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() };
            out.extend(floats.flat_map(|v| s.store(v)).map(quiet));
            let moderate = s.load(&a.map(|w| (w as i32 >> 8) as f32 / 16.0));
            let ints = [
                s.and(x, y),
                s.or(x, y),
                s.plus(x, y),
                s.minus(x, y),
                s.shr::<13>(x),
                s.shl::<16>(x),
                s.if_less(p, q, x, y),
                s.if_zero(s.and(x, s.splat_bits(1)), x, y),
                s.truncate(moderate),
                s.bits(s.splat(f32::from_bits(a[3]))),
            ];
            out.extend(ints.into_iter().flat_map(|v| s.store_bits(v)));
            out.extend(s.store(s.clamp(moderate, 127.0)).map(f32::to_bits));
            let (signed, codes) = (s.truncate(s.clamp(moderate, 127.0)), s.shr::<24>(x));
            let four = [signed, s.truncate(s.splat(-128.0)), s.truncate(s.splat(127.0)), signed];
            out.extend(s.store_64_signed(four).map(u32::from));
            out.extend(s.store_64_nibbles::<true>(four).map(u32::from));
            let four = [codes, s.shr::<24>(y), s.splat_bits(255), codes];
            out.extend(s.store_64_nibbles::<false>(four).map(u32::from));
            let bytes: [u8; 64] = std::array::from_fn(|i| a[i / 4].to_le_bytes()[i % 4]);
            let halves: [u8; 32] = std::array::from_fn(|i| bytes[i]);
            out.extend(s.store_bits(s.load_halves(&halves)));
            let lines = bytes.as_chunks::<LANES>().0;
            out.extend(s.store_bits(s.load_bytes(&lines[round % 4])));
            out.extend(s.store_bits(s.load_nibbles(&lines[1].as_chunks::<8>().0[round % 2])));
            out.extend(s.store_halves(x).map(u32::from));
            out.extend(s.store_bytes(x).map(u32::from));
            out.extend(s.store_nibbles(x).map(u32::from));
            out.extend(s.store_words(s.load_words(&bytes)).map(u32::from));
            out.push(s.peak_of_16_halves(&halves).into());
            out.push(s.peak_of_halves(&[bytes, [0x80; 64]]).into());
            out.push(s.peak_of_words(&[bytes]));
        }
        out
    }

    #[test]
    fn every_instruction_set_computes_what_arrays_compute() {
        let want = all(Portable);
        assert_eq!(
            want.len(),
            400 * (8 * 16 + 11 * 16 + 64 + 32 + 32 + 16 + 32 + 32 + 16 + 8 + 64 + 3)
        );
        #[cfg(target_arch = "x86_64")]
        {
            if Avx2::runs() {
                // SAFETY: it runs.
                assert!(all(unsafe { Avx2::assumed() }) == want, "AVX2");
            }
            if Avx512::runs() {
                // SAFETY: it runs.
                assert!(all(unsafe { Avx512::assumed() }) == want, "AVX-512");
            }
        }
    }

    #[test]
    fn small_floats_are_those_of_mini_on_every_value_of_16_bits_and_around_every_code() {
        fn check<const E: u32, const M: u32>(s: Portable) {
            let max = mini::largest(E, M);
            for top in 0..0x7f80u32 {
                for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                    let a = f32::from_bits(top << 16 | low);
                    let (code, value) = s.encode::<E, M>(s.splat(a), max);
                    let want = mini::encode::<E, M>(a, max);
                    assert_eq!((s.store_bits(code)[0], s.store(value)[15]), want, "{a:e}");
                }
            }
        }
        fn back<const E: u32, const M: u32>(s: Portable) {
            for code in 0..1 << (E + M) {
                let value = s.store(s.decode::<E, M>(s.splat_bits(code)))[5];
                assert_eq!(value.to_bits(), mini::decode(E, M, code).to_bits(), "{code}");
            }
        }
        back::<4, 3>(Portable);
        back::<2, 1>(Portable);
        check::<4, 3>(Portable);
        check::<5, 2>(Portable);
        check::<2, 1>(Portable);
        check::<5, 10>(Portable);
        for h in 0..=0xffffu32 {
            let s = Portable;
            let value = s.store(s.f16_value(s.splat_bits(h)))[3];
            let want = mini::f16_value(h as u16);
            assert!(h & 0x7c00 == 0x7c00 || value.to_bits() == want.to_bits(), "{h:#x}");
            let x = f32::from_bits(h << 16 | 0x8000);
            if x.is_finite() {
                let have = s.store_bits(s.bf16_bits(s.splat(x)))[7];
                assert_eq!(have & 0xffff, u32::from(mini::bf16_bits(x)), "{x:e}");
            }
        }
    }
}
