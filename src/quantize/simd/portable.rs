//! Arrays, which the compiler turns into what the build's own target has.

use super::{LANES, Simd};

/// Runs everywhere.
#[derive(Clone, Copy)]
pub(in super::super) struct Portable;

#[inline(always)]
fn each<A: Copy, B: Copy, T: Copy + Default>(
    a: [A; LANES],
    b: [B; LANES],
    f: impl Fn(A, B) -> T,
) -> [T; LANES] {
    let mut out = [T::default(); LANES];
    for i in 0..LANES {
        out[i] = f(a[i], b[i]);
    }
    out
}

#[inline(always)]
fn map<A: Copy, T: Copy + Default>(a: [A; LANES], f: impl Fn(A) -> T) -> [T; LANES] {
    each(a, a, |a, _| f(a))
}

impl Simd for Portable {
    const ANY_ROW: bool = true;
    type F = [f32; LANES];
    type I = [u32; LANES];

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; LANES] {
        [x; LANES]
    }

    #[inline(always)]
    fn splat_bits(self, x: u32) -> [u32; LANES] {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> [f32; LANES] {
        *x
    }

    #[inline(always)]
    fn load_bits(self, x: &[u32; LANES]) -> [u32; LANES] {
        *x
    }

    #[inline(always)]
    fn store(self, x: [f32; LANES]) -> [f32; LANES] {
        x
    }

    #[inline(always)]
    fn store_bits(self, x: [u32; LANES]) -> [u32; LANES] {
        x
    }

    #[inline(always)]
    fn add(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        each(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        each(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        each(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        each(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn fused(self, a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
        each(each(a, b, |a, b| (a, b)), c, |(a, b), c| a.mul_add(b, c))
    }

    #[inline(always)]
    fn max(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        each(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        each(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn if_less(
        self,
        a: [f32; LANES],
        b: [f32; LANES],
        x: [u32; LANES],
        y: [u32; LANES],
    ) -> [u32; LANES] {
        let less = each(a, b, |a, b| if a < b { u32::MAX } else { 0 });
        each(less, each(x, y, |x, y| (x, y)), |less, (x, y)| x & less | y & !less)
    }

    #[inline(always)]
    fn bits(self, x: [f32; LANES]) -> [u32; LANES] {
        map(x, f32::to_bits)
    }

    #[inline(always)]
    fn of_bits(self, x: [u32; LANES]) -> [f32; LANES] {
        map(x, f32::from_bits)
    }

    #[inline(always)]
    fn and(self, a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        each(a, b, |a, b| a & b)
    }

    #[inline(always)]
    fn or(self, a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        each(a, b, |a, b| a | b)
    }

    #[inline(always)]
    fn plus(self, a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        each(a, b, u32::wrapping_add)
    }

    #[inline(always)]
    fn minus(self, a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        each(a, b, u32::wrapping_sub)
    }

    #[inline(always)]
    fn shr<const N: u32>(self, x: [u32; LANES]) -> [u32; LANES] {
        map(x, |x| x >> N)
    }

    #[inline(always)]
    fn shl<const N: u32>(self, x: [u32; LANES]) -> [u32; LANES] {
        map(x, |x| x << N)
    }

    #[inline(always)]
    fn if_zero(self, test: [u32; LANES], x: [u32; LANES], y: [u32; LANES]) -> [u32; LANES] {
        let zero = map(test, |t| if t == 0 { u32::MAX } else { 0 });
        each(zero, each(x, y, |x, y| (x, y)), |zero, (x, y)| x & zero | y & !zero)
    }

    #[inline(always)]
    fn truncate(self, x: [f32; LANES]) -> [u32; LANES] {
        map(x, |x| x as i32 as u32)
    }

    #[inline(always)]
    fn float(self, x: [u32; LANES]) -> [f32; LANES] {
        map(x, |x| x as i32 as f32)
    }

    #[inline(always)]
    fn load_halves(self, bytes: &[u8; 32]) -> [u32; LANES] {
        let mut out = [0; LANES];
        let halves = bytes.as_chunks::<2>().0;
        out.iter_mut().zip(halves).for_each(|(o, b)| *o = u16::from_le_bytes(*b).into());
        out
    }

    #[inline(always)]
    fn load_bytes(self, bytes: &[u8; LANES]) -> [u32; LANES] {
        bytes.map(u32::from)
    }

    #[inline(always)]
    fn load_nibbles(self, bytes: &[u8; 8]) -> [u32; LANES] {
        let mut out = [0; LANES];
        let pairs = out.as_chunks_mut::<2>().0;
        pairs.iter_mut().zip(bytes).for_each(|(o, b)| *o = [b & 15, b >> 4].map(u32::from));
        out
    }

    #[inline(always)]
    fn store_halves(self, x: [u32; LANES]) -> [u8; 32] {
        let mut out = [0; 32];
        let halves = out.as_chunks_mut::<2>().0;
        halves.iter_mut().zip(x).for_each(|(o, x)| *o = (x as u16).to_le_bytes());
        out
    }

    #[inline(always)]
    fn store_bytes(self, x: [u32; LANES]) -> [u8; LANES] {
        map(x, |x| x as u8)
    }

    #[inline(always)]
    fn store_nibbles(self, x: [u32; LANES]) -> [u8; 8] {
        let mut out = [0; 8];
        let pairs = x.as_chunks::<2>().0;
        out.iter_mut().zip(pairs).for_each(|(o, [a, b])| *o = (a & 15 | (b & 15) << 4) as u8);
        out
    }

    #[inline(always)]
    fn peak_of_16_halves(self, bytes: &[u8; 32]) -> u16 {
        let halves = bytes.as_chunks::<2>().0.iter();
        halves.map(|b| u16::from_le_bytes(*b) & 0x7fff).fold(0, u16::max)
    }

    #[inline(always)]
    fn peak_of_halves(self, chunks: &[[u8; 64]]) -> u16 {
        let mut lanes = [0u16; 32];
        for chunk in chunks {
            for (lane, b) in lanes.iter_mut().zip(chunk.as_chunks::<2>().0) {
                *lane = (*lane).max(u16::from_le_bytes(*b) & 0x7fff);
            }
        }
        lanes.into_iter().fold(0, u16::max)
    }

    #[inline(always)]
    fn peak_of_words(self, chunks: &[[u8; 64]]) -> u32 {
        let mut lanes = [0u32; LANES];
        for chunk in chunks {
            for (lane, b) in lanes.iter_mut().zip(chunk.as_chunks::<4>().0) {
                *lane = (*lane).max(u32::from_le_bytes(*b) & 0x7fff_ffff);
            }
        }
        lanes.into_iter().fold(0, u32::max)
    }
}
