//! The census of a checkpoint: every expected tensor is claimed by a weight, every tensor present is claimed or
//! deliberately unused, and everything else is a problem, all reported together.

use std::collections::{BTreeMap, BTreeSet};

use crate::diag::{self, Diagnostic, FailureKind, Problems, count};
use crate::tensor::{DType, Shape, TensorInfo};

use super::names::{collapse, ranges};
use super::weights::{Class, Origin, Part, Tower, Weight, WeightTable};

/// How many missing or unclaimed names get a search for similar names; the search is quadratic.
const SUGGESTIONS: usize = 16;

/// An expected extent and where it comes from.
#[derive(Clone, Copy)]
pub(super) struct Dim(pub u64, pub &'static str);

/// Where the weights of one module come from and go to.
#[derive(Clone, Copy)]
pub(super) struct Scope<'a> {
    /// Prefix of checkpoint names.
    pub from: &'a str,
    /// Prefix of logical names.
    pub to: &'a str,
    pub tower: Tower,
    pub layer: i32,
}

/// Element types that a weight may have.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Float,
    Integer,
}

struct Missing {
    name: String,
    expected: String,
    help: Option<String>,
}

pub(super) struct Census<'a> {
    tensors: &'a BTreeMap<String, TensorInfo>,
    /// How messages call a tensor.
    shown: &'a dyn Fn(&str) -> String,
    claimed: BTreeSet<&'a str>,
    table: WeightTable,
    missing: Vec<Missing>,
    /// (name, what is wrong)
    wrong: Vec<(&'a str, String)>,
    /// No decoder was found, so that every tensor would be unclaimed.
    lost: bool,
    problems: Problems,
}

impl<'a> Census<'a> {
    /// A census of these tensors. `shown` gives the name by which the user knows a tensor.
    pub(super) fn new(
        tensors: &'a BTreeMap<String, TensorInfo>,
        shown: &'a dyn Fn(&str) -> String,
    ) -> Census<'a> {
        Census {
            tensors,
            shown,
            claimed: BTreeSet::new(),
            table: WeightTable::default(),
            missing: Vec::new(),
            wrong: Vec::new(),
            lost: false,
            problems: Problems::new(),
        }
    }

    /// Names that start with `prefix`, in order.
    pub(super) fn under(&self, prefix: &str) -> impl Iterator<Item = &'a str> + use<'a> {
        let prefix = prefix.to_owned();
        self.tensors
            .range(prefix.clone()..)
            .map(|(name, _)| name.as_str())
            .take_while(move |name| name.starts_with(&prefix))
    }

    /// The candidate prefix under which most of a decoder's tensors lie; a problem that names what was expected and
    /// what was found when none holds any.
    pub(super) fn text_prefix(&mut self, candidates: &[&'static str]) -> Option<&'static str> {
        let members = |prefix: &str| -> usize {
            ["layers.", "embed_tokens.", "norm."]
                .iter()
                .map(|m| self.under(&format!("{prefix}{m}")).count())
                .sum()
        };
        let mut best: Option<(usize, &'static str)> = None;
        for &prefix in candidates {
            let n = members(prefix);
            if n > best.map_or(0, |(b, _)| b) {
                best = Some((n, prefix));
            }
        }
        if let Some((_, prefix)) = best {
            return Some(prefix);
        }
        self.lost = true;
        let expected: Vec<String> = candidates.iter().map(|p| format!("`{p}layers.N.…`")).collect();
        let mut heads: BTreeMap<&str, u64> = BTreeMap::new();
        for name in self.tensors.keys() {
            let end = name
                .match_indices('.')
                .find(|(i, _)| name[i + 1..].starts_with(|c: char| c.is_ascii_digit()))
                .or_else(|| name.match_indices('.').next_back())
                .map_or(name.len(), |(i, _)| i + 1);
            *heads.entry(&name[..end]).or_default() += 1;
        }
        let mut found: Vec<(u64, &str)> = heads.iter().map(|(h, n)| (*n, *h)).collect();
        found.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(b.1)));
        let found: Vec<String> =
            found.iter().map(|(n, head)| format!("`{head}` ({})", count(*n))).collect();
        self.problems.push(
            Diagnostic::new("tensors", "no decoder was found under any known prefix".to_owned())
                .help(format!("expected names: {}", diag::list(&expected, 8)))
                .help(format!("the checkpoint's names begin with {}", diag::list(&found, 6)))
                .help("`--weights-only` converts any checkpoint without knowing its architecture"),
        );
        None
    }

    /// The first of `candidates` under which any tensor lies, else the first.
    pub(super) fn prefix(&self, candidates: &[&'static str]) -> &'static str {
        let found = candidates.iter().find(|p| self.under(p).next().is_some());
        found.or(candidates.first()).copied().unwrap_or("")
    }

    /// Compares the layers that lie under `prefix` (`model.layers.`) with the `expected` number that the key
    /// `key` gives, both ways. Returns the layers present in both.
    pub(super) fn layers(&mut self, prefix: &str, expected: u64, key: &str) -> Vec<u64> {
        let mut present: BTreeMap<u64, Vec<&'a str>> = BTreeMap::new();
        for name in self.under(prefix) {
            let digits = name[prefix.len()..].split('.').next().unwrap_or("");
            if let Ok(n) = digits.parse::<u64>()
                && n.to_string() == digits
            {
                present.entry(n).or_default().push(name);
            }
        }
        let extra: Vec<u64> = present.keys().copied().filter(|&n| n >= expected).collect();
        let absent: Vec<u64> = (0..expected).filter(|n| !present.contains_key(n)).collect();
        if !extra.is_empty() || !absent.is_empty() {
            let mut problem = Diagnostic::new(
                "tensors",
                format!(
                    "`{key}` is {}, the tensors under `{}` hold {}",
                    count(expected),
                    (self.shown)(prefix),
                    count(present.len() as u64)
                ),
            );
            if !absent.is_empty() {
                problem = problem.help(format!("no tensor of layer {}", ranges(&absent)));
            }
            if !extra.is_empty() {
                let names: Vec<&str> =
                    extra.iter().filter_map(|n| present.get(n)).flatten().copied().collect();
                let shown = collapse(&self.shown(names.iter().copied()));
                problem = problem.help(format!("unclaimed: {}", shown.join(", "))).help(
                    "a next-token or draft layer counts apart: drop it, or give the full count",
                );
                self.claimed.extend(names);
            }
            self.problems.push(problem);
        }
        present.into_keys().filter(|&n| n < expected).collect()
    }

    /// Names as the user knows them, each once.
    fn shown<'n>(&self, names: impl Iterator<Item = &'n str>) -> Vec<String> {
        let mut shown: Vec<String> = names.map(self.shown).collect();
        shown.sort();
        shown.dedup();
        shown
    }

    /// `FROM.weight` as `TO.weight`.
    pub(super) fn weight(
        &mut self,
        s: &Scope,
        to: &str,
        from: &str,
        class: Class,
        shape: &[Dim],
    ) -> Option<usize> {
        self.raw(s, &format!("{to}.weight"), &format!("{from}.weight"), class, shape)
    }

    /// The matrix of a linear layer.
    pub(super) fn linear(
        &mut self,
        s: &Scope,
        to: &str,
        from: &str,
        rows: Dim,
        cols: Dim,
    ) -> Option<usize> {
        self.weight(s, to, from, Class::Linear, &[rows, cols])
    }

    /// The scale of a norm.
    pub(super) fn norm(&mut self, s: &Scope, to: &str, from: &str, width: Dim) {
        self.weight(s, to, from, Class::Norm, &[width]);
    }

    /// `FROM.bias` as `TO.bias`.
    pub(super) fn bias(&mut self, s: &Scope, to: &str, from: &str, class: Class, width: Dim) {
        self.raw(s, &format!("{to}.bias"), &format!("{from}.bias"), class, &[width]);
    }

    /// A tensor taken whole, both names given in full after the scope's prefixes. An empty shape is a scalar, which
    /// may be stored as `[]` or `[1]` and reads as `[1]`.
    pub(super) fn raw(
        &mut self,
        s: &Scope,
        to: &str,
        from: &str,
        class: Class,
        shape: &[Dim],
    ) -> Option<usize> {
        let dtype = self.claim(&format!("{}{from}", s.from), shape, Kind::Float)?;
        Some(self.add(s, to, class, dtype, extents(shape), &format!("{}{from}", s.from)))
    }

    /// A table of integers.
    pub(super) fn integers(&mut self, s: &Scope, to: &str, from: &str, shape: &[Dim]) {
        let name = format!("{}{from}", s.from);
        if let Some(dtype) = self.claim(&name, shape, Kind::Integer) {
            self.add(s, to, Class::Other, dtype, extents(shape), &name);
        }
    }

    fn add(
        &mut self,
        s: &Scope,
        to: &str,
        class: Class,
        dtype: DType,
        shape: Shape,
        tensor: &str,
    ) -> usize {
        self.table.weights.push(Weight {
            name: format!("{}{to}", s.to),
            origin: Origin::Main,
            tower: s.tower,
            class,
            layer: s.layer,
            expert: -1,
            slot: 0,
            dtype,
            shape,
            parts: vec![Part { tensor: tensor.to_owned(), index: None }],
            tied_to: None,
            fused_set: None,
            may_be_infinite: false,
            stored: None,
        });
        self.table.weights.len() - 1
    }

    /// One expert's matrix, out of `parts` (rows of one part after the other).
    pub(super) fn expert(
        &mut self,
        s: &Scope,
        to: &str,
        (expert, slot): (u64, i32),
        shape: Shape,
        dtype: DType,
        parts: Vec<Part>,
    ) {
        self.table.weights.push(Weight {
            name: format!("{}{to}.{expert}.weight", s.to),
            origin: Origin::Main,
            tower: s.tower,
            class: Class::Expert,
            layer: s.layer,
            // At most 65,536 experts are admitted.
            expert: i32::try_from(expert).unwrap_or(i32::MAX),
            slot,
            dtype,
            shape,
            parts,
            tied_to: None,
            fused_set: None,
            may_be_infinite: false,
            stored: None,
        });
    }

    /// Claims a tensor of floating-point values that several weights share; its element type if it fits.
    pub(super) fn claim_shared(&mut self, name: &str, shape: &[Dim]) -> Option<DType> {
        self.claim(name, shape, Kind::Float)
    }

    /// Claims a tensor and checks it; its element type if it is there.
    fn claim(&mut self, name: &str, shape: &[Dim], kind: Kind) -> Option<DType> {
        let Some((name, info)) = self.tensors.get_key_value(name) else {
            self.missing.push(Missing {
                name: name.to_owned(),
                expected: described(shape),
                help: None,
            });
            return None;
        };
        self.claimed.insert(name);
        let found = info.shape.extents();
        let fits = if shape.is_empty() {
            matches!(found, [] | [1])
        } else {
            found.len() == shape.len() && found.iter().zip(shape).all(|(f, d)| *f == d.0)
        };
        if !fits {
            self.wrong.push((
                name,
                format!("has shape {}; the configuration gives {}", info.shape, described(shape)),
            ));
        }
        let right = match kind {
            Kind::Float => info.dtype.is_float(),
            Kind::Integer => info.dtype.is_signed_int() || info.dtype.is_unsigned_int(),
        };
        if !right {
            let what = if kind == Kind::Float { "floating-point" } else { "whole" };
            self.wrong.push((name, format!("holds {}; {what} numbers are needed", info.dtype)));
        }
        Some(info.dtype)
    }

    /// Reports that `name` cannot be used.
    pub(super) fn wrong(&mut self, name: &str, what: String) {
        if let Some((name, _)) = self.tensors.get_key_value(name) {
            self.wrong.push((name, what));
        }
    }

    /// Adds advice to the tensor last found missing.
    pub(super) fn advise_missing(&mut self, help: impl Into<String>) {
        if let Some(last) = self.missing.last_mut() {
            last.help = Some(help.into());
        }
    }

    /// Marks weights that an engine reads together.
    pub(super) fn fuse(&mut self, name: &str, members: &[Option<usize>]) {
        for weight in members.iter().flatten() {
            if let Some(w) = self.table.weights.get_mut(*weight) {
                w.fused_set = Some(name.to_owned());
            }
        }
    }

    /// Marks a weight as a clipping bound, which may be infinite.
    pub(super) fn may_be_infinite(&mut self, weight: Option<usize>) {
        if let Some(w) = weight.and_then(|i| self.table.weights.get_mut(i)) {
            w.may_be_infinite = true;
        }
    }

    /// A head that repeats the embedding table `embedding`. A copy stored as `duplicate` is left out.
    pub(super) fn tie(&mut self, embedding: Option<usize>, to: &str, duplicate: &str) {
        self.repeat(embedding, to, Class::LmHead, duplicate);
    }

    /// An embedding table that serves as the head `head` and as nothing else: another name for it. A copy stored as
    /// `duplicate` is left out.
    pub(super) fn head_only(&mut self, head: Option<usize>, to: &str, duplicate: &str) {
        self.repeat(head, to, Class::Embedding, duplicate);
    }

    fn repeat(&mut self, of: Option<usize>, to: &str, class: Class, duplicate: &str) {
        let Some(source) = of.and_then(|i| self.table.weights.get(i)) else { return };
        let tied = if class == Class::Embedding { to.to_owned() } else { source.name.clone() };
        let head = Weight {
            name: to.to_owned(),
            class,
            tied_to: Some(source.name.clone()),
            ..source.clone()
        };
        if let Some((name, info)) = self.tensors.get_key_value(duplicate) {
            self.claimed.insert(name);
            if info.shape == head.shape {
                let why = format!("repeats the embedding: the head is tied to `{tied}`");
                self.table.unused.push((name.clone(), why));
            } else {
                let what = format!(
                    "has shape {}; a head tied to the embedding has {} (`tie_word_embeddings` is true)",
                    info.shape, head.shape
                );
                self.wrong.push((name, what));
            }
        }
        self.table.weights.push(head);
    }

    /// Leaves a tensor out if it is there.
    pub(super) fn leave_out(&mut self, name: &str, why: &str) {
        if let Some((name, _)) = self.tensors.get_key_value(name) {
            self.claimed.insert(name);
            self.table.unused.push((name.clone(), why.to_owned()));
        }
    }

    /// The table, or every problem found.
    pub(super) fn finish(mut self, family: &str) -> diag::Result<WeightTable> {
        let unclaimed: Vec<&'a str> = self
            .tensors
            .iter()
            .filter(|(name, _)| !self.claimed.contains(name.as_str()))
            .filter_map(|(name, info)| match unused_reason(name, info) {
                Some(why) => {
                    self.table.unused.push((name.clone(), why.to_owned()));
                    None
                }
                None => Some(name.as_str()),
            })
            .collect();
        let unclaimed = self.shown(unclaimed.into_iter());
        let unclaimed: Vec<&str> = unclaimed.iter().map(String::as_str).collect();
        for missing in &mut self.missing {
            missing.name = (self.shown)(&missing.name);
        }
        self.report_missing(&unclaimed);
        self.report_wrong();
        if !self.lost {
            self.report_unclaimed(&unclaimed, family);
        }
        self.table.sort();
        let headline = format!("the tensors do not fit the configuration of this {family} model");
        self.problems.finish(FailureKind::Refused, &headline, self.table)
    }

    fn report_missing(&mut self, unclaimed: &[&str]) {
        let advised = self.missing.iter().filter(|m| m.help.is_some());
        for m in advised {
            let mut problem = missing_problem(std::slice::from_ref(&m.name), &m.expected);
            problem.help.extend(m.help.clone());
            self.problems.push(problem);
        }
        let mut groups: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for m in self.missing.iter().filter(|m| m.help.is_none()) {
            let names = groups.entry(&m.expected).or_default();
            // Parts of one tensor of the file are missing together.
            if names.last() != Some(&m.name.as_str()) {
                names.push(&m.name);
            }
        }
        let mut suggestions = 0;
        for (expected, names) in groups {
            for shown in collapse(&names) {
                let mut problem = missing_problem(std::slice::from_ref(&shown), expected);
                suggestions += 1;
                if suggestions <= SUGGESTIONS {
                    let near = diag::nearest(&shown, unclaimed.iter().copied().take(512));
                    if !near.is_empty() {
                        let near: Vec<String> = near.iter().map(|n| format!("`{n}`")).collect();
                        problem = problem.help(format!("there is {}", diag::list(&near, 3)));
                    }
                }
                self.problems.push(problem);
            }
        }
    }

    fn report_wrong(&mut self) {
        let mut groups: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, what) in &self.wrong {
            groups.entry(what).or_default().push(name);
        }
        for (what, names) in groups {
            for shown in collapse(&self.shown(names.into_iter())) {
                self.problems.push(Diagnostic::new("tensors", format!("`{shown}` {what}")));
            }
        }
    }

    fn report_unclaimed(&mut self, unclaimed: &[&str], family: &str) {
        let missing: Vec<&str> = self.missing.iter().map(|m| m.name.as_str()).collect();
        for (i, shown) in collapse(unclaimed).iter().enumerate() {
            let mut problem = Diagnostic::new(
                "tensors",
                format!("`{shown}` is unclaimed: no weight of a {family} model is made of it"),
            );
            if i < SUGGESTIONS {
                let near = diag::nearest(shown, missing.iter().copied().take(512));
                if !near.is_empty() {
                    let near: Vec<String> = near.iter().map(|n| format!("`{n}`")).collect();
                    problem = problem.help(format!("expected was {}", diag::list(&near, 3)));
                }
            }
            if let Some(hint) = leftover_hint(shown) {
                problem = problem.help(hint);
            }
            self.problems.push(problem);
        }
    }
}

fn missing_problem(names: &[String], expected: &str) -> Diagnostic {
    Diagnostic::new(
        "tensors",
        format!("`{}` is missing; expected shape {expected}", names.join("`, `")),
    )
}

fn extents(shape: &[Dim]) -> Shape {
    if shape.is_empty() {
        return Shape::from([1]);
    }
    Shape::new(shape.iter().map(|d| d.0).collect::<Vec<u64>>())
}

/// `[4096 (num_attention_heads × head_dim), 5376 (hidden_size)]`.
fn described(shape: &[Dim]) -> String {
    if shape.is_empty() {
        return "[] (a scalar)".to_owned();
    }
    let dims: Vec<String> = shape
        .iter()
        .map(|d| if d.1.is_empty() { d.0.to_string() } else { format!("{} ({})", d.0, d.1) })
        .collect();
    format!("[{}]", dims.join(", "))
}

/// Why a tensor that no weight claims is left out, if that is harmless for every family.
pub(super) fn unused_reason(name: &str, info: &TensorInfo) -> Option<&'static str> {
    if info.shape.elements() == Some(0) {
        return Some("holds no elements");
    }
    let leaf = name.rsplit('.').next().unwrap_or(name);
    match leaf {
        "inv_freq" | "original_inv_freq" => {
            Some("rotary frequencies, which follow from the configuration")
        }
        "position_ids" => Some("position numbers 0, 1, 2, …, which an engine counts itself"),
        _ => None,
    }
}

/// Advice on leftovers of quantizers, adapters and training.
fn leftover_hint(name: &str) -> Option<&'static str> {
    const QUANTIZED: [&str; 26] = [
        "weight_scale",
        "weight_scale_inv",
        "weight_scale_2",
        "weight_global_scale",
        "weight_zero_point",
        "weight_packed",
        "weight_shape",
        "weight_g_idx",
        "input_scale",
        "input_global_scale",
        "input_zero_point",
        "output_scale",
        "k_scale",
        "v_scale",
        "q_scale",
        "activation_scale",
        "qweight",
        "qzeros",
        "scales",
        "biases",
        "g_idx",
        "SCB",
        "weight_format",
        "absmax",
        "quant_map",
        "nested_absmax",
    ];
    let leaf = name.rsplit('.').next().unwrap_or(name);
    if QUANTIZED.contains(&leaf) || name.contains(".quant_state.") || leaf.ends_with("_blocks") {
        return Some("the checkpoint is already quantized; start from the original weights");
    }
    if name.contains("lora_") {
        return Some("this belongs to a LoRA adapter: merge it into the base model first");
    }
    if name.starts_with("mtp.") || name.contains(".mtp") {
        return Some("this belongs to a multi-token prediction module, which the family lacks");
    }
    None
}
