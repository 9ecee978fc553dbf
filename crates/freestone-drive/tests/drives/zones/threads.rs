//! Many threads use the zones of one device.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use freestone_core::device::zoned::{ZoneCondition, ZoneOp, Zoned};
use freestone_core::device::{Blocking, Device, Error, Flags, IoBuf};
use freestone_drive::null::{self, Memory};
use freestone_drive::zone::{Config, StateLocation, Zones};
use freestone_testkit::{DeferPolicy, DeferringDevice, Model, Rng, scaled};

const BLOCK: u64 = 512;
const ZONE: u64 = 64 * BLOCK;
const ZONES: u64 = 24;
const THREADS: u64 = 4;

fn memory() -> Arc<dyn Device> {
    Arc::new(Memory::new(null::Config::plain(ZONES * ZONE, BLOCK as u32)).unwrap())
}

fn deferred() -> Arc<dyn Device> {
    deferring(DeferPolicy::Sometimes(50))
}

fn deferring(policy: DeferPolicy) -> Arc<dyn Device> {
    let model = Model::new((ZONES * ZONE) as usize, BLOCK as u32);
    Arc::new(DeferringDevice::new(Arc::new(model), policy, 3))
}

fn append(zones: &Zones, zone: u64, data: &[u8]) -> Result<u64, Error> {
    if let Some(at) = zones.try_append(zone * ZONE, data, Flags::empty())? {
        return Ok(at);
    }
    let (tx, rx) = mpsc::channel();
    let data = IoBuf::copy_of(data).unwrap();
    zones.submit_append(zone * ZONE, data, Flags::empty(), Box::new(move |at| tx.send(at).unwrap()));
    rx.recv().unwrap()
}

fn check_limits(zones: &Zones) {
    let geometry = zones.geometry().zones.unwrap();
    let counts = zones.counts();
    assert!(geometry.max_open == 0 || counts.open() <= geometry.max_open, "{counts:?}");
    assert!(geometry.max_active == 0 || counts.active() <= geometry.max_active, "{counts:?}");
}

/// Several threads append to the same zones. Each append gets its own offset and keeps its data,
/// and limits hold at the end.
fn appends(backing: Arc<dyn Device>, max_open: u32, max_active: u32, rounds: u64) {
    let config =
        Config { zone_size: ZONE, zone_max_open: max_open, zone_max_active: max_active, ..Config::default() };
    let zones = Zones::new(backing, config, StateLocation::Volatile, None).unwrap();
    let tags = AtomicU64::new(1);
    let placed: Vec<Vec<(u64, u64, u64)>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|me| {
                let (zones, tags) = (&zones, &tags);
                scope.spawn(move || {
                    let mut rng = Rng::new(me);
                    let mut placed = Vec::new();
                    for _ in 0..rounds {
                        let zone = rng.below(ZONES);
                        if rng.chance(20) {
                            let op = [ZoneOp::Open, ZoneOp::Close][rng.below(2) as usize];
                            let completion = zones.zone_op(op, zone * ZONE);
                            assert!(
                                matches!(
                                    completion,
                                    Ok(())
                                        | Err(Error::ZoneCondition
                                            | Error::ZoneTooManyOpen
                                            | Error::ZoneTooManyActive)
                                ),
                                "{completion:?}"
                            );
                            continue;
                        }
                        let tag = tags.fetch_add(1, Ordering::SeqCst);
                        let blocks = 1 + rng.below(3);
                        let data = tag.to_le_bytes().repeat((blocks * BLOCK / 8) as usize);
                        match append(zones, zone, &data) {
                            Ok(at) => {
                                assert_eq!(at / ZONE, zone);
                                placed.push((at, blocks, tag));
                            }
                            Err(
                                Error::ZoneCondition
                                | Error::ZoneWritePointer
                                | Error::ZoneTooManyOpen
                                | Error::ZoneTooManyActive,
                            ) => {}
                            Err(error) => panic!("an append was answered {error}"),
                        }
                    }
                    placed
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    check_limits(&zones);
    let mut placed = placed.concat();
    placed.sort_unstable();
    let mut pointers: HashMap<u64, u64> = (0..ZONES).map(|zone| (zone, zone * ZONE)).collect();
    for &(at, blocks, tag) in &placed {
        let pointer = pointers.get_mut(&(at / ZONE)).unwrap();
        assert_eq!(at, *pointer, "appends leave no gap and do not overlap");
        *pointer += blocks * BLOCK;
        let mut found = vec![0; (blocks * BLOCK) as usize];
        zones.read_at(at, &mut found).unwrap();
        assert!(found.chunks(8).all(|word| word == tag.to_le_bytes()), "what was appended is there");
    }
    assert!(!placed.is_empty());
    zones
        .report(0, &mut |row| {
            assert_eq!(row.write_pointer, pointers[&(row.start / ZONE)], "{row:?}");
            true
        })
        .unwrap();
    let counted = zones.counts().ops;
    assert_eq!(counted.appends, placed.len() as u64);
    assert_eq!(counted.written_bytes, placed.iter().map(|row| row.1 * BLOCK).sum::<u64>());
}

#[test]
fn appends_with_and_without_limits() {
    for (max_open, max_active) in [(0, 0), (1, 0), (2, 0), (5, 0), (0, 6), (3, 8), (20, 22)] {
        appends(memory(), max_open, max_active, scaled(4000));
        appends(deferred(), max_open, max_active, scaled(400));
    }
}

/// Readers take no lock of the zone. Each read must show blocks of one generation, in order, and
/// fill bytes (0xFF) after them.
fn readers(backing: Arc<dyn Device>, rounds: u64) {
    const BLOCKS: u64 = 16;
    let config = Config { zone_size: BLOCKS * BLOCK, zone_max_open: 2, ..Config::default() };
    let zones = Zones::new(backing, config, StateLocation::Volatile, None).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for zone in 0..2 {
            let (zones, stop) = (&zones, &stop);
            scope.spawn(move || {
                let start = zone * BLOCKS * BLOCK;
                let mut rng = Rng::new(zone);
                for generation in 1..=rounds {
                    for index in 0..=rng.below(BLOCKS) {
                        let word = (generation << 8 | index).to_le_bytes();
                        let data = word.repeat((BLOCK / 8) as usize);
                        zones.write_at(start + index * BLOCK, &data, Flags::empty()).unwrap();
                    }
                    zones.zone_op(ZoneOp::Reset, start).unwrap();
                }
                stop.store(true, Ordering::SeqCst);
            });
            scope.spawn(move || {
                let mut found = vec![0; (BLOCKS * BLOCK) as usize];
                let mut full = 0_u64;
                while !stop.load(Ordering::SeqCst) {
                    zones.read_at(zone * BLOCKS * BLOCK, &mut found).unwrap();
                    let mut words = found.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
                    let words: Vec<u64> = words.by_ref().collect();
                    let first = words[0];
                    let mut ended = false;
                    for (at, &word) in words.iter().enumerate() {
                        let index = at as u64 / (BLOCK / 8);
                        ended |= word == u64::MAX;
                        let expected = if ended { u64::MAX } else { first + index };
                        assert_eq!(word, expected, "word {at} of zone {zone}, first is {first:#x}");
                    }
                    full += u64::from(first != u64::MAX);
                }
                full
            });
        }
    });
}

#[test]
fn readers_see_one_generation() {
    readers(memory(), scaled(20_000));
    // A read that a device completes in parts may show several moments, so this device defers every
    // request as a whole.
    readers(deferring(DeferPolicy::Always), scaled(200));
}

/// Threads run all operations at once. In the end no request hangs, and all zones can be reset.
#[test]
fn all_operations_at_once() {
    for make in [memory, deferred] {
        let config = Config {
            zone_size: ZONE,
            zone_max_open: 2,
            zone_max_active: 4,
            zone_nr_conv: 2,
            ..Config::default()
        };
        let zones = Zones::new(make(), config, StateLocation::Volatile, None).unwrap();
        thread::scope(|scope| {
            for me in 0..THREADS {
                let zones = &zones;
                scope.spawn(move || {
                    let mut rng = Rng::new(me + 50);
                    for _ in 0..scaled(800) {
                        let zone = 2 + rng.below(ZONES - 2);
                        let start = zone * ZONE;
                        // Any result except a hang is allowed, because errors depend on the other
                        // threads.
                        match rng.below(12) {
                            0 => drop(zones.zone_op(ZoneOp::Finish, start)),
                            1 => drop(zones.zone_op(ZoneOp::Open, start)),
                            2 => drop(zones.zone_op(ZoneOp::Close, start)),
                            3 => drop(zones.zone_op(ZoneOp::Reset, start)),
                            4 if rng.chance(5) => zones.reset_all().unwrap(),
                            5 if rng.chance(20) => zones.set_read_only(start).unwrap(),
                            6 if rng.chance(20) => zones.set_offline(start).unwrap(),
                            7 => drop(zones.read_at(start, &mut vec![0; ZONE as usize])),
                            8 if rng.chance(2) => zones.wipe().unwrap(),
                            9 => zones.flush().unwrap(),
                            _ => drop(append(zones, zone, &vec![1; BLOCK as usize])),
                        }
                    }
                });
            }
        });
        check_limits(&zones);
        zones.wipe().unwrap();
        let counts = zones.counts();
        assert_eq!(u64::from(counts.empty), ZONES - 2, "{counts:?}");
        for zone in 2..4 {
            zones.zone_op(ZoneOp::Open, zone * ZONE).unwrap();
        }
        assert_eq!(zones.zone_op(ZoneOp::Open, 4 * ZONE), Err(Error::ZoneTooManyOpen));
        zones
            .report(2 * ZONE, &mut |row| {
                assert!(matches!(row.condition, ZoneCondition::Empty | ZoneCondition::ExplicitOpen));
                true
            })
            .unwrap();
    }
}
