//! The power layer over failing devices, with a small cache. Also, the extents of the power layer.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use freestone_core::device::{Blocking, Completion, Device, Error, ExtentKind, Flags, IoBuf, Op, Request};
use freestone_drive::power::{Config, Power};
use freestone_ram::ram::{self, Ram};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Model, ModelZoned, Rng, ZonedConfig};

use crate::power::model::filled;

fn blocks(device: &dyn Device, first: u64, count: usize) -> Vec<u8> {
    let mut data = vec![0; count * 512];
    device.read_at(first * 512, &mut data).unwrap();
    data
}

#[test]
fn failed_write_below_is_reported_kept_and_retried() {
    for inline in [false, true] {
        let disk = FaultyDisk::new(1 << 20, 512);
        let disk = Arc::new(if inline { disk.inline() } else { disk });
        let device = Power::new(disk.clone(), Config::default()).unwrap();
        device.write_at(0, &filled(1, 40), Flags::empty()).unwrap();
        disk.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Fail(Error::Media));
        assert_eq!(device.flush(), Err(Error::Media));
        assert_eq!(device.flush(), Err(Error::Media), "the next flush does not forget it");
        assert_eq!(device.keep(0, 512), Err(Error::Media));
        assert_eq!(blocks(&device, 0, 40), filled(1, 40));
        // A failed FUA write leaves the cached content unchanged.
        assert_eq!(device.write_at(0, &filled(90, 2), Flags::FUA), Err(Error::Media));
        assert_eq!(blocks(&device, 0, 40), filled(1, 40));
        disk.heal();
        device.flush().unwrap();
        assert_eq!(device.unflushed_bytes(), 0);
        assert_eq!(blocks(&*disk, 0, 40), filled(1, 40));
        // The writes of a flush succeed, but the flush of the disk itself fails.
        disk.fault(Some(Op::Flush), FaultSchedule::Always, FaultEffect::Fail(Error::NoSpace));
        assert_eq!(device.flush(), Err(Error::NoSpace));
        disk.heal();
        device.flush().unwrap();
        assert_eq!(disk.violations(), Vec::<String>::new());
    }
}

#[test]
fn full_cache_over_failing_device_recovers() {
    for inline in [false, true] {
        let disk = FaultyDisk::new(1 << 20, 512);
        let disk = Arc::new(if inline { disk.inline() } else { disk });
        let device = Power::new(disk.clone(), Config { capacity: 8192, ..Config::default() }).unwrap();
        disk.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Fail(Error::Media));
        device.write_at(0, &filled(1, 16), Flags::empty()).unwrap();
        assert_eq!(device.write_at(1 << 19, &filled(50, 16), Flags::empty()), Err(Error::Media));
        assert_eq!(blocks(&device, 0, 16), filled(1, 16));
        assert_eq!(device.unflushed_bytes(), 8192);
        disk.heal();
        device.write_at(1 << 19, &filled(50, 16), Flags::empty()).unwrap();
        assert!(device.unflushed_bytes() <= 8192);
        device.flush().unwrap();
        assert_eq!(blocks(&*disk, 0, 16), filled(1, 16));
        assert_eq!(blocks(&*disk, 1024, 16), filled(50, 16));
    }
}

/// The device under the power layer completes writes inline, like a RAM disk. For each write to the
/// power layer, a failed write below is retried once.
#[test]
fn write_waiting_for_cache_fails_if_device_fails() {
    let disk = ram::Config { disksize: 8 << 20, mem_limit: 256 << 10, ..ram::Config::default() };
    let ram = Ram::new(disk).unwrap();
    let power = Power::new(Arc::new(ram.clone()), Config { capacity: 1 << 20, ..Config::default() }).unwrap();
    let mut noise = vec![0; 4 << 20];
    Rng::new(1).fill(&mut noise);
    let (tx, rx) = mpsc::channel();
    let done = Completion::new(move |outcome, _| tx.send(outcome).unwrap());
    power.submit(Request::write(0, noise.len() as u64), IoBuf::copy_of(&noise).unwrap(), done);
    let Ok(outcome) = rx.recv_timeout(Duration::from_secs(60)) else {
        // Dropping the device would wait for the hanging write.
        std::mem::forget(power);
        panic!("the write does not end");
    };
    assert_eq!(outcome, Err(Error::NoSpace));
    ram.set_mem_limit(0);
    power.write_at(0, &noise, Flags::empty()).unwrap();
    power.flush().unwrap();
    let mut back = vec![0; noise.len()];
    ram.read_at(0, &mut back).unwrap();
    assert!(back == noise);
}

#[test]
fn hung_block_below_delays_only_its_own_requests() {
    let disk = Arc::new(FaultyDisk::new(1 << 20, 512));
    let device = Arc::new(Power::new(disk.clone(), Config::default()).unwrap());
    disk.fault(Some(Op::Write), FaultSchedule::At(0), FaultEffect::Hang);
    let hung = {
        let device = Arc::clone(&device);
        thread::spawn(move || device.write_at(0, &filled(7, 1), Flags::FUA))
    };
    disk.wait_held(1);
    device.write_at(4096, &filled(8, 1), Flags::FUA).unwrap();
    device.write_at(8192, &filled(9, 1), Flags::empty()).unwrap();
    device.flush().unwrap();
    // The cache accepts a write to the hanging block at once, and keeps it as the newer content.
    device.write_at(0, &filled(10, 1), Flags::empty()).unwrap();
    assert_eq!(blocks(&*device, 0, 1), filled(10, 1));
    thread::sleep(Duration::from_millis(5));
    assert!(!hung.is_finished());
    disk.heal();
    hung.join().unwrap().unwrap();
    assert_eq!(blocks(&*device, 0, 1), filled(10, 1));
    device.flush().unwrap();
    assert_eq!(blocks(&*disk, 0, 1), filled(10, 1));
    assert_eq!(disk.violations(), Vec::<String>::new());
}

#[test]
fn cache_stays_within_its_capacity() {
    let disk = Arc::new(FaultyDisk::new(4 << 20, 512));
    let device = Power::new(disk.clone(), Config { capacity: 64 << 10, ..Config::default() }).unwrap();
    for round in 0..20 {
        device.write_at(round * 100_352, &filled(round * 1000, 196), Flags::empty()).unwrap();
        assert!(device.unflushed_bytes() <= 64 << 10);
    }
    for round in 0..20 {
        assert_eq!(blocks(&device, round * 196, 196), filled(round * 1000, 196));
    }
    assert_eq!(disk.counts().flushes, 0, "making room is no flush");
}

#[test]
fn long_zeroes_bypass_the_cache() {
    let model = Arc::new(Model::new(8 << 20, 512));
    let device = Power::new(model.clone(), Config::default()).unwrap();
    device.write_at(0, &filled(1, 100), Flags::empty()).unwrap();
    device.flush().unwrap();
    device.write_at(0, &filled(500, 50), Flags::empty()).unwrap();
    device.discard(512, 1024).unwrap();
    assert_eq!(blocks(&device, 1, 2), [0; 1024]);
    assert_eq!(blocks(&*model, 0, 100), filled(1, 100), "nothing of that is below");
    device.discard(0, 4 << 20).unwrap();
    assert_eq!(device.unflushed_bytes(), 0);
    assert_eq!(blocks(&*model, 0, 100), vec![0; 51200]);
}

#[test]
fn extents_show_unflushed_data() {
    let model = Arc::new(Model::new(1 << 20, 512));
    let device = Power::new(model, Config::default()).unwrap();
    device.write_at(4096, &filled(1, 2), Flags::FUA).unwrap();
    device.write_at(8192, &filled(3, 1), Flags::empty()).unwrap();
    device.write_zeroes(4096, 512, Flags::empty()).unwrap();
    let mut rows = Vec::new();
    let mut at = 0;
    while at < 1 << 20 {
        at += device
            .extents(at, (1 << 20) - at, &mut |extent| {
                rows.push(extent);
                true
            })
            .unwrap();
    }
    let not_holes: Vec<_> = rows.iter().filter(|row| row.kind != ExtentKind::Hole).collect();
    let seen: Vec<_> = not_holes.iter().map(|row| (row.offset, row.len, row.kind)).collect();
    let expected =
        [(4096, 512, ExtentKind::Zero), (4608, 512, ExtentKind::Data), (8192, 512, ExtentKind::Data)];
    assert_eq!(seen, expected);
}

#[test]
fn zoned_device_below_is_refused() {
    let config = ZonedConfig {
        zone_size: 1 << 20,
        zone_capacity: 1 << 20,
        nr_zones: 4,
        conventional: 0,
        max_open: 0,
        max_active: 0,
    };
    let refused = Power::new(Arc::new(ModelZoned::new(config)), Config::default());
    assert!(refused.unwrap_err().to_string().contains("zones"));
}

#[test]
#[ignore = "slow lane"]
fn cut_over_hung_device_times_out_and_can_be_retried() {
    let disk = Arc::new(FaultyDisk::new(1 << 20, 512));
    let device = Power::new(disk.clone(), Config::default()).unwrap();
    disk.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Hang);
    device.write_at(0, &filled(1, 40), Flags::empty()).unwrap();
    thread::scope(|scope| {
        let flush = scope.spawn(|| device.flush());
        disk.wait_held(1);
        assert_eq!(device.cut(1).err(), Some(Error::Gone));
        // A failed cut leaves the power on, and all data is readable.
        assert_eq!(blocks(&device, 0, 40), filled(1, 40));
        disk.heal();
        let _ = flush.join().unwrap();
    });
    device.flush().unwrap();
    let cut = device.cut(1).unwrap();
    assert_eq!((cut.kept_blocks, cut.lost_blocks), (0, 0));
    assert_eq!(blocks(&*disk, 0, 40), filled(1, 40));
}
