//! The threads of a family that has to wait for a device: the *keeper* does the background's work (see
//! [`evict`](super::evict)) and waits for the backing device; the *runner* carries on requests that waited, in slices,
//! so that none holds up the others, and does what must not be done on a thread of a device. Both hold the family by a
//! weak reference while they have nothing to do.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

use super::keeper::{Keeper, Starter, Task};
use super::parts::FamilyParts;
use crate::clock::{TICK, now_ms};
use crate::spill::reads::Late;
use freestone_core::sync::thread;

/// The priority of the thread that spills. Where CPUs are short, those who fill the memory have to wait for it, and a neighbour that
/// does not is held up less: it kept 0.75 of its speed at 0. Below, what else the machine does would hold up the spilling.
const NICE: i32 = 10;

/// Says to a family's keeper how the threads are started.
pub(super) fn prepare(family: &Arc<FamilyParts>) {
    let spawn = |name: &'static str, work: fn(&Keeper, &Weak<FamilyParts>)| {
        let (keeper, family) = (Arc::downgrade(&family.pages.keeper), Arc::downgrade(family));
        let start = move || {
            let Some(keeper) = keeper.upgrade() else { return Ok(()) };
            let family = Weak::clone(&family);
            thread::Builder::new().name(name.into()).spawn(move || work(&keeper, &family)).map(drop)
        };
        Box::new(start)
    };
    let (runner, keeper) = (spawn("runner", run), spawn("keeper", keep));
    family.pages.keeper.set_starter(Starter { runner, keeper });
}

fn run(keeper: &Keeper, family: &Weak<FamilyParts>) {
    while let Some(task) = keeper.next_task() {
        // A completion that panics ends its request, not the disk.
        let _ = catch_unwind(AssertUnwindSafe(|| carry_out(task, family)));
    }
}

fn carry_out(task: Task, family: &Weak<FamilyParts>) {
    match task {
        Task::Resume(ram, job) => ram.carry_on(job),
        Task::Reread(wanted) => {
            if let Some(family) = family.upgrade() {
                family.fault_in.read_one_by_one(wanted);
            }
        }
        Task::StartReads => {
            if let Some(store) = family.upgrade().and_then(|family| family.pages.store.clone()) {
                store.start_reads();
            }
        }
        Task::Fail(late) => late.into_iter().for_each(Late::give_up),
    }
}

fn keep(keeper: &Keeper, family: &Weak<FamilyParts>) {
    // No thread but ours is meant: without a process the call is for the calling thread.
    if let Err(error) = rustix::process::setpriority_process(None, NICE) {
        tracing::debug!("the thread that spills keeps its priority: {error}");
    }
    let mut last_tick = now_ms();
    while let Some(waiting) = keeper.next_round(last_tick) {
        let Some(family) = family.upgrade() else { return };
        family.evict.make_room(waiting);
        if now_ms() - last_tick >= TICK.as_millis() as u64 {
            last_tick = now_ms();
            family.evict.reclaim.if_worth_it();
            family.auto.step();
        }
    }
}

#[cfg(test)]
#[path = "threads_tests.rs"]
pub(super) mod tests;
