//! Builds the radpack binary and runs other programs.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Result;

/// Names the binary of tasks that are not told one: CI runs them on the build that its tests made.
const BIN: &str = "RADPACK_BIN";

/// The binary to run: the given one, that of the environment, or a release build of the tree.
pub fn radpack(given: Option<PathBuf>) -> Result<PathBuf> {
    if let Some(bin) = given.or_else(|| std::env::var_os(BIN).map(PathBuf::from)) {
        return bin.canonicalize().map_err(testkit::at(&bin));
    }
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    run(cargo
        .args(["build", "--release", "--locked", "--bin", "radpack"])
        .current_dir(testkit::root()))?;
    Ok(testkit::target().join("release/radpack").with_extension(std::env::consts::EXE_EXTENSION))
}

/// Names of the built-in recipes.
pub fn recipes(bin: &Path) -> Result<Vec<String>> {
    let text = output(Command::new(bin).args(["recipes", "list", "--json"]))?;
    let list: serde_json::Value = serde_json::from_str(&text).map_err(|e| e.to_string())?;
    let names = list["recipes"].as_array().into_iter().flatten();
    let names: Vec<String> = names.filter_map(|r| r["name"].as_str()).map(str::to_owned).collect();
    if names.is_empty() { Err("no recipe is built in".to_owned()) } else { Ok(names) }
}

/// Runs a program to its end with inherited output; a failing one is an error that shows the command.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().map_err(|e| format!("{}: {e}", shown(command)))?;
    if status.success() { Ok(()) } else { Err(format!("{}: {status}", shown(command))) }
}

/// Runs a program to its end and returns its stdout; a failing one is an error that shows the command and its stderr.
pub fn output(command: &mut Command) -> Result<String> {
    let out = command.output().map_err(|e| format!("{}: {e}", shown(command)))?;
    if !out.status.success() {
        let stderr = String::from_utf8_lossy(&out.stderr);
        return Err(format!("{}: {}\n{}", shown(command), out.status, stderr.trim_end()));
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// The command line, quoted where a shell would need it.
pub fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let quoted = words.map(|w| {
        let w = w.to_string_lossy();
        if w.contains(char::is_whitespace) { format!("'{w}'") } else { w.into_owned() }
    });
    quoted.collect::<Vec<_>>().join(" ")
}

/// Removes a folder with all it holds; a missing one is fine.
pub fn remove_folder(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(testkit::at(path)(e)),
        _ => Ok(()),
    }
}
