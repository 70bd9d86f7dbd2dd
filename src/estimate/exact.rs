//! radpack's own programs and nothing else: weights, the largest program's values and inputs, rings, blocks. Programs
//! run one after the other, so they share one arena. Tensors are rounded only where the target's buffers are.

use super::paged::{self, need, tensors};
use super::{
    AREA, Allowance, Blocks, Capacity, Estimate, MemoryModel, Options, Part, Room, cache_words,
    device_sum, resolve_budget, said, term, tightest, too_few, weight_words,
};
use crate::diag::{Diagnostic, Failure, FailureKind, Result};
use crate::recipe::Profile;

/// A model for no device.
pub(super) fn no_devices() -> Failure {
    let problem = Diagnostic::new(AREA, "the model is for no devices").help("use 1 device or more");
    Failure::one(FailureKind::Refused, "there is nothing to estimate", problem)
}

pub(super) fn estimate(
    model: &MemoryModel,
    target: &Profile,
    options: Options,
) -> Result<Estimate> {
    let sizes = &model.sizes;
    let memory = &target.memory;
    let usable = target.usable();
    let budget = resolve_budget(options.budget, usable)?;
    let rounding = memory.rounding;
    let tensors = tensors(model, 1);
    let window = u64::try_from(need(&tensors, 0, rounding)).unwrap_or(u64::MAX);
    let largest = |device: u32| {
        let here = model.programs.iter().filter(|p| p.devices.contains(&device));
        here.map(|p| (p.arena.saturating_add(p.inputs), p.name.as_str())).max().unwrap_or_default()
    };
    let sum = |device: u32, workspace: u64| {
        let mut terms = vec![term(
            "weights",
            model.weight_bytes(Part::Decoder, device),
            weight_words(model, device),
        )];
        for (part, name) in [(Part::Draft, "draft head"), (Part::Encoder, "image encoder")] {
            let bytes = model.weight_bytes(part, device);
            if bytes > 0 {
                terms.push(term(name, bytes, "its weights"));
            }
        }
        if window > 0 {
            terms.push(term("window KV", window, cache_words(model, false)));
        }
        let how = match options.workspace {
            Some(_) => "as given".to_owned(),
            None => format!("values and inputs of {}, the largest program", largest(device).1),
        };
        terms.push(term("workspace", workspace, how));
        device_sum(device, budget, terms)
    };
    let workspace = |device: u32| options.workspace.unwrap_or(largest(device).0);
    let devices: Vec<_> = (0..model.devices).map(|d| sum(d, workspace(d))).collect();
    let tight = tightest(&devices);
    let decisive = devices.get(tight).ok_or_else(no_devices)?;
    let resizable: Vec<_> = tensors.iter().copied().filter(|t| t.resizable).collect();
    let full = sizes.full_blocks();
    let search = |left: i64| paged::most(&resizable, rounding, i128::from(left), full);
    let blocks = search(decisive.left).unwrap_or(0);
    let min = sizes.min_blocks();
    let at = |n: u64| need(&resizable, n, rounding);
    let counted = Blocks { blocks, kept: 0, min, block_tokens: sizes.block };
    let lacks = |n: u64| {
        let wanted = i128::try_from(at(n)).unwrap_or(i128::MAX) - i128::from(decisive.left);
        u128::try_from(wanted).unwrap_or(0)
    };
    let mut misfits = Vec::new();
    if blocks < min {
        let room = Room { device: decisive.device, budget, usable };
        misfits.push(too_few(model, &counted, lacks(min), room));
    }
    let assumed = workspace(decisive.device);
    let (least, most) =
        paged::same_answer(assumed, budget, |w| search(sum(decisive.device, w).left));
    let left = u128::try_from(decisive.left).unwrap_or(0);
    Ok(Estimate {
        allocator: "exact",
        target: target.name.clone(),
        capacity: Capacity {
            memory: memory.device,
            reserve: memory.reserve,
            budget,
            said: said(options.budget),
            chiplets: 1,
        },
        tightest: tight,
        block_tokens: sizes.block,
        block_bytes: u64::try_from(at(1)).unwrap_or(u64::MAX),
        block_how: cache_words(model, true),
        blocks,
        tokens: blocks.saturating_mul(sizes.block),
        allocatable_tokens: counted.allocatable().saturating_mul(sizes.block),
        kept_blocks: None,
        min_blocks: min,
        full_blocks: full,
        max_seq_len: sizes.max_seq_len,
        batch_size: sizes.batch_size,
        contexts: counted.contexts(model),
        batch_at_full_length: counted.batch_at_full_length(model),
        length_at_full_batch: counted.length_at_full_batch(model),
        next_block: (blocks < full).then(|| u64::try_from(lacks(blocks + 1)).unwrap_or(u64::MAX)),
        left_over: u64::try_from(left.saturating_sub(at(blocks))).unwrap_or(u64::MAX),
        allowance: Some(Allowance {
            name: "workspace".to_owned(),
            bytes: assumed,
            times: 1,
            least,
            most,
        }),
        with_encoder: None,
        notes: Vec::new(),
        misfits,
        devices,
    })
}
