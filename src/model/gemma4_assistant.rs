//! Gemma 4's draft heads (`Gemma4AssistantForCausalLM`, `Gemma4UnifiedAssistantForCausalLM`).
//!
//! A draft head runs beside its target: input rows are the target's embedding and hidden state, keys and values are
//! the target's. Its own embedding table is its head only, so `draft.output.weight` is the weight and
//! `draft.token_embd.weight` another name for it. All its weights carry `draft.`, whether it is converted alone or with
//! its target.

use crate::diag::{Diagnostic, Problems};

use super::census::{Census, Dim, Scope};
use super::config::Config;
use super::decoder::{self, HIDDEN, VOCAB};
use super::gemma4;
use super::spec::{AttentionSpec, DraftSpec, KvSource, ModelSpec, OrderedHead};
use super::weights::Tower;

const TARGET: &str = "backbone_hidden_size";
const CENTROIDS: &str = "num_centroids";

/// `model.` in published heads; nothing when saved from the inner module.
const PREFIXES: [&str; 2] = ["model.", ""];

pub(super) fn spec(root: &Config) -> ModelSpec {
    let text = root.text_section();
    let spec = gemma4::text_spec(root, &text, true);
    if !spec.tied_head {
        root.refuse("tie_word_embeddings", "is false; a draft head's embedding is its head");
    }
    if spec.per_layer_input.is_some() {
        text.refuse(
            "hidden_size_per_layer_input",
            "is not 0; a draft head has no per-layer inputs",
        );
    }
    let ordered = root.flag("use_ordered_embeddings").then(|| {
        let centroids = root.size(CENTROIDS);
        let top_k = root.size("centroid_intermediate_top_k");
        if text.states(VOCAB) && !spec.vocab_size.is_multiple_of(centroids) {
            let what = format!(
                "is {centroids}, which does not divide vocab_size {} evenly",
                spec.vocab_size
            );
            root.refuse(CENTROIDS, what);
        }
        if top_k > centroids && root.states(CENTROIDS) {
            root.refuse(
                "centroid_intermediate_top_k",
                format!("is {top_k} of {centroids} centroids"),
            );
        }
        OrderedHead { centroids, top_k }
    });
    let draft = DraftSpec { target_hidden_size: root.size(TARGET), ordered };
    ModelSpec { draft: Some(draft), ..decoder::text_model("gemma4_assistant", root, &text, spec) }
}

pub(super) fn weights(spec: &ModelSpec, c: &mut Census) {
    let Some(draft) = &spec.draft else { return };
    let Some(prefix) = c.text_prefix(&PREFIXES) else { return };
    gemma4::draft_ends(c, &spec.text, prefix);
    gemma4::layers(c, &spec.text, prefix, "draft.", Tower::Draft);
    let s = Scope { from: "", to: "draft.", tower: Tower::Draft, layer: -1 };
    let h = Dim(spec.text.hidden_size, HIDDEN);
    let target = draft.target_hidden_size;
    let double = Dim(target.saturating_mul(2), "2 × backbone_hidden_size");
    c.linear(&s, "nextn.pre_projection", "pre_projection", h, double);
    c.linear(&s, "nextn.post_projection", "post_projection", Dim(target, TARGET), h);
    if let Some(head) = &draft.ordered {
        let n = Dim(head.centroids, CENTROIDS);
        c.linear(&s, "masked_embd_centroids", "masked_embedding.centroids", n, h);
        let v = [Dim(spec.text.vocab_size, VOCAB)];
        c.integers(&s, "masked_embd_ordering", "masked_embedding.token_ordering", &v);
    }
}

/// Whether a draft head was made for a target: widths, vocabulary, and the heads of the layers whose keys and
/// values it reads (the target's last caching layer of each kind). Empty when they fit.
pub fn draft_mismatches(target: &ModelSpec, draft: &ModelSpec) -> Problems {
    let mut problems = Problems::new();
    let mut differ = |what: &str, of_draft: u64, of_target: u64| {
        if of_draft != of_target {
            problems.push(
                Diagnostic::new(
                    "draft",
                    format!("the draft head expects {what} {of_draft}, the model has {of_target}"),
                )
                .help("take the assistant that was published with this model"),
            );
        }
    };
    let Some(head) = &draft.draft else {
        problems.push(
            Diagnostic::new("draft", format!("`{}` is not a draft head", draft.model_type))
                .help("draft heads have model_type gemma4_assistant or gemma4_unified_assistant")
                .help("a full model that drafts with a cache of its own cannot be merged"),
        );
        return problems;
    };
    if target.family != "gemma4" {
        problems.push(
            Diagnostic::new(
                "draft",
                format!(
                    "the draft head reads the cache of a gemma4 model, this is {}",
                    target.family
                ),
            )
            .help("take the assistant that was published with this model"),
        );
        return problems;
    }
    differ("hidden size", head.target_hidden_size, target.text.hidden_size);
    differ("vocabulary", draft.text.vocab_size, target.text.vocab_size);
    let mut seen: Vec<bool> = Vec::new();
    for layer in &draft.text.layers {
        let a = &layer.attention;
        if seen.contains(&full(a)) {
            continue;
        }
        seen.push(full(a));
        let source = target
            .text
            .layers
            .iter()
            .map(|l| &l.attention)
            .rfind(|t| t.kv == KvSource::Own && full(t) == full(a));
        let kind = if full(a) { "full" } else { "sliding" };
        match source {
            None => differ(&format!("caching {kind} layers, at least"), 1, 0),
            Some(t) => {
                differ(&format!("key heads of {kind} layers"), a.kv_heads, t.kv_heads);
                differ(&format!("head width of {kind} layers"), a.head_dim, t.head_dim);
                let windows = (a.window().unwrap_or(0), t.window().unwrap_or(0));
                differ(&format!("window of {kind} layers"), windows.0, windows.1);
            }
        }
    }
    problems
}

fn full(a: &AttentionSpec) -> bool {
    a.window().is_none()
}
