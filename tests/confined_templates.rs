//! Templates that want more time, memory or stack than one may, in the process that renders them (`src/cli/confined.rs`).

mod cli_support;

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use cli_support::{radpack, succeeds};
use radpack::runtime::Chat;
use serde_json::{Value, json};
use tempfile::tempdir;

/// What the process that renders says to `asked`.
fn rendered(asked: &Value) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_radpack"));
    command.env("RADPACK_RENDERS", "1");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("starts");
    let mut input = child.stdin.take().expect("its input");
    input.write_all(asked.to_string().as_bytes()).expect("writes");
    drop(input);
    child.wait_with_output().expect("ends")
}

fn chat(template: &str) -> Chat {
    Chat::of(Some(template), &json!({"bos_token": "<s>"})).expect("a template")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Templates under `fixtures/bad/chat` by their files.
fn templates() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/bad/chat");
    let mut found = Vec::new();
    for entry in fs::read_dir(&folder).expect("the folder") {
        let path = entry.expect("an entry").path();
        if let (Some("jinja"), Ok(text)) =
            (path.extension().and_then(|e| e.to_str()), fs::read_to_string(&path))
        {
            found.push((path.display().to_string(), text));
        }
    }
    found.sort();
    found
}

#[test]
fn a_process_of_its_own_says_what_the_library_says() {
    let messages = json!([
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what?"},
    ]);
    let good = "{{ bos_token }}{% for m in messages %}[{{ m.role.upper() }}] {{ m.content|trim }}\n{% endfor %}";
    let mut templates = templates();
    assert!(templates.len() >= 8, "{}", templates.len());
    templates.push(("good".to_owned(), good.to_owned()));
    let mut accepted = 0;
    for (name, template) in templates {
        let chat = chat(&template);
        let output = rendered(&json!({"chat": {"chat": &chat, "messages": &messages}}));
        match chat.rendered(messages.as_array().expect("messages")) {
            Ok(text) => {
                assert_eq!((output.status.code(), said(&output)), (Some(0), text), "{name}");
                accepted += 1;
            }
            Err(why) => assert_eq!((output.status.code(), said(&output)), (Some(3), why), "{name}"),
        }
    }
    assert!(accepted > 0);
}

/// A list of two, of which each holds the one before, so many times.
fn doubled(times: u32, then: &str) -> String {
    format!(
        "{{% set n = namespace(a=['ab']) %}}{{% for i in range({times}) %}}{{% set n.a = [n.a, n.a] %}}{{% endfor %}}{then}"
    )
}

#[test]
fn values_that_fuel_does_not_see_end_at_the_limits_of_memory_time_and_stack() {
    let tmp = tempdir().expect("a folder");
    testkit::copy_folder(&testkit::tiny_model("tiny-llama"), &tmp.path().join("model"))
        .expect("copies");
    succeeds(tmp.path(), &["convert", "model", "--recipe", "bf16", "-o", "t.rad"]);
    let card = |template: &str| {
        fs::write(tmp.path().join("card.jinja"), template).expect("writes");
        radpack(tmp.path(), &["card", "t.rad", "--template", "card.jinja"])
    };
    let few = card(&doubled(3, "{{ n.a }}"));
    assert_eq!(few.code, 0, "{}", few.stderr);
    assert_eq!(few.stdout.matches("ab").count(), 8, "{}", few.stdout);
    // Writing it out would take tebibytes; so would a method that joins a thousand texts of a megabyte.
    let long = "{% set s = 'x' * 1000000 %}{% set x = ''.join([s] * 10000) %}";
    let method = chat(long);
    let output = rendered(&json!({"chat": {"chat": method, "messages": []}}));
    assert_eq!(output.status.code(), None, "{}", said(&output));
    let deep = "{% set n = namespace(a=['ab']) %}{% for i in range(90000) %}{% set n.a = [n.a] %}{% endfor %}{{ n.a }}";
    for greedy in [doubled(40, "{% set x = n.a ~ '' %}"), deep.to_owned()] {
        let ran = card(&greedy);
        assert_eq!(ran.code, 2, "{greedy}: {}", ran.stderr);
        let wanted = "rendering it took more than 1.00 GiB of memory";
        assert!(ran.stderr.contains(wanted), "{greedy}: {}", ran.stderr);
    }
    // Comparing takes no memory, only time. A lower limit of whoever starts the program holds.
    let compared = "{% set n = namespace(a=['ab'], b=['ab']) %}{% for i in range(40) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}";
    fs::write(tmp.path().join("card.jinja"), compared).expect("writes");
    let mut limited = Command::new("sh");
    let program = env!("CARGO_BIN_EXE_radpack");
    limited
        .arg("-c")
        .arg(format!("ulimit -t 3; exec '{program}' card t.rad --template card.jinja"));
    let ended = limited.current_dir(tmp.path()).output().expect("runs");
    let text = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(2), "{text}");
    assert!(text.contains("more than 60 s of processor time"), "{text}");
}

#[test]
fn a_text_of_64_mib_is_rendered_and_one_byte_more_is_not() {
    let of = |bytes: u64| {
        let template = format!("{{{{ 'x' * {bytes} }}}}");
        rendered(&json!({"chat": {"chat": chat(&template), "messages": []}}))
    };
    let most = of(64 << 20);
    assert_eq!((most.status.code(), most.stdout.len()), (Some(0), 64 << 20));
    let more = of((64 << 20) + 1);
    assert_eq!(more.status.code(), Some(3));
    assert!(said(&more).contains("67,108,865 bytes; 67,108,864 are allowed"), "{}", said(&more));
}
