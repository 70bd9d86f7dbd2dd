//! Quantized weights in the layouts of compressed-tensors 0.19.
//!
//! | encoding | format | tensors |
//! |---|---|---|
//! | int8, int4 by group or row | pack-quantized | `weight_packed` (offset binary in int32 words), `weight_scale`, `weight_shape` |
//! | fp8 by row or 128 × 128 block | float-quantized | `weight`, `weight_scale` |
//! | NVFP4 | nvfp4-pack-quantized | `weight_packed`, `weight_scale`, `weight_global_scale` = 1 / our second scale |
//! | MXFP4 | mxfp4-pack-quantized | `weight_packed`, `weight_scale` (exponent bytes) |

use crate::recipe::Activations;
use crate::tensor::{DType, Encoding, PlaneLayout, role};

use super::config::{Kind, Scheme, Strategy};
use super::tensors::{Bytes, Content, Tensor};

/// The tensors of one quantized weight and the scheme that describes them.
///
/// # Errors
/// Why compressed-tensors has no layout for the encoding or the shape.
pub(super) fn weight<'a>(
    name: &str,
    shape: &[u64],
    content: Content<'a>,
    activations: Option<Activations>,
) -> Result<(Vec<Tensor<'a>>, Scheme), String> {
    let encoding = content.entry.encoding();
    let refuse = |why: String| format!("{encoding}: {why}");
    let (&[rows, cols], Some(module)) = (shape, name.strip_suffix(".weight")) else {
        return Err(refuse(
            "compressed-tensors quantizes 2-D tensors called `….weight`".to_owned(),
        ));
    };
    let layout = Layout::of(encoding)
        .ok_or_else(|| refuse("compressed-tensors has no format for this encoding".to_owned()))?;
    if let Some(group) = layout.strategy.group()
        && !cols.is_multiple_of(group)
    {
        return Err(refuse(format!("{cols} columns are no multiple of the group of {group}")));
    }
    let part = Part { content, cols, module };
    let mut tensors = part.codes(&layout, rows);
    let scale = encoding.plane(role::SCALE).map_or(1, |(k, _)| k);
    let (scale_bytes, scale_shape) = part.rows(scale, rows).ok_or_else(|| {
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
    tensors.push(tensor("weight_scale", scale_dtype, scale_shape, Bytes::Stored(scale_bytes)));
    if let Some((k, _)) = encoding.plane(role::SCALE_1) {
        let second: [u8; 4] = content
            .entry
            .plane(k)
            .try_into()
            .map_err(|_| refuse("its second scale is not one f32".to_owned()))?;
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
    let scheme = Scheme {
        kind: layout.kind,
        bits: encoding.codes().bits(),
        float: encoding.codes().is_float(),
        strategy: layout.strategy,
        activations: activations.filter(|a| {
            matches!(a, Activations::Int8Token | Activations::Fp8Token | Activations::Fp8Group128)
        }),
    };
    Ok((tensors, scheme))
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
struct Layout {
    kind: Kind,
    strategy: Strategy,
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
        let (bytes, _) = self.rows(0, rows).unwrap_or_default();
        let name = |suffix: &str| format!("{}.{suffix}", self.module);
        let tensor = match layout.kind {
            Kind::PackQuantized => {
                let bits = u64::from(self.content.entry.encoding().codes().bits());
                let (row, words) =
                    ((self.cols * bits).div_ceil(8), (self.cols * bits).div_ceil(32));
                let flip = if bits == 8 { 0x80 } else { 0x88 };
                let offset =
                    Bytes::Offset { bytes, row: row as usize, padded: words as usize * 4, flip };
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
    fn rows(&self, k: usize, rows: u64) -> Option<(&'a [u8], Vec<u64>)> {
        let entry = &self.content.entry;
        let plane = entry.encoding().planes.get(k)?;
        let PlaneLayout::Tiled { block: [block_rows, _] } = plane.layout else { return None };
        let (all, _) = entry.shape().matrix()?;
        let (first, last) = (self.content.first_row, self.content.first_row + rows);
        let block = block_rows.max(1);
        if !first.is_multiple_of(block) || !(last.is_multiple_of(block) || last == all) {
            return None;
        }
        let row_bytes = plane.row_bytes(self.cols)?;
        let (from, to) = (first / block * row_bytes, last.div_ceil(block) * row_bytes);
        let bytes = entry.plane(k).get(usize::try_from(from).ok()?..usize::try_from(to).ok()?)?;
        let (grid_rows, grid_cols) = plane.grid(rows, self.cols);
        Some((bytes, vec![grid_rows, grid_cols]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
