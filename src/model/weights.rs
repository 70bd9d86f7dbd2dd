//! Logical weights: what an artifact stores, and which checkpoint tensors each is made of.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use crate::tensor::{DType, Encoding, Shape};

/// Part of a model that a rule can select and a target can leave out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tower {
    /// The decoder over tokens.
    Text,
    /// The image encoder.
    Vision,
    /// The audio encoder.
    Audio,
    /// The projections from an encoder into the text space.
    Projector,
    /// A draft head or draft model for speculative decoding.
    Draft,
}

/// Kind of a weight, as quantization rules see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Matrix of a linear layer (also the centroids of an ordered draft head).
    Linear,
    /// Token embedding table, read by row.
    Embedding,
    /// Output projection over the vocabulary.
    LmHead,
    /// Scale or bias of a normalisation.
    Norm,
    /// Expert router: its matrix and its scales.
    Router,
    /// One expert's matrix.
    Expert,
    /// Anything else: biases, position tables, scalars, integer tables.
    Other,
}

impl Tower {
    /// Every tower with its name in recipes.
    pub const NAMES: [(&'static str, Tower); 5] = [
        ("text", Tower::Text),
        ("vision", Tower::Vision),
        ("audio", Tower::Audio),
        ("projector", Tower::Projector),
        ("draft", Tower::Draft),
    ];
}

impl Class {
    /// Every class with its name in recipes.
    pub const NAMES: [(&'static str, Class); 7] = [
        ("linear", Class::Linear),
        ("embedding", Class::Embedding),
        ("lm_head", Class::LmHead),
        ("norm", Class::Norm),
        ("router", Class::Router),
        ("expert", Class::Expert),
        ("other", Class::Other),
    ];
}

impl fmt::Display for Tower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(Tower::NAMES.iter().find(|(_, t)| t == self).map_or("", |(n, _)| n))
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(Class::NAMES.iter().find(|(_, c)| c == self).map_or("", |(n, _)| n))
    }
}

/// Which checkpoint a weight is made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Origin {
    /// The source that is converted.
    #[default]
    Main,
    /// The draft model that is merged into it. Both may hold tensors of the same name.
    Draft,
}

/// What stands before the tensor names and file paths of a merged draft model, as in radiance's rad-convert
/// (`draft.model.norm.weight`).
pub const DRAFT_PREFIX: &str = "draft.";

/// One checkpoint tensor, or one index of its first dimension, that a logical weight is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Name in the checkpoint.
    pub tensor: String,
    /// Index along dimension 0 when the tensor stacks several weights (experts); `None` takes it whole.
    pub index: Option<u64>,
}

/// A weight as the artifact names it.
///
/// Its rows are the rows of its parts, one part after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Weight {
    /// Logical name, e.g. `blk.7.ffn_down.weight`.
    pub name: String,
    /// The checkpoint that holds its parts. A draft head that is converted alone is its own source, so this does not
    /// follow from the tower.
    pub origin: Origin,
    /// Part of the model.
    pub tower: Tower,
    /// Kind, for rules.
    pub class: Class,
    /// Layer, or -1 at model level. Towers other than text count at model level, so that layers stay the decoder's.
    pub layer: i32,
    /// Expert, or -1.
    pub expert: i32,
    /// Position of the weight within its expert, 0 elsewhere.
    pub slot: i32,
    /// Element type of every part.
    pub dtype: DType,
    /// Logical shape; a scalar of the checkpoint reads as `[1]`.
    pub shape: Shape,
    /// What it is made of, at least one part.
    pub parts: Vec<Part>,
    /// Logical name of the weight whose values this one repeats. A head tied to the embedding is stored only when its
    /// encoding differs; an embedding that serves as a head only is never stored ([`Weight::is_alias`]).
    pub tied_to: Option<String>,
    /// Weights that an engine reads together (q, k, v; gate, up) carry the same set name, e.g. `blk.7.attn_qkv`; an
    /// encoding with a per-tensor scale shares it over the set.
    pub fused_set: Option<String>,
    /// Whether ±infinity is a legal value (clipping bounds).
    pub may_be_infinite: bool,
    /// How the checkpoint stores it, when it is quantized there already; [`Weight::dtype`] is then the type of its
    /// decoded values.
    pub stored: Option<Stored>,
}

/// A weight that its checkpoint holds quantized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Bytes of its tensors in the checkpoint, scales included.
    pub bytes: u64,
    /// The encoding that holds the same codes and scales, or why there is none.
    pub planes: Result<Arc<Encoding>, Arc<str>>,
}

impl Weight {
    /// Bytes that its parts take in the checkpoint; `None` when they exceed 64 bits.
    pub fn source_bytes(&self) -> Option<u64> {
        match &self.stored {
            Some(stored) => Some(stored.bytes),
            None => self
                .shape
                .elements()?
                .checked_mul(u64::from(self.dtype.bits()))?
                .checked_add(7)
                .map(|n| n / 8),
        }
    }
}

impl Weight {
    /// Whether it is another name for the weight that it is tied to and never an entry of its own: the embedding of a
    /// draft head, which nothing reads by row.
    pub fn is_alias(&self) -> bool {
        self.class == Class::Embedding && self.tied_to.is_some()
    }

    /// Name of a part's tensor among the tensors of both checkpoints: as it is, or with `draft.` before it.
    pub fn tensor_name<'w>(&self, part: &'w Part) -> Cow<'w, str> {
        match self.origin {
            Origin::Main => Cow::Borrowed(&part.tensor),
            Origin::Draft => Cow::Owned(format!("{DRAFT_PREFIX}{}", part.tensor)),
        }
    }
}

/// Every logical weight of a checkpoint and every tensor that is deliberately left out.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WeightTable {
    /// The weights, in container order: layer (-1 first), expert, slot, name.
    pub weights: Vec<Weight>,
    /// Checkpoint tensors left out, with the reason.
    pub unused: Vec<(String, String)>,
}

impl WeightTable {
    /// Puts the weights into container order.
    pub fn sort(&mut self) {
        self.weights.sort_by(|a, b| {
            (a.layer.max(-1), a.expert, a.slot, &a.name).cmp(&(
                b.layer.max(-1),
                b.expert,
                b.slot,
                &b.name,
            ))
        });
        self.unused.sort();
    }

    /// Adds the weights of a draft model, whose logical names all begin with `draft.`, as made from the draft's
    /// checkpoint; its unused tensors are listed with `draft.` before their names.
    pub fn merge_draft(&mut self, draft: WeightTable) {
        let weights = draft.weights.into_iter();
        self.weights.extend(weights.map(|w| Weight { origin: Origin::Draft, ..w }));
        let unused = draft.unused.into_iter();
        self.unused.extend(unused.map(|(name, why)| (format!("{DRAFT_PREFIX}{name}"), why)));
        self.sort();
    }

    /// The weight of that logical name.
    pub fn get(&self, name: &str) -> Option<&Weight> {
        self.weights.iter().find(|w| w.name == name)
    }
}
