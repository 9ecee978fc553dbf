//! Runs the tests of the workspace, each in its own process, several at the same time.
//!
//! A test that hangs or aborts affects no other test, and the total time does not depend on the slowest program. The
//! build also lints ([`workspace::tests`]).

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use crate::build::workspace;
use crate::cargo::{self, Counts, LIB, Outcome, TestProgram};

/// Marker that a skipped test prints if it needs a program which is not installed (`freestone_testkit::tools`).
const SKIPPED: &str = "left out: ";
/// Time limit of a single test. The slowest tests take 20 s on a busy machine, and the slowest models 4 minutes.
const TEST_MAX: Duration = Duration::from_secs(600);
/// Shortest and longest interval at which the end of a test is polled.
const POLL_MIN: Duration = Duration::from_millis(1);
const POLL_MAX: Duration = Duration::from_millis(20);
const PROGRESS_EVERY: Duration = Duration::from_secs(30);
/// Duration above which a test is named at the end.
const SLOW: Duration = Duration::from_secs(5);
/// Suites with the longest tests. These suites start first, so that short tests fill the end.
const LONGEST: [(&str, &str); 7] = [
    ("freestone-cli", "torture"),
    ("freestone-cli-tests", "program"),
    ("freestone", "library"),
    ("freestone-cow", "snapshots"),
    ("freestone-drive", "drives"),
    ("freestone-core", LIB),
    ("freestone-ram", LIB),
];
/// Directory of the output of tests, below the target directory.
const OUTPUT_DIR: &str = "test-output";

/// Set of tests to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Every test except those marked `#[ignore = "slow lane"]`; randomised tests run with few cases.
    Quick,
    /// Every test; randomised tests run with all their cases.
    Full,
}

struct Test<'a> {
    program: &'a TestProgram,
    name: String,
}

impl Test<'_> {
    fn title(&self) -> String {
        format!("{} {} {}", self.program.package, self.program.suite, self.name)
    }

    /// Returns the command with which a user runs the test alone.
    fn command_line(&self, extent: Extent) -> String {
        let effort = match extent {
            Extent::Quick => "",
            Extent::Full => "FREESTONE_EFFORT=full ",
        };
        format!("{effort}{} --exact {} --include-ignored", self.program.location(), self.name)
    }
}

#[derive(Default)]
struct Results {
    counts: Counts,
    /// Counts of ended tests and number of remaining tests, by test program.
    programs: BTreeMap<String, (Counts, usize)>,
    skipped: Vec<String>,
    slow: Vec<(Duration, String)>,
    running: BTreeMap<usize, (Instant, String)>,
}

pub fn run(extent: Extent) -> Result<Outcome> {
    let Some(programs) = cargo::test_programs(&mut workspace::tests()?)? else {
        return Ok(Outcome::default());
    };
    let mut outcome = run_programs(&programs, "", extent, cargo::tests_at_once())?;
    outcome.add(cargo::run(&mut workspace::doc_tests()?)?);
    Ok(outcome)
}

/// Runs the tests of programs whose names contain `filter`, `at_once` of them at the same time.
pub fn run_programs(
    programs: &[TestProgram],
    filter: &str,
    extent: Extent,
    at_once: usize,
) -> Result<Outcome> {
    let tests = tests_of(programs, filter, extent)?;
    let output_dir = std::path::absolute(cargo::target_dir().join(OUTPUT_DIR))?;
    fs::create_dir_all(&output_dir).with_context(|| format!("cannot create {}", output_dir.display()))?;
    let results = run_all(tests, extent, at_once, &output_dir);
    let counts = results.counts;
    let outcome = Outcome { ok: counts.failed == 0, counts, skipped: results.skipped };
    let mut slow = results.slow;
    slow.sort_by(|a, b| b.cmp(a));
    for (took, title) in slow {
        println!("slow: {:.1} s: {title}", took.as_secs_f64());
    }
    Ok(outcome)
}

/// Lists the tests of all programs, those of the longest suites first.
fn tests_of<'a>(programs: &'a [TestProgram], filter: &str, extent: Extent) -> Result<VecDeque<Test<'a>>> {
    let rank = |program: &&TestProgram| {
        let is = |(package, suite): &(&str, &str)| program.package == *package && program.suite == *suite;
        LONGEST.iter().position(is).unwrap_or(LONGEST.len())
    };
    let mut ordered: Vec<_> = programs.iter().collect();
    ordered.sort_by_key(rank);
    let mut tests = VecDeque::new();
    for program in ordered {
        let all = list(program, &[filter])?;
        let ignored =
            if extent == Extent::Quick { list(program, &[filter, "--ignored"])? } else { Vec::new() };
        let chosen = all.into_iter().filter(|name| !ignored.contains(name));
        tests.extend(chosen.map(|name| Test { program, name }));
    }
    ensure!(!tests.is_empty(), "the programs have no tests");
    Ok(tests)
}

fn list(program: &TestProgram, arguments: &[&str]) -> Result<Vec<String>> {
    let text = cargo::output(program.command().args(["--list", "--format", "terse"]).args(arguments))?;
    Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

fn run_all(tests: VecDeque<Test<'_>>, extent: Extent, workers: usize, output_dir: &Path) -> Results {
    let total = tests.len();
    let mut remaining: BTreeMap<String, usize> = BTreeMap::new();
    for test in &tests {
        *remaining.entry(program_title(test.program)).or_default() += 1;
    }
    let results = Mutex::new(Results {
        programs: remaining.into_iter().map(|(title, tests)| (title, (Counts::default(), tests))).collect(),
        ..Results::default()
    });
    let queue = Mutex::new(tests);
    println!("{total} tests, {workers} at a time");
    thread::scope(|scope| {
        let threads: Vec<_> = (0..workers)
            .map(|worker| {
                let (queue, results) = (&queue, &results);
                scope.spawn(move || {
                    while let Some(test) = { lock(queue).pop_front() } {
                        lock(results).running.insert(worker, (Instant::now(), test.title()));
                        let end = run_one(&test, extent, &output_dir.join(worker.to_string()));
                        lock(results).add(worker, &test, extent, end);
                    }
                })
            })
            .collect();
        let mut last_progress = Instant::now();
        while threads.iter().any(|thread| !thread.is_finished()) {
            thread::sleep(Duration::from_millis(100));
            if last_progress.elapsed() >= PROGRESS_EVERY {
                last_progress = Instant::now();
                lock(&results).print_progress(total);
            }
        }
    });
    results.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Locks a mutex. Workers only add to the locked value, so a panic cannot leave it inconsistent and poisoning is ignored.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn program_title(program: &TestProgram) -> String {
    format!("{} {}", program.package, program.suite)
}

struct TestEnd {
    /// Exit status of the test's process, or None if the test hung and was killed.
    status: Result<Option<ExitStatus>>,
    took: Duration,
    output: String,
}

fn run_one(test: &Test<'_>, extent: Extent, output: &PathBuf) -> TestEnd {
    let began = Instant::now();
    let status = run_process(test, extent, output, began);
    let took = began.elapsed();
    let printed = fs::read(output).unwrap_or_default();
    TestEnd { status, took, output: String::from_utf8_lossy(&printed).into_owned() }
}

fn run_process(
    test: &Test<'_>,
    extent: Extent,
    output: &PathBuf,
    began: Instant,
) -> Result<Option<ExitStatus>> {
    let file = File::create(output).with_context(|| format!("cannot create {}", output.display()))?;
    let mut command: Command = test.program.command();
    command.args(["--exact", &test.name, "--nocapture", "--include-ignored"]);
    command.stdout(file.try_clone().context("no descriptor for stdout")?).stderr(file).stdin(Stdio::null());
    if extent == Extent::Full {
        command.env("FREESTONE_EFFORT", "full");
    }
    let mut child = command.spawn().context("cannot start the test")?;
    let mut pause = POLL_MIN;
    loop {
        if let Some(status) = child.try_wait().context("cannot wait for the test")? {
            return Ok(Some(status));
        }
        if began.elapsed() > TEST_MAX {
            child.kill().context("cannot kill the test")?;
            child.wait().context("cannot wait for the test")?;
            return Ok(None);
        }
        thread::sleep(pause);
        pause = (pause * 2).min(POLL_MAX);
    }
}

impl Results {
    fn add(&mut self, worker: usize, test: &Test<'_>, extent: Extent, end: TestEnd) {
        self.running.remove(&worker);
        let TestEnd { status, took, output } = end;
        let mut counts = Counts::default();
        match status {
            Ok(Some(status)) if status.success() => {
                match output.lines().find_map(|line| Some(line.split_once(SKIPPED)?.1)) {
                    None => counts.passed = 1,
                    Some(why) => {
                        counts.skipped = 1;
                        self.skipped.push(format!("{}: {why}", test.title()));
                    }
                }
            }
            status => {
                counts.failed = 1;
                let how = match status {
                    Ok(Some(status)) => status.to_string(),
                    Ok(None) => format!("did not end within {} s", TEST_MAX.as_secs()),
                    Err(error) => format!("{error:#}"),
                };
                println!("FAILED {}: {how}, {:.1} s", test.title(), took.as_secs_f64());
                println!("{}", output.trim_end());
                println!("run it alone: {}\n", test.command_line(extent));
            }
        }
        self.counts += counts;
        if took > SLOW {
            self.slow.push((took, test.title()));
        }
        let title = program_title(test.program);
        if let Some((sum, tests)) = self.programs.get_mut(&title) {
            *sum += counts;
            *tests -= 1;
            if *tests == 0 {
                println!("{title}: {sum}");
            }
        }
    }

    fn print_progress(&self, total: usize) {
        let done = self.counts.passed + self.counts.failed + self.counts.skipped;
        let running: Vec<_> = self
            .running
            .values()
            .map(|(since, title)| format!("{title} ({} s)", since.elapsed().as_secs()))
            .collect();
        println!("... {done} of {total}, {} failed; running: {}", self.counts.failed, running.join(", "));
    }
}
