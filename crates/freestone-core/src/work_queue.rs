//! A thread that carries on what a device below has answered.
//!
//! A completion runs on a thread of the device, which must not be called from there; what a completion leads to (the write
//! after the read of a copy, a request that waited) is a task for this thread.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::pin::wait;
use crate::sync::{Condvar, Mutex, thread};

/// Something to do.
pub type Task = Box<dyn FnOnce() + Send>;

/// The thread's queue. The thread is started when it may be needed; what is pushed before waits for it.
///
/// Lock order: `queue` is innermost. Tasks run, and are dropped, with nothing held.
pub struct WorkQueue {
    name: &'static str,
    queue: Mutex<Queue>,
    ready: Condvar,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    started: bool,
    stop: bool,
    ended: bool,
}

impl WorkQueue {
    /// A work queue whose thread will have this name.
    pub fn new(name: &'static str) -> Arc<Self> {
        Arc::new(Self { name, queue: Mutex::default(), ready: Condvar::new() })
    }

    /// Starts the thread, unless it runs.
    ///
    /// # Errors
    /// The system's.
    pub fn start(self: &Arc<Self>) -> io::Result<()> {
        let mut queue = self.queue.lock();
        if !queue.started {
            let work_queue = Arc::clone(self);
            thread::Builder::new().name(self.name.into()).spawn(move || work_queue.run())?;
            queue.started = true;
        }
        Ok(())
    }

    /// The thread will do this. Where it has ended the task is dropped, and so its requests are answered.
    pub fn push(&self, task: impl FnOnce() + Send + 'static) {
        self.offer(task);
    }

    /// As [`push`](Self::push); false where the thread has ended.
    pub fn offer(&self, task: impl FnOnce() + Send + 'static) -> bool {
        // Dropped outside of the lock.
        let task: Task = Box::new(task);
        let mut queue = self.queue.lock();
        let taken = !queue.ended;
        if taken {
            queue.tasks.push_back(task);
            self.ready.notify_one();
        }
        taken
    }

    /// The thread ends when it has nothing to do. It is not waited for: what stops it may run on it.
    pub fn stop(&self) {
        let mut queue = self.queue.lock();
        queue.stop = true;
        queue.ended |= !queue.started;
        self.ready.notify_one();
    }

    fn run(&self) {
        while let Some(task) = self.next() {
            // A panic was reported by its hook; the requests of the task are answered "gone" by being dropped.
            let _ = catch_unwind(AssertUnwindSafe(task));
        }
    }

    fn next(&self) -> Option<Task> {
        let mut queue = self.queue.lock();
        loop {
            match queue.tasks.pop_front() {
                Some(task) => return Some(task),
                None if queue.stop => {
                    queue.ended = true;
                    return None;
                }
                None => queue = wait(&self.ready, queue),
            }
        }
    }
}
