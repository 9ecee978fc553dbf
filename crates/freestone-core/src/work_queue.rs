//! Threads that carry on what a device below has answered, and other work that is not for the
//! thread that finds it.
//!
//! A completion runs on a thread of the device, which must not be called from there; what a
//! completion leads to (the write after the read of a copy, a request that waited) is a task for
//! these threads: of most queues one.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::pin::wait;
#[cfg(not(loom))]
use crate::plug::Plug;
use crate::sync::{Condvar, Mutex, thread};

/// Tasks that are there and are done under one plug, at most.
const PLUGGED: usize = 32;

/// Something to do.
pub type Task = Box<dyn FnOnce() + Send>;

/// Tasks, and the threads that do them in the order in which they came. The threads are started
/// when they may be needed; what is pushed before waits for them.
///
/// Lock order: `queue` is innermost. Tasks run, and are dropped, with nothing held.
pub struct WorkQueue {
    name: &'static str,
    threads: usize,
    /// Tasks that wait for nothing: what those that are there submit is one batch.
    is_plugged: bool,
    queue: Mutex<Queue>,
    ready: Condvar,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    started: usize,
    stop: bool,
    /// Nobody does any more tasks.
    ended: bool,
}

impl WorkQueue {
    /// A work queue whose thread will have this name.
    pub fn new(name: &'static str) -> Arc<Self> {
        Self::with_threads(name, 1)
    }

    /// As [`new`](Self::new), for tasks that submit requests and wait for nothing: its thread does
    /// those that are there under one plug.
    pub fn plugged(name: &'static str) -> Arc<Self> {
        Self::with(name, 1, true)
    }

    /// A work queue of so many threads, which will have this name.
    pub fn with_threads(name: &'static str, threads: usize) -> Arc<Self> {
        Self::with(name, threads, false)
    }

    fn with(name: &'static str, threads: usize, is_plugged: bool) -> Arc<Self> {
        Arc::new(Self { name, threads, is_plugged, queue: Mutex::default(), ready: Condvar::new() })
    }

    /// Starts the threads, unless they run.
    ///
    /// # Errors
    /// The system's.
    pub fn start(self: &Arc<Self>) -> io::Result<()> {
        let mut queue = self.queue.lock();
        while queue.started < self.threads {
            let work_queue = Arc::clone(self);
            thread::Builder::new().name(self.name.into()).spawn(move || work_queue.run())?;
            queue.started += 1;
        }
        Ok(())
    }

    /// Tasks that wait.
    pub fn len(&self) -> usize {
        self.queue.lock().tasks.len()
    }

    /// Whether no task waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A thread will do this. Where they have ended the task is dropped, and so its requests are
    /// answered.
    pub fn push(&self, task: impl FnOnce() + Send + 'static) {
        self.offer(task);
    }

    /// As [`push`](Self::push); false where the threads have ended.
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

    /// The threads end when they have nothing to do. They are not waited for: what stops them may
    /// run on one.
    pub fn stop(&self) {
        let mut queue = self.queue.lock();
        queue.stop = true;
        queue.ended |= queue.started == 0;
        self.ready.notify_all();
    }

    /// Does what is queued on the calling thread, and what that queues.
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
            let (mut next, mut left) = (Some(task), if self.is_plugged { PLUGGED } else { 1 });
            while let Some(task) = next {
                // A panic was reported by its hook; the requests of the task are answered "gone" by
                // being dropped.
                let _ = catch_unwind(AssertUnwindSafe(task));
                left -= 1;
                next = if left > 0 { self.queue.lock().tasks.pop_front() } else { None };
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::mpsc;

    #[test]
    fn tasks_run_in_order_and_a_panic_ends_none_of_the_others() {
        let queue = WorkQueue::new("test");
        let (tell, told) = mpsc::channel();
        for n in 0..5 {
            let tell = tell.clone();
            queue.push(move || {
                assert!(n != 2, "a panic that the test wants");
                tell.send(n).unwrap();
            });
        }
        assert_eq!((queue.len(), queue.is_empty()), (5, false));
        queue.start().unwrap();
        assert_eq!([0; 4].map(|_| told.recv().unwrap()), [0, 1, 3, 4]);
    }

    #[test]
    fn all_threads_work_at_once() {
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
    fn what_is_queued_when_it_stops_is_done_and_what_comes_then_is_dropped() {
        let queue = WorkQueue::with_threads("test", 2);
        let (tell, told) = mpsc::channel();
        for n in 0..100 {
            let tell = tell.clone();
            queue.push(move || tell.send(n).unwrap());
        }
        queue.start().unwrap();
        queue.stop();
        let mut done: Vec<i32> = (0..100).map(|_| told.recv().unwrap()).collect();
        done.sort_unstable();
        assert!(done.into_iter().eq(0..100));
        // The threads end.
        while queue.offer(|| ()) {
            thread::yield_now();
        }
        let dropped = Arc::new(());
        let held = Arc::clone(&dropped);
        queue.push(move || drop(held));
        assert_eq!(Arc::strong_count(&dropped), 1);
    }

    #[test]
    fn without_threads_the_caller_does_it() {
        let queue = WorkQueue::new("test");
        let (tell, told) = mpsc::channel();
        let again = Arc::clone(&queue);
        queue.push(move || again.push(move || tell.send(()).unwrap()));
        queue.run_queued();
        assert_eq!(told.try_recv(), Ok(()));
        queue.stop();
        assert!(!queue.offer(|| ()));
    }
}
