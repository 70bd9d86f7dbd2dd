//! Every rule of the partition and every refusal, on models that this file makes up.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};

use super::rules::choices;
use super::{Cut, LayerShare, Placement, VocabularyShare, place};
use crate::diag::{Failure, SourceText};
use crate::model::{self, Model};
use crate::recipe::Recipe;
use crate::tensor::{DType, Shape, Span, TensorInfo};

/// A llama of two layers.
struct Llama {
    q: u64,
    kv: u64,
    dim: u64,
    mlp: u64,
    vocab: u64,
    tied: bool,
    bias: bool,
}

const LLAMA: Llama =
    Llama { q: 32, kv: 8, dim: 64, mlp: 1000, vocab: 1003, tied: false, bias: false };

const HIDDEN: u64 = 256;

fn model(config: &Value, tensors: &[(String, Vec<u64>)]) -> Model {
    let tensors: BTreeMap<String, TensorInfo> = tensors
        .iter()
        .map(|(name, shape)| {
            let shape = Shape::from(shape.as_slice());
            (name.clone(), TensorInfo { dtype: DType::BF16, shape })
        })
        .collect();
    model::read(config, None, &tensors).expect("the model is understood")
}

fn attention(out: &mut Vec<(String, Vec<u64>)>, at: &str, q: u64, kv: u64, dim: u64) {
    for (name, shape) in [
        ("q_proj", [q * dim, HIDDEN]),
        ("k_proj", [kv * dim, HIDDEN]),
        ("v_proj", [kv * dim, HIDDEN]),
        ("o_proj", [HIDDEN, q * dim]),
    ] {
        out.push((format!("{at}self_attn.{name}.weight"), shape.to_vec()));
    }
}

fn ends(vocab: u64, tied: bool) -> Vec<(String, Vec<u64>)> {
    let mut out = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocab, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
    ];
    if !tied {
        out.push(("lm_head.weight".to_owned(), vec![vocab, HIDDEN]));
    }
    out
}

impl Llama {
    fn model(&self) -> Model {
        let kind = if self.bias { "qwen2" } else { "llama" };
        let class = if self.bias { "Qwen2ForCausalLM" } else { "LlamaForCausalLM" };
        let config = json!({
            "architectures": [class], "model_type": kind, "vocab_size": self.vocab,
            "hidden_size": HIDDEN, "intermediate_size": self.mlp, "num_hidden_layers": 2,
            "num_attention_heads": self.q, "num_key_value_heads": self.kv, "head_dim": self.dim,
            "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 1024,
            "rope_theta": 10000.0, "tie_word_embeddings": self.tied,
        });
        let mut tensors = ends(self.vocab, self.tied);
        for n in 0..2 {
            let at = format!("model.layers.{n}.");
            attention(&mut tensors, &at, self.q, self.kv, self.dim);
            if self.bias {
                for (name, heads) in [("q", self.q), ("k", self.kv), ("v", self.kv)] {
                    let name = format!("{at}self_attn.{name}_proj.bias");
                    tensors.push((name, vec![heads * self.dim]));
                }
            }
            for (name, shape) in [
                ("mlp.gate_proj", vec![self.mlp, HIDDEN]),
                ("mlp.up_proj", vec![self.mlp, HIDDEN]),
                ("mlp.down_proj", vec![HIDDEN, self.mlp]),
                ("input_layernorm", vec![HIDDEN]),
                ("post_attention_layernorm", vec![HIDDEN]),
            ] {
                tensors.push((format!("{at}{name}.weight"), shape));
            }
        }
        model(&config, &tensors)
    }

    fn place(&self, recipe: &str, devices: u32) -> Result<Placement, Failure> {
        placed(&self.model(), recipe, devices, &[0])
    }

    fn fits(&self, recipe: &str, devices: u32) -> Placement {
        self.place(recipe, devices).expect("it fits")
    }

    fn refused(&self, recipe: &str, devices: u32) -> String {
        refusal(self.place(recipe, devices))
    }
}

/// A qwen3-moe of one layer with four query heads.
fn moe(experts: u64) -> Model {
    let config = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 64,
        "hidden_size": HIDDEN, "intermediate_size": 64, "moe_intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 1024,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "norm_topk_prob": true, "num_experts": experts,
        "num_experts_per_tok": 2, "attention_bias": false, "use_sliding_window": false,
    });
    let mut tensors = ends(64, false);
    let at = "model.layers.0.";
    attention(&mut tensors, at, 4, 4, 64);
    tensors.push((format!("{at}mlp.gate.weight"), vec![experts, HIDDEN]));
    for (name, width) in [
        ("input_layernorm", HIDDEN),
        ("post_attention_layernorm", HIDDEN),
        ("self_attn.q_norm", 64),
        ("self_attn.k_norm", 64),
    ] {
        tensors.push((format!("{at}{name}.weight"), vec![width]));
    }
    for n in 0..experts {
        for (name, shape) in [("gate", [32, HIDDEN]), ("up", [32, HIDDEN]), ("down", [HIDDEN, 32])]
        {
            let name = format!("{at}mlp.experts.{n}.{name}_proj.weight");
            tensors.push((name, shape.to_vec()));
        }
    }
    model(&config, &tensors)
}

fn placed(model: &Model, recipe: &str, devices: u32, vision: &[u32]) -> Result<Placement, Failure> {
    let text = format!("schema = 1\nname = \"t\"\n{recipe}");
    let source = SourceText { name: "recipe".to_owned(), text };
    let recipe = Recipe::parse(Arc::new(source)).expect("a recipe");
    let assignment = recipe.resolve(&model.table, "model").expect("it resolves");
    place(Some(&model.spec), &model.table, &assignment, devices, vision)
}

fn rule(class: &str, encoding: &str) -> String {
    format!("[[quantize]]\nclass = \"{class}\"\nencoding = \"{encoding}\"\n")
}

/// Every problem with its help, one a line.
fn refusal(placed: Result<Placement, Failure>) -> String {
    let failure = placed.expect_err("it does not fit");
    assert_eq!(failure.headline, "this model does not split over these devices");
    let lines = failure.problems.iter().map(|p| {
        let help: Vec<String> = p.help.iter().map(|h| format!(" ({h})")).collect();
        format!("{}{}", p.message, help.concat())
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn spans(placement: &Placement, name: &str) -> Vec<(u64, u64)> {
    let (_, shares) = placement.cut(name).and_then(Cut::shares).expect("it is cut");
    shares.spans.iter().map(|s| (s.start, s.len)).collect()
}

fn local(placement: &Placement, name: &str) -> Vec<u64> {
    placement.local_shape(name).expect("stored").extents().to_vec()
}

fn whole(placement: &Placement, name: &str) -> Vec<u32> {
    match placement.cut(name) {
        Some(Cut::Whole { devices }) => devices.clone(),
        other => panic!("{name}: {other:?}"),
    }
}

#[test]
fn choices_read_as_a_sentence() {
    assert_eq!(choices(&[1, 2, 4]), "1, 2 or 4");
    assert_eq!(choices(&[1]), "1");
}

#[test]
fn on_one_device_everything_is_whole() {
    let placement = LLAMA.fits("", 1);
    assert!(placement.weights.values().all(|w| w.cut == Cut::Whole { devices: vec![0] }));
    assert_eq!(placement.weights.len(), 3 + 2 * 9);
    let share = LayerShare {
        q_heads: 32,
        kv_heads: 8,
        kv_replication: 1,
        mlp_width: Some(1000),
        experts: None,
    };
    assert_eq!(placement.layers, [share; 2]);
    assert_eq!(placement.vocabulary, Some(VocabularyShare { real: 1003, local: 1003 }));
}

#[test]
fn attention_is_cut_by_heads_and_norms_stay_whole() {
    let placement = LLAMA.fits("", 4);
    assert_eq!(
        spans(&placement, "blk.1.attn_q.weight"),
        [(0, 512), (512, 512), (1024, 512), (1536, 512)]
    );
    assert_eq!(local(&placement, "blk.1.attn_q.weight"), [512, 256]);
    assert_eq!(local(&placement, "blk.0.attn_k.weight"), [128, 256]);
    assert_eq!(local(&placement, "blk.0.attn_output.weight"), [256, 512]);
    assert!(matches!(placement.cut("blk.0.attn_output.weight"), Some(Cut::Cols(_))));
    assert_eq!(whole(&placement, "blk.0.attn_norm.weight"), [0, 1, 2, 3]);
    assert_eq!(whole(&placement, "output_norm.weight"), [0, 1, 2, 3]);
    let layer = placement.layers[0];
    assert_eq!((layer.q_heads, layer.kv_heads, layer.kv_replication), (8, 2, 1));
}

#[test]
fn more_devices_than_key_heads_repeat_them_and_share_the_entry() {
    let placement = LLAMA.fits("", 16);
    let layer = placement.layers[1];
    assert_eq!((layer.q_heads, layer.kv_heads, layer.kv_replication), (2, 1, 2));
    let key = placement.weight("blk.0.attn_k.weight").expect("stored");
    assert_eq!(key.cut.span(5), Some(Span { start: 128, len: 64 }));
    let shards = key.shards();
    assert_eq!(shards.len(), 8);
    assert_eq!(shards[2].devices, [4, 5]);
    assert_eq!(shards[2].name("blk.0.attn_k.weight"), "blk.0.attn_k.weight@2/8");
    // One head for all: nothing is cut.
    let one = Llama { kv: 1, ..LLAMA }.fits("", 4);
    assert_eq!(whole(&one, "blk.0.attn_v.weight"), [0, 1, 2, 3]);
    assert_eq!(one.layers[0].kv_replication, 4);
}

#[test]
fn biases_follow_the_rows_of_their_matrix() {
    let placement = Llama { bias: true, ..LLAMA }.fits("", 4);
    assert_eq!(spans(&placement, "blk.0.attn_q.bias")[3], (1536, 512));
    assert_eq!(local(&placement, "blk.0.attn_q.bias"), [512]);
    assert_eq!(local(&placement, "blk.1.attn_v.bias"), [128]);
}

#[test]
fn the_mlp_is_cut_in_whole_blocks_and_padded_to_the_largest_share() {
    // 168 blocks of 128 over 16 devices: eight get 11, eight get 10.
    let wide = Llama { mlp: 21_504, ..LLAMA };
    let placement = wide.fits(&rule("linear", "int8-g128"), 16);
    let down = spans(&placement, "blk.0.ffn_down.weight");
    assert_eq!(down, spans(&placement, "blk.0.ffn_gate.weight"));
    assert_eq!(down, spans(&placement, "blk.0.ffn_up.weight"));
    let counts: Vec<u64> = down.iter().map(|s| s.1 / 128).collect();
    assert_eq!(counts, [[11; 8], [10; 8]].concat());
    assert_eq!(local(&placement, "blk.0.ffn_down.weight"), [256, 1408]);
    assert_eq!(local(&placement, "blk.0.ffn_up.weight"), [1408, 256]);
    assert_eq!(placement.layers[0].mlp_width, Some(1408));
    // Without blocks the shares are even.
    assert_eq!(wide.fits("", 16).layers[0].mlp_width, Some(1344));
    // 1000 columns are seven groups of 128 and a short one of 104: the last device that gets any has the short one.
    let short = LLAMA.fits(&rule("linear", "int8-g128"), 16);
    let lens: Vec<u64> = spans(&short, "blk.0.ffn_down.weight").iter().map(|s| s.1).collect();
    assert_eq!(lens, [vec![128; 7], vec![104], vec![0; 8]].concat());
    assert_eq!(spans(&short, "blk.0.ffn_down.weight")[15], (1000, 0));
}

#[test]
fn blocks_of_the_rows_of_gate_and_up_count_too() {
    let recipe =
        "[[quantize]]\nmatch = \"*.{gate,up,down}_proj.weight\"\nencoding = \"fp8-block128\"\n";
    let placement = Llama { mlp: 640, ..LLAMA }.fits(recipe, 2);
    assert_eq!(spans(&placement, "blk.0.ffn_gate.weight"), [(0, 384), (384, 256)]);
    let packed = "[[quantize]]\nmatch = \"*.down_proj.weight\"\nencoding = \"int4-g32\"\n";
    let placement = Llama { mlp: 96, ..LLAMA }.fits(packed, 2);
    assert_eq!(spans(&placement, "blk.0.ffn_gate.weight"), [(0, 64), (64, 32)]);
}

#[test]
fn packed_codes_are_cut_on_bytes() {
    // One scale a row leaves only the packing: two codes a byte.
    let recipe = "[[quantize]]\nmatch = \"*.down_proj.weight\"\nencoding = { codes = \"i4\", block = [1, 0] }\n";
    let placement = Llama { mlp: 14, ..LLAMA }.fits(recipe, 4);
    assert_eq!(spans(&placement, "blk.0.ffn_down.weight"), [(0, 4), (4, 4), (8, 4), (12, 2)]);
    assert_eq!(spans(&placement, "blk.0.ffn_up.weight"), [(0, 4), (4, 4), (8, 4), (12, 2)]);
}

#[test]
fn vocabulary_rows_are_padded_at_the_end_only() {
    let placement = LLAMA.fits("", 4);
    assert_eq!(placement.vocabulary, Some(VocabularyShare { real: 1003, local: 251 }));
    let rows = [(0, 251), (251, 251), (502, 251), (753, 250)];
    assert_eq!(spans(&placement, "token_embd.weight"), rows);
    assert_eq!(spans(&placement, "output.weight"), rows);
    // Blocks of 128 rows: ceil(1003 / 16) = 63 rows become 128, so the last devices get none.
    let blocks = LLAMA.fits(&rule("lm_head", "fp8-block128"), 16);
    assert_eq!(blocks.vocabulary, Some(VocabularyShare { real: 1003, local: 128 }));
    let rows = spans(&blocks, "token_embd.weight");
    assert_eq!((rows[7], rows[8], rows[15]), ((896, 107), (1003, 0), (1003, 0)));
    assert_eq!(rows, spans(&blocks, "output.weight"), "embedding and head agree");
    // Pieces of padding only are stored once.
    assert_eq!(blocks.weight("output.weight").expect("stored").shards().len(), 9);
    let tied = Llama { tied: true, ..LLAMA }.fits("", 4);
    assert!(tied.weight("output.weight").is_none());
    assert_eq!(tied.vocabulary, placement.vocabulary);
}

#[test]
fn experts_are_whole_on_consecutive_devices() {
    let placement = placed(&moe(8), "", 4, &[0]).expect("it fits");
    assert_eq!(placement.layers[0].experts, Some(2));
    for expert in 0..8u32 {
        for name in ["ffn_gate_up_exps", "ffn_down_exps"] {
            let name = format!("blk.0.{name}.{expert}.weight");
            assert_eq!(whole(&placement, &name), [expert / 2], "{name}");
        }
    }
    assert_eq!(whole(&placement, "blk.0.ffn_gate_inp.weight"), [0, 1, 2, 3]);
    assert_eq!(
        refusal(placed(&moe(6), "", 4, &[0])),
        "blk.*.ffn_gate_up_exps: 6 experts do not split over 4 devices (use 1 or 2 devices)"
    );
}

#[test]
fn heads_that_do_not_split_are_refused_with_the_counts_that_work() {
    assert_eq!(
        LLAMA.refused("", 3),
        "blk.*.attn_q: 32 attention heads do not split over 3 devices (use 1, 2, 4, 8, 16 or 32 devices)\n\
         blk.*.attn_k: 8 key heads do not split over 3 devices (use 1, 2, 4, 8, 16 or 32 devices)"
    );
    assert_eq!(
        LLAMA.refused("", 64),
        "blk.*.attn_q: 64 devices for 32 attention heads leave half a head to each \
         (use 1, 2, 4, 8, 16 or 32 devices)"
    );
    // An E model has 8 query heads and 1 key head.
    assert_eq!(
        Llama { q: 8, kv: 1, ..LLAMA }.refused("", 16),
        "blk.*.attn_q: 16 devices for 8 attention heads leave half a head to each (use 1, 2, 4 or 8 devices)"
    );
    // 12 query heads over 6 devices are 2 each, but 4 key heads are neither 6 nor a sixth.
    assert_eq!(
        Llama { q: 12, kv: 4, ..LLAMA }.refused("", 6),
        "blk.*.attn_k: 4 key heads cannot each be repeated on as many of 6 devices (use 1, 2, 4 or 12 devices)"
    );
}

#[test]
fn half_a_group_is_refused_with_devices_and_groups_that_fit() {
    assert_eq!(
        LLAMA.refused(&rule("linear", "int8-g128"), 32),
        "blk.*.attn_output.weight: 1 head on each of 32 devices, 64 columns: half a group of 128 \
         (use 1, 2, 4, 8 or 16 devices) (on 32 devices: groups of 64, 32 or 16)"
    );
    let refused = LLAMA.refused(&rule("linear", "fp8-block128"), 8);
    assert_eq!(
        refused,
        "blk.*.attn_k.weight: 1 head on each of 8 devices, 64 rows: half a group of 128 (use 1, 2 or 4 devices) (an encoding with one scale a row (int8-channel, fp8-channel) fits 8 devices)\n\
         blk.*.attn_v.weight: 1 head on each of 8 devices, 64 rows: half a group of 128 (use 1, 2 or 4 devices) (an encoding with one scale a row (int8-channel, fp8-channel) fits 8 devices)"
    );
}

#[test]
fn all_problems_are_told_at_once() {
    let model = moe(6);
    let text = refusal(placed(&model, "", 8, &[0]));
    assert_eq!(text.lines().count(), 2, "{text}");
    assert!(text.starts_with("blk.*.attn_q: 8 devices for 4 attention heads"), "{text}");
}

#[test]
fn padding_that_would_not_be_zero_is_refused() {
    // Zero points: a padded code 0 stands for -zero times the scale of the last, short group.
    let zero = "[[quantize]]\nmatch = \"*.down_proj.weight\"\nencoding = { codes = \"u4\", zero = \"u4\", group = 128 }\n";
    let text = LLAMA.refused(zero, 2);
    assert!(
        text.starts_with("blk.*.ffn_down.weight: the largest share is 512, the smallest 488, and "),
        "{text}"
    );
    // Whole groups of padding have scales of 0.
    Llama { mlp: 384, ..LLAMA }.fits(zero, 2);
}

#[test]
fn lists_of_vision_devices_are_checked() {
    let model = LLAMA.model();
    let text = |vision: &[u32]| refusal(placed(&model, "", 4, vision));
    assert_eq!(
        text(&[4]),
        "the image encoder is for device 4, the model for 4 ([vision] devices lists some of 0 to 3)"
    );
    assert_eq!(
        text(&[1, 1]),
        "the list of vision devices names device 1 twice ([vision] devices lists some of 0 to 3)"
    );
    assert_eq!(
        text(&[]),
        "the list of vision devices is empty ([vision] devices lists some of 0 to 3)"
    );
}

#[test]
fn a_model_without_a_family_stays_on_one_device() {
    let model = LLAMA.model();
    let recipe = Recipe::from_bytes("r", b"schema = 1\nname = \"t\"\n".to_vec()).expect("a recipe");
    let assignment = recipe.resolve(&model.table, "model").expect("it resolves");
    assert!(place(None, &model.table, &assignment, 1, &[0]).is_ok());
    assert_eq!(
        refusal(place(None, &model.table, &assignment, 2, &[0])),
        "2 devices share a model by its heads, which only a family tells (a weights-only conversion is for 1 device)"
    );
}

#[test]
fn bytes_of_devices_add_up_to_the_weights_and_their_padding() {
    let placement = LLAMA.fits(&rule("linear", "int8-g128"), 16);
    let devices = placement.device_bytes();
    let stored: u64 = placement
        .weights
        .values()
        .map(|w| {
            let bytes = w.encoding.bytes(&w.shape).expect("small");
            // Each of the 8 key heads is on two devices.
            let copies = match w.cut.devices().len() {
                16 if w.cut.shares().is_none() => 16,
                _ => 1,
            };
            bytes * copies
        })
        .sum();
    let keys: u64 = ["attn_k", "attn_v"]
        .iter()
        .flat_map(|k| (0..2).map(move |n| format!("blk.{n}.{k}.weight")))
        .map(|name| {
            let w = placement.weight(&name).expect("stored");
            w.encoding.bytes(&w.shape).expect("small")
        })
        .sum();
    let held: u64 = devices.iter().map(|d| d.total() - d.padding).sum();
    assert_eq!(held, stored + keys);
    assert!(devices.iter().all(|d| d.total() == devices[0].total()), "all run one program");
    assert!(devices[15].padding > devices[0].padding);
}

#[test]
fn numbers_of_devices_are_tried_up_to_a_limit() {
    assert_eq!(super::divisors(1024).last(), Some(1024));
    assert_eq!(super::divisors(1025).last(), Some(205));
    assert_eq!(super::divisors(2048).last(), Some(1024));
}
