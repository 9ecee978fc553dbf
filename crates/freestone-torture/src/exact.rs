//! Mode exact: one run per process; the seed decides every step. The parent process ([`run_seeds`]) draws
//! seeds and runs each in a child process ([`run_case`]). In one process, static variables of the library
//! would keep their values in the next run. One run in sixteen is repeated: the same seed must give the same
//! run to the last step. A failing run is shortened, in one child process per attempt, and printed as the
//! source of a test.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{Read as _, Write as _};
use std::panic;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use freestone_sim::sim;
use freestone_testkit::Rng;
use serde::{Deserialize, Serialize};

use crate::ops::{self, Op};
use crate::run::{RunSettings, run};
use crate::shrink::shrink;
use crate::zoned::{self, Step};

/// Path from which child processes are started: this program, even if a newer build has replaced its file.
const PROGRAM: &str = "/proc/self/exe";
/// Environment variable with the name of the fault to inject into the library (`freestone::mutants`).
const MUTANT: &str = "FREESTONE_MUTANT";
/// Maximum number of scheduling points per run.
const POINTS_MAX: u64 = 2_000_000_000;
/// Maximum real time of a run, which catches a loop without a scheduling point.
const CASE_MAX: Duration = Duration::from_secs(120);
/// Interval of seeds that are run twice, to check that equal seeds give equal runs.
const TWICE_ONE_IN: u64 = 16;
/// Maximum number of attempts to shorten a failing run, and maximum time for all attempts.
const SHRINKS_MAX: usize = 400;
const SHRINK_MAX: Duration = Duration::from_secs(240);

/// The seeds and operations of one run: the JSON input of a `case` process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Case {
    /// Seed of the thread schedule.
    pub schedule: u64,
    /// The scheduler switches threads at one in this many scheduling points.
    pub switch_one_in: u64,
    pub work: Work,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Work {
    Stack(Vec<Op>),
    /// Seed of the two simulated disks, and the steps on the zoned device over them.
    Zones(u64, Vec<Step>),
}

/// The JSON output of a `case` process.
#[derive(Debug, Serialize, Deserialize)]
struct CaseReport {
    digest: u64,
    points: u64,
    tally: BTreeMap<String, u64>,
}

enum CaseOutcome {
    Passed(CaseReport),
    Failed(String),
}

pub fn case_of(seed: u64) -> Case {
    let mut rng = Rng::new(seed);
    let count = 40 + rng.below(400) as usize;
    let work = if rng.chance(10) {
        Work::Zones(rng.word(), zoned::draw(rng.word(), count))
    } else {
        let mut ops = ops::stack(rng.word());
        ops.extend(ops::draw(rng.word(), count));
        Work::Stack(ops)
    };
    Case { schedule: rng.word(), switch_one_in: [8, 40, 200, 1000][rng.below(4) as usize], work }
}

/// Statistics of all runs of one [`run_seeds`] call.
#[derive(Debug, Default)]
pub struct Report {
    /// Number of runs, without repetitions.
    pub cases: u64,
    pub twice: u64,
    pub points: u64,
    pub tally: BTreeMap<String, u64>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} runs, {} of them twice, {} points", self.cases, self.twice, self.points)?;
        self.tally.iter().try_for_each(|(what, count)| write!(f, "\n{count:>10} {what}"))
    }
}

/// Runs the cases of consecutive seeds from `first` on, one child process per CPU at a time. Ends when `time`
/// is over or, if `runs` is given, after at least that many cases. Returns the statistics, and false if a
/// case failed and was printed.
pub fn run_seeds(first: u64, time: Duration, runs: Option<u64>) -> Result<(Report, bool)> {
    let began = Instant::now();
    let at_once = std::thread::available_parallelism().map_or(1, usize::from);
    let mut report = Report::default();
    let mut seed = first;
    let goes_on = |cases: u64| runs.map_or_else(|| began.elapsed() < time, |runs| cases < runs);
    while goes_on(report.cases) {
        let seeds: Vec<u64> = (seed..seed + at_once as u64).collect();
        seed += at_once as u64;
        let cases: Vec<Case> = seeds.iter().map(|&seed| case_of(seed)).collect();
        let started = cases.iter().map(start).collect::<Result<Vec<_>>>()?;
        let ended = started.into_iter().map(end).collect::<Result<Vec<_>>>()?;
        for ((seed, case), ended) in seeds.into_iter().zip(&cases).zip(ended) {
            report.cases += 1;
            match ended {
                CaseOutcome::Passed(case_report) => {
                    report.points += case_report.points;
                    for (what, count) in case_report.tally {
                        *report.tally.entry(what).or_default() += count;
                    }
                    // Skip this check with an injected fault: two runs that differ do not show that the tests
                    // find the fault.
                    if seed.is_multiple_of(TWICE_ONE_IN) && mutant().is_none() {
                        report.twice += 1;
                        if !repeats_equally(case, case_report.digest)? {
                            println!("seed {seed}: two runs of it differ");
                            return Ok((report, false));
                        }
                    }
                }
                CaseOutcome::Failed(printed) => {
                    if let Some(fault) = mutant() {
                        // The injected fault is the cause only if the run passes without it.
                        if matches!(end(spawn(case, false)?)?, CaseOutcome::Failed(_)) {
                            println!("seed {seed} fails without {fault}, too");
                            continue;
                        }
                        println!("seed {seed} fails with {fault}, and passes without it:\n{printed}");
                        return Ok((report, false));
                    }
                    println!("seed {seed} failed:\n{printed}\n");
                    shorten(seed, case)?;
                    return Ok((report, false));
                }
            }
        }
    }
    Ok((report, true))
}

fn repeats_equally(case: &Case, digest: u64) -> Result<bool> {
    Ok(matches!(end(start(case)?)?, CaseOutcome::Passed(case_report) if case_report.digest == digest))
}

/// Removes the steps that a failing run does not need, and prints the remaining steps as a test.
fn shorten(seed: u64, case: &Case) -> Result<()> {
    let (began, mut attempts) = (Instant::now(), 0);
    let mut fails = |work: Work| {
        attempts += 1;
        let shorter = Case { work, ..case.clone() };
        attempts <= SHRINKS_MAX
            && began.elapsed() < SHRINK_MAX
            && matches!(start(&shorter).and_then(end), Ok(CaseOutcome::Failed(_)))
    };
    let work = match &case.work {
        Work::Stack(ops) => Work::Stack(shrink(ops, |ops| fails(Work::Stack(ops.to_vec())))),
        Work::Zones(disks, steps) => {
            Work::Zones(*disks, shrink(steps, |steps| fails(Work::Zones(*disks, steps.to_vec()))))
        }
    };
    let shorter = Case { work, ..case.clone() };
    println!("{} of {} steps are enough:", shorter.work.len(), case.work.len());
    match end(start(&shorter)?)? {
        CaseOutcome::Failed(printed) => println!("{printed}\n"),
        CaseOutcome::Passed(_) => bail!("seed {seed}: the shorter run does not fail again"),
    }
    println!("{}", as_test(seed, &shorter)?);
    Ok(())
}

/// Formats a failing run as a test for `tests/found.rs`, with one line of JSON per step.
fn as_test(seed: u64, case: &Case) -> Result<String> {
    let (how, lines) = match &case.work {
        Work::Stack(ops) => ("Work::stack(".to_owned(), lines(ops)?),
        Work::Zones(disks, steps) => (format!("Work::zones({disks}, "), lines(steps)?),
    };
    let (schedule, one_in) = (case.schedule, case.switch_one_in);
    Ok(format!(
        "#[test]\nfn seed_{seed}() {{\n    passes({schedule}, {one_in}, {how}r#\"\n{lines}    \"#));\n}}"
    ))
}

fn lines<T: Serialize>(steps: &[T]) -> Result<String> {
    let lines = steps.iter().map(serde_json::to_string).collect::<Result<Vec<_>, _>>()?;
    Ok(lines.iter().flat_map(|line| ["        ", line, "\n"]).collect())
}

fn parse<T: for<'a> Deserialize<'a>>(lines: &str) -> Vec<T> {
    let lines = lines.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"))).collect()
}

impl Work {
    /// Parses ops on a stack, one JSON value per line.
    ///
    /// # Panics
    /// Panics if a line is not a valid op.
    pub fn stack(ops: &str) -> Self {
        Self::Stack(parse(ops))
    }

    /// Parses steps on a zoned device, one JSON value per line. `disks` is the seed of its disks.
    ///
    /// # Panics
    /// Panics if a line is not a valid step.
    pub fn zones(disks: u64, steps: &str) -> Self {
        Self::Zones(disks, parse(steps))
    }

    fn len(&self) -> usize {
        match self {
            Self::Stack(ops) => ops.len(),
            Self::Zones(_, steps) => steps.len(),
        }
    }
}

/// Returns the name of the fault injected into the library, or `None` if the variable is unset or empty.
fn mutant() -> Option<String> {
    std::env::var(MUTANT).ok().filter(|name| !name.is_empty())
}

fn start(case: &Case) -> Result<Child> {
    spawn(case, true)
}

/// Starts a run in a child process. If `with_mutant` is false, the child injects no fault.
fn spawn(case: &Case, with_mutant: bool) -> Result<Child> {
    let mut command = Command::new(PROGRAM);
    if !with_mutant {
        command.env_remove(MUTANT);
    }
    let mut child = command
        .arg("case")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start a run")?;
    let mut stdin = child.stdin.take().context("a run has no stdin")?;
    // The child reads all of stdin before it writes, so neither side blocks. If the child has died, its exit
    // status shows that, so the error is ignored.
    let _ = stdin.write_all(&serde_json::to_vec(case)?);
    Ok(child)
}

fn end(mut child: Child) -> Result<CaseOutcome> {
    let (mut stdout, mut stderr) =
        (child.stdout.take().context("no stdout")?, child.stderr.take().context("no stderr")?);
    let stderr_text = std::thread::spawn(move || {
        let mut text = Vec::new();
        stderr.read_to_end(&mut text).map(|_| text)
    });
    let stdout_text = std::thread::spawn(move || {
        let mut text = Vec::new();
        stdout.read_to_end(&mut text).map(|_| text)
    });
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if began.elapsed() > CASE_MAX {
            child.kill()?;
            child.wait()?;
            break None;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let text = |thread: std::thread::JoinHandle<std::io::Result<Vec<u8>>>| -> String {
        let bytes = thread.join().ok().and_then(Result::ok).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let (stdout_text, stderr_text) = (text(stdout_text), text(stderr_text));
    match status {
        Some(status) if status.success() => Ok(CaseOutcome::Passed(serde_json::from_str(&stdout_text)?)),
        Some(status) => Ok(CaseOutcome::Failed(format!("{stderr_text}{stdout_text}{status}"))),
        None => Ok(CaseOutcome::Failed(format!("{stderr_text}no end after {CASE_MAX:?}"))),
    }
}

/// Runs the case read from stdin: the body of a `case` process. `trace` prints each op.
pub fn run_case(trace: bool) -> Result<ExitCode> {
    static PANICS: AtomicU64 = AtomicU64::new(0);
    if !cfg!(freestone_sim) {
        bail!("this program was built without --cfg freestone_sim; use `cargo xtask torture`");
    }
    let mut text = Vec::new();
    std::io::stdin().read_to_end(&mut text).context("cannot read the run")?;
    let case: Case = serde_json::from_slice(&text).context("the input is not a run")?;
    let default_hook = panic::take_hook();
    panic::set_hook(Box::new(move |what| {
        PANICS.fetch_add(1, Ordering::SeqCst);
        default_hook(what);
    }));
    let config =
        sim::Config { seed: case.schedule, switch_one_in: case.switch_one_in, points_max: POINTS_MAX };
    let (outcome, summary) = sim::run(config, || match &case.work {
        Work::Stack(ops) => {
            let report = run(None, ops, RunSettings { trace, ..RunSettings::default() })
                .map_err(|failure| failure.to_string())?;
            Ok(report.tally.into_iter().map(|(what, count)| (what.to_owned(), count)).collect())
        }
        Work::Zones(disks, steps) => match zoned::run(*disks, steps) {
            Ok(count) => Ok(BTreeMap::from([("steps on zones".to_owned(), count)])),
            Err(failure) => Err(failure.to_string()),
        },
    });
    if PANICS.load(Ordering::SeqCst) > 0 {
        eprintln!("a thread panicked");
        return Ok(ExitCode::FAILURE);
    }
    match outcome {
        Ok(tally) => {
            let case_report = CaseReport { digest: summary.digest, points: summary.points, tally };
            println!("{}", serde_json::to_string(&case_report)?);
            // The remaining threads of the simulation never run again, so dropping their objects could wait
            // forever.
            Ok(ExitCode::SUCCESS)
        }
        Err(failure) => {
            let failure: String = failure;
            eprintln!("{failure}");
            Ok(ExitCode::FAILURE)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Case, Work, as_test};
    use crate::ops::Op;

    #[test]
    fn failed_run_is_printed_as_test() {
        let ops = vec![Op::Await, Op::Check(3), Op::Heal(None)];
        let text =
            as_test(7, &Case { schedule: 1, switch_one_in: 8, work: Work::Stack(ops.clone()) }).unwrap();
        assert!(text.starts_with("#[test]\nfn seed_7() {\n    passes(1, 8, Work::stack(r#\""));
        let list = text.split_once("r#\"").unwrap().1.split_once("\"#").unwrap().0;
        assert!(matches!(Work::stack(list), Work::Stack(read) if read == ops));
    }
}
