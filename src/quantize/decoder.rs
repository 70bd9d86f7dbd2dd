//! Planes → f32.

use std::ops::Range;

use crate::num::{Element, NonFinite, unpack, widen, widens};
use crate::tensor::{DType, Encoding, EncodingError, PlaneLayout, PlaneSpec, Scheme, role};

use super::grid::hadamard;

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
    /// A weight that decodes to NaN or infinity.
    #[error("decodes to {0}")]
    NonFinite(NonFinite),
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
        let mut decoder = Decoder { rows, cols, planes, plain: None, steps: Steps::default() };
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
        if self.steps.table.is_some() {
            self.look_up(row, bytes, table, work, out)?;
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
        for &scale in &self.steps.scales {
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
