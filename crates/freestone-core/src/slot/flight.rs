//! Slots in flight: a slot whose content is on its way from a disk holds no lock, but a kind of its
//! own, and requests that need it queue here.
//!
//! # Protocol
//! * [`depart`](Flights::depart): under the slot's lock, the word becomes `InFlight(n)` and flight
//!   `n` opens.
//! * [`wait`](Flights::wait): under the slot's lock, while it is in flight, a waiter is added to
//!   flight `n`.
//! * [`land`](Flights::land): under the slot's lock, flight `n` closes and the new word is
//!   published; the caller lets those go on that waited, in the order in which they came.
//!
//! All three hold the slot's lock, so a waiter is either in the list that `land` takes, or its
//! request sees the new word. A flight ends once: whoever comes later (a disk that answers after
//! its deadline) finds another word in the slot. A CPU's numbers are not used again before all of
//! them were, 2^36 of all CPUs together.
//!
//! Lock order: slot, then the flight's shard. Slots share shards by chance only, and the slots of
//! different CPUs seldom, so no two requests meet in one lock for long.

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

/// The flights of one family of tables. `W` is what waits.
pub struct Flights<W> {
    /// By CPU: numbers that one CPU gives are those of its place, modulo the number of CPUs.
    next: Box<[CachePadded<AtomicU64>]>,
    /// There from the first flight on.
    shards: OnceLock<Shards<W>>,
}

type Shards<W> = Box<[CachePadded<Mutex<Shard<W>>>]>;

/// Flights by number.
type Shard<W> = HashMap<u64, Flight<W>>;

struct Flight<W> {
    held: Word,
    /// Table and slot, in the caller's words.
    owner: u64,
    waiting: Vec<W>,
}

/// What a flight that is over leaves.
pub struct Landed<W> {
    /// What the slot held before.
    pub held: Word,
    /// Who waited.
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
    /// A pass that has picked the slot finds it in flight and forgets it; so what lands has no mark
    /// of it, which nobody would ever take away. It is as old as who lands it says.
    pub fn depart(&self, guard: SlotGuard<'_>, owner: u64, waiting: Vec<W>) -> u64 {
        let held = guard.word();
        let held = if held.is_picked() { held.unpicked(0) } else { held };
        debug_assert_ne!(held.kind(), Kind::InFlight, "a slot departs once");
        let (cpu, cpus) = (percpu::current(), percpu::cpus() as u64);
        // Relaxed: only the number's uniqueness counts.
        let count = self.next[cpu].fetch_add(1, Ordering::Relaxed);
        // As many of each CPU as numbers have room for.
        let number = count % ((1 << LOCATION_BITS) / cpus) * cpus + cpu as u64;
        let before = self.shard(number).insert(number, Flight { held, owner, waiting });
        debug_assert!(before.is_none(), "flight {number} is open twice");
        guard.publish(Word::in_flight(number));
        number
    }

    /// Adds a waiter to the flight of a locked slot.
    pub fn wait(&self, guard: &SlotGuard<'_>, waiter: W) {
        match self.shard(number(guard)).get_mut(&number(guard)) {
            Some(flight) => flight.waiting.push(waiter),
            None => unreachable!("slot in flight {}, which is not open", number(guard)),
        }
    }

    /// Ends the flight of a locked slot: publishes what `new` makes of the word that it held, and
    /// unlocks.
    pub fn land(&self, guard: SlotGuard<'_>, new: impl FnOnce(Word) -> Word) -> Landed<W> {
        let number = number(&guard);
        let flight = self.shard(number).remove(&number);
        let Some(Flight { held, waiting, .. }) = flight else {
            unreachable!("slot in flight {number}, which is not open")
        };
        guard.publish(new(held));
        Landed { held, waiting }
    }

    /// What a slot in flight held before, while its flight is open.
    pub fn held(&self, number: u64) -> Option<Word> {
        self.shard(number).get(&number).map(|flight| flight.held)
    }

    /// The owner of a slot in flight, while its flight is open.
    pub fn owner(&self, number: u64) -> Option<u64> {
        self.shard(number).get(&number).map(|flight| flight.owner)
    }

    /// Takes the first waiter out of whom `is` is true.
    pub fn take_waiter(&self, number: u64, is: impl FnMut(&W) -> bool) -> Option<W> {
        let mut shard = self.shard(number);
        let waiting = &mut shard.get_mut(&number)?.waiting;
        waiting.iter().position(is).map(|at| waiting.remove(at))
    }

    /// Whether no slot is in flight.
    #[cfg(all(test, loom))]
    pub fn is_empty(&self) -> bool {
        self.shards.get().is_none_or(|shards| shards.iter().all(|shard| shard.lock().is_empty()))
    }
}

fn number(guard: &SlotGuard<'_>) -> u64 {
    debug_assert_eq!(guard.word().kind(), Kind::InFlight);
    guard.word().location()
}
