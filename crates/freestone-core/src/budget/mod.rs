//! A memory budget for requests in flight, shared by all queues of the process.
//!
//! Each queue has a [`Share`], takes bytes before it allocates buffers, and returns them afterwards. If no
//! bytes are available the share waits, and is woken when bytes are granted.
//!
//! # Fairness
//! Taken bytes cannot be revoked, and a hung disk, a rate limit or a client that does not read may hold them
//! forever. Therefore the limits of a device and a share depend on the free part of the budget, so that some
//! of it is left for later ones:
//! * All shares of a device together hold at most a quarter of the free bytes (`DEVICE_PART`).
//! * A share holds at most twice the bytes that its device may still take (`SHARE_ROOMS`).
//! * A device that holds nothing may take all free bytes. In addition, one share of each device may exceed
//!   the device's limit if that share holds nothing. So even the largest request is served.
//! * An eighth is reserved for shares that hold little ([`LITTLE_BYTES`]), by the same rule for each device.
//!
//! Whenever bytes are returned, waiting shares are checked in order of arrival, devices in turn. A share that
//! can be served does not wait behind one that cannot.

#[cfg(all(test, not(loom)))]
mod tests;

use std::collections::{HashMap, VecDeque};

use crate::device::Failures;
use crate::sync::{Arc, Mutex, MutexGuard};

/// Maximum bytes held by a share that may use the reserved part of the budget.
pub const LITTLE_BYTES: u64 = 512 << 10;
/// The reserved part is `1/RESERVED_PART` of the budget.
const RESERVED_PART: u64 = 8;
/// A device may hold `1/DEVICE_PART` of the free bytes: a fifth of the budget if it is the only one, a
/// fourteenth each if ten are busy.
const DEVICE_PART: u64 = 4;
/// A share may hold `SHARE_ROOMS` times the bytes that its device may still take: a seventh of the budget if it
/// is the only share.
const SHARE_ROOMS: u64 = 2;
/// Minimum budget in bytes: the largest request (32 MiB in one buffer) fits beside the reserved part.
pub const MIN_BYTES: u64 = 64 << 20;
/// Default budget of a process in bytes.
pub const DEFAULT_BYTES: u64 = 256 << 20;

/// Receiver of a grant. Called without locks held; must return quickly.
pub trait Granted: Send + Sync {
    /// The bytes that the share waited for have been granted.
    fn granted(&self);
}

/// A budget of bytes.
///
/// Lock order: `state` is innermost, held for a look-up or a change. [`Granted`] is called without it.
#[derive(Debug)]
pub struct Budget {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    limit: u64,
    main: Pool,
    reserved: Pool,
    /// Unused entries are listed in `free_shares`.
    shares: Vec<Holding>,
    free_shares: Vec<usize>,
    /// Unused entries are listed in `free_groups`.
    groups: Vec<Group>,
    free_groups: Vec<usize>,
    /// Index of each device's group, by the address of its `Failures`.
    by_device: HashMap<usize, usize>,
    /// Groups with waiting shares, in the order of their turns.
    waiting: VecDeque<usize>,
}

/// The common or the reserved part of the budget.
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

/// Bytes of one share.
#[derive(Default)]
struct Holding {
    group: usize,
    main: u64,
    reserved: u64,
    /// Bytes that the share waits for; 0 if it does not wait.
    wants: u64,
    receiver: Option<Arc<dyn Granted>>,
}

impl std::fmt::Debug for Holding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Holding({} + {}, wants {})", self.main, self.reserved, self.wants)
    }
}

#[derive(Debug, Default)]
struct Group {
    /// Identifies the device: the address is unique while this reference exists.
    device: Option<Arc<Failures>>,
    shares: usize,
    main: u64,
    reserved: u64,
    /// The share that holds more than the device's limit.
    beyond: Option<usize>,
    /// Waiting shares in order of arrival.
    waiting: VecDeque<usize>,
}

/// The pool that bytes are taken from.
#[derive(Debug, Clone, Copy)]
enum Source {
    Main,
    /// The main pool, exceeding the device's limit.
    Beyond,
    Reserved,
}

impl Budget {
    /// Creates a budget of `bytes`, at least [`MIN_BYTES`].
    pub fn new(bytes: u64) -> Arc<Self> {
        let limit = bytes.max(MIN_BYTES);
        let reserved = limit / RESERVED_PART;
        Arc::new(Self {
            state: Mutex::new(State {
                limit,
                main: Pool { limit: limit - reserved, used: 0 },
                reserved: Pool { limit: reserved, used: 0 },
                shares: Vec::new(),
                free_shares: Vec::new(),
                groups: Vec::new(),
                free_groups: Vec::new(),
                by_device: HashMap::new(),
                waiting: VecDeque::new(),
            }),
        })
    }

    /// Creates an empty share for a queue of the device with these failure counters. `who` is called when
    /// bytes that the share waits for are granted.
    pub fn share(self: &Arc<Self>, device: &Arc<Failures>, who: Arc<dyn Granted>) -> Share {
        let id = self.state.lock().add_share(device, who);
        Share { budget: Arc::clone(self), id, taken: 0, waits: false, used: false }
    }

    /// Returns the total bytes, and the bytes taken.
    pub fn bytes(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.limit, state.main.used + state.reserved.used)
    }
}

/// Grants free bytes to waiting shares, and notifies these without the lock.
fn serve(mut state: MutexGuard<'_, State>) {
    let mut served = Vec::new();
    for _ in 0..state.waiting.len() {
        state.serve_next_group(&mut served);
    }
    drop(state);
    for receiver in served {
        receiver.granted();
    }
}

fn device_key(device: &Arc<Failures>) -> usize {
    Arc::as_ptr(device).addr()
}

/// Stores a value in a free or new entry. Returns its index.
fn insert<T>(entries: &mut Vec<T>, free: &mut Vec<usize>, value: T) -> usize {
    if let Some(index) = free.pop() {
        entries[index] = value;
        return index;
    }
    entries.push(value);
    entries.len() - 1
}

impl State {
    fn add_share(&mut self, device: &Arc<Failures>, who: Arc<dyn Granted>) -> usize {
        let (groups, free) = (&mut self.groups, &mut self.free_groups);
        let group = *self.by_device.entry(device_key(device)).or_insert_with(|| {
            insert(groups, free, Group { device: Some(Arc::clone(device)), ..Group::default() })
        });
        self.groups[group].shares += 1;
        insert(
            &mut self.shares,
            &mut self.free_shares,
            Holding { group, receiver: Some(who), ..Holding::default() },
        )
    }

    /// Takes bytes for a share that does not wait. Returns false if the share may not have them now.
    fn take(&mut self, id: usize, bytes: u64) -> bool {
        let source = self.source(id, bytes, self.groups[self.shares[id].group].waiting.is_empty());
        if let Some(source) = source {
            self.grant(id, bytes, source);
        }
        source.is_some()
    }

    /// Returns the pool from which a share may take bytes now. `has_turn` is true if no share of the device
    /// waits; otherwise only the reserved pool is allowed.
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
        let free = self.reserved.free();
        let is_little = share.main + share.reserved + bytes <= LITTLE_BYTES && bytes <= free;
        (is_little && (group.reserved == 0 || group.reserved + bytes <= free / DEVICE_PART))
            .then_some(Source::Reserved)
    }

    fn grant(&mut self, id: usize, bytes: u64, source: Source) {
        let share = &mut self.shares[id];
        let group = &mut self.groups[share.group];
        let (pool, group_bytes, share_bytes) = match source {
            Source::Reserved => (&mut self.reserved, &mut group.reserved, &mut share.reserved),
            Source::Main | Source::Beyond => (&mut self.main, &mut group.main, &mut share.main),
        };
        pool.used += bytes;
        *group_bytes += bytes;
        *share_bytes += bytes;
        if matches!(source, Source::Beyond) {
            group.beyond = Some(id);
        }
    }

    fn wait(&mut self, id: usize, bytes: u64) {
        let share = &mut self.shares[id];
        share.wants = bytes;
        let group = &mut self.groups[share.group];
        if group.waiting.is_empty() {
            self.waiting.push_back(share.group);
        }
        group.waiting.push_back(id);
    }

    /// Grants the waiting shares of the next device what they wait for, as far as possible, and adds their
    /// receivers to `served`.
    fn serve_next_group(&mut self, served: &mut Vec<Arc<dyn Granted>>) {
        let Some(index) = self.waiting.pop_front() else { return };
        let mut waiting = std::mem::take(&mut self.groups[index].waiting);
        waiting.retain(|&id| {
            let Some(source) = self.source(id, self.shares[id].wants, true) else { return true };
            let bytes = std::mem::take(&mut self.shares[id].wants);
            self.grant(id, bytes, source);
            served.extend(self.shares[id].receiver.clone());
            false
        });
        if !waiting.is_empty() {
            self.waiting.push_back(index);
        }
        self.groups[index].waiting = waiting;
    }

    fn release_all(&mut self, id: usize) {
        self.release(id, u64::MAX);
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

    /// Removes an empty share, and its group with the last share.
    fn remove(&mut self, id: usize) {
        let index = std::mem::take(&mut self.shares[id]).group;
        self.free_shares.push(id);
        let group = &mut self.groups[index];
        group.shares -= 1;
        if group.shares == 0 {
            let device = std::mem::take(group).device;
            self.by_device.remove(&device.as_ref().map_or(0, device_key));
            self.free_groups.push(index);
        }
    }

    /// Returns bytes of a share, first those of the main pool, which large requests wait for.
    fn release(&mut self, id: usize, bytes: u64) {
        let share = &mut self.shares[id];
        let main = bytes.min(share.main);
        let reserved = (bytes - main).min(share.reserved);
        share.main -= main;
        share.reserved -= reserved;
        self.main.used -= main;
        self.reserved.used -= reserved;
        let group = &mut self.groups[share.group];
        group.main -= main;
        group.reserved -= reserved;
        // Bytes that a share keeps between requests are few.
        if group.beyond == Some(id) && share.main <= LITTLE_BYTES {
            group.beyond = None;
        }
    }
}

/// The bytes of one queue. Dropping the share returns them.
#[derive(Debug)]
pub struct Share {
    budget: Arc<Budget>,
    id: usize,
    /// Bytes granted.
    taken: u64,
    /// The share waits for more bytes.
    waits: bool,
    /// The share has asked for bytes since it returned all.
    used: bool,
}

/// Bytes are taken in multiples of this, so that small requests seldom lock the budget.
const STEP_BYTES: u64 = 64 << 10;

impl Share {
    /// Ensures that the share has `total` bytes. Returns false, without waiting, if they are unavailable; the
    /// caller then may call [`wait_for`](Self::wait_for).
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
            self.taken = share.main + share.reserved;
            if self.waits || total <= self.taken {
                return !self.waits;
            }
        }
        let more = total.next_multiple_of(STEP_BYTES) - self.taken;
        let taken = state.take(self.id, more);
        self.taken += if taken { more } else { 0 };
        taken
    }

    /// Waits for `bytes` in addition to the `held` ones, after [`reach`](Self::reach) has failed. Returns all
    /// bytes that are not held, so that waiting shares do not block each other. If the share waits already,
    /// it only returns these bytes.
    pub fn wait_for(&mut self, held: u64, bytes: u64) {
        let excess = self.taken.saturating_sub(held);
        if self.waits && excess == 0 {
            return;
        }
        let mut state = self.budget.state.lock();
        if self.waits && state.shares[self.id].wants == 0 {
            // Granted after the last `reach`; the next one uses the grant.
            return;
        }
        self.taken -= excess;
        state.release(self.id, excess);
        if !self.waits {
            self.waits = true;
            // A wait for more than the limit would never end. No request is that large.
            let bytes = bytes.min(state.main.limit);
            state.wait(self.id, bytes);
        }
        serve(state);
    }

    /// Ends the wait. Keeps `held` bytes and returns those granted beyond.
    pub fn stop_waiting(&mut self, held: u64) {
        if !std::mem::take(&mut self.waits) {
            return;
        }
        let mut state = self.budget.state.lock();
        state.stop_waiting(self.id);
        let share = &state.shares[self.id];
        let all = share.main + share.reserved;
        let excess = all.saturating_sub(held);
        state.release(self.id, excess);
        self.taken = all - excess;
        serve(state);
    }

    /// Returns true if the share has bytes or waits for some.
    #[inline]
    pub fn is_used(&self) -> bool {
        self.used
    }

    /// Returns true if the share waits for bytes.
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// Returns bytes that exceed `total` by more than two steps.
    pub fn keep(&mut self, total: u64) {
        if self.taken > total + 2 * STEP_BYTES {
            let bytes = self.taken - total.next_multiple_of(STEP_BYTES);
            self.taken -= bytes;
            let mut state = self.budget.state.lock();
            state.release(self.id, bytes);
            serve(state);
        }
    }

    /// Returns all bytes and ends the wait.
    #[inline]
    pub fn leave(&mut self) {
        if self.is_used() {
            self.release();
        }
    }

    fn release(&mut self) {
        (self.taken, self.waits, self.used) = (0, false, false);
        let mut state = self.budget.state.lock();
        state.release_all(self.id);
        serve(state);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut state = self.budget.state.lock();
        state.release_all(self.id);
        state.remove(self.id);
        serve(state);
    }
}
