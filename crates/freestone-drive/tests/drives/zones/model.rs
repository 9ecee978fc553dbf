//! Random operations compared with a model of `null_blk`'s zones, over every kind of device. The
//! model was written from the description of the zones, not from the code.

use std::sync::Arc;
use std::sync::mpsc;

use freestone_core::device::zoned::{Zone, ZoneCondition, ZoneOp, ZoneType, Zoned};
use freestone_core::device::{Blocking, Device, Error, Flags, Geometry, IoBuf, Op, Request};
use freestone_drive::null::{self, Memory};
use freestone_drive::zone::{Config, StateLocation, Zones};
use freestone_image::file::{self, File};
use freestone_ram::ram::{self, Ram};
use freestone_testkit::{DeferPolicy, DeferringDevice, Model, Rng, scaled};

const BLOCK: u64 = 512;

// ---- model: blocks of 512 bytes, conditions and counters, single-threaded -----------------------

struct ModelZone {
    start: u64,
    len: u64,
    capacity: u64,
    condition: ZoneCondition,
    /// Write pointer as a byte offset on the device. Has no meaning in some conditions.
    pointer: u64,
}

struct Oracle {
    bytes: Vec<u8>,
    zones: Vec<ModelZone>,
    zone_size: u64,
    conventional: usize,
    max_open: usize,
    max_active: usize,
    cursor: usize,
    closes: u64,
}

use ZoneCondition::{Closed, Empty, ExplicitOpen, Full, ImplicitOpen, NotWritePointer, Offline, ReadOnly};

impl Oracle {
    fn new(size: u64, config: &Config) -> Self {
        let count = size.div_ceil(config.zone_size) as usize;
        let conventional = (config.zone_nr_conv as usize).min(count - 1);
        let sequential = count - conventional;
        let capacity = if config.zone_capacity == 0 { config.zone_size } else { config.zone_capacity };
        let mut max_active = config.zone_max_active as usize;
        let mut max_open = config.zone_max_open as usize;
        if max_active >= sequential {
            max_active = 0;
        }
        if max_active > 0 && max_open > max_active {
            max_open = max_active;
        } else if max_open >= sequential {
            max_open = 0;
        }
        let zones = (0..count)
            .map(|index| {
                let start = index as u64 * config.zone_size;
                let len = config.zone_size.min(size - start);
                let capacity = if index < conventional { len } else { capacity.min(len) };
                let (condition, pointer) = if index < conventional {
                    (NotWritePointer, start + len)
                } else if config.zone_full {
                    (Full, start + capacity)
                } else {
                    (Empty, start)
                };
                ModelZone { start, len, capacity, condition, pointer }
            })
            .collect();
        let zone_size = config.zone_size;
        let bytes = vec![0; size as usize];
        Self { bytes, zones, zone_size, conventional, max_open, max_active, cursor: conventional, closes: 0 }
    }

    fn count(&self, conditions: &[ZoneCondition]) -> usize {
        self.zones.iter().filter(|zone| conditions.contains(&zone.condition)).count()
    }

    fn limited(&self) -> bool {
        self.max_open + self.max_active > 0
    }

    fn check_active(&self) -> Result<(), Error> {
        let active = self.count(&[ImplicitOpen, ExplicitOpen, Closed]);
        let full = self.max_active > 0 && active >= self.max_active;
        if full { Err(Error::ZoneTooManyActive) } else { Ok(()) }
    }

    fn check_resources(&mut self, zone: usize) -> Result<(), Error> {
        if self.zones[zone].condition == Empty {
            self.check_active()?;
        }
        if self.max_open == 0 || self.count(&[ImplicitOpen, ExplicitOpen]) < self.max_open {
            return Ok(());
        }
        if self.count(&[ImplicitOpen]) == 0 || self.check_active().is_err() {
            return Err(Error::ZoneTooManyOpen);
        }
        loop {
            let at = self.cursor;
            self.cursor = if at + 1 == self.zones.len() { self.conventional } else { at + 1 };
            let victim = &mut self.zones[at];
            if victim.condition == ImplicitOpen {
                victim.condition = if victim.pointer == victim.start { Empty } else { Closed };
                self.closes += 1;
                return Ok(());
            }
        }
    }

    /// Writes at byte offset `at`, or appends if `at` is None. Returns the byte offset of the data.
    fn write(&mut self, at: Option<u64>, zone: usize, data: &[u8]) -> Result<u64, Error> {
        let row = &self.zones[zone];
        match row.condition {
            NotWritePointer => {
                let at = at.ok_or(Error::ZoneCondition)?;
                self.bytes[at as usize..at as usize + data.len()].copy_from_slice(data);
                return Ok(at);
            }
            Full | ReadOnly | Offline => return Err(Error::ZoneCondition),
            _ => {}
        }
        let to = at.unwrap_or(row.pointer);
        if to != row.pointer || to + data.len() as u64 > row.start + row.capacity {
            return Err(Error::ZoneWritePointer);
        }
        if matches!(row.condition, Empty | Closed) {
            self.check_resources(zone)?;
            self.zones[zone].condition = ImplicitOpen;
        }
        self.bytes[to as usize..to as usize + data.len()].copy_from_slice(data);
        let row = &mut self.zones[zone];
        row.pointer += data.len() as u64;
        if row.pointer == row.start + row.capacity {
            row.condition = Full;
        }
        Ok(to)
    }

    fn op(&mut self, op: ZoneOp, zone: usize) -> Result<(), Error> {
        let condition = self.zones[zone].condition;
        if matches!(condition, NotWritePointer | ReadOnly | Offline) {
            return Err(Error::ZoneCondition);
        }
        match (op, condition) {
            (ZoneOp::Open, ExplicitOpen) | (ZoneOp::Close, Closed) => {}
            (ZoneOp::Open, ImplicitOpen) => self.zones[zone].condition = ExplicitOpen,
            (ZoneOp::Open, Empty | Closed) => {
                self.check_resources(zone)?;
                self.zones[zone].condition = ExplicitOpen;
            }
            (ZoneOp::Close, ImplicitOpen | ExplicitOpen) => {
                let row = &mut self.zones[zone];
                row.condition = if row.pointer == row.start { Empty } else { Closed };
            }
            (ZoneOp::Finish, Full) if self.limited() => {}
            (ZoneOp::Finish, _) => {
                if matches!(condition, Empty | Closed) {
                    self.check_resources(zone)?;
                }
                let row = &mut self.zones[zone];
                (row.condition, row.pointer) = (Full, row.start + row.len);
            }
            (ZoneOp::Reset, _) => self.empty(zone),
            _ => return Err(Error::ZoneCondition),
        }
        Ok(())
    }

    fn empty(&mut self, zone: usize) {
        let row = &mut self.zones[zone];
        (row.condition, row.pointer) = (Empty, row.start);
        self.bytes[row.start as usize..(row.start + row.len) as usize].fill(0);
    }

    fn set(&mut self, zone: usize, condition: ZoneCondition) -> Result<(), Error> {
        match self.zones[zone].condition {
            NotWritePointer => return Err(Error::ZoneCondition),
            now if now == condition => self.empty(zone),
            _ => self.zones[zone].condition = condition,
        }
        Ok(())
    }

    fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>, Error> {
        let mut out = Vec::new();
        for at in (offset..offset + len).step_by(BLOCK as usize) {
            let zone = &self.zones[(at / self.zone_size) as usize];
            match zone.condition {
                Offline => return Err(Error::ZoneCondition),
                NotWritePointer | ReadOnly => {}
                _ if at >= zone.pointer => {
                    out.extend([0xFF; BLOCK as usize]);
                    continue;
                }
                _ => {}
            }
            out.extend(&self.bytes[at as usize..(at + BLOCK) as usize]);
        }
        Ok(out)
    }

    fn rows(&self) -> Vec<Zone> {
        let row = |zone: &ModelZone| {
            let ends = matches!(zone.condition, NotWritePointer | ReadOnly | Offline);
            let sequential = zone.condition != NotWritePointer;
            Zone {
                start: zone.start,
                len: zone.len,
                capacity: zone.capacity,
                write_pointer: if ends { zone.start + zone.len } else { zone.pointer },
                kind: if sequential { ZoneType::SequentialRequired } else { ZoneType::Conventional },
                condition: zone.condition,
            }
        };
        self.zones.iter().map(row).collect()
    }
}

// ---- comparison ---------------------------------------------------------------------------------

fn append(zones: &Zones, offset: u64, data: &[u8]) -> Result<u64, Error> {
    if let Some(at) = zones.try_append(offset, data, Flags::empty())? {
        return Ok(at);
    }
    let (tx, rx) = mpsc::channel();
    let data = IoBuf::copy_of(data).unwrap();
    zones.submit_append(offset, data, Flags::empty(), Box::new(move |at| tx.send(at).unwrap()));
    rx.recv().unwrap()
}

/// Runs random operations on the zones and on the model. Compares results, zone reports and
/// content.
fn compare(
    name: &str,
    backing: Arc<dyn Device>,
    config: Config,
    state: StateLocation<'_>,
    seed: u64,
    rounds: u64,
) {
    let Geometry { size, logical_block, .. } = backing.geometry();
    let block = u64::from(logical_block);
    let zones = Zones::new(backing, config, state, None).unwrap();
    let mut oracle = Oracle::new(size, &config);
    let count = oracle.zones.len() as u64;
    let mut rng = Rng::new(seed);
    for round in 0..rounds {
        let zone = rng.below(count) as usize;
        let (start, len) = (oracle.zones[zone].start, oracle.zones[zone].len);
        // Most operations are at a valid position, and most are short.
        let pointer = oracle.zones[zone].pointer;
        let free = (start + oracle.zones[zone].capacity).saturating_sub(pointer) / block;
        let at = match rng.below(8) {
            0 => start + rng.below(len / block) * block,
            _ if oracle.zones[zone].condition == NotWritePointer => start + rng.below(len / block) * block,
            _ => pointer.min(start + len - block),
        };
        let most = (start + len - at) / block;
        let blocks = match rng.below(8) {
            0 => 1 + rng.below(most),
            1 => free.clamp(1, most),
            _ => (1 + rng.below(4)).min(most),
        };
        let mut data = vec![0; (blocks * block) as usize];
        let context;
        let same = match rng.below(100) {
            0..=29 => {
                rng.content(&mut data);
                let flags = if rng.chance(10) { Flags::FUA } else { Flags::empty() };
                context = format!("write of {blocks} blocks at {at}");
                (zones.write_at(at, &data, flags), oracle.write(Some(at), zone, &data).map(drop))
            }
            30..=34 => {
                context = format!("zeroes for {blocks} blocks at {at}");
                let flags = if rng.chance(50) { Flags::MAY_FREE } else { Flags::empty() };
                (zones.write_zeroes(at, blocks * block, flags), oracle.write(Some(at), zone, &data).map(drop))
            }
            35..=49 => {
                rng.content(&mut data);
                context = format!("append of {blocks} blocks to zone {zone}");
                let capacity =
                    if config.zone_capacity == 0 { config.zone_size } else { config.zone_capacity };
                let expected = if data.len() as u64 > capacity.min(config.zone_append_max) {
                    Err(Error::OutOfRange)
                } else {
                    oracle.write(None, zone, &data)
                };
                let found = append(&zones, start, &data);
                assert_eq!(found, expected, "{name}, seed {seed}, round {round}: {context}");
                (Ok(()), Ok(()))
            }
            50..=74 => {
                let op =
                    [ZoneOp::Open, ZoneOp::Close, ZoneOp::Finish, ZoneOp::Reset, ZoneOp::Open, ZoneOp::Close]
                        [rng.below(6) as usize];
                context = format!("{op:?} of zone {zone}");
                (zones.zone_op(op, start), oracle.op(op, zone))
            }
            75 => {
                context = "reset of all zones".to_owned();
                for zone in 0..count as usize {
                    if !matches!(oracle.zones[zone].condition, NotWritePointer | ReadOnly | Offline) {
                        oracle.empty(zone);
                    }
                }
                (zones.reset_all(), Ok(()))
            }
            76..=77 => {
                context = format!("zone {zone} read-only");
                (zones.set_read_only(at), oracle.set(zone, ReadOnly))
            }
            78..=79 => {
                context = format!("zone {zone} offline");
                (zones.set_offline(at), oracle.set(zone, Offline))
            }
            80..=81 => {
                context = "flush".to_owned();
                (zones.flush(), Ok(()))
            }
            82..=83 => {
                context = "discard".to_owned();
                (zones.run(Request::new(Op::Discard, at, blocks * block)), Ok(()))
            }
            84 if zone + 1 < count as usize && zone + 1 >= oracle.conventional => {
                context = format!("write over the end of zone {zone}");
                let two = vec![1; 2 * block as usize];
                let at = start + len - block;
                (zones.write_at(at, &two, Flags::empty()), Err(Error::ZoneBoundary))
            }
            _ => {
                let offset = rng.below(size / block) * block;
                let most = ((size - offset) / block).min(1 + 2 * config.zone_size / block);
                let len = (1 + rng.below(most)) * block;
                context = format!("read of {len} bytes at {offset}");
                let mut found = vec![0; len as usize];
                let completion = zones.read_at(offset, &mut found);
                let expected = oracle.read(offset, len);
                if completion.is_ok() && expected.is_ok() {
                    assert!(Ok(found) == expected, "{name}, seed {seed}, round {round}: {context}");
                }
                (completion, expected.map(drop))
            }
        };
        assert_eq!(same.0, same.1, "{name}, seed {seed}, round {round}: {context}");
        let mut rows = Vec::new();
        zones
            .report(0, &mut |row| {
                rows.push(row);
                true
            })
            .unwrap();
        assert_eq!(rows, oracle.rows(), "{name}, seed {seed}, round {round}: after {context}");
        assert_eq!(zones.counts().implicit_closes, oracle.closes, "{name}, seed {seed}, round {round}");
    }
    for zone in &oracle.zones {
        let mut found = vec![0; zone.len as usize];
        let completion = zones.read_at(zone.start, &mut found);
        assert!(
            completion.map(|()| found) == oracle.read(zone.start, zone.len),
            "{name}, seed {seed}: at the end"
        );
    }
}

const ZONE: u64 = 32 * BLOCK;
const SIZE: u64 = 16 * ZONE;

fn configs() -> Vec<(u64, Config)> {
    let base = Config { zone_size: ZONE, ..Config::default() };
    vec![
        (SIZE, base),
        (SIZE, Config { zone_capacity: 20 * BLOCK, zone_nr_conv: 3, zone_append_max: 8 * BLOCK, ..base }),
        (SIZE, Config { zone_max_open: 3, ..base }),
        (SIZE, Config { zone_max_active: 4, zone_nr_conv: 1, ..base }),
        (SIZE, Config { zone_max_open: 2, zone_max_active: 5, zone_capacity: 31 * BLOCK, ..base }),
        (SIZE, Config { zone_max_open: 9, zone_max_active: 3, zone_full: true, ..base }),
        (SIZE, Config { zone_max_open: 1, zone_max_active: 1, ..base }),
        // The last zone is shorter than the others.
        (SIZE - 27 * BLOCK, Config { zone_max_open: 4, ..base }),
    ]
}

#[test]
fn over_a_model() {
    for (seed, (size, config)) in (100..).zip(configs()) {
        let backing = Arc::new(Model::new(size as usize, BLOCK as u32));
        compare("model", backing, config, StateLocation::Volatile, seed, scaled(8000));
    }
}

#[test]
fn over_memory() {
    for (seed, (size, config)) in (200..).zip(configs()) {
        let config =
            Config { zone_size: config.zone_size * 8, zone_capacity: config.zone_capacity * 8, ..config };
        let memory = Memory::new(null::Config::plain(size * 8, BLOCK as u32)).unwrap();
        compare("memory", Arc::new(memory), config, StateLocation::Volatile, seed, scaled(4000));
    }
}

#[test]
fn over_a_ram_disk() {
    let config = Config { zone_size: 64 << 10, zone_max_open: 3, zone_max_active: 6, ..Config::default() };
    let ram = Ram::new(ram::Config { disksize: 1 << 20, ..ram::Config::default() });
    compare("ram", Arc::new(ram.unwrap()), config, StateLocation::Volatile, 300, scaled(4000));
}

#[test]
fn over_deferring_devices() {
    for (seed, (size, config)) in (400..).zip(configs()) {
        for policy in [DeferPolicy::Always, DeferPolicy::Sometimes(30)] {
            let model = Arc::new(Model::new(size as usize, BLOCK as u32));
            let backing = Arc::new(DeferringDevice::new(model, policy, seed));
            compare("deferred", backing, config, StateLocation::Volatile, seed, scaled(600));
        }
    }
}

#[test]
fn over_a_file_with_its_state() {
    let dir = tempfile::tempdir().unwrap();
    for (seed, (size, config)) in (500..).zip(configs()) {
        let path = dir.path().join(format!("{seed}.img"));
        let file = File::open(&file::Config { size: Some(size * 8), ..file::Config::new(path) }).unwrap();
        let config =
            Config { zone_size: config.zone_size * 8, zone_capacity: config.zone_capacity * 8, ..config };
        let state = dir.path().join(format!("{seed}.zones"));
        compare("file", Arc::new(file), config, StateLocation::File(&state), seed, scaled(250));
    }
}
