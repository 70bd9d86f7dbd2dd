//! What a user can name as a source: a path, or a model on the hub.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A model on the hub: `ORG/NAME` or `ORG/NAME@REVISION`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubId {
    /// Organisation or user.
    pub org: String,
    /// Name of the model.
    pub name: String,
    /// Branch, tag or commit; `main` unless given.
    pub revision: String,
}

impl HubId {
    /// Reads `ORG/NAME[@REVISION]`; `None` when the text has another form. Names hold letters, digits, `.`, `_` and
    /// `-`, and a revision no `..`, so that neither can leave the cache folder that they become part of.
    pub fn parse(text: &str) -> Option<HubId> {
        let (id, revision) = match text.split_once('@') {
            Some((id, revision)) => (id, revision),
            None => (text, "main"),
        };
        let (org, name) = id.split_once('/')?;
        let plain = |part: &str| {
            !part.is_empty()
                && part.len() <= 96
                && !part.starts_with(['.', '-'])
                && !part.contains("..")
                && !part.contains("--")
                && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        };
        let sound = plain(org)
            && plain(name)
            && super::folder::is_inner_path(revision)
            && !revision.contains([' ', '@', ':']);
        let owned = |part: &str| part.to_owned();
        sound.then(|| HubId { org: owned(org), name: owned(name), revision: owned(revision) })
    }

    /// `ORG/NAME`.
    pub fn repo(&self) -> String {
        format!("{}/{}", self.org, self.name)
    }
}

impl fmt::Display for HubId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.org, self.name)?;
        if self.revision == "main" { Ok(()) } else { write!(f, "@{}", self.revision) }
    }
}

/// Whether a source names a model on the hub. A path that exists always wins.
pub fn is_hub_id(source: &str) -> bool {
    HubId::parse(source).is_some() && !Path::new(source).exists()
}

/// A model on the hub as it was fetched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubIdentity {
    /// `ORG/NAME`.
    pub repo: String,
    /// The commit, 40 hex digits.
    pub commit: String,
}

/// The settings of the hub that the environment gives. Read here and handed on explicitly, so that the answer does
/// not depend on which of them a release of the client library reads by itself.
#[derive(Clone, PartialEq, Eq)]
pub struct HubEnvironment {
    /// Base address (`HF_ENDPOINT`); `None` for `https://huggingface.co`.
    pub endpoint: Option<String>,
    /// Cache of snapshots (`HF_HUB_CACHE`, else `HF_HOME/hub`, else `~/.cache/huggingface/hub`).
    pub cache: PathBuf,
    /// Access token (`HF_TOKEN`, else the file `HF_TOKEN_PATH`, else the file `HF_HOME/token`).
    pub token: Option<String>,
    /// Whether only the cache may be used (`HF_HUB_OFFLINE`).
    pub offline: bool,
    /// How long a connection may bring nothing (`HF_HUB_DOWNLOAD_TIMEOUT` in seconds, else 10, as huggingface_hub has
    /// it).
    pub timeout: Duration,
    /// Pause before the second attempt at a request that failed; it doubles with every further one.
    pub pause: Duration,
}

impl Default for HubEnvironment {
    fn default() -> HubEnvironment {
        HubEnvironment {
            endpoint: None,
            cache: PathBuf::new(),
            token: None,
            offline: false,
            timeout: Duration::from_secs(10),
            pause: Duration::from_millis(500),
        }
    }
}

impl fmt::Debug for HubEnvironment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubEnvironment")
            .field("endpoint", &self.endpoint)
            .field("cache", &self.cache)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .field("offline", &self.offline)
            .field("timeout", &self.timeout)
            .field("pause", &self.pause)
            .finish()
    }
}

impl HubEnvironment {
    /// The settings of this process.
    pub fn from_process() -> HubEnvironment {
        HubEnvironment::from_lookup(|name| std::env::var(name).ok())
    }

    /// The settings under a lookup of variables; empty values count as unset.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> HubEnvironment {
        let get = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let home = get("HF_HOME")
            .map(PathBuf::from)
            .or_else(|| get("XDG_CACHE_HOME").map(|dir| Path::new(&dir).join("huggingface")))
            .unwrap_or_else(|| {
                let user = get("HOME").map_or_else(|| PathBuf::from("."), PathBuf::from);
                user.join(".cache/huggingface")
            });
        let cache = get("HF_HUB_CACHE")
            .or_else(|| get("HUGGINGFACE_HUB_CACHE"))
            .map_or_else(|| home.join("hub"), PathBuf::from);
        let from_file = |path: PathBuf| {
            let text = std::fs::read_to_string(path).ok()?;
            let token = text.trim();
            (!token.is_empty()).then(|| token.to_owned())
        };
        let token = get("HF_TOKEN")
            .map(|token| token.trim().to_owned())
            .or_else(|| get("HF_TOKEN_PATH").and_then(|path| from_file(PathBuf::from(path))))
            .or_else(|| from_file(home.join("token")));
        let offline = get("HF_HUB_OFFLINE")
            .is_some_and(|v| ["1", "on", "yes", "true"].contains(&v.to_ascii_lowercase().as_str()));
        let endpoint = get("HF_ENDPOINT").map(|e| e.trim_end_matches('/').to_owned());
        let unset = HubEnvironment::default();
        let timeout = get("HF_HUB_DOWNLOAD_TIMEOUT")
            .and_then(|text| text.trim().parse().ok())
            .filter(|seconds| *seconds > 0.0)
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
            .unwrap_or(unset.timeout);
        HubEnvironment { endpoint, cache, token, offline, timeout, ..unset }
    }

    /// The base address in use.
    pub fn endpoint(&self) -> &str {
        self.endpoint.as_deref().unwrap_or("https://huggingface.co")
    }
}

/// Progress of a download. Files that are in the cache already are not part of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transfer {
    /// A download begins.
    Begun {
        /// The model, as its id names it.
        model: String,
        /// Files that are missing.
        files: usize,
        /// Their bytes in all, including those that an earlier run left.
        bytes: u64,
    },
    /// A file has so many bytes here. The numbers go down only when a file has to begin anew.
    Bytes {
        /// File within the repository.
        file: String,
        /// Its bytes that are here.
        done: u64,
        /// Its bytes in all.
        of: u64,
        /// Bytes of all files that are here.
        sum: u64,
        /// Their bytes in all, as in [`Transfer::Begun`].
        total: u64,
    },
    /// Something went wrong, and there will be another attempt.
    Paused {
        /// File within the repository; empty for a question about the repository.
        file: String,
        /// What went wrong.
        why: String,
        /// How long until then.
        pause: Duration,
    },
    /// The download ended, well or not.
    Ended,
}

/// Receives the progress of downloads, from any thread.
pub type OnTransfer = Arc<dyn Fn(Transfer) + Send + Sync>;

/// How much of a model on the hub is fetched. Sources on the disk are always opened as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Extent {
    /// Weights, configs and side files, into the usual cache.
    #[default]
    Everything,
    /// Side files, and of weights their headers: what a plan needs. No cache is touched.
    Headers,
    /// Configs, and of weights their headers: what an estimate needs. No cache is touched.
    Configs,
}

/// How to open a source.
#[derive(Clone, Default)]
pub struct OpenOptions {
    /// Settings of the hub; `None` reads those of the process when a hub id is opened.
    pub hub: Option<HubEnvironment>,
    /// Told about downloads.
    pub on_transfer: Option<OnTransfer>,
    /// How much of a model on the hub is needed. A snapshot in the cache that holds everything is always used.
    pub extent: Extent,
}

impl fmt::Debug for OpenOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenOptions")
            .field("hub", &self.hub)
            .field("extent", &self.extent)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_ids_are_told_from_paths() {
        let id = HubId::parse("google/gemma-4-31B-it").expect("an id");
        assert_eq!((id.repo().as_str(), id.revision.as_str()), ("google/gemma-4-31B-it", "main"));
        assert_eq!(id.to_string(), "google/gemma-4-31B-it");
        let id = HubId::parse("a/b@refs/pr/3").expect("an id");
        assert_eq!(id.revision, "refs/pr/3");
        assert_eq!(id.to_string(), "a/b@refs/pr/3");
        for path in [
            "b",
            "./a/b",
            "/a/b",
            "a/b/c",
            "a/",
            "a/b@",
            "a/b@../../x",
            "../b",
            "a/..",
            "a b/c",
            "a/b@x y",
        ] {
            assert_eq!(HubId::parse(path), None, "{path}");
        }
        // A path that exists wins: tests run in the package's folder.
        assert!(HubId::parse("src/checkpoint").is_some());
        assert!(!is_hub_id("src/checkpoint"));
        assert!(is_hub_id("no-such-org/no-such-model"));
    }

    #[test]
    fn the_environment_decides_cache_endpoint_token_and_offline_mode() {
        let with = |vars: &'static [(&'static str, &'static str)]| {
            HubEnvironment::from_lookup(move |name| {
                vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned())
            })
        };
        let plain = with(&[("HOME", "/nonexistent/u")]);
        assert_eq!(plain.cache, Path::new("/nonexistent/u/.cache/huggingface/hub"));
        assert_eq!(plain.endpoint(), "https://huggingface.co");
        assert_eq!((plain.token, plain.offline), (None, false));
        let home = with(&[
            ("HF_HOME", "/nonexistent/h"),
            ("HF_ENDPOINT", "http://x:1/"),
            ("HF_TOKEN", "t "),
        ]);
        assert_eq!(home.cache, Path::new("/nonexistent/h/hub"));
        assert_eq!(home.endpoint(), "http://x:1");
        assert_eq!(home.token.as_deref(), Some("t"));
        assert!(!format!("{home:?}").contains("\"t\""));
        let all = with(&[
            ("HF_HOME", "/nonexistent/h"),
            ("HF_HUB_CACHE", "/c"),
            ("HF_HUB_OFFLINE", "True"),
        ]);
        assert_eq!(all.cache, Path::new("/c"));
        assert!(all.offline);
        assert!(!with(&[("HF_HUB_OFFLINE", "0")]).offline);
        assert_eq!(with(&[("HF_HUB_DOWNLOAD_TIMEOUT", "45")]).timeout, Duration::from_secs(45));
        assert_eq!(with(&[("HF_HUB_DOWNLOAD_TIMEOUT", "0.5")]).timeout, Duration::from_millis(500));
        for odd in ["0", "-1", "soon", "nan", "1e300"] {
            let lookup = |name: &str| (name == "HF_HUB_DOWNLOAD_TIMEOUT").then(|| odd.to_owned());
            assert_eq!(
                HubEnvironment::from_lookup(lookup).timeout,
                Duration::from_secs(10),
                "{odd}"
            );
        }
    }

    #[test]
    fn a_token_file_is_read_where_no_variable_holds_the_token() {
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::write(dir.path().join("token"), "from-home\n").expect("written");
        let other = dir.path().join("other");
        std::fs::write(&other, "from-path\n").expect("written");
        let home = dir.path().to_string_lossy().into_owned();
        let path = other.to_string_lossy().into_owned();
        let environment =
            HubEnvironment::from_lookup(|name| (name == "HF_HOME").then(|| home.clone()));
        assert_eq!(environment.token.as_deref(), Some("from-home"));
        let environment = HubEnvironment::from_lookup(|name| match name {
            "HF_HOME" => Some(home.clone()),
            "HF_TOKEN_PATH" => Some(path.clone()),
            _ => None,
        });
        assert_eq!(environment.token.as_deref(), Some("from-path"));
    }
}
