//! Two messages at a time with the SHA extensions of x86.

use std::arch::x86_64::*;

use super::BLOCK;

/// The first 32 bits of the fractional parts of the cube roots of the first sixty-four primes (FIPS 180-4, 4.2.2), four to a
/// register.
const K: [[u32; 4]; 16] = [
    [0x428a_2f98, 0x7137_4491, 0xb5c0_fbcf, 0xe9b5_dba5],
    [0x3956_c25b, 0x59f1_11f1, 0x923f_82a4, 0xab1c_5ed5],
    [0xd807_aa98, 0x1283_5b01, 0x2431_85be, 0x550c_7dc3],
    [0x72be_5d74, 0x80de_b1fe, 0x9bdc_06a7, 0xc19b_f174],
    [0xe49b_69c1, 0xefbe_4786, 0x0fc1_9dc6, 0x240c_a1cc],
    [0x2de9_2c6f, 0x4a74_84aa, 0x5cb0_a9dc, 0x76f9_88da],
    [0x983e_5152, 0xa831_c66d, 0xb003_27c8, 0xbf59_7fc7],
    [0xc6e0_0bf3, 0xd5a7_9147, 0x06ca_6351, 0x1429_2967],
    [0x27b7_0a85, 0x2e1b_2138, 0x4d2c_6dfc, 0x5338_0d13],
    [0x650a_7354, 0x766a_0abb, 0x81c2_c92e, 0x9272_2c85],
    [0xa2bf_e8a1, 0xa81a_664b, 0xc24b_8b70, 0xc76c_51a3],
    [0xd192_e819, 0xd699_0624, 0xf40e_3585, 0x106a_a070],
    [0x19a4_c116, 0x1e37_6c08, 0x2748_774c, 0x34b0_bcb5],
    [0x391c_0cb3, 0x4ed8_aa4a, 0x5b9c_ca4f, 0x682e_6ff3],
    [0x748f_82ee, 0x78a5_636f, 0x84c8_7814, 0x8cc7_0208],
    [0x90be_fffa, 0xa450_6ceb, 0xbef9_a3f7, 0xc671_78f2],
];

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
    for (constant, k) in constants.iter_mut().zip(K) {
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
