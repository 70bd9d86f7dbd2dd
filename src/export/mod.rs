//! Artifacts as Hugging Face folders.
//!
//! | format | what the folder holds |
//! |---|---|
//! | [`Format::Safetensors`] | every weight decoded: quantized ones as bf16 or f32, the others as stored |
//! | [`Format::CompressedTensors`] | quantized weights in the layouts of compressed-tensors, with `quantization_config` |
//!
//! [`stablehlo`] writes programs instead, with the arguments of every device. All carry the artifact's side files byte for byte; `config.json` changes only where the weights do. A folder appears
//! under its name when it is complete.

mod compressed;
mod config;
mod folder;
pub mod stablehlo;
mod tensors;

use std::collections::BTreeMap;
use std::path::Path;

use crate::artifact::manifest::{Manifest, WeightRecord};
use crate::artifact::{Artifact, Weights, layout as names};
use crate::checkpoint::gguf_original_name;
use crate::diag::{Diagnostic, Failure, FailureKind, Problems, Result, list};
use crate::model::DRAFT_PREFIX;
use crate::recipe::Recipe;
use crate::tensor::DType;

use config::Groups;
use tensors::{Content, Tensor};

pub use folder::Exported;

/// A kind of folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Decoded weights.
    Safetensors,
    /// Quantized weights as compressed-tensors stores them.
    CompressedTensors,
}

/// Element type of decoded weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Decoded {
    /// Rounded to bfloat16, as checkpoints are published.
    #[default]
    Bf16,
    /// The decoded values as they are.
    F32,
}

impl Decoded {
    fn dtype(self) -> DType {
        match self {
            Decoded::Bf16 => DType::BF16,
            Decoded::F32 => DType::F32,
        }
    }
}

/// How to write.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Element type of decoded weights; [`Format::CompressedTensors`] has none.
    pub decoded: Decoded,
    /// Largest size of a shard's data in bytes; a larger tensor gets a shard of its own.
    pub shard_bytes: u64,
}

impl Default for Options {
    fn default() -> Options {
        // What transformers writes unless told otherwise.
        Options { decoded: Decoded::Bf16, shard_bytes: 5_000_000_000 }
    }
}

/// Writes the artifact as a folder `out`, which must not exist yet.
///
/// # Errors
/// An artifact without a manifest, weights that the format cannot say (all of them), an output that exists, I/O.
pub fn export(
    artifact: &Artifact,
    format: Format,
    out: &Path,
    options: Options,
) -> Result<Exported> {
    let manifest = read_manifest(artifact)?;
    let weights = Weights::open(artifact).map_err(|error| {
        let problem = Diagnostic::new("export", error.to_string());
        Failure::one(FailureKind::Invalid, "this file is not valid", problem)
    })?;
    let recipe = Recipe::from_bytes("the artifact's recipe", artifact.recipe().to_string().into())?;
    let mut plan = Plan { decoded: options.decoded, ..Plan::default() };
    let mut problems = Problems::new();
    let mut stacks: BTreeMap<&str, Vec<(u64, &WeightRecord)>> = BTreeMap::new();
    for record in &manifest.weights {
        if weights.get(&record.name).is_none() {
            // It repeats the weight that it is tied to.
            continue;
        }
        if record.from.iter().any(|part| part.tensor.starts_with(DRAFT_PREFIX)) {
            // A merged draft model is a checkpoint of its own.
            plan.draft_weights += 1;
            continue;
        }
        match record.from.as_slice() {
            [part] if part.index.is_some() => {
                let index = part.index.unwrap_or(0);
                stacks.entry(&part.tensor).or_default().push((index, record));
            }
            _ => plan.weight(&weights, &recipe, record, format),
        }
    }
    for (tensor, mut members) in stacks {
        members.sort_by_key(|(index, _)| *index);
        plan.stack(&weights, tensor, &members, format, &mut problems);
    }
    for (why, names) in &plan.refused {
        let weights = match names.as_slice() {
            [one] => one.clone(),
            many => format!("{} weights ({})", many.len(), list(many, 3)),
        };
        problems.push(
            Diagnostic::new("export", format!("{weights} of {why}"))
                .help("--format safetensors writes every weight decoded"),
        );
    }
    let headline = "this artifact cannot be exported in that format";
    problems.finish(FailureKind::Refused, headline, ())?;
    plan.tensors.sort_by(|a, b| a.name.cmp(&b.name));
    folder::write(artifact, &manifest, &plan, out, options)
}

fn read_manifest(artifact: &Artifact) -> Result<Manifest> {
    let refused = |why: String| {
        let problem = Diagnostic::new("export", why)
            .help("only files that radpack wrote know their checkpoint's names");
        Failure::one(FailureKind::Refused, "this file cannot be exported", problem)
    };
    let entry = artifact
        .find(names::MANIFEST_ENTRY)
        .ok_or_else(|| refused("the file has no manifest".to_owned()))?;
    let mut manifest =
        Manifest::parse(entry.plane(0)).map_err(|e| refused(format!("the manifest: {e}")))?;
    if manifest.source.files.iter().any(|file| file.path.ends_with(".gguf")) {
        original_names(&mut manifest);
    }
    Ok(manifest)
}

/// Gives the tensors of a GGUF file the names that they had before, which the folder's readers look for. Rows and
/// values are the original ones already.
fn original_names(manifest: &mut Manifest) {
    let model_type = &manifest.model.model_type;
    for part in manifest.weights.iter_mut().flat_map(|weight| &mut weight.from) {
        if let Some((name, single)) = gguf_original_name(model_type, &part.tensor, part.index) {
            part.tensor = name;
            if single {
                part.index = None;
                part.shape.drain(..1.min(part.shape.len()));
            }
        }
    }
}

/// The tensors of the folder and what its configuration has to say about them.
#[derive(Default)]
struct Plan<'a> {
    tensors: Vec<Tensor<'a>>,
    groups: Groups,
    /// A head that was tied is stored on its own, so the configuration must not tie it.
    untied_head: bool,
    /// Element type of decoded weights.
    decoded: Decoded,
    /// Some weight is stored in a wider type than the configuration knows of.
    widened: bool,
    /// Weights of a merged draft model, which the folder leaves out.
    draft_weights: usize,
    /// Weights whose activations the format cannot say.
    unstated: usize,
    /// Weights that the format cannot say, by reason.
    refused: BTreeMap<String, Vec<String>>,
}

impl<'a> Plan<'a> {
    /// A weight made of whole tensors, one after the other.
    fn weight(
        &mut self,
        weights: &'a Weights<'a>,
        recipe: &Recipe,
        record: &WeightRecord,
        format: Format,
    ) {
        let Some(weight) = weights.get(&record.name) else { return };
        let mut first_row = 0;
        for part in &record.from {
            let name = match &record.tied_to {
                // The checkpoint has no such tensor: transformers' class calls it so.
                Some(_) => {
                    self.untied_head = true;
                    "lm_head.weight".to_owned()
                }
                None => part.tensor.clone(),
            };
            let rows = rows_of(&part.shape);
            let content = Content { weight, first_row, rows };
            first_row += rows;
            let plain = weight.encoding().planes.len() == 1;
            if plain || format == Format::Safetensors {
                if plain && part.shape.len() == 2 {
                    self.groups.keep(&name);
                }
                self.widened |= !plain && self.decoded == Decoded::F32;
                let decoded = self.decoded.dtype();
                self.tensors.push(Tensor::values(name, part.shape.clone(), vec![content], decoded));
                continue;
            }
            let activations = record
                .rule
                .and_then(|r| recipe.rules.get(r as usize - 1))
                .and_then(|rule| rule.activations);
            match compressed::weight(&name, &part.shape, content, activations) {
                Ok(quantized) => {
                    self.tensors.extend(quantized.tensors);
                    self.groups.add(&name, quantized.scheme);
                    self.unstated += usize::from(quantized.unstated);
                }
                Err(why) => self.refused.entry(why).or_default().push(name),
            }
        }
    }

    /// Weights that are the indices of one tensor.
    fn stack(
        &mut self,
        weights: &'a Weights<'a>,
        tensor: &str,
        members: &[(u64, &WeightRecord)],
        format: Format,
        problems: &mut Problems,
    ) {
        let stored: Vec<_> = members.iter().filter_map(|(_, r)| weights.get(&r.name)).collect();
        let Some((_, first)) = members.first() else { return };
        let Some(shape) = first.from.first().map(|p| p.shape.clone()) else { return };
        let complete = shape.first() == Some(&(members.len() as u64))
            && members.iter().enumerate().all(|(i, (index, _))| i as u64 == *index);
        if !complete {
            problems.push(Diagnostic::new(
                "export",
                format!(
                    "{tensor}: {} of its {:?} indices are stored",
                    members.len(),
                    shape.first()
                ),
            ));
            return;
        }
        let quantized = stored.iter().any(|w| w.encoding().planes.len() > 1);
        if quantized && format == Format::CompressedTensors {
            problems.push(
                Diagnostic::new(
                    "export",
                    format!("{tensor} stacks {} quantized experts in one tensor", members.len()),
                )
                .help("compressed-tensors has no layout for quantized stacked experts")
                .help("--format safetensors writes them decoded"),
            );
            return;
        }
        let contents = stored
            .into_iter()
            .map(|weight| Content { weight, first_row: 0, rows: rows_of(&shape[1..]) })
            .collect();
        self.widened |= quantized && self.decoded == Decoded::F32;
        self.tensors.push(Tensor::values(tensor.to_owned(), shape, contents, self.decoded.dtype()));
    }
}

/// Rows of a shape seen as a matrix.
fn rows_of(shape: &[u64]) -> u64 {
    match shape.split_last() {
        Some((_, outer)) => outer.iter().product(),
        None => 1,
    }
}
