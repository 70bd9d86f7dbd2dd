//! Limits at their border and one past it, where a number or a file with a hole is enough (`docs/limits.md` lists all).

mod cli_support;

use std::fs;
use std::path::Path;

use cli_support::{Ran, radpack, succeeds};
use radpack::artifact::manifest::{self, Manifest, ManifestError};
use radpack::artifact::partition::{self, Partition, PartitionError};
use radpack::artifact::{Contents, EntrySpec, Layout, codec};
use radpack::checkpoint::gguf::header::{Value as Kept, read_header};
use radpack::graph::{
    Program, ProgramKind, Programs, ValueType, WireError, WireIndex, module, verify,
};
use radpack::hash::sha256;
use radpack::quantize::Importance;
use radpack::recipe;
use radpack::runtime::{MAX_FILE, Picture};
use radpack::tensor::{DType, Shape};
use tempfile::{TempDir, tempdir};
use testkit::gguf::{File, Value};

fn llama() -> TempDir {
    let tmp = tempdir().expect("a folder");
    testkit::copy_folder(&testkit::tiny_model("tiny-llama"), &tmp.path().join("model"))
        .expect("copies");
    tmp
}

/// A file of that length that takes no room.
fn hole(path: &Path, length: u64) {
    fs::File::create(path).expect("creates").set_len(length).expect("lengthens");
}

fn planned(folder: &Path, more: &[&str]) -> Ran {
    radpack(folder, &[&["convert", "model", "--recipe", "bf16", "--dry-run"], more].concat())
}

#[test]
fn manifests_and_tables_of_devices_have_a_size() {
    assert_eq!(manifest::MAX_BYTES, partition::MAX_BYTES);
    let most = manifest::MAX_BYTES;
    let bytes = vec![0; most + 1];
    assert_eq!(Manifest::parse(&bytes), Err(ManifestError::TooLarge(most + 1)));
    assert!(matches!(Manifest::parse(&bytes[..most]), Err(ManifestError::Json(_))));
    // No digest is taken of what is too large.
    let digest = [0; 32];
    assert_eq!(Partition::decode(&bytes, &digest), Err(PartitionError::TooLarge(most + 1)));
    assert!(matches!(Partition::decode(&bytes[..most], &digest), Err(PartitionError::Codec(_))));
}

#[test]
fn tables_of_devices_have_a_number_of_devices() {
    let with = |devices: u32| {
        let table = Partition { devices, vision_devices: Vec::new(), weights: Vec::new() };
        let bytes = codec::encode(&table);
        Partition::decode(&bytes, &sha256([bytes.as_slice()])).map(|read| assert_eq!(read, table))
    };
    assert_eq!(with(65_536), Ok(()));
    let wrong = PartitionError::Wrong("65537 devices, not 2 to 65536".to_owned());
    assert_eq!(with(65_537), Err(wrong));
}

#[test]
fn files_end_before_two_to_the_63() {
    let with = |bytes: u64| {
        let entries = vec![EntrySpec::opaque("a", bytes)];
        Layout::plan(&Contents { entries, ..Contents::default() }).map(|layout| layout.file_bytes())
    };
    // A row counts bits in 64 bits, so one entry has at most an eighth of them: eight fill the file.
    let most = (i64::MAX as u64) / 64;
    assert!(with(most).is_ok());
    assert!(with(most + 1).is_err());
    let many = |last: u64| {
        let mut entries: Vec<_> =
            (0..63).map(|n| EntrySpec::opaque(format!("{n:02}"), most)).collect();
        entries.push(EntrySpec::opaque("last", last));
        Layout::plan(&Contents { entries, ..Contents::default() }).map(|layout| layout.file_bytes())
    };
    // The largest last entry that still fits.
    let (mut fits, mut beyond) = (1, most);
    assert!(many(fits).is_ok() && many(beyond).is_err());
    while beyond - fits > 1 {
        let middle = fits + (beyond - fits) / 2;
        if many(middle).is_ok() { fits = middle } else { beyond = middle }
    }
    assert_eq!(many(fits).expect("fits"), i64::MAX as u64);
}

/// A program of nothing.
fn program(name: String) -> Program {
    Program {
        name,
        kind: ProgramKind::Prefill { chunk: 1 },
        devices: 1,
        weights: Vec::new(),
        inputs: Vec::new(),
        outputs: Vec::new(),
        values: Vec::new(),
        nodes: Vec::new(),
    }
}

#[test]
fn programs_of_1024_devices_are_printed_and_of_one_more_are_not() {
    let printed = |devices: u32| {
        let program = Program { devices, ..program("p".into()) };
        let programs = Programs { kv: Vec::new(), programs: vec![program.clone()] };
        module(&programs, &program, &|_| None, 1)
    };
    assert!(printed(1024).is_ok());
    let refused = printed(1025).expect_err("one more");
    let what = "p: 1025 devices; collectives of at most 1024 are printed";
    assert_eq!(refused.problems[0].message, what);
}

#[test]
fn files_have_a_number_of_programs_and_types_a_number_of_dimensions() {
    let said = |n: usize| {
        let programs = (0..n).map(|n| program(n.to_string())).collect();
        let problems = verify(&Programs { kv: Vec::new(), programs });
        problems.iter().any(|p| p.message.ends_with("programs; at most 4096"))
    };
    assert_eq!((said(4096), said(4097)), (false, true));

    let ranked = |rank: usize| {
        let index = WireIndex {
            version: radpack::graph::wire::VERSION,
            kv: Vec::new(),
            weights: Vec::new(),
            types: vec![ValueType { dtype: DType::F32, shape: Shape::new(vec![1; rank]) }],
            programs: Vec::new(),
        };
        index.programs(Vec::new())
    };
    assert!(ranked(8).is_ok());
    let what = "a type of the index has 9 dimensions; 8 are the most".to_owned();
    assert_eq!(ranked(9), Err(WireError::Repeats(what)));
}

#[test]
fn gguf_headers_keep_texts_and_lists_of_a_length_and_tell_twenty_faults() {
    let kept = |value: Value| {
        let mut file = File::default();
        file.pair("general.architecture", Value::Text("llama".into()));
        file.pair("x", value);
        let header = read_header(&file.bytes()).expect("a header");
        header.pairs["x"].clone()
    };
    assert_eq!(kept(Value::U32s(vec![1; 8192])), Kept::Integers(vec![1; 8192]));
    assert_eq!(kept(Value::U32s(vec![1; 8193])), Kept::Skipped(8193));
    let most = 16 << 20;
    assert_eq!(kept(Value::Text("x".repeat(most))), Kept::Text("x".repeat(most)));
    assert_eq!(kept(Value::Text("x".repeat(most + 1))), Kept::Skipped(most as u64 + 1));

    let faults = |n: usize| {
        let tensor = |n: usize| testkit::gguf::Tensor {
            name: n.to_string(),
            kind: 999,
            shape: vec![1],
            bytes: vec![0; 4],
        };
        let file = File { tensors: (0..n).map(tensor).collect(), ..File::default() };
        let faults = read_header(&file.bytes()).expect_err("types that there are not");
        faults.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let told = faults(20);
    assert_eq!(told.len(), 20, "{}", told.join("\n"));
    let told = faults(21);
    assert_eq!(told.len(), 21);
    assert!(told[20].contains('1') && !told[20].contains("999"), "{}", told[20]);
}

#[test]
fn indexes_of_shards_and_tokenizers_have_a_size() {
    let tmp = llama();
    let model = tmp.path().join("model");
    let (index, most) = (model.join("model.safetensors.index.json"), 100_000_000);
    let weights = model.join("model.safetensors");
    let aside = tmp.path().join("weights");
    if weights.exists() {
        fs::rename(&weights, &aside).expect("moves");
    }
    let kept = fs::read(&index).ok();
    hole(&index, most);
    let ran = planned(tmp.path(), &[]);
    assert!(ran.code == 3 && !ran.stderr.contains("more than the"), "{}", ran.stderr);
    hole(&index, most + 1);
    let ran = planned(tmp.path(), &[]);
    assert!(ran.code == 3 && ran.stderr.contains("more than the"), "{}", ran.stderr);
    match kept {
        Some(bytes) => fs::write(&index, bytes).expect("writes"),
        None => fs::remove_file(&index).expect("removes"),
    }
    if aside.exists() {
        fs::rename(&aside, &weights).expect("moves");
    }

    let (tokenizer, most) = (model.join("tokenizer.json"), 64 << 20);
    hole(&tokenizer, most);
    let ran = planned(tmp.path(), &[]);
    assert!(
        ran.code == 3 && ran.stderr.contains("tokenizer.json: expected value"),
        "{}",
        ran.stderr
    );
    // A larger file is not carried along, so it is none.
    hole(&tokenizer, most + 1);
    let ran = planned(tmp.path(), &[]);
    let told = "left out: tokenizer.json, larger than the 64";
    assert!(ran.code == 3 && ran.stderr.contains(told), "{}", ran.stderr);
}

#[test]
fn importances_have_a_number_of_entries_a_nesting_and_a_size() {
    let why = |bytes: &[u8]| Importance::parse(bytes).expect_err("refused").to_string();
    let entries = |n: i32| why(&n.to_le_bytes());
    assert!(entries(1 << 20).contains("before what it announces"), "{}", entries(1 << 20));
    let more = entries((1 << 20) + 1);
    assert!(more.ends_with("1048577 entries, not 0 to 1,048,576"), "{more}");
    let header = |tensors: u64, keys: u64| {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(keys.to_le_bytes());
        bytes
    };
    let most = 1 << 20;
    for (tensors, keys) in [(most, 0), (0, most)] {
        let said = why(&header(tensors, keys));
        assert!(said.contains("before what it announces"), "{said}");
    }
    for (tensors, keys) in [(most + 1, 0), (0, most + 1)] {
        let said = why(&header(tensors, keys));
        assert!(said.contains("1,048,577 tensors or keys"), "{said}");
    }
    let nested = |levels: usize| {
        let mut bytes = header(0, 1);
        bytes.extend(1u64.to_le_bytes());
        bytes.push(b'k');
        bytes.extend(9u32.to_le_bytes());
        for level in 0..levels {
            let inner: u32 = if level + 1 == levels { 4 } else { 9 };
            bytes.extend(inner.to_le_bytes());
            bytes.extend(1u64.to_le_bytes());
        }
        bytes.extend(7u32.to_le_bytes());
        why(&bytes)
    };
    assert!(nested(4).ends_with("it names no weight"), "{}", nested(4));
    assert!(nested(5).contains("a value of type 9"), "{}", nested(5));

    // Told by its size: nothing of it is read.
    let tmp = llama();
    hole(&tmp.path().join("large.gguf"), (4 << 30) + 1);
    let ran = planned(tmp.path(), &["--imatrix", "large.gguf"]);
    assert_eq!(ran.code, 3, "{}", ran.stderr);
    assert!(ran.stderr.contains("larger than 4.00 GiB"), "{}", ran.stderr);
}

#[test]
fn recipes_have_bounds_of_blocks_and_codebooks() {
    let tmp = tempdir().expect("a folder");
    let path = tmp.path().join("r.toml");
    let said = |encoding: &str| {
        let text = format!(
            "schema = 1\nname = \"r\"\n[[quantize]]\nmatch = \"a\"\nencoding = {{ {encoding} }}\n"
        );
        fs::write(&path, text).expect("writes");
        let loaded = recipe::load(Some(path.to_str().expect("UTF-8")));
        loaded.err().map(|f| f.to_string()).unwrap_or_default()
    };
    let group = |n: u64| said(&format!("codes = \"i8\", group = {n}"));
    assert_eq!(group(1 << 31), "");
    assert!(group((1 << 31) + 1).contains("2147483648"), "{}", group((1 << 31) + 1));
    let block = |n: u64| said(&format!("codes = \"i8\", block = [{n}, 1]"));
    assert_eq!(block(1 << 31), "");
    assert!(block((1 << 31) + 1).contains("2147483648"), "{}", block((1 << 31) + 1));
    let table = |n: usize| {
        let values: Vec<String> = (0..n).map(|i| format!("{i}.5")).collect();
        said(&format!("table = [{}], group = 64", values.join(", ")))
    };
    let wrong = "values, not 2 to 4096";
    assert!(!table(4096).contains(wrong), "{:.400}", table(4096));
    assert!(table(4097).contains(&format!("4097 {wrong}")), "{:.400}", table(4097));
}

/// A BMP file of that many pixels of 24 bits, all black; with as many bytes of them as `there`.
fn bmp(width: u32, height: u32, there: usize) -> Vec<u8> {
    let mut out = b"BM".to_vec();
    out.extend((54 + there as u32).to_le_bytes());
    out.extend([0; 4]);
    out.extend(54u32.to_le_bytes());
    out.extend(40u32.to_le_bytes());
    out.extend(width.to_le_bytes());
    out.extend(height.to_le_bytes());
    out.extend([1, 0, 24, 0]);
    out.extend([0; 24]);
    out.resize(54 + there, 0);
    out
}

#[test]
fn pictures_have_a_side_a_number_of_pixels_and_a_size() {
    let row = |width: u32| {
        let mut png = std::io::Cursor::new(Vec::new());
        let black = image::RgbImage::new(width, 1);
        black.write_to(&mut png, image::ImageFormat::Png).expect("a PNG file");
        Picture::decode(png.get_ref()).map(|picture| picture.size())
    };
    assert_eq!(row(1 << 16).expect("a picture"), (1 << 16, 1));
    let failure = row((1 << 16) + 1).expect_err("wider").to_string();
    assert!(failure.contains("cannot be decoded"), "{failure}");
    // 3,277 × 54,610 are 178,956,970; what a header claims is not there.
    let claims = |height: u32| {
        let picture = Picture::decode(&bmp(3277, height, 16)).map(|p| p.size());
        picture.expect_err("its pixels are missing").to_string()
    };
    assert!(claims(54_610).contains("cannot be decoded"), "{}", claims(54_610));
    let more = claims(54_611);
    assert!(more.contains("178,960,247 pixels; at most 178,956,970 are read"), "{more}");

    let tmp = llama();
    succeeds(tmp.path(), &["convert", "model", "--recipe", "bf16", "-o", "t.rad"]);
    let run = |length: u64| {
        hole(&tmp.path().join("x.png"), length);
        let ran = radpack(tmp.path(), &["run", "t.rad", "--prompt", "x", "--image", "x.png"]);
        assert_eq!(ran.code, 3, "{}", ran.stderr);
        ran.stderr
    };
    let most = run(MAX_FILE);
    assert!(most.contains("cannot be decoded"), "{most}");
    let more = run(MAX_FILE + 1);
    assert!(more.contains("larger than 256.00 MiB"), "{more}");
}
