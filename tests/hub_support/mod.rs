//! A small hub on 127.0.0.1.
#![allow(dead_code)] // each test binary uses its own part

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use assert_cmd::Command;
use radpack::checkpoint::{Checkpoint, Extent, HubEnvironment, OpenOptions};
use radpack::diag::Failure;
use sha2::{Digest, Sha256};

use crate::checkpoint_support::{SHARDS, counting, file};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What the hub answers for one path.
#[derive(Clone)]
pub struct Answer {
    pub status: &'static str,
    pub headers: Vec<(&'static str, String)>,
    pub body: Body,
    pub ranges: Ranges,
    /// What becomes of the first requests for the body, one each.
    pub faults: Arc<Mutex<VecDeque<Fault>>>,
}

/// What goes wrong with an answer.
#[derive(Clone)]
pub enum Fault {
    /// The connection ends after so many bytes of the body.
    Cut(u64),
    /// Nothing comes after so many bytes of the body.
    Stall(u64),
    /// One byte at a time, with a pause after each.
    Dribble(Duration),
    /// Another answer.
    Instead(Box<Answer>),
}

/// Where a body's bytes are.
#[derive(Clone)]
pub enum Body {
    Bytes(Vec<u8>),
    /// A file that may be far larger than memory.
    File(PathBuf),
}

/// Texts of files in git, and their ids by `git hash-object`.
pub const GIT_IDS: [(&[u8], &str); 4] = [
    (b"free", "d5ff0576ae3eb2118f1c843595a46ad35d2074c3"),
    (br#"{"model_type": "llama"}"#, "230d5f4da0da586aad26ead694ea67cd15bd6df1"),
    (br#"{"model": {"vocab": {"x": 0}}}"#, "36968eb93049b33ec22763a9e6989cf8ec2798e3"),
    (b"{{ x }}", "821fc38044d85e1133ec33bb23d135c9c74425fd"),
];

/// Sha256 in hex.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

impl Body {
    pub fn etag(&self) -> String {
        let of = |bytes: &[u8]| {
            let in_git = GIT_IDS.iter().find(|(text, _)| *text == bytes);
            in_git.map_or_else(|| sha256(bytes), |(_, id)| (*id).to_owned())
        };
        match self {
            Body::Bytes(bytes) => of(bytes),
            // Nobody fetches files as large as this whole.
            Body::File(_) if self.len() > 64 << 20 => "0".repeat(64),
            Body::File(path) => of(&std::fs::read(path).expect("a file")),
        }
    }

    pub fn len(&self) -> u64 {
        match self {
            Body::Bytes(bytes) => bytes.len() as u64,
            Body::File(path) => std::fs::metadata(path).expect("a file").len(),
        }
    }

    pub fn send(&self, stream: &mut impl Write, from: u64, bytes: u64) -> std::io::Result<u64> {
        match self {
            Body::Bytes(all) => {
                let part = &all[from as usize..(from + bytes) as usize];
                stream.write_all(part).map(|()| bytes)
            }
            Body::File(path) => {
                let mut file = std::fs::File::open(path)?;
                file.seek(SeekFrom::Start(from))?;
                std::io::copy(&mut file.take(bytes), stream)
            }
        }
    }
}

/// What becomes of requests for a part.
#[derive(Clone, Copy, PartialEq)]
pub enum Ranges {
    /// 206 with the part.
    Served,
    /// 200 with everything.
    Ignored,
    /// 206 with one byte less.
    Short,
}

impl Answer {
    pub fn json(value: &serde_json::Value) -> Answer {
        Answer {
            status: "200 OK",
            headers: vec![("Content-Type", "application/json".into())],
            body: Body::Bytes(value.to_string().into_bytes()),
            ranges: Ranges::Served,
            faults: Arc::default(),
        }
    }

    /// A file with the ETag that the hub gives it: as a file in git or as one in Git LFS.
    pub fn file(body: Body) -> Answer {
        let headers =
            vec![("ETag", format!("\"{}\"", body.etag())), ("X-Repo-Commit", COMMIT.into())];
        Answer { status: "200 OK", headers, body, ranges: Ranges::Served, faults: Arc::default() }
    }

    pub fn with_faults(self, faults: impl IntoIterator<Item = Fault>) -> Answer {
        Answer { faults: Arc::new(Mutex::new(faults.into_iter().collect())), ..self }
    }

    pub fn error(status: &'static str, code: &str, message: &str) -> Answer {
        Answer {
            status,
            headers: vec![("X-Error-Code", code.into()), ("X-Error-Message", message.into())],
            body: Body::Bytes(Vec::new()),
            ranges: Ranges::Served,
            faults: Arc::default(),
        }
    }
}

/// A hub that answers from a table and keeps a log of `METHOD PATH` and tokens.
pub struct MockHub {
    pub address: String,
    pub log: Arc<Mutex<Vec<String>>>,
    /// Bytes of bodies that were sent.
    pub sent: Arc<AtomicU64>,
    /// Paths and ranges of requests for bodies.
    pub ranges: Asked,
}

pub type Asked = Arc<Mutex<Vec<(String, Option<Range<u64>>)>>>;

impl MockHub {
    pub fn start(answers: BTreeMap<String, Answer>) -> MockHub {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        let log = Arc::new(Mutex::new(Vec::new()));
        let shared = Arc::clone(&log);
        let sent = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&sent);
        let ranges: Asked = Arc::default();
        let asked = Arc::clone(&ranges);
        // The thread ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (answers, log) = (answers.clone(), Arc::clone(&shared));
                let (counter, asked) = (Arc::clone(&counter), Arc::clone(&asked));
                std::thread::spawn(move || serve(&stream, &answers, (&log, &asked), &counter));
            }
        });
        MockHub { address, log, sent, ranges }
    }

    pub fn log(&self) -> Vec<String> {
        self.log.lock().expect("lock").clone()
    }

    /// The ranges asked for of a file, in order.
    pub fn ranges_of(&self, file: &str) -> Vec<Option<Range<u64>>> {
        let path = format!("/org/tiny/resolve/{COMMIT}/{file}");
        let asked = self.ranges.lock().expect("lock");
        asked.iter().filter(|(p, _)| *p == path).map(|(_, range)| range.clone()).collect()
    }

    /// The files fetched, sorted, without repeats.
    pub fn fetched(&self) -> Vec<String> {
        let prefix = format!("GET /org/tiny/resolve/{COMMIT}/");
        let mut files: Vec<String> =
            self.log().iter().filter_map(|l| l.strip_prefix(&prefix).map(str::to_owned)).collect();
        files.sort();
        files.dedup();
        files
    }
}

pub fn serve(
    stream: &TcpStream,
    answers: &BTreeMap<String, Answer>,
    (log, asked): (&Mutex<Vec<String>>, &Asked),
    sent: &AtomicU64,
) {
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
    let mut range = None;
    loop {
        let mut header = String::new();
        if reader.read_line(&mut header).is_err() || header.trim().is_empty() {
            break;
        }
        if let Some(token) = header.to_ascii_lowercase().strip_prefix("authorization:") {
            let mut log = log.lock().expect("lock");
            log.push(format!("token {}", token.trim()));
            log.push(format!("token for {method} {path}"));
        }
        if let Some(asked) = header.to_ascii_lowercase().strip_prefix("range: bytes=") {
            let (from, last) = asked.trim().split_once('-').expect("a range");
            let number = |text: &str| text.parse::<u64>().expect("a number");
            range = Some(number(from)..number(last) + 1);
        }
    }
    let missing = Answer::error("404 Not Found", "EntryNotFound", "Entry not found");
    let mut answer = answers.get(&path).unwrap_or(&missing).clone();
    let mut fault = None;
    if method != "HEAD" {
        asked.lock().expect("lock").push((path.clone(), range.clone()));
        fault = answer.faults.lock().expect("lock").pop_front();
    }
    if let Some(Fault::Instead(other)) = &fault {
        answer = (**other).clone();
    }
    let all = answer.body.len();
    let parts = answer.ranges != Ranges::Ignored && answer.status.starts_with('2');
    let (status, part) = match range.filter(|_| parts) {
        Some(range) => ("206 Partial Content", range.start..range.end.min(all)),
        None => (answer.status, 0..all),
    };
    let short = status.starts_with("206") && answer.ranges == Ranges::Short;
    let bytes = part.end - part.start - u64::from(short);
    let mut head = format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {bytes}\r\n");
    if status.starts_with("206") {
        let last = part.start + bytes - 1;
        head.push_str(&format!("Content-Range: bytes {}-{last}/{all}\r\n", part.start));
    }
    for (name, value) in &answer.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    let mut stream = stream;
    let _ = stream.write_all(head.as_bytes());
    if method == "HEAD" {
        return;
    }
    let comes = match &fault {
        Some(Fault::Cut(after) | Fault::Stall(after)) => bytes.min(*after),
        _ => bytes,
    };
    if let Some(Fault::Dribble(pause)) = &fault {
        for at in part.start..part.start + comes {
            let _ = answer.body.send(&mut stream, at, 1);
            std::thread::sleep(*pause);
        }
    } else {
        let done = answer.body.send(&mut stream, part.start, comes).unwrap_or(0);
        sent.fetch_add(done, Ordering::Relaxed);
    }
    if let Some(Fault::Stall(_)) = &fault {
        // Longer than any test waits; the thread ends with the process.
        std::thread::sleep(Duration::from_secs(600));
    }
}

/// The files of `org/tiny`: two shards with an index, configs, and things that a conversion does not need.
pub fn repository() -> BTreeMap<&'static str, Vec<u8>> {
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

pub fn answers(files: &BTreeMap<&'static str, Vec<u8>>) -> BTreeMap<String, Answer> {
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
    for (path, bytes) in files {
        table.insert(resolve(path), Answer::file(Body::Bytes(bytes.clone())));
    }
    table
}

/// Where a file of `org/tiny` is.
pub fn resolve(file: &str) -> String {
    format!("/org/tiny/resolve/{COMMIT}/{file}")
}

pub fn environment(hub: &MockHub, cache: &Path) -> HubEnvironment {
    HubEnvironment {
        endpoint: Some(hub.address.clone()),
        cache: cache.to_path_buf(),
        token: Some("hf_test".into()),
        pause: Duration::from_millis(1),
        ..HubEnvironment::default()
    }
}

pub fn open(id: &str, hub: HubEnvironment) -> Result<Checkpoint, Failure> {
    open_as(id, hub, Extent::Everything)
}

pub fn open_as(id: &str, hub: HubEnvironment, extent: Extent) -> Result<Checkpoint, Failure> {
    Checkpoint::open(Path::new(id), &OpenOptions { hub: Some(hub), extent, on_transfer: None })
}

/// A hub that serves a folder as `org/tiny`, one file of which goes wrong as said.
pub fn hub_of(folder: &Path, faulty: &str, faults: impl IntoIterator<Item = Fault>) -> MockHub {
    let mut faults = Some(faults);
    let names = std::fs::read_dir(folder).expect("a folder");
    let mut names: Vec<String> =
        names.map(|e| e.expect("an entry").file_name().into_string().expect("UTF-8")).collect();
    names.sort();
    let mut table = answers(&BTreeMap::new());
    let mut tree = Vec::new();
    for name in &names {
        let body = Body::File(folder.join(name));
        tree.push(
            serde_json::json!({"type": "file", "oid": "0", "size": body.len(), "path": name}),
        );
        let mut answer = Answer::file(body);
        if name == faulty {
            answer = answer.with_faults(faults.take().into_iter().flatten());
        }
        table.insert(resolve(name), answer);
    }
    table.insert(format!("/api/models/org/tiny/tree/{COMMIT}"), Answer::json(&tree.into()));
    MockHub::start(table)
}

pub fn run(folder: &Path, hub: &MockHub, args: &[&str]) -> (i32, String, String) {
    let output = Command::cargo_bin("radpack")
        .expect("the binary is built")
        .current_dir(folder)
        .env("NO_COLOR", "1")
        .env("HF_ENDPOINT", &hub.address)
        .env("HF_HUB_CACHE", folder.join("cache"))
        .env_remove("HF_HUB_OFFLINE")
        .args(args)
        .output()
        .expect("the binary runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (output.status.code().unwrap_or(-1), text(output.stdout), text(output.stderr))
}
