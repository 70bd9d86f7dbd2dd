//! `bench scale`: time and memory of planning and converting a full-size model.
//!
//! The source is sparse, so it needs no disk and is read at the speed of the page cache; the output is real and needs
//! its full size on disk until the run is over.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use clap::Args;
use serde_json::{Value, json};

use super::measure::{Usage, measure};
use crate::fixtures::{self, SparseArgs};
use crate::{Result, build};

/// How to run `bench scale`.
#[derive(Debug, Args)]
pub struct ScaleArgs {
    /// Name in fixtures/gemma4, or moe-1t: 60 layers of 384 experts, 1.02 trillion parameters; or moe-50k: experts of
    /// 830 MB in 50,688 matrices; or moe-400: as many bytes in 396
    #[arg(long, default_value = "gemma-4-31B")]
    model: String,
    /// Recipe of the conversion
    #[arg(long, default_value = "int8-g128")]
    recipe: String,
    /// Worker threads [default: radpack's]
    #[arg(long)]
    threads: Option<u32>,
    /// The radpack binary [default: build target/release/radpack]
    #[arg(long)]
    bin: Option<PathBuf>,
    /// Folder for source and output, both removed afterwards [default: target/scale]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Convert this part only, as 1/1000: an output that fits on the disk
    #[arg(long, value_name = "I/N", conflicts_with = "dry_run")]
    part: Option<String>,
    /// Only plan: no conversion
    #[arg(long)]
    dry_run: bool,
    /// One JSON document instead of a table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    layout: SparseArgs,
}

/// Makes the model, plans it, converts it, and prints what that took.
pub fn scale(args: &ScaleArgs) -> Result<()> {
    let bin = build::radpack(args.bin.clone())?;
    let dir = args.dir.clone().unwrap_or_else(|| testkit::target().join("scale"));
    let source = dir.join(&args.model);
    build::remove_folder(&source)?;
    let made = fixtures::sparse(&args.model, &source, args.layout.options())?;
    let out = dir.join(format!("{}.rad", args.model));
    let written = match args.part.as_ref().and_then(|part| part.split_once('/')) {
        Some((index, parts)) => dir.join(format!("{}.rad.part-{index}-of-{parts}", args.model)),
        None => out.clone(),
    };
    let convert = || {
        let mut radpack = Command::new(&bin);
        radpack.arg("convert").arg(&source).arg("-o").arg(&out).args([
            "--no-tokenizer",
            "--recipe",
            &args.recipe,
        ]);
        if let Some(part) = &args.part {
            radpack.args(["--part", part]);
        }
        if let Some(threads) = args.threads {
            radpack.args(["--threads", &threads.to_string()]);
        }
        radpack
    };
    eprintln!("planning");
    let plan = measure(convert().arg("--dry-run"))?;
    let converted = if args.dry_run {
        None
    } else {
        eprintln!("converting");
        let usage = measure(&mut convert())?;
        Some((usage, fs::metadata(&written).map_err(testkit::at(&written))?.len()))
    };
    build::remove_folder(&source)?;
    if converted.is_some() {
        fs::remove_file(&written).map_err(testkit::at(&written))?;
    }
    if args.json {
        println!("{:#}", document(args, made.bytes, plan, converted));
        return Ok(());
    }
    println!(
        "model     {} · {:.2} GB in {} tensors and {} shards, sparse",
        args.model,
        made.bytes as f64 / 1e9,
        made.tensors,
        made.shards
    );
    println!("dry run   {}", row(plan));
    if let Some((usage, size)) = converted {
        println!("convert   {}", row(usage));
        println!(
            "output    {} · {:.2} GB, {:.2} GB/s of source",
            args.recipe,
            size as f64 / 1e9,
            made.bytes as f64 / 1e9 / usage.wall
        );
    }
    Ok(())
}

fn row(u: Usage) -> String {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    format!(
        "{:8.2} s   VmHWM {:9.1} MiB   RssAnon peak {:7.1} MiB in {} samples",
        u.wall,
        mib(u.peak_rss),
        mib(u.peak_anonymous),
        u.samples
    )
}

fn document(args: &ScaleArgs, bytes: u64, plan: Usage, converted: Option<(Usage, u64)>) -> Value {
    let usage = |u: Usage| {
        json!({
            "wall_s": u.wall,
            "vm_hwm_bytes": u.peak_rss,
            "rss_anon_peak_bytes": u.peak_anonymous,
            "samples": u.samples,
        })
    };
    json!({
        "model": args.model,
        "recipe": args.recipe,
        "threads": args.threads,
        "cpus": std::thread::available_parallelism().map_or(0, usize::from),
        "source_bytes": bytes,
        "dry_run": usage(plan),
        "convert": converted.map(|(u, _)| usage(u)),
        "output_bytes": converted.map(|(_, size)| size),
        "source_gb_per_s": converted.map(|(u, _)| bytes as f64 / 1e9 / u.wall),
    })
}
