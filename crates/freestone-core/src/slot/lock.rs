//! Lock of a page table's slot: a bit inside the slot's [word](crate::word_lock). A file of its own, because the
//! experiments of `research/` replace it by other locks.
//!
//! Lock order: a thread holds at most one slot lock, unless a type that owns several tables defines an order
//! among them. The pool's locks come after a slot lock. A thread that holds a slot lock never waits for
//! another request's I/O.

use super::word::Word;
use crate::parking::Parking;
use crate::sync::AtomicU64;
use crate::word_lock;

/// A locked slot. Dropping it unlocks the slot unchanged.
pub type SlotGuard<'a> = word_lock::Guard<'a, Word>;

/// Locks a slot, waiting for the present holder.
#[inline]
pub fn lock<'a>(slot: &'a AtomicU64, parking: &'a Parking) -> SlotGuard<'a> {
    word_lock::lock(slot, parking)
}
