//! Draft heads: their steps agree with transformers, and text with their help is the same text.

mod runtime_support;

use radpack::graph::Sizes;
use radpack::runtime::{Drafting, Engine, Verify, greedy};
use runtime_support::{KEEP, Loaded, Reference, TOLERANCE, difference};

const PAIRS: [(&str, &str); 2] =
    [("tiny-gemma4-dense", "tiny-gemma4-assistant"), ("tiny-gemma4-e", "tiny-gemma4-e-assistant")];

/// Largest differences of logits and projected states over four steps, whose tokens have to be the same.
fn steps(engine: &mut Engine<'_>, head: &str) -> (f32, f32) {
    let reference = Reference::of(head);
    let tokens = reference.tokens("draft.input_ids");
    let logits = engine.prefill(0, &tokens, &[]).unwrap_or_else(|f| panic!("{f}"));
    let first = greedy(&logits);
    assert_eq!(reference.tokens("draft.first_token"), [first]);
    let proposals = engine.propose(0, first, 4).unwrap_or_else(|f| panic!("{f}"));
    let said: Vec<u64> = proposals.iter().map(|p| p.token).collect();
    assert_eq!(said, reference.tokens("draft.tokens"), "{head}");
    let (mut logits, mut projected) = (0.0f32, 0.0f32);
    for (n, p) in proposals.iter().enumerate() {
        let wanted = |what: &str| reference.floats(&format!("draft.{n}.{what}")).to_vec();
        logits = logits.max(difference(&p.logits, &wanted("logits")));
        projected = projected.max(difference(&p.hidden, &wanted("projected")));
    }
    (logits, projected)
}

#[test]
fn draft_steps_agree_with_transformers() {
    for (target, head) in PAIRS {
        let loaded = Loaded::with_draft(target, Some(head));
        for devices in [1, 2, 4, 16] {
            let mut engine = loaded.on(devices).expect("it splits");
            let (logits, projected) = steps(&mut engine, head);
            println!(
                "{head:24} {devices:2} devices: logits {logits:.1e}, projected {projected:.1e}"
            );
            assert!(logits < TOLERANCE, "{head} on {devices}: logits differ by {logits}");
            assert!(projected < TOLERANCE, "{head} on {devices}: states differ by {projected}");
        }
        // Programs that look embeddings up themselves, with slots that are positions.
        let sizes = Sizes {
            embeds: false,
            aligned: false,
            image_prefill: Vec::new(),
            soft_tokens: Vec::new(),
            decoder_batch_sizes: vec![4],
            ..loaded.sizes()
        };
        let compiled = loaded.compile(KEEP, &sizes, 2, &[0]).expect("it splits");
        let (logits, projected) = steps(&mut loaded.engine(compiled), head);
        assert!(logits.max(projected) < TOLERANCE, "{head}: {logits} {projected}");
    }
}

#[test]
fn text_with_a_draft_head_is_the_same_text() {
    for (target, head) in PAIRS {
        let loaded = Loaded::with_draft(target, Some(head));
        let tokens = Reference::of(target).tokens("text.input_ids");
        let mut engine = loaded.on(1).expect("one device");
        // Long enough that rings of 8 + 1 + 4 positions wrap several times.
        let alone = engine.generate(0, &tokens, &[], 50, &[]).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(alone[..16], Reference::of(target).tokens("text.greedy_ids"));
        for verify in [Verify::Steps, Verify::Chunk] {
            for count in [1, 4] {
                let drafting = Drafting { tokens: count, verify };
                let drafted = engine
                    .generate_drafted(0, &tokens, &[], 50, &[], drafting)
                    .unwrap_or_else(|f| panic!("{f}"));
                assert_eq!(drafted.tokens, alone, "{target} {drafting:?}");
                assert!(drafted.proposed >= 40 && drafted.accepted <= drafted.proposed);
            }
        }
        let stop = [alone[7]];
        let end = alone.iter().position(|t| *t == stop[0]).expect("it is there") + 1;
        let drafting = Drafting { tokens: 3, verify: Verify::Chunk };
        let stopped = engine.generate_drafted(0, &tokens, &[], 50, &stop, drafting);
        assert_eq!(stopped.expect("it runs").tokens, alone[..end]);
        assert_eq!(engine.generate(0, &tokens, &[], 50, &stop).expect("it runs"), alone[..end]);
    }
}

#[test]
fn proposals_are_kept_as_far_as_the_target_says_them_too() {
    for (target, head) in PAIRS {
        let loaded = Loaded::with_draft(target, Some(head));
        let tokens = Reference::of(target).tokens("text.input_ids");
        let mut engine = loaded.on(1).expect("one device");
        let alone = engine.generate(0, &tokens, &[], 60, &[]).unwrap_or_else(|f| panic!("{f}"));
        for verify in [Verify::Steps, Verify::Chunk] {
            engine.prefill(0, &tokens, &[]).unwrap_or_else(|f| panic!("{f}"));
            let mut said = vec![alone[0]];
            // Right for 0 to 4 tokens, then wrong: what was rejected must leave no trace.
            for right in [4, 0, 2, 1, 3, 0, 4, 2, 0, 1, 4, 3] {
                let at = said.len();
                let newest = said[at - 1];
                let proposed: Vec<u64> = (0..4)
                    .map(|n| if n < right { alone[at + n] } else { (alone[at + n] + 1) % 400 })
                    .collect();
                let more = engine
                    .verify(0, newest, &proposed, &[], verify)
                    .unwrap_or_else(|f| panic!("{f}"));
                assert_eq!(more, alone[at..=at + right], "{target} {verify:?} after {at}");
                said.extend(more);
                assert_eq!(engine.length(0), (tokens.len() + said.len() - 1) as u64);
            }
            // The hidden state that the next proposals start from is that of the last token kept.
            let newest = said[said.len() - 1];
            let after = engine.propose(0, newest, 2).unwrap_or_else(|f| panic!("{f}"));
            let mut fed = tokens.clone();
            fed.extend(&said[..said.len() - 1]);
            engine.prefill(1, &fed, &[]).unwrap_or_else(|f| panic!("{f}"));
            let fresh = engine.propose(1, newest, 2).unwrap_or_else(|f| panic!("{f}"));
            for (a, b) in after.iter().zip(&fresh) {
                assert_eq!(a.token, b.token);
                let logits = difference(&a.logits, &b.logits);
                assert!(logits < TOLERANCE, "{target} {verify:?}: {logits}");
            }
        }
    }
}

#[test]
fn a_model_without_a_draft_head_proposes_nothing() {
    let loaded = Loaded::new("tiny-llama");
    let mut engine = loaded.on(1).expect("one device");
    engine.prefill(0, &[5, 6], &[]).expect("it runs");
    let refusal = engine.propose(0, 7, 2).expect_err("a refusal");
    assert_eq!(refusal.problems[0].message, "there is no draft program");
}
