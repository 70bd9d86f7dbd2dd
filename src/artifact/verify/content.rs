//! Digests, manifest and error table against the directory.

use std::collections::{BTreeMap, BTreeSet};

use super::{Faults, Report, partition};
use crate::artifact::digests::{self, EntryDigest, hex};
use crate::artifact::errors;
use crate::artifact::layout::{
    DEVICES_KEY, DIGEST_KEY, DIGESTS_ENTRY, ERRORS_ENTRY, EXTENSION_VERSION, FILE_PREFIX,
    FORMAT_KEY, GRAPH_PREFIX, GRAPHS_ENTRY, MANIFEST_ENTRY, OWN_PREFIX, PARTITION_ENTRY,
};
use crate::artifact::manifest::Manifest;
use crate::artifact::reader::{Artifact, Entry};
use crate::artifact::weights::{WeightView, Weights};
use crate::diag::count;
use crate::hash::{self, Item};

pub(super) fn check(artifact: &Artifact, faults: &mut Faults, report: &mut Report) {
    match artifact.meta_int(FORMAT_KEY) {
        Some(EXTENSION_VERSION) => {}
        Some(v) => {
            let what = || format!("`{FORMAT_KEY}` is {v}; this program reads {EXTENSION_VERSION}");
            return faults.say(false, "metadata", what);
        }
        None => faults.say(false, "metadata", || format!("no `{FORMAT_KEY}`")),
    }
    let bytes = artifact.entries().fold(0u64, |n, e| n.saturating_add(e.plane_bytes()));
    if bytes > artifact.file_bytes() {
        // Overlapping planes, already reported; hashing each could take any time.
        let what =
            || format!("{} bytes of planes exceed the file; nothing was hashed", count(bytes));
        return faults.say(false, "digests", what);
    }
    let actual = hash_all(artifact);
    report.hashed_bytes = bytes;
    let before = (faults.kept.len(), faults.left_out);
    let root = check_digests(artifact, &actual, faults);
    report.root = root.filter(|_| before == (faults.kept.len(), faults.left_out));
    own_entries(artifact, faults);
    // Without it, every weight would be reported once more.
    let weights = partition::check(artifact, faults);
    if let Some(weights) = &weights {
        check_errors(artifact, weights, &actual, faults);
    }
    report.manifest = check_manifest(artifact, weights.as_ref(), &actual, faults);
}

/// SHA-256 of every entry, in directory order.
fn hash_all(artifact: &Artifact) -> Vec<[u8; 32]> {
    let items: Vec<Item<'_>> = artifact.entries().map(|entry| digests::item(&entry)).collect();
    // Reading a map does not fail.
    hash::each(&items).into_iter().map(std::result::Result::unwrap_or_default).collect()
}

/// The root digest, if there is one.
fn check_digests(
    artifact: &Artifact,
    actual: &[[u8; 32]],
    faults: &mut Faults,
) -> Option<[u8; 32]> {
    const AREA: &str = "digests";
    let Some(root) = artifact.meta_text(DIGEST_KEY).and_then(|t| digests::from_hex(t.bytes()))
    else {
        faults.say(false, AREA, || format!("no metadata `{DIGEST_KEY}` with a sha256 in hex"));
        return None;
    };
    let Some(own) = artifact.find(DIGESTS_ENTRY) else {
        faults.say(false, AREA, || format!("no entry `{DIGESTS_ENTRY}`"));
        return None;
    };
    let listed: Vec<EntryDigest> = match digests::decode(own.plane(0), &root) {
        Ok(list) => list,
        Err(why) => {
            faults.say(false, AREA, || format!("`{DIGESTS_ENTRY}`: {why}"));
            return None;
        }
    };
    let others = artifact.len() - 1;
    faults.say(listed.len() == others, AREA, || {
        format!("`{DIGESTS_ENTRY}` lists {} entries, the file has {others} others", listed.len())
    });
    let entries = artifact.entries().zip(actual).filter(|(e, _)| e.index() != own.index());
    for ((entry, actual), want) in entries.zip(&listed) {
        let name = entry.name();
        faults.say(name.bytes() == want.name.as_bytes(), AREA, || {
            format!("`{DIGESTS_ENTRY}` lists `{}` where the directory has `{name}`", want.name)
        });
        faults.say(*actual == want.sha256, AREA, || {
            format!(
                "`{name}`: sha256 is {}, `{DIGESTS_ENTRY}` says {}",
                hex(actual),
                hex(&want.sha256)
            )
        });
    }
    Some(root)
}

/// Names under `radpack/` are this version's, and are opaque bytes at model level.
fn own_entries(artifact: &Artifact, faults: &mut Faults) {
    for e in artifact.entries() {
        let Some(name) = e.name().as_str().filter(|n| n.starts_with(OWN_PREFIX)) else { continue };
        let known = [MANIFEST_ENTRY, DIGESTS_ENTRY, ERRORS_ENTRY, PARTITION_ENTRY, GRAPHS_ENTRY]
            .contains(&name)
            || name.starts_with(FILE_PREFIX)
            || name.starts_with(GRAPH_PREFIX);
        faults.say(known, "container", || format!("`{name}` is no entry of this version"));
        faults.say(is_opaque(&e), "container", || {
            format!("`{name}` is not a plain u8 vector at model level")
        });
    }
}

fn is_opaque(e: &Entry<'_>) -> bool {
    e.encoding().to_string() == "u8"
        && e.shape().rank() == 1
        && (e.layer(), e.expert(), e.slot()) == (-1, -1, 0)
}

fn check_errors(
    artifact: &Artifact,
    weights: &Weights<'_>,
    actual: &[[u8; 32]],
    faults: &mut Faults,
) {
    const AREA: &str = "errors";
    let Some(own) = artifact.find(ERRORS_ENTRY) else { return };
    // The digest of the bytes was compared with the list's already.
    let Some(digest) = actual.get(own.index()) else { return };
    let rows = match errors::decode(own.plane(0), digest) {
        Ok(rows) => rows,
        Err(why) => return faults.say(false, AREA, || format!("`{ERRORS_ENTRY}`: {why}")),
    };
    let mut seen = BTreeSet::new();
    for row in &rows {
        let name = &row.weight;
        let weight = weights.get(name);
        faults.say(weight.is_some_and(|w| !w.first().quantizer().is_empty()), AREA, || {
            format!("`{name}` is no quantized weight of the file")
        });
        faults.say(seen.insert(name), AREA, || format!("`{name}` is listed twice"));
        let fine = |x: f64| x.is_finite() && x >= 0.0;
        faults.say(fine(row.squared_error) && fine(row.squared), AREA, || {
            format!("`{name}`: squared error {} over {}", row.squared_error, row.squared)
        });
    }
    let quantized = weights.iter().filter(|w| !w.first().quantizer().is_empty()).count();
    faults.say(rows.len() == quantized, AREA, || {
        format!("{} weights are listed, the file has {quantized} quantized ones", rows.len())
    });
}

fn check_manifest(
    artifact: &Artifact,
    weights: Option<&Weights<'_>>,
    actual: &[[u8; 32]],
    faults: &mut Faults,
) -> Option<Manifest> {
    const AREA: &str = "manifest";
    let Some(own) = artifact.find(MANIFEST_ENTRY) else {
        faults.say(false, AREA, || format!("no entry `{MANIFEST_ENTRY}`"));
        return None;
    };
    let m = match Manifest::parse(own.plane(0)) {
        Ok(m) => m,
        Err(why) => {
            faults.say(false, AREA, || format!("`{MANIFEST_ENTRY}`: {why}"));
            return None;
        }
    };
    let recipe = hash::sha256([artifact.recipe().bytes()]);
    faults.say(m.recipe.sha256.0 == recipe, AREA, || {
        format!("recipe sha256 {}, the header's text has {}", m.recipe.sha256, hex(&recipe))
    });
    let tables = artifact.tables_digest();
    faults.say(m.tables.is_none_or(|stated| stated.0 == tables), AREA, || {
        let stated = m.tables.unwrap_or_default();
        format!("sha256 of the tables is {}, {stated} is stated", hex(&tables))
    });
    let devices = artifact.meta_int(DEVICES_KEY);
    faults.say(devices == Some(i64::from(m.devices)), AREA, || {
        format!(
            "{} devices, metadata `{DEVICES_KEY}` says {}",
            m.devices,
            devices.map_or("nothing".into(), |d| d.to_string())
        )
    });
    if let Some(weights) = weights {
        check_weights(weights, &m, faults);
        partition::figures(weights, &m, faults);
    }
    check_files(artifact, &m, actual, faults);
    Some(m)
}

/// Figures of the weights in one encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Sums {
    weights: u64,
    parameters: u64,
    bytes: u64,
}

impl Sums {
    fn add(&mut self, w: &WeightView<'_>) {
        self.weights += 1;
        self.parameters = self.parameters.saturating_add(w.shape().elements().unwrap_or(u64::MAX));
        self.bytes = self.bytes.saturating_add(w.plane_bytes());
    }
}

fn check_weights(weights: &Weights<'_>, m: &Manifest, faults: &mut Faults) {
    const AREA: &str = "manifest";
    let mut listed = BTreeMap::new();
    for w in &m.weights {
        let first = listed.insert(w.name.as_str(), w).is_none();
        faults.say(first, AREA, || format!("weight `{}` is listed twice", w.name));
    }
    let mut sums: BTreeMap<(&str, String), Sums> = BTreeMap::new();
    let mut total = Sums::default();
    for view in weights.iter() {
        let name = view.name();
        total.add(view);
        // A name that is no UTF-8 shows as another one.
        let sound = view.first().name().as_str().is_some();
        match listed.get(name).filter(|_| sound) {
            Some(w) => {
                sums.entry((&w.encoding, view.encoding().to_string())).or_default().add(view)
            }
            None => faults.say(false, AREA, || format!("`{name}` is in the file, but not listed")),
        }
    }
    for w in &m.weights {
        let own = |name: &str| weights.get(name).is_some();
        let tied = w.tied_to.as_deref().is_some_and(|t| listed.contains_key(t) && own(t));
        faults.say(own(&w.name) || tied, AREA, || {
            format!("weight `{}` is listed, but not in the file", w.name)
        });
        faults
            .say(!w.from.is_empty(), AREA, || format!("weight `{}` comes from no tensor", w.name));
    }
    for row in &m.encodings {
        let stated = Sums { weights: row.weights, parameters: row.parameters, bytes: row.bytes };
        let found = sums.remove(&(row.encoding.as_str(), row.layout.clone())).unwrap_or_default();
        compare(&format!("encoding {} ({})", row.encoding, row.layout), stated, found, faults);
        let bits = row.bytes as f64 * 8.0 / row.parameters as f64;
        faults.say(row.parameters == 0 || (bits - row.bits_per_weight).abs() < 1e-9, AREA, || {
            format!(
                "encoding {}: {} bits per weight, not {bits}",
                row.encoding, row.bits_per_weight
            )
        });
    }
    for ((name, layout), found) in sums {
        compare(&format!("encoding {name} ({layout})"), Sums::default(), found, faults);
    }
    faults.say(m.model.parameters == total.parameters, AREA, || {
        let (stated, found) = (count(m.model.parameters), count(total.parameters));
        format!("the model has {stated} parameters, the file {found}")
    });
    let towers = m.model.towers.iter().fold(Sums::default(), |s, t| Sums {
        weights: s.weights.saturating_add(t.weights),
        parameters: s.parameters.saturating_add(t.parameters),
        bytes: s.bytes.saturating_add(t.bytes),
    });
    compare("all towers", towers, total, faults);
}

fn compare(what: &str, stated: Sums, found: Sums, faults: &mut Faults) {
    let say = |s: Sums| {
        format!(
            "{} weights, {} parameters, {} bytes",
            count(s.weights),
            count(s.parameters),
            count(s.bytes)
        )
    };
    faults.say(stated == found, "manifest", || {
        format!("{what}: {} are stated, the file has {}", say(stated), say(found))
    });
}

fn check_files(artifact: &Artifact, m: &Manifest, actual: &[[u8; 32]], faults: &mut Faults) {
    const AREA: &str = "manifest";
    let mut listed = BTreeSet::new();
    for f in &m.files {
        let path = &f.path;
        let safe = !path.is_empty()
            && path.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
        faults.say(safe && !path.contains('\\'), AREA, || {
            format!("file path `{path}` is not relative to the checkpoint")
        });
        faults.say(f.entry == format!("{FILE_PREFIX}{path}"), AREA, || {
            format!("file `{path}`: entry `{}` is not `{FILE_PREFIX}{path}`", f.entry)
        });
        faults.say(listed.insert(f.entry.as_str()), AREA, || {
            format!("file `{path}` is listed twice")
        });
        let (bytes, digest) = match artifact.find(&f.entry) {
            Some(e) => (e.plane_bytes(), actual.get(e.index()).copied().unwrap_or_default()),
            // An entry cannot be empty, so an empty file has none.
            None if f.bytes == 0 => (0, hash::sha256([])),
            None => {
                faults.say(false, AREA, || format!("file `{path}`: no entry `{}`", f.entry));
                continue;
            }
        };
        faults.say((bytes, digest) == (f.bytes, f.sha256.0), AREA, || {
            format!(
                "file `{path}`: {} bytes of sha256 {} are stated, the entry has {bytes} of {}",
                f.bytes,
                f.sha256,
                hex(&digest)
            )
        });
    }
    for e in artifact.entries() {
        let name = e.name();
        let side_file = name.as_str().filter(|n| n.starts_with(FILE_PREFIX));
        faults.say(side_file.is_none_or(|n| listed.contains(n)), AREA, || {
            format!("`{name}` is in the file, but not listed")
        });
    }
}
