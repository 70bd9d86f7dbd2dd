//! Which rule cuts a weight: decided by its logical name, the same for every family.

use crate::model::{Tower, Weight};

/// Which weights belong together, and which devices they are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Module {
    /// The decoder: all devices.
    Text,
    /// The draft head: all devices.
    Draft,
    /// Image encoder and its projector: the vision devices.
    Vision,
    /// Sound: no device, the host keeps it.
    Host,
}

/// What a weight is to the partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Rows by query heads.
    QueryRows,
    /// Rows by key heads.
    KeyRows,
    /// Columns by query heads.
    QueryCols,
    /// Rows by shares of the MLP.
    MlpRows,
    /// Columns by shares of the MLP.
    MlpCols,
    /// Rows by shares of the vocabulary.
    Vocabulary,
    /// Rows by shares of the per-layer table's vocabulary.
    PerLayerVocabulary,
    /// Whole on one device.
    Expert,
    /// Whole on every device of its module.
    Whole,
}

/// A weight's place in its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub module: Module,
    /// `N` of `blk.N.`.
    pub layer: Option<usize>,
    pub role: Role,
}

/// Names of a layer after `blk.N.`. A bias is cut with its matrix's rows; the bias of a matrix that is cut along its
/// columns is added once, to the sum, so it stays whole, as does everything that is not listed: norms, router, scales,
/// clipping bounds, per-layer projections.
const LAYER: &[(&str, Role)] = &[
    ("attn_q.weight", Role::QueryRows),
    ("attn_q.bias", Role::QueryRows),
    ("attn_k.weight", Role::KeyRows),
    ("attn_k.bias", Role::KeyRows),
    ("attn_v.weight", Role::KeyRows),
    ("attn_v.bias", Role::KeyRows),
    ("attn_output.weight", Role::QueryCols),
    ("ffn_gate.weight", Role::MlpRows),
    ("ffn_gate.bias", Role::MlpRows),
    ("ffn_up.weight", Role::MlpRows),
    ("ffn_up.bias", Role::MlpRows),
    ("ffn_down.weight", Role::MlpCols),
];

/// Names at model level of the decoder and the draft head.
const MODEL: &[(&str, Role)] = &[
    ("token_embd.weight", Role::Vocabulary),
    ("output.weight", Role::Vocabulary),
    ("per_layer_token_embd.weight", Role::PerLayerVocabulary),
];

impl Part {
    pub(super) fn of(weight: &Weight) -> Part {
        let name = weight.name.as_str();
        let (module, rest) = if weight.tower == Tower::Audio || name.starts_with("mm.audio") {
            (Module::Host, name)
        } else if let Some(rest) = name.strip_prefix("draft.") {
            (Module::Draft, rest)
        } else if let Some(rest) = name.strip_prefix("vision.") {
            (Module::Vision, rest)
        } else if weight.tower == Tower::Projector {
            (Module::Vision, name)
        } else {
            (Module::Text, name)
        };
        let block = rest.strip_prefix("blk.").and_then(|r| r.split_once('.'));
        let block = block.and_then(|(n, leaf)| Some((n.parse::<usize>().ok()?, leaf)));
        let find = |table: &[(&str, Role)], leaf: &str| {
            table.iter().find(|(name, _)| *name == leaf).map_or(Role::Whole, |(_, role)| *role)
        };
        let role = match (module, block) {
            (Module::Host, _) => Role::Whole,
            _ if weight.expert >= 0 => Role::Expert,
            (_, Some((_, leaf))) => find(LAYER, leaf),
            (Module::Text | Module::Draft, None) => find(MODEL, rest),
            (Module::Vision, None) => Role::Whole,
        };
        Part { module, layer: block.map(|(n, _)| n), role }
    }
}
