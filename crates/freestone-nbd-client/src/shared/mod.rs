//! State shared by the users of a device and its connections: waiting requests, assignment to
//! connections, and recovery from lost connections.
//!
//! All connections that are open at one time form a *session*. When one of them is lost, the others
//! leave too, and a new session begins after the last one has left. All replies of the old server
//! are thus processed before a command is sent to the next server, which may have lost cached
//! writes.
//!
//! Lock order: `state` is the only lock. It is held for a few instructions, never across a system
//! call, a completion or a log line.

mod durability;
mod state;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use freestone_core::client_log;
use freestone_core::device::{Error, Geometry, Result};
use freestone_core::plug::{Unplug, hold};
use freestone_core::sync::{Condvar, Instant, Mutex};
use freestone_core::timer;

use self::state::{DeferredWork, State};
use crate::error::LinkError;
use crate::link::export_info::ExportInfo;
use crate::link::wake::Waker;
use crate::requests::job::Job;
use crate::requests::table::MAX_IN_FLIGHT;

/// The state of a device, shared by its users and connections.
pub struct Shared {
    /// Time for which a request waits for a server before it fails.
    pub timeout: Duration,
    /// One waker per connection.
    pub wakers: Vec<Waker>,
    /// Geometry of the device. Only its size may grow, which is in `size`.
    geometry: Geometry,
    size: AtomicU64,
    /// Bitmap of connections whose wake-up is delayed until a plug is released.
    plugged: AtomicU64,
    state: Mutex<State>,
    /// Signalled when a connection thread ends.
    ended: Condvar,
}

/// Requests that a connection exchanges with the shared state. The allocations are reused, so that
/// the lock is not held across an allocation per request.
#[derive(Default)]
pub struct Exchange {
    /// Finished requests with their results.
    pub done: Vec<(Box<Job>, Result<()>)>,
    /// Number of completed commands that changed data without making it durable.
    pub unflushed: u64,
    pub new: VecDeque<Box<Job>>,
    ready: VecDeque<Box<Job>>,
    deferred: DeferredWork,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaveReason {
    Stop,
    SessionLost,
}

#[derive(Debug)]
pub enum JoinResult {
    /// The connection joined; true if it is the first of the session.
    Joined(bool),
    /// The previous session has not ended yet.
    PreviousEnding,
}

impl Shared {
    /// Returns the state of a newly seen export with one connection per waker, none of them open.
    pub fn new(export_info: ExportInfo, geometry: Geometry, wakers: Vec<Waker>, timeout: Duration) -> Self {
        let state = State::new(export_info, wakers.len());
        Self {
            timeout,
            wakers,
            size: AtomicU64::new(geometry.size),
            geometry,
            plugged: AtomicU64::new(0),
            state: Mutex::new(state),
            ended: Condvar::new(),
        }
    }

    pub fn geometry(&self) -> Geometry {
        Geometry { size: self.size.load(Ordering::SeqCst), ..self.geometry }
    }

    pub fn export_info(&self) -> ExportInfo {
        self.state.lock().export_info
    }

    pub fn members(&self) -> usize {
        self.state.lock().members
    }

    /// Returns the number of reconnections after all connections were lost.
    pub fn reconnects(&self) -> u64 {
        self.state.lock().reconnects
    }

    /// Returns the reason why a connection was last lost or could not be opened, if that has
    /// happened.
    pub fn last_error(&self) -> Option<String> {
        self.state.lock().last_error.clone()
    }

    /// Records the reason why a connection was lost or could not be opened.
    pub fn record_error(&self, error: String) {
        self.state.lock().last_error = Some(error);
    }

    pub fn submit(self: &Arc<Self>, mut job: Box<Job>) {
        let mut deferred = DeferredWork::default();
        {
            let mut state = self.state.lock();
            state.jobs += 1;
            job.number = state.jobs;
            job.covered_writes = state.durability.completed_writes();
            if state.stop {
                deferred.done.push((job, Err(Error::Gone)));
            } else if let Some(job) = state.admit(job) {
                state.dispatch(job, self.timeout, &mut deferred);
            }
        }
        if deferred.wake != 0 && hold(self) {
            self.plugged.fetch_or(deferred.wake, Ordering::SeqCst);
            deferred.wake = 0;
        }
        self.run_deferred(&mut deferred);
    }

    /// Does the work that was collected under the lock, and empties `deferred`.
    fn run_deferred(self: &Arc<Self>, deferred: &mut DeferredWork) {
        self.wake(std::mem::take(&mut deferred.wake));
        for (job, outcome) in deferred.done.drain(..) {
            // A panicking completion ends its request, not the device.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job.finish(outcome)));
        }
        if let Some(when) = deferred.timer.take() {
            let shared = Arc::downgrade(self);
            let check = move || {
                if let Some(shared) = shared.upgrade() {
                    shared.expire();
                }
            };
            if let Err(error) = timer::schedule(when, check) {
                // Connection threads also check for expired requests before they reconnect.
                client_log!(warn, "cannot set a timer: requests may exceed their timeout: {error}");
            }
        }
    }

    fn wake(&self, connections: u64) {
        for (connection, wake) in self.wakers.iter().enumerate() {
            if connections & 1 << connection != 0 {
                wake.wake();
            }
        }
    }

    /// Fails requests that have waited for a server longer than the timeout.
    pub fn expire(self: &Arc<Self>) {
        let mut deferred = DeferredWork::default();
        self.state.lock().expire(Instant::now(), self.timeout, &mut deferred);
        self.run_deferred(&mut deferred);
    }

    // ---- called by connections
    // --------------------------------------------------------------------

    /// Adds an open connection to the session.
    ///
    /// # Errors
    /// The export has changed, or the device is being dropped.
    pub fn join(
        &self,
        connection: usize,
        export_info: ExportInfo,
    ) -> std::result::Result<JoinResult, LinkError> {
        let mut state = self.state.lock();
        if state.stop {
            return Err(LinkError::Stopped);
        }
        if state.leaving {
            return Ok(JoinResult::PreviousEnding);
        }
        export_info.check_compatible(&state.export_info)?;
        let first = state.members == 0;
        if first {
            // The session uses the size that its first connection sees, as all later ones see at
            // least that.
            state.export_info = export_info;
            let size = export_info.size.next_multiple_of(u64::from(self.geometry.logical_block));
            self.size.fetch_max(size, Ordering::SeqCst);
            state.reconnects += u64::from(state.down_since.take().is_some());
        }
        state.members += 1;
        let connection = &mut state.connections[connection];
        (connection.is_open, connection.assigned) = (true, 0);
        Ok(JoinResult::Joined(first))
    }

    /// Hands over finished requests and fetches new ones, up to the in-flight limit. The
    /// connection's thread is woken when more requests arrive.
    ///
    /// # Errors
    /// Returns the reason if the connection must end.
    pub fn exchange(
        self: &Arc<Self>,
        connection: usize,
        exchange: &mut Exchange,
    ) -> std::result::Result<(), LeaveReason> {
        let Exchange { done, unflushed, new, ready, deferred } = exchange;
        let over = {
            let mut state = self.state.lock();
            (0..std::mem::take(unflushed)).for_each(|_| state.durability.add_write());
            state.connections[connection].assigned -= done.len();
            for (job, outcome) in done.drain(..) {
                let outcome = state.check_flush(&job, outcome);
                state.finish(job, outcome, ready, deferred);
            }
            state.dispatch_all(ready, self.timeout, deferred);
            if state.stop {
                Err(LeaveReason::Stop)
            } else if state.leaving {
                Err(LeaveReason::SessionLost)
            } else {
                let State { connections, queued, .. } = &mut *state;
                let connection = &mut connections[connection];
                // Swapping keeps both allocations.
                if new.is_empty() {
                    std::mem::swap(new, &mut connection.inbox);
                } else {
                    new.append(&mut connection.inbox);
                }
                while connection.assigned < MAX_IN_FLIGHT
                    && let Some(job) = queued.pop_front()
                {
                    connection.assigned += 1;
                    new.push_back(job);
                }
                connection.needs_wake = true;
                Ok(())
            }
        };
        let _plug = (deferred.done.len() > 1).then(freestone_core::plug::Plug::start);
        self.run_deferred(deferred);
        over
    }

    /// Removes a lost connection; `jobs` are its requests without a reply. If it was the last one,
    /// returns the number of completed writes that may be lost, if any.
    pub fn leave(self: &Arc<Self>, connection: usize, jobs: VecDeque<Box<Job>>) -> Option<u64> {
        let mut deferred = DeferredWork::default();
        let mut lost = None;
        {
            let mut state = self.state.lock();
            let own = &mut state.connections[connection];
            (own.is_open, own.assigned, own.needs_wake) = (false, 0, false);
            let inbox = std::mem::take(&mut own.inbox);
            state.members -= 1;
            state.leaving = state.members > 0;
            if state.stop {
                deferred.done.extend(jobs.into_iter().chain(inbox).map(|job| (job, Err(Error::Gone))));
            } else {
                state.queued.extend(jobs.into_iter().chain(inbox));
                if state.members == 0 {
                    lost = state.end_session(Instant::now(), self.timeout, &mut deferred);
                }
            }
            // Wakes the other connections to leave too, or to begin the next session.
            deferred.wake = !(1 << connection);
        }
        self.run_deferred(&mut deferred);
        lost
    }

    // ---- thread lifecycle -----------------------------------------------------------------------

    pub fn enter_thread(&self) {
        self.state.lock().threads += 1;
    }

    pub fn leave_thread(&self) {
        self.state.lock().threads -= 1;
        self.ended.notify_all();
    }

    /// Fails all requests with `Gone` and stops the connection threads. Returns true if at most
    /// `others` threads are left after at most the time `most`.
    pub fn stop(self: &Arc<Self>, most: Duration, others: usize) -> bool {
        let mut deferred = DeferredWork::default();
        {
            let mut state = self.state.lock();
            state.stop = true;
            let State { queued, connections, overlap, .. } = &mut *state;
            let overlapping = overlap.drain();
            let pending = queued
                .drain(..)
                .chain(connections.iter_mut().flat_map(|connection| std::mem::take(&mut connection.inbox)));
            deferred.done.extend(pending.chain(overlapping).map(|job| (job, Err(Error::Gone))));
        }
        self.wakers.iter().for_each(Waker::stop);
        self.run_deferred(&mut deferred);
        !self.ended.wait_timeout_while(self.state.lock(), most, |state| state.threads > others).1
    }
}

impl Unplug for Shared {
    fn unplug(&self) {
        self.wake(self.plugged.swap(0, Ordering::SeqCst));
    }
}
