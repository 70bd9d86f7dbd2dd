//! `radpack export`

use std::process::ExitCode;

use radpack::diag::{Diagnostic, Failure, FailureKind, Result, count, size};
use radpack::export::{self, Decoded, Format, Options};

use super::args::{Export, ExportDtype, ExportFormat};
use super::documents::ExportDocument;
use super::inspect::open;
use super::output::Output;

/// Writes the folder and says what is in it.
pub fn run(args: &Export, output: &Output) -> Result<ExitCode> {
    let format = match args.format {
        ExportFormat::CompressedTensors => Format::CompressedTensors,
        ExportFormat::Safetensors => Format::Safetensors,
    };
    if format == Format::CompressedTensors && args.dtype.is_some() {
        let problem = Diagnostic::new("--dtype", "--format compressed-tensors decodes no weight")
            .help("--format safetensors writes decoded weights");
        return Err(Failure::one(FailureKind::Usage, "these options do not go together", problem));
    }
    let artifact = open(&args.file)?;
    let decoded = match args.dtype {
        Some(ExportDtype::F32) => Decoded::F32,
        Some(ExportDtype::Bf16) | None => Decoded::Bf16,
    };
    let options = Options { decoded, ..Options::default() };
    let exported = export::export(&artifact, format, &args.output, options)?;
    if output.json() {
        output.document(&ExportDocument {
            schema: "radpack.export",
            folder: exported.folder.display().to_string(),
            tensors: exported.tensors,
            shards: exported.shards,
            bytes: exported.bytes,
            side_files: exported.side_files,
            draft_weights: exported.draft_weights,
            unstated_activations: exported.unstated_activations,
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
    if exported.unstated_activations > 0 {
        output.note(&format!(
            "left out  activations in groups of 128 for {} weights whose columns are no multiple of 128",
            count(exported.unstated_activations as u64)
        ));
    }
    Ok(ExitCode::SUCCESS)
}
