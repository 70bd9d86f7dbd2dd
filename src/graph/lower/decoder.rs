//! One call of the decoder: a chunk of a prompt, a run of image rows, or one token of each sequence.

use super::Lowering;
use super::attention::{Attend, Owner, attention};
use super::feed_forward::feed_forward;
use crate::graph::ir::{Op, ProgramKind, ValueId, WeightShare};
use crate::model::{ModelSpec, TextSpec};
use crate::tensor::{DType, Shape};

/// Inputs of a call, in the order of optimum-rbln 0.11.2.
pub(super) struct Inputs {
    /// Slots of the rows in the paged cache.
    pub cache_position: ValueId,
    /// Logical positions of the rows.
    pub positions: ValueId,
    /// Blocks of each sequence; absent without full layers.
    pub block_tables: Option<ValueId>,
    /// Ring of each sequence; absent without sliding layers.
    pub local_block_tables: Option<ValueId>,
    /// Last valid row, in prefill.
    pub query_position: Option<ValueId>,
    /// Valid slots, if slots and positions may differ.
    pub attention_mask: Option<ValueId>,
}

/// Lowers prefill, image prefill or decode.
pub(super) fn lower(l: &mut Lowering<'_>, spec: &ModelSpec, kind: ProgramKind) {
    let text = &spec.text;
    let (batch, rows) = match kind {
        ProgramKind::Decode { batch } | ProgramKind::Draft { batch } => (batch, 1),
        ProgramKind::Prefill { chunk } | ProgramKind::ImagePrefill { chunk } => (1, chunk),
        ProgramKind::Vision { .. } | ProgramKind::Project { .. } => return,
    };
    let layers = text.layers.len() as u64;
    let (x, per_layer) = embeddings(l, text, batch, rows);
    let inputs = positions(l, text, batch, rows, kind);
    let per_layer = match (&text.per_layer_input, per_layer) {
        (Some(ple), Some(tokens)) => Some(per_layer_inputs(l, text, x, tokens, ple.width, layers)),
        _ => None,
    };

    let mut attend = Attend::new(kind);
    let mut x = x;
    for (n, layer) in text.layers.iter().enumerate() {
        let name = |part: &str| format!("blk.{n}.{part}");
        let h = l.norm(text, x, Some(&name("attn_norm.weight")));
        let a = attention(l, &Owner { text, target: text, prefix: "" }, n, h, &inputs, &mut attend);
        let a = if layer.post_norms {
            l.norm(text, a, Some(&name("post_attention_norm.weight")))
        } else {
            a
        };
        x = l.b.op(Op::Add, &[x, a]);
        x = feed_forward(l, text, layer, x, &format!("blk.{n}."));
        if let (Some(ple), Some(all)) = (&text.per_layer_input, per_layer) {
            let mine = l.b.columns(all, n as u64 * ple.width, ple.width);
            let gate = l.linear(x, &name("inp_gate"), false);
            let g = l.b.op(Op::Gated { activation: text.activation }, &[gate, mine]);
            let p = l.linear(g, &name("proj"), false);
            let p = l.norm(text, p, Some(&name("post_norm.weight")));
            x = l.b.op(Op::Add, &[x, p]);
        }
        if layer.output_scale {
            let weight = l.weight(&name("layer_output_scale.weight"));
            x = l.b.op(Op::ScaleBy { weight }, &[x]);
        }
    }
    attend.write_rings(l, &inputs);

    if let Some(at) = inputs.query_position {
        x = l.b.op(Op::SelectRow, &[x, at]);
    }
    let x = l.norm(text, x, Some("output_norm.weight"));
    let logits = l.linear(x, "output", false);
    let logits = l.b.gather(logits, text.vocab_size);
    let logits = match text.logit_softcap {
        Some(cap) => l.b.op(Op::Softcap { cap }, &[logits]),
        None => logits,
    };
    l.b.output("logits", logits);
    if l.sizes.hidden {
        l.b.output("hidden", x);
    }
}

/// Rows of the residual stream and, for models with per-layer inputs, their token part `[b, q, layers · width]`.
fn embeddings(
    l: &mut Lowering<'_>,
    text: &TextSpec,
    batch: u64,
    rows: u64,
) -> (ValueId, Option<ValueId>) {
    let layers = text.layers.len() as u64;
    if l.sizes.embeds {
        let x = l.b.float_input("inputs_embeds", [batch, rows, text.hidden_size]);
        let per_layer = text.per_layer_input.map(|ple| {
            let tokens = l.b.float_input("per_layer_inputs", [batch, rows, layers, ple.width]);
            l.b.reshape(tokens, [batch, rows, layers * ple.width])
        });
        return (x, per_layer);
    }
    let ids = l.b.input("input_ids", DType::I64, [batch, rows]);
    let x = embed(l, ids, "token_embd.weight", text.embedding_scale);
    // Rows of the per-layer table are scaled by the square root of their width (transformers 5.24, Gemma 4).
    let per_layer = text
        .per_layer_input
        .map(|ple| embed(l, ids, "per_layer_token_embd.weight", (ple.width as f64).sqrt()));
    (x, per_layer)
}

pub(super) fn embed(l: &mut Lowering<'_>, ids: ValueId, name: &str, scale: f64) -> ValueId {
    let table = l.weight(name);
    let x = l.b.op(Op::Embed { table, scale }, &[ids]);
    // A table that is cut by rows gives zero rows for the tokens of other devices.
    let cut = l.shards.get(name).is_some_and(|s| s.weight.share == WeightShare::Rows);
    if cut { l.b.reduce(x) } else { x }
}

/// The context part joined with the token part: `(norm(W x · H^-½) + tokens) / √2`, `[b, q, layers · width]`.
fn per_layer_inputs(
    l: &mut Lowering<'_>,
    text: &TextSpec,
    x: ValueId,
    tokens: ValueId,
    width: u64,
    layers: u64,
) -> ValueId {
    let c = l.linear(x, "per_layer_model_proj", false);
    let c = l.b.op(Op::Affine { scale: (text.hidden_size as f64).powf(-0.5), shift: 0.0 }, &[c]);
    let c = l.heads(c, width);
    let c = l.norm(text, c, Some("per_layer_proj_norm.weight"));
    let [batch, rows, ..] = l.b.shape(c)[..] else { return c };
    let c = l.b.reshape(c, [batch, rows, layers * width]);
    let sum = l.b.op(Op::Add, &[c, tokens]);
    l.b.op(Op::Affine { scale: 0.5f64.sqrt(), shift: 0.0 }, &[sum])
}

/// Positions, tables and masks.
pub(super) fn positions(
    l: &mut Lowering<'_>,
    text: &TextSpec,
    batch: u64,
    rows: u64,
    kind: ProgramKind,
) -> Inputs {
    let prefill = matches!(kind, ProgramKind::Prefill { .. } | ProgramKind::ImagePrefill { .. });
    let full = text.layers.iter().any(|layer| layer.attention.window().is_none());
    let sliding = text.layers.iter().any(|layer| layer.attention.window().is_some());
    let cache_position = l.b.input("cache_position", DType::I32, [batch, rows]);
    let blocks = l.sizes.blocks_per_sequence();
    let block_tables = full.then(|| {
        let shape = if prefill { Shape::from([blocks]) } else { Shape::from([batch, blocks]) };
        l.b.input("block_tables", DType::I16, shape)
    });
    let local_block_tables = sliding.then(|| l.b.input("local_block_tables", DType::I16, [batch]));
    let query_position = prefill.then(|| l.b.input("query_position", DType::I16, Shape::from([])));
    let attention_mask =
        l.sizes.aligned.then(|| l.b.float_input("attention_mask", [batch, blocks * l.sizes.block]));
    // A draft head stands one position past the last slot that it may see, whether slots are aligned or not.
    let apart = l.sizes.aligned || matches!(kind, ProgramKind::Draft { .. });
    let positions =
        if apart { l.b.input("position_ids", DType::I32, [batch, rows]) } else { cache_position };
    Inputs {
        cache_position,
        positions,
        block_tables,
        local_block_tables,
        query_position,
        attention_mask,
    }
}
