//! A watchdog: the current operation of every thread, its start, and its time limit.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest time for a request. On a machine with a busy disk, `compact` held up writes at a memory
/// limit for 90 s.
pub const REQUEST_MAX: Duration = Duration::from_secs(180);
/// Longest time for a verb. Verbs wait for one another for at most 30 s, and for a pass of the
/// keeper as requests do.
pub const VERB_MAX: Duration = Duration::from_secs(240);

/// All threads of a run.
#[derive(Default)]
pub struct Watch(Mutex<Vec<Arc<Slot>>>);

/// A thread.
pub struct Slot {
    name: String,
    operation: Mutex<Option<Operation>>,
}

struct Operation {
    what: String,
    since: Instant,
    at_most: Duration,
}

impl Watch {
    /// Adds a thread.
    pub fn slot(&self, name: String) -> Arc<Slot> {
        let slot = Arc::new(Slot { name, operation: Mutex::new(None) });
        self.slots().push(Arc::clone(&slot));
        slot
    }

    fn slots(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Slot>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes threads that have ended.
    pub fn clear(&self) {
        self.slots().retain(|slot| Arc::strong_count(slot) > 1);
    }

    /// Returns a description of an operation that takes too long.
    pub fn overdue(&self) -> Option<String> {
        self.slots().iter().find_map(|slot| {
            let operation = slot.operation();
            let Operation { what, since, at_most } = operation.as_ref()?;
            let took = since.elapsed();
            (took > *at_most).then(|| format!("{}: {what}: no end after {} s", slot.name, took.as_secs()))
        })
    }

    /// Describes what all threads do.
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

impl Slot {
    fn operation(&self) -> std::sync::MutexGuard<'_, Option<Operation>> {
        self.operation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the start of an operation, and its time limit.
    pub fn begin(&self, what: impl Into<String>, at_most: Duration) {
        *self.operation() = Some(Operation { what: what.into(), since: Instant::now(), at_most });
    }

    /// Records progress: restarts the time limit.
    pub fn restart_timer(&self) {
        if let Some(operation) = &mut *self.operation() {
            operation.since = Instant::now();
        }
    }

    /// Records the end of the operation.
    pub fn end(&self) {
        *self.operation() = None;
    }
}
