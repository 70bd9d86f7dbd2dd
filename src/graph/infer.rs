//! What an operation makes of its operands: the one place that knows each operation's shapes and how its results lie
//! over the devices. The builder asks for results, the verifier compares.

use super::ir::{
    KvLayout, KvPair, KvTensor, Op, Projection, ValueType, WeightId, WeightRef, WeightShare,
};
use crate::tensor::{DType, Shape};

/// How a value lies over the devices of its program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spread {
    /// The same on every device.
    Equal,
    /// Every device has other columns (heads, rows of a cut matrix).
    Parts,
    /// The devices' values sum up to the real one.
    Partial,
}

/// What operations refer to.
pub(super) struct Context<'a> {
    /// Weights of the program.
    pub weights: &'a [WeightRef],
    /// Cache tensors of the model.
    pub kv: &'a [KvTensor],
    /// Devices that run the program.
    pub devices: u32,
}

/// Most elements of a value or a weight, bytes of a cache tensor's unit, and slots of a sequence; far above any model's.
pub(super) const MAX_ELEMENTS: u64 = 1 << 48;

type Infer<T> = Result<T, String>;

impl<'a> Context<'a> {
    fn weight(&self, id: WeightId) -> Infer<&'a WeightRef> {
        self.weights.get(id.0 as usize).ok_or_else(|| format!("there is no weight {}", id.0))
    }

    fn matrix(&self, id: WeightId) -> Infer<(u64, u64, &'a WeightRef)> {
        let weight = self.weight(id)?;
        match weight.shape.extents() {
            [rows, cols] => Ok((*rows, *cols, weight)),
            _ => Err(format!("{} has shape {}, no matrix", weight.name, weight.shape)),
        }
    }

    fn vector(&self, id: WeightId, len: u64) -> Infer<()> {
        let weight = self.weight(id)?;
        if weight.shape.extents() == [len] {
            return Ok(());
        }
        Err(format!("{} has shape {}, [{len}] is needed", weight.name, weight.shape))
    }

    fn pair(&self, kv: KvPair) -> Infer<&'a KvTensor> {
        let get = |id: super::ir::KvId| {
            self.kv.get(id.0 as usize).ok_or_else(|| format!("there is no cache tensor {}", id.0))
        };
        let (key, value) = (get(kv.key)?, get(kv.value)?);
        let same = |t: &KvTensor| (t.layer, t.layout, t.heads, t.head_dim);
        if kv.key == kv.value || same(key) != same(value) {
            return Err(format!("{} and {} are no pair", key.name, value.name));
        }
        Ok(key)
    }
}

fn last(x: &ValueType) -> Infer<u64> {
    x.shape.extents().last().copied().ok_or_else(|| "a scalar has no last axis".to_owned())
}

fn with_last(x: &ValueType, n: u64) -> ValueType {
    let mut extents = x.shape.extents().to_vec();
    if let Some(slot) = extents.last_mut() {
        *slot = n;
    }
    ValueType { dtype: x.dtype, shape: Shape::new(extents) }
}

fn need(holds: bool, what: impl FnOnce() -> String) -> Infer<()> {
    if holds { Ok(()) } else { Err(what()) }
}

fn same(a: &ValueType, b: &ValueType) -> Infer<()> {
    need(a == b, || format!("{} {} and {} {} differ", a.dtype, a.shape, b.dtype, b.shape))
}

fn is_integer(dtype: DType) -> bool {
    matches!(dtype, DType::I16 | DType::I32 | DType::I64)
}

fn integers(x: &ValueType, shape: &[u64], what: &str) -> Infer<()> {
    need(is_integer(x.dtype) && x.shape.extents() == shape, || {
        format!(
            "{what} is {} {}, integers {} are needed",
            x.dtype,
            x.shape,
            Shape::new(shape.to_vec())
        )
    })
}

fn float(x: &ValueType, what: &str) -> Infer<()> {
    need(matches!(x.dtype, DType::F32 | DType::F16 | DType::BF16), || {
        format!("{what} is {}, a float is needed", x.dtype)
    })
}

/// `[b, q, h, d]`.
fn heads(x: &ValueType, what: &str) -> Infer<[u64; 4]> {
    float(x, what)?;
    <[u64; 4]>::try_from(x.shape.extents().to_vec())
        .map_err(|e| format!("{what} has rank {}, [batch, rows, heads, width] is needed", e.len()))
}

/// Table of blocks: `[b, n]`, or `[n]` of one sequence.
fn block_table(x: &ValueType, batch: u64) -> Infer<u64> {
    let n = match x.shape.extents() {
        [n] if batch == 1 => *n,
        [b, n] if *b == batch => *n,
        _ => return Err(format!("block_tables {} for {batch} sequences", x.shape)),
    };
    need(is_integer(x.dtype), || format!("block_tables is {}", x.dtype))?;
    Ok(n)
}

fn operands<const N: usize>(inputs: &[&ValueType], op: &Op) -> Infer<[ValueType; N]> {
    <[ValueType; N]>::try_from(inputs.iter().map(|v| (*v).clone()).collect::<Vec<_>>())
        .map_err(|found| format!("{} takes {N} operands, {} are given", op.name(), found.len()))
}

/// Slots of a sequence in a paged cache.
fn slots(blocks: u64, block: u64) -> Infer<u64> {
    let slots = blocks.checked_mul(block).filter(|n| *n <= MAX_ELEMENTS);
    slots.ok_or_else(|| {
        format!("{blocks} blocks of {block} slots a sequence; at most {MAX_ELEMENTS} slots")
    })
}

/// What x becomes in one projection of a linear layer.
fn projected(x: &ValueType, p: &Projection, c: &Context<'_>) -> Infer<ValueType> {
    let (rows, cols, matrix) = c.matrix(p.weight)?;
    need(last(x)? == cols, || format!("x {} meets {} of {} columns", x.shape, matrix.name, cols))?;
    if let Some(bias) = p.bias {
        c.vector(bias, rows)?;
        need(matrix.share != WeightShare::Cols, || {
            format!("{} gives partial sums, so a bias would be added on every device", matrix.name)
        })?;
    }
    Ok(with_last(x, rows))
}

/// Types of the results. `wanted` is the result's shape where the operation does not fix it (reshape, columns).
///
/// # Errors
/// Why the operands do not fit the operation.
pub(super) fn infer(
    op: &Op,
    inputs: &[&ValueType],
    wanted: Option<&Shape>,
    c: &Context<'_>,
) -> Infer<Vec<ValueType>> {
    match op {
        Op::Embed { table, .. } => {
            let [ids] = operands(inputs, op)?;
            let (_, cols, _) = c.matrix(*table)?;
            need(is_integer(ids.dtype) && ids.shape.rank() == 2, || {
                format!("ids are {} {}", ids.dtype, ids.shape)
            })?;
            let mut extents = ids.shape.extents().to_vec();
            extents.push(cols);
            // The table's own type says nothing about the program's: callers state it.
            Ok(vec![ValueType { dtype: DType::F32, shape: Shape::new(extents) }])
        }
        Op::Linear { projections, .. } => {
            let [x] = operands(inputs, op)?;
            float(&x, "x")?;
            need(!projections.is_empty(), || "no matrix".to_owned())?;
            projections.iter().map(|p| projected(&x, p, c)).collect()
        }
        Op::RmsNorm { weight, .. } => {
            let [x] = operands(inputs, op)?;
            float(&x, "x")?;
            if let Some(weight) = weight {
                c.vector(*weight, last(&x)?)?;
            }
            Ok(vec![x])
        }
        Op::LayerNorm { weight, bias, .. } => {
            let [x] = operands(inputs, op)?;
            float(&x, "x")?;
            c.vector(*weight, last(&x)?)?;
            if let Some(bias) = bias {
                c.vector(*bias, last(&x)?)?;
            }
            Ok(vec![x])
        }
        Op::Rope { .. } => {
            let [x, positions] = operands(inputs, op)?;
            let [b, q, _, d] = heads(&x, "x")?;
            integers(&positions, &[b, q], "positions")?;
            need(d.is_multiple_of(2), || format!("heads are {d} wide, which is odd"))?;
            Ok(vec![x])
        }
        Op::AxialRope { .. } => {
            let [x, at] = operands(inputs, op)?;
            let [b, p, _, d] = heads(&x, "x")?;
            integers(&at, &[b, p, 2], "coordinates")?;
            need(d.is_multiple_of(4), || format!("heads are {d} wide, no multiple of 4"))?;
            Ok(vec![x])
        }
        Op::Reshape => {
            let [x] = operands(inputs, op)?;
            let shape = wanted.ok_or("a reshape needs its result's shape")?;
            need(x.shape.elements() == shape.elements(), || {
                format!("{} does not become {shape}", x.shape)
            })?;
            Ok(vec![ValueType { dtype: x.dtype, shape: shape.clone() }])
        }
        Op::Columns { start } => {
            let [x] = operands(inputs, op)?;
            let shape = wanted.ok_or("columns need their result's shape")?;
            let n = shape.extents().last().copied().unwrap_or(0);
            need(
                start.checked_add(n).is_some_and(|end| end <= last(&x).unwrap_or(0)) && n > 0,
                || format!("columns {start}.. to {shape} of {}", x.shape),
            )?;
            Ok(vec![with_last(&x, n)])
        }
        Op::Concat => {
            need(inputs.len() >= 2, || "concat takes two or more operands".to_owned())?;
            let mut sum = 0u64;
            let Some((&first, _)) = inputs.split_first() else { return Ok(Vec::new()) };
            for x in inputs {
                same(&with_last(x, 0), &with_last(first, 0))?;
                sum = sum.checked_add(last(x)?).ok_or("too wide")?;
            }
            Ok(vec![with_last(first, sum)])
        }
        Op::Add | Op::Mul | Op::Gated { .. } => {
            let [a, b] = operands(inputs, op)?;
            float(&a, "the first operand")?;
            same(&a, &b)?;
            Ok(vec![a])
        }
        Op::Affine { .. }
        | Op::Activate { .. }
        | Op::Softcap { .. }
        | Op::FillUnscored
        | Op::AllReduce => {
            let [x] = operands(inputs, op)?;
            float(&x, "x")?;
            Ok(vec![x])
        }
        Op::ScaleBy { weight } => {
            let [x] = operands(inputs, op)?;
            float(&x, "x")?;
            c.vector(*weight, 1).or_else(|_| c.vector(*weight, last(&x)?))?;
            Ok(vec![x])
        }
        Op::Shift { weight, .. } => {
            let [x] = operands(inputs, op)?;
            float(&x, "x")?;
            c.vector(*weight, last(&x)?)?;
            Ok(vec![x])
        }
        Op::Clamp { low, high } => {
            let [x] = operands(inputs, op)?;
            float(&x, "x")?;
            c.vector(*low, 1)?;
            c.vector(*high, 1)?;
            Ok(vec![x])
        }
        Op::KvWrite { kv } => {
            let [k, v, at, table] = operands(inputs, op)?;
            let cache = c.pair(*kv)?;
            let [b, q, h, d] = heads(&k, "k")?;
            same(&k, &v)?;
            cached(cache, h, d)?;
            let KvLayout::Paged { block } = cache.layout else {
                return Err(format!("{} has no blocks", cache.name));
            };
            integers(&at, &[b, q], "cache_position")?;
            slots(block_table(&table, b)?, block)?;
            Ok(Vec::new())
        }
        Op::PagedAttention { kv, .. } => {
            let [q, at, table] = operands(inputs.get(..3).unwrap_or(inputs), op)?;
            let cache = c.pair(*kv)?;
            let [b, rows, h, d] = heads(&q, "q")?;
            grouped(cache, h, d)?;
            let KvLayout::Paged { block } = cache.layout else {
                return Err(format!("{} has no blocks", cache.name));
            };
            integers(&at, &[b, rows], "cache_position")?;
            let slots = slots(block_table(&table, b)?, block)?;
            for more in inputs.get(3..).unwrap_or(&[]) {
                if more.shape.rank() == 0 {
                    integers(more, &[], "query_position")?;
                } else {
                    float(more, "attention_mask")?;
                    need(more.shape.extents() == [b, slots], || {
                        format!("attention_mask {} for {b} sequences of {slots} slots", more.shape)
                    })?;
                }
            }
            Ok(vec![ValueType {
                dtype: q.dtype,
                shape: Shape::from([b, rows, h.saturating_mul(d)]),
            }])
        }
        Op::WindowAttention { kv, .. } => {
            let [q, at, table] = operands(inputs.get(..3).unwrap_or(inputs), op)?;
            let cache = c.pair(*kv)?;
            let [b, rows, h, d] = heads(&q, "q")?;
            grouped(cache, h, d)?;
            ring(cache)?;
            integers(&at, &[b, rows], "position_ids")?;
            integers(&table, &[b], "local_block_tables")?;
            match inputs.get(3..).unwrap_or(&[]) {
                [] => {}
                [k, v, rest @ ..] => {
                    let [kb, kq, kh, kd] = heads(k, "k")?;
                    same(k, v)?;
                    cached(cache, kh, kd)?;
                    need((kb, kq) == (b, rows), || format!("q {} and k {}", q.shape, k.shape))?;
                    query_position(rest, b)?;
                }
                _ => return Err("k without v".to_owned()),
            }
            Ok(vec![ValueType {
                dtype: q.dtype,
                shape: Shape::from([b, rows, h.saturating_mul(d)]),
            }])
        }
        Op::WindowWrite { kv } => {
            let [k, v, at, table] = operands(inputs.get(..4).unwrap_or(inputs), op)?;
            let cache = c.pair(*kv)?;
            let [b, rows, h, d] = heads(&k, "k")?;
            same(&k, &v)?;
            cached(cache, h, d)?;
            ring(cache)?;
            integers(&at, &[b, rows], "position_ids")?;
            integers(&table, &[b], "local_block_tables")?;
            query_position(inputs.get(4..).unwrap_or(&[]), b)?;
            Ok(Vec::new())
        }
        Op::DenseAttention { .. } => {
            let [q, k, v] = operands(inputs.get(..3).unwrap_or(inputs), op)?;
            let [b, p, h, d] = heads(&q, "q")?;
            let [kb, kp, kh, kd] = heads(&k, "k")?;
            same(&k, &v)?;
            need((b, p, d) == (kb, kp, kd) && kh > 0 && h.is_multiple_of(kh), || {
                format!("q {} and k {}", q.shape, k.shape)
            })?;
            for mask in inputs.get(3..).unwrap_or(&[]) {
                float(mask, "the key mask")?;
                let fits = inputs.len() == 4 && mask.shape.extents() == [b, p];
                need(fits, || format!("a key mask {}", mask.shape))?;
            }
            Ok(vec![ValueType { dtype: q.dtype, shape: Shape::from([b, p, h.saturating_mul(d)]) }])
        }
        Op::SelectRow => {
            let [x, at] = operands(inputs, op)?;
            float(&x, "x")?;
            integers(&at, &[], "the index")?;
            match x.shape.extents() {
                [1, _, n] => Ok(vec![ValueType { dtype: x.dtype, shape: Shape::from([1, 1, *n]) }]),
                _ => Err(format!("x {}, [1, rows, columns] is needed", x.shape)),
            }
        }
        Op::Route { top_k, expert_scale, .. } => {
            let [scores] = operands(inputs, op)?;
            float(&scores, "scores")?;
            let experts = last(&scores)?;
            need((1..=experts).contains(top_k), || {
                format!("the best {top_k} of {experts} experts")
            })?;
            if let Some(scale) = expert_scale {
                c.vector(*scale, experts)?;
            }
            let weights = with_last(&scores, *top_k);
            let ids = ValueType { dtype: DType::I32, ..weights.clone() };
            Ok(vec![weights, ids])
        }
        Op::Experts { gate_up, down, .. } => {
            let [x, weights, ids] = operands(inputs, op)?;
            float(&x, "x")?;
            same(&with_last(&x, 0), &with_last(&weights, 0))?;
            integers(&ids, weights.shape.extents(), "ids")?;
            need(!gate_up.is_empty() && gate_up.len() == down.len(), || {
                format!("{} gate-up and {} down matrices", gate_up.len(), down.len())
            })?;
            let hidden = last(&x)?;
            for (g, d) in gate_up.iter().zip(down) {
                let (double, cols, gate) = c.matrix(*g)?;
                let (rows, width, down) = c.matrix(*d)?;
                need(
                    cols == hidden && rows == hidden && Some(double) == width.checked_mul(2),
                    || {
                        format!(
                            "{} {} and {} {} for {hidden} columns",
                            gate.name, gate.shape, down.name, down.shape
                        )
                    },
                )?;
            }
            Ok(vec![x])
        }
        Op::EmbedAxes { table, axes_first } => {
            let [at, padding] = operands(inputs, op)?;
            let [1, p, 2] = *at.shape.extents() else {
                return Err(format!("coordinates {}, [1, patches, 2] is needed", at.shape));
            };
            integers(&at, &[1, p, 2], "coordinates")?;
            mask(&padding, p)?;
            let table = c.weight(*table)?;
            let (axes, cols) = match (*axes_first, table.shape.extents()) {
                (true, [axes, _, cols]) | (false, [_, axes, cols]) => (*axes, *cols),
                _ => (0, 0),
            };
            need(axes == 2, || format!("{} has shape {}, no two tables", table.name, table.shape))?;
            // As with `embed`, callers state the type.
            Ok(vec![ValueType { dtype: DType::F32, shape: Shape::from([1, p, cols]) }])
        }
        Op::PoolPatches { side } => {
            let [x, at, padding] = operands(inputs, op)?;
            float(&x, "x")?;
            let [1, p, cols] = *x.shape.extents() else {
                return Err(format!("x {}, [1, patches, columns] is needed", x.shape));
            };
            integers(&at, &[1, p, 2], "coordinates")?;
            mask(&padding, p)?;
            let cell = side.saturating_mul(*side);
            need(cell > 0 && p.is_multiple_of(cell), || format!("{p} patches in cells of {cell}"))?;
            let rows = p / cell;
            Ok(vec![
                ValueType { dtype: x.dtype, shape: Shape::from([1, rows, cols]) },
                ValueType { dtype: DType::Bool, shape: Shape::from([1, rows]) },
            ])
        }
        Op::OrderedHead { head, ordering, top_k } => {
            let [h, centroids] = operands(inputs, op)?;
            float(&h, "h")?;
            float(&centroids, "centroid scores")?;
            let (rows, cols, _) = c.matrix(*head)?;
            same(&with_last(&h, 0), &with_last(&centroids, 0))?;
            let order = c.weight(*ordering)?;
            let (n, all) = (last(&centroids)?, order.shape.elements().unwrap_or(0));
            need(
                last(&h)? == cols && (1..=n).contains(top_k) && all.is_multiple_of(n.max(1)),
                || format!("the best {top_k} of {n} centroids of {all} tokens for h {}", h.shape),
            )?;
            Ok(vec![with_last(&h, rows)])
        }
        Op::AllGather { keep } => {
            let [x] = operands(inputs, op)?;
            let all = last(&x)?.saturating_mul(u64::from(c.devices));
            need((1..=all).contains(keep), || format!("{keep} of {all} gathered columns"))?;
            Ok(vec![with_last(&x, *keep)])
        }
        Op::EmbedPatches { kernel, bias } => {
            let [x] = operands(inputs, op)?;
            float(&x, "x")?;
            let kernel = c.weight(*kernel)?;
            let [outputs, channels, high, wide] = *kernel.shape.extents() else {
                return Err(format!("{} has shape {}, no kernels", kernel.name, kernel.shape));
            };
            let values = channels.checked_mul(high).and_then(|n| n.checked_mul(wide));
            need(x.shape.rank() == 3 && values == Some(last(&x)?), || {
                format!("patches {} meet {} {}", x.shape, kernel.name, kernel.shape)
            })?;
            if let Some(bias) = bias {
                c.vector(*bias, outputs)?;
            }
            Ok(vec![with_last(&x, outputs)])
        }
        Op::AddRows { table } => {
            let [x] = operands(inputs, op)?;
            float(&x, "x")?;
            let (rows, cols, table) = c.matrix(*table)?;
            need(x.shape.extents() == [1, rows, cols], || {
                format!("x {} and {} {}", x.shape, table.name, table.shape)
            })?;
            Ok(vec![x])
        }
        Op::PoolGrid { side } => {
            let [x] = operands(inputs, op)?;
            float(&x, "x")?;
            let [1, rows, cols] = *x.shape.extents() else {
                return Err(format!("x {}, [1, rows, columns] is needed", x.shape));
            };
            let wide = rows.isqrt();
            let squares = *side > 0 && wide * wide == rows && wide.is_multiple_of(*side);
            need(squares, || format!("{rows} rows in squares of {side} × {side}"))?;
            let pooled = (wide / side) * (wide / side);
            Ok(vec![ValueType { dtype: x.dtype, shape: Shape::from([1, pooled, cols]) }])
        }
        Op::Product { weight } => {
            let [x] = operands(inputs, op)?;
            float(&x, "x")?;
            let (rows, cols, weight) = c.matrix(*weight)?;
            need(last(&x)? == rows, || {
                format!("x {} meets {} of {rows} rows", x.shape, weight.name)
            })?;
            Ok(vec![with_last(&x, cols)])
        }
    }
}

fn mask(padding: &ValueType, patches: u64) -> Infer<()> {
    need(padding.dtype == DType::Bool && padding.shape.extents() == [1, patches], || {
        format!("padding is {} {}", padding.dtype, padding.shape)
    })
}

fn cached(cache: &KvTensor, h: u64, d: u64) -> Infer<()> {
    need((h, d) == (cache.heads, cache.head_dim), || {
        format!("{h} heads of {d} for {} with {} of {}", cache.name, cache.heads, cache.head_dim)
    })
}

fn grouped(cache: &KvTensor, h: u64, d: u64) -> Infer<()> {
    need(d == cache.head_dim && cache.heads > 0 && h.is_multiple_of(cache.heads), || {
        format!(
            "{h} query heads of {d} over {} with {} of {}",
            cache.name, cache.heads, cache.head_dim
        )
    })
}

fn ring(cache: &KvTensor) -> Infer<()> {
    need(matches!(cache.layout, KvLayout::Window { .. }), || format!("{} is no ring", cache.name))
}

/// Prefill says how many rows are valid; in decode all are.
fn query_position(rest: &[&ValueType], batch: u64) -> Infer<()> {
    match rest {
        [] => Ok(()),
        [at] if batch == 1 => integers(at, &[], "query_position"),
        _ => Err("one query_position, of one sequence, is the last operand".to_owned()),
    }
}

/// How the results lie over the devices.
///
/// # Errors
/// Operands that lie in a way which makes the operation meaningless: a norm of partial sums, a product of a cut matrix
/// with other columns than its own, a collective without need.
pub(super) fn spread(op: &Op, inputs: &[Spread], c: &Context<'_>) -> Infer<Spread> {
    if c.devices == 1 {
        return match op {
            Op::AllReduce | Op::AllGather { .. } => Err("a collective on one device".to_owned()),
            _ => Ok(Spread::Equal),
        };
    }
    let all = |want: Spread| -> Infer<Spread> {
        need(inputs.iter().all(|s| *s == want), || {
            format!("operands lie as {inputs:?}, all have to be {want:?}")
        })?;
        Ok(want)
    };
    let share = |id: &WeightId| c.weight(*id).map(|w| w.share);
    let unbroken = |ids: Vec<WeightId>| -> Infer<()> {
        for id in ids {
            let weight = c.weight(id)?;
            need(weight.share == WeightShare::Whole, || {
                format!("{} is cut, the operation needs all of it", weight.name)
            })?;
        }
        Ok(())
    };
    match op {
        Op::Embed { table, .. } => {
            all(Spread::Equal)?;
            match share(table)? {
                WeightShare::Whole => Ok(Spread::Equal),
                WeightShare::Rows => Ok(Spread::Partial),
                other => Err(format!("a table cut as {other:?}")),
            }
        }
        Op::Linear { projections, .. } => {
            let shares: Infer<Vec<WeightShare>> =
                projections.iter().map(|p| share(&p.weight)).collect();
            let shares = shares?;
            let first = shares.first().copied().unwrap_or(WeightShare::Whole);
            need(shares.iter().all(|s| *s == first), || {
                format!("the matrices of one operation lie as {shares:?}, all have to lie alike")
            })?;
            match first {
                WeightShare::Whole => all(Spread::Equal),
                WeightShare::Rows => all(Spread::Equal).map(|_| Spread::Parts),
                WeightShare::Cols => all(Spread::Parts).map(|_| Spread::Partial),
                WeightShare::Expert => Err("an expert outside of `experts`".to_owned()),
            }
        }
        Op::OrderedHead { head, ordering, .. } => {
            all(Spread::Equal)?;
            unbroken(vec![*ordering])?;
            match share(head)? {
                WeightShare::Whole => Ok(Spread::Equal),
                _ => Ok(Spread::Parts),
            }
        }
        // The norm of a head, the rotation and attention stay within heads, which lie whole on a device.
        Op::RmsNorm { .. } => {
            unbroken(op.weights())?;
            within(inputs.first(), inputs)
        }
        Op::Rope { .. } | Op::AxialRope { .. } => {
            within(inputs.first(), inputs.get(..1).unwrap_or(&[]))
        }
        Op::KvWrite { .. } | Op::WindowWrite { .. } => {
            within(inputs.first(), inputs.get(..2).unwrap_or(&[]))
        }
        Op::PagedAttention { .. } => within(inputs.first(), inputs.get(..1).unwrap_or(&[])),
        Op::WindowAttention { kv, .. } => {
            let own = inputs.get(3..5).unwrap_or(&[]);
            // A single key head is whole on every device, whatever query heads these hold.
            let shared = c.pair(*kv)?.heads == 1 && own == [Spread::Equal; 2];
            let parts = [inputs.get(..1).unwrap_or(&[]), if shared { &[] } else { own }].concat();
            within(inputs.first(), &parts)
        }
        Op::DenseAttention { .. } => within(inputs.first(), inputs.get(..3).unwrap_or(&[])),
        Op::Reshape
        | Op::Affine { .. }
        | Op::Activate { .. }
        | Op::Gated { .. }
        | Op::Softcap { .. } => within(inputs.first(), inputs),
        Op::Add | Op::Mul => within(inputs.first(), inputs),
        Op::Clamp { .. } => {
            unbroken(op.weights())?;
            within(inputs.first(), inputs)
        }
        Op::LayerNorm { .. }
        | Op::ScaleBy { .. }
        | Op::Shift { .. }
        | Op::EmbedPatches { .. }
        | Op::AddRows { .. }
        | Op::Product { .. } => {
            unbroken(op.weights())?;
            all(Spread::Equal)
        }
        Op::Columns { .. }
        | Op::Concat
        | Op::SelectRow
        | Op::PoolPatches { .. }
        | Op::PoolGrid { .. }
        // The smallest score of a row is the smallest over all devices.
        | Op::FillUnscored => {
            all(Spread::Equal)
        }
        Op::Route { .. } | Op::EmbedAxes { .. } => {
            unbroken(op.weights())?;
            all(Spread::Equal)
        }
        Op::Experts { .. } => {
            for id in op.weights() {
                let weight = c.weight(id)?;
                need(weight.share == WeightShare::Expert, || {
                    format!(
                        "{} lies as {:?}, experts lie on one device each",
                        weight.name, weight.share
                    )
                })?;
            }
            all(Spread::Equal).map(|_| Spread::Partial)
        }
        Op::AllReduce => all(Spread::Partial).map(|_| Spread::Equal),
        Op::AllGather { .. } => all(Spread::Parts).map(|_| Spread::Equal),
    }
}

/// The operands' own spread, if it is one and no partial sum.
fn within(first: Option<&Spread>, inputs: &[Spread]) -> Infer<Spread> {
    match first {
        Some(spread) if *spread != Spread::Partial && inputs.iter().all(|s| s == spread) => {
            Ok(*spread)
        }
        _ => Err(format!(
            "operands lie as {inputs:?}, partial sums have to be reduced and parts have to match"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_have_a_number_of_slots() {
        assert_eq!(slots(MAX_ELEMENTS / 64, 64), Ok(MAX_ELEMENTS));
        let said = "4398046511105 blocks of 64 slots a sequence; at most 281474976710656 slots";
        assert_eq!(slots(MAX_ELEMENTS / 64 + 1, 64), Err(said.to_owned()));
        assert!(slots(u64::MAX, u64::MAX).is_err());
    }
}
