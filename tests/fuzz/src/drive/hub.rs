//! Answers of a hub: listings, errors, headers, files.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use radpack::checkpoint::{Checkpoint, Extent, HubEnvironment, OpenOptions};

use super::Outcome;
use super::archive::{files, folder, placeless, shard};

/// What is asked for next: answers by name.
static ANSWERS: Mutex<BTreeMap<String, Vec<u8>>> = Mutex::new(BTreeMap::new());

/// Answers by what they answer: `info` (the revision), `tree` (the listing), else a file's name. Each is a status line,
/// headers, an empty line and the body, as in HTTP; the body of a `.safetensors` is its header's text. With an answer named
/// `everything` whole files are fetched, otherwise headers.
pub fn answers(input: &[u8]) -> Outcome {
    let given = files(input).into_iter().map(|(name, bytes)| (name.to_owned(), bytes.to_vec()));
    let given: BTreeMap<String, Vec<u8>> = given.collect();
    let extent =
        if given.contains_key("everything") { Extent::Everything } else { Extent::Headers };
    *ANSWERS.lock().unwrap_or_else(PoisonError::into_inner) = given;
    let cache = folder();
    let hub = HubEnvironment {
        endpoint: Some(server().to_owned()),
        cache: cache.path().to_owned(),
        pause: Duration::ZERO,
        timeout: Duration::from_millis(500),
        ..HubEnvironment::default()
    };
    let options = OpenOptions { hub: Some(hub), extent, on_transfer: None };
    let opened = Checkpoint::open(Path::new("org/tiny"), &options);
    let text = |text: &str| placeless(text, cache.path()).replace(server(), "HUB");
    let beyond = std::fs::read_dir(cache.path()).expect("the cache").flatten();
    for entry in beyond {
        let name = entry.file_name().to_string_lossy().into_owned();
        assert!(name.starts_with("models--org--tiny") || name.starts_with('.'), "{name}");
    }
    match opened {
        Ok(checkpoint) => Ok(format!("{} tensors", checkpoint.tensors().len())),
        Err(failure) => Err(text(&failure.to_string())),
    }
}

/// The address of a server that answers from [`ANSWERS`].
fn server() -> &'static str {
    static ADDRESS: OnceLock<String> = OnceLock::new();
    ADDRESS.get_or_init(|| {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || serve(&stream));
            }
        });
        address
    })
}

fn serve(stream: &TcpStream) -> Option<()> {
    let _ = stream.set_read_timeout(Some(Duration::from_secs(2)));
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let path = target.split('?').next()?.to_owned();
    let mut range = None;
    loop {
        let mut header = String::new();
        if reader.read_line(&mut header).ok()? == 0 || header.trim().is_empty() {
            break;
        }
        if let Some(asked) = header.to_ascii_lowercase().strip_prefix("range: bytes=") {
            let (from, last) = asked.trim().split_once('-')?;
            range = Some((from.parse::<usize>().ok()?, last.parse::<usize>().unwrap_or(1 << 20)));
        }
    }
    let name = if path.contains("/revision/") {
        "info"
    } else if path.contains("/tree/") {
        "tree"
    } else {
        path.split("/resolve/").nth(1).and_then(|p| p.split_once('/')).map_or("other", |p| p.1)
    };
    let answer = ANSWERS.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned();
    let answer = answer.unwrap_or_else(|| b"404 Not Found\n\n".to_vec());
    let end = answer.windows(2).position(|w| w == b"\n\n").unwrap_or(answer.len());
    let (head, body) = (&answer[..end], answer.get(end + 2..).unwrap_or_default());
    let head = String::from_utf8_lossy(head).into_owned();
    let mut lines = head.lines();
    let mut status = lines.next().unwrap_or("200 OK").to_owned();
    let whole = if name.ends_with(".safetensors") { shard(body) } else { body.to_vec() };
    let mut body = &whole[..];
    let mut out = String::new();
    if let (Some((from, last)), true) = (range, status.starts_with("200")) {
        let last = last.min(body.len().saturating_sub(1));
        body = body.get(from..=last).unwrap_or_default();
        status = "206 Partial Content".to_owned();
        out.push_str(&format!("Content-Range: bytes {from}-{last}/{}\r\n", whole.len()));
    }
    let mut length = Some(body.len());
    for line in lines {
        let lower = line.to_ascii_lowercase();
        // A pause that is asked for would only cost time.
        if lower.starts_with("retry-after") || lower.starts_with("ratelimit") {
            continue;
        }
        if lower.starts_with("content-length") {
            length = None;
        }
        out.push_str(&line.replace("HUB", server()));
        out.push_str("\r\n");
    }
    if let Some(length) = length {
        out.push_str(&format!("Content-Length: {length}\r\n"));
    }
    let mut stream = stream;
    let all = format!("HTTP/1.1 {status}\r\nConnection: close\r\n{out}\r\n");
    stream.write_all(all.as_bytes()).ok()?;
    if method != "HEAD" {
        stream.write_all(body).ok()?;
    }
    Some(())
}
