//! What is held up while something is shut, instead of a thread that waits.
//!
//! # Protocol
//! * Who shuts does so before anybody can see a reason to be held, and opens after nobody can any
//!   more.
//! * Who saw the reason and finds it open sees that the reason is gone, and goes on. So nothing
//!   stays behind.

use crate::sync::Mutex;

/// Requests that are held while something is shut. Lock order: innermost.
pub struct Held<J>(Mutex<HeldState<J>>);

struct HeldState<J> {
    shut: bool,
    jobs: Vec<J>,
}

/// Open.
impl<J> Default for Held<J> {
    fn default() -> Self {
        Self(Mutex::new(HeldState { shut: false, jobs: Vec::new() }))
    }
}

impl<J> Held<J> {
    /// From now on jobs are held.
    pub fn shut(&self) {
        self.0.lock().shut = true;
    }

    /// Holds a job until it is opened. Returned: it is open.
    pub fn hold(&self, job: J) -> Option<J> {
        let mut state = self.0.lock();
        if !state.shut {
            return Some(job);
        }
        state.jobs.push(job);
        None
    }

    /// Nothing is held from now on. Returns what was, for the caller to carry on.
    #[must_use]
    pub fn open(&self) -> Vec<J> {
        let mut state = self.0.lock();
        state.shut = false;
        std::mem::take(&mut state.jobs)
    }
}
