//! Rules that decide no weight: what each selector hits by itself, which earlier rule takes the weights, and which
//! names a pattern probably meant.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};

use super::assignment::{Assigned, Fate};
use super::names::{Meet, Names};
use super::pattern::{Matcher, Pattern, PatternKind};
use super::read::AREA;
use super::rule::Rule;
use crate::diag::{Diagnostic, count, list};
use crate::model::WeightTable;

/// Patterns whose nearest names are looked for in one run; beyond it the list of problems is long enough.
const MAX_LOOKUPS: usize = 12;

/// Alternatives of one glob that are compared with names.
const MAX_ALTERNATIVES: usize = 64;

/// Longest glob or name that is compared by edit distance.
const MAX_COMPARED: usize = 512;

/// The names of a checkpoint as a person reads them: one name for every shape (`layers.N.mlp.up_proj.weight`).
pub(super) struct Shapes<'n> {
    names: &'n Names<'n>,
    table: &'n WeightTable,
    by_shape: OnceCell<ByShape<'n>>,
    /// The same of logical names.
    by_logical_shape: OnceCell<ByShape<'n>>,
    lookups: usize,
}

type ByShape<'n> = BTreeMap<String, Vec<&'n str>>;

/// A name with every number replaced by `#`.
fn shape(name: &str) -> String {
    let mut out = String::with_capacity(name.len());
    for c in name.chars() {
        match (c.is_ascii_digit(), out.ends_with('#')) {
            (true, true) => {}
            (true, false) => out.push('#'),
            (false, _) => out.push(c),
        }
    }
    out
}

impl<'n> Shapes<'n> {
    pub(super) fn new(names: &'n Names<'n>, table: &'n WeightTable) -> Shapes<'n> {
        Shapes {
            names,
            table,
            by_shape: OnceCell::new(),
            by_logical_shape: OnceCell::new(),
            lookups: 0,
        }
    }

    /// Made when the first advice is asked for.
    fn by_shape(&self, logical: bool) -> &ByShape<'n> {
        let sorted = |names: &mut dyn Iterator<Item = &'n str>| {
            let mut by_shape = ByShape::new();
            for name in names {
                by_shape.entry(shape(name)).or_default().push(name);
            }
            by_shape
        };
        if logical {
            let names = || self.table.weights.iter().map(|w| w.name.as_str());
            self.by_logical_shape.get_or_init(|| sorted(&mut names()))
        } else {
            let names = || self.names.names.iter().map(|n| n.as_ref());
            self.by_shape.get_or_init(|| sorted(&mut names()))
        }
    }

    /// What may help with a pattern that matches no name: no logical one where it is one of `weight`, else none of the
    /// checkpoint's.
    pub(super) fn advice(&mut self, pattern: &Pattern, logical: bool) -> Vec<String> {
        self.lookups += 1;
        if self.lookups > MAX_LOOKUPS {
            return Vec::new();
        }
        let mut help = Vec::new();
        if self.matches_any(pattern, !logical) {
            let (what, key) = if logical {
                ("names in the checkpoint", "match")
            } else {
                ("logical names", "weight")
            };
            help.push(format!("it matches {what}: those are selected by `{key}`"));
            return help;
        }
        if let Some((better, hits)) = self.completed(pattern, logical) {
            help.push(format!(
                "a pattern covers the whole name: `{better}` would match {}",
                names_counted(hits)
            ));
            return help;
        }
        if pattern.kind != PatternKind::Regex {
            let near = self.nearest(pattern.body(), logical);
            if !near.is_empty() {
                help.push(format!("nearest names: {}", list(&near, 3)));
                return help;
            }
        }
        let samples: Vec<&str> = self
            .by_shape(logical)
            .values()
            .filter_map(|names| names.first().copied())
            .take(3)
            .collect();
        help.push(format!("names here look like {}", list(&samples, 3)));
        help
    }

    /// The pattern with what people leave out at its ends, if that matches.
    fn completed(&self, pattern: &Pattern, logical: bool) -> Option<(String, usize)> {
        let body = pattern.body();
        let candidates = match pattern.kind {
            PatternKind::Regex => vec![format!("re:.*{body}"), format!("re:.*{body}.*")],
            _ => vec![
                format!("{body}.weight"),
                format!("*{body}"),
                format!("*.{body}.weight"),
                format!("*{body}.weight"),
                format!("*{body}*"),
            ],
        };
        candidates.into_iter().find_map(|text| {
            let better = Pattern::new(&text, pattern.place.clone()).ok()?;
            let matcher = Matcher::new([(0, &better)]).ok()?;
            let names = self.by_shape(logical).values().flatten();
            let hits = names.filter(|name| matcher.any(name)).count();
            (hits > 0).then_some((text, hits))
        })
    }

    fn matches_any(&self, pattern: &Pattern, logical: bool) -> bool {
        let matcher = Matcher::new([(0, pattern)]).ok();
        let names = || self.by_shape(logical).values().flatten();
        matcher.is_some_and(|matcher| names().any(|name| matcher.any(name)))
    }

    /// The names that differ least from a glob, at most three.
    fn nearest(&self, glob: &str, logical: bool) -> Vec<&'n str> {
        let written = alternatives(glob);
        let shaped: Vec<String> = written.iter().map(|a| shape(a)).collect();
        let literal = written.iter().map(|a| a.chars().filter(|c| *c != '*').count()).min();
        let limit = (literal.unwrap_or(0) / 3).clamp(2, 12);
        let mut scored: Vec<(usize, usize, &str)> = Vec::new();
        for names in self.by_shape(logical).values() {
            let Some(first) = names.first() else { continue };
            if first.len() > MAX_COMPARED {
                continue;
            }
            let least = |to: &[String], name: &str| {
                to.iter().map(|a| distance(a, name)).min().unwrap_or(usize::MAX)
            };
            let score = least(&shaped, &shape(first));
            if score > limit {
                continue;
            }
            // Of the names of one shape, the one with the pattern's own numbers.
            let best =
                names.iter().take(MAX_COMPARED).map(|name| (least(&written, name), *name)).min();
            let (exact, name) = best.unwrap_or((score, first));
            scored.push((score, exact, name));
        }
        scored.sort_unstable();
        scored.into_iter().take(3).map(|(_, _, name)| name).collect()
    }
}

/// A glob's alternatives written out, braces gone; classes stand as they are.
fn alternatives(glob: &str) -> Vec<String> {
    let mut out = vec![glob.chars().take(MAX_COMPARED).collect::<String>()];
    while let Some(at) = out.iter().position(|text| text.contains('{')) {
        let text = out.swap_remove(at);
        // The innermost pair first: the last `{` before the first `}`.
        let close = text.find('}');
        let open = close.and_then(|close| text[..close].rfind('{'));
        let (Some(open), Some(close)) = (open, close) else {
            out.push(text);
            break;
        };
        for choice in text[open + 1..close].split(',') {
            out.push(format!("{}{choice}{}", &text[..open], &text[close + 1..]));
        }
        if out.len() > MAX_ALTERNATIVES {
            out.truncate(MAX_ALTERNATIVES);
            out.retain(|text| !text.contains('{'));
            break;
        }
    }
    out
}

/// Edit distance between a glob and a name, where `*` takes any run for nothing and `?` any character.
fn distance(glob: &str, name: &str) -> usize {
    let name: Vec<char> = name.chars().collect();
    let mut row: Vec<usize> = (0..=name.len()).collect();
    for g in glob.chars() {
        let mut diagonal = row[0];
        if g == '*' {
            for j in 0..name.len() {
                row[j + 1] = row[j + 1].min(row[j]);
            }
            continue;
        }
        row[0] += 1;
        for (j, &c) in name.iter().enumerate() {
            let swap = diagonal + usize::from(g != c && g != '?');
            diagonal = row[j + 1];
            row[j + 1] = swap.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[name.len()]
}

fn names_counted(n: usize) -> String {
    if n == 1 { "1 name".to_owned() } else { format!("{} names", count(n as u64)) }
}

fn weights_counted(n: usize) -> String {
    if n == 1 { "1 weight".to_owned() } else { format!("{} weights", count(n as u64)) }
}

/// The problem of a rule that decides nothing.
pub(super) fn problem(
    number: usize,
    rules: &[Rule],
    table: &WeightTable,
    names: &Names<'_>,
    decided: &[Assigned],
    shapes: &mut Shapes<'_>,
) -> Diagnostic {
    let rule = &rules[number];
    let n = number + 1;
    let total = table.weights.len();
    let (mut by_name, mut by_weight, mut by_tower, mut by_class) = (0usize, 0usize, 0usize, 0usize);
    let mut aliases = 0usize;
    let mut takers: BTreeMap<usize, usize> = BTreeMap::new();
    let (mut selected, mut left_out) = (0usize, 0usize);
    for (index, (weight, assigned)) in table.weights.iter().zip(decided).enumerate() {
        let tower = rule.towers.is_empty() || rule.towers.contains(&weight.tower);
        let class = rule.classes.is_empty() || rule.classes.contains(&weight.class);
        if weight.is_alias() {
            aliases += usize::from(tower && class && !rule.classes.is_empty());
            continue;
        }
        let in_checkpoint = names.meet_name(number, rule, index) == Meet::All;
        let logical = names.meets_weight(number, index);
        let name = in_checkpoint && logical;
        by_name += usize::from(in_checkpoint);
        by_weight += usize::from(logical);
        by_tower += usize::from(tower);
        by_class += usize::from(class);
        if name && tower && class {
            selected += 1;
            left_out += usize::from(assigned.fate == Fate::LeftOut);
            if let Some(taker) = assigned.rule {
                *takers.entry(taker).or_default() += 1;
            }
        }
    }
    let place = rule.place();

    if selected > 0 {
        let why = if takers.is_empty() { "none of which is stored" } else { "all taken before" };
        let message =
            format!("rule {n} decides no weight: it selects {}, {why}", weights_counted(selected));
        let mut problem = Diagnostic::new(AREA, message);
        for (&taker, &taken) in &takers {
            problem = problem.help(format!(
                "rule {} ({}) takes {}",
                taker + 1,
                rules[taker].selects(),
                count(taken as u64)
            ));
        }
        if left_out > 0 {
            problem = problem.help(format!("[towers] leaves out {}", count(left_out as u64)));
        }
        if let Some(first) = takers.keys().next() {
            problem = problem.help(format!(
                "the first rule that selects a weight decides: put rule {n} before rule {}",
                first + 1
            ));
        }
        let problem = problem.help("optional = true lets a rule decide nothing");
        return place.mark(problem, "");
    }

    let mut problem =
        Diagnostic::new(AREA, format!("rule {n} decides no weight: none meets all its selectors"));
    let of = |hits: usize| format!("{} of {}", count(hits as u64), weights_counted(total));
    if !rule.patterns.is_empty() {
        problem = problem.help(format!("`match` alone selects {}", of(by_name)));
    }
    if !rule.weights.is_empty() {
        problem = problem.help(format!("`weight` alone selects {}", of(by_weight)));
    }
    if !rule.towers.is_empty() {
        problem =
            problem.help(format!("tower {} alone selects {}", list(&rule.towers, 9), of(by_tower)));
    }
    if !rule.classes.is_empty() {
        problem = problem.help(format!(
            "class {} alone selects {}",
            list(&rule.classes, 9),
            of(by_class)
        ));
    }
    let logical = by_name > 0 || rule.patterns.is_empty();
    let idle = if logical { (by_weight, &rule.weights) } else { (by_name, &rule.patterns) };
    if aliases > 0 {
        problem = problem
            .help("the draft's embedding serves only as its head: class = \"lm_head\" selects it");
    } else if idle.0 == 0 && !idle.1.is_empty() {
        let many = idle.1.len() > 1;
        for pattern in idle.1.iter().take(3) {
            for line in shapes.advice(pattern, logical) {
                problem.help.push(if many { format!("`{}`: {line}", pattern.text) } else { line });
            }
        }
    } else if by_tower == 0 {
        let present: BTreeSet<_> = table.weights.iter().map(|w| w.tower).collect();
        let present: Vec<_> = present.into_iter().collect();
        problem = problem.help(format!("towers of this model: {}", list(&present, 9)));
    } else if by_class == 0 {
        let classes = table.weights.iter().filter(|w| !w.is_alias()).map(|w| w.class);
        let present: BTreeSet<_> = classes.collect();
        let present: Vec<_> = present.into_iter().collect();
        problem = problem.help(format!("classes of this model: {}", list(&present, 9)));
    } else if !rule.patterns.is_empty() || !rule.weights.is_empty() {
        let example = table
            .weights
            .iter()
            .enumerate()
            .find(|(i, w)| !w.is_alias() && names.meet(number, rule, *i) == Meet::All);
        if let Some((_, weight)) = example {
            problem = problem.help(format!(
                "{} is class {} of tower {}",
                super::misfit::shown(weight),
                weight.class,
                weight.tower
            ));
        }
    }
    let problem = problem.help("optional = true lets a rule decide nothing");
    let label = if rule.patterns.len().max(rule.weights.len()) > 1 {
        "and the other patterns of this rule"
    } else {
        ""
    };
    place.mark(problem, label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_to_a_glob_counts_only_what_its_letters_miss() {
        assert_eq!(distance("*.q_proj.weight", "model.layers.3.q_proj.weight"), 0);
        assert_eq!(distance("*.q_prj.weight", "model.layers.3.q_proj.weight"), 1);
        assert_eq!(distance("a?c", "abc"), 0);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("*", ""), 0);
        assert_eq!(distance("abc", ""), 3);
        assert_eq!(distance("x*y", "x"), 1);
    }

    #[test]
    fn alternatives_are_written_out_inner_ones_first() {
        let mut all = alternatives("*.{q,k}_proj.{a{b,c},d}");
        all.sort();
        all.dedup();
        let expected = [
            "*.k_proj.ab",
            "*.k_proj.ac",
            "*.k_proj.d",
            "*.q_proj.ab",
            "*.q_proj.ac",
            "*.q_proj.d",
        ];
        assert_eq!(all, expected);
        let many = "{a,b,c}".repeat(40);
        assert!(alternatives(&many).len() <= MAX_ALTERNATIVES);
        assert_eq!(alternatives("a}b{c"), ["a}b{c"]);
        assert_eq!(alternatives(&"{a,b}".repeat(6)).len(), MAX_ALTERNATIVES);
        // One more has twice as many: only those that are written out count.
        assert!(alternatives(&"{a,b}".repeat(7)).len() < MAX_ALTERNATIVES);
        let long = |n: usize| alternatives(&"x".repeat(n))[0].len();
        assert_eq!((long(MAX_COMPARED), long(MAX_COMPARED + 1)), (MAX_COMPARED, MAX_COMPARED));
    }

    #[test]
    fn numbers_do_not_set_names_apart() {
        assert_eq!(shape("layers.12.fc1.weight"), "layers.#.fc#.weight");
        assert_eq!(shape(""), "");
    }
}
