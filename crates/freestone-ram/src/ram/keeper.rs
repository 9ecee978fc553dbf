//! The threads of a family that has to wait for a device: the *keeper* does the background's work (see
//! [`rounds`](super::rounds)) and waits for the backing device; the *runner* carries on requests that waited, in slices,
//! so that none holds up the others, and does what must not be done on a thread of a device. Both hold the family by a
//! weak reference while they have nothing to do.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError, Weak};

use super::Ram;
use super::family::Shared;
use super::fault_in::Wanted;
use super::job::Job;
use crate::clock::{TICK, now_ms};
use crate::spill::reads::Late;
use freestone_core::sync::{Condvar, Mutex, MutexGuard, thread};

/// What the two threads are told. The family owns it, they share it.
///
/// Lock order: `state` is taken last, and nothing under it.
#[derive(Default)]
pub(super) struct Keeper {
    state: Mutex<State>,
    kicked: Condvar,
    ready: Condvar,
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

/// The priority of the thread that spills. Where CPUs are short, those who fill the memory have to wait for it, and a neighbour that
/// does not is held up less: it kept 0.75 of its speed at 0. Parent, what else the machine does would hold up the spilling.
const NICE: i32 = 10;

/// Something for the runner.
enum Task {
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

    /// Starts the threads, unless they run.
    pub fn start(self: &Arc<Self>, shared: &Arc<Shared>) -> std::io::Result<()> {
        let mut state = self.lock();
        if state.running {
            return Ok(());
        }
        let (runner, family) = (Arc::clone(self), Arc::downgrade(shared));
        thread::Builder::new().name("runner".into()).spawn(move || runner.run(&family))?;
        let (keeper, family) = (Arc::clone(self), Arc::downgrade(shared));
        let started = thread::Builder::new().name("keeper".into()).spawn(move || keeper.keep(&family));
        // A runner alone can do what requests need.
        state.running = true;
        started.map(drop)
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

    fn run(&self, family: &Weak<Shared>) {
        let mut state = self.lock();
        loop {
            match state.ready.pop_front() {
                Some(task) => {
                    drop(state);
                    // A completion that panics ends its request, not the disk.
                    let _ = catch_unwind(AssertUnwindSafe(|| self.carry_out(task, family)));
                    state = self.lock();
                }
                None if state.stop => return,
                None => state = self.ready.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn carry_out(&self, task: Task, family: &Weak<Shared>) {
        match task {
            Task::Resume(ram, job) => {
                if let Some(job) = ram.slice(job) {
                    self.resume(ram, job);
                }
            }
            Task::Reread(wanted) => {
                if let Some(family) = family.upgrade() {
                    family.read_one_by_one(wanted);
                }
            }
            Task::StartReads => {
                if let Some(store) = family.upgrade().and_then(|family| family.store.clone()) {
                    store.start_reads();
                }
            }
            Task::Fail(late) => late.into_iter().for_each(Late::give_up),
        }
    }

    fn keep(&self, family: &Weak<Shared>) {
        // No thread but ours is meant: without a process the call is for the calling thread.
        if let Err(error) = rustix::process::setpriority_process(None, NICE) {
            tracing::debug!("the thread that spills keeps its priority: {error}");
        }
        let mut last_tick = now_ms();
        loop {
            let waiting = {
                let mut state = self.lock();
                while !state.kick && !state.stop && now_ms() - last_tick < TICK.as_millis() as u64 {
                    state = self.kicked.wait_timeout(state, TICK).unwrap_or_else(PoisonError::into_inner).0;
                }
                if state.stop {
                    return;
                }
                state.kick = false;
                !state.waiting.is_empty()
            };
            let Some(family) = family.upgrade() else { return };
            family.make_room(waiting);
            if now_ms() - last_tick >= TICK.as_millis() as u64 {
                last_tick = now_ms();
                family.reclaim_if_worth_it();
                family.auto_recompress();
            }
        }
    }
}

#[cfg(test)]
#[path = "keeper_tests.rs"]
pub(super) mod tests;
