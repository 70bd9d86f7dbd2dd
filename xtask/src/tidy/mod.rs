//! `tidy`: the rules of the tree that no compiler checks.
//!
//! | rule | what it forbids |
//! |---|---|
//! | direction | a module naming one that its row of [`direction::TABLE`] doesn't allow |
//! | root-noun | a path from outside into a stage's inner modules |
//! | contained | a crate named outside the files that contain it |
//! | printing | `println!` and its kin outside `src/cli` and `src/main.rs` |
//! | names | modules called `utils`, `common` or `helpers` |
//! | safety | `unsafe` in a file that docs/safety.md doesn't list |
//! | unfinished | `todo!`, `unimplemented!`, `#[ignore]` and notes to come back later |
//! | length | Rust files of more than 800 lines |
//! | module-doc | Rust files that don't open with `//!` |
//! | wording | paths of one developer's machine |
//!
//! Comments and strings don't count for the rules about code, so `[`crate::cli`]` in a doc comment is fine.

mod code;
mod direction;
mod text;

use std::fmt;
use std::fs;
use std::path::Path;

use crate::Result;

/// A broken rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    /// Path below the repository root, with `/`.
    file: String,
    /// Counted from 1.
    line: usize,
    rule: &'static str,
    message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}:{}: {}: {}", self.file, self.line, self.rule, self.message)
    }
}

/// A file to check.
pub struct Source {
    /// Path below the repository root, with `/`.
    pub path: String,
    /// Its content.
    pub text: String,
}

/// The document that has the argument for every `unsafe`.
const SAFETY: &str = "docs/safety.md";

/// Checks the whole tree and prints every finding.
pub fn run() -> Result<()> {
    let mut sources = Vec::new();
    collect(&testkit::root(), "", &mut sources)?;
    let found = check(&sources);
    for finding in &found {
        println!("{finding}");
    }
    match found.len() {
        0 => {
            let rust = sources.iter().filter(|s| s.path.ends_with(".rs")).count();
            println!("tidy: {rust} Rust files, {} text files in all", sources.len());
            Ok(())
        }
        1 => Err("1 rule is broken".into()),
        n => Err(format!("{n} rules are broken")),
    }
}

/// All findings of a set of files, sorted.
pub fn check(sources: &[Source]) -> Vec<Finding> {
    let mut found = Vec::new();
    let tree = direction::Tree::of(sources);
    let safety = sources.iter().find(|s| s.path == SAFETY).map_or("", |s| s.text.as_str());
    for source in sources {
        let mut report = |line: usize, rule: &'static str, message: String| {
            found.push(Finding { file: source.path.clone(), line, rule, message });
        };
        text::check(source, &mut report);
        if source.path.ends_with(".rs") {
            let tokens = code::tokens(&source.text);
            code::check(&source.path, &tokens, &mut report);
            let listed = safety.contains(&format!("| `{}` |", source.path));
            if let Some(token) = tokens.iter().find(|t| t.text == "unsafe" && !listed) {
                report(token.line, "safety", format!("unsafe, and {SAFETY} doesn't list the file"));
            }
            tree.check(&source.path, &tokens, &mut report);
        }
    }
    found.sort();
    found.dedup();
    found
}

/// Reads every UTF-8 file below `root/below`, in sorted order.
fn collect(root: &Path, below: &str, sources: &mut Vec<Source>) -> Result<()> {
    let folder = root.join(below);
    let mut names = Vec::new();
    for entry in fs::read_dir(&folder).map_err(testkit::at(&folder))? {
        let entry = entry.map_err(testkit::at(&folder))?;
        let kind = entry.file_type().map_err(testkit::at(&folder))?;
        names.push((entry.file_name().to_string_lossy().into_owned(), kind));
    }
    names.sort_by(|a, b| a.0.cmp(&b.0));
    for (name, kind) in names {
        let path = if below.is_empty() { name.clone() } else { format!("{below}/{name}") };
        if kind.is_dir() {
            // Build output, history, and what fuzzing leaves behind.
            if !matches!(name.as_str(), "target" | ".git" | "corpus") {
                collect(root, &path, sources)?;
            }
        } else if kind.is_file() && name != ".git" && !binary(&name) {
            let full = root.join(&path);
            let bytes = fs::read(&full).map_err(testkit::at(&full))?;
            if let Ok(text) = String::from_utf8(bytes) {
                sources.push(Source { path, text });
            }
        }
    }
    Ok(())
}

/// Files that are not text, by name. They can be large, so they aren't opened to find out.
fn binary(name: &str) -> bool {
    [".safetensors", ".rad", ".partial", ".gguf", ".bin", ".png"].iter().any(|e| name.ends_with(e))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Findings of a tree given as (path, text), one per line.
    fn findings(files: &[(&str, &str)]) -> String {
        let source = |(path, text): &(&str, &str)| Source {
            path: (*path).into(),
            text: if path.ends_with(".rs") { format!("//! Doc.\n{text}") } else { (*text).into() },
        };
        let lines: Vec<String> = check(&files.iter().map(source).collect::<Vec<_>>())
            .iter()
            .map(Finding::to_string)
            .collect();
        lines.join("\n")
    }

    const STAGES: [(&str, &str); 7] = [
        ("src/tensor/mod.rs", "pub struct Shape;"),
        ("src/diag/mod.rs", ""),
        ("src/num/fp8.rs", ""),
        ("src/checkpoint/mod.rs", "mod open;"),
        ("src/checkpoint/open.rs", ""),
        ("src/recipe/mod.rs", "pub mod resolve;"),
        ("src/recipe/resolve.rs", ""),
    ];

    fn with(files: &[(&str, &str)]) -> String {
        findings(&[&STAGES[..], files].concat())
    }

    #[test]
    fn a_stage_may_name_the_foundation_and_earlier_stages() {
        let text = "use crate::{checkpoint::Checkpoint, num::fp8::decode, tensor::{DType, Shape}};\n\
                    pub fn f(x: crate::recipe::Method) { crate::recipe::g(x) }";
        assert_eq!(with(&[("src/quantize/mod.rs", text)]), "");
    }

    #[test]
    fn a_later_stage_is_out_of_reach_however_it_is_spelled() {
        for text in [
            "use crate::recipe::Method;",
            "use crate::{tensor::Shape, recipe::{self, Method}};",
            "fn f() { crate::recipe::g() }",
            "use super::super::recipe::Method;",
            "mod tests { use super::super::super::recipe::Method; }",
            "macro_rules! m { () => { $crate::recipe::g() } }",
            "type T = Vec<crate::recipe::Method>;",
        ] {
            assert_eq!(
                with(&[("src/checkpoint/scan.rs", text)]),
                "src/checkpoint/scan.rs:2: direction: checkpoint may not name recipe; it may name \
                 model, num, tensor, diag, hash",
                "{text}"
            );
        }
    }

    #[test]
    fn super_stays_inside_a_module_until_it_leaves_it() {
        let text =
            "use super::Checkpoint;\nmod tests { use super::*; use super::super::Checkpoint; }";
        assert_eq!(with(&[("src/checkpoint/scan.rs", text)]), "");
        let root = "use super::recipe::Method;";
        assert!(with(&[("src/checkpoint/mod.rs", root)]).contains("direction"));
    }

    #[test]
    fn the_foundation_names_no_stage_and_the_container_only_tensors_and_diagnostics() {
        assert_eq!(
            with(&[("src/diag/render.rs", "use crate::tensor::Shape;")]),
            "src/diag/render.rs:2: direction: diag may not name tensor; it may name nothing"
        );
        assert_eq!(
            with(&[("src/artifact/reader.rs", "use crate::num::fp8::decode;")]),
            "src/artifact/reader.rs:2: direction: artifact may not name num; it may name tensor, diag, hash"
        );
    }

    #[test]
    fn inner_modules_of_a_stage_are_its_own_business() {
        let text = "use crate::recipe::resolve::x;\nuse crate::recipe::{resolve::y, Method};\n\
                    use crate::recipe::resolve;\nfn f() { crate::checkpoint::open(); }";
        let inner = "root-noun: recipe::resolve is an inner module of recipe; name what recipe itself \
                     exports";
        let want = [2, 3, 4].map(|line| format!("src/quantize/mod.rs:{line}: {inner}")).join("\n");
        assert_eq!(with(&[("src/quantize/mod.rs", text)]), want);
        assert_eq!(with(&[("src/recipe/text.rs", "use crate::recipe::resolve::x;")]), "");
    }

    #[test]
    fn the_cli_names_everything_and_nobody_names_the_cli() {
        let cli = ("src/cli/mod.rs", "use crate::{artifact::A, recipe::resolve::x, quantize::Q};");
        assert_eq!(with(&[cli, ("src/quantize/mod.rs", ""), ("src/artifact/mod.rs", "")]), "");
        let everything_else = "model, num, tensor, diag, hash, checkpoint, recipe, partition, graph, \
                               quantize, artifact, estimate, runtime, export, diff, card";
        assert_eq!(
            with(&[cli, ("src/pipeline.rs", "use crate::cli::Args;")]),
            format!(
                "src/pipeline.rs:2: direction: pipeline may not name cli; it may name {everything_else}"
            )
        );
    }

    #[test]
    fn a_module_without_a_row_is_reported() {
        assert_eq!(
            with(&[("src/extra.rs", "")]),
            "src/extra.rs:1: direction: extra has no row in the table of xtask/src/tidy/direction.rs"
        );
    }

    #[test]
    fn comments_and_strings_are_not_code() {
        let text = "/// [`crate::cli`] /* */\n/* use crate::recipe::M; /* println!() */ todo!() */\n\
                    const A: &str = \"use crate::recipe::M; \\\" todo!()\";\n\
                    const B: &str = r#\"\"println!()\"#;\nconst C: char = '\"';\n\
                    fn f<'a>(x: &'a str) { let _ = ('\\'', b'\"', b\"dbg!()\"); }";
        assert_eq!(with(&[("src/checkpoint/scan.rs", text)]), "");
    }

    #[test]
    fn contained_crates_stay_where_they_are_contained() {
        assert_eq!(
            with(&[
                ("src/artifact/codec.rs", "use bincode::Options;"),
                ("src/artifact/wire.rs", "use bincode::Options;"),
                ("src/checkpoint/hub/mod.rs", "fn f() { hf_hub::x() }"),
                ("src/checkpoint/shard.rs", "use memmap2::Mmap;"),
                ("src/quantize/mod.rs", "use memmap2::Mmap;"),
                ("src/recipe/fetch.rs", "fn f() { hf_hub::x() }"),
            ]),
            "src/artifact/wire.rs:2: contained: bincode is named in src/artifact/codec.rs only\n\
             src/quantize/mod.rs:2: contained: memmap2 is named in src/checkpoint/shard.rs, \
             src/artifact/reader.rs, src/artifact/writer.rs only\n\
             src/recipe/fetch.rs:2: contained: hf_hub is named in src/checkpoint/hub/mod.rs, \
             src/checkpoint/hub/answer.rs, src/checkpoint/hub/download.rs, src/checkpoint/hub/heads.rs only"
        );
    }

    #[test]
    fn unsafe_code_is_listed_with_its_argument() {
        let files = [
            ("docs/safety.md", "| file | argument |\n| `src/tensor/a.rs` | why |\n"),
            ("src/tensor/a.rs", "fn f() { unsafe { g() } }"),
            ("src/tensor/b.rs", "// unsafe\n#![deny(unsafe_op_in_unsafe_fn)]\nunsafe fn g() {}"),
        ];
        assert_eq!(
            with(&files),
            "src/tensor/b.rs:4: safety: unsafe, and docs/safety.md doesn't list the file"
        );
    }

    #[test]
    fn only_the_command_line_prints() {
        assert_eq!(
            with(&[
                ("src/cli/mod.rs", "fn f() { println!() }"),
                ("src/main.rs", "fn f() { eprintln!() }"),
                ("src/recipe/text.rs", "fn println() {}\nfn f() { eprintln !() }"),
            ]),
            "src/recipe/text.rs:3: printing: eprintln! belongs into src/cli"
        );
    }

    #[test]
    fn vague_names_and_unfinished_code_are_reported() {
        assert_eq!(
            with(&[
                ("src/recipe/utils.rs", ""),
                ("src/recipe/text.rs", "mod helpers {}\nfn f() { todo!() }"),
                ("tests/a.rs", "#[test]\n#[ignore = \"slow\"]\nfn t() {}"),
            ]),
            "src/recipe/text.rs:2: names: a module called helpers says nothing; name the noun it holds\n\
             src/recipe/text.rs:3: unfinished: todo!\n\
             src/recipe/utils.rs:1: names: a module called utils says nothing; name the noun it holds\n\
             tests/a.rs:3: unfinished: #[ignore]"
        );
    }

    #[test]
    fn long_files_missing_docs_and_private_paths_are_reported() {
        let long = "//! Doc.\n".repeat(801);
        let sources = [
            ("src/tensor/a.rs", long.as_str()),
            ("src/tensor/b.rs", "use std::fmt;\n"),
            ("README.md", concat!("see /wo", "rk/x and .github/workflows\n.", "./shared/y\n")),
            ("docs/a.md", concat!("TO", "DO\n")),
        ];
        let sources = sources.map(|(path, text)| Source { path: path.into(), text: text.into() });
        let found: Vec<String> = check(&sources).iter().map(Finding::to_string).collect();
        assert_eq!(
            found,
            [
                "README.md:1: wording: a path of one developer's machine",
                "README.md:2: wording: a path of one developer's machine",
                concat!("docs/a.md:1: unfinished: TO", "DO"),
                "src/tensor/a.rs:801: length: 801 lines; 800 is the most",
                "src/tensor/b.rs:1: module-doc: the file doesn't open with //!",
            ]
        );
    }
}
