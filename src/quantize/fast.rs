//! The common grids and casts over vector kernels, row by row.

use crate::num::pack;
use crate::recipe::ScaleRule;
use crate::tensor::DType;

use super::encoder::Work;
use super::error::{ErrorSum, Lanes, Wide};
use super::grid::{Codes, GridPlan, Levels, NEAR_OVERFLOW, WholeScale};
use super::kernel::Kernel;
use super::lanes::{CodeKind, Ops, Row, Source, Target};
use super::simd::LANES;

/// f32 bits from which a magnitude is infinite or NaN.
const NON_FINITE: u32 = 0x7f80_0000;

/// Rows were not encoded: they hold NaN, infinity or, in a cast, a value out of range; or magnitudes whose squares are no
/// f32 values.
#[derive(Debug)]
pub(super) struct Unfit;

/// The kernels for one weight.
#[derive(Clone, Copy)]
pub(super) struct Fast {
    ops: &'static Ops,
    source: Source,
}

/// The kernel's source type, where it has one.
fn source_of(dtype: DType) -> Option<Source> {
    match dtype {
        DType::F32 => Some(Source::F32),
        DType::F16 => Some(Source::F16),
        DType::BF16 => Some(Source::BF16),
        _ => None,
    }
}

/// The kernel's target type, where it has one.
pub(super) fn target_of(dtype: DType) -> Option<Target> {
    match dtype {
        DType::F32 => Some(Target::F32),
        DType::F16 => Some(Target::F16),
        DType::BF16 => Some(Target::BF16),
        DType::F8E4M3 => Some(Target::E4M3),
        DType::F8E5M2 => Some(Target::E5M2),
        _ => None,
    }
}

fn kind_of(codes: &Codes) -> Option<CodeKind> {
    match codes {
        Codes::Int { element, lo, hi } if matches!(element.bits(), 4 | 8) => {
            let half = element.bits() == 4;
            Some(CodeKind::Int { lo: *lo as f32, hi: *hi as f32, half })
        }
        Codes::Float { element } => match element.dtype() {
            DType::F8E4M3 => Some(CodeKind::E4M3),
            DType::F8E5M2 => Some(CodeKind::E5M2),
            DType::F4E2M1 => Some(CodeKind::E2M1),
            _ => None,
        },
        _ => None,
    }
}

impl Fast {
    /// Kernels for sources of that type; `None` leaves the work to the reference.
    pub fn new(kernel: Kernel, source: DType) -> Option<Fast> {
        Some(Fast { ops: kernel.ops()?, source: source_of(source)? })
    }

    /// Whether the kernels cover the grid.
    pub fn covers(plan: &GridPlan, cols: usize) -> bool {
        let second_known =
            plan.block2.is_none() || matches!(plan.whole, Some(WholeScale::Second(..)));
        kind_of(&plan.codes).is_some()
            && plan.foreign.is_none()
            && matches!(plan.rule, ScaleRule::Absmax | ScaleRule::Mx)
            && plan.zero.is_none()
            && plan.fwht.is_none()
            && second_known
            && (plan.block[1].is_multiple_of(LANES) || plan.block[1] >= cols)
    }

    /// Largest magnitude, as f32 bits without sign.
    pub fn peak(&self, bytes: &[u8]) -> u32 {
        let mut peak = [0];
        let block = bytes.len() / self.source.width();
        (self.ops.peaks)(self.source, bytes, block.max(1), &mut peak);
        peak[0]
    }

    /// Encodes whole row blocks of `cols` columns.
    pub fn grid(
        &self,
        plan: &GridPlan,
        cols: usize,
        bytes: &[u8],
        planes: &mut [Vec<u8>],
        work: &mut Work,
    ) -> Result<ErrorSum, Unfit> {
        let Some(kind) = kind_of(&plan.codes) else { return Err(Unfit) };
        let row_bytes = cols * self.source.width();
        let n = bytes.len() / row_bytes;
        let (block_rows, block) = match plan.whole {
            Some(WholeScale::First(_)) => (1, cols),
            _ => (plan.block[0], plan.block[1]),
        };
        let blocks = cols.div_ceil(block);
        let chunks = cols.div_ceil(LANES);
        let bits = plan.codes.bits();
        let code_row = (cols * bits as usize).div_ceil(8);
        let scale_bits = match &plan.levels {
            Levels::One(one) => one.scale.bits(),
            Levels::Two(two) => two.first.bits(),
        };
        let scale_row = (blocks * scale_bits as usize).div_ceil(8);
        let second = match plan.whole {
            Some(WholeScale::Second(_, value)) => value,
            _ => 1.0,
        };
        planes[0].resize(n * code_row, 0);
        let keeps_scales = !matches!(plan.whole, Some(WholeScale::First(_)));
        if keeps_scales {
            planes[plan.at.scale].resize(n.div_ceil(block_rows) * scale_row, 0);
        }
        // Chunks of 16 columns under one scale; where that is no power of two, every chunk gets an entry of its own.
        let per = block.div_ceil(LANES);
        let shift = match blocks {
            1 => Some(usize::BITS - 1),
            _ => per.is_power_of_two().then(|| per.ilog2()),
        };
        let mut sum = ErrorSum::default();
        for (i, group) in bytes.chunks(block_rows.saturating_mul(row_bytes)).enumerate() {
            work.peaks.clear();
            work.peaks.resize(blocks, 0);
            for row in group.chunks_exact(row_bytes) {
                (self.ops.peaks)(self.source, row, block, &mut work.peaks);
            }
            let largest = work.peaks.iter().fold(0, |largest, p| *p.max(&largest));
            if largest >= NON_FINITE {
                return Err(Unfit);
            }
            self.scales(plan, second, largest, work);
            let (scales, inverses) = match shift {
                Some(_) => (&work.scales.values, &work.scales.inverses),
                None => {
                    spread(&work.scales.values, per, chunks, &mut work.scale_of);
                    spread(&work.scales.inverses, per, chunks, &mut work.inverse_of);
                    (&work.scale_of, &work.inverse_of)
                }
            };
            let shift = shift.unwrap_or(0);
            if keeps_scales {
                pack(
                    &work.scales.codes,
                    scale_bits,
                    &mut planes[plan.at.scale][i * scale_row..][..scale_row],
                );
            }
            for (r, bytes) in group.chunks_exact(row_bytes).enumerate() {
                let row = Row { bytes, scales, inverses, shift, second };
                let out = &mut planes[0][(i * block_rows + r) * code_row..][..code_row];
                let lanes = (self.ops.codes)(kind, self.source, &row, out);
                self.add(&mut sum, &lanes, bytes)?;
            }
        }
        Ok(sum)
    }

    /// Adds the sums of a row.
    fn add(&self, sum: &mut ErrorSum, lanes: &Lanes, row: &[u8]) -> Result<(), Unfit> {
        match sum.add_lanes(lanes) {
            // A row of zeros has no error on any grid and adds nothing.
            Err(Wide) if self.peak(row) > 0 => Err(Unfit),
            _ => Ok(()),
        }
    }

    /// Scales of the blocks whose magnitudes are in `work.peaks`, the largest of which is given.
    fn scales(&self, plan: &GridPlan, second: f32, largest: u32, work: &mut Work) {
        let out = &mut work.scales;
        if let Some(WholeScale::First(chosen)) = plan.whole {
            (out.codes, out.values, out.inverses) =
                (vec![chosen.code], vec![chosen.scale], vec![chosen.inverse]);
            return;
        }
        let plain = largest < NEAR_OVERFLOW.to_bits();
        let kind = match &plan.levels {
            Levels::One(one) => one.kernel(),
            // The second level keeps products below the largest magnitude times a rounding.
            Levels::Two(two) => two.kernel(),
        };
        if let (Some(kind), true) = (kind, plain) {
            (self.ops.scales)(kind, second, &work.peaks, out);
            return;
        }
        out.codes.clear();
        out.values.clear();
        out.inverses.clear();
        for peak in &work.peaks {
            let amax = f32::from_bits(*peak);
            let chosen = match &plan.levels {
                Levels::One(one) => one.choose(amax),
                Levels::Two(two) => two.choose(two.target(amax), second),
            };
            out.codes.push(chosen.code);
            out.values.push(chosen.scale);
            out.inverses.push(chosen.inverse);
        }
    }

    /// Converts rows to a plain type in which magnitudes of `limit` (f32 bits) and more do not exist.
    pub fn cast(
        &self,
        target: Target,
        limit: u32,
        cols: usize,
        bytes: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<ErrorSum, Unfit> {
        let row_bytes = cols * self.source.width();
        out.resize(bytes.len() / self.source.width() * target.width(), 0);
        let mut sum = ErrorSum::default();
        for (row, out) in
            bytes.chunks_exact(row_bytes).zip(out.chunks_exact_mut(cols * target.width()))
        {
            if self.peak(row) >= limit.min(NON_FINITE) {
                return Err(Unfit);
            }
            let lanes = (self.ops.cast)(target, self.source, row, out);
            self.add(&mut sum, &lanes, row)?;
        }
        Ok(sum)
    }
}

/// Every value `per` times, `n` in all.
fn spread(values: &[f32], per: usize, n: usize, out: &mut Vec<f32>) {
    out.resize(n, 0.0);
    for (out, value) in out.chunks_mut(per).zip(values) {
        out.fill(*value);
    }
}
