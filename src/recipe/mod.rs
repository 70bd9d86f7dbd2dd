//! recipe

mod method;

pub use method::{Clamp, Codebook, Grid, Method, ScaleRule, SecondScale, group_columns};
