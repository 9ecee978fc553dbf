//! What is known of each block of the backing: how much of it lives, where its first header is, how
//! often it was used.
//!
//! | bits  | field      | meaning |
//! |-------|------------|---------|
//! | 0-8   | live       | units of the block that belong to live objects, 0 to 256 |
//! | 9-17  | first      | unit in the block at which its first header begins, plus one; 0: none begins there |
//! | 18-31 | generation | how often the block was opened, modulo 2^14 |
//!
//! # Life of a block
//! Whoever took it from the [space](super::space) *opens* it, *places* objects in it and writes
//! them. From then on objects are *removed* by anyone, in any order. Who removes the last one gives
//! the block back to the space. Nothing of a block is removed before all of it is placed, or it
//! would be given back under the hands of who fills it.
//!
//! An object is of one block or straddles two, and counts in each.

use super::space::{MAX_BLOCKS, Run};
use freestone_core::device::{Error, Result};
use freestone_core::sync::{AtomicU32, Ordering};

/// Objects on the backing begin at multiples of this many bytes.
pub const UNIT_BYTES: usize = 16;
/// Units in a block.
pub const BLOCK_UNITS: u64 = (super::space::BLOCK_BYTES / UNIT_BYTES) as u64;
/// Units of the largest object, a whole page behind its header. It never touches more than two
/// blocks.
pub const MAX_UNITS: u32 = BLOCK_UNITS as u32 + 1;

const LIVE_MASK: u32 = (1 << 9) - 1;
const FIRST_SHIFT: u32 = 9;
const FIRST_MASK: u32 = LIVE_MASK << FIRST_SHIFT;
const GENERATION_SHIFT: u32 = 18;
/// Generations before they repeat.
#[cfg(test)]
pub const GENERATIONS: u32 = 1 << (u32::BITS - GENERATION_SHIFT);
const _: () = assert!(BLOCK_UNITS <= LIVE_MASK as u64);

/// Four bytes for each block of the backing device.
pub struct Blocks(Box<[AtomicU32]>);

impl Blocks {
    /// A backing of `blocks` blocks of which none was used. Blocks that are never opened cost no
    /// memory.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] above [`MAX_BLOCKS`], [`Error::NoMemory`].
    pub fn new(blocks: u64) -> Result<Self> {
        if blocks > MAX_BLOCKS {
            return Err(Error::OutOfRange);
        }
        Ok(Self(zeroed(blocks)?))
    }

    /// Begins new lives of blocks that the caller took from the space and that nobody else knows
    /// yet.
    pub fn open(&self, run: Run) {
        let start = run.start as usize;
        for block in &self.0[start..start + run.blocks as usize] {
            // Relaxed: the space's lock orders all that others did to the block before this.
            let before = block.load(Ordering::Relaxed);
            debug_assert!(before & LIVE_MASK == 0, "a block with live objects is opened");
            let generation = (before >> GENERATION_SHIFT).wrapping_add(1);
            // Release: pairs with the Acquire in `generation`.
            block.store(generation << GENERATION_SHIFT, Ordering::Release);
        }
    }

    /// An object of `units` units (1 to [`MAX_UNITS`], its header included) begins at unit number
    /// `unit` of the backing.
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
            // Relaxed: who removes or reads the object learns of it through its slot's lock.
            let placed = self.0[index].fetch_update(Ordering::Relaxed, Ordering::Relaxed, place);
            debug_assert!(placed.is_ok(), "placing is never declined");
            header = None;
        }
    }

    /// The object that [was placed](Self::place) there is no more; nobody will read it. `freed` is
    /// called with each block of which it was the last, by one caller only, who owns the block from
    /// then on.
    pub fn remove(&self, unit: u64, units: u32, mut freed: impl FnMut(u64)) {
        for (index, part) in parts(unit, units) {
            // AcqRel: pairs with itself. Release: this object's use is over before it stops
            // counting; Acquire: whoever takes the last one away comes after the use of all others.
            let before = self.0[index].fetch_sub(part, Ordering::AcqRel) & LIVE_MASK;
            debug_assert!(before >= part, "block {index} has {before} live units, {part} are removed");
            if before == part {
                freed(index as u64);
            }
        }
    }

    /// What was placed in blocks that the caller opened never came to be (they could not be
    /// written): nothing lives in them, and no slot was told of it. `remove` is not called for any
    /// of it; the caller gives the blocks back.
    pub fn forget(&self, run: Run) {
        let start = run.start as usize;
        for block in &self.0[start..start + run.blocks as usize] {
            // Relaxed: the caller alone knows of the objects; the space's lock orders this before
            // the next life.
            block.fetch_and(!(LIVE_MASK | FIRST_MASK), Ordering::Relaxed);
        }
    }

    /// Units of live objects, 0 to [`BLOCK_UNITS`], at some moment of the call.
    pub fn live(&self, block: u64) -> u32 {
        // Relaxed: a look; nothing is concluded from it about the objects.
        self.0[block as usize].load(Ordering::Relaxed) & LIVE_MASK
    }

    /// The unit within the block at which its first header begins, if one does. It stays there when
    /// that object is removed: the bytes on the backing are the same until the block is opened
    /// again.
    pub fn first(&self, block: u64) -> Option<u32> {
        // Relaxed: fixed once the block is filled, of which the caller learned through a slot's
        // lock.
        ((self.0[block as usize].load(Ordering::Relaxed) & FIRST_MASK) >> FIRST_SHIFT).checked_sub(1)
    }

    /// How often the block was opened, modulo 2^14. The same before and after a look at the block:
    /// what was seen is of one life (but not that it was written by then).
    pub fn generation(&self, block: u64) -> u32 {
        // Acquire: pairs with the Release in `open`.
        self.0[block as usize].load(Ordering::Acquire) >> GENERATION_SHIFT
    }
}

/// The blocks that an object touches, by index, and how many of its units lie in each.
fn parts(unit: u64, units: u32) -> impl Iterator<Item = (usize, u32)> {
    debug_assert!((1..=MAX_UNITS).contains(&units), "an object of {units} units");
    let block = (unit / BLOCK_UNITS) as usize;
    let here = units.min((BLOCK_UNITS - unit % BLOCK_UNITS) as u32);
    [(block, here), (block + 1, units - here)].into_iter().filter(|&(_, part)| part > 0)
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
    use crate::spill::space::Space;
    use freestone_core::sync::{Arc, Mutex};

    const BLOCKS: u64 = 6;

    /// Objects placed one behind another from a run's start, as sizes; true leaves the following
    /// units empty.
    fn any_objects() -> impl Strategy<Value = Vec<(u32, bool)>> {
        let units = prop_oneof![1..10_u32, 1..=MAX_UNITS, Just(MAX_UNITS), Just(1)];
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
        fn counts_are_those_of_a_plain_map(
            start in 0..3_u64,
            objects in any_objects(),
            order in any::<u64>(),
            lives in 1..4_u32,
        ) {
            let blocks = Blocks::new(BLOCKS).unwrap();
            let run = Run { start, blocks: (BLOCKS - start) as u32 };
            for life in 1..=lives {
                let mut placed = fill(&blocks, run, &objects);
                // Unit by unit: block -> (live, first).
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
    fn fields_do_not_overlap() {
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
    fn the_largest_object_straddles_two_blocks_wherever_it_begins() {
        let blocks = Blocks::new(2).unwrap();
        for offset in 0..BLOCK_UNITS {
            blocks.open(Run { start: 0, blocks: 2 });
            blocks.place(offset, MAX_UNITS);
            assert_eq!(blocks.live(0), (BLOCK_UNITS - offset) as u32);
            assert_eq!(blocks.live(1), MAX_UNITS - blocks.live(0));
            assert_eq!((blocks.first(0), blocks.first(1)), (Some(offset as u32), None));
            let mut freed = Vec::new();
            blocks.remove(offset, MAX_UNITS, |block| freed.push(block));
            assert_eq!(freed, [0, 1]);
        }
    }

    #[test]
    fn what_could_not_be_written_is_forgotten() {
        let blocks = Blocks::new(4).unwrap();
        let (kept, failed) = (Run { start: 0, blocks: 1 }, Run { start: 1, blocks: 2 });
        fill(&blocks, kept, &[(5, false)]);
        fill(&blocks, failed, &[(100, false), (257, false), (50, false)]);
        blocks.forget(failed);
        let all = |block| (blocks.live(block), blocks.first(block), blocks.generation(block));
        assert_eq!([0, 1, 2, 3].map(all), [(5, Some(0), 1), (0, None, 1), (0, None, 1), (0, None, 0)]);
        fill(&blocks, failed, &[(257, false)]);
        assert_eq!([1, 2].map(all), [(256, Some(0), 2), (1, None, 2)]);
    }

    #[test]
    fn a_backing_is_bounded() {
        assert_eq!(Blocks::new(MAX_BLOCKS + 1).err(), Some(Error::OutOfRange));
        let most = Blocks::new(MAX_BLOCKS).unwrap();
        assert_eq!(most.live(MAX_BLOCKS - 1), 0);
    }

    /// Threads that fill runs, and remove each other's objects.
    #[test]
    fn blocks_go_round() {
        const DISK_BLOCKS: u64 = 64;
        const ROUNDS: u64 = 2000;
        let space = Arc::new(Space::new(DISK_BLOCKS).unwrap());
        let blocks = Arc::new(Blocks::new(DISK_BLOCKS).unwrap());
        let objects = Arc::new(Mutex::new(Vec::new()));
        let remove = |space: &Space, blocks: &Blocks, (unit, units)| {
            blocks.remove(unit, units, |block| space.give(block, 1));
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
                            space.give(run.start + u64::from(used), run.blocks - used);
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
