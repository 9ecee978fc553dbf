//! Table of a snapshot's exceptions: one slot per chunk of the origin, with a lock bit in the slot.
//!
//! | word               | exception |
//! |--------------------|-----------|
//! | `Empty`            | none: the snapshot shows the origin's content |
//! | `InFlight`         | pending: the chunk is being copied; the slot's flight holds the waiters |
//! | `Spilled(chunk)`   | complete: this chunk of the COW device holds the snapshot's content |
//! | the same, idle     | being merged: like complete, but writes wait |
//!
//! # Protocol
//! * A slot changes from `Empty` to `InFlight` to `Spilled` under its lock. If the snapshot is lost
//!   or the exception is cancelled, the slot returns to `Empty`. A request that needs an exception
//!   starts the exception or waits for it, so each chunk is copied once.
//! * A write to the origin proceeds only when every snapshot has a complete exception for the
//!   chunk. Complete exceptions stay until they are merged, so this check needs no lock.
//! * A read of the snapshot without a complete exception reads the origin and checks again. If the
//!   exception is still missing, no write to the origin can have started in that chunk, and the
//!   data is valid. Otherwise the read uses the copy. A read is repeated at most once per chunk,
//!   and writes never wait for readers. (The kernel tracks such reads and delays writes to the
//!   origin.)
//! * No exception is made during a merge. The merge sets the "being merged" mark on a run of
//!   chunks, and new writes to them wait. The merge waits for older writes. Then the slots change
//!   from `Spilled` to `Empty`.
//!
//! Lock order: slot, then the flight's shard.

use freestone_core::device::Result;
use freestone_core::slot::{
    Common, Flights, Kind, LEAF_SLOTS, LOCATION_BITS, Leaf, MAX_SLOTS, SlotGuard, Table, Word,
};
use freestone_core::sync::{Arc, Ordering, fence};

/// Maximum length of a run in chunks, which bounds the work of one call.
const RUN_CHUNKS_MAX: u64 = 1 << 16;
/// Maximum number of chunks of an origin.
pub const CHUNKS_MAX: u64 = MAX_SLOTS;

/// State of a chunk's exception.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exception {
    /// No exception: the snapshot's content is on the origin.
    None,
    /// The chunk is being copied from the origin.
    Pending,
    /// The copy is in this chunk of the COW device.
    Complete(u64),
    /// Like `Complete`, and the chunk is being merged into the origin.
    Merging(u64),
}

/// Table of a snapshot's exceptions. `W` is a waiter for a pending exception.
pub struct Exceptions<W> {
    table: Table,
    flights: Flights<W>,
    chunks: u64,
}

#[must_use]
pub struct LockedChunk<'a, W> {
    guard: SlotGuard<'a>,
    flights: &'a Flights<W>,
    chunk: u64,
}

impl Exception {
    fn of(word: Word) -> Self {
        match word.kind() {
            Kind::Spilled if word.is_idle() => Self::Merging(word.location()),
            Kind::Spilled => Self::Complete(word.location()),
            Kind::InFlight => Self::Pending,
            _ => Self::None,
        }
    }

    /// Returns the number of the COW device's chunk that holds the copy, or `None` without a
    /// complete exception.
    pub fn chunk(self) -> Option<u64> {
        match self {
            Self::None | Self::Pending => None,
            Self::Complete(chunk) | Self::Merging(chunk) => Some(chunk),
        }
    }
}

impl<W> Exceptions<W> {
    /// Creates an empty table for an origin of `chunks` chunks, at most [`CHUNKS_MAX`].
    ///
    /// # Errors
    /// Out of memory for the table.
    pub fn new(common: Arc<Common>, chunks: u64) -> Result<Self> {
        debug_assert!(chunks <= CHUNKS_MAX);
        Ok(Self { table: Table::new(0, common)?, flights: Flights::default(), chunks })
    }

    /// Adds an exception loaded from the store. Ignores chunks beyond the origin's end.
    ///
    /// # Errors
    /// Out of memory for the table.
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

    /// Returns the state of a chunk's exception without locking its slot; [`Exception::None`]
    /// beyond the origin's end.
    #[inline]
    pub fn get(&self, chunk: u64) -> Exception {
        let word = self.leaf(chunk).map_or(Word::EMPTY, |leaf| leaf.peek(chunk));
        // Acquire: pairs with the Release of the unlock that published the word, and makes the
        // writes before that unlock visible.
        fence(Ordering::Acquire);
        Exception::of(word)
    }

    /// Returns true if no chunk in `[first, end)` has a complete exception. Called after these
    /// chunks were read from the origin.
    pub fn has_none_complete(&self, first: u64, end: u64) -> bool {
        // Acquire: keeps the following loads after the read of the origin, as in a sequence lock's
        // second check. If that read returned data of a write that needed an exception, the write
        // started after the Release of the unlock that published the exception. So the loads see
        // the exception.
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

    /// Returns the COW device's chunk that holds the copy of chunk `first`, or `None` if the origin
    /// holds the content. Also returns the number of chunks in the run of `first`, below `end`.
    ///
    /// The chunks of a run are all on the origin (`None`) or contiguous on the COW device. The
    /// number is at least 1 and may be smaller than the whole run.
    pub fn run(&self, first: u64, end: u64) -> (Option<u64>, u64) {
        let cow_chunk = self.get(first).chunk();
        let end = end.min(first.saturating_add(RUN_CHUNKS_MAX));
        let mut next = first + 1;
        while next < end {
            if cow_chunk.is_none() {
                // Skips absent leaves: their chunks have no exceptions.
                let present = self.table.next_present(next.min(self.chunks), end.min(self.chunks));
                next = present.unwrap_or(end);
                if next == end {
                    break;
                }
            }
            if self.get(next).chunk() != cow_chunk.map(|cow_chunk| cow_chunk + (next - first)) {
                break;
            }
            next += 1;
        }
        (cow_chunk, next - first)
    }

    /// Locks the slot of a chunk.
    ///
    /// # Errors
    /// Out of memory for the chunk's leaf.
    pub fn lock(&self, chunk: u64) -> Result<LockedChunk<'_, W>> {
        debug_assert!(chunk < self.chunks);
        let guard = self.table.leaf_or_new(chunk)?.lock(chunk);
        Ok(LockedChunk { guard, flights: &self.flights, chunk })
    }

    /// Locks the slot of a chunk. Returns `None` if the leaf is absent, so that the chunk has no
    /// exception.
    pub fn lock_present(&self, chunk: u64) -> Option<LockedChunk<'_, W>> {
        Some(LockedChunk { guard: self.leaf(chunk)?.lock(chunk), flights: &self.flights, chunk })
    }

    /// Sets or clears the mark "being merged" of a chunk's complete exception.
    pub fn set_merging(&self, chunk: u64, merging: bool) {
        if let Some(locked) = self.lock_present(chunk) {
            locked.set_merging(merging);
        }
    }

    /// Completes the pending exception of a chunk with chunk `new` of the COW device, or cancels it
    /// if `new` is `None`. Returns the waiters in order of arrival.
    pub fn end_pending(&self, chunk: u64, new: Option<u64>) -> Vec<W> {
        let Some(LockedChunk { guard, flights, .. }) = self.lock_present(chunk) else { return Vec::new() };
        flights.land(guard, |_| new.map_or(Word::EMPTY, |new| Word::spilled(new, 0, 0))).waiting
    }
}

impl<W> LockedChunk<'_, W> {
    pub fn state(&self) -> Exception {
        Exception::of(self.guard.word())
    }

    /// Makes the exception of the chunk pending, with `waiter` as its first waiter.
    pub fn set_pending(self, waiter: W) {
        self.flights.depart(self.guard, self.chunk, vec![waiter]);
    }

    pub fn add_waiter(self, waiter: W) {
        self.flights.wait(&self.guard, waiter);
    }

    /// Sets or clears the mark "being merged" of a complete exception.
    pub fn set_merging(self, merging: bool) {
        let word = self.guard.word();
        if word.kind() == Kind::Spilled {
            self.guard.publish(word.with_idle(merging));
        }
    }

    /// Removes the exception of a chunk that was merged into the origin.
    pub fn remove(self) {
        debug_assert!(matches!(self.state(), Exception::Merging(_)));
        self.guard.publish(Word::EMPTY);
    }
}
