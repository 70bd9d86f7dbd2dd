//! Differences of weights: which, in what, and how far apart their values are.

use std::io;

use rayon::prelude::*;

use crate::artifact::{Artifact, WeightView, Weights};
use crate::diag::{Failure, FailureKind, Result};
use crate::quantize::{Decoder, ErrorSum, PlaneSlice};

/// Bytes of decoded rows that are in memory at a time, for each thread and file.
const STEP_BYTES: u64 = 1 << 20;

/// The weights of two files.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct WeightDifference {
    /// Weights that both files have and whose planes are equal byte for byte.
    pub equal: usize,
    /// Weights that both have and that differ, in the order of the first file.
    pub changed: Vec<ChangedWeight>,
    /// Names that only the first file has.
    pub only_a: Vec<String>,
    /// Names that only the second has.
    pub only_b: Vec<String>,
}

/// A weight that both files have and that differs.
#[derive(Debug, Clone, PartialEq)]
pub struct ChangedWeight {
    /// Its name.
    pub name: String,
    /// Its planes in both files, e.g. `i8*bf16[1x128]`.
    pub encodings: [String; 2],
    /// Its shape in both files.
    pub shapes: [Vec<u64>; 2],
    /// Distance of the values over the length of the first file's, ‖a − b‖ / ‖a‖; `None` where shapes differ, values
    /// cannot be decoded, or all of the first file's are 0.
    pub distance: Option<f64>,
}

/// What a file and its copy have.
pub(super) fn all_equal(artifact: &Artifact) -> Result<WeightDifference> {
    let equal = Weights::open(artifact)?.iter().len();
    Ok(WeightDifference { equal, ..WeightDifference::default() })
}

/// Compares all weights of two files.
pub(super) fn compare(a: &Artifact, b: &Artifact) -> Result<WeightDifference> {
    let (a, b) = (Weights::open(a)?, Weights::open(b)?);
    let views: Vec<&WeightView<'_>> = a.iter().collect();
    let compared: Vec<Option<ChangedWeight>> = views
        .into_par_iter()
        .map(|x| b.get(x.name()).map_or(Ok(None), |y| changed(x, y)))
        .collect::<io::Result<_>>()
        .map_err(|e| Failure::plain(FailureKind::Failed, format!("cannot read a weight: {e}")))?;
    let missing = |from: &Weights<'_>, other: &Weights<'_>| -> Vec<String> {
        let names = from.iter().map(|w| w.name());
        names.filter(|name| other.get(name).is_none()).map(str::to_owned).collect()
    };
    let (only_a, only_b) = (missing(&a, &b), missing(&b, &a));
    let changed: Vec<ChangedWeight> = compared.into_iter().flatten().collect();
    let equal = a.iter().len() - only_a.len() - changed.len();
    Ok(WeightDifference { equal, changed, only_a, only_b })
}

/// What differs between two weights of one name; `None` if nothing.
fn changed(a: &WeightView<'_>, b: &WeightView<'_>) -> io::Result<Option<ChangedWeight>> {
    if a.encoding() == b.encoding() && a.shape() == b.shape() && same_planes(a, b)? {
        return Ok(None);
    }
    Ok(Some(ChangedWeight {
        name: a.name().to_owned(),
        encodings: [a, b].map(|w| w.encoding().to_string()),
        shapes: [a, b].map(|w| w.shape().extents().to_vec()),
        distance: if a.shape() == b.shape() { distance(a, b)? } else { None },
    }))
}

fn same_planes(a: &WeightView<'_>, b: &WeightView<'_>) -> io::Result<bool> {
    let Some((rows, cols)) = a.shape().matrix() else { return Ok(false) };
    for (k, plane) in a.encoding().planes.iter().enumerate() {
        let (all, _) = plane.grid(rows, cols);
        let step = (STEP_BYTES / plane.row_bytes(cols).unwrap_or(1).max(1)).max(1);
        let mut first = 0;
        while first < all {
            let end = all.min(first.saturating_add(step));
            if a.rows(k, first..end)? != b.rows(k, first..end)? {
                return Ok(false);
            }
            first = end;
        }
    }
    Ok(true)
}

/// The relative distance of decoded values, by exact sums, row after row.
fn distance(a: &WeightView<'_>, b: &WeightView<'_>) -> io::Result<Option<f64>> {
    let Some((rows, cols)) = a.shape().matrix() else { return Ok(None) };
    let decoder = |w: &WeightView<'_>| Decoder::new(w.encoding(), rows, cols).ok();
    let (Some(decode_a), Some(decode_b)) = (decoder(a), decoder(b)) else { return Ok(None) };
    let step = (STEP_BYTES / cols.saturating_mul(4).max(1)).max(1);
    let mut sum = ErrorSum::default();
    let mut first = 0;
    while first < rows {
        let end = rows.min(first.saturating_add(step));
        let (Some(x), Some(y)) =
            (values(a, &decode_a, first..end, cols)?, values(b, &decode_b, first..end, cols)?)
        else {
            return Ok(None);
        };
        let width = usize::try_from(cols).unwrap_or(usize::MAX).max(1);
        x.chunks(width).zip(y.chunks(width)).for_each(|(x, y)| sum.add_row(x, y));
        first = end;
    }
    Ok(sum.relative())
}

/// Decoded rows; `None` when they do not decode, or hold something that is no number.
fn values(
    weight: &WeightView<'_>,
    decoder: &Decoder,
    rows: std::ops::Range<u64>,
    cols: u64,
) -> io::Result<Option<Vec<f32>>> {
    let block = weight.block(rows.clone())?;
    let planes: Vec<PlaneSlice<'_>> =
        block.iter().map(|(first, bytes)| PlaneSlice { bytes, first: *first }).collect();
    let elements = (rows.end - rows.start).saturating_mul(cols);
    let mut out = vec![0.0; usize::try_from(elements).map_err(io::Error::other)?];
    let decoded = decoder.decode(rows, &planes, &mut out).is_ok();
    Ok((decoded && out.iter().all(|v| v.is_finite())).then_some(out))
}
