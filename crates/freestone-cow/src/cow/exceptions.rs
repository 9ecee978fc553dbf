//! The exceptions of one snapshot: one slot a chunk of the origin, its lock inside.
//!
//! | word               | exception |
//! |--------------------|-----------|
//! | `Empty`            | none: the snapshot shows what the origin holds |
//! | `InFlight(flight)` | pending: the copy is under way; who waits for it is with the flight |
//! | `Spilled(chunk)`   | complete: the snapshot's content is in this chunk of the COW device |
//! | the same, idle     | being merged: as complete, but writes wait |
//!
//! # Protocol
//! * `Empty` to `InFlight`, and from there to `Spilled` (or back to `Empty`, when the snapshot is
//!   lost), under the slot's lock. Whoever needs the exception begins it or waits for it, so it is
//!   made once.
//! * A write to the origin goes on only when every snapshot has a complete exception there;
//!   complete ones stay until they are merged, so a look without the lock is enough.
//! * A read of the snapshot that found no complete exception reads the origin, and looks again
//!   afterwards. If there is still none, no write to the origin can have begun in that chunk, and
//!   what was read is the snapshot's content. Otherwise it reads the copy. (The kernel counts such
//!   reads, and makes writes of the origin wait for them; here a write never waits for a reader,
//!   and a read is repeated at most once a chunk.)
//! * While a snapshot is merged no exception is made. A run of chunks is marked, writes that find
//!   the mark wait, and those that found none before are waited for; then the chunks go from
//!   `Spilled` to `Empty`.
//!
//! Lock order: slot, then the flight's shard.

use freestone_core::device::Result;
use freestone_core::slot::{
    Common, Flights, Kind, LEAF_SLOTS, LOCATION_BITS, Leaf, MAX_SLOTS, SlotGuard, Table, Word,
};
use freestone_core::sync::{Arc, Ordering, fence};

/// Chunks that one look at a run covers, at most; absent leaves are free.
const RUN_CHUNKS_MAX: u64 = 1 << 16;
/// Most chunks of an origin.
pub const CHUNKS_MAX: u64 = MAX_SLOTS;

/// What is known of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exception {
    /// The origin has the content.
    None,
    /// The origin has it, and it is being copied.
    Pending,
    /// This chunk of the COW device has it.
    At(u64),
    /// As `At`, and it is being merged into the origin.
    Merging(u64),
}

/// The exceptions of a snapshot. `W` is what waits for a pending one.
pub struct Exceptions<W> {
    table: Table,
    flights: Flights<W>,
    chunks: u64,
}

/// A chunk whose slot is locked.
#[must_use]
pub struct Locked<'a, W> {
    guard: SlotGuard<'a>,
    flights: &'a Flights<W>,
    chunk: u64,
}

impl Exception {
    fn of(word: Word) -> Self {
        match word.kind() {
            Kind::Spilled if word.is_idle() => Self::Merging(word.location()),
            Kind::Spilled => Self::At(word.location()),
            Kind::InFlight => Self::Pending,
            _ => Self::None,
        }
    }

    /// The chunk of the COW device that has the content, if one has.
    pub fn chunk(self) -> Option<u64> {
        match self {
            Self::None | Self::Pending => None,
            Self::At(chunk) | Self::Merging(chunk) => Some(chunk),
        }
    }
}

impl<W> Exceptions<W> {
    /// No exceptions, of an origin of `chunks` chunks, at most [`CHUNKS_MAX`].
    ///
    /// # Errors
    /// No memory.
    pub fn new(common: Arc<Common>, chunks: u64) -> Result<Self> {
        debug_assert!(chunks <= CHUNKS_MAX);
        Ok(Self { table: Table::new(0, common)?, flights: Flights::default(), chunks })
    }

    /// Adds an exception that was loaded. Ignores one beyond the end.
    ///
    /// # Errors
    /// No memory.
    pub fn load(&self, old: u64, new: u64) -> Result<()> {
        if old < self.chunks {
            debug_assert!(new < 1 << LOCATION_BITS);
            self.table.leaf_or_new(old)?.lock(old).publish(Word::spilled(new, 0, 0));
        }
        Ok(())
    }

    fn leaf(&self, chunk: u64) -> Option<Leaf<'_>> {
        if chunk < self.chunks { self.table.leaf(chunk) } else { None }
    }

    /// What is known of a chunk, without its lock. Nothing is known of those beyond the end.
    #[inline]
    pub fn get(&self, chunk: u64) -> Exception {
        let word = self.leaf(chunk).map_or(Word::EMPTY, |leaf| leaf.peek(chunk));
        // Acquire: pairs with the Release of the unlock that published the word: what led to it has
        // happened.
        fence(Ordering::Acquire);
        Exception::of(word)
    }

    /// Whether every chunk in `[first, end)` is still without a complete exception, after the
    /// origin was read there.
    pub fn none_complete(&self, first: u64, end: u64) -> bool {
        // Acquire: keeps the looks below behind the read of the origin, as a second look at a sequence
        // lock's counter. If the read returned data of a write that needed an exception, the device
        // ordered the read after that write, which began after the Release of the unlock that published
        // the exception. So the looks see the exception.
        fence(Ordering::Acquire);
        let end = end.min(self.chunks);
        let mut chunk = first;
        while let Some(present) = self.table.next_present(chunk, end) {
            let Some(leaf) = self.table.leaf(present) else { break };
            chunk = ((present | (LEAF_SLOTS - 1)) + 1).min(end);
            if (present..chunk).any(|chunk| leaf.peek(chunk).kind() == Kind::Spilled) {
                return false;
            }
        }
        true
    }

    /// How the chunks from `first` on, below `end`, lie: where the first one's content is, and how
    /// many follow that lie the same way: all with the origin, or one after the other on the COW
    /// device. At least one; perhaps fewer than there are.
    pub fn run(&self, first: u64, end: u64) -> (Option<u64>, u64) {
        let place = self.get(first).chunk();
        let end = end.min(first.saturating_add(RUN_CHUNKS_MAX));
        let mut next = first + 1;
        while next < end {
            if place.is_none() {
                // Skips leaves that do not exist: their chunks have no exceptions.
                let present = self.table.next_present(next.min(self.chunks), end.min(self.chunks));
                next = present.unwrap_or(end);
                if next == end {
                    break;
                }
            }
            if self.get(next).chunk() != place.map(|place| place + (next - first)) {
                break;
            }
            next += 1;
        }
        (place, next - first)
    }

    /// Locks a chunk.
    ///
    /// # Errors
    /// No memory, where its leaf must be made.
    pub fn lock(&self, chunk: u64) -> Result<Locked<'_, W>> {
        debug_assert!(chunk < self.chunks);
        let guard = self.table.leaf_or_new(chunk)?.lock(chunk);
        Ok(Locked { guard, flights: &self.flights, chunk })
    }

    /// Locks a chunk that may have an exception; `None`: it has none, since its leaf does not
    /// exist.
    pub fn lock_present(&self, chunk: u64) -> Option<Locked<'_, W>> {
        Some(Locked { guard: self.leaf(chunk)?.lock(chunk), flights: &self.flights, chunk })
    }

    /// Marks a chunk's complete exception as being merged, or takes that mark away.
    pub fn mark(&self, chunk: u64, merging: bool) {
        if let Some(locked) = self.lock_present(chunk) {
            locked.mark(merging);
        }
    }

    /// The pending exception of a chunk is complete, at chunk `new` of the COW device, or given up.
    /// Returns who waited, in the order in which they came.
    pub fn land(&self, chunk: u64, new: Option<u64>) -> Vec<W> {
        let Some(Locked { guard, flights, .. }) = self.lock_present(chunk) else { return Vec::new() };
        flights.land(guard, |_| new.map_or(Word::EMPTY, |new| Word::spilled(new, 0, 0))).waiting
    }
}

impl<W> Locked<'_, W> {
    /// What is known of the chunk.
    pub fn now(&self) -> Exception {
        Exception::of(self.guard.word())
    }

    /// Begins the exception of a chunk without one; `waiter` is told when it ends.
    pub fn begin(self, waiter: W) {
        self.flights.depart(self.guard, self.chunk, vec![waiter]);
    }

    /// Adds a waiter to a pending exception.
    pub fn wait(self, waiter: W) {
        self.flights.wait(&self.guard, waiter);
    }

    /// Marks a complete exception as being merged, or takes that mark away.
    pub fn mark(self, merging: bool) {
        let word = self.guard.word();
        if word.kind() == Kind::Spilled {
            self.guard.publish(word.with_idle(merging));
        }
    }

    /// Forgets an exception that was merged.
    pub fn forget(self) {
        debug_assert!(matches!(self.now(), Exception::Merging(_)));
        self.guard.publish(Word::EMPTY);
    }
}
