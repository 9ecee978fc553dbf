//! The commands that a step runs, if the check has no module of its own.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;

use anyhow::Result;

use crate::build::variants::{CopiedWorkspace, with_variants};
use crate::build::{fio, packages, workspace};
use crate::cargo::{self, Outcome, cargo};
use crate::suites::{self, Extent};

/// Crates with models of lock protocols.
const MODELLED: [&str; 7] = [
    "freestone-core",
    "freestone-cow",
    "freestone-drive",
    "freestone-image",
    "freestone-ram",
    "freestone-spill",
    "freestone-store",
];
/// Dependencies that are optimised for the models: loom explores every interleaving and is too slow otherwise.
const OPTIMISED_FOR_MODELS: [&str; 2] = ["generator", "loom"];
/// Crates with variants of locks and streams in the experiments' copy.
const VARIED: [&str; 3] = ["freestone-codec", "freestone-core", "freestone-cow"];
/// Directory of the results of smoke runs, which nobody reads.
const QUICK_OUT: &str = "target/variants/quick";

/// Installs the packages that the tests use. Outside continuous integration, missing packages are not an error: the tests
/// that need them are skipped and listed.
pub(super) fn install_packages() -> Result<Outcome> {
    let mut outcome = Outcome::of(true);
    let result = packages::ensure(&packages::tools());
    if result.is_err() && packages::is_ci() {
        result?;
    } else if let Err(error) = result {
        println!("packages are missing, and tests that need them are skipped: {error:#}");
        let missing = packages::missing(&packages::tools());
        outcome.skipped.extend(missing.iter().map(|(tool, package)| format!("{tool} (package {package})")));
    }
    // The engine for fio is built against the source of fio.
    match fio::source() {
        Err(error) if packages::is_ci() => Err(error),
        Err(error) => {
            println!("the engine for fio is omitted: {error:#}");
            Ok(outcome)
        }
        Ok(()) => Ok(outcome),
    }
}

/// Runs scripts of the lab with the programs of the workspace's test build.
pub(super) fn lab(runs: &[&[&str]]) -> Result<Outcome> {
    packages::ensure(&packages::LAB)?;
    let Some(programs) = workspace::programs()? else { return Ok(Outcome::default()) };
    let names = [("FREESTONE", "freestone"), ("TORTURE", "freestone-torture")];
    scripts(runs, &names.map(|(variable, program)| (variable, programs.join(program))))
}

/// Runs parts of the recipes, of which each counts as one test. Recipes mount disks and run containers, which needs root.
pub(super) fn recipes(parts: &[&str]) -> Result<Outcome> {
    packages::ensure(&packages::tools())?;
    packages::ensure(&packages::RECIPES)?;
    let runs: Vec<_> = parts.iter().map(|part| ["lab/run-recipes.sh", part]).collect();
    lab(&runs.iter().map(<[_; 2]>::as_slice).collect::<Vec<_>>())
}

/// Runs the templates of continuous integration, of which each counts as one test. Their jobs mount disks, which needs root.
pub(super) fn ci_templates() -> Result<Outcome> {
    packages::ensure(&packages::tools())?;
    packages::ensure(&packages::CI_TEMPLATES)?;
    lab(&[&["lab/run-ci-templates.sh", "github"], &["lab/run-ci-templates.sh", "gitlab"]])
}

/// Runs the tasks of users. Mounts on this machine need root; the kernel lab does not.
pub(super) fn tasks() -> Result<Outcome> {
    packages::ensure(&packages::TASKS)?;
    let mut outcome = lab(&[&["lab/run-tasks.sh", "--kernel", "6.12"]])?;
    if rustix::process::geteuid().is_root() {
        outcome.add(lab(&[&["lab/run-tasks.sh"], &["lab/run-tasks.sh", "--by", "hand"]])?);
    } else {
        outcome.skipped.push("tasks on mounts of this machine, which need root".to_owned());
    }
    Ok(outcome)
}

/// Runs each script with the given environment variables. Each script counts as one test.
fn scripts(runs: &[&[&str]], variables: &[(&str, PathBuf)]) -> Result<Outcome> {
    let mut all = Outcome::of(true);
    for run in runs {
        let mut script = Command::new(run[0]);
        script.args(&run[1..]).envs(variables.iter().cloned()).stdin(Stdio::null());
        let passed = cargo::run(&mut script)?.ok;
        all.add(Outcome::of_test(passed));
    }
    Ok(all)
}

/// Runs scripts that need tools beside those of the tests, and build the programs that they use.
pub(super) fn slow_scripts(tools: &[packages::Tool], runs: &[&[&str]]) -> Result<Outcome> {
    packages::ensure(&packages::tools())?;
    packages::ensure(tools)?;
    scripts(runs, &[])
}

fn clippy(what: &[&str]) -> Command {
    with(with(with(cargo(), &["clippy"]), what), &["--", "-D", "warnings"])
}

/// Runs the models. Assertions in the code are enabled and part of the check.
pub(super) fn models(extent: Extent) -> Result<Outcome> {
    let Some(programs) = cargo::test_programs(&mut models_build()?)? else { return Ok(Outcome::default()) };
    // Models wait for nothing, so more of them than CPUs would gain no time.
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    suites::run_programs(&programs, "models", extent, cpus)
}

/// Returns the command that builds the models.
pub(super) fn models_build() -> Result<Command> {
    let (mut command, _) = cargo::with_cfgs(&["loom"])?;
    command.args(["test", "--lib", "--no-run"]);
    for package in MODELLED {
        command.args(["--package", package]);
    }
    for package in MODELLED.iter().chain(&OPTIMISED_FOR_MODELS) {
        command.arg("--config").arg(format!("profile.test.package.{package}.opt-level=3"));
    }
    Ok(command)
}

/// Lints the experiments, the variants in their copy of the library, and the program without its default features.
pub(super) fn variants() -> Result<Outcome> {
    let mut library = with_variants("clippy", CopiedWorkspace::Library)?;
    library.args(["--lib", "--tests"]).args(VARIED.iter().flat_map(|package| ["--package", package]));
    let mut research = with_variants("clippy", CopiedWorkspace::Research)?;
    research.arg("--all-targets");
    let [library, research] = [library, research].map(|command| with(command, &["--", "-D", "warnings"]));
    cargo::run_each([library, research, clippy(&["--package", "freestone-cli", "--no-default-features"])])
}

/// Adds the options that document only the workspace and make warnings errors.
fn documented(command: &mut Command) -> &mut Command {
    command.arg("--no-deps").env("RUSTDOCFLAGS", "-D warnings")
}

pub(super) fn with(mut command: Command, args: &[&str]) -> Command {
    command.args(args);
    command
}

/// Runs the tests of the experiments and of their copy of the library, then each experiment once.
pub(super) fn reproduce() -> Result<Outcome> {
    packages::ensure(&packages::tools())?;
    // Run only the tests of modules that have variants; the product's own tests have run.
    let mut library = with_variants("test", CopiedWorkspace::Library)?;
    library.arg("--lib").args(VARIED.iter().flat_map(|package| ["--package", package]));
    library.args(["--", "slot::", "lend::", "cow::exceptions"]);
    let mut research = with_variants("test", CopiedWorkspace::Research)?;
    research.arg("--no-fail-fast");
    let mut documentation = with_variants("doc", CopiedWorkspace::Research)?;
    documented(&mut documentation);
    let mut outcome = cargo::run_each([documentation, library, research])?;
    let mut all = with_variants("run", CopiedWorkspace::Research)?;
    all.args(["--", "reproduce", "all", "--quick", "--out", QUICK_OUT]);
    if rustix::process::geteuid().is_root() {
        all.arg("--ext4");
    } else {
        println!("not root: without --ext4, which mounts a file system");
    }
    let ran = cargo::run(&mut all)?.ok;
    outcome.add(Outcome::of_test(ran));
    Ok(outcome)
}
