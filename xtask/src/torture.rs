//! `cargo xtask torture`: builds and runs each mode of the torture.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;

use crate::build::workspace;
use crate::cargo::{self, Counts, Outcome, cargo};

/// Cfg that builds the library for the simulation.
const SIMULATION: &str = "freestone_sim";
/// Cfg that builds the library with known faults that can be enabled.
const FAULTS: &str = "freestone_mutants";

/// Seed of runs in the gate and in the slow lane.
const GATE_SEED: u64 = 1;

/// Durations of the modes that run with a fixed seed.
#[derive(Clone, Copy)]
pub struct Lengths {
    /// Number of simulated runs, which are deterministic.
    exact_runs: u64,
    /// Seconds with real threads.
    threads: u64,
    /// Seconds with servers that are killed and restarted.
    lives: u64,
}

/// Durations of the modes for every change: a minute in total, including the program's torture, which is a test
/// (`freestone-cli/tests/torture.rs`).
pub const SHORT: Lengths = Lengths { exact_runs: 80, threads: 12, lives: 12 };
/// Durations of the modes in the slow lane.
pub const LONG: Lengths = Lengths { exact_runs: 220, threads: 120, lives: 360 };

/// Duration of the mode `calls` in the gate, in seconds.
const CALLS_SECONDS: u64 = 120;
/// Scenes in which system calls fail. Each of these lists is a piece of the slow lane.
pub const SERVER_SCENES: [&str; 3] = ["start", "verbs", "end"];
pub const DISK_SCENES: [&str; 6] = ["saves", "rewrite", "snapshots", "merge", "zones", "files"];
pub const STORE_SCENES: [&str; 3] = ["store", "pull", "prune"];

/// Time limit for finding an enabled fault, in seconds.
const MUTANT_SECONDS: u64 = 600;

/// Mode of the torture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// The library in a simulated machine; the seed determines every step
    Exact,
    /// The library with real threads
    Threads,
    /// The program, through its sockets
    Program,
    /// The program with a state directory; servers are stopped or killed at any moment and restarted
    Lives,
    /// The program, with one system call after the other failing
    Calls,
}

/// Known faults (`freestone::mutants`), the mode that finds each, and options: the failing calls or the first seed.
const MUTANTS: [(&str, Mode, &[&str]); 35] = [
    ("PinnedCall", Mode::Exact, &[]),
    ("FalseNoSpace", Mode::Exact, &[]),
    ("TooManyReads", Mode::Exact, &[]),
    ("ZonesBelieveFailure", Mode::Exact, &[]),
    ("DeltaEndsWithBase", Mode::Exact, &[]),
    // No seed before 188 finds this fault.
    ("MergeBelievesFailure", Mode::Exact, &["--seed", "150"]),
    ("MergeUnmarked", Mode::Exact, &[]),
    ("OneVerbAtATime", Mode::Program, &[]),
    ("SpillsChangedPages", Mode::Exact, &[]),
    ("StaleCopy", Mode::Exact, &[]),
    ("GroupForgetsLastPage", Mode::Exact, &[]),
    ("SpilledGroupForgetsPage", Mode::Exact, &[]),
    ("SharedForgetsLastPage", Mode::Exact, &[]),
    ("DedupBelievesFingerprint", Mode::Exact, &[]),
    ("OriginForgetsSnapshot", Mode::Exact, &[]),
    ("LostWakeup", Mode::Exact, &[]),
    ("ExceptionsBeforeCopies", Mode::Exact, &[]),
    ("LeakedSlot", Mode::Exact, &[]),
    ("FlushGoesNowhere", Mode::Exact, &[]),
    ("AnsweredInFlight", Mode::Program, &[]),
    ("ExportsForgotten", Mode::Lives, &[]),
    ("LostIsShown", Mode::Lives, &[]),
    ("KeysForgotten", Mode::Lives, &[]),
    ("AdoptedBlocksFree", Mode::Lives, &[]),
    ("StoreIsBelieved", Mode::Exact, &[]),
    ("PackedPagesShifted", Mode::Exact, &[]),
    ("PruneForgetsTag", Mode::Exact, &[]),
    ("KeptFileUnseen", Mode::Calls, &["--scene", "saves", "--call", "fsync"]),
    ("IncrementUnseen", Mode::Calls, &["--scene", "saves", "--call", "fsync"]),
    ("RewriteUnseen", Mode::Calls, &["--scene", "rewrite", "--call", "fsync"]),
    ("StateGivesUp", Mode::Calls, &["--scene", "verbs", "--call", "fdatasync"]),
    ("EndStartsThread", Mode::Calls, &["--scene", "end", "--call", "clone3"]),
    ("GoesOnEarly", Mode::Calls, &["--scene", "start", "--call", "bind"]),
    ("RingForgetsEntries", Mode::Calls, &["--scene", "snapshots", "--call", "io_uring_enter"]),
    ("EndHidesLoss", Mode::Calls, &["--scene", "end", "--call", "fsync"]),
];

impl Mode {
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// Runs one mode, or all modes one after the other, each for an equal share of the time.
pub fn run(mode: Option<Mode>, seed: Option<u64>, minutes: f64) -> Result<bool> {
    let modes = mode.map_or_else(|| Mode::value_variants().to_vec(), |mode| vec![mode]);
    let share = minutes * 60.0 / modes.len() as f64;
    let mut ok = true;
    for mode in modes {
        let run = Run { mode, seed, seconds: share as u64, runs: None, mutant: None, choice: &[] };
        ok &= run.on(&run.build()?)?.success();
    }
    Ok(ok)
}

/// Runs the modes with fixed seeds, except for `program`, which is a test.
pub fn fixed(lengths: Lengths) -> Result<Outcome> {
    let Lengths { exact_runs, threads, lives } = lengths;
    let seed = Some(GATE_SEED);
    let threads = Run { mode: Mode::Threads, seed, seconds: threads, runs: None, mutant: None, choice: &[] };
    // The simulation runs a fixed number of runs, however long they take.
    let exact = Run { mode: Mode::Exact, runs: Some(exact_runs), ..threads };
    let lives = Run { mode: Mode::Lives, seconds: lives, ..threads };
    let simulation = exact.build()?;
    let Some(programs) = workspace::programs()? else { return Ok(Outcome::default()) };
    let commands = [exact.command(&simulation), threads.command(&programs), lives.command(&programs)];
    let mut outcome = Outcome::of(true);
    for (passed, _) in cargo::run_side_by_side(commands)? {
        outcome.add(Outcome::of_test(passed));
    }
    Ok(outcome)
}

/// Returns the command that builds the simulation for [`fixed`].
pub fn simulation_build() -> Result<Command> {
    let exact = Run { mode: Mode::Exact, seed: None, seconds: 0, runs: None, mutant: None, choice: &[] };
    Ok(exact.build_command()?.0)
}

/// Returns the names of the faults that failing calls find if `of_calls` is true, else of those that the other modes
/// find.
pub fn names(of_calls: bool) -> Vec<String> {
    let is_chosen = |(_, mode, _): &&(&str, Mode, _)| (*mode == Mode::Calls) == of_calls;
    MUTANTS.iter().filter(is_chosen).map(|(name, ..)| (*name).to_owned()).collect()
}

/// Enables each fault in `only`, or every known fault if `only` is empty, and checks that the torture finds it.
pub fn mutants(only: &[String]) -> Result<Outcome> {
    if let Some(unknown) = only.iter().find(|name| MUTANTS.iter().all(|(mutant, ..)| mutant != name)) {
        let names: Vec<_> = MUTANTS.iter().map(|(name, ..)| *name).collect();
        bail!("{unknown}: no such fault; there are {}", names.join(", "));
    }
    let mut rows = Vec::new();
    let is_chosen = |name: &&str| only.is_empty() || only.iter().any(|n| n == name);
    for (name, mode, choice) in MUTANTS.iter().filter(|(name, ..)| is_chosen(name)) {
        let began = Instant::now();
        let status = torture_faulty(*mode, choice, MUTANT_SECONDS, name)?;
        let took = began.elapsed();
        // Status 1 means that the torture found a fault; any other status is a failure of the torture itself.
        let mut found = status.code() == Some(1);
        if found && *mode != Mode::Exact {
            // The exact mode checks by itself that its run passes without the fault. In other modes a run of the same
            // length without the fault must pass.
            found = torture_faulty(*mode, choice, took.as_secs() + 1, "")?.success();
        }
        rows.push((*name, *mode, found, took));
    }
    println!("\n{:<24} {:<8} {:>8}", "fault put back", "mode", "found in");
    let mut counts = Counts::default();
    for (name, mode, found, took) in rows {
        let took = if found { format!("{:.0} s", took.as_secs_f64()) } else { "NOT FOUND".to_owned() };
        println!("{name:<24} {:<8} {took:>8}", mode.name());
        counts += Counts::one(found);
    }
    Ok(Outcome { counts, ..Outcome::of(counts.failed == 0) })
}

/// Runs all cases of the given scenes of failing calls. Without scenes, runs cases of all scenes for two minutes; the
/// selection of cases depends on the number of commits.
pub fn calls(scenes: &[&str]) -> Result<Outcome> {
    let Some(programs) = workspace::programs()? else { return Ok(Outcome::default()) };
    let commits = Command::new("git").args(["rev-list", "--count", "HEAD"]).output();
    let commits = commits.ok().and_then(|output| String::from_utf8(output.stdout).ok()?.trim().parse().ok());
    let mut choice: Vec<&str> = scenes.iter().flat_map(|scene| ["--scene", scene]).collect();
    choice.extend((!scenes.is_empty()).then_some("--all"));
    let seed = commits.or(Some(GATE_SEED));
    let run =
        Run { mode: Mode::Calls, seed, seconds: CALLS_SECONDS, runs: None, mutant: None, choice: &choice };
    let passed = run.on(&programs)?.success();
    Ok(Outcome::of_test(passed))
}

/// Runs a mode with the fault `mutant`, or, in the same build, without a fault if `mutant` is empty.
fn torture_faulty(mode: Mode, choice: &[&str], seconds: u64, mutant: &str) -> Result<ExitStatus> {
    let run = Run { mode, seed: Some(GATE_SEED), seconds, runs: None, mutant: Some(mutant), choice };
    run.on(&run.build()?)
}

#[derive(Clone, Copy)]
struct Run<'a> {
    mode: Mode,
    seed: Option<u64>,
    seconds: u64,
    runs: Option<u64>,
    mutant: Option<&'a str>,
    /// Further options: the failing calls or the first seed.
    choice: &'a [&'a str],
}

impl Run<'_> {
    /// Builds the programs of this run and returns their directory.
    fn build(&self) -> Result<PathBuf> {
        let (mut command, dir) = self.build_command()?;
        anyhow::ensure!(cargo::run(&mut command)?.ok, "the {} torture does not build", self.mode.name());
        Ok(dir.join("debug"))
    }

    /// Returns the command that builds the programs of this run, and its target directory.
    fn build_command(&self) -> Result<(Command, PathBuf)> {
        let mut cfgs = Vec::new();
        cfgs.extend((self.mode == Mode::Exact).then_some(SIMULATION));
        cfgs.extend(self.mutant.map(|_| FAULTS));
        let (mut command, dir) =
            if cfgs.is_empty() { (cargo(), cargo::target_dir()) } else { cargo::with_cfgs(&cfgs)? };
        command.args(["build", "--profile", "test", "--package", "freestone-torture"]);
        // The test build compiles the torture without optimisation, which takes a quarter of the time. A simulation
        // then takes twice as long.
        command.args(["--config", "profile.test.package.freestone-torture.opt-level=1"]);
        if self.needs_program() {
            command.args(["--package", "freestone-cli"]);
        }
        Ok((command, dir))
    }

    fn needs_program(&self) -> bool {
        matches!(self.mode, Mode::Program | Mode::Lives | Mode::Calls)
    }

    /// Runs the torture with the programs of a directory.
    fn on(&self, programs: &Path) -> Result<ExitStatus> {
        let mut command = self.command(programs);
        println!("$ {command:?}");
        let began = Instant::now();
        let status = command.status().context("cannot start the torture")?;
        let took = Duration::from_secs(began.elapsed().as_secs());
        println!("{}: {status} after {took:?}", self.mode.name());
        Ok(status)
    }

    fn command(&self, programs: &Path) -> Command {
        let mut command = Command::new(programs.join("freestone-torture"));
        command.arg(self.mode.name());
        if self.needs_program() {
            command.arg("--bin").arg(programs.join("freestone"));
        }
        if let Some(seed) = self.seed.filter(|_| !self.choice.contains(&"--seed")) {
            command.args(["--seed", &seed.to_string()]);
        }
        command.args(["--minutes", &format!("{:.3}", self.seconds as f64 / 60.0)]);
        command.args(self.choice);
        if let Some(runs) = self.runs {
            command.args(["--runs", &runs.to_string()]);
        }
        if let Some(mutant) = self.mutant {
            command.env("FREESTONE_MUTANT", mutant);
            if self.mode == Mode::Calls {
                command.arg("--first");
            }
        }
        command
    }
}
