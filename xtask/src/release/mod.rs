//! `cargo xtask release VERSION`: sets the version, checks the licences of all dependencies, and builds everything that users
//! install, with checksums and a list of components, in `target/release-VERSION`.

mod licences;
mod rehearsal;
mod version;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;

use crate::build::cargo_tools::{self, CYCLONEDX};
use crate::build::packages;
use crate::cargo::{cargo, output, target_dir};
use crate::package::arch::Arch;
use crate::package::{self, Form, empty_dir};

pub use licences::check as licences;
pub use rehearsal::run as rehearse;

/// Part of a release. The order is that of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// The version in manifests, changelog and pages, as a commit
    Version,
    /// Licences and sources of all dependencies, by the policy in deny.toml
    Licences,
    /// Packages of the published crates
    Crates,
    /// Debian packages for amd64
    Deb,
    /// Debian packages for arm64
    DebArm64,
    /// Wheel of the Python package for amd64
    Wheel,
    /// Wheel of the Python package for arm64
    WheelArm64,
    /// Archive of the static program for amd64
    Archive,
    /// Image for containers, as an archive in the format of the Open Container Initiative
    Image,
    /// List of the components built into the program, in the format `CycloneDX`
    Components,
}

const CONTAINERFILE: &str = "packaging/Containerfile";
const CHECKSUMS: &str = "SHA256SUMS";
/// Feature set of the packages.
const FEATURES: &str = "full";

/// Makes the parts of a release, all by default. `base` is the base image of the container image, in place of its default.
pub fn run(version: &str, only: &[Part], base: Option<&str>) -> Result<()> {
    let has = |part| only.is_empty() || only.contains(&part);
    if has(Part::Version) {
        version::set(version)?;
    } else {
        ensure!(
            version == package::VERSION,
            "the tree has version {}: also make the part version",
            package::VERSION
        );
    }
    // The program of this command contains the former version, so another process makes the packages.
    let out = std::path::absolute(target_dir())?.join(format!("release-{version}"));
    empty_dir(&out)?;
    if has(Part::Licences) {
        ensure!(licences()?, "cargo deny found problems");
    }
    let forms = [
        (Part::Crates, Form::Crates, Arch::Amd64),
        (Part::Deb, Form::Deb, Arch::Amd64),
        (Part::DebArm64, Form::Deb, Arch::Arm64),
        (Part::Wheel, Form::Wheel, Arch::Amd64),
        (Part::WheelArm64, Form::Wheel, Arch::Arm64),
        (Part::Archive, Form::Archive, Arch::Amd64),
    ];
    for (_, form, arch) in forms.into_iter().filter(|(part, ..)| has(*part)) {
        make(form, arch)?;
        for file in made(form, arch, version)? {
            copy_to(&file, &out)?;
        }
    }
    if has(Part::Image) {
        image(&out, version, base)?;
    }
    if has(Part::Components) {
        components(&out, version)?;
    }
    checksums(&out)?;
    println!("release: {}", out.display());
    for line in fs::read_to_string(out.join(CHECKSUMS))?.lines() {
        println!("  {line}");
    }
    println!(
        "to publish: git tag v{version}, and push it; upload the files; `cargo publish --workspace` for the crates"
    );
    Ok(())
}

/// Builds a form of package with the version of the tree.
fn make(form: Form, arch: Arch) -> Result<()> {
    let name = |value: &dyn Fn() -> Option<clap::builder::PossibleValue>| {
        value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    };
    let mut command = cargo();
    command.args(["run", "--quiet", "--package", "xtask", "--", "package"]);
    command.arg(name(&|| form.to_possible_value())).arg("--arch").arg(name(&|| arch.to_possible_value()));
    let status = command.status().context("cannot start cargo")?;
    ensure!(status.success(), "cargo xtask package {form:?} {arch:?}: {status}");
    Ok(())
}

/// Returns the files that [`make`] has made.
fn made(form: Form, arch: Arch, version: &str) -> Result<Vec<PathBuf>> {
    let package = target_dir().join("package");
    let (dir, wanted) = match form {
        Form::Crates => (package.join("crates"), format!("-{version}.crate")),
        Form::Deb => (package, format!("_{version}_{}.deb", arch.debian())),
        Form::Archive => (package, format!("-{version}-{}.tar.gz", package::ARCHIVE_TARGET)),
        Form::Wheel => (package.join("wheels").join(arch.debian()), ".whl".to_owned()),
    };
    let mut files = Vec::new();
    for entry in fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()))? {
        let path = entry?.path();
        if path.to_string_lossy().ends_with(&wanted) {
            files.push(path);
        }
    }
    ensure!(!files.is_empty(), "{}: no file ends with {wanted}", dir.display());
    files.sort();
    Ok(files)
}

fn copy_to(file: &Path, dir: &Path) -> Result<()> {
    let to = dir.join(file.file_name().unwrap_or_default());
    fs::copy(file, &to).with_context(|| format!("cannot copy {} to {}", file.display(), to.display()))?;
    Ok(())
}

/// Builds the image of the Debian package that was made last, and writes it as an archive.
fn image(out: &Path, version: &str, base: Option<&str>) -> Result<()> {
    packages::ensure(&packages::IMAGES)?;
    let tag = format!("localhost/freestone:{version}");
    let mut build = Command::new("podman");
    build.args(["build", "--format", "docker", "--tag", &tag, "--file", CONTAINERFILE]);
    if let Some(base) = base {
        build.args(["--build-arg", &format!("BASE={base}")]);
    }
    let status = build.arg(target_dir().join("package")).stdin(Stdio::null()).status();
    ensure!(status.context("cannot start podman")?.success(), "the image was not built");
    let archive = out.join(format!("freestone-{version}-amd64.oci.tar"));
    let mut save = Command::new("podman");
    output(save.args(["save", "--quiet", "--format", "oci-archive", "--output"]).arg(&archive).arg(&tag))?;
    Ok(())
}

/// Writes the list of components of the program. The path of the tree and the time of the run are not part of it.
fn components(out: &Path, version: &str) -> Result<()> {
    let tool = cargo_tools::ensure(&CYCLONEDX)?;
    let (package, file) = ("freestone-cli", format!("freestone-{version}"));
    let mut list = Command::new(tool);
    list.args(["cyclonedx", "--format", "json", "--features", FEATURES, "--target", Arch::Amd64.triple()]);
    list.args([
        "--manifest-path",
        &format!("crates/{package}/Cargo.toml"),
        "--override-filename",
        &file,
        "--quiet",
    ]);
    list.env("SOURCE_DATE_EPOCH", output(Command::new("git").args(["log", "-1", "--format=%ct"]))?);
    output(&mut list)?;
    // The tool writes a file beside each manifest of the workspace.
    let written = Path::new("crates").join(package).join(format!("{file}.json"));
    let text = fs::read_to_string(&written).with_context(|| format!("cannot read {}", written.display()))?;
    let root = std::env::current_dir()?.display().to_string();
    let text = text.replace(&format!("path+file://{root}"), "path+file:///freestone");
    fs::write(out.join(format!("{file}.cdx.json")), text).context("cannot write the list of components")?;
    for manifest in crate::cargo::files()?.iter().filter(|path| path.ends_with("Cargo.toml")) {
        let file = manifest.with_file_name(format!("{file}.json"));
        if file.is_file() {
            fs::remove_file(&file).with_context(|| format!("cannot remove {}", file.display()))?;
        }
    }
    Ok(())
}

/// Writes the checksums of all files, sorted by name.
fn checksums(out: &Path) -> Result<()> {
    let mut names = Vec::new();
    for entry in fs::read_dir(out)? {
        names.push(entry?.file_name());
    }
    if names.is_empty() {
        bail!("no part makes a file");
    }
    names.sort();
    let sums = output(Command::new("sha256sum").arg("--").args(&names).current_dir(out))?;
    fs::write(out.join(CHECKSUMS), sums + "\n").context("cannot write the checksums")
}
