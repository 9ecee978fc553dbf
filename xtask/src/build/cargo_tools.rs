//! Development tools that cargo builds from the registry, each at one version, in `target/tools`.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};

use crate::cargo::{cargo, target_dir};

/// A program of a crate in the registry.
pub struct CargoTool {
    /// Name of the crate and of its program.
    pub name: &'static str,
    pub version: &'static str,
    /// Features that replace the default features, or `None` for the default features.
    pub features: Option<&'static str>,
}

/// Builds books from Markdown. Without the server, which has half of its dependencies.
pub const MDBOOK: CargoTool = CargoTool { name: "mdbook", version: "0.5.4", features: Some("search") };
/// Checks the links of HTML pages.
pub const HYPERLINK: CargoTool = CargoTool { name: "hyperlink", version: "0.3.2", features: None };

/// Checks licences, banned crates and sources of dependencies.
pub const DENY: CargoTool = CargoTool { name: "cargo-deny", version: "0.20.2", features: Some("") };
/// Lists the components of programs.
pub const CYCLONEDX: CargoTool = CargoTool { name: "cargo-cyclonedx", version: "0.5.9", features: None };

/// Builds a tool unless that version is built, with the dependencies of its own lock file. Returns the path of the program.
pub fn ensure(tool: &CargoTool) -> Result<PathBuf> {
    let CargoTool { name, version, features } = tool;
    let root = std::path::absolute(target_dir())?.join("tools").join(format!("{name}-{version}"));
    let program = root.join("bin").join(name);
    if program.is_file() {
        return Ok(program);
    }
    println!("building {name} {version}");
    let mut install = cargo();
    install
        .args(["install", "--quiet", "--locked", "--no-track", name, "--version", version, "--root"])
        .arg(&root);
    if let Some(features) = features {
        install.args(["--no-default-features", "--features", features]);
    }
    // A directory of its own, so that builds of the workspace do not wait for this one.
    install.env("CARGO_TARGET_DIR", root.join("build"));
    let status = install.status().context("cannot start cargo")?;
    ensure!(status.success(), "cargo install {name}@{version}: {status}");
    std::fs::remove_dir_all(root.join("build")).context("cannot remove the build of a tool")?;
    Ok(program)
}
