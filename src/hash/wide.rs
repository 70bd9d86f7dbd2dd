//! Sixteen messages at a time, each in its lane of vectors of 512 bits.

use std::arch::x86_64::*;

use super::{BLOCK, K, LANES};

/// Proof that the processor has AVX-512 F and BW.
#[derive(Clone, Copy)]
pub(super) struct Instructions(());

/// A message's state and its blocks.
type Lane<'s, 'b> = (&'s mut [u32; 8], &'b [[u8; BLOCK]]);

impl Instructions {
    /// Asks the processor, once.
    pub(super) fn new() -> Option<Instructions> {
        let has = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
        has.then_some(Instructions(()))
    }

    /// Compresses the first `blocks` blocks of up to 16 messages, which all have as many.
    pub(super) fn compress(self, lanes: &mut [Lane<'_, '_>], blocks: usize) {
        let Some((_, first)) = lanes.first() else { return };
        // Lanes that nobody wants hash the first message, and are forgotten.
        let mut states = [[0; 8]; LANES];
        let mut messages = [&first[..blocks]; LANES];
        for ((lane, state), message) in lanes.iter().zip(&mut states).zip(&mut messages) {
            *state = *lane.0;
            *message = &lane.1[..blocks];
        }
        // SAFETY: a value of this type exists only after the processor said that it has the instructions.
        unsafe { compress(&mut states, &messages) };
        for (lane, state) in lanes.iter_mut().zip(states) {
            *lane.0 = state;
        }
    }
}

/// Sixteen words of sixteen messages become sixteen messages of sixteen words, or back.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn transpose(r: [__m512i; 16]) -> [__m512i; 16] {
    let mut pairs = r;
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    let mut fours = r;
    for i in (0..16).step_by(4) {
        fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    let mut eights = r;
    for i in 0..4 {
        for half in [0, 8] {
            let (a, b) = (fours[half + i], fours[half + i + 4]);
            eights[half + i] = _mm512_shuffle_i32x4::<0x88>(a, b);
            eights[half + i + 4] = _mm512_shuffle_i32x4::<0xdd>(a, b);
        }
    }
    let mut all = r;
    for i in 0..8 {
        let (a, b) = (eights[i], eights[i + 8]);
        all[i] = _mm512_shuffle_i32x4::<0x88>(a, b);
        all[i + 8] = _mm512_shuffle_i32x4::<0xdd>(a, b);
    }
    all
}

#[inline]
#[target_feature(enable = "avx512f")]
fn add(a: __m512i, b: __m512i) -> __m512i {
    _mm512_add_epi32(a, b)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn xor(a: __m512i, b: __m512i, c: __m512i) -> __m512i {
    _mm512_ternarylogic_epi32::<0x96>(a, b, c)
}

/// Names of FIPS 180-4, 4.1.2 and 6.2.2. `w` holds sixteen words of the schedule, of which `t` is at `t % 16`.
#[inline]
#[target_feature(enable = "avx512f")]
fn round(state: [__m512i; 8], w: &mut [__m512i; 16], t: usize) -> [__m512i; 8] {
    let [a, b, c, d, e, f, g, h] = state;
    let sum1 = xor(_mm512_ror_epi32::<6>(e), _mm512_ror_epi32::<11>(e), _mm512_ror_epi32::<25>(e));
    let choice = _mm512_ternarylogic_epi32::<0xca>(e, f, g);
    let word = add(w[t % 16], _mm512_set1_epi32(K[t].cast_signed()));
    let t1 = add(add(h, word), add(sum1, choice));
    let sum0 = xor(_mm512_ror_epi32::<2>(a), _mm512_ror_epi32::<13>(a), _mm512_ror_epi32::<22>(a));
    let t2 = add(sum0, _mm512_ternarylogic_epi32::<0xe8>(a, b, c));
    if t < 48 {
        let (x, y) = (w[(t + 1) % 16], w[(t + 14) % 16]);
        let s0 =
            xor(_mm512_ror_epi32::<7>(x), _mm512_ror_epi32::<18>(x), _mm512_srli_epi32::<3>(x));
        let s1 =
            xor(_mm512_ror_epi32::<17>(y), _mm512_ror_epi32::<19>(y), _mm512_srli_epi32::<10>(y));
        w[t % 16] = add(add(w[t % 16], s0), add(w[(t + 9) % 16], s1));
    }
    [add(t1, t2), a, b, c, add(d, t1), e, f, g]
}

#[target_feature(enable = "avx512f,avx512bw")]
fn compress(states: &mut [[u32; 8]; LANES], messages: &[&[[u8; BLOCK]]; LANES]) {
    let mut state = [_mm512_setzero_si512(); 8];
    for (i, register) in state.iter_mut().enumerate() {
        let words: [u32; LANES] = std::array::from_fn(|lane| states[lane][i]);
        // SAFETY: 64 bytes are read of an array of 64, at any alignment.
        *register = unsafe { _mm512_loadu_si512(words.as_ptr().cast()) };
    }
    let swap = _mm512_set4_epi32(0x0c0d_0e0f, 0x0809_0a0b, 0x0405_0607, 0x0001_0203);
    for at in 0..messages[0].len() {
        let mut w = [_mm512_setzero_si512(); 16];
        for (register, message) in w.iter_mut().zip(messages) {
            let block = &message[at];
            // SAFETY: 64 bytes are read of an array of 64, at any alignment.
            let block = unsafe { _mm512_loadu_si512(block.as_ptr().cast()) };
            *register = _mm512_shuffle_epi8(block, swap);
        }
        let mut w = transpose(w);
        let before = state;
        // Unrolled, so that every index of `w` is known to the compiler.
        macro_rules! rounds {
            ($($t:literal)*) => { $(state = round(state, &mut w, $t);)* };
        }
        rounds!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
        rounds!(16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31);
        rounds!(32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47);
        rounds!(48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63);
        for (register, before) in state.iter_mut().zip(before) {
            *register = add(*register, before);
        }
    }
    for (i, register) in state.into_iter().enumerate() {
        let mut words = [0u32; LANES];
        // SAFETY: 64 bytes are written to an array of 64, at any alignment.
        unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), register) };
        for (state, word) in states.iter_mut().zip(words) {
            state[i] = word;
        }
    }
}
