//! Resolution: every weight of a model meets the rules and gets exactly one decision.
//!
//! * The first rule whose selectors all match decides. `match` must match every checkpoint tensor that the weight is
//!   made of; to match only some is a problem. A head tied to the embedding is matched under the embedding's name and
//!   under `lm_head.weight` with any leading part of that name.
//! * `weight` matches the logical name. Where both are there, both must match.
//! * A weight of a merged draft model is matched under its name in the draft's checkpoint and under that name after
//!   `draft.`; either will do. `tower = "draft"` keeps a rule off the target's tensor of the same name.
//! * An embedding that serves as a head only is the head under another name: it meets no rule, `match` finds the head
//!   under the embedding's name, and `weight` under both logical names.
//! * No rule: the weight is kept byte for byte; one that the checkpoint holds quantized keeps its codes and scales.
//! * Under `keep_vectors` a vector that a rule gives a grid is kept, and the rule has decided it.
//! * A cast to the type that a weight has already is `keep`.
//! * A tied head that ends up with the embedding's method is not stored again.
//! * A second-level scale over the whole weight is shared by those members of a fused set whose method is the same and
//!   whose rule does not say `share_scale = false`. A set whose members differ in encoding is allowed (an engine then
//!   cannot read them fused) and gives a warning.
//! * A row that ends in a short group is allowed and counted, unless whole groups are asked for. Only columns count:
//!   blocks at the lower edge of a weight may always be short, as in every fp8-block checkpoint.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::assignment::{Assigned, Assignment, Fate, RuleUse, Share, Tail, Use};
use super::document::Recipe;
use super::idle;
use super::misfit::{self, Misfit};
use super::names::{Meet, Names};
use super::read::AREA;
use super::rule::Rule;
use super::{Method, NAMED, group_columns};
use crate::diag::{Diagnostic, Failure, FailureKind, Problems, Result, count, list};
use crate::model::{Class, Stored, Tower, Weight, WeightTable};
use crate::tensor::{DType, Encoding};

/// Method, encoding and name, made once for every rule and source type.
type Kind = (Arc<Method>, Arc<Encoding>, Arc<str>);

/// Decisions before the sums are taken.
struct Decided {
    weights: Vec<Assigned>,
    hits: Vec<u64>,
    misfits: BTreeMap<(usize, Misfit), Vec<usize>>,
}

impl Recipe {
    /// Decides every weight of a model. `source` names the model in messages.
    ///
    /// # Errors
    /// [`FailureKind::Refused`] with all problems at once: rules that decide nothing, weights that cannot take their
    /// encoding or cannot be kept, weights matched in part, short groups where whole ones are asked for.
    pub fn resolve(&self, table: &WeightTable, source: &str) -> Result<Assignment> {
        let headline = if self.name.is_empty() {
            format!("{source} does not fit this recipe")
        } else {
            format!("{source} does not fit the recipe {}", self.name)
        };
        let names = Names::new(&self.rules, table).map_err(|why| {
            Failure::one(FailureKind::Usage, "the recipe is not usable", Diagnostic::new(AREA, why))
        })?;
        let decided = self.decide(table, &names);

        let mut problems = Problems::new();
        let mut shapes = idle::Shapes::new(&names, table);
        for (number, rule) in self.rules.iter().enumerate() {
            if decided.hits[number] == 0 && !rule.optional {
                problems.push(idle::problem(
                    number,
                    &self.rules,
                    table,
                    &names,
                    &decided.weights,
                    &mut shapes,
                ));
            }
        }
        problems.extend(misfit::problems(&decided.misfits, &self.rules, table, &names));
        if !problems.is_empty() {
            return problems.finish(FailureKind::Refused, &headline, Assignment::empty());
        }

        let mut assignment = self.sum(table, decided);
        for (use_, found) in assignment.rules.iter_mut().zip(&names.pattern_names) {
            use_.pattern_names.clone_from(found);
        }
        self.share(table, &mut assignment);
        self.warn(&names, &mut shapes, &mut assignment);
        Ok(assignment)
    }

    fn decide(&self, table: &WeightTable, names: &Names<'_>) -> Decided {
        let masks: Vec<(u8, u8)> = self.rules.iter().map(masks).collect();
        let mut kinds: BTreeMap<(usize, DType, Option<String>), Kind> = BTreeMap::new();
        let mut weights: Vec<Assigned> = Vec::with_capacity(table.weights.len());
        let mut hits = vec![0u64; self.rules.len()];
        let mut misfits: BTreeMap<(usize, Misfit), Vec<usize>> = BTreeMap::new();
        for (index, weight) in table.weights.iter().enumerate() {
            let held = self.towers.holds(weight.tower);
            let meets = held && !weight.is_alias();
            let found = if meets { self.first(index, weight, names, &masks) } else { None };
            let rule = found.map(|(number, _)| number);
            // Weights without a rule share a number past the last rule.
            let number = rule.unwrap_or(self.rules.len());
            let decides = rule.and_then(|r| self.rules.get(r));
            let vector = weight.shape.rank() < 2
                && decides.is_some_and(|r| {
                    r.keep_vectors && matches!(r.encoding.method, Method::Grid(_))
                });
            let (method, encoding, name) = kinds
                .entry((
                    if vector { self.rules.len() } else { number },
                    weight.dtype,
                    planes_key(weight),
                ))
                .or_insert_with(|| kind(decides.filter(|_| !vector), weight))
                .clone();
            if let Some(number) = rule {
                hits[number] += 1;
            }
            let misfit = match found {
                Some((_, Meet::Some)) => Some(Misfit::Partial),
                _ if !meets => None,
                _ => {
                    let whole = decides.and_then(|r| r.whole_groups).unwrap_or(self.whole_groups);
                    misfit::check(weight, decides, &method, &encoding, whole)
                }
            };
            if let Some(misfit) = misfit {
                misfits.entry((number, misfit)).or_default().push(index);
            }
            weights.push(Assigned {
                weight: index,
                fate: if held { Fate::Stored } else { Fate::LeftOut },
                method,
                encoding,
                encoding_name: name,
                rule,
                share: None,
            });
        }
        repeat_tied(table, &mut weights);
        Decided { weights, hits, misfits }
    }

    /// The first rule that selects a weight, and whether it does so in full.
    fn first(
        &self,
        index: usize,
        weight: &Weight,
        names: &Names<'_>,
        masks: &[(u8, u8)],
    ) -> Option<(usize, Meet)> {
        let (tower, class) = (1u8 << weight.tower as u8, 1u8 << weight.class as u8);
        for number in names.candidates(index) {
            let (towers, classes) = masks[number];
            if towers & tower == 0 || classes & class == 0 {
                continue;
            }
            match names.meet(number, &self.rules[number], index) {
                Meet::None => {}
                meet => return Some((number, meet)),
            }
        }
        None
    }

    fn sum(&self, table: &WeightTable, decided: Decided) -> Assignment {
        let mut out = Assignment::empty();
        out.rules =
            decided.hits.iter().map(|&hits| RuleUse { hits, ..RuleUse::default() }).collect();
        let mut tails: BTreeMap<(u64, u64), u64> = BTreeMap::new();
        for (assigned, weight) in decided.weights.iter().zip(&table.weights) {
            match assigned.fate {
                Fate::Stored => {}
                Fate::LeftOut => {
                    out.left_out += 1;
                    continue;
                }
                Fate::Repeats(_) => continue,
            }
            // Sizes were checked with the misfits.
            let elements = weight.shape.elements().unwrap_or(0);
            let source = weight.source_bytes().unwrap_or(0);
            let stored = assigned.encoding.bytes(&weight.shape).unwrap_or(0);
            match assigned.rule {
                Some(number) => out.rules[number].stored.add(elements, source, stored),
                None => {
                    out.kept.add(elements, source, stored);
                    out.kept_dtypes.push(weight.dtype);
                }
            }
            let repeated = weight.tied_to.is_some();
            out.total.add(elements, if repeated { 0 } else { source }, stored);
            let cols = weight.shape.matrix().map_or(0, |(_, cols)| cols);
            if matches!(*assigned.method, Method::Grid(_))
                && let Some(group) = group_columns(&assigned.encoding)
                && !cols.is_multiple_of(group)
            {
                *tails.entry((cols, group)).or_default() += 1;
            }
        }
        out.kept_dtypes.sort_unstable();
        out.kept_dtypes.dedup();
        out.tails = tails
            .into_iter()
            .map(|((cols, group), weights)| Tail { cols, group, tail: cols % group, weights })
            .collect();
        out.weights = decided.weights;
        out
    }

    /// Finds the weights that share a second-level scale.
    fn share(&self, table: &WeightTable, out: &mut Assignment) {
        let mut sets: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (index, weight) in table.weights.iter().enumerate() {
            if let Some(set) = &weight.fused_set
                && out.weights[index].stored()
            {
                sets.entry(set).or_default().push(index);
            }
        }
        let mut mixed: Vec<&str> = Vec::new();
        let mut shares: Vec<Share> = Vec::new();
        for (set, members) in sets {
            let kind = |index: usize| &out.weights[index].encoding;
            if members.iter().any(|&m| kind(m) != kind(members[0])) {
                mixed.push(set);
            }
            let mut rest: Vec<usize> =
                members.into_iter().filter(|&m| self.shares_scale(&out.weights[m])).collect();
            while let Some(&first) = rest.first() {
                let method = &out.weights[first].method;
                let (same, other): (Vec<usize>, Vec<usize>) =
                    rest.iter().partition(|&&m| out.weights[m].method == *method);
                if same.len() > 1 {
                    shares.push(Share { set: set.to_owned(), members: same });
                }
                rest = other;
            }
        }
        shares.sort_by_key(|share| share.members[0]);
        for (id, share) in shares.iter().enumerate() {
            for &member in &share.members {
                out.weights[member].share = Some(id);
            }
        }
        out.shares = shares;
        if !mixed.is_empty() {
            let message = format!(
                "{} that engines read fused {} members of different encodings: {}",
                if mixed.len() == 1 {
                    "a set".to_owned()
                } else {
                    format!("{} sets", count(mixed.len() as u64))
                },
                if mixed.len() == 1 { "has" } else { "have" },
                list(&mixed, 3)
            );
            out.warnings.push(
                Diagnostic::new(AREA, message)
                    .help("give q, k and v, and gate and up, one encoding, unless the engine reads them apart"),
            );
        }
    }

    fn shares_scale(&self, assigned: &Assigned) -> bool {
        let shared = assigned.rule.and_then(|r| self.rules.get(r)).is_some_and(|r| r.share_scale);
        match &*assigned.method {
            Method::Grid(grid) => {
                shared && grid.scale2.is_some_and(|second| second.block == [0, 0])
            }
            _ => false,
        }
    }

    fn warn(&self, names: &Names<'_>, shapes: &mut idle::Shapes<'_>, out: &mut Assignment) {
        for (number, rule) in self.rules.iter().enumerate().filter(|(_, rule)| !rule.optional) {
            let by_name = rule.patterns.iter().zip(&names.pattern_names[number]);
            let by_weight = rule.weights.iter().zip(&names.pattern_weights[number]);
            let all = by_name.map(|m| (m, false)).chain(by_weight.map(|m| (m, true)));
            for ((pattern, _), logical) in all.filter(|((_, hits), _)| **hits == 0) {
                let mut warning = Diagnostic::new(
                    AREA,
                    format!("`{}` of rule {} matches no name", pattern.text, number + 1),
                );
                warning.help = shapes.advice(pattern, logical);
                out.warnings.push(pattern.place.mark(warning, ""));
            }
        }
        for found in &names.by_dot {
            let rule = &self.rules[found.rule];
            let patterns = if found.logical { &rule.weights } else { &rule.patterns };
            let pattern = &patterns[found.pattern];
            let message = format!(
                "an unescaped `.` of rule {} stands for any character and so also matches {}",
                found.rule + 1,
                list(&found.names, 3)
            );
            let mut warning = Diagnostic::new(AREA, message);
            if let Some(strict) = pattern.dots_escaped() {
                // In a basic string of TOML the backslash needs another; a literal string takes it as it is.
                warning = warning.help(format!("'{}' matches a dot only", strict.text));
            }
            out.warnings.push(pattern.place.mark(warning, ""));
        }
    }
}

impl Assignment {
    fn empty() -> Assignment {
        Assignment {
            weights: Vec::new(),
            rules: Vec::new(),
            kept: Use::default(),
            kept_dtypes: Vec::new(),
            total: Use::default(),
            left_out: 0,
            tails: Vec::new(),
            shares: Vec::new(),
            warnings: Vec::new(),
        }
    }
}

/// Towers and classes of a rule, one bit each; all bits where it does not select by them.
fn masks(rule: &Rule) -> (u8, u8) {
    let towers = rule.towers.iter().fold(0u8, |m, &t: &Tower| m | 1 << t as u8);
    let classes = rule.classes.iter().fold(0u8, |m, &c: &Class| m | 1 << c as u8);
    (if towers == 0 { u8::MAX } else { towers }, if classes == 0 { u8::MAX } else { classes })
}

/// What tells apart the planes that weights are kept in; nothing for an unquantized weight.
fn planes_key(weight: &Weight) -> Option<String> {
    Some(match &weight.stored.as_ref()?.planes {
        Ok(encoding) => encoding.to_string(),
        Err(_) => "?".to_owned(),
    })
}

fn kind(rule: Option<&Rule>, weight: &Weight) -> Kind {
    let dtype = weight.dtype;
    let quantized = weight.stored.is_some();
    let (method, name) = match rule {
        None => (Method::Keep, dtype.name().to_owned()),
        Some(rule) => match &rule.encoding.method {
            Method::Keep => (Method::Keep, dtype.name().to_owned()),
            // The values of a weight that is quantized already have to be decoded to be stored in their type.
            Method::Cast(to) if *to == dtype && !quantized => {
                (Method::Keep, dtype.name().to_owned())
            }
            method => (method.clone(), rule.encoding.to_string()),
        },
    };
    if let (Method::Keep, Some(Stored { planes: Ok(encoding), .. })) = (&method, &weight.stored) {
        let named = NAMED.iter().find(|n| n.method().encoding(dtype) == **encoding);
        let name = named.map_or_else(|| encoding.to_string(), |n| n.name.to_owned());
        return (Arc::new(method), Arc::clone(encoding), name.into());
    }
    let encoding = method.encoding(dtype);
    (Arc::new(method), Arc::new(encoding), name.into())
}

/// A weight tied to a stored one of the same method is not stored again.
fn repeat_tied(table: &WeightTable, weights: &mut [Assigned]) {
    if table.weights.iter().all(|w| w.tied_to.is_none()) {
        return;
    }
    let by_name: BTreeMap<&str, usize> =
        table.weights.iter().enumerate().map(|(i, w)| (w.name.as_str(), i)).collect();
    for (index, weight) in table.weights.iter().enumerate() {
        let base = weight.tied_to.as_deref().and_then(|name| by_name.get(name)).copied();
        let Some(base) = base.filter(|&base| base != index && weights[base].stored()) else {
            continue;
        };
        if weight.is_alias() {
            weights[index] =
                Assigned { weight: index, fate: Fate::Repeats(base), ..weights[base].clone() };
            continue;
        }
        if weights[index].stored()
            && weights[base].method == weights[index].method
            && table.weights[base].dtype == weight.dtype
            && weights[base].encoding == weights[index].encoding
            && table.weights[base].shape == weight.shape
        {
            weights[index].fate = Fate::Repeats(base);
        }
    }
}
