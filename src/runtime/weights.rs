//! Where weights come from: the interface to an artifact or a checkpoint, and what a run keeps decoded.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::value::fault;
use crate::diag::Result;
use crate::graph::{WeightRef, WeightShare};

/// The weights of a group of devices, decoded to f32.
///
/// Implemented by [`Placed`](super::Placed) over whole weights, and by readers of artifacts that store shards.
pub trait LocalWeights: Send + Sync {
    /// Rows of one device's share of a weight, in the shape that [`WeightRef::shape`] states (rows as in
    /// [`Shape::matrix`](crate::tensor::Shape::matrix)); padding is zeros. `rank` is the device's place in the group of
    /// the program that reads it. `out` holds those rows exactly.
    ///
    /// # Errors
    /// A weight that is not there or has another shape, rows outside of it, I/O.
    fn rows(
        &self,
        weight: &WeightRef,
        rank: usize,
        rows: Range<u64>,
        out: &mut [f32],
    ) -> Result<()>;

    /// Columns of a table that the host looks rows up in; `None` when there is no such table.
    fn table_columns(&self, name: &str) -> Option<u64>;

    /// One row of a whole table.
    ///
    /// # Errors
    /// A table that is not there, a row outside of it, I/O.
    fn table_row(&self, name: &str, row: u64, out: &mut [f32]) -> Result<()>;
}

/// Elements of a block of rows that is decoded at a time when a weight is not kept.
const BLOCK: u64 = 1 << 22;

/// Decoded weights, kept up to a limit; what does not fit is decoded again whenever it is read.
pub(super) struct Store<'w> {
    source: &'w dyn LocalWeights,
    limit: u64,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    bytes: u64,
    weights: BTreeMap<String, BTreeMap<usize, Arc<Vec<f32>>>>,
}

/// What is kept between runs.
pub(super) struct Kept(Mutex<Held>, u64);

impl Kept {
    pub(super) fn new(limit: u64) -> Kept {
        Kept(Mutex::new(Held::default()), limit)
    }

    /// Lends what is kept to a run over `source`.
    pub(super) fn open<'w>(&mut self, source: &'w dyn LocalWeights) -> Store<'w> {
        let held = std::mem::take(self.0.get_mut().unwrap_or_else(PoisonError::into_inner));
        Store { source, limit: self.1, held: Mutex::new(held) }
    }

    /// Takes back what a run has kept.
    pub(super) fn close(&mut self, store: Store<'_>) {
        self.0 = store.held;
    }
}

impl Store<'_> {
    /// A device's share of a weight, whole.
    pub(super) fn whole(&self, weight: &WeightRef, rank: usize) -> Result<Arc<Vec<f32>>> {
        if let Some(found) = self.kept(weight, rank) {
            return Ok(found);
        }
        let (rows, columns) = extents(weight)?;
        let mut data = Vec::new();
        resize(&mut data, rows, columns, weight)?;
        self.source.rows(weight, rank, 0..rows, &mut data)?;
        let data = Arc::new(data);
        self.keep(weight, rank, &data);
        Ok(data)
    }

    /// Calls `f` with a device's share of a weight, a block of rows at a time: the number of the block's first row, and
    /// its elements. A weight that is kept is one block.
    pub(super) fn blocks(
        &self,
        weight: &WeightRef,
        rank: usize,
        mut f: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let (rows, columns) = extents(weight)?;
        let room = {
            let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
            self.limit.saturating_sub(held.bytes)
        };
        let bytes = rows.saturating_mul(columns).saturating_mul(4);
        if self.kept(weight, rank).is_some() || bytes <= room {
            return f(0, &self.whole(weight, rank)?);
        }
        let step = (BLOCK / columns.max(1)).max(1);
        let (mut first, mut data) = (0, Vec::new());
        while first < rows {
            let end = rows.min(first.saturating_add(step));
            resize(&mut data, end - first, columns, weight)?;
            self.source.rows(weight, rank, first..end, &mut data)?;
            f(usize::try_from(first).map_err(fault)?, &data)?;
            first = end;
        }
        Ok(())
    }

    /// One row of a device's share.
    pub(super) fn row(
        &self,
        weight: &WeightRef,
        rank: usize,
        row: u64,
        out: &mut [f32],
    ) -> Result<()> {
        match self.kept(weight, rank) {
            Some(held) => {
                let at = usize::try_from(row).ok().and_then(|r| r.checked_mul(out.len()));
                let from = at.and_then(|at| held.get(at..)?.get(..out.len()));
                out.copy_from_slice(
                    from.ok_or_else(|| fault(format!("{}: row {row}", weight.name)))?,
                );
                Ok(())
            }
            None => self.source.rows(weight, rank, row..row.saturating_add(1), out),
        }
    }

    fn kept(&self, weight: &WeightRef, rank: usize) -> Option<Arc<Vec<f32>>> {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.weights.get(&weight.name)?.get(&place(weight, rank)).cloned()
    }

    fn keep(&self, weight: &WeightRef, rank: usize, data: &Arc<Vec<f32>>) {
        let bytes = (data.len() as u64).saturating_mul(4);
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if held.bytes.saturating_add(bytes) > self.limit {
            return;
        }
        let ranks = held.weights.entry(weight.name.clone()).or_default();
        // Another device may have been faster.
        if ranks.insert(place(weight, rank), Arc::clone(data)).is_none() {
            held.bytes += bytes;
        }
    }
}

/// Devices that hold the whole weight share one copy.
fn place(weight: &WeightRef, rank: usize) -> usize {
    if weight.share == WeightShare::Whole { 0 } else { rank }
}

fn extents(weight: &WeightRef) -> Result<(u64, u64)> {
    weight.shape.matrix().ok_or_else(|| fault(format!("{} has too many rows", weight.name)))
}

fn resize(data: &mut Vec<f32>, rows: u64, columns: u64, weight: &WeightRef) -> Result<()> {
    let elements = rows.checked_mul(columns).and_then(|n| usize::try_from(n).ok());
    let elements = elements.ok_or_else(|| fault(format!("{} is too large", weight.name)))?;
    data.clear();
    data.try_reserve_exact(elements).map_err(|e| fault(format!("{}: {e}", weight.name)))?;
    data.resize(elements, 0.0);
    Ok(())
}
