//! radiance: one pool, cut into pages of groups of layers that all run out at the same token.
//!
//! A group is a set of layers with one geometry. A page holds the keys and values of all its layers for a block of
//! tokens. A group with a window never needs more than `window / block + 1` pages (rounded up) for a sequence. Pages
//! start at multiples of 4096 bytes and each group takes one such unit more; so does the region of state checkpoints,
//! which is empty without recurrent layers.

use super::answer::{Blocks, capacity};
use super::paged;
use super::terms::{Sums, Terms};
use super::{AREA, Allowance, Estimate, MemoryModel, Options, Part, cache_words, resolve_budget};
use crate::diag::{Diagnostic, Result, count, size};
use crate::graph::KvLayout;
use crate::recipe::Profile;

/// Unit of places in the pool.
const ALIGN: u64 = 4096;
const MIB: u64 = 1 << 20;

/// Layers of one geometry, on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// Bytes of a page: keys and values of all layers for one block of tokens.
    pub page: u64,
    /// Set when a sequence never needs more than some pages.
    pub window: Option<Window>,
}

/// What a sequence needs of a group with a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Most pages of one sequence.
    pub blocks: u64,
}

impl Window {
    /// The pages that a window of that many tokens touches at most.
    pub fn of(tokens: u64, block: u64) -> Window {
        Window { blocks: tokens.div_ceil(block.max(1)).saturating_add(1) }
    }
}

/// What a pool was cut into.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Carved {
    /// Pages of every group, in order.
    pub blocks: Vec<u64>,
    /// Tokens that every group without a cap holds.
    pub tokens: u64,
}

/// Bytes that do not grow with tokens.
pub fn fixed(groups: &[Group], tables: u64) -> u64 {
    // One unit for the region of checkpoints, one for each group.
    (groups.len() as u64 + 1).saturating_mul(ALIGN).saturating_add(tables)
}

/// Bytes that serve `seqs` sequences of `tokens` tokens each in full.
pub fn ceiling(groups: &[Group], tables: u64, seqs: u64, tokens: u64, block: u64) -> u64 {
    let each = tokens.div_ceil(block.max(1));
    let pages = |g: &Group| {
        let per_sequence = g.window.map_or(each, |w| w.blocks.min(each));
        g.page.saturating_mul(seqs).saturating_mul(per_sequence)
    };
    groups.iter().map(pages).fold(fixed(groups, tables), u64::saturating_add)
}

/// Cuts a pool so that all groups run out at the same token; a group that would get more than its sequences can use
/// gets exactly that, and the others share what it leaves. `None` when nothing is left for a block.
pub fn carve(pool: u64, groups: &[Group], tables: u64, seqs: u64, block: u64) -> Option<Carved> {
    let mut remaining = pool.checked_sub(fixed(groups, tables)).filter(|left| *left > 0)?;
    let mut capped: Vec<Option<u64>> = vec![None; groups.len()];
    loop {
        let free = groups.iter().zip(&capped).filter(|(_, c)| c.is_none()).map(|(g, _)| g.page);
        let pages: Vec<u64> = free.collect();
        let page = pages.iter().copied().fold(0u64, u64::saturating_add);
        // The engine divides bytes by bytes a token, both as doubles; whole pages are the same in integers.
        let blocks = remaining.checked_div(page).unwrap_or(0);
        let over = groups.iter().zip(&mut capped).find_map(|(g, c)| {
            let most = seqs.saturating_mul(g.window?.blocks);
            (c.is_none() && blocks > most).then_some((g.page, c, most))
        });
        match over {
            Some((page, cap, most)) => {
                *cap = Some(most);
                remaining = remaining.checked_sub(page.saturating_mul(most))?;
            }
            None => {
                if blocks == 0 && !pages.is_empty() {
                    return None;
                }
                let blocks_of = |c: &Option<u64>| c.unwrap_or(blocks);
                let all: Vec<u64> = capped.iter().map(blocks_of).collect();
                let tokens = all.iter().copied().max().unwrap_or(0);
                let full = if page == 0 { tokens } else { blocks };
                return Some(Carved { blocks: all, tokens: full.saturating_mul(block) });
            }
        }
    }
}

/// The groups of a model on one device: layers that see everything, and layers of each window.
pub fn groups(model: &MemoryModel) -> Vec<Group> {
    let sizes = &model.sizes;
    let block = sizes.block;
    // A ring of ours has places for a draft's tokens, which a table of pages does not need.
    let extra = sizes.ring(0);
    let mut found: Vec<(Option<u64>, u64)> = Vec::new();
    for t in &model.kv {
        let window = match t.layout {
            KvLayout::Paged { .. } => None,
            KvLayout::Window { tokens, .. } => Some(tokens.saturating_sub(extra)),
        };
        let elements = block.saturating_mul(t.heads).saturating_mul(t.head_dim);
        let bytes = elements.saturating_mul(u64::from(t.dtype.bits())).div_ceil(8);
        match found.iter_mut().find(|(w, _)| *w == window) {
            Some((_, page)) => *page = page.saturating_add(bytes),
            None => found.push((window, bytes)),
        }
    }
    found.sort_unstable();
    let group = |(window, page): (Option<u64>, u64)| Group {
        page,
        window: window.map(|w| Window::of(w, block)),
    };
    found.into_iter().map(group).collect()
}

/// Bytes of the block tables: four for each block of each sequence. Found from published pool sizes, which they explain
/// to the block.
fn tables(model: &MemoryModel) -> u64 {
    model.sizes.full_blocks().saturating_mul(4)
}

pub(super) fn estimate(
    model: &MemoryModel,
    target: &Profile,
    options: Options,
) -> Result<Estimate> {
    let sizes = &model.sizes;
    // No fraction of the memory is set aside: the engine takes what is free less head room.
    let budget = resolve_budget(options.budget, target.usable())?;
    let allowances = &target.allowances;
    let engine = options.workspace.unwrap_or(allowances.fixed);
    let groups = groups(model);
    let tables = tables(model);
    let block = sizes.block;
    let ceiling = ceiling(&groups, tables, sizes.batch_size, sizes.max_seq_len, block);
    let sum = |device: u32, engine: u64| {
        let per = allowances.per_sequence;
        let how = format!("{} sequences × {}, calibrated", sizes.batch_size, size(per));
        let weights = Terms::of(model, device, 1).decoder(true).part(Part::Draft);
        let weights = match allowances.encoder_on_host {
            true => weights,
            false => weights.part(Part::Encoder),
        };
        // Weights are one allocation in whole MiB.
        weights
            .round_up(MIB)
            .add("engine", engine, "arenas, staging and graphs, calibrated")
            .add("sequences", per.saturating_mul(sizes.batch_size), how)
            .off(budget)
    };
    let sums = Sums::of(model, |device| sum(device, engine))?;
    let (device, left) = (sums.decisive.device, sums.decisive.left);
    // A pool that serves everything is rounded up to MiB, one that is all there is down.
    let pool = |left: i64| {
        let left = u64::try_from(left).unwrap_or(0) / MIB;
        left.min(ceiling.div_ceil(MIB)).saturating_mul(MIB)
    };
    let cut = |left: i64| carve(pool(left), &groups, tables, sizes.batch_size, block);
    let carved = cut(left);
    let tokens = carved.as_ref().map_or(0, |c| c.tokens);
    let full = sizes.full_blocks();
    let found = Blocks { blocks: tokens / block.max(1), kept: 0, min: 1, full, tokens: block };
    let free: u64 = groups.iter().filter(|g| g.window.is_none()).map(|g| g.page).sum();
    let mut misfits = Vec::new();
    let mut notes = Vec::new();
    let lacks = i128::from(fixed(&groups, tables)) - i128::from(left);
    if carved.is_none() {
        let missing = u64::try_from(lacks).unwrap_or(free).max(1);
        let problem = Diagnostic::new(
            AREA,
            format!(
                "no cache block fits: device {} lacks {} before the first one",
                device,
                size(missing)
            ),
        );
        misfits.push(
            problem
                .help("more devices share the weights: --devices")
                .help("a recipe with fewer bits, or without the draft head, leaves more room"),
        );
    } else if tokens < sizes.max_seq_len {
        notes.push(format!(
            "{} tokens are fewer than one sequence of {}: the engine starts with a warning",
            count(tokens),
            count(sizes.max_seq_len)
        ));
    }
    for (group, blocks) in groups.iter().zip(carved.iter().flat_map(|c| &c.blocks)) {
        if let Some(window) = group.window {
            let most = sizes.batch_size.saturating_mul(window.blocks);
            notes.push(format!(
                "layers with a window hold {} pages of {} ({}), at most {} for {} sequences",
                count(*blocks),
                size(group.page),
                size(group.page.saturating_mul(*blocks)),
                count(most),
                sizes.batch_size
            ));
        }
    }
    let (least, most) = paged::same_answer(engine, budget, |w| {
        cut(sum(device, w).left).map(|c| c.tokens / block.max(1))
    });
    let taken = carved.as_ref().map_or(0, |c| {
        let pages = groups.iter().zip(&c.blocks).map(|(g, n)| g.page.saturating_mul(*n));
        pages.fold(fixed(&groups, tables), u64::saturating_add)
    });
    let left_over = u64::try_from(left).unwrap_or(0).saturating_sub(taken);
    let capacity = capacity(target, 1, budget, options.budget);
    Ok(Estimate {
        block_bytes: free,
        block_how: cache_words(model, true),
        // A pool is cut to tokens, not to blocks: what was asked for is what the engine reports.
        tokens,
        allocatable_tokens: tokens,
        next_block: (found.blocks < full).then(|| free.saturating_sub(left_over)),
        left_over,
        allowance: Some(Allowance::engine(engine, least, most)),
        notes,
        misfits,
        ..found.answer("radiance", model, target, capacity, sums)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_run_out_at_the_same_token_and_a_window_takes_no_more_than_it_can_use() {
        let full = Group { page: 1024, window: None };
        let ring = Group { page: 2048, window: Some(Window::of(64, 16)) };
        assert_eq!(ring.window, Some(Window { blocks: 5 }));
        assert_eq!(fixed(&[full, ring], 0), 3 * 4096);
        // 1 MiB: 1,036,288 bytes are left. Two sequences use 10 pages of the ring, 20,480 bytes; 1,015,808 / 1024 pages.
        let cut = carve(1 << 20, &[full, ring], 0, 2, 16).expect("fits");
        assert_eq!(cut, Carved { blocks: vec![992, 10], tokens: 992 * 16 });
        // A pool too small for the cap is shared: 24,576 / 3072.
        let cut = carve(9 * 4096, &[full, ring], 0, 2, 16).expect("fits");
        assert_eq!(cut, Carved { blocks: vec![8, 8], tokens: 128 });
        assert_eq!(carve(3 * 4096, &[full, ring], 0, 2, 16), None);
        assert_eq!(carve(3 * 4096 + 3071, &[full, ring], 0, 2, 16), None);
    }

    #[test]
    fn a_pool_of_the_ceiling_holds_every_sequence() {
        let groups = [
            Group { page: 4096, window: None },
            Group { page: 8192, window: Some(Window::of(1024, 16)) },
        ];
        for seqs in [1, 2, 8] {
            let pool = ceiling(&groups, 0, seqs, 8192, 16);
            let cut = carve(pool, &groups, 0, seqs, 16).expect("fits");
            assert_eq!(cut.blocks, [seqs * 512, seqs * 65]);
        }
    }
}
