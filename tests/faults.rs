//! What goes wrong around a conversion: full and broken disks, signals, files that change under it, outputs in the way.
//! After each, the exit code and the message are right, nothing unfinished has the final name, an older file is as it
//! was, and `--resume` ends with the bytes of an undisturbed run.

mod checkpoint_support;
mod cli_support;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use checkpoint_support::large::large;
use cli_support::{dense, dense_copy, radpack, sha256, succeeds};
use radpack::artifact::{Contents, EntrySpec, Layout, Writer, fail_operation, partial_path};
use radpack::checkpoint::{Checkpoint, OpenOptions};
use radpack::pipeline::{self, ConvertOptions, Earlier, Plan, Progress, Request, Sources};
use radpack::recipe;
use radpack::tensor::{DType, Encoding, Shape};
use tempfile::tempdir;

const OLDER: &[u8] = b"an older file that must survive";

fn binary() -> PathBuf {
    assert_cmd::cargo::cargo_bin("radpack")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What lies beside the output: the partial file and its journal.
fn left(out: &Path) -> bool {
    let partial = partial_path(out);
    partial.exists() || pipeline::journal_path(&partial).exists()
}

/// Arguments of a conversion that takes a while: one thread, the reference kernels.
fn slow(source: &str, out: &str, more: &[&str]) -> Vec<String> {
    let own = ["convert", source, "-o", out, "--threads", "1", "--kernel", "scalar"];
    own.iter().chain(more).map(|s| (*s).to_owned()).collect()
}

fn start(folder: &Path, args: &[String]) -> Child {
    Command::new(binary())
        .current_dir(folder)
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts")
}

fn signal(child: &Child, number: libc::c_int) {
    // SAFETY: the process was started here and has not been waited for, so the number is still its own.
    unsafe { libc::kill(child.id() as libc::pid_t, number) };
}

/// Waits until a conversion writes, and stops it there. It may be anywhere after its beginning, also at its end. Its partial
/// file is empty until it holds the lock on it.
fn stopped_while_it_writes(child: &Child, out: &Path) {
    let deadline = Instant::now() + Duration::from_secs(120);
    let wait = || {
        assert!(Instant::now() < deadline, "it writes nothing, or goes on when it is stopped");
        std::thread::sleep(Duration::from_millis(1));
    };
    let begun = || fs::metadata(partial_path(out)).is_ok_and(|partial| partial.len() > 0);
    while !begun() && !out.exists() {
        wait();
    }
    signal(child, libc::SIGSTOP);
    // The signal is on its way when `kill` returns: wait until the process stands still, or has ended.
    let still = || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).expect("Linux has it");
        stat.rsplit(") ").next().is_some_and(|state| state.starts_with(['T', 'Z']))
    };
    while !still() {
        wait();
    }
}

/// A conversion ended: either whole, or with code 1, one of these texts, and nothing of its own under the final name.
fn whole_or_failed(ended: &Output, out: &Path, want: &str, texts: &[&str]) -> bool {
    let said = said(ended);
    match ended.status.code() {
        Some(0) => assert_eq!(sha256(out), want, "{said}"),
        code => {
            assert_eq!(code, Some(1), "{said}");
            assert!(texts.iter().any(|text| said.contains(text)), "{said}");
            assert!(!out.exists(), "{said}");
        }
    }
    ended.status.code() == Some(0)
}

/// One operation on the disk fails at a time, so these do not run beside each other.
static DISK: Mutex<()> = Mutex::new(());

struct Quiet;
impl Progress for Quiet {}

fn plan(source: &Path, devices: u32) -> Plan {
    let main = Checkpoint::open(source, &OpenOptions::default()).unwrap_or_else(|f| panic!("{f}"));
    let mut recipe = recipe::load(Some("w8a16")).unwrap_or_else(|f| panic!("{f}"));
    recipe.set(&format!("target.devices={devices}")).unwrap_or_else(|f| panic!("{f}"));
    let request = Request { weights_only: false, tokenizer_required: true };
    let sources = Sources { main, draft: None, imatrix: None };
    pipeline::plan(sources, recipe, request).unwrap_or_else(|f| panic!("{f}"))
}

#[test]
fn whatever_operation_on_the_disk_fails_the_older_file_stays_and_resume_gives_the_same_bytes() {
    let _alone = DISK.lock();
    let tmp = tempdir().expect("a folder");
    let never = AtomicBool::new(false);
    let options = || ConvertOptions { threads: 1, progress: &Quiet, cancelled: &never };
    let mut tried = 0;
    for devices in [1, 2] {
        let plan = plan(&testkit::tiny_model("tiny-llama"), devices);
        let fresh = tmp.path().join("fresh.rad");
        fail_operation(None);
        pipeline::convert(&plan, &fresh, options()).unwrap_or_else(|f| panic!("{f}"));
        let operations = fail_operation(None) as u32;
        assert!(operations > 50, "{operations}");
        let want = sha256(&fresh);
        let out = tmp.path().join("t.rad");
        // Every one of the last ten, which finish the file, and the others in even steps.
        let early = (0..operations - 10).step_by((operations as usize / 30).max(1));
        for n in early.chain(operations - 10..operations) {
            for resume in [false, true] {
                fs::write(&out, OLDER).expect("writes");
                fail_operation(Some(n));
                let earlier = Earlier { artifact: None, partial: resume };
                let failed = pipeline::convert_from(&plan, &out, options(), earlier);
                fail_operation(None);
                let failure = match failed {
                    Err(failure) => failure,
                    // A run that goes on has fewer operations than one from the start.
                    Ok(_) if resume => {
                        assert_eq!(sha256(&out), want);
                        continue;
                    }
                    Ok(_) => panic!("operation {n} of {operations} failed unseen"),
                };
                assert_eq!(failure.kind.exit_code(), 1, "{failure}");
                assert!(failure.to_string().contains("Input/output error"), "{n}: {failure}");
                // The last operation follows the rename: the file is there, only its name may not be on the disk yet.
                if fs::read(&out).expect("reads") != OLDER {
                    assert_eq!((sha256(&out), n), (want.clone(), operations - 1));
                } else {
                    assert_eq!(left(&out), resume, "operation {n}");
                }
                let again = Earlier { artifact: None, partial: true };
                pipeline::convert_from(&plan, &out, options(), again)
                    .unwrap_or_else(|f| panic!("{f}"));
                assert_eq!(sha256(&out), want, "operation {n}, resumed");
                assert!(!left(&out));
                tried += 1;
            }
        }
    }
    println!("{tried} failing operations, 0 files lost or damaged");
    assert!(tried > 100);
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error_and_not_a_signal() {
    let tmp = tempdir().expect("a folder");
    let source = dense();
    fs::write(tmp.path().join("t.rad"), OLDER).expect("writes");
    succeeds(tmp.path(), &["convert", text(&source), "-o", "whole.rad"]);
    let run = |command: &str| {
        // Blocks of 512 bytes: 1 MiB. Nobody ignores the signal here.
        let script = format!("ulimit -f 2048; exec '{}' {command}", binary().display());
        let output = Command::new("sh").current_dir(tmp.path()).args(["-c", &script]).output();
        let output = output.expect("it runs");
        assert_eq!(output.status.code(), Some(1), "{:?} {}", output.status, said(&output));
        assert!(said(&output).contains("File too large"), "{}", said(&output));
    };
    run(&format!("convert '{}' -o t.rad", source.display()));
    assert_eq!(fs::read(tmp.path().join("t.rad")).expect("reads"), OLDER);
    assert!(!left(&tmp.path().join("t.rad")));
    run("export whole.rad --format safetensors -o folder");
    assert!(!tmp.path().join("folder").exists());
    let names = |folder: &Path| -> Vec<String> {
        let listed = fs::read_dir(folder).expect("lists");
        let mut names: Vec<String> = listed
            .map(|e| e.expect("an entry").file_name().into_string().expect("UTF-8"))
            .collect();
        names.sort();
        names
    };
    assert_eq!(names(tmp.path()), ["t.rad", "whole.rad"], "nothing else was left");
}

#[test]
fn a_limit_that_comes_in_the_middle_is_an_error_and_resume_goes_on() {
    let tmp = tempdir().expect("a folder");
    large(tmp.path());
    let args = |more: &[&str]| {
        slow("large", "t.rad", &[&["--weights-only", "--no-tokenizer"], more].concat())
    };
    succeeds(tmp.path(), &args(&[]));
    let out = tmp.path().join("t.rad");
    let want = sha256(&out);
    fs::remove_file(&out).expect("removes");
    for resume in [&[][..], &["--resume"][..]] {
        let child = start(tmp.path(), &args(resume));
        stopped_while_it_writes(&child, &out);
        let limit = libc::rlimit { rlim_cur: 1 << 16, rlim_max: 1 << 16 };
        // SAFETY: the process was started here; `limit` is read, and no old limit is asked for.
        let set = unsafe {
            libc::prlimit(
                child.id() as libc::pid_t,
                libc::RLIMIT_FSIZE,
                &limit,
                std::ptr::null_mut(),
            )
        };
        assert_eq!(set, 0);
        signal(&child, libc::SIGCONT);
        let ended = child.wait_with_output().expect("ends");
        if whole_or_failed(&ended, &out, &want, &["File too large"]) {
            fs::remove_file(&out).expect("removes");
            continue;
        }
        assert_eq!(left(&out), !resume.is_empty());
        succeeds(tmp.path(), &args(&["--resume"]));
        assert_eq!(sha256(&out), want);
        fs::remove_file(&out).expect("removes");
    }
}

#[test]
fn a_full_file_system_is_told_with_numbers_and_nothing_is_left() {
    let tmp = tempdir().expect("a folder");
    let source = dense();
    succeeds(tmp.path(), &["convert", text(&source), "-o", "whole.rad"]);
    let small = tmp.path().join("small");
    fs::create_dir(&small).expect("a folder");
    // A file system of 1 MiB that only this command's processes see.
    let run = |command: &str| {
        let script = format!(
            "mount -t tmpfs -o size=1m none small || exit 77; '{}' {command}; code=$?; \
             ls -A small | wc -l; exit $code",
            binary().display()
        );
        let output = Command::new("unshare")
            .current_dir(tmp.path())
            .args(["--mount", "sh", "-c", &script])
            .output();
        match output {
            Ok(output)
                if output.status.code() != Some(77) && !said(&output).contains("unshare:") =>
            {
                Some(output)
            }
            other => {
                println!("skipped: no file system can be mounted here: {other:?}");
                None
            }
        }
    };
    let cases = [
        (format!("convert '{}' -o small/t.rad", source.display()), "the disk is too full"),
        (
            "export whole.rad --format safetensors -o small/out".to_owned(),
            "No space left on device",
        ),
        ("extract whole.rad token_embd.weight -o small/x".to_owned(), ""),
    ];
    for (command, wanted) in cases {
        let Some(output) = run(&command) else { return };
        let left = String::from_utf8_lossy(&output.stdout);
        let left = left.lines().last().unwrap_or_default().trim().to_owned();
        if wanted.is_empty() {
            // Small enough to fit: the file system works.
            assert_eq!((output.status.code(), left.as_str()), (Some(0), "1"), "{}", said(&output));
            continue;
        }
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains(wanted), "{}", said(&output));
        assert_eq!(left, "0", "{command}");
    }
}

#[test]
fn signals_at_a_hundred_seeded_points_lose_nothing() {
    let tmp = tempdir().expect("a folder");
    dense_copy(tmp.path());
    let args = |more: &[&str]| slow("model", "t.rad", more);
    succeeds(tmp.path(), &args(&[]));
    let out = tmp.path().join("t.rad");
    let want = sha256(&out);
    let began = Instant::now();
    succeeds(tmp.path(), &args(&[]));
    let whole = began.elapsed();
    fs::remove_file(&out).expect("removes");
    let (mut whole_files, mut ended_by_signal) = (0, 0);
    for point in 0..100u32 {
        let number = [libc::SIGINT, libc::SIGTERM, libc::SIGKILL][point as usize % 3];
        let resume = point % 2 == 1;
        let older = point % 4 < 2;
        if older {
            fs::write(&out, OLDER).expect("writes");
        }
        let child = start(tmp.path(), &args(if resume { &["--resume"] } else { &[] }));
        std::thread::sleep(whole.mul_f64(f64::from(point * 37 % 100) / 95.0));
        // A process that has ended stays until it is waited for, so this is no other one.
        signal(&child, number);
        let ended = child.wait_with_output().expect("ends");
        let said = said(&ended);
        let context = format!("point {point}, signal {number}, {:?}: {said}", ended.status);
        let complete = out.exists() && fs::read(&out).expect("reads") != OLDER;
        if complete {
            // The process may be killed after the rename, before it says so.
            assert_eq!(sha256(&out), want, "{context}");
            whole_files += 1;
        } else {
            assert_eq!(out.exists(), older, "{context}");
            match ended.status.code() {
                Some(code) => {
                    assert_eq!(code, 1, "{context}");
                    assert!(said.contains("stopped"), "{context}");
                    assert_eq!(
                        said.contains("the same command goes on with it"),
                        resume,
                        "{context}"
                    );
                    assert!(resume || !left(&out), "{context}");
                }
                // Killed, or asked to stop before it listened.
                None => {
                    assert_eq!(ended.status.signal(), Some(number), "{context}");
                    assert!(number == libc::SIGKILL || !left(&out), "{context}");
                }
            }
            ended_by_signal += 1;
        }
        succeeds(tmp.path(), &args(&["--resume"]));
        assert_eq!(sha256(&out), want, "{context}");
        assert!(!left(&out), "{context}");
        fs::remove_file(&out).expect("removes");
    }
    println!("100 points: {ended_by_signal} stopped, {whole_files} complete, 0 lost or damaged");
}

/// Changes the source of a stopped conversion, lets it go on, and goes on after the source is as it was.
fn source_changes(change: impl Fn(&Path), texts: &[&str]) {
    let tmp = tempdir().expect("a folder");
    let source = large(tmp.path());
    let shards: Vec<(PathBuf, Vec<u8>)> = (1..=4)
        .map(|n| source.join(format!("model-0000{n}-of-00004.safetensors")))
        .map(|path| (path.clone(), fs::read(&path).expect("reads")))
        .collect();
    let args = |more: &[&str]| {
        slow("large", "t.rad", &[&["--weights-only", "--no-tokenizer"], more].concat())
    };
    let out = tmp.path().join("t.rad");
    succeeds(tmp.path(), &args(&[]));
    let want = sha256(&out);
    fs::remove_file(&out).expect("removes");
    for resume in [&[][..], &["--resume"][..]] {
        let child = start(tmp.path(), &args(resume));
        stopped_while_it_writes(&child, &out);
        shards.iter().for_each(|(path, _)| change(path));
        signal(&child, libc::SIGCONT);
        let ended = child.wait_with_output().expect("ends");
        let whole = whole_or_failed(&ended, &out, &want, texts);
        if !whole {
            assert_eq!(left(&out), !resume.is_empty(), "{}", said(&ended));
        }
        for (path, bytes) in &shards {
            fs::write(path, bytes).expect("writes");
        }
        if !whole {
            succeeds(tmp.path(), &args(&["--resume"]));
        }
        assert_eq!(sha256(&out), want);
        assert!(!left(&out));
        fs::remove_file(&out).expect("removes");
    }
}

#[test]
fn a_source_that_is_truncated_while_it_is_read_is_an_error_that_names_it() {
    let truncate = |path: &Path| {
        let file = fs::OpenOptions::new().write(true).open(path).expect("opens");
        file.set_len(1000).expect("truncates");
    };
    // Whatever reads it first: weights through a map, or the hash.
    source_changes(
        truncate,
        &["became shorter while it was read", "its length changed", "when it was opened, now"],
    );
}

#[test]
fn a_source_that_is_written_to_while_it_is_read_is_an_error() {
    let write = |path: &Path| {
        let file = fs::OpenOptions::new().write(true).open(path).expect("opens");
        let at = file.metadata().expect("a size").len() - 2;
        file.write_all_at(&[0, 0], at).expect("writes");
        // A change is told by the time of the last one, which must differ from the file's own.
        file.set_modified(std::time::SystemTime::now() + Duration::from_secs(5)).expect("a time");
    };
    source_changes(write, &["was written to or replaced"]);
}

/// A container with one weight of 64 MiB, which `extract` reads in several steps.
fn wide(path: &Path) {
    let bf16 = Encoding::plain(DType::BF16);
    let mut entry = EntrySpec::opaque("w", 1);
    (entry.encoding, entry.shape) = (bf16, Shape::from([8192, 4096]));
    let contents = Contents { entries: vec![entry], ..Contents::default() };
    let writer = Writer::create(path, Layout::plan(&contents).expect("plan")).expect("create");
    writer.write(0, 0, 0, &vec![1; 8192 * 4096 * 2]).expect("write");
    writer.finish().expect("finish");
}

#[test]
fn an_artifact_that_is_truncated_while_it_is_read_ends_with_a_message_that_names_it() {
    let _alone = DISK.lock();
    let tmp = tempdir().expect("a folder");
    let file = tmp.path().join("wide.rad");
    wide(&file);
    // Decoded values are read through the map; stored bytes go from the map into the pipe, which the system refuses.
    for (form, wanted) in [
        (&[][..], "wide.rad became shorter while it was read: another process wrote to it"),
        (&["--raw"][..], "a file that is read from became shorter meanwhile"),
    ] {
        wide(&file);
        let mut child = Command::new(binary())
            .current_dir(tmp.path())
            .args(["extract", "wide.rad", "w", "-o", "-"])
            .args(form)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        // It waits for its reader with the first of many steps, so that the later ones are read after the change.
        let mut stdout = child.stdout.take().expect("a pipe");
        stdout.read_exact(&mut [0; 1000]).expect("its beginning");
        let truncated = fs::OpenOptions::new().write(true).open(&file).expect("opens");
        truncated.set_len(4096).expect("truncates");
        std::io::copy(&mut stdout, &mut std::io::sink()).expect("its end");
        let ended = child.wait_with_output().expect("ends");
        assert_eq!(ended.status.code(), Some(1), "{:?} {}", ended.status, said(&ended));
        assert!(said(&ended).contains("error: "), "{}", said(&ended));
        assert!(said(&ended).contains(wanted), "{}", said(&ended));
    }
}

#[test]
fn outputs_in_missing_read_only_and_foreign_folders_are_refused_with_the_reason() {
    let tmp = tempdir().expect("a folder");
    fs::set_permissions(tmp.path(), fs::Permissions::from_mode(0o755)).expect("opens it");
    dense_copy(tmp.path());
    let ran = radpack(tmp.path(), &["convert", "model", "-o", "missing/t.rad"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("mkdir -p missing"), "{}", ran.stderr);
    let closed = tmp.path().join("closed");
    fs::create_dir(&closed).expect("a folder");
    let older = closed.join("t.rad");
    fs::write(&older, OLDER).expect("writes");
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o555)).expect("closes it");
    // Root may write anywhere; then the folder is root's, and another user runs the command.
    // SAFETY: it takes nothing and cannot fail.
    let root = unsafe { libc::geteuid() } == 0;
    for out in ["closed/t.rad", "closed/new.rad"] {
        let mut command = Command::new(binary());
        command.current_dir(tmp.path()).args(["convert", "model", "-o", out]);
        if root {
            command.uid(65_534).gid(65_534);
        }
        let output = match command.output() {
            Ok(output) => output,
            Err(e) => {
                println!("skipped: another user cannot run the binary here: {e}");
                break;
            }
        };
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains("Permission denied"), "{}", said(&output));
    }
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o755)).expect("opens it");
    assert_eq!(fs::read(&older).expect("reads"), OLDER);
    assert_eq!(fs::read_dir(&closed).expect("lists").count(), 1);
    // No folder of files at all.
    let ran = radpack(tmp.path(), &["convert", "model", "-o", "/proc/t.rad"]);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
}

#[test]
fn an_output_that_is_an_input_by_any_name_is_refused() {
    let tmp = tempdir().expect("a folder");
    let model = dense_copy(tmp.path());
    let (shard, config) =
        (model.join("model-00001-of-00004.safetensors"), model.join("config.json"));
    let before = [sha256(&shard), sha256(&config)];
    symlink(&shard, tmp.path().join("soft.rad")).expect("a link");
    symlink(&config, tmp.path().join("config.rad")).expect("a link");
    fs::hard_link(&shard, tmp.path().join("hard.rad")).expect("a link");
    symlink(&model, tmp.path().join("folder")).expect("a link");
    let outputs = [
        "soft.rad",
        "config.rad",
        "hard.rad",
        "model/config.json",
        "folder/tokenizer.json",
        "model/../model/model-00004-of-00004.safetensors",
    ];
    for out in outputs {
        let ran = radpack(tmp.path(), &["convert", "model", "-o", out]);
        assert_eq!(ran.code, 2, "{out}: {}", ran.stderr);
        assert!(ran.stderr.contains("the output would replace its source"), "{}", ran.stderr);
    }
    assert_eq!([sha256(&shard), sha256(&config)], before);
    succeeds(tmp.path(), &["convert", "model", "-o", "t.rad"]);
}

#[test]
fn two_conversions_to_one_output_do_not_disturb_each_other() {
    let tmp = tempdir().expect("a folder");
    large(tmp.path());
    let args = slow("large", "t.rad", &["--weights-only", "--no-tokenizer"]);
    let out = tmp.path().join("t.rad");
    succeeds(tmp.path(), &args);
    let want = sha256(&out);
    fs::remove_file(&out).expect("removes");
    let first = start(tmp.path(), &args);
    stopped_while_it_writes(&first, &out);
    let complete = out.exists();
    for more in [&[][..], &["--resume".to_owned()][..]] {
        let second = radpack(tmp.path(), &[&args[..], more].concat());
        if !complete {
            assert_eq!(second.code, 1, "{}", second.stderr);
            let wanted = "is being written by another running conversion";
            assert!(second.stderr.contains(wanted), "{}", second.stderr);
            assert!(left(&out));
        }
    }
    signal(&first, libc::SIGCONT);
    let ended = first.wait_with_output().expect("ends");
    assert_eq!(ended.status.code(), Some(0), "{}", said(&ended));
    assert_eq!(sha256(&out), want);
    assert!(!left(&out));
}

#[test]
fn a_pipe_that_nobody_reads_and_a_full_device_are_told_apart() {
    let tmp = tempdir().expect("a folder");
    succeeds(tmp.path(), &["convert", text(&dense()), "-o", "t.rad"]);
    let into = |sink: Stdio| {
        let mut command = Command::new(binary());
        command.current_dir(tmp.path()).args(["inspect", "t.rad", "--json"]);
        command.stdout(sink).stderr(Stdio::piped()).output().expect("it runs")
    };
    let full = fs::OpenOptions::new().write(true).open("/dev/full");
    match full {
        Ok(full) => {
            let output = into(full.into());
            assert_eq!(output.status.code(), Some(1), "{}", said(&output));
            assert!(said(&output).contains("No space left on device"), "{}", said(&output));
        }
        Err(e) => println!("skipped: /dev/full: {e}"),
    }
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = into(writer.into());
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    // The file that was inspected is still whole.
    let mut file = File::options().append(true).open(tmp.path().join("t.rad")).expect("opens");
    file.write_all(b"").expect("writes");
    succeeds(tmp.path(), &["validate", "t.rad"]);
}
