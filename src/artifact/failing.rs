//! Lets a test have one operation of a writer on the disk fail, as a broken disk would.

use std::io;
use std::sync::atomic::{AtomicI64, Ordering};

/// Operations until the one that fails; far too many in ordinary runs.
static LEFT: AtomicI64 = AtomicI64::new(i64::MAX);

/// Has operation `n` from now on, counted from 0, fail in this process; `None` has none fail. Returns how many came since
/// the last call.
#[doc(hidden)]
pub fn fail_operation(n: Option<u32>) -> u64 {
    /// What tests never reach, below what stands for an ordinary run.
    const FAR: i64 = i64::MAX / 2;
    static SET: AtomicI64 = AtomicI64::new(i64::MAX);
    let next = n.map_or(FAR, i64::from);
    let before = SET.swap(next, Ordering::SeqCst);
    let came = before.saturating_sub(LEFT.swap(next, Ordering::SeqCst));
    u64::try_from(came).unwrap_or(0)
}

/// Stands before every operation: an error where a test wants one.
pub(super) fn operation() -> io::Result<()> {
    if LEFT.load(Ordering::Relaxed) == i64::MAX || LEFT.fetch_sub(1, Ordering::SeqCst) != 0 {
        return Ok(());
    }
    Err(io::Error::from_raw_os_error(libc::EIO))
}
