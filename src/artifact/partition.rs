//! Who holds what: the table of a file that is made for several devices.
//!
//! `radpack/partition` lists every stored weight with its whole shape, its cut, the devices that hold it or its pieces,
//! and the digest of the whole weight's planes. A piece is an entry `NAME@i/n`. The table's length depends on no
//! digest's value, so it has its place before any weight is read. Only files for more than one device have it.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::codec::{self, CodecError};
use crate::tensor::{Axis, MAX_RANK, Shape, Slice, Span};

/// Largest table that is read: that of a hundred thousand weights on thousands of devices.
pub const MAX_BYTES: usize = 256 << 20;

/// Most devices a file can be for.
pub const MAX_DEVICES: u32 = 65_536;

/// The table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    /// Devices that share the model, at least 2; they are numbered from 0.
    pub devices: u32,
    /// Devices that run the image encoder, in the order of their shares.
    pub vision_devices: Vec<u32>,
    /// Every stored weight, in container order: layer, expert, slot, name.
    pub weights: Vec<PartitionRow>,
}

/// One stored weight.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionRow {
    /// Logical name.
    pub name: String,
    /// Shape of the whole weight.
    pub shape: Vec<u64>,
    /// How it is cut.
    pub cut: CutKind,
    /// Padded length of every piece along the cut; 0 for a whole weight.
    pub extent: u64,
    /// What piece i holds, `(first, count)` along the cut; empty for a whole weight. Pieces of no rows stand at the end.
    pub spans: Vec<(u64, u64)>,
    /// `(device, piece)` of every device that holds the weight or a piece of it; the piece is 0 for a whole weight.
    pub holders: Vec<(u32, u32)>,
    /// SHA-256 of the whole weight's planes, plane by plane, whatever the number of devices.
    pub sha256: [u8; 32],
}

/// How a weight is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CutKind {
    /// Stored in one entry under its own name.
    Whole,
    /// In pieces along dimension 0.
    Rows,
    /// In pieces along the last dimension.
    Cols,
}

/// Why bytes are no partition.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PartitionError {
    /// Larger than [`MAX_BYTES`].
    #[error("{0} bytes, at most {MAX_BYTES} are read")]
    TooLarge(usize),
    /// Other bytes than were digested, or not of the format.
    #[error("{0}")]
    Codec(#[from] CodecError),
    /// A table that contradicts itself.
    #[error("{0}")]
    Wrong(String),
}

impl PartitionRow {
    /// Direction of the cut; `None` for a whole weight.
    pub fn axis(&self) -> Option<Axis> {
        match self.cut {
            CutKind::Whole => None,
            CutKind::Rows => Some(Axis::Rows),
            CutKind::Cols => Some(Axis::Cols),
        }
    }

    /// Pieces; 0 for a whole weight.
    pub fn pieces(&self) -> usize {
        self.spans.len()
    }

    /// Name of the entry of piece `piece`, or of the whole weight.
    pub fn entry(&self, piece: usize) -> String {
        match self.cut {
            CutKind::Whole => self.name.clone(),
            CutKind::Rows | CutKind::Cols => piece_name(&self.name, piece, self.spans.len()),
        }
    }

    /// The piece itself; `None` for a whole weight and beyond the last.
    pub fn slice(&self, piece: usize) -> Option<Slice> {
        let &(start, len) = self.spans.get(piece)?;
        Some(Slice { axis: self.axis()?, span: Span { start, len }, extent: self.extent })
    }

    /// Shape of a piece, padding included; `None` for a whole weight.
    pub fn local_shape(&self) -> Option<Shape> {
        let mut extents = self.shape.clone();
        let slot = match self.axis()? {
            Axis::Rows => extents.first_mut()?,
            Axis::Cols => extents.last_mut()?,
        };
        *slot = self.extent;
        Some(Shape::new(extents))
    }

    /// The piece that a device holds, 0 for a whole weight; `None` when it holds nothing of it.
    pub fn piece_of(&self, device: u32) -> Option<u32> {
        self.holders.iter().find(|h| h.0 == device).map(|h| h.1)
    }

    /// The first device that holds a piece.
    pub fn first_holder(&self, piece: usize) -> Option<u32> {
        self.holders.iter().filter(|h| h.1 as usize == piece).map(|h| h.0).min()
    }

    fn check(&self, devices: u32) -> Result<(), String> {
        if self.name.is_empty() || self.name.contains('\0') {
            return Err("its name is empty or holds NUL".to_owned());
        }
        if !(1..=MAX_RANK).contains(&self.shape.len()) || self.shape.contains(&0) {
            return Err(format!(
                "shape {:?} has no rank of 1 to {MAX_RANK}, or an empty extent",
                self.shape
            ));
        }
        if Shape::from(self.shape.as_slice()).elements().is_none() {
            return Err(format!("shape {:?} has too many elements", self.shape));
        }
        let pieces = self.spans.len();
        let mut seen = BTreeSet::new();
        for &(device, piece) in &self.holders {
            if device >= devices || !seen.insert(device) {
                return Err(format!("device {device} is none of {devices}, or holds it twice"));
            }
            if piece as usize >= pieces.max(1) {
                return Err(format!("device {device} holds piece {piece} of {pieces}"));
            }
        }
        let Some(axis) = self.axis() else {
            return match (self.extent, pieces) {
                (0, 0) => Ok(()),
                _ => Err("a whole weight has an extent or spans".to_owned()),
            };
        };
        let len = match (self.shape.as_slice(), axis) {
            ([n], _) | ([n, _], Axis::Rows) | ([_, n], Axis::Cols) => *n,
            _ => return Err(format!("a weight of rank {} is cut", self.shape.len())),
        };
        let held: BTreeSet<u32> = self.holders.iter().map(|h| h.1).collect();
        if pieces == 0 || held.len() != pieces {
            return Err(format!("{} of its {pieces} pieces are on a device", held.len()));
        }
        let mut end = 0u64;
        for (i, &(start, count)) in self.spans.iter().enumerate() {
            let next = start.checked_add(count).filter(|&next| next <= len);
            let Some(next) = next.filter(|_| start == end && count <= self.extent) else {
                return Err(format!(
                    "piece {i} is {count} from {start}, not from {end} to {len} at most, within {}",
                    self.extent
                ));
            };
            end = next;
        }
        let largest = self.spans.iter().map(|s| s.1).max().unwrap_or(0);
        if end != len || largest != self.extent {
            return Err(format!(
                "its pieces end at {end} of {len}, the largest has {largest}, the extent is {}",
                self.extent
            ));
        }
        Ok(())
    }
}

/// Name of the entry of piece `piece` of `pieces`.
pub fn piece_name(weight: &str, piece: usize, pieces: usize) -> String {
    format!("{weight}@{piece}/{pieces}")
}

impl Partition {
    /// The bytes of `radpack/partition`.
    pub fn encode(&self) -> Vec<u8> {
        codec::encode(self)
    }

    /// The same table with every digest zero: its bytes have the final length.
    pub fn placeholder(&self) -> Partition {
        let mut table = self.clone();
        table.weights.iter_mut().for_each(|w| w.sha256 = [0; 32]);
        table
    }

    /// Sets the digests of these whole weights.
    pub fn set_digests(&mut self, wholes: &BTreeMap<&str, [u8; 32]>) {
        for row in &mut self.weights {
            if let Some(digest) = wholes.get(row.name.as_str()) {
                row.sha256 = *digest;
            }
        }
    }

    /// The rows by weight.
    pub fn by_name(&self) -> BTreeMap<&str, &PartitionRow> {
        self.weights.iter().map(|row| (row.name.as_str(), row)).collect()
    }

    /// Reads `radpack/partition`, whose digest `radpack/digests` tells.
    ///
    /// # Errors
    /// Too large, other bytes than the digest says, malformed, or a table that contradicts itself: devices out of
    /// range, names twice, pieces that overlap, leave gaps or belong to nobody.
    pub fn decode(bytes: &[u8], digest: &[u8; 32]) -> Result<Partition, PartitionError> {
        if bytes.len() > MAX_BYTES {
            return Err(PartitionError::TooLarge(bytes.len()));
        }
        let table: Partition = codec::decode(bytes, digest)?;
        table.check().map_err(PartitionError::Wrong)?;
        Ok(table)
    }

    fn check(&self) -> Result<(), String> {
        let devices = self.devices;
        if !(2..=MAX_DEVICES).contains(&devices) {
            return Err(format!("{devices} devices, not 2 to {MAX_DEVICES}"));
        }
        let mut seen = BTreeSet::new();
        if let Some(d) = self.vision_devices.iter().find(|d| **d >= devices || !seen.insert(**d)) {
            return Err(format!("vision device {d} is none of {devices}, or listed twice"));
        }
        let mut names = BTreeSet::new();
        for w in &self.weights {
            if !names.insert(w.name.as_str()) {
                return Err(format!("`{}` is listed twice", w.name));
            }
            w.check(devices).map_err(|why| format!("`{}`: {why}", w.name))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::hash::sha256;

    fn row(
        cut: CutKind,
        extent: u64,
        spans: &[(u64, u64)],
        holders: &[(u32, u32)],
    ) -> PartitionRow {
        PartitionRow {
            name: "w".into(),
            shape: vec![10, 6],
            cut,
            extent,
            spans: spans.to_vec(),
            holders: holders.to_vec(),
            sha256: [3; 32],
        }
    }

    fn table(weights: Vec<PartitionRow>) -> Partition {
        Partition { devices: 4, vision_devices: vec![0, 2], weights }
    }

    fn read(table: &Partition) -> Result<Partition, PartitionError> {
        let bytes = table.encode();
        Partition::decode(&bytes, &sha256([bytes.as_slice()]))
    }

    #[test]
    fn the_table_reads_back_and_keeps_its_length_without_digests() {
        let mut whole = row(CutKind::Whole, 0, &[], &[(0, 0), (1, 0)]);
        whole.name = "z".into();
        let good = table(vec![
            row(CutKind::Rows, 4, &[(0, 4), (4, 4), (8, 2)], &[(0, 0), (1, 0), (2, 1), (3, 2)]),
            whole,
        ]);
        assert_eq!(read(&good).as_ref(), Ok(&good));
        assert_eq!(good.placeholder().encode().len(), good.encode().len());
        let cut = &good.weights[0];
        assert_eq!(cut.entry(2), "w@2/3");
        assert_eq!(
            (cut.piece_of(1), cut.piece_of(9), cut.first_holder(0)),
            (Some(0), None, Some(0))
        );
        assert_eq!(good.weights[1].entry(0), "z");
    }

    #[test]
    fn bytes_of_the_table_are_as_specified() {
        let mut w = row(CutKind::Cols, 3, &[(0, 3), (3, 3)], &[(0, 0), (1, 1)]);
        w.sha256 = [0x11; 32];
        let bytes = Partition { devices: 2, vision_devices: vec![1], weights: vec![w] }.encode();
        let u64s = |n: u64| n.to_le_bytes().to_vec();
        let u32s = |n: u32| n.to_le_bytes().to_vec();
        let want: Vec<u8> = [
            u32s(2),
            u64s(1),
            u32s(1),
            u64s(1),
            u64s(1),
            b"w".to_vec(),
            u64s(2),
            u64s(10),
            u64s(6),
            u32s(2),
            u64s(3),
            u64s(2),
            u64s(0),
            u64s(3),
            u64s(3),
            u64s(3),
            u64s(2),
            u32s(0),
            u32s(0),
            u32s(1),
            u32s(1),
            vec![0x11; 32],
        ]
        .concat();
        assert_eq!(bytes, want);
    }

    #[test]
    fn a_table_that_contradicts_itself_is_refused() {
        let cases: [(&str, PartitionRow); 10] = [
            ("holds it twice", row(CutKind::Whole, 0, &[], &[(1, 0), (1, 0)])),
            ("is none of 4", row(CutKind::Whole, 0, &[], &[(4, 0)])),
            ("holds piece 1 of 0", row(CutKind::Whole, 0, &[], &[(1, 1)])),
            ("an extent or spans", row(CutKind::Whole, 1, &[], &[])),
            ("1 of its 2 pieces", row(CutKind::Rows, 5, &[(0, 5), (5, 5)], &[(0, 0), (1, 0)])),
            ("0 of its 0 pieces", row(CutKind::Rows, 5, &[], &[])),
            ("not from 5", row(CutKind::Rows, 5, &[(0, 5), (4, 6)], &[(0, 0), (1, 1)])),
            ("end at 8 of 10", row(CutKind::Rows, 4, &[(0, 4), (4, 4)], &[(0, 0), (1, 1)])),
            ("the extent is 9", row(CutKind::Rows, 9, &[(0, 5), (5, 5)], &[(0, 0), (1, 1)])),
            ("within 2", row(CutKind::Cols, 2, &[(0, 3), (3, 3)], &[(0, 0), (1, 1)])),
        ];
        for (text, bad) in cases {
            let why = read(&table(vec![bad])).expect_err(text).to_string();
            assert!(why.contains(text), "{why} / {text}");
        }
        let mut cube = row(CutKind::Rows, 10, &[(0, 10)], &[(0, 0)]);
        cube.shape = vec![10, 2, 2];
        assert!(read(&table(vec![cube])).expect_err("rank 3").to_string().contains("rank 3"));
        let twice = row(CutKind::Whole, 0, &[], &[]);
        let why = read(&table(vec![twice.clone(), twice])).expect_err("twice").to_string();
        assert_eq!(why, "`w` is listed twice");
        let one = Partition { devices: 1, vision_devices: vec![], weights: vec![] };
        assert!(read(&one).expect_err("one device").to_string().contains("1 devices"));
        let bytes = one.encode();
        assert!(matches!(Partition::decode(&bytes, &[0; 32]), Err(PartitionError::Codec(_))));
    }

    proptest! {
        #[test]
        fn hostile_bytes_give_an_error_or_a_sound_table(
            noise in proptest::collection::vec(any::<u8>(), 0..300),
            at in 0usize..200,
            value in any::<u8>(),
        ) {
            let _ = Partition::decode(&noise, &sha256([noise.as_slice()]));
            let mut bytes = table(vec![row(
                CutKind::Rows,
                4,
                &[(0, 4), (4, 4), (8, 2)],
                &[(0, 0), (1, 0), (2, 1), (3, 2)],
            )])
            .encode();
            let at = at % bytes.len();
            bytes[at] = value;
            if let Ok(table) = Partition::decode(&bytes, &sha256([bytes.as_slice()])) {
                for w in &table.weights {
                    for piece in 0..w.pieces() {
                        let slice = w.slice(piece).expect("a piece");
                        prop_assert!(slice.span.end().is_some());
                        prop_assert!(w.first_holder(piece).is_some());
                    }
                }
            }
        }
    }
}
