//! Files beside the weights: those that a GGUF file's metadata stand for, and those of its folder.

use super::Gguf;
use crate::checkpoint::digest::SourceFile;
use crate::checkpoint::json::JsonFile;
use crate::checkpoint::side::{LeftOut, SideFile};
use crate::checkpoint::tokenizer::{TOKENIZER_FILES, TokenizerReport};
use crate::diag::{self, Diagnostic};

impl Gguf {
    /// Puts the files made of a GGUF file's metadata in the place of those of its folder.
    pub(in crate::checkpoint) fn replace_configs(
        &self,
        json: &mut Vec<JsonFile>,
        side_files: &mut Vec<SideFile>,
        left_out: &mut Vec<LeftOut>,
        files: &mut Vec<SourceFile>,
    ) {
        const REASON: &str = "the GGUF file's own metadata say it";
        // Preprocessors belong to encoders that the file does not hold.
        let used = ["generation_config.json", "tokenizer_config.json"];
        json.retain(|file| used.contains(&file.path.as_str()));
        json.extend(self.config().cloned());
        for side in side_files.iter() {
            if self.made().contains_key(&side.path) || side.path == "config.json" {
                left_out.push(LeftOut { path: side.path.clone(), reason: REASON });
            }
        }
        let stays = |path: &str| !self.made().contains_key(path) && path != "config.json";
        side_files.retain(|side| stays(&side.path));
        files.retain(|file| stays(&file.path));
        let made = self.made().iter();
        side_files
            .extend(made.map(|(path, b)| SideFile { path: path.clone(), bytes: b.len() as u64 }));
        side_files.sort_by(|a, b| a.path.cmp(&b.path));
        left_out.sort_by(|a, b| a.path.cmp(&b.path));
    }

    /// Reports on the tokenizer in a GGUF file's metadata, which an artifact has no place for.
    pub(in crate::checkpoint) fn report_tokenizer(
        &self,
        kind: &str,
        tokens: u64,
        rows: Option<u64>,
        report: &mut TokenizerReport,
    ) {
        if let Some(rows) = rows.filter(|rows| tokens > *rows) {
            report.problems.push(Diagnostic::new(
                "tokenizer",
                format!(
                    "{}: `tokenizer.ggml.tokens` has {} tokens; the embedding has {} rows",
                    self.shown,
                    diag::count(tokens),
                    diag::count(rows)
                ),
            ));
        }
        if report.files.is_empty() {
            let what = format!(
                "{}: its tokenizer ({}, {} tokens) is not stored; an artifact holds tokenizer files",
                self.shown,
                kind.escape_debug(),
                diag::count(tokens)
            );
            let help = "with the original model's tokenizer files and config.json beside the GGUF file, they go \
                into the artifact";
            report.notes.push(Diagnostic::new("tokenizer", what).help(help));
        }
    }

    /// What an artifact has to tell about files that are made or missing; `side_files` are those that it gets.
    pub(in crate::checkpoint) fn notes(&self, side_files: &[SideFile]) -> Vec<String> {
        let made: Vec<&str> = self.made().keys().map(String::as_str).collect();
        let mut notes = Vec::new();
        if !made.is_empty() {
            let s = if made.len() == 1 { "is" } else { "are" };
            notes.push(format!("{} {s} made of the GGUF file's metadata", diag::list(&made, 9)));
        }
        let stored = |name: &str| side_files.iter().any(|f| f.path == name);
        if let Some((kind, tokens)) =
            self.tokenizer().filter(|_| !TOKENIZER_FILES.iter().any(|n| stored(n)))
        {
            let (kind, tokens) = (kind.escape_debug(), diag::count(*tokens));
            notes.push(format!(
                "the tokenizer in its metadata ({kind}, {tokens} tokens) is not stored"
            ));
        }
        notes
    }
}
