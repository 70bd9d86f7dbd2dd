//! Builders of checkpoint files for the tests of `radpack::checkpoint`.
#![allow(dead_code)] // each test binary uses its own part

pub mod large;
pub mod quantized;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use radpack::checkpoint::{Checkpoint, OpenOptions};
use radpack::diag::Failure;

/// A safetensors file of this header text and these tensor bytes.
pub fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(data);
    file
}

/// A tensor of `F32`, `BF16`, … with its bytes.
#[derive(Debug, Clone)]
pub struct Tensor {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

/// A tensor of `f32` values counting from `first`.
pub fn counting(name: &str, shape: &[u64], first: u32) -> Tensor {
    let elements: u64 = shape.iter().product();
    let bytes = (0..elements).flat_map(|i| ((u64::from(first) + i) as f32).to_le_bytes()).collect();
    Tensor { name: name.to_owned(), dtype: "F32", shape: shape.to_vec(), bytes }
}

/// The header text of tensors that follow one another.
pub fn header(tensors: &[Tensor]) -> String {
    let mut text = String::from("{");
    let mut at = 0;
    for (i, t) in tensors.iter().enumerate() {
        let comma = if i == 0 { "" } else { "," };
        let end = at + t.bytes.len();
        write!(
            text,
            "{comma}{}:{{\"dtype\":\"{}\",\"shape\":{:?},\"data_offsets\":[{at},{end}]}}",
            serde_json::to_string(&t.name).expect("a string"),
            t.dtype,
            t.shape
        )
        .expect("written");
        at = end;
    }
    text.push('}');
    text
}

/// A sound safetensors file.
pub fn file(tensors: &[Tensor]) -> Vec<u8> {
    let data: Vec<u8> = tensors.iter().flat_map(|t| t.bytes.clone()).collect();
    raw(&header(tensors), &data)
}

/// A folder of files that is removed at the end.
pub struct Model {
    dir: tempfile::TempDir,
}

impl Model {
    pub fn new() -> Model {
        Model { dir: tempfile::tempdir().expect("a temporary folder") }
    }

    /// A model with a config and one weight file of two tensors.
    pub fn small() -> Model {
        let model = Model::new();
        model.put("config.json", br#"{"model_type": "llama"}"#);
        model.put(
            "model.safetensors",
            &file(&[counting("a", &[2, 3], 0), counting("b", &[4], 100)]),
        );
        model
    }

    /// A model of two shards with an index: `a` and `b` in the first, `c` in the second.
    pub fn sharded() -> Model {
        let model = Model::new();
        model.put("config.json", b"{}");
        model.put(SHARDS[0], &file(&[counting("a", &[2, 3], 0), counting("b", &[4], 100)]));
        model.put(SHARDS[1], &file(&[counting("c", &[3], 200)]));
        model.index(&[("a", SHARDS[0]), ("b", SHARDS[0]), ("c", SHARDS[1])]);
        model
    }

    pub fn index(&self, map: &[(&str, &str)]) {
        let map: serde_json::Map<String, serde_json::Value> =
            map.iter().map(|(t, f)| ((*t).to_owned(), (*f).into())).collect();
        let text =
            serde_json::json!({"metadata": {"total_size": 0}, "weight_map": map}).to_string();
        self.put("model.safetensors.index.json", text.as_bytes());
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn put(&self, name: &str, bytes: &[u8]) {
        let path = self.at(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("created");
        fs::write(path, bytes).expect("written");
    }

    pub fn remove(&self, name: &str) {
        fs::remove_file(self.at(name)).expect("removed");
    }

    pub fn open(&self) -> Result<Checkpoint, Failure> {
        open(self.path())
    }

    pub fn opened(&self) -> Checkpoint {
        self.open().unwrap_or_else(|failure| panic!("{failure}"))
    }

    /// The messages of the problems that opening ends in, with the folder as `DIR`.
    pub fn problems(&self) -> Vec<String> {
        problems(&self.open().expect_err("a failure"), self.path())
    }

    /// The notes of a successful opening.
    pub fn notes(&self) -> Vec<String> {
        self.opened().notes().iter().map(|n| n.message.clone()).collect()
    }
}

/// Names of the shards of [`Model::sharded`].
pub const SHARDS: [&str; 2] =
    ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

pub fn open(path: &Path) -> Result<Checkpoint, Failure> {
    Checkpoint::open(path, &OpenOptions::default())
}

/// The messages of a failure's problems, with the folder as `DIR`.
pub fn problems(failure: &Failure, dir: &Path) -> Vec<String> {
    let dir = dir.display().to_string();
    failure.problems.iter().map(|p| p.message.replace(&dir, "DIR")).collect()
}

/// The value of an e4m3 code.
pub fn e4m3(byte: u8) -> f32 {
    float8::F8E4M3::from_bits(byte).to_f32()
}

const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The value of an e2m1 code.
pub fn e2m1(code: u8) -> f32 {
    let value = E2M1[usize::from(code & 7)];
    if code & 8 != 0 { -value } else { value }
}
