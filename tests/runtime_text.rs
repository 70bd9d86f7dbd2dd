//! The compiled programs of every tiny model give what transformers gives, on one device and on several.

mod runtime_support;

use std::sync::Arc;

use radpack::artifact::Artifact;
use radpack::graph::{self, Node, Op, Programs, Projection, Sizes, ValueId};
use radpack::runtime::{ArtifactWeights, Engine, Memory, Placed, Rows, greedy};
use runtime_support::{Compiled, KEEP, Loaded, Reference, TARGETS, TOLERANCE, difference};

/// Groups of 16 codes: shares of MLPs are whole groups, so they come out unequal and are padded.
const INT8_G16: &str = "schema = 1\n[[quantize]]\nclass = [\"linear\", \"expert\"]\nencoding = { codes = \"i8\", scale = \"bf16\", group = 16 }\n";

fn all_rows(engine: &mut Engine<'_>, tokens: &[u64]) -> Rows {
    engine.prefill_all(0, tokens, &[]).unwrap_or_else(|f| panic!("{f}"))
}

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
            let rows = all_rows(&mut engine, &tokens);
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

/// Checks logits of all rows and 16 tokens of a model compiled for these sizes.
fn agrees(loaded: &Loaded, name: &str, compiled: Compiled) {
    let reference = Reference::of(name);
    let tokens = reference.tokens("text.input_ids");
    let what = format!("{name} {:?}", compiled.sizes);
    let mut engine = loaded.engine(compiled);
    let rows = all_rows(&mut engine, &tokens);
    let logits = difference(&rows.logits, reference.floats("text.logits"));
    assert!(logits < TOLERANCE, "{what}: logits differ by {logits}");
    let said = engine.generate(0, &tokens, &[], 16, &[]).unwrap_or_else(|f| panic!("{f}"));
    assert_eq!(said, reference.tokens("text.greedy_ids"), "{what}");
}

#[test]
fn chunks_of_any_size_and_blocks_of_any_size_give_the_same() {
    // Chunks of one row; chunks across blocks; a chunk longer than window and prompt; one block for all.
    for (chunk, block) in [(1, 4), (5, 32), (12, 32), (64, 80), (16, 160)] {
        for name in ["tiny-llama", "tiny-mistral", "tiny-gemma3", "tiny-gemma4-dense"] {
            let loaded = Loaded::new(name);
            let mut sizes = Sizes { prefill_chunk: chunk, block, ..loaded.sizes() };
            sizes.image_prefill.clear();
            let devices = if chunk == 5 { 4 } else { 1 };
            let compiled = loaded.compile(KEEP, &sizes, devices, &[0]).expect("it splits");
            agrees(&loaded, name, compiled);
        }
    }
}

#[test]
fn graphs_look_embeddings_up_as_the_host_does() {
    // Among the tokens that tiny-gemma4-moe says is the placeholder of sound, which is looked up as padding.
    assert!(Reference::of("tiny-gemma4-moe").tokens("text.greedy_ids").contains(&501));
    for name in ["tiny-gemma4-dense", "tiny-gemma4-e", "tiny-gemma4-moe"] {
        for devices in [1, 4] {
            let loaded = Loaded::new(name);
            let sizes = Sizes {
                embeds: false,
                aligned: false,
                image_prefill: Vec::new(),
                soft_tokens: Vec::new(),
                ..loaded.sizes()
            };
            let compiled = loaded.compile(KEEP, &sizes, devices, &[0]).expect("it splits");
            agrees(&loaded, name, compiled);
        }
    }
}

#[test]
fn padded_shares_add_nothing() {
    let mut padded = Vec::new();
    for name in TARGETS {
        let loaded = Loaded::new(name);
        for devices in [2, 4, 16] {
            let sizes = loaded.sizes();
            let Some(compiled) = loaded.compile(INT8_G16, &sizes, devices, &[0]) else { continue };
            let uneven = compiled.placement.weights.iter().any(|(name, weight)| {
                let shares = weight.cut.shares();
                name.contains("ffn_down")
                    && shares.is_some_and(|(_, s)| s.spans.iter().any(|span| span.len < s.extent))
            });
            if uneven {
                padded.push(format!("{name} on {devices}"));
                // The checkpoint's own values in the shares of the quantized ones.
                agrees(&loaded, name, compiled);
            }
        }
    }
    let expected = [
        "tiny-gemma3 on 16",
        "tiny-gemma3-vision on 16",
        "tiny-gemma4-e on 4",
        "tiny-gemma4-e on 16",
        "tiny-gemma4-moe on 2",
        "tiny-gemma4-moe on 4",
        "tiny-gemma4-moe on 16",
        "tiny-gemma4-unified on 2",
        "tiny-gemma4-unified on 4",
        "tiny-gemma4-unified on 16",
        "tiny-llama on 2",
        "tiny-llama on 4",
        "tiny-mistral on 2",
        "tiny-mistral on 4",
        "tiny-qwen3 on 16",
    ];
    assert_eq!(padded, expected);
}

#[test]
fn an_artifact_runs_alike_on_any_number_of_devices() {
    for name in ["tiny-llama", "tiny-mistral"] {
        let folder = tempfile::tempdir().expect("a folder");
        let recipe = folder.path().join("int8.toml");
        std::fs::write(&recipe, INT8_G16).expect("writes");
        let out = folder.path().join("m.rad");
        assert_cmd::Command::cargo_bin("radpack")
            .expect("a binary")
            .args(["convert".as_ref(), testkit::tiny_model(name).as_os_str(), "--recipe".as_ref()])
            .args([recipe.as_os_str(), "-o".as_ref(), out.as_os_str()])
            .assert()
            .success();
        let artifact = Arc::new(Artifact::open(&out).expect("opens"));
        let loaded = Loaded::new(name);
        let tokens = Reference::of(name).tokens("text.input_ids");
        let logits = |devices: u32, memory: u64| {
            let compiled =
                loaded.compile(INT8_G16, &loaded.sizes(), devices, &[0]).expect("it splits");
            let weights = ArtifactWeights::new(Arc::clone(&artifact));
            let placed = Placed::new(weights, compiled.placement);
            let spec = &loaded.model.spec;
            let memory = Memory { blocks: 20, weights: memory };
            let mut engine = Engine::new(compiled.programs, &compiled.sizes, spec, placed, memory)
                .unwrap_or_else(|f| panic!("{f}"));
            all_rows(&mut engine, &tokens).logits
        };
        let one = logits(1, 1 << 30);
        for devices in [2, 4] {
            let many = logits(devices, 1 << 30);
            assert!(difference(&one, &many) < TOLERANCE, "{name} on {devices}");
        }
        // Codes of 8 bits are close to, and not the same as, the checkpoint.
        let source = difference(&one, Reference::of(name).floats("text.logits"));
        assert!((0.01..1.0).contains(&source), "{name}: {source}");
        // Weights that are not kept are decoded to the same values.
        assert_eq!(logits(1, 0), one, "{name}");
    }
}

#[test]
fn sequences_of_different_lengths_decode_together() {
    for (name, devices) in
        [("tiny-llama", 1), ("tiny-mistral", 4), ("tiny-gemma4-dense", 4), ("tiny-gemma4-e", 1)]
    {
        let loaded = Loaded::new(name);
        let prompt = Reference::of(name).tokens("text.input_ids");
        let prompts = [&prompt[..], &prompt[..23], &prompt[..9], &prompt[3..34]];
        let mut engine = loaded.on(devices).expect("it splits");
        let alone: Vec<Vec<u64>> = prompts
            .iter()
            .map(|p| engine.generate(0, p, &[], 14, &[]).unwrap_or_else(|f| panic!("{f}")))
            .collect();
        engine.release(0);
        assert_eq!(engine.free_blocks(), 20, "{name}");
        let mut texts: Vec<Vec<u64>> = prompts
            .iter()
            .enumerate()
            .map(|(slot, p)| {
                let logits = engine.prefill(slot, p, &[]).unwrap_or_else(|f| panic!("{f}"));
                vec![greedy(&logits)]
            })
            .collect();
        // Four, three (whose padding row finds every ring in use), two, one at a time, in any order of slots.
        let turns: [&[usize]; 7] =
            [&[0, 1, 2, 3], &[3, 0, 2], &[1, 2], &[2], &[1, 0, 3], &[3, 2, 1, 0], &[0]];
        for turn in turns.iter().cycle().take(21) {
            let step: Vec<(usize, u64)> =
                turn.iter().map(|s| (*s, texts[*s][texts[*s].len() - 1])).collect();
            let rows = engine.decode(&step).unwrap_or_else(|f| panic!("{f}"));
            for (slot, row) in turn.iter().zip(rows) {
                texts[*slot].push(greedy(&row));
            }
        }
        for (text, alone) in texts.iter().zip(&alone) {
            let n = text.len().min(alone.len());
            assert!(n > 9, "{name}: {n}");
            assert_eq!(text[..n], alone[..n], "{name} on {devices}");
        }
        // A slot that ends makes room: its ring takes padding rows, its blocks the next sequence.
        engine.release(3);
        let step: Vec<(usize, u64)> = (0..3).map(|s| (s, texts[s][texts[s].len() - 1])).collect();
        let with_room = engine.decode(&step).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(with_room.len(), 3);
        let again = engine.generate(3, prompts[3], &[], 14, &[]).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(again, alone[3], "{name}");
    }
}

#[test]
fn neither_threads_nor_time_change_a_bit() {
    let loaded = Loaded::new("tiny-gemma4-moe");
    let tokens = Reference::of("tiny-gemma4-moe").tokens("text.input_ids");
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        pool.install(|| all_rows(&mut loaded.on(4).expect("it splits"), &tokens))
    };
    let first = run(1);
    assert_eq!(first, run(3));
    assert_eq!(first, run(2));
}

#[test]
fn what_cannot_run_is_refused_with_its_reason() {
    let loaded = Loaded::new("tiny-gemma4-e");
    let mut engine = loaded.on(1).expect("one device");
    let mut said = |slot: usize, tokens: &[u64]| {
        let failure = engine.prefill(slot, tokens, &[]).expect_err("a refusal");
        assert_eq!(failure.kind, radpack::diag::FailureKind::Refused);
        failure.problems[0].message.clone()
    };
    let sound = Reference::of("tiny-gemma4-e").tokens("audio.input_ids");
    assert_eq!(said(0, &sound), "token 501 stands for sound, and no program takes sound");
    assert_eq!(said(0, &[5, 512]), "token 512 of a vocabulary of 512");
    assert_eq!(said(4, &[5]), "slot 4 of programs for 4 sequences");
    assert_eq!(said(0, &[5, 498, 7]), "the prompt has 1 runs of image tokens for 0 images");
    assert_eq!(said(0, &[7; 161]), "176 cache slots are needed, the longest sequence has 160");
    assert_eq!(said(0, &[]), "the request has no tokens");

    let loaded = Loaded::new("tiny-llama");
    let mut engine = loaded.on(1).expect("one device");
    engine.prefill(0, &[7; 158], &[]).expect("it fits");
    for _ in 0..2 {
        engine.decode(&[(0, 7)]).expect("it fits");
    }
    let full = engine.decode(&[(0, 7)]).expect_err("a refusal");
    assert_eq!(
        full.problems[0].message,
        "the sequence of slot 0 holds 160 slots, all that there are"
    );
    let none = engine.decode(&[(1, 7)]).expect_err("a refusal");
    assert_eq!(none.problems[0].message, "slot 1 has no sequence");
    let twice = engine.decode(&[(0, 7), (0, 7)]).expect_err("a refusal");
    assert!(!twice.problems.is_empty());

    let compiled = loaded.compile(KEEP, &loaded.sizes(), 1, &[0]).expect("one device");
    let weights = Placed::new(loaded.weights(&compiled.assignment), compiled.placement);
    let memory = Memory { blocks: 2, weights: 1 << 30 };
    let spec = &loaded.model.spec;
    let mut engine = Engine::new(compiled.programs, &compiled.sizes, spec, weights, memory)
        .unwrap_or_else(|f| panic!("{f}"));
    let full = engine.prefill(0, &[7; 65], &[]).expect_err("a refusal");
    assert_eq!(full.problems[0].message, "all 2 blocks of the cache are in use");
    assert!(engine.prefill(0, &[7; 64], &[]).is_ok(), "what failed gave its blocks back");
}

/// Every linear layer with one matrix, as lowering writes them.
fn separated(programs: &mut Programs) -> usize {
    let mut joined = 0;
    for program in &mut programs.programs {
        let nodes = std::mem::take(&mut program.nodes);
        program.nodes = nodes
            .into_iter()
            .flat_map(|node| match &node.op {
                Op::Linear { projections, activations } => {
                    joined += projections.len() - 1;
                    let each = projections.iter().zip(&node.outputs);
                    let one = |(p, output): (&Projection, &ValueId)| Node {
                        op: Op::Linear { projections: vec![*p], activations: *activations },
                        inputs: node.inputs.clone(),
                        outputs: vec![*output],
                    };
                    each.map(one).collect()
                }
                _ => vec![node],
            })
            .collect();
    }
    joined
}

#[test]
fn reading_an_operand_once_for_several_matrices_changes_no_bit() {
    for name in TARGETS {
        let loaded = Loaded::new(name);
        let tokens = Reference::of(name).tokens("text.input_ids");
        for devices in [1, 4] {
            let logits = |split: bool| {
                let mut compiled =
                    loaded.compile(KEEP, &loaded.sizes(), devices, &[0]).expect("it splits");
                if split {
                    assert!(separated(&mut compiled.programs) > 0, "{name}");
                    assert!(graph::verify(&compiled.programs).is_empty(), "{name}");
                }
                let mut engine = loaded.engine(compiled);
                let rows = engine.prefill_all(0, &tokens, &[]).unwrap_or_else(|f| panic!("{f}"));
                rows.logits.iter().map(|v| v.to_bits()).collect::<Vec<u32>>()
            };
            assert!(logits(false) == logits(true), "{name} on {devices}");
        }
    }
}
