//! Differences of two documents, by the paths of their keys.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

/// A key whose value differs, or that only one document has.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// Path of the key, e.g. `target.devices`; items of a list by what names them, else by their number from 1.
    pub path: String,
    /// The first document's value; `None` where it has none.
    pub a: Option<Value>,
    /// The second document's.
    pub b: Option<Value>,
}

/// Keys that name an item of a list, in this order.
const NAMES: [&str; 5] = ["name", "path", "tensor", "device", "layout"];

/// Every difference, in the order of keys; items of lists in the order of the first document.
pub(super) fn changes(a: &Value, b: &Value) -> Vec<Change> {
    let mut out = Vec::new();
    compare("", a, b, &mut out);
    out
}

fn compare(path: &str, a: &Value, b: &Value, out: &mut Vec<Change>) {
    match (a, b) {
        _ if a == b => {}
        (Value::Object(a), Value::Object(b)) => objects(path, a, b, out),
        (Value::Array(x), Value::Array(y)) if items(x).is_some() || items(y).is_some() => {
            lists(path, x, y, out);
        }
        _ => out.push(Change { path: path.to_owned(), a: present(a), b: present(b) }),
    }
}

fn present(value: &Value) -> Option<Value> {
    (!value.is_null()).then(|| value.clone())
}

fn objects(path: &str, a: &Map<String, Value>, b: &Map<String, Value>, out: &mut Vec<Change>) {
    let keys: BTreeMap<&String, ()> = a.keys().chain(b.keys()).map(|k| (k, ())).collect();
    for key in keys.into_keys() {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        let get = |map: &Map<String, Value>| map.get(key).cloned().unwrap_or(Value::Null);
        compare(&path, &get(a), &get(b), out);
    }
}

/// Lists of objects: items of one name are compared, others are there in one document only.
fn lists(path: &str, a: &[Value], b: &[Value], out: &mut Vec<Change>) {
    let (Some(a), Some(b)) = (items(a), items(b)) else { return };
    let at = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path} {name}") };
    for (name, item) in &a {
        let other = b.iter().find(|(n, _)| n == name).map_or(&Value::Null, |(_, item)| item);
        compare(&at(name), item, other, out);
    }
    for (name, item) in b.iter().filter(|(name, _)| a.iter().all(|(n, _)| n != name)) {
        compare(&at(name), &Value::Null, item, out);
    }
}

/// The items of a list with what names them; `None` for a list of plain values.
fn items(list: &[Value]) -> Option<Vec<(String, &Value)>> {
    if list.iter().any(|item| !item.is_object()) {
        return None;
    }
    let named = |key: &str| {
        let names: Option<Vec<String>> = list.iter().map(|item| text(item.get(key)?)).collect();
        // A key that several items share names none of them.
        names.filter(|names| {
            let mut sorted = names.clone();
            sorted.sort_unstable();
            sorted.windows(2).all(|pair| pair[0] != pair[1])
        })
    };
    let names = NAMES.iter().find_map(|key| named(key));
    let names = names.unwrap_or_else(|| (1..=list.len()).map(|n| n.to_string()).collect());
    Some(names.into_iter().zip(list).collect())
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(s) => Some(s.clone()),
        Value::Number(n) => Some(n.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn lines(a: Value, b: Value) -> Vec<String> {
        let show = |v: &Option<Value>| v.as_ref().map_or("–".to_owned(), Value::to_string);
        changes(&a, &b)
            .iter()
            .map(|c| format!("{}: {} → {}", c.path, show(&c.a), show(&c.b)))
            .collect()
    }

    #[test]
    fn equal_documents_differ_in_nothing() {
        let document = json!({"a": [1, {"b": null}], "c": {"name": "x"}});
        assert!(changes(&document, &document).is_empty());
    }

    #[test]
    fn values_are_found_by_the_path_of_their_keys_and_list_items_by_their_names() {
        let a = json!({
            "target": {"devices": 1, "profile": "cpu"},
            "quantize": [{"class": ["linear"], "encoding": "int8-g128"}],
            "programs": [{"name": "prefill", "size": 128}, {"name": "decode_b8", "size": 8}],
            "sizes": [8, 4],
        });
        let b = json!({
            "target": {"devices": 4},
            "quantize": [{"class": ["linear"], "encoding": "nvfp4"}, {"class": ["lm_head"]}],
            "programs": [{"name": "decode_b8", "size": 8}, {"name": "prefill", "size": 256}],
            "sizes": [8, 4, 1],
        });
        assert_eq!(
            lines(a, b),
            [
                "programs prefill.size: 128 → 256",
                r#"quantize 1.encoding: "int8-g128" → "nvfp4""#,
                r#"quantize 2: – → {"class":["lm_head"]}"#,
                "sizes: [8,4] → [8,4,1]",
                "target.devices: 1 → 4",
                r#"target.profile: "cpu" → –"#,
            ]
        );
    }

    #[test]
    fn items_that_share_a_name_go_by_their_number() {
        let a = json!([{"name": "x", "n": 1}, {"name": "x", "n": 2}]);
        let b = json!([{"name": "x", "n": 1}, {"name": "x", "n": 3}]);
        assert_eq!(lines(a, b), ["2.n: 2 → 3"]);
    }
}
