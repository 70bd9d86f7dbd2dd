//! The second half of a layer: a gated MLP, experts, or both.

use super::Lowering;
use crate::graph::ir::{Op, ValueId};
use crate::model::{LayerSpec, MlpSpec, MoeSpec, RouterKind, TextSpec};

/// `x + …` of a layer whose weights begin with `prefix` (`blk.7.`).
pub(super) fn feed_forward(
    l: &mut Lowering<'_>,
    text: &TextSpec,
    layer: &LayerSpec,
    x: ValueId,
    prefix: &str,
) -> ValueId {
    let name = |part: &str| format!("{prefix}{part}");
    let h = l.norm(text, x, Some(&name("ffn_norm.weight")));
    let dense = layer.mlp.map(|m| mlp(l, text, m, h, prefix));
    let sparse = layer.moe.as_ref().map(|moe| match moe.router {
        RouterKind::Softmax => {
            let scores = l.linear(h, &name("ffn_gate_inp"), false);
            experts(l, text, moe, h, scores, prefix)
        }
        RouterKind::ScaledResidual => {
            let r = l.norm(text, x, None);
            let weight = l.weight(&name("ffn_gate_inp.scale"));
            let r = l.b.op(Op::ScaleBy { weight }, &[r]);
            let scale = (text.hidden_size as f64).powf(-0.5);
            let r = l.b.op(Op::Affine { scale, shift: 0.0 }, &[r]);
            let scores = l.linear(r, &name("ffn_gate_inp"), false);
            let h = l.norm(text, x, Some(&name("pre_ffw_norm_2.weight")));
            experts(l, text, moe, h, scores, prefix)
        }
    });
    let m = match (dense, sparse) {
        (Some(dense), Some(sparse)) => {
            let dense = l.norm(text, dense, Some(&name("post_ffw_norm_1.weight")));
            let sparse = l.norm(text, sparse, Some(&name("post_ffw_norm_2.weight")));
            l.b.op(Op::Add, &[dense, sparse])
        }
        (Some(one), None) | (None, Some(one)) => one,
        (None, None) => return x,
    };
    let m = if layer.post_norms { l.norm(text, m, Some(&name("post_ffw_norm.weight"))) } else { m };
    l.b.op(Op::Add, &[x, m])
}

/// `down(activation(gate x) · up x)`, summed over devices.
fn mlp(l: &mut Lowering<'_>, text: &TextSpec, m: MlpSpec, h: ValueId, prefix: &str) -> ValueId {
    let gate = l.linear(h, &format!("{prefix}ffn_gate"), m.bias);
    let up = l.linear(h, &format!("{prefix}ffn_up"), m.bias);
    let g = l.b.op(Op::Gated { activation: text.activation }, &[gate, up]);
    let out = l.linear(g, &format!("{prefix}ffn_down"), false);
    let out = l.b.reduce(out);
    if m.bias {
        let weight = l.weight(&format!("{prefix}ffn_down.bias"));
        l.b.op(Op::Shift { weight, subtract: false }, &[out])
    } else {
        out
    }
}

fn experts(
    l: &mut Lowering<'_>,
    text: &TextSpec,
    moe: &MoeSpec,
    h: ValueId,
    scores: ValueId,
    prefix: &str,
) -> ValueId {
    let scaled = moe.router == RouterKind::ScaledResidual;
    let expert_scale = scaled.then(|| l.weight(&format!("{prefix}ffn_down_exps.scale")));
    let route = Op::Route { top_k: moe.top_k, normalize: moe.norm_top_k, expert_scale };
    let routed = l.b.push(route, &[scores], None);
    let [weights, ids] = routed[..] else { return h };
    let mut list = |what: &str| {
        let mut found = Vec::new();
        let mut activations = None;
        for n in 0..moe.experts {
            let name = format!("{prefix}{what}.{n}.weight");
            match l.optional(&name) {
                Some((id, a)) => {
                    found.push(id);
                    activations = a;
                }
                None => {
                    l.missing.insert(name, ());
                }
            }
        }
        (found, activations)
    };
    let (gate_up, activations) = list("ffn_gate_up_exps");
    let (down, _) = list("ffn_down_exps");
    let op = Op::Experts { gate_up, down, activation: text.activation, activations };
    let out = l.b.op(op, &[h, weights, ids]);
    l.b.reduce(out)
}
