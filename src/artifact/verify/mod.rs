//! Everything beyond opening: is the file what a careful writer makes, and does it say the truth about itself?
//!
//! 1. Structure: overlaps, aliasing, trailing bytes, non-zero gaps and reserved words, names, order, unused rows.
//!    Gaps are read, planes are not.
//! 2. Digests of every entry against `radpack/digests`, and that list against the root digest; entries are hashed in
//!    parallel, at the speed of the disk.
//! 3. Of a file for several devices: the table of who holds what against the directory, the digests of whole weights,
//!    zeros in the padding, the order of devices.
//! 4. The manifest and the error table against the weights, and the digest of the tables.

mod content;
mod partition;
mod structure;

use super::layout::{DEVICES_KEY, DIGEST_KEY, OWN_PREFIX};
use super::manifest::Manifest;
use super::reader::Artifact;
use crate::diag::{Diagnostic, count};

/// What to expect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Options {
    /// Entries of a file for one device may stand in any order.
    pub any_order: bool,
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Report {
    /// Faults, in the order found; empty for a valid file.
    pub faults: Vec<Diagnostic>,
    /// Bytes of the planes that were hashed.
    pub hashed_bytes: u64,
    /// The root digest, when it and all entries' digests hold.
    pub root: Option<[u8; 32]>,
    /// The manifest, when it could be read.
    pub manifest: Option<Manifest>,
    /// Whether the file has this project's entries; other writers' files are checked for structure only.
    pub own: bool,
}

/// Checks a file.
pub fn verify(artifact: &Artifact, options: Options) -> Report {
    let mut faults = Faults::default();
    // The order of a file for several devices is checked with its table.
    let several = artifact.meta_int(DEVICES_KEY).is_some_and(|n| n > 1);
    let any_order = options.any_order || several;
    structure::check(artifact, Options { any_order }, &mut faults);
    let own = artifact.created_by().bytes().starts_with(b"radpack ")
        || artifact.meta_text(DIGEST_KEY).is_some()
        || artifact.any_name_begins(OWN_PREFIX);
    let mut report = Report { own, ..Report::default() };
    if own {
        content::check(artifact, &mut faults, &mut report);
    }
    report.faults = faults.finish();
    report
}

/// Faults found so far. A hostile file can have millions; the first thousand are kept.
#[derive(Debug, Default)]
struct Faults {
    kept: Vec<Diagnostic>,
    left_out: u64,
}

impl Faults {
    const LIMIT: usize = 1000;

    fn say(&mut self, ok: bool, area: &'static str, message: impl FnOnce() -> String) {
        if ok {
            return;
        }
        if self.kept.len() < Faults::LIMIT {
            self.kept.push(Diagnostic::new(area, message()));
        } else {
            self.left_out += 1;
        }
    }

    fn finish(mut self) -> Vec<Diagnostic> {
        if self.left_out > 0 {
            let message = format!("and {} more faults", count(self.left_out));
            self.kept.push(Diagnostic::new("container", message));
        }
        self.kept
    }
}
