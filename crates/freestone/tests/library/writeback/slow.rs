//! Disks that are slow, or have much to do, and get on: nothing is given up. Disks that do not:
//! what waits ends.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use freestone::device::{Completion, Device, Error, IoBuf, Op, Request};
use freestone::ram::{Config, Ram, Writeback};
use freestone_testkit::{Faulty, What, When};

use crate::writeback::disk::{Disk, LAYOUTS, LONG, MIB, PAGE, eventually, noise};

type Answer = (u64, Result<IoBuf, Error>);

/// Submits reads of so many pages each, from these pages on.
fn submit(ram: &Ram, firsts: impl Iterator<Item = u64>, pages: u64) -> Receiver<Answer> {
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

/// A disk without limit in the kernel's layout, with a page of noise at each of its pages, all of
/// them spilled: page `n` to block `n * stride`, modulo their number.
fn spilled(pages: u64, stride: u64, backing: Faulty) -> Disk {
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

fn blocks(count: u64) -> Faulty {
    Faulty::new((count * PAGE) as usize, PAGE as u32)
}

/// 160 reads of 64 KiB, whose pages are scattered: 2560 reads of the disk, which take more than
/// twice the time that the disk is given for an answer. The disk answers all the time.
#[test]
fn a_disk_with_much_to_do_fails_no_reader() {
    const TIMEOUT: Duration = Duration::from_millis(1500);
    const READS: u64 = 2560;
    let disk = spilled(READS, 1021, blocks(READS).one_by_one(Duration::from_micros(1500)));
    disk.ram.set_backing_timeout(TIMEOUT);
    let start = Instant::now();
    let answers = submit(&disk.ram, (0..READS).step_by(16), 16);
    let mut failed = 0;
    for _ in 0..READS / 16 {
        match answers.recv_timeout(LONG).unwrap() {
            (first, Ok(read)) => {
                let wanted: Vec<u8> = (first..first + 16).flat_map(|page| noise(page, 1)).collect();
                assert!(*read == wanted[..], "pages from {first}");
            }
            (_, Err(_)) => failed += 1,
        }
    }
    assert_eq!((failed, disk.ram.backing().unwrap().failed_reads), (0, 0));
    assert!(start.elapsed() > TIMEOUT * 2, "the disk was too fast: {:?}", start.elapsed());
    disk.ends_clean();
}

/// Four writes are under way at once; the last one's turn comes after it would have been given up
/// by itself.
#[test]
fn a_disk_that_writes_slowly_is_not_given_up() {
    const EACH: Duration = Duration::from_millis(400);
    for packed in LAYOUTS {
        let config = Config { disksize: 8 * MIB, ..Config::default() };
        let disk = Disk::new(config, blocks(400).one_by_one(EACH), packed);
        disk.ram.set_backing_timeout(Duration::from_secs(1));
        // Runs of 8 blocks.
        disk.ram.set_writeback_batch_size(32);
        disk.write(0, &noise(1, 40));
        let written = disk.ram.writeback(&Writeback::Huge).map_err(|(_, error)| error).unwrap();
        assert_eq!(written.pages, 40);
        let backing = disk.ram.backing().unwrap();
        assert_eq!((backing.failed_writes, backing.unanswered_writes), (0, 0));
        assert!(disk.backing.counts().writes >= 5, "{:?}", disk.backing.counts());
        disk.ends_clean();
    }
}

/// However many reads there are: a device is given a bounded number, the others wait for room.
#[test]
fn too_many_reads_wait() {
    const READS: u64 = (1 << 14) + 200;
    let disk = spilled(READS, 1, blocks(READS));
    disk.backing.fault(Some(Op::Read), When::Always, What::Hang);
    let answers = submit(&disk.ram, 0..READS, 1);
    disk.backing.await_held(16);
    disk.backing.heal();
    let mut failed = 0;
    for _ in 0..READS {
        match answers.recv_timeout(LONG).unwrap() {
            (page, Ok(read)) => assert!(*read == noise(page, 1)[..], "page {page}"),
            (_, Err(_)) => failed += 1,
        }
    }
    assert_eq!((failed, disk.ram.backing().unwrap().failed_reads), (0, 0));
    assert!(disk.backing.counts().in_flight_max < 1 << 12, "{:?}", disk.backing.counts());
    disk.ends_clean();
}

/// A disk that answers nothing: those whose requests it has fail in time, and so do those that wait
/// for room.
#[test]
fn a_hung_disk_fails_those_that_wait_for_room_too() {
    const READS: u64 = 1500;
    for stop_at in [0, 400] {
        let disk = spilled(READS, 1, blocks(READS));
        disk.ram.set_backing_timeout(Duration::from_millis(60));
        let before = disk.backing.counts().reads;
        disk.backing.fault(Some(Op::Read), When::From(before + stop_at), What::Hang);
        let answers = submit(&disk.ram, 0..READS, 1);
        let mut failed = 0;
        for _ in 0..READS {
            let (page, read) = answers.recv_timeout(LONG).unwrap();
            match read {
                Ok(read) => assert!(*read == noise(page, 1)[..], "page {page}"),
                Err(error) => {
                    assert_eq!(error, Error::Media);
                    failed += 1;
                }
            }
        }
        assert_eq!(failed, READS - stop_at);
        // More are not heaped up on it.
        assert_eq!(disk.read(7, 1).is_err(), stop_at == 0 || disk.backing.counts().held > 0);
        assert!(disk.backing.counts().in_flight < 1 << 12);
        disk.backing.heal();
        eventually("it has answered", || disk.backing.counts().in_flight == 0);
        for page in 0..READS {
            assert!(disk.read(page, 1).unwrap() == noise(page, 1), "page {page}");
        }
        disk.ends_clean();
    }
}

/// A disk that has lost one request and answers all others: that one's waiter hears of it, too.
#[test]
fn a_lost_request_ends_although_others_are_answered() {
    const TIMEOUT: Duration = Duration::from_millis(700);
    let disk = spilled(64, 1, blocks(64));
    disk.ram.set_backing_timeout(TIMEOUT);
    disk.backing.fault(Some(Op::Read), When::At(disk.backing.counts().reads), What::Hang);
    let lost = submit(&disk.ram, 3..4, 1);
    disk.backing.await_held(1);
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
        let (_, answer) = lost.recv_timeout(LONG).unwrap();
        stop.store(true, SeqCst);
        assert_eq!(answer.err(), Some(Error::Media));
        // It had a while: for all that is known the disk was at other things.
        assert!(start.elapsed() > TIMEOUT, "{:?}", start.elapsed());
    });
    assert_eq!(disk.ram.backing().unwrap().failed_reads, 1);
    disk.backing.heal();
    assert!(disk.read(3, 1).unwrap() == noise(3, 1));
    disk.ends_clean();
}
