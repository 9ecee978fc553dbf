//! Counters of a server, and of its connections.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of a server. All except `connections` are totals since the server was created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Accepted connections.
    pub accepted: u64,
    /// Connections closed at once because of a limit or missing resources.
    pub refused: u64,
    /// Connections closed at once because their peer is not on the allow list of the address. Includes
    /// denials that other components count in [`Server::denials`](crate::Server::denials).
    pub denied: u64,
    /// Current connections.
    pub connections: u64,
    /// Connections whose thread panicked in a device.
    pub panics: u64,
    /// Requests received in the transmission phase.
    pub requests: u64,
    /// Replies in the transmission phase, including error replies.
    pub replies: u64,
    /// Error replies in the transmission phase.
    pub errors: u64,
    /// Requests, or parts of requests, submitted to a device.
    pub submitted: u64,
    /// Send system calls of the transmission phase.
    pub sends: u64,
    /// Bytes sent in the transmission phase.
    pub sent_bytes: u64,
    /// Receive system calls of the transmission phase that returned data.
    pub receives: u64,
}

/// Published counters of one connection. Only the connection's thread writes them, once per turn; any thread
/// reads them.
#[derive(Debug, Default)]
pub struct Counters {
    requests: AtomicU64,
    replies: AtomicU64,
    errors: AtomicU64,
    submitted: AtomicU64,
    sends: AtomicU64,
    sent_bytes: AtomicU64,
    receives: AtomicU64,
}

/// Counters that a connection's thread has not published yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    pub requests: u64,
    pub replies: u64,
    pub errors: u64,
    pub submitted: u64,
    pub sends: u64,
    pub sent_bytes: u64,
    pub receives: u64,
}

impl Counters {
    /// Publishes the totals of the connection's thread.
    pub fn publish(&self, tally: &Tally) {
        // Relaxed: independent counters with one writer; no other data depends on them. Pairs with the loads
        // in `read`.
        let store = |counter: &AtomicU64, value| counter.store(value, Ordering::Relaxed);
        store(&self.requests, tally.requests);
        store(&self.replies, tally.replies);
        store(&self.errors, tally.errors);
        store(&self.submitted, tally.submitted);
        store(&self.sends, tally.sends);
        store(&self.sent_bytes, tally.sent_bytes);
        store(&self.receives, tally.receives);
    }

    /// Returns the totals last published.
    pub fn read(&self) -> Tally {
        // Relaxed: pairs with the stores in `publish`.
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Tally {
            requests: load(&self.requests),
            replies: load(&self.replies),
            errors: load(&self.errors),
            submitted: load(&self.submitted),
            sends: load(&self.sends),
            sent_bytes: load(&self.sent_bytes),
            receives: load(&self.receives),
        }
    }
}

impl Stats {
    /// Adds the counters of a connection.
    pub(crate) fn add(&mut self, tally: &Tally) {
        self.requests += tally.requests;
        self.replies += tally.replies;
        self.errors += tally.errors;
        self.submitted += tally.submitted;
        self.sends += tally.sends;
        self.sent_bytes += tally.sent_bytes;
        self.receives += tally.receives;
    }
}
