//! Files that become shorter while this process has them mapped.
//!
//! Reading a page that is no longer there raises SIGBUS, which ends a process without a word. Here it ends with one:
//! which file it was, exit code 1, and no partial output left where none was asked for.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// Files that go when the process ends by the signal, as NUL-terminated paths.
static LEFT: [AtomicPtr<libc::c_char>; 2] =
    [AtomicPtr::new(ptr::null_mut()), AtomicPtr::new(ptr::null_mut())];

/// Has SIGBUS end the process with a message, and a limit on the size of files (`ulimit -f`) be an error of the write
/// that meets it, instead of a signal.
pub fn explain_faults() {
    // SAFETY: SIG_IGN takes no handler.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    // SAFETY: an all-zero `sigaction` is a valid one; its fields are set before it is used.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = ended;
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: `action` is complete, and `ended` does only what a signal handler may. Failing leaves things as they were.
    unsafe { libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) };
}

/// Has the end by SIGBUS remove these files too. Called once, before the first of them exists.
pub fn remove_when_truncated(files: [&Path; 2]) {
    for (slot, file) in LEFT.iter().zip(files) {
        if let Ok(path) = CString::new(file.as_os_str().as_bytes()) {
            // Never freed: the handler may read it until the process ends.
            slot.store(path.into_raw(), Ordering::Release);
        }
    }
}

extern "C" fn ended(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if SAID.swap(true, Ordering::Relaxed) {
        // Another thread read the file too and is ending the process.
        loop {
            // SAFETY: `pause` is async-signal-safe.
            unsafe { libc::pause() };
        }
    }
    // SAFETY: the system passes a valid description to a handler with SA_SIGINFO.
    let address = unsafe { (*info).si_addr() } as usize;
    let mut name = [0u8; 1024];
    let len = file_at(address, &mut name);
    if len == 0 {
        // No mapped file: a fault of this program or of the memory, which ends the process as it always did.
        // SAFETY: both are async-signal-safe; the signal comes again when the handler returns.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
        return;
    }
    say(b"\nerror: ");
    say(name.get(..len).unwrap_or_default());
    say(b" became shorter while it was read: another process wrote to it\n");
    let mut removed = false;
    for slot in &LEFT {
        let path = slot.load(Ordering::Acquire);
        if !path.is_null() {
            // SAFETY: `unlink` is async-signal-safe, and `path` is a string that is never freed.
            removed |= unsafe { libc::unlink(path) } == 0;
        }
    }
    say(if removed {
        b"\nnothing was written; run again when the file is whole\n"
    } else {
        b"\nno output was completed; run again when the file is whole\n"
    });
    // SAFETY: `_exit` is async-signal-safe.
    unsafe { libc::_exit(1) }
}

/// Writes to standard error; nobody can be told when that fails.
fn say(bytes: &[u8]) {
    // SAFETY: `write` is async-signal-safe, and reads `bytes` only.
    let _ = unsafe { libc::write(2, bytes.as_ptr().cast(), bytes.len()) };
}

/// The file that is mapped at an address, from the system's list of this process's maps; 0 for none. Allocates nothing
/// and takes no lock.
fn file_at(address: usize, name: &mut [u8]) -> usize {
    // SAFETY: `open` is async-signal-safe, and the path is a literal.
    let list = unsafe { libc::open(c"/proc/self/maps".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
    if list < 0 {
        return 0;
    }
    let mut line = Line::default();
    let mut buffer = [0u8; 1024];
    let found = 'list: loop {
        // SAFETY: `read` is async-signal-safe, and writes at most the buffer's length into it.
        let read = unsafe { libc::read(list, buffer.as_mut_ptr().cast(), buffer.len()) };
        let Some(bytes) = usize::try_from(read).ok().and_then(|n| buffer.get(..n)) else {
            break 0;
        };
        if bytes.is_empty() {
            break 0;
        }
        for byte in bytes {
            if line.take(*byte, name) {
                if (line.from..line.to).contains(&address) {
                    break 'list line.len;
                }
                line = Line::default();
            }
        }
    };
    // SAFETY: `close` is async-signal-safe; the descriptor was opened above.
    unsafe { libc::close(list) };
    found
}

/// A line `FROM-TO PERMS OFFSET DEVICE INODE   PATH`, read byte by byte.
#[derive(Default)]
struct Line {
    from: usize,
    to: usize,
    /// Fields before the present one.
    field: usize,
    /// Whether the last byte was a blank.
    blank: bool,
    /// Bytes of the path.
    len: usize,
}

impl Line {
    /// Takes a byte; true at the end of the line.
    fn take(&mut self, byte: u8, name: &mut [u8]) -> bool {
        match byte {
            b'\n' => return true,
            b'-' if self.field == 0 => self.field = 1,
            b' ' if self.field < 6 => {
                self.field += usize::from(!self.blank);
                self.blank = true;
                return false;
            }
            digit if self.field < 2 => {
                let value = (digit as char).to_digit(16).unwrap_or(0) as usize;
                let number = if self.field == 0 { &mut self.from } else { &mut self.to };
                *number = (*number << 4) | value;
            }
            // Paths begin with `/`; the system's own maps have names in brackets.
            byte if self.field == 6 && (self.len > 0 || byte == b'/') => {
                if let Some(slot) = name.get_mut(self.len) {
                    *slot = byte;
                    self.len += 1;
                }
            }
            _ => {}
        }
        self.blank = false;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_maps_are_read_byte_by_byte() {
        let mut name = [0; 16];
        let mut read = |text: &str| {
            let mut line = Line::default();
            let ends: Vec<bool> = text.bytes().map(|b| line.take(b, &mut name)).collect();
            assert!(ends.ends_with(&[true]) && ends.iter().filter(|e| **e).count() == 1);
            let name = String::from_utf8(name[..line.len].to_vec()).expect("UTF-8");
            (line.from, line.to, name)
        };
        let file = "7f00a000-7f00b000 r--s 00001000 fe:00 1234      /a b/c-d\n";
        assert_eq!(read(file), (0x7f00_a000, 0x7f00_b000, "/a b/c-d".to_owned()));
        let none = "5500-5600 rw-p 00000000 00:00 0 \n";
        assert_eq!(read(none), (0x5500, 0x5600, String::new()));
        let stack = "7ffe-7fff rw-p 00000000 00:00 0      [stack]\n";
        assert_eq!(read(stack), (0x7ffe, 0x7fff, String::new()));
        let long = "1-2 r--s 0 fe:00 1 /0123456789abcdefghi\n";
        assert_eq!(read(long).2, "/0123456789abcde");
    }

    #[test]
    fn a_mapped_file_is_found_by_any_address_in_it() {
        // This program's own code is mapped from its file.
        let mut name = [0; 1024];
        let len = file_at(file_at as fn(usize, &mut [u8]) -> usize as usize, &mut name);
        let path = std::env::current_exe().expect("a path");
        assert_eq!(&name[..len], path.as_os_str().as_bytes());
        assert_eq!(file_at(0, &mut name), 0);
    }
}
