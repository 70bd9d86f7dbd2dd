//! Qwen3 with experts (`Qwen3MoeForCausalLM`).
//!
//! Layer n has experts unless `mlp_only_layers` names it or `(n + 1)` is no multiple of `decoder_sparse_step`. When
//! a window is used every layer has it. Defaults of transformers' `Qwen3MoeConfig` that are followed:
//! `attention_bias` false, `use_sliding_window` false, `mlp_only_layers` empty, untied head. `num_local_experts` is
//! how transformers 5 saves `num_experts`.

use crate::tensor::{DType, Shape};

use super::census::{Census, Dim, Scope};
use super::config::Config;
use super::decoder::{self, Base, HIDDEN, HeadDim, KvHeads};
use super::qwen3;
use super::spec::{AttentionKind, LayerSpec, ModelSpec, MoeSpec, RouterKind};
use super::weights::{Class, Part};

const EXPERTS: &str = "num_experts";
const WIDTH: &str = "moe_intermediate_size";

pub(super) fn spec(root: &Config) -> ModelSpec {
    let text = root.text_section();
    let base = Base::read(&text, "hidden_act", HeadDim::Derived, KvHeads::Stated);
    let rope = decoder::plain_rope(&text, &base);
    let key = if text.states("num_local_experts") && text.value(EXPERTS).is_none() {
        "num_local_experts"
    } else {
        EXPERTS
    };
    let moe = MoeSpec {
        experts: text.bounded(key, decoder::MAX_EXPERTS),
        top_k: text.size("num_experts_per_tok"),
        width: text.size(WIDTH),
        norm_top_k: text.flag("norm_topk_prob"),
        router: RouterKind::Softmax,
    };
    decoder::bound_experts(&text, key, base.layers, moe.experts);
    if moe.top_k > moe.experts && text.states(key) {
        let what = format!("is {}, more than the {} experts", moe.top_k, moe.experts);
        text.refuse("num_experts_per_tok", what);
    }
    let step = text.size("decoder_sparse_step");
    let dense = text.numbers("mlp_only_layers").unwrap_or_default();
    let used = text.flag_or("use_sliding_window", false);
    let kind = if used {
        AttentionKind::Sliding { window: text.size("sliding_window") }
    } else {
        AttentionKind::Full
    };
    let mut layer = qwen3::layer(&text, &base, rope);
    layer.attention.kind = kind;
    let layers: Vec<LayerSpec> = (0..base.layers)
        .map(|n| {
            let mut layer = layer.clone();
            if !dense.contains(&n) && (n + 1).is_multiple_of(step) {
                layer.mlp = None;
                layer.moe = Some(moe);
            }
            layer
        })
        .collect();
    let tied = decoder::tied(root, &text, false);
    decoder::text_model("qwen3_moe", root, &text, base.text(layers, tied))
}

pub(super) fn weights(spec: &ModelSpec, c: &mut Census) {
    let hidden = spec.text.hidden_size;
    let Some(prefix) = c.text_prefix(&decoder::TEXT_PREFIXES) else { return };
    decoder::stack(c, &spec.text, prefix, |c, s, layer| {
        if let Some(m) = layer.mlp {
            decoder::mlp(c, s, m, hidden);
        }
        if let Some(moe) = &layer.moe {
            experts(c, s, moe, hidden);
        }
    });
}

/// Router and experts; gate and up of an expert become one weight, gate rows first.
fn experts(c: &mut Census, s: &Scope, moe: &MoeSpec, hidden: u64) {
    let (e, h, w) = (Dim(moe.experts, EXPERTS), Dim(hidden, HIDDEN), Dim(moe.width, WIDTH));
    c.weight(s, "ffn_gate_inp", "mlp.gate", Class::Router, &[e, h]);
    for n in 0..moe.experts {
        let name = |p: &str| format!("{}mlp.experts.{n}.{p}_proj.weight", s.from);
        let part = |tensor: String| Part { tensor, index: None };
        let (gate, up, down) = (name("gate"), name("up"), name("down"));
        let types: (Option<DType>, Option<DType>) =
            (c.claim_shared(&gate, &[w, h]), c.claim_shared(&up, &[w, h]));
        if let (Some(g), Some(u)) = types {
            if g != u {
                c.wrong(&up, format!("holds {u}, its gate {g}; both become one weight"));
            }
            let shape = Shape::from([moe.width.saturating_mul(2), hidden]);
            c.expert(s, "ffn_gate_up_exps", (n, 0), shape, g, vec![part(gate), part(up)]);
        }
        if let Some(d) = c.claim_shared(&down, &[h, w]) {
            let shape = Shape::from([hidden, moe.width]);
            c.expert(s, "ffn_down_exps", (n, 1), shape, d, vec![part(down)]);
        }
    }
}
