//! A file proved by running it: every program once, all values finite, and what programs compiled anew say too.

use std::collections::BTreeMap;

use super::engine::Engine;
use super::executor::{Memory, View};
use super::images::Image;
use super::stored::{Opened, StoredWeights};
use super::value::fault;
use crate::artifact::Weights;
use crate::diag::{Diagnostic, Problems, Result};
use crate::graph::{self, Op, Programs, Shard, Shards, WeightRef, WeightShare};
use crate::model::VisionSpec;
use crate::recipe::Activations;

/// Tokens of the sequences that decode together.
const SHORT: usize = 3;

/// Steps of a draft head.
const STEPS: u64 = 2;

/// Largest difference between two orders of the same sums in f32, as a share of the largest value. The tiny models'
/// logits differ by less than a tenth of it between 1 and 16 devices.
pub const BOUND: f32 = 1e-3;

/// What a proof ran.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Proof {
    /// Programs that ran.
    pub programs: Vec<String>,
    /// What their values were compared with.
    pub compared: Compared,
    /// What they gave that no model says.
    pub problems: Vec<Diagnostic>,
}

/// What the stored programs' values were compared with.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Compared {
    /// Nothing: values were not finite.
    #[default]
    Nothing,
    /// The stored programs are what the compiler makes of the model for one device: running those gives the same.
    Equal,
    /// Programs compiled anew for one device ran over the same weights.
    OneDevice {
        /// Devices of the stored programs.
        devices: u32,
        /// The largest difference of a program's values, as a share of its largest value.
        largest: f32,
    },
}

/// What a program gave.
struct Ran {
    programs: Vec<String>,
    /// Rows of every output.
    rows: Vec<Vec<f32>>,
}

/// Runs every program that a request can reach: a whole prefill call, a decode and a draft step of every batch size, an
/// image through every encoder and projector, and a prompt through every image prefill. Then the same with programs that
/// are compiled anew from the file's own configuration for one device, over the same weights put together, unless those
/// are the stored ones. `weights` bounds the bytes of decoded weights that are kept.
///
/// # Errors
/// Programs or weights that cannot be run at all.
pub fn prove(opened: &Opened<'_>, weights: u64) -> Result<Proof> {
    let slots = slots(opened);
    let ran = run(&mut opened.engine(slots, weights / 2)?, opened)?;
    let mut problems = Problems::new();
    ran.iter().for_each(|ran| problems.extend(not_finite(ran)));
    let mut programs: Vec<String> = ran.iter().flat_map(|r| r.programs.clone()).collect();
    programs.sort();
    programs.dedup();
    let mut proof = Proof { programs, ..Proof::default() };
    if problems.is_empty() {
        match anew(opened) {
            Ok(programs) if programs == opened.programs => proof.compared = Compared::Equal,
            Ok(programs) => {
                let mut engine = one_device(opened, programs, slots, weights / 2)?;
                let expected = run(&mut engine, opened)?;
                let mut largest = 0.0f32;
                for (ran, expected) in ran.iter().zip(&expected) {
                    let (share, problem) = differs(ran, expected);
                    largest = largest.max(share);
                    problems.extend(problem);
                }
                let devices = opened.programs.programs.iter().map(|p| p.devices).max();
                proof.compared = Compared::OneDevice { devices: devices.unwrap_or(1), largest };
            }
            Err(failure) => {
                let why = failure
                    .problems
                    .first()
                    .map_or(failure.headline.clone(), |p| p.message.clone());
                problems.push(Diagnostic::new(
                    "deep",
                    format!("the model in the file cannot be compiled anew: {why}"),
                ));
            }
        }
    }
    proof.problems = problems.into_vec();
    Ok(proof)
}

/// The first value of each row that is not finite.
fn not_finite(ran: &Ran) -> Vec<Diagnostic> {
    let found = ran.rows.iter().enumerate().filter_map(|(row, values)| {
        let at = values.iter().position(|v| !v.is_finite())?;
        let (program, value) = (ran.programs.join(", "), values.get(at)?);
        Some(Diagnostic::new("deep", format!("{program}: value {at} of row {row} is {value}")))
    });
    found.collect()
}

/// The largest difference as a share of the largest expected value, and the problem where it is too large.
fn differs(ran: &Ran, expected: &Ran) -> (f32, Option<Diagnostic>) {
    let all = |ran: &Ran| ran.rows.concat();
    let (found, expected) = (all(ran), all(expected));
    let size = expected.iter().fold(f32::MIN_POSITIVE, |most, v| most.max(v.abs()));
    let gap = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let share =
        if found.len() == expected.len() && gap.is_finite() { gap / size } else { f32::INFINITY };
    let problem = (share > BOUND).then(|| {
        Diagnostic::new(
            "deep",
            format!(
                "{}: values differ by {gap:.2e} from those of programs compiled anew for one device; the order of sums explains {:.2e}",
                ran.programs.join(", "),
                size * BOUND
            ),
        )
        .help("the stored program computes another model than the file's configuration describes")
    });
    (share, problem)
}

/// Cache slots that the runs need.
fn slots(opened: &Opened<'_>) -> u64 {
    let sizes = &opened.sizes;
    let images = sizes.image_prefill.iter().copied().max().unwrap_or(0);
    let decoding = sizes.batch_size.saturating_mul(SHORT as u64 + 1);
    [sizes.prefill_chunk, images, decoding, sizes.block.saturating_mul(3)]
        .iter()
        .fold(0u64, |sum, n| sum.saturating_add(*n))
}

/// The programs that the compiler makes of the file's model for one device.
fn anew(opened: &Opened<'_>) -> Result<Programs> {
    let weights = Weights::open(opened.artifact).map_err(|e| fault(e.to_string()))?;
    let mut rules: BTreeMap<&str, Option<Activations>> = BTreeMap::new();
    for program in &opened.programs.programs {
        for node in &program.nodes {
            let (Op::Linear { activations, .. } | Op::Experts { activations, .. }) = &node.op
            else {
                continue;
            };
            for weight in node.op.weights().iter().filter_map(|id| program.weight(*id)) {
                rules.insert(&weight.name, *activations);
            }
        }
    }
    let shard = |name: &str| -> Option<Shard> {
        let weight = WeightRef {
            name: name.to_owned(),
            shape: weights.get(name)?.shape().clone(),
            share: WeightShare::Whole,
        };
        Some(Shard { weight, activations: rules.get(name).copied().flatten() })
    };
    let mut shards: BTreeMap<String, Shard> = BTreeMap::new();
    for view in weights.iter() {
        shards.extend(shard(view.name()).map(|s| (view.name().to_owned(), s)));
    }
    // A head that is the embedding table has no entry of its own.
    for (head, table) in
        [("output.weight", "token_embd.weight"), ("draft.output.weight", "draft.token_embd.weight")]
    {
        if let (false, Some(shard)) = (shards.contains_key(head), shard(table)) {
            shards.insert(head.to_owned(), shard);
        }
    }
    let shards = Shards::whole(shards);
    graph::compile(&opened.spec, opened.draft.as_ref(), &opened.sizes, &shards)
}

/// The file's weights, whole, under programs for one device.
fn one_device<'a>(
    opened: &Opened<'a>,
    programs: Programs,
    slots: u64,
    weights: u64,
) -> Result<Engine<'a>> {
    let stored = StoredWeights::new(opened.artifact, &programs)?.whole_weights();
    let memory = Memory { blocks: opened.blocks(slots), weights };
    Engine::new(programs, &opened.sizes, &opened.spec, stored, memory)
}

/// Every program once, always in the same order.
fn run(engine: &mut Engine<'_>, opened: &Opened<'_>) -> Result<Vec<Ran>> {
    let sizes = &opened.sizes;
    let count = |n: u64| usize::try_from(n).map_err(fault);
    let tokens = |first: u64, count: usize| text(&vocabulary(opened), first, count);
    let mut out = Vec::new();
    let chunk = sizes.prefill_chunk.min(sizes.max_seq_len.saturating_sub(1)).max(1);
    let logits = engine.prefill(0, &tokens(1, count(chunk)?), &[])?;
    out.push(Ran { programs: vec!["prefill".to_owned()], rows: vec![logits] });
    engine.release(0);
    for &batch in &sizes.decoder_batch_sizes {
        let batch = count(batch)?;
        for slot in 0..batch {
            engine.prefill(slot, &tokens(slot as u64, SHORT), &[])?;
        }
        let step: Vec<(usize, u64)> = (0..batch).zip(tokens(11, batch)).collect();
        let rows = engine.decode(&step)?;
        out.push(Ran { programs: vec![format!("decode_b{batch}")], rows });
        if opened.draft.is_some() {
            let newest = tokens(17, 1).first().copied().unwrap_or(0);
            let proposed = engine.propose_among(batch, 0, newest, STEPS)?;
            let rows = proposed.into_iter().flat_map(|p| [p.logits, p.hidden]).collect();
            out.push(Ran { programs: vec![format!("draft_b{batch}")], rows });
        }
        (0..batch).for_each(|slot| engine.release(slot));
    }
    let Some(vision) = &opened.spec.vision else { return Ok(out) };
    let most = sizes.soft_tokens.iter().copied().max().unwrap_or(0);
    for &size in &sizes.soft_tokens {
        let Some(image) = image(vision, below(&sizes.soft_tokens, size), size) else { continue };
        let encoder = engine.encoder(&image)?;
        let rows = super::engine::row_list(&engine.encode(&image)?)?;
        out.push(Ran { programs: vec![encoder.vision, encoder.project], rows });
    }
    for &bucket in &sizes.image_prefill {
        let shortest = below(&sizes.image_prefill, bucket);
        let Some(image) = image(vision, shortest, bucket.min(most)) else { continue };
        let special = &opened.spec.tokens;
        let Some(placeholder) = special.image else { continue };
        let run = vec![placeholder; count(image.soft_tokens(vision))?];
        let mut prompt = tokens(3, 2);
        prompt.extend(special.begin_image);
        prompt.extend(run);
        let mut after: Vec<u64> = special.end_image.into_iter().collect();
        after.extend(tokens(7, 2));
        if (prompt.len() + after.len()) as u64 > sizes.max_seq_len {
            continue;
        }
        // Its own logits, and what it left in the cache, by the logits of the text behind it.
        let own = engine.prefill(0, &prompt, &[image])?;
        let behind = engine.extend(0, &after, &[], &View::default())?.logits;
        let programs = vec![format!("image_prefill_{bucket}")];
        out.push(Ran { programs, rows: vec![own, behind] });
        engine.release(0);
    }
    Ok(out)
}

/// The next smaller of these sizes, 0 if there is none.
fn below(sizes: &[u64], size: u64) -> u64 {
    sizes.iter().copied().filter(|n| *n < size).max().unwrap_or(0)
}

/// An image of more than `fewest` and at most `most` soft tokens, as many as make a rectangle that the encoder's tables
/// of positions hold.
fn image(vision: &VisionSpec, fewest: u64, most: u64) -> Option<Image> {
    let (patch, each, table) = match vision {
        VisionSpec::Tower(v) => (v.patch_size, v.pooling, v.position_table),
        VisionSpec::Embedder(v) => (v.patch_size.checked_mul(v.pooling)?, 1, v.position_table),
        VisionSpec::Siglip(v) if fewest < v.soft_tokens && v.soft_tokens <= most => {
            return rectangle(v.side(), v.side(), v.patch_values());
        }
        VisionSpec::Siglip(_) => return None,
    };
    let longest = table.checked_div(each)?;
    let shape = (fewest.checked_add(1)?..=most).rev().find_map(|n| {
        let high = (1..=n.isqrt()).rev().find(|h| n.is_multiple_of(*h))?;
        (n / high <= longest).then_some((n / high, high))
    });
    let (wide, high) = shape?;
    let (columns, rows) = (wide.checked_mul(each)?, high.checked_mul(each)?);
    rectangle(columns, rows, patch.checked_mul(patch)?.checked_mul(3)?)
}

/// An image of that many patches of so many values.
fn rectangle(columns: u64, rows: u64, values: u64) -> Option<Image> {
    let all = columns.checked_mul(rows)?.checked_mul(values).filter(|n| *n <= 1 << 28)?;
    // Any picture will do, as long as it is always the same and its patches differ.
    let pixels = (0..all).map(|n| (n.wrapping_mul(7919) % 251) as f32 / 250.0).collect();
    let mut positions = Vec::new();
    for y in 0..rows {
        let row = i64::try_from(y).ok()?;
        positions.extend((0..i64::try_from(columns).ok()?).map(|x| [x, row]));
    }
    Some(Image { pixels, positions })
}

/// The vocabulary's size, and tokens that no text holds.
fn vocabulary(opened: &Opened<'_>) -> (u64, Vec<u64>) {
    let t = &opened.spec.tokens;
    let placeholders = [t.image, t.video, t.audio].into_iter().flatten().collect();
    (opened.spec.text.vocab_size.max(1), placeholders)
}

/// Tokens from all over the vocabulary, the same every time.
fn text((size, placeholders): &(u64, Vec<u64>), first: u64, count: usize) -> Vec<u64> {
    // A prime steps through every vocabulary that it does not divide.
    let ids = (first..).map(|n| n.wrapping_mul(7919) % size);
    // Bounded, should there be nothing but placeholders.
    let ids = ids.take(count.saturating_mul(8).saturating_add(64));
    ids.filter(|id| !placeholders.contains(id)).take(count).collect()
}
