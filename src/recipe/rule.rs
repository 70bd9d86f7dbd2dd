//! One `[[quantize]]` rule: which weights it selects and what becomes of them.

use std::fmt::Write;
use std::ops::Range;

use schemars::JsonSchema;
use toml::de::DeTable;

use super::encoding::EncodingChoice;
use super::method::{Method, ScaleRule};
use super::pattern::Pattern;
use super::read::{Place, Reader, Section, bracketed, quoted};
use super::rounding::Rounding;
use super::settings::name_of;
use crate::diag::list;
use crate::model::{Class, Tower};

/// A rule. It selects the weights that every selector it has matches; a selector of several values matches any of
/// them. At least one selector is there.
#[derive(Debug, Clone, PartialEq, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Rule {
    /// Patterns over checkpoint names: exact, glob, or `re:` and a regular expression. Empty: any name.
    #[schemars(rename = "match", schema_with = "super::schema::texts", default)]
    pub patterns: Vec<Pattern>,
    /// Patterns of the same kind over logical names (`blk.7.ffn_down.weight`), which are those of the artifact.
    /// Empty: any name.
    #[schemars(rename = "weight", schema_with = "super::schema::texts", default)]
    pub weights: Vec<Pattern>,
    /// Towers. Empty: any.
    #[schemars(rename = "tower", schema_with = "super::schema::towers", default)]
    pub towers: Vec<Tower>,
    /// Classes. Empty: any.
    #[schemars(rename = "class", schema_with = "super::schema::classes", default)]
    pub classes: Vec<Class>,
    /// What the weights are stored as: a name, or a grid spelled out.
    #[schemars(schema_with = "super::schema::encoding")]
    pub encoding: EncodingChoice,
    /// What an engine multiplies these weights with; recorded, nothing here depends on it.
    #[schemars(schema_with = "super::schema::activations", default)]
    pub activations: Option<Activations>,
    /// How codes are chosen.
    #[schemars(schema_with = "super::schema::quantizer", default)]
    pub quantizer: Quantizer,
    /// Whose arithmetic is reproduced.
    #[schemars(schema_with = "super::schema::rounding", default)]
    pub rounding: Rounding,
    /// Whether a second-level scale over the whole weight is shared by the weights that engines fuse.
    #[schemars(with = "Option<bool>")]
    pub share_scale: bool,
    /// Whether the rule may decide no weight.
    #[schemars(with = "Option<bool>")]
    pub optional: bool,
    /// Whether a short last group is refused; absent, the recipe decides.
    pub whole_groups: Option<bool>,
    /// Whether vectors and scalars that the rule selects are kept where its encoding needs rows and columns, instead
    /// of refused.
    #[schemars(with = "Option<bool>")]
    pub keep_vectors: bool,
    /// Whether importances (`--imatrix`) weigh the search of these weights: they must (`true`), they do not (`false`),
    /// or they do where there are any (absent).
    pub imatrix: Option<bool>,
    /// Where its parts stand.
    #[schemars(skip)]
    pub places: RulePlaces,
}

/// Where the parts of a rule stand.
#[derive(Debug, Clone, PartialEq)]
pub struct RulePlaces {
    /// The header `[[quantize]]`.
    pub rule: Place,
    /// The value of `encoding`.
    pub encoding: Place,
    /// The value of `tower`.
    pub tower: Option<Place>,
    /// The value of `class`.
    pub class: Option<Place>,
}

/// What weights are multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Activations {
    /// Plain single precision.
    F32,
    /// Plain half precision.
    F16,
    /// Plain bfloat16.
    Bf16,
    /// int8, one scale a token, found at run time.
    Int8Token,
    /// fp8, one scale a token, found at run time.
    Fp8Token,
    /// fp8, one scale for 128 columns of a token, found at run time.
    Fp8Group128,
    /// fp4 with an fp8 scale for 16 columns, found at run time.
    Nvfp4,
    /// fp4 with a power of two for 32 columns.
    Mxfp4,
    /// fp8 with a power of two for 32 columns.
    Mxfp8,
    /// int8, one scale for 128 columns of a token, found at run time.
    Int8Group128,
}

/// How codes are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Quantizer {
    /// Round to nearest.
    #[default]
    Rtn,
    /// Scales searched for the least squared error.
    Search,
}

impl Activations {
    /// Every choice with its name in recipes.
    pub const NAMES: [(&'static str, Activations); 10] = [
        ("f32", Activations::F32),
        ("f16", Activations::F16),
        ("bf16", Activations::Bf16),
        ("int8-token", Activations::Int8Token),
        ("fp8-token", Activations::Fp8Token),
        ("fp8-group128", Activations::Fp8Group128),
        ("nvfp4", Activations::Nvfp4),
        ("mxfp4", Activations::Mxfp4),
        ("mxfp8", Activations::Mxfp8),
        ("int8-group128", Activations::Int8Group128),
    ];

    /// Name in recipes.
    pub fn name(self) -> &'static str {
        name_of(&Activations::NAMES, &self)
    }
}

impl Quantizer {
    /// Every choice with its name in recipes.
    pub const NAMES: [(&'static str, Quantizer); 2] =
        [("rtn", Quantizer::Rtn), ("search", Quantizer::Search)];
}

impl Rule {
    pub(super) const KEYS: &'static [&'static str] = &[
        "match",
        "weight",
        "tower",
        "class",
        "encoding",
        "activations",
        "quantizer",
        "rounding",
        "share_scale",
        "optional",
        "whole_groups",
        "keep_vectors",
        "imatrix",
    ];

    /// Reads a rule; `None` with every problem noted.
    pub(super) fn read(
        reader: &mut Reader<'_>,
        table: &DeTable<'_>,
        header: Range<usize>,
        sections: &[(&str, &[&str])],
    ) -> Option<Rule> {
        let before = reader.count();
        let section = Section { title: "[[quantize]]", table, keys: Rule::KEYS };
        let meant = reader.unknown_keys(&section, sections);
        // A key that is only misspelt is there.
        let has = |key: &str| table.contains_key(key) || meant.contains(&key);

        let patterns = read_patterns(reader, &section, "match");
        let weights = read_patterns(reader, &section, "weight");
        let towers = reader.choices(&section, "tower", &Tower::NAMES).unwrap_or_default();
        let classes = reader.choices(&section, "class", &Class::NAMES).unwrap_or_default();
        if !["match", "weight", "tower", "class"].into_iter().any(has) {
            reader.problem(
                header.clone(),
                "a rule without a selector",
                "selects nothing by name, tower or class",
                ["add `match`, `weight`, `tower` or `class`; match = \"*\" selects every weight"],
            );
        }
        let encoding = match table.get("encoding") {
            Some(value) => EncodingChoice::read(reader, value),
            None if has("encoding") => None,
            None => {
                reader.problem(
                    header.clone(),
                    "a rule without `encoding`",
                    "does not say what its weights become",
                    ["e.g. encoding = \"int8-g128\"; encoding = \"keep\" leaves them as they are"],
                );
                None
            }
        };
        let activations = reader.choice(&section, "activations", &Activations::NAMES);
        let quantizer = reader.choice(&section, "quantizer", &Quantizer::NAMES).unwrap_or_default();
        let rounding = reader.choice(&section, "rounding", &Rounding::NAMES).unwrap_or_default();
        let span_of = |key: &str| table.get(key).map_or(header.clone(), |value| value.span());
        let encoding = encoding.map(|choice| choice.with(quantizer, rounding));
        for (key, message, help) in encoding.iter().flat_map(|e| clashes(e, quantizer, rounding)) {
            reader.problem(span_of(key), message, "", [help]);
        }
        let imatrix = reader.flag(&section, "imatrix");
        if let Some((message, help)) = encoding
            .as_ref()
            .filter(|_| imatrix == Some(true))
            .and_then(|e| unweighed(e, quantizer))
        {
            reader.problem(span_of("imatrix"), message, "", [help]);
        }
        let share_scale = reader.flag(&section, "share_scale").unwrap_or(true);
        let optional = reader.flag(&section, "optional").unwrap_or(false);
        let whole_groups = reader.flag(&section, "whole_groups");
        let keep_vectors = reader.flag(&section, "keep_vectors").unwrap_or(false);
        if reader.count() > before {
            return None;
        }
        let place_of = |key: &str| table.get(key).map(|value| reader.place(value.span()));
        let places = RulePlaces {
            rule: reader.place(header.clone()),
            encoding: reader.place(span_of("encoding")),
            tower: place_of("tower"),
            class: place_of("class"),
        };
        Some(Rule {
            patterns,
            weights,
            towers,
            classes,
            encoding: encoding?,
            activations,
            quantizer,
            rounding,
            share_scale,
            optional,
            whole_groups,
            keep_vectors,
            imatrix,
            places,
        })
    }

    /// The rule with every default spelled out; what it leaves to the recipe stays with the recipe.
    pub(super) fn toml(&self) -> String {
        let mut out = String::from("\n[[quantize]]\n");
        let names = |names: Vec<String>| bracketed(names.iter().map(|name| quoted(name)));
        let mut put = |key: &str, value: String| {
            // Writing to a String cannot fail.
            let _ = writeln!(out, "{key} = {value}");
        };
        if !self.patterns.is_empty() {
            put("match", names(self.patterns.iter().map(|p| p.text.clone()).collect()));
        }
        if !self.weights.is_empty() {
            put("weight", names(self.weights.iter().map(|p| p.text.clone()).collect()));
        }
        if !self.towers.is_empty() {
            put("tower", names(self.towers.iter().map(Tower::to_string).collect()));
        }
        if !self.classes.is_empty() {
            put("class", names(self.classes.iter().map(Class::to_string).collect()));
        }
        put("encoding", self.encoding.toml());
        if let Some(activations) = self.activations {
            put("activations", quoted(activations.name()));
        }
        put("quantizer", quoted(name_of(&Quantizer::NAMES, &self.quantizer)));
        put("rounding", quoted(name_of(&Rounding::NAMES, &self.rounding)));
        put("share_scale", self.share_scale.to_string());
        put("optional", self.optional.to_string());
        if let Some(whole_groups) = self.whole_groups {
            put("whole_groups", whole_groups.to_string());
        }
        if self.keep_vectors {
            put("keep_vectors", "true".to_owned());
        }
        if let Some(imatrix) = self.imatrix {
            put("imatrix", imatrix.to_string());
        }
        out
    }

    /// Where its first pattern stands, else the rule itself.
    pub(super) fn place(&self) -> &Place {
        let first = self.patterns.first().or(self.weights.first());
        first.map_or(&self.places.rule, |pattern| &pattern.place)
    }

    /// The selectors in a few words: `*.{q,k}_proj.weight`, `lm_head of text`.
    pub fn selects(&self) -> String {
        let mut out = String::new();
        let join = |out: &mut String, with: &str| {
            if !out.is_empty() {
                out.push_str(with);
            }
        };
        for patterns in [&self.patterns, &self.weights] {
            if let Some((first, rest)) = patterns.split_first() {
                join(&mut out, ", ");
                out.push_str(&first.text);
                if !rest.is_empty() {
                    let _ = write!(out, " and {} more", rest.len());
                }
            }
        }
        if !self.classes.is_empty() {
            join(&mut out, ", ");
            out.push_str(&list(&self.classes, usize::MAX));
        }
        if !self.towers.is_empty() {
            join(&mut out, " of ");
            out.push_str(&list(&self.towers, usize::MAX));
        }
        out
    }
}

/// The patterns under that key; what is no pattern is a problem.
fn read_patterns(reader: &mut Reader<'_>, section: &Section<'_>, key: &str) -> Vec<Pattern> {
    let mut patterns = Vec::new();
    for text in reader.texts(section, key).unwrap_or_default() {
        match Pattern::new(text.get_ref(), reader.place(text.span())) {
            Ok(pattern) => patterns.push(pattern),
            Err(bad) => reader.problem(text.span(), bad.message, "", bad.help),
        }
    }
    patterns
}

/// Why importances have nothing to weigh under that quantizer and encoding, and what works.
fn unweighed(
    encoding: &EncodingChoice,
    quantizer: Quantizer,
) -> Option<(&'static str, &'static str)> {
    if quantizer != Quantizer::Search {
        return Some((
            "importances weigh the errors of quantizer \"search\"; \"rtn\" looks at no error",
            "quantizer = \"search\" goes with imatrix = true",
        ));
    }
    match &encoding.method {
        Method::Grid(grid) if grid.fwht.is_some() => Some((
            "a rotation (`transform`) mixes the columns that importances weigh",
            "leave `transform` or `imatrix` out",
        )),
        _ => None,
    }
}

/// Why an encoding's method cannot be had from that quantizer or rounding, as (key, message, help).
fn clashes(
    encoding: &EncodingChoice,
    quantizer: Quantizer,
    rounding: Rounding,
) -> Vec<(&'static str, String, String)> {
    let mut out = Vec::new();
    let Method::Grid(grid) = &encoding.method else {
        let none = |what: &str| format!("encoding {encoding} has no scales, and {what}");
        if quantizer == Quantizer::Search {
            out.push((
                "quantizer",
                none("quantizer \"search\" searches for scales"),
                "leave `quantizer` out, or take an encoding with scales, e.g. \"int8-g128\"".into(),
            ));
        }
        if rounding != Rounding::Rad {
            out.push((
                "rounding",
                none("`rounding` says how codes under a scale are chosen"),
                "leave `rounding` out, or take an encoding with scales, e.g. \"int8-g128\"".into(),
            ));
        }
        return out;
    };
    if quantizer == Quantizer::Search && grid.rule != ScaleRule::Search {
        out.push((
            "quantizer",
            "a power-of-two scale (e8m0) follows from the largest value of its block; there is nothing to search"
                .into(),
            "quantizer = \"rtn\" (the default) goes with it".into(),
        ));
    }
    if let Some(clash) = rounding.clash(grid) {
        out.push(("rounding", clash.message, clash.help));
    }
    out
}
