//! A FIFO queue of requests that wait until they have paid.
//!
//! # Protocol
//! * A queue is active while it has rates, or while requests wait in it or are being dispatched. Requests
//!   pass an inactive queue without a lock. The queue becomes inactive under the lock, and only after the
//!   last waiting request has continued. So no later request overtakes.
//! * At an active queue a request takes the lock and pays. If another request waits or is being dispatched,
//!   it queues behind.
//! * One thread at a time dispatches. The dispatcher removes the first request under the lock and continues
//!   it without the lock; until then new requests queue. A thread that finds another one dispatching returns:
//!   the other one checks the queue again before it stops, under the lock under which it clears
//!   `is_dispatching`.

use std::collections::VecDeque;
use std::time::Duration;

use crate::sync::{Arc, AtomicU32, Mutex, MutexGuard, Ordering};

/// The cost of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cost {
    /// Number of operations.
    pub operations: u64,
    /// Bytes of data.
    pub bytes: u64,
}

/// A request that a limit may delay.
pub trait Waits: Send + 'static {
    /// The request must wait. Called under a lock, so this must be cheap.
    fn waits(&mut self);
    /// Continues the request.
    fn go(self);
    /// Rejects the request: its turn never comes.
    fn gone(self);
}

/// The rate at which costs are paid.
pub trait Pace: Send {
    /// Pays as much of `owed` as possible now. If a part remains, returns the time until more can be paid.
    fn pay(&mut self, owed: &mut Cost) -> Result<(), Duration>;
}

/// A paced FIFO queue. Lock order: `state` is innermost; requests continue without it.
pub struct PacedQueue<R, P> {
    /// 1 while active, that is, requests must take the lock. Written under `state`.
    active: AtomicU32,
    /// Number of active queues among those that share this counter.
    active_count: Arc<AtomicU32>,
    state: Mutex<State<R, P>>,
}

struct State<R, P> {
    /// `None`: requests pay nothing.
    pace: Option<P>,
    waiting: VecDeque<(R, Cost)>,
    is_dispatching: bool,
    /// Number of suspensions. Unless zero, requests pay nothing.
    suspend_count: usize,
    /// Number of shutdowns. Unless zero, requests that would have to pay are rejected.
    shut_count: usize,
}

/// Outcome of [`PacedQueue::enter`].
#[must_use]
pub enum Entered<R> {
    /// The request continues now.
    Admitted(R),
    /// The queue is shut; the caller must reject the request.
    Rejected(R),
    /// The request waits as the first one. The caller must arrange a dispatch after this time.
    First(Duration),
    /// The request waits behind others.
    Queued,
}

/// Work left by [`PacedQueue::dispatch`].
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// No request waits, or another thread dispatches.
    Idle,
    /// Dispatch again after this time.
    After(Duration),
    /// Dispatch again now; other queues may have a turn before.
    More,
}

/// Clears `is_dispatching` on drop, also after a panic.
struct DispatchGuard<'a, R: Waits, P: Pace>(&'a PacedQueue<R, P>);

impl<R: Waits, P: Pace> Drop for DispatchGuard<'_, R, P> {
    fn drop(&mut self) {
        self.0.lock().is_dispatching = false;
    }
}

impl<R: Waits, P: Pace> PacedQueue<R, P> {
    /// Creates an inactive queue without rates. `any` counts active queues.
    pub fn new(active_count: Arc<AtomicU32>) -> Self {
        let state = State {
            pace: None,
            waiting: VecDeque::new(),
            is_dispatching: false,
            suspend_count: 0,
            shut_count: 0,
        };
        Self { active: AtomicU32::new(0), active_count, state: Mutex::new(state) }
    }

    /// Returns true if a request must call [`enter`](Self::enter).
    #[inline]
    pub fn is_on(&self) -> bool {
        // Acquire: pairs with the Release in `update_active`: a request that finds the queue inactive comes
        // after all that waited.
        self.active.load(Ordering::Acquire) != 0
    }

    fn lock(&self) -> MutexGuard<'_, State<R, P>> {
        self.state.lock()
    }

    /// Lets a new request pay, or queues it.
    pub fn enter(&self, mut request: R, mut owed: Cost) -> Entered<R> {
        if !self.is_on() {
            return Entered::Admitted(request);
        }
        let mut state = self.lock();
        if state.shut_count > 0 {
            return Entered::Rejected(request);
        }
        let is_first = state.waiting.is_empty() && !state.is_dispatching;
        let wait = if is_first { state.pay(&mut owed) } else { Err(Duration::ZERO) };
        let Err(wait) = wait else { return Entered::Admitted(request) };
        request.waits();
        state.waiting.push_back((request, owed));
        if is_first { Entered::First(wait) } else { Entered::Queued }
    }

    /// Continues up to `most` requests that have paid.
    pub fn dispatch(&self, most: usize) -> Next {
        {
            let mut state = self.lock();
            if state.is_dispatching {
                return Next::Idle;
            }
            state.is_dispatching = true;
        }
        let guard = DispatchGuard(self);
        for _ in 0..most {
            let request = {
                let mut state = self.lock();
                match state.pay_for_first() {
                    Ok(Some(request)) => request,
                    // Under the lock of the check: a request that enters now is the first again.
                    Ok(None) => {
                        state.is_dispatching = false;
                        self.update_active(&state);
                        std::mem::forget(guard);
                        return Next::Idle;
                    }
                    Err(wait) => {
                        state.is_dispatching = false;
                        std::mem::forget(guard);
                        return Next::After(wait);
                    }
                }
            };
            request.go();
        }
        drop(guard);
        Next::More
    }

    /// Replaces the rates, also for waiting requests. `make` gets true if any wait. The caller must arrange a
    /// dispatch afterwards.
    pub fn set(&self, make: impl FnOnce(bool) -> Option<P>) {
        let mut state = self.lock();
        state.pace = make(!state.waiting.is_empty());
        self.update_active(&state);
    }

    /// Suspends payment. The caller must arrange a dispatch afterwards.
    pub fn suspend(&self) {
        self.lock().suspend_count += 1;
    }

    /// Reverts one [`suspend`](Self::suspend).
    pub fn resume(&self) {
        self.lock().suspend_count -= 1;
    }

    /// Rejects waiting requests and new ones until [`reopen`](Self::reopen).
    pub fn shut(&self) {
        let waiting = {
            let mut state = self.lock();
            state.shut_count += 1;
            std::mem::take(&mut state.waiting)
        };
        self.reject_all(waiting);
    }

    /// Reverts one [`shut`](Self::shut).
    pub fn reopen(&self) {
        self.lock().shut_count -= 1;
    }

    /// Rejects the waiting requests that satisfy a predicate.
    pub fn reject_matching(&self, matches: impl Fn(&R) -> bool) {
        let gone = {
            let mut state = self.lock();
            let (gone, stay) =
                std::mem::take(&mut state.waiting).into_iter().partition(|(request, _)| matches(request));
            state.waiting = stay;
            gone
        };
        self.reject_all(gone);
    }

    fn reject_all(&self, gone: VecDeque<(R, Cost)>) {
        for (request, _) in gone {
            request.gone();
        }
        let state = self.lock();
        self.update_active(&state);
    }

    fn update_active(&self, state: &State<R, P>) {
        let is_on = state.pace.is_some() || state.is_dispatching || !state.waiting.is_empty();
        // Relaxed: written under the lock.
        let was_on = self.active.load(Ordering::Relaxed) != 0;
        if is_on == was_on {
            return;
        }
        if is_on {
            // Relaxed: a request that does not see the flag yet came before.
            self.active.store(1, Ordering::Relaxed);
            // Relaxed: as above.
            self.active_count.fetch_add(1, Ordering::Relaxed);
        } else {
            // Release: pairs with the Acquire in `is_on`: all waiting requests have continued.
            self.active.store(0, Ordering::Release);
            // Release: pairs with the Acquire of readers of the common counter, in the same way.
            self.active_count.fetch_sub(1, Ordering::Release);
        }
    }
}

impl<R, P> Drop for PacedQueue<R, P> {
    fn drop(&mut self) {
        // Relaxed: no other thread has a reference.
        if self.active.load(Ordering::Relaxed) != 0 {
            // Release: as in `update_active`.
            self.active_count.fetch_sub(1, Ordering::Release);
        }
    }
}

impl<R, P: Pace> State<R, P> {
    fn pay(&mut self, owed: &mut Cost) -> Result<(), Duration> {
        match &mut self.pace {
            Some(pace) if self.suspend_count == 0 => pace.pay(owed),
            _ => Ok(()),
        }
    }

    /// Lets the first request pay, and removes it if it has paid everything.
    fn pay_for_first(&mut self) -> Result<Option<R>, Duration> {
        let Some(mut owed) = self.waiting.front().map(|(_, owed)| *owed) else { return Ok(None) };
        let paid = self.pay(&mut owed);
        if let Some((_, left)) = self.waiting.front_mut() {
            *left = owed;
        }
        paid.map(|()| self.waiting.pop_front().map(|(request, _)| request))
    }
}
