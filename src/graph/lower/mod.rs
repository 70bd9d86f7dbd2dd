//! From a model to its programs. What families share is here once: their differences are data in [`ModelSpec`]
//! (norms, rotations, windows, where values come from, experts), so a new family of decoders needs no file of its own.

mod attention;
mod decoder;
mod draft;
mod feed_forward;
mod vision;

use std::collections::BTreeMap;

use super::build::Builder;
use super::fuse::fuse;
use super::ir::{
    KvId, KvLayout, KvPair, KvTensor, Op, Program, ProgramKind, Programs, Projection, ValueId,
    WeightId, WeightRef, WeightShare,
};
use super::prune::prune;
use super::sizes::Sizes;
use super::verify::verify;
use crate::diag::{Diagnostic, Failure, FailureKind, Problems, Result};
use crate::model::{
    AttentionKind, Class, ImageAttention, KvSource, ModelSpec, TextSpec, WeightTable,
};
use crate::partition::{Cut, Placement};
use crate::recipe::{Activations, Assignment, Fate, Recipe};

/// A stored weight as a device of a program's group sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// Name, local shape and share.
    pub weight: WeightRef,
    /// How activations enter its product.
    pub activations: Option<Activations>,
}

/// The weights of an artifact, as the devices of a group see them.
#[derive(Debug, Clone, Default)]
pub struct Shards {
    by_name: BTreeMap<String, Shard>,
    devices: u32,
    vision_devices: u32,
}

impl Shards {
    /// The weights that a recipe stores, as a partition places them.
    pub fn new(
        recipe: &Recipe,
        table: &WeightTable,
        assignment: &Assignment,
        placement: &Placement,
    ) -> Shards {
        let mut by_name = BTreeMap::new();
        for assigned in &assignment.weights {
            let index = match assigned.fate {
                Fate::Stored => assigned.weight,
                Fate::Repeats(index) => index,
                Fate::LeftOut => continue,
            };
            let names = (table.weights.get(assigned.weight), table.weights.get(index));
            let (Some(weight), Some(entry)) = names else { continue };
            let Some(placed) = placement.weight(&entry.name) else { continue };
            let share = match &placed.cut {
                Cut::Rows(_) => WeightShare::Rows,
                Cut::Cols(_) => WeightShare::Cols,
                Cut::Whole { .. } if entry.class == Class::Expert && placement.devices > 1 => {
                    WeightShare::Expert
                }
                Cut::Whole { .. } => WeightShare::Whole,
            };
            let rule = assigned.rule.and_then(|rule| recipe.rules.get(rule));
            let shard = Shard {
                weight: WeightRef { name: entry.name.clone(), shape: placed.local_shape(), share },
                activations: rule.and_then(|rule| rule.activations),
            };
            by_name.insert(weight.name.clone(), shard);
        }
        Shards {
            by_name,
            devices: placement.devices.max(1),
            vision_devices: u32::try_from(placement.vision_devices.len()).unwrap_or(1).max(1),
        }
    }

    /// Weights by logical name, all of them whole on one device.
    pub fn whole(weights: impl IntoIterator<Item = (String, Shard)>) -> Shards {
        Shards { by_name: weights.into_iter().collect(), devices: 1, vision_devices: 1 }
    }

    /// The weight of that logical name; a tied one is the entry that serves it. `None` when the artifact has none.
    pub fn get(&self, name: &str) -> Option<&Shard> {
        self.by_name.get(name)
    }
}

/// Compiles a model, with its draft head if there is one.
///
/// # Errors
/// What the compiler cannot lower ([`FailureKind::Refused`]), and faults of its own ([`FailureKind::Failed`]).
pub fn compile(
    spec: &ModelSpec,
    draft: Option<&ModelSpec>,
    sizes: &Sizes,
    shards: &Shards,
) -> Result<Programs> {
    let kv = cache(&spec.text, sizes, shards);
    let mut names: Vec<(String, ProgramKind)> = Vec::new();
    let chunk = sizes.prefill_chunk;
    names.push(("prefill".to_owned(), ProgramKind::Prefill { chunk }));
    for &chunk in &sizes.image_prefill {
        names.push((format!("image_prefill_{chunk}"), ProgramKind::ImagePrefill { chunk }));
    }
    for &batch in &sizes.decoder_batch_sizes {
        names.push((format!("decode_b{batch}"), ProgramKind::Decode { batch }));
    }
    if draft.is_some() {
        for &batch in &sizes.decoder_batch_sizes {
            names.push((format!("draft_b{batch}"), ProgramKind::Draft { batch }));
        }
    }
    if spec.vision.is_some() {
        for &soft_tokens in &sizes.soft_tokens {
            names.push((format!("vision_t{soft_tokens}"), ProgramKind::Vision { soft_tokens }));
        }
        for &soft_tokens in &sizes.soft_tokens {
            names.push((format!("project_t{soft_tokens}"), ProgramKind::Project { soft_tokens }));
        }
    }
    let mut programs = Programs { kv, programs: Vec::new() };
    let mut missing: Problems = Problems::new();
    for (name, kind) in names {
        let devices = match kind {
            ProgramKind::Vision { .. } | ProgramKind::Project { .. } => shards.vision_devices,
            _ => shards.devices,
        };
        let b = Builder::new(name, kind, devices, sizes.float, &programs.kv);
        let mut lowering = Lowering { b, shards, sizes, missing: BTreeMap::new() };
        match kind {
            ProgramKind::Prefill { .. }
            | ProgramKind::ImagePrefill { .. }
            | ProgramKind::Decode { .. } => decoder::lower(&mut lowering, spec, kind),
            ProgramKind::Draft { batch } => {
                if let Some(head) = draft {
                    draft::lower(&mut lowering, spec, head, batch);
                }
            }
            ProgramKind::Vision { soft_tokens } => {
                vision::encoder(&mut lowering, spec, soft_tokens)
            }
            ProgramKind::Project { soft_tokens } => {
                vision::projector(&mut lowering, spec, soft_tokens);
            }
        }
        for weight in lowering.missing.keys() {
            missing.push(Diagnostic::new(
                "graph",
                format!("the programs read {weight}, which the artifact does not hold"),
            ));
        }
        if missing.is_empty() {
            let mut program = lowering.b.finish().map_err(internal)?;
            fuse(&mut program);
            prune(&mut program);
            programs.programs.push(program);
        }
    }
    missing.finish(FailureKind::Refused, "this model cannot be compiled", ())?;
    let faults = verify(&programs);
    match faults.into_vec().first() {
        Some(first) => Err(internal(first.message.clone())),
        None => Ok(programs),
    }
}

fn internal(what: String) -> Failure {
    Failure::plain(FailureKind::Failed, format!("the compiler made an unsound program: {what}"))
}

/// The cache: keys and values of every layer that stores its own.
fn cache(text: &TextSpec, sizes: &Sizes, shards: &Shards) -> Vec<KvTensor> {
    let mut out = Vec::new();
    for (n, layer) in text.layers.iter().enumerate().filter(|(_, l)| l.caches()) {
        let a = &layer.attention;
        let layout = match a.kind {
            AttentionKind::Full => KvLayout::Paged { block: sizes.block },
            AttentionKind::Sliding { window } => KvLayout::Window {
                slots: sizes.batch_size,
                tokens: sizes.ring(window).min(sizes.max_seq_len),
            },
        };
        let rows = shards
            .get(&format!("blk.{n}.attn_k.weight"))
            .and_then(|s| s.weight.shape.extents().first().copied());
        let heads = rows.unwrap_or_else(|| a.kv_width()) / a.head_dim.max(1);
        for what in ["key", "value"] {
            out.push(KvTensor {
                name: format!("kv.{n}.{what}"),
                layer: u32::try_from(n).unwrap_or(u32::MAX),
                dtype: sizes.kv_dtype,
                layout,
                heads,
                head_dim: a.head_dim,
            });
        }
    }
    out
}

/// The cache tensors of a layer: its own, those of the layer it reads, or for a draft head those of the target's last
/// caching layer of the same kind.
fn pair(target: &TextSpec, n: usize, full: bool, source: KvSource) -> Option<KvPair> {
    let owner = match source {
        KvSource::Own => n,
        KvSource::Layer(owner) => owner,
        KvSource::Target => target
            .layers
            .iter()
            .rposition(|l| l.caches() && l.attention.window().is_none() == full)?,
    };
    let before = target.layers.iter().take(owner).filter(|l| l.caches()).count();
    target.layers.get(owner).filter(|l| l.caches())?;
    let key = u32::try_from(before * 2).ok()?;
    Some(KvPair { key: KvId(key), value: KvId(key + 1) })
}

/// A program in the making, with what its operations refer to.
struct Lowering<'a> {
    b: Builder<'a>,
    shards: &'a Shards,
    sizes: &'a Sizes,
    /// Weights that were asked for in vain.
    missing: BTreeMap<String, ()>,
}

impl Lowering<'_> {
    /// A weight that may be absent.
    fn optional(&mut self, name: &str) -> Option<(WeightId, Option<Activations>)> {
        let shard = self.shards.get(name)?;
        Some((self.b.weight(shard.weight.clone()), shard.activations))
    }

    /// A weight that has to be there.
    fn weight(&mut self, name: &str) -> WeightId {
        match self.optional(name) {
            Some((id, _)) => id,
            None => {
                self.missing.insert(name.to_owned(), ());
                WeightId(0)
            }
        }
    }

    /// `x Wᵀ + b` with the bias that the model says it has.
    fn linear(&mut self, x: ValueId, name: &str, bias: bool) -> ValueId {
        let Some((weight, activations)) = self.optional(&format!("{name}.weight")) else {
            self.missing.insert(format!("{name}.weight"), ());
            return x;
        };
        let bias = bias.then(|| self.weight(&format!("{name}.bias")));
        let projections = vec![Projection { weight, bias }];
        self.b.op(Op::Linear { projections, activations }, &[x])
    }

    /// A norm with the decoder's numbers; `None` for one without weights.
    fn norm(&mut self, text: &TextSpec, x: ValueId, name: Option<&str>) -> ValueId {
        let weight = name.map(|name| self.weight(name));
        let one_plus = text.norm.one_plus && weight.is_some();
        self.b.op(Op::RmsNorm { weight, eps: text.norm.eps, one_plus }, &[x])
    }

    /// `[b, q, columns]` as `[b, q, heads, d]`.
    fn heads(&mut self, x: ValueId, d: u64) -> ValueId {
        match self.b.shape(x)[..] {
            [b, q, columns] => self.b.reshape(x, [b, q, columns / d.max(1), d]),
            _ => x,
        }
    }
}

/// Which rows of an image prefill a query of that kind of layer sees.
fn own_rows(text: &TextSpec, kind: ProgramKind, full: bool) -> super::ir::OwnRows {
    use super::ir::OwnRows;
    match (kind, text.image_attention, full) {
        (ProgramKind::ImagePrefill { .. }, ImageAttention::Everywhere, _) => OwnRows::Image,
        (ProgramKind::ImagePrefill { .. }, ImageAttention::Windowed, true) => OwnRows::Image,
        (
            ProgramKind::ImagePrefill { .. },
            ImageAttention::SlidingWindowed | ImageAttention::Windowed,
            false,
        ) => OwnRows::ImageInWindow,
        _ => OwnRows::Causal,
    }
}

/// All programs of one kind, for tests and callers that look programs up by kind.
impl Programs {
    /// The programs for which `f` holds.
    pub fn of_kind(&self, f: impl Fn(ProgramKind) -> bool) -> impl Iterator<Item = &Program> {
        self.programs.iter().filter(move |p| f(p.kind))
    }
}
