//! Gemma 3: text only (`Gemma3ForCausalLM`) and with SigLIP (`Gemma3ForConditionalGeneration`).
//!
//! A text-only configuration has to state every number. The published multimodal configurations leave out, in
//! `text_config`, whatever equals the defaults of transformers' `Gemma3TextConfig`; there, and only there, those
//! defaults are read ([`DEFAULTS`]), and every one of them that shapes a tensor is checked against the tensors.

use super::census::{Census, Dim, Scope};
use super::config::Config;
use super::decoder::{self, Base, HIDDEN, MAX_LAYERS};
use super::rope::{self, RopeKeys};
use super::spec::{
    Activation, AttentionKind, ImageAttention, LayerSpec, ModelSpec, NormSpec, ProjectorSpec,
    SiglipTower, VisionSpec,
};
use super::weights::{Class, Tower};

/// Defaults of `Gemma3TextConfig` (transformers 4.50 to 5.24) for keys that published multimodal files leave out.
const DEFAULTS: [(&str, u64); 6] = [
    ("vocab_size", 262_208),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
    ("head_dim", 256),
    ("max_position_embeddings", 131_072),
    ("query_pre_attn_scalar", 256),
];

/// Every sixth layer is full where neither `layer_types` nor `sliding_window_pattern` says otherwise.
const PATTERN: u64 = 6;

struct Text<'a, 'b> {
    text: &'b Config<'a>,
    nested: bool,
}

impl Text<'_, '_> {
    fn size(&self, key: &str) -> u64 {
        match DEFAULTS.iter().find(|(k, _)| self.nested && *k == key) {
            Some((_, default)) => self.text.size_or(key, *default),
            None => self.text.size(key),
        }
    }

    fn base(&self) -> Base {
        let text = self.text;
        let (q_heads, kv_heads) =
            (self.size("num_attention_heads"), self.size("num_key_value_heads"));
        decoder::divides(text, q_heads, kv_heads, "num_key_value_heads");
        let norm_eps = match text.opt_positive("rms_norm_eps") {
            Some(eps) => eps,
            None if self.nested => 1e-6,
            None => text.positive("rms_norm_eps"),
        };
        let activation = match text.value("hidden_activation") {
            None if self.nested => Activation::GeluTanh,
            _ => decoder::activation(text, "hidden_activation"),
        };
        Base {
            vocab_size: self.size("vocab_size"),
            hidden_size: text.size(HIDDEN),
            layers: text.bounded("num_hidden_layers", MAX_LAYERS),
            q_heads,
            kv_heads,
            head_dim: self.size("head_dim"),
            mlp_width: text.size("intermediate_size"),
            max_positions: self.size("max_position_embeddings"),
            norm_eps,
            activation,
        }
    }
}

pub(super) fn spec(root: &Config) -> ModelSpec {
    let text = root.text_section();
    let reader = Text { text: &text, nested: !text.is_root() };
    let base = reader.base();
    let window = text.size("sliding_window");
    let kinds = decoder::layer_types(&text, base.layers, Some(window)).unwrap_or_else(|| {
        let key = if text.states("sliding_window_pattern") {
            "sliding_window_pattern"
        } else {
            "_sliding_window_pattern"
        };
        let pattern = text.size_or(key, PATTERN);
        let full = |n: u64| (n + 1).is_multiple_of(pattern);
        (0..base.layers)
            .map(|n| if full(n) { AttentionKind::Full } else { AttentionKind::Sliding { window } })
            .collect()
    });
    if text.flag_or("use_bidirectional_attention", false) {
        text.refuse_help(
            "use_bidirectional_attention",
            "is true: an embedding model, which does not generate tokens",
            "`--weights-only` converts it without graphs",
        );
    }
    let default = |theta: f64| if reader.nested { Some(theta) } else { None };
    let full = RopeKeys { default_theta: default(1_000_000.0), ..RopeKeys::PLAIN };
    let local = RopeKeys {
        layer_type: "sliding_attention",
        theta: "rope_local_base_freq",
        default_theta: default(10_000.0),
        scaled: false,
    };
    let (full, local) =
        (rope::read(&text, &full, base.head_dim), rope::read(&text, &local, base.head_dim));
    let scale = (reader.size("query_pre_attn_scalar") as f64).powf(-0.5);
    let bias = text.flag_or("attention_bias", false);
    let layers: Vec<LayerSpec> = kinds
        .into_iter()
        .map(|kind| {
            let rope = if kind == AttentionKind::Full { full } else { local };
            let mut layer = base.layer(kind, rope);
            layer.attention.scale = scale;
            layer.attention.qk_norm = true;
            layer.attention.qkv_bias = bias;
            layer.attention.output_bias = bias;
            layer.post_norms = true;
            layer
        })
        .collect();
    let mut spec = base.text(layers, decoder::tied(root, &text, true));
    spec.norm = NormSpec { eps: base.norm_eps, one_plus: true };
    spec.embedding_scale = (base.hidden_size as f64).sqrt();
    spec.attention_softcap = text.opt_positive("attn_logit_softcapping");
    spec.logit_softcap = text.opt_positive("final_logit_softcapping");
    let hidden = spec.hidden_size;
    let mut model = decoder::text_model("gemma3", root, &text, spec);
    if reader.nested {
        // Defaults of `Gemma3TextConfig` too.
        model.tokens.pad.get_or_insert(0);
        model.tokens.bos.get_or_insert(2);
        if model.tokens.eos.is_empty() {
            model.tokens.eos.push(1);
        }
    }
    if reader.nested && root.states("vision_config") {
        model.vision = siglip(root, hidden).map(VisionSpec::Siglip);
        model.text.image_attention = ImageAttention::Windowed;
    }
    model
}

/// The SigLIP encoder. Channels (3), `layer_norm_eps` 1e-6 and the activation (GELU, tanh approximation) are the defaults
/// of `SiglipVisionConfig`, as the published files leave them out.
fn siglip(root: &Config, outputs: u64) -> Option<SiglipTower> {
    let v = root.need_section("vision_config")?;
    if let Some(kind) = v.opt_word("model_type")
        && kind != "siglip_vision_model"
    {
        v.refuse_help(
            "model_type",
            format!("is `{kind}`; Gemma 3 is known with siglip_vision_model"),
            "`--weights-only` converts it without graphs",
        );
    }
    if v.flag_or("vision_use_head", false) {
        v.refuse("vision_use_head", "is true; Gemma 3 uses SigLIP without its pooling head");
    }
    let channels = v.size_or("num_channels", 3);
    if channels != 3 {
        v.refuse("num_channels", format!("is {channels}; pictures have 3"));
    }
    let activation = match v.value("hidden_act") {
        None => Activation::GeluTanh,
        Some(_) => decoder::activation(&v, "hidden_act"),
    };
    let hidden_size = v.size(HIDDEN);
    let layer_norm_eps = v.opt_positive("layer_norm_eps").unwrap_or(1e-6);
    let tower = SiglipTower {
        hidden_size,
        mlp_width: v.size("intermediate_size"),
        layers: v.bounded("num_hidden_layers", MAX_LAYERS),
        heads: v.size("num_attention_heads"),
        image_size: v.size("image_size"),
        patch_size: v.size("patch_size"),
        activation,
        layer_norm_eps,
        soft_tokens: root.size("mm_tokens_per_image"),
        projector: ProjectorSpec { inputs: hidden_size, outputs, norm_eps: layer_norm_eps },
    };
    if !hidden_size.is_multiple_of(tower.heads) && v.states(HIDDEN) {
        v.refuse(
            "num_attention_heads",
            format!("is {}, which does not divide hidden_size {hidden_size}", tower.heads),
        );
    }
    let (side, tokens) = (tower.side(), tower.soft_tokens);
    let row = tokens.isqrt();
    let pools = row > 0 && row * row == tokens && side > 0 && side.is_multiple_of(row);
    if !pools && root.states("mm_tokens_per_image") && v.states("image_size") {
        root.refuse(
            "mm_tokens_per_image",
            format!("is {tokens}; {side} × {side} patches do not become that many equal squares"),
        );
    }
    Some(tower)
}

pub(super) fn weights(spec: &ModelSpec, c: &mut Census) {
    decoder::dense_weights(spec, c);
    if let Some(VisionSpec::Siglip(v)) = &spec.vision {
        siglip_weights(c, v);
    }
}

fn siglip_weights(c: &mut Census, v: &SiglipTower) {
    // transformers 5.24 saves the encoder without `vision_model.`.
    let prefix = c.prefix(&[
        "vision_tower.vision_model.",
        "model.vision_tower.vision_model.",
        "vision_tower.",
        "model.vision_tower.",
    ]);
    let s = Scope { from: prefix, to: "vision.", tower: Tower::Vision, layer: -1 };
    let (h, w) = (Dim(v.hidden_size, HIDDEN), Dim(v.mlp_width, "intermediate_size"));
    let p = Dim(v.patch_size, "patch_size");
    let kernel = [h, Dim(3, ""), p, p];
    c.weight(&s, "patch_embd", "embeddings.patch_embedding", Class::Other, &kernel);
    c.bias(&s, "patch_embd", "embeddings.patch_embedding", Class::Other, h);
    let table = [Dim(v.patches(), "(image_size / patch_size)²"), h];
    c.weight(&s, "position_embd", "embeddings.position_embedding", Class::Other, &table);
    let pair = |c: &mut Census, s: &Scope, to: &str, from: &str, class: Class, shape: &[Dim]| {
        let at = c.weight(s, to, from, class, shape);
        let bias = if class == Class::Norm { Class::Norm } else { Class::Other };
        c.bias(s, to, from, bias, shape[0]);
        at
    };
    pair(c, &s, "post_norm", "post_layernorm", Class::Norm, &[h]);
    let under = format!("{prefix}encoder.layers.");
    for n in c.layers(&under, v.layers, "vision_config.num_hidden_layers") {
        let (from, to) = (format!("{under}{n}."), format!("vision.blk.{n}."));
        let s = Scope { from: &from, to: &to, ..s };
        pair(c, &s, "attn_norm", "layer_norm1", Class::Norm, &[h]);
        let qkv =
            [("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj")].map(|(to, from)| {
                pair(c, &s, to, &format!("self_attn.{from}"), Class::Linear, &[h, h])
            });
        c.fuse(&format!("{to}attn_qkv"), &qkv);
        pair(c, &s, "attn_output", "self_attn.out_proj", Class::Linear, &[h, h]);
        pair(c, &s, "ffn_norm", "layer_norm2", Class::Norm, &[h]);
        pair(c, &s, "ffn_up", "mlp.fc1", Class::Linear, &[w, h]);
        pair(c, &s, "ffn_down", "mlp.fc2", Class::Linear, &[h, w]);
    }
    let prefix = c.prefix(&["multi_modal_projector.", "model.multi_modal_projector."]);
    let s = Scope { from: prefix, to: "mm.", tower: Tower::Projector, layer: -1 };
    // Stored input × output, so it is no linear matrix to a rule: blocks along its rows would cross inputs.
    let dims = [
        Dim(v.projector.inputs, "vision hidden_size"),
        Dim(v.projector.outputs, "text hidden_size"),
    ];
    c.raw(&s, "vision.weight", "mm_input_projection_weight", Class::Other, &dims);
    c.norm(&s, "vision_norm", "mm_soft_emb_norm", h);
}
