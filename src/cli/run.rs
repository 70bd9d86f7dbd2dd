//! `radpack run`

use std::process::ExitCode;
use std::time::{Duration, Instant};

use radpack::artifact::Artifact;
use radpack::diag::{Diagnostic, Failure, FailureKind, Result, count};
use radpack::runtime::{self, Chat, Tokenizer};
use serde_json::json;

use super::args::Run;
use super::documents::RunDocument;
use super::inspect::open;
use super::output::Output;
use super::request;

/// Answers, token by token.
pub fn run(args: &Run, output: &Output) -> Result<ExitCode> {
    let artifact = open(&args.file)?;
    let pool = request::pool(request::threads_of(args.threads))?;
    pool.install(|| answer(args, &artifact, output))
}

/// The prompt's text, and whether the tokenizer adds its own tokens around it.
fn prompt(args: &Run, artifact: &Artifact) -> Result<(String, bool)> {
    if args.raw {
        return Ok((args.prompt.clone(), true));
    }
    let Some(chat) = Chat::read(artifact)? else {
        let problem = Diagnostic::new("run", "the file carries no chat template")
            .help("--raw continues the text as it is");
        return Err(Failure::one(FailureKind::Refused, "there is no prompt", problem));
    };
    let message = json!({ "role": "user", "content": args.prompt });
    Ok((chat.prompt(&[message])?, false))
}

fn answer(args: &Run, artifact: &Artifact, output: &Output) -> Result<ExitCode> {
    let opened = runtime::open(artifact)?;
    let tokenizer = Tokenizer::read(artifact)?;
    let (text, special) = prompt(args, artifact)?;
    let tokens = tokenizer.tokens(&text, special)?;
    let (given, most) = (tokens.len() as u64, opened.sizes.max_seq_len);
    if given == 0 || given > most {
        let problem = Diagnostic::new(
            "run",
            format!(
                "the prompt has {} tokens, the programs take 1 to {}",
                count(given),
                count(most)
            ),
        )
        .help("a recipe with a larger [graphs] max_seq_len makes programs for longer prompts");
        return Err(Failure::one(FailureKind::Refused, "this prompt cannot be run", problem));
    }
    let stop = runtime::stop_tokens(artifact)?;
    let slots = given.saturating_add(args.max_tokens as u64).min(most);
    let mut engine = opened.engine(slots, request::memory())?;
    let begun = Instant::now();
    let mut first: Option<Duration> = None;
    let mut writing = tokenizer.write();
    let mut each = |token: u64| -> Result<bool> {
        first.get_or_insert(begun.elapsed());
        if !output.json() && !stop.contains(&token) {
            output.text(&writing.push(token)?)?;
        }
        Ok(true)
    };
    let said = engine.generate_each(0, &tokens, &[], args.max_tokens, &stop, &mut each)?;
    let ended_by = match said.last() {
        Some(last) if stop.contains(last) => "stop",
        _ if said.len() == args.max_tokens => "max_tokens",
        _ => "max_seq_len",
    };
    let total = begun.elapsed();
    if output.json() {
        let shown = said.split_last().filter(|(last, _)| stop.contains(last)).map(|(_, rest)| rest);
        output.document(&RunDocument {
            schema: "radpack.run",
            file: args.file.display().to_string(),
            prompt: text,
            prompt_tokens: tokens.len(),
            text: tokenizer.text(shown.unwrap_or(&said))?,
            tokens: said,
            ended_by,
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    output.text(&writing.finish()?)?;
    output.text("\n")?;
    let first = first.unwrap_or(total);
    output.note(&format!(
        "prompt    {} tokens, {}; answer {} tokens, {}; ended by {ended_by}",
        count(given),
        rate(tokens.len(), first),
        count(said.len() as u64),
        rate(said.len().saturating_sub(1), total.saturating_sub(first)),
    ));
    Ok(ExitCode::SUCCESS)
}

fn rate(tokens: usize, time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if tokens == 0 || seconds <= 0.0 {
        return format!("{seconds:.1} s");
    }
    format!("{:.1} tokens/s", tokens as f64 / seconds)
}
