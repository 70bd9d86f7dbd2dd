//! The cards of `docs/examples` say what conversions write today.
//!
//! A conversion of these models reads 62 GB, so nothing is converted here: a plan knows every size, table and program, and
//! a card is made of a file that has the plan's tables and manifest, and holes where its weights would be. What a plan does
//! not know, digests of large files, is left out of the comparison; instead the README beside the cards records the digest
//! of the plan that each was made from.

mod cli_support;
mod published_support;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use cli_support::succeeds;
use radpack::artifact::errors::{self, WeightError};
use radpack::artifact::layout::{DIGEST_KEY, ERRORS_ENTRY, MANIFEST_ENTRY};
use radpack::artifact::manifest::Sha256Hex;
use radpack::artifact::{Artifact, codec, digests};
use radpack::card::{self, Additions};
use radpack::checkpoint::{Checkpoint, OpenOptions};
use radpack::hash::sha256;
use radpack::pipeline::{self, Plan, Request, Sources};
use radpack::{graph, recipe};
use tempfile::tempdir;

const MODEL: &str = "gemma-4-31B";
const ASSISTANT: &str = "gemma-4-31B-it-assistant";

/// Where committed cards lie.
const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/examples");

fn plan(folder: &Path, draft: Option<&str>, name: &str) -> Plan {
    let open = |name: &str| {
        let source = folder.join(name);
        Checkpoint::open(&source, &OpenOptions::default()).unwrap_or_else(|f| panic!("{f}"))
    };
    let sources = Sources { main: open(MODEL), draft: draft.map(open), imatrix: None };
    let recipe = recipe::load(Some(name)).unwrap_or_else(|f| panic!("{f}"));
    let request = Request { weights_only: false, tokenizer_required: false };
    pipeline::plan(sources, recipe, request).unwrap_or_else(|f| panic!("{f}"))
}

/// Digest of all that a plan fixes of its file: tables, manifest, programs.
fn digest(plan: &Plan) -> String {
    let compiled = plan.compiled.as_ref().expect("programs");
    let (index, programs) = graph::to_wire(&compiled.programs);
    let mut all = vec![plan.layout.tables().to_vec(), plan.manifest.to_bytes()];
    all.push(codec::encode(&index));
    all.extend(programs.iter().map(codec::encode));
    digests::hex(&sha256(all.iter().map(Vec::as_slice)))
}

/// The file that a plan describes, with holes for weights and programs. The digests of large source files stay zero.
fn stand_in(plan: &Plan, folder: &Path, out: &Path) -> Artifact {
    let mut manifest = plan.manifest.clone();
    let mut known = BTreeMap::new();
    for file in manifest.source.files.iter().filter(|f| f.bytes < 1 << 20) {
        let (model, name) = match file.path.strip_prefix(pipeline::DRAFT_FOLDER) {
            Some(name) => (ASSISTANT, name),
            None => (MODEL, file.path.as_str()),
        };
        let bytes = fs::read(folder.join(model).join(name)).expect("a small file");
        known.insert(file.path.clone(), sha256([bytes.as_slice()]));
    }
    manifest.set_digests(&known.iter().map(|(path, digest)| (path.as_str(), *digest)).collect());
    let quantized = plan.assignment.quantized(&plan.table);
    let errors: Vec<WeightError> = quantized
        .map(|(_, w)| WeightError { weight: w.name.clone(), squared_error: 0.0, squared: 0.0 })
        .collect();
    let file = File::create(out).expect("a file");
    file.set_len(plan.layout.file_bytes()).expect("a hole");
    let root = digests::hex(&[0; 32]);
    let tables = plan.layout.tables_with(DIGEST_KEY, &root).expect("a digest in the metadata");
    file.write_all_at(&tables, 0).expect("writes");
    for (name, bytes) in
        [(MANIFEST_ENTRY, manifest.to_bytes()), (ERRORS_ENTRY, errors::encode(&errors))]
    {
        let place = plan.layout.entry(name).and_then(|entry| plan.layout.plane(entry, 0));
        let place = place.expect(name);
        assert_eq!(place.bytes, bytes.len() as u64, "{name}");
        file.write_all_at(&bytes, place.offset).expect("writes");
    }
    Artifact::open(out).unwrap_or_else(|e| panic!("{e}"))
}

/// A card without the digests that a plan does not know: of the file, of its entries, of large files of the source.
fn comparable(card: &str) -> String {
    let unknown = |line: &&str| {
        line.starts_with("| sha256 |")
            || line.starts_with("| digest of all entries |")
            || line.contains(".safetensors` |")
    };
    let cut = |line: &str| match line.rsplit_once(" | `") {
        Some((before, _)) if unknown(&line) => format!("{before} | …"),
        _ => line.to_owned(),
    };
    card.lines().map(cut).collect::<Vec<_>>().join("\n")
}

/// What stands behind a name in the README's table of plans: the digest of the file's entries, that of the plan.
fn recorded(card: &str) -> [String; 2] {
    let readme = fs::read_to_string(Path::new(EXAMPLES).join("README.md")).expect("a README");
    let start = format!("| `{card}` | `");
    let row = readme.lines().find_map(|l| l.strip_prefix(&start)?.strip_suffix("` |"));
    let row = row.unwrap_or_else(|| panic!("README.md has no row `{card}`"));
    let (entries, plan) = row.split_once("` | `").expect("two digests");
    [entries.to_owned(), plan.to_owned()]
}

fn is_current(name: &str, title: &str, draft: Option<&str>, with_estimate: bool) {
    let tmp = tempdir().expect("a folder");
    let folder = tmp.path();
    published_support::sparse(MODEL, &folder.join(MODEL));
    if let Some(draft) = draft {
        published_support::sparse(draft, &folder.join(draft));
    }
    let file_name = format!("{name}.rad");
    let recipe = match draft {
        Some(_) => "gemma-4/radiance-i8g",
        None => "gemma-4/rbln-w8a16-x16",
    };
    let plan = plan(folder, draft, recipe);
    let artifact = stand_in(&plan, folder, &folder.join(&file_name));
    assert_eq!(artifact.tables_digest(), plan.layout.tables_digest());
    let stated = artifact.find(MANIFEST_ENTRY).expect("a manifest");
    let tables = Sha256Hex(plan.layout.tables_digest()).to_string();
    assert!(String::from_utf8_lossy(stated.plane(0)).contains(&tables));

    let estimate = with_estimate.then(|| {
        let ran = succeeds(folder, &["estimate-kv", MODEL, "--recipe", recipe, "--json"]);
        serde_json::from_str(&ran.stdout).expect("JSON")
    });
    let additions = Additions {
        title: Some(title.to_owned()),
        license: Some("apache-2.0".to_owned()),
        base_model: Some("google/gemma-4-31B-it".to_owned()),
        estimate,
        file_name,
        ..Additions::default()
    };
    let made = card::card(&artifact, &additions, "model.md.jinja", card::TEMPLATE)
        .unwrap_or_else(|f| panic!("{f}"));
    let committed = fs::read_to_string(Path::new(EXAMPLES).join(format!("{name}.md")));
    let committed = committed.expect("a card");
    let (made, said) = (comparable(&made), comparable(&committed));
    for (made, said) in made.lines().zip(said.lines()) {
        assert_eq!(
            made, said,
            "docs/examples/{name}.md is stale: docs/examples/README.md says how it is made"
        );
    }
    assert_eq!(made, said);
    let [entries, of_plan] = recorded(name);
    assert!(committed.contains(&format!("| digest of all entries | `{entries}` |")), "{entries}");
    assert_eq!(
        digest(&plan),
        of_plan,
        "conversions write other bytes than when docs/examples/{name}.md was made: make it again as \
         docs/examples/README.md says, and record this plan there"
    );
}

#[test]
fn the_card_of_the_rebellions_system_is_current() {
    is_current("gemma-4-31b-rbln-w8a16-x16", "Gemma 4 31B, W8A16 on 16 × RBLN-CA25", None, true);
}

#[test]
fn the_card_of_the_radiance_system_is_current() {
    let title = "Gemma 4 31B-it with its assistant, int8 for radiance";
    is_current("gemma-4-31b-it-radiance-i8g", title, Some(ASSISTANT), false);
}

#[test]
fn digests_that_a_plan_knows_are_compared() {
    let card = "| sha256 | `12` |\n| `config.json` | 4 KiB | `34` |\n| `a.safetensors` | 4 GiB | `56` |\n\
                Recipe `x` (sha256 `78`).";
    let left = "| sha256 | …\n| `config.json` | 4 KiB | `34` |\n| `a.safetensors` | 4 GiB | …\n\
                Recipe `x` (sha256 `78`).";
    assert_eq!(comparable(card), left);
}
