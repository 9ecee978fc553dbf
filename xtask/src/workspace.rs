//! The one build of all tests and programs of the workspace, which lints as it compiles.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::cargo::{self, Outcome};
use crate::fio;

/// Returns the command that builds everything the tests run.
pub fn tests() -> Result<Command> {
    cargo_test("--no-run")
}

/// Returns the command that runs the examples in the documentation.
pub fn doc_tests() -> Result<Command> {
    cargo_test("--doc")
}

/// One set of features for both, as cargo would build the packages once for each. Without the source of an installed
/// fio, the engine for fio and its tests are omitted.
fn cargo_test(what: &str) -> Result<Command> {
    let mut command = cargo::cargo();
    command.args(["test", "--workspace", what]);
    if fio::is_ready() {
        command.args(["--features", fio::FEATURE]);
    }
    cargo::linted(&mut command)?;
    Ok(command)
}

/// Builds everything, and names what it omits.
pub fn build() -> Result<Outcome> {
    let mut outcome = cargo::run(&mut tests()?)?;
    if !fio::is_ready() {
        outcome.left_out.push("freestone-fio: fio and its source (packages fio, dpkg-dev)".to_owned());
    }
    Ok(outcome)
}

/// Returns the directory of the programs that the tests run, and builds them before. Returns None if the build
/// fails.
pub fn programs() -> Result<Option<PathBuf>> {
    let built = cargo::run(&mut tests()?)?.ok;
    Ok(built.then_some(std::path::absolute(cargo::target_dir())?.join("debug")))
}
