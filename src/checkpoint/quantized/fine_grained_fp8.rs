//! Fine-grained fp8 of DeepSeek V3 and transformers: `weight` E4M3 with `weight_scale_inv`, a factor despite its name,
//! one a tensor or a block (`weight_block_size`, 128 × 128 unless the configuration says otherwise; blocks at the
//! edges may be partial). Scales are f32, bf16, or powers of two (`scale_fmt` ue8m0).

use super::finder::{Finder, Weight};
use super::matrix::Matrix;
use super::packed::Second;
use crate::tensor::{DType, Shape};

/// `weight_scale_inv` of a module.
pub(super) fn find(f: &mut Finder<'_>, module: &str) {
    let name = |leaf: &str| format!("{module}.{leaf}");
    let Some(codes) = f.take(&name("weight")) else { return };
    let Some(scale) = f.need(&name("weight_scale_inv"), codes.name) else { return };
    let Some((rows, cols)) = codes.matrix() else {
        return f
            .wrong(codes.name, format!("has shape {}; two dimensions are needed", codes.shape));
    };
    let dtype = match scale.dtype {
        DType::E8M0 | DType::U8 => DType::E8M0,
        _ => match f.float_scale(&scale) {
            Some(dtype) => dtype,
            None => return,
        },
    };
    let Some(scales) = f.scales(&scale, dtype, (rows, cols), module) else { return };
    let weight = Weight {
        codes: Matrix::plain(codes.place, codes.dtype, rows, cols),
        tensors: vec![codes, scale],
        scales,
        zero: None,
        second: Second::None,
        groups: None,
        input: None,
    };
    f.add(name("weight"), Shape::from([rows, cols]), weight);
}
