//! A queue that holds requests while a condition lasts, so that no thread has to wait.
//!
//! # Protocol
//! * The owner calls `shut` before any request can see the reason to wait, and `open` when none can see it
//!   any more.
//! * A request that saw the reason and then finds the queue open retries, because the reason is gone. So no
//!   request stays in the queue forever.

use crate::sync::Mutex;

/// Requests held while the queue is shut. Lock order: innermost.
pub struct HeldRequests<R>(Mutex<HeldState<R>>);

struct HeldState<R> {
    shut: bool,
    requests: Vec<R>,
}

impl<R> Default for HeldRequests<R> {
    fn default() -> Self {
        Self(Mutex::new(HeldState { shut: false, requests: Vec::new() }))
    }
}

impl<R> HeldRequests<R> {
    /// Shuts the queue: later calls of [`hold`](Self::hold) hold their requests.
    pub fn shut(&self) {
        self.0.lock().shut = true;
    }

    /// Holds a request until the queue is opened. Returns the request if the queue is open.
    pub fn hold(&self, request: R) -> Option<R> {
        let mut state = self.0.lock();
        if !state.shut {
            return Some(request);
        }
        state.requests.push(request);
        None
    }

    /// Stops holding requests, and returns the held requests, which the caller must continue.
    #[must_use]
    pub fn open(&self) -> Vec<R> {
        let mut state = self.0.lock();
        state.shut = false;
        std::mem::take(&mut state.requests)
    }
}
