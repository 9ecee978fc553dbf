//! Licences and sources of all dependencies, by the policy in `deny.toml`.

use std::process::Command;

use anyhow::{Context as _, Result};

use crate::build::cargo_tools::{self, DENY};

/// Checks without the network, so without the list of advisories.
const CHECKS: [&str; 3] = ["licenses", "bans", "sources"];

/// Runs cargo-deny. Returns true if it finds no problem.
pub fn check() -> Result<bool> {
    let mut deny = Command::new(cargo_tools::ensure(&DENY)?);
    deny.args(["--all-features", "--locked", "check", "--hide-inclusion-graph"]).args(CHECKS);
    Ok(deny.status().context("cannot start cargo-deny")?.success())
}
