//! Runs steps, measures their time and prints the summary.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::ahead;
use super::failures::{self, OutputCapture};
use super::{Lane, Step};
use crate::cargo::{Counts, Outcome};
use crate::record::Record;

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
        ahead::start(step, &steps[n + 1..]);
        let ended = run(step, start, &steps[n + 1..])?;
        let ends = matches!(step, Step::Packages | Step::Build) && !ended.ok;
        done.push(ended);
        if ends {
            break;
        }
    }
    Ok(done)
}

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

    use super::parse_cpu_time;

    #[test]
    fn cpu_time_sums_own_and_children() {
        let stat = "7 (a b) c) S 1 7 7 0 -1 4194560 1 2 3 4 100 50 300 25 20 0 1 0 5 6 7";
        assert_eq!(parse_cpu_time(stat).unwrap(), Duration::from_millis(4750));
        assert!(parse_cpu_time("").is_err());
    }
}
