//! Collects the quantized weights of a checkpoint: every tensor of theirs is used once, left out with a reason, or a
//! problem.

use std::collections::{BTreeMap, BTreeSet};

use super::claims::{Claims, SUPPORTED};
use super::matrix::{Layout, Matrix};
use super::packed::{Packed, Second};
use super::{FACTOR_KEY, signs};
use super::{awq, compressed_tensors, fine_grained_fp8, gpt_oss, gptq, modelopt};
use crate::checkpoint::parts::Place;
use crate::checkpoint::shard::Shard;
use crate::diag::{self, Diagnostic, Problems};
use crate::tensor::{DType, Shape, TensorInfo};

/// Endings of tensors about activations and caches, which an artifact of weights does not hold.
const ACTIVATIONS: [&str; 14] = [
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".input_scale_inv",
    ".activation_scale",
    ".output_scale",
    ".output_zero_point",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".prob_scale",
    ".k_zero_point",
    ".v_zero_point",
    ".kv_cache_scaling_factor",
];

/// Endings that only the parts of a quantized weight have.
const COMPANIONS: [&str; 13] = [
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_zero_point",
    ".weight_shape",
    ".weight_g_idx",
    ".weight_packed",
    ".qweight",
    ".qzeros",
    ".scales",
    ".g_idx",
    "_scale_inv",
];

/// A tensor as the checkpoint holds it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Raw<'a> {
    pub name: &'a str,
    pub dtype: DType,
    pub shape: &'a Shape,
    pub place: Place,
}

impl Raw<'_> {
    /// Extents of a matrix; `None` for another rank.
    pub fn matrix(&self) -> Option<(u64, u64)> {
        match *self.shape.extents() {
            [rows, cols] => Some((rows, cols)),
            _ => None,
        }
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.place.end - self.place.begin
    }
}

/// First-level scales found to fit a weight.
pub(super) struct Scales {
    pub matrix: Matrix,
    pub block: [u64; 2],
}

/// The search while it runs.
pub(super) struct Finder<'a> {
    tensors: &'a BTreeMap<String, TensorInfo>,
    places: &'a BTreeMap<String, Place>,
    shards: &'a [Shard],
    /// What the configuration says.
    pub claims: &'a Claims,
    used: BTreeSet<&'a str>,
    packed: BTreeMap<String, Packed>,
    unused: Vec<(String, String)>,
    /// Names by what is wrong with them.
    wrong: BTreeMap<String, Vec<String>>,
}

/// What a search found.
pub(super) struct Found {
    /// Quantized weights by logical name.
    pub packed: BTreeMap<String, Packed>,
    /// Every tensor that is no part of one, and the weights in their stead.
    pub tensors: BTreeMap<String, TensorInfo>,
    /// Tensors left out, with the reason.
    pub unused: Vec<(String, String)>,
}

impl<'a> Finder<'a> {
    pub fn new(
        tensors: &'a BTreeMap<String, TensorInfo>,
        places: &'a BTreeMap<String, Place>,
        shards: &'a [Shard],
        claims: &'a Claims,
    ) -> Finder<'a> {
        Finder {
            tensors,
            places,
            shards,
            claims,
            used: BTreeSet::new(),
            packed: BTreeMap::new(),
            unused: Vec::new(),
            wrong: BTreeMap::new(),
        }
    }

    /// A tensor of that name.
    pub fn get(&self, name: &str) -> Option<Raw<'a>> {
        let (name, info) = self.tensors.get_key_value(name)?;
        let place = *self.places.get(name)?;
        Some(Raw { name, dtype: info.dtype, shape: &info.shape, place })
    }

    /// A tensor of that name, which then counts as used.
    pub fn take(&mut self, name: &str) -> Option<Raw<'a>> {
        let raw = self.get(name)?;
        self.used.insert(raw.name);
        Some(raw)
    }

    /// A tensor that the weight `of` cannot do without.
    pub fn need(&mut self, name: &str, of: &str) -> Option<Raw<'a>> {
        let found = self.take(name);
        if found.is_none() {
            let leaf = name.rsplit('.').next().unwrap_or(name);
            self.wrong(of, format!("has no `{leaf}` beside it"));
        }
        found
    }

    /// Notes what is wrong with a tensor.
    pub fn wrong(&mut self, name: &str, what: impl Into<String>) {
        self.wrong.entry(what.into()).or_default().push(name.to_owned());
    }

    /// The bytes of a tensor.
    pub fn bytes(&self, raw: &Raw<'_>) -> &'a [u8] {
        let shard = self.shards.get(raw.place.shard);
        shard.and_then(|s| s.bytes(raw.place.begin..raw.place.end)).unwrap_or(&[])
    }

    /// Whether only the header of the tensor's file is at hand, and not the tensor.
    pub fn unread(&self, raw: &Raw<'_>) -> bool {
        let shard = self.shards.get(raw.place.shard);
        shard.is_some_and(|s| s.is_head() && s.bytes(raw.place.begin..raw.place.end).is_none())
    }

    /// A single f32 that scales a whole tensor: finite and above 0. 1 where only headers are at hand: no shape and no
    /// size depends on it.
    pub fn scalar(&mut self, raw: &Raw<'_>) -> Option<f32> {
        if raw.dtype != DType::F32 || raw.shape.elements() != Some(1) {
            let what = format!("holds {} of shape {}; one f32 is needed", raw.dtype, raw.shape);
            self.wrong(raw.name, what);
            return None;
        }
        if self.unread(raw) {
            return Some(1.0);
        }
        let value = self.bytes(raw).first_chunk::<4>().map(|b| f32::from_le_bytes(*b))?;
        if value.is_finite() && value > 0.0 {
            return Some(value);
        }
        self.wrong(raw.name, format!("is {value}; a global scale is finite and above 0"));
        None
    }

    /// The factor that a global divisor stands for: its reciprocal, unless the file says which factor it is the
    /// reciprocal of.
    pub fn factor(&mut self, raw: &Raw<'_>, divisor: f32) -> Option<f32> {
        let shard = self.shards.get(raw.place.shard);
        if self.unread(raw) {
            return Some(1.0);
        }
        let recorded = shard.and_then(|s| s.metadata.get(&format!("{FACTOR_KEY}{}", raw.name)));
        let Some(recorded) = recorded else { return Some(1.0 / divisor) };
        match recorded.parse::<f32>() {
            Ok(factor) if factor > 0.0 && 1.0 / factor == divisor => Some(factor),
            _ => {
                let what = format!(
                    "is {divisor:e}, which is not the reciprocal of the {recorded:.40} that its file records for it"
                );
                self.wrong(raw.name, what);
                None
            }
        }
    }

    /// Numbers of a small tensor of 32- or 64-bit integers.
    pub fn integers(&mut self, raw: &Raw<'_>) -> Option<Vec<i64>> {
        if self.unread(raw) {
            // Orders of columns hang on these numbers.
            self.wrong(
                raw.name,
                "decides the weight's layout by its values, and only headers were fetched: download the model first",
            );
            return None;
        }
        let bytes = self.bytes(raw);
        match raw.dtype {
            DType::I64 => {
                Some(bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect())
            }
            DType::I32 => {
                let all = bytes.as_chunks::<4>().0.iter();
                Some(all.map(|b| i64::from(i32::from_le_bytes(*b))).collect())
            }
            other => {
                self.wrong(raw.name, format!("holds {other}; whole numbers are needed"));
                None
            }
        }
    }

    /// Fits first-level scales to a weight of `rows` × `cols`: one for the tensor, a row, a group of columns or a
    /// block. `dtype` is the type that their bytes stand for.
    pub fn scales(
        &mut self,
        raw: &Raw<'_>,
        dtype: DType,
        (rows, cols): (u64, u64),
        module: &str,
    ) -> Option<Scales> {
        let claimed = self.claims.block_of(module);
        let fit = |down: u64, across: u64| {
            if down == rows && across == 1 && rows > 1 {
                return Some([1, 0]);
            }
            if (down, across) == (1, 1) {
                // A weight of one block looks like one of one scale; only the configuration tells them apart.
                let one = claimed.filter(|b| b[0] > 1 && rows <= b[0] && cols <= b[1]);
                return Some(one.unwrap_or([0, 0]));
            }
            if down == rows && (rows > 1 || claimed.is_none()) && across > 0 && cols % across == 0 {
                return Some([1, cols / across]);
            }
            let block = claimed.unwrap_or([128, 128]);
            let grid = (rows.div_ceil(block[0]), cols.div_ceil(block[1]));
            (grid == (down, across)).then_some(block)
        };
        let extents = raw.shape.extents();
        let (down, across) = match *extents {
            [] => (1, 1),
            [n] => (n, 1),
            [down, across] => (down, across),
            _ => (0, 0),
        };
        let Some(block) = fit(down, across) else {
            let what = format!(
                "has shape {}, which gives its weight of [{rows}, {cols}] no scale for the tensor, a row, a group or a \
                 block",
                raw.shape
            );
            self.wrong(raw.name, what);
            return None;
        };
        if let (Some(claimed), [1, found]) = (self.claims.group_of(module), block)
            && found != 0
            && found != claimed
        {
            let what = format!(
                "gives groups of {found} columns; the configuration says `group_size` {claimed}"
            );
            self.wrong(raw.name, what);
            return None;
        }
        Some(Scales { matrix: Matrix::plain(raw.place, dtype, down, across), block })
    }

    /// Checks that scales are floating point, and says in what type the weight's values are.
    pub fn float_scale(&mut self, raw: &Raw<'_>) -> Option<DType> {
        match raw.dtype {
            DType::F32 | DType::BF16 | DType::F16 => Some(raw.dtype),
            other => {
                self.wrong(raw.name, format!("holds {other}; scales are f32, f16 or bf16"));
                None
            }
        }
    }

    /// Adds a weight made of these tensors under its logical name.
    pub fn add(&mut self, name: String, shape: Shape, found: Weight<'_>) {
        let module = name.strip_suffix(".weight").unwrap_or(&name).to_owned();
        let main = found.tensors.first().map_or(name.as_str(), |raw| raw.name).to_owned();
        if let Some(key) = self.claims.ignores(&module) {
            let what = format!("is quantized, and the configuration's `{key}` says that it is not");
            self.wrong(&main, what);
            return;
        }
        let bits = u64::from(found.codes.dtype.bits());
        if let Some(claimed) = self.claims.bits_of(&module)
            && claimed != bits
        {
            self.wrong(
                &main,
                format!("has codes of {bits} bits; the configuration says {claimed}"),
            );
            return;
        }
        if !self.used.contains(name.as_str()) && self.tensors.contains_key(&name) {
            self.wrong(&main, "stands beside an unquantized tensor of the same weight");
            return;
        }
        let dtype = match found.scales.matrix.dtype {
            DType::BF16 => DType::BF16,
            _ => DType::F32,
        };
        let packed = Packed {
            info: TensorInfo { dtype, shape },
            codes: found.codes,
            scale: found.scales.matrix,
            block: found.scales.block,
            zero: found.zero,
            second: found.second,
            coarse: None,
            min: None,
            coarse_min: None,
            groups: found.groups.map(Into::into),
            input: found.input,
            bytes: found.tensors.iter().map(Raw::bytes).sum(),
        };
        self.packed.insert(name, packed);
    }

    /// Looks for every quantized weight.
    pub fn search(&mut self) {
        let names: Vec<&'a str> = self.tensors.keys().map(String::as_str).collect();
        for name in names {
            if self.used.contains(name) {
                continue;
            }
            if let Some(module) = name.strip_suffix(".weight_packed") {
                compressed_tensors::packed(self, module);
            } else if let Some(module) = name.strip_suffix(".qweight") {
                match gptq::is_gptq(self, module) {
                    true => gptq::find(self, module),
                    false => awq::find(self, module),
                }
            } else if let Some(stem) = name.strip_suffix("_blocks") {
                gpt_oss::find(self, stem);
            } else if let Some(module) = name.strip_suffix(".weight") {
                self.weight(module);
            }
        }
    }

    /// A tensor under the plain name of a weight, quantized if its type says so.
    fn weight(&mut self, module: &str) {
        let has = |ending: &str| self.tensors.contains_key(&format!("{module}.{ending}"));
        let Some(raw) = self.get(&format!("{module}.weight")) else { return };
        let inverse = has("weight_scale_inv");
        match raw.dtype {
            DType::F8E4M3 if inverse => fine_grained_fp8::find(self, module),
            DType::F8E4M3 | DType::I8 if has("weight_scale") => {
                compressed_tensors::plain(self, module)
            }
            DType::U8 if has("weight_scale") => modelopt::find(self, module),
            _ => {}
        }
    }

    /// Accounts for every tensor that no weight used.
    pub fn finish(mut self, problems: &mut Problems) -> Found {
        let mut tensors = BTreeMap::new();
        let rest = self.tensors.iter().filter(|(name, _)| !self.used.contains(name.as_str()));
        for (name, info) in rest {
            let ends = |list: &[&str]| list.iter().any(|ending| name.ends_with(ending));
            let codes = name.ends_with(".weight")
                && info.shape.rank() >= 2
                && matches!(
                    info.dtype,
                    DType::F8E4M3 | DType::F8E5M2 | DType::I8 | DType::U8 | DType::I32
                );
            let what = if ends(&ACTIVATIONS) {
                let why = "a scale of activations or of the cache; an artifact holds weights";
                self.unused.push((name.clone(), why.to_owned()));
                continue;
            } else if ends(&COMPANIONS) {
                "belongs to no quantized weight that is read"
            } else if let Some(method) = signs::method_of_tensor(name) {
                self.wrong
                    .entry(format!("is of {method}, which is not read"))
                    .or_default()
                    .push(name.clone());
                continue;
            } else if codes {
                "holds codes, and no scale lies beside it"
            } else {
                tensors.insert(name.clone(), info.clone());
                continue;
            };
            self.wrong.entry(what.to_owned()).or_default().push(name.clone());
        }
        for (what, names) in &self.wrong {
            let quoted: Vec<String> = names.iter().map(|n| format!("`{n}`")).collect();
            let each = if names.len() > 1 { "each of " } else { "" };
            let message = format!("{each}{} {what}", diag::list(&quoted, 4));
            let problem = Diagnostic::new("quantization", message);
            problems.push(match what.contains("not read") || what.contains("that is read") {
                true => problem.help(SUPPORTED),
                false => problem,
            });
        }
        tensors.extend(self.packed.iter().map(|(name, p)| (name.clone(), p.info.clone())));
        Found { packed: self.packed, tensors, unused: self.unused }
    }
}

/// A quantized weight as a format describes it.
pub(super) struct Weight<'r> {
    /// Its tensors, the codes first.
    pub tensors: Vec<Raw<'r>>,
    pub codes: Matrix,
    pub scales: Scales,
    pub zero: Option<Matrix>,
    pub second: Second,
    /// Group of every column.
    pub groups: Option<Vec<u32>>,
    pub input: Option<Matrix>,
}

/// Two E2M1 codes in a byte, the first in the low nibble, `bytes` to a row.
pub(super) fn fp4(place: Place, rows: u64, bytes: u64) -> Matrix {
    Matrix {
        place,
        layout: Layout::Rows { stride: bytes },
        dtype: DType::F4E2M1,
        flip: 0,
        add: 0,
        rows,
        cols: bytes.saturating_mul(2),
    }
}

/// Signed or unsigned integers of that many bits.
pub(super) fn integer(bits: u64, signed: bool) -> Option<DType> {
    let name = format!("{}{bits}", if signed { "i" } else { "u" });
    DType::from_name(&name).filter(|d| (2..=8).contains(&d.bits()))
}

/// Checks a list of the group of every column against the number of groups. `Ok(None)` where groups are runs of
/// `run` neighbours, or where the list was never filled (all −1).
pub(super) fn groups(list: &[i64], count: u64, run: u64) -> Result<Option<Vec<u32>>, String> {
    if list.iter().all(|&g| g == -1) {
        return Ok(None);
    }
    let mut groups = Vec::with_capacity(list.len());
    for &g in list {
        match u32::try_from(g) {
            Ok(group) if u64::from(group) < count => groups.push(group),
            _ => return Err(format!("names group {g}; the scales have {count}")),
        }
    }
    let plain = |(c, &g): (usize, &u32)| u64::from(g) == (c as u64).checked_div(run).unwrap_or(0);
    Ok(if groups.iter().enumerate().all(plain) { None } else { Some(groups) })
}
