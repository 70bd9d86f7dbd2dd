//! Codes of a row under given scales, packed, with its error sums.

use crate::num::mini;

use super::super::error::Lanes;
use super::super::grid::LIFT;
use super::super::simd::Simd;
use super::{CHUNKS, CodeKind, FromBf16, FromF16, FromF32, Load, Row, Run, Source};

/// Codes of quotients and the values they stand for.
pub(super) trait Code: Copy {
    /// Whether scales of a second level are usual.
    const SECOND: bool;
    /// Whether codes are from −128 to 127; otherwise they are from 0 to 255.
    const SIGNED: bool;
    fn code<S: Simd>(self, s: S, x: S::F) -> (S::I, S::F);
}

/// x plus a half of its sign: its integral part is x rounded to the nearest integer, halves away from zero.
#[inline(always)]
fn half_away<S: Simd>(s: S, x: S::F) -> S::F {
    let sign = s.and(s.bits(x), s.splat_bits(1 << 31));
    s.add(x, s.of_bits(s.or(sign, s.splat_bits(const { 0.5f32.to_bits() }))))
}

/// Integers from `lo` to `hi`.
#[derive(Clone, Copy)]
struct Int {
    lo: f32,
    hi: f32,
}

impl Code for Int {
    const SECOND: bool = false;
    const SIGNED: bool = true;

    #[inline(always)]
    fn code<S: Simd>(self, s: S, x: S::F) -> (S::I, S::F) {
        // NaN becomes `lo`.
        let r = s.max(half_away(s, x), s.splat(self.lo));
        let n = s.truncate(s.min(r, s.splat(self.hi)));
        (n, s.float(n))
    }
}

/// Integers from −`most` to `most`, of quotients that are numbers.
#[derive(Clone, Copy)]
struct Symmetric {
    most: f32,
}

impl Code for Symmetric {
    const SECOND: bool = false;
    const SIGNED: bool = true;

    #[inline(always)]
    fn code<S: Simd>(self, s: S, x: S::F) -> (S::I, S::F) {
        let n = s.truncate(s.clamp(half_away(s, x), self.most));
        (n, s.float(n))
    }
}

/// A small float. `BY_VALUE`: the sign of the code is that of a comparison with 0, not the sign bit (e2m1).
#[derive(Clone, Copy)]
pub(super) struct Small<const E: u32, const M: u32, const BY_VALUE: bool>;

impl<const E: u32, const M: u32, const BY_VALUE: bool> Code for Small<E, M, BY_VALUE> {
    const SECOND: bool = E + M == 3;
    const SIGNED: bool = false;

    #[inline(always)]
    fn code<S: Simd>(self, s: S, x: S::F) -> (S::I, S::F) {
        let bits = s.bits(x);
        let magnitude = s.and(bits, s.splat_bits(0x7fff_ffff));
        let (code, value) = s.encode::<E, M>(s.of_bits(magnitude), const { mini::largest(E, M) });
        let sign = s.and(bits, s.splat_bits(1 << 31));
        const { assert!(E + M == 7 || E + M == 3) }
        let top = if BY_VALUE {
            s.if_less(x, s.splat(0.0), s.splat_bits(1 << (E + M)), s.splat_bits(0))
        } else if E + M == 7 {
            s.shr::<24>(sign)
        } else {
            s.shr::<28>(sign)
        };
        // The value of −0 may be −0 where its code is 0: it adds the same to the sums.
        (s.or(code, top), s.of_bits(s.or(s.bits(value), sign)))
    }
}

/// Codes of 16 columns as they are stored, in `N` bytes.
trait Pack<const N: usize>: Copy {
    fn pack<S: Simd>(self, s: S, codes: S::I) -> [u8; N];
    /// Of four times 16 columns, together.
    fn pack_four<S: Simd, C: Code>(self, s: S, codes: [S::I; 4], out: &mut [[u8; N]; 4]);
}

/// One a byte.
#[derive(Clone, Copy)]
struct Bytes;

impl Pack<16> for Bytes {
    #[inline(always)]
    fn pack<S: Simd>(self, s: S, codes: S::I) -> [u8; 16] {
        s.store_bytes(codes)
    }

    #[inline(always)]
    fn pack_four<S: Simd, C: Code>(self, s: S, codes: [S::I; 4], out: &mut [[u8; 16]; 4]) {
        if C::SIGNED {
            out.as_flattened_mut().copy_from_slice(&s.store_64_signed(codes));
        } else {
            for (out, codes) in out.iter_mut().zip(codes) {
                *out = s.store_bytes(codes);
            }
        }
    }
}

/// Pairs of 4-bit codes in a byte, the first in the low half.
#[derive(Clone, Copy)]
struct Nibbles;

impl Pack<8> for Nibbles {
    #[inline(always)]
    fn pack<S: Simd>(self, s: S, codes: S::I) -> [u8; 8] {
        s.store_nibbles(codes)
    }

    #[inline(always)]
    fn pack_four<S: Simd, C: Code>(self, s: S, codes: [S::I; 4], out: &mut [[u8; 8]; 4]) {
        let bytes = match C::SIGNED {
            true => s.store_64_nibbles::<true>(codes),
            false => s.store_64_nibbles::<false>(codes),
        };
        out.as_flattened_mut().copy_from_slice(&bytes);
    }
}

#[inline(always)]
pub(super) fn codes<S: Simd>(
    s: S,
    kind: CodeKind,
    source: Source,
    row: &Row<'_>,
    out: &mut [u8],
) -> Lanes {
    match source {
        Source::F32 => codes_of(s, kind, FromF32, row, out),
        Source::F16 => codes_of(s, kind, FromF16, row, out),
        Source::BF16 => codes_of(s, kind, FromBf16, row, out),
    }
}

#[inline(always)]
fn codes_of<const B: usize, S: Simd>(
    s: S,
    kind: CodeKind,
    source: impl Load<B>,
    row: &Row<'_>,
    out: &mut [u8],
) -> Lanes {
    match kind {
        CodeKind::Int { lo, hi, half: false } if lo == -hi => {
            row_codes(s, Symmetric { most: hi }, source, Bytes, row, out)
        }
        CodeKind::Int { lo, hi, half: true } if lo == -hi => {
            row_codes(s, Symmetric { most: hi }, source, Nibbles, row, out)
        }
        CodeKind::Int { lo, hi, half: false } => {
            row_codes(s, Int { lo, hi }, source, Bytes, row, out)
        }
        CodeKind::Int { lo, hi, half: true } => {
            row_codes(s, Int { lo, hi }, source, Nibbles, row, out)
        }
        CodeKind::E4M3 => row_codes(s, Small::<4, 3, false>, source, Bytes, row, out),
        CodeKind::E5M2 => row_codes(s, Small::<5, 2, false>, source, Bytes, row, out),
        CodeKind::E2M1 => row_codes(s, Small::<2, 1, true>, source, Nibbles, row, out),
    }
}

/// What turns 16 columns into codes. Not a closure: those are compiled without the caller's instructions.
#[derive(Clone, Copy)]
struct Chunk<S, C, L, P> {
    s: S,
    kind: C,
    source: L,
    packing: P,
    second: f32,
}

impl<S: Simd, C: Code, L, P> Chunk<S, C, L, P> {
    #[inline(always)]
    fn encode<const B: usize, const N: usize>(
        self,
        run: &mut Run<S>,
        bytes: &[u8; B],
        scale: f32,
        inverse: f32,
    ) -> [u8; N]
    where
        L: Load<B>,
        P: Pack<N>,
    {
        self.packing.pack(self.s, self.code(run, bytes, scale, inverse))
    }

    /// The chunks of a run from chunk `at` of the row, under one scale or each under its own.
    #[inline(always)]
    fn encode_run<const ONE: bool, const B: usize, const N: usize>(
        self,
        run: &mut Run<S>,
        row: &Row<'_>,
        at: usize,
        bytes: &[[u8; B]; CHUNKS],
        out: &mut [[u8; N]; CHUNKS],
    ) where
        L: Load<B>,
        P: Pack<N>,
    {
        let one = row.scale(at);
        if !S::PACKS_FOUR {
            for k in 0..CHUNKS {
                let (scale, inverse) = if ONE { one } else { row.scale(at + k) };
                out[k] = self.encode::<B, N>(run, &bytes[k], scale, inverse);
            }
            return;
        }
        for (q, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let mut codes = [self.s.splat_bits(0); 4];
            for k in 0..4 {
                let n = 4 * q + k;
                let (scale, inverse) = if ONE { one } else { row.scale(at + n) };
                codes[k] = self.code(run, &bytes[n], scale, inverse);
            }
            self.packing.pack_four::<S, C>(self.s, codes, out);
        }
    }

    #[inline(always)]
    fn code<const B: usize>(
        self,
        run: &mut Run<S>,
        bytes: &[u8; B],
        scale: f32,
        inverse: f32,
    ) -> S::I
    where
        L: Load<B>,
    {
        let s = self.s;
        let v = self.source.load(s, bytes);
        let x = if S::ANY_ROW && inverse > f32::MAX {
            let product = scale * self.second;
            let effective = if product == 0.0 { self.second } else { product };
            s.mul(s.mul(v, s.splat(LIFT)), s.splat(1.0 / (effective * LIFT)))
        } else {
            s.mul(v, s.splat(inverse))
        };
        let (code, value) = self.kind.code(s, x);
        let first = s.mul(value, s.splat(scale));
        let two = S::ANY_ROW || C::SECOND;
        run.add(s, v, if two { s.mul(first, s.splat(self.second)) } else { first });
        code
    }
}

#[inline(always)]
fn row_codes<const B: usize, const N: usize, S: Simd, C: Code>(
    s: S,
    kind: C,
    source: impl Load<B>,
    packing: impl Pack<N>,
    row: &Row<'_>,
    out: &mut [u8],
) -> Lanes {
    let chunk = Chunk { s, kind, source, packing, second: row.second };
    let mut sums = Lanes::ZERO;
    let (chunks, rest) = row.bytes.as_chunks::<B>();
    let (runs, chunks) = chunks.as_chunks::<CHUNKS>();
    // 15 columns that are left fill up 8 bytes of half ones.
    let (out, out_rest) = out.split_at_mut((runs.len() * CHUNKS + chunks.len()) * N);
    let (out_runs, outs) = out.as_chunks_mut::<N>().0.as_chunks_mut::<CHUNKS>();
    for (i, (bytes, out)) in runs.iter().zip(out_runs).enumerate() {
        let mut run = Run::new(s);
        // A scale that all of the run's columns share is looked up once.
        if row.shift >= const { CHUNKS.trailing_zeros() } {
            chunk.encode_run::<true, B, N>(&mut run, row, i * CHUNKS, bytes, out);
        } else {
            chunk.encode_run::<false, B, N>(&mut run, row, i * CHUNKS, bytes, out);
        }
        run.end(s, &mut sums);
    }
    let mut run = Run::new(s);
    let mut at = runs.len() * CHUNKS;
    for (bytes, out) in chunks.iter().zip(outs) {
        let (scale, inverse) = row.scale(at);
        *out = chunk.encode::<B, N>(&mut run, bytes, scale, inverse);
        at += 1;
    }
    if !rest.is_empty() {
        // Columns that are not there are zeros, whose codes are zeros and whose errors are none.
        let mut padded = [0; B];
        padded[..rest.len()].copy_from_slice(rest);
        let (scale, inverse) = row.scale(at);
        let packed: [u8; N] = chunk.encode::<B, N>(&mut run, &padded, scale, inverse);
        out_rest.copy_from_slice(&packed[..out_rest.len()]);
    }
    run.end(s, &mut sums);
    sums
}
