//! `check-exports`: exported folders, loaded by transformers and compared with radpack's own decoded weights.
//!
//! This side makes the Python environment and the folders; what is compared, and why that, is told at the top of
//! `xtask/check_exports/check.py`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use testkit::digest::sha256;

use crate::{Result, build};

const MODELS: [&str; 3] = ["tiny-llama", "tiny-qwen3", "tiny-gemma4-dense"];

const RECIPES: [&str; 6] = ["w8a16", "int8-g128", "fp8-dynamic", "fp8-block", "nvfp4", "w4a16-g32"];

/// Folders made of each artifact: name, and the arguments of `radpack export`. `check.py` knows the names.
const FOLDERS: [(&str, &[&str]); 3] = [
    ("compressed", &["--format", "compressed-tensors"]),
    ("f32", &["--format", "safetensors", "--dtype", "f32"]),
    ("bf16", &["--format", "safetensors"]),
];

/// The installer: pip takes several times as long for these packages.
const UV: &str = "uv==0.13.9";

/// How to check.
#[derive(Debug, Args)]
pub struct CheckExportsArgs {
    /// The radpack binary [default: build target/release/radpack]
    #[arg(long)]
    bin: Option<PathBuf>,
    /// A Python that has the packages of xtask/check_exports/requirements.txt [default: install them into
    /// target/check-exports/venv]
    #[arg(long)]
    python: Option<PathBuf>,
    /// Flip a bit of one scale in every exported folder first: the check must then fail
    #[arg(long)]
    sabotage: bool,
}

/// Exports every model in every recipe and has `check.py` compare. A difference, or an export that fails, is an error.
pub fn run(args: &CheckExportsArgs) -> Result<()> {
    let scripts = testkit::root().join("xtask/check_exports");
    let scratch = testkit::target().join("check-exports");
    let python = match &args.python {
        Some(python) => python.clone(),
        None => environment(&scripts.join("requirements.txt"), &scratch)?,
    };
    let bin = build::radpack(args.bin.clone())?;
    let folders = scratch.join("folders");
    build::remove_folder(&folders)?;
    for model in MODELS {
        let source = source(model, &scratch)?;
        for recipe in RECIPES {
            export(&bin, &source, recipe, &folders.join(model).join(recipe))?;
        }
    }
    let log = scratch.join("check.log");
    let mut check = Command::new(python);
    check.arg(scripts.join("check.py")).arg(&folders);
    check.args(MODELS.iter().flat_map(|m| RECIPES.map(|r| format!("{m}/{r}"))));
    if args.sabotage {
        check.arg("--sabotage");
    }
    // The libraries' progress bars and notices.
    check.stderr(File::create(&log).map_err(testkit::at(&log))?);
    build::run(&mut check).map_err(|e| match last_lines(&log) {
        Some(lines) => {
            format!("{e}\n{lines}\n(folders in {}, log in {})", folders.display(), log.display())
        }
        None => format!("{e} (folders in {})", folders.display()),
    })?;
    // Kept after a difference, to be compared.
    build::remove_folder(&folders)
}

/// The checkpoint of a tiny model: committed, or made from the fixtures' spec.
fn source(model: &str, scratch: &Path) -> Result<PathBuf> {
    let committed = testkit::fixtures().join(model);
    if committed.is_dir() {
        return Ok(committed);
    }
    testkit::tiny::cached(model, &scratch.join("models")).map_err(|e| format!("{model}: {e}"))
}

fn export(bin: &Path, source: &Path, recipe: &str, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(testkit::at(folder))?;
    let artifact = folder.join("model.rad");
    let mut convert = Command::new(bin);
    convert.arg("convert").arg(source).args(["--recipe", recipe]).arg("-o").arg(&artifact);
    build::output(&mut convert)?;
    for (name, options) in FOLDERS {
        let mut export = Command::new(bin);
        export.arg("export").arg(&artifact).args(options).arg("-o").arg(folder.join(name));
        build::output(&mut export)?;
    }
    Ok(())
}

/// The end of a Python traceback, if the log ends in one.
fn last_lines(log: &Path) -> Option<String> {
    let text = fs::read(log).ok()?;
    let text = String::from_utf8_lossy(&text);
    let at = text.rfind("Traceback (most recent call last)")?;
    Some(text[at..].trim_end().to_owned())
}

/// The Python of a virtual environment with exactly the required packages, made anew when they or Python changed.
fn environment(requirements: &Path, scratch: &Path) -> Result<PathBuf> {
    let wanted = fs::read(requirements).map_err(testkit::at(requirements))?;
    let version = build::output(Command::new("python3").arg("--version"))
        .map_err(|e| format!("needs python3, 3.11 or newer, with venv: {e}"))?;
    let version = version.trim();
    if !new_enough(version) {
        return Err(format!("needs python3, 3.11 or newer; this is {version}"));
    }
    let venv = scratch.join("venv");
    let python = venv.join("bin/python3");
    let stamp = venv.join("made-of");
    let made_of = format!("{version}, {UV}, requirements {}\n", sha256(&wanted));
    if fs::read_to_string(&stamp).is_ok_and(|s| s == made_of) {
        return Ok(python);
    }
    eprintln!("installing {} (about 3 GB to download)", requirements.display());
    build::remove_folder(&venv)?;
    build::run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]);
    build::run(pip.arg(UV))?;
    // A cache of its own, on the same file system, so that files are linked instead of copied and the home folder stays
    // as it is. `--no-deps` keeps to the list, which is complete.
    let cache = scratch.join("uv-cache");
    let mut uv = Command::new(venv.join("bin/uv"));
    uv.args(["pip", "install", "--quiet", "--no-deps", "--python"]).arg(&python);
    let installed = build::run(uv.arg("--cache-dir").arg(&cache).arg("-r").arg(requirements));
    build::remove_folder(&cache)?;
    installed?;
    fs::write(&stamp, made_of).map_err(testkit::at(&stamp))?;
    Ok(python)
}

/// Whether `Python 3.x.y` is at least the version that the pinned packages need.
fn new_enough(version: &str) -> bool {
    let mut numbers = version.trim_start_matches("Python ").split('.').map(str::parse::<u32>);
    matches!((numbers.next(), numbers.next()), (Some(Ok(3)), Some(Ok(minor))) if minor >= 11)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn python_versions_are_compared_as_numbers() {
        assert!(new_enough("Python 3.11.7"));
        assert!(new_enough("Python 3.12.0rc1"));
        assert!(!new_enough("Python 3.9.18"));
        assert!(!new_enough("Python 2.7.18"));
        assert!(!new_enough("command not found"));
    }

    #[test]
    fn every_requirement_is_one_exact_version() {
        let path = testkit::root().join("xtask/check_exports/requirements.txt");
        let text = fs::read_to_string(&path).unwrap();
        let packages: Vec<&str> =
            text.lines().filter(|l| !l.starts_with('#') && !l.is_empty()).collect();
        assert!(packages.len() > 50, "{} packages", packages.len());
        for package in packages {
            let (_, version) = package.split_once("==").expect(package);
            assert!(version.starts_with(|c: char| c.is_ascii_digit()), "{package}");
        }
        for direct in fs::read_to_string(path.with_extension("in")).unwrap().lines() {
            assert!(text.lines().any(|l| l == direct), "{direct}");
        }
    }

    #[test]
    fn a_traceback_is_found_behind_progress_bars() {
        let log = std::env::temp_dir().join(format!("xtask-check-exports-{}", std::process::id()));
        fs::write(&log, "50%\r100%\nTraceback (most recent call last):\n  x\nImportError: y\n")
            .unwrap();
        let found = last_lines(&log);
        fs::write(&log, "100%\n").unwrap();
        let none = last_lines(&log);
        fs::remove_file(&log).unwrap();
        assert_eq!(
            found.as_deref(),
            Some("Traceback (most recent call last):\n  x\nImportError: y")
        );
        assert_eq!(none, None);
    }
}
