//! What devices hold: the input of every policy, read off a plan's nouns or off an artifact.

use std::collections::BTreeMap;

use crate::artifact::Weights;
use crate::graph::{self, KvLayout, KvTensor, ProgramKind, Programs, Sizes};
use crate::partition::Placement;

/// What a weight or a program belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The decoder: prefill, image prefill, decode.
    Decoder,
    /// The draft head.
    Draft,
    /// Image encoder and projector.
    Encoder,
    /// An embedding table that no program reads: the host looks rows up.
    Lookup,
    /// Stored, and read by no program of a device (sound).
    Host,
}

/// A stored weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// Logical name.
    pub name: String,
    /// Who reads it first.
    pub part: Part,
    /// Bytes of all its planes on every device that has a place for it, padding included, alignment left out.
    pub on: Vec<(u32, u64)>,
}

/// A program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramLoad {
    /// Its name.
    pub name: String,
    /// Whose it is.
    pub part: Part,
    /// The devices that run it.
    pub devices: Vec<u32>,
    /// Bytes of its intermediate values on each of them.
    pub arena: u64,
    /// Bytes of its inputs.
    pub inputs: u64,
}

/// Everything that takes memory, by device.
#[derive(Debug, Clone, PartialEq)]
pub struct MemoryModel {
    /// Devices that share the decoder, numbered from 0.
    pub devices: u32,
    /// Weights by name.
    pub weights: Vec<Held>,
    /// Cache tensors; the same on every device.
    pub kv: Vec<KvTensor>,
    /// Programs in their order.
    pub programs: Vec<ProgramLoad>,
    /// What the programs were compiled for.
    pub sizes: Sizes,
}

fn part(kind: ProgramKind) -> Part {
    match kind {
        ProgramKind::Prefill { .. }
        | ProgramKind::ImagePrefill { .. }
        | ProgramKind::Decode { .. } => Part::Decoder,
        ProgramKind::Draft { .. } => Part::Draft,
        ProgramKind::Vision { .. } | ProgramKind::Project { .. } => Part::Encoder,
    }
}

impl MemoryModel {
    /// Of a plan: its placement, programs and sizes.
    pub fn of_plan(placement: &Placement, programs: &Programs, sizes: &Sizes) -> MemoryModel {
        let weights = placement.weights.iter().map(|(name, weight)| {
            let shards = weight.shards();
            let on: Vec<(u32, u64)> = if shards.is_empty() {
                let bytes = weight.encoding.bytes(&weight.shape).unwrap_or(u64::MAX);
                weight.cut.devices().iter().map(|&d| (d, bytes)).collect()
            } else {
                let of = |s: &crate::partition::Shard| {
                    let (bytes, _) = weight.shard_bytes(&s.slice);
                    s.devices.iter().map(|&d| (d, bytes)).collect::<Vec<_>>()
                };
                shards.iter().flat_map(of).collect()
            };
            (name.clone(), on)
        });
        MemoryModel::new(
            placement.devices,
            &placement.vision_devices,
            weights.collect(),
            programs,
            sizes,
        )
    }

    /// Of an artifact: its weights, programs and sizes, and the devices of its image encoder.
    pub fn of_artifact(
        weights: &Weights<'_>,
        vision_devices: &[u32],
        programs: &Programs,
        sizes: &Sizes,
    ) -> MemoryModel {
        let held = weights.iter().map(|view| {
            let rows = weights.partition().map(|p| &p.weights);
            let row = rows.and_then(|rows| rows.iter().find(|r| r.name == view.name()));
            let on = match row {
                None => vec![(0, view.plane_bytes())],
                Some(row) => {
                    let bytes = |piece: u32| {
                        view.entries().get(piece as usize).map_or(0, |e| e.plane_bytes())
                    };
                    row.holders.iter().map(|&(device, piece)| (device, bytes(piece))).collect()
                }
            };
            (view.name().to_owned(), on)
        });
        MemoryModel::new(weights.devices(), vision_devices, held.collect(), programs, sizes)
    }

    fn new(
        devices: u32,
        vision: &[u32],
        weights: Vec<(String, Vec<(u32, u64)>)>,
        programs: &Programs,
        sizes: &Sizes,
    ) -> MemoryModel {
        let mut readers: BTreeMap<&str, Part> = BTreeMap::new();
        for program in &programs.programs {
            let part = part(program.kind);
            for weight in &program.weights {
                let first = readers.entry(&weight.name).or_insert(part);
                *first = part.min(*first);
            }
        }
        let mut held: Vec<Held> = weights
            .into_iter()
            .map(|(name, mut on)| {
                let table = name.ends_with("token_embd.weight");
                let part = match readers.get(name.as_str()) {
                    Some(part) => *part,
                    None if table => Part::Lookup,
                    None => Part::Host,
                };
                on.sort_unstable();
                Held { name, part, on }
            })
            .collect();
        held.sort_by(|a, b| a.name.cmp(&b.name));
        let loads = programs.programs.iter().map(|p| {
            let arena = graph::arena(p);
            let part = part(p.kind);
            ProgramLoad {
                name: p.name.clone(),
                part,
                devices: match part {
                    Part::Encoder => vision.to_vec(),
                    _ => (0..devices).collect(),
                },
                arena: arena.as_ref().map_or(0, |a| a.bytes),
                inputs: arena.as_ref().map_or(0, |a| a.input_bytes),
            }
        });
        MemoryModel {
            devices,
            weights: held,
            kv: programs.kv.clone(),
            programs: loads.collect(),
            sizes: sizes.clone(),
        }
    }

    /// Bytes of one part's weights on a device.
    pub fn weight_bytes(&self, part: Part, device: u32) -> u64 {
        let of_part = self.weights.iter().filter(|w| w.part == part);
        let on = of_part.flat_map(|w| &w.on).filter(|(d, _)| *d == device);
        on.fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Programs of one part on a device.
    pub fn programs_on(&self, part: Part, device: u32) -> impl Iterator<Item = &ProgramLoad> {
        self.programs.iter().filter(move |p| p.part == part && p.devices.contains(&device))
    }

    /// Bytes of one cache block on one device: every tensor that all tokens stand in.
    pub fn block_bytes(&self) -> u64 {
        let paged = self.kv.iter().filter(|t| is_paged(t));
        paged.fold(0, |sum, t| sum.saturating_add(t.unit_bytes().unwrap_or(u64::MAX)))
    }

    /// Bytes of the rings of all layers with a window, on one device.
    pub fn window_bytes(&self) -> u64 {
        let rings = self.kv.iter().filter(|t| !is_paged(t));
        rings.fold(0, |sum, t| sum.saturating_add(t.unit_bytes().unwrap_or(u64::MAX)))
    }

    /// Layers with a block table, and layers with a ring.
    pub fn cached_layers(&self) -> (u64, u64) {
        let count = |paged: bool| {
            let layers = self.kv.iter().filter(|t| is_paged(t) == paged).map(|t| t.layer);
            layers.collect::<std::collections::BTreeSet<_>>().len() as u64
        };
        (count(true), count(false))
    }
}

/// Whether the tensor grows with the number of blocks.
pub fn is_paged(tensor: &KvTensor) -> bool {
    matches!(tensor.layout, KvLayout::Paged { .. })
}
