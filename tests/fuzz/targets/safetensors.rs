//! Fuzz target `safetensors`: see its driver in `radpack_fuzz::drive`.
#![no_main]

radpack_fuzz::target!("safetensors");
