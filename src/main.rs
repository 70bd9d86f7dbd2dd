//! radpack
fn main() {}
