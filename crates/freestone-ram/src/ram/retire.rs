//! Layers that nobody uses any more are freed in the background: what a rewind, a reset or a removal leaves.
//!
//! One thread does that for the whole process. It is charged to nobody, and never the cause of "no space": a write that
//! finds no memory frees some of it itself, and tries again.
//!
//! A family that is gone altogether is not freed piece by piece: its memory goes as a whole.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use super::Ram;
use super::chain::{Chain, carry_on};
use super::family::Shared;
use super::job::Job;
use super::layer::Layer;
use super::parent::Parent;
use freestone_core::mutants::{self, Mutant};
use freestone_core::slot::{LEAF_SLOTS, MAX_SLOTS, chain};
use freestone_core::sync::{AtomicU64, Condvar, LazyLock, Mutex, Ordering};

/// Leaves of one thing that are freed before others have their turn.
const TURN_LEAVES: u32 = 64;
/// Pause where all that is left is on its way from a backing device.
const PAUSE: Duration = Duration::from_millis(5);

/// Removed devices that wait for the cleaner, beyond which making others waits for it.
const TASKS_MAX: usize = 512;
/// How often that looks again, at most: 0.1 s.
const PACE_TRIES: u32 = 500;

/// Layers of a family that are being freed, by as many threads as come to help. Lock order: taken for a look at what to
/// do next; slots are not locked under it.
#[derive(Default)]
pub(super) struct Retiring(Mutex<VecDeque<Draining>>);

struct Draining {
    layer: Arc<Layer>,
    next: u64,
    /// Threads at work on leaves of it.
    busy: u32,
    /// Leaves in which something was on its way from the backing device.
    again: Vec<u64>,
}

/// What a step of freeing came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// A leaf was freed.
    Freed,
    /// Others free what is left, or it is on its way from the backing device.
    Later,
    /// Nothing is left.
    Nothing,
}

impl Retiring {
    /// Whether somebody is freeing a leaf.
    fn is_busy(&self) -> bool {
        self.0.lock().iter().any(|draining| draining.busy > 0)
    }

    /// Bytes that are still to be freed.
    pub fn bytes(&self) -> u64 {
        self.0.lock().iter().map(|draining| draining.layer.charged()).sum()
    }
}

impl Shared {
    /// Frees a leaf of what is to be freed.
    fn free_some(&self) -> Step {
        let (layer, start) = {
            let mut queue = self.retiring.0.lock();
            let mut found = None;
            for draining in queue.iter_mut() {
                let next = draining.layer.table().next_present(draining.next, MAX_SLOTS);
                let start = match next {
                    Some(next) => {
                        draining.next = (next | (LEAF_SLOTS - 1)) + 1;
                        next & !(LEAF_SLOTS - 1)
                    }
                    None => match draining.again.pop() {
                        Some(start) => start,
                        None => continue,
                    },
                };
                draining.busy += 1;
                found = Some((Arc::clone(&draining.layer), start));
                break;
            }
            match found {
                Some(found) => found,
                None if queue.is_empty() => return Step::Nothing,
                None => return Step::Later,
            }
        };
        let (freed, left) = chain::free_leaf(self, &layer, start);
        let mut queue = self.retiring.0.lock();
        if let Some(at) = queue.iter().position(|draining| Arc::ptr_eq(&draining.layer, &layer)) {
            let draining = &mut queue[at];
            draining.busy -= 1;
            if left {
                draining.again.push(start);
            }
            let is_done = draining.busy == 0
                && draining.again.is_empty()
                && layer.table().next_present(draining.next, MAX_SLOTS).is_none();
            if is_done {
                queue.remove(at);
                drop(queue);
                self.layers.remove(layer.id());
            }
        }
        if freed || !left { Step::Freed } else { Step::Later }
    }

    /// Whether anything is still to be freed.
    pub(super) fn is_freeing(&self) -> bool {
        !self.retiring.0.lock().is_empty()
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
    layer.retire(family);
    if layer.table().next_present(0, MAX_SLOTS).is_none() {
        return family.layers.remove(layer.id());
    }
    family.retiring.0.lock().push_back(Draining { layer, next: 0, busy: 0, again: Vec::new() });
    CLEANER.add(Task { family: Arc::downgrade(family), work: Work::Drain });
}

/// Has the rest of a device's life done: a live one's (`number` is `None`), or that of a snapshot of a chain. `below` is the device's
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

/// Removed devices whose pages cannot be freed before the cleaner has done something else, and rewinds that have not yet
/// retired what was there, as writes without memory see them. One that is no longer `pending` is already among those that
/// `ended`, and its pages among what is retired.
///
/// Lock order: `waiting` is innermost.
#[derive(Default)]
pub(super) struct Removals {
    pending: AtomicU64,
    ended: AtomicU64,
    /// Requests that try again when one has ended. Each gets on by itself, so none waits for ever.
    waiting: Mutex<Vec<(Ram, Job)>>,
}

/// What a write that found no memory can hope for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hope {
    None,
    /// A removed device gave its memory back meanwhile.
    Again,
    /// One is about to.
    Later,
}

impl Removals {
    /// Whether something is removed and not retired yet.
    pub fn is_pending(&self) -> bool {
        self.pending.load(Ordering::SeqCst) > 0
    }

    /// `ended` is what this said of the attempt before, at first 0.
    pub fn hope(&self, ended: &mut u64) -> Hope {
        if self.pending.load(Ordering::SeqCst) > 0 {
            if mutants::on(Mutant::FalseNoSpace) {
                return Hope::None;
            }
            return Hope::Later;
        }
        let before = std::mem::replace(ended, self.ended.load(Ordering::SeqCst));
        if *ended == before { Hope::None } else { Hope::Again }
    }

    /// The request goes on when a removal has ended. Returned: none is pending any more.
    pub fn wait(&self, ram: &Ram, job: Job) -> Option<Job> {
        let mut waiting = self.waiting.lock();
        // Who ends one looks at the list after that.
        if self.pending.load(Ordering::SeqCst) == 0 {
            return Some(job);
        }
        waiting.push((ram.clone(), job));
        None
    }
}

impl Shared {
    /// From now on writes that find no memory wait until [`removal_ended`](Self::removal_ended).
    pub(super) fn removal_begins(&self) {
        self.removals.pending.fetch_add(1, Ordering::SeqCst);
    }

    /// What was removed is retired, or of no use to anybody who waits for memory.
    pub(super) fn removal_ended(&self) {
        self.removals.ended.fetch_add(1, Ordering::SeqCst);
        self.removals.pending.fetch_sub(1, Ordering::SeqCst);
        let waiting = std::mem::take(&mut *self.removals.waiting.lock());
        for (ram, job) in waiting {
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
                    family.removals.ended.fetch_add(1, Ordering::SeqCst);
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
