//! Models as their publishers have them: configurations and shapes, no weights.

// Every test file compiles this module for itself and uses a part of it.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use radpack::model::{self, Model};
use radpack::tensor::{DType, Shape, TensorInfo};

/// A published configuration.
pub fn config_file(name: &str) -> PathBuf {
    testkit::fixtures().join(format!("gemma4/configs/{name}.json"))
}

/// The names, types and shapes of its tensors, one a line.
pub fn shapes_file(name: &str) -> PathBuf {
    testkit::fixtures().join(format!("gemma4/shapes/{name}.tsv"))
}

/// Its tensors.
pub fn tensors(name: &str) -> BTreeMap<String, TensorInfo> {
    let text = fs::read_to_string(shapes_file(name)).expect("shapes");
    text.lines()
        .map(|line| {
            let mut fields = line.split('\t');
            let mut next = || fields.next().expect("three fields");
            let (name, dtype, shape) = (next().to_owned(), next(), next());
            let dtype = if dtype == "I64" { DType::I64 } else { DType::BF16 };
            let shape: Vec<u64> = serde_json::from_str(shape).expect("extents");
            (name, TensorInfo { dtype, shape: Shape::new(shape) })
        })
        .collect()
}

/// The model, read.
pub fn published(name: &str) -> Model {
    let text = fs::read_to_string(config_file(name)).expect("config");
    let config = serde_json::from_str(&text).expect("JSON");
    model::read(&config, None, &tensors(name)).unwrap_or_else(|f| panic!("{name}\n{f}"))
}

/// A checkpoint folder `out` of its configuration and shapes, weights left as holes of sparse files.
pub fn sparse(name: &str, out: &std::path::Path) {
    let options = testkit::sparse::SparseOptions::default();
    testkit::sparse::sparse(&shapes_file(name), &config_file(name), out, options)
        .expect("a sparse checkpoint");
}
