//! Emptying pages over zeroes is free; marks count against the limit.

use std::ops::Range;
use std::sync::Arc;

use crate::ram::tests::{MIB, config, ram};
use crate::ram::{Config, Family, ForkConfig, Ram};
use freestone_core::PAGE_BYTES;
use freestone_core::device::{
    self, Blocking, Buffer, Completion, Device, Error, Extent, ExtentKind, Flags, Geometry, IoBuf, Request,
    Tried,
};
use freestone_core::slot::LEAF_SLOTS;

const PAGE: u64 = PAGE_BYTES as u64;
const LEAF: u64 = LEAF_SLOTS * PAGE;
const GIB: u64 = 1 << 30;
const NONE: Flags = Flags::empty();

/// A large base on a disk: bytes of value 1 in a range, holes elsewhere.
struct Sparse {
    size: u64,
    ones: Range<u64>,
}

impl Device for Sparse {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.size, read_only: true, ..ram(PAGE).geometry() }
    }

    fn try_io(&self, _: &Request, _: Buffer<'_>) -> device::Result<Tried> {
        Ok(Tried::WouldBlock)
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        for (at, byte) in (request.offset..).zip(buffer.iter_mut()) {
            *byte = self.ones.contains(&at).into();
        }
        done.complete(Ok(()), buffer);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> device::Result<u64> {
        let end = offset + len;
        let Range { start, end: stop } = self.ones;
        let ends = [start.clamp(offset, end), stop.clamp(offset, end), end];
        let mut at = offset;
        for (to, kind) in ends.into_iter().zip([ExtentKind::Hole, ExtentKind::Data, ExtentKind::Hole]) {
            if to > at && !row(Extent { offset: at, len: to - at, kind }) {
                return Ok(to - offset);
            }
            at = at.max(to);
        }
        Ok(len)
    }
}

fn fork_of(size: u64, ones: Range<u64>, mem_limit: u64) -> Ram {
    let family = Family::new(Config { mem_limit, ..Config::default() }).unwrap();
    family.fork(Arc::new(Sparse { size, ones }), &ForkConfig::default()).unwrap()
}

fn first_of(ram: &Ram, offset: u64) -> u8 {
    let mut block = [9; 512];
    ram.read_at(offset, &mut block).unwrap();
    assert!(block.iter().all(|byte| *byte == block[0]));
    block[0]
}

#[test]
fn trim_over_base_hole_makes_no_mark() {
    let fork = fork_of(200 * GIB, 0..0, MIB);
    fork.discard(0, 200 * GIB).unwrap();
    fork.write_zeroes(512, 200 * GIB - 1024, Flags::MAY_FREE).unwrap();
    assert_eq!(fork.memory().leaves_bytes, 0);
    // The fork's own pages are freed.
    fork.write_at(7 * LEAF, &[5; PAGE_BYTES], NONE).unwrap();
    fork.discard(0, 200 * GIB).unwrap();
    assert_eq!((first_of(&fork, 7 * LEAF), fork.mm_stat().orig_data_size), (0, 0));
}

#[test]
fn trim_beside_base_data_marks_data_only() {
    let ones = LEAF + 512..3 * LEAF + 1024;
    let fork = fork_of(8 * LEAF, ones.clone(), 0);
    fork.discard(0, 8 * LEAF).unwrap();
    for at in [0, LEAF, LEAF + 512, 2 * LEAF, 3 * LEAF + 512, 3 * LEAF + PAGE, 8 * LEAF - 512] {
        assert_eq!(first_of(&fork, at), 0, "byte {at}");
    }
    // One directory node, and the leaves over the data.
    assert_eq!(fork.memory().leaves_bytes, 4 * PAGE);
    // Partial pages: zeroes over a hole need nothing, over data they are written.
    let fork = fork_of(8 * LEAF, ones, 0);
    fork.write_zeroes(512, 1024, Flags::MAY_FREE).unwrap();
    assert_eq!(fork.memory().leaves_bytes, 0);
    fork.write_zeroes(LEAF + 1024, 512, Flags::MAY_FREE).unwrap();
    let shown = [0, 512, 1024, 1536].map(|at| first_of(&fork, LEAF + at));
    assert_eq!(shown, [0, 1, 0, 1]);
}

#[test]
fn trim_over_snapshot_hole_makes_no_mark() {
    let disk = ram(16 * GIB);
    disk.write_at(3 * LEAF, &[5; PAGE_BYTES], NONE).unwrap();
    let fork = disk.snapshot().unwrap().fork(&ForkConfig::default()).unwrap();
    let before = fork.memory().leaves_bytes;
    fork.discard(0, 16 * GIB).unwrap();
    assert_eq!(first_of(&fork, 3 * LEAF), 0);
    // A directory node and a leaf.
    assert_eq!(fork.memory().leaves_bytes, before + 2 * PAGE);
}

#[test]
fn marks_over_base_data_count_against_limit() {
    const LIMIT: u64 = MIB;
    let fork = fork_of(8 * GIB, 0..8 * GIB, LIMIT);
    fork.discard(0, 8 * GIB).unwrap();
    let used = fork.memory().leaves_bytes;
    // Directory nodes do not count.
    assert!(used <= LIMIT + 64 * PAGE, "{used}");
    assert_eq!((first_of(&fork, 0), first_of(&fork, 7 * GIB)), (0, 1));
    assert_eq!(fork.write_zeroes(0, 8 * GIB, Flags::MAY_FREE), Err(Error::NoSpace));
    assert_eq!(fork.write_at(0, &crate::ram::tests::content(5, 1, PAGE_BYTES), NONE), Err(Error::NoSpace));
    // Freed marks release their space.
    fork.rewind().unwrap();
    let start = std::time::Instant::now();
    while fork.write_at(0, &crate::ram::tests::content(5, 1, PAGE_BYTES), NONE).is_err() {
        assert!(start.elapsed().as_secs() < 30, "the room of the marks does not come back");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn zeroes_and_patterns_count_against_limit() {
    let ram = Ram::new(Config { mem_limit: MIB, ..config(8 * GIB) }).unwrap();
    assert_eq!(ram.write_zeroes(0, 8 * GIB, NONE), Err(Error::NoSpace));
    assert!(ram.memory().leaves_bytes <= MIB + 64 * PAGE);
    assert_eq!(ram.write_at(7 * GIB, &[7; PAGE_BYTES], NONE), Err(Error::NoSpace));
}

#[test]
fn second_trim_moves_nothing_to_snapshot() {
    let fork = fork_of(4 * LEAF, 0..4 * LEAF, 0);
    fork.discard(0, 4 * LEAF).unwrap();
    let snapshot = fork.snapshot().unwrap();
    let before = fork.memory().leaves_bytes;
    fork.discard(0, 4 * LEAF).unwrap();
    fork.write_zeroes(0, 4 * LEAF, NONE).unwrap();
    assert_eq!(fork.memory().leaves_bytes, before);
    assert_eq!((first_of(&snapshot, 0), first_of(&fork, 0)), (0, 0));
    // On a disk, zeroes and holes read the same.
    let disk = ram(4 * LEAF);
    let _snapshot = disk.snapshot().unwrap();
    disk.write_zeroes(0, 4 * LEAF, NONE).unwrap();
    let before = disk.memory().leaves_bytes;
    assert_eq!(before, 5 * PAGE, "a directory and the disk's own leaves");
    disk.discard(0, 4 * LEAF).unwrap();
    assert_eq!((disk.memory().leaves_bytes, disk.mm_stat().same_pages), (before, 0));
}

#[test]
fn change_of_nothing_is_not_noted() {
    let disk = ram(4 * LEAF);
    let noted = Arc::new(freestone_core::slot::chain::Dirty::new());
    disk.note_changes(Some(Arc::clone(&noted)));
    disk.discard(0, 4 * LEAF).unwrap();
    disk.write_zeroes(0, LEAF, NONE).unwrap();
    disk.write_zeroes(0, LEAF, NONE).unwrap();
    disk.discard(0, 4 * LEAF).unwrap();
    assert_eq!(noted.pages(), 0);
    disk.write_at(0, &[5; PAGE_BYTES], NONE).unwrap();
    disk.discard(0, LEAF).unwrap();
    assert_eq!(noted.pages(), 1);
}

#[test]
fn holds_nothing_is_false_for_changed_content() {
    let fork = fork_of(GIB, 0..LEAF, 0);
    assert!(fork.holds_nothing());
    let discard = |at| fork.discard(at, PAGE).unwrap();
    // A discarded page over zeroes leaves no slot.
    fork.write_at(2 * LEAF, &[7; PAGE_BYTES], NONE).unwrap();
    assert!(!fork.holds_nothing());
    discard(2 * LEAF);
    assert!(fork.holds_nothing());
    // A discarded page over data keeps a slot that covers the base.
    discard(0);
    assert!(!fork.holds_nothing());
    fork.rewind().unwrap();
    assert!(fork.holds_nothing());
    // A page that only the snapshot shows does not count for its origin.
    fork.write_at(2 * LEAF, &[7; PAGE_BYTES], NONE).unwrap();
    let snapshot = fork.snapshot().unwrap();
    assert!(!fork.holds_nothing());
    discard(2 * LEAF);
    assert!(fork.holds_nothing() && !snapshot.holds_nothing());
    let mut back = [0; PAGE_BYTES];
    snapshot.read_at(2 * LEAF, &mut back).unwrap();
    assert_eq!(back, [7; PAGE_BYTES]);
    let child = snapshot.fork(&ForkConfig::default()).unwrap();
    assert!(child.holds_nothing());
}
