//! Checks of the tokenizer against the embedding: every token id must have a row.
//!
//! A compiler carries the tokenizer and does not run it, so its files are read leniently: whatever is not recognised
//! is left alone.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use super::safetensors::quoted;
use super::side::LeftOut;
use crate::diag::{self, Diagnostic};

/// Files that make a tokenizer, any of which will do, in the order in which they are looked for.
pub(super) const TOKENIZER_FILES: [&str; 9] = [
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
    "qwen.tiktoken",
];

/// Largest tokenizer file read, in bytes (Gemma's `tokenizer.json` has 32 MiB).
pub(super) const MAX_TOKENIZER_BYTES: u64 = super::side::MAX_SIDE_FILE_BYTES;

/// Stand-ins for an encoder's output, which never reach the embedding of a model without that encoder: Gemma 3 1B
/// ships the tokenizer of its multimodal sisters, whose `<image_soft_token>` 262144 lies one past its last row.
const ENCODER_TOKENS: [&str; 3] =
    ["<image_soft_token>", "<audio_soft_token>", "<video_soft_token>"];

/// Tokens beyond the table that are remembered by name.
const REMEMBERED: usize = 1000;

/// What the check of a tokenizer found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenizerReport {
    /// The tokenizer files present, in the order in which they are looked for.
    pub files: Vec<String>,
    /// Highest token id seen and its token; `None` when the files hold no readable ids.
    pub highest: Option<(u64, String)>,
    /// What is wrong.
    pub problems: Vec<Diagnostic>,
    /// What is odd and does not stop a conversion.
    pub notes: Vec<Diagnostic>,
}

/// Token ids while they are collected.
#[derive(Debug)]
pub(super) struct Ids {
    rows: u64,
    highest: Option<(u64, String)>,
    beyond: BTreeMap<u64, String>,
    beyond_count: u64,
}

impl Ids {
    /// Collects ids for an embedding of that many rows (`u64::MAX` to judge none).
    pub fn new(rows: u64) -> Ids {
        Ids { rows, highest: None, beyond: BTreeMap::new(), beyond_count: 0 }
    }

    fn see(&mut self, id: u64, token: &str) {
        if self.highest.as_ref().is_none_or(|(highest, _)| id > *highest) {
            self.highest = Some((id, token.to_owned()));
        }
        if id >= self.rows && !self.beyond.contains_key(&id) {
            self.beyond_count += 1;
            if self.beyond.len() < REMEMBERED {
                self.beyond.insert(id, token.to_owned());
            }
        }
    }

    /// Reads the ids of a file. `name` decides its form.
    ///
    /// # Errors
    /// The reason why the file is no JSON.
    pub fn read(&mut self, name: &str, bytes: &[u8]) -> Result<(), String> {
        let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
        match name {
            "tokenizer.json" => self.json(bytes, |ids| TokenizerJson { ids }),
            "vocab.json" | "added_tokens.json" => self.json(bytes, |ids| Vocab { ids }),
            "vocab.txt" => {
                for (id, line) in bytes.split(|b| *b == b'\n').enumerate() {
                    // The last line ends the text; it is no token.
                    if !line.is_empty() {
                        self.see(id as u64, &String::from_utf8_lossy(line));
                    }
                }
                Ok(())
            }
            // Sentencepiece and tiktoken files: binary, not read.
            _ => Ok(()),
        }
    }

    fn json<'s, 'b, S>(
        &'s mut self,
        bytes: &'b [u8],
        seed: impl FnOnce(&'s mut Ids) -> S,
    ) -> Result<(), String>
    where
        S: DeserializeSeed<'b, Value = ()>,
    {
        let mut json = serde_json::Deserializer::from_slice(bytes);
        seed(self).deserialize(&mut json).and_then(|()| json.end()).map_err(|e| e.to_string())
    }

    /// Closes the collection.
    pub fn report(self, report: &mut TokenizerReport) {
        let (rows, beyond_count) = (self.rows, self.beyond_count);
        let (odd, wrong): (Vec<_>, Vec<_>) = self
            .beyond
            .into_iter()
            .partition(|(_, token)| ENCODER_TOKENS.contains(&token.as_str()));
        for (id, token) in &odd {
            report.notes.push(Diagnostic::new(
                "tokenizer",
                format!(
                    "token {} has id {} and the embedding {} rows; it stands for an encoder that this model does not \
                     have",
                    quoted(token),
                    diag::count(*id),
                    diag::count(rows)
                ),
            ));
        }
        if let Some((id, token)) = wrong.first() {
            let more = match beyond_count.saturating_sub(odd.len() as u64 + 1) {
                0 => String::new(),
                1 => "; 1 more token lies beyond".to_owned(),
                n => format!("; {} more tokens lie beyond", diag::count(n)),
            };
            report.problems.push(
                Diagnostic::new(
                    "tokenizer",
                    format!(
                        "token {} has id {}, and the embedding has {} rows (ids 0 to {}){more}",
                        quoted(token),
                        diag::count(*id),
                        diag::count(rows),
                        diag::count(rows.saturating_sub(1))
                    ),
                )
                .help("the tokenizer belongs to another model, or tokens were added and the embedding was not resized")
                .help("resize the embedding (resize_token_embeddings), remove the token, or leave the tokenizer out \
                       with --no-tokenizer"),
            );
        }
        report.highest = self.highest;
    }
}

/// The problem of a folder without any tokenizer file that is carried along; `left_out` are those of them that are not.
pub(super) fn none_found<'a>(
    shown: &str,
    left_out: impl IntoIterator<Item = &'a LeftOut>,
) -> Diagnostic {
    let left_out: Vec<String> =
        left_out.into_iter().map(|file| format!("{}, {}", file.path, file.reason)).collect();
    let what = if left_out.is_empty() {
        format!(
            "{shown} has no tokenizer; looked for {}",
            diag::list(&TOKENIZER_FILES, TOKENIZER_FILES.len())
        )
    } else {
        format!(
            "{shown} has no tokenizer that can be stored; left out: {}",
            diag::list(&left_out, left_out.len())
        )
    };
    Diagnostic::new("tokenizer", what)
        .help("copy the tokenizer of the model that this one was trained from")
        .help("or go on without: --no-tokenizer")
}

/// `tokenizer.json` of the tokenizers library: `model.vocab` and `added_tokens`.
struct TokenizerJson<'a> {
    ids: &'a mut Ids,
}

/// The `model` object.
struct Model<'a> {
    ids: &'a mut Ids,
}

/// An object from tokens to ids, or a list of `[token, score]` whose positions are the ids.
struct Vocab<'a> {
    ids: &'a mut Ids,
}

/// A list of `{"id": …, "content": …}`.
struct AddedTokens<'a> {
    ids: &'a mut Ids,
}

/// Reads any JSON value with the visitor that the seed itself is.
macro_rules! any_value {
    ($name:ident) => {
        impl<'de> DeserializeSeed<'de> for $name<'_> {
            type Value = ();

            fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
                json.deserialize_any(self)
            }
        }
    };
}

/// The part of a visitor that passes over everything but maps and lists.
macro_rules! pass_over_scalars {
    () => {
        type Value = ();

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a part of a tokenizer")
        }

        fn visit_bool<E>(self, _: bool) -> Result<(), E> {
            Ok(())
        }

        fn visit_i64<E>(self, _: i64) -> Result<(), E> {
            Ok(())
        }

        fn visit_u64<E>(self, _: u64) -> Result<(), E> {
            Ok(())
        }

        fn visit_f64<E>(self, _: f64) -> Result<(), E> {
            Ok(())
        }

        fn visit_str<E>(self, _: &str) -> Result<(), E> {
            Ok(())
        }

        fn visit_unit<E>(self) -> Result<(), E> {
            Ok(())
        }
    };
}

any_value!(TokenizerJson);
any_value!(Model);
any_value!(Vocab);
any_value!(AddedTokens);

fn pass_over<'de, A: SeqAccess<'de>>(mut seq: A) -> Result<(), A::Error> {
    while seq.next_element::<IgnoredAny>()?.is_some() {}
    Ok(())
}

impl<'de> Visitor<'de> for TokenizerJson<'_> {
    pass_over_scalars!();

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<(), A::Error> {
        pass_over(seq)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "model" => map.next_value_seed(Model { ids: self.ids })?,
                "added_tokens" => map.next_value_seed(AddedTokens { ids: self.ids })?,
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

impl<'de> Visitor<'de> for Model<'_> {
    pass_over_scalars!();

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<(), A::Error> {
        pass_over(seq)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "vocab" => map.next_value_seed(Vocab { ids: self.ids })?,
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

impl<'de> Visitor<'de> for Vocab<'_> {
    pass_over_scalars!();

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let mut id = 0u64;
        while let Some(item) = seq.next_element::<Value>()? {
            self.ids.see(id, item.get(0).and_then(Value::as_str).unwrap_or("?"));
            id += 1;
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some((token, id)) = map.next_entry::<String, Value>()? {
            if let Some(id) = id.as_u64() {
                self.ids.see(id, &token);
            }
        }
        Ok(())
    }
}

impl<'de> Visitor<'de> for AddedTokens<'_> {
    pass_over_scalars!();

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(item) = seq.next_element::<Value>()? {
            if let Some(id) = item.get("id").and_then(Value::as_u64) {
                self.ids.see(id, item.get("content").and_then(Value::as_str).unwrap_or("?"));
            }
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rows: u64, files: &[(&str, &str)]) -> TokenizerReport {
        let mut ids = Ids::new(rows);
        for (name, text) in files {
            ids.read(name, text.as_bytes()).expect("readable");
        }
        let mut report = TokenizerReport::default();
        ids.report(&mut report);
        report
    }

    #[test]
    fn a_token_id_past_the_last_row_is_named_with_its_token() {
        let tokenizer = r#"{"model": {"type": "BPE", "vocab": {"a": 0, "b": 31999}, "merges": [["a", "b"]]},
                            "added_tokens": [{"id": 2, "content": "</s>"}], "decoder": null}"#;
        let added = r#"{"<pad>": 32000, "<x>": 32005}"#;
        let report = check(32000, &[("tokenizer.json", tokenizer), ("added_tokens.json", added)]);
        assert_eq!(report.problems.len(), 1);
        assert_eq!(
            report.problems[0].message,
            "token `<pad>` has id 32,000, and the embedding has 32,000 rows (ids 0 to 31,999); 1 more token \
             lies beyond"
        );
        assert!(report.problems[0].help[1].contains("--no-tokenizer"));
        assert_eq!(report.highest, Some((32005, "<x>".into())));
        assert!(
            check(32006, &[("tokenizer.json", tokenizer), ("added_tokens.json", added)])
                .problems
                .is_empty()
        );
    }

    #[test]
    fn a_vocabulary_may_be_a_list_or_lines_of_text() {
        let unigram =
            r#"{"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.5], ["b", -2]]}}"#;
        let report = check(2, &[("tokenizer.json", unigram)]);
        assert_eq!(
            report.problems[0].message,
            "token `b` has id 2, and the embedding has 2 rows (ids 0 to 1)"
        );
        assert_eq!(check(2, &[("vocab.txt", "a\nb\n")]).problems.len(), 0);
        assert_eq!(check(1, &[("vocab.txt", "a\nb\n")]).problems.len(), 1);
    }

    #[test]
    fn a_stand_in_for_an_encoder_past_the_table_is_only_noted() {
        let text = r#"{"added_tokens": [{"id": 262144, "content": "<image_soft_token>"}]}"#;
        let report = check(262144, &[("tokenizer.json", text)]);
        assert_eq!(report.problems, []);
        assert_eq!(
            report.notes[0].message,
            "token `<image_soft_token>` has id 262,144 and the embedding 262,144 rows; it stands for an encoder that \
             this model does not have"
        );
    }

    #[test]
    fn unknown_forms_are_passed_over_and_broken_json_is_told() {
        for text in [
            "[]",
            "3",
            r#"{"model": [1], "added_tokens": {"a": 1}}"#,
            r#"{"model": {"vocab": "x"}}"#,
        ] {
            assert_eq!(check(1, &[("tokenizer.json", text)]).highest, None, "{text}");
        }
        let mut ids = Ids::new(1);
        let reason = ids.read("tokenizer.json", b"{\"model\": ").expect_err("broken");
        assert!(reason.starts_with("EOF while parsing"), "{reason}");
    }
}
