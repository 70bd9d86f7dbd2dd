//! Source bytes a second that one core encodes, error sums and the non-finite check included, next to a plain copy: of a
//! weight that no cache holds, and of one that stays in the second-level cache.
//!
//! `cargo bench --bench quantize`; a group, kernel or encoding name filters: `cargo bench --bench quantize -- "in cache"`.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use radpack::quantize::{Decoder, Encoder, Kernel, PlaneBuffers, PlaneSlice, Whole, peak};
use radpack::recipe::{Grid, Method, ScaleRule, SecondScale};
use radpack::tensor::DType;

/// A source that no cache holds: 8,192 × 5,376 elements, 84 MiB of bf16.
const ROWS: usize = 8192;
const COLS: usize = 5376;

/// Rows of a source that the cache holds, 0.7 MB, and their codes with it.
const CACHED_ROWS: usize = 64;

/// Source bytes of one call, as a streaming executor would cut them.
const PIECE: usize = 2 << 20;

fn methods() -> Vec<(&'static str, Method)> {
    let grid = Grid::absmax;
    let mut nvfp4 = grid(DType::F4E2M1, [1, 16], DType::F8E4M3);
    nvfp4.scale2 = Some(SecondScale { dtype: DType::F32, block: [0, 0] });
    let mut mxfp4 = grid(DType::F4E2M1, [1, 32], DType::E8M0);
    mxfp4.rule = ScaleRule::Mx;
    vec![
        ("int8-g128", Method::Grid(grid(DType::I8, [1, 128], DType::BF16))),
        ("int8-g64", Method::Grid(grid(DType::I8, [1, 64], DType::BF16))),
        ("int8-g32", Method::Grid(grid(DType::I8, [1, 32], DType::BF16))),
        ("int8-channel", Method::Grid(grid(DType::I8, [1, 0], DType::BF16))),
        ("int4-g128", Method::Grid(grid(DType::I4, [1, 128], DType::BF16))),
        ("fp8-channel", Method::Grid(grid(DType::F8E4M3, [1, 0], DType::BF16))),
        ("fp8-block128", Method::Grid(grid(DType::F8E4M3, [128, 128], DType::BF16))),
        ("nvfp4", Method::Grid(nvfp4)),
        ("mxfp4", Method::Grid(mxfp4)),
        ("f16", Method::Cast(DType::F16)),
        ("f32", Method::Cast(DType::F32)),
        ("keep", Method::Keep),
    ]
}

/// Values of the size that weights have, all different.
fn source(dtype: DType, rows: usize) -> Vec<u8> {
    let mut state = 1u64;
    let values = (0..rows * COLS).map(|_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let sum = ((state >> 33) & 0xffff) + ((state >> 17) & 0xffff) + (state >> 48);
        (sum as f32 / 98304.0 - 1.0) * 0.04
    });
    match dtype {
        DType::BF16 => values.flat_map(|v| half::bf16::from_f32(v).to_le_bytes()).collect(),
        DType::F16 => values.flat_map(|v| half::f16::from_f32(v).to_le_bytes()).collect(),
        _ => values.flat_map(f32::to_le_bytes).collect(),
    }
}

fn pass(encoder: &Encoder, bytes: &[u8], out: &mut PlaneBuffers) {
    let block = encoder.row_block() as usize;
    let rows = (PIECE / encoder.source_row_bytes() / block).max(1) * block;
    for (i, piece) in bytes.chunks(rows * encoder.source_row_bytes()).enumerate() {
        black_box(encoder.encode((i * rows) as u64, piece, out).expect("finite"));
    }
}

fn encode(c: &mut Criterion) {
    let bytes = source(DType::BF16, ROWS);
    let mut group = c.benchmark_group("bf16");
    group.throughput(Throughput::Bytes(bytes.len() as u64)).sample_size(10);
    let mut copy = vec![0u8; PIECE];
    group.bench_function("copy", |b| {
        b.iter(|| {
            for piece in bytes.chunks(PIECE) {
                copy[..piece.len()].copy_from_slice(piece);
                black_box(&mut copy);
            }
        });
    });
    group.bench_function("peak", |b| {
        b.iter(|| peak(DType::BF16, black_box(&bytes)).expect("finite"))
    });
    for (name, method) in methods() {
        for kernel in Kernel::available() {
            // The reference is there to be right: a twentieth of the rows will do.
            let rows = if kernel == Kernel::Scalar { ROWS / 32 } else { ROWS };
            let bytes = &bytes[..rows * COLS * 2];
            group.throughput(Throughput::Bytes(bytes.len() as u64));
            let encoder = encoder(&method, DType::BF16, bytes, rows).with_kernel(kernel);
            let mut out = PlaneBuffers::new();
            group.bench_function(BenchmarkId::new(name, kernel), |b| {
                b.iter(|| pass(&encoder, bytes, &mut out))
            });
        }
    }
    group.finish();
    for dtype in [DType::F16, DType::F32] {
        let bytes = source(dtype, ROWS / 4);
        let mut group = c.benchmark_group(dtype.name());
        group.throughput(Throughput::Bytes(bytes.len() as u64)).sample_size(10);
        let (name, method) = methods().swap_remove(0);
        let encoder = encoder(&method, dtype, &bytes, ROWS / 4);
        let mut out = PlaneBuffers::new();
        group.bench_function(name, |b| b.iter(|| pass(&encoder, &bytes, &mut out)));
        group.finish();
    }
}

/// The arithmetic alone, where memory does not set the pace.
fn in_cache(c: &mut Criterion) {
    let bytes = source(DType::BF16, CACHED_ROWS);
    let mut group = c.benchmark_group("in cache");
    group.throughput(Throughput::Bytes(bytes.len() as u64)).sample_size(50);
    for (name, method) in methods() {
        for kernel in Kernel::available().into_iter().filter(|k| *k != Kernel::Scalar) {
            let encoder = encoder(&method, DType::BF16, &bytes, CACHED_ROWS).with_kernel(kernel);
            let mut out = PlaneBuffers::new();
            group.bench_function(BenchmarkId::new(name, kernel), |b| {
                b.iter(|| pass(&encoder, black_box(&bytes), &mut out))
            });
        }
    }
    group.finish();
}

fn encoder(method: &Method, dtype: DType, bytes: &[u8], rows: usize) -> Encoder {
    let whole =
        Encoder::needs_peak(method).then(|| Whole { peak: peak(dtype, bytes).expect("finite") });
    Encoder::new(method, dtype, rows as u64, COLS as u64, whole).expect("legal")
}

fn decode(c: &mut Criterion) {
    let rows = 256;
    let bytes = source(DType::BF16, rows);
    let mut group = c.benchmark_group("decode");
    // Bytes of the bf16 source the planes came from, so that both directions compare.
    group.throughput(Throughput::Bytes(bytes.len() as u64)).sample_size(10);
    for (name, method) in methods().into_iter().filter(|(_, m)| matches!(m, Method::Grid(_))) {
        let encoder = encoder(&method, DType::BF16, &bytes, rows);
        let mut out = PlaneBuffers::new();
        encoder.encode(0, &bytes, &mut out).expect("finite");
        let mut planes: Vec<PlaneSlice<'_>> =
            (0..encoder.encoding().planes.len()).map(|i| PlaneSlice::whole(out.plane(i))).collect();
        for (i, bytes) in encoder.whole_planes() {
            planes[i] = PlaneSlice::whole(bytes);
        }
        let decoder = Decoder::new(encoder.encoding(), rows as u64, COLS as u64).expect("legal");
        let mut values = vec![0f32; rows * COLS];
        group.bench_function(name, |b| {
            b.iter(|| {
                decoder
                    .decode(0..rows as u64, &planes, black_box(&mut values))
                    .expect("whole planes")
            });
        });
    }
    group.finish();
}

criterion_group!(benches, encode, in_cache, decode);
criterion_main!(benches);
