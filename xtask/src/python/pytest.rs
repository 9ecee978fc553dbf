//! Runs pytest, copies its output and counts the tests in it.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};

use crate::cargo::{Counts, Outcome};

/// Marker in the reason of a skipped test that needs a program which is not installed.
const SKIPPED: &str = "left out: ";

/// Runs pytest to its end.
pub fn run(command: &mut Command) -> Result<Outcome> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = child.context("cannot start pytest")?;
    let mut outcome = Outcome::default();
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).split(b'\n') {
            let line = line.context("cannot read what pytest prints")?;
            let line = String::from_utf8_lossy(&line);
            println!("{line}");
            read_line(&line, &mut outcome);
        }
    }
    outcome.ok = child.wait().context("cannot wait for pytest")?.success();
    Ok(outcome)
}

/// Returns the outcome of a pytest that printed `output`. `ok`: it ended with status 0.
pub fn outcome(ok: bool, output: &str) -> Outcome {
    let mut outcome = Outcome::of(ok);
    output.lines().for_each(|line| read_line(line, &mut outcome));
    outcome
}

fn read_line(line: &str, outcome: &mut Outcome) {
    if let Some(counts) = summary(line) {
        outcome.counts = counts;
    }
    if let Some((_, why)) = line.strip_prefix("SKIPPED ").and_then(|line| line.split_once(SKIPPED)) {
        outcome.skipped.push(format!("python: {why}"));
    }
}

/// Parses pytest's last line: `3 failed, 12 passed, 1 skipped, 1 error in 0.12s`. Returns None for any other line.
fn summary(line: &str) -> Option<Counts> {
    let (text, time) = line.trim_matches(['=', ' ']).rsplit_once(" in ")?;
    time.starts_with(|first: char| first.is_ascii_digit()).then_some(())?;
    let mut counts = Counts::default();
    for part in text.split(", ") {
        let (number, what) = part.split_once(' ')?;
        let number: u64 = number.parse().ok()?;
        match what {
            "passed" | "xfailed" => counts.passed += number,
            "failed" | "error" | "errors" | "xpassed" => counts.failed += number,
            "skipped" => counts.skipped += number,
            "deselected" | "warning" | "warnings" => {}
            _ => return None,
        }
    }
    Some(counts)
}

#[cfg(test)]
mod tests {
    use super::summary;
    use crate::cargo::Counts;

    #[test]
    fn summary_reads_counts() {
        let counts = |passed, failed, skipped| Some(Counts { passed, failed, skipped });
        assert_eq!(summary("136 passed, 9 skipped in 31.56s"), counts(136, 0, 9));
        assert_eq!(summary("== 1 failed, 12 passed, 2 errors in 0.1s (0:00:01) =="), counts(12, 3, 0));
        assert_eq!(summary("2 passed, 1 deselected, 1 warning in 0.1s"), counts(2, 0, 0));
        assert_eq!(summary("no tests ran in 0.01s"), None);
        assert_eq!(summary("3 files in target"), None);
        assert_eq!(summary("ERROR tests/test_a.py in line 3"), None);
    }
}
