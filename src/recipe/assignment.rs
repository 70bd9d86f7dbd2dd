//! What a recipe makes of a model: one decision for every weight, and the sums over them.

use std::sync::Arc;

use super::Method;
use crate::diag::Diagnostic;
use crate::model::{Weight, WeightTable};
use crate::tensor::{DType, Encoding};

/// Every weight of a table with what a recipe decided, in the table's order.
#[derive(Debug, Clone, PartialEq)]
pub struct Assignment {
    /// One decision for every weight of the table.
    pub weights: Vec<Assigned>,
    /// What each rule decided, in the recipe's order.
    pub rules: Vec<RuleUse>,
    /// Weights that no rule selects, kept byte for byte.
    pub kept: Use,
    /// Element types among the kept weights, each once.
    pub kept_dtypes: Vec<DType>,
    /// The whole artifact. A tensor that is stored twice (a tied head in another encoding) is counted once in
    /// [`Use::source_bytes`].
    pub total: Use,
    /// Weights in towers that the recipe leaves out.
    pub left_out: u64,
    /// Rows that end in a short group, by their columns and group.
    pub tails: Vec<Tail>,
    /// Sets of weights that share a second-level scale.
    pub shares: Vec<Share>,
    /// What looks like a mistake but stops nothing.
    pub warnings: Vec<Diagnostic>,
}

/// The decision for one weight.
#[derive(Debug, Clone, PartialEq)]
pub struct Assigned {
    /// Index in the table.
    pub weight: usize,
    /// Whether and why it is in the artifact.
    pub fate: Fate,
    /// What the quantizer does. A cast to the type that the weight has is [`Method::Keep`].
    pub method: Arc<Method>,
    /// The planes it is stored in.
    pub encoding: Arc<Encoding>,
    /// Name of the encoding for people: `int8-g128`, `i8*bf16[1x96]`; for a kept weight its type.
    pub encoding_name: Arc<str>,
    /// The rule that decided, counted from 0; `None` keeps the checkpoint's bytes.
    pub rule: Option<usize>,
    /// The set it shares a second-level scale with: an index into [`Assignment::shares`].
    pub share: Option<usize>,
}

/// What becomes of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is an entry of the artifact.
    Stored,
    /// It repeats the weight of that index, which is stored in the same encoding.
    Repeats(usize),
    /// The recipe leaves its tower out.
    LeftOut,
}

impl Assigned {
    /// Whether it is an entry of the artifact.
    pub fn stored(&self) -> bool {
        self.fate == Fate::Stored
    }
}

/// Sums over weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Use {
    /// Stored weights.
    pub weights: u64,
    /// Their elements.
    pub elements: u64,
    /// Bytes they take in the checkpoint.
    pub source_bytes: u64,
    /// Bytes of their planes, without alignment.
    pub stored_bytes: u64,
}

impl Use {
    /// Stored bits per weight, scales included; 0 without weights.
    pub fn bits_per_weight(&self) -> f64 {
        if self.elements == 0 { 0.0 } else { self.stored_bytes as f64 * 8.0 / self.elements as f64 }
    }

    pub(super) fn add(&mut self, elements: u64, source: u64, stored: u64) {
        self.weights += 1;
        // Sums of sizes that were each checked; a total beyond 64 bits saturates and fails on the free disk space.
        self.elements = self.elements.saturating_add(elements);
        self.source_bytes = self.source_bytes.saturating_add(source);
        self.stored_bytes = self.stored_bytes.saturating_add(stored);
    }
}

/// What one rule decided.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RuleUse {
    /// Weights it decided; a tied head that only repeats its embedding counts here and not in [`RuleUse::stored`].
    pub hits: u64,
    /// The stored ones among them.
    pub stored: Use,
    /// Names in the checkpoint that each of its patterns matches, whatever tower and class say and whichever rule
    /// decided.
    pub pattern_names: Vec<u64>,
}

/// Rows that end in a short group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tail {
    /// Columns of the weights.
    pub cols: u64,
    /// Columns of a group.
    pub group: u64,
    /// Columns of the last group.
    pub tail: u64,
    /// Stored weights of that kind.
    pub weights: u64,
}

/// Weights that share one second-level scale.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// Name of the fused set.
    pub set: String,
    /// Indices of its members in the table, at least two.
    pub members: Vec<usize>,
}

impl Assignment {
    /// The stored weights with their table rows, in container order.
    pub fn stored<'t>(
        &'t self,
        table: &'t WeightTable,
    ) -> impl Iterator<Item = (&'t Assigned, &'t Weight)> {
        self.weights
            .iter()
            .filter(|a| a.stored())
            .filter_map(|a| table.weights.get(a.weight).map(|w| (a, w)))
    }

    /// The stored weights that a quantizer or a cast makes: those with an error.
    pub fn quantized<'t>(
        &'t self,
        table: &'t WeightTable,
    ) -> impl Iterator<Item = (&'t Assigned, &'t Weight)> {
        self.stored(table).filter(|(assigned, _)| *assigned.method != Method::Keep)
    }
}
