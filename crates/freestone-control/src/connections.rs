//! The set of open control connections, with an upper limit.
//!
//! A client beyond the limit is not refused: it waits until a connection ends. While a client waits, the
//! connection that has been idle longest is closed. A connection is idle while no verb runs for it, also if
//! the client does not read a response. The control server owns one set per socket. The lock of a set is held
//! only for short accesses.

use std::collections::HashMap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Shortest idle time after which a connection may be closed, because a client that has just connected is
/// about to send a request.
const IDLE_MIN: Duration = Duration::from_secs(1);
/// Interval at which a waiting client looks for idle connections to close.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The set of open control connections.
pub struct Connections {
    limit: usize,
    state: Mutex<ConnectionsState>,
    /// Notified when a connection ends and when the set is closed.
    changed: Condvar,
}

#[derive(Default)]
struct ConnectionsState {
    closing: bool,
    /// Open connections, by the number of their slot.
    open: HashMap<u64, Connection>,
    next: u64,
}

struct Connection {
    stream: Arc<UnixStream>,
    /// Start of the idle time; `None` while a verb runs.
    idle_since: Option<Instant>,
    /// True if the connection is being closed.
    ending: bool,
}

/// Guard of the slot that a connection uses in the set. Dropping it frees the slot.
pub struct Slot {
    connections: Arc<Connections>,
    number: u64,
}

/// Guard of a running verb. Until it is dropped, the connection does not count as idle.
pub struct RunningVerb<'a>(&'a Slot);

impl Connections {
    /// Returns an empty set with room for `limit` connections.
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, state: Mutex::default(), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionsState> {
        // A panic cannot leave the state inconsistent, so poisoning is ignored.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true after [`close`](Self::close).
    pub fn is_closing(&self) -> bool {
        self.lock().closing
    }

    /// Waits for a free slot for a new connection. Returns `None` if the set was closed meanwhile.
    pub fn add(self: &Arc<Self>, stream: &Arc<UnixStream>) -> Option<Slot> {
        let mut state = self.lock();
        while !state.closing && state.open.len() >= self.limit {
            state.close_most_idle();
            state = self.changed.wait_timeout(state, POLL_INTERVAL).unwrap_or_else(PoisonError::into_inner).0;
        }
        if state.closing {
            return None;
        }
        let number = state.next;
        state.next += 1;
        let connection =
            Connection { stream: Arc::clone(stream), idle_since: Some(Instant::now()), ending: false };
        state.open.insert(number, connection);
        Some(Slot { connections: Arc::clone(self), number })
    }

    /// Closes the connection that has been idle longest, if for at least [`IDLE_MIN`]. Called if threads or
    /// descriptors are short.
    pub fn close_idle(&self) {
        self.lock().close_most_idle();
    }

    /// Stops accepting connections and requests. Running verbs finish and send their responses.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closing = true;
        for connection in state.open.values() {
            let _ = connection.stream.shutdown(Shutdown::Read);
        }
        self.changed.notify_all();
    }

    /// Waits until no connection is open, for at most `grace`.
    pub fn wait_empty(&self, grace: Duration) {
        let end = Instant::now() + grace;
        let mut state = self.lock();
        while !state.open.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl ConnectionsState {
    /// Closes the connection that has been idle longest. Only one connection is being closed at a
    /// time.
    fn close_most_idle(&mut self) {
        if self.open.values().any(|connection| connection.ending) {
            return;
        }
        let idle = self.open.values_mut().filter(|connection| connection.idle_since.is_some());
        let Some(longest) = idle.min_by_key(|connection| connection.idle_since) else { return };
        if longest.idle_since.is_some_and(|since| since.elapsed() >= IDLE_MIN) {
            longest.ending = true;
            // The thread of the connection reads from or writes to this stream, and sees the shutdown at
            // once.
            let _ = longest.stream.shutdown(Shutdown::Both);
        }
    }
}

impl Slot {
    /// Marks the connection as busy with a verb. Returns `None` if the connection is being closed:
    /// the verb must not run.
    pub fn begin_verb(&self) -> Option<RunningVerb<'_>> {
        let mut state = self.connections.lock();
        let connection = state.open.get_mut(&self.number).filter(|connection| !connection.ending)?;
        connection.idle_since = None;
        Some(RunningVerb(self))
    }
}

impl Drop for RunningVerb<'_> {
    fn drop(&mut self) {
        if let Some(connection) = self.0.connections.lock().open.get_mut(&self.0.number) {
            connection.idle_since = Some(Instant::now());
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let removed = self.connections.lock().open.remove(&self.number);
        drop(removed);
        self.connections.changed.notify_all();
    }
}
