//! Volatile write cache of a device: unflushed blocks in shards, and claims to write ranges to the
//! device under this layer.

use std::collections::BTreeMap;
use std::ops::Range;

use crossbeam_utils::CachePadded;

use super::UNIT_MAX_BYTES;
use super::record::{EntryKind, Recorder};
use super::shard::{Block, Content, Kind, Shard, ZERO_COST_BYTES};
use freestone_core::device::{Error, Flags, IoBuf, Op, Request, Result};
use freestone_core::sync::{AtomicU64, Mutex, MutexGuard, Ordering::SeqCst};

/// Number of shards, each with its own lock. At most 64, since a set of shards is a bit mask of
/// type `u64`.
const SHARDS: usize = 64;
/// Size in bytes of a region: adjacent blocks that belong to one shard. Also the longest write of
/// cached blocks to the device under this layer.
const REGION_BYTES: u64 = 128 << 10;
const _: () = assert!(UNIT_MAX_BYTES as u64 <= REGION_BYTES, "the blocks of a unit share a shard");

/// Unflushed blocks of a device, and the claims on its ranges.
///
/// Lock order: shards in the order of their numbers, then the recorder's queue.
pub struct Cache {
    /// log2 of the block size in bytes.
    shift: u32,
    /// log2 of the number of blocks per unit. A unit is written completely or not at all when the
    /// power is cut.
    unit_shift: u32,
    capacity: u64,
    shards: Box<[CachePadded<ShardCell>]>,
    /// Logical clock, from which versions of blocks and claims take unique, ascending moments.
    clock: AtomicU64,
    /// Number of bytes of `capacity` in use.
    used: AtomicU64,
    pub record: Option<Recorder>,
}

struct ShardCell {
    shard: Mutex<Shard>,
    /// Moment of the oldest block in the shard's queue, or `u64::MAX` if the queue is empty.
    /// Written under the shard's lock.
    oldest: AtomicU64,
}

/// Claim: the exclusive right to write a range of blocks to the device under this layer.
#[derive(Debug)]
pub struct ClaimedRange {
    /// Moment of the claim, which is also its id. Cached versions of the range with an earlier
    /// moment are older than the data that the claim writes.
    moment: u64,
    pub blocks: Range<u64>,
    mask: u64,
    /// Slot reserved in the recording for this write, if the writes are recorded and the write
    /// bypasses the cache.
    slot: Option<u64>,
}

struct LockedShards<'a> {
    mask: u64,
    guards: Vec<MutexGuard<'a, Shard>>,
}

impl LockedShards<'_> {
    fn of(&mut self, shard: usize) -> &mut Shard {
        &mut self.guards[(self.mask & ((1 << shard) - 1)).count_ones() as usize]
    }
}

impl Cache {
    /// Creates an empty cache of `capacity` bytes. A power cut does not tear units of `unit_bytes`,
    /// a power of two from a block to a region.
    pub fn new(block_bytes: u32, unit_bytes: u32, capacity: u64, record: Option<Recorder>) -> Self {
        let cell = || ShardCell { shard: Mutex::default(), oldest: AtomicU64::new(u64::MAX) };
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

    pub const fn unit_bytes(&self) -> u64 {
        1 << (self.shift + self.unit_shift)
    }

    pub const fn unit_of(&self, block: u64) -> u64 {
        block >> self.unit_shift
    }

    /// Returns the first block of the unit that contains `block`.
    const fn unit_start(&self, block: u64) -> u64 {
        self.unit_of(block) << self.unit_shift
    }

    /// Rounds `block` up to the next start of a unit.
    const fn unit_end(&self, block: u64) -> u64 {
        self.unit_start(block + (1 << self.unit_shift) - 1)
    }

    pub const fn blocks(&self, offset: u64, len: u64) -> Range<u64> {
        offset >> self.shift..(offset + len) >> self.shift
    }

    pub fn used(&self) -> u64 {
        self.used.load(SeqCst)
    }

    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Returns a moment that is later than every version cached so far.
    pub fn now(&self) -> u64 {
        self.clock.load(SeqCst)
    }

    pub fn free_bytes(&self) -> u64 {
        self.capacity.saturating_sub(self.used())
    }

    const fn region_blocks(&self) -> u64 {
        REGION_BYTES >> self.shift
    }

    /// Returns the shard of a block. The region number is hashed, so that strided accesses use
    /// different shards.
    const fn shard_of(&self, block: u64) -> usize {
        ((block / self.region_blocks()).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - SHARDS.ilog2())) as usize
    }

    /// Splits a range of blocks at region boundaries. Returns each part with its shard.
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
        // A range with more than four regions per shard touches nearly every shard, so all are
        // locked.
        if (blocks.end - blocks.start) / self.region_blocks() > 4 * SHARDS as u64 {
            return u64::MAX;
        }
        self.regions(blocks.clone()).fold(0, |mask, (shard, _)| mask | 1 << shard)
    }

    fn lock(&self, mask: u64) -> LockedShards<'_> {
        let guards = bits(mask).map(|shard| self.shards[shard].shard.lock()).collect();
        LockedShards { mask, guards }
    }

    fn note_oldest(&self, shard: usize, held: &Shard) {
        self.shards[shard].oldest.store(held.oldest().unwrap_or(u64::MAX), SeqCst);
    }

    // ---- writes ---------------------------------------------------------------------------------

    /// Caches as much of a write (with `data`), zeroing or discard as there is space for, from its
    /// start to the end of a unit. Returns the number of cached bytes; 0 means that the cache or
    /// the log is full.
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
            // Only a recording uses `what`. Without one, the data is not copied.
            Some(_) if self.record.is_none() => EntryKind::Zeroes,
            Some(data) => EntryKind::Data(data[..bytes as usize].into()),
            None if op == Op::Discard => EntryKind::Discard,
            None => EntryKind::Zeroes,
        };
        let blocks = self.blocks(offset, bytes);
        let mut contents = contents.into_iter();
        let mut locked = self.lock(self.mask(&blocks));
        // The clock advances under the locks, so that the versions of a block have ascending
        // moments, and the recording has the same order.
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

    /// Returns true if writes must wait because the queue of the recording is full.
    pub fn is_log_full(&self) -> bool {
        self.record.as_ref().is_some_and(Recorder::is_full)
    }

    /// Reserves space for the first of `blocks` and returns their number. The number ends at a unit
    /// boundary, so that no version of a unit contains only a part of a write. An empty cache
    /// grants at least one unit, whatever its capacity is.
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

    /// Copies the cached data of `[offset, offset + out.len())` to `out`. Returns the ranges of
    /// `out` that are not cached. The device under this layer contains their content, or newer
    /// content.
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

    /// Returns the first cached blocks of a range, about `most` of them, and the block up to which
    /// the list is complete.
    pub fn cached_kinds(&self, blocks: Range<u64>, most: usize) -> (Vec<(u64, Kind)>, u64) {
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

    /// Claims a range for a write that bypasses the cache. Returns `None` if a part of the range is
    /// already claimed.
    pub fn claim(&self, blocks: Range<u64>, what: impl FnOnce() -> WriteRecord) -> Option<ClaimedRange> {
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
            let WriteRecord { offset, len, what, fua } = what();
            record.open(offset, len, what, fua)
        });
        Some(ClaimedRange { moment, blocks, mask, slot })
    }

    /// Claims and copies the oldest run of adjacent cached blocks from before `bound`, in the range
    /// `within` or anywhere. Returns `None` if all such blocks are claimed.
    pub fn claim_run(&self, bound: u64, within: Option<&Range<u64>>) -> Result<Option<Run>> {
        let region = self.region_blocks();
        let mut left: u64 = u64::MAX;
        loop {
            // Starts with the shard that contains the oldest block. A shard whose runs are all
            // claimed is skipped.
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
            // The clock advances under the shard's lock: the claim is later than every version in
            // the run, and earlier than every future one.
            let moment = self.clock.fetch_add(1, SeqCst);
            held.claim(moment, blocks.clone());
            let claimed = ClaimedRange { moment, blocks, mask: 1 << shard, slot: None };
            let request = match kind {
                Kind::Bytes => Request::write(offset, len),
                Kind::Zeroes => Request::new(Op::WriteZeroes, offset, len),
                Kind::Hole => Request::new(Op::WriteZeroes, offset, len).with(Flags::MAY_FREE),
            };
            return Ok(Some(Run { claimed, request, data }));
        }
    }

    /// Releases a claim after its first `done` bytes were written to the device under this layer. A
    /// power cut must not lose older versions of units that this part touches, or these units would
    /// be torn.
    pub fn release(&self, claimed: ClaimedRange, done: u64, failed: bool) {
        let ClaimedRange { moment, blocks, mask, slot } = claimed;
        let settled = blocks.start + (done >> self.shift);
        let mut freed = 0;
        for shard in bits(mask) {
            let mut held = self.shards[shard].shard.lock();
            freed += held.forget_before(blocks.start..settled, moment);
            if settled > blocks.start {
                held.protect(self.unit_start(blocks.start)..blocks.start, moment);
                held.protect(settled..self.unit_end(settled), moment);
            }
            if failed {
                // `now` would not advance the clock. The blocks need a moment before the bound of a
                // later flush, so that the flush finds them.
                held.requeue(settled..blocks.end, self.clock.fetch_add(1, SeqCst));
            }
            held.release(moment);
            self.note_oldest(shard, &held);
        }
        if let (Some(record), Some(slot)) = (&self.record, slot) {
            record.close(slot, done);
        }
        self.used.fetch_sub(freed, SeqCst);
    }

    /// Returns true if blocks from before `bound` are still unflushed, in the range `within` or
    /// anywhere.
    pub fn has_before(&self, bound: u64, within: Option<&Range<u64>>) -> bool {
        self.shards.iter().any(|cell| {
            cell.oldest.load(SeqCst) < bound
                && within.is_none_or(|within| cell.shard.lock().has_before(within.clone(), bound))
        })
    }

    /// Removes and returns all cached blocks. The power must be off, so that no range is claimed.
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

/// Claimed run of blocks, and the request that writes it to the device under this layer.
pub struct Run {
    pub claimed: ClaimedRange,
    pub request: Request,
    pub data: IoBuf,
}

/// Write that bypasses the cache, as it is recorded.
pub struct WriteRecord {
    pub offset: u64,
    pub len: u64,
    pub what: EntryKind,
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
