//! What the lock of [`Shared`](crate::shared) is for: connections, jobs that wait, and what is known of
//! the session. Nothing here waits, and what cannot be done under a lock is noted in [`Effects`].

use std::collections::VecDeque;
use std::time::Duration;

use freestone_core::device::{Error, Result};
use freestone_core::overlap::Overlap;
use freestone_core::sync::Instant;

use crate::facts::Facts;
use crate::job::Job;
use crate::ledger::Ledger;
use crate::table::MAX_IN_FLIGHT;

/// A connection.
#[derive(Default)]
pub struct Lane {
    /// It may be used.
    pub up: bool,
    /// Its thread is to be woken when something comes.
    pub asleep: bool,
    /// Jobs that are its own.
    pub assigned: usize,
    /// Those of them that it has not seen.
    pub inbox: VecDeque<Box<Job>>,
}

/// All of it.
pub struct State {
    pub lanes: Vec<Lane>,
    /// Connections of the session.
    pub members: usize,
    /// One of them was lost: the others leave, and none comes.
    pub leaving: bool,
    /// Since when there is no session, where there was one.
    pub down_since: Option<Instant>,
    /// Jobs that no connection has.
    pub waiting: VecDeque<Box<Job>>,
    /// With the jobs that wait for others.
    pub overlap: Overlap<Box<Job>>,
    /// Which writes are durable.
    pub ledger: Ledger,
    /// As the session sees the export.
    pub facts: Facts,
    /// How many have come.
    pub jobs: u64,
    /// The device ends.
    pub stop: bool,
    /// When it is looked for jobs that have waited for too long.
    pub timer: Option<Instant>,
    /// Of connections.
    pub threads: usize,
    /// How often the server was connected to again after all connections were lost.
    pub reconnects: u64,
    /// Why a connection was last lost, or not made.
    pub last_error: Option<String>,
}

/// What is to be done when the lock is free.
#[derive(Default)]
pub struct Effects {
    /// Jobs that are done, and how.
    pub done: Vec<(Box<Job>, Result<()>)>,
    /// Connections, a bit each.
    pub wake: u64,
    /// Look for jobs that have waited for too long.
    pub timer: Option<Instant>,
}

impl State {
    /// Of an export that was just seen so, with so many connections, none of which is up.
    pub fn new(facts: Facts, lanes: usize) -> Self {
        Self {
            lanes: std::iter::repeat_with(Lane::default).take(lanes).collect(),
            members: 0,
            leaving: false,
            down_since: None,
            waiting: VecDeque::new(),
            overlap: Overlap::default(),
            ledger: Ledger::default(),
            facts,
            jobs: 0,
            stop: false,
            timer: None,
            threads: 0,
            reconnects: 0,
            last_error: None,
        }
    }

    /// A job comes; it is given back where nothing is in its way.
    pub fn arrive(&mut self, mut job: Box<Job>) -> Option<Box<Job>> {
        let (start, len) = (job.request.offset, job.request.len);
        if len == 0 {
            return Some(job);
        }
        let (ticket, ready) = self.overlap.enter(start..start + len, job.changes());
        job.ticket = Some(ticket);
        if ready {
            return Some(job);
        }
        self.overlap.keep(ticket, job);
        None
    }

    /// Gives a job to a connection, or has it wait.
    pub fn place(&mut self, job: Box<Job>, timeout: Duration, effects: &mut Effects) {
        let mut ready = VecDeque::new();
        self.place_one(job, Instant::now(), timeout, &mut ready, effects);
        self.place_all(&mut ready, timeout, effects);
    }

    /// The same with all of these.
    pub fn place_all(&mut self, ready: &mut VecDeque<Box<Job>>, timeout: Duration, effects: &mut Effects) {
        if ready.is_empty() {
            return;
        }
        let now = Instant::now();
        while let Some(job) = ready.pop_front() {
            self.place_one(job, now, timeout, ready, effects);
        }
    }

    /// One that fails here may have had others wait for it: `ready` gets those.
    fn place_one(
        &mut self,
        mut job: Box<Job>,
        now: Instant,
        timeout: Duration,
        ready: &mut VecDeque<Box<Job>>,
        effects: &mut Effects,
    ) {
        if self.stop {
            return self.finish(job, Err(Error::Gone), ready, effects);
        }
        if self.members == 0 || self.leaving {
            let deadline = self.down_since.unwrap_or(now) + timeout;
            let deadline = *job.deadline.get_or_insert(deadline);
            if deadline <= now {
                self.finish(job, Err(Error::Media), ready, effects);
            } else {
                self.waiting.push_back(job);
                self.arm(deadline, effects);
            }
            return;
        }
        let free = |lane: &&(usize, &mut Lane)| lane.1.up && lane.1.assigned < MAX_IN_FLIGHT;
        let lane = self.lanes.iter_mut().enumerate().filter(|lane| free(&lane));
        match lane.min_by_key(|(_, lane)| lane.assigned) {
            Some((number, lane)) if self.waiting.is_empty() => {
                lane.assigned += 1;
                lane.inbox.push_back(job);
                if std::mem::take(&mut lane.asleep) {
                    effects.wake |= 1 << number;
                }
            }
            _ => self.waiting.push_back(job),
        }
    }

    /// A flush succeeds where nothing that it covers may be lost.
    pub fn settled(&mut self, job: &Job, outcome: Result<()>) -> Result<()> {
        if job.is_flush() && outcome.is_ok() && !self.ledger.flushed(job.covers, job.doomed) {
            return Err(Error::Media);
        }
        outcome
    }

    /// A job is done; `ready` gets those that waited for it.
    pub fn finish(
        &mut self,
        job: Box<Job>,
        outcome: Result<()>,
        ready: &mut VecDeque<Box<Job>>,
        effects: &mut Effects,
    ) {
        if let Some(ticket) = job.ticket {
            self.overlap.finish(ticket, |_, waited| ready.extend(waited.take()));
        }
        effects.done.push((job, outcome));
    }

    /// The last connection has left.
    pub fn session_over(&mut self, now: Instant, timeout: Duration, effects: &mut Effects) -> Option<u64> {
        self.down_since = Some(now);
        let Self { waiting, ledger, .. } = self;
        for job in waiting.iter_mut() {
            job.doomed |= job.is_flush() && ledger.is_at_risk(job.covers);
            job.deadline.get_or_insert(now + timeout);
            job.begin_again();
        }
        let flushes = waiting.iter().filter(|job| job.is_flush()).map(|job| job.covers);
        let loss = ledger.lost(flushes);
        waiting.make_contiguous().sort_unstable_by_key(|job| job.number);
        self.expire(now, timeout, effects);
        loss
    }

    /// Fails what has waited for a server for too long.
    pub fn expire(&mut self, now: Instant, timeout: Duration, effects: &mut Effects) {
        if self.timer.is_some_and(|when| when <= now) {
            self.timer = None;
        }
        if self.members > 0 && !self.leaving {
            return;
        }
        let mut ready = VecDeque::new();
        let is_late = |job: &Job| job.deadline.is_some_and(|deadline| deadline <= now);
        let all = std::mem::take(&mut self.waiting);
        let (late, waiting): (VecDeque<_>, _) = all.into_iter().partition(|job| is_late(job));
        self.waiting = waiting;
        for job in late {
            self.finish(job, Err(Error::Media), &mut ready, effects);
        }
        self.place_all(&mut ready, timeout, effects);
        if let Some(next) = self.waiting.iter().filter_map(|job| job.deadline).min() {
            self.arm(next, effects);
        }
    }

    /// Has it looked then, if it is not looked before.
    fn arm(&mut self, when: Instant, effects: &mut Effects) {
        if self.timer.is_none_or(|armed| when < armed) {
            self.timer = Some(when);
            effects.timer = Some(effects.timer.map_or(when, |other| other.min(when)));
        }
    }
}
