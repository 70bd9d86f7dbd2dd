//! Where text goes: results to stdout, diagnostics to stderr. A closed pipe is no error.

use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;

use radpack::diag::{Diagnostic, Failure, Result, Style, render_failure, render_warning};
use serde::Serialize;

use super::documents::FailureDocument;

/// Puts a file of these bytes under a name, at once: an older one stays until the new one is complete.
///
/// # Errors
/// An I/O failure; nothing is left behind.
pub fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let fail = |e: io::Error| Failure::io("write", path, &e);
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut partial = tempfile::NamedTempFile::new_in(folder).map_err(fail)?;
    partial.write_all(bytes).map_err(fail)?;
    partial.as_file().sync_all().map_err(fail)?;
    // A temporary file is private; what a command writes is an ordinary file.
    let ordinary = std::fs::Permissions::from_mode(0o644);
    partial.as_file().set_permissions(ordinary).map_err(fail)?;
    partial.persist(path).map_err(|e| fail(e.error))?;
    Ok(())
}

/// Streams and how to write to them.
pub struct Output {
    json: bool,
    style: Style,
}

impl Output {
    /// Output for this run; `json` asks for one document on stdout.
    pub fn new(json: bool) -> Output {
        let plain = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
        Output { json, style: Style { colour: io::stderr().is_terminal() && !plain } }
    }

    /// Whether stdout carries one JSON document instead of text.
    pub fn json(&self) -> bool {
        self.json
    }

    /// Writes a result as text.
    ///
    /// # Errors
    /// An I/O failure other than a closed pipe.
    pub fn text(&self, text: &str) -> Result<()> {
        self.bytes(text.as_bytes())
    }

    /// Writes a result as bytes.
    ///
    /// # Errors
    /// An I/O failure other than a closed pipe.
    pub fn bytes(&self, bytes: &[u8]) -> Result<()> {
        let mut out = io::stdout().lock();
        match out.write_all(bytes).and_then(|()| out.flush()) {
            Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
                Err(Failure::io("write to", std::path::Path::new("standard output"), &e))
            }
            _ => Ok(()),
        }
    }

    /// Writes a result as one JSON document.
    ///
    /// # Errors
    /// An I/O failure other than a closed pipe.
    pub fn document(&self, document: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string_pretty(document).map_err(|e| {
            Failure::plain(radpack::diag::FailureKind::Failed, format!("cannot print JSON: {e}"))
        })?;
        self.text(&format!("{text}\n"))
    }

    /// Writes a line that is no result.
    pub fn note(&self, line: &str) {
        // Nobody can be told that stderr is closed.
        let _ = writeln!(io::stderr().lock(), "{line}");
    }

    /// Writes problems that did not stop the run.
    pub fn warnings<'a>(&self, problems: impl IntoIterator<Item = &'a Diagnostic>) {
        for problem in problems {
            let _ = io::stderr().lock().write_all(render_warning(problem, self.style).as_bytes());
        }
    }

    /// Reports a failed run and returns its exit code.
    pub fn failure(&self, failure: &Failure) -> ExitCode {
        let text = render_failure(failure, self.style);
        let _ = io::stderr().lock().write_all(text.as_bytes());
        if self.json {
            // The exit code already tells; a second failure here has nowhere to go.
            let _ = self.document(&FailureDocument::of(failure));
        }
        ExitCode::from(failure.kind.exit_code())
    }
}
