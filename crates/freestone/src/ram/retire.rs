//! Layers that nobody uses any more are freed in the background: what a rewind, a reset or a removal leaves.
//!
//! One thread does that for the whole process. It is charged to nobody, and never the cause of "no space": a write that
//! finds no memory frees some of it itself, and tries again.
//!
//! A family that is gone altogether is not freed piece by piece: its memory goes as a whole.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, LazyLock, PoisonError, Weak};
use std::time::Duration;

use super::chain::Chain;
use super::family::Shared;
use super::layer::Layer;
use crate::slot::{Kind, LEAF_SLOTS, MAX_SLOTS, Word};
use crate::sync::Mutex;

/// Leaves of one thing that are freed before others have their turn.
const TURN_LEAVES: u32 = 64;
/// Pause where all that is left is on its way from a backing device.
const PAUSE: Duration = Duration::from_millis(5);

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
        let (freed, left) = self.free_leaf(&layer, start);
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

    /// Frees what a leaf holds. Returns whether it freed anything, and whether something is left.
    fn free_leaf(&self, layer: &Layer, start: u64) -> (bool, bool) {
        let Some(leaf) = layer.table().leaf(start) else { return (false, false) };
        let (mut freed, mut left) = (false, false);
        for slot in start..start + LEAF_SLOTS {
            if leaf.peek(slot) == Word::EMPTY {
                continue;
            }
            let guard = leaf.lock(slot);
            let word = guard.word();
            if word.kind() == Kind::InFlight {
                left = true;
                continue;
            }
            guard.publish(Word::EMPTY);
            layer.account(self, word, Word::EMPTY);
            self.release(word);
            freed = true;
        }
        (freed, left)
    }

    /// Frees a leaf of what is to be freed, or lets others do so. False: there is nothing, but for what is on its way from
    /// the backing device.
    pub(super) fn help_to_free(&self) -> bool {
        match self.free_some() {
            Step::Freed => true,
            Step::Later if self.retiring.is_busy() => {
                std::thread::yield_now();
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
    CLEANER.add(Task::Drain(Arc::downgrade(family)));
}

/// Has the rest of a device's life done: a live one's (`number` is `None`), or that of a snapshot of a chain.
pub(super) fn device(family: &Arc<Shared>, chain: Arc<Chain>, number: Option<u64>) {
    let family = Arc::downgrade(family);
    CLEANER.add(match number {
        None => Task::Abandon(family, chain),
        Some(number) => Task::Doom(family, chain, number),
    });
}

/// Something for the cleaner. Families are held weakly: one that nobody uses any more goes as a whole.
enum Task {
    Drain(Weak<Shared>),
    Abandon(Weak<Shared>, Arc<Chain>),
    Doom(Weak<Shared>, Arc<Chain>, u64),
    PassOn(Weak<Shared>, Arc<Chain>, u64, Arc<Layer>, Progress),
}

/// How far passing on has come.
#[derive(Default)]
struct Progress {
    next: u64,
    left: bool,
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
            let started = std::thread::Builder::new().name("cleaner".into()).spawn(move || self.run());
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
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }
}

/// Carries on with a task. Returns what is left of it, and whether it got on.
fn step(task: Task) -> (Option<Task>, bool) {
    match task {
        Task::Drain(family) => {
            let Some(shared) = family.upgrade() else { return (None, true) };
            let mut step = Step::Nothing;
            for _ in 0..TURN_LEAVES {
                step = shared.free_some();
                if step != Step::Freed {
                    break;
                }
            }
            match step {
                Step::Nothing => {
                    shared.pool.release_empties();
                    shared.keeper.memory_freed();
                    (None, true)
                }
                _ => (Some(Task::Drain(family)), step == Step::Freed),
            }
        }
        Task::Abandon(family, chain) => {
            let Some(shared) = family.upgrade() else { return (None, true) };
            if chain.abandon()
                && let Some(origin) = shared.layers.get(chain.id)
            {
                layer(&shared, origin);
            }
            (None, true)
        }
        Task::Doom(family, chain, number) => {
            let Some(shared) = family.upgrade() else { return (None, true) };
            let doomed = chain.doom(number);
            drop(shared);
            (doomed.map(|doomed| Task::PassOn(family, chain, number, doomed, Progress::default())), true)
        }
        Task::PassOn(family, chain, number, from, mut progress) => {
            let Some(shared) = family.upgrade() else { return (None, true) };
            for _ in 0..TURN_LEAVES {
                let Some(present) = from.table().next_present(progress.next, MAX_SLOTS) else {
                    if progress.left {
                        drop(shared);
                        let task = Task::PassOn(family, chain, number, from, Progress::default());
                        return (Some(task), false);
                    }
                    let (buried, origin) = chain.bury(number);
                    for gone in buried.into_iter().chain(origin) {
                        layer(&shared, gone);
                    }
                    return (None, true);
                };
                let start = present & !(LEAF_SLOTS - 1);
                let Ok(left) = chain.pass_on(&shared, number, start, start + LEAF_SLOTS) else {
                    // No memory for a leaf: later there may be.
                    drop(shared);
                    return (Some(Task::PassOn(family, chain, number, from, progress)), false);
                };
                progress.left |= left;
                progress.next = start + LEAF_SLOTS;
            }
            drop(shared);
            (Some(Task::PassOn(family, chain, number, from, progress)), true)
        }
    }
}
