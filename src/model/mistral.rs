//! Mistral 7B and its kin (`MistralForCausalLM`): llama with a window on every layer, or none.
//!
//! `sliding_window` has to be stated: transformers fills in 4096 when the key is absent, which most later Mistral
//! models do not mean. Defaults of `MistralConfig` that are followed: `head_dim` = `hidden_size /
//! num_attention_heads`, untied head.

use super::census::Census;
use super::config::Config;
use super::decoder::{self, Base, HeadDim, KvHeads};
use super::spec::{AttentionKind, LayerSpec, ModelSpec};

pub(super) fn spec(root: &Config) -> ModelSpec {
    let text = root.text_section();
    let base = Base::read(&text, "hidden_act", HeadDim::Derived, KvHeads::Stated);
    let rope = decoder::plain_rope(&text, &base);
    text.need_present("sliding_window");
    let window = text.opt_size("sliding_window");
    let kind = window.map_or(AttentionKind::Full, |window| AttentionKind::Sliding { window });
    let kinds = decoder::layer_types(&text, base.layers, window)
        .unwrap_or_else(|| (0..base.layers).map(|_| kind).collect());
    let layers: Vec<LayerSpec> = kinds.into_iter().map(|kind| base.layer(kind, rope)).collect();
    let tied = decoder::tied(root, &text, false);
    decoder::text_model("mistral", root, &text, base.text(layers, tied))
}

pub(super) fn weights(spec: &ModelSpec, c: &mut Census) {
    decoder::dense_weights(spec, c);
}
