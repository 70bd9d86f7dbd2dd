//! The table of who holds what against the directory and the manifest.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use rayon::prelude::*;

use super::Faults;
use crate::artifact::contents::data_order;
use crate::artifact::digests::hex;
use crate::artifact::layout::{DEVICES_KEY, OWN_PREFIX, PARTITION_ENTRY};
use crate::artifact::manifest::{DeviceSummary, Manifest};
use crate::artifact::partition::{Partition, PartitionRow};
use crate::artifact::reader::{Artifact, Entry};
use crate::artifact::weights::{WeightView, Weights};
use crate::hash;

const AREA: &str = "partition";

/// Checks the table, if the file is for several devices, and puts the weights together; `None` when that fails, which
/// is a fault.
pub(super) fn check<'a>(artifact: &'a Artifact, faults: &mut Faults) -> Option<Weights<'a>> {
    let several = artifact.meta_int(DEVICES_KEY).is_some_and(|n| n > 1);
    let has = artifact.find(PARTITION_ENTRY).is_some();
    faults.say(several || !has, AREA, || format!("`{PARTITION_ENTRY}` in a file for one device"));
    let weights = match Weights::open(artifact) {
        Ok(weights) => weights,
        Err(why) => {
            faults.say(false, AREA, || why.to_string());
            return None;
        }
    };
    let Some(table) = weights.partition() else { return Some(weights) };
    let digests = hash::each(&weights.iter().map(WeightView::item).collect::<Vec<_>>());
    let found: Vec<Option<String>> = weights
        .iter()
        .zip(&table.weights)
        .zip(digests)
        .collect::<Vec<_>>()
        .into_par_iter()
        .map(|((view, row), digest)| fault_of(view, row, digest))
        .collect();
    for why in found.into_iter().flatten() {
        faults.say(false, AREA, || why);
    }
    belonging(artifact, &weights, faults);
    order(artifact, table, faults);
    Some(weights)
}

/// What is wrong with the bytes of one weight.
fn fault_of(
    view: &WeightView<'_>,
    row: &PartitionRow,
    digest: io::Result<[u8; 32]>,
) -> Option<String> {
    let name = &row.name;
    let digest = match digest {
        Ok(digest) => digest,
        Err(e) => return Some(format!("`{name}` cannot be put together: {e}")),
    };
    if digest != row.sha256 {
        let (is, says) = (hex(&digest), hex(&row.sha256));
        return Some(format!(
            "`{name}`: sha256 of the whole weight is {is}, the table says {says}"
        ));
    }
    match view.padding_is_zero() {
        Ok(true) => None,
        Ok(false) => Some(format!(
            "`{name}`: padding is not zero, or its pieces carry different copies of a plane"
        )),
        Err(e) => Some(format!("`{name}` cannot be read: {e}")),
    }
}

/// Every entry outside `radpack/` is a weight or a piece of one.
fn belonging(artifact: &Artifact, weights: &Weights<'_>, faults: &mut Faults) {
    let known: BTreeSet<usize> =
        weights.iter().flat_map(|v| v.entries()).map(Entry::index).collect();
    for e in artifact.entries() {
        let own = e.name().bytes().starts_with(OWN_PREFIX.as_bytes());
        faults.say(own || known.contains(&e.index()), AREA, || {
            format!("`{}` is no weight of the table and no piece of one", e.name())
        });
    }
}

/// Whole entries come first, in canonical order; then the pieces by the first device that holds each. The data lie in
/// that order too, but for the experts ([`data_order`]).
fn order(artifact: &Artifact, table: &Partition, faults: &mut Faults) {
    let mut pieces: BTreeMap<usize, u32> = BTreeMap::new();
    for row in &table.weights {
        for piece in 0..row.pieces() {
            if let (Some(entry), Some(device)) =
                (artifact.find(&row.entry(piece)), row.first_holder(piece))
            {
                pieces.insert(entry.index(), device);
            }
        }
    }
    let key = |e: &Entry<'_>| {
        let device = pieces.get(&e.index()).copied();
        (device, e.layer().max(-1), e.expert(), e.slot(), e.name().bytes().to_vec())
    };
    let keys: Vec<_> = artifact.entries().map(|e| key(&e)).collect();
    for (pair, entry) in keys.windows(2).zip(artifact.entries().skip(1)) {
        faults.say(pair[0] <= pair[1], AREA, || {
            let name = entry.name();
            format!("`{name}` is not in the order of devices, layers, experts, slots and names")
        });
    }
    let places: Vec<(i32, i32, bool)> = artifact
        .entries()
        .map(|e| (e.layer(), e.expert(), pieces.contains_key(&e.index())))
        .collect();
    let mut last = 0;
    for entry in data_order(&places).into_iter().filter_map(|i| artifact.entry(i)) {
        faults.say(last <= entry.offset(), AREA, || {
            format!("`{}` does not lie where the order of devices puts it", entry.name())
        });
        last = entry.offset();
    }
}

/// The manifest's figures of every device.
pub(super) fn figures(weights: &Weights<'_>, manifest: &Manifest, faults: &mut Faults) {
    let found = weights.partition().map(|table| sums(weights, table)).unwrap_or_default();
    let stated = &manifest.device_weights;
    faults.say(stated.len() == found.len(), "manifest", || {
        format!(
            "bytes of {} devices are stated, the file is for {}",
            stated.len(),
            weights.devices()
        )
    });
    for (stated, found) in stated.iter().zip(&found) {
        faults.say(stated == found, "manifest", || {
            format!(
                "device {}: {} bytes whole, {} in pieces, {} padding are stated; the file has {}, {}, {}",
                found.device,
                stated.whole,
                stated.shards,
                stated.padding,
                found.whole,
                found.shards,
                found.padding
            )
        });
    }
}

fn sums(weights: &Weights<'_>, table: &Partition) -> Vec<DeviceSummary> {
    let empty = |device| DeviceSummary { device, whole: 0, shards: 0, padding: 0 };
    let mut out: Vec<DeviceSummary> = (0..table.devices).map(empty).collect();
    for (view, row) in weights.iter().zip(&table.weights) {
        for &(device, piece) in &row.holders {
            let Some(sum) = out.get_mut(device as usize) else { continue };
            if !view.cut() {
                sum.whole = sum.whole.saturating_add(view.plane_bytes());
                continue;
            }
            let Some(entry) = view.entries().get(piece as usize) else { continue };
            let bytes = entry.plane_bytes();
            sum.shards = sum.shards.saturating_add(bytes);
            let held = view.held_bytes(piece as usize);
            sum.padding = sum.padding.saturating_add(bytes.saturating_sub(held));
        }
    }
    out
}
