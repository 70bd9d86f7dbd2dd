//! radpack turns a Hugging Face checkpoint and a recipe into one self-describing, byte-reproducible `.rad` file.
//!
//! | stage | module | noun |
//! |---|---|---|
//! | open the source | [`checkpoint`] | `Checkpoint` |
//! | decide every weight's encoding | [`recipe`] | `Assignment` |
//! | share the weights over devices | [`partition`] | `Placement` |
//! | encode rows of weights | [`quantize`] | planes |
//! | write, read and verify the file | [`artifact`] | `Artifact` |
//! | count the cache | [`estimate`] | `Estimate` |
//! | run the programs | [`runtime`] | `Engine` |
//! | tell two files apart | [`diff`] | `Difference` |
//!
//! Foundation under all stages: [`tensor`], [`num`], [`diag`], [`hash`], [`model`]. `docs/architecture.md` has the whole map.

pub mod artifact;
pub mod card;
pub mod checkpoint;
pub mod diag;
pub mod diff;
pub mod estimate;
pub mod export;
pub mod graph;
pub mod hash;
pub mod model;
pub mod num;
pub mod partition;
pub mod pipeline;
pub mod quantize;
pub mod recipe;
pub mod runtime;
pub mod tensor;
