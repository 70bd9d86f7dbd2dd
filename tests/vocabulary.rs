//! The tokenizer inside the container's tables: complete, checked, shown, and absent where it would be wrong.

mod cli_support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use cli_support::{dense, dense_copy, radpack, sha256, succeeds};
use radpack::artifact::manifest::Manifest;
use radpack::artifact::{Artifact, Step, Vocab, Writer, digests, layout as names};
use radpack::checkpoint::{Checkpoint, OpenOptions};
use radpack::pipeline::{self, Request};
use radpack::recipe;
use radpack::runtime::Chat;
use serde_json::{Map, Value, json};
use tempfile::tempdir;
use tokenizers::Tokenizer;

/// Models with tokenizers of both kinds: bytes behind a regular expression, and a metaspace with byte tokens.
const MODELS: [&str; 5] =
    ["tiny-llama", "tiny-mistral", "tiny-qwen3", "tiny-gemma3", "tiny-gemma4-dense"];

fn converted(source: &Path, out: &Path) -> Artifact {
    let folder = out.parent().expect("a folder");
    let [source, file] = [source, out].map(|p| p.to_str().expect("UTF-8"));
    succeeds(folder, &["convert", source, "--recipe", "bf16", "-o", file]);
    Artifact::open(out).expect("opens")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// A step as the part of `tokenizer.json` that it stands for.
fn part(step: &Step) -> Value {
    let (arg0, arg1) = (text(&step.arg0), text(&step.arg1));
    let behaviour = |n: i64| {
        ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"][n as usize]
    };
    match step.kind {
        7 => json!({"type": "Replace", "content": arg1,
            "pattern": if step.flags == 1 { json!({"Regex": arg0}) } else { json!({"String": arg0}) }}),
        32 => {
            json!({"type": "ByteLevel", "add_prefix_space": step.flags & 1 != 0, "trim_offsets": false,
            "use_regex": step.flags & 2 != 0})
        }
        33 => {
            json!({"type": "Split", "pattern": {"Regex": arg0}, "behavior": behaviour(step.number),
            "invert": step.flags & 1 != 0})
        }
        37 => json!({"type": "Digits", "individual_digits": step.flags & 1 != 0}),
        64 => {
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false})
        }
        66 => json!({"type": "Replace", "pattern": {"String": arg0}, "content": arg1}),
        68 => json!({"type": "Fuse"}),
        69 => json!({"type": "ByteFallback"}),
        kind => panic!("step {kind}"),
    }
}

/// A tokenizer made of a section alone.
fn rebuilt(v: &Vocab) -> Tokenizer {
    assert_eq!(v.kind, 1, "byte-pair encoding");
    let token = |id: i32| text(&v.tokens[usize::try_from(id).expect("an id")]);
    let of = |kinds: std::ops::Range<u32>, key: &str| {
        let steps: Vec<Value> =
            v.steps.iter().filter(|s| kinds.contains(&s.kind)).map(part).collect();
        if steps.is_empty() { Value::Null } else { json!({"type": "Sequence", key: steps}) }
    };
    let ids: Map<String, Value> =
        v.tokens.iter().enumerate().map(|(id, t)| (text(t), json!(id))).collect();
    assert_eq!(ids.len(), v.tokens.len(), "every text is one token");
    let added = v.types.iter().enumerate().filter(|(_, kind)| [2, 3, 4].contains(*kind));
    let added: Vec<Value> = added
        .map(|(id, kind)| {
            json!({"id": id, "content": token(id as i32), "special": *kind != 4, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false})
        })
        .collect();
    let merges: Vec<Value> =
        v.merges.iter().map(|[a, b]| json!([token(*a as i32), token(*b as i32)])).collect();
    let special = |id: i32| json!({"SpecialToken": {"id": token(id), "type_id": 0}});
    let mut single = vec![json!({"Sequence": {"id": "A", "type_id": 0}})];
    let mut around = Map::new();
    let mut put = |id: i32| {
        around.insert(token(id), json!({"id": token(id), "ids": [id], "tokens": [token(id)]}));
        special(id)
    };
    if v.add_bos {
        single.insert(0, put(v.specials[0]));
    }
    if v.add_eos {
        single.push(put(v.specials[1]));
    }
    let unknown = v.types.iter().position(|t| *t == 2).map(|id| token(id as i32));
    let whole = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": of(1..32, "normalizers"),
        "pre_tokenizer": of(32..38, "pretokenizers"),
        "decoder": of(64..96, "decoders"),
        "post_processor": {"type": "TemplateProcessing", "single": single,
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": around},
        "model": {"type": "BPE", "vocab": ids, "merges": merges, "unk_token": unknown, "fuse_unk": true,
            "byte_fallback": v.steps.iter().any(|s| s.kind == 38)},
    });
    Tokenizer::from_bytes(whole.to_string()).expect("a tokenizer")
}

/// Texts of the small corpora, and such as tokenizers stumble over.
fn texts(specials: &[String]) -> Vec<String> {
    let mut texts: Vec<String> = [
        "",
        " ",
        "  two  spaces ",
        "\t\r\n\n x",
        "Ünïcode ▁ ▁▁ 漢字 🙂\u{200d}🙂",
        "don't 12345 4,000.5",
        "\u{0}\u{7f}é",
    ]
    .map(str::to_owned)
    .to_vec();
    for corpus in ["small", "mixed"] {
        let path = testkit::fixtures().join(format!("corpus/{corpus}.jsonl"));
        for line in fs::read_to_string(path).expect("reads").lines() {
            let line: Value = serde_json::from_str(line).expect("JSON");
            texts.extend(
                ["text", "prompt", "answer"]
                    .iter()
                    .filter_map(|k| Some(line[*k].as_str()?.to_owned())),
            );
        }
    }
    texts.push(specials.join(" and "));
    texts.push(format!("a{0}{0}b", specials.concat()));
    texts
}

#[test]
fn a_tokenizer_made_of_the_section_alone_gives_the_tokens_and_texts_of_the_file() {
    let tmp = tempdir().expect("a folder");
    let mut compared = 0;
    for name in MODELS {
        let source = testkit::tiny_model(name);
        let artifact = converted(&source, &tmp.path().join("t.rad"));
        let section = artifact.vocab().unwrap_or_else(|| panic!("{name} has a section"));
        let file = source.join("tokenizer.json");
        let original = Tokenizer::from_file(&file).expect("a tokenizer");

        // Every token and every merge, as the library reads them.
        let known = original.get_vocab(true);
        assert_eq!(section.tokens.len(), known.len(), "{name}");
        for (id, token) in section.tokens.iter().enumerate() {
            assert_eq!(known.get(&text(token)), Some(&(id as u32)), "{name}");
        }
        let model = serde_json::to_value(original.get_model()).expect("JSON");
        let merges = model["merges"].as_array().expect("merges");
        assert_eq!(section.merges.len(), merges.len(), "{name}");
        for (merge, [a, b]) in merges.iter().zip(&section.merges) {
            let token = |id: &u32| text(&section.tokens[*id as usize]);
            let pair: Vec<String> = match merge {
                Value::String(pair) => pair.split(' ').map(str::to_owned).collect(),
                pair => serde_json::from_value(pair.clone()).expect("a pair"),
            };
            assert_eq!(pair, [token(a), token(b)], "{name}");
        }

        let own = rebuilt(&section);
        let specials: Vec<String> =
            original.get_added_tokens_decoder().values().map(|t| t.content.clone()).collect();
        for text in texts(&specials) {
            for with in [true, false] {
                let [a, b] = [&own, &original]
                    .map(|t| t.encode(text.as_str(), with).expect("encodes").get_ids().to_vec());
                assert_eq!(a, b, "{name}: {text:?}");
                let [x, y] = [&own, &original].map(|t| t.decode(&a, with).expect("decodes"));
                assert_eq!(x, y, "{name}: {text:?}");
                compared += a.len();
            }
        }
    }
    assert!(compared > 20_000, "{compared}");
}

#[test]
fn the_section_of_the_dense_model_is_this() {
    let tmp = tempdir().expect("a folder");
    let artifact = converted(&dense(), &tmp.path().join("t.rad"));
    let section = artifact.vocab().expect("a section");
    let steps: Vec<String> = section.steps.iter().map(Step::to_string).collect();
    assert_eq!(
        steps,
        [
            "replace (7, flags 0, ` `, `▁`)",
            "split (33, flags 0, ` `, 2)",
            "bytes for unknown text (38, flags 0)",
            "decode replace (66, flags 0, `▁`, ` `)",
            "decode byte tokens (69, flags 0)",
            "decode fuse (68, flags 0)",
        ]
    );
    // bos, eos, eot, pad, unk, sep: <bos> <eos> <turn|> <pad> <unk> and none.
    assert_eq!(section.specials, [2, 1, 495, 0, 3, -1]);
    assert_eq!((section.add_bos, section.add_eos), (true, false));
    let of_kind = |kind: u8| section.types.iter().filter(|t| **t == kind).count();
    assert_eq!([1, 2, 3, 4, 6].map(of_kind), [233, 1, 13, 0, 256]);
    let shown = succeeds(tmp.path(), &["inspect", "t.rad"]).stdout;
    assert!(shown.contains("\nvocab     BPE · 503 tokens · 182 merges · 6 steps\n"), "{shown}");
    let shown: Value =
        serde_json::from_str(&succeeds(tmp.path(), &["inspect", "t.rad", "--json"]).stdout)
            .expect("JSON");
    assert_eq!(
        shown["vocabulary"],
        json!({"kind": "BPE", "tokens": 503, "merges": 182, "steps": 6})
    );
}

#[test]
fn a_part_without_a_step_leaves_the_section_out_and_is_named() {
    let tmp = tempdir().expect("a folder");
    let source = dense_copy(tmp.path());
    let path = source.join("tokenizer.json");
    let mut tokenizer: Value =
        serde_json::from_slice(&fs::read(&path).expect("reads")).expect("JSON");
    tokenizer["normalizer"] = json!({"type": "Sequence", "normalizers": [
        {"type": "NFC"}, {"type": "StripAccents"}]});
    fs::write(&path, tokenizer.to_string()).expect("writes");
    let out = tmp.path().join("t.rad");
    let ran = succeeds(tmp.path(), &["convert", "model", "--recipe", "bf16", "-o", "t.rad"]);
    let said = ran.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        said.contains(
            "the vocabulary section is left out: normalizer StripAccents has no step kind in it"
        ),
        "{said}"
    );
    assert!(Artifact::open(&out).expect("opens").vocab_summary().is_none());
    assert!(!succeeds(tmp.path(), &["inspect", "t.rad"]).stdout.contains("vocab "));
    succeeds(tmp.path(), &["validate", "t.rad", "--against", "model"]);
}

/// Changes the type of token 7 in the section, which no digest covers.
fn change_a_type(path: &Path) {
    let mut bytes = fs::read(path).expect("reads");
    let number =
        |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes")) as usize;
    let types = number(number(136) + 32);
    assert_eq!(bytes[types + 7], 1);
    bytes[types + 7] = 4;
    fs::write(path, bytes).expect("writes");
}

#[test]
fn a_section_that_is_not_the_files_tokenizer_is_a_fault_and_a_difference() {
    let tmp = tempdir().expect("a folder");
    converted(&dense(), &tmp.path().join("a.rad"));
    fs::copy(tmp.path().join("a.rad"), tmp.path().join("b.rad")).expect("copies");
    change_a_type(&tmp.path().join("b.rad"));
    let ran = radpack(tmp.path(), &["validate", "b.rad"]);
    assert_eq!(ran.code, 4, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("token types: number 7 is 4 in the section, 1 in tokenizer.json"),
        "{}",
        ran.stderr
    );
    let ran = radpack(tmp.path(), &["diff", "a.rad", "b.rad"]);
    assert_eq!(ran.code, 1);
    assert!(ran.stdout.contains("vocab     type of token 7: 1 → 4"), "{}", ran.stdout);
}

/// The file that this conversion made before files carried the section.
fn without_section(source: &Path, from: &Path, out: PathBuf) {
    let checkpoint =
        Checkpoint::open(source, &OpenOptions::default()).unwrap_or_else(|f| panic!("{f}"));
    let recipe = recipe::load(Some("bf16")).unwrap_or_else(|f| panic!("{f}"));
    let request = Request { weights_only: false, tokenizer_required: true };
    let plan = pipeline::plan(checkpoint, recipe, request).unwrap_or_else(|f| panic!("{f}"));
    let layout = plan.earlier_layout(false).unwrap_or_else(|f| panic!("{f}"));
    let artifact = Artifact::open(from).expect("opens");
    let mut manifest = Manifest::of(&artifact).expect("reads").expect("a manifest");
    manifest.tables = None;
    let writer = Writer::create(&out, layout).unwrap_or_else(|f| panic!("{f}"));
    for entry in artifact.entries() {
        let name = entry.name().to_string();
        let at = writer.layout().entry(&name).expect("the entry");
        let own = match name.as_str() {
            names::DIGESTS_ENTRY => continue,
            names::MANIFEST_ENTRY => Some(manifest.to_bytes()),
            _ => None,
        };
        for plane in 0..entry.encoding().planes.len() {
            let bytes = own.as_deref().unwrap_or(entry.plane(plane));
            writer.write(at, plane, 0, bytes).unwrap_or_else(|f| panic!("{f}"));
        }
    }
    digests::seal(&writer, &BTreeMap::new()).unwrap_or_else(|f| panic!("{f}"));
    writer.finish().unwrap_or_else(|f| panic!("{f}"));
}

#[test]
fn files_from_before_the_section_are_sound_and_reused() {
    let tmp = tempdir().expect("a folder");
    let new = tmp.path().join("new.rad");
    converted(&dense(), &new);
    let old = tmp.path().join("old.rad");
    without_section(&dense(), &new, old.clone());
    assert!(Artifact::open(&old).expect("opens").vocab_summary().is_none());
    let source = dense().to_str().expect("UTF-8").to_owned();
    succeeds(tmp.path(), &["validate", "old.rad"]);
    succeeds(tmp.path(), &["validate", "old.rad", "--against", &source]);
    succeeds(tmp.path(), &["convert", &source, "--recipe", "bf16", "--check", "old.rad"]);
    succeeds(tmp.path(), &["convert", &source, "--recipe", "bf16", "--check", "new.rad"]);
    let args = ["convert", &source, "--recipe", "bf16", "-o", "again.rad", "--reuse", "old.rad"];
    succeeds(tmp.path(), &args);
    assert_eq!(sha256(&tmp.path().join("again.rad")), sha256(&new));
    let ran = radpack(tmp.path(), &["diff", "old.rad", "new.rad", "--json"]);
    assert_eq!(ran.code, 1);
    let found: Value = serde_json::from_str(&ran.stdout).expect("JSON");
    let tokens =
        found["vocabulary"].as_array().expect("a list").iter().find(|c| c["path"] == "tokens");
    assert_eq!(tokens, Some(&json!({"path": "tokens", "a": null, "b": 503})));
}

#[test]
fn the_template_of_its_own_file_wins_in_the_section_and_in_chats_and_both_are_stored() {
    let tmp = tempdir().expect("a folder");
    let source = dense_copy(tmp.path());
    let path = source.join("tokenizer_config.json");
    let mut settings: Value =
        serde_json::from_slice(&fs::read(&path).expect("reads")).expect("JSON");
    let asks = [json!({"role": "user", "content": "x"})];
    let prompt = |artifact: &Artifact| {
        let chat = Chat::read(artifact).unwrap_or_else(|f| panic!("{f}")).expect("a template");
        chat.prompt(&asks).unwrap_or_else(|f| panic!("{f}"))
    };
    let expect = |settings: &Value, own: Option<&str>, wanted: &str| {
        fs::write(&path, settings.to_string()).expect("writes");
        let own_path = source.join("chat_template.jinja");
        match own {
            Some(text) => fs::write(&own_path, text).expect("writes"),
            None => drop(fs::remove_file(&own_path)),
        }
        let artifact = converted(&source, &tmp.path().join("t.rad"));
        assert_eq!(text(&artifact.vocab().expect("a section").chat_template), wanted);
        assert_eq!(prompt(&artifact), wanted.replace("{{ messages[0].content }}", "x"));
        let stored = |name: &str| {
            artifact.find(&format!("radpack/file/{name}")).map(|e| e.plane(0).to_vec())
        };
        assert_eq!(stored("chat_template.jinja"), own.map(|t| t.as_bytes().to_vec()));
        assert_eq!(stored("tokenizer_config.json"), Some(settings.to_string().into_bytes()));
    };
    settings["chat_template"] = json!("in the settings: {{ messages[0].content }}");
    expect(
        &settings,
        Some("of its own: {{ messages[0].content }}"),
        "of its own: {{ messages[0].content }}",
    );
    expect(&settings, None, "in the settings: {{ messages[0].content }}");
    settings["chat_template"] = json!([
        {"name": "rag", "template": "another"}, {"name": "default", "template": "the default"}]);
    expect(&settings, None, "the default");
    expect(&settings, Some("of its own"), "of its own");
}
