//! Rust source as tokens with line numbers, and the rules that need no more than those.

/// A token: an identifier, `::`, or one punctuation character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Token<'a> {
    /// Its text.
    pub text: &'a str,
    /// Counted from 1.
    pub line: usize,
}

/// Splits Rust source into tokens. Comments, strings, characters, lifetimes and numbers are left out.
pub fn tokens(source: &str) -> Vec<Token<'_>> {
    let bytes = source.as_bytes();
    let (mut found, mut at, mut line) = (Vec::new(), 0, 1);
    while let Some(&byte) = bytes.get(at) {
        let rest = &source[at..];
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment(rest)
        } else if let Some(length) = string(rest) {
            length
        } else if byte == b'\'' {
            quote(rest)
        } else if byte.is_ascii_digit() {
            rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len())
        } else if byte == b'_' || byte.is_ascii_alphabetic() || byte >= 0x80 {
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
            // A character that is neither a letter nor ASCII stands alone.
            let length = end.filter(|&n| n > 0).unwrap_or_else(|| match end {
                Some(_) => rest.chars().next().map_or(1, char::len_utf8),
                None => rest.len(),
            });
            found.push(Token { text: &rest[..length], line });
            length
        } else if rest.starts_with("::") {
            found.push(Token { text: "::", line });
            2
        } else {
            if !byte.is_ascii_whitespace() {
                found.push(Token { text: &rest[..1], line });
            }
            1
        };
        line += rest[..length].matches('\n').count();
        at += length;
    }
    found
}

/// Length of a block comment, which may contain others.
fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        if rest.as_bytes()[at..].starts_with(b"/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if rest.as_bytes()[at..].starts_with(b"*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

/// Length of a string literal of any kind, if one starts here.
fn string(rest: &str) -> Option<usize> {
    let after_prefix = ["br", "cr", "b", "c", "r", ""].iter().find_map(|p| {
        let tail = rest.strip_prefix(p)?;
        let hashes = tail.len() - tail.trim_start_matches('#').len();
        let raw = p.ends_with('r');
        (tail[hashes..].starts_with('"') && (raw || hashes == 0)).then_some((p.len(), hashes, raw))
    });
    let (prefix, hashes, raw) = after_prefix?;
    let start = prefix + hashes + 1;
    if raw {
        let end = format!("\"{}", "#".repeat(hashes));
        return Some(rest[start..].find(&end).map_or(rest.len(), |n| start + n + end.len()));
    }
    let mut escaped = false;
    for (i, c) in rest[start..].char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return Some(start + i + 1),
            _ => {}
        }
    }
    Some(rest.len())
}

/// Length of a character literal, or of the quote and name of a lifetime.
fn quote(rest: &str) -> usize {
    let mut chars = rest.char_indices().skip(1);
    match chars.next() {
        Some((_, '\\')) => {
            let escaped = chars.next().map_or(rest.len(), |(i, c)| i + c.len_utf8());
            rest[escaped.min(rest.len())..].find('\'').map_or(rest.len(), |n| escaped + n + 1)
        }
        Some((i, c)) if rest[i + c.len_utf8()..].starts_with('\'') => i + c.len_utf8() + 1,
        _ => {
            let name = rest[1..].find(|c: char| !c.is_alphanumeric() && c != '_');
            1 + name.unwrap_or(rest.len() - 1)
        }
    }
}

/// Crate → the files that may name it.
const CONTAINED: [(&str, &[&str]); 4] = [
    // Unmaintained: one file to change on the day it is replaced.
    ("bincode", &["src/artifact/codec.rs"]),
    // The only network code.
    ("hf_hub", HUB),
    ("reqwest", HUB),
    // A map can change under the reader: whoever makes one says why that is sound.
    ("memmap2", &["src/checkpoint/shard.rs", "src/artifact/reader.rs", "src/artifact/writer.rs"]),
];

const HUB: &[&str] = &[
    "src/checkpoint/hub/mod.rs",
    "src/checkpoint/hub/answer.rs",
    "src/checkpoint/hub/download.rs",
    "src/checkpoint/hub/heads.rs",
];

const PRINTING: [&str; 5] = ["println", "eprintln", "print", "eprint", "dbg"];

const VAGUE: [&str; 6] = ["utils", "util", "common", "helpers", "helper", "misc"];

/// Rules about single tokens and short sequences of them.
pub fn check(path: &str, tokens: &[Token], report: &mut impl FnMut(usize, &'static str, String)) {
    let text = |i: usize| tokens.get(i).map_or("", |t| t.text);
    let library = path.starts_with("src/");
    let may_print = path.starts_with("src/cli/") || matches!(path, "src/main.rs" | "src/cli.rs");

    let stem = path.trim_end_matches(".rs").trim_end_matches("/mod").rsplit('/').next();
    let mut vague = |line: usize, name: &str| {
        if VAGUE.contains(&name) {
            let why = format!("a module called {name} says nothing; name the noun it holds");
            report(line, "names", why);
        }
    };
    vague(1, stem.unwrap_or_default());
    for (i, token) in tokens.iter().enumerate() {
        if token.text == "mod" && text(i + 2) == "{" {
            vague(token.line, text(i + 1));
        }
    }

    for (i, &Token { text: word, line }) in tokens.iter().enumerate() {
        let is_macro = text(i + 1) == "!" && text(i + 2) != "=";
        if library && is_macro && PRINTING.contains(&word) && !may_print {
            report(line, "printing", format!("{word}! belongs into src/cli"));
        }
        if is_macro && matches!(word, "todo" | "unimplemented") {
            report(line, "unfinished", format!("{word}!"));
        }
        if word == "ignore" && i >= 2 && text(i - 1) == "[" && text(i - 2) == "#" {
            report(line, "unfinished", "#[ignore]".into());
        }
        if let Some((name, places)) = CONTAINED.iter().find(|(name, _)| *name == word)
            && library
            && !places.contains(&path)
        {
            let places = places.join(", ");
            report(line, "contained", format!("{name} is named in {places} only"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(source: &str) -> Vec<&str> {
        tokens(source).iter().map(|t| t.text).collect()
    }

    #[test]
    fn tokens_are_names_and_punctuation() {
        assert_eq!(words("use a::b2;"), ["use", "a", "::", "b2", ";"]);
        assert_eq!(
            words("x // y\n/* z /* */ */ r\"\\\" br##\"\"#\"## 'a' '\\u{1}' &'a t"),
            ["x", "&", "t"]
        );
        assert_eq!(words("1_000u64 0xFF é"), ["é"]);
        assert_eq!(words("r#type b'\\'' b 'r' r"), ["r", "#", "type", "b", "b", "r"]);
    }

    #[test]
    fn lines_are_counted_through_comments_and_strings() {
        let source = "a\n/*\n*/ b\n\"\n\" c";
        let lines: Vec<_> = tokens(source).iter().map(|t| (t.text, t.line)).collect();
        assert_eq!(lines, [("a", 1), ("b", 3), ("c", 5)]);
    }

    #[test]
    fn unterminated_literals_end_with_the_file() {
        for source in ["\"a", "r#\"a\"", "/* a", "'", "'\\", "b\"\\", "/*/"] {
            assert!(tokens(source).len() <= 1, "{source}");
        }
    }
}
