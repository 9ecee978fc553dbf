//! The zones of a device and how they change: the state machine of the zoned block standards, as
//! `null_blk` has it.
//!
//! # Locks, in order
//! 1. A zone's own ([`Guard`]): held for a change of its word, and for what an inline request does.
//!    One at a time is waited for, by a thread that holds none; a second one (an implicit close's
//!    victim) is only tried.
//! 2. The resources' mutex, only where open or active zones are limited and only around a change of
//!    condition: a few instructions.
//!
//! A zone whose condition changes is locked, and the resources are told before its word is
//! published. So under the resources' lock a zone that can be locked is in the condition that the
//! resources have it in.

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

/// Up to this many zones, each has two cache lines of its own (the processor fetches pairs); with
/// more, two threads seldom meet.
const APART_ZONES_MAX: u32 = 1 << 16;
/// Words of two cache lines.
const APART_WORDS: usize = if cfg!(loom) { 1 } else { 16 };

/// A locked zone. Dropping it unlocks without a change. Held for what a request does on its own
/// thread, never while anybody waits for a device.
pub type Guard<'a> = word_lock::Guard<'a, Word>;

/// The zones of one device.
pub struct Table {
    pub layout: Layout,
    words: Box<[AtomicU64]>,
    /// Words from one zone's to the next's.
    stride: usize,
    parking: Parking,
    /// In cache lines of its own: everything else here is only read.
    resources: Option<CachePadded<Mutex<Resources>>>,
}

/// Where a write goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// To this byte of the device.
    At(u64),
    /// To the write pointer.
    Append,
}

/// What a zone is asked to become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Open for a write.
    Write,
    /// Explicitly open.
    Open,
    /// Closed.
    Close,
    /// Full.
    Finish,
}

/// The answer to a [`Change`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The zone's new word; its resources are taken. The holder of the zone publishes it.
    Go(Word),
    /// It cannot be.
    Refused(Error),
    /// This zone would have to be closed, and somebody holds it: let go of everything,
    /// [wait](Table::wait_for) for it alone, and begin again.
    Held(u32),
}

impl Table {
    /// Zones in these conditions. `None`: no memory.
    pub fn new(layout: Layout, zone: impl Fn(u32) -> Word) -> Option<Self> {
        let stride = if layout.zones <= APART_ZONES_MAX { APART_WORDS } else { 1 };
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

    /// Locks a zone. The caller holds no other.
    #[inline]
    pub fn lock(&self, zone: u32) -> Guard<'_> {
        word_lock::lock(self.slot(zone), &self.parking)
    }

    /// What a zone is now, and everything that was written below its write pointer.
    #[inline]
    pub fn look(&self, zone: u32) -> Word {
        // Acquire: pairs with the Release of the unlock that published the word after the data was
        // written.
        Word::from_bits(self.slot(zone).load(Ordering::Acquire))
    }

    /// Whether what was read since `word` was seen is good: no reset came between.
    #[inline]
    pub fn is_still(&self, zone: u32, word: Word) -> bool {
        // Acquire: the reads of the data before are not moved behind the look. Who reset the zone
        // published the next generation before it touched the data, and whoever read data of that
        // time synchronised with it in the device below.
        fence(Ordering::Acquire);
        // Relaxed: ordered by the fence.
        let now = Word::from_bits(self.slot(zone).load(Ordering::Relaxed));
        now.generation() == word.generation()
    }

    /// Waits until nobody holds this zone. The caller holds nothing.
    pub fn wait_for(&self, zone: u32) {
        drop(self.lock(zone));
    }

    /// Where a write of `len` bytes goes, in bytes from the start of the device: the position's
    /// rules.
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

    /// Changes a locked zone's condition, as far as rules and resources allow it. `word` is the
    /// zone's.
    #[inline]
    pub fn enter(&self, zone: u32, word: Word, change: Change) -> Step {
        match (change, word.condition()) {
            (Change::Write, ImplicitOpen | ExplicitOpen)
            | (Change::Open, ExplicitOpen)
            | (Change::Close, Closed) => Step::Go(word),
            (Change::Write, Empty | Closed) => self.acquire(zone, word, word.with_condition(ImplicitOpen)),
            (Change::Open, Empty | Closed) => self.acquire(zone, word, word.with_condition(ExplicitOpen)),
            (Change::Open, ImplicitOpen) => Step::Go(self.settle(zone, word, ExplicitOpen)),
            (Change::Close, ImplicitOpen | ExplicitOpen) => {
                let closed = if word.pointer() == 0 { Empty } else { Closed };
                Step::Go(self.settle(zone, word, closed))
            }
            // The kernel looks at a zone's condition here only where zones are limited.
            (Change::Finish, Full) if self.resources.is_some() => Step::Go(word),
            (Change::Finish, Full | ImplicitOpen | ExplicitOpen) => {
                let full = self.settle(zone, word, Full);
                Step::Go(self.finished(zone, full))
            }
            // It takes no resource in the end, and yet one must be free.
            (Change::Finish, Empty | Closed) => {
                let full = self.finished(zone, word.with_condition(Full));
                self.acquire(zone, word, full)
            }
            _ => Step::Refused(Error::ZoneCondition),
        }
    }

    /// The write pointer of a finished zone is at its end, not at its capacity: what was never
    /// written reads as the device below has it.
    fn finished(&self, zone: u32, word: Word) -> Word {
        word.with_pointer(self.layout.len(zone)).next_generation()
    }

    /// The word after `bytes` were written at the write pointer of a locked zone: it has advanced,
    /// and the zone is full where it reached the capacity.
    #[inline]
    pub fn advanced(&self, zone: u32, word: Word, bytes: u64) -> Word {
        let word = word.with_pointer(word.pointer() + bytes);
        if word.pointer() == self.layout.capacity(zone) { self.settle(zone, word, Full) } else { word }
    }

    /// The word after a write of which only `bytes` were transferred. A zone that this write was to
    /// be the first one of is empty again if there was nothing.
    pub fn failed(&self, zone: u32, word: Word, was_empty: bool, bytes: u64) -> Word {
        match word.condition() {
            _ if bytes > 0 => self.advanced(zone, word, bytes),
            ImplicitOpen | Closed if was_empty => self.settle(zone, word, Empty),
            _ => word,
        }
    }

    /// The word of a locked zone in another condition, which needs no resource that it has not;
    /// what it does not need any more is given back.
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

    /// The word of a locked zone without data, one generation later.
    pub fn emptied(&self, zone: u32, word: Word) -> Word {
        self.settle(zone, word, Empty).with_pointer(0).next_generation()
    }

    /// Changes a zone once nothing is in the way. What `look` makes of the word before is returned,
    /// unless it refuses.
    pub fn change<R>(&self, zone: u32, change: Change, look: impl Fn(Word) -> Result<R>) -> Result<R> {
        loop {
            let guard = self.lock(zone);
            let before = guard.word();
            let seen = look(before)?;
            match self.enter(zone, before, change) {
                Step::Go(after) => {
                    guard.publish(after);
                    return Ok(seen);
                }
                Step::Refused(error) => return Err(error),
                Step::Held(other) => {
                    drop(guard);
                    self.wait_for(other);
                }
            }
        }
    }

    /// Takes what an empty or closed zone needs to be opened: the check of the resources.
    fn acquire(&self, zone: u32, from: Word, to: Word) -> Step {
        let Some(resources) = &self.resources else { return Step::Go(to) };
        let (max_open, max_active) = (self.layout.max_open, self.layout.max_active);
        let mut resources = resources.lock();
        let active_left = max_active == 0 || resources.active() < max_active;
        if from.condition() == Empty && !active_left {
            return Step::Refused(Error::ZoneTooManyActive);
        }
        if max_open != 0 && resources.open() >= max_open {
            // The kernel refuses to close one for a closed zone, too, where no more may be active.
            if resources.implicit() == 0 || !active_left {
                return Step::Refused(Error::ZoneTooManyOpen);
            }
            if let Err(held) = self.close_one(&mut resources) {
                return Step::Held(held);
            }
        }
        resources.change(zone, from.condition(), to.condition());
        Step::Go(to)
    }

    /// Closes the next implicitly open zone that nobody holds: one without a write in flight if
    /// there is one. Fails with a zone that somebody holds.
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
                // What is in flight will land in the closed zone, which stays active for it.
                let closed = if word.pointer() == 0 && !in_flight { Empty } else { Closed };
                resources.close(victim, closed);
                guard.publish(word.with_condition(closed));
                return Ok(());
            }
        }
        // Where none was held a candidate became busy, or ceased to be, between the two rounds: it
        // was held then.
        Err(held.unwrap_or_else(|| resources.candidate(0)))
    }

    /// Zones that were closed for others so far.
    pub fn implicit_closes(&self) -> u64 {
        self.resources.as_ref().map_or(0, |resources| resources.lock().closes())
    }

    /// What the resources count: open zones, active zones.
    #[cfg(all(test, loom))]
    pub fn used(&self) -> (u32, u32) {
        self.resources.as_ref().map_or((0, 0), |resources| {
            let resources = resources.lock();
            (resources.open(), resources.active())
        })
    }
}
