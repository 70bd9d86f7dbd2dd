//! Inputs that are wrong (`fixtures/bad`): each gives exactly the text beside it, by the way that fuzzing takes.
//!
//! `fixtures/bad/TARGET/NAME.EXT` is an input of the fuzz target, `NAME.txt` what becomes of it.
//! `RADPACK_BLESS=1` writes the texts anew.

#[path = "fuzz/src/drive/mod.rs"]
#[allow(dead_code, unused_imports)] // the fuzz targets and their seeds use the rest
mod drive;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn sorted(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    paths
}

fn text(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Inputs of a folder by name without ending, and the texts.
type Inputs = (BTreeMap<String, PathBuf>, BTreeMap<String, PathBuf>);

fn inputs(folder: &Path) -> Inputs {
    let (mut inputs, mut texts) = Inputs::default();
    for path in sorted(folder) {
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let into =
            if path.extension().is_some_and(|e| e == "txt") { &mut texts } else { &mut inputs };
        let before = into.insert(name, path.clone());
        assert_eq!(before, None, "two inputs of one name: {}", path.display());
    }
    (inputs, texts)
}

#[test]
fn every_bad_input_gives_the_text_beside_it() {
    let bless = std::env::var_os("RADPACK_BLESS").is_some();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/bad");
    let mut wrong = Vec::new();
    let mut covered = Vec::new();
    for folder in sorted(&root).into_iter().filter(|path| path.is_dir()) {
        let target = text(&folder);
        let Some(driver) = drive::driver(&target) else {
            // The one target that needs the network code.
            assert_eq!(target, "hub", "a folder of no target");
            continue;
        };
        let (inputs, texts) = inputs(&folder);
        for name in texts.keys().filter(|name| !inputs.contains_key(*name)) {
            wrong.push(format!("{target}/{name}.txt stands beside no input"));
        }
        for (name, path) in &inputs {
            let bytes = fs::read(path).expect("the input");
            let outcome = match driver(&bytes) {
                Ok(accepted) => format!("accepted: {accepted}\n"),
                Err(error) => format!("{}\n", error.trim_end()),
            };
            let beside = folder.join(format!("{name}.txt"));
            if bless {
                fs::write(&beside, &outcome).expect("writes");
            }
            match fs::read_to_string(&beside) {
                Ok(want) if want == outcome => {}
                Ok(want) => wrong.push(format!("{target}/{name} gives\n{outcome}and not\n{want}")),
                Err(error) => wrong.push(format!("{target}/{name}.txt: {error}")),
            }
        }
        covered.push(target);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    for (target, _) in drive::DRIVERS {
        assert!(covered.iter().any(|c| c == target), "no input for {target}");
    }
}
