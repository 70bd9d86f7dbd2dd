//! Blocks of the paged cache, and what each running sequence holds.

use std::collections::VecDeque;

use super::value::fault;
use crate::diag::{self, Diagnostic, Failure, FailureKind, Result};
use crate::graph::{Held, Sizes};

/// Free blocks, taken in the order in which they were given back.
#[derive(Debug)]
pub(super) struct Pool {
    free: VecDeque<i64>,
    total: u64,
}

impl Pool {
    /// That many blocks, from 0 up. The next one is [`Pool::scratch`].
    pub(super) fn new(blocks: u64) -> Pool {
        let last = i64::try_from(blocks).unwrap_or(i64::MAX);
        Pool { free: (0..last).collect(), total: blocks }
    }

    /// The block that rows nobody reads are written to.
    pub(super) fn scratch(&self) -> i64 {
        i64::try_from(self.total).unwrap_or(i64::MAX)
    }

    /// Blocks that no sequence holds.
    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    /// Gives back what a sequence holds.
    pub(super) fn release(&mut self, sequence: &Sequence) {
        self.free.extend(sequence.table.iter().flatten());
    }

    /// Sees to it that the sequence holds a block at each of these entries of its table.
    ///
    /// # Errors
    /// No block is free, or the table has no such entry.
    pub(super) fn claim(&mut self, sequence: &mut Sequence, entries: &[u64]) -> Result<()> {
        for entry in entries {
            let slot = usize::try_from(*entry).ok().and_then(|e| sequence.table.get_mut(e));
            let slot = slot.ok_or_else(|| fault(format!("a sequence has no block {entry}")))?;
            if slot.is_none() {
                let total = self.total;
                let block = self.free.pop_front().ok_or_else(|| {
                    let message =
                        format!("all {} blocks of the cache are in use", diag::count(total));
                    let problem = Diagnostic::new("runtime", message)
                        .help("more blocks, shorter prompts or fewer sequences at once");
                    Failure::one(FailureKind::Refused, "the cache is full", problem)
                })?;
                *slot = Some(block);
            }
        }
        Ok(())
    }
}

/// Most slots of a sequence; far above any model's longest.
const MAX_SLOTS: usize = 1 << 26;

/// One sequence in a slot of the engine.
#[derive(Debug, Clone)]
pub(super) struct Sequence {
    /// Positions and slots in use.
    pub held: Held,
    /// Its blocks.
    pub table: Vec<Option<i64>>,
    /// 1 for every slot that holds a token.
    pub mask: Vec<f32>,
    /// Final hidden state of its last token, if the programs give it.
    pub hidden: Vec<f32>,
}

impl Sequence {
    /// An empty sequence.
    pub(super) fn new(sizes: &Sizes) -> Result<Sequence> {
        let blocks = usize::try_from(sizes.blocks_per_sequence()).map_err(fault)?;
        let slots = usize::try_from(sizes.block).map_err(fault)?.checked_mul(blocks);
        let slots = slots.filter(|n| *n <= MAX_SLOTS).ok_or_else(|| {
            fault(format!("sequences of {blocks} blocks; at most {MAX_SLOTS} slots can be held"))
        })?;
        Ok(Sequence {
            held: Held::default(),
            table: vec![None; blocks],
            mask: vec![0.0; slots],
            hidden: Vec::new(),
        })
    }

    /// Marks slots as holding tokens, or not.
    pub(super) fn mark(&mut self, first: u64, count: u64, value: f32) {
        let range = usize::try_from(first).ok().zip(usize::try_from(count).ok());
        let slots = range.and_then(|(first, count)| self.mask.get_mut(first..first + count));
        slots.into_iter().flatten().for_each(|slot| *slot = value);
    }

    /// Its table with the scratch block wherever it has none.
    pub(super) fn blocks(&self, scratch: i64) -> impl Iterator<Item = i64> {
        self.table.iter().map(move |block| block.unwrap_or(scratch))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType;

    #[test]
    fn a_sequence_has_a_number_of_slots() {
        let with = |block: u64| {
            Sequence::new(&Sizes {
                max_seq_len: block,
                batch_size: 1,
                decoder_batch_sizes: vec![1],
                prefill_chunk: 1,
                image_prefill: Vec::new(),
                block,
                kv_dtype: DType::BF16,
                float: DType::BF16,
                soft_tokens: Vec::new(),
                embeds: false,
                aligned: false,
                draft_tokens: 0,
                hidden: false,
            })
        };
        assert_eq!(with(1 << 26).expect("fits").mask.len(), MAX_SLOTS);
        let failure = with((1 << 26) + 1).expect_err("one more");
        assert!(failure.to_string().contains("at most 67108864 slots"), "{failure}");
    }

    #[test]
    fn blocks_come_back_in_order_and_none_is_given_twice() {
        let mut pool = Pool::new(3);
        let empty = Sequence {
            held: Held::default(),
            table: vec![None; 4],
            mask: Vec::new(),
            hidden: Vec::new(),
        };
        let (mut a, mut b) = (empty.clone(), empty);
        pool.claim(&mut a, &[0, 2]).expect("two are free");
        pool.claim(&mut a, &[0, 2]).expect("it holds them");
        pool.claim(&mut b, &[1]).expect("one is free");
        assert_eq!(a.blocks(pool.scratch()).collect::<Vec<_>>(), [0, 3, 1, 3]);
        assert_eq!(b.blocks(pool.scratch()).collect::<Vec<_>>(), [3, 2, 3, 3]);
        let full = pool.claim(&mut b, &[0]).expect_err("none is free");
        assert_eq!(full.problems[0].message, "all 3 blocks of the cache are in use");
        pool.release(&a);
        pool.claim(&mut b, &[0]).expect("block 0 came back first");
        assert_eq!(b.blocks(9).collect::<Vec<_>>(), [0, 2, 9, 9]);
        assert_eq!(pool.free(), 1);
    }
}
