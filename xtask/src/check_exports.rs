//! `check-exports`: exported folders, loaded by transformers and compared with radpack's own decoded weights.
//!
//! This side makes the Python environment and the folders; what is compared, and why that, is told at the top of
//! `xtask/check_exports/check.py`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::{Result, build, python};

const MODELS: [&str; 3] = ["tiny-llama", "tiny-qwen3", "tiny-gemma4-dense"];

const RECIPES: [&str; 6] = ["w8a16", "int8-g128", "fp8-dynamic", "fp8-block", "nvfp4", "w4a16-g32"];

/// Folders made of each artifact: name, and the arguments of `radpack export`. `check.py` knows the names.
const FOLDERS: [(&str, &[&str]); 3] = [
    ("compressed", &["--format", "compressed-tensors"]),
    ("f32", &["--format", "safetensors", "--dtype", "f32"]),
    ("bf16", &["--format", "safetensors"]),
];

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
        None => python::environment(&scripts.join("requirements.txt"), &scratch, "about 3 GB")?,
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
    build::run(&mut check).map_err(|e| match python::traceback(&log) {
        Some(lines) => {
            format!("{e}\n{lines}\n(folders in {}, log in {})", folders.display(), log.display())
        }
        None => format!("{e} (folders in {})", folders.display()),
    })?;
    // Kept after a difference, to be compared.
    build::remove_folder(&folders)
}

/// The checkpoint of a tiny model: committed, or made from the fixtures' spec.
pub fn source(model: &str, scratch: &Path) -> Result<PathBuf> {
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
