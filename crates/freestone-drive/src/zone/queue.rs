//! Who waits for zones that are busy, in order of arrival.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::states::Place;
use freestone_core::device::zoned::AppendCompletion;
use freestone_core::device::{Completion, Error, IoBuf, Request, Result};
use freestone_core::pin::wait;
use freestone_core::sync::{Condvar, Mutex};

/// Parts of the table of queues, so that zones seldom meet.
const SHARDS: usize = 64;

/// A submitted write, write of zeroes or append to one sequential zone.
pub struct Write {
    pub zone: u32,
    pub place: Place,
    /// Where it goes and what it is; of an append the offset is not known yet.
    pub request: Request,
    pub buffer: IoBuf,
    pub done: Done,
}

/// Who is told of it.
pub enum Done {
    /// A write.
    Io(Completion),
    /// An append.
    Append(AppendDone),
}

/// An append's completion. One that is dropped answers [`Error::Gone`].
pub struct AppendDone(Option<AppendCompletion>);

impl AppendDone {
    /// Will call this.
    pub fn new(done: AppendCompletion) -> Self {
        Self(Some(done))
    }

    /// Answers the append.
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

/// What waits for a zone.
pub enum Job {
    /// A submitted write or append.
    Write(Write),
    /// A thread with an operation.
    Thread(Arc<Turn>),
}

/// A thread that waits until a zone is its own.
#[derive(Default)]
pub struct Turn {
    come: Mutex<bool>,
    changed: Condvar,
}

impl Turn {
    /// Waits.
    pub fn wait(&self) {
        let mut come = self.come.lock();
        while !*come {
            come = wait(&self.changed, come);
        }
    }

    /// The zone is the waiting thread's.
    pub fn give(&self) {
        *self.come.lock() = true;
        self.changed.notify_one();
    }
}

type Shard = Mutex<HashMap<u32, VecDeque<Job>>>;

/// The queues of all busy zones.
///
/// Lock order: a zone's own lock, then the shard. A queue is changed with its zone's lock held
/// only, so that a zone without an owner has none.
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

    /// Puts a job behind all others of a zone, which is locked and busy.
    pub fn push(&self, zone: u32, job: Job) {
        self.shard(zone).lock().entry(zone).or_default().push_back(job);
    }

    /// Takes the first job of a zone, which is locked.
    pub fn pop(&self, zone: u32) -> Option<Job> {
        let mut queues = self.shard(zone).lock();
        let queue = queues.get_mut(&zone)?;
        let job = queue.pop_front();
        if queue.is_empty() {
            queues.remove(&zone);
        }
        job
    }

    /// Takes the writes that wait for a zone, which is locked. Threads stay.
    pub fn writes(&self, zone: u32) -> Vec<Write> {
        let mut queues = self.shard(zone).lock();
        let mut writes = Vec::new();
        let mut threads = VecDeque::new();
        for job in queues.remove(&zone).into_iter().flatten() {
            match job {
                Job::Write(write) => writes.push(write),
                thread @ Job::Thread(_) => threads.push_back(thread),
            }
        }
        if !threads.is_empty() {
            queues.insert(zone, threads);
        }
        writes
    }
}
