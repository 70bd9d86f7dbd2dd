//! A checkpoint of the shapes of a small Llama, bf16, with values like those of trained weights: the same bytes everywhere.

use std::fs;
use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::json;

use crate::{Result, build};

/// Shapes; bytes follow from them.
#[derive(Debug, Clone, Copy)]
pub struct Shapes {
    pub hidden: u64,
    pub intermediate: u64,
    pub layers: u64,
    pub vocab: u64,
    /// Weight files.
    pub shards: u64,
}

/// 3.6 GB of bf16 in four files.
pub const FULL: Shapes =
    Shapes { hidden: 2560, intermediate: 6912, layers: 20, vocab: 40_960, shards: 4 };

/// 34 MB in two files, to see that everything runs.
pub const SMOKE: Shapes =
    Shapes { hidden: 512, intermediate: 1408, layers: 4, vocab: 4096, shards: 2 };

/// Width of a head; hidden sizes are multiples of it.
const HEAD: u64 = 128;

/// Name and shape of every tensor.
fn tensors(s: Shapes) -> Vec<(String, [u64; 2])> {
    let mut all = vec![("model.embed_tokens.weight".to_owned(), [s.vocab, s.hidden])];
    for layer in 0..s.layers {
        let square = [s.hidden, s.hidden];
        let rows = [
            ("input_layernorm", [s.hidden, 0]),
            ("self_attn.q_proj", square),
            ("self_attn.k_proj", square),
            ("self_attn.v_proj", square),
            ("self_attn.o_proj", square),
            ("post_attention_layernorm", [s.hidden, 0]),
            ("mlp.gate_proj", [s.intermediate, s.hidden]),
            ("mlp.up_proj", [s.intermediate, s.hidden]),
            ("mlp.down_proj", [s.hidden, s.intermediate]),
        ];
        all.extend(
            rows.map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape)),
        );
    }
    all.push(("model.norm.weight".to_owned(), [s.hidden, 0]));
    all.push(("lm_head.weight".to_owned(), [s.vocab, s.hidden]));
    all
}

/// Elements; a second extent of 0 is none.
fn elements(shape: [u64; 2]) -> u64 {
    shape[0] * shape[1].max(1)
}

/// Writes the checkpoint unless the folder holds one of these shapes; its bytes of weights.
pub fn make(folder: &Path, s: Shapes) -> Result<u64> {
    let all = tensors(s);
    let total = 2 * all.iter().map(|(_, shape)| elements(*shape)).sum::<u64>();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": s.hidden, "intermediate_size": s.intermediate, "num_hidden_layers": s.layers,
        "num_attention_heads": s.hidden / HEAD, "num_key_value_heads": s.hidden / HEAD, "head_dim": HEAD,
        "vocab_size": s.vocab, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": false, "attention_bias": false, "mlp_bias": false,
        "bos_token_id": 1, "eos_token_id": 2,
    });
    let config = format!("{config:#}\n");
    let at = folder.join("config.json");
    // Written last: a folder with this file is complete.
    if fs::read_to_string(&at).is_ok_and(|found| found == config) {
        return Ok(total);
    }
    build::remove_folder(folder)?;
    fs::create_dir_all(folder).map_err(testkit::at(folder))?;
    let mut shards: Vec<Vec<&(String, [u64; 2])>> = vec![Vec::new()];
    let mut held = 0;
    for tensor in &all {
        if held >= total.div_ceil(s.shards) && (shards.len() as u64) < s.shards {
            shards.push(Vec::new());
            held = 0;
        }
        held += 2 * elements(tensor.1);
        if let Some(last) = shards.last_mut() {
            last.push(tensor);
        }
    }
    let mut map = serde_json::Map::new();
    let mut values = Values(0x9e37_79b9_7f4a_7c15);
    let count = shards.len();
    for (i, tensors) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{count:05}.safetensors", i + 1);
        let path = folder.join(&name);
        write(&path, tensors, &mut values).map_err(testkit::at(&path))?;
        map.extend(tensors.iter().map(|(tensor, _)| (tensor.clone(), json!(name))));
    }
    let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
    let path = folder.join("model.safetensors.index.json");
    fs::write(&path, format!("{index:#}\n")).map_err(testkit::at(&path))?;
    fs::write(&at, config).map_err(testkit::at(&at))?;
    Ok(total)
}

fn write(path: &Path, tensors: &[&(String, [u64; 2])], values: &mut Values) -> std::io::Result<()> {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in tensors.iter().map(|t| (&t.0, t.1)) {
        let begin = end;
        end += 2 * elements(shape);
        let shape: Vec<u64> = shape.into_iter().filter(|n| *n > 0).collect();
        let info = json!({ "dtype": "BF16", "shape": shape, "data_offsets": [begin, end] });
        header.insert(name.clone(), info);
    }
    let mut text = serde_json::Value::Object(header).to_string();
    while !text.len().is_multiple_of(8) {
        text.push(' ');
    }
    let mut out = BufWriter::with_capacity(1 << 20, fs::File::create(path)?);
    out.write_all(&(text.len() as u64).to_le_bytes())?;
    out.write_all(text.as_bytes())?;
    let mut buffer = Vec::with_capacity(1 << 20);
    let mut left = end / 2;
    while left > 0 {
        let n = left.min(1 << 19);
        buffer.clear();
        buffer.extend((0..n).flat_map(|_| values.next().to_le_bytes()));
        out.write_all(&buffer)?;
        left -= n;
    }
    out.flush()
}

/// bf16 values about 0 with a deviation of 0.02, never NaN: the sum of three uniform numbers of a generator.
struct Values(u64);

impl Values {
    fn next(&mut self) -> u16 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let sum = ((self.0 >> 48) + (self.0 >> 32 & 0xffff) + (self.0 >> 16 & 0xffff)) as f32;
        ((sum * (0.04 / 65536.0) - 0.06).to_bits() >> 16) as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_full_checkpoint_is_3_6_gb_and_the_small_one_the_same_every_time() {
        let bytes = |s| 2 * tensors(s).iter().map(|(_, shape)| elements(*shape)).sum::<u64>();
        assert_eq!(bytes(FULL), 3_591_582_720);
        let folder = testkit::target().join("bench-checkpoint-test");
        assert_eq!(make(&folder, SMOKE), Ok(bytes(SMOKE)));
        let first = testkit::digest::sha256_file(&folder.join("model-00002-of-00002.safetensors"));
        fs::remove_file(folder.join("config.json")).unwrap();
        make(&folder, SMOKE).unwrap();
        assert_eq!(
            first,
            testkit::digest::sha256_file(&folder.join("model-00002-of-00002.safetensors"))
        );
        build::remove_folder(&folder).unwrap();
    }
}
