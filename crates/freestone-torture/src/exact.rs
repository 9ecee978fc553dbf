//! Exact mode: one run is one process, in which the seed decides every step.
//!
//! The process that is asked (`exact`) draws seeds and has each run by a process of its own
//! (`case`), as what is static in the library outlives a run. Now and then a run is done twice: the
//! same seed has to give the same run to the last step. A run that fails is made shorter, each
//! attempt again a process, and printed as a test.

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
use crate::run::{Judge, run};
use crate::shrink::shrink;
use crate::zoned::{self, Step};

/// This program, also where its file was replaced by a newer build meanwhile.
const PROGRAM: &str = "/proc/self/exe";
/// Names the fault that is put back.
const MUTANT: &str = "FREESTONE_MUTANT";
/// Virtual steps of a run that may not be more.
const POINTS_MAX: u64 = 2_000_000_000;
/// Real time of a run that may not be more: whoever spins without a point at which others go on is
/// caught by this.
const CASE_MAX: Duration = Duration::from_secs(120);
/// Every so many runs, one is done twice.
const TWICE_ONE_IN: u64 = 16;
/// Attempts to make a run shorter, and the time for all of them.
const SHRINKS_MAX: usize = 400;
const SHRINK_MAX: Duration = Duration::from_secs(240);

/// A run: what a `case` process is told, as JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Case {
    /// Decides who goes on.
    pub schedule: u64,
    /// At one in so many points.
    pub switch_one_in: u64,
    /// What is done.
    pub work: Work,
}

/// What is done in a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Work {
    /// On a stack.
    Stack(Vec<Op>),
    /// On zones; with the seed of their disks.
    Zones(u64, Vec<Step>),
}

/// What a `case` process says at its end, as JSON.
#[derive(Debug, Serialize, Deserialize)]
struct Said {
    digest: u64,
    points: u64,
    tally: BTreeMap<String, u64>,
}

/// How a `case` ended.
enum Ended {
    Well(Said),
    /// What it printed.
    Badly(String),
}

/// Draws the run of a seed.
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

/// What was done.
#[derive(Debug, Default)]
pub struct Report {
    /// Runs.
    pub cases: u64,
    /// Of these, done twice.
    pub twice: u64,
    /// Steps at which another thread could go on.
    pub points: u64,
    /// How often what happened.
    pub tally: BTreeMap<String, u64>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} runs, {} of them twice, {} points", self.cases, self.twice, self.points)?;
        self.tally.iter().try_for_each(|(what, count)| write!(f, "\n{count:>10} {what}"))
    }
}

/// Runs cases from this seed on, as many at a time as there are CPUs, until the time is over or so
/// many were run. False where one failed: it was printed.
///
/// # Errors
/// The program cannot be started again.
pub fn exact(first: u64, time: Duration, runs: Option<u64>) -> Result<(Report, bool)> {
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
                Ended::Well(said) => {
                    report.points += said.points;
                    for (what, count) in said.tally {
                        *report.tally.entry(what).or_default() += count;
                    }
                    if seed.is_multiple_of(TWICE_ONE_IN) {
                        report.twice += 1;
                        if !is_again(case, said.digest)? {
                            println!("seed {seed}: two runs of it differ");
                            return Ok((report, false));
                        }
                    }
                }
                Ended::Badly(printed) => {
                    if let Some(fault) = mutant() {
                        // Its doing only where the run passes without it.
                        if matches!(end(spawn(case, false)?)?, Ended::Badly(_)) {
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

fn is_again(case: &Case, digest: u64) -> Result<bool> {
    Ok(matches!(end(start(case)?)?, Ended::Well(said) if said.digest == digest))
}

/// Leaves out what is not needed for the failure, and prints the rest.
fn shorten(seed: u64, case: &Case) -> Result<()> {
    let (began, mut attempts) = (Instant::now(), 0);
    let mut fails = |work: Work| {
        attempts += 1;
        let shorter = Case { work, ..case.clone() };
        attempts <= SHRINKS_MAX
            && began.elapsed() < SHRINK_MAX
            && matches!(start(&shorter).and_then(end), Ok(Ended::Badly(_)))
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
        Ended::Badly(printed) => println!("{printed}\n"),
        Ended::Well(_) => bail!("seed {seed}: the shorter run does not fail again"),
    }
    println!("{}", as_test(seed, &shorter)?);
    Ok(())
}

/// The run as a test of `tests/found.rs`: a line of JSON each step.
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
    /// Ops on a stack, a line of JSON each.
    ///
    /// # Panics
    /// One is none.
    pub fn stack(ops: &str) -> Self {
        Self::Stack(parse(ops))
    }

    /// Steps on zones, a line of JSON each.
    ///
    /// # Panics
    /// One is none.
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

/// The fault that was put back (`freestone::mutants`).
fn mutant() -> Option<String> {
    std::env::var(MUTANT).ok().filter(|name| !name.is_empty())
}

fn start(case: &Case) -> Result<Child> {
    spawn(case, true)
}

/// Begins a run in a process of its own, with the fault that was put back, or without it.
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
    // It reads all of it before it writes. Where it died at once, its end tells.
    let _ = stdin.write_all(&serde_json::to_vec(case)?);
    Ok(child)
}

fn end(mut child: Child) -> Result<Ended> {
    let (mut stdout, mut stderr) =
        (child.stdout.take().context("no stdout")?, child.stderr.take().context("no stderr")?);
    let told = std::thread::spawn(move || {
        let mut text = Vec::new();
        stderr.read_to_end(&mut text).map(|_| text)
    });
    let said = std::thread::spawn(move || {
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
    let (said, told) = (text(said), text(told));
    match status {
        Some(status) if status.success() => Ok(Ended::Well(serde_json::from_str(&said)?)),
        Some(status) => Ok(Ended::Badly(format!("{told}{said}{status}"))),
        None => Ok(Ended::Badly(format!("{told}no end after {CASE_MAX:?}"))),
    }
}

/// The process of one run, which it reads from stdin.
///
/// # Errors
/// It cannot be read.
pub fn case(trace: bool) -> Result<ExitCode> {
    static PANICS: AtomicU64 = AtomicU64::new(0);
    if !cfg!(freestone_sim) {
        bail!("this program was built without --cfg freestone_sim: see `cargo xtask torture`");
    }
    let mut text = Vec::new();
    std::io::stdin().read_to_end(&mut text).context("cannot read the run")?;
    let case: Case = serde_json::from_slice(&text).context("this is no run")?;
    let tell = panic::take_hook();
    panic::set_hook(Box::new(move |what| {
        PANICS.fetch_add(1, Ordering::SeqCst);
        tell(what);
    }));
    let config =
        sim::Config { seed: case.schedule, switch_one_in: case.switch_one_in, points_max: POINTS_MAX };
    let (outcome, summary) = sim::run(config, || match &case.work {
        Work::Stack(ops) => {
            let report =
                run(None, ops, Judge { trace, ..Judge::default() }).map_err(|failure| failure.to_string())?;
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
            let said = Said { digest: summary.digest, points: summary.points, tally };
            println!("{}", serde_json::to_string(&said)?);
            // What is left of the simulation never goes on, so nothing of it is dropped.
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
    fn a_run_is_written_as_a_test() {
        let ops = vec![Op::Await, Op::Check(3), Op::Heal(None)];
        let text =
            as_test(7, &Case { schedule: 1, switch_one_in: 8, work: Work::Stack(ops.clone()) }).unwrap();
        assert!(text.starts_with("#[test]\nfn seed_7() {\n    passes(1, 8, Work::stack(r#\""));
        let list = text.split_once("r#\"").unwrap().1.split_once("\"#").unwrap().0;
        assert!(matches!(Work::stack(list), Work::Stack(read) if read == ops));
    }
}
