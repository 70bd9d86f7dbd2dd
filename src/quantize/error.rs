//! Error sums that do not depend on how the work was cut, and the errors of the stage.

use std::fmt;

use super::simd::LANES;
use crate::diag;
use crate::num::NonFinite;
use crate::recipe::Rounding;
use crate::tensor::{DType, EncodingError};

/// Why a method cannot encode a weight at all; found before any weight is read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MethodError {
    /// The combination of options has no meaning.
    #[error("{0}")]
    Unsupported(String),
    /// The planes break a rule of the container.
    #[error("the encoding is malformed: {0}")]
    Encoding(#[from] EncodingError),
    /// Source values of this type cannot be quantized.
    #[error("{0} values cannot be quantized; only `keep` can store them")]
    Source(DType),
    /// A weight without elements, or one that does not fit in memory.
    #[error("a matrix of {rows} × {cols} cannot be encoded")]
    Extent {
        /// Rows.
        rows: u64,
        /// Columns.
        cols: u64,
    },
    /// Columns that must divide evenly do not.
    #[error("{cols} columns are no multiple of the {width} that the transform rotates together")]
    Transform {
        /// Columns of the weight.
        cols: u64,
        /// Block width of the transform.
        width: u64,
    },
    /// The method needs the peak magnitude of the whole tensor ([`super::Encoder::needs_peak`]).
    #[error("the peak magnitude of the whole tensor is needed first")]
    Peak,
}

/// Why rows could not be encoded. Nothing of the output may be used then.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum EncodeError {
    /// The source holds NaN or infinity; the index counts from the tensor's first element.
    #[error(transparent)]
    NonFinite(#[from] NonFinite),
    /// The rotation of a row's values leaves the range of f32.
    #[error("the rotation of row {row} exceeds the range of f32")]
    Rotation {
        /// Row of the tensor.
        row: u64,
    },
    /// The package whose rounding is reproduced gives no finite values itself.
    #[error(
        "rounding \"{}\" turns finite values into NaN or infinity in the block of row {row}, as {} itself does; \
         rounding \"rad\" does not",
        .rounding.name(), .rounding.name()
    )]
    Lost {
        /// Whose arithmetic.
        rounding: Rounding,
        /// First row of the block.
        row: u64,
    },
    /// Values beyond the range of the target of a cast.
    #[error(
        "{} values exceed the largest {dtype}, {largest:e}; the largest is {peak:e}, the first at element {}",
        diag::count(*.count),
        diag::count(*.first)
    )]
    Range {
        /// Target type.
        dtype: DType,
        /// Its largest finite value.
        largest: f32,
        /// Largest magnitude among the rows.
        peak: f32,
        /// Index of the first value that does not fit, from the tensor's first element.
        first: u64,
        /// How many do not fit.
        count: u64,
    },
}

impl EncodeError {
    /// Two findings in one weight as one. Findings of different kinds cannot be counted together: the graver stays.
    pub fn merge(self, other: EncodeError) -> EncodeError {
        match (self, other) {
            (EncodeError::NonFinite(a), EncodeError::NonFinite(b)) => a.merge(b).into(),
            (a @ EncodeError::NonFinite(_), _) | (_, a @ EncodeError::NonFinite(_)) => a,
            (
                EncodeError::Range { dtype, largest, peak, first, count },
                EncodeError::Range { peak: other_peak, first: other_first, count: more, .. },
            ) => EncodeError::Range {
                dtype,
                largest,
                peak: peak.max(other_peak),
                first: first.min(other_first),
                count: count + more,
            },
            (a @ EncodeError::Range { .. }, _) | (_, a @ EncodeError::Range { .. }) => a,
            (EncodeError::Rotation { row: a }, EncodeError::Rotation { row: b }) => {
                EncodeError::Rotation { row: a.min(b) }
            }
            (a @ EncodeError::Rotation { .. }, _) | (_, a @ EncodeError::Rotation { .. }) => a,
            (EncodeError::Lost { rounding, row }, EncodeError::Lost { row: other, .. }) => {
                EncodeError::Lost { rounding, row: row.min(other) }
            }
        }
    }
}

/// Columns whose squares are added in f32, at most eight to a lane; sums of runs are added in f64.
pub(super) const RUN: usize = 128;

/// Sums of one row. The square of column j is added to lane j mod 16, in column order, by a fused multiply-add: in f32
/// within runs of [`RUN`] columns, in f64 over runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Lanes {
    pub error: [f64; LANES],
    pub squared: [f64; LANES],
}

impl Lanes {
    pub const ZERO: Lanes = Lanes { error: [0.0; LANES], squared: [0.0; LANES] };

    /// Adds the sums of a run.
    #[inline(always)]
    pub fn add(&mut self, error: &[f32; LANES], squared: &[f32; LANES]) {
        for i in 0..LANES {
            self.error[i] += f64::from(error[i]);
            self.squared[i] += f64::from(squared[i]);
        }
    }

    /// One row: the scalar reference of the order.
    pub fn of_row(values: &[f32], decoded: &[f32]) -> Lanes {
        let mut lanes = Lanes::ZERO;
        for (values, decoded) in values.chunks(RUN).zip(decoded.chunks(RUN)) {
            let (mut error, mut squared) = ([0f32; LANES], [0f32; LANES]);
            for (i, (v, d)) in values.iter().zip(decoded).enumerate() {
                let d = v - d;
                error[i % LANES] = d.mul_add(d, error[i % LANES]);
                squared[i % LANES] = v.mul_add(*v, squared[i % LANES]);
            }
            lanes.add(&error, &squared);
        }
        lanes
    }

    /// One row in f64 throughout, for rows whose squares leave the range of f32.
    fn of_wide_row(values: &[f32], decoded: &[f32]) -> Lanes {
        let mut lanes = Lanes::ZERO;
        for (i, (v, d)) in values.iter().zip(decoded).enumerate() {
            let v = f64::from(*v);
            let d = v - f64::from(*d);
            lanes.error[i % LANES] += d * d;
            lanes.squared[i % LANES] += v * v;
        }
        lanes
    }

    /// Whether f32 held every square of the row: neither sum is so large that a square may have overflowed, and Σx² not so
    /// small that those of rounding errors may have vanished (2^-24 of a value of 2^-31, squared, is 2^-110).
    fn held(&self) -> bool {
        (WIDE_BELOW..WIDE_FROM).contains(&tree(self.squared)) && tree(self.error) < WIDE_FROM
    }
}

/// A row has to be summed in f64.
#[derive(Debug, PartialEq)]
pub(super) struct Wide;

/// Rows with a sum from here on are summed in f64: 2^100.
const WIDE_FROM: f64 = (1u128 << 100) as f64;
/// Rows of Σx² below are summed in f64: 2^-60.
const WIDE_BELOW: f64 = 1.0 / (1u64 << 60) as f64;

/// Halves folded onto each other: lane i takes lane i + 8, then i + 4, i + 2, i + 1.
fn tree(mut lanes: [f64; LANES]) -> f64 {
    let mut n = LANES / 2;
    while n > 0 {
        for i in 0..n {
            lanes[i] += lanes[i + n];
        }
        n /= 2;
    }
    lanes[0]
}

/// Squared error and squared magnitude of rows: Σ(x − x̂)² and Σx², x̂ as the decoder gives it.
///
/// Within a row, squares are added in a fixed order: in f32 over runs of 128 columns, in 16 lanes by column, then in f64
/// over runs and lanes, which is exact to about one part in a million; rows whose squares f32 does not hold are added in
/// f64 throughout. Rows are added exactly, so sums of any rows can be merged in any order and any grouping with the same
/// result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ErrorSum {
    error: Exact,
    squared: Exact,
}

impl ErrorSum {
    /// Adds one row of finite values and what stands for them.
    pub fn add_row(&mut self, values: &[f32], decoded: &[f32]) {
        self.add_row_by(Lanes::of_row, values, decoded);
    }

    /// [`ErrorSum::add_row`] with a kernel's sums, which are those of [`Lanes::of_row`].
    pub(super) fn add_row_by(
        &mut self,
        kernel: fn(&[f32], &[f32]) -> Lanes,
        values: &[f32],
        decoded: &[f32],
    ) {
        let lanes = kernel(values, decoded);
        if self.add_lanes(&lanes).is_err() {
            let wide = Lanes::of_wide_row(values, decoded);
            self.error.add(tree(wide.error));
            self.squared.add(tree(wide.squared));
        }
    }

    /// Adds the sums of a row.
    ///
    /// # Errors
    /// f32 does not hold the row's squares; then nothing is added.
    pub(super) fn add_lanes(&mut self, lanes: &Lanes) -> Result<(), Wide> {
        if !lanes.held() {
            return Err(Wide);
        }
        self.error.add(tree(lanes.error));
        self.squared.add(tree(lanes.squared));
        Ok(())
    }

    /// Adds the sums of other rows.
    pub fn merge(&mut self, other: &ErrorSum) {
        self.error.merge(&other.error);
        self.squared.merge(&other.squared);
    }

    /// Σ(x − x̂)².
    pub fn squared_error(&self) -> f64 {
        self.error.value()
    }

    /// Σx².
    pub fn squared(&self) -> f64 {
        self.squared.value()
    }

    /// Relative Frobenius error sqrt(Σ(x − x̂)² / Σx²); `None` when all values are zero.
    pub fn relative(&self) -> Option<f64> {
        let squared = self.squared();
        (squared > 0.0).then(|| (self.squared_error() / squared).sqrt())
    }
}

/// A non-negative sum in fixed point. The square of a difference of two f32 values is a multiple of 2^-298 and below
/// 2^258; 640 bits from 2^-298 upwards leave room for 2^84 of them.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
struct Exact([u64; 10]);

const UNIT: i32 = -298;

impl Exact {
    /// Adds a finite, non-negative number.
    fn add(&mut self, x: f64) {
        debug_assert!(x.is_finite() && x >= 0.0);
        let bits = x.to_bits();
        let exponent = (bits >> 52) as i32;
        // Zero: nothing below 2^-298 occurs.
        if exponent == 0 {
            return;
        }
        let mantissa = u128::from(bits & ((1 << 52) - 1) | 1 << 52);
        // x = mantissa · 2^(exponent − 1075); its low zero bits make up for a place below the unit.
        let shift = exponent - 1075 - UNIT;
        let (mantissa, shift) =
            if shift < 0 { (mantissa >> (-shift).min(64), 0) } else { (mantissa, shift as usize) };
        let wide = mantissa << (shift % 64);
        let mut term = [0u64; 10];
        for (i, part) in [wide as u64, (wide >> 64) as u64].into_iter().enumerate() {
            if let Some(limb) = term.get_mut(shift / 64 + i) {
                *limb = part;
            }
        }
        self.merge(&Exact(term));
    }

    fn merge(&mut self, other: &Exact) {
        let mut carry = false;
        for (a, b) in self.0.iter_mut().zip(other.0) {
            let (sum, over1) = a.overflowing_add(b);
            let (sum, over2) = sum.overflowing_add(u64::from(carry));
            *a = sum;
            carry = over1 | over2;
        }
    }

    fn value(&self) -> f64 {
        // From the top, so that what rounding drops is below the last place of what is kept.
        let mut sum = 0.0;
        for (i, limb) in self.0.iter().enumerate().rev() {
            sum += *limb as f64 * 2f64.powi(64 * i as i32 + UNIT);
        }
        sum
    }
}

impl fmt::Debug for Exact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:e}", self.value())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn row(values: &[f32], decoded: &[f32]) -> ErrorSum {
        let mut sum = ErrorSum::default();
        sum.add_row(values, decoded);
        sum
    }

    #[test]
    fn sums_are_those_of_the_formula() {
        let sum = row(&[3.0, -4.0, 0.5], &[3.0, -4.5, 0.0]);
        assert_eq!(sum.squared_error(), 0.5);
        assert_eq!(sum.squared(), 25.25);
        assert_eq!(sum.relative(), Some((0.5f64 / 25.25).sqrt()));
        assert_eq!(row(&[0.0], &[0.0]).relative(), None);
    }

    #[test]
    fn the_extremes_of_f32_neither_vanish_nor_overflow() {
        let tiny = f32::from_bits(1);
        let sum = row(&[tiny], &[0.0]);
        assert_eq!(sum.squared_error(), 2f64.powi(-298));
        let mut sum = ErrorSum::default();
        for _ in 0..1000 {
            sum.merge(&row(&[f32::MAX, f32::MAX], &[-f32::MAX, f32::MAX]));
        }
        let one = 4.0 * f64::from(f32::MAX) * f64::from(f32::MAX);
        assert!((sum.squared_error() / (1000.0 * one) - 1.0).abs() < 1e-15);
        sum.merge(&row(&[tiny], &[0.0]));
        assert!((sum.squared() / (500.0 * one) - 1.0).abs() < 1e-15);
    }

    #[test]
    fn lanes_follow_the_column_runs_are_added_in_f64_and_lanes_fold_in_halves() {
        // The last place of an f32 of 2^24 is 2: within a run a square of 1 vanishes beside 2^24 in its lane, in another
        // lane or another run it does not.
        let mut values = [0.0f32; 256];
        values[0] = 4096.0;
        values[16] = 1.0;
        assert_eq!(row(&values, &[0.0; 256]).squared(), 2f64.powi(24));
        values[9] = 1.0;
        assert_eq!(row(&values, &[0.0; 256]).squared(), 2f64.powi(24) + 1.0);
        values[128] = 1.0;
        let lanes = Lanes::of_row(&values, &[0.0; 256]);
        assert_eq!((lanes.squared[0], lanes.squared[9]), (2f64.powi(24) + 1.0, 1.0));
        // The last place of 2^54 is 4: two squares of 1.5625 in lanes 1 and 9 meet first and make 4.
        let mut lanes = Lanes::ZERO;
        (lanes.squared[0], lanes.squared[1], lanes.squared[9]) = (2f64.powi(54), 1.5625, 1.5625);
        assert_eq!(tree(lanes.squared), 2f64.powi(54) + 4.0);
    }

    #[test]
    fn rows_whose_squares_f32_does_not_hold_are_summed_in_f64() {
        // The bounds of Σx²: below 2^-60 and from 2^100 on.
        for (x, wide) in [(2f32.powi(-30), false), (2f32.powi(-31), true)].into_iter().chain([
            (2f32.powi(49), false),
            (2f32.powi(50), true),
            (f32::MAX, true),
        ]) {
            let lanes = Lanes::of_row(&[x], &[0.0]);
            assert_eq!(ErrorSum::default().add_lanes(&lanes).is_err(), wide, "{x:e}");
            let square = f64::from(x) * f64::from(x);
            assert_eq!(row(&[x], &[0.0]).squared(), square, "{x:e}");
        }
        // A rounding error of the smallest value that such a row can have beside its largest.
        let x = 2f32.powi(-30);
        let off = f32::from_bits(x.to_bits() - 1);
        assert_eq!(row(&[x], &[off]).squared_error(), 2f64.powi(-108));
        assert_eq!(row(&[0.0; 40], &[0.0; 40]), ErrorSum::default());
    }

    proptest! {
        #[test]
        fn any_grouping_of_rows_gives_the_same_sum(
            bits in prop::collection::vec((any::<u32>(), any::<u32>()), 1..40), cut in 0usize..40,
        ) {
            let finite = |b: u32| { let x = f32::from_bits(b); if x.is_finite() { x } else { 1.0 } };
            let rows: Vec<ErrorSum> = bits.iter().map(|(a, b)| row(&[finite(*a)], &[finite(*b)])).collect();
            let mut forward = ErrorSum::default();
            rows.iter().for_each(|r| forward.merge(r));
            let (mut left, mut right) = (ErrorSum::default(), ErrorSum::default());
            let cut = cut.min(rows.len());
            rows[cut..].iter().rev().for_each(|r| right.merge(r));
            rows[..cut].iter().for_each(|r| left.merge(r));
            right.merge(&left);
            prop_assert_eq!(right, forward);
        }
    }
}
