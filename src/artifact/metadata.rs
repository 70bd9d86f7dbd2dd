//! Metadata rows from a checkpoint's configuration files.
//!
//! The rows are those that radiance's rad-convert writes, in its order: typed dimensions first, then every value of
//! the configuration as text under its dotted path, then this project's keys. Engines read them by name.
//!
//! One difference: a file here has no key twice. A text row whose key is a typed row's (`head_dim`) or an earlier
//! text row's is left out; look-ups return the first row anyway.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::contents::MetaValue;
use super::layout::{
    DEVICES_KEY, DIGEST_KEY, EXTENSION_VERSION, FORMAT_KEY, OWN_KEYS, VERSION_KEY,
};
use crate::diag::{Diagnostic, FailureKind, Problems, Result};

/// The configuration files of a checkpoint, and what the user adds.
#[derive(Debug, Clone, Copy)]
pub struct Sources<'a> {
    /// `config.json`.
    pub config: &'a Value,
    /// `generation_config.json`.
    pub generation: Option<&'a Value>,
    /// `preprocessor_config.json`.
    pub preprocessor: Option<&'a Value>,
    /// `video_preprocessor_config.json`.
    pub video_preprocessor: Option<&'a Value>,
    /// `config.json` of a draft model that is merged in.
    pub draft: Option<&'a Value>,
    /// `KEY=VALUE` pairs of the command line, in order.
    pub set: &'a [(String, String)],
    /// Version of the tool, e.g. `0.1.0`.
    pub tool_version: &'a str,
    /// Devices the file is made for.
    pub devices: u32,
}

/// Strings of the container's header that the configuration decides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// `model_type` without underscores; an engine picks its plugin by it.
    pub arch_id: String,
    /// `_name_or_path`, else the architecture.
    pub model_name: String,
    /// Quantisation of the checkpoint: `quant_method`, then `_` and `fmt` when given; empty for none.
    pub quant: String,
}

/// Header strings of a configuration.
pub fn identity(config: &Value) -> Identity {
    let text = |v: Option<&Value>| v.and_then(Value::as_str).unwrap_or_default().to_owned();
    let model_type = match config.get("model_type").and_then(Value::as_str) {
        Some(t) => t.to_owned(),
        None => text(config.pointer("/text_config/model_type")),
    };
    let arch_id = model_type.replace('_', "");
    let model_name = match text(config.get("_name_or_path")) {
        name if name.is_empty() => arch_id.clone(),
        name => name,
    };
    let quantization = prefer_text(config, "quantization_config");
    let method = text(quantization.and_then(|q| q.get("quant_method")));
    let fmt = text(quantization.and_then(|q| q.get("fmt")));
    let quant = match (method.is_empty(), fmt.is_empty()) {
        (true, _) => String::new(),
        (_, true) => method,
        _ => format!("{method}_{fmt}"),
    };
    Identity { arch_id, model_name, quant }
}

/// The rows of a file: typed dimensions, flattened configuration, `set` pairs, `radpack.*`. The value of
/// `radpack.digest` comes later.
///
/// # Errors
/// A `set` pair whose key is empty, begins with `radpack.`, or names a typed row with a value that is no such number;
/// or that holds NUL. All together.
pub fn rows(sources: &Sources<'_>) -> Result<Vec<(String, MetaValue)>> {
    let mut rows = Rows::default();
    let typed = dimensions(sources.config).into_iter().map(|(k, v)| (k, MetaValue::Int(v)));
    let floats = constants(sources.config).into_iter().map(|(k, v)| (k, MetaValue::Float(v)));
    for (key, value) in typed.chain(floats) {
        rows.add(key.to_owned(), value);
    }
    rows.flatten("", sources.config);
    if let Some(nested) = sources.config.get("text_config").filter(|t| t.is_object()) {
        rows.flatten("", nested);
    }
    let files = [
        ("generation.", sources.generation),
        ("preprocessor.", sources.preprocessor),
        ("video_preprocessor.", sources.video_preprocessor),
        ("draft.", sources.draft),
    ];
    for (prefix, value) in files {
        if let Some(value) = value {
            rows.flatten(prefix, value);
        }
    }
    let mut problems = Problems::new();
    for (key, value) in sources.set {
        if let Err(why) = rows.set(key, value) {
            let message = format!("--set {}={}: {why}", key.escape_debug(), value.escape_debug());
            problems.push(Diagnostic::new("command line", message));
        }
    }
    rows.add(FORMAT_KEY.into(), MetaValue::Int(EXTENSION_VERSION));
    rows.add(VERSION_KEY.into(), MetaValue::Text(sources.tool_version.to_owned()));
    rows.add(DEVICES_KEY.into(), MetaValue::Int(i64::from(sources.devices)));
    rows.add(DIGEST_KEY.into(), MetaValue::Later(64));
    problems.finish(FailureKind::Usage, "some metadata cannot be set", rows.rows)
}

/// Rows so far, no key twice.
#[derive(Debug, Default)]
struct Rows {
    rows: Vec<(String, MetaValue)>,
    keys: BTreeSet<String>,
}

impl Rows {
    /// Adds a row unless its key is there, or the container cannot hold it (no key, NUL).
    fn add(&mut self, key: String, value: MetaValue) {
        let nul = |t: &str| t.contains('\0');
        let holds_nul = nul(&key) || matches!(&value, MetaValue::Text(t) if nul(t));
        if !key.is_empty() && !holds_nul && self.keys.insert(key.clone()) {
            self.rows.push((key, value));
        }
    }

    /// Adds every scalar below `value` under its dotted path, keys of each level in byte order.
    fn flatten(&mut self, prefix: &str, value: &Value) {
        let Value::Object(map) = value else { return };
        for (key, value) in sorted(map) {
            let path = format!("{prefix}{key}");
            match value {
                Value::Object(_) => self.flatten(&format!("{path}."), value),
                Value::Array(items) => {
                    if let Some(words) = items.iter().map(word).collect::<Option<Vec<_>>>() {
                        self.text(path, words.join(" "));
                    }
                }
                Value::Bool(b) => self.text(path, if *b { "1" } else { "0" }.into()),
                Value::Null => {}
                scalar => {
                    if let Some(word) = word(scalar) {
                        self.text(path, word);
                    }
                }
            }
        }
    }

    fn text(&mut self, key: String, value: String) {
        self.add(key, MetaValue::Text(value));
    }

    /// Overwrites the row of that key in its place, or appends one.
    fn set(&mut self, key: &str, value: &str) -> std::result::Result<(), String> {
        if key.is_empty() || key.contains('\0') || value.contains('\0') {
            return Err("a key must not be empty, and neither may hold NUL".into());
        }
        if key.starts_with(OWN_KEYS) {
            return Err(format!("keys under `{OWN_KEYS}` are radpack's own"));
        }
        let row = self.rows.iter_mut().find(|row| row.0 == key).map(|row| &mut row.1);
        match row {
            None => self.text(key.to_owned(), value.to_owned()),
            Some(MetaValue::Int(old)) => {
                *old = value.parse().map_err(|_| format!("`{key}` is an integer"))?;
            }
            Some(MetaValue::Float(old)) => {
                let new = value.parse().ok().filter(|v: &f64| v.is_finite());
                *old = new.ok_or_else(|| format!("`{key}` is a number"))?;
            }
            Some(old) => *old = MetaValue::Text(value.to_owned()),
        }
        Ok(())
    }
}

/// Members in byte order of their keys, whatever order the JSON library keeps.
fn sorted(map: &Map<String, Value>) -> Vec<(&String, &Value)> {
    let mut members: Vec<_> = map.iter().collect();
    members.sort_by(|a, b| a.0.as_bytes().cmp(b.0.as_bytes()));
    members
}

/// A number or string as text; `None` for anything else.
fn word(value: &Value) -> Option<String> {
    match value {
        Value::String(s) => Some(s.clone()),
        Value::Number(n) => Some(match (n.as_i64(), n.as_u64()) {
            (Some(i), _) => i.to_string(),
            (_, Some(u)) => u.to_string(),
            _ => percent_17g(n.as_f64()?),
        }),
        _ => None,
    }
}

/// A value of the text model: `text_config.KEY` before `KEY`, nulls read as absent.
fn prefer_text<'a>(config: &'a Value, key: &str) -> Option<&'a Value> {
    let present = |v: &'a Value| v.get(key).filter(|v| !v.is_null());
    config.get("text_config").and_then(present).or_else(|| present(config))
}

fn integer(value: Option<&Value>) -> Option<i64> {
    let value = value?;
    // A float holds what `as` truncates it to; that saturates.
    value.as_i64().or_else(|| value.as_f64().map(|f| f as i64))
}

/// The integer rows, in order. What the configuration lacks is 0.
fn dimensions(config: &Value) -> [(&'static str, i64); 11] {
    let get = |key: &str| integer(prefer_text(config, key));
    let or_zero = |key: &str| get(key).unwrap_or(0);
    let (embd, head) = (or_zero("hidden_size"), or_zero("num_attention_heads"));
    let head_dim = get("head_dim").unwrap_or(embd.checked_div(head).unwrap_or(0));
    let ff = get("intermediate_size").or_else(|| get("moe_intermediate_size")).unwrap_or(0);
    let experts = get("num_experts").or_else(|| get("num_local_experts")).unwrap_or(0);
    // Gemma 4 calls it top_k_experts.
    let used = get("num_experts_per_tok").or_else(|| get("top_k_experts")).unwrap_or(0);
    [
        ("n_layers", or_zero("num_hidden_layers")),
        ("n_embd", embd),
        ("n_head", head),
        ("n_head_kv", get("num_key_value_heads").unwrap_or(head)),
        ("head_dim", head_dim),
        ("n_ff", ff),
        ("n_vocab", or_zero("vocab_size")),
        ("n_ctx_train", or_zero("max_position_embeddings")),
        ("n_expert", experts),
        ("n_expert_used", used),
        ("n_expert_shared", i64::from(or_zero("shared_expert_intermediate_size") != 0)),
    ]
}

/// The float rows, in order; each is a 32-bit float, widened.
fn constants(config: &Value) -> [(&'static str, f64); 3] {
    let get = |key: &str| prefer_text(config, key);
    let widened = |v: Option<&Value>, default: f64| {
        f64::from(v.and_then(Value::as_f64).unwrap_or(default) as f32)
    };
    let theta = get("rope_parameters")
        .and_then(|p| p.get("rope_theta"))
        .filter(|v| v.is_number())
        .or_else(|| get("rope_theta"));
    let factor = get("rope_scaling").and_then(|s| s.get("factor"));
    [
        ("rms_eps", widened(get("rms_norm_eps"), 1e-6)),
        ("rope_theta", widened(theta, 10_000.0)),
        ("rope_scale", widened(factor, 1.0)),
    ]
}

/// A number as C's `printf` prints it with `%.17g`.
pub fn percent_17g(value: f64) -> String {
    if !value.is_finite() {
        let sign = if value.is_sign_negative() && !value.is_nan() { "-" } else { "" };
        return format!("{sign}{}", if value.is_nan() { "nan" } else { "inf" });
    }
    // d.dddddddddddddddde-x: 17 significant digits, correctly rounded.
    let text = format!("{value:.16e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let (sign, mantissa) = match mantissa.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", mantissa),
    };
    let digits: String = mantissa.chars().filter(char::is_ascii_digit).collect();
    let kept = digits.trim_end_matches('0').len().max(1);
    let digits = digits.get(..kept).unwrap_or(&digits);
    let point = |digits: &str, whole: usize| match digits.get(whole..) {
        Some("") | None => digits.to_owned(),
        Some(rest) => format!("{}.{rest}", digits.get(..whole).unwrap_or_default()),
    };
    let body = if !(-4..17).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{}e{sign}{:02}", point(digits, 1), exponent.abs())
    } else if exponent < 0 {
        format!("0.{}{digits}", "0".repeat((-exponent - 1) as usize))
    } else {
        let whole = exponent as usize + 1;
        let filled = format!("{digits:0<whole$}");
        point(&filled, whole)
    };
    format!("{sign}{body}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_print_as_printf_prints_them() {
        // Printed by glibc's printf("%.17g").
        let cases = [
            (0.0, "0"),
            (-0.0, "-0"),
            (1.0, "1"),
            (10000.0, "10000"),
            (1e-6, "9.9999999999999995e-07"),
            (1e-5, "1.0000000000000001e-05"),
            (0.0001, "0.0001"),
            (0.02, "0.02"),
            (0.1, "0.10000000000000001"),
            (-0.95, "-0.94999999999999996"),
            (123456.789, "123456.789"),
            (1e16, "10000000000000000"),
            (1e17, "1e+17"),
            (1.5e300, "1.5000000000000001e+300"),
            (5e-324, "4.9406564584124654e-324"),
            (f64::MAX, "1.7976931348623157e+308"),
            (1.0 / 3.0, "0.33333333333333331"),
            (12345678901234567.0, "12345678901234568"),
            (99999999999999999.0, "1e+17"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
        ];
        for (value, text) in cases {
            assert_eq!(percent_17g(value), text);
        }
    }

    proptest::proptest! {
        #[test]
        fn printed_numbers_read_back_exactly(bits: u64) {
            let value = f64::from_bits(bits);
            if value.is_finite() {
                let back: f64 = percent_17g(value).parse().expect("a number");
                proptest::prop_assert_eq!(back.to_bits(), value.to_bits());
            }
        }
    }

    fn sources<'a>(config: &'a Value, set: &'a [(String, String)]) -> Sources<'a> {
        Sources {
            config,
            generation: None,
            preprocessor: None,
            video_preprocessor: None,
            draft: None,
            set,
            tool_version: "0.0.1",
            devices: 1,
        }
    }

    fn listing(rows: &[(String, MetaValue)]) -> String {
        let line = |(k, v): &(String, MetaValue)| match v {
            MetaValue::Int(v) => format!("{k} i64 {v}"),
            MetaValue::Float(v) => format!("{k} f64 {}", percent_17g(*v)),
            MetaValue::Text(v) => format!("{k} {v:?}"),
            MetaValue::Later(n) => format!("{k} later {n}"),
        };
        rows.iter().map(line).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn a_nested_configuration_becomes_typed_rows_then_dotted_paths_then_bare_names() {
        let config = json!({
            "model_type": "gemma4",
            "eos_token_id": [1, 495],
            "audio_config": null,
            "mixed": [1, null],
            "nested_list": [[1]],
            "flags": [true],
            "empty": [],
            "words": ["a", 2, 0.5],
            "tie_word_embeddings": true,
            "nul": "a\u{0}b",
            "text_config": {
                "model_type": "gemma4_text",
                "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 32, "head_dim": 8,
                "num_key_value_heads": 16, "intermediate_size": 256, "vocab_size": 512,
                "max_position_embeddings": 4096, "rms_norm_eps": 1e-06, "num_experts": null,
                "rope_parameters": {"full_attention": {"rope_theta": 1000000.0}},
                "use_cache": false
            }
        });
        let generation = json!({"temperature": 1.0, "top_p": 0.95});
        let set = [
            ("use_cache".to_owned(), "yes".to_owned()),
            ("n_layers".into(), "7".into()),
            ("x".into(), "y".into()),
        ];
        let s = Sources { generation: Some(&generation), ..sources(&config, &set) };
        insta::assert_snapshot!(listing(&rows(&s).expect("rows")), @r#"
        n_layers i64 7
        n_embd i64 128
        n_head i64 32
        n_head_kv i64 16
        head_dim i64 8
        n_ff i64 256
        n_vocab i64 512
        n_ctx_train i64 4096
        n_expert i64 0
        n_expert_used i64 0
        n_expert_shared i64 0
        rms_eps f64 9.9999999747524271e-07
        rope_theta f64 10000
        rope_scale f64 1
        empty ""
        eos_token_id "1 495"
        model_type "gemma4"
        text_config.head_dim "8"
        text_config.hidden_size "128"
        text_config.intermediate_size "256"
        text_config.max_position_embeddings "4096"
        text_config.model_type "gemma4_text"
        text_config.num_attention_heads "32"
        text_config.num_hidden_layers "6"
        text_config.num_key_value_heads "16"
        text_config.rms_norm_eps "9.9999999999999995e-07"
        text_config.rope_parameters.full_attention.rope_theta "1000000"
        text_config.use_cache "0"
        text_config.vocab_size "512"
        tie_word_embeddings "1"
        words "a 2 0.5"
        hidden_size "128"
        intermediate_size "256"
        max_position_embeddings "4096"
        num_attention_heads "32"
        num_hidden_layers "6"
        num_key_value_heads "16"
        rms_norm_eps "9.9999999999999995e-07"
        rope_parameters.full_attention.rope_theta "1000000"
        use_cache "yes"
        vocab_size "512"
        generation.temperature "1"
        generation.top_p "0.94999999999999996"
        x "y"
        radpack.format i64 1
        radpack.version "0.0.1"
        radpack.devices i64 1
        radpack.digest later 64
        "#);
    }

    #[test]
    fn derivations_fall_back_as_rad_convert_does() {
        let config = json!({
            "hidden_size": 64, "num_attention_heads": 4, "moe_intermediate_size": 96,
            "num_local_experts": 8, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32,
            "rope_theta": 500000.0, "rope_scaling": {"factor": 8.0}, "rms_norm_eps": 1e-5
        });
        assert_eq!(dimensions(&config).map(|(_, v)| v), [0, 64, 4, 4, 16, 96, 0, 0, 8, 2, 1]);
        assert_eq!(constants(&config).map(|(_, v)| v), [f64::from(1e-5f32), 500_000.0, 8.0]);
        let rope = json!({"rope_parameters": {"rope_theta": 7.0}, "rope_theta": 8.0});
        assert_eq!(constants(&rope)[1].1, 7.0);
        assert_eq!(dimensions(&json!({"hidden_size": 64}))[4], ("head_dim", 0), "no division by 0");
    }

    #[test]
    fn pairs_that_cannot_be_set_are_refused_together() {
        let set = [
            ("radpack.digest", "0"),
            ("", "x"),
            ("n_layers", "many"),
            ("rms_eps", "inf"),
            ("ok", "1"),
        ]
        .map(|(k, v)| (k.to_owned(), v.to_owned()));
        let failure = rows(&sources(&json!({}), &set)).expect_err("refused");
        assert_eq!(failure.kind, FailureKind::Usage);
        let found: Vec<String> = failure.problems.into_iter().map(|p| p.message).collect();
        assert_eq!(
            found,
            [
                "--set radpack.digest=0: keys under `radpack.` are radpack's own",
                "--set =x: a key must not be empty, and neither may hold NUL",
                "--set n_layers=many: `n_layers` is an integer",
                "--set rms_eps=inf: `rms_eps` is a number",
            ]
        );
    }

    #[test]
    fn header_strings_come_from_the_configuration() {
        let config = json!({
            "model_type": "qwen3_moe", "_name_or_path": "Qwen/Qwen3",
            "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}
        });
        let id = identity(&config);
        assert_eq!(
            (id.arch_id.as_str(), id.model_name.as_str(), id.quant.as_str()),
            ("qwen3moe", "Qwen/Qwen3", "fp8_e4m3")
        );
        let id = identity(
            &json!({"model_type": "llama", "quantization_config": {"quant_method": "awq"}}),
        );
        assert_eq!((id.model_name.as_str(), id.quant.as_str()), ("llama", "awq"));
        assert_eq!(identity(&json!({})).quant, "");
    }
}
