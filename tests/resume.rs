//! A conversion that was cut off goes on, and ends with the bytes of one that was not.

mod checkpoint_support;
mod cli_support;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use checkpoint_support::large::large;
use cli_support::{dense, dense_copy, radpack, sha256, succeeds};
use radpack::artifact::partial_path;
use radpack::checkpoint::{Checkpoint, OpenOptions};
use radpack::pipeline::{self, ConvertOptions, Earlier, Plan, Progress, Request, Sources};
use radpack::recipe;
use tempfile::tempdir;

/// Sets the flag when so many source bytes were encoded.
struct StopsAt {
    bytes: AtomicU64,
    limit: u64,
    cancelled: AtomicBool,
}

impl StopsAt {
    fn new(limit: u64) -> StopsAt {
        StopsAt { bytes: AtomicU64::new(0), limit, cancelled: AtomicBool::new(false) }
    }

    fn options(&self) -> ConvertOptions<'_> {
        ConvertOptions { threads: 1, progress: self, cancelled: &self.cancelled }
    }
}

impl Progress for StopsAt {
    fn encoded(&self, bytes: u64) {
        if self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes >= self.limit {
            self.cancelled.store(true, Ordering::Relaxed);
        }
    }
}

fn plan(source: &Path, name: &str, devices: u32) -> Plan {
    let main = Checkpoint::open(source, &OpenOptions::default()).unwrap_or_else(|f| panic!("{f}"));
    let mut recipe = recipe::load(Some(name)).unwrap_or_else(|f| panic!("{f}"));
    recipe.set(&format!("target.devices={devices}")).unwrap_or_else(|f| panic!("{f}"));
    let request = Request { weights_only: false, tokenizer_required: true };
    let sources = Sources { main, draft: None, imatrix: None };
    pipeline::plan(sources, recipe, request).unwrap_or_else(|f| panic!("{f}"))
}

/// Runs until the limit, with what is there already; the digest if it came to its end, and how many weights were there.
fn run(plan: &Plan, out: &Path, limit: u64) -> Option<(String, usize)> {
    let stops = StopsAt::new(limit);
    let earlier = Earlier { artifact: None, partial: true };
    match pipeline::convert_from(plan, out, stops.options(), earlier) {
        Ok(converted) => Some((sha256(out), converted.resumed)),
        Err(failure) => {
            assert!(
                failure.closing.as_deref().is_some_and(|c| c.contains("goes on with it")),
                "{failure}"
            );
            assert!(partial_path(out).exists() && !out.exists());
            None
        }
    }
}

/// Stops twice. A run that goes on hashes the whole source before anything else, so after the second stop the digest of
/// every source file is written down, however fast hashing is beside encoding.
fn stopped_twice(plan: &Plan, out: &Path, limit: u64) {
    assert_eq!(run(plan, out, limit / 2), None);
    assert_eq!(run(plan, out, limit), None);
}

fn journal(out: &Path) -> PathBuf {
    let mut name = partial_path(out).into_os_string();
    name.push(".journal");
    PathBuf::from(name)
}

/// The digest of a conversion that nothing disturbs.
fn undisturbed(folder: &Path, plan: &Plan) -> String {
    let out = folder.join("fresh.rad");
    let free = StopsAt::new(u64::MAX);
    pipeline::convert(plan, &out, free.options()).unwrap_or_else(|f| panic!("{f}"));
    assert!(!journal(&out).exists() && !partial_path(&out).exists());
    sha256(&out)
}

#[test]
fn stopped_after_any_part_of_the_work_it_goes_on_to_the_same_bytes() {
    // NVFP4 shares scales over q, k, v and over gate, up: those are kept together or not at all.
    for (name, devices) in [("nvfp4", 1), ("int8-g128", 1), ("w8a16", 4)] {
        let tmp = tempdir().expect("a folder");
        let plan = plan(&dense(), name, devices);
        let want = undisturbed(tmp.path(), &plan);
        let all = plan.assignment.total.source_bytes;
        let mut most = 0;
        for tenth in 1..10 {
            let out = tmp.path().join(format!("{tenth}.rad"));
            // A first stop; a second one while it goes on, a tenth later; then to the end.
            assert_eq!(run(&plan, &out, all * tenth / 10), None);
            assert!(journal(&out).exists());
            let second = run(&plan, &out, all * (tenth + 1) / 10);
            let (digest, resumed) = match second {
                Some(done) => done,
                None => run(&plan, &out, u64::MAX).expect("nothing stops it"),
            };
            assert_eq!(digest, want, "{name} stopped at {tenth} tenths");
            assert!(!journal(&out).exists() && !partial_path(&out).exists());
            most = most.max(resumed);
        }
        let stored = plan.assignment.stored(&plan.table).count();
        assert!(most * 2 > stored, "{name}: at most {most} of {stored} weights were kept");
    }
}

#[test]
fn damaged_partial_files_and_changed_sources_are_made_again() {
    let tmp = tempdir().expect("a folder");
    let source = dense_copy(tmp.path());
    let out = tmp.path().join("t.rad");
    let before = plan(&source, "int8-g128", 1);
    let want = undisturbed(tmp.path(), &before);
    let all = before.assignment.total.source_bytes;

    // Every byte of the data turned: nothing of it is believed.
    assert_eq!(run(&before, &out, all * 8 / 10), None);
    let mut bytes = fs::read(partial_path(&out)).expect("reads");
    bytes.iter_mut().for_each(|b| *b ^= 0xff);
    fs::write(partial_path(&out), &bytes).expect("writes");
    assert_eq!(run(&before, &out, u64::MAX), Some((want.clone(), 0)));
    fs::remove_file(&out).expect("removes");

    // A journal that is cut off in the middle of a weight's line.
    stopped_twice(&before, &out, all * 8 / 10);
    let text = fs::read_to_string(journal(&out)).expect("reads");
    let (weights, others): (Vec<&str>, Vec<&str>) =
        text.lines().filter(|l| !l.is_empty()).partition(|l| l.contains("\"what\":\"weight\""));
    // A weight whose file the first run had not hashed when it stopped was made, and written down, a second time.
    let mut seen = BTreeSet::new();
    let named = |line: &&str| -> serde_json::Value { serde_json::from_str(line).expect("JSON") };
    let weights: Vec<&str> =
        weights.into_iter().filter(|l| seen.insert(named(l)["name"].to_string())).collect();
    let whole = weights.len() / 2;
    let torn = &weights[whole][..weights[whole].len() / 2];
    let cut = [&others[..], &weights[..whole], &[torn]].concat().join("\n");
    fs::write(journal(&out), cut).expect("writes");
    assert_eq!(run(&before, &out, u64::MAX), Some((want.clone(), whole)));
    fs::remove_file(&out).expect("removes");

    // One shard of the source changes after the stop: what came from it is made again, the rest is kept.
    stopped_twice(&before, &out, all * 9 / 10);
    let shard = source.join("model-00002-of-00004.safetensors");
    let mut bytes = fs::read(&shard).expect("reads");
    let last = bytes.len() - 2;
    bytes[last] ^= 1;
    fs::write(&shard, &bytes).expect("writes");
    let after = plan(&source, "int8-g128", 1);
    let changed = undisturbed(tmp.path(), &after);
    assert_ne!(changed, want);
    let (digest, resumed) = run(&after, &out, u64::MAX).expect("nothing stops it");
    assert_eq!(digest, changed);
    assert!(resumed > 0);
    fs::remove_file(&out).expect("removes");

    // Another recipe: the journal is another file's.
    assert_eq!(run(&after, &out, all * 9 / 10), None);
    let other = plan(&source, "w8a16", 1);
    assert_eq!(run(&other, &out, u64::MAX), Some((undisturbed(tmp.path(), &other), 0)));
}

fn arguments(more: &[&str]) -> Vec<String> {
    let own = [
        "convert",
        "large",
        "--weights-only",
        "--no-tokenizer",
        "-o",
        "t.rad",
        "--threads",
        "1",
        "--kernel",
        "scalar",
    ];
    own.iter().chain(more).map(|s| (*s).to_owned()).collect()
}

fn start(folder: &Path, more: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_radpack"))
        .current_dir(folder)
        .args(arguments(more))
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("starts")
}

#[test]
fn killed_at_seeded_points_it_ends_with_the_digest_of_an_undisturbed_run() {
    let tmp = tempdir().expect("a folder");
    large(tmp.path());
    let began = Instant::now();
    succeeds(tmp.path(), &arguments(&[]));
    let whole = began.elapsed();
    let want = sha256(&tmp.path().join("t.rad"));
    fs::remove_file(tmp.path().join("t.rad")).expect("removes");
    let mut kept = 0;
    for point in 0..6u32 {
        let mut child = start(tmp.path(), &[]);
        // Points spread over the run, at odd fractions of it.
        std::thread::sleep(whole.mul_f64(f64::from(point * 137 % 97 + 20) / 125.0));
        // Killing a process that has ended is no error: then there is nothing to go on with.
        let _ = child.kill();
        child.wait().expect("ended");
        let ran = succeeds(tmp.path(), &arguments(&["--resume", "--json"]));
        let document: serde_json::Value = serde_json::from_str(&ran.stdout).expect("JSON");
        kept += document["resumed"].as_u64().expect("a number");
        let out = tmp.path().join("t.rad");
        assert_eq!(sha256(&out), want, "killed at point {point}");
        assert!(!partial_path(&out).exists() && !journal(&out).exists());
        fs::remove_file(&out).expect("removes");
    }
    assert!(kept > 0, "no run was killed with a weight to keep");
}

#[test]
fn a_signal_leaves_the_partial_file_only_where_resume_asks_for_it() {
    let tmp = tempdir().expect("a folder");
    large(tmp.path());
    let out = tmp.path().join("t.rad");
    for (more, stays) in [(&[][..], false), (&["--resume"][..], true)] {
        let child = start(tmp.path(), more);
        let deadline = Instant::now() + Duration::from_secs(60);
        while !journal(&out).exists() {
            assert!(Instant::now() < deadline, "it writes nothing");
            std::thread::sleep(Duration::from_millis(2));
        }
        // SAFETY: the process was started here and has not been waited for.
        unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
        let output = child.wait_with_output().expect("ends");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert_eq!(said.contains("the same command goes on with it"), stays, "{said}");
        assert_eq!((partial_path(&out).exists(), journal(&out).exists()), (stays, stays));
        assert!(!out.exists());
    }
    assert_eq!(radpack(tmp.path(), &["convert", "large", "--resume", "--dry-run"]).code, 2);
}
