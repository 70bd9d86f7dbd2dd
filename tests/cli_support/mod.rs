//! Runs the real binary in a folder of its own.

// Every test file compiles this module for itself and uses a part of it.
#![allow(dead_code)]

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use radpack::artifact::{Artifact, digests};
use radpack::hash;

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

/// A file with some entry's bytes changed and every digest made anew.
pub fn resealed(bytes: &[u8], name: &str, change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let place = |bytes: &[u8], name: &str| {
        let artifact = Artifact::from_bytes(bytes).expect("opens");
        let entry = artifact.find(name).expect(name);
        entry.offset() as usize..(entry.offset() + entry.span()) as usize
    };
    let mut out = bytes.to_vec();
    change(&mut out[place(bytes, name)]);
    let artifact = Artifact::from_bytes(&out).expect("opens");
    let old = artifact.meta_text("radpack.digest").expect("a digest").to_string();
    let list: Vec<digests::EntryDigest> = artifact
        .entries()
        .map(|e| (e.name().to_string(), e))
        .filter(|(name, _)| name != "radpack/digests")
        .map(|(name, e)| digests::EntryDigest { name, sha256: digests::of_entry(&e) })
        .collect();
    let encoded = digests::encode(&list);
    out[place(bytes, "radpack/digests")].copy_from_slice(&encoded);
    let root = digests::hex(&hash::sha256([encoded.as_slice()]));
    let at = out.windows(64).position(|w| w == old.as_bytes()).expect("in the strings");
    out[at..at + 64].copy_from_slice(root.as_bytes());
    out
}
