//! Allocation of blocks on the backing device.
//!
//! The map has one bit per block, in groups of 4096 blocks (16 MiB). The map also has a bit per
//! group, which is set if the group is full, so that a search skips the group. Blocks are allocated
//! in contiguous runs. A search starts at the end of the last run, so successive runs are
//! neighbours and the device is written from front to back.
//!
//! One lock protects the map. It is held for a bounded search and never across I/O. A read takes
//! the lock only when a page moves back to memory and was the last of its block.

use zerocopy::FromZeros;

use freestone_core::device::{Error, Result};
use freestone_core::sync::{AtomicU64, Mutex, Ordering};

/// Size of a block in bytes: the unit of allocation on the backing device.
pub const BLOCK_BYTES: usize = 4096;
/// Maximum number of blocks (1 TiB), limited by the location field of a slot.
pub const MAX_BLOCKS: u64 = 1 << 28;
const _: () = assert!(MAX_BLOCKS * BLOCK_BYTES as u64 == 16 << freestone_core::slot::LOCATION_BITS);

const WORD_BLOCKS: u64 = 64;
const GROUP_WORDS: u64 = 64;
const GROUP_BLOCKS: u64 = GROUP_WORDS * WORD_BLOCKS;
/// Number of groups with free blocks that a search visits before it returns the longest run found.
const LOOK_GROUPS: u32 = 8;

/// A run of contiguous blocks on the backing device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Run {
    pub start: u64,
    pub blocks: u32,
}

/// The allocation state of the blocks of a backing device.
pub struct Space {
    blocks: u64,
    /// Number of used blocks. Written under the lock of `map`.
    used: AtomicU64,
    /// Lock order: a leaf lock.
    map: Mutex<Map>,
}

/// Allocation map. Zero means "free" everywhere, as untouched zeroed memory needs no physical
/// pages.
struct Map {
    /// Bitmap of blocks; a set bit is a used block.
    bits: Box<[u64]>,
    /// Number of used blocks in each group.
    set: Box<[u16]>,
    /// Bitmap of groups; a set bit is a group without a free block. A truncated last group never
    /// counts as full.
    full: Box<[u64]>,
    /// Block at which the next search starts.
    cursor: u64,
}

impl Space {
    /// Creates the allocation state of a device with `blocks` blocks, all free.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if `blocks` is above [`MAX_BLOCKS`]; [`Error::NoMemory`].
    pub fn new(blocks: u64) -> Result<Self> {
        if blocks > MAX_BLOCKS {
            return Err(Error::OutOfRange);
        }
        let groups = blocks.div_ceil(GROUP_BLOCKS);
        let map = Map {
            bits: zeroed(blocks.div_ceil(WORD_BLOCKS))?,
            set: zeroed(groups)?,
            full: zeroed(groups.div_ceil(64))?,
            cursor: 0,
        };
        Ok(Self { blocks, used: AtomicU64::new(0), map: Mutex::new(map) })
    }

    /// Allocates a run of `want` blocks, or a shorter run (at least one block) if a bounded search
    /// does not find a longer one. Returns `None` if no block is free, or if `want` is 0.
    pub fn take(&self, want: u32) -> Option<Run> {
        let mut map = self.map.lock();
        let run = map.find(self.blocks, want)?;
        let end = run.start + u64::from(run.blocks);
        map.set(run.start, end);
        map.cursor = if end == self.blocks { 0 } else { end };
        // Relaxed: a statistic, which orders no other memory access.
        self.used.fetch_add(u64::from(run.blocks), Ordering::Relaxed);
        Some(run)
    }

    /// Marks a free block as used.
    pub fn occupy(&self, block: u64) {
        self.map.lock().set(block, block + 1);
        // Relaxed: a statistic, which orders no other memory access.
        self.used.fetch_add(1, Ordering::Relaxed);
    }

    /// Frees used blocks. A run may be freed in any pieces.
    pub fn free_run(&self, start: u64, blocks: u32) {
        let end = start + u64::from(blocks);
        assert!(end <= self.blocks, "blocks {start} to {end} of {} are given back", self.blocks);
        let mut map = self.map.lock();
        let cleared = map.clear(start, end);
        debug_assert_eq!(cleared, u64::from(blocks), "of blocks {start} to {end} some were free before");
        // Relaxed: a statistic, which orders no other memory access.
        self.used.fetch_sub(cleared, Ordering::Relaxed);
    }

    pub fn used(&self) -> u64 {
        // Relaxed: a statistic, which orders no other memory access.
        self.used.load(Ordering::Relaxed)
    }

    pub fn free(&self) -> u64 {
        self.blocks - self.used()
    }

    pub fn blocks(&self) -> u64 {
        self.blocks
    }
}

impl Map {
    fn set(&mut self, start: u64, end: u64) {
        for (word, mask) in words(start, end) {
            debug_assert!(self.bits[word] & mask == 0, "blocks of word {word} are taken twice");
            self.bits[word] |= mask;
            let group = word / GROUP_WORDS as usize;
            self.set[group] += mask.count_ones() as u16;
            if u64::from(self.set[group]) == GROUP_BLOCKS {
                self.full[group / 64] |= 1 << (group % 64);
            }
        }
    }

    /// Clears the bits of a range of blocks, and returns the number of bits that were set.
    fn clear(&mut self, start: u64, end: u64) -> u64 {
        let mut cleared = 0;
        for (word, mask) in words(start, end) {
            let count = (self.bits[word] & mask).count_ones();
            self.bits[word] &= !mask;
            let group = word / GROUP_WORDS as usize;
            self.set[group] -= count as u16;
            if count != 0 {
                self.full[group / 64] &= !(1 << (group % 64));
            }
            cleared += u64::from(count);
        }
        cleared
    }

    /// Finds the first run of `want` free blocks from the cursor on, wrapping once. If there is
    /// none, returns the longest run seen, or `None` if no block is free.
    fn find(&self, blocks: u64, want: u32) -> Option<Run> {
        let mut search = Search { want: u64::from(want), ..Search::default() };
        let mut looked = 0;
        for (mut at, end) in [(self.cursor, blocks), (0, self.cursor)] {
            search.open = 0;
            while at < end && !search.is_done() {
                let group = at / GROUP_BLOCKS;
                if self.is_full(group) {
                    at = self.next_not_full(group + 1) * GROUP_BLOCKS;
                    search.open = 0;
                    continue;
                }
                if looked >= LOOK_GROUPS && search.best.blocks > 0 {
                    return Some(search.best);
                }
                let stop = ((group + 1) * GROUP_BLOCKS).min(end);
                for (word, mask) in words(at, stop) {
                    search.look(word as u64 * WORD_BLOCKS, !self.bits[word] & mask);
                    if search.is_done() {
                        break;
                    }
                }
                looked += 1;
                at = stop;
            }
        }
        (search.best.blocks > 0).then_some(search.best)
    }

    fn is_full(&self, group: u64) -> bool {
        self.full[(group / 64) as usize] & 1 << (group % 64) != 0
    }

    /// Returns the first group at or after `from` with a free block, or a number beyond the last
    /// group.
    fn next_not_full(&self, from: u64) -> u64 {
        let first = (from / 64) as usize;
        let mut below = (1 << (from % 64)) - 1;
        for (word, &full) in self.full.iter().enumerate().skip(first) {
            let room = !(full | below);
            if room != 0 {
                return word as u64 * 64 + u64::from(room.trailing_zeros());
            }
            below = 0;
        }
        self.full.len() as u64 * 64
    }
}

/// A search for a run of free blocks, over the words of the map in ascending order.
#[derive(Default)]
struct Search {
    want: u64,
    best: Run,
    /// Number of consecutive free blocks directly before the scan position.
    open: u64,
}

impl Search {
    fn is_done(&self) -> bool {
        u64::from(self.best.blocks) == self.want
    }

    fn consider(&mut self, start: u64, blocks: u64) {
        if blocks > u64::from(self.best.blocks) {
            self.best = Run { start, blocks: blocks.min(self.want) as u32 };
        }
    }

    /// Scans the word that begins at block `base`; a set bit of `free` is a free block.
    fn look(&mut self, base: u64, free: u64) {
        let head = u64::from(free.trailing_ones());
        self.consider(base - self.open, self.open + head);
        if head == WORD_BLOCKS {
            self.open += head;
            return;
        }
        while !self.is_done()
            && let Some(at) = lowest_run(free, self.best.blocks + 1)
        {
            self.consider(base + u64::from(at), u64::from((free >> at).trailing_ones()));
        }
        self.open = u64::from(free.leading_ones());
    }
}

/// Returns the lowest start of `len` consecutive set bits in a word; `None` if there are not as
/// many.
fn lowest_run(word: u64, len: u32) -> Option<u32> {
    if len > u64::BITS {
        return None;
    }
    // A bit of `starts` stays set while the `have` bits from it upwards are all set in `word`.
    let (mut starts, mut have) = (word, 1);
    while have < len {
        let step = have.min(len - have);
        starts &= starts >> step;
        have += step;
    }
    (starts != 0).then(|| starts.trailing_zeros())
}

/// Iterates over the words with the bits `start` to `end` (exclusive), with the masks of these
/// bits.
fn words(start: u64, end: u64) -> impl Iterator<Item = (usize, u64)> {
    let mut at = start;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let word = at / 64;
            let stop = ((word + 1) * 64).min(end);
            let mask = (u64::MAX >> (64 - (stop - at))) << (at % 64);
            at = stop;
            (word as usize, mask)
        })
    })
}

/// Allocates zeroed memory without touching it, so that no physical pages are used yet.
pub fn zeroed<T: FromZeros>(len: u64) -> Result<Box<[T]>> {
    <[T]>::new_box_zeroed_with_elems(len as usize).map_err(|_| Error::NoMemory)
}

#[cfg(all(test, not(loom)))]
#[path = "space_tests.rs"]
mod tests;
