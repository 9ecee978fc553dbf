//! The threads that carry on requests after their disks have answered: a fixed number for all images of the process. They
//! never wait for a disk, so a slow one holds up nobody else's requests.

use freestone_core::sync::{Condvar, Mutex, MutexGuard, OnceLock, thread};
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;

/// Most threads; unpacking clusters is their only long work.
const MAX_THREADS: usize = 4;

type Task = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Pool {
    /// Held for a few instructions. At most one task for each request that is under way.
    tasks: Mutex<VecDeque<Task>>,
    arrived: Condvar,
}

static POOL: Pool = Pool { tasks: Mutex::new(VecDeque::new()), arrived: Condvar::new() };

/// Starts the threads, once in the life of the process.
pub(super) fn start() -> io::Result<()> {
    static STARTED: Mutex<usize> = Mutex::new(0);
    static WANTED: OnceLock<usize> = OnceLock::new();
    let wanted =
        *WANTED.get_or_init(|| thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS));
    let mut started = STARTED.lock();
    while *started < wanted {
        thread::Builder::new().name("qcow2".into()).spawn(|| POOL.work())?;
        *started += 1;
    }
    Ok(())
}

/// Runs `task` on one of the threads.
pub(super) fn run(task: impl FnOnce() + Send + 'static) {
    POOL.lock().push_back(Box::new(task));
    POOL.arrived.notify_one();
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Task>> {
        self.tasks.lock()
    }

    fn work(&self) {
        let mut tasks = self.lock();
        loop {
            if let Some(task) = tasks.pop_front() {
                drop(tasks);
                // A task that panics ends its request, which is answered when it is dropped, and not the thread.
                let _ = catch_unwind(AssertUnwindSafe(task));
                tasks = self.lock();
            } else {
                tasks = self.arrived.wait(tasks).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}
