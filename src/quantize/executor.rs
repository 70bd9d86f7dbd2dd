//! Streams weights through their encoders: row blocks on worker threads, written in any order.
//!
//! Blocks are handed out in job order from one cursor, so the largest weight never waits for a free machine and no
//! weight is ever whole in memory. [`ErrorSum`]s add up exactly, so the order in which blocks finish changes no figure.
//!
//! Weights whose grid needs a tensor-wide fact (the peak magnitude of two-level grids) are read twice, the first
//! time just before their blocks are encoded; the members of a shared set contribute to one peak.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::{EncodeError, Encoder, ErrorSum, PlaneBuffers, Whole, peak};
use crate::num::{self, NonFinite};
use crate::recipe::Method;
use crate::tensor::{PlaneLayout, PlaneSource, TensorSource};

/// Source bytes of one row block. Large enough for sequential writes, small enough that source rows, codes and
/// scales of a block stay in a core's second-level cache.
const BLOCK_BYTES: u64 = 1 << 20;

/// A refusal names at most this many weights with unusable values; reading on beyond them would only take time.
const MAX_REJECTED: usize = 20;

/// One weight to encode.
pub struct Job<'a> {
    /// Where its rows come from.
    pub source: Box<dyn TensorSource + 'a>,
    /// Planes that are copied instead of the source's bytes, for a weight that is kept and quantized already; its
    /// source is still read for values that are not finite.
    pub planes: Option<Box<dyn PlaneSource + 'a>>,
    /// Bytes that the weight takes in its file, for progress; `None` when they are those of the source's rows.
    pub stored_bytes: Option<u64>,
    /// How it is stored.
    pub method: &'a Method,
    /// Weights of the columns' squared errors, for a method that searches ([`Encoder::with_importance`]).
    pub importance: Option<&'a [f32]>,
    /// Jobs of one set share tensor-wide facts.
    pub share: Option<usize>,
    /// Whether ±infinity is a legal value of the source (never of an encoded weight).
    pub may_be_infinite: bool,
}

/// Where encoded planes go. Calls come from several threads.
pub trait Sink: Sync {
    /// Bytes of one plane of a job, at a byte offset in the plane. Blocks of a job arrive in any order.
    ///
    /// # Errors
    /// Stops the run.
    fn write(&self, job: usize, plane: usize, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Every plane of the job has been written; `sum` is what that cost.
    ///
    /// # Errors
    /// Stops the run.
    fn complete(&self, job: usize, sum: &ErrorSum) -> io::Result<()>;

    /// Source bytes that were just encoded, for progress.
    fn advance(&self, _job: usize, _source_bytes: u64) {}
}

/// How to run.
#[derive(Debug, Clone, Copy)]
pub struct Workers<'a> {
    /// Worker threads, at least one.
    pub threads: usize,
    /// Set by a signal handler: workers stop at the next block.
    pub cancelled: &'a AtomicBool,
}

/// A job whose source holds values that cannot be stored.
#[derive(Debug, Clone, PartialEq)]
pub struct Rejected {
    /// The job.
    pub job: usize,
    /// What they are; index and count are those of the whole weight.
    pub error: EncodeError,
}

/// Why a run stopped.
#[derive(Debug)]
pub enum ExecuteError {
    /// Reading a source or writing a plane failed.
    Io {
        /// The job.
        job: usize,
        /// `read` or `write`.
        doing: &'static str,
        /// The system's reason.
        error: io::Error,
    },
    /// A method cannot encode a job's source; a plan that was checked never gets here.
    Method {
        /// The job.
        job: usize,
        /// Why.
        reason: String,
    },
    /// Sources hold NaN, infinity, or values beyond the target of a cast; up to 20 jobs, in job order.
    Rejected(Vec<Rejected>),
    /// The run was cancelled.
    Cancelled,
}

/// Encodes every job into the sink and returns each job's error sums, in job order.
///
/// # Errors
/// The first I/O error; or, after all sources were read, every job with values that cannot be stored.
pub fn execute(
    jobs: &[Job<'_>],
    workers: Workers<'_>,
    sink: &dyn Sink,
) -> Result<Vec<ErrorSum>, ExecuteError> {
    let run = Run::new(jobs, sink, workers.cancelled)?;
    std::thread::scope(|scope| {
        for _ in 0..workers.threads.max(1) {
            scope.spawn(|| run.work());
        }
    });
    run.finish()
}

/// One unit of work.
enum Task {
    /// Scan rows for the peak magnitude of the job's set.
    Peak { job: usize, rows: Range<u64> },
    /// Encode rows.
    Encode { job: usize, rows: Range<u64> },
}

/// The tensor-wide facts of one set of jobs.
#[derive(Default)]
struct SetPeak {
    /// Bits of the largest magnitude so far; magnitudes compare as their bits do.
    bits: AtomicU32,
    /// Peak tasks not done yet, and whether they were handed out.
    pending: Mutex<Option<usize>>,
    done: Condvar,
}

/// State of one job while its blocks are in flight.
struct JobState {
    rows: u64,
    cols: u64,
    row_bytes: u64,
    block_rows: u64,
    set: Option<usize>,
    /// Made for the first block, dropped after the last: a model can have tens of thousands of weights.
    encoder: Mutex<Option<Arc<Encoder>>>,
    blocks_left: AtomicUsize,
    sum: Mutex<ErrorSum>,
}

struct Cursor {
    next_job: usize,
    tasks: VecDeque<Task>,
    announced: Vec<bool>,
}

struct Run<'a, 'j> {
    jobs: &'a [Job<'j>],
    states: Vec<JobState>,
    sets: Vec<SetPeak>,
    members: Vec<Vec<usize>>,
    sink: &'a dyn Sink,
    cursor: Mutex<Cursor>,
    cancelled: &'a AtomicBool,
    stopped: AtomicBool,
    failure: Mutex<Option<ExecuteError>>,
    rejected: Mutex<BTreeMap<usize, EncodeError>>,
    /// Once set, blocks are only searched for further values that cannot be stored.
    scan_only: AtomicBool,
    buffers: Mutex<Vec<PlaneBuffers>>,
}

/// A lock whose data stays usable when another worker panicked: the panic itself ends the run.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a, 'j> Run<'a, 'j> {
    fn new(
        jobs: &'a [Job<'j>],
        sink: &'a dyn Sink,
        cancelled: &'a AtomicBool,
    ) -> Result<Self, ExecuteError> {
        let mut sets: BTreeMap<(bool, usize), usize> = BTreeMap::new();
        let mut members: Vec<Vec<usize>> = Vec::new();
        let mut states = Vec::with_capacity(jobs.len());
        for (i, job) in jobs.iter().enumerate() {
            let set = Encoder::needs_peak(job.method).then(|| {
                // A job without a set shares with nobody: its own number is its key.
                let key = job.share.map_or((false, i), |set| (true, set));
                *sets.entry(key).or_insert_with(|| {
                    members.push(Vec::new());
                    members.len() - 1
                })
            });
            if let Some(set) = set {
                members[set].push(i);
            }
            states.push(JobState::new(i, job, set)?);
        }
        Ok(Run {
            jobs,
            states,
            sets: members.iter().map(|_| SetPeak::default()).collect(),
            cursor: Mutex::new(Cursor {
                next_job: 0,
                tasks: VecDeque::new(),
                announced: vec![false; members.len()],
            }),
            members,
            sink,
            cancelled,
            stopped: AtomicBool::new(false),
            failure: Mutex::new(None),
            rejected: Mutex::new(BTreeMap::new()),
            scan_only: AtomicBool::new(false),
            buffers: Mutex::new(Vec::new()),
        })
    }

    fn work(&self) {
        while !self.stopped.load(Ordering::Relaxed) {
            if self.cancelled.load(Ordering::Relaxed) {
                return self.fail(ExecuteError::Cancelled);
            }
            let Some(task) = self.next() else { return };
            let done = match task {
                Task::Peak { job, rows } => self.peak(job, rows),
                Task::Encode { job, rows } => self.encode(job, rows),
            };
            if let Err(error) = done {
                return self.fail(error);
            }
        }
    }

    fn fail(&self, error: ExecuteError) {
        self.stopped.store(true, Ordering::Relaxed);
        lock(&self.failure).get_or_insert(error);
        // Workers that wait for a peak must see the stop.
        for set in &self.sets {
            let _guard = lock(&set.pending);
            set.done.notify_all();
        }
    }

    /// The next task, in job order; a set's peak tasks come before the blocks of its first job.
    fn next(&self) -> Option<Task> {
        let mut cursor = lock(&self.cursor);
        loop {
            if let Some(task) = cursor.tasks.pop_front() {
                return Some(task);
            }
            let job = cursor.next_job;
            let state = self.states.get(job)?;
            cursor.next_job += 1;
            if let Some(set) = state.set
                && self.jobs[job].planes.is_none()
                && !std::mem::replace(&mut cursor.announced[set], true)
            {
                for &member in &self.members[set] {
                    let blocks = self.states[member].blocks();
                    cursor.tasks.extend(blocks.map(|rows| Task::Peak { job: member, rows }));
                }
                *lock(&self.sets[set].pending) = Some(cursor.tasks.len());
            }
            cursor.tasks.extend(state.blocks().map(|rows| Task::Encode { job, rows }));
        }
    }

    fn peak(&self, job: usize, rows: Range<u64>) -> Result<(), ExecuteError> {
        let (state, source) = (&self.states[job], &self.jobs[job].source);
        let bytes = source.rows(rows.clone()).map_err(reading(job))?;
        // Non-finite values are reported when the block is encoded.
        let found = peak(source.dtype(), &bytes).unwrap_or(0.0);
        let Some(set) = state.set.map(|s| &self.sets[s]) else { return Ok(()) };
        set.bits.fetch_max(found.to_bits(), Ordering::Relaxed);
        let mut pending = lock(&set.pending);
        if let Some(n) = pending.as_mut() {
            *n = n.saturating_sub(1);
            if *n == 0 {
                set.done.notify_all();
            }
        }
        Ok(())
    }

    /// The peak magnitude of the job's set, once all its rows were scanned; `None` for grids without one or when the
    /// run stopped meanwhile.
    fn set_peak(&self, state: &JobState) -> Option<f32> {
        let set = &self.sets[state.set?];
        let mut pending = lock(&set.pending);
        while *pending != Some(0) {
            if self.stopped.load(Ordering::Relaxed) {
                return None;
            }
            pending = set.done.wait(pending).unwrap_or_else(PoisonError::into_inner);
        }
        Some(f32::from_bits(set.bits.load(Ordering::Relaxed)))
    }

    fn encode(&self, job: usize, rows: Range<u64>) -> Result<(), ExecuteError> {
        let (state, spec) = (&self.states[job], &self.jobs[job]);
        let first = rows.start;
        let bytes = spec.source.rows(rows).map_err(reading(job))?;
        let encoded = if self.scan_only.load(Ordering::Relaxed) {
            self.scan(job, first, &bytes).map(|()| ErrorSum::default())
        } else if *spec.method == Method::Keep || spec.planes.is_some() {
            self.keep(job, first, &bytes)?
        } else {
            self.encode_block(job, first, &bytes)?
        };
        match encoded {
            Ok(sum) => lock(&state.sum).merge(&sum),
            Err(error) => self.reject(job, error),
        }
        self.sink.advance(job, self.read_bytes(job, bytes.len() as u64));
        if state.blocks_left.fetch_sub(1, Ordering::AcqRel) == 1 {
            lock(&state.encoder).take();
            if !self.scan_only.load(Ordering::Relaxed) {
                let sum = *lock(&state.sum);
                self.sink.complete(job, &sum).map_err(writing(job))?;
            }
        }
        Ok(())
    }

    /// Bytes of the file behind so many decoded ones.
    fn read_bytes(&self, job: usize, decoded: u64) -> u64 {
        let Some(stored) = self.jobs[job].stored_bytes else { return decoded };
        let state = &self.states[job];
        let all = u128::from(state.rows) * u128::from(state.row_bytes);
        let share = u128::from(stored) * u128::from(decoded) / all.max(1);
        u64::try_from(share).unwrap_or(stored)
    }

    fn scan(&self, job: usize, first_row: u64, bytes: &[u8]) -> Result<(), EncodeError> {
        let spec = &self.jobs[job];
        let Some(found) = num::find_non_finite(spec.source.dtype(), bytes) else { return Ok(()) };
        if spec.may_be_infinite && !num::holds_nan(spec.source.dtype(), bytes) {
            return Ok(());
        }
        let base = first_row * self.states[job].cols;
        Err(EncodeError::NonFinite(NonFinite { first: base + found.first, ..found }))
    }

    /// Bytes of the checkpoint, as they are.
    fn keep(
        &self,
        job: usize,
        first_row: u64,
        bytes: &[u8],
    ) -> Result<Result<ErrorSum, EncodeError>, ExecuteError> {
        if let Err(found) = self.scan(job, first_row, bytes) {
            return Ok(Err(found));
        }
        if let Some(planes) = &self.jobs[job].planes {
            self.copy(job, first_row, bytes.len() as u64, &**planes)?;
            return Ok(Ok(ErrorSum::default()));
        }
        let at = first_row * self.states[job].row_bytes;
        self.sink.write(job, 0, at, bytes).map_err(writing(job))?;
        Ok(Ok(ErrorSum::default()))
    }

    /// The plane rows that belong to a block, which begins on a row of every plane.
    fn copy(
        &self,
        job: usize,
        first_row: u64,
        length: u64,
        planes: &dyn PlaneSource,
    ) -> Result<(), ExecuteError> {
        let state = &self.states[job];
        let end = first_row + length / state.row_bytes.max(1);
        let specs = &planes.encoding().planes;
        for (plane, spec) in specs.iter().enumerate() {
            let rows = match spec.layout {
                PlaneLayout::Tiled { block: [rows, _] } if rows > 0 => {
                    first_row / rows..end.div_ceil(rows)
                }
                // Planes that belong to the whole weight go with its first block.
                _ if first_row > 0 => continue,
                _ => 0..spec.grid(state.rows, state.cols).0,
            };
            let at = spec.row_bytes(state.cols).and_then(|n| n.checked_mul(rows.start));
            let at = at.ok_or_else(|| ExecuteError::Method {
                job,
                reason: format!("plane `{}` is too long", spec.role),
            })?;
            let bytes = planes.plane_rows(plane, rows).map_err(reading(job))?;
            self.sink.write(job, plane, at, &bytes).map_err(writing(job))?;
        }
        Ok(())
    }

    fn encode_block(
        &self,
        job: usize,
        first_row: u64,
        bytes: &[u8],
    ) -> Result<Result<ErrorSum, EncodeError>, ExecuteError> {
        let Some(encoder) = self.encoder(job)? else { return Ok(Ok(ErrorSum::default())) };
        if first_row == 0 {
            for (plane, bytes) in encoder.whole_planes() {
                self.sink.write(job, plane, 0, bytes).map_err(writing(job))?;
            }
        }
        let mut buffers = lock(&self.buffers).pop().unwrap_or_default();
        let encoded = encoder.encode(first_row, bytes, &mut buffers);
        if encoded.is_ok() {
            for plane in 0..encoder.encoding().planes.len() {
                let at = encoder.plane_offset(plane, first_row);
                let bytes = buffers.plane(plane);
                if !bytes.is_empty() {
                    self.sink.write(job, plane, at, bytes).map_err(writing(job))?;
                }
            }
        }
        lock(&self.buffers).push(buffers);
        Ok(encoded)
    }

    /// The job's encoder; `None` when the run stopped before its peak was known.
    fn encoder(&self, job: usize) -> Result<Option<Arc<Encoder>>, ExecuteError> {
        let (state, spec) = (&self.states[job], &self.jobs[job]);
        if let Some(encoder) = lock(&state.encoder).as_ref() {
            return Ok(Some(Arc::clone(encoder)));
        }
        let whole = self.set_peak(state).map(|peak| Whole { peak });
        if state.set.is_some() && whole.is_none() {
            return Ok(None);
        }
        let made = Encoder::new(spec.method, spec.source.dtype(), state.rows, state.cols, whole)
            .and_then(|encoder| match spec.importance {
                Some(importance) => encoder.with_importance(importance),
                None => Ok(encoder),
            })
            .map_err(|e| ExecuteError::Method { job, reason: e.to_string() })?;
        // Two workers may have made one each: the first stays.
        let mut slot = lock(&state.encoder);
        Ok(Some(Arc::clone(slot.get_or_insert_with(|| Arc::new(made)))))
    }

    fn reject(&self, job: usize, error: EncodeError) {
        self.scan_only.store(true, Ordering::Relaxed);
        let mut all = lock(&self.rejected);
        match all.remove(&job) {
            Some(known) => all.insert(job, known.merge(error)),
            None => all.insert(job, error),
        };
        if all.len() > MAX_REJECTED {
            self.stopped.store(true, Ordering::Relaxed);
        }
    }

    fn finish(self) -> Result<Vec<ErrorSum>, ExecuteError> {
        if let Some(error) = self.failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        let rejected = self.rejected.into_inner().unwrap_or_else(PoisonError::into_inner);
        if !rejected.is_empty() {
            let all = rejected.into_iter().map(|(job, error)| Rejected { job, error });
            return Err(ExecuteError::Rejected(all.take(MAX_REJECTED).collect()));
        }
        let sum = |s: JobState| s.sum.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(self.states.into_iter().map(sum).collect())
    }
}

impl JobState {
    fn new(i: usize, job: &Job<'_>, set: Option<usize>) -> Result<JobState, ExecuteError> {
        let bad = |reason: &str| ExecuteError::Method { job: i, reason: reason.to_owned() };
        let (rows, cols) = job.source.shape().matrix().ok_or_else(|| bad("shape overflows"))?;
        let width =
            job.source.dtype().bytes().ok_or_else(|| bad("elements are not whole bytes"))?;
        let row_bytes = cols.checked_mul(width).ok_or_else(|| bad("shape overflows"))?;
        let unit = match job.method {
            Method::Keep => {
                plane_rows(job.planes.as_deref()).ok_or_else(|| bad("blocks overflow"))?
            }
            // A peak is not known yet; the rows that belong together do not depend on it.
            method => {
                Encoder::new(method, job.source.dtype(), rows, cols, Some(Whole { peak: 1.0 }))
                    .map_err(|e| bad(&e.to_string()))?
                    .row_block()
            }
        };
        let fit = (BLOCK_BYTES / row_bytes.max(1)) / unit * unit;
        let block_rows = fit.max(unit).min(rows).max(1);
        Ok(JobState {
            rows,
            cols,
            row_bytes,
            block_rows,
            set,
            encoder: Mutex::new(None),
            blocks_left: AtomicUsize::new(rows.div_ceil(block_rows) as usize),
            sum: Mutex::new(ErrorSum::default()),
        })
    }

    /// Row ranges of the job's blocks.
    fn blocks(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let (rows, step) = (self.rows, self.block_rows);
        (0..rows.div_ceil(step)).map(move |b| b * step..((b + 1) * step).min(rows))
    }
}

/// Rows after which every plane begins a row of its own; 1 without planes.
fn plane_rows(planes: Option<&(dyn PlaneSource + '_)>) -> Option<u64> {
    let specs = planes.map_or(&[][..], |p| &p.encoding().planes);
    specs.iter().try_fold(1u64, |unit, spec| match spec.layout {
        PlaneLayout::Tiled { block: [rows, _] } if rows > 0 => {
            let (mut a, mut b) = (unit, rows);
            while b != 0 {
                (a, b) = (b, a % b);
            }
            (unit / a).checked_mul(rows)
        }
        _ => Some(unit),
    })
}

fn reading(job: usize) -> impl Fn(io::Error) -> ExecuteError {
    move |error| ExecuteError::Io { job, doing: "read", error }
}

fn writing(job: usize) -> impl Fn(io::Error) -> ExecuteError {
    move |error| ExecuteError::Io { job, doing: "write", error }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use super::*;
    use crate::recipe::{Grid, SecondScale};
    use crate::tensor::{DType, Shape};

    /// bf16 rows in memory.
    struct Rows {
        shape: Shape,
        bytes: Vec<u8>,
    }

    impl Rows {
        fn new(rows: u64, cols: u64, value: impl Fn(u64) -> f32) -> Rows {
            let bytes = (0..rows * cols).flat_map(|i| half::bf16::from_f32(value(i)).to_le_bytes());
            Rows { shape: Shape::from([rows, cols]), bytes: bytes.collect() }
        }
    }

    impl TensorSource for Rows {
        fn dtype(&self) -> DType {
            DType::BF16
        }

        fn shape(&self) -> &Shape {
            &self.shape
        }

        fn rows(&self, range: Range<u64>) -> io::Result<Cow<'_, [u8]>> {
            let row = (self.shape.extents()[1] * 2) as usize;
            let at = range.start as usize * row..range.end as usize * row;
            self.bytes.get(at).map(Cow::Borrowed).ok_or_else(|| io::ErrorKind::InvalidInput.into())
        }
    }

    /// Planes in memory, and which jobs were completed.
    #[derive(Default)]
    struct Memory {
        planes: Mutex<BTreeMap<(usize, usize), Vec<u8>>>,
        complete: Mutex<Vec<usize>>,
        full: bool,
    }

    impl Sink for Memory {
        fn write(&self, job: usize, plane: usize, offset: u64, bytes: &[u8]) -> io::Result<()> {
            if self.full {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let mut planes = lock(&self.planes);
            let plane = planes.entry((job, plane)).or_default();
            let end = offset as usize + bytes.len();
            plane.resize(plane.len().max(end), 0xaa);
            plane[offset as usize..end].copy_from_slice(bytes);
            Ok(())
        }

        fn complete(&self, job: usize, _: &ErrorSum) -> io::Result<()> {
            lock(&self.complete).push(job);
            Ok(())
        }
    }

    fn nvfp4() -> Method {
        let mut grid = Grid::absmax(DType::F4E2M1, [1, 16], DType::F8E4M3);
        grid.scale2 = Some(SecondScale { dtype: DType::F32, block: [0, 0] });
        Method::Grid(grid)
    }

    fn int8() -> Method {
        Method::Grid(Grid::absmax(DType::I8, [1, 128], DType::BF16))
    }

    fn blocks128() -> Method {
        Method::Grid(Grid::absmax(DType::F8E4M3, [128, 128], DType::BF16))
    }

    fn value(i: u64) -> f32 {
        ((i.wrapping_mul(2_654_435_761) % 2003) as f32 - 1001.0) / 500.0
    }

    fn run(jobs: &[Job<'_>], threads: usize) -> (Result<Vec<ErrorSum>, ExecuteError>, Memory) {
        let (sink, cancelled) = (Memory::default(), AtomicBool::new(false));
        (execute(jobs, Workers { threads, cancelled: &cancelled }, &sink), sink)
    }

    fn job(rows: Rows, method: &Method, share: Option<usize>) -> Job<'_> {
        Job {
            source: Box::new(rows),
            planes: None,
            stored_bytes: None,
            method,
            importance: None,
            share,
            may_be_infinite: false,
        }
    }

    #[test]
    fn as_many_weights_with_unusable_values_are_told_as_may_be() {
        let method = int8();
        let told = |n: usize| {
            let jobs: Vec<Job<'_>> =
                (0..n).map(|_| job(Rows::new(1, 128, |_| f32::NAN), &method, None)).collect();
            match run(&jobs, 1).0 {
                Err(ExecuteError::Rejected(all)) => all.len(),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!([19, 20, 21, 40].map(told), [19, 20, 20, 20]);
    }

    #[test]
    fn streamed_planes_equal_those_of_the_whole_weight_for_any_thread_count() {
        // 1,500 rows of 2 KiB are three blocks and a part of one.
        let (rows, cols) = (1500, 1000);
        for method in [int8(), nvfp4(), blocks128(), Method::Cast(DType::F32), Method::Keep] {
            let source = Rows::new(rows, cols, value);
            let whole = Some(Whole { peak: peak(DType::BF16, &source.bytes).expect("finite") });
            let encoder =
                Encoder::new(&method, DType::BF16, rows, cols, whole).expect("a fitting method");
            let mut buffers = PlaneBuffers::new();
            let expected = encoder.encode(0, &source.bytes, &mut buffers).expect("finite values");
            for threads in [1, 3, 8] {
                let (sums, sink) =
                    run(&[job(Rows::new(rows, cols, value), &method, None)], threads);
                assert_eq!(sums.expect("encodes"), [expected], "{method:?}");
                assert_eq!(*lock(&sink.complete), [0]);
                let planes = lock(&sink.planes);
                for (k, spec) in encoder.encoding().planes.iter().enumerate() {
                    let whole = encoder.whole_planes().find(|(i, _)| *i == k).map(|(_, b)| b);
                    let want = whole.unwrap_or_else(|| buffers.plane(k));
                    assert_eq!(planes[&(0, k)], want, "{method:?} {}", spec.role);
                }
            }
        }
    }

    #[test]
    fn members_of_a_set_share_the_peak_and_others_do_not() {
        let method = nvfp4();
        let make = |factor: f32| Rows::new(600, 1024, move |i| value(i) * factor);
        let jobs = [
            job(make(1.0), &method, Some(7)),
            job(make(0.5), &method, None),
            job(make(3.0), &method, Some(7)),
        ];
        let (sums, sink) = run(&jobs, 4);
        assert_eq!(sums.expect("encodes").len(), 3);
        let planes = lock(&sink.planes);
        let scale = |job| f32::from_le_bytes(planes[&(job, 2)][..].try_into().expect("one f32"));
        let peak = |factor: f32| half::bf16::from_f32(1001.0 / 500.0 * factor).to_f32();
        // The second-level scale is (peak / 6) / 448.
        assert_eq!(scale(0), peak(3.0) / 6.0 / 448.0);
        assert_eq!(scale(2), scale(0));
        assert_eq!(scale(1), peak(0.5) / 6.0 / 448.0);
    }

    #[test]
    fn every_weight_with_values_that_cannot_be_stored_is_named_with_index_and_count() {
        let (method, keep) = (int8(), Method::Keep);
        let bad = |at: &'static [u64]| {
            Rows::new(1500, 1000, move |i| if at.contains(&i) { f32::NAN } else { value(i) })
        };
        let jobs = [
            job(bad(&[]), &method, None),
            job(bad(&[1_400_017, 9, 700_000]), &method, None),
            job(bad(&[1_499_999]), &keep, None),
        ];
        let (result, sink) = run(&jobs, 2);
        let Err(ExecuteError::Rejected(found)) = result else { panic!("{result:?}") };
        let at = |job, first, count| Rejected { job, error: NonFinite { first, count }.into() };
        assert_eq!(found, [at(1, 9, 3), at(2, 1_499_999, 1)]);
        assert!(!lock(&sink.complete).contains(&1));
    }

    #[test]
    fn infinite_bounds_are_kept_where_they_are_legal() {
        let keep = Method::Keep;
        let rows = |v: f32| Rows::new(1, 1, move |_| v);
        let mut jobs = [job(rows(f32::NEG_INFINITY), &keep, None)];
        assert!(matches!(run(&jobs, 1).0, Err(ExecuteError::Rejected(_))));
        jobs[0].may_be_infinite = true;
        assert!(run(&jobs, 1).0.is_ok());
        jobs[0].source = Box::new(rows(f32::NAN));
        assert!(matches!(run(&jobs, 1).0, Err(ExecuteError::Rejected(_))));
    }

    #[test]
    fn a_full_disk_and_a_signal_stop_the_run() {
        let method = nvfp4();
        let jobs: Vec<Job<'_>> =
            (0..4).map(|_| job(Rows::new(600, 1024, value), &method, None)).collect();
        let cancelled = AtomicBool::new(false);
        let sink = Memory { full: true, ..Memory::default() };
        let result = execute(&jobs, Workers { threads: 4, cancelled: &cancelled }, &sink);
        let Err(ExecuteError::Io { doing: "write", error, .. }) = result else {
            panic!("{result:?}")
        };
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        cancelled.store(true, Ordering::Relaxed);
        let result =
            execute(&jobs, Workers { threads: 4, cancelled: &cancelled }, &Memory::default());
        assert!(matches!(result, Err(ExecuteError::Cancelled)), "{result:?}");
    }
}
