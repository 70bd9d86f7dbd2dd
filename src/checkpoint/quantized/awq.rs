//! AutoAWQ's gemm packing: `qweight` I32 [C, R / 8] and `qzeros` I32 [groups, R / 8] packed along the outputs, nibble i of
//! a word being row 0, 2, 4, 6, 1, 3, 5, 7 of its eight; `scales` [groups, R]. Codes and zero points are unsigned.

use super::finder::{Finder, Scales, Weight};
use super::gptq::{Trio, group_size, trio};
use super::matrix::{Layout, Matrix};
use super::packed::Second;
use crate::tensor::{DType, Shape};

/// The tensors of a module.
pub(super) fn find(f: &mut Finder<'_>, module: &str) {
    let Some(Trio { codes, zeros, scale, dtype }) = trio(f, module) else { return };
    let (Some((cols, words)), Some(zero_shape), Some((count, rows))) =
        (codes.matrix(), zeros.matrix(), scale.matrix())
    else {
        return f
            .wrong(scale.name, format!("has shape {}; two dimensions are needed", scale.shape));
    };
    if words.checked_mul(8) != Some(rows) || zero_shape != (count, words) {
        let what = format!(
            "has shape {}, zero points {} and scales {}: neither AutoAWQ's gemm packing nor GPTQ's",
            codes.shape, zeros.shape, scale.shape
        );
        return f.wrong(codes.name, what);
    }
    let Some(group) = group_size(f, count, cols) else {
        let what = format!("has {count} groups, which do not divide {cols} columns as configured");
        return f.wrong(scale.name, what);
    };
    let nibbles = |place, cols: u64| Matrix {
        place,
        layout: Layout::Columns { stride: words * 4, interleaved: true },
        dtype: DType::U4,
        flip: 0,
        add: 0,
        rows,
        cols,
    };
    let weight = Weight {
        codes: nibbles(codes.place, cols),
        tensors: vec![codes, scale, zeros],
        scales: Scales {
            matrix: Matrix {
                place: scale.place,
                layout: Layout::Columns {
                    stride: rows * dtype.bytes().unwrap_or(2),
                    interleaved: false,
                },
                dtype,
                flip: 0,
                add: 0,
                rows,
                cols: count,
            },
            block: [1, group],
        },
        zero: Some(nibbles(zeros.place, count)),
        second: Second::None,
        groups: None,
        input: None,
    };
    f.add(format!("{module}.weight"), Shape::from([rows, cols]), weight);
}
