//! Deviations from what a careful writer lays out, in a file that readers accept.

use std::collections::{BTreeMap, BTreeSet};

use super::{Faults, Options};
use crate::artifact::layout::{
    ENC_BYTES, ENC_HEAD_BYTES, ENC_PLANE_BYTES, HEADER_BYTES, KIND_TILED, META_FLOAT, META_INT,
    META_TEXT, NAME_BYTES, POOL, SUB, TABLE_ALIGN, VOCAB_BYTES,
};
use crate::artifact::reader::Artifact;
use crate::artifact::strings::{NameIndex, Text, until_nul};
use crate::artifact::tables::{Section, VOCAB_ARRAYS, slice, u64s};
use crate::artifact::vocab::{TOKEN_TYPES, known_step};
use crate::artifact::wire::{DirRow, PlaneRow, Row, StepRow};
use crate::diag::list;

const AREA: &str = "container";

/// Names are compared and shown up to this many bytes: a hostile file can name one string of megabytes from every
/// row.
const SHOWN: usize = 80;
const COMPARED: usize = 4096;

pub(super) fn check(artifact: &Artifact, options: Options, faults: &mut Faults) {
    let refs = references(artifact);
    header(artifact, faults);
    strings(artifact, &refs, faults);
    metadata(artifact, faults);
    profile(artifact, faults);
    vocabulary(artifact, faults);
    encodings(artifact, faults);
    let spans = directory(artifact, options, faults);
    gaps(artifact, spans, faults);
}

fn head(artifact: &Artifact, offset: u64, limit: usize) -> Text<'_> {
    let at = usize::try_from(offset).unwrap_or(usize::MAX);
    let rest = artifact.blob().get(at..).unwrap_or_default();
    Text(until_nul(rest.get(..limit).unwrap_or(rest)))
}

/// Every string offset that something names, sorted.
fn references(artifact: &Artifact) -> Vec<u64> {
    let t = artifact.tables();
    let mut refs: Vec<u64> = t.header.texts().into_iter().map(|(_, o)| o).collect();
    for row in &t.metadata {
        refs.push(row.key);
        if row.kind == META_TEXT {
            refs.push(row.value);
        }
    }
    refs.extend(t.entries.iter().flat_map(|e| [e.name, e.quantizer, e.options]));
    if let Some(v) = &t.vocab {
        refs.extend(u64s(array(artifact, 0)));
        refs.extend(StepRow::rows(array(artifact, 4)).flat_map(|s| [s.arg0, s.arg1]));
        refs.push(v.chat_template);
    }
    refs.sort_unstable();
    refs.dedup();
    refs
}

/// Bytes of an array of the vocabulary; empty when absent.
fn array(artifact: &Artifact, k: usize) -> &[u8] {
    let at = artifact.tables().vocab.as_ref().and_then(|v| v.array(k));
    at.and_then(|(o, n)| slice(artifact.bytes(), o, n)).unwrap_or_default()
}

fn header(artifact: &Artifact, faults: &mut Faults) {
    let (h, size) = (&artifact.tables().header, artifact.file_bytes());
    let end = h.sections().into_iter().map(Section::end).max().unwrap_or(0);
    faults.say(h.reserved == [0; 8], AREA, || "header: reserved words are not zero".into());
    faults.say(h.data_off.is_multiple_of(POOL), AREA, || {
        format!("header: the data blob at {} is not at a multiple of 2 MiB", h.data_off)
    });
    faults.say(h.file_bytes == size && end == size, AREA, || {
        format!(
            "header: it says {} bytes, the sections end at {end}, the file at {size}",
            h.file_bytes
        )
    });
}

fn strings(artifact: &Artifact, refs: &[u64], faults: &mut Faults) {
    let blob = artifact.blob();
    let body = blob.get(..blob.len().saturating_sub(1)).unwrap_or_default();
    let mut seen = BTreeSet::new();
    let mut starts = Vec::new();
    let mut at = 0u64;
    for s in body.split(|&b| b == 0) {
        let utf8 = std::str::from_utf8(s).is_ok();
        faults.say(utf8, AREA, || format!("string at {at}: not UTF-8"));
        faults.say(seen.insert(s), AREA, || format!("string at {at}: stored twice"));
        faults.say(at > 0 || s.is_empty(), AREA, || "string at 0: not the empty string".into());
        faults.say(at == 0 || refs.binary_search(&at).is_ok(), AREA, || {
            format!("string at {at}: nothing names it")
        });
        starts.push(at);
        at += s.len() as u64 + 1;
    }
    let middle: Vec<u64> =
        refs.iter().copied().filter(|r| starts.binary_search(r).is_err()).collect();
    faults.say(middle.is_empty(), AREA, || {
        format!("strings: offsets into the middle of one: {}", list(&middle, 5))
    });
}

fn metadata(artifact: &Artifact, faults: &mut Faults) {
    let rows = &artifact.tables().metadata;
    let index = NameIndex::new(artifact.blob(), rows.iter().map(|r| r.key));
    let firsts = index.firsts(artifact.blob());
    for (i, row) in rows.iter().enumerate() {
        faults.say(row.pad == 0, AREA, || format!("metadata[{i}]: padding is not zero"));
        let known = [META_INT, META_TEXT, META_FLOAT].contains(&row.kind);
        faults.say(known, AREA, || format!("metadata[{i}]: unknown type {}", row.kind));
        let key = head(artifact, row.key, SHOWN);
        faults.say(!key.is_empty() && is_first(&firsts, row.key, i), AREA, || {
            format!("metadata[{i}]: key `{key}` is empty or a duplicate")
        });
    }
}

/// Whether row `i`, whose string lies at `offset`, is the first with an equal string.
fn is_first(firsts: &[(u64, u32)], offset: u64, i: usize) -> bool {
    let at = firsts.partition_point(|f| f.0 < offset);
    firsts.get(at).is_some_and(|f| f.0 == offset && f.1 as usize == i)
}

fn profile(artifact: &Artifact, faults: &mut Faults) {
    let t = artifact.tables();
    let experts: BTreeSet<(i32, i32)> =
        t.entries.iter().filter(|e| e.expert >= 0).map(|e| (e.layer, e.expert)).collect();
    for (i, row) in t.profile.iter().enumerate() {
        faults.say(row.reserved == 0, AREA, || format!("profile[{i}]: reserved word is not zero"));
        faults.say((0.0..=1.0).contains(&row.share), AREA, || {
            format!("profile[{i}]: share {} is not between 0 and 1", row.share)
        });
        faults.say(experts.contains(&(row.layer, row.expert)), AREA, || {
            format!("profile[{i}]: no expert {} in layer {}", row.expert, row.layer)
        });
    }
}

fn vocabulary(artifact: &Artifact, faults: &mut Faults) {
    let Some(v) = &artifact.tables().vocab else { return };
    let mut say = |ok: bool, what: &dyn Fn() -> String| {
        faults.say(ok, AREA, || format!("vocabulary: {}", what()));
    };
    say(v.reserved == [0; 4], &|| "reserved words are not zero".into());
    say((1..=4).contains(&v.kind), &|| format!("kind {} is not 1 to 4", v.kind));
    let odd_type = array(artifact, 2).iter().find(|t| !TOKEN_TYPES.contains(t));
    say(odd_type.is_none(), &|| format!("unknown token type {}", odd_type.unwrap_or(&0)));
    say(v.add_bos.max(v.add_eos) <= 1, &|| {
        format!("add_bos {} and add_eos {} are not 0 or 1", v.add_bos, v.add_eos)
    });
    let odd_step = StepRow::rows(array(artifact, 4)).find(|s| !known_step(s.kind));
    say(odd_step.is_none(), &|| format!("unknown step kind {}", odd_step.map_or(0, |s| s.kind)));
    let id = |t: &i32| *t >= -1 && i64::from(*t) < i64::from(v.n_tokens);
    say(v.specials.iter().all(id), &|| {
        format!("special tokens {:?} of {}", v.specials, v.n_tokens)
    });
    for k in [0, 3, 4] {
        let (name, count, at) = (VOCAB_ARRAYS[k].0, v.counts()[k], v.arrays[k]);
        say(count == 0 || at != 0, &|| format!("{count} rows of {name}, but no array"));
    }
}

fn encodings(artifact: &Artifact, faults: &mut Faults) {
    let t = artifact.tables();
    let used: BTreeSet<u32> = t.entries.iter().map(|e| e.enc).collect();
    let mut seen: BTreeMap<&[u8], usize> = BTreeMap::new();
    for (i, (row, enc)) in t.raw_encodings.iter().zip(&t.encodings).enumerate() {
        let raw = slice(artifact.bytes(), t.header.enc_off + ENC_BYTES * i as u64, ENC_BYTES)
            .unwrap_or_default();
        let n = enc.planes.len();
        let tail = (ENC_HEAD_BYTES + ENC_PLANE_BYTES * n as u64) as usize;
        let zero = |bytes: Option<&[u8]>| bytes.unwrap_or_default().iter().all(|&b| b == 0);
        faults.say(row.reserved == 0 && zero(raw.get(tail..)), AREA, || {
            format!("encoding[{i}]: reserved word or unused slots are not zero")
        });
        let planes = row.planes.get(..n).unwrap_or_default();
        let roles = planes.iter().map(|p| &p.role);
        let after_nul = |name: &[u8; NAME_BYTES]| zero(name.get(until_nul(name).len()..));
        faults.say(
            [&row.scheme, &row.transform].into_iter().chain(roles).all(after_nul),
            AREA,
            || format!("encoding[{i}]: a name has text after its NUL"),
        );
        let unused = |p: &crate::artifact::wire::EncPlaneRow| {
            if p.kind == KIND_TILED { p.extent } else { p.block }
        };
        faults.say(planes.iter().all(|p| unused(p) == [0; 2]), AREA, || {
            format!("encoding[{i}]: an unused block or extent is not zero")
        });
        let mut names = std::iter::once(&enc.transform).chain(enc.planes.iter().map(|p| &p.role));
        let odd = names.find(|n| odd_number(n));
        faults.say(odd.is_none(), AREA, || {
            format!("encoding[{i}]: odd number in `{}`", odd.map_or("", String::as_str))
        });
        let first = *seen.entry(raw).or_insert(i);
        faults.say(first == i, AREA, || format!("encoding[{i}]: same as encoding[{first}]"));
        faults.say(used.contains(&(i as u32)), AREA, || format!("encoding[{i}]: no entry uses it"));
    }
}

/// Whether a name that carries a number spells it otherwise than a decimal number from 1 without leading zeros.
fn odd_number(name: &str) -> bool {
    let number = ["fwht", "scale.", "min."].into_iter().find_map(|p| name.strip_prefix(p));
    number.is_some_and(|n| {
        n.is_empty() || n.starts_with('0') || !n.bytes().all(|b| b.is_ascii_digit())
    })
}

/// A range of the file and what lies there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    from: u64,
    to: u64,
    what: What,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Named(&'static str),
    Plane { entry: usize, plane: usize },
}

fn directory(artifact: &Artifact, options: Options, faults: &mut Faults) -> Vec<Span> {
    let t = artifact.tables();
    let (data_from, data_to) = (t.header.data_off, t.header.data_off + t.header.data_bytes);
    let index = NameIndex::new(artifact.blob(), t.entries.iter().map(|e| e.name));
    let firsts = index.firsts(artifact.blob());
    let mut spans = vec![Span { from: 0, to: HEADER_BYTES, what: What::Named("header") }];
    let mut next_plane = 0u64;
    let mut last: Option<&DirRow> = None;
    for (i, e) in t.entries.iter().enumerate() {
        let planes = t.planes_of(e);
        let name = head(artifact, e.name, SHOWN);
        let mut say = |ok: bool, what: &dyn Fn() -> String| {
            faults.say(ok, AREA, || format!("entry[{i}] `{name}`: {}", what()));
        };
        let rank = e.rank as usize;
        say(e.reserved == [0; 2], &|| "reserved words are not zero".into());
        say(e.shape.iter().skip(rank).all(|&d| d == 0), &|| {
            "extents past its rank are not zero".into()
        });
        say(!name.is_empty() && is_first(&firsts, e.name, i), &|| {
            "its name is empty or a duplicate".into()
        });
        let product = e.shape.iter().take(rank).try_fold(64i64, |n, &d| n.checked_mul(d));
        say(product.is_some(), &|| format!("the product of {:?} overflows", e.shape));
        let end = e.offset + e.bytes; // inside the file, checked at opening
        say(data_from <= e.offset && end <= data_to, &|| {
            format!("{}..{end} is outside the data blob {data_from}..{data_to}", e.offset)
        });
        let first = planes.first().map(|p| p.offset);
        let plane_end = |p: &PlaneRow| p.offset + p.bytes;
        say(first == Some(e.offset) && planes.last().map(plane_end) == Some(end), &|| {
            format!("{}..{end} does not span just its planes", e.offset)
        });
        let packed = |w: &[PlaneRow]| w[1].offset == plane_end(&w[0]).next_multiple_of(SUB);
        say(planes.windows(2).all(packed), &|| {
            "its planes are not packed in order at steps of 256 bytes".into()
        });
        say(e.plane_first == next_plane, &|| {
            format!(
                "its plane rows begin at {}, not {next_plane}: shared, skipped or unsorted",
                e.plane_first
            )
        });
        let key =
            |e: &DirRow| (e.layer.max(-1), e.expert, e.slot, head(artifact, e.name, COMPARED));
        if let Some(last) = last.filter(|_| !options.any_order) {
            say(key(e) >= key(last), &|| {
                "the directory is not sorted by layer, expert, slot, name".into()
            });
            say(e.offset >= last.offset, &|| "entries are not in file order".into());
        }
        let ranges =
            e.layer >= -1 && e.expert >= -1 && e.slot >= 0 && (e.expert < 0 || e.layer >= 0);
        say(ranges, &|| {
            format!("layer {}, expert {}, slot {} are out of range", e.layer, e.expert, e.slot)
        });
        let split =
            e.expert >= 0 && e.slot != 0 && last.is_some_and(|l| l.layer.max(-1) != e.layer);
        say(!split, &|| "the slots of its expert are in two layers".into());
        next_plane = e.plane_first + planes.len() as u64;
        last = Some(e);
        spans.extend(planes.iter().enumerate().map(|(plane, p)| Span {
            from: p.offset,
            to: plane_end(p),
            what: What::Plane { entry: i, plane },
        }));
    }
    faults.say(next_plane >= t.planes.len() as u64, AREA, || {
        format!("planes: rows from {next_plane} on belong to no entry")
    });
    for s in t.header.sections() {
        let (name, from, to) = (s.name, s.offset, s.end());
        faults.say(from.is_multiple_of(TABLE_ALIGN), AREA, || {
            format!("section {name}: offset {from} is not a multiple of 8")
        });
        if name == "data" || s.bytes() == 0 {
            continue;
        }
        faults.say(!(from < data_to && data_from < to), AREA, || {
            format!("section {name}: overlaps the data blob")
        });
        match &t.vocab {
            Some(v) if name == "vocab" => {
                let what = What::Named("vocabulary header");
                spans.push(Span { from, to: from + VOCAB_BYTES, what });
                spans.extend(VOCAB_ARRAYS.iter().enumerate().filter_map(|(k, a)| {
                    let (from, n) = v.array(k)?;
                    Some(Span { from, to: from + n, what: What::Named(a.0) })
                }));
            }
            _ => spans.push(Span { from, to, what: What::Named(name) }),
        }
    }
    spans
}

/// Overlaps, and anything but zero bytes between the parts.
fn gaps(artifact: &Artifact, mut spans: Vec<Span>, faults: &mut Faults) {
    let label = |what: What| match what {
        What::Named(name) => name.to_owned(),
        What::Plane { entry, plane } => {
            let e = artifact.entry(entry);
            let role = e.and_then(|e| e.encoding().planes.get(plane)).map_or("", |p| &p.role);
            format!("entry[{entry}].{role}")
        }
    };
    let size = artifact.file_bytes();
    spans.sort_by_key(|s| (s.from, s.to));
    spans.push(Span { from: size, to: size, what: What::Named("end of file") });
    let mut before = Span { from: 0, to: 0, what: What::Named("start of file") };
    for span in spans {
        let Span { from, to, what } = span;
        faults.say(from >= before.to, AREA, || {
            format!(
                "{}: {from}..{to} overlaps {} (to {})",
                label(what),
                label(before.what),
                before.to
            )
        });
        let gap = slice(artifact.bytes(), before.to, from.saturating_sub(before.to));
        faults.say(zeros(gap.unwrap_or_default()), AREA, || {
            format!("{}: non-zero bytes before it, in {}..{from}", label(what), before.to)
        });
        if to > before.to {
            before = span;
        }
    }
}

fn zeros(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<64>();
    words.iter().all(|w| *w == [0; 64]) && rest.iter().all(|&b| b == 0)
}
