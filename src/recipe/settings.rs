//! What a recipe says beside its rules: target, graphs, vision, towers.
//!
//! These settings are read, checked for type and range, kept and written back. Whether they fit a model and a target
//! (bucket against token counts, partition against sequence length) is for the stages that use them.

use std::fmt::Write;

use schemars::JsonSchema;
use toml::Spanned;
use toml::de::DeValue;

use super::read::{Reader, Section, bracketed, quoted};
use crate::model::Tower;

/// Most devices one artifact can be for; a typing error beyond it costs nothing to refuse.
const MAX_DEVICES: u64 = 65_536;

/// Longest sequence, largest batch or chunk: far above any model's, small enough for products in 64 bits.
const MAX_EXTENT: u64 = 1 << 31;

/// What the artifact is compiled for.
#[derive(Debug, Clone, PartialEq, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Target {
    /// Name of a target profile (memory, reserves, rounding, limits); none for a plain artifact.
    pub profile: Option<String>,
    /// Devices that share the model.
    #[schemars(with = "Option<u32>", range(min = 1, max = 65536))]
    pub devices: u64,
    /// How much of a device's memory may be used: a fraction, or a size such as "12GiB".
    #[schemars(schema_with = "super::schema::memory_budget", default)]
    pub memory_budget: Option<MemoryBudget>,
}

/// Limit on a device's memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MemoryBudget {
    /// Fraction of the device's memory, above 0, at most 1.
    Fraction(f64),
    /// Bytes.
    Bytes(u64),
}

/// How prefill and decode attend over the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attention {
    /// Over partitions of the cache.
    Flash,
    /// Over the whole sequence at once.
    Eager,
}

/// Element type of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // each variant is its own documentation
pub enum KvDtype {
    F32,
    F16,
    Bf16,
    Fp8,
}

/// Shapes of the static graphs. What is absent is derived from the model and the target.
#[derive(Debug, Clone, PartialEq, Default, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Graphs {
    /// Longest sequence, in tokens.
    #[schemars(range(min = 1))]
    pub max_seq_len: Option<u64>,
    /// Sequences decoded together.
    #[schemars(range(min = 1))]
    pub batch_size: Option<u64>,
    /// Batch sizes that get a decode program each.
    #[schemars(schema_with = "super::schema::positive_or_list", default)]
    pub decoder_batch_sizes: Option<Vec<u64>>,
    /// Tokens one prefill step takes.
    #[schemars(range(min = 1))]
    pub prefill_chunk_size: Option<u64>,
    /// Image tokens that get an image prefill program each.
    #[schemars(schema_with = "super::schema::positive_or_list", default)]
    pub image_prefill_chunk_size: Option<Vec<u64>>,
    /// `flash` or `eager`.
    #[schemars(schema_with = "super::schema::attention", default)]
    pub attention: Option<Attention>,
    /// Tokens of the KV cache that flash attention takes at a time.
    #[schemars(range(min = 1))]
    pub kv_partition_len: Option<u64>,
    /// Element type of the KV cache.
    #[schemars(schema_with = "super::schema::kv_dtype", default)]
    pub kv_dtype: Option<KvDtype>,
}

/// The image encoder.
#[derive(Debug, Clone, PartialEq, Default, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Vision {
    /// Image token counts that get a program each.
    #[schemars(schema_with = "super::schema::positive_or_list", default)]
    pub max_soft_tokens: Option<Vec<u64>>,
    /// Devices that run the encoder and the projector, counted from 0.
    #[schemars(schema_with = "super::schema::device_list", default)]
    pub devices: Option<Vec<u64>>,
}

/// Which parts of the model the artifact holds. The text tower always is in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Towers {
    /// The image encoder.
    #[schemars(with = "Option<bool>")]
    pub vision: bool,
    /// The audio encoder.
    #[schemars(with = "Option<bool>")]
    pub audio: bool,
    /// The projections from encoders into the text space.
    #[schemars(with = "Option<bool>")]
    pub projector: bool,
    /// The draft head or draft model.
    #[schemars(with = "Option<bool>")]
    pub draft: bool,
}

impl Attention {
    /// Every choice with its name in recipes.
    pub const NAMES: [(&'static str, Attention); 2] =
        [("flash", Attention::Flash), ("eager", Attention::Eager)];
}

impl KvDtype {
    /// Every choice with its name in recipes.
    pub const NAMES: [(&'static str, KvDtype); 4] = [
        ("f32", KvDtype::F32),
        ("f16", KvDtype::F16),
        ("bf16", KvDtype::Bf16),
        ("fp8", KvDtype::Fp8),
    ];
}

/// The name of a choice.
pub(super) fn name_of<T: PartialEq>(names: &[(&'static str, T)], value: &T) -> &'static str {
    names.iter().find(|(_, v)| v == value).map_or("", |(name, _)| name)
}

impl Default for Target {
    /// One device, no profile.
    fn default() -> Target {
        Target { profile: None, devices: 1, memory_budget: None }
    }
}

impl Default for Towers {
    /// Everything that the checkpoint has.
    fn default() -> Towers {
        Towers { vision: true, audio: true, projector: true, draft: true }
    }
}

impl Towers {
    /// Whether the artifact holds that tower.
    pub fn holds(&self, tower: Tower) -> bool {
        match tower {
            Tower::Text => true,
            Tower::Vision => self.vision,
            Tower::Audio => self.audio,
            Tower::Projector => self.projector,
            Tower::Draft => self.draft,
        }
    }
}

/// Writes `key = value` lines for the values that are there.
struct Lines(String);

impl Lines {
    fn section(title: &str) -> Lines {
        Lines(format!("\n[{title}]\n"))
    }

    fn put(&mut self, key: &str, value: Option<String>) {
        if let Some(value) = value {
            // Writing to a String cannot fail.
            let _ = writeln!(self.0, "{key} = {value}");
        }
    }
}

fn whole_list(values: &Option<Vec<u64>>) -> Option<String> {
    values.as_ref().map(|v| bracketed(v.iter().map(u64::to_string)))
}

impl Target {
    pub(super) const KEYS: &'static [&'static str] = &["profile", "devices", "memory_budget"];

    /// Takes over the values that the section has.
    pub(super) fn read(&mut self, reader: &mut Reader<'_>, section: &Section<'_>) {
        if let Some(profile) = reader.text(section, "profile") {
            self.profile = Some(profile.into_inner());
        }
        if let Some(devices) = reader.whole(section, "devices", 1..=MAX_DEVICES) {
            self.devices = devices;
        }
        if let Some(value) = section.table.get("memory_budget")
            && let Some(budget) = read_budget(reader, value)
        {
            self.memory_budget = Some(budget);
        }
    }

    pub(super) fn toml(&self) -> String {
        let mut out = Lines::section("target");
        out.put("profile", self.profile.as_deref().map(quoted));
        out.put("devices", Some(self.devices.to_string()));
        out.put(
            "memory_budget",
            self.memory_budget.map(|budget| match budget {
                MemoryBudget::Fraction(fraction) => format!("{fraction:?}"),
                MemoryBudget::Bytes(bytes) => quoted(&format!("{bytes}B")),
            }),
        );
        out.0
    }
}

/// Units of a size in bytes.
const UNITS: [(&str, u64); 5] =
    [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// `12GiB`, `1536 MiB`, `1000B`; whole numbers of a unit, above 0.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let (unit, factor) = UNITS.iter().find(|(unit, _)| text.ends_with(unit))?;
    let number = text.strip_suffix(unit)?.trim_end();
    if number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    number.parse::<u64>().ok()?.checked_mul(*factor).filter(|&bytes| bytes > 0)
}

fn read_budget(reader: &mut Reader<'_>, value: &Spanned<DeValue<'_>>) -> Option<MemoryBudget> {
    let ways = ["a fraction above 0 and at most 1, e.g. 0.9, or a size, e.g. \"12GiB\""];
    let fraction = match value.get_ref() {
        DeValue::Float(float) => float.as_str().parse::<f64>().ok(),
        DeValue::Integer(integer) => integer.as_str().parse::<f64>().ok(),
        DeValue::String(text) => {
            let bytes = parse_size(text);
            if bytes.is_none() {
                reader.problem(value.span(), "`memory_budget` is no size", "", ways);
            }
            return bytes.map(MemoryBudget::Bytes);
        }
        _ => {
            reader.wrong_type("memory_budget", value, "a fraction or a size");
            return None;
        }
    };
    let fraction = fraction.filter(|f| *f > 0.0 && *f <= 1.0);
    if fraction.is_none() {
        reader.problem(value.span(), "`memory_budget` is out of range", "", ways);
    }
    fraction.map(MemoryBudget::Fraction)
}

impl Graphs {
    pub(super) const KEYS: &'static [&'static str] = &[
        "max_seq_len",
        "batch_size",
        "decoder_batch_sizes",
        "prefill_chunk_size",
        "image_prefill_chunk_size",
        "attention",
        "kv_partition_len",
        "kv_dtype",
    ];

    /// Takes over the values that the section has.
    pub(super) fn read(&mut self, reader: &mut Reader<'_>, section: &Section<'_>) {
        let extent = 1..=MAX_EXTENT;
        let one = |reader: &mut Reader<'_>, key: &str, slot: &mut Option<u64>| {
            *slot = reader.whole(section, key, extent.clone()).or(*slot);
        };
        one(reader, "max_seq_len", &mut self.max_seq_len);
        one(reader, "batch_size", &mut self.batch_size);
        one(reader, "prefill_chunk_size", &mut self.prefill_chunk_size);
        one(reader, "kv_partition_len", &mut self.kv_partition_len);
        for (key, slot) in [
            ("decoder_batch_sizes", &mut self.decoder_batch_sizes),
            ("image_prefill_chunk_size", &mut self.image_prefill_chunk_size),
        ] {
            if let Some(list) = reader.wholes(section, key, extent.clone()) {
                *slot = Some(list);
            }
        }
        self.attention = reader.choice(section, "attention", &Attention::NAMES).or(self.attention);
        self.kv_dtype = reader.choice(section, "kv_dtype", &KvDtype::NAMES).or(self.kv_dtype);
    }

    /// Empty when nothing is set.
    pub(super) fn toml(&self) -> String {
        if *self == Graphs::default() {
            return String::new();
        }
        let mut out = Lines::section("graphs");
        let number = |n: Option<u64>| n.map(|n| n.to_string());
        out.put("max_seq_len", number(self.max_seq_len));
        out.put("batch_size", number(self.batch_size));
        out.put("decoder_batch_sizes", whole_list(&self.decoder_batch_sizes));
        out.put("prefill_chunk_size", number(self.prefill_chunk_size));
        out.put("image_prefill_chunk_size", whole_list(&self.image_prefill_chunk_size));
        out.put("attention", self.attention.map(|a| quoted(name_of(&Attention::NAMES, &a))));
        out.put("kv_partition_len", number(self.kv_partition_len));
        out.put("kv_dtype", self.kv_dtype.map(|k| quoted(name_of(&KvDtype::NAMES, &k))));
        out.0
    }
}

impl Vision {
    pub(super) const KEYS: &'static [&'static str] = &["max_soft_tokens", "devices"];

    /// Takes over the values that the section has.
    pub(super) fn read(&mut self, reader: &mut Reader<'_>, section: &Section<'_>) {
        if let Some(list) = reader.wholes(section, "max_soft_tokens", 1..=MAX_EXTENT) {
            self.max_soft_tokens = Some(list);
        }
        if let Some(list) = reader.wholes(section, "devices", 0..=MAX_DEVICES - 1) {
            self.devices = Some(list);
        }
    }

    /// Empty when nothing is set.
    pub(super) fn toml(&self) -> String {
        if *self == Vision::default() {
            return String::new();
        }
        let mut out = Lines::section("vision");
        out.put("max_soft_tokens", whole_list(&self.max_soft_tokens));
        out.put("devices", whole_list(&self.devices));
        out.0
    }
}

impl Towers {
    pub(super) const KEYS: &'static [&'static str] = &["vision", "audio", "projector", "draft"];

    /// Takes over the values that the section has.
    pub(super) fn read(&mut self, reader: &mut Reader<'_>, section: &Section<'_>) {
        for (key, slot) in [
            ("vision", &mut self.vision),
            ("audio", &mut self.audio),
            ("projector", &mut self.projector),
            ("draft", &mut self.draft),
        ] {
            if let Some(held) = reader.flag(section, key) {
                *slot = held;
            }
        }
    }

    pub(super) fn toml(&self) -> String {
        let mut out = Lines::section("towers");
        for (key, held) in [
            ("vision", self.vision),
            ("audio", self.audio),
            ("projector", self.projector),
            ("draft", self.draft),
        ] {
            out.put(key, Some(held.to_string()));
        }
        out.0
    }
}
