//! Importance of columns from a file of llama.cpp's `llama-imatrix`: the mean square of what each column of a weight
//! is multiplied by, over a calibration text.
//!
//! Two forms exist; all numbers are little-endian.
//!
//! | form | layout |
//! |---|---|
//! | legacy (`.dat`) | i32 entries; each: i32 length, name, i32 calls, i32 values, f32 sums; then, if present, i32 chunks, i32 length, name of the text |
//! | GGUF, since 2025-07 | version 2 or 3; for every weight the f32 tensors `NAME.in_sum2` (columns × matrices) and `NAME.counts` (1 × matrices); others are ignored |
//!
//! The legacy form holds means times calls, one call count for the whole entry, and the matrices of stacked experts
//! one after the other. A matrix that saw no call says nothing: all its columns count 1.

use std::collections::BTreeMap;

use crate::diag;

/// Most entries, tensors or keys of a file: no model has as many weights.
const MAX_ENTRIES: u64 = 1 << 20;

/// Longest name of a weight.
const MAX_NAME: u64 = 4096;

/// Arrays within arrays that a GGUF value may hold; llama.cpp writes one level.
const MAX_NESTING: u32 = 4;

/// Why a file gives no importances.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a usable imatrix: {0}")]
pub struct ImportanceError(String);

/// Mean squares by weight.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Importance {
    entries: BTreeMap<String, Entry>,
}

#[derive(Debug, Clone, PartialEq)]
struct Entry {
    /// Means, matrix after matrix.
    means: Vec<f32>,
    /// Matrices, where the file says so.
    matrices: Option<usize>,
}

fn refuse<T>(why: impl Into<String>) -> Result<T, ImportanceError> {
    Err(ImportanceError(why.into()))
}

impl Importance {
    /// Reads the bytes of a file, of either form.
    ///
    /// # Errors
    /// Truncated or inconsistent contents, sums that are negative, NaN or infinite, a weight twice.
    pub fn parse(bytes: &[u8]) -> Result<Importance, ImportanceError> {
        let importance = match bytes.strip_prefix(b"GGUF") {
            Some(rest) => gguf(bytes, rest)?,
            None => legacy(bytes)?,
        };
        if importance.entries.is_empty() {
            return refuse("it names no weight");
        }
        Ok(importance)
    }

    /// Names of the weights, sorted, without the `.weight` that GGUF names end in.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Importance of the `cols` columns of matrix `matrix` (an expert; 0 for a plain weight) of the weight `name`,
    /// with or without a final `.weight`. `None` for weights, matrices and widths that the file does not have. A
    /// weight of one matrix answers for every expert.
    pub fn columns(&self, name: &str, matrix: usize, cols: usize) -> Option<&[f32]> {
        let entry = self.entries.get(base(name))?;
        if cols == 0 || !entry.means.len().is_multiple_of(cols) {
            return None;
        }
        let matrices = entry.means.len() / cols;
        if entry.matrices.is_some_and(|n| n != matrices) {
            return None;
        }
        let at = if matrices == 1 { 0 } else { matrix };
        entry.means.get(at.checked_mul(cols)?..)?.get(..cols)
    }

    /// How many values the file has for the weight `name`, all matrices together.
    pub fn values(&self, name: &str) -> Option<usize> {
        self.entries.get(base(name)).map(|entry| entry.means.len())
    }

    fn insert(&mut self, name: &str, entry: Entry) -> Result<(), ImportanceError> {
        let name = base(name);
        if let Some(at) = entry.means.iter().position(|v| !v.is_finite() || *v < 0.0) {
            return refuse(format!("`{name}` holds {} for column {at}", entry.means[at]));
        }
        if self.entries.insert(name.to_owned(), entry).is_some() {
            return refuse(format!("`{name}` occurs twice"));
        }
        Ok(())
    }
}

fn base(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}

/// Sums over counts. A matrix without calls counts 1 in every column.
fn means(sums: &[f32], counts: &[f32]) -> Vec<f32> {
    let width = sums.len() / counts.len().max(1);
    sums.chunks(width.max(1))
        .zip(counts)
        .flat_map(|(sums, &n)| sums.iter().map(move |s| if n > 0.0 { s / n } else { 1.0 }))
        .collect()
}

/// The bytes not yet read.
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: u64) -> Result<&'a [u8], ImportanceError> {
        match usize::try_from(n).ok().and_then(|n| self.rest.split_at_checked(n)) {
            Some((taken, rest)) => {
                self.rest = rest;
                Ok(taken)
            }
            None => refuse(format!(
                "it ends {} bytes before what it announces",
                diag::count(n - self.rest.len() as u64)
            )),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ImportanceError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64)?);
        Ok(out)
    }

    fn u32(&mut self) -> Result<u32, ImportanceError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, ImportanceError> {
        self.array().map(u64::from_le_bytes)
    }

    /// A count of the legacy form: at least 0, at most `most`.
    fn count(&mut self, what: &str, most: u64) -> Result<u64, ImportanceError> {
        let n = i32::from_le_bytes(self.array()?);
        match u64::try_from(n) {
            Ok(n) if n <= most => Ok(n),
            _ => refuse(format!("{n} {what}, not 0 to {}", diag::count(most))),
        }
    }

    fn name(&mut self, length: u64) -> Result<&'a str, ImportanceError> {
        if length > MAX_NAME {
            return refuse(format!("a name of {} bytes", diag::count(length)));
        }
        match std::str::from_utf8(self.take(length)?) {
            Ok(name) => Ok(name),
            Err(_) => refuse("a name that is not UTF-8"),
        }
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn legacy(bytes: &[u8]) -> Result<Importance, ImportanceError> {
    let mut reader = Reader { rest: bytes };
    let mut out = Importance::default();
    let entries = reader.count("entries", MAX_ENTRIES)?;
    for _ in 0..entries {
        let length = reader.count("bytes of a name", MAX_NAME)?;
        let name = reader.name(length)?;
        let calls = reader.count("calls", i32::MAX as u64)?;
        let values = reader.count("values", i32::MAX as u64)?;
        // The bytes are there before anything of their size is allocated.
        let sums = floats(reader.take(values * 4)?);
        if sums.is_empty() {
            return refuse(format!("`{name}` has no values"));
        }
        out.insert(name, Entry { means: means(&sums, &[calls as f32]), matrices: None })?;
    }
    // What follows, from 2024 on, is the number of chunks and the name of the text.
    Ok(out)
}

/// A tensor of a GGUF file.
struct Tensor {
    dims: Vec<u64>,
    offset: u64,
}

fn gguf(file: &[u8], rest: &[u8]) -> Result<Importance, ImportanceError> {
    let mut reader = Reader { rest };
    let version = reader.u32()?;
    if !(2..=3).contains(&version) {
        return refuse(format!("GGUF version {version}, not 2 or 3"));
    }
    let (tensors, keys) = (reader.u64()?, reader.u64()?);
    if tensors.max(keys) > MAX_ENTRIES {
        return refuse(format!("{} tensors or keys", diag::count(tensors.max(keys))));
    }
    let mut alignment = 32;
    for _ in 0..keys {
        let length = reader.u64()?;
        let key = reader.name(length)?;
        let kind = reader.u32()?;
        let value = skip_value(&mut reader, kind, 0)?;
        if key == "general.alignment" {
            alignment = match <[u8; 4]>::try_from(value).map(u32::from_le_bytes) {
                Ok(n) if kind == 4 && n.is_power_of_two() && n >= 4 => u64::from(n),
                _ => return refuse("`general.alignment` is no power of two of 32 bits"),
            };
        }
    }
    let mut found: BTreeMap<&str, Tensor> = BTreeMap::new();
    for _ in 0..tensors {
        let length = reader.u64()?;
        let name = reader.name(length)?;
        let rank = reader.u32()?;
        if rank > 4 {
            return refuse(format!("`{name}` has {rank} dimensions; GGUF has at most 4"));
        }
        let dims = (0..rank).map(|_| reader.u64()).collect::<Result<Vec<u64>, _>>()?;
        let kind = reader.u32()?;
        let offset = reader.u64()?;
        if !name.ends_with(".in_sum2") && !name.ends_with(".counts") {
            continue;
        }
        if kind != 0 {
            return refuse(format!("`{name}` has type {kind}, not 0 (f32)"));
        }
        if found.insert(name, Tensor { dims, offset }).is_some() {
            return refuse(format!("`{name}` occurs twice"));
        }
    }
    let header = (file.len() - reader.rest.len()) as u64;
    let data = header.next_multiple_of(alignment);
    let read = |name: &str, tensor: &Tensor| -> Result<Vec<f32>, ImportanceError> {
        let bytes = tensor.dims.iter().try_fold(4u64, |n, d| n.checked_mul(*d));
        let start = data.checked_add(tensor.offset);
        let range = start.zip(bytes).and_then(|(start, n)| {
            Some(usize::try_from(start).ok()?..usize::try_from(start.checked_add(n)?).ok()?)
        });
        match range.and_then(|range| file.get(range)) {
            Some(bytes) => Ok(floats(bytes)),
            None => refuse(format!("the data of `{name}` lie outside the file")),
        }
    };
    let mut out = Importance::default();
    for (name, tensor) in &found {
        let Some(weight) = name.strip_suffix(".in_sum2") else { continue };
        let counts_name = format!("{weight}.counts");
        let Some(counts) = found.get(counts_name.as_str()) else {
            return refuse(format!("`{weight}` has sums and no counts"));
        };
        let (sums, counts) = (read(name, tensor)?, read(&counts_name, counts)?);
        if counts.is_empty() || sums.is_empty() || !sums.len().is_multiple_of(counts.len()) {
            return refuse(format!(
                "`{weight}` has {} sums for {} counts",
                diag::count(sums.len() as u64),
                diag::count(counts.len() as u64)
            ));
        }
        if let Some(n) = counts.iter().find(|n| !n.is_finite()) {
            return refuse(format!("`{weight}` was called {n} times"));
        }
        let matrices = Some(counts.len());
        out.insert(weight, Entry { means: means(&sums, &counts), matrices })?;
    }
    Ok(out)
}

/// Passes over a value of a GGUF key and returns its bytes.
fn skip_value<'a>(
    reader: &mut Reader<'a>,
    kind: u32,
    depth: u32,
) -> Result<&'a [u8], ImportanceError> {
    let before = reader.rest;
    let width = |kind: u32| match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    };
    match kind {
        8 => {
            let n = reader.u64()?;
            reader.take(n)?;
        }
        9 if depth < MAX_NESTING => {
            let (inner, n) = (reader.u32()?, reader.u64()?);
            match width(inner) {
                Some(width) => {
                    let Some(bytes) = n.checked_mul(width) else {
                        return refuse("an array beyond 64 bits");
                    };
                    reader.take(bytes)?;
                }
                // Each element takes at least 8 bytes, so the file's length bounds the loop.
                None => {
                    for _ in 0..n {
                        skip_value(reader, inner, depth + 1)?;
                    }
                }
            }
        }
        kind => match width(kind) {
            Some(width) => {
                reader.take(width)?;
            }
            None => return refuse(format!("a value of type {kind}, which GGUF does not have")),
        },
    }
    Ok(&before[..before.len() - reader.rest.len()])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use testkit::imatrix::{gguf as gguf_file, legacy as legacy_file};

    use super::*;

    fn experts() -> Vec<u8> {
        gguf_file(&[
            ("blk.0.ffn_up_exps.weight.in_sum2", &[3, 2], &[2.0, 4.0, 6.0, 9.0, 9.0, 9.0]),
            ("blk.0.ffn_up_exps.weight.in_sum", &[3, 2], &[-1.0; 6]),
            ("blk.0.ffn_up_exps.weight.counts", &[1, 2], &[2.0, 0.0]),
            ("blk.0.attn_q.weight.in_sum2", &[2, 1], &[10.0, 5.0]),
            ("blk.0.attn_q.weight.counts", &[1, 1], &[5.0]),
        ])
    }

    #[test]
    fn a_legacy_file_gives_sums_over_calls() {
        let bytes = legacy_file(&[
            ("blk.0.attn_q.weight", 4, &[8.0, 2.0, 0.0]),
            ("blk.1.ffn_down_exps.weight", 2, &[2.0, 4.0, 6.0, 8.0]),
        ]);
        let importance = Importance::parse(&bytes).expect("a file");
        assert_eq!(importance.names().collect::<Vec<_>>(), ["blk.0.attn_q", "blk.1.ffn_down_exps"]);
        assert_eq!(importance.columns("blk.0.attn_q.weight", 0, 3), Some(&[2.0, 0.5, 0.0][..]));
        assert_eq!(importance.columns("blk.0.attn_q", 9, 3), Some(&[2.0, 0.5, 0.0][..]));
        assert_eq!(importance.columns("blk.1.ffn_down_exps", 1, 2), Some(&[3.0, 4.0][..]));
        assert_eq!(importance.columns("blk.1.ffn_down_exps", 2, 2), None);
        assert_eq!(importance.columns("blk.0.attn_q", 0, 2), None);
        assert_eq!(importance.columns("blk.7.attn_q", 0, 3), None);
        // The oldest files end after the entries.
        let end = bytes.len() - 4 - 4 - "wiki.txt".len();
        assert_eq!(Importance::parse(&bytes[..end]), Ok(importance));
    }

    #[test]
    fn a_gguf_file_gives_sums_over_each_experts_count_and_1_where_there_is_none() {
        let importance = Importance::parse(&experts()).expect("a file");
        assert_eq!(importance.columns("blk.0.ffn_up_exps", 0, 3), Some(&[1.0, 2.0, 3.0][..]));
        assert_eq!(importance.columns("blk.0.ffn_up_exps", 1, 3), Some(&[1.0, 1.0, 1.0][..]));
        assert_eq!(importance.columns("blk.0.ffn_up_exps", 0, 6), None);
        assert_eq!(importance.columns("blk.0.attn_q.weight", 3, 2), Some(&[2.0, 1.0][..]));
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said() {
        let why = |bytes: &[u8]| Importance::parse(bytes).expect_err("refused").to_string();
        assert!(why(b"").ends_with("it ends 4 bytes before what it announces"));
        assert!(why(&0i32.to_le_bytes()).ends_with("it names no weight"));
        assert!(why(&(-1i32).to_le_bytes()).ends_with("-1 entries, not 0 to 1,048,576"));
        let mut huge = legacy_file(&[("a", 1, &[1.0])]);
        huge[13..17].copy_from_slice(&i32::MAX.to_le_bytes());
        assert!(why(&huge).contains("before what it announces"), "{}", why(&huge));
        assert!(why(&legacy_file(&[("a", 1, &[-1.0])])).ends_with("`a` holds -1 for column 0"));
        assert!(why(&legacy_file(&[("a", 1, &[f32::NAN])])).contains("`a` holds NaN"));
        assert!(why(&legacy_file(&[("a", 1, &[])])).ends_with("`a` has no values"));
        assert!(
            why(&legacy_file(&[("a", 1, &[1.0]), ("a.weight", 1, &[1.0])]))
                .ends_with("`a` occurs twice")
        );
        assert!(why(b"GGUF\x01\0\0\0").ends_with("GGUF version 1, not 2 or 3"));
        let lone = gguf_file(&[("a.in_sum2", &[2, 1], &[1.0, 1.0])]);
        assert!(why(&lone).ends_with("`a` has sums and no counts"));
        let uneven = gguf_file(&[("a.in_sum2", &[3], &[1.0; 3]), ("a.counts", &[2], &[1.0; 2])]);
        assert!(why(&uneven).ends_with("`a` has 3 sums for 2 counts"));
        let beyond =
            gguf_file(&[("a.in_sum2", &[u64::MAX, 8], &[1.0]), ("a.counts", &[1], &[1.0])]);
        assert!(why(&beyond).ends_with("the data of `a.in_sum2` lie outside the file"));
        let file = experts();
        assert!(why(&file[..file.len() - 32]).contains("lie outside the file"));
    }

    proptest! {
        #[test]
        fn no_damage_makes_the_reader_panic(at in 0usize..1000, byte in any::<u8>(), cut in 0usize..1000) {
            for mut bytes in [experts(), legacy_file(&[("blk.0.attn_q.weight", 4, &[8.0, 2.0, 0.0])])] {
                let at = at % bytes.len();
                bytes[at] = byte;
                let _ = Importance::parse(&bytes);
                let _ = Importance::parse(&bytes[..cut % bytes.len()]);
            }
        }
    }
}
