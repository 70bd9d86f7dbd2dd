//! The configuration that a GGUF file's metadata stand for, as the `config.json` that its family reads.
//!
//! Keys are those of gguf 0.19's `Keys`; what is not in the file follows from what llama.cpp computes without it:
//!
//! | not in the file | is |
//! |---|---|
//! | `attention.head_count_kv`, `attention.key_length` | as many as query heads, width / heads |
//! | `rope.freq_base` | 10000 |
//! | `vocab_size` | rows of `token_embd.weight` |
//! | whether the head is tied | there is no `output.weight` |
//! | biases | those that layer 0 has |
//! | parameters of Llama 3's rope scaling | those that give the factors of `rope_freqs.weight` |
//! | Gemma 3: local rope base, full layers, score scale | 10000, every sixth, `key_length` (27B with 62 layers: width / heads) |
//! | Qwen3 with experts | every layer has them, weights of those chosen are normalised |
//! | Gemma 4: values of full layers, experts | keys where a full layer has no `attn_v`, where `expert_count` is above 0 |

use std::collections::BTreeMap;

use serde_json::{Map, Number, Value as Json, json};

use super::header::{Header, Value};
use super::names::Names;
use crate::diag::{self, Diagnostic, Problems};
use crate::tensor::TensorInfo;

/// A model that is read: its name in `general.architecture`, its tensors' names, how its configuration is made.
pub(super) struct Architecture {
    pub name: &'static str,
    pub names: Names,
    /// Whether rows of q and k lie in llama.cpp's order.
    pub pairs: bool,
    /// Whether 1 was added to the norms.
    pub norms_plus_one: bool,
    config: fn(&mut Reading<'_>) -> Map<String, Json>,
}

/// Every architecture that is read.
#[rustfmt::skip]
pub(super) const ARCHITECTURES: [Architecture; 6] = [
    Architecture { name: "llama", names: Names::Llama, pairs: true, norms_plus_one: false, config: llama },
    Architecture { name: "qwen2", names: Names::Llama, pairs: false, norms_plus_one: false, config: qwen2 },
    Architecture { name: "qwen3", names: Names::Llama, pairs: false, norms_plus_one: false, config: qwen3 },
    Architecture { name: "qwen3moe", names: Names::Llama, pairs: false, norms_plus_one: false, config: qwen3_moe },
    Architecture { name: "gemma3", names: Names::Gemma, pairs: false, norms_plus_one: true, config: gemma3 },
    Architecture { name: "gemma4", names: Names::Gemma4, pairs: false, norms_plus_one: false, config: gemma4 },
];

/// Original context lengths that Llama 3's rope factors are compared with: what llama.cpp's converter assumes, then
/// every power of two from 32 up.
const CONTEXTS: [u64; 17] = [
    8192, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16_384, 32_768, 65_536, 131_072, 262_144,
    524_288, 1_048_576, 2_097_152,
];

/// Largest relative difference between a stored factor and the computed one: converters compute in f32.
const FACTOR_TOLERANCE: f64 = 1e-4;

/// The factor by which llama.cpp stops the rotation of a pair: its angle becomes 0 in f32.
const STILL: f32 = 1e29;

/// The metadata while they are read.
pub(super) struct Reading<'h> {
    /// Name of the file in messages.
    pub shown: &'h str,
    pub architecture: &'h str,
    pub header: &'h Header,
    /// Tensors of all files.
    pub tensors: &'h BTreeMap<String, TensorInfo>,
    /// Values of `rope_freqs.weight`, if there is one.
    pub rope_freqs: Option<Vec<f32>>,
    pub problems: Problems,
}

/// The configuration of an architecture.
pub(super) fn read(architecture: &Architecture, reading: &mut Reading<'_>) -> Map<String, Json> {
    (architecture.config)(reading)
}

impl Reading<'_> {
    fn problem(&mut self, message: String) {
        self.problems.push(Diagnostic::new("gguf", format!("{}: {message}", self.shown)));
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn wrong(&mut self, key: &str, what: &str) {
        let key = self.key(key);
        self.problem(format!("`{key}` {what}"));
    }

    fn missing(&mut self, key: &str) {
        let key = self.key(key);
        self.problem(format!("`{key}` is missing"));
    }

    fn value(&self, key: &str) -> Option<&Value> {
        self.header.pairs.get(&self.key(key))
    }

    /// A whole number, or one for every layer.
    fn numbers(&mut self, key: &str) -> Option<Vec<u64>> {
        let whole = |n: i64| u64::try_from(n).ok();
        let found = match self.value(key)? {
            Value::Unsigned(n) => Some(vec![*n]),
            Value::Signed(n) => whole(*n).map(|n| vec![n]),
            Value::Integers(list) => list.iter().map(|&n| whole(n)).collect(),
            _ => None,
        };
        if found.is_none() {
            self.wrong(key, "is no whole number of 0 or more");
        }
        found
    }

    /// A whole number that is one for all layers.
    fn opt(&mut self, key: &str) -> Option<u64> {
        let numbers = self.numbers(key)?;
        match numbers.split_first() {
            Some((first, rest)) if rest.iter().all(|n| n == first) => Some(*first),
            _ => {
                let shown = diag::list(&numbers, 8);
                self.wrong(key, &format!("differs by layer ({shown}); this family has one"));
                None
            }
        }
    }

    fn size(&mut self, key: &str) -> u64 {
        let present = self.value(key).is_some();
        match self.opt(key) {
            Some(n) => n,
            None => {
                if !present {
                    self.missing(key);
                }
                0
            }
        }
    }

    /// A floating-point number, as the decimal that its f32 was written for.
    fn float(&mut self, key: &str) -> Option<Json> {
        let found = match self.value(key)? {
            Value::F32(x) => x.to_string().parse::<f64>().ok().and_then(Number::from_f64),
            Value::F64(x) => Number::from_f64(*x),
            _ => None,
        };
        if found.is_none() {
            self.wrong(key, "is no finite floating-point number");
        }
        found.map(Json::Number)
    }

    fn need_float(&mut self, key: &str) -> Json {
        if self.value(key).is_none() {
            self.missing(key);
        }
        self.float(key).unwrap_or(Json::Null)
    }

    fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    fn rows(&mut self, tensor: &str) -> u64 {
        match self.tensors.get(tensor).map(|info| info.shape.extents()) {
            Some(&[rows, _]) => rows,
            Some(_) => 0,
            None => {
                self.problem(format!("tensor `{tensor}` is missing"));
                0
            }
        }
    }

    /// Keys that all families share. `head_dim` is the width of a head.
    fn base(&mut self, model_type: &str, class: &str) -> Map<String, Json> {
        let mut out = Map::new();
        let mut put = |key: &str, value: Json| drop(out.insert(key.to_owned(), value));
        put("architectures", json!([class]));
        put("model_type", json!(model_type));
        put("num_hidden_layers", json!(self.size("block_count")));
        put("hidden_size", json!(self.size("embedding_length")));
        put("num_attention_heads", json!(self.size("attention.head_count")));
        put("max_position_embeddings", json!(self.size("context_length")));
        put("rms_norm_eps", self.need_float("attention.layer_norm_rms_epsilon"));
        put("vocab_size", json!(self.rows("token_embd.weight")));
        put("tie_word_embeddings", json!(!self.has("output.weight")));
        for (name, key) in
            [("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")]
        {
            let found = self.header.pairs.get(&format!("tokenizer.ggml.{name}_token_id"));
            if let Some(Value::Unsigned(id)) = found {
                put(key, json!(id));
            }
        }
        out
    }

    /// The width of a head, which queries, keys and values share.
    fn head_dim(&mut self, hidden: u64, heads: u64) -> u64 {
        let derived = hidden.checked_div(heads).unwrap_or(0);
        let key = self.opt("attention.key_length").unwrap_or(derived);
        let value = self.opt("attention.value_length").unwrap_or(key);
        if key != value {
            let what =
                format!("is {key}, `attention.value_length` {value}; this family has one width");
            self.wrong("attention.key_length", &what);
        }
        if let Some(rotary) = self.opt("rope.dimension_count")
            && rotary != key
        {
            let what = format!("is {rotary}; this family rotates whole heads of {key}");
            self.wrong("rope.dimension_count", &what);
        }
        key
    }

    /// A decoder whose layers are all alike: its widths, and a rotation of whole heads.
    fn plain(&mut self, model_type: &str, class: &str) -> Map<String, Json> {
        let mut out = self.base(model_type, class);
        let number = |out: &Map<String, Json>, key: &str| {
            out.get(key).and_then(Json::as_u64).unwrap_or_default()
        };
        let heads = number(&out, "num_attention_heads");
        let head_dim = self.head_dim(number(&out, "hidden_size"), heads);
        let kv_heads = self.opt("attention.head_count_kv").unwrap_or(heads);
        let theta = self.float("rope.freq_base").unwrap_or(json!(10_000.0));
        out.insert("hidden_act".into(), json!("silu"));
        out.insert("intermediate_size".into(), json!(self.size("feed_forward_length")));
        out.insert("num_key_value_heads".into(), json!(kv_heads));
        out.insert("head_dim".into(), json!(head_dim));
        let scaling = self.scaling(theta.as_f64().unwrap_or(1.0), head_dim);
        out.insert("rope_theta".into(), theta);
        out.insert("rope_scaling".into(), scaling);
        out
    }

    /// `rope_scaling`: what the keys say, or what the factors of `rope_freqs.weight` stand for.
    fn scaling(&mut self, theta: f64, head_dim: u64) -> Json {
        let kind = match self.value("rope.scaling.type") {
            Some(Value::Text(kind)) => kind.clone(),
            Some(_) => {
                self.wrong("rope.scaling.type", "is no text");
                return Json::Null;
            }
            // Files of 2023 have the factor of a linear scaling only.
            None if self.value("rope.scale_linear").is_some() => "linear".to_owned(),
            None => "none".to_owned(),
        };
        let factors = self.rope_freqs.clone().unwrap_or_default();
        // None of an odd form: they are there, and what they say is not known.
        let unread = self.rope_freqs.is_some() && factors.is_empty();
        if self.rope_freqs.is_some() && kind != "none" {
            let what = format!("is `{kind}`, and `rope_freqs.weight` scales too");
            self.wrong("rope.scaling.type", &what);
        }
        match kind.as_str() {
            "none" if !unread && factors.iter().all(|f| *f == 1.0) => Json::Null,
            "none" => match llama3(&factors, theta, head_dim) {
                Some(scaling) => scaling,
                None => {
                    let n = factors.len();
                    self.problem(format!(
                        "`rope_freqs.weight` holds {n} factors that Llama 3's rope scaling does not give for heads of \
                         {head_dim} and a base of {theta}"
                    ));
                    Json::Null
                }
            },
            "linear" => {
                let old = self.float("rope.scale_linear");
                let factor = match self.value("rope.scaling.factor") {
                    None if old.is_some() => old.unwrap_or(Json::Null),
                    _ => self.need_float("rope.scaling.factor"),
                };
                json!({"rope_type": "linear", "factor": factor})
            }
            "yarn" => {
                let mut out = Map::new();
                out.insert("rope_type".into(), json!("yarn"));
                out.insert("factor".into(), self.need_float("rope.scaling.factor"));
                let original = self.size("rope.scaling.original_context_length");
                out.insert("original_max_position_embeddings".into(), json!(original));
                for (from, to) in [
                    ("yarn_attn_factor", "attention_factor"),
                    ("yarn_beta_fast", "beta_fast"),
                    ("yarn_beta_slow", "beta_slow"),
                ] {
                    if let Some(number) = self.float(&format!("rope.scaling.{from}")) {
                        out.insert(to.into(), number);
                    }
                }
                Json::Object(out)
            }
            other => {
                let what = format!("is `{other}`; none, linear and yarn are read");
                self.wrong("rope.scaling.type", &what);
                Json::Null
            }
        }
    }

    fn no_experts(&mut self) {
        if let Some(n) = self.opt("expert_count").filter(|n| *n > 0) {
            self.wrong(
                "expert_count",
                &format!("is {n}; of this architecture dense models are read"),
            );
        }
    }
}

/// Llama 3's rope scaling whose factors for `theta` and `head_dim` are these. llama.cpp's converter computes them with
/// the factors 1 and 4 for low and high frequencies, which all published models have; several parameters may give the
/// same factors, which are all that a rotation sees.
fn llama3(factors: &[f32], theta: f64, head_dim: u64) -> Option<Json> {
    const LOW: f64 = 1.0;
    const HIGH: f64 = 4.0;
    if factors.len() as u64 != head_dim / 2 {
        return None;
    }
    let factor = factors.iter().copied().reduce(f32::max).filter(|f| f.is_finite() && *f > 1.0)?;
    let factor: f64 = factor.to_string().parse().ok()?;
    let fits = |context: u64| {
        let context = context as f64;
        factors.iter().enumerate().all(|(i, &stored)| {
            let wave = std::f64::consts::TAU * theta.powf(2.0 * i as f64 / head_dim as f64);
            let computed = if wave < context / HIGH {
                1.0
            } else if wave > context / LOW {
                factor
            } else {
                let smooth = (context / wave - LOW) / (HIGH - LOW);
                1.0 / ((1.0 - smooth) / factor + smooth)
            };
            (f64::from(stored) - computed).abs() <= computed * FACTOR_TOLERANCE
        })
    };
    let context = CONTEXTS.into_iter().find(|c| fits(*c))?;
    Some(json!({
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": context,
    }))
}

fn llama(r: &mut Reading<'_>) -> Map<String, Json> {
    r.no_experts();
    let mut out = r.plain("llama", "LlamaForCausalLM");
    out.insert("attention_bias".into(), json!(r.has("blk.0.attn_q.bias")));
    out.insert("mlp_bias".into(), json!(r.has("blk.0.ffn_gate.bias")));
    out
}

fn qwen2(r: &mut Reading<'_>) -> Map<String, Json> {
    r.plain("qwen2", "Qwen2ForCausalLM")
}

fn qwen3(r: &mut Reading<'_>) -> Map<String, Json> {
    let mut out = r.plain("qwen3", "Qwen3ForCausalLM");
    out.insert("attention_bias".into(), json!(r.has("blk.0.attn_q.bias")));
    out
}

fn qwen3_moe(r: &mut Reading<'_>) -> Map<String, Json> {
    let mut out = r.plain("qwen3_moe", "Qwen3MoeForCausalLM");
    out.insert("attention_bias".into(), json!(r.has("blk.0.attn_q.bias")));
    out.insert("num_experts".into(), json!(r.size("expert_count")));
    out.insert("num_experts_per_tok".into(), json!(r.size("expert_used_count")));
    out.insert("moe_intermediate_size".into(), json!(r.size("expert_feed_forward_length")));
    out.insert("norm_topk_prob".into(), json!(true));
    out.insert("decoder_sparse_step".into(), json!(1));
    out.insert("mlp_only_layers".into(), json!([]));
    out
}

fn gemma3(r: &mut Reading<'_>) -> Map<String, Json> {
    /// Layers of the 27B model, whose scores are scaled by the width of the model over its heads.
    const LAYERS_27B: u64 = 62;
    let mut out = r.plain("gemma3_text", "Gemma3ForCausalLM");
    out.remove("hidden_act");
    out.insert("hidden_activation".into(), json!("gelu_pytorch_tanh"));
    out.insert("sliding_window".into(), json!(r.size("attention.sliding_window")));
    out.insert("sliding_window_pattern".into(), json!(6));
    let local = r.float("rope.freq_base_swa").unwrap_or(json!(10_000.0));
    out.insert("rope_local_base_freq".into(), local);
    if r.value("rope.freq_base").is_none() {
        // Gemma 3's global base, which llama.cpp's converter always writes.
        r.missing("rope.freq_base");
    }
    let number = |key: &str| out.get(key).and_then(Json::as_u64).unwrap_or_default();
    let scalar = if number("num_hidden_layers") == LAYERS_27B {
        number("hidden_size").checked_div(number("num_attention_heads")).unwrap_or(0)
    } else {
        number("head_dim")
    };
    out.insert("query_pre_attn_scalar".into(), json!(scalar));
    let softcap = r.float("final_logit_softcapping").unwrap_or(Json::Null);
    out.insert("final_logit_softcapping".into(), softcap);
    out
}

fn gemma4(r: &mut Reading<'_>) -> Map<String, Json> {
    let mut out = r.base("gemma4_text", "Gemma4ForCausalLM");
    let layers = out.get("num_hidden_layers").and_then(Json::as_u64).unwrap_or_default();
    let windows: Vec<bool> = match r.value("attention.sliding_window_pattern") {
        Some(Value::Integers(list)) if list.len() as u64 == layers => {
            list.iter().map(|n| *n != 0).collect()
        }
        _ => {
            let what = format!("is no list of {layers} truth values, one a layer");
            r.wrong("attention.sliding_window_pattern", &what);
            Vec::new()
        }
    };
    let shared = r.size("attention.shared_kv_layers");
    let own = usize::try_from(layers.saturating_sub(shared)).unwrap_or(usize::MAX);
    let (head_dim, global) = (r.size("attention.key_length_swa"), r.size("attention.key_length"));
    let heads = r.numbers("attention.head_count_kv").unwrap_or_default();
    let of_kind = |r: &mut Reading<'_>, window: bool| {
        let mut found: Vec<u64> = windows
            .iter()
            .enumerate()
            .filter(|(_, w)| **w == window)
            .filter_map(|(n, _)| heads.get(n).or(heads.first().filter(|_| heads.len() == 1)))
            .copied()
            .collect();
        found.sort_unstable();
        found.dedup();
        if found.len() > 1 {
            r.wrong("attention.head_count_kv", "differs among layers of one kind");
        }
        found.first().copied()
    };
    let (local_heads, global_heads) = (of_kind(r, true), of_kind(r, false));
    if heads.is_empty() {
        r.missing("attention.head_count_kv");
    }
    // A full layer without a projection of values takes its keys.
    let keys_are_values = windows
        .iter()
        .enumerate()
        .take(own)
        .any(|(n, window)| !window && !r.has(&format!("blk.{n}.attn_v.weight")));
    if !keys_are_values
        && local_heads.is_some()
        && global_heads.is_some_and(|g| Some(g) != local_heads)
    {
        r.wrong(
            "attention.head_count_kv",
            "gives full layers other heads, and they have values of their own (`attn_v`)",
        );
    }
    let widths = r.numbers("feed_forward_length").unwrap_or_default();
    let width = widths.first().copied();
    if width.is_none() {
        r.missing("feed_forward_length");
    }
    let width = width.unwrap_or(0);
    let double = widths.iter().any(|w| *w != width);
    let expected = |n: usize| if n < own { width } else { width.saturating_mul(2) };
    if double
        && (widths.len() as u64 != layers
            || widths.iter().enumerate().any(|(n, w)| *w != expected(n)))
    {
        r.wrong(
            "feed_forward_length",
            "differs by layer in another way than twice as wide where keys are shared",
        );
    }
    let rotated = match r.rope_freqs.clone() {
        None => global,
        Some(factors) => {
            let turning = factors.iter().take_while(|f| **f == 1.0).count();
            let still = factors.iter().skip(turning).all(|f| *f >= STILL);
            if !still || factors.len() as u64 != global / 2 {
                r.problem(format!(
                    "`rope_freqs.weight` holds {} factors; {} are needed, 1 and then 1e30",
                    factors.len(),
                    global / 2
                ));
            }
            2 * turning as u64
        }
    };
    let theta = r.need_float("rope.freq_base");
    let local_theta = r.float("rope.freq_base_swa").unwrap_or(json!(10_000.0));
    let partial = rotated as f64 / (global.max(1)) as f64;
    let kind = |window: &bool| if *window { "sliding_attention" } else { "full_attention" };
    let softcap = r.float("final_logit_softcapping").unwrap_or(Json::Null);
    let window = r.size("attention.sliding_window");
    let experts = r.opt("expert_count").unwrap_or(0);
    let per_layer = r.opt("embedding_length_per_layer_input").unwrap_or(0);
    let rest = json!({
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": false,
        "attention_k_eq_v": keys_are_values,
        "enable_moe_block": experts > 0,
        "final_logit_softcapping": softcap,
        "global_head_dim": global,
        "head_dim": head_dim,
        "hidden_size_per_layer_input": per_layer,
        "intermediate_size": width,
        "layer_types": windows.iter().map(kind).collect::<Vec<_>>(),
        "num_global_key_value_heads": global_heads,
        "num_key_value_heads": local_heads.or(global_heads),
        "num_kv_shared_layers": shared,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": partial, "rope_theta": theta, "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": local_theta, "rope_type": "default"},
        },
        "sliding_window": window,
        // The file holds a model of text alone.
        "use_bidirectional_attention": null,
        "use_double_wide_mlp": double,
    });
    if let Json::Object(rest) = rest {
        out.extend(rest);
    }
    if experts > 0 {
        out.insert("num_experts".into(), json!(experts));
        out.insert("top_k_experts".into(), json!(r.size("expert_used_count")));
        out.insert("moe_intermediate_size".into(), json!(r.size("expert_feed_forward_length")));
    }
    if per_layer > 0 {
        let rows = r.rows("per_layer_token_embd.weight");
        out.insert("vocab_size_per_layer_input".into(), json!(rows));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parameters_of_llama_3_are_found_from_its_factors() {
        // Llama 3.1 8B: heads of 128, base 500000, factor 8; computed in f32 as llama.cpp's converter does.
        let factors: Vec<f32> = (0..64)
            .map(|i| {
                let frequency = 1.0 / 500_000f32.powf(2.0 * i as f32 / 128.0);
                let wave = std::f32::consts::TAU / frequency;
                if wave < 2048.0 {
                    return 1.0;
                }
                let smooth = (8192.0 / wave - 1.0) / 3.0;
                if wave > 8192.0 { 8.0 } else { 1.0 / ((1.0 - smooth) / 8.0 + smooth) }
            })
            .collect();
        let found = llama3(&factors, 500_000.0, 128).expect("parameters");
        assert_eq!(found["factor"], 8.0);
        assert_eq!(found["original_max_position_embeddings"], 8192);
        assert_eq!(llama3(&factors, 10_000.0, 128), None, "another base");
        assert_eq!(llama3(&factors[1..], 500_000.0, 128), None, "another width");
        let mut odd = factors;
        odd[40] *= 1.01;
        assert_eq!(llama3(&odd, 500_000.0, 128), None, "a factor that nothing gives");
    }
}
