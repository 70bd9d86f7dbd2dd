//! A weight's planes as pieces: whole rows go in and come out, whatever the cut.

use std::borrow::Cow;
use std::io::{self, BufRead};
use std::ops::Range;

use crate::hash;
use crate::tensor::{Encoding, PlanePiece, Shape, Slice};

/// Bytes of a plane that are put together at a time.
const CHUNK: u64 = 1 << 20;

/// Where the bytes of a cut weight's planes lie among its pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pieces {
    /// For every plane, its pieces in the order of the cut.
    planes: Vec<Vec<PlanePiece>>,
}

/// Reads bytes of a piece's plane: piece, plane, first byte, number of bytes.
pub type Read<'r, 'b> = dyn Fn(usize, usize, u64, u64) -> io::Result<Cow<'b, [u8]>> + 'r;

/// Takes bytes of a piece's plane: piece, plane, first byte, bytes.
pub type Put<'p> = dyn FnMut(usize, usize, u64, &[u8]) -> io::Result<()> + 'p;

fn overflow() -> io::Error {
    io::Error::from(io::ErrorKind::InvalidInput)
}

/// Rows of a whole plane, and how many of them are read at a time.
fn steps(pieces: &[PlanePiece]) -> (u64, u64) {
    let rows = pieces.iter().map(|p| p.first_row + p.rows).max().unwrap_or(0);
    let width = pieces.first().map_or(1, |p| p.whole_row.max(1));
    (rows, (CHUNK / width).max(1))
}

impl Pieces {
    /// The pieces of a weight, of which the slices cover everything; `None` when a slice passes the weight's end or cuts
    /// a block in two.
    pub fn new(encoding: &Encoding, whole: &Shape, slices: &[Slice]) -> Option<Pieces> {
        let plane = |spec| slices.iter().map(|s| s.plane(spec, whole)).collect::<Option<Vec<_>>>();
        Some(Pieces { planes: encoding.planes.iter().map(plane).collect::<Option<_>>()? })
    }

    /// Bytes of one piece that are not padding.
    pub fn held(&self, piece: usize) -> u64 {
        let all = self.planes.iter().filter_map(|p| p.get(piece));
        all.fold(0, |n, p| n.saturating_add(p.rows.saturating_mul(p.bytes)))
    }

    /// The rows `range` of one plane of the whole weight; borrowed where one piece holds them together.
    ///
    /// # Errors
    /// A plane that does not exist, slices that leave a gap, or the reader's error.
    pub fn rows<'b>(
        &self,
        plane: usize,
        range: Range<u64>,
        read: &Read<'_, 'b>,
    ) -> io::Result<Cow<'b, [u8]>> {
        let pieces = self.planes.get(plane).ok_or_else(overflow)?;
        let first = pieces.first().ok_or_else(overflow)?;
        let width = first.whole_row;
        let count = range.end.checked_sub(range.start).ok_or_else(overflow)?;
        let size = count.checked_mul(width).ok_or_else(overflow)?;
        if first.carried {
            return read(0, plane, range.start.checked_mul(width).ok_or_else(overflow)?, size);
        }
        let within = |p: &PlanePiece| {
            p.bytes == width && p.first_row <= range.start && range.end <= p.first_row + p.rows
        };
        if let Some((i, p)) = pieces.iter().enumerate().find(|(_, p)| within(p)) {
            let at = (range.start - p.first_row).checked_mul(p.piece_row).ok_or_else(overflow)?;
            return read(i, plane, at, size);
        }
        let mut out = vec![0u8; usize::try_from(size).map_err(|_| overflow())?];
        let mut filled = 0u64;
        for (i, p) in pieces.iter().enumerate() {
            let (from, to) = (range.start.max(p.first_row), range.end.min(p.first_row + p.rows));
            if from >= to || p.bytes == 0 {
                continue;
            }
            let at = (from - p.first_row).checked_mul(p.piece_row).ok_or_else(overflow)?;
            let n = (to - from).checked_mul(p.piece_row).ok_or_else(overflow)?;
            let bytes = read(i, plane, at, n)?;
            let (begin, length) = (p.first_byte as usize, p.bytes as usize);
            let targets = out.chunks_exact_mut(width as usize).skip((from - range.start) as usize);
            for (target, source) in targets.zip(bytes.chunks_exact(p.piece_row as usize)) {
                let target = target.get_mut(begin..begin + length).ok_or_else(overflow)?;
                target.copy_from_slice(source.get(..length).ok_or_else(overflow)?);
            }
            filled = filled.saturating_add((to - from).saturating_mul(p.bytes));
        }
        // A gap would pass for zeros.
        if filled == size { Ok(Cow::Owned(out)) } else { Err(overflow()) }
    }

    /// Hands bytes of a plane of the whole weight to its pieces: whole rows, from a byte offset on. Rows that are cut
    /// are gathered for each piece and padded with zeros.
    ///
    /// # Errors
    /// Bytes that are no whole rows of the plane, or the taker's error.
    pub fn scatter(
        &self,
        plane: usize,
        offset: u64,
        bytes: &[u8],
        put: &mut Put<'_>,
    ) -> io::Result<()> {
        let pieces = self.planes.get(plane).ok_or_else(overflow)?;
        let width = pieces.first().map_or(0, |p| p.whole_row);
        let length = bytes.len() as u64;
        if width == 0 || !offset.is_multiple_of(width) || !length.is_multiple_of(width) {
            return Err(overflow());
        }
        let (first, last) = (offset / width, (offset + length) / width);
        let mut gathered = Vec::new();
        for (i, p) in pieces.iter().enumerate() {
            if p.carried {
                put(i, plane, offset, bytes)?;
                continue;
            }
            let (from, to) = (first.max(p.first_row), last.min(p.first_row.saturating_add(p.rows)));
            if from >= to {
                continue;
            }
            let part = ((from - first) * width) as usize..((to - first) * width) as usize;
            let part = bytes.get(part).ok_or_else(overflow)?;
            let at = (from - p.first_row).checked_mul(p.piece_row).ok_or_else(overflow)?;
            if p.bytes == width && p.piece_row == width {
                put(i, plane, at, part)?;
                continue;
            }
            let (begin, held) = (p.first_byte as usize, p.bytes as usize);
            gathered.clear();
            for row in part.chunks_exact(width as usize) {
                let end = gathered.len() + p.piece_row as usize;
                gathered.extend_from_slice(row.get(begin..begin + held).ok_or_else(overflow)?);
                gathered.resize(end, 0);
            }
            put(i, plane, at, &gathered)?;
        }
        Ok(())
    }

    /// Hands out the rows of zeros that make all pieces as long as the largest; with [`Pieces::scatter`] of every row,
    /// each byte of each piece is put once.
    ///
    /// # Errors
    /// The taker's error.
    pub fn pad(&self, put: &mut Put<'_>) -> io::Result<()> {
        for (plane, pieces) in self.planes.iter().enumerate() {
            for (i, p) in pieces.iter().enumerate().filter(|(_, p)| !p.carried) {
                let (mut at, end) = (
                    p.rows.checked_mul(p.piece_row).ok_or_else(overflow)?,
                    p.piece_rows.checked_mul(p.piece_row).ok_or_else(overflow)?,
                );
                let zeros = vec![0u8; CHUNK.min(end.saturating_sub(at)) as usize];
                while at < end {
                    let n = (zeros.len() as u64).min(end - at);
                    put(i, plane, at, &zeros[..n as usize])?;
                    at += n;
                }
            }
        }
        Ok(())
    }

    /// SHA-256 of the whole weight's planes, plane by plane, put together in bounded steps.
    ///
    /// # Errors
    /// Slices that leave a gap, or the reader's error.
    pub fn digest(&self, read: &Read<'_, '_>) -> io::Result<[u8; 32]> {
        hash::read(self.joined(read))
    }

    /// The whole weight's planes, plane by plane, as one stream, which fails where slices leave a gap and where `read` does.
    pub fn joined<'b, F>(&self, read: F) -> Joined<'_, 'b, F>
    where
        F: Fn(usize, usize, u64, u64) -> io::Result<Cow<'b, [u8]>>,
    {
        Joined { pieces: self, read, plane: 0, row: 0, held: Cow::Borrowed(&[]), taken: 0 }
    }

    /// Bytes of all planes of the whole weight.
    pub fn bytes(&self) -> u64 {
        self.planes.iter().fold(0, |n, pieces| {
            let width = pieces.first().map_or(0, |p| p.whole_row);
            n.saturating_add(steps(pieces).0.saturating_mul(width))
        })
    }

    /// Whether every byte that stands for nothing is zero, and whether pieces that carry the same plane carry the same
    /// bytes.
    ///
    /// # Errors
    /// The reader's error.
    pub fn padding_is_zero(&self, read: &Read<'_, '_>) -> io::Result<bool> {
        for (plane, pieces) in self.planes.iter().enumerate() {
            for (i, p) in pieces.iter().enumerate() {
                let width = p.piece_row.max(1);
                let step = (CHUNK / width).max(1);
                let mut first = 0;
                while first < p.piece_rows {
                    let end = p.piece_rows.min(first + step);
                    let (at, n) =
                        (first.saturating_mul(width), (end - first).saturating_mul(width));
                    let bytes = read(i, plane, at, n)?;
                    let clean = if p.carried {
                        i == 0 || read(0, plane, at, n)? == bytes
                    } else {
                        (first..).zip(bytes.chunks_exact(width as usize)).all(|(row, line)| {
                            let held = if row < p.rows { p.bytes as usize } else { 0 };
                            line.iter().skip(held).all(|b| *b == 0)
                        })
                    };
                    if !clean {
                        return Ok(false);
                    }
                    first = end;
                }
            }
        }
        Ok(true)
    }
}

/// A whole weight's planes, read from its pieces one after the other.
pub struct Joined<'p, 'b, F> {
    pieces: &'p Pieces,
    read: F,
    plane: usize,
    /// The next row of the plane.
    row: u64,
    held: Cow<'b, [u8]>,
    taken: usize,
}

impl<'b, F> BufRead for Joined<'_, 'b, F>
where
    F: Fn(usize, usize, u64, u64) -> io::Result<Cow<'b, [u8]>>,
{
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        while self.taken >= self.held.len() {
            let Some(pieces) = self.pieces.planes.get(self.plane) else { break };
            let (all, step) = steps(pieces);
            if self.row >= all {
                (self.plane, self.row) = (self.plane + 1, 0);
                continue;
            }
            let end = all.min(self.row + step);
            self.held = self.pieces.rows(self.plane, self.row..end, &self.read)?;
            (self.row, self.taken) = (end, 0);
        }
        Ok(self.held.get(self.taken..).unwrap_or_default())
    }

    fn consume(&mut self, bytes: usize) {
        self.taken = self.held.len().min(self.taken + bytes);
    }
}

impl<'b, F> io::Read for Joined<'_, 'b, F>
where
    F: Fn(usize, usize, u64, u64) -> io::Result<Cow<'b, [u8]>>,
{
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        hash::take(self, into)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tensor::{Axis, DType, PlaneSpec, Span, role};

    /// Encodings with every kind of plane: groups, rows, blocks, whole weights, tables, packed codes of odd widths.
    fn encodings() -> Vec<Encoding> {
        let scale = |dtype, block| PlaneSpec::tiled(role::SCALE, dtype, block);
        vec![
            Encoding::plain(DType::BF16),
            Encoding::plain(DType::F32),
            Encoding::affine(DType::I8, vec![scale(DType::BF16, [1, 8])]),
            Encoding::affine(DType::I8, vec![scale(DType::BF16, [1, 0])]),
            Encoding::affine(DType::F8E4M3, vec![scale(DType::BF16, [4, 4])]),
            Encoding::affine(DType::F8E4M3, vec![scale(DType::F32, [0, 0])]),
            Encoding::affine(
                DType::F4E2M1,
                vec![
                    scale(DType::F8E4M3, [1, 4]),
                    PlaneSpec::tiled(role::SCALE_1, DType::F32, [0, 0]),
                ],
            ),
            Encoding::affine(
                DType::U3,
                vec![
                    scale(DType::BF16, [2, 8]),
                    PlaneSpec::tiled(role::ZERO, DType::U4, [2, 8]),
                    PlaneSpec::table(role::TABLE, DType::F16, [1, 8]),
                ],
            ),
            Encoding::affine(DType::I8, vec![scale(DType::BF16, [0, 1])]),
        ]
    }

    /// Whole grains as evenly as possible, the first pieces getting one more.
    fn slices(axis: Axis, len: u64, grain: u64, n: u64) -> Vec<Slice> {
        let units = len.div_ceil(grain);
        let first = |d: u64| ((units / n * d + (units % n).min(d)) * grain).min(len);
        let spans: Vec<Span> =
            (0..n).map(|d| Span { start: first(d), len: first(d + 1) - first(d) }).collect();
        let extent = spans.iter().map(|s| s.len).max().unwrap_or(0);
        let mut distinct: Vec<Span> = Vec::new();
        for span in spans {
            if !distinct.contains(&span) {
                distinct.push(span);
            }
        }
        distinct.into_iter().map(|span| Slice { axis, span, extent }).collect()
    }

    /// Bit `at` of a little-endian bit stream.
    fn bit(bytes: &[u8], at: u64) -> u8 {
        bytes[(at / 8) as usize] >> (at % 8) & 1
    }

    proptest! {
        #[test]
        fn joined_pieces_are_the_whole_planes_bit_for_bit(
            kind in 0usize..9,
            rows in 1u64..40,
            cols in 1u64..70,
            n in 1u64..17,
            by_cols in any::<bool>(),
            vector in any::<bool>(),
            seed in any::<u64>(),
            step in 1u64..9,
        ) {
            let encoding = &encodings()[kind];
            let vector = vector && kind < 2;
            let whole = if vector { Shape::from([cols]) } else { Shape::from([rows, cols]) };
            let axis = if by_cols { Axis::Cols } else { Axis::Rows };
            let (rows, cols) = whole.matrix().expect("small");
            let by_cols = by_cols || vector;
            let grain = encoding.grain(if by_cols { Axis::Cols } else { Axis::Rows }).expect("small");
            let slices = slices(axis, if by_cols { cols } else { rows }, grain, n);
            let pieces = Pieces::new(encoding, &whole, &slices).expect("cuts on grains");

            // Whole planes of noise, with zeros after the last element of a row.
            let mut state = seed | 1;
            let mut noise = || {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 33) as u8
            };
            let mut planes: Vec<Vec<u8>> = Vec::new();
            for spec in &encoding.planes {
                let (grid_rows, grid_cols) = spec.grid(rows, cols);
                let width = spec.row_bytes(cols).expect("small");
                let used = grid_cols * u64::from(spec.dtype.bits());
                let mut plane = Vec::new();
                for _ in 0..grid_rows {
                    let mut row: Vec<u8> = (0..width).map(|_| noise()).collect();
                    for at in used..width * 8 {
                        row[(at / 8) as usize] &= !(1 << (at % 8));
                    }
                    plane.extend(row);
                }
                planes.push(plane);
            }

            // Cut, a few rows at a time; every byte of every piece is put exactly once.
            let sizes = |k: usize, slice: &Slice| {
                let (r, c) = slice.shape(&whole).expect("cut").matrix().expect("small");
                encoding.planes[k].bytes(r, c).expect("small") as usize
            };
            let mut out: Vec<Vec<Vec<Option<u8>>>> = slices
                .iter()
                .map(|s| (0..planes.len()).map(|k| vec![None; sizes(k, s)]).collect())
                .collect();
            let mut put = |piece: usize, plane: usize, at: u64, bytes: &[u8]| -> io::Result<()> {
                for (i, &b) in bytes.iter().enumerate() {
                    let slot = &mut out[piece][plane][at as usize + i];
                    assert_eq!(slot.replace(b), None, "put twice");
                }
                Ok(())
            };
            for (k, plane) in planes.iter().enumerate() {
                let width = encoding.planes[k].row_bytes(cols).expect("small");
                for (i, part) in plane.chunks((step * width) as usize).enumerate() {
                    pieces.scatter(k, i as u64 * step * width, part, &mut put).expect("rows");
                }
            }
            pieces.pad(&mut put).expect("zeros");
            let stored: Vec<Vec<Vec<u8>>> = out
                .into_iter()
                .map(|p| {
                    p.into_iter().map(|k| k.into_iter().map(|b| b.expect("put")).collect()).collect()
                })
                .collect();

            // Joined element by element, by code that knows nothing of the pieces but their spans.
            for (k, spec) in encoding.planes.iter().enumerate() {
                let (grid_rows, grid_cols) = spec.grid(rows, cols);
                let bits = u64::from(spec.dtype.bits());
                let width = spec.row_bytes(cols).expect("small");
                let crate::tensor::PlaneLayout::Tiled { block } = spec.layout else {
                    for piece in &stored {
                        prop_assert_eq!(&piece[k], &planes[k]);
                    }
                    continue;
                };
                let along = block[usize::from(by_cols)];
                if along == 0 {
                    for piece in &stored {
                        prop_assert_eq!(&piece[k], &planes[k]);
                    }
                    continue;
                }
                for (r, c) in (0..grid_rows).flat_map(|r| (0..grid_cols).map(move |c| (r, c))) {
                    let at = if by_cols { c } else { r } * along;
                    let holder = slices
                        .iter()
                        .position(|s| (s.span.start..s.span.start + s.span.len).contains(&at))
                        .expect("covered");
                    let first = slices[holder].span.start / along;
                    let (lr, lc) = if by_cols { (r, c - first) } else { (r - first, c) };
                    let (_, local) =
                        slices[holder].shape(&whole).expect("cut").matrix().expect("small");
                    let local_width = spec.row_bytes(local).expect("small");
                    for b in 0..bits {
                        prop_assert_eq!(
                            bit(&stored[holder][k], lr * local_width * 8 + lc * bits + b),
                            bit(&planes[k], r * width * 8 + c * bits + b),
                            "plane {} ({}, {})", k, r, c
                        );
                    }
                }
            }

            // Read back: rows, digest, padding.
            let read = |piece: usize, plane: usize, at: u64, n: u64| -> io::Result<Cow<'_, [u8]>> {
                Ok(Cow::Borrowed(&stored[piece][plane][at as usize..(at + n) as usize]))
            };
            for (k, plane) in planes.iter().enumerate() {
                let all = encoding.planes[k].grid(rows, cols).0;
                let width = encoding.planes[k].row_bytes(cols).expect("small") as usize;
                let from = seed % all;
                let to = all.min(from + step);
                let want = &plane[from as usize * width..to as usize * width];
                let found = pieces.rows(k, from..to, &read).expect("rows");
                prop_assert_eq!(&*found, want);
            }
            let digest = hash::sha256(planes.iter().map(Vec::as_slice));
            prop_assert_eq!(pieces.digest(&read).expect("digest"), digest);
            prop_assert_eq!(pieces.bytes(), planes.iter().map(|p| p.len() as u64).sum::<u64>());
            prop_assert!(pieces.padding_is_zero(&read).expect("reads"));
        }
    }

    #[test]
    fn a_byte_in_the_padding_or_a_copy_that_differs_is_found() {
        let encoding = Encoding::affine(
            DType::I8,
            vec![
                PlaneSpec::tiled(role::SCALE, DType::U8, [1, 2]),
                PlaneSpec::tiled(role::SCALE_1, DType::U8, [0, 0]),
            ],
        );
        let whole = Shape::from([1, 6]);
        let slice = |start, len| Slice { axis: Axis::Cols, span: Span { start, len }, extent: 4 };
        let pieces = Pieces::new(&encoding, &whole, &[slice(0, 4), slice(4, 2)]).expect("cut");
        let clean =
            [[vec![1, 2, 3, 4], vec![1, 2], vec![9]], [vec![5, 6, 0, 0], vec![3, 0], vec![9]]];
        let verdict = |stored: &[[Vec<u8>; 3]; 2]| {
            let read = |piece: usize, plane: usize, at: u64, n: u64| -> io::Result<Cow<'_, [u8]>> {
                Ok(Cow::Borrowed(&stored[piece][plane][at as usize..(at + n) as usize]))
            };
            pieces.padding_is_zero(&read).expect("reads")
        };
        assert!(verdict(&clean));
        for (piece, plane, at) in [(1, 0, 2), (1, 0, 3), (1, 1, 1), (1, 2, 0)] {
            let mut broken = clean.clone();
            broken[piece][plane][at] ^= 1;
            assert!(!verdict(&broken), "piece {piece}, plane {plane}, byte {at}");
        }
        assert_eq!((pieces.held(0), pieces.held(1)), (7, 4));
    }

    #[test]
    fn a_gap_between_pieces_is_an_error_and_a_cut_block_none_at_all() {
        let encoding = Encoding::plain(DType::U8);
        let whole = Shape::from([2, 6]);
        let slice = |start, len| Slice { axis: Axis::Cols, span: Span { start, len }, extent: 4 };
        let gap = Pieces::new(&encoding, &whole, &[slice(0, 2), slice(4, 2)]).expect("cut");
        let zeros = [0u8; 8];
        let read = |_: usize, _: usize, at: u64, n: u64| -> io::Result<Cow<'_, [u8]>> {
            Ok(Cow::Borrowed(&zeros[at as usize..(at + n) as usize]))
        };
        assert!(gap.rows(0, 0..2, &read).is_err());
        let grouped =
            Encoding::affine(DType::I8, vec![PlaneSpec::tiled(role::SCALE, DType::BF16, [1, 4])]);
        assert_eq!(Pieces::new(&grouped, &whole, &[slice(0, 2), slice(2, 4)]), None);
        assert_eq!(Pieces::new(&encoding, &whole, &[slice(4, 3)]), None);
        let nibbles = Encoding::plain(DType::U4);
        assert_eq!(Pieces::new(&nibbles, &whole, &[slice(0, 3), slice(3, 3)]), None);
        assert!(gap.scatter(0, 1, &[0; 6], &mut |_, _, _, _| Ok(())).is_err());
    }
}
