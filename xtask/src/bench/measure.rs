//! What a process takes: time, processor time, memory.

use std::fs;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::{Result, build};

/// What one run took.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Usage {
    /// Seconds from start to end.
    pub wall: f64,
    /// Seconds of processor time, of all threads.
    pub cpu: f64,
    /// Largest resident set in bytes, mapped files included; the kernel keeps this maximum.
    pub peak_rss: u64,
    /// Largest sampled resident set without file mappings, in bytes.
    pub peak_anonymous: u64,
    /// How often memory was sampled.
    pub samples: u32,
}

/// Time between two looks at a process's memory.
const SAMPLE_EVERY: Duration = Duration::from_millis(20);

/// Runs a program to its end and watches its memory. Its stdout is dropped; its stderr is shown.
pub fn measure(command: &mut Command) -> Result<Usage> {
    let shown = build::shown(command);
    let failed = |e: std::io::Error| format!("{shown}: {e}");
    let (start, before) = (Instant::now(), children_seconds());
    let mut child = command.stdout(Stdio::null()).spawn().map_err(failed)?;
    let status_file = format!("/proc/{}/status", child.id());
    let mut usage = Usage::default();
    loop {
        // Read before the wait: the file of a process that has been waited for is gone.
        if let Ok(status) = fs::read_to_string(&status_file)
            && let (Some(rss), Some(anonymous)) =
                (field(&status, "VmHWM"), field(&status, "RssAnon"))
        {
            usage.peak_rss = usage.peak_rss.max(rss);
            usage.peak_anonymous = usage.peak_anonymous.max(anonymous);
            usage.samples += 1;
        }
        if let Some(status) = child.try_wait().map_err(failed)? {
            usage.wall = start.elapsed().as_secs_f64();
            usage.cpu = children_seconds() - before;
            if !status.success() {
                return Err(format!("{shown}: {status}"));
            }
            if usage.samples == 0 {
                return Err(format!("{shown}: no memory sample; /proc is needed, as on Linux"));
            }
            return Ok(usage);
        }
        sleep(SAMPLE_EVERY);
    }
}

/// A memory field of `/proc/PID/status`, in bytes.
fn field(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Processor time of all processes that were waited for, in seconds; 0 where /proc does not tell.
fn children_seconds() -> f64 {
    fs::read_to_string("/proc/self/stat").ok().and_then(|stat| waited_for(&stat)).unwrap_or(0.0)
}

/// `cutime` and `cstime` of `/proc/PID/stat`, whose unit is 1/100 s on every Linux that this runs on.
fn waited_for(stat: &str) -> Option<f64> {
    // The second field is a name in parentheses, which may hold anything; field 3 follows.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    Some((ticks(16)? + ticks(17)?) as f64 / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_a_status_file_are_read_in_bytes() {
        let status = "VmPeak:\t   99 kB\nVmHWM:\t   12345 kB\nRssAnon:\t       0 kB\nThreads:\t3\n";
        assert_eq!(field(status, "VmHWM"), Some(12345 * 1024));
        assert_eq!(field(status, "RssAnon"), Some(0));
        assert_eq!(field(status, "Threads"), None);
        assert_eq!(field(status, "VmH"), None);
    }

    #[test]
    fn processor_time_of_children_is_read_behind_any_name() {
        let stat = "7 (a) b) c) S 1 2 3 4 5 6 7 8 9 10 11 12 250 50 20 0 1";
        assert_eq!(waited_for(stat), Some(3.0));
        assert_eq!(waited_for("7 (a) S 1"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_is_sampled_and_a_failing_one_is_an_error() {
        let usage = measure(Command::new("sleep").arg("0.2")).unwrap();
        assert!(usage.wall >= 0.2 && usage.samples >= 2, "{usage:?}");
        assert!(usage.peak_rss >= usage.peak_anonymous && usage.peak_anonymous > 0, "{usage:?}");
        assert_eq!(measure(&mut Command::new("false")).unwrap_err(), "false: exit status: 1");
    }
}
