//! Recipes, tokenizers, chat templates, corpora, pictures.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use radpack::diag::SourceText;
use radpack::pipeline;
use radpack::recipe::{self, Recipe};
use radpack::runtime::{Chat, Picture, Tokenizer, read_corpus};
use serde_json::{Value, json};

use super::archive::files;
use super::{HURRY, Outcome, shown};

/// A recipe: what is accepted has one canonical text, which means the same.
pub fn recipe(input: &[u8]) -> Outcome {
    let mut recipe =
        Recipe::from_bytes("recipe.toml", input.to_vec()).map_err(|f| shown(&f, input))?;
    let text = recipe.to_toml();
    let again = parsed(&text);
    assert_eq!(again, recipe, "the canonical text means the same\n{text}");
    assert_eq!(again.to_toml(), text, "the canonical text is its own");
    // A further setting, of the input's own making.
    if let Some(setting) = std::str::from_utf8(input).ok().and_then(|t| t.lines().last()) {
        let _ = recipe.set(setting);
    }
    Ok(format!("{} rules", recipe.rules.len()))
}

fn parsed(text: &str) -> Recipe {
    let source = SourceText { name: "again".to_owned(), text: text.to_owned() };
    Recipe::parse(Arc::new(source)).unwrap_or_else(|f| panic!("{f}\n{text}"))
}

/// A text recipe of radiance: what is accepted gives a recipe that parses.
pub fn recipe_import(input: &[u8]) -> Outcome {
    let text = std::str::from_utf8(input).map_err(|e| e.to_string())?;
    let source = Arc::new(SourceText { name: "recipe.txt".to_owned(), text: text.to_owned() });
    let variable = |name: &str| (name == "BITS").then(|| "4".to_owned());
    let made = recipe::import(&source, &variable).map_err(|f| shown(&f, input))?;
    let recipe = parsed(&made);
    Ok(format!("{} rules", recipe.rules.len()))
}

/// `tokenizer.json`, with the settings beside it: for texts, and as the container's tables.
pub fn tokenizer(input: &[u8]) -> Outcome {
    let files = files(input);
    let find = |name: &str| files.iter().find(|f| f.0 == name).map(|f| f.1);
    let tokenizer = find("tokenizer.json").unwrap_or(input);
    let tables = pipeline::vocabulary_tables(
        tokenizer,
        find("tokenizer_config.json"),
        find("chat_template.jinja"),
    );
    let reader = Tokenizer::from_json(tokenizer).map_err(|f| f.to_string());
    let mut outcome = match &tables {
        Ok(vocab) => {
            assert_eq!(vocab.tokens.len(), vocab.types.len(), "every token has a type");
            format!("{} tokens in the section", vocab.tokens.len())
        }
        Err(part) => part.clone(),
    };
    let reader = match (reader, &tables) {
        (Ok(reader), _) => reader,
        (Err(refused), Ok(_)) => return Ok(format!("{outcome}; {refused}")),
        (Err(refused), Err(part)) => return Err(format!("{part}\n{refused}")),
    };
    for text in ["hello world", "", " \u{0301}\u{feff}\t\n", "日本語 <s> 123"] {
        let Ok(tokens) = reader.tokens(text, true) else { continue };
        let _ = reader.text(&tokens);
        let mut writing = reader.write();
        for token in tokens.iter().chain(&[0, u64::MAX, 1 << 31]) {
            let _ = writing.push(*token);
        }
        let _ = writing.finish();
        outcome.push_str(&format!("; {} tokens", tokens.len()));
    }
    Ok(outcome)
}

/// Steps of a template. Fuel does not see lists in lists, nor what methods of texts make before they pay (docs/limits.md);
/// the program renders in a process of its own with limits, which a fuzz target cannot. So templates with the words that
/// this takes get few steps: lists double a few times, and texts stay short.
fn steps(template: &[u8]) -> u64 {
    let count = |word: &str| template.windows(word.len()).filter(|w| *w == word.as_bytes()).count();
    let has = |words: &[&str]| words.iter().any(|word| count(word) > 0);
    match () {
        () if has(&["format", "join", "split", "\\u"]) => 60,
        () if has(&["namespace", "macro", "recursive"]) || count("set") > 20 => 120,
        () => 20_000,
    }
}

/// A chat template and its settings, over messages of the usual forms.
pub fn chat(input: &[u8]) -> Outcome {
    let files = files(input);
    let find = |name: &str| files.iter().find(|f| f.0 == name).map(|f| f.1);
    let settings = match find("tokenizer_config.json") {
        Some(text) => serde_json::from_slice(text).map_err(|e| e.to_string())?,
        None => Value::Null,
    };
    let template =
        find("chat_template.jinja").unwrap_or(if files.is_empty() { input } else { b"" });
    let template = std::str::from_utf8(template).map_err(|e| e.to_string())?;
    let own = (!template.is_empty()).then_some(template);
    let Some(mut chat) = Chat::of(own, &settings) else { return Err("no template".to_owned()) };
    if HURRY.load(Ordering::Relaxed) {
        chat = chat.limited(steps(input));
    }
    let messages = [
        json!({"role": "system", "content": "be brief"}),
        json!({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}),
        json!({"role": "assistant", "content": "a dot"}),
        json!({"role": "user", "content": "thanks"}),
    ];
    let prompt = chat.prompt(&messages).map_err(|f| f.to_string())?;
    assert_eq!(chat.prompt(&messages).as_deref(), Ok(prompt.as_str()), "one prompt");
    Ok(format!("{} bytes", prompt.len()))
}

/// A corpus of `radpack eval`.
pub fn corpus(input: &[u8]) -> Outcome {
    let documents = read_corpus(input).map_err(|f| f.to_string())?;
    assert!(!documents.is_empty());
    Ok(format!("{} documents", documents.len()))
}

/// A picture of `radpack run`.
pub fn picture(input: &[u8]) -> Outcome {
    let picture = Picture::decode(input).map_err(|f| f.to_string())?;
    let (width, height) = picture.size();
    assert!(width > 0 && height > 0);
    Ok(format!("{width} × {height}"))
}
