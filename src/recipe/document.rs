//! A recipe: its text read, changed from the command line, and written back in one canonical form.

use std::fmt::Write;
use std::sync::Arc;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::read::{AREA, Reader, Section, quoted};
use super::rule::Rule;
use super::settings::{Graphs, Target, Towers, Vision};
use crate::diag::{Diagnostic, Failure, FailureKind, Problems, Result, SourceText};

/// The version of the language that this program reads and writes.
pub const SCHEMA: u64 = 1;

/// Rules of one recipe; a published mixed-precision recipe has some hundred.
const MAX_RULES: usize = 4096;

const TOP_KEYS: &[&str] = &[
    "schema",
    "name",
    "description",
    "whole_groups",
    "target",
    "quantize",
    "graphs",
    "vision",
    "towers",
];

/// Keys of every section, for suggestions.
pub(super) const SECTIONS: &[(&str, &[&str])] = &[
    ("the top level", TOP_KEYS),
    ("[target]", Target::KEYS),
    ("[[quantize]]", Rule::KEYS),
    ("[graphs]", Graphs::KEYS),
    ("[vision]", Vision::KEYS),
    ("[towers]", Towers::KEYS),
];

/// A recipe.
///
/// Two recipes are equal when they say the same, whatever their texts look like.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    /// Its name; may be empty.
    pub name: String,
    /// What it is for; may be empty.
    pub description: String,
    /// Whether short last groups are refused, where a rule does not say.
    pub whole_groups: bool,
    /// What the artifact is compiled for.
    pub target: Target,
    /// The rules; the first that selects a weight decides it.
    pub rules: Vec<Rule>,
    /// Shapes of the static graphs.
    pub graphs: Graphs,
    /// The image encoder.
    pub vision: Vision,
    /// Parts of the model that the artifact holds.
    pub towers: Towers,
}

impl Recipe {
    /// A recipe without rules: every weight is kept.
    fn empty() -> Recipe {
        Recipe {
            name: String::new(),
            description: String::new(),
            whole_groups: false,
            target: Target::default(),
            rules: Vec::new(),
            graphs: Graphs::default(),
            vision: Vision::default(),
            towers: Towers::default(),
        }
    }

    /// Reads a recipe.
    ///
    /// # Errors
    /// [`FailureKind::Usage`] with every problem of the text: syntax, unknown keys, wrong types and values, patterns
    /// that do not compile, encodings without meaning, and what this version cannot do.
    pub fn parse(source: Arc<SourceText>) -> Result<Recipe> {
        let mut recipe = Recipe::empty();
        let mut reader = Reader::new(&source);
        if let Some(root) = reader.parse(&source.text) {
            let root = root.get_ref();
            recipe.read_schema(&mut reader, root);
            recipe.read(&mut reader, root);
            recipe.read_rules(&mut reader, root);
        }
        let mut problems = Problems::new();
        problems.extend(reader.finish());
        problems.finish(
            FailureKind::Usage,
            &format!("the recipe {} is not usable", source.name),
            recipe,
        )
    }

    fn read_schema(&mut self, reader: &mut Reader<'_>, root: &DeTable<'_>) {
        let help = ["schema = 1 is the version of the recipe language that this program reads"];
        let Some(value) = root.get("schema") else {
            reader.problem(0..0, "`schema` is missing", "add it as the first line", help);
            return;
        };
        match value.get_ref() {
            DeValue::Integer(n) if n.as_str() == "1" => {}
            DeValue::Integer(n) => {
                reader.problem(value.span(), format!("schema {n} is not known"), "", help);
            }
            _ => reader.wrong_type("schema", value, "a whole number"),
        }
    }

    /// Takes over everything but the rules.
    fn read(&mut self, reader: &mut Reader<'_>, root: &DeTable<'_>) {
        let top = Section { title: "the top level", table: root, keys: TOP_KEYS };
        reader.unknown_keys(&top, SECTIONS);
        for (key, slot) in [("name", &mut self.name), ("description", &mut self.description)] {
            if let Some(text) = reader.text(&top, key) {
                *slot = text.into_inner();
            }
        }
        if let Some(flag) = reader.flag(&top, "whole_groups") {
            self.whole_groups = flag;
        }
        if let Some(table) = reader.table(root, "target") {
            let section = Section { title: "[target]", table, keys: Target::KEYS };
            reader.unknown_keys(&section, SECTIONS);
            self.target.read(reader, &section);
        }
        if let Some(table) = reader.table(root, "graphs") {
            let section = Section { title: "[graphs]", table, keys: Graphs::KEYS };
            reader.unknown_keys(&section, SECTIONS);
            self.graphs.read(reader, &section);
        }
        if let Some(table) = reader.table(root, "vision") {
            let section = Section { title: "[vision]", table, keys: Vision::KEYS };
            reader.unknown_keys(&section, SECTIONS);
            self.vision.read(reader, &section);
        }
        if let Some(table) = reader.table(root, "towers") {
            let section = Section { title: "[towers]", table, keys: Towers::KEYS };
            reader.unknown_keys(&section, SECTIONS);
            self.towers.read(reader, &section);
        }
    }

    fn read_rules(&mut self, reader: &mut Reader<'_>, root: &DeTable<'_>) {
        let Some(value) = root.get("quantize") else { return };
        let rules: &[Spanned<DeValue<'_>>] = match value.get_ref() {
            DeValue::Array(rules) if rules.len() <= MAX_RULES => rules,
            DeValue::Array(rules) => {
                let message = format!("{} rules; {MAX_RULES} are allowed", rules.len());
                reader.problem(value.span(), message, "", ["one rule may list many patterns"]);
                return;
            }
            DeValue::Table(_) => {
                reader.problem(
                    value.span(),
                    "rules are a list",
                    "one table",
                    ["write [[quantize]] with two brackets; rules are tried in order"],
                );
                return;
            }
            _ => {
                reader.wrong_type("quantize", value, "a list of rules; write [[quantize]]");
                return;
            }
        };
        for value in rules {
            match value.get_ref() {
                DeValue::Table(table) => {
                    self.rules.extend(Rule::read(reader, table, value.span(), SECTIONS));
                }
                _ => reader.wrong_type("quantize", value, "a table"),
            }
        }
    }

    /// Changes one setting as `KEY=VALUE`, the key with its section: `graphs.batch_size=4`,
    /// `target.profile=rbln-ca25`, `whole_groups=true`. A value that is no TOML is taken as a string.
    ///
    /// # Errors
    /// [`FailureKind::Usage`] with the problems, shown in the text as it was typed; the recipe is then unchanged.
    pub fn set(&mut self, assignment: &str) -> Result<()> {
        self.set_all(&[assignment])
    }

    /// Changes several settings; later ones win.
    ///
    /// # Errors
    /// As [`Recipe::set`], with the problems of all assignments; the recipe is then unchanged.
    pub fn set_all<S: AsRef<str>>(&mut self, assignments: &[S]) -> Result<()> {
        let mut changed = self.clone();
        let mut problems = Problems::new();
        for assignment in assignments {
            problems.extend(changed.set_one(assignment.as_ref()));
        }
        *self = problems.finish(FailureKind::Usage, "--set cannot be applied", changed)?;
        Ok(())
    }

    fn set_one(&mut self, text: &str) -> Vec<Diagnostic> {
        let source = Arc::new(SourceText { name: "--set".to_owned(), text: text.to_owned() });
        let mut reader = Reader::new(&source);
        let example = ["e.g. --set graphs.batch_size=4"];
        let Some((key, value)) = text.split_once('=') else {
            reader.problem(0..text.len(), "--set takes KEY=VALUE", "no `=`", example);
            return reader.finish();
        };
        let key = key.trim();
        if key == "quantize" || key.starts_with("quantize.") || key == "schema" {
            reader.problem(
                0..key.len(),
                format!("`{key}` cannot be set from the command line"),
                "",
                ["rules are ordered; write them into a recipe file"],
            );
            return reader.finish();
        }
        // A bare word is a string; its place stays that of the word.
        let bare = DeTable::parse(text).is_err()
            && !key.is_empty()
            && !value.trim().is_empty()
            && !value.trim_start().starts_with(['"', '\'', '[', '{']);
        if bare {
            let path = format!("{key}=0");
            if let Ok(mut root) = DeTable::parse(&path) {
                let start = key_end(text) + (value.len() - value.trim_start().len());
                let word = DeValue::String(value.trim().into());
                let word = Spanned::new(start..start + value.trim().len(), word);
                if put_leaf(root.get_mut(), &word) {
                    self.read(&mut reader, root.get_ref());
                    return reader.finish();
                }
            }
        }
        if let Some(root) = reader.parse(&source.text) {
            self.read(&mut reader, root.get_ref());
        }
        reader.finish()
    }

    /// The recipe as text in one canonical form: every default that does not depend on the model is spelled out, keys
    /// and sections have one order. It parses back to an equal recipe.
    pub fn to_toml(&self) -> String {
        let mut out = format!("schema = {SCHEMA}\n");
        // Writing to a String cannot fail.
        let _ = writeln!(out, "name = {}", quoted(&self.name));
        if !self.description.is_empty() {
            let _ = writeln!(out, "description = {}", quoted(&self.description));
        }
        let _ = writeln!(out, "whole_groups = {}", self.whole_groups);
        out.push_str(&self.target.toml());
        for rule in &self.rules {
            out.push_str(&rule.toml());
        }
        out.push_str(&self.graphs.toml());
        out.push_str(&self.vision.toml());
        out.push_str(&self.towers.toml());
        out
    }

    /// Sha256 of [`Recipe::to_toml`], in hex.
    pub fn digest(&self) -> String {
        let hash = crate::hash::sha256([self.to_toml().as_bytes()]);
        hash.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Reads a recipe file's bytes.
    ///
    /// # Errors
    /// As [`Recipe::parse`]; text that is not UTF-8.
    pub fn from_bytes(name: &str, bytes: Vec<u8>) -> Result<Recipe> {
        match String::from_utf8(bytes) {
            Ok(text) => Recipe::parse(Arc::new(SourceText { name: name.to_owned(), text })),
            Err(error) => {
                let at = error.utf8_error().valid_up_to();
                let problem = Diagnostic::new(AREA, format!("byte {at} is not UTF-8"))
                    .help("TOML files are UTF-8; save the file in that encoding");
                let headline = format!("the recipe {name} is not usable");
                Err(Failure::one(FailureKind::Usage, headline, problem))
            }
        }
    }
}

/// Bytes up to and with the first `=`.
fn key_end(text: &str) -> usize {
    text.find('=').map_or(text.len(), |i| i + 1)
}

/// Puts a value in place of the single leaf of nested tables of one entry each.
fn put_leaf<'t>(table: &mut DeTable<'t>, leaf: &Spanned<DeValue<'t>>) -> bool {
    match table.iter_mut().next() {
        Some((_, value)) => match value.get_mut() {
            DeValue::Table(inner) => put_leaf(inner, leaf),
            _ => {
                *value = leaf.clone();
                true
            }
        },
        None => false,
    }
}
