//! The background of a disk with a backing device: it spills when memory gets short, and lets requests go on that waited
//! for that.
//!
//! Above the high mark of `mem_limit` the coldest pages are written until the low mark. Requests are not slowed by that
//! until the limit itself is reached; there a write waits until a batch has left memory, and goes on at the pace of the backing
//! device. It fails with "no space" only where nothing can be spilled: the device is full, fails, does not answer, or
//! `writeback_limit` is used up.
//!
//! Two threads: the *keeper* writes and waits for the device; the *runner* carries on requests that waited, in slices, so that
//! none holds up the others, and does what must not be done on a thread of the device. Both hold the disk by a weak reference while they have nothing to do.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, PoisonError, Weak};
use std::thread;

use super::fetch::{Job, Wanted};
use super::pass::{Offered, Pass, is_spillable};
use super::writeback::{RECLAIMED_MIN_BLOCKS, WritebackError};
use super::{Inner, Ram};
use crate::PAGE_BYTES;
use crate::clock::{TICK, now_ms};
use crate::device::Error;
use crate::pin;
use crate::pool::Pool;
use crate::slot::{AGES, LEAF_SLOTS, Word};
use crate::sync::{Mutex, MutexGuard};

/// Share of `mem_limit` above which pages are spilled, in percent.
const HIGH_PERCENT: u64 = 95;
/// Share of `mem_limit` at which spilling ends, in percent.
const LOW_PERCENT: u64 = 90;
/// Rounds in a row that free nothing, although nothing fails, before requests that wait are refused.
const EMPTY_ROUNDS_MAX: u32 = 16;
/// Rounds in a row that failed and freed nothing, after which the device is not asked for every request.
const FAILURES_MAX: u32 = 3;
/// Then nothing is tried for so long.
const RETRY_MS: u64 = 1000;
/// Least that a round frees while requests wait for memory.
const ROUND_BYTES_MIN: u64 = 16 * PAGE_BYTES as u64;

/// What the two threads are told. The disk owns it, they share it.
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
    /// Rounds in a row that found nothing to spill.
    empty_rounds: u32,
}

/// Something for the runner.
enum Task {
    /// A request goes on.
    Resume(Ram, Job),
    /// Pages that could not be read together are read one by one.
    Reread(Ram, Vec<Wanted>),
    /// These flights, by number and owner, are late.
    Fail(Vec<(u64, u64)>),
}

impl Keeper {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Starts the threads.
    pub fn start(self: &Arc<Self>, disk: &Arc<Inner>) -> std::io::Result<()> {
        let (keeper, ram) = (Arc::clone(self), Arc::downgrade(disk));
        thread::Builder::new().name("keeper".into()).spawn(move || keeper.keep(&ram))?;
        let (runner, ram) = (Arc::clone(self), Arc::downgrade(disk));
        thread::Builder::new().name("runner".into()).spawn(move || runner.run(&ram)).map(drop)
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

    /// Requests that wait for memory try again.
    pub fn memory_freed(&self) {
        let mut state = self.lock();
        let waiting = std::mem::take(&mut state.waiting);
        if !waiting.is_empty() {
            state.ready.extend(waiting.into_iter().map(|(ram, job)| Task::Resume(ram, job)));
            self.ready.notify_one();
        }
    }

    /// The request goes on.
    pub fn resume(&self, ram: Ram, job: Job) {
        self.lock().ready.push_back(Task::Resume(ram, job));
        self.ready.notify_one();
    }

    /// Pages are read one by one.
    pub fn reread(&self, ram: Ram, wanted: Vec<Wanted>) {
        self.lock().ready.push_back(Task::Reread(ram, wanted));
        self.ready.notify_one();
    }

    /// Flights are failed.
    pub fn fail(&self, late: Vec<(u64, u64)>) {
        self.lock().ready.push_back(Task::Fail(late));
        self.ready.notify_one();
    }

    /// Whether somebody waits for what a round of spilling frees.
    pub fn is_wanted(&self) -> bool {
        let state = self.lock();
        state.kick || !state.waiting.is_empty()
    }

    /// Counts rounds in a row that did not get on.
    fn after_round(&self, got_on: bool) -> u32 {
        let mut state = self.lock();
        state.empty_rounds = if got_on { 0 } else { state.empty_rounds + 1 };
        state.empty_rounds
    }

    /// Nothing can be freed: requests that wait for memory try once more, and fail if it is not there.
    fn give_up(&self) {
        let mut state = self.lock();
        state.empty_rounds = 0;
        let waiting = std::mem::take(&mut state.waiting);
        let last = |(ram, job): (Ram, Job)| Task::Resume(ram, job.for_the_last_time());
        state.ready.extend(waiting.into_iter().map(last));
        self.ready.notify_one();
    }

    fn run(&self, disk: &Weak<Inner>) {
        let mut state = self.lock();
        loop {
            match state.ready.pop_front() {
                Some(task) => {
                    drop(state);
                    // A completion that panics ends its request, not the disk.
                    let _ = catch_unwind(AssertUnwindSafe(|| self.carry_out(task, disk)));
                    state = self.lock();
                }
                None if state.stop => return,
                None => state = self.ready.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn carry_out(&self, task: Task, disk: &Weak<Inner>) {
        match task {
            Task::Resume(ram, job) => {
                if let Some(job) = ram.slice(job) {
                    self.resume(ram, job);
                }
            }
            Task::Reread(ram, wanted) => ram.read_one_by_one(wanted),
            Task::Fail(late) => {
                if let Some(disk) = disk.upgrade() {
                    for (flight, owner) in late {
                        disk.fail_flight(flight, owner);
                    }
                }
            }
        }
    }

    fn keep(&self, disk: &Weak<Inner>) {
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
            let Some(disk) = disk.upgrade() else { return };
            disk.make_room(waiting);
            if now_ms() - last_tick >= TICK.as_millis() as u64 {
                last_tick = now_ms();
                disk.reclaim_if_worth_it();
                disk.auto_recompress();
            }
        }
    }
}

/// What a round came to.
struct Spilled {
    /// Bytes of objects that were taken on.
    taken: u64,
    /// Pages that left memory.
    freed: u64,
    outcome: Result<(), WritebackError>,
}

impl Inner {
    /// Pages of the pool at which spilling begins and ends; `None` where there is no limit.
    pub(super) fn marks(&self) -> Option<(u64, u64)> {
        let limit = self.mem_limit() / PAGE_BYTES as u64;
        self.store.as_ref().filter(|_| limit > 0).map(|_| {
            let low = (limit * LOW_PERCENT / 100).min(limit.saturating_sub(2));
            ((limit * HIGH_PERCENT / 100).max(low), low)
        })
    }

    /// Spills until the low mark, if memory is above the high one or requests wait.
    fn make_room(&self, waiting: bool) {
        let Some((high, low)) = self.marks() else {
            // The limit was lifted.
            return self.keeper.memory_freed();
        };
        if self.pool.pages() <= high && !waiting {
            return;
        }
        let (failures, at) = *self.spill_failures.lock();
        if failures >= FAILURES_MAX && now_ms() - at < RETRY_MS {
            return self.keeper.give_up();
        }
        let _one = self.passes.lock();
        self.renumber_ages();
        let pages = self.pool.pages();
        let slack = (pages * PAGE_BYTES as u64).saturating_sub(self.stored_bytes());
        if slack > pages * PAGE_BYTES as u64 / 8 {
            self.compact();
            self.keeper.memory_freed();
        }
        let need = self.pool.pages().saturating_sub(low) * PAGE_BYTES as u64;
        let need = if waiting { need.max(ROUND_BYTES_MIN) } else { need };
        if need == 0 {
            return;
        }
        let mut spilled = self.spill(need);
        if spilled.outcome == Err(WritebackError::NoSpace) && self.reclaim_all() > RECLAIMED_MIN_BLOCKS {
            let again = self.spill(need.saturating_sub(spilled.taken).max(1));
            spilled = Spilled {
                taken: spilled.taken + again.taken,
                freed: spilled.freed + again.freed,
                outcome: again.outcome,
            };
        }
        // Places are scattered: only whole pages can serve other sizes.
        let compacted = if spilled.taken > 0 { self.compact() } else { 0 };
        if let Err(error) = spilled.outcome {
            self.spill_failed(error);
        }
        let got_on = spilled.freed > 0 || compacted > 0;
        let failed = matches!(spilled.outcome, Err(WritebackError::Device(_)));
        let failures = {
            let mut failures = self.spill_failures.lock();
            let silent = self.store.as_ref().is_some_and(|store| store.unanswered() > 0);
            let count = if silent { FAILURES_MAX } else { failures.0 + 1 };
            *failures = if failed && !got_on { (count, now_ms()) } else { (0, 0) };
            failures.0
        };
        // One failure may be of one place only; and what was taken on may have been changed meanwhile.
        let again = match spilled.outcome {
            Ok(()) => self.keeper.after_round(got_on) < EMPTY_ROUNDS_MAX,
            Err(WritebackError::Device(_)) => failures < FAILURES_MAX,
            Err(_) => false,
        };
        match (got_on, again) {
            (true, _) => self.keeper.memory_freed(),
            (false, true) => {}
            (false, false) => return self.keeper.give_up(),
        }
        if again && (self.pool.pages() > high || !got_on) {
            self.keeper.kick();
        }
    }

    /// Says once what keeps pages from being spilled.
    fn spill_failed(&self, error: WritebackError) {
        let mut last = self.spill_error.lock();
        if *last != Some(error) {
            tracing::warn!("pages cannot be spilled: {error}");
            *last = Some(error);
        }
    }

    /// Spills about `need` bytes of objects, the coldest first.
    fn spill(&self, need: u64) -> Spilled {
        let nothing = |outcome| Spilled { taken: 0, freed: 0, outcome };
        let Some(store) = &self.store else { return nothing(Ok(())) };
        if store.unanswered() > 0 {
            return nothing(Err(WritebackError::Device(Error::Media)));
        }
        // Before all slots are looked at in vain.
        match store.budget().get() {
            limit if limit.enabled && limit.left == 0 => return nothing(Err(WritebackError::Limit)),
            _ if store.free_blocks() == 0 => return nothing(Err(WritebackError::NoSpace)),
            _ => {}
        }
        // What is touched from here on is younger than everything that was there.
        self.ages.advance(now_ms());
        let ranks = self.ages.ranks();
        let rank = |word: Word| ranks[usize::from(word.age())];
        let mut by_rank = [0_u64; AGES];
        self.each_leaf(|start, leaf| {
            for slot in start..start + LEAF_SLOTS {
                let word = leaf.peek(slot);
                if is_spillable(word) && !word.is_picked() {
                    by_rank[usize::from(rank(word))] += Pool::charged_bytes(word.stored_bytes());
                }
            }
            true
        });
        let mut colder = 0;
        let mut last = 0;
        while last + 1 < AGES && colder + by_rank[last] < need {
            colder += by_rank[last];
            last += 1;
        }
        let last = last as u8;
        // Of the last age only what is still needed.
        let mut left_of_last = need.saturating_sub(colder);
        let mut pass = Pass::new(self, store);
        let mut taken = 0;
        let mut outcome = Ok(());
        let mut found = Vec::with_capacity(LEAF_SLOTS as usize);
        let mut from = 0;
        'leaves: while let Some(next) = self.next_leaf(from, |start, leaf| {
            let words = (start..start + LEAF_SLOTS).map(|slot| (slot, leaf.peek(slot)));
            let cold = words.filter(|&(_, word)| is_spillable(word) && rank(word) <= last);
            found.clear();
            found.extend(cold.map(|(slot, word)| (slot, rank(word))));
            start + LEAF_SLOTS
        }) {
            from = next;
            for &(slot, age) in &found {
                if taken >= need {
                    break 'leaves;
                }
                if age == last && left_of_last == 0 {
                    continue;
                }
                match pass.offer(slot, |word| rank(word) <= last) {
                    Ok(Offered::Taken(stored)) => {
                        let charged = Pool::charged_bytes(stored);
                        taken += charged;
                        if age == last {
                            left_of_last = left_of_last.saturating_sub(charged);
                        }
                    }
                    Ok(Offered::Passed) => {}
                    Ok(Offered::Reset) => break 'leaves,
                    Err(error) => {
                        outcome = Err(error);
                        break 'leaves;
                    }
                }
            }
        }
        let (done, ended) = pass.end();
        let outcome = outcome.and(ended);
        if outcome.is_ok() {
            *self.spill_error.lock() = None;
        }
        Spilled { taken, freed: done.pages, outcome }
    }

    /// Merges old epochs where their numbers run short.
    pub(super) fn renumber_ages(&self) {
        let Some(renumbering) = self.ages.merge() else { return };
        self.each_leaf(|start, leaf| {
            for slot in start..start + LEAF_SLOTS {
                let changes = |word: Word| {
                    is_spillable(word)
                        && !word.is_picked()
                        && renumbering[usize::from(word.age())] != word.age()
                };
                if changes(leaf.peek(slot)) {
                    let guard = leaf.lock(slot);
                    let word = guard.word();
                    if changes(word) {
                        guard.publish(word.with_age(renumbering[usize::from(word.age())]));
                    }
                }
            }
            true
        });
        self.ages.merged(&renumbering);
    }

    /// A second has passed: epochs are a second long, on disks with much content longer, so that merging them stays cheap.
    pub(super) fn tick_ages(&self) {
        let leaves = self.common.nodes.bytes() / PAGE_BYTES as u64;
        let long_ms = 1000 * (leaves * LEAF_SLOTS / AGED_SLOTS_PER_SECOND).max(1);
        if now_ms().saturating_sub(self.ages.opened_ms()) + 100 >= long_ms {
            self.ages.advance(now_ms());
            self.renumber_ages();
        }
    }

    /// Shows every leaf there is, pinned, one after the other, until `visit` has enough.
    pub(super) fn each_leaf(&self, mut visit: impl FnMut(u64, crate::slot::Leaf<'_>) -> bool) {
        let mut from = 0;
        while let Some((next, more)) =
            self.next_leaf(from, |start, leaf| (start + LEAF_SLOTS, visit(start, leaf)))
        {
            from = next;
            if !more {
                return;
            }
        }
    }

    /// Shows the first leaf at or after `from`, pinned.
    fn next_leaf<R>(&self, from: u64, visit: impl FnOnce(u64, crate::slot::Leaf<'_>) -> R) -> Option<R> {
        pin::pinned(|pin| {
            let table = self.table.load(pin);
            let start = table.next_present(from, crate::slot::MAX_SLOTS)? & !(LEAF_SLOTS - 1);
            Some(visit(start, table.leaf(start)?))
        })
    }
}

/// Slots that one second of an epoch's length stands for.
const AGED_SLOTS_PER_SECOND: u64 = 1 << 20;
