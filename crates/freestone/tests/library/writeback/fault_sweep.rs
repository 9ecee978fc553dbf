//! Runs one sequence of operations many times, each time with a fault at another request to the
//! backing device. No data may be lost.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use freestone::device::{Blocking, Error, Op};
use freestone::ram::{Config, IdleSelection, RecompressOptions, Writeback, WritebackError};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Rng, effort};

use crate::writeback::disk::{BLOCK, ByteModel, Disk, LAYOUTS, NONE, PAGE, content};

const PAGES: u64 = 160;
const SIZE: u64 = PAGES * PAGE;
/// Number of operations in the sequence.
const STEPS: u64 = 90;

fn disk(packed: bool) -> Disk {
    // The backing device has space for little more than the data, so blocks are soon reused.
    let backing = FaultyDisk::new(((PAGES + 40) * PAGE) as usize, 4096);
    let disk = Disk::new(Config { disksize: SIZE, ..Config::default() }, backing, packed);
    // Small batches cause many writes, and so more positions for a fault.
    disk.ram.set_writeback_batch_size(8);
    disk
}

/// Numbers of failed requests to the RAM disk, by kind.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Failures {
    reads: u64,
    writes: u64,
    writebacks: u64,
}

/// Runs the same steps each time. After a failed read, the content is unchanged. After a failed
/// write, each block has its old or its new content.
fn sequence(disk: &Disk, plain: &mut ByteModel) -> Failures {
    let mut rng = Rng::new(77);
    let mut failures = Failures::default();
    let ram = &disk.ram;
    for step in 0..STEPS {
        let page = rng.below(PAGES);
        let pages = 1 + rng.below((PAGES - page).min(24));
        let (offset, len) = (page * PAGE, pages * PAGE);
        // The first steps fill the disk.
        match if step < 8 { 0 } else { rng.below(11) } {
            0..=1 => {
                let data: Vec<u8> = (0..pages)
                    .flat_map(|n| content(rng.below(6) as u8, step * 1000 + n, PAGE as usize))
                    .collect();
                // A write of whole pages needs no read of the backing device, so it must not fail.
                ram.write_at(offset, &data, NONE).unwrap();
                plain.write(offset, &data);
            }
            2 => {
                // A write to a part of an evicted page reads the page from the backing device.
                let at = offset + BLOCK * rng.below(7);
                let data = content(5, step, 2 * BLOCK as usize);
                match ram.write_at(at, &data, NONE) {
                    Ok(()) => plain.write(at, &data),
                    Err(error) => {
                        assert_eq!(error, Error::Media);
                        failures.writes += 1;
                    }
                }
            }
            3 => {
                ram.discard(offset, len.min(4 * PAGE)).unwrap();
                plain.discard(offset, len.min(4 * PAGE));
            }
            4..=5 => {
                let mut back = vec![0xAA; len as usize];
                match ram.read_at(offset, &mut back) {
                    Ok(()) => assert!(
                        back == plain.0[offset as usize..][..len as usize],
                        "step {step}, page {page}"
                    ),
                    Err(error) => {
                        assert_eq!(error, Error::Media);
                        failures.reads += 1;
                    }
                }
            }
            6 => {
                ram.compact();
            }
            7 => {
                ram.recompress(&RecompressOptions { group: true, ..RecompressOptions::default() }).unwrap();
            }
            mode => {
                ram.mark_idle(IdleSelection::All);
                let what = match mode {
                    8 => Writeback::Pages(vec![page..=page + pages - 1]),
                    9 => Writeback::Huge,
                    _ => Writeback::Idle,
                };
                if let Err((_, error)) = ram.writeback(&what) {
                    assert!(
                        matches!(error, WritebackError::Device(_) | WritebackError::NoSpace),
                        "{error:?}"
                    );
                    failures.writebacks += 1;
                }
            }
        }
    }
    failures
}

/// Returns the numbers of reads and writes on the backing device during a sequence without faults.
fn faultless(packed: bool) -> (u64, u64) {
    let disk = disk(packed);
    let mut plain = ByteModel::new(SIZE);
    assert_eq!(sequence(&disk, &mut plain), Failures::default());
    let counts = disk.backing.counts();
    plain.check(&disk.ram);
    disk.check_clean_end();
    assert!(counts.reads > 10 && counts.writes > 20, "{counts:?}: too few for a test");
    (counts.reads, counts.writes)
}

#[test]
fn each_write_fails_or_is_torn() {
    for packed in LAYOUTS {
        let (_, writes) = faultless(packed);
        for n in 0..writes {
            let faults =
                [FaultEffect::Fail(Error::Media), FaultEffect::Fail(Error::NoSpace), FaultEffect::Tear];
            // A quick run tests each write with one of the faults, in turn.
            let (first, count) = effort((n as usize % faults.len(), 1), (0, faults.len()));
            for &what in &faults[first..first + count] {
                let disk = disk(packed);
                disk.backing.fault(Some(Op::Write), FaultSchedule::At(n), what);
                let mut plain = ByteModel::new(SIZE);
                let failures = sequence(&disk, &mut plain);
                // No writeback fails if the fault hits compaction, which writes when it moves pages
                // out of sparse blocks.
                assert!(failures.writebacks <= 1, "write {n}, {what:?}");
                assert_eq!((failures.reads, failures.writes), (0, 0), "write {n}, {what:?}");
                assert_eq!(disk.ram.backing().unwrap().failed_writes, 1, "write {n}, {what:?}");
                plain.check(&disk.ram);
                disk.check_clean_end();
            }
        }
    }
}

#[test]
fn each_read_fails() {
    for packed in LAYOUTS {
        let (reads, _) = faultless(packed);
        for n in (0..reads).step_by(effort(2, 1)) {
            let disk = disk(packed);
            disk.backing.fault(Some(Op::Read), FaultSchedule::At(n), FaultEffect::Fail(Error::Media));
            let mut plain = ByteModel::new(SIZE);
            let failures = sequence(&disk, &mut plain);
            // No request fails if the fault hits a read of a background task.
            assert!(
                failures.reads + failures.writes <= 1 && failures.writebacks == 0,
                "read {n}: {failures:?}"
            );
            assert_eq!(disk.ram.backing().unwrap().failed_reads, 1, "read {n}");
            plain.check(&disk.ram);
            disk.check_clean_end();
        }
    }
}

/// Reads with corrupt data are detected only in the packed layout, which has checksums.
#[test]
fn each_read_is_corrupt() {
    let (reads, _) = faultless(true);
    for n in (0..reads).step_by(effort(3, 1)) {
        let disk = disk(true);
        disk.backing.fault(Some(Op::Read), FaultSchedule::At(n), FaultEffect::Corrupt);
        let mut plain = ByteModel::new(SIZE);
        sequence(&disk, &mut plain);
        plain.check(&disk.ram);
        disk.check_clean_end();
    }
}

#[test]
fn each_operation_hangs_for_a_while() {
    for packed in LAYOUTS {
        let (reads, writes) = faultless(packed);
        for n in (0..reads + writes).step_by(effort(3, 1)) {
            let disk = disk(packed);
            disk.backing.fault(None, FaultSchedule::At(n), FaultEffect::Hang);
            let mut plain = ByteModel::new(SIZE);
            let ended = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    while !ended.load(Ordering::SeqCst) {
                        if disk.backing.counts().held > 0 {
                            disk.backing.heal();
                            return;
                        }
                        thread::sleep(Duration::from_micros(100));
                    }
                });
                let failures = sequence(&disk, &mut plain);
                ended.store(true, Ordering::SeqCst);
                assert_eq!(failures, Failures::default(), "operation {n}");
            });
            // The number of requests to the backing device depends on timing. If it is lower than
            // expected, the fault has not happened yet.
            disk.backing.heal();
            plain.check(&disk.ram);
            disk.check_clean_end();
        }
    }
}

/// The backing device completes a request after the RAM disk has already given up that request.
#[test]
fn each_operation_times_out() {
    for packed in LAYOUTS {
        let (reads, writes) = faultless(packed);
        // If the request is a read-ahead, no other request waits for it, and it may be given up
        // only later.
        let mut given_up = 0;
        let step = effort(31, 6);
        for (round, n) in (0..reads + writes).step_by(step).enumerate() {
            let disk = disk(packed);
            disk.ram.set_backing_timeout(Duration::from_millis(150));
            disk.backing.fault(None, FaultSchedule::At(n), FaultEffect::Hang);
            let mut plain = ByteModel::new(SIZE);
            sequence(&disk, &mut plain);
            let backing = disk.ram.backing().unwrap();
            given_up += backing.failed_reads + backing.failed_writes;
            // In one third of the runs, the device still hangs while the disk is compared.
            if round % 3 != 0 {
                disk.backing.heal();
            }
            plain.check(&disk.ram);
            disk.check_clean_end();
        }
        assert!(given_up >= writes / step as u64, "{given_up}");
    }
}

#[test]
fn backing_that_always_fails_loses_nothing() {
    for packed in LAYOUTS {
        let disk = disk(packed);
        disk.backing.fault(None, FaultSchedule::Always, FaultEffect::Fail(Error::Media));
        let mut plain = ByteModel::new(SIZE);
        let failures = sequence(&disk, &mut plain);
        assert!(failures.writebacks > 10 && failures.reads + failures.writes == 0, "{failures:?}");
        assert_eq!(disk.bd_stat(), (0, 0, 0));
        plain.check(&disk.ram);
        disk.check_clean_end();
    }
}

/// The backing file is truncated. Pages beyond its new end are lost, and pages before it are not.
#[test]
fn truncated_backing_loses_only_its_end() {
    for packed in LAYOUTS {
        let disk = disk(packed);
        disk.ram.set_writeback_batch_size(1024);
        let pages = |page: u64| content(5, page, PAGE as usize);
        for page in 0..PAGES {
            disk.write(page, &pages(page));
        }
        disk.ram.writeback(&Writeback::Huge).unwrap();
        assert_eq!(disk.spilled_pages(), PAGES);
        disk.backing.truncate_at(100 * PAGE);
        let is_lost = |page: u64| match disk.read(page, 1) {
            Ok(back) => {
                assert!(back == pages(page), "page {page}");
                false
            }
            Err(error) => {
                assert_eq!(error, Error::Media);
                true
            }
        };
        let lost: Vec<u64> = (0..PAGES).filter(|&page| is_lost(page)).collect();
        // The file still has 100 blocks, and most of them hold pages. Which pages these are is not
        // specified.
        let count = lost.len() as u64;
        assert!((PAGES - 100..PAGES - 50).contains(&count), "packed {packed}: {count} pages are lost");
        // The same pages are lost again, so a page is not lost only because it was read together
        // with a lost one.
        let again: Vec<u64> = (0..PAGES).filter(|&page| is_lost(page)).collect();
        assert_eq!(again, lost, "packed {packed}");
        // A lost page can be overwritten as a whole, without a read.
        for page in 0..PAGES {
            disk.write(page, &pages(page + 1000));
        }
        for page in 0..PAGES {
            assert!(disk.read(page, 1).unwrap() == pages(page + 1000));
        }
        disk.check_clean_end();
    }
}
