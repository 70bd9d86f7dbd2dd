//! Foundation: element types, shapes, encodings and lazily readable tensors.
//!
//! | noun | what |
//! |---|---|
//! | [`DType`] | every element type that a checkpoint or a container can hold |
//! | [`Shape`] | extents, seen as a matrix of rows × columns |
//! | [`Encoding`] | how a weight's values are laid out over planes (codes, scales, …) |
//! | [`TensorSource`] | rows of one tensor, on demand |
//! | [`PlaneSource`] | planes of a weight that is quantized already, on demand |

mod dtype;
mod encoding;
mod shape;
mod source;

pub use dtype::{DType, FloatFormat};
pub use encoding::{Encoding, EncodingError, MAX_PLANES, PlaneLayout, PlaneSpec, Scheme, role};
pub use shape::{MAX_RANK, Shape};
pub use source::{PlaneSource, TensorInfo, TensorSource};
