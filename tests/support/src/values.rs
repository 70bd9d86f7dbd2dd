//! The values of a tiny model's tensors: a counter-based generator and one rule per kind of tensor.
//!
//! Everything is integer arithmetic or correctly rounded f64 (`+ - * /` and `sqrt`), so every machine computes the same
//! bytes:
//!
//! ```text
//! h      = fnv1a64(utf8("{seed}/{model}/{tensor}"))
//! z_i    = splitmix64_finalise(h + (i+1) * 0x9E3779B97F4A7C15)     i = 0, 1, … row-major, mod 2^64
//! g_i    = (sum of the four u16 lanes of z_i - 131070) / (65536 / sqrt 3)      about N(0, 1), f64
//! u_i    = (z_i >> 11) * 2^-53                                                 uniform in [0, 1), f64
//! value  = bf16_rne(f32(rule(g_i, u_i)))
//! ```
//!
//! The rules give each kind of tensor the spread that makes it matter to the model's output: clipping bounds that clip,
//! norms away from one, logits wide enough for a softcap.

use serde::Deserialize;

/// Parameters of one model's rules (`values` in `fixtures_spec.json`).
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ValueSpec {
    /// First part of every tensor's key.
    pub seed: u64,
    /// The model has norms behind its sublayers, as the Gemma family does.
    pub post_norm: bool,
    /// 1.0 where the model multiplies by `1 + w`, else 0.0.
    pub norm_offset: f64,
    /// Attention scores are not divided by `sqrt(head_dim)` (Gemma 4): the k norm carries that factor.
    pub unit_scale: bool,
    /// Mean of the final norm's factor.
    pub final_norm: f64,
    /// Spread of the embedding table, before `1/sqrt(hidden)`.
    pub embed_std: f64,
    /// Width of one layer's slice of the per-layer embeddings.
    pub ple_dim: u64,
}

/// FNV-1a, 64 bits.
pub fn fnv1a64(text: &str) -> u64 {
    text.bytes()
        .fold(0xCBF2_9CE4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3))
}

/// The `i`-th word of the stream with start value `h` (splitmix64 as a counter-based generator).
pub fn word(h: u64, i: u64) -> u64 {
    let mut z = h.wrapping_add(i.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn normal(z: u64) -> f64 {
    let lanes: u64 = (0..4).map(|k| (z >> (16 * k)) & 0xFFFF).sum();
    (lanes as f64 - 131_070.0) / (65536.0 / 3f64.sqrt())
}

fn uniform(z: u64) -> f64 {
    (z >> 11) as f64 * 2f64.powi(-53)
}

/// bf16 bits of an f32, ties to even. The rules give finite values only.
pub fn bf16(value: f32) -> u16 {
    let u = value.to_bits();
    (u.wrapping_add(0x7FFF + ((u >> 16) & 1)) >> 16) as u16
}

/// Bytes of one bf16 tensor, little-endian, row-major.
pub fn bf16_bytes(model: &str, name: &str, shape: &[u64], spec: &ValueSpec) -> Vec<u8> {
    let h = key(model, name, spec);
    let rule = Rule::of(name, shape, spec);
    (0..shape.iter().product())
        .flat_map(|i| bf16(rule.value(word(h, i)) as f32).to_le_bytes())
        .collect()
}

/// Bytes of one i64 tensor, little-endian: a permutation of `0..n`, the positions of the stream's words in ascending
/// order of the words.
pub fn permutation_bytes(model: &str, name: &str, shape: &[u64], spec: &ValueSpec) -> Vec<u8> {
    let h = key(model, name, spec);
    let mut order: Vec<u64> = (0..shape.iter().product()).collect();
    order.sort_by_key(|&i| (word(h, i), i));
    order.into_iter().flat_map(u64::to_le_bytes).collect()
}

fn key(model: &str, name: &str, spec: &ValueSpec) -> u64 {
    fnv1a64(&format!("{}/{model}/{name}", spec.seed))
}

/// How a tensor's values follow from the stream. The order of the operations is part of the definition: another order
/// rounds differently.
enum Rule {
    /// `mean + spread * u`
    Uniform { mean: f64, spread: f64 },
    /// `-(mean + spread * u)`
    NegativeUniform { mean: f64, spread: f64 },
    /// `mean + spread * g - offset`
    Normal { mean: f64, spread: f64, offset: f64 },
    /// `spread * g / divisor`
    Scaled { spread: f64, divisor: f64 },
    /// `factor * (1 + spread * g) - offset`
    Around { factor: f64, spread: f64, offset: f64 },
}

impl Rule {
    fn of(name: &str, shape: &[u64], spec: &ValueSpec) -> Rule {
        let leaf = name.rsplit('.').next().unwrap_or(name);
        let ends = |tail: &str| name.ends_with(tail);
        let columns = (shape.last().copied().unwrap_or(1) as f64).sqrt();
        let first = (shape.first().copied().unwrap_or(1) as f64).sqrt();
        // SigLIP's layer norms multiply by `w` in a model whose other norms multiply by `1 + w`.
        let tower = name.contains("vision_model.");
        let offset = if tower { 0.0 } else { spec.norm_offset };
        let scaled = |spread| Rule::Scaled { spread, divisor: columns };
        let plain = |spread| Rule::Scaled { spread, divisor: 1.0 };

        match leaf {
            "input_min" | "output_min" => return Rule::NegativeUniform { mean: 1.6, spread: 0.6 },
            "input_max" | "output_max" => return Rule::Uniform { mean: 1.6, spread: 0.6 },
            "layer_scalar" => return Rule::Uniform { mean: 0.55, spread: 0.5 },
            "per_dim_scale" | "std_bias" => return plain(0.5),
            "std_scale" => return Rule::Normal { mean: 0.5, spread: 0.1, offset: 0.0 },
            "position_embedding_table" | "pos_embedding" => return plain(0.3),
            _ => {}
        }
        if leaf == "per_expert_scale" || ends("router.scale") {
            return Rule::Normal { mean: 1.0, spread: 0.25, offset: 0.0 };
        }
        if ends("router.proj.weight") {
            return plain(1.5);
        }
        if ends("mlp.gate.weight") {
            return scaled(1.5);
        }
        if leaf == "bias" {
            return plain(0.1);
        }
        let last = ["model.norm", "model.language_model.norm", "language_model.model.norm"];
        if name.strip_suffix(".weight").is_some_and(|norm| last.contains(&norm)) {
            return Rule::Around { factor: spec.final_norm, spread: 0.1, offset };
        }
        if ends("self_attn.q_norm.weight") && !spec.unit_scale {
            return Rule::Around { factor: 2.0, spread: 0.15, offset };
        }
        if ends("self_attn.k_norm.weight") && spec.unit_scale {
            return Rule::Around { factor: 1.8 / first, spread: 0.15, offset: 0.0 };
        }
        if ends("position_embedding.weight") {
            return plain(0.3);
        }
        if tower && ends("self_attn.q_proj.weight") {
            return scaled(2.0);
        }
        if shape.len() == 1 && leaf == "weight" {
            return Rule::Normal { mean: 1.0, spread: 0.15, offset };
        }
        if name.contains("embed_tokens_per_layer") {
            return Rule::Scaled { spread: 1.0, divisor: (spec.ple_dim as f64).sqrt() };
        }
        if name.contains("embed_tokens") {
            return scaled(spec.embed_std);
        }
        if !spec.post_norm && (ends("self_attn.o_proj.weight") || ends("down_proj.weight")) {
            return scaled(3.0);
        }
        if !spec.post_norm && ends("self_attn.q_proj.weight") {
            return scaled(2.0);
        }
        if let [_, channels, height, width] = shape {
            let fan_in = channels * height * width;
            return Rule::Scaled { spread: 1.0, divisor: (fan_in as f64).sqrt() };
        }
        scaled(1.0)
    }

    fn value(&self, z: u64) -> f64 {
        match *self {
            Rule::Uniform { mean, spread } => mean + spread * uniform(z),
            Rule::NegativeUniform { mean, spread } => -(mean + spread * uniform(z)),
            Rule::Normal { mean, spread, offset } => mean + spread * normal(z) - offset,
            Rule::Scaled { spread, divisor } => spread * normal(z) / divisor,
            Rule::Around { factor, spread, offset } => factor * (1.0 + spread * normal(z)) - offset,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_is_fnv1a_and_splitmix64_as_published() {
        // FNV-1a test vector of draft-eastlake-fnv; first outputs of splitmix64 seeded with 1234567.
        assert_eq!(fnv1a64("foobar"), 0x8594_4171_F739_67E8);
        assert_eq!(word(1_234_567, 0), 6_457_827_717_110_365_317);
        assert_eq!(word(1_234_567, 1), 3_203_168_211_198_807_973);
    }

    #[test]
    fn bf16_rounds_ties_to_even() {
        assert_eq!(bf16(f32::from_bits(0x3F80_8000)), 0x3F80);
        assert_eq!(bf16(f32::from_bits(0x3F81_8000)), 0x3F82);
        assert_eq!(bf16(f32::from_bits(0x3F80_8001)), 0x3F81);
        assert_eq!(bf16(-0.0), 0x8000);
    }
}
