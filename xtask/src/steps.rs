//! The gate: its steps in order, the time each takes, and the count at the end.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::ValueEnum;

use crate::bench::bench;
use crate::cargo::{self, Counts, Outcome, cargo};
use crate::failures::{self, Listening};
use crate::fio;
use crate::packages;
use crate::sanitize::{self, Extent, Sanitizer};
use crate::tidy;
use crate::torture;
use crate::variants::{Varied, with_variants};

/// The crates with models of lock protocols.
const MODELLED: [&str; 5] =
    ["freestone-core", "freestone-cow", "freestone-drive", "freestone-ram", "freestone-store"];
/// Loom explores every interleaving: only optimised it is fast enough, as are those.
const OPTIMISED_FOR_MODELS: [&str; 2] = ["generator", "loom"];
/// The crates that have other locks and streams in the experiments' copy.
const VARIED: [&str; 3] = ["freestone-core", "freestone-cow", "freestone-ram"];
/// Where the experiments leave what means nothing.
const QUICK_OUT: &str = "target/variants/quick";

/// A step of `cargo xtask test`, in the order in which they run: what fails fast goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Step {
    /// The Debian packages that the tests use are there, and the source of fio, or are fetched
    Packages,
    /// The code is formatted
    Fmt,
    /// The rules of CONTRIBUTING.md that a machine can check
    Tidy,
    /// No lint complains
    Clippy,
    /// The documentation builds without a warning
    Doc,
    /// All tests, the real clients among them
    Test,
    /// Instructions of the hot paths: none rose by more than 3 % over `benches/baseline.json`
    Gate,
    /// In a stock kernel: writeback of its own zram and of ours, as in the test of its source; our
    /// disks, and servers that are killed
    Lab,
    /// Random stacks under random requests, verbs, faults and crashes: runs that are always the
    /// same, real threads, and servers that are killed and started again
    Torture,
    /// The loom models of the lock protocols
    Models,
    /// The tests of the libraries under `ThreadSanitizer`, where threads share the most
    Tsan,
    /// The tests of the libraries under `AddressSanitizer`, where most memory is not checked by the
    /// language
    Asan,
    /// Slow: the sources' experiments, and the build with their locks and streams: no lint complains
    Variants,
    /// Slow: the program without what it has by default: no lint complains
    Least,
    /// Slow: the locks and streams that the sources' experiments compare pass their tests, and all
    /// experiments run; their speed is not judged
    Reproduce,
    /// Slow: faults that were found once are put back, one at a time, and the torture finds each
    Mutants,
    /// Slow: servers with a state are killed and ended in the middle of everything and started again,
    /// with more seeds than in the torture of the gate
    Lives,
    /// Slow: in a stock kernel, all of the writeback of zram, zones of `null_blk`, snapshots and
    /// merges that go from dm-snapshot to Freestone and back, our disks under file systems and under the
    /// torture, zoned ones under fio's own tests too, newer NBD clients and the kernel's own, machines
    /// of libvirt, a host with systemd
    LabRest,
    /// Slow: stores of objects against a Ceph of one node, whose daemons are killed
    Ceph,
    /// Slow: the Debian packages: lintian, installed, used and purged in a clean root, arm64 in an emulator,
    /// the image for containers
    PackagesRest,
    /// Slow: the other tests of the libraries under `ThreadSanitizer`
    TsanRest,
    /// Slow: the other tests of the libraries under `AddressSanitizer`
    AsanRest,
}

/// From here on, in their order, steps are of the slow lane.
const FIRST_SLOW: Step = Step::Variants;

impl Step {
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// It is of the slow lane.
    pub fn is_slow(self) -> bool {
        self as u8 >= FIRST_SLOW as u8
    }

    fn about(self) -> String {
        let value = self.to_possible_value();
        value.and_then(|v| v.get_help().map(ToString::to_string)).unwrap_or_default()
    }

    fn run(self) -> Result<Outcome> {
        match self {
            Self::Packages => {
                packages::ensure(&packages::TOOLS)?;
                // The fio engine is built against it.
                fio::source().map(|()| Outcome { ok: true, counts: Counts::default() })
            }
            Self::Fmt => cargo::run_each([
                with(cargo(), &["fmt", "--all", "--check"]),
                with(with_variants("fmt", Varied::Research)?, &["--all", "--check"]),
            ]),
            Self::Tidy => tidy::run().map(|ok| Outcome { ok, counts: Counts::default() }),
            Self::Clippy => clippy(&["--workspace", "--all-targets"]),
            Self::Least => clippy(&["--package", "freestone-cli", "--no-default-features"]),
            Self::Doc => cargo::run(documented(&mut with(cargo(), &["doc", "--workspace"]))),
            Self::Test => cargo::run(cargo::tests().args(["--workspace", "--no-fail-fast"])),
            // The release build: inlining across crates is part of what is counted.
            Self::Gate => bench(&["gate".into()]).map(|ok| Outcome { ok, counts: Counts::default() }),
            Self::Torture => torture::gate(),
            Self::Mutants => torture::mutants(&[]),
            Self::Lives => torture::lives(),
            Self::Variants => variants(),
            Self::Reproduce => reproduce(),
            Self::Lab => lab(&[
                &["lab/run-writeback.sh", "first"],
                &["lab/run-vhost-user.sh", "boot", "killed"],
                &["lab/run-ublk.sh", "program", "7"],
                &["lab/run-ublk-zones.sh", "drive", "7"],
            ]),
            Self::LabRest => packages::ensure(&packages::SLOW_TOOLS).and_then(|()| {
                lab(&[
                    &["lab/run-writeback.sh"],
                    &["lab/run-zones.sh"],
                    &["lab/run-snapshots.sh"],
                    &["lab/run-vhost-user.sh", "use", "cut", "files"],
                    &["lab/run-ublk.sh"],
                    &["lab/run-ublk-zones.sh"],
                    &["lab/run-ublk-zbd.sh"],
                    &["lab/run-nbd.sh"],
                    &["lab/run-torture.sh"],
                    &["lab/run-libvirt.sh"],
                    &["lab/run-systemd.sh"],
                ])
            }),
            Self::Ceph => slow_script("lab/run-ceph.sh"),
            Self::PackagesRest => slow_script("lab/run-packages.sh"),
            Self::Models => models(),
            Self::Tsan => sanitize::run(Sanitizer::Thread, Extent::Gate),
            Self::Asan => sanitize::run(Sanitizer::Address, Extent::Gate),
            Self::TsanRest => sanitize::run(Sanitizer::Thread, Extent::Rest),
            Self::AsanRest => sanitize::run(Sanitizer::Address, Extent::Rest),
        }
    }
}

/// Calls scripts of the lab, for the programs that the tests of the workspace have.
fn lab(runs: &[&[&str]]) -> Result<Outcome> {
    let Some(programs) = cargo::workspace_programs()? else { return Ok(Outcome::default()) };
    let names = [("FREESTONE", "freestone"), ("TORTURE", "freestone-torture")];
    scripts(runs, &names.map(|(variable, program)| (variable, programs.join(program))))
}

/// Calls scripts with variables.
fn scripts(runs: &[&[&str]], variables: &[(&str, PathBuf)]) -> Result<Outcome> {
    let (mut ok, mut counts) = (true, Counts::default());
    for run in runs {
        let mut script = Command::new(run[0]);
        script.args(&run[1..]).envs(variables.iter().cloned()).stdin(Stdio::null());
        let passed = cargo::run(&mut script)?.ok;
        counts += Counts { passed: u64::from(passed), failed: u64::from(!passed) };
        ok &= passed;
    }
    Ok(Outcome { ok, counts })
}

/// Calls a script that builds what it needs, with the tools of the slow lane.
fn slow_script(path: &str) -> Result<Outcome> {
    packages::ensure(&packages::SLOW_TOOLS)?;
    scripts(&[&[path]], &[])
}

fn clippy(what: &[&str]) -> Result<Outcome> {
    cargo::run(&mut with(with(with(cargo(), &["clippy"]), what), &["--", "-D", "warnings"]))
}

/// The code's own assertions are part of what is checked.
fn models() -> Result<Outcome> {
    let (mut command, _) = cargo::with_cfgs(&["loom"])?;
    command.args(["test", "--lib", "--no-fail-fast"]);
    for package in MODELLED {
        command.args(["--package", package]);
    }
    for package in MODELLED.iter().chain(&OPTIMISED_FOR_MODELS) {
        command.arg("--config").arg(format!("profile.dev.package.{package}.opt-level=3"));
    }
    cargo::run(command.arg("models"))
}

/// Checks the experiments, and what only their copy of the library has.
fn variants() -> Result<Outcome> {
    let mut library = with_variants("clippy", Varied::Library)?;
    library.args(["--lib", "--tests"]).args(VARIED.iter().flat_map(|package| ["--package", package]));
    let mut research = with_variants("clippy", Varied::Research)?;
    research.arg("--all-targets");
    cargo::run_each([library, research].map(|command| with(command, &["--", "-D", "warnings"])))
}

/// What builds documentation, without that of others, and fails where it warns.
fn documented(command: &mut Command) -> &mut Command {
    command.arg("--no-deps").env("RUSTDOCFLAGS", "-D warnings")
}

fn with(mut command: Command, args: &[&str]) -> Command {
    command.args(args);
    command
}

/// Tests what only this build of the library has and the experiments, and runs all of these once.
fn reproduce() -> Result<Outcome> {
    // Not the product's tests, which have run, but the protocols and codecs that this build has
    // other files of.
    let mut library = with_variants("test", Varied::Library)?;
    library.arg("--lib").args(VARIED.iter().flat_map(|package| ["--package", package]));
    library.args(["--", "slot::", "codec::", "cow::exceptions"]);
    let mut research = with_variants("test", Varied::Research)?;
    research.arg("--no-fail-fast");
    let mut documentation = with_variants("doc", Varied::Research)?;
    documented(&mut documentation);
    let Outcome { ok, mut counts } = cargo::run_each([documentation, library, research])?;
    let mut all = with_variants("run", Varied::Research)?;
    all.args(["--", "reproduce", "all", "--quick", "--out", QUICK_OUT]);
    if rustix::process::geteuid().is_root() {
        all.arg("--ext4");
    } else {
        println!("without --ext4, which mounts a file system and so is root's");
    }
    let ran = cargo::run(&mut all)?.ok;
    counts += Counts { passed: u64::from(ran), failed: u64::from(!ran) };
    Ok(Outcome { ok: ok && ran, counts })
}

/// Prints the steps.
pub fn list() {
    for step in Step::value_variants() {
        println!("{:<14} {}", step.name(), step.about());
    }
}

/// The steps of `--only` in their order, or those of the gate.
pub fn chosen(only: &[Step]) -> Vec<Step> {
    let wanted = |step: &Step| if only.is_empty() { !step.is_slow() } else { only.contains(step) };
    Step::value_variants().iter().copied().filter(wanted).collect()
}

/// A step that has run.
pub struct Done {
    pub step: Step,
    pub took: Duration,
    pub ok: bool,
    pub counts: Counts,
    /// What it printed.
    lines: Vec<String>,
}

/// Runs the steps, all of them even if one fails, and prints the sum and why any failed. A step counts as its tests, or
/// as one test where it runs none or fails for another reason.
///
/// # Errors
/// There is no pipe to listen with.
pub fn run(steps: &[Step]) -> Result<Vec<Done>> {
    let start = Instant::now();
    let mut done = Vec::new();
    for &step in steps {
        println!("\n==> {}: {} [{}]", step.name(), step.about(), seconds(start.elapsed()));
        let began = Instant::now();
        let listening = Listening::start()?;
        let Outcome { ok, mut counts } = step.run().unwrap_or_else(|error| {
            println!("{}: {error:#}", step.name());
            Outcome::default()
        });
        if counts == Counts::default() || (!ok && counts.failed == 0) {
            counts += Counts { passed: u64::from(ok), failed: u64::from(!ok) };
        }
        let lines = listening.end()?;
        let ok = ok && counts.failed == 0;
        let took = began.elapsed();
        println!("==> {}: {} in {}", step.name(), verdict(ok), seconds(took));
        done.push(Done { step, took, ok, counts, lines: if ok { Vec::new() } else { lines } });
        if step == Step::Packages && !ok {
            println!("the tests cannot run without these packages");
            break;
        }
    }
    for Done { step, lines, .. } in done.iter().filter(|done| !done.ok) {
        println!("\n==> {} failed:", step.name());
        for line in failures::excerpt(lines) {
            println!("{line}");
        }
    }
    println!("\n{:<14} {:>8} {:>8} {:>8}  ", "step", "time", "passed", "failed");
    let mut sum = Counts::default();
    for Done { step, took, ok, counts, .. } in &done {
        let (name, took) = (step.name(), seconds(*took));
        println!("{name:<14} {took:>8} {:>8} {:>8}  {}", counts.passed, counts.failed, verdict(*ok));
        sum += *counts;
    }
    println!("{:<14} {:>8}\n", "all", seconds(start.elapsed()));
    println!("{} passed, {} failed", sum.passed, sum.failed);
    Ok(done)
}

fn verdict(ok: bool) -> &'static str {
    if ok { "ok" } else { "FAILED" }
}

fn seconds(time: Duration) -> String {
    format!("{:.1}s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::{Step, chosen};

    #[test]
    fn steps_run_in_their_own_order() {
        assert_eq!(chosen(&[Step::Test, Step::Fmt]), [Step::Fmt, Step::Test]);
        assert_eq!(chosen(&[])[0], Step::Packages);
        assert!(chosen(&[]).contains(&Step::Asan) && !chosen(&[]).contains(&Step::Reproduce));
        assert_eq!(chosen(&[Step::Reproduce]), [Step::Reproduce]);
    }
}
