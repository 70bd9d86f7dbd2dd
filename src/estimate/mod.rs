//! How many blocks of KV cache fit, and why: the memory of a device as a sum whose every term has a name.
//!
//! ```text
//! Placement + Programs + Sizes ─┐
//!                               ├─ MemoryModel ─ estimate ─ Estimate
//! Weights of an artifact ───────┘       (policy of the target's engine)
//! ```
//!
//! | file | what |
//! |---|---|
//! | `load` | what every device holds |
//! | `budget` | how much of its memory may be used |
//! | `paged` | the search for the largest number of blocks |
//! | `rbln`, `radiance`, `vllm`, `exact` | one policy each: what an engine takes before and beside the blocks |
//! | `layers` | which layer keeps what |
//! | `terms` | a device's sum while it grows |
//! | `answer` | what follows from a number of blocks, whatever the policy |
//! | `sum` | the answer |
//! | `chart` | the answer as a picture |

mod answer;
mod budget;
mod chart;
mod exact;
mod layers;
mod load;
mod paged;
mod radiance;
mod rbln;
mod sum;
mod terms;
mod vllm;

pub use budget::{parse as parse_budget, resolve as resolve_budget};
pub use chart::svg;
pub use layers::{LayerRow, TokenBytes, layers, token_bytes};
pub use load::{Held, MemoryModel, Part, ProgramLoad, is_paged};
pub use paged::{Tensor, most, need};
pub use radiance::{Carved, Group, Window, carve, ceiling, groups};
pub use sum::{Allowance, Capacity, Concurrency, DeviceSum, Estimate, Term, WithEncoder};
pub use vllm::{LayerPages, UniformPages, uniform_pages};

use crate::diag::{Diagnostic, Result, count, size};
use crate::graph::KvLayout;
use crate::recipe::{Allocator, MemoryBudget, Profile};

use answer::Blocks;

const AREA: &str = "estimate";

/// What an estimate can be told.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Options {
    /// How much of a device's memory may be used; else what the recipe or the target says.
    pub budget: Option<MemoryBudget>,
    /// The policy; else the target's.
    pub allocator: Option<Allocator>,
    /// The policy's allowance in bytes: a program's workspace on `rbln`, all that the engine needs on a device
    /// elsewhere; else the target's.
    pub workspace: Option<u64>,
}

/// How many blocks fit on devices of that target.
///
/// A model that does not fit is an answer too: [`Estimate::misfits`] says what is missing and what would work.
///
/// # Errors
/// A budget beyond the device's memory.
pub fn estimate(model: &MemoryModel, target: &Profile, options: Options) -> Result<Estimate> {
    match options.allocator.unwrap_or(target.allocator) {
        Allocator::Rbln => rbln::estimate(model, target, options),
        Allocator::Radiance => radiance::estimate(model, target, options),
        Allocator::Vllm => vllm::estimate(model, target, options),
        Allocator::Exact => exact::estimate(model, target, options),
    }
}

/// A budget in words.
fn said(budget: Option<MemoryBudget>) -> Option<String> {
    budget.map(|b| match b {
        MemoryBudget::Fraction(f) => format!("{f}"),
        MemoryBudget::Bytes(bytes) => size(bytes),
    })
}

/// `10 layers × K,V × 16,384 tokens × f16`, or the same of the layers with a window.
fn cache_words(model: &MemoryModel, paged: bool) -> String {
    let sizes = &model.sizes;
    let (full, ring) = model.cached_layers();
    let dtype = sizes.kv_dtype.name();
    if paged {
        return format!("{full} layers × K,V × {} tokens × {dtype}", count(sizes.block));
    }
    let tokens = model.kv.iter().filter_map(|t| match t.layout {
        KvLayout::Window { tokens, .. } => Some(tokens),
        KvLayout::Paged { .. } => None,
    });
    let tokens = tokens.max().unwrap_or(0);
    format!("{} slots × {ring} layers × K,V × {} tokens × {dtype}", sizes.batch_size, count(tokens))
}

/// What the weights of a device are, in words.
fn weight_words(model: &MemoryModel, device: u32) -> String {
    let of = |part: Part| {
        let here = |w: &&Held| w.part == part && w.on.iter().any(|(d, _)| *d == device);
        model.weights.iter().filter(here).count() as u64
    };
    let lookup: u64 = model.weight_bytes(Part::Lookup, device);
    let mut words = format!("{} of the decoder", count(of(Part::Decoder)));
    if lookup > 0 {
        words.push_str(&format!("; embedding rows stay with the host ({})", size(lookup)));
    }
    words
}

/// Too few blocks: the two numbers, and what would work.
fn too_few(model: &MemoryModel, found: &Blocks, missing: u128, room: Room) -> Diagnostic {
    let sizes = &model.sizes;
    let mut out = Diagnostic::new(
        AREA,
        format!(
            "{} cache blocks fit, {} are needed for a sequence of {} tokens and a batch of {}: device {} lacks {}",
            count(found.blocks),
            count(found.min),
            count(sizes.max_seq_len),
            count(sizes.batch_size),
            room.device,
            size(u64::try_from(missing).unwrap_or(u64::MAX)),
        ),
    );
    // As Sizes::min_blocks counts: one more than the longest sequence's, or than the batch.
    let spare = found.blocks.saturating_sub(1);
    let least_length = found.tokens.saturating_mul(2);
    if spare >= sizes.batch_size && spare.saturating_mul(found.tokens) >= least_length {
        let length = spare.saturating_mul(found.tokens);
        out = out.help(format!("--max-seq-len {length} fits"));
    }
    let wanted = u128::from(room.budget) + missing;
    match u64::try_from(wanted) {
        Ok(wanted) if wanted <= room.usable => {
            out = out.help(format!("--memory-budget {wanted} (of {}) fits", room.usable));
        }
        _ => out = out.help("more devices, or weights in fewer bits, leave more room"),
    }
    if sizes.kv_dtype.bits() == 16 && model.block_bytes() > 0 {
        out = out.help("--kv-dtype fp8 halves a block, where the target has it");
    }
    out
}

/// Where it is tight.
struct Room {
    device: u32,
    budget: u64,
    usable: u64,
}
