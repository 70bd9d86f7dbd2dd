//! What every generic recipe costs a language model: SmolLM2-135M-Instruct by its own programs, in f32, against the
//! checkpoint run the same way, over `fixtures/corpus/mixed.jsonl`.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::Table;
use crate::{Result, build, fetch};

/// What is run.
const CORPUS: &str = "fixtures/corpus/mixed.jsonl";

/// Encodings from the closest to the source to the furthest, by the recipes that have them: of two groups, every recipe
/// of the first has to diverge less than every one of the second.
const ORDER: [&[&str]; 3] = [&["int8-g128", "w8a16"], &["fp8-dynamic", "fp8-block"], &["nvfp4"]];

/// One recipe.
#[derive(Debug, Clone, PartialEq)]
struct Row {
    recipe: String,
    /// Of the weights that a rule quantizes.
    bits: f64,
    file_bytes: u64,
    kl_mean: f64,
    kl_p99: f64,
    top1: f64,
    perplexity_ratio: f64,
}

/// Converts the model with every generic recipe, runs both, and checks what is claimed.
pub(super) fn measured(bin: &Path) -> Result<Table> {
    let (model, _) = fetch::bring(fetch::Model::Smollm2)?;
    let scratch = testkit::target().join("quality-recipes");
    build::remove_folder(&scratch)?;
    fs::create_dir_all(&scratch).map_err(testkit::at(&scratch))?;
    let mut rows = Vec::new();
    let mut tokens = 0;
    for recipe in generic(bin)? {
        eprintln!("{recipe}");
        let out = scratch.join("model.rad");
        let mut convert = Command::new(bin);
        convert.arg("convert").arg(&model).args(["--json", "--recipe", &recipe, "-o"]).arg(&out);
        let converted = parsed(&build::output(&mut convert)?)?;
        let mut eval = Command::new(bin);
        eval.arg("eval").arg(&out).arg("--json").arg("--reference").arg(&model);
        eval.arg("--corpus").arg(testkit::root().join(CORPUS));
        let score = parsed(&build::output(&mut eval)?)?;
        tokens = score.pointer("/overall/tokens").and_then(Value::as_u64).unwrap_or(0);
        let row = row(&recipe, &converted, &score);
        rows.push(row.ok_or_else(|| format!("{recipe}: a report without its figures"))?);
    }
    build::remove_folder(&scratch)?;
    let broken = broken(&rows);
    if !broken.is_empty() {
        return Err(format!("a coarser encoding diverges less: {}", broken.join(", ")));
    }
    Ok(Table { mark: "smollm2", text: table(&rows), document: document(&rows, tokens) })
}

/// Names of the built-in recipes that are made for no model in particular.
fn generic(bin: &Path) -> Result<Vec<String>> {
    Ok(build::recipes(bin)?.into_iter().filter(|name| !name.contains('/')).collect())
}

fn parsed(text: &str) -> Result<Value> {
    serde_json::from_str(text).map_err(|e| e.to_string())
}

fn row(recipe: &str, converted: &Value, score: &Value) -> Option<Row> {
    let overall = |key: &str| score["overall"][key].as_f64();
    Some(Row {
        recipe: recipe.to_owned(),
        bits: converted.pointer("/rules/0/stored/bits_per_weight")?.as_f64()?,
        file_bytes: converted["file_bytes"].as_u64()?,
        kl_mean: overall("kl_mean")?,
        kl_p99: overall("kl_p99")?,
        top1: overall("top1_agreement")?,
        perplexity_ratio: overall("perplexity_ratio")?,
    })
}

/// Pairs of recipes whose order is not that of their encodings.
fn broken(rows: &[Row]) -> Vec<String> {
    let of = |names: &'static [&str]| rows.iter().filter(|r| names.contains(&r.recipe.as_str()));
    let mut found = Vec::new();
    for pair in ORDER.windows(2) {
        for finer in of(pair[0]) {
            let worse = of(pair[1]).filter(|coarser| coarser.kl_mean <= finer.kl_mean);
            found.extend(worse.map(|coarser| format!("{} than {}", coarser.recipe, finer.recipe)));
        }
    }
    found
}

/// Figures to the digits that every processor gives: sums of products are grouped by its vector width.
fn table(rows: &[Row]) -> String {
    let mut out = String::from(
        "| recipe | bits/weight | file | KL mean | KL 99 % | top-1 agreement | perplexity ratio |\n\
         |---|---:|---:|---:|---:|---:|---:|\n",
    );
    for r in rows {
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "| {} | {:.3} | {:.1} MB | {} | {} | {:.1} % | {:.3} |",
            r.recipe,
            r.bits,
            r.file_bytes as f64 / 1e6,
            nats(r.kl_mean),
            nats(r.kl_p99),
            r.top1 * 100.0,
            r.perplexity_ratio
        );
    }
    out
}

/// A divergence in two digits; 0 of a recipe that changes nothing.
fn nats(kl: f64) -> String {
    if kl == 0.0 { "0".to_owned() } else { format!("{kl:.1e}") }
}

fn document(rows: &[Row], tokens: u64) -> Value {
    let rows = rows.iter().map(|r| {
        json!({
            "recipe": r.recipe,
            "bits_per_weight": r.bits,
            "file_bytes": r.file_bytes,
            "kl_mean": r.kl_mean,
            "kl_p99": r.kl_p99,
            "top1_agreement": r.top1,
            "perplexity_ratio": r.perplexity_ratio,
        })
    });
    json!({
        "model": "SmolLM2-135M-Instruct",
        "corpus": CORPUS,
        "tokens": tokens,
        "rows": rows.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(recipe: &str, kl_mean: f64) -> Row {
        Row {
            recipe: recipe.to_owned(),
            bits: 8.125,
            file_bytes: 171_068_416,
            kl_mean,
            kl_p99: kl_mean * 10.0,
            top1: 0.975,
            perplexity_ratio: 1.0046,
        }
    }

    #[test]
    fn coarser_encodings_that_diverge_less_break_the_claim() {
        let rows = [named("int8-g128", 2e-3), named("fp8-block", 1e-3), named("nvfp4", 5e-2)];
        assert_eq!(broken(&rows), ["fp8-block than int8-g128"]);
        let rows = [named("w8a16", 1e-3), named("fp8-dynamic", 2e-3), named("nvfp4", 2e-3)];
        assert_eq!(broken(&rows), ["nvfp4 than fp8-dynamic"]);
        assert!(
            table(&rows)
                .ends_with("| nvfp4 | 8.125 | 171.1 MB | 2.0e-3 | 2.0e-2 | 97.5 % | 1.005 |\n")
        );
    }

    #[test]
    fn figures_come_from_the_reports_of_convert_and_eval() {
        let converted = json!({
            "file_bytes": 171_068_416u64,
            "rules": [{"stored": {"bits_per_weight": 8.125}}],
        });
        let score = json!({"overall": {
            "tokens": 100, "kl_mean": 0.002, "kl_p99": 0.02, "top1_agreement": 0.975,
            "perplexity_ratio": 1.0046,
        }});
        assert_eq!(row("w8a16", &converted, &score), Some(named("w8a16", 0.002)));
        assert_eq!(row("w8a16", &converted, &json!({})), None);
    }
}
