//! Two messages at a time with the SHA extensions of x86.

use std::arch::x86_64::*;

use super::{BLOCK, K};

/// Proof that the processor has the instructions.
#[derive(Clone, Copy)]
pub(super) struct Instructions(());

impl Instructions {
    /// Asks the processor, once.
    pub(super) fn new() -> Option<Instructions> {
        let has = is_x86_feature_detected!("sha") && is_x86_feature_detected!("avx");
        has.then_some(Instructions(()))
    }

    /// Compresses blocks of two messages as far as both go.
    pub(super) fn compress_two(
        self,
        a: &mut [u32; 8],
        x: &[[u8; BLOCK]],
        b: &mut [u32; 8],
        y: &[[u8; BLOCK]],
    ) {
        // SAFETY: a value of this type exists only after the processor said that it has `sha` and `avx`, and with `avx` all
        // earlier vector instructions.
        unsafe { compress(a, x, b, y) }
    }
}

/// The eight words of a state in the order in which the instructions want them.
#[derive(Clone, Copy)]
struct State {
    abef: __m128i,
    cdgh: __m128i,
}

#[inline]
#[target_feature(enable = "sha,avx")]
fn load(state: &[u32; 8]) -> State {
    let [a, b, c, d, e, f, g, h] = state.map(u32::cast_signed);
    State { abef: _mm_set_epi32(a, b, e, f), cdgh: _mm_set_epi32(c, d, g, h) }
}

#[inline]
#[target_feature(enable = "sha,avx")]
fn store(state: State, out: &mut [u32; 8]) {
    let State { abef, cdgh } = state;
    *out = [
        _mm_extract_epi32::<3>(abef),
        _mm_extract_epi32::<2>(abef),
        _mm_extract_epi32::<3>(cdgh),
        _mm_extract_epi32::<2>(cdgh),
        _mm_extract_epi32::<1>(abef),
        _mm_extract_epi32::<0>(abef),
        _mm_extract_epi32::<1>(cdgh),
        _mm_extract_epi32::<0>(cdgh),
    ]
    .map(i32::cast_unsigned);
}

/// Sixteen big-endian words.
#[inline]
#[target_feature(enable = "sha,avx")]
fn words(block: &[u8; BLOCK]) -> [__m128i; 4] {
    let swap = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
    let quarters = block.as_chunks::<16>().0;
    let mut words = [_mm_setzero_si128(); 4];
    for (words, bytes) in words.iter_mut().zip(quarters) {
        // SAFETY: 16 bytes are read of an array of 16, at any alignment.
        *words = _mm_shuffle_epi8(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }, swap);
    }
    words
}

/// Four rounds of two messages. Each of the two instructions needs the result of the one before it, four cycles later: the
/// other message's comes in between.
#[inline]
#[target_feature(enable = "sha,avx")]
fn rounds([a, b]: &mut [State; 2], [x, y]: [__m128i; 2], k: __m128i) {
    let (x, y) = (_mm_add_epi32(x, k), _mm_add_epi32(y, k));
    a.cdgh = _mm_sha256rnds2_epu32(a.cdgh, a.abef, x);
    b.cdgh = _mm_sha256rnds2_epu32(b.cdgh, b.abef, y);
    a.abef = _mm_sha256rnds2_epu32(a.abef, a.cdgh, _mm_shuffle_epi32::<0x0e>(x));
    b.abef = _mm_sha256rnds2_epu32(b.abef, b.cdgh, _mm_shuffle_epi32::<0x0e>(y));
}

/// The four words of the schedule that come sixteen after those at `i`, in their place.
#[inline]
#[target_feature(enable = "sha,avx")]
fn extend(w: &mut [__m128i; 4], i: usize) {
    let (w0, w1, w2, w3) = (w[i % 4], w[(i + 1) % 4], w[(i + 2) % 4], w[(i + 3) % 4]);
    let sum = _mm_add_epi32(_mm_sha256msg1_epu32(w0, w1), _mm_alignr_epi8::<4>(w3, w2));
    w[i % 4] = _mm_sha256msg2_epu32(sum, w3);
}

#[target_feature(enable = "sha,avx")]
fn compress(a: &mut [u32; 8], x: &[[u8; BLOCK]], b: &mut [u32; 8], y: &[[u8; BLOCK]]) {
    let mut states = [load(a), load(b)];
    let mut constants = [_mm_setzero_si128(); 16];
    for (constant, k) in constants.iter_mut().zip(K.as_chunks::<4>().0) {
        let [k0, k1, k2, k3] = k.map(u32::cast_signed);
        *constant = _mm_set_epi32(k3, k2, k1, k0);
    }
    for (x, y) in x.iter().zip(y) {
        let before = states;
        let (mut x, mut y) = (words(x), words(y));
        for (i, k) in constants.into_iter().enumerate() {
            rounds(&mut states, [x[i % 4], y[i % 4]], k);
            if i < 12 {
                extend(&mut x, i);
                extend(&mut y, i);
            }
        }
        for (state, before) in states.iter_mut().zip(before) {
            state.abef = _mm_add_epi32(state.abef, before.abef);
            state.cdgh = _mm_add_epi32(state.cdgh, before.cdgh);
        }
    }
    store(states[0], a);
    store(states[1], b);
}
