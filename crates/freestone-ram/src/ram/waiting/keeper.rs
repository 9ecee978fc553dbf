//! Signals to the [threads](crate::ram::family::threads) of a family (devices that share a memory pool), and
//! requests that wait for memory.

use std::sync::Arc;

use super::job::{Job, RequestOwner, WaitingRequest};
use freestone_core::clock::{TICK, now_ms};
use freestone_core::sync::{Condvar, Mutex, OnceLock};
use freestone_core::work_queue::WorkQueue;

/// Signals to the keeper thread, and the work queues of the family. Shared by the family and its
/// threads.
///
/// Lock order: `state` is a leaf lock.
pub(in crate::ram) struct Keeper {
    state: Mutex<KeeperState>,
    kicked: Condvar,
    /// Runs requests that waited, and tasks that must not run on a device's thread. Requests run in
    /// slices, so that none of them delays the others.
    work_queue: Arc<WorkQueue>,
    /// Runs lookups of zeroes in the base of a fork, which may wait for a disk.
    base_queue: Arc<WorkQueue>,
    starter: OnceLock<Starter>,
}

type Starter = Box<dyn Fn() -> std::io::Result<()> + Send + Sync>;

#[derive(Default)]
struct KeeperState {
    kick: bool,
    stop: bool,
    waiting: Vec<WaitingRequest>,
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
    /// Sets the function that starts the keeper thread. Called once per family.
    pub fn set_starter(&self, starter: Starter) {
        let set = self.starter.set(starter);
        debug_assert!(set.is_ok(), "a family has one keeper");
    }

    /// Starts the work queue and the keeper thread, unless they run or there is no
    /// [starter](Self::set_starter).
    pub fn start(&self) -> std::io::Result<()> {
        let mut state = self.state.lock();
        let Some(starter) = self.starter.get().filter(|_| !state.running) else { return Ok(()) };
        self.work_queue.start()?;
        let keeper = starter();
        // Count as running even if the keeper thread could not be started: requests need only the
        // work queue.
        state.running = true;
        keeper
    }

    /// Returns true if the work queue was started.
    pub fn is_running(&self) -> bool {
        self.state.lock().running
    }

    /// Runs the tasks of the work queue on this thread.
    #[cfg(test)]
    pub fn run_queued(&self) {
        self.work_queue.run_queued();
    }

    /// Stops the keeper thread and the work queues after their current tasks.
    pub fn stop(&self) {
        self.state.lock().stop = true;
        self.kicked.notify_all();
        self.work_queue.stop();
        self.base_queue.stop();
    }

    /// Starts the threads that a family with a fork of another device needs.
    pub fn start_over_base(&self) -> std::io::Result<()> {
        self.start()?;
        self.base_queue.start()
    }

    /// Queues a task that may wait for the disk of a base.
    pub fn run_on_base_queue(&self, task: impl FnOnce() + Send + 'static) {
        self.base_queue.push(task);
    }

    /// Wakes the keeper thread: memory may be short, or an obstacle to eviction may be gone.
    pub fn kick(&self) {
        let mut state = self.state.lock();
        if !state.kick {
            state.kick = true;
            self.kicked.notify_one();
        }
    }

    /// Queues a request until memory is freed, and wakes the keeper thread.
    pub fn wait_for_eviction(&self, request: WaitingRequest) {
        let mut state = self.state.lock();
        state.waiting.push(request);
        state.kick = true;
        self.kicked.notify_one();
    }

    /// Queues a request until memory is freed or the next once-a-second tick, without waking the
    /// keeper thread.
    pub fn wait_for_tick(&self, request: WaitingRequest) {
        self.state.lock().waiting.push(request);
    }

    /// Retries all requests that wait for memory.
    pub fn wake_memory_waiters(&self) {
        self.retry_waiting(|_| true, |job| job);
    }

    /// Retries requests that wait for memory, of the devices for which `is` returns true.
    pub fn wake_memory_waiters_for(&self, is: impl Fn(&dyn RequestOwner) -> bool) {
        self.retry_waiting(is, |job| job);
    }

    /// Retries all requests that wait for memory a last time, as nothing can be freed: those that
    /// find no memory fail.
    pub fn retry_last_time(&self) {
        self.retry_waiting(|_| true, Job::with_last_try);
    }

    /// As [`retry_last_time`](Self::retry_last_time), for the devices for which `is` returns true.
    pub fn retry_last_time_for(&self, is: impl Fn(&dyn RequestOwner) -> bool) {
        self.retry_waiting(is, Job::with_last_try);
    }

    fn retry_waiting(&self, is: impl Fn(&dyn RequestOwner) -> bool, how: fn(Job) -> Job) {
        let mut state = self.state.lock();
        let waiting = std::mem::take(&mut state.waiting);
        let (now, still): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|request| is(&*request.owner));
        state.waiting = still;
        drop(state);
        for WaitingRequest { owner, job } in now {
            self.resume(WaitingRequest { owner, job: how(job) });
        }
    }

    /// Returns true if requests wait for memory, of devices for which `is` returns true.
    pub fn has_waiting(&self, is: impl Fn(&dyn RequestOwner) -> bool) -> bool {
        self.state.lock().waiting.iter().any(|request| is(&*request.owner))
    }

    pub fn resume(&self, WaitingRequest { owner, job }: WaitingRequest) {
        self.run(move || owner.resume_slice(job));
    }

    pub fn run(&self, task: impl FnOnce() + Send + 'static) {
        self.work_queue.push(task);
    }

    /// Returns true if the keeper thread must run an eviction round: it was kicked or requests wait
    /// for memory.
    pub fn is_wanted(&self) -> bool {
        let state = self.state.lock();
        state.kick || !state.waiting.is_empty()
    }

    /// Waits until the keeper is kicked, at most until one tick after `last_tick`. Returns true if
    /// requests wait for memory; `None` if the keeper thread must end.
    pub fn next_round(&self, last_tick: u64) -> Option<bool> {
        let mut state = self.state.lock();
        while !state.kick && !state.stop && now_ms() - last_tick < TICK.as_millis() as u64 {
            state = self.kicked.wait_timeout(state, TICK).0;
        }
        if state.stop {
            return None;
        }
        state.kick = false;
        Some(!state.waiting.is_empty())
    }
}
