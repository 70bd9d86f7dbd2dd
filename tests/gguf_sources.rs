//! GGUF files as sources: a file that gguf-py wrote (fixtures/gguf), files that testkit's converter makes of the tiny
//! models, and damaged ones.

mod checkpoint_support;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use checkpoint_support::{Model, open, problems};
use proptest::prelude::*;
use radpack::checkpoint::Checkpoint;
use radpack::checkpoint::gguf::header::read_header;
use radpack::model::{self, Weight, WeightTable};
use radpack::quantize::{Decoder, PlaneSlice};
use radpack::tensor::DType;
use safetensors::SafeTensors;
use testkit::gguf::{self, File, Outtype, Tensor, Value, kind};

fn fixture(name: &str) -> PathBuf {
    testkit::fixtures().join("gguf").join(name)
}

/// A source of one GGUF file.
fn opened(file: &File) -> (Model, Checkpoint) {
    let model = Model::new();
    model.put("m.gguf", &file.bytes());
    let checkpoint = open(&model.at("m.gguf")).unwrap_or_else(|failure| panic!("{failure}"));
    (model, checkpoint)
}

/// Messages of the problems that opening a file ends in.
fn refused(file: &File) -> Vec<String> {
    let model = Model::new();
    model.put("m.gguf", &file.bytes());
    problems(&open(&model.at("m.gguf")).expect_err("a refusal"), model.path())
}

/// Messages of the problems that reading the model ends in.
fn not_understood(file: &File) -> Vec<String> {
    let (model, checkpoint) = opened(file);
    let gguf = checkpoint.gguf().expect("a GGUF file");
    let failure = gguf.model(checkpoint.tensors()).expect_err("a refusal");
    assert_eq!(failure.kind.exit_code(), 3);
    problems(&failure, model.path())
}

fn table(checkpoint: &Checkpoint) -> WeightTable {
    let gguf = checkpoint.gguf().expect("a GGUF file");
    let mut model = gguf.model(checkpoint.tensors()).unwrap_or_else(|failure| panic!("{failure}"));
    for weight in &mut model.table.weights {
        weight.stored = checkpoint.stored(weight);
    }
    model.table
}

/// Values of a weight, read in blocks of three rows.
fn values(checkpoint: &Checkpoint, weight: &Weight) -> Vec<f32> {
    let source = checkpoint.source(weight).expect("a source");
    let (rows, _) = weight.shape.matrix().expect("a matrix");
    let mut out = Vec::new();
    for start in (0..rows).step_by(3) {
        let range = start..rows.min(start + 3);
        let bytes = source.rows(range.clone()).expect("rows");
        match source.dtype() {
            DType::F32 => {
                out.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)))
            }
            DType::BF16 => out.extend(
                bytes.as_chunks::<2>().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()),
            ),
            DType::F16 => out.extend(
                bytes.as_chunks::<2>().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()),
            ),
            other => panic!("{other}"),
        }
        checkpoint.release(weight, range);
    }
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The block type that is kept in an encoding.
fn block_type(encoding: &str) -> &'static str {
    match encoding {
        "i6*i8[1x16]*f16[1x256]" => "Q6_K",
        "i3*i6[1x16]*f16[1x256]" => "Q3_K",
        "i4*f16[1x32]" => "Q4_0",
        "i5*f16[1x32]" => "Q5_0",
        "i8*f16[1x32]" => "Q8_0",
        "fp4_e2m1*e8m0[1x32]" => "MXFP4",
        "affine:codes=u4[1x1],scale=f16[1x32],min=f16[1x32]" => "Q4_1",
        "affine:codes=u5[1x1],scale=f16[1x32],min=f16[1x32]" => "Q5_1",
        _ if encoding.starts_with("affine:codes=u2") => "Q2_K",
        _ if encoding.starts_with("affine:codes=u4") => "Q4_K",
        _ if encoding.starts_with("affine:codes=u5") => "Q5_K",
        other => panic!("{other} holds no block type"),
    }
}

#[test]
fn every_block_type_decodes_and_is_kept_as_gguf_py_decodes_it() {
    let bytes = fs::read(fixture("tiny.safetensors")).expect("the reference");
    let reference = SafeTensors::deserialize(&bytes).expect("safetensors");
    let checkpoint = open(&fixture("tiny.gguf")).unwrap_or_else(|failure| panic!("{failure}"));
    let table = table(&checkpoint);
    assert_eq!(table.weights.len(), reference.len());
    let mut kept = BTreeMap::new();
    for weight in &table.weights {
        let view = reference.tensor(&weight.parts[0].tensor).expect("a reference");
        let stored: Vec<f32> =
            view.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let (rows, cols) = weight.shape.matrix().expect("a matrix");
        // Heads of four rows: rows 0 1 | 2 3 lie as 0 2 1 3.
        let turned = weight.name.contains("attn_q.") || weight.name.contains("attn_k.");
        let from = |r: usize| if turned { r - r % 4 + [0, 2, 1, 3][r % 4] } else { r };
        let cols = cols as usize;
        let want: Vec<f32> = (0..rows as usize)
            .flat_map(|r| stored[from(r) * cols..(from(r) + 1) * cols].to_vec())
            .collect();
        // gguf-py decodes the code -0 of MXFP4 to 0.
        let bits = |values: &[f32]| match &weight.name {
            name if name == "blk.1.ffn_gate.weight" => {
                values.iter().map(|v| (v + 0.0).to_bits()).collect()
            }
            _ => bits(values),
        };
        let got = values(&checkpoint, weight);
        assert_eq!(bits(&got), bits(&want), "{}", weight.name);

        let Some(planes) = checkpoint.planes(weight) else {
            assert_eq!(weight.stored, None, "{}", weight.name);
            continue;
        };
        let encoding = planes.encoding().clone();
        let bytes: Vec<Vec<u8>> = (0..encoding.planes.len())
            .map(|n| planes.plane_rows(n, 0..rows).expect("rows of a plane").into_owned())
            .collect();
        let slices: Vec<PlaneSlice<'_>> = bytes.iter().map(|b| PlaneSlice::whole(b)).collect();
        let mut decoded = vec![0f32; want.len()];
        let decoder = Decoder::new(&encoding, rows, cols as u64).expect("an encoding");
        decoder.decode(0..rows, &slices, &mut decoded).expect("decodes");
        assert_eq!(bits(&decoded), bits(&want), "{} kept", weight.name);
        let total: usize = bytes.iter().map(Vec::len).sum();
        let stored = weight.stored.as_ref().expect("quantized").bytes;
        assert_eq!(total as u64, stored, "{}: kept in as many bytes", weight.name);
        kept.insert(weight.name.clone(), encoding.to_string());
    }
    let mut formats: BTreeMap<String, usize> = BTreeMap::new();
    for encoding in kept.values() {
        *formats.entry(format!("GGUF {}", block_type(encoding))).or_default() += 1;
    }
    testkit::proofs::proved("every_block_type_decodes_and_is_kept_as_gguf_py_decodes_it", &formats);
    let shown: Vec<String> = kept.iter().map(|(n, e)| format!("{n}: {e}")).collect();
    insta::assert_snapshot!(shown.join("\n"), @r"
    blk.0.attn_k.weight: affine:codes=u5[1x1],scale=u6[1x32],min=u6[1x32],scale.1=f16[1x256],min.1=f16[1x256]
    blk.0.attn_q.weight: affine:codes=u4[1x1],scale=u6[1x32],min=u6[1x32],scale.1=f16[1x256],min.1=f16[1x256]
    blk.0.attn_v.weight: i3*i6[1x16]*f16[1x256]
    blk.0.ffn_gate.weight: affine:codes=u2[1x1],scale=u4[1x16],min=u4[1x16],scale.1=f16[1x256],min.1=f16[1x256]
    blk.0.ffn_up.weight: i4*f16[1x32]
    blk.1.attn_k.weight: i5*f16[1x32]
    blk.1.attn_q.weight: affine:codes=u4[1x1],scale=f16[1x32],min=f16[1x32]
    blk.1.attn_v.weight: affine:codes=u5[1x1],scale=f16[1x32],min=f16[1x32]
    blk.1.ffn_gate.weight: fp4_e2m1*e8m0[1x32]
    blk.1.ffn_up.weight: i8*f16[1x32]
    output.weight: i8*f16[1x32]
    token_embd.weight: i6*i8[1x16]*f16[1x256]
    ");
}

/// Tiny models that llama.cpp has an architecture for.
const FAMILIES: [&str; 8] = [
    "tiny-llama",
    "tiny-mistral",
    "tiny-qwen3",
    "tiny-qwen3-moe",
    "tiny-gemma3",
    "tiny-gemma4-dense",
    "tiny-gemma4-e",
    "tiny-gemma4-moe",
];

#[test]
fn a_gguf_file_of_a_model_has_the_weights_and_values_of_the_model() {
    for name in FAMILIES {
        let folder = testkit::tiny_model(name);
        let source = open(&folder).expect("the checkpoint");
        let config = source.config().expect("config.json");
        let original = model::read(&config.value, None, source.tensors()).expect("a model");
        for outtype in [Outtype::F32, Outtype::Bf16] {
            let file = gguf::convert(&folder, outtype).expect("converts");
            let (_model, checkpoint) = opened(&file);
            let table = table(&checkpoint);
            let text: Vec<&Weight> = original
                .table
                .weights
                .iter()
                .filter(|w| w.tower == radpack::model::Tower::Text)
                .collect();
            let names = |weights: &[&Weight]| -> Vec<(String, String)> {
                weights.iter().map(|w| (w.name.clone(), w.shape.to_string())).collect()
            };
            let found: Vec<&Weight> = table.weights.iter().collect();
            assert_eq!(names(&found), names(&text), "{name}");
            for (found, original) in table.weights.iter().zip(text) {
                let (a, b) = (values(&checkpoint, found), values(&source, original));
                assert_eq!(bits(&a), bits(&b), "{name} {outtype:?} {}", found.name);
                assert_eq!(
                    (found.class, found.layer, found.expert, found.slot, &found.fused_set),
                    (
                        original.class,
                        original.layer,
                        original.expert,
                        original.slot,
                        &original.fused_set
                    ),
                    "{name} {}",
                    found.name
                );
                assert!(found.parts.iter().all(|p| checkpoint.tensors().contains_key(&p.tensor)));
            }
        }
    }
}

#[test]
fn the_metadata_give_the_spec_of_the_original_configuration() {
    for name in FAMILIES {
        let folder = testkit::tiny_model(name);
        let source = open(&folder).expect("the checkpoint");
        let config = source.config().expect("config.json");
        let mut original = model::read_spec(&config.value, None).expect("a spec").text;
        let (_model, checkpoint) =
            opened(&gguf::convert(&folder, Outtype::Bf16).expect("converts"));
        let gguf = checkpoint.gguf().expect("a GGUF file");
        let found = gguf.model(checkpoint.tensors()).expect("a model").spec;
        // What the metadata have no key for.
        original.image_attention = found.text.image_attention;
        for (layer, read) in original.layers.iter_mut().zip(&found.text.layers) {
            match name {
                // llama.cpp takes a mistral for a llama, whose layers have no window.
                "tiny-mistral" => layer.attention.kind = read.attention.kind,
                // The width of a head scales the scores of all published models but one.
                "tiny-gemma3" => layer.attention.scale = read.attention.scale,
                _ => {}
            }
        }
        assert_eq!(found.text, original, "{name}");
    }
}

fn llama() -> File {
    gguf::convert(&testkit::tiny_model("tiny-llama"), Outtype::F32).expect("converts")
}

#[test]
fn a_split_model_is_read_from_any_of_its_files() {
    let whole = llama();
    let (_dir, one) = opened(&whole);
    let parts = whole.split(25);
    assert_eq!(parts.len(), 2);
    let model = Model::new();
    let names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
    for (name, part) in names.iter().zip(&parts) {
        model.put(name, &part.bytes());
    }
    for source in [model.at(names[0]), model.at(names[1]), model.path().to_owned()] {
        let split = open(&source).unwrap_or_else(|failure| panic!("{failure}"));
        assert_eq!(split.tensors(), one.tensors());
        let files: Vec<&str> = split.files().iter().map(|f| f.path.as_str()).collect();
        assert_eq!(files, names);
        let table = table(&split);
        let weight = table.get("blk.3.attn_q.weight").expect("a weight");
        assert_eq!(bits(&values(&split, weight)), bits(&values(&one, weight)));
    }
    assert_eq!(open(&model.at(names[1])).expect("opens").display_name(), "m");

    model.remove(names[0]);
    let message = problems(&open(&model.at(names[1])).expect_err("a refusal"), model.path());
    assert_eq!(message, ["1 of 2 files of the model do not exist: m-00001-of-00002.gguf"]);
    model.put("alone.gguf", &parts[0].bytes());
    assert_eq!(
        problems(&open(&model.at("alone.gguf")).expect_err("a refusal"), model.path()),
        ["DIR/alone.gguf: `split.count` is 2; the series has 1 files by its names"]
    );
    model.put(names[0], &parts[1].bytes());
    assert_eq!(
        problems(&open(&model.at(names[1])).expect_err("a refusal"), model.path()),
        [
            "DIR/m-00001-of-00002.gguf: `split.no` is 1; by its name it is 0".to_owned(),
            format!(
                "DIR/m-00001-of-00002.gguf: `split.tensors.count` is {}; the files hold {} tensors",
                whole.tensors.len(),
                2 * parts[1].tensors.len()
            ),
        ]
        .map(|s| s.to_string())
        .into_iter()
        .chain(parts[1].tensors.iter().map(|t| {
            format!("DIR/m-00002-of-00002.gguf: tensor `{}` lies in another file too", t.name)
        }))
        .collect::<Vec<_>>()
    );
}

#[test]
fn the_files_of_its_folder_come_along_only_beside_a_config() {
    let model = Model::new();
    let mut file = llama();
    model.put("m.gguf", &file.bytes());
    model.put("tokenizer.json", b"{}");
    let side = |checkpoint: &Checkpoint| -> Vec<String> {
        checkpoint.side_files().iter().map(|f| f.path.clone()).collect()
    };
    let alone = open(&model.at("m.gguf")).expect("opens");
    assert_eq!(side(&alone), ["chat_template.jinja", "config.json"]);
    let report = alone.check_tokenizer(Some(512), true);
    assert_eq!(report.problems, []);
    let shown = model.at("m.gguf").display().to_string();
    assert_eq!(
        report.notes[0].message.replace(&shown, "FILE"),
        "FILE: its tokenizer (gpt2, 512 tokens) is not stored; an artifact holds tokenizer files"
    );
    assert_eq!(
        alone.origin_notes(),
        [
            "chat_template.jinja and config.json are made of the GGUF file's metadata",
            "the tokenizer in its metadata (gpt2, 512 tokens) is not stored"
        ]
    );
    let report = alone.check_tokenizer(Some(511), true);
    assert_eq!(
        report.problems[0].message.replace(&shown, "FILE"),
        "FILE: `tokenizer.ggml.tokens` has 512 tokens; the embedding has 511 rows"
    );

    model.put("config.json", br#"{"model_type": "something else"}"#);
    let beside = open(&model.at("m.gguf")).expect("opens");
    assert_eq!(side(&beside), ["chat_template.jinja", "config.json", "tokenizer.json"]);
    assert_eq!(beside.config().expect("made").value["model_type"], "llama");
    assert_eq!(beside.left_out()[0].reason, "the GGUF file's own metadata say it");
    assert!(beside.files().iter().all(|f| f.path != "config.json"), "no file of the source");
    assert_eq!(beside.origin_notes().len(), 1);

    file.pair("tokenizer.huggingface.json", Value::Text("{\"a\": 1}".into()));
    model.put("m.gguf", &file.bytes());
    model.remove("config.json");
    let whole = open(&model.at("m.gguf")).expect("opens");
    assert_eq!(side(&whole), ["chat_template.jinja", "config.json", "tokenizer.json"]);
    assert_eq!(whole.made_file("tokenizer.json"), Some(&b"{\"a\": 1}"[..]));
    assert_eq!(whole.check_tokenizer(Some(512), true).notes, []);
}

#[test]
fn metadata_that_give_no_model_are_refused_with_every_key() {
    let mut file = llama();
    file.pairs
        .retain(|(key, _)| !["llama.block_count", "llama.context_length"].contains(&key.as_str()));
    for (key, value) in &mut file.pairs {
        match key.as_str() {
            "llama.embedding_length" => *value = Value::Text("64".into()),
            "llama.rope.dimension_count" => *value = Value::U32(4),
            _ => {}
        }
    }
    file.pair("llama.expert_count", Value::U32(8));
    let rope = file.tensors.iter_mut().find(|t| t.name == "rope_freqs.weight").expect("factors");
    rope.bytes[..4].copy_from_slice(&3f32.to_le_bytes());
    insta::assert_snapshot!(not_understood(&file).join("\n"), @r"
    DIR/m.gguf: `llama.expert_count` is 8; of this architecture dense models are read
    DIR/m.gguf: `llama.block_count` is missing
    DIR/m.gguf: `llama.embedding_length` is no whole number of 0 or more
    DIR/m.gguf: `llama.context_length` is missing
    DIR/m.gguf: `llama.rope.dimension_count` is 4; this family rotates whole heads of 8
    DIR/m.gguf: `rope_freqs.weight` holds 4 factors that Llama 3's rope scaling does not give for heads of 8 and a base of 500000
    ");
    let mut file = llama();
    file.pairs[0].1 = Value::Text("phi3".into());
    assert_eq!(
        not_understood(&file),
        ["DIR/m.gguf: `general.architecture` is `phi3`, which is not read"]
    );
    let (_dir, checkpoint) = opened(&file);
    let table = model::weights_only(None, checkpoint.tensors()).expect("by name alone");
    assert_eq!(table.get("blk.3.attn_q.weight").map(|w| w.layer), Some(3));
}

#[test]
fn tensors_that_do_not_fit_are_named_as_in_the_file() {
    let mut file = llama();
    file.tensors.retain(|t| !t.name.ends_with("ffn_up.weight"));
    let odd = Tensor {
        name: "blk.0.ssm_in.weight".into(),
        kind: kind::F32,
        shape: vec![1],
        bytes: vec![0; 4],
    };
    file.tensors.push(odd);
    let up = file.tensors.iter_mut().find(|t| t.name == "blk.1.ffn_down.weight").expect("present");
    up.shape = vec![32, 352];
    insta::assert_snapshot!(not_understood(&file).join("\n"), @r"
    `blk.{0-3}.ffn_up.weight` is missing; expected shape [176 (intermediate_size), 64 (hidden_size)]
    `blk.1.ffn_down.weight` has shape [32, 352]; the configuration gives [64 (hidden_size), 176 (intermediate_size)]
    `blk.0.ssm_in.weight` is unclaimed: no weight of a llama model is made of it
    ");
    let mut moe =
        gguf::convert(&testkit::tiny_model("tiny-qwen3-moe"), Outtype::F32).expect("converts");
    moe.tensors.retain(|t| t.name != "blk.0.ffn_down_exps.weight");
    let messages = not_understood(&moe);
    assert_eq!(messages.len(), 1, "{messages:?}");
    assert!(messages[0].starts_with("`blk.0.ffn_down_exps.weight` is missing"), "{messages:?}");
}

/// A small sound file.
fn small() -> File {
    let tensor = |name: &str, kind: u32, shape: &[u64], bytes: usize| Tensor {
        name: name.into(),
        kind,
        shape: shape.to_vec(),
        bytes: vec![0; bytes],
    };
    let mut file = File::default();
    file.pair("general.architecture", Value::Text("llama".into()));
    file.pair("list", Value::U32s(vec![1, 2]));
    file.pair("texts", Value::Texts(vec!["a".into(), "bc".into()]));
    file.tensors = vec![
        tensor("a", kind::F32, &[2, 3], 24),
        tensor("b", kind::Q8_0, &[2, 64], 136),
        tensor("c", kind::F16, &[5], 10),
    ];
    file
}

#[test]
fn a_faulty_header_is_refused_with_all_tensors_at_fault() {
    let mut file = small();
    file.tensors[0].kind = 99;
    file.tensors[1].kind = 16;
    file.tensors[2].kind = kind::Q8_0;
    assert_eq!(
        refused(&file),
        [
            "DIR/m.gguf: tensor `a`: ggml type 99 is unknown",
            "DIR/m.gguf: tensor `b`: ggml type IQ2_XXS is not read",
            "DIR/m.gguf: tensor `c`: rows of 5 are no whole blocks of 32 (Q8_0)",
        ]
    );
    let mut file = small();
    file.tensors[1].name = "a".into();
    file.pairs[2].0 = "list".into();
    file.pair("general.alignment", Value::U32(24));
    assert_eq!(
        refused(&file),
        [
            "DIR/m.gguf: key `list` given twice",
            "DIR/m.gguf: `general.alignment` is 24; a power of two from 8 to 65,536 is needed",
            "DIR/m.gguf: duplicate tensor name `a`",
        ]
    );
    let mut file = small();
    file.tensors[0].shape = vec![1 << 40, 1 << 40];
    assert_eq!(
        refused(&file),
        ["DIR/m.gguf: tensor `a`: [1099511627776, 1099511627776] elements exceed 64 bits of size"]
    );
    let mut file = small();
    // Its bytes reach over the next tensor's.
    file.tensors[0].shape = vec![2, 12];
    assert_eq!(refused(&file), ["DIR/m.gguf: tensors `a` and `b` overlap in 64 bytes"]);
    let mut file = small();
    file.tensors[0].bytes = vec![0; 100];
    assert_eq!(refused(&file), ["DIR/m.gguf: 104 bytes before tensor `b` belong to no tensor"]);
    let mut file = small();
    file.tensors[2].shape = vec![500];
    assert!(refused(&file)[0].starts_with("DIR/m.gguf: truncated: tensor `c` ends at byte "));
}

fn faults(bytes: &[u8]) -> Vec<String> {
    read_header(bytes).expect_err("faults").iter().map(ToString::to_string).collect()
}

#[test]
fn counts_and_lengths_are_not_believed() {
    let sound = small().bytes();
    assert!(read_header(&sound).is_ok());
    let with = |at: usize, bytes: &[u8]| {
        let mut damaged = sound.clone();
        damaged[at..at + bytes.len()].copy_from_slice(bytes);
        faults(&damaged)
    };
    let huge = u64::MAX.to_le_bytes();
    assert!(
        with(8, &huge)[0].starts_with("the header promises 18,446,744,073,709,551,615 tensors;")
    );
    assert!(
        with(16, &huge)[0].starts_with("the header promises 18,446,744,073,709,551,615 pairs;")
    );
    assert_eq!(
        with(24, &huge),
        ["a key of 18,446,744,073,709,551,615 bytes; the format allows 65,535"]
    );
    assert_eq!(with(4, &[1, 0, 0, 0]), ["GGUF version 1; versions 2 and 3 are read"]);
    assert_eq!(with(4, &[0, 0, 0, 3]), ["a big-endian GGUF file; little-endian ones are read"]);
    assert_eq!(
        faults(b"PK\x03\x04")[0],
        "no GGUF file: it begins like a zip archive (PyTorch saves .bin and .pt files so)"
    );
    assert!(read_header(&with_version_2(&sound)).is_ok());
    let name = sound.windows(4).position(|w| w == b"list").expect("the key");
    // The list's element type, then its count.
    assert_eq!(with(name + 8, &[9, 0, 0, 0]), ["key `list`: a list of lists"]);
    assert_eq!(
        with(name + 8, &[13, 0, 0, 0]),
        ["key `list`: value type 13 is unknown (0 to 12 are known)"]
    );
    assert!(
        with(name + 12, &huge)[0]
            .starts_with("the header promises 18,446,744,073,709,551,615 elements of a list;")
    );
    for end in 0..sound.len() - 32 {
        assert!(read_header(&sound[..end]).is_err(), "cut at {end}");
    }
}

fn with_version_2(sound: &[u8]) -> Vec<u8> {
    let mut bytes = sound.to_vec();
    bytes[4] = 2;
    bytes
}

proptest! {
    #[test]
    fn no_damage_makes_the_reader_panic_or_read_outside(
        changes in proptest::collection::vec((0usize..400, any::<u8>()), 1..6),
        cut in 0usize..500,
    ) {
        let mut bytes = small().bytes();
        for (at, byte) in changes {
            let at = at % bytes.len();
            bytes[at] = byte;
        }
        bytes.truncate(bytes.len().max(cut) - cut.min(bytes.len() / 2));
        if let Ok(header) = read_header(&bytes) {
            for entry in header.tensors.values() {
                prop_assert!(entry.begin <= entry.end && entry.end <= bytes.len() as u64);
                let (block, size) = entry.kind.block();
                let elements = entry.shape.elements().expect("checked");
                prop_assert_eq!(entry.end - entry.begin, elements / block * size);
            }
        }
    }
}

#[test]
fn rotary_factors_have_a_number() {
    let said = |n: usize| {
        let mut file = llama();
        let rope =
            file.tensors.iter_mut().find(|t| t.name == "rope_freqs.weight").expect("factors");
        rope.shape = vec![n as u64];
        rope.bytes = 3f32.to_le_bytes().repeat(n);
        not_understood(&file).join("\n")
    };
    assert!(said(4096).contains("holds 4096 factors"), "{}", said(4096));
    // More are not read.
    assert!(said(4097).contains("holds 0 factors"), "{}", said(4097));
}
