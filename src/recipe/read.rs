//! Reading values out of a TOML document while collecting every problem, each with its place and a way out.

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::diag::{Diagnostic, SourceText, list, nearest};

/// Area of every diagnostic of this stage.
pub(super) const AREA: &str = "recipe";

/// Where in a recipe's text something stands.
///
/// All places compare equal: two recipes are equal when they say the same, wherever they say it.
#[derive(Debug, Clone)]
pub struct Place {
    /// The text.
    pub source: Arc<SourceText>,
    /// Byte range in it.
    pub span: Range<usize>,
}

impl PartialEq for Place {
    fn eq(&self, _: &Place) -> bool {
        true
    }
}

impl Place {
    /// Points a problem at this place.
    pub(super) fn mark(&self, problem: Diagnostic, label: impl Into<String>) -> Diagnostic {
        problem.at(&self.source, self.span.clone(), label)
    }
}

/// One table of the document that is being read.
pub(super) struct Section<'t> {
    /// How people write it: `[graphs]`, `[[quantize]]`, `the top level`.
    pub title: &'static str,
    /// Its entries.
    pub table: &'t DeTable<'t>,
    /// Every key it may have.
    pub keys: &'static [&'static str],
}

/// A reader of one text. Values that are absent or wrong read as `None`; what was wrong is kept for
/// [`Reader::finish`].
pub(super) struct Reader<'a> {
    source: &'a Arc<SourceText>,
    problems: Vec<(usize, Diagnostic)>,
}

/// Keys of other tools, with the key that stands for them here, or else what to write.
const FOREIGN: &[(&str, &str)] = &[
    ("targets", "match"),
    ("pattern", "match"),
    ("patterns", "match"),
    ("include", "match"),
    ("scheme", "encoding"),
    ("format", "encoding"),
    ("dtype", "encoding"),
    ("ignore", KEEP_FIRST),
    ("exclude", KEEP_FIRST),
    ("group_size", "`group` in a spelled-out encoding, or a name such as \"int8-g128\""),
    ("kvcache_partition_len", "kv_partition_len"),
    ("kvcache_block_size", "kv_partition_len"),
    ("kv_cache_dtype", "kv_dtype"),
    ("attn_impl", "attention"),
    ("max_model_len", "max_seq_len"),
    ("max_num_seqs", "batch_size"),
    ("tensor_parallel_size", "devices"),
    ("num_devices", "devices"),
    ("gpu_memory_utilization", "memory_budget"),
];

const KEEP_FIRST: &str = "a rule with encoding = \"keep\" before the others; weights that no rule selects are kept anyway";

/// Characters that word processors put in place of straight quotes.
pub(super) const CURLY: [char; 8] = ['“', '”', '„', '‟', '‘', '’', '‚', '‛'];

impl<'a> Reader<'a> {
    /// A reader of that text without problems yet.
    pub(super) fn new(source: &'a Arc<SourceText>) -> Reader<'a> {
        Reader { source, problems: Vec::new() }
    }

    /// The place of a span.
    pub(super) fn place(&self, span: Range<usize>) -> Place {
        Place { source: Arc::clone(self.source), span }
    }

    /// Number of problems so far.
    pub(super) fn count(&self) -> usize {
        self.problems.len()
    }

    /// Notes a problem.
    pub(super) fn problem<H: Into<String>>(
        &mut self,
        span: Range<usize>,
        message: impl Into<String>,
        label: impl Into<String>,
        help: impl IntoIterator<Item = H>,
    ) {
        let start = span.start;
        let mut problem = Diagnostic::new(AREA, message).at(self.source, span, label);
        problem.help.extend(help.into_iter().map(Into::into));
        self.problems.push((start, problem));
    }

    /// Every problem in the order of the text.
    pub(super) fn finish(mut self) -> Vec<Diagnostic> {
        self.problems.sort_by_key(|(start, _)| *start);
        self.problems.into_iter().map(|(_, problem)| problem).collect()
    }

    /// The document's root table, or `None` with every syntax error noted.
    pub(super) fn parse(&mut self, text: &'a str) -> Option<Spanned<DeTable<'a>>> {
        let (root, errors) = DeTable::parse_recoverable(text);
        for error in &errors {
            let span = error.span().unwrap_or(0..0);
            let message = reason(error.message(), text.get(span.clone()).unwrap_or(""));
            let line_end = text.get(span.start..).and_then(|rest| rest.find('\n'));
            let line_start =
                text.get(..span.start).and_then(|t| t.rfind('\n')).map_or(0, |i| i + 1);
            let line_end = line_end.map_or(text.len(), |n| span.start + n);
            let line = text.get(line_start..line_end).unwrap_or("");
            let help = line
                .contains(CURLY)
                .then(|| "this line has typographic quotes; TOML knows only \" and '".to_owned());
            self.problem(span, format!("not TOML: {message}"), "", help);
        }
        errors.is_empty().then_some(root)
    }

    /// Notes every key that the section does not have; `elsewhere` lists the keys of all sections. Returns the keys
    /// of the section that were probably meant.
    pub(super) fn unknown_keys(
        &mut self,
        section: &Section<'_>,
        elsewhere: &[(&str, &[&str])],
    ) -> Vec<&'static str> {
        let mut meant = Vec::new();
        for key in section.table.keys() {
            let name: &str = key.get_ref();
            if section.keys.contains(&name) {
                continue;
            }
            let mut help = Vec::new();
            let foreign =
                FOREIGN.iter().find(|(foreign, _)| *foreign == name).map(|(_, here)| *here);
            let homes: Vec<&str> = elsewhere
                .iter()
                .filter(|(_, keys)| keys.contains(&foreign.unwrap_or(name)))
                .map(|(title, _)| *title)
                .collect();
            let near = nearest(name, section.keys.iter().copied());
            match foreign {
                Some(here) if section.keys.contains(&here) => {
                    help.push(format!("here it is `{here}`"))
                }
                Some(here) if homes.is_empty() => help.push(format!("here it is {here}")),
                Some(here) => help.push(format!("here it is `{here}` of {}", list(&homes, 3))),
                None if !homes.is_empty() => {
                    help.push(format!("`{name}` belongs to {}", list(&homes, 3)));
                }
                None => help.extend(near.first().map(|first| format!("did you mean `{first}`?"))),
            }
            let target = foreign.or(near.first().copied());
            meant.extend(section.keys.iter().copied().find(|k| Some(*k) == target));
            help.push(format!("keys of {}: {}", section.title, list(section.keys, usize::MAX)));
            let message = format!("{} has no key `{name}`", section.title);
            self.problem(key.span(), message, "unknown key", help);
        }
        meant
    }

    /// Notes that a value has the wrong type.
    pub(super) fn wrong_type(&mut self, key: &str, value: &Spanned<DeValue<'_>>, wanted: &str) {
        let got = type_name(value.get_ref());
        let mut help = Vec::new();
        if let DeValue::String(text) = value.get_ref()
            && (wanted.starts_with("a whole number") && text.parse::<u64>().is_ok()
                || wanted.starts_with("true or false") && matches!(text.as_ref(), "true" | "false"))
        {
            help.push(format!("write {key} = {text} without quotes"));
        }
        self.problem(value.span(), format!("`{key}` is {got}, not {wanted}"), got, help);
    }

    /// The sub-table of that key.
    pub(super) fn table<'t>(
        &mut self,
        parent: &'t DeTable<'t>,
        key: &str,
    ) -> Option<&'t DeTable<'t>> {
        let value = parent.get(key)?;
        match value.get_ref() {
            DeValue::Table(table) => Some(table),
            _ => {
                self.wrong_type(key, value, &format!("a table; write a section [{key}]"));
                None
            }
        }
    }

    /// A string.
    pub(super) fn text(&mut self, section: &Section<'_>, key: &str) -> Option<Spanned<String>> {
        let value = section.table.get(key)?;
        match value.get_ref() {
            DeValue::String(text) => Some(Spanned::new(value.span(), text.to_string())),
            _ => {
                self.wrong_type(key, value, "a string");
                None
            }
        }
    }

    /// `true` or `false`.
    pub(super) fn flag(&mut self, section: &Section<'_>, key: &str) -> Option<bool> {
        let value = section.table.get(key)?;
        match value.get_ref() {
            DeValue::Boolean(flag) => Some(*flag),
            _ => {
                self.wrong_type(key, value, "true or false");
                None
            }
        }
    }

    /// A whole number in that range.
    pub(super) fn whole(
        &mut self,
        section: &Section<'_>,
        key: &str,
        range: RangeInclusive<u64>,
    ) -> Option<u64> {
        let value = section.table.get(key)?;
        self.whole_value(key, value, &range)
    }

    /// One whole number or a list of them, all in that range; an empty list is a problem.
    pub(super) fn wholes(
        &mut self,
        section: &Section<'_>,
        key: &str,
        range: RangeInclusive<u64>,
    ) -> Option<Vec<u64>> {
        let value = section.table.get(key)?;
        let items = self.items(key, value);
        let read: Vec<Option<u64>> =
            items.iter().map(|v| self.whole_value(key, v, &range)).collect();
        read.into_iter().collect::<Option<Vec<u64>>>().filter(|list| !list.is_empty())
    }

    /// One string or a list of strings; an empty list is a problem.
    pub(super) fn texts(
        &mut self,
        section: &Section<'_>,
        key: &str,
    ) -> Option<Vec<Spanned<String>>> {
        let value = section.table.get(key)?;
        let mut read = Vec::new();
        let mut whole = true;
        for item in self.items(key, value) {
            match item.get_ref() {
                DeValue::String(text) => read.push(Spanned::new(item.span(), text.to_string())),
                _ => {
                    self.wrong_type(key, item, "a string or a list of strings");
                    whole = false;
                }
            }
        }
        (whole && !read.is_empty()).then_some(read)
    }

    /// One name or a list of names out of `known`.
    pub(super) fn choices<T: Copy>(
        &mut self,
        section: &Section<'_>,
        key: &str,
        known: &[(&str, T)],
    ) -> Option<Vec<T>> {
        let texts = self.texts(section, key)?;
        let read: Vec<Option<T>> = texts.iter().map(|text| self.pick(key, text, known)).collect();
        read.into_iter().collect()
    }

    /// One name out of `known`.
    pub(super) fn choice<T: Copy>(
        &mut self,
        section: &Section<'_>,
        key: &str,
        known: &[(&str, T)],
    ) -> Option<T> {
        let text = self.text(section, key)?;
        self.pick(key, &text, known)
    }

    fn pick<T: Copy>(
        &mut self,
        key: &str,
        text: &Spanned<String>,
        known: &[(&str, T)],
    ) -> Option<T> {
        let name = text.get_ref().as_str();
        let found = known.iter().find(|(k, _)| *k == name).map(|(_, value)| *value);
        if found.is_none() {
            let names: Vec<&str> = known.iter().map(|(k, _)| *k).collect();
            self.unknown_name(key, name, text.span(), &names);
        }
        found
    }

    /// Notes that `name` is none of `known`.
    pub(super) fn unknown_name(
        &mut self,
        key: &str,
        name: &str,
        span: Range<usize>,
        known: &[&str],
    ) {
        let mut help = Vec::new();
        let near = nearest(name, known.iter().copied());
        let part = || known.iter().copied().find(|k| name.len() > 2 && k.contains(name));
        if let Some(first) = near.first().copied().or_else(part) {
            help.push(format!("did you mean \"{first}\"?"));
        }
        help.push(format!("values of `{key}`: {}", list(known, usize::MAX)));
        self.problem(span, format!("`{key}` cannot be \"{name}\""), "unknown value", help);
    }

    /// The value itself, or the items of the list that it is.
    fn items<'t>(
        &mut self,
        key: &str,
        value: &'t Spanned<DeValue<'t>>,
    ) -> &'t [Spanned<DeValue<'t>>] {
        match value.get_ref() {
            DeValue::Array(array) if array.is_empty() => {
                self.problem(
                    value.span(),
                    format!("`{key}` is an empty list"),
                    "nothing in it",
                    [format!("drop `{key}`, or name at least one value")],
                );
                &[]
            }
            DeValue::Array(array) => array,
            _ => std::slice::from_ref(value),
        }
    }

    /// A whole number, or a problem under the name `key`.
    pub(super) fn whole_value(
        &mut self,
        key: &str,
        value: &Spanned<DeValue<'_>>,
        range: &RangeInclusive<u64>,
    ) -> Option<u64> {
        let DeValue::Integer(integer) = value.get_ref() else {
            self.wrong_type(key, value, "a whole number");
            return None;
        };
        let read = u64::from_str_radix(integer.as_str(), integer.radix()).ok();
        let inside = read.filter(|n| range.contains(n));
        if inside.is_none() {
            let (low, high) = (range.start(), range.end());
            self.problem(
                value.span(),
                format!("`{key}` is {integer}, not {low} to {high}"),
                "out of range",
                [] as [String; 0],
            );
        }
        inside
    }
}

/// The toml crate's reason, where it is clear; a bare word or nothing after `=` reads there as an unfinished string.
fn reason(message: &str, marked: &str) -> String {
    let first = message.lines().next().unwrap_or_default();
    if !first.starts_with("string values must be quoted") {
        first.to_owned()
    } else if marked.trim().is_empty() {
        "a value is missing".to_owned()
    } else {
        "this is no number, true or false, and text stands in quotes".to_owned()
    }
}

/// `a string`, `a whole number`, …
pub(super) fn type_name(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "a whole number",
        DeValue::Float(_) => "a decimal number",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

/// A TOML basic string: what [`Reader`] reads back as the same characters.
///
/// Written here rather than by the `toml` crate because digests of recipes rest on every byte of it.
pub(super) fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            '\r' => out.push_str("\\r"),
            c if c.is_control() => out.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// A TOML list of what `items` print as.
pub(super) fn bracketed(items: impl IntoIterator<Item = String>) -> String {
    format!("[{}]", items.into_iter().collect::<Vec<_>>().join(", "))
}
