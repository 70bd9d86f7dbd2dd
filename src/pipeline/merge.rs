//! Puts the parts of a conversion together: the file that one machine would have written, without the source.
//!
//! A part is not trusted: its record and its digests are checked before use, every entry is compared with its digest while
//! it is copied, and the tables that all parts together give must be those that every part was planned for.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::prelude::*;

use super::convert::write_opaque;
use super::{disk, journal};
use crate::artifact::digests::{self, EntryDigest};
use crate::artifact::errors::{self, WeightError};
use crate::artifact::manifest::Manifest;
use crate::artifact::part::{Part, PartWeight};
use crate::artifact::partition::Partition;
use crate::artifact::{
    Artifact, Contents, EntrySpec, Layout, MetaValue, Writer, layout as names, same_file,
};
use crate::diag::{Diagnostic, Failure, FailureKind, Problems, Result, count, list};
use crate::hash;

/// What was put together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merged {
    /// The file.
    pub path: PathBuf,
    /// Its size.
    pub file_bytes: u64,
    /// Root digest, which covers every entry.
    pub digest: [u8; 32],
    /// Parts.
    pub parts: usize,
    /// Weights of all parts.
    pub weights: usize,
}

/// A part that was opened.
struct Opened {
    path: PathBuf,
    artifact: Artifact,
    record: Part,
    digests: Vec<EntryDigest>,
}

impl Opened {
    fn shown(&self) -> String {
        self.path.display().to_string()
    }

    /// An entry's bytes, if they are those that the part's digests tell.
    fn entry(&self, name: &str) -> Result<&[u8]> {
        let entry = self.artifact.find(name);
        let digest = self.digests.iter().find(|d| d.name == name);
        match (entry, digest) {
            (Some(entry), Some(digest)) if digests::of_entry(&entry) == digest.sha256 => {
                Ok(entry.plane(0))
            }
            _ => Err(self.fault(format!("its entry {name} is missing or damaged"))),
        }
    }

    fn fault(&self, what: String) -> Failure {
        let problem = Diagnostic::new("part", format!("{}: {what}", self.shown()))
            .help(format!("convert again with --part {}/{}", self.record.index, self.record.parts));
        Failure::one(FailureKind::Invalid, "the parts cannot be put together", problem)
    }
}

/// Puts all parts of a conversion together as `out`. Setting `cancelled` stops soon. Runs on the current pool of threads.
///
/// # Errors
/// Usage (2): files that are no parts, of different conversions, twice or not all there, by name; an output that is one of
/// the parts. Invalid (4): a damaged part. Failed (1): too little space, I/O, a signal. Then `out` is as it was.
pub fn merge(paths: &[PathBuf], out: &Path, cancelled: &AtomicBool) -> Result<Merged> {
    if let Some(part) = same_file(out, paths.iter().map(PathBuf::as_path)) {
        let problem =
            Diagnostic::new("output", format!("the output is the part {}", part.display()))
                .help("name another output file");
        let headline = "the output would replace what it is made of";
        return Err(Failure::one(FailureKind::Usage, headline, problem));
    }
    let parts = open(paths)?;
    agree(&parts)?;
    let Some(first) = parts.first() else {
        return Err(Failure::plain(FailureKind::Usage, "there are no parts"));
    };
    let manifest = Manifest::parse(first.entry(names::MANIFEST_ENTRY)?)
        .map_err(|e| first.fault(format!("its manifest: {e}")))?;
    let partition = partition(first)?;
    let contents = contents(&parts, first)?;
    let layout = Layout::plan(&contents)?;
    if journal::identity_of(&layout, &manifest, partition.as_ref()) != first.record.plan {
        let what = "together the parts are not the file that they were planned for";
        let problem = Diagnostic::new("part", what).help("make all parts again");
        let headline = "the parts cannot be put together";
        return Err(Failure::one(FailureKind::Invalid, headline, problem));
    }
    disk::check_room(out, layout.file_bytes())?;
    let writer = Writer::create(out, layout)?;
    let known = copy(&parts, &writer, cancelled)?;
    let weights = finish(&parts, first, &writer, manifest, partition)?;
    let digest = digests::seal(&writer, &known)?;
    let file_bytes = writer.layout().file_bytes();
    let path = writer.finish()?;
    Ok(Merged { path, file_bytes, digest, parts: parts.len(), weights })
}

/// Opens all parts, in the order of their numbers; problems of all files together.
fn open(paths: &[PathBuf]) -> Result<Vec<Opened>> {
    let mut problems = Problems::new();
    let mut parts = Vec::new();
    for path in paths {
        let mut problem = |what: String| {
            problems.push(Diagnostic::new("part", format!("{}: {what}", path.display())));
        };
        let artifact = match Artifact::open(path) {
            Ok(artifact) => artifact,
            Err(error) => {
                problems.push(Diagnostic::new("part", error.to_string()));
                continue;
            }
        };
        match Part::of(&artifact) {
            Ok(Some((record, digests))) => {
                parts.push(Opened { path: path.clone(), artifact, record, digests });
            }
            Ok(None) => {
                problem("it is no part of a conversion (radpack convert --part I/N)".into())
            }
            Err(error) => problem(format!("its record: {error}")),
        }
    }
    parts.sort_by_key(|part| part.record.index);
    problems.finish(FailureKind::Usage, "these files cannot be put together", parts)
}

/// Whether the parts are those of one conversion, all of them, once each, made from the same files.
fn agree(parts: &[Opened]) -> Result<()> {
    let mut problems = Problems::new();
    let Some(first) = parts.first() else { return Ok(()) };
    let mut files: BTreeMap<&str, (&[u8; 32], &Opened)> = BTreeMap::new();
    let mut seen: BTreeMap<u32, &Opened> = BTreeMap::new();
    for part in parts {
        let record = &part.record;
        if (record.plan, record.parts) != (first.record.plan, first.record.parts) {
            let what = format!(
                "{} (part {}) and {} (part {}) are of different conversions: another source, recipe, version or number of parts",
                first.shown(),
                first.record.said(),
                part.shown(),
                record.said()
            );
            problems.push(Diagnostic::new("part", what));
            continue;
        }
        if let Some(other) = seen.insert(record.index, part) {
            let what =
                format!("{} and {} are both part {}", other.shown(), part.shown(), record.said());
            problems.push(Diagnostic::new("part", what).help("name every part once"));
        }
        for file in &record.files {
            match files.get(file.name.as_str()) {
                Some((digest, other)) if **digest != file.sha256 => {
                    let (a, b) = (digests::hex(digest), digests::hex(&file.sha256));
                    let what = format!(
                        "{} was not the same file everywhere: sha256 {}… for {}, {}… for {}",
                        file.name,
                        a.get(..16).unwrap_or_default(),
                        other.shown(),
                        b.get(..16).unwrap_or_default(),
                        part.shown()
                    );
                    let help = "give every machine the same source, and make those parts again";
                    problems.push(Diagnostic::new("part", what).help(help));
                }
                Some(_) => {}
                None => drop(files.insert(&file.name, (&file.sha256, part))),
            }
        }
    }
    let all = first.record.parts;
    let missing: Vec<String> =
        (1..=all).filter(|i| !seen.contains_key(i)).map(|i| format!("{i}/{all}")).collect();
    if problems.is_empty() && !missing.is_empty() {
        let what = format!(
            "{} of {} parts are missing: {}",
            count(missing.len() as u64),
            count(all.into()),
            list(&missing, 10)
        );
        problems
            .push(Diagnostic::new("part", what).help("make them with radpack convert --part I/N"));
    }
    problems.finish(FailureKind::Usage, "these files are not the parts of one conversion", ())
}

fn partition(first: &Opened) -> Result<Option<Partition>> {
    if first.artifact.find(names::PARTITION_ENTRY).is_none() {
        return Ok(None);
    }
    let bytes = first.entry(names::PARTITION_ENTRY)?;
    Partition::decode(bytes, &hash::sha256([bytes]))
        .map(Some)
        .map_err(|e| first.fault(format!("its table of devices: {e}")))
}

/// What the whole file holds.
fn contents(parts: &[Opened], first: &Opened) -> Result<Contents> {
    let owned =
        first.artifact.contents().ok_or_else(|| first.fault("its texts are no UTF-8".into()))?;
    let mut placed: BTreeMap<u64, EntrySpec> = BTreeMap::new();
    for part in parts {
        let specs = part.artifact.contents().map(|c| c.entries).unwrap_or_default();
        let own = |e: &EntrySpec| e.name != names::PART_ENTRY && e.name != names::DIGESTS_ENTRY;
        let specs: Vec<EntrySpec> = specs.into_iter().filter(own).collect();
        if specs.len() != part.record.entries.len() {
            return Err(part.fault("it does not place every entry".into()));
        }
        for (spec, at) in specs.into_iter().zip(&part.record.entries) {
            let spec = EntrySpec { layer: at.layer, expert: at.expert, slot: at.slot, ..spec };
            if let Some(other) = placed.insert(at.position, spec) {
                let what =
                    format!("{} has the place of another entry, {}", at.position, other.name);
                return Err(part.fault(what));
            }
        }
    }
    let others: Vec<EntrySpec> = placed.values().cloned().collect();
    // One place is left, that of the list of digests.
    let all = others.len() as u64 + 1;
    let free = (0..all).find(|at| !placed.contains_key(at));
    let (Some(free), true) = (free, first.record.directory == all) else {
        let what = format!("{} entries of {} are there", others.len() + 1, first.record.directory);
        return Err(first.fault(what));
    };
    placed.insert(free, digests::entry_spec(&others));
    let metadata = owned.metadata.into_iter().filter(|(key, _)| key != names::PART_KEY);
    let metadata = metadata.map(|(key, value)| match (key.as_str(), &value) {
        (names::DIGEST_KEY, MetaValue::Text(text)) => {
            let later = MetaValue::Later(text.len());
            (key, later)
        }
        _ => (key, value),
    });
    let data = first.record.data.iter().map(|&at| usize::try_from(at).unwrap_or(usize::MAX));
    let data: Vec<usize> = data.collect();
    let distinct = data.iter().copied().filter(|at| *at < placed.len()).collect::<BTreeSet<_>>();
    if !data.is_empty() && (data.len() != placed.len() || distinct.len() != placed.len()) {
        return Err(first.fault("its order of the data names not every entry once".into()));
    }
    Ok(Contents {
        metadata: metadata.collect(),
        entries: placed.into_values().collect(),
        data,
        ..owned
    })
}

/// Copies every entry but those that [`finish`] makes, and checks it on the way. Returns the digests by position.
fn copy(
    parts: &[Opened],
    writer: &Writer,
    cancelled: &AtomicBool,
) -> Result<BTreeMap<usize, [u8; 32]>> {
    let made = [
        names::PART_ENTRY,
        names::DIGESTS_ENTRY,
        names::MANIFEST_ENTRY,
        names::ERRORS_ENTRY,
        names::PARTITION_ENTRY,
    ];
    let mut jobs = Vec::new();
    for part in parts {
        let wanted: BTreeMap<&str, &[u8; 32]> =
            part.digests.iter().map(|d| (d.name.as_str(), &d.sha256)).collect();
        for entry in part.artifact.entries() {
            let name = entry.name().to_string();
            if made.contains(&name.as_str()) {
                continue;
            }
            let (Some(at), Some(digest)) =
                (writer.layout().entry(&name), wanted.get(name.as_str()))
            else {
                return Err(part.fault(format!("its entry {name} has no place or no digest")));
            };
            jobs.push((part, entry, at, **digest));
        }
    }
    let one =
        |(part, entry, at, digest): (&Opened, crate::artifact::Entry<'_>, usize, [u8; 32])| {
            if cancelled.load(Ordering::Relaxed) {
                let mut failure = Failure::plain(FailureKind::Failed, "stopped by a signal");
                failure.closing = Some("nothing was written".to_owned());
                return Err(failure);
            }
            for plane in 0..entry.encoding().planes.len() {
                writer.write(at, plane, 0, entry.plane(plane))?;
            }
            // Of what was written, not of what was read: a page that changes in between is found.
            if digests::of_written(writer, at)? != digest {
                return Err(
                    part.fault(format!("its entry {} is not what its digest tells", entry.name()))
                );
            }
            Ok((at, digest))
        };
    jobs.into_par_iter().map(one).collect()
}

/// Writes what follows from all parts together; the number of weights.
fn finish(
    parts: &[Opened],
    first: &Opened,
    writer: &Writer,
    mut manifest: Manifest,
    partition: Option<Partition>,
) -> Result<usize> {
    let weights: BTreeMap<&str, &PartWeight> = parts
        .iter()
        .flat_map(|part| &part.record.weights)
        .map(|weight| (weight.name.as_str(), weight))
        .collect();
    let bytes = first.entry(names::ERRORS_ENTRY)?;
    let mut errors: Vec<WeightError> = errors::decode(bytes, &hash::sha256([bytes]))
        .map_err(|e| first.fault(format!("its list of errors: {e}")))?;
    for error in &mut errors {
        let Some(weight) = weights.get(error.weight.as_str()) else {
            return Err(first.fault(format!("no part has made {}", error.weight)));
        };
        (error.squared_error, error.squared) = (weight.squared_error, weight.squared);
    }
    write_opaque(writer, names::ERRORS_ENTRY, &errors::encode(&errors))?;
    if let Some(mut partition) = partition {
        partition.set_digests(&weights.iter().map(|(name, w)| (*name, w.whole)).collect());
        write_opaque(writer, names::PARTITION_ENTRY, &partition.encode())?;
    }
    let files = parts.iter().flat_map(|part| &part.record.files);
    let files: BTreeMap<&str, [u8; 32]> = files.map(|f| (f.name.as_str(), f.sha256)).collect();
    let listed = manifest.source.files.iter().map(|f| &f.path);
    let unread: Vec<&String> = listed.filter(|path| !files.contains_key(path.as_str())).collect();
    if let Some(path) = unread.first() {
        return Err(first.fault(format!("no part has read {path}")));
    }
    manifest.set_digests(&files);
    write_opaque(writer, names::MANIFEST_ENTRY, &manifest.to_bytes())?;
    Ok(weights.len())
}
