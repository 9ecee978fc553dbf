//! `slot::lock` with a choice: the product's own file, or one of the locks that the kernel's
//! experiment compared.
//!
//! Locks that do not fit into the word lie in an array of four bytes an entry. A slot's entry is
//! found by its address: the slots of disks below 4 GiB have one each, of larger ones some share.
//! In the kernel the lock lay in the entry; here it is another cache line.

mod ours;

use std::time::Instant;

use crossbeam_utils::CachePadded;

// Named for the product's file as well, which looks for it above itself.
use super::word::{self, Word};
use crate::parking::Parking;
use crate::sync::{AtomicU64, Ordering};
use crate::variants::spinlocks::{ReadWrite, Ticket, spin_until};
use crate::variants::{self, Intent, Lock};
use crate::word_lock::{LOCK, Word as _};

/// Locks beside the table: neighbouring slots never share one.
const BESIDE: usize = 1 << 20;

static TABLE: CachePadded<ReadWrite> = CachePadded::new(ReadWrite::new());
static TICKETS: [Ticket; BESIDE] = [const { Ticket::new() }; BESIDE];
static READ_WRITE: [ReadWrite; BESIDE] = [const { ReadWrite::new() }; BESIDE];

/// A locked slot. Dropping it unlocks without a change.
#[must_use]
pub struct SlotGuard<'a>(Guard<'a>);

enum Guard<'a> {
    Ours(ours::SlotGuard<'a>),
    Other(Held<'a>),
}

/// Locks `slot`.
#[inline]
pub fn lock<'a>(slot: &'a AtomicU64, parking: &'a Parking) -> SlotGuard<'a> {
    SlotGuard(match variants::lock() {
        Lock::Ours => Guard::Ours(ours::lock(slot, parking)),
        lock => Guard::Other(Held::lock(lock, variants::intent(), slot)),
    })
}

impl SlotGuard<'_> {
    /// What the slot holds.
    #[inline]
    pub fn word(&self) -> Word {
        match &self.0 {
            Guard::Ours(guard) => guard.word(),
            Guard::Other(held) => held.word,
        }
    }

    /// Replaces what the slot holds and unlocks it.
    #[inline]
    pub fn publish(self, new: Word) {
        match self.0 {
            Guard::Ours(guard) => guard.publish(new),
            Guard::Other(held) => {
                let held = std::mem::ManuallyDrop::new(held);
                held.unlock(new);
            }
        }
    }
}

/// A slot that is locked in another way than the product's.
struct Held<'a> {
    slot: &'a AtomicU64,
    word: Word,
    how: How,
}

enum How {
    Shared(&'static ReadWrite),
    Exclusive(&'static ReadWrite),
    Ticket(&'static Ticket),
    Cas,
    BitSpin,
    Timed(Instant),
    /// Another lock is held.
    Outer,
}

impl<'a> Held<'a> {
    #[inline]
    fn lock(lock: Lock, intent: Intent, slot: &'a AtomicU64) -> Self {
        let beside = std::ptr::from_ref(slot) as usize / size_of::<AtomicU64>() % BESIDE;
        let how = match lock {
            Lock::Table => Self::read_write(&TABLE, intent),
            Lock::ReadWrite => Self::read_write(&READ_WRITE[beside], intent),
            Lock::Spin => {
                TICKETS[beside].lock();
                How::Ticket(&TICKETS[beside])
            }
            Lock::BitSpin => {
                // Acquire: pairs with the Release of the unlock that cleared the bit.
                while slot.fetch_or(LOCK, Ordering::Acquire) & LOCK != 0 {
                    // Relaxed: only a guess when to try again.
                    spin_until(|| slot.load(Ordering::Relaxed) & LOCK == 0);
                }
                How::BitSpin
            }
            Lock::Outer => How::Outer,
            Lock::Ours => unreachable!("the product's own file locks it"),
            Lock::Cas | Lock::Timed => {
                spin_until(|| {
                    // Relaxed: only a guess for the exchange below.
                    let seen = slot.load(Ordering::Relaxed) & !LOCK;
                    // Acquire: pairs with the Release of the unlock that stored the word (Relaxed
                    // on failure: tried again).
                    slot.compare_exchange(seen, seen | LOCK, Ordering::Acquire, Ordering::Relaxed).is_ok()
                });
                if lock == Lock::Timed { How::Timed(Instant::now()) } else { How::Cas }
            }
        };
        // Relaxed: the lock orders it.
        let word = Word::from_bits(slot.load(Ordering::Relaxed));
        Self { slot, word, how }
    }

    #[inline]
    fn read_write(lock: &'static ReadWrite, intent: Intent) -> How {
        match intent {
            Intent::Read => {
                lock.lock_shared();
                How::Shared(lock)
            }
            Intent::Write => {
                lock.lock();
                How::Exclusive(lock)
            }
        }
    }

    #[inline]
    fn unlock(&self, new: Word) {
        let (old, bits) = (self.word.bits(), new.bits());
        match self.how {
            How::Shared(lock) => {
                if old != bits {
                    assert!(is_touch(self.word, new), "a thread that only reads changed a slot");
                    // Relaxed: the age carries no data; a reader that was first has brought it up
                    // to date.
                    let _ = self.slot.compare_exchange(old, bits, Ordering::Relaxed, Ordering::Relaxed);
                }
                lock.unlock_shared();
            }
            How::Exclusive(lock) => {
                // Relaxed: the lock orders it.
                self.slot.store(bits, Ordering::Relaxed);
                lock.unlock();
            }
            How::Ticket(lock) => {
                // Relaxed: the lock orders it.
                self.slot.store(bits, Ordering::Relaxed);
                lock.unlock();
            }
            // Release: pairs with the Acquire of the next lock, or of a look without one.
            How::Cas | How::Outer => self.slot.store(bits, Ordering::Release),
            How::Timed(since) => {
                // Release: as above.
                self.slot.store(bits, Ordering::Release);
                variants::let_go(since);
            }
            How::BitSpin => {
                // Relaxed: ordered by the Release below.
                self.slot.store(bits | LOCK, Ordering::Relaxed);
                // Release: pairs with the Acquire of the next lock.
                self.slot.fetch_and(!LOCK, Ordering::Release);
            }
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.unlock(self.word);
    }
}

/// Whether two words differ in nothing but what a read changes.
fn is_touch(old: Word, new: Word) -> bool {
    (old.kind(), old.location(), old.stored_bytes()) == (new.kind(), new.location(), new.stored_bytes())
}

#[cfg(test)]
mod tests;
