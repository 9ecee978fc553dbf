//! State behind the lock of [`Shared`](crate::shared): connections, waiting requests and the
//! session. Nothing here blocks. [`DeferredWork`] collects the work that must not run under the lock.

use std::collections::VecDeque;
use std::time::Duration;

use freestone_core::device::{Error, Result};
use freestone_core::overlap::OverlapTracker;
use freestone_core::sync::Instant;

use crate::link::export_info::ExportInfo;
use crate::requests::job::Job;
use crate::requests::table::MAX_IN_FLIGHT;
use crate::shared::durability::DurabilityTracker;

#[derive(Default)]
pub struct ConnectionState {
    /// True if requests may be assigned to the connection.
    pub is_open: bool,
    /// True if the connection's thread must be woken for new requests.
    pub needs_wake: bool,
    /// Number of requests assigned to the connection.
    pub assigned: usize,
    /// Assigned requests that the connection's thread has not fetched yet.
    pub inbox: VecDeque<Box<Job>>,
}

pub struct State {
    pub connections: Vec<ConnectionState>,
    /// Number of open connections of the session.
    pub members: usize,
    /// Set when a connection of the session was lost: the others leave, and none joins.
    pub leaving: bool,
    /// Start of the outage, if there is no session.
    pub down_since: Option<Instant>,
    /// Requests that are not assigned to a connection.
    pub queued: VecDeque<Box<Job>>,
    /// Ranges of unfinished requests, with the requests that wait for an overlapping one.
    pub overlap: OverlapTracker<Box<Job>>,
    /// Durability of completed writes.
    pub durability: DurabilityTracker,
    /// Properties of the export in the current or last session.
    pub export_info: ExportInfo,
    /// Total number of submitted requests.
    pub jobs: u64,
    pub stop: bool,
    /// Time of the next scheduled check for expired requests.
    pub timer: Option<Instant>,
    /// Number of connection threads.
    pub threads: usize,
    /// Number of reconnections after all connections were lost.
    pub reconnects: u64,
    /// Reason why a connection was last lost or could not be opened.
    pub last_error: Option<String>,
}

/// Work to do after the lock is released.
#[derive(Default)]
pub struct DeferredWork {
    /// Finished requests with their results.
    pub done: Vec<(Box<Job>, Result<()>)>,
    /// Bitmap of connections to wake.
    pub wake: u64,
    /// Time of a check for expired requests that must be scheduled.
    pub timer: Option<Instant>,
}

impl State {
    /// Returns the state of a newly seen export with `connections` connections, none of them open.
    pub fn new(export_info: ExportInfo, connections: usize) -> Self {
        Self {
            connections: std::iter::repeat_with(ConnectionState::default).take(connections).collect(),
            members: 0,
            leaving: false,
            down_since: None,
            queued: VecDeque::new(),
            overlap: OverlapTracker::default(),
            durability: DurabilityTracker::default(),
            export_info,
            jobs: 0,
            stop: false,
            timer: None,
            threads: 0,
            reconnects: 0,
            last_error: None,
        }
    }

    /// Registers the range of a request. Returns the request, or None if it must wait for an overlapping one.
    pub fn admit(&mut self, mut job: Box<Job>) -> Option<Box<Job>> {
        let (start, len) = (job.request.offset, job.request.len);
        if len == 0 {
            return Some(job);
        }
        let (ticket, ready) = self.overlap.enter(start..start + len, job.changes());
        job.ticket = Some(ticket);
        if ready {
            return Some(job);
        }
        self.overlap.store(ticket, job);
        None
    }

    /// Assigns a request to a connection, or queues it.
    pub fn dispatch(&mut self, job: Box<Job>, timeout: Duration, deferred: &mut DeferredWork) {
        let mut ready = VecDeque::new();
        self.dispatch_one(job, Instant::now(), timeout, &mut ready, deferred);
        self.dispatch_all(&mut ready, timeout, deferred);
    }

    /// Assigns all requests in `ready`, or queues them.
    pub fn dispatch_all(
        &mut self,
        ready: &mut VecDeque<Box<Job>>,
        timeout: Duration,
        deferred: &mut DeferredWork,
    ) {
        if ready.is_empty() {
            return;
        }
        let now = Instant::now();
        while let Some(job) = ready.pop_front() {
            self.dispatch_one(job, now, timeout, ready, deferred);
        }
    }

    /// Assigns one request. If it fails, the requests that waited for it are added to `ready`.
    fn dispatch_one(
        &mut self,
        mut job: Box<Job>,
        now: Instant,
        timeout: Duration,
        ready: &mut VecDeque<Box<Job>>,
        deferred: &mut DeferredWork,
    ) {
        if self.stop {
            return self.finish(job, Err(Error::Gone), ready, deferred);
        }
        if self.members == 0 || self.leaving {
            let deadline = self.down_since.unwrap_or(now) + timeout;
            let deadline = *job.deadline.get_or_insert(deadline);
            if deadline <= now {
                self.finish(job, Err(Error::Media), ready, deferred);
            } else {
                self.queued.push_back(job);
                self.arm_timer(deadline, deferred);
            }
            return;
        }
        let free = |connection: &&(usize, &mut ConnectionState)| {
            connection.1.is_open && connection.1.assigned < MAX_IN_FLIGHT
        };
        let connection = self.connections.iter_mut().enumerate().filter(|connection| free(&connection));
        match connection.min_by_key(|(_, connection)| connection.assigned) {
            Some((number, connection)) if self.queued.is_empty() => {
                connection.assigned += 1;
                connection.inbox.push_back(job);
                if std::mem::take(&mut connection.needs_wake) {
                    deferred.wake |= 1 << number;
                }
            }
            _ => self.queued.push_back(job),
        }
    }

    /// Returns the result of a request: `outcome`, or an error if it is a flush and writes that it covers may
    /// be lost.
    pub fn check_flush(&mut self, job: &Job, outcome: Result<()>) -> Result<()> {
        if job.is_flush()
            && outcome.is_ok()
            && !self.durability.finish_flush(job.covered_writes, job.must_fail)
        {
            return Err(Error::Media);
        }
        outcome
    }

    /// Finishes a request. The requests that waited for it are added to `ready`.
    pub fn finish(
        &mut self,
        job: Box<Job>,
        outcome: Result<()>,
        ready: &mut VecDeque<Box<Job>>,
        deferred: &mut DeferredWork,
    ) {
        if let Some(ticket) = job.ticket {
            self.overlap.finish(ticket, |_, waited| ready.extend(waited.take()));
        }
        deferred.done.push((job, outcome));
    }

    /// Ends a session after its last connection has left. Returns the number of completed writes
    /// that may be lost, if any.
    pub fn end_session(
        &mut self,
        now: Instant,
        timeout: Duration,
        deferred: &mut DeferredWork,
    ) -> Option<u64> {
        self.down_since = Some(now);
        let Self { queued, durability, .. } = self;
        for job in queued.iter_mut() {
            job.must_fail |= job.is_flush() && durability.is_at_risk(job.covered_writes);
            job.deadline.get_or_insert(now + timeout);
            job.restart();
        }
        let flushes = queued.iter().filter(|job| job.is_flush()).map(|job| job.covered_writes);
        let loss = durability.record_loss(flushes);
        queued.make_contiguous().sort_unstable_by_key(|job| job.number);
        self.expire(now, timeout, deferred);
        loss
    }

    /// Fails requests that have waited for a server longer than the timeout.
    pub fn expire(&mut self, now: Instant, timeout: Duration, deferred: &mut DeferredWork) {
        if self.timer.is_some_and(|when| when <= now) {
            self.timer = None;
        }
        if self.members > 0 && !self.leaving {
            return;
        }
        let mut ready = VecDeque::new();
        let is_late = |job: &Job| job.deadline.is_some_and(|deadline| deadline <= now);
        let all = std::mem::take(&mut self.queued);
        let (expired, queued): (VecDeque<_>, _) = all.into_iter().partition(|job| is_late(job));
        self.queued = queued;
        for job in expired {
            self.finish(job, Err(Error::Media), &mut ready, deferred);
        }
        self.dispatch_all(&mut ready, timeout, deferred);
        if let Some(next) = self.queued.iter().filter_map(|job| job.deadline).min() {
            self.arm_timer(next, deferred);
        }
    }

    /// Schedules a check for expired requests, unless an earlier one is scheduled.
    fn arm_timer(&mut self, when: Instant, deferred: &mut DeferredWork) {
        if self.timer.is_none_or(|armed| when < armed) {
            self.timer = Some(when);
            deferred.timer = Some(deferred.timer.map_or(when, |other| other.min(when)));
        }
    }
}
