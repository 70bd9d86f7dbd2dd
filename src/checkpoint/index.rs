//! The index of sharded weights, and the cross-check of what it promises against what the shards hold.

use std::collections::{BTreeMap, BTreeSet};

use super::folder::is_inner_path;
use super::json::JsonFile;
use super::safetensors::{Header, quoted};
use crate::diag::{self, Diagnostic, Problems};

/// Largest index read, in bytes: the safetensors format's own limit for headers, which list the same names.
pub(super) const MAX_INDEX_BYTES: u64 = super::safetensors::MAX_HEADER_BYTES;

/// Names listed in one problem.
const LISTED: usize = 5;

/// Which shard holds which tensor.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Index {
    /// Shard by tensor name.
    pub weight_map: BTreeMap<String, String>,
}

impl Index {
    /// Reads `weight_map` of an index file.
    ///
    /// # Errors
    /// Every fault: no map, a shard that is no string or no file name within the folder.
    pub fn parse(file: &JsonFile) -> Result<Index, Vec<Diagnostic>> {
        let shown = &file.text.name;
        let Some(map) = file.get(&["weight_map"]).and_then(|v| v.as_object()) else {
            return Err(vec![
                Diagnostic::new(
                    "checkpoint",
                    format!("{shown} has no weight_map from tensor names to files"),
                )
                .help("this is no index of safetensors shards"),
            ]);
        };
        let mut problems = Vec::new();
        let mut refused = BTreeSet::new();
        let mut weight_map = BTreeMap::new();
        for (tensor, shard) in map {
            match shard.as_str() {
                Some(shard) if is_inner_path(shard) && shard.ends_with(".safetensors") => {
                    weight_map.insert(tensor.clone(), shard.to_owned());
                }
                other => {
                    let shard = other.map_or_else(|| shard.to_string(), str::to_owned);
                    if refused.insert(shard.clone()) && refused.len() <= LISTED {
                        problems.push(
                            Diagnostic::new(
                                "checkpoint",
                                format!(
                                    "{shown} places tensor {} in {}, which is no safetensors file within the folder",
                                    quoted(tensor),
                                    quoted(&shard)
                                ),
                            )
                            .help("shards are named relative to the index, without `..`"),
                        );
                    }
                }
            }
        }
        if weight_map.is_empty() && problems.is_empty() {
            problems.push(Diagnostic::new("checkpoint", format!("{shown} lists no tensors")));
        }
        if problems.is_empty() { Ok(Index { weight_map }) } else { Err(problems) }
    }

    /// The shards in byte order, each with the number of tensors it should hold.
    pub fn shards(&self) -> BTreeMap<&str, u64> {
        let mut shards = BTreeMap::new();
        for shard in self.weight_map.values() {
            *shards.entry(shard.as_str()).or_insert(0) += 1;
        }
        shards
    }
}

/// Checks that every tensor lies in exactly one shard, and in the one that the index names. Shards that could not be
/// read are absent from `shards` and not judged. `shown` is the index in messages.
pub(super) fn cross_check(
    index: Option<(&Index, &str)>,
    shards: &BTreeMap<String, Header>,
    problems: &mut Problems,
) {
    let mut holders: BTreeMap<&str, &str> = BTreeMap::new();
    let mut duplicates: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    for (shard, header) in shards {
        for tensor in header.tensors.keys() {
            if let Some(first) = holders.get(tensor.as_str()) {
                duplicates.entry((first, shard)).or_default().push(tensor);
            } else {
                holders.insert(tensor, shard);
            }
        }
    }
    for ((first, second), tensors) in duplicates {
        problems.push(
            Diagnostic::new(
                "checkpoint",
                format!(
                    "duplicate {}: in {first} and in {second}: {}",
                    counted(&tensors),
                    names(&tensors)
                ),
            )
            .help("only one of the two files can hold them: remove the other file, or write the model again"),
        );
    }
    let Some((index, shown)) = index else { return };
    let mut absent: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut elsewhere: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    for (tensor, shard) in &index.weight_map {
        let Some(header) = shards.get(shard) else { continue };
        if header.tensors.contains_key(tensor) {
            continue;
        }
        match holders.get(tensor.as_str()) {
            Some(other) => elsewhere.entry((shard, other)).or_default().push(tensor),
            None => absent.entry(shard).or_default().push(tensor),
        }
    }
    for (shard, tensors) in absent {
        problems.push(Diagnostic::new(
            "checkpoint",
            format!(
                "{shard} lacks {} that {shown} places there: {}",
                counted(&tensors),
                names(&tensors)
            ),
        ));
    }
    for ((shard, other), tensors) in elsewhere {
        problems.push(Diagnostic::new(
            "checkpoint",
            format!(
                "{shown} places {} in {shard}, but {other} holds {}: {}",
                counted(&tensors),
                if tensors.len() == 1 { "it" } else { "them" },
                names(&tensors)
            ),
        ));
    }
    for (shard, header) in shards {
        let unlisted: Vec<&str> = header
            .tensors
            .keys()
            .map(String::as_str)
            .filter(|tensor| !index.weight_map.contains_key(*tensor))
            .collect();
        if !unlisted.is_empty() {
            problems.push(
                Diagnostic::new(
                    "checkpoint",
                    format!(
                        "{shard} holds {} that {shown} does not list: {}",
                        counted(&unlisted),
                        names(&unlisted)
                    ),
                )
                .help("index and shards come from different versions of the model: fetch all of them again"),
            );
        }
    }
}

fn counted(tensors: &[&str]) -> String {
    match tensors.len() {
        1 => "1 tensor".to_owned(),
        n => format!("{} tensors", diag::count(n as u64)),
    }
}

fn names(tensors: &[&str]) -> String {
    let quoted: Vec<String> = tensors.iter().take(LISTED + 1).map(|t| quoted(t)).collect();
    if tensors.len() <= LISTED {
        return diag::list(&quoted, LISTED);
    }
    format!(
        "{} and {} more",
        quoted[..LISTED].join(", "),
        diag::count((tensors.len() - LISTED) as u64)
    )
}
