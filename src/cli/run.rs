//! `radpack run`

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use radpack::artifact::Artifact;
use radpack::diag::{Diagnostic, Failure, FailureKind, Result, count, size};
use radpack::runtime::{self, Chat, Engine, Image, Picture, Tokenizer};
use serde_json::json;

use super::args::Run;
use super::confined;
use super::documents::{RunDocument, RunImageDocument};
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
    let content = match args.images.len() {
        0 => json!(args.prompt),
        images => {
            let mut parts = vec![json!({ "type": "image" }); images];
            parts.push(json!({ "type": "text", "text": args.prompt }));
            json!(parts)
        }
    };
    let messages = vec![json!({ "role": "user", "content": content })];
    Ok((confined::prompt(chat, messages)?, false))
}

/// Reads a picture's file.
fn picture(path: &Path) -> Result<Picture> {
    let bytes = || -> std::io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        File::open(path)?.take(runtime::MAX_FILE + 1).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = bytes().map_err(|e| Failure::io("read", path, &e))?;
    let named = |mut failure: Failure| {
        failure.headline = format!("{}: {}", path.display(), failure.headline);
        failure
    };
    if bytes.len() as u64 > runtime::MAX_FILE {
        let most = size(runtime::MAX_FILE);
        let problem =
            Diagnostic::new("image", format!("it is larger than {most}, the most that is read"))
                .help("make it smaller");
        let headline = "this picture cannot be used";
        return Err(named(Failure::one(FailureKind::Refused, headline, problem)));
    }
    Picture::decode(&bytes).map_err(named)
}

fn answer(args: &Run, artifact: &Artifact, output: &Output) -> Result<ExitCode> {
    let opened = runtime::open(artifact)?;
    let tokenizer = Tokenizer::read(artifact)?;
    let pictures: Vec<Picture> =
        args.images.iter().map(|path| picture(path)).collect::<Result<_>>()?;
    let images = opened.images(&pictures, args.image_tokens)?;
    let (text, special) = prompt(args, artifact)?;
    let tokens = match opened.spec.vision.as_ref().filter(|_| !images.is_empty()) {
        Some(vision) => {
            let counts: Vec<u64> = images.iter().map(|image| image.soft_tokens(vision)).collect();
            let model = (vision, &opened.spec.tokens);
            runtime::image_tokens(&tokenizer, &text, special, &counts, model)?
        }
        None => tokenizer.tokens(&text, special)?,
    };
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
    let engine = opened.engine(slots, request::memory())?;
    let mut engine = engine.with_precision(args.precision.precision());
    let shown = image_documents(args, &pictures, &images, &engine, &tokens)?;
    if !output.json() {
        for image in &shown {
            output.note(&format!(
                "image     {}, {} × {} pixels as {} × {} patches; {} tokens by {}",
                image.file,
                image.pixels[0],
                image.pixels[1],
                image.patches[0],
                image.patches[1],
                count(image.tokens),
                image.programs.join(", ")
            ));
        }
    }
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
    let said = engine.generate_each(0, &tokens, &images, args.max_tokens, &stop, &mut each)?;
    let ended_by = match said.last() {
        Some(last) if stop.contains(last) => "stop",
        _ if said.len() == args.max_tokens => "max_tokens",
        _ => "max_seq_len",
    };
    let total = begun.elapsed();
    if output.json() {
        let kept = said.split_last().filter(|(last, _)| stop.contains(last)).map(|(_, rest)| rest);
        output.document(&RunDocument {
            schema: "radpack.run",
            file: args.file.display().to_string(),
            precision: args.precision.name(),
            prompt: text,
            prompt_tokens: tokens.len(),
            images: shown,
            text: tokenizer.text(kept.unwrap_or(&said))?,
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

/// What became of the pictures, and what they run.
fn image_documents(
    args: &Run,
    pictures: &[Picture],
    images: &[Image],
    engine: &Engine<'_>,
    tokens: &[u64],
) -> Result<Vec<RunImageDocument>> {
    if images.is_empty() {
        return Ok(Vec::new());
    }
    let plan = engine.plan(0, tokens)?;
    let calls = plan.chunks.iter().filter(|chunk| chunk.image);
    let mut out = Vec::new();
    for (((path, picture), image), call) in args.images.iter().zip(pictures).zip(images).zip(calls)
    {
        let encoder = engine.encoder(image)?;
        let patches = [0, 1].map(|axis| {
            image.positions.iter().map(|at| at[axis]).max().map_or(0, |last| last.saturating_add(1))
        });
        let (width, height) = picture.size();
        out.push(RunImageDocument {
            file: path.display().to_string(),
            pixels: [width, height],
            patches,
            tokens: call.valid,
            programs: vec![encoder.vision, encoder.project, call.program()],
        });
    }
    Ok(out)
}

fn rate(tokens: usize, time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if tokens == 0 || seconds <= 0.0 {
        return format!("{seconds:.1} s");
    }
    format!("{:.1} tokens/s", tokens as f64 / seconds)
}
