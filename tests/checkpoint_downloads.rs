//! Downloads that break off, stall, arrive damaged or are killed, against a small hub on 127.0.0.1.
#![cfg(feature = "hub")]

mod checkpoint_support;
mod hub_support;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use checkpoint_support::{SHARDS, counting, file};
use hub_support::{
    Answer, Body, COMMIT, Fault, MockHub, Ranges, answers, environment, hub_of, open, repository,
    resolve, run, sha256,
};
use radpack::checkpoint::{Checkpoint, HubEnvironment, OpenOptions, Transfer};
use radpack::diag::{Failure, FailureKind};

/// A shard of the tiny model.
const WEIGHTS: &str = "model-00002-of-00004.safetensors";

/// The repository with a shard of a few hundred bytes, whose requests go wrong as said.
fn faulty(faults: impl IntoIterator<Item = Fault>) -> (BTreeMap<String, Answer>, Vec<u8>) {
    let shard = file(&[counting("a", &[64], 1)]);
    let mut files = repository();
    files.insert(SHARDS[0], shard.clone());
    let mut table = answers(&files);
    let answer = table.remove(&resolve(SHARDS[0])).expect("served");
    table.insert(resolve(SHARDS[0]), answer.with_faults(faults));
    (table, shard)
}

fn in_cache(cache: &Path, path: &str) -> PathBuf {
    cache.join("models--org--tiny").join(path)
}

fn snapshot(cache: &Path, file: &str) -> PathBuf {
    in_cache(cache, &format!("snapshots/{COMMIT}/{file}"))
}

fn incomplete(cache: &Path, content: &[u8]) -> PathBuf {
    in_cache(cache, &format!("blobs/{}.incomplete", sha256(content)))
}

/// Opens `org/tiny` and returns what was told meanwhile.
fn opened(hub: HubEnvironment) -> (Result<Checkpoint, Failure>, Vec<Transfer>) {
    let told: Arc<Mutex<Vec<Transfer>>> = Arc::default();
    let listener = Arc::clone(&told);
    let options = OpenOptions {
        hub: Some(hub),
        on_transfer: Some(Arc::new(move |event| listener.lock().expect("lock").push(event))),
        ..OpenOptions::default()
    };
    let result = Checkpoint::open(Path::new("org/tiny"), &options);
    let told = told.lock().expect("lock").clone();
    (result, told)
}

/// How far a file was, event by event, and that sums never exceed the total.
fn steps(told: &[Transfer], of: &str) -> Vec<u64> {
    let mut steps = Vec::new();
    for event in told {
        if let Transfer::Bytes { file, done, of: bytes, sum, total } = event {
            assert!(done <= bytes && sum <= total && done <= sum, "{event:?}");
            if file == of {
                steps.push(*done);
            }
        }
    }
    steps
}

fn pauses(told: &[Transfer]) -> Vec<(String, String, Duration)> {
    let pause = |event: &Transfer| match event {
        Transfer::Paused { file, why, pause } => Some((file.clone(), why.clone(), *pause)),
        _ => None,
    };
    told.iter().filter_map(pause).collect()
}

fn range(from: u64, to: usize) -> Option<Range<u64>> {
    Some(from..to as u64)
}

#[test]
fn a_connection_that_breaks_goes_on_where_it_stopped() {
    let (table, shard) = faulty([Fault::Cut(10), Fault::Cut(0), Fault::Cut(90)]);
    let hub = MockHub::start(table);
    let cache = tempfile::tempdir().expect("a folder");
    let (result, told) = opened(environment(&hub, cache.path()));
    result.unwrap_or_else(|f| panic!("{f}"));
    let n = shard.len();
    assert_eq!(hub.ranges_of(SHARDS[0]), [None, range(10, n), range(10, n), range(100, n)]);
    assert_eq!(std::fs::read(snapshot(cache.path(), SHARDS[0])).expect("fetched"), shard);
    assert!(!incomplete(cache.path(), &shard).exists());
    let steps = steps(&told, SHARDS[0]);
    assert!(steps.is_sorted(), "{steps:?}");
    assert_eq!(steps.last(), Some(&(n as u64)));
    let whys: Vec<String> = pauses(&told).into_iter().map(|(_, why, _)| why).collect();
    let broke = |have: u64| format!("the connection ended after {have} of {n} bytes");
    assert_eq!(whys, [broke(10), broke(10), broke(100)]);
    assert_eq!(told.last(), Some(&Transfer::Ended));
}

#[test]
fn a_later_run_fetches_only_what_an_earlier_one_left_out() {
    let always = || std::iter::repeat_n(Fault::Cut(0), 20);
    let (table, shard) = faulty([Fault::Cut(77)].into_iter().chain(always()));
    let hub = MockHub::start(table);
    let cache = tempfile::tempdir().expect("a folder");
    let failure = open("org/tiny", environment(&hub, cache.path())).expect_err("it never comes");
    assert_eq!(failure.kind, FailureKind::Failed);
    let n = shard.len();
    assert_eq!(
        failure.problems[0].message,
        format!("{} cannot be fetched: the connection ended after 77 of {n} bytes", SHARDS[0])
    );
    assert!(failure.problems[0].help[0].contains("goes on where it stopped"), "{failure}");
    assert_eq!(std::fs::read(incomplete(cache.path(), &shard)).expect("kept"), shard[..77]);
    assert!(!snapshot(cache.path(), SHARDS[0]).exists());

    let (table, _) = faulty([]);
    let sound = MockHub::start(table);
    open("org/tiny", environment(&sound, cache.path())).unwrap_or_else(|f| panic!("{f}"));
    assert_eq!(sound.ranges_of(SHARDS[0]), [range(77, n)]);
    assert_eq!(std::fs::read(snapshot(cache.path(), SHARDS[0])).expect("fetched"), shard);
}

#[test]
fn a_hub_that_serves_no_parts_sends_the_file_again_from_its_beginning() {
    let (mut table, shard) = faulty([Fault::Cut(10)]);
    table.get_mut(&resolve(SHARDS[0])).expect("served").ranges = Ranges::Ignored;
    let hub = MockHub::start(table);
    let cache = tempfile::tempdir().expect("a folder");
    let (result, told) = opened(environment(&hub, cache.path()));
    result.unwrap_or_else(|f| panic!("{f}"));
    assert_eq!(hub.ranges_of(SHARDS[0]), [None, range(10, shard.len())]);
    assert_eq!(std::fs::read(snapshot(cache.path(), SHARDS[0])).expect("fetched"), shard);
    assert!(steps(&told, SHARDS[0]).contains(&0), "the beginning is told");
}

#[test]
fn bytes_that_are_not_the_hubs_are_refused_and_leave_nothing_behind() {
    for name in [SHARDS[0], "LICENSE"] {
        let (mut table, shard) = faulty([]);
        let answer = table.get_mut(&resolve(name)).expect("served");
        let Body::Bytes(bytes) = &mut answer.body else { panic!("bytes") };
        bytes[2] ^= 1;
        let wrong = bytes.clone();
        let hub = MockHub::start(table);
        let cache = tempfile::tempdir().expect("a folder");
        let failure = open("org/tiny", environment(&hub, cache.path())).expect_err("damaged");
        assert_eq!(
            (failure.kind, failure.headline.as_str()),
            (FailureKind::Failed, "org/tiny did not arrive whole")
        );
        let message = &failure.problems[0].message;
        let wanted = match name {
            // By `git hash-object`, of "free" and of "frde".
            "LICENSE" => "LICENSE: git sha1 d5ff0576ae3eb2118f1c843595a46ad35d2074c3 was expected, GIT was found"
                .replace("GIT", FRDE),
            _ => format!("{name}: sha256 {} was expected, {} was found", sha256(&shard), sha256(&wrong)),
        };
        assert_eq!(*message, wanted);
        assert!(failure.problems[0].help[0].contains("run again to fetch them again"));
        assert!(!snapshot(cache.path(), name).exists());
        let blobs = std::fs::read_dir(in_cache(cache.path(), "blobs")).expect("a folder");
        for blob in blobs.map(|e| e.expect("an entry").path()) {
            assert_ne!(std::fs::read(&blob).expect("a file"), wrong, "{}", blob.display());
        }
        let (table, _) = faulty([]);
        let sound = MockHub::start(table);
        open("org/tiny", environment(&sound, cache.path())).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(sound.ranges_of(name), [None], "all of it is fetched again");
    }
}

/// Id of a file in git with the text `frde`.
const FRDE: &str = "8c3094957b82f1f2a6616f151e0f07474b11bd68";

#[test]
fn a_damaged_beginning_from_an_earlier_run_is_fetched_again() {
    let (table, shard) = faulty([]);
    let hub = MockHub::start(table);
    let cache = tempfile::tempdir().expect("a folder");
    std::fs::create_dir_all(in_cache(cache.path(), "blobs")).expect("made");
    std::fs::write(incomplete(cache.path(), &shard), [b'x'; 30]).expect("written");
    open("org/tiny", environment(&hub, cache.path())).unwrap_or_else(|f| panic!("{f}"));
    assert_eq!(hub.ranges_of(SHARDS[0]), [range(30, shard.len()), None]);
    assert_eq!(std::fs::read(snapshot(cache.path(), SHARDS[0])).expect("fetched"), shard);

    // One that is longer than the file is no beginning of it.
    let cache = tempfile::tempdir().expect("a folder");
    std::fs::create_dir_all(in_cache(cache.path(), "blobs")).expect("made");
    std::fs::write(incomplete(cache.path(), &shard), vec![b'x'; 3000]).expect("written");
    let (table, _) = faulty([]);
    let hub = MockHub::start(table);
    open("org/tiny", environment(&hub, cache.path())).unwrap_or_else(|f| panic!("{f}"));
    assert_eq!(hub.ranges_of(SHARDS[0]), [None]);
}

#[test]
fn a_hub_without_digests_is_not_trusted() {
    let (mut table, _) = faulty([]);
    let answer = table.get_mut(&resolve(SHARDS[0])).expect("served");
    answer.headers.retain(|(name, _)| *name != "ETag");
    let hub = MockHub::start(table);
    let cache = tempfile::tempdir().expect("a folder");
    let failure = open("org/tiny", environment(&hub, cache.path())).expect_err("no digest");
    assert_eq!(
        failure.problems[0].message,
        format!("{}: {} gives no digest to compare with", SHARDS[0], hub.address)
    );
    assert!(hub.ranges_of(SHARDS[0]).is_empty(), "nothing of it was fetched");
}

#[test]
fn a_slow_hub_is_slow_and_no_failure() {
    let (table, shard) = faulty([Fault::Dribble(Duration::from_millis(1))]);
    let hub = MockHub::start(table);
    let cache = tempfile::tempdir().expect("a folder");
    let patience = Duration::from_millis(250);
    let hub_settings = HubEnvironment { timeout: patience, ..environment(&hub, cache.path()) };
    let started = Instant::now();
    let (result, told) = opened(hub_settings);
    result.unwrap_or_else(|f| panic!("{f}"));
    // All of it took longer than any silence may last.
    assert!(started.elapsed() > patience, "{:?}", started.elapsed());
    let steps = steps(&told, SHARDS[0]);
    assert!(steps.is_sorted(), "{steps:?}");
    assert_eq!(steps.last(), Some(&(shard.len() as u64)));
    assert!(steps.len() > 10, "told as it comes: {steps:?}");
}

#[test]
fn a_hub_that_falls_silent_is_given_up_on_with_the_seconds_and_what_helps() {
    let (table, shard) = faulty(std::iter::repeat_n(Fault::Stall(20), 10));
    let hub = MockHub::start(table);
    let cache = tempfile::tempdir().expect("a folder");
    let patience = Duration::from_millis(100);
    let hub_settings = HubEnvironment { timeout: patience, ..environment(&hub, cache.path()) };
    let (table, _) =
        faulty([Fault::Stall(20)].into_iter().chain(std::iter::repeat_n(Fault::Stall(0), 10)));
    let silent = MockHub::start(table);
    let settings =
        HubEnvironment { endpoint: Some(silent.address.clone()), ..hub_settings.clone() };
    let (result, told) = opened(settings);
    let failure = result.expect_err("silence");
    assert_eq!(failure.kind, FailureKind::Failed);
    assert_eq!(
        failure.problems[0].message,
        format!("{}: {} sent nothing for 0.1 s", SHARDS[0], silent.address)
    );
    assert_eq!(failure.problems[0].help[0], "run again: a download goes on where it stopped");
    assert_eq!(failure.problems[0].help[1], "HF_HUB_DOWNLOAD_TIMEOUT=60 waits longer (seconds)");
    assert_eq!(
        silent.ranges_of(SHARDS[0]).len(),
        6,
        "one that brought something and five that did not"
    );
    let silences = |told: &[Transfer]| {
        pauses(told)
            .iter()
            .filter(|(file, why, _)| file == SHARDS[0] && why.ends_with("sent nothing for 0.1 s"))
            .count()
    };
    assert_eq!(silences(&told), 5);

    // Silences between which something comes do not add up.
    let cache = tempfile::tempdir().expect("a folder");
    let (result, told) =
        opened(HubEnvironment { cache: cache.path().to_path_buf(), ..hub_settings });
    result.unwrap_or_else(|f| panic!("{f}"));
    assert_eq!(silences(&told), 10);
    assert_eq!(hub.ranges_of(SHARDS[0]).last(), Some(&range(200, shard.len())));
}

#[test]
fn a_hub_that_never_answers_is_given_up_on() {
    let (mut table, _) = faulty([]);
    let info = table.get_mut("/api/models/org/tiny/revision/main").expect("served");
    *info = info.clone().with_faults(std::iter::repeat_n(Fault::Stall(0), 10));
    let hub = MockHub::start(table);
    let cache = tempfile::tempdir().expect("a folder");
    let settings =
        HubEnvironment { timeout: Duration::from_millis(50), ..environment(&hub, cache.path()) };
    let failure = open("org/tiny", settings).expect_err("silence");
    assert_eq!(failure.problems[0].message, format!("{} sent nothing for 0.05 s", hub.address));
}

#[test]
fn a_limit_of_requests_is_waited_for_as_long_as_the_hub_asks() {
    let mut limit = Answer::error("429 Too Many Requests", "RateLimited", "Slow down");
    limit.headers.push(("Retry-After", "1".into()));
    let (table, shard) = faulty([Fault::Cut(5), Fault::Instead(Box::new(limit.clone()))]);
    let hub = MockHub::start(table);
    let cache = tempfile::tempdir().expect("a folder");
    let started = Instant::now();
    let (result, told) = opened(environment(&hub, cache.path()));
    result.unwrap_or_else(|f| panic!("{f}"));
    assert!(started.elapsed() >= Duration::from_secs(1));
    let why = format!("{} limits the rate of requests", hub.address);
    assert_eq!(pauses(&told)[1], (SHARDS[0].to_owned(), why, Duration::from_secs(1)));
    let n = shard.len();
    assert_eq!(hub.ranges_of(SHARDS[0]), [None, range(5, n), range(5, n)]);

    // An hour is for the user to decide on.
    limit.headers.retain(|(name, _)| *name != "Retry-After");
    limit.headers.push(("Retry-After", "3600".into()));
    let (table, _) = faulty([Fault::Instead(Box::new(limit))]);
    let hub = MockHub::start(table);
    let cache = tempfile::tempdir().expect("a folder");
    let failure = open("org/tiny", environment(&hub, cache.path())).expect_err("too long");
    assert_eq!(
        failure.problems[0].message,
        format!("{} limits the rate of requests (the hub says: Slow down)", hub.address)
    );
    assert_eq!(
        failure.problems[0].help[0],
        "wait 3600 s, as it asks, and run again; logged-in users have higher limits: hf auth login"
    );
}

#[test]
fn a_hub_with_a_problem_of_its_own_is_asked_again_and_not_for_ever() {
    let down = Answer::error("503 Service Unavailable", "", "Back soon");
    let fault = || Fault::Instead(Box::new(down.clone()));
    let (table, _) = faulty([fault(), fault()]);
    let hub = MockHub::start(table);
    let cache = tempfile::tempdir().expect("a folder");
    open("org/tiny", environment(&hub, cache.path())).unwrap_or_else(|f| panic!("{f}"));
    assert_eq!(hub.ranges_of(SHARDS[0]), [None, None, None]);

    let (table, _) = faulty(std::iter::repeat_with(fault).take(20));
    let hub = MockHub::start(table);
    let cache = tempfile::tempdir().expect("a folder");
    let failure = open("org/tiny", environment(&hub, cache.path())).expect_err("down");
    assert_eq!(
        failure.problems[0].message,
        format!(
            "{}: {} answers 503 Service Unavailable (the hub says: Back soon)",
            SHARDS[0], hub.address
        )
    );
    assert_eq!(hub.ranges_of(SHARDS[0]).len(), 6);
    // The error's text is not in the cache as if it were the file.
    assert!(!snapshot(cache.path(), SHARDS[0]).exists());

    // The same for questions about the repository.
    for path in [
        "/api/models/org/tiny/revision/main".to_owned(),
        format!("/api/models/org/tiny/tree/{COMMIT}"),
    ] {
        let (mut table, _) = faulty([]);
        let answer = table.get_mut(&path).expect("served");
        *answer = answer.clone().with_faults([fault(), fault()]);
        let hub = MockHub::start(table);
        let cache = tempfile::tempdir().expect("a folder");
        open("org/tiny", environment(&hub, cache.path())).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(hub.log().iter().filter(|l| **l == format!("GET {path}")).count(), 3);
    }
}

/// Weights as the real hub serves them: the resolving address leads elsewhere and gives the digest, the place itself
/// has a signed address and an ETag of its own.
fn elsewhere(hub: impl Fn(&str) -> Answer) -> (MockHub, Vec<u8>) {
    let (mut table, shard) = faulty([]);
    let place = MockHub::start(BTreeMap::from([("/place".to_owned(), hub("/place"))]));
    let mut leads = Answer::error("302 Found", "", "");
    let other_host = place.address.replace("127.0.0.1", "localhost");
    leads.headers = vec![
        ("Location", format!("{other_host}/place?Signature=letmein")),
        ("X-Linked-ETag", format!("\"{}\"", sha256(&shard))),
        ("ETag", "\"of-the-redirect\"".into()),
    ];
    table.insert(resolve(SHARDS[0]), leads);
    let hub = MockHub::start(table);
    // The log of the other host is what is of interest.
    (MockHub { log: place.log, ranges: place.ranges, ..hub }, shard)
}

#[test]
fn weights_that_lie_elsewhere_are_compared_with_the_hubs_digest_and_get_no_token() {
    let body = file(&[counting("a", &[64], 1)]);
    let (hub, shard) = elsewhere(|_| {
        let mut answer = Answer::file(Body::Bytes(body.clone())).with_faults([Fault::Cut(9)]);
        answer.headers = vec![("ETag", "\"of-the-place\"".into())];
        answer
    });
    let cache = tempfile::tempdir().expect("a folder");
    open("org/tiny", environment(&hub, cache.path())).unwrap_or_else(|f| panic!("{f}"));
    assert_eq!(std::fs::read(snapshot(cache.path(), SHARDS[0])).expect("fetched"), shard);
    let asked = hub.ranges.lock().expect("lock").clone();
    assert_eq!(asked, [("/place".to_owned(), None), ("/place".to_owned(), range(9, shard.len()))]);
    let log = hub.log();
    assert!(!log.iter().any(|l| l.contains("token")), "the token is the hub's alone: {log:?}");
    let link = std::fs::read_link(snapshot(cache.path(), SHARDS[0])).expect("a link");
    assert_eq!(link, Path::new(&format!("../../blobs/{}", sha256(&shard))));

    let (hub, _) = elsewhere(|_| Answer::error("403 Forbidden", "", "Signature expired"));
    let cache = tempfile::tempdir().expect("a folder");
    let failure =
        open("org/tiny", environment(&hub, cache.path())).expect_err("refused").to_string();
    assert!(failure.contains("Signature expired"), "{failure}");
    assert!(!failure.contains("letmein") && !failure.contains("hf_test"), "{failure}");
}

#[test]
fn a_file_may_move_a_number_of_times() {
    let fetched = |moves: usize| {
        let (mut table, shard) = faulty([]);
        let served = table.remove(&resolve(SHARDS[0])).expect("served");
        let place = |n: usize| if n == 0 { resolve(SHARDS[0]) } else { format!("/place-{n}") };
        for n in 0..moves {
            let mut leads = Answer::error("302 Found", "", "");
            leads.headers = vec![("Location", place(n + 1))];
            table.insert(place(n), leads);
        }
        table.insert(place(moves), served);
        let hub = MockHub::start(table);
        let cache = tempfile::tempdir().expect("a folder");
        open("org/tiny", environment(&hub, cache.path())).map(|_| {
            assert_eq!(std::fs::read(snapshot(cache.path(), SHARDS[0])).expect("fetched"), shard);
        })
    };
    fetched(4).unwrap_or_else(|f| panic!("{f}"));
    // The fifth answer still leads elsewhere.
    assert!(fetched(5).is_err());
}

#[test]
fn two_runs_do_not_write_one_file() {
    let (table, shard) = faulty([]);
    let hub = MockHub::start(table);
    let cache = tempfile::tempdir().expect("a folder");
    let locks = cache.path().join(".locks/models--org--tiny");
    std::fs::create_dir_all(&locks).expect("made");
    let lock = std::fs::File::create(locks.join(format!("{}.lock", sha256(&shard)))).expect("made");
    lock.lock().expect("locked");
    let patience = Duration::from_millis(60);
    let settings = HubEnvironment { timeout: patience, ..environment(&hub, cache.path()) };
    let failure = open("org/tiny", settings).expect_err("locked");
    assert!(
        failure.problems[0]
            .message
            .starts_with(&format!("{}: another process has been fetching it", SHARDS[0])),
        "{failure}"
    );
    assert!(
        failure.problems[0].help[0].ends_with(&format!("{}.lock", sha256(&shard))),
        "{failure}"
    );
    drop(lock);
    open("org/tiny", environment(&hub, cache.path())).unwrap_or_else(|f| panic!("{f}"));
}

#[test]
fn a_run_that_is_killed_in_the_middle_of_a_download_goes_on_in_the_next() {
    let tmp = tempfile::tempdir().expect("a folder");
    let folder = tmp.path().join("source");
    testkit::copy_folder(&testkit::fixtures().join("tiny-gemma4-dense"), &folder).expect("copied");
    let weights = std::fs::read(folder.join(WEIGHTS)).expect("weights");
    let half = weights.len() as u64 / 2;
    let hub = hub_of(&folder, WEIGHTS, [Fault::Stall(half)]);
    let convert = ["convert", "org/tiny", "--recipe", "w8a16", "-o", "model.rad"];
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("radpack"))
        .current_dir(tmp.path())
        .env("HF_ENDPOINT", &hub.address)
        .env("HF_HUB_CACHE", tmp.path().join("cache"))
        .env("HF_HUB_DOWNLOAD_TIMEOUT", "600")
        .env_remove("HF_HUB_OFFLINE")
        .args(convert)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let growing = incomplete(&tmp.path().join("cache"), &weights);
    let deadline = Instant::now() + Duration::from_secs(60);
    while std::fs::metadata(&growing).map_or(0, |m| m.len()) < half {
        assert!(Instant::now() < deadline, "half of the weights never came");
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().expect("killed");
    let output = child.wait_with_output().expect("it ended");
    let told = String::from_utf8(output.stderr).expect("UTF-8");
    let lines: Vec<&str> = told.lines().collect();
    assert_eq!(lines.len(), 1, "one line for the stage: {told}");
    assert!(lines[0].starts_with("fetching  org/tiny: "), "{told}");
    assert!(!told.contains("hf_"), "{told}");
    assert!(!tmp.path().join("model.rad").exists());

    let (code, _, err) = run(tmp.path(), &hub, &convert);
    assert_eq!(code, 0, "{err}");
    let n = weights.len();
    assert_eq!(hub.ranges_of(WEIGHTS), [None, range(half, n)]);
    let fetched = snapshot(&tmp.path().join("cache"), WEIGHTS);
    assert!(std::fs::read(fetched).expect("fetched") == weights);
}

#[test]
fn a_file_of_the_cache_that_is_not_what_its_name_says_is_not_converted() {
    let tmp = tempfile::tempdir().expect("a folder");
    let folder = tmp.path().join("source");
    testkit::copy_folder(&testkit::fixtures().join("tiny-gemma4-dense"), &folder).expect("copied");
    let hub = hub_of(&folder, "", []);
    let convert = ["convert", "org/tiny", "--recipe", "w8a16", "-o", "model.rad"];
    let (code, _, err) = run(tmp.path(), &hub, &convert);
    assert_eq!(code, 0, "{err}");
    let link = snapshot(&tmp.path().join("cache"), WEIGHTS);
    let blob = std::fs::canonicalize(&link).expect("a blob");
    let sound = std::fs::read(&blob).expect("a file");
    let mut damaged = sound.clone();
    *damaged.last_mut().expect("not empty") ^= 1;
    std::fs::write(&blob, &damaged).expect("written");
    std::fs::remove_file(tmp.path().join("model.rad")).expect("removed");
    let asked = hub.log().len();
    let by_folder = link.parent().expect("a folder").to_str().expect("UTF-8").to_owned();
    for source in ["org/tiny", by_folder.as_str()] {
        let (code, _, err) =
            run(tmp.path(), &hub, &["convert", source, "--recipe", "w8a16", "-o", "model.rad"]);
        assert_eq!(code, 1, "{err}");
        // Lines are broken where the terminal ends.
        let err = err.split_whitespace().collect::<Vec<_>>().join(" ");
        let (expected, found) = (sha256(&sound), sha256(&damaged));
        assert!(
            err.contains(&format!("{WEIGHTS}: sha256 {expected} was expected, {found} was found")),
            "{err}"
        );
        assert!(err.contains("the file in the cache is damaged; remove it: rm "), "{err}");
        assert!(!tmp.path().join("model.rad").exists());
    }
    assert!(hub.log()[asked..].iter().all(|l| !l.contains("GET /org/tiny/resolve")));
    // What the message says helps.
    std::fs::remove_file(&blob).expect("removed");
    let (code, _, err) = run(tmp.path(), &hub, &convert);
    assert_eq!(code, 0, "{err}");
    assert_eq!(hub.ranges_of(WEIGHTS), [None, None]);
}
