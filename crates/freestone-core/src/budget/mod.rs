//! A budget of bytes that the queues of a process share: what they hold for requests that are not
//! answered yet.
//!
//! Each queue has a [`Share`], takes bytes before it allocates them, and gives them back. A share that
//! finds none waits, and is woken when they are granted.
//!
//! # Fairness
//! Nothing that is held can be taken away, and a hung disk, a rate limit or a client that reads nothing
//! may hold it for good. So what a device and a connection may hold depends on what is free, which
//! leaves a part for everyone who comes later:
//! * All shares of a device together hold at most a quarter of what is free (`DEVICE_PART`).
//! * A share holds at most twice what its device may still take (`SHARE_ROOMS`).
//! * A device that holds nothing may take all that is free, and so may, beside the above, one share of
//!   each device that holds nothing: the largest request passes.
//! * An eighth is for shares that hold little ([`LITTLE_BYTES`]), by the same rule for each device.
//!
//! Shares that wait are looked at whenever bytes come back: first those that asked first, and each
//! device in turn. None waits for another one that cannot be granted yet.

#[cfg(all(test, not(loom)))]
mod tests;

use std::collections::{HashMap, VecDeque};

use crate::device::Failures;
use crate::sync::{Arc, Mutex, MutexGuard};

/// A share that holds at most so many bytes may use the part of the budget that is kept for such.
pub const LITTLE_BYTES: u64 = 512 << 10;
/// The part that is kept for them: one of so many.
const KEPT_PART: u64 = 8;
/// A device holds at most this part, one of so many, of what is free: a fifth of the budget alone,
/// and ten busy devices a fourteenth each.
const DEVICE_PART: u64 = 4;
/// A share holds at most so many times what its device may still take: a seventh of the budget if it
/// is the only one.
const SHARE_ROOMS: u64 = 2;
/// The least budget: the largest request (32 MiB in one buffer) has room beside what is kept.
pub const MIN_BYTES: u64 = 64 << 20;
/// What a process has unless it is told.
pub const DEFAULT_BYTES: u64 = 256 << 20;

/// Called when bytes were granted to who waited for them; short, and not from under a lock.
pub trait Granted: Send + Sync {
    /// What the share waited for is there.
    fn granted(&self);
}

/// Bytes that can be taken.
///
/// Lock order: `state` is innermost, held for a look or a change. Who waits is told outside of it.
#[derive(Debug)]
pub struct Budget {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    limit: u64,
    main: Pool,
    kept: Pool,
    /// Entries of no share are in `free_shares`.
    shares: Vec<Holding>,
    free_shares: Vec<usize>,
    /// Entries of no device are in `free_groups`.
    groups: Vec<Group>,
    free_groups: Vec<usize>,
    /// Groups by the address of what identifies their device.
    by_device: HashMap<usize, usize>,
    /// Groups in which shares wait; the one whose turn is next first.
    waiting: VecDeque<usize>,
}

/// A part of the budget.
#[derive(Debug)]
struct Pool {
    limit: u64,
    used: u64,
}

impl Pool {
    fn free(&self) -> u64 {
        self.limit - self.used
    }
}

/// What a share has.
#[derive(Default)]
struct Holding {
    group: usize,
    main: u64,
    kept: u64,
    /// Bytes it waits for, and who is told.
    wants: u64,
    who: Option<Arc<dyn Granted>>,
}

impl std::fmt::Debug for Holding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Holding({} + {}, wants {})", self.main, self.kept, self.wants)
    }
}

/// The shares of a device.
#[derive(Debug, Default)]
struct Group {
    /// Identifies the device: no other one has this address as long as it is here.
    device: Option<Arc<Failures>>,
    shares: usize,
    main: u64,
    kept: u64,
    /// The share that holds more than the device may take.
    beyond: Option<usize>,
    /// Shares that wait, the first one first.
    waiting: VecDeque<usize>,
}

/// Where bytes come from.
#[derive(Debug, Clone, Copy)]
enum Source {
    Main,
    /// The same, although the device may take no more.
    Beyond,
    Kept,
}

impl Budget {
    /// A budget of so many bytes, at least [`MIN_BYTES`].
    pub fn new(bytes: u64) -> Arc<Self> {
        let limit = bytes.max(MIN_BYTES);
        let kept = limit / KEPT_PART;
        Arc::new(Self {
            state: Mutex::new(State {
                limit,
                main: Pool { limit: limit - kept, used: 0 },
                kept: Pool { limit: kept, used: 0 },
                shares: Vec::new(),
                free_shares: Vec::new(),
                groups: Vec::new(),
                free_groups: Vec::new(),
                by_device: HashMap::new(),
                waiting: VecDeque::new(),
            }),
        })
    }

    /// A share of the device whose failures are counted in `device`. It holds nothing; `who` is told
    /// when it was given what it waited for.
    pub fn share(self: &Arc<Self>, device: &Arc<Failures>, who: Arc<dyn Granted>) -> Share {
        let id = self.state.lock().join(device, who);
        Share { budget: Arc::clone(self), id, taken: 0, waits: false, used: false }
    }

    /// All bytes, and those that are taken.
    pub fn bytes(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.limit, state.main.used + state.kept.used)
    }
}

/// Gives what is free to those that wait, and tells them.
fn serve(mut state: MutexGuard<'_, State>) {
    let mut served = Vec::new();
    for _ in 0..state.waiting.len() {
        state.serve_next_group(&mut served);
    }
    drop(state);
    for who in served {
        who.granted();
    }
}

fn address_of(device: &Arc<Failures>) -> usize {
    Arc::as_ptr(device).addr()
}

/// Puts a value into a free entry, and returns which one.
fn insert<T>(entries: &mut Vec<T>, free: &mut Vec<usize>, value: T) -> usize {
    if let Some(index) = free.pop() {
        entries[index] = value;
        return index;
    }
    entries.push(value);
    entries.len() - 1
}

impl State {
    /// Adds a share.
    fn join(&mut self, device: &Arc<Failures>, who: Arc<dyn Granted>) -> usize {
        let (groups, free) = (&mut self.groups, &mut self.free_groups);
        let group = *self.by_device.entry(address_of(device)).or_insert_with(|| {
            insert(groups, free, Group { device: Some(Arc::clone(device)), ..Group::default() })
        });
        self.groups[group].shares += 1;
        insert(
            &mut self.shares,
            &mut self.free_shares,
            Holding { group, who: Some(who), ..Holding::default() },
        )
    }

    /// Takes bytes for a share that does not wait; false: there are none for it.
    fn take(&mut self, id: usize, bytes: u64) -> bool {
        let source = self.source(id, bytes, self.groups[self.shares[id].group].waiting.is_empty());
        if let Some(source) = source {
            self.give(id, bytes, source);
        }
        source.is_some()
    }

    /// Returns from where a share may have bytes now. `has_turn`: no share of its device waits for more
    /// than little.
    fn source(&self, id: usize, bytes: u64, has_turn: bool) -> Option<Source> {
        let share = &self.shares[id];
        let group = &self.groups[share.group];
        let free = self.main.free();
        if has_turn && bytes <= free {
            let room = (free / DEVICE_PART).saturating_sub(group.main);
            if group.main == 0 || (share.main + bytes <= room * SHARE_ROOMS && bytes <= room) {
                return Some(Source::Main);
            }
            if share.main == 0 && group.beyond.is_none() {
                return Some(Source::Beyond);
            }
        }
        let free = self.kept.free();
        let is_little = share.main + share.kept + bytes <= LITTLE_BYTES && bytes <= free;
        (is_little && (group.kept == 0 || group.kept + bytes <= free / DEVICE_PART)).then_some(Source::Kept)
    }

    fn give(&mut self, id: usize, bytes: u64, source: Source) {
        let share = &mut self.shares[id];
        let group = &mut self.groups[share.group];
        let (pool, of_group, of_share) = match source {
            Source::Kept => (&mut self.kept, &mut group.kept, &mut share.kept),
            Source::Main | Source::Beyond => (&mut self.main, &mut group.main, &mut share.main),
        };
        pool.used += bytes;
        *of_group += bytes;
        *of_share += bytes;
        if matches!(source, Source::Beyond) {
            group.beyond = Some(id);
        }
    }

    /// The share waits for bytes from now on.
    fn wait(&mut self, id: usize, bytes: u64) {
        let share = &mut self.shares[id];
        share.wants = bytes;
        let group = &mut self.groups[share.group];
        if group.waiting.is_empty() {
            self.waiting.push_back(share.group);
        }
        group.waiting.push_back(id);
    }

    /// Gives shares of a device that wait what they want, and adds who is to be told. The next device
    /// has its turn then.
    fn serve_next_group(&mut self, served: &mut Vec<Arc<dyn Granted>>) {
        let Some(index) = self.waiting.pop_front() else { return };
        let mut waiting = std::mem::take(&mut self.groups[index].waiting);
        waiting.retain(|&id| {
            let Some(source) = self.source(id, self.shares[id].wants, true) else { return true };
            let bytes = std::mem::take(&mut self.shares[id].wants);
            self.give(id, bytes, source);
            served.extend(self.shares[id].who.clone());
            false
        });
        if !waiting.is_empty() {
            self.waiting.push_back(index);
        }
        self.groups[index].waiting = waiting;
    }

    /// Takes all from a share, which waits for nothing any more.
    fn leave(&mut self, id: usize) {
        self.give_back(id, u64::MAX);
        self.stop_waiting(id);
    }

    fn stop_waiting(&mut self, id: usize) {
        let share = &mut self.shares[id];
        if std::mem::take(&mut share.wants) > 0 {
            let index = share.group;
            let waiting = &mut self.groups[index].waiting;
            waiting.retain(|waits| *waits != id);
            if waiting.is_empty() {
                self.waiting.retain(|waits| *waits != index);
            }
        }
    }

    /// Removes a share that has left, and its device with the last one.
    fn remove(&mut self, id: usize) {
        let index = std::mem::take(&mut self.shares[id]).group;
        self.free_shares.push(id);
        let group = &mut self.groups[index];
        group.shares -= 1;
        if group.shares == 0 {
            let device = std::mem::take(group).device;
            self.by_device.remove(&device.as_ref().map_or(0, address_of));
            self.free_groups.push(index);
        }
    }

    /// Takes bytes from a share: first those that large requests wait for.
    fn give_back(&mut self, id: usize, bytes: u64) {
        let share = &mut self.shares[id];
        let main = bytes.min(share.main);
        let kept = (bytes - main).min(share.kept);
        share.main -= main;
        share.kept -= kept;
        self.main.used -= main;
        self.kept.used -= kept;
        let group = &mut self.groups[share.group];
        group.main -= main;
        group.kept -= kept;
        // What a share holds beside requests is little.
        if group.beyond == Some(id) && share.main <= LITTLE_BYTES {
            group.beyond = None;
        }
    }
}

/// What one queue takes of a budget. All of it is given back when it is dropped.
#[derive(Debug)]
pub struct Share {
    budget: Arc<Budget>,
    id: usize,
    /// Bytes that it has.
    taken: u64,
    /// It waits for more.
    waits: bool,
    /// It has asked for bytes since it gave all back.
    used: bool,
}

/// Bytes are taken in steps of so many: small requests seldom ask.
const STEP_BYTES: u64 = 64 << 10;

impl Share {
    /// Has bytes for what is held, `total` in all, without waiting. False: there are not so many,
    /// or it waits for them: it may [`wait_for`](Self::wait_for) them.
    #[inline]
    pub fn reach(&mut self, total: u64) -> bool {
        total <= self.taken || self.take(total)
    }

    fn take(&mut self, total: u64) -> bool {
        self.used = true;
        let mut state = self.budget.state.lock();
        if self.waits {
            let share = &state.shares[self.id];
            self.waits = share.wants > 0;
            self.taken = share.main + share.kept;
            if self.waits || total <= self.taken {
                return !self.waits;
            }
        }
        let more = total.next_multiple_of(STEP_BYTES) - self.taken;
        let taken = state.take(self.id, more);
        self.taken += if taken { more } else { 0 };
        taken
    }

    /// Waits for `bytes` beside those that are held, after [`reach`](Self::reach) has found none.
    /// What is not held is given back first: so all that is taken comes back without anybody's
    /// waiting. A share that waits already gives back what it holds no more, and goes on waiting.
    pub fn wait_for(&mut self, held: u64, bytes: u64) {
        let excess = self.taken.saturating_sub(held);
        if self.waits && excess == 0 {
            return;
        }
        let mut state = self.budget.state.lock();
        if self.waits && state.shares[self.id].wants == 0 {
            // Granted since `reach` looked: the next `reach` takes it.
            return;
        }
        self.taken -= excess;
        state.give_back(self.id, excess);
        if !self.waits {
            self.waits = true;
            // What exceeds the whole, as no request does, would never be there.
            let bytes = bytes.min(state.main.limit);
            state.wait(self.id, bytes);
        }
        serve(state);
    }

    /// Waits for nothing any more. `held` bytes stay, and what was granted beyond them is given back.
    pub fn stop_waiting(&mut self, held: u64) {
        if !std::mem::take(&mut self.waits) {
            return;
        }
        let mut state = self.budget.state.lock();
        state.stop_waiting(self.id);
        let share = &state.shares[self.id];
        let all = share.main + share.kept;
        let excess = all.saturating_sub(held);
        state.give_back(self.id, excess);
        self.taken = all - excess;
        serve(state);
    }

    /// Whether it has bytes, or waits for some.
    #[inline]
    pub fn is_used(&self) -> bool {
        self.used
    }

    /// Whether it waits for bytes.
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// Gives back what exceeds `total` bytes by more than a little.
    pub fn keep(&mut self, total: u64) {
        if self.taken > total + 2 * STEP_BYTES {
            let bytes = self.taken - total.next_multiple_of(STEP_BYTES);
            self.taken -= bytes;
            let mut state = self.budget.state.lock();
            state.give_back(self.id, bytes);
            serve(state);
        }
    }

    /// Gives back all, and waits for nothing any more.
    #[inline]
    pub fn leave(&mut self) {
        if self.is_used() {
            self.give_all();
        }
    }

    fn give_all(&mut self) {
        (self.taken, self.waits, self.used) = (0, false, false);
        let mut state = self.budget.state.lock();
        state.leave(self.id);
        serve(state);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut state = self.budget.state.lock();
        state.leave(self.id);
        state.remove(self.id);
        serve(state);
    }
}
