//! Inputs made of files that radpack wrote, and of other writers' containers.

use radpack::artifact::layout::{GRAPH_PREFIX, GRAPHS_ENTRY, OWN_PREFIX, POOL};
use radpack::artifact::part::{Part, PartEntry, PartWeight};
use radpack::artifact::{Artifact, Weights, codec, digests};
use radpack::estimate::{self, Estimate, MemoryModel};
use radpack::graph::{WireIndex, WireProgram};
use radpack::hash;
use radpack::recipe::Profile;
use radpack_fuzz::drive::archive::pack;
use radpack_fuzz::drive::converted;
use serde_json::json;

use super::{Seeds, read};

/// Largest entry that an input takes over.
const MOST: usize = 48 << 10;
/// Names of the sections that `sections` tells apart by its first byte.
const SECTIONS: [&str; 3] = ["radpack/errors", "radpack/digests", "radpack/partition"];

/// Adds them.
pub fn add(seeds: &mut Seeds) {
    for name in ["golden", "golden_full"] {
        container(seeds, &read(format!("fixtures/rad-container/{name}.rad")));
    }
    for (model, devices) in
        [("tiny-llama", 1), ("tiny-llama", 2), ("tiny-gemma4-dense", 1), ("tiny-qwen3-moe", 2)]
    {
        file(seeds, &converted(&testkit::tiny_model(model), devices));
    }
    let part = Part {
        index: 1,
        parts: 2,
        plan: [7; 32],
        directory: 9,
        entries: vec![PartEntry { position: 3, layer: 1, expert: -1, slot: 0 }],
        data: vec![0, 1],
        files: vec![digests::EntryDigest { name: "a".into(), sha256: [1; 32] }],
        weights: vec![PartWeight {
            name: "w".into(),
            whole: [2; 32],
            squared_error: 0.5,
            squared: 2.0,
        }],
    };
    seeds.add("sections", [vec![3], part.encode()].concat());
    let folder = testkit::fixtures().join("tiny-gemma4-dense");
    documents(seeds, &estimate(&converted(&folder, 1)));
}

fn estimate(bytes: &[u8]) -> Estimate {
    let artifact = Artifact::from_bytes(bytes).expect("it opens");
    let opened = radpack::runtime::open(&artifact).unwrap_or_else(|f| panic!("{f}"));
    let weights = Weights::open(&artifact).expect("weights");
    let model = MemoryModel::of_artifact(&weights, &[0], &opened.programs, &opened.sizes);
    let target = Profile::find("rbln-ca25").unwrap_or_else(|f| panic!("{f}"));
    estimate::estimate(&model, &target, estimate::Options::default())
        .unwrap_or_else(|f| panic!("{f}"))
}

/// Tables, and the first of the data.
fn container(seeds: &mut Seeds, bytes: &[u8]) {
    let (tables, data) = bytes.split_at((POOL as usize).min(bytes.len()));
    let end = tables.iter().rposition(|b| *b != 0).map_or(0, |at| at + 1).next_multiple_of(8);
    seeds.pack("rad", &[("tables", &tables[..end]), ("data", data)]);
}

fn file(seeds: &mut Seeds, bytes: &[u8]) {
    let artifact = Artifact::from_bytes(bytes).expect("it opens");
    let mut own: Vec<(String, Vec<u8>)> = Vec::new();
    for entry in artifact.entries() {
        let name = entry.name().to_string();
        let plane = entry.plane(0);
        if let Some(kind) = SECTIONS.iter().position(|s| *s == name) {
            seeds.add("sections", [&[kind as u8], plane].concat());
        }
        if name == GRAPHS_ENTRY {
            seeds.add("sections", [&[4], plane].concat());
        }
        if name.starts_with(GRAPH_PREFIX) {
            seeds.add("sections", [&[5], plane].concat());
        }
        if name.starts_with(OWN_PREFIX) && name != "radpack/digests" && plane.len() <= MOST {
            own.push((name, plane.to_vec()));
        } else if entry.encoding().to_string() == "bf16" && plane.len() <= 512 {
            let [rows, cols] = match entry.shape().extents() {
                [cols] => [1, *cols],
                [rows, cols] => [*rows, *cols],
                _ => continue,
            };
            own.push((format!("bf16 {name} {rows} {cols}"), plane.to_vec()));
        }
    }
    let recipe = artifact.recipe().to_string();
    own.push(("recipe".to_owned(), recipe.into_bytes()));
    let packed = |keep: &dyn Fn(&str) -> bool| {
        pack(own.iter().filter(|(n, _)| keep(n)).map(|(n, b)| (n.as_str(), b.as_slice())))
    };
    seeds.add("entries", packed(&|_| true));
    seeds.add("entries", packed(&|name| !name.starts_with("radpack/file/")));
    seeds.add("entries", packed(&|name| name.starts_with("radpack/graph")));
    seeds.add(
        "entries",
        packed(&|name| name == "radpack/manifest.json" || name.starts_with("bf16")),
    );
    programs(seeds, &artifact);
}

/// All programs together, and each alone.
fn programs(seeds: &mut Seeds, artifact: &Artifact) {
    let decoded =
        |name: &str| artifact.find(name).map(|e| (e.plane(0), hash::sha256([e.plane(0)])));
    let Some((bytes, digest)) = decoded(GRAPHS_ENTRY) else { return };
    let index: WireIndex = codec::decode(bytes, &digest).expect("an index");
    let sections: Vec<WireProgram> = index
        .programs
        .iter()
        .map(|name| {
            let (bytes, digest) = decoded(&format!("{GRAPH_PREFIX}{name}")).expect("a section");
            codec::decode(bytes, &digest).expect("a program")
        })
        .collect();
    let all = radpack::graph::WireIndex::programs(&index, sections).expect("programs");
    for program in &all.programs {
        let mut small = all.clone();
        small.programs = vec![program.clone()];
        let (index, sections) = radpack::graph::to_wire(&small);
        seeds.add("programs", codec::encode(&(index, sections)));
    }
}

fn documents(seeds: &mut Seeds, estimate: &Estimate) {
    let score = json!({"tokens": 10, "kl_mean": 0.1, "kl_median": 0.05, "kl_p99": 0.4, "kl_max": 1.0,
        "top1_agreement": 0.9, "reference_perplexity": 5.0, "perplexity": 5.5, "perplexity_ratio": 1.1});
    let eval = json!({"schema": "radpack.eval", "file": "a.rad", "digest": null, "reference": "b", "precision": "target",
        "window": 512, "overall": score, "sources": {"x": score}})
    .to_string();
    let estimate = json!({"schema": "radpack.estimate", "source": "a", "recipe": "small", "estimate": estimate, "layers": []})
        .to_string();
    seeds.pack("card", &[("eval", eval.as_bytes())]);
    seeds.pack("card", &[("estimate", estimate.as_bytes())]);
    seeds.pack(
        "card",
        &[
            ("title", b"A *model*"),
            ("license", b"apache-2.0"),
            ("eval", eval.as_bytes()),
            ("eval", eval.as_bytes()),
            ("estimate", estimate.as_bytes()),
        ],
    );
}
