//! `quantization_config` as compressed-tensors 0.19 and 0.20 read it, derived from what is written.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::recipe::Activations;

/// A format of the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    PackQuantized,
    FloatQuantized,
    Nvfp4,
    Mxfp4,
}

/// What shares a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Strategy {
    Channel,
    Group(u64),
    TensorGroup(u64),
    Block([u64; 2]),
}

impl Strategy {
    /// Columns that share a scale and must divide a row.
    pub fn group(self) -> Option<u64> {
        match self {
            Strategy::Group(n) | Strategy::TensorGroup(n) => Some(n),
            Strategy::Channel | Strategy::Block(_) => None,
        }
    }
}

/// How one set of weights is quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Scheme {
    pub kind: Kind,
    pub bits: u32,
    pub float: bool,
    pub strategy: Strategy,
    pub activations: Option<Activations>,
}

impl Scheme {
    fn format(&self) -> &'static str {
        match self.kind {
            Kind::PackQuantized => "pack-quantized",
            Kind::FloatQuantized => "float-quantized",
            Kind::Nvfp4 => "nvfp4-pack-quantized",
            Kind::Mxfp4 => "mxfp4-pack-quantized",
        }
    }

    fn weights(&self) -> Value {
        let (strategy, group, block) = match self.strategy {
            Strategy::Channel => ("channel", Value::Null, Value::Null),
            Strategy::Group(n) => ("group", json!(n), Value::Null),
            Strategy::TensorGroup(n) => ("tensor_group", json!(n), Value::Null),
            Strategy::Block(b) => ("block", Value::Null, json!(b)),
        };
        let scale = match self.kind {
            Kind::Nvfp4 => json!("torch.float8_e4m3fn"),
            Kind::Mxfp4 => json!("torch.uint8"),
            Kind::PackQuantized | Kind::FloatQuantized => Value::Null,
        };
        json!({
            "num_bits": self.bits,
            "type": if self.float { "float" } else { "int" },
            "symmetric": true,
            "strategy": strategy,
            "group_size": group,
            "block_structure": block,
            "dynamic": false,
            "scale_dtype": scale,
        })
    }

    fn inputs(&self) -> Value {
        let (bits, kind, strategy, group) = match self.activations {
            Some(Activations::Int8Token) => (8, "int", "token", Value::Null),
            Some(Activations::Fp8Token) => (8, "float", "token", Value::Null),
            Some(Activations::Int8Group128) => (8, "int", "group", json!(128)),
            Some(Activations::Fp8Group128) => (8, "float", "group", json!(128)),
            _ => return Value::Null,
        };
        json!({
            "num_bits": bits,
            "type": kind,
            "symmetric": true,
            "strategy": strategy,
            "group_size": group,
            "dynamic": true,
        })
    }
}

/// Modules by scheme, and the ones left alone.
#[derive(Debug, Default)]
pub(super) struct Groups {
    schemes: Vec<(Scheme, BTreeSet<String>)>,
    kept: BTreeSet<String>,
}

fn module(tensor: &str) -> Option<&str> {
    tensor.strip_suffix(".weight")
}

impl Groups {
    /// A quantized weight.
    pub fn add(&mut self, tensor: &str, scheme: Scheme) {
        let Some(module) = module(tensor).map(str::to_owned) else { return };
        match self.schemes.iter_mut().find(|(known, _)| *known == scheme) {
            Some((_, modules)) => drop(modules.insert(module)),
            None => self.schemes.push((scheme, BTreeSet::from([module]))),
        }
    }

    /// A matrix that stays as it is.
    pub fn keep(&mut self, tensor: &str) {
        self.kept.extend(module(tensor).map(str::to_owned));
    }

    /// The section; `None` when nothing is quantized.
    pub fn section(&self, tied_head: bool) -> Option<Value> {
        let (first, _) = self.schemes.first()?;
        let mut ignore = self.kept.clone();
        if tied_head {
            // A module of its own that shares the embedding's values.
            ignore.insert("lm_head".to_owned());
        }
        // With one scheme the class name says it; several need names.
        let one = self.schemes.len() == 1;
        let one_format = self.schemes.iter().all(|(s, _)| s.format() == first.format());
        let groups: BTreeMap<String, Value> = self
            .schemes
            .iter()
            .enumerate()
            .map(|(i, (scheme, modules))| {
                let targets = if one { json!(["Linear"]) } else { json!(modules) };
                let group = json!({
                    "targets": targets,
                    "weights": scheme.weights(),
                    "input_activations": scheme.inputs(),
                    "output_activations": null,
                    "format": scheme.format(),
                });
                (format!("group_{i}"), group)
            })
            .collect();
        Some(json!({
            "quant_method": "compressed-tensors",
            "format": if one_format { first.format() } else { "mixed-precision" },
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ignore,
            "kv_cache_scheme": null,
            "version": "0.19.0",
        }))
    }
}
