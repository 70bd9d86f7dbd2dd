//! The tokenizer inside the container: `tokenizer.json` as the tables of the vocabulary section.
//!
//! Engines of radiance read these tables and no JSON. The section says less than `tokenizer.json` can: a part that it has
//! no place for leaves the whole section out, since tokens that are almost right are worse than none, and the plan
//! names the part. The file itself is stored in either case, and is what radpack's own run reads.
//!
//! The translation stands here because it makes an artifact's noun out of a checkpoint's files, and because a finished
//! file is checked by translating the side files that it carries again: opening a source knows no artifact, and the
//! reader of artifacts no JSON of tokenizers.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::Sources;
use crate::artifact::{Artifact, Step, Vocab, layout as names};
use crate::diag::{self, Diagnostic, Result};
use crate::runtime;

/// The file that is translated.
const TOKENIZER: &str = "tokenizer.json";
/// Names of special tokens, and a chat template.
const SETTINGS: &str = "tokenizer_config.json";
/// The chat template that comes before the one in [`SETTINGS`].
const TEMPLATE: &str = "chat_template.jinja";

/// Kinds of models.
const BPE: u32 = 1;
const UNIGRAM: u32 = 2;
const WORDPIECE: u32 = 3;

/// Kinds of tokens.
const NORMAL: u8 = 1;
const UNKNOWN: u8 = 2;
const CONTROL: u8 = 3;
const USER_DEFINED: u8 = 4;
const BYTE: u8 = 6;

/// Behaviours of a split by number: the order in which tokenizers 0.22 declares them.
const BEHAVIOURS: [&str; 5] =
    ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"];

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

/// The tables of a tokenizer, or the first part that they have no place for.
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

fn step(kind: u32, flags: u32) -> Step {
    Step { kind, flags, arg0: Vec::new(), arg1: Vec::new(), number: 0 }
}

/// The options of a part, each of which must be known.
struct Options<'v> {
    /// `pre_tokenizer Split`.
    part: String,
    kind: &'v str,
    map: &'v Map<String, Value>,
}

impl<'v> Options<'v> {
    fn of(role: &str, value: &'v Value) -> Fits<Options<'v>> {
        let map = value.as_object().ok_or_else(|| format!("{role} is no object"))?;
        let kind = map.get("type").and_then(Value::as_str);
        let kind = kind.ok_or_else(|| format!("{role} names no type"))?;
        Ok(Options { part: format!("{role} {kind}"), kind, map })
    }

    fn no_kind<T>(&self) -> Fits<T> {
        Err(format!("{} has no step kind in it", self.part))
    }

    /// Refuses options beside these.
    fn only(&self, known: &[&str]) -> Fits<()> {
        let odd = |(key, value): &(&String, &Value)| {
            key.as_str() != "type" && !known.contains(&key.as_str()) && !value.is_null()
        };
        match self.map.iter().find(odd) {
            Some((key, _)) => Err(format!("{}: the option {key} has no place in it", self.part)),
            None => Ok(()),
        }
    }

    fn wrong<T>(&self, key: &str) -> Fits<T> {
        let value = self.map.get(key).unwrap_or(&Value::Null);
        Err(format!("{}: {key} {value} has no place in it", self.part))
    }

    fn flag(&self, key: &str, unset: bool) -> Fits<bool> {
        match self.map.get(key) {
            None | Some(Value::Null) => Ok(unset),
            Some(Value::Bool(set)) => Ok(*set),
            Some(_) => self.wrong(key),
        }
    }

    fn text(&self, key: &str) -> Fits<&'v str> {
        match self.map.get(key) {
            Some(Value::String(text)) => Ok(text),
            _ => self.wrong(key),
        }
    }

    fn number(&self, key: &str) -> Fits<u32> {
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

fn normalizer(value: &Value) -> Fits<Step> {
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

fn pre_tokenizer(value: &Value) -> Fits<Step> {
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

fn decoder(value: &Value) -> Fits<Step> {
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

/// The model, and the tokens that are added to it.
struct Model {
    kind: u32,
    /// Token and score by id.
    tokens: BTreeMap<u32, (String, f32)>,
    ids: BTreeMap<String, u32>,
    merges: Vec<[u32; 2]>,
    unknown: Option<u32>,
    byte_fallback: bool,
    /// Ids of added tokens with their types.
    added: BTreeMap<u32, u8>,
}

impl Model {
    fn read(model: &Map<String, Value>) -> Fits<Model> {
        let kind = model.get("type").and_then(Value::as_str);
        let kind = kind.ok_or_else(|| "model names no type".to_owned())?;
        let o = Options { part: format!("model {kind}"), kind, map: model };
        let mut read = Model {
            kind: 0,
            tokens: BTreeMap::new(),
            ids: BTreeMap::new(),
            merges: Vec::new(),
            unknown: None,
            byte_fallback: o.flag("byte_fallback", false)?,
            added: BTreeMap::new(),
        };
        match kind {
            "BPE" => read.bpe(&o)?,
            "Unigram" => read.unigram(&o)?,
            "WordPiece" => {
                o.only(&[
                    "vocab",
                    "unk_token",
                    "continuing_subword_prefix",
                    "max_input_chars_per_word",
                ])?;
                read.kind = WORDPIECE;
                read.vocabulary(&o)?;
                read.unknown_by_name(&o)?;
                // The section has no place for either, so readers have what everybody has.
                if o.text("continuing_subword_prefix")? != "##" {
                    return o.wrong("continuing_subword_prefix");
                }
                if o.number("max_input_chars_per_word")? != 100 {
                    return o.wrong("max_input_chars_per_word");
                }
            }
            _ => return Err(format!("{} has no kind in it", o.part)),
        }
        Ok(read)
    }

    fn bpe(&mut self, o: &Options<'_>) -> Fits<()> {
        o.only(&[
            "vocab",
            "merges",
            "unk_token",
            "byte_fallback",
            "fuse_unk",
            "dropout",
            "ignore_merges",
            "continuing_subword_prefix",
            "end_of_word_suffix",
        ])?;
        self.kind = BPE;
        for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
            if !matches!(o.map.get(key), None | Some(Value::Null)) && o.text(key)? != "" {
                return o.wrong(key);
            }
        }
        if o.map.get("dropout").and_then(Value::as_f64).is_some_and(|p| p != 0.0) {
            return o.wrong("dropout");
        }
        if o.flag("ignore_merges", false)? {
            return o.wrong("ignore_merges");
        }
        self.vocabulary(o)?;
        self.unknown_by_name(o)?;
        // Unknown pieces that would be joined never occur where every byte has a token.
        let bytes = (0..=255u8).all(|b| self.ids.contains_key(&byte_token(b)));
        let joins = o.flag("fuse_unk", false)? && self.unknown.is_some();
        if joins && !(self.byte_fallback && bytes) {
            return o.wrong("fuse_unk");
        }
        let merges = o.map.get("merges").and_then(Value::as_array);
        for merge in merges.into_iter().flatten() {
            let pair: Vec<&str> = match merge {
                Value::String(text) => text.split(' ').collect(),
                Value::Array(pair) => pair.iter().filter_map(Value::as_str).collect(),
                _ => Vec::new(),
            };
            let [left, right] = pair.as_slice() else {
                return Err(format!("{}: the merge {merge} is no pair", o.part));
            };
            let id = |token: &str| self.ids.get(token).copied();
            match (id(left), id(right), id(&format!("{left}{right}"))) {
                (Some(left), Some(right), Some(_)) => self.merges.push([left, right]),
                _ => return Err(format!("{}: the merge {merge} is not of its tokens", o.part)),
            }
        }
        Ok(())
    }

    fn unigram(&mut self, o: &Options<'_>) -> Fits<()> {
        o.only(&["vocab", "unk_id", "byte_fallback"])?;
        self.kind = UNIGRAM;
        let rows = o.map.get("vocab").and_then(Value::as_array);
        for (id, row) in rows.into_iter().flatten().enumerate() {
            let token = row.get(0).and_then(Value::as_str);
            let score = row.get(1).and_then(Value::as_f64);
            let (Some(token), Some(score), Ok(id)) = (token, score, u32::try_from(id)) else {
                return Err(format!("{}: row {id} of its vocabulary is odd", o.part));
            };
            self.put(id, token, score as f32)?;
        }
        if !matches!(o.map.get("unk_id"), None | Some(Value::Null)) {
            self.unknown = Some(o.number("unk_id")?).filter(|id| self.tokens.contains_key(id));
        }
        Ok(())
    }

    fn vocabulary(&mut self, o: &Options<'_>) -> Fits<()> {
        let rows = o.map.get("vocab").and_then(Value::as_object);
        for (token, id) in rows.into_iter().flatten() {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
            let id = id.ok_or_else(|| format!("{}: a token has an odd id", o.part))?;
            self.put(id, token, 0.0)?;
        }
        Ok(())
    }

    fn put(&mut self, id: u32, token: &str, score: f32) -> Fits<()> {
        let odd = |what: String| Err(format!("token {id}: {what}"));
        if token.contains('\0') {
            return odd("its text holds NUL, which ends a text".to_owned());
        }
        if let Some((other, _)) = self.tokens.insert(id, (token.to_owned(), score))
            && other != token
        {
            return odd(format!("`{}` and `{}`", other.escape_debug(), token.escape_debug()));
        }
        match self.ids.insert(token.to_owned(), id) {
            Some(other) if other != id => {
                odd(format!("`{}` is token {other} too", token.escape_debug()))
            }
            _ => Ok(()),
        }
    }

    fn unknown_by_name(&mut self, o: &Options<'_>) -> Fits<()> {
        if !matches!(o.map.get("unk_token"), None | Some(Value::Null)) {
            self.unknown = self.ids.get(o.text("unk_token")?).copied();
        }
        Ok(())
    }

    fn add(&mut self, added: &Added, normalizes: bool) -> Fits<()> {
        let options = [
            ("single_word", added.single_word),
            ("lstrip", added.lstrip),
            ("rstrip", added.rstrip),
            // Without a normalizer it is found in the same text.
            ("normalized", added.normalized && normalizes),
        ];
        if let Some((key, _)) = options.iter().find(|(_, set)| *set) {
            let text = added.content.escape_debug();
            return Err(format!("the added token `{text}`: {key} has no place in it"));
        }
        let score = self.tokens.get(&added.id).map_or(0.0, |(_, score)| *score);
        self.put(added.id, &added.content, score)?;
        self.added.insert(added.id, if added.special { CONTROL } else { USER_DEFINED });
        Ok(())
    }

    fn vocab(self, file: &File, settings: &Value, steps: Vec<Step>, chat: String) -> Fits<Vocab> {
        let missing: Vec<String> = (0..)
            .zip(self.tokens.keys())
            .find(|(at, id)| at != *id)
            .map(|(at, _)| at.to_string())
            .into_iter()
            .collect();
        if let [id] = missing.as_slice() {
            return Err(format!("no token has the id {id}"));
        }
        if chat.contains('\0') {
            return Err("the chat template holds NUL, which ends a text".to_owned());
        }
        let named = |key: &str| {
            let value = settings.get(key)?;
            let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
            self.ids.get(text).copied()
        };
        let around = around(&file.post_processor)?;
        let special =
            |name: &str, added: Option<u32>| match (named(&format!("{name}_token")), added) {
                (Some(named), Some(added)) if named != added => Err(format!(
                    "post_processor adds token {added}, {SETTINGS} says {name} is {named}"
                )),
                (named, added) => Ok(added.or(named)),
            };
        let ids = [
            special("bos", around.before)?,
            special("eos", around.after)?,
            named("eot_token"),
            named("pad_token"),
            self.unknown.or_else(|| named("unk_token")),
            named("sep_token"),
        ];
        let bytes: BTreeSet<String> = match self.byte_fallback {
            true => (0..=255).map(byte_token).collect(),
            false => BTreeSet::new(),
        };
        let kind_of = |(id, (text, _)): (&u32, &(String, f32))| match self.added.get(id) {
            _ if self.unknown == Some(*id) => UNKNOWN,
            Some(kind) => *kind,
            None if bytes.contains(text) => BYTE,
            None => NORMAL,
        };
        Ok(Vocab {
            kind: self.kind,
            types: self.tokens.iter().map(kind_of).collect(),
            scores: match self.kind {
                UNIGRAM => self.tokens.values().map(|(_, score)| *score).collect(),
                _ => Vec::new(),
            },
            specials: ids.map(|id| id.and_then(|id| i32::try_from(id).ok()).unwrap_or(-1)),
            add_bos: around.before.is_some(),
            add_eos: around.after.is_some(),
            chat_template: chat.into_bytes(),
            merges: self.merges,
            steps,
            tokens: self.tokens.into_values().map(|(text, _)| text.into_bytes()).collect(),
        })
    }
}

fn byte_token(byte: u8) -> String {
    format!("<0x{byte:02X}>")
}

/// The tokens that stand around every text.
#[derive(Default)]
struct Around {
    before: Option<u32>,
    after: Option<u32>,
}

fn around(post: &Value) -> Fits<Around> {
    let mut found = None;
    for part in parts(post, "processors") {
        let o = Options::of("post_processor", part)?;
        match o.kind {
            // It changes offsets alone.
            "ByteLevel" => {}
            "TemplateProcessing" if found.is_none() => found = Some(template(&o)?),
            _ => return Err(format!("{} has no place in it", o.part)),
        }
    }
    Ok(found.unwrap_or_default())
}

fn template(o: &Options<'_>) -> Fits<Around> {
    let mut around = Around::default();
    let mut text = false;
    for piece in o.map.get("single").and_then(Value::as_array).into_iter().flatten() {
        let named = |kind: &str| piece.get(kind)?.get("id")?.as_str();
        let special = named("SpecialToken").and_then(|name| {
            let ids = o.map.get("special_tokens")?.get(name)?.get("ids")?.as_array()?;
            let [id] = ids.as_slice() else { return None };
            u32::try_from(id.as_u64()?).ok()
        });
        let place = match text {
            false => &mut around.before,
            true => &mut around.after,
        };
        match (special, named("Sequence")) {
            (Some(id), _) if place.is_none() => *place = Some(id),
            (None, Some("A")) if !text => text = true,
            _ => return o.wrong("single"),
        }
    }
    if text { Ok(around) } else { o.wrong("single") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tokenizer(change: impl FnOnce(&mut Value)) -> Value {
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

    fn translated(value: &Value) -> Fits<Vocab> {
        translate(value.to_string().as_bytes(), None, None)
    }

    /// The steps of a tokenizer with one part, as `kind/flags arg0 arg1 number`.
    fn one(role: &str, part: Value) -> String {
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
        let cases: [(fn(&mut Value), &str); 12] = [
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
    fn tokens_around_a_text_and_special_tokens_come_from_both_files() {
        let template = |single: Value| {
            tokenizer(|t| {
                let ids = |id: u32| json!({"id": "x", "ids": [id], "tokens": ["x"]});
                t["post_processor"] = json!({"type": "Sequence", "processors": [
                    {"type": "ByteLevel", "trim_offsets": false},
                    {"type": "TemplateProcessing", "single": single, "pair": [],
                        "special_tokens": {"<s>": ids(3), "b": ids(1)}}]});
            })
        };
        let special = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
        let a = || json!({"Sequence": {"id": "A", "type_id": 0}});
        let settings = json!({
            "eos_token": {"content": "b", "lstrip": false}, "pad_token": "a", "unk_token": "ab",
            "eot_token": "nowhere", "sep_token": null, "chat_template": "old",
        });
        let with = |single: Value, own: Option<&str>| {
            let text = (template(single).to_string(), settings.to_string());
            translate(text.0.as_bytes(), Some(text.1.as_bytes()), own.map(str::as_bytes))
        };
        let made = with(json!([special("<s>"), a()]), None).expect("fits");
        assert_eq!((made.add_bos, made.add_eos), (true, false));
        assert_eq!(made.specials, [3, 1, -1, 0, 2, -1]);
        assert_eq!(made.types, [NORMAL, NORMAL, NORMAL, CONTROL]);
        assert_eq!(made.chat_template, b"old");
        let made = with(json!([a(), special("b")]), Some("new")).expect("fits");
        assert_eq!((made.add_bos, made.add_eos), (false, true));
        assert_eq!(made.chat_template, b"new", "chat_template.jinja wins");
        let odd = with(json!([a(), special("<s>")]), None).expect_err("another eos");
        assert_eq!(odd, "post_processor adds token 3, tokenizer_config.json says eos is 1");
        for single in [json!([]), json!([special("<s>"), special("b"), a()]), json!([a(), a()])] {
            assert!(
                with(single, None)
                    .expect_err("odd")
                    .starts_with("post_processor TemplateProcessing: single")
            );
        }
    }

    #[test]
    fn a_unigram_model_has_scores_and_byte_tokens_their_type() {
        let mut rows: Vec<Value> = vec![json!(["<unk>", 0.0]), json!(["▁a", -1.5])];
        rows.extend((0..=255).map(|b| json!([byte_token(b), 0.0])));
        let made = translated(&tokenizer(|t| {
            t["added_tokens"] = json!([{"id": 258, "content": "<x>", "special": false}]);
            t["model"] =
                json!({"type": "Unigram", "unk_id": 0, "byte_fallback": true, "vocab": rows});
        }))
        .expect("fits");
        assert_eq!((made.kind, made.tokens.len(), made.scores.len()), (UNIGRAM, 259, 259));
        assert_eq!(made.scores[..3], [0.0, -1.5, 0.0]);
        assert_eq!(made.types[..3], [UNKNOWN, NORMAL, BYTE]);
        assert_eq!(made.types[258], USER_DEFINED);
        assert_eq!(made.steps, [step(38, 0)]);
        assert_eq!(made.specials, [-1, -1, -1, -1, 0, -1]);
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
