//! Rotary embeddings: frequencies, and the turning of heads. Formulas of transformers 5.24 (`modeling_rope_utils`).

use super::value::{Value, fault};
use crate::diag::Result;
use crate::graph::frequencies;
use crate::model::RopeSpec;

/// Turns pairs `(i, i + n)` of `head`, where n is the number of frequencies.
fn turn(head: &mut [f32], turns: &[(f32, f32)]) {
    let (first, second) = head.split_at_mut(turns.len().min(head.len()));
    for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(turns) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

/// (cos, sin) of every frequency at a position: the angle is an f32 product, as transformers computes it.
fn turns(frequencies: &[f32], position: i64, factor: f32) -> Vec<(f32, f32)> {
    let at = |f: &f32| {
        let angle = position as f32 * f;
        (angle.cos() * factor, angle.sin() * factor)
    };
    frequencies.iter().map(at).collect()
}

/// [`Op::Rope`](crate::graph::Op::Rope).
pub(super) fn rotate(rope: &RopeSpec, x: &Value, positions: &Value) -> Result<Value> {
    let [_, _, heads, d] = x.heads()?;
    let (frequencies, factor) = frequencies(rope, d as u64);
    let factor = factor as f32;
    let mut data = x.as_floats()?.to_vec();
    let rows = data.chunks_exact_mut((heads * d).max(1));
    for (row, position) in rows.zip(positions.as_ints()?) {
        let turns = turns(&frequencies, *position, factor);
        row.chunks_exact_mut(d).for_each(|head| turn(head, &turns));
    }
    Value::floats(x.shape(), data)
}

/// [`Op::AxialRope`](crate::graph::Op::AxialRope).
pub(super) fn rotate_axes(theta: f64, x: &Value, at: &Value) -> Result<Value> {
    let [_, _, heads, d] = x.heads()?;
    let half = d / 2;
    if half < 2 {
        return Err(fault(format!("heads {d} wide do not turn along two axes")));
    }
    let frequencies: Vec<f32> =
        (0..half / 2).map(|i| theta.powf(-2.0 * i as f64 / half as f64) as f32).collect();
    let mut data = x.as_floats()?.to_vec();
    let rows = data.chunks_exact_mut((heads * d).max(1));
    for (row, at) in rows.zip(at.as_ints()?.chunks_exact(2)) {
        let axes = [turns(&frequencies, at[0], 1.0), turns(&frequencies, at[1], 1.0)];
        for head in row.chunks_exact_mut(d) {
            for (part, turns) in head.chunks_exact_mut(half).zip(&axes) {
                turn(part, turns);
            }
        }
    }
    Value::floats(x.shape(), data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::RopeScaling;

    #[test]
    fn pairs_lie_half_a_head_apart() {
        let rope = RopeSpec { theta: 100.0, rotary_dims: 4, scaling: RopeScaling::Default };
        let x = Value::floats([1, 1, 1, 4], vec![1.0, 2.0, 3.0, 4.0]).expect("fits");
        let at = Value::ints([1, 1], vec![2]).expect("fits");
        let y = rotate(&rope, &x, &at).expect("turns");
        let y = y.as_floats().expect("floats");
        let (c, s) = (2f32.cos(), 2f32.sin());
        assert!((y[0] - (c - 3.0 * s)).abs() < 1e-6 && (y[2] - (3.0 * c + s)).abs() < 1e-6);
        let (c, s) = (0.2f32.cos(), 0.2f32.sin());
        assert!(
            (y[1] - (2.0 * c - 4.0 * s)).abs() < 1e-6 && (y[3] - (4.0 * c + 2.0 * s)).abs() < 1e-6
        );
    }
}
