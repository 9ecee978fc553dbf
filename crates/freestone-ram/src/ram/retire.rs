//! Layers that nobody uses any more are freed in the background: what a rewind, a reset or a removal leaves.
//!
//! One thread does that for the whole process. It is charged to nobody, and never the cause of "no space": a write that
//! finds no memory frees some of it itself, and tries again.
//!
//! A family that is gone altogether is not freed piece by piece: its memory goes as a whole.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use super::chain::{Chain, carry_on};
use super::layer::Layer;
use super::parent::Parent;
use super::removals::Step;
use super::shared::Shared;
use freestone_core::slot::{LEAF_SLOTS, MAX_SLOTS, chain};
use freestone_core::sync::{Condvar, LazyLock, Mutex};

/// Leaves of one thing that are freed before others have their turn.
const TURN_LEAVES: u32 = 64;
/// Pause where all that is left is on its way from a backing device.
const PAUSE: Duration = Duration::from_millis(5);

/// Removed devices that wait for the cleaner, beyond which making others waits for it.
const TASKS_MAX: usize = 512;
/// How often that looks again, at most: 0.1 s.
const PACE_TRIES: u32 = 500;

impl Shared {
    /// Frees a leaf of what is to be freed.
    fn free_some(&self) -> Step {
        let (layer, start) = match self.retiring.take_leaf() {
            Ok(taken) => taken,
            Err(step) => return step,
        };
        let (freed, left) = chain::free_leaf(self, &layer, start);
        if self.retiring.done_with_leaf(&layer, start, left) {
            self.layers.remove(layer.id());
        }
        if freed || !left { Step::Freed } else { Step::Later }
    }

    /// Whether anything is still to be freed.
    pub(super) fn is_freeing(&self) -> bool {
        !self.retiring.is_empty()
    }

    /// Frees a leaf of what is to be freed, or lets others do so. False: there is nothing, but for what is on its way from
    /// the backing device.
    pub(super) fn help_to_free(&self) -> bool {
        match self.free_some() {
            Step::Freed => true,
            Step::Later if self.retiring.is_busy() => {
                freestone_core::sync::thread::yield_now();
                true
            }
            Step::Later | Step::Nothing => false,
        }
    }
}

/// Has a layer freed that no request can reach any more.
pub(super) fn layer(family: &Arc<Shared>, layer: Arc<Layer>) {
    layer.retire(&family.layers);
    if layer.table().next_present(0, MAX_SLOTS).is_none() {
        return family.layers.remove(layer.id());
    }
    family.retiring.add(layer);
    CLEANER.add(Task { family: Arc::downgrade(family), work: Work::Drain });
}

/// Has the rest of a device's life done: a live one's (`number` is `None`), or that of a snapshot of a chain. `parent` is the device's
/// own hold on what lies below the chain.
pub(super) fn device(family: &Arc<Shared>, chain: Arc<Chain>, number: Option<u64>, parent: Parent) {
    family.removal_begins();
    let work = match number {
        None => Work::Abandon(chain, parent),
        Some(number) => Work::Delete(chain, number, parent),
    };
    CLEANER.add(Task { family: Arc::downgrade(family), work });
}

/// Makes who makes devices wait where more were removed than are freed; not for long.
pub(super) fn pace() {
    for _ in 0..PACE_TRIES {
        if CLEANER.tasks.lock().as_ref().is_none_or(|tasks| tasks.len() <= TASKS_MAX) {
            return;
        }
        freestone_core::sync::thread::sleep(Duration::from_micros(200));
    }
}

impl Shared {
    /// From now on writes that find no memory wait until [`removal_ended`](Self::removal_ended).
    pub(super) fn removal_begins(&self) {
        self.removals.begin();
    }

    /// What was removed is retired, or of no use to anybody who waits for memory.
    pub(super) fn removal_ended(&self) {
        for (ram, job) in self.removals.end() {
            self.keeper.resume(ram, job);
        }
    }
}

/// Something for the cleaner. The family is held weakly: one that nobody uses any more goes as a whole.
struct Task {
    family: Weak<Shared>,
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

struct Cleaner {
    tasks: Mutex<Option<VecDeque<Task>>>,
    added: Condvar,
}

static CLEANER: LazyLock<Cleaner> =
    LazyLock::new(|| Cleaner { tasks: Mutex::new(None), added: Condvar::new() });

impl Cleaner {
    fn add(&'static self, task: Task) {
        let mut tasks = self.tasks.lock();
        if tasks.is_none() {
            let started =
                freestone_core::sync::thread::Builder::new().name("cleaner".into()).spawn(move || self.run());
            if let Err(error) = started {
                tracing::error!(%error, "no thread to free memory in the background; it is done at once");
                drop(tasks);
                let mut next = Some(task);
                while let Some(task) = next {
                    next = step(task).0;
                }
                return;
            }
        }
        tasks.get_or_insert_default().push_back(task);
        self.added.notify_one();
    }

    fn run(&self) {
        let mut idle = 0;
        loop {
            let (task, others) = {
                let mut tasks = self.tasks.lock();
                loop {
                    if let Some(task) = tasks.as_mut().and_then(VecDeque::pop_front) {
                        break (task, tasks.as_ref().map_or(0, VecDeque::len));
                    }
                    tasks = self.added.wait(tasks).unwrap_or_else(PoisonError::into_inner);
                }
            };
            let (rest, got_on) = step(task);
            idle = if got_on { 0 } else { idle + 1 };
            if let Some(task) = rest {
                self.tasks.lock().get_or_insert_default().push_back(task);
                if idle > others {
                    freestone_core::sync::thread::sleep(PAUSE);
                }
            }
        }
    }
}

/// Carries on with a task. Returns what is left of it, and whether it got on.
fn step(Task { family: weak, work }: Task) -> (Option<Task>, bool) {
    let Some(family) = weak.upgrade() else { return (None, true) };
    let (rest, got_on) = match work {
        Work::Drain => drain(&family),
        Work::Abandon(chain, parent) => {
            // Never the last hold: the chain has one.
            drop(parent);
            let (unused, held) = chain.abandon(&family);
            carry_on(held);
            if let Some(origin) = unused {
                layer(&family, origin);
            }
            family.removal_ended();
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
                family.removal_ended();
                (None, true)
            }
        }
        Work::PassOn(passing) => passing.step(&family),
    };
    // The last handle may be this one, and the family's backing device may take its time to end.
    if let Some(last) = Arc::into_inner(family) {
        drop_apart(last);
        return (None, true);
    }
    (rest.map(|work| Task { family: weak, work }), got_on)
}

fn drain(family: &Shared) -> (Option<Work>, bool) {
    for _ in 0..TURN_LEAVES {
        match family.free_some() {
            Step::Freed => {}
            Step::Later => return (Some(Work::Drain), false),
            Step::Nothing => {
                family.pool.release_empties();
                family.keeper.memory_freed();
                return (None, true);
            }
        }
    }
    (Some(Work::Drain), true)
}

impl PassingOn {
    fn stall(&mut self, family: &Shared) {
        if !std::mem::replace(&mut self.stalled, true) {
            family.removal_ended();
        }
    }

    fn step(mut self, family: &Arc<Shared>) -> (Option<Work>, bool) {
        for _ in 0..TURN_LEAVES {
            let Some(present) = self.from.table().next_present(self.next, MAX_SLOTS) else {
                if self.left {
                    self.stall(family);
                    (self.next, self.left) = (0, false);
                    return (Some(Work::PassOn(self)), false);
                }
                for gone in self.chain.unlink(self.number) {
                    layer(family, gone);
                }
                if self.stalled {
                    family.removals.got_on();
                } else {
                    family.removal_ended();
                }
                if let Some(chain) = Arc::into_inner(self.chain) {
                    drop_parent(chain.into_parent());
                }
                return (None, true);
            };
            let start = present & !(LEAF_SLOTS - 1);
            let Ok(left) = self.chain.pass_on(family, self.number, start, start + LEAF_SLOTS) else {
                // No memory for a leaf: later there may be.
                self.stall(family);
                return (Some(Work::PassOn(self)), false);
            };
            self.left |= left;
            self.next = start + LEAF_SLOTS;
        }
        (Some(Work::PassOn(self)), true)
    }
}

/// Drops what lay below a device. The end of a device may have to wait for a disk: not on this thread.
fn drop_parent(parent: Parent) {
    if let Parent::Device(base) = &parent
        && Arc::strong_count(&base.device) == 1
    {
        drop_apart(parent);
    }
}

fn drop_apart(what: impl Send + 'static) {
    let started =
        freestone_core::sync::thread::Builder::new().name("cleaner-end".into()).spawn(move || drop(what));
    if let Err(error) = started {
        tracing::warn!(%error, "no thread to end a device on; others wait for it");
    }
}

#[cfg(test)]
#[path = "retire_tests.rs"]
mod tests;
