//! Binary lists of this project's entries: the one file that names bincode.
//!
//! The layout is that of bincode 1.3 with fixed-width integers: numbers little-endian, a list or a text is its length
//! as u64 and then its items or bytes, an enum its variant as u32, an option one byte and then its value, an array of
//! fixed length just its items. `schemas/rad.md` specifies it, and a test reads the bytes with another program's
//! decoder, so that this crate can be replaced without changing the format.
//!
//! Decoding takes the SHA-256 that the bytes must have and checks it first.

use bincode::Options;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::digests::hex;
use crate::hash::sha256;

/// Why bytes are not what they should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// Other bytes than were digested.
    #[error("sha256 is {found}, not {want}")]
    Digest {
        /// Of the bytes.
        found: String,
        /// As recorded.
        want: String,
    },
    /// Not a value of the type, or followed by further bytes.
    #[error("{0}")]
    Malformed(String),
}

fn options(limit: u64) -> impl Options {
    bincode::DefaultOptions::new()
        .with_fixint_encoding()
        .with_little_endian()
        .with_limit(limit)
        .reject_trailing_bytes()
}

/// Length of [`encode`]'s bytes.
pub fn encoded_len<T: Serialize>(value: &T) -> u64 {
    options(u64::MAX).serialized_size(value).unwrap_or(0)
}

/// The bytes of a value. A value that cannot be encoded (a sequence of unknown length) gives no bytes; the lists of
/// this module always can.
pub fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    options(u64::MAX).serialize(value).unwrap_or_default()
}

/// The value, after the digest check. Memory stays in proportion to the bytes.
///
/// # Errors
/// Other bytes than were digested, or bytes that are no value of the type.
pub fn decode<T: DeserializeOwned>(bytes: &[u8], digest: &[u8; 32]) -> Result<T, CodecError> {
    let found = sha256([bytes]);
    if found != *digest {
        return Err(CodecError::Digest { found: hex(&found), want: hex(digest) });
    }
    options(bytes.len() as u64).deserialize(bytes).map_err(|e| CodecError::Malformed(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
        decode(bytes, &sha256([bytes]))
    }

    #[test]
    fn integers_are_fixed_width_and_lengths_64_bit() {
        let bytes = encode(&(7u32, vec!["ab".to_owned()], Some(1u8), [9u8; 2]));
        assert_eq!(
            bytes,
            [7, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 97, 98, 1, 1, 9, 9]
        );
    }

    #[test]
    fn hostile_bytes_give_an_error() {
        let huge = u64::MAX.to_le_bytes();
        assert!(matches!(decoded::<Vec<String>>(&huge), Err(CodecError::Malformed(_))));
        let trailing = encode(&1u32).into_iter().chain([0]).collect::<Vec<_>>();
        assert!(matches!(decoded::<u32>(&trailing), Err(CodecError::Malformed(_))));
        assert!(matches!(decoded::<u32>(&[1, 2]), Err(CodecError::Malformed(_))));
        assert!(matches!(decode::<u32>(&encode(&1u32), &[0; 32]), Err(CodecError::Digest { .. })));
    }
}
