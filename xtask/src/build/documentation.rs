//! Documents the libraries of the workspace with the dependencies of the test build.
//!
//! `cargo doc` would check every dependency again, which takes as long as the documentation itself. `cargo test --doc`
//! passes the libraries of the test build to rustdoc. So cargo runs xtask in the place of rustdoc, which records the
//! calls. Without `--test` and its options, these calls write the documentation.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::{env, fs, thread};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::{api, workspace};
use crate::cargo::{self, Outcome};

/// Environment variable with the directory of the recorded calls. Set while xtask runs in the place of rustdoc.
const CALLS_DIR: &str = "XTASK_RUSTDOC_CALLS";
/// Options of a documentation test that take a value. Other options of tests are `--test` alone.
const TEST_OPTIONS: [&str; 3] = ["--test-run-directory", "--test-args", "--test-runtool"];

/// A call of rustdoc by cargo.
#[derive(Debug, Serialize, Deserialize)]
struct Call {
    arguments: Vec<String>,
    directory: PathBuf,
    environment: BTreeMap<String, String>,
}

/// Directory of the interfaces of crates as JSON, below the target directory.
const INTERFACES: &str = "interfaces";

/// Writes the documentation of all libraries, without warnings, and checks or writes the interface of the public crates.
pub fn document(mode: api::Mode) -> Result<Outcome> {
    let target = std::path::absolute(cargo::target_dir())?;
    let (dir, interfaces) = (target.join("rustdoc-calls"), target.join(INTERFACES));
    for dir in [&dir, &interfaces] {
        if dir.exists() {
            fs::remove_dir_all(dir).with_context(|| format!("cannot empty {}", dir.display()))?;
        }
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    let mut tests = workspace::doc_tests()?;
    tests.env("RUSTDOC", env::current_exe()?).env(CALLS_DIR, &dir);
    if !cargo::run(&mut tests)?.ok {
        return Ok(Outcome::of(false));
    }
    let paths = fs::read_dir(&dir)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let (queue, results) = (Mutex::new(paths), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(path) = { queue.lock().expect("no thread panics").pop() } {
                    let passed = run(&path);
                    results.lock().expect("no thread panics").push(passed);
                }
            });
        }
    });
    let mut outcome = Outcome::of(true);
    for passed in results.into_inner()? {
        let passed = passed?;
        outcome.add(Outcome::of_test(passed));
    }
    outcome.add(api::run(&interfaces, mode)?);
    Ok(outcome)
}

/// Runs a recorded call: for the documentation, and for the interface if it [needs](api::needs) to be known. Returns true
/// if rustdoc printed no warning.
fn run(path: &Path) -> Result<bool> {
    let call: Call = serde_json::from_slice(&fs::read(path)?)?;
    let arguments = arguments_of_documentation(&call.arguments);
    let target = std::path::absolute(cargo::target_dir())?;
    let rustdoc = || {
        let mut command = Command::new("rustdoc");
        command.args(&arguments).current_dir(&call.directory).env_clear().envs(&call.environment);
        command.stdin(Stdio::null());
        command
    };
    let mut document = rustdoc();
    document.args(["-D", "warnings", "--out-dir"]).arg(target.join("doc"));
    let passed = document.status().context("cannot start rustdoc")?.success();
    let library = arguments.windows(2).find(|pair| pair[0] == "--crate-name").map(|pair| pair[1].as_str());
    if !passed || !library.is_some_and(api::needs) {
        return Ok(passed);
    }
    let mut interface = rustdoc();
    // JSON is unstable, and the compiler is a stable one.
    interface.env("RUSTC_BOOTSTRAP", "1").args([
        "-Z",
        "unstable-options",
        "--output-format",
        "json",
        "--out-dir",
    ]);
    interface.arg(target.join(INTERFACES));
    Ok(interface.status().context("cannot start rustdoc")?.success())
}

/// Returns the arguments of a documentation test without those that make rustdoc run tests.
fn arguments_of_documentation(arguments: &[String]) -> Vec<String> {
    let mut kept = Vec::new();
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        if TEST_OPTIONS.contains(&argument.as_str()) {
            arguments.next();
        } else if argument != "--test" {
            kept.push(argument.clone());
        }
    }
    kept
}

/// Records the call if cargo runs this process in the place of rustdoc. Returns false otherwise.
pub fn record_call() -> Result<bool> {
    let Some(dir) = env::var_os(CALLS_DIR) else { return Ok(false) };
    let environment = env::vars().filter(|(name, _)| name != CALLS_DIR && name != "RUSTDOC").collect();
    let call = Call { arguments: env::args().skip(1).collect(), directory: env::current_dir()?, environment };
    // Cargo runs one call at a time, so the number of files is a new name.
    let path = Path::new(&dir).join(format!("{}.json", fs::read_dir(&dir)?.count()));
    fs::write(&path, serde_json::to_vec(&call)?)
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::arguments_of_documentation;

    #[test]
    fn test_options_are_removed() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let call = words("--crate-name a --test a/lib.rs --test-run-directory /a --extern b=b.rlib");
        assert_eq!(arguments_of_documentation(&call), words("--crate-name a a/lib.rs --extern b=b.rlib"));
    }
}
