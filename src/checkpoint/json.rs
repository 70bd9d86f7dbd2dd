//! JSON files of a checkpoint, read strictly.
//!
//! serde_json lets the last of two equal keys win; which of two values another program reads is anyone's guess, so
//! duplicate keys are refused. A UTF-8 byte order mark (Windows editors write one) is skipped with a note.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::safetensors::{quoted, reason, text_offset};
use crate::diag::{self, Diagnostic, SourceText};

/// Largest config file read, in bytes: published ones stay under 2 MiB (a `tokenizer_config.json` with many tokens).
pub const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Deepest nesting read. Published configs stay under ten levels.
const MAX_DEPTH: usize = 64;

/// A JSON file: its text for diagnostics that point into it, and its value.
#[derive(Debug, Clone, PartialEq)]
pub struct JsonFile {
    /// Name within the checkpoint, e.g. `config.json`.
    pub path: String,
    /// The text without a byte order mark; its name is the path shown to the user, which depends on the folder and
    /// must not reach an output.
    pub text: Arc<SourceText>,
    /// The value.
    pub value: Value,
    /// Whether the file starts with a UTF-8 byte order mark.
    pub bom: bool,
}

impl JsonFile {
    /// Reads the bytes of a file. `path` is its name within the checkpoint, `shown` the one in messages.
    ///
    /// # Errors
    /// The first fault, marked in the text: not UTF-8, not JSON, a key given twice, nesting deeper than 64.
    pub fn parse(path: &str, shown: &str, bytes: Vec<u8>) -> Result<JsonFile, Diagnostic> {
        let mut text = String::from_utf8(bytes).map_err(|e| {
            Diagnostic::new(
                "config",
                format!(
                    "{shown}: not UTF-8 at byte {}",
                    diag::count(e.utf8_error().valid_up_to() as u64)
                ),
            )
            .help("save the file as UTF-8")
        })?;
        let bom = text.starts_with('\u{feff}');
        if bom {
            text.drain(..'\u{feff}'.len_utf8());
        }
        let text = Arc::new(SourceText { name: shown.to_owned(), text });
        let value = parse_strict(&text.text).map_err(|fault| fault.diagnostic(&text))?;
        Ok(JsonFile { path: path.to_owned(), text, value, bom })
    }

    /// The value under a path of keys, `None` where a key is absent or null.
    pub fn get(&self, keys: &[&str]) -> Option<&Value> {
        let found = keys.iter().try_fold(&self.value, |value, key| value.get(key))?;
        (!found.is_null()).then_some(found)
    }
}

/// Where and why a text is no strict JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
struct JsonFault {
    span: Range<usize>,
    reason: String,
}

impl JsonFault {
    fn diagnostic(self, text: &Arc<SourceText>) -> Diagnostic {
        let problem = Diagnostic::new("config", format!("{}: {}", text.name, self.reason));
        let after = text.text.get(self.span.start..).unwrap_or("");
        let not_a_number = ["NaN", "Infinity", "-Infinity"].iter().any(|w| after.starts_with(w));
        let problem = if not_a_number {
            problem.help(
                "JSON has no NaN and no Infinity, which Python's json module writes all the same",
            )
        } else {
            problem
        };
        problem.at(text, self.span, "here")
    }
}

/// The value of a text, or the first fault.
fn parse_strict(text: &str) -> Result<Value, JsonFault> {
    let mut json = serde_json::Deserializer::from_str(text);
    let outcome = Strict { depth: 0 }.deserialize(&mut json).and_then(|v| json.end().map(|()| v));
    outcome.map_err(|error| {
        let reason = reason(&error);
        let at = text_offset(text, error.line(), error.column());
        let span = duplicate_span(text, at, &reason).unwrap_or(at..(at + 1).min(text.len()));
        JsonFault { span, reason }
    })
}

/// The second of two equal keys, for which serde_json reports only a place behind it.
fn duplicate_span(text: &str, at: usize, reason: &str) -> Option<Range<usize>> {
    let key = reason.strip_prefix("key `")?.strip_suffix("` given twice")?;
    let literal = format!("\"{key}\"");
    let end = (at + 1..=text.len()).find(|&i| text.is_char_boundary(i))?;
    let start = text.get(..end)?.rfind(&literal)?;
    Some(start..start + literal.len())
}

/// Builds a [`Value`], refusing duplicate keys and deep nesting.
#[derive(Clone, Copy)]
struct Strict {
    depth: usize,
}

impl Strict {
    fn deeper<E: serde::de::Error>(self) -> Result<Strict, E> {
        if self.depth >= MAX_DEPTH {
            return Err(E::custom(format!("nested deeper than {MAX_DEPTH} levels")));
        }
        Ok(Strict { depth: self.depth + 1 })
    }
}

impl<'de> DeserializeSeed<'de> for Strict {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Value, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let inner = self.deeper()?;
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(inner)? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let inner = self.deeper()?;
        let mut object = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            if object.contains_key(&key) {
                return Err(A::Error::custom(format!("key {} given twice", quoted(&key))));
            }
            let value = map.next_value_seed(inner)?;
            object.insert(key, value);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<JsonFile, Diagnostic> {
        JsonFile::parse("config.json", "m/config.json", text.as_bytes().to_vec())
    }

    fn message(text: &str) -> String {
        parse(text).expect_err("a fault").message
    }

    #[test]
    fn a_strict_value_equals_what_serde_json_reads() {
        let text = r#"{"a": [1, -2, 2.5, 1e-6, "x\u00e9", true, null], "b": {"c": {}}, "d": 18446744073709551615}"#;
        let plain: Value = serde_json::from_str(text).expect("valid");
        let file = parse(text).expect("valid");
        assert_eq!(file.value, plain);
        assert_eq!(file.get(&["b", "c"]), Some(&Value::Object(Map::new())));
        assert_eq!(file.get(&["b", "missing"]), None);
        assert!(!file.bom);
    }

    #[test]
    fn a_duplicate_key_is_refused_and_the_second_one_marked() {
        let text = "{\n  \"hidden_size\": 1,\n  \"x\": {\"y\": 2, \"y\": 3}\n}";
        let problem = parse(text).expect_err("duplicate");
        assert_eq!(problem.message, "m/config.json: key `y` given twice");
        let label = problem.label.expect("a place");
        assert_eq!(&text[label.span.clone()], "\"y\"");
        assert_eq!(label.span.start, text.rfind("\"y\"").expect("present"));
    }

    #[test]
    fn nesting_is_limited_and_broken_json_is_located() {
        let deep = format!("{}{}", "[".repeat(65), "]".repeat(65));
        assert_eq!(message(&deep), "m/config.json: nested deeper than 64 levels");
        let allowed = format!("{}{}", "[".repeat(64), "]".repeat(64));
        assert!(parse(&allowed).is_ok());
        let problem = parse("{\"a\": 1,\n \"b\": Infinity}").expect_err("not JSON");
        assert_eq!(problem.message, "m/config.json: expected value");
        assert_eq!(problem.label.expect("a place").span, 15..16);
        assert!(problem.help[0].contains("no Infinity"));
        assert_eq!(message("{} x"), "m/config.json: trailing characters");
        assert_eq!(message(""), "m/config.json: EOF while parsing a value");
    }

    #[test]
    fn a_byte_order_mark_is_skipped_and_other_encodings_are_refused() {
        let file = parse("\u{feff}{\"a\": 1}").expect("valid");
        assert!(file.bom);
        assert_eq!(file.text.text, "{\"a\": 1}");
        let bad = JsonFile::parse("config.json", "m/config.json", b"{\"a\": \"\xff\"}".to_vec())
            .expect_err("not UTF-8");
        assert_eq!(bad.message, "m/config.json: not UTF-8 at byte 7");
    }
}
