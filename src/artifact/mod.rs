//! The container: one `.rad` file with every weight, the tables that describe them, and this project's own entries.
//!
//! | file | what |
//! |---|---|
//! | [`layout`] | constants that never change |
//! | `wire`, `strings`, `tables`, `experts` | rows as they lie in the file; the checks of a conforming reader |
//! | `contents`, `plan`, `writer` | [`Contents`] → [`Layout`], every offset before any data → [`Writer`] |
//! | `reader` | [`Artifact`]: a mapped file that passed the checks |
//! | [`patch`] | the one value that may change in a finished file |
//! | `weights` | [`Weights`]: whole weights, put together from pieces in a file for several devices |
//! | [`metadata`] | metadata rows from a checkpoint's configuration files |
//! | [`part`] | a part of a conversion that several machines share |
//! | [`manifest`], [`digests`], [`errors`], [`partition`] | this project's entries; `schemas/rad.md` specifies their bytes |
//! | [`mod@verify`] | everything beyond opening: deviations, digests, manifest against directory |
//!
//! Nothing here knows the compiler: a program that only reads artifacts needs this module, `tensor` and `diag`.

pub mod codec;
mod contents;
pub mod digests;
pub mod errors;
mod experts;
mod failing;
pub mod layout;
pub mod manifest;
pub mod metadata;
pub mod part;
pub mod partition;
pub mod patch;
mod pieces;
mod plan;
mod reader;
mod refusal;
mod strings;
mod tables;
pub mod verify;
mod vocab;
mod weights;
mod wire;
mod writer;

pub use contents::{
    Contents, EntrySpec, MetaValue, ProfileShare, canonical_order, data_order, device_order,
};
#[doc(hidden)]
pub use failing::fail_operation;
pub use pieces::{Pieces, Put, Read};
pub use plan::Layout;
pub use reader::{Artifact, Entry, MetaRef, PlaneAt, VocabSummary};
pub use refusal::{OpenError, Reason, Refused};
pub use strings::Text;
pub use verify::{Report, verify};
pub use vocab::{Step, Vocab};
pub use weights::{WeightView, Weights, WeightsError};
pub use writer::{Writer, partial_path, same_file};
