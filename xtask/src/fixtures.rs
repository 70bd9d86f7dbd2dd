//! `fixtures` and `sparse`: checkpoints without weights worth keeping.

use std::path::{Path, PathBuf};

use clap::Args;
use testkit::{SparseOptions, SparseSummary};

use crate::Result;

/// Makes every tiny model in `out` (default `target/fixtures`), checks it and prints a line for each.
pub fn tiny(out: Option<PathBuf>) -> Result<()> {
    let out = out.unwrap_or_else(|| testkit::target().join("fixtures"));
    for (name, digests) in testkit::spec::manifest()? {
        let folder = testkit::tiny::cached(&name, &out).map_err(|e| format!("{name}: {e}"))?;
        println!(
            "{name:24} {:>3} tensors  {:>9} bytes in {} shards  {}",
            digests.tensors,
            digests.bytes,
            digests.shards,
            folder.display()
        );
    }
    println!("all files have the manifest's sha256");
    Ok(())
}

/// How a sparse checkpoint is laid out.
#[derive(Debug, Clone, Copy, Args)]
pub struct SparseArgs {
    /// Largest shard in GB (10^9 bytes)
    #[arg(long, default_value_t = 5.0, value_name = "GB")]
    shard_gb: f64,
    /// Noise at the start of every shard in MiB, so that sizes and digests are not those of zeros
    #[arg(long, default_value_t = 0, value_name = "MIB")]
    noise_mib: u64,
}

impl SparseArgs {
    /// As testkit takes it.
    pub fn options(self) -> SparseOptions {
        SparseOptions { shard_gb: self.shard_gb, noise_mib: self.noise_mib }
    }
}

/// Writes the sparse checkpoint of a model listed in `fixtures/gemma4` into `out`.
pub fn sparse(model: &str, out: &Path, options: SparseOptions) -> Result<SparseSummary> {
    let published = testkit::fixtures().join("gemma4");
    let shapes = published.join("shapes").join(format!("{model}.tsv"));
    let config = published.join("configs").join(format!("{model}.json"));
    if !shapes.is_file() || !config.is_file() {
        return Err(format!("{model} is none of {}", published_models(&published)?.join(", ")));
    }
    let made = testkit::sparse(&shapes, &config, out, options)?;
    eprintln!(
        "{}: {} shards, {} tensors, {} bytes",
        out.display(),
        made.shards,
        made.tensors,
        made.bytes
    );
    Ok(made)
}

fn published_models(folder: &Path) -> Result<Vec<String>> {
    let shapes = folder.join("shapes");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&shapes).map_err(testkit::at(&shapes))? {
        let path = entry.map_err(testkit::at(&shapes))?.path();
        if path.extension().is_some_and(|e| e == "tsv") {
            names.extend(path.file_stem().map(|s| s.to_string_lossy().into_owned()));
        }
    }
    names.sort();
    Ok(names)
}
