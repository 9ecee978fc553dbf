//! Signals to a family's [threads](super::threads), and requests that wait for memory.

use std::sync::{Arc, PoisonError};

use super::Ram;
use super::job::Job;
use crate::clock::{TICK, now_ms};
use freestone_core::sync::{Condvar, Mutex, MutexGuard, OnceLock};
use freestone_core::work_queue::WorkQueue;

/// Signals to the keeper thread, and the work queue of the family. Owned by the family and shared
/// by its threads.
///
/// Lock order: `state` is a leaf lock.
pub(super) struct Keeper {
    state: Mutex<KeeperState>,
    kicked: Condvar,
    /// Runs requests that waited, in slices, so that none delays the others, and tasks that must
    /// not run on a device's thread.
    work_queue: Arc<WorkQueue>,
    /// Runs lookups of zeroes in a base, which may wait for a disk.
    base_queue: Arc<WorkQueue>,
    starter: OnceLock<Starter>,
}

type Starter = Box<dyn Fn() -> std::io::Result<()> + Send + Sync>;

#[derive(Default)]
struct KeeperState {
    kick: bool,
    stop: bool,
    waiting: Vec<(Ram, Job)>,
    running: bool,
}

impl Default for Keeper {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            kicked: Condvar::new(),
            work_queue: WorkQueue::new("ram"),
            base_queue: WorkQueue::new("ram-base"),
            starter: OnceLock::new(),
        }
    }
}

impl Keeper {
    fn lock(&self) -> MutexGuard<'_, KeeperState> {
        self.state.lock()
    }

    /// Sets the function that starts the keeper's thread; called once.
    pub fn set_starter(&self, starter: Starter) {
        let set = self.starter.set(starter);
        debug_assert!(set.is_ok(), "a family has one keeper");
    }

    /// Starts the threads, unless they run or there is no [starter](Self::set_starter).
    pub fn start(&self) -> std::io::Result<()> {
        let mut state = self.lock();
        let Some(starter) = self.starter.get().filter(|_| !state.running) else { return Ok(()) };
        self.work_queue.start()?;
        let keeper = starter();
        // The work queue alone is enough for requests.
        state.running = true;
        keeper
    }

    /// Returns true if the work queue runs.
    pub fn is_running(&self) -> bool {
        self.lock().running
    }

    /// Runs the queued tasks on this thread.
    #[cfg(test)]
    pub fn run_queued(&self) {
        self.work_queue.run_queued();
    }

    /// Stops the threads after their current task.
    pub fn stop(&self) {
        self.lock().stop = true;
        self.kicked.notify_all();
        self.work_queue.stop();
        self.base_queue.stop();
    }

    /// Starts the threads of a family with another device as base.
    pub fn start_over_base(&self) -> std::io::Result<()> {
        self.start()?;
        self.base_queue.start()
    }

    /// Queues a task that may wait for a base's disk.
    pub fn run_on_base_queue(&self, task: impl FnOnce() + Send + 'static) {
        self.base_queue.push(task);
    }

    /// Wakes the keeper: memory may be short, or an obstacle to eviction may be gone.
    pub fn kick(&self) {
        let mut state = self.lock();
        if !state.kick {
            state.kick = true;
            self.kicked.notify_one();
        }
    }

    /// Queues a request until memory is freed, and wakes the keeper.
    pub fn wait_for_memory(&self, ram: Ram, job: Job) {
        let mut state = self.lock();
        state.waiting.push((ram, job));
        state.kick = true;
        self.kicked.notify_one();
    }

    /// Queues a request until memory is freed, without waking the keeper before its next tick.
    pub fn wait_for_tick(&self, ram: Ram, job: Job) {
        self.lock().waiting.push((ram, job));
    }

    /// Retries all requests that wait for memory.
    pub fn memory_freed(&self) {
        self.retry_waiting(|_| true, |job| job);
    }

    /// As [`memory_freed`](Self::memory_freed), for the requests of some devices.
    pub fn memory_freed_for(&self, is: impl Fn(&Ram) -> bool) {
        self.retry_waiting(is, |job| job);
    }

    /// Retries all requests that wait for memory a last time: nothing can be freed.
    pub fn retry_last_time(&self) {
        self.retry_waiting(|_| true, Job::with_last_try);
    }

    /// As [`retry_last_time`](Self::retry_last_time), for the requests of some devices.
    pub fn retry_last_time_for(&self, is: impl Fn(&Ram) -> bool) {
        self.retry_waiting(is, Job::with_last_try);
    }

    fn retry_waiting(&self, is: impl Fn(&Ram) -> bool, how: fn(Job) -> Job) {
        let mut state = self.lock();
        let waiting = std::mem::take(&mut state.waiting);
        let (now, still): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|(ram, _)| is(ram));
        state.waiting = still;
        drop(state);
        for (ram, job) in now {
            self.resume(ram, how(job));
        }
    }

    /// Returns true if requests of some devices wait for memory.
    pub fn has_waiting(&self, is: impl Fn(&Ram) -> bool) -> bool {
        self.lock().waiting.iter().any(|(ram, _)| is(ram))
    }

    pub fn resume(&self, ram: Ram, job: Job) {
        self.run(move || ram.resume_slice(job));
    }

    pub fn run(&self, task: impl FnOnce() + Send + 'static) {
        self.work_queue.push(task);
    }

    /// Returns true if an eviction round is requested.
    pub fn is_wanted(&self) -> bool {
        let state = self.lock();
        state.kick || !state.waiting.is_empty()
    }

    /// Waits for a signal, at most until one tick after `last_tick`. Returns whether requests wait
    /// for memory; `None` if the thread must end.
    pub fn next_round(&self, last_tick: u64) -> Option<bool> {
        let mut state = self.lock();
        while !state.kick && !state.stop && now_ms() - last_tick < TICK.as_millis() as u64 {
            state = self.kicked.wait_timeout(state, TICK).unwrap_or_else(PoisonError::into_inner).0;
        }
        if state.stop {
            return None;
        }
        state.kick = false;
        Some(!state.waiting.is_empty())
    }
}
