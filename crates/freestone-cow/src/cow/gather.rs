//! A request that waits for several things at once: exceptions, answers of devices, the end of a
//! run that is merged.

use std::sync::Arc;

use freestone_core::device::{Error, Result};
use freestone_core::sync::Mutex;
use freestone_core::work_queue::WorkQueue;

/// A request that goes on by itself.
pub trait Job: Send + 'static {
    /// Goes on as far as that is possible without waiting. `so_far` is the first error of what it
    /// waited for.
    fn go(self, so_far: Result<()>);

    /// Where it goes on when all that it waits for has arrived.
    fn work_queue(&self) -> &Arc<WorkQueue>;
}

/// One thing that a request waits for. Dropped without an outcome it arrives as [`Error::Gone`].
pub struct Waiter(Option<Arc<dyn Arrive>>);

trait Arrive: Send + Sync {
    fn arrived(self: Arc<Self>, outcome: Result<()>);
}

/// Counts what a request still waits for, and keeps the request meanwhile. Until
/// [`leave`](Self::leave) it also waits for its maker.
///
/// Lock order: `state` is taken under a slot, and nothing under it. Held for a few instructions.
pub struct Gather<J> {
    state: Mutex<GatherState<J>>,
}

struct GatherState<J> {
    left: usize,
    job: Option<J>,
    error: Option<Error>,
}

impl<J: Job> Gather<J> {
    /// Waits for its maker only, so far.
    pub fn new() -> Arc<Self> {
        let state = GatherState { left: 1, job: None, error: None };
        Arc::new(Self { state: Mutex::new(state) })
    }

    /// One thing more to wait for.
    pub fn waiter(self: &Arc<Self>) -> Waiter {
        self.state.lock().left += 1;
        Waiter(Some(Arc::clone(self) as Arc<dyn Arrive>))
    }

    /// The maker has asked for everything. If all of it has arrived, the job comes back with the
    /// first error; else the job goes on by itself when the last of it arrives.
    pub fn leave(&self, job: J) -> Option<(J, Result<()>)> {
        let mut state = self.state.lock();
        state.left -= 1;
        if state.left == 0 {
            return Some((job, state.error.map_or(Ok(()), Err)));
        }
        state.job = Some(job);
        None
    }
}

impl<J: Job> Arrive for Gather<J> {
    fn arrived(self: Arc<Self>, outcome: Result<()>) {
        let mut state = self.state.lock();
        state.error = state.error.or(outcome.err());
        state.left -= 1;
        if state.left == 0
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
    /// It has arrived. Takes a few instructions, and calls no device.
    pub fn arrived(mut self, outcome: Result<()>) {
        if let Some(gather) = self.0.take() {
            gather.arrived(outcome);
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if let Some(gather) = self.0.take() {
            gather.arrived(Err(Error::Gone));
        }
    }
}
