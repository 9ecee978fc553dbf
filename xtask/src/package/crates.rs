//! Packs the published crates as the registry gets them, and builds them from these packages alone.
//!
//! Cargo can verify packages itself, but builds the dependencies of each package again. Here all unpacked packages are one
//! workspace, in which they replace those of the registry.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;

use super::empty_dir;
use crate::cargo::{cargo, output, target_dir};

/// Warning about tests, which packages omit on purpose: their programs and crates are not published.
const WITHOUT_TESTS: &str = "warning: ignoring test ";
const PROGRAM: &str = "freestone-cli";

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    rust_version: Option<String>,
    /// Registries that may get the package; empty for none, `None` for any.
    publish: Option<Vec<String>>,
}

/// Packs all published crates to `target/package/crates`, and returns that directory.
pub fn pack() -> Result<PathBuf> {
    let dir = empty_dir(&std::path::absolute(target_dir())?.join("package/crates"))?;
    let published = published()?;
    let mut pack = cargo();
    pack.args(["package", "--no-verify", "--allow-dirty", "--locked", "--target-dir"]).arg(dir.join("work"));
    // Cargo sorts the packages, and fails if dependencies, also those of tests, are a circle: no order could publish it.
    for Package { name, .. } in &published {
        pack.args(["--package", name]);
    }
    let printed = pack.stdin(Stdio::null()).output().context("cannot start cargo")?;
    let text = String::from_utf8_lossy(&printed.stderr);
    let warnings: Vec<_> = text.lines().filter(|line| line.starts_with("warning: ")).collect();
    let warnings: Vec<_> = warnings.into_iter().filter(|line| !line.starts_with(WITHOUT_TESTS)).collect();
    ensure!(printed.status.success() && warnings.is_empty(), "cargo package: {}\n{text}", printed.status);
    for Package { name, version, .. } in &published {
        let file = format!("{name}-{version}.crate");
        let cannot = || format!("cargo made no {file}");
        fs::rename(dir.join("work/package").join(&file), dir.join(&file)).with_context(cannot)?;
    }
    fs::remove_dir_all(dir.join("work")).context("cannot remove the work directory")?;
    Ok(dir)
}

/// Packs the crates, builds them from the packages, and uses the program. Returns true if all of it works.
pub fn check() -> Result<bool> {
    let crates = pack()?;
    let workspace = unpack(&crates)?;
    let program = build(&workspace, None)?;
    let mut serve = Command::new(&program);
    serve.args(["serve", "ram0=ram,disksize=64M", "--run", "nbdinfo --size \"$uri\""]);
    let size = output(&mut serve)?;
    ensure!(size.lines().last() == Some("67108864"), "a client of the program sees a disk of {size} bytes");
    println!(
        "{}: built from the packages of {} crates, and serves a client",
        program.display(),
        published()?.len()
    );
    let oldest =
        published()?.into_iter().find_map(|package| package.rust_version).context("no rust-version")?;
    if has_toolchain(&oldest) {
        build(&workspace, Some(&oldest))?;
        println!("Rust {oldest}: builds the packages as well");
    } else {
        println!("Rust {oldest}: not tried, as rustup cannot install it");
    }
    fs::remove_dir_all(workspace).context("cannot remove the workspace of the packages")?;
    Ok(true)
}

/// Returns true if rustup has a toolchain, which it installs if it can.
fn has_toolchain(version: &str) -> bool {
    let rustup = |arguments: &[&str]| {
        let output = Command::new("rustup").args(arguments).stdin(Stdio::null()).output();
        output.is_ok_and(|output| output.status.success())
    };
    rustup(&["run", version, "rustc", "--version"])
        || rustup(&["toolchain", "install", version, "--profile", "minimal"])
}

fn published() -> Result<Vec<Package>> {
    let text = output(cargo().args(["metadata", "--format-version", "1", "--no-deps"]))?;
    let Metadata { packages } = serde_json::from_str(&text).context("cargo metadata")?;
    Ok(packages.into_iter().filter(|package| package.publish.is_none()).collect())
}

/// Unpacks the packages below a directory outside of the tree, as one workspace.
fn unpack(crates: &Path) -> Result<PathBuf> {
    let workspace =
        empty_dir(&std::env::temp_dir().join(format!("freestone-crates-{}", std::process::id())))?;
    let (mut members, mut patches) = (Vec::new(), BTreeMap::new());
    for Package { name, version, .. } in published()? {
        let file = crates.join(format!("{name}-{version}.crate"));
        output(
            Command::new("tar").arg("--extract").arg("--file").arg(&file).arg("--directory").arg(&workspace),
        )?;
        let dir = format!("{name}-{version}");
        for file in ["README.md", "LICENSE-MIT", "LICENSE-APACHE"] {
            let path = workspace.join(&dir).join(file);
            let is_inside = |path: &Path| fs::symlink_metadata(path).is_ok_and(|found| found.is_file());
            // The readme of internal crates has its own name.
            let is_internal = file == "README.md" && is_inside(&path.with_file_name("INTERNAL.md"));
            if !is_inside(&path) && !is_internal {
                bail!("the package of {name} has no {file}");
            }
        }
        members.push(dir.clone());
        patches.insert(name, dir);
    }
    let mut text = format!("[workspace]\nresolver = \"3\"\nmembers = {members:?}\n\n[patch.{REGISTRY}]\n");
    for (name, dir) in patches {
        writeln!(text, "{name} = {{ path = {dir:?} }}")?;
    }
    fs::write(workspace.join("Cargo.toml"), text).context("cannot write the workspace of the packages")?;
    fs::copy("Cargo.lock", workspace.join("Cargo.lock")).context("cannot copy Cargo.lock")?;
    Ok(workspace)
}

/// Short name of the public registry in manifests.
const REGISTRY: &str = concat!("crates", "-io");

/// Builds all packages, by a toolchain of rustup if one is given. Returns the path of the program.
fn build(workspace: &Path, toolchain: Option<&str>) -> Result<PathBuf> {
    let target = std::path::absolute(target_dir())?.join("crates").join(toolchain.unwrap_or("build"));
    let mut build = match toolchain {
        None => cargo(),
        Some(toolchain) => {
            let mut rustup = Command::new("rustup");
            rustup.args(["run", toolchain, "cargo"]).stdin(Stdio::null());
            rustup
        }
    };
    build
        .args(["build", "--workspace", "--features", &format!("{PROGRAM}/full"), "--target-dir"])
        .arg(&target);
    let status = build.current_dir(workspace).status().context("cannot start cargo")?;
    ensure!(status.success(), "the packages do not build: {status}");
    Ok(target.join("debug/freestone"))
}
