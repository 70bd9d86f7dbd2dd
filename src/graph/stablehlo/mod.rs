//! Programs as StableHLO text: the way to engines that take it, and an independent check of the partition.
//!
//! One module is one program in the replicas style: `@main` has the shapes of one device, collectives name groups of
//! replicas. Arguments carry `rad.name`: `rank`, the program's inputs, the cache (donated, and returned under the same
//! name), and the planes of every weight (`NAME`, or `NAME:ROLE` for an encoding of several planes; packed codes are
//! bytes). Everything between is computed in f32. No `chlo`, no `sdy`.

mod attention;
mod print;
mod text;
mod weights;

pub use print::{ArgumentKind, Module, ModuleArgument, module};
pub use weights::{LOCAL_EXPERT, argument_name};
