//! Foundation: problems as data, and their renderings.
//!
//! A [`Diagnostic`] states the rule, the two numbers that clash, and what would work. A stage collects all its
//! problems in [`Problems`] and fails once with a [`Failure`], whose [`FailureKind`] is the exit code.

mod render;

pub use render::{Style, render_failure, render_warning};

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::Serialize;

/// Text of a file that diagnostics point into: a recipe, a config, a file header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceText {
    /// Name shown to the user, usually a path.
    pub name: String,
    /// The whole text.
    pub text: String,
}

/// A marked range in a [`SourceText`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    /// The text it lies in.
    pub source: Arc<SourceText>,
    /// Byte range in the text.
    pub span: Range<usize>,
    /// What to say about it.
    pub text: String,
}

/// One problem: where, what, and what would work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostic {
    /// The part of the work that found it: `checkpoint`, `config`, `recipe`, `partition`, …
    pub area: &'static str,
    /// The rule and the numbers that clash, one sentence without a full stop.
    pub message: String,
    /// The place in a file, if it has one.
    pub label: Option<Label>,
    /// What would work, one line each.
    pub help: Vec<String>,
}

impl Diagnostic {
    /// A problem without a place or advice.
    pub fn new(area: &'static str, message: impl Into<String>) -> Diagnostic {
        Diagnostic { area, message: message.into(), label: None, help: Vec::new() }
    }

    /// Adds a line that says what would work.
    pub fn help(mut self, line: impl Into<String>) -> Diagnostic {
        self.help.push(line.into());
        self
    }

    /// Points at a range of a text.
    pub fn at(
        mut self,
        source: &Arc<SourceText>,
        span: Range<usize>,
        text: impl Into<String>,
    ) -> Diagnostic {
        self.label = Some(Label { source: Arc::clone(source), span, text: text.into() });
        self
    }
}

/// Why a run failed; the process exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureKind {
    /// I/O or internal error.
    Failed = 1,
    /// Wrong command line or recipe.
    Usage = 2,
    /// This model, recipe and target do not fit.
    Refused = 3,
    /// Validation found a fault.
    Invalid = 4,
}

impl FailureKind {
    /// Exit code of the process.
    pub fn exit_code(self) -> u8 {
        self as u8
    }
}

/// A failed run: one headline and every problem found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Cause, which decides the exit code.
    pub kind: FailureKind,
    /// One sentence over all problems.
    pub headline: String,
    /// The problems, in the order found.
    pub problems: Vec<Diagnostic>,
    /// Last line: what was and what was not done.
    pub closing: Option<String>,
}

/// Result of a stage.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// A failure with a single problem.
    pub fn one(kind: FailureKind, headline: impl Into<String>, problem: Diagnostic) -> Failure {
        Failure { kind, headline: headline.into(), problems: vec![problem], closing: None }
    }

    /// A failure that its headline explains whole.
    pub fn plain(kind: FailureKind, headline: impl Into<String>) -> Failure {
        Failure { kind, headline: headline.into(), problems: Vec::new(), closing: None }
    }

    /// An I/O error: what was being done, to which path, and the system's reason.
    pub fn io(doing: &str, path: &std::path::Path, error: &std::io::Error) -> Failure {
        // Bytes of a map that are no longer in its file cannot be handed to the system.
        if error.raw_os_error() == Some(libc::EFAULT) {
            let what = "a file that is read from became shorter meanwhile";
            let said = format!("cannot {doing} {}: {what} ({error})", path.display());
            return Failure::plain(FailureKind::Failed, said);
        }
        Failure::plain(FailureKind::Failed, format!("cannot {doing} {}: {error}", path.display()))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&render_failure(self, Style::plain()))
    }
}

impl std::error::Error for Failure {}

/// Problems collected so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Problems {
    found: Vec<Diagnostic>,
}

impl Problems {
    /// No problems.
    pub fn new() -> Problems {
        Problems::default()
    }

    /// Adds one.
    pub fn push(&mut self, problem: Diagnostic) {
        self.found.push(problem);
    }

    /// Adds several.
    pub fn extend(&mut self, problems: impl IntoIterator<Item = Diagnostic>) {
        self.found.extend(problems);
    }

    /// Whether none were found.
    pub fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// The problems in the order found.
    pub fn iter(&self) -> impl Iterator<Item = &Diagnostic> {
        self.found.iter()
    }

    /// The problems in the order found.
    pub fn into_vec(self) -> Vec<Diagnostic> {
        self.found
    }

    /// `Ok(value)` without problems, else one failure with all of them.
    ///
    /// # Errors
    /// A [`Failure`] of that kind and headline.
    pub fn finish<T>(self, kind: FailureKind, headline: &str, value: T) -> Result<T> {
        if self.found.is_empty() {
            return Ok(value);
        }
        Err(Failure { kind, headline: headline.to_owned(), problems: self.found, closing: None })
    }
}

/// `a, b and c`, at most `limit` items and then `and N more`.
pub fn list<T: fmt::Display>(items: &[T], limit: usize) -> String {
    let shown: Vec<String> = items.iter().take(limit).map(T::to_string).collect();
    let rest = items.len() - shown.len();
    match (shown.split_last(), rest) {
        (None, _) => "none".to_owned(),
        (Some(_), n) if n > 0 => format!("{} and {n} more", shown.join(", ")),
        (Some((last, [])), _) => last.clone(),
        (Some((last, head)), _) => format!("{} and {last}", head.join(", ")),
    }
}

/// The candidates nearest to `name` by edit distance, best first; at most three, none that differs in more than a
/// third of its characters (but two at least).
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let limit = (name.chars().count() / 3).max(2);
    let mut scored: Vec<(usize, &str)> = candidates
        .into_iter()
        .map(|c| (edit_distance(name, c), c))
        .filter(|(d, _)| *d <= limit)
        .collect();
    scored.sort_unstable();
    scored.dedup();
    scored.into_iter().take(3).map(|(_, c)| c).collect()
}

/// Levenshtein distance over characters.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &cb) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(ca != cb);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// Bytes as MiB or GiB with two decimals (KiB and B below).
pub fn size(bytes: u64) -> String {
    const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    for (unit, factor) in UNITS {
        if bytes >= factor {
            return format!("{:.2} {unit}", bytes as f64 / factor as f64);
        }
    }
    format!("{bytes} B")
}

/// A number with thousands separators: `1,188`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, d) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(d);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_offers_likely_spellings_only() {
        let keys = ["encoding", "activations", "match", "tower"];
        assert_eq!(nearest("encodng", keys), ["encoding"]);
        assert_eq!(nearest("mach", keys), ["match"]);
        assert!(nearest("zzzzzz", keys).is_empty());
    }

    #[test]
    fn lists_are_cut_with_a_count() {
        assert_eq!(list(&[1, 2, 3], 3), "1, 2 and 3");
        assert_eq!(list(&[1, 2, 3, 4], 2), "1, 2 and 2 more");
        assert_eq!(list(&["x"], 2), "x");
        assert_eq!(list::<u8>(&[], 2), "none");
    }

    #[test]
    fn figures_read_well() {
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(count(12), "12");
        assert_eq!(size(35_833_413_632), "33.37 GiB");
        assert_eq!(size(100), "100 B");
    }

    #[test]
    fn problems_become_one_failure_with_all_of_them() {
        let mut p = Problems::new();
        assert_eq!(p.clone().finish(FailureKind::Refused, "h", 5), Ok(5));
        p.push(Diagnostic::new("recipe", "one"));
        p.push(Diagnostic::new("recipe", "two"));
        let failure = p.finish(FailureKind::Usage, "h", ()).expect_err("two problems");
        assert_eq!(failure.problems.len(), 2);
        assert_eq!(failure.kind.exit_code(), 2);
    }
}
