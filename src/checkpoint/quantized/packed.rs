//! A quantized weight: its matrices, the arithmetic that gives its values, and the planes it can be kept in.
//!
//! # Values
//! In f32, in this order: code, minus zero point, times scale, times the second scale (`NVFP4` of compressed-tensors:
//! times the quotient scale / divisor), minus the product of minimum and its scale (GGUF), times the input factor of
//! its column. Weights whose first-level scales are
//! bf16 have bf16 values, rounded once at the end (compressed-tensors computes in the type of the scales); all others
//! have f32 values without a further rounding, so that rounding them to bf16 gives what their own tools load.

use std::borrow::Cow;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::ggml::{BlockPart, BlockPlane, BlockType};
use super::matrix::{Layout, Matrix, Values};
use crate::checkpoint::parts::Place;
use crate::checkpoint::shard::Shard;
use crate::num::{self, mini};
use crate::tensor::{
    DType, Encoding, PlaneSource, PlaneSpec, Shape, TensorInfo, TensorSource, role,
};

/// A scale of scales.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::checkpoint) enum Second {
    /// There is none.
    None,
    /// A factor.
    Times(f32),
    /// A divisor of the first-level scale, and the factor that a container stores for it.
    Over {
        /// The divisor.
        divisor: f32,
        /// Its reciprocal, or what the file's writer had the divisor from.
        factor: f32,
    },
}

/// Numbers that each cover one row and a run of columns, several first-level blocks wide.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::checkpoint) struct Grid {
    /// The numbers.
    pub matrix: Matrix,
    /// Columns that one covers.
    pub cols: u64,
}

/// A quantized weight of a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::checkpoint) struct Packed {
    /// Logical type and shape.
    pub info: TensorInfo,
    /// Codes, one for every element of the logical matrix.
    pub codes: Matrix,
    /// First-level scales.
    pub scale: Matrix,
    /// Rows and columns that share one; 0 spans the extent.
    pub block: [u64; 2],
    /// Zero points, over the same blocks.
    pub zero: Option<Matrix>,
    /// Second-level scale of the whole weight.
    pub second: Second,
    /// Second-level scales of blocks.
    pub coarse: Option<Grid>,
    /// Subtrahends, over the blocks of the first-level scales.
    pub min: Option<Matrix>,
    /// Scales of the subtrahends.
    pub coarse_min: Option<Grid>,
    /// Group of every column, where groups are not runs of neighbours.
    pub groups: Option<Arc<[u32]>>,
    /// Factor of every column (AWQ's smoothing of inputs), one row.
    pub input: Option<Matrix>,
    /// Bytes of all its tensors.
    pub bytes: u64,
}

fn invalid(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

fn bytes_of<'a>(shards: &'a [Shard], matrix: &Matrix) -> io::Result<&'a [u8]> {
    let place = matrix.place;
    let bytes = shards.get(place.shard).and_then(|s| s.bytes(place.begin..place.end));
    bytes.ok_or_else(|| invalid("a tensor lies outside its file"))
}

/// Rows of one matrix as numbers; the row last read is kept.
struct Reader<'a> {
    matrix: &'a Matrix,
    bytes: &'a [u8],
    values: Values,
    codes: Vec<u32>,
    row: Vec<f32>,
    at: Option<u64>,
}

impl<'a> Reader<'a> {
    fn new(shards: &'a [Shard], matrix: &'a Matrix) -> io::Result<Reader<'a>> {
        let cols = usize::try_from(matrix.cols).map_err(io::Error::other)?;
        Ok(Reader {
            matrix,
            bytes: bytes_of(shards, matrix)?,
            values: Values::of(matrix.dtype)?,
            codes: vec![0; cols],
            row: Vec::with_capacity(cols),
            at: None,
        })
    }

    fn row(&mut self, r: u64) -> io::Result<&[f32]> {
        if self.at != Some(r) {
            self.matrix.row(self.bytes, r, &mut self.codes)?;
            self.values.read(&self.codes, &mut self.row);
            self.at = Some(r);
        }
        Ok(&self.row)
    }
}

impl Packed {
    /// A tensor of ggml's blocks; `None` where its shape is no matrix of whole blocks.
    pub fn ggml(blocks: BlockType, place: Place, shape: Shape) -> Option<Packed> {
        let (rows, cols) = shape.matrix()?;
        let (width, _) = blocks.extent();
        let count = cols.is_multiple_of(width).then(|| cols / width)?;
        let matrix = |plane: &BlockPlane| {
            let each = width / plane.width;
            Matrix {
                place,
                layout: Layout::Blocks { blocks, part: plane.part, each, count },
                dtype: plane.dtype,
                flip: plane.flip,
                add: 0,
                rows,
                cols: each * count,
            }
        };
        let planes = blocks.planes();
        let find = |part| planes.iter().find(|p| p.part == part);
        let grid = |part| find(part).map(|p| Grid { matrix: matrix(p), cols: p.width });
        let scale = find(BlockPart::Scale)?;
        Some(Packed {
            info: TensorInfo { dtype: DType::F32, shape },
            codes: matrix(find(BlockPart::Codes)?),
            scale: matrix(scale),
            block: [1, scale.width],
            zero: None,
            second: Second::None,
            coarse: grid(BlockPart::Scale1),
            min: find(BlockPart::Min).map(matrix),
            coarse_min: grid(BlockPart::Min1),
            groups: None,
            input: None,
            bytes: place.end - place.begin,
        })
    }

    /// The file and the bytes that hold some rows of a tensor of ggml's blocks, or a few more; `None` for another.
    pub fn bytes_of_rows(&self, rows: Range<u64>) -> Option<(usize, Range<u64>)> {
        let Layout::Blocks { blocks, count, .. } = self.codes.layout else { return None };
        let place = self.codes.place;
        let stride = count.checked_mul(blocks.extent().1)?;
        let rows = place.stored_range(rows, self.codes.rows);
        let at = |row: u64| place.begin.checked_add(row.checked_mul(stride)?);
        Some((place.shard, at(rows.start)?..at(rows.end)?.min(place.end)))
    }

    /// Rows and columns of the logical matrix.
    pub fn extent(&self) -> (u64, u64) {
        (self.codes.rows, self.codes.cols)
    }

    /// Row of the scale grid that covers row `r`.
    fn grid_row(&self, r: u64) -> u64 {
        r.checked_div(self.block[0]).unwrap_or(0)
    }

    /// Decodes rows to little-endian bytes of the logical type.
    fn decode<'s>(&'s self, shards: &'s [Shard], rows: Range<u64>) -> io::Result<Vec<u8>> {
        let cols = usize::try_from(self.codes.cols).map_err(io::Error::other)?;
        let width = self.info.dtype.bytes().unwrap_or(4) as usize;
        let count =
            usize::try_from(rows.end.saturating_sub(rows.start)).map_err(io::Error::other)?;
        let total = count.checked_mul(cols).and_then(|n| n.checked_mul(width));
        let mut out = Vec::with_capacity(total.ok_or_else(|| invalid("rows are too long"))?);
        let mut codes = Reader::new(shards, &self.codes)?;
        let mut scales = Reader::new(shards, &self.scale)?;
        let mut zeros = self.zero.as_ref().map(|z| Reader::new(shards, z)).transpose()?;
        let reader = |m: &'s Matrix| Reader::new(shards, m);
        let mut coarse = self.coarse.as_ref().map(|g| reader(&g.matrix)).transpose()?;
        let mut min = self.min.as_ref().map(reader).transpose()?;
        let mut coarse_min = self.coarse_min.as_ref().map(|g| reader(&g.matrix)).transpose()?;
        let mut input = self.input.as_ref().map(|i| Reader::new(shards, i)).transpose()?;
        let input = input.as_mut().map(|i| i.row(0).map(<[f32]>::to_vec)).transpose()?;
        let run = match usize::try_from(self.block[1]) {
            Ok(n) if n > 0 => n,
            _ => cols.max(1),
        };
        let mut values = vec![0f32; cols];
        let mut product = Vec::new();
        for r in rows {
            let at = self.grid_row(r);
            let scale = scales.row(at)?;
            let zero = zeros.as_mut().map(|z| z.row(at)).transpose()?;
            values.copy_from_slice(codes.row(r)?);
            let apply = |v: &mut f32, group: usize| {
                let (Some(&s), z) = (scale.get(group), zero.and_then(|z| z.get(group))) else {
                    *v = f32::NAN;
                    return;
                };
                let code = *v - z.copied().unwrap_or(0.0);
                *v = match self.second {
                    Second::None => code * s,
                    Second::Times(t) => code * s * t,
                    Second::Over { divisor, .. } => code * (s / divisor),
                };
            };
            match &self.groups {
                Some(groups) => {
                    values.iter_mut().zip(&**groups).for_each(|(v, &g)| apply(v, g as usize));
                }
                None => {
                    for (group, columns) in values.chunks_mut(run).enumerate() {
                        columns.iter_mut().for_each(|v| apply(v, group));
                    }
                }
            }
            if let Some(coarse) = &mut coarse {
                self.spread(&mut values, coarse.row(at)?, &self.coarse, |v, s| v * s);
            }
            if let Some(min) = &mut min {
                product.clear();
                product.resize(cols, 0.0);
                for (columns, &m) in product.chunks_mut(run).zip(min.row(at)?) {
                    columns.fill(m);
                }
                if let Some(coarse_min) = &mut coarse_min {
                    self.spread(&mut product, coarse_min.row(at)?, &self.coarse_min, |m, s| m * s);
                }
                values.iter_mut().zip(&product).for_each(|(v, m)| *v -= m);
            }
            if let Some(input) = &input {
                values.iter_mut().zip(input).for_each(|(v, &f)| *v *= f);
            }
            match self.info.dtype {
                DType::BF16 => {
                    out.extend(values.iter().flat_map(|&v| mini::bf16_bits(v).to_le_bytes()));
                }
                _ => out.extend(values.iter().flat_map(|v| v.to_le_bytes())),
            }
        }
        Ok(out)
    }

    /// Applies one number of a grid to the columns that it covers.
    fn spread(
        &self,
        values: &mut [f32],
        numbers: &[f32],
        grid: &Option<Grid>,
        apply: impl Fn(f32, f32) -> f32,
    ) {
        let cols = grid.as_ref().and_then(|g| usize::try_from(g.cols).ok()).unwrap_or(1).max(1);
        for (columns, &n) in values.chunks_mut(cols).zip(numbers) {
            columns.iter_mut().for_each(|v| *v = apply(*v, n));
        }
    }

    /// The planes that hold its codes and scales unchanged.
    ///
    /// # Errors
    /// Why no planes do.
    pub fn encoding(&self) -> Result<Encoding, String> {
        if self.input.is_some() {
            return Err("its inputs are scaled column by column (pre_quant_scale)".to_owned());
        }
        let mut rest = vec![PlaneSpec::tiled(role::SCALE, self.scale.dtype, self.block)];
        if let Some(zero) = &self.zero {
            rest.push(PlaneSpec::tiled(role::ZERO, zero.dtype, self.block));
        }
        if self.second != Second::None {
            rest.push(PlaneSpec::tiled(role::SCALE_1, DType::F32, [0, 0]));
        }
        let grids = [(role::SCALE_1, &self.coarse), (role::MIN_1, &self.coarse_min)];
        if let Some(min) = &self.min {
            rest.push(PlaneSpec::tiled(role::MIN, min.dtype, self.block));
        }
        for (role, grid) in grids.iter().filter_map(|(role, g)| Some((role, g.as_ref()?))) {
            rest.push(PlaneSpec::tiled(role, grid.matrix.dtype, [1, grid.cols]));
        }
        if !self.second().is_normal() {
            return Err("its global scale has no f32 reciprocal".to_owned());
        }
        let permuted = self.groups.is_some();
        if permuted {
            self.order()?;
            rest.push(PlaneSpec::table("t.perm", DType::I32, [1, self.codes.cols]));
        }
        let mut encoding = Encoding::affine(self.codes.dtype, rest);
        if permuted {
            encoding.transform = "perm".to_owned();
        }
        encoding.check().map_err(|e| e.to_string())?;
        Ok(encoding)
    }

    /// The second level as the factor that a container stores.
    fn second(&self) -> f32 {
        match self.second {
            Second::None => 1.0,
            Second::Times(t) => t,
            // The factor that ModelOpt stores where compressed-tensors stores its reciprocal.
            Second::Over { factor, .. } => factor,
        }
    }

    /// Columns in the order of their groups, for groups of one size each.
    fn order(&self) -> Result<Vec<u32>, String> {
        let Some(groups) = &self.groups else { return Ok(Vec::new()) };
        let mut order: Vec<u32> = (0..groups.len() as u32).collect();
        order.sort_by_key(|&c| groups.get(c as usize));
        let regular = order.iter().enumerate().all(|(at, &c)| {
            let group = groups.get(c as usize).copied().map(u64::from);
            group == Some((at as u64).checked_div(self.block[1]).unwrap_or(0))
        });
        if regular {
            Ok(order)
        } else {
            Err(format!("g_idx gives its groups other sizes than {} columns", self.block[1]))
        }
    }

    /// Bytes of the plane's rows, in the order of [`Packed::encoding`].
    fn plane<'a>(
        &'a self,
        shards: &'a [Shard],
        plane: &PlaneSpec,
        rows: Range<u64>,
    ) -> io::Result<Cow<'a, [u8]>> {
        let matrix = match plane.role.as_str() {
            role::CODES => &self.codes,
            role::SCALE => &self.scale,
            role::ZERO => self.zero.as_ref().ok_or_else(|| invalid("no zero points"))?,
            role::MIN => self.min.as_ref().ok_or_else(|| invalid("no minima"))?,
            role::MIN_1 => {
                &self.coarse_min.as_ref().ok_or_else(|| invalid("no scales of minima"))?.matrix
            }
            role::SCALE_1 if self.coarse.is_some() => {
                &self.coarse.as_ref().ok_or_else(|| invalid("no scales of scales"))?.matrix
            }
            role::SCALE_1 => {
                return Ok(Cow::Owned(self.second().to_le_bytes().to_vec()));
            }
            _ => {
                let order = self.order().map_err(invalid)?;
                return Ok(Cow::Owned(order.iter().flat_map(|c| c.to_le_bytes()).collect()));
            }
        };
        if rows.start > rows.end || rows.end > matrix.rows {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "rows outside the plane"));
        }
        let bytes = bytes_of(shards, matrix)?;
        let order = match (&self.groups, plane.role.as_str()) {
            (Some(_), role::CODES) => Some(self.order().map_err(invalid)?),
            _ => None,
        };
        if let (None, Some(found)) = (&order, matrix.borrowed(bytes, &rows)) {
            return Ok(Cow::Borrowed(found));
        }
        let cols = usize::try_from(matrix.cols).map_err(io::Error::other)?;
        let (row_bytes, mut codes) = (matrix.packed_row_bytes()?, vec![0u32; cols]);
        let count = usize::try_from(rows.end - rows.start).map_err(io::Error::other)?;
        let total = count.checked_mul(row_bytes).ok_or_else(|| invalid("rows are too long"))?;
        let mut out = vec![0u8; total];
        let mut sorted = Vec::new();
        for (r, out) in rows.zip(out.chunks_exact_mut(row_bytes.max(1))) {
            matrix.row(bytes, r, &mut codes)?;
            match &order {
                Some(order) => {
                    sorted.clear();
                    sorted.extend(order.iter().filter_map(|&c| codes.get(c as usize)));
                    num::pack(&sorted, matrix.dtype.bits(), out);
                }
                None => num::pack(&codes, matrix.dtype.bits(), out),
            }
        }
        Ok(Cow::Owned(out))
    }
}

/// Rows of a quantized weight, decoded as they are read.
#[derive(Debug)]
pub(in crate::checkpoint) struct Decoded<'a> {
    shards: &'a [Shard],
    packed: &'a Packed,
    /// Rows of the weight within the tensor.
    rows: Range<u64>,
    shape: Shape,
}

impl<'a> Decoded<'a> {
    /// Some rows of a weight.
    pub fn new(shards: &'a [Shard], packed: &'a Packed, rows: Range<u64>) -> Decoded<'a> {
        let shape = Shape::from([rows.end - rows.start, packed.codes.cols]);
        Decoded { shards, packed, rows, shape }
    }
}

/// `range` of a part that begins at `rows.start`; `None` past its end.
fn shifted(rows: &Range<u64>, range: &Range<u64>) -> Option<Range<u64>> {
    let (start, end) = (rows.start.checked_add(range.start)?, rows.start.checked_add(range.end)?);
    (start <= end && end <= rows.end).then_some(start..end)
}

impl TensorSource for Decoded<'_> {
    fn dtype(&self) -> DType {
        self.packed.info.dtype
    }

    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn rows(&self, range: Range<u64>) -> io::Result<Cow<'_, [u8]>> {
        let range = shifted(&self.rows, &range).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, "rows outside the weight")
        })?;
        Ok(Cow::Owned(self.packed.decode(self.shards, range)?))
    }
}

/// Planes of a weight that is kept: those of its parts, one below the other.
#[derive(Debug)]
pub(in crate::checkpoint) struct Kept<'a> {
    shards: &'a [Shard],
    encoding: Encoding,
    shape: Shape,
    parts: Vec<(&'a Packed, Range<u64>)>,
}

impl<'a> Kept<'a> {
    /// The planes of parts, each some rows of a quantized tensor.
    ///
    /// # Errors
    /// Why the codes and scales cannot be stored as they are.
    pub fn new(
        shards: &'a [Shard],
        shape: &Shape,
        parts: Vec<(&'a Packed, Range<u64>)>,
    ) -> Result<Kept<'a>, String> {
        let Some(((first, _), rest)) = parts.split_first() else {
            return Err("it is made of no tensor".to_owned());
        };
        let encoding = first.encoding()?;
        for (other, _) in rest {
            let found = other.encoding()?;
            if found != encoding {
                return Err(format!("its parts are quantized apart: {encoding} and {found}"));
            }
            if other.second() != first.second() {
                return Err("its parts have different global scales".to_owned());
            }
            if other.groups != first.groups {
                return Err("its parts have different g_idx".to_owned());
            }
        }
        let block = first.block[0];
        let joined = parts.len() > 1 || parts.iter().any(|(p, rows)| *rows != (0..p.codes.rows));
        if joined && block == 0 {
            return Err("its parts have a scale each".to_owned());
        }
        // A block that began in one part would end in the next.
        let last = parts.len() - 1;
        let cut = |(n, (_, rows)): (usize, &(&Packed, Range<u64>))| {
            !rows.start.is_multiple_of(block)
                || (n != last && !(rows.end - rows.start).is_multiple_of(block))
        };
        if block > 1 && parts.iter().enumerate().any(cut) {
            return Err(format!("its parts are no whole number of blocks of {block} rows"));
        }
        Ok(Kept { shards, encoding, shape: shape.clone(), parts })
    }
}

impl PlaneSource for Kept<'_> {
    fn encoding(&self) -> &Encoding {
        &self.encoding
    }

    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn plane_rows(&self, plane: usize, range: Range<u64>) -> io::Result<Cow<'_, [u8]>> {
        let outside = || io::Error::new(io::ErrorKind::InvalidInput, "rows outside the plane");
        let spec = self.encoding.planes.get(plane).ok_or_else(outside)?;
        let block = match spec.layout {
            crate::tensor::PlaneLayout::Tiled { block: [rows, _] } if rows > 0 => rows,
            // One row for the whole weight, the same in every part.
            _ => {
                let (packed, _) = self.parts.first().ok_or_else(outside)?;
                return packed.plane(self.shards, spec, range);
            }
        };
        let mut out: Cow<'_, [u8]> = Cow::Borrowed(&[]);
        let mut begin = 0u64;
        for (packed, rows) in &self.parts {
            let own = rows.start / block..rows.end.div_ceil(block);
            let count = own.end - own.start;
            let start = range.start.max(begin);
            let end = range.end.min(begin + count);
            if start < end {
                let wanted = own.start + (start - begin)..own.start + (end - begin);
                let found = packed.plane(self.shards, spec, wanted)?;
                if out.is_empty() {
                    out = found;
                } else {
                    out.to_mut().extend_from_slice(&found);
                }
            }
            begin += count;
        }
        if range.start > range.end || range.end > begin {
            return Err(outside());
        }
        Ok(out)
    }
}
