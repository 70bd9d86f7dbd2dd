//! Small models for the tests of `radpack::model`: their configurations, the names and shapes of their tensors, and
//! what reading them gives.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use radpack::diag::{Failure, FailureKind};
use radpack::model::{self, Model};
use radpack::tensor::{DType, Shape, TensorInfo};
use serde_json::Value;

/// Every small model, by the name of its folder.
pub use testkit::NAMES as TINY;

/// What a checkpoint holds: tensors by name.
pub type Tensors = BTreeMap<String, TensorInfo>;

/// A file of a small model.
pub fn path(name: &str, file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/configs").join(name).join(file)
}

/// The configuration of a small model as the hub spells it.
pub fn config(name: &str) -> Value {
    config_file(name, "config.json")
}

/// A configuration of a small model in one of its spellings.
pub fn config_file(name: &str, file: &str) -> Value {
    let text = fs::read_to_string(path(name, file)).expect("config");
    serde_json::from_str(&text).expect("JSON")
}

/// The tensors of a small model.
pub fn tensors(name: &str) -> Tensors {
    let text = fs::read_to_string(path(name, "tensors.tsv")).expect("tensors");
    text.lines()
        .map(|line| {
            let fields: Vec<&str> = line.split('\t').collect();
            let dtype = if fields[1] == "I64" { DType::I64 } else { DType::BF16 };
            let shape: Vec<u64> = serde_json::from_str(fields[2]).expect("extents");
            (fields[0].to_owned(), TensorInfo { dtype, shape: Shape::new(shape) })
        })
        .collect()
}

/// A small model, read.
pub fn good(name: &str) -> Model {
    model::read(&config(name), None, &tensors(name)).unwrap_or_else(|f| panic!("{name}\n{f}"))
}

/// The refusal of a configuration and tensors that do not fit.
pub fn refusal(config: &Value, tensors: &Tensors) -> Failure {
    let failure = model::read(config, None, tensors).expect_err("a refusal");
    assert_eq!(failure.kind, FailureKind::Refused);
    assert!(!failure.problems.is_empty());
    failure
}

/// What the problems of a failure say, in order.
pub fn messages(failure: &Failure) -> Vec<String> {
    failure.problems.iter().map(|p| p.message.clone()).collect()
}
