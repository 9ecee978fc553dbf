//! Waiting of one request for several events: exceptions, completions of devices, the end of a
//! merged run.

use std::sync::Arc;

use freestone_core::device::{Error, Result};
use freestone_core::sync::Mutex;
use freestone_core::work_queue::WorkQueue;

/// Request that continues without its submitter.
pub trait Continuation: Send + 'static {
    /// Continues as far as possible without waiting. `so_far` is the first error of the events that
    /// the request waited for.
    fn go(self, so_far: Result<()>);

    /// Returns the queue on which the request continues after its last event.
    fn work_queue(&self) -> &Arc<WorkQueue>;
}

/// One event that a request waits for. Dropping it reports [`Error::Gone`].
pub struct Waiter(Option<Arc<dyn Notify>>);

trait Notify: Send + Sync {
    fn notify(self: Arc<Self>, outcome: Result<()>);
}

/// Counts the outstanding events of a request and holds the request meanwhile. The creator counts
/// as one event until it calls [`arm`](Self::arm).
///
/// Lock order: `state` is taken under a slot, and nothing under it. Held for a few instructions.
pub struct WaitGroup<J> {
    state: Mutex<WaitGroupState<J>>,
}

struct WaitGroupState<J> {
    outstanding: usize,
    job: Option<J>,
    error: Option<Error>,
}

impl<J: Continuation> WaitGroup<J> {
    /// Creates a group with its creator as the only event.
    pub fn new() -> Arc<Self> {
        let state = WaitGroupState { outstanding: 1, job: None, error: None };
        Arc::new(Self { state: Mutex::new(state) })
    }

    pub fn waiter(self: &Arc<Self>) -> Waiter {
        self.state.lock().outstanding += 1;
        Waiter(Some(Arc::clone(self) as Arc<dyn Notify>))
    }

    /// Ends the setup by the creator. Returns the request with the first error if no event is
    /// outstanding. Otherwise the request continues after the last event.
    pub fn arm(&self, job: J) -> Option<(J, Result<()>)> {
        let mut state = self.state.lock();
        state.outstanding -= 1;
        if state.outstanding == 0 {
            return Some((job, state.error.map_or(Ok(()), Err)));
        }
        state.job = Some(job);
        None
    }
}

impl<J: Continuation> Notify for WaitGroup<J> {
    fn notify(self: Arc<Self>, outcome: Result<()>) {
        let mut state = self.state.lock();
        state.error = state.error.or(outcome.err());
        state.outstanding -= 1;
        if state.outstanding == 0
            && let Some(job) = state.job.take()
        {
            let so_far = state.error.map_or(Ok(()), Err);
            drop(state);
            let work_queue = Arc::clone(job.work_queue());
            work_queue.push(move || job.go(so_far));
        }
    }
}

impl Waiter {
    /// Reports the event. Takes a few instructions and calls no device.
    pub fn notify(mut self, outcome: Result<()>) {
        if let Some(group) = self.0.take() {
            group.notify(outcome);
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if let Some(group) = self.0.take() {
            group.notify(Err(Error::Gone));
        }
    }
}
