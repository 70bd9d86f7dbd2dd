//! Attention of one layer: projections, norms, rotation, cache, output projection.

use std::collections::BTreeMap;

use super::decoder::Inputs;
use super::{Lowering, own_rows, pair};
use crate::graph::ir::{KvPair, Op, ProgramKind, ValueId};
use crate::model::{AttentionKind, KvSource, TextSpec, ValueSource};

/// What layers of one program share: keys and values of this call, which later layers may read, and rings that are
/// written when the last layer has read them.
pub(super) struct Attend {
    kind: ProgramKind,
    own: BTreeMap<usize, (ValueId, ValueId)>,
    rings: Vec<(KvPair, ValueId, ValueId)>,
}

impl Attend {
    pub(super) fn new(kind: ProgramKind) -> Attend {
        Attend { kind, own: BTreeMap::new(), rings: Vec::new() }
    }

    /// Puts this call's rows into the rings.
    pub(super) fn write_rings(&self, l: &mut Lowering<'_>, inputs: &Inputs) {
        let Some(table) = inputs.local_block_tables else { return };
        for &(kv, k, v) in &self.rings {
            let mut operands = vec![k, v, inputs.positions, table];
            operands.extend(inputs.query_position);
            l.b.push(Op::WindowWrite { kv }, &operands, None);
        }
    }
}

/// Whose layers are lowered.
pub(super) struct Owner<'a> {
    /// The decoder that the layers are of.
    pub text: &'a TextSpec,
    /// The decoder whose cache they use: the same, or the target of a draft head.
    pub target: &'a TextSpec,
    /// What stands before `blk.` in the names of their weights.
    pub prefix: &'static str,
}

/// Attention of layer `n` over normalised rows `h`; the sum over devices is done.
pub(super) fn attention(
    l: &mut Lowering<'_>,
    owner: &Owner<'_>,
    n: usize,
    h: ValueId,
    inputs: &Inputs,
    attend: &mut Attend,
) -> ValueId {
    let Some(layer) = owner.text.layers.get(n) else { return h };
    let (a, text, target) = (&layer.attention, owner.text, owner.target);
    let name = |part: &str| format!("{}blk.{n}.{part}", owner.prefix);
    let d = a.head_dim;
    let rope = Op::Rope { rope: a.rope };

    let q = l.linear(h, &name("attn_q"), a.qkv_bias);
    let mut q = l.heads(q, d);
    if a.qk_norm {
        q = l.norm(text, q, Some(&name("attn_q_norm.weight")));
    }
    let q = l.b.op(rope.clone(), &[q, inputs.positions]);

    let own = match a.kv {
        KvSource::Own => {
            let raw = l.linear(h, &name("attn_k"), a.qkv_bias);
            let raw = l.heads(raw, d);
            let mut v = match a.values {
                ValueSource::Projection => {
                    let v = l.linear(h, &name("attn_v"), a.qkv_bias);
                    l.heads(v, d)
                }
                ValueSource::Keys => raw,
            };
            if a.v_norm {
                v = l.norm(text, v, None);
            }
            let mut k = raw;
            if a.qk_norm {
                k = l.norm(text, k, Some(&name("attn_k_norm.weight")));
            }
            let k = l.b.op(rope, &[k, inputs.positions]);
            attend.own.insert(n, (k, v));
            Some((k, v))
        }
        KvSource::Layer(owner) => attend.own.get(&owner).copied(),
        KvSource::Target => None,
    };
    let full = a.window().is_none();
    let Some(kv) = pair(target, n, full, a.kv) else {
        l.missing.insert(format!("the cache that layer {n} reads"), ());
        return h;
    };
    let rows = own_rows(target, attend.kind, full);
    let mixed = match (a.kind, inputs.block_tables, inputs.local_block_tables) {
        (AttentionKind::Full, Some(table), _) => {
            if let (KvSource::Own, Some((k, v))) = (a.kv, own) {
                l.b.push(Op::KvWrite { kv }, &[k, v, inputs.cache_position, table], None);
            }
            let mut operands = vec![q, inputs.cache_position, table];
            operands.extend(inputs.attention_mask);
            operands.extend(inputs.query_position);
            let op = Op::PagedAttention {
                kv,
                scale: a.scale,
                softcap: text.attention_softcap,
                own: rows,
            };
            l.b.op(op, &operands)
        }
        (AttentionKind::Sliding { window }, _, Some(table)) => {
            if let (KvSource::Own, Some((k, v))) = (a.kv, own) {
                attend.rings.push((kv, k, v));
            }
            let mut operands = vec![q, inputs.positions, table];
            if let Some((k, v)) = own {
                operands.extend([k, v]);
                operands.extend(inputs.query_position);
            }
            // A draft head's position is one past the newest key, and it sees keys up to `window` before that one
            // (transformers 5.24): of positions p − window − 1 … p − 1, none its own.
            let window = if own.is_some() { window } else { window.saturating_add(2) };
            let op = Op::WindowAttention {
                kv,
                window,
                scale: a.scale,
                softcap: text.attention_softcap,
                own: rows,
            };
            l.b.op(op, &operands)
        }
        _ => {
            l.missing.insert(format!("a block table for layer {n}"), ());
            h
        }
    };
    let out = l.linear(mixed, &name("attn_output"), false);
    let out = l.b.reduce(out);
    if a.output_bias {
        let weight = l.weight(&name("attn_output.bias"));
        l.b.op(Op::Shift { weight, subtract: false }, &[out])
    } else {
        out
    }
}
