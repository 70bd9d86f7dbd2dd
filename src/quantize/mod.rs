//! Weights become planes: exact encoders and decoders of the container's encodings.
//!
//! [`Encoder`] turns row blocks of a source into plane bytes and sums the error on the way; [`Decoder`] turns plane
//! bytes back into f32. Both are functions of their inputs only: instruction set, threads and the cut into row
//! blocks change no byte and no figure.
//!
//! | file | what |
//! |---|---|
//! | `encoder`, `decoder` | the two nouns |
//! | `grid` | the reference arithmetic of every grid, one file per rule; rounding `rad` (radiance container version 2) |
//! | `rounding` | the reference arithmetic of other packages: compressed-tensors, ModelOpt, transformers |
//! | `fast`, `lanes` | the same arithmetic for the common grids, written over lanes and compiled per instruction set |
//! | `simd` | the vector operations that they are written in |
//! | `imatrix` | [`Importance`]: how much each column of a weight matters, from a file of llama.cpp |
//! | [`kernel`] | which instruction set runs |
//! | `executor` | row blocks of many weights on worker threads, in bounded memory |
//! | `check` | that stored weights decode to finite values |
//! | `error` | [`ErrorSum`] and what can go wrong |
//!
//! # Where an exact copy of the converter is not possible
//! The converter divides by a rounded scale that can be 0, or whose reciprocal can overflow, and converts the
//! resulting infinity to an integer, which C++ leaves undefined. Here, and only in those cases:
//! - a scale that would round to 0 is the smallest positive value of its type, one that would overflow the largest;
//! - where 1/scale overflows f32, value and scale are both multiplied by 2^64 (exact) before the division;
//! - a scale under which the largest code would decode to infinity (blocks beyond 2^126) is made a little smaller;
//! - the range of an asymmetric block wider than f32 is divided before it is subtracted.
//!
//! So no scale is NaN, infinite, or 0 under a block that holds anything, and a zero block decodes to exactly 0.

mod check;
mod decoder;
mod encoder;
mod error;
mod executor;
mod fast;
mod grid;
mod imatrix;
pub mod kernel;
mod lanes;
mod rounding;
mod simd;

pub use check::{StoredWeight, verify_decodes};
pub use decoder::{DecodeError, Decoder, PlaneSlice};
pub use encoder::{Encoder, PlaneBuffers, Whole, peak};
pub use error::{EncodeError, ErrorSum, MethodError};
pub use executor::{ExecuteError, Job, Rejected, Sink, Workers, execute};
pub use imatrix::{Importance, ImportanceError};
pub use kernel::Kernel;

#[cfg(test)]
mod golden;
#[cfg(test)]
mod packages;
#[cfg(test)]
mod parity;
#[cfg(test)]
mod searching;
