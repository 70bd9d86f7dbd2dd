//! The Walsh–Hadamard rotation of rows.

/// Applies the unnormalised Hadamard matrix H_n to every run of `n` values; twice gives n times the input. `n` is a
/// power of two that divides the length; a shorter last run stays as it is.
pub(in super::super) fn hadamard(row: &mut [f32], n: usize) {
    for run in row.chunks_exact_mut(n) {
        let mut step = 1;
        while step < n {
            for pair in run.chunks_exact_mut(2 * step) {
                let (low, high) = pair.split_at_mut(step);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            step *= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::hadamard;

    #[test]
    fn the_rotation_is_the_hadamard_matrix_and_its_own_inverse_up_to_n() {
        let mut v = [1.0, 0.0, 0.0, 2.0, 5.0, 6.0];
        hadamard(&mut v, 4);
        assert_eq!(v, [3.0, -1.0, -1.0, 3.0, 5.0, 6.0]);
        hadamard(&mut v, 4);
        assert_eq!(v, [4.0, 0.0, 0.0, 8.0, 5.0, 6.0]);
    }
}
