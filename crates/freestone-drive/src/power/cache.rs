//! The unflushed blocks of the whole device: which shard holds what, how much there is, and who may
//! write below.

use std::collections::BTreeMap;
use std::ops::Range;

use crossbeam_utils::CachePadded;

use super::UNIT_MAX_BYTES;
use super::record::{Recorder, What};
use super::shard::{Block, Content, Kind, Shard, ZERO_COST_BYTES};
use freestone_core::device::{Error, Flags, IoBuf, Op, Request, Result};
use freestone_core::sync::{AtomicU64, Mutex, MutexGuard, Ordering::SeqCst};

/// Parts of the cache with a lock of their own; a set of them is a `u64`.
const SHARDS: usize = 64;
/// Neighbouring blocks that share a shard, in bytes: the longest write below.
const REGION_BYTES: u64 = 128 << 10;
const _: () = assert!(UNIT_MAX_BYTES as u64 <= REGION_BYTES, "the blocks of a unit share a shard");

/// The unflushed blocks.
///
/// Lock order: shards in the order of their numbers, then the recorder's queue.
pub struct Cache {
    /// log2 of a block in bytes.
    shift: u32,
    /// log2 of the blocks that a cut does not tear.
    unit_shift: u32,
    capacity: u64,
    shards: Box<[CachePadded<Cell>]>,
    /// Gives every version and every claim its moment.
    clock: AtomicU64,
    /// Bytes of `capacity` that are taken.
    used: AtomicU64,
    pub record: Option<Recorder>,
}

struct Cell {
    shard: Mutex<Shard>,
    /// Order of its oldest block, `u64::MAX` where it is empty. Written under the lock.
    oldest: AtomicU64,
}

/// The right to write a range of blocks below.
#[derive(Debug)]
pub struct Claimed {
    /// Moment of the claim, and its name: what was cached of the range before is older than what is
    /// being written.
    moment: u64,
    pub blocks: Range<u64>,
    mask: u64,
    /// Its place in the recording.
    slot: Option<u64>,
}

/// The shards of a set, locked.
struct Locked<'a> {
    mask: u64,
    guards: Vec<MutexGuard<'a, Shard>>,
}

impl Locked<'_> {
    fn of(&mut self, shard: usize) -> &mut Shard {
        &mut self.guards[(self.mask & ((1 << shard) - 1)).count_ones() as usize]
    }
}

impl Cache {
    /// `unit_bytes`: what a cut does not tear, a power of two from one block to a region.
    pub fn new(block_bytes: u32, unit_bytes: u32, capacity: u64, record: Option<Recorder>) -> Self {
        let cell = || Cell { shard: Mutex::default(), oldest: AtomicU64::new(u64::MAX) };
        Self {
            shift: block_bytes.trailing_zeros(),
            unit_shift: unit_bytes.trailing_zeros() - block_bytes.trailing_zeros(),
            capacity,
            shards: (0..SHARDS).map(|_| CachePadded::new(cell())).collect(),
            clock: AtomicU64::new(1),
            used: AtomicU64::new(0),
            record,
        }
    }

    pub const fn block_bytes(&self) -> u64 {
        1 << self.shift
    }

    /// What a cut does not tear, in bytes.
    pub const fn unit_bytes(&self) -> u64 {
        1 << (self.shift + self.unit_shift)
    }

    /// The unit of a block.
    pub const fn unit_of(&self, block: u64) -> u64 {
        block >> self.unit_shift
    }

    /// The first block of its unit.
    const fn unit_start(&self, block: u64) -> u64 {
        self.unit_of(block) << self.unit_shift
    }

    /// The first block that is not before this one and begins a unit.
    const fn unit_end(&self, block: u64) -> u64 {
        self.unit_start(block + (1 << self.unit_shift) - 1)
    }

    /// The blocks of a range of bytes.
    pub const fn blocks(&self, offset: u64, len: u64) -> Range<u64> {
        offset >> self.shift..(offset + len) >> self.shift
    }

    pub fn used(&self) -> u64 {
        self.used.load(SeqCst)
    }

    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// A moment after everything that is cached now.
    pub fn now(&self) -> u64 {
        self.clock.load(SeqCst)
    }

    /// Bytes that can still be cached.
    pub fn room(&self) -> u64 {
        self.capacity.saturating_sub(self.used())
    }

    const fn region_blocks(&self) -> u64 {
        REGION_BYTES >> self.shift
    }

    /// The shard of a block. Regions are spread, so that a stride does not meet in one shard.
    const fn shard_of(&self, block: u64) -> usize {
        ((block / self.region_blocks()).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SHARDS.ilog2())) as usize
    }

    /// The regions of a range, each with its shard.
    fn regions(&self, blocks: Range<u64>) -> impl Iterator<Item = (usize, Range<u64>)> {
        let region = self.region_blocks();
        let mut at = blocks.start;
        std::iter::from_fn(move || {
            let end = blocks.end.min((at / region + 1) * region);
            let part = (at < end).then(|| (self.shard_of(at), at..end));
            at = end;
            part
        })
    }

    fn mask(&self, blocks: &Range<u64>) -> u64 {
        // So many regions are in nearly every shard.
        if (blocks.end - blocks.start) / self.region_blocks() > 4 * SHARDS as u64 {
            return u64::MAX;
        }
        self.regions(blocks.clone()).fold(0, |mask, (shard, _)| mask | 1 << shard)
    }

    fn lock(&self, mask: u64) -> Locked<'_> {
        let guards = bits(mask).map(|shard| self.shards[shard].shard.lock()).collect();
        Locked { mask, guards }
    }

    fn note_oldest(&self, shard: usize, held: &Shard) {
        self.shards[shard].oldest.store(held.oldest().unwrap_or(u64::MAX), SeqCst);
    }

    // ---- writes ---------------------------------------------------------------------------------

    /// Caches as much from the start of a write (`data`) or zeroing as there is room for, up to the
    /// end of a unit. Returns the bytes; 0 is no room.
    pub fn insert(&self, request: &Request, data: Option<&[u8]>) -> Result<u64> {
        let Request { op, flags, offset, len } = *request;
        if self.is_log_full() {
            return Ok(0);
        }
        let cost = if data.is_some() { self.block_bytes() } else { ZERO_COST_BYTES };
        let count = self.reserve(self.blocks(offset, len), cost);
        if count == 0 {
            return Ok(0);
        }
        let bytes = count << self.shift;
        let contents = match data {
            None => {
                let free = op == Op::Discard || flags.contains(Flags::MAY_FREE);
                Ok((0..count).map(|_| Content::Zeroes { free }).collect())
            }
            Some(data) => contents(&data[..bytes as usize], self.block_bytes() as usize),
        };
        let contents: Vec<Content> = contents.inspect_err(|_| {
            self.used.fetch_sub(count * cost, SeqCst);
        })?;
        let what = match data {
            // Only a recording needs a copy of its own.
            Some(_) if self.record.is_none() => What::Zeroes,
            Some(data) => What::Data(data[..bytes as usize].into()),
            None if op == Op::Discard => What::Discard,
            None => What::Zeroes,
        };
        let blocks = self.blocks(offset, bytes);
        let mut contents = contents.into_iter();
        let mut locked = self.lock(self.mask(&blocks));
        // Under the locks: the moments of a block's versions grow, and the recording has the same
        // order.
        let now = self.clock.fetch_add(1, SeqCst);
        for (shard, part) in self.regions(blocks) {
            let held = locked.of(shard);
            for (block, content) in part.zip(contents.by_ref()) {
                held.push(block, now, content);
            }
            self.note_oldest(shard, held);
        }
        if let Some(record) = &self.record {
            record.push(offset, bytes, what);
        }
        Ok(bytes)
    }

    /// Whether the log has to catch up before more is written.
    pub fn is_log_full(&self) -> bool {
        self.record.as_ref().is_some_and(Recorder::is_full)
    }

    /// Takes room for the first of these blocks, up to the end of a unit: no version of a unit is
    /// a part of a write to it. For a unit at least where nothing is cached, so that any capacity
    /// works.
    fn reserve(&self, blocks: Range<u64>, cost: u64) -> u64 {
        let count = blocks.end - blocks.start;
        let mut used = self.used.load(SeqCst);
        loop {
            let room = (self.capacity.saturating_sub(used) / cost).min(count);
            let end = blocks.start + room;
            let end = if room == count { end } else { self.unit_start(end) };
            let granted = match end.saturating_sub(blocks.start) {
                0 if used == 0 => self.unit_end(blocks.start + 1).min(blocks.end) - blocks.start,
                whole => whole,
            };
            if granted == 0 {
                return 0;
            }
            match self.used.compare_exchange(used, used + granted * cost, SeqCst, SeqCst) {
                Ok(_) => return granted,
                Err(now) => used = now,
            }
        }
    }

    // ---- reads ----------------------------------------------------------------------------------

    /// Copies what is cached of `[offset, offset + out.len())` into `out` and returns the byte
    /// ranges in it that are not. What the device below then has of those is as new, or newer.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Vec<Range<usize>> {
        let len = out.len();
        if self.used() == 0 {
            return std::iter::once(0..len).collect();
        }
        let mut missing = Vec::new();
        let mut from = 0;
        for (shard, part) in self.regions(self.blocks(offset, len as u64)) {
            let held = self.shards[shard].shard.lock();
            for (block, cached) in held.range(part) {
                let at = ((block << self.shift) - offset) as usize;
                let end = at + self.block_bytes() as usize;
                cached.newest().copy_to(&mut out[at..end]);
                if from < at {
                    missing.push(from..at);
                }
                from = end;
            }
        }
        if from < len {
            missing.push(from..len);
        }
        missing
    }

    /// The first cached blocks of a range, about `most`, and up to which block that is all.
    pub fn look(&self, blocks: Range<u64>, most: usize) -> (Vec<(u64, Kind)>, u64) {
        let mut found = Vec::new();
        let mut end = blocks.end;
        for cell in &self.shards {
            let held = cell.shard.lock();
            for (taken, (block, cached)) in held.range(blocks.start..end).enumerate() {
                if taken == most {
                    end = block;
                    break;
                }
                found.push((block, cached.newest().kind()));
            }
        }
        found.retain(|(block, _)| *block < end);
        found.sort_unstable_by_key(|(block, _)| *block);
        (found, end)
    }

    // ---- claims ---------------------------------------------------------------------------------

    /// Claims a range for a write that goes past the cache; `None` where a part of it is being
    /// written below.
    pub fn claim(&self, blocks: Range<u64>, what: impl FnOnce() -> Recorded) -> Option<Claimed> {
        let mask = self.mask(&blocks);
        let mut locked = self.lock(mask);
        if locked.guards.iter().any(|held| held.is_claimed(&blocks)) {
            return None;
        }
        let moment = self.clock.fetch_add(1, SeqCst);
        for held in &mut locked.guards {
            held.claim(moment, blocks.clone());
        }
        let slot = self.record.as_ref().map(|record| {
            let Recorded { offset, len, what, fua } = what();
            record.open(offset, len, what, fua)
        });
        Some(Claimed { moment, blocks, mask, slot })
    }

    /// Claims the oldest run before `bound` in any shard, or in `within`, and copies it.
    pub fn claim_run(&self, bound: u64, within: Option<&Range<u64>>) -> Result<Option<Run>> {
        let region = self.region_blocks();
        let mut left: u64 = u64::MAX;
        loop {
            // The shard with the oldest block first; one where all is claimed is passed over.
            let ages = bits(left).map(|shard| (self.shards[shard].oldest.load(SeqCst), shard));
            let Some((age, shard)) = ages.min() else { return Ok(None) };
            if age >= bound {
                return Ok(None);
            }
            left &= !(1 << shard);
            let mut held = self.shards[shard].shard.lock();
            let run = match within {
                None => held.oldest_run(bound, region),
                Some(within) => held.first_run(within.clone(), bound, region),
            };
            let Some(blocks) = run else { continue };
            let first = held.range(blocks.clone()).next();
            let kind = first.map_or(Kind::Hole, |(_, block)| block.newest().kind());
            let (offset, len) = (blocks.start << self.shift, (blocks.end - blocks.start) << self.shift);
            let mut data = IoBuf::zeroed(if kind == Kind::Bytes { len as usize } else { 0 })?;
            let parts = data.chunks_mut(self.block_bytes() as usize);
            for (out, (_, cached)) in parts.zip(held.range(blocks.clone())) {
                cached.newest().copy_to(out);
            }
            // Under the shard's lock: later than every version here, earlier than every one to
            // come.
            let moment = self.clock.fetch_add(1, SeqCst);
            held.claim(moment, blocks.clone());
            let claimed = Claimed { moment, blocks, mask: 1 << shard, slot: None };
            let request = match kind {
                Kind::Bytes => Request::write(offset, len),
                Kind::Zeroes => Request::new(Op::WriteZeroes, offset, len),
                Kind::Hole => Request::new(Op::WriteZeroes, offset, len).with(Flags::MAY_FREE),
            };
            return Ok(Some(Run { claimed, request, data }));
        }
    }

    /// Gives a claim back. The first `done` bytes of it are below: of the units that this reaches
    /// into, nothing that is older than the claim can be lost any more, or they would be torn.
    pub fn release(&self, claimed: Claimed, done: u64, failed: bool) {
        let Claimed { moment, blocks, mask, slot } = claimed;
        let settled = blocks.start + (done >> self.shift);
        let mut freed = 0;
        for shard in bits(mask) {
            let mut held = self.shards[shard].shard.lock();
            freed += held.settle(blocks.start..settled, moment);
            if settled > blocks.start {
                held.secure(self.unit_start(blocks.start)..blocks.start, moment);
                held.secure(settled..self.unit_end(settled), moment);
            }
            if failed {
                // Not `now`: a flush that is issued after this must find the blocks before its
                // bound.
                held.put_off(settled..blocks.end, self.clock.fetch_add(1, SeqCst));
            }
            held.release(moment);
            self.note_oldest(shard, &held);
        }
        if let (Some(record), Some(slot)) = (&self.record, slot) {
            record.close(slot, done);
        }
        self.used.fetch_sub(freed, SeqCst);
    }

    /// Whether something of `within`, or of all, was unflushed at `bound` and still is.
    pub fn has_before(&self, bound: u64, within: Option<&Range<u64>>) -> bool {
        self.shards.iter().any(|cell| {
            cell.oldest.load(SeqCst) < bound
                && within.is_none_or(|within| cell.shard.lock().has_before(within.clone(), bound))
        })
    }

    /// Takes everything out. For a device whose power is off: nobody is here, nothing is claimed.
    pub fn take(&self) -> BTreeMap<u64, Block> {
        let mut all = BTreeMap::new();
        for (shard, cell) in self.shards.iter().enumerate() {
            let mut held = cell.shard.lock();
            all.append(&mut held.take());
            self.note_oldest(shard, &held);
        }
        self.used.store(0, SeqCst);
        all
    }
}

/// Blocks that are to be written below.
pub struct Run {
    pub claimed: Claimed,
    pub request: Request,
    pub data: IoBuf,
}

/// A write past the cache, as the recording shows it.
pub struct Recorded {
    pub offset: u64,
    pub len: u64,
    pub what: What,
    pub fua: bool,
}

fn bits(mut mask: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = (mask != 0).then(|| mask.trailing_zeros() as usize)?;
        mask &= mask - 1;
        Some(bit)
    })
}

fn contents(data: &[u8], block: usize) -> Result<Vec<Content>> {
    let copy = |part: &[u8]| {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(part.len()).map_err(|_| Error::NoMemory)?;
        bytes.extend_from_slice(part);
        Ok(Content::Bytes(bytes.into_boxed_slice()))
    };
    data.chunks_exact(block).map(copy).collect()
}
