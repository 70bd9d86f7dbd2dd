//! Which layer keeps what: the cache of a hybrid model, layer by layer.

use schemars::JsonSchema;
use serde::Serialize;

use super::load::MemoryModel;
use crate::graph::KvLayout;
use crate::model::{AttentionKind, KvSource, ModelSpec, ValueSource};

/// One decoder layer's cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct LayerRow {
    /// Its number, from 0.
    pub layer: u32,
    /// Positions that a query sees; absent for all.
    pub window: Option<u64>,
    /// The earlier layer whose keys and values it reads; absent when it keeps its own.
    pub shares: Option<u32>,
    /// Whether values are the raw keys (`attention_k_eq_v`), which are stored twice all the same: keys rotated, values
    /// not.
    pub keys_are_values: bool,
    /// Key heads of the model.
    pub heads: u64,
    /// Key heads on a device.
    pub device_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Bytes of one token on a device, keys and values; 0 when it keeps none.
    pub token_bytes: u64,
    /// Bytes of its rings for all sequences on a device; 0 when it keeps none or grows by blocks.
    pub window_bytes: u64,
    /// Bytes of one cache block on a device; 0 when it does not grow.
    pub block_bytes: u64,
}

/// The cache of every layer.
pub fn layers(spec: &ModelSpec, model: &MemoryModel) -> Vec<LayerRow> {
    let row = |(index, layer): (usize, &crate::model::LayerSpec)| {
        let number = u32::try_from(index).unwrap_or(u32::MAX);
        let attention = &layer.attention;
        let mut row = LayerRow {
            layer: number,
            window: attention.window(),
            shares: match attention.kv {
                KvSource::Own | KvSource::Target => None,
                KvSource::Layer(of) => u32::try_from(of).ok(),
            },
            keys_are_values: attention.values == ValueSource::Keys,
            heads: attention.kv_heads,
            device_heads: 0,
            head_dim: attention.head_dim,
            token_bytes: 0,
            window_bytes: 0,
            block_bytes: 0,
        };
        for t in model.kv.iter().filter(|t| t.layer == number) {
            row.device_heads = t.heads;
            let bits = t.heads.saturating_mul(t.head_dim).saturating_mul(u64::from(t.dtype.bits()));
            row.token_bytes = row.token_bytes.saturating_add(bits.div_ceil(8));
            let unit = t.unit_bytes().unwrap_or(u64::MAX);
            let sum = match t.layout {
                KvLayout::Paged { .. } => &mut row.block_bytes,
                KvLayout::Window { .. } => &mut row.window_bytes,
            };
            *sum = sum.saturating_add(unit);
        }
        row
    };
    spec.text.layers.iter().enumerate().map(row).collect()
}

/// Cache bytes of a whole model, however many devices share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenBytes {
    /// Of every token, in layers that see all.
    pub full: u64,
    /// Of every token in sight, in layers with a window.
    pub window: u64,
}

/// Bytes that a token takes in the cache, keys and values of `element` bytes each: from the configuration alone.
pub fn token_bytes(spec: &ModelSpec, element: u64) -> TokenBytes {
    let mut out = TokenBytes { full: 0, window: 0 };
    for layer in spec.text.layers.iter().filter(|l| l.caches()) {
        let bytes = layer.attention.kv_width().saturating_mul(2).saturating_mul(element);
        let sum = match layer.attention.kind {
            AttentionKind::Full => &mut out.full,
            AttentionKind::Sliding { .. } => &mut out.window,
        };
        *sum = sum.saturating_add(bytes);
    }
    out
}
