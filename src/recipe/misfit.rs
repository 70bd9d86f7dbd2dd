//! Weights that cannot be stored as their rule says, and how that is told: one problem for all weights that fail the
//! same way, with the weights, the rule, and what would work.

use std::collections::BTreeMap;

use super::names::Names;
use super::read::AREA;
use super::rule::Rule;
use super::{Method, NAMED, Rounding, group_columns};
use crate::diag::{Diagnostic, count, list};
use crate::model::{Class, Weight, WeightTable};
use crate::tensor::{DType, Encoding, MAX_RANK};

/// Names shown of the weights that fail the same way.
const SHOWN: usize = 3;

/// Why a weight cannot be stored as decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Misfit {
    /// The rule's patterns match some of its parts only.
    Partial,
    /// A grid over a vector or a scalar of that rank.
    Rank(usize),
    /// A grid over a router by a rule that is not for routers.
    Router,
    /// A cast or a grid over values that are no numbers to round.
    NotFloat(DType),
    /// A type that the container does not have, kept.
    Unholdable(DType),
    /// A type narrower than a byte whose rows end inside a byte, kept.
    BitRows(DType),
    /// No elements, under a grid.
    Empty,
    /// More dimensions than a container entry has.
    TooManyDimensions(usize),
    /// A size beyond 64 bits.
    TooLarge,
    /// Columns that do not divide into groups, where whole groups are asked for: columns, group.
    ShortGroup(u64, u64),
    /// Columns that do not divide into groups, where the package whose rounding is asked for refuses that.
    ShortGroupOf(Rounding, u64, u64),
    /// An element type whose scales the rounding's package would store otherwise.
    Rounding(Rounding, DType),
}

/// Whether a container's plane can have that type. Its type numbers leave out the doubles, 64-bit unsigned integers,
/// complex numbers and the `fnuz` variants of fp8 (radiance container version 2).
fn holdable(dtype: DType) -> bool {
    !matches!(dtype, DType::F64 | DType::U64 | DType::C64 | DType::F8E4M3Fnuz | DType::F8E5M2Fnuz)
}

/// Whether values of that type can be rounded to another: floating point of whole bytes. Bare fp4 and fp6 codes mean
/// nothing without the scales that a quantized checkpoint keeps beside them.
fn convertible(dtype: DType) -> bool {
    dtype.is_float() && dtype.bits() >= 8
}

/// Checks one decision.
pub(super) fn check(
    weight: &Weight,
    rule: Option<&Rule>,
    method: &Method,
    encoding: &Encoding,
    whole_groups: bool,
) -> Option<Misfit> {
    let shape = &weight.shape;
    let rank = shape.rank();
    if rank > MAX_RANK {
        return Some(Misfit::TooManyDimensions(rank));
    }
    let (Some((_, cols)), Some(elements)) = (shape.matrix(), shape.elements()) else {
        return Some(Misfit::TooLarge);
    };
    // Bits, because the source may be wider than what is stored.
    if elements.checked_mul(64).is_none() || encoding.bytes(shape).is_none() {
        return Some(Misfit::TooLarge);
    }
    match method {
        Method::Keep if !holdable(weight.dtype) => Some(Misfit::Unholdable(weight.dtype)),
        Method::Keep if !(cols * u64::from(weight.dtype.bits())).is_multiple_of(8) => {
            Some(Misfit::BitRows(weight.dtype))
        }
        Method::Keep => None,
        _ if !convertible(weight.dtype) => Some(Misfit::NotFloat(weight.dtype)),
        Method::Cast(_) => None,
        Method::Grid(_) if rank < 2 => Some(Misfit::Rank(rank)),
        Method::Grid(_)
            if weight.class == Class::Router
                && rule.is_some_and(|r| r.classes != [Class::Router]) =>
        {
            Some(Misfit::Router)
        }
        Method::Grid(_) if elements == 0 => Some(Misfit::Empty),
        Method::Grid(grid) if grid.rounding.source_clash(grid, weight.dtype).is_some() => {
            Some(Misfit::Rounding(grid.rounding, weight.dtype))
        }
        Method::Grid(grid)
            if grid.rounding.whole_columns(grid).is_some_and(|n| !cols.is_multiple_of(n)) =>
        {
            Some(Misfit::ShortGroupOf(grid.rounding, cols, grid.block[1]))
        }
        Method::Grid(_) => match group_columns(encoding) {
            Some(group) if whole_groups && !cols.is_multiple_of(group) => {
                Some(Misfit::ShortGroup(cols, group))
            }
            _ => None,
        },
    }
}

/// A weight as the checkpoint names it: `a.weight`, `experts.down_proj[17]`; one of several tensors by its logical
/// name.
pub(super) fn shown(weight: &Weight) -> String {
    match weight.parts.as_slice() {
        [part] => match part.index {
            Some(index) => format!("{}[{index}]", part.tensor),
            None => part.tensor.clone(),
        },
        parts => format!("{} ({} tensors)", weight.name, parts.len()),
    }
}

/// The problems of all misfits, those of rule 1 first, weights without a rule last.
pub(super) fn problems(
    found: &BTreeMap<(usize, Misfit), Vec<usize>>,
    rules: &[Rule],
    table: &WeightTable,
    names: &Names<'_>,
) -> Vec<Diagnostic> {
    found
        .iter()
        .map(|(&(number, misfit), weights)| {
            let first: Vec<String> = weights
                .iter()
                .take(SHOWN)
                .filter_map(|&w| table.weights.get(w))
                .map(shown)
                .collect();
            let who = match weights.len() {
                1 => format!("weight {}", first.concat()),
                n if n <= SHOWN => format!("weights {}", list(&first, SHOWN)),
                n => format!("{} weights ({}, …)", count(n as u64), first.join(", ")),
            };
            match rules.get(number) {
                Some(rule) => told(number, rule, misfit, weights, &who, names),
                None => told_kept(misfit, &who),
            }
        })
        .collect()
}

fn told(
    number: usize,
    rule: &Rule,
    misfit: Misfit,
    weights: &[usize],
    who: &str,
    names: &Names<'_>,
) -> Diagnostic {
    let n = number + 1;
    let encoding = &rule.encoding;
    let keep = format!(
        "a rule before rule {n} that selects them with encoding = \"keep\" leaves them as they are"
    );
    let many = weights.len() > 1;
    let problem = |message: String| Diagnostic::new(AREA, message);
    let at = |problem: Diagnostic, label: &str| rule.places.encoding.mark(problem, label);
    match misfit {
        Misfit::Partial => {
            let (yes, no) = names.split(number, weights.first().copied().unwrap_or_default());
            let place = rule.patterns.first().map_or(&rule.places.rule, |p| &p.place);
            let problem = problem(format!("rule {n} matches only a part of {who}"))
                .help(format!("matched: {}; not matched: {}", list(&yes, SHOWN), list(&no, SHOWN)))
                .help("the tensors are stored as one weight: match all of them or none");
            place.mark(problem, "matches some of its tensors")
        }
        Misfit::Rank(rank) => at(
            problem(format!(
                "{who} {} of rank {rank}, and {encoding} needs rows and columns (rank 2 or more)",
                if many { "are" } else { "is" }
            ))
            .help(format!("narrow rule {n}, e.g. with class = \"linear\""))
            .help(keep),
            &format!("given by rule {n}"),
        ),
        Misfit::Router => at(
            problem(format!(
                "{who} {} experts, and rule {n} would store {} as {encoding} along with other classes",
                if many { "choose between" } else { "chooses between" },
                if many { "them" } else { "it" }
            ))
            .help("routers are kept by every published recipe: class = \"expert\" or \"linear\" leaves them out")
            .help("a rule of their own, class = \"router\", quantizes them if you mean it"),
            &format!("given by rule {n}"),
        ),
        Misfit::NotFloat(dtype) => at(
            problem(format!(
                "{who} {} values of type {dtype}, and {encoding} rounds floating-point values of whole bytes",
                if many { "hold" } else { "holds" }
            ))
            .help(format!("narrow rule {n} by name or class"))
            .help(keep),
            &format!("given by rule {n}"),
        ),
        Misfit::Empty => at(
            problem(format!("{who} {} no elements to quantize", if many { "have" } else { "has" })).help(keep),
            &format!("given by rule {n}"),
        ),
        Misfit::ShortGroup(cols, group) => {
            let problem = short_group(cols, group, who, &encoding.method).help(format!(
                "one scale a row takes any length, and so does whole_groups = false in rule {n}"
            ));
            at(problem, "groups of this encoding")
        }
        Misfit::ShortGroupOf(rounding, cols, group) => {
            let problem = short_group(cols, group, who, &encoding.method).help(format!(
                "rounding \"{}\" has no short groups; rounding \"rad\" has",
                rounding.name()
            ));
            at(problem, "groups of this encoding")
        }
        Misfit::Rounding(rounding, dtype) => {
            let clash = match &encoding.method {
                Method::Grid(grid) => rounding.source_clash(grid, dtype),
                _ => None,
            };
            let (message, help) = clash.map(|c| (c.message, c.help)).unwrap_or_default();
            at(problem(format!("{who}: {message}")).help(help), &format!("given by rule {n}"))
        }
        Misfit::Unholdable(_) | Misfit::BitRows(_) | Misfit::TooManyDimensions(_) | Misfit::TooLarge => {
            at(told_kept(misfit, who), &format!("given by rule {n}"))
        }
    }
}

fn told_kept(misfit: Misfit, who: &str) -> Diagnostic {
    match misfit {
        Misfit::Unholdable(dtype) => {
            let problem = Diagnostic::new(
                AREA,
                format!("{who}: a .rad file has no type {dtype} to keep it in"),
            );
            if convertible(dtype) {
                problem.help("a rule with encoding = \"f32\" stores it rounded to single precision")
            } else {
                problem.help("no encoding stores it; convert or drop the tensor in the checkpoint")
            }
        }
        Misfit::BitRows(dtype) => Diagnostic::new(
            AREA,
            format!(
                "{who}: rows of {dtype} end inside a byte, and rows of a .rad file start on bytes"
            ),
        )
        .help("convert the tensor in the checkpoint to a type of whole bytes"),
        Misfit::TooManyDimensions(rank) => Diagnostic::new(
            AREA,
            format!("{who}: {rank} dimensions; a .rad entry has at most {MAX_RANK}"),
        )
        .help("reshape the tensor in the checkpoint"),
        _ => Diagnostic::new(AREA, format!("{who}: its size does not fit in 64 bits"))
            .help("the shape in the checkpoint's header is damaged"),
    }
}

fn short_group(cols: u64, group: u64, who: &str, method: &Method) -> Diagnostic {
    let message = format!(
        "{who}: {cols} columns are no whole number of groups of {group} (the last group has {})",
        cols % group
    );
    let mut problem = Diagnostic::new(AREA, message);
    let codes = match method {
        Method::Grid(grid) => Some(grid.codes),
        _ => None,
    };
    // Group sizes that engines' kernels take; 16 goes with fp4 only.
    let usual: Vec<u64> = [16, 32, 64, 128, 256]
        .into_iter()
        .filter(|g| cols.is_multiple_of(*g) && (*g > 16 || codes == Some(DType::F4E2M1)))
        .collect();
    let other: Vec<u64> =
        (8..=cols.min(512)).filter(|g| cols.is_multiple_of(*g) && !usual.contains(g)).collect();
    let fitting: Vec<&str> = NAMED
        .iter()
        .filter(|named| match named.method() {
            Method::Grid(grid) => {
                Some(grid.codes) == codes
                    && group_columns(&grid.encoding()).is_some_and(|g| usual.contains(&g))
            }
            _ => false,
        })
        .map(|named| named.name)
        .collect();
    if usual.is_empty() {
        problem = problem.help(format!("no usual group size (32 to 256) divides {cols}"));
    } else {
        let mut line = format!("group sizes that fit {cols} columns: {}", list(&usual, 9));
        if !fitting.is_empty() {
            line.push_str(&format!(" ({})", list(&fitting, 9)));
        }
        problem = problem.help(line);
    }
    if !other.is_empty() {
        problem = problem.help(format!("spelled out, groups of {} fit as well", list(&other, 12)));
    }
    problem
}
