//! `radpack merge`

use std::process::ExitCode;
use std::time::Instant;

use radpack::artifact::digests;
use radpack::diag::{Result, count, size};
use radpack::pipeline;

use super::args::Merge;
use super::documents::MergeDocument;
use super::output::Output;
use super::request;

/// Puts the parts together.
pub fn run(args: &Merge, output: &Output) -> Result<ExitCode> {
    let started = Instant::now();
    let cancelled = request::stop_on_signals();
    let pool = request::pool(request::threads_of(args.threads))?;
    let merged = pool.install(|| pipeline::merge(&args.parts, &args.output, cancelled))?;
    let document = MergeDocument {
        schema: "radpack.merge",
        output: merged.path.display().to_string(),
        file_bytes: merged.file_bytes,
        digest: digests::hex(&merged.digest),
        parts: merged.parts,
        weights: merged.weights,
    };
    if output.json() {
        output.document(&document)?;
        return Ok(ExitCode::SUCCESS);
    }
    output.text(&format!(
        "wrote     {0}   {1} in {2:.1} s, {3} weights of {4} parts\ndigest    sha256:{5}\nnext      radpack validate {0}\n",
        args.output.display(),
        size(merged.file_bytes),
        started.elapsed().as_secs_f64(),
        count(merged.weights as u64),
        count(merged.parts as u64),
        document.digest
    ))?;
    Ok(ExitCode::SUCCESS)
}
