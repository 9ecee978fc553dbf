//! Zone states (the saved write pointers and conditions) whose writes fail, with or without effect.
//! Requests that complete later must still be durable after a crash.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use freestone_core::device::zoned::{ZoneCondition, ZoneOp, Zoned};
use freestone_core::device::{Blocking, Device, Error, Flags, Op};
use freestone_drive::null::{self, Memory};
use freestone_drive::power::{self, Power};
use freestone_drive::zone::{Config, StateLocation, Zones};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Model, Rng, TestDevice};

const BLOCK: u64 = 512;
const ZONE: u64 = 32 << 10;
const ZONES: u64 = 4;
const SIZE: u64 = ZONE * ZONES;
/// Size in bytes of the state of fewer than 511 zones.
const STATE_BYTES: u64 = 3 * 4096;
const NONE: Flags = Flags::empty();

fn open(data: Arc<dyn Device>, state: Arc<dyn Device>) -> Zones {
    let config = Config { zone_size: ZONE, ..Config::default() };
    Zones::new(data, config, StateLocation::Device(state), None).unwrap()
}

fn read_all(device: &dyn Device) -> Vec<u8> {
    let mut bytes = vec![0; device.geometry().size as usize];
    device.read_at(0, &mut bytes).unwrap();
    bytes
}

fn copy_of(device: &dyn Device) -> Arc<Model> {
    let model = Model::new(device.geometry().size as usize, BLOCK as u32);
    model.write_at(0, &read_all(device), NONE).unwrap();
    Arc::new(model)
}

/// Zones whose data is on a reliable disk, and whose state is on a disk with faults.
struct Setup {
    data: Arc<Model>,
    state: Arc<FaultyDisk>,
    zones: Zones,
}

impl Setup {
    fn new() -> Self {
        let data = Arc::new(Model::new(SIZE as usize, BLOCK as u32));
        let state = Arc::new(FaultyDisk::new(STATE_BYTES as usize, BLOCK as u32));
        let zones = open(data.clone(), state.clone());
        Self { data, state, zones }
    }

    /// Returns the zones as they open after a crash, from the bytes that are on both disks now.
    fn crash(&self) -> Zones {
        open(copy_of(&*self.data), copy_of(&*self.state))
    }

    /// Makes these requests to the state's disk fail, although they have their effect.
    fn fail_with_effect(&self, op: Op) {
        self.state.fault(Some(op), FaultSchedule::Always, FaultEffect::FailDone(Error::Media));
    }
}

/// Returns the write pointer of a zone, in bytes from the start of the zone.
fn pointer(zones: &Zones, zone: u64) -> u64 {
    let mut pointer = 0;
    zones
        .report(zone * ZONE, &mut |row| {
            pointer = row.write_pointer - row.start;
            false
        })
        .unwrap();
    pointer
}

fn content(zone: u64, generation: u64, block: u64) -> Vec<u8> {
    let word = (zone + 1) << 48 | generation << 16 | block;
    word.to_le_bytes().repeat((BLOCK / 8) as usize)
}

#[test]
fn reset_after_failed_flush_resets_the_pointer_on_disk() {
    for op in [Op::Write, Op::Flush] {
        let setup = Setup::new();
        setup.zones.write_at(0, &[7; 8192], NONE).unwrap();
        setup.fail_with_effect(op);
        assert_eq!(setup.zones.flush(), Err(Error::Media), "{op:?}");
        setup.state.heal();
        setup.zones.zone_op(ZoneOp::Reset, 0).unwrap();
        let zones = setup.crash();
        assert_eq!(pointer(&zones, 0), 0, "{op:?}: a write pointer over zeroes");
        setup.zones.flush().unwrap();
        assert_eq!(pointer(&setup.crash(), 0), 0, "{op:?}: a write pointer over zeroes, after a flush");
    }
}

#[test]
fn flush_after_failed_reset_keeps_durable_data() {
    for op in [Op::Write, Op::Flush] {
        for fua in [false, true] {
            let setup = Setup::new();
            setup.zones.write_at(0, &[7; 4096], NONE).unwrap();
            setup.zones.flush().unwrap();
            setup.fail_with_effect(op);
            assert_eq!(setup.zones.zone_op(ZoneOp::Reset, 0), Err(Error::Media), "{op:?}");
            setup.state.heal();
            assert_eq!(pointer(&setup.zones, 0), 4096);
            if fua {
                // A FUA write, even to another zone, flushes the whole device.
                setup.zones.write_at(ZONE, &[8; 512], Flags::FUA).unwrap();
            } else {
                setup.zones.flush().unwrap();
            }
            let zones = setup.crash();
            assert_eq!(pointer(&zones, 0), 4096, "{op:?}, fua {fua}: durable data is gone");
            let mut found = [0; 4096];
            zones.read_at(0, &mut found).unwrap();
            assert_eq!(found, [7; 4096]);
        }
    }
}

/// If it is uncertain which state is on disk, each flush writes the state again, and fails if that
/// fails.
#[test]
fn uncertain_state_is_written_by_the_next_flush() {
    let setup = Setup::new();
    setup.zones.write_at(0, &[7; 4096], NONE).unwrap();
    setup.zones.flush().unwrap();
    setup.fail_with_effect(Op::Flush);
    assert_eq!(setup.zones.zone_op(ZoneOp::Reset, 0), Err(Error::Media));
    for nth in 0..3 {
        assert_eq!(setup.zones.flush(), Err(Error::Media));
        assert_eq!(setup.zones.write_at(ZONE + nth * BLOCK, &[8; 512], Flags::FUA), Err(Error::Media));
    }
    setup.state.heal();
    setup.zones.flush().unwrap();
    assert_eq!(pointer(&setup.crash(), 0), 4096);
    // The state on disk is certain now, so another flush writes nothing.
    let writes = setup.state.counts().writes;
    setup.zones.flush().unwrap();
    assert_eq!(setup.state.counts().writes, writes);
}

#[test]
fn failed_wipe_leaves_zones_unchanged() {
    let setup = Setup::new();
    setup.zones.write_at(0, &[7; 8192], NONE).unwrap();
    setup.zones.flush().unwrap();
    setup.fail_with_effect(Op::Flush);
    assert_eq!(setup.zones.wipe(), Err(Error::Media));
    setup.state.heal();
    // The write pointer did not move back, because the old pointer may still be on disk.
    assert_eq!(pointer(&setup.zones, 0), 8192);
    setup.zones.flush().unwrap();
    assert_eq!(pointer(&setup.crash(), 0), 8192);
    setup.zones.wipe().unwrap();
    assert_eq!((pointer(&setup.zones, 0), pointer(&setup.crash(), 0)), (0, 0));
}

/// A power cut is refused as long as it is unknown which state would survive.
#[test]
fn power_cut_fails_while_the_state_is_uncertain() {
    let memory = Arc::new(Memory::new(null::Config::plain(SIZE, BLOCK as u32)).unwrap());
    let power = Arc::new(Power::new(memory, power::Config::default()).unwrap());
    let state = Arc::new(FaultyDisk::new(STATE_BYTES as usize, BLOCK as u32));
    let zones = open(power.clone(), state.clone());
    zones.write_at(0, &[7; 8192], NONE).unwrap();
    state.fault(Some(Op::Flush), FaultSchedule::Always, FaultEffect::FailDone(Error::Media));
    assert_eq!(zones.flush(), Err(Error::Media));
    assert_eq!(zones.power_cut(&power, 1).map(drop), Err(Error::Media));
    assert_eq!(pointer(&zones, 0), 8192);
    state.heal();
    let _ = zones.power_cut(&power, 1).unwrap();
    let left = pointer(&zones, 0);
    zones.flush().unwrap();
    assert_eq!(pointer(&open(copy_of(&*power), copy_of(&*state)), 0), left);
}

/// Random operations run while the state's disk fails in every way. After each operation, a crash
/// is checked.
#[test]
fn crash_keeps_durable_data_and_valid_pointers() {
    let mut failed = 0;
    for seed in 0..6 {
        let setup = Setup::new();
        let mut rng = Rng::new(seed);
        let mut generations = [0_u64; ZONES as usize];
        let mut written = [0_u64; ZONES as usize];
        // Number of blocks of each zone that a crash must keep. None after a failed reset, which
        // may have taken effect.
        let mut durable = [Some(0_u64); ZONES as usize];
        for round in 0..150 {
            setup.state.heal();
            if rng.chance(60) {
                let op = [Op::Write, Op::Flush][rng.below(2) as usize];
                let what =
                    [FaultEffect::FailDone(Error::Media), FaultEffect::Fail(Error::Media), FaultEffect::Tear];
                setup.state.fault(Some(op), FaultSchedule::Always, what[rng.below(3) as usize]);
            }
            let zone = rng.below(ZONES);
            let at = zone as usize;
            let outcome = match rng.below(10) {
                0..=4 => {
                    let data: Vec<u8> = (0..=rng.below(3))
                        .flat_map(|nth| content(zone, generations[at], written[at] + nth))
                        .collect();
                    if written[at] * BLOCK + data.len() as u64 <= ZONE {
                        setup.zones.write_at(zone * ZONE + written[at] * BLOCK, &data, NONE).unwrap();
                        written[at] += data.len() as u64 / BLOCK;
                    }
                    Ok(())
                }
                5..=7 => setup.zones.flush().map(|()| {
                    durable = written.map(Some);
                }),
                _ => {
                    let outcome = setup.zones.zone_op(ZoneOp::Reset, zone * ZONE);
                    if outcome.is_ok() {
                        generations[at] += 1;
                        (written[at], durable[at]) = (0, Some(0));
                    } else {
                        durable[at] = None;
                    }
                    outcome
                }
            };
            failed += u32::from(outcome.is_err());
            setup.state.heal();
            let zones = setup.crash();
            for zone in 0..ZONES {
                let context = format!("seed {seed}, round {round}, zone {zone}");
                let found = pointer(&zones, zone) / BLOCK;
                let at = zone as usize;
                assert!(found <= written[at], "{context}: {found} blocks of {}", written[at]);
                assert!(durable[at].is_none_or(|kept| found >= kept), "{context}: {found} of {durable:?}");
                let expected: Vec<u8> =
                    (0..found).flat_map(|block| content(zone, generations[at], block)).collect();
                let mut bytes = vec![0; expected.len()];
                if found > 0 {
                    zones.read_at(zone * ZONE, &mut bytes).unwrap();
                }
                assert!(bytes == expected, "{context}: a write pointer over other data");
            }
        }
    }
    assert!(failed > 50, "{failed} operations failed");
}

// ---- unflushed state read after a restart -------------------------------------------------------

/// The program ends after writing the state, before flushing it. The next program reads that state
/// from the cache, and then the power is cut.
#[test]
fn state_read_at_open_is_durable() {
    for seed in 0..10 {
        let data = Arc::new(Model::new(SIZE as usize, BLOCK as u32));
        let memory = Arc::new(Memory::new(null::Config::plain(STATE_BYTES, BLOCK as u32)).unwrap());
        let power = Power::new(memory, power::Config::default()).unwrap();
        let fails = Arc::new(AtomicBool::new(false));
        let failing = Arc::clone(&fails);
        let state = Arc::new(TestDevice::over(Arc::new(power)).on_try(move |power, request, buffer| {
            let is_failed = request.op == Op::Flush && failing.load(Ordering::SeqCst);
            if is_failed { Err(Error::Media) } else { power.try_io(request, buffer) }
        }));
        let zones = open(data.clone(), state.clone());
        zones.write_at(0, &[7; 8192], NONE).unwrap();
        fails.store(true, Ordering::SeqCst);
        assert_eq!(zones.flush(), Err(Error::Media));
        drop(zones);
        fails.store(false, Ordering::SeqCst);
        let zones = open(data.clone(), state.clone());
        assert_eq!(pointer(&zones, 0), 8192);
        zones.flush().unwrap();
        let _ = state.cut(seed).unwrap();
        drop(zones);
        let zones = open(data, state);
        assert_eq!(pointer(&zones, 0), 8192, "seed {seed}: what was flushed is gone");
        let mut conditions = Vec::new();
        zones
            .report(0, &mut |row| {
                conditions.push(row.condition);
                true
            })
            .unwrap();
        assert_eq!(conditions[0], ZoneCondition::Closed);
    }
}
