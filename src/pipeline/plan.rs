//! Everything that fixes the output before any weight data is read.

use std::collections::BTreeMap;

use serde_json::Value;

use super::imatrix::{self, Importances};
use super::programs::{self, Compiled};
use super::shards;
use super::sources::Sources;
use super::vocabulary;
use crate::artifact::manifest::Manifest;
use crate::artifact::partition::Partition;
use crate::artifact::{
    self, Contents, EntrySpec, Layout, Vocab, digests, errors, layout as names, manifest, metadata,
};
use crate::checkpoint::{Checkpoint, FileDigest};
use crate::diag::{Diagnostic, Failure, FailureKind, Problems, Result};
use crate::hash;
use crate::model::{self, ModelSpec, Part, Weight, WeightTable};
use crate::partition::{self, Models, Placement};
use crate::recipe::{Assigned, Assignment, Fate, Method, Recipe};
use crate::tensor::Shape;

/// Longest row that a quantizer is given: encoders hold whole rows in memory, kept weights are not bound by it.
const MAX_ROW_BYTES: u64 = 64 << 20;

/// What to plan.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// Convert without a family: encodings by name and class.
    pub weights_only: bool,
    /// Whether a source without a tokenizer is refused.
    pub tokenizer_required: bool,
}

/// Every noun up to the layout of the file: it can be printed, executed, or compared with a file.
#[derive(Debug)]
pub struct Plan {
    /// The checkpoints.
    pub sources: Sources,
    /// The recipe with all overrides.
    pub recipe: Recipe,
    /// What the model is; none for a weights-only conversion.
    pub spec: Option<ModelSpec>,
    /// What the draft model is that was merged in.
    pub draft: Option<ModelSpec>,
    /// Logical weights and unused tensors.
    pub table: WeightTable,
    /// One decision for every weight.
    pub assignment: Assignment,
    /// Which device holds what.
    pub placement: Placement,
    /// What the model was compiled to; none without a family.
    pub compiled: Option<Compiled>,
    /// Importances of the weights that are searched.
    pub importances: Importances,
    /// The manifest, digests still zero.
    pub manifest: Manifest,
    /// The table of who holds what, digests still zero; none for one device.
    pub partition: Option<Partition>,
    /// What the file holds.
    pub contents: Contents,
    /// Where everything will lie.
    pub layout: Layout,
    /// What looks odd and stops nothing.
    pub warnings: Vec<Diagnostic>,
}

/// Plans a conversion of a checkpoint, or of a checkpoint with a draft model.
///
/// # Errors
/// Every reason why the sources, the recipe and the container do not fit, found without reading weight data.
pub fn plan(sources: impl Into<Sources>, recipe: Recipe, request: Request) -> Result<Plan> {
    let sources = sources.into();
    sources.refuse_quantized()?;
    imatrix::wanted(&sources, &recipe)?;
    let Understood { spec, draft, table } = understand(&sources, request.weights_only)?;
    let (assignment, importances, mut warnings) = decide(&sources, &recipe, &table, request)?;
    warnings.extend(assignment.warnings.iter().cloned());
    let models = Models { main: spec.as_ref(), draft: draft.as_ref() };
    let placement = place(&recipe, models, &table, &assignment)?;
    let mut compiled = None;
    if let Some(spec) = &spec {
        let input = programs::Input {
            recipe: &recipe,
            spec,
            draft: draft.as_ref(),
            table: &table,
            assignment: &assignment,
            placement: &placement,
        };
        let (made, odd) = programs::compile(&input)?;
        compiled = made;
        warnings.extend(odd);
    }
    let stored = assignment.stored(&table).map(|(_, w)| w.name.as_str());
    let partition = shards::table(&placement, stored);
    let (vocab, left_out) = vocabulary::of_source(&sources)?;
    warnings.extend(left_out);
    let made_from = MadeFrom {
        sources: &sources,
        recipe: &recipe,
        spec: spec.as_ref(),
        table: &table,
        assignment: &assignment,
        importances: &importances,
        placement: &placement,
        partition: partition.as_ref(),
        compiled: compiled.as_ref(),
        vocab,
    };
    let mut manifest = made_from.manifest();
    let contents = made_from.contents(&manifest)?;
    let layout = Layout::plan(&contents)?;
    manifest.tables = Some(manifest::Sha256Hex(layout.tables_digest()));
    Ok(Plan {
        sources,
        recipe,
        spec,
        draft,
        table,
        assignment,
        importances,
        placement,
        compiled,
        manifest,
        partition,
        contents,
        layout,
        warnings,
    })
}

impl Plan {
    /// The layout that this plan had before manifests stated the digest of the tables; without a `vocabulary`, as it was
    /// before files carried that section.
    ///
    /// # Errors
    /// As [`Layout::plan`].
    pub fn earlier_layout(&self, vocabulary: bool) -> Result<Layout> {
        let mut contents = self.contents.clone();
        contents.vocab = contents.vocab.filter(|_| vocabulary);
        let manifest = Manifest { tables: None, ..self.manifest.clone() }.to_bytes();
        for entry in contents.entries.iter_mut().filter(|e| e.name == names::MANIFEST_ENTRY) {
            *entry = EntrySpec::opaque(names::MANIFEST_ENTRY, manifest.len() as u64);
        }
        Layout::plan(&contents)
    }

    /// Positions in the directory of the entries that a weight is stored as, piece by piece; empty for a weight that is
    /// not stored.
    pub(super) fn entries_of(&self, weight: &str) -> Vec<usize> {
        let pieces = self.placement.weight(weight).map(|p| p.shards()).unwrap_or_default();
        if pieces.is_empty() {
            return self.layout.entry(weight).into_iter().collect();
        }
        pieces.iter().filter_map(|shard| self.layout.entry(&shard.name(weight))).collect()
    }

    /// Digests of the files that the manifest lists, by path: those that were hashed, and those that are made of a file of
    /// the source.
    pub(super) fn file_digests<'a>(
        &'a self,
        hashed: &'a [FileDigest],
    ) -> BTreeMap<&'a str, [u8; 32]> {
        let side = self.manifest.files.iter().map(|f| f.path.as_str());
        let listed = self.manifest.source.files.iter().map(|f| f.path.as_str()).chain(side);
        let made = listed
            .filter_map(|path| Some((path, hash::sha256([self.sources.main.made_file(path)?]))));
        made.chain(hashed.iter().map(|h| (h.path.as_str(), h.sha256))).collect()
    }
}

/// The weights over the recipe's devices.
pub(super) fn place(
    recipe: &Recipe,
    models: Models<'_>,
    table: &WeightTable,
    assignment: &Assignment,
) -> Result<Placement> {
    // The language bounds both far below 2^32.
    let number = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    let devices = number(recipe.target.devices);
    let vision = match &recipe.vision.devices {
        Some(list) => list.iter().map(|&d| number(d)).collect(),
        None => vec![0],
    };
    partition::place(models, table, assignment, devices, &vision)
}

/// What the sources mean.
#[derive(Debug)]
pub(super) struct Understood {
    pub spec: Option<ModelSpec>,
    pub draft: Option<ModelSpec>,
    pub table: WeightTable,
}

/// The model's weights: by family, or by name alone. Those of a draft model stand among them. A weight that a source
/// holds quantized knows how.
pub(super) fn understand(sources: &Sources, weights_only: bool) -> Result<Understood> {
    let mut understood = meaning(sources, weights_only)?;
    let table = &mut understood.table;
    for weight in &mut table.weights {
        weight.stored = sources.of(weight).ok().and_then(|checkpoint| checkpoint.stored(weight));
    }
    table.unused.extend(sources.unused());
    table.unused.sort();
    Ok(understood)
}

fn meaning(sources: &Sources, weights_only: bool) -> Result<Understood> {
    let checkpoint = &sources.main;
    let config = checkpoint.config();
    if weights_only {
        if sources.draft.is_some() {
            let problem = Diagnostic::new(
                "draft",
                "whether a draft head fits follows from the families, which --weights-only does not ask",
            )
            .help("convert without --weights-only, or without --draft-model");
            return Err(Failure::one(
                FailureKind::Usage,
                "these options do not go together",
                problem,
            ));
        }
        let table = model::weights_only(config.map(|c| &c.value), checkpoint.tensors())?;
        return Ok(Understood { spec: None, draft: None, table });
    }
    let Some(config) = config else {
        if let Some(gguf) = checkpoint.gguf() {
            gguf.model(checkpoint.tensors())?;
        }
        let problem = Diagnostic::new(
            "config",
            "the source has no config.json, which says what the tensors mean",
        )
        .help("add the model's config.json beside the weights")
        .help("--weights-only converts by tensor name and class, without it");
        return Err(Failure::one(
            FailureKind::Refused,
            "this source cannot be understood",
            problem,
        ));
    };
    let mut model = match checkpoint.gguf() {
        Some(gguf) => gguf.model(checkpoint.tensors())?,
        None => model::read(&config.value, Some(&config.text), checkpoint.tensors())?,
    };
    let mut draft_spec = None;
    if let Some(draft) = &sources.draft {
        let (spec, table) = understand_draft(draft, &model.spec)?;
        model.table.merge_draft(table);
        draft_spec = Some(spec);
    }
    Ok(Understood { spec: Some(model.spec), draft: draft_spec, table: model.table })
}

/// The weights of a draft model that fits its target, and what it is.
fn understand_draft(draft: &Checkpoint, target: &ModelSpec) -> Result<(ModelSpec, WeightTable)> {
    let headline = "this draft model cannot be merged";
    if draft.gguf().is_some() {
        let what = "the draft model is a GGUF file; draft models are read as safetensors";
        let problem = Diagnostic::new("draft", what)
            .help("pass the folder of the assistant that was published with this model");
        return Err(Failure::one(FailureKind::Refused, headline, problem));
    }
    let Some(config) = draft.config() else {
        let problem = Diagnostic::new(
            "draft",
            "the draft model has no config.json, which says what the tensors mean",
        )
        .help("pass the folder of the assistant that was published with this model");
        return Err(Failure::one(FailureKind::Refused, headline, problem));
    };
    // The spec first: a model that is no draft is told so, whatever else may be wrong with it.
    let spec = model::read_spec(&config.value, Some(&config.text))?;
    model::draft_mismatches(target, &spec).finish(FailureKind::Refused, headline, ())?;
    let table = model::read(&config.value, Some(&config.text), draft.tensors())?.table;
    Ok((spec, table))
}

/// One method for every weight, and the checks that need no recipe; problems of both together.
fn decide(
    sources: &Sources,
    recipe: &Recipe,
    table: &WeightTable,
    request: Request,
) -> Result<(Assignment, Importances, Vec<Diagnostic>)> {
    let mut problems = Problems::new();
    let checkpoint = &sources.main;
    let mut warnings = checkpoint.notes().to_vec();
    warnings.extend(sources.draft.iter().flat_map(|d| d.notes()).cloned());

    let rows = table.get("token_embd.weight").and_then(|w| w.shape.extents().first().copied());
    // Without a family nobody knows that the source is a language model.
    let required = request.tokenizer_required && !request.weights_only;
    let tokenizer = checkpoint.check_tokenizer(rows, required);
    problems.extend(tokenizer.problems);
    warnings.extend(tokenizer.notes);

    for weight in &table.weights {
        if weight.name.starts_with(names::OWN_PREFIX) {
            problems.push(Diagnostic::new(
                "checkpoint",
                format!(
                    "{}: names that begin with {} are the artifact's own",
                    weight.name,
                    names::OWN_PREFIX
                ),
            ));
        }
    }
    match recipe.resolve(table, checkpoint.display_name()) {
        Ok(assignment) => {
            problems.extend(rows_too_long(&assignment, table));
            let (importances, wrong, odd) = imatrix::assign(sources, recipe, table, &assignment);
            problems.extend(wrong);
            warnings.extend(odd);
            let headline = "this source and recipe do not fit";
            problems.finish(FailureKind::Refused, headline, (assignment, importances, warnings))
        }
        Err(mut failure) => {
            failure.problems.splice(0..0, problems.into_vec());
            Err(failure)
        }
    }
}

fn rows_too_long<'a>(
    assignment: &'a Assignment,
    table: &'a WeightTable,
) -> impl Iterator<Item = Diagnostic> + 'a {
    assignment.stored(table).filter(|(a, _)| *a.method != Method::Keep).filter_map(|(_, w)| {
        let bytes = w.shape.matrix()?.1.checked_mul(w.dtype.bytes()?)?;
        (bytes > MAX_ROW_BYTES).then(|| {
            Diagnostic::new(
                "quantize",
                format!(
                    "{}: a row of {bytes} bytes; encoders take rows up to {MAX_ROW_BYTES}",
                    w.name
                ),
            )
            .help("encoding = \"keep\" stores it byte for byte")
        })
    })
}

/// What the contents of the file are made from.
struct MadeFrom<'a> {
    sources: &'a Sources,
    recipe: &'a Recipe,
    spec: Option<&'a ModelSpec>,
    table: &'a WeightTable,
    assignment: &'a Assignment,
    placement: &'a Placement,
    partition: Option<&'a Partition>,
    compiled: Option<&'a Compiled>,
    importances: &'a Importances,
    vocab: Option<Vocab>,
}

impl MadeFrom<'_> {
    fn contents(&self, manifest: &Manifest) -> Result<Contents> {
        let absent = Value::Object(serde_json::Map::new());
        let value = |file: Option<&crate::checkpoint::JsonFile>| file.map(|f| f.value.clone());
        let main = &self.sources.main;
        let config = value(main.config()).unwrap_or(absent);
        let identity = metadata::identity(&config);
        let (generation, preprocessor, video, draft) = (
            value(main.generation_config()),
            value(main.preprocessor_config()),
            value(main.video_preprocessor_config()),
            value(self.sources.draft.as_ref().and_then(|d| d.config())),
        );
        let rows = metadata::rows(&metadata::Sources {
            config: &config,
            generation: generation.as_ref(),
            preprocessor: preprocessor.as_ref(),
            video_preprocessor: video.as_ref(),
            draft: draft.as_ref(),
            set: &[],
            tool_version: env!("CARGO_PKG_VERSION"),
            devices: self.placement.devices,
        })?;
        // Pieces follow everything that is whole, device by device, each device's in canonical order.
        let (mut entries, mut pieces) = (Vec::new(), Vec::new());
        for (assigned, weight) in self.assignment.stored(self.table) {
            let placed = self.placement.weight(&weight.name);
            let stored = shards::entries(weight_entry(assigned, weight), placed);
            if placed.is_some_and(|p| p.cut.shares().is_some()) {
                pieces.extend(stored);
            } else {
                entries.extend(stored.into_iter().map(|(_, entry)| entry));
            }
        }
        // An empty file has no bytes to store: the manifest alone tells of it.
        let files = self.sources.side_files().into_iter().filter(|f| f.bytes > 0);
        entries.extend(
            files.map(|f| EntrySpec::opaque(format!("{}{}", names::FILE_PREFIX, f.path), f.bytes)),
        );
        entries.push(EntrySpec::opaque(
            names::MANIFEST_ENTRY,
            manifest.placeholder().to_bytes().len() as u64,
        ));
        let quantized = self.assignment.quantized(self.table).map(|(_, w)| w.name.as_str());
        entries.push(EntrySpec::opaque(names::ERRORS_ENTRY, errors::encoded_len(quantized)));
        if let Some(partition) = self.partition {
            let bytes = partition.encode().len() as u64;
            entries.push(EntrySpec::opaque(names::PARTITION_ENTRY, bytes));
        }
        let sections = self.compiled.iter().flat_map(|c| &c.sections);
        entries.extend(sections.map(|(name, bytes)| EntrySpec::opaque(name, bytes.len() as u64)));
        artifact::device_order(&mut pieces);
        let pieces: Vec<EntrySpec> = pieces.into_iter().map(|(_, entry)| entry).collect();
        let others = entries.iter().chain(&pieces).map(|e| e.name.as_str());
        entries.push(EntrySpec::opaque(names::DIGESTS_ENTRY, digests::encoded_len(others)));
        artifact::canonical_order(&mut entries);
        let whole = entries.len();
        entries.extend(pieces);
        let places = entries.iter().enumerate().map(|(i, e)| (e.layer, e.expert, i >= whole));
        let data = match self.partition {
            Some(_) => artifact::data_order(&places.collect::<Vec<_>>()),
            None => Vec::new(),
        };
        Ok(Contents {
            arch_id: identity.arch_id,
            model_name: identity.model_name,
            quant: identity.quant,
            recipe: self.recipe.to_toml(),
            created_by: concat!("radpack ", env!("CARGO_PKG_VERSION")).to_owned(),
            metadata: rows,
            entries,
            data,
            vocab: self.vocab.clone(),
            profile: Vec::new(),
        })
    }

    fn manifest(&self) -> Manifest {
        let zero = manifest::Sha256Hex::default();
        let side = self.sources.side_files().into_iter().map(|f| manifest::SideFile {
            entry: format!("{}{}", names::FILE_PREFIX, f.path),
            path: f.path,
            bytes: f.bytes,
            sha256: zero,
        });
        let read = self.sources.files().into_iter().map(|(path, bytes)| manifest::SourceFile {
            path,
            bytes,
            sha256: zero,
        });
        let hub = self.sources.main.hub();
        let unused = self.table.unused.iter().map(|(tensor, reason)| manifest::UnusedTensor {
            tensor: tensor.clone(),
            reason: reason.clone(),
        });
        Manifest {
            schema: manifest::SCHEMA.to_owned(),
            schema_version: manifest::SCHEMA_VERSION,
            tool: manifest::Tool {
                name: "radpack".to_owned(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
            },
            format_version: names::EXTENSION_VERSION as u32,
            tables: Some(zero),
            source: manifest::Source {
                repo: hub.map(|h| h.repo.clone()),
                revision: hub.map(|h| h.commit.clone()),
                files: read.collect(),
            },
            recipe: manifest::RecipeSummary {
                name: self.recipe.name.clone(),
                sha256: manifest::Sha256Hex(hash::sha256([self.recipe.to_toml().as_bytes()])),
            },
            model: self.model_summary(),
            devices: self.placement.devices,
            device_weights: shards::summaries(self.placement),
            graphs: self.compiled.map(|c| programs::summary(c, self.spec, self.placement)),
            encodings: self.encoding_summaries(),
            weights: self.weight_records(),
            unused: unused.collect(),
            files: side.collect(),
            notes: self.notes(),
        }
    }

    fn model_summary(&self) -> manifest::ModelSummary {
        let config = self.sources.main.config().map(|c| &c.value);
        let text = |pointer: &str| {
            let found = config.and_then(|c| c.pointer(pointer)).and_then(Value::as_str);
            found.unwrap_or_default().to_owned()
        };
        let mut towers: BTreeMap<_, manifest::TowerSummary> = BTreeMap::new();
        for (a, w) in self.assignment.stored(self.table) {
            let tower = towers.entry(w.tower).or_insert_with(|| manifest::TowerSummary {
                name: w.tower.to_string(),
                weights: 0,
                parameters: 0,
                bytes: 0,
            });
            tower.weights += 1;
            tower.parameters += w.shape.elements().unwrap_or(0);
            tower.bytes += a.encoding.bytes(&w.shape).unwrap_or(0);
        }
        manifest::ModelSummary {
            architecture: text("/architectures/0"),
            model_type: text("/model_type"),
            family: self.spec.map(|s| s.family.to_owned()),
            parameters: self.assignment.total.elements,
            dimensions: self.spec.map(dimensions).unwrap_or_default(),
            towers: towers.into_values().collect(),
        }
    }

    fn encoding_summaries(&self) -> Vec<manifest::EncodingSummary> {
        let mut sums: BTreeMap<(String, String), manifest::EncodingSummary> = BTreeMap::new();
        for (a, w) in self.assignment.stored(self.table) {
            let key = (a.encoding_name.to_string(), a.encoding.to_string());
            let sum = sums.entry(key).or_insert_with(|| manifest::EncodingSummary {
                encoding: a.encoding_name.to_string(),
                layout: a.encoding.to_string(),
                weights: 0,
                parameters: 0,
                bytes: 0,
                source_bytes: 0,
                bits_per_weight: 0.0,
            });
            sum.weights += 1;
            sum.parameters += w.shape.elements().unwrap_or(0);
            sum.bytes += a.encoding.bytes(&w.shape).unwrap_or(0);
            sum.source_bytes += source_bytes(w);
        }
        let mut sums: Vec<_> = sums.into_values().collect();
        for sum in &mut sums {
            sum.bits_per_weight = sum.bytes as f64 * 8.0 / (sum.parameters as f64).max(1.0);
        }
        sums
    }

    fn weight_records(&self) -> Vec<manifest::WeightRecord> {
        let decided = self.assignment.weights.iter().filter(|a| a.fate != Fate::LeftOut);
        let mut records: Vec<_> = decided
            .filter_map(|a| Some((a, self.table.weights.get(a.weight)?)))
            .map(|(a, w)| manifest::WeightRecord {
                name: w.name.clone(),
                from: w.parts.iter().map(|p| self.weight_source(w, p)).collect(),
                encoding: a.encoding_name.to_string(),
                rule: a.rule.map(|r| r as u32 + 1),
                importance: self.importances.entries.get(&a.weight).map(|e| e.shown.clone()),
                tied_to: w.tied_to.clone(),
            })
            .collect();
        // Directory order: the table is in it already, and left-out weights leave gaps only.
        records.shrink_to_fit();
        records
    }

    fn weight_source(&self, weight: &Weight, part: &Part) -> manifest::WeightSource {
        let checkpoint = self.sources.of(weight).ok();
        let info = checkpoint.and_then(|c| c.tensors().get(&part.tensor));
        manifest::WeightSource {
            tensor: weight.tensor_name(part).into_owned(),
            shape: info.map(|i| i.shape.extents().to_vec()).unwrap_or_default(),
            index: part.index,
        }
    }

    fn notes(&self) -> Vec<String> {
        let tails = self.assignment.tails.iter().map(|t| {
            format!(
                "{} weights of {} columns end in a short group of {} (group {})",
                t.weights, t.cols, t.tail, t.group
            )
        });
        tails.chain(self.sources.main.origin_notes()).collect()
    }
}

fn weight_entry(assigned: &Assigned, weight: &Weight) -> EntrySpec {
    EntrySpec {
        name: weight.name.clone(),
        quantizer: assigned.method.quantizer().to_owned(),
        options: assigned.method.options(),
        encoding: (*assigned.encoding).clone(),
        // The container has no rank 0.
        shape: if weight.shape.rank() == 0 { Shape::from([1]) } else { weight.shape.clone() },
        layer: weight.layer,
        expert: weight.expert,
        slot: weight.slot,
    }
}

fn source_bytes(weight: &Weight) -> u64 {
    weight.source_bytes().unwrap_or(0)
}

/// The decoder's numbers that a person asks for first.
fn dimensions(spec: &ModelSpec) -> BTreeMap<String, i64> {
    let text = &spec.text;
    let mut out = BTreeMap::new();
    let mut put = |name: &str, n: u64| {
        out.insert(name.to_owned(), i64::try_from(n).unwrap_or(i64::MAX));
    };
    put("layers", text.layers.len() as u64);
    put("hidden_size", text.hidden_size);
    put("vocab_size", text.vocab_size);
    put("max_positions", text.max_positions);
    let windows = text.layers.iter().filter(|l| l.attention.window().is_some()).count();
    put("window_layers", windows as u64);
    put("full_layers", (text.layers.len() - windows) as u64);
    if let Some(layer) = text.layers.first() {
        put("q_heads", layer.attention.q_heads);
    }
    if let Some(window) = text.layers.iter().find_map(|l| l.attention.window()) {
        put("window", window);
    }
    if let Some(moe) = text.layers.iter().find_map(|l| l.moe) {
        put("experts", moe.experts);
        put("experts_used", moe.top_k);
    }
    out
}
