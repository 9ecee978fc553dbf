//! Slots in flight, whose content is being read from disk. A slot in flight is not locked, but has a kind of
//! its own. Requests that need the page wait in its *flight*, the record of this I/O.
//!
//! # Protocol
//! * [`depart`](Flights::depart): under the slot's lock, the word becomes [in flight](Word::in_flight) and a
//!   flight opens. The word keeps all other fields, so that the slot alone has the place of the page.
//! * [`wait`](Flights::wait): under the lock of a slot in flight, a waiter is added to its flight.
//! * [`land`](Flights::land): under the slot's lock, the flight closes and the new word is published. The
//!   caller continues the waiters in order of arrival.
//!
//! All three hold the slot's lock, so a waiter is either in the list that `land` removes, or its request sees
//! the new word. A flight ends once: after a deadline the slot may be in another flight, with another number,
//! when the completion comes.
//!
//! Lock order: slot, then the flight's shard. Slots share shards by chance, and rarely with other CPUs, so
//! shards are hardly contended.

use std::collections::HashMap;

use crossbeam_utils::CachePadded;

use super::lock::SlotGuard;
use super::word::{Kind, Word};
use crate::percpu::{self, PerCpu};
use crate::sync::{AtomicU64, Mutex, MutexGuard, OnceLock, Ordering};

#[cfg(not(loom))]
const SHARDS: usize = 64;
#[cfg(loom)]
const SHARDS: usize = 1;

/// The flights (I/O in flight on slots) of one family of page tables. `W` is a waiter.
pub struct Flights<W> {
    /// Counter of each CPU for the next flight's number. A number modulo the number of CPUs is the CPU that
    /// allocated it.
    next: PerCpu<AtomicU64>,
    /// Hash tables of open flights, allocated by the first flight.
    shards: OnceLock<Shards<W>>,
}

type Shards<W> = Box<[CachePadded<Mutex<Shard<W>>>]>;

/// Open flights by the address of the slot.
type Shard<W> = HashMap<usize, Flight<W>>;

struct Flight<W> {
    number: u64,
    held: Word,
    /// Page table and slot in flight, encoded by the caller.
    owner: u64,
    waiting: Vec<W>,
}

/// Identifies a flight among all flights of a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlightId {
    slot: usize,
    number: u64,
}

/// Result of the end of a flight.
pub struct FlightResult<W> {
    /// Word of the slot before the flight.
    pub held: Word,
    /// Requests that waited, in order of arrival.
    pub waiting: Vec<W>,
}

impl<W> Default for Flights<W> {
    fn default() -> Self {
        Self { next: PerCpu::default(), shards: OnceLock::new() }
    }
}

impl<W> Flights<W> {
    fn shard(&self, slot: usize) -> MutexGuard<'_, Shard<W>> {
        let shards = self.shards.get_or_init(|| (0..SHARDS).map(|_| CachePadded::default()).collect());
        shards[slot / size_of::<Word>() % SHARDS].lock()
    }

    /// Calls `with` with a flight and returns its result, or `None` if the flight has ended.
    fn with<R>(&self, id: FlightId, with: impl FnOnce(&mut Flight<W>) -> R) -> Option<R> {
        self.shard(id.slot).get_mut(&id.slot).filter(|flight| flight.number == id.number).map(with)
    }

    /// Puts a slot in flight and unlocks it. Returns the flight's id.
    ///
    /// A background pass that has picked the slot finds it in flight and skips it. So `depart` clears the
    /// "picked" mark, which would otherwise remain forever. The caller that ends the flight sets the age.
    pub fn depart(&self, guard: SlotGuard<'_>, owner: u64, waiting: Vec<W>) -> FlightId {
        let held = guard.word();
        let held = if held.is_picked() { held.unpicked(0) } else { held };
        debug_assert_ne!(held.kind(), Kind::InFlight, "a slot is in at most one flight");
        let (cpu, cpus) = (percpu::current(), percpu::cpus() as u64);
        // Relaxed: the number must only be unique.
        let number = self.next[cpu].fetch_add(1, Ordering::Relaxed) * cpus + cpu as u64;
        let slot = guard.address();
        let previous = self.shard(slot).insert(slot, Flight { number, held, owner, waiting });
        debug_assert!(previous.is_none(), "the slot is in flight already");
        guard.publish(held.in_flight());
        FlightId { slot, number }
    }

    /// Adds a waiter to the flight of a locked slot.
    pub fn wait(&self, guard: &SlotGuard<'_>, waiter: W) {
        debug_assert_eq!(guard.word().kind(), Kind::InFlight);
        match self.shard(guard.address()).get_mut(&guard.address()) {
            Some(flight) => flight.waiting.push(waiter),
            None => unreachable!("the flight of a slot is not open"),
        }
    }

    /// Returns true if requests wait in the flight of a locked slot.
    pub fn has_waiters(&self, guard: &SlotGuard<'_>) -> bool {
        let shard = self.shard(guard.address());
        shard.get(&guard.address()).is_some_and(|flight| !flight.waiting.is_empty())
    }

    /// Ends the flight of a locked slot: calls `new` with the word before the flight, publishes the returned
    /// word, and unlocks the slot.
    pub fn land(&self, guard: SlotGuard<'_>, new: impl FnOnce(Word) -> Word) -> FlightResult<W> {
        debug_assert_eq!(guard.word().kind(), Kind::InFlight);
        let flight = self.shard(guard.address()).remove(&guard.address());
        let Some(Flight { held, waiting, .. }) = flight else {
            unreachable!("the flight of a slot is not open")
        };
        guard.publish(new(held));
        FlightResult { held, waiting }
    }

    /// Returns true if a locked slot is in this flight.
    pub fn is_in(&self, guard: &SlotGuard<'_>, id: FlightId) -> bool {
        guard.address() == id.slot && self.held(id).is_some()
    }

    /// Returns the slot's word before the flight, or `None` if the flight has ended.
    pub fn held(&self, id: FlightId) -> Option<Word> {
        self.with(id, |flight| flight.held)
    }

    /// Returns the owner of the slot in flight, or `None` if the flight has ended.
    pub fn owner(&self, id: FlightId) -> Option<u64> {
        self.with(id, |flight| flight.owner)
    }

    /// Removes and returns the first waiter that satisfies the predicate, or `None` if there is none.
    pub fn take_waiter(&self, id: FlightId, matches: impl FnMut(&W) -> bool) -> Option<W> {
        self.with(id, |flight| {
            let at = flight.waiting.iter().position(matches)?;
            Some(flight.waiting.remove(at))
        })?
    }

    /// Returns true if no slot is in flight.
    #[cfg(all(test, loom))]
    pub fn is_empty(&self) -> bool {
        self.shards.get().is_none_or(|shards| shards.iter().all(|shard| shard.lock().is_empty()))
    }
}
