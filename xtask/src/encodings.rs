//! `encodings`: `docs/encodings.md` is made from what the tests register, by a test; this runs it.

use std::process::Command;

use crate::{Result, build};

/// Checks the document, or writes it.
pub fn run(write: bool) -> Result<()> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .args(["test", "--locked", "--quiet", "--test", "encodings_document"])
        .current_dir(testkit::root());
    if write {
        cargo.env("RADPACK_BLESS", "1");
    }
    build::run(&mut cargo)
}
