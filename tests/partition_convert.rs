//! Models on several devices: pieces joined by code of this file's own are the weights of the file for one device.

mod cli_support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use cli_support::{Ran, radpack, resealed, sha256, succeeds};
use radpack::artifact::{Artifact, Entry, digests};
use radpack::tensor::PlaneLayout;
use serde_json::Value;
use tempfile::TempDir;

const DEVICES: [u32; 5] = [1, 2, 4, 8, 16];

/// Groups of 32 columns.
const G32: &str = "schema = 1\nname = \"g32\"\n[[quantize]]\nclass = [\"linear\", \"expert\"]\nencoding = \"int8-g32\"\n";

/// Blocks of 128 × 128 where no head is cut.
const BLOCKS: &str = "schema = 1\nname = \"blocks\"\n[[quantize]]\nmatch = \"*.{gate,up,down}_proj.weight\"\n\
    tower = \"text\"\nclass = \"linear\"\nencoding = \"fp8-block128\"\n\
    [[quantize]]\nclass = [\"embedding\", \"lm_head\"]\noptional = true\nencoding = \"fp8-block128\"\n";

fn folder() -> TempDir {
    let tmp = tempfile::tempdir().expect("a folder");
    fs::write(tmp.path().join("g32.toml"), G32).expect("writes");
    fs::write(tmp.path().join("blocks.toml"), BLOCKS).expect("writes");
    tmp
}

fn source(model: &str) -> PathBuf {
    match model {
        "tiny-gemma4-dense" => cli_support::dense(),
        other => testkit::tiny_model(other),
    }
}

fn convert(folder: &Path, model: &Path, recipe: &str, devices: u32, out: &str) -> Ran {
    let (model, devices) = (model.display().to_string(), devices.to_string());
    let args = ["convert", &model, "--recipe", recipe, "--devices", &devices, "-o", out];
    radpack(folder, &args)
}

/// A weight's row of `radpack/partition`.
#[derive(Debug)]
struct Row {
    name: String,
    shape: Vec<u64>,
    cut: u32,
    extent: u64,
    spans: Vec<(u64, u64)>,
    holders: Vec<(u32, u32)>,
    sha256: [u8; 32],
}

/// Reads `radpack/partition` as `schemas/rad.md` specifies it.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (head, rest) = self.0.split_at(N);
        self.0 = rest;
        head.try_into().expect("N bytes")
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }

    fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..self.u64()).map(|_| item(self)).collect()
    }
}

fn partition(artifact: &Artifact) -> (u32, Vec<u32>, Vec<Row>) {
    let mut bytes = Bytes(artifact.find("radpack/partition").expect("a table").plane(0));
    let devices = bytes.u32();
    let vision = bytes.list(Bytes::u32);
    let rows = bytes.list(|b| Row {
        name: String::from_utf8(b.list(|b| b.take::<1>()[0])).expect("UTF-8"),
        shape: b.list(Bytes::u64),
        cut: b.u32(),
        extent: b.u64(),
        spans: b.list(|b| (b.u64(), b.u64())),
        holders: b.list(|b| (b.u32(), b.u32())),
        sha256: b.take(),
    });
    assert_eq!(bytes.0, [] as [u8; 0], "nothing follows the table");
    (devices, vision, rows)
}

/// Plane `k` of a weight, joined from its pieces.
fn joined(row: &Row, pieces: &[Entry<'_>], k: usize) -> Vec<u8> {
    let plane = &pieces[0].encoding().planes[k];
    let by_rows = row.cut == 1 && row.shape.len() == 2;
    let block = match plane.layout {
        PlaneLayout::Tiled { block } => block[usize::from(!by_rows)],
        PlaneLayout::Table { .. } => 0,
    };
    if block == 0 {
        assert!(pieces.iter().all(|p| p.plane(k) == pieces[0].plane(k)), "{}", row.name);
        return pieces[0].plane(k).to_vec();
    }
    let local = if by_rows { row.shape[1] } else { row.extent };
    let columns = match plane.layout {
        PlaneLayout::Tiled { block: [_, 0] } => 1,
        PlaneLayout::Tiled { block: [_, b] } => local.div_ceil(b),
        PlaneLayout::Table { .. } => unreachable!("tables are carried"),
    };
    let bits = u64::from(plane.dtype.bits());
    let width = (columns * bits).div_ceil(8) as usize;
    let held = |count: u64| count.div_ceil(block);
    if by_rows {
        let rows = pieces.iter().zip(&row.spans);
        return rows
            .flat_map(|(p, s)| &p.plane(k)[..held(s.1) as usize * width])
            .copied()
            .collect();
    }
    let mut lines: Vec<Vec<&[u8]>> = Vec::new();
    for (piece, span) in pieces.iter().zip(&row.spans) {
        let bytes = (held(span.1) * bits).div_ceil(8) as usize;
        lines.push(piece.plane(k).chunks(width).map(|line| &line[..bytes]).collect());
    }
    (0..lines[0].len()).flat_map(|r| lines.iter().flat_map(move |l| l[r].iter().copied())).collect()
}

/// Compares a file for several devices with the one for a single device; returns how many weights are cut.
fn compare(single: &Artifact, several: &Artifact, devices: u32) -> usize {
    let (stated, _, rows) = partition(several);
    assert_eq!(stated, devices);
    let weights: Vec<String> = single
        .entries()
        .map(|e| e.name().to_string())
        .filter(|n| !n.starts_with("radpack/"))
        .collect();
    assert_eq!(rows.iter().map(|r| r.name.clone()).collect::<Vec<_>>(), weights);
    let mut cut = 0;
    for row in &rows {
        let whole = single.find(&row.name).expect("a weight");
        assert_eq!(row.shape, whole.shape().extents(), "{}", row.name);
        assert_eq!(row.sha256, digests::of_entry(&whole), "{}", row.name);
        let pieces: Vec<Entry<'_>> = match row.cut {
            0 => vec![several.find(&row.name).expect("a whole weight")],
            _ => (0..row.spans.len())
                .map(|i| format!("{}@{i}/{}", row.name, row.spans.len()))
                .map(|name| several.find(&name).expect("a piece"))
                .collect(),
        };
        for (piece, entry) in pieces.iter().enumerate() {
            assert_eq!(entry.encoding(), whole.encoding(), "{}", row.name);
            assert_eq!(entry.quantizer().to_string(), whole.quantizer().to_string());
            assert!(row.cut == 0 || row.holders.iter().any(|h| h.1 as usize == piece));
        }
        cut += usize::from(row.cut != 0);
        for k in 0..whole.encoding().planes.len() {
            let found = match row.cut {
                0 => pieces[0].plane(k).to_vec(),
                _ => joined(row, &pieces, k),
            };
            assert!(found == whole.plane(k), "{} plane {k} on {devices} devices", row.name);
        }
    }
    // A device's experts lie together, then a device's pieces, after everything that is whole.
    let mut entries: Vec<Entry<'_>> = several.entries().collect();
    entries.sort_by_key(Entry::offset);
    let mut last = (false, None);
    for entry in entries {
        let name = entry.name().to_string();
        let at = name.rsplit_once('@').map(|(weight, piece)| {
            let row = rows.iter().find(|r| r.name == weight).expect("a weight");
            let piece: u32 = piece.split_once('/').expect("i/n").0.parse().expect("a number");
            row.holders.iter().filter(|h| h.1 == piece).map(|h| h.0).min().expect("held")
        });
        let expert = rows.iter().find(|r| r.name == name && entry.expert() >= 0);
        let place = match (at, expert) {
            (Some(device), _) => (true, Some(device)),
            (None, Some(row)) => (false, Some(row.holders[0].0)),
            (None, None) => (false, None),
        };
        assert!(last <= place, "{name}");
        last = place;
    }
    cut
}

/// Which device counts fit, by model and recipe.
fn check(model: &str, expected: &[(&str, &[u32])]) {
    let tmp = folder();
    let source = source(model);
    let file = |n: u32| tmp.path().join(format!("{n}.rad"));
    for (recipe, fitting) in expected {
        let fits: Vec<u32> = DEVICES
            .into_iter()
            .filter(|&n| {
                let ran = convert(tmp.path(), &source, recipe, n, &format!("{n}.rad"));
                assert!(ran.code == 0 || ran.code == 3, "{model} {recipe} {n}: {}", ran.stderr);
                ran.code == 0
            })
            .collect();
        assert_eq!(fits, *fitting, "{model} {recipe}");
        let single = Artifact::open(&file(1)).expect("opens");
        assert!(single.find("radpack/partition").is_none());
        for &n in &fits[1..] {
            let several = Artifact::open(&file(n)).expect("opens");
            assert!(compare(&single, &several, n) > 4, "{model} {recipe} {n}");
            let report = radpack::artifact::verify(&several, Default::default());
            assert_eq!(report.faults, [], "{model} {recipe} {n}");
        }
    }
}

#[test]
fn a_dense_gemma_is_the_same_on_every_number_of_devices() {
    check(
        "tiny-gemma4-dense",
        &[
            ("int8-g128", &[1, 2]),
            ("g32.toml", &[1, 2, 4, 8]),
            ("w8a16", &DEVICES),
            ("nvfp4", &DEVICES),
            ("blocks.toml", &DEVICES),
            ("fp8-block", &[1]),
        ],
    );
}

#[test]
fn a_gemma_with_experts_is_the_same_on_every_number_of_devices() {
    check(
        "tiny-gemma4-moe",
        &[
            ("int8-g128", &[1, 2]),
            ("g32.toml", &[1, 2, 4, 8]),
            ("w8a16", &DEVICES),
            ("nvfp4", &DEVICES),
            ("blocks.toml", &DEVICES),
        ],
    );
}

#[test]
fn an_e_model_with_shared_keys_is_the_same_on_every_number_of_devices() {
    check(
        "tiny-gemma4-e",
        &[
            ("int8-g128", &[1, 2]),
            ("g32.toml", &[1, 2, 4, 8]),
            ("w8a16", &DEVICES),
            ("nvfp4", &DEVICES),
            ("blocks.toml", &DEVICES),
        ],
    );
}

#[test]
fn llama_and_qwen_are_the_same_on_every_number_of_devices() {
    check(
        "tiny-llama",
        &[
            ("int8-g128", &[1]),
            ("g32.toml", &[1, 2, 4]),
            ("w8a16", &DEVICES),
            ("nvfp4", &[1, 2, 4, 8]),
            ("blocks.toml", &DEVICES),
        ],
    );
    check("tiny-qwen3-moe", &[("g32.toml", &[1, 2, 4, 8]), ("nvfp4", &DEVICES)]);
    check("tiny-gemma4-unified", &[("w8a16", &DEVICES), ("nvfp4", &DEVICES)]);
}

#[test]
fn the_image_encoder_is_shared_by_the_devices_of_its_own_list() {
    let tmp = folder();
    let source = source("tiny-gemma4-dense").display().to_string();
    let args = |sets: [&str; 2]| {
        let fixed = ["convert", &source, "--recipe", "w8a16", "--devices", "8", "-o", "x.rad"];
        let sets = sets.iter().flat_map(|s| ["--set", s]);
        fixed.into_iter().chain(sets).map(str::to_owned).collect::<Vec<String>>()
    };
    succeeds(tmp.path(), &args(["vision.devices=[5, 2]", "whole_groups=false"]));
    succeeds(tmp.path(), &["validate", "x.rad", "--against", &source]);
    let artifact = Artifact::open(&tmp.path().join("x.rad")).expect("opens");
    let (_, vision, rows) = partition(&artifact);
    assert_eq!(vision, [5, 2]);
    let row = |name: &str| rows.iter().find(|r| r.name == name).expect(name);
    let query = row("vision.blk.0.attn_q.weight");
    assert_eq!((query.cut, &query.spans[..]), (1, &[(0, 64), (64, 64)][..]));
    // The list's first device has the first heads.
    assert_eq!(query.holders, [(2, 1), (5, 0)]);
    assert_eq!(row("vision.blk.0.ffn_down.weight").spans, [(0, 88), (88, 88)]);
    assert_eq!(row("mm.vision.weight").holders, [(2, 0), (5, 0)]);
    assert_eq!(row("blk.0.attn_norm.weight").holders.len(), 8);

    let ran = radpack(tmp.path(), &args(["vision.devices=[0, 8]", "whole_groups=false"]));
    assert_eq!(ran.code, 3);
    assert!(
        ran.stderr.contains("the image encoder is for device 8, the model for 8"),
        "{}",
        ran.stderr
    );
    let ran = radpack(tmp.path(), &args(["vision.devices=[0, 1, 2]", "whole_groups=false"]));
    assert_eq!(ran.code, 3);
    let told = "vision.blk.*.attn_q: 16 attention heads do not split over 3 devices";
    assert!(ran.stderr.contains(told), "{}", ran.stderr);
    assert!(
        ran.stderr.contains("for the image encoder, use 1, 2, 4, 8 or 16 devices"),
        "{}",
        ran.stderr
    );
}

#[test]
fn sound_stays_with_the_host() {
    let tmp = folder();
    let ran = convert(tmp.path(), &source("tiny-gemma4-e"), "w8a16", 4, "x.rad");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let artifact = Artifact::open(&tmp.path().join("x.rad")).expect("opens");
    let (_, _, rows) = partition(&artifact);
    let mut audio =
        rows.iter().filter(|r| r.name.starts_with("audio.") || r.name.starts_with("mm.audio"));
    assert!(audio.clone().count() > 10);
    assert!(audio.all(|r| r.cut == 0 && r.holders.is_empty()));
}

#[test]
fn the_bytes_do_not_depend_on_threads() {
    let tmp = folder();
    let model = source("tiny-gemma4-dense").display().to_string();
    for threads in ["1", "3"] {
        let out = format!("t{threads}.rad");
        let args = [
            "convert",
            &model,
            "--recipe",
            "nvfp4",
            "--devices",
            "16",
            "-o",
            &out,
            "--threads",
            threads,
        ];
        succeeds(tmp.path(), &args);
    }
    assert_eq!(sha256(&tmp.path().join("t1.rad")), sha256(&tmp.path().join("t3.rad")));
}

#[test]
fn an_artifact_for_several_devices_exports_extracts_and_shows_like_one_for_a_single_device() {
    let tmp = folder();
    let model = source("tiny-gemma4-dense");
    // compressed-tensors has no short groups, which the image encoder would have.
    let text = "schema = 1\nname = \"text\"\n[[quantize]]\ntower = \"text\"\nclass = \"linear\"\nencoding = \"int8-g32\"\n";
    fs::write(tmp.path().join("text.toml"), text).expect("writes");
    for n in [1, 4] {
        assert_eq!(convert(tmp.path(), &model, "text.toml", n, &format!("{n}.rad")).code, 0);
    }
    for format in ["safetensors", "compressed-tensors"] {
        for n in ["1", "4"] {
            let (file, out) = (format!("{n}.rad"), format!("{format}-{n}"));
            succeeds(tmp.path(), &["export", &file, "--format", format, "-o", &out]);
        }
        let files = |n: u32| -> BTreeMap<String, Vec<u8>> {
            let folder = tmp.path().join(format!("{format}-{n}"));
            let list = fs::read_dir(folder).expect("lists").map(|e| e.expect("an entry").path());
            list.map(|p| {
                let name = p.file_name().expect("a name").to_string_lossy().into_owned();
                (name, fs::read(p).expect("reads"))
            })
            .collect()
        };
        let (single, several) = (files(1), files(4));
        assert_eq!(single.keys().collect::<Vec<_>>(), several.keys().collect::<Vec<_>>());
        for (name, bytes) in &single {
            assert!(several[name] == *bytes, "{format}: {name}");
        }
    }
    for name in ["blk.1.ffn_down.weight", "token_embd.weight", "output_norm.weight"] {
        for raw in [&["--raw"][..], &[]] {
            let bytes = |file: &str| {
                let args = [&["extract", file, name, "-o", "out"], raw].concat();
                succeeds(tmp.path(), &args);
                fs::read(tmp.path().join("out")).expect("reads")
            };
            assert!(bytes("1.rad") == bytes("4.rad"), "{name} {raw:?}");
        }
    }
    let shown = succeeds(tmp.path(), &["inspect", "4.rad"]).stdout;
    assert!(shown.contains("devices   4\n"), "{shown}");
    assert!(shown.contains("\ndevice "), "{shown}");
    let weights = succeeds(tmp.path(), &["inspect", "4.rad", "--weights"]).stdout;
    assert!(weights.contains("pieces") && !weights.contains('@'), "{weights}");
    let shown = succeeds(tmp.path(), &["inspect", "4.rad", "--json"]).stdout;
    let shown: Value = serde_json::from_str(&shown).expect("JSON");
    let devices = shown["manifest"]["device_weights"].as_array().expect("a list");
    assert_eq!(devices.len(), 4);
    let plain = succeeds(tmp.path(), &["inspect", "1.rad", "--json"]).stdout;
    assert!(!plain.contains("device_weights"), "a file for one device is as it was");
}

#[test]
fn weights_are_reused_between_files_for_different_devices() {
    let tmp = folder();
    let model = source("tiny-gemma4-dense");
    let path = model.display().to_string();
    for n in [1, 4, 8] {
        assert_eq!(convert(tmp.path(), &model, "g32.toml", n, &format!("{n}.rad")).code, 0);
    }
    for (old, devices) in [("1.rad", "4"), ("4.rad", "8"), ("8.rad", "1")] {
        let args = [
            "convert",
            &path,
            "--recipe",
            "g32.toml",
            "--devices",
            devices,
            "--reuse",
            old,
            "-o",
            "new.rad",
            "--json",
        ];
        let ran = succeeds(tmp.path(), &args);
        let document: Value = serde_json::from_str(&ran.stdout).expect("JSON");
        assert!(document["reused"].as_u64() > Some(50), "{}", document["reused"]);
        let fresh = format!("{devices}.rad");
        assert_eq!(sha256(&tmp.path().join("new.rad")), sha256(&tmp.path().join(fresh)));
    }
}

#[test]
fn a_dry_run_shows_what_every_device_holds() {
    let tmp = folder();
    let model = source("tiny-llama").display().to_string();
    let args = ["convert", &model, "--recipe", "g32.toml", "--devices", "4", "--dry-run"];
    let text = succeeds(tmp.path(), &args).stdout;
    // 176 columns are five groups of 32 and one of 16: two devices get two, one gets one, the last the short one.
    let table: Vec<&str> = text.lines().skip_while(|l| !l.starts_with("device ")).take(4).collect();
    let want = [
        "device     weights     whole      pieces    padding",
        "0–1     105.38 KiB  1.12 KiB  104.25 KiB        0 B",
        "2       105.38 KiB  1.12 KiB  104.25 KiB  25.50 KiB",
        "3       105.38 KiB  1.12 KiB  104.25 KiB  38.00 KiB",
    ];
    assert_eq!(table, want);
    let json = succeeds(tmp.path(), &[&args[..], &["--json"]].concat()).stdout;
    let document: Value = serde_json::from_str(&json).expect("JSON");
    let devices = document["devices"].as_array().expect("a list");
    let number = |d: &Value, key: &str| d[key].as_u64().expect("a number");
    assert_eq!(devices.len(), 4);
    for d in devices {
        assert_eq!(number(d, "bytes"), number(d, "whole") + number(d, "shards"));
        assert_eq!(number(d, "bytes"), number(&devices[0], "bytes"));
    }
    assert!(number(&devices[3], "padding") > number(&devices[0], "padding"));
    // One device: the same key, one row.
    let args = ["convert", &model, "--recipe", "g32.toml", "--dry-run", "--json"];
    let document: Value = serde_json::from_str(&succeeds(tmp.path(), &args).stdout).expect("JSON");
    assert_eq!(document["devices"][0]["whole"], document["totals"]["stored_bytes"]);
}

#[test]
fn a_byte_that_changed_anywhere_is_found() {
    let tmp = folder();
    assert_eq!(convert(tmp.path(), &source("tiny-llama"), "g32.toml", 4, "x.rad").code, 0);
    let path = tmp.path().join("x.rad");
    let bytes = fs::read(&path).expect("reads");
    let place = |name: &str| {
        let artifact = Artifact::open(&path).expect("opens");
        let entry = artifact.find(name).expect(name);
        (entry.offset() as usize, entry.span() as usize)
    };
    let faults = |bytes: &[u8]| -> Vec<String> {
        let artifact = Artifact::from_bytes(bytes).expect("opens");
        let faults = radpack::artifact::verify(&artifact, Default::default()).faults;
        faults.into_iter().map(|f| format!("{}: {}", f.area, f.message)).collect()
    };
    // Two pieces of one weight change places: both digests and the whole weight's differ.
    let mut swapped = bytes.clone();
    let ((a, n), (b, _)) = (place("blk.0.ffn_down.weight@0/4"), place("blk.0.ffn_down.weight@1/4"));
    for i in 0..n {
        swapped.swap(a + i, b + i);
    }
    let found = faults(&swapped);
    assert!(
        found.iter().any(|f| f.starts_with("digests: `blk.0.ffn_down.weight@0/4`")),
        "{found:?}"
    );
    let whole = "partition: `blk.0.ffn_down.weight`: sha256 of the whole weight is";
    assert!(found.iter().any(|f| f.starts_with(whole)), "{found:?}");
    // A byte of the padding belongs to no weight, yet it has to be zero.
    let (at, n) = place("blk.0.ffn_down.weight@3/4");
    let mut padded = bytes.clone();
    padded[at + n - 1] ^= 1;
    let found = faults(&padded);
    assert!(
        found.iter().any(|f| f.contains("`blk.0.ffn_down.weight`: padding is not zero")),
        "{found:?}"
    );
    // The table itself is covered by its digest.
    let (at, n) = place("radpack/partition");
    let mut table = bytes.clone();
    table[at + n - 1] ^= 1;
    let found = faults(&table);
    assert!(
        found.iter().any(|f| f.starts_with("partition: radpack/partition: sha256 is")),
        "{found:?}"
    );
}

#[test]
fn a_table_that_lies_is_found_though_its_digest_holds() {
    let tmp = folder();
    assert_eq!(convert(tmp.path(), &source("tiny-llama"), "g32.toml", 4, "x.rad").code, 0);
    let bytes = fs::read(tmp.path().join("x.rad")).expect("reads");
    let faults = |bytes: &[u8]| -> Vec<String> {
        let artifact = Artifact::from_bytes(bytes).expect("opens");
        let faults = radpack::artifact::verify(&artifact, Default::default()).faults;
        faults.into_iter().map(|f| format!("{}: {}", f.area, f.message)).collect()
    };
    assert_eq!(faults(&resealed(&bytes, "radpack/partition", |_| ())), [] as [String; 0]);
    // Bytes of the row of one weight, by what they follow its name.
    let row = |table: &[u8]| {
        let name = b"blk.0.ffn_down.weight";
        table.windows(name.len()).position(|w| w == name).expect("a row") + name.len()
    };
    // After the name: shape (8 + 16), cut (4), extent (8), spans (8 + 4 × 16), holders (8 + 4 × 8), sha256.
    let (cut, spans, holders) = (24, 24 + 12, 24 + 12 + 72);
    type Change = fn(&mut [u8], usize);
    let cases: [(&str, usize, Change); 6] = [
        (
            "`blk.0.ffn_down.weight@0/4` has shape [64, 64], the table gives [64, 176]",
            cut,
            |t, at| {
                // Rows instead of columns: 64 of them in one piece of four.
                t[at] = 1;
                let spans = [(0u64, 64u64), (64, 0), (64, 0), (64, 0)];
                for (i, (a, b)) in spans.into_iter().enumerate() {
                    let at = at + 20 + i * 16;
                    t[at..at + 8].copy_from_slice(&a.to_le_bytes());
                    t[at + 8..at + 16].copy_from_slice(&b.to_le_bytes());
                }
            },
        ),
        ("no entry `blk.0.ffn_domn.weight@0/4`", 0, |t, at| t[at - 9] = b'm'),
        ("is cut inside a block of one of its planes", spans, |t, at| {
            // 64 + 64 + 32 + 16 become 64 + 60 + 36 + 16.
            t[at + 8 + 16 + 8] = 60;
            t[at + 8 + 32] = 124;
            t[at + 8 + 32 + 8] = 36;
        }),
        ("device 9 is none of 4, or holds it twice", holders, |t, at| t[at + 8] = 9),
        ("device 0: ", holders, |t, at| {
            // Device 0 and device 3 change places: the bytes are the same, the padding is not.
            t.swap(at + 8 + 4, at + 8 + 24 + 4);
        }),
        ("sha256 of the whole weight is", holders, |t, at| t[at + 8 + 32] ^= 1),
    ];
    for (text, offset, change) in cases {
        let changed = resealed(&bytes, "radpack/partition", |table| {
            let at = row(table) + offset;
            change(table, at);
        });
        let found = faults(&changed);
        assert!(found.iter().any(|f| f.contains(text)), "{text}: {found:?}");
    }
    // Any byte: a fault or the same weights, never a panic.
    let mut state = 12345u64;
    for _ in 0..300 {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let changed = resealed(&bytes, "radpack/partition", |table| {
            // Behind the devices and the list of vision devices, which no weight of this model is on.
            let at = 16 + (state >> 33) as usize % (table.len() - 16);
            table[at] ^= 1 << (state >> 60 & 7);
        });
        assert!(!faults(&changed).is_empty(), "every byte of the table means something");
    }
}
