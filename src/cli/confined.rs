//! Templates of strangers, rendered in a process of their own that has limits.
//!
//! Fuel bounds the steps of a template and the bytes that they make, but not what writing out or comparing a value takes that
//! holds another one twice, which holds another one twice, nor the stack that deep nesting takes. The system's limits bound
//! all of it: a process that exceeds them ends, and this one tells why.

use std::io::{self, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use radpack::card;
use radpack::diag::{Failure, FailureKind, Result, count, size};
use radpack::runtime::Chat;
use serde::{Deserialize, Serialize};

/// Set for the process that renders.
const MARK: &str = "RADPACK_RENDERS";

/// Exit code of a template that gave no text; its reason is what the process wrote.
const REFUSED: u8 = 3;

/// Bytes of a rendered text: far beyond the longest context of a model.
const MAX_TEXT: usize = 64 << 20;
/// Address space of the process that renders. All fuel spent on one text takes 640 MB.
const MAX_MEMORY: u64 = 1 << 30;
/// Seconds of processor time of the process that renders: several times what all fuel takes.
const MAX_SECONDS: u64 = 60;

/// What is to be rendered.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Asked {
    Chat { chat: Chat, messages: Vec<serde_json::Value> },
    Card { facts: serde_json::Value, name: String, template: String },
}

/// What became of it, or why it did not end.
enum Became {
    Text(String),
    Refused(String),
}

/// As [`Chat::prompt`], with limits of time and memory.
pub fn prompt(chat: Chat, messages: Vec<serde_json::Value>) -> Result<String> {
    match became(&Asked::Chat { chat, messages })? {
        Became::Text(text) => Ok(text),
        Became::Refused(why) => Err(Chat::refused(&why)),
    }
}

/// As [`card::card`], of facts and with limits of time and memory.
pub fn card(facts: serde_json::Value, name: String, template: String) -> Result<String> {
    let named = name.clone();
    match became(&Asked::Card { facts, name, template })? {
        Became::Text(text) => Ok(text),
        Became::Refused(why) if why.starts_with(&named) => Err(card::refused(&why)),
        Became::Refused(why) => Err(card::refused(&format!("{named}: {why}"))),
    }
}

fn became(asked: &Asked) -> Result<Became> {
    let failed = |what: &str, why: &dyn std::fmt::Display| {
        Failure::plain(FailureKind::Failed, format!("{what} the process that renders: {why}"))
    };
    let asked = serde_json::to_vec(asked).map_err(|e| failed("cannot ask", &e))?;
    let own = own().map_err(|e| failed("cannot find", &e))?;
    let mut command = Command::new(own);
    command.env(MARK, "1").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|e| failed("cannot start", &e))?;
    if let Some(mut input) = child.stdin.take() {
        // Where it has ended already, its status says why.
        let _ = input.write_all(&asked);
    }
    let output = child.wait_with_output().map_err(|e| failed("cannot wait for", &e))?;
    let said = || String::from_utf8_lossy(&output.stdout).into_owned();
    let code = |n: u8| Some(i32::from(n));
    match (output.status.code(), output.status.signal()) {
        (Some(0), _) => Ok(Became::Text(said())),
        (given, _) if given == code(REFUSED) => Ok(Became::Refused(said())),
        (_, Some(libc::SIGXCPU | libc::SIGKILL)) => Ok(Became::Refused(format!(
            "rendering it took more than {MAX_SECONDS} s of processor time, the most there is"
        ))),
        (_, Some(libc::SIGABRT | libc::SIGSEGV | libc::SIGBUS)) => Ok(Became::Refused(format!(
            "rendering it took more than {} of memory, the most there is, or a list in lists that is too deep to write out",
            size(MAX_MEMORY)
        ))),
        _ => Err(failed("it was not rendered:", &output.status)),
    }
}

/// This program, also where its file was replaced since it began.
fn own() -> io::Result<PathBuf> {
    if cfg!(target_os = "linux") { Ok("/proc/self/exe".into()) } else { std::env::current_exe() }
}

/// In the process that renders: its exit code.
pub fn child() -> Option<ExitCode> {
    std::env::var_os(MARK)?;
    let (code, text) = match limited().and_then(|()| answer()) {
        Ok(text) if text.len() > MAX_TEXT => {
            let most = count(MAX_TEXT as u64);
            (
                REFUSED,
                format!("its text has {} bytes; {most} are allowed", count(text.len() as u64)),
            )
        }
        Ok(text) => (0, text),
        Err(why) => (REFUSED, why),
    };
    let mut output = io::stdout().lock();
    let written = output.write_all(text.as_bytes()).and_then(|()| output.flush());
    Some(ExitCode::from(if written.is_ok() { code } else { 1 }))
}

fn answer() -> std::result::Result<String, String> {
    let mut asked = Vec::new();
    io::stdin().lock().read_to_end(&mut asked).map_err(|e| e.to_string())?;
    match serde_json::from_slice(&asked).map_err(|e| e.to_string())? {
        Asked::Chat { chat, messages } => chat.rendered(&messages),
        Asked::Card { facts, name, template } => card::rendered(&facts, &name, &template),
    }
}

/// Takes the limits upon this process.
fn limited() -> std::result::Result<(), String> {
    let limits = [
        (libc::RLIMIT_AS, MAX_MEMORY),
        (libc::RLIMIT_CPU, MAX_SECONDS),
        // Ending by a limit is expected: nobody wants its memory in a file.
        (libc::RLIMIT_CORE, 0),
    ];
    for (which, most) in limits {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: `limit` is a structure of the call's type, alive during the call.
        let got = unsafe { libc::getrlimit(which, &mut limit) };
        limit.rlim_cur = limit.rlim_cur.min(most as libc::rlim_t);
        limit.rlim_max = limit.rlim_max.min(most as libc::rlim_t);
        // SAFETY: as above; a limit is a number that is only lowered.
        if got != 0 || unsafe { libc::setrlimit(which, &limit) } != 0 {
            return Err(format!("no limit could be set: {}", io::Error::last_os_error()));
        }
    }
    Ok(())
}
