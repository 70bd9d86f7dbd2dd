//! Encodings a rule can give: the named ones, and those spelled out as a table.
//!
//! | key of the table | value | default |
//! |---|---|---|
//! | `codes` | `i2`…`i8` `i16`; `u1`…`u8` `u16` with `zero`; `fp8_e4m3` `fp8_e5m2` `fp6_e2m3` `fp6_e3m2` `fp4_e2m1` | — |
//! | `table` | `"nf4"`, `"ternary"`, `"binary"` or a list of 2 to 4,096 numbers, in place of `codes` | — |
//! | `group` | columns of a row that share a scale | whole row |
//! | `block` | `[rows, columns]` that share a scale, 0 for the whole extent; in place of `group` | `[1, 0]` |
//! | `scale` | `bf16` `f16` `f32`; `e8m0` (powers of two); `fp8_e4m3` or an 8-bit integer under `scale2` | `bf16` |
//! | `scale2` | `f32` `bf16` `f16`, or `{ dtype, block }` | none |
//! | `zero` | an unsigned integer at least as wide as `codes` | none |

use std::fmt;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::read::{Reader, Section, bracketed, quoted};
use super::{Codebook, Grid, Method, Quantizer, Rounding, ScaleRule, SecondScale};
use crate::tensor::DType;

/// What a rule stores its weights as.
#[derive(Debug, Clone, PartialEq)]
pub struct EncodingChoice {
    /// The name, when it is one of [`NAMED`]; a table that says the same gets the name too.
    pub name: Option<&'static str>,
    /// The instruction for the quantizer.
    pub method: Method,
}

/// A named encoding.
pub struct Named {
    /// Name in recipes.
    pub name: &'static str,
    /// One line on what it is.
    pub about: &'static str,
    method: fn() -> Method,
}

impl Named {
    /// The instruction for the quantizer.
    pub fn method(&self) -> Method {
        (self.method)()
    }
}

const fn named(name: &'static str, about: &'static str, method: fn() -> Method) -> Named {
    Named { name, about, method }
}

fn grid(codes: DType, block: [u64; 2], scale: DType) -> Method {
    Method::Grid(Grid::absmax(codes, block, scale))
}

fn mx(codes: DType) -> Method {
    Method::Grid(Grid { rule: ScaleRule::Mx, ..Grid::absmax(codes, [1, 32], DType::E8M0) })
}

/// Every named encoding.
pub const NAMED: &[Named] = &[
    named("keep", "the checkpoint's bytes", || Method::Keep),
    named("bf16", "every value rounded to bfloat16", || Method::Cast(DType::BF16)),
    named("f16", "every value rounded to half precision", || Method::Cast(DType::F16)),
    named("f32", "every value widened to single precision", || Method::Cast(DType::F32)),
    named("int8-g128", "int8, a bf16 scale for every 128 columns", || {
        grid(DType::I8, [1, 128], DType::BF16)
    }),
    named("int8-g64", "int8, a bf16 scale for every 64 columns", || {
        grid(DType::I8, [1, 64], DType::BF16)
    }),
    named("int8-g32", "int8, a bf16 scale for every 32 columns", || {
        grid(DType::I8, [1, 32], DType::BF16)
    }),
    named("int8-channel", "int8, a bf16 scale for every row", || {
        grid(DType::I8, [1, 0], DType::BF16)
    }),
    named("int4-g128", "int4, a bf16 scale for every 128 columns", || {
        grid(DType::I4, [1, 128], DType::BF16)
    }),
    named("int4-g32", "int4, a bf16 scale for every 32 columns", || {
        grid(DType::I4, [1, 32], DType::BF16)
    }),
    named("fp8-channel", "fp8 e4m3, a bf16 scale for every row", || {
        grid(DType::F8E4M3, [1, 0], DType::BF16)
    }),
    named("fp8-block128", "fp8 e4m3, a bf16 scale for every 128 × 128 block", || {
        grid(DType::F8E4M3, [128, 128], DType::BF16)
    }),
    named("fp8-tensor", "fp8 e4m3, one f32 scale for the weight", || {
        grid(DType::F8E4M3, [0, 0], DType::F32)
    }),
    named("nvfp4", "fp4 e2m1, an fp8 scale for every 16 columns, one f32 scale above", || {
        Method::Grid(Grid {
            scale2: Some(SecondScale { dtype: DType::F32, block: [0, 0] }),
            ..Grid::absmax(DType::F4E2M1, [1, 16], DType::F8E4M3)
        })
    }),
    named("mxfp4", "fp4 e2m1, a power of two for every 32 columns", || mx(DType::F4E2M1)),
    named("mxfp8", "fp8 e4m3, a power of two for every 32 columns", || mx(DType::F8E4M3)),
];

/// The NF4 codebook of QLoRA (bitsandbytes): quantiles of a normal distribution, with an exact zero.
const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Named codebooks.
const TABLES: [(&str, &[f32]); 3] =
    [("nf4", &NF4), ("ternary", &[-1.0, 0.0, 1.0]), ("binary", &[-1.0, 1.0])];

/// Most entries of a codebook: an index of 12 bits, the widest the container has for codebooks.
const MAX_TABLE: usize = 4096;

/// Largest block extent; larger than any weight's, small enough that no product of two overflows.
const MAX_BLOCK: u64 = 1 << 31;

/// Keys of a spelled-out encoding.
pub(super) const KEYS: &[&str] = &["codes", "table", "group", "block", "scale", "scale2", "zero"];
const SCALE2_KEYS: &[&str] = &["dtype", "block"];

const INT_CODES: &[DType] =
    &[DType::I2, DType::I3, DType::I4, DType::I5, DType::I6, DType::I7, DType::I8, DType::I16];
const FLOAT_CODES: &[DType] =
    &[DType::F8E4M3, DType::F8E5M2, DType::F6E2M3, DType::F6E3M2, DType::F4E2M1];
const UNSIGNED: &[DType] = &[
    DType::U1,
    DType::U2,
    DType::U3,
    DType::U4,
    DType::U5,
    DType::U6,
    DType::U7,
    DType::U8,
    DType::U16,
];
/// Scales that can stand alone.
const WIDE_SCALES: &[DType] = &[DType::BF16, DType::F16, DType::F32];
/// Scales of few values, which only reach a weight's magnitudes under a second level.
const NARROW_SCALES: &[DType] = &[DType::F8E4M3, DType::I8, DType::U8];
const CODES: &[&[DType]] = &[INT_CODES, FLOAT_CODES, UNSIGNED];
const SCALES: &[&[DType]] = &[WIDE_SCALES, &[DType::E8M0], NARROW_SCALES];
const SECOND_SCALES: &[DType] = &[DType::F32, DType::BF16, DType::F16];
/// Index types of codebooks, narrowest first.
const INDICES: &[DType] = &[
    DType::U1,
    DType::U2,
    DType::U3,
    DType::U4,
    DType::U5,
    DType::U6,
    DType::U7,
    DType::U8,
    DType::U9,
    DType::U10,
    DType::U11,
    DType::U12,
];

/// The named encoding.
pub fn find(name: &str) -> Option<EncodingChoice> {
    NAMED
        .iter()
        .find(|n| n.name == name)
        .map(|n| EncodingChoice { name: Some(n.name), method: n.method() })
}

impl EncodingChoice {
    /// A method, with its name if it has one.
    pub fn of(method: Method) -> EncodingChoice {
        let name = NAMED.iter().find(|n| n.method() == method).map(|n| n.name);
        EncodingChoice { name, method }
    }

    /// The same encoding with its codes chosen so; keeps the name, which is that of the planes. A quantizer that a
    /// grid cannot have changes nothing.
    pub(super) fn with(mut self, quantizer: Quantizer, rounding: Rounding) -> EncodingChoice {
        if let Method::Grid(grid) = &mut self.method {
            grid.rounding = rounding;
            if quantizer == Quantizer::Search && grid.rule == ScaleRule::Absmax {
                grid.rule = ScaleRule::Search;
            }
        }
        self
    }

    /// Reads the key `encoding` of a rule: a name or a table.
    pub(super) fn read(
        reader: &mut Reader<'_>,
        value: &Spanned<DeValue<'_>>,
    ) -> Option<EncodingChoice> {
        match value.get_ref() {
            DeValue::String(name) => {
                let found = find(name);
                if found.is_none() {
                    let names: Vec<&str> = NAMED.iter().map(|n| n.name).collect();
                    reader.unknown_name("encoding", name, value.span(), &names);
                }
                found
            }
            DeValue::Table(table) => {
                read_grid(reader, table, value.span()).map(|g| EncodingChoice::of(Method::Grid(g)))
            }
            _ => {
                reader.wrong_type("encoding", value, "the name of an encoding or a table");
                None
            }
        }
    }

    /// TOML of the value: the name in quotes, or an inline table with every key that is set.
    pub(super) fn toml(&self) -> String {
        let grid = match (&self.name, &self.method) {
            (Some(name), _) => return quoted(name),
            (None, Method::Grid(grid)) => grid,
            // Only grids can be spelled out; casts and `keep` have names.
            (None, other) => return quoted(&format!("{other:?}")),
        };
        let mut out = Vec::new();
        match &grid.table {
            Some(table) if TABLES.iter().any(|(name, _)| *name == table.name) => {
                out.push(format!("table = {}", quoted(&table.name)));
            }
            Some(table) => {
                out.push(format!(
                    "table = {}",
                    bracketed(table.values.iter().map(|v| decimal(*v)))
                ));
            }
            None => out.push(format!("codes = {}", quoted(grid.codes.name()))),
        }
        let block = |[r, c]: [u64; 2]| format!("[{r}, {c}]");
        out.push(format!("block = {}", block(grid.block)));
        out.push(format!("scale = {}", quoted(grid.scale.name())));
        if let Some(second) = grid.scale2 {
            let dtype = quoted(second.dtype.name());
            out.push(format!("scale2 = {{ dtype = {dtype}, block = {} }}", block(second.block)));
        }
        if let Some(zero) = grid.zero {
            out.push(format!("zero = {}", quoted(zero.name())));
        }
        format!("{{ {} }}", out.join(", "))
    }
}

impl fmt::Display for EncodingChoice {
    /// The name, else the planes: `i4*bf16[1x96]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.name, &self.method) {
            (Some(name), _) => f.pad(name),
            (None, Method::Grid(grid)) => f.pad(&grid.encoding().to_string()),
            (None, Method::Cast(dtype)) => f.pad(dtype.name()),
            (None, Method::Keep) => f.pad("keep"),
        }
    }
}

/// Shortest decimal that reads back, through 64 bits, as the same 32-bit value.
fn decimal(value: f32) -> String {
    let short = format!("{value:?}");
    match short.parse::<f64>() {
        Ok(wide) if wide as f32 == value => short,
        _ => format!("{:?}", f64::from(value)),
    }
}

/// Names that the keys of a spelled-out encoding take, for the schema.
pub(super) struct TypeNames {
    pub codes: Vec<&'static str>,
    pub tables: Vec<&'static str>,
    pub scales: Vec<&'static str>,
    pub second_scales: Vec<&'static str>,
    pub zeros: Vec<&'static str>,
}

pub(super) fn type_names() -> TypeNames {
    let names = |of: &[&[DType]]| of.concat().into_iter().map(DType::name).collect();
    TypeNames {
        codes: names(CODES),
        tables: TABLES.iter().map(|(name, _)| *name).collect(),
        scales: names(SCALES),
        second_scales: names(&[SECOND_SCALES]),
        zeros: names(&[UNSIGNED]),
    }
}

fn dtypes(of: &[&[DType]]) -> Vec<(&'static str, DType)> {
    of.concat().into_iter().map(|d| (d.name(), d)).collect()
}

/// The grid that a table spells, or `None` with every problem noted.
fn read_grid(
    reader: &mut Reader<'_>,
    table: &DeTable<'_>,
    span: std::ops::Range<usize>,
) -> Option<Grid> {
    let before = reader.count();
    let section = Section { title: "a spelled-out encoding", table, keys: KEYS };
    reader.unknown_keys(&section, &[]);

    let codes = reader.choice(&section, "codes", &dtypes(CODES));
    let codebook = read_codebook(reader, &section);
    let scale = reader.choice(&section, "scale", &dtypes(SCALES));
    let zero = reader.choice(&section, "zero", &dtypes(&[UNSIGNED]));
    let group = reader.whole(&section, "group", 1..=MAX_BLOCK);
    let block = read_block(reader, &section);
    let scale2 = read_second(reader, &section);

    if table.contains_key("group") && table.contains_key("block") {
        reader.problem(
            span.clone(),
            "`group` and `block` both set the extent of a scale",
            "",
            ["`group = 128` is `block = [1, 128]`; keep one of them"],
        );
    }
    if table.contains_key("codes") == table.contains_key("table") {
        let what =
            if table.contains_key("codes") { "both `codes` and" } else { "neither `codes` nor" };
        reader.problem(
            span.clone(),
            format!("an encoding with {what} `table`"),
            "",
            ["`codes` is a number type, e.g. codes = \"i8\"; `table` is a codebook, e.g. table = \"nf4\""],
        );
    }
    if reader.count() > before {
        return None;
    }

    let codes = match (&codebook, codes) {
        (Some(book), _) => {
            let last = book.values.len() - 1;
            *INDICES.iter().find(|d| last >> d.bits() == 0)?
        }
        (None, codes) => codes?,
    };
    let block = group.map(|n| [1, n]).or(block).unwrap_or([1, 0]);
    let mut grid = Grid::absmax(codes, block, scale.unwrap_or(DType::BF16));
    grid.zero = zero;
    grid.scale2 = scale2;
    grid.table = codebook;
    if grid.scale == DType::E8M0 {
        grid.rule = ScaleRule::Mx;
    }
    let at = |key: &str| table.get(key).map_or(span.clone(), Spanned::span);
    for (key, message, help) in clashes(&grid) {
        reader.problem(at(key), message, "", [help]);
    }
    (reader.count() == before).then_some(grid)
}

/// Combinations that have no meaning, as (key, message, help).
fn clashes(grid: &Grid) -> Vec<(&'static str, String, String)> {
    let mut out = Vec::new();
    let codes = grid.codes;
    let unsigned = UNSIGNED.contains(&codes) && grid.table.is_none();
    match grid.zero {
        None if unsigned => out.push((
            "codes",
            format!("unsigned codes {codes} without `zero`"),
            format!("add zero = \"{codes}\", or take signed codes such as \"i8\""),
        )),
        Some(_) if !unsigned => out.push((
            "zero",
            "`zero` with codes that are not unsigned integers".to_owned(),
            "an asymmetric grid has codes \"u4\" or \"u8\"".to_owned(),
        )),
        Some(zero) if zero.bits() < codes.bits() => out.push((
            "zero",
            format!("`zero` of {} bits under codes of {} bits", zero.bits(), codes.bits()),
            format!("a zero point is itself a code: zero = \"{codes}\" or wider"),
        )),
        _ => {}
    }
    if grid.scale == DType::E8M0 && !(FLOAT_CODES.contains(&codes)) {
        out.push((
            "scale",
            format!("a power-of-two scale (e8m0) over codes {codes}"),
            format!("codes that work with it: {}", crate::diag::list(FLOAT_CODES, 9)),
        ));
    }
    if NARROW_SCALES.contains(&grid.scale) && grid.scale2.is_none() {
        out.push((
            "scale",
            format!(
                "a scale of type {} cannot stand alone: most weights are smaller than its steps",
                grid.scale
            ),
            "add scale2 = \"f32\", or take a scale of bf16, f16 or f32".to_owned(),
        ));
    }
    if let Some(table) = &grid.table
        && grid.scale.is_unsigned_int()
        && table.ends().0 != -table.ends().1
    {
        let (lo, hi) = table.ends();
        out.push((
            "scale",
            format!(
                "a scale of type {} over a codebook from {lo} to {hi}: where the ends differ, the scale takes the \
                 sign of a block's largest value",
                grid.scale
            ),
            "a scale that can be negative works, e.g. scale = \"i8\"".to_owned(),
        ));
    }
    if let Some(second) = grid.scale2 {
        let nests =
            |inner: u64, outer: u64| outer == 0 || (inner != 0 && outer.is_multiple_of(inner));
        let ok = grid.block.iter().zip(second.block).all(|(&inner, outer)| nests(inner, outer));
        if !ok {
            out.push((
                "scale2",
                format!(
                    "second-level blocks {:?} do not hold whole blocks {:?}",
                    second.block, grid.block
                ),
                "each extent is 0 (whole) or a multiple of the first level's".to_owned(),
            ));
        }
        if grid.zero.is_some() || grid.scale == DType::E8M0 {
            let other = if grid.zero.is_some() { "`zero`" } else { "an e8m0 scale" };
            out.push((
                "scale2",
                format!("`scale2` together with {other}"),
                format!("drop `scale2` or {other}"),
            ));
        }
    }
    out
}

fn read_block(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<[u64; 2]> {
    let value = section.table.get("block")?;
    let sides = match value.get_ref() {
        DeValue::Array(sides) if sides.len() == 2 => sides,
        _ => {
            reader.problem(
                value.span(),
                "`block` is not a list of two whole numbers",
                "",
                ["block = [128, 128]: rows, then columns; 0 spans the whole extent"],
            );
            return None;
        }
    };
    let rows = reader.whole_value("block", &sides[0], &(0..=MAX_BLOCK));
    let cols = reader.whole_value("block", &sides[1], &(0..=MAX_BLOCK));
    Some([rows?, cols?])
}

fn read_second(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<SecondScale> {
    let value = section.table.get("scale2")?;
    let known = dtypes(&[SECOND_SCALES]);
    match value.get_ref() {
        DeValue::String(_) => {
            let dtype = reader.choice(section, "scale2", &known)?;
            Some(SecondScale { dtype, block: [0, 0] })
        }
        DeValue::Table(table) => {
            let inner = Section { title: "scale2", table, keys: SCALE2_KEYS };
            reader.unknown_keys(&inner, &[]);
            let dtype = reader.choice(&inner, "dtype", &known);
            let block = read_block(reader, &inner);
            if !table.contains_key("dtype") {
                reader.problem(value.span(), "`scale2` has no `dtype`", "", ["dtype = \"f32\""]);
            }
            let block = if table.contains_key("block") { block? } else { [0, 0] };
            Some(SecondScale { dtype: dtype?, block })
        }
        _ => {
            reader.wrong_type("scale2", value, "the name of a type or a table");
            None
        }
    }
}

fn read_codebook(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<Codebook> {
    let value = section.table.get("table")?;
    let items = match value.get_ref() {
        DeValue::String(_) => {
            let known: Vec<(&str, &[f32])> = TABLES.to_vec();
            let values = reader.choice(section, "table", &known)?.to_vec();
            let name = value.get_ref().as_str().unwrap_or_default().to_owned();
            return Some(Codebook { name, values });
        }
        DeValue::Array(items) => items,
        _ => {
            reader.wrong_type("table", value, "the name of a codebook or a list of numbers");
            return None;
        }
    };
    if !(2..=MAX_TABLE).contains(&items.len()) {
        let message = format!("a codebook of {} values, not 2 to {MAX_TABLE}", items.len());
        reader.problem(value.span(), message, "", [] as [String; 0]);
        return None;
    }
    let mut values = Vec::with_capacity(items.len());
    for item in items.iter() {
        let number = match item.get_ref() {
            DeValue::Integer(i) => {
                i64::from_str_radix(i.as_str(), i.radix()).ok().map(|i| i as f32)
            }
            DeValue::Float(f) => f.as_str().parse::<f64>().ok().map(|f| f as f32),
            _ => None,
        };
        match number.filter(|n| n.is_finite()) {
            Some(number) => values.push(number),
            None => {
                let message = "a codebook holds numbers that f32 can hold";
                reader.problem(item.span(), message, "", [] as [String; 0]);
            }
        }
    }
    if values.len() < items.len() {
        return None;
    }
    if values.windows(2).any(|pair| pair[0] >= pair[1]) {
        reader.problem(
            value.span(),
            "the values of a codebook do not rise from one to the next",
            "",
            ["list them in ascending order, each once"],
        );
        return None;
    }
    if let Some((name, _)) = TABLES.iter().find(|(_, known)| *known == values.as_slice()) {
        return Some(Codebook { name: (*name).to_owned(), values });
    }
    let name: Vec<String> = values.iter().map(f32::to_string).collect();
    Some(Codebook { name: name.join(";"), values })
}
