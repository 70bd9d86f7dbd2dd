//! Attention over the paged cache, over rings, and of all rows over all rows.

use rayon::prelude::*;

use super::cache::{Cache, Tables};
use super::product::{dot, product};
use super::rows::{softmax, transposed};
use super::value::{Value, fault};
use crate::diag::Result;
use crate::graph::OwnRows;

/// What happens to a score.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scoring {
    pub scale: f64,
    pub softcap: Option<f64>,
}

impl Scoring {
    fn score(&self, raw: f32) -> f32 {
        let s = raw * self.scale as f32;
        match self.softcap {
            Some(cap) => cap as f32 * (s / cap as f32).tanh(),
            None => s,
        }
    }
}

/// Keys and values of one head of one sequence, row by row.
#[derive(Debug, Default)]
struct Seen {
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// Multiplications below which threads cost more than they save.
const WORTH_SHARING: usize = 1 << 18;

/// Attention of `q [b, rows, h, d]`, where each sequence and key head is one piece of work: `seen` gathers what a key head
/// offers, `bias` is what is added to the score of a query row and a key, `None` where it is not visible.
fn attend(
    q: &Value,
    key_heads: usize,
    scoring: Scoring,
    work: usize,
    seen: impl Fn(usize, usize) -> Result<Seen> + Sync,
    bias: impl Fn(usize, usize, usize) -> Option<f32> + Sync,
) -> Result<Value> {
    let [batch, rows, heads, d] = q.heads()?;
    if key_heads == 0 || d == 0 || !heads.is_multiple_of(key_heads) {
        return Err(fault(format!("{heads} query heads over {key_heads} key heads")));
    }
    let group = heads / key_heads;
    let queries = q.as_floats()?;
    // Rows of one key head's query heads, side by side.
    let piece = |n: usize| -> Result<Vec<f32>> {
        let (b, head) = (n / key_heads, n % key_heads);
        let seen = seen(b, head)?;
        let mut out = vec![0.0f32; rows * group * d];
        let mut scores: Vec<f32> = Vec::new();
        let mut visible: Vec<usize> = Vec::new();
        for row in 0..rows {
            visible.clear();
            let mut biases = Vec::new();
            for key in 0..seen.keys.len() / d {
                if let Some(add) = bias(b, row, key) {
                    visible.push(key);
                    biases.push(add);
                }
            }
            for j in 0..group {
                let at = ((b * rows + row) * heads + head * group + j) * d;
                let query = &queries[at..at + d];
                scores.clear();
                scores.extend(visible.iter().zip(&biases).map(|(key, add)| {
                    scoring.score(dot(query, &seen.keys[key * d..(key + 1) * d])) + add
                }));
                softmax(&mut scores);
                let to = &mut out[(row * group + j) * d..(row * group + j + 1) * d];
                for (key, p) in visible.iter().zip(&scores) {
                    let value = &seen.values[key * d..(key + 1) * d];
                    to.iter_mut().zip(value).for_each(|(o, v)| *o += p * v);
                }
            }
        }
        Ok(out)
    };
    let pieces = batch * key_heads;
    let done: Vec<Vec<f32>> = if work.saturating_mul(rows * heads * d) < WORTH_SHARING {
        (0..pieces).map(piece).collect::<Result<_>>()?
    } else {
        (0..pieces).into_par_iter().map(piece).collect::<Result<_>>()?
    };
    let mut out = vec![0.0f32; batch * rows * heads * d];
    for (n, part) in done.iter().enumerate() {
        let (b, head) = (n / key_heads, n % key_heads);
        for (row, from) in part.chunks_exact(group * d).enumerate() {
            let to = ((b * rows + row) * heads + head * group) * d;
            out[to..to + group * d].copy_from_slice(from);
        }
    }
    Value::floats([batch, rows, heads * d], out)
}

/// Writes all rows into their slots.
pub(super) fn write_blocks(cache: &mut Cache, x: &Value, at: &Value, tables: &Value) -> Result<()> {
    let [batch, rows, heads, d] = x.heads()?;
    let tables = Tables::new(tables, batch, cache.tokens())?;
    let all = x.as_floats()?.chunks_exact((heads * d).max(1));
    for (n, (row, slot)) in all.zip(at.as_ints()?).enumerate() {
        let (block, token) = tables.find(n / rows.max(1), *slot)?;
        cache.write(block, token, row)?;
    }
    Ok(())
}

/// Writes the valid rows into rings, in order, so that of rows that share a slot the latest stays.
pub(super) fn write_rings(
    cache: &mut Cache,
    x: &Value,
    positions: &Value,
    rings: &Value,
    last: Option<i64>,
) -> Result<()> {
    let [_, rows, heads, d] = x.heads()?;
    let all = x.as_floats()?.chunks_exact((heads * d).max(1)).zip(positions.as_ints()?);
    for (n, (row, position)) in all.enumerate() {
        let (b, row_of) = (n / rows.max(1), n % rows.max(1));
        if last.is_some_and(|last| row_of as i64 > last) {
            continue;
        }
        let ring = rings.as_ints()?.get(b).copied().ok_or_else(|| fault("too few rings"))?;
        cache.write(ring, slot_of(*position, cache.tokens())?, row)?;
    }
    Ok(())
}

fn slot_of(position: i64, tokens: usize) -> Result<usize> {
    let position = usize::try_from(position).map_err(|_| fault(format!("position {position}")))?;
    position.checked_rem(tokens).ok_or_else(|| fault("a ring without tokens"))
}

/// Operands of [`paged`] beside the query.
pub(super) struct Blocks<'a> {
    pub key: &'a Cache,
    pub value: &'a Cache,
    pub at: &'a Value,
    pub tables: &'a Value,
    pub mask: Option<&'a Value>,
    pub last: Option<i64>,
    pub own: OwnRows,
}

/// [`Op::PagedAttention`](crate::graph::Op::PagedAttention).
pub(super) fn paged(q: &Value, from: &Blocks<'_>, scoring: Scoring) -> Result<Value> {
    let [batch, rows, ..] = q.heads()?;
    let tables = Tables::new(from.tables, batch, from.key.tokens())?;
    let at = from.at.as_ints()?;
    let mask = from.mask.map(Value::as_floats).transpose()?;
    let width = mask.map_or(0, |m| m.len() / batch.max(1));
    // Slots of each sequence that any of its rows may see.
    let mut slots: Vec<Vec<i64>> = Vec::with_capacity(batch);
    // The last slot that a valid row of an image lies in.
    let mut image_end = Vec::with_capacity(batch);
    for own in at.chunks_exact(rows.max(1)).take(batch) {
        let b = slots.len();
        let highest = own.iter().copied().max().unwrap_or(-1);
        let open = |slot: &i64| match mask {
            None => true,
            Some(mask) => usize::try_from(*slot)
                .ok()
                .filter(|s| *s < width)
                .is_some_and(|s| mask[b * width + s] != 0.0),
        };
        slots.push((0..=highest).filter(open).collect());
        let last =
            from.last.and_then(|l| usize::try_from(l).ok()).unwrap_or(rows - 1).min(rows - 1);
        image_end.push(match from.own {
            OwnRows::Image => own[last],
            OwnRows::Causal | OwnRows::ImageInWindow => i64::MIN,
        });
    }
    let longest = slots.iter().map(Vec::len).max().unwrap_or(0);
    let seen = |b: usize, head: usize| -> Result<Seen> {
        let mut seen = Seen::default();
        for slot in &slots[b] {
            let (block, token) = tables.find(b, *slot)?;
            from.key.read(block, token, head, &mut seen.keys)?;
            from.value.read(block, token, head, &mut seen.values)?;
        }
        Ok(seen)
    };
    attend(q, from.key.heads(), scoring, longest, seen, |b, row, key| {
        let slot = slots[b][key];
        (slot <= at[b * rows + row] || slot <= image_end[b]).then_some(0.0)
    })
}

/// Operands of [`windowed`] beside the query.
pub(super) struct Rings<'a> {
    pub key: &'a Cache,
    pub value: &'a Cache,
    pub positions: &'a Value,
    pub rings: &'a Value,
    pub rows: Option<(&'a Value, &'a Value)>,
    pub last: Option<i64>,
    pub window: u64,
    pub own: OwnRows,
}

/// [`Op::WindowAttention`](crate::graph::Op::WindowAttention).
pub(super) fn windowed(q: &Value, from: &Rings<'_>, scoring: Scoring) -> Result<Value> {
    let [batch, rows, _, d] = q.heads()?;
    let positions = from.positions.as_ints()?;
    let window = i64::try_from(from.window).unwrap_or(i64::MAX);
    let tokens = i64::try_from(from.key.tokens()).map_err(fault)?;
    let rings = from.rings.as_ints()?;
    let valid = match from.last {
        Some(last) => usize::try_from(last.saturating_add(1)).unwrap_or(0).min(rows),
        None => rows,
    };
    // Positions of the keys: what the ring holds of those before the call, then the call's own valid rows.
    let mut held = Vec::with_capacity(batch);
    for own in positions.chunks_exact(rows.max(1)).take(batch) {
        let start = own[0];
        // What neither fits the ring nor lies in the first row's window is not there.
        let oldest = (start - tokens).max(start.saturating_sub(window).saturating_add(1)).max(0);
        held.push(oldest..start);
    }
    let before = |b: usize| (held[b].end - held[b].start).max(0) as usize;
    let longest = (0..batch).map(before).max().unwrap_or(0) + valid;
    let seen = |b: usize, head: usize| -> Result<Seen> {
        let mut seen = Seen::default();
        let ring = rings.get(b).copied().ok_or_else(|| fault("too few rings"))?;
        for position in held[b].clone() {
            let token = slot_of(position, from.key.tokens())?;
            from.key.read(ring, token, head, &mut seen.keys)?;
            from.value.read(ring, token, head, &mut seen.values)?;
        }
        if let Some((k, v)) = from.rows {
            let heads = from.key.heads();
            for (x, to) in [(k, &mut seen.keys), (v, &mut seen.values)] {
                let x = x.as_floats()?;
                for row in 0..valid {
                    let at = ((b * rows + row) * heads + head) * d;
                    let part = x.get(at..at + d).ok_or_else(|| fault("too few own rows"))?;
                    to.extend_from_slice(part);
                }
            }
        }
        Ok(seen)
    };
    attend(q, from.key.heads(), scoring, longest, seen, |b, row, key| {
        let p = positions[b * rows + row];
        let (k, own) = match key.checked_sub(before(b)) {
            None => (held[b].start + key as i64, false),
            Some(row) => (positions[b * rows + row], true),
        };
        let near = k > p.saturating_sub(window);
        let sees = match (own, from.own) {
            (false, _) | (true, OwnRows::Causal) => near && k <= p,
            (true, OwnRows::ImageInWindow) => near,
            (true, OwnRows::Image) => true,
        };
        sees.then_some(0.0)
    })
}

/// Rows of queries whose scores are held at once: a picture may have thousands of patches.
const DENSE_ROWS: usize = 1024;

/// [`Op::DenseAttention`](crate::graph::Op::DenseAttention).
pub(super) fn dense(
    q: &Value,
    k: &Value,
    v: &Value,
    mask: Option<&Value>,
    scale: f64,
) -> Result<Value> {
    let [_, rows, heads, d] = q.heads()?;
    let [_, keys, key_heads, _] = k.heads()?;
    let sound = keys > 0 && d > 0 && key_heads > 0 && heads.is_multiple_of(key_heads);
    if !sound || k.shape() != v.shape() {
        return Err(fault(format!(
            "{heads} query heads over {key_heads} key heads of {keys} keys"
        )));
    }
    let (queries, all_keys, values) = (q.as_floats()?, k.as_floats()?, v.as_floats()?);
    let mask = mask.map(Value::as_floats).transpose()?;
    let scoring = Scoring { scale, softcap: None };
    let group = heads / key_heads;
    // Rows of one head, one after the other.
    let of = |x: &[f32], heads: usize, head: usize| -> Vec<f32> {
        let rows = x.chunks_exact(heads * d);
        rows.flat_map(|row| row.iter().skip(head * d).take(d).copied()).collect()
    };
    let piece = |head: usize| -> Result<Vec<f32>> {
        let keys_of = of(all_keys, key_heads, head / group);
        let values_of = transposed(&of(values, key_heads, head / group), keys, d)?;
        let mut out = Vec::with_capacity(rows * d);
        for part in of(queries, heads, head).chunks(DENSE_ROWS * d) {
            let mut scores = product(part, &keys_of, d);
            for row in scores.chunks_exact_mut(keys) {
                row.iter_mut().for_each(|s| *s = scoring.score(*s));
                if let Some(mask) = mask {
                    row.iter_mut().zip(mask).for_each(|(s, add)| *s += add);
                }
                softmax(row);
            }
            out.extend(product(&scores, &values_of, keys));
        }
        Ok(out)
    };
    let work = rows.saturating_mul(keys).saturating_mul(heads * d);
    let done: Vec<Vec<f32>> = match work < WORTH_SHARING {
        true => (0..heads).map(piece).collect::<Result<_>>()?,
        false => (0..heads).into_par_iter().map(piece).collect::<Result<_>>()?,
    };
    let mut out = vec![0.0f32; rows * heads * d];
    for (row, to) in out.chunks_exact_mut(heads * d).enumerate() {
        for (to, from) in to.chunks_exact_mut(d).zip(&done) {
            to.copy_from_slice(&from[row * d..(row + 1) * d]);
        }
    }
    Value::floats([1, rows, heads * d], out)
}
