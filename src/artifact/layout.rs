//! Constants of the container that never change.
//!
//! The container is radiance's, version 2 (Apache-2.0): little-endian, packed, every offset absolute. A file is
//!
//! ```text
//! header 248 │ strings │ metadata │ directory │ planes │ encodings │ vocab │ profile │ … zeros … │ data blob
//!            └────────── each section at a multiple of 8 ───────────────────────────┘            └ multiple of 2 MiB
//! ```
//!
//! and ends with the last byte of its last plane.

use crate::tensor::DType;

/// First four bytes of a container, `RAD1`.
pub const MAGIC: u32 = 0x3144_4152;
/// The one container version that exists.
pub const VERSION: u32 = 2;

/// Alignment of the data blob: radiance maps the blob in pools of this size.
pub const POOL: u64 = 2 << 20;
/// Alignment of an entry's first byte.
pub const UNIT: u64 = 4096;
/// Alignment of a plane's first byte.
pub const SUB: u64 = 256;
/// Alignment of a table; readers use typed pointers into the map.
pub const TABLE_ALIGN: u64 = 8;

/// Bytes of the header.
pub const HEADER_BYTES: u64 = 248;
/// Bytes of a metadata row.
pub const META_BYTES: u64 = 24;
/// Bytes of a directory row.
pub const DIR_BYTES: u64 = 136;
/// Bytes of a plane row.
pub const PLANE_BYTES: u64 = 16;
/// Bytes of an encoding row.
pub const ENC_BYTES: u64 = 568;
/// Bytes of one plane slot of an encoding row.
pub const ENC_PLANE_BYTES: u64 = 64;
/// Bytes of an encoding row before its plane slots.
pub const ENC_HEAD_BYTES: u64 = 56;
/// Bytes of an expert profile row.
pub const PROFILE_BYTES: u64 = 16;
/// Bytes of the vocabulary header.
pub const VOCAB_BYTES: u64 = 128;
/// Bytes of a tokenizer step row.
pub const STEP_BYTES: u64 = 32;
/// Bytes of a name inside an encoding row, its NUL included.
pub const NAME_BYTES: usize = 24;
/// Slots one expert can have.
pub const MAX_EXPERT_SLOTS: usize = 8;

/// Metadata row type: a signed integer.
pub const META_INT: u32 = 1;
/// Metadata row type: an offset into the string section.
pub const META_TEXT: u32 = 2;
/// Metadata row type: a 64-bit float.
pub const META_FLOAT: u32 = 100;

/// Plane kind: one element per block of the weight.
pub const KIND_TILED: u32 = 0;
/// Plane kind: a matrix of its own extents.
pub const KIND_TABLE: u32 = 1;

/// `(type, code)` of every element type a container can hold.
const DTYPE_CODES: &[(DType, u32)] = &[
    (DType::F32, 1),
    (DType::F16, 2),
    (DType::BF16, 3),
    (DType::F8E4M3, 4),
    (DType::F8E5M2, 5),
    (DType::I8, 8),
    (DType::U8, 9),
    (DType::I16, 10),
    (DType::I32, 11),
    (DType::I64, 12),
    (DType::U32, 13),
    (DType::Bool, 14),
    (DType::I4, 16),
    (DType::I2, 17),
    (DType::F4E2M1, 18),
    (DType::U4, 19),
    (DType::U2, 20),
    (DType::E8M0, 21),
    (DType::U1, 22),
    (DType::I3, 23),
    (DType::U3, 24),
    (DType::I5, 25),
    (DType::U5, 26),
    (DType::I6, 27),
    (DType::U6, 28),
    (DType::I7, 29),
    (DType::U7, 30),
    (DType::U9, 31),
    (DType::U10, 32),
    (DType::U11, 33),
    (DType::U12, 34),
    (DType::F6E2M3, 35),
    (DType::F6E3M2, 36),
    (DType::U16, 37),
];

/// The container's number for an element type; `None` when a container cannot hold it.
pub fn dtype_code(dtype: DType) -> Option<u32> {
    DTYPE_CODES.iter().find(|row| row.0 == dtype).map(|row| row.1)
}

/// The element type of a container's number; `None` for numbers that files must not use.
pub fn dtype_of(code: u32) -> Option<DType> {
    DTYPE_CODES.iter().find(|row| row.1 == code).map(|row| row.0)
}

/// `n` rounded up to a multiple of `align` (a power of two); `None` on overflow.
pub fn round_up(n: u64, align: u64) -> Option<u64> {
    Some(n.checked_add(align - 1)? & !(align - 1))
}

/// Names of this project's own entries begin with this.
pub const OWN_PREFIX: &str = "radpack/";
/// Metadata keys of this project begin with this.
pub const OWN_KEYS: &str = "radpack.";
/// Version of the extension that `schemas/rad.md` specifies.
pub const EXTENSION_VERSION: i64 = 1;
/// The manifest, JSON.
pub const MANIFEST_ENTRY: &str = "radpack/manifest.json";
/// SHA-256 of every other entry.
pub const DIGESTS_ENTRY: &str = "radpack/digests";
/// Squared errors of the quantized weights.
pub const ERRORS_ENTRY: &str = "radpack/errors";
/// Who holds which piece of which weight, in files for several devices.
pub const PARTITION_ENTRY: &str = "radpack/partition";
/// What the programs share: cache tensors, weights, types, and the programs' names.
pub const GRAPHS_ENTRY: &str = "radpack/graphs";
/// In a part of a conversion, where its entries belong.
pub const PART_ENTRY: &str = "radpack/part";
/// Prefix of the entries that hold one program each.
pub const GRAPH_PREFIX: &str = "radpack/graph/";
/// Side files: this prefix, then the relative path.
pub const FILE_PREFIX: &str = "radpack/file/";
/// Metadata key of the root digest.
pub const DIGEST_KEY: &str = "radpack.digest";
/// Metadata key of [`EXTENSION_VERSION`].
pub const FORMAT_KEY: &str = "radpack.format";
/// Metadata key of the version of the tool that wrote the file.
pub const VERSION_KEY: &str = "radpack.version";
/// Metadata key of a part's number, `I/N`; whole files have none.
pub const PART_KEY: &str = "radpack.part";
/// Metadata key of the number of devices the file is made for.
pub const DEVICES_KEY: &str = "radpack.devices";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn these_constants_never_change() {
        assert_eq!(MAGIC.to_le_bytes(), *b"RAD1");
        assert_eq!((VERSION, POOL, UNIT, SUB, TABLE_ALIGN), (2, 2_097_152, 4096, 256, 8));
        assert_eq!((HEADER_BYTES, META_BYTES, DIR_BYTES, PLANE_BYTES), (248, 24, 136, 16));
        assert_eq!((ENC_BYTES, ENC_HEAD_BYTES, ENC_PLANE_BYTES, NAME_BYTES), (568, 56, 64, 24));
        assert_eq!(ENC_HEAD_BYTES + 8 * ENC_PLANE_BYTES, ENC_BYTES);
        assert_eq!((VOCAB_BYTES, STEP_BYTES, PROFILE_BYTES, MAX_EXPERT_SLOTS), (128, 32, 16, 8));
        assert_eq!((META_INT, META_TEXT, META_FLOAT, KIND_TILED, KIND_TABLE), (1, 2, 100, 0, 1));
        assert_eq!(EXTENSION_VERSION, 1);
        assert_eq!(
            [
                MANIFEST_ENTRY,
                DIGESTS_ENTRY,
                ERRORS_ENTRY,
                PARTITION_ENTRY,
                GRAPHS_ENTRY,
                GRAPH_PREFIX,
                FILE_PREFIX,
                DIGEST_KEY,
                FORMAT_KEY
            ],
            [
                "radpack/manifest.json",
                "radpack/digests",
                "radpack/errors",
                "radpack/partition",
                "radpack/graphs",
                "radpack/graph/",
                "radpack/file/",
                "radpack.digest",
                "radpack.format"
            ]
        );
    }

    #[test]
    fn element_type_codes_are_those_of_container_version_2() {
        // name=code/bits as radiance's container version 2 numbers them.
        let table = "f32=1/32 f16=2/16 bf16=3/16 fp8_e4m3=4/8 fp8_e5m2=5/8 i8=8/8 u8=9/8 i16=10/16 \
            i32=11/32 i64=12/64 u32=13/32 bool=14/8 i4=16/4 i2=17/2 fp4_e2m1=18/4 u4=19/4 u2=20/2 e8m0=21/8 \
            u1=22/1 i3=23/3 u3=24/3 i5=25/5 u5=26/5 i6=27/6 u6=28/6 i7=29/7 u7=30/7 u9=31/9 u10=32/10 \
            u11=33/11 u12=34/12 fp6_e2m3=35/6 fp6_e3m2=36/6 u16=37/16";
        let mut rows = 0;
        for row in table.split_whitespace() {
            let (name, rest) = row.split_once('=').expect("name=code");
            let (code, bits) = rest.split_once('/').expect("code/bits");
            let code: u32 = code.parse().expect("number");
            let dtype = dtype_of(code).expect(row);
            assert_eq!((dtype.name(), dtype.bits().to_string().as_str()), (name, bits));
            assert_eq!(dtype_code(dtype), Some(code));
            rows += 1;
        }
        assert_eq!(rows, DTYPE_CODES.len());
        for code in [0, 6, 7, 15, 38, 255, 256, u32::MAX] {
            assert_eq!(dtype_of(code), None, "{code}");
        }
        assert_eq!(dtype_code(DType::F64), None);
        assert_eq!(dtype_code(DType::U64), None);
    }

    #[test]
    fn rounding_up_is_checked() {
        assert_eq!(round_up(0, 8), Some(0));
        assert_eq!(round_up(4097, 4096), Some(8192));
        assert_eq!(round_up(u64::MAX - 7, 8), Some(u64::MAX - 7));
        assert_eq!(round_up(u64::MAX - 6, 8), None);
    }
}
