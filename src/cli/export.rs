//! `radpack export`

use std::process::ExitCode;

use radpack::diag::{Result, count, size};
use radpack::export::{self, Format, Options};

use super::args::{Export, ExportFormat};
use super::documents::ExportDocument;
use super::inspect::open;
use super::output::Output;

/// Writes the folder and says what is in it.
pub fn run(args: &Export, output: &Output) -> Result<ExitCode> {
    let artifact = open(&args.file)?;
    let format = match args.format {
        ExportFormat::CompressedTensors => Format::CompressedTensors,
        ExportFormat::Safetensors => Format::Safetensors,
    };
    let exported = export::export(&artifact, format, &args.output, Options::default())?;
    if output.json() {
        output.document(&ExportDocument {
            schema: "radpack.export",
            folder: exported.folder.display().to_string(),
            tensors: exported.tensors,
            shards: exported.shards,
            bytes: exported.bytes,
            side_files: exported.side_files,
            draft_weights: exported.draft_weights,
        })?;
    } else {
        output.text(&format!(
            "wrote     {}: {} tensors in {} file{}, {}; {} side files\n",
            exported.folder.display(),
            count(exported.tensors as u64),
            exported.shards,
            if exported.shards == 1 { "" } else { "s" },
            size(exported.bytes),
            exported.side_files,
        ))?;
    }
    if exported.draft_weights > 0 {
        output.note(&format!(
            "left out  {} weights of the draft model, which is a checkpoint of its own",
            count(exported.draft_weights as u64)
        ));
    }
    Ok(ExitCode::SUCCESS)
}
