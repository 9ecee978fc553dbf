use freestone::device::{Blocking, Completion, ExtentKind, Flags, IoBuf, Op, Request, Result};
use freestone_testkit::conformance;

use super::*;
use crate::oracle::{Durability, Fill, Kind, Oracle, Outcome, fill};
use crate::rt::sync::mpsc;
use crate::rt::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

fn always(set: impl Fn(&mut FaultRates)) -> Plan {
    let mut chances = FaultRates::default();
    set(&mut chances);
    Plan { read: chances, write: chances, clear: chances, flush: chances, delay_max_us: 1000 }
}

fn disk(plan: Plan) -> SimDisk {
    SimDisk::new(DiskConfig { size: 64 << 10, plan, ..DiskConfig::default() }, 5)
}

fn read(disk: &SimDisk, offset: u64, len: usize) -> Result<Vec<u8>> {
    let mut out = vec![0; len];
    disk.read_at(offset, &mut out).map(|()| out)
}

fn submit(disk: &SimDisk, request: Request, data: &[u8]) -> mpsc::Receiver<Result<()>> {
    let (sender, receiver) = mpsc::channel();
    let buffer = IoBuf::copy_of(data).unwrap();
    disk.submit(
        request,
        buffer,
        Completion::new(move |outcome, _| {
            let _ = sender.send(outcome);
        }),
    );
    receiver
}

#[test]
fn disk_without_faults_passes_conformance() {
    let options = conformance::Options { rounds: 100, ..conformance::Options::default() };
    for (logical_block, inline) in [(512, 300), (4096, 1000), (1024, 0)] {
        let config = DiskConfig { logical_block, inline, overlap: true, ..DiskConfig::default() };
        conformance::check("SimDisk", &|| Arc::new(SimDisk::new(config, 3)), options);
    }
}

#[test]
fn disk_with_delays_passes_conformance() {
    let plan = always(|chances| chances.delay = 500);
    let config = DiskConfig { plan, overlap: true, ..DiskConfig::default() };
    let options = conformance::Options { rounds: 60, thread_rounds: 100, ..conformance::Options::default() };
    conformance::check("late SimDisk", &|| Arc::new(SimDisk::new(config, 4)), options);
}

#[test]
fn each_fault_has_its_effect_and_is_counted() {
    let count = |disk: &SimDisk| disk.control().fault_counts();
    let failing = disk(always(|chances| chances.fail = 1000));
    assert_eq!(failing.write_at(0, &[1; 512], Flags::empty()), Err(Error::Media));
    assert_eq!(read(&failing, 0, 512), Err(Error::Media));
    assert_eq!(Blocking::flush(&failing), Err(Error::Media));
    assert_eq!(count(&failing), FaultCounts { failed: 3, ..FaultCounts::default() });
    assert_eq!(failing.control().bytes(), vec![0; 64 << 10]);

    let arrives = disk(always(|chances| chances.fail_done = 1000));
    assert_eq!(arrives.write_at(512, &[1; 512], Flags::empty()), Err(Error::Media));
    assert_eq!(count(&arrives).failed_done, 1);
    assert_eq!(arrives.control().bytes()[512..1024], [1; 512]);

    let partly = disk(always(|chances| chances.fail_partly = 1000));
    let mut torn = 0;
    for round in 1..=20 {
        assert_eq!(partly.write_at(0, &[round; 4096], Flags::empty()), Err(Error::Media));
        let bytes = partly.control().bytes();
        let done = bytes[..4096].chunks(512).filter(|sector| sector == &[round; 512]).count();
        torn += usize::from(done > 0 && done < 8);
    }
    assert!(torn > 5, "{torn} of 20 are torn");
    assert_eq!(count(&partly).errors(), 20);
    assert_eq!(count(&partly).media(), 20);

    let good = disk(Plan::default());
    good.write_at(0, &[9; 8192], Flags::empty()).unwrap();
    good.write_zeroes(4096, 512, Flags::empty()).unwrap();
    Blocking::flush(&good).unwrap();
    assert_eq!(read(&good, 0, 4096).unwrap(), [9; 4096]);
    assert_eq!(read(&good, 4096, 512).unwrap(), [0; 512]);
    assert_eq!(count(&good), FaultCounts::default());
}

#[test]
fn hanging_request_blocks_no_other_until_released() {
    let disk = disk(always(|chances| chances.hang = 1000));
    let first = submit(&disk, Request::write(0, 512), &[1; 512]);
    assert_eq!(disk.control().hanging(), 1);
    disk.control().set_plan(Plan::default());
    disk.write_at(512, &[2; 512], Flags::empty()).unwrap();
    assert_eq!(read(&disk, 0, 512).unwrap(), [0; 512]);
    disk.control().release();
    assert_eq!(first.recv_timeout(PATIENCE), Ok(Ok(())));
    assert_eq!(read(&disk, 0, 512).unwrap(), [1; 512]);
    assert_eq!(disk.control().fault_counts().hung, 1);

    disk.control().set_plan(always(|chances| chances.hang = 1000));
    let last = submit(&disk, Request::write(0, 512), &[3; 512]);
    drop(disk);
    assert_eq!(last.recv_timeout(PATIENCE), Ok(Err(Error::Gone)));
}

#[test]
fn full_disk_fails_writes_until_discard() {
    let disk = disk(Plan::default());
    disk.control().set_free_space(Some(1024));
    disk.write_at(0, &[1; 1024], Flags::empty()).unwrap();
    disk.write_at(0, &[2; 1024], Flags::empty()).unwrap();
    assert_eq!(disk.write_at(512, &[3; 1024], Flags::empty()), Err(Error::NoSpace));
    assert_eq!(read(&disk, 512, 512).unwrap(), [2; 512]);
    disk.discard(0, 512).unwrap();
    disk.write_at(4096, &[3; 512], Flags::empty()).unwrap();
    assert_eq!(disk.control().fault_counts().no_space, 1);
    disk.control().heal();
    disk.write_at(0, &[4; 4096], Flags::empty()).unwrap();
}

#[test]
fn shrunk_disk_fails_requests_beyond_its_end() {
    let disk = disk(Plan::default());
    disk.write_at(0, &[1; 4096], Flags::empty()).unwrap();
    disk.control().shrink_to(Some(2048));
    assert_eq!(disk.geometry().size, 64 << 10);
    assert_eq!(read(&disk, 0, 2048).unwrap(), [1; 2048]);
    assert_eq!(read(&disk, 1024, 2048), Err(Error::Media));
    assert_eq!(disk.write_at(2048, &[1; 512], Flags::empty()), Err(Error::Media));
    assert_eq!(disk.control().fault_counts().shrunk, 2);
    disk.control().grow(128 << 10);
    disk.control().heal();
    disk.write_at((128 << 10) - 512, &[1; 512], Flags::empty()).unwrap();
}

#[test]
fn power_cut_keeps_flushed_data_or_some_version() {
    let mut seen = [0; 4];
    for seed in 0..60 {
        let disk = disk(Plan::default());
        for version in 1..=3 {
            disk.write_at(0, &[version; 512], Flags::empty()).unwrap();
        }
        disk.write_at(512, &[7; 512], Flags::empty()).unwrap();
        disk.write_at(512, &[8; 512], Flags::FUA).unwrap();
        let control = disk.control();
        control.power_cut(seed);
        assert_eq!(disk.write_at(0, &[9; 512], Flags::empty()), Err(Error::Gone));
        let after = control.reopen(seed);
        let version = read(&after, 0, 512).unwrap()[0];
        seen[usize::from(version)] += 1;
        assert_eq!(read(&after, 0, 512).unwrap(), [version; 512]);
        assert_eq!(read(&after, 512, 512).unwrap(), [8; 512]);
    }
    assert!(seen.iter().all(|&count| count > 3), "{seen:?}");
    let disk = disk(Plan::default());
    disk.write_at(0, &[1; 512], Flags::empty()).unwrap();
    Blocking::flush(&disk).unwrap();
    disk.control().power_cut(1);
    assert_eq!(disk.control().bytes()[..512], [1; 512]);
}

#[test]
fn detach_leaves_write_done_torn_or_undone() {
    let mut seen = [0; 3];
    for seed in 0..60 {
        let disk = disk(always(|chances| chances.hang = 1000));
        let answer = submit(&disk, Request::write(0, 4096), &[1; 4096]);
        disk.control().detach(seed);
        assert_eq!(answer.recv_timeout(PATIENCE), Ok(Err(Error::Gone)));
        let done = disk.control().bytes()[..4096].chunks(512).filter(|sector| sector == &[1; 512]).count();
        seen[if done == 0 { 0 } else { 1 + done / 8 }] += 1;
    }
    assert!(seen.iter().all(|&count| count > 5), "{seen:?}");
}

#[test]
fn overlapping_and_invalid_requests_are_reported() {
    let disk = disk(always(|chances| chances.hang = 1000));
    let _one = submit(&disk, Request::write(0, 1024), &[1; 1024]);
    let _two = submit(&disk, Request::write(512, 1024), &[2; 1024]);
    let _three = submit(&disk, Request::write(2048, 512), &[2; 512]);
    assert_eq!(disk.control().violations().len(), 1);
    let refused = submit(&disk, Request::write(64 << 10, 512), &[2; 512]);
    assert_eq!(refused.recv_timeout(PATIENCE), Ok(Err(Error::OutOfRange)));
    assert!(disk.control().violations()[1].contains("out of range"));
}

#[test]
fn extents_report_unwritten_blocks_as_holes() {
    let disk = disk(Plan::default());
    disk.write_at(1024, &[1; 1024], Flags::empty()).unwrap();
    let mut rows = Vec::new();
    let described = disk.extents(512, 4096, &mut |row| {
        rows.push((row.offset, row.len, row.kind));
        true
    });
    assert_eq!(described, Ok(4096));
    assert_eq!(
        rows,
        [(512, 512, ExtentKind::Hole), (1024, 1024, ExtentKind::Data), (2048, 2560, ExtentKind::Hole)]
    );
}

/// The oracle accepts the behaviour of the disk on writes, failures and power cuts. The oracle
/// detects a disk that loses the effect of a flush.
#[test]
fn oracle_accepts_disk_and_detects_lost_flush() {
    let lives = |forgets: bool| {
        let mut wrong = 0;
        for seed in 0..40 {
            wrong += u32::from(life(seed, forgets).is_err());
        }
        wrong
    };
    assert_eq!(lives(false), 0);
    assert!(lives(true) > 10);
}

fn life(seed: u64, forgets: bool) -> std::result::Result<(), String> {
    let mut rng = Rng::new(seed);
    let chances = FaultRates { fail: 50, fail_done: 50, fail_partly: 50, delay: 100, hang: 0 };
    let plan = Plan {
        read: FaultRates::default(),
        write: chances,
        clear: chances,
        flush: chances,
        delay_max_us: 50,
    };
    let mut disk = disk(plan);
    let mut oracle = Oracle::new("disk", 128, Durability::Flushed);
    for serial in 1..300 {
        let start = rng.below(120);
        let range = start..start + 1 + rng.below(8);
        let (offset, len) = (range.start * SECTOR, (range.end - range.start) * SECTOR);
        let fua = if rng.chance(20) { Flags::FUA } else { Flags::empty() };
        let ended = |outcome: Result<()>| match outcome {
            Ok(()) => Outcome::Done { fua: !fua.is_empty() },
            Err(_) => Outcome::Failed,
        };
        match rng.below(20) {
            0..8 => {
                let id = Fill::ALL[rng.below(5) as usize].id(serial);
                let mut data = vec![0; len as usize];
                fill(id, range.start, &mut data);
                let write = oracle.begin_write(id, range, Kind::Write);
                oracle.end(write, ended(disk.write_at(offset, &data, fua)));
            }
            8 => {
                let write = oracle.begin_write(1, range, Kind::Zeroes);
                oracle.end(write, ended(disk.write_zeroes(offset, len, fua)));
            }
            9 => {
                let write = oracle.begin_write(1, range, Kind::Discard { zeroing: true });
                oracle.end(write, ended(disk.run(Request::new(Op::Discard, offset, len).with(fua))));
            }
            10 | 11 => {
                let flush = oracle.begin_flush();
                let done = forgets || Blocking::flush(&disk).is_ok();
                oracle.end_flush(flush, done);
            }
            12 => {
                let power = rng.chance(50);
                if power {
                    disk.control().power_cut(serial);
                } else {
                    disk.control().detach(serial);
                }
                oracle.crash();
                disk = disk.control().reopen(serial);
                disk.control().set_plan(plan);
            }
            _ => {
                let token = oracle.begin_read();
                let data = read(&disk, offset, len as usize).map_err(|error| error.to_string())?;
                oracle.check_read(token, range.start, &data).map_err(|wrong| wrong.to_string())?;
            }
        }
    }
    Ok(())
}
