//! Range locks that exclude writes to a block while a part of the block is modified.
//!
//! A partial block is modified by reading the block and writing it back. A write to the block in between
//! would be lost, so it must be excluded.
//!
//! # Protocol
//! * An inline write of whole blocks sets the *write mark* (an odd value) in its user's record; *light
//!   barrier*; checks if a partial write is announced. If none is, the user writes and clears the mark.
//!   Otherwise the user clears the mark first and then takes a *hold*, an entry for the range in the lock
//!   table.
//! * A partial write *announces* itself; *heavy barrier*; waits until each write mark that it sees is
//!   cleared; then takes a hold.
//! * Either the partial write sees the mark and waits for the whole write, or the whole write sees the
//!   announcement and takes a hold.
//! * A submitted write takes a hold in any case.
//! * Overlapping holds exclude each other, unless both are for whole blocks, which the device orders. A
//!   request that cannot lock its range queues a task. A request never overtakes a waiting one that it
//!   overlaps, so none starves. Waiting requests hold nothing, so there are no deadlocks.
//!
//! A mark is cleared before the call that set it returns, after bounded work. So waiting for marks takes
//! about as long as waiting for a slot lock.

use std::collections::VecDeque;

use crossbeam_utils::CachePadded;

use crate::pin::{barrier, pause};
use crate::sync::{Arc, AtomicU32, AtomicU64, Mutex, Ordering};

/// A range of whole blocks to be locked, and whether only a part of it is modified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// Offset of the first byte.
    pub start: u64,
    /// Exclusive end in bytes.
    pub end: u64,
    /// True for a read-modify-write of a partial block.
    pub part: bool,
}

impl Range {
    fn excludes(&self, other: &Self) -> bool {
        (self.part || other.part) && self.start < other.end && other.start < self.end
    }
}

/// Range locks of the writers of one device. `T` is the continuation of a waiting request.
///
/// Lock order: `users` and `table` are innermost, each held for a look-up or a change.
pub struct RangeLocks<T> {
    /// Number of announced partial writes. Every write reads it; only partial writes change it.
    parts: CachePadded<AtomicU32>,
    users: Mutex<Vec<Arc<Record>>>,
    table: Mutex<Table<T>>,
}

/// Invariant: no two ranges in `held` exclude each other. Each entry in `waiting` is excluded by a held range
/// or by an entry before it.
struct Table<T> {
    held: Vec<Range>,
    waiting: VecDeque<(Range, T)>,
}

/// Write mark of a user: odd while the user writes whole blocks inline. Only the user changes the value.
type Record = CachePadded<AtomicU64>;

/// A user that writes whole blocks inline, from one thread at a time.
pub struct User {
    record: Arc<Record>,
    fenced: bool,
}

impl<T> Default for RangeLocks<T> {
    fn default() -> Self {
        Self {
            parts: CachePadded::new(AtomicU32::new(0)),
            users: Mutex::default(),
            table: Mutex::new(Table { held: Vec::new(), waiting: VecDeque::new() }),
        }
    }
}

impl<T> RangeLocks<T> {
    /// Registers a user, and removes the records of dropped users.
    pub fn user(&self) -> User {
        let record = Arc::new(CachePadded::new(AtomicU64::new(0)));
        let mut users = self.users.lock();
        users.retain(|user| Arc::strong_count(user) > 1);
        users.push(Arc::clone(&record));
        User { record, fenced: barrier::fenced() }
    }

    /// Announces a partial write, and waits for inline writes that may have missed the announcement. Reverted
    /// by [`release`](Self::release) or [`withdraw`](Self::withdraw).
    pub fn announce(&self) {
        // Relaxed: the heavy barrier, paired with the light one, orders this before the loads of the records.
        self.parts.fetch_add(1, Ordering::Relaxed);
        barrier::heavy(barrier::fenced());
        // Users that register later load `parts` later, so they may be missing in the copied list.
        let users = self.users.lock().clone();
        for user in users {
            // Acquire: pairs with the Release that clears the write mark, so that the data written before is
            // visible.
            let sequence = user.load(Ordering::Acquire);
            let mut tries = 0;
            // Acquire: pairs with the Release that clears the write mark.
            while sequence & 1 == 1 && user.load(Ordering::Acquire) == sequence {
                pause(&mut tries);
            }
        }
    }

    /// Withdraws the announcement of a partial write.
    pub fn withdraw(&self) {
        // Release: pairs with the Acquire in `User::mark`, so that the partial write is visible to later
        // writers.
        self.parts.fetch_sub(1, Ordering::Release);
    }

    /// Locks a range and returns true, or returns false if a locked or waiting range excludes it. A partial
    /// write must be announced before.
    pub fn try_lock_range(&self, range: Range) -> bool {
        let mut table = self.table.lock();
        let free = table.is_free(&range);
        if free {
            table.held.push(range);
        }
        free
    }

    /// Locks a range and returns the task, which the caller runs. If a locked or waiting range excludes it,
    /// queues the task and returns `None`. A partial write must be announced before.
    pub fn lock_or_wait(&self, range: Range, task: T) -> Option<T> {
        let mut table = self.table.lock();
        if table.is_free(&range) {
            table.held.push(range);
            return Some(task);
        }
        table.waiting.push_back((range, task));
        None
    }

    /// Unlocks a range, and withdraws the announcement of a partial write. Returns the queued tasks whose
    /// ranges are locked now; the caller runs these tasks.
    #[must_use]
    pub fn release(&self, range: Range) -> Vec<T> {
        let mut ready = Vec::new();
        let mut table = self.table.lock();
        if let Some(at) = table.held.iter().position(|held| *held == range) {
            table.held.swap_remove(at);
        }
        let mut at = 0;
        while at < table.waiting.len() {
            let next = table.waiting[at].0;
            let before = table.held.iter().chain(table.waiting.range(..at).map(|(range, _)| range));
            if before.into_iter().any(|other| other.excludes(&next)) {
                at += 1;
            } else if let Some((range, task)) = table.waiting.remove(at) {
                table.held.push(range);
                ready.push(task);
            }
        }
        drop(table);
        if range.part {
            self.withdraw();
        }
        ready
    }

    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        let table = self.table.lock();
        table.held.is_empty() && table.waiting.is_empty() && self.parts.load(Ordering::SeqCst) == 0
    }
}

impl<T> Table<T> {
    fn is_free(&self, range: &Range) -> bool {
        let waiting = self.waiting.iter().map(|(waiting, _)| waiting);
        !self.held.iter().chain(waiting).any(|other| other.excludes(range))
    }
}

impl User {
    /// Marks the user as writing whole blocks, until [`unmark`](Self::unmark). Returns false, without a mark,
    /// if a partial write is announced; the user must then lock the range.
    #[inline]
    pub fn mark<T>(&mut self, locks: &RangeLocks<T>) -> bool {
        // Relaxed: only this user writes its record.
        let sequence = self.record.load(Ordering::Relaxed);
        // Relaxed: the light barrier, paired with the heavy one, orders this before the load of `parts`.
        self.record.store(sequence + 1, Ordering::Relaxed);
        barrier::light(self.fenced);
        // Acquire: pairs with the Release in `withdraw`.
        if locks.parts.load(Ordering::Acquire) == 0 {
            return true;
        }
        self.unmark();
        false
    }

    /// Clears the write mark after an inline write.
    #[inline]
    pub fn unmark(&mut self) {
        // Relaxed: only this user writes its record.
        let sequence = self.record.load(Ordering::Relaxed);
        // Release: pairs with the Acquire in `announce`.
        self.record.store(sequence + 1, Ordering::Release);
    }
}

impl Drop for User {
    fn drop(&mut self) {
        // Relaxed: only this user writes its record. The write mark is still set if the device has panicked.
        if self.record.load(Ordering::Relaxed) & 1 == 1 {
            self.unmark();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const fn part(start: u64) -> Range {
        Range { start, end: start + 4096, part: true }
    }

    const fn whole(start: u64, end: u64) -> Range {
        Range { start, end, part: false }
    }

    #[test]
    fn partial_writes_exclude_overlapping_writes() {
        let locks = RangeLocks::<u32>::default();
        assert!(locks.try_lock_range(whole(0, 8192)) && locks.try_lock_range(whole(4096, 12288)));
        locks.announce();
        assert!(!locks.try_lock_range(part(4096)), "both writes are in flight");
        assert_eq!(locks.lock_or_wait(part(4096), 1), None);
        assert!(locks.try_lock_range(whole(12288, 16384)), "other ranges are not excluded");
        assert!(!locks.try_lock_range(whole(4096, 8192)), "no request overtakes a waiting one");
        assert_eq!(locks.lock_or_wait(whole(4096, 8192), 2), None);
        assert_eq!(locks.release(whole(0, 8192)), []);
        assert_eq!(locks.release(whole(4096, 12288)), [1]);
        assert_eq!(locks.release(part(4096)), [2]);
        assert_eq!(locks.release(whole(12288, 16384)), []);
        assert_eq!(locks.release(whole(4096, 8192)), []);
        assert!(locks.is_idle());
    }

    #[test]
    fn mark_fails_if_announced_and_is_cleared_on_drop() {
        let locks = RangeLocks::<u32>::default();
        let mut user = locks.user();
        assert!(user.mark(&locks));
        // Dropping a user clears its write mark, as after a panic of the device; otherwise `announce` would
        // hang.
        drop(user);
        let mut user = locks.user();
        locks.announce();
        assert!(!user.mark(&locks));
        locks.withdraw();
        assert!(user.mark(&locks));
        user.unmark();
        assert!(locks.is_idle());
    }
}
