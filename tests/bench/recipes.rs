//! Time that a recipe takes from its text to a decision for every weight: 200 rules over the 51,000 tensors of a mixture of
//! experts, each a weight of its own, on one thread and on all. Processor time of all threads is counted, which other work
//! on the machine changes little; Linux tells it.
//!
//! `cargo bench --bench recipes`; the kind of pattern filters: `cargo bench --bench recipes -- regexes`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::hint::black_box;

use criterion::measurement::{Measurement, ValueFormatter, WallTime};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use radpack::model::{self, WeightTable};
use radpack::recipe::Recipe;
use radpack::tensor::{DType, Shape, TensorInfo};
use rayon::ThreadPoolBuilder;
use serde_json::json;

const LAYERS: usize = 44;
const EXPERTS: usize = 384;
const RULES: usize = 200;

/// Processor time of this process in nanoseconds, in place of a clock.
struct ProcessorTime;

/// What the threads of this process have run; none of them ends during a measurement.
fn processor_time() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("/proc, as on Linux");
    let ran = tasks.filter_map(|task| {
        let text = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    ran.sum()
}

impl Measurement for ProcessorTime {
    type Intermediate = u64;
    type Value = u64;

    fn start(&self) -> u64 {
        processor_time()
    }

    fn end(&self, start: u64) -> u64 {
        processor_time().saturating_sub(start)
    }

    fn add(&self, a: &u64, b: &u64) -> u64 {
        a + b
    }

    fn zero(&self) -> u64 {
        0
    }

    fn to_f64(&self, value: &u64) -> f64 {
        *value as f64
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        self
    }
}

/// As criterion shows nanoseconds of a clock.
impl ValueFormatter for ProcessorTime {
    fn scale_values(&self, typical: f64, values: &mut [f64]) -> &'static str {
        WallTime.formatter().scale_values(typical, values)
    }

    fn scale_throughputs(&self, typical: f64, by: &Throughput, values: &mut [f64]) -> &'static str {
        WallTime.formatter().scale_throughputs(typical, by, values)
    }

    fn scale_for_machines(&self, values: &mut [f64]) -> &'static str {
        WallTime.formatter().scale_for_machines(values)
    }
}

/// A Qwen 3 mixture of experts with small shapes.
fn table() -> WeightTable {
    let (hidden, width, head, vocab) = (64u64, 32u64, 16u64, 256u64);
    let mut tensors: BTreeMap<String, TensorInfo> = BTreeMap::new();
    let mut put = |name: String, shape: &[u64]| {
        let info = TensorInfo { dtype: DType::BF16, shape: Shape::new(shape.to_vec()) };
        tensors.insert(format!("{name}.weight"), info);
    };
    put("model.embed_tokens".to_owned(), &[vocab, hidden]);
    put("model.norm".to_owned(), &[hidden]);
    put("lm_head".to_owned(), &[vocab, hidden]);
    for layer in 0..LAYERS {
        let at = format!("model.layers.{layer}");
        put(format!("{at}.input_layernorm"), &[hidden]);
        put(format!("{at}.post_attention_layernorm"), &[hidden]);
        for (name, heads) in [("q", 4), ("k", 2), ("v", 2)] {
            put(format!("{at}.self_attn.{name}_proj"), &[heads * head, hidden]);
        }
        put(format!("{at}.self_attn.o_proj"), &[hidden, 4 * head]);
        put(format!("{at}.self_attn.q_norm"), &[head]);
        put(format!("{at}.self_attn.k_norm"), &[head]);
        put(format!("{at}.mlp.gate"), &[EXPERTS as u64, hidden]);
        for expert in 0..EXPERTS {
            let at = format!("{at}.mlp.experts.{expert}");
            put(format!("{at}.gate_proj"), &[width, hidden]);
            put(format!("{at}.up_proj"), &[width, hidden]);
            put(format!("{at}.down_proj"), &[hidden, width]);
        }
    }
    let config = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 4 * hidden,
        "moe_intermediate_size": width, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": head, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "attention_bias": false, "max_position_embeddings": 4096, "sliding_window": null,
        "use_sliding_window": false, "tie_word_embeddings": false, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "norm_topk_prob": true, "num_experts": EXPERTS, "num_experts_per_tok": 8,
        "rope_theta": 10_000.0, "rope_scaling": null, "bos_token_id": 1, "eos_token_id": 2,
    });
    let table = model::weights_only(Some(&config), &tensors).unwrap_or_else(|f| panic!("{f}"));
    assert!(table.weights.len() > 50_000, "{}", table.weights.len());
    table
}

/// A pattern of each kind for rule `i`. None of them decides everything, so that rules behind it are asked as well.
fn patterns(kind: &str, i: usize) -> String {
    let (layer, other) = (i % LAYERS, (i + 7) % LAYERS);
    match kind {
        // One name.
        "names" => format!("model.layers.{layer}.mlp.experts.{i}.down_proj.weight"),
        // Some names of one layer, or one expert of all.
        "layers" if i.is_multiple_of(2) => {
            format!("model.layers.{layer}.*.{{gate,up}}_proj.weight")
        }
        "layers" => format!("*.experts.{i}.down_proj.weight"),
        // Nothing between dots tells which names come in question.
        "globs" => format!("*.experts.*{i}.?*_proj.weight"),
        _ => format!(
            r"re:model\.layers\.({layer}|{other})\.mlp\.experts\.\d*{}\..*_proj\.weight",
            i % 10
        ),
    }
}

fn recipe(kind: &str) -> String {
    let kinds = ["names", "layers", "globs", "regexes"];
    let mut out = String::from("schema = 1\n");
    for i in 0..RULES {
        let kind = if kind == "mixed" { kinds[i % kinds.len()] } else { kind };
        let encoding = ["int8-channel", "fp8-channel"][i % 2];
        let _ = write!(
            out,
            "\n[[quantize]]\nmatch = '{}'\nencoding = \"{encoding}\"\noptional = true\n",
            patterns(kind, i)
        );
    }
    out
}

fn resolve(c: &mut Criterion<ProcessorTime>) {
    let table = table();
    let mut group = c.benchmark_group("200 rules");
    group.sample_size(10);
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    for kind in ["names", "layers", "globs", "regexes", "mixed"] {
        let text = recipe(kind);
        for threads in [1, all] {
            let pool = ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            group.bench_function(BenchmarkId::new(kind, threads), |b| {
                b.iter(|| {
                    pool.install(|| {
                        let recipe = Recipe::from_bytes("bench", text.clone().into_bytes());
                        let recipe = recipe.unwrap_or_else(|f| panic!("{f}"));
                        let made = recipe.resolve(&table, "bench");
                        black_box(made.unwrap_or_else(|f| panic!("{f}")))
                    })
                })
            });
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().with_measurement(ProcessorTime);
    targets = resolve
}
criterion_main!(benches);
