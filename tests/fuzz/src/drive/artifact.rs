//! Containers: tables, whole files with sound digests, binary sections, and what is printed from them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use radpack::artifact::digests::{self, EntryDigest};
use radpack::artifact::errors::WeightError;
use radpack::artifact::layout::{DIGEST_KEY, FORMAT_KEY, POOL, VERSION_KEY};
use radpack::artifact::manifest::Manifest;
use radpack::artifact::part::Part;
use radpack::artifact::partition::Partition;
use radpack::artifact::{
    Artifact, Contents, EntrySpec, Layout, MetaValue, Weights, canonical_order, codec, errors,
    verify,
};
use radpack::card::{self, Additions};
use radpack::checkpoint::{Checkpoint, OpenOptions};
use radpack::estimate::{self, MemoryModel};
use radpack::graph::{WireIndex, WireProgram};
use radpack::hash;
use radpack::pipeline::{self, ConvertOptions, Request, Unwatched};
use radpack::quantize::{StoredWeight, verify_decodes};
use radpack::recipe::{Profile, Recipe};
use radpack::tensor::{DType, Encoding, Shape};
use radpack::{diff, runtime};
use serde_json::Value;

use super::archive::{files, folder};
use super::{HURRY, Outcome};

/// Elements of weights that are decoded for one input.
const MOST_ELEMENTS: u64 = 1 << 22;
/// Faults in a text.
const MOST_FAULTS: usize = 8;

/// A container's bytes: as they are, or `tables` and `data` with the gap between them left out.
pub fn container(input: &[u8]) -> Outcome {
    let parts = files(input);
    let find = |name: &str| parts.iter().find(|f| f.0 == name).map(|f| f.1);
    let bytes = match (find("tables"), find("data")) {
        (Some(tables), Some(data)) => joined(tables, data),
        _ => input.to_vec(),
    };
    examine(&bytes)
}

fn joined(tables: &[u8], data: &[u8]) -> Vec<u8> {
    let mut bytes = tables.to_vec();
    bytes.resize(tables.len().next_multiple_of(POOL as usize), 0);
    bytes.extend_from_slice(data);
    bytes
}

/// Entries by name, put into a container whose digests hold. `meta KEY` is a metadata text, `bf16 NAME ROWS COLS` a weight,
/// `recipe` the recipe's text.
pub fn entries(input: &[u8]) -> Outcome {
    let mut contents = Contents {
        arch_id: "fuzz".to_owned(),
        model_name: "fuzz".to_owned(),
        created_by: "radpack 0.1.0".to_owned(),
        metadata: vec![
            (FORMAT_KEY.to_owned(), MetaValue::Int(1)),
            (VERSION_KEY.to_owned(), MetaValue::Text("0.1.0".to_owned())),
            (DIGEST_KEY.to_owned(), MetaValue::Later(64)),
        ],
        ..Contents::default()
    };
    let mut bytes = BTreeMap::new();
    for (name, content) in files(input) {
        if name == "recipe" {
            contents.recipe = String::from_utf8_lossy(content).into_owned();
        } else if let Some(key) = name.strip_prefix("meta ") {
            let text = String::from_utf8_lossy(content).into_owned();
            let value = text.parse().map(MetaValue::Int).unwrap_or(MetaValue::Text(text));
            contents.metadata.push((key.to_owned(), value));
        } else if let Some(said) = name.strip_prefix("bf16 ") {
            let words: Vec<&str> = said.split(' ').collect();
            let &[name, rows, cols] = &words[..] else { continue };
            let (Ok(rows), Ok(cols)) = (rows.parse::<u64>(), cols.parse::<u64>()) else { continue };
            if rows.saturating_mul(cols) > 1 << 16 {
                continue;
            }
            let mut weight = content.to_vec();
            weight.resize((rows * cols * 2) as usize, 0);
            let plain = (Encoding::plain(DType::BF16), Shape::from([rows, cols]));
            let opaque = EntrySpec::opaque(name, 1);
            contents.entries.push(EntrySpec { encoding: plain.0, shape: plain.1, ..opaque });
            bytes.insert(name.to_owned(), weight);
        } else {
            contents.entries.push(EntrySpec::opaque(name, content.len() as u64));
            bytes.insert(name.to_owned(), content.to_vec());
        }
    }
    examine(&sealed(contents, &bytes)?)
}

/// A file of those entries, with digests and root digest.
fn sealed(mut contents: Contents, bytes: &BTreeMap<String, Vec<u8>>) -> Result<Vec<u8>, String> {
    canonical_order(&mut contents.entries);
    let list = |entries: &[EntrySpec]| -> Vec<EntryDigest> {
        let of = |name: &str| hash::sha256(bytes.get(name).map(Vec::as_slice));
        entries.iter().map(|e| EntryDigest { name: e.name.clone(), sha256: of(&e.name) }).collect()
    };
    let list = digests::encode(&list(&contents.entries));
    let own = digests::entry_spec(&contents.entries);
    let name = own.name.clone();
    contents.entries.push(own);
    canonical_order(&mut contents.entries);
    let layout = Layout::plan(&contents).map_err(|f| f.to_string())?;
    let root = digests::hex(&hash::sha256([list.as_slice()]));
    let mut file = layout.tables_with(DIGEST_KEY, &root).ok_or("a second root digest")?;
    file.resize(layout.file_bytes() as usize, 0);
    for (entry, content) in bytes.iter().chain([(&name, &list)]) {
        let at = layout.entry(entry).and_then(|e| layout.plane(e, 0)).expect("it was planned");
        let from = at.offset as usize;
        file[from..from + content.len()].copy_from_slice(content);
    }
    Ok(file)
}

/// Reads everything of a file that opens; the faults that verification finds are the error.
fn examine(bytes: &[u8]) -> Outcome {
    let artifact = Artifact::from_bytes(bytes).map_err(|refused| refused.to_string())?;
    let size = artifact.file_bytes();
    assert_eq!(size, bytes.len() as u64);
    for entry in artifact.entries() {
        for (k, plane) in entry.planes().enumerate() {
            assert!(plane.offset.checked_add(plane.bytes).is_some_and(|end| end <= size));
            assert_eq!(entry.plane(k).len() as u64, plane.bytes);
        }
        let found = artifact.find_bytes(entry.name().bytes()).expect("its own name");
        assert!(found.index() <= entry.index());
    }
    if let Some(contents) = artifact.contents()
        && let Ok(layout) = Layout::plan(&contents)
    {
        assert_eq!(layout.entries(), artifact.len());
    }
    let _ = artifact.vocab();
    let _ = artifact.profile().count();
    let report = verify(&artifact, verify::Options::default());
    weights(&artifact);
    printed(&artifact, bytes);
    let mut faults: Vec<String> = report.faults.iter().map(|f| f.message.clone()).collect();
    let programs = pipeline::check_programs(&artifact, report.manifest.as_ref());
    faults.extend(programs.iter().map(|f| f.message.clone()));
    faults.extend(pipeline::check_vocabulary(&artifact).iter().map(|f| f.message.clone()));
    if faults.is_empty() {
        return Ok(format!("{} entries", artifact.len()));
    }
    assert!(!report.faults.is_empty() || report.manifest.is_some() || !report.own);
    let more = faults.len().saturating_sub(MOST_FAULTS);
    faults.truncate(MOST_FAULTS);
    if more > 0 {
        faults.push(format!("and {more} more"));
    }
    Err(faults.join("\n"))
}

/// Decodes weights, and reads them whole again from their pieces.
fn weights(artifact: &Artifact) {
    let mut left = MOST_ELEMENTS;
    let stored = artifact.entries().filter_map(|e| {
        left = left.checked_sub(e.shape().elements()?)?;
        let planes = (0..e.encoding().planes.len()).map(|k| e.plane(k)).collect();
        let (encoding, shape) = (e.encoding(), e.shape());
        Some(StoredWeight { name: e.name().to_string(), encoding, shape, planes })
    });
    let _ = verify_decodes(stored.collect::<Vec<_>>());
    let Ok(weights) = Weights::open(artifact) else { return };
    for view in weights.iter() {
        let Some((rows, _)) = view.shape().matrix() else { continue };
        if view.plane_bytes() > MOST_ELEMENTS {
            continue;
        }
        let _ = view.block(0..rows.min(3));
        let _ = view.block(rows.saturating_sub(1)..rows);
        let _ = view.digest();
    }
}

/// What commands print of a file.
fn printed(artifact: &Artifact, bytes: &[u8]) {
    let _ = errors::of(artifact);
    let _ = Part::of(artifact);
    let manifest = Manifest::of(artifact).ok().flatten();
    if let Some(manifest) = &manifest {
        let again = Manifest::parse(&manifest.to_bytes());
        assert_eq!(again.as_ref(), Ok(manifest), "a manifest is written as it was read");
    }
    let digest = hash::sha256([bytes]);
    let additions = Additions {
        file_name: "model.rad".to_owned(),
        sha256: digests::hex(&digest),
        ..Additions::default()
    };
    let _ = card::facts(artifact, &additions);
    // Pages take far longer than what is read for them.
    if !HURRY.load(Ordering::Relaxed) || digest[0].is_multiple_of(16) {
        let _ = card::card(artifact, &additions, "model.md.jinja", card::TEMPLATE);
        let _ = card::report(artifact, &additions);
    }
    if let Ok(difference) = diff::diff(artifact, artifact) {
        assert!(difference.same_bytes);
    }
    let _ = runtime::stop_tokens(artifact);
    let Ok(opened) = runtime::open(artifact) else { return };
    if let Ok(weights) = Weights::open(artifact)
        && let Some(sizes) = manifest.as_ref().and_then(|m| runtime::sizes(m.graphs.as_ref()?))
    {
        let vision: &[u32] =
            manifest.as_ref().and_then(|m| m.graphs.as_ref()).map_or(&[], |g| &g.vision_devices);
        let model = MemoryModel::of_artifact(&weights, vision, &opened.programs, &sizes);
        for target in Profile::all().flatten() {
            let _ = estimate::estimate(&model, &target, estimate::Options::default());
        }
    }
}

/// One binary section, by the first byte: what is accepted is written as it was.
pub fn sections(input: &[u8]) -> Outcome {
    let Some((kind, bytes)) = input.split_first() else { return Err("no kind".to_owned()) };
    let digest = hash::sha256([bytes]);
    let same = |again: Vec<u8>| assert_eq!(again, bytes, "the bytes that were read");
    match kind % 6 {
        0 => {
            let list: Vec<WeightError> =
                errors::decode(bytes, &digest).map_err(|e| e.to_string())?;
            same(errors::encode(&list));
            assert!(list.iter().all(|row| row.relative().is_none_or(|r| r >= 0.0 || r.is_nan())));
            Ok(format!("{} errors", list.len()))
        }
        1 => {
            let list = digests::decode(bytes, &digest).map_err(|e| e.to_string())?;
            same(digests::encode(&list));
            Ok(format!("{} digests", list.len()))
        }
        2 => {
            let table = Partition::decode(bytes, &digest).map_err(|e| e.to_string())?;
            same(table.encode());
            for row in &table.weights {
                for piece in 0..row.pieces() {
                    let slice = row.slice(piece).expect("a piece has a slice");
                    assert!(slice.span.end().is_some() && row.first_holder(piece).is_some());
                    assert!(!row.entry(piece).is_empty());
                }
                let _ = (row.local_shape(), row.piece_of(u32::MAX));
            }
            Ok(format!("{} weights on {} devices", table.weights.len(), table.devices))
        }
        3 => {
            let part: Part = codec::decode(bytes, &digest).map_err(|e| e.to_string())?;
            same(part.encode());
            Ok(part.said())
        }
        4 => {
            let index: WireIndex = codec::decode(bytes, &digest).map_err(|e| e.to_string())?;
            same(codec::encode(&index));
            Ok(format!("{} programs", index.programs.len()))
        }
        _ => {
            let program: WireProgram = codec::decode(bytes, &digest).map_err(|e| e.to_string())?;
            same(codec::encode(&program));
            Ok(format!("{} operations", program.nodes.len()))
        }
    }
}

/// Documents of `radpack eval` and `radpack estimate-kv` on the card of a small artifact.
pub fn card(input: &[u8]) -> Outcome {
    let json = |text: &[u8]| serde_json::from_slice::<Value>(text).map_err(|e| e.to_string());
    let mut additions = Additions {
        file_name: "model.rad".to_owned(),
        sha256: "0".repeat(64),
        ..Additions::default()
    };
    for (name, text) in files(input) {
        match name {
            "eval" => additions.evals.push(json(text)?),
            "estimate" => additions.estimate = Some(json(text)?),
            "title" => additions.title = Some(String::from_utf8_lossy(text).into_owned()),
            "license" => additions.license = Some(String::from_utf8_lossy(text).into_owned()),
            _ => {}
        }
    }
    let artifact = small();
    // The artifact's own digest changes with every version.
    let own = artifact.meta_text(DIGEST_KEY).map(|t| t.to_string()).unwrap_or_default();
    let own = own.get(..12).unwrap_or("none").to_owned();
    let page = card::card(artifact, &additions, "model.md.jinja", card::TEMPLATE)
        .map_err(|f| f.to_string().replace(&own, "OWN"))?;
    assert!(page.starts_with("---\n"), "front matter comes first");
    card::report(artifact, &additions).map_err(|f| f.to_string())?;
    Ok(format!("{} lines", page.lines().count()))
}

/// A recipe under which a model has few programs, and small ones.
pub const SMALL: &str = "schema = 1\nname = \"small\"\n[[quantize]]\nclass = [\"linear\"]\n\
    encoding = { codes = \"i8\", scale = \"bf16\", group = 16 }\n[graphs]\nmax_seq_len = 256\n\
    batch_size = 1\nprefill_chunk_size = 32\nkv_partition_len = 64\n[towers]\nvision = false\n\
    audio = false\n";

/// Converts a model under [`SMALL`].
///
/// # Panics
/// A model that does not convert.
pub fn converted(source: &Path, devices: u32) -> Vec<u8> {
    let checkpoint = Checkpoint::open(source, &OpenOptions::default());
    let checkpoint = checkpoint.unwrap_or_else(|f| panic!("{f}"));
    let mut recipe = Recipe::from_bytes("small", SMALL.into()).unwrap_or_else(|f| panic!("{f}"));
    recipe.set(&format!("target.devices={devices}")).unwrap_or_else(|f| panic!("{f}"));
    let request = Request { weights_only: false, tokenizer_required: false };
    let plan = pipeline::plan(checkpoint, recipe, request).unwrap_or_else(|f| panic!("{f}"));
    let folder = folder();
    let out = folder.path().join("small.rad");
    let options =
        ConvertOptions { threads: 1, progress: &Unwatched, cancelled: &AtomicBool::new(false) };
    pipeline::convert(&plan, &out, options).unwrap_or_else(|f| panic!("{f}"));
    fs::read(&out).expect("it was written")
}

fn small() -> &'static Artifact {
    static SMALL: OnceLock<Artifact> = OnceLock::new();
    SMALL.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR"));
        let source = source.ancestors().map(|a| a.join("fixtures/tiny-gemma4-dense"));
        let source = source.into_iter().find(|s| s.is_dir()).expect("the fixture");
        Artifact::from_bytes(&converted(&source, 1)).expect("it opens")
    })
}
