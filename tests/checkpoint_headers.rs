//! Safetensors headers: every way to be wrong, and agreement with the safetensors crate.

mod checkpoint_support;

use checkpoint_support::{Tensor, counting, file, header, raw};
use proptest::prelude::*;
use radpack::checkpoint::safetensors::{
    Fault, Header, MAX_HEADER_BYTES, dtype_from_name, dtype_name, read_header,
};
use radpack::tensor::{DType, Shape};
use safetensors::{Dtype, SafeTensors};

fn faults(bytes: &[u8]) -> Vec<String> {
    read_header(bytes).expect_err("a fault").iter().map(Fault::to_string).collect()
}

/// The only fault of a file.
fn fault(bytes: &[u8]) -> String {
    let all = faults(bytes);
    assert_eq!(all.len(), 1, "{all:?}");
    all[0].clone()
}

fn sound(bytes: &[u8]) -> Header {
    read_header(bytes).unwrap_or_else(|faults| panic!("{faults:?}"))
}

/// An entry `name: {dtype, shape, data_offsets}` as text.
fn entry(name: &str, dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
}

#[test]
fn every_dtype_of_the_format_is_read_under_the_name_that_the_crate_gives_it() {
    let names = [
        "BOOL",
        "F4",
        "F6_E2M3",
        "F6_E3M2",
        "U8",
        "I8",
        "F8_E5M2",
        "F8_E4M3",
        "F8_E8M0",
        "F8_E4M3FNUZ",
        "F8_E5M2FNUZ",
        "I16",
        "U16",
        "F16",
        "BF16",
        "I32",
        "U32",
        "F32",
        "C64",
        "F64",
        "I64",
        "U64",
    ];
    for name in names {
        let ours = dtype_from_name(name).expect("known");
        let theirs: Dtype = serde_json::from_value(name.into()).expect("known to the crate");
        assert_eq!(ours.bits() as usize, theirs.bitsize(), "{name}");
        assert_eq!(theirs.to_string(), name);
        assert_eq!(dtype_name(ours), Some(name));
        // Eight elements of any of them fill whole bytes.
        let bytes = u64::from(ours.bits());
        let bytes =
            raw(&format!("{{{}}}", entry("x", name, "[8]", 0, bytes)), &vec![0; bytes as usize]);
        assert_eq!(sound(&bytes).tensors["x"].info.dtype, ours);
        assert!(SafeTensors::deserialize(&bytes).is_ok(), "{name}");
    }
    assert_eq!(dtype_from_name("F32 "), None);
    assert_eq!(dtype_name(DType::U9), None);
}

#[test]
fn a_sound_file_gives_names_types_shapes_and_places() {
    let bytes = file(&[counting("b", &[2, 3], 0), counting("a", &[1], 9)]);
    let header = sound(&bytes);
    let start = header.data_start;
    let b = &header.tensors["b"];
    assert_eq!((b.info.dtype, &b.info.shape), (DType::F32, &Shape::from([2, 3])));
    assert_eq!((b.begin, b.end), (start, start + 24));
    assert_eq!(
        (header.tensors["a"].begin, header.tensors["a"].end),
        (start + 24, bytes.len() as u64)
    );
    assert_eq!(header.tensors.len(), 2);
}

#[test]
fn empty_tensors_and_scalars_are_legal_and_a_missing_element_is_not() {
    let text = format!("{{{},{}}}", entry("e", "F32", "[0]", 0, 0), entry("s", "BF16", "[]", 0, 2));
    let header = sound(&raw(&text, &[0; 2]));
    assert_eq!(header.tensors["e"].info.shape, Shape::from([0]));
    assert_eq!(header.tensors["s"].info.shape, Shape::from([]));
    let text = format!("{{{}}}", entry("x", "F32", "[1]", 0, 0));
    assert_eq!(
        fault(&raw(&text, &[])),
        "tensor `x`: [1] of F32 takes 4 bytes, data_offsets span 0"
    );
    assert!(sound(&raw("{}", &[])).tensors.is_empty());
}

#[test]
fn headers_of_odd_length_leave_tensors_unaligned_and_readable() {
    for pad in 0..9 {
        let text = header(&[counting("x", &[3], 7)]) + &" ".repeat(pad);
        let bytes = raw(&text, &counting("x", &[3], 7).bytes);
        let header = sound(&bytes);
        assert_eq!(header.data_start, 8 + text.len() as u64);
        let x = &header.tensors["x"];
        assert_eq!(&bytes[x.begin as usize..x.end as usize], counting("x", &[3], 7).bytes);
    }
}

#[test]
fn the_length_field_is_judged_before_anything_is_read() {
    assert_eq!(
        fault(b""),
        "truncated: 0 bytes, and a safetensors file starts with 8 bytes of header length"
    );
    assert_eq!(
        fault(b"1234567"),
        "truncated: 7 bytes, and a safetensors file starts with 8 bytes of header length"
    );
    let promise = |n: u64| n.to_le_bytes().to_vec();
    assert_eq!(
        fault(&promise(MAX_HEADER_BYTES + 1)),
        "the header length says 100,000,001 bytes and the format allows 100,000,000"
    );
    assert_eq!(
        fault(&promise(MAX_HEADER_BYTES)),
        "truncated: the header promises 100,000,008 bytes, the file has 8"
    );
    assert_eq!(
        fault(&promise(u64::MAX)),
        "the header length says 18,446,744,073,709,551,615 bytes and the format allows 100,000,000"
    );
}

#[test]
fn other_files_are_recognised_by_their_first_bytes() {
    for (start, what) in [
        (&b"PK\x03\x04\x14\0\0\0\0"[..], "a zip archive (PyTorch saves .bin and .pt files so)"),
        (b"GGUF\x03\0\0\0\xff", "a GGUF file"),
        (b"<!DOCTYPE html>", "an HTML page (a failed download)"),
    ] {
        let text = fault(start);
        assert!(text.ends_with(&format!("; the file begins like {what}")), "{text}");
    }
}

#[test]
fn truncated_and_trailing_bytes_are_told_with_both_lengths() {
    let whole = file(&[counting("x", &[100], 0)]);
    let n = whole.len();
    for cut in [1, 7, 399, 400] {
        assert_eq!(
            fault(&whole[..n - cut]),
            format!("truncated: the header promises {n} bytes, the file has {}", n - cut)
        );
    }
    assert_eq!(
        fault(&whole[..20]),
        format!("truncated: the header promises {} bytes, the file has 20", n - 400)
    );
    let mut longer = whole.clone();
    longer.extend([0; 3]);
    assert_eq!(
        fault(&longer),
        format!("3 trailing bytes: the header describes {n} bytes, the file has {}", n + 3)
    );
    assert_eq!(fault(&raw("{}", &[0; 5])), "5 bytes belong to no tensor");
}

#[test]
fn duplicate_names_are_called_so() {
    let text = format!("{{{},{}}}", entry("w", "U8", "[2]", 0, 2), entry("w", "U8", "[2]", 2, 4));
    assert_eq!(fault(&raw(&text, &[0; 4])), "duplicate tensor name `w`");
    let text = r#"{"w":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}"#;
    assert_eq!(fault(&raw(text, &[0])), "tensor `w`: key `shape` given twice");
    let text = r#"{"__metadata__":{"a":"1","a":"2"}}"#;
    assert_eq!(fault(&raw(text, &[])), "__metadata__: key `a` given twice");
    let text = r#"{"__metadata__":{},"__metadata__":{}}"#;
    assert_eq!(fault(&raw(text, &[])), "duplicate tensor name `__metadata__`");
}

#[test]
fn an_entry_has_exactly_three_keys() {
    let text = r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"strides":[[1]]}}"#;
    assert_eq!(
        fault(&raw(text, &[0])),
        "tensor `w`: key `strides` is not part of the format (dtype, shape, data_offsets)"
    );
    let text = r#"{"w":{"shape":[1]}}"#;
    assert_eq!(faults(&raw(text, &[0])), ["tensor `w`: no dtype", "tensor `w`: no data_offsets"]);
}

#[test]
fn types_shapes_and_offsets_must_agree() {
    let one = |dtype: &str, shape: &str, begin: u64, end: u64, data: usize| {
        fault(&raw(&format!("{{{}}}", entry("w", dtype, shape, begin, end)), &vec![0; data]))
    };
    assert_eq!(one("F7", "[1]", 0, 1, 1), "tensor `w`: unknown dtype `F7`");
    assert_eq!(
        one("U8", "[1]", 1, 0, 1),
        "tensor `w`: data_offsets end at 0 before they begin at 1"
    );
    assert_eq!(
        one("F16", "[3]", 0, 5, 5),
        "tensor `w`: [3] of F16 takes 6 bytes, data_offsets span 5"
    );
    assert_eq!(
        one("F64", "[2305843009213693952]", 0, 0, 0),
        "tensor `w`: [2305843009213693952] elements of F64 exceed 64 bits of size"
    );
    assert_eq!(
        one("U8", "[4294967296,4294967296]", 0, 0, 0),
        "tensor `w`: [4294967296, 4294967296] elements of U8 exceed 64 bits of size"
    );
    assert_eq!(
        one("F4", "[3]", 0, 1, 1),
        "tensor `w`: [3] elements of F4 (4 bits each) do not fill whole bytes"
    );
    assert_eq!(
        one("F6_E2M3", "[2]", 0, 2, 2),
        "tensor `w`: [2] elements of F6_E2M3 (6 bits each) do not fill whole bytes"
    );
    // The end of the offsets lies at the end of 64 bits: no wrap-around.
    let text = format!("{{{}}}", entry("w", "U8", "[1]", u64::MAX - 1, u64::MAX));
    assert_eq!(
        faults(&raw(&text, &[0])),
        [
            "18,446,744,073,709,551,614 bytes before tensor `w` belong to no tensor",
            "truncated: the header promises 18,446,744,073,709,551,615 bytes, the file has 100"
        ]
    );
}

#[test]
fn sub_byte_tensors_of_whole_bytes_are_sound() {
    let text =
        format!("{{{},{}}}", entry("a", "F4", "[3,2]", 0, 3), entry("b", "F6_E3M2", "[4]", 3, 6));
    assert_eq!(sound(&raw(&text, &[0; 6])).tensors["b"].end, 8 + text.len() as u64 + 6);
}

#[test]
fn tensors_must_cover_the_bytes_once_and_wholly() {
    let two = |a: (u64, u64), b: (u64, u64), data: usize| {
        let entry = |name: &str, (begin, end): (u64, u64)| {
            entry(name, "U8", &format!("[{}]", end - begin), begin, end)
        };
        faults(&raw(&format!("{{{},{}}}", entry("a", a), entry("b", b)), &vec![0; data]))
    };
    assert_eq!(two((0, 4), (2, 6), 6), ["tensors `a` and `b` overlap in 2 bytes"]);
    assert_eq!(two((0, 6), (1, 3), 6), ["tensors `a` and `b` overlap in 2 bytes"]);
    assert_eq!(two((0, 4), (6, 8), 8), ["2 bytes before tensor `b` belong to no tensor"]);
    assert_eq!(two((1, 4), (4, 8), 8), ["1 bytes before tensor `a` belong to no tensor"]);
    assert_eq!(
        two((0, 4), (6, 8), 7),
        [
            "2 bytes before tensor `b` belong to no tensor",
            "truncated: the header promises 121 bytes, the file has 120"
        ]
    );
}

#[test]
fn all_faulty_tensors_are_listed_up_to_a_limit() {
    let entries: Vec<String> =
        (0..30).map(|i| entry(&format!("t{i:02}"), "X", "[1]", 0, 1)).collect();
    let all = faults(&raw(&format!("{{{}}}", entries.join(",")), &[0]));
    assert_eq!(all.len(), 21);
    assert_eq!(all[0], "tensor `t00`: unknown dtype `X`");
    assert_eq!(all[20], "10 more faults in this header");
}

#[test]
fn text_that_is_no_such_header_is_located() {
    assert_eq!(
        fault(&raw("{\"a\": }", &[])),
        "the header is wrong at byte 14: tensor `a`: expected value"
    );
    assert_eq!(
        fault(&raw("[]", &[])),
        "the header is wrong at byte 8: invalid type: sequence, expected an object of tensors by name"
    );
    assert_eq!(fault(&raw("", &[])), "the header is wrong at byte 8: EOF while parsing a value");
    let text = r#"{"__metadata__":{"a":1}}"#;
    let message = fault(&raw(text, &[]));
    assert!(
        message.ends_with(
            "__metadata__ must map strings to strings: invalid type: integer `1`, expected a string"
        ),
        "{message}"
    );
    let text = r#"{"w":["U8",[1],[0,1]]}"#;
    let message = fault(&raw(text, &[0]));
    assert!(
        message.contains("tensor `w`: invalid type: sequence, expected an object with dtype, shape and data_offsets"),
        "{message}"
    );
    let mut not_utf8 = raw("{\"a\": 1}", &[]);
    not_utf8[10] = 0xff;
    assert_eq!(fault(&not_utf8), "the header is not UTF-8 at byte 10");
    let deep = format!(r#"{{"w":{{"x":{}1{}}}}}"#, "[".repeat(100_000), "]".repeat(100_000));
    assert!(faults(&raw(&deep, &[]))[0].contains("`x` is not part of the format"));
    let deep = format!(r#"{{"w":{{"shape":{}1{}}}}}"#, "[".repeat(100_000), "]".repeat(100_000));
    assert!(fault(&raw(&deep, &[])).contains("expected u64"));
}

#[test]
fn names_are_shown_without_control_characters() {
    let text = r#"{"a\u001b[31m\n":{"dtype":"X","shape":[],"data_offsets":[0,0]}}"#;
    assert_eq!(fault(&raw(text, &[])), r"tensor `a\u{1b}[31m\n`: unknown dtype `X`");
}

#[test]
fn metadata_strings_are_kept() {
    let header = sound(&raw(r#"{"__metadata__":{"format":"pt","x":"é"}}"#, &[]));
    assert_eq!(header.metadata["format"], "pt");
    assert_eq!(header.metadata["x"], "é");
}

#[test]
fn header_lengths_around_buffer_sizes_read_alike() {
    let tensors = [counting("a", &[5], 1), counting("b", &[2, 2], 50)];
    let data: Vec<u8> = tensors.iter().flat_map(|t| t.bytes.clone()).collect();
    let text = header(&tensors);
    for near in [4096usize, 65_536, 100_000] {
        for length in near - 12..near + 12 {
            let padded = format!("{text}{}", " ".repeat(length - text.len()));
            let bytes = raw(&padded, &data);
            let header = sound(&bytes);
            assert_eq!(header.data_start, 8 + length as u64);
            let b = &header.tensors["b"];
            assert_eq!(&bytes[b.begin as usize..b.end as usize], tensors[1].bytes, "{length}");
            assert_eq!(
                fault(&bytes[..bytes.len() - 1]),
                format!(
                    "truncated: the header promises {} bytes, the file has {}",
                    radpack::diag::count(bytes.len() as u64),
                    radpack::diag::count(bytes.len() as u64 - 1)
                )
            );
        }
    }
}

/// Our verdict on a file beside the crate's. They may differ only in what the module's table names.
fn verdicts_agree(bytes: &[u8]) -> Result<(), TestCaseError> {
    let theirs = SafeTensors::deserialize(bytes);
    match (read_header(bytes), theirs) {
        (Ok(ours), Ok(theirs)) => {
            prop_assert_eq!(ours.tensors.len(), theirs.len());
            for (name, view) in theirs.tensors() {
                let entry = &ours.tensors[&name];
                let shape: Vec<u64> = view.shape().iter().map(|&d| d as u64).collect();
                prop_assert_eq!(entry.info.shape.extents(), &shape[..]);
                prop_assert_eq!(
                    dtype_name(entry.info.dtype).map(str::to_owned),
                    Some(view.dtype().to_string())
                );
                prop_assert_eq!(&bytes[entry.begin as usize..entry.end as usize], view.data());
            }
        }
        (Ok(_), Err(e)) => prop_assert!(false, "the crate refuses what we accept: {}", e),
        (Err(faults), Ok(_)) => {
            let documented = faults.iter().all(|fault| match fault {
                Fault::DuplicateTensor { .. }
                | Fault::DuplicateMetadata { .. }
                | Fault::UnknownKey { .. } => true,
                Fault::NotJson { reason, .. } => {
                    reason.contains("invalid type: sequence, expected an object with")
                        || reason.contains("invalid type: map, expected a string")
                        || reason.contains(
                            "__metadata__ must map strings to strings: invalid type: null",
                        )
                }
                _ => false,
            });
            prop_assert!(documented, "we refuse what the crate accepts: {:?}", faults);
        }
        (Err(_), Err(_)) => {}
    }
    Ok(())
}

#[test]
fn the_documented_differences_from_the_crate_exist() {
    for (text, data) in [
        (
            r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
            1,
        ),
        (r#"{"w":["U8",[1],[0,1]]}"#, 1),
        (r#"{"w":{"dtype":{"U8":null},"shape":[1],"data_offsets":[0,1]}}"#, 1),
        (r#"{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"strides":[1]}}"#, 1),
        (r#"{"__metadata__":null}"#, 0),
    ] {
        let bytes = raw(text, &vec![0; data]);
        assert!(SafeTensors::deserialize(&bytes).is_ok(), "the crate accepts {text}");
        assert!(read_header(&bytes).is_err(), "we refuse {text}");
        verdicts_agree(&bytes).unwrap_or_else(|e| panic!("{e}"));
    }
}

fn dtype_and_width() -> impl Strategy<Value = (&'static str, u64)> {
    prop_oneof![
        Just(("U8", 8)),
        Just(("BF16", 16)),
        Just(("F32", 32)),
        Just(("F64", 64)),
        Just(("F4", 4)),
        Just(("F6_E2M3", 6)),
        Just(("BOOL", 8)),
        Just(("F8_E4M3", 8)),
    ]
}

/// Files of a few tensors, mostly sound, with the bits of damage that writers do.
fn nearly_sound() -> impl Strategy<Value = Vec<u8>> {
    let tensor = (dtype_and_width(), proptest::collection::vec(0u64..5, 0..4));
    let damage = (0usize..8, -2i64..3, -2i64..3, -2i64..3);
    (proptest::collection::vec(tensor, 0..6), damage, 0usize..10).prop_map(
        |(tensors, damage, pad)| {
            let (victim, shift_begin, shift_end, tail) = damage;
            let mut at = 0u64;
            let mut entries = Vec::new();
            for (i, ((dtype, bits), shape)) in tensors.iter().enumerate() {
                let end = at + shape.iter().product::<u64>() * bits / 8;
                let (mut b, mut e) = (at, end);
                if i == victim {
                    b = b.saturating_add_signed(shift_begin);
                    e = e.saturating_add_signed(shift_end);
                }
                let name = if i == 5 { "t0".to_owned() } else { format!("t{i}") };
                entries.push(entry(&name, dtype, &format!("{shape:?}"), b, e));
                at = end;
            }
            let length = if victim == 7 { at.saturating_add_signed(tail) } else { at };
            raw(&format!("{{{}}}{}", entries.join(","), " ".repeat(pad)), &vec![7; length as usize])
        },
    )
}

/// Bytes that mean something in JSON.
const SYNTAX: &[u8] = b"\"{}[]:,0123456789eE.-\\";

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nearly_sound_files_get_the_crates_verdict(bytes in nearly_sound()) {
        verdicts_agree(&bytes)?;
    }

    #[test]
    fn mutated_files_get_the_crates_verdict(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..4), 1..6),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let tensors = [
            counting("a", &[2, 2], 0),
            Tensor { name: "b".into(), dtype: "U8", shape: vec![3], bytes: vec![1, 2, 3] },
        ];
        let mut bytes = file(&tensors);
        for (at, value, kind) in changes {
            let at = at.index(bytes.len());
            match kind {
                0 => bytes[at] = value,
                1 => bytes[at] = SYNTAX[value as usize % SYNTAX.len()],
                2 => drop(bytes.remove(at)),
                _ => bytes.insert(at, value % 128),
            }
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len() + 1));
        }
        // Repair the length half of the time, so that damage to the text is seen too.
        if let Some(end) = bytes.iter().rposition(|b| *b == b'}')
            && bytes.len().is_multiple_of(2) && end >= 8
        {
            let length = (end + 1 - 8) as u64;
            bytes[..8].copy_from_slice(&length.to_le_bytes());
        }
        verdicts_agree(&bytes)?;
    }

    #[test]
    fn random_bytes_never_panic(
        length in 0u64..64,
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        verdicts_agree(&bytes)?;
        let mut with_length = length.to_le_bytes().to_vec();
        with_length.extend(bytes);
        verdicts_agree(&with_length)?;
    }
}
