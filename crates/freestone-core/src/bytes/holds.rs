//! Who may write blocks while somebody changes a part of one.
//!
//! A part of a block is changed by reading the block and writing it back. Whoever wrote the block
//! in between would lose that, so nobody may.
//!
//! # Protocol
//! * A write of whole blocks that its thread does at once *marks* its user's record (odd); *light
//!   barrier*; looks whether any parts are announced. None: it writes, and takes the mark away.
//!   Else it takes the mark away first, and then a hold.
//! * Who is to change a part *announces* it; *heavy barrier*; waits for each mark that it sees;
//!   then takes a hold.
//! * Either that one sees the mark and waits for the write, or the write sees the announcement and
//!   takes a hold as well.
//! * A write that the device is to do later takes a hold, whatever is announced.
//! * Holds that overlap exclude one another, unless both are of whole blocks: those are for the
//!   device to order. Who cannot have a hold leaves a task, and nobody gets by one that waits and
//!   overlaps: so all have their turn. Who waits holds nothing, so none wait for one another.
//!
//! Marks are taken away before the call that set them returns, which does bounded work: what waits
//! for them waits as long as for another thread's hold on a slot.

use std::collections::VecDeque;

use crossbeam_utils::CachePadded;

use crate::pin::{barrier, pause};
use crate::sync::{Arc, AtomicU32, AtomicU64, Mutex, Ordering};

/// A range of whole blocks, and whether only a part of it changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// First byte.
    pub start: u64,
    /// Behind the last byte.
    pub end: u64,
    /// It is read and written back.
    pub part: bool,
}

impl Range {
    fn excludes(&self, other: &Self) -> bool {
        (self.part || other.part) && self.start < other.end && other.start < self.end
    }
}

/// Who writes a device. `T` carries on what had to wait.
///
/// Lock order: `users` and `table` are innermost, each held for a look or a change.
pub struct Holds<T> {
    /// Parts that are announced. Written by who changes a part, read by every write.
    parts: CachePadded<AtomicU32>,
    users: Mutex<Vec<Arc<Record>>>,
    table: Mutex<Table<T>>,
}

/// Invariant: of two in `held` none excludes the other; each in `waiting` is excluded by one that
/// is held, or by one that waits before it.
struct Table<T> {
    held: Vec<Range>,
    waiting: VecDeque<(Range, T)>,
}

/// Odd while its user writes. Written by its user only.
type Record = CachePadded<AtomicU64>;

/// One who writes whole blocks, from one thread at a time.
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
    /// A new user; forgotten when it is dropped.
    pub fn user(&self) -> User {
        let record = Arc::new(CachePadded::new(AtomicU64::new(0)));
        let mut users = self.users.lock();
        users.retain(|user| Arc::strong_count(user) > 1);
        users.push(Arc::clone(&record));
        User { record, fenced: barrier::fenced() }
    }

    /// Says that a part is going to change, and waits for writes that may not have seen that. To be
    /// taken back by [`release`](Self::release), or by [`withdraw`](Self::withdraw).
    pub fn announce(&self) {
        // Relaxed: ordered before the looks at the records by the heavy barrier, paired with the
        // light one.
        self.parts.fetch_add(1, Ordering::Relaxed);
        barrier::heavy(barrier::fenced());
        // Users that come later look later: the copy need not see them.
        let users = self.users.lock().clone();
        for user in users {
            // Acquire: pairs with the Release with which the mark goes; what was written before is
            // seen after it.
            let seen = user.load(Ordering::Acquire);
            let mut tries = 0;
            // Acquire: as above.
            while seen & 1 == 1 && user.load(Ordering::Acquire) == seen {
                pause(&mut tries);
            }
        }
    }

    /// Takes an announcement back.
    pub fn withdraw(&self) {
        // Release: pairs with the Acquire in `User::mark`: who sees it gone sees what was written.
        self.parts.fetch_sub(1, Ordering::Release);
    }

    /// Takes a hold, if it is free. A part was announced before.
    pub fn try_hold(&self, range: Range) -> bool {
        let mut table = self.table.lock();
        let free = table.is_free(&range);
        if free {
            table.held.push(range);
        }
        free
    }

    /// Takes a hold, and returns the task for the caller to do; where it is not free the task waits
    /// for that. A part was announced before.
    pub fn hold_or_wait(&self, range: Range, task: T) -> Option<T> {
        let mut table = self.table.lock();
        if table.is_free(&range) {
            table.held.push(range);
            return Some(task);
        }
        table.waiting.push_back((range, task));
        None
    }

    /// Gives a hold back, with its announcement. Returns the tasks that have theirs now.
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
    /// Marks that whole blocks are written, to be [`unmark`](Self::unmark)ed. False: a part is
    /// announced; nothing is marked, and a hold is needed.
    #[inline]
    pub fn mark<T>(&mut self, holds: &Holds<T>) -> bool {
        // Relaxed: only this user writes its record.
        let sequence = self.record.load(Ordering::Relaxed);
        // Relaxed: ordered before the look at `parts` by the light barrier, paired with the heavy
        // one.
        self.record.store(sequence + 1, Ordering::Relaxed);
        barrier::light(self.fenced);
        // Acquire: pairs with the Release in `withdraw`.
        if holds.parts.load(Ordering::Acquire) == 0 {
            return true;
        }
        self.unmark();
        false
    }

    /// The write is done.
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
        // Relaxed: only this user writes its record. It is odd where a device has panicked.
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
    fn whole_blocks_go_together_and_parts_alone() {
        let holds = Holds::<u32>::default();
        assert!(holds.try_hold(whole(0, 8192)) && holds.try_hold(whole(4096, 12288)));
        holds.announce();
        assert!(!holds.try_hold(part(4096)), "both writes are under way");
        assert_eq!(holds.hold_or_wait(part(4096), 1), None);
        assert!(holds.try_hold(whole(12288, 16384)), "what does not overlap goes on");
        assert!(!holds.try_hold(whole(4096, 8192)), "nobody gets by who waits");
        assert_eq!(holds.hold_or_wait(whole(4096, 8192), 2), None);
        assert_eq!(holds.release(whole(0, 8192)), []);
        assert_eq!(holds.release(whole(4096, 12288)), [1]);
        assert_eq!(holds.release(part(4096)), [2]);
        assert_eq!(holds.release(whole(12288, 16384)), []);
        assert_eq!(holds.release(whole(4096, 8192)), []);
        assert!(holds.is_idle());
    }

    #[test]
    fn a_user_sees_what_is_announced_and_a_panic_leaves_no_mark() {
        let holds = Holds::<u32>::default();
        let mut user = holds.user();
        assert!(user.mark(&holds));
        // As if the device had panicked; else `announce` would wait for ever.
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
