//! Notification of the worker, and of threads that wait for a quiet device.

use std::sync::PoisonError;

use freestone_core::pin::wait;
use freestone_core::sync::{AtomicU64, Condvar, Instant, Mutex, Ordering::SeqCst};

/// Event counter with waiters. Without listeners an event costs one atomic load.
#[derive(Debug, Default)]
pub struct EventCounter {
    count: Mutex<u64>,
    changed: Condvar,
    listeners: AtomicU64,
}

impl EventCounter {
    /// Adds a listener. Events from now on are counted.
    pub fn listen(&self) {
        self.listeners.fetch_add(1, SeqCst);
    }

    pub fn stop_listening(&self) {
        self.listeners.fetch_sub(1, SeqCst);
    }

    /// Reports an event to the listeners.
    pub fn notify(&self) {
        if self.listeners.load(SeqCst) > 0 {
            self.notify_always();
        }
    }

    /// Reports an event, even without listeners.
    pub fn notify_always(&self) {
        *self.count.lock() += 1;
        self.changed.notify_all();
    }

    /// Returns the number of events. Read this before checking the awaited condition.
    pub fn count(&self) -> u64 {
        *self.count.lock()
    }

    /// Waits for more than `seen` events, or until `until`.
    pub fn wait_until(&self, seen: u64, until: Instant) {
        let mut count = self.count.lock();
        while *count == seen {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            count = self.changed.wait_timeout(count, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub fn wait(&self, seen: u64) {
        let mut count = self.count.lock();
        while *count == seen {
            count = wait(&self.changed, count);
        }
    }
}
