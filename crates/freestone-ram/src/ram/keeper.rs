//! What the [threads](super::threads) of a family are told, and who waits for what they do.

use std::collections::VecDeque;
use std::sync::PoisonError;

use super::Ram;
use super::job::Job;
use super::waiter::Wanted;
use crate::clock::{TICK, now_ms};
use crate::spill::reads::Late;
use freestone_core::sync::{Condvar, Mutex, MutexGuard, OnceLock};

/// What the two threads are told. The family owns it, they share it.
///
/// Lock order: `state` is taken last, and nothing under it.
#[derive(Default)]
pub(super) struct Keeper {
    state: Mutex<State>,
    kicked: Condvar,
    ready: Condvar,
    starter: OnceLock<Starter>,
}

/// Starts the runner, and then the keeper.
pub(super) struct Starter {
    pub runner: Box<dyn Fn() -> std::io::Result<()> + Send + Sync>,
    pub keeper: Box<dyn Fn() -> std::io::Result<()> + Send + Sync>,
}

#[derive(Default)]
struct State {
    kick: bool,
    stop: bool,
    /// Requests that wait for memory.
    waiting: Vec<(Ram, Job)>,
    /// What the runner has to do.
    ready: VecDeque<Task>,
    running: bool,
}

/// Something for the runner.
pub(super) enum Task {
    /// A request goes on.
    Resume(Ram, Job),
    /// Pages that could not be read together are read one by one.
    Reread(Vec<Wanted>),
    /// There is room for reads that wait.
    StartReads,
    /// These are late.
    Fail(Vec<Late>),
}

impl Keeper {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Says how the threads are started; once.
    pub fn set_starter(&self, starter: Starter) {
        let set = self.starter.set(starter);
        debug_assert!(set.is_ok(), "the threads of a family are the same ones all the time");
    }

    /// Starts the threads, unless they run, or [nobody said](Self::set_starter) how.
    pub fn start(&self) -> std::io::Result<()> {
        let mut state = self.lock();
        let Some(starter) = self.starter.get().filter(|_| !state.running) else { return Ok(()) };
        (starter.runner)()?;
        let keeper = (starter.keeper)();
        // A runner alone can do what requests need.
        state.running = true;
        keeper
    }

    /// Whether there is somebody to carry on with requests.
    pub fn is_running(&self) -> bool {
        self.lock().running
    }

    /// Ends the threads when they have done what they are at.
    pub fn stop(&self) {
        self.lock().stop = true;
        self.kicked.notify_all();
        self.ready.notify_all();
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

    /// Nothing can be freed: requests that wait for memory try once more, and fail if it is not there.
    pub fn give_up(&self) {
        self.let_go(|_| true, Job::for_the_last_time);
    }

    /// As [`give_up`](Self::give_up), for the requests of some devices.
    pub fn give_up_for(&self, is: impl Fn(&Ram) -> bool) {
        self.let_go(is, Job::for_the_last_time);
    }

    fn let_go(&self, is: impl Fn(&Ram) -> bool, how: fn(Job) -> Job) {
        let mut state = self.lock();
        let (now, waiting) = std::mem::take(&mut state.waiting).into_iter().partition(|(ram, _)| is(ram));
        state.waiting = waiting;
        self.hand_on(state, now, how);
    }

    /// Whether requests of some devices wait for memory.
    pub fn is_awaited(&self, is: impl Fn(&Ram) -> bool) -> bool {
        self.lock().waiting.iter().any(|(ram, _)| is(ram))
    }

    fn hand_on(&self, mut state: MutexGuard<'_, State>, waiting: Vec<(Ram, Job)>, how: fn(Job) -> Job) {
        if !waiting.is_empty() {
            state.ready.extend(waiting.into_iter().map(|(ram, job)| Task::Resume(ram, how(job))));
            self.ready.notify_one();
        }
    }

    /// The request goes on.
    pub fn resume(&self, ram: Ram, job: Job) {
        self.lock().ready.push_back(Task::Resume(ram, job));
        self.ready.notify_one();
    }

    /// Pages are read one by one.
    pub fn reread(&self, wanted: Vec<Wanted>) {
        self.lock().ready.push_back(Task::Reread(wanted));
        self.ready.notify_one();
    }

    /// The backing device is given reads that waited.
    pub fn start_reads(&self) {
        self.lock().ready.push_back(Task::StartReads);
        self.ready.notify_one();
    }

    /// Reads are failed.
    pub fn fail(&self, late: Vec<Late>) {
        self.lock().ready.push_back(Task::Fail(late));
        self.ready.notify_one();
    }

    /// Whether somebody waits for what a round of spilling frees.
    pub fn is_wanted(&self) -> bool {
        let state = self.lock();
        state.kick || !state.waiting.is_empty()
    }

    /// Waits for what the runner has to do next. `None`: it is to end.
    pub fn next_task(&self) -> Option<Task> {
        let mut state = self.lock();
        loop {
            if let Some(task) = state.ready.pop_front() {
                return Some(task);
            }
            if state.stop {
                return None;
            }
            state = self.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until there may be something for the keeper, for a tick after `last_tick` at most. Returns whether requests wait for
    /// memory; `None`: it is to end.
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
