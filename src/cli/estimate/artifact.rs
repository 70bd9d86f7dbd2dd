//! What a finished file holds: its devices' memory, its target, its recipe.

use std::path::Path;
use std::sync::Arc;

use radpack::artifact::manifest::Manifest;
use radpack::artifact::{Artifact, layout as names};
use radpack::diag::{Diagnostic, Failure, FailureKind, Result, SourceText};
use radpack::estimate::MemoryModel;
use radpack::model::{self, ModelSpec};
use radpack::recipe::{MemoryBudget, Recipe};

/// A file's part in an estimate.
pub struct Stored {
    /// What the devices hold.
    pub model: MemoryModel,
    /// What the model is; none for a file without its configuration.
    pub spec: Option<ModelSpec>,
    /// The target that it was compiled for.
    pub target: Option<String>,
    /// The budget that its recipe names.
    pub budget: Option<MemoryBudget>,
    /// Its recipe's name.
    pub recipe: String,
    /// Blocks that were set.
    pub blocks: Option<u64>,
}

/// Reads a file.
///
/// # Errors
/// A file without programs, or one whose parts do not go together.
pub fn read(artifact: &Artifact, manifest: Option<&Manifest>) -> Result<Stored> {
    let graphs = manifest.and_then(|m| m.graphs.as_ref()).ok_or_else(no_cache)?;
    let broken = |why: String| {
        let problem = Diagnostic::new("graph", why);
        Failure::one(FailureKind::Invalid, "the programs cannot be read", problem)
    };
    let programs = radpack::runtime::read_programs(artifact)
        .map_err(|e| broken(e.to_string()))?
        .ok_or_else(no_cache)?;
    let sizes = radpack::runtime::sizes(graphs)
        .ok_or_else(|| broken("the manifest names an unknown element type".to_owned()))?;
    let weights = radpack::artifact::Weights::open(artifact)?;
    let recipe = Recipe::parse(Arc::new(SourceText {
        name: "the stored recipe".to_owned(),
        text: artifact.recipe().to_string(),
    }))?;
    // The configuration only adds the table of layers; a file without it has its sums all the same.
    let config = artifact.find(&format!("{}config.json", names::FILE_PREFIX));
    let spec = config
        .and_then(|entry| serde_json::from_slice(entry.plane(0)).ok())
        .and_then(|value| model::read_spec(&value, None).ok());
    Ok(Stored {
        model: MemoryModel::of_artifact(&weights, &graphs.vision_devices, &programs, &sizes),
        spec,
        target: graphs.target.clone(),
        budget: recipe.target.memory_budget,
        recipe: recipe.name,
        blocks: graphs.kv.blocks,
    })
}

/// A file, as the path to it, is no source to estimate under other settings.
pub fn refuse_settings(file: &Path, said: &[&str]) -> Result<()> {
    if said.is_empty() {
        return Ok(());
    }
    let said = radpack::diag::list(said, 8);
    let rule = format!("{said} cannot change what is compiled into {}", file.display());
    let problem = Diagnostic::new("estimate", rule).help("give the source and the recipe instead");
    Err(Failure::one(FailureKind::Usage, "a finished file cannot be changed", problem))
}

fn no_cache() -> Failure {
    let what = "it has no programs, so it keeps no keys and values: encoders, draft heads alone, weights-only files";
    let problem =
        Diagnostic::new("estimate", what).help("give a decoder that radpack has a family for");
    Failure::one(FailureKind::Refused, "there is no KV cache to estimate", problem)
}
