//! Wait groups, by which one request waits for several events: exceptions, completions of devices,
//! the end of a merged run.

use std::sync::Arc;

use freestone_core::device::{Error, Result};
use freestone_core::sync::Mutex;
use freestone_core::work_queue::WorkQueue;

/// Request that continues after waiting, independently of the thread that submitted it.
pub trait Continuation: Send + 'static {
    /// Continues the request as far as possible without waiting. `so_far` is the first error of the
    /// events that the request waited for, if any.
    fn resume(self, so_far: Result<()>);

    /// Returns the queue on which the request continues after its last event.
    fn work_queue(&self) -> &Arc<WorkQueue>;
}

/// Handle for an event that a request waits for. Dropping the handle reports [`Error::Gone`].
pub struct Waiter(Option<Arc<dyn Notify>>);

trait Notify: Send + Sync {
    fn notify(self: Arc<Self>, outcome: Result<()>);
}

/// Counter of the outstanding events of a request, which holds the request until the last event.
/// The creator counts as one event until it calls [`arm`](Self::arm).
///
/// Lock order: `state` is taken under a slot, and no lock is taken under `state`. Held for a few
/// instructions.
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

    /// Ends the creator's own event. If no other event is outstanding, returns the request and the
    /// first error. Otherwise returns `None`, and the request continues after the last event.
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
            work_queue.push(move || job.resume(so_far));
        }
    }
}

impl Waiter {
    /// Reports the event with its outcome. Executes a few instructions and calls no device.
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
