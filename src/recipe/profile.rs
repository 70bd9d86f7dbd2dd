//! Target profiles: what a kind of device has, runs and limits. The files under `recipes/targets` name a source for every
//! number.

use serde::{Deserialize, Deserializer, de};

use super::read::AREA;
use super::settings::{Attention, KvDtype, parse_size};
use super::{Assignment, Recipe};
use crate::diag::{Diagnostic, Failure, FailureKind, Problems, Result, count, list, nearest};
use crate::model::WeightTable;

/// A kind of device.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Version of the document, 1.
    pub schema: u32,
    /// Name in recipes.
    pub name: String,
    /// What it is, for people.
    pub description: String,
    /// How its engine hands out cache memory.
    pub allocator: Allocator,
    /// Its memory.
    pub memory: DeviceMemory,
    /// Sizes of programs where the recipe says nothing.
    pub graphs: GraphDefaults,
    /// What its compiler refuses.
    #[serde(default)]
    pub limits: Limits,
    /// What it runs.
    pub supports: Supports,
    /// What its engine takes beside weights and cache.
    #[serde(default)]
    pub allowances: Allowances,
}

/// Memory that an engine takes beside weights and cache, which nobody outside can compute: assumptions, each with its
/// source in the profile.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Allowances {
    /// Bytes of one program on each of its devices.
    #[serde(deserialize_with = "bytes")]
    pub per_program: u64,
    /// Bytes on a device whatever it serves.
    #[serde(deserialize_with = "bytes")]
    pub fixed: u64,
    /// Bytes on a device for every sequence that is served together.
    #[serde(deserialize_with = "bytes")]
    pub per_sequence: u64,
    /// Whether the image encoder's weights stay in host memory.
    pub encoder_on_host: bool,
}

/// How an engine hands out cache memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Allocator {
    /// optimum-rbln: blocks found by search over what the compiler allocated.
    Rbln,
    /// radiance: one pool, pages of groups that run out at the same token.
    Radiance,
    /// vLLM: pages over groups of layers in a fraction of the memory.
    Vllm,
    /// No rounding, no reserve but the stated one.
    Exact,
}

/// Memory of one device.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceMemory {
    /// Bytes in all.
    #[serde(deserialize_with = "bytes")]
    pub device: u64,
    /// Parts of equal size that hold separate tensors.
    #[serde(default = "one")]
    pub chiplets: u64,
    /// Bytes that the system keeps.
    #[serde(default, deserialize_with = "bytes")]
    pub reserve: u64,
    /// Bytes that every tensor's size is rounded up to.
    #[serde(default = "one", deserialize_with = "bytes")]
    pub rounding: u64,
    /// Fraction that the engine uses unless told otherwise.
    #[serde(default = "whole")]
    pub utilization: f64,
}

/// Sizes of programs where the recipe says nothing.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GraphDefaults {
    /// `flash` or `eager`.
    #[serde(deserialize_with = "attention")]
    pub attention: Attention,
    /// Tokens of a prefill call.
    pub prefill_chunk_size: u64,
    /// Tokens of a cache block.
    pub kv_partition_len: u64,
    /// Element type of the cache.
    #[serde(deserialize_with = "kv_dtype")]
    pub kv_dtype: KvDtype,
    /// Image prefill sizes are multiples of it.
    pub image_chunk_multiple: u64,
}

/// What a compiler refuses; absent where it has no limit.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Prefill chunks are multiples of it.
    pub prefill_chunk_multiple: Option<u64>,
    /// Longest sequence of eager attention.
    pub eager_max_seq_len: Option<u64>,
    /// Shortest sequence of flash attention.
    pub flash_min_seq_len: Option<u64>,
    /// Least and most tokens of a partition.
    pub kv_partition_len: Option<[u64; 2]>,
    /// Least partitions of a sequence.
    pub partitions_min: Option<u64>,
    /// Most tokens of a window and a prefill chunk together.
    pub window_and_chunk: Option<u64>,
    /// Whether the rows of one prefill call lie in one partition, so that a sequence leaves slots unused before a
    /// chunk that would cross a border.
    pub chunk_in_partition: bool,
    /// Whether text runs in chunks of an image's tokens where all images of a model have one number of them.
    pub one_prefill_size: bool,
}

/// What a device runs.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Supports {
    /// Names of encodings; `*` for any.
    pub encodings: Vec<String>,
    /// Element types of the cache.
    #[serde(deserialize_with = "kv_dtypes")]
    pub kv_dtypes: Vec<KvDtype>,
}

fn one() -> u64 {
    1
}

fn whole() -> f64 {
    1.0
}

fn bytes<'de, D: Deserializer<'de>>(d: D) -> std::result::Result<u64, D::Error> {
    let text = String::deserialize(d)?;
    parse_size(&text).ok_or_else(|| de::Error::custom(format!("`{text}` is no size")))
}

fn named<T: Copy>(names: &[(&'static str, T)], text: &str) -> Option<T> {
    names.iter().find(|(name, _)| *name == text).map(|(_, value)| *value)
}

fn attention<'de, D: Deserializer<'de>>(d: D) -> std::result::Result<Attention, D::Error> {
    let text = String::deserialize(d)?;
    named(&Attention::NAMES, &text)
        .ok_or_else(|| de::Error::custom(format!("no attention `{text}`")))
}

fn kv_dtype<'de, D: Deserializer<'de>>(d: D) -> std::result::Result<KvDtype, D::Error> {
    let text = String::deserialize(d)?;
    named(&KvDtype::NAMES, &text)
        .ok_or_else(|| de::Error::custom(format!("no cache type `{text}`")))
}

fn kv_dtypes<'de, D: Deserializer<'de>>(d: D) -> std::result::Result<Vec<KvDtype>, D::Error> {
    let texts = Vec::<String>::deserialize(d)?;
    let unknown = |text: &String| de::Error::custom(format!("no cache type `{text}`"));
    texts.iter().map(|t| named(&KvDtype::NAMES, t).ok_or_else(|| unknown(t))).collect()
}

macro_rules! profiles {
    ($($name:literal),* $(,)?) => {
        &[$((
            $name,
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/recipes/targets/", $name, ".toml")),
        )),*]
    };
}

/// Every profile that is part of the program: its name and text.
pub const PROFILES: &[(&str, &str)] = profiles![
    "rbln-ca22",
    "rbln-ca25",
    "rbln-cr",
    "amd-r9700",
    "amd-mi300x",
    "amd-mi325x",
    "amd-mi355x",
    "nvidia-h100",
    "nvidia-h200",
    "nvidia-b200",
    "tpu-v6e",
    "tpu-v7",
    "cpu",
];

impl Profile {
    /// The profile of that name.
    ///
    /// # Errors
    /// [`FailureKind::Usage`] for an unknown name, with the nearest ones.
    pub fn find(name: &str) -> Result<Profile> {
        match PROFILES.iter().find(|(known, _)| *known == name) {
            Some((_, text)) => toml::from_str(text).map_err(|error| {
                Failure::plain(FailureKind::Failed, format!("the profile {name}: {error}"))
            }),
            None => Err(unknown(name)),
        }
    }

    /// Every profile, in the order of [`PROFILES`].
    pub fn all() -> impl Iterator<Item = Result<Profile>> {
        PROFILES.iter().map(|(name, _)| Profile::find(name))
    }

    /// Bytes that programs may use on a device: the memory without the system's reserve.
    pub fn usable(&self) -> u64 {
        self.memory.device.saturating_sub(self.memory.reserve)
    }

    /// Whether the device runs weights of that encoding.
    pub fn runs(&self, encoding: &str) -> bool {
        self.supports.encodings.iter().any(|e| e == "*" || e == encoding)
    }

    /// One problem for every encoding of the assignment that the device does not run, with the rule that gives it.
    pub fn misfits(
        &self,
        recipe: &Recipe,
        table: &WeightTable,
        assignment: &Assignment,
    ) -> Problems {
        let mut problems = Problems::new();
        let mut seen: Vec<&str> = Vec::new();
        for (assigned, first) in assignment.stored(table) {
            let name: &str = &assigned.encoding_name;
            // Integer tables and other plain types stay with the host.
            let plain = assigned.rule.is_none() && !first.dtype.is_float();
            if self.runs(name) || plain || seen.contains(&name) {
                continue;
            }
            seen.push(name);
            let all = assignment.stored(table).filter(|(a, _)| *a.encoding_name == *name).count();
            let mut problem = Diagnostic::new(
                AREA,
                format!(
                    "{} runs no weights in {name}, which {} would be stored in, {} among them",
                    self.name,
                    count(all as u64),
                    first.name
                ),
            );
            if let Some(rule) = assigned.rule.and_then(|rule| recipe.rules.get(rule)) {
                problem = rule.places.encoding.mark(problem, "chosen here");
            }
            problems.push(
                problem.help(format!("it runs {}", list(&self.supports.encodings, usize::MAX))),
            );
        }
        problems
    }
}

fn unknown(name: &str) -> Failure {
    let names: Vec<&str> = PROFILES.iter().map(|(name, _)| *name).collect();
    let mut problem = Diagnostic::new(AREA, format!("\"{name}\" is no target profile"));
    // People leave the vendor out.
    let mut near: Vec<&str> = names
        .iter()
        .copied()
        .filter(|n| n.split_once('-').is_some_and(|(_, n)| n == name))
        .collect();
    if near.is_empty() {
        near = nearest(name, names.iter().copied());
    }
    if !near.is_empty() {
        problem = problem.help(format!("did you mean {}?", list(&near, 3)));
    }
    let problem = problem.help(format!("profiles: {}", list(&names, usize::MAX)));
    Failure::one(FailureKind::Usage, "no such target", problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_reads_and_is_called_like_its_file() {
        for (name, _) in PROFILES {
            let profile = Profile::find(name).unwrap_or_else(|f| panic!("{f}"));
            assert_eq!(profile.name, *name);
            assert_eq!(profile.schema, 1);
            assert!(profile.usable() > 0 && profile.memory.utilization <= 1.0);
            assert!(profile.supports.kv_dtypes.contains(&profile.graphs.kv_dtype), "{name}");
            for encoding in profile.supports.encodings.iter().filter(|e| *e != "*") {
                let plain = ["bf16", "f16", "f32"].contains(&encoding.as_str());
                assert!(plain || super::super::find(encoding).is_some(), "{name}: {encoding}");
            }
        }
    }

    #[test]
    fn an_atom_device_has_16096_mib_to_use() {
        // optimum-rbln 0.11.2: 16 GiB less 288 MiB.
        let atom = Profile::find("rbln-ca25").expect("profile");
        assert_eq!(atom.usable(), 16_877_879_296);
        assert_eq!(Profile::find("rbln-cr").expect("profile").usable(), 140 << 30);
    }

    #[test]
    fn an_unknown_profile_names_those_that_exist() {
        let failure = Profile::find("h200").expect_err("unknown");
        assert_eq!(failure.kind, FailureKind::Usage);
        let help = failure.problems[0].help.join("\n");
        assert!(help.contains("did you mean nvidia-h200?"), "{help}");
        assert!(help.contains("rbln-ca25"), "{help}");
    }
}
