//! What a card's template can name.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};

use super::command::rebuild;
use super::{Additions, serving};
use crate::artifact::manifest::Manifest;
use crate::artifact::{Artifact, errors, layout as names};
use crate::diag::{Diagnostic, Failure, FailureKind, Result};
use crate::recipe;
use crate::runtime::side_file;

/// The facts of an artifact, as one document. Parts that are not known are `null` or empty lists.
///
/// # Errors
/// A file without a manifest ([`FailureKind::Refused`]) or with one that cannot be read ([`FailureKind::Invalid`]).
pub fn facts(artifact: &Artifact, additions: &Additions) -> Result<Json> {
    let manifest = manifest(artifact)?;
    let m = &manifest;
    let upstream = front_matter(artifact);
    let rebuilt = rebuild(artifact, m, &additions.file_name)?;
    let stem = additions.file_name.strip_suffix(".rad").unwrap_or(&additions.file_name);
    let license = additions.license.clone().or_else(|| upstream.get("license").cloned());
    let base = additions.base_model.clone().or_else(|| m.source.repo.clone());
    let about = recipe::builtin(&m.recipe.name).filter(|_| rebuilt.builtin);
    let about = about.and_then(|b| b.recipe().ok()).map(|r| r.description);
    let takes: &[String] = m.graphs.as_ref().map_or(&[], |g| &g.takes);
    Ok(json!({
        "title": additions.title.as_deref().unwrap_or(stem),
        "license": license,
        "license_files": license_files(m),
        "base_model": base,
        "pipeline_tag": pipeline_tag(m, takes),
        "tags": tags(m),
        "file": {
            "name": additions.file_name,
            "bytes": artifact.file_bytes(),
            "sha256": additions.sha256,
            "digest": artifact.meta_text(names::DIGEST_KEY).map(|t| t.to_string()),
        },
        "tool": m.tool,
        "format_version": m.format_version,
        "model": m.model,
        "recipe": {
            "name": m.recipe.name, "sha256": m.recipe.sha256, "builtin": rebuilt.builtin, "about": about,
        },
        "source": m.source,
        "rebuild": {"before": rebuilt.before, "arguments": rebuilt.arguments},
        "encodings": m.encodings,
        "worst": worst(artifact),
        "devices": m.devices,
        "device_weights": m.device_weights,
        "graphs": m.graphs,
        "largest_arena": m.graphs.as_ref().and_then(|g| g.programs.iter().map(|p| p.arena_bytes).max()),
        "takes": takes,
        "refuses": m.graphs.as_ref().map(|g| &g.refuses),
        "serving": serving::notes(m),
        "unused": m.unused.len(),
        "notes": m.notes,
        "tokenizer": m.files.iter().any(|f| f.path.starts_with("tokenizer")),
        "side_files": m.files,
        "evals": additions.evals,
        "estimate": additions.estimate.as_ref().map(|e| e["estimate"].clone()),
    }))
}

fn manifest(artifact: &Artifact) -> Result<Manifest> {
    Manifest::of(artifact)?.ok_or_else(|| {
        let problem =
            Diagnostic::new("card", "the file has no manifest: nothing says what it was made from")
                .help("only files that radpack wrote have a card");
        Failure::one(FailureKind::Refused, "there is nothing to write a card from", problem)
    })
}

/// Task of the hub that the model is for, if it answers at all.
fn pipeline_tag(m: &Manifest, takes: &[String]) -> Option<&'static str> {
    m.model.family.as_ref()?;
    let image = takes.iter().any(|t| t == "image");
    Some(if image { "image-text-to-text" } else { "text-generation" })
}

/// Tags of the hub, sorted: this format, the family, the target, and every encoding with fewer than 16 bits.
fn tags(m: &Manifest) -> Vec<String> {
    let mut tags = vec!["radpack".to_owned()];
    tags.extend(m.model.family.clone());
    tags.extend(m.graphs.as_ref().and_then(|g| g.target.clone()));
    let coarse = m.encodings.iter().filter(|e| e.bits_per_weight < 16.0 && e.encoding != "keep");
    tags.extend(coarse.map(|e| e.encoding.clone()));
    tags.sort();
    tags.dedup();
    tags
}

/// Licences and notices that the file carries.
fn license_files(m: &Manifest) -> Vec<&str> {
    let is = |path: &str| {
        let upper = path.to_ascii_uppercase();
        ["LICENSE", "LICENCE", "NOTICE", "USE_POLICY", "COPYING"]
            .iter()
            .any(|n| upper.starts_with(n))
    };
    m.files.iter().map(|f| f.path.as_str()).filter(|p| is(p)).collect()
}

/// Plain keys in the front matter of the source's README: `key: text`, between two lines of dashes.
fn front_matter(artifact: &Artifact) -> BTreeMap<String, String> {
    let text = side_file(artifact, "README.md").and_then(|bytes| std::str::from_utf8(bytes).ok());
    let mut found = BTreeMap::new();
    let Some(rest) = text.and_then(|t| t.strip_prefix("---")) else { return found };
    let Some((head, _)) = rest.split_once("\n---") else { return found };
    for line in head.lines() {
        let Some((key, value)) = line.split_once(':') else { continue };
        let value = value.trim().trim_matches(['"', '\'']);
        let plain = !value.is_empty() && !value.starts_with(['[', '{', '|', '>', '&', '*']);
        if plain && !key.is_empty() && !key.starts_with([' ', '-', '#', '\t']) {
            found.insert(key.to_owned(), value.to_owned());
        }
    }
    found
}

/// The weight with the largest relative error and the mean over weights; `null` where nothing was quantized.
fn worst(artifact: &Artifact) -> Json {
    let all = errors::of(artifact);
    let known: Vec<(f64, &str)> =
        all.iter().filter_map(|e| Some((e.relative()?, e.weight.as_str()))).collect();
    let worst = known.iter().max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(a.1)));
    let Some((error, name)) = worst else { return Json::Null };
    let mean = known.iter().map(|(e, _)| e).sum::<f64>() / known.len() as f64;
    json!({"weight": name, "relative_error": error, "mean": mean, "weights": known.len()})
}
