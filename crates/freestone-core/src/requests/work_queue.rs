//! Work queues: threads that continue requests after a lower device has completed them, and other deferred
//! work.
//!
//! A completion runs on a thread of the lower device and must not call that device. The continuation (such as
//! the write after the read of a copy, or a held request) is a task for a work queue. Most queues have one
//! thread.

use std::collections::VecDeque;
use std::io;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::pin::wait;
#[cfg(not(loom))]
use crate::plug::Plug;
use crate::sync::{Condvar, Mutex, thread};

/// Maximum number of queued tasks that run under one plug.
const PLUGGED: usize = 32;

/// A function to be called by a thread of a work queue.
pub type Task = Box<dyn FnOnce() + Send>;

/// A FIFO queue of tasks and its threads. Tasks can be pushed before the threads are started.
///
/// Lock order: `queue` is innermost. Tasks run, and are dropped, without the lock.
pub struct WorkQueue {
    name: &'static str,
    threads: usize,
    /// True if tasks only submit requests and never wait. A batch of tasks then runs under one plug.
    is_plugged: bool,
    queue: Mutex<Queue>,
    ready: Condvar,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    started: usize,
    stop: bool,
    /// True if all threads have ended, so that no task will run any more.
    ended: bool,
}

impl WorkQueue {
    /// Creates a queue with one thread named `name`.
    pub fn new(name: &'static str) -> Arc<Self> {
        Self::with_threads(name, 1)
    }

    /// Creates a queue with one thread, for tasks that submit requests and never wait. The thread runs queued
    /// tasks under one plug.
    pub fn plugged(name: &'static str) -> Arc<Self> {
        Self::create(name, 1, true)
    }

    /// Creates a queue with `threads` threads named `name`.
    pub fn with_threads(name: &'static str, threads: usize) -> Arc<Self> {
        Self::create(name, threads, false)
    }

    fn create(name: &'static str, threads: usize, is_plugged: bool) -> Arc<Self> {
        Arc::new(Self { name, threads, is_plugged, queue: Mutex::default(), ready: Condvar::new() })
    }

    /// Starts the threads of the queue that do not run yet.
    pub fn start(self: &Arc<Self>) -> io::Result<()> {
        let mut queue = self.queue.lock();
        while queue.started < self.threads {
            let work_queue = Arc::clone(self);
            thread::Builder::new().name(self.name.into()).spawn(move || work_queue.run())?;
            queue.started += 1;
        }
        Ok(())
    }

    /// Returns the number of queued tasks.
    pub fn len(&self) -> usize {
        self.queue.lock().tasks.len()
    }

    /// Returns true if no task is queued.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Queues a task. If the threads have ended, the task is dropped, which completes its requests with an
    /// error.
    pub fn push(&self, task: impl FnOnce() + Send + 'static) {
        self.try_push(task);
    }

    /// Queues a task like [`push`](Self::push). Returns false if the threads have ended and the task was
    /// dropped.
    pub fn try_push(&self, task: impl FnOnce() + Send + 'static) -> bool {
        // Boxed before the lock is taken, so that a rejected task is dropped after the lock is released.
        let task: Task = Box::new(task);
        let mut queue = self.queue.lock();
        let accepted = !queue.ended;
        if accepted {
            queue.tasks.push_back(task);
            self.ready.notify_one();
        }
        accepted
    }

    /// Makes the threads exit when the queue is empty. Does not wait for the threads, because the calling
    /// thread may be one of the queue's threads.
    pub fn stop(&self) {
        let mut queue = self.queue.lock();
        queue.stop = true;
        queue.ended |= queue.started == 0;
        self.ready.notify_all();
    }

    /// Runs queued tasks on the calling thread until the queue is empty.
    pub fn run_queued(&self) {
        loop {
            let Some(task) = self.queue.lock().tasks.pop_front() else { return };
            let _ = catch_unwind(AssertUnwindSafe(task));
        }
    }

    fn run(&self) {
        while let Some(task) = self.next() {
            #[cfg(not(loom))]
            let _plug = self.is_plugged.then(Plug::start);
            let (mut next, mut budget) = (Some(task), if self.is_plugged { PLUGGED } else { 1 });
            while let Some(task) = next {
                // The panic hook has reported the panic. Dropping the task's requests completes them with
                // `Error::Gone`.
                let _ = catch_unwind(AssertUnwindSafe(task));
                budget -= 1;
                next = if budget > 0 { self.queue.lock().tasks.pop_front() } else { None };
            }
        }
    }

    fn next(&self) -> Option<Task> {
        let mut queue = self.queue.lock();
        loop {
            match queue.tasks.pop_front() {
                Some(task) => return Some(task),
                None if queue.stop => {
                    queue.started -= 1;
                    queue.ended |= queue.started == 0;
                    return None;
                }
                None => queue = wait(&self.ready, queue),
            }
        }
    }
}

/// A queue with one thread that stops when this owner is dropped. Queued tasks still run.
pub struct OwnedQueue(Arc<WorkQueue>);

impl OwnedQueue {
    /// Creates a queue whose thread, named `name`, is started later.
    pub fn new(name: &'static str) -> Self {
        Self(WorkQueue::new(name))
    }

    /// Creates a queue and starts its thread, for tasks such as a shutdown: when they are needed, the system
    /// may refuse new threads (pids.max, `RLIMIT_NPROC`).
    ///
    /// # Errors
    /// The error from starting the thread.
    pub fn started(name: &'static str) -> io::Result<Self> {
        let queue = Self::new(name);
        queue.start()?;
        Ok(queue)
    }
}

impl Deref for OwnedQueue {
    type Target = Arc<WorkQueue>;

    fn deref(&self) -> &Arc<WorkQueue> {
        &self.0
    }
}

impl Drop for OwnedQueue {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::mpsc;

    #[test]
    fn tasks_run_in_order_despite_panic() {
        let queue = WorkQueue::new("test");
        let (tx, rx) = mpsc::channel();
        for n in 0..5 {
            let tx = tx.clone();
            queue.push(move || {
                assert!(n != 2, "a panic that the test wants");
                tx.send(n).unwrap();
            });
        }
        assert_eq!((queue.len(), queue.is_empty()), (5, false));
        queue.start().unwrap();
        assert_eq!([0; 4].map(|_| rx.recv().unwrap()), [0, 1, 3, 4]);
    }

    #[test]
    fn all_threads_run_tasks() {
        let queue = WorkQueue::with_threads("test", 3);
        let all = Arc::new(std::sync::Barrier::new(4));
        queue.start().unwrap();
        for _ in 0..3 {
            let all = Arc::clone(&all);
            queue.push(move || {
                all.wait();
            });
        }
        all.wait();
    }

    #[test]
    fn stop_runs_queued_tasks_and_drops_later_ones() {
        let queue = WorkQueue::with_threads("test", 2);
        let (tx, rx) = mpsc::channel();
        for n in 0..100 {
            let tx = tx.clone();
            queue.push(move || tx.send(n).unwrap());
        }
        queue.start().unwrap();
        queue.stop();
        let mut done: Vec<i32> = (0..100).map(|_| rx.recv().unwrap()).collect();
        done.sort_unstable();
        assert!(done.into_iter().eq(0..100));
        // Wait until the threads have ended.
        while queue.try_push(|| ()) {
            thread::yield_now();
        }
        let dropped = Arc::new(());
        let held = Arc::clone(&dropped);
        queue.push(move || drop(held));
        assert_eq!(Arc::strong_count(&dropped), 1);
    }

    #[test]
    fn run_queued_runs_tasks_on_caller() {
        let queue = WorkQueue::new("test");
        let (tx, rx) = mpsc::channel();
        let same_queue = Arc::clone(&queue);
        queue.push(move || same_queue.push(move || tx.send(()).unwrap()));
        queue.run_queued();
        assert_eq!(rx.try_recv(), Ok(()));
        queue.stop();
        assert!(!queue.try_push(|| ()));
    }
}
