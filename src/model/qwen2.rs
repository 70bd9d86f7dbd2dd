//! Qwen2 and Qwen2.5 (`Qwen2ForCausalLM`): llama with biases on q, k and v only.
//!
//! Defaults of transformers' `Qwen2Config` that are followed: `head_dim` = `hidden_size / num_attention_heads`,
//! `use_sliding_window` false, untied head.

use super::census::Census;
use super::config::Config;
use super::decoder::{self, Base, HeadDim, KvHeads};
use super::spec::{AttentionKind, LayerSpec, ModelSpec};

pub(super) fn spec(root: &Config) -> ModelSpec {
    let text = root.text_section();
    let base = Base::read(&text, "hidden_act", HeadDim::Derived, KvHeads::Stated);
    let rope = decoder::plain_rope(&text, &base);
    let layers: Vec<LayerSpec> = layer_kinds(&text, base.layers)
        .into_iter()
        .map(|kind| {
            let mut layer = base.layer(kind, rope);
            layer.attention.qkv_bias = true;
            layer
        })
        .collect();
    let tied = decoder::tied(root, &text, false);
    decoder::text_model("qwen2", root, &text, base.text(layers, tied))
}

/// Qwen's windows: none unless `use_sliding_window`, and then on the layers from `max_window_layers` up, or where
/// `layer_types` says.
pub(super) fn layer_kinds(text: &Config, layers: u64) -> Vec<AttentionKind> {
    let used = text.flag_or("use_sliding_window", false);
    let window = if used { Some(text.size("sliding_window")) } else { None };
    if let Some(kinds) = decoder::layer_types(text, layers, window) {
        return kinds;
    }
    let Some(window) = window else {
        return (0..layers).map(|_| AttentionKind::Full).collect();
    };
    let first = text.count("max_window_layers");
    (0..layers)
        .map(|n| if n < first { AttentionKind::Full } else { AttentionKind::Sliding { window } })
        .collect()
}

pub(super) fn weights(spec: &ModelSpec, c: &mut Census) {
    decoder::dense_weights(spec, c);
}
