//! The weights of a file as whole weights, however many devices it is made for.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use super::digests;
use super::layout::{DEVICES_KEY, DIGEST_KEY, DIGESTS_ENTRY, OWN_PREFIX, PARTITION_ENTRY};
use super::partition::{Partition, PartitionRow};
use super::pieces::Pieces;
use super::reader::{Artifact, Entry};
use crate::diag::{Diagnostic, Failure, FailureKind};
use crate::hash::Item;
use crate::tensor::{Encoding, PlaneLayout, PlaneSource, Shape, Slice};

/// Every weight of a file, whole.
#[derive(Debug)]
pub struct Weights<'a> {
    devices: u32,
    partition: Option<Partition>,
    views: Vec<WeightView<'a>>,
    by_name: BTreeMap<String, usize>,
}

/// A weight of a file: one entry, or pieces that are put together as they are read.
#[derive(Debug, Clone)]
pub struct WeightView<'a> {
    name: String,
    shape: Shape,
    /// The entry, or those of the pieces; never empty.
    entries: Vec<Entry<'a>>,
    /// Where its bytes lie among the entries; none for a whole weight.
    pieces: Option<Pieces>,
}

/// Why the weights of a file cannot be put together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct WeightsError(pub String);

impl From<WeightsError> for Failure {
    fn from(error: WeightsError) -> Failure {
        let problem = Diagnostic::new("partition", error.to_string());
        Failure::one(FailureKind::Invalid, "the weights cannot be put together", problem)
    }
}

impl<'a> Weights<'a> {
    /// The weights of an opened file. Of a file for several devices the table `radpack/partition` is read, against its
    /// digest, and every piece that it names is found.
    ///
    /// # Errors
    /// A table that is missing, other than digested, or wrong; pieces that are missing or have another shape or
    /// encoding than the table says.
    pub fn open(artifact: &'a Artifact) -> Result<Weights<'a>, WeightsError> {
        let devices = artifact.meta_int(DEVICES_KEY).unwrap_or(1);
        if devices <= 1 {
            let own = |e: &Entry<'_>| e.name().bytes().starts_with(OWN_PREFIX.as_bytes());
            let whole = artifact.entries().filter(|e| !own(e)).map(WeightView::whole);
            return Ok(Weights::of(1, None, whole.collect()));
        }
        let say = |why: String| WeightsError(format!("{PARTITION_ENTRY}: {why}"));
        let bytes =
            artifact.find(PARTITION_ENTRY).ok_or_else(|| say("there is none".into()))?.plane(0);
        let digest = recorded(artifact).ok_or_else(|| say("its digest is not recorded".into()))?;
        let partition = Partition::decode(bytes, &digest).map_err(|e| say(e.to_string()))?;
        if i64::from(partition.devices) != devices {
            let why = format!("it is for {} devices, the file for {devices}", partition.devices);
            return Err(say(why));
        }
        let views = partition
            .weights
            .iter()
            .map(|row| WeightView::of(artifact, row))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Weights::of(partition.devices, Some(partition), views))
    }

    fn of(devices: u32, partition: Option<Partition>, views: Vec<WeightView<'a>>) -> Weights<'a> {
        let by_name = views.iter().enumerate().map(|(i, v)| (v.name.clone(), i)).collect();
        Weights { devices, partition, views, by_name }
    }

    /// Devices that the file is made for.
    pub fn devices(&self) -> u32 {
        self.devices
    }

    /// The table of a file for several devices.
    pub fn partition(&self) -> Option<&Partition> {
        self.partition.as_ref()
    }

    /// The weight of that logical name.
    pub fn get(&self, name: &str) -> Option<&WeightView<'a>> {
        self.views.get(*self.by_name.get(name)?)
    }

    /// Every weight, in container order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &WeightView<'a>> {
        self.views.iter()
    }
}

/// The digest of the table as `radpack/digests` has it, after the check against the root digest.
fn recorded(artifact: &Artifact) -> Option<[u8; 32]> {
    let root = digests::from_hex(artifact.meta_text(DIGEST_KEY)?.bytes())?;
    let list = digests::decode(artifact.find(DIGESTS_ENTRY)?.plane(0), &root).ok()?;
    list.into_iter().find(|d| d.name == PARTITION_ENTRY).map(|d| d.sha256)
}

impl<'a> WeightView<'a> {
    fn whole(entry: Entry<'a>) -> WeightView<'a> {
        WeightView {
            name: entry.name().to_string(),
            shape: entry.shape().clone(),
            entries: vec![entry],
            pieces: None,
        }
    }

    /// The view of one row of the table.
    ///
    /// # Errors
    /// An entry that is missing or does not have the shape and encoding of its siblings.
    pub(super) fn of(
        artifact: &'a Artifact,
        row: &PartitionRow,
    ) -> Result<WeightView<'a>, WeightsError> {
        let shape = Shape::from(row.shape.as_slice());
        let find = |name: &str| {
            artifact.find(name).ok_or_else(|| WeightsError(format!("no entry `{name}`")))
        };
        if row.axis().is_none() {
            let entry = find(&row.name)?;
            if *entry.shape() != shape {
                let why = format!("`{}` has shape {}, not {shape}", row.name, entry.shape());
                return Err(WeightsError(why));
            }
            return Ok(WeightView::whole(entry));
        }
        let mut entries: Vec<Entry<'a>> = Vec::with_capacity(row.pieces());
        let mut slices: Vec<Slice> = Vec::with_capacity(row.pieces());
        for piece in 0..row.pieces() {
            let name = row.entry(piece);
            let entry = find(&name)?;
            let like = *entries.first().unwrap_or(&entry);
            let labels = |e: &Entry<'_>| {
                let (quantizer, options) = (e.quantizer().to_string(), e.options().to_string());
                (e.encoding().to_string(), quantizer, options, e.layer(), e.expert(), e.slot())
            };
            if labels(&entry) != labels(&like) {
                let why = format!("`{name}` differs from `{}` in more than its rows", like.name());
                return Err(WeightsError(why));
            }
            let slice = row.slice(piece);
            let local = slice.and_then(|s| s.shape(&shape));
            if local.as_ref() != Some(entry.shape()) {
                let want = local.map_or("none".to_owned(), |s| s.to_string());
                let why = format!("`{name}` has shape {}, the table gives {want}", entry.shape());
                return Err(WeightsError(why));
            }
            slices.extend(slice);
            entries.push(entry);
        }
        let encoding = entries.first().map(|e| e.encoding());
        let pieces = encoding.and_then(|e| Pieces::new(e, &shape, &slices)).ok_or_else(|| {
            WeightsError(format!("`{}` is cut inside a block of one of its planes", row.name))
        })?;
        Ok(WeightView { name: row.name.clone(), shape, entries, pieces: Some(pieces) })
    }

    /// Logical name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Shape of the whole weight.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// How the values are laid out.
    pub fn encoding(&self) -> &'a Encoding {
        self.first().encoding()
    }

    /// The entry, or that of the first piece: quantizer, options, layer, expert and slot are those of the weight.
    pub fn first(&self) -> Entry<'a> {
        // Never empty by construction.
        self.entries[0]
    }

    /// The entry, or the pieces' entries.
    pub fn entries(&self) -> &[Entry<'a>] {
        &self.entries
    }

    /// Whether it is stored in pieces.
    pub fn cut(&self) -> bool {
        self.pieces.is_some()
    }

    /// Bytes of the whole weight's planes.
    pub fn plane_bytes(&self) -> u64 {
        // The file holds at least as many; a sum that overflows cannot be.
        self.encoding().bytes(&self.shape).unwrap_or(u64::MAX)
    }

    /// SHA-256 of the whole weight's planes, plane by plane, read in bounded pieces.
    ///
    /// # Errors
    /// Pieces that do not cover the weight.
    pub fn digest(&self) -> io::Result<[u8; 32]> {
        match &self.pieces {
            None => Ok(digests::of_entry(&self.first())),
            Some(pieces) => pieces.digest(&|piece, plane, at, n| self.bytes(plane, piece, at, n)),
        }
    }

    /// The whole weight's planes, to be hashed with others.
    pub fn item(&self) -> Item<'_> {
        match &self.pieces {
            None => digests::item(&self.first()),
            Some(pieces) => Item::new(pieces.bytes(), move || {
                Ok(pieces.joined(move |piece, plane, at, n| self.bytes(plane, piece, at, n)))
            }),
        }
    }

    /// Whether the pieces hold zeros wherever they hold nothing of the weight.
    ///
    /// # Errors
    /// Pieces shorter than the table says.
    pub(super) fn padding_is_zero(&self) -> io::Result<bool> {
        self.pieces.as_ref().map_or(Ok(true), |pieces| {
            pieces.padding_is_zero(&|piece, plane, at, n| self.bytes(plane, piece, at, n))
        })
    }

    /// Bytes of one piece's planes that are not padding; 0 for a whole weight.
    pub(super) fn held_bytes(&self, piece: usize) -> u64 {
        self.pieces.as_ref().map_or(0, |pieces| pieces.held(piece))
    }

    /// Bytes of one piece's plane.
    fn bytes(&self, plane: usize, piece: usize, at: u64, n: u64) -> io::Result<Cow<'a, [u8]>> {
        let outside = || io::Error::from(io::ErrorKind::InvalidInput);
        let bytes = self.entries.get(piece).map(|e| e.plane(plane)).ok_or_else(outside)?;
        let start = usize::try_from(at).map_err(|_| outside())?;
        let end = usize::try_from(n).ok().and_then(|n| start.checked_add(n)).ok_or_else(outside)?;
        bytes.get(start..end).map(Cow::Borrowed).ok_or_else(outside)
    }

    /// Bytes of the rows `range` of one plane of the whole weight; borrowed where they lie together in the file.
    ///
    /// # Errors
    /// `InvalidInput` when the plane does not exist or `range` passes its last row.
    pub fn rows(&self, plane: usize, range: Range<u64>) -> io::Result<Cow<'a, [u8]>> {
        let outside = || io::Error::from(io::ErrorKind::InvalidInput);
        let spec = self.encoding().planes.get(plane).ok_or_else(outside)?;
        let (rows, cols) = self.shape.matrix().ok_or_else(outside)?;
        if range.start > range.end || range.end > spec.grid(rows, cols).0 {
            return Err(outside());
        }
        if let Some(pieces) = &self.pieces {
            let read = |piece, plane, at, n| self.bytes(plane, piece, at, n);
            return pieces.rows(plane, range, &read);
        }
        let width = spec.row_bytes(cols).ok_or_else(outside)?;
        let at = range.start.checked_mul(width).ok_or_else(outside)?;
        self.bytes(plane, 0, at, (range.end - range.start).saturating_mul(width))
    }
}

impl<'a> WeightView<'a> {
    /// The rows of every plane that decoding the rows `range` of the weight takes, each with the number of its first row
    /// in the plane.
    ///
    /// # Errors
    /// `InvalidInput` when `range` passes the last row.
    pub fn block(&self, range: Range<u64>) -> io::Result<Vec<(u64, Cow<'a, [u8]>)>> {
        let (rows, cols) =
            self.shape.matrix().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let planes = self.encoding().planes.iter().enumerate();
        planes
            .map(|(k, spec)| {
                let part = match spec.layout {
                    PlaneLayout::Tiled { block: [block, _] } if block > 0 => {
                        range.start / block..range.end.div_ceil(block)
                    }
                    // Planes that belong to the whole weight.
                    _ => 0..spec.grid(rows, cols).0,
                };
                Ok((part.start, self.rows(k, part)?))
            })
            .collect()
    }
}

impl<'a> From<Entry<'a>> for WeightView<'a> {
    fn from(entry: Entry<'a>) -> WeightView<'a> {
        WeightView::whole(entry)
    }
}

impl PlaneSource for WeightView<'_> {
    fn encoding(&self) -> &Encoding {
        WeightView::encoding(self)
    }

    fn shape(&self) -> &Shape {
        &self.shape
    }

    fn plane_rows(&self, plane: usize, range: Range<u64>) -> io::Result<Cow<'_, [u8]>> {
        self.rows(plane, range)
    }
}
