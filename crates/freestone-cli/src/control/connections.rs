//! The connections of the control socket. Their number is bounded, and nobody is refused: who comes
//! waits for a place. Who is silent, or does not read what it is told, holds no place that another
//! needs: the one that has been so for longest ends.

use std::collections::HashMap;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a client was silent, at least, before its place goes to another. One that has just
/// connected is about to ask.
const SILENT_MIN: Duration = Duration::from_secs(1);
/// How often who waits for a place looks again, where nothing told it to.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The open connections. One lock, held for a look or a change.
pub struct Connections {
    places: usize,
    state: Mutex<ConnectionsState>,
    /// A connection has ended, or all are to end.
    changed: Condvar,
}

#[derive(Default)]
struct ConnectionsState {
    closing: bool,
    /// By number.
    open: HashMap<u64, Open>,
    next: u64,
}

struct Open {
    stream: Arc<UnixStream>,
    /// Since when nothing is done for it; `None` while a verb runs.
    silent: Option<Instant>,
    /// It ends.
    ending: bool,
}

/// A place among the connections, given back when dropped.
pub struct Place {
    connections: Arc<Connections>,
    number: u64,
}

/// A verb runs for a connection until this is dropped.
pub struct Running<'a>(&'a Place);

impl Connections {
    /// Room for so many.
    pub fn new(places: usize) -> Arc<Self> {
        Arc::new(Self { places, state: Mutex::default(), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionsState> {
        // Nothing in here can be half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether all are to end.
    pub fn is_closing(&self) -> bool {
        self.lock().closing
    }

    /// A place for a client that has connected, as soon as there is one; `None` where all are to
    /// end.
    pub fn add(self: &Arc<Self>, stream: &Arc<UnixStream>) -> Option<Place> {
        let mut state = self.lock();
        while !state.closing && state.open.len() >= self.places {
            state.end_most_silent();
            state = self.changed.wait_timeout(state, LOOK_EVERY).unwrap_or_else(PoisonError::into_inner).0;
        }
        if state.closing {
            return None;
        }
        let number = state.next;
        state.next += 1;
        let open = Open { stream: Arc::clone(stream), silent: Some(Instant::now()), ending: false };
        state.open.insert(number, open);
        Some(Place { connections: Arc::clone(self), number })
    }

    /// Ends the connection that has been silent for longest, if any has been for a while: something
    /// else than places is short.
    pub fn make_room(&self) {
        self.lock().end_most_silent();
    }

    /// No new connections, no new requests; what runs is finished and answered.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closing = true;
        for open in state.open.values() {
            let _ = open.stream.shutdown(Shutdown::Read);
        }
        self.changed.notify_all();
    }

    /// Waits until there is none, or so long.
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
    /// One at a time: while one ends, nobody else has to.
    fn end_most_silent(&mut self) {
        if self.open.values().any(|open| open.ending) {
            return;
        }
        let silent = self.open.values_mut().filter(|open| open.silent.is_some());
        let Some(longest) = silent.min_by_key(|open| open.silent) else { return };
        if longest.silent.is_some_and(|since| since.elapsed() >= SILENT_MIN) {
            longest.ending = true;
            // Its thread reads or writes there, and is told at once.
            let _ = longest.stream.shutdown(Shutdown::Both);
        }
    }
}

impl Place {
    /// A verb is about to run; `None` where the connection ends, and nothing is to be done for it
    /// any more.
    pub fn run(&self) -> Option<Running<'_>> {
        let mut state = self.connections.lock();
        let open = state.open.get_mut(&self.number).filter(|open| !open.ending)?;
        open.silent = None;
        Some(Running(self))
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if let Some(open) = self.0.connections.lock().open.get_mut(&self.0.number) {
            open.silent = Some(Instant::now());
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let gone = self.connections.lock().open.remove(&self.number);
        drop(gone);
        self.connections.changed.notify_all();
    }
}
