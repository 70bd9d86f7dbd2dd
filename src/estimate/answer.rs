//! What follows from a number of blocks, whatever the policy that found it.

use super::load::MemoryModel;
use super::said;
use super::sum::{Capacity, Concurrency, Estimate};
use super::terms::Sums;
use crate::recipe::{MemoryBudget, Profile};

/// Blocks that hold the same tokens in every layer, and the policy's limits.
pub(super) struct Blocks {
    /// Blocks that fit.
    pub blocks: u64,
    /// Blocks that the engine keeps for itself.
    pub kept: u64,
    /// Fewest to serve with.
    pub min: u64,
    /// Most that are of use.
    pub full: u64,
    /// Tokens of a block.
    pub tokens: u64,
}

impl Blocks {
    fn allocatable(&self) -> u64 {
        self.blocks.saturating_sub(self.kept)
    }

    /// Longest length, in tokens, that so many sequences can have at a time.
    fn longest(&self, model: &MemoryModel, sequences: u64) -> u64 {
        let each = self.allocatable() / sequences.max(1);
        each.saturating_mul(self.tokens).min(model.sizes.max_seq_len)
    }

    /// An answer that lacks what one block is, what is left, and what was assumed.
    pub fn answer(
        &self,
        allocator: &'static str,
        model: &MemoryModel,
        target: &Profile,
        capacity: Capacity,
        sums: Sums,
    ) -> Estimate {
        let sizes = &model.sizes;
        let tokens = self.blocks.saturating_mul(self.tokens);
        let each = sizes.blocks_per_sequence().max(1);
        Estimate {
            allocator,
            target: target.name.clone(),
            capacity,
            devices: sums.devices,
            tightest: sums.tightest,
            block_tokens: self.tokens,
            block_bytes: 0,
            block_how: String::new(),
            blocks: self.blocks,
            tokens,
            allocatable_tokens: self.allocatable().saturating_mul(self.tokens),
            kept_blocks: (self.kept > 0).then(|| "one null block".to_owned()),
            min_blocks: self.min,
            full_blocks: self.full,
            max_seq_len: sizes.max_seq_len,
            batch_size: sizes.batch_size,
            contexts: tokens as f64 / sizes.max_seq_len.max(1) as f64,
            batch_at_full_length: (self.allocatable() / each).min(sizes.batch_size),
            length_at_full_batch: self.longest(model, sizes.batch_size),
            concurrency: concurrency(sizes.batch_size, |n| self.longest(model, n)),
            next_block: None,
            left_over: 0,
            allowance: None,
            with_encoder: None,
            notes: Vec::new(),
            misfits: Vec::new(),
        }
    }
}

/// The longest length for 1, 2, 4, … sequences and for all that are served together.
pub(super) fn concurrency(batch: u64, longest: impl Fn(u64) -> u64) -> Vec<Concurrency> {
    let powers = (0..u64::BITS).map(|p| 1u64 << p).take_while(|n| *n < batch);
    let at = |sequences| Concurrency { sequences, tokens: longest(sequences) };
    powers.chain([batch.max(1)]).map(at).collect()
}

/// A device's memory and what may be used of it; all of it divided by its chiplets.
pub(super) fn capacity(
    target: &Profile,
    chiplets: u64,
    budget: u64,
    wanted: Option<MemoryBudget>,
) -> Capacity {
    Capacity {
        memory: target.memory.device / chiplets.max(1),
        reserve: target.memory.reserve / chiplets.max(1),
        budget,
        said: said(wanted),
        chiplets,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_curve_has_powers_of_two_and_the_whole_batch() {
        let of = |batch| -> Vec<u64> {
            concurrency(batch, |n| 840 / n).iter().map(|c| c.sequences).collect()
        };
        assert_eq!(of(1), [1]);
        assert_eq!(of(8), [1, 2, 4, 8]);
        assert_eq!(of(12), [1, 2, 4, 8, 12]);
        assert_eq!(concurrency(3, |n| 840 / n).last().map(|c| c.tokens), Some(280));
    }
}
