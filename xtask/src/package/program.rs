//! The program of a package: built, taken apart into what runs and what debuggers read, and the libraries it needs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use super::arch::Arch;
use super::{NAME, fresh};
use crate::cargo::{cargo, output, target_dir};

/// The profile that packages are built with.
const PROFILE: &str = "dist";

/// What a program is taken apart into.
pub struct Parts {
    /// It, without symbols.
    pub stripped: PathBuf,
    /// They.
    pub symbols: PathBuf,
    /// The number by which a debugger finds the one for the other, 40 hexadecimal digits.
    pub build_id: String,
}

/// Builds it, and says where it is.
pub fn build(arch: Arch) -> Result<PathBuf> {
    let commit = ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"];
    let commit = output(Command::new("git").args(commit))?;
    let mut cargo = cargo();
    cargo.args(["build", "--locked", "--profile", PROFILE, "--package", "freestone-cli", "--bin", NAME]);
    cargo.env("FREESTONE_COMMIT", commit).envs(arch.environment()?);
    let mut dir = target_dir();
    if arch.is_cross() {
        cargo.args(["--target", arch.triple()]);
        dir.push(arch.triple());
    }
    if !cargo.status().context("cannot start cargo")?.success() {
        bail!("the program was not built");
    }
    Ok(dir.join(PROFILE).join(NAME))
}

/// Takes it apart, below `work`.
pub fn parts(arch: Arch, built: &Path, work: &Path) -> Result<Parts> {
    let dir = fresh(&work.join("parts"))?;
    let (stripped, symbols) = (dir.join(NAME), dir.join("symbols"));
    output(
        Command::new(arch.tool("objcopy"))
            .args(["--only-keep-debug", "--compress-debug-sections=zlib"])
            .arg(built)
            .arg(&symbols),
    )?;
    let mut strip = Command::new(arch.tool("strip"));
    strip.args(["--strip-unneeded", "--remove-section=.comment", "-o"]).arg(&stripped).arg(built);
    output(&mut strip)?;
    let notes = output(Command::new(arch.tool("readelf")).arg("--notes").arg(&stripped))?;
    let build_id = notes.lines().find_map(|line| line.trim().strip_prefix("Build ID: ")).map(str::to_owned);
    let build_id = build_id.filter(|id| id.len() > 2).context("the linker gave the program no build ID")?;
    Ok(Parts { stripped, symbols, build_id })
}

/// The packages of the libraries that it loads, as Debian's own tool finds them.
pub fn libraries(arch: Arch, program: &Path, work: &Path) -> Result<String> {
    // It wants to be where a package is built from its source.
    let dir = fresh(&work.join("shlibdeps"))?;
    fs::create_dir(dir.join("debian"))?;
    fs::write(dir.join("debian/control"), format!("Source: {NAME}\n\nPackage: {NAME}\nArchitecture: any\n"))?;
    // It goes by variables of the architecture that is built for.
    let mut command = Command::new("dpkg-architecture");
    command.args(["--force", "--host-arch", arch.debian(), "--command", "dpkg-shlibdeps -O \"$PROGRAM\""]);
    let said = output(command.env("PROGRAM", program).current_dir(&dir).stdin(Stdio::null()))?;
    let found = said.lines().find_map(|line| line.strip_prefix("shlibs:Depends="));
    found.map(str::to_owned).with_context(|| format!("dpkg-shlibdeps found no libraries: {said}"))
}
