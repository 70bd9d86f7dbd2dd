//! One step of a draft head (Gemma 4 assistant): its layers read the target's cache and store nothing.

use super::Lowering;
use super::attention::{Attend, Owner, attention};
use super::decoder::positions;
use super::feed_forward::feed_forward;
use crate::graph::ir::{Op, ProgramKind};
use crate::model::ModelSpec;
use crate::tensor::DType;

/// Lowers one step of `batch` sequences. Inputs: the target's scaled embedding of the newest token and the hidden state
/// before it (of the target, then of the step before). Its position is that of the newest token in every step;
/// `cache_position` is the slot of the last token that the target has stored.
pub(super) fn lower(l: &mut Lowering<'_>, target: &ModelSpec, head: &ModelSpec, batch: u64) {
    let Some(draft) = &head.draft else { return };
    let kind = ProgramKind::Draft { batch };
    let text = &head.text;
    let wide = draft.target_hidden_size;
    let embedding = if l.sizes.embeds {
        l.b.float_input("inputs_embeds", [batch, 1, wide])
    } else {
        let ids = l.b.input("input_ids", DType::I64, [batch, 1]);
        super::decoder::embed(l, ids, "token_embd.weight", target.text.embedding_scale)
    };
    let hidden = l.b.float_input("hidden_states", [batch, 1, wide]);
    let inputs = positions(l, &target.text, batch, 1, kind);
    let joined = l.b.op(Op::Concat, &[embedding, hidden]);
    let mut x = l.linear(joined, "draft.nextn.pre_projection", false);
    let mut attend = Attend::new(kind);
    // The layers are the draft's, the cache is the target's.
    let owner = Owner { text, target: &target.text, prefix: "draft." };
    for (n, layer) in text.layers.iter().enumerate() {
        let name = |part: &str| format!("draft.blk.{n}.{part}");
        let h = l.norm(text, x, Some(&name("attn_norm.weight")));
        let a = attention(l, &owner, n, h, &inputs, &mut attend);
        let a = if layer.post_norms {
            l.norm(text, a, Some(&name("post_attention_norm.weight")))
        } else {
            a
        };
        x = l.b.op(Op::Add, &[x, a]);
        x = feed_forward(l, text, layer, x, &format!("draft.blk.{n}."));
        if layer.output_scale {
            let weight = l.weight(&name("layer_output_scale.weight"));
            x = l.b.op(Op::ScaleBy { weight }, &[x]);
        }
    }
    let h = l.norm(text, x, Some("draft.output_norm.weight"));
    let logits = match draft.ordered {
        Some(ordered) => {
            let centroids = l.linear(h, "draft.masked_embd_centroids", false);
            let head = l.weight("draft.output.weight");
            let ordering = l.weight("draft.masked_embd_ordering");
            l.b.op(Op::OrderedHead { head, ordering, top_k: ordered.top_k }, &[h, centroids])
        }
        None => l.linear(h, "draft.output", false),
    };
    let logits = l.b.gather(logits, text.vocab_size);
    let logits = match draft.ordered {
        Some(_) => l.b.op(Op::FillUnscored, &[logits]),
        None => logits,
    };
    let logits = match text.logit_softcap {
        Some(cap) => l.b.op(Op::Softcap { cap }, &[logits]),
        None => logits,
    };
    let next = l.linear(h, "draft.nextn.post_projection", false);
    l.b.output("logits", logits);
    l.b.output("hidden", next);
}
