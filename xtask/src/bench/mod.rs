//! Measurements. Nothing here judges: figures go to `docs/performance.md`, with date and machine.

mod checkpoint;
mod convert;
mod measure;
mod run;
mod scale;

use clap::Subcommand;

use crate::Result;

/// What is measured.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Conversions, checks and copies of one checkpoint, in turn
    Convert(convert::ConvertArgs),
    /// Time and memory of planning and converting a full-size model
    Scale(scale::ScaleArgs),
    /// Speed of the reference executor on a real model
    Run(run::RunArgs),
}

impl Bench {
    /// Measures.
    pub fn run(&self) -> Result<()> {
        match self {
            Bench::Convert(args) => convert::run(args),
            Bench::Scale(args) => scale::scale(args),
            Bench::Run(args) => run::run(args),
        }
    }
}
