//! Refusals of small models: every way in which configuration and tensors can disagree is found and named.

mod model_support;

use std::fs;
use std::sync::Arc;

use model_support::{TINY, Tensors, config, config_file, good, messages, path, refusal, tensors};
use proptest::prelude::*;
use proptest::sample::Index;
use radpack::diag::{FailureKind, SourceText};
use radpack::model::{self, RopeScaling};
use radpack::tensor::{DType, Shape, TensorInfo};
use serde_json::{Value, json};

/// The object that holds the decoder's keys.
fn text(config: &mut Value) -> &mut serde_json::Map<String, Value> {
    let nested = config.get("text_config").is_some();
    let at = if nested { &mut config["text_config"] } else { config };
    at.as_object_mut().expect("object")
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
        // A multimodal configuration leaves out what equals the defaults of transformers.
        "tiny-gemma3-vision" => {
            return (
                &["hidden_size", "intermediate_size", "num_hidden_layers"],
                &["sliding_window"],
            );
        }
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
    let siglip: &[&str] = &[
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "image_size",
        "patch_size",
    ];
    for (name, section, keys) in [
        ("tiny-gemma3-vision", "vision_config", siglip),
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
fn the_number_of_layers_is_checked_both_ways() {
    let mut fewer = config("tiny-llama");
    fewer["num_hidden_layers"] = json!(3);
    let failure = refusal(&fewer, &tensors("tiny-llama"));
    insta::assert_snapshot!(failure.to_string(), @r#"
    error: the tensors do not fit the configuration of this llama model  [exit 3]

      tensors: `num_hidden_layers` is 3, the tensors under `model.layers.` hold 4
        = unclaimed: model.layers.3.input_layernorm.weight, model.layers.3.mlp.down_proj.weight,
          model.layers.3.mlp.gate_proj.weight, model.layers.3.mlp.up_proj.weight,
          model.layers.3.post_attention_layernorm.weight, model.layers.3.self_attn.k_proj.weight,
          model.layers.3.self_attn.o_proj.weight, model.layers.3.self_attn.q_proj.weight,
          model.layers.3.self_attn.v_proj.weight
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
fn an_unknown_prefix_is_reported_with_what_was_expected_and_found() {
    let odd: Tensors = tensors("tiny-llama")
        .into_iter()
        .map(|(name, info)| (format!("transformer.{name}"), info))
        .collect();
    let failure = refusal(&config("tiny-llama"), &odd);
    insta::assert_snapshot!(failure.to_string(), @r#"
    error: the tensors do not fit the configuration of this llama model  [exit 3]

      tensors: no decoder was found under any known prefix
        = expected names: `model.layers.N.…`, `layers.N.…`, `model.language_model.layers.N.…`,
          `language_model.model.layers.N.…` and `language_model.layers.N.…`
        = the checkpoint's names begin with `transformer.model.layers.` (36), `transformer.lm_head.`
          (1), `transformer.model.embed_tokens.` (1) and `transformer.model.norm.` (1)
        = `--weights-only` converts any checkpoint without knowing its architecture

    1 problem
    "#);
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

      tensors: `model.layers.0.self_attn.o_proj.weight` has shape [64, 64]; the configuration gives [64
        (hidden_size), 128 (num_attention_heads × head_dim)]
      tensors: `model.layers.0.self_attn.o_proj.weight` holds u8; floating-point numbers are needed
      tensors: `model.layers.{0-3}.self_attn.q_proj.lora_A.weight` is unclaimed: no weight of a llama
        model is made of it
        = this belongs to a LoRA adapter: merge it into the base model first
      tensors: `model.layers.{0-3}.self_attn.q_proj.weight_scale` is unclaimed: no weight of a llama
        model is made of it
        = the checkpoint is already quantized; start from the original weights

    4 problems
    "#);
}

#[test]
fn an_unknown_architecture_is_refused_with_the_way_out() {
    let config = json!({"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 384});
    let failure = model::read_spec(&config, None).expect_err("bert");
    insta::assert_snapshot!(failure.to_string(), @r#"
    error: this architecture is not known  [exit 3]

      config: `model_type` is `bert` (BertModel), an architecture that is not known
        = families with graphs: gemma4, gemma4_assistant, gemma3, llama, mistral, qwen2, qwen3 and
          qwen3_moe
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
