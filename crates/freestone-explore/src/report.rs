//! Results of an exploration.

use std::time::Duration;

use crate::StateId;

/// Result of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// True if the check accepted the state.
    pub passed: bool,
    /// How the check ended, for example `exit status 1` or `timed out after 30 s`.
    pub end: String,
    /// Output of the check, shortened.
    pub output: String,
    /// Time that the check took.
    pub time: Duration,
}

/// A lost write, or a run of lost blocks of a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostWrite {
    /// Number of the entry in the log, from 1.
    pub entry: u64,
    /// First lost byte of the disk.
    pub offset: u64,
    /// Number of lost bytes.
    pub len: u64,
    /// True if the whole entry is lost.
    pub is_whole: bool,
    /// True for a discard.
    pub is_discard: bool,
    /// Last mark before the write.
    pub mark: Option<String>,
}

/// A state on which the check failed twice, reduced to the fewest lost writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Identifier of the state.
    pub id: StateId,
    /// Last mark before the state.
    pub mark: Option<String>,
    /// The lost writes. Empty if the check fails with all writes up to the point.
    pub lost: Vec<LostWrite>,
    /// Result of the check on this state.
    pub verdict: Verdict,
    /// Number of failing states that were found and have at least these writes lost.
    pub states: u64,
    /// True if each of the lost writes is needed for the failure. False if the models do not allow
    /// other losses, or the reduction was cut short.
    pub is_minimal: bool,
}

/// A state on which the check failed once, and passed when it was repeated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flaky {
    /// Identifier of the state.
    pub id: StateId,
    /// Result of the failed check.
    pub verdict: Verdict,
}

/// Reason why an exploration ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// All states that the models allow were checked.
    Complete,
    /// The budget was used up.
    Budget,
    /// The first failure ended the exploration.
    FirstFailure,
    /// The maximum number of failures was found.
    Failures,
    /// The check fails on the state after the whole log, so failures of other states mean nothing.
    FinalState,
    /// The caller stopped the exploration.
    Stopped,
}

/// Result of an exploration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Number of entries of the log.
    pub entries: u64,
    /// Number of states that were checked, without repetitions and reductions.
    pub states: u64,
    /// Number of states that were omitted because an equal state was checked.
    pub duplicates: u64,
    /// Number of checked states that failed.
    pub failing_states: u64,
    /// Number of checks that reduced failures.
    pub reductions: u64,
    /// Different failures, in the order of the log.
    pub failures: Vec<Failure>,
    /// States on which the check is flaky.
    pub flaky: Vec<Flaky>,
    /// Reason of the end.
    pub end: End,
    /// Time of the exploration.
    pub time: Duration,
}

/// Part of an exploration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// States are checked.
    Explore,
    /// Failures are reduced.
    Reduce,
}

/// Progress of an exploration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Present part of the exploration.
    pub phase: Phase,
    /// Number of states or reductions that are done.
    pub done: u64,
    /// Number of states that the budget allows, or of windows with failures to reduce. `None` if unknown.
    pub total: Option<u64>,
    /// Number of failing states so far.
    pub failing: u64,
    /// Number of states omitted as equal so far.
    pub duplicates: u64,
}
