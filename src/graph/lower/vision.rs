//! From patches to rows of the text space: Gemma 4's image encoder, its encoder-free embedder, Gemma 3's SigLIP, and the
//! projectors.

use super::Lowering;
use crate::graph::ir::{Op, ValueId};
use crate::model::{
    ModelSpec, ProjectorSpec, SiglipTower, VisionEmbedder, VisionSpec, VisionTower,
};
use crate::tensor::DType;

/// Lowers the encoder of one image of up to `soft_tokens` soft tokens.
///
/// Inputs: `pixel_values [1, P, 3 · side²]` in 0 to 1, `pixel_position_ids [1, P, 2]` (x, y; −1 for padding),
/// `attention_mask [1, P]` (0, or the lowest float for padding), `padding_positions [1, P]`. Outputs: `hidden
/// [1, soft_tokens, C]` and `pooler_mask [1, soft_tokens]`, true for rows of the image.
///
/// SigLIP reads pictures of one size: its input is `pixel_values [1, P, 3 · side²]` alone, −1 to 1, and its output `hidden
/// [1, P, C]`, a row for each patch.
pub(super) fn encoder(l: &mut Lowering<'_>, spec: &ModelSpec, soft_tokens: u64) {
    match &spec.vision {
        Some(VisionSpec::Tower(v)) => tower(l, v, soft_tokens),
        Some(VisionSpec::Embedder(v)) => embedder(l, v, soft_tokens),
        Some(VisionSpec::Siglip(v)) => siglip(l, v),
        None => {}
    }
}

/// Lowers the projection of soft tokens into the text space.
pub(super) fn projector(l: &mut Lowering<'_>, spec: &ModelSpec, soft_tokens: u64) {
    let projector: &ProjectorSpec = match &spec.vision {
        Some(VisionSpec::Tower(v)) => &v.projector,
        Some(VisionSpec::Embedder(v)) => &v.projector,
        Some(VisionSpec::Siglip(v)) => return siglip_projector(l, v),
        None => return,
    };
    let x = l.b.float_input("image_features", [1, soft_tokens, projector.inputs]);
    let eps = projector.norm_eps;
    let x = l.b.op(Op::RmsNorm { weight: None, eps, one_plus: false }, &[x]);
    let x = l.linear(x, "mm.vision", false);
    l.b.output("image_embeds", x);
}

struct Patches {
    pixels: ValueId,
    at: ValueId,
    mask: ValueId,
    padding: ValueId,
}

fn patches(l: &mut Lowering<'_>, count: u64, width: u64) -> Patches {
    Patches {
        pixels: l.b.float_input("pixel_values", [1, count, width]),
        at: l.b.input("pixel_position_ids", DType::I64, [1, count, 2]),
        mask: l.b.float_input("attention_mask", [1, count]),
        padding: l.b.input("padding_positions", DType::Bool, [1, count]),
    }
}

fn tower(l: &mut Lowering<'_>, v: &VisionTower, soft_tokens: u64) {
    let count = soft_tokens.saturating_mul(v.pooling.saturating_mul(v.pooling));
    let p = patches(l, count, v.patch_size.saturating_mul(v.patch_size).saturating_mul(3));
    // 2 (x − ½)
    let x = l.b.op(Op::Affine { scale: 2.0, shift: -1.0 }, &[p.pixels]);
    let x = l.linear(x, "vision.patch_embd", false);
    let table = l.weight("vision.position_embd.weight");
    let e = l.b.op(Op::EmbedAxes { table, axes_first: true }, &[p.at, p.padding]);
    let mut x = l.b.op(Op::Add, &[x, e]);
    let norm = |l: &mut Lowering<'_>, x: ValueId, name: Option<&str>| {
        let weight = name.map(|name| l.weight(name));
        l.b.op(Op::RmsNorm { weight, eps: v.norm_eps, one_plus: false }, &[x])
    };
    for n in 0..v.layers {
        let name = |part: &str| format!("vision.blk.{n}.{part}");
        let h = norm(l, x, Some(&name("attn_norm.weight")));
        let q = clipped(l, v, h, &name("attn_q"));
        let k = clipped(l, v, h, &name("attn_k"));
        let w = clipped(l, v, h, &name("attn_v"));
        let (q, k, w) = (l.heads(q, v.head_dim), l.heads(k, v.head_dim), l.heads(w, v.head_dim));
        let q = norm(l, q, Some(&name("attn_q_norm.weight")));
        let k = norm(l, k, Some(&name("attn_k_norm.weight")));
        let w = norm(l, w, None);
        let q = l.b.op(Op::AxialRope { theta: v.rope_theta }, &[q, p.at]);
        let k = l.b.op(Op::AxialRope { theta: v.rope_theta }, &[k, p.at]);
        // The encoder's scores are not scaled: its norms do that (transformers 5.24).
        let a = l.b.op(Op::DenseAttention { scale: 1.0 }, &[q, k, w, p.mask]);
        let a = clipped_out(l, v, a, &name("attn_output"));
        let a = norm(l, a, Some(&name("post_attention_norm.weight")));
        x = l.b.op(Op::Add, &[x, a]);
        let h = norm(l, x, Some(&name("ffn_norm.weight")));
        let gate = clipped(l, v, h, &name("ffn_gate"));
        let up = clipped(l, v, h, &name("ffn_up"));
        let g = l.b.op(Op::Gated { activation: v.activation }, &[gate, up]);
        let m = clipped_out(l, v, g, &name("ffn_down"));
        let m = norm(l, m, Some(&name("post_ffw_norm.weight")));
        x = l.b.op(Op::Add, &[x, m]);
    }
    let pooled = l.b.push(Op::PoolPatches { side: v.pooling }, &[x, p.at, p.padding], None);
    let [mut rows, valid] = pooled[..] else { return };
    if v.standardize {
        let weight = l.weight("vision.std_bias");
        rows = l.b.op(Op::Shift { weight, subtract: true }, &[rows]);
        let weight = l.weight("vision.std_scale");
        rows = l.b.op(Op::ScaleBy { weight }, &[rows]);
    }
    l.b.output("hidden", rows);
    l.b.output("pooler_mask", valid);
}

fn bounds(l: &mut Lowering<'_>, x: ValueId, name: &str, side: &str) -> ValueId {
    let low = l.weight(&format!("{name}.{side}_min"));
    let high = l.weight(&format!("{name}.{side}_max"));
    l.b.op(Op::Clamp { low, high }, &[x])
}

/// A linear layer between its stored bounds, if the tower has them.
fn clipped(l: &mut Lowering<'_>, v: &VisionTower, x: ValueId, name: &str) -> ValueId {
    if !v.clipped_linears {
        return l.linear(x, name, false);
    }
    let x = bounds(l, x, name, "input");
    let y = l.linear(x, name, false);
    bounds(l, y, name, "output")
}

/// As [`clipped`], for a matrix cut by columns: the sum over devices comes before the output's bounds.
fn clipped_out(l: &mut Lowering<'_>, v: &VisionTower, x: ValueId, name: &str) -> ValueId {
    let x = if v.clipped_linears { bounds(l, x, name, "input") } else { x };
    let y = l.linear(x, name, false);
    let y = l.b.reduce(y);
    if v.clipped_linears { bounds(l, y, name, "output") } else { y }
}

fn embedder(l: &mut Lowering<'_>, v: &VisionEmbedder, soft_tokens: u64) {
    let side = v.patch_size.saturating_mul(v.pooling);
    let p = patches(l, soft_tokens, side.saturating_mul(side).saturating_mul(3));
    let norm = |l: &mut Lowering<'_>, x: ValueId, name: &str| {
        let weight = l.weight(&format!("vision.{name}.weight"));
        let bias = Some(l.weight(&format!("vision.{name}.bias")));
        l.b.op(Op::LayerNorm { weight, bias, eps: v.layer_norm_eps }, &[x])
    };
    let x = norm(l, p.pixels, "patch_norm_1");
    let x = l.linear(x, "vision.patch_embd", true);
    let x = norm(l, x, "patch_norm_2");
    let table = l.weight("vision.position_embd.weight");
    let e = l.b.op(Op::EmbedAxes { table, axes_first: false }, &[p.at, p.padding]);
    let x = l.b.op(Op::Add, &[x, e]);
    let x = norm(l, x, "position_norm");
    l.b.output("hidden", x);
}

/// A pre-norm encoder over all patches of a picture: learned positions, biases everywhere, an MLP without a gate.
fn siglip(l: &mut Lowering<'_>, v: &SiglipTower) {
    let patches = l.b.float_input("pixel_values", [1, v.patches(), v.patch_values()]);
    let kernel = l.weight("vision.patch_embd.weight");
    let bias = Some(l.weight("vision.patch_embd.bias"));
    let x = l.b.op(Op::EmbedPatches { kernel, bias }, &[patches]);
    let table = l.weight("vision.position_embd.weight");
    let mut x = l.b.op(Op::AddRows { table }, &[x]);
    let norm = |l: &mut Lowering<'_>, x: ValueId, name: &str| {
        let weight = l.weight(&format!("vision.{name}.weight"));
        let bias = Some(l.weight(&format!("vision.{name}.bias")));
        l.b.op(Op::LayerNorm { weight, bias, eps: v.layer_norm_eps }, &[x])
    };
    // A matrix cut by columns: its bias is added once, to the sum over devices.
    let out = |l: &mut Lowering<'_>, x: ValueId, name: &str| {
        let y = l.linear(x, &format!("vision.{name}"), false);
        let y = l.b.reduce(y);
        let weight = l.weight(&format!("vision.{name}.bias"));
        l.b.op(Op::Shift { weight, subtract: false }, &[y])
    };
    let width = v.hidden_size.checked_div(v.heads).unwrap_or(0);
    let scale = (width as f64).powf(-0.5);
    for n in 0..v.layers {
        let name = |part: &str| format!("blk.{n}.{part}");
        let h = norm(l, x, &name("attn_norm"));
        let [q, k, w] = ["attn_q", "attn_k", "attn_v"].map(|part| {
            let y = l.linear(h, &format!("vision.{}", name(part)), true);
            l.heads(y, width)
        });
        let a = l.b.op(Op::DenseAttention { scale }, &[q, k, w]);
        let a = out(l, a, &name("attn_output"));
        x = l.b.op(Op::Add, &[x, a]);
        let h = norm(l, x, &name("ffn_norm"));
        let m = l.linear(h, &format!("vision.{}", name("ffn_up")), true);
        let m = l.b.op(Op::Activate { activation: v.activation }, &[m]);
        let m = out(l, m, &name("ffn_down"));
        x = l.b.op(Op::Add, &[x, m]);
    }
    let x = norm(l, x, "post_norm");
    l.b.output("hidden", x);
}

/// Averages of squares of patches, an RMS norm with factors 1 + w, and a matrix that is stored by inputs.
fn siglip_projector(l: &mut Lowering<'_>, v: &SiglipTower) {
    let x = l.b.float_input("image_features", [1, v.patches(), v.projector.inputs]);
    let x = l.b.op(Op::PoolGrid { side: v.pooling() }, &[x]);
    let weight = Some(l.weight("mm.vision_norm.weight"));
    let eps = v.projector.norm_eps;
    let x = l.b.op(Op::RmsNorm { weight, eps, one_plus: true }, &[x]);
    let weight = l.weight("mm.vision.weight");
    let x = l.b.op(Op::Product { weight }, &[x]);
    l.b.output("image_embeds", x);
}
