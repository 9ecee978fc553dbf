//! The slow lane: what is rare and takes long, and when it last ran.

use std::process::Command;
use std::{fs, io};

use anyhow::{Context as _, Result};
use clap::ValueEnum as _;
use serde::{Deserialize, Serialize};

use crate::cargo::output;
use crate::steps::{self, Step};

/// The last run, in the repository.
const RECORD: &str = "xtask/slow-lane.json";

/// A run.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    /// Of the last commit that it ran on.
    commit: String,
    /// UTC, when it ended.
    date: String,
    passed: u64,
    failed: u64,
    minutes: u64,
}

/// Runs every step there is, and records what came of it.
pub fn run() -> Result<bool> {
    let sum = steps::run(Step::value_variants());
    let record = Record {
        commit: output(Command::new("git").args(["rev-parse", "--short=12", "HEAD"]))?,
        date: output(Command::new("date").args(["-u", "+%Y-%m-%d %H:%M"]))?,
        passed: sum.counts.passed,
        failed: sum.counts.failed,
        minutes: sum.took.as_secs().div_ceil(60),
    };
    let text = serde_json::to_string_pretty(&record)? + "\n";
    fs::write(RECORD, text).with_context(|| format!("cannot write {RECORD}"))?;
    println!("{RECORD} says so: commit it");
    Ok(sum.ok())
}

/// Says when the slow lane last ran.
pub fn tell() {
    println!("{}", last().unwrap_or_else(|error| format!("the slow lane: {error:#}")));
}

fn last() -> Result<String> {
    let text = match fs::read_to_string(RECORD) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok("the slow lane (cargo xtask test --all) never ran".to_owned());
        }
        text => text.with_context(|| format!("cannot read {RECORD}"))?,
    };
    let Record { commit, date, passed, failed, minutes } =
        serde_json::from_str(&text).with_context(|| RECORD.to_owned())?;
    let since = output(Command::new("git").args(["rev-list", "--count", &format!("{commit}..HEAD")]));
    let since = since.unwrap_or_else(|_| "an unknown number of".to_owned());
    Ok(format!(
        "the slow lane (cargo xtask test --all) last ran {date} UTC at {commit}, {since} commits ago: \
         {passed} passed, {failed} failed, {minutes} minutes"
    ))
}
