//! The tensors of NVIDIA ModelOpt (0.47) that are not those of another tool: codes in a `weight` of bytes.
//!
//! | tensors | what |
//! |---|---|
//! | `weight` U8, `weight_scale` E4M3, `weight_scale_2` F32 | NVFP4; the second scale is a factor |
//! | `weight` U8, `weight_scale` U8 | MXFP4 |
//! | `weight` U8 [R/2, C], `weight_scale` [R, C/g] | int4 of W4A16_AWQ: two rows to a byte, two's complement |
//! | `pre_quant_scale` [C] | factor of the inputs of such a weight, taken into its columns |
//!
//! FP8, FP8 by channel or block and W8A16 are found with the plain names of compressed-tensors.

use super::compressed_tensors::{mxfp4, nvfp4};
use super::finder::{Finder, Raw, Weight};
use super::matrix::{Layout, Matrix};
use super::packed::Second;
use crate::tensor::{DType, Shape};

/// `weight` U8 of a module with `weight_scale` beside it.
pub(super) fn find(f: &mut Finder<'_>, module: &str) {
    let name = |leaf: &str| format!("{module}.{leaf}");
    let Some(codes) = f.take(&name("weight")) else { return };
    let second = f.take(&name("weight_scale_2"));
    let pre = f.take(&name("pre_quant_scale"));
    let Some(scale) = f.need(&name("weight_scale"), codes.name) else { return };
    let Some((rows, width)) = codes.matrix() else {
        return f
            .wrong(codes.name, format!("has shape {}; two dimensions are needed", codes.shape));
    };
    let found = match (scale.dtype, second) {
        (DType::F8E4M3, Some(second)) => {
            let Some(factor) = f.scalar(&second) else { return };
            nvfp4(f, vec![codes, scale, second], Second::Times(factor)).map(|w| (rows, w))
        }
        (DType::F8E4M3, None) => {
            return f.wrong(codes.name, "has no `weight_scale_2` beside it");
        }
        (_, Some(second)) => {
            return f.wrong(second.name, "belongs to fp8 scales; its weight has none");
        }
        (DType::U8 | DType::E8M0, None) => mxfp4(f, vec![codes, scale]).map(|w| (rows, w)),
        (_, None) => row_pairs(f, module, codes, scale, rows, width).map(|w| (rows * 2, w)),
    };
    let Some((rows, mut weight)) = found else { return };
    if let Some(raw) = pre {
        let cols = weight.codes.cols;
        let Some(dtype) = f.float_scale(&raw) else { return };
        if raw.shape.elements() != Some(cols) {
            return f.wrong(
                raw.name,
                format!("has shape {}; its weight has {cols} columns", raw.shape),
            );
        }
        weight.input = Some(Matrix::plain(raw.place, dtype, 1, cols));
        weight.tensors.push(raw);
    }
    f.add(name("weight"), Shape::from([rows, weight.codes.cols]), weight);
}

fn row_pairs<'r>(
    f: &mut Finder<'_>,
    module: &str,
    codes: Raw<'r>,
    scale: Raw<'r>,
    pairs: u64,
    cols: u64,
) -> Option<Weight<'r>> {
    let dtype = f.float_scale(&scale)?;
    let rows = pairs.checked_mul(2)?;
    let scales = f.scales(&scale, dtype, (rows, cols), module)?;
    if scales.block[0] != 1 {
        let what =
            format!("has shape {}; int4 codes in pairs of rows have scales by row", scale.shape);
        f.wrong(scale.name, what);
        return None;
    }
    Some(Weight {
        codes: Matrix {
            place: codes.place,
            layout: Layout::RowPairs,
            dtype: DType::I4,
            flip: 0,
            add: 0,
            rows,
            cols,
        },
        tensors: vec![codes, scale],
        scales,
        zero: None,
        second: Second::None,
        groups: None,
        input: None,
    })
}
