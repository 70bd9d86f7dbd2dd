//! Whatever a recipe can say about scales and codes is refused when it is read, or encodes and decodes weights.

use std::sync::Arc;

use radpack::diag::{FailureKind, SourceText};
use radpack::quantize::{Decoder, Encoder, PlaneBuffers, PlaneSlice, Whole, peak};
use radpack::recipe::{EncodingChoice, Method, NAMED, Recipe};
use radpack::tensor::DType;

const ROWS: usize = 4;
const COLS: usize = 256;

/// The encoding that the recipe gives, or what it says is wrong.
fn read(body: &str) -> Result<EncodingChoice, String> {
    let text = format!("schema = 1\n[[quantize]]\nmatch = \"*\"\n{body}\n");
    let source = Arc::new(SourceText { name: "mine.toml".into(), text });
    match Recipe::parse(source) {
        Ok(recipe) => Ok(recipe.rules[0].encoding.clone()),
        Err(failure) => {
            assert_eq!(failure.kind, FailureKind::Usage, "{body}");
            Err(failure.to_string())
        }
    }
}

/// Weights between −0.1 and 0.1, in a type that holds them.
fn weights(source: DType) -> (Vec<u8>, Vec<f32>) {
    let mut state = 1u64;
    let mut bytes = Vec::new();
    let mut values = Vec::new();
    for _ in 0..ROWS * COLS {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let x = ((state >> 40) as f32 / (1 << 24) as f32 - 0.5) * 0.2;
        let x = match source {
            DType::BF16 => {
                let x = half::bf16::from_f32(x);
                bytes.extend(x.to_le_bytes());
                x.to_f32()
            }
            DType::F16 => {
                let x = half::f16::from_f32(x);
                bytes.extend(x.to_le_bytes());
                x.to_f32()
            }
            _ => {
                bytes.extend(x.to_le_bytes());
                x
            }
        };
        values.push(x);
    }
    (bytes, values)
}

/// Encodes row block by row block, decodes, and returns the relative error.
fn round_trip(method: &Method, source: DType) -> f64 {
    let (bytes, values) = weights(source);
    let whole =
        Encoder::needs_peak(method).then(|| Whole { peak: peak(source, &bytes).expect("finite") });
    let encoder = Encoder::new(method, source, ROWS as u64, COLS as u64, whole)
        .unwrap_or_else(|e| panic!("{:?}: {e}", method.options()));
    let mut planes = vec![Vec::new(); encoder.encoding().planes.len()];
    for (i, bytes) in encoder.whole_planes() {
        planes[i] = bytes.to_vec();
    }
    let mut buffers = PlaneBuffers::new();
    let step = encoder.row_block() as usize;
    for (i, rows) in bytes.chunks(step * encoder.source_row_bytes()).enumerate() {
        encoder.encode((i * step) as u64, rows, &mut buffers).expect("finite weights");
        for (p, plane) in planes.iter_mut().enumerate() {
            plane.extend_from_slice(buffers.plane(p));
        }
    }
    let decoder = Decoder::new(encoder.encoding(), ROWS as u64, COLS as u64).expect("decodes");
    let slices: Vec<PlaneSlice<'_>> = planes.iter().map(|p| PlaneSlice::whole(p)).collect();
    let mut decoded = vec![0f32; values.len()];
    decoder.decode(0..ROWS as u64, &slices, &mut decoded).expect("whole planes");
    let square = |x: f32| f64::from(x) * f64::from(x);
    let error: f64 = values.iter().zip(&decoded).map(|(a, b)| square(a - b)).sum();
    (error / values.iter().map(|v| square(*v)).sum::<f64>()).sqrt()
}

/// Keys of an encoding table, joined where they are there.
fn table(keys: &[&str]) -> String {
    let keys: Vec<&str> = keys.iter().copied().filter(|k| !k.is_empty()).collect();
    format!("encoding = {{ {} }}", keys.join(", "))
}

/// Every value of a key, with the key; "" leaves it out.
fn spelled(key: &str, values: &[&str]) -> Vec<String> {
    values
        .iter()
        .map(|v| match (*v, v.starts_with(['[', '{'])) {
            ("", _) => String::new(),
            (v, true) => format!("{key} = {v}"),
            (v, false) => format!("{key} = \"{v}\""),
        })
        .collect()
}

const CODES: [&str; 22] = [
    "i2", "i3", "i4", "i5", "i6", "i7", "i8", "i16", "u1", "u2", "u3", "u4", "u5", "u6", "u7",
    "u8", "u16", "fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1",
];

#[derive(Default)]
struct Seen {
    refused: usize,
    source: usize,
    encoded: usize,
    worst: f64,
}

impl Seen {
    fn check(&mut self, body: &str, sources: &[DType]) {
        let Ok(choice) = read(body) else {
            self.refused += 1;
            return;
        };
        for &source in sources {
            if let Method::Grid(grid) = &choice.method
                && grid.rounding.source_clash(grid, source).is_some()
            {
                self.source += 1;
                continue;
            }
            let error = round_trip(&choice.method, source);
            // Two values for a block, of which one may be 0 or neither: little is left of the weights.
            let two_values = ["\"u1\"", "\"binary\"", "[0.5, 1.5]"];
            let most = if two_values.iter().any(|t| body.contains(t)) { 2.0 } else { 0.8 };
            assert!(error < most, "{body} from {source}: relative error {error}");
            self.encoded += 1;
            self.worst = self.worst.max(error);
        }
    }
}

#[test]
fn every_grid_that_a_recipe_can_spell_encodes_and_decodes() {
    let mut codes = spelled("codes", &CODES);
    codes.extend(spelled("table", &["nf4", "ternary", "binary", "[-3, -1, 0, 2]", "[0.5, 1.5]"]));
    let blocks = ["", "group = 16", "group = 96", "block = [0, 0]", "block = [2, 32]"];
    let scales = spelled("scale", &["", "f16", "f32", "e8m0", "fp8_e4m3", "i8", "u8"]);
    let seconds =
        spelled("scale2", &["", "f32", "bf16", "f16", "{ dtype = \"f32\", block = [2, 64] }"]);
    let zeros = spelled("zero", &["", "u4", "u8", "u16"]);
    let mut seen = Seen::default();
    for codes in &codes {
        for block in blocks {
            for scale in &scales {
                for second in &seconds {
                    for zero in &zeros {
                        seen.check(&table(&[codes, block, scale, second, zero]), &[DType::BF16]);
                    }
                }
            }
        }
    }
    println!("{} encoded, {} refused, worst {}", seen.encoded, seen.refused, seen.worst);
    assert!(seen.encoded > 500 && seen.refused > 500);
}

#[test]
fn every_quantizer_and_rounding_is_refused_with_the_recipe_or_works() {
    let codes = spelled("codes", &["i4", "i8", "i6", "u4", "u8", "fp8_e4m3", "fp4_e2m1"]);
    let blocks =
        ["", "group = 16", "group = 32", "group = 128", "block = [0, 0]", "block = [2, 64]"];
    let scales = spelled("scale", &["", "f16", "f32", "e8m0", "fp8_e4m3"]);
    let seconds = spelled("scale2", &["", "f32"]);
    let zeros = spelled("zero", &["", "u8"]);
    let mut encodings: Vec<String> =
        NAMED.iter().map(|named| format!("encoding = \"{}\"", named.name)).collect();
    encodings.push("encoding = { table = \"nf4\", group = 64 }".into());
    for codes in &codes {
        for block in blocks {
            for scale in &scales {
                for second in &seconds {
                    for zero in &zeros {
                        encodings.push(table(&[codes, block, scale, second, zero]));
                    }
                }
            }
        }
    }
    let mut seen = Seen::default();
    for encoding in &encodings {
        for quantizer in ["rtn", "search"] {
            for rounding in
                ["rad", "compressed-tensors", "compressed-tensors-f32", "modelopt", "transformers"]
            {
                if (quantizer, rounding) == ("rtn", "rad") {
                    continue;
                }
                let body =
                    format!("{encoding}\nquantizer = \"{quantizer}\"\nrounding = \"{rounding}\"");
                seen.check(&body, &[DType::BF16, DType::F16, DType::F32]);
            }
        }
    }
    println!("{} encoded, {} refused, worst {}", seen.encoded, seen.refused, seen.worst);
    assert!(seen.encoded > 300 && seen.refused > 1000 && seen.source > 50);
}

#[test]
fn every_named_encoding_keeps_the_error_that_its_bits_promise() {
    let most = |name: &str| match name {
        "keep" | "bf16" => 0.0,
        "f16" => 1e-3,
        "f32" => 0.0,
        name if name.starts_with("int8") => 0.006,
        name if name.starts_with("int4") => 0.09,
        name if name.starts_with("fp8") || name == "mxfp8" => 0.03,
        "nvfp4" => 0.11,
        "mxfp4" => 0.13,
        other => panic!("{other} has no bound here"),
    };
    for named in NAMED {
        let choice = read(&format!("encoding = \"{}\"", named.name)).expect("named");
        assert_eq!(choice.name, Some(named.name));
        let error = round_trip(&choice.method, DType::BF16);
        assert!(error <= most(named.name), "{}: {error}", named.name);
    }
}

#[test]
fn a_recipe_that_searches_or_rounds_otherwise_reads_back_the_same() {
    for (body, options) in [
        (
            "encoding = \"int4-g32\"\nquantizer = \"search\"",
            "codes=i4,group=32,rule=search,scale=bf16",
        ),
        (
            "encoding = \"fp8-tensor\"\nrounding = \"compressed-tensors-f32\"",
            "block=*x*,codes=fp8_e4m3,rounding=compressed-tensors-f32,scale=f32",
        ),
        (
            "encoding = { codes = \"u4\", zero = \"u4\", group = 128 }\nrounding = \"compressed-tensors\"",
            "codes=u4,group=128,rounding=compressed-tensors,scale=bf16,zero=u4",
        ),
        (
            "encoding = { codes = \"fp8_e4m3\", block = [128, 128], scale = \"e8m0\" }\nrounding = \"transformers\"",
            "block=128x128,codes=fp8_e4m3,rounding=transformers,scale=e8m0",
        ),
    ] {
        let text = format!("schema = 1\n[[quantize]]\nmatch = \"*\"\n{body}\n");
        let parse = |text: String| {
            let source = Arc::new(SourceText { name: "mine.toml".into(), text });
            Recipe::parse(source).unwrap_or_else(|e| panic!("{e}"))
        };
        let first = parse(text);
        assert_eq!(first.rules[0].encoding.method.options(), options);
        let again = parse(first.to_toml());
        assert_eq!(again.rules[0].encoding, first.rules[0].encoding, "{body}");
        assert_eq!(again.to_toml(), first.to_toml());
    }
}
