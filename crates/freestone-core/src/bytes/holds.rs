//! Range locks that exclude writes to a block while a part of it is modified.
//!
//! A partial block is modified by reading the block and writing it back. A write to the block in between
//! would be lost, so it must be excluded.
//!
//! # Protocol
//! * An inline write of whole blocks *marks* its user's record (odd); *light barrier*; checks whether a
//!   partial write is announced. If none is, the user writes and clears the mark. Otherwise the user clears
//!   the mark first and then takes a hold.
//! * A partial write *announces* itself; *heavy barrier*; waits for each mark that it sees; then takes a
//!   hold.
//! * Either the partial write sees the mark and waits for the whole write, or the whole write sees the
//!   announcement and takes a hold.
//! * A submitted write takes a hold in any case.
//! * Overlapping holds exclude each other, unless both are for whole blocks, which the device orders. A
//!   request that cannot get a hold leaves a task. A request never overtakes a waiting one that it overlaps,
//!   so none starves. Waiting requests hold nothing, so there are no deadlocks.
//!
//! A mark is cleared before the call that set it returns, after bounded work. So waiting for marks takes
//! about as long as waiting for a slot lock.

use std::collections::VecDeque;

use crossbeam_utils::CachePadded;

use crate::pin::{barrier, pause};
use crate::sync::{Arc, AtomicU32, AtomicU64, Mutex, Ordering};

/// A range of whole blocks, and whether only a part of it is modified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// First byte.
    pub start: u64,
    /// End, exclusive.
    pub end: u64,
    /// True for a read-modify-write of a partial block.
    pub part: bool,
}

impl Range {
    fn excludes(&self, other: &Self) -> bool {
        (self.part || other.part) && self.start < other.end && other.start < self.end
    }
}

/// Writers of a device. `T` is the continuation of a request that waits.
///
/// Lock order: `users` and `table` are innermost, each held for a look-up or a change.
pub struct Holds<T> {
    /// Number of announced partial writes. Changed by these, read by every write.
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

/// Odd while its user writes. Changed by its user only.
type Record = CachePadded<AtomicU64>;

/// A user that writes whole blocks inline, from one thread at a time.
pub struct User {
    record: Arc<Record>,
    fenced: bool,
}

impl<T> Default for Holds<T> {
    fn default() -> Self {
        Self {
            parts: CachePadded::new(AtomicU32::new(0)),
            users: Mutex::default(),
            table: Mutex::new(Table { held: Vec::new(), waiting: VecDeque::new() }),
        }
    }
}

impl<T> Holds<T> {
    /// Registers a user. A later registration removes the records of dropped users.
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
        // Users that register later load `parts` later, so the copy may miss them.
        let users = self.users.lock().clone();
        for user in users {
            // Acquire: pairs with the Release that clears the mark, so that the data written before is
            // visible.
            let sequence = user.load(Ordering::Acquire);
            let mut tries = 0;
            // Acquire: as above.
            while sequence & 1 == 1 && user.load(Ordering::Acquire) == sequence {
                pause(&mut tries);
            }
        }
    }

    /// Reverts an announcement.
    pub fn withdraw(&self) {
        // Release: pairs with the Acquire in `User::mark`, so that the partial write is visible to later
        // writers.
        self.parts.fetch_sub(1, Ordering::Release);
    }

    /// Takes a hold and returns true, or returns false if the range is excluded. A partial write must be
    /// announced before.
    pub fn try_hold(&self, range: Range) -> bool {
        let mut table = self.table.lock();
        let free = table.is_free(&range);
        if free {
            table.held.push(range);
        }
        free
    }

    /// Takes a hold and returns the task, which the caller runs. If the range is excluded, queues the task. A
    /// partial write must be announced before.
    pub fn hold_or_wait(&self, range: Range, task: T) -> Option<T> {
        let mut table = self.table.lock();
        if table.is_free(&range) {
            table.held.push(range);
            return Some(task);
        }
        table.waiting.push_back((range, task));
        None
    }

    /// Releases a hold and its announcement. Returns the tasks whose holds are granted now.
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
    /// if a partial write is announced; the user then needs a hold.
    #[inline]
    pub fn mark<T>(&mut self, holds: &Holds<T>) -> bool {
        // Relaxed: only this user writes its record.
        let sequence = self.record.load(Ordering::Relaxed);
        // Relaxed: the light barrier, paired with the heavy one, orders this before the load of `parts`.
        self.record.store(sequence + 1, Ordering::Relaxed);
        barrier::light(self.fenced);
        // Acquire: pairs with the Release in `withdraw`.
        if holds.parts.load(Ordering::Acquire) == 0 {
            return true;
        }
        self.unmark();
        false
    }

    /// Clears the mark after the write.
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
        // Relaxed: only this user writes its record. The mark is still set if the device has panicked.
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
        let holds = Holds::<u32>::default();
        assert!(holds.try_hold(whole(0, 8192)) && holds.try_hold(whole(4096, 12288)));
        holds.announce();
        assert!(!holds.try_hold(part(4096)), "both writes are in flight");
        assert_eq!(holds.hold_or_wait(part(4096), 1), None);
        assert!(holds.try_hold(whole(12288, 16384)), "other ranges are not excluded");
        assert!(!holds.try_hold(whole(4096, 8192)), "no request overtakes a waiting one");
        assert_eq!(holds.hold_or_wait(whole(4096, 8192), 2), None);
        assert_eq!(holds.release(whole(0, 8192)), []);
        assert_eq!(holds.release(whole(4096, 12288)), [1]);
        assert_eq!(holds.release(part(4096)), [2]);
        assert_eq!(holds.release(whole(12288, 16384)), []);
        assert_eq!(holds.release(whole(4096, 8192)), []);
        assert!(holds.is_idle());
    }

    #[test]
    fn mark_fails_if_announced_and_is_cleared_on_drop() {
        let holds = Holds::<u32>::default();
        let mut user = holds.user();
        assert!(user.mark(&holds));
        // The drop clears the mark as after a panic of the device; otherwise `announce` would hang.
        drop(user);
        let mut user = holds.user();
        holds.announce();
        assert!(!user.mark(&holds));
        holds.withdraw();
        assert!(user.mark(&holds));
        user.unmark();
        assert!(holds.is_idle());
    }
}
