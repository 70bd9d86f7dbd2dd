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
//! All patterns of a recipe are compiled once (globs through globset's translation to a regular expression), and a
//! name is not tried against each. Exact names are looked up. A pattern that only names with a certain number between
//! dots can match (`*.layers.17.*`) is tried on names that have it; patterns by the hundred are of that kind. The rest
//! is one `RegexSet`, whose automaton reads a name once. (A `GlobSet` would try every glob that ends in an extension by
//! itself, and here most end in `.weight`.) 200 rules against 50,000 names resolve in under 0.1 s on one core.

use std::collections::BTreeMap;

use globset::GlobBuilder;
use regex::bytes::{Regex, RegexBuilder, RegexSet, RegexSetBuilder};

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
            if let Err(error) = compile(body) {
                let hint =
                    if body.starts_with('*') { "a glob is written without `re:`" } else { "" };
                return bad(format!("not a regular expression: {}", regex_reason(&error)), hint);
            }
            if let Err(error) = compile(&anchored(body)) {
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

/// A regular expression for a glob or for the body of a `re:` pattern, over the whole name.
fn expression(pattern: &Pattern) -> Result<String, String> {
    match pattern.kind {
        PatternKind::Regex => Ok(anchored(pattern.body())),
        _ => {
            let glob = glob(&pattern.text).map_err(|e| e.to_string())?;
            // Where a glob begins with a star, the rest of it may begin anywhere in the name. An automaton of many
            // such globs waits for all of them in one place, and not in one for each.
            Ok(match glob.regex().strip_prefix("(?-u)^.*") {
                Some(rest) => format!("(?-u){rest}"),
                None => glob.regex().to_owned(),
            })
        }
    }
}

fn compile(expression: &str) -> Result<Regex, regex::Error> {
    // `*` and `.` take any character; a name with a line break in it is a name.
    RegexBuilder::new(expression).dot_matches_new_line(true).build()
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

/// A piece between dots, with a digit in it, that every name has which the pattern matches; `None` where the text does
/// not show one plainly.
fn required_piece(pattern: &Pattern) -> Option<String> {
    let regex = pattern.kind == PatternKind::Regex;
    let body = pattern.body();
    if regex && body.replace("(?:", "").contains("(?") {
        // Flags can change what letters match.
        return None;
    }
    // Runs of literal characters outside groups, classes and alternatives; `\0` stands between runs. Both ends of the
    // pattern are ends of the name.
    let mut runs = String::from(".");
    let (mut depth, mut class) = (0u32, false);
    let mut chars = body.chars().peekable();
    while let Some(c) = chars.next() {
        let literal = match c {
            '\\' => chars.next().filter(|next| !regex || next.is_ascii_punctuation()),
            '[' if !class => {
                class = true;
                // A bracket right after the opening (and a negation) belongs to the class.
                chars.next_if(|next| matches!(next, '!' | '^'));
                chars.next_if_eq(&']');
                None
            }
            ']' if class => {
                class = false;
                None
            }
            _ if class => None,
            '(' if regex => {
                depth += 1;
                None
            }
            ')' if regex => {
                depth = depth.saturating_sub(1);
                None
            }
            '{' if !regex => {
                depth += 1;
                None
            }
            '}' if !regex => {
                depth = depth.saturating_sub(1);
                None
            }
            '|' if regex && depth == 0 => return None,
            '*' | '?' => None,
            '.' | '+' | '{' | '}' | '^' | '$' | '|' if regex => None,
            other => Some(other),
        };
        let repeated = regex && matches!(chars.peek(), Some('*' | '+' | '?' | '{'));
        match literal {
            Some(literal) if depth == 0 && !class && !repeated => runs.push(literal),
            _ => runs.push('\0'),
        }
    }
    runs.push('.');
    // Between two dots of one run stands a whole piece.
    let pieces = runs.split('\0').flat_map(|run| {
        let mut pieces: Vec<&str> = run.split('.').collect();
        pieces.pop();
        pieces.into_iter().skip(1)
    });
    pieces.filter(|piece| has_digit(piece)).max_by_key(|piece| piece.len()).map(str::to_owned)
}

fn has_digit(text: &str) -> bool {
    text.bytes().any(|b| b.is_ascii_digit())
}

/// Many patterns, compiled together; each carries a number of its owner's.
pub(super) struct Matcher {
    exact: BTreeMap<String, Vec<usize>>,
    by_piece: BTreeMap<String, Vec<(usize, Regex)>>,
    set: RegexSet,
    owners: Vec<usize>,
}

impl Matcher {
    /// Compiles patterns, each with its owner's number.
    ///
    /// # Errors
    /// A sentence, when the patterns together exceed the compiler's size limits.
    pub(super) fn new<'p>(
        patterns: impl IntoIterator<Item = (usize, &'p Pattern)>,
    ) -> Result<Matcher, String> {
        let large =
            |e: regex::Error| format!("the patterns together are too large: {}", regex_reason(&e));
        let mut exact: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        let mut by_piece: BTreeMap<String, Vec<(usize, Regex)>> = BTreeMap::new();
        let (mut owners, mut expressions) = (Vec::new(), Vec::new());
        for (owner, pattern) in patterns {
            if pattern.kind == PatternKind::Exact {
                exact.entry(pattern.text.clone()).or_default().push(owner);
            } else if let Some(piece) = required_piece(pattern) {
                let regex = compile(&expression(pattern)?).map_err(large)?;
                by_piece.entry(piece).or_default().push((owner, regex));
            } else {
                expressions.push(expression(pattern)?);
                owners.push(owner);
            }
        }
        let set = RegexSetBuilder::new(&expressions)
            .dot_matches_new_line(true)
            .size_limit(REGEX_LIMIT)
            .dfa_size_limit(REGEX_LIMIT)
            .build()
            .map_err(large)?;
        Ok(Matcher { exact, by_piece, set, owners })
    }

    /// Calls `hit` with the owner of every pattern that matches the name; an owner may come more than once.
    pub(super) fn owners(&self, name: &str, mut hit: impl FnMut(usize)) {
        if !self.exact.is_empty() {
            self.exact.get(name).into_iter().flatten().for_each(|&owner| hit(owner));
        }
        if !self.by_piece.is_empty() {
            for piece in name.split('.').filter(|piece| has_digit(piece)) {
                for (owner, regex) in self.by_piece.get(piece).into_iter().flatten() {
                    if regex.is_match(name.as_bytes()) {
                        hit(*owner);
                    }
                }
            }
        }
        if !self.owners.is_empty() {
            self.set.matches(name.as_bytes()).into_iter().for_each(|i| hit(self.owners[i]));
        }
    }

    /// Whether any pattern matches the name.
    pub(super) fn any(&self, name: &str) -> bool {
        let mut any = false;
        self.owners(name, |_| any = true);
        any
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
            ("*.", "..", true),
            ("a*b", "a\nb", true),
            ("re:a.b", "aéb", true),
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

    #[test]
    fn pieces_with_numbers_are_found_where_they_are_plain() {
        let piece = |text: &str| required_piece(&pattern(text).expect(text));
        for (text, expected) in [
            ("*.layers.17.*", Some("17")),
            ("model.h2.{a,b}.weight", Some("h2")),
            ("h2.*", Some("h2")),
            ("*.h2", Some("h2")),
            ("*h2", None),
            ("*.1{7,8}.*", None),
            ("*.{17.x,18.x}", None),
            ("*.[17].*", None),
            ("*.[]17].x", None),
            ("*.1?.*", None),
            (r"*.1\7.*", Some("17")),
            (r"re:.*\.layers\.17\..*", Some("17")),
            (r"re:.*layers.17.*", None),
            (r"re:.*\.layers\.(17|18)\..*", None),
            (r"re:.*\.17\..*|.*\.18\..*", None),
            (r"re:(?i).*\.h2\..*", None),
            (r"re:(?:a|b)\.h2\..*", Some("h2")),
            (r"re:.*\.h2?\..*", None),
            (r"re:.*\.h2{3}\..*", None),
            (r"re:.*\.\d2\..*", None),
            (r"re:h2", Some("h2")),
            (r"re:^h2\.x$", None),
        ] {
            assert_eq!(piece(text).as_deref(), expected, "{text}");
        }
    }

    proptest! {
        #[test]
        fn the_matcher_hits_what_each_pattern_hits_by_itself(
            bodies in prop::collection::vec(
                prop::collection::vec(
                    prop::sample::select(vec![
                        "a", ".", "1", "2", ".1.", ".*", "[12]", "(1|a)", r"\.", r"\.2\.", "?", "+", "|", "^", "(?:", ")", r"\d",
                        "{2}", "(?i)", "A", "[]1]", "*", "{1,a}", "{2,.1.}", "$",
                    ]),
                    1..7,
                ),
                1..6,
            ),
            regex in any::<bool>(),
            names in prop::collection::vec("[a12.]{0,8}", 1..12),
        ) {
            let patterns: Vec<Pattern> = bodies
                .iter()
                .filter_map(|body| pattern(&format!("{}{}", if regex { "re:" } else { "" }, body.concat())).ok())
                .collect();
            let matcher = Matcher::new(patterns.iter().enumerate()).expect("small");
            for name in &names {
                let mut found = Vec::new();
                matcher.owners(name, |owner| found.push(owner));
                found.sort_unstable();
                found.dedup();
                let alone: Vec<usize> = (0..patterns.len())
                    .filter(|&i| {
                        let expression = expression(&patterns[i]).expect("compiles");
                        compile(&expression).expect("compiles").is_match(name.as_bytes())
                    })
                    .collect();
                prop_assert_eq!(&found, &alone, "{} {:?}", name, patterns.iter().map(|p| &p.text).collect::<Vec<_>>());
            }
        }

        #[test]
        fn globs_match_what_a_plain_backtracking_matcher_matches(
            tokens in prop::collection::vec("[ab.]|[*]|[?]|\\{[ab.]{0,2},[ab.*]{1,2}\\}", 1..7),
            names in prop::collection::vec("[ab./]{0,7}", 1..12),
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
