//! The search rule: scales that make the squared error of the block smaller than absmax does.

use super::{Chosen, Codes};
use crate::num::round_away;

/// A block's values, and how much the square of each one's error counts; all alike where nothing is known.
#[derive(Clone, Copy)]
pub(super) struct Sample<'a> {
    pub values: &'a [f32],
    pub weights: Option<&'a [f32]>,
}

impl Sample<'_> {
    fn weight(&self, i: usize) -> f64 {
        self.weights.and_then(|w| w.get(i)).map_or(1.0, |w| f64::from(*w))
    }

    /// Squared error of the block under scale `s`, and the sums of its least-squares refit, Σwxd and Σwdd.
    fn judge(&self, codes: &Codes, s: f32) -> (f64, f64, f64) {
        match codes {
            // The arithmetic of `Codes::code_f64`; integers of at most 16 bits are the same through i32.
            Codes::Int { element, lo, hi } if element.bits() <= 16 => {
                let (lo, hi) = (*lo as i32, *hi as i32);
                self.sums(s, |q| f64::from(((q + 0.5f64.copysign(q)) as i32).clamp(lo, hi)))
            }
            _ => self.sums(s, |q| f64::from(codes.value(codes.code_f64(q)))),
        }
    }

    #[inline(always)]
    fn sums(&self, s: f32, value: impl Fn(f64) -> f64) -> (f64, f64, f64) {
        let s = f64::from(s);
        let (mut error, mut xd, mut dd) = (0.0, 0.0, 0.0);
        let mut add = |x: f32, w: f64| {
            let x = f64::from(x);
            let d = value(x / s);
            error += w * ((x - d * s) * (x - d * s));
            xd += w * (x * d);
            dd += w * (d * d);
        };
        match self.weights {
            None => self.values.iter().for_each(|&x| add(x, 1.0)),
            Some(weights) => {
                self.values.iter().zip(weights).for_each(|(&x, &w)| add(x, f64::from(w)));
            }
        }
        (error, xd, dd)
    }
}

/// The best of `base`·(1 + 0.02k) for k = −15..=5 and of each one's least-squares refit. Every candidate is rounded
/// before it is judged; a later one wins only with a strictly smaller error. `start` is the rounded absmax scale.
pub(super) fn symmetric(
    v: Sample<'_>,
    codes: &Codes,
    base: f32,
    start: (u32, f32),
    round: impl Fn(f64) -> (u32, f32),
) -> (u32, f32) {
    let mut best = start;
    let mut least = v.judge(codes, start.1).0;
    // Neighbouring candidates and refits often round to the same scale, which was judged then.
    let mut seen = [(0u32, (0.0, 0.0, 0.0)); 2];
    let mut known = 0;
    let mut judge = |candidate: (u32, f32)| {
        if let Some(found) = seen[..known].iter().find(|s| s.0 == candidate.1.to_bits()) {
            return found.1;
        }
        let judged = v.judge(codes, candidate.1);
        seen = [(candidate.1.to_bits(), judged), seen[0]];
        known = (known + 1).min(2);
        judged
    };
    for k in -15..=5 {
        let candidate = round(f64::from(base) * (1.0 + 0.02 * f64::from(k)));
        let (error, xd, dd) = judge(candidate);
        if error < least {
            (least, best) = (error, candidate);
        }
        // A refit needs a code that is not 0, and a scale of the sign the book asks for.
        if dd > 0.0 && xd != 0.0 {
            let refit = round(xd / dd);
            let error = judge(refit).0;
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
    v: Sample<'_>,
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
            let mut error = 0.0;
            for (i, &x) in v.values.iter().enumerate() {
                let code = round_away(chosen.quotient(x)).saturating_add(zero).clamp(0, top as i64);
                let d = f64::from(x) - (code - zero) as f64 * s;
                error += v.weight(i) * (d * d);
                // Squares only add up.
                if error >= least {
                    break;
                }
            }
            if error < least {
                (least, best) = (error, (chosen, zero));
            }
        }
    }
    best
}
