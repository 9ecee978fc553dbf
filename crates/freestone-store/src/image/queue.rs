//! Work queue with a few threads that exist only while there is work.

use crate::rt::Condvar;
use crate::rt::sync::Arc;
use crate::rt::thread;
use crate::rt::time::Duration;
use freestone_core::sync::Mutex;
use std::collections::VecDeque;

/// Time after which an idle thread exits.
const IDLE: Duration = Duration::from_secs(10);

/// FIFO queue of work. After the queue is dropped, its threads finish the queued work and exit.
pub struct Queue<T>(Arc<Inner<T>>);

struct Inner<T> {
    name: &'static str,
    threads_max: usize,
    run: fn(T),
    state: Mutex<State<T>>,
    more: Condvar,
}

struct State<T> {
    work: VecDeque<T>,
    threads: usize,
    idle: usize,
    is_closed: bool,
}

impl<T: Send + 'static> Queue<T> {
    pub fn new(name: &'static str, threads_max: usize, run: fn(T)) -> Self {
        let state = Mutex::new(State { work: VecDeque::new(), threads: 0, idle: 0, is_closed: false });
        Self(Arc::new(Inner { name, threads_max, run, state, more: Condvar::new() }))
    }

    /// Queues work. Returns the work as an error if the queue has no thread and cannot spawn one.
    pub fn push(&self, work: T) -> Result<(), T> {
        let inner = &self.0;
        let mut state = inner.state.lock();
        state.work.push_back(work);
        // Each idle thread can run one item, so a new thread is needed only for more items than idle threads.
        if state.idle >= state.work.len() {
            inner.more.notify_one();
        } else if state.threads < inner.threads_max {
            state.threads += 1;
            let of_thread = Arc::clone(inner);
            let made = thread::Builder::new().name(inner.name.into()).spawn(move || of_thread.run_thread());
            if made.is_err() {
                state.threads -= 1;
                if state.threads == 0
                    && let Some(work) = state.work.pop_back()
                {
                    return Err(work);
                }
            }
        }
        Ok(())
    }
}

#[cfg(all(loom, test))]
impl<T> Queue<T> {
    /// Makes the waits of idle threads time out, for loom models.
    pub fn expire_waits(&self) {
        self.0.more.expire_waits();
    }
}

impl<T> Drop for Queue<T> {
    fn drop(&mut self) {
        self.0.state.lock().is_closed = true;
        self.0.more.notify_all();
    }
}

impl<T> Inner<T> {
    fn run_thread(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(work) = state.work.pop_front() {
                freestone_core::trail::arrive!();
                drop(state);
                (self.run)(work);
                state = self.state.lock();
                continue;
            }
            if state.is_closed {
                state.threads -= 1;
                return;
            }
            state.idle += 1;
            let timed_out;
            (state, timed_out) = self.more.wait_timeout(state, IDLE);
            state.idle -= 1;
            if timed_out && state.work.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}
