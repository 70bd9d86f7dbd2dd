//! The command that makes an artifact again.

use crate::artifact::Artifact;
use crate::artifact::manifest::Manifest;
use crate::diag::Result;
use crate::model::Tower;
use crate::recipe::{self, Recipe};

/// How an artifact can be made again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rebuild {
    /// Commands that come before: the recipe taken out of the file, where no built-in one gives it.
    pub before: Vec<String>,
    /// Arguments of `radpack convert`, output and check aside.
    pub arguments: String,
    /// Whether the recipe is a built-in one.
    pub builtin: bool,
}

/// Files any of which makes a conversion take a folder without `--no-tokenizer`.
const TOKENIZERS: [&str; 4] = ["tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"];

/// Reads the command off what the file says of itself.
///
/// # Errors
/// A built-in recipe that does not parse.
pub(super) fn rebuild(artifact: &Artifact, manifest: &Manifest, file: &str) -> Result<Rebuild> {
    let source = match (&manifest.source.repo, &manifest.source.revision) {
        (Some(repo), Some(revision)) => format!("{repo}@{revision}"),
        (Some(repo), None) => repo.clone(),
        (None, _) => "SOURCE".to_owned(),
    };
    let mut words = vec![source];
    let has = |prefix: &str| manifest.source.files.iter().any(|f| f.path.starts_with(prefix));
    if has("draft/") {
        words.push("--draft-model DRAFT".to_owned());
    }
    if has("imatrix") {
        words.push("--imatrix IMATRIX".to_owned());
    }
    let mut before = Vec::new();
    let flags = builtin_flags(artifact, manifest)?;
    let builtin = flags.is_some();
    match flags {
        Some(flags) => words.extend(flags),
        None => {
            before.push(format!("radpack inspect {file} --recipe > recipe.toml"));
            words.push("--recipe recipe.toml".to_owned());
        }
    }
    if manifest.model.family.is_none() {
        words.push("--weights-only".to_owned());
    }
    if !manifest.files.iter().any(|f| TOKENIZERS.contains(&f.path.as_str())) {
        words.push("--no-tokenizer".to_owned());
    }
    Ok(Rebuild { before, arguments: words.join(" "), builtin })
}

/// The flags that make the stored recipe of the built-in one of its name; `None` when none do.
fn builtin_flags(artifact: &Artifact, manifest: &Manifest) -> Result<Option<Vec<String>>> {
    let Some(builtin) = recipe::builtin(&manifest.recipe.name) else { return Ok(None) };
    let stored =
        Recipe::from_bytes("the artifact's recipe", artifact.recipe().to_string().into_bytes());
    let Ok(stored) = stored else { return Ok(None) };
    let mut built = builtin.recipe()?;
    let mut flags = vec![format!("--recipe {}", manifest.recipe.name)];
    if stored.target.devices != built.target.devices {
        built.target.devices = stored.target.devices;
        flags.push(format!("--devices {}", stored.target.devices));
    }
    if stored.target.profile != built.target.profile
        && let Some(profile) = &stored.target.profile
    {
        built.target.profile = Some(profile.clone());
        flags.push(format!("--target {profile}"));
    }
    let others = [Tower::Vision, Tower::Audio, Tower::Projector];
    if others.iter().all(|t| built.towers.holds(*t) && !stored.towers.holds(*t)) {
        built.set_all(&["towers.vision=false", "towers.audio=false", "towers.projector=false"])?;
        flags.push("--text-only".to_owned());
    }
    Ok((built.to_toml() == stored.to_toml()).then_some(flags))
}
