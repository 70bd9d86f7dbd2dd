//! From the placement to the file: entries of whole weights and pieces, the table of who holds what, and where encoded
//! planes go.

use std::collections::BTreeMap;
use std::io;

use super::Plan;
use crate::artifact::manifest::DeviceSummary;
use crate::artifact::partition::{CutKind, Partition, PartitionRow, piece_name};
use crate::artifact::{EntrySpec, Layout, Pieces, Writer, digests};
use crate::hash::Item;
use crate::partition::{Cut, PlacedWeight, Placement};
use crate::tensor::{Axis, Slice};

/// The entries that a weight is stored as: itself, or its pieces with the first device that holds each.
pub(super) fn entries(whole: EntrySpec, placed: Option<&PlacedWeight>) -> Vec<(u32, EntrySpec)> {
    let pieces = placed.map(PlacedWeight::shards).unwrap_or_default();
    if pieces.is_empty() {
        return vec![(0, whole)];
    }
    let piece = |shard: &crate::partition::Shard| {
        let spec = EntrySpec {
            name: shard.name(&whole.name),
            shape: shard.slice.shape(&whole.shape).unwrap_or_else(|| whole.shape.clone()),
            ..whole.clone()
        };
        (shard.devices.iter().copied().min().unwrap_or(0), spec)
    };
    pieces.iter().map(piece).collect()
}

/// The table of a placement over several devices, digests still zero; none for one device.
pub(super) fn table<'a>(
    placement: &Placement,
    names: impl Iterator<Item = &'a str>,
) -> Option<Partition> {
    if placement.single() {
        return None;
    }
    let weights = names.filter_map(|name| Some(row(name, placement.weight(name)?))).collect();
    let vision_devices = placement.vision_devices.clone();
    Some(Partition { devices: placement.devices, vision_devices, weights })
}

fn row(name: &str, placed: &PlacedWeight) -> PartitionRow {
    let shards = placed.shards();
    let mut holders: Vec<(u32, u32)> = match &placed.cut {
        Cut::Whole { devices } => devices.iter().map(|&d| (d, 0)).collect(),
        Cut::Rows(_) | Cut::Cols(_) => {
            shards.iter().flat_map(|s| s.devices.iter().map(|&d| (d, s.index))).collect()
        }
    };
    holders.sort_unstable();
    PartitionRow {
        name: name.to_owned(),
        shape: placed.shape.extents().to_vec(),
        cut: match placed.cut.shares() {
            None => CutKind::Whole,
            Some((Axis::Rows, _)) => CutKind::Rows,
            Some((Axis::Cols, _)) => CutKind::Cols,
        },
        extent: placed.cut.shares().map_or(0, |(_, shares)| shares.extent),
        spans: shards.iter().map(|s| (s.slice.span.start, s.slice.span.len)).collect(),
        holders,
        sha256: [0; 32],
    }
}

/// The manifest's figures of every device; none for one device.
pub(super) fn summaries(placement: &Placement) -> Vec<DeviceSummary> {
    if placement.single() {
        return Vec::new();
    }
    let devices = placement.device_bytes().into_iter().zip(0u32..);
    devices
        .map(|(bytes, device)| DeviceSummary {
            device,
            whole: bytes.whole,
            shards: bytes.shards,
            padding: bytes.padding,
        })
        .collect()
}

/// Digests of entries by their position in the directory.
pub(super) type EntryDigests = BTreeMap<usize, [u8; 32]>;

/// Where the planes of one weight go.
pub(super) struct Target {
    /// Positions in the directory: of the entry, or of the pieces.
    entries: Vec<usize>,
    /// How its planes are cut; none for a whole weight.
    pieces: Option<Pieces>,
}

impl Target {
    /// The target of a stored weight; `None` when the layout does not have it.
    pub(super) fn of(plan: &Plan, layout: &Layout, name: &str) -> Option<Target> {
        let placed = plan.placement.weight(name)?;
        let shards = placed.shards();
        if shards.is_empty() {
            return Some(Target { entries: vec![layout.entry(name)?], pieces: None });
        }
        let entry = |i: usize| layout.entry(&piece_name(name, i, shards.len()));
        let slices: Vec<Slice> = shards.iter().map(|s| s.slice).collect();
        Some(Target {
            entries: (0..shards.len()).map(entry).collect::<Option<_>>()?,
            pieces: Some(Pieces::new(&placed.encoding, &placed.shape, &slices)?),
        })
    }

    /// Positions of its entries in the directory, rising.
    pub(super) fn positions(&self) -> impl Iterator<Item = usize> {
        let mut sorted = self.entries.clone();
        sorted.sort_unstable();
        sorted.into_iter()
    }

    fn entry(&self, piece: usize) -> io::Result<usize> {
        self.entries.get(piece).copied().ok_or_else(|| io::Error::other("no such piece"))
    }

    fn put(
        &self,
        writer: &Writer,
        piece: usize,
        plane: usize,
        at: u64,
        bytes: &[u8],
    ) -> io::Result<()> {
        writer.write(self.entry(piece)?, plane, at, bytes).map_err(io::Error::other)
    }

    /// Writes whole rows of a plane at a byte offset in the whole weight's plane.
    pub(super) fn write(
        &self,
        writer: &Writer,
        plane: usize,
        offset: u64,
        bytes: &[u8],
    ) -> io::Result<()> {
        match &self.pieces {
            None => self.put(writer, 0, plane, offset, bytes),
            Some(pieces) => pieces.scatter(plane, offset, bytes, &mut |piece, plane, at, bytes| {
                self.put(writer, piece, plane, at, bytes)
            }),
        }
    }

    /// Fills up pieces whose planes were all written.
    pub(super) fn pad(&self, writer: &Writer) -> io::Result<()> {
        self.pieces.as_ref().map_or(Ok(()), |pieces| {
            pieces.pad(&mut |piece, plane, at, bytes| self.put(writer, piece, plane, at, bytes))
        })
    }

    /// Bytes of its entries.
    pub(super) fn bytes(&self, writer: &Writer) -> u64 {
        let planes = self.entries.iter().flat_map(|&entry| writer.layout().planes(entry));
        planes.fold(0, |n, plane| n.saturating_add(plane.bytes))
    }

    /// What there is to hash when all is written: every entry, then the whole weight unless it is an entry.
    pub(super) fn items<'a>(&'a self, writer: &'a Writer) -> Vec<Item<'a>> {
        let entries = self.entries.iter().map(|&entry| digests::item_written(writer, entry));
        let whole = self.pieces.iter().map(|pieces| {
            Item::new(pieces.bytes(), move || {
                Ok(pieces.joined(move |piece, plane, at, n| {
                    let entry = self.entry(piece)?;
                    writer.read_back(entry, plane, at, n).map_err(io::Error::other)
                }))
            })
        });
        entries.chain(whole).collect()
    }

    /// The digest of every entry, by position, and that of the whole weight, from those of [`Target::items`].
    pub(super) fn digests(
        &self,
        mut found: impl Iterator<Item = io::Result<[u8; 32]>>,
    ) -> io::Result<(EntryDigests, [u8; 32])> {
        let mut next = || found.next().ok_or_else(|| io::Error::other("a digest is missing"))?;
        let mut all = EntryDigests::new();
        for &entry in &self.entries {
            all.insert(entry, next()?);
        }
        let whole = match &self.pieces {
            None => all.values().next().copied().unwrap_or_default(),
            Some(_) => next()?,
        };
        Ok((all, whole))
    }
}
