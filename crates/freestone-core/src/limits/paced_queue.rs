//! A FIFO queue of requests that wait until they have paid their cost to the rate limits.
//!
//! # Protocol
//! * A queue is active while it has rates, or while requests wait in it or are being dispatched. Requests
//!   pass an inactive queue without a lock. The queue becomes inactive under the lock, and only after the
//!   last waiting request has continued. So no later request overtakes a waiting one.
//! * At an active queue a request takes the lock and pays. The new request is queued if another request waits
//!   or is being dispatched.
//! * One thread at a time dispatches. The dispatcher removes the first request under the lock and continues
//!   it without the lock; until then new requests are queued. A thread that finds another thread dispatching
//!   returns. The dispatching thread checks the queue again before it stops, under the lock under which it
//!   clears `is_dispatching`.

use std::collections::VecDeque;
use std::time::Duration;

use crate::sync::{Arc, AtomicU32, Mutex, Ordering};

/// The cost that a request pays to the rate limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cost {
    /// Number of operations, usually 1.
    pub operations: u64,
    /// Number of bytes of data.
    pub bytes: u64,
}

/// A request that a rate limit may delay.
pub trait PacedRequest: Send + 'static {
    /// Records that the request must wait. Called under the queue's lock, so this must be cheap.
    fn note_wait(&mut self);
    /// Continues the request.
    fn resume(self);
    /// Fails the request instead of continuing it.
    fn reject(self);
}

/// The rate at which requests can pay their costs.
pub trait Pace: Send {
    /// Pays as much of `owed` as possible now. If a part remains, returns the time until more can be paid.
    fn pay(&mut self, owed: &mut Cost) -> Result<(), Duration>;
}

/// A FIFO queue of requests that pay at a limited rate. Lock order: `state` is innermost; requests continue
/// without this lock.
pub struct PacedQueue<R, P> {
    /// 1 while the queue is active, that is, while requests must take the lock. Written under `state`.
    active: AtomicU32,
    /// Number of active queues among those that share this counter.
    active_count: Arc<AtomicU32>,
    state: Mutex<State<R, P>>,
}

struct State<R, P> {
    /// Rates of the queue. If `None`, requests pay nothing.
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
pub enum EnterResult<R> {
    /// The request continues now.
    Admitted(R),
    /// The queue is shut; the caller must reject the request.
    Rejected(R),
    /// The request waits at the head of the queue. The caller must arrange a dispatch after this time.
    First(Duration),
    /// The request waits behind other requests.
    Queued,
}

/// Work left by [`PacedQueue::dispatch`].
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub enum DispatchResult {
    /// No request waits, or another thread dispatches.
    Idle,
    /// Dispatch again after this time.
    After(Duration),
    /// Dispatch again now; other queues may have a turn before.
    More,
}

/// Clears `is_dispatching` on drop, also after a panic.
struct DispatchGuard<'a, R: PacedRequest, P: Pace>(&'a PacedQueue<R, P>);

impl<R: PacedRequest, P: Pace> Drop for DispatchGuard<'_, R, P> {
    fn drop(&mut self) {
        self.0.state.lock().is_dispatching = false;
    }
}

impl<R: PacedRequest, P: Pace> PacedQueue<R, P> {
    /// Creates an inactive queue without rates. `active_count` counts active queues.
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
    pub fn is_active(&self) -> bool {
        // Acquire: pairs with the Release in `update_active`: a request that finds the queue inactive
        // continues after all requests that waited.
        self.active.load(Ordering::Acquire) != 0
    }

    /// Charges a new request. If the request cannot pay its whole cost now, queues it.
    pub fn enter(&self, mut request: R, mut owed: Cost) -> EnterResult<R> {
        if !self.is_active() {
            return EnterResult::Admitted(request);
        }
        let mut state = self.state.lock();
        if state.shut_count > 0 {
            return EnterResult::Rejected(request);
        }
        let is_first = state.waiting.is_empty() && !state.is_dispatching;
        let wait = if is_first { state.pay(&mut owed) } else { Err(Duration::ZERO) };
        let Err(wait) = wait else { return EnterResult::Admitted(request) };
        request.note_wait();
        state.waiting.push_back((request, owed));
        if is_first { EnterResult::First(wait) } else { EnterResult::Queued }
    }

    /// Charges the waiting requests in order, and continues up to `most` requests that have paid.
    pub fn dispatch(&self, most: usize) -> DispatchResult {
        {
            let mut state = self.state.lock();
            if state.is_dispatching {
                return DispatchResult::Idle;
            }
            state.is_dispatching = true;
        }
        let guard = DispatchGuard(self);
        for _ in 0..most {
            let request = {
                let mut state = self.state.lock();
                match state.pay_for_first() {
                    Ok(Some(request)) => request,
                    // Cleared under the lock that was held for the check, so a request that enters later is
                    // the first again.
                    Ok(None) => {
                        state.is_dispatching = false;
                        self.update_active(&state);
                        std::mem::forget(guard);
                        return DispatchResult::Idle;
                    }
                    Err(wait) => {
                        state.is_dispatching = false;
                        std::mem::forget(guard);
                        return DispatchResult::After(wait);
                    }
                }
            };
            request.resume();
        }
        drop(guard);
        DispatchResult::More
    }

    /// Replaces the rates, also for waiting requests. `make` is called with true if requests are waiting. The
    /// caller must arrange a dispatch afterwards.
    pub fn set(&self, make: impl FnOnce(bool) -> Option<P>) {
        let mut state = self.state.lock();
        state.pace = make(!state.waiting.is_empty());
        self.update_active(&state);
    }

    /// Suspends payment: requests continue without paying. The caller must arrange a dispatch afterwards.
    pub fn suspend(&self) {
        self.state.lock().suspend_count += 1;
    }

    /// Reverts one [`suspend`](Self::suspend).
    pub fn resume(&self) {
        self.state.lock().suspend_count -= 1;
    }

    /// Rejects waiting requests and new requests until [`reopen`](Self::reopen).
    pub fn shut(&self) {
        let waiting = {
            let mut state = self.state.lock();
            state.shut_count += 1;
            std::mem::take(&mut state.waiting)
        };
        self.reject_all(waiting);
    }

    /// Reverts one [`shut`](Self::shut).
    pub fn reopen(&self) {
        self.state.lock().shut_count -= 1;
    }

    /// Rejects the waiting requests that satisfy a predicate.
    pub fn reject_matching(&self, matches: impl Fn(&R) -> bool) {
        let gone = {
            let mut state = self.state.lock();
            let (gone, stay) =
                std::mem::take(&mut state.waiting).into_iter().partition(|(request, _)| matches(request));
            state.waiting = stay;
            gone
        };
        self.reject_all(gone);
    }

    fn reject_all(&self, gone: VecDeque<(R, Cost)>) {
        for (request, _) in gone {
            request.reject();
        }
        let state = self.state.lock();
        self.update_active(&state);
    }

    fn update_active(&self, state: &State<R, P>) {
        let is_on = state.pace.is_some() || state.is_dispatching || !state.waiting.is_empty();
        // Relaxed: `active` is written only under the lock.
        let was_on = self.active.load(Ordering::Relaxed) != 0;
        if is_on == was_on {
            return;
        }
        if is_on {
            // Relaxed: a request that does not see the flag yet counts as earlier than the change.
            self.active.store(1, Ordering::Relaxed);
            // Relaxed: a request that does not see the new count yet counts as earlier than the change.
            self.active_count.fetch_add(1, Ordering::Relaxed);
        } else {
            // Release: pairs with the Acquire in `is_active`: all waiting requests have continued.
            self.active.store(0, Ordering::Release);
            // Release: pairs with the Acquire of readers of the common counter: all waiting requests have
            // continued.
            self.active_count.fetch_sub(1, Ordering::Release);
        }
    }
}

impl<R, P> Drop for PacedQueue<R, P> {
    fn drop(&mut self) {
        // Relaxed: no other thread has a reference.
        if self.active.load(Ordering::Relaxed) != 0 {
            // Release: pairs with the Acquire of readers of the common counter.
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

    /// Charges the first waiting request, and removes and returns it if it has paid everything. Returns
    /// `Ok(None)` if no request waits, or the time until more can be paid.
    fn pay_for_first(&mut self) -> Result<Option<R>, Duration> {
        let Some(mut owed) = self.waiting.front().map(|(_, owed)| *owed) else { return Ok(None) };
        let paid = self.pay(&mut owed);
        if let Some((_, left)) = self.waiting.front_mut() {
            *left = owed;
        }
        paid.map(|()| self.waiting.pop_front().map(|(request, _)| request))
    }
}
