//! Runs the real binary in a folder of its own.

// Every test file compiles this module for itself and uses a part of it.
#![allow(dead_code)]

use std::path::{Path, PathBuf};

use assert_cmd::Command;

/// What one run printed and returned.
#[derive(Debug)]
pub struct Ran {
    /// Exit code.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// Runs `radpack` with these arguments in `folder`.
pub fn radpack<S: AsRef<std::ffi::OsStr>>(folder: &Path, args: &[S]) -> Ran {
    let output = Command::cargo_bin("radpack")
        .expect("the binary is built")
        .current_dir(folder)
        .env("NO_COLOR", "1")
        .args(args)
        .output()
        .expect("the binary runs");
    Ran {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).expect("UTF-8 on stdout"),
        stderr: String::from_utf8(output.stderr).expect("UTF-8 on stderr"),
    }
}

/// Runs and insists on success.
pub fn succeeds<S: AsRef<std::ffi::OsStr>>(folder: &Path, args: &[S]) -> Ran {
    let ran = radpack(folder, args);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    ran
}

/// The committed model.
pub fn dense() -> PathBuf {
    testkit::fixtures().join("tiny-gemma4-dense")
}

/// A copy of the committed model that a test may change.
pub fn dense_copy(folder: &Path) -> PathBuf {
    let copy = folder.join("model");
    testkit::copy_folder(&dense(), &copy).expect("the fixture copies");
    copy
}

/// Sha256 of a file, in hex.
pub fn sha256(path: &Path) -> String {
    testkit::digest::sha256_file(path).expect("the file reads")
}
