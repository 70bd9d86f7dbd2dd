//! optimum-rbln 0.11.2: every program is compiled with one block; what was allocated beside the cache is taken off the
//! budget, device by device and chiplet by chiplet, and the largest number of blocks that fits everywhere is searched.
//!
//! Its estimator reads what the compiler allocated. Here weights are known to the byte and the compiler's own
//! allocations (commands, activations, inputs) are an allowance for each program. The image encoder is a program of its
//! own that 0.11.2 does not count, although it shares devices; the answer with it is given beside.

use super::answer::{Blocks, capacity};
use super::paged::{self, Search};
use super::terms::{Sums, Terms};
use super::{Allowance, DeviceSum, Estimate, MemoryModel, Options, Part, Room, WithEncoder};
use super::{cache_words, resolve_budget, too_few};
use crate::diag::{Result, size};
use crate::recipe::Profile;

pub(super) fn estimate(
    model: &MemoryModel,
    target: &Profile,
    options: Options,
) -> Result<Estimate> {
    let memory = &target.memory;
    let chiplets = memory.chiplets.max(1);
    // A chiplet has an equal part of the memory and of the reserve.
    let usable = (memory.device / chiplets).saturating_sub(memory.reserve / chiplets);
    let budget = resolve_budget(options.budget, usable.saturating_mul(chiplets))? / chiplets;
    let workspace = options.workspace.unwrap_or(target.allowances.per_program);
    let cache = Search::of(model, chiplets, memory.rounding);
    let programs = |device: u32| {
        let on = |part| model.programs_on(part, device).count() as u64;
        on(Part::Decoder) + on(Part::Draft)
    };
    let sum = |device: u32, workspace: u64| {
        let n = programs(device);
        let how = format!("{n} programs × {}, assumed", size(workspace));
        Terms::of(model, device, chiplets)
            .decoder(false)
            .part(Part::Draft)
            .some("window KV", cache.rings, cache_words(model, false))
            .share("workspace", workspace.saturating_mul(n), how)
            .off(budget)
    };
    let sums = Sums::of(model, |device| sum(device, workspace))?;
    let (device, left) = (sums.decisive.device, sums.decisive.left);
    let found = cache.most(left).unwrap_or(0);
    let blocks = Blocks {
        blocks: found,
        // vllm-rbln 0.11.2: its null block is a block of the cache unless the cache holds every sequence in full.
        kept: u64::from(found > 0 && found < cache.full),
        min: model.sizes.min_blocks(),
        full: cache.full,
        tokens: model.sizes.block,
    };
    let mut misfits = Vec::new();
    if found < blocks.min {
        let room = Room { device, budget, usable };
        misfits.push(too_few(model, &blocks, cache.lacks(blocks.min, left), room));
    }
    let (least, most) = paged::same_answer(workspace, budget, |w| cache.most(sum(device, w).left));
    let outside = usable.saturating_sub(budget);
    let encoder = with_encoder(model, &sums.devices, workspace, chiplets, outside, &cache);
    let mut notes = Vec::new();
    if chiplets > 1 {
        notes.push(format!(
            "figures are for one of {chiplets} chiplets; weights and cache are taken as spread evenly over them"
        ));
    }
    let capacity = capacity(target, chiplets, budget, options.budget);
    Ok(Estimate {
        block_bytes: cache.bytes(1),
        block_how: cache_words(model, true),
        next_block: cache.next(found, left),
        left_over: cache.beside(found, left),
        allowance: Some(Allowance {
            name: "workspace".to_owned(),
            bytes: workspace,
            times: programs(device),
            least,
            most,
        }),
        with_encoder: encoder,
        notes,
        misfits,
        ..blocks.answer("rbln", model, target, capacity, sums)
    })
}

/// The answer when the image encoder counts, on the device where that leaves least.
fn with_encoder(
    model: &MemoryModel,
    devices: &[DeviceSum],
    workspace: u64,
    chiplets: u64,
    outside: u64,
    cache: &Search,
) -> Option<WithEncoder> {
    let with = devices.iter().map(|d| {
        let weights = model.weight_bytes(Part::Encoder, d.device).div_ceil(chiplets);
        let n = model.programs_on(Part::Encoder, d.device).count() as u64;
        let work = workspace.saturating_mul(n).div_ceil(chiplets);
        let taken = i64::try_from(weights.saturating_add(work)).unwrap_or(i64::MAX);
        (d.left.saturating_sub(taken), d.device, weights, work)
    });
    let all: Vec<_> = with.collect();
    let &(_, device, weights, work) =
        all.iter().max_by_key(|(_, d, w, work)| (w + work, std::cmp::Reverse(*d)))?;
    if weights == 0 && work == 0 {
        return None;
    }
    let left = all.iter().map(|(left, ..)| *left).min()?;
    Some(WithEncoder { device, weights, workspace: work, outside, blocks: cache.most(left) })
}
