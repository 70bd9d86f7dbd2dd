//! What fuzzing begins with: `FOLDER/TARGET/…` and a dictionary `FOLDER/TARGET.dict` of the words in it. Everything is made of fixtures and of what radpack makes of them.

mod made;
mod sources;
mod words;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::drive::DRIVERS;
use crate::drive::archive::pack;

/// Inputs of every target.
#[derive(Default)]
struct Seeds(BTreeMap<&'static str, Vec<Vec<u8>>>);

impl Seeds {
    fn add(&mut self, target: &'static str, bytes: impl Into<Vec<u8>>) {
        self.0.entry(target).or_default().push(bytes.into());
    }

    fn pack(&mut self, target: &'static str, files: &[(&str, &[u8])]) {
        self.add(target, pack(files.iter().copied()));
    }
}

/// The repository.
fn root() -> PathBuf {
    testkit::root()
}

fn read(path: impl AsRef<Path>) -> Vec<u8> {
    let path = root().join(path);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Files below a folder of the repository that end in that way, sorted.
fn below(folder: &str, end: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut left = vec![root().join(folder)];
    while let Some(at) = left.pop() {
        for entry in std::fs::read_dir(&at).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                left.push(path);
            } else if path.to_string_lossy().ends_with(end) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Writes the seeds and dictionaries of every target.
pub fn write(folder: &Path) {
    let mut seeds = Seeds::default();
    sources::add(&mut seeds);
    made::add(&mut seeds);
    // What was found once is where the next find may be near.
    for (target, _) in DRIVERS {
        for input in below(&format!("fixtures/bad/{target}"), "") {
            if input.extension().is_none_or(|e| e != "txt") {
                seeds.add(target, read(input));
            }
        }
    }
    for (target, inputs) in &seeds.0 {
        let into = folder.join(target);
        std::fs::create_dir_all(&into).expect("a folder");
        for (n, bytes) in inputs.iter().enumerate() {
            std::fs::write(into.join(format!("seed-{n:03}")), bytes).expect("writes");
        }
        let words = words::dictionary(inputs);
        std::fs::write(folder.join(format!("{target}.dict")), words).expect("writes");
    }
}
