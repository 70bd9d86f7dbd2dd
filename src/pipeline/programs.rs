//! The compiled programs of a plan, their sections in an artifact, and the check that an artifact's programs go with its
//! weights.

use std::collections::BTreeMap;

use crate::artifact::codec;
use crate::artifact::manifest::{self, Manifest};
use crate::artifact::{Artifact, Weights, layout as names};
use crate::diag::{Diagnostic, Problems, Result};
use crate::graph::{self, KvLayout, ProgramKind, Programs, Shards, Sizes, WeightRef, WeightShare};
use crate::model::{ModelSpec, Tower, WeightTable};
use crate::partition::Placement;
use crate::recipe::{Assignment, Profile, Recipe};
use crate::runtime;
use crate::tensor::{Axis, DType, Shape};

/// What a model was compiled to.
#[derive(Debug, Clone, PartialEq)]
pub struct Compiled {
    /// The target that it was compiled for.
    pub profile: Option<Profile>,
    /// The sizes.
    pub sizes: Sizes,
    /// The programs.
    pub programs: Programs,
    /// Their sections: entry names and bytes.
    pub(super) sections: Vec<(String, Vec<u8>)>,
}

/// What a compilation reads.
pub(super) struct Input<'a> {
    pub recipe: &'a Recipe,
    pub spec: &'a ModelSpec,
    pub draft: Option<&'a ModelSpec>,
    pub table: &'a WeightTable,
    pub assignment: &'a Assignment,
    pub placement: &'a Placement,
}

/// The model as the artifact holds it: without the towers that the recipe leaves out, and without sound, which no
/// program takes.
fn held(spec: &ModelSpec, recipe: &Recipe) -> ModelSpec {
    let mut held = spec.clone();
    if !recipe.towers.holds(Tower::Vision) || !recipe.towers.holds(Tower::Projector) {
        held.vision = None;
    }
    held.audio = None;
    held
}

/// Compiles a plan's model; nothing for a draft head that is converted without its target.
///
/// # Errors
/// An encoding that the target does not run, sizes that do not go together, weights that programs need and the recipe
/// leaves out.
pub(super) fn compile(input: &Input<'_>) -> Result<(Option<Compiled>, Vec<Diagnostic>)> {
    if input.spec.draft.is_some() {
        return Ok((None, Vec::new()));
    }
    let (mut compiled, warnings) = compile_only(input)?;
    compiled.sections = sections(&compiled.programs);
    Ok((Some(compiled), warnings))
}

/// As [`compile`], of a model that is no draft head, without sections: for callers that write nothing.
///
/// # Errors
/// As [`compile`].
pub(super) fn compile_only(input: &Input<'_>) -> Result<(Compiled, Vec<Diagnostic>)> {
    let profile = input.recipe.target.profile.as_deref().map(Profile::find).transpose()?;
    if let Some(profile) = &profile {
        let misfits = profile.misfits(input.recipe, input.table, input.assignment);
        misfits.finish(
            crate::diag::FailureKind::Refused,
            "the target does not run this recipe",
            (),
        )?;
    }
    let spec = held(input.spec, input.recipe);
    let draft = input.draft.filter(|_| input.recipe.towers.holds(Tower::Draft));
    let dtype = input.table.get("token_embd.weight").map_or(DType::BF16, |w| w.dtype);
    let sized = graph::derive(&spec, draft.is_some(), input.recipe, profile.as_ref(), dtype)?;
    let shards = Shards::new(input.recipe, input.table, input.assignment, input.placement);
    let programs = graph::compile(&spec, draft, &sized.sizes, &shards)?;
    let compiled = Compiled { profile, sizes: sized.sizes, programs, sections: Vec::new() };
    Ok((compiled, sized.warnings))
}

/// The entries that hold programs.
fn sections(programs: &Programs) -> Vec<(String, Vec<u8>)> {
    let (index, programs) = graph::to_wire(programs);
    let mut out = vec![(names::GRAPHS_ENTRY.to_owned(), codec::encode(&index))];
    for (name, program) in index.programs.iter().zip(&programs) {
        out.push((format!("{}{name}", names::GRAPH_PREFIX), codec::encode(program)));
    }
    out
}

/// What the manifest says of the programs.
pub(super) fn summary(
    compiled: &Compiled,
    spec: Option<&ModelSpec>,
    placement: &Placement,
) -> manifest::GraphSummary {
    let sizes = &compiled.sizes;
    let text = |kind: ProgramKind| match kind {
        ProgramKind::Prefill { chunk } => ("prefill", chunk),
        ProgramKind::ImagePrefill { chunk } => ("image_prefill", chunk),
        ProgramKind::Decode { batch } => ("decode", batch),
        ProgramKind::Draft { batch } => ("draft", batch),
        ProgramKind::Vision { soft_tokens } => ("vision", soft_tokens),
        ProgramKind::Project { soft_tokens } => ("project", soft_tokens),
    };
    let programs = compiled.programs.programs.iter().map(|p| {
        let (kind, size) = text(p.kind);
        let arena = graph::arena(p);
        manifest::ProgramSummary {
            name: p.name.clone(),
            kind: kind.to_owned(),
            size,
            devices: p.devices,
            operations: p.nodes.len() as u64,
            arena_bytes: arena.as_ref().map_or(0, |a| a.bytes),
            input_bytes: arena.as_ref().map_or(0, |a| a.input_bytes),
        }
    });
    let programs: Vec<manifest::ProgramSummary> = programs.collect();
    let mut block_bytes = 0u64;
    let mut window_bytes = 0u64;
    for tensor in &compiled.programs.kv {
        let bytes = tensor.unit_bytes().unwrap_or(0);
        match tensor.layout {
            KvLayout::Paged { .. } => block_bytes = block_bytes.saturating_add(bytes),
            KvLayout::Window { .. } => window_bytes = window_bytes.saturating_add(bytes),
        }
    }
    let takes_images =
        compiled.programs.of_kind(|k| matches!(k, ProgramKind::Vision { .. })).next();
    let mut takes = vec!["text".to_owned()];
    if takes_images.is_some() {
        takes.push("image".to_owned());
        // Frames of a video are images between other tokens.
        if spec.is_none_or(|spec| spec.tokens.video.is_some()) {
            takes.push("video".to_owned());
        }
    }
    let mut refuses = BTreeMap::new();
    if let Some(spec) = spec {
        if spec.audio.is_some() {
            let why = "no program encodes sound; the encoder's weights are stored, on no device, unless towers.audio = false";
            refuses.insert("audio".to_owned(), why.to_owned());
        }
        if spec.vision.is_some() && takes_images.is_none() {
            let why = "the recipe leaves the image encoder out";
            refuses.insert("image".to_owned(), why.to_owned());
        }
    }
    manifest::GraphSummary {
        refuses,
        target: compiled.profile.as_ref().map(|p| p.name.clone()),
        takes,
        max_seq_len: sizes.max_seq_len,
        batch_size: sizes.batch_size,
        decoder_batch_sizes: sizes.decoder_batch_sizes.clone(),
        prefill_chunk_size: sizes.prefill_chunk,
        image_prefill_chunk_size: sizes.image_prefill.clone(),
        max_soft_tokens: sizes.soft_tokens.clone(),
        kv: manifest::KvSummary {
            dtype: sizes.kv_dtype.name().to_owned(),
            block_tokens: sizes.block,
            block_bytes,
            window_bytes,
            full_blocks: sizes.full_blocks(),
            min_blocks: sizes.min_blocks(),
            blocks: None,
            aligned: sizes.aligned,
            draft_tokens: sizes.draft_tokens,
        },
        activations: sizes.float.name().to_owned(),
        host_embeddings: sizes.embeds,
        vision_devices: placement.vision_devices.clone(),
        programs,
    }
}

const AREA: &str = "graph";

/// Every fault of an artifact's programs: their sections, their meaning, the weights they read, and what the manifest
/// says of them. Empty for an artifact without programs.
pub fn check(artifact: &Artifact, manifest: Option<&Manifest>) -> Problems {
    let mut problems = Problems::new();
    let programs = match runtime::read_programs(artifact) {
        Ok(Some(programs)) => programs,
        Ok(None) => {
            if manifest.is_some_and(|m| m.graphs.is_some()) {
                let what = "the manifest tells of programs, the file holds none";
                problems.push(Diagnostic::new(AREA, what));
            }
            return problems;
        }
        Err(why) => {
            problems.push(Diagnostic::new(AREA, why.to_string()));
            return problems;
        }
    };
    problems.extend(graph::verify(&programs).into_vec());
    let mut say = |what: String| problems.push(Diagnostic::new(AREA, what));
    match Weights::open(artifact) {
        Ok(weights) => {
            let mut seen: BTreeMap<&str, &WeightRef> = BTreeMap::new();
            for (program, weight) in
                programs.programs.iter().flat_map(|p| p.weights.iter().map(move |w| (p, w)))
            {
                match seen.insert(&weight.name, weight) {
                    Some(before) if before != weight => say(format!(
                        "{}: {} has shape {} here and {} in another program",
                        program.name, weight.name, weight.shape, before.shape
                    )),
                    Some(_) => {}
                    None => {
                        if let Some(fault) = weight_fault(weight, &weights) {
                            say(format!("{}: {fault}", program.name));
                        }
                    }
                }
            }
        }
        Err(why) => say(format!("the weights cannot be put together: {why}")),
    }
    if let Some(manifest) = manifest {
        match &manifest.graphs {
            None => say("the file holds programs, the manifest tells of none".to_owned()),
            Some(summary) => {
                let said: Vec<&str> = summary.programs.iter().map(|p| p.name.as_str()).collect();
                let held: Vec<&str> = programs.programs.iter().map(|p| p.name.as_str()).collect();
                if said != held {
                    say(format!("the manifest tells of {said:?}, the file holds {held:?}"));
                }
                for (p, held) in summary.programs.iter().zip(&programs.programs) {
                    let bytes = graph::arena(held).map_or(0, |a| a.bytes);
                    if p.arena_bytes != bytes || p.devices != held.devices {
                        say(format!(
                            "{}: the manifest says {} bytes on {} devices, the program needs {bytes} on {}",
                            p.name, p.arena_bytes, p.devices, held.devices
                        ));
                    }
                }
                let kv = &summary.kv;
                if let Some(n) = kv.blocks.filter(|n| *n < kv.min_blocks || *n > kv.full_blocks) {
                    say(format!(
                        "the manifest sets {n} cache blocks, the programs work with {} to {}",
                        kv.min_blocks, kv.full_blocks
                    ));
                }
                for tensor in &programs.kv {
                    let fits = match tensor.layout {
                        KvLayout::Paged { block } => block == summary.kv.block_tokens,
                        KvLayout::Window { slots, .. } => slots == summary.batch_size,
                    };
                    if !fits || tensor.dtype.name() != summary.kv.dtype {
                        say(format!(
                            "{} is {} {:?}, the manifest says blocks of {} tokens, {} sequences, {}",
                            tensor.name,
                            tensor.dtype,
                            tensor.layout,
                            summary.kv.block_tokens,
                            summary.batch_size,
                            summary.kv.dtype
                        ));
                    }
                }
            }
        }
    }
    problems
}

/// Why a program cannot read a weight as it says.
fn weight_fault(weight: &WeightRef, weights: &Weights<'_>) -> Option<String> {
    let Some(stored) = weights.get(&weight.name) else {
        return Some(format!("it reads {}, which is not in the file", weight.name));
    };
    let row = weights.partition().and_then(|p| p.weights.iter().find(|r| r.name == weight.name));
    let axis = row.and_then(|row| row.axis());
    let expected = match axis {
        None => WeightShare::Whole,
        Some(Axis::Rows) => WeightShare::Rows,
        Some(Axis::Cols) => WeightShare::Cols,
    };
    let expert = weight.share == WeightShare::Expert && axis.is_none();
    if weight.share != expected && !expert {
        return Some(format!(
            "{} is {expected:?} in the file, {:?} here",
            weight.name, weight.share
        ));
    }
    let local: Shape = match row.and_then(|row| row.local_shape()) {
        Some(shape) => shape,
        None => stored.shape().clone(),
    };
    (local != weight.shape)
        .then(|| format!("{} has shape {local} on a device, {} here", weight.name, weight.shape))
}
