//! A line with its rates, and who carries it on: one timer for the whole process, and one thread.
//!
//! A line has at most one action pending at the timer, the earliest that it was asked for: when that
//! runs, the thread looks, and asks for the next one.

use std::io;
use std::time::Duration;

use super::line::{Cost, Entered, Line, Next, Waits};
use super::rate::{Limits, Rates, Since};
use crate::sync::{Arc, AtomicU32, Instant, LazyLock, Mutex};
use crate::timer::{self, Alarm};
use crate::work_queue::WorkQueue;

/// Requests that one line carries on before others have a turn.
const TURN: usize = 64;

/// The thread that carries on, for all lines. What waits submits requests, and waits for nothing.
static WORK: LazyLock<Arc<WorkQueue>> = LazyLock::new(|| WorkQueue::plugged("limits"));

/// Lets through so many a second.
///
/// Lock order: `limits`, held while rates are exchanged, before the line's.
pub struct Limiter<J> {
    shared: Arc<Shared<J>>,
    limits: Mutex<Limits>,
}

struct Shared<J> {
    line: Line<J, Rates>,
    /// The action that is pending at the timer. Held while that is changed; the timer's lock is taken
    /// under it.
    alarm: Mutex<Option<Alarm>>,
}

/// Nobody waits until this is dropped.
pub struct Lifted<J: Waits>(Arc<Shared<J>>);

/// Who would have to wait is gone until this is dropped.
pub struct Ended<J: Waits>(Arc<Shared<J>>);

impl<J: Waits> Limiter<J> {
    /// Without limits. `any` counts those that have one, of all that share it.
    pub fn new(any: Arc<AtomicU32>) -> Self {
        let shared = Shared { line: Line::new(any), alarm: Mutex::default() };
        Self { shared: Arc::new(shared), limits: Mutex::default() }
    }

    /// Whether who comes may have to wait.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.shared.line.is_on()
    }

    /// The limits.
    pub fn limits(&self) -> Limits {
        *self.limits.lock()
    }

    /// Other limits from now on, also for those that wait. Where nobody does they begin with a whole
    /// burst.
    ///
    /// # Errors
    /// The threads could not be started; nothing has changed.
    pub fn set(&self, limits: &Limits) -> io::Result<()> {
        let mut known = self.limits.lock();
        if *known == *limits {
            return Ok(());
        }
        if *limits != Limits::default() {
            timer::start()?;
            WORK.start()?;
        }
        *known = *limits;
        let clock = Since::now();
        self.shared.line.set(|anybody_waits| Rates::new(limits, &clock, anybody_waits));
        drop(known);
        push(Arc::clone(&self.shared));
        Ok(())
    }

    /// Comes, and goes on: now, which is returned, or when its turn has come.
    #[must_use]
    pub fn enter(&self, job: J, cost: Cost) -> Option<J> {
        match self.shared.line.enter(job, cost) {
            Entered::Goes(job) => return Some(job),
            Entered::Gone(job) => job.gone(),
            Entered::First(wait) => look_again(&self.shared, wait),
            Entered::Waits => {}
        }
        None
    }

    /// Nobody waits until what is returned is dropped; those that do go on.
    #[must_use]
    pub fn lift(&self) -> Lifted<J> {
        self.shared.line.lift();
        push(Arc::clone(&self.shared));
        Lifted(Arc::clone(&self.shared))
    }

    /// Those that wait are gone, and those that come and would have to pay, until what is returned is
    /// dropped.
    #[must_use]
    pub fn end(&self) -> Ended<J> {
        self.shared.line.end();
        Ended(Arc::clone(&self.shared))
    }

    /// Those of the waiting are gone that are so.
    pub fn end_those(&self, are_so: impl Fn(&J) -> bool) {
        self.shared.line.end_those(are_so);
    }
}

impl<J: Waits> Drop for Lifted<J> {
    fn drop(&mut self) {
        self.0.line.lay();
    }
}

impl<J: Waits> Drop for Ended<J> {
    fn drop(&mut self) {
        self.0.line.begin();
    }
}

impl<J> Drop for Shared<J> {
    fn drop(&mut self) {
        cancel(self.alarm.lock().take());
    }
}

fn cancel(alarm: Option<Alarm>) {
    if let Some(alarm) = alarm {
        timer::cancel(alarm);
    }
}

/// The thread carries on.
fn push<J: Waits>(shared: Arc<Shared<J>>) {
    // Where nothing ever had a limit there is no thread, and nobody who waits.
    if shared.line.is_on() {
        WORK.push(move || carry_on(&shared));
    }
}

fn carry_on<J: Waits>(shared: &Arc<Shared<J>>) {
    match shared.line.carry_on(TURN) {
        Next::Nothing => {}
        Next::Again => push(Arc::clone(shared)),
        Next::After(wait) => look_again(shared, wait),
    }
}

fn look_again<J: Waits>(shared: &Arc<Shared<J>>, wait: Duration) {
    let mut alarm = shared.alarm.lock();
    // A rate says at most how long a whole burst takes, which no clock overflows.
    let when = Instant::now().checked_add(wait);
    if alarm.as_ref().is_some_and(|alarm| when.is_none_or(|when| alarm.when() <= when)) {
        return;
    }
    // A line that nobody has any more has told those that waited.
    let weak = Arc::downgrade(shared);
    let action = move || {
        if let Some(shared) = weak.upgrade() {
            // One that was set meanwhile may go, too: the thread looks now.
            cancel(shared.alarm.lock().take());
            push(shared);
        }
    };
    let set = when.and_then(|when| timer::at(when, action).ok());
    let is_set = set.is_some();
    let before = std::mem::replace(&mut *alarm, set);
    drop(alarm);
    cancel(before);
    // The timer runs since there are limits.
    if !is_set {
        push(Arc::clone(shared));
    }
}

#[cfg(all(test, not(freestone_sim)))]
mod tests {
    use std::sync::mpsc;

    use super::*;

    struct Job;

    impl Waits for Job {
        fn waits(&mut self) {}
        fn go(self) {}
        fn gone(self) {}
    }

    #[test]
    fn changed_limits_keep_one_timer() {
        let limiter = Limiter::new(Arc::default());
        // Each burst takes minutes.
        let limits = |iops_burst| Limits { iops: 1, iops_burst, ..Limits::default() };
        let cost = Cost { operations: 3600, bytes: 0 };
        limiter.set(&limits(100)).unwrap();
        assert!((0..3).all(|_| limiter.enter(Job, cost).is_none()));
        for round in 0..500 {
            limiter.set(&limits(101 + round)).unwrap();
        }
        let (tell, told) = mpsc::channel();
        WORK.push(move || tell.send(()).unwrap());
        told.recv().unwrap();
        // Each pending action has a reference.
        let pending = Arc::weak_count(&limiter.shared);
        assert!(pending <= 1, "{pending} actions are pending");
        let weak = Arc::downgrade(&limiter.shared);
        drop(limiter);
        assert_eq!(weak.weak_count(), 0, "the action went with its line");
    }
}
