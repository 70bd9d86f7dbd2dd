//! A conversion shared by several machines gives the bytes of one machine.

mod checkpoint_support;
mod cli_support;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use checkpoint_support::large::large;
use cli_support::{dense_copy, radpack, resealed, sha256, succeeds};
use radpack::artifact::{Artifact, digests};
use radpack::checkpoint::{Checkpoint, OpenOptions};
use radpack::diag::FailureKind;
use radpack::pipeline::{
    self, ConvertOptions, Earlier, PartPlan, Plan, Request, Sources, Unwatched,
};
use radpack::recipe;
use tempfile::tempdir;

static GOES_ON: AtomicBool = AtomicBool::new(false);

fn options() -> ConvertOptions<'static> {
    ConvertOptions { threads: 2, progress: &Unwatched, cancelled: &GOES_ON }
}

/// Digests of all weights, by entry.
fn weights(path: &Path) -> Vec<(String, [u8; 32])> {
    let artifact = Artifact::open(path).expect("a container");
    let all = artifact.entries().map(|e| (e.name().to_string(), digests::of_entry(&e)));
    all.filter(|(name, _)| !name.starts_with("radpack/")).collect()
}

fn open(path: &Path) -> Checkpoint {
    Checkpoint::open(path, &OpenOptions::default()).unwrap_or_else(|f| panic!("{f}"))
}

fn plan(source: &Path, draft: Option<&Path>, name: &str, devices: u32) -> Plan {
    let mut recipe = recipe::load(Some(name)).unwrap_or_else(|f| panic!("{f}"));
    recipe.set(&format!("target.devices={devices}")).unwrap_or_else(|f| panic!("{f}"));
    let sources = Sources { main: open(source), draft: draft.map(open), imatrix: None };
    let request = Request { weights_only: false, tokenizer_required: false };
    pipeline::plan(sources, recipe, request).unwrap_or_else(|f| panic!("{f}"))
}

/// All parts, as files; what each holds.
fn parts(plan: &Plan, folder: &Path, of: u32) -> Vec<(PathBuf, BTreeSet<String>)> {
    let one = |index| {
        let part = PartPlan::of(plan, index, of).unwrap_or_else(|f| panic!("{f}"));
        let out = pipeline::part_path(&folder.join("t.rad"), index, of);
        let made = pipeline::convert_part(plan, &part, &out, options(), Earlier::default());
        made.unwrap_or_else(|f| panic!("{f}"));
        let names = weights(&out).into_iter().map(|(name, _)| name).collect();
        (out, names)
    };
    (1..=of).map(one).collect()
}

#[test]
fn any_number_of_parts_gives_the_file_of_one_machine() {
    let [moe, e, assistant] =
        ["tiny-gemma4-moe", "tiny-gemma4-e", "tiny-gemma4-e-assistant"].map(testkit::tiny_model);
    // Experts on two devices (their planes lie in an order of their own), scales over several weights, a draft model.
    let cases = [
        (moe.as_path(), None, "mxfp4", 2, &[1, 2, 3, 7, 500][..]),
        (moe.as_path(), None, "nvfp4", 1, &[2, 5][..]),
        (e.as_path(), Some(assistant.as_path()), "w8a16", 1, &[4][..]),
    ];
    for (source, draft, recipe, devices, numbers) in cases {
        let tmp = tempdir().expect("a folder");
        let plan = plan(source, draft, recipe, devices);
        let whole = tmp.path().join("whole.rad");
        pipeline::convert(&plan, &whole, options()).unwrap_or_else(|f| panic!("{f}"));
        let want = sha256(&whole);
        let weights = weights(&whole);
        for &of in numbers {
            let made = parts(&plan, tmp.path(), of);
            let total: usize = made.iter().map(|(_, names)| names.len()).sum();
            let all: BTreeSet<&String> = made.iter().flat_map(|(_, names)| names).collect();
            assert_eq!(
                (total, all.len()),
                (weights.len(), weights.len()),
                "{recipe} in {of} parts"
            );
            // The order in which parts are named is nobody's business.
            let paths: Vec<PathBuf> = made.into_iter().map(|(path, _)| path).rev().collect();
            let out = tmp.path().join(format!("{of}.rad"));
            let merged = pipeline::merge(&paths, &out, &GOES_ON).unwrap_or_else(|f| panic!("{f}"));
            assert_eq!(sha256(&out), want, "{recipe} in {of} parts");
            assert_eq!(merged.parts, of as usize);
            paths.iter().for_each(|path| fs::remove_file(path).expect("removes"));
        }
    }
}

#[test]
fn parts_share_the_work_evenly_and_read_few_files() {
    let plan = plan(&cli_support::dense(), None, "int8-g128", 1);
    let all = plan.assignment.total.source_bytes;
    let largest = plan.assignment.stored(&plan.table).filter_map(|(_, w)| w.source_bytes()).max();
    let largest = largest.expect("it has weights");
    let files = plan.sources.bytes();
    let parts: Vec<PartPlan> =
        (1..=4).map(|i| PartPlan::of(&plan, i, 4).unwrap_or_else(|f| panic!("{f}"))).collect();
    assert_eq!(parts.iter().map(|p| p.source_bytes).sum::<u64>(), all);
    for part in &parts {
        assert!(part.source_bytes.abs_diff(all / 4) <= largest, "{} of {all}", part.source_bytes);
    }
    // Four shards, cut into four: each part reads its own and at most a neighbour's.
    let hashed: u64 = parts.iter().map(|p| p.hashed_bytes).sum();
    assert!(hashed < 2 * files, "{hashed} of {files}");
}

fn arguments<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let own = ["convert", "large", "--weights-only", "--no-tokenizer", "-o", "t.rad"];
    [&own[..], &["--threads", "1", "--kernel", "scalar"], more].concat()
}

fn start(folder: &Path, part: &str) -> Child {
    Command::new(env!("CARGO_BIN_EXE_radpack"))
        .current_dir(folder)
        .args(arguments(&["--part", part, "--resume"]))
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .expect("starts")
}

#[test]
fn four_processes_one_killed_and_started_again_give_the_bytes_of_one_machine() {
    let tmp = tempdir().expect("a folder");
    large(tmp.path());
    succeeds(tmp.path(), &arguments(&[]));
    let want = sha256(&tmp.path().join("t.rad"));
    fs::rename(tmp.path().join("t.rad"), tmp.path().join("whole.rad")).expect("renames");

    let names = ["1/4", "2/4", "3/4", "4/4"];
    let mut processes: Vec<Child> = names.iter().map(|part| start(tmp.path(), part)).collect();
    // The third dies as soon as it has written down that a weight is complete.
    let journal = tmp.path().join("t.rad.part-3-of-4.partial.journal");
    let deadline = Instant::now() + Duration::from_secs(120);
    let complete = |text: String| text.contains("\"what\":\"weight\"");
    while !fs::read_to_string(&journal).is_ok_and(complete) {
        assert!(Instant::now() < deadline, "part 3 writes nothing");
        let ended = processes[2].try_wait().expect("waits");
        assert!(ended.is_none(), "part 3 ended before it could be killed");
        std::thread::sleep(Duration::from_millis(1));
    }
    processes[2].kill().expect("is killed");
    for (number, mut process) in processes.into_iter().enumerate() {
        let status = process.wait().expect("ends");
        assert_eq!(status.success(), number != 2, "part {} of 4", number + 1);
    }
    let made = |i: u32| format!("t.rad.part-{i}-of-4");
    let all: Vec<String> = (1..=4).map(made).collect();
    let merge: Vec<&str> =
        ["merge", "-o", "t.rad"].into_iter().chain(all.iter().map(String::as_str)).collect();
    // Before it is there, nothing is put together.
    let early = radpack(tmp.path(), &merge);
    assert_eq!(early.code, 2, "{}", early.stderr);
    assert!(early.stderr.contains("t.rad.part-3-of-4"), "{}", early.stderr);
    assert!(!tmp.path().join("t.rad").exists());

    assert!(start(tmp.path(), "3/4").wait().expect("ends").success());
    assert!(!journal.exists());
    let ran = succeeds(tmp.path(), &merge);
    assert!(ran.stdout.contains("32 weights of 4 parts"), "{}", ran.stdout);
    assert_eq!(sha256(&tmp.path().join("t.rad")), want);
    succeeds(tmp.path(), &["validate", "t.rad", "--against", "large"]);
}

/// Four parts of the committed model under a recipe, by name.
fn four(folder: &Path, source: &str, recipe: &str, name: &str) -> Vec<String> {
    let one = |i: u32| {
        let part = format!("{i}/4");
        let more = ["--recipe", recipe, "--part", &part, "-o", name];
        succeeds(folder, &[&["convert", source][..], &more].concat());
        format!("{name}.part-{i}-of-4")
    };
    (1..=4).map(one).collect()
}

#[test]
fn what_is_not_all_parts_of_one_conversion_is_refused_by_name_and_nothing_is_written() {
    let tmp = tempdir().expect("a folder");
    let folder = tmp.path();
    dense_copy(folder);
    let good = four(folder, "model", "w8a16", "a.rad");
    let other = four(folder, "model", "int8-g128", "b.rad");
    fs::write(folder.join("old.rad"), "older").expect("writes");
    let refused = |parts: &[&str], code: i32, says: &[&str]| {
        let ran = radpack(folder, &[&["merge", "-o", "old.rad"][..], parts].concat());
        assert_eq!(ran.code, code, "{}", ran.stderr);
        for text in says {
            assert!(ran.stderr.contains(text), "{text}: {}", ran.stderr);
        }
        assert_eq!(fs::read(folder.join("old.rad")).expect("reads"), b"older");
        assert!(!folder.join("old.rad.partial").exists());
    };
    let [a, b, c, d] = [0, 1, 2, 3].map(|i| good[i].as_str());
    refused(&[a, c], 2, &["2 of 4 parts are missing: 2/4 and 4/4"]);
    refused(&[a, b, c, c, d], 2, &["a.rad.part-3-of-4 are both part 3 of 4"]);
    refused(
        &[a, b, &other[2], d],
        2,
        &["a.rad.part-1-of-4", "b.rad.part-3-of-4", "are of different"],
    );
    refused(&["old.rad", a], 2, &["the output is the part old.rad"]);
    fs::write(folder.join("text"), "no container").expect("writes");
    succeeds(folder, &["convert", "model", "-o", "whole.rad"]);
    refused(
        &[a, "text", "whole.rad", "none"],
        2,
        &["text", "whole.rad: it is no part", "none", "3 problems"],
    );

    // One machine had another shard: its digest tells, although every part is sound.
    let shard = folder.join("model/model-00002-of-00004.safetensors");
    let mut bytes = fs::read(&shard).expect("reads");
    let last = bytes.len() - 2;
    bytes[last] ^= 1;
    fs::write(&shard, &bytes).expect("writes");
    let elsewhere = four(folder, "model", "w8a16", "c.rad");
    let mixed = [a, &elsewhere[1], c, d];
    refused(&mixed, 2, &["model-00002-of-00004.safetensors was not the same file everywhere"]);

    // A part whose bytes changed after it was made.
    let bytes = fs::read(folder.join(b)).expect("reads");
    let artifact = Artifact::from_bytes(&bytes).expect("opens");
    let entry = artifact.entries().find(|e| !e.name().to_string().starts_with("radpack/"));
    let entry = entry.expect("it has weights");
    let (name, at) = (entry.name().to_string(), entry.offset() as usize);
    let mut damaged = bytes.clone();
    damaged[at] ^= 0x10;
    fs::write(folder.join("damaged"), &damaged).expect("writes");
    refused(&[a, "damaged", c, d], 4, &[&name, "not what its digest tells", "--part 2/4"]);

    // A record that claims the places of another part, with digests that fit it.
    let record = |bytes: &[u8]| {
        let artifact = Artifact::from_bytes(bytes).expect("opens");
        let entry = artifact.find("radpack/part").expect("a record");
        entry.plane(0).to_vec()
    };
    let first_position = |bytes: &mut [u8]| {
        // Index, parts, plan, directory, length of the list: the first position follows.
        let at = 4 + 4 + 32 + 8 + 8;
        bytes[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
    };
    assert_eq!(record(&bytes)[..8], [2, 0, 0, 0, 4, 0, 0, 0]);
    fs::write(folder.join("hostile"), resealed(&bytes, "radpack/part", first_position))
        .expect("writes");
    refused(&[a, "hostile", c, d], 4, &["not the file that they were planned for"]);
    succeeds(folder, &["merge", "-o", "old.rad", d, b, a, c]);
    let want = weights(&folder.join("old.rad"));
    let (hostile, new) = (folder.join("hostile"), folder.join("new.rad"));
    let paths: Vec<PathBuf> = [a, "hostile", c, d].iter().map(|name| folder.join(name)).collect();
    let mut refusals = 0;
    for flipped in (0..record(&bytes).len()).step_by(13) {
        fs::write(&hostile, resealed(&bytes, "radpack/part", |r| r[flipped] ^= 0x81))
            .expect("writes");
        match pipeline::merge(&paths, &new, &GOES_ON) {
            // Digests and sums that were sealed wrong are what the merged file says of its weights; it has the weights.
            Ok(_) => assert_eq!(weights(&new), want, "byte {flipped}"),
            Err(failure) => {
                assert_ne!(failure.kind, FailureKind::Failed, "byte {flipped}: {failure}");
                refusals += 1;
            }
        }
    }
    assert!(refusals > 40, "{refusals}");
}

#[test]
fn a_part_is_no_whole_file_and_says_so() {
    let tmp = tempdir().expect("a folder");
    let parts = four(tmp.path(), cli_support::dense().to_str().expect("UTF-8"), "w8a16", "a.rad");
    for command in ["inspect", "validate", "card"] {
        let ran = radpack(tmp.path(), &[command, &parts[1]]);
        assert_eq!(ran.code, 2, "{command}: {}", ran.stderr);
        assert!(ran.stderr.contains("it is part 2/4 of a conversion"), "{}", ran.stderr);
        assert!(ran.stderr.contains("radpack merge"), "{}", ran.stderr);
    }
    let model = cli_support::dense();
    let model = model.to_str().expect("UTF-8");
    for (part, code) in [("0/4", 2), ("5/4", 2), ("1/0", 2), ("x", 2), ("1/70000", 2)] {
        let ran = radpack(tmp.path(), &["convert", model, "--part", part, "-o", "b.rad"]);
        assert_eq!(ran.code, code, "{part}: {}", ran.stderr);
    }
    let dry = succeeds(tmp.path(), &["convert", model, "--part", "2/4", "--dry-run", "--json"]);
    let document: serde_json::Value = serde_json::from_str(&dry.stdout).expect("JSON");
    assert_eq!((&document["part"]["index"], &document["part"]["parts"]), (&2.into(), &4.into()));
}

#[test]
fn the_slurm_script_runs_every_part_and_the_merge() {
    let tmp = tempdir().expect("a folder");
    let folder = tmp.path();
    dense_copy(folder);
    // A queue that runs what it is given at once: arrays by number, and wrapped commands.
    let queue = r#"#!/usr/bin/env bash
set -euo pipefail
wrap= array= script=
while [[ $# -gt 0 ]]; do
    case $1 in
        --wrap=*) wrap=${1#--wrap=} ;;
        --array=1-*) array=${1#--array=1-} ;;
        --*) ;;
        *) script=$1; shift; break ;;
    esac
    shift
done
if [[ -n $wrap ]]; then bash -c "$wrap" >&2; fi
if [[ -n $script ]]; then
    for i in $(seq "$array"); do SLURM_ARRAY_TASK_ID=$i bash "$script" "$@" >&2; done
fi
echo 17
"#;
    let bin = folder.join("bin");
    fs::create_dir(&bin).expect("a folder");
    fs::write(bin.join("sbatch"), queue).expect("writes");
    fs::set_permissions(bin.join("sbatch"), fs::Permissions::from_mode(0o755)).expect("sets");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_radpack"), bin.join("radpack")).expect("links");
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let script = testkit::root().join("docs/deploy/slurm.sh");
    let ran = Command::new("bash")
        .arg(script)
        .args(["model", "w8a16", "t.rad", "3"])
        .current_dir(folder)
        .env("PATH", path)
        .output()
        .expect("runs");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    succeeds(folder, &["convert", "model", "--recipe", "w8a16", "-o", "whole.rad"]);
    assert_eq!(sha256(&folder.join("t.rad")), sha256(&folder.join("whole.rad")));
}
