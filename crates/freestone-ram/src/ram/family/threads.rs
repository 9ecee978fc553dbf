//! The keeper: the thread of a family (devices that share a memory pool) for background work such
//! as evictions. The keeper waits for the backing device. While idle it holds only a weak reference
//! to the family.
//!
//! Requests that waited continue on the family's work queue, which never waits for the backing
//! device. The keeper cannot run them, as it does wait, and the device's own threads must not be
//! blocked. The threads of a family start when needed: for a backing device, automatic
//! recompression, grouping or deduplication, a base on another device, a restore, or a waiting
//! request.

use std::sync::{Arc, Weak};

use crate::ram::device::parts::FamilyParts;
use crate::ram::waiting::keeper::Keeper;
use freestone_core::clock::{TICK, now_ms};
use freestone_core::sync::thread;

/// Nice value of the keeper thread. If CPUs are short, writers that fill memory must wait for the
/// keeper anyway. At nice value 0 the keeper slowed a neighbouring device to 0.75 of its speed. A
/// value above 10 would let other load of the machine delay evictions.
const NICE: i32 = 10;

/// Sets the function that starts the keeper thread of a family.
pub(in crate::ram) fn prepare_keeper(family: &Arc<FamilyParts>) {
    let (keeper, weak) = (Arc::downgrade(&family.pages.keeper), Arc::downgrade(family));
    let start = move || {
        let Some(keeper) = keeper.upgrade() else { return Ok(()) };
        let family = Weak::clone(&weak);
        thread::Builder::new().name("keeper".into()).spawn(move || run_keeper(&keeper, &family)).map(drop)
    };
    family.pages.keeper.set_starter(Box::new(start));
}

fn run_keeper(keeper: &Keeper, family: &Weak<FamilyParts>) {
    // Changes only this thread: without a process id the call applies to the calling thread.
    if let Err(error) = rustix::process::setpriority_process(None, NICE) {
        tracing::debug!("cannot lower the priority of the keeper thread: {error}");
    }
    let mut last_tick = now_ms();
    while let Some(waiting) = keeper.next_round(last_tick) {
        let Some(family) = family.upgrade() else { return };
        family.evict.evict_as_needed(waiting);
        if now_ms() - last_tick >= TICK.as_millis() as u64 {
            last_tick = now_ms();
            family.evict.sweep_copies();
            family.evict.reclaim.reclaim_if_needed();
            family.auto.step();
            family.dedup.step();
            family.groups.step();
        }
    }
}

#[cfg(test)]
#[path = "threads_tests.rs"]
pub(in crate::ram) mod tests;
