//! Failed writes under zones, bad blocks, requests that wait for a busy zone, and the geometry.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use freestone_core::device::zoned::{Zone, ZoneCondition, ZoneOp, Zoned};
use freestone_core::device::{
    Blocking, Buffer, Completion, Device, Error, Flags, IoBuf, Op, Request, Result, TryResult,
};
use freestone_drive::null::{self, BadBlocks, BadBlocksConfig, Memory, Null};
use freestone_drive::power::{self, Power};
use freestone_drive::zone::{Config, StateLocation, Zones};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Model};

const BLOCK: u64 = 4096;
const ZONE: u64 = 8 * BLOCK;
const SIZE: u64 = 8 * ZONE;

fn config() -> Config {
    Config { zone_size: ZONE, zone_max_open: 1, ..Config::default() }
}

fn over(backing: Arc<dyn Device>) -> Zones {
    Zones::new(backing, config(), StateLocation::Volatile, None).unwrap()
}

fn state(zones: &Zones, zone: u64) -> (ZoneCondition, u64) {
    let mut found: Option<Zone> = None;
    zones
        .report(zone * ZONE, &mut |row| {
            found = Some(row);
            false
        })
        .unwrap();
    let row = found.unwrap();
    (row.condition, (row.write_pointer - row.start) / BLOCK)
}

fn write(zones: &Zones, zone: u64, at: u64, blocks: u64) -> Result<()> {
    zones.write_at(zone * ZONE + at * BLOCK, &vec![3; (blocks * BLOCK) as usize], Flags::empty())
}

/// Submits a request. Returns the receiver of its result.
fn submit(zones: &Zones, request: Request) -> mpsc::Receiver<Result<()>> {
    let (tx, rx) = mpsc::channel();
    let len = if matches!(request.op, Op::Read | Op::Write) { request.len } else { 0 };
    let done = Completion::new(move |outcome, _| tx.send(outcome).unwrap_or(()));
    zones.submit(request, IoBuf::zeroed(len as usize).unwrap(), done);
    rx
}

const PATIENCE: Duration = Duration::from_secs(20);

#[test]
fn failed_write_keeps_the_write_pointer() {
    for inline in [true, false] {
        let disk = FaultyDisk::new(SIZE as usize, BLOCK as u32);
        let disk = Arc::new(if inline { disk.inline() } else { disk });
        let zones = over(Arc::clone(&disk) as _);
        write(&zones, 1, 0, 2).unwrap();
        zones.zone_op(ZoneOp::Close, ZONE).unwrap();
        disk.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Fail(Error::NoSpace));
        // As in the kernel, a closed zone stays open after its failed write. An empty zone becomes
        // empty again and releases its resources.
        assert_eq!(write(&zones, 0, 0, 1), Err(Error::NoSpace));
        assert_eq!(state(&zones, 0), (ZoneCondition::Empty, 0));
        assert_eq!(zones.counts().open(), 0);
        assert_eq!(write(&zones, 1, 2, 1), Err(Error::NoSpace));
        assert_eq!(state(&zones, 1), (ZoneCondition::ImplicitOpen, 2));
        zones.zone_op(ZoneOp::Open, 0).unwrap();
        assert_eq!(write(&zones, 0, 0, 1), Err(Error::NoSpace));
        assert_eq!(state(&zones, 0), (ZoneCondition::ExplicitOpen, 0));
        zones.zone_op(ZoneOp::Close, 0).unwrap();
        disk.heal();
        // The data of a torn write is not visible, and the zone continues at the old write pointer.
        disk.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Tear);
        assert_eq!(write(&zones, 1, 2, 4), Err(Error::Media));
        assert_eq!(state(&zones, 1), (ZoneCondition::ImplicitOpen, 2));
        let mut found = vec![0; BLOCK as usize];
        zones.read_at(ZONE + 2 * BLOCK, &mut found).unwrap();
        assert!(found.iter().all(|&byte| byte == 0xFF));
        disk.heal();
        write(&zones, 1, 2, 6).unwrap();
        assert_eq!(state(&zones, 1), (ZoneCondition::Full, 8));
        assert_eq!((zones.counts().open(), zones.counts().ops.errors), (0, 4));
        assert_eq!(disk.violations(), Vec::<String>::new());
    }
}

#[test]
fn reset_with_failed_zeroes_is_a_reset() {
    let disk = Arc::new(FaultyDisk::new(SIZE as usize, BLOCK as u32).inline());
    let zones = over(Arc::clone(&disk) as _);
    write(&zones, 2, 0, 3).unwrap();
    disk.fault(Some(Op::WriteZeroes), FaultSchedule::Always, FaultEffect::Fail(Error::Media));
    assert_eq!(zones.zone_op(ZoneOp::Reset, 2 * ZONE), Err(Error::Media));
    assert_eq!(state(&zones, 2), (ZoneCondition::Empty, 0));
    let mut found = vec![0; BLOCK as usize];
    zones.read_at(2 * ZONE, &mut found).unwrap();
    assert!(found.iter().all(|&byte| byte == 0xFF), "old data does not come back");
}

#[test]
fn bad_blocks() {
    for partial_io in [false, true] {
        let memory = Arc::new(Memory::new(null::Config::plain(SIZE, BLOCK as u32)).unwrap());
        let bad = Arc::new(BadBlocks::new(memory, BadBlocksConfig { once: false, partial_io }));
        // The bad sector is inside block 3 of zone 1.
        let sector = (ZONE + 3 * BLOCK) / 512 + 2;
        bad.change(&format!("+{sector}-{sector}")).unwrap();
        let zones =
            Zones::new(Arc::clone(&bad) as _, config(), StateLocation::Volatile, Some(Arc::clone(&bad)))
                .unwrap();
        assert_eq!(write(&zones, 1, 0, 5), Err(Error::Media));
        // The write pointer moves over the transferred blocks. If none were transferred, an empty
        // zone stays empty.
        let expected = if partial_io { (ZoneCondition::ImplicitOpen, 3) } else { (ZoneCondition::Empty, 0) };
        assert_eq!(state(&zones, 1), expected);
        // A write at a wrong position fails with a write pointer error, even if it would also hit
        // the bad block.
        assert_eq!(write(&zones, 1, 5, 1), Err(Error::ZoneWritePointer));
        if !partial_io {
            write(&zones, 1, 0, 3).unwrap();
        }
        let mut found = vec![0; 3 * BLOCK as usize];
        zones.read_at(ZONE, &mut found).unwrap();
        assert!(found.iter().all(|&byte| byte == 3));
        assert_eq!(write(&zones, 1, 3, 1), Err(Error::Media));
        assert_eq!(state(&zones, 1), (ZoneCondition::ImplicitOpen, 3));
        // A read of the bad block fails, although the block is beyond the write pointer.
        assert_eq!(zones.read_at(ZONE + 3 * BLOCK, &mut found[..BLOCK as usize]), Err(Error::Media));
        // A reset succeeds although the zone has a bad block.
        zones.zone_op(ZoneOp::Reset, ZONE).unwrap();
        write(&zones, 1, 0, 3).unwrap();
        bad.change(&format!("-{sector}-{sector}")).unwrap();
        write(&zones, 1, 3, 5).unwrap();
        assert_eq!(state(&zones, 1), (ZoneCondition::Full, 8));
    }
}

#[test]
fn requests_wait_for_a_busy_zone() {
    let disk = Arc::new(FaultyDisk::new(SIZE as usize, BLOCK as u32));
    let zones = Arc::new(over(Arc::clone(&disk) as _));
    disk.fault(Some(Op::Write), FaultSchedule::At(0), FaultEffect::Hang);
    let first = submit(&zones, Request::write(0, BLOCK));
    disk.wait_held(1);
    // The zone is busy: an inline try would block, and a submitted request waits. A write to
    // another zone succeeds, and closes this zone because of the limit of open zones.
    let tried = zones.try_io(&Request::write(BLOCK, BLOCK), Buffer::Write(&vec![0; BLOCK as usize]));
    assert_eq!(tried, Ok(TryResult::WouldBlock));
    let second = submit(&zones, Request::write(BLOCK, BLOCK));
    let wrong = submit(&zones, Request::write(5 * BLOCK, BLOCK));
    write(&zones, 3, 0, 1).unwrap();
    assert_eq!(
        (state(&zones, 0), state(&zones, 3).0),
        ((ZoneCondition::Closed, 0), ZoneCondition::ImplicitOpen)
    );
    let op = std::thread::spawn({
        let zones = Arc::clone(&zones);
        move || zones.zone_op(ZoneOp::Finish, 0)
    });
    assert!(second.recv_timeout(Duration::from_millis(50)).is_err());
    // Reads do not wait for the write in flight, and do not return its data.
    let mut found = vec![0; BLOCK as usize];
    zones.read_at(0, &mut found).unwrap();
    assert!(found.iter().all(|&byte| byte == 0xFF));
    disk.heal();
    assert_eq!(first.recv_timeout(PATIENCE), Ok(Ok(())));
    assert_eq!(second.recv_timeout(PATIENCE), Ok(Ok(())));
    assert_eq!(wrong.recv_timeout(PATIENCE), Ok(Err(Error::ZoneWritePointer)));
    assert_eq!(op.join().unwrap(), Ok(()));
    assert_eq!(state(&zones, 0), (ZoneCondition::Full, 8));
    assert!(zones.counts().open() <= 1);
}

#[test]
fn waiting_requests_complete_if_the_device_is_dropped() {
    let disk = Arc::new(FaultyDisk::new(SIZE as usize, BLOCK as u32));
    let zones = over(Arc::clone(&disk) as _);
    disk.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Hang);
    let mut completions: Vec<_> =
        (0..4).map(|at| submit(&zones, Request::write(at * BLOCK, BLOCK))).collect();
    let (tx, rx) = mpsc::channel();
    let data = IoBuf::zeroed(BLOCK as usize).unwrap();
    zones.submit_append(0, data, Flags::empty(), Box::new(move |outcome| tx.send(outcome).unwrap_or(())));
    disk.wait_held(1);
    drop(zones);
    disk.heal();
    let first = completions.remove(0);
    assert_eq!(first.recv_timeout(PATIENCE), Ok(Ok(())));
    for completion in completions {
        assert!(matches!(completion.recv_timeout(PATIENCE), Ok(Ok(()) | Err(Error::Gone))));
    }
    assert!(matches!(rx.recv_timeout(PATIENCE), Ok(Ok(_) | Err(Error::Gone))));
}

#[test]
fn power_cut_updates_the_zones() {
    let disk = Arc::new(FaultyDisk::new(SIZE as usize, BLOCK as u32).inline());
    let power = Arc::new(Power::new(Arc::clone(&disk) as _, power::Config::default()).unwrap());
    let zones = over(Arc::clone(&power) as _);
    write(&zones, 1, 0, 4).unwrap();
    zones.flush().unwrap();
    write(&zones, 2, 0, 4).unwrap();
    let cut = zones.power_cut(&power, 5).unwrap();
    assert_eq!(cut.seed, 5);
    assert_eq!(state(&zones, 1), (ZoneCondition::Closed, 4));
    assert!(state(&zones, 2).1 <= 4 && zones.counts().open() == 0);
    assert_eq!(power.unflushed_bytes(), 0);
    write(&zones, 1, 4, 1).unwrap();
}

#[test]
fn zones_over_null_device_and_their_geometry() {
    let null = || Arc::new(Null::new(null::Config::plain(SIZE, BLOCK as u32)).unwrap());
    let zones =
        Zones::new(null(), Config { stores: false, ..config() }, StateLocation::Volatile, None).unwrap();
    let geometry = zones.geometry();
    assert_eq!((geometry.discard_granularity, geometry.zones.unwrap().max_open), (0, 1));
    // The null device stores nothing, and reads return its zeroes, even beyond the write pointer.
    let mut found = vec![1; BLOCK as usize];
    zones.read_at(ZONE, &mut found).unwrap();
    assert!(found.iter().all(|&byte| byte == 0));
    let unread = Request::read(ZONE, BLOCK).with(Flags::UNREAD);
    found.fill(9);
    assert_eq!(zones.try_io(&unread, Buffer::Read(&mut found)), Ok(TryResult::Done));
    assert!(found.iter().all(|&byte| byte == 9), "the buffer is left as it is");
    zones.set_offline(0).unwrap();
    assert_eq!(zones.read_at(0, &mut found), Err(Error::ZoneCondition));
    // A configuration with a limit of 0 disables appends.
    let none =
        Zones::new(null(), Config { zone_append_max: 0, ..config() }, StateLocation::Volatile, None).unwrap();
    assert_eq!(none.try_append(0, &[0; 4096], Flags::empty()), Err(Error::Unsupported));
    assert_eq!(none.geometry().zones.unwrap().max_append, 0);
}

#[test]
fn read_only_device_has_no_zone_operations() {
    let zones = over(Arc::new(Model::read_only(vec![0; SIZE as usize], BLOCK as u32)));
    assert_eq!(write(&zones, 0, 0, 1), Err(Error::ReadOnly));
    for op in [ZoneOp::Open, ZoneOp::Close, ZoneOp::Finish, ZoneOp::Reset] {
        assert_eq!(zones.zone_op(op, 0), Err(Error::ReadOnly));
    }
    assert_eq!(zones.try_append(0, &[0; 4096], Flags::empty()), Err(Error::ReadOnly));
    let completions = [zones.reset_all(), zones.wipe(), zones.set_offline(0), zones.set_read_only(0)];
    assert_eq!(completions, [Err(Error::ReadOnly); 4]);
    assert_eq!(zones.counts().empty, 8);
}
