//! Files of a model in part: of weights the headers.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::path::Path;
use std::pin::Pin;
use std::task::Poll;

use futures_core::Stream;
use hf_hub::repository::RepoTypeModel;
use hf_hub::{HFError, HFRepository};

use super::answer::Answer;
use super::{Hub, Remote, download_command, is_weights};
use crate::checkpoint::safetensors;
use crate::diag::{self, Diagnostic, Failure, FailureKind, Problems, Result};

/// First bytes of a weight file that are asked for. The headers of most shards end before (Gemma 4 31B: 13 shards with
/// 9 to 13 KB each), and 64 KiB are nothing beside a shard's 5 GB.
const FIRST_BYTES: u64 = 64 << 10;

/// Requests that are under way at a time.
const AT_A_TIME: usize = 8;

/// A part of a file.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    file: Remote,
    range: Range<u64>,
}

impl Piece {
    pub fn whole(file: &Remote) -> Piece {
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
pub(super) struct Parts<'a> {
    hub: &'a Hub<'a>,
    repo: HFRepository<RepoTypeModel>,
    commit: &'a str,
}

impl<'a> Parts<'a> {
    /// Of a commit.
    pub fn new(hub: &'a Hub<'a>, repo: HFRepository<RepoTypeModel>, commit: &'a str) -> Parts<'a> {
        Parts { hub, repo, commit }
    }

    /// Saves files into a folder: of weights what goes up to the end of their headers, others whole. Returns the
    /// lengths of those that are there in part.
    pub fn save(&self, files: &[Remote], folder: &Path) -> Result<BTreeMap<String, u64>> {
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

    /// One piece.
    pub fn one(&self, piece: &Piece) -> Result<Vec<u8>> {
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
                let reads = some.iter().map(|piece| Box::pin(self.patiently(piece)) as Reading<'_>);
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
                Err(Unread::Hub(e)) => return Err(self.hub.failure("download", &Answer::of(&e))),
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
            Unread::Hub(e) => Diagnostic::new("hub", Answer::of(e).text),
        }
    }

    async fn patiently(&self, piece: &Piece) -> Read {
        let mut failed = 0;
        loop {
            let read = self.read(piece).await;
            let Err(Unread::Hub(error)) = &read else { return read };
            let answer = Answer::of(error);
            let Some(pause) = self.hub.pause(&answer, failed) else { return read };
            self.hub.tell_pause(&piece.file.path, &answer, pause);
            tokio::time::sleep(pause).await;
            failed += 1;
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
