//! Greedy text, with and without a draft head.

use super::engine::{Engine, Seat, row_list};
use super::executor::View;
use super::images::Image;
use super::value::{Value, fault};
use crate::diag::{Diagnostic, Failure, FailureKind, Result};
use crate::graph::{ProgramKind, Request, plan_request};

/// How a draft head is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drafting {
    /// Tokens that it proposes at once.
    pub tokens: u64,
    /// How proposals are checked.
    pub verify: Verify,
}

/// How proposals of a draft head are checked against the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verify {
    /// Token by token in the decode program: what compiled programs allow, since a prefill gives its last row alone.
    Steps,
    /// All at once in the prefill program, with the logits of all its rows; in steps where a chunk has no room.
    Chunk,
}

/// One step of a draft head.
#[derive(Debug, Clone, PartialEq)]
pub struct Proposal {
    /// The token with the largest logit.
    pub token: u64,
    /// Logits over the vocabulary.
    pub logits: Vec<f32>,
    /// The hidden state that the next step reads, as wide as the target's.
    pub hidden: Vec<f32>,
}

/// A text that a draft head helped with.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Drafted {
    /// The text.
    pub tokens: Vec<u64>,
    /// Tokens that the draft head proposed.
    pub proposed: u64,
    /// Those of them that the target would have said too.
    pub accepted: u64,
}

/// Index of the largest logit; the lowest of equal ones.
pub fn greedy(logits: &[f32]) -> u64 {
    let mut best = 0;
    for (n, logit) in logits.iter().enumerate() {
        if logit.total_cmp(&logits[best]).is_gt() {
            best = n;
        }
    }
    best as u64
}

impl Engine<'_> {
    /// Continues a prompt by at most `count` tokens, each the most likely one; stops after a token of `stop`.
    ///
    /// # Errors
    /// As [`Engine::prefill`] and [`Engine::decode`].
    pub fn generate(
        &mut self,
        slot: usize,
        tokens: &[u64],
        images: &[Image],
        count: usize,
        stop: &[u64],
    ) -> Result<Vec<u64>> {
        self.generate_each(slot, tokens, images, count, stop, &mut |_| Ok(true))
    }

    /// As [`Engine::generate`]; `each` is told of every token as soon as it is known, and ends the text with `false`.
    /// A text ends too where the sequence can hold no more.
    ///
    /// # Errors
    /// As [`Engine::generate`], and those of `each`.
    pub fn generate_each(
        &mut self,
        slot: usize,
        tokens: &[u64],
        images: &[Image],
        count: usize,
        stop: &[u64],
        each: &mut dyn FnMut(u64) -> Result<bool>,
    ) -> Result<Vec<u64>> {
        let mut logits = self.prefill(slot, tokens, images)?;
        let mut out = Vec::new();
        while out.len() < count {
            let token = greedy(&logits);
            out.push(token);
            let held = self.sequences.get(&slot).map_or(0, |s| s.held.slots);
            let full = held >= self.sizes.max_seq_len;
            if !each(token)? || stop.contains(&token) || out.len() == count || full {
                break;
            }
            let rows = self.decode(&[(slot, token)])?;
            logits = rows.into_iter().next().ok_or_else(|| fault("a step without logits"))?;
        }
        Ok(out)
    }

    /// Lets the draft head propose tokens after `newest`, which the sequence of the slot does not hold yet.
    ///
    /// # Errors
    /// No draft program, programs that give no hidden state, a slot without a sequence.
    pub fn propose(&mut self, slot: usize, newest: u64, count: u64) -> Result<Vec<Proposal>> {
        let batch = self.bucket(1)?;
        self.propose_among(batch, slot, newest, count)
    }

    /// As [`Engine::propose`], by the program of that many sequences.
    pub(super) fn propose_among(
        &mut self,
        batch: usize,
        slot: usize,
        newest: u64,
        count: u64,
    ) -> Result<Vec<Proposal>> {
        let name = format!("draft_b{batch}");
        let drafts = |kind: ProgramKind| matches!(kind, ProgramKind::Draft { .. });
        if self.executor.programs().of_kind(drafts).next().is_none() {
            return Err(refuse("there is no draft program"));
        }
        let sequence = self.sequences.get(&slot);
        let sequence = sequence.ok_or_else(|| refuse("the slot has no sequence"))?.clone();
        let (mut hidden, mut token) = (sequence.hidden.clone(), newest);
        let held = sequence.held;
        if hidden.is_empty() || held.slots == 0 {
            return Err(refuse("the programs give no hidden state to start from"));
        }
        // Nothing is written, so that every row of a larger program can be the same.
        let seats: Vec<Seat<'_>> = (0..batch)
            .map(|_| Seat {
                slot,
                sequence: &sequence,
                cache_position: held.slots - 1,
                position: held.positions,
            })
            .collect();
        let seating = self.seating(&seats)?;
        let mut out = Vec::new();
        for _ in 0..count {
            let embedding = self.embedding(token)?;
            let mut inputs = seating.clone();
            let id = i64::try_from(token).map_err(fault)?;
            inputs.push(("input_ids", Value::ints([batch, 1], vec![id; batch])?));
            let width = embedding.len();
            inputs.push((
                "inputs_embeds",
                Value::floats([batch, 1, width], embedding.repeat(batch))?,
            ));
            let width = hidden.len();
            inputs.push(("hidden_states", Value::floats([batch, 1, width], hidden.repeat(batch))?));
            let outcome = self.executor.run(&name, &inputs, &View::default())?;
            let first = |name: &str| -> Result<Vec<f32>> {
                let rows = row_list(outcome.output(name)?)?;
                rows.into_iter().next().ok_or_else(|| fault(format!("{name} has no rows")))
            };
            let logits = first("logits")?;
            hidden = first("hidden")?;
            token = greedy(&logits);
            out.push(Proposal { token, logits, hidden: hidden.clone() });
        }
        Ok(out)
    }

    /// As [`Engine::generate`], with proposals of the draft head: the same text.
    ///
    /// # Errors
    /// As [`Engine::generate`] and [`Engine::propose`].
    pub fn generate_drafted(
        &mut self,
        slot: usize,
        tokens: &[u64],
        images: &[Image],
        count: usize,
        stop: &[u64],
        drafting: Drafting,
    ) -> Result<Drafted> {
        let mut out = Drafted::default();
        if count == 0 {
            return Ok(out);
        }
        let logits = self.prefill(slot, tokens, images)?;
        let mut newest = greedy(&logits);
        out.tokens.push(newest);
        while out.tokens.len() < count && !stop.contains(&newest) {
            // The newest token itself is verified with the proposals: one less than what is missing is of use.
            let missing = (count - out.tokens.len()) as u64;
            let proposals = self.propose(slot, newest, drafting.tokens.min(missing - 1))?;
            let proposed: Vec<u64> = proposals.iter().map(|p| p.token).collect();
            let said = self.verify(slot, newest, &proposed, stop, drafting.verify)?;
            out.proposed += proposed.len() as u64;
            out.accepted += (said.len() as u64).saturating_sub(1);
            newest = said.last().copied().ok_or_else(|| fault("a step without a token"))?;
            out.tokens.extend(said);
        }
        Ok(out)
    }

    /// The target's tokens after `newest`, which the sequence of the slot does not hold yet: as long as they are the
    /// proposed ones, and the first that is not (or follows them all). The sequence then holds all of them but the last.
    ///
    /// # Errors
    /// As [`Engine::decode`] and [`Engine::extend`].
    pub fn verify(
        &mut self,
        slot: usize,
        newest: u64,
        proposed: &[u64],
        stop: &[u64],
        verify: Verify,
    ) -> Result<Vec<u64>> {
        match verify {
            Verify::Chunk if self.has_room(slot, newest, proposed) => {
                self.verify_chunk(slot, newest, proposed, stop)
            }
            _ => self.verify_steps(slot, newest, proposed, stop),
        }
    }

    fn verify_steps(
        &mut self,
        slot: usize,
        newest: u64,
        proposed: &[u64],
        stop: &[u64],
    ) -> Result<Vec<u64>> {
        let mut said = Vec::new();
        let mut feed = newest;
        loop {
            let rows = self.decode(&[(slot, feed)])?;
            let token = greedy(rows.first().ok_or_else(|| fault("a step without logits"))?);
            said.push(token);
            if proposed.get(said.len() - 1) != Some(&token) || stop.contains(&token) {
                return Ok(said);
            }
            feed = token;
        }
    }

    /// Whether a chunk of `newest` and the proposals, all text, fits where the sequence ends, without new padding.
    fn has_room(&self, slot: usize, newest: u64, proposed: &[u64]) -> bool {
        let held = self.sequences.get(&slot).map(|s| s.held).unwrap_or_default();
        let request = Request { held, tokens: proposed.len() as u64 + 1, images: Vec::new() };
        let placeholders = self.placeholders();
        let text = !proposed.iter().chain([&newest]).any(|t| placeholders.contains(t));
        let plan = plan_request(&self.sizes, &request);
        text && plan.is_ok_and(|plan| plan.padding == 0 && plan.chunks.len() == 1)
    }

    /// In one call. Rejected tokens stay in the cache behind the sequence's end, where the
    /// next call overwrites them; in rings they have replaced keys that are out of sight.
    fn verify_chunk(
        &mut self,
        slot: usize,
        newest: u64,
        proposed: &[u64],
        stop: &[u64],
    ) -> Result<Vec<u64>> {
        let before = self.sequences.get(&slot).map(|s| s.held).unwrap_or_default();
        let mut tokens = vec![newest];
        tokens.extend(proposed);
        let view = View { all_rows: true, layers: false };
        let rows = self.extend(slot, &tokens, &[], &view)?;
        let columns = rows.logits.len() / tokens.len();
        let mut said = Vec::new();
        for (row, next) in rows.logits.chunks_exact(columns.max(1)).zip(1..) {
            let token = greedy(row);
            said.push(token);
            if tokens.get(next) != Some(&token) || stop.contains(&token) {
                break;
            }
        }
        let (kept, all) = (said.len() as u64, tokens.len() as u64);
        let width = rows.hidden.len() / tokens.len();
        if let Some(sequence) = self.sequences.get_mut(&slot) {
            sequence.held.positions = before.positions + kept;
            sequence.held.slots = before.slots + kept;
            sequence.mark(before.slots + kept, all - kept, 0.0);
            let last = (said.len() - 1) * width;
            sequence.hidden = rows.hidden.get(last..last + width).unwrap_or_default().to_vec();
        }
        Ok(said)
    }
}

fn refuse(message: &str) -> Failure {
    let problem = Diagnostic::new("runtime", message);
    Failure::one(FailureKind::Refused, "no tokens can be proposed", problem)
}
