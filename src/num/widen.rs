//! Checkpoint bytes → f32.

use super::{Element, decode_fnuz, mini};
use crate::tensor::DType;

/// Why bytes were not widened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WidenError {
    /// The type has no single f32 value an element.
    #[error("{0} values cannot be read as numbers")]
    Type(DType),
    /// The bytes are not exactly the elements asked for.
    #[error("{bytes} bytes hold no {elements} elements of {dtype}")]
    Length {
        /// Element type.
        dtype: DType,
        /// Bytes given.
        bytes: usize,
        /// Elements asked for.
        elements: usize,
    },
}

/// Whether [`widen`] reads that type: whole bytes wide and real.
pub fn widens(dtype: DType) -> bool {
    dtype.bytes().is_some() && dtype != DType::C64
}

/// Little-endian elements as f32, round to nearest even where f32 is narrower (f64, wide integers); a finite f64
/// beyond f32 becomes infinite. The bytes may start at any address. A non-zero bool is 1.
///
/// # Errors
/// [`WidenError`] for a type that does not widen, or when `bytes` is not `out.len()` elements.
pub fn widen(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<(), WidenError> {
    let Some(width) = dtype.bytes().filter(|_| widens(dtype)) else {
        return Err(WidenError::Type(dtype));
    };
    if out.len().checked_mul(width as usize) != Some(bytes.len()) {
        return Err(WidenError::Length { dtype, bytes: bytes.len(), elements: out.len() });
    }
    match dtype {
        DType::F64 => each(bytes, out, |b| f64::from_le_bytes(b) as f32),
        DType::F32 => each(bytes, out, f32::from_le_bytes),
        DType::F16 => each(bytes, out, |b| mini::f16_value(u16::from_le_bytes(b))),
        DType::BF16 => each(bytes, out, |b| mini::bf16_value(u16::from_le_bytes(b))),
        DType::I8 => each(bytes, out, |b| f32::from(i8::from_le_bytes(b))),
        DType::U8 => each(bytes, out, |b| f32::from(u8::from_le_bytes(b))),
        DType::I16 => each(bytes, out, |b| f32::from(i16::from_le_bytes(b))),
        DType::U16 => each(bytes, out, |b| f32::from(u16::from_le_bytes(b))),
        DType::I32 => each(bytes, out, |b| i32::from_le_bytes(b) as f32),
        DType::U32 => each(bytes, out, |b| u32::from_le_bytes(b) as f32),
        DType::I64 => each(bytes, out, |b| i64::from_le_bytes(b) as f32),
        DType::U64 => each(bytes, out, |b| u64::from_le_bytes(b) as f32),
        _ => {
            // One byte wide: fp8 and its fnuz variants, e8m0, bool.
            let table: Vec<f32> = match Element::new(dtype) {
                Some(e) => (0..256).map(|c| e.decode(c)).collect(),
                None => (0..=255).map(|c| decode_fnuz(dtype, c)).collect(),
            };
            each(bytes, out, |[b]: [u8; 1]| table[usize::from(b)]);
        }
    }
    Ok(())
}

fn each<const W: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; W]) -> f32) {
    for (o, b) in out.iter_mut().zip(bytes.as_chunks::<W>().0) {
        *o = value(*b);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(dtype: DType, bytes: &[u8]) -> f32 {
        let mut out = [0.0];
        widen(dtype, bytes, &mut out).expect("widens");
        out[0]
    }

    #[test]
    fn each_checkpoint_type_reads_as_its_value() {
        assert_eq!(one(DType::F64, &0.1f64.to_le_bytes()), 0.1f32);
        assert_eq!(one(DType::F64, &1e300f64.to_le_bytes()), f32::INFINITY);
        assert_eq!(one(DType::F32, &(-2.5f32).to_le_bytes()), -2.5);
        assert_eq!(one(DType::F16, &0x0001u16.to_le_bytes()), 2f32.powi(-24));
        assert_eq!(one(DType::BF16, &0xbf80u16.to_le_bytes()), -1.0);
        assert_eq!(one(DType::I8, &[0x80]), -128.0);
        assert_eq!(one(DType::U8, &[0x80]), 128.0);
        assert_eq!(one(DType::I16, &(-300i16).to_le_bytes()), -300.0);
        assert_eq!(one(DType::U16, &60000u16.to_le_bytes()), 60000.0);
        // 2^24 + 1 is a tie between two f32 values and goes to the even one.
        assert_eq!(one(DType::I32, &16_777_217i32.to_le_bytes()), 16_777_216.0);
        assert_eq!(one(DType::I64, &16_777_219i64.to_le_bytes()), 16_777_220.0);
        assert_eq!(one(DType::U64, &u64::MAX.to_le_bytes()), 18_446_744_073_709_551_616.0);
        assert_eq!(one(DType::U32, &3u32.to_le_bytes()), 3.0);
        assert_eq!(one(DType::Bool, &[7]), 1.0);
        assert_eq!(one(DType::F8E4M3, &[0xfe]), -448.0);
        assert_eq!(one(DType::F8E5M2, &[0x7b]), 57344.0);
        assert_eq!(one(DType::F8E4M3Fnuz, &[0x7f]), 240.0);
        assert_eq!(one(DType::E8M0, &[128]), 2.0);
    }

    #[test]
    fn bytes_may_start_anywhere_and_must_be_exact() {
        let bytes: Vec<u8> = [0u8].into_iter().chain(1.5f32.to_le_bytes()).collect();
        assert_eq!(one(DType::F32, &bytes[1..]), 1.5);
        let mut out = [0.0; 2];
        let short = WidenError::Length { dtype: DType::F32, bytes: 5, elements: 2 };
        assert_eq!(widen(DType::F32, &bytes, &mut out), Err(short));
        assert_eq!(widen(DType::F4E2M1, &[0], &mut out), Err(WidenError::Type(DType::F4E2M1)));
        assert_eq!(widen(DType::C64, &[0; 16], &mut out), Err(WidenError::Type(DType::C64)));
    }
}
