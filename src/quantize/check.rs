//! Checks that stored weights decode to finite values.

use rayon::prelude::*;

use super::{Decoder, PlaneSlice};
use crate::diag::Diagnostic;
use crate::tensor::{Encoding, Scheme, Shape};

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

/// Decodes every affine weight whole; plain values need no decoding, and other producers' schemes are not ours to
/// judge. Reports the first fault of each weight.
pub fn verify_decodes<'a>(weights: impl IntoIterator<Item = StoredWeight<'a>>) -> Vec<Diagnostic> {
    let weights: Vec<StoredWeight<'a>> =
        weights.into_iter().filter(|w| w.encoding.scheme == Scheme::Affine).collect();
    weights
        .par_iter()
        .filter_map(|weight| {
            let why = decode(weight).err()?;
            Some(Diagnostic::new(
                "encodings",
                format!("{} ({}): {why}", weight.name, weight.encoding),
            ))
        })
        .collect()
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
    use crate::tensor::{DType, PlaneSpec, role};

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
}
