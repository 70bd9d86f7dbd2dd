//! Foundation: element types, shapes, encodings and lazily readable tensors.
//!
//! | noun | what |
//! |---|---|
//! | [`DType`] | every element type that a checkpoint or a container can hold |
//! | [`Shape`] | extents, seen as a matrix of rows × columns |
//! | [`Encoding`] | how a weight's values are laid out over planes (codes, scales, …) |
//! | [`TensorSource`] | rows of one tensor, on demand |
//! | [`Slice`] | a piece of a weight: a span of rows or columns, padded, cut on blocks |
//! | [`PlaneSource`] | planes of a weight that is quantized already, on demand |

mod dtype;
mod encoding;
mod shape;
mod slice;
mod source;

pub use dtype::{DType, FloatFormat};
pub use encoding::{Encoding, EncodingError, MAX_PLANES, PlaneLayout, PlaneSpec, Scheme, role};
pub use shape::{MAX_RANK, Shape};
pub(crate) use slice::lcm;
pub use slice::{Axis, PlanePiece, Slice, Span};
pub use source::{PlaneSource, TensorInfo, TensorSource};
