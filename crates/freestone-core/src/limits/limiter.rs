//! A paced queue with its rates, driven by the process's timer and one thread for all queues.
//!
//! A queue has at most one pending timer action, the earliest one requested. When the action runs, the thread
//! dispatches requests and sets the timer again.

use std::io;
use std::time::Duration;

use super::paced_queue::{Cost, Entered, Next, PacedQueue, Waits};
use super::rate::{Limits, Rates, Since};
use crate::sync::{Arc, AtomicU32, Instant, LazyLock, Mutex};
use crate::timer::{self, Alarm};
use crate::work_queue::WorkQueue;

/// Requests that one queue dispatches before other queues have a turn.
const DISPATCH_BATCH: usize = 64;

/// The thread that dispatches requests of all queues. Continuing a request only submits it and never waits.
static WORK: LazyLock<Arc<WorkQueue>> = LazyLock::new(|| WorkQueue::plugged("limits"));

/// A limit on operations and bytes per second.
///
/// Lock order: `limits`, held while rates are replaced, then the locks of the queue.
pub struct Limiter<R> {
    shared: Arc<Shared<R>>,
    limits: Mutex<Limits>,
}

struct Shared<R> {
    queue: PacedQueue<R, Rates>,
    /// The pending timer action. The timer's lock is taken under this one.
    alarm: Mutex<Option<Alarm>>,
}

/// Guard that suspends the limits. Dropping it restores them.
pub struct Lifted<R: Waits>(Arc<Shared<R>>);

/// Guard that rejects requests which would have to wait. Dropping it ends that.
pub struct Ended<R: Waits>(Arc<Shared<R>>);

impl<R: Waits> Limiter<R> {
    /// Creates a limiter without limits. `any` counts the active limiters that share it.
    pub fn new(any: Arc<AtomicU32>) -> Self {
        let shared = Shared { queue: PacedQueue::new(any), alarm: Mutex::default() };
        Self { shared: Arc::new(shared), limits: Mutex::default() }
    }

    /// Returns true if a new request may have to wait.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.shared.queue.is_on()
    }

    /// Returns the present limits.
    pub fn limits(&self) -> Limits {
        *self.limits.lock()
    }

    /// Replaces the limits, also for waiting requests. If none wait, the new limits start with a full burst.
    ///
    /// # Errors
    /// The error from starting a thread. Nothing has changed.
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
        let clock = Since::now();
        self.shared.queue.set(|has_waiting| Rates::new(limits, &clock, has_waiting));
        drop(current);
        schedule_dispatch(Arc::clone(&self.shared));
        Ok(())
    }

    /// Admits a request: returns it if it may continue now. Otherwise keeps it until its turn.
    #[must_use]
    pub fn enter(&self, request: R, cost: Cost) -> Option<R> {
        match self.shared.queue.enter(request, cost) {
            Entered::Admitted(request) => return Some(request),
            Entered::Rejected(request) => request.gone(),
            Entered::First(wait) => dispatch_after(&self.shared, wait),
            Entered::Queued => {}
        }
        None
    }

    /// Suspends the limits until the guard is dropped. Waiting requests continue.
    #[must_use]
    pub fn lift(&self) -> Lifted<R> {
        self.shared.queue.suspend();
        schedule_dispatch(Arc::clone(&self.shared));
        Lifted(Arc::clone(&self.shared))
    }

    /// Rejects waiting requests, and new ones that would have to pay, until the guard is dropped.
    #[must_use]
    pub fn end(&self) -> Ended<R> {
        self.shared.queue.shut();
        Ended(Arc::clone(&self.shared))
    }

    /// Rejects the waiting requests that satisfy a predicate.
    pub fn end_those(&self, matches: impl Fn(&R) -> bool) {
        self.shared.queue.reject_matching(matches);
    }
}

impl<R: Waits> Drop for Lifted<R> {
    fn drop(&mut self) {
        self.0.queue.resume();
    }
}

impl<R: Waits> Drop for Ended<R> {
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

fn schedule_dispatch<R: Waits>(shared: Arc<Shared<R>>) {
    // A limiter that never had a limit has no waiting requests, and the thread may not exist.
    if shared.queue.is_on() {
        WORK.push(move || dispatch(&shared));
    }
}

fn dispatch<R: Waits>(shared: &Arc<Shared<R>>) {
    match shared.queue.dispatch(DISPATCH_BATCH) {
        Next::Idle => {}
        Next::More => schedule_dispatch(Arc::clone(shared)),
        Next::After(wait) => dispatch_after(shared, wait),
    }
}

fn dispatch_after<R: Waits>(shared: &Arc<Shared<R>>, wait: Duration) {
    let mut alarm = shared.alarm.lock();
    // A wait is at most the time of a whole burst, which cannot overflow a clock.
    let when = Instant::now().checked_add(wait);
    if alarm.as_ref().is_some_and(|alarm| when.is_none_or(|when| alarm.when() <= when)) {
        return;
    }
    // The weak reference does not keep a dropped queue alive; its owner has rejected the waiting requests.
    let weak = Arc::downgrade(shared);
    let action = move || {
        if let Some(shared) = weak.upgrade() {
            // An action set meanwhile is obsolete, too: the thread checks now.
            cancel_alarm(shared.alarm.lock().take());
            schedule_dispatch(shared);
        }
    };
    let new = when.and_then(|when| timer::at(when, action).ok());
    let is_set = new.is_some();
    let old = std::mem::replace(&mut *alarm, new);
    drop(alarm);
    cancel_alarm(old);
    // Scheduling fails only without a timer thread, which runs since the first limit was set.
    if !is_set {
        schedule_dispatch(Arc::clone(shared));
    }
}

#[cfg(all(test, not(freestone_sim)))]
mod tests {
    use std::sync::mpsc;

    use super::*;

    struct TestRequest;

    impl Waits for TestRequest {
        fn waits(&mut self) {}
        fn go(self) {}
        fn gone(self) {}
    }

    #[test]
    fn changed_limits_keep_one_timer() {
        let limiter = Limiter::new(Arc::default());
        // A burst takes minutes.
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
