//! What our encoder makes of an input, in the shape that the packages' tensors have.

use std::collections::BTreeMap;

use safetensors::SafeTensors;

use crate::num::{Element, mini, pack, unpack, widen};
use crate::quantize::grid::GridPlan;
use crate::quantize::{Decoder, EncodeError, Encoder, PlaneBuffers, PlaneSlice, Whole, peak};
use crate::recipe::{Grid, Method};
use crate::tensor::{DType, role};

use super::file;

/// One matrix and its type.
#[derive(Clone)]
pub(super) struct Input {
    pub(super) dtype: DType,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) bytes: Vec<u8>,
}

impl Input {
    pub(super) fn values(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.rows * self.cols];
        widen(self.dtype, &self.bytes, &mut values).expect("a float type");
        values
    }

    /// The first rows, converted.
    pub(super) fn head(&self, rows: usize, dtype: DType) -> Input {
        let element = Element::new(dtype).expect("codec");
        let width = dtype.bytes().expect("whole bytes") as usize;
        let values = self.values();
        let bytes = values[..rows * self.cols]
            .iter()
            .flat_map(|v| element.encode(*v).to_le_bytes()[..width].to_vec())
            .collect();
        Input { dtype, rows, cols: self.cols, bytes }
    }

    pub(super) fn peak(&self) -> f32 {
        peak(self.dtype, &self.bytes).expect("finite")
    }
}

/// The inputs of the fixtures, and those made from a seed.
pub(super) fn inputs() -> BTreeMap<String, Input> {
    let bytes = file("inputs.safetensors");
    let all = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let mut out: BTreeMap<String, Input> = all
        .iter()
        .map(|(name, view)| {
            let [rows, cols] = *view.shape() else { panic!("{name} is no matrix") };
            let bytes = view.data().to_vec();
            (name.to_owned(), Input { dtype: DType::BF16, rows, cols, bytes })
        })
        .collect();
    for (dtype, name) in [(DType::F32, "normal8_f32"), (DType::F16, "normal8_f16")] {
        out.insert(name.into(), out["normal"].head(8, dtype));
    }
    let generated = |seed, rows: usize, cols: usize, mask| Input {
        dtype: DType::BF16,
        rows,
        cols,
        bytes: (0..(rows * cols) as u64).flat_map(|i| bits(seed + i, mask).to_le_bytes()).collect(),
    };
    assert!(generated(1, 64, 512, 0).bytes == out["normal"].bytes);
    assert!(generated(2, 64, 512, 0x3ff).bytes == out["outlier"].bytes);
    out.insert("big".into(), generated(3, 256, 1024, 0xfff));
    out
}

/// One generated bf16: splitmix64, magnitudes spread over exponents, rare outliers.
fn bits(state: u64, mask: u64) -> u16 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let u = z ^ (z >> 31);
    let drop = ((u >> 32) as u16).leading_zeros() as u16;
    let outlier = if mask != 0 && u & mask == 0 { 5 } else { 0 };
    ((u >> 63) as u16) << 15 | (121 - drop + outlier) << 7 | (u >> 56) as u16 & 0x7f
}

/// What our encoder made.
pub(super) struct Made {
    pub(super) grid: Grid,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) planes: Vec<Vec<u8>>,
    /// First row that an encoder refuses.
    pub(super) lost: Option<u64>,
}

/// Encodes with the arithmetic itself, whatever becomes of the values, and holds the encoder, fed in the smallest
/// pieces that it allows, to the same planes or to a refusal.
pub(super) fn make(grid: Grid, input: &Input, peak: f32) -> Made {
    let Input { dtype, rows, cols, .. } = *input;
    let encoding = grid.encoding();
    let plan = GridPlan::new(&grid, &encoding, dtype, [rows, cols], Some(peak)).expect("legal");
    let mut planes = vec![Vec::new(); encoding.planes.len()];
    for (i, bytes) in plan.whole_planes() {
        planes[i] = bytes;
    }
    let arithmetic = plan.encode(&mut input.values(), None, &mut planes);

    let method = Method::Grid(grid.clone());
    let whole = Encoder::needs_peak(&method).then_some(Whole { peak });
    let encoder = Encoder::new(&method, dtype, rows as u64, cols as u64, whole).expect("legal");
    let step = encoder.row_block() as usize * encoder.source_row_bytes();
    let mut lost = None;
    let mut buffers = PlaneBuffers::new();
    for (i, piece) in input.bytes.chunks(step).enumerate() {
        let first = i as u64 * encoder.row_block();
        match encoder.encode(first, piece, &mut buffers) {
            Ok(_) => {
                for (p, plane) in
                    planes.iter().enumerate().filter(|(p, _)| !buffers.plane(*p).is_empty())
                {
                    let at = encoder.plane_offset(p, first) as usize;
                    let ours = buffers.plane(p);
                    assert!(
                        plane[at..at + ours.len()] == *ours,
                        "{encoding} plane {p} row {first}"
                    );
                }
            }
            Err(EncodeError::Lost { rounding, row }) => {
                assert_eq!(rounding, grid.rounding);
                lost = lost.or(Some(row));
            }
            Err(other) => panic!("{encoding}: {other}"),
        }
    }
    assert!(arithmetic.is_ok() || lost.is_some(), "{encoding}: {arithmetic:?}");
    Made { grid, rows, cols, planes, lost }
}

impl Made {
    pub(super) fn plane(&self, role: &str) -> &[u8] {
        let at = self.grid.encoding().plane(role).map_or(usize::MAX, |(i, _)| i);
        self.planes.get(at).map_or(&[], Vec::as_slice)
    }

    /// Rows of `width` codes of `bits` bits.
    fn unpacked(bytes: &[u8], bits: u32, width: usize) -> Vec<Vec<u32>> {
        bytes
            .chunks_exact((width * bits as usize).div_ceil(8))
            .map(|row| {
                let mut codes = vec![0; width];
                unpack(row, bits, &mut codes);
                codes
            })
            .collect()
    }

    /// Codes; signed ones by their distance from the least.
    pub(super) fn codes(&self) -> Vec<Vec<u32>> {
        let bits = self.grid.codes.bits();
        let flip = if self.grid.codes.is_signed_int() { 1 << (bits - 1) } else { 0 };
        let mut codes = Made::unpacked(&self.planes[0], bits, self.cols);
        codes.iter_mut().flatten().for_each(|c| *c ^= flip);
        codes
    }

    pub(super) fn decoded(&self) -> Vec<f32> {
        let decoder = Decoder::new(&self.grid.encoding(), self.rows as u64, self.cols as u64)
            .expect("decodes");
        let planes: Vec<PlaneSlice<'_>> =
            self.planes.iter().map(|p| PlaneSlice::whole(p)).collect();
        let mut out = vec![0f32; self.rows * self.cols];
        decoder.decode(0..self.rows as u64, &planes, &mut out).expect("whole planes");
        out
    }

    /// bf16 of the decoded values; one NaN for all of them.
    fn dequant(&self) -> Vec<u8> {
        self.decoded().iter().flat_map(|v| canonical(mini::bf16_bits(*v)).to_le_bytes()).collect()
    }

    /// The tensors that compressed-tensors would write.
    pub(super) fn as_compressed_tensors(
        &self,
        packed: bool,
        source: DType,
    ) -> BTreeMap<&'static str, Vec<u8>> {
        let mut out = BTreeMap::new();
        let scale = self.plane(role::SCALE).to_vec();
        out.insert("weight_scale", scale);
        if self.grid.scale2.is_some() {
            let multiplier = f32::from_le_bytes(self.plane(role::SCALE_1).try_into().expect("one"));
            let e = Element::new(source).expect("codec");
            let g = e.decode(e.encode(1.0 / multiplier));
            out.insert("weight_global_scale", g.to_le_bytes().to_vec());
        }
        let (bits, int) = (self.grid.codes.bits(), !self.grid.codes.is_float());
        if int && packed {
            out.insert("weight_packed", words(&self.codes(), bits));
            if let Some(zero) = self.grid.zero {
                let groups = self.cols / self.grid.block[1] as usize;
                let zeros = Made::unpacked(self.plane(role::ZERO), zero.bits(), groups);
                let columns: Vec<Vec<u32>> =
                    (0..groups).map(|g| zeros.iter().map(|row| row[g]).collect()).collect();
                // Packed down the rows, a word of every group side by side.
                let packed = words(&columns, bits);
                let per_column = packed.len() / groups;
                let bytes = (0..per_column / 4)
                    .flat_map(|w| {
                        (0..groups)
                            .flat_map(move |g| (0..4).map(move |b| g * per_column + 4 * w + b))
                    })
                    .map(|at| packed[at])
                    .collect();
                out.insert("weight_zero_point", bytes);
            }
        } else if bits == 4 {
            out.insert("weight_packed", self.planes[0].clone());
        } else {
            out.insert("weight", self.planes[0].clone());
        }
        out.insert("dequant", self.dequant());
        out
    }

    /// The tensors that ModelOpt would write.
    pub(super) fn as_modelopt(&self) -> BTreeMap<&'static str, Vec<u8>> {
        let mut out = BTreeMap::new();
        out.insert("weight_scale", self.plane(role::SCALE).to_vec());
        out.insert("weight_scale_2", self.plane(role::SCALE_1).to_vec());
        let weight = match self.grid.codes {
            DType::I4 => {
                // Two rows to a byte, two's complement.
                let codes = Made::unpacked(&self.planes[0], 4, self.cols);
                codes
                    .chunks_exact(2)
                    .flat_map(|pair| pair[0].iter().zip(&pair[1]).map(|(a, b)| (a | b << 4) as u8))
                    .collect()
            }
            _ => self.planes[0].clone(),
        };
        out.insert("weight", weight);
        out
    }
}

pub(super) fn canonical(bf16: u16) -> u16 {
    if bf16 & 0x7fff > 0x7f80 { 0x7fc0 } else { bf16 }
}

/// Rows of codes in little-endian 32-bit words; rows start on words.
fn words(rows: &[Vec<u32>], bits: u32) -> Vec<u8> {
    let mut out = Vec::new();
    for row in rows {
        let start = out.len();
        out.resize(start + (row.len() * bits as usize).div_ceil(32) * 4, 0);
        let n = (row.len() * bits as usize).div_ceil(8);
        pack(row, bits, &mut out[start..start + n]);
    }
    out
}
