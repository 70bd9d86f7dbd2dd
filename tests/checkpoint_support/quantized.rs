//! Weights that other software quantized (fixtures/quant-sources), as checkpoints, and what is read of them.
#![allow(dead_code)] // each test binary uses its own part

use std::collections::BTreeMap;
use std::fs;

use half::bf16;
use radpack::checkpoint::Checkpoint;
use radpack::model::{self, Weight};
use radpack::quantize::{Decoder, PlaneSlice};
use radpack::tensor::{DType, PlaneLayout};
use safetensors::SafeTensors;

use super::{Model, Tensor, file};

/// Type, shape and bytes by name.
pub type Golden = BTreeMap<String, (&'static str, Vec<u64>, Vec<u8>)>;

const DTYPES: [&str; 9] = ["U8", "I8", "F8_E4M3", "F8_E8M0", "BF16", "F16", "F32", "I32", "I64"];

pub fn golden(file: &str) -> Golden {
    let path = format!("{}/fixtures/quant-sources/{file}.safetensors", env!("CARGO_MANIFEST_DIR"));
    let bytes = fs::read(path).expect("the fixture");
    let all = SafeTensors::deserialize(&bytes).expect("safetensors");
    all.iter()
        .map(|(name, view)| {
            let found = view.dtype().to_string();
            let dtype = DTYPES.into_iter().find(|d| *d == found);
            let dtype = dtype.unwrap_or_else(|| panic!("{name}: {found}"));
            let shape = view.shape().iter().map(|&n| n as u64).collect();
            (name.to_owned(), (dtype, shape, view.data().to_vec()))
        })
        .collect()
}

/// A checkpoint of the tensors under `prefix`, except those named; `config` is its quantization_config.
pub fn checkpoint(
    all: &Golden,
    prefix: &str,
    except: &[&str],
    config: &str,
) -> (Model, Checkpoint) {
    let tensors: Vec<Tensor> = all
        .iter()
        .filter_map(|(name, (dtype, shape, bytes))| {
            let leaf = name.strip_prefix(prefix)?;
            (!except.contains(&leaf)).then(|| Tensor {
                name: format!("w.{leaf}"),
                dtype,
                shape: shape.clone(),
                bytes: bytes.clone(),
            })
        })
        .collect();
    assert!(!tensors.is_empty(), "{prefix}");
    of(&tensors, config)
}

pub fn of(tensors: &[Tensor], config: &str) -> (Model, Checkpoint) {
    let model = Model::new();
    model.put("model.safetensors", &file(tensors));
    if !config.is_empty() {
        model.put("config.json", format!("{{\"quantization_config\": {config}}}").as_bytes());
    }
    let opened = model.opened();
    if let Err(refusal) = opened.refuse_quantized() {
        panic!("{refusal}");
    }
    (model, opened)
}

/// The only weight.
pub fn weight(checkpoint: &Checkpoint) -> Weight {
    let table = model::weights_only(None, checkpoint.tensors()).expect("weights");
    assert_eq!(table.weights.len(), 1, "{:?}", checkpoint.tensors());
    let mut weight = table.weights[0].clone();
    weight.stored = checkpoint.stored(&weight);
    weight
}

/// Its values, read in blocks of three rows.
pub fn decoded(checkpoint: &Checkpoint, weight: &Weight) -> Vec<f32> {
    let source = checkpoint.source(weight).expect("a source");
    assert_eq!(source.dtype(), weight.dtype);
    let (rows, _) = weight.shape.matrix().expect("a matrix");
    let mut values = Vec::new();
    for start in (0..rows).step_by(3) {
        let bytes = source.rows(start..rows.min(start + 3)).expect("rows");
        match weight.dtype {
            DType::BF16 => values
                .extend(bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())),
            DType::F32 => {
                values.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)))
            }
            other => panic!("{other}"),
        }
    }
    values
}

/// The values as bf16 bits.
pub fn as_bf16(values: &[f32]) -> Vec<u16> {
    values.iter().map(|&v| bf16::from_f32(v).to_bits()).collect()
}

/// Every plane of a weight that can be kept.
pub fn planes(checkpoint: &Checkpoint, weight: &Weight) -> Vec<Vec<u8>> {
    let source = checkpoint.planes(weight).expect("planes");
    let stored = weight.stored.as_ref().expect("quantized").planes.as_ref().expect("kept");
    assert_eq!(**stored, *source.encoding());
    let (rows, cols) = weight.shape.matrix().expect("a matrix");
    let mut out = Vec::new();
    for (n, plane) in source.encoding().planes.iter().enumerate() {
        let (plane_rows, _) = plane.grid(rows, cols);
        let mut bytes = Vec::new();
        let step = if matches!(plane.layout, PlaneLayout::Table { .. }) { plane_rows } else { 3 };
        for start in (0..plane_rows).step_by(step as usize) {
            let end = plane_rows.min(start + step);
            bytes.extend_from_slice(&source.plane_rows(n, start..end).expect("plane rows"));
        }
        assert_eq!(bytes.len() as u64, plane.bytes(rows, cols).expect("small"), "{}", plane.role);
        out.push(bytes);
    }
    out
}

/// What a container reader makes of the kept planes.
pub fn kept_values(checkpoint: &Checkpoint, weight: &Weight) -> Vec<f32> {
    let planes = planes(checkpoint, weight);
    let encoding = checkpoint.planes(weight).expect("planes").encoding().clone();
    let (rows, cols) = weight.shape.matrix().expect("a matrix");
    let decoder = Decoder::new(&encoding, rows, cols).expect("an encoding of the container");
    let slices: Vec<PlaneSlice<'_>> = planes.iter().map(|p| PlaneSlice::whole(p)).collect();
    let mut values = vec![0f32; (rows * cols) as usize];
    decoder.decode(0..rows, &slices, &mut values).expect("decodes");
    values
}

/// Kept planes stand for the decoded values, bit for bit.
pub fn keeps_exactly(checkpoint: &Checkpoint, weight: &Weight, name: &str) {
    let (kept, decoded) = (kept_values(checkpoint, weight), decoded(checkpoint, weight));
    for (at, (k, d)) in kept.iter().zip(&decoded).enumerate() {
        let k = if weight.dtype == DType::BF16 { bf16::from_f32(*k).to_f32() } else { *k };
        let same = k.to_bits() == d.to_bits() || (k.is_nan() && d.is_nan());
        assert!(same, "{name}: element {at}: kept {k:e}, decoded {d:e}");
    }
}

/// Little-endian floats.
pub fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}
