//! Gemma 4 31B under the published recipes: which programs, which input shapes, how large, and every rule that
//! optimum-rbln 0.11.2 has about sizes.

mod published_support;

use std::sync::Arc;

use radpack::diag::{Failure, SourceText};
use radpack::graph::{self, Programs, Shards, Sizes, wire};
use radpack::model::Model;
use radpack::partition::{self, Models};
use radpack::recipe::{self, Profile, Recipe};
use radpack::tensor::DType;

use published_support::published;

fn profile(recipe: &Recipe) -> Option<Profile> {
    recipe.target.profile.as_deref().map(|p| Profile::find(p).expect("a profile"))
}

fn sizes(model: &Model, recipe: &Recipe) -> Result<graph::Sized, Failure> {
    graph::derive(&model.spec, false, recipe, profile(recipe).as_ref(), DType::BF16)
}

struct Compiled {
    sizes: Sizes,
    programs: Programs,
}

fn compile(model: &Model, recipe: &Recipe) -> Compiled {
    let sizes = sizes(model, recipe).unwrap_or_else(|f| panic!("{f}")).sizes;
    let assignment = recipe.resolve(&model.table, "31B").unwrap_or_else(|f| panic!("{f}"));
    let devices = u32::try_from(recipe.target.devices).expect("devices");
    let vision: Vec<u32> = recipe
        .vision
        .devices
        .clone()
        .unwrap_or_else(|| vec![0])
        .iter()
        .map(|d| *d as u32)
        .collect();
    let models = Models { main: Some(&model.spec), draft: None };
    let placement = partition::place(models, &model.table, &assignment, devices, &vision)
        .unwrap_or_else(|f| panic!("{f}"));
    let shards = Shards::new(recipe, &model.table, &assignment, &placement);
    let programs =
        graph::compile(&model.spec, None, &sizes, &shards).unwrap_or_else(|f| panic!("{f}"));
    Compiled { sizes, programs }
}

fn builtin(name: &str) -> Recipe {
    recipe::load(Some(name)).unwrap_or_else(|f| panic!("{f}"))
}

fn names(programs: &Programs) -> Vec<&str> {
    programs.programs.iter().map(|p| p.name.as_str()).collect()
}

fn inputs(programs: &Programs, name: &str) -> Vec<String> {
    let program = programs.get(name).expect("the program");
    program
        .inputs
        .iter()
        .map(|p| {
            let v = program.value(p.value).expect("a value");
            format!("{} {}{}", p.name, v.dtype, v.shape)
        })
        .collect()
}

/// Bytes of the index and of all program sections, as an artifact stores them.
fn section_bytes(programs: &Programs) -> (u64, u64) {
    let (index, sections) = wire::to_wire(programs);
    let bytes = |v: u64| v;
    let index = bytes(bincode_len(&index));
    (index, sections.iter().map(bincode_len).sum())
}

fn bincode_len<T: serde::Serialize>(value: &T) -> u64 {
    radpack::artifact::codec::encoded_len(value)
}

#[test]
fn the_published_rbln_recipe_compiles_to_the_published_programs() {
    let model = published("gemma-4-31B");
    let c = compile(&model, &builtin("gemma-4/rbln-w8a16-x16"));
    assert_eq!(
        names(&c.programs),
        [
            "prefill",
            "image_prefill_384",
            "decode_b8",
            "decode_b4",
            "decode_b2",
            "decode_b1",
            "vision_t280",
            "project_t280"
        ]
    );
    // optimum-rbln 0.11.2 on the same settings; its F is the type of the saved model.
    assert_eq!(
        inputs(&c.programs, "prefill"),
        [
            "inputs_embeds f16[1, 128, 5376]",
            "cache_position i32[1, 128]",
            "block_tables i16[16]",
            "local_block_tables i16[1]",
            "query_position i16[]",
            "attention_mask f16[1, 262144]",
            "position_ids i32[1, 128]"
        ]
    );
    assert_eq!(inputs(&c.programs, "image_prefill_384")[0], "inputs_embeds f16[1, 384, 5376]");
    assert_eq!(
        inputs(&c.programs, "decode_b8"),
        [
            "inputs_embeds f16[8, 1, 5376]",
            "cache_position i32[8, 1]",
            "block_tables i16[8, 16]",
            "local_block_tables i16[8]",
            "attention_mask f16[8, 262144]",
            "position_ids i32[8, 1]"
        ]
    );
    // 60 layers of keys and values; one block of all full layers takes 320 MiB a device, the windows 400 MiB.
    assert_eq!(c.programs.kv.len(), 120);
    let (mut block, mut windows) = (0, 0);
    for t in &c.programs.kv {
        let bytes = t.unit_bytes().expect("fits");
        match t.layout {
            graph::ir::KvLayout::Paged { .. } => block += bytes,
            graph::ir::KvLayout::Window { .. } => windows += bytes,
        }
    }
    assert_eq!((block, windows), (320 << 20, 400 << 20));
    assert_eq!((c.sizes.full_blocks(), c.sizes.min_blocks()), (128, 17));
}

#[test]
fn the_bucketing_recipe_compiles_three_image_prefills_and_five_vision_programs() {
    let model = published("gemma-4-31B");
    let recipe = builtin("gemma-4/rbln-bucketing");
    let start = std::time::Instant::now();
    let c = compile(&model, &recipe);
    let took = start.elapsed();
    let found = names(&c.programs);
    assert_eq!(
        found,
        [
            "prefill",
            "image_prefill_1152",
            "image_prefill_640",
            "image_prefill_384",
            "decode_b8",
            "decode_b4",
            "decode_b2",
            "decode_b1",
            "vision_t1120",
            "vision_t560",
            "vision_t280",
            "vision_t140",
            "vision_t70",
            "project_t1120",
            "project_t560",
            "project_t280",
            "project_t140",
            "project_t70"
        ]
    );
    let (index, sections) = section_bytes(&c.programs);
    println!("18 programs in {took:?}: index {index} bytes, sections {sections} bytes");
    assert!(index + sections < 1 << 20, "{index} + {sections} bytes");
    // What is stored gives the same programs back.
    let (index, sections) = wire::to_wire(&c.programs);
    assert_eq!(index.programs(sections).expect("sections"), c.programs);
}

#[test]
fn every_published_variant_compiles_with_its_towers() {
    for (name, devices) in [("26B-A4B", 2), ("12B", 8), ("E4B", 8), ("E2B", 8)] {
        let model = published(&format!("gemma-4-{name}"));
        let mut recipe = builtin("gemma-4/bf16");
        recipe.target.devices = devices;
        let c = compile(&model, &recipe);
        assert!(c.programs.get("vision_t280").is_some(), "{name}");
        assert!(graph::verify(&c.programs).is_empty(), "{name}");
    }
}

fn with(settings: &str) -> Recipe {
    let text = format!("schema = 1\n[target]\nprofile = \"rbln-ca25\"\n{settings}");
    Recipe::parse(Arc::new(SourceText { name: "case".into(), text }))
        .unwrap_or_else(|f| panic!("{f}"))
}

#[test]
fn sizes_that_go_together_are_derived_as_optimum_rbln_derives_them() {
    let model = published("gemma-4-31B");
    let get = |settings: &str| sizes(&model, &with(settings)).unwrap_or_else(|f| panic!("{f}"));

    let s = get("").sizes;
    assert_eq!((s.max_seq_len, s.block, s.batch_size), (262_144, 16_384, 1));
    assert_eq!((s.prefill_chunk, s.decoder_batch_sizes.as_slice()), (128, &[1][..]));
    assert_eq!((s.soft_tokens.as_slice(), s.image_prefill.as_slice()), (&[280][..], &[384][..]));

    // One bucket for each distinct round-up to 128.
    let s = get("[vision]\nmax_soft_tokens = [70, 140, 280, 560, 1120]").sizes;
    assert_eq!(s.image_prefill, [1152, 640, 384, 256, 128]);
    let s = get("[vision]\nmax_soft_tokens = 300");
    assert_eq!((s.sizes.image_prefill.as_slice(), s.warnings.len()), (&[384][..], 1));
    let s = get(
        "[vision]\nmax_soft_tokens = [70, 140, 280, 560, 1120]\n[graphs]\nimage_prefill_chunk_size = [384, 640, 1152]",
    );
    assert_eq!(s.sizes.image_prefill, [1152, 640, 384]);
    // One large size serves all.
    let s = get("[vision]\nmax_soft_tokens = [70, 280]\n[graphs]\nimage_prefill_chunk_size = 640");
    assert_eq!(s.sizes.image_prefill, [640]);

    // A decoder for the whole batch is appended, with a warning; sizes are sorted.
    let s = get("[graphs]\nbatch_size = 8\ndecoder_batch_sizes = [1, 4]");
    assert_eq!((s.sizes.decoder_batch_sizes.as_slice(), s.warnings.len()), (&[8, 4, 1][..], 1));

    // Eager attention: one block a sequence, up to 32,768 tokens.
    let s = get("[graphs]\nattention = \"eager\"\nmax_seq_len = 32768\nbatch_size = 4").sizes;
    assert_eq!((s.block, s.full_blocks(), s.min_blocks()), (32_768, 4, 4));
    // A partition selects flash attention; at least two of them.
    let s = get("[graphs]\nmax_seq_len = 2048\nkv_partition_len = 1024").sizes;
    assert_eq!((s.block, s.full_blocks(), s.min_blocks()), (1024, 2, 2));
    // The longest sequence or the batch decides the minimum.
    let s = get("[graphs]\nmax_seq_len = 32768\nbatch_size = 8").sizes;
    assert_eq!((s.full_blocks(), s.min_blocks()), (16, 9));
}

#[test]
fn sizes_that_do_not_go_together_are_refused_with_what_would_work() {
    let model = published("gemma-4-31B");
    let cases = [
        (
            "[graphs]\nkv_partition_len = 512",
            "kv_partition_len is 512; on rbln-ca25 it is 1024 to 32768",
        ),
        (
            "[graphs]\nmax_seq_len = 16384",
            "max_seq_len 16384 has to be a multiple of kv_partition_len 16384 and at least 32768 on rbln-ca25",
        ),
        (
            "[graphs]\nmax_seq_len = 40000",
            "max_seq_len 40000 has to be a multiple of kv_partition_len 16384 and at least 32768 on rbln-ca25",
        ),
        (
            "[graphs]\nattention = \"eager\"\nmax_seq_len = 65536",
            "eager attention takes up to 32768 tokens on rbln-ca25, max_seq_len is 65536",
        ),
        (
            "[graphs]\nattention = \"eager\"\nmax_seq_len = 8192\nkv_partition_len = 4096",
            "attention = \"eager\" takes the whole sequence at once, kv_partition_len is 4096",
        ),
        (
            "[graphs]\nprefill_chunk_size = 100",
            "prefill_chunk_size 100 is no multiple of 64, which it has to be on rbln-ca25",
        ),
        (
            "[graphs]\nprefill_chunk_size = 32768\nmax_seq_len = 65536\nkv_partition_len = 32768",
            "a window of 1024 tokens and a chunk of 32768 exceed 32768 on rbln-ca25",
        ),
        (
            "[graphs]\nbatch_size = 2\ndecoder_batch_sizes = [4, 2]",
            "decoder_batch_sizes has 4, batch_size is 2",
        ),
        (
            "[graphs]\nimage_prefill_chunk_size = [384, 640]",
            "no image uses image_prefill_chunk_size 640: each number of soft tokens (280) takes the smallest size that holds it",
        ),
        (
            "[graphs]\nimage_prefill_chunk_size = 256",
            "the largest image_prefill_chunk_size is 256, an image takes up to 280 tokens",
        ),
        (
            "[graphs]\nimage_prefill_chunk_size = 300",
            "image_prefill_chunk_size 300 is no multiple of 128, which it has to be on rbln-ca25",
        ),
        ("[graphs]\nkv_dtype = \"f32\"", "rbln-ca25 has no cache in f32"),
    ];
    for (settings, rule) in cases {
        let failure = sizes(&model, &with(settings)).expect_err(settings);
        let messages: Vec<&str> = failure.problems.iter().map(|p| p.message.as_str()).collect();
        assert_eq!(messages, [rule], "{settings}");
        assert!(failure.problems.iter().all(|p| !p.help.is_empty()), "{settings}");
        assert_eq!(failure.kind.exit_code(), 3);
    }
    // All problems at once.
    let all = "[graphs]\nprefill_chunk_size = 100\nkv_partition_len = 512\nbatch_size = 2\ndecoder_batch_sizes = [4]";
    assert_eq!(sizes(&model, &with(all)).expect_err("three").problems.len(), 3);
}

#[test]
fn a_target_refuses_encodings_that_it_does_not_run() {
    let model = published("gemma-4-31B");
    let recipe = builtin("int8-g128");
    let assignment = recipe.resolve(&model.table, "31B").unwrap_or_else(|f| panic!("{f}"));
    let rbln = Profile::find("rbln-ca25").expect("a profile");
    let problems = rbln.misfits(&recipe, &model.table, &assignment).into_vec();
    let messages: Vec<&str> = problems.iter().map(|p| p.message.as_str()).collect();
    assert_eq!(messages.len(), 1, "{messages:?}");
    assert!(
        messages[0].starts_with("rbln-ca25 runs no weights in int8-g128, which"),
        "{messages:?}"
    );
    for target in ["nvidia-h100", "amd-r9700", "cpu", "tpu-v7"] {
        let target = Profile::find(target).expect("a profile");
        assert!(target.misfits(&recipe, &model.table, &assignment).is_empty(), "{}", target.name);
    }
}
