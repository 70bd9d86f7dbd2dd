//! A checkpoint that takes a process long enough to be stopped in the middle.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Tensor, file};

/// A checkpoint of 48 MB in four shards, whose values are finite bf16 numbers of a generator.
pub fn large(folder: &Path) -> PathBuf {
    let at = folder.join("large");
    fs::create_dir(&at).expect("a folder");
    let (mut state, mut map) = (1u64, Vec::new());
    for shard in 0..4 {
        let name = format!("model-0000{}-of-00004.safetensors", shard + 1);
        let tensors: Vec<Tensor> = (0..8)
            .map(|n| {
                let bytes = (0..1024 * 768)
                    .flat_map(|_| {
                        state = state
                            .wrapping_mul(6364136223846793005)
                            .wrapping_add(1442695040888963407);
                        let r = (state >> 40) as u16;
                        // Exponents from 2^-15 to 1, either sign.
                        ((r & 0x807f) | (112 + ((r >> 7) & 15)) << 7).to_le_bytes()
                    })
                    .collect();
                Tensor {
                    name: format!("layers.{shard}.{n}.weight"),
                    dtype: "BF16",
                    shape: vec![1024, 768],
                    bytes,
                }
            })
            .collect();
        map.extend(tensors.iter().map(|t| format!("\"{}\": \"{name}\"", t.name)));
        fs::write(at.join(&name), file(&tensors)).expect("writes");
    }
    let index = format!("{{\"metadata\": {{}}, \"weight_map\": {{{}}}}}", map.join(", "));
    fs::write(at.join("model.safetensors.index.json"), index).expect("writes");
    at
}
