//! A file proved by running it: every text program once, all values finite.

use super::engine::Engine;
use super::stored::Opened;
use crate::diag::{Diagnostic, Problems, Result};

/// Tokens of the sequences that decode together.
const SHORT: usize = 3;

/// What a proof ran.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Proof {
    /// Programs that ran.
    pub programs: Vec<String>,
    /// What they gave that no model says.
    pub problems: Vec<Diagnostic>,
}

/// Runs one prefill call and one decode call of every batch size. `weights` bounds the bytes of decoded weights that are
/// kept. Programs of images are not run.
///
/// # Errors
/// Programs or weights that cannot be run at all.
pub fn prove(opened: &Opened<'_>, weights: u64) -> Result<Proof> {
    let sizes = &opened.sizes;
    let chunk = sizes.prefill_chunk.min(sizes.max_seq_len.saturating_sub(1)).max(1);
    let slots = chunk.saturating_add(sizes.batch_size.saturating_mul(SHORT as u64 + 1));
    let mut engine = opened.engine(slots, weights)?;
    let mut proof = Proof::default();
    let mut problems = Problems::new();
    let mut check = |program: String, rows: &[Vec<f32>]| {
        for (row, logits) in rows.iter().enumerate() {
            let wrong = logits.iter().position(|v| !v.is_finite());
            if let Some((at, value)) = wrong.and_then(|at| Some((at, logits.get(at)?))) {
                problems.push(Diagnostic::new(
                    "deep",
                    format!("{program}: logit {at} of row {row} is {value}"),
                ));
            }
        }
        proof.programs.push(program);
    };
    let tokens = |first: u64, count: usize| text(&vocabulary(opened), first, count);
    let rows = engine.prefill(0, &tokens(1, usize::try_from(chunk).unwrap_or(1)), &[])?;
    check(format!("prefill of {chunk} tokens"), &[rows]);
    engine.release(0);
    for &batch in &sizes.decoder_batch_sizes {
        let batch = usize::try_from(batch).unwrap_or(1);
        for slot in 0..batch {
            engine.prefill(slot, &tokens(slot as u64, SHORT), &[])?;
        }
        let step: Vec<(usize, u64)> = (0..batch).zip(tokens(11, batch)).collect();
        let rows = engine.decode(&step)?;
        check(format!("decode_b{batch}"), &rows);
        release(&mut engine, batch);
    }
    proof.problems = problems.into_vec();
    Ok(proof)
}

fn release(engine: &mut Engine<'_>, slots: usize) {
    (0..slots).for_each(|slot| engine.release(slot));
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
