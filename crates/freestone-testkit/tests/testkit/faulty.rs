//! Checks that `FaultyDisk` conforms to the device contract, and that each of its faults works.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use freestone_core::device::{
    Blocking, Buffer, Completion, Device, Error, Flags, IoBuf, Op, Request, Result, TryResult,
};
use freestone_testkit::conformance::{self, Options};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk};

const BLOCK: u64 = 4096;
const SIZE: usize = 1 << 20;
/// Time that is long enough for an immediate completion to arrive.
const SOON: Duration = Duration::from_millis(30);
const NONE: Flags = Flags::empty();

fn disk() -> FaultyDisk {
    FaultyDisk::new(SIZE, BLOCK as u32)
}

fn block(byte: u8) -> Vec<u8> {
    vec![byte; BLOCK as usize]
}

fn read(disk: &FaultyDisk, offset: u64, len: u64) -> Result<Vec<u8>> {
    let mut data = vec![0xAA; len as usize];
    disk.read_at(offset, &mut data).map(|()| data)
}

/// Submits a request. The returned channel receives the result.
fn submit(disk: &FaultyDisk, request: Request, data: &[u8]) -> Receiver<Result<()>> {
    let (tx, rx) = mpsc::channel();
    let done = Completion::new(move |outcome, _| {
        // The test may have dropped the receiver.
        let _ = tx.send(outcome);
    });
    disk.submit(request, IoBuf::copy_of(data).unwrap(), done);
    rx
}

#[test]
fn faulty_without_faults_conforms() {
    let options =
        |seed| Options { seed, window: 1 << 19, rounds: 80, thread_rounds: 80, ..Options::default() };
    for logical_block in [512, 4096] {
        let plain = || Arc::new(FaultyDisk::new(SIZE, logical_block)) as Arc<dyn Device>;
        conformance::check("faulty", &plain, options(1));
        let shuffled = || Arc::new(FaultyDisk::new(SIZE, logical_block).shuffled(7)) as Arc<dyn Device>;
        conformance::check("shuffled faulty", &shuffled, options(2));
        let inline = || Arc::new(FaultyDisk::new(SIZE, logical_block).inline()) as Arc<dyn Device>;
        conformance::check("inline faulty", &inline, options(3));
    }
}

#[test]
fn fail_done_takes_effect_and_fails() {
    for disk in [disk(), disk().inline()] {
        disk.write_at(0, &block(1), NONE).unwrap();
        disk.fault(None, FaultSchedule::Always, FaultEffect::FailDone(Error::NoSpace));
        assert_eq!(disk.write_at(0, &block(2), NONE), Err(Error::NoSpace));
        assert_eq!(disk.write_zeroes(BLOCK, BLOCK, NONE), Err(Error::NoSpace));
        assert_eq!(disk.flush(), Err(Error::NoSpace));
        assert_eq!(read(&disk, 0, BLOCK), Err(Error::NoSpace));
        disk.heal();
        assert_eq!(read(&disk, 0, 2 * BLOCK), Ok([block(2), block(0)].concat()));
    }
}

#[test]
fn faults_apply_by_operation_number() {
    let disk = disk();
    disk.fault(Some(Op::Write), FaultSchedule::At(1), FaultEffect::Fail(Error::Media));
    disk.fault(None, FaultSchedule::At(4), FaultEffect::Fail(Error::Gone));
    disk.fault(Some(Op::Flush), FaultSchedule::From(1), FaultEffect::Fail(Error::NoSpace));
    assert_eq!(disk.write_at(0, &block(1), NONE), Ok(()));
    assert_eq!(disk.flush(), Ok(()));
    assert_eq!(disk.write_at(0, &block(2), NONE), Err(Error::Media));
    assert_eq!(read(&disk, 0, BLOCK), Ok(block(1)));
    assert_eq!(read(&disk, 0, BLOCK), Err(Error::Gone));
    assert_eq!(disk.flush(), Err(Error::NoSpace));
    assert_eq!(disk.flush(), Err(Error::NoSpace));
    assert_eq!(disk.write_at(BLOCK, &[3; 3 * BLOCK as usize], NONE), Ok(()));
    disk.fault(None, FaultSchedule::Always, FaultEffect::Fail(Error::Media));
    assert_eq!(disk.discard(0, BLOCK), Err(Error::Media));
    disk.heal();
    assert_eq!(disk.flush(), Ok(()));
    let counts = disk.counts();
    assert_eq!((counts.reads, counts.writes, counts.flushes, counts.frees), (2, 3, 4, 1));
    assert_eq!((counts.total(), counts.largest, counts.in_flight), (10, 3 * BLOCK, 0));
    assert_eq!((counts.bytes_written, counts.bytes_read), (4 * BLOCK, BLOCK));
    assert_eq!(disk.violations(), [""; 0]);
}

#[test]
fn torn_write_stores_first_half() {
    let disk = disk();
    disk.write_at(0, &[1; 3 * BLOCK as usize], NONE).unwrap();
    disk.fault(Some(Op::Write), FaultSchedule::At(1), FaultEffect::Tear);
    assert_eq!(disk.write_at(0, &[2; 3 * BLOCK as usize], NONE), Err(Error::Media));
    let left = read(&disk, 0, 3 * BLOCK).unwrap();
    assert!(left[..BLOCK as usize] == block(2) && left[BLOCK as usize..] == [block(1), block(1)].concat());
}

#[test]
fn corrupt_read_succeeds_with_wrong_data() {
    let disk = disk();
    disk.write_at(0, &[1; 2 * BLOCK as usize], NONE).unwrap();
    disk.fault(Some(Op::Read), FaultSchedule::At(0), FaultEffect::Corrupt);
    let data = read(&disk, 0, 2 * BLOCK).unwrap();
    assert!(data.chunks(BLOCK as usize).all(|data| data.iter().filter(|&&byte| byte != 1).count() == 1));
    assert_eq!(read(&disk, 0, BLOCK), Ok(block(1)));
}

#[test]
fn held_operations_complete_after_heal() {
    let disk = disk();
    disk.fault(Some(Op::Write), FaultSchedule::From(0), FaultEffect::Hang);
    let first = submit(&disk, Request::write(0, BLOCK), &block(1));
    let second = submit(&disk, Request::write(BLOCK, BLOCK), &block(2));
    disk.wait_held(2);
    // Operations without a fault continue.
    assert_eq!(read(&disk, 0, 2 * BLOCK), Ok(vec![0; 2 * BLOCK as usize]));
    assert!(first.recv_timeout(SOON).is_err());
    assert_eq!((disk.counts().held, disk.counts().in_flight), (2, 2));
    disk.heal();
    assert_eq!((first.recv(), second.recv()), (Ok(Ok(())), Ok(Ok(()))));
    assert_eq!(read(&disk, 0, 2 * BLOCK), Ok([block(1), block(2)].concat()));
    assert_eq!((disk.counts().in_flight, disk.counts().in_flight_max), (0, 3));
}

#[test]
fn held_operations_fail_on_drop() {
    let disk = disk();
    disk.fault(None, FaultSchedule::Always, FaultEffect::Hang);
    let read = submit(&disk, Request::read(0, BLOCK), &block(0));
    disk.wait_held(1);
    drop(disk);
    assert_eq!(read.recv(), Ok(Err(Error::Gone)));
}

#[test]
fn delayed_operation_is_overtaken() {
    let disk = disk();
    let delay = Duration::from_millis(60);
    disk.fault(Some(Op::Write), FaultSchedule::At(0), FaultEffect::Delay(delay));
    let start = Instant::now();
    let slow = submit(&disk, Request::write(0, BLOCK), &block(1));
    disk.write_at(BLOCK, &block(2), NONE).unwrap();
    assert!(slow.try_recv().is_err());
    assert_eq!(slow.recv(), Ok(Ok(())));
    assert!(start.elapsed() >= delay);
    assert_eq!(read(&disk, 0, BLOCK), Ok(block(1)));
}

#[test]
fn full_disk_refuses_writes() {
    let disk = disk();
    disk.no_space_from(4 * BLOCK);
    assert_eq!(disk.write_at(3 * BLOCK, &block(1), NONE), Ok(()));
    assert_eq!(disk.write_at(3 * BLOCK, &[2; 2 * BLOCK as usize], NONE), Err(Error::NoSpace));
    assert_eq!(read(&disk, 3 * BLOCK, BLOCK), Ok(block(1)));
    disk.heal();
    disk.no_space_after(3 * BLOCK);
    assert_eq!(disk.write_at(8 * BLOCK, &[2; 2 * BLOCK as usize], NONE), Ok(()));
    assert_eq!(disk.write_at(0, &block(3), NONE), Err(Error::NoSpace));
    assert_eq!(disk.counts().bytes_written, 3 * BLOCK);
}

#[test]
fn truncated_disk_fails_beyond_end() {
    let disk = disk();
    disk.write_at(0, &[1; 4 * BLOCK as usize], NONE).unwrap();
    disk.truncate_at(2 * BLOCK);
    assert_eq!(read(&disk, BLOCK, BLOCK), Ok(block(1)));
    assert_eq!(read(&disk, BLOCK, 2 * BLOCK), Err(Error::Media));
    assert_eq!(disk.write_at(3 * BLOCK, &block(2), NONE), Err(Error::Media));
    assert_eq!(disk.geometry().size, SIZE as u64);
}

#[test]
fn seed_determines_completion_order() {
    let order = |disk: FaultyDisk| {
        let (tx, rx) = mpsc::channel();
        disk.fault(None, FaultSchedule::Always, FaultEffect::Hang);
        for number in 0..32_u64 {
            let tx = tx.clone();
            let done = Completion::new(move |_, _| tx.send(number).unwrap());
            disk.submit(Request::read(number * BLOCK, BLOCK), IoBuf::zeroed(BLOCK as usize).unwrap(), done);
        }
        disk.wait_held(32);
        disk.heal();
        (0..32).map(|_| rx.recv().unwrap()).collect::<Vec<_>>()
    };
    let sorted: Vec<_> = (0..32).collect();
    assert_eq!(order(disk()), sorted);
    let mut shuffled = order(disk().shuffled(5));
    assert_ne!(shuffled, sorted);
    assert_eq!(order(disk().shuffled(5)), shuffled);
    shuffled.sort_unstable();
    assert_eq!(shuffled, sorted);
}

#[test]
fn misuse_is_reported() {
    let disk = disk().strict_reads();
    disk.write_at(0, &block(1), NONE).unwrap();
    read(&disk, 0, BLOCK).unwrap();
    assert_eq!(disk.violations(), [""; 0]);
    read(&disk, 0, 2 * BLOCK).unwrap();
    assert!(
        disk.violations()[0].contains("reads block 1, which was never written"),
        "{:?}",
        disk.violations()
    );

    let disk = self::disk();
    read(&disk, 0, BLOCK).unwrap();
    assert_eq!(submit(&disk, Request::read(512, 512), &[0; 512]).recv(), Ok(Err(Error::Misaligned)));
    assert!(disk.violations()[0].contains("is refused"), "{:?}", disk.violations());

    let disk = self::disk();
    disk.fault(None, FaultSchedule::At(0), FaultEffect::Hang);
    let held = submit(&disk, Request::write(0, 2 * BLOCK), &[1; 2 * BLOCK as usize]);
    disk.write_at(2 * BLOCK, &block(2), NONE).unwrap();
    assert_eq!(disk.violations(), [""; 0]);
    disk.write_at(BLOCK, &block(2), NONE).unwrap();
    assert_eq!(disk.violations().len(), 1);
    assert!(disk.violations()[0].contains("is being written"), "{:?}", disk.violations());
    disk.heal();
    assert_eq!(held.recv(), Ok(Ok(())));
}

#[test]
fn inline_disk_completes_tries() {
    let mut data = block(0);
    let request = Request::read(0, BLOCK);
    assert_eq!(disk().try_io(&request, Buffer::Read(&mut data)), Ok(TryResult::WouldBlock));
    let disk = disk().inline();
    assert_eq!(disk.try_io(&request, Buffer::Read(&mut data)), Ok(TryResult::Done));
    disk.fault(Some(Op::Read), FaultSchedule::At(1), FaultEffect::Hang);
    assert_eq!(disk.try_io(&request, Buffer::Read(&mut data)), Ok(TryResult::WouldBlock));
    assert_eq!((disk.counts().reads, disk.counts().in_flight), (1, 0));
    disk.fault(Some(Op::Write), FaultSchedule::At(0), FaultEffect::Fail(Error::Media));
    assert_eq!(disk.try_io(&Request::write(0, BLOCK), Buffer::Write(&data)), Err(Error::Media));
}
