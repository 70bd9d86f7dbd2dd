//! `docs/encodings.md` is printed from the encodings of the program and from what the tests prove; this keeps it current.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;

use radpack::recipe::{Method, NAMED, group_columns};
use radpack::tensor::{DType, Encoding, Shape, role};
use testkit::proofs::{Direction, PROOFS};

const DOCUMENT: &str = "docs/encodings.md";

fn read(path: &str) -> String {
    let path = testkit::root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn every_row_of_what_is_proved_has_its_test() {
    for proof in PROOFS {
        let text = read(proof.file);
        let at = text.find(&format!("\nfn {}()", proof.test));
        let at = at.unwrap_or_else(|| panic!("{} has no test `{}`", proof.file, proof.test));
        assert!(text[..at].ends_with("#[test]"), "`{}` is no test", proof.test);
        let named = format!("\"{}\"", proof.test);
        assert!(text.contains(&named), "`{}` does not register what it compares", proof.test);
        assert!(!proof.compared.is_empty(), "`{}` compares nothing", proof.test);
        let sorted = proof.compared.windows(2).all(|two| two[0].0 < two[1].0);
        assert!(sorted && proof.compared.iter().all(|(_, n)| *n > 0), "`{}`", proof.test);
    }
}

/// What the tests prove about each format: `N UNIT: SOFTWARE`, by direction.
fn proofs() -> BTreeMap<&'static str, BTreeMap<Direction, Vec<String>>> {
    let mut sums: BTreeMap<(&str, Direction, &str, &str), usize> = BTreeMap::new();
    for proof in PROOFS {
        for (format, n) in proof.compared {
            *sums.entry((format, proof.direction, proof.with, proof.unit)).or_default() += n;
        }
    }
    let mut out: BTreeMap<&str, BTreeMap<Direction, Vec<String>>> = BTreeMap::new();
    for ((format, direction, with, unit), n) in sums {
        let cells = out.entry(format).or_default().entry(direction).or_default();
        let unit = match n {
            1 => unit.replacen("weights", "weight", 1).replacen("tensors", "tensor", 1),
            _ => unit.to_owned(),
        };
        cells.push(format!("{n} {unit}: {with}"));
    }
    out
}

fn table_of_formats() -> String {
    let mut text = String::from(
        "| format | read as a source | quantized, equal codes and scales | written by `export` |\n|---|---|---|---|\n",
    );
    for (format, cells) in proofs() {
        let cell = |direction| cells.get(&direction).map_or("–".to_owned(), |c| c.join("; "));
        let (read, quantize, export) =
            (cell(Direction::Read), cell(Direction::Quantize), cell(Direction::Export));
        let _ = writeln!(text, "| {format} | {read} | {quantize} | {export} |");
    }
    text
}

/// Bits per element of a large matrix; scales of the whole weight count nothing.
fn bits(encoding: &Encoding) -> String {
    let shape = Shape::from([4096, 4096]);
    let bytes = encoding.bytes(&shape).expect("small");
    format!("{:.3}", bytes as f64 * 8.0 / (4096.0 * 4096.0))
}

fn scales(encoding: &Encoding) -> String {
    let of = |role: &str| encoding.plane(role).map(|(_, plane)| plane.dtype.to_string());
    match (of(role::SCALE), of(role::SCALE_1)) {
        (None, _) => "–".to_owned(),
        (Some(first), None) => first,
        (Some(first), Some(second)) => format!("{first}, and {second} above"),
    }
}

fn table_of_encodings() -> String {
    let mut text = String::from(
        "| name | codes | scale | values that share one | bits/weight | short groups | planes |\n\
         |---|---|---|---|---:|---|---|\n",
    );
    for named in NAMED.iter().filter(|n| n.method() != Method::Keep) {
        let encoding = named.method().encoding(DType::BF16);
        let shares = match &named.method() {
            Method::Grid(grid) => match grid.block {
                [0, 0] => "the weight".to_owned(),
                [1, 0] => "a row".to_owned(),
                [1, n] => format!("{n} columns of a row"),
                [rows, cols] => format!("{rows} × {cols}"),
            },
            _ => "–".to_owned(),
        };
        let short = match group_columns(&encoding) {
            Some(_) => "have a scale of their own",
            None => "–",
        };
        let _ = writeln!(
            text,
            "| `{}` | {} | {} | {shares} | {} | {short} | `{encoding}` |",
            named.name,
            encoding.codes(),
            scales(&encoding),
            bits(&encoding),
        );
    }
    text
}

fn document() -> String {
    format!(
        "<!-- Printed by `cargo xtask encodings --write`; edit tests/encodings_document.rs and tests/support/src/proofs.rs. -->\n\
# Encodings and formats

## Encodings by name

A value is its code times the scale of its block, under two levels times the scale above as well. `keep` stores the
checkpoint's bytes, or its codes and scales where it is quantized already.

{}
Bits per weight are those of a 4096 × 4096 matrix, scales included. In a row whose columns are no multiple of a group, the
last group is short: it has a scale of its own and takes no more codes than columns. `whole_groups = true` in a rule or
recipe refuses such rows; blocks at the lower edge of a weight may always be short.
Codes of 4 bits lie two to a byte, the even column in the low half; each row begins on a byte.

An encoding can be spelled out instead: `encoding = {{ codes = \"u4\", zero = \"u4\", group = 32, scale = \"bf16\" }}`.
`schemas/recipe.schema.json` lists the keys and types. Beyond the names there are signed integers of 2 to 8 and 16 bits,
unsigned ones with a zero point (a value is (code − zero) times scale), fp8 e5m2 and fp6, codebooks (`table`: `nf4`,
`ternary`, `binary` or a list of values), rotated columns (`transform`), and a second scale level over any of them.

## Formats of other software

What tests compare with independent software, bit for bit; every figure is what a test of that name counts and
`tests/support/src/proofs.rs` holds it to. A format without an entry in a column is not read, reproduced or written, or no
test of independent data proves it.

{}
* **Read as a source**: the values that the weight decodes to. Kept planes hold the same codes and scales;
  [`quantized-sources.md`](quantized-sources.md) says how, and what is refused. radiance's container is the artifact's own
  form, no source: its row tells that its weights decode to the values of radiance's reader.
* **Exports** are read back by our reader and the safetensors library in tests; `cargo xtask check-exports`, which CI runs,
  has transformers and compressed-tensors load them and compares every weight ([`exports.md`](exports.md)).
* **Quantized**: codes, scales and zero points that our quantizer makes of the same weights under that `rounding`
  (`compressed-tensors`, `modelopt`, `transformers`; `rad` is radiance's). Cases include zero blocks, subnormals, ties, the
  largest bf16, outliers and ragged shapes. Where a package makes NaN or infinity of finite weights, the weight is refused.
* **Written by `export`**: the folder is read with the safetensors library, and converted again as a source: codes, scales, encodings and digests of all weights are the artifact's.
  Under `nvfp4` the format divides by a global scale where an artifact multiplies by one, and 17 % of all f32 are the
  reciprocal of no f32. The folder then has the nearest divisor and notes the artifact's scale in the file's
  `__metadata__`, so that reading it back is exact all the same; other readers differ by one unit in the last place of f32.
",
        table_of_encodings(),
        table_of_formats()
    )
}

#[test]
fn the_document_is_current() {
    let path = testkit::root().join(DOCUMENT);
    let current = document();
    if std::env::var_os("RADPACK_BLESS").is_some() {
        fs::write(&path, &current).expect("docs/ is writable");
    }
    let known = fs::read_to_string(&path).unwrap_or_default();
    assert!(known == current, "{DOCUMENT} is not current: cargo xtask encodings --write");
}
