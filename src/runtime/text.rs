//! Text and tokens, by the tokenizer and the chat template that a file carries.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json, json};
use tokenizers::Tokenizer as Model;

use super::accepted;
use super::stored::side_file;
use crate::artifact::Artifact;
use crate::diag::{Diagnostic, Failure, FailureKind, Result};

const TOKENIZER: &str = "tokenizer.json";
const SETTINGS: &str = "tokenizer_config.json";
const TEMPLATE: &str = "chat_template.jinja";
const GENERATION: &str = "generation_config.json";
const CONFIG: &str = "config.json";

/// Steps that a template may take, and 64 times as many bytes of texts that it may make: published ones take fewer than a
/// thousand for a message.
const FUEL: u64 = 10_000_000;

/// From text to tokens and back.
pub struct Tokenizer {
    model: Model,
}

/// Text that grows token by token.
pub struct Writing<'t> {
    tokenizer: &'t Tokenizer,
    tokens: Vec<u32>,
    /// Tokens before `start` are written and needed no more; those before `done` are written.
    start: usize,
    done: usize,
}

fn refuse(message: String, help: &str) -> Failure {
    let problem = Diagnostic::new("text", message).help(help);
    Failure::one(FailureKind::Refused, "this file cannot read text", problem)
}

fn fault(what: &str, why: impl std::fmt::Display) -> Failure {
    let problem = Diagnostic::new("text", format!("{what}: {why}"));
    Failure::one(FailureKind::Refused, "this text cannot be read or written", problem)
}

fn json_file(artifact: &Artifact, path: &str) -> Result<Option<Json>> {
    let Some(bytes) = side_file(artifact, path) else { return Ok(None) };
    serde_json::from_slice(bytes).map(Some).map_err(|e| fault(path, e))
}

impl Tokenizer {
    /// The tokenizer of a file.
    ///
    /// # Errors
    /// A file without `tokenizer.json`, or with one that is not understood.
    pub fn read(artifact: &Artifact) -> Result<Tokenizer> {
        let bytes = side_file(artifact, TOKENIZER).ok_or_else(|| {
            refuse(
                format!("it carries no {TOKENIZER}"),
                "convert from a folder that has one, without --no-tokenizer",
            )
        })?;
        Tokenizer::from_json(bytes)
    }

    /// The tokenizer of the text of a `tokenizer.json`.
    ///
    /// # Errors
    /// A text that is not understood.
    pub fn from_json(bytes: &[u8]) -> Result<Tokenizer> {
        accepted::check(bytes).map_err(|why| fault(TOKENIZER, why))?;
        let mut model = Model::from_bytes(bytes).map_err(|e| fault(TOKENIZER, e))?;
        model.with_truncation(None).map_err(|e| fault(TOKENIZER, e))?;
        model.with_padding(None);
        Ok(Tokenizer { model })
    }

    /// Tokens of a text; `special` adds those that the tokenizer puts around any text.
    ///
    /// # Errors
    /// A text that the tokenizer has no tokens for.
    pub fn tokens(&self, text: &str, special: bool) -> Result<Vec<u64>> {
        let encoded = self.model.encode_fast(text, special).map_err(|e| fault(TOKENIZER, e))?;
        Ok(encoded.get_ids().iter().map(|id| u64::from(*id)).collect())
    }

    /// Text of tokens, without special ones.
    ///
    /// # Errors
    /// Tokens that the tokenizer cannot join.
    pub fn text(&self, tokens: &[u64]) -> Result<String> {
        let ids: Vec<u32> = tokens.iter().filter_map(|t| u32::try_from(*t).ok()).collect();
        self.decode(&ids)
    }

    /// The text of tokens without the special ones; tokenizers 0.22 has a decoder that does not survive having none left.
    fn decode(&self, ids: &[u32]) -> Result<String> {
        let added = self.model.get_added_vocabulary();
        let shown = |id: &u32| {
            self.model.id_to_token(*id).is_some_and(|token| !added.is_special_token(&token))
        };
        if !ids.iter().any(shown) {
            return Ok(String::new());
        }
        self.model.decode(ids, true).map_err(|e| fault(TOKENIZER, e))
    }

    /// The token of that exact text.
    pub fn token(&self, text: &str) -> Option<u64> {
        self.model.token_to_id(text).map(u64::from)
    }

    /// The text that stands for a token where it is written out, as added tokens are.
    pub fn token_text(&self, token: u64) -> Option<String> {
        self.model.id_to_token(u32::try_from(token).ok()?)
    }

    /// Begins a text.
    pub fn write(&self) -> Writing<'_> {
        Writing { tokenizer: self, tokens: Vec::new(), start: 0, done: 0 }
    }
}

impl Writing<'_> {
    /// Adds a token and gives the text that is new and certain: a character that needs more tokens waits for them.
    ///
    /// # Errors
    /// As [`Tokenizer::text`].
    pub fn push(&mut self, token: u64) -> Result<String> {
        self.tokens.extend(u32::try_from(token));
        self.new_text(false)
    }

    /// The rest, with characters that stayed incomplete as U+FFFD.
    ///
    /// # Errors
    /// As [`Tokenizer::text`].
    pub fn finish(mut self) -> Result<String> {
        self.new_text(true)
    }

    /// Decodes a window that begins with text already written, since a token's text can depend on the one before it.
    fn new_text(&mut self, all: bool) -> Result<String> {
        let decode = |tokens: &[u32]| self.tokenizer.decode(tokens);
        let window = self.tokens.get(self.start..).unwrap_or_default();
        let before = decode(window.get(..self.done - self.start).unwrap_or_default())?;
        let after = decode(window)?;
        let incomplete = after.ends_with(char::REPLACEMENT_CHARACTER) && !all;
        if incomplete || after.len() <= before.len() {
            return Ok(String::new());
        }
        let text = after.get(before.len()..).unwrap_or_default().to_owned();
        (self.start, self.done) = (self.done, self.tokens.len());
        Ok(text)
    }
}

/// The template that counts of those that a model has: `chat_template.jinja`, else the one in `tokenizer_config.json`,
/// of several there the one that is named `default`.
pub fn chosen_template(own: Option<&str>, settings: &Json) -> Option<String> {
    match (own, settings.get("chat_template")) {
        (Some(text), _) => Some(text.to_owned()),
        (None, Some(Json::String(text))) => Some(text.clone()),
        (None, Some(Json::Array(list))) => {
            let default = list.iter().find(|t| t.get("name") == Some(&json!("default")));
            Some(default?.get("template")?.as_str()?.to_owned())
        }
        _ => None,
    }
}

/// A template that makes a prompt of messages, as transformers 5.24 renders it: blocks trimmed, Python's methods,
/// `raise_exception`. It reads no file, sees no clock, and has fuel for its steps and for the bytes that they make.
///
/// Fuel does not see what a list holds that contains another list twice, and so on 40 times, nor one nested a million
/// deep: writing it out takes all time, memory or stack. `radpack run` therefore renders in a process of its own with limits
/// (docs/limits.md); whoever renders templates of strangers with this type does well to do the same, for which it can be
/// serialized.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Chat {
    template: String,
    variables: Map<String, Json>,
    fuel: u64,
}

impl Chat {
    /// The template of a file: `chat_template.jinja`, or what `tokenizer_config.json` says; `None` without either.
    ///
    /// # Errors
    /// Files that are not UTF-8 or not JSON.
    pub fn read(artifact: &Artifact) -> Result<Option<Chat>> {
        let settings = json_file(artifact, SETTINGS)?.unwrap_or_default();
        let own = side_file(artifact, TEMPLATE)
            .map(|bytes| std::str::from_utf8(bytes).map_err(|e| fault(TEMPLATE, e)))
            .transpose()?;
        Ok(Chat::of(own, &settings))
    }

    /// The template `own`, else the one of `settings` (a `tokenizer_config.json`), whose tokens it sees; `None` without
    /// either.
    pub fn of(own: Option<&str>, settings: &Json) -> Option<Chat> {
        let template = chosen_template(own, settings)?;
        let mut variables = Map::new();
        for (key, value) in settings.as_object().into_iter().flatten() {
            if let (true, Some(text)) = (key.ends_with("_token"), token_text(value)) {
                variables.insert(key.clone(), json!(text));
            }
        }
        Some(Chat { template, variables, fuel: FUEL })
    }

    /// The same template with fewer steps (at most 10,000,000).
    pub fn limited(self, steps: u64) -> Chat {
        Chat { fuel: steps.min(FUEL), ..self }
    }

    /// The prompt that asks for an answer to `messages`, each an object with `role` and `content`.
    ///
    /// # Errors
    /// A template that is malformed, refuses the messages, or does not end.
    pub fn prompt(&self, messages: &[Json]) -> Result<String> {
        self.rendered(messages).map_err(|why| Chat::refused(&why))
    }

    /// The failure of a template that gave no prompt for that reason.
    pub fn refused(why: &str) -> Failure {
        fault("the chat template", why)
    }

    /// The prompt, or why there is none.
    ///
    /// # Errors
    /// As [`Chat::prompt`].
    pub fn rendered(&self, messages: &[Json]) -> std::result::Result<String, String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| e.to_string())?);
        environment.set_fuel(Some(self.fuel));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |why: String| -> std::result::Result<Value, Error> {
                Err(Error::new(ErrorKind::InvalidOperation, why))
            },
        );
        let mut variables = self.variables.clone();
        variables.insert("messages".to_owned(), json!(messages));
        variables.insert("add_generation_prompt".to_owned(), json!(true));
        let rendered = environment
            .template_from_str(&self.template)
            .and_then(|template| template.render(Value::from(Serde(&variables))));
        rendered.map_err(|e| e.to_string())
    }
}

/// A special token's text: a string, or an object with `content`.
fn token_text(value: &Json) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// Tokens that end an answer: `eos_token_id` of `generation_config.json`, else of `config.json`.
///
/// # Errors
/// A file that is not JSON.
pub fn stop_tokens(artifact: &Artifact) -> Result<Vec<u64>> {
    for path in [GENERATION, CONFIG] {
        let file = json_file(artifact, path)?.unwrap_or_default();
        let text = file.get("text_config");
        let found = file.get("eos_token_id").or_else(|| text?.get("eos_token_id"));
        let ids: Vec<u64> = match found {
            Some(Json::Array(ids)) => ids.iter().filter_map(Json::as_u64).collect(),
            Some(id) => id.as_u64().into_iter().collect(),
            None => continue,
        };
        if !ids.is_empty() {
            return Ok(ids);
        }
    }
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(template: &str) -> Chat {
        let mut variables = Map::new();
        variables.insert("bos_token".to_owned(), json!("<s>"));
        Chat { template: template.to_owned(), variables, fuel: FUEL }
    }

    fn user(text: &str) -> Json {
        json!({ "role": "user", "content": text })
    }

    #[test]
    fn templates_render_as_transformers_renders_them() {
        // Rendered by jinja2 3.1 with trim_blocks and lstrip_blocks.
        let template = "{{ bos_token }}{% for m in messages %}\n  {% if m['role'] == 'user' %}\n[{{ m.content.strip().upper() }}]\n  {% endif %}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}";
        let prompt = chat(template).prompt(&[user(" hi "), user("you")]).expect("renders");
        assert_eq!(prompt, "<s>[HI]\n[YOU]\n>");
    }

    #[test]
    fn templates_that_refuse_or_run_forever_end_with_their_reason() {
        let said = |template: &str| {
            let failure = chat(template).prompt(&[user("x")]).expect_err(template);
            failure.problems[0].message.clone()
        };
        assert!(said("{{ raise_exception('roles must alternate') }}").contains("must alternate"));
        let endless =
            "{% for a in range(9999) %}{% for b in range(9999) %}{{ b }}{% endfor %}{% endfor %}";
        assert!(said(endless).contains("fuel"), "{}", said(endless));
        // No file can be named: the statement does not exist.
        let include = said("{% include 'config.json' %}");
        assert!(include.contains("include") || include.contains("config.json"), "{include}");
        assert!(said("{% for %}").contains("syntax"));
    }

    #[test]
    fn text_that_grows_is_the_text_of_all_its_tokens() {
        // Byte tokens: a character of several bytes comes with its last one.
        let tokenizer = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
            "pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},
            "post_processor":null,"decoder":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},
            "model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,
            "fuse_unk":false,"byte_fallback":false,"vocab":{"a":0,"Ã":1,"©":2,"Ġ":3},"merges":[]}}"#;
        let model = Model::from_bytes(tokenizer).expect("a tokenizer");
        let tokenizer = Tokenizer { model };
        let tokens = tokenizer.tokens("aé é", false).expect("tokens");
        assert_eq!(tokens, [0, 1, 2, 3, 1, 2]);
        let mut writing = tokenizer.write();
        let mut parts: Vec<String> =
            tokens.iter().map(|t| writing.push(*t).expect("text")).collect();
        parts.push(writing.finish().expect("text"));
        assert_eq!(parts, ["a", "", "é", " ", "", "é", ""]);
        let mut cut = tokenizer.write();
        assert_eq!(cut.push(1).expect("text"), "");
        assert_eq!(cut.finish().expect("text"), "\u{fffd}");
    }
}
