//! How far a model's answers are from those of a reference: Kullback-Leibler divergence over the whole vocabulary.

use std::collections::BTreeMap;

use rayon::prelude::*;
use serde::Deserialize;

use super::engine::Engine;
use super::executor::View;
use super::text::Tokenizer;
use super::value::fault;
use crate::diag::{Diagnostic, Failure, FailureKind, Problems, Result};

/// One document of a corpus: a line of JSON.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Document {
    /// What figures are summed by, e.g. `code`.
    pub source: String,
    /// A text, every token of which is scored; or
    #[serde(default)]
    pub text: Option<String>,
    /// what is read first and not scored,
    #[serde(default)]
    pub prompt: Option<String>,
    /// with what is scored.
    #[serde(default)]
    pub answer: Option<String>,
}

impl Document {
    fn sound(&self) -> bool {
        matches!(
            (&self.text, &self.prompt, &self.answer),
            (Some(_), None, None) | (None, Some(_), Some(_))
        )
    }
}

/// Tokens that are run together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    /// The document's source.
    pub source: String,
    /// The tokens.
    pub tokens: Vec<u64>,
    /// The first token that is scored, at least 1.
    pub scored: usize,
}

/// One scored token.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Token {
    divergence: f64,
    agrees: bool,
    reference: f64,
    model: f64,
}

/// Figures of scored tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// Scored tokens.
    pub tokens: usize,
    /// Mean of the divergence of the model from the reference at a token, in nats.
    pub mean: f64,
    /// Its median.
    pub median: f64,
    /// Its 99th percentile, nearest rank.
    pub p99: f64,
    /// Its maximum.
    pub max: f64,
    /// Share of tokens where both find the same token most likely.
    pub agreement: f64,
    /// Perplexity of the reference on the scored tokens.
    pub reference_perplexity: f64,
    /// Perplexity of the model.
    pub perplexity: f64,
    /// The one over the other.
    pub perplexity_ratio: f64,
}

/// A corpus measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Evaluation {
    /// All tokens.
    pub overall: Score,
    /// By source.
    pub sources: BTreeMap<String, Score>,
}

/// Reads a corpus: one JSON object a line.
///
/// # Errors
/// Every line that is no document.
pub fn read_corpus(bytes: &[u8]) -> Result<Vec<Document>> {
    let mut problems = Problems::new();
    let mut documents = Vec::new();
    for (n, line) in bytes.split(|b| *b == b'\n').enumerate() {
        if line.trim_ascii().is_empty() {
            continue;
        }
        let mut say = |why: String| {
            problems
                .push(Diagnostic::new("corpus", format!("line {}: {why}", n + 1)).help(
                    r#"{"source": …, "text": …} or {"source": …, "prompt": …, "answer": …}"#,
                ));
        };
        match serde_json::from_slice::<Document>(line) {
            Ok(document) if document.sound() => documents.push(document),
            Ok(_) => say("it is neither a text nor a prompt with an answer".to_owned()),
            Err(e) => say(e.to_string()),
        }
    }
    if documents.is_empty() && problems.is_empty() {
        problems.push(Diagnostic::new("corpus", "it has no documents"));
    }
    problems.finish(FailureKind::Usage, "this corpus cannot be read", documents)
}

/// Cuts documents into windows of at most `length` tokens (at least 2); a prompt stays with the beginning of its answer,
/// and loses its own beginning where both are too long.
///
/// # Errors
/// Texts that the tokenizer cannot read.
pub fn windows(
    documents: &[Document],
    tokenizer: &Tokenizer,
    length: usize,
) -> Result<Vec<Window>> {
    let length = length.max(2);
    let mut out = Vec::new();
    for document in documents {
        let (mut tokens, mut scored) = match (&document.text, &document.prompt) {
            (Some(text), _) => (tokenizer.tokens(text, true)?, 1),
            (None, Some(prompt)) => {
                let tokens = tokenizer.tokens(prompt, true)?;
                let scored = tokens.len().max(1);
                (tokens, scored)
            }
            (None, None) => continue,
        };
        if let Some(answer) = &document.answer {
            tokens.extend(tokenizer.tokens(answer, false)?);
        }
        let surplus = scored.saturating_sub(length / 2);
        tokens.drain(..surplus.min(tokens.len()));
        scored -= surplus.min(scored - 1);
        for (n, part) in tokens.chunks(length).enumerate() {
            let scored = if n == 0 { scored } else { 1 };
            if part.len() > scored {
                let (source, tokens) = (document.source.clone(), part.to_vec());
                out.push(Window { source, tokens, scored });
            }
        }
    }
    Ok(out)
}

/// Runs both models over the windows, each in a sequence of its own. `done` is told of every window's tokens.
///
/// # Errors
/// As [`Engine::prefill_all`]; vocabularies of different sizes; no window.
pub fn evaluate(
    reference: &mut Engine<'_>,
    model: &mut Engine<'_>,
    windows: &[Window],
    done: &mut dyn FnMut(usize),
) -> Result<Evaluation> {
    let mut all = Vec::new();
    let mut sources: BTreeMap<String, Vec<Token>> = BTreeMap::new();
    for window in windows {
        let view = View { all_rows: true, layers: false };
        let logits = |engine: &mut Engine<'_>| {
            engine.release(0);
            engine.extend(0, &window.tokens, &[], &view).map(|rows| rows.logits)
        };
        let (expected, found) = (logits(reference)?, logits(model)?);
        let columns = found.len() / window.tokens.len().max(1);
        if expected.len() != found.len() || columns == 0 {
            let [a, b] = [&expected, &found].map(|l| l.len() / window.tokens.len().max(1));
            let problem = Diagnostic::new(
                "eval",
                format!("the reference has a vocabulary of {a}, the file one of {b}"),
            );
            let headline = "these models cannot be compared";
            return Err(Failure::one(FailureKind::Refused, headline, problem));
        }
        let rows = expected.par_chunks_exact(columns).zip(found.par_chunks_exact(columns));
        let next = window.tokens.get(window.scored..).unwrap_or_default();
        let rows = rows.skip(window.scored.saturating_sub(1)).zip(next);
        // Each row is summed by one thread, in the order of the vocabulary.
        let scored: Vec<Option<Token>> = rows.map(|((p, q), next)| token(p, q, *next)).collect();
        let own = sources.entry(window.source.clone()).or_default();
        for token in scored {
            let token = token.ok_or_else(|| fault("no finite logits"))?;
            own.push(token);
            all.push(token);
        }
        done(window.tokens.len());
    }
    let nothing = || {
        let problem = Diagnostic::new("eval", "no document has a token to score");
        Failure::one(FailureKind::Refused, "these models cannot be compared", problem)
    };
    let overall = score(&all).ok_or_else(nothing)?;
    let sources = sources.into_iter().filter_map(|(name, t)| Some((name, score(&t)?)));
    Ok(Evaluation { overall, sources: sources.collect() })
}

/// Logarithm of the sum of exponentials, in f64 and in the order of the vocabulary.
fn log_sum(row: &[f32]) -> (f64, usize) {
    let (mut best, mut at) = (f32::NEG_INFINITY, 0);
    for (n, v) in row.iter().enumerate() {
        if *v > best {
            (best, at) = (*v, n);
        }
    }
    let best = f64::from(best);
    let sum: f64 = row.iter().map(|v| (f64::from(*v) - best).exp()).sum();
    (best + sum.ln(), at)
}

fn token(reference: &[f32], model: &[f32], next: u64) -> Option<Token> {
    let ((p_sum, p_top), (q_sum, q_top)) = (log_sum(reference), log_sum(model));
    let divergence: f64 = reference
        .iter()
        .zip(model)
        .map(|(p, q)| {
            let (p, q) = (f64::from(*p) - p_sum, f64::from(*q) - q_sum);
            p.exp() * (p - q)
        })
        .sum();
    let next = usize::try_from(next).ok()?;
    let token = Token {
        // Rounding can leave a divergence of equal rows just below zero.
        divergence: divergence.max(0.0),
        agrees: p_top == q_top,
        reference: p_sum - f64::from(*reference.get(next)?),
        model: q_sum - f64::from(*model.get(next)?),
    };
    let finite = divergence.is_finite() && token.reference.is_finite() && token.model.is_finite();
    finite.then_some(token)
}

fn score(tokens: &[Token]) -> Option<Score> {
    let mut sorted: Vec<f64> = tokens.iter().map(|t| t.divergence).collect();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    let mean = |of: fn(&Token) -> f64| tokens.iter().map(of).sum::<f64>() / n as f64;
    let (low, high) = (sorted.get(n.saturating_sub(1) / 2)?, sorted.get(n / 2)?);
    let (reference, model) = (mean(|t| t.reference), mean(|t| t.model));
    Some(Score {
        tokens: n,
        mean: mean(|t| t.divergence),
        median: (low + high) / 2.0,
        p99: *sorted.get((n * 99).div_ceil(100).saturating_sub(1))?,
        max: *sorted.last()?,
        agreement: mean(|t| f64::from(u8::from(t.agrees))),
        reference_perplexity: reference.exp(),
        perplexity: model.exp(),
        perplexity_ratio: (model - reference).exp(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_of_two_rows_is_what_its_formula_gives() {
        let ln = |p: [f32; 3]| p.map(f32::ln);
        let t = token(&ln([0.5, 0.25, 0.25]), &ln([0.25, 0.5, 0.25]), 1).expect("finite");
        let expected = 0.5 * 2f64.ln() + 0.25 * 0.5f64.ln();
        assert!((t.divergence - expected).abs() < 1e-7, "{}", t.divergence);
        assert!(!t.agrees);
        assert!((t.reference - 4f64.ln()).abs() < 1e-7 && (t.model - 2f64.ln()).abs() < 1e-7);
        // A constant added to all logits changes nothing.
        let row = [3.0, 5.0, -2.0];
        let same = token(&row, &row.map(|v| v + 7.0), 0).expect("finite");
        assert!(same.divergence < 1e-12 && same.agrees);
        assert!(token(&[f32::NAN, 0.0], &[0.0, 0.0], 0).is_none());
        assert!(token(&[0.0, 0.0], &[0.0, 0.0], 2).is_none());
    }

    #[test]
    fn figures_are_those_of_the_sorted_divergences() {
        let tokens: Vec<Token> = (1..=200)
            .map(|n| Token {
                divergence: f64::from(n),
                agrees: n % 4 == 0,
                reference: 1.0,
                model: 1.5,
            })
            .collect();
        let s = score(&tokens).expect("tokens");
        assert_eq!((s.mean, s.median, s.p99, s.max), (100.5, 100.5, 198.0, 200.0));
        assert_eq!((s.tokens, s.agreement), (200, 0.25));
        assert!((s.perplexity_ratio - 0.5f64.exp()).abs() < 1e-12);
        assert_eq!(score(&[]), None);
    }

    #[test]
    fn lines_that_are_no_documents_are_listed_together() {
        let failure = read_corpus(b"{\"source\":\"a\",\"text\":\"x\"}\n\n{\"source\":\"a\"}\n{]\n")
            .expect_err("two bad lines");
        let said: Vec<&str> = failure.problems.iter().map(|p| p.message.as_str()).collect();
        assert_eq!(said[0], "line 3: it is neither a text nor a prompt with an answer");
        assert!(said[1].starts_with("line 4: "), "{said:?}");
        assert_eq!(said.len(), 2);
        let one =
            read_corpus(b"{\"source\":\"a\",\"prompt\":\"x\",\"answer\":\"y\"}").expect("one");
        assert_eq!(one[0].answer.as_deref(), Some("y"));
        assert!(read_corpus(b"\n").is_err());
    }
}
