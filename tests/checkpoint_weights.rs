//! Weights by rows, side files and digests.

mod checkpoint_support;

use std::borrow::Cow;
use std::fs;
use std::io::{self, Seek, SeekFrom, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use checkpoint_support::{Model, SHARDS, Tensor, counting, file, open};
use proptest::prelude::*;
use radpack::checkpoint::{Checkpoint, MAX_SIDE_FILE_BYTES};
use radpack::diag::FailureKind;
use radpack::model::{Class, Origin, Part, Tower, Weight};
use radpack::tensor::{DType, Shape};
use safetensors::tensor::{TensorView, serialize};

fn weight(shape: &[u64], parts: &[(&str, Option<u64>)]) -> Weight {
    Weight {
        name: "blk.0.w".into(),
        origin: Origin::Main,
        tower: Tower::Text,
        class: Class::Linear,
        layer: 0,
        expert: -1,
        slot: 0,
        dtype: DType::F32,
        shape: Shape::from(shape),
        parts: parts.iter().map(|(t, i)| Part { tensor: (*t).into(), index: *i }).collect(),
        tied_to: None,
        fused_set: None,
        may_be_infinite: false,
        stored: None,
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four"))).collect()
}

fn rows(checkpoint: &Checkpoint, weight: &Weight, range: std::ops::Range<u64>) -> Vec<f32> {
    floats(&checkpoint.source(weight).expect("fits").rows(range).expect("read"))
}

fn wrong(checkpoint: &Checkpoint, weight: &Weight) -> String {
    let error = checkpoint.source(weight).err().expect("a misfit");
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    error.to_string()
}

/// `a` [2, 3] from 0, `b` [4] from 100, `c` [3] from 200; `e` [3, 2, 2] experts from 300, `s` a scalar 7.
fn model() -> Model {
    let model = Model::sharded();
    let scalar = Tensor {
        name: "s".into(),
        dtype: "F32",
        shape: vec![],
        bytes: 7f32.to_le_bytes().to_vec(),
    };
    let short = Tensor { name: "h".into(), dtype: "BF16", shape: vec![2], bytes: vec![0; 4] };
    let packed = Tensor { name: "p".into(), dtype: "F4", shape: vec![2, 2], bytes: vec![0; 2] };
    model.put(
        SHARDS[1],
        &file(&[
            counting("c", &[3], 200),
            counting("e", &[3, 2, 2], 300),
            scalar,
            counting("d", &[1, 3], 400),
            short,
            packed,
        ]),
    );
    model.index(&[
        ("a", SHARDS[0]),
        ("b", SHARDS[0]),
        ("c", SHARDS[1]),
        ("d", SHARDS[1]),
        ("e", SHARDS[1]),
        ("h", SHARDS[1]),
        ("p", SHARDS[1]),
        ("s", SHARDS[1]),
    ]);
    model
}

#[test]
fn a_whole_tensor_is_borrowed_from_the_map() {
    let model = model();
    let checkpoint = model.opened();
    let a = weight(&[2, 3], &[("a", None)]);
    let source = checkpoint.source(&a).expect("fits");
    assert_eq!((source.dtype(), source.shape()), (DType::F32, &Shape::from([2, 3])));
    assert!(matches!(source.rows(0..2).expect("read"), Cow::Borrowed(_)));
    assert_eq!(floats(&source.rows(0..2).expect("read")), [0., 1., 2., 3., 4., 5.]);
    assert_eq!(floats(&source.rows(1..2).expect("read")), [3., 4., 5.]);
    assert_eq!(floats(&source.rows(2..2).expect("read")), [0f32; 0]);
    let past = source.rows(1..3).expect_err("past the end");
    assert_eq!(
        (past.kind(), past.to_string().as_str()),
        (io::ErrorKind::InvalidInput, "rows 1..3 of a weight with 2 rows")
    );
    #[allow(clippy::reversed_empty_ranges)] // that is the point
    let reversed = source.rows(2..1);
    assert_eq!(reversed.expect_err("reversed").kind(), io::ErrorKind::InvalidInput);
}

#[test]
fn one_index_of_a_stack_is_a_weight() {
    let model = model();
    let checkpoint = model.opened();
    let e1 = weight(&[2, 2], &[("e", Some(1))]);
    assert_eq!(rows(&checkpoint, &e1, 0..2), [304., 305., 306., 307.]);
    assert_eq!(rows(&checkpoint, &e1, 1..2), [306., 307.]);
    // Indices that follow one another in the file are one borrowed run.
    let all = weight(&[6, 2], &[("e", Some(0)), ("e", Some(1)), ("e", Some(2))]);
    let source = checkpoint.source(&all).expect("fits");
    assert!(matches!(source.rows(1..6).expect("read"), Cow::Borrowed(_)));
    let mixed = weight(&[4, 2], &[("e", Some(2)), ("e", Some(0))]);
    assert_eq!(rows(&checkpoint, &mixed, 1..3), [310., 311., 300., 301.]);
}

#[test]
fn parts_are_joined_along_rows_over_shards() {
    let model = model();
    let checkpoint = model.opened();
    let joined = weight(&[3, 3], &[("a", None), ("d", None)]);
    let source = checkpoint.source(&joined).expect("fits");
    assert!(matches!(source.rows(0..2).expect("read"), Cow::Borrowed(_)));
    assert!(matches!(source.rows(1..3).expect("read"), Cow::Owned(_)));
    assert_eq!(floats(&source.rows(1..3).expect("read")), [3., 4., 5., 400., 401., 402.]);
    assert_eq!(floats(&source.rows(2..3).expect("read")), [400., 401., 402.]);
    // Vectors join into one longer vector.
    let vector = weight(&[7], &[("b", None), ("c", None)]);
    assert_eq!(rows(&checkpoint, &vector, 0..1), [100., 101., 102., 103., 200., 201., 202.]);
}

#[test]
fn a_scalar_reads_as_one_element_and_a_single_part_may_change_its_shape() {
    let model = model();
    let checkpoint = model.opened();
    assert_eq!(rows(&checkpoint, &weight(&[1], &[("s", None)]), 0..1), [7.]);
    // A convolution of patches as a matrix.
    assert_eq!(rows(&checkpoint, &weight(&[3, 4], &[("e", None)]), 1..2), [304., 305., 306., 307.]);
}

#[test]
fn a_weight_that_does_not_fit_is_an_error_with_its_name() {
    let model = model();
    let checkpoint = model.opened();
    let check = |weight: Weight, text: &str| assert_eq!(wrong(&checkpoint, &weight), text);
    check(weight(&[1], &[("x", None)]), "blk.0.w: no tensor x in the checkpoint");
    check(weight(&[1], &[]), "blk.0.w: made of no checkpoint tensor");
    check(weight(&[2], &[("h", None)]), "blk.0.w: h is bf16, the weight f32");
    check(
        weight(&[2, 4], &[("a", None)]),
        "blk.0.w: its parts hold 24 bytes, shape [2, 4] of f32 takes 32",
    );
    check(
        weight(&[2, 2], &[("e", Some(3))]),
        "blk.0.w: e has 3 entries along dimension 0, no index 3",
    );
    check(weight(&[1], &[("s", Some(0))]), "blk.0.w: s is a scalar and has no index 0");
    check(
        weight(&[5, 2], &[("a", None), ("e", Some(0))]),
        "blk.0.w: part a has shape [2, 3], and rows of 2 are joined",
    );
    check(
        weight(&[u64::MAX, 2], &[("a", None)]),
        "blk.0.w: shape [18446744073709551615, 2] exceeds 64 bits",
    );
    let mut packed = weight(&[2, 2], &[("p", None)]);
    packed.dtype = DType::F4E2M1;
    check(packed, "blk.0.w: fp4_e2m1 elements are smaller than a byte and have no rows");
}

#[test]
fn released_rows_read_the_same_again() {
    let model = Model::new();
    let big = counting("big", &[1024, 256], 0);
    model.put("model.safetensors", &file(std::slice::from_ref(&big)));
    let checkpoint = model.opened();
    let w = weight(&[1024, 256], &[("big", None)]);
    let before = rows(&checkpoint, &w, 0..1024);
    checkpoint.release(&w, 0..1024);
    checkpoint.release(&w, 5..u64::MAX);
    checkpoint.release(&weight(&[1], &[("absent", None)]), 0..1);
    assert_eq!(rows(&checkpoint, &w, 0..1024), before);
    assert_eq!(floats(&big.bytes), before);
}

#[test]
fn tensors_at_odd_addresses_read_right() {
    let model = Model::new();
    let text = checkpoint_support::header(&[counting("x", &[3], 5)]);
    for pad in 0..4 {
        let text = format!("{text}{}", " ".repeat(pad));
        model.put(
            "model.safetensors",
            &checkpoint_support::raw(&text, &counting("x", &[3], 5).bytes),
        );
        assert_eq!(rows(&model.opened(), &weight(&[3], &[("x", None)]), 0..1), [5., 6., 7.]);
    }
}

#[test]
fn a_tensor_past_four_gibibytes_is_read_at_its_place() {
    // A sparse file: 5 GiB of zeros that take no disk, then one tensor with values.
    let model = Model::new();
    let hole = 5u64 << 30;
    let text = format!(
        r#"{{"hole":{{"dtype":"U8","shape":[{hole}],"data_offsets":[0,{hole}]}},"x":{{"dtype":"F32","shape":[2],"data_offsets":[{hole},{}]}}}}"#,
        hole + 8
    );
    let mut out = fs::File::create(model.at("model.safetensors")).expect("created");
    out.write_all(&checkpoint_support::raw(&text, &[])).expect("written");
    out.seek(SeekFrom::Current(hole as i64)).expect("sought");
    out.write_all(&counting("x", &[2], 41).bytes).expect("written");
    drop(out);
    let checkpoint = model.opened();
    assert_eq!(rows(&checkpoint, &weight(&[2], &[("x", None)]), 0..1), [41., 42.]);
    let mut whole = weight(&[5 << 20, 1024], &[("hole", None)]);
    whole.dtype = DType::U8;
    let source = checkpoint.source(&whole).expect("fits");
    assert_eq!(&*source.rows((5 << 20) - 1..5 << 20).expect("read"), &[0u8; 1024]);
}

#[test]
fn tensors_written_by_the_safetensors_crate_read_back() {
    let values: Vec<u8> = (0..48).collect();
    let view = |dtype, shape: &[usize], range: std::ops::Range<usize>| {
        TensorView::new(dtype, shape.to_vec(), &values[range]).expect("sound")
    };
    let tensors = [
        ("w", view(safetensors::Dtype::F32, &[2, 4], 0..32)),
        ("v", view(safetensors::Dtype::BF16, &[3], 32..38)),
        ("e", view(safetensors::Dtype::I64, &[0], 0..0)),
    ];
    let model = Model::new();
    model.put("model.safetensors", &serialize(tensors, None).expect("written"));
    let checkpoint = model.opened();
    let w = checkpoint.source(&weight(&[2, 4], &[("w", None)])).expect("fits");
    assert_eq!(&*w.rows(0..2).expect("read"), &values[0..32]);
    let mut v = weight(&[3], &[("v", None)]);
    v.dtype = DType::BF16;
    assert_eq!(&*checkpoint.source(&v).expect("fits").rows(0..1).expect("read"), &values[32..38]);
    let mut e = weight(&[0], &[("e", None)]);
    e.dtype = DType::I64;
    assert_eq!(checkpoint.source(&e).expect("fits").rows(0..1).expect("read").len(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_rows_of_any_join_equal_the_bytes_of_the_parts(
        parts in proptest::collection::vec((1u64..4, 0usize..2), 1..6),
        cols in 1u64..5,
        cut in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
    ) {
        let model = Model::new();
        let mut shards = [Vec::new(), Vec::new()];
        let mut whole = Vec::new();
        let mut names = Vec::new();
        for (i, (rows, shard)) in parts.iter().enumerate() {
            let tensor = counting(&format!("t{i}"), &[*rows, cols], 100 * i as u32);
            whole.extend(floats(&tensor.bytes));
            names.push(tensor.name.clone());
            shards[*shard].push(tensor);
        }
        model.put(SHARDS[0], &file(&shards[0]));
        model.put(SHARDS[1], &file(&shards[1]));
        let total: u64 = parts.iter().map(|(rows, _)| rows).sum();
        let refs: Vec<(&str, Option<u64>)> = names.iter().map(|n| (n.as_str(), None)).collect();
        let joined = weight(&[total, cols], &refs);
        let (a, b) = (cut.0.index(total as usize + 1), cut.1.index(total as usize + 1));
        let (start, end) = (a.min(b), a.max(b));
        let got = rows(&model.opened(), &joined, start as u64..end as u64);
        prop_assert_eq!(&got[..], &whole[start * cols as usize..end * cols as usize]);
    }
}

// ---- side files and digests ----

#[test]
fn side_files_are_taken_by_rule_in_byte_order() {
    let model = Model::sharded();
    for name in [
        "tokenizer.json",
        "LICENSE",
        "chat_template.jinja",
        "Zeta.txt",
        "additional_chat_templates/rag.jinja",
    ] {
        model.put(name, name.as_bytes());
    }
    for name in [
        ".gitattributes",
        "banner.png",
        "training_args.bin",
        "old.rad",
        "original/params.json",
        "pytorch_model.bin.index.json",
    ] {
        model.put(name, b"x");
    }
    model.put("hf_quant_config.json", b"{}");
    let checkpoint = model.opened();
    let side: Vec<&str> = checkpoint.side_files().iter().map(|f| f.path.as_str()).collect();
    assert_eq!(
        side,
        [
            "LICENSE",
            "Zeta.txt",
            "additional_chat_templates/rag.jinja",
            "chat_template.jinja",
            "config.json",
            "tokenizer.json"
        ]
    );
    let left: Vec<(&str, &str)> =
        checkpoint.left_out().iter().map(|l| (l.path.as_str(), l.reason)).collect();
    assert_eq!(
        left,
        [
            (".gitattributes", "hidden file"),
            ("banner.png", "picture or recording of the model's page"),
            (
                "hf_quant_config.json",
                "quantization of the source, which would contradict the artifact's"
            ),
            (SHARDS[0], "weights or an artifact"),
            (SHARDS[1], "weights or an artifact"),
            (
                "model.safetensors.index.json",
                "index of weight files, which the artifact does not have"
            ),
            ("old.rad", "weights or an artifact"),
            (
                "pytorch_model.bin.index.json",
                "index of weight files, which the artifact does not have"
            ),
            ("training_args.bin", "weights or an artifact"),
        ]
    );
    let tokenizer = &checkpoint.side_files()[5];
    assert_eq!(checkpoint.read_side_file(tokenizer).expect("read"), b"tokenizer.json");
    assert_eq!(tokenizer.bytes, 14);
    let files: Vec<&str> = checkpoint.files().iter().map(|f| f.path.as_str()).collect();
    assert_eq!(
        files,
        [
            "LICENSE",
            "Zeta.txt",
            "additional_chat_templates/rag.jinja",
            "chat_template.jinja",
            "config.json",
            SHARDS[0],
            SHARDS[1],
            "model.safetensors.index.json",
            "tokenizer.json",
        ]
    );
}

#[test]
fn a_large_side_file_is_left_out_with_a_note_and_a_pointer_is_a_problem() {
    let model = Model::small();
    let big = fs::File::create(model.at("corpus.txt")).expect("created");
    big.set_len(MAX_SIDE_FILE_BYTES + 1).expect("sized");
    assert_eq!(
        model.notes(),
        [
            "corpus.txt (64.00 MiB) does not go into the artifact: larger than the 64 MiB a side file may have"
        ]
    );
    model.put("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\nsize 33384568\n");
    assert_eq!(
        model.problems(),
        [
            "DIR/tokenizer.json is a Git LFS pointer, not the file itself; it promises 31.84 MiB (33,384,568 bytes)"
        ]
    );
}

#[test]
fn digests_are_those_of_the_files_and_equal_in_a_copied_folder() {
    let model = Model::sharded();
    model.put("abc.txt", b"abc");
    let checkpoint = model.opened();
    let told = Mutex::new(0u64);
    let digests = checkpoint
        .hash_files(&AtomicBool::new(false), &|n: u64| *told.lock().expect("lock") += n)
        .expect("hashed");
    // FIPS 180-2, appendix B.1.
    assert_eq!(digests[0].path, "abc.txt");
    assert_eq!(
        digests[0].hex(),
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    );
    let total: u64 = checkpoint.files().iter().map(|f| f.bytes).sum();
    assert_eq!(*told.lock().expect("lock"), total);

    let copy = Model::new();
    for entry in fs::read_dir(model.path()).expect("listed") {
        let entry = entry.expect("an entry");
        fs::copy(entry.path(), copy.at(&entry.file_name().to_string_lossy())).expect("copied");
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool");
    let again = pool
        .install(|| copy.opened().hash_files(&AtomicBool::new(false), &|_: u64| ()))
        .expect("hashed");
    assert_eq!(again, digests);
}

#[test]
fn hashing_stops_on_request_and_tells_changed_files_by_name() {
    let model = Model::sharded();
    let checkpoint = model.opened();
    let stopped = checkpoint.hash_files(&AtomicBool::new(true), &|_: u64| ()).expect_err("stopped");
    assert_eq!(
        (stopped.kind, stopped.headline.as_str()),
        (FailureKind::Failed, "stopped while hashing the source")
    );

    let cancel = AtomicBool::new(false);
    let midway = checkpoint.hash_files(&cancel, &|_: u64| cancel.store(true, Ordering::Relaxed));
    assert_eq!(midway.expect_err("stopped").headline, "stopped while hashing the source");

    model.put("config.json", b"{ }  ");
    model.remove(SHARDS[1]);
    let changed =
        checkpoint.hash_files(&AtomicBool::new(false), &|_: u64| ()).expect_err("changed");
    let messages: Vec<&str> = changed.problems.iter().map(|p| p.message.as_str()).collect();
    // A file of weights is hashed as it was opened: what is encoded is what has the digest.
    assert_eq!(
        messages,
        ["cannot hash config.json: its length changed: it had 2 bytes when it was opened"]
    );
    let changed = checkpoint.check_unchanged(&|_| true).expect_err("changed");
    let messages: Vec<&str> = changed.problems.iter().map(|p| p.message.as_str()).collect();
    assert_eq!(messages[0], "config.json had 2 bytes when it was opened, now 5");
    let gone = format!("{} cannot be examined any more: No such file", SHARDS[1]);
    assert!(messages[1].starts_with(&gone), "{messages:?}");
    assert_eq!(messages.len(), 2);
    let config = checkpoint.side_files()[0].clone();
    let changed = checkpoint.read_side_file(&config).expect_err("changed");
    assert!(
        changed.headline.ends_with("the file changed while it was read"),
        "{}",
        changed.headline
    );
}

#[test]
fn an_input_is_recognised_by_any_of_its_names() {
    let model = Model::sharded();
    let checkpoint = open(model.path()).expect("opened");
    fs::hard_link(model.at(SHARDS[0]), model.at("out.rad")).expect("linked");
    std::os::unix::fs::symlink("config.json", model.at("out2.rad")).expect("linked");
    assert_eq!(checkpoint.holds(&model.at(SHARDS[1])), Some(SHARDS[1]));
    assert_eq!(checkpoint.holds(&model.at("out.rad")), Some(SHARDS[0]));
    assert_eq!(checkpoint.holds(&model.at("out2.rad")), Some("config.json"));
    assert_eq!(checkpoint.holds(&model.at("other.rad")), None);
}
