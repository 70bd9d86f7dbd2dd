//! Every small model compiles, for every number of devices that its heads allow, into programs that verify.

#[allow(dead_code)] // every test file uses a part of it
#[path = "model_support/mod.rs"]
mod models;

use std::sync::Arc;

use radpack::diag::SourceText;
use radpack::graph::{self, Programs, Shards, Sizes};
use radpack::model::{Model, VisionSpec};
use radpack::partition::{self, Models, Placement};
use radpack::recipe::{Assignment, Recipe};
use radpack::tensor::DType;

/// Sizes that force every path of a small model: several blocks, chunks that wrap windows, two decoders.
fn sizes(model: &Model, draft: bool) -> Sizes {
    let images = model.spec.vision.is_some();
    let (image_prefill, soft_tokens) = match &model.spec.vision {
        Some(VisionSpec::Siglip(v)) => (vec![v.soft_tokens], vec![v.soft_tokens]),
        Some(_) => (vec![32], vec![12]),
        None => (Vec::new(), Vec::new()),
    };
    Sizes {
        max_seq_len: 128,
        batch_size: 4,
        decoder_batch_sizes: vec![4, 1],
        prefill_chunk: 16,
        image_prefill,
        block: 32,
        kv_dtype: DType::F32,
        float: DType::F32,
        soft_tokens,
        embeds: images,
        aligned: images,
        draft_tokens: if draft { 4 } else { 0 },
        hidden: draft,
    }
}

fn recipe(text: &str) -> Recipe {
    let source = SourceText { name: "test".into(), text: text.into() };
    Recipe::parse(Arc::new(source)).unwrap_or_else(|f| panic!("{f}"))
}

const BF16: &str = "schema = 1\n";
const INT8_G16: &str = "schema = 1\n[[quantize]]\nclass = [\"linear\", \"expert\"]\nencoding = { codes = \"i8\", scale = \"bf16\", group = 16 }\n";

struct Compiled {
    programs: Programs,
    placement: Placement,
}

fn decide(model: &Model, recipe: &Recipe) -> Assignment {
    recipe.resolve(&model.table, "test").unwrap_or_else(|f| panic!("{f}"))
}

fn compile(model: &Model, draft: Option<&Model>, text: &str, devices: u32) -> Option<Compiled> {
    let recipe = recipe(text);
    let mut model = model.clone();
    if let Some(draft) = draft {
        model.table.merge_draft(draft.table.clone());
    }
    let assignment = decide(&model, &recipe);
    let models = Models { main: Some(&model.spec), draft: draft.map(|d| &d.spec) };
    let placement = partition::place(models, &model.table, &assignment, devices, &[0]).ok()?;
    let shards = Shards::new(&recipe, &model.table, &assignment, &placement);
    let sizes = sizes(&model, draft.is_some());
    let programs = graph::compile(&model.spec, draft.map(|d| &d.spec), &sizes, &shards)
        .unwrap_or_else(|f| panic!("{f}"));
    Some(Compiled { programs, placement })
}

fn names(programs: &Programs) -> Vec<&str> {
    programs.programs.iter().map(|p| p.name.as_str()).collect()
}

#[test]
fn every_small_model_compiles_for_every_number_of_devices_that_its_heads_allow() {
    for name in models::TINY.iter().filter(|n| !n.contains("assistant")) {
        let model = models::good(name);
        for devices in [1, 2, 4, 8, 16] {
            for text in [BF16, INT8_G16] {
                // Every one of them has 16 query heads or more.
                let compiled = compile(&model, None, text, devices);
                let whole = name.starts_with("tiny-gemma3");
                let half_a_group = !whole && text == INT8_G16 && devices > 1;
                let Some(compiled) = compiled else {
                    assert!(half_a_group, "{name} on {devices}");
                    continue;
                };
                assert!(graph::verify(&compiled.programs).is_empty());
                for program in &compiled.programs.programs {
                    let arena = graph::arena(program).expect("sizes fit");
                    assert!(arena.bytes >= arena.peak, "{name} {}", program.name);
                    assert!(
                        arena.bytes <= arena.peak * 3 / 2,
                        "{name} {}: {arena:?}",
                        program.name
                    );
                }
                assert_eq!(compiled.placement.devices, devices);
            }
        }
        let one = compile(&model, None, BF16, 1).expect("one device");
        let tower = model.spec.vision.as_ref();
        let expected: &[&str] = match tower {
            None => &["prefill", "decode_b4", "decode_b1"],
            Some(VisionSpec::Siglip(_)) => &[
                "prefill",
                "image_prefill_16",
                "decode_b4",
                "decode_b1",
                "vision_t16",
                "project_t16",
            ],
            Some(_) => &[
                "prefill",
                "image_prefill_32",
                "decode_b4",
                "decode_b1",
                "vision_t12",
                "project_t12",
            ],
        };
        assert_eq!(names(&one.programs), expected, "{name}");
    }
}

#[test]
fn draft_heads_compile_beside_their_targets() {
    for (target, head) in [
        ("tiny-gemma4-dense", "tiny-gemma4-assistant"),
        ("tiny-gemma4-e", "tiny-gemma4-e-assistant"),
    ] {
        let (target, head) = (models::good(target), models::good(head));
        for devices in [1, 4, 16] {
            let compiled = compile(&target, Some(&head), BF16, devices).expect("it splits");
            let draft = compiled.programs.get("draft_b4").expect("a draft program");
            assert_eq!(draft.output_names(), ["logits", "hidden"]);
            let prefill = compiled.programs.get("prefill").expect("prefill");
            assert_eq!(prefill.output_names(), ["logits", "hidden"]);
        }
    }
}

trait OutputNames {
    fn output_names(&self) -> Vec<&str>;
}

impl OutputNames for graph::Program {
    fn output_names(&self) -> Vec<&str> {
        self.outputs.iter().map(|p| p.name.as_str()).collect()
    }
}

#[test]
fn a_program_reads_like_its_model() {
    let model = models::good("tiny-llama");
    let compiled = compile(&model, None, BF16, 4).expect("it splits");
    let decode = compiled.programs.get("decode_b1").expect("decode");
    let text = graph::Text { program: decode, kv: &compiled.programs.kv }.to_string();
    let head: Vec<&str> = text.lines().take(23).collect();
    insta::assert_snapshot!(head.join("\n"), @r"
    program decode_b1 on 4 devices {
      input %0 i64[1, 1]: input_ids
      input %3 i32[1, 1]: cache_position
      input %4 i16[1, 4]: block_tables
      %1 f32[1, 1, 64] = embed(%0) @token_embd.weight[128, 64] rows scale 1
      %2 f32[1, 1, 64] = all_reduce(%1)
      %5 f32[1, 1, 64] = rms_norm(%2) @blk.0.attn_norm.weight[64] eps 0.00001
      %6 f32[1, 1, 32], %9 f32[1, 1, 8], %11 f32[1, 1, 8] = linear(%5) @blk.0.attn_q.weight[32, 64] rows, @blk.0.attn_k.weight[8, 64] rows, @blk.0.attn_v.weight[8, 64] rows
      %7 f32[1, 1, 4, 8] = reshape(%6)
      %8 f32[1, 1, 4, 8] = rope(%7, %3) theta 500000 dims 8 scaling Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_positions: 32 }
      %10 f32[1, 1, 1, 8] = reshape(%9)
      %12 f32[1, 1, 1, 8] = reshape(%11)
      %13 f32[1, 1, 1, 8] = rope(%10, %3) theta 500000 dims 8 scaling Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_positions: 32 }
      kv_write(%13, %12, %3, %4) layer 0 (blocks of 32, 1 heads of 8)
      %14 f32[1, 1, 32] = paged_attention(%8, %3, %4) layer 0 (blocks of 32, 1 heads of 8) scale 0.3535533905932738 own Causal
      %15 f32[1, 1, 64] = linear(%14) @blk.0.attn_output.weight[64, 32] columns
      %16 f32[1, 1, 64] = all_reduce(%15)
      %17 f32[1, 1, 64] = add(%2, %16)
      %18 f32[1, 1, 64] = rms_norm(%17) @blk.0.ffn_norm.weight[64] eps 0.00001
      %19 f32[1, 1, 44], %20 f32[1, 1, 44] = linear(%18) @blk.0.ffn_gate.weight[44, 64] rows, @blk.0.ffn_up.weight[44, 64] rows
      %21 f32[1, 1, 44] = gated(%19, %20) Silu
      %22 f32[1, 1, 64] = linear(%21) @blk.0.ffn_down.weight[64, 44] columns
      %23 f32[1, 1, 64] = all_reduce(%22)
    ");
}
