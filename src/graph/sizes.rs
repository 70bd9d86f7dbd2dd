//! The sizes that programs are compiled for, fully decided.

use crate::tensor::DType;

/// Every size that a static program needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizes {
    /// Longest sequence in cache slots, a multiple of [`Sizes::block`].
    pub max_seq_len: u64,
    /// Sequences that are served together.
    pub batch_size: u64,
    /// Decode programs, largest first; the first is [`Sizes::batch_size`].
    pub decoder_batch_sizes: Vec<u64>,
    /// Rows of a prefill call.
    pub prefill_chunk: u64,
    /// Image prefill programs, largest first; none for models without images.
    pub image_prefill: Vec<u64>,
    /// Tokens of a block of the paged cache. Eager attention has one block a sequence.
    pub block: u64,
    /// Element type of the cache.
    pub kv_dtype: DType,
    /// Element type of activations at the interface.
    pub float: DType,
    /// Vision programs by soft tokens, largest first; none for models without an image encoder.
    pub soft_tokens: Vec<u64>,
    /// Whether the host looks token embeddings up (models with images, whose rows it merges in) instead of the graph.
    pub embeds: bool,
    /// Whether a sequence may leave slots unused, so that slots and positions differ and a mask tells valid slots.
    pub aligned: bool,
    /// Tokens that a draft model may propose at once; 0 without one.
    pub draft_tokens: u64,
    /// Whether the model's prefill returns the final hidden state too (what a draft head starts from).
    pub hidden: bool,
}

impl Sizes {
    /// Blocks that the longest sequence needs.
    pub fn blocks_per_sequence(&self) -> u64 {
        self.max_seq_len.div_ceil(self.block.max(1))
    }

    /// Positions that the ring of a sliding layer holds. A draft head sees one key more than the window (transformers
    /// 5.24: distances up to the window), and proposed tokens that are rejected must not have replaced keys that are
    /// still in sight.
    pub fn ring(&self, window: u64) -> u64 {
        if self.draft_tokens == 0 { window } else { window.saturating_add(1 + self.draft_tokens) }
    }
}
