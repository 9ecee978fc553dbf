//! What the [threads](super::threads) of a family are told, and who waits for what they do.

use std::sync::{Arc, PoisonError};

use super::Ram;
use super::job::Job;
use crate::clock::{TICK, now_ms};
use freestone_core::sync::{Condvar, Mutex, MutexGuard, OnceLock};
use freestone_core::work_queue::WorkQueue;

/// What the keeper is told, and the work queue of the family. The family owns it, its threads share
/// it.
///
/// Lock order: `state` is taken last, and nothing under it.
pub(super) struct Keeper {
    state: Mutex<KeeperState>,
    kicked: Condvar,
    /// Carries on with requests that waited, in slices, so that none holds up the others, and does
    /// what must not be done on a thread of a device.
    work_queue: Arc<WorkQueue>,
    /// Looks at what of a base reads as zeroes, which may wait for a disk.
    looks: Arc<WorkQueue>,
    starter: OnceLock<Starter>,
}

/// Starts the keeper's thread.
type Starter = Box<dyn Fn() -> std::io::Result<()> + Send + Sync>;

#[derive(Default)]
struct KeeperState {
    kick: bool,
    stop: bool,
    /// Requests that wait for memory.
    waiting: Vec<(Ram, Job)>,
    running: bool,
}

impl Default for Keeper {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            kicked: Condvar::new(),
            work_queue: WorkQueue::new("ram"),
            looks: WorkQueue::new("ram-base"),
            starter: OnceLock::new(),
        }
    }
}

impl Keeper {
    fn lock(&self) -> MutexGuard<'_, KeeperState> {
        self.state.lock()
    }

    /// Says how the keeper's thread is started; once.
    pub fn set_starter(&self, starter: Starter) {
        let set = self.starter.set(starter);
        debug_assert!(set.is_ok(), "a family has one keeper");
    }

    /// Starts the threads, unless they run, or [nobody said](Self::set_starter) how.
    pub fn start(&self) -> std::io::Result<()> {
        let mut state = self.lock();
        let Some(starter) = self.starter.get().filter(|_| !state.running) else { return Ok(()) };
        self.work_queue.start()?;
        let keeper = starter();
        // A work queue alone can do what requests need.
        state.running = true;
        keeper
    }

    /// Whether there is somebody to carry on with requests.
    pub fn is_running(&self) -> bool {
        self.lock().running
    }

    /// Does what the work queue has, on this thread.
    #[cfg(test)]
    pub fn run_queued(&self) {
        self.work_queue.run_queued();
    }

    /// Ends the threads when they have done what they are at.
    pub fn stop(&self) {
        self.lock().stop = true;
        self.kicked.notify_all();
        self.work_queue.stop();
        self.looks.stop();
    }

    /// Starts the threads of a family with a base that is another device.
    pub fn start_over_base(&self) -> std::io::Result<()> {
        self.start()?;
        self.looks.start()
    }

    /// Runs what may wait for the disk of a base.
    pub fn look(&self, task: impl FnOnce() + Send + 'static) {
        self.looks.push(task);
    }

    /// Memory may be short, or what forbade to spill may be gone.
    pub fn kick(&self) {
        let mut state = self.lock();
        if !state.kick {
            state.kick = true;
            self.kicked.notify_one();
        }
    }

    /// The request goes on when memory has been freed.
    pub fn wait_for_memory(&self, ram: Ram, job: Job) {
        let mut state = self.lock();
        state.waiting.push((ram, job));
        state.kick = true;
        self.kicked.notify_one();
    }

    /// Likewise; nothing is done for that before the keeper looks at its memory anyway.
    pub fn wait_for_tick(&self, ram: Ram, job: Job) {
        self.lock().waiting.push((ram, job));
    }

    /// Requests that wait for memory try again.
    pub fn memory_freed(&self) {
        self.let_go(|_| true, |job| job);
    }

    /// As [`memory_freed`](Self::memory_freed), for the requests of some devices.
    pub fn memory_freed_for(&self, is: impl Fn(&Ram) -> bool) {
        self.let_go(is, |job| job);
    }

    /// Nothing can be freed: requests that wait for memory try once more, and fail if it is not
    /// there.
    pub fn give_up(&self) {
        self.let_go(|_| true, Job::for_the_last_time);
    }

    /// As [`give_up`](Self::give_up), for the requests of some devices.
    pub fn give_up_for(&self, is: impl Fn(&Ram) -> bool) {
        self.let_go(is, Job::for_the_last_time);
    }

    fn let_go(&self, is: impl Fn(&Ram) -> bool, how: fn(Job) -> Job) {
        let mut state = self.lock();
        let waiting = std::mem::take(&mut state.waiting);
        let (now, still): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|(ram, _)| is(ram));
        state.waiting = still;
        drop(state);
        for (ram, job) in now {
            self.resume(ram, how(job));
        }
    }

    /// Whether requests of some devices wait for memory.
    pub fn is_awaited(&self, is: impl Fn(&Ram) -> bool) -> bool {
        self.lock().waiting.iter().any(|(ram, _)| is(ram))
    }

    /// The request goes on.
    pub fn resume(&self, ram: Ram, job: Job) {
        self.run(move || ram.carry_on(job));
    }

    /// The work queue does what must not be done on the thread that found it.
    pub fn run(&self, task: impl FnOnce() + Send + 'static) {
        self.work_queue.push(task);
    }

    /// Whether somebody waits for what a round of spilling frees.
    pub fn is_wanted(&self) -> bool {
        let state = self.lock();
        state.kick || !state.waiting.is_empty()
    }

    /// Waits until there may be something for the keeper, for a tick after `last_tick` at most.
    /// Returns whether requests wait for memory; `None`: it is to end.
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
