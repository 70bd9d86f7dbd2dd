//! Models on the hub, against a small hub on 127.0.0.1.
#![cfg(feature = "hub")]

mod checkpoint_support;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use checkpoint_support::{SHARDS, counting, file};
use radpack::checkpoint::{Checkpoint, HubEnvironment, OpenOptions, Transfer};
use radpack::diag::{Failure, FailureKind};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What the hub answers for one path.
#[derive(Clone)]
struct Answer {
    status: &'static str,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

impl Answer {
    fn json(value: &serde_json::Value) -> Answer {
        Answer {
            status: "200 OK",
            headers: vec![("Content-Type", "application/json".into())],
            body: value.to_string().into_bytes(),
        }
    }

    fn error(status: &'static str, code: &str, message: &str) -> Answer {
        Answer {
            status,
            headers: vec![("X-Error-Code", code.into()), ("X-Error-Message", message.into())],
            body: Vec::new(),
        }
    }
}

/// A hub that answers from a table and keeps a log of `METHOD PATH` and tokens.
struct MockHub {
    address: String,
    log: Arc<Mutex<Vec<String>>>,
}

impl MockHub {
    fn start(answers: BTreeMap<String, Answer>) -> MockHub {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        let log = Arc::new(Mutex::new(Vec::new()));
        let shared = Arc::clone(&log);
        // The thread ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (answers, log) = (answers.clone(), Arc::clone(&shared));
                std::thread::spawn(move || serve(&stream, &answers, &log));
            }
        });
        MockHub { address, log }
    }

    fn log(&self) -> Vec<String> {
        self.log.lock().expect("lock").clone()
    }

    /// The files fetched, sorted, without repeats.
    fn fetched(&self) -> Vec<String> {
        let prefix = format!("GET /org/tiny/resolve/{COMMIT}/");
        let mut files: Vec<String> =
            self.log().iter().filter_map(|l| l.strip_prefix(&prefix).map(str::to_owned)).collect();
        files.sort();
        files.dedup();
        files
    }
}

fn serve(stream: &TcpStream, answers: &BTreeMap<String, Answer>, log: &Mutex<Vec<String>>) {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    if reader.read_line(&mut line).is_err() {
        return;
    }
    let mut words = line.split_whitespace();
    let (method, target) =
        (words.next().unwrap_or("").to_owned(), words.next().unwrap_or("").to_owned());
    let path = target.split('?').next().unwrap_or("").to_owned();
    log.lock().expect("lock").push(format!("{method} {path}"));
    loop {
        let mut header = String::new();
        if reader.read_line(&mut header).is_err() || header.trim().is_empty() {
            break;
        }
        if let Some(token) = header.to_ascii_lowercase().strip_prefix("authorization:") {
            log.lock().expect("lock").push(format!("token {}", token.trim()));
        }
    }
    let missing = Answer::error("404 Not Found", "EntryNotFound", "Entry not found");
    let answer = answers.get(&path).unwrap_or(&missing);
    let mut head = format!(
        "HTTP/1.1 {}\r\nConnection: close\r\nContent-Length: {}\r\n",
        answer.status,
        answer.body.len()
    );
    for (name, value) in &answer.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    let mut stream = stream;
    let _ = stream.write_all(head.as_bytes());
    if method != "HEAD" {
        let _ = stream.write_all(&answer.body);
    }
}

/// The files of `org/tiny`: two shards with an index, configs, and things that a conversion does not need.
fn repository() -> BTreeMap<&'static str, Vec<u8>> {
    let index = serde_json::json!({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}});
    BTreeMap::from([
        ("config.json", br#"{"model_type": "llama"}"#.to_vec()),
        ("tokenizer.json", br#"{"model": {"vocab": {"x": 0}}}"#.to_vec()),
        ("LICENSE", b"free".to_vec()),
        ("additional_chat_templates/rag.jinja", b"{{ x }}".to_vec()),
        (SHARDS[0], file(&[counting("a", &[2], 1)])),
        (SHARDS[1], file(&[counting("b", &[2], 5)])),
        ("model.safetensors.index.json", index.to_string().into_bytes()),
        ("consolidated.safetensors", file(&[counting("z", &[2], 9)])),
        ("pytorch_model.bin", b"pickle".to_vec()),
        ("banner.png", b"png".to_vec()),
        (".gitattributes", b"* lfs".to_vec()),
        ("onnx/model.onnx", b"onnx".to_vec()),
        ("original/params.json", b"{}".to_vec()),
    ])
}

fn answers(files: &BTreeMap<&'static str, Vec<u8>>) -> BTreeMap<String, Answer> {
    let mut table = BTreeMap::new();
    let info = Answer::json(&serde_json::json!({"id": "org/tiny", "sha": COMMIT}));
    for revision in ["main", "v1", COMMIT] {
        table.insert(format!("/api/models/org/tiny/revision/{revision}"), info.clone());
    }
    let tree: Vec<serde_json::Value> = files
        .iter()
        .map(|(path, bytes)| serde_json::json!({"type": "file", "oid": "0", "size": bytes.len(), "path": path}))
        .collect();
    table.insert(format!("/api/models/org/tiny/tree/{COMMIT}"), Answer::json(&tree.into()));
    for (i, (path, bytes)) in files.iter().enumerate() {
        table.insert(
            format!("/org/tiny/resolve/{COMMIT}/{path}"),
            Answer {
                status: "200 OK",
                headers: vec![("ETag", format!("\"{i:040x}\"")), ("X-Repo-Commit", COMMIT.into())],
                body: bytes.clone(),
            },
        );
    }
    table
}

fn environment(hub: &MockHub, cache: &Path) -> HubEnvironment {
    HubEnvironment {
        endpoint: Some(hub.address.clone()),
        cache: cache.to_path_buf(),
        token: Some("hf_test".into()),
        offline: false,
    }
}

fn open(id: &str, hub: HubEnvironment) -> Result<Checkpoint, Failure> {
    Checkpoint::open(Path::new(id), &OpenOptions { hub: Some(hub), on_transfer: None })
}

#[test]
fn a_model_is_fetched_with_what_a_conversion_needs_and_opened() {
    let hub = MockHub::start(answers(&repository()));
    let cache = tempfile::tempdir().expect("a folder");
    let told: Arc<Mutex<Vec<Transfer>>> = Arc::default();
    let listener = Arc::clone(&told);
    let options = OpenOptions {
        hub: Some(environment(&hub, cache.path())),
        on_transfer: Some(Arc::new(move |t| listener.lock().expect("lock").push(t))),
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
    let shard =
        told.lock().expect("lock").iter().filter(|t| t.file == SHARDS[0]).map(|t| t.done).max();
    assert_eq!(shard, Some(file(&[counting("a", &[2], 1)]).len() as u64));

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
    table.get_mut(&path).expect("served").body = b"Internal Server Error".to_vec();
    let hub = MockHub::start(table);
    let cache = tempfile::tempdir().expect("a folder");
    let failure = open("org/tiny", environment(&hub, cache.path())).expect_err("wrong length");
    assert_eq!(failure.headline, "org/tiny did not arrive whole");
    assert_eq!(failure.problems[0].message, "LICENSE: 21 of 4 bytes arrived");
    let sound = MockHub::start(answers(&files));
    open("org/tiny", environment(&sound, cache.path())).unwrap_or_else(|f| panic!("{f}"));
    assert_eq!(sound.fetched(), ["LICENSE"]);
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
