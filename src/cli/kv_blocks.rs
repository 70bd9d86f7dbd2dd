//! `radpack set-kv-blocks`

use std::process::ExitCode;

use radpack::artifact::manifest::Manifest;
use radpack::artifact::{digests, patch};
use radpack::diag::{Diagnostic, Failure, FailureKind, Result, count};
use radpack::estimate::{self, Options};
use radpack::recipe::{Allocator, Profile};

use super::args::SetKvBlocks;
use super::documents::SetKvBlocksDocument;
use super::estimate::{Stored, options, stored};
use super::inspect::open;
use super::output::Output;

/// Checks the number against the limits and the target's memory, and sets it.
pub fn run(args: &SetKvBlocks, output: &Output) -> Result<ExitCode> {
    let options = options(args.memory_budget.as_deref(), args.workspace.as_deref(), None)?;
    let artifact = open(&args.file)?;
    let manifest = Manifest::of(&artifact)?;
    let found = stored(&artifact, manifest.as_ref())?;
    let fit = fitting(&found, options)?;
    let wanted = (args.blocks > 0).then_some(args.blocks);
    let sizes = &found.model.sizes;
    if let (Some(n), Some((fit, target))) = (wanted, &fit)
        && n > *fit
        && n <= sizes.full_blocks()
    {
        return Err(too_many(n, *fit, target, sizes.min_blocks()));
    }
    drop(artifact);
    let digest = patch::set_kv_blocks(&args.file, wanted)?;
    let document = SetKvBlocksDocument {
        schema: "radpack.set-kv-blocks",
        file: args.file.display().to_string(),
        blocks: wanted,
        before: found.blocks,
        block_tokens: sizes.block,
        min_blocks: sizes.min_blocks(),
        full_blocks: sizes.full_blocks(),
        fit_blocks: fit.as_ref().map(|(n, _)| *n),
        target: found.target.clone(),
        digest: digests::hex(&digest),
    };
    if output.json() {
        output.document(&document)?;
    } else {
        output.text(&text(&document))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Blocks that fit the target that the file was compiled for; `None` for a file that is for no target.
fn fitting(found: &Stored, options: Options) -> Result<Option<(u64, String)>> {
    let Some(name) = &found.target else { return Ok(None) };
    let profile = Profile::find(name)?;
    // vLLM's pages are its own, laid over groups of layers: what is set here is the cache of the file's programs.
    let allocator = match profile.allocator {
        Allocator::Vllm => Allocator::Exact,
        other => other,
    };
    let budget = options.budget.or(found.budget);
    let options = Options { budget, allocator: Some(allocator), ..options };
    let estimate = estimate::estimate(&found.model, &profile, options)?;
    Ok(Some((estimate.blocks, name.clone())))
}

fn too_many(wanted: u64, fit: u64, target: &str, min: u64) -> Failure {
    let problem = Diagnostic::new(
        "kv-blocks",
        format!(
            "{} cache blocks; the memory of {target} has room for {}",
            count(wanted),
            count(fit)
        ),
    );
    let problem = match fit >= min {
        true => problem.help(format!("{} to {} blocks work", count(min), count(fit))),
        false => problem.help(format!("not even the {} that are needed fit", count(min))),
    };
    let problem = problem
        .help("radpack estimate-kv prints the sum; --workspace and --memory-budget change what it assumes");
    Failure::one(FailureKind::Refused, "the number of cache blocks cannot be set", problem)
}

fn text(d: &SetKvBlocksDocument) -> String {
    let said = |n: Option<u64>| {
        n.map_or("left to the engine".to_owned(), |n| format!("{} blocks", count(n)))
    };
    let tokens = d.blocks.map(|n| n.saturating_mul(d.block_tokens));
    let tokens = tokens.map(|t| format!(" · {} tokens", count(t))).unwrap_or_default();
    let fit = match (d.fit_blocks, &d.target) {
        (Some(n), Some(target)) => format!(" · {} fit {target}", count(n)),
        _ => " · no target, so no memory to compare with".to_owned(),
    };
    format!(
        "cache     {}{tokens} (before: {})\nlimits    {} minimum, {} full{fit}\ndigest    sha256:{}\n",
        said(d.blocks),
        said(d.before),
        count(d.min_blocks),
        count(d.full_blocks),
        d.digest
    )
}
