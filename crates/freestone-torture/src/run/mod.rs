//! Executes the ops of a run on a stack, one after the other with some requests in flight, and
//! judges the results. A single thread, the runner, knows the state of all devices ([`World`](crate::stack::World));
//! other threads send it events. The modes `exact` and `threads` use this room.

mod issue;
mod process;
mod runner;

use std::collections::BTreeMap;
use std::fmt;

use freestone::device::Result as Answer;

use crate::ops::{self, Op};
use crate::rt::time::Duration;
use crate::stack::{Finding, VerbResult};
use process::Process;
use runner::Runner;

#[derive(Debug, Clone, Copy)]
pub struct RunSettings {
    /// Longest duration of a request or a verb. The time counts from the release of everything that
    /// hangs.
    pub max_duration: Duration,
    /// Time that the runner waits before it releases hanging requests.
    pub release_after: Duration,
    /// Prints each op on standard error.
    pub trace: bool,
    /// Checks that the run leaves no threads or file descriptors behind. Nothing else may run in
    /// the process.
    pub process: bool,
}

impl Default for RunSettings {
    fn default() -> Self {
        Self {
            max_duration: Duration::from_secs(60),
            release_after: Duration::from_millis(100),
            trace: false,
            process: false,
        }
    }
}

#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Number of occurrences of each kind of event.
    pub tally: BTreeMap<&'static str, u64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Number of the failing op, counted from 1 over the ops of the stack and the run. The number
    /// after that of the last op means a failure in the checks at the end of the run.
    pub op: usize,
    pub finding: Finding,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "op {}: {}", self.op, self.finding)
    }
}

/// Runs `ops` on the stack drawn from `stack_seed`, or on an empty stack for `None`.
pub fn run(stack_seed: Option<u64>, ops: &[Op], settings: RunSettings) -> Result<Report, Failure> {
    let before = settings.process.then(Process::now);
    let stack = stack_seed.map(ops::stack).unwrap_or_default();
    let mut runner = Runner::new(settings);
    let outcome = stack.iter().chain(ops).try_for_each(|op| runner.step(op));
    let outcome = outcome.and_then(|()| {
        runner.op_number += 1;
        runner.end()
    });
    let op_number = runner.op_number;
    let report = Report { tally: runner.world.tally().clone() };
    let ended = match outcome {
        Ok(()) => runner
            .close()
            .and_then(|()| before.map_or(Ok(()), |before| before.wait_restored(settings.max_duration))),
        Err(finding) => {
            // Requests of the run may still hang, so no thread is joined.
            runner.abandon();
            Err(finding)
        }
    };
    ended.map(|()| report).map_err(|finding| Failure { op: op_number, finding })
}

/// An event for the runner, which alone knows the state of all devices.
enum Event {
    /// Completion of the request with this number: its result, and the bytes read.
    Completed(u64, Answer<()>, Vec<u8>),
    /// The issuing thread has dropped its reference to the device of the request with this number.
    Released(u64),
    VerbResult(VerbResult),
    /// A finding of a thread other than the runner.
    Finding(Finding),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeded_runs_pass() {
        for seed in [2, 5, 8, 12] {
            let report = run(Some(seed), &ops::draw(seed, 150), RunSettings::default());
            let report = report.unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
            assert!(report.tally["reads"] > 0);
        }
    }
}
