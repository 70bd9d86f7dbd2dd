//! What every encoding costs on true f32 weights, and what a search for scales gains.
//!
//! The weights are the 36 matrices of all-MiniLM-L6-v2's six layers, 10.6 M values in f32 as they were trained; most
//! published checkpoints were rounded to bf16 before anybody measures. Error sums are exact, so every machine prints the
//! same table, and `docs/quality.md` holds it.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::Table;
use crate::{Result, build, fetch};

/// Named encodings that have no error worth a row: the source's own values.
const EXACT: [&str; 2] = ["keep", "f32"];

/// Grids that have no name of their own, as recipes spell them.
const SPELLED: [(&str, &str); 6] = [
    ("u8, zero point, group 128", r#"{ codes = "u8", zero = "u8", group = 128, scale = "bf16" }"#),
    ("u8, zero point, group 32", r#"{ codes = "u8", zero = "u8", group = 32, scale = "bf16" }"#),
    ("u4, zero point, group 128", r#"{ codes = "u4", zero = "u4", group = 128, scale = "bf16" }"#),
    ("u4, zero point, group 32", r#"{ codes = "u4", zero = "u4", group = 32, scale = "bf16" }"#),
    (
        "int4, group 32, two levels",
        r#"{ codes = "i4", group = 32, scale = "fp8_e4m3", scale2 = "f32" }"#,
    ),
    ("NF4 codebook, group 64", r#"{ table = "nf4", group = 64, scale = "bf16" }"#),
];

/// One encoding.
struct Case {
    name: String,
    /// Its text in a recipe.
    encoding: String,
    /// Whether codes are integers, which a search must improve.
    integer: bool,
    /// Whether its scales can be searched.
    searches: bool,
}

/// What one conversion cost.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cost {
    bits: f64,
    /// Squared errors over squared values, all weights together.
    relative: f64,
    /// Relative error (Frobenius) of the worst weight.
    worst: f64,
}

/// One row.
struct Row {
    case: Case,
    rtn: Cost,
    search: Option<Cost>,
}

/// Measures every encoding, and checks what is claimed.
pub(super) fn measured(bin: &Path) -> Result<Table> {
    let (model, _) = fetch::bring(fetch::Model::Minilm)?;
    let scratch = testkit::target().join("quality");
    build::remove_folder(&scratch)?;
    fs::create_dir_all(&scratch).map_err(testkit::at(&scratch))?;
    let mut rows = Vec::new();
    for case in cases()? {
        eprintln!("{}", case.name);
        let cost = |quantizer| measure(bin, &model, &scratch, &case.encoding, quantizer);
        let rtn = cost("rtn")?;
        let search = case.searches.then(|| cost("search")).transpose()?;
        rows.push(Row { case, rtn, search });
    }
    build::remove_folder(&scratch)?;
    let broken = broken(&rows);
    if !broken.is_empty() {
        return Err(format!("a search is no better than rounding: {}", broken.join(", ")));
    }
    Ok(Table { mark: "minilm", text: table(&rows), document: document(&rows) })
}

/// The named encodings, read from the recipe language's schema, and the spelled-out ones.
fn cases() -> Result<Vec<Case>> {
    let path = testkit::root().join("schemas/recipe.schema.json");
    let text = fs::read_to_string(&path).map_err(testkit::at(&path))?;
    let schema: Value =
        serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?;
    let named = schema.pointer("/$defs/Rule/properties/encoding/anyOf/0/enum");
    let named: Vec<&str> = named
        .and_then(Value::as_array)
        .map(|names| names.iter().filter_map(Value::as_str).collect())
        .ok_or_else(|| format!("{}: no list of named encodings", path.display()))?;
    let named = named.into_iter().filter(|name| !EXACT.contains(name)).map(|name| Case {
        name: name.to_owned(),
        encoding: format!("\"{name}\""),
        integer: name.starts_with("int"),
        // Casts have no scales, and powers of two follow from the largest value.
        searches: !matches!(name, "bf16" | "f16" | "mxfp4" | "mxfp8"),
    });
    let spelled = SPELLED.iter().map(|(name, encoding)| Case {
        name: (*name).to_owned(),
        encoding: (*encoding).to_owned(),
        integer: encoding.contains("codes"),
        searches: true,
    });
    Ok(named.chain(spelled).collect())
}

fn measure(
    bin: &Path,
    model: &Path,
    scratch: &Path,
    encoding: &str,
    quantizer: &str,
) -> Result<Cost> {
    let recipe = scratch.join("recipe.toml");
    let quantizer = match quantizer {
        "rtn" => "",
        _ => "quantizer = \"search\"\n",
    };
    let text = format!(
        "schema = 1\n[[quantize]]\nmatch = \"encoder.layer.*.weight\"\nclass = \"linear\"\nencoding = {encoding}\n{quantizer}"
    );
    fs::write(&recipe, text).map_err(testkit::at(&recipe))?;
    let mut radpack = Command::new(bin);
    radpack.arg("convert").arg(model).args(["--weights-only", "--json", "--recipe"]).arg(&recipe);
    radpack.arg("-o").arg(scratch.join("out.rad"));
    let document: Value =
        serde_json::from_str(&build::output(&mut radpack)?).map_err(|e| e.to_string())?;
    cost(&document).ok_or_else(|| format!("{encoding}: the report has no errors"))
}

/// The figures of a report of `convert --json`.
fn cost(document: &Value) -> Option<Cost> {
    let (mut error, mut squared, mut worst) = (0.0, 0.0, 0f64);
    for weight in document["weights"].as_array()?.iter().filter(|w| !w["squared"].is_null()) {
        error += weight["squared_error"].as_f64()?;
        squared += weight["squared"].as_f64()?;
        worst = worst.max(weight["relative_error"].as_f64()?);
    }
    let bits = document["rules"][0]["stored"]["bits_per_weight"].as_f64()?;
    (squared > 0.0).then(|| Cost { bits, relative: error / squared, worst })
}

/// Integer encodings whose search does not have the smaller error.
fn broken(rows: &[Row]) -> Vec<String> {
    let worse = |r: &&Row| r.case.integer && r.search.is_none_or(|s| s.relative >= r.rtn.relative);
    rows.iter().filter(worse).map(|r| r.case.name.clone()).collect()
}

fn table(rows: &[Row]) -> String {
    let mut out = String::from(
        "| encoding | bits/weight | `rtn`: relative MSE | worst weight | `search`: relative MSE | worst weight | search ÷ rtn |\n\
         |---|---:|---:|---:|---:|---:|---:|\n",
    );
    for row in rows {
        // Writing to a String cannot fail.
        let _ = write!(
            out,
            "| {} | {:.3} | {:.3e} | {:.4} |",
            row.case.name, row.rtn.bits, row.rtn.relative, row.rtn.worst
        );
        let _ = match row.search {
            Some(s) => writeln!(
                out,
                " {:.3e} | {:.4} | {:.4} |",
                s.relative,
                s.worst,
                s.relative / row.rtn.relative
            ),
            None => writeln!(out, " – | – | – |"),
        };
    }
    out
}

fn document(rows: &[Row]) -> Value {
    let cost = |c: &Cost| json!({"relative_mse": c.relative, "worst_relative_error": c.worst});
    let rows = rows.iter().map(|r| {
        json!({
            "encoding": r.case.name,
            "recipe": r.case.encoding,
            "integer": r.case.integer,
            "bits_per_weight": r.rtn.bits,
            "rtn": cost(&r.rtn),
            "search": r.search.as_ref().map(cost),
        })
    });
    json!({"model": "all-MiniLM-L6-v2", "rows": rows.collect::<Vec<_>>()})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, integer: bool, rtn: f64, search: Option<f64>) -> Row {
        let cost = |relative: f64| Cost { bits: 4.5, relative, worst: relative.sqrt() };
        let (name, encoding) = (name.to_owned(), String::new());
        let case = Case { name, encoding, integer, searches: search.is_some() };
        Row { case, rtn: cost(rtn), search: search.map(cost) }
    }

    #[test]
    fn integers_whose_search_ties_or_is_missing_break_the_claim() {
        let rows = [
            row("a", true, 2e-4, Some(1e-4)),
            row("b", true, 1e-4, Some(1e-4)),
            row("c", true, 1e-4, None),
            row("d", false, 1e-4, Some(2e-4)),
        ];
        assert_eq!(broken(&rows), ["b", "c"]);
        assert!(table(&rows).ends_with(
            "| c | 4.500 | 1.000e-4 | 0.0100 | – | – | – |\n\
             | d | 4.500 | 1.000e-4 | 0.0100 | 2.000e-4 | 0.0141 | 2.0000 |\n"
        ));
    }

    #[test]
    fn every_named_encoding_but_the_exact_ones_is_measured() {
        let cases = cases().unwrap();
        let names: Vec<&str> = cases.iter().map(|c| c.name.as_str()).collect();
        assert!(names.starts_with(&["bf16", "f16", "int8-g128"]), "{names:?}");
        assert_eq!(cases.iter().filter(|c| c.integer).count(), 11, "{names:?}");
    }

    #[test]
    fn errors_are_summed_over_the_quantized_weights() {
        let document = json!({
            "rules": [{"stored": {"bits_per_weight": 8.5}}],
            "weights": [
                {"squared": 3.0, "squared_error": 0.5, "relative_error": 0.25},
                {"squared": 1.0, "squared_error": 0.5, "relative_error": 0.75},
                {"squared": null, "squared_error": null, "relative_error": null},
            ],
        });
        assert_eq!(cost(&document), Some(Cost { bits: 8.5, relative: 0.25, worst: 0.75 }));
    }
}
