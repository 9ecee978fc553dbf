//! What every thread does, since when, and how long it may take.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A request that has no answer by then has failed. On a machine whose disk is busy with other
/// things, `compact` was seen to hold up writes at a memory limit for 90 s.
pub const REQUEST_MAX: Duration = Duration::from_secs(180);
/// A verb that has no answer by then has failed. Verbs wait for one another for 30 s at most, and
/// for a pass as requests do.
pub const VERB_MAX: Duration = Duration::from_secs(240);

/// All threads of a run.
#[derive(Default)]
pub struct Watch(Mutex<Vec<Arc<Slot>>>);

/// One thread.
pub struct Slot {
    name: String,
    doing: Mutex<Option<Doing>>,
}

struct Doing {
    what: String,
    since: Instant,
    at_most: Duration,
}

impl Watch {
    /// Adds a thread.
    pub fn slot(&self, name: String) -> Arc<Slot> {
        let slot = Arc::new(Slot { name, doing: Mutex::new(None) });
        self.slots().push(Arc::clone(&slot));
        slot
    }

    fn slots(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Slot>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets threads that have ended.
    pub fn clear(&self) {
        self.slots().retain(|slot| Arc::strong_count(slot) > 1);
    }

    /// What takes longer than it may.
    pub fn late(&self) -> Option<String> {
        self.slots().iter().find_map(|slot| {
            let doing = slot.doing();
            let Doing { what, since, at_most } = doing.as_ref()?;
            let took = since.elapsed();
            (took > *at_most).then(|| format!("{}: {what}: no end after {} s", slot.name, took.as_secs()))
        })
    }

    /// What all of them do.
    pub fn all(&self) -> String {
        let mut text = String::new();
        for slot in self.slots().iter() {
            if let Some(Doing { what, since, .. }) = &*slot.doing() {
                let _ = writeln!(text, "  {}: {what}, for {} ms", slot.name, since.elapsed().as_millis());
            }
        }
        text
    }
}

impl Slot {
    fn doing(&self) -> std::sync::MutexGuard<'_, Option<Doing>> {
        self.doing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What begins now, and has to end in time.
    pub fn begin(&self, what: impl Into<String>, at_most: Duration) {
        *self.doing() = Some(Doing { what: what.into(), since: Instant::now(), at_most });
    }

    /// It got on: its time begins anew.
    pub fn moved(&self) {
        if let Some(doing) = &mut *self.doing() {
            doing.since = Instant::now();
        }
    }

    /// It has ended.
    pub fn end(&self) {
        *self.doing() = None;
    }
}
