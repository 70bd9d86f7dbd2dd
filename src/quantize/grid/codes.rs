//! What a code stands for: integers, small floats, codebooks.

use crate::num::{Element, round_away};
use crate::recipe::{Clamp, Codebook, Grid};
use crate::tensor::DType;

use super::super::error::MethodError;

/// The codes of a grid.
#[derive(Debug, Clone)]
pub(in super::super) enum Codes {
    /// Signed integers from `lo` to `hi`.
    Int { element: Element, lo: i64, hi: i64 },
    /// Unsigned integers that a zero point is subtracted from.
    Unsigned { element: Element },
    /// Small floats.
    Float { element: Element },
    /// Entries of a codebook.
    Table {
        element: Element,
        values: Vec<f32>,
        /// Type of the stored book.
        stored: Element,
        /// The entry of largest magnitude, the first of equals.
        peak: f32,
        /// Whether the largest value of a block decides the scale's sign: the book's ends differ in magnitude.
        signed: bool,
        has_zero: bool,
    },
}

impl Codes {
    pub fn new(grid: &Grid) -> Result<Codes, MethodError> {
        let refuse = |why: String| Err(MethodError::Unsupported(why));
        let Some(element) = Element::new(grid.codes) else {
            return refuse(format!("{} is no code type", grid.codes));
        };
        let bits = element.bits();
        if let Some(table) = &grid.table {
            return Codes::table(element, table, grid);
        }
        match grid.codes {
            t if t.is_signed_int() && grid.zero.is_none() => {
                let hi = (1i64 << (bits - 1)) - 1;
                let lo = if grid.clamp == Clamp::Symmetric { -hi } else { -hi - 1 };
                Ok(Codes::Int { element, lo, hi })
            }
            t if t.is_unsigned_int() && grid.zero.is_some() && bits <= 16 => {
                Ok(Codes::Unsigned { element })
            }
            t if t.float_format().is_some() && bits <= 8 && grid.zero.is_none() => {
                Ok(Codes::Float { element })
            }
            t => refuse(format!(
                "{t} codes with{} a zero point make no grid; signed integers and small floats take none, unsigned \
                 integers of at most 16 bits need one",
                if grid.zero.is_some() { "" } else { "out" }
            )),
        }
    }

    fn table(element: Element, table: &Codebook, grid: &Grid) -> Result<Codes, MethodError> {
        let values = &table.values;
        let refuse = |why: &str| Err(MethodError::Unsupported(why.to_owned()));
        if grid.zero.is_some() {
            return refuse("a codebook takes no zero point");
        }
        if !element.dtype().is_unsigned_int()
            || element.bits() > 16
            || values.len() > 1 << element.bits()
        {
            return refuse("a codebook needs unsigned codes that can index all its entries");
        }
        if values.is_empty()
            || values.iter().any(|v| !v.is_finite())
            || values.iter().all(|v| *v == 0.0)
        {
            return refuse("a codebook needs finite entries, not all of them 0");
        }
        let peak = values.iter().fold(0.0f32, |p, v| if v.abs() > p.abs() { *v } else { p });
        let (lo, hi) = table.ends();
        let signed = -lo != hi;
        if signed && (grid.scale.is_unsigned_int() || grid.scale == DType::E8M0) {
            return refuse(
                "a codebook whose ends differ in magnitude needs scales that can be negative",
            );
        }
        let stored = grid
            .encoding()
            .plane(crate::tensor::role::TABLE)
            .and_then(|(_, p)| Element::new(p.dtype));
        let Some(stored) = stored else { return refuse("the codebook has no plane") };
        Ok(Codes::Table {
            element,
            values: values.clone(),
            stored,
            peak,
            signed,
            has_zero: values.contains(&0.0),
        })
    }

    /// Largest magnitude a code stands for.
    pub fn top(&self) -> f32 {
        match self {
            Codes::Int { hi, .. } => *hi as f32,
            Codes::Unsigned { element } | Codes::Float { element } => element.largest(),
            Codes::Table { peak, .. } => peak.abs(),
        }
    }

    /// Largest magnitude a code can take, the most negative integer included.
    pub fn reach(&self) -> f32 {
        match self {
            Codes::Int { lo, .. } => lo.unsigned_abs() as f32,
            _ => self.top(),
        }
    }

    /// Width of a code.
    pub fn bits(&self) -> u32 {
        match self {
            Codes::Int { element, .. }
            | Codes::Unsigned { element }
            | Codes::Float { element }
            | Codes::Table { element, .. } => element.bits(),
        }
    }

    /// Code of a quotient value / scale.
    pub fn code(&self, x: f32) -> u32 {
        match self {
            Codes::Int { element, lo, hi } => masked(round_away(x).clamp(*lo, *hi), *element),
            Codes::Unsigned { element } | Codes::Float { element } => element.encode(x),
            Codes::Table { values, .. } => nearest(values, f64::from(x)),
        }
    }

    /// Code of a quotient taken in f64, as the search does it.
    pub fn code_f64(&self, x: f64) -> u32 {
        match self {
            Codes::Int { element, lo, hi } => {
                masked(((x + 0.5f64.copysign(x)) as i64).clamp(*lo, *hi), *element)
            }
            Codes::Table { values, .. } => nearest(values, x),
            _ => self.code(x as f32),
        }
    }

    /// Value of a code.
    pub fn value(&self, code: u32) -> f32 {
        match self {
            Codes::Int { element, .. } | Codes::Unsigned { element } | Codes::Float { element } => {
                element.decode(code)
            }
            Codes::Table { values, .. } => values.get(code as usize).copied().unwrap_or(0.0),
        }
    }
}

fn masked(n: i64, element: Element) -> u32 {
    (n as u64 & (u64::MAX >> (64 - element.bits()))) as u32
}

/// Index of the nearest entry, the lower of two equally near.
fn nearest(values: &[f32], x: f64) -> u32 {
    let mut best = (f64::INFINITY, 0);
    for (i, v) in values.iter().enumerate() {
        let d = (x - f64::from(*v)).abs();
        if d < best.0 {
            best = (d, i as u32);
        }
    }
    best.1
}

/// Scale that puts the block's largest value on the book's peak entry. With a `signed` book the first value of
/// largest magnitude decides the sign.
pub(super) fn table_scale(v: &[f32], peak: f32, signed: bool) -> f32 {
    let largest = v.iter().fold(0.0f32, |m, x| if x.abs() > m.abs() { *x } else { m });
    if signed { largest / peak } else { largest.abs() / peak.abs() }
}
