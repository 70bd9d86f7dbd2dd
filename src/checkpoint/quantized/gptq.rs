//! GPTQ, versions 1 and 2: `qweight` I32 [C × bits / 32, R] packed along the inputs, `qzeros` I32 [groups, R × bits / 32],
//! `scales` [groups, R], `g_idx` I32 [C]. Codes are unsigned. Version 1 (`checkpoint_format` gptq, or none) stores zero
//! points less one.

use super::finder::{Finder, Raw, Scales, Weight, groups, integer};
use super::matrix::{Layout, Matrix};
use super::packed::Second;
use crate::tensor::{DType, Shape};

/// Whether the `qweight` of a module has one word a row of the weight, as GPTQ packs it, and not AutoAWQ's.
pub(super) fn is_gptq(f: &Finder<'_>, module: &str) -> bool {
    let width = |leaf: &str| f.get(&format!("{module}.{leaf}")).and_then(|r| Some(r.matrix()?.1));
    match (width("qweight"), width("scales")) {
        (Some(words), Some(rows)) => words == rows,
        _ => f.claims.method.as_deref().is_none_or(|m| m != "awq"),
    }
}

/// The tensors that GPTQ and AutoAWQ share, taken together; all have to be matrices of their types.
pub(super) struct Trio<'r> {
    pub codes: Raw<'r>,
    pub zeros: Raw<'r>,
    pub scale: Raw<'r>,
    /// Type of the scales.
    pub dtype: DType,
}

/// Takes `qweight`, `qzeros` and `scales`.
pub(super) fn trio<'a>(f: &mut Finder<'a>, module: &str) -> Option<Trio<'a>> {
    let name = |leaf: &str| format!("{module}.{leaf}");
    let codes = f.take(&name("qweight"))?;
    let zeros = f.need(&name("qzeros"), codes.name);
    let scale = f.need(&name("scales"), codes.name);
    let (zeros, scale) = (zeros?, scale?);
    let dtype = f.float_scale(&scale)?;
    for raw in [codes, zeros] {
        if raw.dtype != DType::I32 || raw.matrix().is_none() {
            let what =
                format!("holds {} of shape {}; a matrix of i32 is needed", raw.dtype, raw.shape);
            f.wrong(raw.name, what);
            return None;
        }
    }
    if f.claims.method.is_none() {
        f.wrong(codes.name, "has no configuration that tells its packing (quantization_config)");
        return None;
    }
    Some(Trio { codes, zeros, scale, dtype })
}

/// Columns of a group, for `count` groups over `cols` columns.
pub(super) fn group_size(f: &Finder<'_>, count: u64, cols: u64) -> Option<u64> {
    if count == 1 {
        return Some(0);
    }
    let claimed = f.claims.group_size.filter(|g| *g > 0);
    match claimed {
        Some(g) => (cols.div_ceil(g) == count).then_some(g),
        None => (count > 0 && cols.is_multiple_of(count)).then(|| cols / count),
    }
}

/// The tensors of a module.
pub(super) fn find(f: &mut Finder<'_>, module: &str) {
    let g_idx = f.take(&format!("{module}.g_idx"));
    let Some(Trio { codes, zeros, scale, dtype }) = trio(f, module) else { return };
    let (Some((words, rows)), Some((count, zero_words)), Some((scale_rows, scale_cols))) =
        (codes.matrix(), zeros.matrix(), scale.matrix())
    else {
        return f
            .wrong(scale.name, format!("has shape {}; two dimensions are needed", scale.shape));
    };
    let bits = zero_words.saturating_mul(32).checked_div(rows).unwrap_or(0);
    let exact = bits.checked_mul(rows) == zero_words.checked_mul(32);
    let Some(code_type) = integer(bits, false).filter(|_| exact && [2, 3, 4, 8].contains(&bits))
    else {
        let what = format!(
            "has shape {}, which gives {rows} rows no width of 2, 3, 4 or 8 bits",
            zeros.shape
        );
        return f.wrong(zeros.name, what);
    };
    let total = words.saturating_mul(32);
    if total % bits != 0 {
        return f
            .wrong(codes.name, format!("has {words} words, no whole number of {bits}-bit codes"));
    }
    let cols = total / bits;
    if (scale_rows, scale_cols) != (count, rows) {
        let what =
            format!("has shape {}; codes and zero points give [{count}, {rows}]", scale.shape);
        return f.wrong(scale.name, what);
    }
    let Some(group) = group_size(f, count, cols) else {
        let claimed = f.claims.group_size.map_or(String::new(), |g| format!(" of {g}"));
        let what = format!("has {count} groups{claimed}, which do not divide {cols} columns");
        return f.wrong(scale.name, what);
    };
    let mut order = None;
    let mut tensors = vec![codes, scale, zeros];
    match g_idx {
        // Without activation order the groups follow one another; the numbers that say so were not fetched.
        Some(raw) if f.unread(&raw) && !f.claims.desc_act => tensors.push(raw),
        Some(raw) => {
            let Some(list) = f.integers(&raw) else { return };
            if list.len() as u64 != cols {
                return f.wrong(raw.name, format!("has {} entries for {cols} columns", list.len()));
            }
            match groups(&list, count, group) {
                Ok(found) => order = found,
                Err(what) => return f.wrong(raw.name, what),
            }
            tensors.push(raw);
        }
        None if f.claims.desc_act && count > 1 => {
            return f.wrong(codes.name, "has no `g_idx` beside it, and `desc_act` is true");
        }
        None => {}
    }
    let turned = |place, dtype: DType, stride: u64, add: u32| Matrix {
        place,
        layout: Layout::Columns { stride, interleaved: false },
        dtype,
        flip: 0,
        add,
        rows,
        cols: count,
    };
    let weight = Weight {
        codes: Matrix {
            place: codes.place,
            layout: Layout::WordsDownRows { width: rows },
            dtype: code_type,
            flip: 0,
            add: 0,
            rows,
            cols,
        },
        tensors,
        scales: Scales {
            matrix: turned(scale.place, dtype, rows * dtype.bytes().unwrap_or(2), 0),
            block: [1, group],
        },
        zero: Some(turned(
            zeros.place,
            code_type,
            zero_words * 4,
            u32::from(f.claims.zero_less_one),
        )),
        second: Second::None,
        groups: order,
        input: None,
    };
    f.add(format!("{module}.weight"), Shape::from([rows, cols]), weight);
}
