//! bench
#[derive(clap::Args)]
pub struct ScaleArgs {}
pub fn scale(_: &ScaleArgs) -> crate::Result<()> {
    Ok(())
}
