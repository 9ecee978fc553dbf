//! A watchdog: records the current operation of each thread, when it started, and its time limit.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time limit of a request. On a machine with a busy disk, `compact` has delayed writes at a memory
/// limit for 90 s.
pub const REQUEST_MAX: Duration = Duration::from_secs(180);
/// Time limit of a verb. Verbs wait for one another for at most 30 s. Like requests, they also wait
/// for the keeper.
pub const VERB_MAX: Duration = Duration::from_secs(240);

/// The operations of all threads of a run.
#[derive(Default)]
pub struct Watch(Mutex<Vec<Arc<WatchedThread>>>);

pub struct WatchedThread {
    name: String,
    operation: Mutex<Option<Operation>>,
}

struct Operation {
    what: String,
    since: Instant,
    at_most: Duration,
}

impl Watch {
    /// Adds a thread, and returns the handle with which it records its operations.
    pub fn slot(&self, name: String) -> Arc<WatchedThread> {
        let slot = Arc::new(WatchedThread { name, operation: Mutex::new(None) });
        self.slots().push(Arc::clone(&slot));
        slot
    }

    fn slots(&self) -> std::sync::MutexGuard<'_, Vec<Arc<WatchedThread>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the threads that have ended, which no longer hold their handle.
    pub fn clear(&self) {
        self.slots().retain(|slot| Arc::strong_count(slot) > 1);
    }

    /// Returns a description of an operation that has exceeded its time limit, or `None`.
    pub fn overdue(&self) -> Option<String> {
        self.slots().iter().find_map(|slot| {
            let operation = slot.operation();
            let Operation { what, since, at_most } = operation.as_ref()?;
            let took = since.elapsed();
            (took > *at_most).then(|| format!("{}: {what}: no end after {} s", slot.name, took.as_secs()))
        })
    }

    pub fn describe_all(&self) -> String {
        let mut text = String::new();
        for slot in self.slots().iter() {
            if let Some(Operation { what, since, .. }) = &*slot.operation() {
                let _ = writeln!(text, "  {}: {what}, for {} ms", slot.name, since.elapsed().as_millis());
            }
        }
        text
    }
}

impl WatchedThread {
    fn operation(&self) -> std::sync::MutexGuard<'_, Option<Operation>> {
        self.operation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the start of an operation with this time limit.
    pub fn begin(&self, what: impl Into<String>, at_most: Duration) {
        *self.operation() = Some(Operation { what: what.into(), since: Instant::now(), at_most });
    }

    /// Restarts the time limit of the current operation, which has made progress.
    pub fn restart_timer(&self) {
        if let Some(operation) = &mut *self.operation() {
            operation.since = Instant::now();
        }
    }

    pub fn end(&self) {
        *self.operation() = None;
    }
}
