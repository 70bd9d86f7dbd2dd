//! The tables of a container, checked.
//!
//! [`Tables::parse`] refuses what radiance's reader of container version 2 refuses, in the same order, and nothing
//! else: gaps, reserved words, overlaps, unused rows and trailing bytes are none of a reader's business
//! (`verify` reports them). It allocates in proportion to the tables, which lie inside the file.

use super::experts;
use super::layout::{
    DIR_BYTES, ENC_BYTES, HEADER_BYTES, KIND_TABLE, KIND_TILED, MAGIC, META_BYTES, META_TEXT,
    PLANE_BYTES, POOL, PROFILE_BYTES, STEP_BYTES, SUB, TABLE_ALIGN, UNIT, VERSION, VOCAB_BYTES,
    dtype_of,
};
use super::refusal::{Reason, Refused, need};
use super::strings::{escape, until_nul};
use super::wire::{
    DirRow, EncPlaneRow, EncRow, Header, MetaRow, PlaneRow, ProfRow, Row, StepRow, VocabRow,
};
use crate::tensor::{DType, Encoding, MAX_PLANES, MAX_RANK, PlaneLayout, PlaneSpec, Scheme, Shape};

/// Every table of a container that passed the checks.
#[derive(Debug, Clone)]
pub(super) struct Tables {
    pub header: Header,
    /// Size of the file.
    pub size: u64,
    pub metadata: Vec<MetaRow>,
    pub raw_encodings: Vec<EncRow>,
    pub encodings: Vec<Encoding>,
    pub planes: Vec<PlaneRow>,
    pub entries: Vec<DirRow>,
    pub shapes: Vec<Shape>,
    pub vocab: Option<VocabRow>,
    pub profile: Vec<ProfRow>,
}

/// A section's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Section {
    pub name: &'static str,
    pub offset: u64,
    /// Rows, or bytes for sections of bytes.
    pub count: u64,
    /// Bytes of a row.
    pub row: u64,
}

impl Section {
    /// Bytes of the section.
    pub fn bytes(self) -> u64 {
        self.count.saturating_mul(self.row)
    }

    /// One past its last byte.
    pub fn end(self) -> u64 {
        self.offset.saturating_add(self.bytes())
    }
}

impl Header {
    /// The sections in the order in which readers check them.
    pub fn sections(&self) -> [Section; 8] {
        let s = |name, offset, count, row| Section { name, offset, count, row };
        [
            s("str", self.str_off, self.str_bytes, 1),
            s("meta", self.meta_off, self.meta_count, META_BYTES),
            s("dir", self.dir_off, self.dir_count, DIR_BYTES),
            s("plane", self.plane_off, self.plane_count, PLANE_BYTES),
            s("enc", self.enc_off, self.enc_count, ENC_BYTES),
            s("prof", self.prof_off, self.prof_count, PROFILE_BYTES),
            s("vocab", self.vocab_off, self.vocab_bytes, 1),
            s("data", self.data_off, self.data_bytes, 1),
        ]
    }

    /// The five strings that describe the file.
    pub fn texts(&self) -> [(&'static str, u64); 5] {
        [
            ("arch_id", self.arch_id),
            ("model_name", self.model_name),
            ("quant", self.quant),
            ("recipe", self.recipe),
            ("created_by", self.created_by),
        ]
    }
}

/// Name, row bytes and alignment of the vocabulary's arrays, in the order of their offsets.
pub(super) const VOCAB_ARRAYS: [(&str, u64, u64); 5] =
    [("text", 8, 8), ("score", 4, 4), ("type", 1, 1), ("merge", 8, 4), ("step", STEP_BYTES, 8)];

impl VocabRow {
    /// Rows of each array of [`VOCAB_ARRAYS`].
    pub fn counts(&self) -> [u32; 5] {
        [self.n_tokens, self.n_tokens, self.n_tokens, self.n_merges, self.n_steps]
    }

    /// Offset and bytes of the array `k` of [`VOCAB_ARRAYS`]; `None` when absent or empty.
    pub fn array(&self, k: usize) -> Option<(u64, u64)> {
        let (offset, count) = (*self.arrays.get(k)?, *self.counts().get(k)?);
        let row = VOCAB_ARRAYS.get(k)?.1;
        (offset != 0 && count != 0).then(|| (offset, row * u64::from(count)))
    }
}

/// `len` bytes at `offset`; `None` when they are not all there.
pub(super) fn slice(bytes: &[u8], offset: u64, len: u64) -> Option<&[u8]> {
    let end = usize::try_from(offset.checked_add(len)?).ok()?;
    bytes.get(usize::try_from(offset).ok()?..end)
}

impl Tables {
    /// Reads and checks the tables of a file of `size` bytes that begins with `bytes` (all of it, or at least
    /// everything before the data blob).
    pub(super) fn parse(bytes: &[u8], size: u64) -> Result<Tables, Refused> {
        let too_small = || Refused { field: "size".into(), reason: Reason::TooSmall { size } };
        if size < HEADER_BYTES {
            return Err(too_small());
        }
        let header = Header::read(bytes).ok_or_else(too_small)?;
        let name = |name: &'static str| move || name.to_owned();
        need(header.magic == MAGIC, name("magic"), || Reason::Magic { found: header.magic })?;
        need(header.version == VERSION, name("version"), || Reason::Version {
            found: header.version,
        })?;
        // Compared as signed, as radiance's reader does: offsets are signed there.
        need(
            (header.file_bytes as i64) < 0 || header.file_bytes <= size,
            name("file_bytes"),
            || Reason::Truncated { file_bytes: header.file_bytes, size },
        )?;
        for s in header.sections() {
            let fits = s.offset <= size && s.count <= (size - s.offset) / s.row;
            need(
                fits,
                || format!("{}_off", s.name),
                || Reason::Section { count: s.count, row: s.row, offset: s.offset, size },
            )?;
            if s.name == "str" {
                let ends = slice(bytes, s.offset, s.count).and_then(<[u8]>::last) == Some(&0);
                need(ends, name("str_bytes"), || Reason::Unterminated { bytes: s.count })?;
            }
        }
        need(
            header.data_bytes == 0 || header.data_off.is_multiple_of(POOL),
            name("data_off"),
            || Reason::Misaligned { value: header.data_off, align: POOL },
        )?;
        let table = |k: usize| {
            let s = header.sections()[k];
            slice(bytes, s.offset, s.bytes()).ok_or_else(|| Refused {
                field: format!("{}_off", s.name),
                reason: Reason::Section { count: s.count, row: s.row, offset: s.offset, size },
            })
        };
        let string = |offset: u64, field: &dyn Fn() -> String| {
            need(offset < header.str_bytes, field, || Reason::OutsideStrings {
                offset,
                bytes: header.str_bytes,
            })
        };
        for (field, offset) in header.texts() {
            string(offset, &name(field))?;
        }
        let metadata: Vec<MetaRow> = MetaRow::rows(table(1)?).collect();
        for (i, row) in metadata.iter().enumerate() {
            string(row.key, &|| format!("metadata[{i}].key"))?;
            if row.kind == META_TEXT {
                string(row.value, &|| format!("metadata[{i}].value"))?;
            }
        }
        let raw_encodings: Vec<EncRow> = EncRow::rows(table(4)?).collect();
        let encodings = raw_encodings
            .iter()
            .enumerate()
            .map(|(i, r)| encoding(i, r))
            .collect::<Result<_, _>>()?;
        let mut tables = Tables {
            header,
            size,
            metadata,
            raw_encodings,
            encodings,
            planes: PlaneRow::rows(table(3)?).collect(),
            entries: DirRow::rows(table(2)?).collect(),
            shapes: Vec::new(),
            vocab: None,
            profile: ProfRow::rows(table(5)?).collect(),
        };
        let mut shapes = Vec::with_capacity(tables.entries.len());
        for (i, row) in tables.entries.iter().enumerate() {
            string(row.name, &|| format!("entry[{i}].name"))?;
            string(row.quantizer, &|| format!("entry[{i}].quantizer"))?;
            string(row.options, &|| format!("entry[{i}].options"))?;
            shapes.push(tables.entry(i, row)?);
        }
        tables.shapes = shapes;
        if header.vocab_bytes > 0 {
            tables.vocab = Some(vocabulary(bytes, &header, table(6)?, &string)?);
        }
        experts::check(&tables.entries)?;
        Ok(tables)
    }

    /// The plane rows of an entry.
    pub(super) fn planes_of(&self, row: &DirRow) -> &[PlaneRow] {
        let first = usize::try_from(row.plane_first).unwrap_or(usize::MAX);
        let end = first.saturating_add(row.n_planes as usize);
        self.planes.get(first..end).unwrap_or_default()
    }

    fn entry(&self, i: usize, row: &DirRow) -> Result<Shape, Refused> {
        let field = |name: &'static str| move || format!("entry[{i}].{name}");
        let rank = row.rank as usize;
        need((1..=MAX_RANK).contains(&rank), field("rank"), || Reason::Rank { found: row.rank })?;
        let dims = row.shape.get(..rank).unwrap_or_default();
        if let Some(&found) = dims.iter().find(|&&d| d <= 0) {
            return Err(Refused { field: field("shape")(), reason: Reason::Extent { found } });
        }
        let end = row.offset.checked_add(row.bytes);
        need(end.is_some_and(|e| e <= self.size), field("offset"), || Reason::OutsideFile {
            offset: row.offset,
            bytes: row.bytes,
            size: self.size,
        })?;
        need(row.bytes == 0 || row.offset.is_multiple_of(UNIT), field("offset"), || {
            Reason::Misaligned { value: row.offset, align: UNIT }
        })?;
        let Some(enc) = self.encodings.get(row.enc as usize) else {
            let reason =
                Reason::NoSuchEncoding { found: row.enc, count: self.encodings.len() as u64 };
            return Err(Refused { field: field("enc")(), reason });
        };
        let want = enc.planes.len() as u64;
        need(u64::from(row.n_planes) == want, field("n_planes"), || Reason::PlanesDiffer {
            found: row.n_planes,
            want,
        })?;
        let planes = self.planes_of(row);
        need(planes.len() as u64 == want, field("plane_first"), || Reason::PlaneRows {
            first: row.plane_first,
            n: row.n_planes,
            count: self.planes.len() as u64,
        })?;
        for (spec, plane) in enc.planes.iter().zip(planes) {
            let part = |name: &'static str| {
                let role = &spec.role;
                move || format!("entry[{i}].plane {role} {name}")
            };
            let want = plane_bytes(spec, dims);
            need(plane.bytes as i64 == want && want >= 0, part("bytes"), || Reason::PlaneBytes {
                found: plane.bytes,
                want,
            })?;
            need(plane.offset.is_multiple_of(SUB), part("offset"), || Reason::Misaligned {
                value: plane.offset,
                align: SUB,
            })?;
            let last = plane.offset.checked_add(plane.bytes);
            let inside = plane.offset >= row.offset
                && last.is_some_and(|l| l <= row.offset.saturating_add(row.bytes));
            need(inside, part("offset"), || Reason::OutsideEntry {
                offset: plane.offset,
                bytes: plane.bytes,
                entry_offset: row.offset,
                entry_bytes: row.bytes,
            })?;
        }
        Ok(Shape::new(dims.iter().map(|&d| d as u64).collect::<Vec<_>>()))
    }
}

/// Bytes of a plane as radiance's reader computes them: signed 64-bit arithmetic that wraps, the ceiling division
/// included. For sizes that do not overflow this equals [`PlaneSpec::bytes`].
fn plane_bytes(spec: &PlaneSpec, dims: &[i64]) -> i64 {
    let ceil = |n: i64, b: i64| n.wrapping_add(b).wrapping_sub(1) / b;
    let (rows, cols) = match (spec.layout, dims.split_last()) {
        (PlaneLayout::Table { extent: [r, c] }, _) => (r as i64, c as i64),
        (PlaneLayout::Tiled { .. }, None) => (0, 0),
        (PlaneLayout::Tiled { block: [br, bc] }, Some((&cols, outer))) => {
            let rows = outer.iter().fold(1i64, |n, &d| n.wrapping_mul(d));
            let tiles = |n: i64, b: u64| if b == 0 { 1 } else { ceil(n, b as i64) };
            (tiles(rows, br), tiles(cols, bc))
        }
    };
    let bits = i64::from(spec.dtype.bits()).wrapping_mul(cols);
    rows.wrapping_mul(ceil(bits, 8))
}

fn encoding(i: usize, row: &EncRow) -> Result<Encoding, Refused> {
    let here = || format!("encoding[{i}]");
    let ends = |name: &[u8]| name.last() == Some(&0);
    need(ends(&row.scheme) && ends(&row.transform), here, || Reason::NameUnterminated)?;
    let n = usize::try_from(row.n_planes).unwrap_or(0);
    need(
        (1..=MAX_PLANES).contains(&n),
        || format!("encoding[{i}].n_planes"),
        || Reason::PlaneCount { found: row.n_planes },
    )?;
    let mut planes = Vec::with_capacity(n);
    for (k, p) in row.planes.iter().take(n).enumerate() {
        planes.push(encoding_plane(p, |name| format!("encoding[{i}].plane[{k}].{name}"))?);
    }
    let scheme = match escape(until_nul(&row.scheme)) {
        s if s == Scheme::Plain.name() => Scheme::Plain,
        s if s == Scheme::Affine.name() => Scheme::Affine,
        s => Scheme::Other(s),
    };
    let encoding = Encoding { scheme, transform: escape(until_nul(&row.transform)), planes };
    encoding.check().map_err(|e| Refused { field: here(), reason: Reason::Encoding(e) })?;
    Ok(encoding)
}

fn encoding_plane(
    p: &EncPlaneRow,
    field: impl Fn(&'static str) -> String,
) -> Result<PlaneSpec, Refused> {
    need(p.role.last() == Some(&0), || field("role"), || Reason::NameUnterminated)?;
    let dtype: DType = dtype_of(p.dtype).ok_or_else(|| Refused {
        field: field("dtype"),
        reason: Reason::Dtype { found: p.dtype },
    })?;
    let unsigned = |v: [i64; 2]| v.map(|x| u64::try_from(x).unwrap_or(0));
    let layout = match p.kind {
        KIND_TILED => {
            need(
                p.block.iter().all(|&b| b >= 0),
                || field("block"),
                || Reason::NegativeBlock { found: p.block },
            )?;
            PlaneLayout::Tiled { block: unsigned(p.block) }
        }
        KIND_TABLE => {
            need(
                p.extent.iter().all(|&e| e >= 1),
                || field("extent"),
                || Reason::EmptyExtent { found: p.extent },
            )?;
            PlaneLayout::Table { extent: unsigned(p.extent) }
        }
        found => return Err(Refused { field: field("kind"), reason: Reason::Kind { found } }),
    };
    Ok(PlaneSpec { role: escape(until_nul(&p.role)), dtype, layout })
}

/// Checks that an offset is inside the string section; the field's name is built for a refusal only.
type StringCheck<'a> = &'a dyn Fn(u64, &dyn Fn() -> String) -> Result<(), Refused>;

fn vocabulary(
    bytes: &[u8],
    header: &Header,
    section: &[u8],
    string: StringCheck<'_>,
) -> Result<VocabRow, Refused> {
    let (base, len) = (header.vocab_off, header.vocab_bytes);
    let small =
        || Refused { field: "vocab_bytes".into(), reason: Reason::VocabTooSmall { bytes: len } };
    if len < VOCAB_BYTES {
        return Err(small());
    }
    need(
        base.is_multiple_of(TABLE_ALIGN),
        || "vocab_off".into(),
        || Reason::Misaligned { value: base, align: TABLE_ALIGN },
    )?;
    let vocab = VocabRow::read(section).ok_or_else(small)?;
    for (k, ((name, _, align), count)) in VOCAB_ARRAYS.into_iter().zip(vocab.counts()).enumerate() {
        let Some((offset, bytes)) = vocab.array(k) else { continue };
        let field = || format!("vocab.{name}_off");
        let inside = offset >= base && offset.checked_add(bytes).is_some_and(|e| e <= base + len);
        need(inside, field, || Reason::OutsideVocab { count, offset, section: base, bytes: len })?;
        need(offset.is_multiple_of(align), field, || Reason::Misaligned { value: offset, align })?;
    }
    let array = |k| vocab.array(k).and_then(|(o, n)| slice(bytes, o, n)).unwrap_or_default();
    for (i, offset) in u64s(array(0)).enumerate() {
        string(offset, &|| format!("vocab.text[{i}]"))?;
    }
    for (i, pair) in u64s(array(3)).enumerate() {
        let (left, right) = (pair as u32, (pair >> 32) as u32);
        need(
            left.max(right) < vocab.n_tokens,
            || format!("vocab.merge[{i}]"),
            || Reason::Merge { left, right, n_tokens: vocab.n_tokens },
        )?;
    }
    for (i, step) in StepRow::rows(array(4)).enumerate() {
        for arg in [step.arg0, step.arg1] {
            string(arg, &|| format!("vocab.step[{i}]"))?;
        }
    }
    string(vocab.chat_template, &|| "vocab.chat_template".into())?;
    Ok(vocab)
}

/// The little-endian words of a table.
pub(super) fn u64s(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::role;

    #[test]
    fn plane_sizes_wrap_as_signed_numbers_and_else_equal_the_checked_ones() {
        let scale = PlaneSpec::tiled(role::SCALE, DType::BF16, [2, 16]);
        assert_eq!(plane_bytes(&scale, &[3, 5, 40]), 8 * 3 * 2);
        assert_eq!(Some(plane_bytes(&scale, &[3, 5, 40]) as u64), scale.bytes(15, 40));
        // 2^62 × 4 wraps to 0 rows; the ceiling of (2^63-1 + 15) / 16 wraps and is negative.
        let codes = PlaneSpec::tiled(role::CODES, DType::U8, [1, 1]);
        assert_eq!(plane_bytes(&codes, &[1 << 62, 4, 7]), 0);
        let wide = PlaneSpec::tiled(role::SCALE, DType::U8, [1, 16]);
        assert_eq!(plane_bytes(&wide, &[1, i64::MAX]), -576_460_752_303_423_486);
    }
}
