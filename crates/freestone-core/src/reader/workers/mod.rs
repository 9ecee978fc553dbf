//! Worker threads of the process, one for each CPU. Readers of request queues pass requests to the workers,
//! so that one queue can use several CPUs.
//!
//! Workers execute only work that does not wait for a disk. The pool accepts a task only if a CPU is
//! available and few tasks are queued; otherwise the reader executes the request itself. So tasks start soon,
//! none can starve, and if readers keep all CPUs busy they execute their own requests.

#[cfg(not(loom))]
mod costs;
#[cfg(all(loom, test))]
mod models;
#[cfg(all(test, not(loom)))]
mod tests;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::pin::wait;
#[cfg(not(loom))]
use crate::plug::Plug;
use crate::sync::{Arc, AtomicU32, Condvar, LazyLock, Mutex, Ordering, thread};

#[cfg(not(loom))]
pub use costs::{Costs, CpuStart, MIN_BYTES};

/// A task, usually the synchronous part of one request.
pub type Task = Box<dyn FnOnce() + Send>;

/// Number of cheap tasks that a worker runs under one plug, so that each receiver of completions is woken
/// once.
const PLUGGED_TASKS: usize = 4;
/// Maximum number of tasks for each available CPU: a running task, and some queued tasks. The queued tasks
/// keep a worker busy while the reader executes a request itself or waits for its client's socket.
const TASKS_EACH: u32 = if cfg!(loom) { 2 } else { 4 };

/// A pool of worker threads that run tasks in FIFO order. Clones share the threads.
#[derive(Debug, Clone)]
pub struct Workers(Arc<Shared>);

/// Lock order: `state` is innermost. Tasks run, and are dropped, without the lock.
struct Shared {
    cpus: u32,
    state: Mutex<State>,
    ready: Condvar,
    /// Number of queued and running tasks. Written under `state`; read without the lock as a hint.
    tasks: AtomicU32,
    /// Number of readers that execute large requests themselves.
    busy_readers: AtomicU32,
}

#[derive(Default)]
struct State {
    /// Queued tasks, each with true if the task is expensive.
    waiting: VecDeque<(Task, bool)>,
    /// Number of sleeping threads (`asleep`), and of threads that were woken and have not run yet (`waking`).
    asleep: usize,
    waking: usize,
    started: usize,
    stop: bool,
}

impl State {
    /// Returns the number of threads that run tasks, or will run tasks soon.
    fn active(&self) -> usize {
        self.started - self.asleep
    }
}

static PROCESS: LazyLock<Workers> =
    LazyLock::new(|| Workers::new(std::thread::available_parallelism().map_or(1, std::num::NonZero::get)));

impl Workers {
    /// Returns the pool that the whole process shares.
    pub fn process() -> &'static Self {
        &PROCESS
    }

    /// Creates a pool for `cpus` CPUs, one of which is left to the reader. Threads are started on demand.
    pub fn new(cpus: usize) -> Self {
        Self(Arc::new(Shared {
            cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
            state: Mutex::default(),
            ready: Condvar::new(),
            tasks: AtomicU32::new(0),
            busy_readers: AtomicU32::new(0),
        }))
    }

    /// Creates a pool whose threads the caller starts, each with [`run`](Self::run).
    #[cfg(all(loom, test))]
    fn started(threads: usize) -> Self {
        let workers = Self::new(threads + 1);
        workers.0.state.lock().started = threads;
        workers
    }

    /// Returns true if a task would be accepted now.
    #[inline]
    pub fn has_capacity(&self) -> bool {
        // Relaxed: hints; `offer` checks again under the lock.
        let (tasks, busy_readers) =
            (self.0.tasks.load(Ordering::Relaxed), self.0.busy_readers.load(Ordering::Relaxed));
        tasks < TASKS_EACH * self.0.cpus.saturating_sub(1 + busy_readers)
    }

    /// Returns true if a worker is awake, so that a task needs no wake-up.
    #[inline]
    pub fn has_awake_worker(&self) -> bool {
        // Relaxed: a hint.
        self.0.tasks.load(Ordering::Relaxed) > 0
    }

    /// Registers that the calling reader executes a large request itself, until the guard is dropped.
    pub fn register_busy_reader(&self) -> BusyReader {
        // Relaxed: a hint.
        self.0.busy_readers.fetch_add(1, Ordering::Relaxed);
        BusyReader(Arc::clone(&self.0))
    }

    /// Queues a task. Wakes a worker if the task is `expensive`; otherwise usually relies on a worker that is
    /// awake.
    ///
    /// # Errors
    /// The task itself, if the pool is full or stopped; the caller must run it.
    pub fn offer(&self, task: Task, expensive: bool) -> Result<(), Task> {
        let mut state = self.0.state.lock();
        if state.stop || !self.has_capacity() {
            return Err(task);
        }
        // A wake-up costs as much as a cheap task. Without one, an active worker runs the task soon, unless
        // each active worker has a queued task already.
        let needs_more = expensive || state.active() == 0 || state.waiting.len() >= state.active();
        if needs_more
            && state.asleep == 0
            && (state.started as u32) < self.0.cpus.saturating_sub(1)
            && self.start().is_ok()
        {
            state.started += 1;
        }
        if state.started == 0 {
            return Err(task);
        }
        state.waiting.push_back((task, expensive));
        // Relaxed: written under the lock.
        self.0.tasks.fetch_add(1, Ordering::Relaxed);
        let wake = needs_more && state.asleep > 0;
        if wake {
            state.asleep -= 1;
            state.waking += 1;
        }
        drop(state);
        if wake {
            self.0.ready.notify_one();
        }
        Ok(())
    }

    /// Rejects new tasks. The threads exit when the queue is empty.
    pub fn stop(&self) {
        self.0.state.lock().stop = true;
        self.0.ready.notify_all();
    }

    fn start(&self) -> std::io::Result<()> {
        let workers = self.clone();
        thread::Builder::new().name("worker".into()).spawn(move || workers.run()).map(drop)
    }

    fn run(&self) {
        self.0.run();
    }
}

impl Shared {
    fn run(&self) {
        while let Some(task) = self.next_task() {
            #[cfg(not(loom))]
            let _plug = Plug::start();
            let (mut next, mut budget) = (Some(task), PLUGGED_TASKS);
            while let Some((task, expensive)) = next {
                // The panic hook has reported the panic. Dropping the task's request completes the request
                // with `Error::Gone`.
                let _ = catch_unwind(AssertUnwindSafe(task));
                budget = if expensive { 0 } else { budget - 1 };
                let mut state = self.state.lock();
                // Relaxed: written under the lock.
                self.tasks.fetch_sub(1, Ordering::Relaxed);
                next = if budget > 0 { state.waiting.pop_front() } else { None };
            }
        }
    }

    /// Waits for the next task. Returns `None` after `stop`, when the queue is empty.
    fn next_task(&self) -> Option<(Task, bool)> {
        let mut state = self.state.lock();
        loop {
            if let Some(next) = state.waiting.pop_front() {
                return Some(next);
            }
            if state.stop {
                state.started -= 1;
                return None;
            }
            state.asleep += 1;
            state = wait(&self.ready, state);
            // A thread that wakes up spuriously counts as the thread that was woken.
            if state.waking > 0 {
                state.waking -= 1;
            } else {
                state.asleep -= 1;
            }
        }
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "for {} CPUs", self.cpus)
    }
}

/// Guard of a reader that executes a large request itself. Dropping it unregisters the reader.
#[derive(Debug)]
pub struct BusyReader(Arc<Shared>);

impl Drop for BusyReader {
    fn drop(&mut self) {
        // Relaxed: a hint.
        self.0.busy_readers.fetch_sub(1, Ordering::Relaxed);
    }
}
