//! Models on the hub, against a small hub on 127.0.0.1.
#![cfg(feature = "hub")]

mod checkpoint_support;
mod hub_support;
mod published_support;

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use checkpoint_support::{SHARDS, counting, file};
use hub_support::{
    Answer, Body, COMMIT, MockHub, Ranges, answers, environment, hub_of, open, open_as, repository,
    run,
};
use radpack::checkpoint::{Checkpoint, Extent, HubEnvironment, OpenOptions, Transfer};
use radpack::diag::FailureKind;

#[test]
fn a_model_is_fetched_with_what_a_conversion_needs_and_opened() {
    let hub = MockHub::start(answers(&repository()));
    let cache = tempfile::tempdir().expect("a folder");
    let told: Arc<Mutex<Vec<Transfer>>> = Arc::default();
    let listener = Arc::clone(&told);
    let options = OpenOptions {
        hub: Some(environment(&hub, cache.path())),
        on_transfer: Some(Arc::new(move |t| listener.lock().expect("lock").push(t))),
        extent: Extent::Everything,
    };
    let checkpoint =
        Checkpoint::open(Path::new("org/tiny"), &options).unwrap_or_else(|f| panic!("{f}"));
    assert_eq!(checkpoint.display_name(), "tiny");
    let identity = checkpoint.hub().expect("from the hub");
    assert_eq!((identity.repo.as_str(), identity.commit.as_str()), ("org/tiny", COMMIT));
    let tensors: Vec<&str> = checkpoint.tensors().keys().map(String::as_str).collect();
    assert_eq!(tensors, ["a", "b"]);
    let needed = [
        "LICENSE",
        "additional_chat_templates/rag.jinja",
        "config.json",
        SHARDS[0],
        SHARDS[1],
        "model.safetensors.index.json",
        "tokenizer.json",
    ];
    assert_eq!(hub.fetched(), needed);
    let files: Vec<&str> = checkpoint.files().iter().map(|f| f.path.as_str()).collect();
    assert_eq!(files, needed);
    assert!(hub.log().contains(&"token bearer hf_test".to_owned()));
    let shard = file(&[counting("a", &[2], 1)]).len() as u64;
    let told = told.lock().expect("lock");
    let ended = |event: &&Transfer| matches!(event, Transfer::Bytes { file, done, of, .. } if file == SHARDS[0] && (*done, *of) == (shard, shard));
    assert_eq!(told.iter().filter(ended).count(), 1);
    // One download; the index, which says what is needed, was there by then.
    let begun = |event: &Transfer| match event {
        Transfer::Begun { model, files, .. } => Some((model.clone(), *files)),
        _ => None,
    };
    let begun: Vec<_> = told.iter().filter_map(begun).collect();
    assert_eq!(begun, [("org/tiny".to_owned(), needed.len() - 1)]);

    // The second time nothing is fetched again.
    let before = hub.fetched().len();
    let gets = hub.log().iter().filter(|l| l.starts_with("GET /org/")).count();
    open("org/tiny", environment(&hub, cache.path())).unwrap_or_else(|f| panic!("{f}"));
    assert_eq!(hub.fetched().len(), before);
    assert_eq!(hub.log().iter().filter(|l| l.starts_with("GET /org/")).count(), gets);

    // Offline, by branch and by commit, from the cache alone.
    let requests = hub.log().len();
    let offline = HubEnvironment { offline: true, ..environment(&hub, cache.path()) };
    for id in ["org/tiny".to_owned(), format!("org/tiny@{COMMIT}")] {
        let checkpoint = open(&id, offline.clone()).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(checkpoint.hub(), Some(identity), "{id}");
    }
    assert_eq!(hub.log().len(), requests);
}

#[test]
fn offline_without_a_cached_snapshot_names_the_command_that_fetches_it() {
    let hub = MockHub::start(BTreeMap::new());
    let cache = tempfile::tempdir().expect("a folder");
    let offline = HubEnvironment { offline: true, ..environment(&hub, cache.path()) };
    let failure = open("org/tiny@v1", offline).expect_err("not cached");
    assert_eq!(
        failure.headline,
        "org/tiny@v1 is not in the cache, and HF_HUB_OFFLINE forbids to fetch it"
    );
    assert_eq!(
        failure.problems[0].help[0],
        "fetch it on a machine with network: hf download org/tiny --revision v1"
    );
    assert!(hub.log().is_empty());
}

#[test]
fn a_missing_model_and_a_missing_revision_are_told_apart() {
    let table = BTreeMap::from([
        (
            "/api/models/org/tiny/revision/main".to_owned(),
            Answer::error("404 Not Found", "RepoNotFound", "Repository not found"),
        ),
        (
            "/api/models/org/tiny/revision/v9".to_owned(),
            Answer::error("404 Not Found", "RevisionNotFound", "Invalid rev id: v9"),
        ),
        (
            "/api/models/org/secret/revision/main".to_owned(),
            Answer::error("401 Unauthorized", "RepoNotFound", "Invalid username or password."),
        ),
    ]);
    let hub = MockHub::start(table);
    let cache = tempfile::tempdir().expect("a folder");
    let failure = open("org/tiny", environment(&hub, cache.path())).expect_err("missing");
    assert_eq!(failure.kind, FailureKind::Usage);
    assert_eq!(
        failure.problems[0].message,
        "the hub has no model org/tiny (the hub says: Repository not found)"
    );
    let failure = open("org/tiny@v9", environment(&hub, cache.path())).expect_err("missing");
    assert_eq!(
        failure.problems[0].message,
        "org/tiny has no revision v9 (the hub says: Invalid rev id: v9)"
    );
    let failure = open("org/secret", environment(&hub, cache.path())).expect_err("missing");
    assert_eq!(
        failure.problems[0].message,
        "org/secret does not exist, or it is private (the hub says: Invalid username or password.)"
    );
    assert!(!failure.to_string().contains("hf_test"));
}

#[test]
fn a_gated_model_says_where_its_terms_are_and_how_to_log_in() {
    let mut table = answers(&repository());
    let gated =
        Answer::error("401 Unauthorized", "GatedRepo", "Access to model org/tiny is restricted.");
    for (path, answer) in &mut table {
        if path.contains("/resolve/") {
            *answer = gated.clone();
        }
    }
    let hub = MockHub::start(table);
    let cache = tempfile::tempdir().expect("a folder");
    let failure = open("org/tiny", environment(&hub, cache.path())).expect_err("gated");
    assert_eq!(failure.kind, FailureKind::Failed);
    assert_eq!(
        failure.problems[0].message,
        "org/tiny is gated (the hub says: Access to model org/tiny is restricted.)"
    );
    assert_eq!(
        failure.problems[0].help,
        [
            format!("accept its terms on {}/org/tiny", hub.address),
            "the token in use was not accepted: hf auth login, or another HF_TOKEN".to_owned(),
        ]
    );
}

#[test]
fn a_model_without_safetensors_is_refused_before_any_download() {
    let files = BTreeMap::from([
        ("config.json", b"{}".to_vec()),
        ("pytorch_model.bin", b"pickle".to_vec()),
    ]);
    let hub = MockHub::start(answers(&files));
    let cache = tempfile::tempdir().expect("a folder");
    let failure = open("org/tiny", environment(&hub, cache.path())).expect_err("refused");
    assert_eq!(failure.kind, FailureKind::Refused);
    assert_eq!(
        failure.problems[0].message,
        "org/tiny holds only PyTorch pickles (pytorch_model.bin); radpack reads safetensors and GGUF"
    );
    assert!(hub.fetched().is_empty());
}

#[test]
fn a_file_of_the_wrong_length_is_told_and_fetched_again_next_time() {
    let files = repository();
    let mut table = answers(&files);
    let path = format!("/org/tiny/resolve/{COMMIT}/LICENSE");
    table.get_mut(&path).expect("served").body = Body::Bytes(b"Internal Server Error".to_vec());
    let hub = MockHub::start(table);
    let cache = tempfile::tempdir().expect("a folder");
    let failure = open("org/tiny", environment(&hub, cache.path())).expect_err("wrong length");
    assert_eq!(failure.headline, "org/tiny did not arrive whole");
    assert_eq!(
        failure.problems[0].message,
        "LICENSE: more than the 4 bytes came that the hub lists"
    );
    let sound = MockHub::start(answers(&files));
    open("org/tiny", environment(&sound, cache.path())).unwrap_or_else(|f| panic!("{f}"));
    // What was there is not fetched again, and nothing was taken for the file.
    assert!(sound.fetched().contains(&"LICENSE".to_owned()), "{:?}", sound.fetched());
    let licence = cache.path().join(format!("models--org--tiny/snapshots/{COMMIT}/LICENSE"));
    assert_eq!(std::fs::read(licence).expect("fetched"), b"free");
}

#[test]
fn an_unreachable_hub_points_at_the_cache_if_it_holds_the_model() {
    let hub = MockHub::start(answers(&repository()));
    let cache = tempfile::tempdir().expect("a folder");
    open("org/tiny", environment(&hub, cache.path())).unwrap_or_else(|f| panic!("{f}"));
    // A port that was just free: nobody listens there.
    let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
    let gone = HubEnvironment {
        endpoint: Some(format!("http://{free}")),
        ..environment(&hub, cache.path())
    };
    let failure = open("org/tiny", gone).expect_err("unreachable");
    assert_eq!(failure.kind, FailureKind::Failed);
    let message = &failure.problems[0].message;
    assert!(message.starts_with(&format!("http://{free} cannot be reached: ")), "{message}");
    assert_eq!(failure.problems[0].help[0], "the cache has a snapshot: HF_HUB_OFFLINE=1 uses it");
}

#[test]
fn a_hub_that_names_paths_outside_the_cache_is_not_followed() {
    let mut files = repository();
    files.insert("../../evil.json", b"{}".to_vec());
    let hub = MockHub::start(answers(&files));
    let cache = tempfile::tempdir().expect("a folder");
    open("org/tiny", environment(&hub, cache.path())).unwrap_or_else(|f| panic!("{f}"));
    assert!(!hub.log().iter().any(|l| l.contains("evil")));
    let mut table = answers(&repository());
    let info = Answer::json(&serde_json::json!({"id": "org/tiny", "sha": "../../../evil"}));
    table.insert("/api/models/org/tiny/revision/main".to_owned(), info);
    let hub = MockHub::start(table);
    let failure = open("org/tiny", environment(&hub, cache.path())).expect_err("no commit");
    assert!(failure.problems[0].message.ends_with("the hub gives no commit for this revision"));
}

#[test]
fn an_estimate_from_the_hub_is_the_folders_and_fetches_a_thousandth_of_a_percent() {
    let tmp = tempfile::tempdir().expect("a folder");
    let folder = tmp.path().join("31B");
    published_support::sparse("gemma-4-31B", &folder);
    std::fs::write(folder.join("tokenizer.json"), vec![b' '; 1 << 20]).expect("written");
    let weights: u64 = std::fs::read_dir(&folder)
        .expect("a folder")
        .map(|e| e.expect("an entry"))
        .filter(|e| e.path().extension().is_some_and(|x| x == "safetensors"))
        .map(|e| e.metadata().expect("its length").len())
        .sum();
    assert!(weights > 62_000_000_000, "{weights}");
    let hub = hub_of(&folder, "", []);
    let estimate = ["--recipe", "gemma-4/rbln-w8a16-x16"];
    let (code, from_hub, err) =
        run(tmp.path(), &hub, &[&["estimate-kv", "org/tiny"], &estimate[..]].concat());
    assert_eq!(code, 0, "{err}");
    let (_, from_folder, _) =
        run(tmp.path(), &hub, &[&["estimate-kv", "31B"], &estimate[..]].concat());
    assert_eq!(from_hub, from_folder);
    assert!(from_hub.contains("36 blocks   589,824 tokens"), "{from_hub}");
    let sent = hub.sent.load(Ordering::Relaxed);
    println!("{sent} bytes for {weights} bytes of weights");
    assert!(sent < 1_200_000 && sent * 10_000 < weights, "{sent}");
    assert!(!hub.fetched().contains(&"tokenizer.json".to_owned()), "{:?}", hub.fetched());
    assert!(
        !tmp.path().join("cache").exists(),
        "an estimate leaves no part of a model in the cache"
    );

    // A plan needs side files too, and no weights either.
    let plan = ["convert", "org/tiny", "--recipe", "w8a16", "--dry-run", "--no-tokenizer"];
    std::fs::remove_file(folder.join("tokenizer.json")).expect("removed");
    let hub = hub_of(&folder, "", []);
    let (code, from_hub, err) = run(tmp.path(), &hub, &plan);
    assert_eq!(code, 0, "{err}");
    let (_, from_folder, _) = run(tmp.path(), &hub, &[&["convert", "31B"], &plan[2..]].concat());
    let rules = |text: &str| -> Vec<String> {
        text.lines().filter(|l| l.contains("GiB")).map(str::to_owned).collect()
    };
    assert!(rules(&from_hub).len() > 2, "{from_hub}");
    let sizes = |text: &str| {
        rules(text).iter().filter(|l| !l.contains("writes")).cloned().collect::<Vec<_>>()
    };
    assert_eq!(sizes(&from_hub), sizes(&from_folder));
    assert!(hub.sent.load(Ordering::Relaxed) < 1_200_000);
}

#[test]
fn headers_longer_than_the_first_request_are_fetched_to_their_end() {
    let tmp = tempfile::tempdir().expect("a folder");
    // 1,500 tensors have a header of more than 64 KiB.
    let names: Vec<String> = (0..1500).map(|i| format!("a.long.name.of.a.tensor.{i:04}")).collect();
    let tensors: Vec<_> = names.iter().map(|n| counting(n, &[64, 4], 0)).collect();
    let bytes = file(&tensors);
    std::fs::write(tmp.path().join("model.safetensors"), &bytes).expect("written");
    std::fs::write(tmp.path().join("config.json"), b"{}").expect("written");
    let hub = hub_of(tmp.path(), "", []);
    let cache = tempfile::tempdir().expect("a folder");
    let heads = open_as("org/tiny", environment(&hub, cache.path()), Extent::Configs)
        .unwrap_or_else(|f| panic!("{f}"));
    let whole =
        Checkpoint::open(tmp.path(), &OpenOptions::default()).unwrap_or_else(|f| panic!("{f}"));
    assert_eq!(heads.tensors(), whole.tensors());
    assert_eq!(heads.tensors().len(), 1500);
    assert_eq!((heads.display_name(), heads.headers_only()), ("tiny", true));
    assert!(!whole.headers_only());
    let header = u64::from_le_bytes(*bytes.first_chunk::<8>().expect("a length")) + 8;
    assert!(header > 65_536 && header < bytes.len() as u64 / 2);
    // The header, config.json, and a few hundred bytes of what the repository holds.
    let sent = hub.sent.load(Ordering::Relaxed);
    assert!((header + 2..header + 1000).contains(&sent), "{sent} for {header}");
}

#[test]
fn a_hub_that_sends_whole_files_or_too_little_is_refused() {
    let large = file(&[counting("a", &[64, 1024], 0)]);
    let files =
        BTreeMap::from([("config.json", b"{}".to_vec()), ("model.safetensors", large.clone())]);
    let shard = format!("/org/tiny/resolve/{COMMIT}/model.safetensors");
    let with = |ranges: Ranges| {
        let mut table = answers(&files);
        table.get_mut(&shard).expect("served").ranges = ranges;
        let hub = MockHub::start(table);
        let cache = tempfile::tempdir().expect("a folder");
        open_as("org/tiny", environment(&hub, cache.path()), Extent::Configs)
    };
    let opened = with(Ranges::Served).unwrap_or_else(|f| panic!("{f}"));
    // The values are not at hand, and reading them says so instead of giving zeros.
    assert_eq!(opened.tensors()["a"].shape.extents(), [64, 1024]);
    let failure = with(Ranges::Ignored).expect_err("a whole file");
    assert_eq!(failure.kind, FailureKind::Failed);
    let message = &failure.problems[0].message;
    assert!(
        message.starts_with("model.safetensors: more than the 65,536 bytes came that were asked for; http://127.0.0.1:")
            && message.ends_with(" does not serve parts of files"),
        "{message}"
    );
    assert!(failure.problems[0].help[0].starts_with("hf download org/tiny fetches all of it"));
    let failure = with(Ranges::Short).expect_err("too little");
    assert_eq!(failure.problems[0].message, "model.safetensors: 65,535 of 65,536 bytes arrived");
}

#[test]
fn headers_that_no_file_can_have_are_refused_without_being_fetched() {
    let cases: [(u64, &str); 3] = [
        (
            u64::MAX,
            "the header length says 18,446,744,073,709,551,615 bytes and the format allows 100,000,000",
        ),
        (99_999_999, "truncated: the header promises 100,000,007 bytes, the file has 200,000"),
        (150_000, "the header is wrong at byte 8"),
    ];
    for (promised, wanted) in cases {
        let mut bytes = promised.to_le_bytes().to_vec();
        bytes.resize(200_000, b'x');
        let files = BTreeMap::from([("config.json", b"{}".to_vec()), ("model.safetensors", bytes)]);
        let hub = MockHub::start(answers(&files));
        let cache = tempfile::tempdir().expect("a folder");
        let failure = open_as("org/tiny", environment(&hub, cache.path()), Extent::Configs)
            .expect_err("no header");
        assert_eq!(failure.kind, FailureKind::Refused);
        let message = &failure.problems[0].message;
        assert!(message.starts_with("org/tiny/model.safetensors: "), "{message}");
        assert!(message.contains(wanted), "{message}");
        let sent = hub.sent.load(Ordering::Relaxed);
        let fetched = if promised == 150_000 { 150_008 } else { 65_536 };
        assert!(sent < fetched + 2_000, "{promised}: {sent}");
    }
}

#[test]
fn a_complete_snapshot_in_the_cache_is_used_and_an_incomplete_one_is_not() {
    let hub = MockHub::start(answers(&repository()));
    let cache = tempfile::tempdir().expect("a folder");
    open("org/tiny", environment(&hub, cache.path())).unwrap_or_else(|f| panic!("{f}"));
    let gets = |hub: &MockHub| hub.log().iter().filter(|l| l.starts_with("GET /org/")).count();
    let before = gets(&hub);
    let opened = open_as("org/tiny", environment(&hub, cache.path()), Extent::Configs)
        .unwrap_or_else(|f| panic!("{f}"));
    assert!(!opened.headers_only());
    // Only the index is looked at again, which says what complete means.
    assert_eq!(gets(&hub) - before, 1);
    let shard = cache.path().join(format!("models--org--tiny/snapshots/{COMMIT}/{}", SHARDS[1]));
    std::fs::remove_file(shard).expect("removed");
    let opened = open_as("org/tiny", environment(&hub, cache.path()), Extent::Configs)
        .unwrap_or_else(|f| panic!("{f}"));
    // These shards are shorter than the first request, so their values came along.
    assert_eq!(opened.tensors().len(), 2);
}

#[test]
fn a_gguf_file_on_the_hub_is_not_planned_from_its_first_bytes() {
    let files = BTreeMap::from([("model-Q4_K_M.gguf", b"GGUF".to_vec())]);
    let hub = MockHub::start(answers(&files));
    let cache = tempfile::tempdir().expect("a folder");
    let failure =
        open_as("org/tiny", environment(&hub, cache.path()), Extent::Configs).expect_err("refused");
    assert_eq!(failure.kind, FailureKind::Refused);
    assert_eq!(
        failure.problems[0].message,
        "model-Q4_K_M.gguf is a GGUF file; they are read from the disk, whole"
    );
    assert!(hub.fetched().is_empty());
}

#[test]
fn a_quantized_model_is_estimated_from_its_headers_as_from_the_folder() {
    let tmp = tempfile::tempdir().expect("a folder");
    let model = testkit::fixtures().join("tiny-gemma4-dense");
    let model = model.to_str().expect("UTF-8");
    let none = MockHub::start(BTreeMap::new());
    // No rule, so every weight keeps its codes and scales.
    std::fs::write(tmp.path().join("keep.toml"), "schema = 1\nname = \"keep\"\n").expect("written");
    // Codes beside global scales, and codes in words beside a shape; both lie behind the first request's bytes.
    for (recipe, method) in [("nvfp4", "nvfp4-pack-quantized"), ("w4a16-g32", "pack-quantized")] {
        let file = format!("{recipe}.rad");
        let ok = |(code, _, err): (i32, String, String)| assert_eq!(code, 0, "{err}");
        ok(run(tmp.path(), &none, &["convert", model, "--recipe", recipe, "-o", &file]));
        let export = ["export", &file, "--format", "compressed-tensors", "-o", recipe];
        ok(run(tmp.path(), &none, &export));
        let folder = tmp.path().join(recipe);
        let config = std::fs::read_to_string(folder.join("config.json")).expect("a config");
        assert!(config.contains(method), "{config}");
        let hub = hub_of(&folder, "", []);
        let estimate = |source: &str| {
            let args = ["estimate-kv", source, "--recipe", "keep.toml", "--target", "cpu"];
            run(tmp.path(), &hub, &[&args[..], &["--layers"]].concat())
        };
        let (code, from_hub, err) = estimate("org/tiny");
        assert_eq!(code, 0, "{err}");
        assert_eq!(from_hub, estimate(recipe).1, "{recipe}");
        assert!(hub.log().iter().any(|l| l.ends_with("/model.safetensors")), "{:?}", hub.log());
        let whole = std::fs::metadata(folder.join("model.safetensors")).expect("weights").len();
        assert!(hub.sent.load(Ordering::Relaxed) < whole / 2, "{recipe}: of {whole}");
    }
}

#[test]
fn convert_validate_and_card_take_three_commands_and_the_file_works_without_its_source() {
    let tmp = tempfile::tempdir().expect("a folder");
    let folder = tmp.path().join("source");
    testkit::copy_folder(&testkit::fixtures().join("tiny-gemma4-dense"), &folder).expect("copied");
    let hub = hub_of(&folder, "", []);
    let succeeds = |args: &[&str]| {
        let (code, out, err) = run(tmp.path(), &hub, args);
        assert_eq!(code, 0, "{args:?}: {err}");
        out
    };
    succeeds(&["convert", "org/tiny", "--recipe", "w8a16", "-o", "model.rad"]);
    succeeds(&["validate", "model.rad"]);
    succeeds(&["card", "model.rad", "-o", "README.md"]);
    let card = std::fs::read_to_string(tmp.path().join("README.md")).expect("a card");
    assert!(card.contains("base_model: \"org/tiny\""), "{card}");
    let command = format!("org/tiny@{COMMIT} --recipe w8a16");
    assert!(card.contains(&format!("radpack convert {command} -o model.rad")), "{card}");
    // The command on the card, as a check: the same repository at the same commit gives the same bytes.
    let words: Vec<&str> = command.split(' ').collect();
    succeeds(&[&["convert"], &words[..], &["--check", "model.rad"]].concat());

    // Nothing of the source is left.
    std::fs::remove_dir_all(&folder).expect("removed");
    std::fs::remove_dir_all(tmp.path().join("cache")).expect("removed");
    let asked = hub.log().len();
    succeeds(&["validate", "model.rad", "--deep"]);
    let answer =
        succeeds(&["run", "model.rad", "--raw", "--prompt", "abc", "--max-tokens", "3", "--json"]);
    let answer: serde_json::Value = serde_json::from_str(&answer).expect("JSON");
    let tokens = answer["tokens"].as_array().expect("tokens").len();
    assert!((1..=3).contains(&tokens), "{answer}");
    assert_eq!(succeeds(&["card", "model.rad"]), card);
    assert_eq!(hub.log().len(), asked, "a finished file asks nobody");
}
