//! `fuzz`: every parser of bytes that radpack did not write, under libFuzzer.
//!
//! The targets are one program, a workspace of its own (`tests/fuzz`). By default it is built by cargo-fuzz with the address
//! sanitizer, and so with all its packages, by the stable toolchain (unstable flags by `RUSTC_BOOTSTRAP`). `--plain` builds
//! it with cargo among the project's own builds, whose packages it takes as they are: only radpack and the targets are
//! compiled, with counters of coverage, and nothing but stable flags. Seeds, corpora that grow from run to run, finds and
//! logs lie below `target/fuzz`, whichever build it is. A find stops its target and fails the task.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use clap::Args;

use crate::{Result, build};

/// The release that is installed below `target/tools`.
const CARGO_FUZZ: &str = "0.13.2";

/// The program of all targets.
const PROGRAM: &str = "radpack-fuzz";

/// Set where this program is the compiler's wrapper.
const WRAPPER: &str = "RADPACK_XTASK_COUNTS";

/// What is compiled with counters: the crates whose branches the fuzzer is to see.
const COUNTED: [&str; 2] = ["radpack", "radpack_fuzz"];

/// What cargo-fuzz 0.13 gives the compiler beside the sanitizer, but for the depth of the stack.
const COUNTERS: [&str; 6] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cllvm-args=-simplifycfg-branch-fold-threshold=0",
];

/// How to run `fuzz`.
#[derive(Debug, Args)]
pub struct FuzzArgs {
    /// Targets [default: all]
    targets: Vec<String>,
    /// Seconds for each target
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Targets at a time
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Without the sanitizer, on the packages of the project's own builds: minutes less to build
    #[arg(long)]
    plain: bool,
    /// Number that the random changes begin with, 0 for another one every time
    #[arg(long, default_value_t = 0)]
    seed: u32,
    /// Build, and write the seeds; run nothing
    #[arg(long)]
    seeds: bool,
}

/// A target and its limits.
struct Target {
    name: &'static str,
    /// Longest input in bytes.
    most: u64,
    /// Largest single allocation in MiB.
    allocation: u64,
    /// Longest time for an input in seconds.
    timeout: u64,
}

const fn target(name: &'static str, most: u64, allocation: u64, timeout: u64) -> Target {
    Target { name, most, allocation, timeout }
}

const KIB: u64 = 1 << 10;

/// Every target. Allocations are far below what a length field can ask for and above what the largest input is worth; what
/// a picture or a container (whose data begin at 2 MiB) takes is said in its row.
const TARGETS: [Target; 18] = [
    target("card", 64 * KIB, 64, 20),
    // A template may take ten million steps.
    target("chat", 16 * KIB, 512, 60),
    target("checkpoint", 64 * KIB, 64, 20),
    target("config", 16 * KIB, 64, 10),
    target("corpus", 16 * KIB, 64, 10),
    target("entries", 128 * KIB, 64, 20),
    target("gguf", 64 * KIB, 64, 20),
    target("hub", 16 * KIB, 64, 30),
    target("imatrix", 16 * KIB, 64, 10),
    // As many pixels as are read, in four channels of 16 bits.
    target("picture", 64 * KIB, 1600, 60),
    target("programs", 64 * KIB, 64, 20),
    target("quantized", 32 * KIB, 64, 20),
    target("rad", 128 * KIB, 64, 20),
    target("recipe", 16 * KIB, 64, 10),
    target("recipe_import", 4 * KIB, 64, 10),
    target("safetensors", 32 * KIB, 64, 10),
    target("sections", 32 * KIB, 64, 10),
    target("tokenizer", 48 * KIB, 128, 20),
];

/// What a target did.
struct Ran {
    name: &'static str,
    executions: u64,
    seconds: f64,
    /// Seconds of processor time.
    cpu: f64,
    coverage: u64,
    features: u64,
    corpus: usize,
    peak: u64,
    /// The inputs that were found, and the last lines of the log.
    finds: Vec<PathBuf>,
    failed: Option<String>,
}

/// Builds and runs.
pub fn run(args: &FuzzArgs) -> Result<()> {
    let chosen = chosen(&args.targets)?;
    let began = Instant::now();
    let folder = testkit::target().join("fuzz");
    let program = if args.plain { build_plain()? } else { build_sanitized(&folder)? };
    let seeds = folder.join("seeds");
    build::remove_folder(&seeds)?;
    fs::create_dir_all(&seeds).map_err(testkit::at(&seeds))?;
    let mut write = told(&program, &folder, "seeds", &seeds.display().to_string())?;
    let (written, _) = watched(&mut write, Duration::from_secs(600))?;
    if !written.success() {
        return Err(format!("seeds: {written}; {}", folder.join("logs/seeds.log").display()));
    }
    println!("built and seeded in {:.0} s", began.elapsed().as_secs_f64());
    if args.seeds {
        return Ok(());
    }
    let began = Instant::now();
    let left: Mutex<VecDeque<&Target>> = Mutex::new(chosen.into());
    let done: Mutex<Vec<Ran>> = Mutex::new(Vec::new());
    let worker = || -> Result<()> {
        loop {
            let next = left.lock().map_err(|e| e.to_string())?.pop_front();
            let Some(target) = next else { return Ok(()) };
            let ran = fuzz(target, &folder, &program, args)?;
            eprintln!("{}: {} executions", ran.name, ran.executions);
            done.lock().map_err(|e| e.to_string())?.push(ran);
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..args.jobs.max(1)).map(|_| scope.spawn(worker)).collect();
        let panicked = |_| Err("a worker panicked".to_owned());
        workers.into_iter().try_for_each(|w| w.join().unwrap_or_else(panicked))
    })?;
    let mut ran = done.into_inner().map_err(|e| e.to_string())?;
    ran.sort_by_key(|r| r.name);
    report(&ran, began.elapsed())
}

fn chosen(names: &[String]) -> Result<Vec<&'static Target>> {
    if names.is_empty() {
        return Ok(TARGETS.iter().collect());
    }
    let find = |name: &String| {
        TARGETS.iter().find(|t| t.name == name).ok_or_else(|| {
            let all: Vec<&str> = TARGETS.iter().map(|t| t.name).collect();
            format!("{name} is no target; there are {}", all.join(", "))
        })
    };
    names.iter().map(find).collect()
}

fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // Of this task's own run under cargo.
    cargo.env_remove("CARGO_MANIFEST_DIR").env_remove("RUSTFLAGS").env("CARGO_NET_RETRY", "5");
    cargo
}

/// Builds with the sanitizer; the program.
fn build_sanitized(folder: &Path) -> Result<PathBuf> {
    let tools = testkit::target().join("tools");
    let fuzzer = tools.join("bin/cargo-fuzz");
    if !fuzzer.is_file() {
        let mut install = cargo();
        install.args(["install", "cargo-fuzz", "--locked", "--version", CARGO_FUZZ, "--root"]);
        build::run(install.arg(&tools))?;
    }
    let mut fuzz = Command::new(&fuzzer);
    fuzz.args(["fuzz", "build", "--fuzz-dir"]).arg(testkit::root().join("tests/fuzz"));
    fuzz.arg("--target-dir").arg(folder);
    fuzz.env("RUSTC_BOOTSTRAP", "1").env("CARGO_NET_RETRY", "5");
    fuzz.env_remove("CARGO_MANIFEST_DIR").env_remove("RUSTFLAGS");
    build::run(&mut fuzz)?;
    let said = build::output(Command::new("rustc").arg("-vV"))?;
    let host = said.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(folder.join(host.ok_or("rustc does not tell its host")?).join("release").join(PROGRAM))
}

/// Builds among the project's own builds; the program. Packages are shared as long as versions, features and profile are
/// those of the project, which a test compares.
fn build_plain() -> Result<PathBuf> {
    let own = std::env::current_exe().map_err(|e| format!("this program: {e}"))?;
    let target = testkit::target();
    let mut build = cargo();
    build.args(["build", "--locked", "--manifest-path"]);
    build.arg(testkit::root().join("tests/fuzz/Cargo.toml")).arg("--target-dir").arg(&target);
    build.env("RUSTC_WRAPPER", own).env(WRAPPER, "1").env("CARGO_INCREMENTAL", "0");
    build::run(&mut build)?;
    Ok(target.join("debug").join(PROGRAM))
}

/// Where this program is the compiler's wrapper: the compiler's exit code. A wrapper is no part of what cargo tells builds
/// apart by, so that packages stay those of the project; radpack's own is another one by its workspace.
pub fn compiled() -> Option<ExitCode> {
    std::env::var_os(WRAPPER)?;
    let mut words = std::env::args_os().skip(1);
    let mut compiler = Command::new(words.next()?);
    let words: Vec<_> = words.collect();
    let name = words.iter().position(|w| w == "--crate-name").and_then(|at| words.get(at + 1));
    if name.is_some_and(|name| COUNTED.iter().any(|counted| name == counted)) {
        compiler.args(COUNTERS);
    }
    let status = compiler.args(&words).status().ok()?;
    Some(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The program with one argument of its own; what it says goes into that log.
fn told(program: &Path, folder: &Path, argument: &str, value: &str) -> Result<Command> {
    let logs = made(folder.join("logs"))?;
    let name = if argument == "target" { value } else { argument };
    let log = logs.join(format!("{name}.log"));
    let output = fs::File::create(&log).map_err(testkit::at(&log))?;
    let again = output.try_clone().map_err(testkit::at(&log))?;
    let mut command = Command::new(program);
    command.arg(format!("--{argument}={value}")).stdout(again).stderr(output);
    Ok(command)
}

fn made(folder: PathBuf) -> Result<PathBuf> {
    fs::create_dir_all(&folder).map_err(testkit::at(&folder))?;
    Ok(folder)
}

fn fuzz(target: &Target, folder: &Path, program: &Path, args: &FuzzArgs) -> Result<Ran> {
    let name = target.name;
    let corpus = made(folder.join("corpus").join(name))?;
    let finds = made(folder.join("finds").join(name))?;
    let log = folder.join("logs").join(format!("{name}.log"));
    let before = files(&finds)?;
    let seeds = folder.join("seeds");
    let mut command = told(program, folder, "target", name)?;
    command.arg(&corpus).arg(seeds.join(name));
    command.arg(format!("-dict={}", seeds.join(format!("{name}.dict")).display()));
    command.arg(format!("-artifact_prefix={}/", finds.display()));
    command.arg(format!("-max_total_time={}", args.seconds)).arg("-print_final_stats=1");
    command.arg(format!("-seed={}", args.seed));
    command.arg(format!("-max_len={}", target.most)).arg(format!("-timeout={}", target.timeout));
    command.arg(format!("-malloc_limit_mb={}", target.allocation));
    // Single allocations are seen by the sanitizer only, which takes memory for itself.
    let most = if args.plain { 512 + 2 * target.allocation } else { 4096 };
    command.arg(format!("-rss_limit_mb={most}"));
    // Safe code may leak; the memory of a run is what counts.
    command.args(["-detect_leaks=0", "-reload=0"]);
    command.env("ASAN_OPTIONS", "detect_odr_violation=0").env("RAYON_NUM_THREADS", "1");
    // The place of a panic says enough: a backtrace takes longer than some inputs may, and libFuzzer's alarm in the middle
    // of it never ends.
    command.env("RUST_BACKTRACE", "0");
    let began = Instant::now();
    let most = Duration::from_secs(args.seconds + 2 * target.timeout + 60);
    let (status, cpu) = watched(&mut command, most)?;
    let said = String::from_utf8_lossy(&fs::read(&log).map_err(testkit::at(&log))?).into_owned();
    let number = |mark: &str| {
        let at = said.rfind(mark)? + mark.len();
        said[at..].trim_start().split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    let finds: Vec<PathBuf> = files(&finds)?.into_iter().filter(|f| !before.contains(f)).collect();
    let failed = (!status.success()).then(|| {
        let lines: Vec<&str> =
            said.lines().filter(|l| l.contains("panicked") || l.contains("ERROR")).collect();
        format!("{status}; {}\n{}", log.display(), lines.join("\n"))
    });
    Ok(Ran {
        name,
        executions: number("stat::number_of_executed_units:")
            .or_else(|| said.rfind("cov: ").and_then(|at| executions(&said[..at])))
            .unwrap_or(0),
        seconds: began.elapsed().as_secs_f64(),
        cpu,
        coverage: number("cov:").unwrap_or(0),
        features: number("ft:").unwrap_or(0),
        corpus: files(&corpus)?.len(),
        peak: number("stat::peak_rss_mb:").unwrap_or(0),
        finds,
        failed,
    })
}

/// Runs a program to its end, or ends it: its status and its seconds of processor time, to a fifth of a second.
fn watched(command: &mut Command, most: Duration) -> Result<(ExitStatus, f64)> {
    let failed = |e: std::io::Error, command: &Command| format!("{}: {e}", build::shown(command));
    let mut child = command.spawn().map_err(|e| failed(e, command))?;
    let stat = format!("/proc/{}/stat", child.id());
    let mut cpu = 0.0;
    let began = Instant::now();
    loop {
        if let Some(seconds) = fs::read_to_string(&stat).ok().and_then(|stat| used(&stat)) {
            cpu = seconds;
        }
        if let Some(status) = child.try_wait().map_err(|e| failed(e, command))? {
            return Ok((status, cpu));
        }
        if began.elapsed() > most {
            child.kill().map_err(|e| failed(e, command))?;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// `utime` and `stime` of `/proc/PID/stat` in seconds, whose unit is 1/100 s on every Linux that this runs on.
fn used(stat: &str) -> Option<f64> {
    // The second field is a name in parentheses, which may hold anything; field 3 follows.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    Some((ticks(14)? + ticks(15)?) as f64 / 100.0)
}

/// The number at the start of the last line, `#123 NEW `.
fn executions(said: &str) -> Option<u64> {
    let line = said.lines().next_back()?;
    line.strip_prefix('#')?.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).map_err(testkit::at(folder))?;
    let mut paths = Vec::new();
    for entry in entries {
        paths.push(entry.map_err(testkit::at(folder))?.path());
    }
    paths.sort();
    Ok(paths)
}

fn report(ran: &[Ran], took: Duration) -> Result<()> {
    println!(
        "{:14} {:>12} {:>8} {:>8} {:>8} {:>9} {:>7} {:>9}  finds",
        "target", "executions", "seconds", "cpu s", "edges", "features", "corpus", "peak MiB"
    );
    for r in ran {
        println!(
            "{:14} {:>12} {:>8.0} {:>8.0} {:>8} {:>9} {:>7} {:>9}  {}",
            r.name,
            r.executions,
            r.seconds,
            r.cpu,
            r.coverage,
            r.features,
            r.corpus,
            r.peak,
            r.failed.as_ref().map_or("none".to_owned(), |_| r.finds.len().to_string())
        );
    }
    let executions: u64 = ran.iter().map(|r| r.executions).sum();
    let cpu: f64 = ran.iter().map(|r| r.cpu).sum();
    println!("{executions} executions, {cpu:.0} s of processor time, {:.0} s", took.as_secs_f64());
    let mut failed = 0;
    for r in ran {
        if let Some(why) = &r.failed {
            failed += 1;
            println!("{}: {why}", r.name);
            r.finds.iter().for_each(|find| println!("{}: {}", r.name, find.display()));
        }
    }
    match failed {
        0 => Ok(()),
        n => Err(format!("{n} targets failed")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_a_driver_and_limits() {
        let drivers = testkit::root().join("tests/fuzz/src/drive/mod.rs");
        let drivers = fs::read_to_string(drivers).expect("the drivers");
        let rows = drivers.lines().filter_map(|line| line.trim().strip_prefix("(\""));
        let names: Vec<&str> = rows.filter_map(|row| row.split('"').next()).collect();
        assert_eq!(names, TARGETS.map(|target| target.name));
    }

    /// Name, version and checksum of every package of a lock file.
    fn packages(lock: &str) -> Vec<String> {
        let lock = fs::read_to_string(testkit::root().join(lock)).expect("a lock file");
        let packages = lock.split("[[package]]").skip(1);
        packages.map(|text| text.split("dependencies").next().unwrap_or_default().into()).collect()
    }

    #[test]
    fn targets_are_built_on_the_packages_of_the_project() {
        let own = ["arbitrary", "libfuzzer-sys", "radpack-fuzz"];
        let project = packages("Cargo.lock");
        for package in packages("tests/fuzz/Cargo.lock") {
            let known = own.iter().any(|name| package.contains(&format!("name = \"{name}\"")));
            assert!(
                known || project.contains(&package),
                "another version than in Cargo.lock: {package}"
            );
        }
        let profile = |manifest: &str| {
            let manifest = fs::read_to_string(testkit::root().join(manifest)).expect("a manifest");
            let at = manifest.find("[profile.dev.package.\"*\"]").expect("the packages' profile");
            manifest[at..].split("\n\n").next().map(str::to_owned)
        };
        assert_eq!(profile("tests/fuzz/Cargo.toml"), profile("Cargo.toml"));
    }

    #[test]
    fn processor_time_is_read_behind_any_name() {
        assert_eq!(used("7 (a) b) c) S 1 2 3 4 5 6 7 8 9 10 250 50 13 14"), Some(3.0));
        assert_eq!(used("7 (a) S 1"), None);
    }

    #[test]
    fn executions_are_read_off_the_last_line() {
        assert_eq!(executions("#1\tINITED\n#4096\tpulse  "), Some(4096));
        assert_eq!(executions("nothing"), None);
    }
}
