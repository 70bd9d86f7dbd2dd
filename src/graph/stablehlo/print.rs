//! One program as a module.

use std::collections::BTreeMap;

use super::text::{Function, V};
use super::weights::element;
use crate::diag::{Diagnostic, Failure, FailureKind, Problems, Result};
use crate::graph::ir::{
    KvLayout, KvPair, KvTensor, Node, Op, Program, Programs, Projection, ValueId, WeightId,
    WeightShare,
};
use crate::graph::rope::frequencies;
use crate::model::{Activation, RopeSpec};
use crate::tensor::Encoding;

/// A printed program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// The text.
    pub text: String,
    /// Its arguments, in order.
    pub arguments: Vec<ModuleArgument>,
    /// Names of its results, in order.
    pub results: Vec<String>,
}

/// An argument of a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleArgument {
    /// Its `rad.name`.
    pub name: String,
    /// Extents.
    pub shape: Vec<u64>,
    /// MLIR element type.
    pub element: &'static str,
    /// What it is.
    pub kind: ArgumentKind,
}

/// What an argument is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ArgumentKind {
    /// The device's number among those that run the program.
    Rank,
    /// An input that the host fills for every call.
    Input,
    /// A cache tensor, which a result of the same name replaces.
    Cache,
    /// A plane of a weight's shard.
    Weight {
        /// The weight on every device of the group, by rank; a single one is that of all devices.
        weights: Vec<String>,
        /// Place of the plane in the weight's encoding.
        plane: usize,
    },
}

pub(super) struct Printer<'a> {
    pub f: Function,
    pub program: &'a Program,
    programs: &'a Programs,
    pub encodings: &'a dyn Fn(&str) -> Option<Encoding>,
    blocks: u64,
    arguments: Vec<ModuleArgument>,
    values: Vec<Option<V>>,
    pub planes: BTreeMap<String, V>,
    pub values_of: BTreeMap<String, V>,
    pub kv: BTreeMap<u32, V>,
    rank: Option<V>,
    problems: Problems,
}

/// Most devices of a program that is printed: every collective lists them all.
const MAX_DEVICES: u32 = 1024;

/// Prints a program, with a paged cache of `blocks` blocks. `encodings` tells how a weight is stored.
///
/// # Errors
/// What StableHLO has no form for: element types narrower than a byte other than 4 bits, rotated weights. More than 1,024
/// devices.
pub fn module(
    programs: &Programs,
    program: &Program,
    encodings: &dyn Fn(&str) -> Option<Encoding>,
    blocks: u64,
) -> Result<Module> {
    let mut p = Printer {
        f: Function::new(program.devices),
        program,
        programs,
        encodings,
        blocks,
        arguments: Vec::new(),
        values: vec![None; program.values.len()],
        planes: BTreeMap::new(),
        values_of: BTreeMap::new(),
        kv: BTreeMap::new(),
        rank: None,
        problems: Problems::new(),
    };
    if program.devices > MAX_DEVICES {
        let devices = program.devices;
        p.fault(format!("{devices} devices; collectives of at most {MAX_DEVICES} are printed"));
        return p.finish();
    }
    p.interface();
    for node in &program.nodes {
        if p.node(node).is_none() && p.problems.is_empty() {
            p.fault(format!("{} has operands that were not printed", node.op.name()));
        }
        if !p.problems.is_empty() {
            break;
        }
    }
    p.finish()
}

impl Printer<'_> {
    pub(super) fn fault(&mut self, what: String) {
        self.problems.push(Diagnostic::new("stablehlo", format!("{}: {what}", self.program.name)));
    }

    pub(super) fn argument(
        &mut self,
        name: &str,
        shape: &[u64],
        element: &'static str,
        kind: ArgumentKind,
    ) -> V {
        if name.contains(|c: char| c == '"' || c == '\\' || c.is_control()) {
            self.fault(format!("{name:?} cannot be an argument's name"));
        }
        let name = name.to_owned();
        let v = self.f.argument(&name, shape, element);
        self.arguments.push(ModuleArgument { name, shape: shape.to_vec(), element, kind });
        v
    }

    /// The arguments that come before the weights: rank, inputs, cache.
    fn interface(&mut self) {
        let ranked = |op: &Op| match op {
            Op::Experts { .. } => true,
            Op::Embed { table, .. } | Op::OrderedHead { head: table, .. } => {
                self.program.weight(*table).is_some_and(|w| w.share == WeightShare::Rows)
            }
            _ => false,
        };
        if self.program.devices > 1 && self.program.nodes.iter().any(|n| ranked(&n.op)) {
            self.rank = Some(self.argument("rank", &[], "i32", ArgumentKind::Rank));
        }
        for port in &self.program.inputs {
            let Some(ty) = self.program.value(port.value).cloned() else { continue };
            let Some((element, false)) = element(ty.dtype) else {
                self.fault(format!("an input of type {}", ty.dtype));
                continue;
            };
            let v = self.argument(&port.name, ty.shape.extents(), element, ArgumentKind::Input);
            let v = if ty.dtype.is_float() {
                self.f.convert(&v, "f32")
            } else if element == "i1" {
                v
            } else {
                self.f.convert(&v, "i32")
            };
            self.set(port.value, v);
        }
        let used: std::collections::BTreeSet<u32> = self
            .program
            .nodes
            .iter()
            .filter_map(|n| n.op.kv())
            .flat_map(|(pair, _)| [pair.key.0, pair.value.0])
            .collect();
        for id in used {
            let Some(t) = self.programs.kv.get(id as usize).cloned() else { continue };
            let shape = match t.layout {
                KvLayout::Paged { block } => [self.blocks, t.heads, block, t.head_dim],
                KvLayout::Window { slots, tokens } => [slots, t.heads, tokens, t.head_dim],
            };
            let Some((element, false)) = element(t.dtype) else {
                self.fault(format!("a cache of type {}", t.dtype));
                continue;
            };
            let v = self.argument(&t.name, &shape, element, ArgumentKind::Cache);
            self.kv.insert(id, v);
        }
    }

    fn finish(mut self) -> Result<Module> {
        for port in &self.program.outputs {
            let value = self.values.get(port.value.0 as usize).cloned().flatten();
            let ty = self.program.value(port.value).and_then(|t| element(t.dtype));
            if let (Some(v), Some((ty, _))) = (value, ty) {
                let v = self.f.convert(&v, ty);
                self.f.results.push((v, port.name.clone()));
            }
        }
        for (id, v) in &self.kv {
            let Some(t) = self.programs.kv.get(*id as usize) else { continue };
            let result = self.f.results.len();
            for argument in self.f.arguments.iter_mut().filter(|a| a.name == t.name) {
                argument.becomes = Some(result);
            }
            self.f.results.push((v.clone(), t.name.clone()));
        }
        let module = Module {
            text: self.f.module(&self.program.name),
            arguments: self.arguments,
            results: self.f.results.iter().map(|(_, name)| name.clone()).collect(),
        };
        self.problems.finish(FailureKind::Refused, "this program has no StableHLO form", module)
    }

    pub(super) fn set(&mut self, id: ValueId, v: V) {
        if let Some(slot) = self.values.get_mut(id.0 as usize) {
            *slot = Some(v);
        }
    }

    pub(super) fn get(&self, id: &ValueId) -> Option<V> {
        self.values.get(id.0 as usize).cloned().flatten()
    }

    /// Blocks of the paged cache.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The key tensor of a layer.
    pub(super) fn cache(&self, pair: KvPair) -> Option<&KvTensor> {
        self.programs.kv(pair.key)
    }

    /// Extents of a node's first result.
    fn result_shape(&self, node: &Node) -> Vec<u64> {
        let v = node.outputs.first().and_then(|id| self.program.value(*id));
        v.map(|v| v.shape.extents().to_vec()).unwrap_or_default()
    }

    fn node(&mut self, node: &Node) -> Option<()> {
        let operands: Option<Vec<V>> = node.inputs.iter().map(|id| self.get(id)).collect();
        let operands = operands?;
        let x = operands.first().cloned()?;
        let shape = self.result_shape(node);
        let result = match &node.op {
            Op::Embed { table, scale } => self.embed(*table, *scale, &x, &shape)?,
            Op::Linear { projections, .. } => {
                for (projection, id) in projections.iter().zip(&node.outputs) {
                    let y = self.projected(&x, projection)?;
                    self.set(*id, y);
                }
                return Some(());
            }
            Op::RmsNorm { weight, eps, one_plus } => {
                let square = self.f.binary("multiply", &x, &x);
                let mean = self.mean(&square);
                let mean = self.f.scalar("add", &mean, *eps);
                let r = self.f.unary("rsqrt", &mean);
                let y = self.f.binary("multiply", &x, &r);
                match weight {
                    Some(weight) => {
                        let mut w = self.vector(*weight)?;
                        if *one_plus {
                            w = self.f.scalar("add", &w, 1.0);
                        }
                        let w = self.along_last(&w, &y.shape);
                        self.f.binary("multiply", &y, &w)
                    }
                    None => y,
                }
            }
            Op::LayerNorm { weight, bias, eps } => {
                let mean = self.mean(&x);
                let centred = self.f.binary("subtract", &x, &mean);
                let square = self.f.binary("multiply", &centred, &centred);
                let variance = self.mean(&square);
                let variance = self.f.scalar("add", &variance, *eps);
                let r = self.f.unary("rsqrt", &variance);
                let y = self.f.binary("multiply", &centred, &r);
                let w = self.vector(*weight)?;
                let w = self.along_last(&w, &y.shape);
                let y = self.f.binary("multiply", &y, &w);
                match bias {
                    Some(bias) => {
                        let b = self.vector(*bias)?;
                        let b = self.along_last(&b, &y.shape);
                        self.f.binary("add", &y, &b)
                    }
                    None => y,
                }
            }
            Op::Rope { rope } => {
                let at = operands.get(1)?;
                self.rotate(&x, at, rope)
            }
            Op::AxialRope { theta } => {
                let at = operands.get(1)?.clone();
                let half = shape.last()? / 2;
                let last = shape.len() - 1;
                let rope = RopeSpec {
                    theta: *theta,
                    rotary_dims: half,
                    scaling: crate::model::RopeScaling::Default,
                };
                let mut parts = Vec::new();
                for axis in 0..2 {
                    let part = self.f.slice(&x, last, axis * half, (axis + 1) * half);
                    let along = self.f.slice(&at, 2, axis, axis + 1);
                    let along = self.f.reshape(&along, at.shape.get(..2)?);
                    parts.push(self.rotate(&part, &along, &rope));
                }
                self.f.concatenate(&parts.iter().collect::<Vec<_>>(), last)
            }
            Op::Reshape => self.f.reshape(&x, &shape),
            Op::Columns { start } => {
                let last = shape.len().checked_sub(1)?;
                self.f.slice(&x, last, *start, start + shape.last()?)
            }
            Op::Concat => {
                let last = shape.len().checked_sub(1)?;
                self.f.concatenate(&operands.iter().collect::<Vec<_>>(), last)
            }
            Op::Add => self.f.binary("add", &x, operands.get(1)?),
            Op::Mul => self.f.binary("multiply", &x, operands.get(1)?),
            Op::Affine { scale, shift } => {
                let y = self.f.scalar("multiply", &x, *scale);
                if *shift == 0.0 { y } else { self.f.scalar("add", &y, *shift) }
            }
            Op::ScaleBy { weight } => {
                let w = self.vector(*weight)?;
                let w = self.along_last(&w, &x.shape);
                self.f.binary("multiply", &x, &w)
            }
            Op::Shift { weight, subtract } => {
                let w = self.vector(*weight)?;
                let w = self.along_last(&w, &x.shape);
                self.f.binary(if *subtract { "subtract" } else { "add" }, &x, &w)
            }
            Op::Clamp { low, high } => {
                let low = self.vector(*low)?;
                let low = self.along_last(&low, &x.shape);
                let high = self.vector(*high)?;
                let high = self.along_last(&high, &x.shape);
                let y = self.f.binary("maximum", &x, &low);
                self.f.binary("minimum", &y, &high)
            }
            Op::Gated { activation } => {
                let a = self.activate(&x, *activation);
                self.f.binary("multiply", &a, operands.get(1)?)
            }
            Op::Activate { activation } => self.activate(&x, *activation),
            Op::Softcap { cap } => self.softcap(&x, *cap),
            Op::SelectRow => {
                let row = self.f.dynamic_row(&x, 1, operands.get(1)?);
                self.f.reshape(&row, &shape)
            }
            Op::AllReduce => self.f.all_reduce(&x),
            Op::AllGather { keep } => {
                let all = self.f.all_gather(&x);
                let last = all.shape.len() - 1;
                self.f.slice(&all, last, 0, *keep)
            }
            Op::EmbedAxes { table, axes_first } => {
                self.embed_axes(*table, *axes_first, &x, operands.get(1)?, &shape)?
            }
            Op::DenseAttention { scale } => self.dense_attention(&operands, *scale)?,
            Op::KvWrite { kv } => return self.kv_write(*kv, &operands),
            Op::WindowWrite { kv } => return self.window_write(*kv, &operands),
            Op::PagedAttention { kv, scale, softcap, own } => {
                self.paged_attention(*kv, *scale, *softcap, *own, &operands)?
            }
            Op::WindowAttention { kv, window, scale, softcap, own } => {
                self.window_attention(*kv, *window, *scale, *softcap, *own, &operands)?
            }
            Op::Route { top_k, normalize, expert_scale } => {
                let rows: u64 = x.shape.iter().take(x.shape.len() - 1).product();
                let scores = self.f.reshape(&x, &[rows, *x.shape.last()?]);
                let p = self.f.softmax(&scores);
                let (mut w, ids) = self.f.top(&p, *top_k);
                if *normalize {
                    let sum = self.f.over_last("add", &w);
                    w = self.f.binary("divide", &w, &sum);
                }
                if let Some(scale) = expert_scale {
                    let s = self.vector(*scale)?;
                    let flat = self.f.reshape(&ids, &[rows * top_k]);
                    let s = self.f.take(&s, &flat);
                    let s = self.f.reshape(&s, &[rows, *top_k]);
                    w = self.f.binary("multiply", &w, &s);
                }
                let w = self.f.reshape(&w, &shape);
                let ids = self.f.reshape(&ids, &shape);
                self.set(*node.outputs.get(1)?, ids);
                w
            }
            Op::Experts { gate_up, down, activation, .. } => {
                self.experts(gate_up, down, *activation, &operands, &shape)?
            }
            Op::PoolPatches { side } => {
                let (rows, valid) = self.pool(*side, &operands)?;
                self.set(*node.outputs.get(1)?, valid);
                rows
            }
            Op::EmbedPatches { kernel, bias } => {
                let outputs = self.weight_ref(*kernel)?.shape.extents().first().copied()?;
                let kernels = self.matrix(*kernel)?;
                let kernels = self.f.reshape(&kernels, &[outputs, *x.shape.last()?]);
                let y = self.product(&x, &kernels);
                self.plus(&y, *bias)?
            }
            Op::AddRows { table } => {
                let table = self.matrix(*table)?;
                let table = self.f.reshape(&table, &shape);
                self.f.binary("add", &x, &table)
            }
            Op::PoolGrid { side } => self.pool_grid(&x, *side, &shape)?,
            Op::Product { weight } => {
                let w = self.matrix(*weight)?;
                let axis = [x.shape.len() as u64 - 1];
                self.f.dot(&x, &w, [&[], &[]], [&axis, &[0]])
            }
            Op::OrderedHead { head, ordering, top_k } => {
                self.ordered_head(*head, *ordering, *top_k, &operands, &shape)?
            }
            Op::FillUnscored => {
                let none = self.f.constant(f64::NEG_INFINITY, &x.shape);
                let unscored = self.f.compare("EQ", &x, &none);
                let most = self.f.constant(f64::INFINITY, &x.shape);
                let scored = self.f.select(&unscored, &most, &x);
                let least = self.f.over_last("minimum", &scored);
                let fill = self.f.scalar("subtract", &least, 1.0);
                self.f.select(&unscored, &fill, &x)
            }
        };
        self.set(*node.outputs.first()?, result);
        Some(())
    }

    /// `x Wᵀ + bias` over the last axis.
    fn projected(&mut self, x: &V, projection: &Projection) -> Option<V> {
        let w = self.matrix(projection.weight)?;
        let y = self.product(x, &w);
        self.plus(&y, projection.bias)
    }

    /// Plus a vector of the last axis, if there is one.
    fn plus(&mut self, y: &V, bias: Option<WeightId>) -> Option<V> {
        let Some(bias) = bias else { return Some(y.clone()) };
        let b = self.vector(bias)?;
        let b = self.along_last(&b, &y.shape);
        Some(self.f.binary("add", y, &b))
    }

    /// `x Wᵀ` over the last axis.
    fn product(&mut self, x: &V, w: &V) -> V {
        let axis = [x.shape.len() as u64 - 1];
        self.f.dot(x, w, [&[], &[]], [&axis, &[1]])
    }

    fn mean(&mut self, x: &V) -> V {
        let n = x.shape.last().copied().unwrap_or(1) as f64;
        let sum = self.f.over_last("add", x);
        self.f.scalar("divide", &sum, n)
    }

    /// A vector of the last axis (or one number) in a shape.
    fn along_last(&mut self, v: &V, shape: &[u64]) -> V {
        if v.shape == [1] {
            let v = self.f.reshape(v, &[]);
            return self.f.broadcast(&v, &[], shape);
        }
        self.f.broadcast(v, &[shape.len() as u64 - 1], shape)
    }

    pub(super) fn softcap(&mut self, x: &V, cap: f64) -> V {
        let y = self.f.scalar("divide", x, cap);
        let y = self.f.unary("tanh", &y);
        self.f.scalar("multiply", &y, cap)
    }

    fn activate(&mut self, x: &V, activation: Activation) -> V {
        match activation {
            Activation::Silu => {
                let s = self.f.unary("logistic", x);
                self.f.binary("multiply", x, &s)
            }
            Activation::GeluTanh => {
                // ½ x (1 + tanh(√(2/π) (x + 0.044715 x³)))
                let square = self.f.binary("multiply", x, x);
                let cube = self.f.binary("multiply", &square, x);
                let inner = self.f.scalar("multiply", &cube, 0.044_715);
                let inner = self.f.binary("add", x, &inner);
                let inner = self.f.scalar("multiply", &inner, (2.0 / std::f64::consts::PI).sqrt());
                let t = self.f.unary("tanh", &inner);
                let t = self.f.scalar("add", &t, 1.0);
                let half = self.f.scalar("multiply", x, 0.5);
                self.f.binary("multiply", &half, &t)
            }
        }
    }

    /// Rotation of `[b, q, h, d]` by positions `[b, q]`.
    fn rotate(&mut self, x: &V, at: &V, rope: &RopeSpec) -> V {
        let [b, q, h, d] = x.shape[..] else { return x.clone() };
        let half = d / 2;
        let (frequency, magnitude) = frequencies(rope, d);
        let f = self.f.vector(&frequency);
        let f = self.f.broadcast(&f, &[2], &[b, q, half]);
        let at = self.f.convert(at, "f32");
        let at = self.f.broadcast(&at, &[0, 1], &[b, q, half]);
        let angle = self.f.binary("multiply", &at, &f);
        let wave = |p: &mut Self, op: &str| {
            let w = p.f.unary(op, &angle);
            let w = if magnitude == 1.0 { w } else { p.f.scalar("multiply", &w, magnitude) };
            p.f.broadcast(&w, &[0, 1, 3], &[b, q, h, half])
        };
        let (cos, sin) = (wave(self, "cosine"), wave(self, "sine"));
        let (low, high) = (self.f.slice(x, 3, 0, half), self.f.slice(x, 3, half, d));
        let a = self.f.binary("multiply", &low, &cos);
        let c = self.f.binary("multiply", &high, &sin);
        let first = self.f.binary("subtract", &a, &c);
        let a = self.f.binary("multiply", &high, &cos);
        let c = self.f.binary("multiply", &low, &sin);
        let second = self.f.binary("add", &a, &c);
        self.f.concatenate(&[&first, &second], 3)
    }

    fn embed(&mut self, table: WeightId, scale: f64, ids: &V, shape: &[u64]) -> Option<V> {
        let share = self.weight_ref(table)?.share;
        let table = self.matrix(table)?;
        let (rows, cols) = (*table.shape.first()?, *table.shape.get(1)?);
        let n: u64 = ids.shape.iter().product();
        let mut at = self.f.reshape(ids, &[n]);
        let mut outside = None;
        if let (WeightShare::Rows, Some(rank)) = (share, self.rank.clone()) {
            let first = self.f.scalar("multiply", &rank, rows as f64);
            let first = self.f.broadcast(&first, &[], &[n]);
            at = self.f.binary("subtract", &at, &first);
            let (zero, end) = (self.f.integer(0, &[n]), self.f.integer(rows as i64, &[n]));
            let (below, above) =
                (self.f.compare("LT", &at, &zero), self.f.compare("GE", &at, &end));
            outside = Some(self.f.binary("or", &below, &above));
        }
        let mut x = self.f.take(&table, &at);
        if let Some(outside) = outside {
            let outside = self.f.broadcast(&outside, &[0], &[n, cols]);
            let zero = self.f.constant(0.0, &[n, cols]);
            x = self.f.select(&outside, &zero, &x);
        }
        if scale != 1.0 {
            x = self.f.scalar("multiply", &x, scale);
        }
        Some(self.f.reshape(&x, shape))
    }

    /// Logits of the tokens of each row's best centroids, minus infinity for all others.
    fn ordered_head(
        &mut self,
        head: WeightId,
        ordering: WeightId,
        top_k: u64,
        operands: &[V],
        shape: &[u64],
    ) -> Option<V> {
        let [h, centroids] = operands else { return None };
        let [b, 1, width] = h.shape[..] else { return None };
        let n = *centroids.shape.last()?;
        let share = self.weight_ref(head)?.share;
        let table = self.matrix(head)?;
        let rows = *table.shape.first()?;
        // Numbers of tokens are exact in f32 up to 2^24, beyond any vocabulary.
        let order = self.vector(ordering)?;
        let each = order.shape.first()?.checked_div(n)?;
        let order = self.f.convert(&order, "i32");
        let order = self.f.reshape(&order, &[n, each]);
        let scores = self.f.reshape(centroids, &[b, n]);
        let (_, best) = self.f.top(&scores, top_k);
        let best = self.f.reshape(&best, &[b * top_k]);
        let tokens = top_k * each;
        let mut at = self.f.take(&order, &best);
        at = self.f.reshape(&at, &[b * tokens]);
        if let (WeightShare::Rows, Some(rank)) = (share, self.rank.clone()) {
            let first = self.f.scalar("multiply", &rank, rows as f64);
            let first = self.f.broadcast(&first, &[], &[b * tokens]);
            at = self.f.binary("subtract", &at, &first);
            // Tokens of other devices go nowhere: an index outside drops them.
            let zero = self.f.integer(0, &[b * tokens]);
            let below = self.f.compare("LT", &at, &zero);
            let nowhere = self.f.integer(rows as i64, &[b * tokens]);
            at = self.f.select(&below, &nowhere, &at);
        }
        let found = self.f.take(&table, &at);
        let found = self.f.reshape(&found, &[b, tokens, width]);
        let h = self.f.reshape(h, &[b, width]);
        let logits = self.f.dot(&h, &found, [&[0], &[0]], [&[1], &[2]]);
        let logits = self.f.reshape(&logits, &[b * tokens, 1, 1]);
        let sequence = self.f.iota(&[b, tokens], 0);
        let places = self.places(&sequence, &at);
        let none = self.f.constant(f64::NEG_INFINITY, &[b, 1, rows, 1]);
        let all = self.f.write_rows(&none, &places, &logits);
        Some(self.f.reshape(&all, shape))
    }

    fn embed_axes(
        &mut self,
        table: WeightId,
        axes_first: bool,
        at: &V,
        padding: &V,
        shape: &[u64],
    ) -> Option<V> {
        let weight = self.weight_ref(table)?;
        let extents = weight.shape.extents().to_vec();
        let flat = self.matrix(table)?;
        let all = self.f.reshape(&flat, &extents);
        let (patches, cols) = (*shape.get(1)?, *shape.get(2)?);
        let mut sum: Option<V> = None;
        for axis in 0..2 {
            let table = if axes_first {
                let one = self.f.slice(&all, 0, axis, axis + 1);
                self.f.reshape(&one, &[*extents.get(1)?, cols])
            } else {
                let one = self.f.slice(&all, 1, axis, axis + 1);
                self.f.reshape(&one, &[*extents.first()?, cols])
            };
            let along = self.f.slice(at, 2, axis, axis + 1);
            let along = self.f.reshape(&along, &[patches]);
            let along = self.f.scalar("maximum", &along, 0.0);
            let rows = self.f.take(&table, &along);
            sum = Some(match sum {
                Some(sum) => self.f.binary("add", &sum, &rows),
                None => rows,
            });
        }
        let sum = self.f.reshape(&sum?, shape);
        let zero = self.f.constant(0.0, shape);
        let padding = self.f.broadcast(padding, &[0, 1], shape);
        Some(self.f.select(&padding, &zero, &sum))
    }

    fn experts(
        &mut self,
        gate_up: &[WeightId],
        down: &[WeightId],
        activation: Activation,
        operands: &[V],
        shape: &[u64],
    ) -> Option<V> {
        let [x, weights, ids] = operands else { return None };
        let hidden = *shape.last()?;
        let rows: u64 = shape.iter().take(shape.len() - 1).product();
        let k = *weights.shape.last()?;
        let x = self.f.reshape(x, &[rows, hidden]);
        let weights = self.f.reshape(weights, &[rows, k]);
        let ids = self.f.reshape(ids, &[rows, k]);
        let local = gate_up.len() as u64 / u64::from(self.program.devices).max(1);
        let mut sum = self.f.constant(0.0, &[rows, hidden]);
        for j in 0..local {
            let gate_up = self.expert(gate_up, j, local)?;
            let down = self.expert(down, j, local)?;
            let width = *gate_up.shape.first()? / 2;
            let y = self.f.dot(&x, &gate_up, [&[], &[]], [&[1], &[1]]);
            let (gate, up) = (self.f.slice(&y, 1, 0, width), self.f.slice(&y, 1, width, 2 * width));
            let a = self.activate(&gate, activation);
            let g = self.f.binary("multiply", &a, &up);
            let y = self.f.dot(&g, &down, [&[], &[]], [&[1], &[1]]);
            // How much each row wants of this expert.
            let number = match self.rank.clone() {
                Some(rank) => {
                    let first = self.f.scalar("multiply", &rank, local as f64);
                    self.f.scalar("add", &first, j as f64)
                }
                None => self.f.integer(j as i64, &[]),
            };
            let number = self.f.broadcast(&number, &[], &[rows, k]);
            let mine = self.f.compare("EQ", &ids, &number);
            let zero = self.f.constant(0.0, &[rows, k]);
            let w = self.f.select(&mine, &weights, &zero);
            let w = self.f.reduce("add", &w, 1);
            let w = self.f.broadcast(&w, &[0], &[rows, hidden]);
            let y = self.f.binary("multiply", &y, &w);
            sum = self.f.binary("add", &sum, &y);
        }
        Some(self.f.reshape(&sum, shape))
    }

    fn pool_grid(&mut self, x: &V, side: u64, shape: &[u64]) -> Option<V> {
        let [_, rows, cols] = x.shape[..] else { return None };
        let cells = rows.isqrt() / side.max(1);
        let x = self.f.reshape(x, &[cells, side, cells, side, cols]);
        let sum = self.f.reduce("add", &x, 3);
        let sum = self.f.reduce("add", &sum, 1);
        let mean = self.f.scalar("divide", &sum, (side * side) as f64);
        Some(self.f.reshape(&mean, shape))
    }

    fn pool(&mut self, side: u64, operands: &[V]) -> Option<(V, V)> {
        let [x, at, padding] = operands else { return None };
        let [_, patches, cols] = x.shape[..] else { return None };
        let cells = patches / side.checked_mul(side)?.max(1);
        let axis = |p: &mut Self, n: u64| {
            let v = p.f.slice(at, 2, n, n + 1);
            let v = p.f.reshape(&v, &[patches]);
            p.f.scalar("maximum", &v, 0.0)
        };
        let (ax, ay) = (axis(self, 0), axis(self, 1));
        let most = self.f.reduce("maximum", &ax, 0);
        let width = self.f.scalar("add", &most, 1.0);
        let width = self.f.scalar("divide", &width, side as f64);
        let width = self.f.broadcast(&width, &[], &[patches]);
        let cx = self.f.scalar("divide", &ax, side as f64);
        let cy = self.f.scalar("divide", &ay, side as f64);
        let row = self.f.binary("multiply", &width, &cy);
        let cell = self.f.binary("add", &cx, &row);
        let cell = self.f.broadcast(&cell, &[1], &[cells, patches]);
        let number = self.f.iota(&[cells, patches], 0);
        let mine = self.f.compare("EQ", &cell, &number);
        let padding = self.f.reshape(padding, &[patches]);
        let padding = self.f.broadcast(&padding, &[1], &[cells, patches]);
        let real = self.f.unary("not", &padding);
        let mine = self.f.binary("and", &mine, &real);
        let member = self.f.convert(&mine, "f32");
        let flat = self.f.reshape(x, &[patches, cols]);
        let sum = self.f.dot(&member, &flat, [&[], &[]], [&[1], &[0]]);
        let scale = (cols as f64).sqrt() / (side * side) as f64;
        let rows = self.f.scalar("multiply", &sum, scale);
        let valid = self.f.reduce("or", &mine, 1);
        Some((self.f.reshape(&rows, &[1, cells, cols]), self.f.reshape(&valid, &[1, cells])))
    }
}

impl Module {
    /// The argument of that name.
    ///
    /// # Errors
    /// There is none.
    pub fn argument(&self, name: &str) -> Result<&ModuleArgument> {
        self.arguments.iter().find(|a| a.name == name).ok_or_else(|| {
            Failure::plain(FailureKind::Failed, format!("the module has no argument {name}"))
        })
    }
}
