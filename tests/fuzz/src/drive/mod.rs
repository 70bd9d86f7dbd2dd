//! One function a parser: bytes in, what was accepted or the error text out.
//!
//! A driver panics where an invariant of accepted input is broken, and only there. Its texts name no folder of this
//! machine, so that they can be compared.

use std::sync::atomic::{AtomicBool, Ordering};

use radpack::diag::Failure;

pub mod archive;
mod artifact;
mod checkpoint;
#[cfg(feature = "hub")]
mod hub;
mod programs;
mod text;

pub use artifact::{SMALL, converted};

/// What became of an input: a line on what was accepted, or the error's text.
pub type Outcome = Result<String, String>;

/// A parser by the name of its fuzz target.
pub type Driver = fn(&[u8]) -> Outcome;

/// Every target.
pub const DRIVERS: &[(&str, Driver)] = &[
    ("card", artifact::card),
    ("chat", text::chat),
    ("checkpoint", checkpoint::folder),
    ("config", checkpoint::config),
    ("corpus", text::corpus),
    ("entries", artifact::entries),
    ("gguf", checkpoint::gguf),
    #[cfg(feature = "hub")]
    ("hub", hub::answers),
    ("imatrix", checkpoint::imatrix),
    ("picture", text::picture),
    ("programs", programs::programs),
    ("quantized", checkpoint::quantized),
    ("rad", artifact::container),
    ("recipe", text::recipe),
    ("recipe_import", text::recipe_import),
    ("safetensors", checkpoint::safetensors),
    ("sections", artifact::sections),
    ("tokenizer", text::tokenizer),
];

/// The driver of a target.
pub fn driver(target: &str) -> Option<Driver> {
    DRIVERS.iter().find(|(name, _)| *name == target).map(|(_, driver)| *driver)
}

/// Set by the fuzzers: texts are rendered for some inputs only and loops are kept short, so that parsers get the time.
pub static HURRY: AtomicBool = AtomicBool::new(false);

/// Whether an input is one of those whose texts are rendered.
fn leisurely(input: &[u8]) -> bool {
    !HURRY.load(Ordering::Relaxed) || input.len().is_multiple_of(16)
}

/// A failure as people see it, or its headline.
fn shown(failure: &Failure, input: &[u8]) -> String {
    if leisurely(input) { failure.to_string() } else { failure.headline.clone() }
}

/// Lines of a list of problems.
fn lines<T: std::fmt::Display>(problems: &[T]) -> String {
    problems.iter().map(T::to_string).collect::<Vec<_>>().join("\n")
}
