//! What each device holds.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::tensor::{Axis, Encoding, Shape, Slice, Span};

/// Which slice of which weight, which heads, vocabulary rows and experts each device holds.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Placement {
    /// Devices that share the model, at least 1; they are numbered from 0.
    pub devices: u32,
    /// Devices that run the image encoder and the projector, in the order of their shares.
    pub vision_devices: Vec<u32>,
    /// One for each decoder layer; empty for a model without a family.
    pub layers: Vec<LayerShare>,
    /// One for each layer of the draft head.
    pub draft_layers: Vec<LayerShare>,
    /// Heads and MLP of the image encoder on one of the vision devices; its layers are all alike.
    pub vision: Option<LayerShare>,
    /// Rows of the embedding and the head.
    pub vocabulary: Option<VocabularyShare>,
    /// Rows of the per-layer token table.
    pub per_layer_vocabulary: Option<VocabularyShare>,
    /// Rows of the draft's head.
    pub draft_vocabulary: Option<VocabularyShare>,
    /// Every stored weight by logical name.
    pub weights: BTreeMap<String, PlacedWeight>,
}

/// One device's share of a layer; the same on every device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerShare {
    /// Query heads on a device.
    pub q_heads: u64,
    /// Key and value heads on a device.
    pub kv_heads: u64,
    /// Devices that hold the same key head: 1 unless there are more devices than key heads.
    pub kv_replication: u64,
    /// Padded inner width of the dense MLP on a device; `None` without one.
    pub mlp_width: Option<u64>,
    /// Experts on a device; `None` without experts.
    pub experts: Option<u64>,
}

/// One device's share of a vocabulary. Device d holds the tokens from `d × local`, so that all padding lies at the end of
/// the gathered rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VocabularyShare {
    /// Tokens of the model.
    pub real: u64,
    /// Padded rows on a device.
    pub local: u64,
}

/// A stored weight with its cut.
#[derive(Debug, Clone, PartialEq)]
pub struct PlacedWeight {
    /// Shape of the whole weight, as the container stores it (never of rank 0).
    pub shape: Shape,
    /// Planes, the same for the whole weight and for its pieces.
    pub encoding: Arc<Encoding>,
    /// Who holds what of it.
    pub cut: Cut,
}

/// Who holds what of a weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cut {
    /// Stored once, whole on each of these devices; empty for weights that stay with the host.
    Whole {
        /// In ascending order for the text model, in the order of the list for the vision tower.
        devices: Vec<u32>,
    },
    /// Cut along dimension 0.
    Rows(Shares),
    /// Cut along the last dimension.
    Cols(Shares),
}

/// One span for each member device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shares {
    /// The member devices.
    pub devices: Vec<u32>,
    /// What each of them holds; equal spans are stored once.
    pub spans: Vec<Span>,
    /// Padded length of every piece along the cut: that of the largest.
    pub extent: u64,
}

/// A stored piece of a weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// Number among the weight's pieces, in the order of the first device that holds each.
    pub index: u32,
    /// Pieces of the weight.
    pub count: u32,
    /// What it is.
    pub slice: Slice,
    /// The devices that hold it, at least one.
    pub devices: Vec<u32>,
}

impl Shard {
    /// Name of the shard's entry: `NAME@index/count`.
    pub fn name(&self, weight: &str) -> String {
        format!("{weight}@{}/{}", self.index, self.count)
    }
}

/// Bytes of weights that one device holds, scales included, alignment left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceBytes {
    /// Of whole weights.
    pub whole: u64,
    /// Of shards, padding included.
    pub shards: u64,
    /// Zeros among the shards' bytes that only make shapes equal.
    pub padding: u64,
}

impl DeviceBytes {
    /// Everything that the device holds.
    pub fn total(&self) -> u64 {
        self.whole.saturating_add(self.shards)
    }
}

impl Cut {
    /// Direction and spans of a weight that is cut.
    pub fn shares(&self) -> Option<(Axis, &Shares)> {
        match self {
            Cut::Whole { .. } => None,
            Cut::Rows(shares) => Some((Axis::Rows, shares)),
            Cut::Cols(shares) => Some((Axis::Cols, shares)),
        }
    }

    /// The devices that hold the weight or a piece of it.
    pub fn devices(&self) -> &[u32] {
        match self {
            Cut::Whole { devices } => devices,
            Cut::Rows(shares) | Cut::Cols(shares) => &shares.devices,
        }
    }

    /// What one device holds; `None` for a whole weight and for a device that holds nothing of it.
    pub fn span(&self, device: u32) -> Option<Span> {
        let (_, shares) = self.shares()?;
        let member = shares.devices.iter().position(|&d| d == device)?;
        shares.spans.get(member).copied()
    }
}

impl PlacedWeight {
    /// Shape on each device that holds it.
    pub fn local_shape(&self) -> Shape {
        let Some((axis, shares)) = self.cut.shares() else { return self.shape.clone() };
        let slice = Slice { axis, span: Span { start: 0, len: 0 }, extent: shares.extent };
        // Only weights of rank 1 and 2 are cut.
        slice.shape(&self.shape).unwrap_or_else(|| self.shape.clone())
    }

    /// The pieces as they are stored: distinct spans, in the order of the first device that holds each. Empty for a
    /// whole weight.
    pub fn shards(&self) -> Vec<Shard> {
        let Some((axis, shares)) = self.cut.shares() else { return Vec::new() };
        let mut shards: Vec<Shard> = Vec::new();
        for (&device, &span) in shares.devices.iter().zip(&shares.spans) {
            match shards.iter_mut().find(|s| s.slice.span == span) {
                Some(shard) => shard.devices.push(device),
                None => shards.push(Shard {
                    index: shards.len() as u32,
                    count: 0,
                    slice: Slice { axis, span, extent: shares.extent },
                    devices: vec![device],
                }),
            }
        }
        let count = shards.len() as u32;
        shards.iter_mut().for_each(|s| s.count = count);
        shards
    }

    /// Bytes of all planes of one stored piece, and how many of them are padding.
    pub fn shard_bytes(&self, slice: &Slice) -> (u64, u64) {
        let (mut bytes, mut held) = (0u64, 0u64);
        for plane in &self.encoding.planes {
            if let Some(p) = slice.plane(plane, &self.shape) {
                bytes = bytes.saturating_add(p.piece_rows.saturating_mul(p.piece_row));
                held = held.saturating_add(p.rows.saturating_mul(p.bytes));
            }
        }
        (bytes, bytes.saturating_sub(held))
    }
}

impl Placement {
    /// A stored weight.
    pub fn weight(&self, name: &str) -> Option<&PlacedWeight> {
        self.weights.get(name)
    }

    /// Who holds what of a stored weight.
    pub fn cut(&self, name: &str) -> Option<&Cut> {
        Some(&self.weights.get(name)?.cut)
    }

    /// Shape of a stored weight on each device that holds it.
    pub fn local_shape(&self, name: &str) -> Option<Shape> {
        Some(self.weights.get(name)?.local_shape())
    }

    /// Whether all is on one device.
    pub fn single(&self) -> bool {
        self.devices <= 1
    }

    /// Bytes of weights on every device.
    pub fn device_bytes(&self) -> Vec<DeviceBytes> {
        let mut out = vec![DeviceBytes::default(); self.devices as usize];
        for weight in self.weights.values() {
            match &weight.cut {
                Cut::Whole { devices } => {
                    let bytes = weight.encoding.bytes(&weight.shape).unwrap_or(0);
                    for &device in devices {
                        if let Some(sum) = out.get_mut(device as usize) {
                            sum.whole = sum.whole.saturating_add(bytes);
                        }
                    }
                }
                Cut::Rows(_) | Cut::Cols(_) => {
                    for shard in weight.shards() {
                        let (bytes, padding) = weight.shard_bytes(&shard.slice);
                        for &device in &shard.devices {
                            if let Some(sum) = out.get_mut(device as usize) {
                                sum.shards = sum.shards.saturating_add(bytes);
                                sum.padding = sum.padding.saturating_add(padding);
                            }
                        }
                    }
                }
            }
        }
        out
    }
}
