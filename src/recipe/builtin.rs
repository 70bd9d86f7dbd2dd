//! Recipes compiled into the program, and recipes from files.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use super::document::Recipe;
use super::read::AREA;
use crate::diag::{
    Diagnostic, Failure, FailureKind, Result, SourceText, list as listed, nearest, size,
};

/// The recipe that is used when none is asked for.
pub const DEFAULT: &str = "int8-g128";

/// Largest recipe file that is read.
const MAX_FILE: u64 = 1 << 20;

/// A recipe that is part of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Builtin {
    /// Name on the command line.
    pub name: &'static str,
    /// Its TOML text.
    pub text: &'static str,
}

macro_rules! builtins {
    ($($name:literal),* $(,)?) => {
        &[$(Builtin {
            name: $name,
            text: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/recipes/", $name, ".toml")),
        }),*]
    };
}

/// Every recipe that is part of the program.
pub const BUILTINS: &[Builtin] = builtins![
    "bf16",
    "int8-g128",
    "w8a16",
    "fp8-dynamic",
    "fp8-block",
    "nvfp4",
    "w4a16-g32",
    "mxfp4",
    "gemma-4/bf16",
    "gemma-4/rbln-w8a16-x16",
    "gemma-4/rbln-bucketing",
    "gemma-4/radiance-i8g",
    "gemma-4/nvfp4",
    "gemma-4/fp8-dynamic",
    "gemma-4/fp8-block",
    "gemma-4/w4a16-g32",
];

impl Builtin {
    /// What it is for: the comment that the text starts with, as one line.
    pub fn about(&self) -> String {
        let lines: Vec<&str> =
            self.text.lines().map_while(|line| line.strip_prefix('#')).map(str::trim).collect();
        lines.join(" ")
    }

    /// The recipe.
    ///
    /// # Errors
    /// As [`Recipe::parse`]; a test reads every one.
    pub fn recipe(&self) -> Result<Recipe> {
        Recipe::parse(Arc::new(SourceText {
            name: format!("{}.toml", self.name),
            text: self.text.into(),
        }))
    }
}

/// Every built-in recipe, the most general first.
pub fn list() -> &'static [Builtin] {
    BUILTINS
}

/// The built-in recipe of that name.
pub fn builtin(name: &str) -> Option<&'static Builtin> {
    BUILTINS.iter().find(|b| b.name == name)
}

/// The recipe that the command line names: a built-in one or a file, [`DEFAULT`] where it names none.
///
/// # Errors
/// [`FailureKind::Usage`] for a name that is neither (with the nearest built-in names) and for a text with problems,
/// [`FailureKind::Failed`] for a file that cannot be read.
pub fn load(name: Option<&str>) -> Result<Recipe> {
    let name = name.unwrap_or(DEFAULT);
    if let Some(builtin) = builtin(name) {
        return builtin.recipe();
    }
    let path = Path::new(name);
    if !path.exists() {
        return Err(unknown(name));
    }
    if path.is_dir() {
        let problem = Diagnostic::new(AREA, format!("{name} is a folder"))
            .help("--recipe takes a built-in name or a TOML file");
        return Err(Failure::one(FailureKind::Usage, "no recipe", problem));
    }
    Recipe::from_bytes(name, read_bytes(path)?)
}

/// The bytes of a recipe file.
fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut bytes))
        .map_err(|error| Failure::io("read the recipe", path, &error))?;
    if bytes.len() as u64 > MAX_FILE {
        let message = format!("{} is larger than {}", path.display(), size(MAX_FILE));
        let problem = Diagnostic::new(AREA, message)
            .help("recipes are short texts; is this the file you meant?");
        return Err(Failure::one(FailureKind::Usage, "no recipe", problem));
    }
    Ok(bytes)
}

/// The text of a recipe file.
///
/// # Errors
/// A file that cannot be read, is too large, or is not UTF-8.
pub(super) fn read_file(path: &Path) -> Result<String> {
    String::from_utf8(read_bytes(path)?).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let problem = Diagnostic::new(AREA, format!("byte {at} is not UTF-8"));
        let headline = format!("the recipe {} is not usable", path.display());
        Failure::one(FailureKind::Usage, headline, problem)
    })
}

fn unknown(name: &str) -> Failure {
    let names: Vec<&str> = BUILTINS.iter().map(|b| b.name).collect();
    let mut problem =
        Diagnostic::new(AREA, format!("\"{name}\" is neither a built-in recipe nor a file"));
    let stem = name.strip_suffix(".toml").unwrap_or(name);
    let mut near: Vec<&str> =
        names.iter().copied().filter(|n| n.rsplit('/').next() == Some(stem)).collect();
    if near.is_empty() {
        near = nearest(stem, names.iter().copied());
    }
    if !near.is_empty() {
        problem = problem.help(format!("did you mean {}?", listed(&near, 3)));
    }
    if super::find(name).is_some() {
        problem = problem.help(format!("{name} is an encoding; a rule gives it to weights"));
    }
    let problem = problem.help(format!("built-in recipes: {}", listed(&names, usize::MAX)));
    Failure::one(FailureKind::Usage, "no such recipe", problem)
}
