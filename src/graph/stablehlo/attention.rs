//! The cache and what attends over it.

use super::print::Printer;
use super::text::V;
use crate::graph::ir::{KvLayout, KvPair, OwnRows};

/// What stands for minus infinity in masked scores: a row without any visible key stays finite.
const MASKED: f64 = -1.0e30;

impl Printer<'_> {
    fn layout(&self, pair: KvPair) -> Option<KvLayout> {
        Some(self.cache(pair)?.layout)
    }

    /// Row i's block and place in it: `[rows, 2]`.
    pub(super) fn places(&mut self, first: &V, second: &V) -> V {
        let n = first.shape.iter().product();
        let (a, b) = (self.f.reshape(first, &[n, 1]), self.f.reshape(second, &[n, 1]));
        self.f.concatenate(&[&a, &b], 1)
    }

    fn write(&mut self, pair: KvPair, k: &V, v: &V, at: &V) -> Option<()> {
        let [b, q, h, d] = k.shape[..] else { return None };
        for (id, rows) in [(pair.key.0, k), (pair.value.0, v)] {
            let cache = self.kv.get(&id)?.clone();
            let rows = self.f.reshape(rows, &[b * q, h, d]);
            // Values beyond the largest finite one would become NaN.
            let rows = match cache.ty {
                "f8E4M3FN" => self.f.clamp(&rows, 448.0),
                "f8E5M2" => self.f.clamp(&rows, 57344.0),
                _ => rows,
            };
            let rows = self.f.convert(&rows, cache.ty);
            let new = self.f.write_rows(&cache, at, &rows);
            self.kv.insert(id, new);
        }
        Some(())
    }

    pub(super) fn kv_write(&mut self, pair: KvPair, operands: &[V]) -> Option<()> {
        let [k, v, at, table] = operands else { return None };
        let KvLayout::Paged { block } = self.layout(pair)? else { return None };
        let [b, q] = at.shape[..] else { return None };
        let n = *table.shape.last()?;
        let table = self.f.reshape(table, &[b * n]);
        let flat = self.f.reshape(at, &[b * q]);
        let which = self.f.scalar("divide", &flat, block as f64);
        let place = self.f.scalar("remainder", &flat, block as f64);
        let sequence = self.f.iota(&[b, q], 0);
        let sequence = self.f.reshape(&sequence, &[b * q]);
        let start = self.f.scalar("multiply", &sequence, n as f64);
        let entry = self.f.binary("add", &start, &which);
        let physical = self.f.take(&table, &entry);
        // Padding rows behind the last slot of a sequence go nowhere: a block outside drops them.
        let end = self.f.integer(n as i64, &[b * q]);
        let inside = self.f.compare("LT", &which, &end);
        let nowhere = self.f.integer(self.blocks() as i64, &[b * q]);
        let physical = self.f.select(&inside, &physical, &nowhere);
        let places = self.places(&physical, &place);
        self.write(pair, k, v, &places)
    }

    /// Attention of `q [b, q, h, d]` over `k` and `v [b, heads, keys, d]`, with what each query sees `[b, q, keys]`: all
    /// of it if nothing is said.
    fn attend(
        &mut self,
        q: &V,
        k: &V,
        v: &V,
        seen: Option<&V>,
        scale: f64,
        softcap: Option<f64>,
    ) -> Option<V> {
        let [b, rows, h, d] = q.shape[..] else { return None };
        let [_, heads, keys, _] = k.shape[..] else { return None };
        let group = h / heads.max(1);
        let q = self.f.reshape(q, &[b, rows, heads, group, d]);
        let q = self.f.transpose(&q, &[0, 2, 3, 1, 4]);
        let q = self.f.reshape(&q, &[b, heads, group * rows, d]);
        let scores = self.f.dot(&q, k, [&[0, 1], &[0, 1]], [&[3], &[3]]);
        let mut scores =
            if scale == 1.0 { scores } else { self.f.scalar("multiply", &scores, scale) };
        if let Some(cap) = softcap {
            scores = self.softcap(&scores, cap);
        }
        let scores = self.f.reshape(&scores, &[b, heads, group, rows, keys]);
        let scores = match seen {
            Some(seen) => {
                let seen = self.f.broadcast(seen, &[0, 3, 4], &scores.shape);
                let masked = self.f.constant(MASKED, &scores.shape);
                self.f.select(&seen, &scores, &masked)
            }
            None => scores,
        };
        let p = self.f.softmax(&scores);
        let p = self.f.reshape(&p, &[b, heads, group * rows, keys]);
        let mixed = self.f.dot(&p, v, [&[0, 1], &[0, 1]], [&[3], &[2]]);
        let mixed = self.f.reshape(&mixed, &[b, heads, group, rows, d]);
        let mixed = self.f.transpose(&mixed, &[0, 3, 1, 2, 4]);
        Some(self.f.reshape(&mixed, &[b, rows, h * d]))
    }

    pub(super) fn paged_attention(
        &mut self,
        pair: KvPair,
        scale: f64,
        softcap: Option<f64>,
        own: OwnRows,
        operands: &[V],
    ) -> Option<V> {
        let (q, at, table) = (operands.first()?, operands.get(1)?, operands.get(2)?);
        let KvLayout::Paged { block } = self.layout(pair)? else { return None };
        let [b, rows] = at.shape[..] else { return None };
        let n = *table.shape.last()?;
        let keys = n * block;
        let flat = self.f.reshape(table, &[b * n]);
        let mut sides = Vec::new();
        for id in [pair.key.0, pair.value.0] {
            let cache = self.kv.get(&id)?.clone();
            let [_, heads, _, d] = cache.shape[..] else { return None };
            let all = self.f.take(&cache, &flat);
            let all = self.f.convert(&all, "f32");
            let all = self.f.reshape(&all, &[b, n, heads, block, d]);
            let all = self.f.transpose(&all, &[0, 2, 1, 3, 4]);
            sides.push(self.f.reshape(&all, &[b, heads, keys, d]));
        }
        let shape = [b, rows, keys];
        let slot = self.f.iota(&shape, 2);
        let own_slot = self.f.broadcast(at, &[0, 1], &shape);
        let mut seen = self.f.compare("LE", &slot, &own_slot);
        let mask = operands.iter().skip(3).find(|v| v.shape.len() == 2);
        let last = operands.iter().skip(3).find(|v| v.shape.is_empty());
        if own == OwnRows::Image {
            // Slots of this call's valid rows, from the first row's.
            let first = self.f.slice(at, 1, 0, 1);
            let first = self.f.broadcast(&first, &[0, 1], &[b, 1]);
            let first = self.f.reshape(&first, &[b]);
            let first = self.f.broadcast(&first, &[0], &shape);
            let last = self.f.broadcast(last?, &[], &shape);
            let end = self.f.binary("add", &first, &last);
            let (from, to) =
                (self.f.compare("GE", &slot, &first), self.f.compare("LE", &slot, &end));
            let run = self.f.binary("and", &from, &to);
            seen = self.f.binary("or", &seen, &run);
        }
        if let Some(mask) = mask {
            let zero = self.f.constant(0.0, &mask.shape);
            let valid = self.f.compare("NE", mask, &zero);
            let valid = self.f.broadcast(&valid, &[0, 2], &shape);
            seen = self.f.binary("and", &seen, &valid);
        }
        self.attend(q, sides.first()?, sides.get(1)?, Some(&seen), scale, softcap)
    }

    pub(super) fn window_attention(
        &mut self,
        pair: KvPair,
        window: u64,
        scale: f64,
        softcap: Option<f64>,
        own: OwnRows,
        operands: &[V],
    ) -> Option<V> {
        let (q, at, table) = (operands.first()?, operands.get(1)?, operands.get(2)?);
        let KvLayout::Window { tokens, .. } = self.layout(pair)? else { return None };
        let [b, rows] = at.shape[..] else { return None };
        let mut sides = Vec::new();
        for id in [pair.key.0, pair.value.0] {
            let cache = self.kv.get(&id)?.clone();
            let ring = self.f.take(&cache, table);
            sides.push(self.f.convert(&ring, "f32"));
        }
        // Slot s holds the latest position before this call that is s modulo the ring's length.
        let shape = [b, rows, tokens];
        let slot = self.f.iota(&shape, 2);
        let start = self.f.slice(at, 1, 0, 1);
        let start = self.f.reshape(&start, &[b]);
        let start = self.f.broadcast(&start, &[0], &shape);
        let newest = self.f.scalar("subtract", &start, 1.0);
        let back = self.f.binary("subtract", &newest, &slot);
        let back = self.f.scalar("add", &back, tokens as f64);
        let back = self.f.scalar("remainder", &back, tokens as f64);
        let position = self.f.binary("subtract", &newest, &back);
        let zero = self.f.integer(0, &shape);
        let there = self.f.compare("GE", &position, &zero);
        let query = self.f.broadcast(at, &[0, 1], &shape);
        let oldest = self.f.scalar("subtract", &query, window as f64);
        let near = self.f.compare("GT", &position, &oldest);
        let mut seen = self.f.binary("and", &there, &near);

        if let (Some(k), Some(v)) = (operands.get(3), operands.get(4)) {
            let shape = [b, rows, rows];
            let (i, j) = (self.f.iota(&shape, 1), self.f.iota(&shape, 2));
            let earlier = self.f.compare("LE", &j, &i);
            let query = self.f.broadcast(at, &[0, 1], &shape);
            let key = self.f.broadcast(at, &[0, 2], &shape);
            let oldest = self.f.scalar("subtract", &query, window as f64);
            let near = self.f.compare("GT", &key, &oldest);
            let causal = self.f.binary("and", &earlier, &near);
            let mut mine = match own {
                OwnRows::Causal => causal,
                OwnRows::ImageInWindow => near,
                OwnRows::Image => self.f.compare("EQ", &j, &j),
            };
            if let Some(last) = operands.get(5) {
                let last = self.f.broadcast(last, &[], &shape);
                let valid = self.f.compare("LE", &j, &last);
                mine = self.f.binary("and", &mine, &valid);
            }
            seen = self.f.concatenate(&[&seen, &mine], 2);
            let own: Vec<V> = [k, v].map(|x| self.f.transpose(x, &[0, 2, 1, 3])).into();
            sides = sides
                .iter()
                .zip(&own)
                .map(|(ring, own)| self.f.concatenate(&[ring, own], 2))
                .collect();
        }
        self.attend(q, sides.first()?, sides.get(1)?, Some(&seen), scale, softcap)
    }

    pub(super) fn window_write(&mut self, pair: KvPair, operands: &[V]) -> Option<()> {
        let (k, v, at, table) =
            (operands.first()?, operands.get(1)?, operands.get(2)?, operands.get(3)?);
        let KvLayout::Window { slots, tokens } = self.layout(pair)? else { return None };
        let [b, q] = at.shape[..] else { return None };
        let place = self.f.scalar("remainder", at, tokens as f64);
        let mut ring = self.f.broadcast(table, &[0], &[b, q]);
        if let Some(last) = operands.get(4) {
            // Padding, and rows that a later one replaces, go nowhere: an index outside drops them.
            let i = self.f.iota(&[b, q], 1);
            let last = self.f.broadcast(last, &[], &[b, q]);
            let valid = self.f.compare("LE", &i, &last);
            let oldest = self.f.scalar("subtract", &last, tokens as f64);
            let kept = self.f.compare("GT", &i, &oldest);
            let write = self.f.binary("and", &valid, &kept);
            let nowhere = self.f.integer(slots as i64, &[b, q]);
            ring = self.f.select(&write, &ring, &nowhere);
        }
        let places = self.places(&ring, &place);
        self.write(pair, k, v, &places)
    }

    pub(super) fn dense_attention(&mut self, operands: &[V], scale: f64) -> Option<V> {
        let [q, k, v, mask @ ..] = operands else { return None };
        let [b, rows, _, _] = q.shape[..] else { return None };
        let (k, v) = (self.f.transpose(k, &[0, 2, 1, 3]), self.f.transpose(v, &[0, 2, 1, 3]));
        let seen = mask.first().map(|mask| {
            // The mask is 0 for a visible key and the lowest float for padding.
            let zero = self.f.constant(0.0, &mask.shape);
            let seen = self.f.compare("EQ", mask, &zero);
            self.f.broadcast(&seen, &[0, 2], &[b, rows, rows])
        });
        self.attend(q, &k, &v, seen.as_ref(), scale, None)
    }
}
