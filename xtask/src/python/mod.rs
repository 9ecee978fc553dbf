//! The Python package: its checks and tests, each in a virtual environment below the target directory.
//!
//! `steps` and `package` use this room.

mod pytest;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::build::{packages, workspace};
use crate::cargo::{self, Outcome, target_dir};

/// Directory of the package.
pub const PACKAGE: &str = "python";
/// Packages of the registry that the step uses, as for pip.
const CHECKS: &str = include_str!("../../../python/tests/requirements.txt");
/// Packages of the registry that `explore` explores, as for pip.
const DATABASES: &str = include_str!("../../../lab/explore/requirements.txt");
/// Packages of the registry that the suite of pgqueuer needs, as for pip.
const SUITE: &str = include_str!("../../../lab/pgqueuer/requirements.txt");
/// Tests of the pytest plugin, which run side by side: each is a pytest of its own.
const PLUGIN_TESTS: &str = "tests/plugin";
/// Number of tests of the plugin that run at the same time.
const WORKERS: &str = "2";
/// File in an environment with the packages that were installed in it.
const STAMP: &str = "installed";
/// Debian's Python, whose environments can use libnbd's module of Debian.
const DEBIANS_PYTHON: &str = "/usr/bin/python3";

/// Checks the types of the package and runs its tests with the program that the tests use. Outside continuous
/// integration, an environment that cannot be made is not an error: the step is skipped and named.
pub fn run() -> Result<Outcome> {
    let programs = match environment("checks", &requirements(CHECKS)) {
        Ok(programs) => programs,
        Err(error) if packages::is_ci() => return Err(error),
        Err(error) => {
            println!("the tests of the Python package are omitted: {error:#}");
            let skipped = vec!["the Python package (packages python3, python3-venv; a registry)".to_owned()];
            return Ok(Outcome { skipped, ..Outcome::of(true) });
        }
    };
    let Some(built) = workspace::programs()? else { return Ok(Outcome::default()) };
    let mut types = Command::new(programs.join("mypy"));
    types.current_dir(PACKAGE).arg("--cache-dir").arg(programs.with_file_name("mypy"));
    let [mut package, mut plugin] = [tests(&programs, &built), tests(&programs, &built)];
    package.args(["--ignore", PLUGIN_TESTS]);
    plugin.args(["-n", WORKERS, PLUGIN_TESTS]);
    let [types, package, plugin] = cargo::run_side_by_side([types, package, plugin])?;
    let mut outcome = Outcome::of_test(types.0);
    for (ok, output) in [package, plugin] {
        outcome.add(pytest::outcome(ok, &output));
    }
    Ok(outcome)
}

/// Runs all tests of the pytest plugin, with databases and a thousand disks.
pub fn plugin() -> Result<Outcome> {
    packages::ensure(&packages::tools())?;
    packages::ensure(&packages::TASKS)?;
    let programs = environment("checks", &requirements(CHECKS))?;
    let Some(built) = workspace::programs()? else { return Ok(Outcome::default()) };
    let mut all = tests(&programs, &built);
    pytest::run(all.args(["-n", WORKERS, PLUGIN_TESTS]).env("FREESTONE_EFFORT", "full"))
}

/// Explores the power losses of databases from registries on a file system. Mounts need root.
pub fn explore(fs: &str) -> Result<Outcome> {
    packages::ensure(&packages::tools())?;
    packages::ensure(&packages::EXPLORE)?;
    let python = environment("explore", &requirements(DATABASES))?.join("python");
    script(Command::new(python).args(["lab/explore/run.py", "--fs", fs]))
}

/// Runs all tests of a project from the registry that use a database: as they are, and moved over to the pytest plugin.
pub fn suite() -> Result<Outcome> {
    packages::ensure(&packages::tools())?;
    packages::ensure(&packages::SUITE)?;
    let python = environment("pgqueuer", &requirements(SUITE))?.join("python");
    script(Command::new("lab/pgqueuer/run.sh").env("PYTHON", python))
}

/// Runs a script with the program that the tests use. The script counts as one test.
fn script(command: &mut Command) -> Result<Outcome> {
    let Some(built) = workspace::programs()? else { return Ok(Outcome::default()) };
    let passed = cargo::run(command.env("FREESTONE", built.join("freestone")).stdin(Stdio::null()))?.ok;
    Ok(Outcome::of_test(passed))
}

fn requirements(list: &'static str) -> Vec<&'static str> {
    list.lines().filter(|line| !line.starts_with('#')).collect()
}

fn tests(programs: &Path, built: &Path) -> Command {
    let mut tests = Command::new(programs.join("python"));
    tests.args(["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]).current_dir(PACKAGE);
    tests.env("FREESTONE_PROGRAM", built.join("freestone"));
    tests
}

/// Makes a virtual environment with packages of the registry, unless it exists. Returns the directory of its programs.
pub fn environment(name: &str, wanted: &[&str]) -> Result<PathBuf> {
    let python = if Path::new(DEBIANS_PYTHON).exists() { DEBIANS_PYTHON } else { "python3" };
    let version = cargo::output(Command::new(python).arg("--version"))?;
    let dir = std::path::absolute(target_dir().join("python").join(name))?;
    let (programs, stamp) = (dir.join("bin"), dir.join(STAMP));
    // The programs of an environment name its directory, so an environment that was moved is made again.
    let installed = format!("{version}\n{}\n{}\n", dir.display(), wanted.join("\n"));
    if fs::read_to_string(&stamp).is_ok_and(|text| text == installed) {
        return Ok(programs);
    }
    if dir.exists() {
        fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    }
    let mut make = Command::new(python);
    succeed(make.args(["-m", "venv", "--system-site-packages"]).arg(&dir))?;
    let mut install = Command::new(programs.join("pip"));
    install.args(["install", "--quiet", "--disable-pip-version-check", "--retries", "2"]).args(wanted);
    succeed(&mut install)?;
    fs::write(&stamp, installed).with_context(|| format!("cannot write {}", stamp.display()))?;
    Ok(programs)
}

fn succeed(command: &mut Command) -> Result<()> {
    // Packages of the caller's environment must not count as those of this one.
    for variable in ["PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"] {
        if env::var_os(variable).is_some() {
            command.env_remove(variable);
        }
    }
    if !cargo::run(command.stdin(Stdio::null()))?.ok {
        bail!("the virtual environment was not made");
    }
    Ok(())
}
