//! Slow or overloaded backing devices that make progress do not time out. On devices without
//! progress, requests time out, and all waiting requests fail.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use freestone::device::{Completion, Device, Error, IoBuf, Op, Request};
use freestone::ram::{Config, Ram, Writeback};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk};

use crate::writeback::disk::{Disk, LAYOUTS, LONG, MIB, PAGE, eventually, noise};

type ReadResult = (u64, Result<IoBuf, Error>);

/// Submits a read of `pages` pages at each page of `firsts`. Returns the receiver of the first page
/// and the result of each read.
fn submit(ram: &Ram, firsts: impl Iterator<Item = u64>, pages: u64) -> Receiver<ReadResult> {
    let (tx, rx) = mpsc::channel();
    for first in firsts {
        let tx = tx.clone();
        let done = Completion::new(move |outcome, buffer| {
            let _ = tx.send((first, outcome.map(|()| buffer)));
        });
        let buffer = IoBuf::zeroed((pages * PAGE) as usize).unwrap();
        ram.submit(Request::read(first * PAGE, pages * PAGE), buffer, done);
    }
    rx
}

/// Returns a disk in the kernel's layout, without a memory limit. All pages are noise and evicted:
/// page `n` is in block `n * stride % pages`.
fn spilled(pages: u64, stride: u64, backing: FaultyDisk) -> Disk {
    let disk = Disk::new(Config { disksize: pages * PAGE, ..Config::default() }, backing, false);
    for page in 0..pages {
        disk.write(page, &noise(page, 1));
    }
    let mut order: Vec<u64> = (0..pages).collect();
    order.sort_unstable_by_key(|page| page * stride % pages);
    let ranges = order.into_iter().map(|page| page..=page).collect();
    assert_eq!(disk.ram.writeback(&Writeback::Pages(ranges)).unwrap().pages, pages);
    disk
}

fn blocks(count: u64) -> FaultyDisk {
    FaultyDisk::new((count * PAGE) as usize, PAGE as u32)
}

/// 160 reads of 16 scattered pages cause 2560 reads of the backing device. Together these take more
/// than twice the timeout, but the device completes requests all the time.
#[test]
fn overloaded_disk_fails_no_reads() {
    const TIMEOUT: Duration = Duration::from_millis(1500);
    const READS: u64 = 2560;
    let disk = spilled(READS, 1021, blocks(READS).one_by_one(Duration::from_micros(1500)));
    disk.ram.set_backing_timeout(TIMEOUT);
    let start = Instant::now();
    let completions = submit(&disk.ram, (0..READS).step_by(16), 16);
    let mut failed = 0;
    for _ in 0..READS / 16 {
        match completions.recv_timeout(LONG).unwrap() {
            (first, Ok(read)) => {
                let wanted: Vec<u8> = (first..first + 16).flat_map(|page| noise(page, 1)).collect();
                assert!(*read == wanted[..], "pages from {first}");
            }
            (_, Err(_)) => failed += 1,
        }
    }
    assert_eq!((failed, disk.ram.backing().unwrap().failed_reads), (0, 0));
    assert!(start.elapsed() > TIMEOUT * 2, "the disk was too fast: {:?}", start.elapsed());
    disk.check_clean_end();
}

/// Four writes are in flight, which the device executes one by one. The last one would time out if
/// its time counted from its submission.
#[test]
fn slow_writes_do_not_time_out() {
    const EACH: Duration = Duration::from_millis(400);
    for packed in LAYOUTS {
        let config = Config { disksize: 8 * MIB, ..Config::default() };
        let disk = Disk::new(config, blocks(400).one_by_one(EACH), packed);
        disk.ram.set_backing_timeout(Duration::from_secs(1));
        // With a batch size of 32 blocks, each write has 8 blocks.
        disk.ram.set_writeback_batch_size(32);
        disk.write(0, &noise(1, 40));
        let written = disk.ram.writeback(&Writeback::Huge).map_err(|(_, error)| error).unwrap();
        assert_eq!(written.pages, 40);
        let backing = disk.ram.backing().unwrap();
        assert_eq!((backing.failed_writes, backing.abandoned_writes), (0, 0));
        assert!(disk.backing.counts().writes >= 5, "{:?}", disk.backing.counts());
        disk.check_clean_end();
    }
}

/// The number of reads in flight on the backing device is limited. Further reads wait.
#[test]
fn too_many_reads_wait() {
    const READS: u64 = (1 << 14) + 200;
    let disk = spilled(READS, 1, blocks(READS));
    disk.backing.fault(Some(Op::Read), FaultSchedule::Always, FaultEffect::Hang);
    let completions = submit(&disk.ram, 0..READS, 1);
    disk.backing.wait_held(16);
    disk.backing.heal();
    let mut failed = 0;
    for _ in 0..READS {
        match completions.recv_timeout(LONG).unwrap() {
            (page, Ok(read)) => assert!(*read == noise(page, 1)[..], "page {page}"),
            (_, Err(_)) => failed += 1,
        }
    }
    assert_eq!((failed, disk.ram.backing().unwrap().failed_reads), (0, 0));
    assert!(disk.backing.counts().in_flight_max < 1 << 12, "{:?}", disk.backing.counts());
    disk.check_clean_end();
}

/// If a backing device completes nothing any more, its requests time out, and so do requests that
/// wait to be submitted.
#[test]
fn hung_disk_fails_queued_reads_too() {
    const READS: u64 = 1500;
    for stop_at in [0, 400] {
        let disk = spilled(READS, 1, blocks(READS));
        disk.ram.set_backing_timeout(Duration::from_millis(60));
        let before = disk.backing.counts().reads;
        disk.backing.fault(Some(Op::Read), FaultSchedule::From(before + stop_at), FaultEffect::Hang);
        let completions = submit(&disk.ram, 0..READS, 1);
        let mut failed = 0;
        for _ in 0..READS {
            let (page, read) = completions.recv_timeout(LONG).unwrap();
            match read {
                Ok(read) => assert!(*read == noise(page, 1)[..], "page {page}"),
                Err(error) => {
                    assert_eq!(error, Error::Media);
                    failed += 1;
                }
            }
        }
        assert_eq!(failed, READS - stop_at);
        // The RAM disk sends no further requests to the device that hangs.
        assert_eq!(disk.read(7, 1).is_err(), stop_at == 0 || disk.backing.counts().held > 0);
        assert!(disk.backing.counts().in_flight < 1 << 12);
        disk.backing.heal();
        eventually("it has answered", || disk.backing.counts().in_flight == 0);
        for page in 0..READS {
            assert!(disk.read(page, 1).unwrap() == noise(page, 1), "page {page}");
        }
        disk.check_clean_end();
    }
}

/// A backing device that lost one request and completes all others. The lost request also times
/// out.
#[test]
fn lost_request_times_out_while_others_complete() {
    const TIMEOUT: Duration = Duration::from_millis(700);
    let disk = spilled(64, 1, blocks(64));
    disk.ram.set_backing_timeout(TIMEOUT);
    disk.backing.fault(Some(Op::Read), FaultSchedule::At(disk.backing.counts().reads), FaultEffect::Hang);
    let lost = submit(&disk.ram, 3..4, 1);
    disk.backing.wait_held(1);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(SeqCst) {
                for page in 32..64 {
                    assert!(disk.read(page, 1).unwrap() == noise(page, 1), "page {page}");
                }
                thread::sleep(Duration::from_millis(1));
            }
        });
        let start = Instant::now();
        let (_, completion) = lost.recv_timeout(LONG).unwrap();
        stop.store(true, SeqCst);
        assert_eq!(completion.err(), Some(Error::Media));
        // The request must not fail before the timeout, because the device may only be busy with
        // other requests.
        assert!(start.elapsed() > TIMEOUT, "{:?}", start.elapsed());
    });
    assert_eq!(disk.ram.backing().unwrap().failed_reads, 1);
    disk.backing.heal();
    assert!(disk.read(3, 1).unwrap() == noise(3, 1));
    disk.check_clean_end();
}
