//! Repository tasks, run as `cargo xtask TASK`.
//!
//! Results go to stdout, what is being done to stderr. The exit status is 0 if the task found nothing wrong, else 1.

mod bench;
mod build;
mod check_exports;
mod check_report;
mod check_resume;
mod check_stablehlo;
mod encodings;
mod fetch;
mod fixtures;
mod fuzz;
mod python;
mod quality;
mod repro;
mod tidy;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// What went wrong, in words.
type Result<T> = std::result::Result<T, String>;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Repository tasks", arg_required_else_help = true)]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Make the tiny models and check them against their manifest
    Fixtures {
        /// Folder that gets one folder per model [default: target/fixtures]
        #[arg(long)]
        out: Option<PathBuf>,
    },
    /// Write a published model as sparse files: real config and shapes, zeros as data
    Sparse {
        /// Name in fixtures/gemma4, such as gemma-4-31B
        model: String,
        /// Folder to write
        #[arg(long)]
        out: PathBuf,
        #[command(flatten)]
        layout: fixtures::SparseArgs,
    },
    /// Bring a real trained model as a Hugging Face folder into target/models
    Fetch {
        #[arg(value_enum)]
        model: fetch::Model,
    },
    /// Check the rules of the tree: dependency directions, who names which crate, file sizes, wording
    Tidy,
    /// Convert one model in different surroundings and compare the bytes
    Repro {
        /// The radpack binary [default: build target/release/radpack]
        #[arg(long)]
        bin: Option<PathBuf>,
    },
    /// Export tiny models, load the folders with transformers, and compare with radpack's own decoded weights
    CheckExports(check_exports::CheckExportsArgs),
    /// Run the programs of tiny models with XLA on 1 to 16 virtual devices, and compare with transformers' logits
    CheckStablehlo(check_stablehlo::CheckStablehloArgs),
    /// Errors of every encoding on a trained model's f32 weights; fails where a search is no better than rounding
    Quality(quality::QualityArgs),
    /// Kill a real model's conversion at points all over its time, resume it, compare the bytes
    CheckResume(check_resume::CheckResumeArgs),
    /// Open the page of `radpack inspect --html` in Chromium
    CheckReport(check_report::CheckReportArgs),
    /// Fuzz every parser of bytes that radpack did not write
    Fuzz(fuzz::FuzzArgs),
    /// Check docs/encodings.md against what the tests prove
    Encodings {
        /// Write it instead
        #[arg(long)]
        write: bool,
    },
    /// Measure
    Bench {
        #[command(subcommand)]
        what: bench::Bench,
    },
}

fn main() -> ExitCode {
    if let Some(code) = fuzz::compiled() {
        return code;
    }
    let done = match Args::parse().task {
        Task::Fixtures { out } => fixtures::tiny(out),
        Task::Sparse { model, out, layout } => {
            fixtures::sparse(&model, &out, layout.options()).map(|_| ())
        }
        Task::Fetch { model } => fetch::run(model),
        Task::Tidy => tidy::run(),
        Task::Repro { bin } => repro::run(bin),
        Task::CheckExports(args) => check_exports::run(&args),
        Task::CheckStablehlo(args) => check_stablehlo::run(&args),
        Task::Quality(args) => quality::run(&args),
        Task::CheckReport(args) => check_report::run(&args),
        Task::CheckResume(args) => check_resume::run(&args),
        Task::Fuzz(args) => fuzz::run(&args),
        Task::Encodings { write } => encodings::run(write),
        Task::Bench { what } => what.run(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("error: {problem}");
            ExitCode::FAILURE
        }
    }
}
