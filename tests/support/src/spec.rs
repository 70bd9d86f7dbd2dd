//! The committed description of the tiny models: which shards hold which tensors, and the digest of every file.

use std::collections::BTreeMap;
use std::fs;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::safetensors::Entry;
use crate::values::ValueSpec;
use crate::{Result, at, fixtures};

/// One model of `fixtures_spec.json`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Parameters of the value rules.
    pub values: ValueSpec,
    /// Shard file name → tensors as (name, dtype, shape).
    shards: BTreeMap<String, Vec<(String, String, Vec<u64>)>>,
}

impl ModelSpec {
    /// Shard file names with their tensors.
    pub fn shards(&self) -> impl Iterator<Item = (&str, Vec<Entry>)> {
        self.shards.iter().map(|(file, tensors)| {
            let entry = |(name, dtype, shape): &(String, String, Vec<u64>)| Entry {
                name: name.clone(),
                dtype: dtype.clone(),
                shape: shape.clone(),
            };
            (file.as_str(), tensors.iter().map(entry).collect())
        })
    }
}

/// One model of `manifest.json`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Digests {
    /// Number of safetensors files.
    pub shards: usize,
    /// Number of tensors over all shards.
    pub tensors: usize,
    /// Bytes of the safetensors files, headers included.
    pub bytes: u64,
    /// Half the bytes of all tensors: the number of bf16 elements, with an i64 counted as four.
    pub params: u64,
    /// File name → sha256 in hex, for every file of the folder.
    pub sha256: BTreeMap<String, String>,
}

/// All models' specs, by name.
pub fn specs() -> Result<BTreeMap<String, ModelSpec>> {
    read("fixtures_spec.json")
}

/// All models' digests, by name.
pub fn manifest() -> Result<BTreeMap<String, Digests>> {
    read("manifest.json")
}

fn read<T: DeserializeOwned>(file: &str) -> Result<T> {
    let path = fixtures().join("models").join(file);
    let text = fs::read_to_string(&path).map_err(at(&path))?;
    serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))
}
