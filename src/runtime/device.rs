//! One simulated device: its rank, its cache, and the interpretation of a program.

use std::borrow::Cow;

use super::activations::{Precision, operand, round, rounded};
use super::attention::{Blocks, Rings, Scoring, dense, paged, windowed, write_blocks, write_rings};
use super::cache::Cache;
use super::exchange::{Exchange, Joining};
use super::product::product;
use super::rows::{self, activate};
use super::value::{Value, fault};
use super::weights::Store;
use super::{rope, rows::best};
use crate::diag::{Failure, Result};
use crate::graph::{
    KvId, KvPair, Node, Op, Program, Programs, Projection, ValueId, WeightId, WeightRef,
    WeightShare,
};
use crate::model::Activation;
use crate::recipe::Activations;

/// Why a device stopped.
pub(super) enum Stop {
    /// Its own fault.
    Failed(Failure),
    /// Another device left it alone at a collective.
    Alone,
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Stop {
        Stop::Failed(failure)
    }
}

/// What a run is told, the same for every device.
pub(super) struct Call<'a> {
    pub program: &'a Program,
    /// Values of the program's inputs, in order.
    pub inputs: &'a [Value],
    /// Values that are handed out, beside others that are dropped when nobody reads them any more.
    pub wanted: &'a [ValueId],
    /// Whether `select_row` passes all rows on.
    pub all_rows: bool,
    pub store: &'a Store<'a>,
    /// In which arithmetic.
    pub precision: Precision,
    /// Where devices meet; absent for one device.
    pub exchange: Option<&'a Exchange>,
}

/// A device between runs.
pub(super) struct Device {
    rank: usize,
    caches: Vec<Cache>,
}

/// A device within a run.
struct Run<'a> {
    call: &'a Call<'a>,
    rank: usize,
    caches: &'a mut [Cache],
    values: Vec<Option<Value>>,
}

impl Device {
    pub(super) fn new(rank: usize, programs: &Programs, blocks: usize) -> Result<Device> {
        let caches = programs.kv.iter().map(|t| Cache::new(t, blocks)).collect::<Result<_>>()?;
        Ok(Device { rank, caches })
    }

    /// Runs a program; gives the wanted values.
    pub(super) fn run(&mut self, call: &Call<'_>) -> std::result::Result<Vec<Value>, Stop> {
        let program = call.program;
        let mut last_read = vec![0usize; program.values.len()];
        for (n, node) in program.nodes.iter().enumerate() {
            node.inputs.iter().for_each(|id| last_read[id.0 as usize] = n);
        }
        let keep = usize::MAX;
        call.wanted.iter().for_each(|id| last_read[id.0 as usize] = keep);
        let mut run = Run {
            call,
            rank: self.rank,
            caches: &mut self.caches,
            values: vec![None; program.values.len()],
        };
        for (port, value) in program.inputs.iter().zip(call.inputs) {
            run.keep(port.value, value.clone())?;
        }
        for (n, node) in program.nodes.iter().enumerate() {
            let results = run.node(node).map_err(|stop| match stop {
                Stop::Failed(mut failure) => {
                    failure.headline = format!(
                        "{}, operation {n} ({}): {}",
                        program.name,
                        node.op.name(),
                        failure.headline
                    );
                    Stop::Failed(failure)
                }
                Stop::Alone => Stop::Alone,
            })?;
            for id in node.inputs.iter().filter(|id| last_read[id.0 as usize] == n) {
                run.values[id.0 as usize] = None;
            }
            for (id, value) in node.outputs.iter().zip(results) {
                run.keep(*id, value)?;
            }
        }
        let get = |id: &ValueId| run.values.get(id.0 as usize).cloned().flatten();
        let found: Option<Vec<Value>> = call.wanted.iter().map(get).collect();
        found.ok_or_else(|| Stop::Failed(fault("a wanted value was never made")))
    }
}

impl Run<'_> {
    /// Keeps a value, as its type holds it.
    fn keep(&mut self, id: ValueId, value: Value) -> Result<()> {
        let declared = self.call.program.value(id).map(|v| v.dtype);
        let value = match declared.filter(|_| self.call.precision == Precision::Target) {
            Some(dtype) => rounded(&value, dtype)?,
            None => value,
        };
        let to = self.values.get_mut(id.0 as usize).ok_or_else(|| fault("no such value"))?;
        *to = Some(value);
        Ok(())
    }

    /// The rule for a matrix's operand.
    fn rule(&self, said: Option<Activations>) -> Option<Activations> {
        said.filter(|_| self.call.precision == Precision::Target)
    }

    fn value(&self, node: &Node, operand: usize) -> Result<&Value> {
        let id = node.inputs.get(operand);
        let value = id.and_then(|id| self.values.get(id.0 as usize)).and_then(Option::as_ref);
        value.ok_or_else(|| fault(format!("operand {operand} is missing")))
    }

    /// The operands from `from` on, by rank: one of rank 0 is a scalar integer.
    fn scalar(&self, node: &Node, from: usize) -> Result<Option<i64>> {
        for operand in from..node.inputs.len() {
            let value = self.value(node, operand)?;
            if value.shape().is_empty() {
                return Ok(value.as_ints()?.first().copied());
            }
        }
        Ok(None)
    }

    fn weight(&self, id: WeightId) -> Result<&WeightRef> {
        self.call.program.weight(id).ok_or_else(|| fault(format!("weight {}", id.0)))
    }

    fn vector(&self, id: WeightId) -> Result<std::sync::Arc<Vec<f32>>> {
        self.call.store.whole(self.weight(id)?, self.rank)
    }

    fn pair(&self, kv: KvPair) -> Result<(&Cache, &Cache)> {
        let get = |id: KvId| {
            self.caches.get(id.0 as usize).ok_or_else(|| fault(format!("cache tensor {}", id.0)))
        };
        Ok((get(kv.key)?, get(kv.value)?))
    }

    /// The declared shape of a result.
    fn declared(&self, node: &Node) -> Result<Vec<usize>> {
        let id = node.outputs.first().ok_or_else(|| fault("no result"))?;
        let declared = self.call.program.value(*id).ok_or_else(|| fault("no such value"))?;
        declared.shape.extents().iter().map(|d| usize::try_from(*d).map_err(fault)).collect()
    }

    fn node(&mut self, node: &Node) -> std::result::Result<Vec<Value>, Stop> {
        let one =
            |value: Result<Value>| -> std::result::Result<Vec<Value>, Stop> { Ok(vec![value?]) };
        match &node.op {
            Op::AllReduce => one(self.join(node, |_| Joining::Sum)?),
            Op::AllGather { keep } => {
                let keep = usize::try_from(*keep).map_err(fault)?;
                one(self.join(node, |width| Joining::Gather { width, keep })?)
            }
            Op::KvWrite { kv } => {
                let [k, v, at, tables] = self.operands(node)?;
                let (k, v) = (self.cached(kv.key, k)?, self.cached(kv.value, v)?);
                write_blocks(self.cache(kv.key)?, &k, &at, &tables)?;
                write_blocks(self.cache(kv.value)?, &v, &at, &tables)?;
                Ok(Vec::new())
            }
            Op::WindowWrite { kv } => {
                let [k, v, at, rings] = self.operands(node)?;
                let last = self.scalar(node, 4)?;
                let (k, v) = (self.cached(kv.key, k)?, self.cached(kv.value, v)?);
                write_rings(self.cache(kv.key)?, &k, &at, &rings, last)?;
                write_rings(self.cache(kv.value)?, &v, &at, &rings, last)?;
                Ok(Vec::new())
            }
            Op::Route { top_k, normalize, expert_scale } => {
                let scale = expert_scale.map(|id| self.vector(id)).transpose()?;
                let scale = scale.as_ref().map(|s| s.as_slice());
                let top_k = usize::try_from(*top_k).map_err(fault)?;
                let (weights, ids) = rows::route(self.value(node, 0)?, top_k, *normalize, scale)?;
                Ok(vec![weights, ids])
            }
            Op::PoolPatches { side } => {
                let side = usize::try_from(*side).map_err(fault)?;
                let [x, at, padding] = self.operands(node)?;
                let (rows, held) = rows::pool(&x, &at, &padding, side)?;
                Ok(vec![rows, held])
            }
            Op::Linear { projections, activations } => {
                let x = self.value(node, 0)?;
                let x = match operand(self.rule(*activations), x.as_floats()?, x.columns())? {
                    Cow::Borrowed(_) => x.clone(),
                    Cow::Owned(rounded) => Value::floats(x.shape(), rounded)?,
                };
                let each = projections.iter().map(|p| self.projected(&x, p));
                Ok(each.collect::<Result<_>>()?)
            }
            op => one(self.compute(node, op)),
        }
    }

    /// Operations with one result that touch no state of the device but to read it.
    fn compute(&self, node: &Node, op: &Op) -> Result<Value> {
        let x = self.value(node, 0)?;
        match op {
            Op::Embed { table, scale } => self.embed(x, self.weight(*table)?, *scale),
            Op::RmsNorm { weight, eps, one_plus } => {
                let weight = weight.map(|id| self.vector(id)).transpose()?;
                rows::rms_norm(x, weight.as_ref().map(|w| w.as_slice()), *eps, *one_plus)
            }
            Op::LayerNorm { weight, bias, eps } => {
                let bias = bias.map(|id| self.vector(id)).transpose()?;
                let bias = bias.as_ref().map(|b| b.as_slice());
                rows::layer_norm(x, &self.vector(*weight)?, bias, *eps)
            }
            Op::Rope { rope } => rope::rotate(rope, x, self.value(node, 1)?),
            Op::AxialRope { theta } => rope::rotate_axes(*theta, x, self.value(node, 1)?),
            Op::Reshape => x.reshaped(self.declared(node)?),
            Op::Columns { start } => {
                let count = self.declared(node)?.last().copied().unwrap_or(0);
                rows::columns(x, usize::try_from(*start).map_err(fault)?, count)
            }
            Op::Concat => {
                let parts: Vec<&Value> =
                    (0..node.inputs.len()).map(|n| self.value(node, n)).collect::<Result<_>>()?;
                rows::concat(&parts)
            }
            Op::Add => rows::zip(x, self.value(node, 1)?, |a, b| a + b),
            Op::Mul => rows::zip(x, self.value(node, 1)?, |a, b| a * b),
            Op::Affine { scale, shift } => {
                let (scale, shift) = (*scale as f32, *shift as f32);
                rows::map(x, |v| v * scale + shift)
            }
            Op::ScaleBy { weight } => rows::with_vector(x, &self.vector(*weight)?, |v, w| v * w),
            Op::Shift { weight, subtract } => {
                let sign = if *subtract { -1.0 } else { 1.0 };
                rows::with_vector(x, &self.vector(*weight)?, |v, w| v + sign * w)
            }
            Op::Clamp { low, high } => {
                let bound = |id: &WeightId| -> Result<f32> {
                    self.vector(*id)?.first().copied().ok_or_else(|| fault("an empty bound"))
                };
                let (low, high) = (bound(low)?, bound(high)?);
                rows::map(x, |v| v.max(low).min(high))
            }
            Op::Gated { activation } => {
                rows::zip(x, self.value(node, 1)?, |gate, up| activate(*activation, gate) * up)
            }
            Op::Activate { activation } => rows::map(x, |v| activate(*activation, v)),
            Op::Softcap { cap } => {
                let cap = *cap as f32;
                rows::map(x, |v| cap * (v / cap).tanh())
            }
            Op::PagedAttention { kv, scale, softcap, own } => {
                let (key, value) = self.pair(*kv)?;
                let mask = (3..node.inputs.len())
                    .map(|n| self.value(node, n))
                    .find(|v| v.as_ref().is_ok_and(|v| !v.shape().is_empty()))
                    .transpose()?;
                let from = Blocks {
                    key,
                    value,
                    at: self.value(node, 1)?,
                    tables: self.value(node, 2)?,
                    mask,
                    last: self.scalar(node, 3)?,
                    own: *own,
                };
                paged(x, &from, Scoring { scale: *scale, softcap: *softcap })
            }
            Op::WindowAttention { kv, window, scale, softcap, own } => {
                let (key, value) = self.pair(*kv)?;
                let own_rows = node.inputs.len() >= 5;
                let rows = own_rows
                    .then(|| Ok::<_, Failure>((self.value(node, 3)?, self.value(node, 4)?)))
                    .transpose()?;
                let from = Rings {
                    key,
                    value,
                    positions: self.value(node, 1)?,
                    rings: self.value(node, 2)?,
                    rows,
                    last: self.scalar(node, 3)?,
                    window: *window,
                    own: *own,
                };
                windowed(x, &from, Scoring { scale: *scale, softcap: *softcap })
            }
            Op::DenseAttention { scale } => {
                let mask = (node.inputs.len() > 3).then(|| self.value(node, 3)).transpose()?;
                dense(x, self.value(node, 1)?, self.value(node, 2)?, mask, *scale)
            }
            Op::SelectRow => self.select(x, self.value(node, 1)?),
            Op::Experts { gate_up, down, activation, activations } => {
                let rule = self.rule(*activations);
                self.experts(node, gate_up, down, *activation, rule)
            }
            Op::EmbedAxes { table, axes_first } => {
                let weight = self.weight(*table)?;
                let extents: Vec<usize> = (weight.shape.extents().iter())
                    .map(|d| usize::try_from(*d).map_err(fault))
                    .collect::<Result<_>>()?;
                let extents = <[usize; 3]>::try_from(extents)
                    .map_err(|_| fault(format!("{} is no pair of tables", weight.name)))?;
                let table = self.vector(*table)?;
                rows::embed_axes(&table, extents, *axes_first, x, self.value(node, 1)?)
            }
            Op::OrderedHead { head, ordering, top_k } => {
                self.ordered_head(node, self.weight(*head)?, *ordering, *top_k)
            }
            Op::FillUnscored => rows::fill_unscored(x),
            Op::EmbedPatches { kernel, bias } => {
                let y = product(x.as_floats()?, &self.vector(*kernel)?, x.columns());
                let outputs = self.weight(*kernel)?.shape.extents().first().copied();
                let outputs = usize::try_from(outputs.unwrap_or(0)).map_err(fault)?;
                let y = Value::floats(x.with_columns(outputs), y)?;
                match bias {
                    Some(bias) => rows::with_vector(&y, &self.vector(*bias)?, |v, b| v + b),
                    None => Ok(y),
                }
            }
            Op::AddRows { table } => rows::add_rows(x, &self.vector(*table)?),
            Op::PoolGrid { side } => rows::pool_grid(x, usize::try_from(*side).map_err(fault)?),
            Op::Product { weight } => {
                let [inputs, outputs] = matrix(self.weight(*weight)?)?;
                let by_outputs = rows::transposed(&self.vector(*weight)?, inputs, outputs)?;
                let y = product(x.as_floats()?, &by_outputs, inputs);
                Value::floats(x.with_columns(outputs), y)
            }
            Op::AllReduce
            | Op::AllGather { .. }
            | Op::KvWrite { .. }
            | Op::WindowWrite { .. }
            | Op::Linear { .. }
            | Op::Route { .. }
            | Op::PoolPatches { .. } => Err(fault("an operation with other results")),
        }
    }

    fn operands<const N: usize>(&self, node: &Node) -> Result<[Value; N]> {
        let all = (0..N).map(|n| self.value(node, n).cloned()).collect::<Result<Vec<_>>>()?;
        <[Value; N]>::try_from(all).map_err(|_| fault("operands are missing"))
    }

    /// Rows as a cache tensor holds them.
    fn cached(&self, id: KvId, rows: Value) -> Result<Value> {
        let cache = self.caches.get(id.0 as usize);
        let cache = cache.ok_or_else(|| fault(format!("cache tensor {}", id.0)))?;
        match self.call.precision {
            Precision::Reference => Ok(rows),
            Precision::Target => {
                let mut data = rows.as_floats()?.to_vec();
                round(&mut data, cache.dtype());
                Value::floats(rows.shape(), data)
            }
        }
    }

    fn cache(&mut self, id: KvId) -> Result<&mut Cache> {
        self.caches.get_mut(id.0 as usize).ok_or_else(|| fault(format!("cache tensor {}", id.0)))
    }

    fn join(
        &self,
        node: &Node,
        joining: impl Fn(usize) -> Joining,
    ) -> std::result::Result<Result<Value>, Stop> {
        let x = self.value(node, 0)?;
        let exchange = self.call.exchange.ok_or_else(|| fault("a collective on one device"))?;
        let joining = joining(x.columns());
        let part = std::sync::Arc::clone(x.shared_floats()?);
        let joined = exchange.join(self.rank, part, joining).ok_or(Stop::Alone)?;
        Ok(match joining {
            Joining::Sum => Value::floats(x.shape(), joined),
            Joining::Gather { keep, .. } => Value::floats(x.with_columns(keep), joined),
        })
    }

    fn embed(&self, ids: &Value, table: &WeightRef, scale: f64) -> Result<Value> {
        let [rows, columns] = matrix(table)?;
        let first = match table.share {
            WeightShare::Rows => {
                rows.checked_mul(self.rank).ok_or_else(|| fault("too many rows"))?
            }
            _ => 0,
        };
        let ids_of = ids.as_ints()?;
        let mut data = vec![0.0f32; ids_of.len() * columns];
        for (id, out) in ids_of.iter().zip(data.chunks_exact_mut(columns.max(1))) {
            let local = usize::try_from(*id).ok().and_then(|id| id.checked_sub(first));
            if let Some(local) = local.filter(|l| *l < rows) {
                self.call.store.row(table, self.rank, local as u64, out)?;
                out.iter_mut().for_each(|v| *v *= scale as f32);
            }
        }
        let mut shape = ids.shape().to_vec();
        shape.push(columns);
        Value::floats(shape, data)
    }

    fn projected(&self, x: &Value, projection: &Projection) -> Result<Value> {
        let y = self.linear(x, self.weight(projection.weight)?)?;
        match projection.bias {
            Some(bias) => rows::with_vector(&y, &self.vector(bias)?, |v, b| v + b),
            None => Ok(y),
        }
    }

    fn linear(&self, x: &Value, weight: &WeightRef) -> Result<Value> {
        let [rows, columns] = matrix(weight)?;
        if x.columns() != columns || columns == 0 {
            return Err(fault(format!("{} columns meet {}", x.columns(), weight.name)));
        }
        let values = x.as_floats()?;
        let mut out = Vec::new();
        self.call.store.blocks(weight, self.rank, |first, block| {
            let part = product(values, block, columns);
            let n = block.len() / columns;
            if n == rows {
                out = part;
                return Ok(());
            }
            out.resize(values.len() / columns * rows, 0.0);
            for (row, from) in out.chunks_exact_mut(rows).zip(part.chunks_exact(n.max(1))) {
                let to = row.get_mut(first..first + n);
                to.ok_or_else(|| fault("too many rows"))?.copy_from_slice(from);
            }
            Ok(())
        })?;
        Value::floats(x.with_columns(rows), out)
    }

    fn select(&self, x: &Value, at: &Value) -> Result<Value> {
        if self.call.all_rows {
            return Ok(x.clone());
        }
        let columns = x.columns();
        let row = at.as_ints()?.first().and_then(|n| usize::try_from(*n).ok());
        let from = row
            .and_then(|n| n.checked_mul(columns))
            .and_then(|n| x.as_floats().ok()?.get(n..n.checked_add(columns)?));
        let from = from.ok_or_else(|| fault(format!("row {at:?} of {:?}", x.shape())))?;
        Value::floats([1, 1, columns], from.to_vec())
    }

    fn experts(
        &self,
        node: &Node,
        gate_up: &[WeightId],
        down: &[WeightId],
        activation: Activation,
        rule: Option<Activations>,
    ) -> Result<Value> {
        let [x, weights, ids] = self.operands(node)?;
        let columns = x.columns();
        let values = x.as_floats()?;
        let (weights, top_k) = (weights.as_floats()?, ids.columns());
        let ids = ids.as_ints()?;
        // Experts of this device; all of them on one.
        let each = match gate_up.first().map(|id| self.weight(*id)).transpose()?.map(|w| w.share) {
            Some(WeightShare::Expert) => gate_up.len().div_ceil(self.call.program.devices as usize),
            _ => gate_up.len(),
        };
        let local =
            if each == gate_up.len() { 0..each } else { self.rank * each..(self.rank + 1) * each };
        let mut out = vec![0.0f32; values.len()];
        for (expert, (gate_up, down)) in gate_up.iter().zip(down).enumerate() {
            if !local.contains(&expert) {
                continue;
            }
            let chosen: Vec<(usize, f32)> = (ids.iter().zip(weights).enumerate())
                .filter(|(_, (id, _))| **id == expert as i64)
                .map(|(n, (_, weight))| (n / top_k.max(1), *weight))
                .collect();
            if chosen.is_empty() {
                continue;
            }
            let mut mine = Vec::with_capacity(chosen.len() * columns);
            chosen
                .iter()
                .for_each(|(row, _)| mine.extend(&values[row * columns..(row + 1) * columns]));
            let mine = operand(rule, &mine, columns)?;
            let both = product(&mine, &self.vector(*gate_up)?, columns);
            let width = both.len() / chosen.len() / 2;
            let mut inner = Vec::with_capacity(chosen.len() * width);
            for row in both.chunks_exact((2 * width).max(1)) {
                let (gate, up) = row.split_at(width);
                inner.extend(gate.iter().zip(up).map(|(g, u)| activate(activation, *g) * u));
            }
            let inner = operand(rule, &inner, width)?;
            let result = product(&inner, &self.vector(*down)?, width);
            for ((row, weight), from) in chosen.iter().zip(result.chunks_exact(columns.max(1))) {
                let to = &mut out[row * columns..(row + 1) * columns];
                to.iter_mut().zip(from).for_each(|(o, v)| *o += weight * v);
            }
        }
        Value::floats(x.shape(), out)
    }

    fn ordered_head(
        &self,
        node: &Node,
        head: &WeightRef,
        ordering: WeightId,
        top_k: u64,
    ) -> Result<Value> {
        let [h, centroids] = self.operands(node)?;
        let [rows, columns] = matrix(head)?;
        let first = match head.share {
            WeightShare::Rows => {
                rows.checked_mul(self.rank).ok_or_else(|| fault("too many rows"))?
            }
            _ => 0,
        };
        // Token ids are exact in f32 up to 2^24, beyond any vocabulary.
        let ordering = self.vector(ordering)?;
        let n = centroids.columns().max(1);
        let each = ordering.len() / n;
        let top_k = usize::try_from(top_k).map_err(fault)?;
        let mut out = vec![f32::NEG_INFINITY; h.as_floats()?.len() / columns.max(1) * rows];
        let sequences = h.as_floats()?.chunks_exact(columns.max(1));
        let scores = centroids.as_floats()?.chunks_exact(n);
        let mut row = vec![0.0f32; columns];
        for ((h, scores), out) in sequences.zip(scores).zip(out.chunks_exact_mut(rows.max(1))) {
            for centroid in best(scores, top_k) {
                for token in &ordering[centroid * each..(centroid + 1) * each] {
                    let local = (*token as usize).checked_sub(first).filter(|l| *l < rows);
                    if let Some(local) = local {
                        self.call.store.row(head, self.rank, local as u64, &mut row)?;
                        out[local] = super::product::dot(h, &row);
                    }
                }
            }
        }
        Value::floats(h.with_columns(rows), out)
    }
}

fn matrix(weight: &WeightRef) -> Result<[usize; 2]> {
    match weight.shape.extents() {
        [rows, columns] => {
            Ok([usize::try_from(*rows).map_err(fault)?, usize::try_from(*columns).map_err(fault)?])
        }
        _ => Err(fault(format!("{} is no matrix", weight.name))),
    }
}
