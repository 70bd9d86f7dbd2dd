//! One register of 512 bits.

use std::arch::x86_64::*;

use super::{LANES, Simd};

/// Proof that the processor has AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx512(());

impl Avx512 {
    /// Whether the processor has them.
    pub fn runs() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
    }

    /// The proof.
    ///
    /// # Safety
    /// [`Avx512::runs`].
    #[inline(always)]
    pub unsafe fn assumed() -> Avx512 {
        Avx512(())
    }
}

/// The lanes of four registers as bytes, in order.
///
/// # Safety
/// [`Avx512::runs`].
#[inline(always)]
unsafe fn bytes_of_four<const SIGNED: bool>([a, b, c, d]: [__m512i; 4]) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = if SIGNED {
            _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d))
        } else {
            _mm512_packus_epi16(_mm512_packus_epi32(a, b), _mm512_packus_epi32(c, d))
        };
        // Packing works within quarters: each holds four bytes of a, of b, of c and of d.
        let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        _mm512_permutexvar_epi32(order, bytes)
    }
}

impl Simd for Avx512 {
    const PACKS_FOUR: bool = true;
    type F = __m512;
    type I = __m512i;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn splat_bits(self, x: u32) -> __m512i {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { _mm512_set1_epi32(x as i32) }
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> __m512 {
        // SAFETY: `self` exists only where the processor has the instructions. The reference covers what is read.
        unsafe { _mm512_loadu_ps(x.as_ptr()) }
    }

    #[inline(always)]
    fn load_bits(self, x: &[u32; LANES]) -> __m512i {
        // SAFETY: `self` exists only where the processor has the instructions. The reference covers what is read.
        unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store(self, x: __m512) -> [f32; LANES] {
        // SAFETY: both types are 64 bytes, any of which are legal.
        unsafe { std::mem::transmute::<__m512, [f32; LANES]>(x) }
    }

    #[inline(always)]
    fn store_bits(self, x: __m512i) -> [u32; LANES] {
        // SAFETY: both types are 64 bytes, any of which are legal.
        unsafe { std::mem::transmute::<__m512i, [u32; LANES]>(x) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn fused(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` exists only where the processor has the instructions. Its second operand is taken unless a > b.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` exists only where the processor has the instructions. Its second operand is taken unless a < b.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn clamp(self, x: __m512, most: f32) -> __m512 {
        // SAFETY: `self` exists only where the processor has the instructions. The smaller magnitude, with the sign of x.
        unsafe { _mm512_range_ps::<0b0010>(x, _mm512_set1_ps(most)) }
    }

    #[inline(always)]
    fn if_less(self, a: __m512, b: __m512, x: __m512i, y: __m512i) -> __m512i {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { _mm512_mask_blend_epi32(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x) }
    }

    #[inline(always)]
    fn bits(self, x: __m512) -> __m512i {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { _mm512_castps_si512(x) }
    }

    #[inline(always)]
    fn of_bits(self, x: __m512i) -> __m512 {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { _mm512_castsi512_ps(x) }
    }

    #[inline(always)]
    fn and(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { _mm512_and_si512(a, b) }
    }

    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    fn plus(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { _mm512_add_epi32(a, b) }
    }

    #[inline(always)]
    fn minus(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { _mm512_sub_epi32(a, b) }
    }

    #[inline(always)]
    fn shr<const N: u32>(self, x: __m512i) -> __m512i {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { _mm512_srli_epi32::<N>(x) }
    }

    #[inline(always)]
    fn shl<const N: u32>(self, x: __m512i) -> __m512i {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { _mm512_slli_epi32::<N>(x) }
    }

    #[inline(always)]
    fn if_zero(self, test: __m512i, x: __m512i, y: __m512i) -> __m512i {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { _mm512_mask_blend_epi32(_mm512_testn_epi32_mask(test, test), y, x) }
    }

    #[inline(always)]
    fn truncate(self, x: __m512) -> __m512i {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { _mm512_cvttps_epi32(x) }
    }

    #[inline(always)]
    fn float(self, x: __m512i) -> __m512 {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { _mm512_cvtepi32_ps(x) }
    }

    #[inline(always)]
    fn load_halves(self, bytes: &[u8; 32]) -> __m512i {
        // SAFETY: `self` exists only where the processor has the instructions. The reference covers what is read.
        unsafe { _mm512_cvtepu16_epi32(_mm256_loadu_si256(bytes.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_bytes(self, bytes: &[u8; LANES]) -> __m512i {
        // SAFETY: `self` exists only where the processor has the instructions. The reference covers what is read.
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(bytes.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_nibbles(self, bytes: &[u8; 8]) -> __m512i {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe {
            let wide = _mm512_cvtepu8_epi64(_mm_cvtsi64_si128(i64::from_le_bytes(*bytes)));
            // A byte becomes 64 bits, whose upper half is for the upper half of the byte.
            let upper = _mm512_slli_epi64::<28>(_mm512_and_si512(wide, _mm512_set1_epi64(0xf0)));
            _mm512_or_si512(_mm512_and_si512(wide, _mm512_set1_epi64(15)), upper)
        }
    }

    #[inline(always)]
    fn store_halves(self, x: __m512i) -> [u8; 32] {
        // SAFETY: `self` exists only where the processor has the instructions. Both types are 32 bytes, any of which are legal.
        unsafe { std::mem::transmute::<__m256i, [u8; 32]>(_mm512_cvtepi32_epi16(x)) }
    }

    #[inline(always)]
    fn store_bytes(self, x: __m512i) -> [u8; LANES] {
        // SAFETY: `self` exists only where the processor has the instructions. Both types are 16 bytes, any of which are legal.
        unsafe { std::mem::transmute::<__m128i, [u8; LANES]>(_mm512_cvtepi32_epi8(x)) }
    }

    #[inline(always)]
    fn store_nibbles(self, x: __m512i) -> [u8; 8] {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe {
            let low = _mm512_and_si512(x, _mm512_set1_epi32(15));
            // A pair is 64 bits, of which the upper half moves down beside the lower.
            let pairs = _mm512_or_si512(low, _mm512_srli_epi64::<28>(low));
            _mm_cvtsi128_si64(_mm512_cvtepi64_epi8(pairs)).to_le_bytes()
        }
    }

    #[inline(always)]
    fn store_64_signed(self, x: [__m512i; 4]) -> [u8; 64] {
        // SAFETY: `self` exists only where the processor has the instructions. Both types are 64 bytes, any of which are legal.
        unsafe { std::mem::transmute::<__m512i, [u8; 64]>(bytes_of_four::<true>(x)) }
    }

    #[inline(always)]
    fn store_64_nibbles<const SIGNED: bool>(self, x: [__m512i; 4]) -> [u8; 32] {
        // SAFETY: `self` exists only where the processor has the instructions. Both types are 32 bytes, any of which are legal.
        unsafe {
            let bytes = _mm512_and_si512(bytes_of_four::<SIGNED>(x), _mm512_set1_epi8(15));
            // The first of a pair once, the second 16 times.
            let pairs = _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x1001));
            std::mem::transmute::<__m256i, [u8; 32]>(_mm512_cvtepi16_epi8(pairs))
        }
    }

    #[inline(always)]
    fn peak_of_16_halves(self, bytes: &[u8; 32]) -> u16 {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { super::avx2::peak_of_16_halves(bytes) }
    }

    #[inline(always)]
    fn peak_of_halves(self, chunks: &[[u8; 64]]) -> u16 {
        // SAFETY: `self` exists only where the processor has the instructions. The reference covers what is read.
        unsafe {
            let mut peak = _mm512_setzero_si512();
            for chunk in chunks {
                let bits = _mm512_loadu_si512(chunk.as_ptr().cast());
                peak = _mm512_max_epu16(peak, _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff)));
            }
            let half = _mm256_max_epu16(
                _mm512_castsi512_si256(peak),
                _mm512_extracti64x4_epi64::<1>(peak),
            );
            super::avx2::largest_half(half)
        }
    }

    #[inline(always)]
    fn peak_of_words(self, chunks: &[[u8; 64]]) -> u32 {
        // SAFETY: `self` exists only where the processor has the instructions. The reference covers what is read.
        unsafe {
            let mut peak = _mm512_setzero_si512();
            for chunk in chunks {
                let bits = _mm512_loadu_si512(chunk.as_ptr().cast());
                peak = _mm512_max_epu32(peak, _mm512_and_si512(bits, _mm512_set1_epi32(i32::MAX)));
            }
            _mm512_reduce_max_epu32(peak)
        }
    }
}
