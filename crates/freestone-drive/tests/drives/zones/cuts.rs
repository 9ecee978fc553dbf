//! Zoned devices over a power layer, with failures of the device during or after a power cut.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use freestone_core::device::zoned::{ZoneOp, Zoned};
use freestone_core::device::{Blocking, Completion, Device, Error, Flags, IoBuf, Request};
use freestone_drive::null::{self, Memory};
use freestone_drive::power::{self, Power};
use freestone_drive::zone::{Config, StateLocation, Zones};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk};

const BLOCK: u64 = 512;
const ZONE: u64 = 32 << 10;
const ZONES: u64 = 4;
const SIZE: u64 = ZONE * ZONES;
const WRITTEN: u64 = 20;
const SOON: Duration = Duration::from_secs(20);

fn over(power: &Arc<Power>) -> Zones {
    let config = Config { zone_size: ZONE, ..Config::default() };
    Zones::new(Arc::clone(power) as _, config, StateLocation::Volatile, None).unwrap()
}

fn byte(zone: u64, block: u64) -> u8 {
    (zone * 50 + block + 1) as u8
}

fn fill(zones: &Zones) {
    for zone in 0..ZONES {
        let data: Vec<u8> = (0..WRITTEN).flat_map(|block| [byte(zone, block); BLOCK as usize]).collect();
        zones.write_at(zone * ZONE, &data, Flags::empty()).unwrap();
    }
}

/// Returns each zone's write pointer, in blocks from the start of the zone. Panics if the data
/// below a pointer differs from the written data.
fn pointers(zones: &Zones, what: &str) -> Vec<u64> {
    let mut pointers = Vec::new();
    zones
        .report(0, &mut |row| {
            pointers.push((row.write_pointer - row.start) / BLOCK);
            true
        })
        .unwrap();
    for (zone, &pointer) in (0..).zip(&pointers) {
        for block in 0..pointer {
            let mut found = [0; BLOCK as usize];
            zones.read_at(zone * ZONE + block * BLOCK, &mut found).unwrap();
            assert_eq!(found, [byte(zone, block); BLOCK as usize], "{what}: zone {zone}, block {block}");
        }
    }
    pointers
}

/// For each n, the device under the power layer fails from its n-th request during the cut.
#[test]
fn failed_cut_leaves_no_pointer_above_lost_data() {
    let (mut failed, mut lost) = (0, 0);
    for from in 0..40 {
        let below = Arc::new(FaultyDisk::new(SIZE as usize, BLOCK as u32).inline());
        let power = Arc::new(Power::new(below.clone(), power::Config::default()).unwrap());
        let zones = over(&power);
        fill(&zones);
        below.fault(None, FaultSchedule::From(from), FaultEffect::Fail(Error::NoSpace));
        failed += u32::from(zones.power_cut(&power, from).is_err());
        below.heal();
        let after = pointers(&zones, "after the cut");
        lost += u32::from(after.iter().sum::<u64>() < ZONES * WRITTEN);
        zones.flush().unwrap();
        let _ = zones.power_cut(&power, 1).unwrap();
        assert_eq!(pointers(&zones, "after another one"), after, "what was flushed stays");
    }
    assert!(failed > 5 && lost > 5, "{failed} cuts failed, {lost} lost something");
}

#[test]
fn finish_after_a_cut_does_not_show_lost_data() {
    for seed in 0..20 {
        let memory = Arc::new(Memory::new(null::Config::plain(SIZE, BLOCK as u32)).unwrap());
        let power = Arc::new(Power::new(memory, power::Config::default()).unwrap());
        let zones = over(&power);
        fill(&zones);
        zones.power_cut(&power, seed).unwrap();
        let after = pointers(&zones, "after the cut");
        for (zone, pointer) in (0..).zip(after) {
            zones.zone_op(ZoneOp::Finish, zone * ZONE).unwrap();
            let mut tail = vec![1; (ZONE - pointer * BLOCK) as usize];
            zones.read_at(zone * ZONE + pointer * BLOCK, &mut tail).unwrap();
            assert!(tail.iter().all(|&byte| byte == 0), "seed {seed}, zone {zone}");
        }
    }
}

/// The completion of a read drops the last reference to the zones, and with it the power layer.
#[test]
fn device_may_be_dropped_by_a_completion() {
    let below = Arc::new(FaultyDisk::new(SIZE as usize, BLOCK as u32));
    let power = Arc::new(Power::new(below.clone(), power::Config::default()).unwrap());
    let zones = over(&power);
    zones.write_at(0, &[7; BLOCK as usize], Flags::FUA).unwrap();
    zones.write_at(ZONE, &[8; BLOCK as usize], Flags::empty()).unwrap();
    below.fault(Some(freestone_core::device::Op::Read), FaultSchedule::Always, FaultEffect::Hang);
    let (tx, rx) = mpsc::channel();
    let done = Completion::new(move |outcome, buffer| tx.send(outcome.map(|()| buffer[0])).unwrap());
    zones.submit(Request::read(0, BLOCK), IoBuf::zeroed(BLOCK as usize).unwrap(), done);
    below.wait_held(1);
    drop((zones, power));
    let healer = Arc::clone(&below);
    let heals = thread::spawn(move || healer.heal());
    assert_eq!(rx.recv_timeout(SOON).unwrap(), Ok(7));
    heals.join().unwrap();
    // The dropped power layer writes its unflushed data to the device in the background.
    let mut found = [0; BLOCK as usize];
    for _ in 0..1000 {
        below.read_at(ZONE, &mut found).unwrap();
        if found[0] == 8 {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("the device did not end");
}
