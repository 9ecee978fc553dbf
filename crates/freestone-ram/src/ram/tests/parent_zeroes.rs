//! Tests that emptying pages over zeroes of the base takes no memory, and that zero pages over data
//! count towards the limit.

use std::ops::Range;
use std::sync::Arc;

use crate::ram::content::tracking::TrackChanges as _;
use crate::ram::tests::{MIB, config, ram};
use crate::ram::{Config, Family, ForkConfig, Ram};
use freestone_core::PAGE_BYTES;
use freestone_core::device::{
    self, Blocking, Buffer, Completion, Device, Error, Extent, ExtentKind, Flags, Geometry, IoBuf, Request,
    TryResult,
};
use freestone_core::slot::LEAF_SLOTS;

const PAGE: u64 = PAGE_BYTES as u64;
const LEAF: u64 = LEAF_SLOTS * PAGE;
const GIB: u64 = 1 << 30;
const NONE: Flags = Flags::empty();

/// A large base: bytes of value 1 in one range, holes elsewhere.
struct Sparse {
    size: u64,
    ones: Range<u64>,
}

impl Device for Sparse {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.size, read_only: true, ..ram(PAGE).geometry() }
    }

    fn try_io(&self, _: &Request, _: Buffer<'_>) -> device::Result<TryResult> {
        Ok(TryResult::WouldBlock)
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
    assert_eq!(fork.memory_overhead().leaves_bytes, 0);
    // A discard frees pages that the fork stores itself.
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
    // Allocated are one directory node, and the three leaves over data of the base.
    assert_eq!(fork.memory_overhead().leaves_bytes, 4 * PAGE);
    // Parts of pages: writing zeroes over a hole takes no memory; over data a page is stored.
    let fork = fork_of(8 * LEAF, ones, 0);
    fork.write_zeroes(512, 1024, Flags::MAY_FREE).unwrap();
    assert_eq!(fork.memory_overhead().leaves_bytes, 0);
    fork.write_zeroes(LEAF + 1024, 512, Flags::MAY_FREE).unwrap();
    let shown = [0, 512, 1024, 1536].map(|at| first_of(&fork, LEAF + at));
    assert_eq!(shown, [0, 1, 0, 1]);
}

#[test]
fn trim_over_snapshot_hole_makes_no_mark() {
    let disk = ram(16 * GIB);
    disk.write_at(3 * LEAF, &[5; PAGE_BYTES], NONE).unwrap();
    let fork = disk.snapshot().unwrap().fork(&ForkConfig::default()).unwrap();
    let before = fork.memory_overhead().leaves_bytes;
    fork.discard(0, 16 * GIB).unwrap();
    assert_eq!(first_of(&fork, 3 * LEAF), 0);
    // The discard allocated a directory node and one leaf.
    assert_eq!(fork.memory_overhead().leaves_bytes, before + 2 * PAGE);
}

#[test]
fn marks_over_base_data_count_against_limit() {
    const LIMIT: u64 = MIB;
    let fork = fork_of(8 * GIB, 0..8 * GIB, LIMIT);
    fork.discard(0, 8 * GIB).unwrap();
    let used = fork.memory_overhead().leaves_bytes;
    // Allow for directory nodes, which do not count towards the limit.
    assert!(used <= LIMIT + 64 * PAGE, "{used}");
    assert_eq!((first_of(&fork, 0), first_of(&fork, 7 * GIB)), (0, 1));
    assert_eq!(fork.write_zeroes(0, 8 * GIB, Flags::MAY_FREE), Err(Error::NoSpace));
    assert_eq!(fork.write_at(0, &crate::ram::tests::content(5, 1, PAGE_BYTES), NONE), Err(Error::NoSpace));
    // After a rewind the memory of the zero pages is free again.
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
    assert!(ram.memory_overhead().leaves_bytes <= MIB + 64 * PAGE);
    assert_eq!(ram.write_at(7 * GIB, &[7; PAGE_BYTES], NONE), Err(Error::NoSpace));
}

#[test]
fn second_trim_moves_nothing_to_snapshot() {
    let fork = fork_of(4 * LEAF, 0..4 * LEAF, 0);
    fork.discard(0, 4 * LEAF).unwrap();
    let snapshot = fork.snapshot().unwrap();
    let before = fork.memory_overhead().leaves_bytes;
    fork.discard(0, 4 * LEAF).unwrap();
    fork.write_zeroes(0, 4 * LEAF, NONE).unwrap();
    assert_eq!(fork.memory_overhead().leaves_bytes, before);
    assert_eq!((first_of(&snapshot, 0), first_of(&fork, 0)), (0, 0));
    // On a disk without a base, a discard turns zero pages into holes.
    let disk = ram(4 * LEAF);
    let _snapshot = disk.snapshot().unwrap();
    disk.write_zeroes(0, 4 * LEAF, NONE).unwrap();
    let before = disk.memory_overhead().leaves_bytes;
    assert_eq!(before, 5 * PAGE, "a directory and the disk's own leaves");
    disk.discard(0, 4 * LEAF).unwrap();
    assert_eq!((disk.memory_overhead().leaves_bytes, disk.mm_stat().same_pages), (before, 0));
}

#[test]
fn change_of_nothing_is_not_noted() {
    let disk = ram(4 * LEAF);
    let noted = Arc::new(freestone_core::slot::chain::Dirty::new());
    disk.track_changes(Some(Arc::clone(&noted)));
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
    assert!(fork.is_unmodified());
    let discard = |at| fork.discard(at, PAGE).unwrap();
    // A page discarded over zeroes of the base leaves an empty slot.
    fork.write_at(2 * LEAF, &[7; PAGE_BYTES], NONE).unwrap();
    assert!(!fork.is_unmodified());
    discard(2 * LEAF);
    assert!(fork.is_unmodified());
    // A page discarded over data of the base keeps a zero page, which hides the base.
    discard(0);
    assert!(!fork.is_unmodified());
    fork.rewind().unwrap();
    assert!(fork.is_unmodified());
    // A page that only a snapshot still has does not count as a change of the origin.
    fork.write_at(2 * LEAF, &[7; PAGE_BYTES], NONE).unwrap();
    let snapshot = fork.snapshot().unwrap();
    assert!(!fork.is_unmodified());
    discard(2 * LEAF);
    assert!(fork.is_unmodified() && !snapshot.is_unmodified());
    let mut back = [0; PAGE_BYTES];
    snapshot.read_at(2 * LEAF, &mut back).unwrap();
    assert_eq!(back, [7; PAGE_BYTES]);
    let child = snapshot.fork(&ForkConfig::default()).unwrap();
    assert!(child.is_unmodified());
}
