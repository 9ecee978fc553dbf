//! The loop that accepts connections, and the set of open connections with an upper limit. The servers of the
//! control socket and of HTTP own one set per listening socket.
//!
//! A control client beyond the limit is not refused: it waits until a connection ends. While a client waits,
//! the connection that has been idle longest is closed. A connection is idle while no verb runs for it, also
//! if the client does not read a response. The lock of a set is held only for short accesses.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use freestone_core::sync::{Condvar, Mutex};
use rustix::net::{Shutdown, shutdown};

/// Shortest idle time after which a connection may be closed, because a client that has just connected is
/// about to send a request.
const IDLE_MIN: Duration = Duration::from_secs(1);
/// Interval at which a waiting client looks for idle connections to close.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Pause after a failure to accept a connection or to start its thread (no descriptors or threads left), so
/// that the loop does not spin.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The stream of a connection.
pub type Stream = Arc<dyn AsFd + Send + Sync>;

/// The set of open connections of a listening socket.
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
    stream: Stream,
    /// Start of the idle time; `None` while a verb runs.
    idle_since: Option<Instant>,
    /// True if the connection is being closed.
    ending: bool,
}

/// Guard of the slot that a connection uses in the set. Dropping it frees the slot.
pub struct Slot {
    pub connections: Arc<Connections>,
    number: u64,
}

/// Guard of a running verb. Until it is dropped, the connection does not count as idle.
pub struct RunningVerb<'a>(&'a Slot);

impl Connections {
    /// Returns an empty set with room for `limit` connections.
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, state: Mutex::default(), changed: Condvar::new() })
    }

    /// Returns true after [`close`](Self::close).
    pub fn is_closing(&self) -> bool {
        self.state.lock().closing
    }

    /// Accepts connections with `accept`, and passes them to `start`, until the set is closed. Calls `failed`
    /// after an error that may last, and pauses.
    pub fn accept_all<S>(
        &self,
        accept: impl Fn() -> io::Result<S>,
        start: impl Fn(S),
        failed: impl Fn(io::Error),
    ) {
        loop {
            match accept() {
                _ if self.is_closing() => return,
                Ok(stream) => start(stream),
                // The client disconnected before it was accepted.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    failed(error);
                    thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    /// Returns a slot for a new connection. If the set is full, waits for a free slot if `wait` is set. Returns
    /// `None` if the set is still full, or closed.
    pub fn add(self: &Arc<Self>, stream: Stream, wait: bool) -> Option<Slot> {
        let mut state = self.state.lock();
        while wait && !state.closing && state.open.len() >= self.limit {
            state.close_most_idle();
            state = self.changed.wait_timeout(state, POLL_INTERVAL).0;
        }
        if state.closing || state.open.len() >= self.limit {
            return None;
        }
        let number = state.next;
        state.next += 1;
        state.open.insert(number, Connection { stream, idle_since: Some(Instant::now()), ending: false });
        Some(Slot { connections: Arc::clone(self), number })
    }

    /// Closes the connection that has been idle longest, if for at least [`IDLE_MIN`]. Called if threads or
    /// descriptors are short.
    pub fn close_idle(&self) {
        self.state.lock().close_most_idle();
    }

    /// Stops accepting connections at `listener`, and reading requests. Running verbs finish and send their
    /// responses.
    pub fn close(&self, listener: impl AsFd) {
        self.close_for_successor();
        // Wakes the thread that waits in accept(), which then fails.
        let _ = shutdown(listener, Shutdown::Both);
    }

    /// Closes the set like [`close`](Self::close), but leaves the listener open. Its thread stops when it has accepted
    /// one more connection.
    pub fn close_for_successor(&self) {
        let mut state = self.state.lock();
        state.closing = true;
        for connection in state.open.values() {
            let _ = shutdown(&connection.stream, Shutdown::Read);
        }
        self.changed.notify_all();
    }

    /// Waits until no connection is open, for at most `grace`.
    pub fn wait_empty(&self, grace: Duration) {
        drop(self.changed.wait_timeout_while(self.state.lock(), grace, |state| !state.open.is_empty()));
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
            let _ = shutdown(&longest.stream, Shutdown::Both);
        }
    }
}

impl Slot {
    /// Marks the connection as busy with a verb. Returns `None` if the connection is being closed:
    /// the verb must not run.
    pub fn begin_verb(&self) -> Option<RunningVerb<'_>> {
        let mut state = self.connections.state.lock();
        let connection = state.open.get_mut(&self.number).filter(|connection| !connection.ending)?;
        connection.idle_since = None;
        Some(RunningVerb(self))
    }
}

impl Drop for RunningVerb<'_> {
    fn drop(&mut self) {
        if let Some(connection) = self.0.connections.state.lock().open.get_mut(&self.0.number) {
            connection.idle_since = Some(Instant::now());
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let removed = self.connections.state.lock().open.remove(&self.number);
        drop(removed);
        self.connections.changed.notify_all();
    }
}
