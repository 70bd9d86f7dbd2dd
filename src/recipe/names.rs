//! Which rules' patterns match which weights, worked out once for a whole table.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use super::pattern::{Matcher, Pattern};
use super::rule::Rule;
use crate::model::{Weight, WeightTable};

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

/// The names of a table, each with the rules whose patterns match it.
pub(super) struct Names<'t> {
    /// Distinct names, in order.
    pub names: Vec<Cow<'t, str>>,
    /// For each name one bit a rule.
    bits: Vec<Vec<u64>>,
    /// The rules without patterns, one bit each.
    open: Vec<u64>,
    /// For each weight the names of its parts, as indices.
    parts: Vec<Vec<usize>>,
    /// For each weight the further names it goes by.
    aliases: Vec<Vec<usize>>,
    /// For each rule and pattern, how many names it matches.
    pub pattern_names: Vec<Vec<u64>>,
    /// `(rule, pattern, index of a name)`: names that a `re:` pattern matches only because a bare `.` stands for any
    /// character, where it also matches others with the dot taken literally.
    pub by_dot: Vec<(usize, usize, Vec<usize>)>,
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
    out
}

impl<'t> Names<'t> {
    /// Matches all rules against all names.
    ///
    /// # Errors
    /// A sentence, when the patterns together are too large to compile.
    pub(super) fn new(rules: &[Rule], table: &'t WeightTable) -> Result<Names<'t>, String> {
        // Every use of a name, sorted so that equal names meet; the place says which weight and whether it is an alias.
        let mut uses: Vec<(Cow<'t, str>, usize, bool)> = Vec::with_capacity(table.weights.len());
        for (index, weight) in table.weights.iter().enumerate() {
            uses.extend(
                weight.parts.iter().map(|p| (Cow::Borrowed(p.tensor.as_str()), index, false)),
            );
            if weight.tied_to.is_some() {
                uses.extend(head_names(weight).into_iter().map(|n| (Cow::Owned(n), index, true)));
            }
        }
        uses.par_sort_unstable();
        let mut names: Vec<Cow<'t, str>> = Vec::with_capacity(uses.len());
        let mut parts: Vec<Vec<usize>> = vec![Vec::new(); table.weights.len()];
        let mut aliases: Vec<Vec<usize>> = vec![Vec::new(); table.weights.len()];
        for (name, index, alias) in uses {
            if names.last() != Some(&name) {
                names.push(name);
            }
            let of = if alias { &mut aliases } else { &mut parts };
            of[index].push(names.len() - 1);
        }

        let all: Vec<(usize, usize, &Pattern)> = rules
            .iter()
            .enumerate()
            .flat_map(|(r, rule)| {
                rule.patterns.iter().enumerate().map(move |(p, pattern)| (r, p, pattern))
            })
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
        let words = rules.len().div_ceil(64);
        let found: Vec<(Vec<u64>, Vec<usize>)> = names
            .par_iter()
            .map(|name| {
                let mut bits = vec![0u64; words];
                let mut by_dot = Vec::new();
                matcher.owners(name, |i| {
                    let rule = all[i].0;
                    bits[rule / 64] |= 1 << (rule % 64);
                    counts[i].fetch_add(1, Ordering::Relaxed);
                    if strict.binary_search_by_key(&i, |(owner, _)| *owner).is_ok() {
                        by_dot.push(i);
                    }
                });
                if !by_dot.is_empty() {
                    strict_matcher.owners(name, |i| by_dot.retain(|&j| j != i));
                }
                (bits, by_dot)
            })
            .collect();

        let mut pattern_names: Vec<Vec<u64>> = rules.iter().map(|_| Vec::new()).collect();
        for ((rule, _, _), count) in all.iter().zip(&counts) {
            pattern_names[*rule].push(count.load(Ordering::Relaxed));
        }
        let mut loose: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (name, (_, patterns)) in found.iter().enumerate() {
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
        let bits = found.into_iter().map(|(bits, _)| bits).collect();
        let mut open = vec![0u64; words];
        for (number, _) in rules.iter().enumerate().filter(|(_, rule)| rule.patterns.is_empty()) {
            open[number / 64] |= 1 << (number % 64);
        }
        Ok(Names { names, bits, open, parts, aliases, pattern_names, by_dot })
    }

    /// Numbers of the rules that have no pattern or one that matches some name of the weight, in order.
    pub(super) fn candidates(&self, weight: usize) -> impl Iterator<Item = usize> {
        let names = move || self.parts[weight].iter().chain(&self.aliases[weight]);
        self.open.iter().enumerate().flat_map(move |(word, open)| {
            let mut bits = names().fold(*open, |bits, name| bits | self.bits[*name][word]);
            std::iter::from_fn(move || {
                let bit = bits.trailing_zeros() as usize;
                // Clears the lowest bit; none is left at 0.
                (bits != 0).then(|| bits &= bits - 1).map(|()| word * 64 + bit)
            })
        })
    }

    /// How the patterns of `rule` (of that number) meet the weight of that index.
    pub(super) fn meet(&self, number: usize, rule: &Rule, weight: usize) -> Meet {
        if rule.patterns.is_empty() {
            return Meet::All;
        }
        let hit = |name: &usize| self.bits[*name][number / 64] >> (number % 64) & 1 == 1;
        let parts = &self.parts[weight];
        let matched = parts.iter().filter(|n| hit(n)).count();
        if (matched == parts.len() && matched > 0) || self.aliases[weight].iter().any(hit) {
            Meet::All
        } else if matched > 0 {
            Meet::Some
        } else {
            Meet::None
        }
    }

    /// Names of the weight's parts that the rule's patterns do and do not match.
    pub(super) fn split(&self, number: usize, weight: usize) -> (Vec<&str>, Vec<&str>) {
        let hit = |name: usize| self.bits[name][number / 64] >> (number % 64) & 1 == 1;
        let (yes, no): (Vec<usize>, Vec<usize>) = self.parts[weight].iter().partition(|n| hit(**n));
        let text = |list: Vec<usize>| list.into_iter().map(|n| self.names[n].as_ref()).collect();
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
        weight.parts.clear();
        assert_eq!(head_names(&weight), ["lm_head.weight"]);
    }
}
