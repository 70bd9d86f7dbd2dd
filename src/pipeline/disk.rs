//! Free space of a file system.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

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
