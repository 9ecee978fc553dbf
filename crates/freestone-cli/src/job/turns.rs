//! Which verbs of the background run, and which wait for their turn.

use std::collections::VecDeque;
use std::sync::Arc;

use serde_json::value::RawValue;

use super::task::{Task, Which};
use crate::control::protocol::Fault;

/// Verbs that run in the background at one time, each on a thread.
pub const THREADS_MAX: usize = 64;
/// Verbs that wait for their turn.
pub const WAITING_MAX: usize = 1024;
/// Their requests, all together.
const WAITING_BYTES_MAX: usize = 16 << 20;

pub type Outcome = Result<Box<RawValue>, Fault>;

/// A verb that is to run in the background.
pub struct Asked {
    /// Its device, or file.
    pub name: String,
    /// As it is shown.
    pub verb: String,
    pub tag: Option<String>,
    /// What `run` holds.
    pub bytes: usize,
    pub run: Box<dyn FnOnce() -> Outcome + Send>,
}

/// One that waits for its turn.
pub struct Waiting {
    pub task: Arc<Task>,
    pub bytes: usize,
    pub run: Box<dyn FnOnce() -> Outcome + Send>,
}

/// While any waits all threads are there, and each takes one more before it ends.
#[derive(Default)]
pub struct Turns {
    threads: usize,
    waiting: VecDeque<Waiting>,
    waiting_bytes: usize,
}

impl Turns {
    /// Whether one more thread may run verbs; from now on it does.
    pub fn begin(&mut self) -> bool {
        let begins = self.threads < THREADS_MAX;
        self.threads += usize::from(begins);
        begins
    }

    /// It could not be started.
    pub fn give_up(&mut self) {
        self.threads -= 1;
    }

    /// For a thread that has begun: the verb that waited for longest. There is none: it ends.
    pub fn next(&mut self) -> Option<Waiting> {
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

    pub fn wait(&mut self, one: Waiting) {
        self.waiting_bytes += one.bytes;
        self.waiting.push_back(one);
    }

    /// These wait no more.
    pub fn remove(&mut self, which: &Which) -> Vec<Arc<Task>> {
        let (gone, stay): (VecDeque<_>, _) = self.waiting.drain(..).partition(|one| which.is(&one.task));
        self.waiting = stay;
        self.waiting_bytes = self.waiting.iter().map(|one| one.bytes).sum();
        gone.into_iter().map(|one| one.task).collect()
    }

    pub fn waiting(&self) -> impl Iterator<Item = &Arc<Task>> {
        self.waiting.iter().map(|one| &one.task)
    }

    pub fn is_idle(&self) -> bool {
        self.threads == 0
    }
}
