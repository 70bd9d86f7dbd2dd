//! Foundation: element formats and bulk conversions.
//!
//! | item | what |
//! |---|---|
//! | [`Element`] | one element type: f32 → code and code → f32, the scalar reference |
//! | [`mini`] | the branch-free arithmetic behind the small floats, shared with the vector kernels |
//! | [`pack`], [`unpack`] | rows of codes narrower than a byte |
//! | [`widen`] | checkpoint bytes → f32 |
//! | [`find_non_finite`] | first NaN or infinity in checkpoint bytes |
//!
//! Rounding is to nearest, ties to even, for every floating-point type; integers round half away from zero. Types
//! without infinities saturate at their largest finite value. These are the rules of radiance container version 2's
//! own converter; they differ from ml_dtypes, which turns an e4m3 overflow into NaN.

mod bits;
mod element;
mod finite;
pub mod mini;
mod widen;

pub use bits::{pack, row_bytes, unpack};
pub(crate) use element::round_away;
pub use element::{Element, decode_fnuz};
pub use finite::{NonFinite, find_non_finite, holds_nan};
pub use widen::{WidenError, widen, widens};
