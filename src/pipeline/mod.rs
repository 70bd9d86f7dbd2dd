//! The calls in order: a source and a recipe become a [`Plan`]; a plan becomes a file, or is compared with one.
//!
//! ```text
//! Checkpoint::open ─┐  (Sources: with a draft model, two)
//! Recipe::parse ────┴─ plan ─┬─ convert ─ OUT.rad
//!                            ├─ PartPlan ─ convert_part ─ OUT.rad.part-I-of-N ┐ merge ─ OUT.rad
//!                            └─ compare ─ findings
//! Subject ─ outline (per recipe): placement, programs and sizes alone, for estimates
//! ```

mod compare;
mod convert;
mod disk;
mod imatrix;
mod journal;
mod merge;
mod outline;
mod part;
mod plan;
mod programs;
mod reuse;
mod scenario;
mod shards;
mod sources;
mod vocabulary;

pub use compare::{Comparison, compare, plan_of};
pub use convert::{ConvertOptions, Converted, Earlier, convert, convert_from, convert_part};
pub use disk::free_bytes;
pub use imatrix::{Entry as ImportanceEntry, IMATRIX_FILE, Imatrix, Importances};
pub use journal::path as journal_path;
pub use merge::{Merged, merge};
pub use outline::{Outline, Subject};
pub use part::{PartPlan, part_path};
pub use plan::{Plan, Request, plan};
pub use programs::{Compiled, check as check_programs};
pub use reuse::Reuse;
pub use scenario::{Fit, FitAxis, Measured, Settings, Tried, first_problem, why_not};
pub use sources::{DRAFT_FOLDER, Sources};
pub use vocabulary::{check_vocabulary, vocabulary_tables};

/// Told how far a run is. Calls come from several threads.
pub trait Progress: Sync {
    /// Bytes of source files that were just hashed.
    fn hashed(&self, _bytes: u64) {}
    /// Bytes of source tensors that were just encoded.
    fn encoded(&self, _source_bytes: u64) {}
}

/// A run that nobody watches.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unwatched;

impl Progress for Unwatched {}
