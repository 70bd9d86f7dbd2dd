//! What the page of an artifact shows beside the facts of its card: its weights, and the memory of each device.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};

use super::Additions;
use crate::artifact::manifest::Manifest;
use crate::artifact::{Artifact, Weights, errors};
use crate::diag::Result;

/// Weights that are listed: those with the largest errors, then the largest ones.
const LISTED: usize = 200;

/// The facts of the card with `weights`, `listed`, `memory` and `text_files` added.
pub(super) fn facts(artifact: &Artifact, additions: &Additions) -> Result<Json> {
    let mut facts = super::facts::facts(artifact, additions)?;
    let weights = weights(artifact)?;
    let all = weights.len();
    facts["weights"] = Json::Array(weights.into_iter().take(LISTED).collect());
    facts["all_weights"] = json!(all);
    if let Some(manifest) = Manifest::of(artifact)? {
        let rows = memory(&manifest);
        let most = rows.iter().filter_map(|r| r["all"].as_u64()).max().unwrap_or(0);
        facts["memory"] = json!({"rows": rows, "most": most});
        let errors = by_encoding(artifact, &manifest);
        facts["errors"] = json!(errors);
    }
    Ok(facts)
}

/// Every weight, the one with the largest relative error first.
fn weights(artifact: &Artifact) -> Result<Vec<Json>> {
    let whole = Weights::open(artifact)?;
    let known = relative_errors(artifact);
    let mut all: Vec<(Option<f64>, u64, Json)> = whole
        .iter()
        .map(|w| {
            let error = known.get(w.name()).copied();
            let row = json!({
                "name": w.name(),
                "shape": w.shape().extents(),
                "encoding": w.encoding().to_string(),
                "bytes": w.plane_bytes(),
                "error": error,
            });
            (error, w.plane_bytes(), row)
        })
        .collect();
    let key = |(error, bytes, _): &(Option<f64>, u64, Json)| (error.unwrap_or(-1.0), *bytes);
    all.sort_by(|a, b| {
        let ((x, m), (y, n)) = (key(a), key(b));
        y.total_cmp(&x).then(n.cmp(&m))
    });
    Ok(all.into_iter().map(|(_, _, row)| row).collect())
}

/// Relative errors by weight, as the artifact records them.
fn relative_errors(artifact: &Artifact) -> BTreeMap<String, f64> {
    let all = errors::of(artifact);
    all.into_iter().filter_map(|e| Some((e.weight.clone(), e.relative()?))).collect()
}

/// Mean and largest error of the weights of each encoding.
fn by_encoding(artifact: &Artifact, manifest: &Manifest) -> Vec<Json> {
    let known = relative_errors(artifact);
    let mut rows = Vec::new();
    for summary in &manifest.encodings {
        let of: Vec<f64> = manifest
            .weights
            .iter()
            .filter(|w| w.encoding == summary.encoding)
            .filter_map(|w| known.get(&w.name).copied())
            .collect();
        if !of.is_empty() {
            let mean = of.iter().sum::<f64>() / of.len() as f64;
            let largest = of.iter().copied().fold(0.0, f64::max);
            rows.push(json!({"encoding": summary.encoding, "mean": mean, "largest": largest}));
        }
    }
    rows
}

/// Bytes on each device: weights, rings, the fewest blocks that serve, the largest arena.
fn memory(manifest: &Manifest) -> Vec<Json> {
    let of_weights = |device: u32| {
        let held = manifest.device_weights.iter().find(|d| d.device == device);
        let all = || manifest.encodings.iter().map(|e| e.bytes).fold(0, u64::saturating_add);
        held.map_or_else(all, |d| d.whole.saturating_add(d.shards))
    };
    let (mut window, mut blocks, mut arena) = (0, 0, 0);
    if let Some(g) = &manifest.graphs {
        window = g.kv.window_bytes;
        blocks = g.kv.block_bytes.saturating_mul(g.kv.min_blocks);
        arena = g.programs.iter().map(|p| p.arena_bytes).max().unwrap_or(0);
    }
    (0..manifest.devices)
        .map(|device| {
            let weights = of_weights(device);
            let all = [weights, window, blocks, arena].into_iter().fold(0, u64::saturating_add);
            json!({
                "device": device, "weights": weights, "window": window, "blocks": blocks, "arena": arena, "all": all,
            })
        })
        .collect()
}
