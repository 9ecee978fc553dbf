//! How the worker and those who wait for a quiet device learn that something has moved.

use std::sync::PoisonError;

use freestone_core::pin::wait;
use freestone_core::sync::{AtomicU64, Condvar, Instant, Mutex, Ordering::SeqCst};

/// Counts what has happened, for whoever listens. Nobody pays for it while nobody listens.
#[derive(Debug, Default)]
pub struct Bell {
    rung: Mutex<u64>,
    changed: Condvar,
    listeners: AtomicU64,
}

impl Bell {
    /// One more who waits for something. What happens from now on is heard.
    pub fn listen(&self) {
        self.listeners.fetch_add(1, SeqCst);
    }

    pub fn leave(&self) {
        self.listeners.fetch_sub(1, SeqCst);
    }

    /// Something has moved that a listener may wait for.
    pub fn ring(&self) {
        if self.listeners.load(SeqCst) > 0 {
            self.ring_loud();
        }
    }

    /// As [`ring`](Self::ring), also for those who are not counted.
    pub fn ring_loud(&self) {
        *self.rung.lock() += 1;
        self.changed.notify_all();
    }

    /// How often it has rung. Asked before a look at what is waited for.
    pub fn count(&self) -> u64 {
        *self.rung.lock()
    }

    /// Returns when it has rung more often than `seen`, or at `until`.
    pub fn wait_until(&self, seen: u64, until: Instant) {
        let mut rung = self.rung.lock();
        while *rung == seen {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            rung = self.changed.wait_timeout(rung, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Returns when it has rung more often than `seen`.
    pub fn wait(&self, seen: u64) {
        let mut rung = self.rung.lock();
        while *rung == seen {
            rung = wait(&self.changed, rung);
        }
    }
}
