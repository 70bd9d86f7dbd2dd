//! Reading of configurations and the census of tensors, on small models: both spellings of a configuration agree,
//! and every way in which configuration and tensors can disagree is found and named.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use proptest::prelude::*;
use proptest::sample::Index;
use radpack::diag::{Failure, FailureKind, SourceText};
use radpack::model::{
    self, Activation, AttentionKind, Class, KvSource, Model, ModelSpec, RopeScaling,
};
use radpack::tensor::{DType, Shape, TensorInfo};
use serde_json::{Value, json};

const TINY: [&str; 11] = [
    "tiny-gemma3",
    "tiny-gemma4-assistant",
    "tiny-gemma4-dense",
    "tiny-gemma4-e",
    "tiny-gemma4-e-assistant",
    "tiny-gemma4-moe",
    "tiny-gemma4-unified",
    "tiny-llama",
    "tiny-mistral",
    "tiny-qwen3",
    "tiny-qwen3-moe",
];

type Tensors = BTreeMap<String, TensorInfo>;

fn path(name: &str, file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/configs").join(name).join(file)
}

fn config(name: &str) -> Value {
    config_file(name, "config.json")
}

fn config_file(name: &str, file: &str) -> Value {
    let text = fs::read_to_string(path(name, file)).expect("config");
    serde_json::from_str(&text).expect("JSON")
}

fn tensors(name: &str) -> Tensors {
    let text = fs::read_to_string(path(name, "tensors.tsv")).expect("tensors");
    text.lines()
        .map(|line| {
            let fields: Vec<&str> = line.split('\t').collect();
            let dtype = if fields[1] == "I64" { DType::I64 } else { DType::BF16 };
            let shape: Vec<u64> = serde_json::from_str(fields[2]).expect("extents");
            (fields[0].to_owned(), TensorInfo { dtype, shape: Shape::new(shape) })
        })
        .collect()
}

fn good(name: &str) -> Model {
    model::read(&config(name), None, &tensors(name)).unwrap_or_else(|f| panic!("{name}\n{f}"))
}

fn spec_of(config: &Value) -> ModelSpec {
    model::read_spec(config, None).unwrap_or_else(|f| panic!("{f}"))
}

fn refusal(config: &Value, tensors: &Tensors) -> Failure {
    let failure = model::read(config, None, tensors).expect_err("a refusal");
    assert_eq!(failure.kind, FailureKind::Refused);
    assert!(!failure.problems.is_empty());
    failure
}

fn messages(failure: &Failure) -> Vec<String> {
    failure.problems.iter().map(|p| p.message.clone()).collect()
}

/// The object that holds the decoder's keys.
fn text(config: &mut Value) -> &mut serde_json::Map<String, Value> {
    let nested = config.get("text_config").is_some();
    let at = if nested { &mut config["text_config"] } else { config };
    at.as_object_mut().expect("object")
}

#[test]
fn both_spellings_of_a_configuration_mean_the_same_model() {
    for name in TINY {
        let tensors = tensors(name);
        let read = |file| {
            model::read(&config_file(name, file), None, &tensors)
                .unwrap_or_else(|f| panic!("{name} {file}\n{f}"))
        };
        let (hub, saved) = (read("config.json"), read("config.saved.json"));
        assert_eq!(hub, saved, "{name}");
        let parts: usize = hub.table.weights.iter().map(|w| w.parts.len()).sum();
        assert!(parts + hub.table.unused.len() >= tensors.len(), "{name}");
    }
}

#[test]
fn tiny_models_have_the_numbers_of_their_configurations() {
    let llama = good("tiny-llama").spec;
    assert_eq!(llama.family, "llama");
    assert_eq!(llama.architecture.as_deref(), Some("LlamaForCausalLM"));
    let a = &llama.text.layers[3].attention;
    assert_eq!((a.q_heads, a.kv_heads, a.head_dim, a.rope.theta), (16, 4, 8, 500_000.0));
    assert_eq!(a.scale, 8f64.powf(-0.5));
    assert_eq!(
        a.rope.scaling,
        RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_positions: 32 }
    );
    assert_eq!((llama.text.activation, llama.text.tied_head), (Activation::Silu, false));
    assert_eq!((llama.text.norm.eps, llama.text.embedding_scale), (1e-5, 1.0));
    assert_eq!((llama.tokens.bos, llama.tokens.eos), (Some(497), vec![499]));

    let mistral = good("tiny-mistral").spec;
    assert!(mistral.text.layers.iter().all(|l| l.attention.window() == Some(16)));
    assert_eq!(mistral.text.vocab_size, 503);

    let qwen = good("tiny-qwen3").spec;
    assert!(qwen.text.layers.iter().all(|l| l.attention.qk_norm && !l.attention.qkv_bias));
    assert!(qwen.text.tied_head);

    let moe = good("tiny-qwen3-moe").spec;
    let experts = moe.text.layers[0].moe.expect("experts");
    assert_eq!((experts.experts, experts.top_k, experts.width), (16, 4, 48));
    assert!(experts.norm_top_k && moe.text.layers.iter().all(|l| l.mlp.is_none()));

    let gemma = good("tiny-gemma3").spec;
    let (local, full) = (&gemma.text.layers[0].attention, &gemma.text.layers[5].attention);
    assert_eq!((local.window(), full.window()), (Some(8), None));
    assert_eq!((local.rope.theta, local.rope.scaling), (1e4, RopeScaling::Default));
    assert_eq!((full.rope.theta, full.rope.scaling), (1e6, RopeScaling::Linear { factor: 8.0 }));
    assert_eq!(full.scale, 24f64.powf(-0.5));
    assert!(gemma.text.norm.one_plus && gemma.text.layers[0].post_norms);
    assert_eq!(gemma.text.embedding_scale, 8.0);

    let e = good("tiny-gemma4-e").spec;
    let sources: Vec<KvSource> = e.text.layers[5..].iter().map(|l| l.attention.kv).collect();
    let (s, f) = (KvSource::Layer(3), KvSource::Layer(4));
    assert_eq!(sources, [s, s, s, s, f]);
    let draft = good("tiny-gemma4-e-assistant").spec;
    assert!(model::draft_mismatches(&e, &draft).is_empty());
    let dense = good("tiny-gemma4-dense").spec;
    assert!(model::draft_mismatches(&dense, &good("tiny-gemma4-assistant").spec).is_empty());
}

#[test]
fn qwen3_experts_join_gate_and_up_rows_of_two_tensors() {
    let table = good("tiny-qwen3-moe").table;
    let w = table.get("blk.2.ffn_gate_up_exps.15.weight").expect("expert");
    assert_eq!((w.shape.clone(), w.expert, w.slot), (Shape::from([96, 64]), 15, 0));
    let parts: Vec<&str> = w.parts.iter().map(|p| p.tensor.as_str()).collect();
    assert_eq!(
        parts,
        [
            "model.layers.2.mlp.experts.15.gate_proj.weight",
            "model.layers.2.mlp.experts.15.up_proj.weight"
        ]
    );
    assert!(w.parts.iter().all(|p| p.index.is_none()));
    // Experts of a layer follow its other weights: expert by expert, slot by slot.
    let order: Vec<(i32, i32)> =
        table.weights.iter().filter(|w| w.layer == 2).map(|w| (w.expert, w.slot)).collect();
    assert_eq!(&order[order.len() - 4..], [(14, 0), (14, 1), (15, 0), (15, 1)]);
}

/// Tensors whose loss is no loss.
fn left_out(name: &str) -> Vec<String> {
    good(name).table.unused.into_iter().map(|(tensor, _)| tensor).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_lost_tensor_is_named(model in 0..TINY.len(), pick: Index) {
        let name = TINY[model];
        let mut map = tensors(name);
        let unused = left_out(name);
        let keys: Vec<String> = map.keys().filter(|k| !unused.contains(k)).cloned().collect();
        let lost = pick.get(&keys);
        map.remove(lost);
        let found = messages(&refusal(&config(name), &map));
        prop_assert_eq!(found.len(), 1, "{:?}", found);
        let start = format!("`{lost}` is missing; expected shape [");
        prop_assert!(found[0].starts_with(&start), "{}", found[0]);
    }

    #[test]
    fn a_strange_tensor_is_named(model in 0..TINY.len(), pick: Index, suffix in "[a-z_.]{1,12}") {
        let name = TINY[model];
        let mut map = tensors(name);
        let keys: Vec<String> = map.keys().cloned().collect();
        let strange = format!("{}{suffix}", pick.get(&keys));
        prop_assume!(!map.contains_key(&strange));
        map.insert(strange.clone(), TensorInfo { dtype: DType::BF16, shape: Shape::from([3]) });
        let found = messages(&refusal(&config(name), &map));
        prop_assert_eq!(found.len(), 1, "{:?}", found);
        let start = format!("`{strange}` is unclaimed");
        prop_assert!(found[0].starts_with(&start), "{}", found[0]);
    }

    #[test]
    fn a_changed_extent_is_named(model in 0..TINY.len(), pick: Index, at: Index, by in 1u64..9) {
        let name = TINY[model];
        let mut map = tensors(name);
        let unused = left_out(name);
        let keys: Vec<String> = map
            .iter()
            .filter(|(k, t)| t.shape.rank() > 0 && !unused.contains(k))
            .map(|(k, _)| k.clone())
            .collect();
        let changed = pick.get(&keys).clone();
        let info = map.get_mut(&changed).expect("there");
        let mut extents = info.shape.extents().to_vec();
        let at = at.index(extents.len());
        extents[at] += by;
        info.shape = Shape::new(extents);
        let shown = info.shape.to_string();
        let found = messages(&refusal(&config(name), &map));
        // The embedding of a tied model shapes its head too, but the fault is one.
        prop_assert_eq!(found.len(), 1, "{:?}", found);
        let start = format!("`{changed}` has shape {shown}; the configuration gives [");
        prop_assert!(found[0].starts_with(&start), "{}", found[0]);
    }

    #[test]
    fn hostile_configurations_give_errors_and_no_panic(
        model in 0..TINY.len(), pick: Index, saved: bool, kind in 0usize..9,
    ) {
        let name = TINY[model];
        let mut config = config_file(name, if saved { "config.saved.json" } else { "config.json" });
        let section = text(&mut config);
        let keys: Vec<String> = section.keys().cloned().collect();
        let value = [
            json!(0), json!(u64::MAX), json!(-1), json!(1e308), json!("x"), json!([]), json!({}),
            json!(null), json!(2_147_483_648u64),
        ][kind].clone();
        section.insert(pick.get(&keys).clone(), value);
        // Either the key does not matter, or a refusal says why it does.
        if let Err(failure) = model::read(&config, None, &tensors(name)) {
            prop_assert_eq!(failure.kind, FailureKind::Refused);
            prop_assert!(!failure.problems.is_empty());
        }
    }
}

/// Keys whose absence has to be an error. The others are cosmetic or have a documented default in transformers.
fn structural(name: &str) -> (&'static [&'static str], &'static [&'static str]) {
    const TEXT: &[&str] = &[
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    ];
    const GEMMA4: &[&str] = &[
        "num_key_value_heads",
        "head_dim",
        "global_head_dim",
        "layer_types",
        "sliding_window",
        "rope_parameters",
        "attention_k_eq_v",
        "num_kv_shared_layers",
        "use_double_wide_mlp",
        "hidden_size_per_layer_input",
        "enable_moe_block",
        "final_logit_softcapping",
        "hidden_activation",
    ];
    let more: &[&str] = match name {
        n if n.starts_with("tiny-gemma4") => GEMMA4,
        "tiny-gemma3" => &[
            "num_key_value_heads",
            "head_dim",
            "sliding_window",
            "query_pre_attn_scalar",
            "rope_theta",
            "rope_local_base_freq",
            "hidden_activation",
        ],
        "tiny-llama" => &["hidden_act"],
        "tiny-mistral" => &["num_key_value_heads", "sliding_window", "rope_theta", "hidden_act"],
        "tiny-qwen3" => &["num_key_value_heads", "head_dim", "rope_theta", "hidden_act"],
        _ => &[
            "num_key_value_heads",
            "rope_theta",
            "hidden_act",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "norm_topk_prob",
            "decoder_sparse_step",
        ],
    };
    (TEXT, more)
}

#[test]
fn every_missing_structural_key_is_an_error_that_names_it() {
    for name in TINY {
        let (common, more) = structural(name);
        for key in common.iter().chain(more) {
            let mut config = config(name);
            let nested = config.get("text_config").is_some();
            assert!(text(&mut config).remove(*key).is_some(), "{name} states {key}");
            let failure = model::read_spec(&config, None).expect_err(key);
            let dotted = if nested { format!("text_config.{key}") } else { (*key).to_owned() };
            let start = format!("`{dotted}` is missing");
            let found = messages(&failure);
            assert_eq!(found.len(), 1, "{name} {key}: {found:?}");
            assert!(found[0].starts_with(&start), "{name} {key}: {found:?}");
        }
    }
}

#[test]
fn every_missing_tower_key_is_an_error_that_names_it() {
    let vision: &[&str] = &[
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "patch_size",
        "pooling_kernel_size",
        "position_embedding_size",
        "rope_parameters",
        "rms_norm_eps",
        "hidden_activation",
        "standardize",
        "use_clipped_linears",
    ];
    let audio: &[&str] = &[
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_act",
        "subsampling_conv_channels",
        "conv_kernel_size",
        "residual_weight",
        "attention_chunk_size",
        "attention_context_left",
        "attention_context_right",
        "attention_logit_cap",
        "attention_invalid_logits_value",
        "use_clipped_linears",
        "rms_norm_eps",
        "gradient_clipping",
        "output_proj_dims",
    ];
    let embedder: &[&str] = &[
        "patch_size",
        "pooling_kernel_size",
        "mm_embed_dim",
        "mm_posemb_size",
        "num_soft_tokens",
        "output_proj_dims",
        "rms_norm_eps",
    ];
    for (name, section, keys) in [
        ("tiny-gemma4-e", "vision_config", vision),
        ("tiny-gemma4-e", "audio_config", audio),
        ("tiny-gemma4-unified", "vision_config", embedder),
        ("tiny-gemma4-unified", "audio_config", &["audio_embed_dim", "rms_norm_eps"]),
        (
            "tiny-gemma4-moe",
            "text_config",
            &["num_experts", "top_k_experts", "moe_intermediate_size"],
        ),
        (
            "tiny-gemma4-e",
            "text_config",
            &["vocab_size_per_layer_input", "use_bidirectional_attention"],
        ),
        ("tiny-gemma4-dense", "text_config", &["num_global_key_value_heads"]),
    ] {
        for key in keys {
            let mut config = config(name);
            assert!(config[section].as_object_mut().expect("object").remove(*key).is_some());
            let found = messages(&model::read_spec(&config, None).expect_err(key));
            assert_eq!(found.len(), 1, "{name} {key}: {found:?}");
            let start = format!("`{section}.{key}` is missing");
            assert!(found[0].starts_with(&start), "{name} {key}: {found:?}");
        }
    }
    let keys = [
        "backbone_hidden_size",
        "use_ordered_embeddings",
        "num_centroids",
        "centroid_intermediate_top_k",
    ];
    for key in keys {
        let mut config = config("tiny-gemma4-e-assistant");
        config.as_object_mut().expect("object").remove(key);
        let found = messages(&model::read_spec(&config, None).expect_err(key));
        assert!(found[0].starts_with(&format!("`{key}` is missing")), "{found:?}");
    }
}

#[test]
fn all_missing_keys_come_in_one_failure() {
    let config = json!({"model_type": "llama", "hidden_size": 64});
    let found = messages(&model::read_spec(&config, None).expect_err("most keys are missing"));
    let keys: Vec<&str> = found.iter().filter_map(|m| m.split('`').nth(1)).collect();
    assert_eq!(
        keys,
        [
            "num_attention_heads",
            "vocab_size",
            "num_hidden_layers",
            "intermediate_size",
            "max_position_embeddings",
            "rms_norm_eps",
            "hidden_act"
        ]
    );
}

// ---- what users of such tools suffer from ------------------------------------------------------------------------

#[test]
fn a_head_that_the_configuration_promises_has_to_be_there() {
    let mut map = tensors("tiny-llama");
    map.remove("lm_head.weight");
    let failure = refusal(&config("tiny-llama"), &map);
    insta::assert_snapshot!(failure.to_string(), @r#"
    error: the tensors do not fit the configuration of this llama model  [exit 3]

      tensors: `lm_head.weight` is missing; expected shape [512 (vocab_size), 64 (hidden_size)]
        = `tie_word_embeddings` is false, so the head has to be stored; a tied model says true

    1 problem
    "#);
}

#[test]
fn a_tied_head_may_be_stored_again_but_not_in_another_shape() {
    let mut map = tensors("tiny-qwen3");
    let head = TensorInfo { dtype: DType::BF16, shape: Shape::from([512, 64]) };
    map.insert("lm_head.weight".into(), head.clone());
    let table = model::read(&config("tiny-qwen3"), None, &map).expect("a duplicate").table;
    assert_eq!(
        table.unused,
        [(
            "lm_head.weight".to_owned(),
            "repeats the embedding: the head is tied to `token_embd.weight`".to_owned()
        )]
    );
    let output = table.get("output.weight").expect("head");
    assert_eq!(
        (output.class, output.parts[0].tensor.as_str()),
        (Class::LmHead, "model.embed_tokens.weight")
    );
    map.insert("lm_head.weight".into(), TensorInfo { shape: Shape::from([500, 64]), ..head });
    let found = messages(&refusal(&config("tiny-qwen3"), &map));
    assert_eq!(
        found,
        [
            "`lm_head.weight` has shape [500, 64]; a head tied to the embedding has [512, 64] (`tie_word_embeddings` is true)"
        ]
    );
}

#[test]
fn the_number_of_layers_is_checked_both_ways() {
    let mut fewer = config("tiny-llama");
    fewer["num_hidden_layers"] = json!(3);
    let failure = refusal(&fewer, &tensors("tiny-llama"));
    insta::assert_snapshot!(failure.to_string(), @r#"
    error: the tensors do not fit the configuration of this llama model  [exit 3]

      tensors: `num_hidden_layers` is 3, the tensors under `model.layers.` hold 4
        = unclaimed: model.layers.3.input_layernorm.weight, model.layers.3.mlp.down_proj.weight, model.layers.3.mlp.gate_proj.weight, model.layers.3.mlp.up_proj.weight, model.layers.3.post_attention_layernorm.weight, model.layers.3.self_attn.k_proj.weight, model.layers.3.self_attn.o_proj.weight, model.layers.3.self_attn.q_proj.weight, model.layers.3.self_attn.v_proj.weight
        = a next-token or draft layer counts apart: drop it, or give the full count

    1 problem
    "#);
    let mut more = config("tiny-llama");
    more["num_hidden_layers"] = json!(5);
    let failure = refusal(&more, &tensors("tiny-llama"));
    insta::assert_snapshot!(failure.to_string(), @r#"
    error: the tensors do not fit the configuration of this llama model  [exit 3]

      tensors: `num_hidden_layers` is 5, the tensors under `model.layers.` hold 4
        = no tensor of layer 4

    1 problem
    "#);
}

#[test]
fn a_checkpoint_of_the_inner_module_is_read_without_its_prefix() {
    let whole = good("tiny-llama");
    let inner: Tensors = tensors("tiny-llama")
        .into_iter()
        .map(|(name, info)| (name.strip_prefix("model.").unwrap_or(&name).to_owned(), info))
        .collect();
    let model = model::read(&config("tiny-llama"), None, &inner).expect("no prefix");
    let names = |m: &Model| m.table.weights.iter().map(|w| w.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&model), names(&whole));
    assert_eq!(
        model.table.get("token_embd.weight").expect("there").parts[0].tensor,
        "embed_tokens.weight"
    );

    // A text-only Gemma 4 keeps its decoder under `model.`, its configuration is the nested one.
    let dense = config("tiny-gemma4-dense");
    let mut nested = dense["text_config"].clone();
    nested["architectures"] = json!(["Gemma4ForCausalLM"]);
    let alone: Tensors = tensors("tiny-gemma4-dense")
        .into_iter()
        .filter_map(|(name, info)| {
            Some((format!("model.{}", name.strip_prefix("model.language_model.")?), info))
        })
        .collect();
    let model = model::read(&nested, None, &alone).expect("text only");
    assert!(model.spec.vision.is_none());
    let text_weights = good("tiny-gemma4-dense").table.weights;
    let text_weights = text_weights.iter().filter(|w| w.tower == model::Tower::Text).count();
    assert_eq!(model.table.weights.len(), text_weights);
}

#[test]
fn an_unknown_prefix_is_reported_with_what_was_expected_and_found() {
    let odd: Tensors = tensors("tiny-llama")
        .into_iter()
        .map(|(name, info)| (format!("transformer.{name}"), info))
        .collect();
    let failure = refusal(&config("tiny-llama"), &odd);
    insta::assert_snapshot!(failure.to_string(), @r#"
    error: the tensors do not fit the configuration of this llama model  [exit 3]

      tensors: no decoder was found under any known prefix
        = expected names: `model.layers.N.…`, `layers.N.…`, `model.language_model.layers.N.…`, `language_model.model.layers.N.…` and `language_model.layers.N.…`
        = the checkpoint's names begin with `transformer.model.layers.` (36), `transformer.lm_head.` (1), `transformer.model.embed_tokens.` (1) and `transformer.model.norm.` (1)
        = `--weights-only` converts any checkpoint without knowing its architecture

    1 problem
    "#);
}

#[test]
fn the_text_model_is_found_under_every_known_key_and_wins_over_the_top_level() {
    let inner = config("tiny-llama");
    let expected = spec_of(&inner).text;
    for keys in [
        &["text_config"][..],
        &["llm_config"],
        &["language_config"],
        &["thinker_config", "text_config"],
    ] {
        let mut outer = inner.clone();
        for key in keys.iter().rev() {
            outer = json!({ *key: outer });
        }
        // Dimensions of a vision tower at the top level, as some wrappers have it.
        outer["model_type"] = json!("wrapper");
        outer["num_hidden_layers"] = json!(27);
        outer["hidden_size"] = json!(1152);
        assert_eq!(spec_of(&outer).text, expected, "{keys:?}");
    }
    // What the nested section lacks is not taken from the top level.
    let mut partial = inner.clone();
    partial.as_object_mut().expect("object").remove("num_hidden_layers");
    let outer = json!({"model_type": "wrapper", "num_hidden_layers": 27, "text_config": partial});
    let found = messages(&model::read_spec(&outer, None).expect_err("missing"));
    assert!(found[0].starts_with("`text_config.num_hidden_layers` is missing"), "{found:?}");
}

#[test]
fn head_width_is_taken_when_stated_and_derived_when_the_family_says_so() {
    let mut config = config("tiny-llama");
    assert_eq!(spec_of(&config).text.layers[0].attention.head_dim, 8);
    config.as_object_mut().expect("object").remove("head_dim");
    assert_eq!(spec_of(&config).text.layers[0].attention.head_dim, 4);
    // The tensors were made with 8, so 4 is a refusal that names the rows.
    let found = messages(&refusal(&config, &tensors("tiny-llama")));
    let q = "`model.layers.{0-3}.self_attn.q_proj.weight` has shape [128, 64]; the configuration gives [64 (num_attention_heads × head_dim), 64 (hidden_size)]";
    assert!(found.iter().any(|m| m == q), "{found:#?}");
    config["num_attention_heads"] = json!(12);
    let found = messages(&model::read_spec(&config, None).expect_err("64 / 12"));
    assert!(
        found
            .iter()
            .any(|m| m.contains("`hidden_size` is 64, no multiple of num_attention_heads 12")),
        "{found:?}"
    );
}

#[test]
fn rope_types_are_known_or_refused() {
    let with = |scaling: Value| {
        let mut config = config("tiny-llama");
        config["rope_scaling"] = scaling;
        model::read_spec(&config, None).map(|s| s.text.layers[0].attention.rope.scaling)
    };
    assert_eq!(with(json!(null)), Ok(RopeScaling::Default));
    assert_eq!(
        with(json!({"type": "linear", "factor": 4.0})),
        Ok(RopeScaling::Linear { factor: 4.0 })
    );
    let yarn =
        json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
    assert_eq!(
        with(yarn),
        Ok(RopeScaling::Yarn {
            factor: 4.0,
            original_positions: 32768,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: 0.1 * 4f64.ln() + 1.0,
        })
    );
    for (scaling, message) in [
        (
            json!({"rope_type": "dynamic", "factor": 2.0}),
            "`rope_scaling.rope_type` is `dynamic`, which radpack does not compute",
        ),
        (
            json!({"type": "longrope", "factor": 2.0}),
            "`rope_scaling.type` is `longrope`, which radpack does not compute",
        ),
        (
            json!({"rope_type": "linear"}),
            "`rope_scaling.factor` is missing, and the model cannot be known without it",
        ),
        (
            json!({"rope_type": "default", "mrope_section": [1]}),
            "`rope_scaling.mrope_section` is not a rope parameter that radpack knows, so it cannot be dropped",
        ),
        (
            json!({"rope_type": "default", "partial_rotary_factor": 0.5}),
            "`rope_scaling.partial_rotary_factor` is 0.5; rope type `default` rotates whole heads here",
        ),
        (json!("linear"), "`rope_scaling` has to be an object or null"),
    ] {
        assert_eq!(messages(&with(scaling).expect_err(message)), [message]);
    }
    let mut partial = config("tiny-qwen3");
    partial["partial_rotary_factor"] = json!(0.5);
    let found = messages(&model::read_spec(&partial, None).expect_err("partial"));
    assert_eq!(found, ["`partial_rotary_factor` is 0.5; this family rotates whole heads"]);
    // Split by layer type, but without the one that is needed.
    let mut split = config_file("tiny-gemma3", "config.saved.json");
    split["rope_parameters"].as_object_mut().expect("object").remove("sliding_attention");
    let found = messages(&model::read_spec(&split, None).expect_err("no sliding"));
    assert!(found[0].starts_with("`rope_parameters.sliding_attention` is missing"), "{found:?}");
}

#[test]
fn token_ids_have_to_lie_in_the_vocabulary() {
    let mut config = config("tiny-llama");
    config["eos_token_id"] = json!([499, 512]);
    config["pad_token_id"] = json!(-1);
    let found = messages(&model::read_spec(&config, None).expect_err("512 of 512"));
    assert_eq!(found, ["`eos_token_id` is token 512; the embedding has 512 rows"]);
}

#[test]
fn quantization_and_adapter_leftovers_say_what_they_are() {
    let mut map = tensors("tiny-llama");
    let scale = TensorInfo { dtype: DType::F32, shape: Shape::from([128, 1]) };
    for n in 0..4 {
        map.insert(format!("model.layers.{n}.self_attn.q_proj.weight_scale"), scale.clone());
        map.insert(format!("model.layers.{n}.self_attn.q_proj.lora_A.weight"), scale.clone());
    }
    let bytes = TensorInfo { dtype: DType::U8, shape: Shape::from([64, 64]) };
    map.insert("model.layers.0.self_attn.o_proj.weight".into(), bytes);
    let failure = refusal(&config("tiny-llama"), &map);
    insta::assert_snapshot!(failure.to_string(), @r#"
    error: the tensors do not fit the configuration of this llama model  [exit 3]

      tensors: `model.layers.0.self_attn.o_proj.weight` has shape [64, 64]; the configuration gives [64 (hidden_size), 128 (num_attention_heads × head_dim)]
      tensors: `model.layers.0.self_attn.o_proj.weight` holds u8; floating-point numbers are needed
      tensors: `model.layers.{0-3}.self_attn.q_proj.lora_A.weight` is unclaimed: no weight of a llama model is made of it
        = this belongs to a LoRA adapter: merge it into the base model first
      tensors: `model.layers.{0-3}.self_attn.q_proj.weight_scale` is unclaimed: no weight of a llama model is made of it
        = the checkpoint is already quantized; start from the original weights

    4 problems
    "#);
}

#[test]
fn buffers_that_follow_from_the_configuration_are_left_out_with_a_reason() {
    let mut map = tensors("tiny-llama");
    let buffer = TensorInfo { dtype: DType::F32, shape: Shape::from([4]) };
    map.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), buffer.clone());
    map.insert("model.rotary_emb.inv_freq".into(), buffer.clone());
    map.insert("scaled_fp8".into(), TensorInfo { shape: Shape::from([0]), ..buffer });
    let table = model::read(&config("tiny-llama"), None, &map).expect("buffers").table;
    let why: Vec<(&str, &str)> =
        table.unused.iter().map(|(n, w)| (n.as_str(), w.as_str())).collect();
    let frequencies = "rotary frequencies, which follow from the configuration";
    assert_eq!(
        why,
        [
            ("model.layers.0.self_attn.rotary_emb.inv_freq", frequencies),
            ("model.rotary_emb.inv_freq", frequencies),
            ("scaled_fp8", "holds no elements"),
        ]
    );
}

#[test]
fn an_unknown_architecture_is_refused_with_the_way_out() {
    let config = json!({"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 384});
    let failure = model::read_spec(&config, None).expect_err("bert");
    insta::assert_snapshot!(failure.to_string(), @r#"
    error: this architecture is not known  [exit 3]

      config: `model_type` is `bert` (BertModel), an architecture that is not known
        = families with graphs: gemma4, gemma4_assistant, gemma3, llama, mistral, qwen2, qwen3 and qwen3_moe
        = `--weights-only` converts any checkpoint without knowing its architecture

    1 problem
    "#);
    let mut classifier = crate::config("tiny-llama");
    classifier["architectures"] = json!(["LlamaForSequenceClassification"]);
    let found = messages(&model::read_spec(&classifier, None).expect_err("a classifier"));
    assert_eq!(
        found,
        [
            "`architectures` names `LlamaForSequenceClassification`, which is not the llama decoder that predicts tokens"
        ]
    );
    assert!(model::read_spec(&json!([]), None).is_err());
    assert!(model::read_spec(&json!({}), None).is_err());
}

#[test]
fn a_wrong_value_is_pointed_at_in_the_file() {
    let text = fs::read_to_string(path("tiny-llama", "config.json")).expect("config");
    let text = text.replace("\"num_key_value_heads\": 4", "\"num_key_value_heads\": 3");
    let config: Value = serde_json::from_str(&text).expect("JSON");
    let source = Arc::new(SourceText { name: "config.json".into(), text });
    let failure = model::read_spec(&config, Some(&source)).expect_err("3 of 16");
    insta::assert_snapshot!(failure.to_string(), @r#"
    error: the configuration of this llama model is incomplete or contradicts itself  [exit 3]

      config: `num_key_value_heads` is 3, which does not divide num_attention_heads 16 into equal groups
          --> config.json:11:26
           |
        11 |   "num_key_value_heads": 3,
           |                          ^ this value

    1 problem
    "#);
}

// ---- families without a tiny model -------------------------------------------------------------------------------

fn llama_like(extra: &[(&str, &str, &[u64])], keys: Value, remove: &[&str]) -> (Value, Tensors) {
    let mut config = config("tiny-llama");
    for (key, value) in keys.as_object().expect("object") {
        config[key] = value.clone();
    }
    let mut map = tensors("tiny-llama");
    map.retain(|name, _| !remove.iter().any(|r| name.contains(r)));
    for n in 0..4 {
        for (name, suffix, shape) in extra {
            let info = TensorInfo { dtype: DType::BF16, shape: Shape::from(*shape) };
            map.insert(format!("model.layers.{n}.{name}.{suffix}"), info);
        }
    }
    (config, map)
}

const QKV: [(&str, &str, &[u64]); 3] = [
    ("self_attn.q_proj", "bias", &[128]),
    ("self_attn.k_proj", "bias", &[32]),
    ("self_attn.v_proj", "bias", &[32]),
];

#[test]
fn qwen2_has_biases_on_q_k_and_v_and_windows_from_a_layer_up() {
    let keys = json!({
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_scaling": null,
        "use_sliding_window": true, "sliding_window": 64, "max_window_layers": 3,
    });
    let (config, map) = llama_like(&QKV, keys, &[]);
    let model = model::read(&config, None, &map).unwrap_or_else(|f| panic!("{f}"));
    assert_eq!(model.spec.family, "qwen2");
    let bias = model.table.get("blk.3.attn_q.bias").expect("bias");
    assert_eq!((bias.class, bias.shape.clone()), (Class::Other, Shape::from([128])));
    assert!(model.table.get("blk.3.attn_output.bias").is_none());
    let kinds: Vec<Option<u64>> =
        model.spec.text.layers.iter().map(|l| l.attention.window()).collect();
    assert_eq!(kinds, [None, None, None, Some(64)]);
    let (mut config, map) = llama_like(&[], config.clone(), &[]);
    config["use_sliding_window"] = json!(false);
    let found = messages(&refusal(&config, &map));
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(
        found.iter().any(|m| m.contains("`model.layers.{0-3}.self_attn.q_proj.bias` is missing")),
        "{found:?}"
    );
}

#[test]
fn llama_biases_follow_their_keys() {
    let mut extra = QKV.to_vec();
    extra.push(("self_attn.o_proj", "bias", &[64]));
    extra.push(("mlp.gate_proj", "bias", &[176]));
    extra.push(("mlp.up_proj", "bias", &[176]));
    extra.push(("mlp.down_proj", "bias", &[64]));
    let (config, map) = llama_like(&extra, json!({"attention_bias": true, "mlp_bias": true}), &[]);
    let table = model::read(&config, None, &map).unwrap_or_else(|f| panic!("{f}")).table;
    for leaf in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"] {
        assert!(table.get(&format!("blk.0.{leaf}.bias")).is_some(), "{leaf}");
    }
}

#[test]
fn documented_defaults_of_llama_are_followed() {
    let mut config = config("tiny-llama");
    let object = config.as_object_mut().expect("object");
    for key in
        ["num_key_value_heads", "rope_theta", "attention_bias", "mlp_bias", "tie_word_embeddings"]
    {
        object.remove(key);
    }
    let text = spec_of(&config).text;
    let a = &text.layers[0].attention;
    assert_eq!(
        (a.kv_heads, a.rope.theta, a.qkv_bias, text.tied_head),
        (16, 10_000.0, false, false)
    );
}

#[test]
fn mistral_without_a_window_is_full_and_qwen3_moe_mixes_dense_layers() {
    let mut mistral = config("tiny-mistral");
    mistral["sliding_window"] = json!(null);
    assert!(spec_of(&mistral).text.layers.iter().all(|l| l.attention.kind == AttentionKind::Full));
    let mut moe = config("tiny-qwen3-moe");
    moe["decoder_sparse_step"] = json!(2);
    moe["mlp_only_layers"] = json!([3]);
    let sparse: Vec<bool> = spec_of(&moe).text.layers.iter().map(|l| l.moe.is_some()).collect();
    assert_eq!(sparse, [false, true, false, false]);
    assert_eq!(spec_of(&moe).text.layers[3].mlp.expect("dense").width, 192);
}

/// Gemma 3 4B as published: `text_config` leaves out what equals transformers' defaults.
fn gemma3_4b() -> (Value, Tensors) {
    let config = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106],
        "image_token_index": 262144, "mm_tokens_per_image": 256,
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {
            "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
            "model_type": "siglip_vision_model", "num_attention_heads": 16,
            "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": false,
        },
    });
    let mut map = Tensors::new();
    let mut put = |name: String, shape: &[u64]| {
        map.insert(name, TensorInfo { dtype: DType::BF16, shape: Shape::from(shape) });
    };
    let (h, v) = (2560, 1152);
    put("language_model.model.embed_tokens.weight".into(), &[262_208, h]);
    put("language_model.model.norm.weight".into(), &[h]);
    for n in 0..34 {
        let p = format!("language_model.model.layers.{n}.");
        for norm in [
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ] {
            put(format!("{p}{norm}.weight"), &[h]);
        }
        put(format!("{p}self_attn.q_proj.weight"), &[2048, h]);
        put(format!("{p}self_attn.k_proj.weight"), &[1024, h]);
        put(format!("{p}self_attn.v_proj.weight"), &[1024, h]);
        put(format!("{p}self_attn.o_proj.weight"), &[h, 2048]);
        put(format!("{p}self_attn.q_norm.weight"), &[256]);
        put(format!("{p}self_attn.k_norm.weight"), &[256]);
        put(format!("{p}mlp.gate_proj.weight"), &[10240, h]);
        put(format!("{p}mlp.up_proj.weight"), &[10240, h]);
        put(format!("{p}mlp.down_proj.weight"), &[h, 10240]);
    }
    let p = "vision_tower.vision_model.";
    put(format!("{p}embeddings.patch_embedding.weight"), &[v, 3, 14, 14]);
    put(format!("{p}embeddings.patch_embedding.bias"), &[v]);
    put(format!("{p}embeddings.position_embedding.weight"), &[4096, v]);
    put(format!("{p}post_layernorm.weight"), &[v]);
    put(format!("{p}post_layernorm.bias"), &[v]);
    for n in 0..27 {
        let p = format!("{p}encoder.layers.{n}.");
        for (name, rows, cols) in [
            ("self_attn.q_proj", v, v),
            ("self_attn.k_proj", v, v),
            ("self_attn.v_proj", v, v),
            ("self_attn.out_proj", v, v),
            ("mlp.fc1", 4304, v),
            ("mlp.fc2", v, 4304),
        ] {
            put(format!("{p}{name}.weight"), &[rows, cols]);
            put(format!("{p}{name}.bias"), &[rows]);
        }
        for norm in ["layer_norm1", "layer_norm2"] {
            put(format!("{p}{norm}.weight"), &[v]);
            put(format!("{p}{norm}.bias"), &[v]);
        }
    }
    put("multi_modal_projector.mm_input_projection_weight".into(), &[v, h]);
    put("multi_modal_projector.mm_soft_emb_norm.weight".into(), &[v]);
    (config, map)
}

#[test]
fn multimodal_gemma3_reads_the_defaults_it_leaves_out_and_checks_them() {
    let (config, map) = gemma3_4b();
    let model = model::read(&config, None, &map).unwrap_or_else(|f| panic!("{f}"));
    let (local, full) =
        (&model.spec.text.layers[0].attention, &model.spec.text.layers[5].attention);
    assert_eq!(
        (local.q_heads, local.kv_heads, local.head_dim, local.window()),
        (8, 4, 256, Some(1024))
    );
    assert_eq!((local.rope.theta, full.rope.theta, full.window()), (1e4, 1e6, None));
    assert_eq!(full.scale, 1.0 / 16.0);
    assert_eq!(model.table.weights.len(), map.len() + 1);
    assert_eq!(model.table.get("mm.vision.weight").map(|w| w.class), Some(Class::Other));
    // A default that the tensors contradict is found.
    let mut wrong = config;
    wrong["text_config"]["num_attention_heads"] = json!(16);
    let found = messages(&refusal(&wrong, &map));
    assert!(found.iter().any(|m| m.contains("q_proj.weight` has shape [2048, 2560]")), "{found:?}");
}

#[test]
fn a_table_of_fifty_thousand_tensors_reads_well_under_a_second() {
    let mut config = config("tiny-qwen3-moe");
    config["num_hidden_layers"] = json!(64);
    config["num_experts"] = json!(256);
    let small = tensors("tiny-qwen3-moe");
    let mut map = Tensors::new();
    for (name, info) in &small {
        if !name.contains(".layers.") {
            map.insert(name.clone(), info.clone());
        }
    }
    for n in 0..64 {
        for (name, info) in small.iter().filter(|(k, _)| k.starts_with("model.layers.0.")) {
            let name = name.replace("layers.0.", &format!("layers.{n}."));
            if name.contains(".experts.0.") {
                for e in 0..256 {
                    map.insert(name.replace("experts.0.", &format!("experts.{e}.")), info.clone());
                }
            } else if !name.contains(".experts.") {
                let mut info = info.clone();
                if name.ends_with("mlp.gate.weight") {
                    info.shape = Shape::from([256, 64]);
                }
                map.insert(name, info);
            }
        }
    }
    assert!(map.len() > 49_000, "{}", map.len());
    let start = Instant::now();
    let table = model::read(&config, None, &map).unwrap_or_else(|f| panic!("{f}")).table;
    let read = start.elapsed();
    assert_eq!(table.weights.iter().filter(|w| w.expert >= 0).count(), 2 * 64 * 256);
    // And in the worst case: nothing fits, so everything is a problem.
    config["moe_intermediate_size"] = json!(47);
    map.retain(|name, _| !name.ends_with("down_proj.weight"));
    let start = Instant::now();
    let failure = refusal(&config, &map);
    let refused = start.elapsed();
    assert!(failure.problems.len() < 20, "{failure}");
    // About 0.1 s each in a debug build on a free core. The bound is wide because test machines are shared; a search
    // over pairs of 50,000 names would still miss it by far.
    assert!(read.as_secs() < 60 && refused.as_secs() < 60, "{read:?} {refused:?}");
}
