//! Planes → f32.

use std::ops::Range;

use crate::num::{Element, unpack, widen, widens};
use crate::tensor::{DType, Encoding, EncodingError, PlaneLayout, PlaneSpec, Scheme, role};

use super::grid::hadamard;
use super::kernel::{self, Kernel};
use super::lanes::CodeType;
use super::simd::LANES;

/// Why planes were not decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The encoding breaks a rule of the container.
    #[error("the encoding is malformed: {0}")]
    Encoding(#[from] EncodingError),
    /// The encoding is legal, but its values cannot be computed here.
    #[error("{0}")]
    Unsupported(String),
    /// Sizes overflow, or a plane is not as long as the rows need.
    #[error("plane `{role}` holds {have} bytes where the rows need {need}")]
    Length {
        /// Role of the plane.
        role: String,
        /// Bytes it has from the first row on.
        have: u64,
        /// Bytes needed.
        need: u64,
    },
    /// Rows outside the matrix, or an output of another size.
    #[error("rows {0:?} do not fit the matrix or the output")]
    Rows(Range<u64>),
    /// A code that names no entry of the table.
    #[error("code {code} in row {row} names none of the {entries} table entries")]
    Index {
        /// Row of the weight.
        row: u64,
        /// The code.
        code: i64,
        /// Entries of the table.
        entries: u64,
    },
    /// `t.perm` is not a permutation of the columns.
    #[error("`t.perm` is not a permutation of the columns")]
    Permutation,
}

/// A run of whole rows of one plane.
#[derive(Debug, Clone, Copy)]
pub struct PlaneSlice<'a> {
    /// The bytes, from the start of plane row `first`.
    pub bytes: &'a [u8],
    /// Row of the plane that `bytes` starts with, in the plane's own rows; 0 for the whole plane.
    pub first: u64,
}

impl<'a> PlaneSlice<'a> {
    /// A whole plane.
    pub fn whole(bytes: &'a [u8]) -> PlaneSlice<'a> {
        PlaneSlice { bytes, first: 0 }
    }
}

/// Reads rows of one weight from its planes. Any bytes give values or an error.
#[derive(Debug, Clone)]
pub struct Decoder {
    rows: u64,
    cols: usize,
    planes: Vec<Plane>,
    plain: Option<DType>,
    steps: Steps,
    kernel: Kernel,
}

#[derive(Debug, Clone)]
struct Plane {
    spec: PlaneSpec,
    row_bytes: usize,
    /// Elements of one of its rows.
    width: usize,
    values: Values,
}

#[derive(Debug, Clone)]
enum Values {
    /// All codes of at most 8 bits.
    Table(Vec<f32>),
    Element(Element),
    Wide(DType),
}

/// Planes by what they do, as indices.
#[derive(Debug, Clone, Default)]
struct Steps {
    table: Option<usize>,
    /// Entries and columns a code stands for.
    grid: (u64, usize),
    signs: Option<usize>,
    zero: Option<usize>,
    scales: Vec<usize>,
    mins: Vec<usize>,
    fwht: Option<usize>,
    perm: Option<usize>,
}

impl Steps {
    /// The scale that codes are multiplied by at once, and the columns that a value of it is for, where nothing comes in between
    /// and its blocks are whole lanes.
    fn first_scale(&self, planes: &[Plane], cols: usize) -> Option<(usize, usize)> {
        let &first = self.scales.first().filter(|_| self.signs.is_none() && self.zero.is_none())?;
        let PlaneLayout::Tiled { block: [_, block] } = planes.get(first)?.spec.layout else {
            return None;
        };
        let block = usize::try_from(block).ok()?;
        if block == 0 || block >= cols {
            return Some((first, cols.next_multiple_of(LANES)));
        }
        block.is_multiple_of(LANES).then_some((first, block))
    }
}

impl Decoder {
    /// A decoder for a weight of `rows` × `cols` in `encoding`.
    ///
    /// # Errors
    /// Malformed encodings, schemes other than `plain` and `affine`, the `givens` transform, tables indexed by
    /// floats, a Hadamard width that does not divide the columns, sizes beyond the address space.
    pub fn new(encoding: &Encoding, rows: u64, cols: u64) -> Result<Decoder, DecodeError> {
        encoding.check()?;
        let unsupported = |why: String| Err(DecodeError::Unsupported(why));
        let mut planes = Vec::with_capacity(encoding.planes.len());
        for spec in &encoding.planes {
            // The row length counts what the layout says, tables included.
            let too_long =
                || DecodeError::Unsupported(format!("plane `{}` is too long", spec.role));
            let row_bytes =
                spec.row_bytes(cols).and_then(|n| usize::try_from(n).ok()).ok_or_else(too_long)?;
            let width = usize::try_from(spec.grid(1, cols).1).map_err(|_| too_long())?;
            let values = match Element::new(spec.dtype) {
                Some(e) if e.bits() <= 8 => {
                    Values::Table((0..1u32 << e.bits()).map(|c| e.decode(c)).collect())
                }
                Some(e) => Values::Element(e),
                None if widens(spec.dtype) => Values::Wide(spec.dtype),
                None => {
                    return unsupported(format!("{} values cannot be read as numbers", spec.dtype));
                }
            };
            planes.push(Plane { spec: spec.clone(), row_bytes, width, values });
        }
        let cols = usize::try_from(cols)
            .ok()
            .filter(|c| c.checked_mul(8).is_some())
            .ok_or_else(|| DecodeError::Unsupported("the rows are too long".into()))?;
        let mut decoder = Decoder {
            rows,
            cols,
            planes,
            plain: None,
            steps: Steps::default(),
            kernel: kernel::selected(),
        };
        match &encoding.scheme {
            Scheme::Plain => decoder.plain = Some(encoding.codes()),
            Scheme::Affine => decoder.steps = decoder.steps_of(encoding)?,
            Scheme::Other(name) => {
                return unsupported(format!(
                    "scheme `{name}` belongs to another producer and is not decoded"
                ));
            }
        }
        Ok(decoder)
    }

    fn steps_of(&self, encoding: &Encoding) -> Result<Steps, DecodeError> {
        let unsupported = |why: String| Err(DecodeError::Unsupported(why));
        let index = |role: &str| encoding.plane(role).map(|(i, _)| i);
        let levels = |base: &str| {
            let mut found: Vec<(u64, usize)> = (1..self.planes.len())
                .filter_map(|i| Some((encoding.planes[i].level(base)?, i)))
                .collect();
            found.sort_unstable();
            found.into_iter().map(|(_, i)| i).collect::<Vec<usize>>()
        };
        let mut steps = Steps {
            table: index(role::TABLE).or(index("grid")),
            grid: (0, 1),
            signs: index("signs"),
            zero: index(role::ZERO),
            scales: levels(role::SCALE),
            mins: levels("min"),
            fwht: None,
            perm: None,
        };
        if let Some(table) = steps.table {
            let PlaneLayout::Table { extent } = encoding.planes[table].layout else {
                return unsupported("a table that is not a TABLE plane".into());
            };
            let codes = encoding.codes();
            if codes.is_float() || codes == DType::E8M0 || Element::new(codes).is_none() {
                return unsupported(format!("a table takes integer codes, not {codes}"));
            }
            let is_grid = encoding.planes[table].role == "grid";
            if !is_grid && extent[0] != 1 {
                return unsupported(format!("`table` has {} rows, not one", extent[0]));
            }
            steps.grid = match (is_grid, usize::try_from(extent[1])) {
                (true, Ok(width)) => (extent[0], width),
                _ => (extent[1], 1),
            };
        }
        match encoding.transform.as_str() {
            "" => {}
            "perm" => steps.perm = index("t.perm"),
            other => match encoding.fwht().map(usize::try_from) {
                Some(Ok(n)) if self.cols.is_multiple_of(n) => steps.fwht = Some(n),
                Some(_) => {
                    return unsupported(format!(
                        "{} columns are not whole blocks of `{other}`",
                        self.cols
                    ));
                }
                None => return unsupported(format!("transform `{other}` is not decoded")),
            },
        }
        if let Some(perm) = steps.perm {
            let spec = &self.planes[perm].spec;
            let extent = [1, self.cols as u64];
            if spec.dtype != DType::I32 || spec.layout != (PlaneLayout::Table { extent }) {
                return unsupported(format!("`t.perm` is not i32 of 1 × {}", self.cols));
            }
        }
        Ok(steps)
    }

    /// The same decoder with another kernel; all give the same values.
    pub fn with_kernel(mut self, kernel: Kernel) -> Decoder {
        self.kernel = kernel;
        self
    }

    /// Columns of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Decodes `rows` into `out`, row-major. `planes` are in the encoding's order; each must cover those rows,
    /// tables wholly.
    ///
    /// # Errors
    /// Rows beyond the matrix, an output or a plane of the wrong length, codes that name no table entry, a `t.perm`
    /// that is no permutation.
    pub fn decode(
        &self,
        rows: Range<u64>,
        planes: &[PlaneSlice<'_>],
        out: &mut [f32],
    ) -> Result<(), DecodeError> {
        let n = rows.end.checked_sub(rows.start).and_then(|n| usize::try_from(n).ok());
        let fits = n.and_then(|n| n.checked_mul(self.cols)) == Some(out.len());
        if !fits || rows.end > self.rows || planes.len() != self.planes.len() {
            return Err(DecodeError::Rows(rows));
        }
        if self.cols == 0 {
            return Ok(());
        }
        if let Some(dtype) = self.plain {
            for (row, out) in rows.zip(out.chunks_exact_mut(self.cols)) {
                let bytes = self.plane_row(0, planes, row)?;
                match widens(dtype) {
                    true => widen(dtype, bytes, out)
                        .map_err(|e| DecodeError::Unsupported(e.to_string()))?,
                    false => self.planes[0].read(bytes, out, &mut Vec::new()),
                }
            }
            return Ok(());
        }
        let mut work = Work { codes: Vec::new(), plane: Vec::new(), product: Vec::new() };
        let perm = self.permutation(planes)?;
        let table = self.table(planes, &mut work)?;
        for (row, out) in rows.zip(out.chunks_exact_mut(self.cols)) {
            self.row(row, planes, &table, &mut work, out)?;
            if let Some(perm) = &perm {
                work.product.clear();
                work.product.extend_from_slice(out);
                for (v, &to) in work.product.iter().zip(perm) {
                    out[to] = *v;
                }
            }
        }
        Ok(())
    }

    fn row(
        &self,
        row: u64,
        planes: &[PlaneSlice<'_>],
        table: &[f32],
        work: &mut Work,
        out: &mut [f32],
    ) -> Result<(), DecodeError> {
        let bytes = self.plane_row(0, planes, row)?;
        let mut scales = self.steps.scales.as_slice();
        if self.steps.table.is_some() {
            self.look_up(row, bytes, table, work, out)?;
        } else if let (Some(ops), Some(codes)) = (self.kernel.ops(), self.code_type()) {
            match self.steps.first_scale(&self.planes, self.cols) {
                Some((first, block)) => {
                    let p = &self.planes[first];
                    work.plane.resize(p.width, 0.0);
                    p.read(self.plane_row(first, planes, row)?, &mut work.plane, &mut work.codes);
                    (ops.values)(codes, bytes, &work.plane, block, out);
                    scales = &scales[1..];
                }
                None => {
                    (ops.values)(codes, bytes, &[1.0], self.cols.next_multiple_of(LANES), out);
                }
            }
        } else {
            self.planes[0].read(bytes, out, &mut work.codes);
        }
        if let Some(signs) = self.steps.signs {
            let bytes = self.plane_row(signs, planes, row)?;
            work.codes.resize(self.cols, 0);
            unpack(bytes, 1, &mut work.codes);
            for (v, s) in out.iter_mut().zip(&work.codes) {
                *v = if *s != 0 { -*v } else { *v };
            }
        }
        if let Some(zero) = self.steps.zero {
            self.spread(zero, planes, row, work, out, |v, z| v - z)?;
        }
        for &scale in scales {
            self.spread(scale, planes, row, work, out, |v, s| v * s)?;
        }
        if let Some((&first, rest)) = self.steps.mins.split_first() {
            let mut product = std::mem::take(&mut work.product);
            product.clear();
            product.resize(self.cols, 0.0);
            self.spread(first, planes, row, work, &mut product, |_, m| m)?;
            for &min in rest {
                self.spread(min, planes, row, work, &mut product, |v, m| v * m)?;
            }
            for (v, m) in out.iter_mut().zip(&product) {
                *v -= m;
            }
            work.product = product;
        }
        if let Some(n) = self.steps.fwht {
            hadamard(out, n);
        }
        Ok(())
    }

    /// Codes that kernels decode.
    fn code_type(&self) -> Option<CodeType> {
        match self.planes[0].spec.dtype {
            DType::I8 => Some(CodeType::I8),
            DType::I4 => Some(CodeType::I4),
            DType::F8E4M3 => Some(CodeType::E4M3),
            DType::F4E2M1 => Some(CodeType::E2M1),
            _ => None,
        }
    }

    /// Applies one plane's values to the columns they cover.
    fn spread(
        &self,
        plane: usize,
        planes: &[PlaneSlice<'_>],
        row: u64,
        work: &mut Work,
        out: &mut [f32],
        apply: impl Fn(f32, f32) -> f32,
    ) -> Result<(), DecodeError> {
        let bytes = self.plane_row(plane, planes, row)?;
        let p = &self.planes[plane];
        let PlaneLayout::Tiled { block: [_, block] } = p.spec.layout else {
            return Ok(());
        };
        let block = match usize::try_from(block) {
            Ok(b) if b > 0 => b,
            _ => self.cols,
        };
        work.plane.resize(p.width, 0.0);
        p.read(bytes, &mut work.plane, &mut work.codes);
        for (columns, value) in out.chunks_mut(block).zip(&work.plane) {
            columns.iter_mut().for_each(|v| *v = apply(*v, *value));
        }
        Ok(())
    }

    fn look_up(
        &self,
        row: u64,
        bytes: &[u8],
        table: &[f32],
        work: &mut Work,
        out: &mut [f32],
    ) -> Result<(), DecodeError> {
        let codes = &self.planes[0];
        let (entries, width) = self.steps.grid;
        work.codes.resize(codes.width, 0);
        unpack(bytes, codes.spec.dtype.bits(), &mut work.codes);
        let unused = 32 - codes.spec.dtype.bits();
        for (columns, &code) in out.chunks_mut(width.max(1)).zip(&work.codes) {
            let code = match codes.spec.dtype {
                DType::Bool => i64::from(code != 0),
                t if t.is_signed_int() => i64::from((code << unused) as i32 >> unused),
                _ => i64::from(code),
            };
            let at = u64::try_from(code)
                .ok()
                .filter(|c| *c < entries)
                .ok_or(DecodeError::Index { row, code, entries })? as usize;
            let end = at * width + columns.len();
            // The table was read whole, so the entry is there.
            columns.copy_from_slice(table.get(at * width..end).unwrap_or(&[]));
        }
        Ok(())
    }

    fn table(&self, planes: &[PlaneSlice<'_>], work: &mut Work) -> Result<Vec<f32>, DecodeError> {
        let Some(table) = self.steps.table else { return Ok(Vec::new()) };
        let p = &self.planes[table];
        let rows = match p.spec.layout {
            PlaneLayout::Table { extent } => extent[0],
            PlaneLayout::Tiled { .. } => 0,
        };
        // Bounded by the bytes given before anything is allocated.
        self.need(table, planes, 0, rows)?;
        let mut values = Vec::new();
        for row in 0..rows {
            let bytes = self.table_row(table, planes, row)?;
            let at = values.len();
            values.resize(at + p.width, 0.0);
            p.read(bytes, &mut values[at..], &mut work.codes);
        }
        Ok(values)
    }

    fn permutation(&self, planes: &[PlaneSlice<'_>]) -> Result<Option<Vec<usize>>, DecodeError> {
        let Some(perm) = self.steps.perm else { return Ok(None) };
        let bytes = self.table_row(perm, planes, 0)?;
        let mut seen = vec![false; self.cols];
        let mut to = Vec::with_capacity(self.cols);
        for b in bytes.as_chunks::<4>().0 {
            let at =
                usize::try_from(i32::from_le_bytes(*b)).map_err(|_| DecodeError::Permutation)?;
            match seen.get_mut(at) {
                Some(s) if !*s => *s = true,
                _ => return Err(DecodeError::Permutation),
            }
            to.push(at);
        }
        Ok(Some(to))
    }

    /// Bytes of the plane's row that covers `row` of the weight.
    fn plane_row<'a>(
        &self,
        plane: usize,
        planes: &[PlaneSlice<'a>],
        row: u64,
    ) -> Result<&'a [u8], DecodeError> {
        let at = match self.planes[plane].spec.layout {
            PlaneLayout::Tiled { block: [0, _] } => 0,
            PlaneLayout::Tiled { block: [rows, _] } => row / rows,
            PlaneLayout::Table { .. } => 0,
        };
        self.table_row(plane, planes, at)
    }

    fn table_row<'a>(
        &self,
        plane: usize,
        planes: &[PlaneSlice<'a>],
        row: u64,
    ) -> Result<&'a [u8], DecodeError> {
        let bytes = self.need(plane, planes, row, 1)?;
        Ok(&bytes[..self.planes[plane].row_bytes])
    }

    /// The bytes from plane row `row` on, at least `count` rows of them.
    fn need<'a>(
        &self,
        plane: usize,
        planes: &[PlaneSlice<'a>],
        row: u64,
        count: u64,
    ) -> Result<&'a [u8], DecodeError> {
        let p = &self.planes[plane];
        let slice = planes[plane];
        let row_bytes = p.row_bytes as u64;
        let start = row.checked_sub(slice.first).and_then(|r| r.checked_mul(row_bytes));
        let need = count.saturating_mul(row_bytes);
        let rest = start
            .and_then(|s| usize::try_from(s).ok())
            .and_then(|s| slice.bytes.get(s..))
            .unwrap_or(&[]);
        if (rest.len() as u64) < need || start.is_none() {
            let role = p.spec.role.clone();
            return Err(DecodeError::Length { role, have: rest.len() as u64, need });
        }
        Ok(rest)
    }
}

/// Buffers reused over rows.
struct Work {
    codes: Vec<u32>,
    plane: Vec<f32>,
    product: Vec<f32>,
}

impl Plane {
    /// One row of values; `bytes` holds the whole row.
    fn read(&self, bytes: &[u8], out: &mut [f32], codes: &mut Vec<u32>) {
        match &self.values {
            // Conversion, unlike look-up, is done many lanes at a time.
            Values::Table(_) if self.spec.dtype == DType::I8 => {
                out.iter_mut().zip(bytes).for_each(|(o, b)| *o = f32::from(*b as i8));
            }
            Values::Table(table) if self.spec.dtype.bits() == 4 => {
                let (pairs, rest) = out.as_chunks_mut::<2>();
                for (pair, b) in pairs.iter_mut().zip(bytes) {
                    *pair = [table[usize::from(b & 15)], table[usize::from(b >> 4)]];
                }
                if let ([last], Some(b)) = (rest, bytes.get(pairs.len())) {
                    *last = table[usize::from(b & 15)];
                }
            }
            Values::Table(table) if table.len() == 256 => {
                for (o, b) in out.iter_mut().zip(bytes) {
                    *o = table[usize::from(*b)];
                }
            }
            Values::Table(table) => {
                codes.resize(out.len(), 0);
                unpack(bytes, self.spec.dtype.bits(), codes);
                // A table has an entry for every code of its width.
                out.iter_mut().zip(codes).for_each(|(o, c)| *o = table[*c as usize]);
            }
            Values::Element(e) if widens(e.dtype()) => {
                // Length and type were checked, so this cannot fail.
                let _ = widen(e.dtype(), &bytes[..self.row_bytes], out);
            }
            Values::Element(e) => {
                codes.resize(out.len(), 0);
                unpack(bytes, e.bits(), codes);
                out.iter_mut().zip(codes).for_each(|(o, c)| *o = e.decode(*c));
            }
            Values::Wide(dtype) => {
                let _ = widen(*dtype, &bytes[..self.row_bytes], out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiled(role: &str, dtype: DType, block: [u64; 2]) -> PlaneSpec {
        PlaneSpec::tiled(role, dtype, block)
    }

    fn f32s(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    fn decode(
        encoding: &Encoding,
        rows: u64,
        cols: u64,
        planes: &[&[u8]],
    ) -> Result<Vec<f32>, DecodeError> {
        let decoder = Decoder::new(encoding, rows, cols)?;
        let planes: Vec<PlaneSlice<'_>> = planes.iter().map(|p| PlaneSlice::whole(p)).collect();
        let mut out = vec![0.0; (rows * cols) as usize];
        decoder.decode(0..rows, &planes, &mut out)?;
        Ok(out)
    }

    #[test]
    fn every_kernel_gives_the_values_of_the_tables_for_every_code_and_any_scale() {
        let mut state = 5u64;
        let mut word = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 32) as u32
        };
        // A NaN may carry any bits through a product.
        let bits = |v: &f32| if v.is_nan() { 0x7fc0_0000 } else { v.to_bits() };
        for dtype in [DType::I8, DType::I4, DType::F8E4M3, DType::F4E2M1] {
            let mut encodings = Vec::new();
            for block in [0, 16, 48, 5, 512] {
                let scale = |role, dtype, block| tiled(role, dtype, [1, block]);
                let mut planes = vec![scale("scale", DType::F32, block)];
                encodings.push(Encoding::affine(dtype, planes.clone()));
                planes.push(scale("scale.1", DType::F32, 0));
                encodings.push(Encoding::affine(dtype, planes.clone()));
                planes.push(scale("zero", DType::I8, block));
                encodings.push(Encoding::affine(dtype, planes));
                encodings.push(Encoding::affine(dtype, vec![scale("zero", DType::I8, block)]));
            }
            for (encoding, cols) in encodings
                .iter()
                .flat_map(|e| [1, 7, 15, 16, 31, 37, 255, 300].map(|cols| (e, cols)))
            {
                let rows = 3u64;
                let planes: Vec<Vec<u8>> = encoding
                    .planes
                    .iter()
                    .enumerate()
                    .map(|(plane, spec)| {
                        let bytes = spec.bytes(rows, cols).expect("small");
                        // Every code once, then scales of any bits: infinite, NaN, negative, subnormal.
                        (0..bytes)
                            .map(|i| if plane == 0 { i as u8 } else { word() as u8 })
                            .collect()
                    })
                    .collect();
                let planes: Vec<PlaneSlice<'_>> =
                    planes.iter().map(|p| PlaneSlice::whole(p)).collect();
                let decoder = Decoder::new(encoding, rows, cols).expect("legal");
                let values = |kernel| {
                    let mut out = vec![0.0; (rows * cols) as usize];
                    let decoder = decoder.clone().with_kernel(kernel);
                    decoder.decode(0..rows, &planes, &mut out).expect("whole planes");
                    out.iter().map(bits).collect::<Vec<u32>>()
                };
                let want = values(Kernel::Scalar);
                for kernel in Kernel::available() {
                    assert!(values(kernel) == want, "{kernel}: {encoding:?}, {cols} columns");
                }
            }
        }
    }

    #[test]
    fn every_step_of_the_affine_scheme_is_applied_in_order() {
        // ((±code − zero) · scale · scale.1) − min · min.1, signs before the zero point.
        let encoding = Encoding::affine(
            DType::U4,
            vec![
                tiled("scale", DType::F16, [1, 2]),
                tiled("min.1", DType::F32, [0, 0]),
                tiled("zero", DType::U8, [1, 0]),
                tiled("scale.1", DType::F32, [2, 0]),
                tiled("min", DType::I8, [1, 2]),
                tiled("signs", DType::U1, [1, 1]),
            ],
        );
        let half = |v: f32| half::f16::from_f32(v).to_le_bytes();
        let scale: Vec<u8> = [half(0.5), half(2.0), half(1.0), half(4.0)].concat();
        let planes: [&[u8]; 7] = [
            &[0x21, 0x03, 0xf4, 0x05],
            &scale,
            &f32s(&[10.0]),
            &[1, 0],
            &f32s(&[3.0]),
            &[1, 0xff, 0, 2],
            &[0b010, 0b000],
        ];
        let out = decode(&encoding, 2, 3, &planes).expect("decodes");
        let want = [
            (1.0 - 1.0) * 0.5 * 3.0 - 10.0,
            (-2.0 - 1.0) * 0.5 * 3.0 - 10.0,
            (3.0 - 1.0) * 2.0 * 3.0 + 10.0,
            4.0 * 3.0,
            15.0 * 3.0,
            5.0 * 4.0 * 3.0 - 20.0,
        ];
        assert_eq!(out, want);
    }

    #[test]
    fn rows_can_be_read_from_parts_of_planes() {
        let encoding = Encoding::affine(DType::I8, vec![tiled("scale", DType::F32, [2, 0])]);
        let decoder = Decoder::new(&encoding, 6, 2).expect("legal");
        let codes = [1, 2, 3, 4];
        let scale = f32s(&[10.0, 100.0]);
        let planes = |first: u64| {
            [PlaneSlice { bytes: &codes, first: 3 }, PlaneSlice { bytes: &scale, first }]
        };
        let mut out = [0.0; 4];
        decoder.decode(3..5, &planes(1), &mut out).expect("covers");
        assert_eq!(out, [10.0, 20.0, 300.0, 400.0]);
        let missing = decoder.decode(3..5, &planes(2), &mut out).expect_err("row 1 of the scales");
        assert_eq!(missing.to_string(), "plane `scale` holds 0 bytes where the rows need 4");
        assert_eq!(decoder.decode(5..7, &planes(1), &mut out), Err(DecodeError::Rows(5..7)));
        assert_eq!(decoder.decode(3..4, &planes(1), &mut out), Err(DecodeError::Rows(3..4)));
    }

    #[test]
    fn a_grid_table_gives_several_columns_a_code() {
        let mut encoding =
            Encoding::affine(DType::U2, vec![PlaneSpec::table("grid", DType::F32, [3, 2])]);
        encoding.planes[0].layout = PlaneLayout::Tiled { block: [1, 2] };
        let grid = f32s(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        // Five columns: codes 2, 0, 1, the last for one column alone.
        assert_eq!(
            decode(&encoding, 1, 5, &[&[0b01_00_10], &grid]),
            Ok(vec![5.0, 6.0, 1.0, 2.0, 3.0])
        );
        let error = decode(&encoding, 1, 5, &[&[0b11_00_10], &grid]).expect_err("code 3");
        assert_eq!(error, DecodeError::Index { row: 0, code: 3, entries: 3 });
    }

    #[test]
    fn a_signed_code_indexes_by_value_and_a_negative_index_fails() {
        let encoding =
            Encoding::affine(DType::I4, vec![PlaneSpec::table(role::TABLE, DType::F32, [1, 8])]);
        let table = f32s(&[0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0]);
        assert_eq!(decode(&encoding, 1, 2, &[&[0x27], &table]), Ok(vec![70.0, 20.0]));
        let error = decode(&encoding, 1, 2, &[&[0xf7], &table]).expect_err("−1");
        assert_eq!(error.to_string(), "code -1 in row 0 names none of the 8 table entries");
    }

    #[test]
    fn a_permutation_puts_value_j_at_column_perm_j() {
        let mut encoding =
            Encoding::affine(DType::I8, vec![PlaneSpec::table("t.perm", DType::I32, [1, 3])]);
        encoding.transform = "perm".into();
        let perm = |p: [i32; 3]| -> Vec<u8> { p.iter().flat_map(|i| i.to_le_bytes()).collect() };
        let codes = [1, 2, 3, 4, 5, 6];
        let out = decode(&encoding, 2, 3, &[&codes, &perm([2, 0, 1])]);
        assert_eq!(out, Ok(vec![2.0, 3.0, 1.0, 5.0, 6.0, 4.0]));
        for bad in [[0, 1, 1], [0, 1, 3], [-1, 0, 1]] {
            assert_eq!(
                decode(&encoding, 2, 3, &[&codes, &perm(bad)]),
                Err(DecodeError::Permutation)
            );
        }
    }

    #[test]
    fn what_cannot_be_decoded_says_why() {
        let why = |e: &Encoding, cols| {
            Decoder::new(e, 2, cols).err().map(|e| e.to_string()).unwrap_or_default()
        };
        let mut givens = Encoding::affine(
            DType::I8,
            vec![
                PlaneSpec::table("t.pairs", DType::I32, [1, 4]),
                PlaneSpec::table("t.angle", DType::F32, [1, 2]),
            ],
        );
        givens.transform = "givens".into();
        assert_eq!(why(&givens, 4), "transform `givens` is not decoded");
        let mut other = Encoding::plain(DType::U8);
        other.scheme = Scheme::Other("mycomp.v1".into());
        assert_eq!(
            why(&other, 4),
            "scheme `mycomp.v1` belongs to another producer and is not decoded"
        );
        let float =
            Encoding::affine(DType::F8E4M3, vec![PlaneSpec::table("table", DType::F32, [1, 4])]);
        assert_eq!(why(&float, 4), "a table takes integer codes, not fp8_e4m3");
        let mut fwht = Encoding::affine(DType::I8, vec![tiled("scale", DType::F32, [1, 0])]);
        fwht.transform = "fwht8".into();
        assert_eq!(why(&fwht, 12), "12 columns are not whole blocks of `fwht8`");
        fwht.planes.clear();
        assert_eq!(why(&fwht, 8), "the encoding is malformed: 0 planes, not 1 to 8");
        assert_eq!(why(&Encoding::plain(DType::C64), 1), "c64 values cannot be read as numbers");
        assert_eq!(why(&Encoding::plain(DType::F32), u64::MAX), "plane `codes` is too long");
    }

    #[test]
    fn plain_planes_of_every_type_read_as_numbers() {
        assert_eq!(
            decode(&Encoding::plain(DType::I64), 1, 1, &[&(-3i64).to_le_bytes()]),
            Ok(vec![-3.0])
        );
        assert_eq!(
            decode(&Encoding::plain(DType::F4E2M1), 1, 3, &[&[0x7a, 0x01]]),
            Ok(vec![-1.0, 6.0, 0.5])
        );
        assert_eq!(decode(&Encoding::plain(DType::Bool), 1, 2, &[&[0, 9]]), Ok(vec![0.0, 1.0]));
        assert_eq!(decode(&Encoding::plain(DType::BF16), 1, 1, &[&[0x80, 0x3f]]), Ok(vec![1.0]));
    }
}
