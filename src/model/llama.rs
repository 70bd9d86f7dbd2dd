//! Llama 1 to 3 (`LlamaForCausalLM`).
//!
//! Defaults of transformers' `LlamaConfig` that are followed: as many key heads as query heads, `head_dim` =
//! `hidden_size / num_attention_heads`, `rope_theta` 10000, no biases, untied head.

use super::census::Census;
use super::config::Config;
use super::decoder::{self, Base, HeadDim, KvHeads};
use super::rope::{self, RopeKeys};
use super::spec::{AttentionKind, LayerSpec, MlpSpec, ModelSpec};

pub(super) fn spec(root: &Config) -> ModelSpec {
    let text = root.text_section();
    let base = Base::read(&text, "hidden_act", HeadDim::Derived, KvHeads::LikeQueries);
    let keys = RopeKeys { default_theta: Some(10_000.0), ..RopeKeys::PLAIN };
    let rope = rope::read(&text, &keys, base.head_dim);
    let bias = text.flag_or("attention_bias", false);
    let mlp_bias = text.flag_or("mlp_bias", false);
    let mut layer = base.layer(AttentionKind::Full, rope);
    layer.attention.qkv_bias = bias;
    layer.attention.output_bias = bias;
    layer.mlp = Some(MlpSpec { width: base.mlp_width, bias: mlp_bias });
    let layers: Vec<LayerSpec> = (0..base.layers).map(|_| layer.clone()).collect();
    let tied = decoder::tied(root, &text, false);
    decoder::text_model("llama", root, &text, base.text(layers, tied))
}

pub(super) fn weights(spec: &ModelSpec, c: &mut Census) {
    decoder::dense_weights(spec, c);
}
