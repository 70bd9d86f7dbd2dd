//! The search rule: scales that make the squared error of the block smaller than absmax does.

use super::{Chosen, Codes};
use crate::num::round_away;

/// Squared error of a block under scale `s`, and the sums of its least-squares refit, Σxd and Σdd.
fn judge(v: &[f32], codes: &Codes, s: f32) -> (f64, f64, f64) {
    let s = f64::from(s);
    let (mut error, mut xd, mut dd) = (0.0, 0.0, 0.0);
    for &x in v {
        let x = f64::from(x);
        let d = f64::from(codes.value(codes.code_f64(x / s)));
        error += (x - d * s) * (x - d * s);
        xd += x * d;
        dd += d * d;
    }
    (error, xd, dd)
}

/// The best of `base`·(1 + 0.02k) for k = −15..=5 and of each one's least-squares refit. Every candidate is rounded
/// before it is judged; a later one wins only with a strictly smaller error. `start` is the rounded absmax scale.
pub(super) fn symmetric(
    v: &[f32],
    codes: &Codes,
    base: f32,
    start: (u32, f32),
    round: impl Fn(f64) -> (u32, f32),
) -> (u32, f32) {
    let mut best = start;
    let mut least = judge(v, codes, start.1).0;
    for k in -15..=5 {
        let candidate = round(f64::from(base) * (1.0 + 0.02 * f64::from(k)));
        let (error, xd, dd) = judge(v, codes, candidate.1);
        if error < least {
            (least, best) = (error, candidate);
        }
        // A refit needs a code that is not 0, and a scale of the sign the book asks for.
        if dd > 0.0 && xd != 0.0 {
            let refit = round(xd / dd);
            let error = judge(v, codes, refit.1).0;
            if error < least {
                (least, best) = (error, refit);
            }
        }
    }
    best
}

/// The best pair of ends for an asymmetric block: each end times 1, 0.96, … 0.8. The full range goes first; a later
/// pair wins only with a strictly smaller error.
pub(super) fn ends(
    v: &[f32],
    lo: f32,
    hi: f32,
    top: f32,
    at: impl Fn(f32, f32) -> (Chosen, i64),
) -> (Chosen, i64) {
    let mut best = at(lo, hi);
    let mut least = f64::INFINITY;
    for a in 0..6 {
        for b in 0..6 {
            let shrink = |n: i32| (1.0 - 0.04 * f64::from(n)) as f32;
            let (chosen, zero) = at(lo * shrink(a), hi * shrink(b));
            let s = f64::from(chosen.effective());
            let error: f64 = v
                .iter()
                .map(|&x| {
                    let code =
                        round_away(chosen.quotient(x)).saturating_add(zero).clamp(0, top as i64);
                    let d = f64::from(x) - (code - zero) as f64 * s;
                    d * d
                })
                .sum();
            if error < least {
                (least, best) = (error, (chosen, zero));
            }
        }
    }
    best
}
