//! The registry of families: one line each.

use super::census::Census;
use super::config::Config;
use super::spec::ModelSpec;
use super::{gemma3, gemma4, gemma4_assistant, llama, mistral, qwen2, qwen3, qwen3_moe};

/// What a family knows.
pub(super) struct Family {
    /// Name, also of the spec.
    pub name: &'static str,
    /// Values of `model_type`, at the top level or in the text section.
    pub model_types: &'static [&'static str],
    /// Start of the class names in `architectures` that compute what the family computes.
    pub classes: &'static [&'static str],
    /// Reads the configuration.
    pub spec: fn(&Config) -> ModelSpec,
    /// Claims the tensors.
    pub weights: fn(&ModelSpec, &mut Census),
}

/// Every family.
#[rustfmt::skip]
pub(super) const FAMILIES: &[Family] = &[
    Family { name: "gemma4", model_types: &["gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"], classes: &["Gemma4", "Gemma4Text", "Gemma4Unified", "Gemma4UnifiedText"], spec: gemma4::spec, weights: gemma4::weights },
    Family { name: "gemma4_assistant", model_types: &["gemma4_assistant", "gemma4_unified_assistant"], classes: &["Gemma4Assistant", "Gemma4UnifiedAssistant"], spec: gemma4_assistant::spec, weights: gemma4_assistant::weights },
    Family { name: "gemma3", model_types: &["gemma3", "gemma3_text"], classes: &["Gemma3", "Gemma3Text"], spec: gemma3::spec, weights: gemma3::weights },
    Family { name: "llama", model_types: &["llama"], classes: &["Llama"], spec: llama::spec, weights: llama::weights },
    Family { name: "mistral", model_types: &["mistral"], classes: &["Mistral"], spec: mistral::spec, weights: mistral::weights },
    Family { name: "qwen2", model_types: &["qwen2"], classes: &["Qwen2"], spec: qwen2::spec, weights: qwen2::weights },
    Family { name: "qwen3", model_types: &["qwen3"], classes: &["Qwen3"], spec: qwen3::spec, weights: qwen3::weights },
    Family { name: "qwen3_moe", model_types: &["qwen3_moe"], classes: &["Qwen3Moe"], spec: qwen3_moe::spec, weights: qwen3_moe::weights },
];

/// What follows the family's part of a class name when the class predicts tokens, or is the inner module of one
/// that does.
const TASKS: [&str; 3] = ["ForCausalLM", "ForConditionalGeneration", "Model"];

impl Family {
    /// Whether a class of that name computes what the family computes.
    pub(super) fn knows_class(&self, class: &str) -> bool {
        self.classes.iter().any(|c| class.strip_prefix(c).is_some_and(|t| TASKS.contains(&t)))
    }
}

/// The family of a `model_type`.
pub(super) fn by_model_type(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|f| f.model_types.contains(&model_type))
}

/// The family of a class name.
pub(super) fn by_class(class: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|f| f.knows_class(class))
}

/// Names of the families that convert with graphs, for messages and listings.
pub fn supported_families() -> Vec<&'static str> {
    FAMILIES.iter().map(|f| f.name).collect()
}
