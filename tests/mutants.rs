//! Changed files: every change of a byte is found by what `validate` runs, and no changed file makes a reader panic or
//! take memory that its size does not justify.

mod cli_support;
mod mutant_support;

use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use cli_support::{resealed, succeeds};
use mutant_support::{Field, Seeded, change, change_rows, fields, number, tables};
use radpack::artifact::manifest::Manifest;
use radpack::artifact::{Artifact, verify};
use radpack::{pipeline, quantize};
use rayon::prelude::*;
use tempfile::tempdir;

/// Counts what a thread has of memory, and the most that it had.
struct Counting;

thread_local! {
    static LIVE: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}
static REQUESTS: AtomicUsize = AtomicUsize::new(0);

fn counted(more: usize, less: usize) {
    // While a thread ends, its counters are gone; nothing is measured then.
    let _ = LIVE.try_with(|live| {
        let now = live.get().saturating_add(more).saturating_sub(less);
        live.set(now);
        PEAK.with(|peak| peak.set(peak.get().max(now)));
        LARGEST.with(|largest| largest.set(largest.get().max(more)));
    });
    REQUESTS.fetch_add(1, Ordering::Relaxed);
}

// SAFETY: every call goes to the system's allocator with the caller's own arguments; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Memory) -> *mut u8 {
        counted(layout.size(), 0);
        // SAFETY: the caller's promise about `layout` is the system allocator's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Memory) -> *mut u8 {
        counted(layout.size(), 0);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Memory, size: usize) -> *mut u8 {
        counted(size, layout.size());
        // SAFETY: as above; `at` came from the system allocator with this layout.
        unsafe { System.realloc(at, layout, size) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Memory) {
        counted(0, layout.size());
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static MEMORY: Counting = Counting;

/// The most memory that `work` had at once on this thread, beyond what was there.
fn peak<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE.with(Cell::get);
    PEAK.with(|peak| peak.set(before));
    let out = work();
    (out, PEAK.with(Cell::get).saturating_sub(before))
}

/// Opening may take the copy of the bytes and, for tables that fill the file, their rows in memory.
const OPENING: usize = 6;
/// Checking on one thread: also every string's place, names, and what the documents hold.
const CHECKING: usize = 24;

struct Base {
    name: &'static str,
    bytes: Vec<u8>,
}

/// Files of every kind that `convert` makes.
fn bases() -> Vec<Base> {
    let cases: [(&str, &str, &str, &str, Option<&str>); 6] = [
        ("one device, int8", "tiny-llama", "int8-g128", "1", None),
        ("two devices", "tiny-qwen3", "w8a16", "2", None),
        ("experts", "tiny-qwen3-moe", "w4a16-g32", "1", None),
        ("experts on four devices", "tiny-qwen3-moe", "bf16", "4", None),
        ("a draft", "tiny-gemma4-dense", "w4a16-g32", "1", Some("tiny-gemma4-assistant")),
        ("images and sound", "tiny-gemma4-e", "nvfp4", "1", None),
    ];
    let tmp = tempdir().expect("a folder");
    let one =
        |(name, model, recipe, devices, draft): (&'static str, &str, &str, &str, Option<&str>)| {
            let source = testkit::tiny_model(model);
            let out = tmp.path().join(format!("{}.rad", name.replace(' ', "-")));
            let mut args: Vec<String> =
                ["convert", text(&source), "--recipe", recipe, "--devices", devices]
                    .map(str::to_owned)
                    .to_vec();
            args.extend(["--set", "graphs.max_seq_len=256", "-o", text(&out)].map(str::to_owned));
            if let Some(draft) = draft {
                args.extend([
                    "--draft-model".to_owned(),
                    text(&testkit::tiny_model(draft)).to_owned(),
                ]);
            }
            succeeds(tmp.path(), &args);
            Base { name, bytes: std::fs::read(out).expect("reads") }
        };
    cases.into_iter().map(one).collect()
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// What only the digest of the tables finds begins so.
const BY_DIGEST: &str = "sha256 of the tables is";

/// Whether the checks of `validate` find anything; the faults' words when they do.
fn found(bytes: &[u8]) -> Option<String> {
    let artifact = match Artifact::from_bytes(bytes) {
        Err(refused) => return Some(format!("refused: {refused}")),
        Ok(artifact) => artifact,
    };
    let mut faults = verify(&artifact, Default::default()).faults;
    if faults.iter().all(|f| f.message.starts_with(BY_DIGEST)) {
        faults.extend(everything_else(&artifact));
    }
    faults.last().map(|fault| fault.message.clone())
}

/// What `validate` checks beyond `verify`.
fn everything_else(artifact: &Artifact) -> Vec<radpack::diag::Diagnostic> {
    let weights = artifact.entries().filter(|e| !e.name().to_string().starts_with("radpack/"));
    let mut faults = quantize::verify_decodes(weights.map(|e| quantize::StoredWeight {
        name: e.name().to_string(),
        encoding: e.encoding(),
        shape: e.shape(),
        planes: (0..e.encoding().planes.len()).map(|k| e.plane(k)).collect(),
    }));
    faults.extend(pipeline::check_vocabulary(artifact));
    let manifest = Manifest::of(artifact).ok().flatten();
    faults.extend(pipeline::check_programs(artifact, manifest.as_ref()).into_vec());
    faults
}

/// A changed file, and what was changed.
struct Mutant {
    what: String,
    bytes: Vec<u8>,
}

/// Bytes that lie in no table: strings, arrays of the vocabulary, planes, gaps.
fn places(bytes: &[u8], rng: &mut Seeded) -> Vec<Field> {
    let mut out = Vec::new();
    let mut some = |name: &str, from: usize, len: usize, n: usize, rng: &mut Seeded| {
        for k in (0..n).filter(|_| len > 0) {
            // The first and the last byte, then any.
            let at = from + [0, len - 1].get(k).copied().unwrap_or_else(|| rng.below(len));
            out.push(Field { name: format!("{name}+{}", at - from), at: at..at + 1 });
        }
    };
    some("strings", number(bytes, 56), number(bytes, 64), 200, rng);
    if number(bytes, 144) > 0 {
        some("vocabulary", number(bytes, 136), number(bytes, 144), 100, rng);
    }
    let artifact = Artifact::from_bytes(bytes).expect("opens");
    let mut last = 0;
    for section in artifact.sections().filter(|s| s.0 != "data") {
        last = last.max(section.1 + section.2);
    }
    let data = number(bytes, 168);
    some("gap before the data", last as usize, data - last as usize, 6, rng);
    let mut ends: Vec<(usize, usize)> = Vec::new();
    for entry in artifact.entries() {
        let own = entry.name().to_string().starts_with("radpack/");
        for plane in entry.planes() {
            let (at, len) = (plane.offset as usize, plane.bytes as usize);
            some(&format!("`{}`", entry.name()), at, len, if own { 12 } else { 2 }, rng);
            ends.push((at, at + len));
        }
    }
    ends.sort_unstable();
    for pair in ends.windows(2).step_by(7) {
        some("gap between planes", pair[0].1, pair[1].0 - pair[0].1, 1, rng);
    }
    out
}

/// How many fields of tables are changed of one file: every row, and every field of a row many times.
const OF_TABLES: usize = 900;
/// Files with two to four changes.
const SEVERAL: usize = 250;

fn plan(base: &Base) -> Vec<u64> {
    let all = fields(&base.bytes);
    let mut rng = Seeded(7);
    let n = all.len().min(OF_TABLES) + places(&base.bytes, &mut rng).len() + SEVERAL;
    (0..n as u64).collect()
}

fn mutant(base: &Base, all: &[Field], places: &[Field], index: u64) -> Mutant {
    let mut rng = Seeded(index.wrapping_mul(0x1234_5678_9abc_def1) ^ base.bytes.len() as u64);
    let mut bytes = base.bytes.clone();
    let tables_n = all.len().min(OF_TABLES);
    let index = index as usize;
    let what = if index < tables_n {
        // The whole list in even steps, so that every row has its turn.
        let step = all.len() as f64 / tables_n as f64;
        let field = &all[(index as f64 * step) as usize];
        change(&mut bytes, field, all, &mut rng);
        field.name.clone()
    } else if let Some(field) = places.get(index - tables_n) {
        bytes[field.at.start] ^= 1 << rng.below(8);
        field.name.clone()
    } else {
        let mut what = Vec::new();
        for _ in 0..2 + rng.below(3) {
            match rng.below(4) {
                0 => {
                    let table = tables(&bytes)[rng.below(4)];
                    let inside =
                        table.rows.checked_mul(table.row).and_then(|n| n.checked_add(table.at));
                    if inside.is_some_and(|end| end <= bytes.len()) {
                        change_rows(&mut bytes, table, &mut rng);
                        what.push(format!("rows of {}", table.name));
                    }
                }
                1 => {
                    let field = &places[rng.below(places.len())];
                    bytes[field.at.start] ^= 1 << rng.below(8);
                    what.push(field.name.clone());
                }
                2 if rng.below(8) == 0 => {
                    let n = rng.below(bytes.len());
                    bytes.truncate(n.max(300));
                    bytes.resize(n.max(300) + rng.below(3), 0);
                    what.push(format!("{n} bytes"));
                    break;
                }
                _ => {
                    let field = &all[rng.below(all.len())];
                    change(&mut bytes, field, all, &mut rng);
                    what.push(field.name.clone());
                }
            }
        }
        what.join(", ")
    };
    Mutant { what, bytes }
}

#[test]
fn every_changed_byte_of_every_kind_of_file_is_found_and_nothing_panics() {
    let (mut tried, mut refused, mut by_digest) = (0, 0, 0);
    for base in bases() {
        assert_eq!(found(&base.bytes), None, "{}", base.name);
        let all = fields(&base.bytes);
        let places = places(&base.bytes, &mut Seeded(7));
        let verdicts: Vec<(String, Result<Option<String>, ()>)> = plan(&base)
            .into_par_iter()
            .filter_map(|index| {
                let mutant = mutant(&base, &all, &places, index);
                if mutant.bytes == base.bytes {
                    return None;
                }
                let verdict = catch_unwind(AssertUnwindSafe(|| found(&mutant.bytes)));
                Some((mutant.what, verdict.map_err(|_| ())))
            })
            .collect();
        let missed: Vec<&String> =
            verdicts.iter().filter(|v| v.1 == Ok(None)).map(|v| &v.0).collect();
        let panics: Vec<&String> = verdicts.iter().filter(|v| v.1.is_err()).map(|v| &v.0).collect();
        assert!(panics.is_empty(), "{}: {} panics: {panics:?}", base.name, panics.len());
        assert!(missed.is_empty(), "{}: {} missed: {missed:?}", base.name, missed.len());
        let begins = |with: &str| {
            let why = |v: &&(String, Result<Option<String>, ()>)| matches!(&v.1, Ok(Some(why)) if why.starts_with(with));
            verdicts.iter().filter(why).count()
        };
        tried += verdicts.len();
        refused += begins("refused: ");
        by_digest += begins(BY_DIGEST);
        println!("{}: {} tried, all found", base.name, verdicts.len());
    }
    println!(
        "{tried} changed files, {refused} refused at opening, {by_digest} found by the digest of the tables alone, \
         0 missed"
    );
    assert!(tried > 6000 && refused > 1000 && by_digest > 100, "{tried}, {refused}, {by_digest}");
}

#[test]
fn no_changed_file_takes_memory_that_its_size_does_not_justify() {
    let (mut most, mut checked) = ([0.0f64; 2], 0);
    // One thread, so that all memory is counted here.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build();
    let pool = pool.expect("a pool");
    for base in bases().into_iter().take(3) {
        let all = fields(&base.bytes);
        let places = places(&base.bytes, &mut Seeded(7));
        let mut mutants: Vec<Mutant> =
            plan(&base).into_iter().step_by(3).map(|i| mutant(&base, &all, &places, i)).collect();
        // Counts as large as the file allows: every table over the whole file.
        for table in tables(&base.bytes) {
            for count in [base.bytes.len() / table.row, usize::MAX / table.row, 1 << 40] {
                let mut bytes = base.bytes.clone();
                let at = match table.name {
                    "meta" => 72,
                    "dir" => 88,
                    "plane" => 104,
                    _ => 120,
                };
                bytes[at..at + 8].fill(0);
                bytes[at + 8..at + 16].copy_from_slice(&(count as u64).to_le_bytes());
                mutants.push(Mutant { what: format!("{count} rows of {}", table.name), bytes });
            }
        }
        for (from, len) in [(0, base.bytes.len()), (number(&base.bytes, 168) - 4096, 4096)] {
            let mut bytes = base.bytes.clone();
            bytes[56..64].copy_from_slice(&(from as u64).to_le_bytes());
            bytes[64..72].copy_from_slice(&(len as u64).to_le_bytes());
            *bytes.last_mut().expect("bytes") = 0;
            mutants.push(Mutant { what: format!("strings of {len} bytes"), bytes });
        }
        for Mutant { what, bytes } in mutants {
            let (opened, memory) = peak(|| Artifact::from_bytes(&bytes));
            let size = bytes.len();
            most[0] = most[0].max(memory as f64 / size as f64);
            assert!(memory <= OPENING * size, "{}, {what}: {memory} bytes for {size}", base.name);
            if let Ok(artifact) = opened {
                let (_, memory) = peak(|| pool.install(|| verify(&artifact, Default::default())));
                most[1] = most[1].max(memory as f64 / size as f64);
                assert!(
                    memory <= CHECKING * size,
                    "{}, {what}: {memory} bytes to check {size}",
                    base.name
                );
            }
            checked += 1;
        }
    }
    println!(
        "{checked} files; opening took at most {:.2} of the size, checking {:.2}",
        most[0], most[1]
    );
    assert!(checked > 1000);
    // The counter counts: a file is copied when it is opened from bytes.
    assert!(most[0] >= 1.0 && REQUESTS.load(Ordering::Relaxed) > 0);
}

#[test]
fn sections_that_lie_under_sound_digests_never_make_a_check_panic() {
    let mut tried = 0;
    for base in bases() {
        let names: Vec<String> = Artifact::from_bytes(&base.bytes)
            .expect("opens")
            .entries()
            .map(|e| e.name().to_string())
            .filter(|n| n.starts_with("radpack/") && n != "radpack/digests")
            .collect();
        let cases: Vec<(&String, u64)> =
            names.iter().flat_map(|n| (0..12).map(move |k| (n, k))).collect();
        let panics: Vec<String> = cases
            .par_iter()
            .filter_map(|(name, k)| {
                let mut rng = Seeded(k ^ (name.len() as u64) << 32);
                let mut what = String::new();
                let lied = resealed(&base.bytes, name, |bytes| {
                    for _ in 0..1 + k % 3 {
                        let at = rng.below(bytes.len());
                        let byte = rng.next() as u8;
                        what.push_str(&format!("{at}: {byte:#x} "));
                        // Documents stay documents for a while: a digit for a digit.
                        bytes[at] = match bytes[at] {
                            b'0'..=b'9' if k % 2 == 0 => b'0' + byte % 10,
                            old => old ^ byte.max(1),
                        };
                    }
                });
                let checks = || {
                    let artifact = Artifact::from_bytes(&lied).expect("the tables are sound");
                    verify(&artifact, Default::default());
                    everything_else(&artifact);
                };
                catch_unwind(AssertUnwindSafe(checks)).err().map(|_| format!("{name} {what}"))
            })
            .collect();
        assert!(panics.is_empty(), "{}: {panics:?}", base.name);
        tried += cases.len();
    }
    println!("{tried} sections changed under sound digests, no panic");
    assert!(tried > 500, "{tried}");
}
