//! A GGUF writer (version 3), and llama.cpp's rearrangements of a Hugging Face checkpoint.
//!
//! Layout (little-endian): `GGUF`, u32 version, u64 tensor count, u64 pair count; pairs; tensor records (name, rank,
//! extents innermost first, type, offset); padding to 32; tensors, each padded to 32.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value as Json;

use crate::{Result, at};

/// A value of a pair.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// u32.
    U32(u32),
    /// f32.
    F32(f32),
    /// bool.
    Bool(bool),
    /// Text.
    Text(String),
    /// A list of u32.
    U32s(Vec<u32>),
    /// A list of bools.
    Bools(Vec<bool>),
    /// A list of texts.
    Texts(Vec<String>),
}

/// One tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Name in the file.
    pub name: String,
    /// ggml's number of the type.
    pub kind: u32,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Bytes as the type stores them.
    pub bytes: Vec<u8>,
}

/// ggml's numbers of the types that the writer knows.
pub mod kind {
    /// f32.
    pub const F32: u32 = 0;
    /// f16.
    pub const F16: u32 = 1;
    /// Blocks of 32: f16 scale, 32 signed bytes.
    pub const Q8_0: u32 = 8;
    /// bf16.
    pub const BF16: u32 = 30;
}

/// A file while it is put together.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct File {
    /// Pairs in the order of the file.
    pub pairs: Vec<(String, Value)>,
    /// Tensors in the order of the file.
    pub tensors: Vec<Tensor>,
}

/// Alignment of the tensors' bytes.
const ALIGNMENT: usize = 32;

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl File {
    /// Adds a pair.
    pub fn pair(&mut self, key: impl Into<String>, value: Value) {
        self.pairs.push((key.into(), value));
    }

    /// The file's bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.pairs.len() as u64).to_le_bytes());
        for (key, value) in &self.pairs {
            text(&mut out, key);
            write_value(&mut out, value);
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            text(&mut out, &tensor.name);
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += tensor.bytes.len().next_multiple_of(ALIGNMENT) as u64;
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
            out.extend(&tensor.bytes);
        }
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out
    }

    /// The same model in several files of at most `most` tensors each, as `llama-gguf-split` writes them: pairs in the
    /// first, and in each its number, their number and the number of all tensors.
    pub fn split(&self, most: usize) -> Vec<File> {
        let pieces: Vec<&[Tensor]> = self.tensors.chunks(most).collect();
        let split = |(n, tensors): (usize, &&[Tensor])| {
            let mut pairs = if n == 0 { self.pairs.clone() } else { Vec::new() };
            for (key, value) in [
                ("split.no", n),
                ("split.count", pieces.len()),
                ("split.tensors.count", self.tensors.len()),
            ] {
                pairs.push((key.to_owned(), Value::U32(value as u32)));
            }
            File { pairs, tensors: tensors.to_vec() }
        };
        pieces.iter().enumerate().map(split).collect()
    }
}

fn write_value(out: &mut Vec<u8>, value: &Value) {
    let number = |out: &mut Vec<u8>, n: u32| out.extend(n.to_le_bytes());
    let list = |out: &mut Vec<u8>, element: u32, count: usize| {
        number(out, 9);
        number(out, element);
        out.extend((count as u64).to_le_bytes());
    };
    match value {
        Value::U32(n) => {
            number(out, 4);
            number(out, *n);
        }
        Value::F32(x) => {
            number(out, 6);
            out.extend(x.to_le_bytes());
        }
        Value::Bool(b) => {
            number(out, 7);
            out.push(u8::from(*b));
        }
        Value::Text(t) => {
            number(out, 8);
            text(out, t);
        }
        Value::U32s(numbers) => {
            list(out, 4, numbers.len());
            numbers.iter().for_each(|n| number(out, *n));
        }
        Value::Bools(bools) => {
            list(out, 7, bools.len());
            out.extend(bools.iter().map(|b| u8::from(*b)));
        }
        Value::Texts(texts) => {
            list(out, 8, texts.len());
            texts.iter().for_each(|t| text(out, t));
        }
    }
}

/// What the matrices of a converted model are stored as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outtype {
    /// f32, every tensor.
    F32,
    /// bf16 for matrices, f32 for vectors: llama.cpp's `--outtype bf16`.
    Bf16,
}

/// A tensor of a bf16 checkpoint: shape and values.
type Values = (Vec<u64>, Vec<f32>);

/// The tensors of a model's safetensors files, which hold bf16.
fn read_all(model: &Path) -> Result<BTreeMap<String, Values>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(model).map_err(at(model))? {
        let path = entry.map_err(at(model))?.path();
        if path.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let bytes = fs::read(&path).map_err(at(&path))?;
        let short = || format!("{}: too short", path.display());
        let length = bytes.first_chunk::<8>().map(|b| u64::from_le_bytes(*b)).ok_or_else(short)?;
        let (header, data) = bytes[8..].split_at_checked(length as usize).ok_or_else(short)?;
        let header: BTreeMap<String, Json> =
            serde_json::from_slice(header).map_err(|e| format!("{}: {e}", path.display()))?;
        for (name, entry) in header.into_iter().filter(|(name, _)| name != "__metadata__") {
            if entry["dtype"] != "BF16" {
                return Err(format!("{name} is {}", entry["dtype"]));
            }
            let numbers = |v: &Json| -> Vec<u64> {
                v.as_array().into_iter().flatten().filter_map(Json::as_u64).collect()
            };
            let range = numbers(&entry["data_offsets"]);
            let bytes = &data[range[0] as usize..range[1] as usize];
            let value = |b: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            let values = bytes.as_chunks::<2>().0.iter().map(value).collect();
            all.insert(name, (numbers(&entry["shape"]), values));
        }
    }
    Ok(all)
}

/// What llama.cpp's converter writes of a tiny model: tensors, and the metadata of its configuration and tokenizer.
///
/// Families: llama, mistral (as llama), qwen3, qwen3_moe, gemma3, gemma4 (the text model).
pub fn convert(model: &Path, outtype: Outtype) -> Result<File> {
    let path = model.join("config.json");
    let config = fs::read_to_string(&path).map_err(at(&path))?;
    let root: Json = serde_json::from_str(&config).map_err(|e| e.to_string())?;
    let config = root.get("text_config").unwrap_or(&root);
    let family = config["model_type"].as_str().unwrap_or_default();
    let arch = match family {
        "llama" | "mistral" => "llama",
        "qwen3" => "qwen3",
        "qwen3_moe" => "qwen3moe",
        "gemma3_text" => "gemma3",
        "gemma4_text" => "gemma4",
        other => return Err(format!("no conversion of {other}")),
    };
    let mut file = File::default();
    metadata(&mut file, arch, config)?;
    let mut stacks: BTreeMap<String, BTreeMap<u64, Values>> = BTreeMap::new();
    for (name, (shape, values)) in read_all(model)? {
        let name = name.replace("model.language_model.", "model.");
        if !name.starts_with("model.layers.")
            && !["model.embed_tokens", "model.norm", "lm_head", "model.per_layer"]
                .iter()
                .any(|p| name.starts_with(p))
        {
            // Encoders go into a file of their own.
            continue;
        }
        if let Some((stack, expert)) = expert_of(&name) {
            stacks.entry(stack).or_default().insert(expert, (shape, values));
            continue;
        }
        let to = rename(arch, &name).ok_or_else(|| format!("{name} has no name"))?;
        let values = change(arch, config, &to, &shape, values)?;
        file.tensors.push(stored(to, shape, &values, outtype));
    }
    for (name, experts) in stacks {
        let first = experts.values().next().map(|(shape, _)| shape.clone()).unwrap_or_default();
        let shape = [vec![experts.len() as u64], first].concat();
        let values: Vec<f32> = experts.into_values().flat_map(|(_, values)| values).collect();
        file.tensors.push(stored(name, shape, &values, outtype));
    }
    if let Some(factors) = rope_factors(arch, config) {
        file.tensors.push(stored(
            "rope_freqs.weight".into(),
            vec![factors.len() as u64],
            &factors,
            Outtype::F32,
        ));
    }
    file.tensors.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(file)
}

fn stored(name: String, shape: Vec<u64>, values: &[f32], outtype: Outtype) -> Tensor {
    let wide = outtype == Outtype::F32 || shape.len() < 2;
    let bytes = match wide {
        true => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        false => values.iter().flat_map(|v| crate::values::bf16(*v).to_le_bytes()).collect(),
    };
    Tensor { name, kind: if wide { kind::F32 } else { kind::BF16 }, shape, bytes }
}

/// The stack that an expert's matrix becomes a part of, and the expert.
fn expert_of(name: &str) -> Option<(String, u64)> {
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once(".mlp.experts.")?;
    let (expert, projection) = rest.split_once('.')?;
    let projection = projection.strip_suffix("_proj.weight")?;
    Some((format!("blk.{layer}.ffn_{projection}_exps.weight"), expert.parse().ok()?))
}

fn rename(arch: &str, name: &str) -> Option<String> {
    let top = [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("lm_head.weight", "output.weight"),
        ("model.embed_tokens_per_layer.weight", "per_layer_token_embd.weight"),
        ("model.per_layer_model_projection.weight", "per_layer_model_proj.weight"),
        ("model.per_layer_projection_norm.weight", "per_layer_proj_norm.weight"),
    ];
    if let Some((_, to)) = top.iter().find(|(from, _)| *from == name) {
        return Some((*to).to_owned());
    }
    let (layer, leaf) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let gemma = arch.starts_with("gemma");
    let whole = [
        ("layer_scalar", "layer_output_scale.weight"),
        ("experts.gate_up_proj", "ffn_gate_up_exps.weight"),
        ("experts.down_proj", "ffn_down_exps.weight"),
        ("router.proj.weight", "ffn_gate_inp.weight"),
        ("router.scale", "ffn_gate_inp.scale"),
        ("router.per_expert_scale", "ffn_down_exps.scale"),
    ];
    if let Some((_, to)) = whole.iter().find(|(from, _)| *from == leaf) {
        return Some(format!("blk.{layer}.{to}"));
    }
    let (module, kind) = leaf.rsplit_once('.')?;
    let to = match module {
        "input_layernorm" => "attn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        "mlp.gate" => "ffn_gate_inp",
        "post_attention_layernorm" if gemma => "post_attention_norm",
        "post_attention_layernorm" => "ffn_norm",
        "pre_feedforward_layernorm" => "ffn_norm",
        "post_feedforward_layernorm" => "post_ffw_norm",
        "post_feedforward_layernorm_1" => "post_ffw_norm_1",
        "post_feedforward_layernorm_2" => "post_ffw_norm_2",
        "pre_feedforward_layernorm_2" => "pre_ffw_norm_2",
        "per_layer_input_gate" => "inp_gate",
        "per_layer_projection" => "proj",
        "post_per_layer_input_norm" => "post_norm",
        _ => return None,
    };
    Some(format!("blk.{layer}.{to}.{kind}"))
}

/// What the converter does to values: rows of q and k of a llama are taken from halves of a head to neighbours, 1 is
/// added to Gemma 3's norms.
fn change(
    arch: &str,
    config: &Json,
    to: &str,
    shape: &[u64],
    values: Vec<f32>,
) -> Result<Vec<f32>> {
    if arch == "gemma3" && to.ends_with("norm.weight") {
        return Ok(values.iter().map(|v| v + 1.0).collect());
    }
    let heads = match to.rsplit_once(".attn_").map(|(_, leaf)| leaf) {
        Some("q.weight") if arch == "llama" => &config["num_attention_heads"],
        Some("k.weight") if arch == "llama" => &config["num_key_value_heads"],
        _ => return Ok(values),
    };
    let heads = heads.as_u64().ok_or("no heads")? as usize;
    let (rows, cols) = (shape[0] as usize, shape[1] as usize);
    let half = rows / heads / 2;
    let mut out = Vec::with_capacity(values.len());
    for head in 0..heads {
        for pair in 0..half {
            for side in 0..2 {
                let row = (head * 2 + side) * half + pair;
                out.extend_from_slice(&values[row * cols..(row + 1) * cols]);
            }
        }
    }
    Ok(out)
}

fn metadata(file: &mut File, arch: &str, config: &Json) -> Result<()> {
    let key = |k: &str| format!("{arch}.{k}");
    let number = |k: &str| config[k].as_u64().map(|n| Value::U32(n as u32));
    let float = |v: &Json| v.as_f64().map(|x| Value::F32(x as f32));
    file.pair("general.architecture", Value::Text(arch.into()));
    file.pair("general.type", Value::Text("model".into()));
    file.pair("general.name", Value::Text("tiny".into()));
    for (from, to) in [
        ("num_hidden_layers", "block_count"),
        ("max_position_embeddings", "context_length"),
        ("hidden_size", "embedding_length"),
        ("num_attention_heads", "attention.head_count"),
        ("num_experts", "expert_count"),
        ("num_experts_per_tok", "expert_used_count"),
        ("top_k_experts", "expert_used_count"),
        ("moe_intermediate_size", "expert_feed_forward_length"),
    ] {
        if let Some(value) = number(from) {
            file.pair(key(to), value);
        }
    }
    if let Some(eps) = float(&config["rms_norm_eps"]) {
        file.pair(key("attention.layer_norm_rms_epsilon"), eps);
    }
    if arch == "gemma4" {
        gemma4(file, config)?;
    } else {
        for (from, to) in [
            ("intermediate_size", "feed_forward_length"),
            ("num_key_value_heads", "attention.head_count_kv"),
            ("head_dim", "attention.key_length"),
            ("head_dim", "attention.value_length"),
        ] {
            if let Some(value) = number(from) {
                file.pair(key(to), value);
            }
        }
        if let Some(theta) = float(&config["rope_theta"]) {
            file.pair(key("rope.freq_base"), theta);
        }
        if arch == "llama" {
            file.pair(key("vocab_size"), number("vocab_size").ok_or("no vocab_size")?);
            file.pair(key("rope.dimension_count"), number("head_dim").ok_or("no head_dim")?);
        }
        if arch == "gemma3" {
            file.pair(
                key("attention.sliding_window"),
                number("sliding_window").ok_or("no window")?,
            );
        }
        let scaling = &config["rope_scaling"];
        if scaling["rope_type"] == "linear" {
            file.pair(key("rope.scaling.type"), Value::Text("linear".into()));
            file.pair(key("rope.scaling.factor"), float(&scaling["factor"]).ok_or("no factor")?);
        }
    }
    let vocabulary = config["vocab_size"].as_u64().unwrap_or(0);
    file.pair("tokenizer.ggml.model", Value::Text("gpt2".into()));
    file.pair(
        "tokenizer.ggml.tokens",
        Value::Texts((0..vocabulary).map(|n| format!("t{n}")).collect()),
    );
    file.pair("tokenizer.ggml.token_type", Value::U32s(vec![1; vocabulary as usize]));
    for (from, to) in
        [("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")]
    {
        if let Some(value) = number(from) {
            file.pair(format!("tokenizer.ggml.{to}_token_id"), value);
        }
    }
    file.pair("tokenizer.ggml.add_bos_token", Value::Bool(true));
    file.pair("tokenizer.chat_template", Value::Text("{{ messages }}".into()));
    Ok(())
}

fn gemma4(file: &mut File, config: &Json) -> Result<()> {
    let key = |k: &str| format!("gemma4.{k}");
    let number = |k: &str| config[k].as_u64().map(|n| n as u32).ok_or(format!("no {k}"));
    let windows: Vec<bool> = config["layer_types"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|kind| kind == "sliding_attention")
        .collect();
    let (kv, shared) = (number("num_key_value_heads")?, number("num_kv_shared_layers")?);
    match config["num_global_key_value_heads"].as_u64() {
        Some(global) => {
            let heads = windows.iter().map(|w| if *w { kv } else { global as u32 }).collect();
            file.pair(key("attention.head_count_kv"), Value::U32s(heads));
        }
        None => file.pair(key("attention.head_count_kv"), Value::U32(kv)),
    }
    let width = number("intermediate_size")?;
    if config["use_double_wide_mlp"] == true {
        let own = windows.len() - shared as usize;
        let widths = (0..windows.len()).map(|n| if n < own { width } else { 2 * width }).collect();
        file.pair(key("feed_forward_length"), Value::U32s(widths));
    } else {
        file.pair(key("feed_forward_length"), Value::U32(width));
    }
    file.pair(key("attention.sliding_window_pattern"), Value::Bools(windows));
    for (from, to) in [
        ("sliding_window", "attention.sliding_window"),
        ("num_kv_shared_layers", "attention.shared_kv_layers"),
        ("hidden_size_per_layer_input", "embedding_length_per_layer_input"),
        ("global_head_dim", "attention.key_length"),
        ("global_head_dim", "attention.value_length"),
        ("head_dim", "attention.key_length_swa"),
        ("head_dim", "attention.value_length_swa"),
        ("global_head_dim", "rope.dimension_count"),
        ("head_dim", "rope.dimension_count_swa"),
    ] {
        file.pair(key(to), Value::U32(number(from)?));
    }
    let rope = &config["rope_parameters"];
    for (from, to) in
        [("full_attention", "rope.freq_base"), ("sliding_attention", "rope.freq_base_swa")]
    {
        let theta = rope[from]["rope_theta"].as_f64().ok_or("no rope_theta")?;
        file.pair(key(to), Value::F32(theta as f32));
    }
    if let Some(cap) = config["final_logit_softcapping"].as_f64() {
        file.pair(key("final_logit_softcapping"), Value::F32(cap as f32));
    }
    Ok(())
}

/// `rope_freqs.weight`: what divides the frequency of each pair.
fn rope_factors(arch: &str, config: &Json) -> Option<Vec<f32>> {
    if arch == "gemma4" {
        let full = &config["rope_parameters"]["full_attention"];
        let head = config["global_head_dim"].as_u64()?;
        let turning = (head as f64 * full["partial_rotary_factor"].as_f64()? / 2.0) as u64;
        return Some((0..head / 2).map(|i| if i < turning { 1.0 } else { 1e30 }).collect());
    }
    let scaling = &config["rope_scaling"];
    if scaling["rope_type"] != "llama3" {
        return None;
    }
    let number = |k: &str| scaling[k].as_f64();
    let (factor, low, high) =
        (number("factor")?, number("low_freq_factor")?, number("high_freq_factor")?);
    let context = number("original_max_position_embeddings")?;
    let (theta, head) = (config["rope_theta"].as_f64()?, config["head_dim"].as_u64()?);
    let factors = (0..head / 2).map(|i| {
        let wave = std::f64::consts::TAU * theta.powf(2.0 * i as f64 / head as f64);
        if wave < context / high {
            1.0
        } else if wave > context / low {
            factor as f32
        } else {
            let smooth = (context / wave - low) / (high - low);
            (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
        }
    });
    Some(factors.collect())
}
