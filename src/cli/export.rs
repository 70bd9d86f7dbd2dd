//! `radpack export`

use std::process::ExitCode;

use radpack::diag::{Diagnostic, Failure, FailureKind, Result, count, size};
use radpack::export::{self, Decoded, Format, Options, stablehlo};
use radpack::{pipeline, runtime};

use super::args::{Export, ExportDtype, ExportFormat};
use super::documents::ExportDocument;
use super::inspect::open;
use super::output::Output;

/// Writes the folder and says what is in it.
pub fn run(args: &Export, output: &Output) -> Result<ExitCode> {
    if args.format != ExportFormat::Safetensors && args.dtype.is_some() {
        let problem = Diagnostic::new("--dtype", "only --format safetensors decodes weights")
            .help("--format safetensors writes decoded weights");
        return Err(Failure::one(FailureKind::Usage, "these options do not go together", problem));
    }
    if args.format != ExportFormat::Stablehlo && args.kv_blocks.is_some() {
        let problem = Diagnostic::new("--kv-blocks", "only --format stablehlo has a cache")
            .help("leave it out");
        return Err(Failure::one(FailureKind::Usage, "these options do not go together", problem));
    }
    let format = match args.format {
        ExportFormat::CompressedTensors => Format::CompressedTensors,
        ExportFormat::Safetensors => Format::Safetensors,
        ExportFormat::Stablehlo => return modules(args, output),
    };
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
            modules: None,
            left_out: Vec::new(),
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

/// Writes the programs.
fn modules(args: &Export, output: &Output) -> Result<ExitCode> {
    let artifact = open(&args.file)?;
    let programs = runtime::read_programs(&artifact).map_err(|error| {
        let problem = Diagnostic::new("graph", error.to_string());
        Failure::one(FailureKind::Invalid, "the programs cannot be read", problem)
    })?;
    let Some(programs) = programs else {
        let problem = Diagnostic::new("export", "the file holds no programs")
            .help("files of whole models do; convert the target model, not its draft head alone");
        return Err(Failure::one(FailureKind::Refused, "this file cannot be exported", problem));
    };
    let faults = pipeline::check_programs(&artifact, None);
    faults.finish(FailureKind::Invalid, "the programs of this file are not sound", ())?;
    let exported = stablehlo::export(&artifact, &programs, args.kv_blocks, &args.output)?;
    if output.json() {
        output.document(&ExportDocument {
            schema: "radpack.export",
            folder: exported.folder.display().to_string(),
            tensors: exported.tensors,
            shards: exported.files,
            bytes: exported.bytes,
            side_files: exported.side_files,
            draft_weights: 0,
            unstated_activations: 0,
            modules: Some(exported.modules),
            left_out: exported.left_out.clone(),
        })?;
    } else {
        let plural = |n: u64| if n == 1 { "" } else { "s" };
        output.text(&format!(
            "wrote     {}: {} module{} for {} device{}, {} cache blocks; {} tensors, {}; {} side files\n",
            exported.folder.display(),
            exported.modules,
            plural(exported.modules as u64),
            exported.devices,
            plural(u64::from(exported.devices)),
            count(exported.kv_blocks),
            count(exported.tensors as u64),
            size(exported.bytes),
            exported.side_files,
        ))?;
    }
    for program in &exported.left_out {
        output.note(&format!("left out  {}: {}", program.name, program.reason));
    }
    Ok(ExitCode::SUCCESS)
}
