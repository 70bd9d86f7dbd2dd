//! `radpack card`: every figure comes from the artifact or from documents that are handed in.

mod cli_support;

use std::fs;
use std::path::Path;

use cli_support::{dense, dense_copy, radpack, sha256, succeeds};
use serde_json::Value;
use tempfile::tempdir;

fn convert(folder: &Path, source: &Path, more: &[&str]) {
    let source = source.to_str().expect("UTF-8");
    succeeds(folder, &[&["convert", source, "-o", "model.rad"], more].concat());
}

fn card(folder: &Path, more: &[&str]) -> String {
    succeeds(folder, &[&["card", "model.rad"], more].concat()).stdout
}

fn facts(folder: &Path) -> Value {
    serde_json::from_str(&card(folder, &["--facts"])).expect("JSON")
}

/// The front matter's keys that stand alone on a line.
fn front(card: &str) -> Vec<&str> {
    let rest = card.strip_prefix("---\n").expect("front matter");
    rest.split_once("\n---\n").expect("it ends").0.lines().collect()
}

#[test]
fn a_card_has_front_matter_and_every_figure_of_the_artifact() {
    let tmp = tempdir().expect("a folder");
    convert(
        tmp.path(),
        &dense(),
        &["--recipe", "w8a16", "--devices", "2", "--target", "amd-r9700"],
    );
    let text = card(tmp.path(), &["--base-model", "org/tiny", "--license", "apache-2.0"]);
    assert_eq!(
        front(&text),
        [
            "library_name: radpack",
            "license: apache-2.0",
            "base_model: \"org/tiny\"",
            "base_model_relation: quantized",
            "pipeline_tag: image-text-to-text",
            "tags:",
            "- \"amd-r9700\"",
            "- \"gemma4\"",
            "- \"int8-channel\"",
            "- \"radpack\"",
        ]
    );
    let facts = facts(tmp.path());
    let sha = sha256(&tmp.path().join("model.rad"));
    let bytes = fs::metadata(tmp.path().join("model.rad")).expect("it is there").len();
    assert_eq!(facts["file"]["sha256"], sha.as_str());
    assert_eq!(facts["file"]["bytes"], bytes);
    for part in [
        format!("| sha256 | `{sha}` |"),
        "as one\nfile for 2 devices of amd-r9700: weights".to_owned(),
        "| hardware | 2 × amd-r9700 |".to_owned(),
        format!("| decode programs | batch {} |", list(&facts["graphs"]["decoder_batch_sizes"])),
        "radpack convert SOURCE --recipe w8a16 --devices 2 --target amd-r9700 -o model.rad\n"
            .to_owned(),
        "* The number of devices is fixed: weights and programs are cut for 2.".to_owned(),
        "| weights, device 1 | ".to_owned(),
    ] {
        assert!(text.contains(&part), "{part}\n{text}");
    }
    assert!(!text.contains("the source names none"), "{text}");
    for program in facts["graphs"]["programs"].as_array().expect("programs") {
        assert!(text.contains(&format!("| {} | ", program["name"].as_str().expect("a name"))));
    }
    for file in facts["source"]["files"].as_array().expect("files") {
        assert!(text.contains(file["sha256"].as_str().expect("a digest")));
    }
    assert!(!text.contains("## Quality") && !text.contains("Blocks that fit"), "{text}");
    assert!(!text.contains("\n\n\n\n") && text.ends_with('\n') && !text.ends_with("\n\n"));
}

fn list(value: &Value) -> String {
    let items = value.as_array().expect("a list").iter().map(Value::to_string);
    items.collect::<Vec<_>>().join(", ")
}

#[test]
fn the_command_on_the_card_makes_the_same_file() {
    let tmp = tempdir().expect("a folder");
    let source = dense();
    for more in [
        &["--recipe", "nvfp4", "--text-only"][..],
        &[
            "--recipe",
            "int8-g128",
            "--set",
            "whole_groups=false",
            "--set",
            "graphs.max_seq_len=4096",
        ],
    ] {
        convert(tmp.path(), &source, more);
        let facts = facts(tmp.path());
        let before = facts["rebuild"]["before"].as_array().expect("a list");
        let script =
            before.iter().map(|l| l.as_str().expect("a line").to_owned()).chain([format!(
                "radpack convert {} --check model.rad",
                facts["rebuild"]["arguments"].as_str().expect("arguments")
            )]);
        let script =
            script.collect::<Vec<_>>().join("\n").replace("SOURCE", &source.display().to_string());
        let folder = Path::new(env!("CARGO_BIN_EXE_radpack")).parent().expect("a folder");
        let path = std::env::var("PATH").unwrap_or_default();
        let ran = std::process::Command::new("sh")
            .args(["-e", "-c", &script])
            .env("PATH", format!("{}:{path}", folder.display()))
            .current_dir(tmp.path())
            .output()
            .expect("sh runs");
        let said = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success(), "{script}\n{said}");
        assert_eq!(before.is_empty(), more.contains(&"nvfp4"), "{script}");
    }
}

#[test]
fn licence_and_base_model_come_from_the_source_or_are_left_out() {
    let tmp = tempdir().expect("a folder");
    let source = dense_copy(tmp.path());
    convert(tmp.path(), &source, &[]);
    let text = card(tmp.path(), &[]);
    assert!(!front(&text).iter().any(|l| l.starts_with("license") || l.starts_with("base_model")));
    assert!(text.contains("the source names none in its files"), "{text}");

    fs::write(
        source.join("README.md"),
        "---\nlicense: gemma\nbase_model: other/parent\ntags: [a]\n---\n# x\n",
    )
    .expect("writes");
    fs::write(source.join("LICENSE"), "terms").expect("writes");
    convert(tmp.path(), &source, &[]);
    let text = card(tmp.path(), &[]);
    assert!(front(&text).contains(&"license: gemma"), "{text}");
    // The source's own parent is not what this file was made from.
    assert!(!text.contains("other/parent"), "{text}");
    assert!(text.contains("The file carries `LICENSE`"), "{text}");
}

#[test]
fn figures_of_eval_and_estimate_are_taken_only_for_this_artifact() {
    let tmp = tempdir().expect("a folder");
    convert(tmp.path(), &dense(), &[]);
    let digest = facts(tmp.path())["file"]["digest"].as_str().expect("a digest").to_owned();
    let score = serde_json::json!({
        "tokens": 1234, "kl_mean": 0.00281, "kl_median": 0.001, "kl_p99": 0.02, "kl_max": 0.5,
        "top1_agreement": 0.97912, "reference_perplexity": 9.0, "perplexity": 9.05,
        "perplexity_ratio": 1.00555,
    });
    let mut eval = serde_json::json!({
        "schema": "radpack.eval", "file": "model.rad", "digest": digest, "reference": "org/tiny",
        "window": 512, "overall": score, "sources": {"prose|x": score},
    });
    let write = |name: &str, value: &Value| {
        fs::write(tmp.path().join(name), value.to_string()).expect("writes");
    };
    write("eval.json", &eval);
    let text = card(tmp.path(), &["--eval", "eval.json"]);
    let row =
        "| org/tiny | prose\\|x | 1,234 | 2.8e-3 | 1.0e-3 | 2.0e-2 | 5.0e-1 | 97.91 % | 1.0055 |";
    assert!(text.contains(row), "{text}");

    eval["digest"] = "00".repeat(32).into();
    write("eval.json", &eval);
    write("other.json", &serde_json::json!({"schema": "radpack.run"}));
    let ran = radpack(
        tmp.path(),
        &[
            "card",
            "model.rad",
            "--eval",
            "eval.json",
            "--estimate",
            "other.json",
            "-o",
            "README.md",
        ],
    );
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("is of the artifact 000000000000…"), "{}", ran.stderr);
    assert!(
        ran.stderr.contains("its `schema` is radpack.run, radpack.estimate is needed"),
        "{}",
        ran.stderr
    );
    assert!(!tmp.path().join("README.md").exists());

    let source = dense();
    let source = source.to_str().expect("UTF-8");
    let args = ["estimate-kv", source, "--target", "amd-r9700", "--json"];
    fs::write(tmp.path().join("kv.json"), succeeds(tmp.path(), &args).stdout).expect("writes");
    let text = card(tmp.path(), &["--estimate", "kv.json"]);
    assert!(text.contains("as `radpack estimate-kv` counts for amd-r9700"), "{text}");
}

#[test]
fn a_template_of_ones_own_sees_the_facts_and_its_faults_have_a_place() {
    let tmp = tempdir().expect("a folder");
    convert(tmp.path(), &dense(), &[]);
    let template = |text: &str| fs::write(tmp.path().join("own.jinja"), text).expect("writes");
    template("{{ title }}: {{ model.parameters|count }} in {{ file.bytes|size }}");
    let ran =
        succeeds(tmp.path(), &["card", "model.rad", "--template", "own.jinja", "-o", "README.md"]);
    assert_eq!(ran.stdout, "");
    let text = fs::read_to_string(tmp.path().join("README.md")).expect("a card");
    assert!(text.starts_with("model: ") && text.ends_with(" MiB\n"), "{text}");

    template("fine\n{{ file.size }}");
    let ran =
        radpack(tmp.path(), &["card", "model.rad", "--template", "own.jinja", "-o", "README.md"]);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("own.jinja:2"), "{}", ran.stderr);
    let after = fs::read_to_string(tmp.path().join("README.md")).expect("a card");
    assert_eq!(after, text, "an older card stays");
}

#[test]
fn files_without_a_manifest_have_no_card() {
    let tmp = tempdir().expect("a folder");
    let golden = testkit::fixtures().join("rad/golden.rad");
    let ran = radpack(tmp.path(), &["card", golden.to_str().expect("UTF-8")]);
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    assert!(ran.stderr.contains("no manifest"), "{}", ran.stderr);
}

#[test]
fn the_page_shows_everything_and_loads_nothing() {
    let tmp = tempdir().expect("a folder");
    convert(tmp.path(), &dense(), &["--recipe", "nvfp4", "--devices", "2"]);
    let ran = succeeds(tmp.path(), &["inspect", "model.rad", "--html", "page.html"]);
    assert_eq!(ran.stdout, "");
    let page = fs::read_to_string(tmp.path().join("page.html")).expect("a page");
    let facts = facts(tmp.path());
    for part in ["/file/sha256", "/file/digest", "/recipe/sha256"] {
        let value = facts.pointer(part).and_then(Value::as_str).expect(part);
        assert!(page.contains(value), "{part}");
    }
    for program in facts["graphs"]["programs"].as_array().expect("programs") {
        assert!(page.contains(&format!("<td>{}</td>", program["name"].as_str().expect("a name"))));
    }
    assert_eq!(page.matches("<div class=\"device\">").count(), 2);
    assert_eq!(page.matches("class=\"a\" style=\"width:").count(), 2);
    assert!(page.contains("116 of 116 weights, largest error first"), "{page}");
    // Nothing but the page itself: no address, script, style sheet or picture.
    for outside in ["http:", "https:", "//", "<script", "<img", "@import", "url("] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert!(page.contains("prefers-color-scheme: dark") && page.contains("width=device-width"));
    // The largest share fills a bar.
    let widths =
        page.split("width:").skip(1).filter_map(|w| w.split('%').next()?.parse::<f64>().ok());
    assert!(widths.fold(0.0, f64::max) <= 100.0);
    assert_eq!(
        radpack(tmp.path(), &["inspect", "model.rad", "--html", "x.html", "--json"]).code,
        2
    );
}
