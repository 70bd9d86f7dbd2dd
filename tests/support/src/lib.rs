//! Checkpoints for tests, made without any radpack code.
//!
//! [`tiny_model`] gives a complete Hugging Face folder of a tiny model with random weights; its shards are computed from
//! `fixtures/models/fixtures_spec.json` and checked against the digests in `fixtures/models/manifest.json`. [`sparse()`]
//! gives a full-size checkpoint whose data are file holes.

pub mod digest;
pub mod gguf;
pub mod imatrix;
pub mod proofs;
pub mod safetensors;
pub mod sparse;
pub mod spec;
pub mod tiny;
pub mod values;

use std::path::{Path, PathBuf};

pub use sparse::{SparseOptions, SparseSummary, sparse};
pub use tiny::{NAMES, copy_folder, generate, names, tiny_model};

/// What went wrong, in one line that names the file.
pub type Result<T> = std::result::Result<T, String>;

/// The repository root: the folder of `Cargo.lock`.
///
/// Cargo names the running package's folder in the environment; the one known at build time would be wrong in a tree
/// that was moved or copied together with its build folder.
pub fn root() -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR"));
    let here = std::env::var_os("CARGO_MANIFEST_DIR").map_or(built.to_path_buf(), PathBuf::from);
    let root = here.ancestors().find(|folder| folder.join("Cargo.lock").is_file());
    root.unwrap_or(&here).to_path_buf()
}

/// `fixtures/` at the repository root.
pub fn fixtures() -> PathBuf {
    root().join("fixtures")
}

/// The build folder: `CARGO_TARGET_DIR`, else `target/` at the repository root.
pub fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// Turns an I/O error into a line that names the path it is about.
pub fn at(path: &Path) -> impl Fn(std::io::Error) -> String + '_ {
    move |e| format!("{}: {e}", path.display())
}
