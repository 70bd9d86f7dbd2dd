//! What the hub answered in place of what was asked for, and what helps.

use std::time::Duration;

use hf_hub::HFError;

use super::{Hub, download_command, from_cache};
use crate::diag::{Diagnostic, Failure, FailureKind};

/// What the hub answered, as far as an error tells.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    /// Status of HTTP, where there was an answer.
    pub status: Option<u16>,
    /// How long the hub asks to wait.
    pub retry_after: Option<Duration>,
    /// The error with its causes.
    pub text: String,
    code: Option<String>,
    message: Option<String>,
    /// The file that was asked for.
    path: Option<String>,
    missing_file: bool,
    trouble: Trouble,
}

/// What came in the way of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trouble {
    /// Nothing: the hub answered.
    None,
    /// The connection brought nothing for as long as we wait.
    Silence,
    /// No connection came about.
    NoConnection,
    /// It ended early.
    Connection,
    /// Something that another attempt will not change.
    Other,
}

impl Answer {
    /// Of an error of hf-hub.
    pub fn of(error: &HFError) -> Answer {
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
        let text = without_queries(&chain(error));
        let Some(context) = context else {
            return match error {
                HFError::Request { source, .. } => Answer { text, ..Answer::of_transport(source) },
                _ => Answer { text, ..Answer::none(Trouble::Other) },
            };
        };
        Answer {
            status: Some(context.status.as_u16()),
            retry_after: match error {
                HFError::RateLimited { retry_after, .. } => *retry_after,
                _ => None,
            },
            code: context.error_code.clone(),
            message: context.server_message.as_deref().and_then(plain),
            path: match error {
                HFError::EntryNotFound { path, .. } => Some(path.clone()),
                _ => None,
            },
            missing_file: matches!(error, HFError::EntryNotFound { .. }),
            text,
            trouble: Trouble::None,
        }
    }

    /// Of an answer to a request for a file; `None` when it is the file, or leads to it.
    pub fn of_response(response: &reqwest::Response, path: &str) -> Option<Answer> {
        let status = response.status();
        if status.is_success() || status.is_redirection() {
            return None;
        }
        let header = |name: &str| response.headers().get(name)?.to_str().ok();
        Some(Answer {
            status: Some(status.as_u16()),
            // The other form, a date, is not what the hub sends.
            retry_after: header("retry-after")
                .and_then(|text| text.trim().parse().ok())
                .map(Duration::from_secs),
            code: header("x-error-code").map(str::to_owned),
            message: header("x-error-message").and_then(plain),
            path: Some(path.to_owned()),
            missing_file: status.as_u16() == 404,
            text: format!("{path}: {status}"),
            trouble: Trouble::None,
        })
    }

    /// Of a connection that failed.
    pub fn of_transport(error: &reqwest::Error) -> Answer {
        let trouble = match error {
            e if e.is_timeout() => Trouble::Silence,
            e if e.is_builder() => Trouble::Other,
            e if e.is_connect() => Trouble::NoConnection,
            _ => Trouble::Connection,
        };
        Answer { text: without_queries(&chain(error)), ..Answer::none(trouble) }
    }

    /// A body that ended before its end.
    pub fn ended_early(path: &str, have: u64, of: u64) -> Answer {
        let [have, of] = [have, of].map(crate::diag::count);
        Answer {
            text: format!("the connection ended after {have} of {of} bytes"),
            path: Some(path.to_owned()),
            ..Answer::none(Trouble::Connection)
        }
    }

    /// The file that was asked for; empty for none.
    pub fn path(&self) -> &str {
        self.path.as_deref().unwrap_or_default()
    }

    /// Whether no connection came about.
    pub fn unreachable(&self) -> bool {
        self.trouble == Trouble::NoConnection
    }

    /// The same, about a file.
    pub fn about(self, path: &str) -> Answer {
        Answer { path: Some(path.to_owned()), ..self }
    }

    fn none(trouble: Trouble) -> Answer {
        Answer {
            status: None,
            retry_after: None,
            text: String::new(),
            code: None,
            message: None,
            path: None,
            missing_file: false,
            trouble,
        }
    }

    /// Whether another attempt may have another answer.
    pub fn passes(&self) -> bool {
        matches!(self.trouble, Trouble::Silence | Trouble::NoConnection | Trouble::Connection)
            || matches!(self.status, Some(408 | 429 | 500 | 502 | 503 | 504))
    }
}

impl Hub<'_> {
    /// Why something did not come, in a few words.
    pub(super) fn reason(&self, answer: &Answer) -> String {
        let endpoint = self.environment.endpoint();
        match (answer.status, answer.trouble) {
            (Some(429), _) => format!("{endpoint} limits the rate of requests"),
            (Some(status), _) => format!("{endpoint} answers {}", status_line(status)),
            (None, Trouble::Silence) => {
                let seconds = self.environment.timeout.as_secs_f64();
                format!("{endpoint} sent nothing for {seconds} s")
            }
            (None, _) => answer.text.clone(),
        }
    }

    /// The hub's own reason, and the command that helps.
    pub(super) fn failure(&self, doing: &str, answer: &Answer) -> Failure {
        let (id, endpoint) = (self.id, self.environment.endpoint());
        let reason =
            answer.message.as_deref().map(|m| format!(" (the hub says: {m})")).unwrap_or_default();
        let of_file = answer.path.as_deref().map(|p| format!("{p}: ")).unwrap_or_default();
        let log_in = match self.environment.token {
            Some(_) => "the token in use was not accepted: hf auth login, or another HF_TOKEN",
            None => "log in: hf auth login, or set HF_TOKEN",
        };
        let goes_on = "run again: a download goes on where it stopped".to_owned();
        let elsewhere = format!(
            "or fetch it on another machine ({}) and pass the folder",
            download_command(id)
        );
        let gated = answer.code.as_deref() == Some("GatedRepo") || answer.status == Some(403);
        let (message, help) = match (answer.status, answer.trouble) {
            (Some(401 | 403), _) if gated => (
                format!("{} is gated{reason}", id.repo()),
                vec![format!("accept its terms on {endpoint}/{}", id.repo()), log_in.to_owned()],
            ),
            (Some(401), _) => (
                format!("{} does not exist, or it is private{reason}", id.repo()),
                vec!["check the name".to_owned(), log_in.to_owned()],
            ),
            (Some(404), _) if answer.missing_file => {
                let path = answer.path.as_deref().unwrap_or_default();
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
            (Some(429), _) => {
                let wait = match answer.retry_after {
                    Some(wait) => format!("wait {} s, as it asks, and run again", wait.as_secs()),
                    None => "wait and run again".to_owned(),
                };
                let higher = "logged-in users have higher limits: hf auth login";
                (
                    format!("{endpoint} limits the rate of requests{reason}"),
                    vec![format!("{wait}; {higher}")],
                )
            }
            (Some(status @ 500..=599), _) => (
                format!("{of_file}{endpoint} answers {}{reason}", status_line(status)),
                vec![format!("the hub has a problem of its own, try later; {goes_on}"), elsewhere],
            ),
            (None, Trouble::Silence) => {
                let seconds = self.environment.timeout.as_secs_f64();
                (
                    format!("{of_file}{endpoint} sent nothing for {seconds} s"),
                    vec![
                        goes_on,
                        "HF_HUB_DOWNLOAD_TIMEOUT=60 waits longer (seconds)".to_owned(),
                        elsewhere,
                    ],
                )
            }
            (None, Trouble::NoConnection | Trouble::Connection) => {
                let mut help = Vec::new();
                if from_cache(id, self.environment).is_some() {
                    help.push("the cache has a snapshot: HF_HUB_OFFLINE=1 uses it".to_owned());
                }
                if answer.path.is_some() {
                    help.push(goes_on);
                }
                help.push(elsewhere);
                let message = match &answer.path {
                    Some(path) => format!("{path} cannot be fetched: {}", answer.text),
                    None => format!("{endpoint} cannot be reached: {}", answer.text),
                };
                (message, help)
            }
            _ => (format!("cannot {doing} {id}: {}", answer.text), Vec::new()),
        };
        let kind = match answer.status {
            Some(404) => FailureKind::Usage,
            _ => FailureKind::Failed,
        };
        let problem = help.into_iter().fold(Diagnostic::new("hub", message), Diagnostic::help);
        Failure::one(kind, format!("{id} cannot be fetched"), problem)
    }
}

/// `503 Service Unavailable`.
fn status_line(status: u16) -> String {
    let known = reqwest::StatusCode::from_u16(status).ok().and_then(|s| s.canonical_reason());
    format!("{status} {}", known.unwrap_or_default()).trim_end().to_owned()
}

/// A text of the hub for one line.
fn plain(text: &str) -> Option<String> {
    let text: String =
        text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(300).collect();
    (!text.is_empty()).then_some(text)
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

/// A text without what follows `?` in its addresses: those of a file's place carry a signature that opens it.
fn without_queries(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, address) = rest.split_at(at);
        let end = address.find([' ', ')', '"', '\n']).unwrap_or(address.len());
        let (address, after) = address.split_at(end);
        out.push_str(before);
        out.push_str(address.split('?').next().unwrap_or_default());
        rest = after;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_of_addresses_are_not_repeated() {
        let text = "request error for url (https://cdn.x/a/b?Signature=secret&Key=1): reset (http://y/?q=2)";
        assert_eq!(
            without_queries(text),
            "request error for url (https://cdn.x/a/b): reset (http://y/)"
        );
        assert_eq!(without_queries("what? https://x/y"), "what? https://x/y");
        assert_eq!(without_queries("://"), "://");
    }

    #[test]
    fn only_troubles_that_pass_are_tried_again() {
        let of = |status: u16| Answer { status: Some(status), ..Answer::none(Trouble::None) };
        let passing: Vec<u16> = (100..600).filter(|s| of(*s).passes()).collect();
        assert_eq!(passing, [408, 429, 500, 502, 503, 504]);
        assert!(Answer::ended_early("a", 1, 2).passes());
        assert!(Answer::none(Trouble::Silence).passes());
        assert!(!Answer::none(Trouble::Other).passes());
    }
}
