//! Gemma 4: dense, with experts, the E models with per-layer inputs, and the unified 12B.
//!
//! Two config schemas describe the same model. Published files carry `global_head_dim` and
//! `num_global_key_value_heads` for full layers (the latter counts only with `attention_k_eq_v`); transformers 5.24
//! saves `per_layer_config` with the same numbers by layer index instead. As in transformers, the last layer is
//! always full.

use super::census::{Census, Dim, Scope};
use super::config::Config;
use super::decoder::{self, Base, HIDDEN, HeadDim, KvHeads, VOCAB};
use super::gemma4_towers as towers;
use super::rope::{self, RopeKeys};
use super::spec::{
    AttentionKind, ImageAttention, KvSource, LayerSpec, ModelSpec, MoeSpec, PerLayerInput,
    RopeSpec, RouterKind, TextSpec, ValueSource,
};
use super::weights::{Class, Part, Tower};
use crate::tensor::Shape;

const EXPERTS: &str = "num_experts";
const WIDTH: &str = "moe_intermediate_size";
const PLE: &str = "hidden_size_per_layer_input";

/// Prefixes of the multimodal model, its inner module, and the text-only class.
const PREFIXES: [&str; 5] =
    ["model.language_model.", "model.", "language_model.", "language_model.model.", ""];

pub(super) fn spec(root: &Config) -> ModelSpec {
    let text = root.text_section();
    let unified = root.opt_word("model_type").is_some_and(|t| t.contains("unified"));
    let mut spec = text_spec(root, &text, false);
    spec.image_attention = match (image_rule(&text), unified) {
        (false, _) => ImageAttention::Causal,
        (true, false) => ImageAttention::SlidingWindowed,
        (true, true) => ImageAttention::Everywhere,
    };
    let hidden = spec.hidden_size;
    let mut model = decoder::text_model("gemma4", root, &text, spec);
    if !text.is_root() {
        model.vision = towers::vision(root, hidden, unified);
        model.audio = towers::audio(root, hidden, unified);
    }
    model
}

/// Whether images are seen whole.
fn image_rule(text: &Config) -> bool {
    let key = "use_bidirectional_attention";
    text.need_present(key);
    match text.opt_word(key) {
        None => false,
        Some("vision") => true,
        Some("all") => {
            text.refuse_help(
                key,
                "is `all`: an embedding model, which does not generate tokens",
                "`--weights-only` converts it without graphs",
            );
            false
        }
        Some(other) => {
            text.refuse(key, format!("is `{other}`; known are null, vision and all"));
            false
        }
    }
}

/// The decoder; of a draft head when `draft`, whose layers all read the target's keys and values.
pub(super) fn text_spec(root: &Config, text: &Config, draft: bool) -> TextSpec {
    let base = Base::read(text, "hidden_activation", HeadDim::Stated, KvHeads::Stated);
    let window = text.opt_size("sliding_window");
    let mut kinds = match decoder::layer_types(text, base.layers, window) {
        Some(kinds) => kinds,
        None => {
            text.missing("layer_types");
            (0..base.layers).map(|_| AttentionKind::Full).collect()
        }
    };
    if let Some(last) = kinds.last_mut() {
        *last = AttentionKind::Full;
    }
    let shapes = head_shapes(text, &base, &kinds);
    let ropes = ropes(text, &kinds, &shapes);
    let key_values = text.flag("attention_k_eq_v");
    let bias = text.flag_or("attention_bias", false);
    let sources = kv_sources(text, &kinds, draft);
    let moe = experts_spec(text, base.layers);
    let double = text.flag("use_double_wide_mlp");

    let mut layers: Vec<LayerSpec> = Vec::with_capacity(kinds.len());
    for ((&kind, &(head_dim, kv_heads)), (rope, kv)) in
        kinds.iter().zip(&shapes).zip(ropes.into_iter().zip(sources))
    {
        let mut layer = base.layer(kind, rope);
        let a = &mut layer.attention;
        a.head_dim = head_dim;
        a.kv_heads = kv_heads;
        a.scale = 1.0;
        a.qk_norm = true;
        a.v_norm = true;
        a.kv = kv;
        a.qkv_bias = bias;
        a.output_bias = bias;
        if key_values && kind == AttentionKind::Full {
            a.values = ValueSource::Keys;
        }
        if let Some(mlp) = &mut layer.mlp
            && double
            && kv != KvSource::Own
        {
            mlp.width = mlp.width.saturating_mul(2);
        }
        layer.moe = moe;
        layer.post_norms = true;
        layer.output_scale = true;
        layers.push(layer);
    }

    let mut spec = base.text(layers, decoder::tied(root, text, true));
    spec.embedding_scale = (base.hidden_size as f64).sqrt();
    spec.logit_softcap = text.nullable_positive("final_logit_softcapping");
    let width = text.count(PLE);
    if width > 0 {
        let vocab_size = text.size("vocab_size_per_layer_input");
        spec.per_layer_input = Some(PerLayerInput { width, vocab_size });
    }
    spec
}

/// (head_dim, kv heads) of every layer, from either schema.
fn head_shapes(text: &Config, base: &Base, kinds: &[AttentionKind]) -> Vec<(u64, u64)> {
    let plain = (base.head_dim, base.kv_heads);
    let mut shapes = vec![plain; kinds.len()];
    if let Some(overrides) = text.section("per_layer_config") {
        for key in overrides.keys() {
            let shape = key.parse::<usize>().ok().and_then(|n| shapes.get_mut(n));
            let (Some(shape), Some(layer)) = (shape, overrides.need_section(key)) else {
                overrides.refuse(key, format!("is no layer of 0 to {}", kinds.len() - 1));
                continue;
            };
            for field in layer.keys().filter(|k| !["head_dim", "num_key_value_heads"].contains(k)) {
                layer.refuse(field, "cannot differ by layer; head_dim and num_key_value_heads can");
            }
            *shape =
                (layer.size_or("head_dim", plain.0), layer.size_or("num_key_value_heads", plain.1));
            decoder::divides(&layer, base.q_heads, shape.1, "num_key_value_heads");
        }
        return shapes;
    }
    let head_dim = text.size("global_head_dim");
    let mut kv_heads = base.kv_heads;
    if text.value("attention_k_eq_v").and_then(|v| v.as_bool()) == Some(true) {
        text.need_present("num_global_key_value_heads");
        kv_heads = text.size_or("num_global_key_value_heads", base.kv_heads);
        decoder::divides(text, base.q_heads, kv_heads, "num_global_key_value_heads");
    }
    for (shape, kind) in shapes.iter_mut().zip(kinds) {
        if *kind == AttentionKind::Full {
            *shape = (head_dim, kv_heads);
        }
    }
    shapes
}

fn ropes(text: &Config, kinds: &[AttentionKind], shapes: &[(u64, u64)]) -> Vec<RopeSpec> {
    // One reading for each (kind, head width), so that a problem is reported once.
    let mut seen: Vec<((bool, u64), RopeSpec)> = Vec::new();
    if text.need_section("rope_parameters").is_none() {
        let rope =
            RopeSpec { theta: 1.0, rotary_dims: 0, scaling: super::spec::RopeScaling::Default };
        return vec![rope; kinds.len()];
    }
    kinds
        .iter()
        .zip(shapes)
        .map(|(kind, &(head_dim, _))| {
            let full = *kind == AttentionKind::Full;
            if let Some((_, rope)) = seen.iter().find(|(k, _)| *k == (full, head_dim)) {
                return *rope;
            }
            let layer_type = if full { "full_attention" } else { "sliding_attention" };
            let keys = RopeKeys { layer_type, ..RopeKeys::PLAIN };
            let rope = rope::read(text, &keys, head_dim);
            seen.push(((full, head_dim), rope));
            rope
        })
        .collect()
}

/// Where each layer's keys and values come from: the last `num_kv_shared_layers` layers read those of the last
/// layer of their kind before them. A draft head's layers all read the target's; its configuration may say 0 or all.
fn kv_sources(text: &Config, kinds: &[AttentionKind], draft: bool) -> Vec<KvSource> {
    let key = "num_kv_shared_layers";
    let shared = text.count(key);
    let layers = kinds.len() as u64;
    if draft {
        if shared != 0 && shared != layers && text.states("num_hidden_layers") {
            text.refuse(key, format!("is {shared}; a draft head of {layers} layers shares all"));
        }
        return vec![KvSource::Target; kinds.len()];
    }
    if shared > 0 && shared >= layers && text.states("num_hidden_layers") {
        text.refuse(key, format!("is {shared} of {layers} layers; the first has to have its own"));
        return vec![KvSource::Own; kinds.len()];
    }
    let first = usize::try_from(layers.saturating_sub(shared)).unwrap_or(kinds.len());
    let full = |kind: &AttentionKind| *kind == AttentionKind::Full;
    let mut lacking = false;
    let sources = kinds
        .iter()
        .enumerate()
        .map(|(n, kind)| {
            if n < first {
                return KvSource::Own;
            }
            let own = kinds.iter().take(first);
            match own.enumerate().rfind(|(_, k)| full(k) == full(kind)) {
                Some((source, _)) => KvSource::Layer(source),
                None => {
                    lacking = true;
                    KvSource::Own
                }
            }
        })
        .collect();
    if lacking && text.states("num_hidden_layers") {
        text.refuse(
            key,
            format!(
                "is {shared}, but layers 0-{} lack a kind of layer that a later one reads",
                first.saturating_sub(1)
            ),
        );
    }
    sources
}

fn experts_spec(text: &Config, layers: u64) -> Option<MoeSpec> {
    if !text.flag("enable_moe_block") {
        return None;
    }
    let moe = MoeSpec {
        experts: text.bounded(EXPERTS, decoder::MAX_EXPERTS),
        top_k: text.size("top_k_experts"),
        width: text.size(WIDTH),
        norm_top_k: true,
        router: RouterKind::ScaledResidual,
    };
    decoder::bound_experts(text, EXPERTS, layers, moe.experts);
    if moe.top_k > moe.experts && text.states(EXPERTS) {
        let what = format!("is {}, more than the {} experts", moe.top_k, moe.experts);
        text.refuse("top_k_experts", what);
    }
    Some(moe)
}

pub(super) fn weights(spec: &ModelSpec, c: &mut Census) {
    let Some(prefix) = c.text_prefix(&PREFIXES) else { return };
    decoder::ends(c, &spec.text, prefix);
    per_layer_inputs(c, &spec.text, prefix);
    layers(c, &spec.text, prefix, "", Tower::Text);
    if let Some(vision) = &spec.vision {
        towers::vision_weights(c, vision);
    }
    if let Some(audio) = &spec.audio {
        towers::audio_weights(c, audio);
    }
}

fn per_layer_inputs(c: &mut Census, spec: &TextSpec, prefix: &str) {
    let Some(ple) = &spec.per_layer_input else { return };
    let s = Scope { from: prefix, to: "", tower: Tower::Text, layer: -1 };
    let all = Dim(
        ple.width.saturating_mul(spec.layers.len() as u64),
        "num_hidden_layers × hidden_size_per_layer_input",
    );
    let (h, p) = (Dim(spec.hidden_size, HIDDEN), Dim(ple.width, PLE));
    let v = Dim(ple.vocab_size, "vocab_size_per_layer_input");
    c.weight(&s, "per_layer_token_embd", "embed_tokens_per_layer", Class::Embedding, &[v, all]);
    c.linear(&s, "per_layer_model_proj", "per_layer_model_projection", all, h);
    c.norm(&s, "per_layer_proj_norm", "per_layer_projection_norm", p);
}

/// The layers under `{prefix}layers.`, as `{to}blk.N.`.
pub(super) fn layers(c: &mut Census, spec: &TextSpec, prefix: &str, to: &str, tower: Tower) {
    let hidden = spec.hidden_size;
    let h = Dim(hidden, HIDDEN);
    let under = format!("{prefix}layers.");
    for n in c.layers(&under, spec.layers.len() as u64, "num_hidden_layers") {
        let Some(layer) = usize::try_from(n).ok().and_then(|n| spec.layers.get(n)) else {
            continue;
        };
        let (from, to) = (format!("{under}{n}."), format!("{to}blk.{n}."));
        let at = if tower == Tower::Text { i32::try_from(n).unwrap_or(i32::MAX) } else { -1 };
        let s = Scope { from: &from, to: &to, tower, layer: at };
        decoder::norms(c, &s, layer.post_norms, hidden);
        decoder::attention(c, &s, &layer.attention, hidden);
        if let Some(m) = layer.mlp {
            decoder::mlp(c, &s, m, hidden);
        }
        if let Some(moe) = &layer.moe {
            experts(c, &s, moe, hidden);
        }
        if let Some(ple) = &spec.per_layer_input {
            let p = Dim(ple.width, PLE);
            c.linear(&s, "inp_gate", "per_layer_input_gate", p, h);
            c.linear(&s, "proj", "per_layer_projection", h, p);
            c.norm(&s, "post_norm", "post_per_layer_input_norm", h);
        }
        c.raw(&s, "layer_output_scale.weight", "layer_scalar", Class::Other, &[]);
        if let KvSource::Layer(source) = layer.attention.kv {
            // Published E models still hold what transformers ignores.
            for leaf in ["k_proj.weight", "v_proj.weight", "k_norm.weight"] {
                let why = format!("layer {n} reads the keys and values of layer {source}");
                c.leave_out(&format!("{from}self_attn.{leaf}"), &why);
            }
        }
    }
}

/// Router, its scales, and the stacked experts `[E, 2I, H]` (gate rows first) and `[E, H, I]`.
fn experts(c: &mut Census, s: &Scope, moe: &MoeSpec, hidden: u64) {
    let (e, h) = (Dim(moe.experts, EXPERTS), Dim(hidden, HIDDEN));
    c.norm(s, "post_ffw_norm_1", "post_feedforward_layernorm_1", h);
    c.norm(s, "post_ffw_norm_2", "post_feedforward_layernorm_2", h);
    c.norm(s, "pre_ffw_norm_2", "pre_feedforward_layernorm_2", h);
    c.weight(s, "ffn_gate_inp", "router.proj", Class::Router, &[e, h]);
    c.raw(s, "ffn_gate_inp.scale", "router.scale", Class::Router, &[h]);
    c.raw(s, "ffn_down_exps.scale", "router.per_expert_scale", Class::Router, &[e]);
    let double = Dim(moe.width.saturating_mul(2), "2 × moe_intermediate_size");
    let stacks = [
        ("ffn_gate_up_exps", "experts.gate_up_proj", 0, double, h),
        ("ffn_down_exps", "experts.down_proj", 1, h, Dim(moe.width, WIDTH)),
    ];
    for (to, from, slot, rows, cols) in stacks {
        let tensor = format!("{}{from}", s.from);
        let Some(dtype) = c.claim_shared(&tensor, &[e, rows, cols]) else { continue };
        for n in 0..moe.experts {
            let part = Part { tensor: tensor.clone(), index: Some(n) };
            let shape = Shape::from([rows.0, cols.0]);
            c.expert(s, to, (n, slot), shape, dtype, vec![part]);
        }
    }
}

/// Embedding, final norm and tied head of a draft head; the embedding serves as its head only.
pub(super) fn draft_ends(c: &mut Census, spec: &TextSpec, prefix: &str) {
    let s = Scope { from: prefix, to: "draft.", tower: Tower::Draft, layer: -1 };
    let (v, h) = (Dim(spec.vocab_size, VOCAB), Dim(spec.hidden_size, HIDDEN));
    let head = c.weight(&s, "output", "embed_tokens", Class::LmHead, &[v, h]);
    c.norm(&s, "output_norm", "norm", h);
    c.head_only(head, "draft.token_embd.weight", "lm_head.weight");
}
