//! `--sweep AXIS=v1,v2,…`: one row for each combination; a row that is refused says why.

use std::process::ExitCode;

use radpack::diag::{Diagnostic, Failure, FailureKind, Result, count, list, nearest};
use radpack::estimate::Options;
use radpack::pipeline::{Settings, Subject, first_problem, why_not};
use radpack::recipe::{KvDtype, Recipe};

use super::super::args::EstimateKv;
use super::super::documents::{SweepDocument, SweepRow};
use super::super::output::Output;
use super::super::table::{Align, table};

/// Most rows of a sweep: far more than anybody reads, few enough to end soon.
const MAX_ROWS: usize = 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Axis {
    Devices,
    KvDtype,
    Length,
    Batch,
}

/// Names of axes, the first of each as it is shown.
const AXES: [(&str, Axis); 7] = [
    ("devices", Axis::Devices),
    ("kv-dtype", Axis::KvDtype),
    ("length", Axis::Length),
    ("batch", Axis::Batch),
    ("kv_dtype", Axis::KvDtype),
    ("max-seq-len", Axis::Length),
    ("batch-size", Axis::Batch),
];

impl Axis {
    fn name(self) -> &'static str {
        AXES.iter().find(|(_, axis)| *axis == self).map_or("", |(name, _)| name)
    }

    fn set(self, settings: &mut Settings, value: &str) -> std::result::Result<(), String> {
        if self == Axis::KvDtype {
            let known: Vec<&str> = KvDtype::NAMES.iter().map(|(name, _)| *name).collect();
            if !known.contains(&value) {
                return Err(format!(
                    "{value:?} is no element type of a cache: {}",
                    list(&known, 8)
                ));
            }
            settings.kv_dtype = Some(value.to_owned());
            return Ok(());
        }
        let number = value.parse::<u64>().ok().filter(|n| *n > 0);
        let Some(number) = number.filter(|n| *n <= u64::from(u32::MAX)) else {
            return Err(format!("{value:?} is no number from 1 to {}", u32::MAX));
        };
        match self {
            Axis::Devices if number > 65_536 => {
                return Err(format!("{number} devices; at most 65,536 share a model"));
            }
            Axis::Devices => settings.devices = Some(number),
            Axis::Length => settings.max_seq_len = Some(number),
            Axis::Batch => settings.batch_size = Some(number),
            Axis::KvDtype => {}
        }
        Ok(())
    }
}

/// The axes in the order they were given, and one setting for each combination; the last axis varies fastest.
fn parse(texts: &[String]) -> Result<(Vec<Axis>, Vec<Settings>)> {
    let refuse = |rule: String| {
        let problem = Diagnostic::new("--sweep", rule)
            .help("e.g. --sweep devices=8,16,32 --sweep kv-dtype=f16,fp8")
            .help("axes: devices, kv-dtype, length, batch");
        Err(Failure::one(FailureKind::Usage, "there is nothing to sweep over", problem))
    };
    let mut axes = Vec::new();
    let mut rows = vec![Settings::default()];
    for text in texts {
        let Some((name, values)) = text.split_once('=') else {
            return refuse(format!("{text:?} has no = between an axis and its values"));
        };
        let Some((_, axis)) = AXES.iter().find(|(known, _)| *known == name.trim()) else {
            let near = nearest(name.trim(), AXES.iter().map(|(name, _)| *name));
            let near =
                if near.is_empty() { String::new() } else { format!(": {}?", list(&near, 2)) };
            return refuse(format!("{:?} is no axis{near}", name.trim()));
        };
        if axes.contains(axis) {
            return refuse(format!("{} is given twice", axis.name()));
        }
        axes.push(*axis);
        let values: Vec<&str> = values.split(',').map(str::trim).collect();
        if rows.len().saturating_mul(values.len()) > MAX_ROWS {
            return refuse(format!("more than {} rows", count(MAX_ROWS as u64)));
        }
        let mut next = Vec::new();
        for row in &rows {
            for value in &values {
                let mut row = row.clone();
                if let Err(why) = axis.set(&mut row, value) {
                    return refuse(format!("{}: {why}", axis.name()));
                }
                next.push(row);
            }
        }
        rows = next;
    }
    Ok((axes, rows))
}

/// Prints every row; refused when no row fits.
pub fn run(
    args: &EstimateKv,
    subject: &Subject,
    recipe: &Recipe,
    options: Options,
    output: &Output,
) -> Result<ExitCode> {
    let (axes, settings) = parse(&args.sweep)?;
    let mut rows = Vec::new();
    for settings in settings {
        rows.push(row(subject, recipe, &settings, options)?);
    }
    let fits = rows.iter().any(|row| row.refusal.is_none());
    if output.json() {
        output.document(&SweepDocument {
            schema: "radpack.sweep",
            source: args.source.clone(),
            recipe: recipe.name.clone(),
            target: recipe.target.profile.clone(),
            axes: axes.iter().map(|axis| axis.name()).collect(),
            rows,
        })?;
    } else {
        output.text(&text(&axes, &rows))?;
    }
    Ok(ExitCode::from(if fits { 0 } else { FailureKind::Refused.exit_code() }))
}

fn row(
    subject: &Subject,
    recipe: &Recipe,
    settings: &Settings,
    options: Options,
) -> Result<SweepRow> {
    let recipe = settings.apply(recipe)?;
    let mut row = SweepRow {
        devices: recipe.target.devices,
        kv_dtype: settings.kv_dtype.clone(),
        max_seq_len: settings.max_seq_len,
        batch_size: settings.batch_size,
        ..SweepRow::default()
    };
    let measured = match subject.measure(&recipe, options) {
        Ok(measured) => measured,
        // What is wrong with every row ends the sweep.
        Err(failure) if failure.kind != FailureKind::Refused => return Err(failure),
        Err(failure) => {
            row.refusal = Some(first_problem(&failure));
            row.help = failure.problems.first().map(|p| p.help.clone()).unwrap_or_default();
            return Ok(row);
        }
    };
    let e = measured.estimate;
    row.kv_dtype.get_or_insert_with(|| measured.model.sizes.kv_dtype.name().to_owned());
    row.max_seq_len = Some(e.max_seq_len);
    row.batch_size = Some(e.batch_size);
    row.blocks = Some(e.blocks);
    row.tokens = Some(e.tokens);
    row.allocatable_tokens = Some(e.allocatable_tokens);
    row.contexts = Some(e.contexts);
    row.batch_at_full_length = Some(e.batch_at_full_length);
    row.length_at_full_batch = Some(e.length_at_full_batch);
    row.left = e.decisive().map(|d| d.left);
    row.block_bytes = Some(e.block_bytes);
    row.refusal = why_not(&e);
    row.help = e.misfits.first().map(|p| p.help.clone()).unwrap_or_default();
    Ok(row)
}

fn text(axes: &[Axis], rows: &[SweepRow]) -> String {
    let number = |n: Option<u64>| n.map_or("–".to_owned(), count);
    let mut header: Vec<&str> = axes.iter().map(|axis| axis.name()).collect();
    let mut align: Vec<Align> = axes
        .iter()
        .map(|axis| if *axis == Axis::KvDtype { Align::Left } else { Align::Right })
        .collect();
    header.extend(["blocks", "tokens", "contexts", "full length", "all together", ""]);
    align.extend([Align::Right; 5]);
    align.push(Align::Left);
    let cells = rows.iter().map(|row| {
        let of = |axis: &Axis| match axis {
            Axis::Devices => count(row.devices),
            Axis::KvDtype => row.kv_dtype.clone().unwrap_or_default(),
            Axis::Length => number(row.max_seq_len),
            Axis::Batch => number(row.batch_size),
        };
        let mut cells: Vec<String> = axes.iter().map(of).collect();
        cells.push(number(row.blocks));
        cells.push(number(row.tokens));
        cells.push(row.contexts.map_or("–".to_owned(), |n| format!("{n:.2}")));
        cells.push(number(row.batch_at_full_length));
        cells.push(number(row.length_at_full_batch));
        cells.push(row.refusal.clone().unwrap_or_default());
        cells
    });
    table(&header, &align, &cells.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(of: &[&str]) -> Vec<String> {
        of.iter().map(|t| (*t).to_owned()).collect()
    }

    #[test]
    fn the_last_axis_varies_fastest() {
        let (axes, rows) =
            parse(&texts(&["devices=8,16", "kv-dtype=f16, fp8"])).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(axes, [Axis::Devices, Axis::KvDtype]);
        let found: Vec<_> =
            rows.iter().map(|r| (r.devices, r.kv_dtype.as_deref().unwrap_or(""))).collect();
        let wanted = [(8, "f16"), (8, "fp8"), (16, "f16"), (16, "fp8")];
        assert_eq!(found, wanted.map(|(n, t)| (Some(n), t)));
    }

    #[test]
    fn what_is_no_axis_or_value_says_what_is() {
        let rule = |of: &[&str]| {
            let failure = parse(&texts(of)).expect_err("refused");
            assert_eq!(failure.kind, FailureKind::Usage);
            failure.problems[0].message.clone()
        };
        assert_eq!(rule(&["device=8"]), "\"device\" is no axis: devices?");
        assert_eq!(rule(&["devices"]), "\"devices\" has no = between an axis and its values");
        assert_eq!(rule(&["batch=0"]), "batch: \"0\" is no number from 1 to 4294967295");
        assert_eq!(rule(&["batch="]), "batch: \"\" is no number from 1 to 4294967295");
        assert_eq!(rule(&["length=64", "max-seq-len=128"]), "length is given twice");
        assert_eq!(
            rule(&["kv-dtype=int4"]),
            "kv-dtype: \"int4\" is no element type of a cache: f32, f16, bf16 and fp8"
        );
        let many =
            format!("batch={}", (1..=1025).map(|n| n.to_string()).collect::<Vec<_>>().join(","));
        assert_eq!(rule(&[&many]), "more than 1,024 rows");
    }
}
