//! Small models for the tests of `radpack::model`: their configurations, the names and shapes of their tensors, and
//! what reading them gives.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use radpack::diag::{Failure, FailureKind};
use radpack::model::{self, Model};
use radpack::tensor::{DType, Shape, TensorInfo};
use serde_json::{Value, json};

/// Every small model, by the name of its folder.
#[allow(unused_imports)] // every test file uses a part of this module
pub use testkit::NAMES as TINY;

/// What a checkpoint holds: tensors by name.
pub type Tensors = BTreeMap<String, TensorInfo>;

/// A file of a small model.
pub fn path(name: &str, file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/configs").join(name).join(file)
}

/// The configuration of a small model as the hub spells it.
pub fn config(name: &str) -> Value {
    config_file(name, "config.json")
}

/// A configuration of a small model in one of its spellings.
pub fn config_file(name: &str, file: &str) -> Value {
    let text = fs::read_to_string(path(name, file)).expect("config");
    serde_json::from_str(&text).expect("JSON")
}

/// The tensors of a small model.
pub fn tensors(name: &str) -> Tensors {
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

/// A small model, read.
pub fn good(name: &str) -> Model {
    model::read(&config(name), None, &tensors(name)).unwrap_or_else(|f| panic!("{name}\n{f}"))
}

/// The refusal of a configuration and tensors that do not fit.
pub fn refusal(config: &Value, tensors: &Tensors) -> Failure {
    let failure = model::read(config, None, tensors).expect_err("a refusal");
    assert_eq!(failure.kind, FailureKind::Refused);
    assert!(!failure.problems.is_empty());
    failure
}

/// What the problems of a failure say, in order.
pub fn messages(failure: &Failure) -> Vec<String> {
    failure.problems.iter().map(|p| p.message.clone()).collect()
}

/// Gemma 3 4B as published: `text_config` leaves out what equals transformers' defaults.
#[allow(dead_code)] // every test file uses a part of this module
pub fn gemma3_4b() -> (Value, Tensors) {
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
