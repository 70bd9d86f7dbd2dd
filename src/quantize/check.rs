//! Checks that stored weights decode to finite values.

use rayon::prelude::*;

use super::{Decoder, PlaneSlice, peak};
use crate::diag::Diagnostic;
use crate::num::Element;
use crate::tensor::{DType, Encoding, Scheme, Shape, role};

/// Values decoded at a time.
const VALUES: u64 = 1 << 18;

/// A weight as a file holds it.
#[derive(Debug, Clone)]
pub struct StoredWeight<'a> {
    /// Name, for messages.
    pub name: String,
    /// How its values are laid out.
    pub encoding: &'a Encoding,
    /// Logical shape.
    pub shape: &'a Shape,
    /// Bytes of its planes, in encoding order.
    pub planes: Vec<&'a [u8]>,
}

/// Decodes every affine weight whole, unless the bounds of its planes tell that all values are finite; plain values need no
/// decoding, and other producers' schemes are not ours to judge. Reports the first fault of each weight.
pub fn verify_decodes<'a>(weights: impl IntoIterator<Item = StoredWeight<'a>>) -> Vec<Diagnostic> {
    let weights: Vec<StoredWeight<'a>> =
        weights.into_iter().filter(|w| w.encoding.scheme == Scheme::Affine).collect();
    weights
        .par_iter()
        .filter(|weight| !surely_finite(weight))
        .filter_map(|weight| {
            let why = decode(weight).err()?;
            Some(Diagnostic::new(
                "encodings",
                format!("{} ({}): {why}", weight.name, weight.encoding),
            ))
        })
        .collect()
}

/// Whether all values are finite because the largest code times the largest scales is; most weights need no decoding.
fn surely_finite(weight: &StoredWeight<'_>) -> bool {
    let mut bound = 1.0;
    for (k, (spec, bytes)) in weight.encoding.planes.iter().zip(&weight.planes).enumerate() {
        // Codes alone, under scales alone.
        let known =
            if k == 0 { spec.role == role::CODES } else { spec.level(role::SCALE).is_some() };
        let Some(largest) = largest(spec.dtype, bytes).filter(|_| known) else { return false };
        bound *= f64::from(largest.max(1.0));
    }
    // No product on the way to a value is larger than that of all factors, none of which counts as less than 1.
    weight.encoding.transform.is_empty() && bound <= f64::from(f32::MAX)
}

/// A bound of the magnitudes in a plane; `None` when one is NaN or infinite, and for types that are not looked at here.
fn largest(dtype: DType, bytes: &[u8]) -> Option<f32> {
    let element = Element::new(dtype)?;
    let all = |codes: &mut dyn Iterator<Item = u32>| {
        let mut values = codes.map(|code| element.decode(code).abs());
        values.try_fold(0.0, |m: f32, v| v.is_finite().then_some(m.max(v)))
    };
    match element.bits() {
        // What all codes of the type can be, without a look at them, where they are all finite.
        bits @ 1..=8 if all(&mut (0..1u32 << bits)).is_some() => all(&mut (0..1u32 << bits)),
        // Codes rise with their magnitudes, and those that are not finite come last.
        8 if matches!(dtype, DType::F8E4M3 | DType::F8E5M2) => {
            let top = bytes.iter().fold(0u8, |top, code| top.max(code & 0x7f));
            all(&mut [u32::from(top)].into_iter())
        }
        8 => {
            let mut seen = [false; 256];
            bytes.iter().for_each(|b| seen[usize::from(*b)] = true);
            all(&mut (0..256u32).zip(seen).filter(|(_, seen)| *seen).map(|(code, _)| code))
        }
        _ => peak(dtype, bytes).ok(),
    }
}

fn decode(weight: &StoredWeight<'_>) -> Result<(), String> {
    let (rows, cols) = weight.shape.matrix().ok_or("the shape overflows")?;
    let decoder = Decoder::new(weight.encoding, rows, cols).map_err(|e| e.to_string())?;
    let planes: Vec<PlaneSlice<'_>> =
        weight.planes.iter().map(|bytes| PlaneSlice::whole(bytes)).collect();
    let step = (VALUES / cols.max(1)).max(1);
    let mut values = Vec::new();
    let mut first = 0;
    while first < rows {
        let end = rows.min(first + step);
        let n = (end - first).checked_mul(cols).and_then(|n| usize::try_from(n).ok());
        values.resize(n.ok_or("the shape overflows")?, 0.0f32);
        decoder.decode(first..end, &planes, &mut values).map_err(|e| e.to_string())?;
        if let Some(at) = values.iter().position(|v| !v.is_finite()) {
            let (row, col) = (first + at as u64 / cols.max(1), at as u64 % cols.max(1));
            return Err(format!("element [{row}, {col}] decodes to {}", values[at]));
        }
        first = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::PlaneSpec;

    #[test]
    fn a_nan_scale_is_found_with_its_place() {
        let encoding =
            Encoding::affine(DType::I8, vec![PlaneSpec::tiled(role::SCALE, DType::BF16, [1, 2])]);
        let shape = Shape::from([2, 4]);
        let codes = [1u8; 8];
        let mut scales = [0x3f80u16; 4].map(u16::to_le_bytes).concat();
        let check = |scales: &[u8]| {
            verify_decodes([StoredWeight {
                name: "w".into(),
                encoding: &encoding,
                shape: &shape,
                planes: vec![&codes, scales],
            }])
        };
        assert_eq!(check(&scales), []);
        scales[6..].copy_from_slice(&0x7fc0u16.to_le_bytes());
        let found = check(&scales);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].message, "w (i8*bf16[1x2]): element [1, 2] decodes to NaN");
    }

    /// Every pair of a code and a scale: what the bounds call finite is finite, and what is not is found.
    #[test]
    fn bounds_and_decoding_agree_on_every_code_and_many_scales() {
        let scales: Vec<u16> =
            [0, 1, 0x3f80, 0x7f00, 0x7f7f, 0xff7f, 0x7f80, 0x7fc0, 0xff80].into();
        for codes in [DType::I8, DType::U8, DType::I4, DType::F4E2M1, DType::F8E4M3, DType::F8E5M2]
        {
            let block = PlaneSpec::tiled(role::SCALE, DType::BF16, [1, 2]);
            let encoding = Encoding::affine(codes, vec![block]);
            let shape = Shape::from([1, 2]);
            for code in 0..=255u8 {
                for scale in &scales {
                    let (code, scale) = ([code; 2], scale.to_le_bytes());
                    let planes = vec![&code[..shape_bytes(codes)], &scale[..]];
                    let weight = StoredWeight {
                        name: "w".into(),
                        encoding: &encoding,
                        shape: &shape,
                        planes,
                    };
                    let finite = decode(&weight).is_ok();
                    assert!(finite || !surely_finite(&weight), "{codes} {code:?} {scale:?}");
                    assert_eq!(verify_decodes([weight]).is_empty(), finite);
                }
            }
        }
        let encoding =
            Encoding::affine(DType::I8, vec![PlaneSpec::tiled(role::SCALE, DType::F32, [1, 2])]);
        let shape = Shape::from([1, 2]);
        let one = 1f32.to_le_bytes();
        let planes = vec![&[7u8, 0x80][..], &one[..]];
        let weight = StoredWeight { name: "w".into(), encoding: &encoding, shape: &shape, planes };
        assert!(surely_finite(&weight), "usual weights are not decoded");
    }

    /// Bytes of two codes.
    fn shape_bytes(codes: DType) -> usize {
        (2 * codes.bits() as usize).div_ceil(8)
    }
}
