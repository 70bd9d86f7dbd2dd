//! Two registers of 256 bits.

use std::arch::x86_64::*;

use super::{LANES, Simd};

/// Proof that the processor has AVX2 and FMA.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx2(());

impl Avx2 {
    /// Whether the processor has them.
    pub fn runs() -> bool {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
    }

    /// The proof.
    ///
    /// # Safety
    /// [`Avx2::runs`].
    #[inline(always)]
    pub unsafe fn assumed() -> Avx2 {
        Avx2(())
    }
}

/// Largest of 16 u16.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn largest_half(x: __m256i) -> u16 {
    // SAFETY: the caller's promise.
    unsafe {
        let half = _mm_max_epu16(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
        // There is an instruction for the least of eight: the complement of the largest.
        let least = _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1)));
        !(_mm_cvtsi128_si32(least) as u16)
    }
}

/// Largest of 16 u16 without their top bits.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
pub(super) unsafe fn peak_of_16_halves(bytes: &[u8; 32]) -> u16 {
    // SAFETY: the caller's promise; the reference covers what is read.
    unsafe {
        let bits = _mm256_loadu_si256(bytes.as_ptr().cast());
        largest_half(_mm256_and_si256(bits, _mm256_set1_epi16(0x7fff)))
    }
}

impl Simd for Avx2 {
    type F = [__m256; 2];
    type I = [__m256i; 2];

    #[inline(always)]
    fn splat(self, x: f32) -> [__m256; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { [_mm256_set1_ps(x); 2] }
    }

    #[inline(always)]
    fn splat_bits(self, x: u32) -> [__m256i; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { [_mm256_set1_epi32(x as i32); 2] }
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> [__m256; 2] {
        // SAFETY: `self` exists only where the processor has the instructions. The reference covers what is read.
        unsafe { [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))] }
    }

    #[inline(always)]
    fn load_bits(self, x: &[u32; LANES]) -> [__m256i; 2] {
        // SAFETY: `self` exists only where the processor has the instructions. The reference covers what is read.
        unsafe {
            let x = x.as_ptr().cast::<__m256i>();
            [_mm256_loadu_si256(x), _mm256_loadu_si256(x.add(1))]
        }
    }

    #[inline(always)]
    fn store(self, x: [__m256; 2]) -> [f32; LANES] {
        // SAFETY: both types are 64 bytes, any of which are legal.
        unsafe { std::mem::transmute::<[__m256; 2], [f32; LANES]>(x) }
    }

    #[inline(always)]
    fn store_bits(self, x: [__m256i; 2]) -> [u32; LANES] {
        // SAFETY: both types are 64 bytes, any of which are legal.
        unsafe { std::mem::transmute::<[__m256i; 2], [u32; LANES]>(x) }
    }

    #[inline(always)]
    fn add(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn sub(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn div(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn fused(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }

    #[inline(always)]
    fn max(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn min(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn if_less(
        self,
        a: [__m256; 2],
        b: [__m256; 2],
        x: [__m256i; 2],
        y: [__m256i; 2],
    ) -> [__m256i; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe {
            let low = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0]));
            let high = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1]));
            [_mm256_blendv_epi8(y[0], x[0], low), _mm256_blendv_epi8(y[1], x[1], high)]
        }
    }

    #[inline(always)]
    fn bits(self, x: [__m256; 2]) -> [__m256i; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { [_mm256_castps_si256(x[0]), _mm256_castps_si256(x[1])] }
    }

    #[inline(always)]
    fn of_bits(self, x: [__m256i; 2]) -> [__m256; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { [_mm256_castsi256_ps(x[0]), _mm256_castsi256_ps(x[1])] }
    }

    #[inline(always)]
    fn and(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { [_mm256_and_si256(a[0], b[0]), _mm256_and_si256(a[1], b[1])] }
    }

    #[inline(always)]
    fn or(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])] }
    }

    #[inline(always)]
    fn plus(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])] }
    }

    #[inline(always)]
    fn minus(self, a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { [_mm256_sub_epi32(a[0], b[0]), _mm256_sub_epi32(a[1], b[1])] }
    }

    #[inline(always)]
    fn shr<const N: u32>(self, x: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe {
            let n = _mm_cvtsi32_si128(N as i32);
            [_mm256_srl_epi32(x[0], n), _mm256_srl_epi32(x[1], n)]
        }
    }

    #[inline(always)]
    fn shl<const N: u32>(self, x: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe {
            let n = _mm_cvtsi32_si128(N as i32);
            [_mm256_sll_epi32(x[0], n), _mm256_sll_epi32(x[1], n)]
        }
    }

    #[inline(always)]
    fn if_zero(self, test: [__m256i; 2], x: [__m256i; 2], y: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe {
            let low = _mm256_cmpeq_epi32(test[0], _mm256_setzero_si256());
            let high = _mm256_cmpeq_epi32(test[1], _mm256_setzero_si256());
            [_mm256_blendv_epi8(y[0], x[0], low), _mm256_blendv_epi8(y[1], x[1], high)]
        }
    }

    #[inline(always)]
    fn truncate(self, x: [__m256; 2]) -> [__m256i; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { [_mm256_cvttps_epi32(x[0]), _mm256_cvttps_epi32(x[1])] }
    }

    #[inline(always)]
    fn float(self, x: [__m256i; 2]) -> [__m256; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { [_mm256_cvtepi32_ps(x[0]), _mm256_cvtepi32_ps(x[1])] }
    }

    #[inline(always)]
    fn load_halves(self, bytes: &[u8; 32]) -> [__m256i; 2] {
        // SAFETY: `self` exists only where the processor has the instructions. The reference covers what is read.
        unsafe {
            let halves = bytes.as_ptr().cast::<__m128i>();
            let (low, high) = (_mm_loadu_si128(halves), _mm_loadu_si128(halves.add(1)));
            [_mm256_cvtepu16_epi32(low), _mm256_cvtepu16_epi32(high)]
        }
    }

    #[inline(always)]
    fn load_bytes(self, bytes: &[u8; LANES]) -> [__m256i; 2] {
        // SAFETY: `self` exists only where the processor has the instructions. The reference covers what is read.
        unsafe {
            let bytes = _mm_loadu_si128(bytes.as_ptr().cast());
            [_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(bytes))]
        }
    }

    #[inline(always)]
    fn load_nibbles(self, bytes: &[u8; 8]) -> [__m256i; 2] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe {
            let bytes = _mm_cvtsi64_si128(i64::from_le_bytes(*bytes));
            [bytes, _mm_srli_si128::<4>(bytes)].map(|four| {
                let wide = _mm256_cvtepu8_epi64(four);
                // A byte becomes 64 bits, whose upper half is for the upper half of the byte.
                let upper =
                    _mm256_slli_epi64::<28>(_mm256_and_si256(wide, _mm256_set1_epi64x(0xf0)));
                _mm256_or_si256(_mm256_and_si256(wide, _mm256_set1_epi64x(15)), upper)
            })
        }
    }

    #[inline(always)]
    fn store_halves(self, x: [__m256i; 2]) -> [u8; 32] {
        // SAFETY: `self` exists only where the processor has the instructions. Both types are 32 bytes, any of which are legal.
        unsafe {
            // Without their upper halves nothing saturates. Packing interleaves the halves of both registers.
            let low = _mm256_set1_epi32(0xffff);
            let packed =
                _mm256_packus_epi32(_mm256_and_si256(x[0], low), _mm256_and_si256(x[1], low));
            let ordered = _mm256_permute4x64_epi64::<0b11_01_10_00>(packed);
            std::mem::transmute::<__m256i, [u8; 32]>(ordered)
        }
    }

    #[inline(always)]
    fn store_bytes(self, x: [__m256i; 2]) -> [u8; LANES] {
        // SAFETY: `self` exists only where the processor has the instructions. Both types are 16 bytes, any of which are legal.
        unsafe {
            // As in `store_halves`, then the same with halves.
            let low = _mm256_set1_epi32(0xff);
            let packed =
                _mm256_packus_epi32(_mm256_and_si256(x[0], low), _mm256_and_si256(x[1], low));
            let ordered = _mm256_permute4x64_epi64::<0b11_01_10_00>(packed);
            let (a, b) = (_mm256_castsi256_si128(ordered), _mm256_extracti128_si256::<1>(ordered));
            std::mem::transmute::<__m128i, [u8; LANES]>(_mm_packus_epi16(a, b))
        }
    }

    #[inline(always)]
    fn store_nibbles(self, x: [__m256i; 2]) -> [u8; 8] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe {
            let low = _mm256_set1_epi32(15);
            let (a, b) = (_mm256_and_si256(x[0], low), _mm256_and_si256(x[1], low));
            // A pair is 64 bits, of which the upper half moves down beside the lower.
            let a = _mm256_or_si256(a, _mm256_srli_epi64::<28>(a));
            let b = _mm256_or_si256(b, _mm256_srli_epi64::<28>(b));
            // In every half register, the two bytes of `a` before the two of `b`.
            let none = 0x8080_8080_8080_8080_u64 as i64;
            let first =
                _mm256_set_epi64x(none, none & !0xffff | 0x0800, none, none & !0xffff | 0x0800);
            let next = _mm256_slli_epi64::<16>(first);
            let next = _mm256_or_si256(next, _mm256_set_epi64x(none, 0x8080, none, 0x8080));
            let both = _mm256_or_si256(_mm256_shuffle_epi8(a, first), _mm256_shuffle_epi8(b, next));
            let (l, h) = (_mm256_castsi256_si128(both), _mm256_extracti128_si256::<1>(both));
            _mm_cvtsi128_si64(_mm_unpacklo_epi16(l, h)).to_le_bytes()
        }
    }

    #[inline(always)]
    fn peak_of_16_halves(self, bytes: &[u8; 32]) -> u16 {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { peak_of_16_halves(bytes) }
    }

    #[inline(always)]
    fn peak_of_halves(self, chunks: &[[u8; 64]]) -> u16 {
        // SAFETY: `self` exists only where the processor has the instructions. The reference covers what is read.
        unsafe {
            let mut peak = [_mm256_setzero_si256(); 2];
            for chunk in chunks {
                let at = chunk.as_ptr().cast::<__m256i>();
                for (i, peak) in peak.iter_mut().enumerate() {
                    let bits = _mm256_loadu_si256(at.add(i));
                    *peak =
                        _mm256_max_epu16(*peak, _mm256_and_si256(bits, _mm256_set1_epi16(0x7fff)));
                }
            }
            largest_half(_mm256_max_epu16(peak[0], peak[1]))
        }
    }

    #[inline(always)]
    fn peak_of_words(self, chunks: &[[u8; 64]]) -> u32 {
        // SAFETY: `self` exists only where the processor has the instructions. The reference covers what is read.
        unsafe {
            let mut peak = [_mm256_setzero_si256(); 2];
            for chunk in chunks {
                let at = chunk.as_ptr().cast::<__m256i>();
                for (i, peak) in peak.iter_mut().enumerate() {
                    let bits = _mm256_loadu_si256(at.add(i));
                    *peak = _mm256_max_epu32(
                        *peak,
                        _mm256_and_si256(bits, _mm256_set1_epi32(i32::MAX)),
                    );
                }
            }
            self.store_bits(peak).into_iter().fold(0, u32::max)
        }
    }
}
