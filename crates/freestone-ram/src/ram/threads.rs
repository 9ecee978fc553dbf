//! The threads of a family that has to wait for a device: the *keeper* does the background's work (see
//! [`rounds`](super::rounds)) and waits for the backing device; the *runner* carries on requests that waited, in slices,
//! so that none holds up the others, and does what must not be done on a thread of a device. Both hold the family by a
//! weak reference while they have nothing to do.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

use super::keeper::{Keeper, Task};
use super::shared::Shared;
use crate::clock::{TICK, now_ms};
use crate::spill::reads::Late;
use freestone_core::sync::thread;

/// The priority of the thread that spills. Where CPUs are short, those who fill the memory have to wait for it, and a neighbour that
/// does not is held up less: it kept 0.75 of its speed at 0. Below, what else the machine does would hold up the spilling.
const NICE: i32 = 10;

/// Starts the threads, unless they run.
pub(super) fn start(family: &Arc<Shared>) -> std::io::Result<()> {
    let spawn = |name: &str, work: fn(&Keeper, &Weak<Shared>)| {
        let (keeper, family) = (Arc::clone(&family.keeper), Arc::downgrade(family));
        thread::Builder::new().name(name.into()).spawn(move || work(&keeper, &family)).map(drop)
    };
    family.keeper.start(|| spawn("runner", run), || spawn("keeper", keep))
}

fn run(keeper: &Keeper, family: &Weak<Shared>) {
    while let Some(task) = keeper.next_task() {
        // A completion that panics ends its request, not the disk.
        let _ = catch_unwind(AssertUnwindSafe(|| carry_out(task, family)));
    }
}

fn carry_out(task: Task, family: &Weak<Shared>) {
    match task {
        Task::Resume(ram, job) => ram.carry_on(job),
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

fn keep(keeper: &Keeper, family: &Weak<Shared>) {
    // No thread but ours is meant: without a process the call is for the calling thread.
    if let Err(error) = rustix::process::setpriority_process(None, NICE) {
        tracing::debug!("the thread that spills keeps its priority: {error}");
    }
    let mut last_tick = now_ms();
    while let Some(waiting) = keeper.next_round(last_tick) {
        let Some(family) = family.upgrade() else { return };
        family.make_room(waiting);
        if now_ms() - last_tick >= TICK.as_millis() as u64 {
            last_tick = now_ms();
            family.reclaim_if_worth_it();
            family.auto_recompress();
        }
    }
}

#[cfg(test)]
#[path = "threads_tests.rs"]
pub(super) mod tests;
