//! The answer of every policy: a sum that adds up, and what follows from it.

use schemars::JsonSchema;
use serde::Serialize;

use crate::diag::Diagnostic;

/// One line that is taken off a device's memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Term {
    /// What takes it.
    pub name: String,
    /// Bytes on the device.
    pub bytes: u64,
    /// How it comes about.
    pub how: String,
}

/// The sum of one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct DeviceSum {
    /// Its number.
    pub device: u32,
    /// What is taken off the budget, in order.
    pub terms: Vec<Term>,
    /// What is left for cache blocks; negative when the terms alone exceed the budget.
    pub left: i64,
}

/// Memory of one device, or of one of its chiplets.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Capacity {
    /// Bytes in all.
    pub memory: u64,
    /// Bytes that the system keeps.
    pub reserve: u64,
    /// Bytes that may be used.
    pub budget: u64,
    /// What the budget was: `0.9`, `12 GiB`; absent when everything may be used.
    pub said: Option<String>,
    /// Parts of the device with memory of their own; all figures are for one of them.
    pub chiplets: u64,
}

/// What nobody outside the engine knows, as a number that can be changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Allowance {
    /// Name of the setting.
    pub name: String,
    /// Bytes that were assumed.
    pub bytes: u64,
    /// How often it is taken.
    pub times: u64,
    /// Least whole MiB, in bytes, that gives the same number of blocks.
    pub least: u64,
    /// Most whole MiB, in bytes, that gives the same number of blocks.
    pub most: u64,
}

impl Allowance {
    /// What an engine takes for itself on a device, once.
    pub(super) fn engine(bytes: u64, least: u64, most: u64) -> Allowance {
        Allowance { name: "engine".to_owned(), bytes, times: 1, least, most }
    }
}

/// What changes when the image encoder's share of the cache devices counts too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct WithEncoder {
    /// Device where it takes most.
    pub device: u32,
    /// Its weights there.
    pub weights: u64,
    /// Its programs' workspace there.
    pub workspace: u64,
    /// Bytes that the budget leaves unused on the device.
    pub outside: u64,
    /// Blocks when it counts; absent when not even one fits.
    pub blocks: Option<u64>,
}

/// One point of the curve of context against concurrency.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Concurrency {
    /// Sequences that are served at a time.
    pub sequences: u64,
    /// Longest length, in tokens, that all of them can have.
    pub tokens: u64,
}

/// How many blocks fit, and why.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Estimate {
    /// The policy: rbln, radiance, vllm or exact.
    pub allocator: &'static str,
    /// The target profile.
    pub target: String,
    /// Memory of a device.
    pub capacity: Capacity,
    /// The sum of every device.
    pub devices: Vec<DeviceSum>,
    /// Index of the device with the least left, which decides.
    pub tightest: usize,
    /// Tokens of a block.
    pub block_tokens: u64,
    /// Bytes of a block on one device.
    pub block_bytes: u64,
    /// What a block is.
    pub block_how: String,
    /// Blocks that fit; 0 when not even one does.
    pub blocks: u64,
    /// Tokens of all blocks.
    pub tokens: u64,
    /// Tokens without blocks that the engine keeps for itself.
    pub allocatable_tokens: u64,
    /// Why the two differ.
    pub kept_blocks: Option<String>,
    /// Fewest blocks to serve with.
    pub min_blocks: u64,
    /// Blocks beyond which none is used.
    pub full_blocks: u64,
    /// Longest sequence, in tokens.
    pub max_seq_len: u64,
    /// Sequences that are served together.
    pub batch_size: u64,
    /// Full-length sequences that all tokens make.
    pub contexts: f64,
    /// Most sequences of full length at a time, in the allocatable blocks.
    pub batch_at_full_length: u64,
    /// Longest length, in tokens, that all sequences can have at a time.
    pub length_at_full_batch: u64,
    /// The longest length for 1, 2, 4, … sequences, and for all that are served together.
    pub concurrency: Vec<Concurrency>,
    /// Bytes that one more block lacks; absent at the limit.
    pub next_block: Option<u64>,
    /// Bytes that are left beside the blocks.
    pub left_over: u64,
    /// The assumption, and how much it matters.
    pub allowance: Option<Allowance>,
    /// The image encoder, where the engine leaves it out.
    pub with_encoder: Option<WithEncoder>,
    /// What else a reader should know.
    pub notes: Vec<String>,
    /// Why it does not fit; empty when it does.
    #[serde(skip)]
    pub misfits: Vec<Diagnostic>,
}

impl Estimate {
    /// The device that decides.
    pub fn decisive(&self) -> Option<&DeviceSum> {
        self.devices.get(self.tightest)
    }

    /// Whether the policy's rules hold and one sequence of full length can be served.
    pub fn serves_full_length(&self) -> bool {
        self.misfits.is_empty() && self.batch_at_full_length > 0
    }
}
