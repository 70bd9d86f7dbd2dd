//! Images: patches through the encoder and the projector into prompts, as transformers does it.

mod runtime_support;

use radpack::graph::Sizes;
use radpack::runtime::Image;
use runtime_support::{Compiled, KEEP, Loaded, Reference, TOLERANCE, difference};

const MODELS: [&str; 4] =
    ["tiny-gemma4-dense", "tiny-gemma4-e", "tiny-gemma4-moe", "tiny-gemma4-unified"];

/// Every image of it has 64 patches and becomes 16 soft tokens.
const FIXED: &str = "tiny-gemma3-vision";

/// Largest differences of image rows and of logits, after 16 tokens that have to be the same.
fn run(loaded: &Loaded, name: &str, compiled: Compiled) -> (f32, f32) {
    let reference = Reference::of(name);
    let images = reference.images();
    let tokens = reference.tokens("image.input_ids");
    let mut engine = loaded.engine(compiled);
    let mut features = Vec::new();
    for image in &images {
        let rows = engine.encode(image).unwrap_or_else(|f| panic!("{name}\n{f}"));
        features.extend(rows.as_floats().expect("floats"));
    }
    let rows = engine.prefill_all(1, &tokens, &images).unwrap_or_else(|f| panic!("{name}\n{f}"));
    let said = engine.generate(0, &tokens, &images, 16, &[]).unwrap_or_else(|f| panic!("{f}"));
    assert_eq!(said, reference.tokens("image.greedy_ids"), "{name}");
    (
        difference(&features, reference.floats("image.image_features")),
        difference(&rows.logits, reference.floats("image.logits")),
    )
}

#[test]
fn images_agree_with_transformers_in_features_logits_and_greedy_tokens() {
    for name in [&MODELS[..], &[FIXED]].concat() {
        let loaded = Loaded::new(name);
        for devices in [1, 2, 4, 16] {
            let compiled = loaded.compile(KEEP, &loaded.sizes(), devices, &[0]).expect("it splits");
            let (features, logits) = run(&loaded, name, compiled);
            println!("{name:22} {devices:2} devices: features {features:.1e}, logits {logits:.1e}");
            assert!(features < TOLERANCE, "{name} on {devices}: features differ by {features}");
            assert!(logits < TOLERANCE, "{name} on {devices}: logits differ by {logits}");
        }
    }
}

#[test]
fn encoders_on_several_devices_give_the_same_rows() {
    for name in [&MODELS[..3], &[FIXED]].concat() {
        let loaded = Loaded::new(name);
        for vision in [&[0, 1][..], &[3, 1, 0, 2], &(0..16).collect::<Vec<u32>>()] {
            let devices = if vision.len() > 4 { 16 } else { 4 };
            let compiled =
                loaded.compile(KEEP, &loaded.sizes(), devices, vision).expect("it splits");
            let (features, logits) = run(&loaded, name, compiled);
            assert!(features < TOLERANCE, "{name} on {vision:?}: features differ by {features}");
            assert!(logits < TOLERANCE, "{name} on {vision:?}: logits differ by {logits}");
        }
    }
}

#[test]
fn buckets_and_blocks_of_any_size_give_the_same() {
    for name in MODELS {
        let loaded = Loaded::new(name);
        for (chunk, buckets, block, soft_tokens) in [
            (4, vec![12, 6], 16, vec![12]),
            (32, vec![32], 32, vec![12, 9]),
            (16, vec![40, 12], 160, vec![24, 12]),
        ] {
            let sizes = Sizes {
                prefill_chunk: chunk,
                image_prefill: buckets,
                block,
                soft_tokens,
                ..loaded.sizes()
            };
            let compiled = loaded.compile(KEEP, &sizes, 1, &[0]).expect("one device");
            let (features, logits) = run(&loaded, name, compiled);
            assert!(features < TOLERANCE, "{name} {chunk}: features differ by {features}");
            assert!(logits < TOLERANCE, "{name} {chunk}: logits differ by {logits}");
        }
    }
}

#[test]
fn gemma3_gives_the_same_in_chunks_and_blocks_of_any_size() {
    let loaded = Loaded::new(FIXED);
    for (chunk, image, block, aligned) in
        [(4, 16, 16, true), (32, 16, 32, true), (7, 40, 160, true), (16, 16, 8, false)]
    {
        let sizes = Sizes {
            prefill_chunk: chunk,
            image_prefill: vec![image],
            block,
            aligned,
            ..loaded.sizes()
        };
        let compiled = loaded.compile(KEEP, &sizes, 1, &[0]).expect("one device");
        let (features, logits) = run(&loaded, FIXED, compiled);
        assert!(features < TOLERANCE, "{chunk}: features differ by {features}");
        assert!(logits < TOLERANCE, "{chunk}: logits differ by {logits}");
    }
}

#[test]
fn a_fixed_encoder_takes_whole_pictures_alone() {
    let loaded = Loaded::new(FIXED);
    let reference = Reference::of(FIXED);
    let (images, tokens) = (reference.images(), reference.tokens("image.input_ids"));
    let mut engine = loaded.on(2).expect("two devices");
    let mut half = images[0].clone();
    half.pixels.truncate(32 * 48);
    half.positions.truncate(32);
    let failure = engine.prefill(0, &tokens, &[half, images[1].clone()]).expect_err("a refusal");
    assert_eq!(failure.problems[0].message, "an image of 32 patches; the encoder takes 64");
}

#[test]
fn images_that_do_not_fit_are_refused() {
    let loaded = Loaded::new("tiny-gemma4-dense");
    let reference = Reference::of("tiny-gemma4-dense");
    let (images, tokens) = (reference.images(), reference.tokens("image.input_ids"));
    let mut engine = loaded.on(1).expect("one device");
    let mut said = |images: &[Image]| {
        let failure = engine.prefill(0, &tokens, images).expect_err("a refusal");
        assert_eq!(failure.kind, radpack::diag::FailureKind::Refused);
        failure.problems[0].message.clone()
    };
    assert_eq!(said(&images[..1]), "the prompt has 2 runs of image tokens for 1 images");
    let swapped = [images[1].clone(), images[0].clone()];
    assert_eq!(said(&swapped), "an image of 12 soft tokens for a run of 6 image tokens");
    let patch = |n: i64| [n % 20, n / 20];
    let large = Image { pixels: vec![0.5; 120 * 48], positions: (0..120).map(patch).collect() };
    assert_eq!(
        said(&[large, images[1].clone()]),
        "an image of 120 patches passes the largest encoder of 108"
    );
    let narrow = Image { pixels: vec![0.5; 9 * 12], positions: (0..9).map(patch).collect() };
    assert_eq!(said(&[narrow, images[1].clone()]), "patches have 12 values, the encoder takes 48");
}
