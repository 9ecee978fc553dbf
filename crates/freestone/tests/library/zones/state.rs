//! The state of zones after restarts, crashes and power cuts. A write pointer never exceeds durable
//! data, and no acknowledged durable data is lost.

use std::fs;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use freestone::device::zoned::{Zone, ZoneCondition, ZoneOp, Zoned};
use freestone::device::{
    Blocking, Buffer, Completion, Device, Error, Extent, ExtentKind, Flags, Geometry, IoBuf, Op, Request,
    Result, TryResult,
};
use freestone::file::{self, File};
use freestone::null::{self, Memory};
use freestone::power::{self, Power};
use freestone::zone::{Config, SetupError, StateError, StateLocation, Zones};
use freestone_testkit::{Model, Rng, scaled};

const BLOCK: u64 = 512;
const BLOCKS: u64 = 12;
const ZONE: u64 = 16 * BLOCK;
const ZONES: u64 = 8;
const SIZE: u64 = ZONES * ZONE;
/// Size in bytes of the state of fewer than 511 zones.
const STATE_BYTES: u64 = 3 * 4096;

fn config() -> Config {
    Config { zone_size: ZONE, zone_capacity: BLOCKS * BLOCK, zone_max_open: 3, ..Config::default() }
}

// ---- disks that record the order of requests ----------------------------------------------------

#[derive(Debug, Clone)]
enum Event {
    Write {
        disk: usize,
        offset: usize,
        data: Vec<u8>,
    },
    Flush {
        disk: usize,
    },
    /// From here on, a crash keeps the zone at this generation or a later one, with at least this
    /// number of blocks.
    Durable {
        zone: usize,
        generation: u64,
        blocks: u64,
    },
    /// From here on, the zone is offline after a crash.
    Offline {
        zone: usize,
    },
}

#[derive(Default)]
struct Log(Mutex<Vec<Event>>);

impl Log {
    fn lock(&self) -> MutexGuard<'_, Vec<Event>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Disk {
    number: usize,
    below: Model,
    log: Arc<Log>,
}

impl Device for Disk {
    fn geometry(&self) -> Geometry {
        Geometry { volatile_cache: true, volatile_media: false, ..self.below.geometry() }
    }
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        let event = match (request.op, &buffer) {
            (Op::Write, Buffer::Write(data)) => Some(data.to_vec()),
            (Op::WriteZeroes, _) => Some(vec![0; request.len as usize]),
            _ => None,
        };
        let tried = self.below.try_io(request, buffer)?;
        let mut log = self.log.lock();
        if let Some(data) = event {
            log.push(Event::Write { disk: self.number, offset: request.offset as usize, data });
            assert!(!request.flags.contains(Flags::FUA), "with a state file FUA is a flush");
        } else if request.op == Op::Flush {
            log.push(Event::Flush { disk: self.number });
        }
        Ok(tried)
    }
    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        let tried = match request.op {
            Op::Read => self.try_io(&request, Buffer::Read(&mut buffer)),
            Op::Write => self.try_io(&request, Buffer::Write(&buffer)),
            _ => self.try_io(&request, Buffer::None),
        };
        done.complete(tried.map(|_| ()), buffer);
    }
    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.below.extents(offset, len, row)
    }
}

fn content(zone: u64, generation: u64, index: u64) -> Vec<u8> {
    let word = (zone + 1) << 48 | generation << 16 | index;
    word.to_le_bytes().repeat((BLOCK / 8) as usize)
}

/// Returns the content of a disk after a crash at the end of the log: all flushed writes, and some
/// sectors of the other writes in any order.
fn image(log: &[Event], disk: usize, size: u64, rng: &mut Rng) -> Vec<u8> {
    let mut bytes = vec![0; size as usize];
    let flushed = log.iter().rposition(|event| matches!(event, Event::Flush { disk: of } if *of == disk));
    let mut loose = Vec::new();
    for (at, event) in log.iter().enumerate() {
        if let Event::Write { disk: of, offset, data } = event
            && *of == disk
        {
            for (nth, sector) in data.chunks(512).enumerate() {
                let offset = offset + nth * 512;
                if flushed.is_some_and(|flushed| at < flushed) {
                    bytes[offset..offset + 512].copy_from_slice(sector);
                } else {
                    loose.push((offset, sector));
                }
            }
        }
    }
    // A random part of the unflushed writes survives, from none to all of them, and these are
    // applied in another order.
    let percent = rng.below(101) as u8;
    for at in (1..loose.len()).rev() {
        if rng.chance(50) {
            loose.swap(at, rng.below(at as u64 + 1) as usize);
        }
    }
    for (offset, sector) in loose {
        if rng.chance(percent) {
            bytes[offset..offset + 512].copy_from_slice(sector);
        }
    }
    bytes
}

fn model_of(bytes: &[u8]) -> Arc<dyn Device> {
    let model = Model::new(bytes.len(), BLOCK as u32);
    model.write_at(0, bytes, Flags::empty()).unwrap();
    Arc::new(model)
}

fn rows(zones: &Zones) -> Vec<Zone> {
    let mut rows = Vec::new();
    zones
        .report(0, &mut |row| {
            rows.push(row);
            true
        })
        .unwrap();
    rows
}

/// Runs random operations on zones. Their data is on disk 0, and their state is on disk 1.
fn work(log: &Arc<Log>, seed: u64, rounds: u64) {
    let disk = |number, size: u64| {
        Arc::new(Disk { number, below: Model::new(size as usize, BLOCK as u32), log: Arc::clone(log) })
    };
    let zones =
        Zones::new(disk(0, SIZE), config(), StateLocation::Device(disk(1, STATE_BYTES)), None).unwrap();
    let mut rng = Rng::new(seed);
    let mut generations = [1_u64; ZONES as usize];
    let mut written = [0_u64; ZONES as usize];
    let note = |event| log.lock().push(event);
    for _ in 0..rounds {
        let zone = rng.below(ZONES);
        let at = zone as usize;
        let start = zone * ZONE;
        let durable = |at: usize, generations: &[u64], written: &[u64]| Event::Durable {
            zone: at,
            generation: generations[at],
            blocks: written[at],
        };
        match rng.below(20) {
            0..=11 => {
                let blocks = 1 + rng.below(3);
                let data: Vec<u8> =
                    (0..blocks).flat_map(|nth| content(zone, generations[at], written[at] + nth)).collect();
                let flags = if rng.chance(20) { Flags::FUA } else { Flags::empty() };
                if zones.write_at(start + written[at] * BLOCK, &data, flags).is_ok() {
                    written[at] += blocks;
                    if flags == Flags::FUA {
                        note(durable(at, &generations, &written));
                    }
                }
            }
            12..=14 => {
                zones.flush().unwrap();
                for at in 0..ZONES as usize {
                    note(durable(at, &generations, &written));
                }
            }
            15..=17 => {
                // Writes after the reset belong to the next generation.
                if zones.zone_op(ZoneOp::Reset, start).is_ok() {
                    (generations[at], written[at]) = (generations[at] + 1, 0);
                    note(durable(at, &generations, &written));
                }
            }
            18 => {
                if zones.zone_op(ZoneOp::Finish, start).is_ok() {
                    note(durable(at, &generations, &written));
                }
            }
            _ if rng.chance(20) && zone == 0 => {
                zones.set_offline(start).unwrap();
                if rows(&zones)[0].condition == ZoneCondition::Offline {
                    note(Event::Offline { zone: at });
                } else {
                    (generations[at], written[at]) = (generations[at] + 1, 0);
                    note(durable(at, &generations, &written));
                }
            }
            _ => drop(zones.zone_op(ZoneOp::Close, start)),
        }
    }
}

/// Opens the disks after a crash at the end of the log. Checks the zones against the events in the
/// log.
fn check(log: &[Event], seed: u64) {
    let context = format!("a crash after {} events, seed {seed}", log.len());
    let mut rng = Rng::new(seed ^ log.len() as u64);
    let data = image(log, 0, SIZE, &mut rng);
    let state = image(log, 1, STATE_BYTES, &mut rng);
    let zones = Zones::new(model_of(&data), config(), StateLocation::Device(model_of(&state)), None);
    let zones = zones.unwrap_or_else(|error| panic!("{context}: {error}"));
    let mut known = [Some((0, 0)); ZONES as usize];
    for event in log {
        match *event {
            Event::Durable { zone, generation, blocks } => known[zone] = Some((generation, blocks)),
            Event::Offline { zone } => known[zone] = None,
            _ => {}
        }
    }
    for (zone, row) in (0..ZONES).zip(rows(&zones)) {
        let context = format!("{context}: {row:?}, known {:?}", known[zone as usize]);
        let condition = row.condition;
        assert!(!matches!(condition, ZoneCondition::ImplicitOpen | ZoneCondition::ExplicitOpen), "{context}");
        if condition == ZoneCondition::Offline {
            assert_eq!(zone, 0, "{context}");
            continue;
        }
        let Some((generation, blocks)) = known[zone as usize] else {
            // The zone was offline. A call that makes it empty again may have run although the log
            // does not contain its completion yet.
            assert_eq!(condition, ZoneCondition::Empty, "{context}");
            continue;
        };
        let mut pointer = (row.write_pointer - row.start) / BLOCK;
        let finished = condition == ZoneCondition::Full && pointer == ZONE / BLOCK;
        let first =
            if pointer == 0 { &[][..] } else { &data[row.start as usize..(row.start + BLOCK) as usize] };
        let word = first.first_chunk::<8>().map_or(0, |word| u64::from_le_bytes(*word));
        if finished {
            // The write pointer of a finished zone does not show the end of its data. The data ends
            // at the first block of zeroes.
            let block =
                |at: u64| &data[(row.start + at * BLOCK) as usize..(row.start + (at + 1) * BLOCK) as usize];
            pointer = (0..pointer).find(|&at| block(at).iter().all(|&byte| byte == 0)).unwrap_or(pointer);
            assert!((pointer..ZONE / BLOCK).all(|at| block(at).iter().all(|&byte| byte == 0)), "{context}");
        }
        let found = word >> 16 & 0xFFFF_FFFF;
        if pointer > 0 {
            let expected: Vec<u8> = (0..pointer).flat_map(|at| content(zone, found, at)).collect();
            let mut bytes = vec![0; expected.len()];
            zones.read_at(row.start, &mut bytes).unwrap();
            assert!(bytes == expected, "{context}: the write pointer exceeds the data");
            assert!(found >= generation, "{context}: data of generation {found} has come back");
        }
        if pointer == 0 || found > generation {
            // The zone was reset and has a later generation. A reset must have started since, or no
            // durable data was lost.
            let begun = log
                .iter()
                .rev()
                .take_while(|event| !matches!(event, Event::Durable { zone: of, .. } if *of as u64 == zone));
            let reset = begun.into_iter().any(|event| matches!(event, Event::Write { disk: 1, .. }));
            assert!(blocks == 0 || reset || finished, "{context}: lost");
        } else {
            assert!(pointer >= blocks, "{context}: blocks that were durable are lost");
        }
    }
    // All zones are still usable after the crash.
    for row in rows(&zones) {
        if row.condition == ZoneCondition::Closed {
            zones.write_at(row.write_pointer, &content(9, 9, 9), Flags::FUA).unwrap();
        }
    }
}

#[test]
fn crash_at_any_moment_keeps_durable_data() {
    for seed in 1..=scaled(12).max(2) {
        let log = Arc::new(Log::default());
        work(&log, seed, 150);
        let log = log.lock().clone();
        // Until the state is complete on disk, an open creates it again or refuses it. From then on
        // it must be valid.
        let made =
            log.iter().enumerate().filter(|(_, event)| matches!(event, Event::Flush { disk: 1 })).nth(1);
        for events in made.unwrap().0 + 1..=log.len() {
            for round in 0..2 {
                check(&log[..events], seed * 100 + round);
            }
        }
    }
}

#[test]
fn crash_during_creation_of_the_state() {
    let log = Arc::new(Log::default());
    work(&log, 1, 0);
    let log = log.lock().clone();
    for events in 0..=log.len() {
        for seed in 0..50 {
            let mut rng = Rng::new(seed);
            let state = image(&log[..events], 1, STATE_BYTES, &mut rng);
            let memory = model_of(&vec![0; SIZE as usize]);
            let zones = Zones::new(memory, config(), StateLocation::Device(model_of(&state)), None).unwrap();
            assert_eq!(u64::from(zones.counts().empty), ZONES);
        }
    }
}

// ---- files --------------------------------------------------------------------------------------

struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }
    fn state(&self) -> std::path::PathBuf {
        self.dir.path().join("disk.zones")
    }
    fn open(&self, config: Config) -> std::result::Result<Zones, SetupError> {
        let path = self.dir.path().join("disk");
        let size = 8 << 20;
        let file = File::open(&file::Config { size: Some(size), ..file::Config::new(path) }).unwrap();
        Zones::new(Arc::new(file), config, StateLocation::File(&self.state()), None)
    }
}

fn file_config() -> Config {
    Config { zone_size: 1 << 20, zone_nr_conv: 1, ..Config::default() }
}

#[test]
fn restart_restores_all_zones() {
    use ZoneCondition::{Closed, Empty, Full, NotWritePointer, Offline, ReadOnly};
    let place = Place::new();
    let data = vec![7; 64 << 10];
    {
        let zones = place.open(file_config()).unwrap();
        assert!(!zones.geometry().volatile_media && zones.geometry().volatile_cache);
        for zone in 1..7 {
            zones.write_at(zone << 20, &data, Flags::empty()).unwrap();
        }
        zones.zone_op(ZoneOp::Finish, 2 << 20).unwrap();
        zones.zone_op(ZoneOp::Open, 3 << 20).unwrap();
        zones.zone_op(ZoneOp::Reset, 4 << 20).unwrap();
        zones.set_read_only(5 << 20).unwrap();
        zones.set_offline(6 << 20).unwrap();
        zones.zone_op(ZoneOp::Open, 7 << 20).unwrap();
    }
    let zones = place.open(file_config()).unwrap();
    let conditions: Vec<_> = rows(&zones).iter().map(|row| row.condition).collect();
    assert_eq!(conditions, [NotWritePointer, Closed, Full, Closed, Empty, ReadOnly, Offline, Empty]);
    let mut found = vec![0; data.len()];
    for zone in [1, 2, 3, 5] {
        zones.read_at(zone << 20, &mut found).unwrap();
        assert!(found == data, "zone {zone}");
    }
    zones.read_at(4 << 20, &mut found).unwrap();
    assert!(found.iter().all(|&byte| byte == 0xFF));
    zones.write_at((1 << 20) + (64 << 10), &data, Flags::FUA).unwrap();
    zones.wipe().unwrap();
    drop(zones);
    let zones = place.open(file_config()).unwrap();
    assert_eq!(zones.counts().empty, 7);
}

#[test]
fn mismatched_or_damaged_state_is_refused() {
    let place = Place::new();
    drop(place.open(file_config()).unwrap());
    let good = fs::read(place.state()).unwrap();
    let refused = |what: &str, config: Config, expected: &dyn Fn(&StateError) -> bool| {
        let before = fs::read(place.state()).unwrap();
        match place.open(config) {
            Err(SetupError::State(error)) => assert!(expected(&error), "{what}: {error}"),
            other => panic!("{what}: {other:?}"),
        }
        assert!(fs::read(place.state()).unwrap() == before, "{what}: the file was changed");
    };
    let other_size = Config { zone_size: 2 << 20, ..file_config() };
    refused("zone_size", other_size, &|error| {
        matches!(error, StateError::Geometry { what: "zone_size", .. })
    });
    let capacity = Config { zone_capacity: 1 << 19, ..file_config() };
    refused("capacity", capacity, &|error| {
        matches!(error, StateError::Geometry { what: "zone_capacity", .. })
    });
    let conventional = Config { zone_nr_conv: 2, ..file_config() };
    refused("conventional", conventional, &|error| {
        matches!(error, StateError::Geometry { what: "zone_nr_conv", .. })
    });

    let change = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] ^= byte;
        fs::write(place.state(), bytes).unwrap();
    };
    change(0, 1);
    refused("magic", file_config(), &|error| matches!(error, StateError::Foreign));
    change(16, 2);
    refused("a newer version", file_config(), &|error| matches!(error, StateError::Newer(3)));
    change(24, 1);
    refused("header", file_config(), &|error| matches!(error, StateError::Damaged(_)));
    fs::write(place.state(), vec![b'x'; good.len()]).unwrap();
    refused("another file", file_config(), &|error| matches!(error, StateError::Foreign));
    fs::write(place.state(), b"").unwrap();
    refused("an empty file", file_config(), &|error| matches!(error, StateError::Foreign));
    fs::write(place.state(), &good[..good.len() - 1]).unwrap();
    refused("a short file", file_config(), &|error| matches!(error, StateError::Damaged(_)));
    // A crash can leave one bad copy of the state. Two bad copies mean damage.
    for (copies, bad) in [(&[4096][..], false), (&[8192][..], false), (&[4096, 8192][..], true)] {
        let mut bytes = good.clone();
        for copy in copies {
            bytes[copy + 100] ^= 1;
        }
        fs::write(place.state(), bytes).unwrap();
        if bad {
            refused("both copies", file_config(), &|error| matches!(error, StateError::Damaged(_)));
        } else {
            drop(place.open(file_config()).unwrap());
        }
    }
    // A state file with one of its two copies from another file.
    let other = Place::new();
    drop(other.open(file_config()).unwrap());
    let mut bytes = good.clone();
    bytes[4096..].copy_from_slice(&fs::read(other.state()).unwrap()[4096..]);
    fs::write(place.state(), bytes).unwrap();
    refused("another file's copies", file_config(), &|error| matches!(error, StateError::Damaged(_)));

    // Only one device at a time may use a state file.
    fs::write(place.state(), &good).unwrap();
    let small = || Arc::new(Memory::new(null::Config::plain(8 << 20, 512)).unwrap());
    let first = Zones::new(small(), file_config(), StateLocation::File(&place.state()), None).map(drop);
    assert!(first.is_ok() || matches!(first, Err(SetupError::State(StateError::Geometry { .. }))));
    let zones = place.open(file_config()).unwrap();
    let second = Zones::new(
        Arc::new(Memory::new(null::Config::plain(8 << 20, zones.geometry().logical_block)).unwrap()),
        file_config(),
        StateLocation::File(&place.state()),
        None,
    );
    assert!(matches!(second, Err(SetupError::State(StateError::InUse))), "{second:?}");
    // Makes four zones active, one more than the limit of the next open.
    for zone in 1..5 {
        zones.write_at(zone << 20, &[1; 4096], Flags::empty()).unwrap();
    }
    drop(zones);
    // As after a crash between two parts of a flush, more zones are active than allowed. These
    // zones can continue, but no other zone can become active.
    let limited = Config { zone_max_active: 3, ..file_config() };
    let zones = place.open(limited).unwrap();
    assert_eq!(zones.counts().active(), 4);
    assert_eq!(zones.write_at(6 << 20, &[1; 4096], Flags::empty()), Err(Error::ZoneTooManyActive));
    zones.write_at((1 << 20) + 4096, &[1; 4096], Flags::empty()).unwrap();
    zones.zone_op(ZoneOp::Reset, 2 << 20).unwrap();
    zones.zone_op(ZoneOp::Finish, 3 << 20).unwrap();
    zones.write_at(6 << 20, &[1; 4096], Flags::empty()).unwrap();
}

#[test]
fn too_small_state_device_is_refused() {
    let zones = Zones::new(
        model_of(&vec![0; SIZE as usize]),
        config(),
        StateLocation::Device(model_of(&vec![0; 4096])),
        None,
    );
    assert!(matches!(
        zones,
        Err(SetupError::State(StateError::TooSmall { needed: STATE_BYTES, size: 4096 }))
    ));
}

// ---- power cuts ---------------------------------------------------------------------------------

#[test]
fn power_cuts() {
    let mut pointers_in_between = 0;
    for seed in 0..scaled(200) {
        let memory = Arc::new(Memory::new(null::Config::plain(SIZE, BLOCK as u32)).unwrap());
        let power = Arc::new(Power::new(memory, power::Config::default()).unwrap());
        let state = (seed % 2 == 1).then(|| model_of(&vec![0; STATE_BYTES as usize]));
        let state = state.map_or(StateLocation::Volatile, StateLocation::Device);
        let zones = Zones::new(Arc::clone(&power) as _, config(), state, None).unwrap();
        let mut rng = Rng::new(seed);
        for generation in 1..4 {
            let before = rows(&zones);
            let mut durable = [0; ZONES as usize];
            let mut written: Vec<u64> =
                before.iter().map(|row| (row.write_pointer - row.start) / BLOCK).collect();
            durable.copy_from_slice(&written);
            for _ in 0..40 {
                let zone = rng.below(ZONES);
                let at = zone as usize;
                if written[at] < BLOCKS {
                    let flags = if rng.chance(10) { Flags::FUA } else { Flags::empty() };
                    let data = content(zone, 1, written[at]);
                    zones.write_at(zone * ZONE + written[at] * BLOCK, &data, flags).unwrap();
                    written[at] += 1;
                    if flags == Flags::FUA {
                        durable[at] = written[at];
                    }
                }
                if rng.chance(5) {
                    zones.flush().unwrap();
                    durable.copy_from_slice(&written);
                }
            }
            zones.power_cut(&power, seed * 7 + generation).unwrap();
            for (at, row) in rows(&zones).iter().enumerate() {
                let pointer = (row.write_pointer - row.start) / BLOCK;
                assert!((durable[at]..=written[at]).contains(&pointer), "seed {seed}: {row:?}");
                pointers_in_between += u64::from(pointer > durable[at] && pointer < written[at]);
                let expected = match pointer {
                    0 => ZoneCondition::Empty,
                    BLOCKS => ZoneCondition::Full,
                    _ => ZoneCondition::Closed,
                };
                assert_eq!(row.condition, expected, "seed {seed}: {row:?}");
                let mut found = vec![0; ZONE as usize];
                zones.read_at(row.start, &mut found).unwrap();
                let data: Vec<u8> = (0..pointer).flat_map(|nth| content(at as u64, 1, nth)).collect();
                assert!(found.starts_with(&data), "seed {seed}: {row:?} exceeds the data");
                assert!(found[data.len()..].iter().all(|&byte| byte == 0xFF), "seed {seed}");
            }
        }
    }
    assert!(pointers_in_between > 10);
}

#[test]
fn same_seed_cuts_the_same() {
    let run = |seed| {
        let memory = Arc::new(Memory::new(null::Config::plain(SIZE, BLOCK as u32)).unwrap());
        let power = Arc::new(Power::new(memory, power::Config::default()).unwrap());
        let zones = Zones::new(Arc::clone(&power) as _, config(), StateLocation::Volatile, None).unwrap();
        zones.write_at(0, &vec![5; BLOCK as usize], Flags::empty()).unwrap();
        zones.zone_op(ZoneOp::Finish, 0).unwrap();
        for zone in 1..ZONES {
            zones.write_at(zone * ZONE, &vec![5; 10 * BLOCK as usize], Flags::empty()).unwrap();
        }
        zones.power_cut(&power, seed).unwrap();
        let rows = rows(&zones);
        // A finished zone survives the power cut, whatever the seed.
        assert_eq!((rows[0].condition, rows[0].write_pointer), (ZoneCondition::Full, ZONE));
        rows
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3), run(4));
}

#[test]
fn extents_beyond_a_write_pointer_are_data() {
    let memory = Arc::new(Memory::new(null::Config::plain(SIZE, BLOCK as u32)).unwrap());
    let zones = Zones::new(memory, config(), StateLocation::Volatile, None).unwrap();
    zones.write_zeroes(0, BLOCK, Flags::MAY_FREE).unwrap();
    let mut kinds = Vec::new();
    zones
        .extents(0, ZONE, &mut |row| {
            kinds.push((row.offset, row.kind == ExtentKind::Data));
            true
        })
        .unwrap();
    assert_eq!(kinds, [(0, false), (BLOCK, true)]);
    assert_eq!(zones.extents(0, SIZE + BLOCK, &mut |_| true), Err(Error::OutOfRange));
}
