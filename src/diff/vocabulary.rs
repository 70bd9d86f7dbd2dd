//! Differences of two tokenizers in containers' tables.

use serde_json::{Value, json};

use super::values::{self, Change};
use crate::artifact::{Artifact, Vocab};

/// What differs: single values and lengths of lists by name, of lists of one length the first row that differs.
pub(super) fn changes(a: &Artifact, b: &Artifact) -> Vec<Change> {
    let nothing = || Value::Object(serde_json::Map::new());
    let [whole_a, whole_b] = [a.vocab(), b.vocab()];
    let [a, b] = [&whole_a, &whole_b].map(|v| v.as_ref().map_or_else(nothing, summary));
    let mut out = values::changes(&a, &b);
    if let (Some(a), Some(b)) = (&whole_a, &whole_b) {
        let text = |t: &Vec<u8>| json!(String::from_utf8_lossy(t));
        out.extend(first("token", &a.tokens, &b.tokens, text));
        out.extend(first("score of token", &a.scores, &b.scores, |s| json!(s)));
        out.extend(first("type of token", &a.types, &b.types, |t| json!(t)));
        out.extend(first("merge", &a.merges, &b.merges, |m| json!(m)));
        out.extend(first("step", &a.steps, &b.steps, |s| json!(s.to_string())));
    }
    out
}

fn summary(v: &Vocab) -> Value {
    json!({
        "kind": v.kind,
        "tokens": v.tokens.len(),
        "scores": v.scores.len(),
        "merges": v.merges.len(),
        "steps": v.steps.len(),
        "bos, eos, eot, pad, unk, sep": v.specials,
        "add_bos": v.add_bos,
        "add_eos": v.add_eos,
        "chat_template": String::from_utf8_lossy(&v.chat_template),
    })
}

fn first<T: PartialEq>(name: &str, a: &[T], b: &[T], show: impl Fn(&T) -> Value) -> Option<Change> {
    if a.len() != b.len() {
        return None;
    }
    let (at, (a, b)) = a.iter().zip(b).enumerate().find(|(_, (a, b))| a != b)?;
    Some(Change { path: format!("{name} {at}"), a: Some(show(a)), b: Some(show(b)) })
}
