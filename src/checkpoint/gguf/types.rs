//! ggml's tensor types.

use crate::checkpoint::quantized::BlockType;
use crate::tensor::DType;

/// How the elements of a tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// One after the other.
    Plain(DType),
    /// In blocks of codes with their scales.
    Blocks(BlockType),
}

/// ggml's types: number, name, and how they are read, if they are (`enum ggml_type`; those that ggml has removed are
/// absent).
#[rustfmt::skip]
const TYPES: [(u32, &str, Option<Kind>); 33] = [
    (0, "F32", Some(Kind::Plain(DType::F32))),
    (1, "F16", Some(Kind::Plain(DType::F16))),
    (2, "Q4_0", Some(Kind::Blocks(BlockType::Q4_0))),
    (3, "Q4_1", Some(Kind::Blocks(BlockType::Q4_1))),
    (6, "Q5_0", Some(Kind::Blocks(BlockType::Q5_0))),
    (7, "Q5_1", Some(Kind::Blocks(BlockType::Q5_1))),
    (8, "Q8_0", Some(Kind::Blocks(BlockType::Q8_0))),
    (9, "Q8_1", None),
    (10, "Q2_K", Some(Kind::Blocks(BlockType::Q2K))),
    (11, "Q3_K", Some(Kind::Blocks(BlockType::Q3K))),
    (12, "Q4_K", Some(Kind::Blocks(BlockType::Q4K))),
    (13, "Q5_K", Some(Kind::Blocks(BlockType::Q5K))),
    (14, "Q6_K", Some(Kind::Blocks(BlockType::Q6K))),
    (15, "Q8_K", None),
    (16, "IQ2_XXS", None),
    (17, "IQ2_XS", None),
    (18, "IQ3_XXS", None),
    (19, "IQ1_S", None),
    (20, "IQ4_NL", None),
    (21, "IQ3_S", None),
    (22, "IQ2_S", None),
    (23, "IQ4_XS", None),
    (24, "I8", Some(Kind::Plain(DType::I8))),
    (25, "I16", Some(Kind::Plain(DType::I16))),
    (26, "I32", Some(Kind::Plain(DType::I32))),
    (27, "I64", Some(Kind::Plain(DType::I64))),
    (28, "F64", Some(Kind::Plain(DType::F64))),
    (29, "IQ1_M", None),
    (30, "BF16", Some(Kind::Plain(DType::BF16))),
    (34, "TQ1_0", None),
    (35, "TQ2_0", None),
    (39, "MXFP4", Some(Kind::Blocks(BlockType::Mxfp4))),
    (40, "NVFP4", None),
];

/// Name of a type and how it is read; `None` for a number that no type has.
pub(super) fn find(number: u32) -> Option<(&'static str, Option<Kind>)> {
    TYPES.iter().find(|row| row.0 == number).map(|row| (row.1, row.2))
}

/// Names of the types that are read.
pub(super) fn names() -> Vec<&'static str> {
    TYPES.iter().filter(|row| row.2.is_some()).map(|row| row.1).collect()
}

impl Kind {
    /// ggml's name.
    pub fn name(self) -> &'static str {
        TYPES.iter().find(|row| row.2 == Some(self)).map_or("", |row| row.1)
    }

    /// Elements and bytes of one block; elements that stand alone are blocks of one.
    pub fn block(self) -> (u64, u64) {
        match self {
            Kind::Plain(dtype) => (1, dtype.bytes().unwrap_or(1)),
            Kind::Blocks(blocks) => blocks.extent(),
        }
    }
}
