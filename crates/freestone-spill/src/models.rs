//! loom models of blocks that are shared by threads that fill them and threads that remove objects.
#![expect(unsafe_code)]
// UNSAFETY: blocks are loom's raw cells, which check every access.

use loom::cell::UnsafeCell;
use loom::thread;

use super::blocks::{BLOCK_UNITS, Blocks};
use super::space::{Run, Space};
use freestone_core::sync::{Arc, Mutex};

const BLOCKS: u64 = 2;
/// Two objects in the first block, and one that spans both blocks.
const OBJECTS: [(u64, u32); 3] = [(0, 10), (10, 20), (BLOCK_UNITS - 4, 12)];

struct Model {
    space: Space,
    blocks: Blocks,
    /// Content of each block: the number of writes of the block.
    disk: [UnsafeCell<u32>; BLOCKS as usize],
    /// True for each block that is allocated. A block must have one owner at a time.
    held: Mutex<[bool; BLOCKS as usize]>,
}

impl Model {
    fn new() -> Self {
        Self {
            space: Space::new(BLOCKS).unwrap(),
            blocks: Blocks::new(BLOCKS).unwrap(),
            disk: std::array::from_fn(|_| UnsafeCell::new(0)),
            held: Mutex::default(),
        }
    }

    /// Allocates a run and writes it. loom reports an error if a thread still uses an old object in
    /// the run.
    fn take_and_write(&self, want: u32) -> Option<Run> {
        let run = self.space.take(want)?;
        for block in run.start..run.start + u64::from(run.blocks) {
            let held = std::mem::replace(&mut self.held.lock()[block as usize], true);
            assert!(!held, "block {block} is handed out twice");
            assert_eq!(self.blocks.live(block), 0, "block {block} has a live object");
        }
        self.blocks.open(run);
        for block in run.start..run.start + u64::from(run.blocks) {
            let writes = self.disk[block as usize].with_mut(|writes| {
                // SAFETY: loom has checked that the access is exclusive.
                unsafe {
                    *writes += 1;
                    *writes
                }
            });
            // Check after the write: an Acquire before it would hide a missing ordering.
            assert_eq!((self.blocks.generation(block), self.blocks.first(block)), (writes, None));
        }
        Some(run)
    }

    /// Reads an object for the last time and removes it.
    fn read_and_remove(&self, (unit, units): (u64, u32)) {
        for block in unit / BLOCK_UNITS..=(unit + u64::from(units) - 1) / BLOCK_UNITS {
            // SAFETY: loom has checked that there is no concurrent write.
            self.disk[block as usize].with(|writes| assert!(unsafe { *writes } > 0));
        }
        self.blocks.remove(unit, units, |block| self.give(block));
    }

    fn give(&self, block: u64) {
        let held = std::mem::replace(&mut self.held.lock()[block as usize], false);
        assert!(held, "block {block} is given twice");
        self.space.free_run(block, 1);
    }

    /// Checks that all blocks are free when no object is left.
    fn check_empty(&self) {
        assert_eq!(self.space.used(), 0, "a block is lost");
        assert_eq!((0..BLOCKS).map(|block| self.blocks.live(block)).sum::<u32>(), 0);
        // The cursor splits the free space into at most two runs.
        let taken: u32 =
            std::iter::from_fn(|| self.take_and_write(BLOCKS as u32)).map(|run| run.blocks).sum();
        assert_eq!(taken, BLOCKS as u32);
    }
}

/// Two threads remove the objects of a full device, while a third thread allocates and frees runs.
fn remove_against_take(one: &'static [(u64, u32)], other: &'static [(u64, u32)]) {
    loom::model(move || {
        let model = Arc::new(Model::new());
        let all = model.take_and_write(BLOCKS as u32);
        assert_eq!(all, Some(Run { start: 0, blocks: BLOCKS as u32 }));
        for (unit, units) in OBJECTS {
            model.blocks.place(unit, units);
        }
        assert_eq!(model.space.take(1), None, "all of it is taken");
        let removers = [one, other].map(|objects| {
            let model = Arc::clone(&model);
            thread::spawn(move || objects.iter().for_each(|&object| model.read_and_remove(object)))
        });
        if let Some(run) = model.take_and_write(BLOCKS as u32) {
            let object = (run.start * BLOCK_UNITS + 3, 5);
            model.blocks.place(object.0, object.1);
            for unused in 1..u64::from(run.blocks) {
                model.give(run.start + unused);
            }
            assert_eq!((model.blocks.live(run.start), model.blocks.first(run.start)), (5, Some(3)));
            model.read_and_remove(object);
        }
        for remover in removers {
            remover.join().unwrap();
        }
        model.check_empty();
    });
}

#[test]
fn spanning_object_removed_last() {
    remove_against_take(&[OBJECTS[0], OBJECTS[2]], &[OBJECTS[1]]);
}

#[test]
fn spanning_object_removed_alone() {
    remove_against_take(&[OBJECTS[0], OBJECTS[1]], &[OBJECTS[2]]);
}

#[test]
fn spanning_object_removed_first() {
    remove_against_take(&[OBJECTS[2], OBJECTS[0]], &[OBJECTS[1]]);
}
