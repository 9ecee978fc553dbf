//! Runs cargo and other commands, passes their output on and counts the tests that ran.

use std::fmt;
use std::fs::{self, File, Permissions};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::num::NonZero;
use std::ops::AddAssign;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    pub passed: u64,
    pub failed: u64,
    /// Tests skipped because a package is not installed.
    pub skipped: u64,
}

impl Counts {
    /// Returns the counts of one test, which passed or failed.
    pub fn one(passed: bool) -> Self {
        Self { passed: u64::from(passed), failed: u64::from(!passed), skipped: 0 }
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// Formats the closing line of the gate, which continuous integration parses.
impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)?;
        if self.skipped > 0 { write!(f, ", {} skipped", self.skipped) } else { Ok(()) }
    }
}

#[derive(Debug, Default, Clone)]
pub struct Outcome {
    /// True if the command ended with status 0, or if the step succeeded.
    pub ok: bool,
    pub counts: Counts,
    /// Names of skipped tests and programs, each with the missing package.
    pub skipped: Vec<String>,
}

impl Outcome {
    /// Returns an outcome without tests.
    pub fn of(ok: bool) -> Self {
        Self { ok, ..Self::default() }
    }

    /// Returns the outcome of one test.
    pub fn of_test(passed: bool) -> Self {
        Self { counts: Counts::one(passed), ..Self::of(passed) }
    }

    pub fn add(&mut self, other: Self) {
        self.ok &= other.ok;
        self.counts += other.counts;
        self.skipped.extend(other.skipped);
    }
}

/// Returns a command for the cargo that runs xtask. Builds are not incremental unless the environment sets
/// `CARGO_INCREMENTAL`: incremental compilation costs a third of the time of a first build, and the gate builds once.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.stdin(Stdio::null());
    if std::env::var_os("CARGO_INCREMENTAL").is_none() {
        command.env("CARGO_INCREMENTAL", "0");
    }
    command
}

/// Suite name of a package's unit tests.
pub const LIB: &str = "lib";

/// A test program that cargo built.
pub struct TestProgram {
    pub package: String,
    /// Name of the file or directory below tests/, or [`LIB`] for unit tests.
    pub suite: String,
    directory: PathBuf,
    executable: PathBuf,
}

impl TestProgram {
    /// Returns the program's file, as a command that keeps the working directory of the tests.
    pub fn location(&self) -> String {
        format!("env -C {} {}", self.directory.display(), self.executable.display())
    }

    /// Returns the command that runs the program in the working directory that `cargo test` uses.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command.current_dir(&self.directory).stdin(Stdio::null());
        command.env("RUST_TEST_THREADS", tests_at_once().to_string());
        command
    }
}

/// A cargo message about a target that was built.
#[derive(Deserialize)]
struct Artifact {
    package_id: String,
    manifest_path: PathBuf,
    target: Target,
    profile: Profile,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

#[derive(Deserialize)]
struct Target {
    kind: Vec<String>,
    name: String,
}

/// Runs `cargo test --no-run` and returns the test programs, or None if the build fails. The caller runs the programs
/// without cargo: cargo would rebuild for every set of packages, because their features differ.
pub fn test_programs(command: &mut Command) -> Result<Option<Vec<TestProgram>>> {
    println!("$ {}", line(command));
    let command = command.args(["--message-format", "json-render-diagnostics"]).stderr(Stdio::inherit());
    let output = command.output().with_context(|| format!("cannot start {}", line(command)))?;
    if !output.status.success() {
        return Ok(None);
    }
    let mut programs = Vec::new();
    // Messages of other kinds have other fields and do not parse.
    let messages = output.stdout.split(|&byte| byte == b'\n');
    for Artifact { package_id, manifest_path, target, executable, profile } in
        messages.filter_map(|m| serde_json::from_slice(m).ok())
    {
        let (Some(executable), Some(directory)) = (executable, manifest_path.parent()) else { continue };
        if !profile.test {
            continue;
        }
        let is_lib = target.kind.iter().any(|kind| kind == LIB);
        let suite = if is_lib { LIB.to_owned() } else { target.name };
        let package = package_name(&package_id).to_owned();
        programs.push(TestProgram { package, suite, directory: directory.to_owned(), executable });
    }
    Ok(Some(programs))
}

/// Returns the package name in a package id of cargo: `path+file:///DIR#NAME@VERSION`, or `#VERSION` if the directory
/// has the package's name.
fn package_name(id: &str) -> &str {
    let (path, rest) = id.rsplit_once('#').unwrap_or(("", id));
    match rest.split_once('@') {
        Some((name, _)) => name,
        None => path.rsplit('/').next().unwrap_or(rest),
    }
}

/// Number of tests per CPU that run at the same time. Several tests share a CPU, because many mostly wait for a slow
/// disk, a timer or a server.
const TESTS_PER_CPU: usize = 3;

/// Returns the number of tests that run at the same time.
pub fn tests_at_once() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get) * TESTS_PER_CPU
}

/// Makes clippy compile the packages of the workspace, so that one build both lints and produces the programs. Every
/// lint warning is an error.
pub fn with_lints(command: &mut Command) -> Result<&mut Command> {
    let cargo = std::env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from);
    let driver = cargo.with_file_name("clippy-driver");
    ensure!(
        driver.is_file() || cargo.parent() == Some(Path::new("")),
        "no clippy beside {}",
        cargo.display()
    );
    command.env("RUSTC_WORKSPACE_WRAPPER", driver);
    // The form in which cargo-clippy passes arguments to its driver.
    Ok(command.env("CLIPPY_ARGS", "-Dwarnings__CLIPPY_HACKERY__"))
}

/// Returns a cargo command that sets the given cfgs for the packages of the workspace only, and the directory of the
/// built programs. A wrapper script adds the cfgs, so dependencies are shared with all other builds.
pub fn with_cfgs(cfgs: &[&str]) -> Result<(Command, PathBuf)> {
    let all = target_dir();
    let name = cfgs.join("+");
    let dir = all.join(&name);
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let script = std::path::absolute(dir.join("rustc"))?;
    let text = format!("#!/bin/sh\nexec \"$@\" --cfg {}\n", cfgs.join(" --cfg "));
    // The wrapper is written only if it changes, because a new file would make cargo query the compiler again.
    if fs::read_to_string(&script).ok().as_ref() != Some(&text) {
        fs::write(&script, text).with_context(|| format!("cannot write {}", script.display()))?;
        fs::set_permissions(&script, Permissions::from_mode(0o755))?;
    }
    let mut command = cargo();
    command.env("RUSTC_WORKSPACE_WRAPPER", script).env("CARGO_BUILD_BUILD_DIR", all);
    command.env("CARGO_TARGET_DIR", &dir);
    Ok((command, dir))
}

pub fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from)
}

/// Runs commands one after the other, all of them even if one fails. Returns the sum of their outcomes.
pub fn run_each(commands: impl IntoIterator<Item = Command>) -> Result<Outcome> {
    let mut sum = Outcome::of(true);
    for mut command in commands {
        sum.add(run(&mut command)?);
    }
    Ok(sum)
}

/// Runs a command to its end. Copies the command's stdout line by line and counts the tests in it.
pub fn run(command: &mut Command) -> Result<Outcome> {
    println!("$ {}", line(command));
    let child = command.stdout(Stdio::piped()).spawn();
    let mut child = child.with_context(|| format!("cannot start {}", line(command)))?;
    let mut counts = Counts::default();
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).split(b'\n') {
            let mut line = line.context("cannot read what it prints")?;
            counts += result_line(&String::from_utf8_lossy(&line)).unwrap_or_default();
            line.push(b'\n');
            io::stdout().write_all(&line).context("cannot write to stdout")?;
        }
    }
    let status = child.wait().context("cannot wait for its end")?;
    if !status.success() {
        println!("{}: {status}", line(command));
    }
    Ok(Outcome { counts, ..Outcome::of(status.success()) })
}

/// Runs commands at the same time. Prints the output of each when it has ended, and returns whether it succeeded and its
/// output.
pub fn run_side_by_side<const N: usize>(commands: [Command; N]) -> Result<[(bool, String); N]> {
    let dir = target_dir().join("side-by-side");
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let results = thread::scope(|scope| {
        let mut threads = Vec::new();
        for (number, command) in commands.into_iter().enumerate() {
            let file = dir.join(number.to_string());
            threads.push(scope.spawn(move || run_into(command, &file)));
        }
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no command panics"))
            .collect::<Result<Vec<_>>>()
    })?;
    Ok(results.try_into().expect("each command has a result"))
}

/// Runs a command with its output in a file. A pipe would stay open while a process that the command left behind runs.
fn run_into(mut command: Command, path: &Path) -> Result<(bool, String)> {
    println!("$ {}", line(&command));
    let file = File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    command.stdin(Stdio::null()).stdout(file.try_clone().context("no descriptor for stdout")?).stderr(file);
    let status = command.status().with_context(|| format!("cannot start {}", line(&command)))?;
    let output = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let output = String::from_utf8_lossy(&output).into_owned();
    println!("{}: {status}\n{}", line(&command), output.trim_end());
    Ok((status.success(), output))
}

/// Lists the files of the tree, tracked and untracked, without ignored ones.
pub fn files() -> Result<Vec<PathBuf>> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .output()
        .context("cannot start git")?;
    if !output.status.success() {
        bail!("git ls-files: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let names = String::from_utf8(output.stdout).context("the name of a file is not UTF-8")?;
    Ok(names.split_terminator('\0').map(PathBuf::from).collect())
}

/// Manifest of the experiments, which are a separate workspace.
pub const RESEARCH: &str = "research/Cargo.toml";

/// Returns the trimmed stdout of a command. Fails if the command cannot be started or fails.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot start {}", line(command)))?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}: {}", line(command), output.status, complaint.trim());
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Formats the command as a user would type it.
fn line(command: &Command) -> String {
    let mut words = Vec::new();
    for (key, value) in command.get_envs() {
        let value = value.unwrap_or_default().to_string_lossy();
        words.push(format!("{}='{value}'", key.to_string_lossy()));
    }
    let program = Path::new(command.get_program());
    words.push(program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned());
    words.extend(command.get_args().map(|arg| arg.to_string_lossy().into_owned()));
    words.join(" ")
}

/// Parses libtest's line `test result: ok. 3 passed; 0 failed; 0 ignored; ...`. Returns None for any other line.
fn result_line(line: &str) -> Option<Counts> {
    let rest = line.strip_prefix("test result: ")?;
    let number = |what: &str| {
        let before = rest.split(what).next().filter(|before| before.len() < rest.len())?;
        before.trim_end().rsplit(' ').next()?.parse().ok()
    };
    Some(Counts { passed: number(" passed;")?, failed: number(" failed;")?, skipped: 0 })
}

#[cfg(test)]
mod tests {
    use super::{Counts, result_line};

    #[test]
    fn result_line_reads_counts() {
        let line = "test result: FAILED. 12 passed; 3 failed; 0 ignored; 0 measured; 7 filtered out; finished in 0.1s";
        assert_eq!(result_line(line), Some(Counts { passed: 12, failed: 3, skipped: 0 }));
        let line = "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(result_line(line), Some(Counts::default()));
        assert_eq!(result_line("test result: unknown"), None);
        assert_eq!(result_line("test tests::a ... ok"), None);
    }
}
