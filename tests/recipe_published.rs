//! The published Gemma 4 recipes on the published shapes: what they decide, and what the files weigh.

mod cli_support;

use std::fmt::Write;
use std::fs;
use std::path::Path;

use cli_support::{radpack, succeeds};
use serde_json::Value;
use tempfile::tempdir;

const RECIPES: [&str; 8] = [
    "gemma-4/bf16",
    "gemma-4/rbln-w8a16-x16",
    "gemma-4/rbln-bucketing",
    "gemma-4/radiance-i8g",
    "gemma-4/nvfp4",
    "gemma-4/fp8-dynamic",
    "gemma-4/fp8-block",
    "gemma-4/w4a16-g32",
];

/// A checkpoint with the published configuration and shapes; its data are file holes.
fn published(name: &str, folder: &Path) {
    let gemma4 = testkit::fixtures().join("gemma4");
    let shapes = gemma4.join(format!("shapes/{name}.tsv"));
    let config = gemma4.join(format!("configs/{name}.json"));
    testkit::sparse(&shapes, &config, &folder.join(name), testkit::SparseOptions::default())
        .expect("the folder can be written");
}

fn dry_run(folder: &Path, recipe: &str, model: &str, draft: Option<&str>) -> Value {
    dry_run_with(folder, recipe, model, draft, &[])
}

fn dry_run_with(
    folder: &Path,
    recipe: &str,
    model: &str,
    draft: Option<&str>,
    more: &[&str],
) -> Value {
    let mut args =
        vec!["convert", model, "--recipe", recipe, "--dry-run", "--no-tokenizer", "--json"];
    args.extend(draft.iter().flat_map(|d| ["--draft-model", d]));
    args.extend(more);
    let ran = succeeds(folder, &args);
    assert_eq!(ran.stderr, "", "{recipe}: no warnings");
    serde_json::from_str(&ran.stdout).expect("one JSON document")
}

fn gib(bytes: &Value) -> String {
    format!("{:.2} GiB", bytes.as_u64().expect("bytes") as f64 / f64::from(1 << 30))
}

fn sum(document: &Value) -> (u64, u64, u64) {
    let number = |key: &str| document["totals"][key].as_u64().expect("a number");
    (number("weights"), number("parameters"), number("stored_bytes"))
}

#[test]
fn gemma_4_31b_with_its_assistant_is_as_large_as_published() {
    let tmp = tempdir().expect("a folder");
    let (model, draft) = ("gemma-4-31B", "gemma-4-31B-it-assistant");
    published(model, tmp.path());
    published(draft, tmp.path());

    let document = dry_run(tmp.path(), "gemma-4/radiance-i8g", model, Some(draft));
    let rules: Vec<(u64, String, u64)> = document["rules"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|r| {
            let number = |key: &str| r["stored"][key].as_u64().expect("a number");
            let selects = r["selects"].as_str().expect("text").to_owned();
            (number("weights"), selects, number("stored_bytes"))
        })
        .collect();
    assert_eq!(
        rules,
        [
            (410, "*.{q,k,v,o,gate,up,down}_proj.weight of text".to_owned(), 29_744_332_800),
            // 262,144 x 5,376 and 262,144 x 1,024 codes, a 2-byte scale for 128 of them.
            (1, "lm_head of text".to_owned(), 1_431_306_240),
            (1, "lm_head of draft".to_owned(), 272_629_760),
        ]
    );
    assert_eq!(document["kept"]["weights"], 825);
    assert_eq!(document["kept"]["stored_bytes"], 4_374_888_672_u64);
    // Planes alone are 33.36 GiB. The published 33.37 is the size of the file, which has tables and alignment besides.
    assert_eq!(sum(&document), (1237, 33_151_893_616, 35_823_157_472));
    assert_eq!(gib(&document["totals"]["stored_bytes"]), "33.36 GiB");
    assert_eq!(gib(&document["file_bytes"]), "33.37 GiB");

    let args = [
        "convert",
        model,
        "--draft-model",
        draft,
        "--recipe",
        "gemma-4/radiance-i8g",
        "--dry-run",
        "--no-tokenizer",
    ];
    let text = succeeds(tmp.path(), &args).stdout;
    assert!(text.contains("31.3 B parameters · 1,188 + 48 tensors, all claimed"), "{text}");
    assert!(text.contains("total                                           1,237"), "{text}");
    assert!(text.contains("gemma-4-31b-radiance-i8g.rad, 33.37 GiB"), "{text}");
    assert!(text.contains("weights 33.36 GiB + tables, side files and alignment"), "{text}");
    // Without the assistant the last rule rests.
    assert_eq!(dry_run(tmp.path(), "gemma-4/radiance-i8g", model, None)["rules"][2]["hits"], 0);
}

/// Bytes of all planes of the 31B alone and with its assistant, computed from the shapes by a script that knows nothing
/// of this program: rows x columns of codes, and their scales.
const PLANES: [(u64, u64); 8] = [
    (62_546_177_752, 63_485_214_944),
    (33_267_908_312, 34_206_945_504),
    (33_267_908_312, 34_206_945_504),
    (35_148_361_432, 35_823_157_472),
    (20_446_508_352, 21_385_545_544),
    (33_267_908_312, 34_206_945_504),
    (33_263_025_112, 34_202_062_304),
    (20_446_506_712, 21_385_543_904),
];

#[test]
fn sizes_of_the_published_recipes_are_as_documented() {
    let tmp = tempdir().expect("a folder");
    let (model, draft) = ("gemma-4-31B", "gemma-4-31B-it-assistant");
    published(model, tmp.path());
    published(draft, tmp.path());
    let mut table = String::from(concat!(
        "| recipe | bits/weight | weights | file | with the assistant: bits/weight | weights | file |\n",
        "|---|---:|---:|---:|---:|---:|---:|\n",
    ));
    for (recipe, (alone, both)) in RECIPES.into_iter().zip(PLANES) {
        let _ = write!(table, "| `{recipe}`");
        for (draft, planes) in [(None, alone), (Some(draft), both)] {
            let document = dry_run(tmp.path(), recipe, model, draft);
            assert_eq!(sum(&document).2, planes, "{recipe} {draft:?}");
            let bits = document["totals"]["bits_per_weight"].as_f64().expect("a number");
            let weights = gib(&document["totals"]["stored_bytes"]);
            let _ = write!(table, " | {bits:.2} | {weights} | {}", gib(&document["file_bytes"]));
        }
        table.push_str(" |\n");
    }
    println!("{table}");

    let path = testkit::root().join("docs/recipes.md");
    let text = fs::read_to_string(&path).expect("docs/recipes.md");
    let (begin, end) = ("<!-- sizes -->\n", "<!-- /sizes -->");
    let (head, rest) = text.split_once(begin).expect("the first mark");
    let (known, tail) = rest.split_once(end).expect("the second mark");
    if std::env::var_os("RADPACK_BLESS").is_some() {
        fs::write(&path, format!("{head}{begin}{table}{end}{tail}")).expect("docs/ is writable");
        return;
    }
    assert_eq!(known, table, "RADPACK_BLESS=1 cargo test --test recipe_published");
}

#[test]
fn every_published_recipe_fits_every_gemma_4_of_its_kind() {
    let tmp = tempdir().expect("a folder");
    // Recipes of engines that ran one model select by that model's names; the experts of 26B-A4B are others.
    for size in ["31B", "26B-A4B", "12B", "E4B", "E2B"] {
        let (model, draft) = (format!("gemma-4-{size}"), format!("gemma-4-{size}-it-assistant"));
        published(&model, tmp.path());
        published(&draft, tmp.path());
        for recipe in RECIPES {
            // An E model has 8 heads, its assistant 4: 16 devices are for the others. It saw half as many positions.
            let more: &[&str] = match (recipe.contains("rbln"), size.starts_with('E')) {
                (true, true) => &[
                    "--devices",
                    "4",
                    "--set",
                    "vision.devices=[0]",
                    "--set",
                    "graphs.max_seq_len=131072",
                ],
                _ => &[],
            };
            let document = dry_run_with(tmp.path(), recipe, &model, Some(&draft), more);
            let stored = document["weights"].as_array().expect("a list");
            let embedding = stored.iter().find(|w| w["name"] == "draft.token_embd.weight");
            let embedding = embedding.expect("both names are there");
            assert_eq!(embedding["stored"], false, "{recipe} {size}");
            let towers = ["vision", "audio", "projector"];
            for weight in stored.iter().filter(|w| towers.iter().any(|t| w["tower"] == *t)) {
                assert_eq!(weight["encoding"], "bf16", "{recipe} {size} {}", weight["name"]);
            }
        }
    }
}

#[test]
fn the_rbln_recipes_share_31b_over_sixteen_devices() {
    let tmp = tempdir().expect("a folder");
    published("gemma-4-31B", tmp.path());
    // 60 layers: 50 of 16 key heads 256 wide, 10 of 4 key heads 512 wide, repeated on four devices each and without
    // values of their own; 21,504 columns; 262,144 rows. Codes of a byte, a scale of two bytes a row.
    let (hidden, mlp, vocabulary) = (5_376, 21_504, 262_144);
    let linear = |rows: u64, cols: u64| rows * cols + 2 * rows;
    let attention = |dim: u64, values: u64| {
        let keys = (1 + values) * linear(dim, hidden);
        linear(2 * dim, hidden) + keys + linear(hidden, 2 * dim)
    };
    let inner = 2 * linear(mlp / 16, hidden) + linear(hidden, mlp / 16);
    let pieces =
        50 * attention(256, 1) + 10 * attention(512, 0) + 60 * inner + vocabulary / 16 * hidden * 2;
    for (recipe, vision) in [("gemma-4/rbln-w8a16-x16", 1), ("gemma-4/rbln-bucketing", 8)] {
        let document = dry_run(tmp.path(), recipe, "gemma-4-31B", None);
        let devices = document["devices"].as_array().expect("a list");
        let figures: Vec<(u64, u64)> = devices
            .iter()
            .map(|d| (d["shards"].as_u64().expect("bytes"), d["padding"].as_u64().expect("bytes")))
            .collect();
        assert_eq!(figures.len(), 16, "{recipe}");
        assert_eq!(figures[15], (pieces, 0), "{recipe}");
        let alike = figures.iter().filter(|f| f.0 == pieces).count();
        assert_eq!(alike, if vision == 1 { 16 } else { 8 }, "{recipe}");
        let encoders = devices.iter().filter(|d| d["bytes"] != devices[15]["bytes"]).count();
        assert_eq!(encoders, vision, "{recipe}");
    }
    published("gemma-4-E4B", tmp.path());
    let args = [
        "convert",
        "gemma-4-E4B",
        "--recipe",
        "gemma-4/rbln-bucketing",
        "--dry-run",
        "--no-tokenizer",
    ];
    let ran = radpack(tmp.path(), &args);
    assert_eq!(ran.code, 3);
    insta::assert_snapshot!(ran.stderr, @r"
    error: this model does not split over these devices  [exit 3]

      partition: blk.*.attn_q: 16 devices for 8 attention heads leave half a head to each
        = use 1, 2, 4 or 8 devices
      partition: vision.blk.*.attn_q: 12 attention heads do not split over 8 devices
        = for the image encoder, use 1, 2, 3, 4, 6 or 12 devices
      partition: vision.blk.*.attn_k: 12 key heads do not split over 8 devices
        = for the image encoder, use 1, 2, 3, 4, 6 or 12 devices

    3 problems; nothing was read beyond the headers, nothing was written
    ");
}

#[test]
fn published_recipes_are_listed_and_found_by_their_last_name() {
    let tmp = tempdir().expect("a folder");
    let listed = succeeds(tmp.path(), &["recipes", "list"]).stdout;
    for recipe in RECIPES {
        assert!(listed.contains(recipe), "{recipe}\n{listed}");
        let shown = succeeds(tmp.path(), &["recipes", "show", recipe]).stdout;
        assert!(shown.contains(&format!("name = \"{recipe}\"")), "{shown}");
    }
    let ran = radpack(tmp.path(), &["recipes", "show", "radiance-i8g"]);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("did you mean gemma-4/radiance-i8g?"), "{}", ran.stderr);
}

#[test]
fn the_graphs_of_the_rbln_recipes_are_the_published_ones() {
    let tmp = tempdir().expect("a folder");
    let shown = |name: &str| succeeds(tmp.path(), &["recipes", "show", name]).stdout;
    let text = shown("gemma-4/rbln-w8a16-x16");
    let tail = text.split_once("[graphs]").expect("graphs").1;
    insta::assert_snapshot!(tail.split_once("[towers]").expect("towers").0, @r#"
    max_seq_len = 262144
    batch_size = 8
    decoder_batch_sizes = [1, 2, 4, 8]
    prefill_chunk_size = 128
    image_prefill_chunk_size = [384]
    attention = "flash"
    kv_partition_len = 16384
    kv_dtype = "f16"

    [vision]
    max_soft_tokens = [280]
    devices = [0]
    "#);
    // Every image prefill bucket is the smallest that fits some image, and the largest image fits: the rules of
    // optimum-rbln 0.11.2. A bucket is a multiple of 128.
    let text = shown("gemma-4/rbln-bucketing");
    assert!(text.contains("image_prefill_chunk_size = [384, 640, 1152]"), "{text}");
    assert!(text.contains("max_soft_tokens = [70, 140, 280, 560, 1120]"), "{text}");
    let (buckets, images) = ([384, 640, 1152], [70, 140, 280, 560, 1120]);
    for image in images {
        assert!(buckets.iter().any(|b| *b >= image), "{image}");
    }
    for bucket in buckets {
        assert_eq!(bucket % 128, 0);
        let smallest = |image: &i32| buckets.iter().filter(|b| *b >= image).min() == Some(&bucket);
        assert!(images.iter().any(smallest), "{bucket}");
    }
}
