//! Rotary frequencies, as transformers 5.24 computes them (`modeling_rope_utils`).

use std::f64::consts::PI;

use crate::model::{RopeScaling, RopeSpec};

/// The frequencies of a head of `head_dim` elements: one for each of its `head_dim / 2` pairs, 0 for pairs that do not
/// turn; and the factor on cos and sin. The angle of a pair is position × frequency, in f32.
pub fn frequencies(rope: &RopeSpec, head_dim: u64) -> (Vec<f32>, f64) {
    let pairs = head_dim / 2;
    let turning = (rope.rotary_dims / 2).min(pairs);
    let base = |i: u64| rope.theta.powf(-((2 * i) as f64) / head_dim as f64);
    let mut magnitude = 1.0;
    let frequency: Box<dyn Fn(u64) -> f64> = match rope.scaling {
        RopeScaling::Default => Box::new(base),
        RopeScaling::Linear { factor } | RopeScaling::Proportional { factor } => {
            Box::new(move |i| base(i) / factor)
        }
        RopeScaling::Llama3 { factor, low, high, original_positions } => Box::new(move |i| {
            let f = base(i);
            let length = 2.0 * PI / f;
            let original = original_positions as f64;
            if length < original / high {
                f
            } else if length > original / low {
                f / factor
            } else {
                let smooth = (original / length - low) / (high - low);
                (1.0 - smooth) * f / factor + smooth * f
            }
        }),
        RopeScaling::Yarn {
            factor,
            original_positions,
            beta_fast,
            beta_slow,
            truncate,
            attention_factor,
        } => {
            magnitude = attention_factor;
            let dim = head_dim as f64;
            // The pair that makes that many turns over the original positions.
            let pair = |turns: f64| {
                dim * (original_positions as f64 / (turns * 2.0 * PI)).ln()
                    / (2.0 * rope.theta.ln())
            };
            let (mut low, mut high) = (pair(beta_fast), pair(beta_slow));
            if truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
            if low == high {
                high += 0.001; // as transformers does, against a division by zero
            }
            Box::new(move |i| {
                let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                let f = base(i);
                f / factor * ramp + f * (1.0 - ramp)
            })
        }
    };
    let all = (0..pairs).map(|i| if i < turning { frequency(i) as f32 } else { 0.0 });
    (all.collect(), magnitude)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(theta: f64, rotary_dims: u64, scaling: RopeScaling) -> RopeSpec {
        RopeSpec { theta, rotary_dims, scaling }
    }

    #[test]
    fn a_default_rotation_turns_every_pair() {
        let (f, m) = frequencies(&rope(10_000.0, 8, RopeScaling::Default), 8);
        assert_eq!(f, [1.0, 0.1, 0.01, 0.001]);
        assert_eq!(m, 1.0);
    }

    #[test]
    fn a_proportional_rotation_turns_a_part_over_the_whole_exponent() {
        // Gemma 4's full layers: 512 wide, a quarter turns: pairs 0 to 63 with 256 to 319.
        let spec = rope(1e6, 128, RopeScaling::Proportional { factor: 1.0 });
        let (f, _) = frequencies(&spec, 512);
        assert_eq!(f.len(), 256);
        assert_eq!(f[1], 1e6f64.powf(-2.0 / 512.0) as f32);
        assert!(f[63] > 0.0 && f[64..].iter().all(|x| *x == 0.0));
    }

    #[test]
    fn llama_3_divides_slow_pairs_only() {
        let scaling =
            RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_positions: 8192 };
        let (f, _) = frequencies(&rope(500_000.0, 128, scaling), 128);
        let (plain, _) = frequencies(&rope(500_000.0, 128, RopeScaling::Default), 128);
        assert_eq!(f[0], plain[0]);
        assert_eq!(f[63], plain[63] / 8.0);
    }

    #[test]
    fn a_ramp_joins_interpolated_and_original_frequencies() {
        // transformers 5.24 with the numbers of gpt-oss: head 64, theta 150000, factor 32, 4096 positions.
        let rope = RopeSpec {
            theta: 150_000.0,
            rotary_dims: 64,
            scaling: RopeScaling::Yarn {
                factor: 32.0,
                original_positions: 4096,
                beta_fast: 32.0,
                beta_slow: 1.0,
                truncate: false,
                attention_factor: 1.346_573_6,
            },
        };
        let (f, factor) = frequencies(&rope, 64);
        assert_eq!((f.len(), factor), (32, 1.346_573_6));
        // Below the ramp nothing changes; above it everything is divided by 32.
        assert_eq!(f[8], 150_000f64.powf(-16.0 / 64.0) as f32);
        assert_eq!(f[18], (150_000f64.powf(-36.0 / 64.0) / 32.0) as f32);
        // Element 13 lies at (13 - 8.0928) / (17.3984 - 8.0928) of it.
        let low = 64.0 * (4096.0 / (32.0 * 2.0 * PI)).ln() / (2.0 * 150_000f64.ln());
        let high = 64.0 * (4096.0 / (2.0 * PI)).ln() / (2.0 * 150_000f64.ln());
        assert!((low - 8.0928).abs() < 1e-3 && (high - 17.3984).abs() < 1e-3, "{low} {high}");
        let ramp = (13.0 - low) / (high - low);
        let plain = 150_000f64.powf(-26.0 / 64.0);
        assert_eq!(f[13], (plain / 32.0 * ramp + plain * (1.0 - ramp)) as f32);
    }
}
