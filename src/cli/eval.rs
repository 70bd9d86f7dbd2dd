//! `radpack eval`

use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use radpack::artifact::layout as names;
use radpack::checkpoint::Extent;
use radpack::diag::{Failure, FailureKind, Result, count};
use radpack::pipeline::{self, Plan, Sources};
use radpack::recipe::Recipe;
use radpack::runtime::{
    self, Engine, Evaluation, Memory, Placed, Score, SourceWeights, Tokenizer, Window,
};

use super::args::Eval;
use super::documents::{EvalDocument, ScoreDocument};
use super::inspect::open;
use super::output::Output;
use super::request;
use super::table::{Align, table};

/// Measures and prints.
pub fn run(args: &Eval, output: &Output) -> Result<ExitCode> {
    let corpus = std::fs::read(&args.corpus).map_err(|e| Failure::io("read", &args.corpus, &e))?;
    let documents = runtime::read_corpus(&corpus)?;
    let artifact = open(&args.file)?;
    let opened = runtime::open(&artifact)?;
    let tokenizer = Tokenizer::read(&artifact)?;
    let windows = runtime::windows(&documents, &tokenizer, args.window as usize)?;
    let pool = request::pool(request::threads_of(args.threads))?;
    let (slots, memory) = (u64::from(args.window), request::memory() / 2);
    let begun = Instant::now();
    let evaluation = pool.install(|| {
        let precision = args.precision.precision();
        let mut model = opened.engine(slots, memory)?.with_precision(precision);
        if Path::new(&args.reference).extension().is_some_and(|e| e == "rad") {
            let artifact = open(Path::new(&args.reference))?;
            let mut reference = runtime::open(&artifact)?.engine(slots, memory)?;
            return measure(&mut reference, &mut model, &windows);
        }
        let plan = plan(&args.reference)?;
        let mut reference = engine(&plan, slots, memory)?;
        measure(&mut reference, &mut model, &windows)
    })?;
    if output.json() {
        let sources = evaluation.sources.iter();
        output.document(&EvalDocument {
            schema: "radpack.eval",
            file: args.file.display().to_string(),
            digest: artifact.meta_text(names::DIGEST_KEY).map(|t| t.to_string()),
            reference: args.reference.clone(),
            precision: args.precision.name(),
            window: args.window,
            overall: ScoreDocument::of(&evaluation.overall),
            sources: sources.map(|(name, s)| (name.clone(), ScoreDocument::of(s))).collect(),
        })?;
    } else {
        output.text(&report(&evaluation))?;
        let tokens: u64 = windows.iter().map(|w| w.tokens.len() as u64).sum();
        let seconds = begun.elapsed().as_secs_f64();
        output.note(&format!(
            "scored    {} tokens in {seconds:.1} s, {:.1} tokens/s",
            count(tokens),
            tokens as f64 / seconds.max(1e-9)
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// Nothing is quantized; a prefill call fits a block of the cache.
const REFERENCE: &str = "schema = 1\n[graphs]\nprefill_chunk_size = 64\nkv_partition_len = 64\n";

/// The checkpoint with nothing quantized.
fn plan(source: &str) -> Result<Plan> {
    let recipe = Recipe::from_bytes("the reference's recipe", REFERENCE.into())?;
    let sources = Sources::from(request::source(source, Extent::Everything)?);
    let request = pipeline::Request { weights_only: false, tokenizer_required: false };
    pipeline::plan(sources, recipe, request)
}

fn engine(plan: &Plan, slots: u64, memory: u64) -> Result<Engine<'_>> {
    let (Some(compiled), Some(spec)) = (&plan.compiled, &plan.spec) else {
        let what = "a draft head answers nothing by itself";
        return Err(Failure::plain(FailureKind::Refused, what));
    };
    let mut weights = SourceWeights::new();
    for (_, weight) in plan.assignment.stored(&plan.table) {
        let source = plan.sources.source(weight).map_err(|e| {
            Failure::plain(FailureKind::Failed, format!("cannot read {}: {e}", weight.name))
        })?;
        weights.insert(weight.name.clone(), source);
    }
    let blocks = slots.div_ceil(compiled.sizes.block.max(1)).saturating_add(1);
    let memory = Memory { blocks: blocks.min(compiled.sizes.full_blocks()), weights: memory };
    let placed = Placed::new(weights, plan.placement.clone());
    Engine::new(compiled.programs.clone(), &compiled.sizes, spec, placed, memory)
}

fn measure(
    reference: &mut Engine<'_>,
    model: &mut Engine<'_>,
    windows: &[Window],
) -> Result<Evaluation> {
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let total = windows.iter().map(|w| w.tokens.len() as u64).sum();
    let style = ProgressStyle::with_template("  scoring {bar:30} {pos}/{len} tokens  eta {eta}");
    let bar = ProgressBar::with_draw_target(Some(total), target)
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let evaluation =
        runtime::evaluate(reference, model, windows, &mut |tokens| bar.inc(tokens as u64));
    bar.finish_and_clear();
    evaluation
}

fn report(evaluation: &Evaluation) -> String {
    let row = |name: &str, s: &Score| -> Vec<String> {
        vec![
            name.to_owned(),
            count(s.tokens as u64),
            format!("{:.5}", s.mean),
            format!("{:.5}", s.median),
            format!("{:.5}", s.p99),
            format!("{:.5}", s.max),
            format!("{:.2}%", s.agreement * 100.0),
            format!("{:.3}", s.reference_perplexity),
            format!("{:.4}", s.perplexity_ratio),
        ]
    };
    let mut rows: Vec<Vec<String>> = evaluation.sources.iter().map(|(n, s)| row(n, s)).collect();
    rows.push(row("all", &evaluation.overall));
    let heads =
        ["source", "tokens", "KL mean", "median", "p99", "max", "top-1", "ppl", "ppl ratio"];
    let aligns = heads.map(|h| if h == "source" { Align::Left } else { Align::Right });
    table(&heads, &aligns, &rows)
}
