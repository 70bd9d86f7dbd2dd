//! Files of a model, whole, into the cache.
//!
//! A file grows as `blobs/ETAG.incomplete`, the name that huggingface_hub uses too, and an interrupted one goes on
//! where it stopped, whoever began it. It gets its name when its digest is the one in the ETag, and only then a link
//! from the snapshot leads to it: a cache holds no file under a name that it does not deserve. What an earlier run left
//! is hashed with the rest; when the whole is wrong, the file is fetched once more from its beginning.
//!
//! Files come over plain HTTP, also those that the hub keeps in Xet: it serves parts of them like those of any file.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use reqwest::redirect::Policy;
use reqwest::{Client, StatusCode, Url, header};

use super::answer::Answer;
use super::{Hub, Remote, model_folder};
use crate::checkpoint::blob::{BlobHasher, BlobName};
use crate::checkpoint::source::Transfer;
use crate::diag::{self, Diagnostic, Failure, FailureKind, Problems, Result};

/// Files that are fetched at a time.
const AT_A_TIME: usize = 8;

/// Bytes read at once of what an earlier run left.
const CHUNK: usize = 256 << 10;

/// Relative redirects that are followed: a model that was renamed has one.
const MAX_REDIRECTS: usize = 5;

/// How often to look whether another process is done with a file.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Fetches the files that the snapshot of a commit lacks. Returns the snapshot's folder.
///
/// # Errors
/// Failed (1): what did not come, or came damaged, each with its reason; Usage (2): a file that the hub does not have.
pub(super) fn fetch(hub: &Hub<'_>, commit: &str, wanted: &[Remote]) -> Result<PathBuf> {
    let model = model_folder(hub.id, hub.environment);
    let snapshot = model.join("snapshots").join(commit);
    let there =
        |f: &&Remote| fs::metadata(snapshot.join(&f.path)).is_ok_and(|m| m.len() == f.bytes);
    let missing: Vec<&Remote> = wanted.iter().filter(|f| !there(f)).collect();
    if missing.is_empty() {
        return Ok(snapshot);
    }
    for folder in [&snapshot, &model.join("blobs")] {
        fs::create_dir_all(folder).map_err(|e| Failure::io("make the folder", folder, &e))?;
    }
    let total = missing.iter().map(|f| f.bytes).sum();
    hub.tell(Transfer::Begun { model: hub.id.to_string(), files: missing.len(), bytes: total });
    let download = Download {
        hub,
        commit,
        model: &model,
        snapshot: &snapshot,
        total,
        sum: Mutex::new(0),
        stopped: AtomicBool::new(false),
    };
    let next = AtomicUsize::new(0);
    let failed: Mutex<Vec<(usize, Unfetched)>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..missing.len().min(AT_A_TIME) {
            scope.spawn(|| {
                while !download.stopped.load(Ordering::Relaxed) {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(file) = missing.get(at) else { break };
                    if let Err(why) = download.file(file) {
                        // The others stop where they are: the next run goes on there.
                        download.stopped.store(true, Ordering::Relaxed);
                        failed.lock().unwrap_or_else(PoisonError::into_inner).push((at, why));
                    }
                }
            });
        }
    });
    hub.tell(Transfer::Ended);
    let mut failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    failed.sort_by_key(|(at, _)| *at);
    let mut problems = Problems::new();
    for (_, why) in failed {
        match why {
            // The hub's own reason mostly stands for all files.
            Unfetched::Answer(answer) => return Err(hub.failure("download", &answer)),
            Unfetched::Problem(problem) => problems.push(problem),
            Unfetched::Stopped => {}
        }
    }
    problems.finish(FailureKind::Failed, &format!("{} did not arrive whole", hub.id), snapshot)
}

/// Why a file is not there.
enum Unfetched {
    /// The hub answered something else, or not at all.
    Answer(Box<Answer>),
    /// Something is wrong with the file, or with the place for it.
    Problem(Diagnostic),
    /// Another file failed.
    Stopped,
}

impl Unfetched {
    fn io(doing: &str, path: &Path, error: &io::Error) -> Unfetched {
        let what = format!("cannot {doing} {}: {error}", path.display());
        Unfetched::Problem(Diagnostic::new("hub", what))
    }
}

/// The files of one commit on their way.
struct Download<'a> {
    hub: &'a Hub<'a>,
    commit: &'a str,
    /// The model's folder in the cache.
    model: &'a Path,
    snapshot: &'a Path,
    /// Bytes of all files that were missing.
    total: u64,
    /// Bytes of them that are here. Events are told under the lock, so that they come in order.
    sum: Mutex<u64>,
    stopped: AtomicBool,
}

/// A file as far as it is here.
struct Growing<'a> {
    file: &'a Remote,
    name: BlobName,
    path: PathBuf,
    out: File,
    have: u64,
    hasher: BlobHasher,
}

impl Growing<'_> {
    /// Back to the beginning.
    fn clear(&mut self) -> std::result::Result<(), Unfetched> {
        let clear = |out: &mut File| {
            out.set_len(0)?;
            out.seek(SeekFrom::Start(0))
        };
        clear(&mut self.out).map_err(|e| Unfetched::io("write", &self.path, &e))?;
        self.have = 0;
        self.hasher = self.name.hasher(self.file.bytes);
        Ok(())
    }
}

impl Download<'_> {
    /// Fetches one file. Each has a runtime and connections of its own, so that hashing and writing one holds up no
    /// other.
    fn file(&self, file: &Remote) -> std::result::Result<(), Unfetched> {
        let clients = || -> Result<(Client, Client)> {
            Ok((self.hub.http(Policy::default())?, self.hub.http(Policy::none())?))
        };
        let (client, direct) =
            clients().map_err(|f| Unfetched::Problem(Diagnostic::new("hub", f.headline)))?;
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| {
                Unfetched::Problem(Diagnostic::new("hub", format!("cannot start a download: {e}")))
            })?;
        runtime.block_on(async {
            let (etag, name) = self.name(&direct, file).await?;
            let blob = self.model.join("blobs").join(&etag);
            let there = || fs::metadata(&blob).is_ok_and(|m| m.len() == file.bytes);
            if !there() {
                let _lock = self.lock(&etag, file).await?;
                // Another process, or another file of the same content, may have brought it.
                if !there() {
                    self.blob(&client, file, name, &blob).await?;
                } else {
                    self.tell(file, 0, file.bytes);
                }
            } else {
                self.tell(file, 0, file.bytes);
            }
            self.link(file, &etag)
        })
    }

    /// The ETag of a file, which names its blob, and the digest that it is.
    async fn name(
        &self,
        client: &Client,
        file: &Remote,
    ) -> std::result::Result<(String, BlobName), Unfetched> {
        let mut failed = 0;
        let etag = loop {
            match self.etag(client, file).await {
                Ok(etag) => break etag,
                Err(answer) => self.wait(answer, &mut failed).await?,
            }
        };
        // The listing has the id of files in git; of those in Git LFS it is the pointer's.
        let by_listing = || (!file.lfs).then(|| file.oid.clone());
        let named = |text: String| BlobName::parse(&text).map(|name| (name.hex(), name));
        etag.and_then(named).or_else(|| by_listing().and_then(named)).ok_or_else(|| {
            let endpoint = self.hub.environment.endpoint();
            let what = format!("{}: {endpoint} gives no digest to compare with", file.path);
            let help = format!(
                "{} fetches it unseen; then pass the folder",
                super::download_command(self.hub.id)
            );
            Unfetched::Problem(Diagnostic::new("hub", what).help(help))
        })
    }

    /// Asks where a file is, without going there: only the hub itself gives the digest.
    async fn etag(
        &self,
        client: &Client,
        file: &Remote,
    ) -> std::result::Result<Option<String>, Answer> {
        let odd = || Answer::ended_early(&file.path, 0, file.bytes);
        let mut url = self.url(file).ok_or_else(odd)?;
        for _ in 0..MAX_REDIRECTS {
            let request = self.authorized(client.head(url.clone()));
            let response =
                request.send().await.map_err(|e| Answer::of_transport(&e).about(&file.path))?;
            if let Some(answer) = Answer::of_response(&response, &file.path) {
                return Err(answer);
            }
            let header = |name: &str| response.headers().get(name)?.to_str().ok();
            match header("location") {
                Some(place)
                    if response.status().is_redirection()
                        && place.starts_with('/')
                        && !place.starts_with("//") =>
                {
                    url = url.join(place).map_err(|_| odd())?;
                }
                _ => {
                    let etag = header("x-linked-etag").or_else(|| header("etag"));
                    let plain =
                        |etag: &str| etag.trim_start_matches("W/").trim_matches('"').to_owned();
                    return Ok(etag.map(plain));
                }
            }
        }
        Err(odd())
    }

    fn url(&self, file: &Remote) -> Option<Url> {
        let id = self.hub.id;
        let mut url = Url::parse(self.hub.environment.endpoint()).ok()?;
        url.path_segments_mut()
            .ok()?
            .pop_if_empty()
            .extend([&id.org, &id.name, "resolve", self.commit])
            .extend(file.path.split('/'));
        Some(url)
    }

    fn authorized(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.hub.environment.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
    }

    /// Waits before the next attempt, or ends where there is to be none.
    async fn wait(&self, answer: Answer, failed: &mut u32) -> std::result::Result<(), Unfetched> {
        let Some(pause) = self.hub.pause(&answer, *failed) else {
            return Err(Unfetched::Answer(Box::new(answer)));
        };
        self.hub.tell_pause(answer.path(), &answer, pause);
        *failed += 1;
        let until = Instant::now() + pause;
        while Instant::now() < until {
            self.go_on()?;
            tokio::time::sleep(LOOK_AGAIN.min(pause)).await;
        }
        Ok(())
    }

    fn go_on(&self) -> std::result::Result<(), Unfetched> {
        if self.stopped.load(Ordering::Relaxed) { Err(Unfetched::Stopped) } else { Ok(()) }
    }

    /// The right to write a blob, which huggingface_hub asks for in the same way.
    async fn lock(
        &self,
        etag: &str,
        file: &Remote,
    ) -> std::result::Result<Option<File>, Unfetched> {
        let folder = self
            .hub
            .environment
            .cache
            .join(".locks")
            .join(self.model.file_name().unwrap_or_default());
        let path = folder.join(format!("{etag}.lock"));
        let open = || {
            fs::create_dir_all(&folder)?;
            File::options().create(true).truncate(false).write(true).open(&path)
        };
        let lock = open().map_err(|e| Unfetched::io("open", &path, &e))?;
        let incomplete = self.model.join("blobs").join(format!("{etag}.incomplete"));
        let length = || fs::metadata(&incomplete).map_or(0, |m| m.len());
        // Whoever holds it may also be hashing; patience is for one that does neither.
        let patience = self.hub.environment.timeout.saturating_mul(6);
        let (mut seen, mut since) = (length(), Instant::now());
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(Some(lock)),
                Err(fs::TryLockError::WouldBlock) => {}
                // A file system without locks.
                Err(fs::TryLockError::Error(_)) => return Ok(None),
            }
            self.go_on()?;
            let now = length();
            if now != seen {
                (seen, since) = (now, Instant::now());
            } else if since.elapsed() > patience {
                let what = format!(
                    "{}: another process has been fetching it and got nothing for {} s",
                    file.path,
                    patience.as_secs()
                );
                let help = format!("end that process: it holds {}", path.display());
                return Err(Unfetched::Problem(Diagnostic::new("hub", what).help(help)));
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Fetches what is missing of a blob, compares its digest, and gives it its name.
    async fn blob(
        &self,
        client: &Client,
        file: &Remote,
        name: BlobName,
        blob: &Path,
    ) -> std::result::Result<(), Unfetched> {
        let path = blob.with_file_name(format!("{}.incomplete", name.hex()));
        let mut growing = self.open(file, name, path)?;
        loop {
            let from_earlier = growing.have;
            self.grow(client, &mut growing).await?;
            let hasher = std::mem::replace(&mut growing.hasher, name.hasher(file.bytes));
            let Some(problem) = name.mismatch(&file.path, &hasher.finish()) else { break };
            if from_earlier == 0 {
                // Nothing of it may be taken for good later.
                let _ = fs::remove_file(&growing.path);
                let endpoint = self.hub.environment.endpoint();
                return Err(Unfetched::Problem(
                    problem
                        .help("the bytes were damaged on their way and are removed; run again to fetch them again")
                        .help(format!("if that does not help, {endpoint} or a proxy before it serves a damaged file")),
                ));
            }
            self.again(&mut growing)?;
        }
        fs::rename(&growing.path, blob).map_err(|e| Unfetched::io("write", blob, &e))
    }

    /// Opens a file as an earlier run left it, and hashes what is there.
    fn open<'f>(
        &self,
        file: &'f Remote,
        name: BlobName,
        path: PathBuf,
    ) -> std::result::Result<Growing<'f>, Unfetched> {
        let fail = |e: io::Error, path: &Path| Unfetched::io("write", path, &e);
        let mut options = File::options();
        let out = options.read(true).write(true).create(true).truncate(false).open(&path);
        let out = out.map_err(|e| fail(e, &path))?;
        let hasher = name.hasher(file.bytes);
        let mut growing = Growing { file, name, path, out, have: 0, hasher };
        let length = growing.out.metadata().map_err(|e| fail(e, &growing.path))?.len();
        if length > file.bytes {
            growing.clear()?;
        }
        let mut buffer = vec![0; CHUNK];
        loop {
            self.go_on()?;
            let read = match growing.out.read(&mut buffer) {
                Ok(0) => return Ok(growing),
                Ok(read) => read,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(fail(e, &growing.path)),
            };
            growing.hasher.update(buffer.get(..read).unwrap_or_default());
            growing.have += read as u64;
            self.tell(file, growing.have - read as u64, growing.have);
        }
    }

    /// Fetches the rest of a file, in as many requests as it takes.
    async fn grow(
        &self,
        client: &Client,
        growing: &mut Growing<'_>,
    ) -> std::result::Result<(), Unfetched> {
        let mut failed = 0;
        while growing.have < growing.file.bytes {
            let before = growing.have;
            match self.request(client, growing).await {
                Ok(()) => {}
                Err(Unfetched::Answer(answer)) => {
                    if growing.have > before {
                        failed = 0;
                    }
                    self.wait(*answer, &mut failed).await?;
                }
                Err(other) => return Err(other),
            }
        }
        Ok(())
    }

    /// One request for all that is missing.
    async fn request(
        &self,
        client: &Client,
        growing: &mut Growing<'_>,
    ) -> std::result::Result<(), Unfetched> {
        let file = growing.file;
        let answer = |answer: Answer| Unfetched::Answer(Box::new(answer));
        let failed = |e: reqwest::Error| answer(Answer::of_transport(&e).about(&file.path));
        let odd = || answer(Answer::ended_early(&file.path, 0, file.bytes));
        let mut request = self.authorized(client.get(self.url(file).ok_or_else(odd)?));
        if growing.have > 0 {
            let range = format!("bytes={}-{}", growing.have, file.bytes.saturating_sub(1));
            request = request.header(header::RANGE, range);
        }
        let mut response = request.send().await.map_err(failed)?;
        let status = response.status();
        let part_of_another =
            status == StatusCode::PARTIAL_CONTENT && !begins_at(&response, growing.have);
        if status == StatusCode::RANGE_NOT_SATISFIABLE || part_of_another {
            if growing.have == 0 {
                return Err(odd());
            }
            // The next request is for all of it.
            return self.again(growing);
        }
        if let Some(refused) = Answer::of_response(&response, &file.path) {
            return Err(answer(refused));
        }
        if growing.have > 0 && status != StatusCode::PARTIAL_CONTENT {
            // The hub serves no parts: this is all of it.
            self.again(growing)?;
        }
        while let Some(chunk) = response.chunk().await.map_err(|e| match e.is_timeout() {
            true => failed(e),
            false => answer(Answer::ended_early(&file.path, growing.have, file.bytes)),
        })? {
            self.go_on()?;
            let have = growing.have.saturating_add(chunk.len() as u64);
            if have > file.bytes {
                let _ = fs::remove_file(&growing.path);
                let bytes = diag::count(file.bytes);
                let what =
                    format!("{}: more than the {bytes} bytes came that the hub lists", file.path);
                return Err(Unfetched::Problem(
                    Diagnostic::new("hub", what).help("run again to fetch it again"),
                ));
            }
            growing.out.write_all(&chunk).map_err(|e| Unfetched::io("write", &growing.path, &e))?;
            growing.hasher.update(&chunk);
            let before = std::mem::replace(&mut growing.have, have);
            self.tell(file, before, have);
        }
        if growing.have < file.bytes {
            return Err(answer(Answer::ended_early(&file.path, growing.have, file.bytes)));
        }
        Ok(())
    }

    /// Begins a file anew.
    fn again(&self, growing: &mut Growing<'_>) -> std::result::Result<(), Unfetched> {
        let had = growing.have;
        growing.clear()?;
        self.tell(growing.file, had, 0);
        Ok(())
    }

    /// Tells that a file grew from `before` bytes to `now`, or shrank.
    fn tell(&self, file: &Remote, before: u64, now: u64) {
        let mut sum = self.sum.lock().unwrap_or_else(PoisonError::into_inner);
        *sum = sum.saturating_sub(before).saturating_add(now);
        let (file, of) = (file.path.clone(), file.bytes);
        self.hub.tell(Transfer::Bytes { file, done: now, of, sum: *sum, total: self.total });
    }

    /// Links a file of the snapshot to its blob.
    fn link(&self, file: &Remote, etag: &str) -> std::result::Result<(), Unfetched> {
        let path = self.snapshot.join(&file.path);
        let up = "../".repeat(file.path.split('/').count() + 1);
        let link = || {
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent)?;
            }
            match fs::remove_file(&path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
            match std::os::unix::fs::symlink(format!("{up}blobs/{etag}"), &path) {
                // Another process was faster.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                other => other,
            }
        };
        link().map_err(|e| Unfetched::io("link", &path, &e))
    }
}

/// Whether a part of a file begins there, as far as it says.
fn begins_at(response: &reqwest::Response, from: u64) -> bool {
    let range = response.headers().get(header::CONTENT_RANGE).and_then(|v| v.to_str().ok());
    let begins =
        range.and_then(|r| r.strip_prefix("bytes ")?.split_once('-')?.0.trim().parse().ok());
    begins.is_none_or(|at: u64| at == from)
}
