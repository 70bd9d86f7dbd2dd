//! `radpack estimate-kv`

mod artifact;
mod sweep;
mod text;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use radpack::artifact::manifest::Manifest;
use radpack::checkpoint::Extent;
use radpack::diag::{Diagnostic, Failure, FailureKind, Result, list};
use radpack::estimate::{self, Estimate, MemoryModel, Options};
use radpack::model::ModelSpec;
use radpack::pipeline::{Fit, FitAxis, Settings, Subject};
use radpack::recipe::{Allocator, MemoryBudget, PROFILES, Profile, Recipe};

use super::args::{AllocatorChoice, EstimateKv, FitChoice};
use super::documents::{EstimateDocument, FitDocument};
use super::inspect::open;
use super::output::Output;
use super::request;

pub use artifact::{Stored, read as stored};

/// What was asked and what the answer is.
struct Answer {
    model: MemoryModel,
    spec: Option<ModelSpec>,
    recipe: String,
    estimate: Estimate,
    fit: Option<Fit>,
    stored_blocks: Option<u64>,
}

/// Prints the sum; a model that does not fit is refused after it.
pub fn run(args: &EstimateKv, output: &Output) -> Result<ExitCode> {
    let options = options(
        args.memory_budget.as_deref(),
        args.workspace.as_deref(),
        args.allocator.map(AllocatorChoice::allocator),
    )?;
    let file = Path::new(&args.source);
    let finished = file.is_file() && file.extension().is_some_and(|e| e == "rad");
    let answer = if finished {
        of_artifact(args, file, options)?
    } else {
        let (subject, recipe) = of_source(args)?;
        if !args.sweep.is_empty() {
            return sweep::run(args, &subject, &recipe, options, output);
        }
        of_plan(args, subject, recipe, options, output)?
    };
    show(args, answer, output)
}

/// The options of a policy.
///
/// # Errors
/// Texts that are no budget, or no bytes.
pub fn options(
    budget: Option<&str>,
    workspace: Option<&str>,
    allocator: Option<Allocator>,
) -> Result<Options> {
    let budget = budget.map(estimate::parse_budget).transpose()?;
    let workspace = match workspace.map(estimate::parse_budget).transpose()? {
        None => None,
        Some(MemoryBudget::Bytes(bytes)) => Some(bytes),
        Some(MemoryBudget::Fraction(_)) => {
            let problem = Diagnostic::new("estimate", "--workspace is bytes, not a fraction")
                .help("e.g. --workspace 64MiB");
            return Err(Failure::one(FailureKind::Usage, "no such workspace", problem));
        }
    };
    Ok(Options { budget, allocator, workspace })
}

fn show(args: &EstimateKv, answer: Answer, output: &Output) -> Result<ExitCode> {
    let Answer { model, spec, recipe, estimate, fit, stored_blocks } = answer;
    let layers = spec.as_ref().map(|s| estimate::layers(s, &model)).unwrap_or_default();
    if let Some(path) = &args.svg {
        let name = Path::new(&args.source).file_name().map(|n| n.to_string_lossy());
        let name = name.unwrap_or_else(|| args.source.as_str().into());
        let title = format!("{name} · {recipe} · {} × {}", estimate.devices.len(), estimate.target);
        write_whole(path, estimate::svg(&estimate, &title).as_bytes())?;
    }
    let fits = estimate.misfits.is_empty();
    let (target, misfits) = (estimate.target.clone(), estimate.misfits.clone());
    if !output.json() {
        let mut text = fit.as_ref().map(text::fit).unwrap_or_default();
        text.push_str(&text::sum(&estimate));
        if let Some(set) = stored_blocks {
            text.push_str(&text::set(&estimate, set));
        }
        if args.layers {
            text.push('\n');
            text.push_str(&text::layers(&layers, &estimate));
        }
        output.text(&text)?;
    } else if fits {
        output.document(&EstimateDocument {
            schema: "radpack.estimate",
            source: args.source.clone(),
            recipe,
            estimate,
            stored_blocks,
            fit: fit.as_ref().map(FitDocument::of),
            layers,
        })?;
    }
    if fits {
        return Ok(ExitCode::SUCCESS);
    }
    Err(Failure {
        kind: FailureKind::Refused,
        headline: format!("this model does not fit {target}"),
        problems: misfits,
        closing: None,
    })
}

/// The profile of a target that was named.
pub fn target(named: Option<&str>) -> Result<Profile> {
    let Some(name) = named else {
        let names: Vec<&str> = PROFILES.iter().map(|(name, _)| *name).collect();
        let problem = Diagnostic::new(
            "estimate",
            "neither the recipe nor --target says which device it is for",
        )
        .help(format!("--target {}", list(&names, usize::MAX)));
        return Err(Failure::one(FailureKind::Usage, "no target", problem));
    };
    Profile::find(name)
}

/// The source as far as an estimate needs it, and the recipe with every setting but those that are varied.
fn of_source(args: &EstimateKv) -> Result<(Subject, Recipe)> {
    let recipe = request::recipe(&args.recipe, &[])?;
    let settings = Settings {
        kv_dtype: args.kv_dtype.clone(),
        max_seq_len: args.max_seq_len.map(u64::from),
        batch_size: args.batch_size.map(u64::from),
        ..Settings::default()
    };
    let recipe = settings.apply(&recipe)?;
    target(recipe.target.profile.as_deref())?;
    let draft = args.draft_model.as_deref();
    let sources = request::sources(&args.source, draft, None, Extent::Configs)?;
    Ok((Subject::of(sources)?, recipe))
}

fn of_plan(
    args: &EstimateKv,
    subject: Subject,
    recipe: Recipe,
    options: Options,
    output: &Output,
) -> Result<Answer> {
    let axis = args.fit.map(|axis| match axis {
        FitChoice::Devices => FitAxis::Devices,
        FitChoice::Length => FitAxis::Length,
    });
    let fit = axis.map(|axis| subject.fit(&recipe, options, axis)).transpose()?;
    let recipe = fit.as_ref().map_or(recipe, |fit| fit.recipe.clone());
    let measured = subject.measure(&recipe, options)?;
    output.warnings(&measured.warnings);
    Ok(Answer {
        model: measured.model,
        spec: subject.spec().cloned(),
        recipe: recipe.name,
        estimate: measured.estimate,
        fit,
        stored_blocks: None,
    })
}

fn of_artifact(args: &EstimateKv, file: &Path, options: Options) -> Result<Answer> {
    let compiled_in = [
        ("--recipe", args.recipe.recipe.is_some()),
        ("--draft-model", args.draft_model.is_some()),
        ("--set", !args.recipe.sets.is_empty()),
        ("--devices", args.recipe.devices.is_some()),
        ("--kv-dtype", args.kv_dtype.is_some()),
        ("--max-seq-len", args.max_seq_len.is_some()),
        ("--batch-size", args.batch_size.is_some()),
        ("--fit", args.fit.is_some()),
        ("--sweep", !args.sweep.is_empty()),
    ];
    let said: Vec<&str> = compiled_in.iter().filter(|(_, is)| *is).map(|(name, _)| *name).collect();
    artifact::refuse_settings(file, &said)?;
    let artifact = open(file)?;
    let manifest = Manifest::of(&artifact)?;
    let stored = stored(&artifact, manifest.as_ref())?;
    let profile = target(args.recipe.target.as_deref().or(stored.target.as_deref()))?;
    let options = Options { budget: options.budget.or(stored.budget), ..options };
    let estimate = estimate::estimate(&stored.model, &profile, options)?;
    Ok(Answer {
        model: stored.model,
        spec: stored.spec,
        recipe: stored.recipe,
        estimate,
        fit: None,
        stored_blocks: stored.blocks,
    })
}

/// Writes a file that is there as a whole or not at all.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    use std::io::Write as _;
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let write = || {
        let mut file = std::fs::File::create(&partial)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&partial, path)
    };
    write().map_err(|e| {
        // What is left of it is of no use; that it could not be removed either changes nothing.
        let _ = std::fs::remove_file(&partial);
        Failure::io("write", path, &e)
    })
}
