//! `bench convert`: every generic recipe, `validate`, `validate --against` and `diff`, beside `cp` and `cat` of the same files.
//!
//! Rounds run everything once, one after the other, so that a machine that slows down slows all of it; medians over rounds are
//! compared, as ratios. Before every run what earlier ones wrote is brought to the disk, outside the time.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use serde_json::{Value, json};

use super::checkpoint::{self, FULL, SMOKE};
use super::measure::{Usage, measure};
use crate::{Result, build};

/// How to run `bench convert`.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// Times that everything is run
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Only these recipes
    #[arg(long = "recipe")]
    recipes: Vec<String>,
    /// A checkpoint of 34 MB instead of 3.6 GB
    #[arg(long)]
    smoke: bool,
    /// Worker threads [default: radpack's]
    #[arg(long)]
    threads: Option<u32>,
    /// The radpack binary [default: build target/release/radpack]
    #[arg(long)]
    bin: Option<PathBuf>,
    /// Folder for everything; the checkpoint stays there [default: target/bench-convert]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// A Python with llm-compressor, whose quantization without a model is run beside
    #[arg(long, value_name = "PYTHON")]
    peers: Option<PathBuf>,
    /// llama.cpp's llama-quantize, with the checkpoint as GGUF in bf16
    #[arg(long, num_args = 2, value_names = ["LLAMA-QUANTIZE", "MODEL.gguf"])]
    llama: Option<Vec<PathBuf>>,
    /// One JSON document instead of a table
    #[arg(long)]
    json: bool,
}

/// Recipes whose rows `validate` and `diff` are run on.
const CHECKED: &str = "int8-g128";

/// llm-compressor's schemes that stand beside recipes.
const PEERS: [(&str, &str); 4] = [
    ("fp8-dynamic", "FP8_DYNAMIC"),
    ("w8a16", "W8A16"),
    ("nvfp4", "NVFP4A16"),
    ("w4a16-g32", "W4A16"),
];

/// One command that is measured.
struct Job {
    name: String,
    command: Command,
    /// What it writes; removed before and after.
    writes: Vec<PathBuf>,
}

/// Runs everything and prints medians.
pub fn run(args: &ConvertArgs) -> Result<()> {
    let bin = build::radpack(args.bin.clone())?;
    let dir = args.dir.clone().unwrap_or_else(|| testkit::target().join("bench-convert"));
    let source = dir.join(if args.smoke { "small" } else { "model" });
    eprintln!("making the checkpoint");
    let bytes = checkpoint::make(&source, if args.smoke { SMOKE } else { FULL })?;
    let mut recipes = build::recipes(&bin)?;
    recipes.retain(|name| !name.contains('/') && name != "bf16");
    if !args.recipes.is_empty() {
        recipes.retain(|name| args.recipes.contains(name));
    }
    let fixed = dir.join("checked.rad");
    let mut convert = radpack(args, &bin, &["convert"]);
    convert.arg(&source).args(["--no-tokenizer", "--recipe", CHECKED, "-o"]).arg(&fixed);
    build::output(&mut convert)?;
    let twin = dir.join("twin.rad");
    fs::copy(&fixed, &twin).map_err(testkit::at(&twin))?;
    let mut runs: BTreeMap<String, Vec<Usage>> = BTreeMap::new();
    let mut order = Vec::new();
    for round in 0..=args.rounds {
        // Round 0 brings everything into the page cache and is not counted.
        eprintln!("round {round} of {}", args.rounds);
        for mut job in jobs(args, &bin, &source, &dir, &recipes, [&fixed, &twin])? {
            job.writes.iter().try_for_each(|path| remove(path))?;
            build::run(&mut Command::new("sync"))?;
            let usage = measure(&mut job.command)?;
            job.writes.iter().try_for_each(|path| remove(path))?;
            if round == 0 {
                order.push(job.name);
            } else {
                runs.entry(job.name).or_default().push(usage);
            }
        }
    }
    let size = fs::metadata(&fixed).map_err(testkit::at(&fixed))?.len();
    remove(&fixed)?;
    remove(&twin)?;
    let medians: Vec<(String, Usage)> = order
        .into_iter()
        .filter_map(|name| Some((name.clone(), median(runs.get(&name)?))))
        .collect();
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    if args.json {
        let rows = medians.iter().map(|(name, usage)| row_document(name, usage, &medians));
        let document = json!({
            "source_bytes": bytes, "checked_bytes": size, "rounds": args.rounds, "cpus": cpus,
            "threads": args.threads, "rows": rows.collect::<Vec<_>>(),
        });
        println!("{document:#}");
        return Ok(());
    }
    let gb = |n: u64| n as f64 / 1e9;
    println!(
        "source {:.2} GB, {CHECKED} file {:.2} GB, medians of {} rounds, {cpus} processors\n",
        gb(bytes),
        gb(size),
        args.rounds
    );
    println!("{:<28} {:>8} {:>7} {:>8} {:>12}", "", "seconds", "× cp", "CPU s", "anon. MiB");
    for (name, u) in &medians {
        println!(
            "{name:<28} {:8.2} {:7.2} {:8.2} {:12.1}",
            u.wall,
            ratio(u, &medians),
            u.cpu,
            u.peak_anonymous as f64 / f64::from(1 << 20)
        );
    }
    Ok(())
}

fn radpack(args: &ConvertArgs, bin: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(bin);
    command.args(words);
    if let Some(threads) = args.threads {
        command.args(["--threads", &threads.to_string()]);
    }
    command
}

/// What a round runs, in its order.
fn jobs(
    args: &ConvertArgs,
    bin: &Path,
    source: &Path,
    dir: &Path,
    recipes: &[String],
    [fixed, twin]: [&Path; 2],
) -> Result<Vec<Job>> {
    let mut weights = Vec::new();
    for entry in fs::read_dir(source).map_err(testkit::at(source))? {
        let path = entry.map_err(testkit::at(source))?.path();
        weights.extend(path.extension().is_some_and(|e| e == "safetensors").then_some(path));
    }
    weights.sort();
    let copy = dir.join("copy");
    fs::create_dir_all(&copy).map_err(testkit::at(&copy))?;
    let job = |name: &str, command: Command, writes: &[PathBuf]| Job {
        name: name.to_owned(),
        command,
        writes: writes.to_vec(),
    };
    let mut cp = Command::new("cp");
    cp.args(&weights).arg(&copy);
    let copies: Vec<PathBuf> =
        weights.iter().filter_map(|w| Some(copy.join(w.file_name()?))).collect();
    let mut cat = Command::new("cat");
    cat.args(&weights);
    let mut cat_file = Command::new("cat");
    cat_file.arg(fixed);
    let mut all = vec![
        job("cp", cp, &copies),
        job("cat source", cat, &[]),
        job("cat artifact", cat_file, &[]),
    ];
    for recipe in recipes {
        let out = dir.join("out.rad");
        let mut convert = radpack(args, bin, &["convert"]);
        convert.arg(source).args(["--no-tokenizer", "--recipe", recipe, "-o"]).arg(&out);
        all.push(job(&format!("convert {recipe}"), convert, &[out]));
    }
    let mut validate = radpack(args, bin, &["validate"]);
    validate.arg(fixed);
    all.push(job("validate", validate, &[]));
    let mut against = radpack(args, bin, &["validate"]);
    against.arg(fixed).arg("--against").arg(source);
    all.push(job("validate --against", against, &[]));
    let mut diff = radpack(args, bin, &["diff"]);
    diff.arg(fixed).arg(twin);
    all.push(job("diff", diff, &[]));
    if let Some(python) = &args.peers {
        for (recipe, scheme) in PEERS.iter().filter(|(r, _)| recipes.iter().any(|name| name == r)) {
            let out = dir.join("peer");
            let mut peer = Command::new(python);
            let code = "import sys; from llmcompressor import model_free_ptq; \
                        model_free_ptq(model_stub=sys.argv[1], save_directory=sys.argv[2], scheme=sys.argv[3], \
                        ignore=['lm_head', 're:.*embed_tokens$'], max_workers=2, device='cpu')";
            peer.args(["-c", code]).arg(source).arg(&out).arg(scheme);
            all.push(job(&format!("llm-compressor {recipe}"), peer, &[out]));
        }
    }
    if let Some([quantize, model]) = args.llama.as_deref() {
        let out = dir.join("peer.gguf");
        let mut peer = Command::new(quantize);
        peer.arg(model).arg(&out).arg("Q8_0");
        all.push(job("llama-quantize Q8_0", peer, &[out]));
    }
    Ok(all)
}

fn remove(path: &Path) -> Result<()> {
    if path.is_dir() {
        return build::remove_folder(path);
    }
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(testkit::at(path)(e)),
        _ => Ok(()),
    }
}

/// The medians of every figure; the largest memory.
fn median(runs: &[Usage]) -> Usage {
    let middle = |of: fn(&Usage) -> f64| {
        let mut all: Vec<f64> = runs.iter().map(of).collect();
        all.sort_by(f64::total_cmp);
        all.get(all.len() / 2).copied().unwrap_or(0.0)
    };
    Usage {
        wall: middle(|u| u.wall),
        cpu: middle(|u| u.cpu),
        peak_rss: runs.iter().map(|u| u.peak_rss).max().unwrap_or(0),
        peak_anonymous: runs.iter().map(|u| u.peak_anonymous).max().unwrap_or(0),
        samples: runs.iter().map(|u| u.samples).sum(),
    }
}

fn ratio(usage: &Usage, all: &[(String, Usage)]) -> f64 {
    let cp = all.iter().find(|(name, _)| name == "cp").map_or(f64::NAN, |(_, u)| u.wall);
    usage.wall / cp
}

fn row_document(name: &str, u: &Usage, all: &[(String, Usage)]) -> Value {
    json!({
        "name": name, "wall_s": u.wall, "cpu_s": u.cpu, "cp_ratio": ratio(u, all),
        "rss_anon_peak_bytes": u.peak_anonymous, "vm_hwm_bytes": u.peak_rss,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_of_each_figure_and_memory_is_the_largest() {
        let usage = |wall, cpu, anonymous| Usage {
            wall,
            cpu,
            peak_rss: 9,
            peak_anonymous: anonymous,
            samples: 2,
        };
        let m = median(&[usage(3.0, 1.0, 5), usage(1.0, 2.0, 8), usage(2.0, 9.0, 7)]);
        assert_eq!(m, Usage { wall: 2.0, cpu: 2.0, peak_rss: 9, peak_anonymous: 8, samples: 6 });
        let all = [("cp".to_owned(), usage(4.0, 0.0, 0)), ("x".to_owned(), m)];
        assert_eq!(ratio(&m, &all), 0.5);
    }
}
