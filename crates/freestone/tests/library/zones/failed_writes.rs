//! Zones whose state could not be written, or not for certain: a write that was answered with an
//! error may be on disk. Whatever was answered well after it holds after a crash all the same.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use freestone::device::zoned::{ZoneCondition, ZoneOp, Zoned};
use freestone::device::{
    Blocking, Buffer, Completion, Device, Error, Extent, Flags, Geometry, IoBuf, Op, Request, Result, Tried,
};
use freestone::null::{self, Memory};
use freestone::power::{self, Power};
use freestone::zone::{Config, State, Zones};
use freestone_testkit::{Faulty, Model, Rng, What, When};

const BLOCK: u64 = 512;
const ZONE: u64 = 32 << 10;
const ZONES: u64 = 4;
const SIZE: u64 = ZONE * ZONES;
/// Of a state of fewer than 511 zones.
const STATE_BYTES: u64 = 3 * 4096;
const NONE: Flags = Flags::empty();

fn open(data: Arc<dyn Device>, state: Arc<dyn Device>) -> Zones {
    let config = Config { zone_size: ZONE, ..Config::default() };
    Zones::new(data, config, State::Device(state), None).unwrap()
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

/// Zones over a disk that loses nothing, with their state on one that fails as it is told.
struct Setup {
    data: Arc<Model>,
    state: Arc<Faulty>,
    zones: Zones,
}

impl Setup {
    fn new() -> Self {
        let data = Arc::new(Model::new(SIZE as usize, BLOCK as u32));
        let state = Arc::new(Faulty::new(STATE_BYTES as usize, BLOCK as u32));
        let zones = open(data.clone(), state.clone());
        Self { data, state, zones }
    }

    /// What a crash leaves: the bytes that are on both disks now.
    fn crash(&self) -> Zones {
        open(copy_of(&*self.data), copy_of(&*self.state))
    }

    /// From now on the state's disk does what it is asked to, and answers these with errors.
    fn fails_and_arrives(&self, op: Op) {
        self.state.fault(Some(op), When::Always, What::FailDone(Error::Media));
    }
}

/// The write pointer of a zone, in bytes from its start.
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
fn a_reset_after_a_flush_that_failed_leaves_no_write_pointer_over_zeroes() {
    for op in [Op::Write, Op::Flush] {
        let setup = Setup::new();
        setup.zones.write_at(0, &[7; 8192], NONE).unwrap();
        setup.fails_and_arrives(op);
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
fn a_flush_after_a_reset_that_failed_keeps_what_was_durable() {
    for op in [Op::Write, Op::Flush] {
        for fua in [false, true] {
            let setup = Setup::new();
            setup.zones.write_at(0, &[7; 4096], NONE).unwrap();
            setup.zones.flush().unwrap();
            setup.fails_and_arrives(op);
            assert_eq!(setup.zones.zone_op(ZoneOp::Reset, 0), Err(Error::Media), "{op:?}");
            setup.state.heal();
            assert_eq!(pointer(&setup.zones, 0), 4096);
            if fua {
                // In another zone: it is a flush of the whole device.
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

/// A flush that cannot make the state certain fails itself.
#[test]
fn what_is_suspect_stays_so_until_it_was_written() {
    let setup = Setup::new();
    setup.zones.write_at(0, &[7; 4096], NONE).unwrap();
    setup.zones.flush().unwrap();
    setup.fails_and_arrives(Op::Flush);
    assert_eq!(setup.zones.zone_op(ZoneOp::Reset, 0), Err(Error::Media));
    for nth in 0..3 {
        assert_eq!(setup.zones.flush(), Err(Error::Media));
        assert_eq!(setup.zones.write_at(ZONE + nth * BLOCK, &[8; 512], Flags::FUA), Err(Error::Media));
    }
    setup.state.heal();
    setup.zones.flush().unwrap();
    assert_eq!(pointer(&setup.crash(), 0), 4096);
    // It is certain now: another flush writes nothing.
    let writes = setup.state.counts().writes;
    setup.zones.flush().unwrap();
    assert_eq!(setup.state.counts().writes, writes);
}

#[test]
fn zones_are_as_they_were_after_a_wipe_that_failed() {
    let setup = Setup::new();
    setup.zones.write_at(0, &[7; 8192], NONE).unwrap();
    setup.zones.flush().unwrap();
    setup.fails_and_arrives(Op::Flush);
    assert_eq!(setup.zones.wipe(), Err(Error::Media));
    setup.state.heal();
    // Else what is written next would lie below a write pointer that is on disk still.
    assert_eq!(pointer(&setup.zones, 0), 8192);
    setup.zones.flush().unwrap();
    assert_eq!(pointer(&setup.crash(), 0), 8192);
    setup.zones.wipe().unwrap();
    assert_eq!((pointer(&setup.zones, 0), pointer(&setup.crash(), 0)), (0, 0));
}

/// The power is not cut where it is not known what would survive.
#[test]
fn a_cut_needs_a_state_that_is_certain() {
    let memory = Arc::new(Memory::new(null::Config::plain(SIZE, BLOCK as u32)).unwrap());
    let power = Arc::new(Power::new(memory, power::Config::default()).unwrap());
    let state = Arc::new(Faulty::new(STATE_BYTES as usize, BLOCK as u32));
    let zones = open(power.clone(), state.clone());
    zones.write_at(0, &[7; 8192], NONE).unwrap();
    state.fault(Some(Op::Flush), When::Always, What::FailDone(Error::Media));
    assert_eq!(zones.flush(), Err(Error::Media));
    assert_eq!(zones.power_cut(&power, 1).map(drop), Err(Error::Media));
    assert_eq!(pointer(&zones, 0), 8192);
    state.heal();
    let _ = zones.power_cut(&power, 1).unwrap();
    let left = pointer(&zones, 0);
    zones.flush().unwrap();
    assert_eq!(pointer(&open(copy_of(&*power), copy_of(&*state)), 0), left);
}

/// Random work while the state's disk fails in every way, with a crash after each operation.
#[test]
fn no_crash_shows_more_than_there_is_or_loses_what_was_durable() {
    let mut failed = 0;
    for seed in 0..6 {
        let setup = Setup::new();
        let mut rng = Rng::new(seed);
        let mut generations = [0_u64; ZONES as usize];
        let mut written = [0_u64; ZONES as usize];
        // Blocks that a crash must leave. None where a reset was begun that failed: it may have
        // happened.
        let mut durable = [Some(0_u64); ZONES as usize];
        for round in 0..150 {
            setup.state.heal();
            if rng.chance(60) {
                let op = [Op::Write, Op::Flush][rng.below(2) as usize];
                let what = [What::FailDone(Error::Media), What::Fail(Error::Media), What::Tear];
                setup.state.fault(Some(op), When::Always, what[rng.below(3) as usize]);
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

// ---- a state that is read, and not durable ------------------------------------------------------

/// A disk with a volatile cache, whose flushes can be made to fail without effect.
struct Cached {
    power: Power,
    fails: AtomicBool,
}

impl Device for Cached {
    fn geometry(&self) -> Geometry {
        self.power.geometry()
    }
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        if request.op == Op::Flush && self.fails.load(Ordering::SeqCst) {
            return Err(Error::Media);
        }
        self.power.try_io(request, buffer)
    }
    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.power.submit(request, buffer, done);
    }
    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.power.extents(offset, len, row)
    }
}

/// The program ends between writing the state and syncing it; the next one reads it, and then the
/// power goes.
#[test]
fn what_was_read_when_the_zones_were_opened_is_durable() {
    for seed in 0..10 {
        let data = Arc::new(Model::new(SIZE as usize, BLOCK as u32));
        let memory = Arc::new(Memory::new(null::Config::plain(STATE_BYTES, BLOCK as u32)).unwrap());
        let power = Power::new(memory, power::Config::default()).unwrap();
        let state = Arc::new(Cached { power, fails: AtomicBool::new(false) });
        let zones = open(data.clone(), state.clone());
        zones.write_at(0, &[7; 8192], NONE).unwrap();
        state.fails.store(true, Ordering::SeqCst);
        assert_eq!(zones.flush(), Err(Error::Media));
        drop(zones);
        state.fails.store(false, Ordering::SeqCst);
        let zones = open(data.clone(), state.clone());
        assert_eq!(pointer(&zones, 0), 8192);
        zones.flush().unwrap();
        let _ = state.power.cut(seed).unwrap();
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
