//! Metadata of each block on the backing device: live units, first header, generation.
//!
//! | bits  | field      | meaning |
//! |-------|------------|---------|
//! | 0-8   | live       | units (16 bytes) of the block that belong to live objects, 0 to 256 |
//! | 9-17  | first      | unit of the first header that begins in the block, plus one; 0: none |
//! | 18-31 | generation | number of times the block was opened, modulo 2^14 |
//!
//! # Life of a block
//! An object is a stored page with its header. The allocating thread *opens* the block, *places*
//! objects in it and writes it. Afterwards any thread may *remove* objects in any order, and the
//! thread that removes the last object frees the block. No object is removed before all are placed:
//! otherwise the block could be freed while it is being filled.
//!
//! An object of a page occupies one block or two, that of a group of pages up to eight, and counts
//! in each.

use super::space::{MAX_BLOCKS, Run};
use freestone_core::device::{Error, Result};
use freestone_core::sync::{AtomicU32, Ordering};

/// Alignment of objects (stored pages with their headers) on the device, in bytes.
pub const UNIT_BYTES: usize = 16;
/// Number of units in a block.
pub const BLOCK_UNITS: u64 = (super::space::BLOCK_BYTES / UNIT_BYTES) as u64;
/// Size of the largest object in bytes, without its header. Objects of groups of pages are larger
/// than a page.
pub const OBJECT_BYTES_MAX: usize = 28 << 10;
/// Number of units of the largest object with its header.
pub const MAX_UNITS: u32 = (OBJECT_BYTES_MAX / UNIT_BYTES) as u32 + 1;
/// Largest number of blocks that an object spans.
pub const OBJECT_BLOCKS_MAX: u64 = (MAX_UNITS as u64 - 2) / BLOCK_UNITS + 2;

const LIVE_MASK: u32 = (1 << 9) - 1;
const FIRST_SHIFT: u32 = 9;
const FIRST_MASK: u32 = LIVE_MASK << FIRST_SHIFT;
const GENERATION_SHIFT: u32 = 18;
/// Number of generations of a block before the generation numbers repeat.
#[cfg(test)]
pub const GENERATIONS: u32 = 1 << (u32::BITS - GENERATION_SHIFT);
const _: () = assert!(BLOCK_UNITS <= LIVE_MASK as u64);

/// The metadata of all blocks of a backing device, four bytes each.
pub struct Blocks(Box<[AtomicU32]>);

impl Blocks {
    /// Creates the metadata of `blocks` unused blocks. The metadata of blocks that are never opened
    /// uses no physical memory.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if `blocks` is above [`MAX_BLOCKS`]; [`Error::NoMemory`].
    pub fn new(blocks: u64) -> Result<Self> {
        if blocks > MAX_BLOCKS {
            return Err(Error::OutOfRange);
        }
        Ok(Self(zeroed(blocks)?))
    }

    /// Starts a new generation of the blocks of a run that was just allocated.
    pub fn open(&self, run: Run) {
        let start = run.start as usize;
        for block in &self.0[start..start + run.blocks as usize] {
            // Relaxed: the lock of the block allocator orders all earlier accesses to the block.
            let before = block.load(Ordering::Relaxed);
            debug_assert!(before & LIVE_MASK == 0, "a block with live objects is opened");
            let generation = (before >> GENERATION_SHIFT).wrapping_add(1);
            // Release: pairs with the Acquire in `generation`.
            block.store(generation << GENERATION_SHIFT, Ordering::Release);
        }
    }

    /// Records an object of `units` units (1 to [`MAX_UNITS`], including the header) that begins at
    /// unit `unit` of the device.
    pub fn place(&self, unit: u64, units: u32) {
        let mut header = Some((unit % BLOCK_UNITS) as u32);
        for (index, part) in parts(unit, units) {
            let place = |before: u32| {
                debug_assert!((before & LIVE_MASK) + part <= BLOCK_UNITS as u32, "block {index} overflows");
                let first = match (header, before & FIRST_MASK) {
                    (None, first) => first,
                    (Some(offset), 0) => (offset + 1) << FIRST_SHIFT,
                    (Some(offset), first) => first.min((offset + 1) << FIRST_SHIFT),
                };
                Some((before & !FIRST_MASK | first) + part)
            };
            // Relaxed: a thread that removes or reads the object learns its place under the slot's
            // lock, which orders this update before.
            let placed = self.0[index].fetch_update(Ordering::Relaxed, Ordering::Relaxed, place);
            debug_assert!(placed.is_ok(), "the update never declines");
            header = None;
        }
    }

    /// As [`place`](Self::place), for an object that a process which has ended has written. Calls `opened` with
    /// each block that had no object before. Returns false, and places nothing, if the object does not fit.
    pub fn restore(&self, unit: u64, units: u32, mut opened: impl FnMut(u64)) -> bool {
        let fits = |(block, part): (usize, u32)| {
            block < self.0.len() && self.live(block as u64) + part <= BLOCK_UNITS as u32
        };
        if !parts(unit, units).all(fits) {
            return false;
        }
        for (block, _) in parts(unit, units).filter(|(block, _)| self.live(*block as u64) == 0) {
            opened(block as u64);
        }
        self.place(unit, units);
        true
    }

    /// Removes an object that [was placed](Self::place) and is no longer read. Calls `freed` with
    /// each block in which that object was the last one. Exactly one caller receives a block, and
    /// then owns it.
    pub fn remove(&self, unit: u64, units: u32, mut freed: impl FnMut(u64)) {
        for (index, part) in parts(unit, units) {
            // AcqRel: pairs with itself. Release orders the use of this object before the lower
            // count. Acquire orders the use of all other objects before the free by the thread that
            // removes the last one.
            let before = self.0[index].fetch_sub(part, Ordering::AcqRel) & LIVE_MASK;
            debug_assert!(before >= part, "block {index} has {before} live units, {part} are removed");
            if before == part {
                freed(index as u64);
            }
        }
    }

    /// Drops the objects of opened blocks that could not be written. No slot may refer to these
    /// objects, and the caller must not call `remove` for these objects. The caller frees the
    /// blocks.
    pub fn drop_unwritten(&self, run: Run) {
        let start = run.start as usize;
        for block in &self.0[start..start + run.blocks as usize] {
            // Relaxed: only the caller knows the objects, and the lock of the block allocator
            // orders this update before the next generation.
            block.fetch_and(!(LIVE_MASK | FIRST_MASK), Ordering::Relaxed);
        }
    }

    /// Returns the number of units of live objects in a block, 0 to [`BLOCK_UNITS`], at this
    /// moment.
    pub fn live(&self, block: u64) -> u32 {
        // Relaxed: an approximate number is enough, as the caller does not access an object on its
        // basis.
        self.0[block as usize].load(Ordering::Relaxed) & LIVE_MASK
    }

    /// Returns the unit in the block of the first header that begins there; `None` without a
    /// header. The unit stays valid when that object is removed: the bytes do not change until the
    /// block is reopened.
    pub fn first(&self, block: u64) -> Option<u32> {
        // Relaxed: the value is fixed once the block is filled, and the caller has learned the
        // place of an object under a slot's lock.
        ((self.0[block as usize].load(Ordering::Relaxed) & FIRST_MASK) >> FIRST_SHIFT).checked_sub(1)
    }

    /// Returns the number of times the block was opened, modulo 2^14. If the number is equal before
    /// and after a read, the bytes are of one generation (but may not have been written yet).
    pub fn generation(&self, block: u64) -> u32 {
        // Acquire: pairs with the Release in `open`.
        self.0[block as usize].load(Ordering::Acquire) >> GENERATION_SHIFT
    }
}

/// Iterates over the blocks of an object, with the number of its units in each block.
fn parts(unit: u64, units: u32) -> impl Iterator<Item = (usize, u32)> {
    debug_assert!((1..=MAX_UNITS).contains(&units), "an object of {units} units");
    let (mut at, end) = (unit, unit + u64::from(units));
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let block = at / BLOCK_UNITS;
            let next = ((block + 1) * BLOCK_UNITS).min(end);
            let part = (next - at) as u32;
            at = next;
            (block as usize, part)
        })
    })
}

#[cfg(not(loom))]
use super::space::zeroed;

#[cfg(loom)]
fn zeroed(len: u64) -> Result<Box<[AtomicU32]>> {
    Ok((0..len).map(|_| AtomicU32::new(0)).collect())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::space::Space;
    use freestone_core::sync::{Arc, Mutex};

    const BLOCKS: u64 = 10;
    /// Number of units of a whole page with its header.
    const PAGE_UNITS: u32 = BLOCK_UNITS as u32 + 1;

    /// Sizes in units of objects to place one after another from a run's start; true leaves a gap
    /// after the object.
    fn any_objects() -> impl Strategy<Value = Vec<(u32, bool)>> {
        let units =
            prop_oneof![1..10_u32, 1..=PAGE_UNITS, 1..=MAX_UNITS, Just(PAGE_UNITS), Just(MAX_UNITS), Just(1)];
        proptest::collection::vec((units, any::<bool>()), 1..60)
    }

    fn fill(blocks: &Blocks, run: Run, objects: &[(u32, bool)]) -> Vec<(u64, u32)> {
        blocks.open(run);
        let mut at = run.start * BLOCK_UNITS;
        let end = at + u64::from(run.blocks) * BLOCK_UNITS;
        let mut placed = Vec::new();
        for &(units, gap) in objects {
            if at + u64::from(units) > end {
                break;
            }
            blocks.place(at, units);
            placed.push((at, units));
            at += u64::from(units) + if gap { 3 } else { 0 };
        }
        placed
    }

    proptest! {
        #[test]
        fn blocks_match_reference_map(
            start in 0..3_u64,
            objects in any_objects(),
            order in any::<u64>(),
            lives in 1..4_u32,
        ) {
            let blocks = Blocks::new(BLOCKS).unwrap();
            let run = Run { start, blocks: (BLOCKS - start) as u32 };
            for life in 1..=lives {
                let mut placed = fill(&blocks, run, &objects);
                // Reference model, unit by unit: block -> (live, first).
                let mut plain = BTreeMap::<u64, (u32, Option<u32>)>::new();
                for &(unit, units) in &placed {
                    for part in unit..unit + u64::from(units) {
                        plain.entry(part / BLOCK_UNITS).or_default().0 += 1;
                    }
                    let first = &mut plain.entry(unit / BLOCK_UNITS).or_default().1;
                    first.get_or_insert((unit % BLOCK_UNITS) as u32);
                }
                let mut random = order;
                while !placed.is_empty() {
                    for block in 0..BLOCKS {
                        let (live, first) = plain.get(&block).copied().unwrap_or_default();
                        prop_assert_eq!(blocks.live(block), live, "live units of block {}", block);
                        prop_assert_eq!(blocks.first(block), first, "first header of block {}", block);
                        let opened = if block < start { 0 } else { life };
                        prop_assert_eq!(blocks.generation(block), opened);
                    }
                    random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let (unit, units) = placed.swap_remove((random >> 33) as usize % placed.len());
                    let mut freed = Vec::new();
                    blocks.remove(unit, units, |block| freed.push(block));
                    let mut expected = Vec::new();
                    for part in unit..unit + u64::from(units) {
                        let live = &mut plain.get_mut(&(part / BLOCK_UNITS)).unwrap().0;
                        *live -= 1;
                        if *live == 0 {
                            expected.push(part / BLOCK_UNITS);
                        }
                    }
                    prop_assert_eq!(freed, expected);
                }
                prop_assert!((0..BLOCKS).all(|block| blocks.live(block) == 0));
            }
        }
    }

    #[test]
    fn block_fields_do_not_overlap() {
        let blocks = Blocks::new(3).unwrap();
        let run = Run { start: 1, blocks: 1 };
        for opened in 1..=2 * GENERATIONS + 1 {
            blocks.open(run);
            assert_eq!(blocks.generation(1), opened % GENERATIONS);
            assert_eq!((blocks.live(1), blocks.first(1)), (0, None));
            let last = BLOCK_UNITS + BLOCK_UNITS - 1;
            blocks.place(last, 1);
            blocks.place(BLOCK_UNITS, BLOCK_UNITS as u32 - 1);
            assert_eq!((blocks.live(1), blocks.first(1)), (BLOCK_UNITS as u32, Some(0)));
            let mut freed = 0;
            blocks.remove(BLOCK_UNITS, BLOCK_UNITS as u32 - 1, |_| freed += 1);
            assert_eq!((freed, blocks.live(1)), (0, 1));
            blocks.remove(last, 1, |block| freed += block);
            assert_eq!((freed, blocks.generation(1)), (1, opened % GENERATIONS));
        }
        for other in [0, 2] {
            let all = (blocks.live(other), blocks.first(other), blocks.generation(other));
            assert_eq!(all, (0, None, 0), "neighbours are left alone");
        }
    }

    #[test]
    fn largest_page_spans_two_blocks() {
        let blocks = Blocks::new(2).unwrap();
        for offset in 0..BLOCK_UNITS {
            blocks.open(Run { start: 0, blocks: 2 });
            blocks.place(offset, PAGE_UNITS);
            assert_eq!(blocks.live(0), (BLOCK_UNITS - offset) as u32);
            assert_eq!(blocks.live(1), PAGE_UNITS - blocks.live(0));
            assert_eq!((blocks.first(0), blocks.first(1)), (Some(offset as u32), None));
            let mut freed = Vec::new();
            blocks.remove(offset, PAGE_UNITS, |block| freed.push(block));
            assert_eq!(freed, [0, 1]);
        }
    }

    #[test]
    fn largest_object_spans_at_most_the_stated_blocks() {
        let blocks = Blocks::new(OBJECT_BLOCKS_MAX).unwrap();
        let mut most = 0;
        for offset in 0..BLOCK_UNITS {
            blocks.open(Run { start: 0, blocks: OBJECT_BLOCKS_MAX as u32 });
            blocks.place(offset, MAX_UNITS);
            assert_eq!((0..OBJECT_BLOCKS_MAX).map(|block| blocks.live(block)).sum::<u32>(), MAX_UNITS);
            assert!((1..OBJECT_BLOCKS_MAX).all(|block| blocks.first(block).is_none()));
            let mut freed = Vec::new();
            blocks.remove(offset, MAX_UNITS, |block| freed.push(block));
            most = most.max(freed.len());
        }
        assert_eq!(most as u64, OBJECT_BLOCKS_MAX);
    }

    #[test]
    fn forget_clears_unwritten_blocks() {
        let blocks = Blocks::new(4).unwrap();
        let (kept, failed) = (Run { start: 0, blocks: 1 }, Run { start: 1, blocks: 2 });
        fill(&blocks, kept, &[(5, false)]);
        fill(&blocks, failed, &[(100, false), (257, false), (50, false)]);
        blocks.drop_unwritten(failed);
        let all = |block| (blocks.live(block), blocks.first(block), blocks.generation(block));
        assert_eq!([0, 1, 2, 3].map(all), [(5, Some(0), 1), (0, None, 1), (0, None, 1), (0, None, 0)]);
        fill(&blocks, failed, &[(257, false)]);
        assert_eq!([1, 2].map(all), [(256, Some(0), 2), (1, None, 2)]);
    }

    #[test]
    fn blocks_above_maximum_fail() {
        assert_eq!(Blocks::new(MAX_BLOCKS + 1).err(), Some(Error::OutOfRange));
        let most = Blocks::new(MAX_BLOCKS).unwrap();
        assert_eq!(most.live(MAX_BLOCKS - 1), 0);
    }

    /// Threads fill runs of blocks, and remove objects that other threads placed.
    #[test]
    fn threads_recycle_blocks() {
        const DISK_BLOCKS: u64 = 64;
        const ROUNDS: u64 = 2000;
        let space = Arc::new(Space::new(DISK_BLOCKS).unwrap());
        let blocks = Arc::new(Blocks::new(DISK_BLOCKS).unwrap());
        let objects = Arc::new(Mutex::new(Vec::new()));
        let remove = |space: &Space, blocks: &Blocks, (unit, units)| {
            blocks.remove(unit, units, |block| space.free_run(block, 1));
        };
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let (space, blocks, objects) = (&space, &blocks, &objects);
                scope.spawn(move || {
                    let mut random = thread;
                    let mut next = move |below: u64| {
                        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                        (random >> 33) % below
                    };
                    for _ in 0..ROUNDS {
                        if let Some(run) = space.take(1 + next(8) as u32) {
                            let sizes: Vec<_> =
                                (0..next(20)).map(|_| (1 + next(200) as u32, false)).collect();
                            let placed = fill(blocks, run, &sizes);
                            let end = placed.last().map_or(run.start * BLOCK_UNITS, |l| l.0 + u64::from(l.1));
                            let used = (end.div_ceil(BLOCK_UNITS) - run.start) as u32;
                            space.free_run(run.start + u64::from(used), run.blocks - used);
                            objects.lock().extend(placed);
                        }
                        for _ in 0..next(20) {
                            let victim = {
                                let mut objects = objects.lock();
                                let len = objects.len() as u64;
                                (len > 0).then(|| objects.swap_remove(next(len) as usize))
                            };
                            if let Some(object) = victim {
                                remove(space, blocks, object);
                            }
                        }
                    }
                });
            }
        });
        for object in std::mem::take(&mut *objects.lock()) {
            remove(&space, &blocks, object);
        }
        assert_eq!(space.used(), 0, "every block comes back");
        assert!((0..DISK_BLOCKS).all(|block| blocks.live(block) == 0));
    }
}
