//! Progress bars on stderr, on a terminal only; elsewhere one line that a download begins.

use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use radpack::checkpoint::{OnTransfer, Transfer};
use radpack::diag::{count, size};
use radpack::pipeline::Progress;

/// Two bars: source bytes hashed, source bytes encoded and written.
pub struct Bars {
    hashing: ProgressBar,
    writing: ProgressBar,
}

impl Bars {
    /// Bars for a source of that many bytes; hidden unless stderr is a terminal.
    pub fn new(hash_bytes: u64, weight_bytes: u64) -> Bars {
        let target = if std::io::stderr().is_terminal() {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let all = MultiProgress::with_draw_target(target);
        let bar = |label: &str, bytes: u64| {
            let bar = all.add(ProgressBar::new(bytes).with_style(style()));
            bar.set_prefix(label.to_owned());
            bar.enable_steady_tick(Duration::from_millis(250));
            bar
        };
        Bars { hashing: bar("hashing", hash_bytes), writing: bar("writing", weight_bytes) }
    }

    /// Removes the bars.
    pub fn finish(&self) {
        self.hashing.finish_and_clear();
        self.writing.finish_and_clear();
    }
}

fn style() -> ProgressStyle {
    ProgressStyle::with_template(
        "  {prefix:<8} {bar:30} {percent:>3}%  {binary_bytes_per_sec}  eta {eta} {msg}",
    )
    .unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// Shows downloads: a bar over all files of a model on a terminal, a line at its beginning elsewhere.
pub fn downloads() -> OnTransfer {
    let bar: Mutex<Option<ProgressBar>> = Mutex::new(None);
    let terminal = std::io::stderr().is_terminal();
    // Nobody can be told that stderr is closed.
    let line = move |text: String| {
        if !terminal {
            let _ = writeln!(std::io::stderr().lock(), "{text}");
        }
    };
    Arc::new(move |event| {
        let mut bar = bar.lock().unwrap_or_else(PoisonError::into_inner);
        match (event, &*bar) {
            (Transfer::Begun { model, files, bytes }, _) => {
                let files = format!(
                    "{} {}",
                    count(files as u64),
                    if files == 1 { "file" } else { "files" }
                );
                line(format!("fetching  {model}: {files}, {}", size(bytes)));
                if terminal {
                    let new = ProgressBar::new(bytes).with_style(style());
                    new.set_prefix("fetching");
                    new.enable_steady_tick(Duration::from_millis(250));
                    *bar = Some(new);
                }
            }
            (Transfer::Bytes { sum, .. }, Some(bar)) => {
                bar.set_position(sum);
                bar.set_message("");
            }
            (Transfer::Paused { why, pause, .. }, Some(bar)) => {
                bar.set_message(format!("· {why}, again in {} s", pause.as_secs_f64().ceil()));
            }
            (Transfer::Ended, Some(_)) => {
                if let Some(bar) = bar.take() {
                    bar.finish_and_clear();
                }
            }
            _ => {}
        }
    })
}

impl Progress for Bars {
    fn hashed(&self, bytes: u64) {
        self.hashing.inc(bytes);
    }

    fn encoded(&self, source_bytes: u64) {
        self.writing.inc(source_bytes);
    }
}
