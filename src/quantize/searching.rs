//! What the search for scales is worth, and what importances do to it.

use crate::num::Element;
use crate::recipe::{Grid, Method, NAMED, ScaleRule, SecondScale};
use crate::tensor::DType;

use super::{Encoder, ErrorSum, PlaneBuffers, Whole, peak};

const ROWS: usize = 24;
const COLS: usize = 512;

/// Weights as trained ones look: sums of uniform noise, rows of different size.
fn noise() -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..ROWS * COLS)
        .map(|i| {
            let normal: f32 = (0..12).map(|_| uniform()).sum();
            normal * 0.01 * (1.0 + (i / COLS % 5) as f32)
        })
        .collect()
}

/// The same, rounded to bf16.
fn smooth() -> Vec<u8> {
    let bf16 = Element::new(DType::BF16).expect("codec");
    noise().into_iter().flat_map(|v| (bf16.encode(v) as u16).to_le_bytes()).collect()
}

fn values(bytes: &[u8]) -> Vec<f32> {
    bytes
        .as_chunks::<2>()
        .0
        .iter()
        .map(|b| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16))
        .collect()
}

/// Planes of the whole weight and their error.
fn encode(grid: &Grid, bytes: &[u8], importance: Option<&[f32]>) -> (Vec<Vec<u8>>, ErrorSum) {
    encode_from(DType::BF16, grid, bytes, importance)
}

fn encode_from(
    source: DType,
    grid: &Grid,
    bytes: &[u8],
    importance: Option<&[f32]>,
) -> (Vec<Vec<u8>>, ErrorSum) {
    let method = Method::Grid(grid.clone());
    let whole =
        Encoder::needs_peak(&method).then(|| Whole { peak: peak(source, bytes).expect("finite") });
    let rows = bytes.len() / source.bytes().expect("whole bytes") as usize / COLS;
    let mut encoder =
        Encoder::new(&method, source, rows as u64, COLS as u64, whole).expect("legal");
    if let Some(importance) = importance {
        encoder = encoder.with_importance(importance).expect("legal");
    }
    let mut buffers = PlaneBuffers::new();
    let sum = encoder.encode(0, bytes, &mut buffers).expect("finite");
    let planes = (0..encoder.encoding().planes.len()).map(|p| buffers.plane(p).to_vec()).collect();
    (planes, sum)
}

fn searched(grid: &Grid) -> Grid {
    Grid { rule: ScaleRule::Search, ..grid.clone() }
}

/// Grids of integers: all named ones, other widths, asymmetric ones, two levels.
fn integer_grids() -> Vec<(String, Grid)> {
    let mut out: Vec<(String, Grid)> = NAMED
        .iter()
        .filter_map(|named| match named.method() {
            Method::Grid(grid) if !grid.codes.is_float() => Some((named.name.to_owned(), grid)),
            _ => None,
        })
        .collect();
    assert_eq!(out.len(), 6, "the named integer encodings");
    for codes in [DType::I2, DType::I3, DType::I5, DType::I6, DType::I7] {
        out.push((codes.to_string(), Grid::absmax(codes, [1, 64], DType::BF16)));
    }
    for codes in [DType::U3, DType::U4, DType::U8] {
        for block in [[1, 32], [1, 128], [1, 0]] {
            let grid = Grid { zero: Some(codes), ..Grid::absmax(codes, block, DType::BF16) };
            out.push((format!("{codes} with a zero point, blocks {block:?}"), grid));
        }
    }
    let second = Some(SecondScale { dtype: DType::F32, block: [0, 0] });
    let grid = Grid { scale2: second, ..Grid::absmax(DType::I4, [1, 32], DType::F8E4M3) };
    out.push(("i4 under two levels".into(), grid));
    out
}

#[test]
fn the_search_has_a_smaller_squared_error_than_rounding_for_every_integer_grid() {
    // bf16 as published, f32 as trained.
    let f32s = noise().into_iter().flat_map(f32::to_le_bytes).collect();
    for (source, bytes) in [(DType::BF16, smooth()), (DType::F32, f32s)] {
        for (name, grid) in integer_grids() {
            let rtn = encode_from(source, &grid, &bytes, None).1;
            let search = encode_from(source, &searched(&grid), &bytes, None).1;
            assert!(search.relative() < rtn.relative(), "{source} {name}");
        }
    }
}

#[test]
fn asymmetric_8_bit_codes_gain_some_percent() {
    let bytes: Vec<u8> = noise().into_iter().flat_map(f32::to_le_bytes).collect();
    let u8s = Some(DType::U8);
    let grid = Grid { zero: u8s, ..Grid::absmax(DType::U8, [1, 128], DType::BF16) };
    let squared = |grid: &Grid| encode_from(DType::F32, grid, &bytes, None).1.squared_error();
    let gain = squared(&searched(&grid)) / squared(&grid);
    assert!((0.85..0.97).contains(&gain), "{gain}");
}

#[test]
fn no_block_is_worse_for_the_search_than_for_rounding() {
    let bytes = smooth();
    for (name, grid) in integer_grids().into_iter().filter(|(_, g)| g.block[1] == 32) {
        // Second levels span the weight, so blocks are compared within one.
        if grid.scale2.is_some() {
            continue;
        }
        for row in bytes.chunks_exact(COLS * 2) {
            let error = |grid: &Grid| encode(grid, row, None).1.relative();
            assert!(error(&searched(&grid)) <= error(&grid), "{name}");
        }
    }
}

#[test]
fn floats_gain_from_the_search_too() {
    let bytes = smooth();
    let second = Some(SecondScale { dtype: DType::F32, block: [0, 0] });
    let nvfp4 = Grid { scale2: second, ..Grid::absmax(DType::F4E2M1, [1, 16], DType::F8E4M3) };
    let gain = encode(&searched(&nvfp4), &bytes, None).1.relative().expect("not zero")
        / encode(&nvfp4, &bytes, None).1.relative().expect("not zero");
    assert!((0.5..0.97).contains(&gain), "{gain}");
}

#[test]
fn the_second_level_of_a_search_comes_from_the_peak_so_fused_weights_share_it() {
    let second = Some(SecondScale { dtype: DType::F32, block: [0, 0] });
    let nvfp4 = Grid { scale2: second, ..Grid::absmax(DType::F4E2M1, [1, 16], DType::F8E4M3) };
    let whole = Some(Whole { peak: 3.0 });
    let scale_1 = |grid: &Grid| {
        let encoder =
            Encoder::new(&Method::Grid(grid.clone()), DType::BF16, 4, 64, whole).expect("legal");
        encoder.whole_planes().map(|(i, b)| (i, b.to_vec())).collect::<Vec<_>>()
    };
    assert!(Encoder::needs_peak(&Method::Grid(searched(&nvfp4))));
    assert_eq!(scale_1(&searched(&nvfp4)), scale_1(&nvfp4));
    assert_eq!(scale_1(&nvfp4).len(), 1);
}

#[test]
fn importances_lower_the_weighted_error_and_raise_the_plain_one() {
    let bytes = smooth();
    let v = values(&bytes);
    // A few columns matter much more than the rest.
    let importance: Vec<f32> = (0..COLS).map(|c| if c % 7 == 3 { 50.0 } else { 1.0 }).collect();
    for (name, grid) in [
        ("int4-g32", Grid::absmax(DType::I4, [1, 32], DType::BF16)),
        ("u4", Grid { zero: Some(DType::U4), ..Grid::absmax(DType::U4, [1, 32], DType::BF16) }),
    ] {
        let grid = searched(&grid);
        let errors = |importance: Option<&[f32]>| -> (f64, f64) {
            let (planes, sum) = encode(&grid, &bytes, importance);
            let decoder =
                super::Decoder::new(&grid.encoding(), ROWS as u64, COLS as u64).expect("decodes");
            let slices: Vec<_> = planes.iter().map(|p| super::PlaneSlice::whole(p)).collect();
            let mut decoded = vec![0.0; v.len()];
            decoder.decode(0..ROWS as u64, &slices, &mut decoded).expect("whole planes");
            let weighted = v
                .iter()
                .zip(&decoded)
                .enumerate()
                .map(|(i, (a, b))| {
                    let w: f32 = if i % COLS % 7 == 3 { 50.0 } else { 1.0 };
                    f64::from(w) * f64::from(a - b).powi(2)
                })
                .sum();
            (sum.relative().expect("not zero"), weighted)
        };
        let (plain, with) = (errors(None), errors(Some(&importance)));
        assert!(with.1 < 0.95 * plain.1, "{name}: {} {}", with.1, plain.1);
        assert!(with.0 > plain.0, "{name}");
        let alike = encode(&grid, &bytes, Some(&[2.0; COLS])).0;
        assert!(alike == encode(&grid, &bytes, None).0, "{name}: equal importances change nothing");
    }
}

#[test]
fn importances_that_cannot_be_used_are_refused() {
    let encoder = |rule, fwht| {
        let grid = Grid { rule, fwht, ..Grid::absmax(DType::I8, [1, 32], DType::BF16) };
        Encoder::new(&Method::Grid(grid), DType::BF16, 2, 64, None).expect("legal")
    };
    let why = |rule, fwht, importance: &[f32]| {
        encoder(rule, fwht).with_importance(importance).err().map(|e| e.to_string())
    };
    let search = ScaleRule::Search;
    assert_eq!(why(search, None, &[1.0; 64]), None);
    assert_eq!(why(search, None, &[1.0; 63]).as_deref(), Some("63 importances for 64 columns"));
    for bad in [[0.0; 64], [-1.0; 64], [f32::NAN; 64], [f32::INFINITY; 64]] {
        assert_eq!(
            why(search, None, &bad).as_deref(),
            Some("importances are numbers of at least 0, not all of them 0")
        );
    }
    assert!(why(ScaleRule::Absmax, None, &[1.0; 64]).expect("no search").contains("has none"));
    assert!(why(search, Some(32), &[1.0; 64]).expect("a rotation").contains("rotation"));
}
