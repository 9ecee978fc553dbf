//! Builds the wheel of the Python package, which contains the program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};

use super::arch::Arch;
use super::{copyright, empty_dir, program};
use crate::cargo::target_dir;
use crate::python;

/// The build backend, as `python/pyproject.toml` names it.
const MATURIN: [&str; 1] = ["maturin>=1.9.4,<2"];
/// Directory of the licences in the wheel, below the package. It is not part of the repository.
const LICENCES: &str = "licences";

/// Builds the wheel with a profile of cargo and returns its path.
pub fn build(arch: Arch, profile: &str) -> Result<PathBuf> {
    let programs = python::environment("wheel", &MATURIN)?;
    let package = Path::new(python::PACKAGE);
    let licences = empty_dir(&package.join(LICENCES))?;
    for name in ["LICENSE-APACHE", "LICENSE-MIT"] {
        fs::copy(name, licences.join(name)).with_context(|| format!("cannot copy {name}"))?;
    }
    fs::write(licences.join("copyright"), copyright::file(Path::new("."), arch.triple())?)?;
    let out = std::path::absolute(target_dir().join("package/wheels").join(arch.debian()))?;
    empty_dir(&out)?;
    let mut maturin = Command::new(programs.join("maturin"));
    maturin.args(["build", "--profile", profile, "--out"]).arg(&out);
    if arch.is_cross() {
        maturin.args(["--target", arch.triple()]);
    }
    maturin.arg("--target-dir").arg(std::path::absolute(target_dir())?);
    maturin.current_dir(package).stdin(Stdio::null());
    maturin.env("FREESTONE_COMMIT", program::commit()?).envs(arch.environment()?);
    if !maturin.status().context("cannot start maturin")?.success() {
        bail!("the wheel was not built");
    }
    let wheels: Vec<_> = fs::read_dir(&out)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    ensure!(wheels.len() == 1, "maturin made {} wheels in {}", wheels.len(), out.display());
    Ok(wheels.into_iter().next().unwrap_or_default())
}
