//! Parts of `tokenizer.json` as steps.

use serde_json::{Map, Value};

use super::Fits;
use crate::artifact::Step;

/// Behaviours of a split by number: the order in which tokenizers 0.22 declares them.
const BEHAVIOURS: [&str; 5] =
    ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"];

pub(super) fn step(kind: u32, flags: u32) -> Step {
    Step { kind, flags, arg0: Vec::new(), arg1: Vec::new(), number: 0 }
}

/// The options of a part, each of which must be known.
pub(super) struct Options<'v> {
    /// `pre_tokenizer Split`.
    pub(super) part: String,
    pub(super) kind: &'v str,
    pub(super) map: &'v Map<String, Value>,
}

impl<'v> Options<'v> {
    pub(super) fn of(role: &str, value: &'v Value) -> Fits<Options<'v>> {
        let map = value.as_object().ok_or_else(|| format!("{role} is no object"))?;
        let kind = map.get("type").and_then(Value::as_str);
        let kind = kind.ok_or_else(|| format!("{role} names no type"))?;
        Ok(Options { part: format!("{role} {kind}"), kind, map })
    }

    fn no_kind<T>(&self) -> Fits<T> {
        Err(format!("{} has no step kind in it", self.part))
    }

    /// Refuses options beside these.
    pub(super) fn only(&self, known: &[&str]) -> Fits<()> {
        let odd = |(key, value): &(&String, &Value)| {
            key.as_str() != "type" && !known.contains(&key.as_str()) && !value.is_null()
        };
        match self.map.iter().find(odd) {
            Some((key, _)) => Err(format!("{}: the option {key} has no place in it", self.part)),
            None => Ok(()),
        }
    }

    pub(super) fn wrong<T>(&self, key: &str) -> Fits<T> {
        let value = self.map.get(key).unwrap_or(&Value::Null);
        Err(format!("{}: {key} {value} has no place in it", self.part))
    }

    pub(super) fn flag(&self, key: &str, unset: bool) -> Fits<bool> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(unset),
            Some(Value::Bool(set)) => Ok(*set),
            Some(_) => self.wrong(key),
        }
    }

    pub(super) fn text(&self, key: &str) -> Fits<&'v str> {
        match self.map.get(key) {
            Some(Value::String(text)) => Ok(text),
            _ => self.wrong(key),
        }
    }

    pub(super) fn number(&self, key: &str) -> Fits<u32> {
        let number = self.map.get(key).and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok());
        number.filter(|n| i32::try_from(*n).is_ok()).map_or_else(|| self.wrong(key), Ok)
    }

    /// A pattern, and whether it is a regular expression.
    fn pattern(&self) -> Fits<(&'v str, bool)> {
        let pattern = self.map.get("pattern").and_then(Value::as_object);
        let only = pattern.filter(|p| p.len() == 1).and_then(|p| p.iter().next());
        match only {
            Some((key, Value::String(text))) if key == "String" => Ok((text, false)),
            Some((key, Value::String(text))) if key == "Regex" => Ok((text, true)),
            _ => self.wrong("pattern"),
        }
    }

    fn behaviour(&self, unset: &str) -> Fits<i64> {
        let name = match self.map.get("behavior") {
            None | Some(Value::Null) => unset,
            Some(_) => self.text("behavior")?,
        };
        let number = BEHAVIOURS.iter().position(|b| *b == name);
        number.map_or_else(|| self.wrong("behavior"), |n| Ok(n as i64))
    }

    /// Metaspace, as a pre-tokenizer or a decoder.
    fn metaspace(&self, kind: u32) -> Fits<Step> {
        self.only(&["replacement", "prepend_scheme", "add_prefix_space", "split", "str_rep"])?;
        // An older form says only whether there is a prefix at all.
        let prefixed = self.flag("add_prefix_space", true)?;
        let scheme = match self.map.get("prepend_scheme") {
            None | Some(Value::Null) => "always",
            Some(_) => self.text("prepend_scheme")?,
        };
        let number = match (scheme, prefixed) {
            ("never", _) | ("always", false) => 0,
            ("first", true) => 1,
            ("always", true) => 2,
            _ => return self.wrong("prepend_scheme"),
        };
        let arg0 = self.text("replacement")?.as_bytes().to_vec();
        Ok(Step { arg0, number, ..step(kind, u32::from(self.flag("split", true)?)) })
    }
}

pub(super) fn normalizer(value: &Value) -> Fits<Step> {
    let o = Options::of("normalizer", value)?;
    let plain = |kind| o.only(&[]).map(|()| step(kind, 0));
    match o.kind {
        "NFC" => plain(1),
        "NFKC" => plain(2),
        "NFD" => plain(3),
        "NFKD" => plain(4),
        "Lowercase" => plain(5),
        "Strip" => {
            o.only(&["strip_left", "strip_right"])?;
            let (left, right) = (o.flag("strip_left", true)?, o.flag("strip_right", true)?);
            Ok(step(6, u32::from(left) | u32::from(right) << 1))
        }
        "Replace" => {
            o.only(&["pattern", "content"])?;
            let (pattern, regex) = o.pattern()?;
            let (arg0, arg1) =
                (pattern.as_bytes().to_vec(), o.text("content")?.as_bytes().to_vec());
            Ok(Step { arg0, arg1, ..step(7, u32::from(regex)) })
        }
        "Prepend" => {
            o.only(&["prepend"])?;
            Ok(Step { arg0: o.text("prepend")?.as_bytes().to_vec(), ..step(8, 0) })
        }
        _ => o.no_kind(),
    }
}

pub(super) fn pre_tokenizer(value: &Value) -> Fits<Step> {
    let o = Options::of("pre_tokenizer", value)?;
    match o.kind {
        "ByteLevel" => {
            // Offsets are no matter of tokens.
            o.only(&["add_prefix_space", "trim_offsets", "use_regex"])?;
            let (prefix, regex) = (o.flag("add_prefix_space", true)?, o.flag("use_regex", true)?);
            Ok(step(32, u32::from(prefix) | u32::from(regex) << 1))
        }
        "Split" => {
            o.only(&["pattern", "behavior", "invert"])?;
            let (pattern, regex) = o.pattern()?;
            let pattern = if regex { pattern.to_owned() } else { literally(pattern) };
            Ok(Step {
                arg0: pattern.into_bytes(),
                number: o.behaviour("")?,
                ..step(33, u32::from(o.flag("invert", false)?))
            })
        }
        "Metaspace" => o.metaspace(34),
        "Whitespace" => o.only(&[]).map(|()| step(35, 0)),
        "Punctuation" => {
            o.only(&["behavior"])?;
            Ok(Step { number: o.behaviour("Isolated")?, ..step(36, 0) })
        }
        "Digits" => {
            o.only(&["individual_digits"])?;
            Ok(step(37, u32::from(o.flag("individual_digits", false)?)))
        }
        _ => o.no_kind(),
    }
}

pub(super) fn decoder(value: &Value) -> Fits<Step> {
    let o = Options::of("decoder", value)?;
    match o.kind {
        "ByteLevel" => {
            // Of these only the pre-tokenizer makes use.
            o.only(&["add_prefix_space", "trim_offsets", "use_regex"])?;
            Ok(step(64, 0))
        }
        "Metaspace" => o.metaspace(65),
        "Replace" => {
            o.only(&["pattern", "content"])?;
            match o.pattern()? {
                (_, true) => o.wrong("pattern"),
                (pattern, false) => Ok(Step {
                    arg0: pattern.as_bytes().to_vec(),
                    arg1: o.text("content")?.as_bytes().to_vec(),
                    ..step(66, 0)
                }),
            }
        }
        "Strip" => {
            o.only(&["content", "start", "stop"])?;
            let number = i64::from(o.number("start")?) | i64::from(o.number("stop")?) << 32;
            Ok(Step { arg0: o.text("content")?.as_bytes().to_vec(), number, ..step(67, 0) })
        }
        "Fuse" => o.only(&[]).map(|()| step(68, 0)),
        "ByteFallback" => o.only(&[]).map(|()| step(69, 0)),
        _ => o.no_kind(),
    }
}

/// A regular expression that matches a text and nothing else.
fn literally(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if r"\.+*?()|[]{}^$".contains(c) {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::one;
    use super::*;

    #[test]
    fn every_step_kind_has_its_number_flags_and_arguments() {
        let n = |part| one("normalizer", part);
        assert_eq!(n(json!({"type": "NFC"})), r#"1/0 "" "" 0"#);
        assert_eq!(n(json!({"type": "NFKC"})), r#"2/0 "" "" 0"#);
        assert_eq!(n(json!({"type": "NFD"})), r#"3/0 "" "" 0"#);
        assert_eq!(n(json!({"type": "NFKD"})), r#"4/0 "" "" 0"#);
        assert_eq!(n(json!({"type": "Lowercase"})), r#"5/0 "" "" 0"#);
        assert_eq!(
            n(json!({"type": "Strip", "strip_left": true, "strip_right": false})),
            r#"6/1 "" "" 0"#
        );
        assert_eq!(
            n(json!({"type": "Strip", "strip_left": false, "strip_right": true})),
            r#"6/2 "" "" 0"#
        );
        assert_eq!(
            n(json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})),
            r#"7/0 " " "▁" 0"#
        );
        assert_eq!(
            n(json!({"type": "Replace", "pattern": {"Regex": " +"}, "content": ""})),
            r#"7/1 " +" "" 0"#
        );
        assert_eq!(n(json!({"type": "Prepend", "prepend": "▁"})), r#"8/0 "▁" "" 0"#);
        let p = |part| one("pre_tokenizer", part);
        let level = |prefix: bool, regex: bool| {
            p(
                json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": regex}),
            )
        };
        assert_eq!(
            [level(true, false), level(false, true)],
            [r#"32/1 "" "" 0"#, r#"32/2 "" "" 0"#]
        );
        for (number, behaviour) in BEHAVIOURS.iter().enumerate() {
            let split = |invert: bool| {
                p(
                    json!({"type": "Split", "pattern": {"Regex": "\\d"}, "behavior": behaviour, "invert": invert}),
                )
            };
            assert_eq!(split(false), format!(r#"33/0 "\\d" "" {number}"#));
            assert_eq!(split(true), format!(r#"33/1 "\\d" "" {number}"#));
        }
        assert_eq!(
            p(
                json!({"type": "Split", "pattern": {"String": "a.b"}, "behavior": "Isolated", "invert": false})
            ),
            r#"33/0 "a\\.b" "" 1"#
        );
        for (number, scheme) in ["never", "first", "always"].iter().enumerate() {
            let part = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
            assert_eq!(p(part.clone()), format!(r#"34/1 "▁" "" {number}"#));
            assert_eq!(one("decoder", part), format!(r#"65/1 "▁" "" {number}"#));
        }
        assert_eq!(
            p(
                json!({"type": "Metaspace", "replacement": "▁", "add_prefix_space": false, "split": false})
            ),
            r#"34/0 "▁" "" 0"#
        );
        assert_eq!(p(json!({"type": "Whitespace"})), r#"35/0 "" "" 0"#);
        assert_eq!(p(json!({"type": "Punctuation", "behavior": "Contiguous"})), r#"36/0 "" "" 4"#);
        assert_eq!(p(json!({"type": "Punctuation"})), r#"36/0 "" "" 1"#);
        assert_eq!(p(json!({"type": "Digits", "individual_digits": true})), r#"37/1 "" "" 0"#);
        let d = |part| one("decoder", part);
        assert_eq!(d(json!({"type": "ByteLevel", "use_regex": true})), r#"64/0 "" "" 0"#);
        assert_eq!(
            d(json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "})),
            r#"66/0 "▁" " " 0"#
        );
        assert_eq!(
            d(json!({"type": "Strip", "content": " ", "start": 1, "stop": 2})),
            format!(r#"67/0 " " "" {}"#, 1 + (2i64 << 32))
        );
        assert_eq!(
            d(
                json!({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]})
            ),
            r#"69/0 "" "" 0, 68/0 "" "" 0"#
        );
    }

    #[test]
    fn a_literal_pattern_matches_its_text_alone() {
        for text in [" ", "a.b", r"\d+", "[x]{2}", "^$|()*?", "-#&~▁"] {
            let pattern =
                regex::Regex::new(&format!("^(?:{})$", literally(text))).expect("a pattern");
            assert!(pattern.is_match(text), "{text}");
            assert!(!pattern.is_match("axb") && !pattern.is_match("1"), "{text}");
        }
    }
}
