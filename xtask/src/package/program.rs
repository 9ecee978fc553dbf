//! Builds the program of a package, splits off its debug symbols and finds the libraries that it needs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use super::arch::Arch;
use super::{NAME, empty_dir};
use crate::build::workspace;
use crate::cargo::{cargo, output, target_dir};

/// Profile of cargo for packages.
pub const PROFILE: &str = "dist";

pub struct Parts {
    pub stripped: PathBuf,
    pub symbols: PathBuf,
    /// Build ID by which debuggers find the symbols, 40 hexadecimal digits.
    pub build_id: String,
}

/// Returns the commit that `freestone --version` prints.
pub fn commit() -> Result<String> {
    output(Command::new("git").args(["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]))
}

/// Profile of the tests, whose program a package can have as well.
pub const TESTS: &str = "test";

/// Builds the program with a profile of cargo and returns its path. With that of the tests, it is the program of the tests,
/// which usually is built already: alone, cargo would select other features of dependencies, and build them again.
pub fn build(arch: Arch, profile: &str) -> Result<PathBuf> {
    if profile == TESTS && !arch.is_cross() {
        return tests(NAME);
    }
    let mut cargo = cargo();
    cargo.args(["build", "--locked", "--profile", profile]);
    cargo.args(["--package", "freestone-cli", "--bin", NAME, "--features", "full"]);
    cargo.env("FREESTONE_COMMIT", commit()?).envs(arch.environment()?);
    let mut dir = target_dir();
    if arch.is_cross() {
        cargo.args(["--target", arch.triple()]);
        dir.push(arch.triple());
    }
    if !cargo.status().context("cannot start cargo")?.success() {
        bail!("the program was not built");
    }
    Ok(dir.join(directory(profile)).join(NAME))
}

/// Returns the path of a program that the tests use, and builds it if necessary.
pub fn tests(name: &str) -> Result<PathBuf> {
    Ok(workspace::programs()?.context("the programs of the tests were not built")?.join(name))
}

/// Returns the directory of a profile below the target directory.
fn directory(profile: &str) -> &str {
    match profile {
        "dev" | "test" => "debug",
        "bench" => "release",
        own => own,
    }
}

/// Splits the program `built` into a stripped program and its symbols, both below `work`.
pub fn parts(arch: Arch, built: &Path, work: &Path) -> Result<Parts> {
    let dir = empty_dir(&work.join("parts"))?;
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

/// Returns the packages of the libraries that the program loads, as `dpkg-shlibdeps` finds them.
pub fn libraries(arch: Arch, program: &Path, work: &Path) -> Result<String> {
    // dpkg-shlibdeps must run in a directory with debian/control.
    let dir = empty_dir(&work.join("shlibdeps"))?;
    fs::create_dir(dir.join("debian"))?;
    fs::write(dir.join("debian/control"), format!("Source: {NAME}\n\nPackage: {NAME}\nArchitecture: any\n"))?;
    // dpkg-shlibdeps reads the target architecture from variables that dpkg-architecture sets.
    let mut command = Command::new("dpkg-architecture");
    command.args(["--force", "--host-arch", arch.debian(), "--command", "dpkg-shlibdeps -O \"$PROGRAM\""]);
    let printed = output(command.env("PROGRAM", program).current_dir(&dir).stdin(Stdio::null()))?;
    let found = printed.lines().find_map(|line| line.strip_prefix("shlibs:Depends="));
    found.map(str::to_owned).with_context(|| format!("dpkg-shlibdeps found no libraries: {printed}"))
}
