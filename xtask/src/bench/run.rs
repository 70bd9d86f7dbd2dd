//! `bench run`: how fast the reference executor answers and scores.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use clap::Args;
use serde_json::json;

use crate::{Result, build};

/// How to run `bench run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Folder of the model [default: target/models/smollm2, which `cargo xtask fetch smollm2` makes]
    #[arg(long)]
    model: Option<PathBuf>,
    /// Recipe of the conversion
    #[arg(long, default_value = "int8-g128")]
    recipe: String,
    /// Worker threads [default: radpack's]
    #[arg(long)]
    threads: Option<u32>,
    /// Tokens of the answer
    #[arg(long, default_value_t = 64)]
    tokens: u32,
    /// The radpack binary [default: build target/release/radpack]
    #[arg(long)]
    bin: Option<PathBuf>,
    /// One JSON document instead of a table
    #[arg(long)]
    json: bool,
}

/// Bytes of text that are scored: about 1,500 tokens, three windows.
const SCORED: usize = 6000;

/// Converts the model, lets it answer and score, and prints the rates that radpack itself tells.
pub fn run(args: &RunArgs) -> Result<()> {
    let bin = build::radpack(args.bin.clone())?;
    let model = args.model.clone().unwrap_or_else(|| testkit::target().join("models/smollm2"));
    if !model.join("config.json").is_file() {
        return Err(format!(
            "{}: no model; `cargo xtask fetch smollm2` brings one",
            model.display()
        ));
    }
    let dir = testkit::target().join("bench-run");
    fs::create_dir_all(&dir).map_err(testkit::at(&dir))?;
    let (file, corpus) = (dir.join("model.rad"), dir.join("corpus.jsonl"));
    let text = testkit::root().join("README.md");
    let text = fs::read_to_string(&text).map_err(testkit::at(&text))?;
    let text: String = text.chars().take(SCORED).collect();
    let line = format!("{}\n", json!({ "source": "readme", "text": text }));
    fs::write(&corpus, line).map_err(testkit::at(&corpus))?;
    let radpack = |words: &[&str]| {
        let mut command = Command::new(&bin);
        command.args(words);
        if let Some(threads) = args.threads {
            command.args(["--threads", &threads.to_string()]);
        }
        command
    };
    eprintln!("converting");
    let mut convert = radpack(&["convert", "--recipe", &args.recipe]);
    build::output(convert.arg(&model).arg("-o").arg(&file))?;
    eprintln!("answering");
    let words =
        ["run", "--prompt", "Tell me about the sea.", "--max-tokens", &args.tokens.to_string()];
    let said = stderr(radpack(&words).arg(&file))?;
    let answer = rate(&said, "answer ").ok_or_else(|| format!("no rate in {said:?}"))?;
    let prompt = rate(&said, "prompt ").ok_or_else(|| format!("no rate in {said:?}"))?;
    eprintln!("scoring");
    let mut eval = radpack(&["eval", "--corpus"]);
    let said = stderr(eval.arg(&corpus).arg("--reference").arg(&file).arg(&file))?;
    let scored = rate(&said, "scored ").ok_or_else(|| format!("no rate in {said:?}"))?;
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    if args.json {
        let document = json!({
            "model": model.display().to_string(), "recipe": args.recipe, "cpus": cpus, "threads": args.threads,
            "prompt_tokens_per_s": prompt, "answer_tokens_per_s": answer, "scored_tokens_per_s": scored,
        });
        println!("{document:#}");
        return Ok(());
    }
    println!("prompt    {prompt:7.1} tokens/s, the first token included");
    println!("answer    {answer:7.1} tokens/s");
    println!("score     {scored:7.1} tokens/s in windows of 512, file and reference together");
    println!("machine   {cpus} processors");
    Ok(())
}

/// What a program says on stderr; a failing one is an error.
fn stderr(command: &mut Command) -> Result<String> {
    let out = command.output().map_err(|e| format!("{}: {e}", build::shown(command)))?;
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    if out.status.success() { Ok(said) } else { Err(format!("{}: {said}", build::shown(command))) }
}

/// The first `… tokens/s` behind a word.
fn rate(said: &str, word: &str) -> Option<f64> {
    let (_, rest) = said.split_once(word)?;
    let (before, _) = rest.split_once(" tokens/s")?;
    before.rsplit(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::rate;

    #[test]
    fn rates_are_read_off_what_radpack_says() {
        let said = "prompt    37 tokens, 61.5 tokens/s; answer 64 tokens, 12.3 tokens/s; ended by max_tokens\n";
        assert_eq!(rate(said, "prompt "), Some(61.5));
        assert_eq!(rate(said, "answer "), Some(12.3));
        assert_eq!(
            rate("scored    1,536 tokens in 10.0 s, 153.6 tokens/s\n", "scored "),
            Some(153.6)
        );
        assert_eq!(rate(said, "scored "), None);
    }
}
