//! Tests of [`Ram::contents`] after known operations.

use std::sync::Arc;

use super::{MIB, config, content, ram};
use crate::ram::geometry::PAGE;
use crate::ram::*;
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Blocking, Flags};
use freestone_core::slot::LEAF_SLOTS;

/// Kind of content of which half compresses.
const TEXT: u8 = 4;
const NOISE: u8 = 5;

fn write(ram: &Ram, slot: u64, kind: u8) {
    ram.write_at(slot * PAGE, &content(kind, slot + 1, PAGE_BYTES), Flags::empty()).unwrap();
}

/// Returns the page counts of a range, with as many calls as needed.
fn look(ram: &Ram, first: u64, end: u64) -> Contents {
    let mut contents = Contents::default();
    let mut at = first;
    while at < end.min(ram.0.slots()) {
        let next = ram.contents(at, end, &mut contents);
        assert!(next > at && next <= end, "{at} to {next} of {end}");
        at = next;
    }
    contents
}

fn all(ram: &Ram) -> Contents {
    look(ram, 0, u64::MAX)
}

fn sum(contents: &Contents) -> u64 {
    let Contents { compressed, huge, same, zero, spilled, unloaded, below, hole } = contents;
    compressed + huge + same + zero + spilled + unloaded + below + hole
}

#[test]
fn contents_counts_each_page_kind() {
    let disk = ram(64 * MIB);
    assert_eq!(all(&disk), Contents { hole: 16_384, ..Contents::default() });
    for slot in 0..30 {
        write(&disk, slot, TEXT);
    }
    for slot in 30..50 {
        write(&disk, slot, NOISE);
    }
    // Write pages with patterns of 32 and 64 bits, and zero pages.
    for (slot, kind) in [(50, 1), (51, 2), (52, 0), (5000, 0), (5001, 2)] {
        write(&disk, slot, kind);
    }
    disk.discard(10 * PAGE, 5 * PAGE).unwrap();
    let stored = Contents { compressed: 25, huge: 20, same: 3, zero: 2, ..Contents::default() };
    assert_eq!(all(&disk), Contents { hole: 16_384 - 50, ..stored });
    assert_eq!(
        look(&disk, 9, 31),
        Contents { compressed: 16, huge: 1, hole: 5, ..Contents::default() },
        "a part"
    );
    let stat = disk.mm_stat();
    assert_eq!((stat.orig_data_size, stat.huge_pages, stat.same_pages), (50 * PAGE, 20, 5));
}

#[test]
fn contents_call_covers_one_leaf_or_hole() {
    let disk = ram(1 << 40);
    for leaf in [0, 1, 1000] {
        for slot in 0..LEAF_SLOTS {
            if slot % 2 == 0 {
                write(&disk, leaf * LEAF_SLOTS + slot, 1);
            }
        }
    }
    let mut contents = Contents::default();
    let mut stops = vec![0];
    while *stops.last().unwrap() < disk.0.slots() {
        stops.push(disk.contents(*stops.last().unwrap(), u64::MAX, &mut contents));
    }
    let leaf = LEAF_SLOTS;
    assert_eq!(stops, [0, leaf, 2 * leaf, 1000 * leaf, 1001 * leaf, disk.0.slots()]);
    let same = 3 * leaf / 2;
    assert_eq!(contents, Contents { same, hole: disk.0.slots() - same, ..Contents::default() });
    let before = contents;
    assert_eq!(disk.contents(disk.0.slots(), u64::MAX, &mut contents), disk.0.slots());
    assert_eq!(disk.contents(7, 7, &mut contents), 7);
    assert_eq!(contents, before, "nothing is there");
}

#[test]
fn contents_counts_written_back_pages() {
    let backing = Arc::new(ram(16 * MIB));
    let disk = Ram::new(config(4 * MIB).backed_by(backing, true)).unwrap();
    for slot in 0..100 {
        write(&disk, slot, if slot < 60 { TEXT } else { NOISE });
    }
    disk.writeback(&Writeback::Pages(vec![40..=79])).unwrap();
    let expected = Contents { compressed: 40, huge: 20, spilled: 40, hole: 924, ..Contents::default() };
    assert_eq!(all(&disk), expected);
    disk.read_at(45 * PAGE, &mut [0; PAGE_BYTES]).unwrap();
    let after = all(&disk);
    assert!(after.spilled < 40 && after.compressed > 40, "{after:?}");
    assert_eq!(sum(&after), 1024);
}

#[test]
fn contents_of_fork_counts_base_and_holes() {
    let origin = ram(4 * MIB);
    write(&origin, 0, TEXT);
    let base = origin.snapshot().unwrap();
    let fork = base.fork(&ForkConfig { size: Some(6 * MIB), ..ForkConfig::default() }).unwrap();
    assert_eq!(all(&fork), Contents { below: 1024, hole: 512, ..Contents::default() });
    write(&fork, 3, NOISE);
    write(&fork, 1100, TEXT);
    // A page discarded over data of the base becomes a zero page; one discarded over a hole becomes
    // a hole.
    fork.discard(0, PAGE).unwrap();
    fork.discard(8 * PAGE, 2 * PAGE).unwrap();
    let own = Contents { compressed: 1, huge: 1, zero: 1, ..Contents::default() };
    assert_eq!(all(&fork), Contents { below: 1022, hole: 511, ..own });
    fork.rewind().unwrap();
    assert_eq!(all(&fork), Contents { below: 1024, hole: 512, ..Contents::default() });
}

#[test]
fn contents_of_snapshot_ignores_origin_changes() {
    let disk = ram(4 * MIB);
    for slot in 0..40 {
        write(&disk, slot, TEXT);
    }
    write(&disk, 600, NOISE);
    let then = all(&disk);
    let snapshot = disk.snapshot().unwrap();
    assert_eq!(all(&snapshot), then);
    for slot in 20..60 {
        write(&disk, slot, 1);
    }
    disk.discard(0, 10 * PAGE).unwrap();
    assert_eq!(all(&snapshot), then);
    let second = disk.snapshot().unwrap();
    let now = Contents { compressed: 10, huge: 1, same: 40, hole: 1024 - 51, ..Contents::default() };
    assert_eq!((all(&disk), all(&second)), (now, now));
    disk.rewind().unwrap();
    assert_eq!(all(&disk), Contents { hole: 1024, ..Contents::default() });
    for slot in 0..700 {
        write(&disk, slot, NOISE);
    }
    assert_eq!((all(&snapshot), all(&second)), (then, now));
}

/// Each page is counted exactly once, even while other threads write.
#[test]
fn contents_with_writers_counts_pages_once() {
    let disk = ram(8 * MIB);
    let snapshot = disk.snapshot().unwrap();
    let fork = snapshot.fork(&ForkConfig::default()).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for writer in 0..2_u64 {
            let (disk, fork, done) = (&disk, &fork, &done);
            scope.spawn(move || {
                let mut round = writer;
                while !done.load(std::sync::atomic::Ordering::SeqCst) {
                    round += 2;
                    let slot = round.wrapping_mul(0x9E37_79B9) % 2044;
                    write(if round % 4 < 2 { disk } else { fork }, slot, (round / 7) as u8);
                    disk.discard(slot * PAGE, 4 * PAGE).unwrap();
                }
            });
        }
        for _ in 0..200 {
            for ram in [&disk, &snapshot, &fork] {
                assert_eq!(sum(&all(ram)), 2048);
            }
            assert_eq!(all(&snapshot).hole, 2048, "it was empty");
        }
        done.store(true, std::sync::atomic::Ordering::SeqCst);
    });
}
