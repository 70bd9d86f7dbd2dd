//! Source rows → plane bytes.

use crate::num::{Element, NonFinite, find_non_finite, mini, pack, row_bytes, widen, widens};
use crate::recipe::{Method, Rounding, ScaleRule};
use crate::tensor::{DType, Encoding, PlaneLayout};

use super::decoder::{Decoder, PlaneSlice};
use super::error::{EncodeError, ErrorSum, MethodError};
use super::fast::{Fast, target_of};
use super::grid::{self, Fault, GridPlan};
use super::kernel::{self, Kernel};
use super::lanes::Scales;

/// Facts about a whole tensor that its rows cannot be encoded without.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Whole {
    /// Largest magnitude ([`peak`]); of all members, where a fused set shares its tensor scale.
    pub peak: f32,
}

/// Encodes the rows of one weight, block by block, in any order and from any thread.
///
/// The bytes and the error sums depend on the method and the source values alone.
pub struct Encoder {
    source: DType,
    cols: usize,
    row_block: u64,
    plan: Plan,
    rounding: Rounding,
    encoding: Encoding,
    /// Bytes of the planes that no row changes.
    whole: Vec<Option<Vec<u8>>>,
    decoder: Option<Decoder>,
    /// Weight of each column's squared error in a search.
    importance: Option<Vec<f32>>,
    kernel: Kernel,
}

enum Plan {
    Keep,
    Cast(Element),
    Grid(Box<GridPlan>),
}

/// Plane bytes of the rows last encoded, and working memory; made once, used for many calls.
#[derive(Default)]
pub struct PlaneBuffers {
    planes: Vec<Vec<u8>>,
    work: Work,
}

#[derive(Default)]
pub(super) struct Work {
    pub peaks: Vec<u32>,
    pub scales: Scales,
    pub scale_of: Vec<f32>,
    pub inverse_of: Vec<f32>,
}

impl PlaneBuffers {
    /// Empty buffers; they grow as needed.
    pub fn new() -> PlaneBuffers {
        PlaneBuffers::default()
    }

    /// Bytes of plane `index` for the rows last encoded; empty for a plane of [`Encoder::whole_planes`].
    pub fn plane(&self, index: usize) -> &[u8] {
        self.planes.get(index).map_or(&[], Vec::as_slice)
    }
}

/// Largest magnitude among the elements of `bytes`; 0 for none, and for types that are no numbers.
///
/// # Errors
/// NaN or infinity among them; indices count from the first element of `bytes`.
pub fn peak(dtype: DType, bytes: &[u8]) -> Result<f32, NonFinite> {
    if let Some(fast) = Fast::new(kernel::selected(), dtype) {
        let peak = f32::from_bits(fast.peak(bytes));
        if peak.is_finite() {
            return Ok(peak);
        }
    }
    if let Some(found) = find_non_finite(dtype, bytes) {
        return Err(found);
    }
    let width = dtype.bytes().map_or(1, |w| w as usize);
    let mut values = [0f32; 1024];
    let mut peak = 0f32;
    for bytes in bytes.chunks(values.len() * width) {
        let n = bytes.len() / width;
        if widen(dtype, &bytes[..n * width], &mut values[..n]).is_ok() {
            peak = values[..n].iter().fold(peak, |m, v| m.max(v.abs()));
        }
    }
    Ok(peak)
}

impl Encoder {
    /// Whether `method` needs [`Whole::peak`]: one scale, or one second-level scale, for the whole tensor.
    pub fn needs_peak(method: &Method) -> bool {
        match method {
            Method::Grid(grid) => grid::needs_peak(grid),
            Method::Keep | Method::Cast(_) => false,
        }
    }

    /// An encoder for a matrix of `rows` × `cols` elements of type `source`.
    ///
    /// # Errors
    /// Options that do not fit together or the matrix, an empty or huge matrix, a source type that is no number,
    /// a missing peak.
    pub fn new(
        method: &Method,
        source: DType,
        rows: u64,
        cols: u64,
        whole: Option<Whole>,
    ) -> Result<Encoder, MethodError> {
        let extent = MethodError::Extent { rows, cols };
        let (Ok(n_rows), Ok(n_cols)) = (usize::try_from(rows), usize::try_from(cols)) else {
            return Err(extent);
        };
        // The widest element that anything here holds is 8 bytes.
        if rows == 0
            || cols == 0
            || n_rows.checked_mul(n_cols).and_then(|n| n.checked_mul(8)).is_none()
        {
            return Err(extent);
        }
        if source.bytes().is_none() || !widens(source) && *method != Method::Keep {
            return Err(MethodError::Source(source));
        }
        let encoding = method.encoding(source);
        encoding.check()?;
        let mut planes: Vec<Option<Vec<u8>>> = vec![None; encoding.planes.len()];
        let mut rounding = Rounding::Rad;
        let (plan, row_block) = match method {
            Method::Keep => (Plan::Keep, 1),
            Method::Cast(dtype) => {
                let plain = dtype.is_float() && dtype.bits() >= 4;
                let Some(element) = Element::new(*dtype).filter(|_| plain) else {
                    let why =
                        format!("a cast gives f32, f16, bf16 or a smaller float, not {dtype}");
                    return Err(MethodError::Unsupported(why));
                };
                (Plan::Cast(element), 1)
            }
            Method::Grid(grid) => {
                let plan = GridPlan::new(
                    grid,
                    &encoding,
                    source,
                    [n_rows, n_cols],
                    whole.map(|w| w.peak),
                )?;
                for (i, bytes) in plan.whole_planes() {
                    planes[i] = Some(bytes);
                }
                let row_block = plan.row_block().clamp(1, n_rows) as u64;
                rounding = grid.rounding;
                (Plan::Grid(Box::new(plan)), row_block)
            }
        };
        let decoder = match plan {
            Plan::Keep => None,
            _ => Some(Decoder::new(&encoding, rows, cols).map_err(|e| {
                MethodError::Unsupported(format!("what it writes cannot be read: {e}"))
            })?),
        };
        Ok(Encoder {
            source,
            cols: n_cols,
            row_block,
            plan,
            rounding,
            encoding,
            whole: planes,
            decoder,
            importance: None,
            kernel: kernel::selected(),
        })
    }

    /// The same encoder with a search that weighs the squared error of each column by `importance`: what the column
    /// is multiplied by, squared, on average ([`Importance`](super::Importance)).
    ///
    /// # Errors
    /// A method that searches for nothing or rotates the columns, another number of columns, weights that are
    /// negative, NaN, infinite, or all 0.
    pub fn with_importance(mut self, importance: &[f32]) -> Result<Encoder, MethodError> {
        let refuse = |why: &str| Err(MethodError::Unsupported(why.to_owned()));
        match &self.plan {
            Plan::Grid(plan) if plan.rule == ScaleRule::Search && plan.fwht.is_none() => {}
            Plan::Grid(plan) if plan.rule == ScaleRule::Search => {
                return refuse("a rotation mixes the columns that importances would weigh");
            }
            _ => {
                return refuse(
                    "importances weigh the errors of a search, and this method has none",
                );
            }
        }
        if importance.len() != self.cols {
            return Err(MethodError::Unsupported(format!(
                "{} importances for {} columns",
                importance.len(),
                self.cols
            )));
        }
        if importance.iter().any(|w| !w.is_finite() || *w < 0.0)
            || importance.iter().all(|w| *w == 0.0)
        {
            return refuse("importances are numbers of at least 0, not all of them 0");
        }
        self.importance = Some(importance.to_vec());
        Ok(self)
    }

    /// The same encoder on another kernel.
    pub fn with_kernel(mut self, kernel: Kernel) -> Encoder {
        self.kernel = kernel.resolve();
        self
    }

    /// The encoding of the planes.
    pub fn encoding(&self) -> &Encoding {
        &self.encoding
    }

    /// Rows that must be encoded together: every call starts at a multiple of it and covers a multiple of it, or
    /// runs to the last row. The whole matrix where one scale depends on all rows and not only on their peak.
    pub fn row_block(&self) -> u64 {
        self.row_block
    }

    /// Bytes of one source row.
    pub fn source_row_bytes(&self) -> usize {
        self.cols * self.source.bytes().map_or(1, |w| w as usize)
    }

    /// Planes that no row changes (a tensor's one scale, a codebook), by index: whole, once per weight.
    pub fn whole_planes(&self) -> impl Iterator<Item = (usize, &[u8])> {
        self.whole.iter().enumerate().filter_map(|(i, p)| Some((i, p.as_deref()?)))
    }

    /// Bytes of plane `index` that the rows before `row` take: where the bytes of a call that starts at `row` go.
    /// `row` is a multiple of [`Encoder::row_block`] or the number of rows.
    pub fn plane_offset(&self, index: usize, row: u64) -> u64 {
        let Some(plane) = self.encoding.planes.get(index) else { return 0 };
        let at = match plane.layout {
            PlaneLayout::Tiled { block: [rows, _] } if rows > 0 => row.div_ceil(rows),
            _ => 0,
        };
        // Products of a matrix that `new` accepted.
        at.saturating_mul(plane.row_bytes(self.cols as u64).unwrap_or(0))
    }

    /// Encodes the rows in `source` (little-endian, row-major, from row `first_row` on) into `out`, replacing what
    /// was there, and returns the error against what the decoder reads back. [`Method::Keep`] has no error to
    /// report and returns zero sums.
    ///
    /// # Errors
    /// NaN or infinity in the source, whatever the method; in a cast, values beyond the target; a rotation that
    /// overflows; another package's rounding that gives no finite values. Counts are those of
    /// this call; `out` is then unspecified.
    ///
    /// # Panics
    /// When `source` is not whole rows.
    pub fn encode(
        &self,
        first_row: u64,
        source: &[u8],
        out: &mut PlaneBuffers,
    ) -> Result<ErrorSum, EncodeError> {
        let row_bytes = self.source_row_bytes();
        assert!(
            source.len().is_multiple_of(row_bytes),
            "{} bytes are not whole rows",
            source.len()
        );
        let first = first_row.saturating_mul(self.cols as u64);
        out.planes.resize(self.encoding.planes.len(), Vec::new());
        let fast = Fast::new(self.kernel, self.source);
        let done = match (&self.plan, fast) {
            (Plan::Keep, _) => {
                self.check_finite(first, source)?;
                out.planes[0].clear();
                out.planes[0].extend_from_slice(source);
                return Ok(ErrorSum::default());
            }
            (Plan::Cast(element), Some(fast)) => target_of(element.dtype()).map(|target| {
                fast.cast(target, limit(*element), self.cols, source, &mut out.planes[0])
            }),
            (Plan::Grid(plan), Some(fast)) if Fast::covers(plan, self.cols) => {
                Some(fast.grid(plan, self.cols, source, &mut out.planes, &mut out.work))
            }
            _ => None,
        };
        match done {
            Some(Ok(sum)) => Ok(sum),
            // The reference says what is wrong, and where.
            Some(Err(_)) | None => self.reference(first_row, first, source, out),
        }
    }

    fn check_finite(&self, first: u64, source: &[u8]) -> Result<(), NonFinite> {
        match find_non_finite(self.source, source) {
            Some(found) => Err(NonFinite { first: found.first + first, ..found }),
            None => Ok(()),
        }
    }

    /// The scalar path: the arithmetic of `grid`, and the error from the decoder itself.
    fn reference(
        &self,
        first_row: u64,
        first: u64,
        source: &[u8],
        out: &mut PlaneBuffers,
    ) -> Result<ErrorSum, EncodeError> {
        self.check_finite(first, source)?;
        let n = source.len() / self.source_row_bytes();
        let mut values = vec![0f32; n * self.cols];
        // Type and length were checked.
        widen(self.source, source, &mut values).unwrap_or_default();
        match &self.plan {
            Plan::Keep => {}
            Plan::Cast(element) => self.cast(*element, first, &values, &mut out.planes[0])?,
            Plan::Grid(plan) => plan
                .encode(&mut values.clone(), self.importance.as_deref(), &mut out.planes)
                .map_err(|fault| match fault {
                    Fault::Rotation(row) => EncodeError::Rotation { row: first_row + row as u64 },
                    Fault::Lost(row) => {
                        EncodeError::Lost { rounding: self.rounding, row: first_row + row as u64 }
                    }
                })?,
        }
        self.error_of(first_row, n, &values, &out.planes)
    }

    fn cast(
        &self,
        element: Element,
        first: u64,
        values: &[f32],
        out: &mut Vec<u8>,
    ) -> Result<(), EncodeError> {
        let too_large = |v: &f32| v.abs().to_bits() >= limit(element);
        if let Some(at) = values.iter().position(too_large) {
            return Err(EncodeError::Range {
                dtype: element.dtype(),
                largest: element.largest(),
                peak: values.iter().fold(0.0, |m, v| m.max(v.abs())),
                first: first + at as u64,
                count: values.iter().filter(|v| too_large(v)).count() as u64,
            });
        }
        let width = row_bytes(self.cols, element.bits()).unwrap_or(0);
        out.clear();
        out.resize(values.len() / self.cols * width, 0);
        let mut codes = vec![0; self.cols];
        for (row, out) in values.chunks_exact(self.cols).zip(out.chunks_exact_mut(width)) {
            codes.iter_mut().zip(row).for_each(|(c, v)| *c = cast_code(element, *v));
            pack(&codes, element.bits(), out);
        }
        Ok(())
    }

    fn error_of(
        &self,
        first_row: u64,
        n: usize,
        values: &[f32],
        planes: &[Vec<u8>],
    ) -> Result<ErrorSum, EncodeError> {
        let mut sum = ErrorSum::default();
        let Some(decoder) = &self.decoder else { return Ok(sum) };
        let slices: Vec<PlaneSlice<'_>> = self
            .encoding
            .planes
            .iter()
            .zip(planes.iter().zip(&self.whole))
            .map(|(spec, (rows, whole))| match (whole, spec.layout) {
                (Some(bytes), _) => PlaneSlice::whole(bytes),
                (None, PlaneLayout::Tiled { block: [r, _] }) if r > 0 => {
                    PlaneSlice { bytes: rows, first: first_row / r }
                }
                (None, _) => PlaneSlice::whole(rows),
            })
            .collect();
        let mut decoded = vec![0f32; self.cols];
        for (i, row) in values.chunks_exact(self.cols).take(n).enumerate() {
            let at = first_row + i as u64;
            // Our own planes cover the rows, and every code is one the encoder made.
            let read = decoder.decode(at..at + 1, &slices, &mut decoded);
            debug_assert_eq!(read, Ok(()));
            if self.rounding != Rounding::Rad && decoded.iter().any(|v| !v.is_finite()) {
                return Err(EncodeError::Lost { rounding: self.rounding, row: at });
            }
            match self.kernel.ops() {
                Some(ops) => sum.add_row_by(ops.error, row, &decoded),
                None => sum.add_row(row, &decoded),
            }
        }
        Ok(sum)
    }
}

/// f32 bits of the smallest magnitude that a cast to the type would make infinite; types that saturate have none.
fn limit(element: Element) -> u32 {
    match element.dtype() {
        DType::F16 => 65520f32.to_bits(),
        // The tie between the largest bf16, whose mantissa is odd, and 2^128.
        DType::BF16 => 0x7f7f_8000,
        _ => f32::INFINITY.to_bits(),
    }
}

/// Code of a plain conversion. The container's converter reaches e5m2 by way of f16, so ties are decided twice.
fn cast_code(element: Element, x: f32) -> u32 {
    if element.dtype() == DType::F8E5M2 {
        let x = x.clamp(-element.largest(), element.largest());
        return element.encode(mini::f16_value(mini::f16_bits(x)));
    }
    element.encode(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_share_one_encoder_and_one_decoder() {
        fn shared<T: Send + Sync>() {}
        shared::<Encoder>();
        shared::<Decoder>();
        fn sent<T: Send>() {}
        sent::<PlaneBuffers>();
    }

    #[test]
    fn plane_offsets_are_where_a_row_blocks_bytes_begin() {
        let grid = crate::recipe::Grid::absmax(DType::F8E4M3, [128, 128], DType::BF16);
        let encoder =
            Encoder::new(&Method::Grid(grid), DType::BF16, 300, 200, None).expect("legal");
        let at = |row| (encoder.plane_offset(0, row), encoder.plane_offset(1, row));
        assert_eq!((at(0), at(128), at(256)), ((0, 0), (128 * 200, 4), (256 * 200, 8)));
        // The end of the last, short block.
        assert_eq!(at(300), (300 * 200, 12));
    }
}
