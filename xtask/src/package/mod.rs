//! `cargo xtask package`: builds the Debian package of the program, with manual pages, completions, units and udev rules,
//! and the package of its debug symbols; or the wheel of the Python package; or the packages of the published crates; or an
//! archive of the static program.

pub mod arch;
mod archive;
mod changelog;
mod control;
mod copyright;
pub mod crates;
mod program;
mod tree;
mod wheel;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;

use self::arch::Arch;
use crate::cargo::{self, cargo, output};

pub use archive::TARGET as ARCHIVE_TARGET;

/// Name of the package and of the program.
const NAME: &str = "freestone";
/// Program that writes manual pages and completions.
const MANUALS: &str = "freestone-manuals";
/// Version of the workspace and of the package.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Form of a package.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Form {
    /// Debian package of the program, and that of its debug symbols.
    Deb,
    /// Wheel of the Python package, which contains the program.
    Wheel,
    /// Packages of the published crates, as the registry of cargo gets them.
    Crates,
    /// Archive of the program with the C library musl, which needs no library of the machine. For amd64.
    Archive,
}

/// Makes a form of package. `profile` replaces cargo's profile for packages.
pub fn run(form: Form, arch: Arch, profile: Option<&str>) -> Result<bool> {
    // Every user must be able to read the files of the package.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    if form == Form::Crates {
        println!("crates: {}", crates::pack()?.display());
        return Ok(true);
    }
    let profile = profile.unwrap_or(program::PROFILE);
    match form {
        Form::Archive if arch != Arch::Amd64 => bail!("the archive is for amd64 only"),
        Form::Archive => print("archive", &archive::build(profile)?)?,
        _ => {
            arch.ensure()?;
            if form == Form::Wheel {
                print("wheel", &wheel::build(arch, profile)?)?;
            } else {
                debian(arch, profile)?;
            }
        }
    }
    Ok(true)
}

fn print(what: &str, file: &Path) -> Result<()> {
    println!("{what}: {} ({:.1} MB)", file.display(), fs::metadata(file)?.len() as f64 / 1e6);
    Ok(())
}

/// Returns the directory of all packages, which it creates.
fn out_dir() -> Result<PathBuf> {
    let out = cargo::target_dir().join("package");
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    out.canonicalize().context("cannot find the directory of packages")
}

/// Returns the time of the last commit, in seconds since 1970. No file in a package is newer, so builds are reproducible.
fn changed() -> Result<String> {
    output(Command::new("git").args(["log", "-1", "--format=%ct"]))
}

/// Makes the package of the program and that of its debug symbols.
fn debian(arch: Arch, profile: &str) -> Result<()> {
    let out = out_dir()?;
    let built = program::build(arch, profile)?;
    let manuals = out.join("manuals");
    write_manuals(&manuals, profile)?;

    let maintainer = maintainer()?;
    let changed = changed()?;
    let work = out.join(arch.debian());
    let program = tree::Program { parts: program::parts(arch, &built, &work)?, manuals: &manuals };
    let root = empty_dir(&work.join(NAME))?;
    let changelog = changelog::debian(NAME, VERSION, &maintainer)?;
    tree::fill(&root, &program, &changelog, &copyright::file(Path::new("."), arch.triple())?)?;
    let depends = program::libraries(arch, &program.parts.stripped, &work)?;
    control::write(&root, &control::of_program(arch, &root, &maintainer, &depends)?)?;
    let package = build(arch, &root, &out, NAME, &changed)?;

    let symbols_name = format!("{NAME}-dbgsym");
    let root = empty_dir(&work.join(&symbols_name))?;
    tree::fill_symbols(&root, &program.parts)?;
    control::write(&root, &control::of_symbols(arch, &root, &maintainer, &program.parts.build_id)?)?;
    let symbols = build(arch, &root, &out, &symbols_name, &changed)?;

    let bytes = fs::metadata(&program.parts.stripped)?.len();
    println!("program: {:.1} MB without symbols", bytes as f64 / 1e6);
    print("package", &package)?;
    print("package", &symbols)
}

pub fn empty_dir(dir: &Path) -> Result<PathBuf> {
    if dir.exists() {
        fs::remove_dir_all(dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    }
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Ok(dir.to_owned())
}

/// Writes manual pages and completions with the program `freestone-manuals`, which contains the definition of the
/// command line. `profile` is that of the package.
fn write_manuals(dir: &Path, profile: &str) -> Result<()> {
    empty_dir(dir)?;
    let mut run = if profile == program::TESTS {
        Command::new(program::tests(MANUALS)?)
    } else {
        let mut run = cargo();
        run.args(["run", "--package", MANUALS, "--"]);
        run
    };
    run.arg(dir).stdin(Stdio::null());
    if !run.status().context("cannot start freestone-manuals")?.success() {
        bail!("the manual pages were not written");
    }
    Ok(())
}

/// Returns the maintainer from Debian's environment variables, or the committer of the last commit.
fn maintainer() -> Result<String> {
    let variable = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
    if let (Some(name), Some(mail)) = (variable("DEBFULLNAME"), variable("DEBEMAIL")) {
        return Ok(format!("{name} <{mail}>"));
    }
    output(Command::new("git").args(["log", "-1", "--format=%cn <%ce>"]))
}

/// Packs the tree `root` and returns the path of the package. `changed` is the time of the newest file.
fn build(arch: Arch, root: &Path, out: &Path, name: &str, changed: &str) -> Result<PathBuf> {
    let package = out.join(format!("{name}_{VERSION}_{}.deb", arch.debian()));
    let mut command = Command::new("dpkg-deb");
    command.args(["--root-owner-group", "--build"]).arg(root).arg(&package).env("SOURCE_DATE_EPOCH", changed);
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status();
    if !status.context("cannot start dpkg-deb")?.success() {
        bail!("dpkg-deb could not build {}", package.display());
    }
    Ok(package)
}
