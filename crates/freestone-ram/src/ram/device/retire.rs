//! Background freeing of unused layers (old content) after a rewind, a reset or a removal of a
//! device.
//!
//! One cleaner thread serves the process. Retired layers are charged to no device and never make a
//! write fail with "no space". A write that finds no memory frees some of them itself and retries.
//!
//! If the last handle of a family (devices that share a memory pool) is dropped, its memory is
//! freed as a whole.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::chain::{Chain, resume_held_requests};
use super::parent::Parent;
use crate::ram::memory::layer::Layer;
use crate::ram::memory::pages::Pages;
use crate::ram::memory::retiring::Step;
use freestone_core::client_log;
use freestone_core::slot::{LEAF_SLOTS, MAX_SLOTS};
use freestone_core::sync::{AtomicU64, LazyLock, Ordering};
use freestone_core::work_queue::WorkQueue;

/// Number of slot table leaves that a task frees before the cleaner runs other tasks.
const TURN_LEAVES: u32 = 64;
/// Pause of the cleaner if no task makes progress, as all pages left are in flight from a backing
/// device.
const PAUSE: Duration = Duration::from_millis(5);

/// Number of queued cleaner tasks above which creating a device waits.
const TASKS_MAX: usize = 512;
/// Maximum polls while creating a device waits: 500 polls of 200 µs are 0.1 s.
const THROTTLE_POLLS_MAX: u32 = 500;

/// Queues a layer for freeing. No request can reach the layer any more.
pub(in crate::ram) fn retire_layer(pages: &Arc<Pages>, layer: Arc<Layer>) {
    layer.retire(&pages.layers);
    if layer.table().next_present(0, MAX_SLOTS).is_none() {
        return pages.layers.remove(layer.id());
    }
    pages.retiring.add(layer);
    enqueue(Task { pages: Arc::downgrade(pages), work: Work::Drain });
}

/// Queues the removal of a snapshot with this `number` in its chain, or of a live device (`None`).
/// `parent` is the device's own reference to the chain's parent.
pub(super) fn retire_device(pages: &Arc<Pages>, chain: Arc<Chain>, number: Option<u64>, parent: Parent) {
    pages.begin_removal();
    let work = match number {
        None => Work::Abandon(chain, parent),
        Some(number) => Work::Delete(chain, number, parent),
    };
    enqueue(Task { pages: Arc::downgrade(pages), work });
}

/// Delays the creation of a device, for at most 0.1 s, while too many cleaner tasks are queued.
pub(super) fn throttle_creation() {
    for _ in 0..THROTTLE_POLLS_MAX {
        if CLEANER.len() <= TASKS_MAX {
            return;
        }
        freestone_core::sync::thread::sleep(Duration::from_micros(200));
    }
}

/// A task of the cleaner. The reference to the pages is weak, so that a family without handles can
/// be freed as a whole.
struct Task {
    pages: Weak<Pages>,
    work: Work,
}

enum Work {
    Drain,
    Abandon(Arc<Chain>, Parent),
    Delete(Arc<Chain>, u64, Parent),
    HandOver(SnapshotHandover),
}

/// Removal of a snapshot, whose pages move one by one to older snapshots that need them.
struct SnapshotHandover {
    chain: Arc<Chain>,
    number: u64,
    from: Arc<Layer>,
    next: u64,
    /// Pages in flight from the backing device remain, for another pass.
    left: bool,
    /// Only pages in flight remain, or memory is short. Writes that find no memory do not wait for
    /// this removal any more.
    stalled: bool,
}

static CLEANER: LazyLock<Arc<WorkQueue>> = LazyLock::new(|| WorkQueue::new("cleaner"));

fn enqueue(task: Task) {
    if let Err(error) = CLEANER.start() {
        client_log!(error, %error, "cannot start the cleaner thread; freeing memory synchronously");
        let mut next = Some(task);
        while let Some(task) = next {
            next = step(task).0;
        }
    } else {
        CLEANER.push(move || take_turn(task));
    }
}

/// Runs a step of a task and requeues the rest of the task. The cleaner pauses if no task makes
/// progress.
fn take_turn(task: Task) {
    static IDLE_STEPS: AtomicU64 = AtomicU64::new(0);
    let (rest, progressed) = step(task);
    // Relaxed: used only by the cleaner thread.
    let idle = if progressed { 0 } else { IDLE_STEPS.load(Ordering::Relaxed) + 1 };
    // Relaxed: used only by the cleaner thread.
    IDLE_STEPS.store(idle, Ordering::Relaxed);
    if let Some(task) = rest {
        let others = CLEANER.len();
        CLEANER.push(move || take_turn(task));
        if idle > others as u64 {
            freestone_core::sync::thread::sleep(PAUSE);
        }
    }
}

/// Runs a step of a task. Returns the rest of the task (`None` if done), and true if the step made
/// progress.
fn step(Task { pages: weak, work }: Task) -> (Option<Task>, bool) {
    let Some(pages) = weak.upgrade() else { return (None, true) };
    let (rest, progressed) = match work {
        Work::Drain => drain(&pages),
        Work::Abandon(chain, parent) => {
            // Never the last reference, whose drop could wait for a disk: the chain has one too.
            drop(parent);
            let (unused, held) = chain.abandon(&pages);
            resume_held_requests(held);
            if let Some(origin) = unused {
                retire_layer(&pages, origin);
            }
            pages.end_removal();
            if let Some(chain) = Arc::into_inner(chain) {
                drop_parent(chain.into_parent());
            }
            (None, true)
        }
        Work::Delete(chain, number, parent) => {
            // Never the last reference, whose drop could wait for a disk: the chain has one too.
            drop(parent);
            if let Some(from) = chain.begin_delete(number) {
                let handover = SnapshotHandover { chain, number, from, next: 0, left: false, stalled: false };
                (Some(Work::HandOver(handover)), true)
            } else {
                pages.end_removal();
                (None, true)
            }
        }
        Work::HandOver(handover) => handover.step(&pages),
    };
    // If this is the last reference to the family's pages, dropping it closes the backing device, which
    // may take long.
    if let Some(last) = Arc::into_inner(pages) {
        drop_on_own_thread(last);
        return (None, true);
    }
    (rest.map(|work| Task { pages: weak, work }), progressed)
}

fn drain(pages: &Pages) -> (Option<Work>, bool) {
    for _ in 0..TURN_LEAVES {
        match pages.free_leaf_of_retired() {
            Step::Freed => {}
            Step::Later => return (Some(Work::Drain), false),
            Step::Nothing => {
                pages.pool.release_empties();
                pages.wake_memory_waiters();
                return (None, true);
            }
        }
    }
    (Some(Work::Drain), true)
}

impl SnapshotHandover {
    fn stall(&mut self, pages: &Pages) {
        if !std::mem::replace(&mut self.stalled, true) {
            pages.end_removal();
        }
    }

    fn step(mut self, pages: &Arc<Pages>) -> (Option<Work>, bool) {
        for _ in 0..TURN_LEAVES {
            let Some(present) = self.from.table().next_present(self.next, MAX_SLOTS) else {
                if self.left {
                    self.stall(pages);
                    (self.next, self.left) = (0, false);
                    return (Some(Work::HandOver(self)), false);
                }
                for gone in self.chain.unlink(self.number) {
                    retire_layer(pages, gone);
                }
                if self.stalled {
                    pages.removals.count_progress();
                    pages.wake_space_waiters();
                } else {
                    pages.end_removal();
                }
                if let Some(chain) = Arc::into_inner(self.chain) {
                    drop_parent(chain.into_parent());
                }
                return (None, true);
            };
            let start = present & !(LEAF_SLOTS - 1);
            let Ok(left) = self.chain.pass_on(pages, self.number, start, start + LEAF_SLOTS) else {
                // No memory for a slot table leaf of the other snapshot: retry later.
                self.stall(pages);
                return (Some(Work::HandOver(self)), false);
            };
            self.left |= left;
            self.next = start + LEAF_SLOTS;
        }
        (Some(Work::HandOver(self)), true)
    }
}

/// Drops the parent of a removed device. If that closes the base or a file, another thread does it,
/// as closing may wait for a disk.
fn drop_parent(parent: Parent) {
    match &parent {
        Parent::Device(base) if Arc::strong_count(&base.device) > 1 => {}
        Parent::Device(_) | Parent::Staged(_) => drop_on_own_thread(parent),
        Parent::Nothing | Parent::Snapshot(_) => {}
    }
}

fn drop_on_own_thread(value: impl Send + 'static) {
    let started =
        freestone_core::sync::thread::Builder::new().name("cleaner-end".into()).spawn(move || drop(value));
    if let Err(error) = started {
        client_log!(warn, %error, "cannot start a thread to drop a device; dropping it synchronously");
    }
}

#[cfg(test)]
#[path = "retire_tests.rs"]
mod tests;
