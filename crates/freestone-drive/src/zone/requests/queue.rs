//! Queues of requests and threads that wait for busy zones, each in order of arrival. A busy zone
//! is owned by a request or an operation.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::zone::table::Place;
use freestone_core::device::zoned::AppendCompletion;
use freestone_core::device::{Completion, Error, IoBuf, Request, Result};
use freestone_core::pin::wait;
use freestone_core::sync::{Condvar, Mutex};

/// Number of shards of the queues, so that different zones seldom contend for a lock.
const SHARDS: usize = 64;

/// Submitted write, write of zeroes or append to one sequential zone.
pub struct Write {
    pub zone: u32,
    pub place: Place,
    /// The request. For an append, its offset is the start of the zone, since the final offset is
    /// not known yet.
    pub request: Request,
    pub buffer: IoBuf,
    pub done: WriteCompletion,
}

pub enum WriteCompletion {
    Io(Completion),
    Append(AppendDone),
}

/// Completion of a zone append. Dropping it fails the append with [`Error::Gone`].
pub struct AppendDone(Option<AppendCompletion>);

impl AppendDone {
    pub fn new(done: AppendCompletion) -> Self {
        Self(Some(done))
    }

    pub fn complete(mut self, outcome: Result<u64>) {
        if let Some(done) = self.0.take() {
            done(outcome);
        }
    }
}

impl Drop for AppendDone {
    fn drop(&mut self) {
        if let Some(done) = self.0.take() {
            done(Err(Error::Gone));
        }
    }
}

pub enum ZoneWaiter {
    Write(Write),
    Thread(Arc<OwnershipWaiter>),
}

/// Thread that waits until it owns a zone.
#[derive(Default)]
pub struct OwnershipWaiter {
    owned: Mutex<bool>,
    changed: Condvar,
}

impl OwnershipWaiter {
    pub fn wait(&self) {
        let mut owned = self.owned.lock();
        while !*owned {
            owned = wait(&self.changed, owned);
        }
    }

    /// Passes the ownership of the zone to the waiting thread, and wakes it.
    pub fn give(&self) {
        *self.owned.lock() = true;
        self.changed.notify_one();
    }
}

type Shard = Mutex<HashMap<u32, VecDeque<ZoneWaiter>>>;

/// Queues of all busy zones of a device.
///
/// Lock order: the lock of a zone, then the shard. A queue changes only under the lock of its zone,
/// so a zone without an owner has no queue.
pub struct Queues(Box<[Shard]>);

impl Default for Queues {
    fn default() -> Self {
        Self((0..SHARDS).map(|_| Shard::default()).collect())
    }
}

impl Queues {
    fn shard(&self, zone: u32) -> &Shard {
        &self.0[zone as usize % SHARDS]
    }

    /// Appends a waiter to the queue of a zone, which must be locked by the caller and busy.
    pub fn push(&self, zone: u32, waiter: ZoneWaiter) {
        self.shard(zone).lock().entry(zone).or_default().push_back(waiter);
    }

    /// Removes and returns the first waiter of a zone that the caller has locked, or `None` if none
    /// waits.
    pub fn pop(&self, zone: u32) -> Option<ZoneWaiter> {
        let mut queues = self.shard(zone).lock();
        let queue = queues.get_mut(&zone)?;
        let waiter = queue.pop_front();
        if queue.is_empty() {
            queues.remove(&zone);
        }
        waiter
    }

    /// Removes and returns the waiting writes of a zone that the caller has locked. Waiting threads
    /// stay queued.
    pub fn writes(&self, zone: u32) -> Vec<Write> {
        let mut queues = self.shard(zone).lock();
        let mut writes = Vec::new();
        let mut threads = VecDeque::new();
        for waiter in queues.remove(&zone).into_iter().flatten() {
            match waiter {
                ZoneWaiter::Write(write) => writes.push(write),
                thread @ ZoneWaiter::Thread(_) => threads.push_back(thread),
            }
        }
        if !threads.is_empty() {
            queues.insert(zone, threads);
        }
        writes
    }
}
