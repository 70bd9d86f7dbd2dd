//! `check-resume`: a real model's conversion, killed and resumed, ends with the bytes of an undisturbed one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Instant;

use clap::Args;
use serde_json::Value;
use testkit::digest::sha256_file;

use crate::{Result, build, fetch};

/// How to run `check-resume`.
#[derive(Debug, Args)]
pub struct CheckResumeArgs {
    /// The radpack binary [default: build target/release/radpack]
    #[arg(long)]
    bin: Option<PathBuf>,
    /// How often to kill
    #[arg(long, default_value_t = 10)]
    times: u64,
    /// Start of the sequence of points in time
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Recipe of the conversion
    #[arg(long, default_value = "nvfp4")]
    recipe: String,
}

/// Kills SmolLM2's conversion at points all over its time, and resumes it.
pub fn run(args: &CheckResumeArgs) -> Result<()> {
    let bin = build::radpack(args.bin.clone())?;
    let (model, _) = fetch::bring(fetch::Model::Smollm2)?;
    let folder = testkit::target().join("check-resume");
    build::remove_folder(&folder)?;
    fs::create_dir_all(&folder).map_err(testkit::at(&folder))?;
    let whole = folder.join("whole.rad");
    let started = Instant::now();
    build::output(&mut convert(&bin, &model, &args.recipe, &whole))?;
    let time = started.elapsed();
    let want = sha256_file(&whole)?;
    println!("undisturbed   {want}   {:.2} s", time.as_secs_f64());
    let mut state = args.seed;
    for n in 1..=args.times {
        let out = folder.join("resumed.rad");
        let after = time.mul_f64(share(&mut state));
        let mut child = convert(&bin, &model, &args.recipe, &out)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| format!("{}: {e}", bin.display()))?;
        sleep(after);
        // A run that had ended cannot be killed; there is nothing to go on with then.
        let killed = child.kill().is_ok() && !child.wait().map_err(|e| e.to_string())?.success();
        let report =
            build::output(convert(&bin, &model, &args.recipe, &out).args(["--resume", "--json"]))?;
        let report: Value = serde_json::from_str(&report).map_err(|e| e.to_string())?;
        let kept = &report["resumed"];
        let found = sha256_file(&out)?;
        println!(
            "{n:2}  {} after {:.2} s, {kept} weights kept",
            if killed { "killed" } else { "ended" },
            after.as_secs_f64()
        );
        if found != want {
            return Err(format!(
                "resumed, it ends with {found}; both files are in {}",
                folder.display()
            ));
        }
        fs::remove_file(&out).map_err(testkit::at(&out))?;
    }
    println!("{} of {} files are the same", args.times, args.times);
    build::remove_folder(&folder)
}

fn convert(bin: &Path, model: &Path, recipe: &str, out: &Path) -> Command {
    let mut command = Command::new(bin);
    command.arg("convert").arg(model).args(["--recipe", recipe, "-o"]).arg(out);
    command
}

/// The next number of a fixed sequence, from 0.05 to 1 (Knuth's multiplier).
fn share(state: &mut u64) -> f64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    0.05 + 0.95 * ((*state >> 11) as f64 / (1u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_in_time_are_those_of_their_seed_and_spread_over_the_run() {
        let points = |seed: u64| {
            let mut state = seed;
            (0..100).map(|_| share(&mut state)).collect::<Vec<f64>>()
        };
        assert_eq!(points(1), points(1));
        assert_ne!(points(1), points(2));
        assert!(points(1).iter().all(|p| (0.05..1.0).contains(p)));
        assert!(points(1).iter().any(|p| *p < 0.3) && points(1).iter().any(|p| *p > 0.8));
    }
}
