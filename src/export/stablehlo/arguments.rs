//! Which plane of which piece every device passes for an argument.

use std::collections::BTreeMap;

use super::super::tensors::{Bytes, Tensor};
use super::invalid;
use crate::artifact::manifest::{GraphSummary, Manifest};
use crate::artifact::partition::PartitionRow;
use crate::artifact::{WeightView, Weights};
use crate::diag::Result;
use crate::graph::{ModuleArgument, ProgramKind};
use crate::tensor::DType;

/// The devices of an artifact and what each holds.
pub(super) struct Devices<'a> {
    weights: &'a Weights<'a>,
    rows: BTreeMap<&'a str, &'a PartitionRow>,
    all: Vec<u32>,
    vision: Vec<u32>,
}

impl<'a> Devices<'a> {
    pub fn new(
        weights: &'a Weights<'a>,
        manifest: &Manifest,
        summary: &GraphSummary,
    ) -> Result<Devices<'a>> {
        let count = weights.devices();
        if manifest.devices.max(1) != count {
            let said = manifest.devices;
            return Err(invalid(format!(
                "the manifest is for {said} devices, the file for {count}"
            )));
        }
        let vision = match summary.vision_devices.as_slice() {
            [] => vec![0],
            some => some.to_vec(),
        };
        let rows = weights.partition().map(|p| p.by_name()).unwrap_or_default();
        Ok(Devices { weights, rows, all: (0..count).collect(), vision })
    }

    /// The devices that run programs of a kind, in the order of their shares.
    pub fn group(&self, kind: ProgramKind) -> &[u32] {
        match kind {
            ProgramKind::Vision { .. } | ProgramKind::Project { .. } => &self.vision,
            ProgramKind::Prefill { .. }
            | ProgramKind::ImagePrefill { .. }
            | ProgramKind::Decode { .. }
            | ProgramKind::Draft { .. } => &self.all,
        }
    }

    /// No arguments yet.
    pub fn arguments(&self) -> Arguments<'_> {
        Arguments { devices: self, common: BTreeMap::new(), own: BTreeMap::new(), ranked: false }
    }

    /// A plane of what a device holds of a weight.
    fn plane(&self, weight: &str, plane: usize, device: u32) -> Result<&'a [u8]> {
        let view: &WeightView<'a> =
            self.weights.get(weight).ok_or_else(|| invalid(format!("there is no {weight}")))?;
        let piece = match self.rows.get(weight) {
            Some(row) => row
                .piece_of(device)
                .ok_or_else(|| invalid(format!("device {device} holds nothing of {weight}")))?,
            None => 0,
        };
        let entry = view.entries().get(piece as usize);
        let entry = entry.ok_or_else(|| invalid(format!("{weight} has no piece {piece}")))?;
        Ok(entry.plane(plane))
    }
}

/// One argument's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Stored<'a> {
    dtype: DType,
    shape: Vec<u64>,
    bytes: &'a [u8],
}

/// Arguments that a file holds.
pub(super) struct Arguments<'a> {
    devices: &'a Devices<'a>,
    /// The same on all devices.
    common: BTreeMap<String, Stored<'a>>,
    /// By device.
    own: BTreeMap<String, BTreeMap<u32, Stored<'a>>>,
    /// Whether a program of all devices takes its rank.
    ranked: bool,
}

impl<'a> Arguments<'a> {
    /// Adds a plane for the devices of a group; `weights` names the weight of each, or the one of all.
    pub fn weight(
        &mut self,
        argument: &ModuleArgument,
        weights: &[String],
        plane: usize,
        group: &[u32],
    ) -> Result<()> {
        if self.common.contains_key(&argument.name) || self.own.contains_key(&argument.name) {
            return Ok(());
        }
        let mut found: BTreeMap<u32, Stored<'a>> = BTreeMap::new();
        for (rank, device) in group.iter().enumerate() {
            let name = match weights {
                [one] => one,
                many => many.get(rank).ok_or_else(|| {
                    invalid(format!("{}: no weight for rank {rank}", argument.name))
                })?,
            };
            let bytes = self.devices.plane(name, plane, *device)?;
            found.insert(*device, stored(argument, name, bytes)?);
        }
        let everywhere = group.len() == self.devices.all.len();
        let mut values = found.values();
        match values.next() {
            // Slices of one piece are compared by their bytes too: most differ at the start, and those that do not are
            // written once.
            Some(first) if everywhere && values.all(|other| other == first) => {
                self.common.insert(argument.name.clone(), first.clone());
            }
            _ => {
                self.own.insert(argument.name.clone(), found);
            }
        }
        Ok(())
    }

    /// Says that a program takes its device's rank.
    pub fn ranks(&mut self) {
        self.ranked = true;
    }

    /// Whether an argument is the same on all devices.
    pub fn common(&self, name: &str) -> bool {
        self.common.contains_key(name)
    }

    /// The files with their tensors; none without tensors.
    pub fn files(&self) -> Vec<(String, Vec<Tensor<'a>>)> {
        let tensor = |name: &str, s: &Stored<'a>| {
            Tensor::of(name.to_owned(), s.dtype, s.shape.clone(), Bytes::Mapped(s.bytes))
        };
        let mut files = vec![(
            "args/common.safetensors".to_owned(),
            self.common.iter().map(|(name, s)| tensor(name, s)).collect::<Vec<_>>(),
        )];
        for &device in &self.devices.all {
            let own = self.own.iter().filter_map(|(n, held)| Some(tensor(n, held.get(&device)?)));
            let mut own: Vec<Tensor<'a>> = own.collect();
            if self.ranked {
                let rank = Bytes::Made(device.to_le_bytes().to_vec());
                own.push(Tensor::of("rank".to_owned(), DType::I32, Vec::new(), rank));
            }
            files.push((format!("args/dev{device}.safetensors"), own));
        }
        files.retain(|(_, tensors)| !tensors.is_empty());
        files
    }
}

/// The bytes as an argument takes them.
fn stored<'a>(argument: &ModuleArgument, name: &str, bytes: &'a [u8]) -> Result<Stored<'a>> {
    let dtype = match argument.element {
        "f32" => DType::F32,
        "f16" => DType::F16,
        "bf16" => DType::BF16,
        "f8E4M3FN" => DType::F8E4M3,
        "f8E5M2" => DType::F8E5M2,
        "f8E8M0FNU" => DType::E8M0,
        "i8" => DType::I8,
        "ui8" => DType::U8,
        "i16" => DType::I16,
        "i32" => DType::I32,
        "i64" => DType::I64,
        "i1" => DType::Bool,
        other => return Err(invalid(format!("{name}: no file holds {other}"))),
    };
    let elements = argument.shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
    let needed = elements.and_then(|n| n.checked_mul(u64::from(dtype.bits()) / 8));
    if needed != Some(bytes.len() as u64) {
        return Err(invalid(format!(
            "{name} has {} bytes on a device, {} takes {:?} of {dtype}",
            bytes.len(),
            argument.name,
            argument.shape
        )));
    }
    Ok(Stored { dtype, shape: argument.shape.clone(), bytes })
}
