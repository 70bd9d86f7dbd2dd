//! Lazily readable tensors.

use std::borrow::Cow;
use std::io;
use std::ops::Range;

use super::{DType, Encoding, Shape};

/// A tensor whose bytes are read row by row, on demand.
///
/// Rows are those of [`Shape::matrix`]. Implementations are a mapped checkpoint tensor, a slice of one, several of
/// them joined along rows, or a quantized checkpoint weight decoded on the fly.
pub trait TensorSource: Send + Sync {
    /// Element type of the bytes that [`TensorSource::rows`] yields; whole bytes wide.
    fn dtype(&self) -> DType;

    /// Logical shape.
    fn shape(&self) -> &Shape;

    /// Little-endian bytes of the rows `range`, row-major without padding. Borrowed where the rows lie together in
    /// a file map; the bytes may start at any address, so they must not be cast to wider elements in place.
    ///
    /// # Errors
    /// An I/O error of the underlying file, or `InvalidInput` when `range` passes the last row.
    fn rows(&self, range: Range<u64>) -> io::Result<Cow<'_, [u8]>>;
}

/// A quantized weight whose codes and scales can be stored as they are.
///
/// The planes decode to what the [`TensorSource`] of the same weight yields, up to the rounding of that source's type
/// and of the second-level scale.
pub trait PlaneSource: Send + Sync {
    /// The planes.
    fn encoding(&self) -> &Encoding;

    /// Logical shape.
    fn shape(&self) -> &Shape;

    /// Bytes of the rows `range` of one plane, counted in the plane's own rows, in the container's packing: a
    /// little-endian bit stream for every row, which starts on a byte.
    ///
    /// # Errors
    /// An I/O error of the underlying file, or `InvalidInput` when the plane does not exist or `range` passes its
    /// last row.
    fn plane_rows(&self, plane: usize, range: Range<u64>) -> io::Result<Cow<'_, [u8]>>;
}

/// What a file header says about a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type.
    pub dtype: DType,
    /// Shape as stored; rank 0 and empty extents are legal.
    pub shape: Shape,
}
