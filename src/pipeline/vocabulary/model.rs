//! The model of `tokenizer.json` as tokens, merges and special tokens.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::steps::Options;
use super::{Added, File, Fits, SETTINGS, parts};
use crate::artifact::{Step, Vocab};

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

/// The model, and the tokens that are added to it.
pub(super) struct Model {
    kind: u32,
    /// Token and score by id.
    tokens: BTreeMap<u32, (String, f32)>,
    ids: BTreeMap<String, u32>,
    merges: Vec<[u32; 2]>,
    unknown: Option<u32>,
    pub(super) byte_fallback: bool,
    /// Ids of added tokens with their types.
    added: BTreeMap<u32, u8>,
}

impl Model {
    pub(super) fn read(model: &Map<String, Value>) -> Fits<Model> {
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
            if !matches!(o.map.get(key), None | Some(Value::Null)) && !o.text(key)?.is_empty() {
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

    pub(super) fn add(&mut self, added: &Added, normalizes: bool) -> Fits<()> {
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

    pub(super) fn vocab(
        self,
        file: &File,
        settings: &Value,
        steps: Vec<Step>,
        chat: String,
    ) -> Fits<Vocab> {
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

    use super::super::steps::step;
    use super::super::tests::{tokenizer, translated};
    use super::super::translate;
    use super::*;

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
}
