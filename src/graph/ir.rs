//! The intermediate representation: static programs in single-assignment form.
//!
//! A program is what **every** device of its group runs (SPMD): shapes are those of one device, weights are that
//! device's shards, and the only difference between devices is their rank, which [`Op::Embed`] and [`Op::Experts`] use
//! to find their first row and their first expert. Values are written once. State (the KV cache) is named, outlives a
//! run, and is touched only by the operations that name it, in program order. Collectives are operations like others.
//!
//! Operations stand at the level at which an engine has kernels: a linear layer with its weight's encoding and
//! activation rule, an attention over a paged cache. Positions, tables and masks are inputs that the host fills.

use serde::{Deserialize, Serialize};

use crate::model::{Activation, RopeSpec};
use crate::recipe::Activations;
use crate::tensor::{DType, Shape};

/// Everything that a model was compiled to: the programs and the state they share.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
pub struct Programs {
    /// Cache tensors, each in one shape for all programs.
    pub kv: Vec<KvTensor>,
    /// Programs in the order of their names' roles: prefill, image prefill (largest first), decode (largest first),
    /// draft, vision (largest first), projector.
    pub programs: Vec<Program>,
}

/// One static graph.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Unique name, e.g. `prefill`, `image_prefill_384`, `decode_b8`, `vision_t280`.
    pub name: String,
    /// What it computes and for which sizes.
    pub kind: ProgramKind,
    /// Number of devices that run it together.
    pub devices: u32,
    /// Weights that it reads, each once.
    pub weights: Vec<WeightRef>,
    /// Values that the host supplies, in positional order.
    pub inputs: Vec<Port>,
    /// Values that the host gets back, equal on all devices.
    pub outputs: Vec<Port>,
    /// Types of all values, by [`ValueId`].
    pub values: Vec<ValueType>,
    /// Operations in execution order.
    pub nodes: Vec<Node>,
}

/// What a program is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProgramKind {
    /// One sequence, `chunk` tokens at a time.
    Prefill {
        /// Rows of a call.
        chunk: u64,
    },
    /// One run of image tokens of one sequence.
    ImagePrefill {
        /// Rows of a call; a shorter run is padded.
        chunk: u64,
    },
    /// One token of each of `batch` sequences.
    Decode {
        /// Sequences of a call.
        batch: u64,
    },
    /// One step of the draft head.
    Draft {
        /// Sequences of a call.
        batch: u64,
    },
    /// One image through the encoder.
    Vision {
        /// Soft tokens that come out.
        soft_tokens: u64,
    },
    /// Soft tokens into the text space.
    Project {
        /// Rows of a call.
        soft_tokens: u64,
    },
}

/// A value's place in [`Program::values`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ValueId(pub u32);

/// Element type and shape on one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValueType {
    /// Element type at the interface. A reference executor computes floats in f32 whatever this says.
    pub dtype: DType,
    /// Fixed extents; rank 0 is a scalar.
    pub shape: Shape,
}

/// A named input or output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// Name, e.g. `position_ids`.
    pub name: String,
    /// The value.
    pub value: ValueId,
}

/// A weight's place in [`Program::weights`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct WeightId(pub u32);

/// A stored weight as a program reads it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightRef {
    /// Logical name, e.g. `blk.7.ffn_down.weight`. Weights are stored once for all programs.
    pub name: String,
    /// Shape of one device's shard, padding included; the whole shape for an expert.
    pub shape: Shape,
    /// Which part of the weight a device holds.
    pub share: WeightShare,
}

/// Which part of a weight a device holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum WeightShare {
    /// All of it.
    Whole,
    /// A range of rows: outputs of a linear layer, entries of a vocabulary.
    Rows,
    /// A range of columns: inputs of a linear layer. Its products are partial sums.
    Cols,
    /// All of it, but only on the device that owns the expert.
    Expert,
}

/// A tensor of the cache. One stands for each layer that stores keys and values, and each of the two.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvTensor {
    /// Name, e.g. `kv.5.key`.
    pub name: String,
    /// Decoder layer that writes it.
    pub layer: u32,
    /// Element type of the cache.
    pub dtype: DType,
    /// How it grows.
    pub layout: KvLayout,
    /// Heads on one device.
    pub heads: u64,
    /// Width of a head.
    pub head_dim: u64,
}

/// How a cache tensor is laid out on a device; the heads and their width are its other axes:
/// `[blocks or slots, heads, tokens, head_dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvLayout {
    /// Blocks of tokens, found through a sequence's block table. The number of blocks is chosen after compilation.
    Paged {
        /// Tokens of a block.
        block: u64,
    },
    /// One ring for every sequence: position p lies in slot `p mod tokens`.
    Window {
        /// Sequences.
        slots: u64,
        /// Tokens that a ring holds.
        tokens: u64,
    },
}

/// A cache tensor's place in [`Programs::kv`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KvId(pub u32);

/// The key and the value tensor of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvPair {
    /// Keys.
    pub key: KvId,
    /// Values.
    pub value: KvId,
}

/// One operation with its operands.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// What is done.
    pub op: Op,
    /// Operands, in the order that the operation states.
    pub inputs: Vec<ValueId>,
    /// Results; operations that only write state have none.
    pub outputs: Vec<ValueId>,
}

/// Which rows of the call itself a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum OwnRows {
    /// Those before it and itself.
    Causal,
    /// All valid rows that lie in the window (one image, Gemma 4).
    ImageInWindow,
    /// All valid rows, also beyond the window (one image, Gemma 3 and Gemma 4 unified).
    Image,
}

/// A matrix of a linear layer, with what is added to its products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Projection {
    /// Matrix `[rows, columns]`.
    pub weight: WeightId,
    /// Vector `[rows]`.
    pub bias: Option<WeightId>,
}

/// What a node does. `b` is the batch, `q` the rows of a sequence, `h` heads, `d` the width of a head, `H` the width of
/// the residual stream; operands are listed in order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(clippy::large_enum_variant)] // programs hold a few thousand nodes
pub enum Op {
    /// Rows of a table times a factor. Operand: ids `[b, q]`; an id outside the device's rows gives a zero row.
    /// Result `[b, q, columns]`: a partial sum when the table is cut by rows.
    Embed {
        /// Table `[rows, columns]`.
        table: WeightId,
        /// Factor.
        scale: f64,
    },
    /// `x Wᵀ + bias` over the last axis, for every projection: x is read (and rounded) once for all of them. Operand: x
    /// `[…, columns]`. Results: `[…, rows]` of each.
    Linear {
        /// What x is multiplied with, one or more.
        projections: Vec<Projection>,
        /// How x is rounded before the products; in the program's own type if nothing is said.
        activations: Option<Activations>,
    },
    /// `x / sqrt(mean(x²) + eps) · w` over the last axis; without a weight no factor, with `one_plus` the factor
    /// `1 + w`. Operand: x.
    RmsNorm {
        /// Factors `[last axis]`.
        weight: Option<WeightId>,
        /// Added to the mean square.
        eps: f64,
        /// Whether the factor is `1 + w`.
        one_plus: bool,
    },
    /// `(x − mean) / sqrt(variance + eps) · w + bias` over the last axis. Operand: x.
    LayerNorm {
        /// Factors `[last axis]`.
        weight: WeightId,
        /// Vector `[last axis]`.
        bias: Option<WeightId>,
        /// Added to the variance.
        eps: f64,
    },
    /// Rotates pairs `(i, i + d/2)` of each head. Operands: x `[b, q, h, d]`, positions `[b, q]`.
    Rope {
        /// Frequencies.
        rope: RopeSpec,
    },
    /// Rotates the first half of a head with the x coordinate and the second with y, each half in pairs
    /// `(i, i + d/4)` with frequencies `theta^(-2i / (d/2))`. Operands: x `[1, P, h, d]`, coordinates `[1, P, 2]`.
    AxialRope {
        /// Base of the frequencies.
        theta: f64,
    },
    /// The same elements in another shape. Operand: x.
    Reshape,
    /// Columns `start .. start + result's last extent` of the last axis. Operand: x.
    Columns {
        /// First column.
        start: u64,
    },
    /// Side by side along the last axis. Operands: two or more of equal other extents.
    Concat,
    /// Elementwise sum. Operands: two of one shape.
    Add,
    /// Elementwise product. Operands: two of one shape.
    Mul,
    /// Times a constant, plus a constant. Operand: x.
    Affine {
        /// Factor.
        scale: f64,
        /// Added after it.
        shift: f64,
    },
    /// Times a stored vector `[last axis]` or scalar `[1]`. Operand: x.
    ScaleBy {
        /// The factors.
        weight: WeightId,
    },
    /// Plus (or minus) a stored vector `[last axis]`. Operand: x.
    Shift {
        /// The vector.
        weight: WeightId,
        /// Whether it is subtracted.
        subtract: bool,
    },
    /// `min(max(x, low), high)` with stored scalars. Operand: x.
    Clamp {
        /// Lower bound `[1]`.
        low: WeightId,
        /// Upper bound `[1]`.
        high: WeightId,
    },
    /// `activation(gate) · up`. Operands: gate, up, of one shape.
    Gated {
        /// The activation.
        activation: Activation,
    },
    /// `activation(x)`. Operand: x.
    Activate {
        /// The activation.
        activation: Activation,
    },
    /// `cap · tanh(x / cap)`. Operand: x.
    Softcap {
        /// The cap.
        cap: f64,
    },
    /// Writes keys and values of all rows into their slots. Operands: k, v `[b, q, h, d]`, cache_position `[b, q]`,
    /// block_tables `[b, n]` (`[n]` when b is 1 in a prefill).
    KvWrite {
        /// The layer's cache.
        kv: KvPair,
    },
    /// Attention over the paged cache, which holds this call's rows already. Operands: q `[b, q, h, d]`,
    /// cache_position `[b, q]`, block_tables, and, where the program has them, attention_mask `[b, slots]` (a slot is
    /// visible when it is not 0) and query_position (scalar). A query sees visible slots up to its own; with
    /// [`OwnRows::Image`] also every slot of this call's valid rows. Result `[b, q, h·d]`.
    PagedAttention {
        /// The layer's cache.
        kv: KvPair,
        /// Factor on scores.
        scale: f64,
        /// `cap · tanh(score / cap)`.
        softcap: Option<f64>,
        /// Which rows of the call a query sees.
        own: OwnRows,
    },
    /// Attention over a ring of earlier positions and, when k and v are operands, this call's rows, which are not in
    /// the ring yet. Operands: q `[b, q, h, d]`, position_ids `[b, q]`, local_block_tables `[b]`, then k and v
    /// `[b, q, h, d]` if the call has own rows, then query_position (scalar) in prefill. A query at position p sees
    /// positions k with `p − window < k ≤ p`, and what [`OwnRows`] adds; rows after query_position are padding.
    /// Result `[b, q, h·d]`.
    WindowAttention {
        /// The layer's cache.
        kv: KvPair,
        /// Positions in sight, the query's own included.
        window: u64,
        /// Factor on scores.
        scale: f64,
        /// `cap · tanh(score / cap)`.
        softcap: Option<f64>,
        /// Which rows of the call a query sees.
        own: OwnRows,
    },
    /// Writes the valid rows into the ring; of rows that share a slot the latest stays. Stands after the last reader.
    /// Operands: k, v `[b, q, h, d]`, position_ids `[b, q]`, local_block_tables `[b]`, then query_position (scalar) in
    /// prefill.
    WindowWrite {
        /// The layer's cache.
        kv: KvPair,
    },
    /// Attention of all rows over all rows. Operands: q, k, v `[1, P, h, d]`, and, where rows can be padding, a key mask
    /// `[1, P]` (a key is visible when it is 0, else it is added to the score). Result `[1, P, h·d]`.
    DenseAttention {
        /// Factor on scores.
        scale: f64,
    },
    /// One row. Operands: x `[1, q, H]`, index (scalar). Result `[1, 1, H]`.
    SelectRow,
    /// The best experts of each row: softmax over router scores, the top k, divided by their sum if `normalize`, times
    /// the expert's stored scale. Ties go to the lower index. Operand: scores `[b, q, E]`. Results: weights
    /// `[b, q, k]`, ids `[b, q, k]` (i32).
    Route {
        /// Experts a row uses.
        top_k: u64,
        /// Whether the weights are divided by their sum.
        normalize: bool,
        /// Scale of every expert `[E]`.
        expert_scale: Option<WeightId>,
    },
    /// `Σ w_e · down_e(activation(gate_e x) · up_e x)` over the chosen experts that this device owns. Operands: x
    /// `[b, q, H]`, weights and ids `[b, q, k]`. Result `[b, q, H]`, a partial sum over devices.
    Experts {
        /// Matrix `[2 · width, H]` of each expert, gate rows first.
        gate_up: Vec<WeightId>,
        /// Matrix `[H, width]` of each expert.
        down: Vec<WeightId>,
        /// The activation.
        activation: Activation,
        /// How the operand of each product is rounded.
        activations: Option<Activations>,
    },
    /// Rows of two tables, one for each axis, added: `table[x of the first] + table[y of the second]`, a zero row for
    /// padding. Operands: coordinates `[1, P, 2]`, padding `[1, P]` (true where a patch is padding). Result `[1, P, C]`.
    EmbedAxes {
        /// Table `[2, positions, C]`, or `[positions, 2, C]`.
        table: WeightId,
        /// Whether the axes are the table's first extent.
        axes_first: bool,
    },
    /// Average over cells of k × k patches, in the order of cells, times sqrt(columns); a cell divides by k² whatever
    /// it holds. Operands: x `[1, P, C]`, coordinates `[1, P, 2]`, padding `[1, P]` (true where a patch is padding).
    /// Results: rows `[1, P / k², C]`, and which of them hold an image cell `[1, P / k²]` (bool).
    PoolPatches {
        /// Side of a cell in patches.
        side: u64,
    },
    /// The logits of an ordered draft head: those of the tokens of the best centroids (ties go to the lower index) are
    /// `h · e`, all others are −∞ until [`Op::FillUnscored`] has seen the scores of all devices. Operands: h
    /// `[b, 1, H]`, centroid scores `[b, 1, centroids]`. Result `[b, 1, rows of the head]`; with a head cut by rows the
    /// tokens of this device.
    OrderedHead {
        /// Head `[vocabulary, H]`.
        head: WeightId,
        /// Token ids, grouped by centroid `[vocabulary]`.
        ordering: WeightId,
        /// Centroids whose tokens are scored.
        top_k: u64,
    },
    /// Elements that are −∞ become the smallest other one of their row minus 1. Operand: x.
    FillUnscored,
    /// Sum over devices. Operand: x.
    AllReduce,
    /// Parts of all devices side by side along the last axis, of which the first `keep` columns are real. Operand: x.
    AllGather {
        /// Columns that are kept.
        keep: u64,
    },
    /// Products of every patch with the kernels of a convolution whose stride is their side, plus a bias. Operand:
    /// patches `[1, P, channels · side²]`, each channel by channel, then row by row. Result `[1, P, C]`.
    EmbedPatches {
        /// Kernels `[C, channels, side, side]`.
        kernel: WeightId,
        /// Vector `[C]`.
        bias: Option<WeightId>,
    },
    /// Plus a stored table, row by row. Operand: x `[1, P, C]`.
    AddRows {
        /// Table `[P, C]`.
        table: WeightId,
    },
    /// Average over squares of side × side rows of a grid that is as wide as high, in the order of the squares. Operand:
    /// x `[1, P, C]`, P a square number. Result `[1, P / side², C]`.
    PoolGrid {
        /// Side of a square in rows of the grid.
        side: u64,
    },
    /// `x W` over the last axis, for a matrix stored by inputs. Operand: x `[…, inputs]`. Result `[…, outputs]`.
    Product {
        /// Matrix `[inputs, outputs]`.
        weight: WeightId,
    },
}

impl Op {
    /// Name in the text form.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Embed { .. } => "embed",
            Op::Linear { .. } => "linear",
            Op::RmsNorm { .. } => "rms_norm",
            Op::LayerNorm { .. } => "layer_norm",
            Op::Rope { .. } => "rope",
            Op::AxialRope { .. } => "axial_rope",
            Op::Reshape => "reshape",
            Op::Columns { .. } => "columns",
            Op::Concat => "concat",
            Op::Add => "add",
            Op::Mul => "mul",
            Op::Affine { .. } => "affine",
            Op::ScaleBy { .. } => "scale_by",
            Op::Shift { .. } => "shift",
            Op::Clamp { .. } => "clamp",
            Op::Gated { .. } => "gated",
            Op::Activate { .. } => "activate",
            Op::Softcap { .. } => "softcap",
            Op::KvWrite { .. } => "kv_write",
            Op::PagedAttention { .. } => "paged_attention",
            Op::WindowAttention { .. } => "window_attention",
            Op::WindowWrite { .. } => "window_write",
            Op::DenseAttention { .. } => "dense_attention",
            Op::SelectRow => "select_row",
            Op::Route { .. } => "route",
            Op::Experts { .. } => "experts",
            Op::EmbedAxes { .. } => "embed_axes",
            Op::PoolPatches { .. } => "pool_patches",
            Op::OrderedHead { .. } => "ordered_head",
            Op::FillUnscored => "fill_unscored",
            Op::AllReduce => "all_reduce",
            Op::AllGather { .. } => "all_gather",
            Op::EmbedPatches { .. } => "embed_patches",
            Op::AddRows { .. } => "add_rows",
            Op::PoolGrid { .. } => "pool_grid",
            Op::Product { .. } => "product",
        }
    }

    /// Weights that the operation reads, in the order of its fields.
    pub fn weights(&self) -> Vec<WeightId> {
        let some = |w: &Option<WeightId>| w.iter().copied().collect::<Vec<_>>();
        match self {
            Op::Embed { table, .. } | Op::EmbedAxes { table, .. } => vec![*table],
            Op::Linear { projections, .. } => {
                let each = projections.iter();
                each.flat_map(|p| [vec![p.weight], some(&p.bias)].concat()).collect()
            }
            Op::RmsNorm { weight, .. } => some(weight),
            Op::LayerNorm { weight, bias, .. } => [vec![*weight], some(bias)].concat(),
            Op::ScaleBy { weight } | Op::Shift { weight, .. } => vec![*weight],
            Op::Clamp { low, high } => vec![*low, *high],
            Op::Route { expert_scale, .. } => some(expert_scale),
            Op::Experts { gate_up, down, .. } => [gate_up.clone(), down.clone()].concat(),
            Op::OrderedHead { head, ordering, .. } => vec![*head, *ordering],
            Op::EmbedPatches { kernel, bias } => [vec![*kernel], some(bias)].concat(),
            Op::AddRows { table } => vec![*table],
            Op::Product { weight } => vec![*weight],
            _ => Vec::new(),
        }
    }

    /// The cache that the operation touches, and whether it writes it.
    pub fn kv(&self) -> Option<(KvPair, bool)> {
        match self {
            Op::PagedAttention { kv, .. } | Op::WindowAttention { kv, .. } => Some((*kv, false)),
            Op::KvWrite { kv } | Op::WindowWrite { kv } => Some((*kv, true)),
            _ => None,
        }
    }
}

impl Program {
    /// Type of a value; `None` when there is no such value.
    pub fn value(&self, id: ValueId) -> Option<&ValueType> {
        self.values.get(id.0 as usize)
    }

    /// A weight; `None` when there is no such weight.
    pub fn weight(&self, id: WeightId) -> Option<&WeightRef> {
        self.weights.get(id.0 as usize)
    }

    /// The input of that name.
    pub fn input(&self, name: &str) -> Option<&Port> {
        self.inputs.iter().find(|p| p.name == name)
    }
}

impl Programs {
    /// The program of that name.
    pub fn get(&self, name: &str) -> Option<&Program> {
        self.programs.iter().find(|p| p.name == name)
    }

    /// A cache tensor; `None` when there is no such tensor.
    pub fn kv(&self, id: KvId) -> Option<&KvTensor> {
        self.kv.get(id.0 as usize)
    }
}

impl KvTensor {
    /// Bytes of one block on one device (paged), or of the whole tensor (window); `None` beyond 64 bits.
    pub fn unit_bytes(&self) -> Option<u64> {
        let tokens = match self.layout {
            KvLayout::Paged { block } => block,
            KvLayout::Window { slots, tokens } => slots.checked_mul(tokens)?,
        };
        let elements = tokens.checked_mul(self.heads)?.checked_mul(self.head_dim)?;
        Some(elements.checked_mul(u64::from(self.dtype.bits()))?.div_ceil(8))
    }
}
