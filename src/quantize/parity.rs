//! Every kernel against the reference, and what all of them promise, on inputs chosen to break them.

use proptest::prelude::*;

use crate::num::{Element, NonFinite};
use crate::recipe::{Clamp, Codebook, Grid, Method, ScaleRule, SecondScale};
use crate::tensor::{DType, PlaneLayout, role};

use super::{
    Decoder, EncodeError, Encoder, ErrorSum, Kernel, MethodError, PlaneBuffers, PlaneSlice, Whole,
    peak,
};

fn grid(codes: DType, block: [u64; 2], scale: DType) -> Grid {
    Grid::absmax(codes, block, scale)
}

fn nvfp4() -> Grid {
    let mut g = grid(DType::F4E2M1, [1, 16], DType::F8E4M3);
    g.scale2 = Some(SecondScale { dtype: DType::F32, block: [0, 0] });
    g
}

fn mx(codes: DType) -> Grid {
    let mut g = grid(codes, [1, 32], DType::E8M0);
    g.rule = ScaleRule::Mx;
    g
}

/// The grids that have vector kernels.
fn fast_grids() -> Vec<Grid> {
    let mut symmetric = grid(DType::I8, [1, 64], DType::F16);
    symmetric.clamp = Clamp::Symmetric;
    let mut two_level_int = grid(DType::I4, [1, 32], DType::I8);
    two_level_int.scale2 = Some(SecondScale { dtype: DType::BF16, block: [0, 0] });
    vec![
        grid(DType::I8, [1, 128], DType::BF16),
        grid(DType::I8, [1, 64], DType::BF16),
        grid(DType::I8, [1, 32], DType::F32),
        grid(DType::I8, [1, 0], DType::BF16),
        grid(DType::I4, [1, 128], DType::BF16),
        grid(DType::I4, [1, 32], DType::F16),
        symmetric,
        two_level_int,
        grid(DType::I8, [0, 32], DType::BF16),
        grid(DType::F8E4M3, [1, 0], DType::BF16),
        grid(DType::F8E4M3, [128, 128], DType::BF16),
        grid(DType::F8E4M3, [128, 128], DType::F32),
        grid(DType::F8E4M3, [0, 0], DType::F32),
        grid(DType::F8E5M2, [1, 128], DType::F16),
        nvfp4(),
        mx(DType::F4E2M1),
        mx(DType::F8E4M3),
        mx(DType::I8),
    ]
}

/// Grids of the reference alone.
fn other_grids() -> Vec<Grid> {
    let mut asym = grid(DType::U4, [1, 32], DType::BF16);
    asym.zero = Some(DType::U8);
    let mut asym_search = grid(DType::U8, [1, 0], DType::F16);
    asym_search.zero = Some(DType::U8);
    asym_search.rule = ScaleRule::Search;
    let mut asym_two = grid(DType::U4, [1, 32], DType::F8E4M3);
    asym_two.zero = Some(DType::U4);
    asym_two.scale2 = Some(SecondScale { dtype: DType::F32, block: [1, 0] });
    let mut search = grid(DType::I8, [1, 128], DType::BF16);
    search.rule = ScaleRule::Search;
    let mut search_fp4 = nvfp4();
    search_fp4.rule = ScaleRule::Search;
    let mut fwht = grid(DType::I4, [1, 64], DType::BF16);
    fwht.fwht = Some(32);
    let mut rows2 = grid(DType::F4E2M1, [1, 16], DType::F8E4M3);
    rows2.scale2 = Some(SecondScale { dtype: DType::E8M0, block: [4, 64] });
    let mut book = grid(DType::U2, [1, 48], DType::BF16);
    book.table = Some(Codebook { name: "-3;-1;0;2".into(), values: vec![-3.0, -1.0, 0.0, 2.0] });
    let mut binary = grid(DType::U1, [1, 64], DType::BF16);
    binary.table = Some(Codebook { name: "binary".into(), values: vec![-1.0, 1.0] });
    let mut fixed = grid(DType::F8E4M3, [0, 0], DType::BF16);
    fixed.rule = ScaleRule::Fixed(0.01);
    vec![
        asym,
        asym_search,
        asym_two,
        search,
        search_fp4,
        fwht,
        rows2,
        book,
        binary,
        fixed,
        grid(DType::I3, [1, 20], DType::BF16),
        grid(DType::F6E2M3, [1, 32], DType::F16),
        grid(DType::F6E3M2, [2, 10], DType::BF16),
    ]
}

const CASTS: [DType; 5] = [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2];

fn to_bytes(source: DType, values: &[f32]) -> Vec<u8> {
    let e = Element::new(source).expect("codec");
    let width = source.bytes().expect("bytes") as usize;
    values.iter().flat_map(|v| e.encode(*v).to_le_bytes()[..width].to_vec()).collect()
}

/// Planes and error of a whole matrix, encoded in pieces of `blocks` row blocks.
fn encode(
    method: &Method,
    source: DType,
    cols: usize,
    bytes: &[u8],
    kernel: Kernel,
    blocks: usize,
) -> Result<(Vec<Vec<u8>>, ErrorSum), EncodeError> {
    let rows = bytes.len() / cols / source.bytes().expect("bytes") as usize;
    let whole = Encoder::needs_peak(method)
        .then(|| peak(source, bytes).map(|peak| Whole { peak }))
        .transpose()?;
    let encoder = Encoder::new(method, source, rows as u64, cols as u64, whole)
        .expect("a legal method")
        .with_kernel(kernel);
    let mut planes: Vec<Vec<u8>> = vec![Vec::new(); encoder.encoding().planes.len()];
    for (i, bytes) in encoder.whole_planes() {
        planes[i] = bytes.to_vec();
    }
    let step = encoder.row_block() as usize * blocks;
    let mut sum = ErrorSum::default();
    let mut buffers = PlaneBuffers::new();
    for (i, piece) in bytes.chunks(step * encoder.source_row_bytes()).enumerate() {
        sum.merge(&encoder.encode((i * step) as u64, piece, &mut buffers)?);
        for (p, plane) in planes.iter_mut().enumerate() {
            plane.extend_from_slice(buffers.plane(p));
        }
    }
    for (spec, plane) in encoder.encoding().planes.iter().zip(&planes) {
        assert_eq!(Some(plane.len() as u64), spec.bytes(rows as u64, cols as u64), "{}", spec.role);
    }
    Ok((planes, sum))
}

/// All kernels and cuts agree; returns what they agree on.
fn agreed(method: &Method, source: DType, cols: usize, bytes: &[u8]) -> (Vec<Vec<u8>>, ErrorSum) {
    let name = format!("{} {:?} from {source}", method.encoding(source), method.options());
    let want =
        encode(method, source, cols, bytes, Kernel::Scalar, usize::MAX >> 40).expect("finite");
    for kernel in Kernel::available() {
        for blocks in [1, 3] {
            let have = encode(method, source, cols, bytes, kernel, blocks).expect("finite");
            for (p, (a, b)) in have.0.iter().zip(&want.0).enumerate() {
                let at = a.iter().zip(b).position(|(a, b)| a != b);
                assert_eq!(at, None, "{name}: plane {p} under {kernel}");
            }
            assert_eq!(have.1, want.1, "{name}: error sums under {kernel}");
        }
    }
    want
}

fn decode(
    method: &Method,
    source: DType,
    cols: usize,
    planes: &[Vec<u8>],
    rows: usize,
) -> Vec<f32> {
    let decoder =
        Decoder::new(&method.encoding(source), rows as u64, cols as u64).expect("decodes");
    let slices: Vec<PlaneSlice<'_>> = planes.iter().map(|p| PlaneSlice::whole(p)).collect();
    let mut out = vec![f32::NAN; rows * cols];
    decoder.decode(0..rows as u64, &slices, &mut out).expect("whole planes");
    out
}

/// What holds for every grid and every finite input: scales are finite and not NaN, zero blocks decode to 0, and the
/// error sums are those of the decoded values.
fn check_promises(
    grid: &Grid,
    source: DType,
    cols: usize,
    values: &[f32],
    planes: &[Vec<u8>],
    sum: &ErrorSum,
) {
    let method = Method::Grid(grid.clone());
    let encoding = method.encoding(source);
    for (spec, bytes) in encoding.planes.iter().zip(planes) {
        if spec.role.starts_with(role::SCALE) {
            let e = Element::new(spec.dtype).expect("codec");
            let width = spec.dtype.bytes().expect("whole bytes") as usize;
            for code in bytes.chunks(width) {
                let mut word = [0; 4];
                word[..width].copy_from_slice(code);
                assert!(e.decode(u32::from_le_bytes(word)).is_finite(), "{encoding} {}", spec.role);
            }
        }
    }
    let rows = values.len() / cols;
    let decoded = decode(&method, source, cols, planes, rows);
    for (i, (a, b)) in values.iter().zip(&decoded).enumerate() {
        assert!(b.is_finite(), "{encoding}: {a:e} in row {} decodes to {b}", i / cols);
    }
    let error: f64 =
        values.iter().zip(&decoded).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
    // A lane adds eight f32 squares, each rounded, of f32 differences, at most a run: 10 · 2^-24.
    let close = |a: f64, b: f64| a == b || (a / b - 1.0).abs() < 6e-7;
    assert!(close(error, sum.squared_error()), "{encoding}: {error:e} {:e}", sum.squared_error());
    let width = match grid.fwht {
        Some(_) => cols,
        None if grid.block[1] == 0 => cols,
        None => grid.block[1] as usize,
    };
    for (row, out) in values.chunks(cols).zip(decoded.chunks(cols)) {
        for (v, d) in row.chunks(width).zip(out.chunks(width)) {
            let only_zeros = v.iter().all(|x| *x == 0.0);
            assert!(
                !only_zeros || d.iter().all(|x| *x == 0.0),
                "{encoding}: a zero block decodes to {d:?}"
            );
        }
    }
}

/// Rows that break quantizers: zeros, −0, a lone value, subnormals, the smallest normals, huge values, one sign, ties
/// of integers and of e2m1, constants, powers of two, a tiny value among normal ones, ramps.
fn edge_rows(source: DType, cols: usize) -> Vec<f32> {
    let e = Element::new(source).expect("codec");
    let (large, small) = (e.largest(), e.smallest());
    let normal = f32::MIN_POSITIVE.max(if source == DType::F16 { 6.1e-5 } else { 0.0 });
    let wave = |i: usize| ((i * 7919 % 1009) as f32 - 504.0) / 504.0;
    type Row = Box<dyn Fn(usize) -> f32>;
    let rows: Vec<Row> = vec![
        Box::new(|_| 0.0),
        Box::new(|_| -0.0),
        Box::new(move |i| if i / 16 % 3 == 1 { 0.0 } else { wave(i) }),
        Box::new(|i| if i == 5 { 0.7 } else { 0.0 }),
        Box::new(|i| if i == 17 { -3.0 } else { -0.0 }),
        Box::new(move |i| small * (i % 7) as f32),
        Box::new(move |i| -small * (i % 300) as f32),
        Box::new(move |i| normal * wave(i) * 3.0),
        Box::new(move |i| if i % 2 == 0 { large } else { -large }),
        Box::new(move |i| large * wave(i)),
        Box::new(move |i| wave(i).abs()),
        Box::new(move |i| -wave(i).abs()),
        Box::new(|i| if i % 32 == 0 { 127.0 } else { (i % 128) as f32 - 63.5 }),
        Box::new(|i| if i % 16 == 0 { -127.0 } else { 0.5 - (i % 100) as f32 }),
        Box::new(|i| [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0][i % 10]),
        Box::new(|i| [448.0, 17.0, 19.0, 0.001, -0.0009765625, 240.0, -232.0][i % 7]),
        Box::new(|_| 1.0),
        Box::new(|_| -0.3),
        Box::new(|i| f32::from_bits(((100 + i as u32 % 40) << 23) | 0x40_0000)),
        Box::new(move |i| if i % 64 == 9 { small } else { wave(i) }),
        Box::new(move |i| if i < 16 { large } else { wave(i) * 1e-4 }),
        Box::new(|i| i as f32),
        Box::new(|i| -(i as f32) / 16.0),
        Box::new(move |i| wave(i) * 0.02),
    ];
    rows.iter()
        .flat_map(|row| (0..cols).map(|i| e.decode(e.encode(row(i)))).collect::<Vec<_>>())
        .collect()
}

#[test]
fn kernels_agree_on_every_finite_bf16_value() {
    // Neighbouring magnitudes, and magnitudes dealt over the matrix so that blocks mix all scales.
    let finite = || (0..=u16::MAX).filter(|h| h & 0x7fff < 0x7f80);
    let sorted: Vec<u8> = finite().flat_map(u16::to_le_bytes).collect();
    let all: Vec<u16> = finite().collect();
    let dealt: Vec<u8> =
        (0..all.len()).flat_map(|i| all[i * 7919 % all.len()].to_le_bytes()).collect();
    for g in fast_grids() {
        for bytes in [&sorted, &dealt] {
            agreed(&Method::Grid(g.clone()), DType::BF16, 256, bytes);
        }
    }
    for target in [DType::F32, DType::BF16, DType::F8E4M3, DType::F8E5M2] {
        agreed(&Method::Cast(target), DType::BF16, 255, &sorted);
    }
}

#[test]
fn kernels_agree_on_every_finite_f16_value() {
    let bytes: Vec<u8> =
        (0..=u16::MAX).filter(|h| h & 0x7fff < 0x7c00).flat_map(u16::to_le_bytes).collect();
    for g in [
        grid(DType::I8, [1, 128], DType::BF16),
        grid(DType::F8E4M3, [128, 128], DType::BF16),
        nvfp4(),
    ] {
        agreed(&Method::Grid(g), DType::F16, 512, &bytes);
    }
    for target in CASTS {
        agreed(&Method::Cast(target), DType::F16, 248, &bytes);
    }
}

#[test]
fn kernels_agree_and_keep_their_promises_on_edge_rows() {
    for source in [DType::BF16, DType::F16, DType::F32] {
        // Whole groups, a short last group, and rows shorter than any group.
        for cols in [512, 200, 9] {
            let values = edge_rows(source, cols);
            let bytes = to_bytes(source, &values);
            for g in fast_grids() {
                let (planes, sum) = agreed(&Method::Grid(g.clone()), source, cols, &bytes);
                check_promises(&g, source, cols, &values, &planes, &sum);
            }
        }
    }
}

#[test]
fn reference_grids_keep_their_promises_on_edge_rows() {
    for source in [DType::BF16, DType::F32] {
        for cols in [512, 96] {
            let values = edge_rows(source, cols);
            let bytes = to_bytes(source, &values);
            for g in other_grids() {
                // A rotation of values near the largest bf16 overflows.
                if g.fwht.is_some() {
                    let error = encode(&Method::Grid(g), source, cols, &bytes, Kernel::Auto, 1)
                        .expect_err("overflow");
                    assert_eq!(error, EncodeError::Rotation { row: 8 });
                    continue;
                }
                let (planes, sum) = agreed(&Method::Grid(g.clone()), source, cols, &bytes);
                check_promises(&g, source, cols, &values, &planes, &sum);
            }
        }
    }
}

#[test]
fn ordinary_weights_come_back_within_half_a_step() {
    let cols = 576;
    let values: Vec<f32> =
        (0..8 * cols).map(|i| ((i * 7919 % 10007) as f32 / 10007.0 - 0.5) * 0.04).collect();
    let values: Vec<f32> = values.iter().map(|v| half::bf16::from_f32(*v).to_f32()).collect();
    let bytes = to_bytes(DType::BF16, &values);
    let limit = |g: &Grid| match g.codes.bits() {
        8 if g.codes.is_signed_int() => 0.01,
        8 => 0.06,
        4 | 6 => 0.2,
        3 => 0.35,
        2 => 0.8,
        // One bit against the largest magnitude keeps little but the sign.
        _ => 1.0,
    };
    for g in fast_grids().into_iter().chain(other_grids()) {
        // One fixed scale far off is no measure, and a book of whole numbers is coarse on purpose.
        if g.rule == ScaleRule::Fixed(0.01) {
            continue;
        }
        let (_, sum) = agreed(&Method::Grid(g.clone()), DType::BF16, cols, &bytes);
        let relative = sum.relative().expect("not all zero");
        assert!(relative > 0.0 && relative < limit(&g), "{}: {relative}", g.encoding());
    }
}

#[test]
fn searching_never_makes_the_error_larger() {
    let cols = 256;
    let values = edge_rows(DType::BF16, cols);
    let bytes = to_bytes(DType::BF16, &values);
    for codes in [DType::I8, DType::I4, DType::F8E4M3] {
        let plain = grid(codes, [1, 64], DType::BF16);
        let mut search = plain.clone();
        search.rule = ScaleRule::Search;
        let error = |g: Grid| agreed(&Method::Grid(g), DType::BF16, cols, &bytes).1.squared_error();
        assert!(error(search) <= error(plain), "{codes}");
    }
}

#[test]
fn codes_are_chosen_against_the_stored_scale() {
    let g = grid(DType::I8, [1, 128], DType::BF16);
    let values = [0.9f32, 0.4433, -0.2, 0.0071];
    let mut row = vec![0.0; 128];
    row[..4].copy_from_slice(&values);
    let (planes, _) = agreed(&Method::Grid(g), DType::F32, 128, &to_bytes(DType::F32, &row));
    let scale = half::bf16::from_le_bytes([planes[1][0], planes[1][1]]).to_f32();
    assert_eq!(scale, half::bf16::from_f32(0.9 / 127.0).to_f32());
    for (v, code) in values.iter().zip(&planes[0]) {
        assert_eq!(*code as i8, (v * (1.0 / scale)).round() as i8, "{v}");
    }
}

#[test]
fn zero_blocks_have_the_bytes_of_the_converter() {
    let bytes = [0u8; 2 * 256];
    let planes = |g: Grid| agreed(&Method::Grid(g), DType::BF16, 256, &bytes).0;
    let int8 = planes(grid(DType::I8, [1, 128], DType::BF16));
    assert_eq!(int8[1], [0x8d, 0x2b, 0x8d, 0x2b]);
    assert!(int8[0].iter().all(|b| *b == 0));
    let fp8 = planes(grid(DType::F8E4M3, [128, 128], DType::BF16));
    assert_eq!(fp8[1], [0x80, 0x3f, 0x80, 0x3f]);
    let nv = planes(nvfp4());
    assert!(nv[0].iter().chain(&nv[1]).all(|b| *b == 0));
    assert_eq!(nv[2], 1f32.to_le_bytes());
    let mx = planes(mx(DType::F4E2M1));
    assert!(mx[1].iter().all(|b| *b == 0));
}

#[test]
fn scales_without_a_reciprocal_still_round_to_nearest() {
    // The largest magnitude over 127 is below 2^-128: an f32 reciprocal would be infinite.
    let tiny = 2f32.powi(-123);
    let row: Vec<f32> = (0..128).map(|i| tiny * (i as f32 - 64.0) / 64.0).collect();
    let g = grid(DType::I8, [1, 128], DType::BF16);
    let (planes, sum) = agreed(&Method::Grid(g), DType::F32, 128, &to_bytes(DType::F32, &row));
    assert_eq!(planes[0][64], 0);
    assert!((planes[0][0] as i8) < -100);
    assert!(sum.relative().expect("not zero") < 0.05);
    // An f16 scale cannot hold 1e-12: its smallest value stands in, and the block still reads as zeros.
    let g = grid(DType::I4, [1, 128], DType::F16);
    let (planes, _) = agreed(&Method::Grid(g), DType::F32, 128, &[0; 512]);
    assert_eq!(planes[1], [1, 0]);
    assert!(planes[0].iter().all(|b| *b == 0));
}

#[test]
fn a_fused_set_shares_the_scale_of_its_largest_member() {
    let method = Method::Grid(nvfp4());
    let rows = |scale: f32| {
        to_bytes(DType::BF16, &(0..64).map(|i| scale * (i as f32 - 31.5)).collect::<Vec<_>>())
    };
    let (gate, up) = (rows(0.01), rows(0.02));
    let both =
        peak(DType::BF16, &gate).expect("finite").max(peak(DType::BF16, &up).expect("finite"));
    let tensor_scale = |bytes: &[u8], peak: f32| {
        let encoder =
            Encoder::new(&method, DType::BF16, 1, 64, Some(Whole { peak })).expect("legal");
        let mut out = PlaneBuffers::new();
        encoder.encode(0, bytes, &mut out).expect("finite");
        let whole: Vec<(usize, Vec<u8>)> =
            encoder.whole_planes().map(|(i, b)| (i, b.to_vec())).collect();
        (whole, out.plane(1).to_vec())
    };
    let (t_gate, s_gate) = tensor_scale(&gate, both);
    let (t_up, s_up) = tensor_scale(&up, both);
    assert_eq!(t_gate, t_up);
    assert_eq!(t_gate[0].1, (both / 6.0 / 448.0).to_le_bytes());
    // The louder member reaches the top of e4m3, the other one half of it.
    assert_eq!((s_up.iter().max(), s_gate.iter().max()), (Some(&0x7e), Some(&0x76)));
}

#[test]
fn non_finite_values_are_refused_with_place_and_number() {
    let mut values = vec![1.0f32; 4 * 64];
    values[64 + 3] = f32::NAN;
    values[64 + 60] = f32::INFINITY;
    values[200] = f32::NEG_INFINITY;
    for source in [DType::BF16, DType::F16, DType::F32] {
        let bytes = to_bytes(source, &values);
        let methods = fast_grids().into_iter().chain(other_grids()).filter(|g| g.block != [0, 0]);
        let methods =
            methods.map(Method::Grid).chain(CASTS.map(Method::Cast)).chain([Method::Keep]);
        for method in methods {
            let whole = Some(Whole { peak: 1.0 });
            for kernel in Kernel::available() {
                let encoder = Encoder::new(&method, source, 104, 64, whole)
                    .expect("legal")
                    .with_kernel(kernel);
                // These bytes are rows 100 to 103 of the tensor.
                let error =
                    encoder.encode(100, &bytes, &mut PlaneBuffers::new()).expect_err("non-finite");
                let want = EncodeError::NonFinite(NonFinite { first: 100 * 64 + 67, count: 3 });
                assert_eq!(error, want, "{method:?} {kernel}");
            }
        }
        assert_eq!(peak(source, &bytes), Err(NonFinite { first: 67, count: 3 }));
    }
    assert_eq!(peak(DType::I8, &[3, 0x80, 5]), Ok(128.0));
    assert_eq!(peak(DType::BF16, &to_bytes(DType::BF16, &[0.5, -2.0])), Ok(2.0));
    assert_eq!(peak(DType::F64, &1e39f64.to_le_bytes()), Err(NonFinite { first: 0, count: 1 }));
}

#[test]
fn a_cast_refuses_what_its_target_would_make_infinite() {
    let values = [1.0, 65519.0, -65520.0, 1e6];
    for kernel in Kernel::available() {
        let bytes = to_bytes(DType::F32, &values);
        let error =
            encode(&Method::Cast(DType::F16), DType::F32, 4, &bytes, kernel, 1).expect_err("range");
        let text =
            "2 values exceed the largest f16, 6.5504e4; the largest is 1e6, the first at element 2";
        assert_eq!(error.to_string(), text);
        let bytes = to_bytes(DType::F32, &[f32::MAX]);
        assert!(encode(&Method::Cast(DType::BF16), DType::F32, 1, &bytes, kernel, 1).is_err());
        let bytes = to_bytes(DType::F32, &[1e30, -449.0]);
        let (planes, _) = encode(&Method::Cast(DType::F8E4M3), DType::F32, 2, &bytes, kernel, 1)
            .expect("saturates");
        assert_eq!(planes[0], [0x7e, 0xfe]);
    }
}

#[test]
fn a_cast_to_e5m2_goes_by_way_of_f16() {
    // Just above the tie of 1 and 1.25: the f16 in between is the tie itself, which goes to the even code.
    let x = 1.125f32.next_up();
    let (planes, _) = agreed(&Method::Cast(DType::F8E5M2), DType::F32, 1, &x.to_le_bytes());
    assert_eq!(planes[0], [0x3c]);
    assert_eq!(Element::new(DType::F8E5M2).expect("codec").encode(x), 0x3d);
}

#[test]
fn keep_stores_the_bytes_and_reports_no_error() {
    let bytes: Vec<u8> = (0..48).collect();
    for source in [DType::I64, DType::F32, DType::Bool, DType::C64] {
        let cols = bytes.len() / source.bytes().expect("bytes") as usize;
        let encoder = Encoder::new(&Method::Keep, source, 1, cols as u64, None).expect("keep");
        let mut out = PlaneBuffers::new();
        assert_eq!(encoder.encode(0, &bytes, &mut out), Ok(ErrorSum::default()));
        assert_eq!(out.plane(0), bytes);
    }
}

#[test]
fn integer_and_double_sources_are_quantized_as_their_f32_values() {
    let g = Method::Grid(grid(DType::I8, [1, 16], DType::BF16));
    let ints: Vec<i32> = (0..16).map(|i| i * 1000 - 8000).collect();
    let as_i32: Vec<u8> = ints.iter().flat_map(|i| i.to_le_bytes()).collect();
    let as_f64: Vec<u8> = ints.iter().flat_map(|i| f64::from(*i).to_le_bytes()).collect();
    let as_f32 = to_bytes(DType::F32, &ints.iter().map(|i| *i as f32).collect::<Vec<_>>());
    let want = agreed(&g, DType::F32, 16, &as_f32);
    assert_eq!(agreed(&g, DType::I32, 16, &as_i32), want);
    assert_eq!(agreed(&g, DType::F64, 16, &as_f64), want);
}

#[test]
fn methods_that_make_no_sense_are_refused_before_any_weight_is_read() {
    let refused = |g: Grid, rows: u64, cols: u64| {
        Encoder::new(&Method::Grid(g), DType::BF16, rows, cols, None).err().map(|e| e.to_string())
    };
    let g = |f: fn(&mut Grid)| {
        let mut g = grid(DType::I8, [1, 32], DType::BF16);
        f(&mut g);
        g
    };
    let cases: [(Grid, &str); 11] = [
        (g(|g| g.codes = DType::U8), "u8 codes without a zero point"),
        (g(|g| g.zero = Some(DType::U8)), "i8 codes with a zero point"),
        (g(|g| (g.codes, g.zero) = (DType::U8, Some(DType::U4))), "cannot hold the zero points"),
        (g(|g| g.scale = DType::E8M0), "go together"),
        (g(|g| g.rule = ScaleRule::Mx), "go together"),
        (g(|g| g.rule = ScaleRule::Fixed(-1.0)), "no usable fixed scale"),
        (g(|g| g.rule = ScaleRule::Fixed(1e37)), "no usable fixed scale"),
        (g(|g| g.codes = DType::F16), "make no grid"),
        (
            g(|g| g.scale2 = Some(SecondScale { dtype: DType::F32, block: [1, 48] })),
            "no multiple of first-level blocks",
        ),
        (g(|g| g.fwht = Some(48)), "malformed"),
        (g(|g| g.fwht = Some(64)), "96 columns are no multiple of the 64"),
    ];
    for (g, text) in cases {
        let why = refused(g, 4, 96).expect(text);
        assert!(why.contains(text), "{why} / {text}");
    }
    assert_eq!(
        Encoder::new(&Method::Grid(nvfp4()), DType::BF16, 4, 96, None).err(),
        Some(MethodError::Peak)
    );
    let extent = |rows, cols| Encoder::new(&Method::Keep, DType::BF16, rows, cols, None).err();
    assert_eq!(extent(0, 4), Some(MethodError::Extent { rows: 0, cols: 4 }));
    assert_eq!(
        extent(1 << 40, 1 << 40),
        Some(MethodError::Extent { rows: 1 << 40, cols: 1 << 40 })
    );
    let cast = |target, source| Encoder::new(&Method::Cast(target), source, 1, 1, None).err();
    assert!(matches!(cast(DType::I8, DType::F32), Some(MethodError::Unsupported(_))));
    assert_eq!(cast(DType::F32, DType::C64), Some(MethodError::Source(DType::C64)));
}

#[test]
fn one_scale_for_all_rows_can_be_cut_where_the_peak_fixes_it() {
    let rows = |g: Grid, whole| {
        Encoder::new(&Method::Grid(g), DType::BF16, 300, 256, whole).expect("legal").row_block()
    };
    let whole = Some(Whole { peak: 1.0 });
    assert_eq!(rows(grid(DType::I8, [1, 128], DType::BF16), None), 1);
    assert_eq!(rows(grid(DType::F8E4M3, [128, 128], DType::BF16), None), 128);
    assert_eq!(rows(grid(DType::F8E4M3, [0, 0], DType::F32), whole), 1);
    assert_eq!(rows(nvfp4(), whole), 1);
    let mut search = nvfp4();
    search.rule = ScaleRule::Search;
    assert_eq!(rows(search, whole), 1);
    let mut search = grid(DType::I8, [0, 0], DType::F32);
    search.rule = ScaleRule::Search;
    assert_eq!(rows(search, None), 300);
    assert_eq!(rows(grid(DType::I8, [0, 32], DType::BF16), None), 300);
}

/// Values of all magnitudes, with a bias to what weights look like.
fn weights(source: DType) -> impl Strategy<Value = (usize, Vec<u8>)> {
    let any = any::<u32>().prop_map(f32::from_bits);
    let usual = (-1.0f32..1.0).prop_map(|x| x * 0.05);
    let few = prop::sample::select(vec![0.0, -0.0, 1.0, -1.0, 0.5, 6.0, 448.0, 1e-40, 3e38]);
    let value = prop_oneof![2 => any, 5 => usual, 2 => few];
    (1usize..5, 1usize..300).prop_flat_map(move |(rows, cols)| {
        prop::collection::vec(value.clone(), rows * cols).prop_map(move |values| {
            let e = Element::new(source).expect("codec");
            let finite =
                |x: f32| if x.is_finite() && e.decode(e.encode(x)).is_finite() { x } else { 0.25 };
            (cols, to_bytes(source, &values.into_iter().map(finite).collect::<Vec<_>>()))
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn kernels_agree_on_random_matrices(
        bf16 in weights(DType::BF16), f16 in weights(DType::F16), f32 in weights(DType::F32),
    ) {
        for (source, (cols, bytes)) in [(DType::BF16, &bf16), (DType::F16, &f16), (DType::F32, &f32)] {
            for g in fast_grids() {
                agreed(&Method::Grid(g), source, *cols, bytes);
            }
            for target in [DType::F32, DType::F8E4M3, DType::F8E5M2] {
                agreed(&Method::Cast(target), source, *cols, bytes);
            }
        }
        agreed(&Method::Cast(DType::F16), DType::F16, f16.0, &f16.1);
        agreed(&Method::Cast(DType::BF16), DType::F16, f16.0, &f16.1);
    }

    #[test]
    fn a_decoder_never_panics_whatever_the_planes_hold(
        seed in any::<u64>(), rows in 1u64..6, cols in 1u64..70, cut in 0usize..40,
    ) {
        let mut state = seed | 1;
        let mut noise = |n: usize| -> Vec<u8> {
            (0..n).map(|_| { state = state.wrapping_mul(6364136223846793005).wrapping_add(1); (state >> 56) as u8 }).collect()
        };
        for g in fast_grids().into_iter().chain(other_grids()) {
            let encoding = g.encoding();
            let Ok(decoder) = Decoder::new(&encoding, rows, cols) else { continue };
            let planes: Vec<Vec<u8>> = encoding.planes.iter().map(|p| noise(p.bytes(rows, cols).unwrap_or(0) as usize)).collect();
            let whole: Vec<PlaneSlice<'_>> = planes.iter().map(|p| PlaneSlice::whole(p)).collect();
            let mut out = vec![0.0; (rows * cols) as usize];
            let result = decoder.decode(0..rows, &whole, &mut out);
            let book = matches!(encoding.planes.last().map(|p| p.layout), Some(PlaneLayout::Table { .. }));
            prop_assert!(result.is_ok() || book, "{}: {:?}", encoding, result);
            let short: Vec<PlaneSlice<'_>> =
                planes.iter().map(|p| PlaneSlice::whole(&p[..p.len().saturating_sub(cut + 1)])).collect();
            prop_assert!(decoder.decode(0..rows, &short, &mut out).is_err());
        }
    }
}
