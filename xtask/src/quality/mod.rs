//! `quality`: what encodings and recipes cost, as tables in `docs/quality.md`.

mod encodings;
mod recipes;

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde_json::Value;

use crate::{Result, build};

/// How to run `quality`.
#[derive(Debug, Args)]
pub struct QualityArgs {
    /// What to measure [default: both]
    #[arg(value_enum)]
    what: Option<What>,
    /// The radpack binary [default: build target/release/radpack]
    #[arg(long)]
    bin: Option<PathBuf>,
    /// Write the tables into docs/quality.md instead of comparing them
    #[arg(long)]
    write: bool,
    /// JSON documents instead of tables
    #[arg(long)]
    json: bool,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// Errors of every encoding on MiniLM's f32 weights
    Encodings,
    /// Divergence of SmolLM2 under every generic recipe
    Recipes,
}

/// Where the tables stand.
const DOCUMENT: &str = "docs/quality.md";

/// A table that was measured.
struct Table {
    /// It stands between `<!-- MARK -->` and `<!-- /MARK -->`.
    mark: &'static str,
    /// Markdown.
    text: String,
    /// The same figures in full.
    document: Value,
}

/// Measures, prints, checks what is claimed, and compares or writes the tables.
pub fn run(args: &QualityArgs) -> Result<()> {
    let bin = build::radpack(args.bin.clone())?;
    let mut tables = Vec::new();
    if args.what != Some(What::Recipes) {
        tables.push(encodings::measured(&bin)?);
    }
    if args.what != Some(What::Encodings) {
        tables.push(recipes::measured(&bin)?);
    }
    for table in &tables {
        match args.json {
            true => println!("{:#}", table.document),
            false => println!("{}", table.text),
        }
    }
    tables.iter().try_for_each(|table| keep(&testkit::root().join(DOCUMENT), table, args.write))
}

/// Compares a table with the document's, or puts it there.
fn keep(path: &Path, table: &Table, write: bool) -> Result<()> {
    let text = fs::read_to_string(path).map_err(testkit::at(path))?;
    let (open, close) = (format!("<!-- {} -->\n", table.mark), format!("<!-- /{} -->", table.mark));
    let missing = || format!("{}: no lines {} … {close}", path.display(), open.trim_end());
    let (before, rest) = text.split_once(&open).ok_or_else(missing)?;
    let (known, after) = rest.split_once(&close).ok_or_else(missing)?;
    if write {
        let text = format!("{before}{open}{}{close}{after}", table.text);
        return fs::write(path, text).map_err(testkit::at(path));
    }
    if known == table.text {
        return Ok(());
    }
    Err(format!("{} is not current: cargo xtask quality --write", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_changed_is_reported_and_written_between_its_marks() {
        let path = std::env::temp_dir().join(format!("xtask-quality-{}.md", std::process::id()));
        fs::write(&path, "a\n<!-- minilm -->\nold\n<!-- /minilm -->\nb\n").unwrap();
        let table = Table { mark: "minilm", text: "new\n".to_owned(), document: Value::Null };
        assert!(keep(&path, &table, false).unwrap_err().contains("not current"));
        keep(&path, &table, true).unwrap();
        keep(&path, &table, false).unwrap();
        let other = Table { mark: "smollm2", ..table };
        assert!(keep(&path, &other, true).unwrap_err().contains("no lines <!-- smollm2 -->"));
        let text = fs::read_to_string(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(text, "a\n<!-- minilm -->\nnew\n<!-- /minilm -->\nb\n");
    }
}
