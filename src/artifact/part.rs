//! `radpack/part`: what a part of a conversion says of itself.
//!
//! A part is a container of its own: some weights of a larger file, and in part 1 everything else of it. Its record says
//! where each entry stands in the larger directory, which source files the weights were made from, and what their
//! quantization cost, so that the parts can be put together without the source.

use serde::{Deserialize, Serialize};

use super::codec::{self, CodecError};
use super::digests::{self, EntryDigest};
use super::layout::PART_ENTRY;
use super::{Artifact, MetaValue};
use crate::artifact::layout::PART_KEY;

/// Most parts of one file: Slurm's and Kubernetes' arrays end far below.
pub const MAX_PARTS: u32 = 65_536;

/// The record of one part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Its number, from 1.
    pub index: u32,
    /// How many there are.
    pub parts: u32,
    /// Digest of what all parts together will be, except for values that follow from weight data. Parts with equal ones
    /// belong together.
    pub plan: [u8; 32],
    /// Number of entries in the larger directory.
    pub directory: u64,
    /// Where the entries of this file stand there, in the order of its own directory, without [`PART_ENTRY`] and the
    /// digests.
    pub entries: Vec<PartEntry>,
    /// Positions in the larger directory in the order in which planes lie, as [`super::Contents::data`]; in part 1 only.
    pub data: Vec<u64>,
    /// Digests of the source files that this part read.
    pub files: Vec<EntryDigest>,
    /// Its weights, in the order of the plan.
    pub weights: Vec<PartWeight>,
}

/// An entry's place in the larger file. A part's own directory has every entry at model level, since some experts of a
/// layer would make no regular group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartEntry {
    /// Position in the directory.
    pub position: u64,
    /// Layer, -1 at model level.
    pub layer: i32,
    /// Expert, or -1.
    pub expert: i32,
    /// Position within its expert, else 0.
    pub slot: i32,
}

/// What is known of a weight when it is encoded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartWeight {
    /// Its name.
    pub name: String,
    /// Digest of the whole weight, whatever pieces it is stored in.
    pub whole: [u8; 32],
    /// Sum of (source − decoded)²; 0 for a weight that no quantizer made.
    pub squared_error: f64,
    /// Sum of source²; 0 for a weight that no quantizer made.
    pub squared: f64,
}

impl Part {
    /// Bytes of [`PART_ENTRY`]; they depend on no digest and no sum.
    pub fn encoded_len(&self) -> u64 {
        codec::encoded_len(self)
    }

    /// The bytes of [`PART_ENTRY`].
    pub fn encode(&self) -> Vec<u8> {
        codec::encode(self)
    }

    /// `2 of 4`
    pub fn said(&self) -> String {
        format!("{} of {}", self.index, self.parts)
    }

    /// The metadata row by which a part is told from a whole file.
    pub fn metadata(index: u32, parts: u32) -> (String, MetaValue) {
        (PART_KEY.to_owned(), MetaValue::Text(format!("{index}/{parts}")))
    }

    /// The record of an opened part, its digests, and `None` for a file that is not a part.
    ///
    /// # Errors
    /// Digests that do not fit, a malformed record, or numbers out of range.
    pub fn of(artifact: &Artifact) -> Result<Option<(Part, Vec<EntryDigest>)>, CodecError> {
        let Some(entry) = artifact.find(PART_ENTRY) else { return Ok(None) };
        let list = digests::of(artifact)?;
        let digest = list.iter().find(|d| d.name == PART_ENTRY);
        let digest = digest.ok_or_else(|| CodecError::Malformed("it has no digest".into()))?;
        let part: Part = codec::decode(entry.plane(0), &digest.sha256)?;
        if part.index == 0 || part.index > part.parts || part.parts > MAX_PARTS {
            let what = format!("there is no part {}", part.said());
            return Err(CodecError::Malformed(what));
        }
        let own = artifact.len() as u64;
        if part.entries.len() as u64 + 2 != own {
            let what = format!("it places {} entries of {own}", part.entries.len());
            return Err(CodecError::Malformed(what));
        }
        Ok(Some((part, list)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash;

    #[test]
    fn the_length_depends_on_no_value_that_comes_later() {
        let mut part = Part {
            index: 2,
            parts: 4,
            plan: [0; 32],
            directory: 9,
            entries: vec![PartEntry { position: 3, layer: 1, expert: -1, slot: 0 }],
            data: Vec::new(),
            files: vec![EntryDigest { name: "a".into(), sha256: [0; 32] }],
            weights: vec![PartWeight {
                name: "w".into(),
                whole: [0; 32],
                squared_error: 0.0,
                squared: 0.0,
            }],
        };
        let planned = part.encoded_len();
        part.plan = [7; 32];
        part.files[0].sha256 = [7; 32];
        part.weights[0] = PartWeight { whole: [1; 32], squared: 2.5, ..part.weights[0].clone() };
        let bytes = part.encode();
        assert_eq!(bytes.len() as u64, planned);
        let digest = hash::sha256([bytes.as_slice()]);
        assert_eq!(codec::decode::<Part>(&bytes, &digest), Ok(part));
    }
}
