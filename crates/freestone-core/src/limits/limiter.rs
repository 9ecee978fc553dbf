//! A paced queue with its token buckets, driven by the process's timer and one thread for all queues.
//!
//! A queue has at most one pending timer action, the earliest one requested. When the action runs, the thread
//! dispatches requests and sets the timer again.

use std::io;
use std::time::Duration;

use super::paced_queue::{Cost, DispatchResult, EnterResult, PacedQueue, PacedRequest};
use super::rate::{Limits, MonotonicClock, Rates};
use crate::sync::{Arc, AtomicU32, Instant, LazyLock, Mutex};
use crate::timer::{self, Alarm};
use crate::work_queue::WorkQueue;

/// Maximum number of requests that one queue dispatches before other queues have a turn.
const DISPATCH_BATCH: usize = 64;

/// Work queue whose thread dispatches the requests of all limiters. Dispatching a request only submits it and
/// never waits.
static WORK: LazyLock<Arc<WorkQueue>> = LazyLock::new(|| WorkQueue::plugged("limits"));

/// A limit on operations and bytes per second, with a queue of waiting requests.
///
/// Lock order: `limits`, held while rates are replaced, then the locks of the queue.
pub struct Limiter<R> {
    shared: Arc<Shared<R>>,
    limits: Mutex<Limits>,
}

struct Shared<R> {
    queue: PacedQueue<R, Rates>,
    /// The pending timer action. The timer's lock is taken under this lock.
    alarm: Mutex<Option<Alarm>>,
}

/// Guard that suspends the limits. Dropping it restores them.
pub struct SuspendGuard<R: PacedRequest>(Arc<Shared<R>>);

/// Guard that rejects requests which would have to wait. Dropping it lets requests wait again.
pub struct RejectGuard<R: PacedRequest>(Arc<Shared<R>>);

impl<R: PacedRequest> Limiter<R> {
    /// Creates a limiter without limits. `any` counts the active limiters among those that share this
    /// counter.
    pub fn new(any: Arc<AtomicU32>) -> Self {
        let shared = Shared { queue: PacedQueue::new(any), alarm: Mutex::default() };
        Self { shared: Arc::new(shared), limits: Mutex::default() }
    }

    /// Returns true if a new request may have to wait.
    #[inline]
    pub fn is_active(&self) -> bool {
        self.shared.queue.is_active()
    }

    /// Returns the present limits.
    pub fn limits(&self) -> Limits {
        *self.limits.lock()
    }

    /// Replaces the limits, also for waiting requests. If none wait, the new limits start with a full burst.
    ///
    /// # Errors
    /// The error from starting a thread. The limits are then unchanged.
    pub fn set(&self, limits: &Limits) -> io::Result<()> {
        let mut current = self.limits.lock();
        if *current == *limits {
            return Ok(());
        }
        if *limits != Limits::default() {
            timer::start()?;
            WORK.start()?;
        }
        *current = *limits;
        let clock = MonotonicClock::now();
        self.shared.queue.set(|has_waiting| Rates::new(limits, &clock, has_waiting));
        drop(current);
        schedule_dispatch(Arc::clone(&self.shared));
        Ok(())
    }

    /// Returns the request if it may continue now. Otherwise queues or rejects the request and returns
    /// `None`.
    #[must_use]
    pub fn enter(&self, request: R, cost: Cost) -> Option<R> {
        match self.shared.queue.enter(request, cost) {
            EnterResult::Admitted(request) => return Some(request),
            EnterResult::Rejected(request) => request.reject(),
            EnterResult::First(wait) => dispatch_after(&self.shared, wait),
            EnterResult::Queued => {}
        }
        None
    }

    /// Suspends the limits until the guard is dropped. Waiting requests continue.
    #[must_use]
    pub fn suspend(&self) -> SuspendGuard<R> {
        self.shared.queue.suspend();
        schedule_dispatch(Arc::clone(&self.shared));
        SuspendGuard(Arc::clone(&self.shared))
    }

    /// Rejects waiting requests, and new requests at an active limiter, until the guard is dropped.
    #[must_use]
    pub fn reject_waiting(&self) -> RejectGuard<R> {
        self.shared.queue.shut();
        RejectGuard(Arc::clone(&self.shared))
    }

    /// Rejects the waiting requests that satisfy a predicate.
    pub fn reject_matching(&self, matches: impl Fn(&R) -> bool) {
        self.shared.queue.reject_matching(matches);
    }
}

impl<R: PacedRequest> Drop for SuspendGuard<R> {
    fn drop(&mut self) {
        self.0.queue.resume();
    }
}

impl<R: PacedRequest> Drop for RejectGuard<R> {
    fn drop(&mut self) {
        self.0.queue.reopen();
    }
}

impl<R> Drop for Shared<R> {
    fn drop(&mut self) {
        cancel_alarm(self.alarm.lock().take());
    }
}

fn cancel_alarm(alarm: Option<Alarm>) {
    if let Some(alarm) = alarm {
        timer::cancel(alarm);
    }
}

fn schedule_dispatch<R: PacedRequest>(shared: Arc<Shared<R>>) {
    // An inactive limiter has no waiting requests, and the thread may not exist.
    if shared.queue.is_active() {
        WORK.push(move || dispatch(&shared));
    }
}

fn dispatch<R: PacedRequest>(shared: &Arc<Shared<R>>) {
    match shared.queue.dispatch(DISPATCH_BATCH) {
        DispatchResult::Idle => {}
        DispatchResult::More => schedule_dispatch(Arc::clone(shared)),
        DispatchResult::After(wait) => dispatch_after(shared, wait),
    }
}

fn dispatch_after<R: PacedRequest>(shared: &Arc<Shared<R>>, wait: Duration) {
    let mut alarm = shared.alarm.lock();
    // `wait` is at most the time in which a whole burst refills, which cannot overflow a clock.
    let when = Instant::now().checked_add(wait);
    if alarm.as_ref().is_some_and(|alarm| when.is_none_or(|when| alarm.due() <= when)) {
        return;
    }
    // The weak reference does not keep a dropped queue alive; its owner has rejected the waiting requests.
    let weak = Arc::downgrade(shared);
    let action = move || {
        if let Some(shared) = weak.upgrade() {
            // Cancels an action that was set meanwhile, because the thread dispatches now.
            cancel_alarm(shared.alarm.lock().take());
            schedule_dispatch(shared);
        }
    };
    let new = when.and_then(|when| timer::schedule(when, action).ok());
    let is_set = new.is_some();
    let old = std::mem::replace(&mut *alarm, new);
    drop(alarm);
    cancel_alarm(old);
    // Scheduling fails only without a timer thread, which was started when the first limit was set.
    if !is_set {
        schedule_dispatch(Arc::clone(shared));
    }
}

#[cfg(all(test, not(freestone_sim)))]
mod tests {
    use std::sync::mpsc;

    use super::*;

    struct TestRequest;

    impl PacedRequest for TestRequest {
        fn note_wait(&mut self) {}
        fn resume(self) {}
        fn reject(self) {}
    }

    #[test]
    fn changed_limits_keep_one_timer() {
        let limiter = Limiter::new(Arc::default());
        // With these limits a request waits for about an hour, so the timer action stays pending.
        let limits = |iops_burst| Limits { iops: 1, iops_burst, ..Limits::default() };
        let cost = Cost { operations: 3600, bytes: 0 };
        limiter.set(&limits(100)).unwrap();
        assert!((0..3).all(|_| limiter.enter(TestRequest, cost).is_none()));
        for round in 0..500 {
            limiter.set(&limits(101 + round)).unwrap();
        }
        let (tx, rx) = mpsc::channel();
        WORK.push(move || tx.send(()).unwrap());
        rx.recv().unwrap();
        // Each pending action holds a weak reference.
        let pending = Arc::weak_count(&limiter.shared);
        assert!(pending <= 1, "{pending} actions are pending");
        let weak = Arc::downgrade(&limiter.shared);
        drop(limiter);
        assert_eq!(weak.weak_count(), 0, "the action was dropped with its queue");
    }
}
