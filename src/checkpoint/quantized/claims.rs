//! What the configuration says about the quantization. Names and types of tensors decide; the configuration fills in
//! what they leave open, and must not contradict them.

use regex::Regex;
use serde_json::Value;

use crate::checkpoint::safetensors::quoted;
use crate::diag::{Diagnostic, Problems};

/// Methods whose tensors are read, as `quant_method` spells them.
const METHODS: [&str; 9] = [
    "compressed-tensors",
    "modelopt",
    "modelopt_fp4",
    "modelopt_mixed",
    "fp8",
    "awq",
    "gptq",
    "mxfp4",
    "auto-round",
];

/// Formats of compressed-tensors that are read.
const FORMATS: [&str; 9] = [
    "dense",
    "int-quantized",
    "pack-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
];

/// Algorithms of ModelOpt whose tensors are read, in upper case, with the bits of their codes.
const ALGORITHMS: [(&str, u64); 10] = [
    ("FP8", 8),
    ("FP8_PER_CHANNEL_PER_TOKEN", 8),
    ("FP8_PB_WO", 8),
    ("W4A16_AWQ", 4),
    ("W8A16", 8),
    ("NVFP4", 4),
    ("W4A16_NVFP4", 4),
    ("NVFP4_AWQ", 4),
    ("MXFP4", 4),
    ("MXFP8", 8),
];

/// ModelOpt's algorithm of a checkpoint whose `quantized_layers` name one for every module.
const MIXED: &str = "MIXED_PRECISION";

/// Bits of an algorithm's codes; `None` for one that is not read.
fn algorithm_bits(algorithm: &str) -> Option<u64> {
    let upper = algorithm.to_ascii_uppercase();
    ALGORITHMS.iter().find(|(name, _)| *name == upper).map(|(_, bits)| *bits)
}

/// The supported methods, for messages.
pub(super) const SUPPORTED: &str = "read are compressed-tensors (int-quantized, pack-quantized, float-quantized, \
     nvfp4, mxfp4 and mxfp8), ModelOpt (FP8, NVFP4, W8A16, W4A16_AWQ, MXFP4, MXFP8), fp8 with scales or blocks, AutoAWQ \
     gemm, GPTQ and gpt-oss mxfp4";

/// A target or an entry of `ignore`.
#[derive(Debug)]
enum Matcher {
    Exact(String),
    Pattern(Regex),
}

impl Matcher {
    fn parse(text: &str) -> Result<Matcher, String> {
        match text.strip_prefix("re:") {
            // Python's re.match: anchored at the start only.
            Some(pattern) => Regex::new(&format!("^(?:{pattern})"))
                .map(Matcher::Pattern)
                .map_err(|_| format!("`{text}` is no regular expression that is understood")),
            None => Ok(Matcher::Exact(text.to_owned())),
        }
    }

    /// A name of ModelOpt, whole, in which `*` stands for anything.
    fn glob(text: &str) -> Option<Matcher> {
        let pattern = regex::escape(text).replace("\\*", ".*");
        Regex::new(&format!("^{pattern}$")).map(Matcher::Pattern).ok()
    }

    /// A key of `quantized_layers`: a module or a container of modules, from any wrapper of the model.
    fn layer(name: &str) -> Option<Matcher> {
        let name = regex::escape(name);
        Regex::new(&format!(r"^(?:.*\.)?{name}(?:\..*)?$")).map(Matcher::Pattern).ok()
    }

    fn matches(&self, module: &str) -> bool {
        match self {
            Matcher::Exact(name) => name == module,
            Matcher::Pattern(pattern) => pattern.is_match(module),
        }
    }
}

/// Arguments of compressed-tensors, or of an entry of ModelOpt's `quantized_layers`, for the weights of some modules.
#[derive(Debug)]
struct Group {
    targets: Vec<Matcher>,
    bits: Option<u64>,
    group: Option<u64>,
    block: Option<[u64; 2]>,
}

/// The configuration's claims; all empty without one.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// `quant_method`, or what stands for it.
    pub method: Option<String>,
    groups: Vec<Group>,
    ignore: Vec<Matcher>,
    /// Whether `quantized_layers` lists every quantized module (the groups then are its entries).
    listed: bool,
    /// Bits of GPTQ and AWQ.
    pub bits: Option<u64>,
    /// Group size of GPTQ and AWQ.
    pub group_size: Option<u64>,
    /// Whether GPTQ orders its columns by activation.
    pub desc_act: bool,
    /// Whether GPTQ stores zero points less one (version 1).
    pub zero_less_one: bool,
    /// `weight_block_size` of fp8.
    block: Option<[u64; 2]>,
    /// Whether it says that no weight is quantized.
    pub dense: bool,
}

fn pair(value: Option<&Value>) -> Option<[u64; 2]> {
    match value? {
        Value::Array(list) => match list.as_slice() {
            [a, b] => Some([a.as_u64()?, b.as_u64()?]),
            _ => None,
        },
        // Files of 2024 spell it 128x128.
        Value::String(text) => {
            let (a, b) = text.split_once('x')?;
            Some([a.trim().parse().ok()?, b.trim().parse().ok()?])
        }
        _ => None,
    }
    .filter(|pair| !pair.contains(&0))
}

impl Claims {
    /// Reads a configuration block of that method; everything it holds that is not read is a problem.
    pub fn read(method: Option<&str>, block: &Value, problems: &mut Problems) -> Claims {
        let mut claims = Claims { zero_less_one: true, ..Claims::default() };
        let refuse = |problems: &mut Problems, what: String| {
            problems.push(Diagnostic::new("quantization", what).help(SUPPORTED));
        };
        let name = method.unwrap_or_default().to_ascii_lowercase();
        if !METHODS.contains(&name.as_str()) {
            let shown = if name.is_empty() { "an unnamed method" } else { name.as_str() };
            refuse(problems, format!("the weights are quantized with {shown}, which is not read"));
            return claims;
        }
        let text = |key: &str| block.get(key).and_then(Value::as_str);
        match name.as_str() {
            "compressed-tensors" => claims.compressed_tensors(block, problems),
            "awq" => {
                if let Some(version) = text("version")
                    && !version.eq_ignore_ascii_case("gemm")
                {
                    refuse(
                        problems,
                        format!("AWQ packs its codes as `{version}`; only gemm is read"),
                    );
                }
            }
            "gptq" | "auto-round" => {
                let format = text("checkpoint_format").unwrap_or("gptq");
                claims.zero_less_one = format != "gptq_v2";
                let marlin = block.get("is_marlin_format").and_then(Value::as_bool) == Some(true);
                if marlin || !["gptq", "gptq_v2"].contains(&format) {
                    let format = if marlin { "marlin" } else { format };
                    refuse(
                        problems,
                        format!("GPTQ packs its codes as `{format}`, which is not read"),
                    );
                }
                if let Some(packing) = text("packing_format")
                    && !["gptq", "awq"].iter().any(|kind| packing.ends_with(kind))
                {
                    refuse(
                        problems,
                        format!("auto-round packs its codes as `{packing}`, which is not read"),
                    );
                }
            }
            _ => {
                if let Some(algorithm) = text("quant_algo") {
                    if algorithm.eq_ignore_ascii_case(MIXED) {
                        claims.quantized_layers(block, problems);
                    } else if algorithm_bits(algorithm).is_none() {
                        refuse(problems, format!("ModelOpt's algorithm {algorithm} is not read"));
                    }
                }
                if name.starts_with("modelopt") {
                    for key in ["exclude_modules", "ignore"] {
                        let globs = block.get(key).and_then(Value::as_array).into_iter().flatten();
                        let globs = globs.filter_map(Value::as_str);
                        claims.ignore.extend(globs.filter_map(Matcher::glob));
                    }
                }
            }
        }
        let number = |key: &str| block.get(key).and_then(Value::as_u64);
        claims.method = Some(name);
        claims.bits = number("bits").or(number("w_bit"));
        claims.group_size = number("group_size").or(number("q_group_size"));
        claims.desc_act = block.get("desc_act").and_then(Value::as_bool) == Some(true);
        claims.block = pair(block.get("weight_block_size"));
        claims
    }

    /// The modules of a mixed checkpoint of ModelOpt, each with its algorithm.
    fn quantized_layers(&mut self, block: &Value, problems: &mut Problems) {
        let Some(layers) = block.get("quantized_layers").and_then(Value::as_object) else { return };
        self.listed = true;
        for (module, entry) in layers {
            let algorithm = entry.get("quant_algo").and_then(Value::as_str);
            let bits = algorithm.and_then(algorithm_bits);
            if bits.is_none() {
                let shown = algorithm.unwrap_or("no algorithm");
                let what = format!(
                    "`quantized_layers` gives {} {shown}, which is not read",
                    quoted(module)
                );
                problems.push(Diagnostic::new("quantization", what).help(SUPPORTED));
            }
            self.groups.push(Group {
                targets: Matcher::layer(module).into_iter().collect(),
                bits,
                group: entry.get("group_size").and_then(Value::as_u64).filter(|g| *g > 0),
                block: None,
            });
        }
    }

    fn compressed_tensors(&mut self, block: &Value, problems: &mut Problems) {
        let mut wrong = |what: String| {
            problems.push(Diagnostic::new("quantization", what).help(SUPPORTED));
        };
        let mut format = |value: Option<&Value>| {
            if let Some(format) = value.and_then(Value::as_str)
                && !FORMATS.contains(&format)
            {
                wrong(format!("the format `{format}` of compressed-tensors is not read"));
            }
        };
        format(block.get("format"));
        let groups = block.get("config_groups").and_then(Value::as_object);
        for group in groups.into_iter().flat_map(|g| g.values()) {
            format(group.get("format"));
        }
        let filled = |value: &Value| value.as_object().is_some_and(|o| !o.is_empty());
        if block.get("transform_config").is_some_and(filled) {
            wrong("the weights are rotated (`transform_config`), which is not undone".to_owned());
        }
        let sparse = block.get("sparsity_config").and_then(|c| c.get("format"));
        if let Some(format) = sparse.and_then(Value::as_str).filter(|f| *f != "dense") {
            wrong(format!("the weights are stored sparse (`{format}`), which is not read"));
        }
        let list = |value: Option<&Value>| -> Vec<String> {
            let items = value.and_then(Value::as_array).into_iter().flatten();
            items.filter_map(Value::as_str).map(str::to_owned).collect()
        };
        let mut matchers = |texts: Vec<String>| -> Vec<Matcher> {
            let parsed = texts.iter().map(|text| Matcher::parse(text));
            parsed.filter_map(|m| m.map_err(&mut wrong).ok()).collect()
        };
        self.ignore = matchers(list(block.get("ignore")));
        self.dense = groups.is_none_or(|g| g.is_empty())
            || block.get("format").and_then(Value::as_str) == Some("dense");
        for group in groups.into_iter().flat_map(|g| g.values()) {
            let weights = group.get("weights");
            let get = |key: &str| weights.and_then(|w| w.get(key));
            self.groups.push(Group {
                targets: matchers(list(group.get("targets"))),
                bits: get("num_bits").and_then(Value::as_u64),
                group: get("group_size").and_then(Value::as_u64).filter(|g| *g > 0),
                block: pair(get("block_structure")),
            });
        }
    }

    /// The group that names a module itself, else the only one there is. A class name (`Linear`) stands for modules
    /// that the names of tensors do not tell apart.
    fn group(&self, module: &str) -> Option<&Group> {
        let named = self.groups.iter().find(|g| g.targets.iter().any(|t| t.matches(module)));
        match self.groups.as_slice() {
            [only] => Some(named.unwrap_or(only)),
            _ => named,
        }
    }

    /// Bits of a module's codes.
    pub fn bits_of(&self, module: &str) -> Option<u64> {
        self.group(module).and_then(|g| g.bits).or(self.bits)
    }

    /// Columns of a module's groups.
    pub fn group_of(&self, module: &str) -> Option<u64> {
        self.group(module).and_then(|g| g.group)
    }

    /// Rows and columns of a module's blocks.
    pub fn block_of(&self, module: &str) -> Option<[u64; 2]> {
        self.group(module).and_then(|g| g.block).or(self.block)
    }

    /// The key of the configuration that says that the module is not quantized.
    pub fn ignores(&self, module: &str) -> Option<&'static str> {
        if self.ignore.iter().any(|m| m.matches(module)) {
            return Some("ignore");
        }
        let named = || self.groups.iter().any(|g| g.targets.iter().any(|t| t.matches(module)));
        (self.listed && !named()).then_some("quantized_layers")
    }
}
