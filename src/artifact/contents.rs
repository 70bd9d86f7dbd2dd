//! What a container is made of, before any offset exists.

use std::collections::BTreeMap;

use super::vocab::Vocab;
use crate::tensor::{DType, Encoding, Shape};

/// Everything of a container but the planes' bytes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Contents {
    /// Architecture id.
    pub arch_id: String,
    /// Name of the model.
    pub model_name: String,
    /// Quantisation of the source checkpoint, empty for none.
    pub quant: String,
    /// Fully resolved recipe, empty for none.
    pub recipe: String,
    /// What writes the file. It reaches the bytes, so it must not tell a date, a host or a path.
    pub created_by: String,
    /// Metadata rows in file order.
    pub metadata: Vec<(String, MetaValue)>,
    /// The directory in file order (see [`canonical_order`]).
    pub entries: Vec<EntrySpec>,
    /// Positions in the directory in the order in which the entries' planes lie (see [`data_order`]); empty for the
    /// directory's own order.
    pub data: Vec<usize>,
    /// Tokenizer tables for engines that read them here.
    pub vocab: Option<Vocab>,
    /// Expert profile.
    pub profile: Vec<ProfileShare>,
}

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum MetaValue {
    /// A signed integer.
    Int(i64),
    /// A 64-bit float.
    Float(f64),
    /// Text without NUL.
    Text(String),
    /// Text of that many bytes, given to the writer after the planes ([`super::Writer::set_text`]).
    Later(usize),
}

/// A weight, or an opaque entry, before it has a place.
#[derive(Debug, Clone, PartialEq)]
pub struct EntrySpec {
    /// Name, unique in the file.
    pub name: String,
    /// Quantizer that makes it, empty for the checkpoint's own bytes.
    pub quantizer: String,
    /// The quantizer's options, `key=value` sorted by key and joined by commas.
    pub options: String,
    /// Planes.
    pub encoding: Encoding,
    /// Logical shape, rank 1 to 6.
    pub shape: Shape,
    /// Layer, -1 at model level.
    pub layer: i32,
    /// Expert, or -1.
    pub expert: i32,
    /// Position within its expert, else 0.
    pub slot: i32,
}

impl EntrySpec {
    /// An entry of `bytes` opaque bytes (at least one) at model level: a `u8` vector.
    pub fn opaque(name: impl Into<String>, bytes: u64) -> EntrySpec {
        EntrySpec {
            name: name.into(),
            quantizer: String::new(),
            options: String::new(),
            encoding: Encoding::plain(DType::U8),
            shape: Shape::from([bytes]),
            layer: -1,
            expert: -1,
            slot: 0,
        }
    }
}

/// Share of a layer's tokens that one expert sees.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProfileShare {
    /// Layer.
    pub layer: i32,
    /// Expert.
    pub expert: i32,
    /// Share, 0 to 1.
    pub share: f32,
}

/// Sorts entries into the order of canonical files: layer (any negative as -1), expert, slot, name.
pub fn canonical_order(entries: &mut [EntrySpec]) {
    entries.sort_by(|a, b| {
        (a.layer.max(-1), a.expert, a.slot, &a.name).cmp(&(
            b.layer.max(-1),
            b.expert,
            b.slot,
            &b.name,
        ))
    });
}

/// Sorts pieces of weights by the first device that holds each; a device's pieces lie in canonical order.
pub fn device_order(pieces: &mut [(u32, EntrySpec)]) {
    pieces.sort_by(|(d, a), (f, b)| {
        (d, a.layer.max(-1), a.expert, a.slot, &a.name).cmp(&(
            f,
            b.layer.max(-1),
            b.expert,
            b.slot,
            &b.name,
        ))
    });
}

/// Order in which the planes of a file for several devices lie, from `(layer, expert, whether it is a piece)` of every
/// entry in directory order: what is whole, then expert 0 of every layer, expert 1 of every layer and so on, then the
/// pieces. So the experts of one device lie together, and expert x of a layer still lies at expert 0 plus x times one
/// stride. Where layers have unequal numbers of experts there is no such stride: the directory's order stays.
pub fn data_order(entries: &[(i32, i32, bool)]) -> Vec<usize> {
    let mut experts: BTreeMap<i32, i32> = BTreeMap::new();
    for &(layer, expert, _) in entries.iter().filter(|e| e.1 >= 0) {
        let last = experts.entry(layer).or_default();
        *last = (*last).max(expert);
    }
    let mut order: Vec<usize> = (0..entries.len()).collect();
    let mut counts = experts.values();
    let first = counts.next();
    if counts.all(|n| Some(n) == first) {
        // The sort is stable: within one expert, layers and slots keep the directory's order.
        order.sort_by_key(|&i| entries.get(i).map(|e| (e.2, e.1.max(-1))));
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canonical_order_is_layer_expert_slot_name() {
        let entry = |name: &str, layer, expert, slot| EntrySpec {
            layer,
            expert,
            slot,
            ..EntrySpec::opaque(name, 1)
        };
        let mut entries = [
            entry("e1s0", 0, 1, 0),
            entry("e0s1", 0, 0, 1),
            entry("z", 0, -1, 0),
            entry("a", 1, -1, 0),
            entry("e0s0", 0, 0, 0),
            entry("m", -1, -1, 0),
            entry("b", -7, -1, 0),
        ];
        canonical_order(&mut entries);
        let names: Vec<&str> = entries.iter().map(|e| e.name.as_str()).collect();
        assert_eq!(names, ["b", "m", "z", "e0s0", "e0s1", "e1s0", "a"]);
    }

    #[test]
    fn experts_of_all_layers_lie_expert_by_expert() {
        let entry = |layer, expert| (layer, expert, false);
        let mut entries =
            vec![entry(-1, -1), entry(0, -1), entry(0, 0), entry(0, 1), entry(1, -1), entry(1, 0)];
        entries.push((0, -1, true));
        assert_eq!(data_order(&entries), [0, 1, 2, 3, 4, 5, 6], "layers of unequal numbers");
        entries.insert(6, entry(1, 1));
        assert_eq!(data_order(&entries), [0, 1, 4, 2, 5, 3, 6, 7]);
    }
}
