//! Gemma 3 with images, from a folder to an answer: sizes, programs, files for several devices, pictures, prompts, and the
//! published 4B without weights.

#[path = "cli_support/mod.rs"]
mod cli_support;
#[path = "model_support/mod.rs"]
#[allow(dead_code)] // every test file uses a part of it
mod models;
mod runtime_support;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cli_support::{radpack, succeeds};
use radpack::artifact::Artifact;
use radpack::diag::{Failure, SourceText};
use radpack::graph::{self, Programs, Shards, Sized};
use radpack::model::{self, ImageAttention, Model};
use radpack::partition::{self, Models};
use radpack::recipe::{Profile, Recipe};
use radpack::runtime::{self, Tokenizer};
use radpack::tensor::DType;
use runtime_support::{Reference, TOLERANCE, difference};
use serde_json::{Value, json};

const NAME: &str = "tiny-gemma3-vision";

/// As Gemma 3's template puts images: the token that begins one.
const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}<|image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<turn|>\n{% endfor %}";

fn recipe(text: &str) -> Recipe {
    let source = SourceText { name: "test".into(), text: text.into() };
    Recipe::parse(Arc::new(source)).unwrap_or_else(|f| panic!("{f}"))
}

fn derived(model: &Model, target: Option<&str>, settings: &str) -> Result<Sized, Failure> {
    let head = target.map_or(String::new(), |t| format!("[target]\nprofile = \"{t}\"\n"));
    let recipe = recipe(&format!("schema = 1\n{head}{settings}"));
    let profile = target.map(|t| Profile::find(t).expect("a profile"));
    graph::derive(&model.spec, false, &recipe, profile.as_ref(), DType::BF16)
}

fn published() -> Model {
    let (config, tensors) = models::gemma3_4b();
    model::read(&config, None, &tensors).unwrap_or_else(|f| panic!("{f}"))
}

#[test]
fn images_of_one_size_decide_the_sizes_of_programs() {
    let model = published();
    assert_eq!(model.spec.text.image_attention, ImageAttention::Windowed);
    let chunks = |target: Option<&str>, settings: &str| {
        let sized = derived(&model, target, settings).unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(sized.warnings, []);
        let s = sized.sizes;
        assert!(s.embeds && s.soft_tokens == [256] && s.image_prefill == [256]);
        (s.prefill_chunk, s.aligned)
    };
    // optimum-rbln 0.11.2: one prefill size, mm_tokens_per_image, whatever the device's default.
    for target in ["rbln-ca22", "rbln-ca25", "rbln-cr"] {
        assert_eq!(chunks(Some(target), ""), (256, true), "{target}");
    }
    let said = "[vision]\nmax_soft_tokens = 256\n[graphs]\nimage_prefill_chunk_size = 256\nprefill_chunk_size = 256";
    assert_eq!(chunks(Some("rbln-ca25"), said), (256, true));
    // Other engines and the reference executor have no such rule for text.
    assert_eq!(chunks(None, ""), (128, false));
    assert_eq!(chunks(Some("cpu"), "[graphs]\nprefill_chunk_size = 64"), (64, false));
    assert_eq!(chunks(Some("nvidia-h100"), ""), (2048, false));
}

#[test]
fn other_sizes_are_refused_with_the_one_that_works() {
    let model = published();
    let cases = [
        (
            Some("rbln-ca25"),
            "[graphs]\nprefill_chunk_size = 128",
            "prefill_chunk_size is 128; on rbln-ca25 it has to be the 256 tokens of an image",
        ),
        (
            Some("rbln-ca25"),
            "[graphs]\nimage_prefill_chunk_size = 384",
            "image_prefill_chunk_size is 384; every image of this model is 256 tokens",
        ),
        (
            None,
            "[graphs]\nimage_prefill_chunk_size = [256, 512]",
            "image_prefill_chunk_size is 256 and 512; every image of this model is 256 tokens",
        ),
        (
            None,
            "[vision]\nmax_soft_tokens = 280",
            "[vision] max_soft_tokens is 280; every image of this model becomes 256 tokens",
        ),
        (None, "[graphs]\nmax_seq_len = 192", "an image of 256 tokens exceeds max_seq_len 192"),
    ];
    for (target, settings, rule) in cases {
        let failure = derived(&model, target, settings).expect_err(settings);
        let messages: Vec<&str> = failure.problems.iter().map(|p| p.message.as_str()).collect();
        assert_eq!(messages, [rule], "{settings}");
        assert!(failure.problems.iter().all(|p| p.help.iter().any(|h| h.contains("256"))));
        assert_eq!(failure.kind.exit_code(), 3);
    }
    assert!(derived(&model, None, "[graphs]\nmax_seq_len = 256").is_ok());
}

fn compiled(model: &Model, devices: u32, vision: &[u32]) -> Result<Programs, Failure> {
    let recipe = recipe("schema = 1\n[target]\nprofile = \"rbln-ca25\"\n");
    let sizes = derived(model, Some("rbln-ca25"), "").unwrap_or_else(|f| panic!("{f}")).sizes;
    let assignment = recipe.resolve(&model.table, "4B").unwrap_or_else(|f| panic!("{f}"));
    let models = Models { main: Some(&model.spec), draft: None };
    let placement = partition::place(models, &model.table, &assignment, devices, vision)?;
    let shards = Shards::new(&recipe, &model.table, &assignment, &placement);
    Ok(graph::compile(&model.spec, None, &sizes, &shards).unwrap_or_else(|f| panic!("{f}")))
}

#[test]
fn the_published_4b_compiles_to_programs_of_its_sizes() {
    let model = published();
    let programs = compiled(&model, 8, &[0, 1, 2, 3]).unwrap_or_else(|f| panic!("{f}"));
    let names: Vec<&str> = programs.programs.iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names, ["prefill", "image_prefill_256", "decode_b1", "vision_t256", "project_t256"]);
    let vision = programs.get("vision_t256").expect("an encoder");
    let text = graph::Text { program: vision, kv: &programs.kv }.to_string();
    let lines: Vec<&str> = text.lines().collect();
    let head: Vec<&str> = lines[..20].to_vec();
    insta::assert_snapshot!(head.join("\n"), @r"
    program vision_t256 on 4 devices {
      input %0 bf16[1, 4096, 588]: pixel_values
      %1 bf16[1, 4096, 1152] = embed_patches(%0) @vision.patch_embd.weight[1152, 3, 14, 14] + @vision.patch_embd.bias[1152]
      %2 bf16[1, 4096, 1152] = add_rows(%1) @vision.position_embd.weight[4096, 1152]
      %3 bf16[1, 4096, 1152] = layer_norm(%2) @vision.blk.0.attn_norm.weight[1152] + @vision.blk.0.attn_norm.bias[1152] eps 0.000001
      %4 bf16[1, 4096, 288], %6 bf16[1, 4096, 288], %8 bf16[1, 4096, 288] = linear(%3) @vision.blk.0.attn_q.weight[288, 1152] rows + @vision.blk.0.attn_q.bias[288] rows, @vision.blk.0.attn_k.weight[288, 1152] rows + @vision.blk.0.attn_k.bias[288] rows, @vision.blk.0.attn_v.weight[288, 1152] rows + @vision.blk.0.attn_v.bias[288] rows
      %5 bf16[1, 4096, 4, 72] = reshape(%4)
      %7 bf16[1, 4096, 4, 72] = reshape(%6)
      %9 bf16[1, 4096, 4, 72] = reshape(%8)
      %10 bf16[1, 4096, 288] = dense_attention(%5, %7, %9) scale 0.11785113019775792
      %11 bf16[1, 4096, 1152] = linear(%10) @vision.blk.0.attn_output.weight[1152, 288] columns
      %12 bf16[1, 4096, 1152] = all_reduce(%11)
      %13 bf16[1, 4096, 1152] = shift(%12) + @vision.blk.0.attn_output.bias[1152]
      %14 bf16[1, 4096, 1152] = add(%2, %13)
      %15 bf16[1, 4096, 1152] = layer_norm(%14) @vision.blk.0.ffn_norm.weight[1152] + @vision.blk.0.ffn_norm.bias[1152] eps 0.000001
      %16 bf16[1, 4096, 1076] = linear(%15) @vision.blk.0.ffn_up.weight[1076, 1152] rows + @vision.blk.0.ffn_up.bias[1076] rows
      %17 bf16[1, 4096, 1076] = activate(%16) GeluTanh
      %18 bf16[1, 4096, 1152] = linear(%17) @vision.blk.0.ffn_down.weight[1152, 1076] columns
      %19 bf16[1, 4096, 1152] = all_reduce(%18)
      %20 bf16[1, 4096, 1152] = shift(%19) + @vision.blk.0.ffn_down.bias[1152]
    ");
    insta::assert_snapshot!(lines[lines.len() - 4..].join("\n"), @r"
      %515 bf16[1, 4096, 1152] = add(%508, %514)
      %516 bf16[1, 4096, 1152] = layer_norm(%515) @vision.post_norm.weight[1152] + @vision.post_norm.bias[1152] eps 0.000001
      output %516: hidden
    }
    ");
    let project = programs.get("project_t256").expect("a projector");
    let text = graph::Text { program: project, kv: &programs.kv }.to_string();
    insta::assert_snapshot!(text, @r"
    program project_t256 on 4 devices {
      input %0 bf16[1, 4096, 1152]: image_features
      %1 bf16[1, 256, 1152] = pool_grid(%0) squares of 4 x 4
      %2 bf16[1, 256, 1152] = rms_norm(%1) @mm.vision_norm.weight[1152] eps 0.000001 factor 1 + w
      %3 bf16[1, 256, 2560] = product(%2) @mm.vision.weight[1152, 2560]
      output %3: image_embeds
    }
    ");
    // Heads of the encoder decide how many devices run it.
    for vision in [&[0][..], &[7, 0], &(0..8).collect::<Vec<u32>>()] {
        assert!(compiled(&model, 8, vision).is_ok(), "{vision:?}");
    }
    let failure = compiled(&model, 8, &[0, 1, 2]).expect_err("16 heads on 3 devices");
    let first = &failure.problems[0].message;
    assert_eq!(first, "vision.blk.*.attn_q: 16 attention heads do not split over 3 devices");
}

// ---- files -----------------------------------------------------------------------------------------------------------

const RECIPE: &str = "schema = 1\n[graphs]\nmax_seq_len = 256\nbatch_size = 2\nprefill_chunk_size = 32\nkv_partition_len = 64\n";
/// Groups of 16 codes: four of the encoder's heads, and a seventh of its MLP's width, so that shares are padded.
const INT8_G16: &str = "[[quantize]]\nclass = [\"linear\"]\nencoding = { codes = \"i8\", scale = \"bf16\", group = 16 }\n";

fn tiny() -> String {
    testkit::tiny_model(NAME).to_str().expect("UTF-8").to_owned()
}

fn converted(folder: &Path, recipe: &str, devices: u32, vision: &str, out: &str) -> Artifact {
    fs::write(folder.join("recipe.toml"), format!("{recipe}[vision]\ndevices = {vision}\n"))
        .expect("writes");
    let (source, devices) = (tiny(), devices.to_string());
    let args = ["convert", &source, "--recipe", "recipe.toml", "--devices", &devices, "-o", out];
    succeeds(folder, &args);
    succeeds(folder, &["validate", out, "--against", &source]);
    Artifact::open(&folder.join(out)).expect("opens")
}

/// Image rows, logits and tokens that a file gives.
fn answered(artifact: &Artifact) -> (Vec<f32>, Vec<f32>, Vec<u64>) {
    let reference = Reference::of(NAME);
    let opened = runtime::open(artifact).unwrap_or_else(|f| panic!("{f}"));
    let mut engine = opened.engine(256, 1 << 30).unwrap_or_else(|f| panic!("{f}"));
    let (tokens, images) = (reference.tokens("image.input_ids"), reference.images());
    let mut features = Vec::new();
    for image in &images {
        let rows = engine.encode(image).unwrap_or_else(|f| panic!("{f}"));
        features.extend(rows.as_floats().expect("floats"));
    }
    let rows = engine.prefill_all(0, &tokens, &images).unwrap_or_else(|f| panic!("{f}"));
    let said = engine.generate(0, &tokens, &images, 16, &[]).unwrap_or_else(|f| panic!("{f}"));
    (features, rows.logits, said)
}

#[test]
fn files_for_several_vision_devices_agree_with_transformers() {
    let tmp = tempfile::tempdir().expect("a folder");
    let reference = Reference::of(NAME);
    for (devices, vision) in
        [(1, "[0]"), (2, "[0, 1]"), (4, "[3, 1, 0, 2]"), (16, "[5, 2]"), (4, "[2]")]
    {
        let artifact = converted(tmp.path(), RECIPE, devices, vision, "m.rad");
        let (features, logits, said) = answered(&artifact);
        assert_eq!(said, reference.tokens("image.greedy_ids"), "{devices} {vision}");
        let features = difference(&features, reference.floats("image.image_features"));
        let logits = difference(&logits, reference.floats("image.logits"));
        println!(
            "{devices} devices, vision {vision}: features {features:.1e}, logits {logits:.1e}"
        );
        assert!(features < TOLERANCE && logits < TOLERANCE, "{devices} {vision}");
    }
    let cut = Artifact::open(&tmp.path().join("m.rad")).expect("opens");
    assert!(cut.find("vision.blk.0.attn_q.weight").is_some(), "one vision device holds it whole");
}

#[test]
fn a_quantized_encoder_says_the_same_on_any_number_of_devices() {
    let tmp = tempfile::tempdir().expect("a folder");
    let recipe = format!("{RECIPE}{INT8_G16}");
    let one = answered(&converted(tmp.path(), &recipe, 1, "[0]", "one.rad"));
    let unquantized = Reference::of(NAME);
    assert!(difference(&one.0, unquantized.floats("image.image_features")) > 1e-3);
    for (devices, vision) in [(2, "[1, 0]"), (4, "[0, 1, 2, 3]")] {
        let artifact = converted(tmp.path(), &recipe, devices, vision, "many.rad");
        assert!(artifact.find(&format!("vision.blk.1.ffn_down.weight@1/{devices}")).is_some());
        let many = answered(&artifact);
        assert!(difference(&one.0, &many.0) < TOLERANCE, "{devices}");
        assert!(difference(&one.1, &many.1) < TOLERANCE, "{devices}");
        assert_eq!(one.2, many.2);
    }
}

#[test]
fn the_manifest_says_that_images_are_taken_and_videos_are_not() {
    let tmp = tempfile::tempdir().expect("a folder");
    converted(tmp.path(), RECIPE, 1, "[0]", "m.rad");
    let manifest =
        succeeds(tmp.path(), &["extract", "m.rad", "radpack/manifest.json", "-o", "m.json"]);
    assert_eq!(manifest.code, 0);
    let manifest: Value =
        serde_json::from_slice(&fs::read(tmp.path().join("m.json")).expect("reads")).expect("JSON");
    let graphs = &manifest["graphs"];
    assert_eq!(graphs["takes"], json!(["text", "image"]));
    assert!(graphs.get("refuses").is_none_or(|r| *r == json!({})), "{graphs}");
    assert_eq!(graphs["max_soft_tokens"], json!([16]));
    assert_eq!(graphs["image_prefill_chunk_size"], json!([16]));
    let card = succeeds(tmp.path(), &["card", "m.rad"]).stdout;
    assert!(card.contains("| takes | text, image |"), "{card}");
    assert!(card.contains("pipeline_tag: image-text-to-text"), "{card}");
    let explain = ["explain", "m.rad", "--batch", "1", "--prompt", "60", "--image-tokens", "16"];
    let text = succeeds(tmp.path(), &explain).stdout;
    assert!(text.contains("image_prefill_16") && text.contains("vision_t16"), "{text}");
    let deep = succeeds(tmp.path(), &["validate", "m.rad", "--deep"]);
    assert!(deep.stdout.contains("5 programs ran"), "{}", deep.stdout);
}

#[test]
fn its_programs_export_as_stablehlo() {
    let tmp = tempfile::tempdir().expect("a folder");
    for (devices, vision) in [(1, "[0]"), (4, "[0, 1, 2, 3]")] {
        converted(tmp.path(), RECIPE, devices, vision, "m.rad");
        let out = format!("x{devices}");
        succeeds(tmp.path(), &["export", "m.rad", "--format", "stablehlo", "-o", &out]);
        let document = fs::read(tmp.path().join(&out).join("stablehlo.json")).expect("a document");
        let document: Value = serde_json::from_slice(&document).expect("JSON");
        assert_eq!(document["left_out"], json!([]));
        let modules: Vec<&str> = document["modules"]
            .as_array()
            .expect("modules")
            .iter()
            .filter_map(|m| m["name"].as_str())
            .collect();
        assert_eq!(
            modules,
            ["prefill", "image_prefill_16", "decode_b2", "vision_t16", "project_t16"]
        );
    }
}

// ---- pictures and prompts --------------------------------------------------------------------------------------------

fn fixture(name: &str) -> PathBuf {
    testkit::fixtures().join("images").join(name)
}

/// A file with a chat template.
fn chatting(folder: &Path) -> Artifact {
    let source = folder.join("model");
    testkit::copy_folder(Path::new(&tiny()), &source).expect("copies");
    fs::write(source.join("chat_template.jinja"), TEMPLATE).expect("writes");
    fs::write(folder.join("recipe.toml"), RECIPE).expect("writes");
    succeeds(folder, &["convert", "model", "--recipe", "recipe.toml", "-o", "m.rad"]);
    Artifact::open(&folder.join("m.rad")).expect("opens")
}

#[test]
fn prompts_have_the_tokens_of_the_processor() {
    let tmp = tempfile::tempdir().expect("a folder");
    let artifact = chatting(tmp.path());
    let opened = runtime::open(&artifact).unwrap_or_else(|f| panic!("{f}"));
    let tokenizer = Tokenizer::read(&artifact).unwrap_or_else(|f| panic!("{f}"));
    let vision = opened.spec.vision.as_ref().expect("an encoder");
    let about: Value =
        serde_json::from_slice(&fs::read(fixture("gemma3.json")).expect("a fixture"))
            .expect("JSON");
    let prompts = about["prompts"].as_array().expect("prompts");
    assert_eq!(prompts.len(), 4);
    for row in prompts {
        let text = row["text"].as_str().expect("a text");
        let images = vec![16; row["images"].as_u64().expect("a count") as usize];
        let model = (vision, &opened.spec.tokens);
        let ids = runtime::image_tokens(&tokenizer, text, false, &images, model);
        let ids = ids.unwrap_or_else(|f| panic!("{f}"));
        let expected: Vec<u64> =
            row["ids"].as_array().expect("ids").iter().filter_map(Value::as_u64).collect();
        assert_eq!(ids, expected, "{text:?}");
        let failure = runtime::image_tokens(&tokenizer, text, false, &images[1..], model)
            .expect_err("one image too few");
        assert!(failure.problems[0].message.starts_with("the prompt has"), "{failure}");
    }
}

#[test]
fn a_picture_in_a_file_is_answered_as_its_patches_are() {
    let tmp = tempfile::tempdir().expect("a folder");
    let artifact = chatting(tmp.path());
    let opened = runtime::open(&artifact).unwrap_or_else(|f| panic!("{f}"));
    let (rgb, large) = (fixture("rgb.png"), fixture("large.png"));
    let [rgb, large] = [&rgb, &large].map(|p| p.to_str().expect("UTF-8"));
    let args = ["run", "m.rad", "--prompt", "what is this?", "--max-tokens", "6", "--json"];
    let ask = |images: &[&str]| -> Value {
        let images = images.iter().flat_map(|i| ["--image", i]);
        let args: Vec<&str> = args.iter().copied().chain(images).collect();
        serde_json::from_str(&succeeds(tmp.path(), &args).stdout).expect("JSON")
    };
    let document = ask(&[rgb]);
    let text = "<bos><|turn>user\n<|image>what is this?<turn|>\n";
    assert_eq!(document["prompt"], text);
    let about: Value =
        serde_json::from_slice(&fs::read(fixture("gemma3.json")).expect("a fixture"))
            .expect("JSON");
    assert_eq!(about["prompts"][0]["text"], text);
    let ids: Vec<u64> = about["prompts"][0]["ids"]
        .as_array()
        .expect("ids")
        .iter()
        .filter_map(Value::as_u64)
        .collect();
    assert_eq!(document["prompt_tokens"], ids.len());
    assert_eq!(
        document["images"][0]["programs"],
        json!(["vision_t16", "project_t16", "image_prefill_16"])
    );
    assert_eq!(document["images"][0]["patches"], json!([8, 8]));

    let picture = |path: &str| {
        let decoded = runtime::Picture::decode(&fs::read(path).expect("reads"));
        let decoded = decoded.unwrap_or_else(|f| panic!("{f}"));
        opened.images(&[decoded], None).unwrap_or_else(|f| panic!("{f}"))
    };
    let stop = runtime::stop_tokens(&artifact).expect("JSON");
    let mut engine = opened.engine(256, 1 << 30).unwrap_or_else(|f| panic!("{f}"));
    let said = engine.generate(0, &ids, &picture(rgb), 6, &stop).unwrap_or_else(|f| panic!("{f}"));
    assert_eq!(document["tokens"], json!(said));
    // The picture counts.
    let logits: Vec<Vec<f32>> = [rgb, large]
        .iter()
        .map(|p| engine.prefill(0, &ids, &picture(p)).unwrap_or_else(|f| panic!("{f}")))
        .collect();
    assert!(difference(&logits[0], &logits[1]) > 0.01);
    let two = ask(&[large, rgb]);
    assert_eq!(two["images"].as_array().map(Vec::len), Some(2));

    let refused = |more: &[&str], said: &str| {
        let ran = radpack(tmp.path(), &[&args[..], more].concat());
        assert_eq!(ran.code, 3, "{}", ran.stderr);
        assert!(ran.stderr.contains(said), "{}", ran.stderr);
    };
    refused(&["--image", rgb, "--image-tokens", "8"], "every image of this model becomes 16");
    refused(&["--image", rgb, "--image-tokens", "70"], "the largest encoder gives 16");
    refused(&["--image", rgb, "--raw"], "the prompt has 0 places for 1 image");

    // A processor that would make other pictures is not ignored.
    let other = tmp.path().join("model/preprocessor_config.json");
    let text =
        fs::read_to_string(&other).expect("reads").replace("\"resample\": 2", "\"resample\": 3");
    fs::write(&other, text).expect("writes");
    succeeds(tmp.path(), &["convert", "model", "--recipe", "recipe.toml", "-o", "m.rad"]);
    refused(&["--image", rgb], "resample is 3; pictures are resized bilinearly");
}

// ---- the published model ---------------------------------------------------------------------------------------------

#[test]
fn the_published_4b_plans_and_estimates_without_weights() {
    let tmp = tempfile::tempdir().expect("a folder");
    let (config, tensors) = models::gemma3_4b();
    let (shapes, file) = (tmp.path().join("shapes.tsv"), tmp.path().join("config.json"));
    let rows: Vec<String> = tensors
        .iter()
        .map(|(name, info)| format!("{name}\tBF16\t{:?}\n", info.shape.extents()))
        .collect();
    fs::write(&shapes, rows.concat()).expect("writes");
    fs::write(&file, config.to_string()).expect("writes");
    let options = testkit::SparseOptions::default();
    testkit::sparse(&shapes, &file, &tmp.path().join("model"), options).expect("a checkpoint");
    let sets = |devices: &'static str| {
        ["--recipe", "w8a16", "--target", "rbln-ca25", "--devices", devices, "--set"]
    };
    let plan = |devices: &'static str| {
        let args = ["convert", "model", "--dry-run", "--no-tokenizer"];
        let length = ["graphs.max_seq_len=32768"];
        succeeds(tmp.path(), &[&args[..], &sets(devices), &length].concat()).stdout
    };
    for devices in ["1", "4"] {
        let text = plan(devices);
        for part in ["image_prefill_256", "vision_t256", "project_t256"] {
            assert!(text.contains(part), "{devices}: {text}");
        }
        assert!(!text.contains("not compiled"), "{text}");
    }
    let args = ["estimate-kv", "model", "--json"];
    let estimate = [&args[..], &sets("4"), &["graphs.max_seq_len=32768"]].concat();
    let text = succeeds(tmp.path(), &estimate).stdout;
    let document: Value = serde_json::from_str(&text).expect("JSON");
    let estimate = &document["estimate"];
    assert_eq!(estimate["devices"].as_array().map(Vec::len), Some(4), "{document}");
    assert_eq!(estimate["max_seq_len"], 32_768);
    // 0.11.2 leaves the encoder out; the answer with it stands beside.
    let blocks = |answer: &Value| answer["blocks"].as_u64();
    assert!(blocks(estimate).is_some_and(|b| b > 0), "{document}");
    assert!(estimate["with_encoder"].is_object(), "{document}");
}
