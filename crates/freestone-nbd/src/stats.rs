//! Counters of a server.

use std::sync::atomic::{AtomicU64, Ordering};

/// What a server has done since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Connections that were accepted.
    pub accepted: u64,
    /// Connections that were closed at once: too many, or no resources for them.
    pub refused: u64,
    /// Connections that were closed at once: their address has a list of who may connect, and they are
    /// not on it. Also those at whatever else counts by [`Server::denials`](crate::Server::denials).
    pub denied: u64,
    /// Connections that exist now.
    pub connections: u64,
    /// Connections whose thread panicked in a device.
    pub panics: u64,
    /// Requests of the transmission phase.
    pub requests: u64,
    /// Replies to them.
    pub replies: u64,
    /// Replies that told of an error.
    pub errors: u64,
    /// Requests, or parts of them, that a device took over.
    pub submitted: u64,
    /// Send system calls of the transmission phase.
    pub sends: u64,
    /// Bytes sent in the transmission phase.
    pub sent_bytes: u64,
    /// Receive system calls of the transmission phase that brought data.
    pub receives: u64,
}

/// The counters of one connection: its thread adds once per batch, anybody reads.
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

/// What a connection's thread counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// See [`Stats::requests`].
    pub requests: u64,
    /// See [`Stats::replies`].
    pub replies: u64,
    /// See [`Stats::errors`].
    pub errors: u64,
    /// See [`Stats::submitted`].
    pub submitted: u64,
    /// See [`Stats::sends`].
    pub sends: u64,
    /// See [`Stats::sent_bytes`].
    pub sent_bytes: u64,
    /// See [`Stats::receives`].
    pub receives: u64,
}

impl Counters {
    /// Shows the totals of the connection's thread.
    pub fn show(&self, tally: &Tally) {
        // Relaxed: single numbers with one writer, no other data hangs on them; pairs with the
        // loads in `read`.
        let store = |counter: &AtomicU64, value| counter.store(value, Ordering::Relaxed);
        store(&self.requests, tally.requests);
        store(&self.replies, tally.replies);
        store(&self.errors, tally.errors);
        store(&self.submitted, tally.submitted);
        store(&self.sends, tally.sends);
        store(&self.sent_bytes, tally.sent_bytes);
        store(&self.receives, tally.receives);
    }

    /// The totals as last shown.
    pub fn read(&self) -> Tally {
        // Relaxed: pairs with the stores in `show`.
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
    /// Adds what a connection counted.
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
