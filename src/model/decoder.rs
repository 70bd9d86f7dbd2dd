//! What the decoders of all families share: the widths, one layer's attention and MLP, and their weights.

use super::census::{Census, Dim, Scope};
use super::config::Config;
use super::rope::{self, RopeKeys};
use super::spec::{
    Activation, AttentionKind, AttentionSpec, ImageAttention, KvSource, LayerSpec, MlpSpec,
    ModelSpec, NormSpec, SpecialTokens, TextSpec, ValueSource,
};
use super::weights::{Class, Tower};

/// Most layers a configuration may state.
pub(super) const MAX_LAYERS: u64 = 4096;

/// Most experts a layer may have.
pub(super) const MAX_EXPERTS: u64 = 65_536;

/// Most experts a model may have, over all layers.
const MAX_ALL_EXPERTS: u64 = 1 << 20;

pub(super) const HIDDEN: &str = "hidden_size";
pub(super) const VOCAB: &str = "vocab_size";
const Q_ROWS: &str = "num_attention_heads × head_dim";
const KV_ROWS: &str = "num_key_value_heads × head_dim";
const MLP: &str = "intermediate_size";

/// Prefixes under which checkpoints keep a causal decoder: from the whole model, from the inner module, and from
/// the wrappers of multimodal models, old and new.
pub(super) const TEXT_PREFIXES: [&str; 5] =
    ["model.", "", "model.language_model.", "language_model.model.", "language_model."];

/// How a family states the width of a head.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum HeadDim {
    /// Always explicitly.
    Stated,
    /// `hidden_size / num_attention_heads` unless stated, as transformers documents for the family.
    Derived,
}

/// How a family states its key heads.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum KvHeads {
    /// Always explicitly.
    Stated,
    /// As many as query heads unless stated, as transformers documents for the family.
    LikeQueries,
}

/// Numbers that every text configuration states.
pub(super) struct Base {
    pub vocab_size: u64,
    pub hidden_size: u64,
    pub layers: u64,
    pub q_heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    pub mlp_width: u64,
    pub max_positions: u64,
    pub norm_eps: f64,
    pub activation: Activation,
}

impl Base {
    pub(super) fn read(text: &Config, act_key: &str, head_dim: HeadDim, kv: KvHeads) -> Base {
        let hidden_size = text.size(HIDDEN);
        let q_heads = text.size("num_attention_heads");
        let kv_heads = match kv {
            KvHeads::Stated => text.size("num_key_value_heads"),
            KvHeads::LikeQueries => text.size_or("num_key_value_heads", q_heads),
        };
        divides(text, q_heads, kv_heads, "num_key_value_heads");
        let head_dim = match head_dim {
            HeadDim::Stated => text.size("head_dim"),
            HeadDim::Derived => text.opt_size("head_dim").unwrap_or_else(|| {
                if text.states(HIDDEN) && !hidden_size.is_multiple_of(q_heads) {
                    let what = format!(
                        "is {hidden_size}, no multiple of num_attention_heads {q_heads}, and `head_dim` is not stated"
                    );
                    text.refuse(HIDDEN, what);
                }
                (hidden_size / q_heads).max(1)
            }),
        };
        Base {
            vocab_size: text.size(VOCAB),
            hidden_size,
            layers: text.bounded("num_hidden_layers", MAX_LAYERS),
            q_heads,
            kv_heads,
            head_dim,
            mlp_width: text.size(MLP),
            max_positions: text.size("max_position_embeddings"),
            norm_eps: text.positive("rms_norm_eps"),
            activation: activation(text, act_key),
        }
    }

    /// A layer of the llama kind: one norm before each half, plain causal attention, a dense gated MLP.
    pub(super) fn layer(&self, kind: AttentionKind, rope: super::spec::RopeSpec) -> LayerSpec {
        LayerSpec {
            attention: AttentionSpec {
                kind,
                q_heads: self.q_heads,
                kv_heads: self.kv_heads,
                head_dim: self.head_dim,
                rope,
                scale: (self.head_dim as f64).powf(-0.5),
                qk_norm: false,
                v_norm: false,
                values: ValueSource::Projection,
                kv: KvSource::Own,
                qkv_bias: false,
                output_bias: false,
            },
            mlp: Some(MlpSpec { width: self.mlp_width, bias: false }),
            moe: None,
            post_norms: false,
            output_scale: false,
        }
    }

    /// A text model of these widths without the extras of Gemma.
    pub(super) fn text(&self, layers: Vec<LayerSpec>, tied_head: bool) -> TextSpec {
        TextSpec {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            max_positions: self.max_positions,
            layers,
            norm: NormSpec { eps: self.norm_eps, one_plus: false },
            activation: self.activation,
            embedding_scale: 1.0,
            tied_head,
            logit_softcap: None,
            attention_softcap: None,
            image_attention: ImageAttention::Causal,
            per_layer_input: None,
        }
    }
}

/// A problem unless `kv` heads divide `q` heads. One query head may be a placeholder: [`text_model`] looks again.
pub(super) fn divides(text: &Config, q: u64, kv: u64, key: &str) {
    if q > 1 && kv > 0 && !q.is_multiple_of(kv) {
        text.refuse(
            key,
            format!("is {kv}, which does not divide num_attention_heads {q} into equal groups"),
        );
    }
}

/// A problem when all layers together have more experts than memory is set aside for.
pub(super) fn bound_experts(text: &Config, key: &str, layers: u64, experts: u64) {
    if layers.saturating_mul(experts) > MAX_ALL_EXPERTS {
        text.refuse(key, format!("is {experts} in {layers} layers; at most {MAX_ALL_EXPERTS} experts in all are supported"));
    }
}

pub(super) fn activation(section: &Config, key: &str) -> Activation {
    match section.word(key) {
        Some("silu" | "swish") | None => Activation::Silu,
        Some("gelu_pytorch_tanh") => Activation::GeluTanh,
        Some(other) => {
            section.refuse_help(
                key,
                format!("is `{other}`, which radpack does not compute"),
                "known activations: silu and gelu_pytorch_tanh",
            );
            Activation::Silu
        }
    }
}

/// Whether the head is the embedding: stated by the text section or the top level, else the family's default.
pub(super) fn tied(root: &Config, text: &Config, default: bool) -> bool {
    let outer = root.flag_or("tie_word_embeddings", default);
    text.flag_or("tie_word_embeddings", outer)
}

/// Kind of every layer from `layer_types`, or `None` when that key is absent.
pub(super) fn layer_types(
    text: &Config,
    layers: u64,
    window: Option<u64>,
) -> Option<Vec<AttentionKind>> {
    let words = text.words("layer_types")?;
    if words.len() as u64 != layers && text.states("num_hidden_layers") {
        text.refuse(
            "layer_types",
            format!("has {} entries, `num_hidden_layers` is {layers}", words.len()),
        );
    }
    let mut kinds: Vec<AttentionKind> = Vec::with_capacity(words.len());
    let mut lacking = false;
    for word in words {
        kinds.push(match word {
            "full_attention" => AttentionKind::Full,
            "sliding_attention" => {
                lacking |= window.is_none();
                AttentionKind::Sliding { window: window.unwrap_or(1) }
            }
            other => {
                text.refuse(
                    "layer_types",
                    format!("holds `{other}`; known are full_attention and sliding_attention"),
                );
                AttentionKind::Full
            }
        });
    }
    if lacking {
        text.missing("sliding_window");
    }
    kinds.resize(usize::try_from(layers).unwrap_or(0), AttentionKind::Full);
    Some(kinds)
}

/// Special token ids, checked against the vocabulary. `eos_token_id` of the top level wins, as in generation.
pub(super) fn tokens(root: &Config, text: &Config, vocab_size: u64) -> SpecialTokens {
    let id = |section: &Config, key: &str| -> Option<u64> {
        // -1 is how old configurations spell "none".
        let id = section.value(key)?.as_u64()?;
        check_token(section, key, id, vocab_size);
        Some(id)
    };
    let either =
        |key: &str| id(text, key).or_else(|| if text.is_root() { None } else { id(root, key) });
    let eos = [root, text]
        .iter()
        .find_map(|section| {
            let value = section.value("eos_token_id")?;
            let ids: Vec<u64> = match value.as_array() {
                Some(list) => list.iter().filter_map(|v| v.as_u64()).collect(),
                None => value.as_u64().into_iter().collect(),
            };
            for &id in &ids {
                check_token(section, "eos_token_id", id, vocab_size);
            }
            Some(ids)
        })
        .unwrap_or_default();
    SpecialTokens {
        bos: either("bos_token_id"),
        eos,
        pad: either("pad_token_id"),
        image: id(root, "image_token_id").or_else(|| id(root, "image_token_index")),
        video: id(root, "video_token_id"),
        audio: id(root, "audio_token_id"),
        begin_image: id(root, "boi_token_id").or_else(|| id(root, "boi_token_index")),
        end_image: id(root, "eoi_token_id").or_else(|| id(root, "eoi_token_index")),
        begin_audio: id(root, "boa_token_id"),
        end_audio: id(root, "eoa_token_id").or_else(|| id(root, "eoa_token_index")),
    }
}

fn check_token(section: &Config, key: &str, id: u64, vocab_size: u64) {
    if id >= vocab_size && vocab_size > 1 {
        section.refuse(key, format!("is token {id}; the embedding has {vocab_size} rows"));
    }
}

/// A whole model spec around a text model that nests nothing else.
pub(super) fn text_model(
    family: &'static str,
    root: &Config,
    text: &Config,
    spec: TextSpec,
) -> ModelSpec {
    let tokens = tokens(root, text, spec.vocab_size);
    if root.sound() {
        let a = spec.layers.iter().map(|l| &l.attention);
        if let Some(a) = a.clone().find(|a| !a.q_heads.is_multiple_of(a.kv_heads.max(1))) {
            let what = format!("is {}, no multiple of {} key heads", a.q_heads, a.kv_heads);
            text.refuse("num_attention_heads", what);
        }
        if let Some(a) = a.clone().find(|a| !a.head_dim.is_multiple_of(2)) {
            let what = format!("gives heads {} wide; a rotation needs an even width", a.head_dim);
            text.refuse(if text.states("head_dim") { "head_dim" } else { HIDDEN }, what);
        }
    }
    ModelSpec {
        family,
        architecture: root.words("architectures").and_then(|a| a.first().map(|s| (*s).to_owned())),
        model_type: root.opt_word("model_type").unwrap_or_default().to_owned(),
        text: spec,
        vision: None,
        audio: None,
        draft: None,
        tokens,
    }
}

/// Rotation of a family whose layers are all alike.
pub(super) fn plain_rope(text: &Config, base: &Base) -> super::spec::RopeSpec {
    rope::read(text, &RopeKeys::PLAIN, base.head_dim)
}

/// Embedding, final norm and head of a decoder under `prefix`; the embedding's position in the table.
pub(super) fn ends(c: &mut Census, spec: &TextSpec, prefix: &str) {
    let s = Scope { from: prefix, to: "", tower: Tower::Text, layer: -1 };
    let (v, h) = (Dim(spec.vocab_size, VOCAB), Dim(spec.hidden_size, HIDDEN));
    let embedding = c.weight(&s, "token_embd", "embed_tokens", Class::Embedding, &[v, h]);
    c.norm(&s, "output_norm", "norm", h);
    // `language_model.model.` has its head beside the inner module, every other spelling at the top.
    let head = if prefix == "language_model.model." { "language_model.lm_head" } else { "lm_head" };
    if spec.tied_head {
        c.tie(embedding, "output.weight", &format!("{head}.weight"));
    } else {
        let s = Scope { from: "", ..s };
        if c.weight(&s, "output", head, Class::LmHead, &[v, h]).is_none() {
            c.advise_missing(
                "`tie_word_embeddings` is false, so the head has to be stored; a tied model says true",
            );
        }
    }
}

/// Attention weights of one layer under `self_attn.`.
pub(super) fn attention(c: &mut Census, s: &Scope, a: &AttentionSpec, hidden: u64) {
    let h = Dim(hidden, HIDDEN);
    let (q_rows, kv_rows) = (Dim(a.q_width(), Q_ROWS), Dim(a.kv_width(), KV_ROWS));
    let d = Dim(a.head_dim, "head_dim");
    let own = a.kv == KvSource::Own;
    let mut projections = vec![("q", q_rows)];
    if own {
        projections.push(("k", kv_rows));
    }
    if own && a.values == ValueSource::Projection {
        projections.push(("v", kv_rows));
    }
    let mut fused = Vec::new();
    for &(p, rows) in &projections {
        let (to, from) = (format!("attn_{p}"), format!("self_attn.{p}_proj"));
        fused.push(c.linear(s, &to, &from, rows, h));
        if a.qkv_bias {
            c.bias(s, &to, &from, Class::Other, rows);
        }
    }
    if fused.len() > 1 {
        c.fuse(&format!("{}attn_qkv", s.to), &fused);
    }
    c.linear(s, "attn_output", "self_attn.o_proj", h, q_rows);
    if a.output_bias {
        c.bias(s, "attn_output", "self_attn.o_proj", Class::Other, h);
    }
    if a.qk_norm {
        c.norm(s, "attn_q_norm", "self_attn.q_norm", d);
        if own {
            c.norm(s, "attn_k_norm", "self_attn.k_norm", d);
        }
    }
}

/// Weights of a dense gated MLP under `mlp.`.
pub(super) fn mlp(c: &mut Census, s: &Scope, m: MlpSpec, hidden: u64) {
    let (h, w) = (Dim(hidden, HIDDEN), Dim(m.width, MLP));
    let gate = c.linear(s, "ffn_gate", "mlp.gate_proj", w, h);
    let up = c.linear(s, "ffn_up", "mlp.up_proj", w, h);
    c.fuse(&format!("{}ffn_gate_up", s.to), &[gate, up]);
    c.linear(s, "ffn_down", "mlp.down_proj", h, w);
    if m.bias {
        c.bias(s, "ffn_gate", "mlp.gate_proj", Class::Other, w);
        c.bias(s, "ffn_up", "mlp.up_proj", Class::Other, w);
        c.bias(s, "ffn_down", "mlp.down_proj", Class::Other, h);
    }
}

/// Norms of one layer: two for the llama kind, four for Gemma. Gemma's `post_attention_layernorm` follows attention,
/// llama's of the same name precedes the MLP.
pub(super) fn norms(c: &mut Census, s: &Scope, post_norms: bool, hidden: u64) {
    let h = Dim(hidden, HIDDEN);
    c.norm(s, "attn_norm", "input_layernorm", h);
    if post_norms {
        c.norm(s, "post_attention_norm", "post_attention_layernorm", h);
        c.norm(s, "ffn_norm", "pre_feedforward_layernorm", h);
        c.norm(s, "post_ffw_norm", "post_feedforward_layernorm", h);
    } else {
        c.norm(s, "ffn_norm", "post_attention_layernorm", h);
    }
}

/// Every weight of a decoder whose layers are norms, attention and what `inner` adds (MLP or experts).
pub(super) fn stack(
    c: &mut Census,
    spec: &TextSpec,
    prefix: &str,
    mut inner: impl FnMut(&mut Census, &Scope, &LayerSpec),
) {
    ends(c, spec, prefix);
    let from = format!("{prefix}layers.");
    for n in c.layers(&from, spec.layers.len() as u64, "num_hidden_layers") {
        let Some(layer) = usize::try_from(n).ok().and_then(|n| spec.layers.get(n)) else {
            continue;
        };
        let (from, to) = (format!("{from}{n}."), format!("blk.{n}."));
        let s = Scope {
            from: &from,
            to: &to,
            tower: Tower::Text,
            layer: i32::try_from(n).unwrap_or(i32::MAX),
        };
        norms(c, &s, layer.post_norms, spec.hidden_size);
        attention(c, &s, &layer.attention, spec.hidden_size);
        inner(c, &s, layer);
    }
}

/// The weights of a decoder with dense MLPs only.
pub(super) fn dense_weights(spec: &ModelSpec, c: &mut Census) {
    if let Some(prefix) = c.text_prefix(&TEXT_PREFIXES) {
        stack(c, &spec.text, prefix, |c, s, layer| {
            if let Some(m) = layer.mlp {
                mlp(c, s, m, spec.text.hidden_size);
            }
        });
    }
}
