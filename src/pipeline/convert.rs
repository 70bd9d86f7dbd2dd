//! Executes a plan: hashes the source, streams the weights, seals the file.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::journal::{self, Journal, Kept, Recovered};
use super::shards::Target;
use super::{PartPlan, Plan, Progress, Reuse, disk};
use crate::artifact::errors::WeightError;
use crate::artifact::manifest::Manifest;
use crate::artifact::partition::Partition;
use crate::artifact::{Weights, Writer, digests, errors, layout as names};
use crate::checkpoint::{Checkpoint, FileDigest, Hashing};
use crate::diag::{Diagnostic, Failure, FailureKind, Result};
use crate::hash::{self, Item};
use crate::model::Weight;
use crate::quantize::{EncodeError, ErrorSum, ExecuteError, Job, Sink, Workers, execute};
use crate::recipe::Method;

/// How to run a conversion.
#[derive(Clone, Copy)]
pub struct ConvertOptions<'a> {
    /// Worker threads, at least one.
    pub threads: usize,
    /// Told how far the run is.
    pub progress: &'a dyn Progress,
    /// Set from a signal handler to stop soon.
    pub cancelled: &'a AtomicBool,
}

/// What a conversion made.
#[derive(Debug, Clone, PartialEq)]
pub struct Converted {
    /// The file.
    pub path: PathBuf,
    /// Its size.
    pub file_bytes: u64,
    /// Root digest, which covers every entry.
    pub digest: [u8; 32],
    /// Errors of the quantized weights, in directory order.
    pub errors: Vec<WeightError>,
    /// Weights that were copied out of an older artifact.
    pub reused: usize,
    /// Weights that were in the partial file already.
    pub resumed: usize,
}

/// What earlier runs left that need not be made again. The file is the same, byte for byte, with and without it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Earlier<'a> {
    /// An artifact that holds some of the weights.
    pub artifact: Option<&'a Reuse>,
    /// Whether to go on with a partial file: what it holds is verified. It then stays after a failure or a signal, too.
    pub partial: bool,
}

/// Writes the planned file to `out`.
///
/// # Errors
/// Too little space, an output that is one of the inputs, non-finite weights (all of them), I/O. Then `out` is as it
/// was.
pub fn convert(plan: &Plan, out: &Path, options: ConvertOptions<'_>) -> Result<Converted> {
    convert_from(plan, out, options, Earlier::default())
}

/// Writes the planned file to `out`, with what earlier runs made of it.
///
/// # Errors
/// As [`convert`].
pub fn convert_from(
    plan: &Plan,
    out: &Path,
    options: ConvertOptions<'_>,
    earlier: Earlier<'_>,
) -> Result<Converted> {
    make(plan, None, out, options, earlier)
}

/// Writes one part of the planned file to `out`, for [`merge`](super::merge()).
///
/// # Errors
/// As [`convert`].
pub fn convert_part(
    plan: &Plan,
    part: &PartPlan,
    out: &Path,
    options: ConvertOptions<'_>,
    earlier: Earlier<'_>,
) -> Result<Converted> {
    make(plan, Some(part), out, options, earlier)
}

/// The whole file, or one part.
fn make(
    plan: &Plan,
    part: Option<&PartPlan>,
    out: &Path,
    options: ConvertOptions<'_>,
    earlier: Earlier<'_>,
) -> Result<Converted> {
    if plan.sources.headers_only() {
        let what = "only the headers of the weights were fetched, which is enough for a plan";
        return Err(Failure::plain(FailureKind::Failed, what));
    }
    let layout = part.map_or(&plan.layout, |part| &part.layout);
    check_output(plan, out)?;
    disk::check_room(out, layout.file_bytes())?;
    let (writer, found) = match earlier.partial {
        true => Writer::resume(out, layout.clone())?,
        false => (Writer::create(out, layout.clone())?, false),
    };
    let partial = writer.partial().to_owned();
    write((plan, part), writer, found, options, earlier).map_err(|mut failure| {
        if earlier.partial {
            let stays = format!("{} stays: the same command goes on with it", partial.display());
            failure.closing = Some(stays);
        }
        failure
    })
}

/// The conversion itself; `found` says that the writer goes on with a partial file.
fn write(
    (plan, part): (&Plan, Option<&PartPlan>),
    writer: Writer,
    found: bool,
    options: ConvertOptions<'_>,
    earlier: Earlier<'_>,
) -> Result<Converted> {
    let identity = part.map_or_else(|| journal::identity(plan), PartPlan::identity);
    let at = journal::path(writer.partial());
    let recovered = if found { Recovered::read(&at, identity) } else { None };
    let log = Journal::open(writer.partial(), identity, recovered.is_some(), earlier.partial)?;
    let stored = earlier.artifact.map(Reuse::stored).transpose()?;
    let mut work = Work::of_part(plan, part)?;
    let reads = |path: &str| part.is_none_or(|part| part.reads(path));
    let mut hashed = None;
    if recovered.is_some() || stored.is_some() {
        // Only the digests of the source files tell whether an older weight is this one.
        let pool = pool(options.threads)?;
        let files =
            pool.install(|| hash_source(plan, &reads, options, options.cancelled, Some(&log)))?;
        if let Some(recovered) = recovered {
            let kept = pool.install(|| recovered.usable(plan, &work, &writer, &files))?;
            work.keep(plan, kept, options.progress);
        }
        if let (Some(reuse), Some(stored)) = (earlier.artifact, &stored) {
            let reusable = pool.install(|| reuse.weights(stored, plan, &files));
            work.reuse(plan, (reuse, stored), &reusable);
        }
        hashed = Some(files);
    }
    let sink = FileSink {
        plan,
        work: &work,
        writer: &writer,
        log: &log,
        digests: Mutex::new(work.kept_entries()),
        wholes: Mutex::new(BTreeMap::new()),
        waiting: Mutex::default(),
        progress: options.progress,
    };
    let (sums, files) = run((plan, &reads), &work, &sink, options, (hashed, Some(&log)))?;
    sink.finish(&pool(options.threads)?)?;
    // Weights are read through a map and hashed by another reading of the file: both were of the same bytes if nobody
    // wrote to it since it was opened.
    plan.sources.check_unchanged(&reads)?;
    let known = sink.digests.into_inner().unwrap_or_else(PoisonError::into_inner);
    let wholes = sink.wholes.into_inner().unwrap_or_else(PoisonError::into_inner);

    let (reused, resumed) = (work.errors.len(), work.kept.len());
    let errors = weight_errors(plan, &work, &sums);
    let made = Made { files, errors, wholes: whole_digests(plan, &work, &wholes) };
    match part {
        None => finish(plan, &writer, &made)?,
        Some(part) => part.finish(plan, &writer, &made)?,
    }
    let digest = digests::seal(&writer, &known)?;
    let file_bytes = writer.layout().file_bytes();
    let path = writer.finish()?;
    log.finish();
    Ok(Converted { path, file_bytes, digest, errors: made.errors, reused, resumed })
}

/// What is known when all weights are encoded.
pub(super) struct Made {
    /// Digests of the source files that were read.
    pub files: Vec<FileDigest>,
    /// Errors of the quantized weights, in directory order.
    pub errors: Vec<WeightError>,
    /// Digests of the whole weights.
    pub wholes: BTreeMap<String, [u8; 32]>,
}

/// Writes all entries of the whole file that are no weights.
fn finish(plan: &Plan, writer: &Writer, made: &Made) -> Result<()> {
    write_side_files(plan, writer, &made.files)?;
    for (name, bytes) in plan.compiled.iter().flat_map(|c| &c.sections) {
        write_opaque(writer, name, bytes)?;
    }
    write_opaque(writer, names::ERRORS_ENTRY, &errors::encode(&made.errors))?;
    if let Some(partition) = final_partition(plan, &made.wholes) {
        write_opaque(writer, names::PARTITION_ENTRY, &partition.encode())?;
    }
    write_opaque(writer, names::MANIFEST_ENTRY, &final_manifest(plan, &made.files).to_bytes())
}

/// The stored weights in container order, as work for the executor.
pub(super) struct Work<'a> {
    /// Index in the table.
    pub weights: Vec<usize>,
    /// Where its planes go.
    pub targets: Vec<Target>,
    /// What to encode.
    pub jobs: Vec<Job<'a>>,
    /// Errors of the jobs that copy an older artifact's planes.
    errors: BTreeMap<usize, WeightError>,
    /// Weights that are in the file already, by index in the table; there are no jobs for them.
    kept: BTreeMap<usize, Kept>,
}

impl<'a> Work<'a> {
    /// The work of a plan.
    ///
    /// # Errors
    /// A weight that the checkpoint cannot assemble: a fault of the plan.
    pub fn of(plan: &'a Plan) -> Result<Work<'a>> {
        Work::of_part(plan, None)
    }

    /// The work of one part of a plan, or of all of it.
    fn of_part(plan: &'a Plan, part: Option<&PartPlan>) -> Result<Work<'a>> {
        let layout = part.map_or(&plan.layout, |part| &part.layout);
        let mut work = Work {
            weights: Vec::new(),
            targets: Vec::new(),
            jobs: Vec::new(),
            errors: BTreeMap::new(),
            kept: BTreeMap::new(),
        };
        let makes = |weight: usize| part.is_none_or(|part| part.makes(weight));
        let stored = plan.assignment.stored(&plan.table);
        for (assigned, weight) in stored.filter(|(assigned, _)| makes(assigned.weight)) {
            let source = plan.sources.source(weight).map_err(|e| {
                Failure::plain(FailureKind::Failed, format!("cannot read {}: {e}", weight.name))
            })?;
            let target = Target::of(plan, layout, &weight.name).ok_or_else(|| {
                let what = format!("the layout has no entry for {}", weight.name);
                Failure::plain(FailureKind::Failed, what)
            })?;
            work.weights.push(assigned.weight);
            work.targets.push(target);
            let kept = *assigned.method == Method::Keep && weight.stored.is_some();
            let planes = match plan.sources.of(weight) {
                Ok(checkpoint) if kept => checkpoint.planes(weight),
                _ => None,
            };
            if kept && planes.is_none() {
                let what = format!("the codes and scales of {} cannot be kept", weight.name);
                return Err(Failure::plain(FailureKind::Failed, what));
            }
            work.jobs.push(Job {
                source,
                planes,
                stored_bytes: weight.stored.as_ref().map(|stored| stored.bytes),
                method: &assigned.method,
                importance: importance(plan, assigned.weight, weight)?,
                share: assigned.share,
                may_be_infinite: weight.may_be_infinite && *assigned.method == Method::Keep,
            });
        }
        Ok(work)
    }

    /// Takes the jobs of weights away that are in the file already.
    fn keep(&mut self, plan: &Plan, kept: BTreeMap<usize, Kept>, progress: &dyn Progress) {
        let stay = |index: &usize| !kept.contains_key(index);
        let is: Vec<bool> = self.weights.iter().map(stay).collect();
        let mut stays = is.iter();
        self.jobs.retain(|_| stays.next() == Some(&true));
        let mut stays = is.iter();
        self.targets.retain(|_| stays.next() == Some(&true));
        self.weights.retain(stay);
        for weight in kept.keys().filter_map(|index| plan.table.weights.get(*index)) {
            progress.encoded(weight.source_bytes().unwrap_or(0));
        }
        self.kept = kept;
    }

    /// Digests of the entries that are in the file already.
    fn kept_entries(&self) -> BTreeMap<usize, [u8; 32]> {
        self.kept.values().flat_map(|kept| kept.entries.clone()).collect()
    }

    /// Copies these weights' planes instead of making them.
    fn reuse(
        &mut self,
        plan: &'a Plan,
        (reuse, stored): (&'a Reuse, &'a Weights<'a>),
        weights: &BTreeSet<usize>,
    ) {
        for (job, index) in self.weights.iter().enumerate() {
            let Some(weight) = plan.table.weights.get(*index).filter(|_| weights.contains(index))
            else {
                continue;
            };
            if let (Some(planes), Some(error)) = (stored.get(&weight.name), reuse.error(weight)) {
                self.jobs[job].planes = Some(Box::new(planes.clone()));
                self.errors.insert(job, error.clone());
            }
        }
    }

    /// The weight of a job.
    pub fn weight(&self, plan: &'a Plan, job: usize) -> Option<&'a Weight> {
        plan.table.weights.get(*self.weights.get(job)?)
    }
}

/// The importances that the plan gives a weight.
fn importance<'a>(plan: &'a Plan, index: usize, weight: &Weight) -> Result<Option<&'a [f32]>> {
    let Some(entry) = plan.importances.entries.get(&index) else { return Ok(None) };
    let cols = weight.shape.matrix().map_or(0, |(_, cols)| cols);
    let found = plan.sources.imatrix.as_ref().and_then(|i| i.columns(entry, cols));
    found.map(Some).ok_or_else(|| {
        let what = format!("the importances of {} are gone", weight.name);
        Failure::plain(FailureKind::Failed, what)
    })
}

fn pool(threads: usize) -> Result<rayon::ThreadPool> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .map_err(|e| Failure::plain(FailureKind::Failed, format!("cannot start threads: {e}")))
}

/// Sha256 of every wanted source file; `abandon` stops it.
fn hash_source(
    plan: &Plan,
    wanted: &(dyn Fn(&str) -> bool + Sync),
    options: ConvertOptions<'_>,
    abandon: &AtomicBool,
    log: Option<&Journal>,
) -> Result<Vec<FileDigest>> {
    plan.sources.hash_files(wanted, abandon, &Watched { options, abandon, log })
}

/// Passes on how far hashing is, and stops it when the run is cancelled.
struct Watched<'a> {
    options: ConvertOptions<'a>,
    abandon: &'a AtomicBool,
    log: Option<&'a Journal>,
}

impl Hashing for Watched<'_> {
    fn bytes(&self, bytes: u64) {
        self.options.progress.hashed(bytes);
        if self.options.cancelled.load(Ordering::Relaxed) {
            self.abandon.store(true, Ordering::Relaxed);
        }
    }

    fn file(&self, digest: &FileDigest) {
        if let Some(log) = self.log {
            log.file(digest);
        }
    }
}

/// Encodes every weight and, at the same time, hashes every source file that the run `reads`, unless they were `hashed`
/// before.
pub(super) fn run(
    (plan, reads): (&Plan, &(dyn Fn(&str) -> bool + Sync)),
    work: &Work<'_>,
    sink: &dyn Sink,
    options: ConvertOptions<'_>,
    (hashed, log): (Option<Vec<FileDigest>>, Option<&Journal>),
) -> Result<(Vec<ErrorSum>, Vec<FileDigest>)> {
    let pool = pool(options.threads)?;
    // Hashing stops when encoding has stopped, on a signal too.
    let abandon = AtomicBool::new(false);
    let workers = Workers { threads: options.threads, cancelled: options.cancelled };
    let (encoded, hashed) = std::thread::scope(|scope| {
        let hashing = scope.spawn(|| match hashed {
            Some(files) => Ok(files),
            None => pool.install(|| hash_source(plan, reads, options, &abandon, log)),
        });
        let encoded = execute(&work.jobs, workers, sink);
        if encoded.is_err() {
            abandon.store(true, Ordering::Relaxed);
        }
        (encoded, hashing.join())
    });
    let sums = encoded.map_err(|error| explain(plan, work, error))?;
    let hashes = hashed.unwrap_or_else(|_| {
        Err(Failure::plain(FailureKind::Failed, "hashing the source failed"))
    })?;
    Ok((sums, hashes))
}

/// Puts planes into the file and digests each weight when it is complete.
struct FileSink<'a> {
    plan: &'a Plan,
    work: &'a Work<'a>,
    writer: &'a Writer,
    log: &'a Journal,
    /// Of entries, by position in the directory.
    digests: Mutex<BTreeMap<usize, [u8; 32]>>,
    /// Of whole weights, by job.
    wholes: Mutex<BTreeMap<usize, [u8; 32]>>,
    waiting: Mutex<Waiting>,
    progress: &'a dyn Progress,
}

/// Weights that are written and not yet hashed.
#[derive(Default)]
struct Waiting {
    /// The jobs, and what they cost.
    jobs: Vec<(usize, ErrorSum)>,
    /// Bytes in the file.
    bytes: u64,
}

impl Waiting {
    /// Several weights are hashed in little more time than one, if they are about as long. They must still be in memory.
    const BYTES: u64 = 256 << 20;
    /// Of small weights.
    const JOBS: usize = 256;

    /// Adds one; all of them when there are enough.
    fn add(&mut self, job: usize, sum: ErrorSum, bytes: u64) -> Vec<(usize, ErrorSum)> {
        self.jobs.push((job, sum));
        self.bytes = self.bytes.saturating_add(bytes);
        let enough = self.jobs.len() >= 2 && self.bytes >= Self::BYTES;
        match enough || self.jobs.len() >= Self::JOBS {
            true => std::mem::take(self).jobs,
            false => Vec::new(),
        }
    }
}

impl FileSink<'_> {
    fn target(&self, job: usize) -> io::Result<&Target> {
        self.work.targets.get(job).ok_or_else(|| io::Error::other("no such weight"))
    }

    /// Hashes weights, this thread alone or all threads of the current pool.
    fn hash(
        &self,
        jobs: &[(usize, ErrorSum)],
        hash: impl Fn(&[Item<'_>]) -> Vec<io::Result<[u8; 32]>>,
    ) -> io::Result<()> {
        let targets: Vec<&Target> =
            jobs.iter().map(|(job, _)| self.target(*job)).collect::<io::Result<_>>()?;
        let items: Vec<Item<'_>> = targets.iter().flat_map(|t| t.items(self.writer)).collect();
        let mut found = hash(&items).into_iter();
        for ((job, sum), target) in jobs.iter().zip(targets) {
            let (entries, whole) = target.digests(&mut found)?;
            // A copied weight has no sums of its own; a later run copies it again.
            if let (Some(weight), false) =
                (self.work.weight(self.plan, *job), self.work.errors.contains_key(job))
            {
                self.log.weight(&weight.name, &entries, whole, sum);
            }
            self.digests.lock().unwrap_or_else(PoisonError::into_inner).extend(entries);
            self.wholes.lock().unwrap_or_else(PoisonError::into_inner).insert(*job, whole);
        }
        Ok(())
    }

    /// Hashes what is left.
    fn finish(&self, pool: &rayon::ThreadPool) -> Result<()> {
        let left =
            std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
        pool.install(|| self.hash(&left.jobs, |items| hash::each(items))).map_err(digests::failure)
    }
}

impl Sink for FileSink<'_> {
    fn write(&self, job: usize, plane: usize, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.target(job)?.write(self.writer, plane, offset, bytes)
    }

    fn complete(&self, job: usize, sum: &ErrorSum) -> io::Result<()> {
        let target = self.target(job)?;
        target.pad(self.writer)?;
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let jobs = waiting.add(job, *sum, target.bytes(self.writer));
        drop(waiting);
        // The bytes were written a moment ago and are read back from memory.
        self.hash(&jobs, |items| hash::here(items))
    }

    fn advance(&self, _job: usize, source_bytes: u64) {
        self.progress.encoded(source_bytes);
    }
}

fn check_output(plan: &Plan, out: &Path) -> Result<()> {
    if let Some(input) = plan.sources.holds(out) {
        let problem =
            Diagnostic::new("output", format!("{} is the source's own {input}", out.display()))
                .help("name another output file");
        return Err(Failure::one(
            FailureKind::Usage,
            "the output would replace its source",
            problem,
        ));
    }
    Ok(())
}

/// Errors of the quantized weights, in directory order.
pub(super) fn weight_errors(plan: &Plan, work: &Work<'_>, sums: &[ErrorSum]) -> Vec<WeightError> {
    let made = |(job, sum): (usize, &ErrorSum)| {
        let own = || {
            Some(WeightError {
                weight: work.weight(plan, job)?.name.clone(),
                squared_error: sum.squared_error(),
                squared: sum.squared(),
            })
        };
        Some((*work.weights.get(job)?, work.errors.get(&job).cloned().or_else(own)?))
    };
    let mut all: BTreeMap<usize, WeightError> = sums.iter().enumerate().filter_map(made).collect();
    all.extend(work.kept.iter().map(|(index, kept)| (*index, kept.error.clone())));
    let quantized = plan.assignment.quantized(&plan.table);
    quantized.filter_map(|(assigned, _)| all.remove(&assigned.weight)).collect()
}

pub(super) fn write_opaque(writer: &Writer, name: &str, bytes: &[u8]) -> Result<()> {
    let entry = writer.layout().entry(name).ok_or_else(|| {
        Failure::plain(FailureKind::Failed, format!("the layout has no entry {name}"))
    })?;
    writer.write(entry, 0, 0, bytes)
}

pub(super) fn write_side_files(plan: &Plan, writer: &Writer, hashes: &[FileDigest]) -> Result<()> {
    for file in &plan.sources.side_files() {
        let bytes = plan.sources.read_side_file(file)?;
        let hashed = hashes.iter().find(|h| h.path == file.path).map(|h| h.sha256);
        if hashed.is_some_and(|h| h != hash::sha256([bytes.as_slice()])) {
            let what = format!("{} changed while it was read", file.path);
            return Err(Failure::plain(FailureKind::Failed, what));
        }
        if !bytes.is_empty() {
            write_opaque(writer, &format!("{}{}", names::FILE_PREFIX, file.path), &bytes)?;
        }
    }
    Ok(())
}

/// Digests of whole weights by name, from those by job and those of weights that were there already.
pub(super) fn whole_digests(
    plan: &Plan,
    work: &Work<'_>,
    wholes: &BTreeMap<usize, [u8; 32]>,
) -> BTreeMap<String, [u8; 32]> {
    let made = wholes
        .iter()
        .filter_map(|(job, digest)| Some((work.weight(plan, *job)?.name.clone(), *digest)));
    let kept = work.kept.values().map(|kept| (kept.error.weight.clone(), kept.whole));
    made.chain(kept).collect()
}

/// The planned table of who holds what with the digests of the whole weights.
pub(super) fn final_partition(
    plan: &Plan,
    wholes: &BTreeMap<String, [u8; 32]>,
) -> Option<Partition> {
    let mut out = plan.partition.clone()?;
    out.set_digests(&wholes.iter().map(|(name, digest)| (name.as_str(), *digest)).collect());
    Some(out)
}

/// The planned manifest with the digests of the files.
pub(super) fn final_manifest(plan: &Plan, hashes: &[FileDigest]) -> Manifest {
    let mut out = plan.manifest.clone();
    out.set_digests(&plan.file_digests(hashes));
    out
}

/// Says what stopped the encoding in the words of the checkpoint.
fn explain(plan: &Plan, work: &Work<'_>, error: ExecuteError) -> Failure {
    let name = |job| work.weight(plan, job).map_or(String::new(), |w| w.name.clone());
    match error {
        ExecuteError::Cancelled => {
            let mut failure = Failure::plain(FailureKind::Failed, "stopped by a signal");
            failure.closing = Some("nothing was written".to_owned());
            failure
        }
        ExecuteError::Io { job, doing, error } => {
            // The writer's own failures already say everything; a wrapped one is taken out again.
            match error.get_ref().and_then(|e| e.downcast_ref::<Failure>()) {
                Some(failure) => failure.clone(),
                None => Failure::plain(
                    FailureKind::Failed,
                    format!("cannot {doing} {}: {error}", name(job)),
                ),
            }
        }
        ExecuteError::Method { job, reason } => {
            Failure::plain(FailureKind::Failed, format!("cannot encode {}: {reason}", name(job)))
        }
        ExecuteError::Rejected(found) => {
            let problems = found
                .iter()
                .filter_map(|at| {
                    let weight = work.weight(plan, at.job)?;
                    Some(rejected(plan.sources.of(weight).ok()?, weight, &at.error))
                })
                .collect();
            Failure {
                kind: FailureKind::Refused,
                headline: "the source holds values that cannot be stored".to_owned(),
                problems,
                closing: Some("nothing was written".to_owned()),
            }
        }
    }
}

/// One weight's unusable values, placed in the checkpoint's tensor.
fn rejected(checkpoint: &Checkpoint, weight: &Weight, error: &EncodeError) -> Diagnostic {
    match error {
        EncodeError::Rotation { row } => Diagnostic::new(
            "weights",
            format!("{}: the rotation of row {row} exceeds the range of f32", weight.name),
        )
        .help("an encoding without `fwht` takes these values"),
        EncodeError::Lost { .. } => Diagnostic::new("weights", format!("{}: {error}", weight.name))
            .help(
                "a rule for this weight with rounding = \"rad\" or encoding = \"keep\" stores it",
            ),
        EncodeError::NonFinite(found) => {
            let values = values_are(found.count);
            let place = place_of(checkpoint, weight, found.first);
            Diagnostic::new(
                "weights",
                format!("{}: {values} NaN or infinite, the first at {place}", weight.name),
            )
            .help("repair the checkpoint; a quantized NaN would poison every result")
        }
        EncodeError::Range { dtype, largest, peak, first, count } => {
            let values = values_are(*count);
            let place = place_of(checkpoint, weight, *first);
            Diagnostic::new(
                "weights",
                format!(
                    "{}: {values} beyond {largest:e}, the largest {dtype}; up to {peak:e}, the first at {place}",
                    weight.name
                ),
            )
            .help("bf16 has the range of f32; a grid scales its values into range")
        }
    }
}

fn values_are(n: u64) -> String {
    if n == 1 { "1 value is".to_owned() } else { format!("{n} values are") }
}

/// `[17, 5] of model.layers.3.mlp.up_proj.weight`
fn place_of(checkpoint: &Checkpoint, weight: &Weight, mut rest: u64) -> String {
    for part in &weight.parts {
        let Some(info) = checkpoint.tensors().get(&part.tensor) else { break };
        let all = info.shape.elements().unwrap_or(0);
        let each = match part.index {
            Some(_) => all / info.shape.extents().first().copied().unwrap_or(1).max(1),
            None => all,
        };
        if rest < each {
            let element = part.index.unwrap_or(0) * each + rest;
            return format!(
                "{} of {}",
                index_of(element, info.shape.extents()),
                weight.tensor_name(part)
            );
        }
        rest -= each;
    }
    format!("element {rest}")
}

/// Row-major element number as an index: `[17, 5]`.
fn index_of(mut element: u64, extents: &[u64]) -> String {
    let mut index = vec![0; extents.len()];
    for (i, &extent) in extents.iter().enumerate().rev() {
        let extent = extent.max(1);
        index[i] = element % extent;
        element /= extent;
    }
    let body: Vec<String> = index.iter().map(u64::to_string).collect();
    format!("[{}]", body.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn element_numbers_read_as_indices() {
        assert_eq!(index_of(0, &[]), "[]");
        assert_eq!(index_of(23, &[4, 6]), "[3, 5]");
        assert_eq!(index_of(7, &[2, 2, 2]), "[1, 1, 1]");
    }
}
