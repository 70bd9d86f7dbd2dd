//! NaN and infinity in checkpoint bytes.

use super::widen;
use crate::diag;
use crate::tensor::DType;

/// Elements that are NaN, infinite, or (f64) beyond the range of f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{} non-finite values, the first at element {}", diag::count(*.count), diag::count(*.first))]
pub struct NonFinite {
    /// Index of the first, row-major.
    pub first: u64,
    /// How many.
    pub count: u64,
}

impl NonFinite {
    /// Two findings as one; the indices of both must count from the same element.
    pub fn merge(self, other: NonFinite) -> NonFinite {
        NonFinite { first: self.first.min(other.first), count: self.count + other.count }
    }
}

/// First and number of the non-finite elements in `bytes`; `None` when all are finite, and for types that hold
/// only finite numbers or that do not widen to f32. Bytes after the last whole element are not looked at.
pub fn find_non_finite(dtype: DType, bytes: &[u8]) -> Option<NonFinite> {
    match dtype {
        DType::F64 => {
            // Half a step above the largest f32: from here on the conversion rounds to infinity.
            const LIMIT: u64 = 0x47ef_ffff_f000_0000;
            scan(bytes, |b| u64::from_le_bytes(b) & (u64::MAX >> 1) >= LIMIT)
        }
        DType::F32 => scan(bytes, |b| u32::from_le_bytes(b) & 0x7fff_ffff >= 0x7f80_0000),
        DType::F16 => scan(bytes, |b| u16::from_le_bytes(b) & 0x7fff >= 0x7c00),
        DType::BF16 => scan(bytes, |b| u16::from_le_bytes(b) & 0x7fff >= 0x7f80),
        DType::F8E4M3 => scan(bytes, |[b]| b & 0x7f == 0x7f),
        DType::F8E5M2 => scan(bytes, |[b]| b & 0x7f >= 0x7c),
        DType::F8E4M3Fnuz | DType::F8E5M2Fnuz => scan(bytes, |[b]| b == 0x80),
        DType::E8M0 => scan(bytes, |[b]| b == 0xff),
        _ => None,
    }
}

/// Whether `bytes` hold a NaN; infinities do not count. For types that [`widen`] does not take, false.
pub fn holds_nan(dtype: DType, bytes: &[u8]) -> bool {
    let Some(width) = dtype.bytes().map(|w| w as usize) else { return false };
    let mut values = [0f32; 256];
    bytes.chunks(256 * width).any(|block| {
        let n = block.len() / width;
        widen(dtype, &block[..n * width], &mut values[..n]).is_ok()
            && values[..n].iter().any(|v| v.is_nan())
    })
}

fn scan<const W: usize>(bytes: &[u8], bad: impl Fn([u8; W]) -> bool) -> Option<NonFinite> {
    let elements = bytes.as_chunks::<W>().0;
    let mut found: Option<NonFinite> = None;
    // A block without a finding costs one branch-free pass.
    for (i, block) in elements.chunks(1024).enumerate() {
        if !block.iter().fold(false, |any, b| any | bad(*b)) {
            continue;
        }
        for (j, b) in block.iter().enumerate() {
            if bad(*b) {
                let here = NonFinite { first: (i * 1024 + j) as u64, count: 1 };
                found = Some(found.map_or(here, |f| f.merge(here)));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::num::{widen, widens};

    #[test]
    fn the_first_index_and_the_count_are_found_across_blocks() {
        let mut values = vec![1.0f32; 5000];
        for i in [1023, 1024, 4999] {
            values[i] = f32::NAN;
        }
        values[2000] = f32::NEG_INFINITY;
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(find_non_finite(DType::F32, &bytes), Some(NonFinite { first: 1023, count: 4 }));
        let text = NonFinite { first: 1023, count: 4 }.to_string();
        assert_eq!(text, "4 non-finite values, the first at element 1,023");
        assert_eq!(find_non_finite(DType::F32, &bytes[..4 * 1023]), None);
    }

    #[test]
    fn every_byte_and_half_pattern_is_judged_as_its_widened_value() {
        for dtype in DType::all().filter(|t| widens(*t) && t.bits() <= 16) {
            let width = dtype.bytes().expect("whole bytes") as usize;
            for code in 0..1u32 << dtype.bits() {
                let bytes = &code.to_le_bytes()[..width];
                let mut value = [0.0];
                widen(dtype, bytes, &mut value).expect("widens");
                let want = (!value[0].is_finite()).then_some(NonFinite { first: 0, count: 1 });
                assert_eq!(find_non_finite(dtype, bytes), want, "{dtype} {code:#x}");
            }
        }
    }

    #[test]
    fn doubles_beyond_f32_count_as_non_finite() {
        let limit = f64::from(f32::MAX) + 2f64.powi(103);
        for (x, bad) in [(limit.next_down(), false), (limit, true), (-1e39, true), (f64::NAN, true)]
        {
            assert_eq!(find_non_finite(DType::F64, &x.to_le_bytes()).is_some(), bad, "{x:e}");
            assert_eq!(!(x as f32).is_finite(), bad, "{x:e}");
        }
    }
}
