//! Pieces of a weight's matrix, and where their bytes lie in the planes of the whole weight.
//!
//! A piece is a span of rows or of columns, padded with zero bytes to an extent that all pieces of the weight share.
//! It begins where a block of every plane begins, so each of its planes is a rectangle of the whole weight's plane:
//! cutting and joining move bytes and never look into them. Planes that are not tiled along the cut (blocks over the
//! whole extent, tables) are carried whole by every piece.

use super::{Encoding, PlaneLayout, PlaneSpec, Shape};

/// The direction along which a weight is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Axis {
    /// Along dimension 0: the outputs of a linear layer, the tokens of an embedding.
    Rows,
    /// Along the last dimension: the inputs of a linear layer.
    Cols,
}

/// Consecutive rows or columns of the whole weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span {
    /// The first.
    pub start: u64,
    /// How many; 0 for a piece that is padding only, which starts at the weight's end.
    pub len: u64,
}

impl Span {
    /// One past the last; `None` beyond 64 bits.
    pub fn end(&self) -> Option<u64> {
        self.start.checked_add(self.len)
    }
}

/// One piece of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slice {
    /// Direction of the cut.
    pub axis: Axis,
    /// What the piece holds.
    pub span: Span,
    /// Its padded length along the axis.
    pub extent: u64,
}

/// A rectangle of a plane of the whole weight, and its place in the piece's plane: the same rows and bytes, from the
/// top left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanePiece {
    /// First row in the whole plane.
    pub first_row: u64,
    /// Rows.
    pub rows: u64,
    /// First byte of each row in the whole plane.
    pub first_byte: u64,
    /// Bytes of each row that the piece takes.
    pub bytes: u64,
    /// Bytes of a row of the whole plane.
    pub whole_row: u64,
    /// Bytes of a row of the piece's plane.
    pub piece_row: u64,
    /// Rows of the piece's plane.
    pub piece_rows: u64,
    /// Whether the piece carries the whole plane although it is a part of the weight.
    pub carried: bool,
}

impl Slice {
    /// Shape of the piece; `None` for a weight that cannot be cut (rank 0, or above 2).
    pub fn shape(&self, whole: &Shape) -> Option<Shape> {
        match (whole.extents(), self.axis) {
            ([_], _) => Some(Shape::from([self.extent])),
            ([_, cols], Axis::Rows) => Some(Shape::from([self.extent, *cols])),
            ([rows, _], Axis::Cols) => Some(Shape::from([*rows, self.extent])),
            _ => None,
        }
    }

    /// Where the bytes of one plane lie; `None` when the span passes the weight's end, does not begin on a block and
    /// on a byte of the plane, or is longer than the extent.
    pub fn plane(&self, spec: &PlaneSpec, whole: &Shape) -> Option<PlanePiece> {
        let (rows, cols) = whole.matrix()?;
        let (piece_rows, piece_cols) = self.shape(whole)?.matrix()?;
        // A vector is one row of the matrix form: whatever cuts it, cuts columns there.
        let by_rows = self.axis == Axis::Rows && whole.rank() == 2;
        let end = self.span.end()?;
        if end > if by_rows { rows } else { cols } || self.span.len > self.extent {
            return None;
        }
        let (all_rows, _) = spec.grid(rows, cols);
        let mut piece = PlanePiece {
            first_row: 0,
            rows: all_rows,
            first_byte: 0,
            bytes: spec.row_bytes(cols)?,
            whole_row: spec.row_bytes(cols)?,
            piece_row: spec.row_bytes(piece_cols)?,
            piece_rows: spec.grid(piece_rows, piece_cols).0,
            carried: false,
        };
        let block = match spec.layout {
            PlaneLayout::Tiled { block } => block[usize::from(!by_rows)],
            PlaneLayout::Table { .. } => 0,
        };
        if block == 0 {
            piece.carried = true;
            return Some(piece);
        }
        let aligned = self.span.len == 0 || self.span.start.is_multiple_of(block);
        if !aligned {
            return None;
        }
        let first = self.span.start.div_ceil(block);
        let count = end.div_ceil(block).saturating_sub(first);
        if by_rows {
            (piece.first_row, piece.rows) = (first, count);
        } else if count == 0 {
            (piece.first_byte, piece.bytes) = (0, 0);
        } else {
            let bits = u64::from(spec.dtype.bits());
            let start = first.checked_mul(bits)?;
            if !start.is_multiple_of(8) {
                return None;
            }
            // A span that ends inside the weight ends where another begins: on a byte, or its neighbour is refused.
            let stop = first.checked_add(count)?.checked_mul(bits)?;
            let last = end == cols;
            if !last && !stop.is_multiple_of(8) {
                return None;
            }
            piece.first_byte = start / 8;
            piece.bytes = stop.div_ceil(8) - start / 8;
        }
        Some(piece)
    }
}

impl Encoding {
    /// The smallest step at which the weight can be cut along an axis of its matrix: every block of every plane, the
    /// blocks of the row transform and, along columns, every byte of packed elements. `None` when it cannot be cut
    /// along that axis at all, or beyond 64 bits.
    pub fn grain(&self, axis: Axis) -> Option<u64> {
        let mut grain = 1u64;
        for plane in &self.planes {
            let PlaneLayout::Tiled { block } = plane.layout else { continue };
            let block = match axis {
                Axis::Rows => block[0],
                Axis::Cols => block[1],
            };
            if block == 0 {
                continue;
            }
            let mut step = block;
            if axis == Axis::Cols {
                // So many elements fill whole bytes.
                step = step.checked_mul(8 / gcd(u64::from(plane.dtype.bits()), 8))?;
            }
            grain = lcm(grain, step)?;
        }
        if axis == Axis::Cols && !self.transform.is_empty() {
            grain = lcm(grain, self.fwht()?)?;
        }
        Some(grain)
    }

    /// Whether zero bytes after the first `len` rows or columns decode to exactly 0, in every block of every plane.
    pub fn pads_with_zero(&self, axis: Axis, len: u64) -> bool {
        use super::{DType, Scheme, role};
        let along = |p: &PlaneSpec| match (p.layout, axis) {
            (PlaneLayout::Tiled { block }, Axis::Rows) => block[0],
            (PlaneLayout::Tiled { block }, Axis::Cols) => block[1],
            (PlaneLayout::Table { .. }, _) => 0,
        };
        // Its element over the padding is padding too, and zero bytes are the number 0.
        let zeroed = |p: &PlaneSpec| {
            let block = along(p);
            block > 0 && len.is_multiple_of(block) && p.dtype != DType::E8M0
        };
        let levels = |base: &str| -> Vec<&PlaneSpec> {
            self.planes.iter().filter(|p| p.level(base).is_some()).collect()
        };
        let code = self.codes() != DType::E8M0;
        match self.scheme {
            Scheme::Plain => code,
            Scheme::Other(_) => false,
            Scheme::Affine => {
                let transformed = self.transform.is_empty()
                    || axis == Axis::Rows
                    || self.fwht().is_some_and(|n| len.is_multiple_of(n));
                let tables = self.planes.iter().any(|p| p.role == role::TABLE || p.role == "grid");
                let point = self.plane(role::ZERO).is_none_or(|(_, p)| zeroed(p));
                let product =
                    (code && !tables && point) || levels(role::SCALE).into_iter().any(zeroed);
                let mins = levels("min");
                transformed && product && (mins.is_empty() || mins.into_iter().any(zeroed))
            }
        }
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Least common multiple of two positive numbers; `None` beyond 64 bits.
pub(crate) fn lcm(a: u64, b: u64) -> Option<u64> {
    (a / gcd(a, b)).checked_mul(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{DType, PlaneSpec, role};

    fn affine(codes: DType, scale: DType, block: [u64; 2]) -> Encoding {
        Encoding::affine(codes, vec![PlaneSpec::tiled(role::SCALE, scale, block)])
    }

    #[test]
    fn grains_are_blocks_and_whole_bytes() {
        let grains = |e: &Encoding| (e.grain(Axis::Rows), e.grain(Axis::Cols));
        assert_eq!(grains(&Encoding::plain(DType::BF16)), (Some(1), Some(1)));
        assert_eq!(grains(&affine(DType::I8, DType::BF16, [1, 128])), (Some(1), Some(128)));
        assert_eq!(grains(&affine(DType::F8E4M3, DType::BF16, [128, 64])), (Some(128), Some(64)));
        assert_eq!(grains(&affine(DType::I4, DType::BF16, [1, 0])), (Some(1), Some(2)));
        assert_eq!(grains(&affine(DType::I3, DType::BF16, [0, 12])), (Some(1), Some(24)));
        // Zero points of four bits for groups of 128: two groups fill a byte.
        let mut zero = affine(DType::U4, DType::BF16, [1, 128]);
        zero.planes.push(PlaneSpec::tiled(role::ZERO, DType::U4, [1, 128]));
        assert_eq!(zero.grain(Axis::Cols), Some(256));
        let mut turned = affine(DType::I8, DType::BF16, [1, 16]);
        turned.transform = "fwht64".into();
        assert_eq!(grains(&turned), (Some(1), Some(64)));
        turned.transform = "perm".into();
        assert_eq!(grains(&turned), (Some(1), None));
        let huge = affine(DType::I8, DType::BF16, [1, u64::MAX]);
        assert_eq!(lcm(3, u64::MAX - 1), None);
        assert_eq!(huge.grain(Axis::Cols), Some(u64::MAX));
    }

    #[test]
    fn zeros_decode_to_zero_unless_a_table_a_point_or_an_exponent_says_otherwise() {
        let cols = Axis::Cols;
        assert!(Encoding::plain(DType::F32).pads_with_zero(cols, 3));
        assert!(!Encoding::plain(DType::E8M0).pads_with_zero(cols, 3));
        assert!(affine(DType::I8, DType::BF16, [1, 8]).pads_with_zero(cols, 3));
        // An exponent of zero is 2^-127: only the code makes it zero.
        assert!(affine(DType::F4E2M1, DType::E8M0, [1, 8]).pads_with_zero(cols, 8));
        let mut table = affine(DType::U4, DType::BF16, [1, 8]);
        table.planes.push(PlaneSpec::table(role::TABLE, DType::F32, [1, 16]));
        assert!(table.pads_with_zero(cols, 16), "the scales of the padding are zero");
        assert!(!table.pads_with_zero(cols, 12), "a scale reaches into the padding");
        assert!(table.pads_with_zero(Axis::Rows, 12), "one row is one block");
        table.planes[1].dtype = DType::E8M0;
        assert!(!table.pads_with_zero(cols, 16));
        let mut point = affine(DType::U4, DType::BF16, [1, 8]);
        point.planes.push(PlaneSpec::tiled(role::ZERO, DType::U4, [1, 8]));
        assert!(point.pads_with_zero(cols, 8));
        assert!(!point.pads_with_zero(cols, 9));
        let mut min = affine(DType::U4, DType::BF16, [1, 8]);
        min.planes.push(PlaneSpec::tiled("min", DType::BF16, [1, 0]));
        assert!(!min.pads_with_zero(cols, 8), "the row's minimum is not the padding's");
        min.planes[2] = PlaneSpec::tiled("min", DType::BF16, [1, 8]);
        assert!(min.pads_with_zero(cols, 8));
        let other = Encoding { scheme: super::super::Scheme::Other("own".into()), ..point };
        assert!(!other.pads_with_zero(cols, 8));
    }

    #[test]
    fn pieces_have_the_shape_of_the_extent() {
        let slice = |axis| Slice { axis, span: Span { start: 0, len: 2 }, extent: 3 };
        assert_eq!(slice(Axis::Rows).shape(&Shape::from([8, 5])), Some(Shape::from([3, 5])));
        assert_eq!(slice(Axis::Cols).shape(&Shape::from([8, 5])), Some(Shape::from([8, 3])));
        assert_eq!(slice(Axis::Rows).shape(&Shape::from([8])), Some(Shape::from([3])));
        assert_eq!(slice(Axis::Rows).shape(&Shape::from([2, 2, 2])), None);
    }
}
