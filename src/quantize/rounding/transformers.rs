//! The fine-grained fp8 quantizer of transformers 5.17 (the layout of DeepSeek V3): blocks of e4m3 codes, and their
//! inverse scales, which despite the name are multipliers.

use super::{Scaled, Setup, amax, ceil_log2, e4m3_clamp, mini};
use crate::tensor::DType;

/// The rules for one grid.
#[derive(Debug, Clone)]
pub(in super::super) struct Transformers {
    setup: Setup,
}

impl Transformers {
    pub(super) fn new(setup: Setup) -> Transformers {
        Transformers { setup }
    }

    pub(super) fn block(&self, values: &[f32], codes: &mut [u32]) -> Scaled {
        let Setup { codes: element, scale, .. } = self.setup;
        let largest = amax(values);
        // Torch divides a Python number by a tensor as reciprocal and product.
        let by = if largest > 0.0 { (1.0 / largest) * 448.0 } else { 1.0 };
        let inverse = 1.0 / by;
        let (code, by) = if scale.dtype() == DType::E8M0 {
            let exponent = ceil_log2(inverse.max(f32::MIN_POSITIVE));
            ((exponent + 127) as u32, 1.0 / mini::pow2(exponent))
        } else {
            (scale.encode(inverse), by)
        };
        for (code, &x) in codes.iter_mut().zip(values) {
            *code = e4m3_clamp(element, x * by);
        }
        // Below 448/2^128 the factor is infinite and the scale 0.
        Scaled { scale: code, zero: 0, lost: !by.is_finite() }
    }
}
