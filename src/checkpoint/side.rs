//! Files that go into the artifact beside the weights, chosen by rule.
//!
//! Everything small in the model's folder belongs to it (a list of allowed names would lose the next processor config
//! that somebody invents), except for what the rules below name, each with its reason. Only the top of the folder and
//! `additional_chat_templates/` count; other subfolders hold other models, original weights and training states.

use super::folder::is_inner_path;
use super::layout::{is_index, is_weight_file};
use super::quantized::QUANT_CONFIGS;

/// Largest side file, in bytes. The largest that published models have is a 32 MiB `tokenizer.json`.
pub const MAX_SIDE_FILE_BYTES: u64 = 64 << 20;

/// Why a file is left out; the text continues "left out: …".
pub(super) fn exclusion(name: &str, bytes: u64) -> Option<&'static str> {
    let base = name.rsplit('/').next().unwrap_or(name);
    let lower = base.to_ascii_lowercase();
    let ext = lower.rsplit_once('.').map_or("", |(_, ext)| ext);
    if base.starts_with('.') {
        return Some("hidden file");
    }
    if !is_inner_path(name) {
        return Some("its name cannot be stored");
    }
    if is_weight_file(&lower) || lower.contains(".rad.") {
        return Some("weights or an artifact");
    }
    if is_index(&lower) {
        return Some("index of weight files, which the artifact does not have");
    }
    if QUANT_CONFIGS.contains(&lower.as_str()) {
        return Some("quantization of the source, which would contradict the artifact's");
    }
    if [
        "png", "jpg", "jpeg", "gif", "svg", "webp", "avif", "bmp", "ico", "pdf", "mp4", "mov",
        "webm", "mp3", "wav",
    ]
    .contains(&ext)
    {
        return Some("picture or recording of the model's page");
    }
    if ["zip", "tar", "gz", "tgz", "xz", "zst", "7z", "bz2", "rar"].contains(&ext) {
        return Some("archive");
    }
    if ["lock", "tmp", "incomplete", "part", "swp", "bak", "orig", "log", "pyc"].contains(&ext)
        || lower.ends_with('~')
        || lower == "trainer_state.json"
        || lower.starts_with("events.out.tfevents")
    {
        return Some("leftover of a program, not of the model");
    }
    if bytes > MAX_SIDE_FILE_BYTES {
        return Some("larger than the 64 MiB a side file may have");
    }
    None
}

/// Whether the user should be told: a file that looks as if it belonged to the model.
pub(super) fn worth_a_note(name: &str, bytes: u64) -> bool {
    bytes > MAX_SIDE_FILE_BYTES && !is_weight_file(name) && !name.starts_with('.')
}

/// A file that goes into the artifact byte for byte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SideFile {
    /// Name within the checkpoint, with `/`.
    pub path: String,
    /// Its length.
    pub bytes: u64,
}

/// A file of the folder that does not go into the artifact.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    /// Name within the checkpoint, with `/`.
    pub path: String,
    /// Why.
    pub reason: &'static str,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_files_of_a_model_are_taken_whatever_their_names() {
        for name in [
            "config.json",
            "tokenizer.model",
            "preprocessor_config.json",
            "some_future_processor.json",
            "chat_template.jinja",
            "additional_chat_templates/tools.jinja",
            "merges.txt",
            "LICENSE",
            "README.md",
            "modeling_custom.py",
        ] {
            assert_eq!(exclusion(name, 10), None, "{name}");
        }
    }

    #[test]
    fn what_is_left_out_has_a_reason() {
        let cases = [
            (".gitattributes", "hidden file"),
            ("model.safetensors", "weights or an artifact"),
            ("pytorch_model.bin", "weights or an artifact"),
            ("old.rad", "weights or an artifact"),
            ("old.rad.partial", "weights or an artifact"),
            (
                "model.safetensors.index.json",
                "index of weight files, which the artifact does not have",
            ),
            (
                "pytorch_model.bin.index.json",
                "index of weight files, which the artifact does not have",
            ),
            (
                "hf_quant_config.json",
                "quantization of the source, which would contradict the artifact's",
            ),
            ("banner.PNG", "picture or recording of the model's page"),
            ("x.zip", "archive"),
            ("trainer_state.json", "leftover of a program, not of the model"),
            ("a\nb", "its name cannot be stored"),
        ];
        for (name, reason) in cases {
            assert_eq!(exclusion(name, 10), Some(reason), "{name}");
        }
        assert_eq!(exclusion("big.json", MAX_SIDE_FILE_BYTES), None);
        let too_large = exclusion("big.json", MAX_SIDE_FILE_BYTES + 1);
        assert_eq!(too_large, Some("larger than the 64 MiB a side file may have"));
        assert!(worth_a_note("big.json", MAX_SIDE_FILE_BYTES + 1));
    }
}
