//! Reading of configurations and the census of tensors, on small models: both spellings of a configuration agree,
//! and what is read are the numbers of the configuration and the weights that the tensors make.

mod model_support;

use std::time::Instant;

use model_support::{
    TINY, Tensors, config, config_file, gemma3_4b, good, messages, refusal, tensors,
};
use radpack::model::{
    self, Activation, AttentionKind, Class, KvSource, Model, ModelSpec, RopeScaling,
};
use radpack::tensor::{DType, Shape, TensorInfo};
use serde_json::{Value, json};

fn spec_of(config: &Value) -> ModelSpec {
    model::read_spec(config, None).unwrap_or_else(|f| panic!("{f}"))
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
fn an_encoder_of_another_form_is_refused_with_its_numbers() {
    let (good, map) = gemma3_4b();
    let said = |section: &str, key: &str, value: Value| {
        let mut config = good.clone();
        match section {
            "" => config[key] = value,
            section => config[section][key] = value,
        }
        messages(&model::read_spec(&config, None).expect_err(key))
    };
    let found = said("", "mm_tokens_per_image", json!(250));
    let square = "64 × 64 patches do not become that many equal squares";
    assert_eq!(found, [format!("`mm_tokens_per_image` is 250; {square}")]);
    // A square number that does not divide the grid, and more tokens than patches.
    for tokens in [9, 8192] {
        let found = said("", "mm_tokens_per_image", json!(tokens));
        assert_eq!(found, [format!("`mm_tokens_per_image` is {tokens}; {square}")]);
    }
    let found = said("vision_config", "num_channels", json!(1));
    assert_eq!(found, ["`vision_config.num_channels` is 1; pictures have 3"]);
    let found = said("vision_config", "num_attention_heads", json!(7));
    assert!(found[0].ends_with("is 7, which does not divide hidden_size 1152"), "{found:?}");
    let found = said("vision_config", "hidden_act", json!("relu"));
    assert!(found[0].contains("`vision_config.hidden_act` is `relu`"), "{found:?}");
    for tokens in [64, 256, 4096] {
        let mut config = good.clone();
        config["mm_tokens_per_image"] = json!(tokens);
        config["vision_config"]["hidden_act"] = json!("gelu_pytorch_tanh");
        config["vision_config"]["num_channels"] = json!(3);
        assert!(model::read(&config, None, &map).is_ok(), "{tokens}");
    }
}

#[test]
fn an_encoder_saved_by_transformers_5_reads_like_a_published_one() {
    let (config, map) = gemma3_4b();
    let renamed: Tensors = map
        .iter()
        .map(|(name, info)| {
            (name.replace("vision_tower.vision_model.", "vision_tower."), info.clone())
        })
        .collect();
    let [published, saved] = [&map, &renamed]
        .map(|map| model::read(&config, None, map).unwrap_or_else(|f| panic!("{f}")));
    assert_eq!(published.spec, saved.spec);
    let weights = |m: &Model| -> Vec<(String, Shape)> {
        m.table.weights.iter().map(|w| (w.name.clone(), w.shape.clone())).collect()
    };
    assert_eq!(weights(&published), weights(&saved));
    let q = saved.table.get("vision.blk.26.attn_q.weight").expect("a weight");
    assert_eq!(q.parts[0].tensor, "vision_tower.encoder.layers.26.self_attn.q_proj.weight");
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
