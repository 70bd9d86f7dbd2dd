//! What a target's arithmetic does to activations: roundings to 16 bits, and quantization as rows come.
//!
//! Dynamic rules are those of compressed-tensors 0.20 on f32 rows, value for value (`fixtures/activations`). Scales are
//! f32 unless the format says otherwise, and each row is quantized by itself, so that a row's values depend on nothing
//! else in its call. The last group of a row may be short; the package refuses those.

use std::borrow::Cow;

use super::value::{Value, fault};
use crate::diag::Result;
use crate::num::{Element, mini};
use crate::recipe::Activations;
use crate::tensor::DType;

/// In which arithmetic programs run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// f32 throughout, whatever types the programs state.
    #[default]
    Reference,
    /// As the programs state: every value, and the cache, is rounded to its type, and operands of matrices by the
    /// activation rules of the recipe. Sums inside an operation are f32.
    Target,
}

/// The value as its type holds it: 16-bit floats round to nearest even and overflow to infinity.
pub(super) fn rounded(value: &Value, dtype: DType) -> Result<Value> {
    if !matches!(dtype, DType::F16 | DType::BF16) || !value.is_float() {
        return Ok(value.clone());
    }
    let mut data = value.as_floats()?.to_vec();
    round(&mut data, dtype);
    Value::floats(value.shape(), data)
}

/// Rounds in place to a type of a program or a cache.
pub(super) fn round(data: &mut [f32], dtype: DType) {
    match dtype {
        DType::F16 => data.iter_mut().for_each(|v| *v = mini::f16_value(mini::f16_bits(*v))),
        DType::BF16 => data.iter_mut().for_each(|v| *v = mini::bf16_value(mini::bf16_bits(*v))),
        DType::F32 => {}
        other => {
            if let Some(element) = Element::new(other) {
                data.iter_mut().for_each(|v| *v = element.decode(element.encode(*v)));
            }
        }
    }
}

/// Rows of `columns` elements as a matrix's operand under a rule.
pub(super) fn operand<'x>(
    rule: Option<Activations>,
    x: &'x [f32],
    columns: usize,
) -> Result<Cow<'x, [f32]>> {
    let Some(rule) = rule.filter(|rule| *rule != Activations::F32) else {
        return Ok(Cow::Borrowed(x));
    };
    let mut data = x.to_vec();
    match rule {
        Activations::F32 => {}
        Activations::F16 => round(&mut data, DType::F16),
        Activations::Bf16 => round(&mut data, DType::BF16),
        Activations::Int8Token => groups(&mut data, columns, columns, int8),
        Activations::Int8Group128 => groups(&mut data, columns, 128, int8),
        Activations::Fp8Token => {
            let e4m3 = element(DType::F8E4M3)?;
            groups(&mut data, columns, columns, |row| fp8(row, e4m3));
        }
        Activations::Fp8Group128 => {
            let e4m3 = element(DType::F8E4M3)?;
            groups(&mut data, columns, 128, |group| fp8(group, e4m3));
        }
        Activations::Nvfp4 => {
            let (e2m1, e4m3) = (element(DType::F4E2M1)?, element(DType::F8E4M3)?);
            groups(&mut data, columns, columns, |row| nvfp4(row, e2m1, e4m3));
        }
        Activations::Mxfp4 => {
            let e2m1 = element(DType::F4E2M1)?;
            groups(&mut data, columns, 32, |group| mx(group, e2m1, 2));
        }
        Activations::Mxfp8 => {
            let e4m3 = element(DType::F8E4M3)?;
            groups(&mut data, columns, 32, |group| mx(group, e4m3, 8));
        }
    }
    Ok(Cow::Owned(data))
}

fn element(dtype: DType) -> Result<Element> {
    Element::new(dtype).ok_or_else(|| fault(format!("{dtype} has no codes")))
}

/// Calls `f` with every group of every row.
fn groups(data: &mut [f32], columns: usize, group: usize, f: impl Fn(&mut [f32])) {
    for row in data.chunks_exact_mut(columns.max(1)) {
        row.chunks_mut(group.max(1)).for_each(&f);
    }
}

/// The largest magnitude. NaN is passed over, as it is by every comparison.
fn amax(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |most, v| most.max(v.abs()))
}

/// What replaces a scale of 0.
fn or(scale: f32, replacement: f32) -> f32 {
    if scale == 0.0 { replacement } else { scale }
}

/// Signed codes of 8 bits; the span of −128 to 127 is split evenly, so the largest value is 127.5 steps.
fn int8(group: &mut [f32]) {
    let scale = or(amax(group) / 127.5, f32::EPSILON);
    group.iter_mut().for_each(|v| {
        *v = (*v / scale).clamp(-128.0, 127.0).round_ties_even() * scale;
    });
}

/// e4m3 codes, whose largest value is 448.
fn fp8(group: &mut [f32], e4m3: Element) {
    let scale = or(amax(group) / 448.0, f32::EPSILON);
    group.iter_mut().for_each(|v| *v = e4m3.decode(e4m3.encode(*v / scale)) * scale);
}

/// e2m1 codes with an e4m3 scale for 16 columns, and above it one factor for the row that spreads its scales over e4m3
/// (448 · 6 / the row's largest). Engines take that factor from calibration, which is not made here.
fn nvfp4(row: &mut [f32], e2m1: Element, e4m3: Element) {
    // torch divides a number by a tensor as number · (1 / tensor).
    let factor = 1.0 / amax(row).max(f32::MIN_POSITIVE) * 2688.0;
    let factor = if factor.is_finite() { factor } else { 1.0 };
    for group in row.chunks_mut(16) {
        let scale = e4m3.decode(e4m3.encode(factor * (amax(group) / 6.0)));
        let scale = or(scale, 0.125) / factor;
        group.iter_mut().for_each(|v| *v = e2m1.decode(e2m1.encode(*v / scale)) * scale);
    }
}

/// Codes with a power of two for the group: its largest magnitude, from 1.75 of a power on the next, less the exponent of
/// the largest code.
fn mx(group: &mut [f32], codes: Element, exponent: u32) {
    let power = (amax(group).to_bits() + (1 << 21)) >> 23;
    let byte = power.saturating_sub(exponent).min(254);
    let scale = if byte == 0 { mini::pow2(-126) / 2.0 } else { f32::from_bits(byte << 23) };
    group.iter_mut().for_each(|v| *v = codes.decode(codes.encode(*v / scale)) * scale);
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;

    const COLUMNS: usize = 256;

    fn fixture() -> Vec<u8> {
        let path =
            concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/activations/activations.safetensors");
        std::fs::read(path).expect("a fixture")
    }

    fn tensor(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
        let data = file.tensor(name).expect("a tensor").data();
        data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    #[test]
    fn every_dynamic_rule_gives_the_values_of_compressed_tensors() {
        let bytes = fixture();
        let file = SafeTensors::deserialize(&bytes).expect("safetensors");
        let x = tensor(&file, "x");
        let mut compared = 0;
        for (name, rule) in Activations::NAMES {
            if matches!(rule, Activations::F32 | Activations::F16 | Activations::Bf16) {
                continue;
            }
            let theirs = tensor(&file, name);
            let ours = operand(Some(rule), &x, COLUMNS).expect("a rule");
            assert_ne!(&*ours, &x[..], "{name} changes something");
            for (n, (a, b)) in ours.iter().zip(&theirs).enumerate() {
                // Zeros of either sign are equal.
                assert!(
                    a == b,
                    "{name}, row {}, column {}: {a:e} {b:e} of {:e}",
                    n / COLUMNS,
                    n % COLUMNS,
                    x[n]
                );
                compared += 1;
            }
        }
        assert_eq!(compared, 7 * 12 * COLUMNS);
    }

    #[test]
    fn rules_of_16_bits_round_to_nearest_even_and_f32_touches_nothing() {
        let x = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 1.0 + 1.0 / 2048.0, 70000.0, -0.0];
        let bf16 = operand(Some(Activations::Bf16), &x, 5).expect("a rule");
        assert_eq!(*bf16, [1.0, 1.0 + 2.0 / 128.0, 1.0, 70144.0, 0.0]);
        let f16 = operand(Some(Activations::F16), &x, 5).expect("a rule");
        assert_eq!(*f16, [x[0], x[1], 1.0, f32::INFINITY, 0.0]);
        assert!(matches!(operand(Some(Activations::F32), &x, 5), Ok(Cow::Borrowed(_))));
        assert!(matches!(operand(None, &x, 5), Ok(Cow::Borrowed(_))));
    }

    #[test]
    fn a_short_last_group_has_its_own_scale() {
        let x: Vec<f32> = (0..200)
            .map(|n| ((n * 37 % 101) as f32 - 50.0) * if n < 128 { 1.0 } else { 0.01 })
            .collect();
        for rule in [Activations::Int8Group128, Activations::Fp8Group128] {
            let all = operand(Some(rule), &x, 200).expect("a rule");
            let (first, last) = x.split_at(128);
            assert_eq!(&all[..128], &*operand(Some(rule), first, 128).expect("a rule"));
            assert_eq!(&all[128..], &*operand(Some(rule), last, 72).expect("a rule"));
        }
    }

    #[test]
    fn rows_are_quantized_by_themselves() {
        let bytes = fixture();
        let x = tensor(&SafeTensors::deserialize(&bytes).expect("safetensors"), "x");
        for (name, rule) in Activations::NAMES {
            let all = operand(Some(rule), &x, COLUMNS).expect("a rule");
            for (row, of_all) in x.chunks_exact(COLUMNS).zip(all.chunks_exact(COLUMNS)) {
                assert_eq!(of_all, &*operand(Some(rule), row, COLUMNS).expect("a rule"), "{name}");
            }
        }
    }

    #[test]
    fn values_round_to_their_types() {
        let value = Value::floats([1, 3], vec![1.0 / 3.0, 1e6, -1e-9]).expect("a value");
        let as_type =
            |dtype| rounded(&value, dtype).expect("floats").as_floats().expect("floats").to_vec();
        assert_eq!(as_type(DType::F32), value.as_floats().expect("floats"));
        assert_eq!(as_type(DType::BF16), [0.333_984_38, 999_424.0, -9.968_062e-10]);
        assert_eq!(as_type(DType::F16), [0.333_251_95, f32::INFINITY, -0.0]);
        let mut kept = [0.3, 500.0];
        round(&mut kept, DType::F8E4M3);
        assert_eq!(kept, [0.3125, 448.0]);
    }
}
