//! Held against what compressed-tensors, ModelOpt and transformers make of the same weights (`fixtures/quant`): codes,
//! scales and zero points, bit for bit. Packing is undone here; it is no matter of arithmetic.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use proptest::prelude::*;
use safetensors::SafeTensors;
use sha2::{Digest, Sha256};
use testkit::proofs::{ct_format, modelopt_format};

use crate::num::{Element, mini};
use crate::recipe::{Grid, Method, Rounding, ScaleRule, SecondScale};
use crate::tensor::{DType, Shape, TensorSource, role};

use super::grid::GridPlan;
use super::{EncodeError, Encoder, Job, MethodError, PlaneBuffers, Sink, Whole, Workers, execute};

mod made;

use made::{Input, Made, canonical, inputs, make};

const CT: Rounding = Rounding::CompressedTensors;

fn file(name: &str) -> Vec<u8> {
    let path = format!("{}/fixtures/quant/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn nvfp4(rounding: Rounding) -> Grid {
    let mut grid = Grid::absmax(DType::F4E2M1, [1, 16], DType::F8E4M3);
    grid.scale2 = Some(SecondScale { dtype: DType::F32, block: [0, 0] });
    grid.rounding = rounding;
    grid
}

fn mx(codes: DType, block: [u64; 2], rounding: Rounding) -> Grid {
    let mut grid = Grid::absmax(codes, block, DType::E8M0);
    grid.rule = ScaleRule::Mx;
    grid.rounding = rounding;
    grid
}

/// The grid of a compressed-tensors format name: `int8_g128_asym_pack`, `fp8_block`.
fn ct_grid(format: &str, source: DType) -> Grid {
    let mut grid = match format {
        "nvfp4" => return nvfp4(CT),
        "mxfp4" => return mx(DType::F4E2M1, [1, 32], CT),
        "mxfp8" => return mx(DType::F8E4M3, [1, 32], CT),
        "fp8_ch" => Grid::absmax(DType::F8E4M3, [1, 0], source),
        "fp8_tensor" => Grid::absmax(DType::F8E4M3, [0, 0], source),
        "fp8_block" => Grid::absmax(DType::F8E4M3, [128, 128], source),
        _ => {
            let parts: Vec<&str> = format.split('_').collect();
            let asym = parts.contains(&"asym");
            let codes = match (parts[0], asym) {
                ("int8", false) => DType::I8,
                ("int4", false) => DType::I4,
                ("int8", true) => DType::U8,
                ("int4", true) => DType::U4,
                _ => panic!("{format}"),
            };
            let group = parts[1].strip_prefix('g').map_or(0, |g| g.parse().expect("a number"));
            let mut grid = Grid::absmax(codes, [1, group], source);
            grid.zero = asym.then_some(codes);
            grid
        }
    };
    grid.rounding = CT;
    grid
}

fn modelopt_grid(format: &str) -> Grid {
    let mut grid = match format {
        "nvfp4" => nvfp4(Rounding::ModelOpt),
        "mxfp4" => mx(DType::F4E2M1, [1, 32], Rounding::ModelOpt),
        "mxfp8" => mx(DType::F8E4M3, [1, 32], Rounding::ModelOpt),
        "fp8_tensor" => Grid::absmax(DType::F8E4M3, [0, 0], DType::F32),
        "fp8_pc_pt" => Grid::absmax(DType::F8E4M3, [1, 0], DType::F32),
        "fp8_pb_wo" => Grid::absmax(DType::F8E4M3, [128, 128], DType::F32),
        "int8_wo" => Grid::absmax(DType::I8, [1, 0], DType::F32),
        "int8_block128" => Grid::absmax(DType::I8, [1, 128], DType::BF16),
        "int4_awq" => Grid::absmax(DType::I4, [1, 128], DType::F32),
        _ => panic!("{format}"),
    };
    grid.rounding = Rounding::ModelOpt;
    grid
}

/// Compares and counts, by the format's published name.
#[derive(Default)]
struct Tally {
    equal: BTreeMap<String, usize>,
    differing: Vec<String>,
    lost: BTreeSet<String>,
}

impl Tally {
    fn compare(&mut self, format: &str, name: String, ours: &[u8], theirs: &[u8]) {
        if ours == theirs {
            *self.equal.entry(format.to_owned()).or_default() += 1;
            return;
        }
        let bytes = ours.iter().zip(theirs).filter(|(a, b)| a != b).count();
        let at = ours.iter().zip(theirs).position(|(a, b)| a != b);
        self.differing.push(format!(
            "{name}: {bytes} bytes differ from {at:?} on, {} against {} bytes",
            ours.len(),
            theirs.len()
        ));
    }

    #[track_caller]
    fn finish(&self, test: &str, lost: &[&str]) {
        assert_eq!(self.differing, [] as [String; 0], "{test}");
        assert_eq!(
            self.lost.iter().map(String::as_str).collect::<Vec<_>>(),
            lost,
            "{test}: refused"
        );
        testkit::proofs::proved(test, &self.equal);
    }
}

/// Every `CASE/FORMAT/TENSOR` of a compressed-tensors file.
fn compare_ct(name: &str) -> Tally {
    let bytes = file(&format!("{name}.safetensors"));
    let all = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let inputs = inputs();
    type Tensors<'a> = Vec<(&'a str, Vec<u8>)>;
    let mut cases: BTreeMap<(&str, &str), Tensors<'_>> = BTreeMap::new();
    for (name, view) in all.iter() {
        let parts: Vec<&str> = name.split('/').collect();
        // NaN and infinity in the source are no contract, and refused; fused sets have a test of their own.
        if !["nonfinite", "fused"].contains(&parts[0]) && parts[2] != "weight_shape" {
            cases.entry((parts[0], parts[1])).or_default().push((parts[2], view.data().to_vec()));
        }
    }
    let mut tally = Tally::default();
    for ((case, format), tensors) in cases {
        let input = &inputs[case];
        let made = make(ct_grid(format, input.dtype), input, input.peak());
        if let Some(row) = made.lost {
            tally.lost.insert(format!("{case}/{format} row {row}"));
        }
        let ours = made.as_compressed_tensors(format.ends_with("_pack"), input.dtype);
        for (tensor, mut theirs) in tensors {
            if tensor == "dequant" {
                for half in theirs.as_chunks_mut::<2>().0 {
                    *half = canonical(u16::from_le_bytes(*half)).to_le_bytes();
                }
            }
            let name = format!("{case}/{format}/{tensor}");
            tally.compare(ct_format(format), name, &ours[tensor], &theirs);
        }
    }
    tally
}

#[test]
fn compressed_tensors_is_reproduced_on_ordinary_weights() {
    compare_ct("ct").finish("compressed_tensors_is_reproduced_on_ordinary_weights", &[]);
}

#[test]
fn compressed_tensors_is_reproduced_on_corner_cases() {
    // Row 8 holds the largest bf16 of both signs: code −128 (−8) times the scale, and the range between them, overflow.
    let lost = [
        "edge/int4_ch_pack row 8",
        "edge/int4_g128_asym_pack row 8",
        "edge/int4_g128_pack row 8",
        "edge/int4_g32_asym_pack row 8",
        "edge/int4_g32_pack row 8",
        "edge/int8_ch_int row 8",
        "edge/int8_ch_pack row 8",
        "edge/int8_g128_asym_pack row 8",
        "edge/int8_g128_int row 8",
        "edge/int8_g128_pack row 8",
        "edge/mxfp4 row 8",
        "edge/mxfp8 row 8",
    ];
    compare_ct("ct_edge").finish("compressed_tensors_is_reproduced_on_corner_cases", &lost);
}

#[test]
fn compressed_tensors_is_reproduced_on_ragged_shapes_and_other_source_types() {
    compare_ct("ct_misc")
        .finish("compressed_tensors_is_reproduced_on_ragged_shapes_and_other_source_types", &[]);
}

/// Every weight of the two fused sets, with its set's peak, and the file's tensors `NAME.TENSOR`.
fn compare_fused(
    file_name: &str,
    format: &str,
    tensors: [&str; 3],
    ours: impl Fn(&Input, f32) -> BTreeMap<&'static str, Vec<u8>>,
) -> Tally {
    let bytes = file(file_name);
    let all = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let inputs = inputs();
    let mut tally = Tally::default();
    for set in [&["q", "k", "v"][..], &["gate", "up"]] {
        let input = |name: &str| &inputs[&format!("fused.{name}")];
        let peak = set.iter().map(|name| input(name).peak()).fold(0.0, f32::max);
        for name in set {
            let ours = ours(input(name), peak);
            for tensor in tensors {
                let theirs = all.tensor(&format!("fused/nvfp4/{name}.{tensor}")).expect("there");
                tally.compare(format, format!("{name}.{tensor}"), &ours[tensor], theirs.data());
            }
        }
    }
    tally
}

#[test]
fn weights_that_engines_fuse_share_the_global_scale_of_compressed_tensors() {
    compare_fused(
        "ct_misc.safetensors",
        ct_format("nvfp4"),
        ["weight_packed", "weight_scale", "weight_global_scale"],
        |input, peak| make(nvfp4(CT), input, peak).as_compressed_tensors(false, DType::BF16),
    )
    .finish("weights_that_engines_fuse_share_the_global_scale_of_compressed_tensors", &[]);
}

#[test]
fn weights_that_engines_fuse_share_the_global_scale_of_modelopt() {
    compare_fused(
        "modelopt.safetensors",
        modelopt_format("nvfp4"),
        ["weight", "weight_scale", "weight_scale_2"],
        |input, peak| make(nvfp4(Rounding::ModelOpt), input, peak).as_modelopt(),
    )
    .finish("weights_that_engines_fuse_share_the_global_scale_of_modelopt", &[]);
}

/// A weight in memory, for the executor.
struct Rows(Input, Shape);

impl TensorSource for Rows {
    fn dtype(&self) -> DType {
        self.0.dtype
    }

    fn shape(&self) -> &Shape {
        &self.1
    }

    fn rows(&self, range: Range<u64>) -> io::Result<Cow<'_, [u8]>> {
        let row = self.0.bytes.len() / self.0.rows;
        Ok(self.0.bytes[range.start as usize * row..range.end as usize * row].into())
    }
}

/// Planes by job and index.
#[derive(Default)]
struct Memory(Mutex<BTreeMap<(usize, usize), Vec<u8>>>);

impl Sink for Memory {
    fn write(&self, job: usize, plane: usize, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut planes = self.0.lock().expect("no panics");
        let plane = planes.entry((job, plane)).or_default();
        let end = offset as usize + bytes.len();
        plane.resize(plane.len().max(end), 0);
        plane[offset as usize..end].copy_from_slice(bytes);
        Ok(())
    }

    fn complete(&self, _: usize, _: &crate::quantize::ErrorSum) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn weights_of_one_set_in_any_source_get_the_packages_shared_scale_when_streamed() {
    let inputs = inputs();
    let set = ["q", "k", "v"].map(|name| inputs[&format!("fused.{name}")].clone());
    let peak = set.iter().map(Input::peak).fold(0.0, f32::max);
    for rounding in [CT, Rounding::ModelOpt] {
        let method = Method::Grid(nvfp4(rounding));
        let jobs: Vec<Job<'_>> = set
            .iter()
            .map(|input| {
                let shape = Shape::from([input.rows as u64, input.cols as u64]);
                let source = Box::new(Rows(input.clone(), shape));
                Job {
                    source,
                    planes: None,
                    stored_bytes: None,
                    method: &method,
                    importance: None,
                    share: Some(7),
                    may_be_infinite: false,
                }
            })
            .collect();
        let (sink, cancelled) = (Memory::default(), AtomicBool::new(false));
        execute(&jobs, Workers { threads: 2, cancelled: &cancelled }, &sink).expect("finite");
        let planes = sink.0.into_inner().expect("no panics");
        for (job, input) in set.iter().enumerate() {
            let want = make(nvfp4(rounding), input, peak).planes;
            for (p, plane) in want.iter().enumerate() {
                assert!(planes[&(job, p)] == *plane, "{rounding:?} {job} {p}");
            }
        }
    }
}

#[test]
fn modelopt_is_reproduced() {
    let bytes = file("modelopt.safetensors");
    let all = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let inputs = inputs();
    let mut tally = Tally::default();
    for (name, view) in all.iter() {
        let parts: Vec<&str> = name.split('/').collect();
        if parts[0] == "fused" {
            continue;
        }
        let input = &inputs[parts[0]];
        let made = make(modelopt_grid(parts[1]), input, input.peak());
        if let Some(row) = made.lost {
            tally.lost.insert(format!("{}/{} row {row}", parts[0], parts[1]));
        }
        let ours = &made.as_modelopt()[parts[2]];
        tally.compare(modelopt_format(parts[1]), name.to_owned(), ours, view.data());
    }
    // A row of zeros is 0/0, and 4 · 2^126 the nearest fp4 to the largest bf16.
    let lost = ["edge/fp8_pc_pt row 0", "edge/mxfp4 row 8", "edge/mxfp8 row 8"];
    tally.finish("modelopt_is_reproduced", &lost);
}

#[test]
fn the_fine_grained_fp8_of_transformers_is_reproduced() {
    let bytes = file("other.safetensors");
    let all = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let mut inputs = inputs();
    let mut normal = inputs["normal"].clone();
    normal.rows += inputs["outlier"].rows;
    normal.bytes.extend_from_slice(&inputs["outlier"].bytes);
    inputs.insert("normal".into(), normal);
    let mut tally = Tally::default();
    for (name, view) in all.iter().filter(|(name, _)| name.starts_with("hf_finegrained_fp8")) {
        let parts: Vec<&str> = name.split('/').collect();
        let input = &inputs[parts[1]];
        let block = [128.min(input.rows as u64), 128];
        let grid = match parts[0].ends_with("ue8m0") {
            true => mx(DType::F8E4M3, block, Rounding::Transformers),
            false => {
                let mut grid = Grid::absmax(DType::F8E4M3, block, DType::F32);
                grid.rounding = Rounding::Transformers;
                grid
            }
        };
        let made = make(grid, input, input.peak());
        if let Some(row) = made.lost {
            tally.lost.insert(format!("{}/{} row {row}", parts[0], parts[1]));
        }
        let ours = if parts[2] == "weight" { &made.planes[0][..] } else { made.plane(role::SCALE) };
        tally.compare("transformers fine-grained fp8", name.to_owned(), ours, view.data());
    }
    tally.finish(
        "the_fine_grained_fp8_of_transformers_is_reproduced",
        &["hf_finegrained_fp8_ue8m0/edge row 8"],
    );
}

/// Outputs of ModelOpt, or of compressed-tensors, that are stored as digests.
fn compare_digests(of_modelopt: bool) -> Tally {
    let manifest: serde_json::Value = serde_json::from_slice(&file("manifest.json")).expect("JSON");
    let inputs = inputs();
    let mut tally = Tally::default();
    for (key, tensors) in manifest["hash_only"].as_object().expect("an object") {
        let (case, format) = key.rsplit_once('/').expect("CASE/FORMAT");
        let (package, case) = case.split_once(' ').unwrap_or(("", case));
        let Some(input) = inputs.get(case) else {
            // What compressed-tensors reads from transformers' blocks.
            assert!(key.starts_with("hf_finegrained_fp8/"), "{key}");
            continue;
        };
        if (package == "modelopt") != of_modelopt {
            continue;
        }
        let (published, ours) = if of_modelopt {
            let made = make(modelopt_grid(format), input, input.peak());
            (modelopt_format(format), made.as_modelopt())
        } else {
            let made = make(ct_grid(format, input.dtype), input, input.peak());
            let ours = made.as_compressed_tensors(format.ends_with("_pack"), input.dtype);
            (ct_format(format), ours)
        };
        for (tensor, record) in tensors.as_object().expect("an object") {
            if tensor != "weight_shape" {
                let digest = hex(&ours[tensor.as_str()]);
                let theirs = record[2].as_str().expect("a digest").as_bytes();
                tally.compare(published, format!("{key}/{tensor}"), digest.as_bytes(), theirs);
            }
        }
    }
    tally
}

#[test]
fn outputs_of_compressed_tensors_known_by_their_digest_alone_are_reproduced() {
    compare_digests(false)
        .finish("outputs_of_compressed_tensors_known_by_their_digest_alone_are_reproduced", &[]);
}

#[test]
fn outputs_of_modelopt_known_by_their_digest_alone_are_reproduced() {
    compare_digests(true)
        .finish("outputs_of_modelopt_known_by_their_digest_alone_are_reproduced", &[]);
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// Scales of blocks of one bf16 each, every positive finite magnitude once.
fn scales_of_every_magnitude(grid: &Grid) -> Vec<f32> {
    let scale = Element::new(grid.scale).expect("codec");
    let cols = grid.block[1].max(1) as usize;
    let all: Vec<u16> = (1..0x7f80).collect();
    let bytes: Vec<u8> = all
        .iter()
        .flat_map(|&h| std::iter::once(h).chain(std::iter::repeat_n(0, cols - 1)))
        .flat_map(u16::to_le_bytes)
        .collect();
    let input = Input { dtype: DType::BF16, rows: all.len(), cols, bytes };
    let encoding = grid.encoding();
    let plan =
        GridPlan::new(grid, &encoding, DType::BF16, [input.rows, cols], None).expect("legal");
    let mut planes = vec![Vec::new(); encoding.planes.len()];
    // Lost blocks keep the scale that the package gives them.
    let _ = plan.encode(&mut input.values(), None, &mut planes);
    planes[1]
        .chunks_exact(grid.scale.bytes().expect("whole bytes") as usize)
        .map(|code| {
            let mut word = [0; 4];
            word[..code.len()].copy_from_slice(code);
            scale.decode(u32::from_le_bytes(word))
        })
        .collect()
}

#[test]
fn scales_and_casts_are_those_of_compressed_tensors_for_every_bf16() {
    let manifest: serde_json::Value = serde_json::from_slice(&file("manifest.json")).expect("JSON");
    let want = |name: &str| manifest["exhaustive_tables"][name][2].as_str().expect("a digest");
    let bf16 = |values: &[f32]| -> Vec<u8> {
        values.iter().flat_map(|v| mini::bf16_bits(*v).to_le_bytes()).collect()
    };
    let mut tally = Tally::default();
    let mut compare = |name: &str, bytes: &[u8]| {
        let (ours, want) = (hex(bytes), want(name));
        tally.compare("table", name.to_owned(), ours.as_bytes(), want.as_bytes());
    };
    for (name, format) in [
        ("int8_sym_scale_bf16", "int8_g128"),
        ("int4_sym_scale_bf16", "int4_g128"),
        ("fp8_scale_bf16", "fp8_ch"),
        ("mxfp4_scale_bf16", "mxfp4"),
        ("mxfp8_scale_bf16", "mxfp8"),
    ] {
        let mut scales = scales_of_every_magnitude(&ct_grid(format, DType::BF16));
        if format.starts_with("mx") {
            // The table has the scale itself, which overflows for the largest magnitudes; the byte for it says 2^0.
            let from = scales.iter().rposition(|s| *s > 1.0).expect("large scales") + 1;
            scales[from..].fill(f32::INFINITY);
        }
        compare(name, &bf16(&scales));
    }
    let globals: Vec<u8> = (1..0x7f80u16)
        .flat_map(|h| {
            let grid = nvfp4(CT);
            let peak = mini::bf16_value(h);
            let plan = GridPlan::new(&grid, &grid.encoding(), DType::BF16, [1, 16], Some(peak))
                .expect("legal");
            let multiplier =
                f32::from_le_bytes(plan.whole_planes()[0].1[..].try_into().expect("one"));
            mini::bf16_value(mini::bf16_bits(1.0 / multiplier)).to_le_bytes()
        })
        .collect();
    compare("nvfp4_global_scale_f32", &globals);
    let finite = || (0..=u16::MAX).filter(|h| h & 0x7fff < 0x7f80).map(mini::bf16_value);
    let e4m3 = Element::new(DType::F8E4M3).expect("codec");
    let casts: Vec<u8> = finite().map(|v| e4m3.encode(v) as u8).collect();
    compare("bf16_to_e4m3_clamped_u8", &casts);
    let e2m1 = Element::new(DType::F4E2M1).expect("codec");
    let casts: Vec<f32> = finite().map(|v| e2m1.decode(e2m1.encode(v))).collect();
    compare("bf16_to_fp4_value_bf16", &bf16(&casts));
    assert_eq!(tally.differing, [] as [String; 0]);
    assert_eq!(tally.equal["table"], 8);
}

#[test]
fn a_scale_type_that_holds_the_sources_takes_the_same_scale() {
    let input = &inputs()["normal"];
    for format in ["fp8_tensor", "fp8_ch", "int8_g128"] {
        let narrow = make(ct_grid(format, DType::BF16), input, input.peak());
        let mut grid = ct_grid(format, DType::BF16);
        grid.scale = DType::F32;
        let wide = make(grid, input, input.peak());
        assert!(narrow.planes[0] == wide.planes[0], "{format}");
        let as_bf16: Vec<u8> =
            wide.plane(role::SCALE).as_chunks::<4>().0.iter().flat_map(|b| [b[2], b[3]]).collect();
        assert!(narrow.plane(role::SCALE) == as_bf16, "{format}");
    }
}

#[test]
fn an_unrounded_quotient_changes_codes_by_one_and_no_scale() {
    let input = &inputs()["big"];
    for (format, least, most) in
        [("int8_g128", 0.05, 0.2), ("int4_g128", 0.001, 0.02), ("int8_g128_asym", 0.05, 0.3)]
    {
        let cpu = make(ct_grid(format, DType::BF16), input, input.peak());
        let mut grid = ct_grid(format, DType::BF16);
        grid.rounding = Rounding::CompressedTensorsF32;
        let gpu = make(grid, input, input.peak());
        assert!(cpu.plane(role::SCALE) == gpu.plane(role::SCALE), "{format}");
        assert!(cpu.plane(role::ZERO) == gpu.plane(role::ZERO), "{format}");
        let (a, b) = (cpu.codes().concat(), gpu.codes().concat());
        assert!(a.iter().zip(&b).all(|(a, b)| a.abs_diff(*b) <= 1), "{format}");
        let share = a.iter().zip(&b).filter(|(a, b)| a != b).count() as f64 / a.len() as f64;
        assert!((least..most).contains(&share), "{format}: {share}");
        let error = |made: &Made| -> f64 {
            made.decoded().iter().zip(input.values()).map(|(d, v)| f64::from(d - v).powi(2)).sum()
        };
        assert!(error(&gpu) < error(&cpu), "{format}");
    }
}

#[test]
fn what_a_package_refuses_is_refused() {
    let why = |grid: Grid, source: DType, cols: u64| {
        Encoder::new(&Method::Grid(grid), source, 130, cols, Some(Whole { peak: 1.0 }))
            .err()
            .map(|e: MethodError| e.to_string())
            .unwrap_or_default()
    };
    assert_eq!(
        why(ct_grid("int8_g128_pack", DType::BF16), DType::BF16, 320),
        "compressed-tensors has no short groups: 320 columns are no multiple of 128"
    );
    assert!(
        why(ct_grid("int8_g128_pack", DType::BF16), DType::F32, 256)
            .starts_with("compressed-tensors gives scales the type of the weight, which is f32")
    );
    assert!(why(modelopt_grid("int8_wo"), DType::F64, 256).starts_with("modelopt has no rule for"));
    let mut grid = Grid::absmax(DType::I8, [1, 0], DType::BF16);
    grid.rounding = Rounding::ModelOpt;
    assert!(
        why(grid.clone(), DType::BF16, 256).starts_with("modelopt has no encoding i8*bf16[1x*]")
    );
    grid.rounding = Rounding::CompressedTensors;
    assert_eq!(why(grid, DType::BF16, 256), "");
}

#[test]
fn every_row_of_zeros_that_modelopt_makes_nan_is_refused_by_its_number() {
    let grid = modelopt_grid("fp8_pc_pt");
    let encoder = Encoder::new(&Method::Grid(grid), DType::BF16, 3, 32, None).expect("legal");
    let mut rows = [0x80, 0x3f].repeat(96);
    rows[64..128].fill(0);
    let error = encoder.encode(0, &rows, &mut PlaneBuffers::new()).expect_err("a zero row");
    assert_eq!(error, EncodeError::Lost { rounding: Rounding::ModelOpt, row: 1 });
    assert_eq!(
        error.to_string(),
        "rounding \"modelopt\" turns finite values into NaN or infinity in the block of row 1, as modelopt itself \
         does; rounding \"rad\" does not"
    );
}

/// Every grid that some package has, in the source type given.
fn package_grids(source: DType) -> Vec<Grid> {
    let mut grids: Vec<Grid> = [
        "int8_ch",
        "int4_g32",
        "int8_g32",
        "int8_g32_asym",
        "int4_g32_asym",
        "int8_ch_asym",
        "fp8_ch",
        "fp8_tensor",
        "fp8_block",
        "nvfp4",
        "mxfp4",
        "mxfp8",
    ]
    .into_iter()
    .flat_map(|format| {
        let cpu = ct_grid(format, source);
        [Grid { rounding: Rounding::CompressedTensorsF32, ..cpu.clone() }, cpu]
    })
    .collect();
    for format in
        ["nvfp4", "mxfp4", "mxfp8", "fp8_tensor", "fp8_pc_pt", "fp8_pb_wo", "int8_wo", "int4_awq"]
    {
        let grid = modelopt_grid(format);
        let block = if grid.block[1] == 128 && grid.block[0] == 1 { [1, 32] } else { grid.block };
        grids.push(Grid { block, ..grid });
    }
    let blocks = Grid::absmax(DType::F8E4M3, [2, 32], DType::F32);
    grids.push(Grid { rounding: Rounding::Transformers, ..blocks });
    grids.push(mx(DType::F8E4M3, [2, 32], Rounding::Transformers));
    grids
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn finite_values_of_any_size_decode_to_finite_ones_or_are_refused(
        bits in prop::collection::vec(any::<u32>(), 3 * 64), spread in any::<bool>(),
    ) {
        for source in [DType::BF16, DType::F16, DType::F32] {
            let element = Element::new(source).expect("codec");
            let width = source.bytes().expect("whole bytes") as usize;
            let bytes: Vec<u8> = bits
                .iter()
                .flat_map(|b| {
                    // Any pattern, or patterns of similar size.
                    let b = if spread { *b } else { b & 0x80ff_ffff | 0x3c00_0000 };
                    let x = element.decode(if source == DType::F32 { b } else { b >> 16 });
                    element.encode(if x.is_finite() { x } else { 0.0 }).to_le_bytes()[..width].to_vec()
                })
                .collect();
            let input = Input { dtype: source, rows: 3, cols: 64, bytes };
            for grid in package_grids(source) {
                let made = make(grid, &input, input.peak());
                let finite = made.decoded().iter().all(|v| v.is_finite());
                // Infinite scales over zeros, and the like, are refused though what is left is finite.
                prop_assert!(finite || made.lost.is_some(), "{}", made.grid.encoding());
            }
        }
    }
}
