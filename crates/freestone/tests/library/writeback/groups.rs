//! Groups of pages on the backing device: a group is written once and read once.

use std::time::Duration;

use freestone::device::{Blocking, Error, Op};
use freestone::ram::{
    Config, DedupStat, ForkConfig, GroupStat, Ram, RecompressOptions, Writeback, WritebackError,
};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk};

use crate::writeback::disk::{Disk, LAYOUTS, NONE, PAGE, content, eventually};

/// Number of pages of a disk, and of a group.
const PAGES: u64 = 64;
const GROUP: u64 = 8;

fn text(seed: u64) -> Vec<u8> {
    content(3, seed, PAGE as usize)
}

fn group(disk: &Disk) {
    disk.ram.recompress(&RecompressOptions { group: true, ..RecompressOptions::default() }).unwrap();
}

fn stat(disk: &Disk) -> GroupStat {
    disk.ram.group_stat().unwrap()
}

fn write_back(disk: &Disk, first: u64, last: u64) {
    disk.ram.writeback(&Writeback::Pages(vec![first..=last])).unwrap();
}

/// Returns a disk with 64 pages in 8 groups in memory, and a backing device of `blocks` blocks.
fn grouped(blocks: u64) -> Disk {
    let disk = Disk::manual(PAGES * PAGE, blocks, true);
    for page in 0..PAGES {
        disk.write(page, &text(page));
    }
    group(&disk);
    assert_eq!((stat(&disk).groups, stat(&disk).pages), (PAGES / GROUP, PAGES));
    disk
}

/// Returns a disk with 64 pages in 8 groups on the backing device.
fn spilled() -> Disk {
    let disk = grouped(4 * PAGES);
    write_back(&disk, 0, PAGES - 1);
    let after = stat(&disk);
    assert_eq!((after.groups, after.pages, after.spilled_pages), (PAGES / GROUP, 0, PAGES));
    assert_eq!(disk.spilled_pages(), PAGES);
    disk
}

#[track_caller]
fn check(disk: &Disk, page: u64) {
    assert!(disk.read(page, 1).unwrap() == text(page), "page {page}");
}

fn reads(disk: &Disk) -> u64 {
    disk.backing.counts().reads
}

fn written(disk: &Disk) -> u64 {
    disk.backing.counts().bytes_written
}

#[test]
fn group_is_written_once_and_read_once() {
    let disk = grouped(4 * PAGES);
    let before = stat(&disk);
    let memory = disk.ram.mm_stat();
    write_back(&disk, 0, PAGES - 1);
    let (after, backing) = (stat(&disk), disk.ram.backing().unwrap());
    assert_eq!((after.bytes, after.spilled_pages, backing.spilled_pages), (0, PAGES, PAGES));
    assert!(backing.live_bytes <= before.bytes, "{backing:?} {before:?}");
    // A header for each group, and the rest of the last block of a batch.
    assert!(written(&disk) <= before.bytes + 16 * before.groups + PAGE, "{} {before:?}", written(&disk));
    let memory_after = disk.ram.mm_stat();
    assert_eq!((memory_after.compr_data_size, memory_after.orig_data_size), (0, memory.orig_data_size));
    // In no order, so that no read is ahead.
    for (number, first) in (1..).zip([3, 0, 6, 1, 7, 5, 2, 4].map(|group| group * GROUP)) {
        for page in [5, 2, 7, 0, 1, 3, 4, 6] {
            check(&disk, first + page);
            assert_eq!(reads(&disk), number, "page {page} of the group at {first}");
        }
    }
    assert_eq!(stat(&disk), GroupStat { table_bytes: after.table_bytes, ..before });
    assert_eq!(disk.ram.mm_stat().compr_data_size, memory.compr_data_size);
    disk.check_clean_end();
}

/// A read of several groups takes one request.
#[test]
fn neighbouring_groups_share_one_read() {
    let disk = spilled();
    let all: Vec<u8> = (8..40).flat_map(text).collect();
    assert!(disk.read(8, 32).unwrap() == all);
    assert_eq!(reads(&disk), 1);
    assert_eq!((stat(&disk).pages, stat(&disk).spilled_pages), (32, PAGES - 32));
    disk.check_clean_end();
}

#[test]
fn group_that_was_read_is_evicted_without_a_write() {
    let disk = spilled();
    // With a limit, but no need to evict.
    disk.ram.set_mem_limit(4 * PAGES * PAGE);
    let before = written(&disk);
    (0..PAGES).step_by(3).for_each(|page| check(&disk, page));
    assert_eq!((disk.spilled_pages(), disk.ram.backing().unwrap().clean_pages), (0, PAGES));
    write_back(&disk, 0, PAGES - 1);
    assert_eq!((disk.spilled_pages(), disk.ram.backing().unwrap().clean_pages), (PAGES, 0));
    assert_eq!(written(&disk), before);
    // Changed pages are written, and the others are not.
    check(&disk, 0);
    disk.write(1, &text(1001));
    write_back(&disk, 0, PAGES - 1);
    assert_eq!(disk.spilled_pages(), PAGES);
    assert!((1..=2 * PAGE).contains(&(written(&disk) - before)), "{} after {before}", written(&disk));
    assert!(disk.read(1, 1).unwrap() == text(1001));
    (2..PAGES).for_each(|page| check(&disk, page));
    disk.check_clean_end();
}

#[test]
fn changed_pages_leave_a_spilled_group() {
    let disk = spilled();
    let (live, blocks) = (disk.ram.backing().unwrap().live_bytes, disk.bd_stat().0);
    disk.write(8, &text(1000));
    disk.ram.discard(9 * PAGE, PAGE).unwrap();
    assert_eq!(reads(&disk), 0, "a whole page needs no read");
    disk.ram.write_at(10 * PAGE + 512, &[7; 512], NONE).unwrap();
    let mut patched = text(10);
    patched[512..1024].fill(7);
    assert_eq!((reads(&disk), disk.spilled_pages(), stat(&disk).spilled_pages), (1, PAGES - 3, PAGES - 3));
    assert_eq!(disk.ram.backing().unwrap().live_bytes, live, "the others need the whole object");
    assert!(disk.read(8, 1).unwrap() == text(1000));
    assert!(disk.read(9, 1).unwrap() == [0; PAGE as usize]);
    assert!(disk.read(10, 1).unwrap() == patched);
    for page in 11..16 {
        disk.write(page, &text(page + 1000));
    }
    assert_eq!(stat(&disk).groups, PAGES / GROUP - 1);
    assert!(disk.ram.backing().unwrap().live_bytes < live, "the last page frees the object");
    disk.ram.discard(0, PAGES * PAGE).unwrap();
    assert_eq!((disk.bd_stat().0, stat(&disk).groups), (0, 0), "of {blocks} blocks");
    disk.check_clean_end();
}

/// A group that has lost half of its pages is not worth its memory.
#[test]
fn page_of_sparse_group_is_stored_alone() {
    let disk = spilled();
    for page in 8..12 {
        disk.write(page, &text(page));
    }
    check(&disk, 13);
    assert_eq!((reads(&disk), stat(&disk).pages, stat(&disk).spilled_pages), (1, 0, PAGES - 5));
    check(&disk, 13);
    check(&disk, 12);
    assert_eq!(reads(&disk), 2);
    disk.check_clean_end();
}

#[test]
fn writeback_of_selected_pages_splits_a_group() {
    let disk = grouped(4 * PAGES);
    // Fewer than half of a group's pages are stored alone.
    write_back(&disk, 0, 2);
    assert_eq!((stat(&disk).pages, stat(&disk).spilled_pages, disk.spilled_pages()), (PAGES - 3, 0, 3));
    // Half of them take the group with them, and the others stay in memory.
    write_back(&disk, 8, 11);
    let some = stat(&disk);
    assert_eq!((some.pages, some.spilled_pages, disk.spilled_pages()), (PAGES - 7, 4, 7));
    (0..PAGES).for_each(|page| {
        if page >= 12 {
            check(&disk, page);
        }
    });
    assert_eq!(reads(&disk), 0);
    // A page of a group that is in memory returns without a read.
    check(&disk, 9);
    assert_eq!((reads(&disk), stat(&disk).spilled_pages), (0, 3));
    let before = written(&disk);
    write_back(&disk, 8, 15);
    assert_eq!((written(&disk), stat(&disk).spilled_pages), (before, 8));
    assert!(stat(&disk).bytes < some.bytes, "the pieces of the group are freed");
    (0..PAGES).for_each(|page| check(&disk, page));
    disk.check_clean_end();
}

#[test]
fn snapshots_and_forks_share_spilled_groups() {
    let disk = spilled();
    let snapshot = disk.ram.snapshot().unwrap();
    let fork = snapshot.fork(&ForkConfig::default()).unwrap();
    let read = |ram: &Ram, page: u64| {
        let mut back = vec![0; PAGE as usize];
        ram.read_at(page * PAGE, &mut back).map(|()| back)
    };
    // Words of written pages move to the snapshot, which remains a user of the groups.
    for page in 0..20 {
        disk.write(page, &text(page + 1000));
    }
    assert_eq!((disk.spilled_pages(), stat(&disk).spilled_pages, reads(&disk)), (PAGES, PAGES, 0));
    fork.write_at(5 * PAGE + 512, &[1; 512], NONE).unwrap();
    for page in (0..PAGES).rev() {
        assert!(read(&snapshot, page).unwrap() == text(page), "page {page} of the snapshot");
        assert!(page == 5 || read(&fork, page).unwrap() == text(page), "page {page} of the fork");
    }
    // Pages in the origin and in the snapshot return one by one.
    assert!(reads(&disk) <= PAGES / GROUP + 2, "{} reads", reads(&disk));
    write_back(&disk, 0, PAGES - 1);
    snapshot.writeback(&Writeback::Pages(vec![0..=PAGES - 1])).unwrap();
    disk.ram.rewind().unwrap();
    fork.rewind().unwrap();
    for page in 0..PAGES {
        assert!(disk.read(page, 1).unwrap() == [0; PAGE as usize]);
        assert!(read(&fork, page).unwrap() == text(page), "page {page} of the fork");
    }
    snapshot.writeback(&Writeback::Pages(vec![0..=PAGES - 1])).unwrap();
    drop((fork, snapshot));
    eventually("the groups are freed", || stat(&disk).groups == 0 && disk.bd_stat().0 == 0);
    disk.check_clean_end();
}

#[test]
fn reclaim_moves_whole_groups() {
    let disk = spilled();
    let before = disk.bd_stat().0;
    // Of each pair of groups one goes.
    for first in (0..PAGES).step_by(2 * GROUP as usize) {
        disk.ram.discard(first * PAGE, GROUP * PAGE).unwrap();
    }
    let holes = disk.bd_stat().0;
    disk.ram.compact();
    let after = disk.bd_stat().0;
    assert!(after <= holes && holes < before, "{after} of {holes} of {before} blocks");
    let live = disk.ram.backing().unwrap().live_bytes;
    assert!(after <= live.div_ceil(PAGE) + 2, "{after} blocks for {live} bytes");
    let mut number = reads(&disk);
    for first in (GROUP..PAGES).step_by(2 * GROUP as usize) {
        number += 1;
        (first..first + GROUP).rev().for_each(|page| check(&disk, page));
        assert_eq!(reads(&disk), number, "the group at {first}");
    }
    disk.check_clean_end();
}

#[test]
fn failed_reads_leave_the_group_on_the_device() {
    for effect in [FaultEffect::Fail(Error::Media), FaultEffect::Corrupt] {
        let disk = spilled();
        disk.backing.fault(Some(Op::Read), FaultSchedule::At(0), effect);
        assert_eq!(disk.read(9, 1), Err(Error::Media), "{effect:?}");
        assert_eq!((disk.spilled_pages(), stat(&disk).spilled_pages), (PAGES, PAGES), "{effect:?}");
        assert_eq!(disk.ram.backing().unwrap().failed_reads, 1, "{effect:?}");
        (0..PAGES).for_each(|page| check(&disk, page));
        disk.check_clean_end();
    }
}

#[test]
fn failed_writes_leave_the_group_in_memory() {
    for effect in [FaultEffect::Fail(Error::Media), FaultEffect::Tear] {
        let disk = grouped(4 * PAGES);
        let before = stat(&disk);
        disk.backing.fault(Some(Op::Write), FaultSchedule::At(0), effect);
        let failed = disk.ram.writeback(&Writeback::Pages(vec![0..=PAGES - 1]));
        assert_eq!(failed.unwrap_err().1, WritebackError::Device(Error::Media), "{effect:?}");
        let after = stat(&disk);
        assert_eq!(after, GroupStat { table_bytes: after.table_bytes, ..before }, "{effect:?}");
        assert_eq!((disk.spilled_pages(), disk.bd_stat().0), (0, 0), "{effect:?}");
        (0..PAGES).for_each(|page| check(&disk, page));
        write_back(&disk, 0, PAGES - 1);
        assert_eq!(stat(&disk).spilled_pages, PAGES, "{effect:?}");
        (0..PAGES).for_each(|page| check(&disk, page));
        disk.check_clean_end();
    }
}

#[test]
fn requests_that_time_out_lose_no_group() {
    let disk = grouped(4 * PAGES);
    disk.ram.set_backing_timeout(Duration::from_millis(100));
    disk.backing.fault(None, FaultSchedule::Always, FaultEffect::Hang);
    let failed = disk.ram.writeback(&Writeback::Pages(vec![0..=PAGES - 1]));
    assert_eq!(failed.unwrap_err().1, WritebackError::Device(Error::Media));
    assert_eq!((stat(&disk).pages, disk.spilled_pages()), (PAGES, 0));
    (0..PAGES).for_each(|page| check(&disk, page));
    // The write completes after all, but its pages have stayed in memory.
    disk.backing.heal();
    eventually("the write ends", || disk.ram.backing().unwrap().abandoned_writes == 0);
    assert_eq!((stat(&disk).pages, disk.bd_stat().0), (PAGES, 0));
    write_back(&disk, 0, PAGES - 1);
    disk.backing.fault(Some(Op::Read), FaultSchedule::Always, FaultEffect::Hang);
    assert_eq!(disk.read(9, 1), Err(Error::Media));
    disk.backing.heal();
    (0..PAGES).for_each(|page| check(&disk, page));
    disk.check_clean_end();
}

#[test]
fn full_device_keeps_groups_in_memory() {
    let disk = grouped(12);
    let full = disk.ram.writeback(&Writeback::Pages(vec![0..=PAGES - 1]));
    assert_eq!(full.unwrap_err().1, WritebackError::NoSpace);
    let after = stat(&disk);
    assert!(after.spilled_pages > 0 && after.pages > 0, "{after:?}");
    (0..PAGES).for_each(|page| check(&disk, page));
    disk.check_clean_end();
}

/// Without memory for a group, its pages are delivered and stay on the device.
#[test]
fn pages_are_read_without_memory_for_the_group() {
    let disk = spilled();
    let noise = |page: u64| content(5, page, PAGE as usize);
    // Leaves the pool no page for the pieces.
    let other = disk.ram.family().ram(PAGES * PAGE).unwrap();
    (0..PAGES).for_each(|page| other.write_at(page * PAGE, &noise(page), NONE).unwrap());
    disk.ram.set_writeback_limit(0);
    disk.ram.set_writeback_limit_enable(true);
    disk.ram.compact();
    disk.ram.set_mem_limit(PAGES * PAGE);
    let all: Vec<u8> = (0..PAGES).flat_map(text).collect();
    assert!(disk.read(0, PAGES).unwrap() == all);
    assert_eq!((stat(&disk).spilled_pages, disk.spilled_pages()), (PAGES, PAGES));
    check(&disk, 12);
    let mut patched = text(12);
    patched[..512].fill(9);
    let refused = disk.ram.write_at(12 * PAGE, &[9; 512], NONE);
    assert_eq!(refused, Err(Error::NoSpace));
    disk.ram.set_mem_limit(0);
    disk.ram.write_at(12 * PAGE, &[9; 512], NONE).unwrap();
    assert!(disk.read(12, 1).unwrap() == patched);
    drop(other);
    disk.check_clean_end();
}

/// Eviction at the memory limit takes groups as a whole, and reads bring them back.
#[test]
fn groups_are_evicted_at_the_memory_limit() {
    let pages = 1024;
    let config = Config { disksize: pages * PAGE, ..Config::default() };
    let disk = Disk::new(config, FaultyDisk::new((2 * pages * PAGE) as usize, PAGE as u32), true);
    (0..pages).for_each(|page| disk.write(page, &text(page)));
    group(&disk);
    disk.ram.compact();
    let grouped = disk.ram.mm_stat().mem_used_total;
    disk.ram.set_mem_limit(grouped / 2);
    eventually("groups are evicted", || disk.ram.mm_stat().mem_used_total <= grouped / 2);
    let after = stat(&disk);
    assert!(after.spilled_pages >= pages / 3 && after.spilled_pages == disk.spilled_pages(), "{after:?}");
    // Each group in its place, from memory or with one read.
    let before = reads(&disk);
    let mut seen = 0;
    for group in (0..pages / GROUP).rev() {
        check(&disk, group * GROUP + 3);
        seen += 1;
    }
    assert!(reads(&disk) - before <= seen, "{} reads of {seen} groups", reads(&disk) - before);
    for page in 0..pages {
        check(&disk, page);
    }
    assert_eq!(disk.ram.io_stat().failed_reads, 0);
    disk.check_clean_end();
}

/// Pages of [`mixed`] that share objects, and all of its pages. The others are in groups.
const SHARED: u64 = 32;
const MIXED: u64 = 128;

fn mixed_text(page: u64) -> Vec<u8> {
    if page < SHARED { text(page % (SHARED / 2)) } else { text(page) }
}

fn dedup_stat(disk: &Disk) -> DedupStat {
    disk.ram.dedup_stat().unwrap()
}

/// Makes pages with the same content share objects, and groups the others.
fn share_and_group(disk: &Disk) {
    disk.ram.recompress(&RecompressOptions { dedup: true, ..RecompressOptions::default() }).unwrap();
    group(disk);
    let (shared, groups) = (dedup_stat(disk), stat(disk));
    assert_eq!((shared.objects, shared.pages), (SHARED / 2, SHARED));
    assert_eq!(
        (groups.groups, groups.pages, groups.spilled_pages),
        ((MIXED - SHARED) / GROUP, MIXED - SHARED, 0)
    );
}

/// Returns a disk of 512 pages, of which the first 128 share objects or are in groups.
fn mixed(packed: bool) -> Disk {
    let disk = Disk::manual(4 * MIXED * PAGE, 8 * MIXED, packed);
    for page in 0..MIXED {
        disk.write(page, &mixed_text(page));
    }
    share_and_group(&disk);
    disk
}

#[track_caller]
fn check_mixed(disk: &Disk) {
    // In no order: 37 and 128 have no common divisor.
    for page in (0..MIXED).map(|at| at * 37 % MIXED) {
        assert!(disk.read(page, 1).unwrap() == mixed_text(page), "page {page}");
    }
}

#[test]
fn shared_pages_and_groups_are_spilled_together() {
    for packed in LAYOUTS {
        let disk = mixed(packed);
        // Half of the shared pages, and half of a group.
        write_back(&disk, SHARED / 2, SHARED + GROUP / 2 - 1);
        assert_eq!((dedup_stat(&disk).objects, dedup_stat(&disk).pages), (SHARED / 2, SHARED / 2));
        assert_eq!(disk.spilled_pages(), SHARED / 2 + GROUP / 2);
        write_back(&disk, 0, MIXED - 1);
        assert_eq!(disk.spilled_pages(), MIXED);
        // The pass that takes pages out of sparse groups may have met the divided group.
        let in_groups = MIXED - SHARED - GROUP..=MIXED - SHARED;
        assert!(if packed {
            in_groups.contains(&stat(&disk).spilled_pages)
        } else {
            stat(&disk).spilled_pages == 0
        });
        assert_eq!((dedup_stat(&disk).objects, dedup_stat(&disk).pages, stat(&disk).pages), (0, 0, 0));
        assert_eq!(disk.ram.mm_stat().compr_data_size, 0);
        check_mixed(&disk);
        if packed {
            // All pages are in memory again: groups as groups, and the others alone until they are
            // compared.
            eventually("all pages are in memory", || disk.spilled_pages() == 0);
            assert!(stat(&disk).pages >= MIXED - SHARED - GROUP && dedup_stat(&disk).pages == 0);
            share_and_group(&disk);
            check_mixed(&disk);
        }
        disk.check_clean_end();
    }
}

#[test]
fn memory_limit_evicts_shared_pages_and_groups() {
    for packed in LAYOUTS {
        let disk = mixed(packed);
        disk.ram.compact();
        disk.ram.set_mem_limit(disk.ram.mm_stat().mem_used_total + 16 * PAGE);
        for page in MIXED..4 * MIXED {
            disk.write(page, &content(5, page, PAGE as usize));
        }
        // The new pages take more than the limit, so that old pages of both kinds had to leave.
        let (shared, groups) = (dedup_stat(&disk), stat(&disk));
        assert!(shared.pages < SHARED && groups.pages < MIXED - SHARED, "{shared:?} {groups:?}");
        assert!(groups.spilled_pages > 0 || !packed, "{groups:?}");
        check_mixed(&disk);
        for page in MIXED..4 * MIXED {
            assert!(disk.read(page, 1).unwrap() == content(5, page, PAGE as usize), "page {page}");
        }
        disk.check_clean_end();
        assert_eq!((dedup_stat(&disk).objects, stat(&disk).groups), (0, 0));
    }
}
