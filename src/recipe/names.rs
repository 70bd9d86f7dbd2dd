//! Which rules' patterns match which weights, worked out once for a whole table.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use super::pattern::{Matcher, Pattern};
use super::rule::Rule;
use crate::model::{DRAFT_PREFIX, Origin, Weight, WeightTable};

/// How a rule's patterns meet the names of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Meet {
    /// They match every name of the weight, or the rule has none.
    All,
    /// They match some of the tensors that the weight is made of.
    Some,
    /// They match none.
    None,
}

/// Bits of rules for many names or weights, a row each.
#[derive(Clone)]
struct Bits {
    /// Words of a row.
    words: usize,
    all: Vec<u64>,
}

impl Bits {
    /// Rows without any bit.
    fn none(rows: usize, rules: usize) -> Bits {
        let words = rules.div_ceil(64);
        Bits { words, all: vec![0; rows * words] }
    }

    fn row(&self, row: usize) -> &[u64] {
        &self.all[row * self.words..(row + 1) * self.words]
    }

    fn row_mut(&mut self, row: usize) -> &mut [u64] {
        &mut self.all[row * self.words..(row + 1) * self.words]
    }

    fn has(&self, row: usize, rule: usize) -> bool {
        self.row(row)[rule / 64] >> (rule % 64) & 1 == 1
    }
}

fn set_bit(row: &mut [u64], rule: usize) {
    row[rule / 64] |= 1 << (rule % 64);
}

/// Adds the bits of another row.
fn merge(into: &mut [u64], from: &[u64]) {
    into.iter_mut().zip(from).for_each(|(into, from)| *into |= from);
}

/// The names of a table, each with the rules whose patterns match it.
pub(super) struct Names<'t> {
    /// Distinct names in the checkpoints, in order.
    pub names: Vec<Cow<'t, str>>,
    /// For each name one bit a rule.
    bits: Bits,
    /// The rules without `match`, one bit each.
    open: Vec<u64>,
    /// For each weight the names of its parts, as indices, and beside each the same name after `draft.` where the part
    /// lies in a draft's checkpoint.
    parts: Vec<Vec<(usize, Option<usize>)>>,
    /// For each weight the further names it goes by.
    aliases: Vec<Vec<usize>>,
    /// For each weight one bit a rule: those whose `weight` patterns match its logical name, or that have none.
    logical: Bits,
    /// For each rule and pattern of `match`, how many names it matches.
    pub pattern_names: Vec<Vec<u64>>,
    /// For each rule and pattern of `weight`, how many logical names it matches.
    pub pattern_weights: Vec<Vec<u64>>,
    /// Patterns of `match` and of `weight` that match some names by accident.
    pub by_dot: Vec<ByDot<'t>>,
}

/// Names that a `re:` pattern matches only because a bare `.` stands for any character, where it also matches others
/// with the dot taken literally.
pub(super) struct ByDot<'t> {
    /// Number of the rule.
    pub rule: usize,
    /// Whether the pattern is one of `weight`.
    pub logical: bool,
    /// Number of the pattern.
    pub pattern: usize,
    /// The names.
    pub names: Vec<Cow<'t, str>>,
}

/// A head tied to the embedding goes by the name that it would have in a checkpoint of its own: `lm_head.weight`
/// under any leading part of the embedding's name.
fn head_names(weight: &Weight) -> Vec<String> {
    const HEAD: &str = "lm_head.weight";
    let mut out = vec![HEAD.to_owned()];
    if let Some(part) = weight.parts.first() {
        out.extend(
            part.tensor.match_indices('.').map(|(i, _)| format!("{}.{HEAD}", &part.tensor[..i])),
        );
        // The module of the embedding table itself and what follows hold no head.
        out.truncate(part.tensor.matches('.').count().max(1));
    }
    if weight.origin == Origin::Draft {
        let prefixed: Vec<String> = out.iter().map(|n| format!("{DRAFT_PREFIX}{n}")).collect();
        out.extend(prefixed);
    }
    out
}

/// The patterns of one selector of all rules, matched against names.
struct Matched {
    /// For each name one bit a rule.
    bits: Bits,
    /// For each rule and pattern, how many names it matches.
    counts: Vec<Vec<u64>>,
    /// `(rule, pattern, indices of names)` of patterns that match some names by their dots only.
    by_dot: Vec<(usize, usize, Vec<usize>)>,
}

impl Matched {
    fn new(
        rules: &[Rule],
        patterns: impl Fn(&Rule) -> &[Pattern],
        names: &[Cow<'_, str>],
    ) -> Result<Matched, String> {
        let all: Vec<(usize, usize, &Pattern)> = rules
            .iter()
            .enumerate()
            .flat_map(|(r, rule)| patterns(rule).iter().enumerate().map(move |(p, x)| (r, p, x)))
            .collect();
        let strict: Vec<(usize, Pattern)> = all
            .iter()
            .enumerate()
            .filter_map(|(i, (_, _, p))| Some((i, p.dots_escaped()?)))
            .collect();
        let matcher = Matcher::new(all.iter().enumerate().map(|(i, (_, _, p))| (i, *p)))?;
        let strict_matcher = Matcher::new(strict.iter().map(|(i, p)| (*i, p)))?;

        // Sums do not depend on the order in which threads add.
        let counts: Vec<AtomicU64> = all.iter().map(|_| AtomicU64::new(0)).collect();
        let mut bits = Bits::none(names.len(), rules.len());
        // Nothing to match, as with most recipes' `weight`: the names need not be gone through.
        let asked = if all.is_empty() { &[] } else { names };
        let found: Vec<Vec<usize>> = bits
            .all
            .par_chunks_mut(bits.words.max(1))
            .zip(asked)
            .map(|(row, name)| {
                let mut by_dot = Vec::new();
                matcher.owners(name, |i| {
                    set_bit(row, all[i].0);
                    counts[i].fetch_add(1, Ordering::Relaxed);
                    if strict.binary_search_by_key(&i, |(owner, _)| *owner).is_ok() {
                        by_dot.push(i);
                    }
                });
                if !by_dot.is_empty() {
                    strict_matcher.owners(name, |i| by_dot.retain(|&j| j != i));
                }
                by_dot
            })
            .collect();

        let mut by_rule: Vec<Vec<u64>> = rules.iter().map(|_| Vec::new()).collect();
        for ((rule, _, _), count) in all.iter().zip(&counts) {
            by_rule[*rule].push(count.load(Ordering::Relaxed));
        }
        let mut loose: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (name, patterns) in found.iter().enumerate() {
            for pattern in patterns {
                loose.entry(*pattern).or_default().push(name);
            }
        }
        let by_dot = loose
            .into_iter()
            .filter(|(i, names)| {
                // Where every match rests on the dot, the dot is meant.
                (names.len() as u64) < counts[*i].load(Ordering::Relaxed)
            })
            .map(|(i, names)| (all[i].0, all[i].1, names))
            .collect();
        Ok(Matched { bits, counts: by_rule, by_dot })
    }

    fn by_dot<'t>(&self, logical: bool, names: &[Cow<'t, str>]) -> impl Iterator<Item = ByDot<'t>> {
        self.by_dot.iter().map(move |(rule, pattern, found)| ByDot {
            rule: *rule,
            logical,
            pattern: *pattern,
            names: found.iter().map(|&n| names[n].clone()).collect(),
        })
    }
}

/// The rules without patterns of one selector, one bit each.
fn without(rules: &[Rule], patterns: impl Fn(&Rule) -> &[Pattern]) -> Vec<u64> {
    let mut open = vec![0u64; rules.len().div_ceil(64)];
    for (number, _) in rules.iter().enumerate().filter(|(_, rule)| patterns(rule).is_empty()) {
        set_bit(&mut open, number);
    }
    open
}

/// What a name is to a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Called {
    /// The name of one of its parts.
    Part,
    /// The same after `draft.`.
    Prefixed,
    /// A name that it would have in a checkpoint of its own.
    Alias,
}

impl<'t> Names<'t> {
    /// Matches all rules against all names.
    ///
    /// # Errors
    /// A sentence, when the patterns together are too large to compile.
    pub(super) fn new(rules: &[Rule], table: &'t WeightTable) -> Result<Names<'t>, String> {
        // A weight that is another name of one goes by that one's decision.
        let alias_of: BTreeMap<&str, &str> = table
            .weights
            .iter()
            .filter(|w| w.is_alias())
            .filter_map(|w| Some((w.tied_to.as_deref()?, w.name.as_str())))
            .collect();
        // Every use of a name, sorted so that equal names meet.
        let mut uses: Vec<(Cow<'t, str>, usize, Called)> = Vec::with_capacity(table.weights.len());
        for (index, weight) in table.weights.iter().enumerate().filter(|(_, w)| !w.is_alias()) {
            for part in &weight.parts {
                uses.push((Cow::Borrowed(part.tensor.as_str()), index, Called::Part));
                if weight.origin == Origin::Draft {
                    uses.push((weight.tensor_name(part), index, Called::Prefixed));
                }
            }
            if weight.tied_to.is_some() || alias_of.contains_key(weight.name.as_str()) {
                let heads = head_names(weight).into_iter();
                uses.extend(heads.map(|n| (Cow::Owned(n), index, Called::Alias)));
            }
        }
        uses.par_sort_unstable();
        let mut names: Vec<Cow<'t, str>> = Vec::with_capacity(uses.len());
        let count = table.weights.len();
        let mut parts: Vec<Vec<usize>> = vec![Vec::new(); count];
        let mut prefixed: Vec<Vec<usize>> = vec![Vec::new(); count];
        let mut aliases: Vec<Vec<usize>> = vec![Vec::new(); count];
        for (name, index, called) in uses {
            if names.last() != Some(&name) {
                names.push(name);
            }
            let of = match called {
                Called::Part => &mut parts,
                Called::Prefixed => &mut prefixed,
                Called::Alias => &mut aliases,
            };
            of[index].push(names.len() - 1);
        }
        // Both lists are in the order of names, which a common prefix does not change.
        let parts = parts
            .into_iter()
            .zip(prefixed)
            .map(|(plain, prefixed)| {
                let prefixed = prefixed.into_iter().map(Some).chain(std::iter::repeat(None));
                plain.into_iter().zip(prefixed).collect()
            })
            .collect();

        let by_name = Matched::new(rules, |r| &r.patterns, &names)?;
        let open = without(rules, |r| &r.patterns);
        let any_weight = without(rules, |r| &r.weights);
        let logical_names: Vec<Cow<'t, str>> =
            table.weights.iter().map(|w| Cow::Borrowed(w.name.as_str())).collect();
        let by_weight = Matched::new(rules, |r| &r.weights, &logical_names)?;
        let mut logical = by_weight.bits.clone();
        if !alias_of.is_empty() {
            for (weight, alias) in table.weights.iter().enumerate() {
                let base = alias.tied_to.as_deref().filter(|_| alias.is_alias());
                let base = base.and_then(|b| table.weights.iter().position(|w| w.name == b));
                if let Some(base) = base {
                    merge(logical.row_mut(base), by_weight.bits.row(weight));
                }
            }
        }
        logical.all.chunks_mut(logical.words.max(1)).for_each(|row| merge(row, &any_weight));
        let by_dot =
            by_name.by_dot(false, &names).chain(by_weight.by_dot(true, &logical_names)).collect();
        Ok(Names {
            bits: by_name.bits,
            open,
            parts,
            aliases,
            logical,
            pattern_names: by_name.counts,
            pattern_weights: by_weight.counts,
            by_dot,
            names,
        })
    }

    /// Every name that a weight has in its checkpoint.
    fn all(&self, weight: usize) -> impl Iterator<Item = usize> {
        let parts = self.parts[weight].iter().flat_map(|&(name, other)| [Some(name), other]);
        parts.flatten().chain(self.aliases[weight].iter().copied())
    }

    /// Numbers of the rules whose patterns, where they have any, match some name of the weight, in order.
    pub(super) fn candidates(&self, weight: usize) -> impl Iterator<Item = usize> {
        self.open.iter().enumerate().flat_map(move |(word, open)| {
            let mut bits =
                self.all(weight).fold(*open, |bits, name| bits | self.bits.row(name)[word]);
            bits &= self.logical.row(weight)[word];
            std::iter::from_fn(move || {
                let bit = bits.trailing_zeros() as usize;
                // Clears the lowest bit; none is left at 0.
                (bits != 0).then(|| bits &= bits - 1).map(|()| word * 64 + bit)
            })
        })
    }

    /// Whether the rule of that number has no `weight` or one that matches the weight's logical name.
    pub(super) fn meets_weight(&self, number: usize, weight: usize) -> bool {
        self.logical.has(weight, number)
    }

    fn hit(&self, number: usize, name: usize) -> bool {
        self.bits.has(name, number)
    }

    fn part_hit(&self, number: usize, (name, other): (usize, Option<usize>)) -> bool {
        self.hit(number, name) || other.is_some_and(|other| self.hit(number, other))
    }

    /// How the patterns of `match` of `rule` (of that number) meet the weight of that index.
    pub(super) fn meet_name(&self, number: usize, rule: &Rule, weight: usize) -> Meet {
        if rule.patterns.is_empty() {
            return Meet::All;
        }
        let parts = &self.parts[weight];
        let matched = parts.iter().filter(|&&part| self.part_hit(number, part)).count();
        if (matched == parts.len() && matched > 0)
            || self.aliases[weight].iter().any(|&name| self.hit(number, name))
        {
            Meet::All
        } else if matched > 0 {
            Meet::Some
        } else {
            Meet::None
        }
    }

    /// How the patterns of `rule` (of that number), of `match` and of `weight`, meet the weight of that index.
    pub(super) fn meet(&self, number: usize, rule: &Rule, weight: usize) -> Meet {
        if !self.meets_weight(number, weight) {
            return Meet::None;
        }
        self.meet_name(number, rule, weight)
    }

    /// Names of the weight's parts that the rule's patterns do and do not match.
    pub(super) fn split(&self, number: usize, weight: usize) -> (Vec<&str>, Vec<&str>) {
        let parts = self.parts[weight].iter();
        let (yes, no): (Vec<_>, Vec<_>) = parts.partition(|&&part| self.part_hit(number, part));
        let text = |list: Vec<&(usize, Option<usize>)>| {
            list.into_iter().map(|(n, _)| self.names[*n].as_ref()).collect()
        };
        (text(yes), text(no))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Class, Part, Tower};
    use crate::tensor::{DType, Shape};

    #[test]
    fn a_tied_head_goes_by_the_names_it_would_have() {
        let mut weight = Weight {
            name: "output.weight".into(),
            origin: Origin::Main,
            tower: Tower::Text,
            class: Class::LmHead,
            layer: -1,
            expert: -1,
            slot: 0,
            dtype: DType::BF16,
            shape: Shape::from([8, 4]),
            parts: vec![Part {
                tensor: "model.language_model.embed_tokens.weight".into(),
                index: None,
            }],
            tied_to: Some("token_embd.weight".into()),
            fused_set: None,
            may_be_infinite: false,
            stored: None,
        };
        assert_eq!(
            head_names(&weight),
            ["lm_head.weight", "model.lm_head.weight", "model.language_model.lm_head.weight"]
        );
        weight.parts[0].tensor = "wte".into();
        assert_eq!(head_names(&weight), ["lm_head.weight"]);
        weight.origin = Origin::Draft;
        assert_eq!(head_names(&weight), ["lm_head.weight", "draft.lm_head.weight"]);
        weight.origin = Origin::Main;
        weight.parts.clear();
        assert_eq!(head_names(&weight), ["lm_head.weight"]);
    }
}
