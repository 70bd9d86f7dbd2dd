//! Products with matrices: the one place that calls the GEMM crate.
//!
//! Every element of a product is one sum over the columns in an order that depends on the number of columns (and on the
//! processor's instruction set) alone: work is shared over threads by rows of the matrix, never along a sum.

use rayon::prelude::*;

/// Multiplications below which threads cost more than they save.
const WORTH_SHARING: usize = 1 << 18;

/// Fewest rows of the matrix that a thread takes at a time.
const ROWS: usize = 128;

/// Rows of x up to which a matrix is read once for each instead of being packed for a blocked product.
const FEW: usize = 4;

/// `x Wᵀ`: `x` has rows of `columns` elements, `w` too; the result has one row for each row of x and one column for each
/// row of w. Lengths that are no whole rows count up to the last whole one.
pub(super) fn product(x: &[f32], w: &[f32], columns: usize) -> Vec<f32> {
    if columns == 0 {
        return Vec::new();
    }
    let (m, n) = (x.len() / columns, w.len() / columns);
    if m.saturating_mul(w.len()) < WORTH_SHARING {
        return part(x, w, columns);
    }
    // A blocked product packs all of x for every part of the matrix: as few parts as there are threads.
    let rows = match m <= FEW {
        true => ROWS,
        false => n.div_ceil(rayon::current_num_threads().max(1)).max(ROWS),
    };
    let parts: Vec<Vec<f32>> = w.par_chunks(rows * columns).map(|w| part(x, w, columns)).collect();
    let mut out = vec![0.0; m * n];
    let mut first = 0;
    for part in parts {
        let width = part.len() / m;
        for (row, from) in out.chunks_exact_mut(n).zip(part.chunks_exact(width)) {
            row[first..first + width].copy_from_slice(from);
        }
        first += width;
    }
    out
}

fn part(x: &[f32], w: &[f32], columns: usize) -> Vec<f32> {
    let (m, n) = (x.len() / columns, w.len() / columns);
    let mut out = vec![0.0; m * n];
    if n == 0 {
        return out;
    }
    if m <= FEW {
        for (j, w) in w.chunks_exact(columns).enumerate() {
            for (i, x) in x.chunks_exact(columns).enumerate() {
                out[i * n + j] = dot(x, w);
            }
        }
        return out;
    }
    // SAFETY: x has m rows and w n rows of `columns` elements, out has m rows of n: every index that these strides reach
    // lies inside, and out is borrowed mutably by this function alone.
    unsafe {
        matrixmultiply::sgemm(
            m,
            columns,
            n,
            1.0,
            x.as_ptr(),
            columns as isize,
            1,
            w.as_ptr(),
            1,
            columns as isize,
            0.0,
            out.as_mut_ptr(),
            n as isize,
            1,
        );
    }
    out
}

/// Sum of products, in sixteen lanes.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a, a_rest) = a.as_chunks::<16>();
    let (b, b_rest) = b.as_chunks::<16>();
    let mut lanes = [0.0f32; 16];
    for (a, b) in a.iter().zip(b) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    lanes.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_agree_with_plain_sums_whatever_path_they_take() {
        let columns = 67;
        let value = |i: usize| ((i * 2_654_435_761 % 1000) as f32 - 500.0) / 500.0;
        for (m, n) in [(1, 5), (4, 300), (5, 300), (130, 131)] {
            let x: Vec<f32> = (0..m * columns).map(value).collect();
            let w: Vec<f32> = (0..n * columns).map(|i| value(i + 7)).collect();
            let y = product(&x, &w, columns);
            assert_eq!(y.len(), m * n);
            for i in 0..m {
                for j in 0..n {
                    let sum: f64 = (0..columns)
                        .map(|k| f64::from(x[i * columns + k]) * f64::from(w[j * columns + k]))
                        .sum();
                    assert!((f64::from(y[i * n + j]) - sum).abs() < 1e-4, "{m} {n} {i} {j}");
                }
            }
        }
    }

    #[test]
    fn threads_change_no_bit() {
        let columns = 100;
        let x: Vec<f32> = (0..40 * columns).map(|i| (i as f32).sin()).collect();
        let w: Vec<f32> = (0..700 * columns).map(|i| (i as f32).cos()).collect();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool");
        let one = pool.install(|| product(&x, &w, columns));
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().expect("a pool");
        let three = pool.install(|| product(&x, &w, columns));
        assert_eq!(one, part(&x, &w, columns));
        assert_eq!(one, three);
    }
}
