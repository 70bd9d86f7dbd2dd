//! Squared errors of the quantized weights.
//!
//! `radpack/errors` keeps, for every weight that a quantizer made, the sums over all elements of the squared
//! difference between source and decoded value, and of the squared source value; the relative error (Frobenius) is
//! the root of their quotient. The list's size follows from the names, so it has its place before any weight is read.

use serde::{Deserialize, Serialize};

use super::codec::{self, CodecError};
use super::layout::ERRORS_ENTRY;
use super::{Artifact, digests};

/// What quantization did to one weight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WeightError {
    /// Name of the weight's entry.
    pub weight: String,
    /// Sum of (source − decoded)², ≥ 0.
    pub squared_error: f64,
    /// Sum of source², ≥ 0.
    pub squared: f64,
}

impl WeightError {
    /// Relative error √(squared error / squared); `None` for a weight of zeros.
    pub fn relative(&self) -> Option<f64> {
        (self.squared > 0.0).then(|| (self.squared_error / self.squared).sqrt())
    }
}

/// Bytes of `radpack/errors` for weights of these names.
pub fn encoded_len<'a>(names: impl IntoIterator<Item = &'a str>) -> u64 {
    names.into_iter().fold(8, |n, name| n + 8 + name.len() as u64 + 16)
}

/// The bytes of `radpack/errors`.
pub fn encode(errors: &[WeightError]) -> Vec<u8> {
    codec::encode(&errors)
}

/// Reads `radpack/errors`, whose digest `radpack/digests` tells.
///
/// # Errors
/// Other bytes than the digest says, or a malformed list.
pub fn decode(bytes: &[u8], digest: &[u8; 32]) -> Result<Vec<WeightError>, CodecError> {
    codec::decode(bytes, digest)
}

/// The list of an artifact, if its digests vouch for it; empty for one without.
pub fn of(artifact: &Artifact) -> Vec<WeightError> {
    let read = || -> Option<Vec<WeightError>> {
        let list = digests::of(artifact).ok()?;
        let digest = list.iter().find(|d| d.name == ERRORS_ENTRY)?.sha256;
        decode(artifact.find(ERRORS_ENTRY)?.plane(0), &digest).ok()
    };
    read().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::sha256;

    #[test]
    fn the_list_has_the_planned_length_and_reads_back() {
        let list = [
            WeightError { weight: "blk.0.attn_q.weight".into(), squared_error: 1.0, squared: 4.0 },
            WeightError { weight: "z".into(), squared_error: 0.0, squared: 0.0 },
        ];
        let bytes = encode(&list);
        assert_eq!(bytes.len() as u64, encoded_len(["blk.0.attn_q.weight", "z"]));
        assert_eq!(decode(&bytes, &sha256([bytes.as_slice()])), Ok(list.to_vec()));
        assert_eq!((list[0].relative(), list[1].relative()), (Some(0.5), None));
    }
}
