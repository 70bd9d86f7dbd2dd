//! Element types.

use std::fmt;

/// An element type of a checkpoint tensor or of a container plane.
///
/// Names are the container's spelling ([`DType::name`]); the numbers that files use for them live with the file
/// formats (`artifact::layout`, `checkpoint::safetensors`).
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[allow(missing_docs)] // each variant is its own documentation: kind and width
pub enum DType {
    F64,
    F32,
    F16,
    BF16,
    F8E4M3,
    F8E5M2,
    F8E4M3Fnuz,
    F8E5M2Fnuz,
    E8M0,
    F6E2M3,
    F6E3M2,
    F4E2M1,
    C64,
    Bool,
    I2,
    I3,
    I4,
    I5,
    I6,
    I7,
    I8,
    I16,
    I32,
    I64,
    U1,
    U2,
    U3,
    U4,
    U5,
    U6,
    U7,
    U8,
    U9,
    U10,
    U11,
    U12,
    U16,
    U32,
    U64,
}

/// Field widths of a small binary floating-point format with a sign bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FloatFormat {
    /// Exponent bits.
    pub exponent: u32,
    /// Stored mantissa bits.
    pub mantissa: u32,
}

/// `(type, name, bits)`, the one table behind the accessors.
const TABLE: &[(DType, &str, u32)] = &[
    (DType::F64, "f64", 64),
    (DType::F32, "f32", 32),
    (DType::F16, "f16", 16),
    (DType::BF16, "bf16", 16),
    (DType::F8E4M3, "fp8_e4m3", 8),
    (DType::F8E5M2, "fp8_e5m2", 8),
    (DType::F8E4M3Fnuz, "fp8_e4m3fnuz", 8),
    (DType::F8E5M2Fnuz, "fp8_e5m2fnuz", 8),
    (DType::E8M0, "e8m0", 8),
    (DType::F6E2M3, "fp6_e2m3", 6),
    (DType::F6E3M2, "fp6_e3m2", 6),
    (DType::F4E2M1, "fp4_e2m1", 4),
    (DType::C64, "c64", 64),
    (DType::Bool, "bool", 8),
    (DType::I2, "i2", 2),
    (DType::I3, "i3", 3),
    (DType::I4, "i4", 4),
    (DType::I5, "i5", 5),
    (DType::I6, "i6", 6),
    (DType::I7, "i7", 7),
    (DType::I8, "i8", 8),
    (DType::I16, "i16", 16),
    (DType::I32, "i32", 32),
    (DType::I64, "i64", 64),
    (DType::U1, "u1", 1),
    (DType::U2, "u2", 2),
    (DType::U3, "u3", 3),
    (DType::U4, "u4", 4),
    (DType::U5, "u5", 5),
    (DType::U6, "u6", 6),
    (DType::U7, "u7", 7),
    (DType::U8, "u8", 8),
    (DType::U9, "u9", 9),
    (DType::U10, "u10", 10),
    (DType::U11, "u11", 11),
    (DType::U12, "u12", 12),
    (DType::U16, "u16", 16),
    (DType::U32, "u32", 32),
    (DType::U64, "u64", 64),
];

impl DType {
    /// Every element type, in table order.
    pub fn all() -> impl Iterator<Item = DType> {
        TABLE.iter().map(|row| row.0)
    }

    fn row(self) -> &'static (DType, &'static str, u32) {
        // The table lists the variants in declaration order; a test holds it.
        &TABLE[self as usize]
    }

    /// The container's spelling, e.g. `fp8_e4m3`.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// The type of that name.
    pub fn from_name(name: &str) -> Option<DType> {
        TABLE.iter().find(|row| row.1 == name).map(|row| row.0)
    }

    /// Width of one element in bits.
    pub fn bits(self) -> u32 {
        self.row().2
    }

    /// Width of one element in bytes, for types of whole bytes.
    pub fn bytes(self) -> Option<u64> {
        self.bits().is_multiple_of(8).then(|| u64::from(self.bits() / 8))
    }

    /// Whether values are binary floating point with sign, exponent and mantissa.
    pub fn is_float(self) -> bool {
        matches!(
            self,
            DType::F64
                | DType::F32
                | DType::F16
                | DType::BF16
                | DType::F8E4M3
                | DType::F8E5M2
                | DType::F8E4M3Fnuz
                | DType::F8E5M2Fnuz
                | DType::F6E2M3
                | DType::F6E3M2
                | DType::F4E2M1
        )
    }

    /// Whether values are signed two's-complement integers.
    pub fn is_signed_int(self) -> bool {
        (DType::I2..=DType::I64).contains(&self)
    }

    /// Whether values are unsigned integers ([`DType::Bool`] is not).
    pub fn is_unsigned_int(self) -> bool {
        (DType::U1..=DType::U64).contains(&self)
    }

    /// Field widths of the formats of at most 16 bits whose values follow `sign, exponent, mantissa`.
    pub fn float_format(self) -> Option<FloatFormat> {
        let (exponent, mantissa) = match self {
            DType::F16 => (5, 10),
            DType::BF16 => (8, 7),
            DType::F8E4M3 => (4, 3),
            DType::F8E5M2 => (5, 2),
            DType::F6E2M3 => (2, 3),
            DType::F6E3M2 => (3, 2),
            DType::F4E2M1 => (2, 1),
            _ => return None,
        };
        Some(FloatFormat { exponent, mantissa })
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_lists_the_variants_in_declaration_order() {
        for (i, row) in TABLE.iter().enumerate() {
            assert_eq!(row.0 as usize, i, "{}", row.1);
            assert_eq!(DType::from_name(row.1), Some(row.0));
        }
        assert_eq!(DType::U64 as usize + 1, TABLE.len());
    }

    #[test]
    fn integer_ranges_hold_what_their_names_say() {
        for t in DType::all() {
            let name = t.name();
            assert_eq!(t.is_signed_int(), name.starts_with('i'), "{name}");
            assert_eq!(t.is_unsigned_int(), name.starts_with('u'), "{name}");
        }
    }
}
