//! The keeper of a family: a thread that does the background's work (see [`evict`](super::evict))
//! and waits for the backing device. It holds the family by a weak reference while it has nothing
//! to do.

use std::sync::{Arc, Weak};

use super::keeper::Keeper;
use super::parts::FamilyParts;
use crate::clock::{TICK, now_ms};
use freestone_core::sync::thread;

/// The priority of the thread that spills. Where CPUs are short, those who fill the memory have to
/// wait for it, and a neighbour that does not is held up less: it kept 0.75 of its speed at 0.
/// Below, what else the machine does would hold up the spilling.
const NICE: i32 = 10;

/// Says to a family's keeper how its thread is started.
pub(super) fn prepare(family: &Arc<FamilyParts>) {
    let (keeper, weak) = (Arc::downgrade(&family.pages.keeper), Arc::downgrade(family));
    let start = move || {
        let Some(keeper) = keeper.upgrade() else { return Ok(()) };
        let family = Weak::clone(&weak);
        thread::Builder::new().name("keeper".into()).spawn(move || keep(&keeper, &family)).map(drop)
    };
    family.pages.keeper.set_starter(Box::new(start));
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
