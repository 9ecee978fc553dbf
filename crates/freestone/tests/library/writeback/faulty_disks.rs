//! Slow, full or hung backing devices: which requests must wait for the device, and which must not.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use freestone::device::{Blocking, Buffer, Device, Error, Op, Request};
use freestone::ram::{Config, IdleSelection, Writeback, WritebackError};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, effort};

use crate::writeback::disk::{Disk, LAYOUTS, LONG, MIB, NONE, PAGE, content, eventually, noise};

/// Deadline for operations that must not wait for the backing device.
const SOON: Duration = Duration::from_secs(10);
/// Long enough to show that an operation waits.
const WHILE: Duration = Duration::from_millis(60);

fn limited(disksize: u64, mem_limit: u64, backing_blocks: u64, packed: bool) -> Disk {
    let config = Config { disksize, mem_limit, ..Config::default() };
    Disk::new(config, FaultyDisk::new((backing_blocks * PAGE) as usize, 4096), packed)
}

/// Runs `work` on its own thread. Returns the result; panics if there is none after `SOON`.
#[track_caller]
fn in_time<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (tx, rx) = mpsc::channel();
    thread::spawn(move || tx.send(work()));
    rx.recv_timeout(SOON).unwrap_or_else(|_| panic!("{what}: waits for the disk"))
}

#[test]
fn writers_are_slowed_but_do_not_fail() {
    for packed in LAYOUTS {
        // Writes 24 MiB with 2 MiB of memory, while the backing device takes 2 ms for each write.
        let disk = limited(24 * MIB, 2 * MIB, 7000, packed);
        disk.backing.fault(
            Some(Op::Write),
            FaultSchedule::Always,
            FaultEffect::Delay(Duration::from_millis(2)),
        );
        thread::scope(|scope| {
            for writer in 0..3_u64 {
                let disk = &disk;
                scope.spawn(move || {
                    for page in (writer..6144).step_by(3) {
                        disk.write(page, &noise(page, 1));
                    }
                });
            }
        });
        assert!(disk.spilled_pages() > 6144 - 2 * MIB / PAGE - 100, "{}", disk.spilled_pages());
        let mm = disk.ram.mm_stat();
        assert!(mm.mem_used_total <= 2 * MIB, "{mm:?}");
        assert_eq!((mm.orig_data_size, disk.ram.io_stat().failed_writes), (24 * MIB, 0));
        disk.backing.heal();
        for page in 0..6144 {
            assert!(disk.read(page, 1).unwrap() == noise(page, 1), "page {page}");
        }
        disk.check_clean_end();
    }
}

#[test]
fn write_fails_if_memory_and_disk_are_full() {
    for packed in LAYOUTS {
        let disk = limited(24 * MIB, 2 * MIB, 256, packed);
        let written =
            (0..6144).take_while(|&page| disk.ram.write_at(page * PAGE, &noise(page, 1), NONE).is_ok());
        let written = written.count() as u64;
        // The memory holds 512 pages and the backing device 256, minus rounding and reserves.
        assert!((690..=768).contains(&written), "{written} pages");
        assert_eq!(disk.ram.write_at(5000 * PAGE, &noise(1, 1), NONE), Err(Error::NoSpace));
        assert!(disk.ram.io_stat().failed_writes >= 2);
        for page in 0..written {
            assert!(disk.read(page, 1).unwrap() == noise(page, 1), "page {page}");
        }
        // Discards 200 pages in memory or on the backing device, which gives enough space for 100
        // new pages.
        disk.ram.discard(0, 200 * PAGE).unwrap();
        for page in 0..100 {
            disk.write(page, &noise(page + 9000, 1));
        }
        for page in 0..100 {
            assert!(disk.read(page, 1).unwrap() == noise(page + 9000, 1), "page {page}");
        }
        for page in 200..written {
            assert!(disk.read(page, 1).unwrap() == noise(page, 1), "page {page}");
        }
        disk.check_clean_end();
    }
}

#[test]
fn backing_error_no_space_means_full() {
    for packed in LAYOUTS {
        let disk = limited(24 * MIB, 2 * MIB, 7000, packed);
        disk.backing.no_space_after(MIB);
        let written =
            (0..6144).take_while(|&page| disk.ram.write_at(page * PAGE, &noise(page, 1), NONE).is_ok());
        let written = written.count() as u64;
        assert!((500..=768).contains(&written), "{written} pages");
        for page in 0..written {
            assert!(disk.read(page, 1).unwrap() == noise(page, 1), "page {page}");
        }
        disk.backing.heal();
        eventually("writes go on when there is room again", || {
            disk.ram.write_at(written * PAGE, &noise(written, 1), NONE).is_ok()
        });
        disk.check_clean_end();
    }
}

#[test]
fn pages_in_memory_do_not_wait_for_a_hung_disk() {
    for packed in LAYOUTS {
        let disk = Disk::manual(8 * MIB, 3000, packed);
        for page in 0..64 {
            disk.write(page, &noise(page, 1));
        }
        disk.ram.writeback(&Writeback::Pages(vec![0..=15])).unwrap();
        disk.backing.fault(None, FaultSchedule::Always, FaultEffect::Hang);

        // A writeback and the reads of two evicted pages hang.
        let ram = disk.ram.clone();
        ram.mark_idle(IdleSelection::All);
        let writeback = thread::spawn(move || ram.writeback(&Writeback::Idle));
        disk.backing.wait_held(1);
        let readers = [3_u64, 9].map(|page| {
            let ram = disk.ram.clone();
            thread::spawn(move || {
                let mut back = vec![0; PAGE as usize];
                ram.read_at(page * PAGE, &mut back).map(|()| back)
            })
        });
        disk.backing.wait_held(3);

        // Other requests complete: to pages that are being written back, to pages in memory, and
        // overwrites or discards of evicted pages.
        let ram = disk.ram.clone();
        in_time("pages in memory", move || {
            let mut back = vec![0; PAGE as usize];
            for page in 16..64 {
                ram.read_at(page * PAGE, &mut back).unwrap();
                assert!(back == noise(page, 1), "page {page}");
            }
            for page in 20..40 {
                ram.write_at(page * PAGE, &noise(page + 100, 1), NONE).unwrap();
            }
            ram.write_at(200 * PAGE, &noise(200, 1), NONE).unwrap();
            ram.write_at(12 * PAGE, &noise(112, 1), NONE).unwrap();
            ram.read_at(12 * PAGE, &mut back).unwrap();
            assert!(back == noise(112, 1));
            ram.discard(13 * PAGE, PAGE).unwrap();
            ram.discard(50 * PAGE, PAGE).unwrap();
            ram.mm_stat();
            ram.bd_stat();
        });
        // Another RAM disk with another backing device is not affected.
        let other = Disk::manual(8 * MIB, 3000, packed);
        let ram = other.ram.clone();
        in_time("another disk", move || {
            ram.write_at(0, &noise(1, 64), NONE).unwrap();
            ram.writeback(&Writeback::Huge).unwrap();
            let mut back = vec![0; (64 * PAGE) as usize];
            ram.read_at(0, &mut back).unwrap();
            assert!(back == noise(1, 64));
        });
        other.check_clean_end();

        assert!(!writeback.is_finished() && readers.iter().all(|reader| !reader.is_finished()));
        disk.backing.heal();
        let written = writeback.join().unwrap().unwrap();
        for (reader, page) in readers.into_iter().zip([3, 9]) {
            assert!(reader.join().unwrap().unwrap() == noise(page, 1), "page {page}");
        }
        // The writeback counts no page that was changed meanwhile, because such pages stay in
        // memory.
        assert!(written.pages <= 48, "{written:?}");
        for page in 0..64 {
            let wanted = match page {
                12 => noise(112, 1),
                13 | 50 => vec![0; PAGE as usize],
                20..40 => noise(page + 100, 1),
                _ => noise(page, 1),
            };
            assert!(disk.read(page, 1).unwrap() == wanted, "page {page}");
        }
        disk.check_clean_end();
    }
}

#[test]
fn hung_disk_times_out() {
    for packed in LAYOUTS {
        let disk = Disk::manual(8 * MIB, 400, packed);
        disk.ram.set_backing_timeout(WHILE);
        disk.write(0, &noise(1, 300));
        disk.ram.writeback(&Writeback::Pages(vec![0..=99])).unwrap();
        disk.backing.fault(None, FaultSchedule::Always, FaultEffect::Hang);
        let start = Instant::now();
        assert_eq!(disk.read(5, 1), Err(Error::Media));
        assert!(start.elapsed() >= WHILE && start.elapsed() < SOON, "{:?}", start.elapsed());
        let (written, error) = disk.ram.writeback(&Writeback::Pages(vec![100..=199])).unwrap_err();
        assert!(matches!(error, WritebackError::Device(_)), "{error:?}");
        assert_eq!((written.pages, disk.spilled_pages()), (0, 100));
        let backing = disk.ram.backing().unwrap();
        assert!(
            backing.abandoned_writes > 0 && backing.failed_reads > 0 && backing.failed_writes > 0,
            "{backing:?}"
        );
        // The pages of the failed writeback stayed in memory. Their blocks are reused only after
        // the hung writes complete.
        assert!(disk.read(100, 200).unwrap() == noise(1, 300)[(100 * PAGE) as usize..]);
        disk.backing.heal();
        eventually("it has answered", || disk.ram.backing().unwrap().abandoned_writes == 0);
        assert!(disk.read(0, 300).unwrap() == noise(1, 300));
        assert_eq!(disk.ram.writeback(&Writeback::Pages(vec![100..=299])).unwrap().pages, 200);
        assert!(disk.read(0, 300).unwrap() == noise(1, 300));
        disk.check_clean_end();
    }
}

#[test]
fn only_writers_at_the_limit_wait_for_a_hung_disk() {
    for packed in LAYOUTS {
        let disk = limited(24 * MIB, 2 * MIB, 7000, packed);
        for page in 0..800 {
            disk.write(page, &noise(page, 1));
        }
        disk.backing.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Hang);
        let ram = disk.ram.clone();
        let writer = thread::spawn(move || {
            (1000..2000).try_for_each(|page| ram.write_at(page * PAGE, &noise(page, 1), NONE))
        });
        disk.backing.wait_held(1);
        thread::sleep(WHILE);
        assert!(!writer.is_finished());
        let ram = disk.ram.clone();
        in_time("reads, and writes that need no memory", move || {
            let mut back = vec![0; PAGE as usize];
            for page in 0..800 {
                ram.read_at(page * PAGE, &mut back).unwrap();
                assert!(back == noise(page, 1), "page {page}");
            }
            ram.write_at(3000 * PAGE, &content(0, 0, PAGE as usize), NONE).unwrap();
            ram.discard(3000 * PAGE, PAGE).unwrap();
        });
        disk.backing.heal();
        let start = Instant::now();
        assert_eq!(writer.join().unwrap(), Ok(()));
        assert!(start.elapsed() < LONG);
        for page in (0..800).chain(1000..2000) {
            assert!(disk.read(page, 1).unwrap() == noise(page, 1), "page {page}");
        }
        disk.check_clean_end();
    }
}

/// Adjacent pages of one request are read together. If that read fails because of one page, the
/// others must still be returned.
#[test]
fn failed_read_fails_only_its_page() {
    for packed in LAYOUTS {
        let disk = Disk::manual(8 * MIB, 3000, packed);
        disk.write(0, &noise(1, 256));
        disk.ram.writeback(&Writeback::Huge).unwrap();
        assert_eq!(disk.spilled_pages(), 256);
        // A single read of the backing device fails, whichever page it is for.
        disk.backing.fault(Some(Op::Read), FaultSchedule::At(3), FaultEffect::Fail(Error::Media));
        let mut failed = Vec::new();
        for page in 0..256 {
            match disk.read(page, 1) {
                Ok(back) => {
                    assert!(back == noise(1, 256)[(page * PAGE) as usize..][..PAGE as usize], "page {page}");
                }
                Err(error) => failed.push((page, error)),
            }
        }
        assert!(failed.len() <= 1, "{failed:?}");
        assert!(failed.iter().all(|(_, error)| *error == Error::Media), "{failed:?}");
        assert_eq!(disk.ram.backing().unwrap().failed_reads, 1);
        assert!(disk.read(0, 256).unwrap() == noise(1, 256));
        disk.check_clean_end();
    }
}

#[test]
fn failed_partial_write_to_evicted_page_is_counted() {
    for packed in LAYOUTS {
        let disk = Disk::manual(8 * MIB, 3000, packed);
        disk.write(0, &noise(1, 16));
        disk.ram.writeback(&Writeback::Huge).unwrap();
        disk.backing.fault(Some(Op::Read), FaultSchedule::Always, FaultEffect::Fail(Error::Media));
        assert_eq!(disk.ram.write_at(PAGE + 512, &[1; 512], NONE), Err(Error::Media));
        let stat = disk.ram.io_stat();
        assert_eq!((stat.failed_reads, stat.failed_writes), (0, 1));
        disk.backing.heal();
        disk.ram.write_at(PAGE + 512, &[1; 512], NONE).unwrap();
        assert_eq!(disk.ram.io_stat().failed_writes, 1);
        disk.check_clean_end();
    }
}

#[test]
fn removed_disk_fails_its_requests() {
    let disk = Disk::manual(8 * MIB, 3000, true);
    disk.write(0, &noise(1, 64));
    disk.ram.writeback(&Writeback::Pages(vec![0..=31])).unwrap();
    disk.backing.fault(Some(Op::Read), FaultSchedule::Always, FaultEffect::Fail(Error::Gone));
    assert!(disk.read(0, 1).is_err());
    assert!(disk.read(32, 32).unwrap() == noise(1, 64)[(32 * PAGE) as usize..]);
    disk.backing.heal();
    assert!(disk.read(0, 64).unwrap() == noise(1, 64));
    disk.check_clean_end();
}

/// If a page is changed and selected again while its batch is filled, the batch contains the page
/// twice.
#[test]
fn page_twice_in_a_batch_keeps_its_last_content() {
    for packed in LAYOUTS {
        let disk = Disk::manual(8 * MIB, 4000, packed);
        disk.write(0, &noise(0, 1));
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(SeqCst) {
                    disk.ram.writeback(&Writeback::Pages(vec![0..=0; 60])).unwrap();
                }
            });
            let lost = (1..effort(300, 1500)).filter(|&number| {
                let page = noise(number, 1);
                disk.write(0, &page);
                thread::sleep(Duration::from_micros(200));
                disk.read(0, 1).unwrap() != page
            });
            let lost = lost.count();
            stop.store(true, SeqCst);
            assert_eq!(lost, 0, "packed {packed}: answered writes are lost");
        });
        disk.check_clean_end();
    }
}

#[test]
fn single_failed_eviction_fails_no_write() {
    for packed in LAYOUTS {
        let disk = limited(24 * MIB, 2 * MIB, 8000, packed);
        disk.backing.fault(Some(Op::Write), FaultSchedule::At(5), FaultEffect::Fail(Error::Media));
        for page in 0..6000 {
            disk.write(page, &noise(page, 1));
        }
        assert_eq!(disk.ram.io_stat().failed_writes, 0);
        assert_eq!(disk.ram.backing().unwrap().failed_writes, 1);
        disk.check_clean_end();
    }
}

/// Pages that are read all the time can still be evicted, so writers make progress.
#[test]
fn constant_reads_do_not_block_writers() {
    for packed in LAYOUTS {
        let disk = limited(24 * MIB, MIB, 8000, packed);
        disk.backing.fault(
            Some(Op::Write),
            FaultSchedule::Always,
            FaultEffect::Delay(Duration::from_millis(2)),
        );
        disk.write(0, &noise(0, 200));
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut back = vec![0; PAGE as usize];
                while !stop.load(SeqCst) {
                    for page in 0..200 {
                        // An inline read only reads pages in memory, so it never waits for the
                        // backing device.
                        let _ = disk.ram.try_io(&Request::read(page * PAGE, PAGE), Buffer::Read(&mut back));
                    }
                }
            });
            for page in 200..2000 {
                disk.write(page, &noise(page, 1));
            }
            stop.store(true, SeqCst);
        });
        assert_eq!(disk.ram.io_stat().failed_writes, 0);
        disk.check_clean_end();
    }
}
