//! model

mod weights;

pub use weights::{Class, Part, Tower, Weight, WeightTable};
