//! What a model is, fully typed: everything that a graph, a memory estimate or a reference run reads.
//!
//! Numbers come from the configuration alone. A structural number that the configuration does not state is an
//! error; the few documented defaults of transformers that are followed are named where they are read.

/// A model: its decoder and what stands around it.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// Family name, e.g. `gemma4`.
    pub family: &'static str,
    /// Class name that the configuration gives (`architectures[0]`), if any.
    pub architecture: Option<String>,
    /// `model_type` of the configuration.
    pub model_type: String,
    /// The decoder. For a draft model its own small decoder.
    pub text: TextSpec,
    /// Image encoder or embedder.
    pub vision: Option<VisionSpec>,
    /// Audio encoder or embedder.
    pub audio: Option<AudioSpec>,
    /// Present when the model is a draft head that runs beside a target model.
    pub draft: Option<DraftSpec>,
    /// Special token ids.
    pub tokens: SpecialTokens,
}

/// A decoder over tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct TextSpec {
    /// Rows of the token embedding.
    pub vocab_size: u64,
    /// Width of the residual stream.
    pub hidden_size: u64,
    /// Longest position that the model was trained for.
    pub max_positions: u64,
    /// The layers, in order.
    pub layers: Vec<LayerSpec>,
    /// Every RMS normalisation of the decoder.
    pub norm: NormSpec,
    /// Activation of the gated MLPs and experts.
    pub activation: Activation,
    /// Factor on embedding rows (not on rows that an encoder supplies): 1, or sqrt(hidden) for Gemma. The exact
    /// value; transformers rounds it to bf16 in bf16 runs.
    pub embedding_scale: f64,
    /// Whether the head is the embedding table.
    pub tied_head: bool,
    /// `c · tanh(x / c)` on logits.
    pub logit_softcap: Option<f64>,
    /// `c · tanh(x / c)` on attention scores.
    pub attention_softcap: Option<f64>,
    /// Which queries see which keys inside an image.
    pub image_attention: ImageAttention,
    /// Per-layer embeddings beside the residual stream (Gemma 4 E models).
    pub per_layer_input: Option<PerLayerInput>,
}

/// One decoder layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// Attention.
    pub attention: AttentionSpec,
    /// The dense gated MLP; with [`LayerSpec::moe`] it runs beside the experts.
    pub mlp: Option<MlpSpec>,
    /// Experts.
    pub moe: Option<MoeSpec>,
    /// Whether attention and MLP outputs are normalised again before they are added (Gemma).
    pub post_norms: bool,
    /// Whether a learned scalar multiplies the layer's output.
    pub output_scale: bool,
}

/// Attention of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// Which keys a query sees.
    pub kind: AttentionKind,
    /// Query heads.
    pub q_heads: u64,
    /// Key and value heads; query head j reads head `j / (q_heads / kv_heads)`.
    pub kv_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Rotation of queries and keys.
    pub rope: RopeSpec,
    /// Factor on scores.
    pub scale: f64,
    /// Whether queries and keys are RMS-normalised per head, with weights, before the rotation.
    pub qk_norm: bool,
    /// Whether values are RMS-normalised per head, without weights.
    pub v_norm: bool,
    /// Where values come from.
    pub values: ValueSource,
    /// Where keys and values come from.
    pub kv: KvSource,
    /// Whether q, k and v carry a bias.
    pub qkv_bias: bool,
    /// Whether the output projection carries a bias.
    pub output_bias: bool,
}

/// Which keys a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionKind {
    /// Every earlier position and its own.
    Full,
    /// The last `window` positions, its own included.
    Sliding {
        /// Keys in sight.
        window: u64,
    },
}

/// Where a layer's values come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueSource {
    /// A projection of their own.
    Projection,
    /// The raw key projection, before its norm and rotation (Gemma 4, `attention_k_eq_v`).
    Keys,
}

/// Where a layer's keys and values come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvSource {
    /// Its own projections; the layer needs cache.
    Own,
    /// The stored states of that earlier layer.
    Layer(usize),
    /// The target model's states: those of its last caching layer of the same kind (draft heads).
    Target,
}

/// Rotary position embedding in the "rotate half" layout: element i of a head pairs with `i + head_dim / 2`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct RopeSpec {
    /// Base of the frequencies `theta^(-2i / head_dim)`.
    pub theta: f64,
    /// Elements of a head that turn; pairs from `rotary_dims / 2` up stay as they are.
    pub rotary_dims: u64,
    /// Change of the frequencies.
    pub scaling: RopeScaling,
}

/// Change of rotary frequencies; formulas as in transformers 5.24 `modeling_rope_utils`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum RopeScaling {
    /// None.
    Default,
    /// Every frequency divided by `factor`.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// Gemma 4: only `rotary_dims / 2` frequencies, the exponent still over the whole head, divided by `factor`.
    Proportional {
        /// Divisor.
        factor: f64,
    },
    /// Llama 3: low frequencies divided by `factor`, a ramp between the two wavelengths.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// `low_freq_factor`.
        low: f64,
        /// `high_freq_factor`.
        high: f64,
        /// Positions of the original training.
        original_positions: u64,
    },
    /// YaRN: a ramp between interpolated and original frequencies, and a factor on cos and sin.
    Yarn {
        /// Divisor of interpolated frequencies.
        factor: f64,
        /// Positions of the original training.
        original_positions: u64,
        /// Ramp end in rotations, fast side (32 unless stated).
        beta_fast: f64,
        /// Ramp end in rotations, slow side (1 unless stated).
        beta_slow: f64,
        /// Whether the ramp's ends are rounded to whole elements (true unless stated).
        truncate: bool,
        /// Factor on cos and sin.
        attention_factor: f64,
    },
}

/// A dense gated MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MlpSpec {
    /// Inner width.
    pub width: u64,
    /// Whether its three matrices carry biases.
    pub bias: bool,
}

/// Experts of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeSpec {
    /// Number of experts.
    pub experts: u64,
    /// Experts that a token uses.
    pub top_k: u64,
    /// Inner width of one expert.
    pub width: u64,
    /// Whether the chosen weights are divided by their sum.
    pub norm_top_k: bool,
    /// How the router scores.
    pub router: RouterKind,
}

/// How a router scores experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterKind {
    /// Softmax over a projection of the layer's normalised input.
    Softmax,
    /// Gemma 4: reads the residual before any norm, normalised without weights, times a learned scale and
    /// `hidden^-0.5`; a learned scale per expert multiplies the chosen weights.
    ScaledResidual,
}

/// An RMS normalisation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormSpec {
    /// Added to the mean square.
    pub eps: f64,
    /// Whether the factor is `1 + w` (Gemma 3) rather than `w`.
    pub one_plus: bool,
}

/// An activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// GELU, tanh approximation.
    GeluTanh,
}

/// Which queries see which keys inside one image (a run of image or video tokens).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageAttention {
    /// Causal like text.
    Causal,
    /// Sliding layers see the whole image as far as the window reaches, full layers stay causal (Gemma 4,
    /// transformers 5.13 and later).
    SlidingWindowed,
    /// Full layers see the whole image, sliding layers as far as the window reaches (Gemma 3, transformers 5.24).
    Windowed,
    /// Full layers see the whole image, sliding layers also beyond the window (Gemma 4 unified).
    Everywhere,
}

/// Per-layer embeddings (Gemma 4 E models).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PerLayerInput {
    /// Width per layer.
    pub width: u64,
    /// Rows of the per-layer token table.
    pub vocab_size: u64,
}

/// How images become rows of the text space.
#[derive(Debug, Clone, PartialEq)]
pub enum VisionSpec {
    /// A transformer over patches.
    Tower(VisionTower),
    /// Gemma 4 unified: patches are embedded directly.
    Embedder(VisionEmbedder),
    /// The SigLIP encoder of Gemma 3.
    Siglip(SiglipTower),
}

/// Gemma 4's image encoder.
#[derive(Debug, Clone, PartialEq)]
pub struct VisionTower {
    /// Width.
    pub hidden_size: u64,
    /// Inner width of the MLP.
    pub mlp_width: u64,
    /// Layers.
    pub layers: u64,
    /// Query heads.
    pub q_heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Side of a patch in pixels.
    pub patch_size: u64,
    /// Side of the square of patches that is averaged into one soft token.
    pub pooling: u64,
    /// Positions per axis in the table.
    pub position_table: u64,
    /// Soft tokens of an image unless the user asks otherwise.
    pub soft_tokens: u64,
    /// Base of the two-axis rotation: the first half of a head turns with x, the second with y.
    pub rope_theta: f64,
    /// Norm epsilon.
    pub norm_eps: f64,
    /// Activation of the gated MLP.
    pub activation: Activation,
    /// Whether pooled rows are shifted and scaled by learned statistics.
    pub standardize: bool,
    /// Whether linears clamp their input and output to stored bounds.
    pub clipped_linears: bool,
    /// Into the text space.
    pub projector: ProjectorSpec,
}

/// Gemma 4 unified's image embedder.
#[derive(Debug, Clone, PartialEq)]
pub struct VisionEmbedder {
    /// Side of a base patch in pixels.
    pub patch_size: u64,
    /// Base patches per side of a merged patch, which is one soft token.
    pub pooling: u64,
    /// Width of the embedding.
    pub width: u64,
    /// Positions per axis in the table.
    pub position_table: u64,
    /// Soft tokens of an image unless the user asks otherwise.
    pub soft_tokens: u64,
    /// Epsilon of the three layer norms: 1e-5, the default of torch's LayerNorm.
    pub layer_norm_eps: f64,
    /// Into the text space.
    pub projector: ProjectorSpec,
}

/// SigLIP, as Gemma 3 uses it: every picture has one size, and becomes one number of soft tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct SiglipTower {
    /// Width.
    pub hidden_size: u64,
    /// Inner width of the MLP (two matrices, not gated).
    pub mlp_width: u64,
    /// Layers.
    pub layers: u64,
    /// Heads.
    pub heads: u64,
    /// Side of the square image in pixels.
    pub image_size: u64,
    /// Side of a patch in pixels.
    pub patch_size: u64,
    /// Activation of the MLP.
    pub activation: Activation,
    /// Epsilon of the layer norms.
    pub layer_norm_eps: f64,
    /// Rows that one image becomes after average pooling.
    pub soft_tokens: u64,
    /// Into the text space; its norm carries weights (`1 + w`) and its matrix is stored input × output.
    pub projector: ProjectorSpec,
}

impl SiglipTower {
    /// Patches along a side of the image.
    pub fn side(&self) -> u64 {
        self.image_size.checked_div(self.patch_size).unwrap_or(0)
    }

    /// Patches of an image.
    pub fn patches(&self) -> u64 {
        self.side().saturating_mul(self.side())
    }

    /// Values of a patch: three colours of each of its pixels.
    pub fn patch_values(&self) -> u64 {
        self.patch_size.saturating_mul(self.patch_size).saturating_mul(3)
    }

    /// Side of the square of patches that is averaged into one soft token; 0 when there are more tokens than patches.
    pub fn pooling(&self) -> u64 {
        self.side().checked_div(self.soft_tokens.isqrt()).unwrap_or(0)
    }
}

/// How sound becomes rows of the text space.
#[derive(Debug, Clone, PartialEq)]
pub enum AudioSpec {
    /// A conformer over mel frames.
    Tower(AudioTower),
    /// Gemma 4 unified: raw samples, `samples` at 16 kHz a token.
    Embedder {
        /// Samples per token.
        samples: u64,
        /// Into the text space.
        projector: ProjectorSpec,
    },
}

/// Gemma 4's audio conformer.
#[derive(Debug, Clone, PartialEq)]
pub struct AudioTower {
    /// Width.
    pub hidden_size: u64,
    /// Layers.
    pub layers: u64,
    /// Heads.
    pub heads: u64,
    /// Output channels of the two subsampling convolutions; the first also counts the mel bins.
    pub conv_channels: [u64; 2],
    /// Width of the depthwise convolution.
    pub conv_kernel: u64,
    /// Factor on the feed-forward outputs.
    pub residual_weight: f64,
    /// Frames per attention chunk.
    pub chunk: u64,
    /// Frames in sight to the left, its own included.
    pub context_left: u64,
    /// Frames in sight to the right.
    pub context_right: u64,
    /// `c · tanh(x / c)` on attention scores.
    pub logit_cap: f64,
    /// Score that replaces a masked one.
    pub masked_score: f64,
    /// Bound that activations are clamped to.
    pub clamp: f64,
    /// Norm epsilon.
    pub norm_eps: f64,
    /// Activation.
    pub activation: Activation,
    /// Whether linears clamp their input and output to stored bounds.
    pub clipped_linears: bool,
    /// Width of the tower's output.
    pub output_size: u64,
    /// Into the text space.
    pub projector: ProjectorSpec,
}

/// RMS normalisation, then a matrix into the text space.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProjectorSpec {
    /// Width of its input.
    pub inputs: u64,
    /// Width of its output: the text width.
    pub outputs: u64,
    /// Epsilon of the norm.
    pub norm_eps: f64,
}

/// A draft head.
///
/// Its embedding table serves only as its head: input rows are the target's embedding and hidden state. Its position
/// stays that of the newest token over all draft steps, and its sliding layers see the last `window + 1` cached keys
/// (transformers 5.24).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftSpec {
    /// Width of the target model.
    pub target_hidden_size: u64,
    /// Present when logits are computed for the tokens of the best centroids only.
    pub ordered: Option<OrderedHead>,
}

/// Ordered embeddings of a draft head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OrderedHead {
    /// Centroids; the token ordering holds `vocab / centroids` tokens for each.
    pub centroids: u64,
    /// Centroids whose tokens are scored.
    pub top_k: u64,
}

/// Special token ids; `None` where the configuration gives none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[allow(missing_docs)] // each field is the token's usual name
pub struct SpecialTokens {
    pub bos: Option<u64>,
    /// Any of these ends generation.
    pub eos: Vec<u64>,
    pub pad: Option<u64>,
    /// Placeholder of an image's rows.
    pub image: Option<u64>,
    /// Placeholder of a video frame's rows.
    pub video: Option<u64>,
    /// Placeholder of a sound's rows.
    pub audio: Option<u64>,
    pub begin_image: Option<u64>,
    pub end_image: Option<u64>,
    pub begin_audio: Option<u64>,
    pub end_audio: Option<u64>,
}

impl LayerSpec {
    /// Whether the layer stores keys and values of its own.
    pub fn caches(&self) -> bool {
        self.attention.kv == KvSource::Own
    }
}

impl AttentionSpec {
    /// Width of all query heads together.
    pub fn q_width(&self) -> u64 {
        self.q_heads.saturating_mul(self.head_dim)
    }

    /// Width of all key heads together.
    pub fn kv_width(&self) -> u64 {
        self.kv_heads.saturating_mul(self.head_dim)
    }

    /// The window of a sliding layer.
    pub fn window(&self) -> Option<u64> {
        match self.kind {
            AttentionKind::Full => None,
            AttentionKind::Sliding { window } => Some(window),
        }
    }
}
