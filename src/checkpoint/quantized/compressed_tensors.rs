//! The tensors of compressed-tensors (0.19), and the plain names that other tools share with it.
//!
//! | tensors | what |
//! |---|---|
//! | `weight_packed` I32, `weight_scale`, `weight_shape` | integers in little-endian words, each plus half its range |
//! | `weight_zero_point` I32 | the same packing down the rows; files before 2025-04: I8, unpacked |
//! | `weight_g_idx` I32 | group of every column |
//! | `weight_packed` U8, `weight_scale` E4M3, `weight_global_scale` F32 | NVFP4; the global scale divides, [`FACTOR_KEY`] may say what it is the reciprocal of |
//! | `weight_packed` U8, `weight_scale` U8 | MXFP4; scales are powers of two |
//! | `weight` I8 or E4M3, `weight_scale` | one scale a tensor, row, group or block; also ModelOpt's and vLLM's fp8 |
//! | `weight` E4M3, `weight_scale` U8 | MXFP8 |

#[cfg(doc)]
use super::FACTOR_KEY;
use super::finder::{Finder, Raw, Scales, Weight, fp4, groups, integer};
use super::matrix::{Layout, Matrix};
use super::packed::Second;
use crate::tensor::{DType, Shape};

/// Columns of a block of NVFP4, of every writer.
const NVFP4_GROUP: u64 = 16;

/// Columns of a block of the microscaling formats (OCP MX 1.0).
pub(super) const MX_GROUP: u64 = 32;

/// `weight_packed` of a module.
pub(super) fn packed(f: &mut Finder<'_>, module: &str) {
    let name = |leaf: &str| format!("{module}.{leaf}");
    let Some(codes) = f.take(&name("weight_packed")) else { return };
    let shape = f.take(&name("weight_shape"));
    let zero = f.take(&name("weight_zero_point"));
    let g_idx = f.take(&name("weight_g_idx"));
    let global = f.take(&name("weight_global_scale"));
    let Some(scale) = f.need(&name("weight_scale"), codes.name) else { return };
    let Some((rows, width)) = codes.matrix() else {
        return f
            .wrong(codes.name, format!("has shape {}; two dimensions are needed", codes.shape));
    };
    match (codes.dtype, scale.dtype) {
        (DType::I32, _) => {
            if let Some(raw) = global {
                f.wrong(raw.name, "belongs to fp4 codes; its weight has integers");
            }
            integers(f, module, Integers { codes, scale, shape, zero, g_idx }, rows, width);
        }
        (DType::U8, DType::F8E4M3) => {
            let Some(global) = global else {
                return f.wrong(codes.name, "has no `weight_global_scale` beside it");
            };
            let Some(divisor) = f.scalar(&global) else { return };
            let Some(factor) = f.factor(&global, divisor) else { return };
            let second = Second::Over { divisor, factor };
            let Some(weight) = nvfp4(f, vec![codes, scale, global], second) else { return };
            f.add(name("weight"), Shape::from([rows, weight.codes.cols]), weight);
        }
        (DType::U8, DType::U8 | DType::E8M0) => {
            let Some(weight) = mxfp4(f, vec![codes, scale]) else { return };
            f.add(name("weight"), Shape::from([rows, weight.codes.cols]), weight);
        }
        (codes_type, scale_type) => f.wrong(
            codes.name,
            format!("holds {codes_type} with scales of {scale_type}, a pair that no format has"),
        ),
    }
}

/// Integers in words.
struct Integers<'r> {
    codes: Raw<'r>,
    scale: Raw<'r>,
    shape: Option<Raw<'r>>,
    zero: Option<Raw<'r>>,
    g_idx: Option<Raw<'r>>,
}

fn integers(f: &mut Finder<'_>, module: &str, t: Integers<'_>, rows: u64, words: u64) {
    let Some(shape) = t.shape else {
        return f.wrong(t.codes.name, "has no `weight_shape` beside it");
    };
    let claimed = f.claims.bits_of(module);
    // Headers alone tell the columns of rows that fill their last word, which all published ones do.
    let full = claimed.filter(|b| (2..=8).contains(b)).map(|b| (words * 32 / b).cast_signed());
    let extents = match full.filter(|_| f.unread(&shape)) {
        Some(cols) => Some(vec![rows.cast_signed(), cols]),
        None => f.integers(&shape),
    };
    let Some(extents) = extents else { return };
    let cols = match *extents.as_slice() {
        [r, c] if u64::try_from(r) == Ok(rows) && c > 0 => c.unsigned_abs(),
        _ => {
            let what = format!("says {extents:?}; the codes have {rows} rows");
            return f.wrong(shape.name, what);
        }
    };
    let fits = |bits: u64| cols.checked_mul(bits).is_some_and(|n| n.div_ceil(32) == words);
    let mut fitting = (2..=8).filter(|&b| fits(b));
    let bits = match claimed {
        Some(bits) if (2..=8).contains(&bits) && fits(bits) => Some(bits),
        None => fitting.next().filter(|_| fitting.next().is_none()),
        _ => None,
    };
    let Some((bits, dtype)) = bits.and_then(|b| Some((b, integer(b, true)?))) else {
        let what = match claimed {
            Some(bits) => format!(
                "has rows of {words} words, which do not hold {cols} codes of {bits} bits packed without gaps"
            ),
            None => format!("has rows of {words} words for {cols} columns, which tells no width"),
        };
        return f.wrong(t.codes.name, what);
    };
    let flip = 1u32 << (bits - 1);
    let Some(scale_type) = f.float_scale(&t.scale) else { return };
    // Groups in the order of activations are told by g_idx; their number is that of the scales' columns.
    let Some(scales) = f.scales(&t.scale, scale_type, (rows, cols), module) else { return };
    let grid = (scales.matrix.rows, scales.matrix.cols);
    let zero = match t.zero {
        None => None,
        Some(raw) => match zero_points(f, &raw, grid, dtype, flip) {
            None => return,
            found => found,
        },
    };
    let mut tensors = vec![t.codes, t.scale, shape];
    tensors.extend(t.zero);
    let mut order = None;
    if let Some(raw) = t.g_idx {
        let Some(list) = f.integers(&raw) else { return };
        if list.len() as u64 != cols {
            return f.wrong(raw.name, format!("has {} entries for {cols} columns", list.len()));
        }
        match groups(&list, grid.1, scales.block[1]) {
            Ok(found) => order = found,
            Err(what) => return f.wrong(raw.name, what),
        }
        tensors.push(raw);
    }
    let weight = Weight {
        codes: Matrix {
            place: t.codes.place,
            layout: Layout::Rows { stride: words * 4 },
            dtype,
            flip,
            add: 0,
            rows,
            cols,
        },
        tensors,
        scales,
        zero,
        second: Second::None,
        groups: order,
        input: None,
    };
    f.add(format!("{module}.weight"), Shape::from([rows, cols]), weight);
}

/// Zero points over a grid of scales: packed down the rows in words, or one byte each.
fn zero_points(
    f: &mut Finder<'_>,
    raw: &Raw<'_>,
    (rows, cols): (u64, u64),
    dtype: DType,
    flip: u32,
) -> Option<Matrix> {
    let words = rows.checked_mul(u64::from(dtype.bits()))?.div_ceil(32);
    match (raw.dtype, raw.matrix()) {
        (DType::I32, Some(found)) if found == (words, cols) => Some(Matrix {
            place: raw.place,
            layout: Layout::WordsDownColumns { width: cols },
            dtype,
            flip,
            add: 0,
            rows,
            cols,
        }),
        (DType::I8, Some(found)) if found == (rows, cols) => {
            Some(Matrix::plain(raw.place, DType::I8, rows, cols))
        }
        (DType::I8, None) if raw.shape.elements() == rows.checked_mul(cols) => {
            Some(Matrix::plain(raw.place, DType::I8, rows, cols))
        }
        (found, _) => {
            let what = format!(
                "holds {found} of shape {}; its scales have shape [{rows}, {cols}]",
                raw.shape
            );
            f.wrong(raw.name, what);
            None
        }
    }
}

/// NVFP4 of codes, scales and a global scale, in that order.
pub(super) fn nvfp4<'r>(
    f: &mut Finder<'_>,
    tensors: Vec<Raw<'r>>,
    second: Second,
) -> Option<Weight<'r>> {
    blocks_of_fp4(f, tensors, NVFP4_GROUP, DType::F8E4M3, second)
}

/// MXFP4 of codes and scales, in that order.
pub(super) fn mxfp4<'r>(f: &mut Finder<'_>, tensors: Vec<Raw<'r>>) -> Option<Weight<'r>> {
    blocks_of_fp4(f, tensors, MX_GROUP, DType::E8M0, Second::None)
}

fn blocks_of_fp4<'r>(
    f: &mut Finder<'_>,
    tensors: Vec<Raw<'r>>,
    group: u64,
    scale_type: DType,
    second: Second,
) -> Option<Weight<'r>> {
    let (codes, scale) = (*tensors.first()?, *tensors.get(1)?);
    let (rows, bytes) = codes.matrix()?;
    let cols = bytes.checked_mul(2)?;
    if cols % group != 0 || scale.matrix() != Some((rows, cols / group)) {
        let what = format!(
            "has shape {}; {rows} rows of {cols} columns take [{rows}, {}] scales of {group} columns each",
            scale.shape,
            cols.div_ceil(group)
        );
        f.wrong(scale.name, what);
        return None;
    }
    let matrix = Matrix::plain(scale.place, scale_type, rows, cols / group);
    Some(Weight {
        codes: fp4(codes.place, rows, bytes),
        tensors,
        scales: Scales { matrix, block: [1, group] },
        zero: None,
        second,
        groups: None,
        input: None,
    })
}

/// `weight` of whole bytes with `weight_scale` beside it.
pub(super) fn plain(f: &mut Finder<'_>, module: &str) {
    let name = |leaf: &str| format!("{module}.{leaf}");
    let Some(codes) = f.take(&name("weight")) else { return };
    let zero = f.take(&name("weight_zero_point"));
    let Some(scale) = f.need(&name("weight_scale"), codes.name) else { return };
    let Some((rows, cols)) = codes.matrix() else {
        return f
            .wrong(codes.name, format!("has shape {}; two dimensions are needed", codes.shape));
    };
    let micro = matches!(scale.dtype, DType::U8 | DType::E8M0) && codes.dtype == DType::F8E4M3;
    let scales = if micro {
        if cols % MX_GROUP != 0 || scale.matrix() != Some((rows, cols / MX_GROUP)) {
            let what = format!(
                "has shape {}; powers of two scale {MX_GROUP} columns each of [{rows}, {cols}]",
                scale.shape
            );
            return f.wrong(scale.name, what);
        }
        let matrix = Matrix::plain(scale.place, DType::E8M0, rows, cols / MX_GROUP);
        Some(Scales { matrix, block: [1, MX_GROUP] })
    } else {
        let Some(dtype) = f.float_scale(&scale) else { return };
        f.scales(&scale, dtype, (rows, cols), module)
    };
    let Some(scales) = scales else { return };
    let mut tensors = vec![codes, scale];
    let mut points = None;
    if let Some(raw) = zero {
        let grid = (scales.matrix.rows, scales.matrix.cols);
        // Symmetric fp8 files of 2024 carry zero points that are all 0 and have the type of the codes.
        if codes.dtype != DType::I8 {
            if f.bytes(&raw).iter().any(|b| b & 0x7f != 0) {
                return f.wrong(raw.name, "shifts fp8 codes, which no format does");
            }
        } else {
            points = zero_points(f, &raw, grid, DType::I8, 0);
            if points.is_none() {
                return;
            }
        }
        tensors.push(raw);
    }
    let weight = Weight {
        codes: Matrix::plain(codes.place, codes.dtype, rows, cols),
        tensors,
        scales,
        zero: points,
        second: Second::None,
        groups: None,
        input: None,
    };
    f.add(name("weight"), Shape::from([rows, cols]), weight);
}
