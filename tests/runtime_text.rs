//! The compiled programs of every tiny model give what transformers gives, on one device and on several.

mod runtime_support;

use radpack::runtime::greedy;
use runtime_support::{Loaded, Reference, TARGETS, TOLERANCE, difference};

#[test]
fn text_agrees_with_transformers_in_logits_hidden_states_and_greedy_tokens() {
    for name in TARGETS {
        let loaded = Loaded::new(name);
        let reference = Reference::of(name);
        let tokens = reference.tokens("text.input_ids");
        let layers = loaded.model.spec.text.layers.len();
        let mut ran = Vec::new();
        for devices in [1, 2, 4, 16] {
            let Some(mut engine) = loaded.on(devices) else { continue };
            let rows =
                engine.prefill_all(0, &tokens, &[]).unwrap_or_else(|f| panic!("{name}\n{f}"));
            let logits = difference(&rows.logits, reference.floats("text.logits"));
            assert_eq!(rows.layers.len(), layers + 1, "{name}");
            let hidden =
                rows.layers.iter().enumerate().map(|(n, layer)| {
                    difference(layer, reference.floats(&format!("text.hidden.{n}")))
                });
            let hidden = hidden.fold(0.0, f32::max);
            println!("{name:22} {devices:2} devices: logits {logits:.1e}, hidden {hidden:.1e}");
            assert!(logits < TOLERANCE, "{name} on {devices}: logits differ by {logits}");
            assert!(hidden < TOLERANCE, "{name} on {devices}: hidden states differ by {hidden}");
            let said = engine.generate(0, &tokens, &[], 16, &[]).unwrap_or_else(|f| panic!("{f}"));
            assert_eq!(said, reference.tokens("text.greedy_ids"), "{name} on {devices}");
            let last = rows.logits.chunks_exact(rows.logits.len() / tokens.len()).next_back();
            assert_eq!(greedy(last.expect("rows")), said[0]);
            ran.push(devices);
        }
        assert_eq!(ran, [1, 2, 4, 16], "{name}");
    }
}
