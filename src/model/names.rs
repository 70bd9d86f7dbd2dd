//! Many tensor names said in few words.

use std::collections::{BTreeMap, BTreeSet};

/// Names with equal text around their numbers as one pattern each: `layers.{0-47}.mlp.up_proj.weight`. Every name is
/// covered and nothing else is.
pub(super) fn collapse<S: AsRef<str>>(names: &[S]) -> Vec<String> {
    let mut groups: BTreeMap<String, Vec<(Vec<u64>, &str)>> = BTreeMap::new();
    for name in names {
        let name = name.as_ref();
        let mut numbers = Vec::new();
        let pattern: Vec<&str> = name
            .split('.')
            .map(|segment| match segment.parse::<u64>() {
                Ok(n) if n.to_string() == segment => {
                    numbers.push(n);
                    "\0"
                }
                _ => segment,
            })
            .collect();
        groups.entry(pattern.join(".")).or_default().push((numbers, name));
    }
    let mut out = Vec::new();
    for (pattern, members) in groups {
        split(&pattern, &members, &mut out);
    }
    out
}

fn split(pattern: &str, members: &[(Vec<u64>, &str)], out: &mut Vec<String>) {
    if let [(_, only)] = members {
        out.push((*only).to_owned());
        return;
    }
    let slots = members.first().map_or(0, |(numbers, _)| numbers.len());
    let sets: Vec<BTreeSet<u64>> = (0..slots)
        .map(|i| members.iter().filter_map(|(n, _)| n.get(i).copied()).collect())
        .collect();
    let distinct: BTreeSet<&Vec<u64>> = members.iter().map(|(n, _)| n).collect();
    let product = sets.iter().try_fold(1usize, |p, s| p.checked_mul(s.len()));
    let varying = sets.iter().position(|s| s.len() > 1);
    if product == Some(distinct.len()) || varying.is_none() {
        let mut shown = String::new();
        for (i, piece) in pattern.split('\0').enumerate() {
            if let Some(set) = i.checked_sub(1).and_then(|i| sets.get(i)) {
                let set: Vec<u64> = set.iter().copied().collect();
                match set[..] {
                    [one] => shown.push_str(&one.to_string()),
                    _ => shown.push_str(&format!("{{{}}}", ranges(&set))),
                }
            }
            shown.push_str(piece);
        }
        out.push(shown);
        return;
    }
    let slot = varying.unwrap_or(0);
    let mut parts: BTreeMap<u64, Vec<(Vec<u64>, &str)>> = BTreeMap::new();
    for member in members {
        parts.entry(member.0.get(slot).copied().unwrap_or(0)).or_default().push(member.clone());
    }
    for part in parts.values() {
        split(pattern, part, out);
    }
}

/// Ascending numbers as `0-3, 7, 9-11`.
pub(super) fn ranges(numbers: &[u64]) -> String {
    let mut out: Vec<String> = Vec::new();
    let mut at = 0;
    while let Some(&first) = numbers.get(at) {
        let run = numbers[at..]
            .iter()
            .enumerate()
            .take_while(|(i, n)| **n == first.saturating_add(*i as u64))
            .count();
        match run {
            1 => out.push(first.to_string()),
            _ => out.push(format!("{first}-{}", first + run as u64 - 1)),
        }
        at += run;
    }
    out.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_cover_exactly_the_names() {
        let names = ["l.0.a", "l.1.a", "l.2.a", "l.7.a", "x", "l.0.b", "l.01.a"];
        assert_eq!(collapse(&names), ["l.{0-2, 7}.a", "l.0.b", "l.01.a", "x"]);
        let experts = ["l.0.e.0", "l.0.e.1", "l.1.e.0", "l.1.e.1", "m.0.e.0", "m.1.e.1"];
        assert_eq!(collapse(&experts), ["l.{0-1}.e.{0-1}", "m.0.e.0", "m.1.e.1"]);
        assert_eq!(collapse::<&str>(&[]), Vec::<String>::new());
        assert_eq!(collapse(&["a.#.0", "a.#.1"]), ["a.#.{0-1}"]);
    }

    #[test]
    fn ranges_join_neighbours() {
        assert_eq!(ranges(&[0, 1, 2, 4, 6, 7]), "0-2, 4, 6-7");
        assert_eq!(ranges(&[u64::MAX]), u64::MAX.to_string());
        assert_eq!(ranges(&[]), "");
    }
}
