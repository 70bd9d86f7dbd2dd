//! Free space of a file system, and whether an output has room.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::artifact::partial_path;
use crate::diag::{Diagnostic, Failure, FailureKind, Result, size};

/// Checks that the folder of `out` exists and has room for `need` bytes.
///
/// # Errors
/// Usage (2): no such folder. Failed (1): too little space.
pub(super) fn check_room(out: &Path, need: u64) -> Result<()> {
    let folder = match out.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if !folder.is_dir() {
        let problem =
            Diagnostic::new("output", format!("the folder {} does not exist", folder.display()))
                .help(format!("mkdir -p {}", folder.display()));
        return Err(Failure::one(FailureKind::Usage, "there is no place for the output", problem));
    }
    // What an earlier run left there is used or replaced.
    let taken = std::fs::metadata(partial_path(out)).map_or(0, |m| m.blocks().saturating_mul(512));
    match free_bytes(folder).map(|free| free.saturating_add(taken)) {
        Some(free) if free < need => {
            let problem = Diagnostic::new(
                "output",
                format!(
                    "{} needs {} ({need} bytes), {} has {} free ({free} bytes)",
                    out.display(),
                    size(need),
                    folder.display(),
                    size(free)
                ),
            )
            .help("free space there, or write to another file system");
            Err(Failure::one(FailureKind::Failed, "the disk is too full for the output", problem))
        }
        _ => Ok(()),
    }
}

/// Bytes that an ordinary user can still write to the file system that holds `folder`; `None` when the system does
/// not tell.
pub fn free_bytes(folder: &Path) -> Option<u64> {
    let path = CString::new(folder.as_os_str().as_bytes()).ok()?;
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `path` is NUL-terminated and `stat` is writable and of the type that the call fills.
    let code = unsafe { libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) };
    if code != 0 {
        return None;
    }
    // SAFETY: the call returned 0, so it filled the whole structure.
    let stat = unsafe { stat.assume_init() };
    // Field widths differ between platforms.
    #[allow(clippy::unnecessary_cast)]
    (stat.f_bavail as u64).checked_mul(stat.f_frsize as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_space_is_told_for_folders_that_exist() {
        assert!(free_bytes(Path::new("/")).is_some());
        assert_eq!(free_bytes(Path::new("/no such folder")), None);
        assert_eq!(free_bytes(Path::new("nul\0byte")), None);
    }
}
