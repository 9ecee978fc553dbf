//! A device with its own memory limit in a family (devices that share memory) with eviction.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use freestone::device::{Blocking, Error, Op};
use freestone::ram::{Config, Ram, Writeback};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Rng};

use crate::writeback::disk::{Disk, LAYOUTS, MIB, NONE, PAGE, noise};

const CAP: u64 = 128 << 10;
const PAGES: u64 = 256;
/// Number of pages that together receive half of the writes.
const FREQUENT: u64 = 24;
/// How long writers run. In a quarter of this time, an earlier version failed a write.
const WHILE: Duration = Duration::from_secs(2);

/// Writers keep changing pages that are being evicted, and writeback also runs by hand. An eviction
/// round may free nothing. But the backing device has space, so no write may fail.
#[test]
fn device_at_its_limit_waits_during_manual_writeback() {
    for packed in LAYOUTS {
        let config = Config { disksize: PAGES * PAGE, mem_limit: 16 * MIB, ..Config::default() };
        let disk = Disk::new(config, FaultyDisk::new(16 * MIB as usize, 4096), packed);
        disk.backing.fault(
            Some(Op::Write),
            FaultSchedule::Always,
            FaultEffect::Delay(Duration::from_millis(1)),
        );
        let ram = &disk.ram;
        ram.set_own_limits(CAP, 0).unwrap();
        let ended = AtomicBool::new(false);
        thread::scope(|scope| {
            let writers: Vec<_> =
                (0..4).map(|writer| scope.spawn(move || write_for_a_while(ram, writer))).collect();
            scope.spawn(|| {
                while !ended.load(SeqCst) {
                    // The result is not checked. Pages that change meanwhile stay in memory.
                    let _ = ram.writeback(&Writeback::Huge);
                }
            });
            let refused: Vec<_> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
            ended.store(true, SeqCst);
            assert_eq!(refused, [None; 4], "{:?} {:?}", ram.mm_stat(), ram.backing());
        });
    }
}

/// Writes for the duration `WHILE`. Returns the error of the first failed write, or None if all
/// writes succeed.
fn write_for_a_while(ram: &Ram, writer: u64) -> Option<Error> {
    let mut rng = Rng::new(writer);
    let began = Instant::now();
    let mut round = 0;
    while began.elapsed() < WHILE {
        round += 1;
        let page = if rng.below(2) == 0 { rng.below(FREQUENT) } else { rng.below(PAGES) };
        if let Err(error) = ram.write_at(page * PAGE, &noise(page * 1000 + round, 1), NONE) {
            return Some(error);
        }
    }
    None
}
