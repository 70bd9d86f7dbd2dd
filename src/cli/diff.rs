//! `radpack diff`

use std::fmt::Write;
use std::process::ExitCode;

use radpack::diag::{Result, count, list, size};
use radpack::diff::{self, Change, ChangedWeight, Difference};
use serde_json::Value;

use super::args::Diff;
use super::documents::{ChangeDocument, ChangedWeightDocument, DiffDocument};
use super::inspect::open;
use super::output::Output;
use super::request;

/// Exit code of files that differ, as `diff` and `cmp` have it.
const DIFFERENT: u8 = 1;

/// Characters of a value that are shown.
const SHOWN: usize = 60;

/// Compares two files and prints what they differ in.
pub fn run(args: &Diff, output: &Output) -> Result<ExitCode> {
    let (a, b) = (open(&args.a)?, open(&args.b)?);
    let threads = request::threads_of(args.threads);
    let found = request::pool(threads)?.install(|| diff::diff(&a, &b))?;
    if output.json() {
        output.document(&document(args, &found))?;
    } else {
        output.text(&text(&found, args.report))?;
    }
    Ok(if found.same_bytes { ExitCode::SUCCESS } else { ExitCode::from(DIFFERENT) })
}

fn text(found: &Difference, report: usize) -> String {
    if found.same_bytes {
        let weights = count(found.weights.equal as u64);
        return format!("equal     {weights} weights, {}, every byte\n", size(found.file_bytes[0]));
    }
    let mut out = String::new();
    let recipe = found.recipe.iter().map(|c| Change {
        // What people call it: the rules of a recipe stand in [[quantize]].
        path: c.path.replace("quantize ", "rule "),
        ..c.clone()
    });
    part(&mut out, "recipe", &recipe.map(|c| line(&c)).collect::<Vec<_>>(), report);
    let lines = |changes: &[Change]| changes.iter().map(line).collect::<Vec<_>>();
    part(&mut out, "source", &lines(&found.source), report);
    part(&mut out, "model", &lines(&found.model), report);
    part(&mut out, "weights", &weights(found), report);
    part(&mut out, "graphs", &lines(&found.graphs), report);
    part(&mut out, "files", &lines(&found.files), report);
    part(&mut out, "vocab", &lines(&found.vocabulary), report);
    part(&mut out, "memory", &lines(&found.memory), report);
    part(&mut out, "metadata", &lines(&found.metadata), report);
    let [a, b] = found.file_bytes;
    let sizes = if a == b { size(a) } else { format!("{} → {}", size(a), size(b)) };
    part(&mut out, "size", &[sizes], report);
    out.push_str("different\n");
    out
}

/// A label before the first of some lines.
fn part(out: &mut String, label: &str, lines: &[String], report: usize) {
    let show = if report == 0 { lines.len() } else { report };
    let left_out = lines.len().saturating_sub(show);
    let more = (left_out > 0).then(|| format!("… and {left_out} more (--report 0, --json)"));
    for (n, line) in lines.iter().take(show).chain(&more).enumerate() {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{:<9} {line}", if n == 0 { label } else { "" });
    }
}

fn line(change: &Change) -> String {
    let value = |v: &Option<Value>| match v {
        None => "none".to_owned(),
        Some(Value::String(s)) => s.clone(),
        Some(other) => other.to_string(),
    };
    let [a, b] = [value(&change.a), value(&change.b)];
    let same = a.chars().zip(b.chars()).take_while(|(x, y)| x == y).count();
    // Long texts are shown from a little before the first character that differs.
    let from = if same > SHOWN / 2 { same - SHOWN / 4 } else { 0 };
    format!("{}: {} → {}", change.path, cut(&a, from), cut(&b, from))
}

fn cut(text: &str, from: usize) -> String {
    let mut shown: String = text.chars().skip(from).take(SHOWN).collect();
    if from + SHOWN < text.chars().count() {
        shown.push('…');
    }
    if from > 0 { format!("…{shown}") } else { shown }
}

fn weights(found: &Difference) -> Vec<String> {
    let w = &found.weights;
    let of = w.equal + w.changed.len();
    let mut lines = Vec::new();
    for (names, which) in [(&w.only_a, "first"), (&w.only_b, "second")] {
        if !names.is_empty() {
            let n = count(names.len() as u64);
            lines.push(format!("{n} only in the {which}: {}", list(names, 5)));
        }
    }
    if w.changed.is_empty() {
        return lines;
    }
    let mut changed: Vec<&ChangedWeight> = w.changed.iter().collect();
    // The furthest apart first; those that cannot be compared before them.
    changed.sort_by(|x, y| {
        let key = |c: &ChangedWeight| c.distance.unwrap_or(f64::INFINITY);
        key(y).total_cmp(&key(x)).then_with(|| x.name.cmp(&y.name))
    });
    lines.push(format!("{} of {} differ", count(changed.len() as u64), count(of as u64)));
    lines.extend(changed.into_iter().map(|c| {
        let [a, b] = &c.encodings;
        let planes = if a == b { a.clone() } else { format!("{a} → {b}") };
        let far = match c.distance {
            Some(distance) => format!("{distance:.2e} apart"),
            None if c.shapes[0] != c.shapes[1] => {
                format!("shape {:?} → {:?}", c.shapes[0], c.shapes[1])
            }
            None => "values not comparable".to_owned(),
        };
        format!("  {} ({planes}): {far}", c.name)
    }));
    lines
}

fn document(args: &Diff, found: &Difference) -> DiffDocument {
    let changes = |list: &[Change]| {
        let one =
            |c: &Change| ChangeDocument { path: c.path.clone(), a: c.a.clone(), b: c.b.clone() };
        list.iter().map(one).collect()
    };
    let changed = found.weights.changed.iter().map(|c| ChangedWeightDocument {
        name: c.name.clone(),
        encodings: c.encodings.clone(),
        shapes: c.shapes.clone(),
        distance: c.distance,
    });
    DiffDocument {
        schema: "radpack.diff",
        a: args.a.display().to_string(),
        b: args.b.display().to_string(),
        equal: found.same_bytes,
        file_bytes: found.file_bytes,
        recipe: changes(&found.recipe),
        source: changes(&found.source),
        model: changes(&found.model),
        equal_weights: found.weights.equal,
        changed_weights: changed.collect(),
        weights_only_in_a: found.weights.only_a.clone(),
        weights_only_in_b: found.weights.only_b.clone(),
        graphs: changes(&found.graphs),
        files: changes(&found.files),
        vocabulary: changes(&found.vocabulary),
        memory: changes(&found.memory),
        metadata: changes(&found.metadata),
    }
}
