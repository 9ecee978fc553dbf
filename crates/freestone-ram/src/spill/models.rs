//! loom models of how blocks go round between who fills them and who removes objects.
#![expect(unsafe_code)]
// UNSAFETY: blocks are modelled by loom's raw cells, which check that every access is allowed.

use loom::cell::UnsafeCell;
use loom::thread;

use super::blocks::{BLOCK_UNITS, Blocks};
use super::space::{Run, Space};
use freestone_core::sync::{Arc, Mutex};

const BLOCKS: u64 = 2;
/// Two objects of the first block, and one that straddles both.
const OBJECTS: [(u64, u32); 3] = [(0, 10), (10, 20), (BLOCK_UNITS - 4, 12)];

struct Model {
    space: Space,
    blocks: Blocks,
    /// A block's bytes on the backing: how often they were written.
    disk: [UnsafeCell<u32>; BLOCKS as usize],
    /// Who may write a block has it in here: it is in one pair of hands at a time.
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

    /// Takes a run and writes it whole. loom reports it if somebody is not through with an object
    /// that lay there.
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
            // Not before: an Acquire in here would hide what the code owes.
            assert_eq!((self.blocks.generation(block), self.blocks.first(block)), (writes, None));
        }
        Some(run)
    }

    /// Reads an object a last time and removes it.
    fn read_and_remove(&self, (unit, units): (u64, u32)) {
        for block in unit / BLOCK_UNITS..=(unit + u64::from(units) - 1) / BLOCK_UNITS {
            // SAFETY: loom has checked that nobody writes.
            self.disk[block as usize].with(|writes| assert!(unsafe { *writes } > 0));
        }
        self.blocks.remove(unit, units, |block| self.give(block));
    }

    fn give(&self, block: u64) {
        let held = std::mem::replace(&mut self.held.lock()[block as usize], false);
        assert!(held, "block {block} is given twice");
        self.space.give(block, 1);
    }

    /// Nothing lives: every block must have come back.
    fn check_empty(&self) {
        assert_eq!(self.space.used(), 0, "a block is lost");
        assert_eq!((0..BLOCKS).map(|block| self.blocks.live(block)).sum::<u32>(), 0);
        // The cursor cuts the free space in two at most.
        let taken: u32 =
            std::iter::from_fn(|| self.take_and_write(BLOCKS as u32)).map(|run| run.blocks).sum();
        assert_eq!(taken, BLOCKS as u32);
    }
}

/// A full backing, from which two threads remove what they are told while a third takes runs and
/// gives them back.
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
fn the_straddling_object_goes_last_on_its_thread() {
    remove_against_take(&[OBJECTS[0], OBJECTS[2]], &[OBJECTS[1]]);
}

#[test]
fn the_straddling_object_goes_alone() {
    remove_against_take(&[OBJECTS[0], OBJECTS[1]], &[OBJECTS[2]]);
}

#[test]
fn the_straddling_object_goes_first() {
    remove_against_take(&[OBJECTS[2], OBJECTS[0]], &[OBJECTS[1]]);
}
