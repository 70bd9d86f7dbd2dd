//! `radpack run --image`: from files to an answer, with the programs, tokens and chat template that the artifact holds.

#[path = "cli_support/mod.rs"]
mod cli_support;

use std::fs;
use std::path::{Path, PathBuf};

use cli_support::{dense_copy, radpack, succeeds};
use radpack::artifact::Artifact;
use radpack::runtime::{self, Image, Tokenizer};
use safetensors::SafeTensors;
use serde_json::Value;

const RECIPE: &str = "schema = 1\n[graphs]\nmax_seq_len = 512\nbatch_size = 2\nprefill_chunk_size = 32\nkv_partition_len = 128\n[vision]\nmax_soft_tokens = [12, 6]\n";

/// Places of images as Gemma 4's template puts them: a token, which the host makes as many as there are rows.
const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}<|image|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<turn|>\n{% endfor %}";

fn fixture(name: &str) -> PathBuf {
    testkit::fixtures().join("images").join(name)
}

fn converted(folder: &Path) -> Artifact {
    let source = dense_copy(folder);
    fs::write(source.join("chat_template.jinja"), TEMPLATE).expect("writes");
    fs::write(folder.join("recipe.toml"), RECIPE).expect("writes");
    succeeds(folder, &["convert", "model", "--recipe", "recipe.toml", "-o", "m.rad"]);
    Artifact::open(&folder.join("m.rad")).expect("opens")
}

/// What the processor of transformers makes of a picture.
fn processed(name: &str, soft: u64) -> Image {
    let bytes = fs::read(fixture("processed.safetensors")).expect("a fixture");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let pixels = file.tensor(&format!("{name}/{soft}/pixels")).expect("pixels");
    let at = file.tensor(&format!("{name}/{soft}/positions")).expect("positions");
    let at: Vec<i64> = at.data().as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
    Image {
        pixels: pixels.data().iter().map(|b| (f64::from(*b) * (1.0 / 255.0)) as f32).collect(),
        positions: at.as_chunks().0.to_vec(),
    }
}

fn json(folder: &Path, args: &[&str]) -> Value {
    let ran = succeeds(folder, &[args, &["--json"]].concat());
    let document = serde_json::from_str(&ran.stdout).expect("JSON");
    let schema = fs::read_to_string(testkit::root().join("schemas/run.schema.json"));
    let schema: Value = serde_json::from_str(&schema.expect("committed")).expect("JSON");
    assert!(jsonschema::is_valid(&schema, &document));
    document
}

fn ids(document: &Value) -> Vec<u64> {
    document["tokens"].as_array().expect("tokens").iter().filter_map(Value::as_u64).collect()
}

#[test]
fn pictures_in_files_are_answered_as_the_processors_patches_are() {
    let tmp = tempfile::tempdir().expect("a folder");
    let artifact = converted(tmp.path());
    let opened = runtime::open(&artifact).unwrap_or_else(|f| panic!("{f}"));
    let tokenizer = Tokenizer::read(&artifact).unwrap_or_else(|f| panic!("{f}"));
    // rgb.png becomes 8 tokens, flat.png 12: (begin, 8 times, end), (begin, 12 times, end).
    let (rgb, flat) = (fixture("rgb.png"), fixture("flat.png"));
    let [rgb, flat] = [&rgb, &flat].map(|p| p.to_str().expect("UTF-8"));
    let args = ["run", "m.rad", "--prompt", "what is this?", "--max-tokens", "6"];
    let document = json(tmp.path(), &[&args[..], &["--image", rgb, "--image", flat]].concat());
    let text = "<bos><|turn>user\n<|image|><|image|>what is this?<turn|>\n";
    assert_eq!(document["prompt"], text);
    let plain = tokenizer.tokens(text, false).expect("tokens");
    let mut tokens = Vec::new();
    let mut counts = [8, 12].iter();
    for token in plain {
        match token {
            498 => {
                tokens.push(496);
                tokens.extend(vec![498; *counts.next().expect("two images")]);
                tokens.push(497);
            }
            other => tokens.push(other),
        }
    }
    assert_eq!(document["prompt_tokens"], tokens.len());
    let images = [processed("rgb.png", 12), processed("flat.png", 12)];
    let mut engine = opened.engine(256, 1 << 30).unwrap_or_else(|f| panic!("{f}"));
    let stop = runtime::stop_tokens(&artifact).expect("JSON");
    let expected = engine.generate(0, &tokens, &images, 6, &stop).unwrap_or_else(|f| panic!("{f}"));
    assert_eq!(ids(&document), expected);
    let said: Vec<(u64, Vec<&str>)> = document["images"]
        .as_array()
        .expect("images")
        .iter()
        .map(|i| {
            let programs = i["programs"].as_array().expect("programs");
            let programs = programs.iter().map(|p| p.as_str().expect("a name")).collect();
            (i["tokens"].as_u64().expect("a count"), programs)
        })
        .collect();
    assert_eq!(said[0], (8, vec!["vision_t12", "project_t12", "image_prefill_128"]));
    assert_eq!(said[1], (12, vec!["vision_t12", "project_t12", "image_prefill_128"]));
    assert_eq!(document["images"][0]["pixels"], serde_json::json!([37, 53]));
    assert_eq!(document["images"][0]["patches"], serde_json::json!([6, 12]));
    // explain names the same programs.
    let prompt = tokens.len().to_string();
    let explain = ["explain", "m.rad", "--batch", "1", "--prompt", &prompt, "--image-tokens", "8"];
    let explained = succeeds(tmp.path(), &explain).stdout;
    assert!(
        explained.contains("vision_t12") && explained.contains("image_prefill_128"),
        "{explained}"
    );

    // The pictures count, and so does their order.
    let swapped = json(tmp.path(), &[&args[..], &["--image", flat, "--image", rgb]].concat());
    assert_eq!(swapped["images"][0]["tokens"], 12);
    let logits = |images: &[Image]| {
        let mut engine = opened.engine(256, 1 << 30).unwrap_or_else(|f| panic!("{f}"));
        engine.prefill(0, &tokens, images).unwrap_or_else(|f| panic!("{f}"))
    };
    let other = [processed("palette.png", 12), processed("flat.png", 12)];
    let mut other_rgb = other[0].clone();
    other_rgb.pixels.truncate(72 * 48);
    other_rgb.positions.clone_from(&images[0].positions);
    let changed = logits(&[other_rgb, other[1].clone()]);
    let far = logits(&images).iter().zip(&changed).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(far > 0.01, "another picture changes logits by {far}");
}

#[test]
fn smaller_pictures_run_smaller_programs() {
    let tmp = tempfile::tempdir().expect("a folder");
    converted(tmp.path());
    let large = fixture("large.png");
    let large = large.to_str().expect("UTF-8");
    let raw = ["run", "m.rad", "--raw", "--prompt", "see <|image|> there", "--max-tokens", "3"];
    let document =
        json(tmp.path(), &[&raw[..], &["--image", large, "--image-tokens", "6"]].concat());
    let image = &document["images"][0];
    assert_eq!(image["tokens"], 4);
    assert_eq!(
        image["programs"],
        serde_json::json!(["vision_t6", "project_t6", "image_prefill_128"])
    );
    let ran = succeeds(tmp.path(), &[&raw[..], &["--image", large]].concat());
    assert!(
        ran.stderr.contains("300 × 240 pixels as 9 × 9 patches; 9 tokens by"),
        "{}",
        ran.stderr
    );
}

#[test]
fn pictures_that_cannot_be_used_are_refused_with_their_reason() {
    let tmp = tempfile::tempdir().expect("a folder");
    converted(tmp.path());
    let rgb = fixture("rgb.png");
    let rgb = rgb.to_str().expect("UTF-8");
    let said = |code: i32, args: &[&str]| {
        let ran = radpack(tmp.path(), &[&["run", "--prompt", "what?"], args].concat());
        assert_eq!(ran.code, code, "{}", ran.stderr);
        ran.stderr
    };
    let text = said(3, &["m.rad", "--image", rgb, "--image-tokens", "70"]);
    assert!(text.contains("70 tokens for an image; the largest encoder gives 12"), "{text}");
    let text = said(3, &["m.rad", "--image", rgb, "--raw"]);
    assert!(text.contains("the prompt has 0 places for 1 image"), "{text}");
    assert!(text.contains("token 498"), "{text}");
    let text = said(1, &["m.rad", "--image", "absent.png"]);
    assert!(text.contains("absent.png"), "{text}");
    fs::write(tmp.path().join("broken.png"), b"\x89PNG\r\n\x1a\nno").expect("writes");
    let text = said(3, &["m.rad", "--image", "broken.png"]);
    assert!(text.contains("broken.png") && text.contains("cannot be decoded"), "{text}");
    said(2, &["m.rad", "--image-tokens", "12"]);
    let ran = radpack(
        tmp.path(),
        &["run", "m.rad", "--raw", "--prompt", "<|image|> <|image|>", "--image", rgb],
    );
    assert_eq!(ran.code, 3);
    assert!(ran.stderr.contains("the prompt has 2 places for 1 image"), "{}", ran.stderr);

    let llama = testkit::tiny_model("tiny-llama");
    let llama = llama.to_str().expect("UTF-8");
    succeeds(tmp.path(), &["convert", llama, "--set", "graphs.max_seq_len=256", "-o", "l.rad"]);
    let text = said(3, &["l.rad", "--raw", "--image", rgb]);
    assert!(text.contains("its programs take no images"), "{text}");
    succeeds(tmp.path(), &["convert", "model", "--text-only", "-o", "t.rad"]);
    let text = said(3, &["t.rad", "--image", rgb]);
    assert!(text.contains("its programs take no images"), "{text}");
}
