//! Writing: goldens of another writer rebuilt byte for byte, any contents read back, nothing lost when killed.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use radpack::artifact::{
    Artifact, Contents, EntrySpec, Layout, MetaRef, MetaValue, ProfileShare, Step, Vocab, Writer,
    canonical_order, partial_path, same_file, verify,
};
use radpack::diag::FailureKind;
use radpack::tensor::{DType, Encoding, PlaneSpec, Shape, role};

fn golden(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "fixtures", "rad-container", name].iter().collect()
}

/// Writes contents with these planes, in reverse order and in small pieces.
fn write(out: &Path, contents: &Contents, plane: impl Fn(usize, usize) -> Vec<u8>) -> PathBuf {
    let layout = Layout::plan(contents).expect("plan");
    let writer = Writer::create(out, layout).expect("create");
    for e in (0..writer.layout().entries()).rev() {
        for (p, at) in writer.layout().planes(e).to_vec().iter().enumerate().rev() {
            let bytes = plane(e, p);
            assert_eq!(bytes.len() as u64, at.bytes);
            for (i, piece) in bytes.chunks(1000).enumerate().rev() {
                writer.write(e, p, i as u64 * 1000, piece).expect("write");
            }
            let back = writer.read_back(e, p, 0, bytes.len() as u64).expect("read back");
            assert_eq!(back, bytes);
        }
    }
    writer.finish().expect("finish")
}

#[test]
fn goldens_of_radiance_are_rebuilt_byte_for_byte() {
    let folder = tempfile::tempdir().expect("folder");
    for name in ["golden.rad", "golden_full.rad"] {
        let artifact = Artifact::open(&golden(name)).expect("open");
        let contents = artifact.contents().expect("contents");
        let out = folder.path().join(name);
        write(&out, &contents, |e, p| artifact.plane(e, p).expect("plane").to_vec());
        let (ours, theirs) =
            (std::fs::read(&out).expect("ours"), std::fs::read(golden(name)).expect("theirs"));
        assert_eq!(ours.len(), theirs.len(), "{name}");
        let differs = ours.iter().zip(&theirs).position(|(a, b)| a != b);
        assert_eq!(differs, None, "{name}");
        assert!(!partial_path(&out).exists());
    }
}

#[test]
fn a_golden_reads_as_its_writer_meant_it() {
    let a = Artifact::open(&golden("golden_full.rad")).expect("open");
    assert_eq!(a.arch_id().as_str(), Some("goldenmoe"));
    assert_eq!(a.quant().as_str(), Some("fp8_e4m3"));
    assert_eq!(a.recipe().as_str(), Some("*_exps.* rtn codes=i4 group=32 scale=f16\n"));
    assert_eq!((a.meta_int("n_layers"), a.meta_int("rope_theta")), (Some(2), None));
    assert_eq!((a.meta_float("rope_theta"), a.meta_float("n_expert")), (Some(10_000.0), Some(3.0)));
    assert_eq!(a.meta_text("utf8").and_then(|t| t.as_str()), Some("Ω"));
    assert!(matches!(a.metadata().nth(3), Some((_, MetaRef::Text(t))) if t.is_empty()));
    assert_eq!(a.len(), 21);
    let e = a.find("blk.1.ffn_down_exps.2.weight").expect("entry");
    assert_eq!((e.index(), e.layer(), e.expert(), e.slot()), (20, 1, 2, 1));
    assert_eq!((e.offset(), e.span(), e.plane_bytes()), (2_195_456, 1424, 1296));
    assert_eq!(e.encoding().to_string(), "i4*f16[1x32]");
    assert_eq!(e.options().as_str(), Some("codes=i4,group=32,scale=f16"));
    assert_eq!((e.plane(0).len(), e.plane(1).len(), e.plane(2).len()), (1152, 144, 0));
    let w3d = a.find("w3d.weight").expect("entry");
    assert_eq!(w3d.shape(), &Shape::from([2, 3, 50]));
    assert_eq!(w3d.encoding().to_string(), "u3*f16[1x20]-u8[1x20]");
    assert!(a.find("blk.1").is_none());
    assert_eq!(a.profile().count(), 3);
    let v = a.vocab_summary().expect("vocabulary");
    assert_eq!((v.kind, v.tokens, v.merges, v.steps), (1, 5, 1, 2));
    assert_eq!(v.specials, [-1, 4, -1, -1, 0, -1]);
    let v = a.vocab().expect("vocabulary");
    assert_eq!(
        (v.tokens[4].as_slice(), v.chat_template.as_slice()),
        (&b"<eos>"[..], &b"{{ messages }}"[..])
    );
}

fn one_entry() -> Contents {
    Contents { entries: vec![EntrySpec::opaque("w", 10)], ..Contents::default() }
}

#[test]
fn an_unfinished_writer_leaves_an_older_output_as_it_was() {
    let folder = tempfile::tempdir().expect("folder");
    let out = folder.path().join("a.rad");
    std::fs::write(&out, "older").expect("older");
    let writer = Writer::create(&out, Layout::plan(&one_entry()).expect("plan")).expect("create");
    writer.write(0, 0, 0, &[1; 10]).expect("write");
    assert!(partial_path(&out).exists());
    assert!(Artifact::open(&partial_path(&out)).is_err(), "a partial file is no container");
    drop(writer);
    assert!(!partial_path(&out).exists());
    assert_eq!(std::fs::read(&out).expect("older"), b"older");

    // Incomplete planes are named, and the older file stays.
    let writer = Writer::create(&out, Layout::plan(&one_entry()).expect("plan")).expect("create");
    writer.write(0, 0, 3, &[1; 5]).expect("write");
    let failure = writer.finish().expect_err("incomplete");
    assert_eq!(failure.problems[0].message, "`w` plane 0: 5 of 10 bytes were written");
    assert_eq!(std::fs::read(&out).expect("older"), b"older");
    assert_eq!(std::fs::read_dir(folder.path()).expect("folder").count(), 1);

    // A finished one replaces it.
    write(&out, &one_entry(), |_, _| vec![3; 10]);
    assert_eq!(Artifact::open(&out).expect("open").plane(0, 0), Some(&[3u8; 10][..]));
}

#[test]
fn two_writers_of_one_output_exclude_each_other_and_a_stale_partial_is_replaced() {
    let folder = tempfile::tempdir().expect("folder");
    let out = folder.path().join("a.rad");
    std::fs::write(partial_path(&out), vec![9; 3 << 20]).expect("stale");
    let plan = || Layout::plan(&one_entry()).expect("plan");
    let first = Writer::create(&out, plan()).expect("create");
    let failure = Writer::create(&out, plan()).expect_err("locked");
    assert!(
        failure.headline.contains("is being written by another running conversion"),
        "{failure}"
    );
    assert!(partial_path(&out).exists(), "the refused writer leaves the other's file alone");
    first.write(0, 0, 0, &[1; 10]).expect("write");
    first.finish().expect("finish");
    let bytes = std::fs::read(&out).expect("file");
    assert_eq!(bytes.len(), (2 << 20) + 10, "nothing of the stale file is left");
    assert!(bytes[2000..2 << 20].iter().all(|&b| b == 0));
    Writer::create(&out, plan()).expect("free again");
}

/// Not a test of its own: the child that the next test kills in the middle of its work.
#[test]
fn child_that_writes_until_it_is_killed() {
    let Some(out) = std::env::var_os("RADPACK_TEST_KILLED_WRITER") else { return };
    let writer =
        Writer::create(Path::new(&out), Layout::plan(&one_entry()).expect("plan")).expect("create");
    writer.write(0, 0, 0, &[1; 10]).expect("write");
    std::thread::sleep(std::time::Duration::from_secs(600));
}

#[test]
fn a_killed_writer_leaves_an_older_output_and_a_partial_file_that_the_next_replaces() {
    let folder = tempfile::tempdir().expect("folder");
    let out = folder.path().join("a.rad");
    std::fs::write(&out, "older").expect("older");
    let mut child = std::process::Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "child_that_writes_until_it_is_killed"])
        .env("RADPACK_TEST_KILLED_WRITER", &out)
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("child");
    let written = || {
        let bytes = std::fs::read(partial_path(&out)).unwrap_or_default();
        bytes.get(2 << 20..) == Some(&[1; 10][..])
    };
    while !written() && child.try_wait().expect("child").is_none() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert!(Writer::create(&out, Layout::plan(&one_entry()).expect("plan")).is_err(), "locked");
    child.kill().expect("kill");
    child.wait().expect("killed");
    assert_eq!(std::fs::read(&out).expect("older"), b"older");
    assert!(Artifact::open(&partial_path(&out)).is_err(), "a partial file is no container");
    write(&out, &one_entry(), |_, _| vec![3; 10]);
    assert_eq!(Artifact::open(&out).expect("open").plane(0, 0), Some(&[3u8; 10][..]));
    assert!(!partial_path(&out).exists());
}

#[test]
fn a_file_larger_than_the_disk_is_refused_before_a_byte_is_written() {
    let folder = tempfile::tempdir().expect("folder");
    let out = folder.path().join("a.rad");
    // A pebibyte: no room, or more than the file system's files can have.
    let contents =
        Contents { entries: vec![EntrySpec::opaque("w", 1 << 50)], ..Contents::default() };
    match Writer::create(&out, Layout::plan(&contents).expect("plan")) {
        Err(failure) => assert_eq!(failure.kind, FailureKind::Failed, "{failure}"),
        // A file system that cannot reserve makes a sparse file; then writing finds out.
        Ok(writer) => drop(writer),
    }
    assert_eq!(std::fs::read_dir(folder.path()).expect("folder").count(), 0);
}

#[test]
fn misuse_of_a_writer_is_an_error() {
    let folder = tempfile::tempdir().expect("folder");
    let out = folder.path().join("a.rad");
    let mut contents = one_entry();
    contents.metadata =
        vec![("late".into(), MetaValue::Later(4)), ("x".into(), MetaValue::Text("----".into()))];
    let layout = Layout::plan(&contents).expect("plan");
    let writer = Writer::create(&out, layout.clone()).expect("create");
    let said = |r: radpack::diag::Result<()>| r.expect_err("misuse").headline;
    assert_eq!(
        said(writer.write(0, 0, 8, &[0; 3])),
        "`w` plane 0: 3 bytes at 8 leave its 10 bytes"
    );
    assert_eq!(said(writer.write(0, 1, 0, &[0; 3])), "`w` plane 1: 3 bytes at 0 leave its 0 bytes");
    assert_eq!(
        said(writer.write(7, 0, 0, &[0])),
        "`no such entry` plane 0: 1 bytes at 0 leave its 0 bytes"
    );
    assert_eq!(
        said(writer.write(0, 0, u64::MAX, &[0])),
        format!("`w` plane 0: 1 bytes at {} leave its 10 bytes", u64::MAX)
    );
    writer.write(0, 0, 0, &[0; 6]).expect("write");
    assert_eq!(
        said(writer.write(0, 0, 5, &[0; 5])),
        "`w` plane 0: 5 bytes at 5 were written already"
    );
    writer.write(0, 0, 6, &[0; 4]).expect("write");
    assert_eq!(said(writer.set_text("late", "abc")), "metadata `late`: 3 bytes, 4 were planned");
    assert_eq!(
        said(writer.set_text("x", "abcd")),
        "metadata `x`: no text to come later was planned"
    );
    let failure = writer.finish().expect_err("incomplete");
    assert_eq!(failure.problems[0].message, "no text came for metadata late");

    let writer = Writer::create(&out, layout).expect("create");
    writer.write(0, 0, 0, &[0; 10]).expect("write");
    writer.set_text("late", "abcd").expect("set");
    writer.finish().expect("finish");
    let artifact = Artifact::open(&out).expect("open");
    assert_eq!(artifact.meta_text("late").and_then(|t| t.as_str()), Some("abcd"));
    assert_eq!(
        artifact.meta_text("x").and_then(|t| t.as_str()),
        Some("----"),
        "an equal text is not shared"
    );
    assert_eq!(verify(&artifact, Default::default()).faults, []);

    let failure = Writer::create(folder.path(), Layout::plan(&one_entry()).expect("plan"))
        .expect_err("folder");
    assert_eq!(failure.kind, FailureKind::Usage);
    let nowhere = folder.path().join("none/a.rad");
    assert!(Writer::create(&nowhere, Layout::plan(&one_entry()).expect("plan")).is_err());
}

#[test]
fn an_output_that_is_an_input_is_recognised_through_links() {
    let folder = tempfile::tempdir().expect("folder");
    let [a, b, link, hard] = ["a", "b", "link", "hard"].map(|n| folder.path().join(n));
    std::fs::write(&a, "a").expect("a");
    std::fs::write(&b, "b").expect("b");
    std::os::unix::fs::symlink(&a, &link).expect("link");
    std::fs::hard_link(&a, &hard).expect("hard link");
    let inputs = [b.as_path(), a.as_path()];
    assert_eq!(same_file(&a, inputs), Some(a.as_path()));
    assert_eq!(same_file(&link, inputs), Some(a.as_path()));
    assert_eq!(same_file(&hard, inputs), Some(a.as_path()));
    assert_eq!(same_file(&folder.path().join("new"), inputs), None);

    // Writing to a link replaces the file it leads to.
    write(&link, &one_entry(), |_, _| vec![5; 10]);
    assert!(link.symlink_metadata().expect("link").is_symlink());
    assert!(Artifact::open(&a).is_ok());
}

#[test]
fn a_partial_path_that_is_a_link_is_not_followed() {
    let folder = tempfile::tempdir().expect("folder");
    let (out, other) = (folder.path().join("a.rad"), folder.path().join("precious"));
    std::fs::write(&other, "precious").expect("file");
    std::os::unix::fs::symlink(&other, partial_path(&out)).expect("link");
    assert!(Writer::create(&out, Layout::plan(&one_entry()).expect("plan")).is_err());
    assert_eq!(std::fs::read(&other).expect("file"), b"precious");
}

fn any_encoding() -> impl Strategy<Value = Encoding> {
    let i8 =
        |g| Encoding::affine(DType::I8, vec![PlaneSpec::tiled(role::SCALE, DType::BF16, [1, g])]);
    let nvfp4 = Encoding::affine(
        DType::F4E2M1,
        vec![
            PlaneSpec::tiled(role::SCALE, DType::F8E4M3, [1, 16]),
            PlaneSpec::tiled(role::SCALE_1, DType::F32, [0, 0]),
        ],
    );
    let nf4 = Encoding::affine(
        DType::U4,
        vec![
            PlaneSpec::tiled(role::SCALE, DType::F16, [1, 64]),
            PlaneSpec::table(role::TABLE, DType::F32, [1, 16]),
        ],
    );
    prop_oneof![
        Just(Encoding::plain(DType::BF16)),
        Just(Encoding::plain(DType::U3)),
        Just(i8(128)),
        Just(i8(0)),
        Just(nvfp4),
        Just(nf4)
    ]
}

fn any_entries() -> impl Strategy<Value = Vec<EntrySpec>> {
    let weight =
        (any_encoding(), prop::collection::vec(1u64..40, 1..4), -1i32..3, "[a-z.Ω]{1,9}", 0i32..2);
    let weights = prop::collection::btree_map("[a-z]{1,6}", weight, 0..8);
    let experts = (any_encoding(), 0i32..5, 1i32..4, prop::collection::vec(1u64..30, 1..3));
    (weights, experts).prop_map(|(weights, (encoding, experts, slots, dims))| {
        let mut entries: Vec<EntrySpec> = weights
            .into_iter()
            .map(|(name, (encoding, dims, layer, options, slot))| EntrySpec {
                quantizer: if options.len() > 4 { "rtn".into() } else { String::new() },
                options,
                encoding,
                shape: Shape::new(dims),
                layer,
                slot,
                ..EntrySpec::opaque(name, 1)
            })
            .collect();
        for (expert, slot) in (0..experts).flat_map(|e| (0..slots).map(move |s| (e, s))) {
            entries.push(EntrySpec {
                encoding: encoding.clone(),
                shape: Shape::new(dims.clone()),
                layer: 1,
                expert,
                slot,
                ..EntrySpec::opaque(format!("exps.{slot}.{expert}"), 1)
            });
        }
        canonical_order(&mut entries);
        entries
    })
}

fn any_contents() -> impl Strategy<Value = Contents> {
    let text = "[a-z Ω]{0,12}";
    let value = prop_oneof![
        any::<i64>().prop_map(MetaValue::Int),
        (-1e9f64..1e9).prop_map(MetaValue::Float),
        text.prop_map(MetaValue::Text)
    ];
    let metadata = prop::collection::btree_map("[a-z_.]{1,8}", value, 0..8);
    let vocab = prop::option::of((1usize..6, any::<bool>(), text)).prop_map(|v| {
        v.map(|(n, flag, template)| Vocab {
            kind: 1,
            tokens: (0..n).map(|i| vec![b'a' + i as u8; i + 1]).collect(),
            scores: if flag { vec![0.5; n] } else { vec![] },
            types: if flag { vec![] } else { vec![1; n] },
            merges: vec![[0, n as u32 - 1]],
            steps: vec![Step { kind: 7, flags: 1, arg0: b"x".to_vec(), arg1: vec![], number: -2 }],
            specials: [0, -1, -1, -1, -1, n as i32 - 1],
            add_bos: flag,
            add_eos: !flag,
            chat_template: template.into_bytes(),
        })
    });
    (any_entries(), metadata, vocab, text, text).prop_map(|(entries, metadata, vocab, a, b)| {
        let experts = entries.iter().filter(|e| e.expert >= 0 && e.slot == 0);
        let profile = experts
            .map(|e| ProfileShare { layer: e.layer, expert: e.expert, share: 0.25 })
            .collect();
        Contents {
            data: Vec::new(),
            arch_id: a.clone(),
            model_name: b.clone(),
            quant: String::new(),
            recipe: format!("{a}{b}"),
            created_by: "test".into(),
            metadata: metadata.into_iter().collect(),
            entries,
            vocab,
            profile,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn whatever_is_planned_is_written_reads_back_and_is_clean(contents in any_contents()) {
        let folder = tempfile::tempdir().expect("folder");
        let out = folder.path().join("a.rad");
        let layout = Layout::plan(&contents).expect("plan");
        let byte = |e: usize, p: usize, i: u64| (e as u64 * 31 + p as u64 * 7 + i) as u8;
        let plane = |e: usize, p: usize| -> Vec<u8> {
            (0..layout.plane(e, p).expect("plane").bytes).map(|i| byte(e, p, i)).collect()
        };
        write(&out, &contents, plane);
        let artifact = Artifact::open(&out).expect("open");
        prop_assert_eq!(artifact.file_bytes(), layout.file_bytes());
        prop_assert_eq!(artifact.contents(), Some(contents));
        for entry in artifact.entries() {
            prop_assert_eq!(entry.planes().collect::<Vec<_>>(), layout.planes(entry.index()));
            for (p, _) in entry.planes().enumerate() {
                prop_assert_eq!(entry.plane(p), plane(entry.index(), p));
            }
            let name = entry.name().as_str().expect("UTF-8").to_owned();
            prop_assert_eq!(artifact.find(&name).map(|e| e.index()), Some(entry.index()));
        }
        prop_assert_eq!(verify(&artifact, Default::default()).faults, vec![]);
    }
}
