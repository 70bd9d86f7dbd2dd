//! This project's entries: manifest, digests, error table, side files, and what `verify` makes of lies in them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use radpack::artifact::digests::{self, EntryDigest, hex};
use radpack::artifact::errors::{self, WeightError};
use radpack::artifact::manifest::{self, *};
use radpack::artifact::metadata::{self, Sources};
use radpack::artifact::{
    Artifact, Contents, EntrySpec, Layout, MetaValue, Writer, canonical_order, verify,
};
use radpack::hash::sha256;
use radpack::tensor::{DType, Encoding, PlaneSpec, Shape, role};
use serde_json::json;

fn in_repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

const CHAT: &[u8] = b"{{ messages }}";
const RECIPE: &str = "schema = 1\nname = \"int8-g128\"\n";

/// The parts of a small artifact, each of which a test can falsify.
struct Sample {
    contents: Contents,
    manifest: Manifest,
    errors: Vec<WeightError>,
}

fn sample() -> Sample {
    let int8 =
        Encoding::affine(DType::I8, vec![PlaneSpec::tiled(role::SCALE, DType::BF16, [1, 128])]);
    let mut entries = vec![
        EntrySpec {
            encoding: Encoding::plain(DType::BF16),
            shape: Shape::from([16, 32]),
            ..EntrySpec::opaque("token_embd.weight", 1)
        },
        EntrySpec {
            encoding: int8,
            shape: Shape::from([4, 200]),
            layer: 0,
            quantizer: "rtn".into(),
            options: "codes=i8,group=128,scale=bf16".into(),
            ..EntrySpec::opaque("blk.0.attn_q.weight", 1)
        },
        EntrySpec::opaque("radpack/file/chat_template.jinja", CHAT.len() as u64),
    ];
    let errors = vec![WeightError {
        weight: "blk.0.attn_q.weight".into(),
        squared_error: 0.5,
        squared: 800.0,
    }];
    let summary = |encoding: &str, layout: &str, parameters: u64, bytes: u64| EncodingSummary {
        encoding: encoding.into(),
        layout: layout.into(),
        weights: 1,
        parameters,
        bytes,
        source_bytes: parameters * 2,
        bits_per_weight: bytes as f64 * 8.0 / parameters as f64,
    };
    let record =
        |name: &str, tensor: &str, encoding: &str, rule, tied_to: Option<&str>| WeightRecord {
            name: name.into(),
            from: vec![WeightSource { tensor: tensor.into(), shape: vec![1], index: None }],
            encoding: encoding.into(),
            rule,
            importance: None,
            tied_to: tied_to.map(str::to_owned),
        };
    let manifest = Manifest {
        schema: manifest::SCHEMA.into(),
        schema_version: manifest::SCHEMA_VERSION,
        tool: Tool { name: "radpack".into(), version: "0.1.0".into() },
        format_version: 1,
        tables: None,
        source: Source {
            repo: Some("org/model".into()),
            revision: None,
            files: vec![SourceFile {
                path: "model.safetensors".into(),
                bytes: 12345,
                sha256: Sha256Hex([0xab; 32]),
            }],
        },
        recipe: RecipeSummary {
            name: "int8-g128".into(),
            sha256: Sha256Hex(sha256([RECIPE.as_bytes()])),
        },
        model: ModelSummary {
            architecture: "LlamaForCausalLM".into(),
            model_type: "llama".into(),
            family: Some("llama".into()),
            parameters: 512 + 800,
            dimensions: BTreeMap::from([("layers".into(), 1), ("hidden".into(), 32)]),
            towers: vec![TowerSummary {
                name: "text".into(),
                weights: 2,
                parameters: 1312,
                bytes: 1024 + 816,
            }],
        },
        devices: 1,
        device_weights: Vec::new(),
        graphs: None,
        encodings: vec![
            summary("int8-g128", "i8*bf16[1x128]", 800, 816),
            summary("keep", "bf16", 512, 1024),
        ],
        weights: vec![
            record("token_embd.weight", "model.embed_tokens.weight", "keep", None, None),
            record(
                "blk.0.attn_q.weight",
                "model.layers.0.self_attn.q_proj.weight",
                "int8-g128",
                Some(1),
                None,
            ),
            record(
                "output.weight",
                "model.embed_tokens.weight",
                "keep",
                None,
                Some("token_embd.weight"),
            ),
        ],
        unused: vec![UnusedTensor {
            tensor: "rotary.inv_freq".into(),
            reason: "recomputed".into(),
        }],
        files: vec![SideFile {
            path: "chat_template.jinja".into(),
            bytes: CHAT.len() as u64,
            sha256: Sha256Hex(sha256([CHAT])),
            entry: "radpack/file/chat_template.jinja".into(),
        }],
        notes: vec!["blk.0.attn_q.weight: 200 columns end in a group of 72".into()],
    };
    entries.push(EntrySpec::opaque(
        "radpack/errors",
        errors::encoded_len(errors.iter().map(|e| e.weight.as_str())),
    ));
    entries.push(EntrySpec::opaque(
        "radpack/manifest.json",
        manifest.placeholder().to_bytes().len() as u64,
    ));
    entries.push(digests::entry_spec(&entries));
    canonical_order(&mut entries);
    let config =
        json!({"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "head_dim": 8});
    let sources = Sources {
        config: &config,
        generation: None,
        preprocessor: None,
        video_preprocessor: None,
        draft: None,
        set: &[],
        tool_version: "0.1.0",
        devices: 1,
    };
    let identity = metadata::identity(&config);
    let contents = Contents {
        arch_id: identity.arch_id,
        model_name: identity.model_name,
        quant: identity.quant,
        recipe: RECIPE.into(),
        created_by: "radpack 0.1.0".into(),
        metadata: metadata::rows(&sources).expect("rows"),
        entries,
        data: Vec::new(),
        vocab: None,
        profile: vec![],
    };
    Sample { contents, manifest, errors }
}

fn build(sample: &Sample, out: &Path) {
    let writer =
        Writer::create(out, Layout::plan(&sample.contents).expect("plan")).expect("create");
    for e in 0..writer.layout().entries() {
        let name = writer.layout().name(e).expect("name").to_owned();
        let own = match name.as_str() {
            "radpack/digests" => continue,
            "radpack/errors" => Some(errors::encode(&sample.errors)),
            "radpack/manifest.json" => Some(sample.manifest.to_bytes()),
            "radpack/file/chat_template.jinja" => Some(CHAT.to_vec()),
            _ => None,
        };
        for (p, at) in writer.layout().planes(e).to_vec().into_iter().enumerate() {
            let fill = || (0..at.bytes).map(|i| (i as usize + p + e) as u8).collect();
            let bytes: Vec<u8> = own.clone().unwrap_or_else(fill);
            writer.write(e, p, 0, &bytes).expect("write");
        }
    }
    digests::seal(&writer, &BTreeMap::new()).expect("seal");
    writer.finish().expect("finish");
}

/// What `verify` says of a falsified sample.
fn faults(change: impl FnOnce(&mut Sample)) -> Vec<String> {
    let folder = tempfile::tempdir().expect("folder");
    let out = folder.path().join("a.rad");
    let mut sample = sample();
    change(&mut sample);
    let size = sample.manifest.to_bytes().len() as u64;
    for e in &mut sample.contents.entries {
        if e.name == "radpack/manifest.json" {
            e.shape = Shape::from([size]);
        }
    }
    build(&sample, &out);
    let artifact = Artifact::open(&out).expect("open");
    verify(&artifact, Default::default())
        .faults
        .into_iter()
        .map(|d| format!("{}: {}", d.area, d.message))
        .collect()
}

#[test]
fn a_truthful_file_is_valid_and_tells_its_root_digest() {
    let folder = tempfile::tempdir().expect("folder");
    let out = folder.path().join("a.rad");
    let sample = sample();
    build(&sample, &out);
    let artifact = Artifact::open(&out).expect("open");
    let report = verify(&artifact, Default::default());
    assert_eq!(report.faults, []);
    assert!(report.own);
    assert_eq!(report.manifest.as_ref(), Some(&sample.manifest));
    let root = report.root.expect("root");
    let text = artifact.meta_text("radpack.digest").expect("digest");
    assert_eq!(text.as_str(), Some(hex(&root).as_str()));
    let digests = artifact.find("radpack/digests").expect("entry");
    assert_eq!(sha256([digests.plane(0)]), root);
    assert_eq!(report.hashed_bytes, artifact.entries().map(|e| e.plane_bytes()).sum::<u64>());
}

#[test]
fn two_builds_are_equal_and_every_flipped_bit_is_found() {
    let folder = tempfile::tempdir().expect("folder");
    let (a, b) = (folder.path().join("a.rad"), folder.path().join("b.rad"));
    build(&sample(), &a);
    build(&sample(), &b);
    let bytes = std::fs::read(&a).expect("a");
    assert_eq!(bytes, std::fs::read(&b).expect("b"));
    let artifact = Artifact::from_bytes(&bytes).expect("open");
    let planes: Vec<_> = artifact.entries().flat_map(|e| e.planes().collect::<Vec<_>>()).collect();
    assert_eq!(planes.len(), 7);
    for plane in planes {
        let mut wrong = bytes.clone();
        wrong[(plane.offset + plane.bytes / 2) as usize] ^= 4;
        let artifact = Artifact::from_bytes(&wrong).expect("open");
        let report = verify(&artifact, Default::default());
        let found =
            report.faults.iter().any(|d| d.area == "digests" && d.message.contains("sha256 is"));
        assert!(found && report.root.is_none(), "{plane:?}: {:?}", report.faults);
    }
    // A changed list of digests no longer fits the root digest; a changed root digest fits nothing.
    let key = bytes.windows(64).position(|w| {
        w == hex(&verify(&artifact, Default::default()).root.expect("root")).as_bytes()
    });
    let mut wrong = bytes.clone();
    wrong[key.expect("in the strings")] ^= 1;
    let artifact = Artifact::from_bytes(&wrong).expect("open");
    assert!(verify(&artifact, Default::default()).root.is_none());
}

#[test]
fn lies_of_the_manifest_are_found() {
    assert_eq!(faults(|_| {}), [""; 0]);
    insta::assert_snapshot!(faults(|s| {
        s.manifest.weights.remove(1);
        s.manifest.weights[1].tied_to = Some("nobody".into());
        s.manifest.weights[0].from.clear();
    }).join("\n"), @r"
    manifest: `blk.0.attn_q.weight` is in the file, but not listed
    manifest: weight `token_embd.weight` comes from no tensor
    manifest: weight `output.weight` is listed, but not in the file
    manifest: encoding int8-g128 (i8*bf16[1x128]): 1 weights, 800 parameters, 816 bytes are stated, the file has 0 weights, 0 parameters, 0 bytes
    ");
    insta::assert_snapshot!(faults(|s| {
        let first = s.manifest.weights[0].clone();
        s.manifest.weights.push(first);
        s.manifest.weights[1].encoding = "keep".into();
        s.manifest.encodings[0].bits_per_weight = 8.0;
        s.manifest.model.parameters = 7;
        s.manifest.devices = 2;
        s.manifest.recipe.sha256 = Sha256Hex([0; 32]);
    }).join("\n"), @r"
    manifest: recipe sha256 0000000000000000000000000000000000000000000000000000000000000000, the header's text has f523ec411746e24cb11a8cff797eda3f34273342cef1d1e6df91f4627d6900c5
    manifest: 2 devices, metadata `radpack.devices` says 1
    manifest: weight `token_embd.weight` is listed twice
    manifest: encoding int8-g128 (i8*bf16[1x128]): 1 weights, 800 parameters, 816 bytes are stated, the file has 0 weights, 0 parameters, 0 bytes
    manifest: encoding int8-g128: 8 bits per weight, not 8.16
    manifest: encoding keep (i8*bf16[1x128]): 0 weights, 0 parameters, 0 bytes are stated, the file has 1 weights, 800 parameters, 816 bytes
    manifest: the model has 7 parameters, the file 1,312
    ");
    insta::assert_snapshot!(faults(|s| {
        s.manifest.files[0].bytes = 13;
        s.manifest.files.push(SideFile {
            path: "../etc/passwd".into(),
            bytes: 1,
            sha256: Sha256Hex::default(),
            entry: "radpack/file/x".into(),
        });
    }).join("\n"), @r"
    manifest: file `chat_template.jinja`: 13 bytes of sha256 f24189f08c85a1eb19a737306c3a13e85462ee33d964f28108d64a2485fa2171 are stated, the entry has 14 of f24189f08c85a1eb19a737306c3a13e85462ee33d964f28108d64a2485fa2171
    manifest: file path `../etc/passwd` is not relative to the checkpoint
    manifest: file `../etc/passwd`: entry `radpack/file/x` is not `radpack/file/../etc/passwd`
    manifest: file `../etc/passwd`: no entry `radpack/file/x`
    ");
    let unlisted = faults(|s| s.manifest.files.clear());
    assert_eq!(
        unlisted,
        ["manifest: `radpack/file/chat_template.jinja` is in the file, but not listed"]
    );
}

#[test]
fn lies_of_the_error_table_and_foreign_entries_are_found() {
    let found = faults(|s| s.errors[0].squared_error = f64::NAN);
    assert_eq!(found, ["errors: `blk.0.attn_q.weight`: squared error NaN over 800"]);
    let found = faults(|s| s.errors[0].weight = "blk.0.attn_k.weight".into());
    assert_eq!(found, ["errors: `blk.0.attn_k.weight` is no quantized weight of the file"]);
    let found = faults(|s| {
        s.contents.entries.push(EntrySpec { layer: 1, ..EntrySpec::opaque("radpack/secret", 3) });
        let n = digests::encoded_len(
            s.contents.entries.iter().map(|e| e.name.as_str()).filter(|n| *n != "radpack/digests"),
        );
        s.contents
            .entries
            .iter_mut()
            .filter(|e| e.name == "radpack/digests")
            .for_each(|e| e.shape = Shape::from([n]));
    });
    assert_eq!(
        found,
        [
            "container: `radpack/secret` is no entry of this version",
            "container: `radpack/secret` is not a plain u8 vector at model level"
        ]
    );
}

#[test]
fn a_stripped_file_that_says_it_is_ours_is_not_valid() {
    let mut contents = sample().contents;
    contents.entries.retain(|e| !e.name.starts_with("radpack/"));
    contents.metadata.retain(|(k, _)| !k.starts_with("radpack."));
    let folder = tempfile::tempdir().expect("folder");
    let out = folder.path().join("a.rad");
    let writer = Writer::create(&out, Layout::plan(&contents).expect("plan")).expect("create");
    for e in 0..writer.layout().entries() {
        for (p, at) in writer.layout().planes(e).to_vec().into_iter().enumerate() {
            writer.write(e, p, 0, &vec![1; at.bytes as usize]).expect("write");
        }
    }
    writer.finish().expect("finish");
    let report = verify(&Artifact::open(&out).expect("open"), Default::default());
    let found: Vec<&str> = report.faults.iter().map(|d| d.message.as_str()).collect();
    assert_eq!(
        found,
        [
            "no `radpack.format`",
            "no metadata `radpack.digest` with a sha256 in hex",
            "no entry `radpack/manifest.json`"
        ]
    );
}

#[test]
fn a_placeholder_manifest_has_the_final_length() {
    let m = sample().manifest;
    let empty = m.placeholder();
    assert_ne!(m, empty);
    assert_eq!(m.to_bytes().len(), empty.to_bytes().len());
    assert_eq!(empty.source.files[0].sha256, Sha256Hex([0; 32]));
    assert_eq!(Manifest::parse(&m.to_bytes()), Ok(m));
}

#[test]
fn a_manifest_of_another_kind_is_refused_and_unknown_keys_are_read_over() {
    let m = sample().manifest;
    let mut value = serde_json::to_value(&m).expect("JSON");
    value["later_key"] = json!([1, 2]);
    value["source"]["mirror"] = json!("x");
    let parse = |v: &serde_json::Value| Manifest::parse(v.to_string().as_bytes());
    assert_eq!(parse(&value), Ok(m));
    value["schema_version"] = json!(2);
    assert_eq!(parse(&value), Err(ManifestError::Version(2)));
    value["schema"] = json!("other");
    assert_eq!(parse(&value), Err(ManifestError::Schema("other".into())));
    value["schema"] = json!(manifest::SCHEMA);
    value["schema_version"] = json!(1);
    value["recipe"]["sha256"] = json!("AB");
    assert!(
        matches!(parse(&value), Err(ManifestError::Json(why)) if why.contains("`AB` is no sha256"))
    );
    let nested = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(matches!(Manifest::parse(nested.as_bytes()), Err(ManifestError::Json(_))));
}

#[test]
fn the_committed_schema_is_current_and_accepts_a_manifest() {
    let path = in_repository("schemas/manifest.schema.json");
    if std::env::var_os("RADPACK_BLESS").is_some() {
        std::fs::write(&path, manifest::schema()).expect("schemas/ is writable");
    }
    let committed = std::fs::read_to_string(&path).expect("schema");
    let current = committed == manifest::schema();
    assert!(current, "{} is not current: RADPACK_BLESS=1 cargo test schema", path.display());
    let schema: serde_json::Value = serde_json::from_str(&committed).expect("JSON");
    let validator = jsonschema::validator_for(&schema).expect("a schema");
    let mut value = serde_json::to_value(sample().manifest).expect("JSON");
    assert!(validator.is_valid(&value));
    value["files"][0]["sha256"] = json!("00");
    assert!(!validator.is_valid(&value));
}

/// The lists as another program's decoder sees them: tuples have no bytes of their own.
mod foreign {
    /// Name, SHA-256.
    pub type Digest = (String, [u8; 32]);
    /// Weight, squared error, squared values.
    pub type Error = (String, f64, f64);
}

#[test]
fn another_decoder_reads_our_lists_and_writes_the_same_bytes() {
    let digests = [
        EntryDigest { name: "a/Ω".into(), sha256: [7; 32] },
        EntryDigest { name: String::new(), sha256: [9; 32] },
    ];
    let bytes = digests::encode(&digests);
    let read: Vec<foreign::Digest> = wincode::deserialize(&bytes).expect("digests");
    assert_eq!(read[0], ("a/Ω".into(), [7; 32]));
    assert_eq!(wincode::serialize(&read).expect("bytes"), bytes);

    let bytes = errors::encode(&sample().errors);
    let read: Vec<foreign::Error> = wincode::deserialize(&bytes).expect("errors");
    assert_eq!(read[0], ("blk.0.attn_q.weight".into(), 0.5, 800.0));
    assert_eq!(wincode::serialize(&read).expect("bytes"), bytes);
}

#[test]
fn the_bytes_of_the_lists_are_those_that_the_specification_shows() {
    let digests = [EntryDigest { name: "ab".into(), sha256: [0x11; 32] }];
    let shown =
        format!("{}{}{}{}", "0100000000000000", "0200000000000000", "6162", "11".repeat(32));
    let text = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    assert_eq!(text(&digests::encode(&digests)), shown);
    let errors = [WeightError { weight: "w".into(), squared_error: 1.0, squared: 2.0 }];
    let shown = format!(
        "{}{}{}{}{}",
        "0100000000000000", "0100000000000000", "77", "000000000000f03f", "0000000000000040"
    );
    assert_eq!(text(&errors::encode(&errors)), shown);
}

#[test]
fn hostile_lists_are_refused_without_much_memory() {
    for n in [1u64, 1 << 20, 1 << 40, u64::MAX] {
        let bytes = n.to_le_bytes();
        assert!(digests::decode(&bytes, &sha256([bytes.as_slice()])).is_err(), "{n}");
        assert!(errors::decode(&bytes, &sha256([bytes.as_slice()])).is_err(), "{n}");
    }
}

#[test]
fn metadata_rows_of_a_file_come_later_or_are_there() {
    let rows = sample().contents.metadata;
    let later: Vec<&str> = rows
        .iter()
        .filter(|(_, v)| matches!(v, MetaValue::Later(_)))
        .map(|(k, _)| k.as_str())
        .collect();
    assert_eq!(later, ["radpack.digest"]);
}
