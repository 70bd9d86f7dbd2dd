//! Every fuzz target in one program, so that there is one build and one link.
//!
//! `radpack-fuzz --target=NAME …` is libFuzzer over that target (it passes over arguments with two dashes),
//! `radpack-fuzz --seeds=FOLDER` writes what fuzzing begins with and ends.
#![no_main]

mod drive;
mod seeds;

use std::path::Path;
use std::process::exit;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use libfuzzer_sys::fuzz_target;

use drive::{Driver, HURRY};

static DRIVER: OnceLock<Driver> = OnceLock::new();

/// What stands behind `--NAME=` on the command line.
fn argument(name: &str) -> Option<String> {
    let mark = format!("--{name}=");
    std::env::args().find_map(|argument| argument.strip_prefix(&mark).map(str::to_owned))
}

/// Before the first input: what is asked for.
fn begin() {
    if let Some(folder) = argument("seeds") {
        seeds::write(Path::new(&folder));
        exit(0);
    }
    let target = argument("target");
    let Some(driver) = target.as_deref().and_then(drive::driver) else {
        let targets: Vec<&str> = drive::DRIVERS.iter().map(|driver| driver.0).collect();
        eprintln!("--target=NAME with one of {}, or --seeds=FOLDER", targets.join(", "));
        exit(2);
    };
    HURRY.store(true, Ordering::Relaxed);
    DRIVER.get_or_init(|| driver);
}

fuzz_target!(init: begin(), |data: &[u8]| {
    // An error is what most inputs give; a panic is a find.
    if let Some(driver) = DRIVER.get() {
        let _ = driver(data);
    }
});
