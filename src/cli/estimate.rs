//! `radpack estimate-kv`

use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use radpack::artifact::layout as names;
use radpack::diag::{Diagnostic, Failure, FailureKind, Result, SourceText, count, list, size};
use radpack::estimate::{self, Estimate, LayerRow, MemoryModel, Options};
use radpack::model::{self, ModelSpec};
use radpack::pipeline::{self, Request};
use radpack::recipe::{Allocator, MemoryBudget, PROFILES, Profile, Recipe};

use super::args::{AllocatorChoice, EstimateKv};
use super::documents::EstimateDocument;
use super::inspect::{manifest, open, whole_weights};
use super::output::Output;
use super::request;
use super::table::{Align, table};

/// What is estimated, whatever it came from.
struct Subject {
    model: MemoryModel,
    spec: Option<ModelSpec>,
    target: Option<String>,
    budget: Option<MemoryBudget>,
    recipe: String,
}

/// Prints the sum; a model that does not fit is refused after it.
pub fn run(args: &EstimateKv, output: &Output) -> Result<ExitCode> {
    let given = args.memory_budget.as_deref().map(estimate::parse_budget).transpose()?;
    let workspace = args.workspace.as_deref().map(estimate::parse_budget).transpose()?;
    let workspace = match workspace {
        None => None,
        Some(MemoryBudget::Bytes(bytes)) => Some(bytes),
        Some(MemoryBudget::Fraction(_)) => {
            let problem = Diagnostic::new("estimate", "--workspace is bytes, not a fraction")
                .help("e.g. --workspace 64MiB");
            return Err(Failure::one(FailureKind::Usage, "no such workspace", problem));
        }
    };
    let file = Path::new(&args.source);
    let artifact = file.is_file() && file.extension().is_some_and(|e| e == "rad");
    let subject = if artifact { of_artifact(args, file)? } else { of_plan(args, output)? };
    let target = args.target.clone().or(subject.target);
    let Some(target) = target else { return Err(no_target()) };
    let profile = Profile::find(&target)?;
    let options = Options {
        budget: given.or(subject.budget),
        allocator: args.allocator.map(|a| match a {
            AllocatorChoice::Rbln => Allocator::Rbln,
            AllocatorChoice::Radiance => Allocator::Radiance,
            AllocatorChoice::Vllm => Allocator::Vllm,
            AllocatorChoice::Exact => Allocator::Exact,
        }),
        workspace,
    };
    let found = estimate::estimate(&subject.model, &profile, options)?;
    let layers =
        subject.spec.as_ref().map(|s| estimate::layers(s, &subject.model)).unwrap_or_default();
    let fits = found.misfits.is_empty();
    if !output.json() {
        let mut text = sum_text(&found);
        if args.layers {
            text.push('\n');
            text.push_str(&layer_text(&layers, &found));
        }
        output.text(&text)?;
    } else if fits {
        output.document(&EstimateDocument {
            schema: "radpack.estimate",
            source: args.source.clone(),
            recipe: subject.recipe,
            estimate: found.clone(),
            layers,
        })?;
    }
    if fits {
        return Ok(ExitCode::SUCCESS);
    }
    Err(Failure {
        kind: FailureKind::Refused,
        headline: format!("this model does not fit {target}"),
        problems: found.misfits,
        closing: None,
    })
}

fn no_target() -> Failure {
    let names: Vec<&str> = PROFILES.iter().map(|(name, _)| *name).collect();
    let problem =
        Diagnostic::new("estimate", "neither the recipe nor --target says which device it is for")
            .help(format!("--target {}", list(&names, usize::MAX)));
    Failure::one(FailureKind::Usage, "no target", problem)
}

fn no_cache() -> Failure {
    let what = "it has no programs, so it keeps no keys and values: encoders, draft heads alone, weights-only files";
    let problem =
        Diagnostic::new("estimate", what).help("give a decoder that radpack has a family for");
    Failure::one(FailureKind::Refused, "there is no KV cache to estimate", problem)
}

fn of_plan(args: &EstimateKv, output: &Output) -> Result<Subject> {
    let mut sets = args.sets.clone();
    let text = |key: &str, value: &Option<String>| value.as_ref().map(|v| format!("{key}=\"{v}\""));
    sets.extend(text("target.profile", &args.target));
    sets.extend(text("graphs.kv_dtype", &args.kv_dtype));
    sets.extend(args.devices.map(|n| format!("target.devices={n}")));
    sets.extend(args.max_seq_len.map(|n| format!("graphs.max_seq_len={n}")));
    if let Some(n) = args.batch_size {
        sets.push(format!("graphs.batch_size={n}"));
        // Decoders larger than the batch would be refused; the engine picks among those that remain.
        let recipe = request::recipe(args.recipe.as_deref(), &args.sets)?;
        if let Some(list) = recipe.graphs.decoder_batch_sizes {
            let mut kept: Vec<u64> = list.into_iter().filter(|b| *b < u64::from(n)).collect();
            kept.push(u64::from(n));
            sets.push(format!("graphs.decoder_batch_sizes={kept:?}"));
        }
    }
    let recipe = request::recipe(args.recipe.as_deref(), &sets)?;
    let sources = request::sources(&args.source, args.draft_model.as_deref(), None)?;
    let request = Request { weights_only: false, tokenizer_required: false };
    let plan = pipeline::plan(sources, recipe, request)?;
    output.warnings(&plan.warnings);
    let compiled = plan.compiled.as_ref().ok_or_else(no_cache)?;
    Ok(Subject {
        model: MemoryModel::of_plan(&plan.placement, &compiled.programs, &compiled.sizes),
        spec: plan.spec.clone(),
        target: plan.recipe.target.profile.clone(),
        budget: plan.recipe.target.memory_budget,
        recipe: plan.recipe.name.clone(),
    })
}

fn of_artifact(args: &EstimateKv, file: &Path) -> Result<Subject> {
    let compiled_in = [
        ("--recipe", args.recipe.is_some()),
        ("--draft-model", args.draft_model.is_some()),
        ("--set", !args.sets.is_empty()),
        ("--devices", args.devices.is_some()),
        ("--kv-dtype", args.kv_dtype.is_some()),
        ("--max-seq-len", args.max_seq_len.is_some()),
        ("--batch-size", args.batch_size.is_some()),
    ];
    let said: Vec<&str> = compiled_in.iter().filter(|(_, is)| *is).map(|(name, _)| *name).collect();
    if !said.is_empty() {
        let rule = format!("{} is compiled into {}", list(&said, 8), file.display());
        let problem =
            Diagnostic::new("estimate", rule).help("give the source and the recipe instead");
        return Err(Failure::one(FailureKind::Usage, "a finished file cannot be changed", problem));
    }
    let artifact = open(file)?;
    let manifest = manifest(&artifact)?;
    let graphs = manifest.as_ref().and_then(|m| m.graphs.as_ref()).ok_or_else(no_cache)?;
    let broken = |why: String| {
        let problem = Diagnostic::new("graph", why);
        Failure::one(FailureKind::Invalid, "the programs cannot be read", problem)
    };
    let programs = radpack::runtime::read_programs(&artifact)
        .map_err(|e| broken(e.to_string()))?
        .ok_or_else(no_cache)?;
    let sizes = radpack::runtime::sizes(graphs)
        .ok_or_else(|| broken("the manifest names an unknown element type".to_owned()))?;
    let weights = whole_weights(&artifact)?;
    let recipe = Recipe::parse(Arc::new(SourceText {
        name: "the stored recipe".to_owned(),
        text: artifact.recipe().to_string(),
    }))?;
    // The configuration only adds the table of layers; a file without it has its sums all the same.
    let config = artifact.find(&format!("{}config.json", names::FILE_PREFIX));
    let spec = config
        .and_then(|entry| serde_json::from_slice(entry.plane(0)).ok())
        .and_then(|value| model::read_spec(&value, None).ok());
    Ok(Subject {
        model: MemoryModel::of_artifact(&weights, &graphs.vision_devices, &programs, &sizes),
        spec,
        target: graphs.target.clone(),
        budget: recipe.target.memory_budget,
        recipe: recipe.name,
    })
}

/// MiB with one decimal and thousands separators.
fn mib(bytes: i128) -> String {
    let tenths = (bytes.unsigned_abs() * 10 + (1 << 19)) >> 20;
    let whole = count(u64::try_from(tenths / 10).unwrap_or(u64::MAX));
    format!("{}{whole}.{}", if bytes < 0 { "-" } else { "" }, tenths % 10)
}

fn sum_text(e: &Estimate) -> String {
    let cell = |bytes: u64| mib(i128::from(bytes));
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut row = |what: String, bytes: String, how: String| rows.push(vec![what, bytes, how]);
    let whose = if e.capacity.chiplets > 1 { "a chiplet" } else { "a device" };
    row(format!("  memory of {whose}, {}", e.target), cell(e.capacity.memory), String::new());
    if e.capacity.reserve > 0 {
        row("  – system reserve".into(), cell(e.capacity.reserve), String::new());
    }
    let budget = match &e.capacity.said {
        Some(said) => format!("  = memory budget {said}"),
        None => "  = to use".to_owned(),
    };
    row(budget, cell(e.capacity.budget), format!("{} B", count(e.capacity.budget)));
    if let Some(device) = e.decisive() {
        for term in &device.terms {
            row(format!("  – {}", term.name), cell(term.bytes), term.how.clone());
        }
        row("  = for KV blocks".into(), mib(i128::from(device.left)), String::new());
    }
    row("  ÷ one block".into(), cell(e.block_bytes), e.block_how.clone());
    let decisive = e.decisive().map_or(0, |d| d.device);
    let title = match e.devices.len() {
        0 | 1 => "per device".to_owned(),
        n => format!("per device (tightest of {n}: device {decisive})"),
    };
    let mut out = table(&[&title, "MiB", ""], &[Align::Left, Align::Right, Align::Left], &rows);
    let same = |a: &estimate::DeviceSum, b: &estimate::DeviceSum| a.terms == b.terms;
    let runs: Vec<&[estimate::DeviceSum]> = e.devices.chunk_by(same).collect();
    // Writing to a String cannot fail.
    if runs.len() > 1 {
        let _ = writeln!(out, "\nleft for KV blocks");
        for run in runs {
            if let [first, .., last] | [first @ last] = run {
                let _ = writeln!(
                    out,
                    "  device {}–{}: {} MiB",
                    first.device,
                    last.device,
                    mib(i128::from(first.left))
                );
            }
        }
    }
    let kept = match &e.kept_blocks {
        Some(why) => format!(" · {} allocatable ({why})", count(e.allocatable_tokens)),
        None => String::new(),
    };
    let _ = writeln!(out, "\n{} blocks   {} tokens{kept}", count(e.blocks), count(e.tokens));
    let mut line = |label: &str, text: String| {
        let _ = writeln!(out, "{label:<12} {text}");
    };
    line(
        "contexts",
        format!(
            "{:.2} of {} tokens · limits: {} blocks minimum, {} full",
            e.contexts,
            count(e.max_seq_len),
            count(e.min_blocks),
            count(e.full_blocks)
        ),
    );
    line(
        "at a time",
        format!(
            "{} of {} sequences at full length · {} tokens each with all {}",
            e.batch_at_full_length,
            e.batch_size,
            count(e.length_at_full_batch),
            e.batch_size
        ),
    );
    match e.next_block {
        Some(bytes) => line(
            "next block",
            format!("needs {} MiB more · {} MiB are left over", cell(bytes), cell(e.left_over)),
        ),
        None => line("next block", "is of no use: all sequences fit in full".to_owned()),
    }
    if let Some(a) = &e.allowance {
        let times = if a.times == 1 { String::new() } else { format!("{} × ", a.times) };
        line(
            "assumed",
            format!(
                "{} {times}{} (--workspace): {} blocks for {}–{} MiB",
                a.name,
                size(a.bytes),
                count(e.blocks),
                count(a.least >> 20),
                count(a.most >> 20)
            ),
        );
    }
    if let Some(w) = &e.with_encoder {
        let with = w.blocks.map_or("no block".to_owned(), |n| format!("{} blocks", count(n)));
        line(
            "not counted",
            format!(
                "image encoder on device {}: {} MiB + {} MiB workspace",
                w.device,
                cell(w.weights),
                cell(w.workspace),
            ),
        );
        line("", format!("{with} with it · {} MiB lie outside the budget", cell(w.outside)));
    }
    for note in &e.notes {
        line("note", note.clone());
    }
    out
}

fn layer_text(layers: &[LayerRow], e: &Estimate) -> String {
    let rows = layers.iter().map(|l| {
        let kind = l.window.map_or("full".to_owned(), |w| format!("window {}", count(w)));
        let keeps = match (l.shares, l.token_bytes) {
            (Some(of), _) => format!("shares layer {of}"),
            (None, 0) => "–".to_owned(),
            (None, _) if l.keys_are_values => "own, v = raw k".to_owned(),
            (None, _) => "own".to_owned(),
        };
        let held = l.block_bytes.saturating_mul(e.blocks).saturating_add(l.window_bytes);
        vec![
            l.layer.to_string(),
            kind,
            keeps,
            format!("{} ({})", l.heads, l.device_heads),
            l.head_dim.to_string(),
            count(l.token_bytes),
            size(held),
        ]
    });
    use Align::{Left, Right};
    table(
        &["layer", "sees", "keeps", "heads (device)", "width", "bytes a token", "on a device"],
        &[Right, Left, Left, Right, Right, Right, Right],
        &rows.collect::<Vec<_>>(),
    )
}
