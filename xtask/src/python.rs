//! Python environments with pinned packages, for the checks that need other people's software.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::digest::sha256;

use crate::{Result, build};

/// The installer: pip takes several times as long for these packages.
const UV: &str = "uv==0.13.9";

/// The Python of a virtual environment below `scratch` with exactly the required packages, made anew when they or Python
/// changed. `cost` says what there is to download.
pub fn environment(requirements: &Path, scratch: &Path, cost: &str) -> Result<PathBuf> {
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
    eprintln!("installing {} ({cost} to download)", requirements.display());
    build::remove_folder(&venv)?;
    fs::create_dir_all(scratch).map_err(testkit::at(scratch))?;
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

/// The end of a Python traceback, if the log ends in one.
pub fn traceback(log: &Path) -> Option<String> {
    let text = fs::read(log).ok()?;
    let text = String::from_utf8_lossy(&text);
    let at = text.rfind("Traceback (most recent call last)")?;
    Some(text[at..].trim_end().to_owned())
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
        for (check, least) in [("check_exports", 50), ("check_stablehlo", 5)] {
            let path = testkit::root().join("xtask").join(check).join("requirements.txt");
            let text = fs::read_to_string(&path).unwrap();
            let packages: Vec<&str> =
                text.lines().filter(|l| !l.starts_with('#') && !l.is_empty()).collect();
            assert!(packages.len() >= least, "{} packages", packages.len());
            for package in packages {
                let (_, version) = package.split_once("==").expect(package);
                assert!(version.starts_with(|c: char| c.is_ascii_digit()), "{package}");
            }
            for direct in fs::read_to_string(path.with_extension("in")).unwrap().lines() {
                assert!(text.lines().any(|l| l == direct), "{direct}");
            }
        }
    }

    #[test]
    fn a_traceback_is_found_behind_progress_bars() {
        let log = std::env::temp_dir().join(format!("xtask-python-{}", std::process::id()));
        fs::write(&log, "50%\r100%\nTraceback (most recent call last):\n  x\nImportError: y\n")
            .unwrap();
        let found = traceback(&log);
        fs::write(&log, "100%\n").unwrap();
        let none = traceback(&log);
        fs::remove_file(&log).unwrap();
        assert_eq!(
            found.as_deref(),
            Some("Traceback (most recent call last):\n  x\nImportError: y")
        );
        assert_eq!(none, None);
    }
}
