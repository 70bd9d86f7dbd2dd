//! What fuzz targets do with bytes.
//!
//! [`drive`] is shared with `tests/bad_inputs.rs`: a regression input goes the way that the fuzzer found it on.

pub mod drive;

/// The fuzz target of that name.
#[macro_export]
macro_rules! target {
    ($name:literal) => {
        libfuzzer_sys::fuzz_target!(|data: &[u8]| {
            static DRIVER: std::sync::OnceLock<$crate::drive::Driver> = std::sync::OnceLock::new();
            let driver = DRIVER.get_or_init(|| {
                $crate::drive::HURRY.store(true, std::sync::atomic::Ordering::Relaxed);
                $crate::drive::driver($name).expect("a driver")
            });
            // An error is what most inputs give; a panic is a find.
            let _ = driver(data);
        });
    };
}
