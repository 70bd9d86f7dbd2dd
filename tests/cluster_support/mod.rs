//! Documents of Kubernetes, as far as `docs/deploy` needs them.
//!
//! The reader takes a small part of YAML and refuses everything else: block mappings and sequences, flow collections on one
//! line, folded texts (`>-`), plain and quoted scalars, comments.

use serde_json::{Map, Value};

/// A line with its indentation.
#[derive(Debug, Clone)]
struct Line {
    indent: usize,
    text: String,
}

/// Every document of a file.
pub fn documents(text: &str) -> Vec<Value> {
    text.split("\n---\n").map(document).collect()
}

fn document(text: &str) -> Value {
    let lines = text.lines().filter(|l| !l.trim().is_empty() && !l.trim_start().starts_with('#'));
    let mut lines: Vec<Line> = lines
        .map(|line| {
            assert!(!line.contains('\t'), "a tab: {line}");
            let text = line.trim_start();
            Line { indent: line.len() - text.len(), text: text.trim_end().to_owned() }
        })
        .collect();
    lines.reverse();
    let value = block(&mut lines, 0);
    assert!(lines.is_empty(), "not understood: {:?}", lines.last());
    value
}

/// What stands at this indentation; the lines are a stack, the next one last.
fn block(lines: &mut Vec<Line>, indent: usize) -> Value {
    let first = lines.last().expect("a value");
    assert_eq!(first.indent, indent, "indentation of {}", first.text);
    if first.text.starts_with("- ") {
        let mut items = Vec::new();
        while let Some(line) = lines.pop_if(|l| l.indent == indent && l.text.starts_with("- ")) {
            let text = line.text.trim_start_matches("- ").to_owned();
            if key(&text).is_some() {
                // The item is a mapping whose first key stands behind the dash.
                lines.push(Line { indent: indent + 2, text });
                items.push(block(lines, indent + 2));
            } else {
                items.push(value(&text, lines, indent));
            }
        }
        return Value::Array(items);
    }
    let mut map = Map::new();
    while let Some(line) = lines.pop_if(|l| l.indent == indent && !l.text.starts_with("- ")) {
        let (name, rest) = key(&line.text).unwrap_or_else(|| panic!("no key: {}", line.text));
        let found = if rest.is_empty() {
            let next = lines.last().expect("a value").indent;
            assert!(next > indent, "nothing stands under {name}");
            block(lines, next)
        } else {
            value(rest, lines, indent)
        };
        assert!(map.insert(name.to_owned(), found).is_none(), "{name} is there twice");
    }
    Value::Object(map)
}

/// A key that is a plain word, and what follows it.
fn key(text: &str) -> Option<(&str, &str)> {
    let (name, rest) = text.split_once(':')?;
    let word = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric());
    (word && (rest.is_empty() || rest.starts_with(' '))).then(|| (name, rest.trim()))
}

/// A value that begins on this line.
fn value(text: &str, lines: &mut Vec<Line>, indent: usize) -> Value {
    if text == ">-" {
        let mut folded = Vec::new();
        while let Some(line) = lines.pop_if(|l| l.indent > indent) {
            folded.push(line.text);
        }
        return Value::String(folded.join(" "));
    }
    let mut rest = text;
    let value = match rest.starts_with(['{', '[', '"']) {
        true => flow(&mut rest),
        false => {
            assert!(!rest.starts_with(['|', '>', '&', '*', '!', '\'', '%', '@']), "{rest}");
            scalar(std::mem::take(&mut rest).split(" #").next().unwrap_or_default().trim())
        }
    };
    assert!(rest.trim().is_empty(), "what is {rest}?");
    value
}

/// A value inside a flow collection.
fn flow(rest: &mut &str) -> Value {
    let skip = |rest: &mut &str| *rest = rest.trim_start();
    let take = |rest: &mut &str, c: char| match rest.strip_prefix(c) {
        Some(after) => {
            *rest = after;
            true
        }
        None => false,
    };
    skip(rest);
    if take(rest, '"') {
        let (text, after) = rest.split_once('"').expect("a closing quote");
        assert!(!text.contains('\\'), "an escape in {text}");
        *rest = after;
        return Value::String(text.to_owned());
    }
    if take(rest, '[') {
        let mut items = Vec::new();
        loop {
            skip(rest);
            if take(rest, ']') {
                return Value::Array(items);
            }
            items.push(flow(rest));
            skip(rest);
            assert!(take(rest, ',') || rest.starts_with(']'), "no comma before {rest}");
        }
    }
    if take(rest, '{') {
        let mut map = Map::new();
        loop {
            skip(rest);
            if take(rest, '}') {
                return Value::Object(map);
            }
            let (name, after) = rest.split_once(": ").expect("a key");
            *rest = after;
            assert!(map.insert(name.to_owned(), flow(rest)).is_none(), "{name} is there twice");
            skip(rest);
            assert!(take(rest, ',') || rest.starts_with('}'), "no comma before {rest}");
        }
    }
    let end = rest.find([',', '}', ']']).unwrap_or(rest.len());
    let (text, after) = rest.split_at(end);
    *rest = after;
    scalar(text.trim())
}

/// A plain scalar.
fn scalar(text: &str) -> Value {
    assert!(!text.is_empty() && !["null", "~", "yes", "no", "on", "off"].contains(&text), "{text}");
    match text {
        "true" => Value::Bool(true),
        "false" => Value::Bool(false),
        _ => match text.parse::<u64>() {
            Ok(number) => Value::from(number),
            Err(_) => Value::String(text.to_owned()),
        },
    }
}

/// A text of `command` or `args` as Kubernetes hands it to the container: `$(NAME)` is replaced where the container's
/// environment has the name and stays where it has not, `$$` becomes `$`.
pub fn expanded(text: &str, environment: &[(String, String)]) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        out.push_str(before);
        rest = after;
        if let Some(after) = rest.strip_prefix('$') {
            out.push('$');
            rest = after;
        } else if let Some((name, after)) = rest.strip_prefix('(').and_then(|r| r.split_once(')')) {
            match environment.iter().find(|(known, _)| known == name) {
                Some((_, value)) => out.push_str(value),
                None => out.push_str(&format!("$({name})")),
            }
            rest = after;
        } else {
            out.push('$');
        }
    }
    out + rest
}
