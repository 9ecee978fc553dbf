//! The slow lane: when each of its steps, which are rare and take long, last ran.

use std::collections::BTreeMap;
use std::process::Command;
use std::{fs, io};

use anyhow::{Context as _, Result};
use clap::ValueEnum as _;
use serde::{Deserialize, Serialize};

use crate::cargo::output;
use crate::steps::{Done, Step};

/// The last run of each step, in the repository.
const RECORD: &str = "xtask/slow-lane.json";

/// A run of a step.
#[derive(Debug, Serialize, Deserialize)]
struct Run {
    /// Of the last commit that it ran on.
    commit: String,
    /// UTC, when it ended.
    date: String,
    passed: u64,
    failed: u64,
    minutes: u64,
}

/// Runs by the names of their steps.
type Runs = BTreeMap<String, Run>;

/// Records the slow ones of the steps that have run.
pub fn record(done: &[Done]) -> Result<()> {
    let slow: Vec<_> = done.iter().filter(|done| done.step.is_slow()).collect();
    if slow.is_empty() {
        return Ok(());
    }
    let commit = output(Command::new("git").args(["rev-parse", "--short=12", "HEAD"]))?;
    let date = output(Command::new("date").args(["-u", "+%Y-%m-%d %H:%M"]))?;
    let mut runs = read()?;
    for Done { step, took, counts, .. } in slow {
        let run = Run {
            commit: commit.clone(),
            date: date.clone(),
            passed: counts.passed,
            failed: counts.failed,
            minutes: took.as_secs().div_ceil(60),
        };
        runs.insert(step.name(), run);
    }
    let text = serde_json::to_string_pretty(&runs)? + "\n";
    fs::write(RECORD, text).with_context(|| format!("cannot write {RECORD}"))?;
    println!("{RECORD} says so: commit it");
    Ok(())
}

fn read() -> Result<Runs> {
    match fs::read_to_string(RECORD) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Runs::new()),
        text => {
            let text = text.with_context(|| format!("cannot read {RECORD}"))?;
            serde_json::from_str(&text).with_context(|| RECORD.to_owned())
        }
    }
}

/// Says when each step of the slow lane last ran.
pub fn tell() {
    println!("the slow lane (cargo xtask test --all):");
    let runs = match read() {
        Ok(runs) => runs,
        Err(error) => return println!("  {error:#}"),
    };
    for step in Step::value_variants().iter().filter(|step| step.is_slow()) {
        let name = step.name();
        let Some(Run { commit, date, passed, failed, minutes }) = runs.get(&name) else {
            println!("  {name:<13} never ran");
            continue;
        };
        let since = output(Command::new("git").args(["rev-list", "--count", &format!("{commit}..HEAD")]));
        let since = since.unwrap_or_else(|_| "an unknown number of".to_owned());
        println!(
            "  {name:<13} ran {date} UTC at {commit}, {since} commits ago: {passed} passed, {failed} failed, \
             {minutes} minutes"
        );
    }
}
