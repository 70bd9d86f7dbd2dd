//! The host side: sequences, chunks, buckets, masks and tables, as optimum-rbln 0.11.2 keeps them.

use std::collections::BTreeMap;
use std::ops::Range;

use super::activations::Precision;
use super::executor::{Executor, Memory, Outcome, View};
use super::images::{Encoder, Image, encode, encoder};
use super::pool::{Pool, Sequence};
use super::value::{Value, fault};
use super::weights::LocalWeights;
use crate::diag::{self, Diagnostic, Failure, FailureKind, Problems, Result};
use crate::graph::{Chunk, KvLayout, Programs, Request, RequestPlan, Sizes, plan_request};
use crate::model::ModelSpec;

/// A model that answers: programs on simulated devices, and the sequences that run in its slots.
pub struct Engine<'w> {
    pub(super) executor: Executor<'w>,
    pub(super) sizes: Sizes,
    pub(super) spec: ModelSpec,
    pool: Pool,
    paged: bool,
    pub(super) sequences: BTreeMap<usize, Sequence>,
}

/// Rows of a prompt.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rows {
    /// Logits, one row of the vocabulary for each token; of the last token alone unless all rows were asked for.
    pub logits: Vec<f32>,
    /// When layers were asked for: the rows that enter each layer, and at last the rows that enter the head (the last row
    /// of each call alone, unless all rows were asked for).
    pub layers: Vec<Vec<f32>>,
    /// Final hidden states of the same tokens as the logits, if the programs give them.
    pub hidden: Vec<f32>,
}

/// One row of a call of several sequences.
pub(super) struct Seat<'s> {
    pub slot: usize,
    pub sequence: &'s Sequence,
    pub cache_position: u64,
    pub position: u64,
}

/// New tokens with what the host looks up for them.
struct Tokens {
    ids: Vec<u64>,
    embeds: Option<Vec<f32>>,
    per_layer: Option<Vec<f32>>,
}

impl Rows {
    /// Adds the valid rows of a call; of logits and final states, where the call gives its last row alone, that one in
    /// place of an earlier one.
    fn add(&mut self, outcome: &Outcome, valid: usize, all_rows: bool) -> Result<()> {
        let part = |value: &Value, all: bool, to: &mut Vec<f32>| -> Result<()> {
            let values = value.as_floats()?;
            if !all {
                *to = values.to_vec();
                return Ok(());
            }
            let values = values.get(..valid * value.columns());
            to.extend_from_slice(values.ok_or_else(|| fault("too few rows"))?);
            Ok(())
        };
        part(outcome.output("logits")?, all_rows, &mut self.logits)?;
        if let Some(hidden) = outcome.get("hidden") {
            part(hidden, all_rows, &mut self.hidden)?;
        }
        self.layers.resize(outcome.layers.len(), Vec::new());
        for (layer, to) in outcome.layers.iter().zip(&mut self.layers) {
            let rows = layer.shape().get(1).copied().unwrap_or(0).min(valid);
            to.extend(layer.as_floats()?.iter().take(rows * layer.columns()));
        }
        Ok(())
    }
}

const HEADLINE: &str = "this prompt cannot be run";

fn refuse(message: String) -> Failure {
    Failure::one(FailureKind::Refused, HEADLINE, Diagnostic::new("runtime", message))
}

impl<'w> Engine<'w> {
    /// An engine without sequences. `memory.blocks` counts blocks that sequences can hold; one more is made for rows that
    /// nobody reads.
    ///
    /// # Errors
    /// As [`Executor::new`].
    pub fn new(
        programs: Programs,
        sizes: &Sizes,
        spec: &ModelSpec,
        weights: impl LocalWeights + 'w,
        memory: Memory,
    ) -> Result<Engine<'w>> {
        let paged = programs.kv.iter().any(|t| matches!(t.layout, KvLayout::Paged { .. }));
        let blocks = memory.blocks.saturating_add(1);
        let executor = Executor::new(programs, weights, Memory { blocks, ..memory })?;
        Ok(Engine {
            executor,
            sizes: sizes.clone(),
            spec: spec.clone(),
            pool: Pool::new(memory.blocks),
            paged,
            sequences: BTreeMap::new(),
        })
    }

    /// The same engine in another arithmetic.
    pub fn with_precision(mut self, precision: Precision) -> Engine<'w> {
        self.executor.set_precision(precision);
        self
    }

    /// The programs that encode an image.
    ///
    /// # Errors
    /// An image that no encoder fits.
    pub fn encoder(&self, image: &Image) -> Result<Encoder> {
        encoder(self.executor.programs(), image.patches())
    }

    /// The calls that adding tokens to the sequence of a slot takes.
    ///
    /// # Errors
    /// As [`plan_request`].
    pub fn plan(&self, slot: usize, tokens: &[u64]) -> Result<RequestPlan> {
        let held = self.sequences.get(&slot).map(|s| s.held).unwrap_or_default();
        let images = self.image_runs(tokens);
        plan_request(&self.sizes, &Request { held, tokens: tokens.len() as u64, images })
    }

    /// Blocks that no sequence holds.
    pub fn free_blocks(&self) -> usize {
        self.pool.free()
    }

    /// Tokens that the sequence of a slot holds.
    pub fn length(&self, slot: usize) -> u64 {
        self.sequences.get(&slot).map_or(0, |s| s.held.positions)
    }

    /// Ends the sequence of a slot.
    pub fn release(&mut self, slot: usize) {
        if let Some(sequence) = self.sequences.remove(&slot) {
            self.pool.release(&sequence);
        }
    }

    /// Rows of the text space that an image becomes, `[rows, width]`.
    ///
    /// # Errors
    /// An image that no encoder fits.
    pub fn encode(&mut self, image: &Image) -> Result<Value> {
        encode(&mut self.executor, image)
    }

    /// Starts a sequence in a slot, in place of the one there, and gives the logits of its last token. Runs of image
    /// tokens stand for the images, in order.
    ///
    /// # Errors
    /// A slot that the programs do not have, tokens beyond the vocabulary, sound, images that do not fit their runs, a
    /// prompt that does not fit the programs or the cache.
    pub fn prefill(&mut self, slot: usize, tokens: &[u64], images: &[Image]) -> Result<Vec<f32>> {
        self.release(slot);
        Ok(self.extend(slot, tokens, images, &View::default())?.logits)
    }

    /// As [`Engine::prefill`], with the logits of all tokens and the rows that enter every layer.
    ///
    /// # Errors
    /// As [`Engine::prefill`].
    pub fn prefill_all(&mut self, slot: usize, tokens: &[u64], images: &[Image]) -> Result<Rows> {
        self.release(slot);
        self.extend(slot, tokens, images, &View { all_rows: true, layers: true })
    }

    /// Adds tokens to the sequence of a slot in prefill chunks; begins one if there is none.
    ///
    /// # Errors
    /// As [`Engine::prefill`]. A sequence that fails while it runs is ended.
    pub fn extend(
        &mut self,
        slot: usize,
        tokens: &[u64],
        images: &[Image],
        view: &View,
    ) -> Result<Rows> {
        self.check(slot, tokens)?;
        self.refuse_sound(tokens)?;
        let runs = self.image_runs(tokens);
        if runs.len() != images.len() {
            return Err(refuse(format!(
                "the prompt has {} runs of image tokens for {} images",
                runs.len(),
                images.len()
            )));
        }
        let plan = self.plan(slot, tokens)?;
        let mut features = Vec::new();
        for (image, run) in images.iter().zip(&runs) {
            let rows = self.encode(image)?;
            let (found, needed) =
                (rows.shape().first().copied().unwrap_or(0) as u64, run.end - run.start);
            if found != needed {
                return Err(refuse(format!(
                    "an image of {found} soft tokens for a run of {needed} image tokens"
                )));
            }
            features.push(rows);
        }
        let tokens = self.look_up(tokens, &runs, &features)?;
        let mut sequence = match self.sequences.remove(&slot) {
            Some(sequence) => sequence,
            None => Sequence::new(&self.sizes)?,
        };
        let claimed =
            if self.paged { self.pool.claim(&mut sequence, &plan.blocks) } else { Ok(()) };
        let mut rows = Rows::default();
        let result = claimed.and_then(|()| {
            plan.chunks.iter().try_for_each(|chunk| {
                self.chunk(slot, &mut sequence, &tokens, chunk, view, &mut rows)
            })
        });
        match result {
            Ok(()) => drop(self.sequences.insert(slot, sequence)),
            Err(_) => self.pool.release(&sequence),
        }
        result.map(|()| rows)
    }

    /// One step of several sequences: a token of each, and the logits that follow it, in the given order.
    ///
    /// # Errors
    /// A slot without a sequence or named twice, a token beyond the vocabulary, a sequence at its end, a full cache.
    pub fn decode(&mut self, step: &[(usize, u64)]) -> Result<Vec<Vec<f32>>> {
        let largest = self.sizes.decoder_batch_sizes.iter().copied().max().unwrap_or(0);
        let largest = usize::try_from(largest).map_err(fault)?;
        if largest == 0 {
            return Err(refuse("there is no decode program".to_owned()));
        }
        for (n, (slot, token)) in step.iter().enumerate() {
            self.check(*slot, &[*token])?;
            if step.iter().take(n).any(|(other, _)| other == slot) {
                return Err(refuse(format!("slot {slot} is to decode two tokens at once")));
            }
            let held = self.sequences.get(slot).map(|s| s.held);
            let held = held.ok_or_else(|| refuse(format!("slot {slot} has no sequence")))?;
            if held.slots >= self.sizes.max_seq_len {
                return Err(refuse(format!(
                    "the sequence of slot {slot} holds {} slots, all that there are",
                    diag::count(held.slots)
                )));
            }
        }
        let mut out = Vec::with_capacity(step.len());
        for part in step.chunks(largest) {
            out.extend(self.decode_bucket(part)?);
        }
        Ok(out)
    }

    fn decode_bucket(&mut self, step: &[(usize, u64)]) -> Result<Vec<Vec<f32>>> {
        let batch = self.bucket(step.len())?;
        for (slot, _) in step {
            let Some(sequence) = self.sequences.get_mut(slot) else { continue };
            let at = sequence.held.slots;
            if self.paged {
                self.pool.claim(sequence, &[at / self.sizes.block.max(1)])?;
            }
            sequence.mark(at, 1, 1.0);
        }
        let mut ids: Vec<u64> = step.iter().map(|(_, token)| *token).collect();
        let empty = Sequence::new(&self.sizes)?;
        let mut seats: Vec<Seat<'_>> = Vec::with_capacity(batch);
        for (slot, _) in step {
            let sequence = self.sequences.get(slot).ok_or_else(|| fault("a lost sequence"))?;
            seats.push(Seat {
                slot: *slot,
                sequence,
                cache_position: sequence.held.slots,
                position: sequence.held.positions,
            });
        }
        // Padding rows write into the scratch block and into a ring that no sequence uses. When all rings are in use,
        // they repeat the last row instead, which writes the same values to the same places.
        let unused = (0..usize::try_from(self.sizes.batch_size).unwrap_or(usize::MAX))
            .find(|slot| !self.sequences.contains_key(slot));
        while seats.len() < batch {
            let (seat, token) = match (unused, seats.last(), ids.last()) {
                (Some(slot), ..) => (
                    Seat { slot, sequence: &empty, cache_position: 0, position: 0 },
                    self.padding(),
                ),
                (None, Some(last), Some(token)) => (Seat { ..*last }, *token),
                _ => return Err(fault("a step without sequences")),
            };
            seats.push(seat);
            ids.push(token);
        }
        let tokens = self.look_up(&ids, &[], &[])?;
        let mut inputs = self.seating(&seats)?;
        inputs.extend(self.token_inputs(&tokens, 0..batch, [batch, 1])?);
        let outcome = self.executor.run(&format!("decode_b{batch}"), &inputs, &View::default())?;
        let logits = outcome.output("logits")?;
        let rows = logits.as_floats()?.chunks_exact(logits.columns().max(1));
        let hidden = outcome.get("hidden").map(row_list).transpose()?.unwrap_or_default();
        let mut out = Vec::with_capacity(step.len());
        for (n, ((slot, _), row)) in step.iter().zip(rows).enumerate() {
            out.push(row.to_vec());
            if let Some(sequence) = self.sequences.get_mut(slot) {
                sequence.held.positions += 1;
                sequence.held.slots += 1;
                sequence.hidden = hidden.get(n).cloned().unwrap_or_default();
            }
        }
        Ok(out)
    }

    /// The smallest decode program of at least that many sequences.
    pub(super) fn bucket(&self, sequences: usize) -> Result<usize> {
        let sizes = self.sizes.decoder_batch_sizes.iter().filter_map(|b| usize::try_from(*b).ok());
        let fitting = sizes.filter(|b| *b >= sequences).min();
        fitting.ok_or_else(|| fault(format!("no decode program for {sequences} sequences")))
    }

    /// Positions, tables and masks of a call with one row for each sequence.
    pub(super) fn seating(&self, seats: &[Seat<'_>]) -> Result<Vec<(&'static str, Value)>> {
        let batch = seats.len();
        let int = |n: u64| i64::try_from(n).map_err(fault);
        let scratch = self.pool.scratch();
        let (mut at, mut positions, mut tables, mut rings, mut mask) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for seat in seats {
            at.push(int(seat.cache_position)?);
            positions.push(int(seat.position)?);
            tables.extend(seat.sequence.blocks(scratch));
            rings.push(int(seat.slot as u64)?);
            mask.extend_from_slice(&seat.sequence.mask);
        }
        let blocks = tables.len() / batch.max(1);
        let slots = mask.len() / batch.max(1);
        Ok(vec![
            ("cache_position", Value::ints([batch, 1], at)?),
            ("position_ids", Value::ints([batch, 1], positions)?),
            ("block_tables", Value::ints([batch, blocks], tables)?),
            ("local_block_tables", Value::ints([batch], rings)?),
            ("attention_mask", Value::floats([batch, slots], mask)?),
        ])
    }

    /// One prefill call; its rows are added to `rows`.
    fn chunk(
        &mut self,
        slot: usize,
        sequence: &mut Sequence,
        tokens: &Tokens,
        chunk: &Chunk,
        view: &View,
        rows: &mut Rows,
    ) -> Result<()> {
        let int = |n: u64| i64::try_from(n).map_err(fault);
        let size = |n: u64| usize::try_from(n).map_err(fault);
        let (count, first, valid) = (size(chunk.rows)?, size(chunk.first)?, size(chunk.valid)?);
        sequence.mark(chunk.slot, chunk.valid, 1.0);
        let from = |start: u64| -> Result<Value> {
            let start = int(start)?;
            Value::ints([1, count], (0..count as i64).map(|n| start + n).collect::<Vec<_>>())
        };
        let tables: Vec<i64> = sequence.blocks(self.pool.scratch()).collect();
        let mut inputs = vec![
            ("cache_position", from(chunk.slot)?),
            ("position_ids", from(chunk.position)?),
            ("block_tables", Value::ints([tables.len()], tables)?),
            ("local_block_tables", Value::ints([1], vec![int(slot as u64)?])?),
            ("query_position", Value::scalar(int(chunk.valid)? - 1)),
            ("attention_mask", Value::floats([1, sequence.mask.len()], sequence.mask.clone())?),
        ];
        inputs.extend(self.token_inputs(tokens, first..first + valid, [1, count])?);
        let outcome = self.executor.run(&chunk.program(), &inputs, view)?;
        let last = |value: &Value| -> Result<Vec<f32>> {
            let columns = value.columns();
            let row = if view.all_rows { valid.saturating_sub(1) } else { 0 };
            let row = value.as_floats()?.get(row * columns..(row + 1) * columns);
            Ok(row.ok_or_else(|| fault("an output without its last row"))?.to_vec())
        };
        if let Some(hidden) = outcome.get("hidden") {
            sequence.hidden = last(hidden)?;
        }
        rows.add(&outcome, valid, view.all_rows)?;
        sequence.held.positions = chunk.position + chunk.valid;
        sequence.held.slots = chunk.slot + chunk.valid;
        Ok(())
    }

    /// What a call reads about its tokens: ids, or embeddings; rows beyond the range are padding.
    fn token_inputs(
        &self,
        tokens: &Tokens,
        range: Range<usize>,
        [batch, rows]: [usize; 2],
    ) -> Result<Vec<(&'static str, Value)>> {
        let short = || fault("too few tokens");
        let total = batch * rows;
        let mut ids = Vec::with_capacity(total);
        for id in tokens.ids.get(range.clone()).ok_or_else(short)? {
            ids.push(i64::try_from(*id).map_err(fault)?);
        }
        ids.resize(total, i64::try_from(self.padding()).map_err(fault)?);
        let mut inputs = vec![("input_ids", Value::ints([batch, rows], ids)?)];
        let padded = |all: &[f32]| -> Result<(Vec<f32>, usize)> {
            let width = all.len().checked_div(tokens.ids.len()).unwrap_or(0);
            let part = all.get(range.start * width..range.end * width).ok_or_else(short)?;
            let mut out = part.to_vec();
            out.resize(total * width, 0.0);
            Ok((out, width))
        };
        if let Some(embeds) = &tokens.embeds {
            let (data, width) = padded(embeds)?;
            inputs.push(("inputs_embeds", Value::floats([batch, rows, width], data)?));
        }
        if let (Some(per_layer), Some(ple)) = (&tokens.per_layer, self.spec.text.per_layer_input) {
            let (data, width) = padded(per_layer)?;
            let ple = usize::try_from(ple.width).map_err(fault)?;
            let layers = width.checked_div(ple).unwrap_or(0);
            inputs.push(("per_layer_inputs", Value::floats([batch, rows, layers, ple], data)?));
        }
        Ok(inputs)
    }

    /// The target's scaled embedding of a token.
    pub(super) fn embedding(&self, token: u64) -> Result<Vec<f32>> {
        let mut row = self.table_row("token_embd.weight", token)?;
        let scale = self.spec.text.embedding_scale as f32;
        row.iter_mut().for_each(|v| *v *= scale);
        Ok(row)
    }

    fn table_row(&self, name: &str, row: u64) -> Result<Vec<f32>> {
        let columns = self.executor.weights().table_columns(name);
        let columns = columns.and_then(|n| usize::try_from(n).ok());
        let mut out = vec![0.0; columns.ok_or_else(|| fault(format!("there is no {name}")))?];
        self.executor.weights().table_row(name, row, &mut out)?;
        Ok(out)
    }

    /// Looks embeddings up where the host does it; image tokens take their features' rows as they are.
    fn look_up(&self, ids: &[u64], runs: &[Range<u64>], features: &[Value]) -> Result<Tokens> {
        // Placeholders are looked up as the padding token, also those that the model itself has said (transformers 5.24,
        // Gemma 4).
        let placeholders = self.placeholders();
        let ids = ids.iter().map(|id| if placeholders.contains(id) { self.padding() } else { *id });
        let mut tokens = Tokens { ids: ids.collect(), embeds: None, per_layer: None };
        if !self.sizes.embeds {
            return Ok(tokens);
        }
        let width = usize::try_from(self.spec.text.hidden_size).map_err(fault)?;
        let mut embeds = Vec::with_capacity(tokens.ids.len().saturating_mul(width));
        let mut per_layer = Vec::new();
        for &id in &tokens.ids {
            embeds.extend(self.embedding(id)?);
            if let Some(ple) = self.spec.text.per_layer_input {
                let scale = (ple.width as f64).sqrt() as f32;
                let row = self.table_row("per_layer_token_embd.weight", id)?;
                per_layer.extend(row.into_iter().map(|v| v * scale));
            }
        }
        for (run, rows) in runs.iter().zip(features) {
            let first = usize::try_from(run.start).map_err(fault)? * width;
            let rows = rows.as_floats()?;
            let to = embeds.get_mut(first..first + rows.len());
            to.ok_or_else(|| fault("an image beyond the prompt"))?.copy_from_slice(rows);
        }
        tokens.embeds = Some(embeds);
        tokens.per_layer = self.spec.text.per_layer_input.map(|_| per_layer);
        Ok(tokens)
    }

    /// Tokens that stand for rows of an encoder.
    pub(super) fn placeholders(&self) -> Vec<u64> {
        let t = &self.spec.tokens;
        [t.image, t.video, t.audio].into_iter().flatten().collect()
    }

    fn padding(&self) -> u64 {
        self.spec.tokens.pad.unwrap_or(0)
    }

    /// Maximal runs of image and video tokens, where the model has an image encoder.
    fn image_runs(&self, tokens: &[u64]) -> Vec<Range<u64>> {
        let t = &self.spec.tokens;
        let placeholders: Vec<u64> = [t.image, t.video].into_iter().flatten().collect();
        let mut runs: Vec<Range<u64>> = Vec::new();
        if self.spec.vision.is_none() {
            return runs;
        }
        for (n, _) in tokens.iter().enumerate().filter(|(_, t)| placeholders.contains(t)) {
            let n = n as u64;
            match runs.last_mut() {
                Some(run) if run.end == n => run.end = n + 1,
                _ => runs.push(n..n + 1),
            }
        }
        runs
    }

    /// A prompt with sound; a token that the model itself says is looked up like any other placeholder.
    fn refuse_sound(&self, tokens: &[u64]) -> Result<()> {
        match self.spec.tokens.audio.filter(|a| tokens.contains(a)) {
            None => Ok(()),
            Some(audio) => Err(Failure::one(
                FailureKind::Refused,
                HEADLINE,
                Diagnostic::new(
                    "runtime",
                    format!("token {audio} stands for sound, and no program takes sound"),
                )
                .help("text and images can be run"),
            )),
        }
    }

    /// Problems of a slot and of tokens for it.
    fn check(&self, slot: usize, tokens: &[u64]) -> Result<()> {
        let mut problems = Problems::new();
        if slot as u64 >= self.sizes.batch_size {
            problems.push(Diagnostic::new(
                "runtime",
                format!("slot {slot} of programs for {} sequences", self.sizes.batch_size),
            ));
        }
        let vocabulary = self.spec.text.vocab_size;
        if let Some(token) = tokens.iter().find(|t| **t >= vocabulary) {
            problems.push(Diagnostic::new(
                "runtime",
                format!("token {token} of a vocabulary of {}", diag::count(vocabulary)),
            ));
        }
        problems.finish(FailureKind::Refused, HEADLINE, ())
    }
}

/// Rows of the last axis.
pub(super) fn row_list(value: &Value) -> Result<Vec<Vec<f32>>> {
    let columns = value.columns().max(1);
    Ok(value.as_floats()?.chunks_exact(columns).map(<[f32]>::to_vec).collect())
}
