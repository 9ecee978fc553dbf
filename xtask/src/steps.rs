//! The steps of tests, gate and slow lane: runs them, measures their time and prints the summary.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::ValueEnum;

use crate::cargo::{self, Counts, Outcome, cargo};
use crate::failures::{self, OutputCapture};
use crate::fio;
use crate::instructions;
use crate::packages;
use crate::record::Record;
use crate::sanitize::{self, Extent, Sanitizer};
use crate::suites;
use crate::tidy;
use crate::torture;
use crate::variants::{CopiedWorkspace, with_variants};
use crate::workspace;

/// Crates with models of lock protocols.
const MODELLED: [&str; 6] = [
    "freestone-core",
    "freestone-cow",
    "freestone-drive",
    "freestone-image",
    "freestone-ram",
    "freestone-store",
];
/// Dependencies that are optimised for the models: loom explores every interleaving and is too slow otherwise.
const OPTIMISED_FOR_MODELS: [&str; 2] = ["generator", "loom"];
/// Crates with variants of locks and streams in the experiments' copy.
const VARIED: [&str; 3] = ["freestone-core", "freestone-cow", "freestone-ram"];
/// Directory of the results of smoke runs, which nobody reads.
const QUICK_OUT: &str = "target/variants/quick";

/// A step of the gate. The order is that of a run: cheap checks first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Step {
    /// Install missing Debian packages that the tests use, and the source of fio
    Packages,
    /// Formatting
    Fmt,
    /// Rules of CONTRIBUTING.md that a machine can check
    Tidy,
    /// Build of all tests and programs, with clippy
    Build,
    /// Documentation, without warnings
    Doc,
    /// All tests, including those with real clients and the examples in the documentation
    Test,
    /// Loom models of the lock protocols
    Models,
    /// Torture: fixed seeds in simulation, with real threads, and with servers that are killed
    Torture,
    /// Gate: instructions of the hot paths, at most 3 % over `benches/baseline.json`
    Instructions,
    /// Gate: clippy over the experiments and over the program without its default features
    Variants,
    /// Gate: stock kernel: zram writeback, virtual machines, ublk, zones
    Lab,
    /// Gate: `ThreadSanitizer` over the suites that share the most between threads
    Tsan,
    /// Gate: `AddressSanitizer` over the suites with most unchecked memory access
    Asan,
    /// Gate: two minutes of servers with failing system calls; each commit tests others
    TortureCalls,
    /// Slow: all tests with all their cases
    TestFull,
    /// Slow: all loom models, including the longest
    ModelsFull,
    /// Slow: each experiment once
    Reproduce,
    /// Slow: reintroduce known faults, each of which the torture must find
    Mutants,
    /// Slow: reintroduce known faults, each of which failing system calls must find
    MutantsCalls,
    /// Slow: the torture with more seeds, and servers that are killed for six minutes
    TortureLong,
    /// Slow: all failing system calls of starts, verbs and ends
    TortureCallsServer,
    /// Slow: all failing system calls of saves, rewrites, snapshots, merges, zones and files
    TortureCallsDisks,
    /// Slow: all failing system calls of pushes, pulls and prunes
    TortureCallsStore,
    /// Slow: zram writeback in a stock kernel, all sequences
    LabWriteback,
    /// Slow: the same random operations on zones of `null_blk` and of Freestone
    LabZones,
    /// Slow: COW devices and merges, exchanged between dm-snapshot and Freestone
    LabSnapshots,
    /// Slow: virtual machines: file systems, power cuts, growth
    LabVhostUser,
    /// Slow: every operation on a ublk RAM disk, two kernels
    LabUblkDevice,
    /// Slow: ublk disks of the program, a hundred of them, little memory, an unprivileged user; two kernels
    LabUblk,
    /// Slow: ublk disks under four file systems, two kernels
    LabUblkUse,
    /// Slow: zoned ublk devices under file systems, two kernels
    LabUblkZones,
    /// Slow: fio's own tests of zoned devices
    LabUblkZbd,
    /// Slow: newer NBD clients, and the kernel's
    LabNbd,
    /// Slow: torture of the program with block devices
    LabTorture,
    /// Slow: a virtual machine that libvirt starts
    LabLibvirt,
    /// Slow: systemd units and udev rules on a host
    LabSystemd,
    /// Slow: tasks of users on real mounts: with `freestone mount`, by hand, and in a stock kernel
    Tasks,
    /// Slow: object stores and RBD of a one-node Ceph whose daemons are killed
    Ceph,
    /// Slow: the Debian package: lintian; installed, used, updated and purged in a clean root
    PackageRoot,
    /// Slow: the Debian package for arm64: lintian; its program in an emulator
    PackageArm64,
    /// Slow: the image for containers
    PackageContainer,
    /// Slow: the other suites of all devices together under `ThreadSanitizer`
    TsanDevices,
    /// Slow: the other suites of single crates under `ThreadSanitizer`
    TsanCrates,
    /// Slow: the other suites under `AddressSanitizer`
    AsanRest,
}

/// First step of the gate beyond the tests.
const FIRST_OF_GATE: Step = Step::Instructions;
/// First piece of the slow lane.
const FIRST_SLOW: Step = Step::TestFull;

/// Group of steps that one command runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// `cargo xtask test`.
    Test,
    /// `cargo xtask gate`, after the tests.
    Gate,
    /// A few pieces in every gate, those that ran longest ago first.
    Slow,
}

impl Step {
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    pub fn lane(self) -> Lane {
        match self as u8 {
            step if step < FIRST_OF_GATE as u8 => Lane::Test,
            step if step < FIRST_SLOW as u8 => Lane::Gate,
            _ => Lane::Slow,
        }
    }

    fn about(self) -> String {
        let value = self.to_possible_value();
        value.and_then(|v| v.get_help().map(ToString::to_string)).unwrap_or_default()
    }

    fn run(self) -> Result<Outcome> {
        match self {
            Self::Packages => packages(),
            Self::Fmt => cargo::run_each([
                with(cargo(), &["fmt", "--all", "--check"]),
                with(with_variants("fmt", CopiedWorkspace::Research)?, &["--all", "--check"]),
            ]),
            Self::Tidy => tidy::run().map(Outcome::of),
            Self::Build => workspace::build(),
            Self::Doc => cargo::run(documented(&mut with(cargo(), &["doc", "--workspace"]))),
            Self::Test => suites::run(suites::Extent::Quick),
            Self::TestFull => suites::run(suites::Extent::Full),
            // Instructions are counted in the release build, because inlining across crates affects the counts.
            Self::Instructions => instructions::run(),
            Self::Torture => torture::fixed(torture::SHORT),
            Self::Mutants => torture::mutants(&torture::names(false)),
            Self::MutantsCalls => torture::mutants(&torture::names(true)),
            Self::TortureLong => torture::fixed(torture::LONG),
            Self::TortureCalls => torture::calls(&[]),
            Self::TortureCallsServer => torture::calls(&torture::SERVER_SCENES),
            Self::TortureCallsDisks => torture::calls(&torture::DISK_SCENES),
            Self::TortureCallsStore => torture::calls(&torture::STORE_SCENES),
            Self::Variants => variants(),
            Self::Reproduce => reproduce(),
            Self::Models => models(&[]),
            Self::ModelsFull => models(&["--include-ignored"]),
            Self::Tsan => sanitize::run(Sanitizer::Thread, Extent::Gate),
            Self::Asan => sanitize::run(Sanitizer::Address, Extent::Gate),
            Self::TsanDevices => sanitize::run(Sanitizer::Thread, Extent::RestOfDevices),
            Self::TsanCrates => sanitize::run(Sanitizer::Thread, Extent::RestOfCrates),
            Self::AsanRest => sanitize::run(Sanitizer::Address, Extent::Rest),
            Self::Ceph => slow_scripts(&packages::CEPH, &[&["lab/run-ceph.sh"]]),
            Self::PackageRoot => {
                slow_scripts(&packages::PACKAGING, &[&["lab/run-packages.sh", "lintian", "root"]])
            }
            Self::PackageArm64 => {
                slow_scripts(&packages::PACKAGING, &[&["lab/run-packages.sh", "lintian", "arm64"]])
            }
            Self::PackageContainer => {
                slow_scripts(&packages::PACKAGING, &[&["lab/run-packages.sh", "container"]])
            }
            Self::Lab => lab(&[
                &["lab/run-writeback.sh", "first"],
                &["lab/run-vhost-user.sh", "boot", "killed"],
                &["lab/run-ublk.sh", "program", "7"],
                &["lab/run-ublk-zones.sh", "drive", "7"],
            ]),
            Self::LabWriteback => lab(&[&["lab/run-writeback.sh"]]),
            Self::LabZones => lab(&[&["lab/run-zones.sh"]]),
            Self::LabSnapshots => lab(&[&["lab/run-snapshots.sh"]]),
            Self::LabVhostUser => lab(&[&["lab/run-vhost-user.sh", "use", "cut", "files"]]),
            Self::LabUblkDevice => lab(&[&["lab/run-ublk.sh", "device"]]),
            Self::LabUblk => lab(&[
                &["lab/run-ublk.sh", "program"],
                &["lab/run-ublk.sh", "many"],
                &["lab/run-ublk.sh", "user"],
                &["lab/run-ublk.sh", "memory"],
            ]),
            Self::LabUblkUse => lab(&[&["lab/run-ublk.sh", "use"]]),
            Self::LabUblkZones => lab(&[&["lab/run-ublk-zones.sh"]]),
            Self::LabUblkZbd => lab(&[&["lab/run-ublk-zbd.sh"]]),
            Self::LabNbd => lab(&[&["lab/run-nbd.sh"]]),
            Self::LabTorture => lab(&[&["lab/run-torture.sh"]]),
            Self::LabLibvirt => {
                packages::ensure(&packages::LIBVIRT).and_then(|()| lab(&[&["lab/run-libvirt.sh"]]))
            }
            Self::LabSystemd => lab(&[&["lab/run-systemd.sh"]]),
            Self::Tasks => tasks(),
        }
    }
}

/// Installs the packages that the tests use. Outside continuous integration, missing packages are not an error: the tests
/// that need them are skipped and listed.
fn packages() -> Result<Outcome> {
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
fn lab(runs: &[&[&str]]) -> Result<Outcome> {
    packages::ensure(&packages::LAB)?;
    let Some(programs) = workspace::programs()? else { return Ok(Outcome::default()) };
    let names = [("FREESTONE", "freestone"), ("TORTURE", "freestone-torture")];
    scripts(runs, &names.map(|(variable, program)| (variable, programs.join(program))))
}

/// Runs the tasks of users. Mounts on this machine need root; the kernel lab does not.
fn tasks() -> Result<Outcome> {
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
        all.add(Outcome { counts: Counts::one(passed), ..Outcome::of(passed) });
    }
    Ok(all)
}

/// Runs scripts that need additional tools and build the programs that they use.
fn slow_scripts(tools: &[packages::Tool], runs: &[&[&str]]) -> Result<Outcome> {
    packages::ensure(tools)?;
    scripts(runs, &[])
}

fn clippy(what: &[&str]) -> Command {
    with(with(with(cargo(), &["clippy"]), what), &["--", "-D", "warnings"])
}

/// Runs the models. Assertions in the code are enabled and part of the check.
fn models(arguments: &[&str]) -> Result<Outcome> {
    let (mut command, _) = cargo::with_cfgs(&["loom"])?;
    command.args(["test", "--lib", "--no-fail-fast"]);
    for package in MODELLED {
        command.args(["--package", package]);
    }
    for package in MODELLED.iter().chain(&OPTIMISED_FOR_MODELS) {
        command.arg("--config").arg(format!("profile.test.package.{package}.opt-level=3"));
    }
    cargo::run(command.args(["models", "--"]).args(arguments))
}

/// Lints the experiments, the variants in their copy of the library, and the program without its default features.
fn variants() -> Result<Outcome> {
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

fn with(mut command: Command, args: &[&str]) -> Command {
    command.args(args);
    command
}

/// Runs the tests of the experiments and of their copy of the library, then each experiment once.
fn reproduce() -> Result<Outcome> {
    packages::ensure(&packages::tools())?;
    // Run only the tests of modules that have variants; the product's own tests have run.
    let mut library = with_variants("test", CopiedWorkspace::Library)?;
    library.arg("--lib").args(VARIED.iter().flat_map(|package| ["--package", package]));
    library.args(["--", "slot::", "codec::", "cow::exceptions"]);
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
    outcome.add(Outcome { counts: Counts::one(ran), ..Outcome::of(ran) });
    Ok(outcome)
}

/// Prints the steps.
pub fn list() {
    for step in Step::value_variants() {
        println!("{:<18} {}", step.name(), step.about());
    }
}

/// Returns the steps of a lane.
pub fn of_lane(lane: Lane) -> Vec<Step> {
    Step::value_variants().iter().copied().filter(|step| step.lane() == lane).collect()
}

/// Returns the steps of a sanitizer, or of both.
pub fn of_sanitizer(sanitizer: Option<Sanitizer>) -> Vec<Step> {
    let thread = [Step::Tsan, Step::TsanDevices, Step::TsanCrates];
    let address = [Step::Asan, Step::AsanRest];
    match sanitizer {
        Some(Sanitizer::Thread) => thread.to_vec(),
        Some(Sanitizer::Address) => address.to_vec(),
        None => [&thread[..], &address[..]].concat(),
    }
}

/// Returns the steps that `--only` selects, in the order of a run.
pub fn chosen(only: &[Step]) -> Vec<Step> {
    Step::value_variants().iter().copied().filter(|step| only.contains(step)).collect()
}

/// Result of a step.
pub struct StepResult {
    pub step: Step,
    pub took: Duration,
    /// CPU time of the step and of its child processes.
    cpu: Duration,
    pub ok: bool,
    pub counts: Counts,
    skipped: Vec<String>,
    /// Output of a failed step; empty if it passed.
    lines: Vec<String>,
}

/// Runs a step, prints its times, and records a piece of the slow lane. A step counts as its tests, or as one test if it
/// runs none or fails for another reason.
pub fn run(step: Step, start: Instant, left: &[Step]) -> Result<StepResult> {
    let left: Vec<_> = left.iter().map(|step| step.name()).collect();
    println!("\n==> {}: {} [{}]", step.name(), step.about(), seconds(start.elapsed()));
    if !left.is_empty() {
        println!("    then: {}", left.join(", "));
    }
    let (began, cpu_before) = (Instant::now(), cpu_time());
    let capture = OutputCapture::start()?;
    let Outcome { ok, mut counts, skipped } = step.run().unwrap_or_else(|error| {
        println!("{}: {error:#}", step.name());
        Outcome::default()
    });
    if counts == Counts::default() || (!ok && counts.failed == 0) {
        counts += Counts::one(ok);
    }
    let lines = capture.end()?;
    let ok = ok && counts.failed == 0;
    let (took, cpu) = (began.elapsed(), cpu_time().saturating_sub(cpu_before));
    println!("==> {}: {} in {}, CPU time {}", step.name(), verdict(ok), seconds(took), seconds(cpu));
    if step.lane() == Lane::Slow {
        let mut record = Record::read()?;
        record.record_run(&step.name(), counts, took.as_secs())?;
        record.write()?;
    }
    Ok(StepResult { step, took, cpu, ok, counts, skipped, lines: if ok { Vec::new() } else { lines } })
}

/// Runs all steps even if one fails. Only a failure of the packages or of the build ends the run.
pub fn run_all(steps: &[Step], start: Instant) -> Result<Vec<StepResult>> {
    let mut done = Vec::new();
    for (n, &step) in steps.iter().enumerate() {
        let ended = run(step, start, &steps[n + 1..])?;
        let ends = matches!(step, Step::Packages | Step::Build) && !ended.ok;
        done.push(ended);
        if ends {
            break;
        }
    }
    Ok(done)
}

/// How a run of steps ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Passed,
    Failed,
    /// Every test that ran passed, and others were skipped.
    Incomplete,
}

/// Prints excerpts of failed steps, the skipped tests, the times and the counts. Each `overdue` piece of the slow lane
/// counts as a failure.
pub fn summary(done: &[StepResult], start: Instant, overdue: &[String]) -> Verdict {
    for StepResult { step, lines, .. } in done.iter().filter(|done| !done.ok) {
        println!("\n==> {} failed:", step.name());
        for line in failures::excerpt(lines) {
            println!("{line}");
        }
    }
    for line in overdue {
        println!("\noverdue: {line}");
    }
    let skipped: Vec<_> = done.iter().flat_map(|done| &done.skipped).collect();
    if !skipped.is_empty() {
        println!("\nskipped because packages or rights are missing:");
        for what in &skipped {
            println!("  {what}");
        }
    }
    println!("\n{:<18} {:>8} {:>8} {:>8} {:>8}  ", "step", "time", "CPU", "passed", "failed");
    let (mut sum, mut cpu_sum) = (Counts::default(), Duration::ZERO);
    for StepResult { step, took, cpu, ok, counts, .. } in done {
        let (name, took, cpu_text) = (step.name(), seconds(*took), seconds(*cpu));
        let Counts { passed, failed, .. } = counts;
        println!("{name:<18} {took:>8} {cpu_text:>8} {passed:>8} {failed:>8}  {}", verdict(*ok));
        sum += *counts;
        cpu_sum += *cpu;
    }
    println!("{:<18} {:>8} {:>8}\n", "all", seconds(start.elapsed()), seconds(cpu_sum));
    sum.failed += overdue.len() as u64;
    println!("{sum}");
    match (sum.failed, skipped.len()) {
        (0, 0) => Verdict::Passed,
        (0, _) => Verdict::Incomplete,
        _ => Verdict::Failed,
    }
}

impl From<bool> for Verdict {
    fn from(ok: bool) -> Self {
        if ok { Self::Passed } else { Self::Failed }
    }
}

fn verdict(ok: bool) -> &'static str {
    if ok { "ok" } else { "FAILED" }
}

fn seconds(time: Duration) -> String {
    format!("{:.1}s", time.as_secs_f64())
}

/// Returns the CPU time of this process and of its terminated children, or zero if /proc is not mounted.
fn cpu_time() -> Duration {
    parse_cpu_time(&fs::read_to_string("/proc/self/stat").unwrap_or_default()).unwrap_or_default()
}

/// Returns the sum of utime, stime, cutime and cstime in the text of `/proc/PID/stat`.
fn parse_cpu_time(stat: &str) -> Result<Duration> {
    /// `USER_HZ`, which is the same on every Linux.
    const TICKS_PER_SECOND: u64 = 100;
    // The name of the program may contain blanks and parentheses.
    let (_, fields) = stat.rsplit_once(')').context("no name")?;
    let times = fields.split_whitespace().skip(11).take(4);
    let ticks = times.map(str::parse::<u64>).sum::<std::result::Result<u64, _>>()?;
    Ok(Duration::from_millis(ticks * 1000 / TICKS_PER_SECOND))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Lane, Step, chosen, of_lane, parse_cpu_time};

    #[test]
    fn chosen_keeps_the_order_of_a_run() {
        assert_eq!(chosen(&[Step::Test, Step::Fmt]), [Step::Fmt, Step::Test]);
        assert_eq!(of_lane(Lane::Test).first(), Some(&Step::Packages));
        assert_eq!(of_lane(Lane::Test).last(), Some(&Step::Torture));
        assert_eq!(of_lane(Lane::Gate).last(), Some(&Step::TortureCalls));
        assert!(of_lane(Lane::Slow).contains(&Step::Reproduce));
    }

    #[test]
    fn cpu_time_sums_own_and_children() {
        let stat = "7 (a b) c) S 1 7 7 0 -1 4194560 1 2 3 4 100 50 300 25 20 0 1 0 5 6 7";
        assert_eq!(parse_cpu_time(stat).unwrap(), Duration::from_millis(4750));
        assert!(parse_cpu_time("").is_err());
    }
}
