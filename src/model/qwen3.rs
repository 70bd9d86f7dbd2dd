//! Qwen3, dense (`Qwen3ForCausalLM`): norms on queries and keys, `head_dim` always stated.
//!
//! Defaults of transformers' `Qwen3Config` that are followed: `attention_bias` false, `use_sliding_window` false,
//! untied head. Its `head_dim` default of 128 is not: heads of Qwen3 are wider than `hidden_size /
//! num_attention_heads`, so the number has to be there.

use super::census::Census;
use super::config::Config;
use super::decoder::{self, Base, HeadDim, KvHeads};
use super::qwen2;
use super::spec::{AttentionKind, LayerSpec, ModelSpec, RopeSpec};

pub(super) fn spec(root: &Config) -> ModelSpec {
    let text = root.text_section();
    let base = Base::read(&text, "hidden_act", HeadDim::Stated, KvHeads::Stated);
    let rope = decoder::plain_rope(&text, &base);
    let layer = layer(&text, &base, rope);
    let layers: Vec<LayerSpec> = qwen2::layer_kinds(&text, base.layers)
        .into_iter()
        .map(|kind| {
            let mut layer = layer.clone();
            layer.attention.kind = kind;
            layer
        })
        .collect();
    let tied = decoder::tied(root, &text, false);
    decoder::text_model("qwen3", root, &text, base.text(layers, tied))
}

/// A layer with full attention and a dense MLP.
pub(super) fn layer(text: &Config, base: &Base, rope: RopeSpec) -> LayerSpec {
    let bias = text.flag_or("attention_bias", false);
    let mut layer = base.layer(AttentionKind::Full, rope);
    layer.attention.qk_norm = true;
    layer.attention.qkv_bias = bias;
    layer.attention.output_bias = bias;
    layer
}

pub(super) fn weights(spec: &ModelSpec, c: &mut Census) {
    decoder::dense_weights(spec, c);
}
