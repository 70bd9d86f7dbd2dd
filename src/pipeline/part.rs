//! What one of several machines makes of a plan, and the container that it leaves for [`merge`](super::merge()).
//!
//! Weights are shared out by the source files that hold them, so that a machine reads (and hashes) few of the files:
//! sorted by file, then cut into runs of about equal bytes. Weights that share a scale over all of them stay together.
//! Which part a weight is in follows from the plan and the number of parts alone.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::convert::{Made, write_opaque, write_side_files};
use super::{IMATRIX_FILE, Plan, journal};
use crate::artifact::digests::EntryDigest;
use crate::artifact::errors::{self, WeightError};
use crate::artifact::part::{MAX_PARTS, Part, PartEntry, PartWeight};
use crate::artifact::{Contents, EntrySpec, Layout, Writer, digests, layout as names};
use crate::diag::{Diagnostic, Failure, FailureKind, Result, count};
use crate::hash;
use crate::quantize::Encoder;

/// One part of a conversion, planned.
#[derive(Debug)]
pub struct PartPlan {
    /// Where everything of the part's own file lies.
    pub layout: Layout,
    /// Stored weights that it makes.
    pub weights: usize,
    /// Their bytes in the checkpoint.
    pub source_bytes: u64,
    /// Bytes of the source files that it reads to their ends.
    pub hashed_bytes: u64,
    /// What it will say of itself; digests and sums are zero.
    record: Part,
    /// Its weights, by index in the table.
    indices: BTreeSet<usize>,
    /// Source files that it hashes.
    files: BTreeSet<String>,
}

/// `OUT.rad.part-2-of-4`
pub fn part_path(out: &Path, index: u32, parts: u32) -> PathBuf {
    let mut name = out.as_os_str().to_owned();
    name.push(format!(".part-{index}-of-{parts}"));
    PathBuf::from(name)
}

impl PartPlan {
    /// Part `index` (from 1) of `parts`.
    ///
    /// # Errors
    /// Usage (2): a number out of range.
    pub fn of(plan: &Plan, index: u32, parts: u32) -> Result<PartPlan> {
        if index == 0 || index > parts || parts > MAX_PARTS {
            let parts = count(parts.into());
            let problem = Diagnostic::new("part", format!("there is no part {index} of {parts}"))
                .help(format!(
                    "parts count from 1: 1/{parts} … {parts}/{parts}, at most {MAX_PARTS}"
                ));
            let headline = "this part of the conversion does not exist";
            return Err(Failure::one(FailureKind::Usage, headline, problem));
        }
        let units = units(plan);
        let indices = share(&units, index, parts);
        let files = files(plan, &units, &indices, index);
        let record = record(plan, &indices, &files, index, parts);
        let contents = contents(plan, &record, &indices);
        let stored = plan.assignment.stored(&plan.table);
        let own = stored.filter(|(assigned, _)| indices.contains(&assigned.weight));
        let source_bytes = own.map(|(_, weight)| weight.source_bytes().unwrap_or(0)).sum();
        let hashed = plan.sources.files().into_iter().filter(|(path, _)| files.contains(path));
        Ok(PartPlan {
            layout: Layout::plan(&contents)?,
            weights: indices.len(),
            source_bytes,
            hashed_bytes: hashed.map(|(_, bytes)| bytes).sum(),
            record,
            indices,
            files,
        })
    }

    /// Number of the part, and of all parts.
    pub fn number(&self) -> (u32, u32) {
        (self.record.index, self.record.parts)
    }

    /// Whether it makes the weight of that index.
    pub(super) fn makes(&self, weight: usize) -> bool {
        self.indices.contains(&weight)
    }

    /// Whether it hashes that file.
    pub(super) fn reads(&self, path: &str) -> bool {
        self.files.contains(path)
    }

    /// What its journal is for.
    pub(super) fn identity(&self) -> [u8; 32] {
        let (index, parts) = (self.record.index.to_le_bytes(), self.record.parts.to_le_bytes());
        hash::sha256([self.record.plan.as_slice(), &index, &parts])
    }

    /// Writes all entries that are no weights.
    pub(super) fn finish(&self, plan: &Plan, writer: &Writer, made: &Made) -> Result<()> {
        if self.record.index == 1 {
            write_side_files(plan, writer, &made.files)?;
            for (name, bytes) in plan.compiled.iter().flat_map(|c| &c.sections) {
                write_opaque(writer, name, bytes)?;
            }
            write_opaque(writer, names::ERRORS_ENTRY, &errors::encode(&no_errors(plan)))?;
            if let Some(partition) = &plan.partition {
                write_opaque(writer, names::PARTITION_ENTRY, &partition.encode())?;
            }
            write_opaque(writer, names::MANIFEST_ENTRY, &plan.manifest.to_bytes())?;
        }
        let mut record = self.record.clone();
        let found = plan.file_digests(&made.files);
        for file in &mut record.files {
            file.sha256 = found.get(file.name.as_str()).copied().ok_or_else(|| {
                let what = format!("{} was not hashed", file.name);
                Failure::plain(FailureKind::Failed, what)
            })?;
        }
        let errors: BTreeMap<&str, &WeightError> =
            made.errors.iter().map(|e| (e.weight.as_str(), e)).collect();
        for weight in &mut record.weights {
            weight.whole = made.wholes.get(&weight.name).copied().ok_or_else(|| {
                let what = format!("{} was not made", weight.name);
                Failure::plain(FailureKind::Failed, what)
            })?;
            if let Some(error) = errors.get(weight.name.as_str()) {
                (weight.squared_error, weight.squared) = (error.squared_error, error.squared);
            }
        }
        write_opaque(writer, names::PART_ENTRY, &record.encode())
    }
}

/// Weights that are made together, and what they are read from.
struct Unit {
    /// Source files in byte order; all of them where a weight's place is not one file a tensor.
    files: Vec<String>,
    /// Bytes in the checkpoint.
    bytes: u64,
    /// Indices in the table.
    weights: Vec<usize>,
}

/// All units, in the order of their files.
fn units(plan: &Plan) -> Vec<Unit> {
    let mut units: Vec<Unit> = Vec::new();
    let mut shared: BTreeMap<usize, usize> = BTreeMap::new();
    let tensors = || plan.sources.files().into_iter().map(|(path, _)| path);
    for (assigned, weight) in plan.assignment.stored(&plan.table) {
        let share = assigned.share.filter(|_| Encoder::needs_peak(&assigned.method));
        let at = share.and_then(|s| shared.get(&s).copied()).unwrap_or(units.len());
        if at == units.len() {
            units.push(Unit { files: Vec::new(), bytes: 0, weights: Vec::new() });
            shared.extend(share.map(|s| (s, at)));
        }
        let Some(unit) = units.get_mut(at) else { continue };
        let files = plan.sources.files_of(weight);
        unit.files.extend(files.unwrap_or_else(|| tensors().collect()));
        unit.bytes = unit.bytes.saturating_add(weight.source_bytes().unwrap_or(0));
        unit.weights.push(assigned.weight);
    }
    for unit in &mut units {
        unit.files.sort();
        unit.files.dedup();
    }
    // Stable: within a file, the order of the plan.
    units.sort_by(|a, b| a.files.cmp(&b.files));
    units
}

/// The weights of part `index`: a unit belongs to the part that its middle byte lies in.
fn share(units: &[Unit], index: u32, parts: u32) -> BTreeSet<usize> {
    let all: u128 = units.iter().map(|u| u128::from(u.bytes)).sum();
    let mut before: u128 = 0;
    let mut own = BTreeSet::new();
    for unit in units {
        let middle = before + u128::from(unit.bytes / 2);
        let part = middle * u128::from(parts) / all.max(1);
        if part.min(u128::from(parts) - 1) == u128::from(index - 1) {
            own.extend(&unit.weights);
        }
        before += u128::from(unit.bytes);
    }
    own
}

/// The files that a part vouches for: those that its weights are read from, and in part 1 those that no weight is.
fn files(plan: &Plan, units: &[Unit], own: &BTreeSet<usize>, index: u32) -> BTreeSet<String> {
    let of = |wanted: &dyn Fn(&Unit) -> bool| -> BTreeSet<String> {
        units.iter().filter(|u| wanted(u)).flat_map(|u| u.files.iter().cloned()).collect()
    };
    let mut files = of(&|unit| unit.weights.iter().any(|w| own.contains(w)));
    if index == 1 {
        let read = of(&|_| true);
        let rest = plan.sources.files().into_iter().map(|(path, _)| path);
        files.extend(rest.filter(|path| !read.contains(path)));
    }
    files
}

fn record(
    plan: &Plan,
    own: &BTreeSet<usize>,
    files: &BTreeSet<String>,
    index: u32,
    parts: u32,
) -> Part {
    let contents = &plan.contents;
    let weights = plan.assignment.stored(&plan.table);
    let weights = weights.filter(|(assigned, _)| own.contains(&assigned.weight));
    let weight = |name: &str| PartWeight {
        name: name.to_owned(),
        whole: [0; 32],
        squared_error: 0.0,
        squared: 0.0,
    };
    let entry = |(position, e): (u64, &EntrySpec)| PartEntry {
        position,
        layer: e.layer,
        expert: e.expert,
        slot: e.slot,
    };
    // What is made of a file of the source is known where the file is.
    let known = |path: &String| {
        files.contains(path)
            || path == IMATRIX_FILE
            || index == 1 && plan.sources.main.made_file(path).is_some()
    };
    let side = plan.manifest.files.iter().map(|f| &f.path);
    let listed: BTreeSet<&String> =
        plan.manifest.source.files.iter().map(|f| &f.path).chain(side).collect();
    let file = |path: &&String| EntryDigest { name: (*path).to_owned(), sha256: [0; 32] };
    Part {
        index,
        parts,
        plan: journal::identity(plan),
        directory: contents.entries.len() as u64,
        entries: positions(plan, own, index).map(entry).collect(),
        data: match index {
            1 => contents.data.iter().map(|&at| at as u64).collect(),
            _ => Vec::new(),
        },
        files: listed.iter().filter(|path| known(path)).map(file).collect(),
        weights: weights.map(|(_, w)| weight(&w.name)).collect(),
    }
}

/// The entries of a part with their positions in the whole directory: those of its weights, and in part 1 all that belong
/// to no weight, but for the digests.
fn positions<'a>(
    plan: &'a Plan,
    own: &BTreeSet<usize>,
    index: u32,
) -> impl Iterator<Item = (u64, &'a EntrySpec)> {
    let mut weights = BTreeSet::new();
    let mut mine = BTreeSet::new();
    for (assigned, weight) in plan.assignment.stored(&plan.table) {
        let entries = plan.entries_of(&weight.name);
        if own.contains(&assigned.weight) {
            mine.extend(entries.iter().copied());
        }
        weights.extend(entries);
    }
    let rest = move |at: usize, name: &str| {
        index == 1 && !weights.contains(&at) && name != names::DIGESTS_ENTRY
    };
    let all = plan.contents.entries.iter().enumerate();
    all.filter(move |(at, e)| mine.contains(at) || rest(*at, &e.name)).map(|(at, e)| (at as u64, e))
}

fn contents(plan: &Plan, record: &Part, own: &BTreeSet<usize>) -> Contents {
    let whole = &plan.contents;
    let at_model_level =
        |(_, e): (u64, &EntrySpec)| EntrySpec { layer: -1, expert: -1, slot: 0, ..e.clone() };
    let mut entries: Vec<EntrySpec> =
        positions(plan, own, record.index).map(at_model_level).collect();
    entries.push(EntrySpec::opaque(names::PART_ENTRY, record.encoded_len()));
    entries.push(digests::entry_spec(&entries));
    let mut metadata = whole.metadata.clone();
    metadata.push(Part::metadata(record.index, record.parts));
    let first = record.index == 1;
    Contents {
        metadata,
        entries,
        data: Vec::new(),
        vocab: whole.vocab.clone().filter(|_| first),
        profile: if first { whole.profile.clone() } else { Vec::new() },
        ..whole.clone()
    }
}

/// The errors of all quantized weights, in the order of the file, with sums of zero.
fn no_errors(plan: &Plan) -> Vec<WeightError> {
    let names = plan.assignment.quantized(&plan.table).map(|(_, w)| w.name.clone());
    names.map(|weight| WeightError { weight, squared_error: 0.0, squared: 0.0 }).collect()
}
