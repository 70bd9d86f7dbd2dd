//! The search of optimum-rbln 0.10 and later: the largest number of blocks whose tensors, each rounded up after it is
//! multiplied, fit what is left.

use super::load::MemoryModel;
use super::load::is_paged;

/// A cache tensor on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tensor {
    /// Whether it grows with the number of blocks.
    pub resizable: bool,
    /// Bytes, with one block if it is resizable.
    pub bytes: u64,
}

/// The cache tensors of a model, in parts over `chiplets` memories.
pub fn tensors(model: &MemoryModel, chiplets: u64) -> Vec<Tensor> {
    let all = model.kv.iter().map(|t| Tensor {
        resizable: is_paged(t),
        bytes: t.unit_bytes().unwrap_or(u64::MAX).div_ceil(chiplets.max(1)),
    });
    all.collect()
}

/// Bytes of all tensors with `blocks` blocks, each rounded up to a multiple of `rounding`.
pub fn need(tensors: &[Tensor], blocks: u64, rounding: u64) -> u128 {
    let rounding = u128::from(rounding.max(1));
    let one = |t: &Tensor| {
        let times = if t.resizable { blocks } else { 1 };
        (u128::from(t.bytes) * u128::from(times)).div_ceil(rounding) * rounding
    };
    tensors.iter().map(one).sum()
}

/// The most blocks, up to `full`, that fit `room` bytes; `None` when not even one fits.
pub fn most(tensors: &[Tensor], rounding: u64, room: i128, full: u64) -> Option<u64> {
    let fits = |n: u64| i128::try_from(need(tensors, n, rounding)).is_ok_and(|b| b <= room);
    if fits(full) {
        return Some(full);
    }
    let (mut low, mut high, mut best) = (1, full.saturating_sub(1), None);
    while low <= high {
        let middle = low + (high - low) / 2;
        if fits(middle) {
            best = Some(middle);
            low = middle + 1;
        } else {
            high = middle - 1;
        }
    }
    best
}

/// The paged cache of a device: what is searched, once the rings are among the terms.
pub(super) struct Search {
    resizable: Vec<Tensor>,
    rounding: u64,
    /// Bytes of the rings of all layers with a window, rounded.
    pub rings: u64,
    /// Most blocks that are of use.
    pub full: u64,
}

impl Search {
    /// Of a model, in parts over `chiplets` memories.
    pub fn of(model: &MemoryModel, chiplets: u64, rounding: u64) -> Search {
        let tensors = tensors(model, chiplets);
        let rings = u64::try_from(need(&tensors, 0, rounding)).unwrap_or(u64::MAX);
        let resizable = tensors.into_iter().filter(|t| t.resizable).collect();
        Search { resizable, rounding, rings, full: model.sizes.full_blocks() }
    }

    /// The most blocks in what is left; `None` when not even one fits.
    pub fn most(&self, left: i64) -> Option<u64> {
        most(&self.resizable, self.rounding, i128::from(left), self.full)
    }

    /// Bytes of so many blocks.
    pub fn bytes(&self, blocks: u64) -> u64 {
        let bytes = need(&self.resizable, blocks, self.rounding);
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }

    /// Bytes that so many blocks lack; 0 when they fit.
    pub fn lacks(&self, blocks: u64, left: i64) -> u128 {
        let bytes = need(&self.resizable, blocks, self.rounding);
        let wanted = i128::try_from(bytes).unwrap_or(i128::MAX) - i128::from(left);
        u128::try_from(wanted).unwrap_or(0)
    }

    /// Bytes that one more block lacks; `None` where it is of no use.
    pub fn next(&self, blocks: u64, left: i64) -> Option<u64> {
        let lacks = || u64::try_from(self.lacks(blocks + 1, left)).unwrap_or(u64::MAX);
        (blocks < self.full).then(lacks)
    }

    /// Bytes that lie beside so many blocks.
    pub fn beside(&self, blocks: u64, left: i64) -> u64 {
        u64::try_from(left).unwrap_or(0).saturating_sub(self.bytes(blocks))
    }
}

/// Least and most whole MiB of an allowance, up to `bound` bytes, that give as many blocks as `now` does; `blocks` falls
/// as the allowance grows.
pub fn same_answer(now: u64, bound: u64, blocks: impl Fn(u64) -> Option<u64>) -> (u64, u64) {
    const MIB: u64 = 1 << 20;
    let answer = blocks(now);
    // First whole MiB at which `test` holds, where it holds from some point on.
    let first = |from: u64, to: u64, test: &dyn Fn(u64) -> bool| {
        let (mut low, mut high) = (from, to);
        while low < high {
            let middle = low + (high - low) / 2;
            if test(middle) { high = middle } else { low = middle + 1 }
        }
        low
    };
    let least = first(0, now / MIB, &|m| blocks(m.saturating_mul(MIB)) <= answer);
    let past = first(now / MIB, bound / MIB, &|m| {
        let n = blocks(m.saturating_mul(MIB));
        n < answer
    });
    (least.saturating_mul(MIB), past.saturating_sub(1).max(now / MIB).saturating_mul(MIB))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rounding_comes_after_multiplying_and_for_each_tensor() {
        let two = [Tensor { resizable: true, bytes: 3 }, Tensor { resizable: false, bytes: 5 }];
        assert_eq!(need(&two, 1, 4), 4 + 8);
        assert_eq!(need(&two, 5, 4), 16 + 8);
        assert_eq!(most(&two, 4, 11, 9), None);
        assert_eq!(most(&two, 4, 12, 9), Some(1));
        assert_eq!(most(&two, 4, 24, 9), Some(5));
        assert_eq!(most(&two, 4, 1000, 9), Some(9));
        assert_eq!(most(&two, 4, -1, 9), None);
    }

    proptest! {
        #[test]
        fn the_search_finds_the_last_number_that_fits(
            sizes in prop::collection::vec((any::<bool>(), 1u64..5000), 1..6),
            rounding in 1u64..700, room in 0i128..200_000, full in 1u64..60,
        ) {
            let all: Vec<Tensor> =
                sizes.iter().map(|&(resizable, bytes)| Tensor { resizable, bytes }).collect();
            let slow = (1..=full).rev().find(|n| need(&all, *n, rounding) as i128 <= room);
            prop_assert_eq!(most(&all, rounding, room, full), slow);
        }

        #[test]
        fn a_range_of_allowances_holds_exactly_those_with_the_same_answer(
            now in 0u64..300, step in 1u64..60, room in 0u64..400,
        ) {
            let mib = 1u64 << 20;
            let blocks = |a: u64| (room * mib).checked_sub(a).map(|left| left / (step * mib));
            let (least, most) = same_answer(now * mib, 500 * mib, blocks);
            let same = |m: u64| blocks(m * mib) == blocks(now * mib);
            prop_assert!((least / mib..=most / mib).all(same));
            prop_assert!(least == 0 || !same(least / mib - 1));
            prop_assert!(most / mib >= 499 || !same(most / mib + 1));
        }
    }
}
