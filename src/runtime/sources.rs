//! Whole weights, from wherever they are, cut for devices on demand.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::value::fault;
use super::weights::LocalWeights;
use crate::artifact::Artifact;
use crate::diag::Result;
use crate::graph::WeightRef;
use crate::num::widen;
use crate::partition::{Cut, Placement};
use crate::quantize::{Decoder, PlaneSlice};
use crate::tensor::{Shape, Span, TensorSource};

/// Weights by logical name, whole, decoded to f32.
pub trait WholeWeights: Send + Sync {
    /// Shape of a weight; `None` when there is none of that name.
    fn shape(&self, name: &str) -> Option<Shape>;

    /// Rows of a weight, as in [`Shape::matrix`]; `out` holds them exactly.
    ///
    /// # Errors
    /// A weight that is not there, rows outside of it, I/O.
    fn rows(&self, name: &str, rows: Range<u64>, out: &mut [f32]) -> Result<()>;
}

/// Weights of a checkpoint, as its sources yield them.
#[derive(Default)]
pub struct SourceWeights<'a> {
    sources: BTreeMap<String, Box<dyn TensorSource + 'a>>,
}

impl<'a> SourceWeights<'a> {
    /// No weights.
    pub fn new() -> SourceWeights<'a> {
        SourceWeights::default()
    }

    /// Adds the weight of that logical name.
    pub fn insert(&mut self, name: impl Into<String>, source: Box<dyn TensorSource + 'a>) {
        self.sources.insert(name.into(), source);
    }
}

impl WholeWeights for SourceWeights<'_> {
    fn shape(&self, name: &str) -> Option<Shape> {
        Some(self.sources.get(name)?.shape().clone())
    }

    fn rows(&self, name: &str, rows: Range<u64>, out: &mut [f32]) -> Result<()> {
        let source = self.sources.get(name).ok_or_else(|| missing(name))?;
        let bytes = source.rows(rows).map_err(|e| fault(format!("{name}: {e}")))?;
        widen(source.dtype(), &bytes, out).map_err(|e| fault(format!("{name}: {e}")))
    }
}

/// Weights of an artifact that stores them whole.
pub struct ArtifactWeights {
    artifact: Arc<Artifact>,
    decoders: BTreeMap<String, (usize, Decoder)>,
}

impl ArtifactWeights {
    /// Every entry of an artifact that decodes; a program that reads another gets an error then.
    pub fn new(artifact: Arc<Artifact>) -> ArtifactWeights {
        let mut decoders = BTreeMap::new();
        for entry in artifact.entries() {
            let Some((rows, columns)) = entry.shape().matrix() else { continue };
            let Ok(decoder) = Decoder::new(entry.encoding(), rows, columns) else { continue };
            decoders.insert(entry.name().to_string(), (entry.index(), decoder));
        }
        ArtifactWeights { artifact, decoders }
    }
}

impl WholeWeights for ArtifactWeights {
    fn shape(&self, name: &str) -> Option<Shape> {
        let (index, _) = self.decoders.get(name)?;
        Some(self.artifact.entry(*index)?.shape().clone())
    }

    fn rows(&self, name: &str, rows: Range<u64>, out: &mut [f32]) -> Result<()> {
        let found = self
            .decoders
            .get(name)
            .and_then(|(index, decoder)| Some((self.artifact.entry(*index)?, decoder)));
        let (entry, decoder) = found.ok_or_else(|| missing(name))?;
        let planes: Vec<PlaneSlice<'_>> =
            (0..entry.encoding().planes.len()).map(|k| PlaneSlice::whole(entry.plane(k))).collect();
        decoder.decode(rows, &planes, out).map_err(|e| fault(format!("{name}: {e}")))
    }
}

/// Whole weights as the devices of a placement see them.
pub struct Placed<W> {
    whole: W,
    placement: Placement,
}

impl<W: WholeWeights> Placed<W> {
    /// Cuts `whole` as `placement` says; a weight that it does not list is whole on every device.
    pub fn new(whole: W, placement: Placement) -> Placed<W> {
        Placed { whole, placement }
    }

    /// All weights on one device.
    pub fn single(whole: W) -> Placed<W> {
        Placed { whole, placement: Placement::default() }
    }
}

/// Elements of whole rows that are held at a time while columns are cut out of them.
const BLOCK: u64 = 1 << 20;

impl<W: WholeWeights> LocalWeights for Placed<W> {
    fn rows(
        &self,
        weight: &WeightRef,
        rank: usize,
        rows: Range<u64>,
        out: &mut [f32],
    ) -> Result<()> {
        let name = &weight.name;
        let cut = self.placement.cut(name);
        let (by_rows, shares) = match cut {
            None | Some(Cut::Whole { .. }) => return self.whole.rows(name, rows, out),
            // A vector is one row of the matrix form.
            Some(Cut::Rows(shares)) => (weight.shape.rank() > 1, shares),
            Some(Cut::Cols(shares)) => (false, shares),
        };
        let span = shares.spans.get(rank).copied();
        let span = span.ok_or_else(|| fault(format!("{name} has no share for device {rank}")))?;
        let whole = self.whole.shape(name).ok_or_else(|| missing(name))?;
        let wrong = || fault(format!("{name} does not have the share that its placement states"));
        let (_, columns) = whole.matrix().ok_or_else(wrong)?;
        if by_rows {
            let real = rows.start.min(span.len)..rows.end.min(span.len);
            let elements = (real.end - real.start).checked_mul(columns);
            let held = elements.and_then(|n| usize::try_from(n).ok()).filter(|n| *n <= out.len());
            let (values, padding) = out.split_at_mut(held.ok_or_else(wrong)?);
            padding.fill(0.0);
            if values.is_empty() {
                return Ok(());
            }
            let start = span.start.checked_add(real.start).ok_or_else(wrong)?;
            return self.whole.rows(name, start..start + (real.end - real.start), values);
        }
        self.columns(name, columns, span, shares.extent, rows, out)
            .and_then(|fits| if fits { Ok(()) } else { Err(wrong()) })
    }

    fn table_columns(&self, name: &str) -> Option<u64> {
        Some(self.whole.shape(name)?.matrix()?.1)
    }

    fn table_row(&self, name: &str, row: u64, out: &mut [f32]) -> Result<()> {
        self.whole.rows(name, row..row.saturating_add(1), out)
    }
}

impl<W: WholeWeights> Placed<W> {
    /// Cuts a span of columns out of whole rows; false when the lengths contradict each other.
    fn columns(
        &self,
        name: &str,
        columns: u64,
        span: Span,
        extent: u64,
        rows: Range<u64>,
        out: &mut [f32],
    ) -> Result<bool> {
        let size = |n: u64| usize::try_from(n).map_err(fault);
        let (columns, start, len, extent) =
            (size(columns)?, size(span.start)?, size(span.len)?, size(extent)?);
        let inside = start.checked_add(len).is_some_and(|end| end <= columns) && len <= extent;
        let count = size(rows.end.saturating_sub(rows.start))?;
        if !inside || extent == 0 || count.checked_mul(extent) != Some(out.len()) {
            return Ok(false);
        }
        let step = (BLOCK / (columns as u64).max(1)).max(1);
        let (mut first, mut whole) = (rows.start, Vec::new());
        for out in out.chunks_mut(size(step)?.saturating_mul(extent)) {
            let n = out.len() / extent;
            whole.resize(n * columns, 0.0f32);
            self.whole.rows(name, first..first + n as u64, &mut whole)?;
            for (to, from) in out.chunks_exact_mut(extent).zip(whole.chunks_exact(columns)) {
                let (values, padding) = to.split_at_mut(len);
                values.copy_from_slice(&from[start..start + len]);
                padding.fill(0.0);
            }
            first += n as u64;
        }
        Ok(true)
    }
}

fn missing(name: &str) -> crate::diag::Failure {
    fault(format!("there is no weight {name}"))
}
