//! `check-report`: the page of `radpack inspect --html` in a real browser.
//!
//! Chromium opens the page of a small artifact without a network, as wide as a desk's screen and as narrow as its
//! windows get (500, a large phone), light and dark. A script that is added for the check reports the page's errors and its width; the committed page has none.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::{Result, build};

/// How to run `check-report`.
#[derive(Debug, Args)]
pub struct CheckReportArgs {
    /// The radpack binary [default: build target/release/radpack]
    #[arg(long)]
    bin: Option<PathBuf>,
    /// Keep the picture of the page as docs/report.png
    #[arg(long)]
    write: bool,
}

/// Names of the browser, as distributions have it.
const BROWSERS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

/// Windows that the page is opened in: name, width, whether dark is preferred.
const WINDOWS: [(&str, u32, bool); 4] = [
    ("wide", 1100, false),
    ("wide, dark", 1100, true),
    ("narrow", 500, false),
    ("narrow, dark", 500, true),
];

/// Reports errors and widths in the title, which the browser prints with the page.
const PROBE: &str = "<script>window.faults=[];window.onerror=(m)=>{faults.push(m)};\
window.onload=()=>{document.title='probe '+document.documentElement.scrollWidth+' '+window.innerWidth+' '\
+getComputedStyle(document.body).backgroundColor.replaceAll(' ','')+' '+document.querySelectorAll('.device').length+' '\
+faults.length}</script>";

/// What the probe found.
#[derive(Debug, PartialEq)]
struct Seen {
    page: u32,
    window: u32,
    background: String,
    devices: usize,
    errors: usize,
}

/// Opens the page in every window and checks what is seen.
pub fn run(args: &CheckReportArgs) -> Result<()> {
    let bin = build::radpack(args.bin.clone())?;
    let browser = BROWSERS
        .iter()
        .find(|name| Command::new(name).arg("--version").output().is_ok_and(|o| o.status.success()))
        .ok_or("no chromium: apt-get install --no-install-recommends chromium")?;
    let folder = testkit::target().join("check-report");
    build::remove_folder(&folder)?;
    fs::create_dir_all(&folder).map_err(testkit::at(&folder))?;
    let (rad, page) = (folder.join("tiny-gemma4.rad"), folder.join("page.html"));
    let mut convert = Command::new(&bin);
    convert.arg("convert").arg(testkit::fixtures().join("tiny-gemma4-dense"));
    convert.args(["--recipe", "int8-g128", "--devices", "2", "-o"]).arg(&rad);
    build::output(&mut convert)?;
    build::output(Command::new(&bin).arg("inspect").arg(&rad).arg("--html").arg(&page))?;
    let text = fs::read_to_string(&page).map_err(testkit::at(&page))?;
    let probed = folder.join("probed.html");
    let with_probe = text.replacen("<head>", &format!("<head>{PROBE}"), 1);
    fs::write(&probed, with_probe).map_err(testkit::at(&probed))?;
    let mut backgrounds = Vec::new();
    for (name, width, dark) in WINDOWS {
        let dom = build::output(
            open(browser, &folder, width, dark).arg("--dump-dom").arg(address(&probed)),
        )?;
        let seen = seen(&dom).ok_or_else(|| format!("{name}: the probe did not run"))?;
        println!("{name:12} {seen:?}");
        check(name, &seen)?;
        backgrounds.push((dark, seen.background));
    }
    let of =
        |dark: bool| backgrounds.iter().filter(|b| b.0 == dark).map(|b| &b.1).collect::<Vec<_>>();
    if of(true).iter().any(|b| of(false).contains(b)) {
        return Err(format!("dark and light look alike: {backgrounds:?}"));
    }
    let picture = folder.join("report.png");
    let mut shot = open(browser, &folder, 1100, false);
    shot.arg(format!("--screenshot={}", picture.display())).arg(address(&page));
    build::output(&mut shot)?;
    let bytes = fs::read(&picture).map_err(testkit::at(&picture))?;
    if !bytes.starts_with(b"\x89PNG\r\n\x1a\n") || bytes.len() < 20_000 {
        return Err(format!("{}: no picture of a page, {} bytes", picture.display(), bytes.len()));
    }
    if args.write {
        let kept = testkit::root().join("docs/report.png");
        fs::write(&kept, bytes).map_err(testkit::at(&kept))?;
    }
    println!("the page has no errors in {} windows", WINDOWS.len());
    Ok(())
}

/// The browser without network, profile or sandbox (which needs privileges that containers lack).
fn open(browser: &str, folder: &Path, width: u32, dark: bool) -> Command {
    let mut command = Command::new(browser);
    command.args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
    ]);
    command.args(["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=2000"]);
    command.arg(format!("--user-data-dir={}", folder.join("profile").display()));
    command.arg(format!("--window-size={width},1500"));
    command.arg(format!("--blink-settings=preferredColorScheme={}", if dark { 0 } else { 1 }));
    command
}

fn address(page: &Path) -> String {
    format!("file://{}", page.display())
}

fn seen(dom: &str) -> Option<Seen> {
    let title = dom.split_once("<title>probe ")?.1.split_once("</title>")?.0;
    let mut words = title.split(' ');
    Some(Seen {
        page: words.next()?.parse().ok()?,
        window: words.next()?.parse().ok()?,
        background: words.next()?.to_owned(),
        devices: words.next()?.parse().ok()?,
        errors: words.next()?.parse().ok()?,
    })
}

fn check(name: &str, seen: &Seen) -> Result<()> {
    if seen.errors > 0 {
        return Err(format!("{name}: {} errors on the page", seen.errors));
    }
    if seen.page > seen.window {
        return Err(format!(
            "{name}: the page is {} wide in a window of {}",
            seen.page, seen.window
        ));
    }
    if seen.devices != 2 {
        return Err(format!("{name}: {} devices are shown, the file is for 2", seen.devices));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_probe_reports_is_read_and_judged() {
        let dom = "<html><head><title>probe 390 390 rgb(1,2,3) 2 0</title>";
        let good = seen(dom).expect("a report");
        assert_eq!((good.page, good.background.as_str()), (390, "rgb(1,2,3)"));
        assert_eq!(check("x", &good), Ok(()));
        assert_eq!(seen("<title>tiny</title>"), None);
        let wide = Seen { page: 400, ..good };
        assert!(check("x", &wide).unwrap_err().contains("400 wide in a window of 390"));
        assert!(check("x", &Seen { page: 1, errors: 1, ..wide }).is_err());
    }
}
