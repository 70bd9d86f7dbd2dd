//! Which module may name which: every path that starts at the crate root, found by reading the source.

use std::collections::{BTreeMap, BTreeSet};

use super::Source;
use super::code::{Token, tokens};

const FOUNDATION: &[&str] = &["model", "num", "tensor", "diag", "hash"];

/// Stages in pipeline order. Each may name the foundation and the roots of the stages before it, except where
/// [`TABLE`] says less.
const STAGES: &[&str] = &[
    "checkpoint",
    "recipe",
    "partition",
    "graph",
    "quantize",
    "artifact",
    "estimate",
    "runtime",
    "export",
    "diff",
    "card",
];

/// Rows that don't follow from the order of [`STAGES`]: module → what it may name. The foundation has an order of its
/// own: diag, tensor, then num and model.
pub const TABLE: &[(&str, &[&str])] = &[
    ("diag", &[]),
    ("tensor", &["diag"]),
    ("hash", &[]),
    ("num", &["tensor", "diag"]),
    ("model", &["tensor", "diag"]),
    // Readers of the container work without the compiler.
    ("artifact", &["tensor", "diag", "hash"]),
];

/// What a module may name; `None` for one that has no row.
fn allowed(module: &str) -> Option<Vec<&'static str>> {
    if let Some((_, row)) = TABLE.iter().find(|(name, _)| *name == module) {
        return Some(row.to_vec());
    }
    let before = match module {
        "pipeline" => STAGES,
        _ => &STAGES[..STAGES.iter().position(|s| *s == module)?],
    };
    Some([FOUNDATION, before].concat())
}

/// The modules of `src`: top-level name → inner modules.
pub struct Tree {
    modules: BTreeMap<String, BTreeSet<String>>,
    /// (module, inner module) pairs that the root file declares visibly.
    visible: BTreeSet<(String, String)>,
}

impl Tree {
    /// Reads the module names off the paths of a set of files.
    pub fn of(sources: &[Source]) -> Tree {
        let mut modules: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        let mut visible = BTreeSet::new();
        for source in sources {
            let Some(path) = module_path(&source.path) else { continue };
            let Some(module) = path.first() else { continue };
            let inner = modules.entry(module.clone()).or_default();
            match path.get(1) {
                Some(name) => drop(inner.insert(name.clone())),
                None => {
                    let found = visible_modules(&source.text);
                    visible.extend(found.into_iter().map(|name| (module.clone(), name)));
                }
            }
        }
        Tree { modules, visible }
    }

    /// Checks the paths of one file of `src`.
    pub fn check(
        &self,
        file: &str,
        tokens: &[Token],
        report: &mut impl FnMut(usize, &'static str, String),
    ) {
        // lib.rs and main.rs bind the modules together.
        let Some(here) = module_path(file).filter(|p| !p.is_empty()) else { return };
        let module = here[0].as_str();
        if module == "cli" {
            return;
        }
        let Some(allowed) = allowed(module) else {
            if here.len() == 1 {
                let table = "the table of xtask/src/tidy/direction.rs";
                report(1, "direction", format!("{module} has no row in {table}"));
            }
            return;
        };
        for (line, path) in crate_paths(&here, tokens) {
            let Some(target) = path.first() else { continue };
            let Some(inner) = self.modules.get(target) else { continue };
            if target == module {
                continue;
            }
            if !allowed.contains(&target.as_str()) {
                let may = if allowed.is_empty() { "nothing".into() } else { allowed.join(", ") };
                let why = format!("{module} may not name {target}; it may name {may}");
                report(line, "direction", why);
            } else if let Some(second) = path.get(1)
                && STAGES.contains(&target.as_str())
                && inner.contains(second)
                // A path that ends here may mean a function of the same name, unless the module is visible.
                && (path.len() > 2 || self.visible.contains(&(target.clone(), second.clone())))
                // The container's entries are documents of their own that readers name: manifest, digests, errors.
                && !(target == "artifact" && self.visible.contains(&(target.clone(), second.clone())))
            {
                let why = format!(
                    "{target}::{second} is an inner module of {target}; name what {target} itself exports"
                );
                report(line, "root-noun", why);
            }
        }
    }
}

/// Module path of a file of `src`, without the crate: `src/a/b.rs` and `src/a/b/mod.rs` are `[a, b]`; `None` for files
/// elsewhere.
fn module_path(file: &str) -> Option<Vec<String>> {
    let path = file.strip_prefix("src/")?.strip_suffix(".rs")?;
    let path = path.strip_suffix("/mod").unwrap_or(path);
    if path == "lib" || path == "main" {
        return Some(Vec::new());
    }
    Some(path.split('/').map(str::to_owned).collect())
}

/// Names of the modules that a file declares with `pub` or `pub(…)`.
fn visible_modules(source: &str) -> Vec<String> {
    let tokens = tokens(source);
    let declared = |w: &[Token]| {
        (w[1].text == "mod" && w[3].text == ";" && matches!(w[0].text, "pub" | ")"))
            .then(|| w[2].text.to_owned())
    };
    tokens.windows(4).filter_map(declared).collect()
}

/// Every path that starts with `crate::` or leaves upward with `super::`, as segments from the crate root, with its line.
/// `{…}` groups give one path per leaf; a glob ends the path; `self` in a group stands for the path before it.
fn crate_paths(here: &[String], tokens: &[Token]) -> Vec<(usize, Vec<String>)> {
    let mut found = Vec::new();
    // Inline modules that are open, with the brace depth they opened at.
    let mut inline: Vec<(String, usize)> = Vec::new();
    let (mut depth, mut i) = (0, 0);
    while let Some(token) = tokens.get(i) {
        let text = |k: usize| tokens.get(k).map_or("", |t| t.text);
        let starts_path = i == 0 || text(i - 1) != "::";
        match token.text {
            "{" => depth += 1,
            "}" => {
                depth = usize::saturating_sub(depth, 1);
                if inline.last().is_some_and(|(_, d)| *d == depth) {
                    inline.pop();
                }
            }
            "mod" if text(i + 2) == "{" => inline.push((text(i + 1).to_owned(), depth)),
            "crate" if starts_path && text(i + 1) == "::" => {
                i = tree(tokens, i + 2, &[], &mut found);
                continue;
            }
            "self" | "super" if starts_path && text(i + 1) == "::" => {
                let mut base: Vec<String> = here.to_vec();
                base.extend(inline.iter().map(|(name, _)| name.clone()));
                let mut k = if token.text == "self" { i + 2 } else { i };
                while text(k) == "super" && text(k + 1) == "::" {
                    base.pop();
                    k += 2;
                }
                i = tree(tokens, k, &base, &mut found);
                continue;
            }
            _ => {}
        }
        i += 1;
    }
    found
}

/// Reads one path or group from token `i` on, below `base`, and returns the token after it.
fn tree(
    tokens: &[Token],
    mut i: usize,
    base: &[String],
    found: &mut Vec<(usize, Vec<String>)>,
) -> usize {
    let text = |k: usize| tokens.get(k).map_or("", |t| t.text);
    let mut path = base.to_vec();
    let mut line = tokens.get(i).map_or(0, |t| t.line);
    loop {
        let word = text(i);
        if word == "{" {
            i += 1;
            while !matches!(text(i), "}" | "") {
                i = tree(tokens, i, &path, found);
                // What a leaf may have behind it: `as name`, a comma.
                while !matches!(text(i), "}" | "," | "") {
                    i += 1;
                }
                if text(i) == "," {
                    i += 1;
                }
            }
            return i + 1;
        }
        line = tokens.get(i).map_or(line, |t| t.line);
        if word.starts_with(|c: char| c.is_alphabetic() || c == '_') {
            if word != "self" {
                path.push(word.to_owned());
            }
            i += 1;
            if text(i) == "::" && text(i + 1) != "<" {
                i += 1;
                continue;
            }
        }
        found.push((line, path));
        // A glob, or the end of the path; at least one token is passed, so the caller moves on.
        return if word == "*" { i + 1 } else { i };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(source: &str) -> Vec<String> {
        let here = ["a".to_owned(), "b".to_owned()];
        crate_paths(&here, &tokens(source)).into_iter().map(|(_, p)| p.join("::")).collect()
    }

    #[test]
    fn groups_give_one_path_per_leaf() {
        assert_eq!(
            paths("use crate::{c::D, e::{self, f::*, G as H}};\nuse crate::i;"),
            ["c::D", "e", "e::f", "e::G", "i"]
        );
    }

    #[test]
    fn super_counts_inline_modules() {
        let source =
            "use super::x; mod t { use super::y; fn f() { super::super::z() } } use super::w;";
        assert_eq!(paths(source), ["a::x", "a::b::y", "a::z", "a::w"]);
    }

    #[test]
    fn a_path_ends_at_type_arguments() {
        assert_eq!(paths("crate::c::D::<crate::e::F>::new(crate::g::h)"), ["c::D", "e::F", "g::h"]);
    }

    #[test]
    fn visibility_is_no_path() {
        assert_eq!(paths("pub(crate) fn f(); pub(in crate::a) struct S; pub(super) mod m;"), ["a"]);
    }

    #[test]
    fn malformed_source_ends() {
        for source in
            ["use crate::", "use crate::{", "use crate::{a", "use crate::{,}", "use super::"]
        {
            let _ = paths(source);
        }
    }
}
