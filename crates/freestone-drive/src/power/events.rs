//! Event counter that wakes the worker, and threads that wait until no request is in flight.

use freestone_core::pin::wait;
use freestone_core::sync::{AtomicU64, Condvar, Instant, Mutex, Ordering::SeqCst};

/// Event counter that threads can wait on. Without listeners, an event costs one atomic load.
#[derive(Debug, Default)]
pub struct EventCounter {
    count: Mutex<u64>,
    changed: Condvar,
    listeners: AtomicU64,
}

impl EventCounter {
    /// Adds a listener. While there are listeners, [`notify`](Self::notify) counts events.
    pub fn listen(&self) {
        self.listeners.fetch_add(1, SeqCst);
    }

    pub fn stop_listening(&self) {
        self.listeners.fetch_sub(1, SeqCst);
    }

    /// Counts an event and wakes the waiters, if there are listeners.
    pub fn notify(&self) {
        if self.listeners.load(SeqCst) > 0 {
            self.notify_always();
        }
    }

    /// Counts an event and wakes the waiters, even without listeners.
    pub fn notify_always(&self) {
        *self.count.lock() += 1;
        self.changed.notify_all();
    }

    /// Returns the number of events so far. A waiter must call this before it checks its condition,
    /// so that no event is missed.
    pub fn count(&self) -> u64 {
        *self.count.lock()
    }

    /// Waits until the number of events differs from `seen`, at most until `until`.
    pub fn wait_until(&self, seen: u64, until: Instant) {
        let most = until.saturating_duration_since(Instant::now());
        drop(self.changed.wait_timeout_while(self.count.lock(), most, |count| *count == seen));
    }

    pub fn wait(&self, seen: u64) {
        let mut count = self.count.lock();
        while *count == seen {
            count = wait(&self.changed, count);
        }
    }
}
