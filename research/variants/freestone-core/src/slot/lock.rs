//! `slot::lock` with selectable locks: the product's own file, or one of the locks that the
//! kernel's experiment compared.
//!
//! Locks that do not fit into the slot's word are in a separate array with four bytes per entry.
//! The address of a slot determines its entry: slots of disks below 4 GiB have one entry each; on
//! larger disks some slots share an entry. In the kernel the lock was in the table entry; here the
//! lock is on another cache line.

mod ours;

use std::time::Instant;

use crossbeam_utils::CachePadded;

// The product's file also uses these names and imports them from this module, its parent.
use super::word::{self, Word};
use crate::parking::Parking;
use crate::sync::{AtomicU64, Ordering};
use crate::variants::spinlocks::{ReadWrite, Ticket, spin_until};
use crate::variants::{self, Intent, Lock};
use crate::word_lock::{LOCK, Word as _};

/// Number of entries of a separate array. Neighbouring slots never share an entry.
const ARRAY_LOCKS: usize = 1 << 20;

static TABLE: CachePadded<ReadWrite> = CachePadded::new(ReadWrite::new());
static TICKETS: [Ticket; ARRAY_LOCKS] = [const { Ticket::new() }; ARRAY_LOCKS];
static READ_WRITE: [ReadWrite; ARRAY_LOCKS] = [const { ReadWrite::new() }; ARRAY_LOCKS];

/// A locked slot. Drop unlocks the slot without a change.
#[must_use]
pub struct SlotGuard<'a>(Guard<'a>);

enum Guard<'a> {
    Ours(ours::SlotGuard<'a>),
    Other(VariantGuard<'a>),
}

/// Locks `slot` with the selected lock.
#[inline]
pub fn lock<'a>(slot: &'a AtomicU64, parking: &'a Parking) -> SlotGuard<'a> {
    SlotGuard(match variants::lock() {
        Lock::Ours => Guard::Ours(ours::lock(slot, parking)),
        lock => Guard::Other(VariantGuard::lock(lock, variants::intent(), slot)),
    })
}

impl SlotGuard<'_> {
    /// Returns the word of the slot.
    #[inline]
    pub fn word(&self) -> Word {
        match &self.0 {
            Guard::Ours(guard) => guard.word(),
            Guard::Other(guard) => guard.word,
        }
    }

    /// Returns the address of the slot in memory.
    #[inline]
    pub fn address(&self) -> usize {
        match &self.0 {
            Guard::Ours(guard) => guard.address(),
            Guard::Other(guard) => std::ptr::from_ref(guard.slot) as usize,
        }
    }

    /// Replaces the word of the slot, which stays locked.
    #[inline]
    pub fn store(&mut self, new: Word) {
        match &mut self.0 {
            Guard::Ours(guard) => guard.store(new),
            Guard::Other(guard) => {
                // Release: pairs with the Acquire of readers.
                guard.slot.fetch_xor(guard.word.bits() ^ new.bits(), Ordering::Release);
                guard.word = new;
            }
        }
    }

    /// Replaces the word of the slot and unlocks it.
    #[inline]
    pub fn publish(self, new: Word) {
        match self.0 {
            Guard::Ours(guard) => guard.publish(new),
            Guard::Other(guard) => {
                let guard = std::mem::ManuallyDrop::new(guard);
                guard.unlock(new);
            }
        }
    }
}

/// A slot that is locked with another lock than the product's.
struct VariantGuard<'a> {
    slot: &'a AtomicU64,
    word: Word,
    held_lock: HeldLock,
}

enum HeldLock {
    Shared(&'static ReadWrite),
    Exclusive(&'static ReadWrite),
    Ticket(&'static Ticket),
    Cas,
    BitSpin,
    Timed(Instant),
    /// The caller holds another lock.
    Outer,
}

impl<'a> VariantGuard<'a> {
    #[inline]
    fn lock(lock: Lock, intent: Intent, slot: &'a AtomicU64) -> Self {
        let index = std::ptr::from_ref(slot) as usize / size_of::<AtomicU64>() % ARRAY_LOCKS;
        let held_lock = match lock {
            Lock::Table => Self::read_write(&TABLE, intent),
            Lock::ReadWrite => Self::read_write(&READ_WRITE[index], intent),
            Lock::Spin => {
                TICKETS[index].lock();
                HeldLock::Ticket(&TICKETS[index])
            }
            Lock::BitSpin => {
                // Acquire: pairs with the Release of the unlock that cleared the bit.
                while slot.fetch_or(LOCK, Ordering::Acquire) & LOCK != 0 {
                    // Relaxed: only decides when to try again.
                    spin_until(|| slot.load(Ordering::Relaxed) & LOCK == 0);
                }
                HeldLock::BitSpin
            }
            Lock::Outer => HeldLock::Outer,
            Lock::Ours => unreachable!("the product's own file handles this lock"),
            Lock::Cas | Lock::Timed => {
                spin_until(|| {
                    // Relaxed: only the expected value of the exchange below.
                    let unlocked = slot.load(Ordering::Relaxed) & !LOCK;
                    // Acquire: pairs with the Release of the unlock that stored the word (Relaxed
                    // on failure: tried again).
                    slot.compare_exchange(unlocked, unlocked | LOCK, Ordering::Acquire, Ordering::Relaxed)
                        .is_ok()
                });
                if lock == Lock::Timed { HeldLock::Timed(Instant::now()) } else { HeldLock::Cas }
            }
        };
        // Relaxed: the lock orders this load.
        let word = Word::from_bits(slot.load(Ordering::Relaxed));
        Self { slot, word, held_lock }
    }

    #[inline]
    fn read_write(lock: &'static ReadWrite, intent: Intent) -> HeldLock {
        match intent {
            Intent::Read => {
                lock.lock_shared();
                HeldLock::Shared(lock)
            }
            Intent::Write => {
                lock.lock();
                HeldLock::Exclusive(lock)
            }
        }
    }

    #[inline]
    fn unlock(&self, new: Word) {
        let (old, bits) = (self.word.bits(), new.bits());
        match self.held_lock {
            HeldLock::Shared(lock) => {
                if old != bits {
                    assert!(is_touch(self.word, new), "a thread that only reads changed a slot");
                    // Relaxed: the age carries no data. If it fails, another reader has updated the
                    // age.
                    let _ = self.slot.compare_exchange(old, bits, Ordering::Relaxed, Ordering::Relaxed);
                }
                lock.unlock_shared();
            }
            HeldLock::Exclusive(lock) => {
                // Relaxed: the lock orders this store.
                self.slot.store(bits, Ordering::Relaxed);
                lock.unlock();
            }
            HeldLock::Ticket(lock) => {
                // Relaxed: the lock orders this store.
                self.slot.store(bits, Ordering::Relaxed);
                lock.unlock();
            }
            // Release: pairs with the Acquire of the next lock, or of a read without the lock.
            HeldLock::Cas | HeldLock::Outer => self.slot.store(bits, Ordering::Release),
            HeldLock::Timed(since) => {
                // Release: pairs with the Acquire of the next lock, or of a read without the lock.
                self.slot.store(bits, Ordering::Release);
                variants::add_hold_time(since);
            }
            HeldLock::BitSpin => {
                // Relaxed: ordered by the Release below.
                self.slot.store(bits | LOCK, Ordering::Relaxed);
                // Release: pairs with the Acquire of the next lock.
                self.slot.fetch_and(!LOCK, Ordering::Release);
            }
        }
    }
}

impl Drop for VariantGuard<'_> {
    fn drop(&mut self) {
        self.unlock(self.word);
    }
}

/// Returns true if two words differ only in what a read changes.
fn is_touch(old: Word, new: Word) -> bool {
    (old.kind(), old.location(), old.stored_bytes()) == (new.kind(), new.location(), new.stored_bytes())
}

#[cfg(test)]
mod tests;
