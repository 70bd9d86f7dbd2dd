//! JSON Schema of recipes, for editors and for checking recipes without this program.
//!
//! It covers keys, types and names. What it cannot say (patterns that compile, grids that make sense, what fits a
//! model) is [`Recipe::parse`](super::Recipe::parse)'s and [`Recipe::resolve`](super::Recipe::resolve)'s to find.

use schemars::{JsonSchema, Schema, SchemaGenerator, generate::SchemaSettings, json_schema};
use serde_json::{Value, json};

use super::encoding::NAMED;
use super::rounding::Rounding;
use super::rule::{Activations, Quantizer, Rule};
use super::settings::{Attention, Graphs, KvDtype, Target, Towers, Vision};
use crate::model::{Class, Tower};

/// A radpack recipe: which weights of a model are stored how, and what the artifact is compiled for.
#[derive(JsonSchema)]
#[schemars(title = "radpack recipe", deny_unknown_fields)]
#[allow(dead_code)] // only its shape is used
struct Document {
    /// Version of the recipe language.
    #[schemars(schema_with = "version")]
    schema: u64,
    /// Name of the recipe.
    name: Option<String>,
    /// What it is for.
    description: Option<String>,
    /// Whether rows that end in a short group are refused, where a rule does not say.
    whole_groups: Option<bool>,
    /// What the artifact is compiled for.
    target: Option<Target>,
    /// The rules; the first that selects a weight decides it, and a weight without a rule is kept byte for byte.
    #[schemars(schema_with = "rules", default)]
    quantize: Option<Vec<Rule>>,
    /// Shapes of the static graphs; what is absent is derived from the model and the target.
    graphs: Option<Graphs>,
    /// The image encoder.
    vision: Option<Vision>,
    /// Parts of the model that the artifact holds.
    towers: Option<Towers>,
}

/// The schema as committed in `schemas/recipe.schema.json`, ending in a newline.
pub fn schema() -> String {
    // TOML has no null: an absent key is how an option stays unset.
    let settings = SchemaSettings::draft2020_12();
    let schema = settings.into_generator().into_root_schema_for::<Document>();
    let mut value = schema.to_value();
    drop_null(&mut value);
    let mut text = serde_json::to_string_pretty(&value).unwrap_or_default();
    text.push('\n');
    text
}

/// Takes `null` out of every `type`, `anyOf` and `default`.
fn drop_null(value: &mut Value) {
    match value {
        Value::Object(map) => {
            if map.get("default") == Some(&Value::Null) {
                map.remove("default");
            }
            if let Some(Value::Array(types)) = map.get_mut("type") {
                types.retain(|t| t != "null");
                if let [only] = types.as_slice() {
                    let only = only.clone();
                    map.insert("type".into(), only);
                }
            }
            if let Some(Value::Array(any)) = map.get_mut("anyOf") {
                any.retain(|s| s != &json!({ "type": "null" }));
                if let [Value::Object(only)] = any.as_slice() {
                    let only = only.clone();
                    map.remove("anyOf");
                    map.extend(only);
                }
            }
            map.values_mut().for_each(drop_null);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_null),
        _ => {}
    }
}

fn names<T>(of: &[(&'static str, T)]) -> Vec<&'static str> {
    of.iter().map(|(name, _)| *name).collect()
}

fn one_or_list(item: Value) -> Schema {
    json_schema!({
        "anyOf": [item, { "type": "array", "items": item, "minItems": 1 }]
    })
}

fn version(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "const": super::SCHEMA })
}

fn rules(generator: &mut SchemaGenerator) -> Schema {
    let rule = generator.subschema_for::<Rule>();
    json_schema!({
        "type": "array",
        "items": {
            "allOf": [rule],
            "anyOf": [{ "required": ["match"] }, { "required": ["tower"] }, { "required": ["class"] }]
        }
    })
}

pub(super) fn texts(_: &mut SchemaGenerator) -> Schema {
    one_or_list(json!({ "type": "string", "minLength": 1 }))
}

pub(super) fn towers(_: &mut SchemaGenerator) -> Schema {
    one_or_list(json!({ "enum": names(&Tower::NAMES) }))
}

pub(super) fn classes(_: &mut SchemaGenerator) -> Schema {
    one_or_list(json!({ "enum": names(&Class::NAMES) }))
}

pub(super) fn activations(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "enum": names(&Activations::NAMES) })
}

pub(super) fn quantizer(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "enum": names(&Quantizer::NAMES) })
}

pub(super) fn rounding(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "enum": names(&Rounding::NAMES) })
}

pub(super) fn attention(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "enum": names(&Attention::NAMES) })
}

pub(super) fn kv_dtype(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "enum": names(&KvDtype::NAMES) })
}

pub(super) fn positive_or_list(_: &mut SchemaGenerator) -> Schema {
    one_or_list(json!({ "type": "integer", "minimum": 1 }))
}

pub(super) fn device_list(_: &mut SchemaGenerator) -> Schema {
    one_or_list(json!({ "type": "integer", "minimum": 0 }))
}

pub(super) fn memory_budget(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "anyOf": [
            { "type": "number", "exclusiveMinimum": 0, "maximum": 1 },
            { "type": "string", "pattern": "^\\s*[0-9]+\\s*(TiB|GiB|MiB|KiB|B)\\s*$" }
        ]
    })
}

pub(super) fn encoding(_: &mut SchemaGenerator) -> Schema {
    let dtypes = super::encoding::type_names();
    let block = json!({
        "type": "array",
        "items": { "type": "integer", "minimum": 0 },
        "minItems": 2,
        "maxItems": 2
    });
    let named: Vec<&str> = NAMED.iter().map(|n| n.name).collect();
    json_schema!({
        "anyOf": [
            { "enum": named },
            {
                "type": "object",
                "additionalProperties": false,
                "properties": {
                    "codes": { "enum": dtypes.codes },
                    "table": {
                        "anyOf": [
                            { "enum": dtypes.tables },
                            { "type": "array", "items": { "type": "number" }, "minItems": 2, "maxItems": 4096 }
                        ]
                    },
                    "group": { "type": "integer", "minimum": 1 },
                    "block": block,
                    "scale": { "enum": dtypes.scales },
                    "scale2": {
                        "anyOf": [
                            { "enum": dtypes.second_scales },
                            {
                                "type": "object",
                                "additionalProperties": false,
                                "properties": { "dtype": { "enum": dtypes.second_scales }, "block": block },
                                "required": ["dtype"]
                            }
                        ]
                    },
                    "zero": { "enum": dtypes.zeros }
                },
                "oneOf": [{ "required": ["codes"] }, { "required": ["table"] }]
            }
        ]
    })
}

#[cfg(test)]
mod tests {
    use super::super::document::SECTIONS;
    use super::super::encoding;
    use super::*;

    #[test]
    fn the_schema_and_the_parser_know_the_same_keys() {
        let schema: Value = serde_json::from_str(&schema()).expect("JSON");
        let keys = |at: &str| -> Vec<String> {
            let object = schema.pointer(at).and_then(Value::as_object);
            object.unwrap_or_else(|| panic!("{at}")).keys().cloned().collect()
        };
        for (title, known) in SECTIONS {
            let at = match *title {
                "the top level" => "/properties",
                "[target]" => "/$defs/Target/properties",
                "[[quantize]]" => "/$defs/Rule/properties",
                "[graphs]" => "/$defs/Graphs/properties",
                "[vision]" => "/$defs/Vision/properties",
                "[towers]" => "/$defs/Towers/properties",
                other => panic!("{other}"),
            };
            let mut known: Vec<&str> = known.to_vec();
            known.sort_unstable();
            assert_eq!(keys(at), known, "{title}");
        }
        let mut known = encoding::KEYS.to_vec();
        known.sort_unstable();
        assert_eq!(keys("/$defs/Rule/properties/encoding/anyOf/1/properties"), known);
    }
}
