//! How verbs of the background have ended.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use freestone_spec::refusal::Errno;
use serde_json::value::RawValue;

use super::task::{Shown, Task, Which, rounded};
use super::turns::Outcome;
use crate::control::protocol::Fault;

/// Verbs whose end is remembered: all that can run and wait at one time, and as many again.
const COUNT_MAX: usize = 2048;
/// What is known of them, all together.
const BYTES_MAX: usize = 16 << 20;
/// A longer result is forgotten.
const RESULT_BYTES_MAX: usize = 64 << 10;

/// The last ones.
#[derive(Default)]
pub struct Ended {
    last: VecDeque<Past>,
    bytes: usize,
}

pub struct Past {
    task: Arc<Task>,
    took: Duration,
    /// Without a result that is too long.
    outcome: Result<Option<Box<RawValue>>, Fault>,
    /// What it takes, as JSON.
    bytes: usize,
}

impl Past {
    pub fn new(task: Arc<Task>, outcome: Outcome) -> Self {
        let outcome = outcome.map(|result| Some(result).filter(|r| r.get().len() <= RESULT_BYTES_MAX));
        let mut past = Self { took: task.begun.elapsed(), task, outcome, bytes: 0 };
        past.bytes = serde_json::to_vec(&past.show()).map_or(0, |json| json.len());
        past
    }

    pub fn show(&self) -> Shown {
        let (state, result, error) = match &self.outcome {
            Ok(result) => ("finished", result.clone(), None),
            Err(fault) if fault.is(Errno::ECANCELED) => ("cancelled", None, Some(fault.clone())),
            Err(fault) => ("failed", None, Some(fault.clone())),
        };
        Shown { result, error, seconds: rounded(self.took), ..self.task.show(state) }
    }
}

impl Ended {
    pub fn add(&mut self, past: Past) {
        self.bytes += past.bytes;
        self.last.push_back(past);
        while self.last.len() > COUNT_MAX || self.bytes > BYTES_MAX {
            self.bytes -= self.last.pop_front().map_or(self.bytes, |past| past.bytes);
        }
    }

    pub fn show(&self, which: &Which) -> impl Iterator<Item = Shown> {
        self.last.iter().filter(|past| which.is(&past.task)).map(Past::show)
    }
}
