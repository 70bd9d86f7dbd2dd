//! The vocabulary section: a tokenizer as tables.

use super::layout::VOCAB_BYTES;
use super::strings::Interner;
use super::wire::{Field, StepRow, VocabRow};
use crate::diag::{Diagnostic, Problems};

/// A tokenizer as tables. Arrays of a wrong length are refused when the layout is planned.
#[derive(Debug, Clone, PartialEq)]
pub struct Vocab {
    /// 1 byte-pair encoding, 2 unigram, 3 wordpiece, 4 rwkv.
    pub kind: u32,
    /// Text of every token, in id order.
    pub tokens: Vec<Vec<u8>>,
    /// Unigram scores, one a token; empty for the other kinds.
    pub scores: Vec<f32>,
    /// 1 normal, 2 unknown, 3 control, 4 user-defined, 6 byte; one a token, or empty.
    pub types: Vec<u8>,
    /// Pairs of token ids in rank order.
    pub merges: Vec<[u32; 2]>,
    /// Normaliser, pre-tokeniser and decoder, in declared order.
    pub steps: Vec<Step>,
    /// bos, eos, eot, pad, unk, sep; -1 for none.
    pub specials: [i32; 6],
    /// Whether encoding begins with bos.
    pub add_bos: bool,
    /// Whether encoding ends with eos.
    pub add_eos: bool,
    /// Chat template, empty for none.
    pub chat_template: Vec<u8>,
}

/// One step of a tokenizer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// What it does: 1–31 normaliser, 32–63 pre-tokeniser, 64–95 decoder.
    pub kind: u32,
    /// Options of that kind.
    pub flags: u32,
    /// First text argument.
    pub arg0: Vec<u8>,
    /// Second text argument.
    pub arg1: Vec<u8>,
    /// Number argument.
    pub number: i64,
}

/// Name of a kind of tokenizer: `BPE`, `Unigram`, `WordPiece`, `RWKV`.
pub(super) fn kind_name(kind: u32) -> &'static str {
    match kind {
        1 => "BPE",
        2 => "Unigram",
        3 => "WordPiece",
        4 => "RWKV",
        _ => "unknown",
    }
}

impl Step {
    /// Name of what it does.
    pub fn name(&self) -> &'static str {
        match self.kind {
            1 => "NFC",
            2 => "NFKC",
            3 => "NFD",
            4 => "NFKD",
            5 => "lowercase",
            6 => "strip",
            7 => "replace",
            8 => "prepend",
            32 => "split as bytes",
            33 => "split",
            34 => "split at metaspace",
            35 => "split at whitespace",
            36 => "split at punctuation",
            37 => "split at digits",
            38 => "bytes for unknown text",
            64 => "decode bytes",
            65 => "decode metaspace",
            66 => "decode replace",
            67 => "decode strip",
            68 => "decode fuse",
            69 => "decode byte tokens",
            _ => "unknown step",
        }
    }
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({}, flags {}", self.name(), self.kind, self.flags)?;
        for text in [&self.arg0, &self.arg1].into_iter().filter(|t| !t.is_empty()) {
            write!(f, ", `{}`", String::from_utf8_lossy(text).escape_debug())?;
        }
        match self.number {
            0 => f.write_str(")"),
            n => write!(f, ", {n})"),
        }
    }
}

/// Token types that exist.
pub(super) const TOKEN_TYPES: [u8; 5] = [1, 2, 3, 4, 6];

/// Whether a step kind is one that engines know.
pub(super) fn known_step(kind: u32) -> bool {
    matches!(kind, 1..=8 | 32..=38 | 64..=69)
}

/// A vocabulary whose strings have their offsets; arrays still lack the section's.
#[derive(Debug, Clone)]
pub(super) struct VocabPlan {
    row: VocabRow,
    /// Everything after the header.
    body: Vec<u8>,
}

impl Vocab {
    /// Reports everything that a reader refuses or that makes radiance's tools fail.
    pub(super) fn check(&self, problems: &mut Problems) {
        let mut say = |ok: bool, message: String| {
            if !ok {
                problems.push(Diagnostic::new("vocabulary", message));
            }
        };
        let n = self.tokens.len();
        say((1..=4).contains(&self.kind), format!("kind {} is not 1 to 4", self.kind));
        say(u32::try_from(n).is_ok(), format!("{n} tokens exceed 32 bits"));
        for (name, len) in [("scores", self.scores.len()), ("types", self.types.len())] {
            say(len == 0 || len == n, format!("{len} {name} for {n} tokens"));
        }
        for t in self.types.iter().filter(|t| !TOKEN_TYPES.contains(t)).take(1) {
            say(false, format!("token type {t} does not exist"));
        }
        for m in self.merges.iter().filter(|m| m.iter().any(|&t| t as usize >= n)).take(1) {
            say(false, format!("a merge of tokens {} and {} of {n}", m[0], m[1]));
        }
        for s in self.steps.iter().filter(|s| !known_step(s.kind)).take(1) {
            say(false, format!("step kind {} does not exist", s.kind));
        }
        for s in self.specials.iter().filter(|&&s| s < -1 || i64::from(s) >= n as i64).take(1) {
            say(false, format!("special token {s} of {n}"));
        }
        let texts = self.tokens.iter().chain([&self.chat_template]);
        let args = self.steps.iter().flat_map(|s| [&s.arg0, &s.arg1]);
        say(!texts.chain(args).any(|t| t.contains(&0)), "a text holds NUL".into());
    }

    /// Interns the strings (token texts in id order, each step's arguments, the chat template) and lays out the
    /// arrays.
    pub(super) fn plan(&self, strings: &mut Interner) -> VocabPlan {
        let mut body = Vec::new();
        let mut arrays = [0u64; 5];
        // Array offsets count from the section's start here; `encode` adds the section's own offset, a multiple of 8.
        let mut begin = |k: usize, align: usize, body: &mut Vec<u8>, present: bool| {
            if present {
                body.resize(body.len().next_multiple_of(align), 0);
                arrays[k] = VOCAB_BYTES + body.len() as u64;
            }
        };
        begin(0, 8, &mut body, !self.tokens.is_empty());
        for token in &self.tokens {
            strings.add(token).put(&mut body);
        }
        begin(1, 4, &mut body, !self.scores.is_empty());
        self.scores.iter().for_each(|s| s.put(&mut body));
        begin(2, 1, &mut body, !self.types.is_empty());
        body.extend_from_slice(&self.types);
        begin(3, 4, &mut body, !self.merges.is_empty());
        self.merges.iter().for_each(|m| m.put(&mut body));
        begin(4, 8, &mut body, !self.steps.is_empty());
        for s in &self.steps {
            let (arg0, arg1) = (strings.add(&s.arg0), strings.add(&s.arg1));
            StepRow { kind: s.kind, flags: s.flags, arg0, arg1, iarg: s.number }.put(&mut body);
        }
        let row = VocabRow {
            kind: self.kind,
            n_tokens: self.tokens.len() as u32,
            n_merges: self.merges.len() as u32,
            n_steps: self.steps.len() as u32,
            arrays,
            specials: self.specials,
            add_bos: u32::from(self.add_bos),
            add_eos: u32::from(self.add_eos),
            chat_template: strings.add(&self.chat_template),
            reserved: [0; 4],
        };
        VocabPlan { row, body }
    }
}

impl VocabPlan {
    /// Bytes of the section.
    pub(super) fn bytes(&self) -> u64 {
        VOCAB_BYTES + self.body.len() as u64
    }

    /// The section, placed at `offset`.
    pub(super) fn encode(&self, offset: u64, out: &mut Vec<u8>) {
        let mut row = self.row;
        for array in row.arrays.iter_mut().filter(|a| **a != 0) {
            *array += offset;
        }
        row.put(out);
        out.extend_from_slice(&self.body);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_stand_in_order_at_their_alignment() {
        let vocab = Vocab {
            kind: 2,
            tokens: vec![b"a".to_vec(), b"b".to_vec(), b"a".to_vec()],
            scores: vec![0.5; 3],
            types: vec![1, 2, 6],
            merges: vec![[0, 2]],
            steps: vec![Step { kind: 8, flags: 1, arg0: b"b".to_vec(), arg1: vec![], number: -1 }],
            specials: [-1; 6],
            add_bos: true,
            add_eos: false,
            chat_template: b"t".to_vec(),
        };
        let mut problems = Problems::new();
        vocab.check(&mut problems);
        assert!(problems.is_empty());
        let mut strings = Interner::new();
        let plan = vocab.plan(&mut strings);
        let mut out = Vec::new();
        plan.encode(1000, &mut out);
        assert_eq!(out.len() as u64, plan.bytes());
        let words: Vec<u64> = super::super::tables::u64s(&out[16..56]).collect();
        // 3 texts of 8, 3 scores of 4, 3 types, one merge at a multiple of 4, one step at a multiple of 8.
        assert_eq!(words, [1128, 1152, 1164, 1168, 1176]);
        assert_eq!(out.len(), 176 + 32);
        assert_eq!(strings.into_blob(), b"\0a\0b\0t\0");
    }

    #[test]
    fn faults_are_reported_together() {
        let vocab = Vocab {
            kind: 9,
            tokens: vec![b"a\0".to_vec()],
            scores: vec![0.0; 2],
            types: vec![5],
            merges: vec![[0, 1]],
            steps: vec![Step { kind: 9, flags: 0, arg0: vec![], arg1: vec![], number: 0 }],
            specials: [1, -1, -1, -1, -1, -1],
            add_bos: false,
            add_eos: false,
            chat_template: vec![],
        };
        let mut problems = Problems::new();
        vocab.check(&mut problems);
        let found: Vec<String> = problems.into_vec().into_iter().map(|d| d.message).collect();
        assert_eq!(
            found,
            [
                "kind 9 is not 1 to 4",
                "2 scores for 1 tokens",
                "token type 5 does not exist",
                "a merge of tokens 0 and 1 of 1",
                "step kind 9 does not exist",
                "special token 1 of 1",
                "a text holds NUL"
            ]
        );
    }
}
