//! Slots in flight, whose content is being read from disk. A slot in flight has a kind of its own instead of
//! being locked, and requests that need the page wait here.
//!
//! # Protocol
//! * [`depart`](Flights::depart): under the slot's lock, the word becomes `InFlight(n)` and flight `n` opens.
//! * [`wait`](Flights::wait): under the lock of a slot in flight, a waiter is added to flight `n`.
//! * [`land`](Flights::land): under the slot's lock, flight `n` closes and the new word is published. The
//!   caller continues the waiters in order of arrival.
//!
//! All three hold the slot's lock, so a waiter is either in the list that `land` takes, or its request sees
//! the new word. A flight ends once: a completion after its deadline finds another word in the slot. Numbers
//! are reused only after all others, 2^36 for all CPUs together.
//!
//! Lock order: slot, then the flight's shard. Slots share shards by chance, and rarely with other CPUs, so
//! shards are hardly contended.

use std::collections::HashMap;

use crossbeam_utils::CachePadded;

use super::lock::SlotGuard;
use super::word::{Kind, LOCATION_BITS, Word};
use crate::percpu;
use crate::sync::{AtomicU64, Mutex, MutexGuard, OnceLock, Ordering};

#[cfg(not(loom))]
const SHARDS: u64 = 64;
#[cfg(loom)]
const SHARDS: u64 = 1;

/// The flights of one family of tables. `W` is a waiter.
pub struct Flights<W> {
    /// Counters by CPU. A number is congruent to the CPU that allocates it, modulo the number of CPUs.
    next: Box<[CachePadded<AtomicU64>]>,
    /// Allocated by the first flight.
    shards: OnceLock<Shards<W>>,
}

type Shards<W> = Box<[CachePadded<Mutex<Shard<W>>>]>;

/// Flights by number.
type Shard<W> = HashMap<u64, Flight<W>>;

struct Flight<W> {
    held: Word,
    /// Table and slot, encoded by the caller.
    owner: u64,
    waiting: Vec<W>,
}

/// Result of the end of a flight.
pub struct Landed<W> {
    /// Word of the slot before the flight.
    pub held: Word,
    /// Requests that waited, in order of arrival.
    pub waiting: Vec<W>,
}

impl<W> Default for Flights<W> {
    fn default() -> Self {
        Self {
            next: (0..percpu::cpus()).map(|_| CachePadded::new(AtomicU64::new(0))).collect(),
            shards: OnceLock::new(),
        }
    }
}

impl<W> Flights<W> {
    fn shard(&self, number: u64) -> MutexGuard<'_, Shard<W>> {
        let shards = self.shards.get_or_init(|| (0..SHARDS).map(|_| CachePadded::default()).collect());
        shards[(number % SHARDS) as usize].lock()
    }

    /// Puts a slot in flight and unlocks it. Returns the flight's number.
    ///
    /// A pass that has picked the slot finds it in flight and skips it. So the mark is cleared here, or it
    /// would remain forever; the age is set by the one that ends the flight.
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

    /// Ends the flight of a locked slot: publishes the word that `new` returns for the one before the flight,
    /// and unlocks.
    pub fn land(&self, guard: SlotGuard<'_>, new: impl FnOnce(Word) -> Word) -> Landed<W> {
        let number = number(&guard);
        let flight = self.shard(number).remove(&number);
        let Some(Flight { held, waiting, .. }) = flight else {
            unreachable!("flight {number} of a slot is not open")
        };
        guard.publish(new(held));
        Landed { held, waiting }
    }

    /// Returns the word before the flight, while the flight is open.
    pub fn held(&self, number: u64) -> Option<Word> {
        self.shard(number).get(&number).map(|flight| flight.held)
    }

    /// Returns the owner of a slot in flight, while the flight is open.
    pub fn owner(&self, number: u64) -> Option<u64> {
        self.shard(number).get(&number).map(|flight| flight.owner)
    }

    /// Removes and returns the first waiter that satisfies the predicate.
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
