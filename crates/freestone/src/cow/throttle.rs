//! How many copies of a snapshot are in flight at once.
//!
//! A request takes a permit before it takes a slot or a place on the COW device. Where there is none it queues, holding
//! nothing, and goes on with the permit of a copy that ended. So permits never wait for each other: whoever holds one either
//! runs a copy, which ends by itself, or is on its way to begin one, and gives it back if it need not. (The kernel's counter did
//! deadlock when it was a semaphore that was waited for with a lock held.)
//!
//! Lock order: `state` is taken under a slot, and under it the runner's queue.

use std::collections::VecDeque;
use std::sync::Arc;

use super::runner::Runner;
use crate::sync::Mutex;

/// Copies in flight a snapshot unless told otherwise: the kernel's `snapshot_cow_threshold`.
pub const COPIES_MAX_DEFAULT: usize = 2048;

/// See the module.
pub struct Throttle {
    runner: Arc<Runner>,
    state: Mutex<State>,
}

struct State {
    most: usize,
    running: usize,
    queue: VecDeque<Box<dyn FnOnce(Permit) + Send>>,
}

/// The right to have one copy in flight.
pub struct Permit(Arc<Throttle>);

impl Throttle {
    /// Nothing in flight.
    pub fn new(runner: &Arc<Runner>, most: usize) -> Arc<Self> {
        let state = State { most, running: 0, queue: VecDeque::new() };
        Arc::new(Self { runner: Arc::clone(runner), state: Mutex::new(state) })
    }

    /// At most `most` copies, at least 1, from now on; those in flight stay.
    pub fn set_most(self: &Arc<Self>, most: usize) {
        let mut state = self.state.lock();
        state.most = most.max(1);
        while state.running < state.most
            && let Some(next) = state.queue.pop_front()
        {
            state.running += 1;
            self.hand_over(next);
        }
    }

    /// A permit, if one is free.
    pub fn permit(self: &Arc<Self>) -> Option<Permit> {
        let mut state = self.state.lock();
        let free = state.running < state.most;
        state.running += usize::from(free);
        free.then(|| Permit(Arc::clone(self)))
    }

    /// Runs `next` with a permit when there is one, on the runner.
    pub fn queue(self: &Arc<Self>, next: impl FnOnce(Permit) + Send + 'static) {
        let mut state = self.state.lock();
        if state.running < state.most {
            state.running += 1;
            self.hand_over(Box::new(next));
        } else {
            state.queue.push_back(Box::new(next));
        }
    }

    /// Whether this permit is of this throttle.
    pub fn gave(self: &Arc<Self>, permit: &Permit) -> bool {
        Arc::ptr_eq(self, &permit.0)
    }

    fn hand_over(self: &Arc<Self>, next: Box<dyn FnOnce(Permit) + Send>) {
        let permit = Permit(Arc::clone(self));
        self.runner.push(move || next(permit));
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        let next = if state.running <= state.most { state.queue.pop_front() } else { None };
        match next {
            Some(next) => self.0.hand_over(next),
            None => state.running -= 1,
        }
    }
}
