//! A memory budget for requests in flight, shared by all queues of the process.
//!
//! Each queue has a [`Share`]. The queue reserves bytes of the budget before it allocates buffers, and
//! returns the bytes afterwards. If no bytes are available, the share waits, and is woken when bytes are
//! granted.
//!
//! # Fairness
//! Taken bytes cannot be revoked, and a hung disk, a rate limit or a client that does not read may hold them
//! forever. Therefore the limits of a device and a share depend on the free part of the budget, so that bytes
//! remain for later requests:
//! * All shares of a device together hold at most a quarter of the budget's free bytes (`DEVICE_PART`).
//! * A share holds at most twice the bytes that its device may still reserve (`SHARE_FREE_FACTOR`).
//! * A device that holds no bytes may reserve all free bytes. In addition, one share of each device may
//!   exceed the device's limit if that share holds nothing. So even the largest request is served.
//! * An eighth of the budget is reserved for shares that hold few bytes ([`SMALL_SHARE_BYTES`]), by the same
//!   rule for each device.
//!
//! Whenever bytes are returned, waiting shares are checked in order of arrival, devices in turn. A share that
//! can be served does not wait behind one that cannot.

#[cfg(all(test, not(loom)))]
mod tests;

use std::collections::{HashMap, VecDeque};

use crate::device::Failures;
use crate::sync::{Arc, Mutex, MutexGuard};

/// Maximum number of bytes held by a share that may use the reserved part of the budget.
pub const SMALL_SHARE_BYTES: u64 = 512 << 10;
/// `1/RESERVED_PART` of the budget is reserved for shares that hold at most [`SMALL_SHARE_BYTES`].
const RESERVED_PART: u64 = 8;
/// A device may hold `1/DEVICE_PART` of the free bytes. A single busy device thus holds up to a fifth of the
/// budget, and ten busy devices a fourteenth each.
const DEVICE_PART: u64 = 4;
/// A share may hold `SHARE_FREE_FACTOR` times the bytes that its device may still reserve. A single share
/// thus holds up to a seventh of the budget.
const SHARE_FREE_FACTOR: u64 = 2;
/// Minimum budget in bytes: the largest request (32 MiB in one buffer) fits beside the reserved part.
pub const MIN_BYTES: u64 = 64 << 20;
/// Default budget of a process in bytes.
pub const DEFAULT_BYTES: u64 = 256 << 20;

/// Receiver of a grant of budget bytes. Called without locks held; must return quickly.
pub trait GrantReceiver: Send + Sync {
    /// Called when the bytes that the share waited for have been granted.
    fn receive_grant(&self);
}

/// A memory budget in bytes, shared by the queues of a process.
///
/// Lock order: `state` is innermost, held for a look-up or a change. A [`GrantReceiver`] is called without
/// the lock.
#[derive(Debug)]
pub struct Budget {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    limit: u64,
    main: Pool,
    reserved: Pool,
    /// Shares by id. The ids of unused entries are in `free_shares`.
    shares: Vec<ShareState>,
    free_shares: Vec<usize>,
    /// Groups, one for each device. The indexes of unused entries are in `free_groups`.
    groups: Vec<Group>,
    free_groups: Vec<usize>,
    /// Index in `groups` of each device's group, by the address of the device's `Failures`.
    by_device: HashMap<usize, usize>,
    /// Indexes of the groups with waiting shares, in the order in which they are served.
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

/// State of one share: the bytes that it holds and waits for.
#[derive(Default)]
struct ShareState {
    group: usize,
    main: u64,
    reserved: u64,
    /// Number of bytes that the share waits for; 0 if the share does not wait.
    waiting_bytes: u64,
    receiver: Option<Arc<dyn GrantReceiver>>,
}

impl std::fmt::Debug for ShareState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ShareState({} + {}, waits for {})", self.main, self.reserved, self.waiting_bytes)
    }
}

#[derive(Debug, Default)]
struct Group {
    /// Failure counters that identify the device: their address is unique while this reference exists.
    device: Option<Arc<Failures>>,
    shares: usize,
    main: u64,
    reserved: u64,
    /// Id of the share that was granted bytes beyond the device's limit, if any.
    over_limit_share: Option<usize>,
    /// Ids of the waiting shares, in order of arrival.
    waiting: VecDeque<usize>,
}

/// The pool from which bytes are granted.
#[derive(Debug, Clone, Copy)]
enum Source {
    Main,
    /// The main pool, although the device then exceeds its limit.
    OverLimit,
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

    /// Creates an empty share for a queue of the device that has the failure counters `device`. `receiver` is
    /// called when bytes that the share waits for are granted.
    pub fn share(self: &Arc<Self>, device: &Arc<Failures>, receiver: Arc<dyn GrantReceiver>) -> Share {
        let id = self.state.lock().add_share(device, receiver);
        Share { budget: Arc::clone(self), id, taken: 0, is_waiting: false, used: false }
    }

    /// Returns the size of the budget and the bytes granted to shares, both in bytes.
    pub fn bytes(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.limit, state.main.used + state.reserved.used)
    }
}

/// Grants free bytes to waiting shares, releases the lock, and notifies the receivers of these shares.
fn serve(mut state: MutexGuard<'_, State>) {
    let mut served = Vec::new();
    for _ in 0..state.waiting.len() {
        state.serve_next_group(&mut served);
    }
    drop(state);
    for receiver in served {
        receiver.receive_grant();
    }
}

fn device_key(device: &Arc<Failures>) -> usize {
    Arc::as_ptr(device).addr()
}

/// Stores a value in a free or new entry. Returns the index of the entry.
fn insert<T>(entries: &mut Vec<T>, free: &mut Vec<usize>, value: T) -> usize {
    if let Some(index) = free.pop() {
        entries[index] = value;
        return index;
    }
    entries.push(value);
    entries.len() - 1
}

impl State {
    fn add_share(&mut self, device: &Arc<Failures>, receiver: Arc<dyn GrantReceiver>) -> usize {
        let (groups, free) = (&mut self.groups, &mut self.free_groups);
        let group = *self.by_device.entry(device_key(device)).or_insert_with(|| {
            insert(groups, free, Group { device: Some(Arc::clone(device)), ..Group::default() })
        });
        self.groups[group].shares += 1;
        insert(
            &mut self.shares,
            &mut self.free_shares,
            ShareState { group, receiver: Some(receiver), ..ShareState::default() },
        )
    }

    /// Grants bytes to a share that does not wait. Returns false, without a grant, if the limits do not allow
    /// it now.
    fn take(&mut self, id: usize, bytes: u64) -> bool {
        let source = self.source(id, bytes, self.groups[self.shares[id].group].waiting.is_empty());
        if let Some(source) = source {
            self.grant(id, bytes, source);
        }
        source.is_some()
    }

    /// Returns the pool from which a share may take bytes now, or `None` if the limits allow no pool.
    /// `has_turn` is true if no share of the device waits; otherwise only the reserved pool is allowed.
    fn source(&self, id: usize, bytes: u64, has_turn: bool) -> Option<Source> {
        let share = &self.shares[id];
        let group = &self.groups[share.group];
        let free = self.main.free();
        if has_turn && bytes <= free {
            let room = (free / DEVICE_PART).saturating_sub(group.main);
            if group.main == 0 || (share.main + bytes <= room * SHARE_FREE_FACTOR && bytes <= room) {
                return Some(Source::Main);
            }
            if share.main == 0 && group.over_limit_share.is_none() {
                return Some(Source::OverLimit);
            }
        }
        let free = self.reserved.free();
        let is_little = share.main + share.reserved + bytes <= SMALL_SHARE_BYTES && bytes <= free;
        (is_little && (group.reserved == 0 || group.reserved + bytes <= free / DEVICE_PART))
            .then_some(Source::Reserved)
    }

    fn grant(&mut self, id: usize, bytes: u64, source: Source) {
        let share = &mut self.shares[id];
        let group = &mut self.groups[share.group];
        let (pool, group_bytes, share_bytes) = match source {
            Source::Reserved => (&mut self.reserved, &mut group.reserved, &mut share.reserved),
            Source::Main | Source::OverLimit => (&mut self.main, &mut group.main, &mut share.main),
        };
        pool.used += bytes;
        *group_bytes += bytes;
        *share_bytes += bytes;
        if matches!(source, Source::OverLimit) {
            group.over_limit_share = Some(id);
        }
    }

    fn wait(&mut self, id: usize, bytes: u64) {
        let share = &mut self.shares[id];
        share.waiting_bytes = bytes;
        let group = &mut self.groups[share.group];
        if group.waiting.is_empty() {
            self.waiting.push_back(share.group);
        }
        group.waiting.push_back(id);
    }

    /// Serves the waiting shares of the next device. Grants each the bytes that it waits for if the limits
    /// allow it, and adds the receivers of the served shares to `served`.
    fn serve_next_group(&mut self, served: &mut Vec<Arc<dyn GrantReceiver>>) {
        let Some(index) = self.waiting.pop_front() else { return };
        let mut waiting = std::mem::take(&mut self.groups[index].waiting);
        waiting.retain(|&id| {
            let Some(source) = self.source(id, self.shares[id].waiting_bytes, true) else { return true };
            let bytes = std::mem::take(&mut self.shares[id].waiting_bytes);
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
        if std::mem::take(&mut share.waiting_bytes) > 0 {
            let index = share.group;
            let waiting = &mut self.groups[index].waiting;
            waiting.retain(|waiting_id| *waiting_id != id);
            if waiting.is_empty() {
                self.waiting.retain(|waiting_id| *waiting_id != index);
            }
        }
    }

    /// Removes an empty share, and the device's group if this was its last share.
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

    /// Releases up to `bytes` bytes of a share, first those of the main pool, because large requests wait for
    /// that pool.
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
        // A share may keep a few bytes between requests, so it need not be empty to count as within the
        // limit.
        if group.over_limit_share == Some(id) && share.main <= SMALL_SHARE_BYTES {
            group.over_limit_share = None;
        }
    }
}

/// The part of the budget that one queue holds. Dropping the share returns its bytes to the budget.
#[derive(Debug)]
pub struct Share {
    budget: Arc<Budget>,
    id: usize,
    /// Bytes granted to the share. A grant to a waiting share is added later, by `try_reserve` or
    /// `stop_waiting`.
    taken: u64,
    /// True if the share waits for more bytes, or if their grant has not been noticed yet.
    is_waiting: bool,
    /// True if the share has requested bytes since it last returned all bytes.
    used: bool,
}

/// Granularity in bytes of requests to the budget, so that small I/O requests seldom lock it.
const STEP_BYTES: u64 = 64 << 10;

impl Share {
    /// Ensures that the share holds at least `total` bytes. Returns false, without waiting, if they are
    /// unavailable; the caller may then call [`wait_for`](Self::wait_for).
    #[inline]
    pub fn try_reserve(&mut self, total: u64) -> bool {
        total <= self.taken || self.take(total)
    }

    fn take(&mut self, total: u64) -> bool {
        self.used = true;
        let mut state = self.budget.state.lock();
        if self.is_waiting {
            let share = &state.shares[self.id];
            self.is_waiting = share.waiting_bytes > 0;
            self.taken = share.main + share.reserved;
            if self.is_waiting || total <= self.taken {
                return !self.is_waiting;
            }
        }
        let more = total.next_multiple_of(STEP_BYTES) - self.taken;
        let taken = state.take(self.id, more);
        self.taken += if taken { more } else { 0 };
        taken
    }

    /// Starts to wait for `bytes` bytes in addition to the `held` bytes in use, after
    /// [`try_reserve`](Self::try_reserve) has failed. Returns all other bytes to the budget, so that waiting
    /// shares do not block each other. If the share waits already, only returns those bytes.
    pub fn wait_for(&mut self, held: u64, bytes: u64) {
        let excess = self.taken.saturating_sub(held);
        if self.is_waiting && excess == 0 {
            return;
        }
        let mut state = self.budget.state.lock();
        if self.is_waiting && state.shares[self.id].waiting_bytes == 0 {
            // The bytes were granted after the last `try_reserve`; the next `try_reserve` uses the grant.
            return;
        }
        self.taken -= excess;
        state.release(self.id, excess);
        if !self.is_waiting {
            self.is_waiting = true;
            // A wait for more than the main pool would never end. No request is that large.
            let bytes = bytes.min(state.main.limit);
            state.wait(self.id, bytes);
        }
        serve(state);
    }

    /// Stops waiting. Keeps `held` bytes and returns the others to the budget.
    pub fn stop_waiting(&mut self, held: u64) {
        if !std::mem::take(&mut self.is_waiting) {
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

    /// Returns true if the share may hold bytes or wait for bytes.
    #[inline]
    pub fn is_used(&self) -> bool {
        self.used
    }

    /// Returns true if the share waits for bytes.
    pub fn is_waiting(&self) -> bool {
        self.is_waiting
    }

    /// Reduces the share to `total` bytes, rounded up, if it exceeds `total` by more than two steps (128
    /// KiB).
    pub fn shrink_to(&mut self, total: u64) {
        if self.taken > total + 2 * STEP_BYTES {
            let bytes = self.taken - total.next_multiple_of(STEP_BYTES);
            self.taken -= bytes;
            let mut state = self.budget.state.lock();
            state.release(self.id, bytes);
            serve(state);
        }
    }

    /// Returns all bytes to the budget and stops waiting.
    #[inline]
    pub fn release_all(&mut self) {
        if self.is_used() {
            self.release();
        }
    }

    fn release(&mut self) {
        (self.taken, self.is_waiting, self.used) = (0, false, false);
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
