//! Reading of rotary embeddings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (earlier).

use super::config::Config;
use super::spec::{RopeScaling, RopeSpec};

/// Keys that some rope type knows. Any other key in a rope section would change the model unseen.
const KNOWN: [&str; 14] = [
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "partial_rotary_factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
];

/// Where a family keeps the numbers of one layer type.
pub(super) struct RopeKeys {
    /// Key in `rope_parameters` when that is split by layer type.
    pub layer_type: &'static str,
    /// Key of the base in configurations without `rope_parameters`.
    pub theta: &'static str,
    /// Base when no key states it, if transformers documents one for the family.
    pub default_theta: Option<f64>,
    /// Whether `rope_scaling` applies to this layer type.
    pub scaled: bool,
}

impl RopeKeys {
    /// All layers alike, base required.
    pub(super) const PLAIN: RopeKeys = RopeKeys {
        layer_type: "full_attention",
        theta: "rope_theta",
        default_theta: None,
        scaled: true,
    };
}

/// The rotation of heads `head_dim` wide.
pub(super) fn read(text: &Config, keys: &RopeKeys, head_dim: u64) -> RopeSpec {
    let mut rope = RopeSpec { theta: 1.0, rotary_dims: head_dim, scaling: RopeScaling::Default };
    if let Some(parameters) = text.section("rope_parameters") {
        let split = parameters.keys().any(|k| k.ends_with("_attention"));
        let section =
            if split { parameters.need_section(keys.layer_type) } else { Some(parameters) };
        if let Some(section) = section {
            rope.theta = section
                .opt_positive("rope_theta")
                .or_else(|| text.opt_positive(keys.theta))
                .or(keys.default_theta)
                .unwrap_or_else(|| section.positive("rope_theta"));
            scaling(&section, head_dim, &mut rope);
        }
    } else {
        rope.theta = match keys.default_theta {
            Some(default) => text.opt_positive(keys.theta).unwrap_or(default),
            None => text.positive(keys.theta),
        };
        if keys.scaled {
            match text.section("rope_scaling") {
                Some(section) => scaling(&section, head_dim, &mut rope),
                None if text.states("rope_scaling") => {
                    text.refuse("rope_scaling", "has to be an object or null");
                }
                None => {}
            }
        }
    }
    let partial = text.opt_positive("partial_rotary_factor").unwrap_or(1.0);
    if partial != 1.0 && rope.rotary_dims == head_dim {
        text.refuse(
            "partial_rotary_factor",
            format!("is {partial}; this family rotates whole heads"),
        );
    }
    rope
}

fn scaling(section: &Config, head_dim: u64, rope: &mut RopeSpec) {
    for key in section.keys().filter(|k| !KNOWN.contains(k)) {
        section.refuse(key, "is not a rope parameter that radpack knows, so it cannot be dropped");
    }
    let key = if section.states("rope_type") { "rope_type" } else { "type" };
    let kind = section.opt_word(key).unwrap_or("default");
    let partial = section.opt_positive("partial_rotary_factor").unwrap_or(1.0);
    if kind != "proportional" && partial != 1.0 {
        section.refuse(
            "partial_rotary_factor",
            format!("is {partial}; rope type `{kind}` rotates whole heads here"),
        );
    }
    rope.scaling = match kind {
        "default" => RopeScaling::Default,
        "linear" => RopeScaling::Linear { factor: section.positive("factor") },
        "proportional" => {
            if partial > 1.0 {
                section.refuse("partial_rotary_factor", format!("is {partial}; at most 1"));
            }
            // Angles: floor(partial · head_dim / 2), as transformers computes `int(p * d // 2)`.
            rope.rotary_dims = 2 * (partial.min(1.0) * head_dim as f64 / 2.0).floor() as u64;
            RopeScaling::Proportional { factor: section.opt_positive("factor").unwrap_or(1.0) }
        }
        "llama3" => RopeScaling::Llama3 {
            factor: section.positive("factor"),
            low: section.positive("low_freq_factor"),
            high: section.positive("high_freq_factor"),
            original_positions: section.size("original_max_position_embeddings"),
        },
        "yarn" => yarn(section),
        other => {
            section.refuse_help(
                key,
                format!("is `{other}`, which radpack does not compute"),
                "known rope types: default, linear, llama3, proportional and yarn",
            );
            RopeScaling::Default
        }
    };
}

/// YaRN with the defaults of transformers 5.24 (`_compute_yarn_parameters`): beta_fast 32, beta_slow 1, truncate
/// true; the factor on cos and sin from `mscale` and `mscale_all_dim` when both are given, else 0.1·ln(factor) + 1.
fn yarn(section: &Config) -> RopeScaling {
    let factor = section.positive("factor");
    let magnitude =
        |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    let attention_factor = section.opt_positive("attention_factor").unwrap_or_else(|| {
        match (section.opt_positive("mscale"), section.opt_positive("mscale_all_dim")) {
            (Some(m), Some(all)) => magnitude(m) / magnitude(all),
            _ => magnitude(1.0),
        }
    });
    RopeScaling::Yarn {
        factor,
        original_positions: section.size("original_max_position_embeddings"),
        beta_fast: section.opt_positive("beta_fast").unwrap_or(32.0),
        beta_slow: section.opt_positive("beta_slow").unwrap_or(1.0),
        truncate: section.flag_or("truncate", true),
        attention_factor,
    }
}
