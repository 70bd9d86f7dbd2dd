//! SmolLM2-135M-Instruct: from a llama.cpp GGUF back to the Hugging Face form of a llama.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use testkit::safetensors::{self, Entry};
use testkit::values::bf16;

use super::gguf::Gguf;
use crate::Result;

/// GGUF name of a layer's weight → Hugging Face name.
const LAYER: [(&str, &str); 9] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// Token types of GGUF that are added tokens in `tokenizer.json`.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// Writes the model folder `out`: bf16 weights in one file, configs and tokenizer.
pub fn convert(gguf: &Path, out: &Path) -> Result<()> {
    let gguf = Gguf::read(gguf)?;
    let map = names(gguf.int("llama.block_count")?);
    if map.len() != gguf.tensor_count() {
        return Err(format!("{} tensors, {} expected", gguf.tensor_count(), map.len()));
    }
    weights(&gguf, &map, &out.join("model.safetensors"))?;
    for (file, content) in [
        ("config.json", config(&gguf)?),
        ("generation_config.json", generation_config(&gguf)?),
        ("tokenizer.json", tokenizer(&gguf)?),
        ("tokenizer_config.json", tokenizer_config(&gguf)?),
    ] {
        let path = out.join(file);
        fs::write(&path, format!("{content:#}\n")).map_err(testkit::at(&path))?;
    }
    Ok(())
}

/// (Hugging Face name, GGUF name) of every weight, sorted. The output head is tied to the embedding.
fn names(layers: u64) -> Vec<(String, String)> {
    let mut map = vec![
        ("model.embed_tokens.weight".to_owned(), "token_embd.weight".to_owned()),
        ("model.norm.weight".to_owned(), "output_norm.weight".to_owned()),
    ];
    for i in 0..layers {
        map.extend(LAYER.iter().map(|(from, to)| {
            (format!("model.layers.{i}.{to}.weight"), format!("blk.{i}.{from}.weight"))
        }));
    }
    map.sort();
    map
}

fn weights(gguf: &Gguf, map: &[(String, String)], path: &Path) -> Result<()> {
    let entries = map
        .iter()
        .map(|(name, from)| {
            let shape = gguf.shape(from)?.iter().map(|&d| d as u64).collect();
            Ok(Entry { name: name.clone(), dtype: "BF16".into(), shape })
        })
        .collect::<Result<Vec<_>>>()?;
    let (q_heads, kv_heads) =
        (gguf.int("llama.attention.head_count")?, gguf.int("llama.attention.head_count_kv")?);
    let mut sources = map.iter();
    safetensors::write(path, &entries, |entry| {
        let (_, from) = sources.next().ok_or("more entries than names")?;
        let mut values = gguf.values(from)?;
        if from.ends_with("attn_q.weight") {
            values = halves_apart(&values, &entry.shape, q_heads)?;
        } else if from.ends_with("attn_k.weight") {
            values = halves_apart(&values, &entry.shape, kv_heads)?;
        }
        Ok(values.iter().flat_map(|&v| bf16(v).to_le_bytes()).collect())
    })
}

/// Undoes llama.cpp's reordering of the q and k rows. Rotary embedding turns pairs of rows of a head: rows `i` and
/// `i + half` in Hugging Face's weights, neighbours `2i` and `2i + 1` in llama.cpp's.
fn halves_apart(values: &[f32], shape: &[u64], heads: u64) -> Result<Vec<f32>> {
    let [rows, columns] = *shape else {
        return Err(format!("q and k weights have two dimensions, not {shape:?}"));
    };
    if heads == 0 || rows % (2 * heads) != 0 {
        return Err(format!("{rows} rows are no pairs in {heads} heads"));
    }
    let (head, half, columns) =
        ((rows / heads) as usize, (rows / heads / 2) as usize, columns as usize);
    let mut out = Vec::with_capacity(values.len());
    for row in 0..rows as usize {
        let (start, within) = (row - row % head, row % head);
        let from = start + 2 * (within % half) + within / half;
        out.extend_from_slice(&values[from * columns..(from + 1) * columns]);
    }
    Ok(out)
}

fn config(gguf: &Gguf) -> Result<Value> {
    let hidden = gguf.int("llama.embedding_length")?;
    let heads = gguf.int("llama.attention.head_count")?;
    Ok(json!({
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": false,
        "bos_token_id": gguf.int("tokenizer.ggml.bos_token_id")?,
        "eos_token_id": gguf.int("tokenizer.ggml.eos_token_id")?,
        "head_dim": gguf.int("llama.rope.dimension_count")?,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": gguf.int("llama.feed_forward_length")?,
        "max_position_embeddings": gguf.int("llama.context_length")?,
        "mlp_bias": false,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": gguf.int("llama.block_count")?,
        "num_key_value_heads": gguf.int("llama.attention.head_count_kv")?,
        "pad_token_id": gguf.int("tokenizer.ggml.padding_token_id")?,
        "rms_norm_eps": gguf.float("llama.attention.layer_norm_rms_epsilon")?,
        "rope_scaling": null,
        "rope_theta": gguf.float("llama.rope.freq_base")?,
        "tie_word_embeddings": true,
        "torch_dtype": "bfloat16",
        "vocab_size": gguf.int("llama.vocab_size")?,
    }))
}

fn generation_config(gguf: &Gguf) -> Result<Value> {
    Ok(json!({
        "bos_token_id": gguf.int("tokenizer.ggml.bos_token_id")?,
        "eos_token_id": gguf.int("tokenizer.ggml.eos_token_id")?,
        "pad_token_id": gguf.int("tokenizer.ggml.padding_token_id")?,
    }))
}

/// Byte-level BPE behind single digits: llama.cpp's pre-tokenizer `smollm`.
fn tokenizer(gguf: &Gguf) -> Result<Value> {
    if gguf.text("tokenizer.ggml.pre")? != "smollm" {
        return Err("the pre-tokenizer is not smollm".into());
    }
    let tokens = gguf.texts("tokenizer.ggml.tokens")?;
    let types = gguf.ints("tokenizer.ggml.token_type")?;
    let mut merges = Vec::new();
    for merge in gguf.texts("tokenizer.ggml.merges")? {
        let pair = merge.split_once(' ').ok_or_else(|| format!("merge {merge:?} is no pair"))?;
        merges.push(json!([pair.0, pair.1]));
    }
    let mut added = Vec::new();
    for (id, (token, &kind)) in tokens.iter().zip(&types).enumerate() {
        if kind == CONTROL || kind == USER_DEFINED {
            added.push(json!({
                "id": id, "content": token, "special": kind == CONTROL, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false,
            }));
        }
    }
    let vocabulary: serde_json::Map<String, Value> =
        tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), json!(id))).collect();
    let bytes = |add_prefix_space: bool| {
        json!({
            "type": "ByteLevel", "add_prefix_space": add_prefix_space,
            "trim_offsets": true, "use_regex": true,
        })
    };
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{ "type": "Digits", "individual_digits": true }, bytes(false)],
        },
        "post_processor": null,
        "decoder": bytes(true),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": vocabulary, "merges": merges,
        },
    }))
}

fn tokenizer_config(gguf: &Gguf) -> Result<Value> {
    let tokens = gguf.texts("tokenizer.ggml.tokens")?;
    let token = |which: &str| -> Result<&str> {
        let id = gguf.int(&format!("tokenizer.ggml.{which}_token_id"))?;
        let at = usize::try_from(id).ok().and_then(|i| tokens.get(i));
        at.copied().ok_or_else(|| format!("{which} token {id} is not in the vocabulary"))
    };
    Ok(json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos")?,
        "eos_token": token("eos")?,
        "pad_token": token("padding")?,
        "unk_token": token("unknown")?,
        "clean_up_tokenization_spaces": false,
        "model_max_length": gguf.int("llama.context_length")?,
        "chat_template": gguf.text("tokenizer.chat_template")?,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotary_pairs_go_from_neighbours_to_halves() {
        // Two heads of four rows with one column: llama.cpp's rows 0 1 2 3 are Hugging Face's 0 2 1 3.
        let rows: Vec<f32> = (0..8u8).map(f32::from).collect();
        let back = halves_apart(&rows, &[8, 1], 2).unwrap();
        assert_eq!(back, [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
    }

    #[test]
    fn every_weight_has_one_name_on_either_side() {
        let map = names(30);
        assert_eq!(map.len(), 272);
        let one = ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight");
        assert!(map.contains(&(one.0.to_owned(), one.1.to_owned())));
    }
}
