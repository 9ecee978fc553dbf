//! What the package is built for.

use std::env;

use anyhow::{Result, bail};

/// Debian's name of it.
pub const DEBIAN: &str = "amd64";
/// The compiler's.
pub const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// Packages are built where they are to be installed.
pub fn check() -> Result<()> {
    if env::consts::ARCH != "x86_64" {
        bail!("packages are built on amd64, and this is {}", env::consts::ARCH);
    }
    Ok(())
}
