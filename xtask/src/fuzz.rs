//! `fuzz`: every parser of bytes that radpack did not write, under libFuzzer and the address sanitizer.
//!
//! The targets are a workspace of their own (`tests/fuzz`), built by cargo-fuzz with the stable toolchain (its unstable flags
//! by `RUSTC_BOOTSTRAP`). Everything lies below `target/fuzz`: builds, seeds, corpora that grow from run to run, finds and
//! logs. A find stops its target and fails the task.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use clap::Args;

use crate::{Result, build};

/// The release that is installed below `target/tools`.
const CARGO_FUZZ: &str = "0.13.2";

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
    let bins = build_all(&folder, &chosen)?;
    let seeds = folder.join("seeds");
    build::remove_folder(&seeds)?;
    fs::create_dir_all(&seeds).map_err(testkit::at(&seeds))?;
    build::run(Command::new(bins.join("seeds")).arg(&seeds))?;
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
            let ran = fuzz(target, &folder, &bins, args.seconds)?;
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

/// The folder of the built targets.
fn build_all(folder: &Path, chosen: &[&Target]) -> Result<PathBuf> {
    let tools = testkit::target().join("tools");
    let cargo = || Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    if !tools.join("bin/cargo-fuzz").is_file() {
        let mut install = cargo();
        install.args(["install", "cargo-fuzz", "--locked", "--version", CARGO_FUZZ, "--root"]);
        build::run(install.arg(&tools))?;
    }
    let with_hub = chosen.iter().any(|t| t.name == "hub");
    for hub in [false, true].into_iter().filter(|hub| !hub || with_hub) {
        let mut fuzz = Command::new(tools.join("bin/cargo-fuzz"));
        fuzz.args(["fuzz", "build", "--fuzz-dir"]).arg(testkit::root().join("tests/fuzz"));
        fuzz.arg("--target-dir").arg(folder);
        if hub {
            fuzz.args(["--features", "hub", "hub"]);
        }
        fuzz.env("RUSTC_BOOTSTRAP", "1").env("CARGO_NET_RETRY", "5");
        // Of this task's own run under cargo.
        fuzz.env_remove("CARGO_MANIFEST_DIR").env_remove("RUSTFLAGS");
        build::run(&mut fuzz)?;
    }
    let said = build::output(Command::new("rustc").arg("-vV"))?;
    let host = said.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(folder.join(host.ok_or("rustc does not tell its host")?).join("release"))
}

fn made(folder: PathBuf) -> Result<PathBuf> {
    fs::create_dir_all(&folder).map_err(testkit::at(&folder))?;
    Ok(folder)
}

fn fuzz(target: &Target, folder: &Path, bins: &Path, seconds: u64) -> Result<Ran> {
    let name = target.name;
    let corpus = made(folder.join("corpus").join(name))?;
    let finds = made(folder.join("finds").join(name))?;
    let log = made(folder.join("logs"))?.join(format!("{name}.log"));
    let before = files(&finds)?;
    let seeds = folder.join("seeds");
    let mut command = Command::new(bins.join(name));
    command.arg(&corpus).arg(seeds.join(name));
    command.arg(format!("-dict={}", seeds.join(format!("{name}.dict")).display()));
    command.arg(format!("-artifact_prefix={}/", finds.display()));
    command.arg(format!("-max_total_time={seconds}")).arg("-print_final_stats=1");
    command.arg(format!("-max_len={}", target.most)).arg(format!("-timeout={}", target.timeout));
    command.arg(format!("-malloc_limit_mb={}", target.allocation));
    // Safe code may leak; the memory of a run is what counts.
    command.args(["-rss_limit_mb=4096", "-detect_leaks=0", "-reload=0"]);
    command.env("ASAN_OPTIONS", "detect_odr_violation=0").env("RAYON_NUM_THREADS", "1");
    let output = fs::File::create(&log).map_err(testkit::at(&log))?;
    let again = output.try_clone().map_err(testkit::at(&log))?;
    command.stdout(again).stderr(output);
    let began = Instant::now();
    let (status, cpu) = watched(&mut command)?;
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

/// Runs a program to its end: its status and its seconds of processor time, to a fifth of a second.
fn watched(command: &mut Command) -> Result<(ExitStatus, f64)> {
    let failed = |e: std::io::Error, command: &Command| format!("{}: {e}", build::shown(command));
    let mut child = command.spawn().map_err(|e| failed(e, command))?;
    let stat = format!("/proc/{}/stat", child.id());
    let mut cpu = 0.0;
    loop {
        if let Some(seconds) = fs::read_to_string(&stat).ok().and_then(|stat| used(&stat)) {
            cpu = seconds;
        }
        if let Some(status) = child.try_wait().map_err(|e| failed(e, command))? {
            return Ok((status, cpu));
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
    fn every_target_has_a_file_a_row_in_the_manifest_and_limits() {
        let root = testkit::root().join("tests/fuzz");
        let manifest = fs::read_to_string(root.join("Cargo.toml")).expect("the manifest");
        for target in &TARGETS {
            assert!(root.join(format!("targets/{}.rs", target.name)).is_file(), "{}", target.name);
            assert!(manifest.contains(&format!("name = \"{}\"", target.name)), "{}", target.name);
        }
        let files = files(&root.join("targets")).expect("the targets");
        assert_eq!(files.len(), TARGETS.len(), "{files:?}");
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
