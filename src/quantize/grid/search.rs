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

/// Steps of the finer ladder of an asymmetric search, to either side, and the size of one. A bf16 scale has 128 to 256
/// steps between powers of two, so a step is about one stored scale.
const FINE: i32 = 6;
const FINE_STEP: f64 = 0.005;

/// Most rounds of refits; each must have made the error smaller.
const REFITS: usize = 4;

/// The best scale and zero point of an asymmetric block.
///
/// First every pair of ends, each times 1, 0.96, … 0.8, the full range before all others: the candidates of radiance's
/// converter. Steps of 4 % are too coarse for 8 bits, so around the best pair follow scales in steps of 0.5 % with the
/// zero point that the low end gives and its neighbours, then least-squares refits Σwxd/Σwdd under the best codes, with
/// each of these zero points. Every scale is rounded before it is judged; a later candidate wins only with a strictly
/// smaller error.
pub(super) fn asymmetric(
    v: Sample<'_>,
    lo: f32,
    hi: f32,
    top: f32,
    at: impl Fn(f32, f32) -> (Chosen, i64),
    choose: impl Fn(f32) -> Chosen,
) -> (Chosen, i64) {
    let top = top as i64;
    let mut best = at(lo, hi);
    let mut least = f64::INFINITY;
    for a in 0..6 {
        for b in 0..6 {
            let shrink = |n: i32| (1.0 - 0.04 * f64::from(n)) as f32;
            let candidate = at(lo * shrink(a), hi * shrink(b));
            v.challenge(candidate, top, &mut best, &mut least);
        }
    }
    let middle = f64::from(best.0.effective());
    for k in -FINE..=FINE {
        let s = (middle * (1.0 + FINE_STEP * f64::from(k))) as f32;
        if s == 0.0 {
            continue;
        }
        let chosen = choose(s);
        let zero = (f64::from(-lo) / f64::from(chosen.effective()) + 0.5) as i64;
        let zero = zero.clamp(0, top);
        for zero in [zero, best.1, zero - 1, zero + 1] {
            v.challenge((chosen, zero.clamp(0, top)), top, &mut best, &mut least);
        }
    }
    for _ in 0..REFITS {
        let before = least;
        let (chosen, zero) = best;
        for zero in [zero, zero - 1, zero + 1] {
            let zero = zero.clamp(0, top);
            if let Some(s) = v.refit(&chosen, zero, top) {
                v.challenge((choose(s as f32), zero), top, &mut best, &mut least);
            }
        }
        if least >= before {
            break;
        }
    }
    best
}

impl Sample<'_> {
    /// A value's code less the zero point.
    fn step(x: f32, chosen: &Chosen, zero: i64, top: i64) -> f64 {
        let code = round_away(chosen.quotient(x)).saturating_add(zero).clamp(0, top);
        (code - zero) as f64
    }

    /// Takes over a candidate whose squared error is smaller.
    fn challenge(
        &self,
        (chosen, zero): (Chosen, i64),
        top: i64,
        best: &mut (Chosen, i64),
        least: &mut f64,
    ) {
        let s = f64::from(chosen.effective());
        let mut error = 0.0;
        for (i, &x) in self.values.iter().enumerate() {
            let d = f64::from(x) - Self::step(x, &chosen, zero, top) * s;
            error += self.weight(i) * (d * d);
            // Squares only add up.
            if error >= *least {
                return;
            }
        }
        (*least, *best) = (error, (chosen, zero));
    }

    /// The scale of least squared error under the codes of this one; none where all codes are 0 or it has no sense.
    fn refit(&self, chosen: &Chosen, zero: i64, top: i64) -> Option<f64> {
        let (mut xd, mut dd) = (0.0, 0.0);
        for (i, &x) in self.values.iter().enumerate() {
            let d = Self::step(x, chosen, zero, top);
            xd += self.weight(i) * (f64::from(x) * d);
            dd += self.weight(i) * (d * d);
        }
        let s = xd / dd;
        (dd > 0.0 && s as f32 > 0.0 && s.is_finite()).then_some(s)
    }
}
