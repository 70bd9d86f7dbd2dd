//! Why a file is not a container: the field, and what is wrong with it.

use crate::diag::{Diagnostic, Failure, FailureKind};
use crate::tensor::EncodingError;

/// A file that cannot be opened as a container.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The system's error.
    #[error("cannot {doing} {path}: {error}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To which file.
        path: String,
        /// The reason.
        error: std::io::Error,
    },
    /// The bytes are not a valid container.
    #[error("{path}: {refused}")]
    Refused {
        /// The file.
        path: String,
        /// The first rule that it breaks.
        refused: Refused,
    },
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Failure {
        match error {
            OpenError::Io { .. } => Failure::plain(FailureKind::Failed, error.to_string()),
            OpenError::Refused { path, refused } => Failure::one(
                FailureKind::Invalid,
                format!("{path} is not a valid container"),
                Diagnostic::new("container", refused.to_string()),
            ),
        }
    }
}

/// The first rule that a file breaks.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct Refused {
    /// Where, e.g. `metadata[3].key`.
    pub field: String,
    /// What is wrong there.
    pub reason: Reason,
}

/// What a reader refuses, one variant a rule.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // each variant is documented by its message, which names every number
pub enum Reason {
    #[error("{size} bytes, a header takes 248")]
    TooSmall { size: u64 },
    #[error("{found:#010x} is not `RAD1`")]
    Magic { found: u32 },
    #[error("{found} is not 2, the one version that exists")]
    Version { found: u32 },
    #[error("{file_bytes} exceeds the file's {size} bytes")]
    Truncated { file_bytes: u64, size: u64 },
    #[error("{count} × {row} bytes at {offset} leave the file of {size} bytes")]
    Section { count: u64, row: u64, offset: u64, size: u64 },
    #[error("the string section of {bytes} bytes is empty or does not end in NUL")]
    Unterminated { bytes: u64 },
    #[error("{value} is not a multiple of {align}")]
    Misaligned { value: u64, align: u64 },
    #[error("offset {offset} is outside the string section of {bytes} bytes")]
    OutsideStrings { offset: u64, bytes: u64 },
    #[error("the 24-byte name does not end in NUL")]
    NameUnterminated,
    #[error("{found} planes, not 1 to 8")]
    PlaneCount { found: i32 },
    #[error("{found} is no element type of a container")]
    Dtype { found: u32 },
    #[error("{found} is not 0 (tiled) or 1 (table)")]
    Kind { found: u32 },
    #[error("negative in {found:?}")]
    NegativeBlock { found: [i64; 2] },
    #[error("below 1 in {found:?}")]
    EmptyExtent { found: [i64; 2] },
    #[error("{0}")]
    Encoding(EncodingError),
    #[error("{found} is not 1 to 6")]
    Rank { found: u32 },
    #[error("extent {found} is below 1")]
    Extent { found: i64 },
    #[error("{bytes} bytes at {offset} leave the file of {size} bytes")]
    OutsideFile { offset: u64, bytes: u64, size: u64 },
    #[error("{found} of {count} encodings")]
    NoSuchEncoding { found: u32, count: u64 },
    #[error("{found}, but its encoding has {want}")]
    PlanesDiffer { found: u32, want: u64 },
    #[error("{first} + {n} passes the {count} rows of the plane table")]
    PlaneRows { first: u64, n: u32, count: u64 },
    #[error("{found}, but its shape and encoding give {want}")]
    PlaneBytes { found: u64, want: i64 },
    #[error("{bytes} bytes at {offset} are not inside the entry's {entry_bytes} at {entry_offset}")]
    OutsideEntry { offset: u64, bytes: u64, entry_offset: u64, entry_bytes: u64 },
    #[error("{bytes} bytes, a vocabulary header takes 128")]
    VocabTooSmall { bytes: u64 },
    #[error("{count} rows at {offset} leave the vocabulary section of {bytes} bytes at {section}")]
    OutsideVocab { count: u32, offset: u64, section: u64, bytes: u64 },
    #[error("merges tokens {left} and {right} of {n_tokens}")]
    Merge { left: u32, right: u32, n_tokens: u32 },
    #[error("a second run of experts in layer {layer}")]
    SecondRun { layer: i32 },
    #[error("expert 0 of layer {layer} has {slots} slots, not 1 to 8")]
    ExpertSlots { layer: i32, slots: u64 },
    #[error("a later slot of expert 0 in layer {layer} lies before slot 0")]
    SlotBeforeFirst { layer: i32 },
    #[error(
        "layer {layer} goes on with something other than expert {expert} with slots 0 to {last}"
    )]
    ExpertOrder { layer: i32, expert: u64, last: u64 },
    #[error(
        "offsets or sizes of expert {expert} in layer {layer} are not expert 0's plus {expert} × {stride}"
    )]
    ExpertLayout { layer: i32, expert: u64, stride: i128 },
}

/// Shorthand: the value, or a refusal whose field name is only built when needed.
pub(super) fn need(
    ok: bool,
    field: impl FnOnce() -> String,
    reason: impl FnOnce() -> Reason,
) -> Result<(), Refused> {
    if ok { Ok(()) } else { Err(Refused { field: field(), reason: reason() }) }
}
