//! Models on the Hugging Face hub: the only network code.
//!
//! A model is fetched into the usual cache (`models--ORG--NAME/{blobs,refs,snapshots}`), where other tools find it
//! too, and opened from there. Only what a conversion needs is fetched: the weight files that count, and the side
//! files, judged by the same rules as a folder's.
//!
//! Plans and estimates read no weights, so [`fetch_heads`] takes the first bytes of every weight file, up to the end of
//! its header, in place of the file. These go to a folder of this process's own: a cache holds whole files.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::Poll;

use futures_core::Stream;

use hf_hub::progress::{DownloadEvent, Progress, ProgressEvent, ProgressHandler};
use hf_hub::repository::{RepoTreeEntry, RepoTypeModel};
use hf_hub::{HFClient, HFClientSync, HFError, HFRepository, HFRepositorySync};

use super::folder::{Heads, SUBFOLDERS, is_inner_path};
use super::index::{Index, MAX_INDEX_BYTES};
use super::json::JsonFile;
use super::layout::{self, Layout};
use super::reader::{CONFIGS, holds_only_adapter};
use super::safetensors;
use super::side;
use super::source::{HubEnvironment, HubId, HubIdentity, OnTransfer, Transfer};
use crate::diag::{self, Diagnostic, Failure, FailureKind, Problems, Result};

/// Fetches a model, or finds it in the cache when offline. Returns the snapshot's folder.
pub(super) fn fetch(
    id: &HubId,
    environment: &HubEnvironment,
    on_transfer: Option<&OnTransfer>,
) -> Result<(PathBuf, HubIdentity)> {
    if environment.offline {
        return from_cache(id, environment).ok_or_else(|| not_cached(id, environment));
    }
    let hub = Hub { id, environment };
    let repo = hub.connect()?;
    let commit = hub.commit(&repo)?;
    let files = hub.list(&repo, &commit)?;
    let read_index = |file: &Remote| {
        let request = repo.download_file().filename(&file.path).revision(&commit);
        let path = request.send().map_err(|e| hub.failure("download", &e))?;
        std::fs::read(&path).map_err(|e| Failure::io("read", &path, &e))
    };
    let wanted = hub.choose(&files, &read_index)?;
    let snapshot = hub.download(&repo, &commit, &wanted, on_transfer)?;
    hub.verify(&snapshot, &wanted)?;
    hub.remember(&commit)?;
    Ok((snapshot, HubIdentity { repo: id.repo(), commit }))
}

/// What [`fetch_heads`] found.
pub(super) enum Fetched {
    /// A snapshot in the cache that holds everything.
    Snapshot(PathBuf),
    /// Beginnings of weight files, and other files whole.
    Heads(Heads),
}

/// Fetches what a plan needs (`side_files`) or what an estimate needs (configs alone): of weight files their headers.
/// Nothing is written to the cache; a snapshot there that is complete is used as it is.
pub(super) fn fetch_heads(
    id: &HubId,
    environment: &HubEnvironment,
    side_files: bool,
) -> Result<(Fetched, HubIdentity)> {
    if environment.offline {
        let found = from_cache(id, environment).ok_or_else(|| not_cached(id, environment))?;
        return Ok((Fetched::Snapshot(found.0), found.1));
    }
    let hub = Hub { id, environment };
    let repo = hub.connect()?;
    let commit = hub.commit(&repo)?;
    let identity = HubIdentity { repo: id.repo(), commit: commit.clone() };
    let files = hub.list(&repo, &commit)?;
    let client = hub.client()?;
    let parts = Parts { hub: &hub, repo: client.model(&id.org, &id.name), commit: &commit };
    let read_index = |file: &Remote| parts.one(&Piece::whole(file));
    let mut wanted = hub.choose(&files, &read_index)?;
    let snapshot = model_folder(id, environment).join("snapshots").join(&commit);
    let cached =
        |f: &Remote| std::fs::metadata(snapshot.join(&f.path)).is_ok_and(|m| m.len() == f.bytes);
    if wanted.iter().all(cached) {
        return Ok((Fetched::Snapshot(snapshot), identity));
    }
    if let Some(gguf) = wanted.iter().find(|f| layout::is_gguf(&f.path)) {
        let what = format!("{} is a GGUF file; they are read from the disk, whole", gguf.path);
        let problem = Diagnostic::new("hub", what)
            .help(format!("{}, and pass the file", download_command(id)));
        return Err(Failure::one(
            FailureKind::Refused,
            format!("{id} cannot be planned from the hub"),
            problem,
        ));
    }
    if !side_files {
        let needed = |f: &Remote| {
            is_weights(&f.path)
                || layout::is_index(&f.path)
                || f.path == "adapter_config.json"
                || CONFIGS.contains(&f.path.as_str())
                || super::quantized::QUANT_CONFIGS.contains(&f.path.as_str())
        };
        wanted.retain(needed);
    }
    let dir = tempfile::tempdir()
        .map_err(|e| Failure::io("make a folder in", &std::env::temp_dir(), &e))?;
    let lengths = parts.save(&wanted, dir.path())?;
    Ok((Fetched::Heads(Heads { dir, name: id.name.clone(), lengths }), identity))
}

fn is_weights(path: &str) -> bool {
    path.ends_with(".safetensors")
}

/// The model's folder in the cache.
fn model_folder(id: &HubId, environment: &HubEnvironment) -> PathBuf {
    environment.cache.join(format!("models--{}--{}", id.org, id.name))
}

/// The snapshot of a revision that lies in the cache.
fn from_cache(id: &HubId, environment: &HubEnvironment) -> Option<(PathBuf, HubIdentity)> {
    let model = model_folder(id, environment);
    let commit = if is_commit(&id.revision) {
        id.revision.clone()
    } else {
        let text = std::fs::read_to_string(model.join("refs").join(&id.revision)).ok()?;
        text.trim().to_owned()
    };
    let snapshot = model.join("snapshots").join(&commit);
    (is_commit(&commit) && snapshot.is_dir())
        .then(|| (snapshot, HubIdentity { repo: id.repo(), commit }))
}

fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| b.is_ascii_hexdigit())
}

fn download_command(id: &HubId) -> String {
    let revision = match id.revision.as_str() {
        "main" => String::new(),
        other => format!(" --revision {other}"),
    };
    format!("hf download {}{revision}", id.repo())
}

fn not_cached(id: &HubId, environment: &HubEnvironment) -> Failure {
    Failure::one(
        FailureKind::Failed,
        format!("{id} is not in the cache, and HF_HUB_OFFLINE forbids to fetch it"),
        Diagnostic::new("hub", format!("no snapshot of {id} in {}", environment.cache.display()))
            .help(format!("fetch it on a machine with network: {}", download_command(id)))
            .help("or unset HF_HUB_OFFLINE; or point HF_HUB_CACHE at the cache that holds it"),
    )
}

/// A file of the repository.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Remote {
    path: String,
    bytes: u64,
}

struct Hub<'a> {
    id: &'a HubId,
    environment: &'a HubEnvironment,
}

impl Hub<'_> {
    fn client(&self) -> Result<HFClient> {
        let mut builder = HFClient::builder()
            .endpoint(self.environment.endpoint())
            .cache_dir(&self.environment.cache)
            .user_agent(concat!("radpack/", env!("CARGO_PKG_VERSION")));
        if let Some(token) = &self.environment.token {
            builder = builder.token(token);
        }
        builder.build().map_err(|e| self.failure("connect to the hub", &e))
    }

    fn connect(&self) -> Result<HFRepositorySync<RepoTypeModel>> {
        let client = HFClientSync::from_inner(self.client()?);
        let client = client.map_err(|e| self.failure("connect to the hub", &e))?;
        Ok(client.model(&self.id.org, &self.id.name))
    }

    fn commit(&self, repo: &HFRepositorySync<RepoTypeModel>) -> Result<String> {
        let info = repo.info().revision(&self.id.revision).send();
        let commit = info.map_err(|e| self.failure("look up", &e))?.sha.unwrap_or_default();
        // The commit becomes part of paths in the cache.
        if is_commit(&commit) {
            return Ok(commit);
        }
        Err(self.odd_answer("the hub gives no commit for this revision"))
    }

    fn list(&self, repo: &HFRepositorySync<RepoTypeModel>, commit: &str) -> Result<Vec<Remote>> {
        let entries = repo.list_tree().revision(commit).recursive(true).send();
        let mut files: Vec<Remote> = entries
            .map_err(|e| self.failure("list", &e))?
            .into_iter()
            .filter_map(|entry| match entry {
                RepoTreeEntry::File { path, size, .. } => Some(Remote { path, bytes: size }),
                RepoTreeEntry::Directory { .. } => None,
            })
            // Paths become part of paths in the cache: none may lead out of it.
            .filter(|file| is_inner_path(&file.path))
            .collect();
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(files)
    }

    /// The files that a conversion needs. `read_index` fetches an index whole.
    fn choose(
        &self,
        files: &[Remote],
        read_index: &dyn Fn(&Remote) -> Result<Vec<u8>>,
    ) -> Result<Vec<Remote>> {
        let top: Vec<&str> =
            files.iter().map(|f| f.path.as_str()).filter(|p| !p.contains('/')).collect();
        let counts = |path: &str| match path.split_once('/') {
            None => true,
            Some((folder, rest)) => SUBFOLDERS.contains(&folder) && !rest.contains('/'),
        };
        let side = |file: &&Remote| {
            counts(&file.path) && side::exclusion(&file.path, file.bytes).is_none()
        };
        let mut wanted: Vec<Remote> = files.iter().filter(side).cloned().collect();
        // Configs that tell a quantized source are read, though no artifact takes them.
        wanted.extend(
            files
                .iter()
                .filter(|f| super::quantized::QUANT_CONFIGS.contains(&f.path.as_str()))
                .cloned(),
        );
        if holds_only_adapter(&top) {
            // The opening refuses it and names the model it belongs to.
            return Ok(wanted);
        }
        let (layout, _) = layout::choose(&top, &self.id.to_string()).map_err(|problem| {
            Failure::one(FailureKind::Refused, format!("{} cannot be read", self.id), problem)
        })?;
        let shards = match layout {
            Layout::Files(names) => names,
            Layout::Index(name) => {
                let index = self.index(files, &name, read_index)?;
                wanted.extend(files.iter().filter(|f| f.path == name).cloned());
                index.shards().into_keys().map(str::to_owned).collect()
            }
        };
        wanted.extend(files.iter().filter(|f| shards.binary_search(&f.path).is_ok()).cloned());
        wanted.sort_by(|a, b| a.path.cmp(&b.path));
        wanted.dedup();
        Ok(wanted)
    }

    fn index(
        &self,
        files: &[Remote],
        name: &str,
        read_index: &dyn Fn(&Remote) -> Result<Vec<u8>>,
    ) -> Result<Index> {
        let Some(file) = files.iter().find(|f| f.path == name) else {
            return Err(self.odd_answer(&format!("{name} is listed and not there")));
        };
        if file.bytes > MAX_INDEX_BYTES {
            return Err(self.odd_answer(&format!(
                "{name} has {}, more than the {} an index may have",
                diag::size(file.bytes),
                diag::size(MAX_INDEX_BYTES)
            )));
        }
        let text = read_index(file)?;
        let mut problems = Problems::new();
        match JsonFile::parse(name, name, text) {
            Ok(file) => match Index::parse(&file) {
                Ok(index) => return Ok(index),
                Err(found) => problems.extend(found),
            },
            Err(problem) => problems.push(problem),
        }
        problems.finish(FailureKind::Refused, "this checkpoint cannot be read", Index::default())
    }

    fn download(
        &self,
        repo: &HFRepositorySync<RepoTypeModel>,
        commit: &str,
        wanted: &[Remote],
        on_transfer: Option<&OnTransfer>,
    ) -> Result<PathBuf> {
        let patterns = wanted.iter().map(|f| globset::escape(&f.path)).collect();
        let progress = on_transfer.map(|told| Progress::new(Teller(told.clone())));
        repo.snapshot_download()
            .revision(commit)
            .allow_patterns(patterns)
            .maybe_progress(progress)
            .send()
            .map_err(|e| self.failure("download", &e))
    }

    /// Every file must have the length that the listing promised: the client saves the text of an error in place of
    /// a file when the hub fails between its two requests. Such files are removed, so that the next run fetches them.
    fn verify(&self, snapshot: &Path, wanted: &[Remote]) -> Result<()> {
        let mut problems = Problems::new();
        for file in wanted {
            let path = snapshot.join(&file.path);
            let have = std::fs::metadata(&path).map_or(0, |m| m.len());
            if have == file.bytes && path.exists() {
                continue;
            }
            if let Ok(blob) = std::fs::canonicalize(&path) {
                let _ = std::fs::remove_file(blob);
                let _ = std::fs::remove_file(&path);
            }
            problems.push(
                Diagnostic::new(
                    "hub",
                    format!(
                        "{}: {} of {} bytes arrived",
                        file.path,
                        diag::count(have),
                        diag::count(file.bytes)
                    ),
                )
                .help("run again to fetch it again"),
            );
        }
        problems.finish(FailureKind::Failed, &format!("{} did not arrive whole", self.id), ())
    }

    /// Notes which commit a branch stood at, where offline runs and other tools look for it.
    fn remember(&self, commit: &str) -> Result<()> {
        if is_commit(&self.id.revision) {
            return Ok(());
        }
        let path = model_folder(self.id, self.environment).join("refs").join(&self.id.revision);
        let write = || {
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent)?;
            }
            std::fs::write(&path, commit)
        };
        write().map_err(|e| Failure::io("write", &path, &e))
    }

    fn odd_answer(&self, what: &str) -> Failure {
        Failure::one(
            FailureKind::Failed,
            format!("{} cannot be fetched", self.id),
            Diagnostic::new("hub", format!("{}: {what}", self.environment.endpoint())),
        )
    }

    /// A failure of the client: the hub's own reason, and the command that helps.
    fn failure(&self, doing: &str, error: &HFError) -> Failure {
        let (id, endpoint) = (self.id, self.environment.endpoint());
        let answer = Answer::of(error);
        let reason =
            answer.message.as_deref().map(|m| format!(" (the hub says: {m})")).unwrap_or_default();
        let log_in = match self.environment.token {
            Some(_) => "the token in use was not accepted: hf auth login, or another HF_TOKEN",
            None => "log in: hf auth login, or set HF_TOKEN",
        };
        let gated = answer.code.as_deref() == Some("GatedRepo") || answer.status == Some(403);
        let (message, help) = match (answer.status, error) {
            (Some(401 | 403), _) if gated => (
                format!("{} is gated{reason}", id.repo()),
                vec![format!("accept its terms on {endpoint}/{}", id.repo()), log_in.to_owned()],
            ),
            (Some(401), _) => (
                format!("{} does not exist, or it is private{reason}", id.repo()),
                vec!["check the name".to_owned(), log_in.to_owned()],
            ),
            (Some(404), HFError::EntryNotFound { path, .. }) => {
                (format!("{id} has no file {path}{reason}"), Vec::new())
            }
            (Some(404), _) if answer.code.as_deref() == Some("RevisionNotFound") => (
                format!("{} has no revision {}{reason}", id.repo(), id.revision),
                vec![format!("its branches and tags: {endpoint}/{}/tree/main", id.repo())],
            ),
            (Some(404), _) => (
                format!("the hub has no model {id}{reason}"),
                vec![format!("check the name; if a folder was meant, there is none at {id} here")],
            ),
            (Some(429), _) => (
                format!("{endpoint} limits the rate of requests{reason}"),
                vec![
                    "wait and run again; logged-in users have higher limits: hf auth login"
                        .to_owned(),
                ],
            ),
            (None, HFError::Request { .. }) => {
                let cached = from_cache(id, self.environment).is_some();
                let mut help = Vec::new();
                if cached {
                    help.push("the cache has a snapshot: HF_HUB_OFFLINE=1 uses it".to_owned());
                }
                help.push(format!(
                    "or fetch it on another machine ({}) and pass the folder",
                    download_command(id)
                ));
                (format!("{endpoint} cannot be reached: {}", chain(error)), help)
            }
            _ => (format!("cannot {doing} {id}: {}", chain(error)), Vec::new()),
        };
        let kind = match answer.status {
            Some(404) => FailureKind::Usage,
            _ => FailureKind::Failed,
        };
        let problem = help.into_iter().fold(Diagnostic::new("hub", message), Diagnostic::help);
        Failure::one(kind, format!("{id} cannot be fetched"), problem)
    }
}

/// First bytes of a weight file that are asked for. The headers of most shards end before (Gemma 4 31B: 13 shards with
/// 9 to 13 KB each), and 64 KiB are nothing beside a shard's 5 GB.
const FIRST_BYTES: u64 = 64 << 10;

/// Requests that are under way at a time.
const AT_A_TIME: usize = 8;

/// A part of a file.
#[derive(Debug, Clone)]
struct Piece {
    file: Remote,
    range: Range<u64>,
}

impl Piece {
    fn whole(file: &Remote) -> Piece {
        Piece { file: file.clone(), range: 0..file.bytes }
    }

    fn first(file: &Remote, bytes: u64) -> Piece {
        Piece { file: file.clone(), range: 0..bytes.min(file.bytes) }
    }

    fn len(&self) -> u64 {
        self.range.end.saturating_sub(self.range.start)
    }
}

/// Why a part of a file did not come.
enum Unread {
    Hub(HFError),
    /// Fewer bytes than asked for.
    Short(u64),
    /// More bytes than asked for: the range was ignored.
    Long,
}

/// Reads parts of files, as they come and no more than was asked for.
struct Parts<'a> {
    hub: &'a Hub<'a>,
    repo: HFRepository<RepoTypeModel>,
    commit: &'a str,
}

impl Parts<'_> {
    /// Saves files into a folder: of weights what goes up to the end of their headers, others whole. Returns the
    /// lengths of those that are there in part.
    fn save(&self, files: &[Remote], folder: &Path) -> Result<BTreeMap<String, u64>> {
        let first: Vec<Piece> =
            files
                .iter()
                .map(|f| {
                    if is_weights(&f.path) { Piece::first(f, FIRST_BYTES) } else { Piece::whole(f) }
                })
                .collect();
        let mut found = self.all(&first)?;
        // Headers that are longer than the first bytes; one that no file can have is left to the reader's verdict.
        let mut rest = Vec::new();
        for (at, (file, bytes)) in files.iter().zip(&found).enumerate() {
            let have = bytes.len() as u64;
            let end = safetensors::header_end(bytes).filter(|end| *end <= file.bytes);
            if let Some(end) = end.filter(|end| is_weights(&file.path) && *end > have) {
                rest.push((at, Piece { file: file.clone(), range: have..end }));
            }
        }
        let pieces: Vec<Piece> = rest.iter().map(|(_, piece)| piece.clone()).collect();
        for ((at, _), more) in rest.iter().zip(self.all(&pieces)?) {
            if let Some(bytes) = found.get_mut(*at) {
                bytes.extend_from_slice(&more);
            }
        }
        let mut lengths = BTreeMap::new();
        for (file, bytes) in files.iter().zip(&found) {
            let path = folder.join(&file.path);
            let write = || {
                if let Some(parent) = path.parent() {
                    std::fs::create_dir_all(parent)?;
                }
                std::fs::write(&path, bytes)
            };
            write().map_err(|e| Failure::io("write", &path, &e))?;
            if (bytes.len() as u64) < file.bytes {
                lengths.insert(file.path.clone(), file.bytes);
            }
        }
        Ok(lengths)
    }

    fn one(&self, piece: &Piece) -> Result<Vec<u8>> {
        let mut found = self.all(std::slice::from_ref(piece))?;
        Ok(found.pop().unwrap_or_default())
    }

    /// Every piece, in order; all that did not come are told together.
    fn all(&self, pieces: &[Piece]) -> Result<Vec<Vec<u8>>> {
        // A runtime must not be started inside another one, which a caller of this library may have: hence a thread.
        let run = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let mut found = Vec::with_capacity(pieces.len());
            for some in pieces.chunks(AT_A_TIME) {
                let reads = some.iter().map(|piece| Box::pin(self.read(piece)) as Reading<'_>);
                found.extend(runtime.block_on(together(reads.collect())));
            }
            Ok(found)
        };
        let ran: std::io::Result<Vec<Read>> = std::thread::scope(|scope| {
            let thread = scope.spawn(run);
            thread.join().unwrap_or_else(|_| Err(std::io::Error::other("the download stopped")))
        });
        let ran = ran.map_err(|e| {
            Failure::plain(FailureKind::Failed, format!("cannot start a download: {e}"))
        })?;
        let mut problems = Problems::new();
        let mut found = Vec::with_capacity(pieces.len());
        for (piece, read) in pieces.iter().zip(ran) {
            match read {
                Ok(bytes) => found.push(bytes),
                // The hub's own reason stands for all requests.
                Err(Unread::Hub(e)) => return Err(self.hub.failure("download", &e)),
                Err(why) => problems.push(self.problem(piece, &why)),
            }
        }
        let headline = format!("{} cannot be fetched in parts", self.hub.id);
        problems.finish(FailureKind::Failed, &headline, found)
    }

    fn problem(&self, piece: &Piece, why: &Unread) -> Diagnostic {
        let path = &piece.file.path;
        let wanted = diag::count(piece.len());
        match why {
            Unread::Long => Diagnostic::new(
                "hub",
                format!(
                    "{path}: more than the {wanted} bytes came that were asked for; {} does not serve parts of files",
                    self.hub.environment.endpoint()
                ),
            )
            .help(format!(
                "{} fetches all of it ({} here); then pass the folder",
                download_command(self.hub.id),
                diag::size(piece.file.bytes)
            )),
            Unread::Short(have) => Diagnostic::new(
                "hub",
                format!("{path}: {} of {wanted} bytes arrived", diag::count(*have)),
            )
            .help("run again to fetch it again"),
            Unread::Hub(e) => Diagnostic::new("hub", chain(e)),
        }
    }

    async fn read(&self, piece: &Piece) -> Read {
        let wanted = piece.len();
        if wanted == 0 {
            return Ok(Vec::new());
        }
        let part = wanted < piece.file.bytes;
        let request = self.repo.download_file_stream().filename(&piece.file.path);
        let request = request.revision(self.commit).maybe_range(part.then(|| piece.range.clone()));
        let (_, mut stream) = request.send().await.map_err(Unread::Hub)?;
        let mut bytes = Vec::new();
        while let Some(chunk) = poll_fn(|cx| Pin::new(&mut stream).poll_next(cx)).await {
            let chunk = chunk.map_err(Unread::Hub)?;
            // Dropping the stream ends the connection, however much more would come.
            if (bytes.len() as u64).saturating_add(chunk.len() as u64) > wanted {
                return Err(Unread::Long);
            }
            bytes.extend_from_slice(&chunk);
        }
        match bytes.len() as u64 {
            have if have < wanted => Err(Unread::Short(have)),
            _ => Ok(bytes),
        }
    }
}

type Read = std::result::Result<Vec<u8>, Unread>;
type Reading<'a> = Pin<Box<dyn Future<Output = Read> + 'a>>;

/// Waits for a few futures at a time; their results in order.
async fn together(mut waiting: Vec<Reading<'_>>) -> Vec<Read> {
    let mut done: Vec<Option<Read>> = waiting.iter().map(|_| None).collect();
    poll_fn(|cx| {
        for (future, slot) in waiting.iter_mut().zip(&mut done) {
            if slot.is_none()
                && let Poll::Ready(read) = future.as_mut().poll(cx)
            {
                *slot = Some(read);
            }
        }
        if done.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    done.into_iter().flatten().collect()
}

/// What the hub answered, as far as an error tells.
struct Answer {
    status: Option<u16>,
    code: Option<String>,
    message: Option<String>,
}

impl Answer {
    fn of(error: &HFError) -> Answer {
        let context = match error {
            HFError::Http { context }
            | HFError::AuthRequired { context }
            | HFError::Forbidden { context }
            | HFError::Conflict { context }
            | HFError::RateLimited { context, .. } => Some(context),
            HFError::RepoNotFound { context, .. }
            | HFError::RevisionNotFound { context, .. }
            | HFError::EntryNotFound { context, .. } => context.as_ref(),
            _ => None,
        };
        let Some(context) = context else {
            return Answer { status: None, code: None, message: None };
        };
        let clean = |text: &String| -> String {
            text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(300).collect()
        };
        Answer {
            status: Some(context.status.as_u16()),
            code: context.error_code.clone(),
            message: context.server_message.as_ref().map(clean).filter(|m| !m.is_empty()),
        }
    }
}

/// An error with its causes, without repeats.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let more = inner.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = inner.source();
    }
    text
}

/// Hands download events on.
struct Teller(OnTransfer);

impl ProgressHandler for Teller {
    fn on_progress(&self, event: &ProgressEvent) {
        match event {
            ProgressEvent::Download(DownloadEvent::Progress { files }) => {
                for file in files {
                    (self.0)(Transfer {
                        file: file.filename.clone(),
                        done: file.bytes_completed,
                        total: file.total_bytes,
                    });
                }
            }
            ProgressEvent::Download(DownloadEvent::AggregateProgress {
                bytes_completed,
                total_bytes,
                ..
            }) => {
                (self.0)(Transfer {
                    file: String::new(),
                    done: *bytes_completed,
                    total: *total_bytes,
                });
            }
            _ => {}
        }
    }
}
