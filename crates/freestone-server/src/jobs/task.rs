//! A run of a long verb, and the information about it that `jobs` reports.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use freestone_control::protocol::RpcError;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

/// Properties of a job: exclusive use of its device, and cancellation.
#[derive(Debug, Clone, Copy)]
pub struct JobKind {
    /// True if no other exclusive job may run on the device at the same time.
    pub exclusive: bool,
    /// True if the job stops early when it is cancelled.
    pub cancellable: bool,
}

impl JobKind {
    /// An exclusive job that can be cancelled.
    pub const EXCLUSIVE: Self = Self { exclusive: true, cancellable: true };
    /// A job that runs beside other jobs on the device, and can be cancelled.
    pub const CONCURRENT: Self = Self { exclusive: false, cancellable: true };
    /// An exclusive job that always runs to its end.
    pub const EXCLUSIVE_UNCANCELLABLE: Self = Self { exclusive: true, cancellable: false };
    /// A job that runs beside other jobs on the device, and always to its end.
    pub const CONCURRENT_UNCANCELLABLE: Self = Self { exclusive: false, cancellable: false };
}

/// A running or waiting job: the data that the job table, the job's thread and the history share.
#[derive(Debug)]
pub(super) struct Task {
    pub number: u64,
    /// Name of the device, or path of the file of a restore, followed by the other devices that the
    /// job uses.
    pub names: Vec<String>,
    pub verb: String,
    pub kind: JobKind,
    pub background: bool,
    pub tag: Option<String>,
    pub begun: Instant,
    pub done_bytes: AtomicU64,
    pub total_bytes: AtomicU64,
    pub cancelled: AtomicBool,
}

impl Task {
    pub fn new(number: u64, names: Vec<String>, verb: String, tag: Option<String>) -> Self {
        Self {
            number,
            names,
            verb,
            kind: JobKind::CONCURRENT,
            background: true,
            tag,
            begun: Instant::now(),
            done_bytes: 0.into(),
            total_bytes: 0.into(),
            cancelled: false.into(),
        }
    }

    pub fn is_on(&self, name: &str) -> bool {
        self.names.iter().any(|own| own == name)
    }

    /// Returns the response for a background job that started or waits: its number and the `extra`
    /// members.
    pub fn started_response(&self, extra: Value) -> Result<Box<RawValue>, RpcError> {
        let mut response = json!({ "job": self.number, "name": self.names[0], "verb": self.verb });
        if let (Value::Object(response), Value::Object(extra)) = (&mut response, extra) {
            response.extend(extra);
        }
        to_raw_value(&response).map_err(|e| RpcError::internal(format!("{}: {e}", self.verb)))
    }

    /// Returns the error for a cancelled job. `after` describes the resulting state for the
    /// message.
    pub fn cancelled(&self, why: &str, after: &str) -> RpcError {
        let what = format!("{}: {}", self.names[0], self.verb);
        rpc_error!(ECANCELED, "{what}: cancelled: {why}; {after}")
    }

    pub fn info(&self, state: &str) -> JobInfo {
        JobInfo {
            job: self.number,
            name: self.names[0].clone(),
            verb: self.verb.clone(),
            state: state.to_owned(),
            background: self.background,
            tag: self.tag.clone(),
            done_bytes: self.done_bytes.load(SeqCst),
            total_bytes: self.total_bytes.load(SeqCst),
            seconds: seconds(self.begun.elapsed()),
            result: None,
            error: None,
        }
    }
}

/// Returns a duration in seconds, rounded down to the millisecond.
pub(super) fn seconds(time: Duration) -> f64 {
    time.as_millis() as f64 / 1000.0
}

/// State of a running job, as `jobs` reports it.
pub const RUNNING: &str = "running";
/// State of a job that waits in the queue, as `jobs` reports it.
pub const WAITING: &str = "waiting";

/// A job as `jobs` reports it.
#[derive(Debug, Serialize, Deserialize)]
pub struct JobInfo {
    /// Number of the job.
    pub job: u64,
    /// Name of the device, or path of the file of a restore.
    pub name: String,
    pub verb: String,
    /// State: `waiting`, `running`, `finished`, `failed` or `cancelled`.
    pub state: String,
    pub background: bool,
    /// Tag that the client has set for the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    pub done_bytes: u64,
    /// Size of the whole work, in bytes; 0 while unknown.
    pub total_bytes: u64,
    /// Time since the job was started or queued, up to its end, in seconds.
    pub seconds: f64,
    /// Result of a job that has finished, unless it is too long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Box<RawValue>>,
    /// Error of a job that has failed or was cancelled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<RpcError>,
}

impl JobInfo {
    /// Returns true if the job neither runs nor waits.
    pub fn has_ended(&self) -> bool {
        !matches!(self.state.as_str(), RUNNING | WAITING)
    }
}

/// Selection of jobs. A job matches if it has all given properties; `None` matches every job.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobFilter {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verb: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

impl JobFilter {
    pub(super) fn matches(&self, task: &Task) -> bool {
        self.name.as_ref().is_none_or(|name| task.names.contains(name))
            && self.verb.as_ref().is_none_or(|verb| verb.replace('.', " ") == task.verb)
            && self.job.is_none_or(|job| job == task.number)
            && (self.tag.is_none() || self.tag == task.tag)
    }
}
