//! A queue that holds requests while a condition lasts, so that no thread has to wait.
//!
//! # Protocol
//! * The owner calls `shut` before any request can see the reason to wait, and `open` when none can see it
//!   any more.
//! * A request that saw the reason and then finds the queue open retries: the reason is gone. So no request
//!   stays behind.

use crate::sync::Mutex;

/// Requests held while the queue is shut. Lock order: innermost.
pub struct Held<R>(Mutex<HeldState<R>>);

struct HeldState<R> {
    shut: bool,
    requests: Vec<R>,
}

impl<R> Default for Held<R> {
    fn default() -> Self {
        Self(Mutex::new(HeldState { shut: false, requests: Vec::new() }))
    }
}

impl<R> Held<R> {
    /// Starts to hold requests.
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

    /// Stops holding requests, and returns the held ones for the caller to continue.
    #[must_use]
    pub fn open(&self) -> Vec<R> {
        let mut state = self.0.lock();
        state.shut = false;
        std::mem::take(&mut state.requests)
    }
}
