//! Weights of an older artifact that a new one would make again, byte for byte.
//!
//! A weight is copied when its tensors lie in source files whose sha256 the old manifest lists too, and its name,
//! parts, shape, encoding, quantizer and options are equal, and its importances if any; when its scales depend on other weights (a shared second
//! level), the whole recipe must be equal as well. Its bytes are checked against the old file's digests before they
//! are believed. Another version of the program may round differently, so its files are not reused.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rayon::prelude::*;

use super::{IMATRIX_FILE, Plan};
use crate::artifact::errors::{self, WeightError};
use crate::artifact::manifest::{Manifest, WeightRecord};
use crate::artifact::{Artifact, Entry, OpenError, WeightView, Weights, digests, layout as names};
use crate::checkpoint::FileDigest;
use crate::diag::{Diagnostic, Failure, FailureKind, Result};
use crate::hash;
use crate::model::Weight;
use crate::quantize::Encoder;
use crate::recipe::{Assigned, Method};

/// An older artifact whose weights may be copied.
#[derive(Debug)]
pub struct Reuse {
    artifact: Artifact,
    manifest: Manifest,
    digests: BTreeMap<String, [u8; 32]>,
    errors: BTreeMap<String, WeightError>,
}

impl Reuse {
    /// Opens an artifact of this version of the program.
    ///
    /// # Errors
    /// A file that is no valid artifact, has no manifest or digests, or was made by another version.
    pub fn open(path: &Path) -> Result<Reuse> {
        let refused = |why: String| {
            let problem = Diagnostic::new("reuse", format!("{}: {why}", path.display()))
                .help("convert without --reuse");
            Failure::one(FailureKind::Refused, "this file cannot be reused", problem)
        };
        let artifact = Artifact::open(path).map_err(|error| match error {
            OpenError::Io { .. } => Failure::plain(FailureKind::Failed, error.to_string()),
            OpenError::Refused { .. } => refused(error.to_string()),
        })?;
        let section = |name: &str| {
            let entry = artifact.find(name).ok_or_else(|| refused(format!("it has no {name}")))?;
            Ok::<_, Failure>(entry.plane(0))
        };
        let manifest = Manifest::parse(section(names::MANIFEST_ENTRY)?)
            .map_err(|e| refused(format!("its manifest: {e}")))?;
        let version = env!("CARGO_PKG_VERSION");
        if manifest.tool.version != version {
            let made = &manifest.tool.version;
            return Err(refused(format!("it was made by radpack {made}, this is {version}")));
        }
        let root = artifact.meta_text(names::DIGEST_KEY).map(|t| t.to_string());
        let root = root.and_then(|hex| digests::from_hex(hex.as_bytes()));
        let root = root.ok_or_else(|| refused("it has no root digest".to_owned()))?;
        let list = digests::decode(section(names::DIGESTS_ENTRY)?, &root)
            .map_err(|e| refused(format!("its digests: {e}")))?;
        let digests: BTreeMap<String, [u8; 32]> =
            list.into_iter().map(|d| (d.name, d.sha256)).collect();
        let intact = digests.get(names::MANIFEST_ENTRY)
            == Some(&hash::sha256([section(names::MANIFEST_ENTRY)?]));
        if !intact {
            return Err(refused("its manifest is not the one that its digests cover".to_owned()));
        }
        let of_errors = digests
            .get(names::ERRORS_ENTRY)
            .ok_or_else(|| refused("its digests do not cover the error table".to_owned()))?;
        let errors = errors::decode(section(names::ERRORS_ENTRY)?, of_errors)
            .map_err(|e| refused(format!("its error table: {e}")))?;
        let errors = errors.into_iter().map(|e| (e.weight.clone(), e)).collect();
        Ok(Reuse { artifact, manifest, digests, errors })
    }

    /// Its weights, whole.
    ///
    /// # Errors
    /// A table of who holds what that is wrong.
    pub(super) fn stored(&self) -> Result<Weights<'_>> {
        Weights::open(&self.artifact).map_err(|error| {
            let problem =
                Diagnostic::new("reuse", error.to_string()).help("convert without --reuse");
            Failure::one(FailureKind::Refused, "this file cannot be reused", problem)
        })
    }

    /// The quantized weights that can be copied, by index in the plan's table. Their stored bytes are hashed, in
    /// parallel.
    pub(super) fn weights(
        &self,
        stored: &Weights<'_>,
        plan: &Plan,
        files: &[FileDigest],
    ) -> BTreeSet<usize> {
        let old: BTreeSet<[u8; 32]> =
            self.manifest.source.files.iter().map(|f| f.sha256.0).collect();
        let unchanged: BTreeSet<&str> =
            files.iter().filter(|f| old.contains(&f.sha256)).map(|f| f.path.as_str()).collect();
        let records = |m: &'_ Manifest| -> BTreeMap<String, WeightRecord> {
            m.weights.iter().map(|w| (w.name.clone(), w.clone())).collect()
        };
        let (was, is) = (records(&self.manifest), records(&plan.manifest));
        let imatrix = |m: &Manifest| -> Option<String> {
            let file = m.source.files.iter().find(|f| f.path == IMATRIX_FILE)?;
            Some(file.sha256.to_string())
        };
        let now = plan.sources.imatrix.as_ref().map(|i| digests::hex(&i.file().sha256));
        let same_imatrix = imatrix(&self.manifest) == now;
        let same_recipe = self.manifest.recipe.sha256 == plan.manifest.recipe.sha256;
        let candidates: Vec<(usize, &Weight)> =
            plan.assignment
                .stored(&plan.table)
                .filter(|(a, w)| {
                    let from =
                        |m: &BTreeMap<String, WeightRecord>| m.get(&w.name).map(|r| r.from.clone());
                    let weighed = |m: &BTreeMap<String, WeightRecord>| {
                        m.get(&w.name).and_then(|r| r.importance.clone())
                    };
                    *a.method != Method::Keep
                        && weighed(&was) == weighed(&is)
                        && (same_imatrix || weighed(&is).is_none())
                        && (same_recipe || !Encoder::needs_peak(&a.method))
                        && from(&was) == from(&is)
                        && self.same_weight(stored, a, w)
                        && plan.sources.files_of(w).is_some_and(|all| {
                            all.iter().all(|file| unchanged.contains(file.as_str()))
                        })
                })
                .map(|(a, w)| (a.weight, w))
                .collect();
        candidates
            .into_par_iter()
            .filter(|(_, w)| {
                let entries = stored.get(&w.name).map(WeightView::entries).unwrap_or_default();
                let intact = |e: &Entry<'_>| {
                    self.digests.get(&e.name().to_string()) == Some(&digests::of_entry(e))
                };
                !entries.is_empty() && entries.iter().all(intact)
            })
            .map(|(index, _)| index)
            .collect()
    }

    fn same_weight(&self, stored: &Weights<'_>, assigned: &Assigned, weight: &Weight) -> bool {
        self.errors.contains_key(&weight.name)
            && stored.get(&weight.name).is_some_and(|view| {
                *view.encoding() == *assigned.encoding
                    && *view.shape() == weight.shape
                    && view.first().quantizer().to_string() == assigned.method.quantizer()
                    && view.first().options().to_string() == assigned.method.options()
            })
    }

    /// What the weight's quantization cost, as the old file records it.
    pub(super) fn error(&self, weight: &Weight) -> Option<&WeightError> {
        self.errors.get(&weight.name)
    }
}
