//! radpack's own programs and nothing else: weights, the largest program's values and inputs, rings, blocks. Programs
//! run one after the other, so they share one arena. Tensors are rounded only where the target's buffers are.

use super::answer::{Blocks, capacity};
use super::paged::{self, Search};
use super::terms::{Sums, Terms};
use super::{Allowance, Estimate, MemoryModel, Options, Part, Room};
use super::{cache_words, resolve_budget, too_few};
use crate::diag::Result;
use crate::recipe::Profile;

pub(super) fn estimate(
    model: &MemoryModel,
    target: &Profile,
    options: Options,
) -> Result<Estimate> {
    let usable = target.usable();
    let budget = resolve_budget(options.budget, usable)?;
    let cache = Search::of(model, 1, target.memory.rounding);
    let largest = |device: u32| {
        let here = model.programs.iter().filter(|p| p.devices.contains(&device));
        here.map(|p| (p.arena.saturating_add(p.inputs), p.name.as_str())).max().unwrap_or_default()
    };
    let sum = |device: u32, workspace: u64| {
        let how = match options.workspace {
            Some(_) => "as given".to_owned(),
            None => format!("values and inputs of {}, the largest program", largest(device).1),
        };
        Terms::of(model, device, 1)
            .decoder(false)
            .part(Part::Draft)
            .part(Part::Encoder)
            .some("window KV", cache.rings, cache_words(model, false))
            .add("workspace", workspace, how)
            .off(budget)
    };
    let workspace = |device: u32| options.workspace.unwrap_or(largest(device).0);
    let sums = Sums::of(model, |device| sum(device, workspace(device)))?;
    let (device, left) = (sums.decisive.device, sums.decisive.left);
    let blocks = Blocks {
        blocks: cache.most(left).unwrap_or(0),
        kept: 0,
        min: model.sizes.min_blocks(),
        full: cache.full,
        tokens: model.sizes.block,
    };
    let mut misfits = Vec::new();
    if blocks.blocks < blocks.min {
        let room = Room { device, budget, usable };
        misfits.push(too_few(model, &blocks, cache.lacks(blocks.min, left), room));
    }
    let assumed = workspace(device);
    let (least, most) = paged::same_answer(assumed, budget, |w| cache.most(sum(device, w).left));
    let capacity = capacity(target, 1, budget, options.budget);
    Ok(Estimate {
        block_bytes: cache.bytes(1),
        block_how: cache_words(model, true),
        next_block: cache.next(blocks.blocks, left),
        left_over: cache.beside(blocks.blocks, left),
        allowance: Some(Allowance {
            name: "workspace".to_owned(),
            bytes: assumed,
            times: 1,
            least,
            most,
        }),
        misfits,
        ..blocks.answer("exact", model, target, capacity, sums)
    })
}
