//! Signs that the weights of a checkpoint are quantized already.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::checkpoint::json::JsonFile;
use crate::checkpoint::safetensors::quoted;
use crate::diag;
use crate::tensor::TensorInfo;

/// A method found, and what shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantizedWith {
    /// The method as its ecosystem calls it, e.g. `gptq`, `compressed-tensors`, `bitsandbytes`.
    pub method: String,
    /// The config key or tensor that shows it.
    pub evidence: String,
}

/// Config files of quantization tools; their presence beside unquantized weights would contradict the artifact.
pub(in crate::checkpoint) const QUANT_CONFIGS: [&str; 3] =
    ["hf_quant_config.json", "quantize_config.json", "quant_config.json"];

/// Tensor name endings that only quantized weights have, with the method they belong to. Names and meanings are those
/// of bitsandbytes, GPTQModel, AutoAWQ, compressed-tensors, ModelOpt, optimum-quanto and
/// ComfyUI's scaled fp8 files. The first row that matches decides, so the more telling endings stand first.
const SUFFIXES: [(&str, &str); 26] = [
    (".SCB", "bitsandbytes int8"),
    (".quant_state.bitsandbytes__nf4", "bitsandbytes nf4"),
    (".quant_state.bitsandbytes__fp4", "bitsandbytes fp4"),
    (".nested_absmax", "bitsandbytes 4-bit"),
    (".nested_quant_map", "bitsandbytes 4-bit"),
    (".absmax", "bitsandbytes 4-bit"),
    (".quant_map", "bitsandbytes 4-bit"),
    (".g_idx", "gptq"),
    (".qweight", "gptq or awq"),
    (".qzeros", "gptq or awq"),
    (".weight_packed", "compressed-tensors"),
    (".weight_global_scale", "compressed-tensors"),
    (".input_global_scale", "compressed-tensors"),
    (".weight_zero_point", "compressed-tensors"),
    (".weight_shape", "compressed-tensors"),
    (".weight_scale_2", "modelopt"),
    ("_quantizer._amax", "modelopt"),
    ("_quantizer._pre_quant_scale", "modelopt"),
    (".pre_quant_scale", "modelopt"),
    (".weight_scale_inv", "fp8 blocks"),
    (".weight_scale", "fp8 or int8 with scales"),
    (".input_scale", "fp8 or int8 with scales"),
    (".activation_scale", "fp8 or int8 with scales"),
    (".scale_weight", "scaled fp8"),
    (".weight._scale", "quanto"),
    (".weight._data", "quanto"),
];

/// Looks for signs of quantization: first in the configs, then in the tensor names.
pub(super) fn detect(
    config: Option<&JsonFile>,
    quant_configs: &[JsonFile],
    tensors: &BTreeMap<String, TensorInfo>,
) -> Option<QuantizedWith> {
    let Some(block) = block(config, quant_configs) else { return from_tensors(tensors) };
    let detail = method_of(block.value).and_then(|(_, detail)| detail);
    let method = match (block.method, detail) {
        (Some(method), Some(detail)) => format!("{method} ({detail})"),
        (Some(method), None) => method,
        (None, _) => "an unnamed method".to_owned(),
    };
    Some(QuantizedWith { method, evidence: block.evidence })
}

/// A configuration of quantization.
pub(super) struct Block<'a> {
    /// The method as it names it; `None` for an unnamed one.
    pub method: Option<String>,
    /// The object itself.
    pub value: &'a Value,
    /// Where it was found.
    pub evidence: String,
}

/// The configuration of quantization: in `config.json`, else in a tool's own file.
pub(super) fn block<'a>(
    config: Option<&'a JsonFile>,
    quant_configs: &'a [JsonFile],
) -> Option<Block<'a>> {
    let own = |file: &'a JsonFile| {
        let value = file.get(&["quantization"]).unwrap_or(&file.value);
        // ModelOpt writes the file with quant_algo null when only the KV cache is quantized.
        let method = method_of(value)?;
        Some(Block { method: Some(method.0), value, evidence: format!("{} says so", file.path) })
    };
    config
        .and_then(|file| from_config(&file.path, "", &file.value, 0))
        .or_else(|| quant_configs.iter().find_map(own))
}

/// Searches a config and the configs nested in it (`text_config` and the like).
fn from_config<'a>(file: &str, prefix: &str, value: &'a Value, depth: usize) -> Option<Block<'a>> {
    /// `text_config` of a model within `thinker_config`: two levels are the deepest published.
    const DEEPEST: usize = 3;
    let object = value.as_object()?;
    for key in ["quantization_config", "compression_config"] {
        if let Some(found) = object.get(key).filter(|v| v.is_object()) {
            let method = method_of(found).map(|m| m.0);
            let method =
                method.or((key == "compression_config").then(|| "compressed-tensors".to_owned()));
            let evidence = format!("{file} has {prefix}{key}");
            return Some(Block { method, value: found, evidence });
        }
    }
    if depth >= DEEPEST {
        return None;
    }
    object.iter().find_map(|(key, inner)| {
        let prefix = format!("{prefix}{}.", key.escape_debug());
        if key.ends_with("_config") { from_config(file, &prefix, inner, depth + 1) } else { None }
    })
}

/// What a quantization config calls its method, and the variant it names.
fn method_of(config: &Value) -> Option<(String, Option<String>)> {
    let text = |key: &str| config.get(key).and_then(Value::as_str).filter(|s| !s.is_empty());
    let is = |key: &str| config.get(key).and_then(Value::as_bool) == Some(true);
    let clean =
        |name: &str| -> String { name.chars().filter(|c| !c.is_control()).take(60).collect() };
    let named = |name: &str| Some((name.to_owned(), None));
    let detail = text("quant_algo").or_else(|| text("format")).map(clean);
    if let Some(method) = text("quant_method") {
        return Some((clean(method), detail));
    }
    if is("load_in_8bit") || is("load_in_4bit") {
        return named("bitsandbytes");
    }
    if text("quant_algo").is_some() {
        return Some(("modelopt".to_owned(), detail));
    }
    if config.get("config_groups").is_some() {
        return named("compressed-tensors");
    }
    if config.get("w_bit").is_some() {
        return named("awq");
    }
    if config.get("bits").is_some() {
        return named("gptq");
    }
    None
}

/// The method that only tensors of that name belong to.
pub(super) fn method_of_tensor(name: &str) -> Option<&'static str> {
    SUFFIXES.iter().find(|(suffix, _)| name.ends_with(suffix)).map(|(_, method)| *method)
}

fn from_tensors(tensors: &BTreeMap<String, TensorInfo>) -> Option<QuantizedWith> {
    for (suffix, method) in SUFFIXES {
        let mut matching = tensors.keys().filter(|name| name.ends_with(suffix));
        if let Some(first) = matching.next() {
            return Some(with_tensor(method, first, suffix, 1 + matching.count()));
        }
    }
    // gpt-oss: experts as NAME_blocks (codes) and NAME_scales.
    let is_pair = |name: &&String| {
        name.strip_suffix("_blocks")
            .is_some_and(|stem| tensors.contains_key(&format!("{stem}_scales")))
    };
    let mut pairs = tensors.keys().filter(is_pair);
    let first = pairs.next()?;
    Some(with_tensor("mxfp4", first, "_blocks beside _scales", 1 + pairs.count()))
}

fn with_tensor(method: &str, first: &str, suffix: &str, count: usize) -> QuantizedWith {
    let tensors = if count == 1 { "1 tensor" } else { "tensors" };
    let number = if count == 1 { String::new() } else { format!("{} ", diag::count(count as u64)) };
    let ends = if count == 1 { "ends" } else { "end" };
    QuantizedWith {
        method: method.to_owned(),
        evidence: format!("{number}{tensors} {ends} in {suffix}, e.g. {}", quoted(first)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{DType, Shape};

    fn json(path: &str, text: &str) -> JsonFile {
        JsonFile::parse(path, path, text.as_bytes().to_vec()).expect("valid")
    }

    fn tensors(names: &[&str]) -> BTreeMap<String, TensorInfo> {
        let info = TensorInfo { dtype: DType::BF16, shape: Shape::from([1]) };
        names.iter().map(|n| ((*n).to_owned(), info.clone())).collect()
    }

    fn by_config(text: &str) -> Option<(String, String)> {
        detect(Some(&json("config.json", text)), &[], &BTreeMap::new())
            .map(|q| (q.method, q.evidence))
    }

    fn by_tensors(names: &[&str]) -> Option<(String, String)> {
        detect(None, &[], &tensors(names)).map(|q| (q.method, q.evidence))
    }

    fn some(method: &str, evidence: &str) -> Option<(String, String)> {
        Some((method.to_owned(), evidence.to_owned()))
    }

    #[test]
    fn the_config_names_the_method_wherever_the_block_is_nested() {
        assert_eq!(
            by_config(r#"{"quantization_config": {"quant_method": "gptq", "bits": 4}}"#),
            some("gptq", "config.json has quantization_config")
        );
        assert_eq!(
            by_config(r#"{"text_config": {"quantization_config": {"quant_method": "fp8"}}}"#),
            some("fp8", "config.json has text_config.quantization_config")
        );
        assert_eq!(
            by_config(r#"{"quantization_config": {"load_in_4bit": true}}"#),
            some("bitsandbytes", "config.json has quantization_config")
        );
        assert_eq!(
            by_config(r#"{"compression_config": {"config_groups": {}}}"#),
            some("compressed-tensors", "config.json has compression_config")
        );
        assert_eq!(
            by_config(
                r#"{"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}"#
            ),
            some("modelopt (NVFP4)", "config.json has quantization_config")
        );
        assert_eq!(
            by_config(r#"{"quantization_config": {}}"#),
            some("an unnamed method", "config.json has quantization_config")
        );
        assert_eq!(by_config(r#"{"quantization_config": null, "hidden_size": 8}"#), None);
    }

    #[test]
    fn a_tools_own_config_file_shows_it_too() {
        let find = |path: &str, text: &str| {
            detect(None, &[json(path, text)], &BTreeMap::new()).map(|q| (q.method, q.evidence))
        };
        assert_eq!(
            find("hf_quant_config.json", r#"{"quantization": {"quant_algo": "FP8"}}"#),
            some("modelopt (FP8)", "hf_quant_config.json says so")
        );
        assert_eq!(find("hf_quant_config.json", r#"{"quantization": {"quant_algo": null}}"#), None);
        assert_eq!(
            find("quantize_config.json", r#"{"bits": 4, "group_size": 128}"#),
            some("gptq", "quantize_config.json says so")
        );
        assert_eq!(
            find("quant_config.json", r#"{"w_bit": 4, "zero_point": true}"#),
            some("awq", "quant_config.json says so")
        );
    }

    #[test]
    fn every_suffix_shows_its_method_without_any_config() {
        for (suffix, method) in SUFFIXES {
            let name = format!("model.layers.0.mlp.down_proj{suffix}");
            assert_eq!(
                by_tensors(&[&name, "model.norm.weight"]),
                some(method, &format!("1 tensor ends in {suffix}, e.g. `{name}`")),
            );
        }
        assert_eq!(
            by_tensors(&["a.down_proj.SCB", "b.down_proj.SCB"]),
            some("bitsandbytes int8", "2 tensors end in .SCB, e.g. `a.down_proj.SCB`")
        );
        assert_eq!(
            by_tensors(&["experts.gate_up_proj_blocks", "experts.gate_up_proj_scales"]),
            some(
                "mxfp4",
                "1 tensor ends in _blocks beside _scales, e.g. `experts.gate_up_proj_blocks`"
            )
        );
    }

    #[test]
    fn unquantized_names_that_come_close_are_left_alone() {
        assert_eq!(
            by_tensors(&[
                "model.language_model.layers.0.layer_scalar",
                "model.language_model.layers.0.router.scale",
                "model.language_model.layers.0.router.per_expert_scale",
                "model.vision_tower.encoder.layers.0.mlp.up_proj.input_max",
                "model.vision_tower.std_scale",
                "transformer_blocks",
                "x_scales",
            ]),
            None
        );
    }
}
