//! The lock of a slot, in its [word](crate::word_lock).
//!
//! Lock order: a thread holds at most one slot lock at a time, except where a type that owns
//! several tables states an order among them. Under a slot lock come the pool's locks, never
//! another request's I/O.

use super::word::Word;
use crate::parking::Parking;
use crate::sync::AtomicU64;
use crate::word_lock;

/// A locked slot. Dropping it unlocks without a change.
pub type SlotGuard<'a> = word_lock::Guard<'a, Word>;

/// Locks a slot.
#[inline]
pub fn lock<'a>(slot: &'a AtomicU64, parking: &'a Parking) -> SlotGuard<'a> {
    word_lock::lock(slot, parking)
}
