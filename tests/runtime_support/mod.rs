//! Tiny models, compiled and ready to run, and what transformers says about them.

#![allow(dead_code)] // each test file uses some of it

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use radpack::checkpoint::{Checkpoint, OpenOptions};
use radpack::diag::SourceText;
use radpack::graph::{self, Programs, Shards, Sizes};
use radpack::model::{self, Model, VisionSpec};
use radpack::partition::{self, Models, Placement};
use radpack::pipeline::Sources;
use radpack::recipe::{Assignment, Recipe};
use radpack::runtime::{Engine, Image, Memory, Placed, SourceWeights};
use radpack::tensor::DType;
use safetensors::SafeTensors;

/// Models that answer for themselves, without draft heads.
pub const TARGETS: [&str; 10] = [
    "tiny-gemma3",
    "tiny-gemma3-vision",
    "tiny-gemma4-dense",
    "tiny-gemma4-e",
    "tiny-gemma4-moe",
    "tiny-gemma4-unified",
    "tiny-llama",
    "tiny-mistral",
    "tiny-qwen3",
    "tiny-qwen3-moe",
];

/// Nothing is quantized.
pub const KEEP: &str = "schema = 1\n";

/// What transformers agrees with itself to, in f32 (logits have a deviation of 4).
pub const TOLERANCE: f32 = 1e-3;

/// A model opened, with its draft head if it has one.
pub struct Loaded {
    pub sources: Sources,
    pub model: Model,
    pub draft: Option<Model>,
}

fn open(name: &str) -> (Checkpoint, Model) {
    let folder = testkit::tiny_model(name);
    let checkpoint = Checkpoint::open(&folder, &OpenOptions::default())
        .unwrap_or_else(|f| panic!("{name}\n{f}"));
    let config = checkpoint.config().expect("a configuration");
    let model = model::read(&config.value, None, checkpoint.tensors())
        .unwrap_or_else(|f| panic!("{name}\n{f}"));
    (checkpoint, model)
}

/// Programs of a model for some devices.
pub struct Compiled {
    pub programs: Programs,
    pub placement: Placement,
    pub sizes: Sizes,
    pub assignment: Assignment,
}

impl Loaded {
    pub fn new(name: &str) -> Loaded {
        Loaded::with_draft(name, None)
    }

    pub fn with_draft(name: &str, draft: Option<&str>) -> Loaded {
        let (main, mut model) = open(name);
        let draft = draft.map(open);
        if let Some((_, draft)) = &draft {
            model.table.merge_draft(draft.table.clone());
        }
        let (checkpoint, draft) = draft.unzip();
        Loaded { sources: Sources { main, draft: checkpoint, imatrix: None }, model, draft }
    }

    /// Sizes that force every path: several blocks, chunks that wrap windows, two decoders, two image buckets.
    pub fn sizes(&self) -> Sizes {
        let images = self.model.spec.vision.is_some();
        let (image_prefill, soft_tokens) = match &self.model.spec.vision {
            Some(VisionSpec::Siglip(v)) => (vec![v.soft_tokens], vec![v.soft_tokens]),
            Some(_) => (vec![16, 8], vec![12, 6]),
            None => (Vec::new(), Vec::new()),
        };
        Sizes {
            max_seq_len: 160,
            batch_size: 4,
            decoder_batch_sizes: vec![4, 2, 1],
            prefill_chunk: 16,
            image_prefill,
            block: 32,
            kv_dtype: DType::F32,
            float: DType::F32,
            soft_tokens,
            embeds: images,
            aligned: images,
            draft_tokens: if self.draft.is_some() { 4 } else { 0 },
            hidden: self.draft.is_some(),
        }
    }

    /// `None` when the model does not split over these devices.
    pub fn compile(
        &self,
        recipe: &str,
        sizes: &Sizes,
        devices: u32,
        vision: &[u32],
    ) -> Option<Compiled> {
        let source = SourceText { name: "test".into(), text: recipe.into() };
        let recipe = Recipe::parse(Arc::new(source)).unwrap_or_else(|f| panic!("{f}"));
        let assignment =
            recipe.resolve(&self.model.table, "test").unwrap_or_else(|f| panic!("{f}"));
        let models =
            Models { main: Some(&self.model.spec), draft: self.draft.as_ref().map(|d| &d.spec) };
        let placement =
            partition::place(models, &self.model.table, &assignment, devices, vision).ok()?;
        let shards = Shards::new(&recipe, &self.model.table, &assignment, &placement);
        let draft = self.draft.as_ref().map(|d| &d.spec);
        let programs = graph::compile(&self.model.spec, draft, sizes, &shards)
            .unwrap_or_else(|f| panic!("{f}"));
        Some(Compiled { programs, placement, sizes: sizes.clone(), assignment })
    }

    /// The checkpoint's own values under the names of stored weights.
    pub fn weights(&self, assignment: &Assignment) -> SourceWeights<'_> {
        let mut weights = SourceWeights::new();
        for (_, weight) in assignment.stored(&self.model.table) {
            let source = self.sources.source(weight).expect("a source");
            weights.insert(weight.name.clone(), source);
        }
        weights
    }

    /// An engine over the checkpoint's own values.
    pub fn engine(&self, compiled: Compiled) -> Engine<'_> {
        let weights = self.weights(&compiled.assignment);
        let placed = Placed::new(weights, compiled.placement);
        let memory = Memory { blocks: 20, weights: 1 << 30 };
        Engine::new(compiled.programs, &compiled.sizes, &self.model.spec, placed, memory)
            .unwrap_or_else(|f| panic!("{f}"))
    }

    /// An engine over N devices with the usual sizes; `None` when the model does not split.
    pub fn on(&self, devices: u32) -> Option<Engine<'_>> {
        Some(self.engine(self.compile(KEEP, &self.sizes(), devices, &[0])?))
    }
}

/// Tensors of a reference run.
pub struct Reference {
    floats: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    ints: BTreeMap<String, Vec<i64>>,
}

impl Reference {
    pub fn of(name: &str) -> Reference {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
            .join("fixtures/models/ref")
            .join(format!("{name}.safetensors"));
        let bytes = std::fs::read(&path).expect("a reference");
        let file = SafeTensors::deserialize(&bytes).expect("safetensors");
        let (mut floats, mut ints) = (BTreeMap::new(), BTreeMap::new());
        for (name, tensor) in file.tensors() {
            let data = tensor.data();
            match tensor.dtype() {
                safetensors::Dtype::F32 => {
                    let values =
                        data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
                    floats.insert(name, (tensor.shape().to_vec(), values));
                }
                safetensors::Dtype::I64 => {
                    let values =
                        data.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
                    ints.insert(name, values);
                }
                other => panic!("{name} is {other:?}"),
            }
        }
        Reference { floats, ints }
    }

    pub fn has(&self, name: &str) -> bool {
        self.floats.contains_key(name) || self.ints.contains_key(name)
    }

    pub fn floats(&self, name: &str) -> &[f32] {
        &self.floats.get(name).unwrap_or_else(|| panic!("no {name}")).1
    }

    pub fn ints(&self, name: &str) -> &[i64] {
        self.ints.get(name).unwrap_or_else(|| panic!("no {name}"))
    }

    pub fn tokens(&self, name: &str) -> Vec<u64> {
        self.ints(name).iter().map(|n| *n as u64).collect()
    }

    /// The images of the run with images, as its processor padded them.
    pub fn images(&self) -> Vec<Image> {
        let (shape, pixels) = &self.floats["image.pixel_values"];
        let [count, patches, width] = shape[..] else { panic!("{shape:?}") };
        let at = self.ints("image.image_position_ids");
        (0..count)
            .map(|n| Image {
                pixels: pixels[n * patches * width..(n + 1) * patches * width].to_vec(),
                positions: at[n * patches * 2..(n + 1) * patches * 2]
                    .chunks_exact(2)
                    .map(|c| [c[0], c[1]])
                    .collect(),
            })
            .collect()
    }
}

/// Largest difference; infinite where lengths differ or a value is not finite.
pub fn difference(a: &[f32], b: &[f32]) -> f32 {
    if a.len() != b.len() || a.iter().any(|v| !v.is_finite()) {
        return f32::INFINITY;
    }
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}
