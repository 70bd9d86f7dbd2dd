//! The tokenizer inside the container: `tokenizer.json` as the tables of the vocabulary section.
//!
//! Engines of radiance read these tables and no JSON. The section says less than `tokenizer.json` can: a part that it has
//! no place for leaves the whole section out, since tokens that are almost right are worse than none, and the plan
//! names the part. The file itself is stored in either case, and is what radpack's own run reads.
//!
//! The translation stands here because it makes an artifact's noun out of a checkpoint's files, and because a finished
//! file is checked by translating the side files that it carries again: opening a source knows no artifact, and the
//! reader of artifacts no JSON of tokenizers.

mod model;
mod steps;

use serde::Deserialize;
use serde_json::{Map, Value};

use model::Model;
use steps::{decoder, normalizer, pre_tokenizer, step};

use super::Sources;
use crate::artifact::{Artifact, Vocab, layout as names};
use crate::diag::{self, Diagnostic, Result};
use crate::runtime;

/// The file that is translated.
const TOKENIZER: &str = "tokenizer.json";
/// Names of special tokens, and a chat template.
const SETTINGS: &str = "tokenizer_config.json";
/// The chat template that comes before the one in [`SETTINGS`].
const TEMPLATE: &str = "chat_template.jinja";

/// What the section has no place for.
type Unfit = String;
type Fits<T> = std::result::Result<T, Unfit>;

/// The section of a source, or why it has none; neither for a source without `tokenizer.json`.
///
/// # Errors
/// Side files that cannot be read.
pub(super) fn of_source(sources: &Sources) -> Result<(Option<Vocab>, Option<Diagnostic>)> {
    let files = sources.side_files();
    let read = |path: &str| {
        let file = files.iter().find(|f| f.path == path);
        file.map(|f| sources.read_side_file(f)).transpose()
    };
    let Some(tokenizer) = read(TOKENIZER)? else { return Ok((None, None)) };
    let (settings, template) = (read(SETTINGS)?, read(TEMPLATE)?);
    Ok(match translate(&tokenizer, settings.as_deref(), template.as_deref()) {
        Ok(vocab) => (Some(vocab), None),
        Err(part) => {
            let what = format!("the vocabulary section is left out: {part}");
            let note = Diagnostic::new("tokenizer", what).help(
                "tokenizer.json itself is stored; engines that read the section alone find no tokenizer",
            );
            (None, Some(note))
        }
    })
}

/// Whether the vocabulary section of a file is the one of the tokenizer that it carries. A file without the section is
/// sound: files had none before, and not every tokenizer has one.
pub fn check_vocabulary(artifact: &Artifact) -> Vec<Diagnostic> {
    if artifact.vocab_summary().is_none() {
        return Vec::new();
    }
    let finding = |what: String| vec![Diagnostic::new("vocabulary", what)];
    let side =
        |path: &str| artifact.find(&format!("{}{path}", names::FILE_PREFIX)).map(|e| e.plane(0));
    let Some(tokenizer) = side(TOKENIZER) else {
        // Other writers of containers store the section alone.
        return match artifact.meta_text(names::DIGEST_KEY) {
            Some(_) => finding(format!("there is a vocabulary section and no {TOKENIZER}")),
            None => Vec::new(),
        };
    };
    let Some(stored) = artifact.vocab() else {
        return finding("the section's texts are longer than the file".to_owned());
    };
    match translate(tokenizer, side(SETTINGS), side(TEMPLATE)) {
        Err(part) => finding(format!("there is a section, and {TOKENIZER} gives none: {part}")),
        Ok(derived) => differences(&stored, &derived)
            .into_iter()
            .map(|what| Diagnostic::new("vocabulary", format!("{what} in {TOKENIZER}")))
            .collect(),
    }
}

/// What differs, part by part: `… in the section, …`.
fn differences(stored: &Vocab, derived: &Vocab) -> Vec<String> {
    let mut out = Vec::new();
    let mut part = |name: &str, a: String, b: String| {
        if a != b {
            out.push(format!("{name}: {a} in the section, {b}"));
        }
    };
    part("kind", stored.kind.to_string(), derived.kind.to_string());
    part("special tokens", format!("{:?}", stored.specials), format!("{:?}", derived.specials));
    let around = |v: &Vocab| format!("bos {} and eos {} added", v.add_bos, v.add_eos);
    part("around texts", around(stored), around(derived));
    let template = |v: &Vocab| diag::count(v.chat_template.len() as u64) + " bytes";
    part("chat template", template(stored), template(derived));
    if out.is_empty() && stored.chat_template != derived.chat_template {
        out.push("chat template: another text in the section than".to_owned());
    }
    let text = |t: &Vec<u8>| format!("`{}`", String::from_utf8_lossy(t).escape_debug());
    out.extend(list("tokens", &stored.tokens, &derived.tokens, text));
    out.extend(list("scores", &stored.scores, &derived.scores, |s| s.to_string()));
    out.extend(list("token types", &stored.types, &derived.types, |t| t.to_string()));
    out.extend(list("merges", &stored.merges, &derived.merges, |m| format!("{m:?}")));
    out.extend(list("steps", &stored.steps, &derived.steps, |s| s.to_string()));
    out
}

fn list<T: PartialEq>(name: &str, a: &[T], b: &[T], show: impl Fn(&T) -> String) -> Option<String> {
    if a.len() != b.len() {
        let [a, b] = [a.len(), b.len()].map(|n| diag::count(n as u64));
        return Some(format!("{name}: {a} in the section, {b}"));
    }
    let (at, (a, b)) = a.iter().zip(b).enumerate().find(|(_, (a, b))| a != b)?;
    Some(format!("{name}: number {at} is {} in the section, {}", show(a), show(b)))
}

/// `tokenizer.json` as far as its parts are known.
#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    model: Map<String, Value>,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

/// The container's tables of a `tokenizer.json`, with the `tokenizer_config.json` and `chat_template.jinja` beside it.
///
/// # Errors
/// The first part that the tables have no place for, or that is not understood.
pub fn vocabulary_tables(
    tokenizer: &[u8],
    settings: Option<&[u8]>,
    template: Option<&[u8]>,
) -> std::result::Result<Vocab, String> {
    translate(tokenizer, settings, template)
}

fn translate(tokenizer: &[u8], settings: Option<&[u8]>, template: Option<&[u8]>) -> Fits<Vocab> {
    let file: File = serde_json::from_slice(tokenizer)
        .map_err(|e| format!("{TOKENIZER} is not understood ({e})"))?;
    let settings: Value = match settings {
        Some(text) => serde_json::from_slice(text).map_err(|e| format!("{SETTINGS}: {e}"))?,
        None => Value::Null,
    };
    let own = template.map(std::str::from_utf8).transpose();
    let own = own.map_err(|e| format!("{TEMPLATE}: {e}"))?;
    let chat = runtime::chosen_template(own, &settings).unwrap_or_default();

    let mut steps = Vec::new();
    for part in parts(&file.normalizer, "normalizers") {
        steps.push(normalizer(part)?);
    }
    let normalizes = !steps.is_empty();
    for part in parts(&file.pre_tokenizer, "pretokenizers") {
        steps.push(pre_tokenizer(part)?);
    }
    let mut model = Model::read(&file.model)?;
    if model.byte_fallback {
        steps.push(step(38, 0));
    }
    for part in parts(&file.decoder, "decoders") {
        steps.push(decoder(part)?);
    }
    for added in &file.added_tokens {
        model.add(added, normalizes)?;
    }
    model.vocab(&file, &settings, steps, chat)
}

/// A part of the tokenizer, or the parts of a sequence.
fn parts<'v>(value: &'v Value, key: &str) -> Vec<&'v Value> {
    match value.get("type").and_then(Value::as_str) {
        None if value.is_null() => Vec::new(),
        Some("Sequence") => {
            let inner = value.get(key).and_then(Value::as_array);
            inner.into_iter().flatten().flat_map(|v| parts(v, key)).collect()
        }
        _ => vec![value],
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::artifact::Step;

    pub fn tokenizer(change: impl FnOnce(&mut Value)) -> Value {
        let mut value = json!({
            "version": "1.0",
            "added_tokens": [{"id": 3, "content": "<s>", "special": true}],
            "normalizer": null,
            "pre_tokenizer": null,
            "post_processor": null,
            "decoder": null,
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
        });
        change(&mut value);
        value
    }

    pub fn translated(value: &Value) -> Fits<Vocab> {
        translate(value.to_string().as_bytes(), None, None)
    }

    /// The steps of a tokenizer with one part, as `kind/flags arg0 arg1 number`.
    pub fn one(role: &str, part: Value) -> String {
        let made = translated(&tokenizer(|t| t[role] = part));
        let steps = match made {
            Ok(vocab) => vocab.steps,
            Err(part) => return part,
        };
        let show = |s: &Step| {
            let text = |t: &[u8]| String::from_utf8(t.to_vec()).expect("UTF-8");
            format!("{}/{} {:?} {:?} {}", s.kind, s.flags, text(&s.arg0), text(&s.arg1), s.number)
        };
        steps.iter().map(show).collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn a_part_without_a_place_is_named() {
        assert_eq!(
            one("normalizer", json!({"type": "BertNormalizer", "lowercase": true})),
            "normalizer BertNormalizer has no step kind in it"
        );
        assert_eq!(
            one(
                "pre_tokenizer",
                json!({"type": "Sequence", "pretokenizers": [
                {"type": "Digits", "individual_digits": true}, {"type": "WhitespaceSplit"}]})
            ),
            "pre_tokenizer WhitespaceSplit has no step kind in it"
        );
        assert_eq!(
            one("decoder", json!({"type": "WordPiece", "prefix": "##", "cleanup": true})),
            "decoder WordPiece has no step kind in it"
        );
        assert_eq!(
            one("decoder", json!({"type": "Replace", "pattern": {"Regex": "x"}, "content": ""})),
            r#"decoder Replace: pattern {"Regex":"x"} has no place in it"#
        );
        assert_eq!(
            one("pre_tokenizer", json!({"type": "Digits", "individual_digits": true, "new": 1})),
            "pre_tokenizer Digits: the option new has no place in it"
        );
        assert_eq!(
            one(
                "post_processor",
                json!({"type": "BertProcessing", "sep": ["b", 1], "cls": ["a", 0]})
            ),
            "post_processor BertProcessing has no place in it"
        );
        let refused =
            |change: fn(&mut Value)| translated(&tokenizer(change)).expect_err("left out");
        type Change = fn(&mut Value);
        let cases: [(Change, &str); 12] = [
            (
                |t| t["model"]["ignore_merges"] = json!(true),
                "model BPE: ignore_merges true has no place in it",
            ),
            (|t| t["model"]["dropout"] = json!(0.1), "model BPE: dropout 0.1 has no place in it"),
            (
                |t| t["model"]["end_of_word_suffix"] = json!("</w>"),
                r#"model BPE: end_of_word_suffix "</w>" has no place in it"#,
            ),
            (
                |t| {
                    t["model"]["unk_token"] = json!("a");
                    t["model"]["fuse_unk"] = json!(true);
                },
                "model BPE: fuse_unk true has no place in it",
            ),
            (|t| t["model"]["type"] = json!("WordLevel"), "model WordLevel has no kind in it"),
            (
                |t| t["model"]["merges"][0][1] = json!("c"),
                r#"model BPE: the merge ["a","c"] is not of its tokens"#,
            ),
            (|t| t["model"]["vocab"]["x"] = json!(9), "no token has the id 4"),
            (|t| t["model"]["vocab"]["x"] = json!(3), "token 3: `x` and `<s>`"),
            (|t| t["model"]["vocab"]["<s>"] = json!(4), "token 3: `<s>` is token 4 too"),
            (
                |t| t["model"]["vocab"]["\0"] = json!(4),
                "token 4: its text holds NUL, which ends a text",
            ),
            (
                |t| t["added_tokens"][0]["lstrip"] = json!(true),
                "the added token `<s>`: lstrip has no place in it",
            ),
            (
                |t| {
                    t["added_tokens"][0]["normalized"] = json!(true);
                    t["normalizer"] = json!({"type": "Lowercase"});
                },
                "the added token `<s>`: normalized has no place in it",
            ),
        ];
        for (change, why) in cases {
            assert_eq!(refused(change), why);
        }
        assert!(
            translate(b"{", None, None)
                .expect_err("broken")
                .starts_with("tokenizer.json is not understood")
        );
    }

    #[test]
    fn differences_name_the_part_and_both_values() {
        let made = translated(&tokenizer(|_| ())).expect("fits");
        assert_eq!(differences(&made, &made), Vec::<String>::new());
        let mut other = made.clone();
        other.tokens[1] = b"c".to_vec();
        other.merges.clear();
        other.specials[1] = 2;
        other.chat_template = b"x".to_vec();
        assert_eq!(
            differences(&other, &made),
            [
                "special tokens: [-1, 2, -1, -1, -1, -1] in the section, [-1, -1, -1, -1, -1, -1]",
                "chat template: 1 bytes in the section, 0 bytes",
                "tokens: number 1 is `c` in the section, `b`",
                "merges: 0 in the section, 1",
            ]
        );
    }
}
