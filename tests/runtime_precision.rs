//! The arithmetic of a target: roundings and activation rules change logits, by little, and alike on any number of devices.

mod runtime_support;

use radpack::graph::Sizes;
use radpack::runtime::Precision;
use radpack::tensor::DType;
use runtime_support::{Loaded, Reference, TARGETS, difference};

fn recipe(activations: &str) -> String {
    format!(
        "schema = 1\n[[quantize]]\nclass = [\"linear\", \"expert\"]\nencoding = \"keep\"\nactivations = \"{activations}\"\n"
    )
}

/// Logits of all rows of the text prompt.
fn logits(name: &str, rule: &str, dtype: DType, devices: u32, precision: Precision) -> Vec<f32> {
    let loaded = Loaded::new(name);
    let sizes = Sizes { float: dtype, kv_dtype: dtype, ..loaded.sizes() };
    let compiled = loaded.compile(&recipe(rule), &sizes, devices, &[0]).expect("it splits");
    let mut engine = loaded.engine(compiled).with_precision(precision);
    let tokens = Reference::of(name).tokens("text.input_ids");
    engine.prefill_all(0, &tokens, &[]).unwrap_or_else(|f| panic!("{name}\n{f}")).logits
}

/// Root of the mean square of the differences, over that of the values' own spread.
fn relative(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    assert!(a.iter().all(|v| v.is_finite()));
    let square = |d: f32| f64::from(d) * f64::from(d);
    let error: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    let own: f64 = b.iter().map(|b| square(*b)).sum();
    (error / own).sqrt()
}

#[test]
fn every_rule_changes_logits_by_no_more_than_its_codes_allow() {
    let bounds = [
        ("bf16", 0.0005, 0.05),
        ("f16", 0.00005, 0.01),
        ("int8-token", 0.001, 0.15),
        ("int8-group128", 0.001, 0.15),
        ("fp8-token", 0.005, 0.45),
        ("fp8-group128", 0.005, 0.45),
        ("mxfp8", 0.005, 0.45),
        ("nvfp4", 0.02, 1.0),
        ("mxfp4", 0.02, 1.2),
    ];
    for name in ["tiny-llama", "tiny-gemma4-dense", "tiny-qwen3-moe"] {
        let mut found = Vec::new();
        for (rule, low, high) in bounds {
            let reference = logits(name, rule, DType::F32, 1, Precision::Reference);
            let target = logits(name, rule, DType::F32, 1, Precision::Target);
            let off = relative(&target, &reference);
            println!("{name:20} {rule:14} {off:.5}");
            assert!((low..high).contains(&off), "{name}, {rule}: {off}");
            found.push(off);
        }
        // Fewer bits, larger errors.
        assert!(found[1] < found[0] && found[0] < found[4] && found[2] < found[4], "{found:?}");
        assert!(found[4] < found[7] && found[6] < found[8], "{found:?}");
    }
}

#[test]
fn types_of_programs_and_caches_are_the_roundings_of_a_target() {
    for name in TARGETS {
        let expected = Reference::of(name);
        // Roundings change which experts a row goes to, and with them its logits.
        let experts = if name.ends_with("-moe") { 4.0 } else { 1.0 };
        for (dtype, rule, most) in
            [(DType::BF16, "bf16", 0.08 * experts), (DType::F16, "f16", 0.01 * experts)]
        {
            // In f32 the types that programs state change nothing.
            let reference = logits(name, rule, dtype, 1, Precision::Reference);
            let far = difference(&reference, expected.floats("text.logits"));
            assert!(far < runtime_support::TOLERANCE, "{name}: {far}");
            let target = logits(name, rule, dtype, 1, Precision::Target);
            let off = relative(&target, expected.floats("text.logits"));
            println!("{name:20} {dtype} {off:.5}");
            assert!((1e-5..most).contains(&off), "{name} in {dtype}: {off}");
        }
        // f32 programs without rules have nothing to round.
        let plain = logits(name, "f32", DType::F32, 1, Precision::Target);
        assert_eq!(plain, logits(name, "f32", DType::F32, 1, Precision::Reference), "{name}");
    }
}

#[test]
fn rules_whose_groups_are_whole_on_every_device_give_the_same_on_any_number_of_them() {
    // Groups of 32 columns lie within the shares of these models' matrices on 2 devices and on 4; a scale for a token is
    // that of a device's own columns, so those rules stay near and do not agree.
    for name in ["tiny-gemma4-dense"] {
        for (rule, near) in [
            ("mxfp8", 1e-5),
            ("mxfp4", 1e-5),
            ("bf16", 0.02),
            ("int8-token", 0.15),
            ("fp8-token", 0.4),
        ] {
            let one = logits(name, rule, DType::F32, 1, Precision::Target);
            for devices in [2, 4] {
                let many = logits(name, rule, DType::F32, devices, Precision::Target);
                let off = relative(&many, &one);
                println!("{name:20} {rule:12} {devices} {off:.6}");
                assert!(off < near, "{name}, {rule} on {devices}: {off}");
            }
        }
    }
}

#[test]
fn caches_of_8_bits_round_what_is_read_back() {
    let name = "tiny-llama";
    let loaded = Loaded::new(name);
    let sizes = Sizes { kv_dtype: DType::F8E4M3, ..loaded.sizes() };
    let run = |precision| {
        let compiled = loaded.compile(&recipe("f32"), &sizes, 1, &[0]).expect("one device");
        let mut engine = loaded.engine(compiled).with_precision(precision);
        let tokens = Reference::of(name).tokens("text.input_ids");
        engine.prefill_all(0, &tokens, &[]).unwrap_or_else(|f| panic!("{f}")).logits
    };
    let off = relative(&run(Precision::Target), &run(Precision::Reference));
    assert!((0.001..0.2).contains(&off), "{off}");
}
