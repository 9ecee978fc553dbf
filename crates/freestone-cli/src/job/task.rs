//! One run of a verb that takes long, and how it is shown.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use freestone_spec::refusal::Errno;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use crate::control::protocol::Fault;

/// How a verb runs.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// No other such verb runs on the device.
    pub alone: bool,
    /// It can end early.
    pub cancels: bool,
}

impl Kind {
    /// Alone, and it can be cancelled.
    pub const ALONE: Self = Self { alone: true, cancels: true };
    /// Beside others.
    pub const BESIDE: Self = Self { alone: false, cancels: true };
    /// Alone, to its end.
    pub const WHOLE: Self = Self { alone: true, cancels: false };
    /// Beside others, to its end.
    pub const WHOLE_BESIDE: Self = Self { alone: false, cancels: false };
}

#[derive(Debug)]
pub(super) struct Task {
    pub number: u64,
    /// The device, and those that it also needs.
    pub names: Vec<String>,
    pub verb: String,
    pub kind: Kind,
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
            kind: Kind::BESIDE,
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

    /// What the client of one in the background is answered: its number, and what else it `says`.
    pub fn told(&self, says: Value) -> Result<Box<RawValue>, Fault> {
        let mut told = json!({ "job": self.number, "name": self.names[0], "verb": self.verb });
        if let (Value::Object(told), Value::Object(says)) = (&mut told, says) {
            told.extend(says);
        }
        to_raw_value(&told).map_err(|e| Fault::internal(format!("{}: {e}", self.verb)))
    }

    /// How it failed that was cancelled; `after` says how things are left.
    pub fn cancelled(&self, why: &str, after: &str) -> Fault {
        let what = format!("{}: {}", self.names[0], self.verb);
        Fault::failed(Errno::ECANCELED, format!("{what}: cancelled, because {why}; {after}"))
    }

    pub fn show(&self, state: &str) -> Shown {
        Shown {
            job: self.number,
            name: self.names[0].clone(),
            verb: self.verb.clone(),
            state: state.to_owned(),
            background: self.background,
            tag: self.tag.clone(),
            done_bytes: self.done_bytes.load(SeqCst),
            total_bytes: self.total_bytes.load(SeqCst),
            seconds: rounded(self.begun.elapsed()),
            result: None,
            error: None,
        }
    }
}

/// To the millisecond.
pub(super) fn rounded(time: Duration) -> f64 {
    time.as_millis() as f64 / 1000.0
}

/// In `state`, as [`WAITING`].
pub const RUNNING: &str = "running";
/// For its turn.
pub const WAITING: &str = "waiting";

/// A verb as it is shown.
#[derive(Debug, Serialize, Deserialize)]
pub struct Shown {
    /// Its number.
    pub job: u64,
    /// The device, of `restore` the file.
    pub name: String,
    pub verb: String,
    /// `waiting`, `running`, `finished`, `failed` or `cancelled`.
    pub state: String,
    pub background: bool,
    /// How the client calls it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    pub done_bytes: u64,
    /// 0 where it is not known yet.
    pub total_bytes: u64,
    /// How long it has run, or has waited for its turn.
    pub seconds: f64,
    /// What it answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Box<RawValue>>,
    /// How it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Fault>,
}

impl Shown {
    /// Whether it neither runs nor waits.
    pub fn has_ended(&self) -> bool {
        !matches!(self.state.as_str(), RUNNING | WAITING)
    }
}

/// Which verbs are meant; all that is said is true of them.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Which {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verb: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

impl Which {
    pub(super) fn is(&self, task: &Task) -> bool {
        self.name.as_ref().is_none_or(|name| task.names.contains(name))
            && self.verb.as_ref().is_none_or(|verb| verb.replace('.', " ") == task.verb)
            && self.job.is_none_or(|job| job == task.number)
            && (self.tag.is_none() || self.tag == task.tag)
    }
}
