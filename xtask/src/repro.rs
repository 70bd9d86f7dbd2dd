//! repro
pub fn run(_: Option<std::path::PathBuf>) -> crate::Result<()> {
    Ok(())
}
