//! What two artifacts have in common and what not, explained: recipe, source, weights, programs, side files, memory.
//!
//! Weights are compared as whole weights, plane by plane, whatever number of devices each file is for; those that differ
//! are decoded, and the distance of their values is measured. Everything else is compared as the documents that the files
//! carry: a difference has the path of a key and both values.

mod values;
mod vocabulary;
mod weights;

use std::collections::BTreeMap;

use serde_json::Value;

use crate::artifact::manifest::{Manifest, SideFile};
use crate::artifact::{Artifact, layout as names};
use crate::diag::{Diagnostic, Failure, FailureKind, Result};
use crate::graph;
use crate::runtime;

pub use values::Change;
pub use weights::{ChangedWeight, WeightDifference};

/// Everything that two artifacts differ in; empty lists for equal ones.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// Keys of the recipes that the files carry.
    pub recipe: Vec<Change>,
    /// Where they come from: repository, revision, the digest of every file.
    pub source: Vec<Change>,
    /// What the model is, and what else the manifests say: encodings, towers, unused tensors, notes, writer.
    pub model: Vec<Change>,
    /// Their weights.
    pub weights: WeightDifference,
    /// Sizes and programs, and for programs of one name the first operation that differs.
    pub graphs: Vec<Change>,
    /// Side files, by path.
    pub files: Vec<Change>,
    /// The tokenizer in the container's tables; of its lists the lengths, else the first row that differs.
    pub vocabulary: Vec<Change>,
    /// Devices and the bytes of weights on each.
    pub memory: Vec<Change>,
    /// Rows of the container's own metadata.
    pub metadata: Vec<Change>,
    /// Bytes of both files.
    pub file_bytes: [u64; 2],
    /// Whether the files are equal byte for byte.
    pub same_bytes: bool,
}

/// The files' documents.
struct Side<'a> {
    artifact: &'a Artifact,
    manifest: Option<Manifest>,
}

/// Compares two artifacts.
///
/// # Errors
/// A manifest or a partition that cannot be read ([`FailureKind::Invalid`]), and faults while reading.
pub fn diff(a: &Artifact, b: &Artifact) -> Result<Difference> {
    let sides = [Side::of(a)?, Side::of(b)?];
    let same_bytes = a.same_bytes(b);
    let weights = if same_bytes { weights::all_equal(a)? } else { weights::compare(a, b)? };
    let part = |f: fn(&Manifest) -> Value| {
        let [a, b] = sides.each_ref().map(|s| s.manifest.as_ref().map_or(Value::Null, f));
        values::changes(&a, &b)
    };
    let model = part(|m| {
        serde_json::json!({
            "tool": m.tool, "model": m.model, "encodings": m.encodings, "unused": m.unused, "notes": m.notes,
            "format_version": m.format_version,
        })
    });
    let memory = part(|m| serde_json::json!({"devices": m.devices, "weights": m.device_weights}));
    let mut graphs = part(|m| serde_json::json!(m.graphs));
    graphs.extend(programs(&sides)?);
    let [recipe_a, recipe_b] = [a, b].map(|x| recipe(&x.recipe().to_string()));
    let [meta_a, meta_b] = [a, b].map(metadata);
    Ok(Difference {
        recipe: values::changes(&recipe_a, &recipe_b),
        source: part(|m| serde_json::json!(m.source)),
        model,
        weights,
        graphs,
        files: files(&sides),
        vocabulary: if same_bytes { Vec::new() } else { vocabulary::changes(a, b) },
        memory,
        metadata: values::changes(&meta_a, &meta_b),
        file_bytes: [a.file_bytes(), b.file_bytes()],
        same_bytes,
    })
}

impl<'a> Side<'a> {
    fn of(artifact: &'a Artifact) -> Result<Side<'a>> {
        Ok(Side { artifact, manifest: Manifest::of(artifact)? })
    }

    fn program_texts(&self) -> Result<BTreeMap<String, String>> {
        let programs = runtime::read_programs(self.artifact).map_err(|error| {
            let problem = Diagnostic::new("graph", error.to_string());
            Failure::one(FailureKind::Invalid, "the programs cannot be read", problem)
        })?;
        let Some(programs) = programs else { return Ok(BTreeMap::new()) };
        let text = |p: &graph::Program| {
            (p.name.clone(), graph::Text { program: p, kv: &programs.kv }.to_string())
        };
        Ok(programs.programs.iter().map(text).collect())
    }
}

/// A recipe's keys; text that is no TOML (of a file that something else wrote) line by line.
fn recipe(text: &str) -> Value {
    let parsed = toml::from_str::<toml::Table>(text).ok();
    let value = parsed.and_then(|table| serde_json::to_value(table).ok());
    value.unwrap_or_else(|| serde_json::json!(text.lines().collect::<Vec<&str>>()))
}

/// Metadata rows, except the digest of all entries, which differs when anything does.
fn metadata(artifact: &Artifact) -> Value {
    use crate::artifact::MetaRef;
    let rows = artifact.metadata().filter_map(|(key, value)| {
        let key = key.to_string();
        let value = match value {
            MetaRef::Int(n) => serde_json::json!(n),
            MetaRef::Float(x) => serde_json::json!(x),
            MetaRef::Text(text) => serde_json::json!(text.to_string()),
            MetaRef::Other { kind, raw } => serde_json::json!([kind, raw]),
        };
        (key != names::DIGEST_KEY).then_some((key, value))
    });
    Value::Object(rows.collect())
}

/// Programs that both files have under one name and that differ, by their first different line.
fn programs(sides: &[Side<'_>; 2]) -> Result<Vec<Change>> {
    let entry = |side: &Side<'_>, name: &str| {
        side.artifact.find(&format!("{}{name}", names::GRAPH_PREFIX)).map(|e| e.plane(0).to_vec())
    };
    let [a, b] = [sides[0].program_texts()?, sides[1].program_texts()?];
    let mut found = Vec::new();
    for (name, text) in &a {
        let Some(other) = b.get(name) else { continue };
        let lines = text.lines().zip(other.lines());
        let first = lines.enumerate().find(|(_, (x, y))| x != y);
        let differs = text != other || entry(&sides[0], name) != entry(&sides[1], name);
        if !differs {
            continue;
        }
        let [count_a, count_b] = [text, other].map(|t| t.lines().count());
        found.push(match first {
            Some((n, (x, y))) => Change {
                path: format!("{name}, line {}", n + 1),
                a: Some(Value::from(x.trim())),
                b: Some(Value::from(y.trim())),
            },
            None => Change {
                path: format!("{name}, lines"),
                a: Some(Value::from(count_a)),
                b: Some(Value::from(count_b)),
            },
        });
    }
    Ok(found)
}

/// Side files by path: their digests.
fn files(sides: &[Side<'_>; 2]) -> Vec<Change> {
    let [a, b] = sides.each_ref().map(|side| {
        let list: &[SideFile] = side.manifest.as_ref().map_or(&[], |m| &m.files);
        let row = |f: &SideFile| (f.path.clone(), serde_json::json!(f.sha256));
        Value::Object(list.iter().map(row).collect())
    });
    values::changes(&a, &b)
}
