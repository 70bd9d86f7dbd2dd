//! Compares a file with what a plan would have written, byte by byte, without writing anything.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::convert::{Work, final_manifest, final_partition, run, weight_errors, whole_digests};
use super::{ConvertOptions, Plan, Progress, Request, Sources, plan};
use crate::artifact::{Artifact, WeightView, Weights, digests, errors, layout as names, manifest};
use crate::checkpoint::FileDigest;
use crate::diag::{Diagnostic, Failure, FailureKind, Result, SourceText};
use crate::quantize::{ErrorSum, Sink};
use crate::recipe::Recipe;

/// Findings shown one by one; the rest is counted.
const SHOWN: usize = 50;

/// What a comparison found.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// Weights that were derived again.
    pub weights: usize,
    /// Bytes of planes that were compared.
    pub bytes: u64,
    /// Every difference.
    pub findings: Vec<Diagnostic>,
}

/// Plans the conversion that a file says it is: its own recipe on this source.
///
/// # Errors
/// A recipe in the file that does not parse, or a source that does not fit it.
pub fn plan_of(
    artifact: &Artifact,
    sources: impl Into<Sources>,
    weights_only: bool,
) -> Result<Plan> {
    let text = artifact.recipe().to_string();
    let source = SourceText { name: "the artifact's recipe".to_owned(), text };
    let recipe = Recipe::parse(source.into())?;
    plan(sources, recipe, Request { weights_only, tokenizer_required: false })
}

/// Derives every weight again and compares it with the file's, then everything around the weights.
///
/// # Errors
/// Reading the source failed. Differences are findings, not errors.
pub fn compare(
    plan: &Plan,
    artifact: &Artifact,
    path: &Path,
    options: ConvertOptions<'_>,
) -> Result<Comparison> {
    let weights = match Weights::open(artifact) {
        Ok(weights) => weights,
        Err(why) => {
            let findings = vec![finding(why.to_string())];
            return Ok(Comparison { weights: 0, bytes: 0, findings });
        }
    };
    let mut findings = directory(plan, artifact, &weights);
    if !findings.is_empty() {
        // Planes of another layout would differ everywhere; that would hide the cause.
        return Ok(Comparison { weights: 0, bytes: 0, findings });
    }
    let work = Work::of(plan)?;
    let views = (0..work.jobs.len()).map(|job| weights.get(&work.weight(plan, job)?.name));
    let views: Vec<Option<&WeightView<'_>>> = views.collect();
    let sink = CompareSink {
        views: &views,
        different: Mutex::new(BTreeMap::new()),
        bytes: AtomicU64::new(0),
        progress: options.progress,
    };
    let (sums, hashes) = run((plan, &|_| true), &work, &sink, options, (None, None))?;
    findings.extend(sink.findings());
    let bytes = sink.bytes.load(Ordering::Relaxed);

    let errors = errors::encode(&weight_errors(plan, &work, &sums));
    findings.extend(opaque(artifact, names::ERRORS_ENTRY, &errors));
    for (name, bytes) in plan.compiled.iter().flat_map(|c| &c.sections) {
        findings.extend(opaque(artifact, name, bytes));
    }
    if findings.is_empty() && plan.partition.is_some() {
        // The planes are equal, so the digests of the file's are those of the source's.
        let mut wholes = BTreeMap::new();
        for (job, view) in views.iter().enumerate().filter_map(|(j, v)| Some((j, (*v)?))) {
            let digest = view.digest().map_err(|e| {
                Failure::plain(FailureKind::Failed, format!("cannot read {}: {e}", view.name()))
            })?;
            wholes.insert(job, digest);
        }
        let wholes = whole_digests(plan, &work, &wholes);
        let table = final_partition(plan, &wholes).map(|t| t.encode()).unwrap_or_default();
        findings.extend(opaque(artifact, names::PARTITION_ENTRY, &table));
    }
    findings.extend(files(plan, artifact, &hashes)?);
    let mut manifest = final_manifest(plan, &hashes);
    take_over(artifact, &mut manifest);
    if findings.is_empty() {
        // A file made from other bytes differs here too; the lines above name the cause better.
        findings.extend(opaque(artifact, names::MANIFEST_ENTRY, &manifest.to_bytes()));
    }
    if findings.is_empty() {
        findings.extend(tables(plan, artifact, path)?);
    }
    Ok(Comparison { weights: work.jobs.len(), bytes, findings })
}

/// The file's own manifest, if it can be read.
fn stored_manifest(artifact: &Artifact) -> Option<manifest::Manifest> {
    manifest::Manifest::parse(artifact.find(names::MANIFEST_ENTRY)?.plane(0)).ok()
}

/// Takes over how many cache blocks the file was set to, the one value that no conversion decides, and that an earlier
/// version stated no digest of the tables.
fn take_over(artifact: &Artifact, planned: &mut manifest::Manifest) {
    let Some(stored) = stored_manifest(artifact) else { return };
    planned.tables = planned.tables.filter(|_| stored.tables.is_some());
    if let (Some(stored), Some(planned)) = (stored.graphs, planned.graphs.as_mut()) {
        planned.kv.blocks = stored.kv.blocks;
    }
}

/// Differences between the planned directory and the file's.
fn directory(plan: &Plan, artifact: &Artifact, weights: &Weights<'_>) -> Vec<Diagnostic> {
    let mut missing = Vec::new();
    let mut findings = Vec::new();
    // A recipe other than the file's changes many weights alike: one line for all of them.
    let mut others: BTreeMap<(String, String), Vec<&str>> = BTreeMap::new();
    for (assigned, weight) in plan.assignment.stored(&plan.table) {
        let Some(entry) = weights.get(&weight.name) else {
            missing.push(weight.name.clone());
            continue;
        };
        if *entry.encoding() != *assigned.encoding {
            let pair = (entry.encoding().to_string(), assigned.encoding.to_string());
            others.entry(pair).or_default().push(&weight.name);
        } else if entry.shape().matrix() != weight.shape.matrix() {
            findings.push(finding(format!(
                "{} has shape {} in the file, {} in the source",
                weight.name,
                entry.shape(),
                weight.shape
            )));
        }
    }
    findings.extend(others.into_iter().map(|((stored, planned), names)| {
        let which = match names[..] {
            [one] => format!("{one} is"),
            _ => format!("{} weights are", names.len()),
        };
        let mut what =
            format!("{which} stored as {stored}, the source under the recipe gives {planned}");
        if names.len() > 1 {
            what.push_str(&format!(": {}", crate::diag::list(&names, 5)));
        }
        finding(what)
    }));
    let planned: std::collections::BTreeSet<&str> =
        (0..plan.layout.entries()).filter_map(|e| plan.layout.name(e)).collect();
    let extra: Vec<String> = artifact
        .entries()
        .map(|e| e.name().to_string())
        .filter(|name| !planned.contains(name.as_str()))
        .collect();
    if !missing.is_empty() {
        findings.push(finding(format!(
            "{} weights of the source are not in the file: {}",
            missing.len(),
            crate::diag::list(&missing, 5)
        )));
    }
    if !extra.is_empty() {
        findings.push(finding(format!(
            "{} entries of the file do not come from the source: {}",
            extra.len(),
            crate::diag::list(&extra, 5)
        )));
    }
    findings
}

fn finding(message: String) -> Diagnostic {
    Diagnostic::new("against", message)
}

/// Compares planes with the file's and remembers the first difference of each.
struct CompareSink<'a> {
    views: &'a [Option<&'a WeightView<'a>>],
    different: Mutex<BTreeMap<(usize, usize), Difference>>,
    bytes: AtomicU64,
    progress: &'a dyn Progress,
}

#[derive(Debug, Clone, Copy)]
struct Difference {
    first: u64,
    stored: u8,
    derived: u8,
    bytes: u64,
}

impl Sink for CompareSink<'_> {
    fn write(&self, job: usize, plane: usize, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let outside = || io::Error::other("the derived plane is longer than the stored one");
        let view = self.views.get(job).copied().flatten().ok_or_else(outside)?;
        let spec = view.encoding().planes.get(plane).ok_or_else(outside)?;
        let (_, cols) = view.shape().matrix().ok_or_else(outside)?;
        let row = spec.row_bytes(cols).filter(|n| *n > 0).ok_or_else(outside)?;
        let rows = offset / row..(offset + bytes.len() as u64).div_ceil(row);
        let stored = view.rows(plane, rows).map_err(|_| outside())?;
        let stored = &*stored;
        self.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        if stored == bytes {
            return Ok(());
        }
        let unequal = stored.iter().zip(bytes).enumerate().filter(|(_, (a, b))| a != b);
        let mut found: Option<Difference> = None;
        for (i, (&stored, &derived)) in unequal {
            let first = Difference { first: offset + i as u64, stored, derived, bytes: 0 };
            found.get_or_insert(first).bytes += 1;
        }
        if let Some(found) = found {
            let mut all = self.different.lock().unwrap_or_else(PoisonError::into_inner);
            all.entry((job, plane))
                .and_modify(|known| {
                    let bytes = known.bytes + found.bytes;
                    if found.first < known.first {
                        *known = found;
                    }
                    known.bytes = bytes;
                })
                .or_insert(found);
        }
        Ok(())
    }

    fn complete(&self, _job: usize, _sum: &ErrorSum) -> io::Result<()> {
        Ok(())
    }

    fn advance(&self, _job: usize, source_bytes: u64) {
        self.progress.encoded(source_bytes);
    }
}

impl CompareSink<'_> {
    fn findings(&self) -> Vec<Diagnostic> {
        let all = self.different.lock().unwrap_or_else(PoisonError::into_inner);
        let mut out: Vec<Diagnostic> = all
            .iter()
            .take(SHOWN)
            .filter_map(|(&(job, plane), d)| {
                let entry = self.views.get(job).copied().flatten()?;
                let role = &entry.encoding().planes.get(plane)?.role;
                Some(finding(format!(
                    "{} {role}: {} bytes differ, the first at {} (stored {:#04x}, derived {:#04x})",
                    entry.name(),
                    d.bytes,
                    d.first,
                    d.stored,
                    d.derived
                )))
            })
            .collect();
        if all.len() > SHOWN {
            out.push(finding(format!("{} more planes differ", all.len() - SHOWN)));
        }
        out
    }
}

fn opaque(artifact: &Artifact, name: &str, derived: &[u8]) -> Option<Diagnostic> {
    let entry = artifact.find(name)?;
    let stored = entry.plane(0);
    if stored == derived {
        return None;
    }
    let first = stored.iter().zip(derived).position(|(a, b)| a != b);
    let at = first.unwrap_or(stored.len().min(derived.len()));
    Some(finding(format!("{name} differs from the derived one, first at byte {at}")))
}

/// Side files and digests of the source.
fn files(plan: &Plan, artifact: &Artifact, hashes: &[FileDigest]) -> Result<Vec<Diagnostic>> {
    let mut findings = Vec::new();
    for file in &plan.sources.side_files() {
        let bytes = plan.sources.read_side_file(file)?;
        let name = format!("{}{}", names::FILE_PREFIX, file.path);
        match artifact.find(&name) {
            None if bytes.is_empty() => {}
            None => findings.push(finding(format!(
                "{} is a side file of the source, and the file does not hold it",
                file.path
            ))),
            Some(entry) if entry.plane(0) != bytes => {
                findings.push(finding(format!("{} differs from the source's", file.path)));
            }
            Some(_) => {}
        }
    }
    let manifest = stored_manifest(artifact);
    let recorded: BTreeMap<&str, [u8; 32]> = manifest
        .iter()
        .flat_map(|m| &m.source.files)
        .map(|f| (f.path.as_str(), f.sha256.0))
        .collect();
    for hash in hashes {
        if let Some(known) = recorded.get(hash.path.as_str())
            && *known != hash.sha256
        {
            findings.push(finding(format!(
                "{}: sha256 {} in the source, {} in the manifest",
                hash.path,
                hash.hex(),
                digests::hex(known)
            )));
        }
    }
    Ok(findings)
}

/// Header, strings and tables: everything before the data.
fn tables(plan: &Plan, artifact: &Artifact, path: &Path) -> Result<Vec<Diagnostic>> {
    let Some(digest) = artifact.meta_text(names::DIGEST_KEY) else { return Ok(Vec::new()) };
    let before;
    let layout = match stored_manifest(artifact) {
        // Written before manifests stated the digest of the tables, perhaps before files carried a vocabulary section,
        // which is no fault.
        Some(stored) if stored.tables.is_none() => {
            before = plan.earlier_layout(artifact.vocab_summary().is_some())?;
            &before
        }
        _ => &plan.layout,
    };
    let planned = layout
        .tables_with(names::DIGEST_KEY, &digest.to_string())
        .ok_or_else(|| Failure::plain(FailureKind::Failed, "the digest does not fit its place"))?;
    let stored = artifact.table_bytes(planned.len());
    if stored == planned {
        return Ok(Vec::new());
    }
    let at = stored.iter().zip(&planned).position(|(a, b)| a != b).unwrap_or(stored.len());
    Ok(vec![finding(format!("{}: the tables differ, first at byte {at}", path.display()))])
}
