//! The record of the gate, `xtask/record.json`: the last run of each piece of the slow lane, and the content that last
//! passed each check. The gate skips checks whose content has passed.
//!
//! Continuous integration works in a temporary clone, so it prints its record, and `cargo xtask record FILE` merges the
//! printed record into the tree.

pub mod content;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use crate::cargo::{Counts, output};

const PATH: &str = "xtask/record.json";
/// Beginning of the line in which [`print`](Record::print) prints the record.
const PRINTED: &str = "record: ";
/// A piece of the slow lane fails if it last ran more than this many landings ago. A landing is one or several commits
/// that change the record, each less than [`LANDING_GAP_SECONDS`] after the one before.
pub const LANDINGS_MAX: usize = 10;
/// Commits of the record that are at least this far apart belong to different landings: one session may commit the
/// record several times.
const LANDING_GAP_SECONDS: i64 = 3 * 3600;

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Record {
    /// Last run of each piece of the slow lane, by its name.
    pub slow: BTreeMap<String, Run>,
    /// Content that last passed each check, by check and package: `tsan freestone-core`.
    pub passed: BTreeMap<String, PassedContent>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Commit that was checked out.
    pub commit: String,
    /// End of the run, UTC.
    pub date: String,
    pub passed: u64,
    pub failed: u64,
    /// Wall time in minutes, rounded up.
    pub minutes: u64,
}

/// Content that passed a check.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PassedContent {
    /// Hash of the files that the check depends on.
    pub content: String,
    pub commit: String,
    pub date: String,
}

impl Record {
    /// Reads the record. Without a file the record is empty.
    pub fn read() -> Result<Self> {
        match fs::read_to_string(PATH) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            text => {
                let text = text.with_context(|| format!("cannot read {PATH}"))?;
                serde_json::from_str(&text).with_context(|| PATH.to_owned())
            }
        }
    }

    pub fn write(&self) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        fs::write(PATH, text).with_context(|| format!("cannot write {PATH}"))
    }

    /// Prints the record on one line, for [`merge`](Self::merge).
    pub fn print(&self) -> Result<()> {
        println!("{PRINTED}{}", serde_json::to_string(self)?);
        Ok(())
    }

    /// Merges the entries of the last printed record in `text` that are newer than those of this record.
    pub fn merge(&mut self, text: &str) -> Result<()> {
        let mut printed =
            text.lines().filter_map(|line| line.trim_start_matches(['>', ' ']).strip_prefix(PRINTED));
        let printed = printed.next_back().with_context(|| format!("no line begins with {PRINTED:?}"))?;
        let newer: Self = serde_json::from_str(printed).context("the printed record is damaged")?;
        for (name, run) in newer.slow {
            if self.slow.get(&name).is_none_or(|old| old.date < run.date) {
                self.slow.insert(name, run);
            }
        }
        for (name, passed) in newer.passed {
            if self.passed.get(&name).is_none_or(|old| old.date < passed.date) {
                self.passed.insert(name, passed);
            }
        }
        Ok(())
    }

    /// Records a run of a piece that has just ended.
    pub fn record_run(&mut self, piece: &str, counts: Counts, seconds: u64) -> Result<()> {
        let (commit, date) = (commit()?, now()?);
        let run =
            Run { commit, date, passed: counts.passed, failed: counts.failed, minutes: seconds.div_ceil(60) };
        self.slow.insert(piece.to_owned(), run);
        Ok(())
    }

    pub fn has_passed(&self, check: &str, content: &str) -> bool {
        self.passed.get(check).is_some_and(|passed| passed.content == content)
    }

    pub fn pass(&mut self, check: &str, content: &str) -> Result<()> {
        let passed = PassedContent { content: content.to_owned(), commit: commit()?, date: now()? };
        self.passed.insert(check.to_owned(), passed);
        Ok(())
    }
}

impl Run {
    /// Returns the number of landings since this run. Counts by date, because the commit of the run may have been
    /// rewritten since.
    pub fn age(&self) -> Result<usize> {
        let run = output(Command::new("date").args(["-u", "-d", &self.date, "+%s"]))?;
        let log = ["log", "--first-parent", "--format=%ct", "HEAD", "--", PATH];
        let commits = output(Command::new("git").args(log))?;
        let commits = commits.lines().map(str::parse).collect::<Result<Vec<i64>, _>>()?;
        Ok(landings_since(run.parse()?, commits))
    }
}

/// Returns the number of landings after `run`, from the dates of the commits that change the record. All times are in
/// seconds since 1970.
fn landings_since(run: i64, mut commits: Vec<i64>) -> usize {
    commits.retain(|date| *date > run);
    commits.sort_unstable();
    let gaps = commits.windows(2).filter(|pair| pair[1] - pair[0] >= LANDING_GAP_SECONDS).count();
    if commits.is_empty() { 0 } else { gaps + 1 }
}

/// `cargo xtask record FILE`: merges the record in the output of a gate.
pub fn merge(file: &str) -> Result<()> {
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {file}"))?;
    let mut record = Record::read()?;
    record.merge(&text)?;
    record.write()?;
    println!("{PATH} is up to date; commit it");
    Ok(())
}

fn commit() -> Result<String> {
    output(Command::new("git").args(["rev-parse", "--short=12", "HEAD"]))
}

fn now() -> Result<String> {
    output(Command::new("date").args(["-u", "+%Y-%m-%d %H:%M"]))
}

#[cfg(test)]
mod tests {
    use super::{LANDING_GAP_SECONDS, PRINTED, Record, Run, landings_since};

    fn run(date: &str) -> Run {
        Run { commit: "c".into(), date: date.into(), passed: 1, failed: 0, minutes: 2 }
    }

    #[test]
    fn merge_takes_newer_entries_only() {
        let mut record = Record::default();
        record.slow.insert("a".into(), run("2026-01-02 00:00"));
        record.slow.insert("b".into(), run("2026-01-02 00:00"));
        let mut printed = Record::default();
        printed.slow.insert("a".into(), run("2026-01-01 00:00"));
        printed.slow.insert("b".into(), run("2026-01-03 00:00"));
        printed.slow.insert("c".into(), run("2026-01-01 00:00"));
        let line = serde_json::to_string(&printed).unwrap();
        record.merge(&format!("noise\n> {PRINTED}{line}\nnoise")).unwrap();
        let dates: Vec<_> = record.slow.values().map(|run| run.date.as_str()).collect();
        assert_eq!(dates, ["2026-01-02 00:00", "2026-01-03 00:00", "2026-01-01 00:00"]);
        assert!(record.merge("no record here").is_err());
    }

    #[test]
    fn landings_are_counted_by_date() {
        const HOUR: i64 = 3600;
        const RUN: i64 = 1_790_000_000;
        let landings = |hours: &[i64]| landings_since(RUN, hours.iter().map(|at| RUN + at * HOUR).collect());
        assert_eq!(landings(&[]), 0);
        assert_eq!(landings(&[-30, -3, 0]), 0, "not later than the run");
        assert_eq!(landings(&[-1, 1]), 1);
        assert_eq!(landings(&[1, 2, 4, 6]), 1, "several commits of one session");
        assert_eq!(landings(&[24, 4, 2, 1, 24]), 2, "in any order");
        assert_eq!(landings(&[1, 4, 7]), 3);
        let gap = LANDING_GAP_SECONDS;
        assert_eq!(landings_since(RUN, vec![RUN + 1, RUN + gap]), 1);
        assert_eq!(landings_since(RUN, vec![RUN + 1, RUN + 1 + gap]), 2);
    }
}
