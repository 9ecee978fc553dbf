//! Runs benchmarks and experiments in release builds.

use std::ffi::OsString;

use anyhow::{Context as _, Result};

use crate::build::variants::{CopiedWorkspace, with_variants};
use crate::cargo::cargo;

/// Runs a benchmark or, for the name `reproduce`, the experiments. Returns true if the command
/// succeeded.
pub fn bench(args: &[OsString]) -> Result<bool> {
    let is_research = args.first().is_some_and(|name| name == "reproduce");
    let mut command = if is_research {
        with_variants("run", CopiedWorkspace::Research)?
    } else {
        let mut command = cargo();
        command.args(["run", "--package", "freestone-benches"]);
        command
    };
    command.arg("--release").arg("--").args(args);
    Ok(command.status().context("cannot start cargo")?.success())
}
