//! Pages that were read back keep their objects on the backing device until they change.

use freestone::device::Blocking;
use freestone::ram::{Config, ForkConfig, Writeback};
use freestone_testkit::{FaultyDisk, Rng};

use crate::writeback::disk::{Disk, MIB, NONE, PAGE, content, eventually, noise};

const PAGES: u64 = 2048;

/// Returns a disk of incompressible pages, of which a quarter fits into memory. The backing device
/// has `blocks` blocks.
fn disk(blocks: u64) -> Disk {
    let config = Config { disksize: PAGES * PAGE, mem_limit: PAGES * PAGE / 4, ..Config::default() };
    let disk = Disk::new(config, FaultyDisk::new((blocks * PAGE) as usize, PAGE as u32), true);
    for page in 0..PAGES {
        disk.write(page, &noise(page, 1));
    }
    disk
}

fn check(disk: &Disk, page: u64) {
    assert!(disk.read(page, 1).unwrap() == noise(page, 1), "page {page}");
}

fn clean_pages(disk: &Disk) -> u64 {
    disk.ram.backing().unwrap().clean_pages
}

#[test]
fn reads_beyond_the_limit_write_nothing() {
    let disk = disk(4 * PAGES);
    let mut rng = Rng::new(1);
    for _ in 0..8 * PAGES {
        check(&disk, rng.word() % PAGES);
    }
    let (_, reads, written) = disk.bd_stat();
    assert!(reads > 2 * PAGES, "{reads} reads");
    // Each page is written once. A page that is evicted before its copy is recorded is written again.
    assert!(written < PAGES * 5 / 4, "{written} blocks were written");
    assert!(clean_pages(&disk) > 0);
    disk.check_clean_end();
}

#[test]
fn changed_pages_are_written_again() {
    let disk = disk(4 * PAGES);
    let mut rounds = vec![0; PAGES as usize];
    let mut rng = Rng::new(2);
    let page_of = |page: u64, round: u64| noise(page + round * PAGES, 1);
    for _ in 0..8 * PAGES {
        let page = rng.word() % PAGES;
        let round = &mut rounds[page as usize];
        assert!(disk.read(page, 1).unwrap() == page_of(page, *round), "page {page}, round {round}");
        // Objects of all rounds have one size, so a stale copy has the right length.
        if rng.word().is_multiple_of(4) {
            *round += 1;
            disk.write(page, &page_of(page, *round));
        }
    }
    for (page, &round) in (0..PAGES).zip(&rounds) {
        assert!(disk.read(page, 1).unwrap() == page_of(page, round), "page {page}, round {round}");
    }
    disk.check_clean_end();
}

/// The last quarter of the device is for evictions, not for copies.
#[test]
fn copies_give_way_when_blocks_are_short() {
    let disk = disk(PAGES * 2);
    for page in 0..PAGES {
        check(&disk, page);
    }
    assert!(clean_pages(&disk) > 0);
    let snapshot = disk.ram.snapshot().unwrap();
    let other = snapshot.fork(&ForkConfig::default()).unwrap();
    for page in 0..PAGES * 3 / 4 {
        other.write_at(page * PAGE, &noise(page + PAGES, 1), NONE).unwrap();
    }
    assert_eq!(disk.ram.io_stat().failed_writes + other.io_stat().failed_writes, 0);
    for page in 0..PAGES * 3 / 4 {
        let mut back = vec![0; PAGE as usize];
        other.read_at(page * PAGE, &mut back).unwrap();
        assert!(back == noise(page + PAGES, 1), "page {page} of the fork");
        check(&disk, page);
    }
    drop((other, snapshot));
    disk.check_clean_end();
}

/// A page whose content was discarded, or that belonged to a removed device, needs no copy.
#[test]
fn stale_copies_are_freed() {
    let disk = disk(4 * PAGES);
    for page in 0..PAGES {
        check(&disk, page);
    }
    assert!(clean_pages(&disk) > 0);
    let half = PAGES / 2;
    disk.ram.discard(0, half * PAGE).unwrap();
    disk.ram.reset().unwrap();
    // Blocks of an eviction in flight are freed when its write completes.
    eventually("the copies are freed", || clean_pages(&disk) == 0 && disk.bd_stat().0 == 0);
    disk.check_clean_end();
}

/// Without a memory limit no page is evicted, so the space on the device is freed at once.
#[test]
fn disk_without_limit_keeps_no_copies() {
    let disk = Disk::manual(16 * MIB, 4 * PAGES, true);
    disk.write(3, &content(4, 1, PAGE as usize));
    disk.ram.writeback(&Writeback::Pages(vec![0..=10])).unwrap();
    assert_eq!(disk.spilled_pages(), 1);
    disk.read(3, 1).unwrap();
    assert_eq!((disk.spilled_pages(), clean_pages(&disk), disk.bd_stat().0), (0, 0, 0));
}
