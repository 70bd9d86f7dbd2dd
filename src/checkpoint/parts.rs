//! Weights assembled from the bytes of one or more checkpoint tensors.

use std::borrow::Cow;
use std::io;
use std::ops::Range;

use super::shard::Shard;
use crate::model::{Part, Weight};
use crate::tensor::{DType, Shape, TensorSource};

/// A tensor's place in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// Which shard.
    pub shard: usize,
    /// First byte in the file.
    pub begin: u64,
    /// First byte after the tensor.
    pub end: u64,
    /// What a converter did to it, which reading undoes.
    pub change: Change,
}

/// What a converter did to the tensor of the original checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Change {
    /// Nothing.
    #[default]
    None,
    /// llama.cpp's order of query and key rows. Rotary embedding turns pairs of rows of a head: rows `i` and
    /// `i + half` in Hugging Face's weights, neighbours `2i` and `2i + 1` here.
    Pairs {
        /// Heads that the rows are divided into.
        heads: u64,
    },
    /// 1 was added to every f32 value: llama.cpp stores Gemma's norms as the factors that they stand for.
    PlusOne,
}

impl Place {
    /// Where row `r` of `rows` lies among the stored rows.
    pub fn stored_row(&self, r: u64, rows: u64) -> u64 {
        match self.change {
            Change::Pairs { heads } => {
                let head = rows.checked_div(heads).unwrap_or(0);
                let half = head / 2;
                let (Some(within), true) = (r.checked_rem(head), half > 0) else { return r };
                r - within + 2 * (within % half) + within / half
            }
            Change::None | Change::PlusOne => r,
        }
    }

    /// The fewest whole heads whose rows hold the rows `range` of `rows`; the range itself where rows are in order.
    pub fn stored_range(&self, range: Range<u64>, rows: u64) -> Range<u64> {
        match self.change {
            Change::Pairs { heads } => {
                let head = rows.checked_div(heads).unwrap_or(0).max(1);
                let end = range.end.div_ceil(head).saturating_mul(head).min(rows);
                range.start / head * head..end
            }
            Change::None | Change::PlusOne => range,
        }
    }
}

/// A run of bytes of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Run {
    /// Which shard.
    pub shard: usize,
    /// Bytes in that file.
    pub file: Range<u64>,
    /// Where they begin in the weight.
    pub at: u64,
}

/// A weight's bytes: runs of files, one after the other.
pub(super) struct Assembled<'a> {
    shards: &'a [Shard],
    dtype: DType,
    shape: Shape,
    rows: u64,
    row_bytes: u64,
    runs: Vec<Run>,
}

impl std::fmt::Debug for Assembled<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Assembled")
            .field("dtype", &self.dtype)
            .field("shape", &self.shape)
            .field("runs", &self.runs)
            .finish_non_exhaustive()
    }
}

/// The runs of bytes that make up a weight, in the order of its rows. Neighbours in one file become one run.
///
/// `place` finds a tensor by name with its element type and shape.
///
/// # Errors
/// `InvalidData` when the weight does not fit the checkpoint: a part that is absent, of another element type, with an
/// index past dimension 0, or parts whose rows or columns do not add up to the weight's shape.
pub(super) fn runs<'c>(
    weight: &Weight,
    place: impl Fn(&str) -> Option<(DType, &'c Shape, Place)>,
) -> io::Result<Vec<Run>> {
    let wrong = |what: String| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{}: {what}", weight.name))
    };
    let Some(width) = weight.dtype.bytes() else {
        return Err(wrong(format!(
            "{} elements are smaller than a byte and have no rows",
            weight.dtype
        )));
    };
    if weight.parts.is_empty() {
        return Err(wrong("made of no checkpoint tensor".to_owned()));
    }
    let (_, cols) = weight
        .shape
        .matrix()
        .ok_or_else(|| wrong(format!("shape {} exceeds 64 bits", weight.shape)))?;
    let total = weight
        .shape
        .elements()
        .and_then(|n| n.checked_mul(width))
        .ok_or_else(|| wrong(format!("shape {} exceeds 64 bits", weight.shape)))?;
    let mut runs: Vec<Run> = Vec::with_capacity(weight.parts.len());
    let mut at = 0u64;
    for part in &weight.parts {
        let (dtype, shape, place) = place(&part.tensor)
            .ok_or_else(|| wrong(format!("no tensor {} in the checkpoint", part.tensor)))?;
        if dtype != weight.dtype {
            return Err(wrong(format!("{} is {dtype}, the weight {}", part.tensor, weight.dtype)));
        }
        let (shape, file) = slice(part, shape, place).map_err(&wrong)?;
        // A single part may be seen under another shape of as many elements (a patch convolution as a matrix);
        // joined parts must share their columns, or the rows of one would run into those of the next.
        let joined = weight.parts.len() > 1 && weight.shape.rank() > 1;
        if joined && shape.matrix().is_none_or(|(_, c)| c != cols) {
            return Err(wrong(format!(
                "part {} has shape {shape}, and rows of {cols} are joined",
                part.tensor
            )));
        }
        // Rows in another order are runs of their own.
        let rows = match place.change {
            Change::Pairs { .. } => shape.extents().first().copied().unwrap_or(1).max(1),
            Change::None | Change::PlusOne => 1,
        };
        let bytes = (file.end - file.start) / rows;
        for r in 0..rows {
            let begin = file.start + place.stored_row(r, rows) * bytes;
            let file = begin..begin + bytes;
            match runs.last_mut() {
                Some(last) if last.shard == place.shard && last.file.end == file.start => {
                    last.file.end = file.end
                }
                _ => runs.push(Run { shard: place.shard, file, at }),
            }
            at = at
                .checked_add(bytes)
                .ok_or_else(|| wrong("its parts exceed 64 bits of size".to_owned()))?;
        }
    }
    if at != total {
        return Err(wrong(format!(
            "its parts hold {at} bytes, shape {} of {} takes {total}",
            weight.shape, weight.dtype
        )));
    }
    Ok(runs)
}

/// Shape and bytes of a part: the whole tensor, or one index of its dimension 0.
fn slice(part: &Part, shape: &Shape, place: Place) -> Result<(Shape, Range<u64>), String> {
    let Some(index) = part.index else {
        return Ok((shape.clone(), place.begin..place.end));
    };
    let Some((&count, inner)) = shape.extents().split_first() else {
        return Err(format!("{} is a scalar and has no index {index}", part.tensor));
    };
    if index >= count {
        return Err(format!(
            "{} has {count} entries along dimension 0, no index {index}",
            part.tensor
        ));
    }
    // The header's check makes the tensor's bytes a multiple of its first extent.
    let each = (place.end - place.begin) / count;
    let begin = place.begin + each * index;
    Ok((Shape::from(inner), begin..begin + each))
}

impl<'a> Assembled<'a> {
    /// A weight over its runs.
    pub fn new(weight: &Weight, shards: &'a [Shard], runs: Vec<Run>) -> io::Result<Assembled<'a>> {
        let geometry = weight
            .shape
            .matrix()
            .and_then(|(rows, cols)| Some((rows, cols.checked_mul(weight.dtype.bytes()?)?)));
        let (rows, row_bytes) = geometry.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{}: no rows of whole bytes", weight.name),
            )
        })?;
        Ok(Assembled {
            shards,
            dtype: weight.dtype,
            shape: weight.shape.clone(),
            rows,
            row_bytes,
            runs,
        })
    }

    fn file_bytes(&self, shard: usize, range: Range<u64>) -> io::Result<&'a [u8]> {
        self.shards
            .get(shard)
            .and_then(|s| s.bytes(range))
            .ok_or_else(|| io::Error::other("a run outside its file"))
    }
}

/// The parts of `runs` that cover the bytes `wanted` of the weight, as file ranges in order.
pub(super) fn covering(
    runs: &[Run],
    wanted: Range<u64>,
) -> impl Iterator<Item = (usize, Range<u64>)> + '_ {
    let first =
        runs.partition_point(|run| run.at + (run.file.end - run.file.start) <= wanted.start);
    runs.iter().skip(first).take_while(move |run| run.at < wanted.end).map(move |run| {
        let skip = wanted.start.saturating_sub(run.at);
        let length = (run.file.end - run.file.start).min(wanted.end - run.at);
        (run.shard, run.file.start + skip..run.file.start + length)
    })
}

/// Whether a weight of so many rows has these.
fn within(range: &Range<u64>, rows: u64) -> io::Result<()> {
    if range.start <= range.end && range.end <= rows {
        return Ok(());
    }
    let what = format!("rows {}..{} of a weight with {rows} rows", range.start, range.end);
    Err(io::Error::new(io::ErrorKind::InvalidInput, what))
}

impl TensorSource for Assembled<'_> {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn rows(&self, range: Range<u64>) -> io::Result<Cow<'_, [u8]>> {
        within(&range, self.rows)?;
        // No overflow: rows × row_bytes is the weight's size, checked when the runs were made.
        let wanted = range.start * self.row_bytes..range.end * self.row_bytes;
        if wanted.is_empty() {
            return Ok(Cow::Borrowed(&[]));
        }
        let mut pieces = covering(&self.runs, wanted.clone());
        let Some((shard, file)) = pieces.next() else {
            return Err(io::Error::other("rows outside the runs"));
        };
        let first = self.file_bytes(shard, file)?;
        let total = usize::try_from(wanted.end - wanted.start).map_err(io::Error::other)?;
        if first.len() == total {
            return Ok(Cow::Borrowed(first));
        }
        let mut bytes = Vec::with_capacity(total);
        bytes.extend_from_slice(first);
        for (shard, file) in pieces {
            bytes.extend_from_slice(self.file_bytes(shard, file)?);
        }
        if bytes.len() != total {
            return Err(io::Error::other("rows outside the runs"));
        }
        Ok(Cow::Owned(bytes))
    }
}

/// The f32 values of a source, each less 1.
#[derive(Debug)]
pub(super) struct LessOne<'a>(pub Assembled<'a>);

impl TensorSource for LessOne<'_> {
    fn dtype(&self) -> DType {
        DType::F32
    }

    fn shape(&self) -> &Shape {
        self.0.shape()
    }

    fn rows(&self, range: Range<u64>) -> io::Result<Cow<'_, [u8]>> {
        let stored = self.0.rows(range)?;
        let less = |b: &[u8; 4]| (f32::from_le_bytes(*b) - 1.0).to_le_bytes();
        Ok(Cow::Owned(stored.as_chunks::<4>().0.iter().flat_map(less).collect()))
    }
}

/// Sources one below the other: parts of a weight of which some are quantized.
pub(super) struct Joined<'a> {
    dtype: DType,
    shape: Shape,
    /// First row of each part in the weight.
    parts: Vec<(u64, Box<dyn TensorSource + 'a>)>,
    rows: u64,
}

impl<'a> Joined<'a> {
    /// A weight over the sources of its parts, each with its rows.
    ///
    /// # Errors
    /// `InvalidData` when types, columns or rows are not those of the weight.
    pub fn new(
        weight: &Weight,
        sources: Vec<(u64, Box<dyn TensorSource + 'a>)>,
    ) -> io::Result<Joined<'a>> {
        let wrong = |what: String| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{}: {what}", weight.name))
        };
        let (rows, cols) = weight
            .shape
            .matrix()
            .ok_or_else(|| wrong(format!("shape {} exceeds 64 bits", weight.shape)))?;
        let mut parts = Vec::with_capacity(sources.len());
        let mut first = 0u64;
        for (count, source) in sources {
            if source.dtype() != weight.dtype {
                let found = source.dtype();
                return Err(wrong(format!("a part is {found}, the weight {}", weight.dtype)));
            }
            if source.shape().matrix().is_none_or(|(_, c)| c != cols) {
                let shape = source.shape();
                return Err(wrong(format!(
                    "a part has shape {shape}, and rows of {cols} are joined"
                )));
            }
            parts.push((first, source));
            first = first
                .checked_add(count)
                .ok_or_else(|| wrong("its parts exceed 64 bits of rows".to_owned()))?;
        }
        if first != rows {
            return Err(wrong(format!(
                "its parts have {first} rows, shape {} {rows}",
                weight.shape
            )));
        }
        Ok(Joined { dtype: weight.dtype, shape: weight.shape.clone(), parts, rows })
    }
}

impl TensorSource for Joined<'_> {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn rows(&self, range: Range<u64>) -> io::Result<Cow<'_, [u8]>> {
        within(&range, self.rows)?;
        let mut out: Cow<'_, [u8]> = Cow::Borrowed(&[]);
        for (n, (first, source)) in self.parts.iter().enumerate() {
            let end = self.parts.get(n + 1).map_or(self.rows, |(next, _)| *next);
            let (start, end) = (range.start.max(*first), range.end.min(end));
            if start >= end {
                continue;
            }
            let found = source.rows(start - first..end - first)?;
            if out.is_empty() {
                out = found;
            } else {
                out.to_mut().extend_from_slice(&found);
            }
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_head_go_from_neighbours_to_halves() {
        let place = Place { shard: 0, begin: 0, end: 0, change: Change::Pairs { heads: 2 } };
        let order: Vec<u64> = (0..8).map(|r| place.stored_row(r, 8)).collect();
        // Hugging Face's rows 0 1 | 2 3 of a head of four are llama.cpp's 0 2 | 1 3.
        assert_eq!(order, [0, 2, 1, 3, 4, 6, 5, 7]);
        assert_eq!(place.stored_range(1..2, 8), 0..4);
        assert_eq!(place.stored_range(3..5, 8), 0..8);
        let plain = Place { change: Change::None, ..place };
        assert_eq!(plain.stored_row(5, 8), 5);
        assert_eq!(plain.stored_range(1..2, 8), 1..2);
    }
}
