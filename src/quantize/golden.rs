//! Held against files of radiance container version 2 that its own converter wrote, with the f32 inputs and the f32
//! values its reader decodes beside them (`fixtures/rad`).

use std::collections::BTreeMap;

use crate::recipe::{Clamp, Codebook, Grid, Method, ScaleRule, SecondScale};
use crate::tensor::{DType, Encoding, PlaneLayout, PlaneSpec, Scheme};

use super::{Decoder, Encoder, Kernel, PlaneBuffers, PlaneSlice, Whole, peak};

/// One weight of a golden file.
struct Entry {
    options: String,
    rows: u64,
    cols: u64,
    encoding: Encoding,
    planes: Vec<Vec<u8>>,
}

/// Just enough of the container to reach the planes; the real reader is a later stage.
fn entries(file: &str) -> BTreeMap<String, Entry> {
    let bytes = read(file);
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    let u64_at =
        |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes")) as usize;
    let text = |at: usize| -> String {
        let end = at + bytes[at..].iter().position(|b| *b == 0).expect("NUL");
        String::from_utf8(bytes[at..end].to_vec()).expect("UTF-8")
    };
    let strings = u64_at(56);
    let (dir, count, plane_rows, encodings) = (u64_at(88), u64_at(96), u64_at(104), u64_at(120));
    let dtype = |code: u32| -> DType {
        let name = match code {
            1 => "f32",
            2 => "f16",
            3 => "bf16",
            4 => "fp8_e4m3",
            8 => "i8",
            9 => "u8",
            16 => "i4",
            18 => "fp4_e2m1",
            19 => "u4",
            21 => "e8m0",
            24 => "u3",
            other => panic!("type {other} is not in the golden files"),
        };
        DType::from_name(name).expect("known")
    };
    let encoding = |at: usize| {
        let n = u32_at(at + 48) as usize;
        let planes = (0..n)
            .map(|i| {
                let p = at + 56 + 64 * i;
                let pair = |q: usize| [u64_at(q) as u64, u64_at(q + 8) as u64];
                let layout = match u32_at(p + 28) {
                    0 => PlaneLayout::Tiled { block: pair(p + 32) },
                    _ => PlaneLayout::Table { extent: pair(p + 48) },
                };
                PlaneSpec { role: text(p), dtype: dtype(u32_at(p + 24)), layout }
            })
            .collect();
        let scheme = if text(at) == "plain" { Scheme::Plain } else { Scheme::Affine };
        Encoding { scheme, transform: text(at + 24), planes }
    };
    (0..count)
        .map(|i| {
            let e = dir + 136 * i;
            let rank = u32_at(e + 28) as usize;
            let shape: Vec<u64> = (0..rank).map(|d| u64_at(e + 32 + 8 * d) as u64).collect();
            let encoding = encoding(encodings + 568 * u32_at(e + 24) as usize);
            let planes = (0..u32_at(e + 92) as usize)
                .map(|p| {
                    let row = plane_rows + 16 * (u64_at(e + 96) + p);
                    bytes[u64_at(row)..][..u64_at(row + 8)].to_vec()
                })
                .collect();
            let entry = Entry {
                options: text(strings + u64_at(e + 16)),
                rows: shape[..rank - 1].iter().product(),
                cols: shape[rank - 1],
                encoding,
                planes,
            };
            (text(strings + u64_at(e)), entry)
        })
        .collect()
}

fn read(file: &str) -> Vec<u8> {
    let path = format!("{}/fixtures/rad/{file}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// The method that an entry's recorded options name.
fn method(entry: &Entry) -> Method {
    if entry.options.is_empty() {
        return Method::Cast(entry.encoding.codes());
    }
    let options: BTreeMap<&str, &str> =
        entry.options.split(',').map(|o| o.split_once('=').expect("key=value")).collect();
    let dtype = |key: &str| options.get(key).map(|n| DType::from_name(n).expect("type"));
    let block = match (options.get("group"), options.get("block")) {
        (Some(g), _) => [1, g.parse().expect("group")],
        (None, Some(&"*x*")) => [0, 0],
        (None, Some(b)) => {
            let (r, c) = b.split_once('x').expect("RxC");
            [r.parse().expect("rows"), c.parse().expect("columns")]
        }
        _ => [1, 0],
    };
    let scale = dtype("scale").expect("scale");
    let mut grid = Grid::absmax(entry.encoding.codes(), block, scale);
    grid.scale2 = dtype("scale2").map(|dtype| SecondScale { dtype, block: [0, 0] });
    grid.zero = dtype("zero");
    grid.fwht =
        options.get("transform").map(|t| t.trim_start_matches("fwht").parse().expect("width"));
    grid.rule = match options.get("rule") {
        _ if scale == DType::E8M0 => ScaleRule::Mx,
        None => ScaleRule::Absmax,
        Some(&"search") => ScaleRule::Search,
        Some(_) => ScaleRule::Fixed(options["scale_value"].parse().expect("value")),
    };
    if options.get("clamp") == Some(&"sym") {
        grid.clamp = Clamp::Symmetric;
    }
    if let Some(name) = options.get("table") {
        let table = entry.planes.last().expect("table");
        let values = table.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        grid.table = Some(Codebook { name: (*name).to_owned(), values });
    }
    Method::Grid(grid)
}

const FILES: [&str; 2] = ["golden", "golden_full"];

#[test]
fn every_weight_of_the_golden_files_is_rebuilt_bit_for_bit_by_every_kernel() {
    let mut rebuilt = 0;
    for file in FILES {
        for (name, entry) in entries(&format!("{file}.rad")) {
            let source = read(&format!("{file}-inputs/{name}.f32"));
            let method = method(&entry);
            assert_eq!(method.encoding(DType::F32), entry.encoding, "{name}");
            if !entry.options.is_empty() && !entry.options.contains("fixed") {
                assert_eq!(method.options(), entry.options, "{name}");
            }
            let whole = Encoder::needs_peak(&method)
                .then(|| Whole { peak: peak(DType::F32, &source).expect("finite") });
            for kernel in Kernel::available() {
                let encoder = Encoder::new(&method, DType::F32, entry.rows, entry.cols, whole)
                    .expect("a grid of the converter")
                    .with_kernel(kernel);
                let mut planes: Vec<Vec<u8>> = vec![Vec::new(); entry.planes.len()];
                for (i, bytes) in encoder.whole_planes() {
                    planes[i] = bytes.to_vec();
                }
                // In the smallest pieces that the encoder allows.
                let step = encoder.row_block() as usize * encoder.source_row_bytes();
                let mut buffers = PlaneBuffers::new();
                for (i, rows) in source.chunks(step).enumerate() {
                    let first = i as u64 * encoder.row_block();
                    encoder.encode(first, rows, &mut buffers).expect("finite");
                    for (p, plane) in planes.iter_mut().enumerate() {
                        if !buffers.plane(p).is_empty() {
                            assert_eq!(
                                plane.len() as u64,
                                encoder.plane_offset(p, first),
                                "{name}"
                            );
                            plane.extend_from_slice(buffers.plane(p));
                        }
                    }
                }
                for (p, (ours, theirs)) in planes.iter().zip(&entry.planes).enumerate() {
                    let role = &entry.encoding.planes[p].role;
                    let differing = ours.iter().zip(theirs).filter(|(a, b)| a != b).count();
                    assert_eq!(ours.len(), theirs.len(), "{name} {role} {kernel}");
                    assert_eq!(differing, 0, "{name} {role} {kernel}: bytes that differ");
                }
                rebuilt += 1;
            }
        }
    }
    assert_eq!(rebuilt % Kernel::available().len(), 0);
    testkit::proofs::proved_one(
        "every_weight_of_the_golden_files_is_rebuilt_bit_for_bit_by_every_kernel",
        "radiance container version 2",
        rebuilt / Kernel::available().len(),
    );
}

#[test]
fn every_weight_of_the_golden_files_decodes_to_the_values_of_the_reference_reader() {
    let mut decoded = 0;
    for file in FILES {
        for (name, entry) in entries(&format!("{file}.rad")) {
            let decoder = Decoder::new(&entry.encoding, entry.rows, entry.cols).expect("decodes");
            let planes: Vec<PlaneSlice<'_>> =
                entry.planes.iter().map(|p| PlaneSlice::whole(p)).collect();
            let mut ours = vec![0f32; (entry.rows * entry.cols) as usize];
            decoder.decode(0..entry.rows, &planes, &mut ours).expect("whole planes");
            // A plain bf16 weight decodes to its inputs, which were representable.
            let kind = if entry.options.is_empty() { "f32" } else { "dec.f32" };
            let theirs = read(&format!("{file}-inputs/{name}.{kind}"));
            let ours: Vec<u8> = ours.iter().flat_map(|v| v.to_le_bytes()).collect();
            if entry.options.is_empty() {
                let bf16 = |b: &[u8]| -> Vec<u16> {
                    b.as_chunks::<4>()
                        .0
                        .iter()
                        .map(|b| half::bf16::from_f32(f32::from_le_bytes(*b)).to_bits())
                        .collect()
                };
                assert_eq!(bf16(&ours), bf16(&theirs), "{name}");
            } else {
                assert!(ours == theirs, "{name}");
            }
            decoded += 1;
        }
    }
    testkit::proofs::proved_one(
        "every_weight_of_the_golden_files_decodes_to_the_values_of_the_reference_reader",
        "radiance container version 2",
        decoded,
    );
}
