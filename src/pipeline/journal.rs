//! `OUT.partial.journal`: what of a partial file can be believed when a conversion goes on with it.
//!
//! One JSON document a line: what is being written, then the digest of every source file that was read to its end, and of
//! every weight that is complete. A line is written after the bytes that it speaks of; nothing is brought to the disk, since
//! nothing is believed: a conversion that resumes hashes the source and the kept entries again. Torn and unknown lines
//! are passed over.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::convert::Work;
use super::{IMATRIX_FILE, Plan};
use crate::artifact::errors::WeightError;
use crate::artifact::manifest::{Manifest, Sha256Hex};
use crate::artifact::partition::Partition;
use crate::artifact::{Layout, Writer, digests};
use crate::checkpoint::FileDigest;
use crate::diag::{Failure, Result};
use crate::hash;
use crate::quantize::{Encoder, ErrorSum};

/// Version of the lines.
const VERSION: u32 = 1;

/// Largest journal that is read: a thousand bytes for each of 250,000 weights.
const MAX_BYTES: u64 = 256 << 20;

/// One line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
enum Line {
    /// The first line.
    Conversion {
        /// [`VERSION`].
        version: u32,
        /// [`identity`] of the plan.
        plan: Sha256Hex,
    },
    /// A source file.
    File {
        /// Its path among all files.
        path: String,
        /// Digest of its bytes.
        sha256: Sha256Hex,
    },
    /// A weight all of whose planes are in the partial file.
    Weight {
        /// Its name.
        name: String,
        /// Positions of its entries in the directory, and their digests.
        entries: Vec<(usize, Sha256Hex)>,
        /// Digest of the whole weight.
        whole: Sha256Hex,
        /// Σ(x − x̂)² and Σx², as bits: their digits are part of the output.
        error: [u64; 2],
    },
}

/// A weight that an earlier run completed.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Kept {
    /// Its entries' digests, by position.
    pub entries: BTreeMap<usize, [u8; 32]>,
    /// Digest of the whole weight.
    pub whole: [u8; 32],
    /// What its quantization cost.
    pub error: WeightError,
}

/// What an earlier run wrote down.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Recovered {
    files: BTreeMap<String, [u8; 32]>,
    weights: BTreeMap<String, Kept>,
}

/// What a plan writes, except for digests: two plans of one identity write one file from the same source.
pub(super) fn identity(plan: &Plan) -> [u8; 32] {
    identity_of(&plan.layout, &plan.manifest, plan.partition.as_ref())
}

/// [`identity`] of a file's tables, manifest and table of devices, whatever digests the last two hold.
pub(super) fn identity_of(
    layout: &Layout,
    manifest: &Manifest,
    partition: Option<&Partition>,
) -> [u8; 32] {
    let manifest = manifest.placeholder().to_bytes();
    let partition = partition.map(|p| p.placeholder().encode()).unwrap_or_default();
    hash::sha256([layout.tables(), &manifest, &partition])
}

/// The journal of a partial file, which tells what of it can be kept.
pub fn path(partial: &Path) -> PathBuf {
    let mut name = partial.as_os_str().to_owned();
    name.push(".journal");
    PathBuf::from(name)
}

impl Recovered {
    /// What the journal of a plan of this identity says; `None` for another plan's, and for none that can be read.
    pub(super) fn read(path: &Path, plan: [u8; 32]) -> Option<Recovered> {
        let file = File::open(path).ok()?;
        if file.metadata().ok()?.len() > MAX_BYTES {
            return None;
        }
        let mut lines = BufReader::new(file.take(MAX_BYTES)).split(b'\n');
        let mut next = || Some(serde_json::from_slice::<Line>(&lines.next()?.ok()?).ok());
        match next()?? {
            Line::Conversion { version: VERSION, plan: written } if written.0 == plan => {}
            _ => return None,
        }
        let mut found = Recovered::default();
        while let Some(line) = next() {
            match line {
                Some(Line::File { path, sha256 }) => drop(found.files.insert(path, sha256.0)),
                Some(Line::Weight { name, entries, whole, error: [squared_error, squared] }) => {
                    let kept = Kept {
                        entries: entries.into_iter().map(|(at, sha256)| (at, sha256.0)).collect(),
                        whole: whole.0,
                        error: WeightError {
                            weight: name.clone(),
                            squared_error: f64::from_bits(squared_error),
                            squared: f64::from_bits(squared),
                        },
                    };
                    found.weights.insert(name, kept);
                }
                Some(Line::Conversion { .. }) | None => {}
            }
        }
        Some(found)
    }

    /// The weights that need not be made again, by index in the table: their source files are those of the earlier run
    /// by digest, and the partial file holds the bytes that it wrote. Of weights that share a scale all are there, or none.
    /// Their entries count as written.
    ///
    /// # Errors
    /// An entry that was written already: a fault of the caller.
    pub(super) fn usable(
        mut self,
        plan: &Plan,
        work: &Work<'_>,
        writer: &Writer,
        files: &[FileDigest],
    ) -> Result<BTreeMap<usize, Kept>> {
        let same = |path: &str| {
            let now = files.iter().find(|f| f.path == path).map(|f| f.sha256);
            now.is_some() && now == self.files.get(path).copied()
        };
        let unchanged: BTreeSet<&str> =
            files.iter().map(|f| f.path.as_str()).filter(|path| same(path)).collect();
        let mut candidates = Vec::new();
        for (job, index) in work.weights.iter().enumerate() {
            let Some(weight) = plan.table.weights.get(*index) else { continue };
            let weighed = plan.importances.entries.contains_key(index);
            let sources = plan.sources.files_of(weight).unwrap_or_default();
            let from_here = !sources.is_empty()
                && sources.iter().all(|f| unchanged.contains(f.as_str()))
                && (!weighed || unchanged.contains(IMATRIX_FILE));
            let there = self
                .weights
                .get(&weight.name)
                .is_some_and(|kept| kept.entries.keys().copied().eq(work.targets[job].positions()));
            if from_here && there {
                candidates.push((job, *index, weight.name.clone()));
            }
        }
        let intact: BTreeSet<usize> = candidates
            .par_iter()
            .filter(|(_, _, name)| {
                let holds = |(entry, digest): (&usize, &[u8; 32])| {
                    digests::of_written(writer, *entry).is_ok_and(|found| found == *digest)
                };
                self.weights.get(name).is_some_and(|kept| kept.entries.iter().all(holds))
            })
            .map(|(job, _, _)| *job)
            .collect();
        // A scale over several weights needs to read all of them.
        let torn: BTreeSet<usize> = work
            .jobs
            .iter()
            .enumerate()
            .filter(|(job, j)| Encoder::needs_peak(j.method) && !intact.contains(job))
            .filter_map(|(_, j)| j.share)
            .collect();
        let mut usable = BTreeMap::new();
        for (job, index, name) in candidates {
            let shares = work.jobs[job].share.is_some_and(|share| torn.contains(&share));
            if !intact.contains(&job) || shares && Encoder::needs_peak(work.jobs[job].method) {
                continue;
            }
            if let Some(kept) = self.weights.remove(&name) {
                kept.entries.keys().try_for_each(|entry| writer.keep(*entry))?;
                usable.insert(index, kept);
            }
        }
        Ok(usable)
    }
}

/// A journal that is being written; removed when dropped, unless it is to stay.
pub(super) struct Journal {
    file: Mutex<File>,
    path: PathBuf,
    stays: bool,
}

impl Journal {
    /// Begins a journal, or goes on with the one that is there.
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn open(
        partial: &Path,
        plan: [u8; 32],
        goes_on: bool,
        stays: bool,
    ) -> Result<Journal> {
        let path = path(partial);
        let fail = |e: io::Error| Failure::io("write", &path, &e);
        let mut options = OpenOptions::new();
        options.create(true).append(true);
        let mut file = options.open(&path).map_err(fail)?;
        if goes_on {
            // The last line may be torn.
            file.write_all(b"\n").map_err(fail)?;
        } else {
            file.set_len(0).map_err(fail)?;
        }
        let journal = Journal { file: Mutex::new(file), path: path.clone(), stays };
        if !goes_on {
            let line = Line::Conversion { version: VERSION, plan: Sha256Hex(plan) };
            journal.write(&line).map_err(fail)?;
        }
        Ok(journal)
    }

    fn write(&self, line: &Line) -> io::Result<()> {
        let mut bytes = serde_json::to_vec(line)?;
        bytes.push(b'\n');
        self.file.lock().unwrap_or_else(PoisonError::into_inner).write_all(&bytes)
    }

    /// A source file was hashed. A line that cannot be written costs a later run some work, this one nothing.
    pub(super) fn file(&self, digest: &FileDigest) {
        let line = Line::File { path: digest.path.clone(), sha256: Sha256Hex(digest.sha256) };
        let _ = self.write(&line);
    }

    /// A weight is complete.
    pub(super) fn weight(
        &self,
        name: &str,
        entries: &BTreeMap<usize, [u8; 32]>,
        whole: [u8; 32],
        sum: &ErrorSum,
    ) {
        let line = Line::Weight {
            name: name.to_owned(),
            entries: entries.iter().map(|(at, sha256)| (*at, Sha256Hex(*sha256))).collect(),
            whole: Sha256Hex(whole),
            error: [sum.squared_error().to_bits(), sum.squared().to_bits()],
        };
        let _ = self.write(&line);
    }

    /// The file is complete: nothing is left to go on with.
    pub(super) fn finish(mut self) {
        self.stays = false;
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        if !self.stays {
            // Nothing can be done about an error here; a journal of another plan is not believed.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torn_lines_and_journals_of_other_plans_are_passed_over() {
        let folder = tempfile::tempdir().expect("a folder");
        let partial = folder.path().join("x.rad.partial");
        let journal = Journal::open(&partial, [1; 32], false, true).expect("opens");
        let digest = FileDigest { path: "a".into(), bytes: 3, sha256: [5; 32] };
        journal.file(&digest);
        drop(journal);
        let at = path(&partial);
        let mut text = std::fs::read(&at).expect("reads");
        text.extend_from_slice(b"{\"what\":\"weight\",\"name\":\"w\",\"entr");
        std::fs::write(&at, &text).expect("writes");

        let journal = Journal::open(&partial, [1; 32], true, true).expect("opens");
        let entries = BTreeMap::from([(7, [8; 32])]);
        journal.weight("v", &entries, [9; 32], &ErrorSum::default());
        drop(journal);
        let found = Recovered::read(&at, [1; 32]).expect("it is this plan's");
        assert_eq!(found.files, BTreeMap::from([("a".to_owned(), [5; 32])]));
        assert_eq!(found.weights.keys().collect::<Vec<_>>(), ["v"]);
        assert_eq!((found.weights["v"].whole, &found.weights["v"].entries), ([9; 32], &entries));
        assert_eq!(Recovered::read(&at, [2; 32]), None);
        assert_eq!(Recovered::read(&folder.path().join("none"), [1; 32]), None);

        Journal::open(&partial, [1; 32], true, true).expect("opens").finish();
        assert!(!at.exists());
    }
}
