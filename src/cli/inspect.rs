//! `radpack inspect`

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use radpack::artifact::manifest::Manifest;
use radpack::artifact::{
    Artifact, MetaRef, OpenError, VocabSummary, Weights, digests, errors, layout as names,
};
use radpack::card::{self, Additions};
use radpack::diag::{Diagnostic, Failure, FailureKind, Result, count, size};

use super::args::Inspect;
use super::devices::devices;
use super::documents::{DeviceDocument, EntryDocument, InspectDocument, VocabularyDocument};
use super::graphs;
use super::output::Output;
use super::table::{Align, table};

/// Opens a container, or says why it is none.
pub fn open(path: &Path) -> Result<Artifact> {
    let artifact = Artifact::open(path).map_err(|error| match error {
        OpenError::Io { .. } => Failure::plain(FailureKind::Failed, error.to_string()),
        OpenError::Refused { path, refused } => Failure::one(
            FailureKind::Invalid,
            format!("{path} is no valid .rad file"),
            Diagnostic::new("container", refused.to_string()),
        ),
    })?;
    let Some(number) = artifact.meta_text(names::PART_KEY) else { return Ok(artifact) };
    let what = format!("it is part {number} of a conversion");
    let problem = Diagnostic::new("container", what)
        .help("radpack merge OUT.rad.part-* -o OUT.rad puts all parts together");
    let headline = format!("{} is no whole .rad file", path.display());
    Err(Failure::one(FailureKind::Usage, headline, problem))
}

/// Prints what was asked for.
pub fn run(args: &Inspect, output: &Output) -> Result<ExitCode> {
    let artifact = open(&args.file)?;
    let manifest = Manifest::of(&artifact)?;
    if let Some(path) = &args.html {
        let additions = Additions {
            file_name: super::card::file_name(&args.file),
            sha256: digests::hex(&artifact.sha256()),
            ..Additions::default()
        };
        super::output::replace(path, card::report(&artifact, &additions)?.as_bytes())?;
        output.note(&format!("wrote     {}", path.display()));
        return Ok(ExitCode::SUCCESS);
    }
    if output.json() {
        output.document(&document(args, &artifact, manifest.as_ref())?)?;
    } else if args.recipe {
        output.text(&artifact.recipe().to_string())?;
    } else if args.files {
        output.text(&files(manifest.as_ref()))?;
    } else if args.graphs {
        output.text(&graphs::programs(graphs::summary(manifest.as_ref())?))?;
    } else if let Some(name) = &args.graph {
        output.text(&graphs::program(&artifact, name)?)?;
    } else if args.memory {
        output.text(&graphs::memory(manifest.as_ref())?)?;
    } else if args.weights {
        output.text(&weights(&artifact, manifest.as_ref())?)?;
    } else {
        output.text(&summary(args, &artifact, manifest.as_ref()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn summary(args: &Inspect, artifact: &Artifact, manifest: Option<&Manifest>) -> String {
    let mut text = String::new();
    let mut line = |label: &str, value: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{label:<9} {value}");
    };
    line("file", format!("{}   {}", args.file.display(), size(artifact.file_bytes())));
    line("written", format!("by {}", artifact.created_by()));
    if let Some(digest) = artifact.meta_text(names::DIGEST_KEY) {
        line("digest", format!("sha256:{digest}"));
    }
    match manifest {
        None => {
            line("model", format!("{} ({})", artifact.model_name(), artifact.arch_id()));
            line("entries", count(artifact.len() as u64));
            line("manifest", "none: this file was not written by radpack".into());
        }
        Some(m) => {
            let family = m.model.family.as_deref().unwrap_or("weights only");
            let layers = m
                .model
                .dimensions
                .get("layers")
                .map_or(String::new(), |n| format!(" · {n} layers"));
            let name = match (m.model.architecture.as_str(), m.model.model_type.as_str()) {
                ("", "") => "unnamed",
                ("", model_type) => model_type,
                (architecture, _) => architecture,
            };
            line(
                "model",
                format!("{name} ({family}){layers} · {} parameters", count(m.model.parameters)),
            );
            for tower in &m.model.towers {
                line(
                    &format!("  {}", tower.name),
                    format!(
                        "{} weights · {} parameters · {}",
                        count(tower.weights),
                        count(tower.parameters),
                        size(tower.bytes)
                    ),
                );
            }
            let from = m.source.repo.as_deref().unwrap_or("files");
            let bytes: u64 = m.source.files.iter().map(|f| f.bytes).sum();
            line("source", format!("{} {from}, {}", m.source.files.len(), size(bytes)));
            line("recipe", format!("{} (sha256 {})", m.recipe.name, m.recipe.sha256));
            line("devices", m.devices.to_string());
            if let Some(g) = &m.graphs {
                line("takes", g.takes.join(", "));
                for (what, why) in &g.refuses {
                    line("refuses", format!("{what}: {why}"));
                }
                let programs = g.programs.len();
                line(
                    "programs",
                    format!(
                        "{programs} for up to {} tokens, {} sequences (--graphs)",
                        count(g.max_seq_len),
                        g.batch_size
                    ),
                );
            }
            line("files", format!("{} side files (--files)", m.files.len()));
            if let Some(v) = artifact.vocab_summary() {
                line("vocab", vocabulary(&v));
            }
            for note in &m.notes {
                line("note", note.clone());
            }
        }
    }
    text.push('\n');
    text.push_str(&encodings(artifact, manifest));
    let held = manifest.map(device_rows).unwrap_or_default();
    if !held.is_empty() {
        text.push('\n');
        text.push_str(&devices(&held));
    }
    text
}

/// `BPE · 49,152 tokens · 48,900 merges · 3 steps`.
fn vocabulary(v: &VocabSummary) -> String {
    let some = |n: u32, what: &str| format!("{} {what}", count(u64::from(n)));
    let mut parts = vec![v.kind_name().to_owned(), some(v.tokens, "tokens")];
    if v.merges > 0 {
        parts.push(some(v.merges, "merges"));
    }
    parts.push(some(v.steps, if v.steps == 1 { "step" } else { "steps" }));
    parts.join(" · ")
}

/// The manifest's figures of every device; none for one device.
fn device_rows(manifest: &Manifest) -> Vec<DeviceDocument> {
    let rows = manifest.device_weights.iter().map(|d| DeviceDocument {
        device: d.device,
        whole: d.whole,
        shards: d.shards,
        padding: d.padding,
        bytes: d.whole.saturating_add(d.shards),
    });
    rows.collect()
}

fn encodings(artifact: &Artifact, manifest: Option<&Manifest>) -> String {
    use Align::{Left, Right};
    if let Some(m) = manifest {
        let rows: Vec<Vec<String>> = m
            .encodings
            .iter()
            .map(|e| {
                vec![
                    e.encoding.clone(),
                    e.layout.clone(),
                    count(e.weights),
                    size(e.source_bytes),
                    size(e.bytes),
                    format!("{:.2}", e.bits_per_weight),
                ]
            })
            .collect();
        return table(
            &["encoding", "planes", "weights", "source", "stored", "bits/weight"],
            &[Left, Left, Right, Right, Right, Right],
            &rows,
        );
    }
    let mut sums: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for entry in artifact.entries() {
        let sum = sums.entry(entry.encoding().to_string()).or_default();
        sum.0 += 1;
        sum.1 = sum.1.saturating_add(entry.plane_bytes());
    }
    let rows: Vec<Vec<String>> =
        sums.into_iter().map(|(e, (n, b))| vec![e, count(n), size(b)]).collect();
    table(&["planes", "entries", "stored"], &[Left, Right, Right], &rows)
}

/// Relative errors by weight; empty for files without them.
fn relative_errors(artifact: &Artifact) -> BTreeMap<String, f64> {
    let list = errors::of(artifact);
    list.into_iter().filter_map(|e| Some((e.weight.clone(), e.relative()?))).collect()
}

fn weights(artifact: &Artifact, manifest: Option<&Manifest>) -> Result<String> {
    let errors = relative_errors(artifact);
    let records: BTreeMap<&str, &radpack::artifact::manifest::WeightRecord> =
        manifest.iter().flat_map(|m| &m.weights).map(|w| (w.name.as_str(), w)).collect();
    let whole = Weights::open(artifact)?;
    let rows: Vec<Vec<String>> = whole
        .iter()
        .map(|view| {
            let name = view.name().to_owned();
            let pieces = match view.cut() {
                true => view.entries().len().to_string(),
                false => "–".to_owned(),
            };
            let record = records.get(name.as_str());
            let from: Vec<String> = record
                .iter()
                .flat_map(|r| &r.from)
                .map(|f| match f.index {
                    Some(i) => format!("{}[{i}]", f.tensor),
                    None => f.tensor.clone(),
                })
                .collect();
            let mut row = vec![
                name.clone(),
                view.shape().to_string(),
                record.map_or_else(|| view.encoding().to_string(), |r| r.encoding.clone()),
                size(view.plane_bytes()),
                errors.get(&name).map_or("–".into(), |x| format!("{x:.4}")),
                from.join(" + "),
            ];
            if whole.devices() > 1 {
                row.insert(4, pieces);
            }
            row
        })
        .collect();
    use Align::{Left, Right};
    Ok(if whole.devices() > 1 {
        table(
            &["weight", "shape", "encoding", "bytes", "pieces", "error", "from"],
            &[Left, Left, Left, Right, Right, Right, Left],
            &rows,
        )
    } else {
        table(
            &["weight", "shape", "encoding", "bytes", "error", "from"],
            &[Left, Left, Left, Right, Right, Left],
            &rows,
        )
    })
}

fn files(manifest: Option<&Manifest>) -> String {
    let rows: Vec<Vec<String>> = manifest
        .iter()
        .flat_map(|m| &m.files)
        .map(|f| vec![f.path.clone(), count(f.bytes), f.sha256.to_string()])
        .collect();
    use Align::{Left, Right};
    table(&["file", "bytes", "sha256"], &[Left, Right, Left], &rows)
}

fn document(
    args: &Inspect,
    artifact: &Artifact,
    manifest: Option<&Manifest>,
) -> Result<InspectDocument> {
    let errors = relative_errors(artifact);
    let metadata = artifact.metadata().filter_map(|(key, value)| {
        let value = match value {
            MetaRef::Int(n) => serde_json::json!(n),
            MetaRef::Float(x) => serde_json::json!(x),
            MetaRef::Text(t) => serde_json::json!(t.to_string()),
            MetaRef::Other { .. } => return None,
        };
        Some((key.to_string(), value))
    });
    let entries = artifact.entries().map(|e| EntryDocument {
        name: e.name().to_string(),
        layout: e.encoding().to_string(),
        shape: e.shape().extents().to_vec(),
        layer: e.layer(),
        expert: e.expert(),
        offset: e.offset(),
        bytes: e.plane_bytes(),
        quantizer: e.quantizer().to_string(),
        options: e.options().to_string(),
        relative_error: errors.get(&e.name().to_string()).copied(),
    });
    let manifest = manifest
        .map(serde_json::to_value)
        .transpose()
        .map_err(|e| Failure::plain(FailureKind::Failed, format!("cannot print JSON: {e}")))?;
    Ok(InspectDocument {
        schema: "radpack.inspect",
        file: args.file.display().to_string(),
        file_bytes: artifact.file_bytes(),
        arch_id: artifact.arch_id().to_string(),
        model_name: artifact.model_name().to_string(),
        created_by: artifact.created_by().to_string(),
        digest: artifact.meta_text(names::DIGEST_KEY).map(|t| t.to_string()),
        recipe: artifact.recipe().to_string(),
        manifest,
        metadata: metadata.collect(),
        vocabulary: artifact.vocab_summary().map(|v| VocabularyDocument {
            kind: v.kind_name().to_owned(),
            tokens: v.tokens,
            merges: v.merges,
            steps: v.steps,
        }),
        entries: entries.collect(),
    })
}
