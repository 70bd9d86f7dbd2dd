//! `radpack extract`

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use radpack::artifact::{Artifact, WeightView, Weights, layout as names};
use radpack::diag::{Diagnostic, Failure, FailureKind, Result, nearest};
use radpack::quantize::{Decoder, PlaneSlice};

use super::args::Extract;
use super::inspect::open;
use super::output::Output;

/// Rows decoded at a time: bounded memory whatever the weight.
const ROWS_BYTES: u64 = 8 << 20;

/// Writes one entry: opaque bytes as they are, a weight as f32 values.
pub fn run(args: &Extract, output: &Output) -> Result<ExitCode> {
    let artifact = open(&args.file)?;
    let weight = find(&artifact, &args.name)?;
    let opaque = weight.name().starts_with(names::OWN_PREFIX);
    let out = args.output.clone().unwrap_or_else(|| {
        let last = args.name.rsplit('/').next().unwrap_or("entry");
        let suffix = if opaque || args.raw { "" } else { ".f32" };
        PathBuf::from(format!("{last}{suffix}"))
    });
    let write = |sink: &mut dyn Write| {
        if opaque || args.raw { raw(&weight, sink) } else { decoded(&weight, sink) }
    };
    if out == Path::new("-") {
        let result = write(&mut BufWriter::new(std::io::stdout().lock()));
        // A reader that closed its pipe has what it wanted.
        return match result {
            Err(Stop::Io(e)) if e.kind() != std::io::ErrorKind::BrokenPipe => {
                Err(Failure::io("write to", Path::new("standard output"), &e))
            }
            Err(Stop::Decode(why)) => Err(cannot_decode(&weight, &why)),
            _ => Ok(ExitCode::SUCCESS),
        };
    }
    save(&out, &weight, write)?;
    output.note(&format!("wrote {}", out.display()));
    Ok(ExitCode::SUCCESS)
}

enum Stop {
    Io(std::io::Error),
    Decode(String),
}

impl From<std::io::Error> for Stop {
    fn from(error: std::io::Error) -> Stop {
        Stop::Io(error)
    }
}

/// Writes beside `out` and renames, so that a failure leaves an older file as it was.
fn save(
    out: &Path,
    weight: &WeightView<'_>,
    write: impl Fn(&mut dyn Write) -> std::result::Result<(), Stop>,
) -> Result<()> {
    let io = |e: std::io::Error| Failure::io("write", out, &e);
    let folder = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut partial = tempfile::NamedTempFile::new_in(folder).map_err(io)?;
    let written = {
        let mut buffered: BufWriter<&mut File> = BufWriter::new(partial.as_file_mut());
        write(&mut buffered).and_then(|()| Ok(buffered.flush()?))
    };
    match written {
        Err(Stop::Io(e)) => return Err(io(e)),
        Err(Stop::Decode(why)) => return Err(cannot_decode(weight, &why)),
        Ok(()) => {}
    }
    partial.as_file().sync_all().map_err(io)?;
    // A temporary file is private; an extracted one is an ordinary file.
    use std::os::unix::fs::PermissionsExt;
    let ordinary = std::fs::Permissions::from_mode(0o644);
    partial.as_file().set_permissions(ordinary).map_err(io)?;
    partial.persist(out).map_err(|e| io(e.error))?;
    Ok(())
}

fn raw(weight: &WeightView<'_>, sink: &mut dyn Write) -> std::result::Result<(), Stop> {
    let (rows, cols) =
        weight.shape().matrix().ok_or_else(|| Stop::Decode("shape overflows".into()))?;
    for (k, plane) in weight.encoding().planes.iter().enumerate() {
        let all = plane.grid(rows, cols).0;
        let step = (ROWS_BYTES / plane.row_bytes(cols).unwrap_or(1).max(1)).max(1);
        let mut first = 0;
        while first < all {
            let end = all.min(first + step);
            sink.write_all(&weight.rows(k, first..end)?)?;
            first = end;
        }
    }
    Ok(())
}

fn decoded(weight: &WeightView<'_>, sink: &mut dyn Write) -> std::result::Result<(), Stop> {
    let why = |e: &dyn std::fmt::Display| Stop::Decode(e.to_string());
    let (rows, cols) =
        weight.shape().matrix().ok_or_else(|| Stop::Decode("shape overflows".into()))?;
    let decoder = Decoder::new(weight.encoding(), rows, cols).map_err(|e| why(&e))?;
    let step = (ROWS_BYTES / cols.saturating_mul(4).max(1)).max(1);
    let mut values = Vec::new();
    let mut first = 0;
    while first < rows {
        let n = step.min(rows - first);
        values.resize((n * cols) as usize, 0.0f32);
        let block = weight.block(first..first + n)?;
        let planes: Vec<PlaneSlice<'_>> =
            block.iter().map(|(first, bytes)| PlaneSlice { bytes, first: *first }).collect();
        decoder.decode(first..first + n, &planes, &mut values).map_err(|e| why(&e))?;
        for value in &values {
            sink.write_all(&value.to_le_bytes())?;
        }
        first += n;
    }
    Ok(())
}

fn cannot_decode(weight: &WeightView<'_>, why: &str) -> Failure {
    let problem =
        Diagnostic::new("extract", format!("{} ({}): {why}", weight.name(), weight.encoding()))
            .help("--raw writes the planes as stored");
    Failure::one(FailureKind::Refused, "this weight cannot be decoded", problem)
}

/// The entry of that name, the side file of that path, or the weight that is stored in pieces.
fn find<'a>(artifact: &'a Artifact, name: &str) -> Result<WeightView<'a>> {
    let side = format!("{}{name}", names::FILE_PREFIX);
    if let Some(entry) = artifact.find(name).or_else(|| artifact.find(&side)) {
        return Ok(WeightView::from(entry));
    }
    let weights = Weights::open(artifact)?;
    if let Some(weight) = weights.get(name) {
        return Ok(weight.clone());
    }
    let cut = weights.iter().filter(|w| w.cut()).map(|w| w.name().to_owned());
    let all: Vec<String> = artifact
        .entries()
        .map(|e| e.name().to_string())
        .map(|n| n.strip_prefix(names::FILE_PREFIX).map(str::to_owned).unwrap_or(n))
        .chain(cut)
        .collect();
    let mut problem =
        Diagnostic::new("extract", format!("no entry and no side file is named {name}"));
    let near = nearest(name, all.iter().map(String::as_str));
    if !near.is_empty() {
        problem = problem.help(format!("near it: {}", radpack::diag::list(&near, 3)));
    }
    problem = problem.help("radpack inspect FILE --weights and --files list every name");
    Err(Failure::one(FailureKind::Usage, "there is no such entry", problem))
}
