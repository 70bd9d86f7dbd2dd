//! Several files in one input: `--- NAME` on a line of its own, then the file's bytes.

use std::fs;
use std::io::Write;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

const MARK: &[u8] = b"--- ";

/// Bytes that stand in for weights; what comes after them is a hole in the file.
const MOST_DATA: u64 = 1 << 16;
/// Largest file with a hole.
const MOST_HOLE: u64 = 1 << 30;

/// The files of an input by name, in order. What stands before the first mark belongs to none.
pub fn files(input: &[u8]) -> Vec<(&str, &[u8])> {
    let mut starts: Vec<usize> = Vec::new();
    if input.starts_with(MARK) {
        starts.push(0);
    }
    let mark = [b"\n", MARK].concat();
    starts.extend(input.windows(mark.len()).enumerate().filter(|w| w.1 == mark).map(|w| w.0 + 1));
    let ends = starts.iter().skip(1).map(|next| next - 1).chain([input.len()]);
    let file = |(start, end): (&usize, usize)| {
        let text = input.get(start + MARK.len()..end)?;
        let line = text.iter().position(|b| *b == b'\n').unwrap_or(text.len());
        let name = std::str::from_utf8(&text[..line]).ok()?;
        Some((name, text.get(line + 1..).unwrap_or_default()))
    };
    starts.iter().zip(ends).filter_map(file).collect()
}

/// An input of those files.
pub fn pack<'a>(files: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, bytes) in files {
        if !out.is_empty() {
            out.push(b'\n');
        }
        out.extend([MARK, name.as_bytes(), b"\n", bytes].concat());
    }
    out
}

/// A folder in memory where the system has one.
pub fn folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.expect("a temporary folder")
}

/// Writes the files whose names are plain. A `.safetensors` stands there by its header's text: its length comes before it,
/// and bytes for the tensors that it describes after it (see [`shard`]).
pub fn unpack(input: &[u8]) -> TempDir {
    let folder = folder();
    for (name, bytes) in files(input) {
        let plain = |part: &str| {
            part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
                && part.bytes().any(|b| b != b'.')
                && part.len() < 64
        };
        let (inner, leaf) = name.split_once('/').unwrap_or(("", name));
        if !plain(leaf) || inner.len() > 64 || !(inner.is_empty() || plain(inner)) {
            continue;
        }
        let path = folder.path().join(inner).join(leaf);
        if fs::create_dir_all(folder.path().join(inner)).is_err() {
            continue;
        }
        // A name that is a folder already is left out.
        let Ok(mut file) = fs::File::create(path) else { continue };
        if leaf.ends_with(".safetensors") {
            file.write_all(&shard(bytes)).expect("writes");
            let header = bytes.split(|b| *b == 0).next().unwrap_or_default();
            let whole = (8 + header.len() as u64).saturating_add(described(header));
            if whole <= MOST_HOLE && whole > file.metadata().map_or(0, |m| m.len()) {
                file.set_len(whole).expect("a hole");
            }
        } else {
            file.write_all(bytes).expect("writes");
        }
    }
    folder
}

/// A safetensors file of a header's text, up to the first NUL, and of the first of its data behind it.
pub fn shard(given: &[u8]) -> Vec<u8> {
    let (header, data) = match given.iter().position(|b| *b == 0) {
        Some(at) => (&given[..at], &given[at + 1..]),
        None => (given, &given[given.len()..]),
    };
    let filled = described(header).min(MOST_DATA) as usize;
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header);
    out.extend_from_slice(data);
    out.extend((data.len()..filled).map(|i| (i.wrapping_mul(131) >> 3) as u8));
    out
}

/// Bytes of data that a header describes.
fn described(header: &[u8]) -> u64 {
    let end = |entry: &Value| entry.get("data_offsets")?.get(1)?.as_u64();
    let tensors = serde_json::from_slice::<Value>(header).unwrap_or_default();
    let ends = tensors.as_object().into_iter().flatten().filter_map(|(_, entry)| end(entry));
    ends.max().unwrap_or(0)
}

/// A text without the folder's place.
pub fn placeless(text: &str, folder: &Path) -> String {
    let place = folder.display().to_string();
    let name = folder.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    text.replace(&place, "FOLDER").replace(&name, "FOLDER")
}
