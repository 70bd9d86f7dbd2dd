//! What a `tokenizer.json` must not hold to be handed to the tokenizers crate.
//!
//! tokenizers 0.22 panics, or allocates on the word of a length field, over: JSON that breaks off inside `decoder`; a
//! `Precompiled` normalizer whose map is malformed, promises more than it has, or leads its trie out of itself; a `Strip`
//! decoder that cuts more from the end than a token has; a template of special tokens that names one which it does not
//! have, or a second text, or follows another template. All of them are found here first.

use serde::Deserialize;
use serde_json::Value as Json;

/// The parts that are looked at; the others are read by the crate alone.
#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    normalizer: Json,
    #[serde(default)]
    decoder: Json,
    #[serde(default)]
    post_processor: Json,
}

/// Looks for what the crate cannot survive.
///
/// # Errors
/// The part and what is wrong with it.
pub(super) fn check(bytes: &[u8]) -> Result<(), String> {
    let parts: Parts = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    each_object(&parts.normalizer, &mut |part| {
        let map = part.get("precompiled_charsmap");
        if map.is_none() && part.get("type").and_then(Json::as_str) != Some("Precompiled") {
            return Ok(());
        }
        let map = map.and_then(Json::as_str).ok_or("it is no text")?;
        let map = base64(map).ok_or("it is not base64")?;
        charsmap(&map)
    })
    .map_err(|why| format!("precompiled_charsmap of the normalizer: {why}"))?;
    each_object(&parts.decoder, &mut |part| match part.get("stop") {
        None => Ok(()),
        Some(stop) if stop.as_u64() == Some(0) => Ok(()),
        Some(stop) => Err(format!("`stop` is {stop}; only 0 fits tokens of any length")),
    })
    .map_err(|why| format!("Strip decoder: {why}"))?;
    match templates(&parts.post_processor).map_err(|why| format!("post_processor: {why}"))? {
        0 | 1 => Ok(()),
        n => Err(format!("post_processor: {n} templates, one after the other; one is read")),
    }
}

/// How many templates put special tokens around a text. Each may name what it has, and the one text that there is.
fn templates(processor: &Json) -> Result<usize, String> {
    let part = match processor {
        Json::Null => return Ok(0),
        Json::Object(part) => part,
        _ => return Err("it is no object".to_owned()),
    };
    let mut found = 0;
    if let Some(pieces) = part.get("single") {
        let tokens = part.get("special_tokens").and_then(Json::as_object);
        for piece in pieces.as_array().ok_or("`single` is no list")? {
            let id = |kind: &str| piece.get(kind)?.get("id")?.as_str();
            match (id("Sequence"), id("SpecialToken")) {
                (Some("A"), None) => {}
                (None, Some(token)) if tokens.is_some_and(|t| t.contains_key(token)) => {}
                (None, Some(token)) => {
                    return Err(format!("`single` names {token:?}, which special_tokens lacks"));
                }
                _ => return Err("`single` has a piece that is neither text A nor a token".into()),
            }
        }
        found += 1;
    }
    if let Some(processors) = part.get("processors") {
        for processor in processors.as_array().ok_or("`processors` is no list")? {
            found += templates(processor)?;
        }
    }
    Ok(found)
}

/// What is said of an object.
type Look<'a> = dyn FnMut(&serde_json::Map<String, Json>) -> Result<(), String> + 'a;

/// Every object of a value, the outer ones first.
fn each_object(value: &Json, see: &mut Look<'_>) -> Result<(), String> {
    match value {
        Json::Object(part) => {
            see(part)?;
            part.values().try_for_each(|inner| each_object(inner, see))
        }
        Json::Array(list) => list.iter().try_for_each(|inner| each_object(inner, see)),
        _ => Ok(()),
    }
}

/// Bytes of canonical base64 (RFC 4648 section 4, padded), which any decoder accepts.
fn base64(text: &str) -> Option<Vec<u8>> {
    let digit = |b: u8| match b {
        b'A'..=b'Z' => Some(b - b'A'),
        b'a'..=b'z' => Some(b - b'a' + 26),
        b'0'..=b'9' => Some(b - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let padding = text.bytes().rev().take(2).take_while(|b| *b == b'=').count();
    let digits = text.len().checked_sub(padding)?;
    if !text.len().is_multiple_of(4) {
        return None;
    }
    let mut out = Vec::with_capacity(digits / 4 * 3 + 2);
    let (mut bits, mut held) = (0u32, 0u32);
    for byte in text.as_bytes().get(..digits)? {
        bits = bits << 6 | u32::from(digit(*byte)?);
        held += 6;
        if held >= 8 {
            held -= 8;
            out.push((bits >> held) as u8);
            bits &= (1 << held) - 1;
        }
    }
    (bits == 0).then_some(out)
}

/// A map of sentencepiece: the bytes of a double-array trie (as u32, little-endian), its units, and replacements that end in
/// NUL. Walks every path of the trie: none may leave it, and every value must be where a replacement can begin.
fn charsmap(map: &[u8]) -> Result<(), String> {
    let (length, rest) = map.split_first_chunk::<4>().ok_or("it has no length")?;
    let units = u32::from_le_bytes(*length) as usize / 4;
    let have = rest.len() / 4;
    if units > have {
        return Err(format!("it promises {units} units of a trie and has {have}"));
    }
    let (trie, texts) = rest.split_at(units * 4);
    let texts = std::str::from_utf8(texts).map_err(|e| e.to_string())?;
    let unit = |at: usize| {
        let bytes = trie.get(at.checked_mul(4)?..)?.first_chunk::<4>()?;
        Some(u32::from_le_bytes(*bytes) as usize)
    };
    let offset = |unit: usize| (unit >> 10) << ((unit & (1 << 9)) >> 6);
    let out = |at: usize| format!("its trie of {units} units leads to unit {at}");
    let mut seen = vec![false; units];
    let mut left = vec![offset(unit(0).ok_or("its trie is empty")?)];
    while let Some(base) = left.pop() {
        for byte in 1..=255 {
            let at = base ^ byte;
            let child = unit(at).ok_or_else(|| out(at))?;
            if child & (1 << 31 | 0xff) != byte {
                continue;
            }
            let base = at ^ offset(child);
            if child >> 8 & 1 == 1 {
                let value = unit(base).ok_or_else(|| out(base))? & ((1 << 31) - 1);
                if !texts.is_char_boundary(value) {
                    return Err(format!("a replacement begins at byte {value} of {}", texts.len()));
                }
            }
            match seen.get_mut(at) {
                Some(before) if !*before => *before = true,
                _ => continue,
            }
            left.push(base);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Base64 of bytes.
    fn encoded(bytes: &[u8]) -> String {
        const DIGITS: &[u8; 64] =
            b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut out = String::new();
        for chunk in bytes.chunks(3) {
            let bits =
                chunk.iter().chain([&0; 3]).take(3).fold(0u32, |n, b| n << 8 | u32::from(*b));
            for i in 0..4 {
                let shown = i <= chunk.len();
                let digit = DIGITS[(bits >> (18 - 6 * i)) as usize & 63];
                out.push(if shown { char::from(digit) } else { '=' });
            }
        }
        out
    }

    /// A trie of 256 units in which `a` has the value `value`, and the replacement `b`.
    fn map(offset: u32, value: u32) -> Vec<u8> {
        let mut units = vec![0u32; 256];
        // The root's children begin at `offset`, at least 256 here, so that it is given in steps of one.
        units[0] = offset << 10;
        let a = (offset as usize ^ usize::from(b'a')) & 255;
        units[a] = 1 << 8 | u32::from(b'a') | (b'a' as u32) << 10;
        units[a ^ usize::from(b'a')] |= value;
        let mut out = (4 * 256u32).to_le_bytes().to_vec();
        units.iter().for_each(|unit| out.extend(unit.to_le_bytes()));
        out.extend(b"b\0");
        out
    }

    fn checked(map: &[u8]) -> Result<(), String> {
        let part = serde_json::json!({"normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Precompiled", "precompiled_charsmap": encoded(map)}]}});
        check(part.to_string().as_bytes())
    }

    #[test]
    fn base64_is_read_in_its_canonical_form_only() {
        for bytes in [&b""[..], b"a", b"ab", b"abc", b"\xff\xfe\xfd\xfc"] {
            assert_eq!(base64(&encoded(bytes)).as_deref(), Some(bytes));
        }
        for wrong in ["QQ", "QQ=", "QR==", "Q===", "====", "QQ==QQ==", "QQ\n=", "Q-=="] {
            assert_eq!(base64(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_map_stays_within_itself() {
        assert_eq!(checked(&map(0, 0)), Ok(()));
        let why = |map: &[u8]| checked(map).expect_err("it is refused");
        assert!(why(&map(1 << 10, 0)).contains("its trie of 256 units leads to unit 1025"));
        assert!(why(&map(0, 7)).contains("a replacement begins at byte 7 of 2"));
        let mut huge = map(0, 0);
        huge[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(why(&huge).contains("it promises 1073741823 units of a trie and has 256"));
        assert!(why(b"\0\0").contains("it has no length"));
        assert!(why(&[0; 4]).contains("its trie is empty"));
        let mut broken = map(0, 0);
        broken.push(0xff);
        assert!(why(&broken).contains("utf-8"));
    }

    #[test]
    fn other_parts_that_the_crate_does_not_survive_are_named() {
        let why = |text: &str| check(text.as_bytes()).expect_err("it is refused");
        assert!(why(r#"{"decoder": {"type": "Fuse""#).contains("EOF"));
        assert_eq!(
            why(r#"{"decoder": {"type": "Sequence", "decoders": [{"type": "Strip", "stop": 2}]}}"#),
            "Strip decoder: `stop` is 2; only 0 fits tokens of any length"
        );
        assert_eq!(
            why(r#"{"normalizer": {"type": "Precompiled"}}"#),
            "precompiled_charsmap of the normalizer: it is no text"
        );
        assert_eq!(check(br#"{"decoder": {"type": "Strip", "start": 1, "stop": 0}}"#), Ok(()));
    }

    #[test]
    fn templates_name_what_they_have() {
        let said = |processor: &str| {
            check(format!("{{\"post_processor\": {processor}}}").as_bytes())
                .err()
                .unwrap_or_default()
        };
        let template = |single: &str| {
            format!(
                r#"{{"type": "TemplateProcessing", "single": {single}, "pair": [], "special_tokens": {{"<s>": {{"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}}}}"#
            )
        };
        let token = |id: &str| format!(r#"{{"SpecialToken": {{"id": "{id}", "type_id": 0}}}}"#);
        let text = |id: &str| format!(r#"{{"Sequence": {{"id": "{id}", "type_id": 0}}}}"#);
        let sound = template(&format!("[{}, {}]", token("<s>"), text("A")));
        let byte_level = r#"{"type": "ByteLevel"}"#;
        let list =
            |of: &[&str]| format!(r#"{{"type": "Sequence", "processors": [{}]}}"#, of.join(", "));
        for fine in ["null", byte_level, &sound, &list(&[byte_level, &sound]), &template("[]")] {
            assert_eq!(said(fine), "", "{fine}");
        }
        let lacking = template(&format!("[{}]", token("</s>")));
        let wrong = "post_processor: `single` names \"</s>\", which special_tokens lacks";
        assert_eq!(said(&lacking), wrong);
        assert_eq!(said(&list(&[byte_level, &lacking])), wrong);
        let second = "post_processor: `single` has a piece that is neither text A nor a token";
        assert_eq!(said(&template(&format!("[{}]", text("B")))), second);
        // The crate reads lists for objects too.
        assert_eq!(said(&template(r#"[{"SpecialToken": ["</s>", 0]}]"#)), second);
        assert_eq!(said("[[], [], {}]"), "post_processor: it is no object");
        let twice = "post_processor: 2 templates, one after the other; one is read";
        assert_eq!(said(&list(&[&sound, &list(&[&sound])])), twice);
    }
}
