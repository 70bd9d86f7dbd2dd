//! `radpack explain`

use std::fmt::Write;
use std::process::ExitCode;

use radpack::artifact::manifest::{KvSummary, Manifest};
use radpack::diag::{Diagnostic, Failure, FailureKind, Result, count, list, size};
use radpack::graph::{Request, Sizes, plan_request};
use radpack::runtime;

use super::args::Explain;
use super::documents::{CallDocument, DecodeDocument, ExplainDocument};
use super::graphs;
use super::inspect::open;
use super::output::Output;
use super::table::{Align, table};

/// Says what a request runs.
pub fn run(args: &Explain, output: &Output) -> Result<ExitCode> {
    let artifact = open(&args.file)?;
    let manifest = Manifest::of(&artifact)?;
    let summary = graphs::summary(manifest.as_ref())?;
    let sizes = runtime::sizes(summary).ok_or_else(|| {
        let problem =
            Diagnostic::new("graph", "the manifest names element types that are not known");
        Failure::one(FailureKind::Invalid, "the manifest cannot be read", problem)
    })?;
    let document = explain(args, &sizes, &summary.kv)?;
    if output.json() {
        output.document(&document)?;
    } else {
        output.text(&text(&document, &sizes))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn refuse(rule: String, help: String) -> Failure {
    let problem = Diagnostic::new("request", rule).help(help);
    Failure::one(FailureKind::Refused, "this request does not fit the programs", problem)
}

fn explain(args: &Explain, sizes: &Sizes, kv: &KvSummary) -> Result<ExplainDocument> {
    if args.batch > sizes.batch_size {
        return Err(refuse(
            format!("{} sequences; the programs serve {}", args.batch, sizes.batch_size),
            format!("--batch up to {}, or a recipe with a larger batch_size", sizes.batch_size),
        ));
    }
    let mut images = Vec::new();
    let mut at = 1u64;
    let mut image_programs = Vec::new();
    for tokens in &args.image_tokens {
        images.push(at..at.saturating_add(*tokens));
        at = at.saturating_add(*tokens).saturating_add(1);
        let Some(t) = sizes.soft_tokens.iter().rev().find(|t| *t >= tokens) else {
            let rule = match sizes.soft_tokens.first() {
                Some(most) => {
                    format!("an image of {tokens} tokens; the largest vision program makes {most}")
                }
                None => "the programs take text only".to_owned(),
            };
            return Err(refuse(rule, format!("vision programs: {}", list(&sizes.soft_tokens, 8))));
        };
        image_programs.extend([format!("vision_t{t}"), format!("project_t{t}")]);
    }
    if at > args.prompt.saturating_add(1) {
        return Err(refuse(
            format!("the images take {} tokens, the prompt has {}", at - 1, args.prompt),
            "--prompt counts the tokens of its images".to_owned(),
        ));
    }
    let request = Request { tokens: args.prompt, images, ..Request::default() };
    let plan = plan_request(sizes, &request)?;
    let fits = sizes.decoder_batch_sizes.iter().rev().find(|b| **b >= args.batch);
    let rows = fits.copied().unwrap_or(sizes.batch_size);
    let blocks = plan.blocks.len() as u64;
    Ok(ExplainDocument {
        schema: "radpack.explain",
        file: args.file.display().to_string(),
        batch: args.batch,
        prompt: args.prompt,
        image_programs,
        calls: plan
            .chunks
            .iter()
            .map(|c| CallDocument {
                program: c.program(),
                first: c.first,
                tokens: c.valid,
                rows: c.rows,
                slot: c.slot,
            })
            .collect(),
        decode: DecodeDocument {
            program: format!("decode_b{rows}"),
            rows,
            padding_rows: rows - args.batch,
        },
        unused_slots: plan.padding,
        padding_rows: plan.wasted_rows(),
        blocks,
        all_blocks: blocks.saturating_mul(args.batch),
        block_bytes: kv.block_bytes.saturating_mul(blocks).saturating_mul(args.batch),
        set_blocks: kv.blocks,
        left: sizes.max_seq_len.saturating_sub(plan.held.slots),
    })
}

fn text(d: &ExplainDocument, sizes: &Sizes) -> String {
    use Align::{Left, Right};
    let mut text = String::new();
    let mut line = |label: &str, value: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{label:<9} {value}");
    };
    let plural = if d.batch == 1 { "sequence" } else { "sequences" };
    line("request", format!("{} {plural} of {} tokens", d.batch, count(d.prompt)));
    if !d.image_programs.is_empty() {
        line("images", d.image_programs.join(" → "));
    }
    text.push('\n');
    let rows: Vec<Vec<String>> = d
        .calls
        .iter()
        .map(|c| {
            vec![
                c.program.clone(),
                format!("{} to {}", count(c.first), count(c.first + c.tokens - 1)),
                count(c.rows),
                count(c.rows - c.tokens),
                count(c.slot),
            ]
        })
        .collect();
    text.push_str(&table(
        &["call", "tokens", "rows", "padding", "cache slot"],
        &[Left, Left, Right, Right, Right],
        &rows,
    ));
    text.push('\n');
    let mut line = |label: &str, value: String| {
        let _ = writeln!(text, "{label:<9} {value}");
    };
    line(
        "prefill",
        format!("{} calls a sequence, {} rows of padding", d.calls.len(), count(d.padding_rows)),
    );
    line(
        "decode",
        format!("{} for every token, {} rows of padding", d.decode.program, d.decode.padding_rows),
    );
    if sizes.aligned {
        line("slots", format!("{} left empty before block borders", count(d.unused_slots)));
    }
    line(
        "cache",
        format!(
            "{} blocks of {} tokens a sequence, {} in all, {} on every device",
            count(d.blocks),
            count(sizes.block),
            count(d.all_blocks),
            size(d.block_bytes)
        ),
    );
    if let Some(set) = d.set_blocks {
        line(
            "set",
            match set.checked_sub(d.all_blocks) {
                Some(rest) => format!("{} of {} blocks are left over", count(rest), count(set)),
                None => format!("{} blocks, fewer than that: the engine has to queue", count(set)),
            },
        );
    }
    line("left", format!("{} tokens up to the longest sequence", count(d.left)));
    text
}
