//! Progress bars on stderr, on a terminal only.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
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
            let style = ProgressStyle::with_template(
                "  {prefix:<8} {bar:30} {percent:>3}%  {binary_bytes_per_sec}  eta {eta}",
            )
            .unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = all.add(ProgressBar::new(bytes).with_style(style));
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

impl Progress for Bars {
    fn hashed(&self, bytes: u64) {
        self.hashing.inc(bytes);
    }

    fn encoded(&self, source_bytes: u64) {
        self.writing.inc(source_bytes);
    }
}
