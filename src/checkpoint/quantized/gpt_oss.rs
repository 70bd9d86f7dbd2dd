//! MXFP4 of gpt-oss: `NAME_blocks` U8 [E, out, in / 32, 16] and `NAME_scales` U8 [E, out, in / 32], low nibble first. The
//! logical tensor is `NAME` [E, out, in]: outputs are rows. (transformers turns it to [E, in, out] when it loads it.)

use super::compressed_tensors::MX_GROUP;
use super::finder::{Finder, Scales, Weight, fp4};
use super::matrix::Matrix;
use super::packed::Second;
use crate::tensor::{DType, Shape};

/// Blocks and scales of a stem; other names that end alike are left alone.
pub(super) fn find(f: &mut Finder<'_>, stem: &str) {
    let Some(codes) = f.get(&format!("{stem}_blocks")) else { return };
    if codes.dtype != DType::U8 || codes.shape.rank() != 4 {
        return;
    }
    let Some(codes) = f.take(codes.name) else { return };
    let Some(scale) = f.need(&format!("{stem}_scales"), codes.name) else { return };
    let &[experts, out, blocks, bytes] = codes.shape.extents() else { return };
    let rows = experts.checked_mul(out);
    let (Some(rows), true) = (rows, bytes == MX_GROUP / 2) else {
        return f.wrong(codes.name, format!("has shape {}; blocks have 16 bytes", codes.shape));
    };
    if !matches!(scale.dtype, DType::U8 | DType::E8M0)
        || scale.shape.extents() != [experts, out, blocks]
    {
        let what = format!(
            "holds {} of shape {}; bytes of shape [{experts}, {out}, {blocks}] are needed",
            scale.dtype, scale.shape
        );
        return f.wrong(scale.name, what);
    }
    let weight = Weight {
        codes: fp4(codes.place, rows, blocks * bytes),
        tensors: vec![codes, scale],
        scales: Scales {
            matrix: Matrix::plain(scale.place, DType::E8M0, rows, blocks),
            block: [1, MX_GROUP],
        },
        zero: None,
        second: Second::None,
        groups: None,
        input: None,
    };
    let shape = Shape::from([experts, out, blocks * MX_GROUP]);
    f.add(stem.to_owned(), shape, weight);
}
