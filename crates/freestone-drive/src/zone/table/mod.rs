//! Table of the zones of a device, and the state machine of a zone: that of the zoned block
//! standards, as implemented by `null_blk`.
//!
//! # Lock order
//! 1. The lock of a zone ([`Guard`]): held for a change of the zone's state word, and during an
//!    inline request. A thread must not wait for the lock of a zone while it holds that of another.
//!    If another zone must be closed implicitly, its lock is only tried.
//! 2. The mutex of the resources (counters of open and active zones), only if these are limited.
//!    Held for a few instructions, around a change of a condition.
//!
//! A condition changes under the zone's lock, and the resources change before the state word is
//! published. So a thread that holds the resources' mutex and locks a zone finds the condition that
//! the resources counted.

pub(super) mod layout;
#[cfg(all(test, loom))]
mod models;
mod resources;
pub(super) mod word;

use crossbeam_utils::CachePadded;

use freestone_core::device::zoned::ZoneCondition::{
    self, Closed, Empty, ExplicitOpen, Full, ImplicitOpen, NotWritePointer, Offline, ReadOnly,
};
use freestone_core::device::{Error, Result};
use freestone_core::parking::Parking;
use freestone_core::sync::{AtomicU64, Mutex, Ordering, fence};
use freestone_core::word_lock::{self, Word as _};
use layout::Layout;
use resources::Resources;
use word::Word;

/// Maximum number of zones for which each state word has two cache lines of its own, since
/// processors fetch pairs of lines. With more zones, threads seldom contend for a line.
const SEPARATE_ZONES_MAX: u32 = 1 << 16;
/// Number of words in two cache lines.
const SEPARATE_WORDS: usize = if cfg!(loom) { 1 } else { 16 };

/// Guard of a locked zone. Dropping the guard unlocks the zone unchanged. Must not be held while
/// the thread waits for a device.
pub type Guard<'a> = word_lock::Guard<'a, Word>;

pub struct Table {
    pub layout: Layout,
    words: Box<[AtomicU64]>,
    /// Distance between the state words of adjacent zones, in words.
    stride: usize,
    parking: Parking,
    /// Counters of open and active zones if these are limited. On separate cache lines, because all
    /// other fields are only read.
    resources: Option<CachePadded<Mutex<Resources>>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Write at this byte of the device, which must be the write pointer.
    At(u64),
    Append,
}

/// Change of a zone's condition that a request or operation needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Open the zone implicitly for a write.
    Write,
    Open,
    Close,
    Finish,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeResult {
    /// The change is allowed, and the zone is counted accordingly. The caller must publish this
    /// word.
    Go(Word),
    /// The change is not allowed, for this reason.
    Refused(Error),
    /// The zone with this number must be closed first, but is locked. The caller must release all
    /// locks, [wait](Table::wait_for) for that zone, and retry.
    Locked(u32),
}

impl Table {
    /// Creates the table. `zone` returns the initial state word of a zone. Returns `None` if out of
    /// memory.
    pub fn new(layout: Layout, zone: impl Fn(u32) -> Word) -> Option<Self> {
        let stride = if layout.zones <= SEPARATE_ZONES_MAX { SEPARATE_WORDS } else { 1 };
        let mut words = Vec::new();
        words.try_reserve_exact(layout.zones as usize * stride).ok()?;
        let mut resources = Resources::new(&layout);
        for index in 0..layout.zones {
            let word = zone(index);
            resources.change(index, Empty, word.condition());
            words.push(AtomicU64::new(word.bits()));
            words.extend((1..stride).map(|_| AtomicU64::new(0)));
        }
        Some(Self {
            layout,
            words: words.into_boxed_slice(),
            stride,
            parking: Parking::default(),
            resources: layout.is_limited().then(|| CachePadded::new(Mutex::new(resources))),
        })
    }

    #[inline]
    fn slot(&self, zone: u32) -> &AtomicU64 {
        &self.words[zone as usize * self.stride]
    }

    /// Locks a zone. The caller must not hold the lock of another zone.
    #[inline]
    pub fn lock(&self, zone: u32) -> Guard<'_> {
        word_lock::lock(self.slot(zone), &self.parking)
    }

    /// Returns the state word of a zone. All data before the write pointer in the word is then
    /// visible to the caller.
    #[inline]
    pub fn load(&self, zone: u32) -> Word {
        // Acquire: pairs with the Release of the unlock that published the word after the data had
        // been written.
        Word::from_bits(self.slot(zone).load(Ordering::Acquire))
    }

    /// Returns true if data read since `word` was loaded is valid, because the zone was not reset
    /// meanwhile.
    #[inline]
    pub fn is_same_generation(&self, zone: u32, word: Word) -> bool {
        // Acquire: keeps the reads of the data before this load. A reset publishes the next
        // generation before it changes the data. A read that returned changed data was ordered
        // after the reset by the device under this layer, so this load returns the next generation.
        fence(Ordering::Acquire);
        // Relaxed: the fence orders this load after the reads of the data.
        let now = Word::from_bits(self.slot(zone).load(Ordering::Relaxed));
        now.generation() == word.generation()
    }

    /// Waits until a zone is unlocked. The caller must not hold a lock.
    pub fn wait_for(&self, zone: u32) {
        drop(self.lock(zone));
    }

    /// Returns the offset on the device at which a write of `len` bytes goes. Fails if the
    /// condition or the write pointer of the zone does not allow the write.
    #[inline]
    pub fn position(&self, zone: u32, word: Word, place: Place, len: u64) -> Result<u64> {
        if matches!(word.condition(), NotWritePointer | Full | ReadOnly | Offline) {
            return Err(Error::ZoneCondition);
        }
        let at = self.layout.start(zone) + word.pointer();
        let fits = word.pointer() + len <= self.layout.capacity(zone);
        if !fits || matches!(place, Place::At(offset) if offset != at) {
            return Err(Error::ZoneWritePointer);
        }
        Ok(at)
    }

    /// Applies a change to a locked zone with the state `word`, if the zone's condition and the
    /// limits of open and active zones allow it.
    #[inline]
    pub fn enter(&self, zone: u32, word: Word, change: Change) -> ChangeResult {
        match (change, word.condition()) {
            (Change::Write, ImplicitOpen | ExplicitOpen)
            | (Change::Open, ExplicitOpen)
            | (Change::Close, Closed) => ChangeResult::Go(word),
            (Change::Write, Empty | Closed) => self.acquire(zone, word, word.with_condition(ImplicitOpen)),
            (Change::Open, Empty | Closed) => self.acquire(zone, word, word.with_condition(ExplicitOpen)),
            (Change::Open, ImplicitOpen) => ChangeResult::Go(self.settle(zone, word, ExplicitOpen)),
            (Change::Close, ImplicitOpen | ExplicitOpen) => {
                let closed = if word.pointer() == 0 { Empty } else { Closed };
                ChangeResult::Go(self.settle(zone, word, closed))
            }
            // The kernel returns early for a full zone only if open or active zones are limited.
            (Change::Finish, Full) if self.resources.is_some() => ChangeResult::Go(word),
            (Change::Finish, Full | ImplicitOpen | ExplicitOpen) => {
                let full = self.settle(zone, word, Full);
                ChangeResult::Go(self.finished_word(zone, full))
            }
            // A full zone is neither open nor active, but finishing needs a free resource, as in
            // the kernel.
            (Change::Finish, Empty | Closed) => {
                let full = self.finished_word(zone, word.with_condition(Full));
                self.acquire(zone, word, full)
            }
            _ => ChangeResult::Refused(Error::ZoneCondition),
        }
    }

    /// Returns the state word of a finished zone. The write pointer is at the end of the zone, so
    /// unwritten data reads as the device under this layer returns it.
    fn finished_word(&self, zone: u32, word: Word) -> Word {
        word.with_pointer(self.layout.len(zone)).next_generation()
    }

    /// Returns the state word of a locked zone after a write of `bytes`. The zone becomes full if
    /// the write pointer reached the capacity.
    #[inline]
    pub fn advanced_word(&self, zone: u32, word: Word, bytes: u64) -> Word {
        let word = word.with_pointer(word.pointer() + bytes);
        if word.pointer() == self.layout.capacity(zone) { self.settle(zone, word, Full) } else { word }
    }

    /// Returns the state word of a locked zone after a failed write that transferred `bytes`. If
    /// the zone was empty before and nothing was transferred, it is empty again.
    pub fn failed_word(&self, zone: u32, word: Word, was_empty: bool, bytes: u64) -> Word {
        match word.condition() {
            _ if bytes > 0 => self.advanced_word(zone, word, bytes),
            ImplicitOpen | Closed if was_empty => self.settle(zone, word, Empty),
            _ => word,
        }
    }

    /// Returns the state word of a locked zone with the condition `to`, and updates the counted
    /// resources. `to` must not need another open or active zone.
    #[inline]
    pub fn settle(&self, zone: u32, word: Word, to: ZoneCondition) -> Word {
        let from = word.condition();
        if let Some(resources) = &self.resources
            && from != to
        {
            resources.lock().change(zone, from, to);
        }
        word.with_condition(to)
    }

    /// Returns the state word of a locked zone after a reset: empty and in the next generation.
    pub fn emptied_word(&self, zone: u32, word: Word) -> Word {
        self.settle(zone, word, Empty).with_pointer(0).next_generation()
    }

    /// Changes the condition of a zone. Waits for locked zones that must be closed first. `look`
    /// checks the old state word and may return an error; its result is returned.
    pub fn change<R>(&self, zone: u32, change: Change, look: impl Fn(Word) -> Result<R>) -> Result<R> {
        loop {
            let guard = self.lock(zone);
            let before = guard.word();
            let seen = look(before)?;
            match self.enter(zone, before, change) {
                ChangeResult::Go(after) => {
                    guard.publish(after);
                    return Ok(seen);
                }
                ChangeResult::Refused(error) => return Err(error),
                ChangeResult::Locked(other) => {
                    drop(guard);
                    self.wait_for(other);
                }
            }
        }
    }

    /// Reserves the resources to open an empty or closed zone. Closes another zone implicitly if
    /// necessary.
    fn acquire(&self, zone: u32, from: Word, to: Word) -> ChangeResult {
        let Some(resources) = &self.resources else { return ChangeResult::Go(to) };
        let (max_open, max_active) = (self.layout.max_open, self.layout.max_active);
        let mut resources = resources.lock();
        let active_left = max_active == 0 || resources.active() < max_active;
        if from.condition() == Empty && !active_left {
            return ChangeResult::Refused(Error::ZoneTooManyActive);
        }
        if max_open != 0 && resources.open() >= max_open {
            // As in the kernel: if the maximum number of zones is active, no zone is closed
            // implicitly, even to open a closed one.
            if resources.implicit() == 0 || !active_left {
                return ChangeResult::Refused(Error::ZoneTooManyOpen);
            }
            if let Err(held) = self.close_one(&mut resources) {
                return ChangeResult::Locked(held);
            }
        }
        resources.change(zone, from.condition(), to.condition());
        ChangeResult::Go(to)
    }

    /// Closes the next implicitly open zone that is not locked, preferably one without a write in
    /// flight. If all are locked, returns the number of one as the error.
    fn close_one(&self, resources: &mut Resources) -> std::result::Result<(), u32> {
        let mut held = None;
        for in_flight in [false, true] {
            for nth in 0..resources.implicit() {
                let victim = resources.candidate(nth);
                let Some(guard): Option<Guard<'_>> = word_lock::try_lock(self.slot(victim), &self.parking)
                else {
                    held.get_or_insert(victim);
                    continue;
                };
                let word = guard.word();
                debug_assert_eq!(word.condition(), ImplicitOpen, "zone {victim}");
                if word.is_busy() != in_flight {
                    continue;
                }
                // A write in flight will complete in this zone, so the zone stays active as closed,
                // even if it contains no data yet.
                let closed = if word.pointer() == 0 && !in_flight { Empty } else { Closed };
                resources.close(victim, closed);
                guard.publish(word.with_condition(closed));
                return Ok(());
            }
        }
        // If no candidate was found locked, a zone became busy or idle between the two rounds, so
        // the caller retries.
        Err(held.unwrap_or_else(|| resources.candidate(0)))
    }

    /// Returns the number of zones that were closed implicitly so far.
    pub fn implicit_closes(&self) -> u64 {
        self.resources.as_ref().map_or(0, |resources| resources.lock().closes())
    }

    /// Returns the counted numbers of open and active zones.
    #[cfg(all(test, loom))]
    pub fn used(&self) -> (u32, u32) {
        self.resources.as_ref().map_or((0, 0), |resources| {
            let resources = resources.lock();
            (resources.open(), resources.active())
        })
    }
}
