//! Builds all tests and programs of the workspace in one build, which also lints.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use super::fio;
use crate::cargo::{self, Outcome};

/// Returns the command that builds everything the tests run.
pub fn tests() -> Result<Command> {
    cargo_test("--no-run")
}

/// Returns the command that runs the examples in the documentation.
pub fn doc_tests() -> Result<Command> {
    cargo_test("--doc")
}

/// Returns a `cargo test` command. Every call uses the same features; otherwise cargo would build the packages once per
/// set of features. Without the source of the installed fio, the engine for fio and its tests are omitted.
fn cargo_test(what: &str) -> Result<Command> {
    let mut command = cargo::cargo();
    command.args(["test", "--workspace", what]);
    if fio::is_ready() {
        command.args(["--features", fio::FEATURE]);
    }
    cargo::with_lints(&mut command)?;
    Ok(command)
}

/// Builds everything that the tests run. The outcome names the parts that were omitted.
pub fn build() -> Result<Outcome> {
    let mut outcome = cargo::run(&mut tests()?)?;
    if !fio::is_ready() {
        outcome.skipped.push("freestone-fio: fio and its source (packages fio, dpkg-dev)".to_owned());
    }
    Ok(outcome)
}

/// Builds the programs that the tests run and returns their directory, or None if the build fails.
pub fn programs() -> Result<Option<PathBuf>> {
    let built = cargo::run(&mut tests()?)?.ok;
    Ok(built.then_some(std::path::absolute(cargo::target_dir())?.join("debug")))
}
