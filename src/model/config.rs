//! Typed reading of `config.json`.
//!
//! Every accessor that needs a key reports a problem which names the key, its place and what is wrong, and returns
//! a placeholder so that reading goes on and all problems come together. Values read are meaningful only when no
//! problem was reported.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::diag::{Diagnostic, Problems, SourceText, count};

/// Largest extent, width or count that a configuration may state. Products of two stay within 64 bits.
pub(super) const MAX_SIZE: u64 = 1 << 31;

/// What all sections of one configuration share.
pub(super) struct Report<'a> {
    text: Option<&'a Arc<SourceText>>,
    problems: RefCell<Problems>,
}

impl<'a> Report<'a> {
    pub(super) fn new(text: Option<&'a Arc<SourceText>>) -> Report<'a> {
        Report { text, problems: RefCell::default() }
    }

    pub(super) fn push(&self, problem: Diagnostic) {
        self.problems.borrow_mut().push(problem);
    }

    pub(super) fn into_problems(self) -> Problems {
        self.problems.into_inner()
    }
}

/// One object of a configuration.
#[derive(Clone)]
pub(super) struct Config<'a> {
    object: &'a Map<String, Value>,
    path: Vec<&'a str>,
    report: &'a Report<'a>,
}

impl<'a> Config<'a> {
    pub(super) fn root(object: &'a Map<String, Value>, report: &'a Report<'a>) -> Config<'a> {
        Config { object, path: Vec::new(), report }
    }

    /// The text model's section: the first of the names under which published configurations nest it, else the
    /// top level itself.
    pub(super) fn text_section(&self) -> Config<'a> {
        let thinker = self.section("thinker_config");
        ["text_config", "llm_config", "language_config"]
            .iter()
            .find_map(|key| self.section(key))
            .or_else(|| thinker.and_then(|t| t.section("text_config")))
            .unwrap_or_else(|| self.clone())
    }

    /// Whether the key has a value, so that checks against it mean something.
    pub(super) fn states(&self, key: &str) -> bool {
        self.value(key).is_some()
    }

    /// Whether nothing was reported so far.
    pub(super) fn sound(&self) -> bool {
        self.report.problems.borrow().is_empty()
    }

    /// Whether this is the top level.
    pub(super) fn is_root(&self) -> bool {
        self.path.is_empty()
    }

    /// The object under `key`, if there is one.
    pub(super) fn section(&self, key: &str) -> Option<Config<'a>> {
        let (key, value) = self.object.get_key_value(key)?;
        let mut path = self.path.clone();
        path.push(key);
        Some(Config { object: value.as_object()?, path, report: self.report })
    }

    /// The object under `key`; a problem if there is none.
    pub(super) fn need_section(&self, key: &str) -> Option<Config<'a>> {
        let section = self.section(key);
        if section.is_none() {
            match self.value(key) {
                None => self.missing(key),
                Some(v) => self.wrong(key, v, "an object"),
            }
        }
        section
    }

    /// Keys of this object.
    pub(super) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.object.keys().map(String::as_str)
    }

    /// The value under `key`; null counts as absent.
    pub(super) fn value(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|v| !v.is_null())
    }

    /// A whole number from 1 to [`MAX_SIZE`].
    pub(super) fn size(&self, key: &str) -> u64 {
        self.need(key, 1, "a whole number from 1 to 2147483648", as_size)
    }

    /// The same, or `default` when absent or null.
    pub(super) fn size_or(&self, key: &str, default: u64) -> u64 {
        self.optional(key, "a whole number from 1 to 2147483648", as_size).unwrap_or(default)
    }

    /// The same, if there.
    pub(super) fn opt_size(&self, key: &str) -> Option<u64> {
        self.optional(key, "a whole number from 1 to 2147483648", as_size)
    }

    /// A whole number from 0 to [`MAX_SIZE`].
    pub(super) fn count(&self, key: &str) -> u64 {
        self.need(key, 0, "a whole number from 0 to 2147483648", as_count)
    }

    /// A whole number from 1 to `limit`, for counts that memory is allocated for.
    pub(super) fn bounded(&self, key: &str, limit: u64) -> u64 {
        let n = self.size(key);
        if n > limit {
            self.refuse(key, format!("is {}; at most {} are supported", count(n), count(limit)));
            return 1;
        }
        n
    }

    /// A finite number above 0.
    pub(super) fn positive(&self, key: &str) -> f64 {
        self.need(key, 1.0, "a number above 0", as_positive)
    }

    /// The same, if there.
    pub(super) fn opt_positive(&self, key: &str) -> Option<f64> {
        self.optional(key, "a number above 0", as_positive)
    }

    /// A number above 0 or null; the key must be there.
    pub(super) fn nullable_positive(&self, key: &str) -> Option<f64> {
        self.need_present(key);
        self.opt_positive(key)
    }

    /// A finite number.
    pub(super) fn real(&self, key: &str) -> f64 {
        self.need(key, 0.0, "a number", |v| v.as_f64().filter(|x| x.is_finite()))
    }

    /// true or false.
    pub(super) fn flag(&self, key: &str) -> bool {
        self.need(key, false, "true or false", Value::as_bool)
    }

    /// The same, or `default` when absent or null.
    pub(super) fn flag_or(&self, key: &str, default: bool) -> bool {
        self.optional(key, "true or false", Value::as_bool).unwrap_or(default)
    }

    /// A string; `None` after a report.
    pub(super) fn word(&self, key: &str) -> Option<&'a str> {
        self.need(key, None, "a string", |v| v.as_str().map(Some))
    }

    /// A string, if there.
    pub(super) fn opt_word(&self, key: &str) -> Option<&'a str> {
        self.optional(key, "a string", Value::as_str)
    }

    /// A list of strings, if there.
    pub(super) fn words(&self, key: &str) -> Option<Vec<&'a str>> {
        self.optional(key, "a list of strings", |v| {
            v.as_array()?.iter().map(Value::as_str).collect::<Option<Vec<&str>>>()
        })
    }

    /// A list of whole numbers, if there.
    pub(super) fn numbers(&self, key: &str) -> Option<Vec<u64>> {
        self.optional(key, "a list of whole numbers", |v| {
            v.as_array()?.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>()
        })
    }

    /// A problem unless the key is there, null allowed: its absence would change the model silently.
    pub(super) fn need_present(&self, key: &str) {
        if !self.object.contains_key(key) {
            self.report.push(
                self.missing_problem(key)
                    .help("null is a legal value here, but it has to be stated"),
            );
        }
    }

    fn need<T>(
        &self,
        key: &str,
        placeholder: T,
        what: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> T {
        match self.value(key) {
            None => {
                self.missing(key);
                placeholder
            }
            Some(v) => read(v).unwrap_or_else(|| {
                self.wrong(key, v, what);
                placeholder
            }),
        }
    }

    fn optional<T>(
        &self,
        key: &str,
        what: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Option<T> {
        let v = self.value(key)?;
        let out = read(v);
        if out.is_none() {
            self.wrong(key, v, what);
        }
        out
    }

    /// Reports that `key` is missing.
    pub(super) fn missing(&self, key: &str) {
        self.report.push(self.missing_problem(key));
    }

    fn missing_problem(&self, key: &str) -> Diagnostic {
        let mut problem = Diagnostic::new(
            "config",
            format!("`{}` is missing, and the model cannot be known without it", self.dotted(key)),
        );
        if let (Some(text), Some((last, outer))) = (self.report.text, self.path.split_last())
            && let Some(place) = locate(&text.text, outer, last)
        {
            problem = problem.at(text, place.key, format!("no `{key}` in here"));
        }
        problem
    }

    fn wrong(&self, key: &str, value: &Value, what: &str) {
        let mut shown = value.to_string();
        if shown.len() > 60 {
            let cut = (0..=57).rev().find(|&i| shown.is_char_boundary(i)).unwrap_or(0);
            shown.truncate(cut);
            shown.push('…');
        }
        self.refuse(key, format!("is {shown}; it has to be {what}"));
    }

    /// Reports that the value of `key` is not acceptable: "`key` `what`".
    pub(super) fn refuse(&self, key: &str, what: impl AsRef<str>) {
        self.report.push(self.problem(key, what));
    }

    /// The same with advice.
    pub(super) fn refuse_help(&self, key: &str, what: impl AsRef<str>, help: impl Into<String>) {
        self.report.push(self.problem(key, what).help(help));
    }

    /// The same with several lines of advice.
    pub(super) fn refuse_helps(&self, key: &str, what: impl AsRef<str>, help: &[&str]) {
        let mut problem = self.problem(key, what);
        problem.help.extend(help.iter().map(|line| (*line).to_owned()));
        self.report.push(problem);
    }

    fn problem(&self, key: &str, what: impl AsRef<str>) -> Diagnostic {
        let mut problem =
            Diagnostic::new("config", format!("`{}` {}", self.dotted(key), what.as_ref()));
        if let Some(text) = self.report.text
            && let Some(place) = locate(&text.text, &self.path, key)
        {
            problem = problem.at(text, place.value, "this value");
        }
        problem
    }

    /// Full name of a key: `text_config.head_dim`.
    pub(super) fn dotted(&self, key: &str) -> String {
        let mut out = self.path.join(".");
        if !out.is_empty() && !key.is_empty() {
            out.push('.');
        }
        out + key
    }
}

fn as_count(v: &Value) -> Option<u64> {
    v.as_u64().filter(|&n| n <= MAX_SIZE)
}

fn as_size(v: &Value) -> Option<u64> {
    as_count(v).filter(|&n| n >= 1)
}

fn as_positive(v: &Value) -> Option<f64> {
    v.as_f64().filter(|x| x.is_finite() && *x > 0.0)
}

struct Place {
    key: Range<usize>,
    value: Range<usize>,
}

/// Byte ranges of a key and its value in a JSON text that is known to parse. Keys with escapes are not found.
fn locate(text: &str, path: &[&str], key: &str) -> Option<Place> {
    let b = text.as_bytes();
    let mut at = skip_blank(b, 0);
    for (depth, want) in path.iter().chain([&key]).enumerate() {
        let place = member(b, at, want)?;
        if depth == path.len() {
            return Some(place);
        }
        at = place.value.start;
    }
    None
}

/// The member `want` of the object that starts at `at`.
fn member(b: &[u8], at: usize, want: &str) -> Option<Place> {
    let mut at = (b.get(at) == Some(&b'{')).then(|| skip_blank(b, at + 1))?;
    while b.get(at) == Some(&b'"') {
        let key = at..skip_value(b, at);
        at = skip_blank(b, key.end);
        at = skip_blank(b, at + 1);
        let value = at..skip_value(b, at);
        if b.get(key.start + 1..key.end.checked_sub(1)?) == Some(want.as_bytes()) {
            return Some(Place { key, value });
        }
        at = skip_blank(b, value.end);
        at = skip_blank(b, at + 1);
    }
    None
}

fn skip_blank(b: &[u8], mut at: usize) -> usize {
    while b.get(at).is_some_and(u8::is_ascii_whitespace) {
        at += 1;
    }
    at.min(b.len())
}

/// End of the value that starts at `at`.
fn skip_value(b: &[u8], mut at: usize) -> usize {
    let mut depth = 0usize;
    while let Some(&c) = b.get(at) {
        match c {
            b'"' => {
                at += 1;
                while let Some(&c) = b.get(at)
                    && c != b'"'
                {
                    at += if c == b'\\' { 2 } else { 1 };
                }
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' if depth == 0 => return at,
            b'}' | b']' => depth -= 1,
            b',' if depth == 0 => return at,
            _ if depth == 0 && c.is_ascii_whitespace() => return at,
            _ => {}
        }
        at += 1;
        if depth == 0 && matches!(c, b'"' | b'}' | b']') {
            break;
        }
    }
    at.min(b.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_values_are_found_in_the_text() {
        let text = r#" { "a" : [1, {"b": "}"}], "t": {"x\"": 1, "h": "q", "b": 12 } , "z": null}"#;
        let value = |path: &[&str], key: &str| {
            locate(text, path, key).map(|p| (&text[p.key], &text[p.value]))
        };
        assert_eq!(value(&[], "a"), Some(("\"a\"", r#"[1, {"b": "}"}]"#)));
        assert_eq!(value(&["t"], "b"), Some(("\"b\"", "12")));
        assert_eq!(value(&["t"], "h"), Some(("\"h\"", "\"q\"")));
        assert_eq!(value(&[], "z"), Some(("\"z\"", "null")));
        assert_eq!(value(&["a"], "b"), None);
        assert_eq!(value(&[], "b"), None);
    }

    #[test]
    fn cut_texts_never_panic() {
        let text = r#"{"a": {"b": ["\\", "x\"y", {}], "c": 1}, "é": "ü"}"#;
        for end in (0..=text.len()).filter(|&i| text.is_char_boundary(i)) {
            for path in [&[][..], &["a"], &["a", "b"]] {
                for key in ["a", "b", "c", "é"] {
                    if let Some(p) = locate(&text[..end], path, key) {
                        assert!(p.value.end <= end && p.key.end <= end);
                    }
                }
            }
        }
    }

    #[test]
    fn a_wrong_value_is_shown_where_it_stands() {
        let text = "{\n  \"text_config\": {\n    \"hidden_size\": \"64\"\n  }\n}\n";
        let source = Arc::new(SourceText { name: "config.json".into(), text: text.into() });
        let value: Value = serde_json::from_str(text).expect("JSON");
        let report = Report::new(Some(&source));
        let root = Config::root(value.as_object().expect("object"), &report);
        let section = root.text_section();
        section.size("hidden_size");
        section.size("head_dim");
        section.need_present("sliding_window");
        let failure = report
            .into_problems()
            .finish(crate::diag::FailureKind::Refused, "headline", ())
            .expect_err("three problems");
        insta::assert_snapshot!(failure.to_string(), @r#"
        error: headline  [exit 3]

          config: `text_config.hidden_size` is "64"; it has to be a whole number from 1 to 2147483648
             --> config.json:3:20
              |
            3 |     "hidden_size": "64"
              |                    ^^^^ this value
          config: `text_config.head_dim` is missing, and the model cannot be known without it
             --> config.json:2:3
              |
            2 |   "text_config": {
              |   ^^^^^^^^^^^^^ no `head_dim` in here
          config: `text_config.sliding_window` is missing, and the model cannot be known without it
             --> config.json:2:3
              |
            2 |   "text_config": {
              |   ^^^^^^^^^^^^^ no `sliding_window` in here
            = null is a legal value here, but it has to be stated

        3 problems
        "#);
    }
}
