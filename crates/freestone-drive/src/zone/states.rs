//! Table of a device's zones, and their state machine: that of the zoned block standards, as in
//! `null_blk`.
//!
//! # Lock order
//! 1. A zone's own lock ([`Guard`]): held for a change of its word, and during an inline request. A
//!    thread waits for one zone only while it holds none. The lock of a second zone, which must be
//!    closed implicitly, is only tried.
//! 2. The mutex of the resources: only if open or active zones are limited, around a change of a
//!    condition, for a few instructions.
//!
//! A condition changes under the zone's lock, and the resources change before the word is
//! published. So, under the resources' mutex, a zone that can be locked has the condition that the
//! resources counted.

use crossbeam_utils::CachePadded;

use super::layout::Layout;
use super::resources::Resources;
use super::word::Word;
use freestone_core::device::zoned::ZoneCondition::{
    self, Closed, Empty, ExplicitOpen, Full, ImplicitOpen, NotWritePointer, Offline, ReadOnly,
};
use freestone_core::device::{Error, Result};
use freestone_core::parking::Parking;
use freestone_core::sync::{AtomicU64, Mutex, Ordering, fence};
use freestone_core::word_lock::{self, Word as _};

/// Up to this many zones, each has two cache lines of its own, since processors fetch pairs. With
/// more zones, threads seldom contend.
const SEPARATE_ZONES_MAX: u32 = 1 << 16;
/// Words in two cache lines.
const SEPARATE_WORDS: usize = if cfg!(loom) { 1 } else { 16 };

/// Locked zone. Dropping the guard unlocks it unchanged. Never held while a thread waits for a
/// device.
pub type Guard<'a> = word_lock::Guard<'a, Word>;

pub struct Table {
    pub layout: Layout,
    words: Box<[AtomicU64]>,
    /// Distance of two zones' words.
    stride: usize,
    parking: Parking,
    /// On separate cache lines: all other fields are only read.
    resources: Option<CachePadded<Mutex<Resources>>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// This byte of the device.
    At(u64),
    Append,
}

/// Requested change of a zone's condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Implicitly open, for a write.
    Write,
    Open,
    Close,
    Finish,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeResult {
    /// The change is allowed and its resources are taken. The caller publishes this word.
    Go(Word),
    /// The change is not allowed.
    Refused(Error),
    /// This zone would have to be closed, but is locked. The caller must release all locks,
    /// [wait](Table::wait_for) for this zone, and retry.
    Locked(u32),
}

impl Table {
    /// Creates the table with the word of each zone. Returns `None` if out of memory.
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

    /// Locks a zone. The caller holds no other lock of a zone.
    #[inline]
    pub fn lock(&self, zone: u32) -> Guard<'_> {
        word_lock::lock(self.slot(zone), &self.parking)
    }

    /// Returns a zone's word. All data below its write pointer is visible then.
    #[inline]
    pub fn look(&self, zone: u32) -> Word {
        // Acquire: pairs with the Release of the unlock that published the word after the data was
        // written.
        Word::from_bits(self.slot(zone).load(Ordering::Acquire))
    }

    /// Returns true if data read since `word` was loaded is valid: the zone was not reset.
    #[inline]
    pub fn is_same_generation(&self, zone: u32, word: Word) -> bool {
        // Acquire: keeps the reads of the data before this load. A reset publishes the next
        // generation before it changes the data. A read that returned the new data synchronized
        // with the reset in the device below.
        fence(Ordering::Acquire);
        // Relaxed: ordered by the fence.
        let now = Word::from_bits(self.slot(zone).load(Ordering::Relaxed));
        now.generation() == word.generation()
    }

    /// Waits until a zone is unlocked. The caller holds no lock.
    pub fn wait_for(&self, zone: u32) {
        drop(self.lock(zone));
    }

    /// Returns the offset of a write of `len` bytes on the device, if the zone's position allows
    /// the write.
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

    /// Changes the condition of a locked zone with this `word`, if rules and resources allow it.
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
            // The kernel checks the condition here only if zones are limited.
            (Change::Finish, Full) if self.resources.is_some() => ChangeResult::Go(word),
            (Change::Finish, Full | ImplicitOpen | ExplicitOpen) => {
                let full = self.settle(zone, word, Full);
                ChangeResult::Go(self.finished_word(zone, full))
            }
            // A full zone takes no resource, and yet one must be free, as in the kernel.
            (Change::Finish, Empty | Closed) => {
                let full = self.finished_word(zone, word.with_condition(Full));
                self.acquire(zone, word, full)
            }
            _ => ChangeResult::Refused(Error::ZoneCondition),
        }
    }

    /// Returns the word of a finished zone. Its write pointer is at the zone's end, so unwritten
    /// data reads as the device below returns it.
    fn finished_word(&self, zone: u32, word: Word) -> Word {
        word.with_pointer(self.layout.len(zone)).next_generation()
    }

    /// Returns the word of a locked zone after a write of `bytes`. A zone that reached its capacity
    /// is full.
    #[inline]
    pub fn advanced_word(&self, zone: u32, word: Word, bytes: u64) -> Word {
        let word = word.with_pointer(word.pointer() + bytes);
        if word.pointer() == self.layout.capacity(zone) { self.settle(zone, word, Full) } else { word }
    }

    /// Returns the word after a failed write that transferred `bytes`. A zone that this write
    /// opened first is empty again if nothing was transferred.
    pub fn failed_word(&self, zone: u32, word: Word, was_empty: bool, bytes: u64) -> Word {
        match word.condition() {
            _ if bytes > 0 => self.advanced_word(zone, word, bytes),
            ImplicitOpen | Closed if was_empty => self.settle(zone, word, Empty),
            _ => word,
        }
    }

    /// Returns the word of a locked zone in a condition that needs no further resource, and
    /// releases those not needed any more.
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

    /// Returns the word of a locked zone without data, in the next generation.
    pub fn emptied_word(&self, zone: u32, word: Word) -> Word {
        self.settle(zone, word, Empty).with_pointer(0).next_generation()
    }

    /// Changes the condition of a zone, and waits for zones in its way. `look` may reject the old
    /// word; its result is returned.
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

    /// Takes the resources to open an empty or closed zone.
    fn acquire(&self, zone: u32, from: Word, to: Word) -> ChangeResult {
        let Some(resources) = &self.resources else { return ChangeResult::Go(to) };
        let (max_open, max_active) = (self.layout.max_open, self.layout.max_active);
        let mut resources = resources.lock();
        let active_left = max_active == 0 || resources.active() < max_active;
        if from.condition() == Empty && !active_left {
            return ChangeResult::Refused(Error::ZoneTooManyActive);
        }
        if max_open != 0 && resources.open() >= max_open {
            // As in the kernel: if no further zone may be active, no zone is closed even for a
            // closed one.
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
    /// flight. Otherwise returns a locked zone as the error.
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
                // The write in flight will complete in the closed zone, which stays active for it.
                let closed = if word.pointer() == 0 && !in_flight { Empty } else { Closed };
                resources.close(victim, closed);
                guard.publish(word.with_condition(closed));
                return Ok(());
            }
        }
        // If no candidate was locked, one changed between the two rounds, and was locked then.
        Err(held.unwrap_or_else(|| resources.candidate(0)))
    }

    /// Returns the number of zones closed to make room.
    pub fn implicit_closes(&self) -> u64 {
        self.resources.as_ref().map_or(0, |resources| resources.lock().closes())
    }

    /// Returns the counted open and active zones.
    #[cfg(all(test, loom))]
    pub fn used(&self) -> (u32, u32) {
        self.resources.as_ref().map_or((0, 0), |resources| {
            let resources = resources.lock();
            (resources.open(), resources.active())
        })
    }
}
