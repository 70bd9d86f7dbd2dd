//! The sizes that programs are compiled for: what the recipe says, what the target defaults to, and what does not go
//! together. Derivations and refusals follow optimum-rbln 0.11.2, whose names the settings have; limits of a compiler
//! come from the target's profile, so that other targets have none of them.

use crate::diag::{Diagnostic, FailureKind, Problems, Result, count, list};
use crate::model::{AttentionKind, ModelSpec, VisionSpec};
use crate::recipe::{Activations, Attention, Graphs, KvDtype, Limits, Profile, Recipe};
use crate::tensor::DType;

/// Every size that a static program needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizes {
    /// Longest sequence in cache slots, a multiple of [`Sizes::block`].
    pub max_seq_len: u64,
    /// Sequences that are served together.
    pub batch_size: u64,
    /// Decode programs, largest first; the first is [`Sizes::batch_size`].
    pub decoder_batch_sizes: Vec<u64>,
    /// Rows of a prefill call.
    pub prefill_chunk: u64,
    /// Image prefill programs, largest first; none for models without images.
    pub image_prefill: Vec<u64>,
    /// Tokens of a block of the paged cache. Eager attention has one block a sequence.
    pub block: u64,
    /// Element type of the cache.
    pub kv_dtype: DType,
    /// Element type of activations at the interface.
    pub float: DType,
    /// Vision programs by soft tokens, largest first; none for models without an image encoder.
    pub soft_tokens: Vec<u64>,
    /// Whether the host looks token embeddings up (models with images, whose rows it merges in) instead of the graph.
    pub embeds: bool,
    /// Whether a sequence may leave slots unused, so that slots and positions differ and a mask tells valid slots.
    pub aligned: bool,
    /// Tokens that a draft model may propose at once; 0 without one.
    pub draft_tokens: u64,
    /// Whether the model's prefill returns the final hidden state too (what a draft head starts from).
    pub hidden: bool,
}

/// Sizes, and what looks odd about them.
#[derive(Debug, Clone, PartialEq)]
pub struct Sized {
    /// The sizes.
    pub sizes: Sizes,
    /// What stops nothing.
    pub warnings: Vec<Diagnostic>,
}

impl Sizes {
    /// Blocks that the longest sequence needs.
    pub fn blocks_per_sequence(&self) -> u64 {
        self.max_seq_len.div_ceil(self.block.max(1))
    }

    /// Blocks that all sequences at full length need: more are never used.
    pub fn full_blocks(&self) -> u64 {
        self.blocks_per_sequence().saturating_mul(self.batch_size)
    }

    /// Fewest blocks that serve one full-length sequence, or a short one in every place, and one that padding rows of
    /// a decode batch point at (optimum-rbln 0.11.1 and later; 0.11.0 left the batch out). With eager attention a block
    /// for each sequence.
    pub fn min_blocks(&self) -> u64 {
        if self.block == self.max_seq_len {
            return self.batch_size;
        }
        let most = self.blocks_per_sequence().max(self.batch_size);
        most.saturating_add(1).min(self.full_blocks())
    }

    /// Positions that the ring of a sliding layer holds. A draft head sees one key more than the window (transformers
    /// 5.24: distances up to the window), and proposed tokens that are rejected must not have replaced keys that are
    /// still in sight.
    pub fn ring(&self, window: u64) -> u64 {
        if self.draft_tokens == 0 { window } else { window.saturating_add(1 + self.draft_tokens) }
    }
}

/// Tokens that a draft head proposes at once (rad-convert's `--max-spec` default).
const DRAFT_TOKENS: u64 = 4;

/// Tokens of a prefill call without a target.
const CHUNK: u64 = 128;

/// Tokens of a cache block without a target.
const BLOCK: u64 = 64;

/// Image prefill sizes are multiples of it without a target (optimum-rbln 0.11.2: 128).
const IMAGE_MULTIPLE: u64 = 128;

/// Token counts of an image that the published image processor of Gemma 4 accepts.
const PUBLISHED_SOFT_TOKENS: [u64; 5] = [70, 140, 280, 560, 1120];

const AREA: &str = "graph";

/// Decides every size.
///
/// `spec` is the model as the artifact holds it, without towers that are left out; `draft` tells whether a draft head
/// is in it; `dtype` is the element type of the checkpoint's floats.
///
/// # Errors
/// [`FailureKind::Refused`] with every setting that does not go with another, with the model or with the target.
pub fn derive(
    spec: &ModelSpec,
    draft: bool,
    recipe: &Recipe,
    profile: Option<&Profile>,
    dtype: DType,
) -> Result<Sized> {
    let mut d = Derive {
        graphs: &recipe.graphs,
        limits: profile.map(|p| p.limits.clone()).unwrap_or_default(),
        profile,
        problems: Problems::new(),
        warnings: Vec::new(),
    };
    let soft_tokens = d.soft_tokens(spec, recipe.vision.max_soft_tokens.as_deref());
    let images = !soft_tokens.is_empty();
    // Tokens of every image, where all have one number.
    let fixed = match &spec.vision {
        Some(VisionSpec::Siglip(v)) => Some(v.soft_tokens),
        _ => None,
    };
    let (batch_size, decoder_batch_sizes) = d.batches();
    let (max_seq_len, block) = d.sequence(spec);
    let prefill_chunk = d.chunk(spec, max_seq_len, fixed);
    let image_prefill = match fixed {
        Some(tokens) => d.fixed_image_prefill(tokens, max_seq_len),
        None => d.image_prefill(&soft_tokens, max_seq_len),
    };
    let float = float(recipe, dtype);
    let kv_dtype = d.kv_dtype(float);
    let whole = d.limits.chunk_in_partition;
    for chunk in image_prefill.iter().chain([&prefill_chunk]) {
        if whole && *chunk > block {
            d.refuse(
                format!("a prefill of {chunk} tokens is written into one cache block of {block}"),
                format!("use kv_partition_len {} or more", chunk.next_multiple_of(64)),
            );
        }
    }
    let sizes = Sizes {
        max_seq_len,
        batch_size,
        decoder_batch_sizes,
        prefill_chunk,
        image_prefill,
        block,
        kv_dtype,
        float,
        soft_tokens,
        embeds: images,
        // A chunk that would cross a border starts behind it; chunks of one size that divides a block never would.
        aligned: whole && (images || !block.is_multiple_of(prefill_chunk.max(1))),
        draft_tokens: if draft { DRAFT_TOKENS } else { 0 },
        hidden: draft,
    };
    let (problems, warnings) = (d.problems, d.warnings);
    problems.finish(
        FailureKind::Refused,
        "these graph sizes do not go together",
        Sized { sizes, warnings },
    )
}

/// The type of activations: what the recipe's rules say for 16-bit ones, else the checkpoint's.
fn float(recipe: &Recipe, dtype: DType) -> DType {
    let said = recipe.rules.iter().find_map(|r| match r.activations {
        Some(Activations::F16) => Some(DType::F16),
        Some(Activations::Bf16) => Some(DType::BF16),
        Some(Activations::F32) => Some(DType::F32),
        _ => None,
    });
    match (said, dtype) {
        (Some(said), _) => said,
        (None, DType::F16 | DType::F32) => dtype,
        (None, _) => DType::BF16,
    }
}

struct Derive<'a> {
    graphs: &'a Graphs,
    limits: Limits,
    profile: Option<&'a Profile>,
    problems: Problems,
    warnings: Vec<Diagnostic>,
}

impl Derive<'_> {
    fn refuse(&mut self, rule: String, help: String) {
        self.problems.push(Diagnostic::new(AREA, rule).help(help));
    }

    fn target(&self) -> String {
        self.profile.map_or_else(|| "without a target".to_owned(), |p| format!("on {}", p.name))
    }

    /// Vision programs: one for each number of soft tokens.
    fn soft_tokens(&mut self, spec: &ModelSpec, said: Option<&[u64]>) -> Vec<u64> {
        let default = match &spec.vision {
            Some(VisionSpec::Tower(v)) => v.soft_tokens,
            Some(VisionSpec::Embedder(v)) => v.soft_tokens,
            Some(VisionSpec::Siglip(v)) => {
                let tokens = v.soft_tokens;
                if let Some(said) = said.filter(|said| *said != [tokens]) {
                    self.refuse(
                        format!(
                            "[vision] max_soft_tokens is {}; every image of this model becomes {tokens} tokens",
                            list(said, 8)
                        ),
                        format!("use {tokens}, or leave it out"),
                    );
                }
                return vec![tokens];
            }
            None => {
                if said.is_some() {
                    self.refuse(
                        "[vision] max_soft_tokens is set, but the artifact holds no image encoder"
                            .to_owned(),
                        "leave it out, or take a model with images and towers.vision = true"
                            .to_owned(),
                    );
                }
                return Vec::new();
            }
        };
        let mut list = said.map_or_else(|| vec![default], <[u64]>::to_vec);
        list.sort_unstable_by(|a, b| b.cmp(a));
        list.dedup();
        let published = default == 280;
        for t in list.iter().filter(|t| published && !PUBLISHED_SOFT_TOKENS.contains(t)) {
            self.warnings.push(Diagnostic::new(
                AREA,
                format!("the published image processor makes 70, 140, 280, 560 or 1120 soft tokens, never {t}"),
            ));
        }
        list
    }

    fn batches(&mut self) -> (u64, Vec<u64>) {
        let batch = self.graphs.batch_size.unwrap_or(1);
        let mut list = self.graphs.decoder_batch_sizes.clone().unwrap_or_else(|| vec![batch]);
        list.sort_unstable_by(|a, b| b.cmp(a));
        list.dedup();
        let most = list.first().copied().unwrap_or(0);
        if most > batch {
            self.refuse(
                format!("decoder_batch_sizes has {most}, batch_size is {batch}"),
                format!("use batch_size {most}, or decoder sizes up to {batch}"),
            );
        } else if most < batch {
            // optimum-rbln appends it with a warning; a single other size compiles there and fails when it is loaded.
            self.warnings.push(Diagnostic::new(
                AREA,
                format!(
                    "decoder_batch_sizes ends at {most}; a decoder for batch_size {batch} is added"
                ),
            ));
            list.insert(0, batch);
        }
        (batch, list)
    }

    /// Longest sequence and cache block.
    fn sequence(&mut self, spec: &ModelSpec) -> (u64, u64) {
        let said = self.graphs.max_seq_len;
        let trained = spec.text.max_positions;
        let mut max = said.unwrap_or(trained);
        let partition = self.graphs.kv_partition_len;
        let attention = match (self.graphs.attention, partition) {
            (Some(attention), _) => attention,
            (None, Some(_)) => Attention::Flash,
            (None, None) => self.profile.map_or(Attention::Flash, |p| p.graphs.attention),
        };
        if let Some(said) = said.filter(|s| *s > trained) {
            self.warnings.push(Diagnostic::new(
                AREA,
                format!(
                    "max_seq_len {} is beyond the {} positions that the model was trained for",
                    count(said),
                    count(trained)
                ),
            ));
        }
        let target = self.target();
        if attention == Attention::Eager {
            if let Some(partition) = partition {
                self.refuse(
                    format!("attention = \"eager\" takes the whole sequence at once, kv_partition_len is {partition}"),
                    "leave kv_partition_len out, or use attention = \"flash\"".to_owned(),
                );
            }
            if let Some(most) = self.limits.eager_max_seq_len.filter(|most| max > *most) {
                self.refuse(
                    format!(
                        "eager attention takes up to {most} tokens {target}, max_seq_len is {max}"
                    ),
                    format!("use attention = \"flash\", or max_seq_len up to {most}"),
                );
            }
            return (max, max);
        }
        let block =
            partition.unwrap_or_else(|| self.profile.map_or(BLOCK, |p| p.graphs.kv_partition_len));
        if let Some([least, most]) = self.limits.kv_partition_len
            && !(least..=most).contains(&block)
        {
            self.refuse(
                format!("kv_partition_len is {block}; {target} it is {least} to {most}"),
                format!("use a length from {least} to {most}"),
            );
        }
        let partitions = self.limits.partitions_min.unwrap_or(1);
        let least =
            block.saturating_mul(partitions).max(self.limits.flash_min_seq_len.unwrap_or(1));
        if said.is_none() {
            // The trained length, down to whole blocks.
            max = (max / block.max(1)).saturating_mul(block).max(block);
        }
        if !max.is_multiple_of(block) || max < least {
            let below = (max / block.max(1)).saturating_mul(block);
            let fits = if below >= least {
                format!("use max_seq_len {below} or {}", below.saturating_add(block))
            } else {
                format!(
                    "use max_seq_len {} or more, in steps of {block}",
                    least.next_multiple_of(block)
                )
            };
            self.refuse(
                format!(
                    "max_seq_len {max} has to be a multiple of kv_partition_len {block} and at least {least} {target}"
                ),
                fits,
            );
            // One refusal is enough for what follows from it.
            max = max.next_multiple_of(block).max(least.next_multiple_of(block));
        }
        (max, block)
    }

    /// Rows of a prefill call; `fixed` counts the tokens of every image, where all have one number.
    fn chunk(&mut self, spec: &ModelSpec, max: u64, fixed: Option<u64>) -> u64 {
        let same = fixed.filter(|_| self.limits.one_prefill_size);
        let default = self.profile.map_or(CHUNK, |p| p.graphs.prefill_chunk_size).min(max);
        let chunk = self.graphs.prefill_chunk_size.unwrap_or(same.unwrap_or(default));
        let target = self.target();
        if let Some(tokens) = same.filter(|tokens| *tokens != chunk) {
            self.refuse(
                format!(
                    "prefill_chunk_size is {chunk}; {target} it has to be the {tokens} tokens of an image"
                ),
                format!("use {tokens}, or leave it out"),
            );
        }
        if let Some(step) = self.limits.prefill_chunk_multiple.filter(|s| !chunk.is_multiple_of(*s))
        {
            self.refuse(
                format!("prefill_chunk_size {chunk} is no multiple of {step}, which it has to be {target}"),
                format!("use {}", around(chunk, step)),
            );
        }
        if chunk > max {
            self.refuse(
                format!("prefill_chunk_size {chunk} exceeds max_seq_len {max}"),
                format!("use a chunk of up to {max}"),
            );
        }
        let windows = spec.text.layers.iter().filter_map(|l| match l.attention.kind {
            AttentionKind::Sliding { window } => Some(window),
            AttentionKind::Full => None,
        });
        if let (Some(most), Some(window)) = (self.limits.window_and_chunk, windows.max())
            && window.saturating_add(chunk) > most
        {
            self.refuse(
                format!(
                    "a window of {window} tokens and a chunk of {chunk} exceed {most} {target}"
                ),
                format!("use a chunk of up to {}", most.saturating_sub(window)),
            );
        }
        chunk
    }

    /// Image prefill sizes: as said, or one for each rounded-up number of soft tokens.
    fn image_prefill(&mut self, soft_tokens: &[u64], max: u64) -> Vec<u64> {
        let step = self.profile.map_or(IMAGE_MULTIPLE, |p| p.graphs.image_chunk_multiple);
        let Some(said) = self.graphs.image_prefill_chunk_size.as_deref() else {
            let mut list: Vec<u64> = soft_tokens.iter().map(|t| t.next_multiple_of(step)).collect();
            list.dedup();
            return list;
        };
        if soft_tokens.is_empty() {
            self.refuse(
                "image_prefill_chunk_size is set, but the programs take no images".to_owned(),
                "leave it out".to_owned(),
            );
            return Vec::new();
        }
        let target = self.target();
        let mut sizes = said.to_vec();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        sizes.dedup();
        for size in &sizes {
            if !size.is_multiple_of(step) {
                self.refuse(
                    format!("image_prefill_chunk_size {size} is no multiple of {step}, which it has to be {target}"),
                    format!("use {}", around(*size, step)),
                );
            }
            if *size > max {
                self.refuse(
                    format!("image_prefill_chunk_size {size} exceeds max_seq_len {max}"),
                    format!("use sizes up to {max}"),
                );
            }
        }
        let (largest, most) = (sizes.first().copied(), soft_tokens.first().copied());
        if let (Some(largest), Some(most)) = (largest, most)
            && largest < most
        {
            self.refuse(
                format!("the largest image_prefill_chunk_size is {largest}, an image takes up to {most} tokens"),
                format!("add {}, or leave {most} out of max_soft_tokens", most.next_multiple_of(step)),
            );
            return sizes;
        }
        let serves = |t: &u64| sizes.iter().rev().find(|size| *size >= t);
        let used: Vec<u64> = soft_tokens.iter().filter_map(serves).copied().collect();
        let idle: Vec<u64> = sizes.iter().filter(|s| !used.contains(s)).copied().collect();
        if !idle.is_empty() {
            self.refuse(
                format!(
                    "no image uses image_prefill_chunk_size {}: each number of soft tokens ({}) takes the smallest size that holds it",
                    list(&idle, 8),
                    list(soft_tokens, 8)
                ),
                format!("leave {} out", list(&idle, 8)),
            );
        }
        sizes
    }

    /// The one image prefill size of a model whose images all have `tokens` tokens.
    fn fixed_image_prefill(&mut self, tokens: u64, max: u64) -> Vec<u64> {
        let said = self.graphs.image_prefill_chunk_size.as_deref();
        if let Some(said) = said.filter(|said| *said != [tokens]) {
            self.refuse(
                format!(
                    "image_prefill_chunk_size is {}; every image of this model is {tokens} tokens",
                    list(said, 8)
                ),
                format!("use {tokens}, or leave it out"),
            );
        } else if tokens > max {
            self.refuse(
                format!("an image of {tokens} tokens exceeds max_seq_len {max}"),
                format!("use max_seq_len {tokens} or more, or [towers] vision = false"),
            );
        }
        vec![tokens]
    }

    fn kv_dtype(&mut self, float: DType) -> DType {
        let of = |kv: KvDtype| match kv {
            KvDtype::F32 => DType::F32,
            KvDtype::F16 => DType::F16,
            KvDtype::Bf16 => DType::BF16,
            KvDtype::Fp8 => DType::F8E4M3,
        };
        let Some(said) = self.graphs.kv_dtype else {
            return self.profile.map_or(float, |p| of(p.graphs.kv_dtype));
        };
        if let Some(profile) = self.profile
            && !profile.supports.kv_dtypes.contains(&said)
        {
            let name = |kv: &KvDtype| {
                KvDtype::NAMES.iter().find(|(_, k)| k == kv).map_or("", |(name, _)| *name)
            };
            let known: Vec<&str> = profile.supports.kv_dtypes.iter().map(name).collect();
            let rule = format!("{} has no cache in {}", profile.name, name(&said));
            self.refuse(rule, format!("use kv_dtype {}", list(&known, 8)));
        }
        of(said)
    }
}

/// The multiples of `step` on both sides of `n`.
fn around(n: u64, step: u64) -> String {
    match n / step.max(1) {
        0 => step.to_string(),
        below => format!("{} or {}", below * step, (below + 1) * step),
    }
}
