//! Which files of a folder hold the weights, decided by names alone (so that a hub listing is judged by the same
//! rules before anything is downloaded).

use crate::diag::{self, Diagnostic};

/// Index that transformers writes beside sharded weights.
const DEFAULT_INDEX: &str = "model.safetensors.index.json";

/// The files that hold the weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Layout {
    /// Those that this index names.
    Index(String),
    /// These, in byte order.
    Files(Vec<String>),
}

/// Extensions of weight files of any kind: never side files.
const WEIGHT_EXTENSIONS: [&str; 26] = [
    "safetensors",
    "bin",
    "pt",
    "pth",
    "ckpt",
    "gguf",
    "ggml",
    "h5",
    "msgpack",
    "onnx",
    "onnx_data",
    "npz",
    "npy",
    "tflite",
    "mlmodel",
    "pkl",
    "pickle",
    "pdparams",
    "ot",
    "nemo",
    "llamafile",
    "engine",
    "plan",
    "rad",
    "pte",
    "mar",
];

/// Whether a name is that of a weight file of any format, or of a checkpoint or artifact of another tool.
pub(super) fn is_weight_file(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    lower.rsplit_once('.').is_some_and(|(_, ext)| WEIGHT_EXTENSIONS.contains(&ext))
}

/// Whether a name is that of an index of sharded weights.
pub(super) fn is_index(name: &str) -> bool {
    name.ends_with(".index.json")
}

/// Extension of safetensors files.
const SAFETENSORS: &str = ".safetensors";

fn is_safetensors(name: &str) -> bool {
    name.ends_with(SAFETENSORS)
}

/// Whether a name is that of a GGUF file.
pub(super) fn is_gguf(name: &str) -> bool {
    name.ends_with(".gguf")
}

/// The name of a GGUF file's model: without extension and number.
pub(super) fn stem_of_gguf(name: &str) -> &str {
    match Numbered::parse(name, ".gguf") {
        Some(numbered) => numbered.stem,
        None => name.strip_suffix(".gguf").unwrap_or(name),
    }
}

/// Decides which files hold the weights. `names` are the regular files at the top of the folder, in byte order;
/// `shown` is the folder in messages.
///
/// Returns the layout and notes about files that do not count.
///
/// # Errors
/// The reason why the folder cannot be read, with what would work.
pub(super) fn choose(names: &[&str], shown: &str) -> Result<(Layout, Vec<Diagnostic>), Diagnostic> {
    let mut notes = Vec::new();
    let indexes: Vec<&str> =
        names.iter().copied().filter(|n| n.ends_with(".safetensors.index.json")).collect();
    let index = match indexes.as_slice() {
        [] => None,
        [only] => Some(*only),
        several if several.contains(&DEFAULT_INDEX) => {
            let others: Vec<&str> =
                several.iter().copied().filter(|n| *n != DEFAULT_INDEX).collect();
            notes.push(
                Diagnostic::new(
                    "checkpoint",
                    format!("{} decides; ignored: {}", DEFAULT_INDEX, diag::list(&others, 8)),
                )
                .help("pass another index file's path to use that one"),
            );
            Some(DEFAULT_INDEX)
        }
        several => {
            return Err(Diagnostic::new(
                "checkpoint",
                format!(
                    "{shown} has {} index files, and none is {DEFAULT_INDEX}: {}",
                    several.len(),
                    diag::list(several, 8)
                ),
            )
            .help("pass the path of the index file to use"));
        }
    };
    if let Some(index) = index {
        return Ok((Layout::Index(index.to_owned()), notes));
    }

    let all: Vec<&str> = names.iter().copied().filter(|n| is_safetensors(n)).collect();
    let (adapters, mut files): (Vec<&str>, Vec<&str>) =
        all.iter().partition(|n| n.starts_with("adapter_"));
    if files.is_empty() {
        files = adapters;
    } else if !adapters.is_empty() {
        notes.push(Diagnostic::new(
            "checkpoint",
            format!("ignored, an adapter is no part of the model: {}", diag::list(&adapters, 8)),
        ));
    }
    match files.as_slice() {
        [] => match gguf(names, shown) {
            Some(found) => found.map(|files| (Layout::Files(files), notes)),
            None => Err(no_weights(names, shown)),
        },
        [only] if Numbered::parse(only, SAFETENSORS).is_none_or(|n| n.of <= 1) => {
            Ok((Layout::Files(vec![(*only).to_owned()]), notes))
        }
        several => several_files(several, shown).map(|files| {
            notes.push(Diagnostic::new(
                "checkpoint",
                format!("no index; the numbering of {} shards decides", files.len()),
            ));
            (Layout::Files(files), notes)
        }),
    }
}

/// The GGUF files of a folder without safetensors: one model, whole or split. Encoders of images and sound
/// (`mmproj-…`) are models of their own.
fn gguf(names: &[&str], shown: &str) -> Option<Result<Vec<String>, Diagnostic>> {
    let files: Vec<&str> =
        names.iter().copied().filter(|n| is_gguf(n) && !n.starts_with("mmproj")).collect();
    let first = files.first()?;
    let series = super::gguf::series(first);
    if files.iter().all(|file| series.iter().any(|of| of == file)) {
        return Some(Ok(series));
    }
    let what = format!("{shown} has {} GGUF files: {}", files.len(), diag::list(&files, 8));
    Some(Err(Diagnostic::new("checkpoint", what).help("pass the path of the one to convert")))
}

/// Several files without an index: one complete numbered series, or a refusal.
fn several_files(files: &[&str], shown: &str) -> Result<Vec<String>, Diagnostic> {
    let numbered: Vec<Option<Numbered<'_>>> =
        files.iter().map(|f| Numbered::parse(f, SAFETENSORS)).collect();
    let first = numbered.first().copied().flatten();
    let one_series = first.is_some_and(|first| {
        numbered.iter().all(|n| n.is_some_and(|n| (n.stem, n.of) == (first.stem, first.of)))
    });
    let (Some(first), true) = (first, one_series) else {
        let (mistral, rest): (Vec<&str>, Vec<&str>) =
            files.iter().partition(|f| f.starts_with("consolidated"));
        let problem = if let (Some(a), Some(b)) = (mistral.first(), rest.first()) {
            Diagnostic::new(
                "checkpoint",
                format!(
                    "{shown} has the weights in two layouts, {a} and {b}, and no index to say which counts"
                ),
            )
        } else {
            Diagnostic::new(
                "checkpoint",
                format!(
                    "{shown} has {} weight files and no index to say which count: {}",
                    files.len(),
                    diag::list(files, 8)
                ),
            )
        };
        return Err(problem
            .help("pass the path of the one file to use, or add the index file of the model"));
    };
    let have: Vec<u64> = numbered.iter().flatten().map(|n| n.number).collect();
    // Far more shards than any model has are not listed one by one.
    let missing: Vec<u64> =
        (1..=first.of.min(100_000)).filter(|n| have.binary_search(n).is_err()).collect();
    if missing.is_empty() && have.len() as u64 == first.of {
        return Ok(files.iter().map(|f| (*f).to_owned()).collect());
    }
    Err(Diagnostic::new(
        "checkpoint",
        format!(
            "{shown} has {} of {} shards; missing: number {}",
            have.len(),
            first.of,
            diag::list(&missing, 8)
        ),
    )
    .help("the copy or download did not finish: fetch the model again"))
}

/// `STEM-00002-of-00013.safetensors`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Numbered<'a> {
    pub stem: &'a str,
    number: u64,
    pub of: u64,
}

impl<'a> Numbered<'a> {
    /// Reads the name of a file with that extension.
    pub fn parse(name: &'a str, extension: &str) -> Option<Numbered<'a>> {
        let (rest, of) = name.strip_suffix(extension)?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        Some(Numbered { stem, number: number.parse().ok()?, of: of.parse().ok()? })
    }
}

/// Why a folder without safetensors cannot be read, and what would work.
fn no_weights(names: &[&str], shown: &str) -> Diagnostic {
    let with = |ext: &str| -> Vec<&str> {
        names.iter().copied().filter(|n| n.to_ascii_lowercase().ends_with(ext)).collect()
    };
    let only = |what: &str, files: &[&str]| {
        Diagnostic::new(
            "checkpoint",
            format!(
                "{shown} holds only {what} ({}); radpack reads safetensors and GGUF",
                diag::list(files, 3)
            ),
        )
    };
    if names.contains(&"model_index.json") {
        return Diagnostic::new(
            "checkpoint",
            format!("{shown} is a diffusers pipeline of several models"),
        )
        .help("pass the folder of one of its models");
    }
    for (ext, what) in [
        (".bin", "PyTorch pickles"),
        (".pth", "PyTorch pickles"),
        (".pt", "PyTorch pickles"),
        (".ckpt", "PyTorch pickles"),
    ] {
        let files = with(ext);
        if !files.is_empty() {
            return only(what, &files)
                .help("load the model once with transformers and save it with save_pretrained, which writes safetensors")
                .help("or take a revision of the model that has safetensors");
        }
    }
    for (ext, what, help) in [
        (".gguf", "encoders of images or sound", "pass the path of the model's own GGUF file"),
        (
            ".h5",
            "TensorFlow weights",
            "load them with transformers (from_tf=True) and save_pretrained",
        ),
        (
            ".msgpack",
            "Flax weights",
            "load them with transformers (from_flax=True) and save_pretrained",
        ),
        (".onnx", "ONNX graphs", "start from the model that they were exported from"),
        (".npz", "numpy archives", "start from the model that they were converted from"),
        (".rad", "artifacts", "start from the checkpoint that they were made of"),
    ] {
        let files = with(ext);
        if !files.is_empty() {
            return only(what, &files).help(help);
        }
    }
    let holds = if names.is_empty() {
        "no files".to_owned()
    } else {
        let files = if names.len() == 1 { "file" } else { "files" };
        format!("{} {files}: {}", names.len(), diag::list(names, 5))
    };
    Diagnostic::new(
        "checkpoint",
        format!("{shown} has no weights (*.safetensors, *.gguf); it holds {holds}"),
    )
    .help("pass the folder of a model: config.json beside *.safetensors")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str]) -> Layout {
        Layout::Files(names.iter().map(|n| (*n).to_owned()).collect())
    }

    fn refusal(names: &[&str]) -> String {
        choose(names, "m").expect_err("a refusal").message
    }

    #[test]
    fn the_default_index_decides_and_others_are_noted() {
        let names = ["consolidated.safetensors.index.json", DEFAULT_INDEX];
        let (layout, notes) = choose(&names, "m").expect("a layout");
        assert_eq!(layout, Layout::Index(DEFAULT_INDEX.into()));
        assert_eq!(
            notes[0].message,
            "model.safetensors.index.json decides; ignored: consolidated.safetensors.index.json"
        );
        let (layout, notes) =
            choose(&["model.fp16.safetensors.index.json"], "m").expect("a layout");
        assert_eq!(layout, Layout::Index("model.fp16.safetensors.index.json".into()));
        assert!(notes.is_empty());
        assert_eq!(
            refusal(&["a.safetensors.index.json", "b.safetensors.index.json"]),
            "m has 2 index files, and none is model.safetensors.index.json: a.safetensors.index.json and \
             b.safetensors.index.json"
        );
    }

    #[test]
    fn one_file_or_one_complete_series_counts_without_an_index() {
        assert_eq!(
            choose(&["model.safetensors"], "m").expect("one").0,
            files(&["model.safetensors"])
        );
        let series = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
        let (layout, notes) = choose(&series, "m").expect("a series");
        assert_eq!(layout, files(&series));
        assert_eq!(notes[0].message, "no index; the numbering of 2 shards decides");
        assert_eq!(
            refusal(&["model-00001-of-00004.safetensors", "model-00003-of-00004.safetensors"]),
            "m has 2 of 4 shards; missing: number 2 and 4"
        );
    }

    #[test]
    fn two_layouts_without_an_index_are_refused_with_both_names() {
        assert_eq!(
            refusal(&["consolidated.safetensors", "model.safetensors"]),
            "m has the weights in two layouts, consolidated.safetensors and model.safetensors, and no index to say \
             which counts"
        );
        assert_eq!(
            refusal(&["a.safetensors", "b.safetensors"]),
            "m has 2 weight files and no index to say which count: a.safetensors and b.safetensors"
        );
    }

    #[test]
    fn a_folder_without_safetensors_says_what_it_holds_and_what_would_work() {
        assert_eq!(
            refusal(&["config.json", "pytorch_model.bin"]),
            "m holds only PyTorch pickles (pytorch_model.bin); radpack reads safetensors and GGUF"
        );
        assert_eq!(
            refusal(&["mmproj-gemma.gguf"]),
            "m holds only encoders of images or sound (mmproj-gemma.gguf); radpack reads safetensors and GGUF"
        );
        assert_eq!(refusal(&["model_index.json"]), "m is a diffusers pipeline of several models");
        assert_eq!(
            refusal(&["config.json"]),
            "m has no weights (*.safetensors, *.gguf); it holds 1 file: config.json"
        );
        assert_eq!(refusal(&[]), "m has no weights (*.safetensors, *.gguf); it holds no files");
    }

    #[test]
    fn one_gguf_file_or_one_series_counts_where_there_are_no_safetensors() {
        assert_eq!(choose(&["m.gguf", "mmproj-m.gguf"], "m").expect("one").0, files(&["m.gguf"]));
        let series = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
        assert_eq!(choose(&series[1..], "m").expect("a series").0, files(&series));
        assert_eq!(
            refusal(&["m-q4.gguf", "m-q8.gguf"]),
            "m has 2 GGUF files: m-q4.gguf and m-q8.gguf"
        );
        assert_eq!(
            choose(&["m.gguf", "m.safetensors"], "m").expect("safetensors").0,
            files(&["m.safetensors"])
        );
    }

    #[test]
    fn weight_files_are_known_by_extension_whatever_the_case() {
        for name in ["x.safetensors", "pytorch_model.BIN", "a.gguf", "rng_state.pth", "out.rad"] {
            assert!(is_weight_file(name), "{name}");
        }
        for name in ["tokenizer.model", "tokenizer.json", "LICENSE", "vocab.txt", "bin"] {
            assert!(!is_weight_file(name), "{name}");
        }
    }
}
