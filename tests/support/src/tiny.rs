//! Tiny models as Hugging Face folders.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::safetensors;
use crate::spec::{Digests, manifest, specs};
use crate::values::{bf16_bytes, permutation_bytes};
use crate::{Result, at, digest, fixtures, target};

/// The tiny models. Weights are random; configs, tensor names and tokenizers have the published families' form.
pub const NAMES: [&str; 12] = [
    "tiny-gemma3",
    "tiny-gemma3-vision",
    "tiny-gemma4-assistant",
    "tiny-gemma4-dense",
    "tiny-gemma4-e",
    "tiny-gemma4-e-assistant",
    "tiny-gemma4-moe",
    "tiny-gemma4-unified",
    "tiny-llama",
    "tiny-mistral",
    "tiny-qwen3",
    "tiny-qwen3-moe",
];

/// Names of all tiny models, sorted.
pub fn names() -> &'static [&'static str] {
    &NAMES
}

/// The folder of a tiny model, `target/fixtures/NAME`, made on first use. Its files have the digests of the manifest;
/// treat it as read-only (other tests read it at the same time) and use [`copy_folder`] to get one to change.
///
/// # Panics
/// If there is no model of that name or the folder cannot be written: a test cannot go on.
#[track_caller]
pub fn tiny_model(name: &str) -> PathBuf {
    match cached(name, &target().join("fixtures")) {
        Ok(folder) => folder,
        Err(problem) => panic!("tiny model {name}: {problem}"),
    }
}

/// As [`tiny_model`], under a folder of the caller's choice and with the problem as a value.
pub fn cached(name: &str, base: &Path) -> Result<PathBuf> {
    let all = manifest()?;
    let digests = all.get(name).ok_or_else(|| format!("not one of {}", NAMES.join(", ")))?;
    fs::create_dir_all(base).map_err(at(base))?;
    // Held until the function returns; it orders test threads and processes alike, since each opens its own handle.
    let lock = base.join(format!("{name}.lock"));
    let lock_file = File::create(&lock).map_err(at(&lock))?;
    lock_file.lock().map_err(at(&lock))?;

    let folder = base.join(name);
    if verify(&folder, digests).is_ok() {
        return Ok(folder);
    }
    let fresh = base.join(format!("{name}.new"));
    remove(&fresh)?;
    generate(name, &fresh)?;
    verify(&fresh, digests)?;
    remove(&folder)?;
    fs::rename(&fresh, &folder).map_err(at(&folder))?;
    Ok(folder)
}

/// Writes a tiny model into `out` (made if missing): shards from the spec, side files from `fixtures/`. Nothing is
/// verified here.
pub fn generate(name: &str, out: &Path) -> Result<()> {
    let specs = specs()?;
    let spec = specs.get(name).ok_or_else(|| format!("{name} has no spec"))?;
    fs::create_dir_all(out).map_err(at(out))?;
    for (file, mut entries) in spec.shards() {
        safetensors::sort(&mut entries)?;
        safetensors::write(&out.join(file), &entries, |e| match e.dtype.as_str() {
            "BF16" => Ok(bf16_bytes(name, &e.name, &e.shape, &spec.values)),
            "I64" => Ok(permutation_bytes(name, &e.name, &e.shape, &spec.values)),
            other => Err(format!("{}: no rule gives {other} values", e.name)),
        })?;
    }
    let side = side_files(name);
    for file in list(&side)? {
        if !file.ends_with(".safetensors") {
            let from = side.join(&file);
            fs::copy(&from, out.join(&file)).map_err(at(&from))?;
        }
    }
    Ok(())
}

/// Where a model's configs and tokenizer are committed. The dense Gemma 4 is committed whole, as the example of the
/// README.
fn side_files(name: &str) -> PathBuf {
    match name {
        "tiny-gemma4-dense" => fixtures().join(name),
        _ => fixtures().join("models").join(name),
    }
}

/// Whether a folder holds exactly the manifest's files with the manifest's digests; the error names every difference.
pub fn verify(folder: &Path, digests: &Digests) -> Result<()> {
    let mut wrong = Vec::new();
    for (file, want) in &digests.sha256 {
        match digest::sha256_file(&folder.join(file)) {
            Ok(got) if got == *want => {}
            Ok(got) => wrong.push(format!("{file} has sha256 {got}, the manifest says {want}")),
            Err(e) => wrong.push(e),
        }
    }
    for file in list(folder)? {
        if !digests.sha256.contains_key(&file) {
            wrong.push(format!("{file} is not in the manifest"));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("; ")) }
}

/// Copies the files of a folder (one level, links followed) into `to`, which is made if missing.
pub fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).map_err(at(to))?;
    for file in list(from)? {
        let source = from.join(&file);
        fs::copy(&source, to.join(&file)).map_err(at(&source))?;
    }
    Ok(())
}

fn list(folder: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(at(folder))? {
        files.push(entry.map_err(at(folder))?.file_name().to_string_lossy().into_owned());
    }
    files.sort();
    Ok(files)
}

fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(at(folder)(e)),
        _ => Ok(()),
    }
}
