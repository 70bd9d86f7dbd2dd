//! One hand-built bad file for every rule of the reader, with the exact words.

use std::path::PathBuf;

use radpack::artifact::Artifact;

/// A patch at an offset.
type Patch = (usize, Vec<u8>);

fn golden(name: &str) -> Vec<u8> {
    let path: PathBuf =
        [env!("CARGO_MANIFEST_DIR"), "fixtures", "rad-container", name].iter().collect();
    std::fs::read(path).expect("fixture")
}

fn refusal(base: &str, patches: &[Patch]) -> String {
    let mut file = golden(base);
    for (offset, bytes) in patches {
        file[*offset..offset + bytes.len()].copy_from_slice(bytes);
    }
    Artifact::from_bytes(&file).expect_err("refused").to_string()
}

fn w64(offset: usize, value: u64) -> Patch {
    (offset, value.to_le_bytes().to_vec())
}

fn w32(offset: usize, value: u32) -> Patch {
    (offset, value.to_le_bytes().to_vec())
}

fn name(offset: usize, text: &[u8]) -> Patch {
    let mut bytes = text.to_vec();
    bytes.resize(24, 0);
    (offset, bytes)
}

// Where golden.rad has its tables: metadata 600, directory 696, planes 1104, encodings 1200.
const META: usize = 600;
const DIR: usize = 696;
const PLANES: usize = 1104;
const ENC: usize = 1200;
/// The second encoding: i8 codes with a bf16 scale.
const ENC1: usize = ENC + 568;
/// Its plane slots.
const PLANE0: usize = ENC1 + 56;
const PLANE1: usize = PLANE0 + 64;
/// The vocabulary of golden_full.rad, its directory, and its first expert row.
const VOCAB: usize = 10032;
const FULL_DIR: usize = 1392;
const EXPERT0: usize = FULL_DIR + 136 * 9;

#[test]
fn every_rule_of_the_reader_has_a_file_that_breaks_it() {
    let cases: Vec<(&str, Vec<Patch>)> = vec![
        ("magic: 0x32444152 is not `RAD1`", vec![(3, b"2".to_vec())]),
        ("version: 3 is not 2, the one version that exists", vec![w32(4, 3)]),
        ("file_bytes: 2111749 exceeds the file's 2111748 bytes", vec![w64(8, 2_111_749)]),
        (
            "str_off: 345 × 1 bytes at 2111748 leave the file of 2111748 bytes",
            vec![w64(56, 2_111_748)],
        ),
        (
            "str_bytes: the string section of 0 bytes is empty or does not end in NUL",
            vec![w64(64, 0)],
        ),
        (
            "str_bytes: the string section of 344 bytes is empty or does not end in NUL",
            vec![w64(64, 344)],
        ),
        (
            "meta_off: 768614336404564651 × 24 bytes at 600 leave the file of 2111748 bytes",
            vec![w64(80, u64::MAX / 24 + 1)],
        ),
        ("dir_off: 15523 × 136 bytes at 696 leave the file of 2111748 bytes", vec![w64(96, 15523)]),
        (
            "plane_off: 131916 × 16 bytes at 1104 leave the file of 2111748 bytes",
            vec![w64(112, 131_916)],
        ),
        (
            "enc_off: 3 × 568 bytes at 18446744073709551615 leave the file of 2111748 bytes",
            vec![w64(120, u64::MAX)],
        ),
        (
            "vocab_off: 2108845 × 1 bytes at 2904 leave the file of 2111748 bytes",
            vec![w64(144, 2_108_845)],
        ),
        (
            "prof_off: 131804 × 16 bytes at 2904 leave the file of 2111748 bytes",
            vec![w64(160, 131_804)],
        ),
        (
            "data_off: 14597 × 1 bytes at 2097152 leave the file of 2111748 bytes",
            vec![w64(176, 14597)],
        ),
        ("data_off: 2097144 is not a multiple of 2097152", vec![w64(168, 2_097_144)]),
        ("arch_id: offset 345 is outside the string section of 345 bytes", vec![w64(16, 345)]),
        ("model_name: offset 345 is outside the string section of 345 bytes", vec![w64(24, 345)]),
        ("quant: offset 345 is outside the string section of 345 bytes", vec![w64(32, 345)]),
        ("recipe: offset 345 is outside the string section of 345 bytes", vec![w64(40, 345)]),
        ("created_by: offset 345 is outside the string section of 345 bytes", vec![w64(48, 345)]),
        (
            "metadata[1].key: offset 900 is outside the string section of 345 bytes",
            vec![w64(META + 24, 900)],
        ),
        (
            "metadata[3].value: offset 900 is outside the string section of 345 bytes",
            vec![w64(META + 88, 900)],
        ),
        ("encoding[1]: the 24-byte name does not end in NUL", vec![(ENC1 + 23, vec![1])]),
        ("encoding[1]: the 24-byte name does not end in NUL", vec![(ENC1 + 47, vec![1])]),
        ("encoding[1].n_planes: 0 planes, not 1 to 8", vec![w32(ENC1 + 48, 0)]),
        ("encoding[1].n_planes: -1 planes, not 1 to 8", vec![w32(ENC1 + 48, u32::MAX)]),
        (
            "encoding[1].plane[1].role: the 24-byte name does not end in NUL",
            vec![(PLANE1 + 23, vec![1])],
        ),
        (
            "encoding[1].plane[1].dtype: 7 is no element type of a container",
            vec![w32(PLANE1 + 24, 7)],
        ),
        ("encoding[1].plane[1].kind: 2 is not 0 (tiled) or 1 (table)", vec![w32(PLANE1 + 28, 2)]),
        ("encoding[1].plane[1].block: negative in [-1, 128]", vec![w64(PLANE1 + 32, u64::MAX)]),
        ("encoding[1].plane[1].extent: below 1 in [0, 0]", vec![w32(PLANE1 + 28, 1)]),
        ("encoding[1]: empty scheme", vec![name(ENC1, b"")]),
        ("encoding[1]: plane 1 has an empty role", vec![name(PLANE1, b"")]),
        ("encoding[1]: duplicate role `codes`", vec![name(PLANE1, b"codes")]),
        (
            "encoding[1]: plane 0 is not tiled `codes` with block rows 1 and columns ≥ 1",
            vec![w64(PLANE0 + 32, 2)],
        ),
        ("encoding[1]: `plain` is one bare plane of block 1 × 1", vec![name(ENC1, b"plain")]),
        ("encoding[0]: `affine` needs a second plane or a transform", vec![name(ENC, b"affine")]),
        (
            "encoding[1]: codes wider than one column need a `grid` table of that width",
            vec![w64(PLANE0 + 40, 2)],
        ),
        ("encoding[1]: no such tiled role in `affine`: `bias`", vec![name(PLANE1, b"bias")]),
        ("encoding[1]: `scale.2` without level 1", vec![name(PLANE1, b"scale.2")]),
        ("encoding[1]: `signs` is not u1 of block 1 × 1", vec![name(PLANE1, b"signs")]),
        ("encoding[1]: transform `fwht3`, or its tables", vec![name(ENC1 + 24, b"fwht3")]),
        ("encoding[1]: transform `perm`, or its tables", vec![name(ENC1 + 24, b"perm")]),
        (
            "entry[1].name: offset 345 is outside the string section of 345 bytes",
            vec![w64(DIR + 136, 345)],
        ),
        (
            "entry[1].quantizer: offset 345 is outside the string section of 345 bytes",
            vec![w64(DIR + 144, 345)],
        ),
        (
            "entry[1].options: offset 345 is outside the string section of 345 bytes",
            vec![w64(DIR + 152, 345)],
        ),
        ("entry[1].rank: 0 is not 1 to 6", vec![w32(DIR + 136 + 28, 0)]),
        ("entry[1].rank: 7 is not 1 to 6", vec![w32(DIR + 136 + 28, 7)]),
        ("entry[1].shape: extent -5 is below 1", vec![w64(DIR + 136 + 32, -5i64 as u64)]),
        (
            "entry[1].offset: 4160 bytes at 2109440 leave the file of 2111748 bytes",
            vec![w64(DIR + 136 + 104, 2_109_440)],
        ),
        (
            "entry[1].offset: 2101249 is not a multiple of 4096",
            vec![w64(DIR + 136 + 104, 2_101_249)],
        ),
        ("entry[1].enc: 3 of 3 encodings", vec![w32(DIR + 136 + 24, 3)]),
        ("entry[1].n_planes: 1, but its encoding has 2", vec![w32(DIR + 136 + 92, 1)]),
        (
            "entry[1].plane_first: 5 + 2 passes the 6 rows of the plane table",
            vec![w64(DIR + 136 + 96, 5)],
        ),
        (
            "entry[1].plane scale bytes: 65, but its shape and encoding give 64",
            vec![w64(PLANES + 2 * 16 + 8, 65)],
        ),
        (
            "entry[1].plane scale offset: 2105345 is not a multiple of 256",
            vec![w64(PLANES + 2 * 16, 2_105_345)],
        ),
        (
            "entry[1].plane scale offset: 64 bytes at 2105600 are not inside the entry's 4160 at 2101248",
            vec![w64(PLANES + 2 * 16, 2_105_600)],
        ),
    ];
    for (want, patches) in cases {
        assert_eq!(refusal("golden.rad", &patches), want);
    }
    let short =
        Artifact::from_bytes(&golden("golden.rad")[..247]).expect_err("refused").to_string();
    assert_eq!(short, "size: 247 bytes, a header takes 248");
}

#[test]
fn every_rule_on_vocabularies_and_experts_has_a_file_that_breaks_it() {
    let cases: Vec<(&str, Vec<Patch>)> = vec![
        ("vocab_bytes: 127 bytes, a vocabulary header takes 128", vec![w64(144, 127)]),
        ("vocab_off: 10033 is not a multiple of 8", vec![w64(136, 10033)]),
        (
            "vocab.text_off: 32 rows at 10160 leave the vocabulary section of 248 bytes at 10032",
            vec![w32(VOCAB + 4, 32)],
        ),
        ("vocab.text_off: 10161 is not a multiple of 8", vec![w64(VOCAB + 16, 10161)]),
        ("vocab.score_off: 10161 is not a multiple of 4", vec![w64(VOCAB + 24, 10161)]),
        (
            "vocab.text[2]: offset 1022 is outside the string section of 1022 bytes",
            vec![w64(VOCAB + 144, 1022)],
        ),
        ("vocab.merge[0]: merges tokens 1 and 5 of 5", vec![w32(VOCAB + 180, 5)]),
        (
            "vocab.step[1]: offset 1022 is outside the string section of 1022 bytes",
            vec![w64(VOCAB + 184 + 48, 1022)],
        ),
        (
            "vocab.chat_template: offset 1022 is outside the string section of 1022 bytes",
            vec![w64(VOCAB + 88, 1022)],
        ),
        (
            "layer 0 experts, entry[9]: expert 0 of layer 0 has 0 slots, not 1 to 8",
            vec![w32(EXPERT0 + 84, 1)],
        ),
        (
            "layer 0 experts, entry[15]: layer 0 goes on with something other than expert 3 with slots 0 to 1",
            vec![w32(EXPERT0 + 6 * 136 + 80, 0), w32(EXPERT0 + 7 * 136 + 80, 0)],
        ),
        (
            "layer 0 experts, entry[13]: offsets or sizes of expert 2 in layer 0 are not expert 0's plus 2 × 8192",
            vec![w64(EXPERT0 + 4 * 136 + 104, 2_162_688), w64(EXPERT0 + 4 * 136 + 112, 5520)],
        ),
    ];
    for (want, patches) in cases {
        assert_eq!(refusal("golden_full.rad", &patches), want);
    }
}

#[test]
fn what_readers_accept_is_accepted() {
    let accepted = |base: &str, patches: &[Patch], extra: usize| {
        let mut file = golden(base);
        for (offset, bytes) in patches {
            file[*offset..offset + bytes.len()].copy_from_slice(bytes);
        }
        file.resize(file.len() + extra, 7);
        Artifact::from_bytes(&file).map(|_| ())
    };
    assert_eq!(accepted("golden.rad", &[], 9), Ok(()), "trailing bytes");
    assert_eq!(accepted("golden.rad", &[w64(8, 0)], 0), Ok(()), "file_bytes below the size");
    assert_eq!(accepted("golden.rad", &[w64(8, 1 << 63)], 0), Ok(()), "signed file_bytes");
    assert_eq!(accepted("golden.rad", &[w64(184, 5)], 0), Ok(()), "reserved words");
    assert_eq!(accepted("golden.rad", &[w32(META + 8, 77)], 0), Ok(()), "unknown row types");
    assert_eq!(accepted("golden.rad", &[w32(META + 12, 77)], 0), Ok(()), "padding");
    assert_eq!(accepted("golden.rad", &[w64(DIR + 136, 3)], 0), Ok(()), "names inside a string");
    assert_eq!(accepted("golden.rad", &[name(ENC1, b"mine.v1")], 0), Ok(()), "own schemes");
    assert_eq!(accepted("golden.rad", &[name(ENC1 + 24, b"fwht2x")], 0), Ok(()), "lenient numbers");
    assert_eq!(accepted("golden_full.rad", &[w32(VOCAB, 99)], 0), Ok(()), "vocabulary kinds");
    let absent = [w64(VOCAB + 40, 0)];
    assert_eq!(accepted("golden_full.rad", &absent, 0), Ok(()), "absent arrays");
}
