//! vLLM: a fraction of the device's memory less weights and what a profiling run took, in pages that all have one size.
//!
//! Layers of one kind form groups of equal length; a page holds one block of one layer, and a block of a group one page
//! for each of its layers, so any free block serves any group (vLLM's hybrid KV cache manager). Kinds with smaller pages
//! get longer blocks until their pages are equally large. A window takes the blocks that it and one step's tokens touch.
//! One block is the null block.

use std::collections::BTreeMap;

use super::answer::{Blocks, capacity, concurrency};
use super::terms::{Sums, Terms};
use super::{AREA, Allowance, Estimate, MemoryModel, Options, Part};
use super::{is_paged, paged, resolve_budget};
use crate::diag::{Diagnostic, Result, count, size};
use crate::graph::KvLayout;
use crate::recipe::{MemoryBudget, Profile};

/// What the engine needs on a device beside weights and activations: context, graphs, collectives. Nobody states it; the
/// estimate prints the range that gives the same answer.
pub const ENGINE: u64 = 1 << 30;

/// Layers of one kind, on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerPages {
    /// Layers.
    pub layers: u64,
    /// Bytes of one token in one layer, keys and values.
    pub token_bytes: u64,
    /// Positions that a query sees; `None` for all.
    pub window: Option<u64>,
}

/// Pages of one size for all layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UniformPages {
    /// Bytes of a block: one page for each layer of a group.
    pub block_bytes: u64,
    /// For every kind: its groups, tokens of its blocks, and its window.
    pub kinds: Vec<(u64, u64, Option<u64>)>,
}

impl UniformPages {
    /// Blocks that one sequence of that many tokens takes, over all groups, when a step has up to `step` tokens.
    pub fn per_sequence(&self, tokens: u64, step: u64) -> u64 {
        let of = |&(groups, block, window): &(u64, u64, Option<u64>)| {
            let blocks = match window {
                None => tokens.div_ceil(block),
                // A window may begin inside a block, hence one more.
                Some(window) => {
                    let seen = window.saturating_sub(1).saturating_add(step).min(tokens);
                    seen.div_ceil(block).saturating_add(1)
                }
            };
            groups.saturating_mul(blocks)
        };
        self.kinds.iter().map(of).fold(0, u64::saturating_add)
    }
}

/// Groups of layers whose pages are equally large; `None` where page sizes do not divide each other (vLLM then pads or
/// refuses) or there is no cache.
pub fn uniform_pages(kinds: &[LayerPages], block: u64) -> Option<UniformPages> {
    let least = kinds.iter().map(|k| k.layers).filter(|n| *n > 0).min()?;
    let most = kinds.iter().map(|k| k.layers).max()?;
    // Kinds of nearly equal length are padded to the longest instead of cut.
    let group = if most.saturating_mul(4) < least.saturating_mul(5) { most } else { least };
    let token = kinds.iter().map(|k| k.token_bytes).max().filter(|b| *b > 0)?;
    let page = token.checked_mul(block)?;
    let kind = |k: &LayerPages| {
        let times = (k.token_bytes > 0 && token.is_multiple_of(k.token_bytes))
            .then(|| token / k.token_bytes)?;
        Some((k.layers.div_ceil(group), block.checked_mul(times)?, k.window))
    };
    let kinds = kinds.iter().map(kind).collect::<Option<Vec<_>>>()?;
    Some(UniformPages { block_bytes: page.checked_mul(group)?, kinds })
}

/// The kinds of layers of a model on one device.
fn kinds(model: &MemoryModel) -> Vec<LayerPages> {
    let extra = model.sizes.ring(0);
    let mut layers: BTreeMap<u32, (u64, Option<u64>)> = BTreeMap::new();
    for t in &model.kv {
        let elements = t.heads.saturating_mul(t.head_dim);
        let bytes = elements.saturating_mul(u64::from(t.dtype.bits())).div_ceil(8);
        let window = match t.layout {
            KvLayout::Paged { .. } => None,
            KvLayout::Window { tokens, .. } => Some(tokens.saturating_sub(extra)),
        };
        let entry = layers.entry(t.layer).or_insert((0, window));
        entry.0 = entry.0.saturating_add(bytes);
    }
    let mut found: BTreeMap<(Option<u64>, u64), u64> = BTreeMap::new();
    for (bytes, window) in layers.into_values() {
        *found.entry((window, bytes)).or_default() += 1;
    }
    let kind = |((window, token_bytes), layers)| LayerPages { layers, token_bytes, window };
    found.into_iter().map(kind).collect()
}

pub(super) fn estimate(
    model: &MemoryModel,
    target: &Profile,
    options: Options,
) -> Result<Estimate> {
    let sizes = &model.sizes;
    let utilization = target.memory.utilization;
    let fraction = options.budget.unwrap_or(MemoryBudget::Fraction(utilization));
    let budget = resolve_budget(Some(fraction), target.usable())?;
    let engine = options.workspace.unwrap_or(ENGINE);
    let step = sizes.prefill_chunk;
    let pages = uniform_pages(&kinds(model), sizes.block);
    let sum = |device: u32, engine: u64| {
        let here = model.programs.iter().filter(|p| p.devices.contains(&device));
        let arena = here.map(|p| p.arena).max().unwrap_or(0);
        let how = format!("largest program of radpack, steps of {} tokens", count(step));
        Terms::of(model, device, 1)
            .decoder(true)
            .part(Part::Draft)
            .part(Part::Encoder)
            .add("activations", arena, how)
            .add("engine", engine, "context, graphs, collectives; assumed")
            .off(budget)
    };
    let sums = Sums::of(model, |device| sum(device, engine))?;
    let device = sums.decisive.device;
    let block_bytes = pages.as_ref().map_or(0, |p| p.block_bytes);
    let fit = |left: i64| u64::try_from(left).unwrap_or(0).checked_div(block_bytes);
    let blocks = fit(sums.decisive.left).unwrap_or(0);
    let per = |tokens: u64| pages.as_ref().map_or(0, |p| p.per_sequence(tokens, step));
    let each = per(sizes.max_seq_len).max(1);
    let allocatable = blocks.saturating_sub(1);
    let full = each.saturating_mul(sizes.batch_size).saturating_add(1);
    let min = each.saturating_add(1);
    // Both grow with the length, so the longest that fits is found by halving.
    let longest = |sequences: u64| {
        let (mut low, mut high) = (0, sizes.max_seq_len);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            let fits = per(middle).saturating_mul(sequences.max(1)) <= allocatable;
            if fits { low = middle } else { high = middle - 1 }
        }
        low
    };
    let mut misfits = Vec::new();
    let left = u64::try_from(sums.decisive.left).unwrap_or(0);
    if pages.is_none() {
        let rule = if model.kv.is_empty() {
            "the model has no cache"
        } else {
            "the cache pages of its layers are no multiples of each other, so no page size serves all"
        };
        misfits.push(Diagnostic::new(AREA, rule).help("--allocator exact counts each layer alone"));
    } else if blocks < min {
        let wanted = block_bytes.saturating_mul(min);
        let missing = i128::from(wanted) - i128::from(sums.decisive.left);
        let mut problem = Diagnostic::new(
            AREA,
            format!(
                "{} cache blocks fit, {} are needed for one sequence of {} tokens: device {} lacks {}",
                count(blocks),
                count(min),
                count(sizes.max_seq_len),
                device,
                size(u64::try_from(missing).unwrap_or(u64::MAX))
            ),
        );
        let fits = longest(1);
        if fits > 0 {
            problem = problem
                .help(format!("--max-seq-len {} fits", fits / sizes.block.max(1) * sizes.block));
        }
        misfits.push(problem.help("more devices, or weights in fewer bits, leave more room"));
    }
    let (least, most) = paged::same_answer(engine, budget, |w| fit(sum(device, w).left));
    let tokens_of = |n: u64| {
        u64::try_from(u128::from(n) * u128::from(sizes.max_seq_len) / u128::from(each))
            .unwrap_or(u64::MAX)
    };
    let words = pages.as_ref().map_or_else(String::new, |p| {
        let groups: u64 = p.kinds.iter().map(|k| k.0).sum();
        let tokens: Vec<String> = p.kinds.iter().map(|k| count(k.1)).collect();
        format!("pages of {groups} groups of layers, {} tokens", tokens.join(" or "))
    });
    let mut notes = vec![format!(
        "a sequence of {} tokens takes {} blocks over all groups",
        count(sizes.max_seq_len),
        count(each)
    )];
    if model.kv.iter().any(|t| !is_paged(t)) {
        notes.push(format!(
            "with a full page for every token of every layer, as without the hybrid manager, a sequence would take {}",
            size(full_pages(model))
        ));
    }
    let found = Blocks { blocks, kept: u64::from(blocks > 0), min, full, tokens: sizes.block };
    let capacity = capacity(target, 1, budget, Some(fraction));
    Ok(Estimate {
        block_bytes,
        block_how: words,
        // A block serves one group of layers, so tokens follow from what a sequence takes over all groups.
        tokens: tokens_of(blocks),
        allocatable_tokens: tokens_of(allocatable),
        contexts: blocks as f64 / each as f64,
        batch_at_full_length: (allocatable / each).min(sizes.batch_size),
        length_at_full_batch: longest(sizes.batch_size),
        concurrency: concurrency(sizes.batch_size, longest),
        next_block: Some(block_bytes.saturating_sub(left.checked_rem(block_bytes).unwrap_or(0))),
        left_over: left.checked_rem(block_bytes).unwrap_or(left),
        allowance: Some(Allowance::engine(engine, least, most)),
        notes,
        misfits,
        ..found.answer("vllm", model, target, capacity, sums)
    })
}

/// Bytes of one full-length sequence when every layer keeps every token.
fn full_pages(model: &MemoryModel) -> u64 {
    let bytes = |k: &LayerPages| k.layers.saturating_mul(k.token_bytes);
    let token = kinds(model).iter().map(bytes).fold(0u64, u64::saturating_add);
    token.saturating_mul(model.sizes.max_seq_len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hybrid_model_shares_pages_of_one_size() {
        // Gemma 4 31B on one device, bf16: 50 layers of 16 heads × 256, 10 of 4 heads × 512.
        let kinds = [
            LayerPages { layers: 10, token_bytes: 2 * 4 * 512 * 2, window: None },
            LayerPages { layers: 50, token_bytes: 2 * 16 * 256 * 2, window: Some(1024) },
        ];
        let pages = uniform_pages(&kinds, 16).expect("divides");
        assert_eq!(pages.block_bytes, 16 * 16_384 * 10);
        assert_eq!(pages.kinds, [(1, 32, None), (5, 16, Some(1024))]);
        // 8,192 blocks for all tokens, five times 193 for the window and a step of 2,048.
        assert_eq!(pages.per_sequence(262_144, 2048), 8192 + 5 * 193);
    }

    #[test]
    fn kinds_of_nearly_equal_length_are_padded_to_the_longest() {
        let kind = |layers, window| LayerPages { layers, token_bytes: 1024, window };
        let pages = uniform_pages(&[kind(13, None), kind(12, Some(64))], 16).expect("divides");
        assert_eq!((pages.block_bytes, pages.kinds.len()), (16 * 1024 * 13, 2));
        assert_eq!(pages.kinds[0].0, 1);
        let odd = LayerPages { layers: 1, token_bytes: 1000, window: None };
        assert_eq!(uniform_pages(&[odd, kind(1, None)], 16), None);
        assert_eq!(uniform_pages(&[], 16), None);
    }
}
