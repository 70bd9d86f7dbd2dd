//! Sources: safetensors, indexes, configurations, quantized weights, GGUF, importances.

use std::fs;
use std::path::Path;

use radpack::checkpoint::gguf::header as gguf_header;
use radpack::checkpoint::{Checkpoint, JsonFile, OpenOptions, safetensors as format};
use radpack::model::{self, Weight};
use radpack::pipeline::{self, Imatrix, Request};
use radpack::recipe::Recipe;

use super::archive::{folder as memory, placeless, unpack};
use super::{Outcome, lines, shown};

/// Rows of a weight that are read at a time, and how many in all.
const ROWS: u64 = 3;
const MOST_ROWS: u64 = 12;
/// Largest row that is read.
const MOST_COLUMNS: u64 = 1 << 16;

/// A header, whole and cut short.
pub fn safetensors(input: &[u8]) -> Outcome {
    let have = input.len() as u64;
    let header = format::read_header(input).map_err(|faults| lines(&faults))?;
    let mut end = header.data_start;
    let mut entries: Vec<_> = header.tensors.values().collect();
    entries.sort_by_key(|e| (e.begin, e.end));
    for entry in entries {
        assert_eq!(entry.begin, end, "tensors lie one after the other");
        end = entry.end;
        let bits =
            entry.info.shape.elements().expect("counted") * u64::from(entry.info.dtype.bits());
        assert_eq!(bits, (entry.end - entry.begin) * 8, "a tensor has the bytes of its shape");
    }
    assert_eq!(end, have, "tensors fill the file");
    assert_eq!(format::header_end(input), Some(header.data_start));
    let head = &input[..header.data_start as usize];
    assert_eq!(format::read_header_of(head, have).as_ref(), Ok(&header), "the header suffices");
    Ok(format!("{} tensors in {have} bytes", header.tensors.len()))
}

/// `config.json` alone.
pub fn config(input: &[u8]) -> Outcome {
    let file = JsonFile::parse("config.json", "config.json", input.to_vec()).map_err(failure)?;
    let spec = model::read_spec(&file.value, Some(&file.text)).map_err(|f| shown(&f, input))?;
    let again = model::read_spec(&file.value, None);
    assert_eq!(again.as_ref(), Ok(&spec), "one meaning, with a text to point into and without");
    Ok(format!("{} layers", spec.text.layers.len()))
}

fn failure(problem: radpack::diag::Diagnostic) -> String {
    radpack::diag::Failure::one(radpack::diag::FailureKind::Refused, "refused", problem).to_string()
}

/// A folder: weights, index, configuration, side files; planned under a recipe that quantizes what it can.
pub fn folder(input: &[u8]) -> Outcome {
    let folder = unpack(input);
    read(input, folder.path(), folder.path())
}

/// As [`folder`]: quantized sources have seeds of their own.
pub fn quantized(input: &[u8]) -> Outcome {
    folder(input)
}

/// A GGUF file.
pub fn gguf(input: &[u8]) -> Outcome {
    let header = gguf_header::read_header(input).map_err(|faults| lines(&faults))?;
    for entry in header.tensors.values() {
        assert!(entry.begin <= entry.end && entry.end <= input.len() as u64, "{entry:?}");
    }
    let folder = memory();
    let path = folder.path().join("model.gguf");
    fs::write(&path, input).expect("writes");
    read(input, &path, folder.path())
}

/// Importances of llama.cpp, either form.
pub fn imatrix(input: &[u8]) -> Outcome {
    let folder = memory();
    let path = folder.path().join("imatrix");
    fs::write(&path, input).expect("writes");
    let read = Imatrix::open(&path).map_err(|f| placeless(&f.to_string(), folder.path()))?;
    assert_eq!(read.file().bytes, input.len() as u64);
    Ok(format!("{} bytes", read.file().bytes))
}

/// Opens a source, reads weights, and plans conversions.
fn read(input: &[u8], source: &Path, folder: &Path) -> Outcome {
    let said = |f: &radpack::diag::Failure| placeless(&shown(f, input), folder);
    let open = || Checkpoint::open(source, &OpenOptions::default()).map_err(|f| said(&f));
    let checkpoint = open()?;
    let mut outcome = vec![format!("{} tensors", checkpoint.tensors().len())];
    outcome.extend(checkpoint.notes().iter().map(|note| note.message.clone()));
    let refusal = checkpoint.refuse_quantized().err();
    if let Ok(table) = model::weights_only(None, checkpoint.tensors()) {
        table.weights.iter().for_each(|weight| values(&checkpoint, weight));
    }
    if let Some(config) = checkpoint.config()
        && let Ok(model) = model::read(&config.value, Some(&config.text), checkpoint.tensors())
    {
        outcome.push(format!("{} weights of a known model", model.table.weights.len()));
        model.table.weights.iter().for_each(|weight| values(&checkpoint, weight));
    }
    let tokenizer = checkpoint.check_tokenizer(Some(256), false);
    outcome.extend(tokenizer.problems.iter().map(|problem| problem.message.clone()));
    if let Some(refusal) = refusal {
        return Err(said(&refusal));
    }
    for weights_only in [true, false] {
        let recipe = Recipe::from_bytes("int8", RECIPE.to_vec()).expect("a recipe");
        let request = Request { weights_only, tokenizer_required: false };
        match pipeline::plan(open()?, recipe, request) {
            Ok(plan) => {
                assert_eq!(plan.layout.file_bytes(), file_bytes(&plan), "a layout is final");
                outcome.push(format!("{} entries", plan.contents.entries.len()));
            }
            Err(refused) if weights_only => return Err(said(&refused)),
            Err(refused) => outcome.push(said(&refused)),
        }
    }
    Ok(placeless(&outcome.join("\n"), folder))
}

const RECIPE: &[u8] = b"schema = 1\n[[quantize]]\nclass = [\"linear\", \"expert\", \"other\"]\n\
    encoding = { codes = \"i8\", scale = \"bf16\", group = 8 }\n[graphs]\nmax_seq_len = 256\n\
    batch_size = 1\nprefill_chunk_size = 32\nkv_partition_len = 64\n";

fn file_bytes(plan: &pipeline::Plan) -> u64 {
    radpack::artifact::Layout::plan(&plan.contents).expect("planned once").file_bytes()
}

/// Reads the first rows of a weight, decoded and as planes.
fn values(checkpoint: &Checkpoint, weight: &Weight) {
    let mut weight = weight.clone();
    weight.stored = checkpoint.stored(&weight);
    let Some((rows, cols)) = weight.shape.matrix() else { return };
    if cols > MOST_COLUMNS {
        return;
    }
    if let Ok(source) = checkpoint.source(&weight) {
        let width = source.dtype().bytes().expect("whole bytes");
        for start in (0..rows.min(MOST_ROWS)).step_by(ROWS as usize) {
            let end = rows.min(start + ROWS);
            if let Ok(bytes) = source.rows(start..end) {
                assert_eq!(bytes.len() as u64, (end - start) * cols * width, "{}", weight.name);
            }
        }
        assert!(source.rows(rows..rows.saturating_add(1)).is_err(), "no row beyond the last");
        checkpoint.release(&weight, 0..rows);
    }
    if let Some(planes) = checkpoint.planes(&weight) {
        let encoding = planes.encoding();
        encoding.check().expect("kept planes have a sound encoding");
        for (k, plane) in encoding.planes.iter().enumerate() {
            let (n, _) = plane.grid(rows, cols);
            let n = n.min(ROWS);
            if let (Ok(bytes), Some(row)) = (planes.plane_rows(k, 0..n), plane.row_bytes(cols)) {
                assert_eq!(bytes.len() as u64, n * row, "{} plane {k}", weight.name);
            }
        }
    }
}
