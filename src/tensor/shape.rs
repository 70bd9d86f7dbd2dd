//! Extents of a tensor.

use std::fmt;

/// Highest rank a container entry can have (a directory row has six extents).
pub const MAX_RANK: usize = 6;

/// Extents of a tensor, row-major, dimension 0 slowest. Rank 0 is a scalar.
#[derive(
    Debug,
    Clone,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    serde::Serialize,
    serde::Deserialize,
)]
pub struct Shape(Vec<u64>);

impl Shape {
    /// A shape of these extents.
    pub fn new(extents: impl Into<Vec<u64>>) -> Shape {
        Shape(extents.into())
    }

    /// The extents, slowest first.
    pub fn extents(&self) -> &[u64] {
        &self.0
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// Number of elements; `None` when the product exceeds 64 bits.
    pub fn elements(&self) -> Option<u64> {
        self.0.iter().try_fold(1u64, |n, &d| n.checked_mul(d))
    }

    /// The shape as a matrix: columns are the last extent, rows the product of the others. A vector or a scalar is
    /// one row. `None` when the rows exceed 64 bits.
    pub fn matrix(&self) -> Option<(u64, u64)> {
        match self.0.split_last() {
            None => Some((1, 1)),
            Some((&cols, outer)) => {
                let rows = outer.iter().try_fold(1u64, |n, &d| n.checked_mul(d))?;
                Some((rows, cols))
            }
        }
    }
}

impl From<&[u64]> for Shape {
    fn from(extents: &[u64]) -> Shape {
        Shape(extents.to_vec())
    }
}

impl<const N: usize> From<[u64; N]> for Shape {
    fn from(extents: [u64; N]) -> Shape {
        Shape(extents.to_vec())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let body: Vec<String> = self.0.iter().map(u64::to_string).collect();
        f.pad(&format!("[{}]", body.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_reads_as_rows_by_columns() {
        assert_eq!(Shape::from([]).matrix(), Some((1, 1)));
        assert_eq!(Shape::from([7]).matrix(), Some((1, 7)));
        assert_eq!(Shape::from([2, 3, 50]).matrix(), Some((6, 50)));
        assert_eq!(Shape::from([u64::MAX, 2, 1]).matrix(), None);
        assert_eq!(Shape::from([u64::MAX, 2]).elements(), None);
        assert_eq!(Shape::from([3, 0]).elements(), Some(0));
    }
}
