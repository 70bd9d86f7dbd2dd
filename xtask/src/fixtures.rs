//! `fixtures` and `sparse`: checkpoints without weights worth keeping.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use testkit::{SparseOptions, SparseSummary};

use crate::Result;

/// Makes every tiny model in `out` (default `target/fixtures`), checks it and prints a line for each.
pub fn tiny(out: Option<PathBuf>) -> Result<()> {
    let out = out.unwrap_or_else(|| testkit::target().join("fixtures"));
    for (name, digests) in testkit::spec::manifest()? {
        let folder = testkit::tiny::cached(&name, &out).map_err(|e| format!("{name}: {e}"))?;
        println!(
            "{name:24} {:>3} tensors  {:>9} bytes in {} shards  {}",
            digests.tensors,
            digests.bytes,
            digests.shards,
            folder.display()
        );
    }
    println!("all files have the manifest's sha256");
    Ok(())
}

/// How a sparse checkpoint is laid out.
#[derive(Debug, Clone, Copy, Args)]
pub struct SparseArgs {
    /// Largest shard in GB (10^9 bytes)
    #[arg(long, default_value_t = 5.0, value_name = "GB")]
    shard_gb: f64,
    /// Noise at the start of every shard in MiB, so that sizes and digests are not those of zeros
    #[arg(long, default_value_t = 0, value_name = "MIB")]
    noise_mib: u64,
}

impl SparseArgs {
    /// As testkit takes it.
    pub fn options(self) -> SparseOptions {
        SparseOptions { shard_gb: self.shard_gb, noise_mib: self.noise_mib }
    }
}

/// A mixture of experts that nobody published.
struct Mixture {
    name: &'static str,
    layers: u32,
    experts: u32,
    hidden: u32,
    /// Rows of an expert's gate.
    width: u32,
    vocab: u32,
    heads: u32,
    kv_heads: u32,
}

/// A trillion parameters; 50,688 experts' matrices of 16 KiB; as many bytes of experts in 396 matrices.
const MIXTURES: [Mixture; 3] = [
    Mixture {
        name: "moe-1t",
        layers: 60,
        experts: 384,
        hidden: 7168,
        width: 2048,
        vocab: 163_840,
        heads: 64,
        kv_heads: 8,
    },
    Mixture {
        name: "moe-50k",
        layers: 44,
        experts: 384,
        hidden: 128,
        width: 64,
        vocab: 1024,
        heads: 1,
        kv_heads: 1,
    },
    Mixture {
        name: "moe-400",
        layers: 44,
        experts: 3,
        hidden: 1024,
        width: 1024,
        vocab: 1024,
        heads: 1,
        kv_heads: 1,
    },
];

/// Writes the sparse checkpoint of a model listed in `fixtures/gemma4`, or of a mixture that nobody published, into `out`.
pub fn sparse(model: &str, out: &Path, options: SparseOptions) -> Result<SparseSummary> {
    let published = testkit::fixtures().join("gemma4");
    let mixture = MIXTURES.iter().find(|m| m.name == model);
    let (shapes, config) = if let Some(mixture) = mixture {
        mixture.write(&testkit::target().join(mixture.name))?
    } else {
        let shapes = published.join("shapes").join(format!("{model}.tsv"));
        (shapes, published.join("configs").join(format!("{model}.json")))
    };
    if !shapes.is_file() || !config.is_file() {
        let known = published_models(&published)?.join(", ");
        let mixtures = MIXTURES.map(|m| m.name).join(", ");
        return Err(format!("{model} is none of {known}, {mixtures}"));
    }
    let made = testkit::sparse(&shapes, &config, out, options)?;
    eprintln!(
        "{}: {} shards, {} tensors, {} bytes",
        out.display(),
        made.shards,
        made.tensors,
        made.bytes
    );
    Ok(made)
}

impl Mixture {
    /// Shapes and config, written into `folder`: a Qwen 3 mixture of experts.
    fn write(&self, folder: &Path) -> Result<(PathBuf, PathBuf)> {
        let &Mixture { layers, experts, hidden, width, vocab, heads, kv_heads, .. } = self;
        let head = 128;
        let mut shapes = format!("model.embed_tokens.weight\tBF16\t[{vocab}, {hidden}]\n");
        let mut tensor = |name: String, shape: &[u32]| {
            shapes.push_str(&format!("{name}.weight\tBF16\t{shape:?}\n"));
        };
        for layer in 0..layers {
            let at = format!("model.layers.{layer}");
            tensor(format!("{at}.input_layernorm"), &[hidden]);
            tensor(format!("{at}.post_attention_layernorm"), &[hidden]);
            for (name, rows) in [("q", heads), ("k", kv_heads), ("v", kv_heads)] {
                tensor(format!("{at}.self_attn.{name}_proj"), &[rows * head, hidden]);
            }
            tensor(format!("{at}.self_attn.o_proj"), &[hidden, heads * head]);
            tensor(format!("{at}.self_attn.q_norm"), &[head]);
            tensor(format!("{at}.self_attn.k_norm"), &[head]);
            tensor(format!("{at}.mlp.gate"), &[experts, hidden]);
            for expert in 0..experts {
                for (name, shape) in
                    [("gate", [width, hidden]), ("up", [width, hidden]), ("down", [hidden, width])]
                {
                    tensor(format!("{at}.mlp.experts.{expert}.{name}_proj"), &shape);
                }
            }
        }
        tensor("model.norm".to_owned(), &[hidden]);
        tensor("lm_head".to_owned(), &[vocab, hidden]);
        let config = json!({
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
            "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 4 * hidden,
            "moe_intermediate_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": head, "hidden_act": "silu", "rms_norm_eps": 1e-6,
            "attention_bias": false, "max_position_embeddings": 131_072, "sliding_window": null,
            "use_sliding_window": false, "tie_word_embeddings": false, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "norm_topk_prob": true, "num_experts": experts, "num_experts_per_tok": experts.min(8),
            "rope_theta": 1_000_000.0, "rope_scaling": null, "bos_token_id": 1, "eos_token_id": 2,
        });
        std::fs::create_dir_all(folder).map_err(testkit::at(folder))?;
        let files = (folder.join("shapes.tsv"), folder.join("config.json"));
        std::fs::write(&files.0, shapes).map_err(testkit::at(&files.0))?;
        std::fs::write(&files.1, format!("{config:#}\n")).map_err(testkit::at(&files.1))?;
        Ok(files)
    }
}

fn published_models(folder: &Path) -> Result<Vec<String>> {
    let shapes = folder.join("shapes");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&shapes).map_err(testkit::at(&shapes))? {
        let path = entry.map_err(testkit::at(&shapes))?.path();
        if path.extension().is_some_and(|e| e == "tsv") {
            names.extend(path.file_stem().map(|s| s.to_string_lossy().into_owned()));
        }
    }
    names.sort();
    Ok(names)
}
