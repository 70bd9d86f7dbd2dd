//! Limits of what is read, each at its border and one past it; templates that want too much; paths that lead elsewhere.
//! `docs/limits.md` lists every limit of the program; a test here holds it to the source.

mod cli_support;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use cli_support::{Ran, dense_copy, radpack, resealed, sha256, succeeds};
use radpack::artifact::Artifact;
use radpack::checkpoint::gguf::header::read_header;
use radpack::diag::Failure;
use radpack::quantize::Importance;
use radpack::recipe;
use radpack::runtime::Chat;
use serde_json::json;
use tempfile::{TempDir, tempdir};
use testkit::gguf::{File, Tensor, Value, kind};
use testkit::imatrix;

/// A copy of a small model of text, which a test may change.
fn llama() -> TempDir {
    let tmp = tempdir().expect("a folder");
    testkit::copy_folder(&testkit::tiny_model("tiny-llama"), &tmp.path().join("model"))
        .expect("copies");
    tmp
}

/// What a conversion without writing says.
fn planned(folder: &Path, more: &[&str]) -> Ran {
    radpack(folder, &[&["convert", "model", "--recipe", "bf16", "--dry-run"], more].concat())
}

fn message(failure: &Failure) -> String {
    failure.to_string()
}

#[test]
fn recipes_have_a_size_a_number_of_rules_and_bounds_of_their_numbers() {
    let tmp = tempdir().expect("a folder");
    let path = tmp.path().join("r.toml");
    let load = |text: String| {
        fs::write(&path, text).expect("writes");
        recipe::load(Some(path.to_str().expect("UTF-8"))).map(drop)
    };
    let base = "schema = 1\nname = \"r\"\n";
    let sized = |n: usize| format!("{base}#{}", "x".repeat(n - base.len() - 1));
    assert!(load(sized(1 << 20)).is_ok());
    let failure = load(sized((1 << 20) + 1)).expect_err("one byte more");
    assert!(message(&failure).contains("larger than 1.00 MiB"), "{failure}");

    let rule = |n: usize| format!("[[quantize]]\nmatch = \"a{n}\"\nencoding = \"bf16\"\n");
    let rules = |n: usize| format!("{base}{}", (0..n).map(rule).collect::<String>());
    assert!(load(rules(4096)).is_ok());
    let failure = load(rules(4097)).expect_err("one rule more");
    assert!(message(&failure).contains("4097 rules; 4096 are allowed"), "{failure}");

    let set = |what: &str| {
        let mut recipe = recipe::load(Some("bf16")).unwrap_or_else(|f| panic!("{f}"));
        recipe.set(what).map(|_| ())
    };
    for (key, most) in [
        ("target.devices", 65_536u64),
        ("graphs.max_seq_len", 1 << 31),
        ("graphs.batch_size", 1 << 31),
        ("graphs.prefill_chunk_size", 1 << 31),
    ] {
        set(&format!("{key}={most}")).unwrap_or_else(|f| panic!("{f}"));
        let failure = set(&format!("{key}={}", most + 1)).expect_err(key);
        assert!(message(&failure).contains(&most.to_string()), "{failure}");
    }
    let rotation = |n: u64| {
        let text = format!(
            "{base}[[quantize]]\nmatch = \"a\"\nencoding = {{ codes = \"i8\", group = 32, transform = \"fwht{n}\" }}\n"
        );
        load(text)
    };
    rotation(1 << 20).unwrap_or_else(|f| panic!("{f}"));
    assert!(message(&rotation(1 << 21).expect_err("wider")).contains("1048576"));
}

#[test]
fn configurations_have_a_size_a_depth_and_bounds_of_their_numbers() {
    let tmp = llama();
    let path = tmp.path().join("model/config.json");
    let sound = fs::read_to_string(&path).expect("reads");
    let with = |text: &str| {
        fs::write(&path, text).expect("writes");
        planned(tmp.path(), &[])
    };
    assert_eq!(with(&sound).code, 0);
    let most = 16 << 20;
    let padded = |n: usize| format!("{sound}{}", " ".repeat(n - sound.len()));
    assert_eq!(with(&padded(most)).code, 0);
    let ran = with(&padded(most + 1));
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    assert!(ran.stderr.contains("more than the 16.00 MiB"), "{}", ran.stderr);

    let nested = |levels: usize| {
        let (open, close) = ("[".repeat(levels), "]".repeat(levels));
        sound.replacen('{', &format!("{{\"odd\": {open}{close},"), 1)
    };
    // The object itself is a level.
    assert_eq!(with(&nested(63)).code, 0);
    let ran = with(&nested(64));
    assert_eq!(ran.code, 3);
    assert!(ran.stderr.contains("nested deeper than 64 levels"), "{}", ran.stderr);

    let set = |key: &str, value: u64| {
        let mut config: serde_json::Value = serde_json::from_str(&sound).expect("JSON");
        config[key] = json!(value);
        with(&config.to_string())
    };
    let at_most = "at most 4,096 are supported";
    assert!(set("num_hidden_layers", 4097).stderr.contains(at_most));
    let ran = set("num_hidden_layers", 4096);
    assert!(ran.code == 3 && !ran.stderr.contains(at_most), "other layers are missing");
    let whole = "a whole number";
    assert!(set("max_position_embeddings", (1 << 31) + 1).stderr.contains(whole));
    let ran = set("max_position_embeddings", 1 << 31);
    assert!(!ran.stderr.contains(whole), "{}", ran.stderr);
}

#[test]
fn models_have_a_number_of_experts() {
    let tmp = tempdir().expect("a folder");
    testkit::copy_folder(&testkit::tiny_model("tiny-qwen3-moe"), &tmp.path().join("model"))
        .expect("copies");
    let path = tmp.path().join("model/config.json");
    let sound = fs::read_to_string(&path).expect("reads");
    let said = |layers: u64, experts: u64| {
        let mut config: serde_json::Value = serde_json::from_str(&sound).expect("JSON");
        config["num_hidden_layers"] = json!(layers);
        config["num_experts"] = json!(experts);
        fs::write(&path, config.to_string()).expect("writes");
        let ran = planned(tmp.path(), &[]);
        // More experts than there are tensors, in any case.
        assert_eq!(ran.code, 3, "{}", ran.stderr);
        ran.stderr
    };
    let (of_layer, of_all) = ("at most 65,536 are supported", "at most 1048576 experts in all");
    let text = said(4, 65_537);
    assert!(text.contains(of_layer), "{text}");
    let text = said(16, 65_536);
    assert!(!text.contains(of_layer) && !text.contains(of_all), "{:.2000}", text);
    let text = said(17, 65_536);
    assert!(text.contains(of_all), "{text}");
}

#[test]
fn names_keys_and_dimensions_of_gguf_files_have_lengths() {
    let with = |name: usize, key: usize, rank: usize| {
        let mut file = File::default();
        file.pair("general.architecture", Value::Text("llama".into()));
        file.pair("k".repeat(key), Value::U32(1));
        file.tensors = vec![Tensor {
            name: "n".repeat(name),
            kind: kind::F32,
            shape: vec![1; rank],
            bytes: vec![0; 4],
        }];
        let faults = read_header(&file.bytes())
            .map(|_| ())
            .map_err(|f| f.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"));
        faults.err().unwrap_or_default()
    };
    assert_eq!(with(64, 65_535, 4), "");
    assert!(with(65, 1, 1).contains("a tensor name of 65 bytes"), "{}", with(65, 1, 1));
    assert!(with(1, 65_536, 1).contains("a key of 65,536 bytes"), "{}", with(1, 65_536, 1));
    assert!(with(1, 1, 5).contains('5'), "{}", with(1, 1, 5));
}

#[test]
fn names_of_importances_have_a_length() {
    let with = |n: usize| Importance::parse(&imatrix::legacy(&[(&"n".repeat(n), 1, &[1.0])]));
    assert!(with(4096).is_ok());
    assert!(with(4097).is_err());
}

#[test]
fn folders_have_a_number_of_entries() {
    let tmp = llama();
    let folder = tmp.path().join("model");
    let there = fs::read_dir(&folder).expect("lists").count();
    for n in there..20_000 {
        fs::write(folder.join(format!(".{n}")), "").expect("writes");
    }
    let ran = planned(tmp.path(), &[]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    fs::write(folder.join(".one-more"), "").expect("writes");
    let ran = planned(tmp.path(), &[]);
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    assert!(ran.stderr.contains("holds more than 20,000 entries"), "{}", ran.stderr);
}

#[test]
fn conversions_have_a_number_of_parts_and_sweeps_a_number_of_rows() {
    let tmp = llama();
    let part = |part: &str| planned(tmp.path(), &["--part", part]);
    let ran = part("65536/65536");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let ran = part("1/65537");
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("at most 65536"), "{}", ran.stderr);
    let sweep = |rows: usize| {
        let lengths: Vec<String> = (0..rows).map(|n| (1024 + n).to_string()).collect();
        let lengths = format!("length={}", lengths.join(","));
        radpack(
            tmp.path(),
            &["estimate-kv", "model", "--target", "cpu", "--sweep", &lengths, "--json"],
        )
    };
    let ran = sweep(1024);
    assert!(!ran.stderr.contains("more than 1,024 rows"), "{}", ran.stderr);
    let ran = sweep(1025);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("more than 1,024 rows"), "{}", ran.stderr);
}

/// Templates that want more time or memory than one may, or another file.
const GREEDY: [(&str, &str); 7] = [
    ("{% for a in range(9999) %}{% for b in range(9999) %}{{ b }}{% endfor %}{% endfor %}", "fuel"),
    (
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "fuel",
    ),
    ("{{ 'a' * 99999999999 }}", "fuel"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ("{% include '/etc/passwd' %}", "include"),
    ("{% import '/etc/passwd' as x %}", "import"),
    ("{% extends '/etc/passwd' %}", "extends"),
];

#[test]
fn templates_of_chats_and_cards_read_no_file_and_end_with_a_reason() {
    let tmp = llama();
    let own = tmp.path().join("model/chat_template.jinja");
    let asks = [json!({"role": "user", "content": "x"})];
    for (n, (template, wanted)) in GREEDY.into_iter().enumerate() {
        fs::write(&own, template).expect("writes");
        let out = format!("{n}.rad");
        // The model is converted: its template is data until somebody talks to it.
        succeeds(tmp.path(), &["convert", "model", "--recipe", "bf16", "-o", &out]);
        let artifact = Artifact::open(&tmp.path().join(&out)).expect("opens");
        let chat = Chat::read(&artifact).unwrap_or_else(|f| panic!("{f}")).expect("a template");
        let failure = chat.prompt(&asks).expect_err(template);
        assert!(message(&failure).contains(wanted), "{template}: {failure}");
        fs::write(tmp.path().join("card.jinja"), template).expect("writes");
        let ran = radpack(tmp.path(), &["card", &out, "--template", "card.jinja"]);
        assert_eq!(ran.code, 2, "{template}: {}", ran.stderr);
        assert!(ran.stderr.contains(wanted), "{template}: {}", ran.stderr);
        assert!(!ran.stdout.contains("root:"));
        fs::remove_file(tmp.path().join(&out)).expect("removes");
    }
    // No function of that name exists.
    fs::write(tmp.path().join("card.jinja"), "{{ open('/etc/passwd').read() }}").expect("writes");
    fs::remove_file(&own).expect("removes");
    succeeds(tmp.path(), &["convert", "model", "--recipe", "bf16", "-o", "t.rad"]);
    let ran = radpack(tmp.path(), &["card", "t.rad", "--template", "card.jinja"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);

    let sized = |n: usize| {
        fs::write(tmp.path().join("card.jinja"), format!("{{#{}#}}", "x".repeat(n - 4)))
            .expect("writes");
        radpack(tmp.path(), &["card", "t.rad", "--template", "card.jinja"])
    };
    assert_eq!(sized(16 << 20).code, 0);
    let ran = sized((16 << 20) + 1);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stderr.contains("larger than the 16 MiB"), "{}", ran.stderr);
}

/// Replaces a text by another of the same length, wherever it stands.
fn replaced(bytes: &mut [u8], from: &str, to: &str) {
    assert_eq!(from.len(), to.len());
    let at: Vec<usize> = (0..=bytes.len() - from.len())
        .filter(|&i| bytes[i..].starts_with(from.as_bytes()))
        .collect();
    assert!(!at.is_empty(), "no {from}");
    for i in at {
        bytes[i..i + to.len()].copy_from_slice(to.as_bytes());
    }
}

#[test]
fn paths_in_a_file_never_lead_out_of_the_folder_that_is_written() {
    let tmp = tempdir().expect("a folder");
    let work = tmp.path().join("a/b/c");
    fs::create_dir_all(&work).expect("folders");
    let model = dense_copy(&work);
    fs::write(model.join("chat_template.jinja"), "x").expect("writes");
    succeeds(&work, &["convert", "model", "--recipe", "bf16", "-o", "t.rad"]);
    let sound = fs::read(work.join("t.rad")).expect("reads");
    let listing = |folder: &Path| -> BTreeMap<String, bool> {
        let mut out = BTreeMap::new();
        let mut folders = vec![folder.to_owned()];
        while let Some(next) = folders.pop() {
            for entry in fs::read_dir(next).expect("lists") {
                let path = entry.expect("an entry").path();
                if path.is_dir() && !path.is_symlink() {
                    folders.push(path.clone());
                }
                out.insert(path.display().to_string(), path.is_dir());
            }
        }
        out
    };
    fs::write(work.join("lied.rad"), &sound).expect("writes");
    let before = listing(tmp.path());
    let outside = [
        ("../../../tmp/evil.x", "leads out of the folder"),
        ("../chat_template.j/", "leads out of the folder"),
        ("/tmp/evil/evil.jinj", "leads out of the folder"),
        ("chat_template\\u0000", "NUL"),
    ];
    for (path, wanted) in outside {
        // In the manifest, under sound digests.
        let lied = resealed(&sound, "radpack/manifest.json", |bytes| {
            replaced(bytes, "chat_template.jinja", path);
        });
        fs::write(work.join("lied.rad"), &lied).expect("writes");
        for format in ["safetensors", "compressed-tensors"] {
            let ran = radpack(&work, &["export", "lied.rad", "--format", format, "-o", "out"]);
            assert!([1, 3, 4].contains(&ran.code), "{path}: {}", ran.stderr);
            if format == "safetensors" {
                let said = ran.stderr.to_lowercase();
                assert!(said.contains(&wanted.to_lowercase()), "{path}: {said}");
            }
        }
        let ran = radpack(&work, &["validate", "lied.rad"]);
        assert_eq!(ran.code, 4, "{path}: {}", ran.stderr);
        assert_eq!(listing(tmp.path()), before, "{path}");
    }
    // An entry's name: what is extracted has the last part of it, in this folder.
    let mut lied = sound.clone();
    let at = "radpack/file/chat_template.jinja";
    let strings = u64::from_le_bytes(lied[56..64].try_into().expect("8 bytes")) as usize;
    let names = u64::from_le_bytes(lied[64..72].try_into().expect("8 bytes")) as usize;
    replaced(&mut lied[strings..strings + names], at, "radpack/file/../../../tmp/evil.x");
    fs::write(work.join("lied.rad"), &lied).expect("writes");
    succeeds(&work, &["extract", "lied.rad", "../../../tmp/evil.x"]);
    assert_eq!(fs::read(work.join("evil.x")).expect("here"), b"x");
    fs::remove_file(work.join("evil.x")).expect("removes");
    assert_eq!(listing(tmp.path()), before);
    assert_eq!(radpack(&work, &["validate", "lied.rad"]).code, 4);

    // Links that lie in the way are not followed: a folder must be new, a file takes the link's place.
    let (elsewhere, kept) = (tmp.path().join("elsewhere"), tmp.path().join("kept"));
    fs::create_dir(&elsewhere).expect("a folder");
    fs::write(&kept, "kept").expect("writes");
    symlink(&elsewhere, work.join("out")).expect("a link");
    symlink(&kept, work.join("tokenizer.json")).expect("a link");
    let ran = radpack(&work, &["export", "t.rad", "--format", "safetensors", "-o", "out"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("exists already"), "{}", ran.stderr);
    assert_eq!(fs::read_dir(&elsewhere).expect("lists").count(), 0);
    succeeds(&work, &["extract", "t.rad", "tokenizer.json"]);
    assert_eq!(fs::read(&kept).expect("reads"), b"kept");
    assert_eq!(sha256(&work.join("tokenizer.json")), sha256(&model.join("tokenizer.json")));
}

/// `(name, path, value)` of every constant that is a limit of what is read.
fn limits_of_the_source() -> Vec<(String, String, String)> {
    let mut out = Vec::new();
    let mut folders = vec![testkit::root().join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("lists") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let shown = path.strip_prefix(testkit::root()).expect("inside").display().to_string();
            for line in fs::read_to_string(&path).expect("reads").lines() {
                let Some((head, value)) = line.split_once(" = ") else { continue };
                let Some((_, name)) = head.split_once("const ") else { continue };
                let Some((name, _)) = name.split_once(": ") else { continue };
                if name.starts_with("MAX_") || name == "FUEL" {
                    let value = value.trim_end_matches(';').to_owned();
                    out.push((name.to_owned(), shown.clone(), value));
                }
            }
        }
    }
    out.sort();
    out
}

#[test]
fn the_document_of_limits_has_every_limit_of_the_source_with_its_value() {
    let document = fs::read_to_string(testkit::root().join("docs/limits.md")).expect("reads");
    let rows: Vec<&str> = document.lines().filter(|l| l.starts_with("| `")).collect();
    let found = limits_of_the_source();
    assert!(found.len() > 50, "{}", found.len());
    for (name, path, value) in &found {
        let row = format!("| `{name}` | `{value}` | `{path}` |");
        assert!(rows.iter().any(|r| r.starts_with(&row)), "docs/limits.md lacks the row {row}");
    }
    assert_eq!(rows.len(), found.len(), "docs/limits.md lists limits that the source has not");
}
