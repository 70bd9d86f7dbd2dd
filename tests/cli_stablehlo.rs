//! Exported StableHLO folders: files, names, shapes, and bytes against the artifact's own entries.

mod cli_support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use cli_support::{radpack, succeeds};
use radpack::artifact::Artifact;
use radpack::export::stablehlo::{Document, schema};
use safetensors::{Dtype, SafeTensors};
use tempfile::{TempDir, tempdir};

type Tensors = BTreeMap<String, (Dtype, Vec<u64>, Vec<u8>)>;

fn tensors(path: &Path) -> Tensors {
    let Ok(bytes) = fs::read(path) else { return Tensors::new() };
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let tensor = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let shape = view.shape().iter().map(|d| *d as u64).collect();
        (name, (view.dtype(), shape, view.data().to_vec()))
    };
    file.tensors().into_iter().map(tensor).collect()
}

/// The element types of arguments and how files say them.
const ELEMENTS: [(&str, Dtype); 8] = [
    ("f32", Dtype::F32),
    ("bf16", Dtype::BF16),
    ("f8E4M3FN", Dtype::F8_E4M3),
    ("i8", Dtype::I8),
    ("ui8", Dtype::U8),
    ("i32", Dtype::I32),
    ("i64", Dtype::I64),
    ("i1", Dtype::BOOL),
];

/// A folder with `t.rad`, a model with small sizes in an encoding over some devices, and its export `x`.
fn exported(model: &str, encoding: &str, devices: u32, more: &[&str]) -> (TempDir, Document) {
    exported_by(
        model,
        &format!(
            "tower = \"text\"\nclass = [\"linear\", \"expert\"]\nencoding = \"{encoding}\"\nactivations = \"f32\"\n"
        ),
        devices,
        more,
    )
}

/// As [`exported`], by a rule of its own.
fn exported_by(model: &str, rule: &str, devices: u32, more: &[&str]) -> (TempDir, Document) {
    let tmp = tempdir().expect("a folder");
    let recipe = format!(
        "schema = 1\nname = \"small\"\n[target]\nprofile = \"cpu\"\n[graphs]\nmax_seq_len = 128\nbatch_size = 2\n\
         decoder_batch_sizes = [2, 1]\nprefill_chunk_size = 16\nkv_partition_len = 32\n[[quantize]]\n{rule}"
    );
    fs::write(tmp.path().join("small.toml"), recipe).expect("writes");
    let source = match model {
        "tiny-gemma4-dense" => cli_support::dense(),
        other => testkit::tiny_model(other),
    };
    let (source, devices) = (source.display().to_string(), devices.to_string());
    let mut args = vec!["convert", &source, "--recipe", "small.toml", "--devices", &devices];
    args.extend(more);
    args.extend(["-o", "t.rad"]);
    succeeds(tmp.path(), &args);
    succeeds(tmp.path(), &["export", "t.rad", "--format", "stablehlo", "-o", "x"]);
    let text = fs::read(tmp.path().join("x/stablehlo.json")).expect("a document");
    let document = serde_json::from_slice(&text).expect("of the schema");
    (tmp, document)
}

/// Holds every file of an export against its document; returns what each device has.
fn consistent(folder: &Path, document: &Document) -> Vec<Tensors> {
    let common = tensors(&folder.join("args/common.safetensors"));
    let own: Vec<Tensors> = (0..document.devices)
        .map(|d| tensors(&folder.join(format!("args/dev{d}.safetensors"))))
        .collect();
    let (mut used, mut used_common) = (vec![BTreeSet::new(); own.len()], BTreeSet::new());
    for module in &document.modules {
        let text = fs::read_to_string(folder.join(&module.file)).expect("a module");
        assert!(!text.contains("chlo.") && !text.contains("sdy."), "{}", module.name);
        let replicas = format!("mhlo.num_replicas = {} : i32", module.devices.len());
        assert!(text.contains(&replicas), "{}", module.name);
        let named: Vec<&str> =
            text.split("rad.name = \"").skip(1).filter_map(|t| t.split('"').next()).collect();
        let said = module.arguments.iter().map(|a| a.name.as_str());
        let said: Vec<&str> = said.chain(module.results.iter().map(String::as_str)).collect();
        assert_eq!(named, said, "{}", module.name);
        for (i, argument) in module.arguments.iter().enumerate() {
            let dims: String = argument.shape.iter().map(|d| format!("{d}x")).collect();
            let printed = format!(
                "%arg{i}: tensor<{dims}{}> {{rad.name = \"{}\"",
                argument.element, argument.name
            );
            assert!(text.contains(&printed), "{}: {printed}", module.name);
            let Some(shared) = argument.common else { continue };
            for &device in &module.devices {
                let held = if shared { &common } else { &own[device as usize] };
                let (dtype, shape, _) = held
                    .get(&argument.name)
                    .unwrap_or_else(|| panic!("device {device} has no {}", argument.name));
                assert_eq!(shape, &argument.shape, "{}", argument.name);
                let want = ELEMENTS.iter().find(|e| e.0 == argument.element).expect("known").1;
                assert_eq!(*dtype, want, "{}", argument.name);
                if shared {
                    used_common.insert(argument.name.clone());
                } else {
                    used[device as usize].insert(argument.name.clone());
                }
            }
        }
    }
    // Nothing is there that no module takes.
    assert_eq!(common.keys().cloned().collect::<BTreeSet<_>>(), used_common);
    for (held, used) in own.iter().zip(&used) {
        let mut held: BTreeSet<String> = held.keys().cloned().collect();
        held.remove("rank");
        let mut used = used.clone();
        used.remove("rank");
        assert_eq!(held, used);
    }
    for (name, tensor) in &common {
        for held in &own {
            assert!(!held.contains_key(name), "{name} twice: {:?}", tensor.1);
        }
    }
    own
}

fn names(document: &Document) -> Vec<&str> {
    document.modules.iter().map(|m| m.name.as_str()).collect()
}

#[test]
fn a_model_on_one_device_has_all_arguments_in_one_file_and_its_table_for_the_host() {
    let (tmp, document) = exported("tiny-gemma4-dense", "keep", 1, &[]);
    let folder = tmp.path().join("x");
    let own = consistent(&folder, &document);
    assert!(own[0].is_empty(), "one device shares everything with itself");
    assert_eq!(
        names(&document),
        ["prefill", "image_prefill_64", "decode_b2", "decode_b1", "vision_t12", "project_t12"]
    );
    assert_eq!((document.devices, document.kv_blocks), (1, 2 * 4 + 1));
    assert_eq!(document.left_out, []);
    // Five sliding layers with rings, one full layer with blocks.
    let shapes: Vec<&[u64]> = document.cache.iter().map(|c| c.shape.as_slice()).collect();
    assert_eq!(shapes.len(), 12);
    assert_eq!(shapes[0], [2, 16, 8, 8]);
    assert_eq!(shapes[10], [9, 4, 32, 16]);
    let host = document.host.as_ref().expect("a host table");
    assert_eq!(host.tables.len(), 1);
    assert!((host.tables[0].scale - 128f64.sqrt()).abs() < 1e-12);
    assert_eq!((host.padding_token, host.image_token), (0, Some(498)));
    let table = &tensors(&folder.join(&host.file))["token_embd.weight"];
    succeeds(tmp.path(), &["extract", "t.rad", "token_embd.weight", "-o", "w.f32"]);
    assert_eq!((table.0, table.1.as_slice()), (Dtype::BF16, [512, 128].as_slice()));
    let wide = |b: &[u8]| [0, 0, b[0], b[1]];
    let values: Vec<u8> = table.2.chunks_exact(2).flat_map(wide).collect();
    assert!(values == fs::read(tmp.path().join("w.f32")).expect("reads"));
    for file in ["config.json", "tokenizer.json"] {
        let same =
            fs::read(cli_support::dense().join(file)).ok() == fs::read(folder.join(file)).ok();
        assert!(same, "{file}");
    }
}

#[test]
fn devices_get_their_own_pieces_and_experts() {
    let (tmp, document) = exported("tiny-gemma4-moe", "keep", 4, &[]);
    let own = consistent(&tmp.path().join("x"), &document);
    let artifact = Artifact::open(&tmp.path().join("t.rad")).expect("opens");
    let plane = |name: &str| artifact.find(name).unwrap_or_else(|| panic!("no {name}")).plane(0);
    for (device, held) in own.iter().enumerate() {
        assert_eq!(held["rank"], (Dtype::I32, vec![], (device as u32).to_le_bytes().to_vec()));
        for weight in ["blk.0.ffn_down.weight", "blk.5.attn_q.weight", "token_embd.weight"] {
            assert!(held[weight].2 == plane(&format!("{weight}@{device}/4")), "{weight}");
        }
        // 8 key heads over 4 devices in sliding layers, 2 in full ones: two devices each.
        assert!(held["blk.0.attn_k.weight"].2 == plane(&format!("blk.0.attn_k.weight@{device}/4")));
        assert!(
            held["blk.5.attn_k.weight"].2
                == plane(&format!("blk.5.attn_k.weight@{}/2", device / 2))
        );
        // 16 experts: four each.
        for local in 0..4 {
            let name = format!("blk.2.ffn_gate_up_exps.local.{local}.weight");
            let expert = format!("blk.2.ffn_gate_up_exps.{}.weight", device * 4 + local);
            assert!(held[&name].2 == plane(&expert), "{name} on {device}");
        }
    }
    // The image encoder runs on the first device unless the recipe says otherwise.
    for module in &document.modules {
        let vision = module.name.starts_with("vision") || module.name.starts_with("project");
        assert_eq!(module.devices, if vision { vec![0] } else { vec![0, 1, 2, 3] });
    }
    assert!(own[0].contains_key("mm.vision.weight") && !own[1].contains_key("mm.vision.weight"));
}

#[test]
fn packed_codes_are_bytes_and_every_plane_has_its_role() {
    let (tmp, document) = exported("tiny-qwen3", "nvfp4", 4, &[]);
    let own = consistent(&tmp.path().join("x"), &document);
    assert_eq!(names(&document), ["prefill", "decode_b2", "decode_b1"]);
    assert!(document.host.is_none() && !tmp.path().join("x/host.safetensors").exists());
    let arguments = document.stored_arguments();
    let found = |name: &str| {
        let a = arguments[name];
        (a.element.as_str(), a.shape.clone(), a.common)
    };
    // 192 of 4 devices, 64 columns of two codes a byte, a scale for 16.
    assert_eq!(found("blk.0.ffn_gate.weight:codes"), ("ui8", vec![48, 32], Some(false)));
    assert_eq!(found("blk.0.ffn_gate.weight:scale"), ("f8E4M3FN", vec![48, 4], Some(false)));
    assert_eq!(found("blk.0.ffn_gate.weight:scale.1"), ("f32", vec![1, 1], Some(true)));
    let artifact = Artifact::open(&tmp.path().join("t.rad")).expect("opens");
    for (device, held) in own.iter().enumerate() {
        let entry = artifact.find(&format!("blk.0.ffn_gate.weight@{device}/4")).expect("a piece");
        assert!(held["blk.0.ffn_gate.weight:codes"].2 == entry.plane(0));
        assert!(held["blk.0.ffn_gate.weight:scale"].2 == entry.plane(1));
    }
}

#[test]
fn a_program_without_a_form_is_listed_and_the_others_are_written() {
    let draft = testkit::tiny_model("tiny-gemma4-e-assistant").display().to_string();
    let rule = "tower = \"draft\"\nclass = \"linear\"\nencoding = { codes = \"i6\", scale = \"bf16\", group = 16 }\n";
    let (tmp, document) = exported_by("tiny-gemma4-e", rule, 1, &["--draft-model", &draft]);
    consistent(&tmp.path().join("x"), &document);
    let left: Vec<&str> = document.left_out.iter().map(|l| l.name.as_str()).collect();
    assert_eq!(left, ["draft_b2", "draft_b1"]);
    let reason = &document.left_out[0].reason;
    assert!(reason.ends_with("i6 cannot be an argument"), "{reason}");
    assert!(names(&document).contains(&"decode_b2"));
    let host = document.host.as_ref().expect("tables");
    let tables: Vec<(&str, f64, Option<u64>)> =
        host.tables.iter().map(|t| (t.tensor.as_str(), t.scale, t.width)).collect();
    assert_eq!(
        tables,
        [("token_embd.weight", 8.0, None), ("per_layer_token_embd.weight", 4.0, Some(16))]
    );
}

#[test]
fn ordered_draft_heads_are_written() {
    let draft = testkit::tiny_model("tiny-gemma4-e-assistant").display().to_string();
    for devices in [1, 4] {
        let (tmp, document) =
            exported("tiny-gemma4-e", "keep", devices, &["--draft-model", &draft]);
        consistent(&tmp.path().join("x"), &document);
        assert_eq!(document.left_out, []);
        let module = document.modules.iter().find(|m| m.name == "draft_b2").expect("a draft");
        let text = fs::read_to_string(tmp.path().join("x").join(&module.file)).expect("a module");
        // The best of 32 centroids, 4 of 16 tokens each for two sequences, and scores of a device's share of 512 tokens.
        let scores = format!("tensor<2x1x{}x1xf32>", 512 / devices);
        for part in ["stablehlo.sort", "tensor<128x1x1xf32>", "stablehlo.scatter", &scores] {
            assert!(text.contains(part), "{devices}: {part}");
        }
        let ranked = module.arguments.iter().any(|a| a.name == "rank");
        assert_eq!(ranked, devices > 1);
    }
}

#[test]
fn what_cannot_be_exported_is_refused_and_nothing_is_written() {
    let (tmp, document) = exported("tiny-llama", "keep", 1, &[]);
    let run = |args: &[&str]| {
        let ran = radpack(tmp.path(), &[&["export", "t.rad", "-o", "y"], args].concat());
        assert!(!tmp.path().join("y").exists());
        (ran.code, ran.stderr)
    };
    let (code, text) = run(&["--format", "stablehlo", "--kv-blocks", "2"]);
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("2 blocks of 32 tokens; the programs need 5 to 32,768"), "{text}");
    let (code, text) = run(&["--format", "stablehlo", "--kv-blocks", "32769"]);
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("32,769 blocks of 32 tokens"), "{text}");
    let most = ["export", "t.rad", "--format", "stablehlo", "--kv-blocks", "32768", "-o", "most"];
    succeeds(tmp.path(), &most);
    let (code, text) = run(&["--format", "stablehlo", "--dtype", "f32"]);
    assert_eq!(code, 2, "{text}");
    let (code, text) = run(&["--format", "safetensors", "--kv-blocks", "9"]);
    assert_eq!(code, 2, "{text}");
    let again = radpack(tmp.path(), &["export", "t.rad", "--format", "stablehlo", "-o", "x"]);
    assert_eq!(again.code, 2, "{}", again.stderr);
    succeeds(
        tmp.path(),
        &["export", "t.rad", "--format", "stablehlo", "--kv-blocks", "5", "-o", "z"],
    );
    let fewer: Document =
        serde_json::from_slice(&fs::read(tmp.path().join("z/stablehlo.json")).expect("reads"))
            .expect("of the schema");
    assert_eq!((document.kv_blocks, fewer.kv_blocks), (9, 5));
    assert_eq!(fewer.cache[0].shape[0], 5);
}

/// The committed schema; `RADPACK_BLESS=1` rewrites it.
#[test]
fn the_committed_schema_describes_the_document() {
    let path = format!("{}/schemas/stablehlo.schema.json", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("RADPACK_BLESS").is_some() {
        fs::write(&path, schema()).expect("schemas/ is writable");
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == schema(), "{path} is not current: RADPACK_BLESS=1 cargo test schema");
    let (tmp, _) = exported("tiny-llama", "keep", 1, &[]);
    let text = fs::read(tmp.path().join("x/stablehlo.json")).expect("reads");
    let value: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    let schema: serde_json::Value = serde_json::from_str(&committed).expect("JSON");
    let validator = jsonschema::validator_for(&schema).expect("a schema");
    let faults: Vec<String> = validator.iter_errors(&value).map(|e| e.to_string()).collect();
    assert_eq!(faults, [] as [String; 0]);
}
