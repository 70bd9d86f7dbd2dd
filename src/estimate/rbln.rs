//! optimum-rbln 0.11.2: every program is compiled with one block; what was allocated beside the cache is taken off the
//! budget, device by device and chiplet by chiplet, and the largest number of blocks that fits everywhere is searched.
//!
//! Its estimator reads what the compiler allocated. Here weights are known to the byte and the compiler's own
//! allocations (commands, activations, inputs) are an allowance for each program. The image encoder is a program of its
//! own that 0.11.2 does not count, although it shares devices; the answer with it is given beside.

use super::paged::{self, need, tensors};
use super::{
    Allowance, Blocks, Capacity, Estimate, MemoryModel, Options, Part, Room, WithEncoder,
    cache_words, device_sum, resolve_budget, said, term, tightest, too_few, weight_words,
};
use crate::diag::{Diagnostic, Result, size};
use crate::recipe::Profile;

pub(super) fn estimate(
    model: &MemoryModel,
    target: &Profile,
    options: Options,
) -> Result<Estimate> {
    let sizes = &model.sizes;
    let memory = &target.memory;
    let chiplets = memory.chiplets.max(1);
    // A chiplet has an equal part of the memory and of the reserve.
    let usable = (memory.device / chiplets).saturating_sub(memory.reserve / chiplets);
    let total = usable.saturating_mul(chiplets);
    let budget = resolve_budget(options.budget, total)? / chiplets;
    let workspace = options.workspace.unwrap_or(target.allowances.per_program);
    let tensors = tensors(model, chiplets);
    let rounding = memory.rounding;
    let window = u64::try_from(need(&tensors, 0, rounding)).unwrap_or(u64::MAX);
    let programs = |device: u32| {
        let on = |part| model.programs_on(part, device).count() as u64;
        on(Part::Decoder) + on(Part::Draft)
    };
    let part = |part, device| model.weight_bytes(part, device).div_ceil(chiplets);
    let sum = |device: u32, workspace: u64| {
        let n = programs(device);
        let mut terms =
            vec![term("weights", part(Part::Decoder, device), weight_words(model, device))];
        let draft = part(Part::Draft, device);
        if draft > 0 {
            terms.push(term("draft head", draft, "its weights"));
        }
        if window > 0 {
            terms.push(term("window KV", window, cache_words(model, false)));
        }
        let how = format!("{n} programs × {}, assumed", size(workspace));
        terms.push(term("workspace", workspace.saturating_mul(n).div_ceil(chiplets), how));
        device_sum(device, budget, terms)
    };
    let devices: Vec<_> = (0..model.devices).map(|d| sum(d, workspace)).collect();
    let tight = tightest(&devices);
    let Some(decisive) = devices.get(tight) else {
        return Err(super::exact::no_devices());
    };
    // The rings are among the terms, rounded; what is searched is the rest.
    let resizable: Vec<_> = tensors.iter().copied().filter(|t| t.resizable).collect();
    let full = sizes.full_blocks();
    let search = |left: i64| paged::most(&resizable, rounding, i128::from(left), full);
    let found = search(decisive.left);
    let blocks = found.unwrap_or(0);
    let min = sizes.min_blocks();
    let at = |n: u64| need(&resizable, n, rounding);
    let left = u128::try_from(decisive.left).unwrap_or(0);
    let slack = left.saturating_sub(at(blocks));
    // vllm-rbln 0.11.2: its null block is a block of the cache unless the cache holds every sequence in full.
    let kept = u64::from(blocks > 0 && blocks < full);
    let counted = Blocks { blocks, kept, min, block_tokens: sizes.block };
    let mut misfits: Vec<Diagnostic> = Vec::new();
    if blocks < min {
        let wanted = i128::try_from(at(min)).unwrap_or(i128::MAX) - i128::from(decisive.left);
        let missing = u128::try_from(wanted).unwrap_or(0);
        let room = Room { device: decisive.device, budget, usable };
        misfits.push(too_few(model, &counted, missing, room));
    }
    let times = programs(decisive.device);
    let (least, most) =
        paged::same_answer(workspace, budget, |w| search(sum(decisive.device, w).left));
    let encoder = with_encoder(model, &devices, workspace, chiplets, usable - budget, &search);
    let mut notes = Vec::new();
    if chiplets > 1 {
        notes.push(format!(
            "figures are for one of {chiplets} chiplets; weights and cache are taken as spread evenly over them"
        ));
    }
    Ok(Estimate {
        allocator: "rbln",
        target: target.name.clone(),
        capacity: Capacity {
            memory: memory.device / chiplets,
            reserve: memory.reserve / chiplets,
            budget,
            said: said(options.budget),
            chiplets,
        },
        tightest: tight,
        block_tokens: sizes.block,
        block_bytes: u64::try_from(at(1)).unwrap_or(u64::MAX),
        block_how: cache_words(model, true),
        blocks,
        tokens: blocks.saturating_mul(sizes.block),
        allocatable_tokens: counted.allocatable().saturating_mul(sizes.block),
        kept_blocks: (kept > 0).then(|| "one null block".to_owned()),
        min_blocks: min,
        full_blocks: full,
        max_seq_len: sizes.max_seq_len,
        batch_size: sizes.batch_size,
        contexts: counted.contexts(model),
        batch_at_full_length: counted.batch_at_full_length(model),
        length_at_full_batch: counted.length_at_full_batch(model),
        next_block: (blocks < full).then(|| {
            let wanted = i128::try_from(at(blocks + 1)).unwrap_or(i128::MAX);
            u64::try_from(wanted - i128::from(decisive.left)).unwrap_or(u64::MAX)
        }),
        left_over: u64::try_from(slack).unwrap_or(u64::MAX),
        allowance: Some(Allowance {
            name: "workspace".to_owned(),
            bytes: workspace,
            times,
            least,
            most,
        }),
        with_encoder: encoder,
        notes,
        misfits,
        devices,
    })
}

/// The answer when the image encoder counts, on the device where that leaves least.
fn with_encoder(
    model: &MemoryModel,
    devices: &[super::DeviceSum],
    workspace: u64,
    chiplets: u64,
    outside: u64,
    search: &dyn Fn(i64) -> Option<u64>,
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
    Some(WithEncoder { device, weights, workspace: work, outside, blocks: search(left) })
}
