//! What a file holds for a run: programs, sizes, the model, and weights in pieces.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use serde_json::Value as Json;

use super::engine::Engine;
use super::executor::Memory;
use super::images::Image;
use super::pixels::Picture;
use super::value::fault;
use super::weights::LocalWeights;
use crate::artifact::codec::{self, CodecError};
use crate::artifact::manifest::{self, Manifest};
use crate::artifact::{Artifact, WeightView, Weights, digests, layout as names};
use crate::diag::{self, Diagnostic, Failure, FailureKind, Result};
use crate::graph::{ProgramKind, Programs, Sizes, WeightRef};
use crate::graph::{WireError, WireIndex, WireProgram};
use crate::model::{self, ModelSpec, VisionSpec};
use crate::quantize::{Decoder, PlaneSlice};
use crate::tensor::{Axis, DType};

/// A file opened to be run.
pub struct Opened<'a> {
    /// The file.
    pub artifact: &'a Artifact,
    /// Its manifest.
    pub manifest: Manifest,
    /// The programs.
    pub programs: Programs,
    /// The sizes that they were compiled for.
    pub sizes: Sizes,
    /// The model as the file holds it, without towers that no program reads.
    pub spec: ModelSpec,
    /// Its draft head.
    pub draft: Option<ModelSpec>,
}

/// The configuration of a draft head that was merged in.
const DRAFT_CONFIG: &str = "draft/config.json";

const HEADLINE: &str = "this file cannot be run";

fn refuse(message: String, help: &str) -> Failure {
    Failure::one(FailureKind::Refused, HEADLINE, Diagnostic::new("run", message).help(help))
}

fn invalid(message: String) -> Failure {
    Failure::one(FailureKind::Invalid, HEADLINE, Diagnostic::new("run", message))
}

/// The bytes of a side file; `None` for one that the file does not carry.
pub fn side_file<'a>(artifact: &'a Artifact, path: &str) -> Option<&'a [u8]> {
    Some(artifact.find(&format!("{}{path}", names::FILE_PREFIX))?.plane(0))
}

/// Reads what a run needs but the weights.
///
/// # Errors
/// [`FailureKind::Refused`] for a file without programs or without the model's configuration,
/// [`FailureKind::Invalid`] for one whose programs or manifest cannot be read.
pub fn open(artifact: &Artifact) -> Result<Opened<'_>> {
    let programs = read_programs(artifact).map_err(|e| invalid(e.to_string()))?;
    let programs = programs.ok_or_else(|| {
        refuse(
            "it holds no programs".to_owned(),
            "convert a model of a known family, without --weights-only",
        )
    })?;
    let entry = artifact.find(names::MANIFEST_ENTRY);
    let entry = entry.ok_or_else(|| invalid("there is no manifest".to_owned()))?;
    let manifest =
        Manifest::parse(entry.plane(0)).map_err(|e| invalid(format!("the manifest: {e}")))?;
    let sizes = manifest.graphs.as_ref().and_then(sizes);
    let sizes = sizes.ok_or_else(|| invalid("the manifest tells no sizes".to_owned()))?;
    let config = side_file(artifact, "config.json").ok_or_else(|| {
        refuse("it carries no config.json".to_owned(), "convert from a folder that has one")
    })?;
    let config: Json = serde_json::from_slice(config)
        .map_err(|e| invalid(format!("config.json in the file: {e}")))?;
    let mut spec = model::read_spec(&config, None)?;
    spec.audio = None;
    if programs.of_kind(|k| matches!(k, ProgramKind::Vision { .. })).next().is_none() {
        spec.vision = None;
    }
    let drafts = programs.of_kind(|k| matches!(k, ProgramKind::Draft { .. })).next().is_some();
    let draft = side_file(artifact, DRAFT_CONFIG).filter(|_| drafts);
    let draft = draft
        .map(|bytes| {
            let config: Json = serde_json::from_slice(bytes)
                .map_err(|e| invalid(format!("{DRAFT_CONFIG} in the file: {e}")))?;
            model::read_spec(&config, None)
        })
        .transpose()?;
    Ok(Opened { artifact, manifest, programs, sizes, spec, draft })
}

impl<'a> Opened<'a> {
    /// Pictures as the file's encoder takes them, each of at most `asked` soft tokens; without it, of as many as the
    /// model's configuration says, or the nearest number that a program is compiled for.
    ///
    /// # Errors
    /// Programs that take no pictures, or fewer tokens than asked for; pictures that do not fit; a file whose own processor
    /// makes patches in another way.
    pub fn images(&self, pictures: &[Picture], asked: Option<u64>) -> Result<Vec<Image>> {
        if pictures.is_empty() {
            return Ok(Vec::new());
        }
        let compiled = &self.sizes.soft_tokens;
        let Some((vision, most)) = self.spec.vision.as_ref().zip(compiled.iter().copied().max())
        else {
            let graphs = self.manifest.graphs.as_ref();
            let why = graphs.and_then(|g| g.refuses.get("image"));
            let why = why.map_or("the model has no image encoder", String::as_str);
            let problem = Diagnostic::new("image", "its programs take no images").help(why);
            return Err(Failure::one(FailureKind::Refused, "this prompt cannot be run", problem));
        };
        if let Some(asked) = asked.filter(|n| *n > most) {
            let problem = Diagnostic::new(
                "image",
                format!(
                    "{} tokens for an image; the largest encoder gives {}",
                    diag::count(asked),
                    diag::count(most)
                ),
            )
            .help(format!("encoders: {}; max_soft_tokens in a recipe", diag::list(compiled, 8)));
            return Err(Failure::one(FailureKind::Refused, "this prompt cannot be run", problem));
        }
        super::processor::check(self.artifact, vision)?;
        let own = match vision {
            VisionSpec::Tower(v) => v.soft_tokens,
            VisionSpec::Embedder(v) => v.soft_tokens,
            VisionSpec::Siglip(v) => v.soft_tokens,
        };
        let below = compiled.iter().copied().filter(|n| *n <= own).max();
        let tokens = asked.or(below).or(compiled.iter().copied().min()).unwrap_or(most);
        pictures.iter().map(|picture| picture.patches(vision, tokens)).collect()
    }

    /// Blocks of the cache for sequences of that many slots in all.
    pub(super) fn blocks(&self, slots: u64) -> u64 {
        // Every sequence begins its own block.
        let blocks = slots.div_ceil(self.sizes.block.max(1)).saturating_add(self.sizes.batch_size);
        blocks.min(self.sizes.full_blocks())
    }

    /// An engine for sequences of that many cache slots in all; `weights` bounds the bytes of decoded weights that it
    /// keeps.
    ///
    /// # Errors
    /// Pieces of weights that do not go together; as [`Engine::new`].
    pub fn engine(&self, slots: u64, weights: u64) -> Result<Engine<'a>> {
        let stored = StoredWeights::new(self.artifact, &self.programs)?;
        let memory = Memory { blocks: self.blocks(slots), weights };
        Engine::new(self.programs.clone(), &self.sizes, &self.spec, stored, memory)
    }
}

/// The weights of a file, for as many devices as it is made for.
pub struct StoredWeights<'a> {
    weights: Weights<'a>,
    decoders: BTreeMap<String, Decoders>,
    /// Weights that the programs of the image encoder read.
    vision: BTreeSet<String>,
    /// Whether pieces are put together, for programs of one device.
    together: bool,
}

/// How one weight is read.
struct Decoders {
    whole: Decoder,
    piece: Option<Piece>,
}

/// The pieces of a weight, all of one shape.
struct Piece {
    decoder: Decoder,
    axis: Axis,
    /// Elements of each along the cut that are not padding.
    lengths: Vec<u64>,
    /// `(device, piece)`.
    holders: Vec<(u32, u32)>,
}

impl<'a> StoredWeights<'a> {
    /// Every weight that decodes; a program that reads another gets an error then.
    ///
    /// # Errors
    /// A table of pieces that is not that of the file.
    pub fn new(artifact: &'a Artifact, programs: &Programs) -> Result<StoredWeights<'a>> {
        let weights = Weights::open(artifact).map_err(|e| invalid(e.to_string()))?;
        let mut rows = BTreeMap::new();
        if let Some(table) = weights.partition() {
            rows.extend(table.weights.iter().map(|row| (row.name.as_str(), row)));
        }
        let mut decoders = BTreeMap::new();
        for view in weights.iter() {
            let decoder = |shape: &crate::tensor::Shape| {
                let (rows, columns) = shape.matrix()?;
                Decoder::new(view.encoding(), rows, columns).ok()
            };
            let Some(whole) = decoder(view.shape()) else { continue };
            let row = rows.get(view.name()).filter(|row| row.axis().is_some());
            let piece = row.and_then(|row| {
                Some(Piece {
                    decoder: decoder(&row.local_shape()?)?,
                    axis: row.axis()?,
                    lengths: row.spans.iter().map(|span| span.1).collect(),
                    holders: row.holders.clone(),
                })
            });
            if view.cut() && piece.is_none() {
                continue;
            }
            decoders.insert(view.name().to_owned(), Decoders { whole, piece });
        }
        let images =
            |k: ProgramKind| matches!(k, ProgramKind::Vision { .. } | ProgramKind::Project { .. });
        let vision =
            programs.of_kind(images).flat_map(|p| p.weights.iter().map(|w| w.name.clone()));
        let vision = vision.collect();
        drop(rows);
        Ok(StoredWeights { weights, decoders, vision, together: false })
    }

    /// The same weights for programs of one device, however many the file is for.
    pub fn whole_weights(mut self) -> StoredWeights<'a> {
        self.together = true;
        self
    }

    fn get(&self, name: &str) -> Result<(&WeightView<'a>, &Decoders)> {
        let found = self.weights.get(name).zip(self.decoders.get(name));
        found.ok_or_else(|| fault(format!("there is no weight {name} that decodes")))
    }

    /// Rows of a whole weight.
    fn whole(&self, name: &str, rows: Range<u64>, out: &mut [f32]) -> Result<()> {
        let (view, decoders) = self.get(name)?;
        let block = view.block(rows.clone()).map_err(|e| fault(format!("{name}: {e}")))?;
        let planes: Vec<PlaneSlice<'_>> =
            block.iter().map(|(first, bytes)| PlaneSlice { bytes, first: *first }).collect();
        decoders.whole.decode(rows, &planes, out).map_err(|e| fault(format!("{name}: {e}")))
    }

    /// The device of that rank in the group that reads the weight.
    fn device(&self, name: &str, rank: usize) -> Option<u32> {
        let vision = self.weights.partition().filter(|_| self.vision.contains(name));
        match vision {
            Some(table) => table.vision_devices.get(rank).copied(),
            None => u32::try_from(rank).ok(),
        }
    }
}

impl LocalWeights for StoredWeights<'_> {
    fn rows(
        &self,
        weight: &WeightRef,
        rank: usize,
        rows: Range<u64>,
        out: &mut [f32],
    ) -> Result<()> {
        let name = weight.name.as_str();
        let (view, decoders) = self.get(name)?;
        let Some(piece) = decoders.piece.as_ref().filter(|_| !self.together) else {
            return self.whole(name, rows, out);
        };
        let holds = |device| piece.holders.iter().find(|h| h.0 == device).map(|h| h.1 as usize);
        let held = self.device(name, rank).and_then(holds);
        let held = held.and_then(|n| Some((*view.entries().get(n)?, *piece.lengths.get(n)?)));
        let (entry, length) =
            held.ok_or_else(|| fault(format!("{name} has no piece for device {rank}")))?;
        let planes: Vec<PlaneSlice<'_>> =
            (0..entry.encoding().planes.len()).map(|k| PlaneSlice::whole(entry.plane(k))).collect();
        let decode = piece.decoder.decode(rows.clone(), &planes, out);
        decode.map_err(|e| fault(format!("{name}: {e}")))?;
        // Padding is stored as zeros, whose value the encoding decides.
        let columns = piece.decoder.cols();
        let length = usize::try_from(length).map_err(fault)?;
        if piece.axis == Axis::Rows && entry.shape().rank() > 1 {
            for (row, out) in rows.zip(out.chunks_exact_mut(columns.max(1))) {
                if row >= length as u64 {
                    out.fill(0.0);
                }
            }
        } else {
            for out in out.chunks_exact_mut(columns.max(1)) {
                out.iter_mut().skip(length).for_each(|v| *v = 0.0);
            }
        }
        Ok(())
    }

    fn table_columns(&self, name: &str) -> Option<u64> {
        Some(self.weights.get(name)?.shape().matrix()?.1)
    }

    fn table_row(&self, name: &str, row: u64, out: &mut [f32]) -> Result<()> {
        self.whole(name, row..row.saturating_add(1), out)
    }
}

/// The sizes that the manifest's summary states, as the compiler had them.
pub fn sizes(summary: &manifest::GraphSummary) -> Option<Sizes> {
    let dtype = |name: &str| DType::all().find(|d| d.name() == name);
    Some(Sizes {
        max_seq_len: summary.max_seq_len,
        batch_size: summary.batch_size,
        decoder_batch_sizes: summary.decoder_batch_sizes.clone(),
        prefill_chunk: summary.prefill_chunk_size,
        image_prefill: summary.image_prefill_chunk_size.clone(),
        block: summary.kv.block_tokens,
        kv_dtype: dtype(&summary.kv.dtype)?,
        float: dtype(&summary.activations)?,
        soft_tokens: summary.max_soft_tokens.clone(),
        embeds: summary.host_embeddings,
        aligned: summary.kv.aligned,
        draft_tokens: summary.kv.draft_tokens,
        hidden: summary.kv.draft_tokens > 0,
    })
}

/// Why an artifact's programs cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProgramsError {
    /// The list of digests is absent or does not match the root digest.
    #[error("the digests of the entries cannot be read")]
    Digests,
    /// An entry that the index names is absent.
    #[error("there is no entry {0}")]
    Missing(String),
    /// An entry's bytes are not what they should be.
    #[error("{0}: {1}")]
    Codec(String, CodecError),
    /// Sections that do not go together.
    #[error("{0}")]
    Wire(#[from] WireError),
}

/// The programs of an artifact; `None` for one that holds no programs.
///
/// # Errors
/// Entries that are absent or broken. Whether the programs mean something is for [`graph::verify`](crate::graph::verify).
pub fn read_programs(artifact: &Artifact) -> std::result::Result<Option<Programs>, ProgramsError> {
    if artifact.find(names::GRAPHS_ENTRY).is_none() {
        return Ok(None);
    }
    let root = artifact.meta_text(names::DIGEST_KEY).ok_or(ProgramsError::Digests)?.to_string();
    let root = digests::from_hex(root.as_bytes()).ok_or(ProgramsError::Digests)?;
    let list = artifact.find(names::DIGESTS_ENTRY).ok_or(ProgramsError::Digests)?;
    let list = digests::decode(list.plane(0), &root).map_err(|_| ProgramsError::Digests)?;
    let digests: BTreeMap<&str, [u8; 32]> =
        list.iter().map(|d| (d.name.as_str(), d.sha256)).collect();
    let bytes = |name: &str| -> std::result::Result<(&[u8], [u8; 32]), ProgramsError> {
        let missing = || ProgramsError::Missing(name.chars().take(80).collect());
        let entry = artifact.find(name).ok_or_else(missing)?;
        Ok((entry.plane(0), digests.get(name).copied().ok_or_else(missing)?))
    };
    let codec = |name: &str, e| ProgramsError::Codec(name.chars().take(80).collect(), e);
    let (section, digest) = bytes(names::GRAPHS_ENTRY)?;
    let index: WireIndex =
        codec::decode(section, &digest).map_err(|e| codec(names::GRAPHS_ENTRY, e))?;
    let mut programs = Vec::new();
    let mut seen = BTreeSet::new();
    for name in &index.programs {
        // An index could ask for one large section any number of times.
        if !seen.insert(name.as_str()) {
            let why = CodecError::Malformed("the index lists it twice".to_owned());
            return Err(codec(name, why));
        }
        let entry = format!("{}{name}", names::GRAPH_PREFIX);
        let (section, digest) = bytes(&entry)?;
        let program: WireProgram = codec::decode(section, &digest).map_err(|e| codec(&entry, e))?;
        programs.push(program);
    }
    Ok(Some(index.programs(programs)?))
}
