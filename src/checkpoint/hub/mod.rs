//! Models on the Hugging Face hub: the only network code.
//!
//! A model is fetched into the usual cache (`models--ORG--NAME/{blobs,refs,snapshots}`), where other tools find it
//! too, and opened from there. Only what a conversion needs is fetched: the weight files that count, and the side
//! files, judged by the same rules as a folder's.
//!
//! Plans and estimates read no weights, so [`fetch_heads`] takes the first bytes of every weight file, up to the end of
//! its header, in place of the file. These go to a folder of this process's own: a cache holds whole files.
//!
//! hf-hub looks up and lists. Whole files are fetched by [`download`], since hf-hub 1.0.0 begins an interrupted file
//! anew, compares no digest, and does not look at the status of the answer that it saves.

mod answer;
mod download;
mod heads;

use std::path::PathBuf;
use std::time::Duration;

use hf_hub::repository::{RepoTreeEntry, RepoTypeModel};
use hf_hub::{HFClient, HFClientSync, HFRepositorySync, HFResult};

use answer::Answer;
use heads::{Parts, Piece};

use super::folder::{Heads, SUBFOLDERS, is_inner_path};
use super::index::{Index, MAX_INDEX_BYTES};
use super::json::JsonFile;
use super::layout::{self, Layout};
use super::reader::{CONFIGS, holds_only_adapter};
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
    let hub = Hub { id, environment, on_transfer };
    let repo = hub.connect()?;
    let commit = hub.commit(&repo)?;
    let files = hub.list(&repo, &commit)?;
    let read_index = |file: &Remote| {
        // A small file, and no download that anybody waits for.
        let quiet = Hub { on_transfer: None, ..hub };
        let path = download::fetch(&quiet, &commit, std::slice::from_ref(file))?.join(&file.path);
        std::fs::read(&path).map_err(|e| Failure::io("read", &path, &e))
    };
    let wanted = hub.choose(&files, &read_index)?;
    let snapshot = download::fetch(&hub, &commit, &wanted)?;
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
    let hub = Hub { id, environment, on_transfer: None };
    let repo = hub.connect()?;
    let commit = hub.commit(&repo)?;
    let identity = HubIdentity { repo: id.repo(), commit: commit.clone() };
    let files = hub.list(&repo, &commit)?;
    let client = hub.client()?;
    let parts = Parts::new(&hub, client.model(&id.org, &id.name), &commit);
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
    /// Of the git object: of the file, or of the pointer to it in Git LFS.
    oid: String,
    lfs: bool,
}

/// Attempts after the first that fail one after the other without a byte. The pauses between them double.
const RETRIES: u32 = 5;

/// Longest pause that a hub may ask for. It limits requests by windows of five minutes.
const MAX_PAUSE: Duration = Duration::from_secs(300);

#[derive(Clone, Copy)]
struct Hub<'a> {
    id: &'a HubId,
    environment: &'a HubEnvironment,
    on_transfer: Option<&'a OnTransfer>,
}

impl Hub<'_> {
    fn client(&self) -> Result<HFClient> {
        let mut builder = HFClient::builder()
            .endpoint(self.environment.endpoint())
            .cache_dir(&self.environment.cache)
            .client(self.http(reqwest::redirect::Policy::default())?)
            // Ours know how long the hub asks to wait.
            .retry_max_attempts(0);
        if let Some(token) = &self.environment.token {
            builder = builder.token(token);
        }
        builder.build().map_err(|e| self.failure("connect to the hub", &Answer::of(&e)))
    }

    /// A client that gives up on a connection that brings nothing.
    fn http(&self, redirects: reqwest::redirect::Policy) -> Result<reqwest::Client> {
        reqwest::Client::builder()
            .user_agent(concat!("radpack/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(self.environment.timeout)
            .read_timeout(self.environment.timeout)
            .redirect(redirects)
            .build()
            .map_err(|e| self.failure("connect to the hub", &Answer::of_transport(&e)))
    }

    /// Asks until there is an answer, as long as another attempt may bring one.
    fn ask<T>(&self, doing: &str, mut request: impl FnMut() -> HFResult<T>) -> Result<T> {
        let mut failed = 0;
        loop {
            let answer = match request() {
                Ok(answer) => return Ok(answer),
                Err(e) => Answer::of(&e),
            };
            match self.pause(&answer, failed) {
                // Nothing is on its way that would be lost.
                Some(_) if answer.unreachable() && failed >= 2 => {
                    return Err(self.failure(doing, &answer));
                }
                Some(pause) => {
                    self.tell_pause("", &answer, pause);
                    std::thread::sleep(pause);
                }
                None => return Err(self.failure(doing, &answer)),
            }
            failed += 1;
        }
    }

    /// How long to wait before the next attempt; `None` where there is to be none.
    fn pause(&self, answer: &Answer, failed: u32) -> Option<Duration> {
        let own = self.environment.pause.saturating_mul(1 << failed.min(10));
        let pause = answer.retry_after.map_or(own, |asked| asked.max(own));
        (answer.passes() && failed < RETRIES && pause <= MAX_PAUSE).then_some(pause)
    }

    fn tell_pause(&self, file: &str, answer: &Answer, pause: Duration) {
        let file = file.to_owned();
        self.tell(Transfer::Paused { file, why: self.reason(answer), pause });
    }

    fn tell(&self, event: Transfer) {
        if let Some(told) = self.on_transfer {
            told(event);
        }
    }

    fn connect(&self) -> Result<HFRepositorySync<RepoTypeModel>> {
        let client = HFClientSync::from_inner(self.client()?)
            .map_err(|e| self.failure("connect to the hub", &Answer::of(&e)))?;
        Ok(client.model(&self.id.org, &self.id.name))
    }

    fn commit(&self, repo: &HFRepositorySync<RepoTypeModel>) -> Result<String> {
        let info = self.ask("look up", || repo.info().revision(&self.id.revision).send())?;
        let commit = info.sha.unwrap_or_default();
        // The commit becomes part of paths in the cache.
        if is_commit(&commit) {
            return Ok(commit);
        }
        Err(self.odd_answer("the hub gives no commit for this revision"))
    }

    fn list(&self, repo: &HFRepositorySync<RepoTypeModel>, commit: &str) -> Result<Vec<Remote>> {
        let list = || repo.list_tree().revision(commit).recursive(true).send();
        let mut files: Vec<Remote> = self
            .ask("list", list)?
            .into_iter()
            .filter_map(|entry| match entry {
                RepoTreeEntry::File { path, size, oid, lfs, .. } => {
                    Some(Remote { path, bytes: size, oid, lfs: lfs.is_some() })
                }
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
}
