//! The layout of a container: every offset, and the bytes of every table, before any plane exists.

use std::collections::{BTreeMap, BTreeSet};

use super::contents::{Contents, EntrySpec, MetaValue};
use super::experts;
use super::layout::{
    DIR_BYTES, ENC_BYTES, HEADER_BYTES, KIND_TABLE, KIND_TILED, MAGIC, META_BYTES, META_FLOAT,
    META_INT, META_TEXT, NAME_BYTES, PLANE_BYTES, POOL, PROFILE_BYTES, SUB, TABLE_ALIGN, UNIT,
    VERSION, dtype_code, round_up,
};
use super::reader::PlaneAt;
use super::strings::Interner;
use super::tables::Tables;
use super::wire::{DirRow, EncPlaneRow, EncRow, Field, Header, MetaRow, PlaneRow, ProfRow};
use crate::diag::{Diagnostic, Failure, FailureKind, Problems, Result, count, size};
use crate::tensor::{Encoding, MAX_PLANES, MAX_RANK, PlaneLayout, Scheme};

/// Where everything of a container lies.
#[derive(Debug, Clone)]
pub struct Layout {
    file_bytes: u64,
    data_off: u64,
    tables: Vec<u8>,
    entries: Vec<Placed>,
    names: BTreeMap<String, usize>,
    texts: BTreeMap<String, Later>,
}

/// An entry with its place.
#[derive(Debug, Clone)]
struct Placed {
    name: String,
    row: DirRow,
    planes: Vec<PlaneAt>,
}

/// A metadata text that comes after the planes: its place in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Later {
    pub offset: u64,
    pub bytes: usize,
}

/// Largest file: radiance holds offsets in signed numbers.
const MAX_FILE: u64 = i64::MAX as u64;

impl Layout {
    /// Places everything. Strings are stored in the order metadata, entries, vocabulary, header; encodings in the
    /// order of first use; entries one after the other, in the order of [`Contents::data`], at multiples of 4096, their planes at multiples of 256.
    ///
    /// # Errors
    /// Everything that a reader would refuse or that a careful writer avoids, all together: empty or duplicate
    /// names, malformed encodings, empty extents, irregular expert groups, sizes beyond 63 bits, texts with NUL.
    pub fn plan(contents: &Contents) -> Result<Layout> {
        let mut problems = Problems::new();
        check_texts(contents, &mut problems);
        if let Some(vocab) = &contents.vocab {
            vocab.check(&mut problems);
        }
        let rows = encoding_rows(contents, &mut problems);
        let placed = place(contents, &rows, &mut problems);
        check_profile(contents, &mut problems);
        if problems.is_empty()
            && let Err(refused) = experts::check(&placed.iter().map(|p| p.row).collect::<Vec<_>>())
        {
            problems.push(Diagnostic::new("container", refused.to_string()).help(
                "the weights of one expert must have the same sizes in every expert of its layer",
            ));
        }
        let fits = "a container cannot hold these weights";
        problems.finish(FailureKind::Refused, fits, ())?;
        assemble(contents, rows, placed).ok_or_else(|| {
            Failure::plain(FailureKind::Refused, format!("{fits}: it would exceed 2^63 bytes"))
        })?
    }

    /// Size of the file in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// First byte of the data blob, which is also the first entry's.
    pub fn data_offset(&self) -> u64 {
        self.data_off
    }

    /// Number of entries.
    pub fn entries(&self) -> usize {
        self.entries.len()
    }

    /// Position of the entry of that name.
    pub fn entry(&self, name: &str) -> Option<usize> {
        self.names.get(name).copied()
    }

    /// Name of entry `entry`.
    pub fn name(&self, entry: usize) -> Option<&str> {
        self.entries.get(entry).map(|e| e.name.as_str())
    }

    /// Places of the planes of entry `entry`, in encoding order; empty for an entry that does not exist.
    pub fn planes(&self, entry: usize) -> &[PlaneAt] {
        self.entries.get(entry).map_or(&[], |e| &e.planes)
    }

    /// Place of one plane.
    pub fn plane(&self, entry: usize, plane: usize) -> Option<PlaneAt> {
        self.planes(entry).get(plane).copied()
    }

    /// The file's bytes from 0 up to the end of its last table; texts that come later are dashes.
    pub fn tables(&self) -> &[u8] {
        &self.tables
    }

    /// SHA-256 of [`Layout::tables`], which the manifest states.
    pub fn tables_digest(&self) -> [u8; 32] {
        crate::hash::sha256([self.tables()])
    }

    /// [`Layout::tables`] with one of the texts that come later; `None` when the layout has no such text of that length.
    pub fn tables_with(&self, key: &str, value: &str) -> Option<Vec<u8>> {
        let later = self.later(key).filter(|l| l.bytes == value.len())?;
        let mut tables = self.tables.clone();
        let start = usize::try_from(later.offset).ok()?;
        tables.get_mut(start..start + later.bytes)?.copy_from_slice(value.as_bytes());
        Some(tables)
    }

    pub(super) fn later(&self, key: &str) -> Option<Later> {
        self.texts.get(key).copied()
    }

    pub(super) fn all_later(&self) -> impl Iterator<Item = (&str, Later)> {
        self.texts.iter().map(|(k, v)| (k.as_str(), *v))
    }
}

fn check_texts(contents: &Contents, problems: &mut Problems) {
    let mut check = |what: &str, text: &str| {
        if text.contains('\0') {
            problems.push(Diagnostic::new(
                "container",
                format!("{what} holds NUL, which ends a string"),
            ));
        }
    };
    let header = [
        ("the architecture", &contents.arch_id),
        ("the model name", &contents.model_name),
        ("the source quantisation", &contents.quant),
        ("the recipe", &contents.recipe),
        ("the creator", &contents.created_by),
    ];
    header.iter().for_each(|(what, text)| check(what, text));
    for e in &contents.entries {
        check(&format!("the name `{}`", e.name.escape_debug()), &e.name);
        check(&format!("`{}`: its quantizer", e.name), &e.quantizer);
        check(&format!("`{}`: its options", e.name), &e.options);
    }
    for (key, value) in &contents.metadata {
        check(&format!("the metadata key `{}`", key.escape_debug()), key);
        if let MetaValue::Text(text) = value {
            check(&format!("the metadata value of `{key}`"), text);
        }
    }
    let mut seen = BTreeSet::new();
    for (key, _) in &contents.metadata {
        if key.is_empty() || !seen.insert(key) {
            let message = format!("the metadata key `{key}` is empty or given twice");
            problems.push(Diagnostic::new("container", message));
        }
    }
    let mut seen = BTreeMap::new();
    for (i, e) in contents.entries.iter().enumerate() {
        if e.name.is_empty() {
            problems.push(Diagnostic::new("container", format!("entry {i} has an empty name")));
        } else if let Some(first) = seen.insert(&e.name, i) {
            let message = format!("`{}` names entry {first} and entry {i}", e.name);
            problems.push(Diagnostic::new("container", message));
        }
    }
}

/// The encoding table in order of first use, and each entry's index into it (`u32::MAX` where it is malformed).
struct EncodingRows {
    rows: Vec<EncRow>,
    index: Vec<u32>,
}

fn encoding_rows(contents: &Contents, problems: &mut Problems) -> EncodingRows {
    let mut out = EncodingRows { rows: Vec::new(), index: Vec::new() };
    let mut known: Vec<&Encoding> = Vec::new();
    for e in &contents.entries {
        if let Some(i) = known.iter().position(|k| **k == e.encoding) {
            out.index.push(i as u32);
            continue;
        }
        match encoding_row(&e.encoding) {
            Ok(row) => {
                out.index.push(known.len() as u32);
                known.push(&e.encoding);
                out.rows.push(row);
            }
            Err(why) => {
                out.index.push(u32::MAX);
                let message = format!("`{}`: encoding {}: {why}", e.name, e.encoding_label());
                problems.push(Diagnostic::new("container", message));
            }
        }
    }
    out
}

impl EntrySpec {
    fn encoding_label(&self) -> String {
        if self.encoding.planes.is_empty() {
            "without planes".into()
        } else {
            self.encoding.to_string()
        }
    }
}

fn encoding_row(e: &Encoding) -> std::result::Result<EncRow, String> {
    e.check().map_err(|why| why.to_string())?;
    if let Scheme::Other(name) = &e.scheme
        && [Scheme::Plain.name(), Scheme::Affine.name()].contains(&name.as_str())
    {
        return Err(format!("`{name}` is no scheme of one's own"));
    }
    let mut row = EncRow {
        scheme: padded(e.scheme.name())?,
        transform: padded(&e.transform)?,
        n_planes: e.planes.len() as i32,
        reserved: 0,
        planes: [EncPlaneRow::default(); MAX_PLANES],
    };
    let signed = |v: [u64; 2]| -> std::result::Result<[i64; 2], String> {
        match (i64::try_from(v[0]), i64::try_from(v[1])) {
            (Ok(a), Ok(b)) => Ok([a, b]),
            _ => Err(format!("extent of {v:?} exceeds 2^63")),
        }
    };
    for (slot, p) in row.planes.iter_mut().zip(&e.planes) {
        slot.role = padded(&p.role)?;
        slot.dtype = dtype_code(p.dtype)
            .ok_or_else(|| format!("a container has no element type {}", p.dtype))?;
        match p.layout {
            PlaneLayout::Tiled { block } => (slot.kind, slot.block) = (KIND_TILED, signed(block)?),
            PlaneLayout::Table { extent } => {
                (slot.kind, slot.extent) = (KIND_TABLE, signed(extent)?)
            }
        }
    }
    Ok(row)
}

fn padded(name: &str) -> std::result::Result<[u8; NAME_BYTES], String> {
    let mut out = [0; NAME_BYTES];
    match out.get_mut(..name.len()) {
        Some(head) if name.len() < NAME_BYTES && !name.contains('\0') => {
            head.copy_from_slice(name.as_bytes());
            Ok(out)
        }
        _ => Err(format!(
            "`{}` is longer than {} bytes or holds NUL",
            name.escape_debug(),
            NAME_BYTES - 1
        )),
    }
}

/// Directory rows with offsets relative to the data blob.
fn place(contents: &Contents, encodings: &EncodingRows, problems: &mut Problems) -> Vec<Placed> {
    let count = contents.entries.len();
    let mut out: Vec<Option<Placed>> = (0..count).map(|_| None).collect();
    let mut end = 0u64;
    let order: Vec<usize> = match contents.data.as_slice() {
        [] => (0..count).collect(),
        data => data.to_vec(),
    };
    let distinct: BTreeSet<usize> = order.iter().copied().filter(|&i| i < count).collect();
    if order.len() != count || distinct.len() != count {
        let message = format!("the order of the data names {} of {count} entries", distinct.len());
        problems.push(Diagnostic::new("container", message));
        return Vec::new();
    }
    for at in order {
        let (Some(e), Some(&enc)) = (contents.entries.get(at), encodings.index.get(at)) else {
            continue;
        };
        let mut refuse = |message: String| {
            problems.push(Diagnostic::new("container", format!("`{}`: {message}", e.name)));
        };
        if e.layer < -1 || e.expert < -1 || e.slot < 0 || (e.expert >= 0 && e.layer < 0) {
            refuse(format!(
                "layer {}, expert {}, slot {} are out of range",
                e.layer, e.expert, e.slot
            ));
            continue;
        }
        let dims = e.shape.extents();
        if !(1..=MAX_RANK).contains(&dims.len()) {
            refuse(format!("shape {} has rank {}, not 1 to {MAX_RANK}", e.shape, dims.len()));
            continue;
        }
        // Readers count bits in signed 64-bit numbers; 64 is the widest element.
        let bits = e.shape.elements().and_then(|n| n.checked_mul(64)).filter(|&n| n <= MAX_FILE);
        if dims.contains(&0) || bits.is_none() {
            refuse(format!("shape {} has an empty extent, or too many elements", e.shape));
            continue;
        }
        let mut shape = [0i64; MAX_RANK];
        for (slot, &d) in shape.iter_mut().zip(dims) {
            *slot = d as i64; // below 2^57, as the product is
        }
        if enc == u32::MAX {
            continue; // already reported
        }
        let Some(planes) = place_planes(e, end) else {
            refuse(format!(
                "its planes do not fit into 2^63 bytes after {}, or one is empty",
                size(end)
            ));
            continue;
        };
        let (Some(first), Some(last)) = (planes.first(), planes.last()) else { continue };
        let row = DirRow {
            name: 0,
            quantizer: 0,
            options: 0,
            enc,
            rank: dims.len() as u32,
            shape,
            layer: e.layer,
            expert: e.expert,
            slot: e.slot,
            n_planes: planes.len() as u32,
            plane_first: 0,
            offset: first.offset,
            bytes: last.offset + last.bytes - first.offset,
            reserved: [0; 2],
        };
        end = last.offset + last.bytes;
        if let Some(slot) = out.get_mut(at) {
            *slot = Some(Placed { name: e.name.clone(), row, planes });
        }
    }
    // Rows of planes follow the directory, wherever the planes lie.
    let mut out: Vec<Placed> = out.into_iter().flatten().collect();
    let mut plane_first = 0u64;
    for placed in &mut out {
        placed.row.plane_first = plane_first;
        plane_first += placed.planes.len() as u64;
    }
    out
}

fn place_planes(e: &EntrySpec, end: u64) -> Option<Vec<PlaneAt>> {
    let (rows, cols) = e.shape.matrix()?;
    let mut at = round_up(end, UNIT)?;
    let mut planes = Vec::with_capacity(e.encoding.planes.len());
    for spec in &e.encoding.planes {
        let offset = round_up(at, SUB)?;
        let bytes = spec.bytes(rows, cols).filter(|&b| b > 0)?;
        at = offset.checked_add(bytes).filter(|&end| end <= MAX_FILE)?;
        planes.push(PlaneAt { offset, bytes });
    }
    Some(planes)
}

fn check_profile(contents: &Contents, problems: &mut Problems) {
    let experts: BTreeSet<(i32, i32)> =
        contents.entries.iter().filter(|e| e.expert >= 0).map(|e| (e.layer, e.expert)).collect();
    for p in &contents.profile {
        if !(0.0..=1.0).contains(&p.share) || !experts.contains(&(p.layer, p.expert)) {
            problems.push(Diagnostic::new(
                "container",
                format!(
                    "profile share {} of expert {} in layer {}: no share, or no such expert among {}",
                    p.share,
                    p.expert,
                    p.layer,
                    count(experts.len() as u64)
                ),
            ));
        }
    }
}

/// Strings, tables and header; `None` when the file would exceed 2^63 bytes.
fn assemble(
    contents: &Contents,
    encodings: EncodingRows,
    mut placed: Vec<Placed>,
) -> Option<Result<Layout>> {
    let mut strings = Interner::new();
    let mut metadata = Vec::with_capacity(contents.metadata.len());
    let mut texts = BTreeMap::new();
    for (key, value) in &contents.metadata {
        let name = strings.add(key.as_bytes());
        let (kind, value) = match value {
            MetaValue::Int(v) => (META_INT, *v as u64),
            MetaValue::Float(v) => (META_FLOAT, v.to_bits()),
            MetaValue::Text(v) => (META_TEXT, strings.add(v.as_bytes())),
            MetaValue::Later(bytes) => {
                let offset = strings.reserve(*bytes);
                texts.insert(key.clone(), Later { offset, bytes: *bytes });
                (META_TEXT, offset)
            }
        };
        metadata.push(MetaRow { key: name, kind, pad: 0, value });
    }
    for (entry, e) in placed.iter_mut().zip(&contents.entries) {
        entry.row.name = strings.add(e.name.as_bytes());
        entry.row.quantizer = strings.add(e.quantizer.as_bytes());
        entry.row.options = strings.add(e.options.as_bytes());
    }
    let vocab = contents.vocab.as_ref().map(|v| v.plan(&mut strings));
    let mut header = |text: &str| strings.add(text.as_bytes());
    let [arch_id, model_name, quant, recipe, created_by] = [
        header(&contents.arch_id),
        header(&contents.model_name),
        header(&contents.quant),
        header(&contents.recipe),
        header(&contents.created_by),
    ];
    let blob = strings.into_blob();
    let planes: Vec<PlaneAt> = placed.iter().flat_map(|p| p.planes.iter().copied()).collect();

    let mut end = HEADER_BYTES;
    let mut section = |count: usize, row: u64| -> Option<u64> {
        let offset = round_up(end, TABLE_ALIGN)?;
        end = offset.checked_add((count as u64).checked_mul(row)?)?;
        Some(offset)
    };
    let str_off = section(blob.len(), 1)?;
    let meta_off = section(metadata.len(), META_BYTES)?;
    let dir_off = section(placed.len(), DIR_BYTES)?;
    let plane_off = section(planes.len(), PLANE_BYTES)?;
    let enc_off = section(encodings.rows.len(), ENC_BYTES)?;
    let vocab_bytes = vocab.as_ref().map_or(0, super::vocab::VocabPlan::bytes);
    let vocab_off = section(usize::try_from(vocab_bytes).ok()?, 1)?;
    let prof_off = section(contents.profile.len(), PROFILE_BYTES)?;
    let data_off = round_up(end, POOL)?;
    let data_bytes = planes.iter().map(|p| p.offset + p.bytes).max().unwrap_or(0);
    let file_bytes = data_off.checked_add(data_bytes).filter(|&n| n <= MAX_FILE)?;

    for entry in &mut placed {
        entry.row.offset += data_off;
        entry.planes.iter_mut().for_each(|p| p.offset += data_off);
    }
    texts.values_mut().for_each(|t| t.offset += str_off);
    let header = Header {
        magic: MAGIC,
        version: VERSION,
        file_bytes,
        arch_id,
        model_name,
        quant,
        recipe,
        created_by,
        str_off,
        str_bytes: blob.len() as u64,
        meta_off,
        meta_count: metadata.len() as u64,
        dir_off,
        dir_count: placed.len() as u64,
        plane_off,
        plane_count: planes.len() as u64,
        enc_off,
        enc_count: encodings.rows.len() as u64,
        vocab_off,
        vocab_bytes,
        prof_off,
        prof_count: contents.profile.len() as u64,
        data_off,
        data_bytes,
        reserved: [0; 8],
    };
    let mut tables = Vec::with_capacity(usize::try_from(end).ok()?);
    let pad = |tables: &mut Vec<u8>| {
        tables.resize(tables.len().next_multiple_of(TABLE_ALIGN as usize), 0)
    };
    header.put(&mut tables);
    tables.extend_from_slice(&blob);
    pad(&mut tables);
    metadata.into_iter().for_each(|row| row.put(&mut tables));
    placed.iter().for_each(|p| p.row.put(&mut tables));
    placed
        .iter()
        .flat_map(|p| &p.planes)
        .for_each(|p| PlaneRow { offset: p.offset, bytes: p.bytes }.put(&mut tables));
    encodings.rows.iter().for_each(|row| row.put(&mut tables));
    if let Some(vocab) = vocab {
        vocab.encode(vocab_off, &mut tables);
    }
    pad(&mut tables);
    for p in &contents.profile {
        ProfRow { layer: p.layer, expert: p.expert, share: p.share, reserved: 0 }.put(&mut tables);
    }
    // The reader is the judge of what was planned.
    if let Err(refused) = Tables::parse(&tables, file_bytes) {
        let problem = Diagnostic::new("container", refused.to_string());
        return Some(Err(Failure::one(
            FailureKind::Failed,
            "the planned container would not open",
            problem,
        )));
    }
    let names = placed.iter().enumerate().map(|(i, p)| (p.name.clone(), i)).collect();
    Some(Ok(Layout { file_bytes, data_off, tables, entries: placed, names, texts }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::artifact::contents::ProfileShare;
    use crate::tensor::{DType, PlaneSpec, Shape, role};

    fn refusals(contents: &Contents) -> Vec<String> {
        let failure = Layout::plan(contents).expect_err("refused");
        assert_eq!(failure.kind, FailureKind::Refused);
        failure.problems.into_iter().map(|p| p.message).collect()
    }

    fn with(entries: Vec<EntrySpec>) -> Contents {
        Contents { entries, ..Contents::default() }
    }

    #[test]
    fn entries_and_planes_are_placed_at_their_alignments() {
        let i8 =
            Encoding::affine(DType::I8, vec![PlaneSpec::tiled(role::SCALE, DType::BF16, [1, 128])]);
        let weight =
            EntrySpec { encoding: i8, shape: Shape::from([3, 200]), ..EntrySpec::opaque("w", 1) };
        let layout = Layout::plan(&with(vec![EntrySpec::opaque("a", 5), weight])).expect("plan");
        assert_eq!(layout.data_offset(), POOL);
        assert_eq!(layout.plane(0, 0), Some(PlaneAt { offset: POOL, bytes: 5 }));
        assert_eq!(layout.plane(1, 0), Some(PlaneAt { offset: POOL + 4096, bytes: 600 }));
        assert_eq!(layout.plane(1, 1), Some(PlaneAt { offset: POOL + 4096 + 768, bytes: 12 }));
        assert_eq!(layout.plane(1, 2), None);
        assert_eq!(layout.file_bytes(), POOL + 4096 + 780);
        assert_eq!((layout.entry("w"), layout.name(0)), (Some(1), Some("a")));
    }

    #[test]
    fn an_empty_container_is_its_tables() {
        let layout = Layout::plan(&Contents::default()).expect("plan");
        assert_eq!((layout.file_bytes(), layout.tables().len()), (POOL, 256));
    }

    #[test]
    fn every_problem_is_reported_at_once() {
        let mut contents = with(vec![
            EntrySpec::opaque("", 1),
            EntrySpec::opaque("twice", 1),
            EntrySpec::opaque("twice", 1),
            EntrySpec::opaque("nul\0", 1),
            EntrySpec::opaque("empty", 0),
            EntrySpec { shape: Shape::from([1; 7]), ..EntrySpec::opaque("rank", 1) },
            EntrySpec { shape: Shape::from([]), ..EntrySpec::opaque("scalar", 1) },
            EntrySpec { shape: Shape::from([1 << 40, 1 << 20]), ..EntrySpec::opaque("huge", 1) },
            EntrySpec { layer: -2, ..EntrySpec::opaque("layer", 1) },
            EntrySpec { expert: 0, ..EntrySpec::opaque("expert", 1) },
            EntrySpec { encoding: Encoding::plain(DType::F64), ..EntrySpec::opaque("f64", 1) },
            EntrySpec {
                encoding: Encoding {
                    scheme: Scheme::Other("x".repeat(24)),
                    ..Encoding::plain(DType::U8)
                },
                ..EntrySpec::opaque("scheme", 1)
            },
            EntrySpec {
                encoding: Encoding {
                    scheme: Scheme::Other("plain".into()),
                    ..Encoding::plain(DType::U8)
                },
                ..EntrySpec::opaque("disguise", 1)
            },
        ]);
        contents.metadata = vec![
            ("k".into(), MetaValue::Int(1)),
            ("k".into(), MetaValue::Text("\0".into())),
            (String::new(), MetaValue::Int(1)),
        ];
        contents.profile = vec![ProfileShare { layer: 0, expert: 0, share: 0.5 }];
        insta::assert_snapshot!(refusals(&contents).join("\n"), @r"
        the name `nul\0` holds NUL, which ends a string
        the metadata value of `k` holds NUL, which ends a string
        the metadata key `k` is empty or given twice
        the metadata key `` is empty or given twice
        entry 0 has an empty name
        `twice` names entry 1 and entry 2
        `f64`: encoding f64: a container has no element type f64
        `scheme`: encoding xxxxxxxxxxxxxxxxxxxxxxxx:codes=u8[1x1]: `xxxxxxxxxxxxxxxxxxxxxxxx` is longer than 23 bytes or holds NUL
        `disguise`: encoding plain:codes=u8[1x1]: `plain` is no scheme of one's own
        `empty`: shape [0] has an empty extent, or too many elements
        `rank`: shape [1, 1, 1, 1, 1, 1, 1] has rank 7, not 1 to 6
        `scalar`: shape [] has rank 0, not 1 to 6
        `huge`: shape [1099511627776, 1048576] has an empty extent, or too many elements
        `layer`: layer -2, expert -1, slot 0 are out of range
        `expert`: layer -1, expert 0, slot 0 are out of range
        profile share 0.5 of expert 0 in layer 0: no share, or no such expert among 1
        ");
    }

    #[test]
    fn experts_of_unequal_size_are_refused_with_the_way_out() {
        let expert =
            |e, n| EntrySpec { layer: 0, expert: e, ..EntrySpec::opaque(format!("e{e}"), n) };
        assert!(Layout::plan(&with(vec![expert(0, 9), expert(1, 9), expert(2, 9)])).is_ok());
        assert_eq!(
            refusals(&with(vec![expert(0, 9), expert(1, 9), expert(2, 8)])),
            [
                "layer 0 experts, entry[2]: offsets or sizes of expert 2 in layer 0 are not expert 0's plus 2 × 4096"
            ]
        );
    }
}
