//! Dictionaries for libFuzzer: the words of the inputs that fuzzing begins with.

use std::collections::BTreeMap;
use std::fmt::Write;

/// Words of a dictionary, the most frequent first.
const MOST: usize = 300;
/// Longest word.
const LONGEST: usize = 40;

/// Values that parsers of any format have to survive.
const EDGES: [&[u8]; 22] = [
    b"18446744073709551615",
    b"9223372036854775808",
    b"4294967296",
    b"2147483647",
    b"-1",
    b"1e999",
    b"0.0",
    b"null",
    b"true",
    b"{}",
    b"[]",
    b"[[",
    b"\"\"",
    b"\\u0000",
    b"\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x00\x00\x00\x00\x01\x00\x00\x00",
    b"\x00\x00\x00\x80",
    b"\x00",
    b"\xef\xbb\xbf",
    b"\n--- ",
    b"\xc3\x28",
];

/// The dictionary of some inputs.
pub fn dictionary(inputs: &[Vec<u8>]) -> String {
    let mut counts: BTreeMap<&[u8], usize> = BTreeMap::new();
    for input in inputs {
        let word = |b: &u8| b.is_ascii_alphanumeric() || b"_-.:*".contains(b);
        for found in input.split(|b| !word(b)) {
            if (2..=LONGEST).contains(&found.len()) && !found.iter().all(u8::is_ascii_digit) {
                *counts.entry(found).or_default() += 1;
            }
        }
    }
    let mut words: Vec<(&[u8], usize)> = counts.into_iter().collect();
    words.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
    let mut out = String::new();
    for word in EDGES.into_iter().chain(words.into_iter().map(|w| w.0).take(MOST)) {
        out.push('"');
        for byte in word {
            // Writing to a String cannot fail.
            let _ = match byte {
                b'"' | b'\\' => write!(out, "\\{}", char::from(*byte)),
                0x20..0x7f => write!(out, "{}", char::from(*byte)),
                other => write!(out, "\\x{other:02x}"),
            };
        }
        out.push_str("\"\n");
    }
    out
}
