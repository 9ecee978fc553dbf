//! The history of background jobs that have ended.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use freestone_control::protocol::RpcError;
use freestone_spec::refusal::Errno;
use serde_json::value::RawValue;

use super::queue::Outcome;
use super::task::{JobFilter, JobInfo, Task, seconds};

/// Maximum number of jobs in the history: about twice as many as can run and wait at once.
const COUNT_MAX: usize = 2048;
/// Limit of the history's size, in bytes of JSON.
const BYTES_MAX: usize = 16 << 20;
/// Longest result kept, in bytes of JSON. The history omits a longer result.
const RESULT_BYTES_MAX: usize = 64 << 10;

/// The background jobs that ended most recently, oldest first.
#[derive(Default)]
pub struct JobHistory {
    jobs: VecDeque<EndedJob>,
    bytes: usize,
}

/// A background job that has ended.
pub struct EndedJob {
    task: Arc<Task>,
    /// Run time of the job, or its time in the queue if it did not start.
    duration: Duration,
    /// Outcome of the job, without a result that is too long.
    outcome: Result<Option<Box<RawValue>>, RpcError>,
    /// Size of the job's information as JSON, in bytes.
    bytes: usize,
}

impl EndedJob {
    pub fn new(task: Arc<Task>, outcome: Outcome) -> Self {
        let outcome = outcome.map(|result| Some(result).filter(|r| r.get().len() <= RESULT_BYTES_MAX));
        let mut ended = Self { duration: task.begun.elapsed(), task, outcome, bytes: 0 };
        ended.bytes = serde_json::to_vec(&ended.info()).map_or(0, |json| json.len());
        ended
    }

    pub fn info(&self) -> JobInfo {
        let (state, result, error) = match &self.outcome {
            Ok(result) => ("finished", result.clone(), None),
            Err(fault) if fault.has_errno(Errno::ECANCELED) => ("cancelled", None, Some(fault.clone())),
            Err(fault) => ("failed", None, Some(fault.clone())),
        };
        JobInfo { result, error, seconds: seconds(self.duration), ..self.task.info(state) }
    }
}

impl JobHistory {
    /// Adds a job, and drops the oldest jobs beyond the limits.
    pub fn add(&mut self, ended: EndedJob) {
        self.bytes += ended.bytes;
        self.jobs.push_back(ended);
        while self.jobs.len() > COUNT_MAX || self.bytes > BYTES_MAX {
            self.bytes -= self.jobs.pop_front().map_or(self.bytes, |ended| ended.bytes);
        }
    }

    pub fn list(&self, filter: &JobFilter) -> impl Iterator<Item = JobInfo> {
        self.jobs.iter().filter(|ended| filter.matches(&ended.task)).map(EndedJob::info)
    }
}
