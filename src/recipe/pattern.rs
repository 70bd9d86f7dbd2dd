//! Patterns over the names of a checkpoint's tensors.
//!
//! | pattern | matches |
//! |---|---|
//! | `model.norm.weight` | that name |
//! | `*.{q,k,v}_proj.weight` | a glob: `*` any run of characters, dots included; `?` one (ASCII) character; `{a,b}` alternatives, which may nest and be empty; `[0-9]` or `[!0-9]` one character (not) of a class; `\` takes the next character as it is |
//! | `re:.*\.layers\.(0\|1)\..*` | a regular expression of the `regex` crate |
//!
//! Always the whole name: `lm_head` does not match `lm_head.weight`, and `re:` is anchored at both ends.
//!
//! All patterns of a recipe are compiled once: globs into one [`GlobSet`] (exact names become a hash look-up, a bare
//! prefix or suffix an Aho-Corasick pass, the rest one automaton) and regular expressions into one [`RegexSet`]. A
//! name is then read once per set, however many rules there are.

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use regex::{Regex, RegexSet, RegexSetBuilder};

use super::read::{CURLY, Place};

/// Longest pattern; tensor names are shorter than 200 bytes, alternatives add some.
const MAX_PATTERN: usize = 4096;

/// Bytes that the compiled regular expressions of a recipe may take, and that their lazily built automata may.
const REGEX_LIMIT: usize = 64 << 20;

/// How a pattern is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PatternKind {
    /// A name without special characters.
    Exact,
    /// A glob.
    Glob,
    /// `re:` and a regular expression.
    Regex,
}

/// One pattern of a rule.
#[derive(Debug, Clone, PartialEq)]
pub struct Pattern {
    /// As written, `re:` included.
    pub text: String,
    /// How it is written.
    pub kind: PatternKind,
    /// Where it stands.
    pub place: Place,
}

/// Why a text is no pattern, and what would be one.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BadPattern {
    pub message: String,
    pub help: Vec<String>,
}

impl Pattern {
    /// Reads a pattern.
    ///
    /// # Errors
    /// The syntax error of a glob or regular expression, typographic quotes, an empty or overlong text.
    pub(super) fn new(text: &str, place: Place) -> Result<Pattern, BadPattern> {
        let bad = |message: String, help: &str| {
            let help = if help.is_empty() { Vec::new() } else { vec![help.to_owned()] };
            Err(BadPattern { message, help })
        };
        if text.is_empty() || text == "re:" {
            return bad("an empty pattern matches no name".into(), "`*` matches every name");
        }
        if text.len() > MAX_PATTERN {
            let message = format!("a pattern of {} bytes; {MAX_PATTERN} are allowed", text.len());
            return bad(message, "a list of patterns may have any length");
        }
        if let Some(curly) = text.chars().find(|c| CURLY.contains(c)) {
            let plain: String = text.chars().filter(|c| !CURLY.contains(c)).collect();
            let message =
                format!("the pattern holds a typographic quote, {curly}, which no tensor name has");
            return bad(message, &format!("quotes pasted from a web page? write \"{plain}\""));
        }
        let kind = if let Some(body) = text.strip_prefix("re:") {
            if let Err(error) = Regex::new(body) {
                let hint =
                    if body.starts_with('*') { "a glob is written without `re:`" } else { "" };
                return bad(format!("not a regular expression: {}", regex_reason(&error)), hint);
            }
            if let Err(error) = Regex::new(&anchored(body)) {
                return bad(format!("not a regular expression: {}", regex_reason(&error)), "");
            }
            PatternKind::Regex
        } else {
            if let Err(error) = glob(text) {
                let hint = if text.contains(['(', '^', '$', '\\', '+']) {
                    "a regular expression starts with `re:`"
                } else {
                    ""
                };
                return bad(format!("not a glob: {}", error.kind()), hint);
            }
            let special = text.contains(['*', '?', '{', '}', '[', ']', '\\']);
            if special { PatternKind::Glob } else { PatternKind::Exact }
        };
        Ok(Pattern { text: text.to_owned(), kind, place })
    }

    /// The glob, or the regular expression without `re:`.
    pub(super) fn body(&self) -> &str {
        self.text.strip_prefix("re:").unwrap_or(&self.text)
    }

    /// The same regular expression with every bare `.` (outside classes, unescaped, not repeated) taken literally;
    /// `None` where there is none. Repeated dots (`.*`, `.+`, `.{2}`, `.?`) are meant.
    pub(super) fn dots_escaped(&self) -> Option<Pattern> {
        if self.kind != PatternKind::Regex {
            return None;
        }
        let body = self.body();
        let mut out = String::from("re:");
        let (mut escaped, mut class, mut changed) = (false, false, false);
        let mut chars = body.chars().peekable();
        while let Some(c) = chars.next() {
            let repeated = matches!(chars.peek(), Some('*' | '+' | '?' | '{'));
            if c == '.' && !escaped && !class && !repeated {
                out.push('\\');
                changed = true;
            }
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                '[' => class = true,
                ']' => class = false,
                _ => {}
            }
            out.push(c);
        }
        changed.then(|| Pattern { text: out, kind: PatternKind::Regex, place: self.place.clone() })
    }
}

fn glob(text: &str) -> Result<globset::Glob, globset::Error> {
    GlobBuilder::new(text)
        .literal_separator(false)
        .backslash_escape(true)
        .empty_alternates(true)
        .build()
}

/// A regular expression over the whole name.
fn anchored(body: &str) -> String {
    format!(r"\A(?:{body})\z")
}

/// The last line of the regex crate's picture, which is the reason.
fn regex_reason(error: &regex::Error) -> String {
    let text = error.to_string();
    let last = text.lines().last().unwrap_or("").trim();
    last.strip_prefix("error: ").unwrap_or(last).to_owned()
}

/// Many patterns, compiled together; each carries the number of the rule it belongs to.
pub(super) struct Matcher {
    globs: GlobSet,
    glob_owner: Vec<usize>,
    regexes: RegexSet,
    regex_owner: Vec<usize>,
}

impl Matcher {
    /// Compiles patterns, each with its owner's number.
    ///
    /// # Errors
    /// A sentence, when the patterns together exceed the compilers' size limits.
    pub(super) fn new<'p>(
        patterns: impl IntoIterator<Item = (usize, &'p Pattern)>,
    ) -> Result<Matcher, String> {
        let mut globs = GlobSetBuilder::new();
        let (mut glob_owner, mut regex_owner) = (Vec::new(), Vec::new());
        let mut bodies = Vec::new();
        for (owner, pattern) in patterns {
            if pattern.kind == PatternKind::Regex {
                bodies.push(anchored(pattern.body()));
                regex_owner.push(owner);
            } else {
                globs.add(glob(pattern.body()).map_err(|e| e.to_string())?);
                glob_owner.push(owner);
            }
        }
        let globs = globs.build().map_err(|e| format!("the globs together are too large: {e}"))?;
        let regexes = RegexSetBuilder::new(&bodies)
            .size_limit(REGEX_LIMIT)
            .dfa_size_limit(REGEX_LIMIT)
            .build()
            .map_err(|e| {
                format!("the regular expressions together are too large: {}", regex_reason(&e))
            })?;
        Ok(Matcher { globs, glob_owner, regexes, regex_owner })
    }

    /// Calls `hit` with the owner of every pattern that matches the name; an owner may come more than once.
    pub(super) fn owners(&self, name: &str, scratch: &mut Vec<usize>, mut hit: impl FnMut(usize)) {
        self.globs.matches_into(name, scratch);
        for &i in scratch.iter() {
            hit(self.glob_owner[i]);
        }
        if !self.regex_owner.is_empty() {
            for i in &self.regexes.matches(name) {
                hit(self.regex_owner[i]);
            }
        }
    }

    /// Whether any pattern matches the name.
    pub(super) fn any(&self, name: &str) -> bool {
        self.globs.is_match(name) || self.regexes.is_match(name)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::diag::SourceText;

    fn pattern(text: &str) -> Result<Pattern, BadPattern> {
        let source = Arc::new(SourceText { name: "test".into(), text: text.into() });
        Pattern::new(text, Place { source, span: 0..text.len() })
    }

    fn matches(text: &str, name: &str) -> bool {
        let pattern = pattern(text).unwrap_or_else(|e| panic!("{text}: {}", e.message));
        Matcher::new([(0, &pattern)]).expect("small").any(name)
    }

    #[test]
    fn a_star_crosses_dots_and_patterns_cover_the_whole_name() {
        let projections = "*.{q,k,v,o,gate,up,down}_proj.weight";
        assert!(matches(projections, "model.language_model.layers.7.self_attn.q_proj.weight"));
        assert!(!matches(projections, "model.layers.7.self_attn.q_proj.weight_scale"));
        assert!(!matches(projections, "model.layers.7.mlp.gate.weight"));
        for (pattern, name, hit) in [
            ("lm_head", "lm_head.weight", false),
            ("lm_head.weight", "lm_head.weight", true),
            ("lm_head.weight", "model.lm_head.weight", false),
            ("*lm_head*", "language_model.lm_head.weight", true),
            ("a?c", "abc", true),
            ("a?c", "abbc", false),
            ("layers.[0-2].x", "layers.1.x", true),
            ("layers.[!0-2].x", "layers.1.x", false),
            ("layers.{1{0,1},2}.x", "layers.11.x", true),
            ("mlp{,.linear}.weight", "mlp.weight", true),
            (r"a\*b", "a*b", true),
            (r"a\*b", "axb", false),
            ("re:.*mlp\\.gate", "model.mlp.gate", true),
            ("re:mlp", "model.mlp", false),
            ("re:a|b", "ab", false),
            ("re:a|b", "b", true),
            ("re:(?i)MLP", "mlp", true),
        ] {
            assert_eq!(matches(pattern, name), hit, "{pattern} / {name}");
        }
    }

    #[test]
    fn kinds_are_told_apart() {
        for (text, kind) in [
            ("model.norm.weight", PatternKind::Exact),
            ("*.weight", PatternKind::Glob),
            ("layers.[0-9].x", PatternKind::Glob),
            ("re:.*", PatternKind::Regex),
        ] {
            assert_eq!(pattern(text).expect(text).kind, kind, "{text}");
        }
    }

    #[test]
    fn bad_patterns_say_why() {
        for (text, why) in [
            ("", "empty"),
            ("re:", "empty"),
            ("a{b", "unclosed alternate"),
            ("a[b", "unclosed character class"),
            ("re:*.weight", "repetition operator missing expression"),
            ("re:a{1000}{1000}{1000}", "size limit"),
            ("re:a)(b", "unopened group"),
            ("“*.weight”", "typographic quote"),
        ] {
            let bad = pattern(text).expect_err(text);
            assert!(bad.message.contains(why), "{text}: {}", bad.message);
        }
        assert!(pattern(&"x".repeat(MAX_PATTERN)).is_ok());
        assert!(pattern(&"x".repeat(MAX_PATTERN + 1)).is_err());
    }

    #[test]
    fn bare_dots_are_found_and_escaped() {
        let escaped = |text: &str| pattern(text).expect(text).dots_escaped().map(|p| p.text);
        assert_eq!(escaped("re:.*mlp.gate").as_deref(), Some(r"re:.*mlp\.gate"));
        assert_eq!(escaped(r"re:.*mlp\.gate[.x].+"), None);
        assert_eq!(escaped(r"re:a\\.b").as_deref(), Some(r"re:a\\\.b"));
        assert_eq!(escaped("*.weight"), None);
    }

    /// Globs by backtracking, from the table in the module's documentation.
    fn naive(p: &[char], s: &[char]) -> bool {
        match p.first() {
            None => s.is_empty(),
            Some('*') => (0..=s.len()).any(|n| naive(&p[1..], &s[n..])),
            Some('?') => !s.is_empty() && naive(&p[1..], &s[1..]),
            Some('{') => {
                let end = p.iter().position(|&c| c == '}').expect("closed");
                p[1..end].split(|&c| c == ',').any(|alternative| {
                    let rest: Vec<char> = [alternative, &p[end + 1..]].concat();
                    naive(&rest, s)
                })
            }
            Some(c) => s.first() == Some(c) && naive(&p[1..], &s[1..]),
        }
    }

    proptest! {
        #[test]
        fn globs_match_what_a_plain_backtracking_matcher_matches(
            tokens in prop::collection::vec("[ab.]|[*]|[?]|\\{[ab.]{0,2},[ab.*]{1,2}\\}", 1..7),
            // The set takes names for paths, and `..` is no file name of a path.
            names in prop::collection::vec("[ab./]{0,6}[ab]", 1..12),
        ) {
            let text = tokens.concat();
            let compiled = pattern(&text).expect("well formed");
            let matcher = Matcher::new([(0, &compiled)]).expect("small");
            let p: Vec<char> = text.chars().collect();
            for name in names {
                let s: Vec<char> = name.chars().collect();
                prop_assert_eq!(matcher.any(&name), naive(&p, &s), "{} / {}", text, name);
            }
        }
    }
}
