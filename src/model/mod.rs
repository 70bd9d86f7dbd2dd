//! Foundation: what a model is ([`ModelSpec`]) and which weights it is made of ([`WeightTable`]).
//!
//! [`read`] takes a configuration and the tensors of a checkpoint (names, types and shapes, no values) and gives
//! both, or every problem at once. A family is one file plus its line in `family.rs`.
//!
//! # Logical names
//!
//! Names are llama.cpp's where it has one. `N` is a layer, `E` an expert.
//!
//! | logical name | checkpoint (Hugging Face) |
//! |---|---|
//! | `token_embd.weight`, `output_norm.weight`, `output.weight` | `embed_tokens.weight`, `norm.weight`, `lm_head.weight` (or the embedding, tied) |
//! | `blk.N.attn_{q,k,v,output}.{weight,bias}` | `self_attn.{q,k,v,o}_proj` |
//! | `blk.N.attn_{q,k}_norm.weight` | `self_attn.{q,k}_norm` |
//! | `blk.N.attn_norm.weight` | `input_layernorm` |
//! | `blk.N.ffn_norm.weight` | llama kind: `post_attention_layernorm`; Gemma: `pre_feedforward_layernorm` |
//! | `blk.N.post_attention_norm.weight`, `blk.N.post_ffw_norm.weight` | Gemma: `post_attention_layernorm`, `post_feedforward_layernorm` |
//! | `blk.N.ffn_{gate,up,down}.{weight,bias}` | `mlp.{gate,up,down}_proj` |
//! | `blk.N.ffn_gate_inp.weight` | `mlp.gate` (Qwen), `router.proj` (Gemma 4) |
//! | `blk.N.ffn_gate_inp.scale`, `blk.N.ffn_down_exps.scale` | Gemma 4: `router.scale`, `router.per_expert_scale` |
//! | `blk.N.ffn_gate_up_exps.E.weight` (slot 0), `blk.N.ffn_down_exps.E.weight` (slot 1) | `mlp.experts.E.*` or index E of `experts.{gate_up_proj,down_proj}`; gate rows first |
//! | `blk.N.{post_ffw_norm_1,post_ffw_norm_2,pre_ffw_norm_2}.weight` | Gemma 4: `{post_feedforward_layernorm_1,…_2,pre_feedforward_layernorm_2}` |
//! | `blk.N.layer_output_scale.weight` | Gemma 4: `layer_scalar` |
//! | `per_layer_token_embd.weight`, `per_layer_model_proj.weight`, `per_layer_proj_norm.weight` | Gemma 4 E: `embed_tokens_per_layer`, `per_layer_model_projection`, `per_layer_projection_norm` |
//! | `blk.N.{inp_gate,proj,post_norm}.weight` | Gemma 4 E: `per_layer_input_gate`, `per_layer_projection`, `post_per_layer_input_norm` |
//! | `vision.blk.N.…` | Gemma 4: as text; Gemma 3 (SigLIP): `attn_norm`, `ffn_norm`, `ffn_up`, `ffn_down` = `layer_norm1`, `layer_norm2`, `fc1`, `fc2` |
//! | `vision.{patch_embd,position_embd}.weight`, `vision.std_{bias,scale}` | `patch_embedder.{input_proj,position_embedding_table}`, `std_{bias,scale}` |
//! | `vision.{patch_norm_1,patch_embd,patch_norm_2,position_embd,position_norm}` | unified: `vision_embedder.{patch_ln1,patch_dense,patch_ln2,pos_embedding,pos_norm}` |
//! | `….{input,output}_{min,max}` | bounds of a clipped linear, beside its `….weight` |
//! | `audio.conv.I.weight`, `audio.conv_norm.I.weight`, `audio.{input,output}_proj` | `subsample_conv_projection.layerI.{conv,norm}`, `….input_proj_linear`, `output_proj` |
//! | `audio.blk.N.ffn_{norm,up,down,post_norm}[_1]` | `feed_forward1` (`feed_forward2`): `pre_layer_norm`, `ffw_layer_1`, `ffw_layer_2`, `post_layer_norm` |
//! | `audio.blk.N.attn_{pre_norm,q,k,v,k_rel,output,post_norm}`, `….per_dim_scale` | `norm_pre_attn`, `self_attn.{q,k,v}_proj`, `relative_k_proj`, `post`, `norm_post_attn`, `per_dim_scale` |
//! | `audio.blk.N.{conv_pre_norm,conv_pw1,conv_dw,conv_norm,conv_pw2,output_norm}` | `lconv1d.{pre_layer_norm,linear_start,depthwise_conv1d,conv_norm,linear_end}`, `norm_out` |
//! | `mm.{vision,audio}.weight`, `mm.vision_norm.weight` | `embed_{vision,audio}.embedding_projection`; Gemma 3: `multi_modal_projector.{mm_input_projection_weight,mm_soft_emb_norm}` |
//! | `draft.…` | a draft head: its decoder as above (`draft.output.weight` is its embedding, which serves as head only), `draft.nextn.{pre,post}_projection.weight`, `draft.masked_embd_{centroids.weight,ordering}` |
//!
//! Layers number the decoder only: weights of every other tower, and of draft heads, stand at model level (-1).

mod census;
mod config;
mod decoder;
mod family;
mod gemma3;
mod gemma4;
mod gemma4_assistant;
mod gemma4_towers;
mod llama;
mod mistral;
mod names;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod rope;
mod spec;
mod weights;
mod weights_only;

pub use family::supported_families;
pub use gemma4_assistant::draft_mismatches;
pub use spec::{
    Activation, AttentionKind, AttentionSpec, AudioSpec, AudioTower, DraftSpec, ImageAttention,
    KvSource, LayerSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec, OrderedHead, PerLayerInput,
    ProjectorSpec, RopeScaling, RopeSpec, RouterKind, SiglipTower, SpecialTokens, TextSpec,
    ValueSource, VisionEmbedder, VisionSpec, VisionTower,
};
pub use weights::{Class, DRAFT_PREFIX, Origin, Part, Stored, Tower, Weight, WeightTable};
pub use weights_only::weights_only;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use crate::diag::{self, Diagnostic, Failure, FailureKind, SourceText};
use crate::tensor::TensorInfo;

use census::Census;
use config::{Config, Report};
use family::Family;

/// A model and its weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// What it is.
    pub spec: ModelSpec,
    /// What it is made of.
    pub table: WeightTable,
}

/// Reads a model: `config` is the checkpoint's `config.json`, `config_text` its text for messages that point into
/// it, `tensors` every tensor of the checkpoint.
///
/// # Errors
/// [`FailureKind::Refused`]: an unknown architecture; or every key that is missing or wrong in the configuration;
/// or, with a sound configuration, every tensor that is missing, superfluous or of another shape or kind than the
/// configuration says.
pub fn read(
    config: &Value,
    config_text: Option<&Arc<SourceText>>,
    tensors: &BTreeMap<String, TensorInfo>,
) -> diag::Result<Model> {
    read_as(config, config_text, tensors, &str::to_owned)
}

/// As [`read`], for a checkpoint whose user knows the tensors by other names: `shown` gives them for messages.
///
/// # Errors
/// As [`read`].
pub fn read_as(
    config: &Value,
    config_text: Option<&Arc<SourceText>>,
    tensors: &BTreeMap<String, TensorInfo>,
    shown: &dyn Fn(&str) -> String,
) -> diag::Result<Model> {
    let (spec, family) = spec_and_family(config, config_text)?;
    let mut census = Census::new(tensors, shown);
    (family.weights)(&spec, &mut census);
    let table = census.finish(family.name)?;
    Ok(Model { spec, table })
}

/// Reads the configuration alone, for estimates that need no tensors.
///
/// # Errors
/// As [`read`], but for the tensors.
pub fn read_spec(config: &Value, config_text: Option<&Arc<SourceText>>) -> diag::Result<ModelSpec> {
    spec_and_family(config, config_text).map(|(spec, _)| spec)
}

fn spec_and_family(
    config: &Value,
    config_text: Option<&Arc<SourceText>>,
) -> diag::Result<(ModelSpec, &'static Family)> {
    let Some(object) = config.as_object() else {
        let problem = Diagnostic::new("config", "config.json has to be a JSON object");
        return Err(Failure::one(FailureKind::Refused, "the configuration is unusable", problem));
    };
    let report = Report::new(config_text);
    let root = Config::root(object, &report);
    let Some(family) = find_family(&root) else {
        let headline = "this architecture is not known";
        return Err(report
            .into_problems()
            .finish(FailureKind::Refused, headline, ())
            .err()
            .unwrap_or_else(|| Failure::plain(FailureKind::Refused, headline)));
    };
    let spec = (family.spec)(&root);
    drop(root);
    let headline = format!(
        "the configuration of this {} model is incomplete or contradicts itself",
        family.name
    );
    let spec = report.into_problems().finish(FailureKind::Refused, &headline, spec)?;
    Ok((spec, family))
}

/// The family of a configuration: by `model_type`, else by that of the nested text model, else by class name.
/// Reports why there is none.
fn find_family(root: &Config) -> Option<&'static Family> {
    let model_type = root.opt_word("model_type");
    let text = root.text_section();
    let inner = if text.is_root() { None } else { text.opt_word("model_type") };
    let class = root.words("architectures").and_then(|a| a.first().copied());
    let known = model_type
        .and_then(family::by_model_type)
        .or_else(|| inner.and_then(family::by_model_type))
        .or_else(|| class.filter(|_| model_type.is_none()).and_then(family::by_class));
    let supported = format!("families with graphs: {}", diag::list(&supported_families(), 99));
    let weights_only = "`--weights-only` converts any checkpoint without knowing its architecture";
    let Some(family) = known else {
        match (model_type, class) {
            (None, None) => root.missing("model_type"),
            (Some(t), _) => {
                let name = class.map(|c| format!(" ({c})")).unwrap_or_default();
                root.refuse_helps(
                    "model_type",
                    format!("is `{t}`{name}, an architecture that is not known"),
                    &[&supported, weights_only],
                );
            }
            (None, Some(c)) => {
                root.refuse_helps(
                    "architectures",
                    format!("names `{c}`, which is not known"),
                    &[&supported, weights_only],
                );
            }
        }
        return None;
    };
    // A wrapper around a known text model may carry any class name; the census decides what it holds.
    let direct = model_type.is_none_or(|t| family::by_model_type(t).is_some());
    if let Some(class) = class.filter(|c| direct && !family.knows_class(c)) {
        root.refuse_helps(
            "architectures",
            format!(
                "names `{class}`, which is not the {} decoder that predicts tokens",
                family.name
            ),
            &[weights_only],
        );
        return None;
    }
    Some(family)
}
