//! The queue of background jobs, and the number of threads that run them.

use std::collections::VecDeque;
use std::sync::Arc;

use freestone_control::protocol::RpcError;
use serde_json::value::RawValue;

use super::task::{JobFilter, Task};

/// Maximum number of background jobs that run at once, each on a thread.
pub const THREADS_MAX: usize = 64;
/// Maximum number of jobs in the queue.
pub const WAITING_MAX: usize = 1024;
/// Limit of the size of all queued requests, in bytes.
const WAITING_BYTES_MAX: usize = 16 << 20;

/// Result of a verb, as JSON.
pub type Outcome = Result<Box<RawValue>, RpcError>;

/// A request to run a verb in the background.
pub struct JobRequest {
    /// Name of the device, or path of the file of a restore.
    pub name: String,
    /// Name of the verb, as `jobs` reports it.
    pub verb: String,
    pub tag: Option<String>,
    /// Size of the parameters that `run` holds, in bytes.
    pub bytes: usize,
    pub run: Box<dyn FnOnce() -> Outcome + Send>,
}

/// A job in the queue.
pub struct QueuedJob {
    pub task: Arc<Task>,
    pub bytes: usize,
    pub run: Box<dyn FnOnce() -> Outcome + Send>,
}

/// The queue of background jobs. While it is not empty, [`THREADS_MAX`] threads run. A thread ends
/// only if it finds the queue empty.
#[derive(Default)]
pub struct JobQueue {
    threads: usize,
    waiting: VecDeque<QueuedJob>,
    waiting_bytes: usize,
}

impl JobQueue {
    /// Counts one more thread. Returns false if [`THREADS_MAX`] threads are running.
    pub fn reserve_thread(&mut self) -> bool {
        let is_free = self.threads < THREADS_MAX;
        self.threads += usize::from(is_free);
        is_free
    }

    /// Decrements the count of threads for a thread that could not be started.
    pub fn release_thread(&mut self) {
        self.threads -= 1;
    }

    /// Takes the oldest job for a running thread. If the queue is empty, decrements the count of
    /// threads and returns `None`: the thread must end.
    pub fn next(&mut self) -> Option<QueuedJob> {
        let next = self.waiting.pop_front();
        match &next {
            Some(next) => self.waiting_bytes -= next.bytes,
            None => self.threads -= 1,
        }
        next
    }

    pub fn has_room_for(&self, bytes: usize) -> bool {
        self.waiting.len() < WAITING_MAX && self.waiting_bytes + bytes <= WAITING_BYTES_MAX
    }

    pub fn push(&mut self, job: QueuedJob) {
        self.waiting_bytes += job.bytes;
        self.waiting.push_back(job);
    }

    /// Removes the matching jobs from the queue and returns their tasks.
    pub fn remove(&mut self, filter: &JobFilter) -> Vec<Arc<Task>> {
        let (removed, left): (VecDeque<_>, _) =
            self.waiting.drain(..).partition(|job| filter.matches(&job.task));
        self.waiting = left;
        self.waiting_bytes = self.waiting.iter().map(|job| job.bytes).sum();
        removed.into_iter().map(|job| job.task).collect()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<Task>> {
        self.waiting.iter().map(|job| &job.task)
    }

    pub fn is_idle(&self) -> bool {
        self.threads == 0
    }
}
