//! The reference arithmetic of every grid, in the order a reader would do it by hand.
//!
//! `rounding rad` is the arithmetic of radiance container version 2's own converter (its quantizer `rtn`), bit for
//! bit: the files of this folder state one rule each. Speed is `fast`'s business.

mod codes;
mod scale;
mod search;
mod transform;

pub(super) use codes::Codes;
pub(super) use scale::{Chosen, NEAR_OVERFLOW, OneLevel, TwoLevel};
pub(super) use transform::hadamard;

use crate::num::{Element, mini, pack, round_away};
use crate::recipe::{Grid, ScaleRule};
use crate::tensor::{DType, Encoding, role};

use search::Sample;

use super::error::MethodError;
use super::rounding::Foreign;

/// A grid checked against a matrix.
#[derive(Debug, Clone)]
pub(super) struct GridPlan {
    pub codes: Codes,
    /// Rows and columns of a first-level block, resolved (never 0).
    pub block: [usize; 2],
    /// Rows and columns of a second-level block, resolved.
    pub block2: Option<[usize; 2]>,
    pub levels: Levels,
    pub zero: Option<Element>,
    pub fwht: Option<usize>,
    pub rule: ScaleRule,
    /// Another package's arithmetic, in place of that of this folder.
    pub foreign: Option<Foreign>,
    /// Positions of the planes after the codes.
    pub at: Planes,
    /// The scale of the whole tensor, where the peak alone fixes it.
    pub whole: Option<WholeScale>,
    cols: usize,
}

/// How the scales come from a block's magnitude.
#[derive(Debug, Clone, Copy)]
pub(super) enum Levels {
    One(OneLevel),
    Two(TwoLevel),
}

/// Indices of planes in the encoding.
#[derive(Debug, Clone, Copy)]
pub(super) struct Planes {
    pub scale: usize,
    pub zero: Option<usize>,
    pub scale_1: Option<usize>,
    pub table: Option<usize>,
}

/// Rows that could not be encoded; a number counts among the rows given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// The rotation of a row exceeds f32.
    Rotation(usize),
    /// The other package's own arithmetic gives no finite values in the block that begins at a row. The planes are
    /// what it gives.
    Lost(usize),
}

/// A scale known before any row is encoded.
#[derive(Debug, Clone, Copy)]
pub(super) enum WholeScale {
    /// The only level.
    First(Chosen),
    /// The second level: stored code and value.
    Second(u32, f32),
}

/// Whether `grid` takes one scale for the whole tensor from its peak magnitude alone.
pub(super) fn needs_peak(grid: &Grid) -> bool {
    let whole = match grid.scale2 {
        Some(second) => second.block == [0, 0] && grid.block != [0, 0],
        None => grid.block == [0, 0],
    };
    // A codebook may take its sign from the largest value, a rotation moves the peak, a search looks at all values.
    // for the scales of a single level.
    let from_peak = match grid.rule {
        ScaleRule::Absmax | ScaleRule::Mx => true,
        ScaleRule::Search => grid.scale2.is_some(),
        ScaleRule::Fixed(_) => false,
    };
    whole && from_peak && grid.zero.is_none() && grid.fwht.is_none() && grid.table.is_none()
}

impl GridPlan {
    /// Checks the combination of options and resolves blocks for a matrix of `rows` × `cols`.
    pub fn new(
        grid: &Grid,
        encoding: &Encoding,
        source: DType,
        [rows, cols]: [usize; 2],
        peak: Option<f32>,
    ) -> Result<GridPlan, MethodError> {
        let refuse = |why: String| Err(MethodError::Unsupported(why));
        let codes = Codes::new(grid)?;
        let Some(first) = Element::new(grid.scale).filter(|_| grid.scale != DType::Bool) else {
            return refuse(format!("{} is no scale type", grid.scale));
        };
        let mx = grid.rule == ScaleRule::Mx;
        if mx
            && (grid.scale2.is_some()
                || grid.zero.is_some()
                || matches!(codes, Codes::Table { .. }))
        {
            return refuse(
                "the mx rule takes one scale level, and neither a zero point nor a codebook".into(),
            );
        }
        if mx != (grid.scale == DType::E8M0) && grid.scale2.is_none() {
            return refuse("e8m0 scales and the mx rule go together".into());
        }
        if let ScaleRule::Fixed(value) = grid.rule {
            if grid.scale2.is_some() || grid.zero.is_some() {
                return refuse("a fixed scale takes one level and no zero point".into());
            }
            let reach = value as f32 * codes.reach();
            if !(value > 0.0 && (value as f32).is_normal() && (2.0 * reach).is_finite()) {
                return refuse(format!(
                    "{value:e} is no usable fixed scale; it must be positive and every code times it an f32"
                ));
            }
        }
        let zero = match grid.zero {
            None => None,
            Some(dtype) => match Element::new(dtype) {
                // Every zero point from 0 to the largest code must be exact.
                Some(e)
                    if (0..=codes.top() as u32)
                        .all(|z| e.decode(e.encode(z as f32)) == z as f32) =>
                {
                    Some(e)
                }
                _ => {
                    return refuse(format!(
                        "{dtype} cannot hold the zero points of {} codes",
                        grid.codes
                    ));
                }
            },
        };
        let resolve = |block: [u64; 2]| {
            let side = |b: u64, n: usize| match usize::try_from(b) {
                Ok(b) if b > 0 => b.min(n),
                _ => n,
            };
            [side(block[0], rows), side(block[1], cols)]
        };
        let block = resolve(grid.block);
        let levels = match grid.scale2 {
            None => Levels::One(OneLevel::new(&codes, first, grid.rule)),
            Some(second) => {
                let Some(element) =
                    Element::new(second.dtype).filter(|_| second.dtype != DType::Bool)
                else {
                    return refuse(format!("{} is no scale type", second.dtype));
                };
                let nests = |i: usize| {
                    second.block[i] == 0
                        || grid.block[i] > 0 && second.block[i].is_multiple_of(grid.block[i])
                };
                if !nests(0) || !nests(1) {
                    return refuse(format!(
                        "second-level blocks of {:?} are no multiple of first-level blocks of {:?}",
                        second.block, grid.block
                    ));
                }
                Levels::Two(TwoLevel::new(&codes, first, element))
            }
        };
        let fwht = match grid.fwht {
            None => None,
            Some(n) if cols.is_multiple_of(n as usize) => Some(n as usize),
            Some(n) => {
                return Err(MethodError::Transform { cols: cols as u64, width: u64::from(n) });
            }
        };
        let index = |role: &str| encoding.plane(role).map(|(i, _)| i);
        let at = Planes {
            scale: index(role::SCALE).unwrap_or(1),
            zero: index(role::ZERO),
            scale_1: index(role::SCALE_1),
            table: index(role::TABLE),
        };
        let mut plan = GridPlan {
            codes,
            block,
            block2: grid.scale2.map(|s| resolve(s.block)),
            levels,
            zero,
            fwht,
            rule: grid.rule,
            foreign: Foreign::new(grid, source, cols)?,
            at,
            whole: None,
            cols,
        };
        if needs_peak(grid) {
            let peak = peak.filter(|p| p.is_finite() && *p >= 0.0).ok_or(MethodError::Peak)?;
            plan.whole = Some(match (&plan.levels, &mut plan.foreign) {
                (Levels::One(_), Some(foreign)) => {
                    let (code, value) = foreign.peaked(peak);
                    WholeScale::First(Chosen::new(code, value, 1.0))
                }
                (Levels::Two(_), Some(foreign)) => {
                    let (code, value) = foreign.peaked(peak);
                    WholeScale::Second(code, value)
                }
                (Levels::One(one), None) => WholeScale::First(one.choose(peak)),
                (Levels::Two(two), None) => {
                    let (code, value) = two.second(two.target(peak));
                    WholeScale::Second(code, value)
                }
            });
        } else if let (ScaleRule::Fixed(_), Levels::One(one), [0, 0]) =
            (grid.rule, &plan.levels, grid.block)
        {
            plan.whole = Some(WholeScale::First(one.choose(0.0)));
        }
        Ok(plan)
    }

    /// Rows that share a scale which is not known in advance.
    pub fn row_block(&self) -> usize {
        match (self.whole, self.block2) {
            (Some(WholeScale::First(_)), _) => 1,
            (Some(WholeScale::Second(..)), _) | (None, None) => self.block[0],
            (None, Some(second)) => second[0],
        }
    }

    /// Planes that do not depend on any row, by index.
    pub fn whole_planes(&self) -> Vec<(usize, Vec<u8>)> {
        let mut planes = Vec::new();
        match self.whole {
            Some(WholeScale::First(chosen)) => {
                let Levels::One(one) = &self.levels else { return planes };
                planes.push((
                    self.at.scale,
                    packed(&[self.stored(chosen.code, one.scale)], one.scale.bits()),
                ));
            }
            Some(WholeScale::Second(code, _)) => {
                if let (Levels::Two(two), Some(at)) = (&self.levels, self.at.scale_1) {
                    planes.push((at, packed(&[code], two.second.bits())));
                }
            }
            None => {}
        }
        if let (Codes::Table { values, stored, .. }, Some(at)) = (&self.codes, self.at.table) {
            let codes: Vec<u32> = values.iter().map(|v| stored.encode(*v)).collect();
            planes.push((at, packed(&codes, stored.bits())));
        }
        planes
    }

    /// The stored code of a scale: the rotation's 1/N goes into it.
    fn stored(&self, code: u32, element: Element) -> u32 {
        match self.fwht {
            None => code,
            Some(n) => scale::never_zero(element, element.decode(code) * (1.0 / n as f32)).0,
        }
    }

    /// Encodes whole row blocks. `values` holds `n` rows and is used up; planes that are known in advance stay as
    /// they are, the others are filled. `importance` weighs the columns in a search.
    ///
    /// # Errors
    /// The first row that a rotation or another package's arithmetic cannot encode.
    pub fn encode(
        &self,
        values: &mut [f32],
        importance: Option<&[f32]>,
        planes: &mut [Vec<u8>],
    ) -> Result<(), Fault> {
        let cols = self.cols;
        let n = values.len() / cols;
        if let Some(width) = self.fwht {
            for (i, row) in values.chunks_exact_mut(cols).enumerate() {
                hadamard(row, width);
                if row.iter().any(|v| !v.is_finite()) {
                    return Err(Fault::Rotation(i));
                }
            }
        }
        let [br, bc] = self.block;
        // A scale known for all rows lets the caller cut anywhere; the block is then whatever rows are here.
        let br = br.min(n.max(1));
        let grid =
            Grids { codes: vec![0; values.len()], width: cols.div_ceil(bc), ..Grids::default() };
        let mut grid = grid.sized(n.div_ceil(br));
        let second = self.block2.unwrap_or([br, bc]);
        let mut seconds = Vec::new();
        for r2 in (0..n).step_by(second[0].max(1)) {
            for c2 in (0..cols).step_by(second[1]) {
                let (r_end, c_end) = (n.min(r2 + second[0]), cols.min(c2 + second[1]));
                let mut blocks = Vec::new();
                for r in (r2..r_end).step_by(br) {
                    for c in (c2..c_end).step_by(bc) {
                        blocks.push(Block {
                            at: [r, c],
                            end: [r_end.min(r + br), c_end.min(c + bc)],
                            scale_at: r / br * grid.width + c / bc,
                        });
                    }
                }
                let code = self.encode_second(values, importance, &blocks, &mut grid);
                seconds.push(code);
            }
        }
        self.write(&grid, &seconds, planes);
        grid.lost.map_or(Ok(()), |row| Err(Fault::Lost(row)))
    }

    /// Encodes the blocks that share a second-level scale (or the one block, without a second level); returns the
    /// second level's stored code.
    fn encode_second(
        &self,
        values: &[f32],
        importance: Option<&[f32]>,
        blocks: &[Block],
        grid: &mut Grids,
    ) -> u32 {
        let cols = self.cols;
        let gathered = |b: &Block| -> Vec<f32> {
            (b.at[0]..b.end[0])
                .flat_map(|r| values[r * cols + b.at[1]..r * cols + b.end[1]].iter().copied())
                .collect()
        };
        let weights = |b: &Block| -> Option<Vec<f32>> {
            let row = importance?.get(b.at[1]..b.end[1])?;
            Some(row.repeat(b.end[0] - b.at[0]))
        };
        if let Some(foreign) = &self.foreign {
            let mut codes = Vec::new();
            for b in blocks {
                let v = gathered(b);
                codes.resize(v.len(), 0);
                let scaled = foreign.block(&v, &mut codes);
                grid.scales[b.scale_at] = scaled.scale;
                grid.zeros[b.scale_at] = scaled.zero;
                if scaled.lost {
                    grid.lost = grid.lost.or(Some(b.at[0]));
                }
                let width = b.end[1] - b.at[1];
                for (row, codes) in (b.at[0]..b.end[0]).zip(codes.chunks_exact(width)) {
                    grid.codes[row * cols + b.at[1]..][..width].copy_from_slice(codes);
                }
            }
            return 0;
        }
        match &self.levels {
            Levels::One(one) => {
                for b in blocks {
                    let (v, w) = (gathered(b), weights(b));
                    let sample = Sample { values: &v, weights: w.as_deref() };
                    let (chosen, zero) = match self.whole {
                        Some(WholeScale::First(chosen)) => (chosen, 0),
                        _ if self.zero.is_some() => self.affine(sample, |s| {
                            let (code, value) = scale::never_zero(one.scale, s);
                            Chosen::new(code, value, 1.0)
                        }),
                        _ => (self.one_level(one, sample), 0),
                    };
                    grid.scales[b.scale_at] = self.stored(chosen.code, one.scale);
                    self.codes_of(b, &v, &chosen, zero, grid);
                }
                0
            }
            Levels::Two(two) => {
                let targets: Vec<f32> =
                    blocks.iter().map(|b| self.target(two, &gathered(b))).collect();
                let (code, t) = match self.whole {
                    Some(WholeScale::Second(code, t)) => (code, t),
                    _ => two.second(targets.iter().fold(0.0, |m: f32, a| m.max(a.abs()))),
                };
                for (b, target) in blocks.iter().zip(targets) {
                    let (v, w) = (gathered(b), weights(b));
                    let sample = Sample { values: &v, weights: w.as_deref() };
                    let (chosen, zero) = match self.zero {
                        Some(_) => self.affine(sample, |s| {
                            two.choose(if v.iter().all(|x| *x == 0.0) { 0.0 } else { s }, t)
                        }),
                        None => (self.two_level(two, sample, target, t), 0),
                    };
                    grid.scales[b.scale_at] = chosen.code;
                    self.codes_of(b, &v, &chosen, zero, grid);
                }
                self.stored(code, two.second)
            }
        }
    }

    fn one_level(&self, one: &OneLevel, sample: Sample<'_>) -> Chosen {
        let v = sample.values;
        let rounded = |s: f32| {
            let (code, value) = scale::never_zero(one.scale, s);
            scale::capped(one.scale, Chosen::new(code, value, 1.0), self.codes.reach())
        };
        let start = match &self.codes {
            Codes::Table { peak, signed, has_zero, .. } => {
                let s = codes::table_scale(v, *peak, *signed);
                // A book without a zero can say zero only by its scale.
                if s == 0.0 && !has_zero {
                    return Chosen::new(one.scale.encode(0.0), 0.0, 1.0);
                }
                rounded(s)
            }
            _ => one.choose(amax(v)),
        };
        match self.rule {
            ScaleRule::Search if amax(v) > 0.0 => {
                let base = match &self.codes {
                    Codes::Table { peak, signed, .. } => codes::table_scale(v, *peak, *signed),
                    codes => amax(v) / codes.top(),
                };
                let round = |s: f64| {
                    let chosen = rounded(s as f32);
                    (chosen.code, chosen.scale)
                };
                let (code, value) =
                    search::symmetric(sample, &self.codes, base, (start.code, start.scale), round);
                Chosen::new(code, value, 1.0)
            }
            _ => start,
        }
    }

    /// What a first-level block's scale should be before the second level is known.
    fn target(&self, two: &TwoLevel, v: &[f32]) -> f32 {
        if self.zero.is_some() {
            let (lo, hi) = ends(v);
            return if lo == hi { 0.0 } else { scale::range(lo, hi, self.codes.top()) };
        }
        match &self.codes {
            Codes::Table { peak, signed, .. } => codes::table_scale(v, *peak, *signed),
            _ => two.target(amax(v)),
        }
    }

    /// The first level of a block under a second level of value `second`. A search tries the scales that the first
    /// level has, under the second that absmax gives: a weight's peak fixes it, whoever shares it.
    fn two_level(&self, two: &TwoLevel, sample: Sample<'_>, target: f32, second: f32) -> Chosen {
        let start = two.choose(target, second);
        if self.rule != ScaleRule::Search || target == 0.0 {
            return start;
        }
        let round = |s: f64| {
            let s = s as f32;
            let s = if s == 0.0 { f32::from_bits(1).copysign(target) } else { s };
            let chosen = two.choose(s, second);
            (chosen.code, chosen.effective())
        };
        let start = (start.code, start.effective());
        let (code, _) = search::symmetric(sample, &self.codes, target, start, round);
        Chosen::new(code, two.first.decode(code), second)
    }

    /// Scale and zero point of an asymmetric block.
    fn affine(&self, sample: Sample<'_>, choose: impl Fn(f32) -> Chosen) -> (Chosen, i64) {
        let (lo, hi) = ends(sample.values);
        let top = self.codes.top();
        // The largest difference of two codes must decode to a finite value.
        let choose = |s: f32| choose(s.min(f32::MAX / top * (63.0 / 64.0)));
        let at = |lo: f32, hi: f32| {
            let s = scale::range(lo, hi, top);
            let chosen = choose(if s > 0.0 { s } else { scale::ZERO_BLOCK });
            let zero = ((-lo / chosen.effective() + 0.5) as i64).clamp(0, top as i64);
            (chosen, zero)
        };
        if self.rule == ScaleRule::Search && lo < hi {
            return search::asymmetric(sample, lo, hi, top, at, choose);
        }
        at(lo, hi)
    }

    fn codes_of(&self, b: &Block, v: &[f32], chosen: &Chosen, zero: i64, grid: &mut Grids) {
        let width = b.end[1] - b.at[1];
        let fixed = match self.rule {
            ScaleRule::Fixed(value) => Some(1.0 / value),
            _ => None,
        };
        let searched = self.rule == ScaleRule::Search && self.zero.is_none();
        for (i, &x) in v.iter().enumerate() {
            let at = (b.at[0] + i / width) * self.cols + b.at[1] + i % width;
            grid.codes[at] = if self.zero.is_some() {
                round_away(chosen.quotient(x))
                    .saturating_add(zero)
                    .clamp(0, self.codes.top() as i64) as u32
            } else if let Some(inverse) = fixed {
                self.codes.code((f64::from(x) * inverse) as f32)
            } else if searched {
                self.codes.code_f64(f64::from(x) / f64::from(chosen.effective()))
            } else {
                self.codes.code(chosen.quotient(x))
            };
        }
        if self.zero.is_some() {
            grid.zeros[b.scale_at] = zero as u32;
        }
    }

    fn write(&self, grid: &Grids, seconds: &[u32], planes: &mut [Vec<u8>]) {
        rows_packed(&grid.codes, self.cols, self.codes.bits(), &mut planes[0]);
        let first = match &self.levels {
            Levels::One(one) => one.scale,
            Levels::Two(two) => two.first,
        };
        if !matches!(self.whole, Some(WholeScale::First(_))) {
            rows_packed(&grid.scales, grid.width, first.bits(), &mut planes[self.at.scale]);
        }
        if let (Some(zero), Some(at)) = (self.zero, self.at.zero) {
            let codes: Vec<u32> = grid.zeros.iter().map(|z| zero.encode(*z as f32)).collect();
            rows_packed(&codes, grid.width, zero.bits(), &mut planes[at]);
        }
        if let (Levels::Two(two), Some(at), Some(block)) =
            (&self.levels, self.at.scale_1, self.block2)
            && self.whole.is_none()
        {
            rows_packed(seconds, self.cols.div_ceil(block[1]), two.second.bits(), &mut planes[at]);
        }
    }
}

/// Elements of the planes of some rows, not yet packed.
#[derive(Default)]
struct Grids {
    codes: Vec<u32>,
    scales: Vec<u32>,
    zeros: Vec<u32>,
    /// First row of the first block that another package's arithmetic loses.
    lost: Option<usize>,
    /// First-level blocks in a row.
    width: usize,
}

impl Grids {
    fn sized(mut self, block_rows: usize) -> Grids {
        self.scales = vec![0; block_rows * self.width];
        self.zeros = vec![0; block_rows * self.width];
        self
    }
}

struct Block {
    at: [usize; 2],
    end: [usize; 2],
    scale_at: usize,
}

/// Largest magnitude.
fn amax(v: &[f32]) -> f32 {
    v.iter().fold(0.0, |m, x| m.max(x.abs()))
}

/// Smallest and largest value, 0 included.
fn ends(v: &[f32]) -> (f32, f32) {
    v.iter().fold((0.0, 0.0), |(lo, hi), x| (x.min(lo), x.max(hi)))
}

fn packed(codes: &[u32], bits: u32) -> Vec<u8> {
    let mut out = Vec::new();
    rows_packed(codes, codes.len(), bits, &mut out);
    out
}

/// Packs rows of `width` codes.
fn rows_packed(codes: &[u32], width: usize, bits: u32, out: &mut Vec<u8>) {
    let row_bytes = (width * bits as usize).div_ceil(8);
    out.clear();
    out.resize(codes.len() / width * row_bytes, 0);
    for (row, out) in codes.chunks_exact(width).zip(out.chunks_exact_mut(row_bytes)) {
        pack(row, bits, out);
    }
}

/// 2^64: a scale whose reciprocal overflows is at most 2^-128, so its product with this has a finite reciprocal.
pub(super) const LIFT: f32 = mini::pow2(64);
