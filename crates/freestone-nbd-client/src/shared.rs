//! What the users of a device and its connections share: requests that wait, who has which, and what
//! happens when connections are lost.
//!
//! All connections that are open at one time are a *session*. When one of them is lost, the others
//! leave as well, and a new session begins when the last one has left. So it is known of each answer
//! before the next server is asked anything whether it came from the server before, which may have
//! lost what it had in its cache.
//!
//! Lock order: `state` is the only lock, held for a few instructions, never over a system call, a
//! completion or a log line.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use freestone_core::client_log;
use freestone_core::device::{Error, Geometry, Result};
use freestone_core::plug::{Unplug, hold};
use freestone_core::sync::{Condvar, Instant, Mutex, MutexGuard};
use freestone_core::timer;

use crate::error::LinkError;
use crate::facts::Facts;
use crate::job::Job;
use crate::state::{Effects, State};
use crate::table::MAX_IN_FLIGHT;
use crate::wake::Wake;

/// A device, as its users and connections see it.
pub struct Shared {
    /// How long a request waits for a server.
    pub timeout: Duration,
    /// One for each connection.
    pub wakes: Vec<Wake>,
    /// All but the size stays as it is.
    geometry: Geometry,
    size: AtomicU64,
    /// Connections whose threads wait to be woken until a plug is released, a bit each.
    plugged: AtomicU64,
    state: Mutex<State>,
    /// A thread has ended.
    ended: Condvar,
}

/// What a connection hands over and is given. Its memory is kept from one time to the next: under
/// the lock none is allocated for a request.
#[derive(Default)]
pub struct Exchange {
    /// Jobs that are done, and how.
    pub done: Vec<(Box<Job>, Result<()>)>,
    /// Writes of these and others that were answered, and are not durable.
    pub unflushed: u64,
    /// New jobs.
    pub new: VecDeque<Box<Job>>,
    /// Jobs that waited for others.
    ready: VecDeque<Box<Job>>,
    effects: Effects,
}

/// Why a connection ends without a fault of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    /// The device ends.
    Stop,
    /// Another connection was lost.
    Session,
}

/// Whether a connection may be used.
#[derive(Debug)]
pub enum Joined {
    /// It is one of the session. True: there was none.
    Yes(bool),
    /// Once the one before is over.
    Later,
}

impl Shared {
    /// Of an export that was just seen so, with so many connections, none of which is up.
    pub fn new(facts: Facts, geometry: Geometry, wakes: Vec<Wake>, timeout: Duration) -> Self {
        let state = State::new(facts, wakes.len());
        Self {
            timeout,
            wakes,
            size: AtomicU64::new(geometry.size),
            geometry,
            plugged: AtomicU64::new(0),
            state: Mutex::new(state),
            ended: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// As of now.
    pub fn geometry(&self) -> Geometry {
        Geometry { size: self.size.load(Ordering::SeqCst), ..self.geometry }
    }

    /// What the export is.
    pub fn facts(&self) -> Facts {
        self.lock().facts
    }

    /// Connections that are open.
    pub fn members(&self) -> usize {
        self.lock().members
    }

    /// How often the server was connected to again after all connections were lost.
    pub fn reconnects(&self) -> u64 {
        self.lock().reconnects
    }

    /// Why a connection was last lost, or not made.
    pub fn last_error(&self) -> Option<String> {
        self.lock().last_error.clone()
    }

    /// Notes why a connection was lost, or not made.
    pub fn note(&self, error: String) {
        self.lock().last_error = Some(error);
    }

    /// Takes a job.
    pub fn submit(self: &Arc<Self>, mut job: Box<Job>) {
        let mut effects = Effects::default();
        {
            let mut state = self.lock();
            state.jobs += 1;
            job.number = state.jobs;
            job.covers = state.ledger.covers();
            if state.stop {
                effects.done.push((job, Err(Error::Gone)));
            } else if let Some(job) = state.arrive(job) {
                state.place(job, self.timeout, &mut effects);
            }
        }
        if effects.wake != 0 && hold(self) {
            self.plugged.fetch_or(effects.wake, Ordering::SeqCst);
            effects.wake = 0;
        }
        self.carry_out(&mut effects);
    }

    /// What cannot be done under the lock. Nothing of it is left.
    fn carry_out(self: &Arc<Self>, effects: &mut Effects) {
        self.wake(std::mem::take(&mut effects.wake));
        for (job, outcome) in effects.done.drain(..) {
            // A completion that panics ends its request, not the device.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job.finish(outcome)));
        }
        if let Some(when) = effects.timer.take() {
            let shared = Arc::downgrade(self);
            let look = move || {
                if let Some(shared) = shared.upgrade() {
                    shared.expire();
                }
            };
            if let Err(error) = timer::at(when, look) {
                // The connections' threads look as well, when they try to connect.
                client_log!(warn, "no timer: requests may wait longer than they should: {error}");
            }
        }
    }

    fn wake(&self, lanes: u64) {
        for (lane, wake) in self.wakes.iter().enumerate() {
            if lanes & 1 << lane != 0 {
                wake.wake();
            }
        }
    }

    /// Fails what has waited for a server for too long.
    pub fn expire(self: &Arc<Self>) {
        let mut effects = Effects::default();
        self.lock().expire(Instant::now(), self.timeout, &mut effects);
        self.carry_out(&mut effects);
    }

    // ---- for the connections --------------------------------------------------------------------

    /// A connection is made.
    ///
    /// # Errors
    /// It is not the same export any more, or the device ends.
    pub fn join(&self, lane: usize, facts: Facts) -> std::result::Result<Joined, LinkError> {
        let mut state = self.lock();
        if state.stop {
            return Err(LinkError::Ending);
        }
        if state.leaving {
            return Ok(Joined::Later);
        }
        facts.follows(&state.facts)?;
        let first = state.members == 0;
        if first {
            // What a later one sees more than the first is not used: all have what is used.
            state.facts = facts;
            let size = facts.size.next_multiple_of(u64::from(self.geometry.logical_block));
            self.size.fetch_max(size, Ordering::SeqCst);
            state.reconnects += u64::from(state.down_since.take().is_some());
        }
        state.members += 1;
        let lane = &mut state.lanes[lane];
        (lane.up, lane.assigned) = (true, 0);
        Ok(Joined::Yes(first))
    }

    /// A connection hands over what was answered, and takes what is new, at most what it has room for.
    /// It is woken when more comes.
    ///
    /// # Errors
    /// It ends.
    pub fn exchange(self: &Arc<Self>, lane: usize, exchange: &mut Exchange) -> std::result::Result<(), Over> {
        let Exchange { done, unflushed, new, ready, effects } = exchange;
        let over = {
            let mut state = self.lock();
            (0..std::mem::take(unflushed)).for_each(|_| state.ledger.answered());
            state.lanes[lane].assigned -= done.len();
            for (job, outcome) in done.drain(..) {
                let outcome = state.settled(&job, outcome);
                state.finish(job, outcome, ready, effects);
            }
            state.place_all(ready, self.timeout, effects);
            if state.stop {
                Err(Over::Stop)
            } else if state.leaving {
                Err(Over::Session)
            } else {
                let State { lanes, waiting, .. } = &mut *state;
                let lane = &mut lanes[lane];
                // Both keep memory.
                if new.is_empty() {
                    std::mem::swap(new, &mut lane.inbox);
                } else {
                    new.append(&mut lane.inbox);
                }
                while lane.assigned < MAX_IN_FLIGHT
                    && let Some(job) = waiting.pop_front()
                {
                    lane.assigned += 1;
                    new.push_back(job);
                }
                lane.asleep = true;
                Ok(())
            }
        };
        let _plug = (effects.done.len() > 1).then(freestone_core::plug::Plug::start);
        self.carry_out(effects);
        over
    }

    /// A connection is lost, with these jobs not answered. Answers how many writes were answered and may
    /// be lost, if it was the last one and there are any.
    pub fn leave(self: &Arc<Self>, lane: usize, jobs: VecDeque<Box<Job>>) -> Option<u64> {
        let mut effects = Effects::default();
        let mut lost = None;
        {
            let mut state = self.lock();
            let own = &mut state.lanes[lane];
            (own.up, own.assigned, own.asleep) = (false, 0, false);
            let inbox = std::mem::take(&mut own.inbox);
            state.members -= 1;
            state.leaving = state.members > 0;
            if state.stop {
                effects.done.extend(jobs.into_iter().chain(inbox).map(|job| (job, Err(Error::Gone))));
            } else {
                state.waiting.extend(jobs.into_iter().chain(inbox));
                if state.members == 0 {
                    lost = state.session_over(Instant::now(), self.timeout, &mut effects);
                }
            }
            // To leave as well, or to begin the next session.
            effects.wake = !(1 << lane);
        }
        self.carry_out(&mut effects);
        lost
    }

    // ---- coming and going -----------------------------------------------------------------------

    /// A thread begins.
    pub fn enter_thread(&self) {
        self.lock().threads += 1;
    }

    /// A thread ends.
    pub fn leave_thread(&self) {
        self.lock().threads -= 1;
        self.ended.notify_all();
    }

    /// Answers all that is not answered, and has the threads end. True: they did, within `most`.
    pub fn stop(self: &Arc<Self>, most: Duration, others: usize) -> bool {
        let mut effects = Effects::default();
        {
            let mut state = self.lock();
            state.stop = true;
            let State { waiting, lanes, overlap, .. } = &mut *state;
            let held = overlap.drain();
            let queued =
                waiting.drain(..).chain(lanes.iter_mut().flat_map(|lane| std::mem::take(&mut lane.inbox)));
            effects.done.extend(queued.chain(held).map(|job| (job, Err(Error::Gone))));
        }
        self.wakes.iter().for_each(Wake::stop);
        self.carry_out(&mut effects);
        let end = Instant::now() + most;
        let mut state = self.lock();
        while state.threads > others {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.ended.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl Unplug for Shared {
    fn unplug(&self) {
        self.wake(self.plugged.swap(0, Ordering::SeqCst));
    }
}
