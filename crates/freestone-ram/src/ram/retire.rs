//! Layers that nobody uses any more are freed in the background: what a rewind, a reset or a
//! removal leaves.
//!
//! One thread does that for the whole process. It is charged to nobody, and never the cause of "no
//! space": a write that finds no memory frees some of it itself, and tries again.
//!
//! A pages that is gone altogether is not freed piece by piece: its memory goes as a whole.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::chain::{Chain, carry_on};
use super::layer::Layer;
use super::pages::Pages;
use super::parent::Parent;
use super::removals::Step;
use freestone_core::client_log;
use freestone_core::slot::{LEAF_SLOTS, MAX_SLOTS};
use freestone_core::sync::{AtomicU64, LazyLock, Ordering};
use freestone_core::work_queue::WorkQueue;

/// Leaves of one thing that are freed before others have their turn.
const TURN_LEAVES: u32 = 64;
/// Pause where all that is left is on its way from a backing device.
const PAUSE: Duration = Duration::from_millis(5);

/// Removed devices that wait for the cleaner, beyond which making others waits for it.
const TASKS_MAX: usize = 512;
/// How often that looks again, at most: 0.1 s.
const PACE_TRIES: u32 = 500;

/// Has a layer freed that no request can reach any more.
pub(super) fn layer(pages: &Arc<Pages>, layer: Arc<Layer>) {
    layer.retire(&pages.layers);
    if layer.table().next_present(0, MAX_SLOTS).is_none() {
        return pages.layers.remove(layer.id());
    }
    pages.retiring.add(layer);
    clean(Task { pages: Arc::downgrade(pages), work: Work::Drain });
}

/// Has the rest of a device's life done: a live one's (`number` is `None`), or that of a snapshot
/// of a chain. `parent` is the device's own hold on what lies below the chain.
pub(super) fn device(pages: &Arc<Pages>, chain: Arc<Chain>, number: Option<u64>, parent: Parent) {
    pages.removal_begins();
    let work = match number {
        None => Work::Abandon(chain, parent),
        Some(number) => Work::Delete(chain, number, parent),
    };
    clean(Task { pages: Arc::downgrade(pages), work });
}

/// Makes who makes devices wait where more were removed than are freed; not for long.
pub(super) fn pace() {
    for _ in 0..PACE_TRIES {
        if CLEANER.len() <= TASKS_MAX {
            return;
        }
        freestone_core::sync::thread::sleep(Duration::from_micros(200));
    }
}

/// Something for the cleaner. The pages is held weakly: one that nobody uses any more goes as a
/// whole.
struct Task {
    pages: Weak<Pages>,
    work: Work,
}

enum Work {
    /// Free what is retired.
    Drain,
    /// A live device is gone.
    Abandon(Arc<Chain>, Parent),
    /// A snapshot's device is gone.
    Delete(Arc<Chain>, u64, Parent),
    PassOn(PassingOn),
}

/// A dying snapshot, whose pages go to others.
struct PassingOn {
    chain: Arc<Chain>,
    number: u64,
    from: Arc<Layer>,
    next: u64,
    /// Something was on its way from the backing device.
    left: bool,
    /// Nothing else is left, or there is no memory to go on: writes do not wait for it any more.
    stalled: bool,
}

static CLEANER: LazyLock<Arc<WorkQueue>> = LazyLock::new(|| WorkQueue::new("cleaner"));

fn clean(task: Task) {
    if let Err(error) = CLEANER.start() {
        client_log!(error, %error, "no thread to free memory in the background; it is done at once");
        let mut next = Some(task);
        while let Some(task) = next {
            next = step(task).0;
        }
    } else {
        CLEANER.push(move || take_turn(task));
    }
}

/// A step of a task, which then waits for its next turn. Where none of them gets on the thread
/// pauses.
fn take_turn(task: Task) {
    static IDLE_STEPS: AtomicU64 = AtomicU64::new(0);
    let (rest, got_on) = step(task);
    // Relaxed: of one thread.
    let idle = if got_on { 0 } else { IDLE_STEPS.load(Ordering::Relaxed) + 1 };
    // Relaxed: as above.
    IDLE_STEPS.store(idle, Ordering::Relaxed);
    if let Some(task) = rest {
        let others = CLEANER.len();
        CLEANER.push(move || take_turn(task));
        if idle > others as u64 {
            freestone_core::sync::thread::sleep(PAUSE);
        }
    }
}

/// Carries on with a task. Returns what is left of it, and whether it got on.
fn step(Task { pages: weak, work }: Task) -> (Option<Task>, bool) {
    let Some(pages) = weak.upgrade() else { return (None, true) };
    let (rest, got_on) = match work {
        Work::Drain => drain(&pages),
        Work::Abandon(chain, parent) => {
            // Never the last hold: the chain has one.
            drop(parent);
            let (unused, held) = chain.abandon(&pages);
            carry_on(held);
            if let Some(origin) = unused {
                layer(&pages, origin);
            }
            pages.removal_ended();
            if let Some(chain) = Arc::into_inner(chain) {
                drop_parent(chain.into_parent());
            }
            (None, true)
        }
        Work::Delete(chain, number, parent) => {
            // As above.
            drop(parent);
            if let Some(from) = chain.begin_delete(number) {
                let passing = PassingOn { chain, number, from, next: 0, left: false, stalled: false };
                (Some(Work::PassOn(passing)), true)
            } else {
                pages.removal_ended();
                (None, true)
            }
        }
        Work::PassOn(passing) => passing.step(&pages),
    };
    // The last handle may be this one, and the pages's backing device may take its time to end.
    if let Some(last) = Arc::into_inner(pages) {
        drop_apart(last);
        return (None, true);
    }
    (rest.map(|work| Task { pages: weak, work }), got_on)
}

fn drain(pages: &Pages) -> (Option<Work>, bool) {
    for _ in 0..TURN_LEAVES {
        match pages.free_some() {
            Step::Freed => {}
            Step::Later => return (Some(Work::Drain), false),
            Step::Nothing => {
                pages.pool.release_empties();
                pages.memory_freed();
                return (None, true);
            }
        }
    }
    (Some(Work::Drain), true)
}

impl PassingOn {
    fn stall(&mut self, pages: &Pages) {
        if !std::mem::replace(&mut self.stalled, true) {
            pages.removal_ended();
        }
    }

    fn step(mut self, pages: &Arc<Pages>) -> (Option<Work>, bool) {
        for _ in 0..TURN_LEAVES {
            let Some(present) = self.from.table().next_present(self.next, MAX_SLOTS) else {
                if self.left {
                    self.stall(pages);
                    (self.next, self.left) = (0, false);
                    return (Some(Work::PassOn(self)), false);
                }
                for gone in self.chain.unlink(self.number) {
                    layer(pages, gone);
                }
                if self.stalled {
                    pages.removals.got_on();
                    pages.room_came();
                } else {
                    pages.removal_ended();
                }
                if let Some(chain) = Arc::into_inner(self.chain) {
                    drop_parent(chain.into_parent());
                }
                return (None, true);
            };
            let start = present & !(LEAF_SLOTS - 1);
            let Ok(left) = self.chain.pass_on(pages, self.number, start, start + LEAF_SLOTS) else {
                // No memory for a leaf: later there may be.
                self.stall(pages);
                return (Some(Work::PassOn(self)), false);
            };
            self.left |= left;
            self.next = start + LEAF_SLOTS;
        }
        (Some(Work::PassOn(self)), true)
    }
}

/// Drops what lay below a device. The end of a device may have to wait for a disk: not on this
/// thread.
fn drop_parent(parent: Parent) {
    match &parent {
        Parent::Device(base) if Arc::strong_count(&base.device) > 1 => {}
        Parent::Device(_) | Parent::Staged(_) => drop_apart(parent),
        Parent::Nothing | Parent::Snapshot(_) => {}
    }
}

fn drop_apart(what: impl Send + 'static) {
    let started =
        freestone_core::sync::thread::Builder::new().name("cleaner-end".into()).spawn(move || drop(what));
    if let Err(error) = started {
        client_log!(warn, %error, "no thread to end a device on; others wait for it");
    }
}

#[cfg(test)]
#[path = "retire_tests.rs"]
mod tests;
