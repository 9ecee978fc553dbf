//! `cargo xtask package`: the Debian package of the program, with its manual pages, completions, units and rules, and
//! beside it the package of its debug symbols.

pub mod arch;
mod changelog;
mod control;
mod copyright;
mod program;
mod tree;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use self::arch::Arch;
use crate::cargo::{self, cargo, output};

/// The package.
const NAME: &str = "freestone";
/// The version, which is the workspace's.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Builds the packages, and tells where they are.
pub fn run(arch: Arch) -> Result<bool> {
    // What lies in the package everybody may read.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    arch.ensure()?;
    let out = cargo::target_dir().join("package");
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    let out = out.canonicalize()?;
    let built = program::build(arch)?;
    let manuals = out.join("manuals");
    manuals_to(&manuals)?;

    let maintainer = maintainer()?;
    let changed = output(Command::new("git").args(["log", "-1", "--format=%ct"]))?;
    let work = out.join(arch.debian());
    let program = tree::Program { parts: program::parts(arch, &built, &work)?, manuals: &manuals };
    let root = fresh(&work.join(NAME))?;
    let changelog = changelog::debian(NAME, VERSION, &maintainer)?;
    tree::fill(&root, &program, &changelog, &copyright::file(Path::new("."), arch.triple())?)?;
    let depends = program::libraries(arch, &program.parts.stripped, &work)?;
    control::write(&root, &control::of_program(arch, &root, &maintainer, &depends)?)?;
    let package = build(arch, &root, &out, NAME, &changed)?;

    let symbols_name = format!("{NAME}-dbgsym");
    let root = fresh(&work.join(&symbols_name))?;
    tree::fill_symbols(&root, &program.parts)?;
    control::write(&root, &control::of_symbols(arch, &root, &maintainer, &program.parts.build_id)?)?;
    let symbols = build(arch, &root, &out, &symbols_name, &changed)?;

    let bytes = fs::metadata(&program.parts.stripped)?.len();
    println!("program: {:.1} MB without symbols", bytes as f64 / 1e6);
    for package in [package, symbols] {
        println!("package: {} ({:.1} MB)", package.display(), fs::metadata(&package)?.len() as f64 / 1e6);
    }
    Ok(true)
}

/// An empty directory in place of what is there.
fn fresh(dir: &Path) -> Result<PathBuf> {
    if dir.exists() {
        fs::remove_dir_all(dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    }
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Ok(dir.to_owned())
}

/// Manual pages and completions, by the parser of the program; from a build for tests, which has the same.
fn manuals_to(dir: &Path) -> Result<()> {
    fresh(dir)?;
    let mut run = cargo();
    run.args(["run", "--package", "freestone-manuals", "--"]).arg(dir);
    if !run.status().context("cannot start cargo")?.success() {
        bail!("the manual pages were not written");
    }
    Ok(())
}

/// Who makes the package, as Debian's own tools ask for it, else who made the last commit.
fn maintainer() -> Result<String> {
    let said = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
    if let (Some(name), Some(mail)) = (said("DEBFULLNAME"), said("DEBEMAIL")) {
        return Ok(format!("{name} <{mail}>"));
    }
    output(Command::new("git").args(["log", "-1", "--format=%cn <%ce>"]))
}

/// Packs a tree; `changed` is the time that its files have at most, so that the same tree makes the same package.
fn build(arch: Arch, root: &Path, out: &Path, name: &str, changed: &str) -> Result<PathBuf> {
    let package = out.join(format!("{name}_{VERSION}_{}.deb", arch.debian()));
    let mut command = Command::new("dpkg-deb");
    command.args(["--root-owner-group", "--build"]).arg(root).arg(&package).env("SOURCE_DATE_EPOCH", changed);
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status();
    if !status.context("cannot start dpkg-deb")?.success() {
        bail!("dpkg-deb made no {}", package.display());
    }
    Ok(package)
}
