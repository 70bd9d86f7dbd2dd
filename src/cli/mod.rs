//! The command line: typed arguments in, library calls, results on stdout, everything else on stderr.

mod args;
mod card;
mod completions;
mod confined;
mod convert;
mod devices;
mod diff;
mod documents;
mod estimate;
mod eval;
mod explain;
mod export;
mod extract;
mod graphs;
mod inspect;
mod kv_blocks;
mod mapped;
mod merge;
mod output;
mod progress;
mod recipes;
mod request;
mod run;
mod table;
mod validate;

use std::process::ExitCode;

use clap::Parser;
use radpack::diag::Result;

use args::{Cli, Command};
use output::Output;

/// Parses the command line, runs it, and returns the process's exit code.
pub fn run() -> ExitCode {
    if let Some(code) = confined::child() {
        return code;
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // clap prints help and version on stdout with code 0, usage errors on stderr with code 2. A closed pipe
            // leaves nobody to tell.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    mapped::explain_faults();
    let output = Output::new(json_wanted(&cli.command));
    match dispatch(&cli.command, &output) {
        Ok(code) => code,
        Err(failure) => output.failure(&failure),
    }
}

fn json_wanted(command: &Command) -> bool {
    match command {
        Command::Convert(a) => a.common.json,
        Command::Merge(a) => a.json,
        Command::Validate(a) => a.common.json,
        Command::Inspect(a) => a.json,
        Command::Diff(a) => a.json,
        Command::Export(a) => a.json,
        Command::Explain(a) => a.json,
        Command::Eval(a) => a.json,
        Command::Run(a) => a.json,
        Command::EstimateKv(a) => a.json,
        Command::SetKvBlocks(a) => a.json,
        Command::Recipes(a) => a.json,
        Command::Card(_) | Command::Extract(_) | Command::Completions(_) => false,
    }
}

fn dispatch(command: &Command, output: &Output) -> Result<ExitCode> {
    match command {
        Command::Convert(args) => convert::run(args, output),
        Command::Merge(args) => merge::run(args, output),
        Command::Validate(args) => validate::run(args, output),
        Command::Inspect(args) => inspect::run(args, output),
        Command::Diff(args) => diff::run(args, output),
        Command::Card(args) => card::run(args, output),
        Command::Extract(args) => extract::run(args, output),
        Command::Explain(args) => explain::run(args, output),
        Command::Export(args) => export::run(args, output),
        Command::Eval(args) => eval::run(args, output),
        Command::Run(args) => run::run(args, output),
        Command::EstimateKv(args) => estimate::run(args, output),
        Command::SetKvBlocks(args) => kv_blocks::run(args, output),
        Command::Recipes(args) => recipes::run(args, output),
        Command::Completions(args) => completions::run(args, output),
    }
}
