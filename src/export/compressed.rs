//! Quantized weights in the layouts of compressed-tensors, versions 0.19 and 0.20.
//!
//! | encoding | format | tensors |
//! |---|---|---|
//! | int8, int4 by group or row | pack-quantized | `weight_packed` (offset binary in int32 words), `weight_scale`, `weight_shape` |
//! | fp8 by row or 128 × 128 block | float-quantized | `weight`, `weight_scale` |
//! | NVFP4 | nvfp4-pack-quantized | `weight_packed`, `weight_scale`, `weight_global_scale` = 1 / our second scale |
//! | MXFP4 | mxfp4-pack-quantized | `weight_packed`, `weight_scale` (exponent bytes) |
//!
//! The library divides rows into whole groups only. Integers whose last group is short are written with the largest group
//! that divides both the group and the row, each scale repeated: other groups, the same values.

use crate::recipe::Activations;
use crate::tensor::{DType, Encoding, PlaneLayout, role};

use super::config::{Kind, Scheme, Strategy};
use super::tensors::{Bytes, Content, PlaneRows, Tensor};

/// Columns of the smallest group that scales are repeated for: below it they take as much room as 8-bit codes.
const SMALLEST_GROUP: u64 = 16;

/// One quantized weight in the library's terms.
pub(super) struct Quantized<'a> {
    /// Its tensors.
    pub tensors: Vec<Tensor<'a>>,
    /// What describes them.
    pub scheme: Scheme,
    /// The recipe's activations are in groups that do not divide the row, so the scheme says none.
    pub unstated: bool,
}

/// The tensors of one quantized weight and the scheme that describes them.
///
/// # Errors
/// Why compressed-tensors has no layout for the encoding or the shape.
pub(super) fn weight<'a>(
    name: &str,
    shape: &[u64],
    content: Content<'a>,
    activations: Option<Activations>,
) -> Result<Quantized<'a>, String> {
    let encoding = content.weight.encoding();
    let refuse = |why: String| format!("{encoding}: {why}");
    let (&[rows, cols], Some(module)) = (shape, name.strip_suffix(".weight")) else {
        return Err(refuse(
            "compressed-tensors quantizes 2-D tensors called `….weight`".to_owned(),
        ));
    };
    let layout = Layout::of(encoding)
        .ok_or_else(|| refuse("compressed-tensors has no format for this encoding".to_owned()))?;
    let (layout, short) = layout.in_whole_groups(cols).map_err(refuse)?;
    let part = Part { content, cols, module };
    let mut tensors = part.codes(&layout, rows);
    let scale = encoding.plane(role::SCALE).map_or(1, |(k, _)| k);
    let (scale_bytes, mut scale_shape) = part.rows(scale, rows).ok_or_else(|| {
        refuse("its rows do not begin on a block of the weight they are stored in".to_owned())
    })?;
    let scale_dtype = match encoding.planes[scale].dtype {
        // The library keeps exponent bytes as plain bytes.
        DType::E8M0 => DType::U8,
        other => other,
    };
    let tensor = |suffix: &str, dtype, shape, bytes| {
        Tensor::of(format!("{module}.{suffix}"), dtype, shape, bytes)
    };
    let scales = match short {
        None => Bytes::Stored(scale_bytes),
        Some(Short { times, last }) => {
            let element = (scale_dtype.bits() / 8) as usize;
            let row = scale_shape[1] as usize * element;
            scale_shape[1] = (scale_shape[1] - 1) * times + last;
            Bytes::Repeated { bytes: scale_bytes, row, element, times, last }
        }
    };
    tensors.push(tensor("weight_scale", scale_dtype, scale_shape, scales));
    if let Some((k, _)) = encoding.plane(role::SCALE_1) {
        let one = |bytes: &[u8]| <[u8; 4]>::try_from(bytes).ok();
        let second = content.weight.rows(k, 0..1).ok().and_then(|bytes| one(&bytes));
        let second = second.ok_or_else(|| refuse("its second scale is not one f32".to_owned()))?;
        let second = f32::from_le_bytes(second);
        let divisor = divisor_of(second);
        if !(second.is_normal() && divisor.is_normal() && second > 0.0) {
            return Err(refuse(format!("its second scale, {second:e}, has no f32 reciprocal")));
        }
        let bytes = Bytes::Made(divisor.to_le_bytes().to_vec());
        let mut divides = tensor("weight_global_scale", DType::F32, vec![1], bytes);
        divides.factor = (1.0 / divisor != second).then_some(second);
        tensors.push(divides);
    }
    if layout.kind == Kind::PackQuantized {
        let bytes = [rows, cols].iter().flat_map(|n| n.to_le_bytes()).collect();
        tensors.push(tensor("weight_shape", DType::I64, vec![2], Bytes::Made(bytes)));
    }
    let stated = activations.filter(|a| {
        use Activations::{Fp8Group128, Fp8Token, Int8Group128, Int8Token};
        matches!(a, Int8Token | Int8Group128 | Fp8Token | Fp8Group128)
    });
    // The library cannot cut a row into groups that do not divide it: the model would fail in its first layer.
    let grouped = [Activations::Fp8Group128, Activations::Int8Group128];
    let unstated = stated.is_some_and(|a| grouped.contains(&a)) && !cols.is_multiple_of(128);
    let scheme = Scheme {
        kind: layout.kind,
        bits: encoding.codes().bits(),
        float: encoding.codes().is_float(),
        strategy: layout.strategy,
        activations: stated.filter(|_| !unstated),
    };
    Ok(Quantized { tensors, scheme, unstated })
}

/// The divisor whose reciprocal is this second scale: a divisor there, a multiplier here. The library rounds its
/// divisors to bf16, and one that was is found again exactly. Between 2^-0.5 and 1 (times any power of two) f32 lies
/// closer than the reciprocals of f32, so 17 % of all second scales are no reciprocal; the nearest divisor then goes with
/// a note of the scale.
fn divisor_of(second: f32) -> f32 {
    let divisor = 1.0 / second;
    let rounded = half::bf16::from_f32(divisor).to_f32();
    if 1.0 / rounded == second { rounded } else { divisor }
}

/// What an encoding is called there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    kind: Kind,
    strategy: Strategy,
}

/// How often a scale is written: `times`, but `last` for the one of the short group that ends a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Short {
    times: u64,
    last: u64,
}

impl Layout {
    fn of(encoding: &Encoding) -> Option<Layout> {
        if !encoding.transform.is_empty() || encoding.plane(role::ZERO).is_some() {
            return None;
        }
        let scale = encoding.plane(role::SCALE)?.1;
        let PlaneLayout::Tiled { block } = scale.layout else { return None };
        let second = encoding.plane(role::SCALE_1).map(|(_, p)| (p.dtype, p.layout));
        let whole = Some((DType::F32, PlaneLayout::Tiled { block: [0, 0] }));
        let planes = encoding.planes.len();
        let (kind, strategy) = match (encoding.codes(), scale.dtype, block, second) {
            (DType::I8 | DType::I4, DType::BF16 | DType::F32 | DType::F16, [1, 0], None) => {
                (Kind::PackQuantized, Strategy::Channel)
            }
            (DType::I8 | DType::I4, DType::BF16 | DType::F32 | DType::F16, [1, group], None) => {
                (Kind::PackQuantized, Strategy::Group(group))
            }
            (DType::F8E4M3, DType::BF16 | DType::F32, [1, 0], None) => {
                (Kind::FloatQuantized, Strategy::Channel)
            }
            (DType::F8E4M3, DType::BF16 | DType::F32, [rows, cols], None)
                if rows > 1 && cols > 1 =>
            {
                (Kind::FloatQuantized, Strategy::Block([rows, cols]))
            }
            (DType::F4E2M1, DType::F8E4M3, [1, 16], second) if second == whole => {
                (Kind::Nvfp4, Strategy::TensorGroup(16))
            }
            (DType::F4E2M1, DType::E8M0, [1, 32], None) => (Kind::Mxfp4, Strategy::Group(32)),
            _ => return None,
        };
        (planes == 2 + usize::from(second.is_some())).then_some(Layout { kind, strategy })
    }

    /// The layout for rows of `cols` elements, and how scales repeat when its groups are smaller than the stored ones.
    fn in_whole_groups(self, cols: u64) -> Result<(Layout, Option<Short>), String> {
        let Some(group) = self.strategy.group().filter(|g| !cols.is_multiple_of(*g)) else {
            return Ok((self, None));
        };
        let clash = format!("{cols} columns are no multiple of the group of {group}");
        if self.kind != Kind::PackQuantized {
            // The group belongs to the format.
            return Err(clash);
        }
        if cols < group {
            return Ok((Layout { strategy: Strategy::Channel, ..self }, None));
        }
        let common = common_divisor(group, cols);
        if common < SMALLEST_GROUP {
            return Err(format!(
                "{clash}, and the largest group that divides both, {common}, is below {SMALLEST_GROUP}"
            ));
        }
        let short = Short { times: group / common, last: cols % group / common };
        Ok((Layout { strategy: Strategy::Group(common), ..self }, Some(short)))
    }
}

fn common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// Rows of a stored weight that are one tensor.
struct Part<'a, 'n> {
    content: Content<'a>,
    cols: u64,
    module: &'n str,
}

impl<'a> Part<'a, '_> {
    /// The codes in the format's packing.
    fn codes(&self, layout: &Layout, rows: u64) -> Vec<Tensor<'a>> {
        let Some((bytes, _)) = self.rows(0, rows) else { return Vec::new() };
        let name = |suffix: &str| format!("{}.{suffix}", self.module);
        let tensor = match layout.kind {
            Kind::PackQuantized => {
                let bits = u64::from(self.content.weight.encoding().codes().bits());
                let words = (self.cols * bits).div_ceil(32);
                let flip = if bits == 8 { 0x80 } else { 0x88 };
                let offset = Bytes::Offset { bytes, padded: words as usize * 4, flip };
                Tensor::of(name("weight_packed"), DType::I32, vec![rows, words], offset)
            }
            Kind::FloatQuantized => {
                let shape = vec![rows, self.cols];
                Tensor::of(name("weight"), DType::F8E4M3, shape, Bytes::Stored(bytes))
            }
            // Two codes a byte, the even column in the low half: as stored.
            Kind::Nvfp4 | Kind::Mxfp4 => {
                let shape = vec![rows, self.cols.div_ceil(2)];
                Tensor::of(name("weight_packed"), DType::U8, shape, Bytes::Stored(bytes))
            }
        };
        vec![tensor]
    }

    /// The bytes of plane `k` for these rows, and their shape; `None` when the rows do not begin and end on blocks.
    fn rows(&self, k: usize, rows: u64) -> Option<(PlaneRows<'a>, Vec<u64>)> {
        let weight = self.content.weight;
        let plane = weight.encoding().planes.get(k)?;
        let PlaneLayout::Tiled { block: [block_rows, _] } = plane.layout else { return None };
        let (all, _) = weight.shape().matrix()?;
        let (first, last) = (self.content.first_row, self.content.first_row + rows);
        let block = block_rows.max(1);
        if !first.is_multiple_of(block) || !(last.is_multiple_of(block) || last == all) {
            return None;
        }
        let row = plane.row_bytes(self.cols)?;
        let rows_of =
            PlaneRows { weight, plane: k, rows: first / block..last.div_ceil(block), row };
        let (grid_rows, grid_cols) = plane.grid(rows, self.cols);
        Some((rows_of, vec![grid_rows, grid_cols]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn integers(group: u64) -> Layout {
        Layout { kind: Kind::PackQuantized, strategy: Strategy::Group(group) }
    }

    #[test]
    fn rows_that_end_in_a_short_group_get_the_largest_group_that_divides_both() {
        let split = |group, cols| {
            let (layout, short) = integers(group).in_whole_groups(cols)?;
            assert_eq!(layout.kind, Kind::PackQuantized);
            Ok::<_, String>((layout.strategy, short.map(|s| (s.times, s.last))))
        };
        assert_eq!(split(128, 256), Ok((Strategy::Group(128), None)));
        // A row shorter than the group has one scale.
        assert_eq!(split(128, 64), Ok((Strategy::Channel, None)));
        // 176 = 128 + 48, 2112 = 16 x 128 + 64: gemma-4-26B-A4B has rows of that length.
        assert_eq!(split(128, 176), Ok((Strategy::Group(16), Some((8, 3)))));
        assert_eq!(split(128, 2112), Ok((Strategy::Group(64), Some((2, 1)))));
        assert_eq!(split(32, 176), Ok((Strategy::Group(16), Some((2, 1)))));
        let why = "200 columns are no multiple of the group of 128, and the largest group that divides both, 8, \
                   is below 16";
        assert_eq!(split(128, 200), Err(why.to_owned()));
    }

    #[test]
    fn groups_that_belong_to_a_format_are_not_split() {
        let mxfp4 = Layout { kind: Kind::Mxfp4, strategy: Strategy::Group(32) };
        let why = "176 columns are no multiple of the group of 32";
        assert_eq!(mxfp4.in_whole_groups(176), Err(why.to_owned()));
        assert_eq!(mxfp4.in_whole_groups(192), Ok((mxfp4, None)));
    }

    #[test]
    fn a_divisor_that_reads_back_is_found_wherever_there_is_one() {
        let mut none = 0u32;
        for mantissa in 0..1u32 << 23 {
            let second = f32::from_bits(0x3a80_0000 | mantissa);
            let divisor = divisor_of(second);
            if 1.0 / divisor == second {
                continue;
            }
            none += 1;
            // Reciprocals only fall, and these on either side pass the scale by.
            let (below, above) = (divisor.next_down(), divisor.next_up());
            assert!(1.0 / below != second && 1.0 / above != second, "{second:e}");
            // What a reader checks the note against.
            assert_eq!(1.0 / second, divisor, "{second:e}");
        }
        let share = f64::from(none) / f64::from(1u32 << 23);
        assert!((0.171..0.172).contains(&share), "{share}");
    }
}
