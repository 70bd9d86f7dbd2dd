//! Opening a source: which files count, what is refused, and that all problems are told at once.

mod checkpoint_support;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use checkpoint_support::{Model, SHARDS, counting, file, open, problems, raw};
use radpack::checkpoint::{Checkpoint, OpenOptions};
use radpack::diag::FailureKind;

const LFS: &[u8] =
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n";

fn names(checkpoint: &Checkpoint) -> Vec<&str> {
    checkpoint.tensors().keys().map(String::as_str).collect()
}

fn weight_files(checkpoint: &Checkpoint) -> Vec<&str> {
    checkpoint.weight_files().map(|(name, _)| name).collect()
}

// ---- which files count ----

#[test]
fn a_folder_a_file_and_an_index_all_open() {
    let model = Model::sharded();
    let checkpoint = model.opened();
    assert_eq!(names(&checkpoint), ["a", "b", "c"]);
    assert_eq!(weight_files(&checkpoint), SHARDS);
    assert!(checkpoint.notes().is_empty());

    let index = open(&model.at("model.safetensors.index.json")).expect("opened");
    assert_eq!(names(&index), ["a", "b", "c"]);

    let one = open(&model.at(SHARDS[1])).expect("opened");
    assert_eq!(names(&one), ["c"]);
    assert_eq!(
        one.notes()[0].message,
        format!("ignored, not the file that was asked for: {}", SHARDS[0])
    );
    assert!(one.config().is_some(), "the config beside it comes along");
}

#[test]
fn a_single_file_without_a_config_beside_it_brings_nothing_else_along() {
    let model = Model::small();
    model.remove("config.json");
    model.put("notes.txt", b"mine");
    let checkpoint = open(&model.at("model.safetensors")).expect("opened");
    assert_eq!(names(&checkpoint), ["a", "b"]);
    assert_eq!(checkpoint.side_files(), []);
    assert_eq!(checkpoint.display_name(), "model");
    let files: Vec<&str> = checkpoint.files().iter().map(|f| f.path.as_str()).collect();
    assert_eq!(files, ["model.safetensors"]);
}

#[test]
fn files_that_the_index_does_not_name_are_ignored_with_a_note() {
    let model = Model::sharded();
    // Another name for the same weights, as Mistral ships them.
    model.put("consolidated.safetensors", &file(&[counting("tok_embeddings.weight", &[2, 3], 0)]));
    assert_eq!(names(&model.opened()), ["a", "b", "c"]);
    assert_eq!(
        model.notes(),
        ["ignored, model.safetensors.index.json does not name: consolidated.safetensors"]
    );
    let checkpoint = model.opened();
    assert!(checkpoint.files().iter().all(|f| f.path != "consolidated.safetensors"));
}

#[test]
fn two_layouts_without_an_index_are_refused_with_both_names() {
    let model = Model::small();
    model.put("consolidated.safetensors", &file(&[counting("a", &[2, 3], 0)]));
    assert_eq!(
        model.problems(),
        [
            "DIR has the weights in two layouts, consolidated.safetensors and model.safetensors, and no index to say \
          which counts"
        ]
    );
    assert_eq!(model.open().expect_err("refused").kind, FailureKind::Refused);
    // The way out that the message names.
    assert_eq!(names(&open(&model.at("model.safetensors")).expect("opened")), ["a", "b"]);
}

#[test]
fn shards_without_an_index_count_when_their_numbering_is_complete() {
    let model = Model::sharded();
    model.remove("model.safetensors.index.json");
    assert_eq!(names(&model.opened()), ["a", "b", "c"]);
    assert_eq!(model.notes(), ["no index; the numbering of 2 shards decides"]);
    model.remove(SHARDS[0]);
    model.put("model-00002-of-00003.safetensors", &file(&[]));
    model.remove(SHARDS[1]);
    assert_eq!(model.problems(), ["DIR has 1 of 3 shards; missing: number 1 and 3"]);
}

#[test]
fn slashes_and_dots_in_the_path_change_nothing() {
    let model = Model::sharded();
    let plain = model.opened();
    let base = model.path().display().to_string();
    let name = model.path().file_name().expect("a name").to_string_lossy().into_owned();
    for path in
        [format!("{base}/"), format!("{base}//"), format!("{base}/."), format!("{base}/../{name}/")]
    {
        let other = open(Path::new(&path)).expect("opened");
        assert_eq!(other.display_name(), name, "{path}");
        assert_eq!(other.files(), plain.files(), "{path}");
        assert_eq!(other.side_files(), plain.side_files());
    }
}

#[test]
fn a_config_is_optional_here_and_its_keys_are_reached_by_path() {
    let model = Model::small();
    model.put("config.json", br#"{"text_config": {"hidden_size": 64}, "x": null}"#);
    model.put("generation_config.json", br#"{"eos_token_id": 1}"#);
    let checkpoint = model.opened();
    let config = checkpoint.config().expect("present");
    assert_eq!(config.get(&["text_config", "hidden_size"]), Some(&64.into()));
    assert_eq!(config.get(&["x"]), None);
    assert_eq!(config.path, "config.json");
    assert_eq!(
        checkpoint.generation_config().expect("present").get(&["eos_token_id"]),
        Some(&1.into())
    );
    assert_eq!(checkpoint.preprocessor_config(), None);
    model.remove("config.json");
    assert_eq!(model.opened().config(), None);
}

#[test]
fn a_byte_order_mark_is_noted() {
    let model = Model::small();
    model.put("config.json", b"\xef\xbb\xbf{}");
    let note = format!(
        "{} starts with a byte order mark, which is skipped",
        model.at("config.json").display()
    );
    assert_eq!(model.notes(), [note]);
}

// ---- faults of shards and index ----

#[test]
fn every_problem_of_index_and_shards_is_told_at_once() {
    let model = Model::new();
    model.put("config.json", b"{\"a\": 1, \"a\": 2}");
    model.put("s1.safetensors", &file(&[counting("a", &[1], 0), counting("extra", &[1], 0)]));
    model.put("s2.safetensors", &file(&[counting("b", &[1], 0), counting("a", &[1], 0)]));
    let cut = file(&[counting("d", &[4], 0)]);
    model.put("s3.safetensors", &cut[..cut.len() - 2]);
    model.put("s4.safetensors", LFS);
    model.index(&[
        ("a", "s1.safetensors"),
        ("b", "s1.safetensors"),
        ("c", "s2.safetensors"),
        ("d", "s3.safetensors"),
        ("e", "s4.safetensors"),
        ("f", "s5.safetensors"),
    ]);
    let (n, m) = (cut.len(), cut.len() - 2);
    assert_eq!(
        model.problems(),
        [
            "DIR/config.json: key `a` given twice".to_owned(),
            format!("DIR/s3.safetensors: truncated: the header promises {n} bytes, the file has {m}"),
            "DIR/s4.safetensors is a Git LFS pointer, not the file itself; it promises 4.63 GiB (4,976,698,672 bytes)"
                .to_owned(),
            "1 of 5 shards that the index names do not exist, file s5.safetensors".to_owned(),
            "duplicate 1 tensor: in s1.safetensors and in s2.safetensors: `a`".to_owned(),
            "s2.safetensors lacks 1 tensor that model.safetensors.index.json places there: `c`".to_owned(),
            "model.safetensors.index.json places 1 tensor in s1.safetensors, but s2.safetensors holds it: `b`"
                .to_owned(),
            "s1.safetensors holds 1 tensor that model.safetensors.index.json does not list: `extra`".to_owned(),
        ]
    );
    let failure = model.open().expect_err("refused");
    assert_eq!(failure.kind, FailureKind::Refused);
    assert!(failure.to_string().contains("= run `git lfs pull` in the folder"));
}

#[test]
fn duplicate_tensors_of_shards_without_an_index_name_both_files() {
    let model = Model::new();
    model.put(SHARDS[0], &file(&[counting("a", &[1], 0), counting("b", &[1], 0)]));
    model.put(SHARDS[1], &file(&[counting("a", &[1], 0), counting("b", &[1], 0)]));
    assert_eq!(
        model.problems(),
        [format!("duplicate 2 tensors: in {} and in {}: `a` and `b`", SHARDS[0], SHARDS[1])]
    );
}

#[test]
fn an_index_may_not_lead_out_of_the_folder() {
    let model = Model::small();
    for shard in
        ["../model.safetensors", "/model.safetensors", "a/../../x.safetensors", "model.bin"]
    {
        model.index(&[("a", shard)]);
        assert_eq!(
            model.problems(),
            [format!(
                "DIR/model.safetensors.index.json places tensor `a` in `{shard}`, which is no safetensors file within \
                 the folder"
            )]
        );
    }
    model.put("model.safetensors.index.json", br#"{"weight_map": {"a": 3}}"#);
    assert!(model.problems()[0].contains("places tensor `a` in `3`"));
    model.put("model.safetensors.index.json", br#"{"metadata": {}}"#);
    assert_eq!(
        model.problems(),
        ["DIR/model.safetensors.index.json has no weight_map from tensor names to files"]
    );
    model.put(
        "model.safetensors.index.json",
        br#"{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}"#,
    );
    assert_eq!(model.problems(), ["DIR/model.safetensors.index.json: key `a` given twice"]);
    model.put("model.safetensors.index.json", br#"{"weight_map": {}}"#);
    assert_eq!(model.problems(), ["DIR/model.safetensors.index.json lists no tensors"]);
}

#[test]
fn a_duplicate_name_in_a_header_names_file_and_tensor() {
    let model = Model::new();
    let entry = r#""w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    model.put("model.safetensors", &raw(&format!("{{{entry},{entry}}}"), &[0]));
    assert_eq!(model.problems(), ["DIR/model.safetensors: duplicate tensor name `w`"]);
}

#[test]
fn broken_and_oversized_configs_are_located() {
    let model = Model::small();
    model.put("config.json", b"{\n  \"hidden_size\": 64,\n}");
    let text = model.open().expect_err("refused").to_string();
    assert!(text.contains("trailing comma"), "{text}");
    assert!(text.contains("config.json:3:1"), "{text}");
    fs::File::create(model.at("config.json"))
        .expect("created")
        .set_len((16 << 20) + 1)
        .expect("sized");
    assert_eq!(
        model.problems(),
        ["DIR/config.json has 16.00 MiB, more than the 16.00 MiB such a file may have"]
    );
    model.put("config.json", LFS);
    assert_eq!(
        model.problems(),
        [
            "DIR/config.json is a Git LFS pointer, not the file itself; it promises 4.63 GiB (4,976,698,672 bytes)"
        ]
    );
}

#[test]
fn a_config_that_cannot_be_read_is_told_once() {
    let model = Model::small();
    model.remove("config.json");
    symlink("nowhere", model.at("config.json")).expect("linked");
    assert_eq!(
        model.problems(),
        ["DIR/config.json is a symbolic link to nowhere, which does not exist"]
    );
}

// ---- sources of other kinds ----

#[test]
fn an_adapter_is_told_with_its_base_model() {
    let model = Model::new();
    model.put(
        "adapter_config.json",
        br#"{"base_model_name_or_path": "google/gemma-3-1b-it", "peft_type": "LORA"}"#,
    );
    model.put("adapter_model.safetensors", &file(&[counting("lora_A", &[1], 0)]));
    let expected = ["DIR is a LoRA adapter of google/gemma-3-1b-it: merge first"];
    assert_eq!(model.problems(), expected);
    let one = open(&model.at("adapter_model.safetensors")).expect_err("refused");
    assert_eq!(problems(&one, model.path()), expected);
    assert_eq!(one.kind, FailureKind::Refused);
    assert!(one.problems[0].help[0].contains("merge_and_unload"));

    let bin = Model::new();
    bin.put("adapter_config.json", br#"{"peft_type": "IA3"}"#);
    bin.put("adapter_model.bin", b"x");
    assert_eq!(bin.problems(), ["DIR is a IA3 adapter of an unnamed model: merge first"]);
}

#[test]
fn a_model_with_an_adapter_beside_it_is_read_without_the_adapter() {
    let model = Model::small();
    model.put("adapter_config.json", b"{}");
    model.put("adapter_model.safetensors", &file(&[counting("lora_A", &[1], 0)]));
    assert_eq!(names(&model.opened()), ["a", "b"]);
    assert_eq!(
        model.notes(),
        ["ignored, an adapter is no part of the model: adapter_model.safetensors"]
    );
}

#[test]
fn other_formats_are_refused_by_name() {
    let model = Model::new();
    model.put("config.json", b"{}");
    model.put("pytorch_model.bin", b"PK\x03\x04");
    assert_eq!(
        model.problems(),
        ["DIR holds only PyTorch pickles (pytorch_model.bin); radpack reads safetensors and GGUF"]
    );
    let file = open(&model.at("pytorch_model.bin")).expect_err("refused");
    assert_eq!(
        problems(&file, model.path()),
        [
            "DIR/pytorch_model.bin is no safetensors or GGUF file (a zip archive (PyTorch saves .bin and .pt files so))"
        ]
    );
    let config = open(&model.at("config.json")).expect_err("refused");
    assert_eq!(problems(&config, model.path()), ["DIR/config.json is no weight file"]);
    let gguf = Model::new();
    gguf.put("m-q4.gguf", b"GGUF");
    assert_eq!(
        gguf.problems(),
        ["DIR/m-q4.gguf: truncated: the version at byte 4 takes 4 bytes, the file has 0 more"]
    );
    assert_eq!(
        Model::new().problems(),
        ["DIR has no weights (*.safetensors, *.gguf); it holds no files"]
    );
}

#[test]
fn a_source_that_does_not_exist_is_a_usage_error_with_a_suggestion() {
    let model = Model::small();
    let failure = open(&model.at("model.safetensor")).expect_err("missing");
    assert_eq!(failure.kind, FailureKind::Usage);
    assert_eq!(problems(&failure, model.path()), ["DIR/model.safetensor does not exist"]);
    assert_eq!(failure.problems[0].help, ["there is model.safetensors"]);
    let failure = open(Path::new("/nonexistent/a/b/c")).expect_err("missing");
    assert!(failure.problems[0].help[0].starts_with("a source is a folder"));
}

#[cfg(not(feature = "hub"))]
#[test]
fn a_hub_id_without_the_hub_feature_says_how_to_go_on() {
    let failure = open(Path::new("google/gemma-3-1b-it")).expect_err("no hub");
    assert_eq!(failure.kind, FailureKind::Usage);
    assert_eq!(
        failure.problems[0].help[0],
        "download it: hf download google/gemma-3-1b-it --local-dir gemma-3-1b-it"
    );
}

// ---- links ----

/// A hub cache of the small model: `models--org--tiny/snapshots/REV` with links into `blobs`.
fn cache() -> (Model, std::path::PathBuf) {
    let cache = Model::new();
    let weights = file(&[counting("a", &[2, 3], 0)]);
    cache.put("models--org--tiny/blobs/c0ffee", &weights);
    cache.put("models--org--tiny/blobs/beef", b"{}");
    let snapshot = cache.at("models--org--tiny/snapshots/0123456789012345678901234567890123456789");
    fs::create_dir_all(&snapshot).expect("created");
    symlink("../../blobs/c0ffee", snapshot.join("model.safetensors")).expect("linked");
    symlink("../../blobs/beef", snapshot.join("config.json")).expect("linked");
    (cache, snapshot)
}

#[test]
fn a_snapshot_of_the_hub_cache_opens_through_its_links() {
    let (cache, snapshot) = cache();
    let checkpoint = open(&snapshot).expect("opened");
    assert_eq!(names(&checkpoint), ["a"]);
    assert_eq!(checkpoint.display_name(), "tiny");
    let files: Vec<&str> = checkpoint.files().iter().map(|f| f.path.as_str()).collect();
    assert_eq!(files, ["config.json", "model.safetensors"]);
    assert_eq!(names(&open(&snapshot.join("model.safetensors")).expect("opened")), ["a"]);
    // The folder itself may be reached through a link.
    let link = cache.at("link");
    symlink(&snapshot, &link).expect("linked");
    assert_eq!(open(&link).expect("opened").display_name(), "tiny");
}

#[test]
fn the_model_folder_of_a_cache_points_at_its_snapshots() {
    let (cache, snapshot) = cache();
    let folder = cache.at("models--org--tiny");
    let failure = open(&folder).expect_err("refused");
    assert_eq!(
        problems(&failure, &folder),
        ["DIR has no weights (*.safetensors, *.gguf); it holds no files"]
    );
    assert_eq!(
        failure.problems[0].help[1],
        format!("this is a model's folder in a hub cache; pass {}", snapshot.display())
    );
}

#[test]
fn a_name_that_is_not_utf8_is_left_out_with_a_note() {
    use std::os::unix::ffi::OsStrExt;
    let model = Model::small();
    let odd = std::ffi::OsStr::from_bytes(b"caf\xe9.txt");
    fs::write(model.path().join(odd), b"x").expect("written");
    assert_eq!(model.notes(), ["left out, the names are not UTF-8: caf\u{fffd}.txt"]);
}

#[test]
fn an_unfinished_download_is_told_by_its_dangling_link() {
    let (cache, snapshot) = cache();
    cache.remove("models--org--tiny/blobs/c0ffee");
    let failure = open(&snapshot).expect_err("refused");
    assert_eq!(
        problems(&failure, &snapshot),
        ["DIR/model.safetensors is a symbolic link to ../../blobs/c0ffee, which does not exist"]
    );
    assert_eq!(failure.problems[0].help, ["the download did not finish: download the model again"]);
}

#[test]
fn links_out_of_the_model_folder_are_refused_with_the_policy() {
    let outside = Model::new();
    outside.put("secret.json", b"{}");
    outside.put("w.safetensors", &file(&[]));
    let model = Model::new();
    symlink(outside.at("w.safetensors"), model.at("model.safetensors")).expect("linked");
    symlink(outside.at("secret.json"), model.at("extra.json")).expect("linked");
    // Not needed, so not judged.
    symlink(outside.at("secret.json"), model.at("banner.png")).expect("linked");
    let at = fs::canonicalize(outside.path()).expect("a path").display().to_string();
    let zone = fs::canonicalize(model.path()).expect("a path").display().to_string();
    let failure = model.open().expect_err("refused");
    let shown = model.path().display();
    let messages: Vec<&str> = failure.problems.iter().map(|p| p.message.as_str()).collect();
    assert_eq!(
        messages,
        [
            format!(
                "{shown}/model.safetensors is a symbolic link to {at}/w.safetensors, outside {zone}"
            ),
            format!("{shown}/extra.json is a symbolic link to {at}/secret.json, outside {zone}"),
        ]
    );
    assert!(failure.problems[0].help[0].starts_with("links may point into the model's own folder"));
    // A cache's links may reach its blobs, and no other model's.
    let (cache, snapshot) = cache();
    cache.put("models--org--other/blobs/1", b"{}");
    symlink("../../../models--org--other/blobs/1", snapshot.join("x.json")).expect("linked");
    assert_eq!(open(&snapshot).expect_err("refused").problems.len(), 1);
}

#[test]
fn links_within_the_model_folder_are_followed() {
    let model = Model::small();
    fs::create_dir(model.at("store")).expect("created");
    fs::rename(model.at("model.safetensors"), model.at("store/w")).expect("moved");
    symlink("store/w", model.at("model.safetensors")).expect("linked");
    assert_eq!(names(&model.opened()), ["a", "b"]);
}

#[test]
fn a_pipe_in_place_of_weights_is_refused_without_waiting() {
    let model = Model::new();
    let path = std::ffi::CString::new(model.at("model.safetensors").display().to_string())
        .expect("a path");
    // SAFETY: the path is a valid C string.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    assert_eq!(model.problems(), ["DIR/model.safetensors is no regular file"]);
    let failure = open(&model.at("model.safetensors")).expect_err("refused");
    assert!(failure.headline.ends_with("is neither a file nor a folder"), "{}", failure.headline);
}

#[test]
fn a_file_that_the_system_refuses_is_a_failure_and_not_a_refusal() {
    // Root reads everything, so the test needs another reason than permissions: a loop of links.
    let model = Model::small();
    symlink("loop.json", model.at("loop.json")).expect("linked");
    let failure = model.open().expect_err("failed");
    assert_eq!(failure.kind, FailureKind::Failed);
    assert!(failure.problems[0].message.starts_with("cannot read "), "{failure}");
}

// ---- quantized sources ----

#[test]
fn a_quantized_source_opens_and_is_refused_on_request() {
    let model = Model::small();
    assert_eq!(model.opened().quantized(), None);
    assert!(model.opened().refuse_quantized().is_ok());
    model.put("config.json", br#"{"quantization_config": {"quant_method": "gptq", "bits": 4}}"#);
    let failure = model.opened().refuse_quantized().expect_err("refused");
    assert_eq!(failure.kind, FailureKind::Refused);
    assert_eq!(failure.headline, "the quantization of this checkpoint (gptq) cannot be read");
    assert_eq!(
        failure.problems[0].message,
        "config.json has quantization_config, and no tensor is quantized"
    );

    let bare = Model::new();
    bare.put(
        "model.safetensors",
        &file(&[counting("l.0.down_proj.SCB", &[1], 0), counting("l.0.down_proj.weight", &[1], 0)]),
    );
    let opened = bare.opened();
    let found = opened.quantized().expect("recognised by its tensors");
    assert_eq!(found.method, "bitsandbytes int8");
    assert_eq!(found.evidence, "1 tensor ends in .SCB, e.g. `l.0.down_proj.SCB`");

    let modelopt = Model::small();
    modelopt.put("hf_quant_config.json", br#"{"quantization": {"quant_algo": "NVFP4"}}"#);
    assert_eq!(modelopt.opened().quantized().expect("recognised").method, "modelopt (NVFP4)");
}

// ---- tokenizer ----

#[test]
fn a_folder_without_a_tokenizer_lists_what_was_looked_for() {
    let model = Model::small();
    let report = model.opened().check_tokenizer(Some(10), true);
    assert_eq!(
        report.problems[0].message.replace(&model.path().display().to_string(), "DIR"),
        "DIR has no tokenizer; looked for tokenizer.json, tokenizer.model, vocab.json, vocab.txt, spiece.model, \
         sentencepiece.bpe.model, tekken.json, tiktoken.model and qwen.tiktoken"
    );
    assert_eq!(report.problems[0].help[1], "or go on without: --no-tokenizer");
    assert_eq!(model.opened().check_tokenizer(Some(10), false).problems, []);
}

#[test]
fn an_added_token_past_the_embedding_is_named_with_its_id() {
    let model = Model::small();
    model.put("tokenizer.json", br#"{"model": {"vocab": {"x": 31999}}, "added_tokens": []}"#);
    model.put("added_tokens.json", br#"{"[PAD]": 32000}"#);
    let checkpoint = model.opened();
    let report = checkpoint.check_tokenizer(Some(32000), true);
    assert_eq!(report.files, ["tokenizer.json"]);
    assert_eq!(
        report.problems[0].message,
        "token `[PAD]` has id 32,000, and the embedding has 32,000 rows (ids 0 to 31,999)"
    );
    assert_eq!(checkpoint.check_tokenizer(Some(32001), true).problems, []);
    let unjudged = checkpoint.check_tokenizer(None, true);
    assert_eq!((unjudged.problems.len(), unjudged.highest), (0, Some((32000, "[PAD]".to_owned()))));
    model.put("tokenizer.json", b"{");
    let broken = model.opened().check_tokenizer(Some(32001), true);
    assert!(broken.problems[0].message.contains("tokenizer.json: EOF while parsing"));
}

#[test]
fn open_options_print_without_their_token() {
    let options = OpenOptions {
        hub: Some(radpack::checkpoint::HubEnvironment {
            token: Some("hf_secret".into()),
            ..Default::default()
        }),
        ..Default::default()
    };
    assert!(!format!("{options:?}").contains("hf_secret"));
}
