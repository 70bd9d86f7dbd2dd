//! Operations on rows: norms, activations, elementwise arithmetic, routing, pooling.

use super::value::{Value, fault};
use crate::diag::Result;
use crate::model::Activation;

/// `x / sqrt(mean(x²) + eps)` times the factors of a row.
pub(super) fn rms_norm(
    x: &Value,
    weight: Option<&[f32]>,
    eps: f64,
    one_plus: bool,
) -> Result<Value> {
    let columns = x.columns().max(1);
    let mut data = x.as_floats()?.to_vec();
    let shift = if one_plus { 1.0 } else { 0.0 };
    for row in data.chunks_exact_mut(columns) {
        let squares: f64 = row.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
        let factor = (1.0 / (squares / columns as f64 + eps).sqrt()) as f32;
        match weight {
            Some(w) => row.iter_mut().zip(w).for_each(|(v, w)| *v = *v * factor * (w + shift)),
            None => row.iter_mut().for_each(|v| *v *= factor),
        }
    }
    Value::floats(x.shape(), data)
}

/// `(x − mean) / sqrt(variance + eps) · w + bias`.
pub(super) fn layer_norm(
    x: &Value,
    weight: &[f32],
    bias: Option<&[f32]>,
    eps: f64,
) -> Result<Value> {
    let columns = x.columns().max(1);
    let mut data = x.as_floats()?.to_vec();
    for row in data.chunks_exact_mut(columns) {
        let mean = row.iter().map(|v| f64::from(*v)).sum::<f64>() / columns as f64;
        let squares: f64 = row.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum();
        let factor = 1.0 / (squares / columns as f64 + eps).sqrt();
        for (v, w) in row.iter_mut().zip(weight) {
            *v = ((f64::from(*v) - mean) * factor) as f32 * w;
        }
        if let Some(bias) = bias {
            row.iter_mut().zip(bias).for_each(|(v, b)| *v += b);
        }
    }
    Value::floats(x.shape(), data)
}

/// An activation of one number.
pub(super) fn activate(activation: Activation, x: f32) -> f32 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            // 0.044715 and sqrt(2/π) are the approximation's own constants.
            let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
    }
}

/// Applies `f` to every element.
pub(super) fn map(x: &Value, f: impl Fn(f32) -> f32) -> Result<Value> {
    let data: Vec<f32> = x.as_floats()?.iter().map(|v| f(*v)).collect();
    Value::floats(x.shape(), data)
}

/// Applies `f` to the elements of two values of one shape.
pub(super) fn zip(a: &Value, b: &Value, f: impl Fn(f32, f32) -> f32) -> Result<Value> {
    if a.shape() != b.shape() {
        return Err(fault(format!("shapes {:?} and {:?}", a.shape(), b.shape())));
    }
    let (left, right) = (a.as_floats()?, b.as_floats()?);
    let data: Vec<f32> = left.iter().zip(right).map(|(a, b)| f(*a, *b)).collect();
    Value::floats(a.shape(), data)
}

/// Applies `f` to every element and the element of `weight` under it; a single one stands under all.
pub(super) fn with_vector(x: &Value, weight: &[f32], f: impl Fn(f32, f32) -> f32) -> Result<Value> {
    match weight {
        [one] => map(x, |v| f(v, *one)),
        _ => {
            let columns = x.columns();
            if columns != weight.len() {
                return Err(fault(format!("{} factors for {columns} columns", weight.len())));
            }
            let data: Vec<f32> =
                x.as_floats()?.iter().zip(weight.iter().cycle()).map(|(v, w)| f(*v, *w)).collect();
            Value::floats(x.shape(), data)
        }
    }
}

/// Columns `start .. start + count`.
pub(super) fn columns(x: &Value, start: usize, count: usize) -> Result<Value> {
    let all = x.columns();
    if start.checked_add(count).is_none_or(|end| end > all) || count == 0 {
        return Err(fault(format!("columns {start} + {count} of {all}")));
    }
    let mut data = Vec::with_capacity(x.as_floats()?.len() / all * count);
    x.as_floats()?.chunks_exact(all).for_each(|row| data.extend(&row[start..start + count]));
    Value::floats(x.with_columns(count), data)
}

/// Rows of all operands side by side.
pub(super) fn concat(parts: &[&Value]) -> Result<Value> {
    let Some(first) = parts.first() else { return Err(fault("nothing to join")) };
    let width: usize = parts.iter().map(|p| p.columns()).sum();
    let rows = first.as_floats()?.len() / first.columns().max(1);
    let mut data = Vec::with_capacity(rows * width);
    for row in 0..rows {
        for part in parts {
            let columns = part.columns();
            let values = part.as_floats()?.get(row * columns..(row + 1) * columns);
            data.extend(values.ok_or_else(|| fault("operands of unequal rows"))?);
        }
    }
    Value::floats(first.with_columns(width), data)
}

/// Indices of the `k` largest scores, the largest first; ties go to the lower index.
pub(super) fn best(scores: &[f32], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
    order.truncate(k);
    order
}

/// Softmax in place; all zeros where nothing is visible (only −∞). NaN makes all of it NaN.
pub(super) fn softmax(scores: &mut [f32]) {
    let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if top == f32::NEG_INFINITY && !scores.iter().any(|s| s.is_nan()) {
        scores.fill(0.0);
        return;
    }
    let mut sum = 0.0f32;
    for s in scores.iter_mut() {
        *s = (*s - top).exp();
        sum += *s;
    }
    scores.iter_mut().for_each(|s| *s /= sum);
}

/// Weights and ids of the experts of each row.
pub(super) fn route(
    scores: &Value,
    top_k: usize,
    normalize: bool,
    scale: Option<&[f32]>,
) -> Result<(Value, Value)> {
    let experts = scores.columns().max(1);
    let (mut weights, mut ids) = (Vec::new(), Vec::new());
    for row in scores.as_floats()?.chunks_exact(experts) {
        let mut probabilities = row.to_vec();
        softmax(&mut probabilities);
        let chosen = best(&probabilities, top_k);
        let sum: f32 = chosen.iter().map(|e| probabilities[*e]).sum();
        for e in chosen {
            let weight = if normalize { probabilities[e] / sum } else { probabilities[e] };
            weights.push(weight * scale.and_then(|s| s.get(e)).copied().unwrap_or(1.0));
            ids.push(e as i64);
        }
    }
    let shape = scores.with_columns(top_k);
    Ok((Value::floats(shape.clone(), weights)?, Value::ints(shape, ids)?))
}

/// −∞ becomes the smallest other element of the row minus 1.
pub(super) fn fill_unscored(x: &Value) -> Result<Value> {
    let columns = x.columns().max(1);
    let mut data = x.as_floats()?.to_vec();
    for row in data.chunks_exact_mut(columns) {
        let scored = row.iter().copied().filter(|v| *v != f32::NEG_INFINITY);
        let fill = scored.fold(f32::INFINITY, f32::min) - 1.0;
        row.iter_mut().filter(|v| **v == f32::NEG_INFINITY).for_each(|v| *v = fill);
    }
    Value::floats(x.shape(), data)
}

/// Averages of cells of `side`² patches: the cells' rows, and which of them hold a patch.
pub(super) fn pool(x: &Value, at: &Value, padding: &Value, side: usize) -> Result<(Value, Value)> {
    let columns = x.columns();
    let (values, at, padding) = (x.as_floats()?, at.as_ints()?, padding.as_ints()?);
    let cells = padding.len().checked_div(side * side).unwrap_or(0);
    let real = || at.chunks_exact(2).zip(padding).enumerate().filter(|(_, (_, p))| **p == 0);
    let width = real().map(|(_, (at, _))| at[0].saturating_add(1)).max().unwrap_or(0);
    let side_of = i64::try_from(side).map_err(fault)?.max(1);
    let area = (side * side) as f32;
    let mut data = vec![0.0f32; cells * columns];
    let mut held = vec![0i64; cells];
    for (patch, (at, _)) in real() {
        let cell =
            (width / side_of).saturating_mul(at[1] / side_of).saturating_add(at[0] / side_of);
        let cell = usize::try_from(cell).ok().filter(|c| *c < cells && at[0] >= 0 && at[1] >= 0);
        let cell = cell.ok_or_else(|| {
            fault(format!("patch {patch} lies at ({}, {}), beyond {cells} cells", at[0], at[1]))
        })?;
        held[cell] = 1;
        let sums = &mut data[cell * columns..(cell + 1) * columns];
        for (s, v) in sums.iter_mut().zip(&values[patch * columns..(patch + 1) * columns]) {
            *s += v / area;
        }
    }
    let scale = (columns as f32).sqrt();
    data.iter_mut().for_each(|v| *v *= scale);
    Ok((Value::floats([1, cells, columns], data)?, Value::ints([1, cells], held)?))
}

/// Averages of squares of `side` × `side` rows of a grid that is as wide as high.
pub(super) fn pool_grid(x: &Value, side: usize) -> Result<Value> {
    let columns = x.columns().max(1);
    let values = x.as_floats()?;
    let wide = (values.len() / columns).isqrt();
    let cells = wide.checked_div(side).unwrap_or(0);
    let area = (side * side) as f32;
    let mut data = vec![0.0f32; cells * cells * columns];
    for (row, values) in values.chunks_exact(columns).enumerate() {
        let (y, x) = (row / wide.max(1) / side, row % wide.max(1) / side);
        let first = (y * cells + x) * columns;
        let sums = data.get_mut(first..first + columns).filter(|_| x < cells);
        let sums = sums.ok_or_else(|| fault(format!("row {row} lies in no square")))?;
        sums.iter_mut().zip(values).for_each(|(s, v)| *s += v);
    }
    data.iter_mut().for_each(|s| *s /= area);
    Value::floats([1, cells * cells, columns], data)
}

/// `x` plus a table of as many rows.
pub(super) fn add_rows(x: &Value, table: &[f32]) -> Result<Value> {
    let values = x.as_floats()?;
    if values.len() != table.len() {
        return Err(fault(format!("{} values and a table of {}", values.len(), table.len())));
    }
    let data: Vec<f32> = values.iter().zip(table).map(|(v, t)| v + t).collect();
    Value::floats(x.shape(), data)
}

/// A matrix `[rows, columns]` as `[columns, rows]`.
pub(super) fn transposed(matrix: &[f32], rows: usize, columns: usize) -> Result<Vec<f32>> {
    if Some(matrix.len()) != rows.checked_mul(columns) {
        return Err(fault(format!("{} elements as {rows} × {columns}", matrix.len())));
    }
    let mut out = vec![0.0f32; matrix.len()];
    for (n, row) in matrix.chunks_exact(columns.max(1)).enumerate() {
        for (to, v) in out.iter_mut().skip(n).step_by(rows.max(1)).zip(row) {
            *to = *v;
        }
    }
    Ok(out)
}

/// Rows of two position tables, added; zeros for padding.
pub(super) fn embed_axes(
    table: &[f32],
    extents: [usize; 3],
    axes_first: bool,
    at: &Value,
    padding: &Value,
) -> Result<Value> {
    let [outer, inner, columns] = extents;
    let positions = if axes_first { inner } else { outer };
    let mut data = Vec::new();
    for (at, padding) in at.as_ints()?.chunks_exact(2).zip(padding.as_ints()?) {
        let first = data.len();
        data.resize(first + columns, 0.0f32);
        if *padding != 0 {
            continue;
        }
        for (axis, coordinate) in at.iter().enumerate() {
            let known = usize::try_from(*coordinate).ok().filter(|c| *c < positions);
            let c = known.ok_or_else(|| {
                fault(format!(
                    "a patch at {coordinate}; the table has {positions} positions an axis"
                ))
            })?;
            let row = if axes_first { axis * inner + c } else { c * inner + axis };
            let from = table.get(row * columns..(row + 1) * columns);
            let from = from.ok_or_else(|| fault("a position table that is too short"))?;
            data[first..].iter_mut().zip(from).for_each(|(v, t)| *v += t);
        }
    }
    let patches = padding.as_ints()?.len();
    Value::floats([1, patches, columns], data)
}

#[cfg(test)]
mod tests {
    use super::softmax;

    #[test]
    fn softmax_sums_to_one_hides_nothing_and_leaves_the_invisible_out() {
        let of = |mut scores: Vec<f32>| {
            softmax(&mut scores);
            scores
        };
        let half = of(vec![1.0, f32::NEG_INFINITY, 1.0]);
        assert_eq!(half, [0.5, 0.0, 0.5]);
        assert_eq!(of(vec![f32::NEG_INFINITY; 2]), [0.0, 0.0]);
        for broken in [vec![f32::NAN], vec![f32::NAN, f32::NEG_INFINITY], vec![1.0, f32::NAN]] {
            assert!(of(broken).iter().all(|p| p.is_nan()));
        }
    }
}
