//! `radpack completions`

use std::process::ExitCode;

use clap::CommandFactory;
use radpack::diag::Result;

use super::args::{Cli, Completions};
use super::output::Output;

/// Prints the completion script.
pub fn run(args: &Completions, output: &Output) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "radpack", &mut script);
    output.bytes(&script)?;
    Ok(ExitCode::SUCCESS)
}
