//! Slots in flight, whose content is being read from disk. A slot in flight is not locked, but has a kind of
//! its own. Requests that need the page wait in its *flight*, the record of this I/O.
//!
//! # Protocol
//! * [`depart`](Flights::depart): under the slot's lock, the word becomes `InFlight(n)` and flight `n` opens.
//! * [`wait`](Flights::wait): under the lock of a slot in flight, a waiter is added to flight `n`.
//! * [`land`](Flights::land): under the slot's lock, flight `n` closes and the new word is published. The
//!   caller continues the waiters in order of arrival.
//!
//! All three hold the slot's lock, so a waiter is either in the list that `land` removes, or its request sees
//! the new word. A flight ends once: a completion after its deadline finds another word in the slot. A number
//! is reused only after all other numbers, 2^36 for all CPUs together.
//!
//! Lock order: slot, then the flight's shard. Slots share shards by chance, and rarely with other CPUs, so
//! shards are hardly contended.

use std::collections::HashMap;

use crossbeam_utils::CachePadded;

use super::lock::SlotGuard;
use super::word::{Kind, LOCATION_BITS, Word};
use crate::percpu::{self, PerCpu};
use crate::sync::{AtomicU64, Mutex, MutexGuard, OnceLock, Ordering};

#[cfg(not(loom))]
const SHARDS: u64 = 64;
#[cfg(loom)]
const SHARDS: u64 = 1;

/// The flights (I/O in flight on slots) of one family of page tables. `W` is a waiter.
pub struct Flights<W> {
    /// Counter of each CPU for the next flight's number. A number modulo the number of CPUs is the CPU that
    /// allocated it.
    next: PerCpu<AtomicU64>,
    /// Hash tables of open flights, allocated by the first flight.
    shards: OnceLock<Shards<W>>,
}

type Shards<W> = Box<[CachePadded<Mutex<Shard<W>>>]>;

/// Open flights by number.
type Shard<W> = HashMap<u64, Flight<W>>;

struct Flight<W> {
    held: Word,
    /// Page table and slot in flight, encoded by the caller.
    owner: u64,
    waiting: Vec<W>,
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
    fn shard(&self, number: u64) -> MutexGuard<'_, Shard<W>> {
        let shards = self.shards.get_or_init(|| (0..SHARDS).map(|_| CachePadded::default()).collect());
        shards[(number % SHARDS) as usize].lock()
    }

    /// Puts a slot in flight and unlocks it. Returns the flight's number.
    ///
    /// A background pass that has picked the slot finds it in flight and skips it. So `depart` clears the
    /// "picked" mark, which would otherwise remain forever. The caller that ends the flight sets the age.
    pub fn depart(&self, guard: SlotGuard<'_>, owner: u64, waiting: Vec<W>) -> u64 {
        let held = guard.word();
        let held = if held.is_picked() { held.unpicked(0) } else { held };
        debug_assert_ne!(held.kind(), Kind::InFlight, "a slot is in at most one flight");
        let (cpu, cpus) = (percpu::current(), percpu::cpus() as u64);
        // Relaxed: the number must only be unique.
        let count = self.next[cpu].fetch_add(1, Ordering::Relaxed);
        // Each CPU has an equal share of the numbers.
        let number = count % ((1 << LOCATION_BITS) / cpus) * cpus + cpu as u64;
        let previous = self.shard(number).insert(number, Flight { held, owner, waiting });
        debug_assert!(previous.is_none(), "flight {number} is open already");
        guard.publish(Word::in_flight(number));
        number
    }

    /// Adds a waiter to the flight of a locked slot.
    pub fn wait(&self, guard: &SlotGuard<'_>, waiter: W) {
        match self.shard(number(guard)).get_mut(&number(guard)) {
            Some(flight) => flight.waiting.push(waiter),
            None => unreachable!("flight {} of a slot is not open", number(guard)),
        }
    }

    /// Returns true if requests wait in the flight of a locked slot.
    pub fn has_waiters(&self, guard: &SlotGuard<'_>) -> bool {
        self.shard(number(guard)).get(&number(guard)).is_some_and(|flight| !flight.waiting.is_empty())
    }

    /// Ends the flight of a locked slot: calls `new` with the word before the flight, publishes the returned
    /// word, and unlocks the slot.
    pub fn land(&self, guard: SlotGuard<'_>, new: impl FnOnce(Word) -> Word) -> FlightResult<W> {
        let number = number(&guard);
        let flight = self.shard(number).remove(&number);
        let Some(Flight { held, waiting, .. }) = flight else {
            unreachable!("flight {number} of a slot is not open")
        };
        guard.publish(new(held));
        FlightResult { held, waiting }
    }

    /// Returns the slot's word before the flight, or `None` if the flight is not open.
    pub fn held(&self, number: u64) -> Option<Word> {
        self.shard(number).get(&number).map(|flight| flight.held)
    }

    /// Returns the owner of the slot in flight, or `None` if the flight is not open.
    pub fn owner(&self, number: u64) -> Option<u64> {
        self.shard(number).get(&number).map(|flight| flight.owner)
    }

    /// Removes and returns the first waiter that satisfies the predicate, or `None` if there is none.
    pub fn take_waiter(&self, number: u64, matches: impl FnMut(&W) -> bool) -> Option<W> {
        let mut shard = self.shard(number);
        let waiting = &mut shard.get_mut(&number)?.waiting;
        waiting.iter().position(matches).map(|at| waiting.remove(at))
    }

    /// Returns true if no slot is in flight.
    #[cfg(all(test, loom))]
    pub fn is_empty(&self) -> bool {
        self.shards.get().is_none_or(|shards| shards.iter().all(|shard| shard.lock().is_empty()))
    }
}

fn number(guard: &SlotGuard<'_>) -> u64 {
    debug_assert_eq!(guard.word().kind(), Kind::InFlight);
    guard.word().location()
}
