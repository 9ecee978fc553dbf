//! The thread of an origin that carries on what a device has answered.
//!
//! A completion runs on a thread of the device, which must not be called from there; what a completion leads to (the write
//! after the read of a copy, a request that waited) is a task for this thread. Nothing in a task waits for a device.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar};
use std::{io, thread};

use crate::sync::{Mutex, wait};

/// Something to do.
pub type Task = Box<dyn FnOnce() + Send>;

/// The thread's queue.
///
/// Lock order: `queue` is innermost. Tasks run, and are dropped, with nothing held.
#[derive(Default)]
pub struct Runner {
    queue: Mutex<Queue>,
    ready: Condvar,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    started: bool,
    stop: bool,
}

impl Runner {
    /// Starts the thread, unless it runs.
    ///
    /// # Errors
    /// The system's.
    pub fn start(self: &Arc<Self>) -> io::Result<()> {
        let mut queue = self.queue.lock();
        if !queue.started {
            let runner = Arc::clone(self);
            thread::Builder::new().name("cow".into()).spawn(move || runner.run())?;
            queue.started = true;
        }
        Ok(())
    }

    /// The thread will do this. What is left when it ends is done before.
    pub fn push(&self, task: impl FnOnce() + Send + 'static) {
        self.queue.lock().tasks.push_back(Box::new(task));
        self.ready.notify_one();
    }

    /// The thread ends when it has nothing to do. It is not waited for: what stops it may run on it.
    pub fn stop(&self) {
        self.queue.lock().stop = true;
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
                None if queue.stop => return None,
                None => queue = wait(&self.ready, queue),
            }
        }
    }
}
