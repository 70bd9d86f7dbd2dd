//! Import of radiance's text recipes: one `PATTERN QUANTISER KEY=VALUE…` a line becomes one rule.
//!
//! | there (rad-convert, container version 2) | here |
//! |---|---|
//! | words between white space; `#` starts a comment, also inside a word | `#` starts a comment |
//! | pattern over logical names: `*` any run, `?` one character, nothing else special | `weight`, other special characters escaped |
//! | `$NAME`, `${NAME}` in values, from the environment | the value |
//! | `rtn` and the grid options; the last scale level spans the weight, and is its own | `encoding`, `share_scale = false` |
//! | `cast` | `encoding` of that type |
//! | `rtn` declines vectors, which are then kept | `keep_vectors = true` |
//! | a rule that matches nothing is no error | `optional = true` |
//!
//! What the language here cannot say is a problem at its line: quantisers that need calibration, fixed scales, casts to
//! bare fp8.

use std::fmt::Write;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::builtin::read_file;
use super::document::{Recipe, SCHEMA};
use super::encoding::EncodingChoice;
use super::read::{AREA, quoted};
use crate::diag::{Diagnostic, FailureKind, Problems, Result, SourceText, list, nearest};

/// Options of `rtn`.
const GRID_OPTIONS: [&str; 14] = [
    "codes",
    "table",
    "group",
    "block",
    "scale",
    "scale2",
    "group2",
    "block2",
    "scale2_value",
    "zero",
    "transform",
    "rule",
    "scale_value",
    "clamp",
];

/// Quantisers, with why one cannot be imported.
const QUANTISERS: [(&str, Option<&str>); 7] = [
    ("rtn", None),
    ("cast", None),
    ("gptq", Some("it fits codes to the inputs of a calibration run, and this program has none")),
    (
        "awq",
        Some("it scales columns by the inputs of a calibration run, and this program has none"),
    ),
    ("autoround", Some("it trains offsets on a calibration run, and this program has none")),
    ("paroquant", Some("it trains rotations on a calibration run, and this program has none")),
    ("ggml", Some("llama.cpp's block types are found by its own searches, which are not here")),
];

/// llama.cpp's non-linear 4-bit codebook (`kvalues_iq4nl`), which recipes there call `iq4nl`.
const IQ4NL: [i16; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Codebooks that both languages know by name.
const TABLES: [&str; 3] = ["nf4", "binary", "ternary"];

/// Translates a file; `variable` gives the values of `$NAME`.
///
/// # Errors
/// A file that cannot be read or is no UTF-8, and as [`import`].
pub fn import_file(name: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<String> {
    let text = read_file(Path::new(name))?;
    import(&Arc::new(SourceText { name: name.to_owned(), text }), variable)
}

/// Translates a text recipe of radiance into a recipe of this language. The result parses; above every rule stands its
/// line.
///
/// # Errors
/// [`FailureKind::Usage`] with every line that is malformed or says what this language cannot, each with its place.
pub fn import(
    source: &Arc<SourceText>,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<String> {
    let path = Path::new(&source.name);
    let stem = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let mut out = format!(
        "# Imported from radiance's text recipe; above every rule stands its line.\n\n\
         schema = {SCHEMA}\nname = {}\n",
        quoted(&stem)
    );
    let mut problems = Problems::new();
    let mut start = 0;
    for (number, line) in source.text.split('\n').enumerate() {
        let said = line.split('#').next().unwrap_or_default();
        let words = words(said, start);
        if !words.is_empty() {
            let mut importer = Line { source, problems: Vec::new() };
            match importer.rule(&words, variable) {
                Some(rule) if importer.problems.is_empty() => {
                    let shown: String =
                        said.trim().chars().filter(|c| !c.is_control() || *c == '\t').collect();
                    // Writing to a String cannot fail.
                    let _ = write!(out, "\n# {}: {shown}\n{rule}", number + 1);
                }
                _ => problems.extend(importer.problems),
            }
        }
        start += line.len() + 1;
    }
    let headline = format!("{} cannot be imported", source.name);
    let out = problems.finish(FailureKind::Usage, &headline, out)?;
    // Every rule was read by itself; together they may be too many.
    Recipe::parse(SourceText { name: headline, text: out.clone() }.into())?;
    Ok(out)
}

/// A word with its place in the text.
#[derive(Clone)]
struct Word<'t> {
    text: &'t str,
    span: Range<usize>,
}

fn words(line: &str, start: usize) -> Vec<Word<'_>> {
    let place = |text: &str| text.as_ptr() as usize - line.as_ptr() as usize;
    line.split_whitespace()
        .map(|text| {
            let at = start + place(text);
            Word { text, span: at..at + text.len() }
        })
        .collect()
}

/// One option, its value expanded.
struct Setting<'t> {
    key: &'t str,
    value: String,
    span: Range<usize>,
}

/// One line while it is read.
struct Line<'s> {
    source: &'s Arc<SourceText>,
    problems: Vec<Diagnostic>,
}

impl Line<'_> {
    fn problem(&mut self, span: &Range<usize>, message: impl Into<String>, help: &[String]) {
        let mut problem = Diagnostic::new(AREA, message).at(self.source, span.clone(), "");
        problem.help.extend_from_slice(help);
        self.problems.push(problem);
    }

    /// The rule of a line as TOML, or `None` with every problem noted.
    fn rule(
        &mut self,
        words: &[Word<'_>],
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Option<String> {
        let [pattern, quantiser, options @ ..] = words else {
            let span = words.first().map_or(0..0, |w| w.span.clone());
            let help = "a rule is PATTERN QUANTISER KEY=VALUE…".to_owned();
            self.problem(&span, "a rule without a quantiser", &[help]);
            return None;
        };
        let settings = self.settings(options, variable);
        let all = pattern.span.start..words.last().map_or(pattern.span.end, |w| w.span.end);
        let known = QUANTISERS.iter().find(|(name, _)| *name == quantiser.text);
        let body = match known {
            None => {
                let names: Vec<&str> = QUANTISERS.iter().map(|(name, _)| *name).collect();
                let mut help = Vec::new();
                let near = nearest(quantiser.text, names.iter().copied());
                help.extend(near.first().map(|n| format!("did you mean `{n}`?")));
                help.push(format!("quantisers: {}", list(&names, usize::MAX)));
                let message = format!("`{}` is no quantiser", quantiser.text);
                self.problem(&quantiser.span, message, &help);
                return None;
            }
            Some((name, Some(why))) => {
                let message = format!("`{name}` cannot be imported: {why}");
                let help =
                    "rtn on the same grid stores the same planes, rounded to nearest".to_owned();
                let help: &[String] = if *name == "ggml" { &[] } else { &[help] };
                self.problem(&quantiser.span, message, help);
                return None;
            }
            Some(("cast", _)) => self.cast(&settings, &quantiser.span)?,
            Some(_) => self.grid(&settings)?,
        };
        if !self.problems.is_empty() {
            return None;
        }
        let head = format!("[[quantize]]\nweight = {}\n", quoted(&escaped(pattern.text)));
        self.check(&format!("{head}{body}"), &all)
    }

    /// Reads the rule as this program does, and writes it back with its encoding spelled out.
    fn check(&mut self, rule: &str, span: &Range<usize>) -> Option<String> {
        let text = format!("schema = {SCHEMA}\n{rule}");
        let source = SourceText { name: "the imported rule".to_owned(), text };
        let recipe = match Recipe::parse(source.into()) {
            Ok(recipe) => recipe,
            Err(failure) => {
                for problem in failure.problems {
                    self.problem(span, problem.message, &problem.help);
                }
                return None;
            }
        };
        let read = recipe.rules.first()?;
        let spelled = match &read.encoding.method {
            super::Method::Grid(_) => {
                EncodingChoice { name: None, method: read.encoding.method.clone() }.toml()
            }
            _ => read.encoding.toml(),
        };
        let lines = rule.lines().map(|line| match line.starts_with("encoding = ") {
            true => format!("encoding = {spelled}\n"),
            false => format!("{line}\n"),
        });
        Some(lines.collect())
    }

    fn settings<'t>(
        &mut self,
        options: &[Word<'t>],
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Vec<Setting<'t>> {
        let mut settings: Vec<Setting<'t>> = Vec::new();
        for word in options {
            let Some((key, value)) = word.text.split_once('=').filter(|(key, _)| !key.is_empty())
            else {
                let message = format!("`{}` is no option", word.text);
                self.problem(&word.span, message, &["options are KEY=VALUE".to_owned()]);
                continue;
            };
            if settings.iter().any(|s| s.key == key) {
                let help = "each option stands once in a rule".to_owned();
                self.problem(&word.span, format!("`{key}` is set twice"), &[help]);
                continue;
            }
            match expanded(value, variable) {
                Ok(value) => settings.push(Setting { key, value, span: word.span.clone() }),
                Err(why) => self.problem(&word.span, format!("`{key}`: {why}"), &[]),
            }
        }
        settings
    }

    /// Notes options that the quantiser does not have.
    fn unknown(&mut self, settings: &[Setting<'_>], known: &[&str]) {
        for setting in settings.iter().filter(|s| !known.contains(&s.key)) {
            let mut help = Vec::new();
            let near = nearest(setting.key, known.iter().copied());
            help.extend(near.first().map(|n| format!("did you mean `{n}`?")));
            help.push(format!("options here: {}", list(known, usize::MAX)));
            self.problem(&setting.span, format!("`{}` is no option here", setting.key), &help);
        }
    }

    fn cast(&mut self, settings: &[Setting<'_>], quantiser: &Range<usize>) -> Option<String> {
        self.unknown(settings, &["dtype"]);
        let Some(dtype) = settings.iter().find(|s| s.key == "dtype") else {
            let help = "e.g. cast dtype=bf16".to_owned();
            self.problem(quantiser, "`cast` without `dtype`", &[help]);
            return None;
        };
        match dtype.value.as_str() {
            "bf16" | "f16" | "f32" => {
                Some(format!("encoding = {}\noptional = true\n", quoted(&dtype.value)))
            }
            other => {
                let message = format!("a cast to {other} cannot be imported");
                let help = [
                    "casts here go to bf16, f16 and f32".to_owned(),
                    "bare fp8 clips what it cannot hold; `rtn codes=fp8_e4m3` scales it".to_owned(),
                ];
                self.problem(&dtype.span, message, &help);
                None
            }
        }
    }

    fn grid(&mut self, settings: &[Setting<'_>]) -> Option<String> {
        self.unknown(settings, &GRID_OPTIONS);
        let get = |key: &str| settings.iter().find(|s| s.key == key);
        for key in ["scale_value", "scale2_value"] {
            if let Some(setting) = get(key) {
                let message = format!("`{key}` gives a scale, and scales here are always found");
                self.problem(&setting.span, message, &[]);
            }
        }
        let mut keys: Vec<String> = Vec::new();
        let mut put = |key: &str, value: String| keys.push(format!("{key} = {value}"));
        if let Some(codes) = get("codes") {
            put("codes", quoted(&codes.value));
        }
        if let Some(table) = get("table") {
            put("table", self.table(table)?);
        }
        if let Some(block) = self.block(get("group"), get("block"))? {
            put("block", format!("[{}, {}]", block[0], block[1]));
        }
        if let Some(scale) = get("scale") {
            put("scale", quoted(&scale.value));
        }
        let second = self.block(get("group2"), get("block2"))?;
        match (get("scale2"), second) {
            (Some(scale2), second) => {
                let [rows, cols] = second.unwrap_or([0, 0]);
                let dtype = quoted(&scale2.value);
                put("scale2", format!("{{ dtype = {dtype}, block = [{rows}, {cols}] }}"));
            }
            (None, Some(_)) => {
                let setting = get("group2").or(get("block2"))?;
                let help = ["add scale2, e.g. scale2=f32".to_owned()];
                self.problem(&setting.span, "blocks of a second scale that is not there", &help);
            }
            (None, None) => {}
        }
        if let Some(zero) = get("zero") {
            put("zero", quoted(&zero.value));
        }
        for key in ["transform", "clamp"] {
            if let Some(setting) = get(key) {
                put(key, quoted(&setting.value));
            }
        }
        let mx = get("scale").is_some_and(|s| s.value == "e8m0");
        let mut search = false;
        if let Some(rule) = get("rule") {
            match (rule.value.as_str(), mx) {
                ("mx", true) | ("absmax", false) => {}
                ("search", false) => search = true,
                ("absmax" | "search", true) | ("mx", false) => {
                    let message = format!(
                        "rule={} with a scale of {} cannot be imported",
                        rule.value,
                        get("scale").map_or("bf16", |s| s.value.as_str())
                    );
                    let help = "here powers of two (e8m0) follow the mx rule, other scales do not";
                    self.problem(&rule.span, message, &[help.to_owned()]);
                }
                ("fixed", _) => {
                    let message = "rule=fixed gives a scale, and scales here are always found";
                    self.problem(&rule.span, message, &[]);
                }
                (other, _) => {
                    let help = "rules: absmax, mx, fixed and search".to_owned();
                    self.problem(&rule.span, format!("`{other}` is no rule for scales"), &[help]);
                }
            }
        }
        let mut out = format!("encoding = {{ {} }}\n", keys.join(", "));
        if search {
            out.push_str("quantizer = \"search\"\n");
        }
        if get("scale2").is_some() {
            out.push_str("share_scale = false\n");
        }
        out.push_str("optional = true\nkeep_vectors = true\n");
        Some(out)
    }

    /// Rows and columns of a block out of `group=N` or `block=RxC`; `Some(None)` where neither is there.
    #[allow(clippy::option_option)] // outer: no problem; inner: whether it is set
    fn block(
        &mut self,
        group: Option<&Setting<'_>>,
        block: Option<&Setting<'_>>,
    ) -> Option<Option<[u64; 2]>> {
        match (group, block) {
            (None, None) => Some(None),
            (Some(_), Some(block)) => {
                let message = format!("`{}` beside a group: both set the same extent", block.key);
                self.problem(&block.span, message, &["keep one of them".to_owned()]);
                None
            }
            (Some(group), None) => match integer(&group.value) {
                Some(n) if n > 0 => Some(Some([1, n])),
                _ => {
                    let message =
                        format!("`{}` is {}, no count of columns", group.key, group.value);
                    self.problem(&group.span, message, &[]);
                    None
                }
            },
            (None, Some(block)) => {
                let side = |text: &str| match text {
                    "*" => Some(0),
                    text => integer(text).filter(|n| *n > 0),
                };
                let sides =
                    block.value.split_once('x').and_then(|(r, c)| Some([side(r)?, side(c)?]));
                if sides.is_none() {
                    let message = format!("`{}` is {}, not ROWSxCOLUMNS", block.key, block.value);
                    let help = "e.g. 128x128; * is the whole extent".to_owned();
                    self.problem(&block.span, message, &[help]);
                }
                sides.map(Some)
            }
        }
    }

    /// A codebook as TOML: a name that both languages have, or its values.
    fn table(&mut self, table: &Setting<'_>) -> Option<String> {
        if TABLES.contains(&table.value.as_str()) {
            return Some(quoted(&table.value));
        }
        if table.value == "iq4nl" {
            let values: Vec<String> = IQ4NL.iter().map(i16::to_string).collect();
            return Some(format!("[{}]", values.join(", ")));
        }
        let values: Option<Vec<String>> = table
            .value
            .split(';')
            .map(|v| v.parse::<f64>().ok().filter(|v| v.is_finite()).map(|v| format!("{v:?}")))
            .collect();
        let values = values.filter(|_| table.value.contains(';'));
        if values.is_none() {
            let message = format!("the codebook `{}` is not known here", table.value);
            let help =
                format!("codebooks: {}, iq4nl, or the values joined by `;`", TABLES.join(", "));
            self.problem(&table.span, message, &[help]);
        }
        values.map(|values| format!("[{}]", values.join(", ")))
    }
}

/// The glob with everything but `*` and `?` literal.
fn escaped(glob: &str) -> String {
    let mut out = String::with_capacity(glob.len());
    for c in glob.chars() {
        if matches!(c, '{' | '}' | '[' | ']' | '\\') {
            out.push('\\');
        }
        out.push(c);
    }
    // What follows `re:` would be a regular expression.
    if out.starts_with("re:") { format!("\\{out}") } else { out }
}

/// A number as C's `strtoll` reads it with base 0: decimal, `0x` hexadecimal, leading 0 octal; nothing may follow.
fn integer(text: &str) -> Option<u64> {
    let digits = text.strip_prefix('+').unwrap_or(text);
    let (digits, radix) = match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        Some(hex) => (hex, 16),
        None if digits.len() > 1 && digits.starts_with('0') => (&digits[1..], 8),
        None => (digits, 10),
    };
    // The standard library takes a sign of its own.
    digits.chars().all(|c| c.is_digit(radix)).then(|| u64::from_str_radix(digits, radix).ok())?
}

/// A value with `$NAME` and `${NAME}` replaced.
fn expanded(
    value: &str,
    variable: &dyn Fn(&str) -> Option<String>,
) -> std::result::Result<String, String> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut out = String::new();
    let mut rest = value;
    while let Some((before, after)) = rest.split_once('$') {
        out.push_str(before);
        let (name, next) = match after.strip_prefix('{') {
            Some(inner) => {
                inner.split_once('}').ok_or_else(|| format!("`${after}` has no closing brace"))?
            }
            None => after.split_at(after.find(|c| !word(c)).unwrap_or(after.len())),
        };
        if name.is_empty()
            || !name.chars().all(word)
            || name.starts_with(|c: char| c.is_ascii_digit())
        {
            return Err(format!("`${after}` names no variable"));
        }
        let found = variable(name).ok_or_else(|| format!("the variable {name} is not set"))?;
        out.push_str(&found);
        rest = next;
    }
    out.push_str(rest);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_as_c_reads_them() {
        let cases = [
            ("128", Some(128)),
            ("0x80", Some(128)),
            ("0X1f", Some(31)),
            ("0200", Some(128)),
            ("+7", Some(7)),
            ("0", Some(0)),
            ("", None),
            ("08", None),
            ("12k", None),
            ("-1", None),
            ("++1", None),
            ("0x", None),
            ("0x+1", None),
            ("99999999999999999999", None),
        ];
        for (text, value) in cases {
            assert_eq!(integer(text), value, "{text}");
        }
    }

    #[test]
    fn variables_are_replaced_once() {
        let variable = |name: &str| match name {
            "G" => Some("128".to_owned()),
            "LOOP" => Some("$LOOP".to_owned()),
            _ => None,
        };
        let all = |text: &str| expanded(text, &variable);
        assert_eq!(all("$G"), Ok("128".to_owned()));
        assert_eq!(all("1x${G}"), Ok("1x128".to_owned()));
        assert_eq!(all("${G}$G-x"), Ok("128128-x".to_owned()));
        assert_eq!(all("$LOOP"), Ok("$LOOP".to_owned()));
        assert_eq!(all("plain"), Ok("plain".to_owned()));
        assert_eq!(all("$"), Err("`$` names no variable".to_owned()));
        assert_eq!(all("${G"), Err("`${G` has no closing brace".to_owned()));
        assert_eq!(all("${}"), Err("`${}` names no variable".to_owned()));
        assert_eq!(all("$1"), Err("`$1` names no variable".to_owned()));
        assert_eq!(all("$GROUP"), Err("the variable GROUP is not set".to_owned()));
    }
}
