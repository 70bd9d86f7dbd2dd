//! The arithmetic of other packages, step by step, one file for each.
//!
//! These are scalar models of what the packages compute: which intermediate is rounded to which type, what a block of
//! zeros gets, where a value is clamped. Packing and the names of tensors are matters of import and export; codes
//! here are the container's (integers with a zero point unsigned, two's complement otherwise).
//!
//! # Where a package's result cannot be kept
//! Some of the arithmetic leaves the finite numbers on finite input: a range beyond the source's type gives an
//! infinite scale, a division of zero by zero NaN codes. The result is then still computed as the package does, and
//! the block reported as lost; an encoder refuses the weight and names the row.

mod compressed_tensors;
mod modelopt;
mod transformers;

use crate::num::{Element, mini};
use crate::recipe::{Grid, Rounding, Scheme, Strategy};
use crate::tensor::DType;

use super::error::MethodError;
use compressed_tensors::CompressedTensors;
use modelopt::ModelOpt;
use transformers::Transformers;

/// The arithmetic of one package for one grid and source type.
#[derive(Debug, Clone)]
pub(super) enum Foreign {
    CompressedTensors(CompressedTensors),
    ModelOpt(ModelOpt),
    Transformers(Transformers),
}

/// What a block's values gave, beside their codes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Scaled {
    /// Code of the block's scale.
    pub scale: u32,
    /// Code of its zero point; 0 for grids without.
    pub zero: u32,
    /// Whether the package's own arithmetic left the finite numbers.
    pub lost: bool,
}

/// A scale that the peak of the weight fixes: stored code and value.
pub(super) type Peaked = (u32, f32);

impl Foreign {
    /// The arithmetic that the grid asks for; `None` for radiance's.
    ///
    /// # Errors
    /// Grids, source types and columns that the package has not.
    pub fn new(grid: &Grid, source: DType, cols: usize) -> Result<Option<Foreign>, MethodError> {
        if grid.rounding == Rounding::Rad {
            return Ok(None);
        }
        let clash = grid.rounding.clash(grid).or_else(|| grid.rounding.source_clash(grid, source));
        if let Some(clash) = clash {
            return Err(MethodError::Unsupported(format!("{}; {}", clash.message, clash.help)));
        }
        if let Some(n) = grid.rounding.whole_columns(grid)
            && !(cols as u64).is_multiple_of(n)
        {
            return Err(MethodError::Unsupported(format!(
                "{} has no short groups: {cols} columns are no multiple of {n}",
                grid.rounding.name()
            )));
        }
        let unknown = || MethodError::Unsupported("the grid has no scheme".into());
        let (scheme, strategy) = Scheme::of(grid).ok_or_else(unknown)?;
        let codes = Element::new(grid.codes).ok_or_else(unknown)?;
        let scale = Element::new(grid.scale).ok_or_else(unknown)?;
        let setup = Setup { scheme, strategy, codes, scale, source: Narrow::new(source) };
        Ok(Some(match grid.rounding {
            Rounding::ModelOpt => Foreign::ModelOpt(ModelOpt::new(setup)),
            Rounding::Transformers => Foreign::Transformers(Transformers::new(setup)),
            Rounding::CompressedTensors | Rounding::Rad => {
                Foreign::CompressedTensors(CompressedTensors::new(setup, true))
            }
            Rounding::CompressedTensorsF32 => {
                Foreign::CompressedTensors(CompressedTensors::new(setup, false))
            }
        }))
    }

    /// The scale of the whole weight: the only one, or the second level above the blocks' scales.
    pub fn peaked(&mut self, peak: f32) -> Peaked {
        match self {
            Foreign::CompressedTensors(rules) => rules.peaked(peak),
            Foreign::ModelOpt(rules) => rules.peaked(peak),
            // Only blocks have scales there.
            Foreign::Transformers(_) => (0, 0.0),
        }
    }

    /// Encodes one block.
    pub fn block(&self, values: &[f32], codes: &mut [u32]) -> Scaled {
        match self {
            Foreign::CompressedTensors(rules) => rules.block(values, codes),
            Foreign::ModelOpt(rules) => rules.block(values, codes),
            Foreign::Transformers(rules) => rules.block(values, codes),
        }
    }
}

/// What all packages need to know.
#[derive(Debug, Clone, Copy)]
struct Setup {
    scheme: Scheme,
    strategy: Strategy,
    codes: Element,
    scale: Element,
    source: Narrow,
}

/// The element type of a checkpoint's weight, to which torch rounds the result of every operation on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Narrow {
    F32,
    F16,
    BF16,
}

impl Narrow {
    /// Other types than f16 and bf16 count as f32.
    pub fn new(dtype: DType) -> Narrow {
        match dtype {
            DType::F16 => Narrow::F16,
            DType::BF16 => Narrow::BF16,
            _ => Narrow::F32,
        }
    }

    /// Round to nearest even, overflow to infinity.
    pub fn round(self, x: f32) -> f32 {
        match self {
            Narrow::F32 => x,
            Narrow::F16 => mini::f16_value(mini::f16_bits(x)),
            Narrow::BF16 => mini::bf16_value(mini::bf16_bits(x)),
        }
    }
}

/// Largest magnitude.
fn amax(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |m, v| m.max(v.abs()))
}

/// Nearest integer, half to even, within the range of a signed type; NaN is 0. Two's complement.
fn int_code(element: Element, x: f32) -> u32 {
    let top = 1i64 << (element.bits() - 1);
    let n = (x.round_ties_even() as i64).clamp(-top, top - 1);
    (n as u64 & ((1u64 << element.bits()) - 1)) as u32
}

/// e4m3 without saturation, as torch casts: beyond 464, the middle between the largest value and where the next would
/// be, is NaN of that sign; NaN itself is 0xff, which is what x86 makes of 0/0.
fn e4m3_cast(element: Element, x: f32) -> u32 {
    if x.is_nan() {
        0xff
    } else if x.abs() > 464.0 {
        0x7f | u32::from(x < 0.0) << 7
    } else {
        element.encode(x)
    }
}

/// e4m3 with saturation, NaN kept.
fn e4m3_clamp(element: Element, x: f32) -> u32 {
    if x.is_nan() { 0xff } else { element.encode(x) }
}

/// ⌈log2 x⌉ of a positive x where the logarithm is first rounded to f32, as torch computes it: just above a power of
/// two it rounds down to the integer. At least −127.
fn ceil_log2(x: f32) -> i32 {
    if x <= mini::pow2(-126) {
        return if x > f32::from_bits(0x40_0000) { -126 } else { -127 };
    }
    let k = (x.to_bits() >> 23) as i32 - 127;
    let above = x.to_bits() & 0x7f_ffff;
    // The logarithm exceeds k by above·2^-23/ln 2; f32 next to k ≠ 0 has steps of 2^(p − 23), p = ⌊log2 |k|⌋, halved
    // towards zero from a power of two. It stays k below half a step.
    let magnitude = k.unsigned_abs();
    let within = match magnitude {
        0 => 0.0,
        n => {
            let p = n.ilog2() as i32 - i32::from(k < 0 && n.is_power_of_two());
            std::f64::consts::LN_2 * 0.5 * f64::from(mini::pow2(p))
        }
    };
    k + i32::from(f64::from(above) > within)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ceiling_of_a_rounded_logarithm_is_that_of_a_wider_one_rounded() {
        // The f64 logarithm is good to far less than the distance from any f32 midpoint, except for inputs so close to
        // 1 that their logarithm is tiny, which rounds to itself.
        for exponent in 1..=254u32 {
            for fraction in (0..200).chain([0x40_0000, 0x7f_ffff]) {
                let x = f32::from_bits(exponent << 23 | fraction);
                let want = (f64::from(x).log2() as f32).ceil() as i32;
                assert_eq!(ceil_log2(x), want.max(-127), "{x:e} {exponent} {fraction}");
            }
        }
        assert_eq!(ceil_log2(f32::from_bits(1)), -127);
        assert_eq!(ceil_log2(f32::from_bits(0x40_0000)), -127);
        assert_eq!(ceil_log2(f32::from_bits(0x40_0001)), -126);
    }

    #[test]
    fn an_unclamped_cast_overflows_to_nan_past_the_middle() {
        let e = Element::new(DType::F8E4M3).expect("codec");
        let codes = [464.0, 464.1, -464.1, f32::INFINITY, f32::NAN, -448.0, -0.0];
        assert_eq!(codes.map(|x| e4m3_cast(e, x)), [0x7e, 0x7f, 0xff, 0x7f, 0xff, 0xfe, 0x80]);
    }

    #[test]
    fn integers_round_half_to_even_and_saturate() {
        let e = Element::new(DType::I4).expect("codec");
        let codes = [0.5, 1.5, -0.5, -2.5, 7.6, -9.0, f32::NAN, f32::INFINITY];
        assert_eq!(codes.map(|x| int_code(e, x)), [0, 2, 0, 0xe, 7, 8, 0, 7]);
    }
}
